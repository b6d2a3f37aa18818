"""A queue of a vhost: the directories below ``queues``, the index in each, and its messages.

Owns the choice of the index version by the files, the judgement of damage that may hide live entries, and the messages in
the order of delivery.  It only reads.  Rules: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.rabbitmq._core import MAX_SEQ_ID
from rmqstore.rabbitmq.batches import COLUMNS, Batches
from rmqstore.rabbitmq.index_directory import JOURNAL, SEGMENT_NAME
from rmqstore.rabbitmq.layout import QueueName, read_queue_name
from rmqstore.rabbitmq.live_index import IndexEntry, JoinedIndex, LiveIndex
from rmqstore.rabbitmq.message import LostMessage, LostMessages, Message, undecoded
from rmqstore.rabbitmq.node import QueueDefinition
from rmqstore.rabbitmq.problem import Problem, unreadable_file
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2

if TYPE_CHECKING:
    import pyarrow as pa

    from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["Queue", "QueueDirectory", "QueuedMessage", "is_journal_end"]

logger = logging.getLogger(__name__)

_V1_FILE = re.compile(r"\d+\.idx|journal\.jif")
_V2_FILE = re.compile(r"\d+\.q[is]")
# Problems of an index that hide no live entry: a node skips the place, or only numbers are wrong.
_HIDES_NOTHING = {"nul_file", "memory_only", "bad_terms", "next_seq_id_too_low"}
_HIDES_NOTHING_IN_JOURNAL = {"ack_without_publish"}
# Messages that are searched for the name of their queue.
_LOOKED_AT = 64


def is_journal_end(index: QueueIndex, problem: Problem) -> bool:
    """Check that a problem of the journal is an end that a crash has cut or never written."""
    return problem.kind in ("zero_tail", "nul_file") or (
        problem.kind == "torn_record" and (problem.pos or 0) >= index.journal_size
    )


class QueueDirectory(NotCopied):
    """One directory below ``queues``: a queue, or one level of a priority queue.

    Attributes
    ----------
    path, name : str
        The directory, and its own name.
    queue_name : QueueName or None
        None if it is not known.
    index_version : int
        1 or 2; 2 also while a node converts one to the other.
    terms : dict or None
        The queue's recovery terms after an orderly stop.
    unreadable : list of Problem
        Files that cannot be opened; the queue is read without them.
    """

    def __init__(self, vhost: Vhost, name: str):
        self._vhost = vhost
        self.name = name
        self.path = os.path.join(vhost.path, "queues", name)
        self.terms: dict[str, Any] | None = vhost.terms.get(name)
        self.queue_name = read_queue_name(self.path)
        self.files: list[str] = []
        self.unreadable: list[Problem] = []
        if os.path.isdir(self.path):
            found = listing(self.path)
            self.files = found.names
            if found.error is not None:
                self.unreadable.append(unreadable_file(self.path, found.error))
        self.index_version = 2 if any(map(_V2_FILE.fullmatch, self.files)) else 1

    def __repr__(self) -> str:
        return f"<QueueDirectory {self.name} of {self.queue_name}>"

    @property
    def level(self) -> int | None:
        """int or None: the level of a priority queue."""
        return self.queue_name.priority if self.queue_name else None

    @property
    def owner(self) -> str:
        """str: the queue's name; the directory's in angle brackets if that is not known."""
        return self.queue_name.queue if self.queue_name else f"<{self.name}>"

    @property
    def is_misplaced(self) -> bool:
        """bool: its stub names a queue whose directory has another name, so that no node reads it."""
        name = self.queue_name
        return name is not None and self._vhost.directory_of(name.vhost, name.queue, name.priority) != self.name

    @property
    def clean(self) -> bool:
        """bool: its recovery terms are there, and a node uses them."""
        if self.terms is None:
            return False
        if self.index_version == 2:
            return "v2_index_state" in self.terms and bool(self.indexes) and self.indexes[-1].recovered_clean
        return all(index.recovered_clean for index in self.indexes) and not self.unreadable

    @staticmethod
    def is_read(name: str) -> bool:
        """Check that a file of this name is part of a queue's directory."""
        return name == ".queue_name" or any(pattern.fullmatch(name) for pattern in (_V1_FILE, _V2_FILE))

    @property
    def has_version_1(self) -> bool:
        """bool: there is a journal or a segment of version 1."""
        return any(map(_V1_FILE.fullmatch, self.files))

    @cached_property
    def indexes(self) -> list[QueueIndex | QueueIndexV2]:
        """The indexes, opened read-only: one, or both if a node was stopped while it converted version 1 to 2.

        The list is empty if the directory cannot be read; `problems` has the reason.
        """
        found: list[QueueIndex | QueueIndexV2] = []
        if self.unreadable:
            return found
        try:
            if self.has_version_1 or self.index_version == 1:
                found.append(
                    QueueIndex.open(
                        self.path,
                        segment_entry_count=self._vhost.segment_entry_count,
                        read_only=True,
                        terms=self.terms if self.terms is not None and "segments" in self.terms else None,
                        check_terms=self._vhost.check_terms,
                    )
                )
            if self.index_version == 2:
                found.append(QueueIndexV2.open(self.path, terms=self.terms))
        except OSError as error:
            self.unreadable.append(unreadable_file(self.path, error))
        return found

    @property
    def live(self) -> LiveIndex:
        """LiveIndex: the entries of all `indexes`."""
        return self.indexes[0] if len(self.indexes) == 1 else JoinedIndex(self.indexes)

    def entries(self) -> Iterator[IndexEntry]:
        """Yield the live entries, in the order of sequence ids."""
        yield from self.live

    def name_by_messages(self) -> QueueName | None:
        """Find the queue's name among the routing keys of its first messages; None if no key fits.

        The routing key of a message of the default exchange is the queue's name, whose hash is the directory's name.
        """
        tried: set[str] = set()
        for entry in islice(self.entries(), _LOOKED_AT):
            if entry.message is None:
                continue
            try:
                message = Message.from_term(entry.message)
                keys, vhost = message.routing_keys, message.vhost or self._vhost.name
            except StoreError:
                continue
            for key in filter(lambda key: key not in tried, keys):
                tried.add(key)
                for level in (None, *range(256)):
                    if self._vhost.directory_of(vhost, key, level) == self.name:
                        return QueueName(vhost, key, level)
        return None

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: damage in the files of the index."""
        return [problem for index in self.indexes for problem in index.problems] + self.unreadable

    @property
    def incomplete(self) -> list[Problem]:
        """list of Problem: those of `problems` that may hide live entries."""
        found = [problem for index in self.indexes for problem in index.problems if self._hides(index, problem)]
        name = self.queue_name
        # A node creates the journal of version 1 along with the stub.
        stub = name is not None and name.index_version == 1 and ".queue_name" in self.files
        if stub and self.index_version == 1 and not self.has_version_1 and self._vhost.has_unused:
            detail = (
                "there is neither a journal nor a segment; whole messages that no index has may be of this queue "
                "(rmqstore rabbitmq dump --unreferenced)"
            )
            found.append(Problem(self.path, None, "missing_index", detail))
        return found + self.unreadable

    def _hides(self, index: LiveIndex, problem: Problem) -> bool:
        if isinstance(index, QueueIndex):
            if os.path.basename(problem.path) == JOURNAL:
                if is_journal_end(index, problem):
                    # After a crash the cut record was never whole; after an orderly stop all records were.
                    return index.recovered_clean
                if problem.kind in _HIDES_NOTHING_IN_JOURNAL:
                    return False
            if problem.kind == "segment_count_mismatch":
                return self._lacks_entries(index, problem.path)
        return problem.kind not in _HIDES_NOTHING

    def _lacks_entries(self, index: QueueIndex, path: str) -> bool:
        # Only the recovery terms count the entries of a segment that was deleted after an orderly stop.
        match = SEGMENT_NAME.fullmatch(os.path.basename(path))
        number = int(match[1]) if match else -1
        counts = dict((self.terms or {})["segments"])
        in_range = 0 <= number <= MAX_SEQ_ID // index.segment_entry_count
        return in_range and index.segments.get(number, 0) < counts.get(number, 0)

    @property
    def lacking(self) -> int:
        """int: persistent messages that the recovery terms count and no index has; 0 if a file cannot be read."""
        stated = (self.terms or {}).get("persistent_count")
        if type(stated) is not int or any(problem.is_unreadable for problem in self.problems):
            return 0
        return max(0, stated - sum(len(index.persistent_sizes) for index in self.indexes))

    def close(self) -> None:
        """Close the files that are open."""
        for index in self.__dict__.pop("indexes", []):
            if isinstance(index, QueueIndex):
                index.close()


class QueuedMessage:
    """A message in a queue, and its place.

    Attributes
    ----------
    seq_id : int
        Its number in the queue, or in its level of a priority queue.
    msg_id : bytes
        16 bytes; copies of one message in several queues share it.
    expiry : int or None
        Expiry in ms since epoch.
    delivered : bool
        A node would deliver it with the redelivered flag.
    persistent : bool
        It survives a restart of the node.
    level : int or None
        Its level of a priority queue.
    size : int
        Bytes of the body, by the index.
    location : str
        ``"index"`` (embedded), ``"store"`` (the vhost's message store) or ``"queue"`` (the queue's own, version 2).
    body, properties, exchange, routing_keys, vhost, term
        See `Message`.
    """

    __slots__ = ("delivered", "expiry", "level", "location", "message", "msg_id", "persistent", "seq_id", "size")

    def __init__(self, entry: IndexEntry, message: Message, level: int | None):
        self.seq_id = entry.seq_id
        self.msg_id = entry.msg_id
        self.expiry = entry.expiry
        self.delivered = entry.delivered
        self.persistent = entry.persistent
        self.size = entry.size
        self.level = level
        self.location = "store"
        if entry.message is not None:
            self.location = "index" if entry.path.endswith((".idx", ".jif")) else "queue"
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
        """Its routing keys, including those of CC and BCC."""
        return self.message.routing_keys

    @property
    def vhost(self) -> str:
        """The vhost in the message's own term."""
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
        The declared name, or the name of the directory in angle brackets.
    vhost : str
    directories : list of QueueDirectory
        One; for a priority queue one for each level that was written to, the lowest first.
    definition : QueueDefinition or None
        From the node's Mnesia files, if they have it.
    """

    def __init__(
        self, owner: Vhost, vhost: str, name: str, directories: list[QueueDirectory], definition: QueueDefinition | None
    ):
        self._vhost = owner
        self.name = name
        self.vhost = vhost
        self.directories = sorted(directories, key=lambda each: each.level or 0)
        self.definition = definition

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} of vhost {self.vhost!r}>"

    @property
    def path(self) -> str:
        """str: its directory; for a priority queue that of the lowest level."""
        return self.directories[0].path if self.directories else ""

    @property
    def index_version(self) -> int:
        """int: 1 or 2."""
        return max((each.index_version for each in self.directories), default=1)

    @property
    def indexes(self) -> list[QueueIndex | QueueIndexV2]:
        """The indexes of all directories."""
        return [index for each in self.directories for index in each.indexes]

    @property
    def depth(self) -> int:
        """int: messages that are live on disk, including transient ones."""
        return sum(index.depth for index in self.indexes)

    @property
    def size(self) -> int:
        """int: bytes of the bodies of these messages, by the index."""
        return sum(int(index.columns().size.sum()) for index in self.indexes)

    def summary(self) -> dict[str, Any]:
        """Summarize the queue for the front ends; ``declared`` is None if the node's definitions are not known."""
        return {
            "name": self.name,
            "index_version": self.index_version,
            "directories": [each.name for each in self.directories],
            "depth": self.depth,
            "size": self.size,
            "declared": None if self._vhost.definitions is None else self.definition is not None,
        }

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: damage in its index files; `rmqstore.rabbitmq.verify` finds more."""
        return [problem for each in self.directories for problem in each.problems]

    @property
    def incomplete(self) -> list[Problem]:
        """list of Problem: those of them that may hide live messages."""
        return [problem for each in self.directories for problem in each.incomplete]

    def messages(
        self, on_lost: Callable[[LostMessage], None] | None = None, *, decoded: bool = False
    ) -> Iterator[QueuedMessage]:
        """Yield the live messages, oldest first; those of a priority queue by level, the highest first.

        A message whose bytes are lost, or of a protocol that is not decoded here, counts in `depth` and is left out.
        `incomplete` has the damage that may hide more.

        Parameters
        ----------
        on_lost : callable, optional
            Called with each message that is left out; by default warnings at the end have their number, and the damage that
            may hide more.
        decoded : bool
            Leave out a message whose properties cannot be decoded, too.
        """
        lost = LostMessages(on_lost)
        for directory in reversed(self.directories):
            level = directory.level
            for entry in directory.entries():
                term, error = self._vhost.term_of(entry)
                message = message_in(term)
                reason = None if message is None else undecoded(message, decoded)
                if message is not None and reason is None:
                    yield QueuedMessage(entry, message, level)
                    continue
                # A damaged message in a queue's own file has an id of zeros.
                embedded = entry.message is not None or not any(entry.msg_id)
                unread = str(error) if isinstance(error, OSError) else ""
                place = (entry.path, embedded, entry.pos or 0, reason or unread, reason is not None)
                lost.add(LostMessage(self.name, entry.seq_id, entry.msg_id, level, *place))
        lost.warn()
        if on_lost is None:
            self.warn_incomplete()

    def warn_incomplete(self) -> None:
        """Log one warning if `incomplete` is not empty."""
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
        """The same messages as Arrow record batches, of which only the asked `columns` are decoded.

        `columns` are of `rmqstore.rabbitmq.batches.COLUMNS`, else ValueError; `on_lost` as for `messages`.
        MissingDependencyError without pyarrow.
        """
        for directory in reversed(self.directories):
            name = QueueName(self.vhost, self.name, directory.level)
            yield from Batches(name, self._vhost.store, columns, on_lost).of_index(directory.live)
        if on_lost is None:
            self.warn_incomplete()


def message_in(term: bytes | None) -> Message | None:
    """Parse the message of a term; None without a term, or for another term."""
    try:
        return None if term is None else Message.from_term(term)
    except CorruptionError:
        return None
