"""A queue of a vhost and its messages, wherever they lie.

Owns how an index entry and its message come together, in the order in which a node delivers.  It only reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmqstore.files.mapped_file import NotCopied
from rmqstore.rabbitmq.batches import COLUMNS, Batches
from rmqstore.rabbitmq.definitions import QueueDefinition
from rmqstore.rabbitmq.index_directory import IndexEntry
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.lost import LostMessage, LostMessages, undecoded
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.queue_directory import QueueDirectory

if TYPE_CHECKING:
    import pyarrow as pa

    from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["Queue", "QueuedMessage"]

logger = logging.getLogger(__name__)


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
        return sum(int(index.columns().size.sum()) for each in self.directories for index in each.indexes)

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
            level = directory.level
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
            name = QueueName(self.vhost, self.name, directory.level)
            yield from Batches(name, self._vhost.store, columns, on_lost).of_directory(directory)
        if on_lost is None:
            self.warn_incomplete()
