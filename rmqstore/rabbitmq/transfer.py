"""Export of messages into files that any tool reads.

Owns the JSON objects of messages, both ways, and the files.  An export only reads, and its file is whole or missing.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import os
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np

from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.output_file import OutputFile, format_of
from rmqstore.rabbitmq._core import ENTRY_EMBEDDED, ENTRY_PERSISTENT
from rmqstore.rabbitmq.amqp import from_json, json_value
from rmqstore.rabbitmq.batches import Batches, pyarrow, schema
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.live_index import IndexColumns, LiveIndex
from rmqstore.rabbitmq.message import LostMessage, Message
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.queue import Queue, QueuedMessage
from rmqstore.rabbitmq.queue_index import checked_expiry
from rmqstore.rabbitmq.unreferenced import FoundMessage, file_messages, is_message_file, unreferenced_messages
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["FORMATS", "export", "found_object", "message_object", "object_message"]

logger = logging.getLogger(__name__)

FORMATS = ("jsonl", "arrow", "parquet")
# Messages without an index that are made into a batch at once.
_FOUND_ROWS = 1024


# ----------------------------------------------------------------------------------------------------------------- JSON


def message_object(queue: Queue, message: QueuedMessage) -> dict[str, Any]:
    """Convert a message to a JSON object, with ``body`` if it is UTF-8, else ``body_base64``."""
    value: dict[str, Any] = {"vhost": queue.vhost, "queue": queue.name, "seq_id": message.seq_id}
    if message.level is not None:
        value["level"] = message.level
    value |= {
        "msg_id": message.msg_id.hex(),
        "exchange": message.exchange,
        "routing_keys": message.routing_keys,
        "persistent": message.persistent,
        "delivered": message.delivered,
    }
    if message.expiry is not None:
        value["expiry"] = message.expiry
    return value | _content(message.message)


def _content(message: Message) -> dict[str, Any]:
    value: dict[str, Any] = {"properties": json_value(message.properties)}
    try:
        value["body"] = message.body.decode()
    except UnicodeDecodeError:
        value["body_base64"] = base64.b64encode(message.body).decode()
    return value


def found_object(found: FoundMessage, vhost: str = "") -> dict[str, Any]:
    """Convert a message without an index entry to a JSON object, like `message_object`."""
    message = found.message
    value: dict[str, Any] = {"vhost": vhost or message.vhost, "queue": found.queue} if found.queue else {}
    value |= {
        "path": found.path,
        "pos": found.pos,
        "msg_id": found.msg_id.hex(),
        "exchange": message.exchange,
        "routing_keys": message.routing_keys,
        "persistent": message.persistent,
    }
    return value | _content(message)


def object_message(value: Mapping[str, Any]) -> tuple[Message, int | None]:
    """Convert such an object to a message and its expiry in ms since epoch, or None.

    Only a body is required.  InvalidMessageError for another object.
    """
    if not isinstance(value, Mapping):
        raise InvalidMessageError("a message is a JSON object")
    try:
        if "body_base64" in value:
            body = base64.b64decode(value["body_base64"], validate=True)
        elif "body" in value:
            body = value["body"].encode("utf-8", "surrogateescape")
        else:
            raise InvalidMessageError("there is neither body nor body_base64")
        keys = value.get("routing_keys")
        for name, given, kind in (
            ("properties", value.get("properties"), Mapping),
            ("routing_keys", keys, list),
            ("persistent", value.get("persistent"), bool),
            ("msg_id", value.get("msg_id"), str),
            ("exchange", value.get("exchange"), str),
            ("vhost", value.get("vhost"), str),
            ("queue", value.get("queue"), str),
        ):
            if given is not None and not isinstance(given, kind):
                raise InvalidMessageError(f"{name} is a {type(given).__name__}")
        message = Message(
            body,
            properties={name: from_json(item) for name, item in (value.get("properties") or {}).items()},
            exchange=value.get("exchange") or "",
            routing_keys=list(keys) if keys is not None else [value["queue"]] if value.get("queue") else [],
            vhost=value.get("vhost") or "/",
            persistent=value.get("persistent"),
            msg_id=bytes.fromhex(value["msg_id"]) if value.get("msg_id") else None,
        )
        return message, checked_expiry(value.get("expiry"))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        if isinstance(error, StoreError):
            raise
        raise InvalidMessageError(f"this is not a message: {error or type(error).__name__}") from None


# --------------------------------------------------------------------------------------------------------------- export


def export(
    vhost: Vhost | str | os.PathLike[str],
    output: str | os.PathLike[str] | IO[bytes],
    *,
    queues: Iterable[str] | None = None,
    format: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    on_lost: Callable[[LostMessage], None] | None = None,
    on_incomplete: Callable[[Problem], None] | None = None,
    unreferenced: bool = False,
) -> int:
    """Write the live messages of a vhost, or the messages of one message file, to a file.

    Parameters
    ----------
    vhost : Vhost or path
        Of a message file (N.rdq, N.rdt, N.qs) every whole message is written, see `file_messages`.
    output : path or binary file
        A file gets its name at the end.
    queues : iterable of str, optional
        Only these; by default all, by name.
    format : {"jsonl", "arrow", "parquet"}, optional
        By default that of the name's ending, else ``"jsonl"``: one object a line, see `message_object`.  ``"arrow"`` is an
        Arrow IPC file (Feather).
    force : bool
        Replace an existing file.
    progress : callable, optional
        Called with (messages done, messages in all).
    on_lost : callable, optional
        Called with each live message whose bytes are lost or cannot be decoded; by default a warning for each queue has
        their number.
    on_incomplete : callable, optional
        Called, before the first message is written, with each `Problem` of an index that may hide messages; by default a
        warning for each queue names the first.
    unreferenced : bool
        Write the messages that no live index entry refers to instead, see `unreferenced_messages`.

    Returns
    -------
    int
        Messages written.

    Raises
    ------
    StoreError
        There is no such vhost or queue; or the output exists, or is in the vhost.
    MissingDependencyError
        Arrow and Parquet need pyarrow.
    """
    if isinstance(queues, str):
        queues = [queues]
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}, not one of {', '.join(FORMATS)}")
    with contextlib.ExitStack() as stack:
        if not isinstance(vhost, Vhost) and not is_message_file(vhost):
            vhost = stack.enter_context(Vhost.open(vhost))
        chosen: list[Queue] = []
        found: Iterator[FoundMessage] | None = None
        if not isinstance(vhost, Vhost):
            found = file_messages(vhost, on_lost, on_incomplete)
        elif unreferenced:
            found = unreferenced_messages(vhost, on_lost)
        else:
            chosen = vhost.queues() if queues is None else [vhost.queue(name) for name in dict.fromkeys(queues)]
        if found is not None and queues is not None:
            raise ValueError("messages without an index are of no queue: give no queues")
        missing = vhost.incomplete if isinstance(vhost, Vhost) and found is None and queues is None else []
        file: Any = output
        if isinstance(output, (str, os.PathLike)):
            path = os.fspath(output)
            format = format or _format_of(path)
            file = OutputFile(path, force=force, outside=[vhost.path if isinstance(vhost, Vhost) else os.fspath(vhost)])
        _tell_incomplete(missing, chosen, on_lost, on_incomplete)
        if file is not output:
            file = stack.enter_context(file)
        total = sum(queue.depth for queue in chosen) if progress is not None else 0
        number = 0
        for more in stack.enter_context(contextlib.closing(_write(file, format or "jsonl", chosen, found, on_lost))):
            number += more
            if progress is not None and (more > 1 or number % 1000 == 0):
                progress(number, max(number, total))
        if progress is not None:
            progress(number, number)
        return number


def _format_of(path: str) -> str:
    format, compression = format_of(path)
    ending = os.path.splitext(path)[1].lower()
    if compression is not None or format == "csv" or ending in (".tsv", ".orc", ".avro"):
        raise StoreError(
            f"a name that ends in {ending} says what is not written here; give a name that ends in .jsonl, .parquet or .arrow, "
            "or the format",
            path,
        )
    return format or "jsonl"


def _tell_incomplete(
    missing: list[Problem],
    queues: list[Queue],
    on_lost: Callable[[LostMessage], None] | None,
    on_incomplete: Callable[[Problem], None] | None,
) -> None:
    if on_incomplete is not None:
        for problem in [*missing, *(problem for queue in queues for problem in queue.incomplete)]:
            on_incomplete(problem)
        return
    for problem in missing:
        logger.warning("a queue may be left out: %s: %s: %s", problem.place, problem.kind, problem.detail)
    # Without `on_lost` the queues warn by themselves.
    for queue in queues if on_lost is not None else ():
        queue.warn_incomplete()


def _write(
    file: IO[bytes],
    format: str,
    queues: list[Queue],
    found: Iterator[FoundMessage] | None,
    on_lost: Callable[[LostMessage], None] | None,
) -> Generator[int, None, None]:
    """Write the messages of queues, or those found without an index; yield the number of each step."""
    if format == "jsonl":
        for value in _objects(queues, on_lost) if found is None else map(found_object, found):
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            file.write(text.encode("utf-8", "backslashreplace") + b"\n")
            yield 1
        return
    pa = pyarrow()
    if format == "arrow":
        writer = pa.ipc.new_file(file, schema())
    else:
        from pyarrow import parquet

        writer = parquet.ParquetWriter(file, schema())
    with writer:
        batches = (batch for queue in queues for batch in queue.batches(on_lost=on_lost))
        for batch in batches if found is None else _found_batches(found):
            writer.write_batch(batch)
            yield batch.num_rows


def _objects(queues: list[Queue], on_lost: Callable[[LostMessage], None] | None) -> Iterator[dict[str, Any]]:
    return (message_object(queue, message) for queue in queues for message in queue.messages(on_lost, decoded=True))


class _FoundIndex(LiveIndex):
    """Messages without an index entry as rows of an index; the number of a file is that of the row."""

    def __init__(self, found: list[FoundMessage]):
        self.found = found

    def path_of(self, file: int) -> str:
        return self.found[file].path

    def source(self, file: int) -> bytes:
        return self.found[file].message.term

    def columns(self) -> IndexColumns:
        count = len(self.found)
        zeros = np.zeros(count, np.int64)
        return IndexColumns(
            zeros,
            np.array([each.message.body_size for each in self.found], np.int64),
            np.array([ENTRY_EMBEDDED | ENTRY_PERSISTENT * each.message.persistent for each in self.found], np.uint8),
            zeros,
            np.frombuffer(b"".join(each.msg_id for each in self.found), np.uint8).reshape(count, 16),
            np.arange(count),
            np.array([each.pos for each in self.found], np.int64),
            zeros,
            np.array([len(each.message.term) for each in self.found], np.int64),
        )


def _found_batches(found: Iterator[FoundMessage]) -> Iterator[Any]:
    """Yield record batches of `COLUMNS`, with nulls in the columns of an index."""
    pa = pyarrow()
    for queue, group in itertools.groupby(found, lambda each: each.queue):
        empty = ("vhost", "seq_id", "delivered") if queue else ("vhost", "queue", "seq_id", "delivered")
        batches = Batches(QueueName("", queue), lambda persistent: None)
        while some := list(itertools.islice(group, _FOUND_ROWS)):
            for batch in batches.of_index(_FoundIndex(some)):
                arrays = [
                    pa.nulls(batch.num_rows, field.type) if field.name in empty else batch.column(number)
                    for number, field in enumerate(batch.schema)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
