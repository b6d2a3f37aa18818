"""A vhost's directory: its queues by name, and their messages wherever they lie.

Owns which directories belong to which queue, which state the last stop left (clean, or not), and how an index entry and its
message come together.  It only reads; what writes is `QueueIndex`, `MessageStore`, and the functions of `repair` and
`importing`.  What is damaged is passed over and noted in `problems`, so that everything that is whole can be read.  Rules:
RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore._shown import shows
from rmqstore.errors import CorruptionError, GeometryError, StoreClosedError, StoreError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import is_directory, open_regular, read_small_file
from rmqstore.files.os_errors import failed_read
from rmqstore.rabbitmq import dets, layout, term
from rmqstore.rabbitmq._core import MAX_SEQ_ID
from rmqstore.rabbitmq.batches import COLUMNS, Batches, LostMessage, LostMessages, undecoded
from rmqstore.rabbitmq.definitions import QueueDefinition, data_directory, durable_queues
from rmqstore.rabbitmq.ets import clean_dot_values
from rmqstore.rabbitmq.index_columns import IndexEntry
from rmqstore.rabbitmq.index_files import JOURNAL, SEGMENT_NAME, read_segment
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import STORES, is_vhost, nodes_below, unread_part_of, unread_parts
from rmqstore.rabbitmq.problem import UNREADABLE, Problem, unreadable_file
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2, both

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Queue", "QueueDirectory", "QueuedMessage", "Vhost", "find_vhosts"]

logger = logging.getLogger(__name__)

_V1_FILE = re.compile(r"\d+\.idx|journal\.jif")
_V2_FILE = re.compile(r"\d+\.q[is]")
_SEGMENT = re.compile(r"(\d+)\.idx")
# What hides no live entry: a node passes over it, or it is about numbers.  All else of an index may.
_HIDES_NOTHING = {"nul_file", "memory_only", "bad_terms", "next_seq_id_too_low"}
_HIDES_NOTHING_IN_JOURNAL = {"ack_without_publish"}
# What the hash of a queue's name looks like.
_HASH = re.compile(r"[0-9A-Z]{1,25}")


def find_vhosts(path: str | os.PathLike[str]) -> list[str]:
    """Find the vhost directories at or below a path.

    Parameters
    ----------
    path : path
        A vhost's directory, a node's data directory, or one between.

    Returns
    -------
    list of str
        Sorted.

    Raises
    ------
    StoreError
        There are none.
    PermissionError
        This user may not look.
    """
    root = os.fspath(path)
    if not is_directory(root):
        raise StoreError("this is a file, not a directory" if os.path.isfile(root) else "there is no such directory", root)
    if is_vhost(root):
        return [root]
    for below in ("msg_stores/vhosts", "vhosts", ""):
        folder = os.path.join(root, below) if below else root
        if is_directory(folder):
            found = [path for path in listing(folder).checked().paths if is_vhost(path)]
            if found:
                return found
    nodes = [os.path.join(root, os.path.relpath(each, root)) for each in nodes_below(root)]
    above = _vhost_above(root)
    parts = unread_parts(root)
    if above is not None:
        message = f"this is a part of a vhost: give the vhost's directory, {above}"
    elif parts:
        nums = Counter(part.kind for part in parts)
        kinds = ", ".join(f"{number} x {kind}" for kind, number in nums.items())
        message = f"this node's directory has no classic queues, and this version reads nothing else; it has {kinds}"
    elif nodes:
        more = f" (and {len(nodes) - 10} more)" if len(nodes) > 10 else ""
        newest = max(nodes, key=_last_written)
        message = (
            f"this directory holds {len(nodes)} nodes: {', '.join(nodes[:10])}{more}; give one of them, of which "
            f"{newest} was written to last"
            if len(nodes) > 1
            else f"this directory holds a node: give {nodes[0]}"
        )
    elif os.path.basename(os.path.abspath(root)) in ("quorum", "stream", "coordination"):
        message = (
            "these are a node's quorum queues, streams or metadata, which this version does not read; give the node's "
            "data directory or a vhost for its classic queues"
        )
    else:
        message = (
            "this is not a vhost and has none: give a directory that holds queues/ and msg_store_persistent/, as "
            "<node's data directory>/msg_stores/vhosts/<name> does, or the node's data directory"
        )
    raise StoreError(message, root)


def _vhost_above(path: str) -> str | None:
    # Of queues/<directory> two above.
    at = os.path.abspath(path)
    for _ in range(2):
        at, name = os.path.split(at)
        if name in ("queues", *STORES) and is_vhost(at):
            return at
    return None


def _last_written(node: str) -> float:
    places = (node, os.path.join(node, "msg_stores", "vhosts"))
    inside = [entry.stat().st_mtime for place in places for entry in listing(place).existing()]
    return max([os.stat(node).st_mtime, *inside])


def store_path(vhost_path: str, persistent: bool) -> str:
    """str: the directory of a vhost's persistent or transient message store."""
    return os.path.join(vhost_path, STORES[0 if persistent else 1])


def is_journal_end(index: QueueIndex, problem: Problem) -> bool:
    """bool: a problem of the journal is what a crash leaves at its end, cut or never written."""
    return problem.kind in ("zero_tail", "nul_file") or (
        problem.kind == "torn_record" and (problem.pos or 0) >= index.journal_size
    )


class QueueDirectory(NotCopied):
    """One directory below ``queues``: a queue, or one level of a priority queue.

    Attributes
    ----------
    path : str
    name : str
        The directory's own name.
    queue_name : QueueName or None
        Whose it is; None where nothing tells.
    index_version : int
        1 or 2; 2 also while a node is half-way from one to the other.
    terms : dict or None
        The queue's recovery terms, if the last stop left any.
    """

    def __init__(self, vhost: Vhost, name: str):
        self._vhost = vhost
        self.name = name
        self.path = os.path.join(vhost.path, "queues", name)
        self.terms: dict[str, Any] | None = vhost.terms.get(name)
        self.queue_name: QueueName | None = None
        self.files: list[str] = []
        # What of it cannot be opened, so that the queue is read without it.
        self.unreadable: list[Problem] = []
        if os.path.isdir(self.path):
            found = listing(self.path)
            self.files = found.names
            if found.error is not None:
                self.unreadable.append(unreadable_file(self.path, found.error))
        self.index_version = 2 if any(map(_V2_FILE.fullmatch, self.files)) else 1
        try:
            with open(open_regular(os.path.join(self.path, ".queue_name")), "rb") as file:
                self.queue_name = layout.parse_queue_name(file.read(1 << 16))
        except OSError:
            pass

    def __repr__(self) -> str:
        return f"<QueueDirectory {self.name} of {self.queue_name}>"

    @property
    def is_misplaced(self) -> bool:
        """bool: its stub names a queue whose directory has another name, so that no node takes it for that queue's."""
        name = self.queue_name
        return name is not None and self._vhost.directory_of(name.vhost, name.queue, name.priority) != self.name

    @property
    def clean(self) -> bool:
        """bool: its recovery terms are there and are what a node goes by."""
        if self.terms is None:
            return False
        if self.index_version == 2:
            return "v2_index_state" in self.terms and bool(self.indexes) and self.indexes[-1].recovered_clean
        clean = all(isinstance(index, QueueIndex) and index.recovered_clean for index in self.indexes)
        return clean and not self.unreadable

    @staticmethod
    def is_read(name: str) -> bool:
        """bool: a file of this name is one that a node, or a person who looks for a queue, reads."""
        return name == ".queue_name" or any(pattern.fullmatch(name) for pattern in (_V1_FILE, _V2_FILE))

    @property
    def is_without_index(self) -> bool:
        """bool: a queue of version 1 without journal and segments, one of which a node makes along with the stub."""
        stub = self.queue_name is not None and self.queue_name.index_version == 1 and ".queue_name" in self.files
        return stub and self.index_version == 1 and not self.has_version_1

    @property
    def has_version_1(self) -> bool:
        """bool: there is a journal or a segment of version 1."""
        return any(map(_V1_FILE.fullmatch, self.files))

    @cached_property
    def indexes(self) -> list[QueueIndex | QueueIndexV2]:
        """The indexes, opened read-only: one, or both while a node is half-way from version 1 to 2.

        None where the directory cannot be read; `problems` says why.
        """
        found: list[QueueIndex | QueueIndexV2] = []
        if self.unreadable:
            return found
        try:
            if self.has_version_1 or self.index_version == 1:
                terms = self.terms if self.terms is not None and "segments" in self.terms else None
                found.append(
                    QueueIndex.open(
                        self.path,
                        segment_entry_count=self._vhost.segment_entry_count,
                        read_only=True,
                        terms=terms,
                        check_terms=self._vhost.check_terms,
                    )
                )
            if self.index_version == 2:
                found.append(QueueIndexV2.open(self.path, terms=self.terms))
        except OSError as error:
            self.unreadable.append(unreadable_file(self.path, error))
        return found

    def entries(self) -> Iterator[IndexEntry]:
        """IndexEntry: what is live, in the order of sequence ids."""
        # A node that was stopped half-way has some entries in both.
        yield from (both(*self.indexes) if len(self.indexes) == 2 else chain.from_iterable(self.indexes))

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: what was met in the files of the index."""
        return [problem for index in self.indexes for problem in index.problems] + self.unreadable

    @property
    def incomplete(self) -> list[Problem]:
        """list of Problem: those of `problems` behind which live entries may stand that nobody can list."""
        found = [problem for index in self.indexes for problem in index.problems if self._hides(index, problem)]
        if self.is_without_index and self._vhost.has_unused:
            detail = (
                "there is neither a journal nor a segment; whole messages that no index has may be of this queue "
                "(rmqstore rabbitmq dump --unreferenced)"
            )
            found.append(Problem(self.path, None, "missing_index", detail))
        return found + self.unreadable

    def _hides(self, index: QueueIndex | QueueIndexV2, problem: Problem) -> bool:
        if isinstance(index, QueueIndex) and os.path.basename(problem.path) == JOURNAL:
            if is_journal_end(index, problem):
                # As after a crash: what is cut there was never whole.  After an orderly stop all of it was.
                return index.recovered_clean
            if problem.kind in _HIDES_NOTHING_IN_JOURNAL:
                return False
        if problem.kind == "segment_count_mismatch" and isinstance(index, QueueIndex):
            return self._lacks_entries(index, problem.path)
        return problem.kind not in _HIDES_NOTHING

    def _lacks_entries(self, index: QueueIndex, path: str) -> bool:
        # A segment that went away after an orderly stop leaves only what the recovery terms say of it.
        match = SEGMENT_NAME.fullmatch(os.path.basename(path))
        number = int(match[1]) if match else -1
        if not 0 <= number <= MAX_SEQ_ID // index.segment_entry_count:
            return False
        stated = (self.terms or {})["segments"]
        pairs = stated.items() if isinstance(stated, Mapping) else stated
        return index.segments.get(number, 0) < {int(key): int(count) for key, count in pairs}.get(number, 0)

    def close(self) -> None:
        """Close the files that are open."""
        for index in self.__dict__.pop("indexes", []):
            if isinstance(index, QueueIndex):
                index.close()


class QueuedMessage:
    """A message in a queue: where it stands, and what it is.

    Attributes
    ----------
    seq_id : int
        Its number in the queue, or in its level of a priority queue.
    msg_id : bytes
        16 bytes; copies of one message in several queues share it.
    expiry : int or None
        When it expires, in ms since epoch.
    delivered : bool
        The real node would deliver it with the redelivered flag.
    persistent : bool
        It outlives a restart of the node.
    level : int or None
        The level of a priority queue that it lies in.
    size : int
        Of the body, in bytes, as the index says.
    location : str
        ``"index"`` (embedded), ``"store"`` (the vhost's message store) or ``"queue"`` (the queue's own, version 2).
    body, properties, exchange, routing_keys, vhost, term
        As of `Message`.
    """

    __slots__ = ("delivered", "expiry", "level", "location", "message", "msg_id", "persistent", "seq_id", "size")

    def __init__(self, entry: IndexEntry, message: Message, level: int | None, location: str):
        self.seq_id = entry.seq_id
        self.msg_id = entry.msg_id
        self.expiry = entry.expiry
        self.delivered = entry.delivered
        self.persistent = entry.persistent
        self.size = entry.size
        self.level = level
        self.location = location
        self.message = message

    def __repr__(self) -> str:
        return f"<QueuedMessage seq_id={self.seq_id} {self.size} bytes, {self.location}>"

    @property
    def body(self) -> bytes:
        """The body, as a publisher sent it."""
        return self.message.body

    @property
    def properties(self) -> dict[str, Any]:
        """The AMQP properties that are present, by name."""
        return self.message.properties

    @property
    def exchange(self) -> str:
        """The exchange it was published to; empty for the default one."""
        return self.message.exchange

    @property
    def routing_keys(self) -> list[str]:
        """Its routing keys, those of CC and BCC included."""
        return self.message.routing_keys

    @property
    def vhost(self) -> str:
        """The vhost that the message's own term names."""
        return self.message.vhost or ""

    @property
    def term(self) -> bytes:
        """The message as a term of Erlang's external format."""
        return self.message.term


class Queue(NotCopied):
    """A queue of a vhost, opened by `Vhost.queues` or `Vhost.queue`.

    Attributes
    ----------
    name : str
        As declared; of a directory whose queue nothing tells, the directory's name in angle brackets.
    vhost : str
    directories : list of QueueDirectory
        One; of a priority queue one for each level that has been written to, the lowest first.
    definition : QueueDefinition or None
        As the node's Mnesia files have it; None where they are not there or do not know it.
    """

    def __init__(self, owner: Vhost, name: str, directories: list[QueueDirectory], definition: QueueDefinition | None):
        self._vhost = owner
        self.name = name
        self.vhost = owner.name
        self.directories = directories
        self.definition = definition

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} of vhost {self.vhost!r}>"

    @property
    def path(self) -> str:
        """str: its directory; the lowest level's, of a priority queue."""
        return self.directories[0].path if self.directories else ""

    @property
    def index_version(self) -> int:
        """int: 1 or 2."""
        return max((each.index_version for each in self.directories), default=1)

    @property
    def depth(self) -> int:
        """int: messages that are live on disk, transient ones among them."""
        return sum(index.depth for each in self.directories for index in each.indexes)

    @property
    def size(self) -> int:
        """int: bytes of the bodies of these messages, as the index says."""
        return sum(_body_size(index) for each in self.directories for index in each.indexes)

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: what is damaged in its index files; `rmqstore.rabbitmq.verify` says more."""
        return [problem for each in self.directories for problem in each.problems]

    @property
    def incomplete(self) -> list[Problem]:
        """list of Problem: those of them behind which live messages may stand that are neither given nor counted."""
        return [problem for each in self.directories for problem in each.incomplete]

    def messages(
        self, on_lost: Callable[[LostMessage], None] | None = None, *, decoded: bool = False
    ) -> Iterator[QueuedMessage]:
        """The live messages, oldest first; of a priority queue the highest level first, as the node delivers.

        A message whose bytes are lost, or are of a protocol that is not decoded here, counts in `depth` and cannot be
        given.  What stands behind damage of the index is not even counted: `incomplete` says where that may be.

        Parameters
        ----------
        on_lost : callable, optional
            Told of each such message in its turn; by default a warning at the end says how many there were, and another
            one where messages may be missing.
        decoded : bool
            Do not give a message whose properties cannot be decoded, but tell of it too.
        """
        lost = LostMessages(on_lost)
        for directory in reversed(self.directories):
            level = directory.queue_name.priority if directory.queue_name else None
            for entry in directory.entries():
                unread = ""
                try:
                    found = self._vhost.message_of(entry)
                except OSError as error:
                    found, unread = None, str(error)
                reason = None if found is None else undecoded(found[0], decoded)
                if found is not None and reason is None:
                    yield QueuedMessage(entry, found[0], level, found[1])
                else:
                    # An id of zeros is that of a damaged message in a queue's own file.
                    embedded = entry.message is not None or not any(entry.msg_id)
                    place = (entry.path, embedded, entry.pos or 0, reason or unread, reason is not None)
                    lost.add(LostMessage(self.name, entry.seq_id, entry.msg_id, level, *place))
        lost.warn()
        if on_lost is None:
            self.warn_incomplete()

    def warn_incomplete(self) -> None:
        """Log one warning where `incomplete` has anything."""
        problems = self.incomplete
        if problems:
            logger.warning(
                "queue %s: messages may be left out, as its index cannot be read everywhere; places: %d, "
                "the first is %s: %s: %s; verify says more",
                self.name,
                len(problems),
                problems[0].place,
                problems[0].kind,
                problems[0].detail,
            )

    def batches(
        self, columns: Sequence[str] = COLUMNS, on_lost: Callable[[LostMessage], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same messages as Arrow record batches, of which only the asked columns are decoded.

        Parameters
        ----------
        columns : sequence of str
            Of `rmqstore.rabbitmq.batches.COLUMNS`, which `rmqstore.rabbitmq.batches.schema` describes.
        on_lost : callable, optional
            As of `messages`.

        Raises
        ------
        ValueError
            There is no such column.
        MissingDependencyError
            pyarrow is not installed.
        """
        for directory in reversed(self.directories):
            yield from Batches(
                directory.path,
                directory.indexes,
                directory.entries(),
                self._vhost.store,
                vhost=self.vhost,
                queue=self.name,
                level=directory.queue_name.priority if directory.queue_name else None,
                columns=columns,
                on_lost=on_lost,
            )
        if on_lost is None:
            self.warn_incomplete()


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
        As ``.vhost`` says.
    segment_entry_count : int
        Entries a segment of version 1.
    segment_entry_count_source : str
        ``"given"``, ``"config"``, ``"inferred"`` from the segments where ``.config`` cannot be right, or ``"default"``.
    terms : dict of str to dict
        Recovery terms by directory, empty after an unclean stop.
    problems : list of Problem
        What was met in the vhost's own small files.
    closed : bool
        `close` was called.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a vhost is opened, not made: use Vhost.open(path)")

    def _take(self, path: str, segment_entry_count: int | None, check_terms: bool) -> None:
        self.path = path
        self.check_terms = check_terms
        self.problems: list[Problem] = []
        self.closed = False
        self.name = self._read_name()
        self.segment_entry_count, self.segment_entry_count_source = self._find_segment_entry_count(segment_entry_count)
        self.terms = self._read_terms()
        self._stores: dict[bool, MessageStore | None] = {}
        self._store_errors: dict[bool, OSError] = {}

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
            Only True is possible: a vhost is written through `repair`, `import_messages`, `QueueIndex` and `MessageStore`.
        segment_entry_count : int, optional
            By default what ``.config`` says, or what the segments show where that cannot be right.
        check_terms : bool
            Look at every embedded message when an index is opened; `verify` does.

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
        # Whole, as the paths of problems are.
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
            if store is not None:
                store.close()

    # ------------------------------------------------------------------------------------------------ small files

    def _read_name(self) -> str:
        try:
            with open(open_regular(os.path.join(self.path, ".vhost")), "rb") as file:
                return file.read(1 << 16).decode("utf-8", "surrogateescape")
        except OSError:
            return self._name_elsewhere()

    def _name_elsewhere(self) -> str:
        # What the stubs of the queues say; a node of before 3.7 wrote neither.
        folder = os.path.join(self.path, "queues")
        for name in self._queue_directories():
            try:
                with open(open_regular(os.path.join(folder, name, ".queue_name")), "rb") as file:
                    found = layout.parse_queue_name(file.read(1 << 16))
            except OSError:
                continue
            if found is not None and layout.vhost_directory(found.vhost) == os.path.basename(self.path):
                return found.vhost
        return "/" if os.path.basename(self.path) == layout.vhost_directory("/") else ""

    @cached_property
    def is_pre_3_7(self) -> bool:
        """bool: laid out as before 3.7, where all vhosts of a node share the directories."""
        return not os.path.exists(os.path.join(self.path, ".vhost")) and any(
            name.startswith(("rabbit_durable_queue.", "schema.DAT")) for name in listing(self.path).checked().names
        )

    def _find_segment_entry_count(self, given: int | None) -> tuple[int, str]:
        if given is not None:
            if not 1 <= given <= layout.MAX_SEGMENT_ENTRY_COUNT:
                raise GeometryError(
                    f"segment_entry_count is {given}, not between 1 and {layout.MAX_SEGMENT_ENTRY_COUNT}", self.path
                )
            return given, "given"
        path = os.path.join(self.path, ".config")
        configured: int | None = None
        try:
            configured = layout.read_segment_entry_count(self.path)
            if configured is None and self._queue_directories():
                self.problems.append(
                    Problem(
                        path,
                        0,
                        "missing_config",
                        "there is no such file; a node takes 16384 entries a segment then",
                        None,
                    )
                )
        except (CorruptionError, GeometryError) as error:
            # What is not Erlang text a node takes for missing; what is one without the number ends its boot.
            kind = "bad_config" if self._is_erlang(path) else "unreadable_config"
            self.problems.append(Problem(path, 0, kind, error.message, None))
        except OSError as error:
            self.problems.append(Problem(path, 0, "unreadable_config", f"it cannot be read: {error.strerror}", None))
        shown, full = self._segments_show()
        if configured is not None and shown < configured and full in (None, configured):
            return configured, "config"
        if configured is not None:
            detail = (
                f"it says {configured} entries a segment, but a segment has entry {shown}"
                if shown >= configured
                else f"it says {configured} entries a segment, but all segments with another after them end at entry {shown}"
            )
            self.problems.append(Problem(path, 0, "segment_entry_count_mismatch", detail, None))
        if full is not None:
            return full, "inferred"
        for count in (layout.DEFAULT_SEGMENT_ENTRY_COUNT, layout.LEGACY_SEGMENT_ENTRY_COUNT):
            # Without the file, what a node takes then, and what one before 3.8.17 meant.
            if shown < count and (os.path.exists(path) or count == layout.LEGACY_SEGMENT_ENTRY_COUNT):
                return count, "inferred" if os.path.exists(path) else "default"
        return layout.LEGACY_SEGMENT_ENTRY_COUNT, "default"

    def _is_erlang(self, path: str) -> bool:
        try:
            with open(open_regular(path), "rb") as file:
                term.consult(file.read(1 << 16))
        except (StoreError, OSError):
            return False
        return True

    def _segments_show(self) -> tuple[int, int | None]:
        """The highest entry number in any segment, and the count if it can be told from segments with others after them.

        Segments that are not the last of their queue end at the same entry, if that is where a segment is full.  One is
        enough for the two counts that nodes use; for others there must be more, and a power of two.  Only entry numbers with a
        neighbour count: a single one is damage of that record.
        """
        highest, looked = -1, 0
        tops: list[int] = []
        for name in self._queue_directories():
            folder = os.path.join(self.path, "queues", name)
            segments = sorted(filter(_SEGMENT.fullmatch, listing(folder).names), key=lambda each: int(each[:-4]))
            for segment in segments[:4]:
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
                looked += 1
            if looked >= 64:
                break
        full = max(tops, default=-1) + 1
        usual = (layout.DEFAULT_SEGMENT_ENTRY_COUNT, layout.LEGACY_SEGMENT_ENTRY_COUNT)
        alike = bool(tops) and min(tops) == max(tops) and highest < full
        if alike and (full in usual or (len(tops) > 1 and full >= 16 and full & (full - 1) == 0)):
            return highest, full
        return highest, None

    def _queue_directories(self) -> list[str]:
        # An error is one of `strays`.
        return listing(os.path.join(self.path, "queues"), os.DirEntry.is_dir).names

    @cached_property
    def strays(self) -> list[Problem]:
        """list of Problem: what lies below ``queues`` and is no directory, by name; or why that cannot be listed."""
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
        """list of Problem: where a queue may be that is not among `queues`, since its directory is not there to be read."""
        return [each for each in self.strays if each.kind == UNREADABLE or self._may_be_queue(each.path)] + self.gone

    @cached_property
    def gone(self) -> list[Problem]:
        """list of Problem: directories that are not there, of queues that had messages when the node stopped cleanly."""
        if any(each.kind == UNREADABLE for each in self.strays):
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
        store = self.store() if self.open_store(True) is None else None
        # A clean state counts the references of the last stop.
        return store is not None and any(
            each.file_size > (0 if store.clean else each.valid_size) for each in store.files.values()
        )

    def _may_be_queue(self, path: str) -> bool:
        # As far as that can be told.
        name = os.path.basename(path)
        if self.definitions is None:
            return _HASH.fullmatch(name) is not None
        return any(
            name == self.directory_of(each.vhost, each.name, level)
            for each in self.definitions.values()
            for level in each.levels
        )

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
        """dict or None: the durable queues of the node that this vhost stands in, by vhost and name; None if not known."""
        folder = self.path if self.is_pre_3_7 else data_directory(self.path)
        try:
            return None if folder is None else durable_queues(folder)
        except OSError as error:
            self.problems.append(unreadable_file(folder or "", error))
            return None

    @cached_property
    def version_4(self) -> str | None:
        """str or None: what shows that RabbitMQ 4.x wrote this directory; None for one of 3.x.

        4.x writes no index of version 1, and 4.3 ignores one, so that nothing may be written here.  In doubt a
        directory with queues of version 2 is one of 4.x.
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
        stop = self._clean_stop()
        if stop:
            return None if "index_module" in stop else "a clean.dot as 4.x writes it"
        if 2 in stubs or any(each.index_version == 2 for each in self.directories):
            forms = set(map(self._form, chain.from_iterable(each.entries() for each in self.directories)))
            return None if forms - {None} == {"basic_message"} else "queues of version 2, and no sign of 3.x"
        return None

    def _clean_stop(self) -> dict[str, Any]:
        path = os.path.join(store_path(self.path, True), "clean.dot")
        try:
            return clean_dot_values(read_small_file(path) or b"", path=path)
        except (StoreError, OSError):
            return {}

    def _form(self, entry: IndexEntry) -> str | None:
        try:
            found = self.message_of(entry)
        except OSError:
            return None
        return None if found is None else found[0].form

    def refuse_version_4(self, advice: str) -> None:
        """Raise StoreError, which ends with `advice`, where `version_4` shows a directory of 4.x."""
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
        unnamed = {each.name: each for each in found if each.queue_name is None}
        if unnamed:
            for definition in (self.definitions or {}).values():
                for level in definition.levels:
                    name = self.directory_of(definition.vhost, definition.name, level)
                    if name in unnamed:
                        unnamed[name].queue_name = QueueName(definition.vhost, definition.name, level)
            for each in unnamed.values():
                if each.queue_name is None:
                    each.queue_name = self._name_by_messages(each)
        return found

    def _name_by_messages(self, directory: QueueDirectory) -> QueueName | None:
        # Of what went through the default exchange the routing key is the queue's name, and its hash must be the directory's.
        tried: set[str] = set()
        for number, entry in enumerate(directory.entries()):
            if number == 64:
                break
            try:
                message = Message.from_term(entry.message) if entry.message is not None else None
                keys = message.routing_keys if message is not None else []
                vhost = (message.vhost if message is not None else None) or self.name
            except StoreError:
                continue
            for key in keys:
                if key not in tried:
                    tried.add(key)
                    for level in (None, *range(256)):
                        if self.directory_of(vhost, key, level) == directory.name:
                            return QueueName(vhost, key, level)
        return None

    def directory_of(self, vhost: str, queue: str, level: int | None = None) -> str:
        """str: the name that a node gives the directory of a queue, or of a level of it."""
        if not self.is_pre_3_7:
            return layout.queue_directory(vhost, queue, level)
        name = queue.encode("utf-8", "surrogateescape") + (b"" if level is None else bytes((0, level)))
        resource = (term.Atom("resource"), vhost.encode("utf-8", "surrogateescape"), term.Atom("queue"), name)
        return layout.base36_md5(term.encode(resource, atoms="latin1"))

    def queues(self) -> list[Queue]:
        """list of Queue: those that have a directory, by name."""
        self._check_open()
        levels: dict[tuple[str, str], list[QueueDirectory]] = {}
        for directory in self.directories:
            stub = directory.queue_name
            key = (self.name, f"<{directory.name}>") if stub is None else (stub.vhost, stub.queue)
            levels.setdefault(key, []).append(directory)
        found = []
        for (vhost, name), directories in levels.items():
            directories.sort(key=lambda each: (each.queue_name.priority or 0) if each.queue_name else 0)
            queue = Queue(self, name, directories, (self.definitions or {}).get((vhost, name)))
            queue.vhost = vhost
            found.append(queue)
        return sorted(found, key=lambda each: (each.vhost, each.name))

    def queue(self, name: str) -> Queue:
        """Queue: the one of this name; a queue that was never written to has no directory, and is empty.

        Raises
        ------
        StoreError
            No directory is this queue's, and the node's definitions do not name it; or it is a quorum queue or a
            stream.
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
            return Queue(self, name, [], definition)
        raise StoreError(f"there is no queue {name!r}", self.path)

    # --------------------------------------------------------------------------------------------------- messages

    def references(self) -> np.ndarray:
        """ndarray: message ids, ``(n, 16)`` uint8, of all live persistent entries whose message lies in the store."""
        self._check_open()
        parts = [index.references() for each in self.directories for index in each.indexes]
        return np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)

    def client_refs(self) -> list[bytes]:
        """list of bytes: what the queues' recovery terms are known by in the message store."""
        refs = [terms.get("persistent_ref") for terms in self.terms.values()]
        return [bytes(ref) for ref in refs if isinstance(ref, (bytes, bytearray))]

    def store(self, persistent: bool = True) -> MessageStore | None:
        """MessageStore or None: the persistent or the transient message store, opened read-only; None if there is none.

        Raises
        ------
        OSError
            Its directory cannot be read; of a file of it, that is one of its `problems`.  Every call says the same.
        """
        self._check_open()
        if persistent in self._store_errors:
            raise self._store_errors[persistent].with_traceback(None)
        if persistent not in self._stores:
            path = store_path(self.path, persistent)
            try:
                self._stores[persistent] = self._open_store(path, persistent) if os.path.isdir(path) else None
                store = self._stores[persistent]
                # A node of 4.x compacts files in place: zeros and copies in the middle are no damage.
                if persistent and store is not None and store.problems and not store.clean and self.version_4:
                    store.close()
                    self._stores[persistent] = self._open_store(path, persistent, "bytewise")
            except OSError as error:
                self._stores.pop(persistent, None)
                self._store_errors[persistent] = error
                raise
        return self._stores[persistent]

    def _open_store(self, path: str, persistent: bool, scan: str = "auto") -> MessageStore:
        return MessageStore.open(
            path,
            read_only=True,
            # Nothing refers to a transient message but the queue that has it on disk.
            references=self.references if persistent else None,
            client_refs=self.client_refs() if persistent else None,
            scan=scan,
        )

    def open_store(self, persistent: bool) -> OSError | None:
        """OSError or None: why a message store cannot be read."""
        try:
            self.store(persistent)
        except OSError as error:
            return error
        return None

    @cached_property
    def clean(self) -> bool:
        """bool: the last stop was clean, so that a node would keep numbers and redelivered flags of all queues."""
        if not self.terms or self.open_store(True) is not None:
            return False
        store = self.store()
        return store is None or store.clean

    def stored_term(self, entry: IndexEntry) -> bytes | None:
        """bytes or None: the term of a message that is not embedded in its index entry; None where it is lost.

        Raises
        ------
        OSError
            The file that has it, or may have it, cannot be read.
        CorruptionError
            Its record is not what was there when the message store was opened.
        """
        if entry.path.endswith(".qs"):
            raise failed_read(entry.path, "the file cannot be read")
        store = self.store(entry.persistent)
        try:
            return None if store is None else store.read_term(entry.msg_id)
        except KeyError:
            return None

    def message_of(self, entry: IndexEntry) -> tuple[Message, str] | None:
        """(Message, location) or None: what an index entry leads to; None where it is lost or not what the entry says.

        Raises
        ------
        OSError
            The file that has it, or may have it, cannot be read.
        """
        if entry.message is not None:
            try:
                return Message.from_term(entry.message), ("index" if entry.path.endswith((".idx", ".jif")) else "queue")
            except CorruptionError:
                return None
        try:
            stored = self.stored_term(entry)
            return None if stored is None else (Message.from_term(stored), "store")
        except CorruptionError:
            return None


def _body_size(index: QueueIndex | QueueIndexV2) -> int:
    if isinstance(index, QueueIndex):
        return int(index.columns().size.sum())
    return sum(int(segment.size.sum()) for segment in index.segments.values())


def write_recovery_terms(path: str, terms: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace a `recovery.dets` by one with these terms, by the names of the queues' directories; all or nothing."""
    staged = path + ".unfinished"
    try:
        with open(staged, "wb") as file:
            file.write(dets.encode(dets.recovery_object(name, each) for name, each in terms.items()))
            file.flush()
            os.fsync(file.fileno())
        os.rename(staged, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise
    fsync_directory(os.path.dirname(path))
