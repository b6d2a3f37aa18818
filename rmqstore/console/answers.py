"""Messages, queues and what still waits, as plain values for pages and API.

Owns the shape of these answers: dicts, lists, numbers and texts that JSON can hold; times are ms since epoch, sizes bytes.
Raises `NotFoundError` for what is not there, `BadQueryError` for a wrong question.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from rmqstore.console.anatomy import Field, body_crc, index_entries, queue_units, record_fields, record_place
from rmqstore.console.rows import BadQueryError, NotFoundError, error_text, file_name
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.queue_look import look_at_queue
from rmqstore.errors import (
    CorruptionError,
    InvalidMessageError,
    MissingDependencyError,
    OffsetOutOfRangeError,
    StoreError,
)
from rmqstore.message import BodySizeError, MessageExt, decompress_body
from rmqstore.offline.describe import QueueDescription
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore
from rmqstore.store.pages import BadCursorError, Page, current_queue, key_page, queue_page, time_page

__all__ = ["Answers", "message_row"]

_PREVIEW = 120
# Limits of a body that is unpacked for a list: its bytes on disk, and unpacked.
_PREVIEW_STORED = 16 * 1024
_PREVIEW_UNPACKED = 64 * 1024
# Bodies above this size, and compressed ones above the next, are read by few requests at a time.
_LARGE_BODY = 1024 * 1024
_LARGE_STORED = 4096
_UNPACKED_LIMIT = 64 * 1024 * 1024
_LARGE_AT_ONCE = 2
_LARGE_PATIENCE = 20.0
# Pending messages that were found answer further requests for these seconds, unless they take more bytes than this.
_PENDING_KEPT = 10.0
_PENDING_BYTES = 256 * 1024 * 1024
_STEP_LIMIT = 64


def _preview(message: MessageExt) -> dict[str, Any]:
    # With `damage` the body is not what its compression flag says, and is shown as it is stored.
    body, damage = message.body_stored, {}
    if message.sys_flag & 1 and message.crc_agrees:
        if len(body) > _PREVIEW_STORED:
            return {"body_size": None, "preview": None, "body_error": "compressed, and too large for a list"}
        try:
            # A few bytes may unpack to gigabytes.
            body = decompress_body(body, message.sys_flag, _PREVIEW_UNPACKED)
        except (BodySizeError, MissingDependencyError) as error:
            return {"body_size": None, "preview": None, "body_error": error.message}
        except StoreError as error:
            damage = {"corrupt": True, "damage": error.message}
    size = len(body)
    text = body[: 4 * _PREVIEW].decode("utf-8", "backslashreplace")
    return {
        **damage,
        "body_size": size,
        "preview": text[:_PREVIEW],
        "preview_whole": size <= 4 * _PREVIEW and len(text) <= _PREVIEW,
    }


def message_row(message: MessageExt) -> dict[str, Any]:
    """dict: a list's row of a message."""
    return {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "phy_offset": message.phy_offset,
        "size": message.size,
        "msg_id": message.msg_id,
        "unique_key": message.unique_key,
        "keys": message.keys,
        "tags": message.tags,
        "store_timestamp": message.store_timestamp,
        "born_timestamp": message.born_timestamp,
        "corrupt": not message.crc_agrees,
        "damage": None if message.crc_agrees else message.damage,
        **_preview(message),
    }


def _queue_row(store: MessageStore, queue: AnyConsumeQueue) -> dict[str, Any]:
    look = look_at_queue(queue, store.commit_log.min_offset)
    return {
        **QueueDescription.of(queue.topic, queue.queue_id, look).as_dict(),
        "size": look.size,
        "error": None,
    }


class Answers:
    """Answers about the messages and queues of one store.

    Methods take the open store of the request.
    """

    def __init__(self) -> None:
        self._pending_lock = threading.Lock()
        self._pending: tuple[float, Any] | None = None
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)

    def queue(self, store: MessageStore, topic: str, queue_id: int, start: int | None, size: int) -> dict[str, Any]:
        """dict: bounds and files of a queue, and `size` messages from queue offset `start`, by default the newest."""
        queue = current_queue(store, topic, queue_id)
        if queue is None:
            raise NotFoundError("there is no such queue in this store")
        row = _queue_row(store, queue)
        low, high = row["min_queue_offset"], row["max_queue_offset"]
        first = max(low, high - size) if start is None else min(max(start, low), high)
        wanted = Selection((topic,), (queue_id,), begin_queue_offset=first, max_num=size)
        rows = queue_page(store, wanted, message_row)
        following = first if not rows else rows[-1]["unit"]["queue_offset"] + max(rows[-1]["unit"]["num"], 1)
        files = [
            {
                "name": os.path.basename(mapped_file.path),
                "path": file_name(mapped_file.path, store.path),
                "from_offset": mapped_file.file_from_offset,
                "size": mapped_file.size,
            }
            for mapped_file in queue.mapped_files()
            if not queue.files.is_memory_only(mapped_file.file_from_offset)
        ]
        return {
            **row,
            "start": first,
            "rows": rows,
            "older": max(low, first - size) if first > low else None,
            "newer": following if following < high else None,
            "queue_files": files,
            "unit_size": queue.unit_size,
            "lost": [list(part) for part in store.lost_log],
        }

    def by_key(self, store: MessageStore, selection: Selection, cursor: str | None) -> Page:
        """Page: messages of a key, newest first."""
        if not selection.topic:
            raise BadQueryError("a key is indexed together with its topic: give the topic too")
        try:
            return key_page(store, selection, cursor, message_row)
        except BadCursorError as error:
            raise BadQueryError(str(error)) from None

    def by_time(self, store: MessageStore, selection: Selection, cursor: str | None, *, newest_first: bool) -> Page:
        """Page: messages of a topic by store time."""
        if not store.queue_ids(selection.topic):
            store.refresh()
            if not store.queue_ids(selection.topic):
                raise NotFoundError("this store has no queue of that topic")
        try:
            page = time_page(store, selection, cursor, message_row, newest_first=newest_first)
        except BadCursorError as error:
            raise BadQueryError(str(error)) from None
        page.unread = [{**each, "error": error_text(each["error"])} for each in page.unread]
        return page

    def place_of_id(self, store: MessageStore, msg_id: str, topic: str | None) -> int:
        """int: phy offset of the message with an offset message id, or with a producer's unique key."""
        try:
            return store.phy_offset_by_id(msg_id.strip(), topic or None)
        except (InvalidMessageError, OffsetOutOfRangeError, CorruptionError) as error:
            raise NotFoundError(
                f"no message of this store has that id, neither as offset message id nor as unique key: {error.message}"
            ) from None

    def _look_up(self, store: MessageStore, phy_offset: int) -> MessageExt:
        message = store.commit_log.look_up(phy_offset)
        if message is None:
            try:
                message = store.message_at(phy_offset)
            except (OffsetOutOfRangeError, CorruptionError) as error:
                raise NotFoundError(str(error)) from None
        return message

    def row(self, store: MessageStore, phy_offset: int) -> dict[str, Any]:
        """dict: a list's row of the message at that place."""
        return message_row(self._look_up(store, phy_offset))

    def message(self, store: MessageStore, phy_offset: int) -> dict[str, Any]:
        """dict: a message without its body: properties, record, queue units, index entries, neighbours."""
        message = self._look_up(store, phy_offset)
        path, pos, read = record_place(store, message)
        try:
            fields = record_fields(read, message.size, body_crc(message))
        except StoreError as error:
            fields = [Field("record", 0, message.size, error.message)]
        row = message_row(message)
        # A list's limits are not those of one message.
        row.pop("body_error", None)
        return {
            **row,
            "version": message.version,
            "flag": message.flag,
            "sys_flag": message.sys_flag,
            "crc": message.crc,
            "born_host": message.born_host,
            "store_host": message.store_host,
            "reconsume_times": message.reconsume_times,
            "prepared_transaction_offset": message.prepared_transaction_offset,
            "properties": dict(message.properties),
            "body_stored_size": len(message.body_stored),
            "compressed": bool(message.sys_flag & 1),
            "record": {
                "file": file_name(path, store.path),
                "pos": pos,
                "size": message.size,
                "fields": [
                    {
                        **dataclasses.asdict(field),
                        "phy_offset": phy_offset + field.pos,
                        "bytes": read(field.pos, min(field.size, _shown(field))).hex(" ") if field.size else "",
                        "bytes_cut": field.size > _shown(field),
                    }
                    for field in fields
                ],
            },
            "units": [_with_file(unit, "file", store.path) for unit in queue_units(store, message)],
            "entries": [_with_file(entry, "path", store.path) for entry in index_entries(store, message)],
            "previous": self._neighbour(store, message, -1),
            "next": self._neighbour(store, message, 1),
            "next_record": self._next_record(store, message),
        }

    def record(self, store: MessageStore, phy_offset: int) -> bytes:
        """bytes: the record."""
        message = self._look_up(store, phy_offset)
        return record_place(store, message)[2](0, message.size)

    def body(self, store: MessageStore, phy_offset: int) -> tuple[bytes, dict[str, Any]]:
        """(bytes, dict): the body; where it cannot be unpacked as stored, and the dict has ``body_error``, with ``corrupt``
        and ``damage`` where the body is not what its compression flag says."""
        message = self._look_up(store, phy_offset)
        stored = message.body_stored
        if not message.crc_agrees:
            return stored, {}
        try:
            return decompress_body(stored, message.sys_flag, _UNPACKED_LIMIT), {}
        except (BodySizeError, MissingDependencyError) as error:
            return stored, {"body_error": error.message}
        except StoreError as error:
            return stored, {"body_error": error.message, "corrupt": True, "damage": error.message}

    @contextlib.contextmanager
    def few_at_once(self, store: MessageStore, phy_offset: int) -> Iterator[None]:
        """Wait for a turn to read a body that is or may be large; raises `StoreError` where none came in time."""
        message = self._look_up(store, phy_offset)
        size, compressed = message.size, bool(message.sys_flag & 1)
        del message
        if size <= (_LARGE_STORED if compressed else _LARGE_BODY):
            yield
            return
        if not self._large.acquire(timeout=_LARGE_PATIENCE):
            raise StoreError("many large messages are being read at this moment; ask again")
        try:
            yield
        finally:
            self._large.release()

    def _neighbour(self, store: MessageStore, message: MessageExt, step: int) -> int | None:
        try:
            queue = store.queues.find(message.topic, message.queue_id)
            unit = None if queue is None else queue.unit(message.queue_offset + step)
        except (StoreError, OSError):
            return None
        return None if unit is None else unit.phy_offset

    def _next_record(self, store: MessageStore, message: MessageExt) -> int | None:
        after = message.phy_offset + message.size
        if after >= store.commit_log.max_offset:
            return None
        for number, entry in enumerate(store.commit_log.entries(after)):
            if isinstance(entry, MessageExt):
                return entry.phy_offset
            if number >= _STEP_LIMIT:
                break
        return None

    def pending(
        self, store: MessageStore, kind: str | None, topic: str | None, first: int, max_num: int
    ) -> dict[str, Any]:
        """dict: pending messages: totals, some rows, what was looked at, what could not be read."""
        found = self._found_pending(store)
        # An optional library; `pending` raises where it is missing.
        import pyarrow.compute as pc

        table = found.table
        for name, wanted in (("kind", kind), ("topic", topic)):
            if wanted is not None:
                table = table.filter(pc.equal(table.column(name), wanted))
        chosen = dataclasses.replace(found, unordered=table.slice(first, max_num))
        return {
            "now": found.now,
            "totals": [total.as_dict() for total in found.totals],
            "number": table.num_rows,
            "first": first,
            "messages": [message.as_dict() for message in chosen],
            "sources": [dataclasses.asdict(source) for source in found.sources],
            "problems": [dataclasses.asdict(problem) for problem in found.problems],
            "notes": found.notes,
        }

    def _found_pending(self, store: MessageStore) -> Any:
        from rmqstore.offline.pending import pending

        with self._pending_lock:
            kept = self._pending
            if kept is not None and time.monotonic() - kept[0] < _PENDING_KEPT:
                return kept[1]
            self._pending = None
            found = pending(store)
            if found.table.nbytes <= _PENDING_BYTES:
                self._pending = time.monotonic(), found
            return found


def _shown(field: Field) -> int:
    # The body has a view of its own, in parts.
    return 64 if field.name == "body" else 1024


def _with_file(value: dict[str, Any], name: str, root: str) -> dict[str, Any]:
    return value | {name: file_name(value[name], root)} if value.get(name) else value
