"""A vhost's directory: its queues by name, its message stores, and its state after the last stop.

Owns the directories of each queue, the number of entries in a segment, and the signs of RabbitMQ 4.x.  It only reads.
Damage is skipped and noted in `problems`, so that all whole parts can be read.  Rules: RabbitMQ 3.10.8
(docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import Any

import numpy as np

from rmqstore._shown import shows
from rmqstore.errors import CorruptionError, GeometryError, StoreClosedError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import open_regular, read_small_file
from rmqstore.rabbitmq import dets, layout, term
from rmqstore.rabbitmq.clean_state import clean_dot_values
from rmqstore.rabbitmq.index_directory import SEGMENT_NAME, check_entry_count, read_segment
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.live_index import IndexEntry
from rmqstore.rabbitmq.message_store import MessageStore, find_term
from rmqstore.rabbitmq.node import (
    QueueDefinition,
    data_directory,
    durable_queues,
    find_vhosts,
    is_vhost,
    store_path,
    unread_part_of,
)
from rmqstore.rabbitmq.problem import Problem, unreadable_file
from rmqstore.rabbitmq.queue import Queue, QueueDirectory, message_in

__all__ = ["Vhost"]

# The name of a queue's directory, a hash.
_HASH = re.compile(r"[0-9A-Z]{1,25}")
# Segments that are read for their number of entries: of a vhost, and of each queue.
_MOST_SEGMENTS, _SEGMENTS_OF_A_QUEUE = 64, 4


@shows(
    "clean", "client_refs", "close", "closed", "definitions", "directories", "incomplete", "is_pre_3_7", "name", "open",
    "path", "problems", "queue", "queues", "references", "segment_entry_count", "segment_entry_count_source",
    "store", "terms", "version_4",
)  # fmt: skip
class Vhost(NotCopied):
    """The directory of one vhost, opened by `Vhost.open`.

    Attributes
    ----------
    path : str
    name : str
        From ``.vhost``.
    segment_entry_count : int
        Entries in a segment of version 1.
    segment_entry_count_source : str
        ``"given"``, ``"config"``, ``"inferred"`` from the segments if ``.config`` cannot be right, or ``"default"``.
    terms : dict of str to dict
        Recovery terms by directory, empty after an unclean stop.
    problems : list of Problem
        Of the vhost's own small files.
    closed : bool
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a vhost is opened, not made: use Vhost.open(path)")

    def _take(self, path: str, segment_entry_count: int | None, check_terms: bool) -> None:
        self.path = path
        self.check_terms = check_terms
        self.closed = False
        queues = self._queue_directories()
        self.name = layout.read_vhost_name(self.path, queues)
        self.problems: list[Problem] = []
        self.segment_entry_count, self.segment_entry_count_source = _find_segment_count(
            self.path, segment_entry_count, queues, self.problems
        )
        self.terms = self._read_terms()
        # An error is kept for later calls.
        self._stores: dict[bool, MessageStore | OSError | None] = {}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        read_only: bool = True,
        segment_entry_count: int | None = None,
        check_terms: bool = False,
    ) -> Vhost:
        """Open the vhost in `path`; nothing is changed.

        Parameters
        ----------
        path : path
            ``<node's data directory>/msg_stores/vhosts/<name>``; of a node before 3.7, its data directory.
        read_only : bool
            Only True: `repair`, `import_messages`, `QueueIndex` and `MessageStore` write.
        segment_entry_count : int, optional
            By default that of ``.config``, or of the segments if that cannot be right.
        check_terms : bool
            Check every embedded message when an index is opened; `verify` does.

        Raises
        ------
        StoreError
            There is no such directory, or it is not a vhost.
        """
        if not read_only:
            raise ValueError(
                "a vhost is opened read-only: use rmqstore.rabbitmq.repair or import_messages, or QueueIndex and MessageStore, "
                "to write"
            )
        root = os.fspath(path)
        if not os.path.isdir(root):
            raise StoreError("there is no such directory", root)
        if not is_vhost(root):
            below = find_vhosts(root)
            raise StoreError(f"this directory is not a vhost, but has {len(below)}: open for instance {below[0]}", root)
        vhost = cls.__new__(cls)
        vhost._take(os.path.abspath(root), segment_entry_count, check_terms)
        return vhost

    def __enter__(self) -> Vhost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Vhost {self.name!r} in {self.path}>"

    def close(self) -> None:
        """Close all files."""
        if self.closed:
            return
        self.closed = True
        for directory in self.__dict__.get("directories", ()):
            directory.close()
        for store in self._stores.values():
            if isinstance(store, MessageStore):
                store.close()

    def summary(self) -> dict[str, Any]:
        """Summarize the vhost for the front ends."""
        queues = self.queues()
        return {
            "name": self.name,
            "path": self.path,
            "layout": "pre-3.7" if self.is_pre_3_7 else "3.7",
            "clean": self.clean,
            "segment_entry_count": self.segment_entry_count,
            "queues": len(queues),
            "messages": sum(queue.depth for queue in queues),
            "persistent_store": self._store_summary(True),
            "transient_store": self._store_summary(False),
        }

    def _store_summary(self, persistent: bool) -> dict[str, Any] | None:
        store = self.open_store(persistent)
        if isinstance(store, OSError):
            return {"unreadable": str(store)}
        if store is None:
            return None
        sizes = {"size": store.file_size, "valid_size": store.valid_size}
        return {"files": len(store.files), **sizes, "clean": store.clean}

    # ------------------------------------------------------------------------------------------------ small files

    @cached_property
    def is_pre_3_7(self) -> bool:
        """bool: the layout of before 3.7, in which all vhosts of a node share the directories."""
        return not os.path.exists(os.path.join(self.path, ".vhost")) and any(
            name.startswith(("rabbit_durable_queue.", "schema.DAT")) for name in listing(self.path).checked().names
        )

    def _queue_directories(self) -> list[str]:
        # `strays` has an error.
        return listing(os.path.join(self.path, "queues"), os.DirEntry.is_dir).names

    @cached_property
    def strays(self) -> list[Problem]:
        """list of Problem: other files than directories below ``queues``, by name; or the error of listing it."""
        folder = os.path.join(self.path, "queues")
        if not os.path.isdir(folder):
            return []
        detail = "there is something else than a queue's directory, or a link to nothing; put the directory back"
        found = listing(folder, lambda entry: not entry.is_dir())
        if found.error is not None:
            return [unreadable_file(folder, found.error)]
        return [Problem(path, 0, "no_directory", detail, None) for path in found.paths]

    @cached_property
    def incomplete(self) -> list[Problem]:
        """list of Problem: directories of queues that may be missing in `queues`, as they cannot be read."""
        return [each for each in self.strays if each.is_unreadable or self._may_be_queue(each.path)] + self.gone

    @cached_property
    def gone(self) -> list[Problem]:
        """list of Problem: missing directories of queues that had messages at a clean stop of the node."""
        if any(each.is_unreadable for each in self.strays):
            return []
        present = {each.name for each in self.directories} | {os.path.basename(each.path) for each in self.strays}
        detail = "there is no such directory, and the recovery terms say that it had {} messages; put it back"
        return [
            Problem(os.path.join(self.path, "queues", name), None, "missing_directory", detail.format(count))
            for name, count in ((name, each.get("persistent_count")) for name, each in self.terms.items())
            if type(count) is int and count > 0 and name not in present
        ]

    @cached_property
    def has_unused(self) -> bool:
        """bool: the persistent message store has, or may have, messages that no live entry refers to."""
        store = self.open_store(True)
        # A clean state counts the references of the last stop.
        return isinstance(store, MessageStore) and any(
            each.file_size > (0 if store.clean else each.valid_size) for each in store.files.values()
        )

    @property
    def known_directories(self) -> dict[str, QueueName]:
        """The directories that the node's durable queues may have, by name; empty if these are not known."""
        return {
            self.directory_of(each.vhost, each.name, level): QueueName(each.vhost, each.name, level)
            for each in (self.definitions or {}).values()
            for level in each.levels
        }

    def _may_be_queue(self, path: str) -> bool:
        name = os.path.basename(path)
        return _HASH.fullmatch(name) is not None if self.definitions is None else name in self.known_directories

    def _read_terms(self) -> dict[str, dict[str, Any]]:
        path = os.path.join(self.path, "recovery.dets")
        if not os.path.exists(path):
            return {}
        try:
            table = dets.read(path)
        except (StoreError, OSError) as error:
            self.problems.append(
                Problem(path, getattr(error, "pos", None) or 0, "bad_recovery_terms", str(error), None)
            )
            return {}
        found = dets.recovery_terms(table)
        self.problems += [
            Problem(path, problem.pos, "bad_recovery_terms", problem.detail, None) for problem in table.problems
        ]
        return found

    @cached_property
    def definitions(self) -> dict[tuple[str, str], QueueDefinition] | None:
        """dict or None: the durable queues of the node that this vhost is in, by vhost and name; None if not known."""
        folder = self.path if self.is_pre_3_7 else data_directory(self.path)
        try:
            return None if folder is None else durable_queues(folder)
        except OSError as error:
            self.problems.append(unreadable_file(folder or "", error))
            return None

    @cached_property
    def version_4(self) -> str | None:
        """str or None: the sign that RabbitMQ 4.x wrote this directory; None for 3.x.  In doubt version 2 means 4.x.

        4.3 ignores an index of version 1, so that nothing may be written into such a directory.
        """
        node = data_directory(self.path)
        if any(name.endswith(".sqs") for name in listing(store_path(self.path, True)).names):
            return "message files that end in .sqs"
        if any({"redeliver_seq_id", "delivery_count"} & each.keys() for each in self.terms.values()):
            return "recovery terms as 4.3 writes them"
        if (
            node is not None
            and os.path.isdir(os.path.join(node, "coordination"))
            and not os.path.lexists(os.path.join(node, "schema.DAT"))
        ):
            return "no Mnesia tables: the node keeps its queues in Khepri"
        stubs = [each.queue_name.index_version if each.queue_name else 1 for each in self.directories]
        if any(each.has_version_1 and version == 1 for each, version in zip(self.directories, stubs, strict=True)):
            return None
        path = os.path.join(store_path(self.path, True), "clean.dot")
        with contextlib.suppress(StoreError, OSError):
            stop = clean_dot_values(read_small_file(path) or b"", path)
            if stop:
                return None if "index_module" in stop else "a clean.dot as 4.x writes it"
        if 2 in stubs or any(each.index_version == 2 for each in self.directories):
            entries = chain.from_iterable(each.entries() for each in self.directories)
            messages = (message_in(self.term_of(entry)[0]) for entry in entries)
            forms = {message.form for message in messages if message is not None}
            return None if forms == {"basic_message"} else "queues of version 2, and no sign of 3.x"
        return None

    def refuse_version_4(self, advice: str) -> None:
        """Raise StoreError, with `advice` at its end, for a directory of 4.x."""
        if self.version_4 is not None:
            raise StoreError(
                f"this directory is of RabbitMQ 4.x ({self.version_4}); this version writes index version 1 only, which "
                f"a node of 4.3 or later ignores, with all messages in it; {advice}",
                self.path,
            )

    # ----------------------------------------------------------------------------------------------------- queues

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the vhost is closed; open it again", self.path)

    @cached_property
    def directories(self) -> list[QueueDirectory]:
        """list of QueueDirectory: all below ``queues``, by name."""
        found = [QueueDirectory(self, name) for name in self._queue_directories()]
        known = self.known_directories if any(each.queue_name is None for each in found) else {}
        for each in found:
            if each.queue_name is None:
                each.queue_name = known.get(each.name) or each.name_by_messages()
        return found

    def directory_of(self, vhost: str, queue: str, level: int | None = None) -> str:
        """Return a node's name for the directory of a queue, or of a level of it."""
        if not self.is_pre_3_7:
            return layout.queue_directory(vhost, queue, level)
        name = queue.encode("utf-8", "surrogateescape") + (b"" if level is None else bytes((0, level)))
        resource = (term.Atom("resource"), vhost.encode("utf-8", "surrogateescape"), term.Atom("queue"), name)
        return layout.base36_md5(term.encode(resource))

    def queues(self) -> list[Queue]:
        """Return the queues that have a directory, by name."""
        self._check_open()
        levels: dict[tuple[str, str], list[QueueDirectory]] = {}
        for directory in self.directories:
            vhost = directory.queue_name.vhost if directory.queue_name else self.name
            levels.setdefault((vhost, directory.owner), []).append(directory)
        definitions = self.definitions or {}
        return [
            Queue(self, *names, directories, definitions.get(names)) for names, directories in sorted(levels.items())
        ]

    def queue(self, name: str) -> Queue:
        """Return the queue of this name; a queue that was never written to has no directory, and is empty.

        StoreError if neither a directory nor the node's definitions have it, or for a quorum queue or a stream.
        """
        for each in self.queues():
            if each.name == name:
                return each
        definition = (self.definitions or {}).get((self.name, name))
        node = data_directory(self.path)
        part = unread_part_of(node, self.name, name)
        kind = part.kind if part is not None else ""
        if definition is not None and definition.type not in ("", "rabbit_classic_queue"):
            kind = kind or definition.type
        if kind:
            raise StoreError(
                f"queue {name!r} is a {kind}, not a classic queue: this version does not read it",
                part.path if part is not None else node,
            )
        if definition is not None:
            return Queue(self, self.name, name, [], definition)
        raise StoreError(f"there is no queue {name!r}", self.path)

    # --------------------------------------------------------------------------------------------------- messages

    def references(self) -> np.ndarray:
        """Return the message ids, (n, 16) uint8, of all live persistent entries whose message is in the store."""
        self._check_open()
        parts = [index.references() for each in self.directories for index in each.indexes]
        return np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)

    def client_refs(self) -> list[bytes]:
        """Return the references of the queues' recovery terms in the message store."""
        refs = [terms.get("persistent_ref") for terms in self.terms.values()]
        return [bytes(ref) for ref in refs if isinstance(ref, (bytes, bytearray))]

    def store(self, persistent: bool = True) -> MessageStore | None:
        """Open the persistent or the transient message store read-only; None if it does not exist.

        OSError, at every call, if its directory cannot be read.  A file that cannot be read is one of its `problems`.
        """
        found = self.open_store(persistent)
        if isinstance(found, OSError):
            raise found.with_traceback(None)
        return found

    def open_store(self, persistent: bool) -> MessageStore | OSError | None:
        """Return the result of `store`, or its error."""
        self._check_open()
        if persistent not in self._stores:
            path = store_path(self.path, persistent)
            self._stores[persistent] = None
            try:
                if os.path.isdir(path):
                    self._open_store(path, persistent)
            except OSError as error:
                self._stores[persistent] = error
        return self._stores[persistent]

    def _open_store(self, path: str, persistent: bool) -> None:
        refs: dict[str, Any] = {"references": self.references, "client_refs": self.client_refs()} if persistent else {}
        # `version_4` may need its messages.
        self._stores[persistent] = store = MessageStore.open(path, read_only=True, **refs)
        # A node of 4.x compacts files in place: zeros and copies in the middle are not damage.
        if persistent and store.problems and not store.clean and self.version_4:
            store.close()
            self._stores[persistent] = MessageStore.open(path, read_only=True, scan="bytewise", **refs)

    @cached_property
    def clean(self) -> bool:
        """bool: the last stop was clean, so that a node keeps numbers and redelivered flags of all queues."""
        if not self.terms:
            return False
        store = self.open_store(True)
        return not isinstance(store, OSError) and (store is None or store.clean)

    def term_of(self, entry: IndexEntry) -> tuple[bytes | None, CorruptionError | OSError | None]:
        """Return the term of an entry's message, or None and why it cannot be read, as `find_term` does."""
        if entry.message is not None:
            return entry.message, None
        return find_term(self.store, entry.msg_id, entry.persistent, entry.path)


# --------------------------------------------------------------------------------------------------- entries a segment


def _find_segment_count(
    path: str, given: int | None, queues: Sequence[str], problems: list[Problem]
) -> tuple[int, str]:
    """Find the number of entries in a segment of version 1, and its `Vhost.segment_entry_count_source`.

    With a wrong number, marks of the journal would belong to other entries.
    """
    if given is not None:
        check_entry_count(given, path)
        return given, "given"
    config = os.path.join(path, ".config")

    def note(kind: str, detail: str) -> None:
        problems.append(Problem(config, 0, kind, detail, None))

    configured: int | None = None
    try:
        configured = layout.read_segment_entry_count(path)
        if configured is None and queues:
            note("missing_config", "there is no such file; a node takes 16384 entries a segment then")
    except (CorruptionError, GeometryError) as error:
        # A node ignores a file that is not Erlang text; one without the number ends its boot.
        note("bad_config" if _is_erlang(config) else "unreadable_config", error.message)
    except OSError as error:
        note("unreadable_config", f"it cannot be read: {error.strerror}")
    shown, full = _segments_show(path, queues)
    if configured is not None:
        if shown < configured and full in (None, configured):
            return configured, "config"
        says = (
            f"a segment has entry {shown}"
            if shown >= configured
            else f"all segments with another after them end at entry {shown}"
        )
        note("segment_entry_count_mismatch", f"it says {configured} entries a segment, but {says}")
    if full is not None:
        return full, "inferred"
    # Without the file, the number of a node before 3.8.17.
    is_there = os.path.exists(config)
    if is_there and shown < layout.DEFAULT_SEGMENT_ENTRY_COUNT:
        return layout.DEFAULT_SEGMENT_ENTRY_COUNT, "inferred"
    inferred = is_there and shown < layout.LEGACY_SEGMENT_ENTRY_COUNT
    return layout.LEGACY_SEGMENT_ENTRY_COUNT, "inferred" if inferred else "default"


def _is_erlang(path: str) -> bool:
    try:
        with open(open_regular(path), "rb") as file:
            term.consult(file.read(1 << 16))
    except (StoreError, OSError):
        return False
    return True


def _segments_show(path: str, queues: Iterable[str]) -> tuple[int, int | None]:
    """Return the highest entry number in any segment, and the count if segments with others after them show it.

    Full segments end at the same entry.  One is enough for the two counts that nodes use; another count needs two
    segments, and has to be a power of two.  A number without a neighbour is damage.
    """
    highest, looked = -1, 0
    tops: list[int] = []
    for name in queues:
        folder = os.path.join(path, "queues", name)
        segments = sorted(filter(SEGMENT_NAME.fullmatch, listing(folder).names), key=lambda each: int(each[:-4]))
        for segment in segments[:_SEGMENTS_OF_A_QUEUE]:
            looked += 1
            with contextlib.suppress(OSError):
                columns, _ = read_segment(
                    os.path.join(folder, segment), layout.MAX_SEGMENT_ENTRY_COUNT, number=0, check_terms=False
                )
                rels = np.unique(columns.seq_id)
                pairs = np.flatnonzero(rels[1:] == rels[:-1] + 1)
                if len(pairs):
                    top = int(rels[pairs[-1] + 1])
                    highest = max(highest, top)
                    if segment != segments[-1]:
                        tops.append(top)
        if looked >= _MOST_SEGMENTS:
            break
    full = max(tops, default=-1) + 1
    usual = (layout.DEFAULT_SEGMENT_ENTRY_COUNT, layout.LEGACY_SEGMENT_ENTRY_COUNT)
    alike = bool(tops) and min(tops) == max(tops) and highest < full
    if alike and (full in usual or (len(tops) > 1 and full >= 16 and full & (full - 1) == 0)):
        return highest, full
    return highest, None
