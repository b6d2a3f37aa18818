"""The offsets.json that a broadcasting consumer keeps on its own machine."""

from __future__ import annotations

import logging
import os
from typing import Any

from rmqstore._core import java_string_hash
from rmqstore.consumer.fastjson import parse_fastjson
from rmqstore.consumer.offsets_file import (
    OffsetsFile,
    checked_name,
    checked_number,
    java_order,
    load_with_backup,
    table_of,
    whole_number,
    with_unknown,
)
from rmqstore.errors import CorruptionError

__all__ = ["LocalOffsets"]

logger = logging.getLogger(__name__)


class LocalOffsets(OffsetsFile):
    """Progress of one broadcasting consumer group, as its client keeps it in ``offsets.json``.

    All methods may be called from several threads.

    Parameters
    ----------
    path : str or os.PathLike
        ``<directory>/<client id>/<group>/offsets.json``, see `path_of`.
    read_only : bool
        Whether `commit` and `persist` are refused.

    Attributes
    ----------
    offset_table : dict
        (broker name, topic, queue id) -> queue offset to consume next.
    path, read_only, source
        As of `ConsumerOffsets`.
    """

    __slots__ = ("_committed", "_written", "offset_table")

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = True):
        super().__init__(path, read_only)
        self.offset_table: dict[tuple[str, str, int], int] = {}
        # What was committed here and is not in the file yet; for all other queues the file knows better.
        self._committed: dict[tuple[str, str, int], int] = {}
        # What `persist` wrote last.
        self._written: dict[tuple[str, str, int], int] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str], read_only: bool = True) -> LocalOffsets:
        """Read ``<client id>/<group>/offsets.json``, or its ``.bak`` if the file is of no use.

        The keys may be objects, as fastjson writes them, or text that holds such an object.  With ``read_only=False``
        damaged and temporary files are treated as by `ConsumerOffsets.load`.

        Raises
        ------
        CorruptionError, OSError
            As of `ConsumerOffsets.load`.
        """
        offsets = cls(path, read_only=read_only)
        offsets._load(offsets._decode)
        return offsets

    @staticmethod
    def path_of(directory: str | os.PathLike[str], client_id: str, group: str) -> str:
        """Where a client keeps the offsets of `group`: ``<directory>/<client id>/<group>/offsets.json``.

        Parameters
        ----------
        directory : str or os.PathLike
            ``~/.rocketmq_offsets`` unless the client's `rocketmq.client.localOffsetStoreDir` says otherwise.
        client_id : str
            ``<ip>@<instance name>``.

        Raises
        ------
        ValueError
            A client id or group that is not a name of a directory.
        """
        for name, what in ((client_id, "client_id"), (group, "group")):
            checked_name(name, what, "/\0")
            if name in (".", ".."):
                raise ValueError(f"{what} is {name!r}: give a name that can be a directory's")
        return os.path.join(os.fspath(directory), client_id, group, "offsets.json")

    def _decode(self, document: Any, path: str) -> None:
        self.offset_table = _local_table(document, path)

    def get(self, topic: str, queue_id: int, broker: str | None = None) -> int:
        """Next offset of a queue; -1 when it is unknown.  Without a broker name the only broker that has the queue.

        Raises
        ------
        ValueError
            Several brokers have the queue and no name was given.
        """
        with self._lock:
            if broker is not None:
                return self.offset_table.get((broker, topic, queue_id), -1)
            found = {key[0]: offset for key, offset in self.offset_table.items() if key[1:] == (topic, queue_id)}
        if len(found) > 1:
            raise ValueError(f"{topic}/{queue_id} is on several brokers ({', '.join(sorted(found))}): give broker")
        return next(iter(found.values()), -1)

    def list(self) -> dict[tuple[str, str, int], int]:
        """All offsets as (broker name, topic, queue id) -> offset; a copy."""
        with self._lock:
            return dict(self.offset_table)

    def commit(self, topic: str, queue_id: int, queue_offset: int, broker: str) -> None:
        """Note that `queue_offset` of a queue is consumed next; `persist` makes it durable.

        Raises
        ------
        ValueError
            An empty name, a queue id outside 0 to 2**31 - 1 or an offset outside 0 to 2**63 - 1.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        self._check_writable()
        key = (
            checked_name(broker, "broker", ""),
            checked_name(topic, "topic", ""),
            checked_number(queue_id, "queue_id", 32),
        )
        offset = checked_number(queue_offset, "queue_offset", 64)
        with self._lock:
            if self.offset_table.get(key) != offset:
                self.offset_table[key] = self._committed[key] = offset
                self._changes += 1

    def persist(self) -> bool:
        """Write what was committed into the file, which becomes ``.bak``.

        The file is read again first: what it holds for queues that were not committed here since the last time
        survives, and is known here afterwards.  Missing directories are created.

        Returns
        -------
        bool
            Whether the file was written; True means that it is on disk.

        Raises
        ------
        CorruptionError
            The file and its backup were damaged meanwhile; nothing was changed.
        OSError
            As of `ConsumerOffsets.persist`.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        return super().persist()

    def _note(self) -> Any:
        return dict(self.offset_table), dict(self._committed)

    def _document(self, noted: Any) -> dict[str, Any]:
        known, committed = noted
        (members, in_file), source = load_with_backup(self.path, False, _local_document)
        self._main_is_whole = source == self.path
        table = self._written = {**known, **in_file, **committed}
        ordered = {_message_queue(key): table[key] for key in java_order(table, 16, _message_queue_hash)}
        return with_unknown({"offsetTable": ordered}, members)

    def _settle(self, noted: Any) -> None:
        for key, offset in noted[1].items():
            if self._committed.get(key) == offset:
                del self._committed[key]
        self.offset_table = {**self._written, **self._committed}

    def __repr__(self) -> str:
        return f"<LocalOffsets {self.path!r} {len(self.offset_table)} queues>"


def _local_document(document: Any, path: str) -> tuple[dict[Any, Any], dict[tuple[str, str, int], int]]:
    table = _local_table(document, path)
    return document or {}, table


def _message_queue(key: tuple[str, str, int]) -> tuple[tuple[str, Any], ...]:
    broker_name, topic, queue_id = key
    # A file without a broker's name is read as an empty name.
    named = (("brokerName", broker_name),) if broker_name else ()
    return (*named, ("queueId", queue_id), ("topic", topic))


def _message_queue_hash(key: tuple[str, str, int]) -> int:
    """Java's `MessageQueue.hashCode`, not cut to 32 bits."""
    broker_name, topic, queue_id = key
    return ((31 + java_string_hash(broker_name)) * 31 + queue_id) * 31 + java_string_hash(topic)


def _local_table(document: Any, path: str) -> dict[tuple[str, str, int], int]:
    result: dict[tuple[str, str, int], int] = {}
    for key, offset in table_of(document, "offsetTable", path).items():
        queue = key
        if isinstance(queue, str):
            queue = parse_fastjson(queue, path)
        queue = dict(queue) if isinstance(queue, tuple) else queue
        if not isinstance(queue, dict) or not isinstance(queue.get("topic"), str):
            raise CorruptionError(f"offsetTable: {key!r} is not a message queue", path)
        queue_id = whole_number(queue.get("queueId"), "a queueId", path, 32)
        broker_name = str(queue.get("brokerName") or "")
        result[broker_name, queue["topic"], queue_id] = whole_number(offset, f"the offset of {queue['topic']!r}", path)
    return result
