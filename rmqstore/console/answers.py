"""Messages, queues and pending messages as values that JSON can hold, for pages and API.

Times are ms since epoch, sizes are bytes.  Methods get the open store and the parameters of the request, and raise
`NotFoundError` or `BadQueryError`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Any

from rmqstore.console.anatomy import Field, body_crc, index_entries, queue_units, record_fields, record_place
from rmqstore.console.questions import KEY_TYPES
from rmqstore.console.rows import Asked, BadQueryError, Kept, NotFoundError, error_text, file_name
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

__all__ = ["Answers"]

_PREVIEW = 120
# Limits of a compressed body in a list: its bytes on disk, and decompressed.
_PREVIEW_STORED = 16 * 1024
_PREVIEW_UNPACKED = 64 * 1024
# The longest body in a JSON answer.
_JSON_BODY = 4 * 1024 * 1024
# Few requests at a time may read bodies above the first size, and compressed ones above the second.
_LARGE_BODY = 1024 * 1024
_LARGE_STORED = 4096
_UNPACKED_LIMIT = 64 * 1024 * 1024
_LARGE_AT_ONCE = 2
_LARGE_PATIENCE = 20.0
# Pending messages are cached for these seconds, unless they need more bytes than this.
_PENDING_KEPT = 10.0
_PENDING_BYTES = 256 * 1024 * 1024
_STEP_LIMIT = 64


def _preview(message: MessageExt) -> dict[str, Any]:
    # With `damage` the body contradicts its compression flag, and is shown as stored.
    body, damage = message.body_stored, {}
    if message.sys_flag & 1 and message.crc_agrees:
        if len(body) > _PREVIEW_STORED:
            return {"body_size": None, "preview": None, "body_error": "compressed, and too large for a list"}
        try:
            # A few bytes may decompress to gigabytes.
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


def _message_row(message: MessageExt) -> dict[str, Any]:
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


class Answers:
    """Answers about the messages and queues of one store."""

    def __init__(self) -> None:
        self._pending: Kept[Any] = Kept()
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)

    def queue(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return the bounds and files of a queue, and a page of its messages, by default the newest."""
        topic, queue_id, start, size = asked["topic"], asked["queue_id"], asked["from"], asked["max_num"]
        queue = current_queue(store, topic, queue_id)
        if queue is None:
            raise NotFoundError("this store has no such queue")
        look = look_at_queue(queue, store.commit_log.min_offset)
        row = {**QueueDescription.of(topic, queue_id, look).as_dict(), "size": look.size, "error": None}
        low, high = row["min_queue_offset"], row["max_queue_offset"]
        first = max(low, high - size) if start is None else min(max(start, low), high)
        wanted = Selection((topic,), (queue_id,), begin_queue_offset=first, max_num=size)
        rows = queue_page(store, wanted, _message_row)
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

    def messages(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return a page of messages by key, id or store time."""
        if asked["id"].strip():
            page = Page([_message_row(self._look_up(store, self.place_of_id(store, asked)))], None)
        else:
            page = self.found(store, asked)
        return {
            "messages": page.rows,
            "next_cursor": page.following,
            "stopped": page.stopped,
            "complete": not (page.uncovered or page.unread or page.lost),
            "uncovered": [list(stretch) for stretch in page.uncovered],
            "unread": page.unread,
            "lost": [list(part) for part in page.lost],
        }

    def found(self, store: MessageStore, asked: Asked) -> Page:
        """Return the page of messages with a key, newest first, or of a topic by store time."""
        topic, key, cursor = asked["topic"], asked["key"], asked["cursor"] or None
        if not topic:
            raise BadQueryError("topic is missing: give it; the index contains topic and key together")
        selection = Selection(
            (topic,), keys=(key,) if key else None, begin=asked["begin"], end=asked["end"],
            index_type=KEY_TYPES[asked["type"]], max_num=asked["max_num"],  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            if key:
                return key_page(store, selection, cursor, _message_row)
            if not store.queue_ids(topic):
                store.refresh()
                if not store.queue_ids(topic):
                    raise NotFoundError("this store has no queue of that topic")
            page = time_page(store, selection, cursor, _message_row, newest_first=asked["order"] == "newest")
        except BadCursorError as error:
            raise BadQueryError(str(error)) from None
        page.unread = [{**each, "error": error_text(each["error"])} for each in page.unread]
        return page

    def place_of_id(self, store: MessageStore, asked: Asked) -> int:
        """Return the phy offset of the message with an offset message id or a unique key."""
        try:
            return store.phy_offset_by_id(asked["id"].strip(), asked["topic"] or None)
        except (InvalidMessageError, OffsetOutOfRangeError, CorruptionError) as error:
            raise NotFoundError(
                f"no message has this id, neither as offset message id nor as unique key: {error.message}"
            ) from None

    def _look_up(self, store: MessageStore, phy_offset: int) -> MessageExt:
        message = store.commit_log.look_up(phy_offset)
        if message is None:
            try:
                message = store.message_at(phy_offset)
            except (OffsetOutOfRangeError, CorruptionError) as error:
                raise NotFoundError(str(error)) from None
        return message

    def message(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return a message: `anatomy`, and its body as asked for."""
        phy_offset = asked["phy_offset"]
        with self.few_at_once(store, phy_offset):
            value = self.anatomy(store, phy_offset)
            if asked["body"] != "none":
                body, problem = self.body(store, phy_offset)
                value |= _body_object(body, asked["body"]) | problem
            return value

    def anatomy(self, store: MessageStore, phy_offset: int) -> dict[str, Any]:
        """Return a message without its body: properties, record, queue units, index entries, neighbours."""
        message = self._look_up(store, phy_offset)
        path, pos, read = record_place(store, message)
        try:
            fields = record_fields(read, message.size, body_crc(message))
        except StoreError as error:
            fields = [Field("record", 0, message.size, error.message)]
        row = _message_row(message)
        # It is about the limits of a list.
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
        """Return the record of a message."""
        message = self._look_up(store, phy_offset)
        return record_place(store, message)[2](0, message.size)

    def body(self, store: MessageStore, phy_offset: int) -> tuple[bytes, dict[str, Any]]:
        """Return the body of a message, and an empty dict.

        If the body cannot be decompressed it is returned as stored, and the dict has ``body_error``, as well as ``corrupt``
        and ``damage`` if the body contradicts its compression flag.
        """
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
        """Wait for a turn to read a body that is or may be large; raise `StoreError` after 20 s."""
        message = self._look_up(store, phy_offset)
        size, compressed = message.size, bool(message.sys_flag & 1)
        del message
        if size <= (_LARGE_STORED if compressed else _LARGE_BODY):
            yield
            return
        if not self._large.acquire(timeout=_LARGE_PATIENCE):
            raise StoreError("too many large messages are being read; try again later")
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

    def pending(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return the pending messages: totals, a page of rows, the places that were read, and problems."""
        found, first = self._found_pending(store), asked["first"]
        # An optional library; `pending` raises if it is missing.
        import pyarrow.compute as pc

        table = found.table
        for name in ("kind", "topic"):
            if asked[name]:
                table = table.filter(pc.equal(table.column(name), asked[name]))
        chosen = dataclasses.replace(found, unordered=table.slice(first, asked["max_num"]))
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

        found = self._pending.get("all", lambda: pending(store), _PENDING_KEPT)
        if found.table.nbytes > _PENDING_BYTES:
            self._pending = Kept()
        return found


def _body_object(body: bytes, mode: str) -> dict[str, Any]:
    if len(body) > _JSON_BODY:
        error = f"the body has {len(body)} bytes: download it from /message/<phy offset>/body"
        return {"body": None, "body_encoding": None, "body_error": error}
    if mode == "text":
        try:
            return {"body": body.decode("utf-8"), "body_encoding": "utf-8"}
        except UnicodeDecodeError:
            mode = "base64"
    text = body.hex() if mode == "hex" else base64.b64encode(body).decode("ascii")
    return {"body": text, "body_encoding": mode}


def _shown(field: Field) -> int:
    # The page shows the body separately, in parts.
    return 64 if field.name == "body" else 1024


def _with_file(value: dict[str, Any], name: str, root: str) -> dict[str, Any]:
    return value | {name: file_name(value[name], root)} if value.get(name) else value
