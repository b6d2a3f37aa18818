"""What the console knows, as plain values: the same for its pages and for its JSON API.

Owns the shape of every answer.  An answer is made of dicts, lists, numbers and texts that JSON can hold; times are ms
since epoch, sizes bytes.  It only reads; what is not there raises `NotFoundError`, what was asked wrongly `BadQueryError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rmqstore.console.anatomy import (
    Field,
    body_crc,
    file_name,
    index_entries,
    queue_units,
    record_fields,
    record_place,
)
from rmqstore.console.consumer_answers import consumer_rows
from rmqstore.console.errors import BadQueryError, NotFoundError, error_text
from rmqstore.console.index_answers import IndexAnswers
from rmqstore.console.lists import in_order
from rmqstore.console.overview_answers import OverviewAnswers
from rmqstore.console.settings_answers import SettingsAnswers
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
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

__all__ = ["LARGE_BODY", "Answers", "message_row"]

_PREVIEW = 120
# What is unpacked of a body for a list: bytes on disk, and bytes that they stand for.
_PREVIEW_STORED = 16 * 1024
_PREVIEW_UNPACKED = 64 * 1024
# Bodies above this are read by few requests at one time, and those above the second one never unpacked.
LARGE_BODY = 1024 * 1024
_LARGE_STORED = 4096
_UNPACKED_LIMIT = 64 * 1024 * 1024
_LARGE_AT_ONCE = 2
_LARGE_PATIENCE = 20.0
# What waits is looked for once for all who ask within so many seconds, unless it takes more bytes than this.
_PENDING_KEPT = 10.0
_PENDING_BYTES = 256 * 1024 * 1024
_STEP_LIMIT = 64


def _preview(message: MessageExt) -> dict[str, Any]:
    # Where `damage` is given, the body is not what its compression flag says, and is shown as it is stored.
    body, damage = message.body_stored, {}
    if message.sys_flag & 1 and message.crc_agrees:
        if len(body) > _PREVIEW_STORED:
            return {"body_size": None, "preview": None, "body_error": "compressed, and too large for a list"}
        try:
            # A few bytes may stand for gigabytes; a list never unpacks more than this.
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
    """dict: what a list shows of a message."""
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
    return {
        **QueueDescription.of(queue, store.commit_log.min_offset).as_dict(),
        "size": queue.disk_files * queue.files.mapped_file_size,
        "error": None,
    }


class Answers:
    """The answers about one store.

    Methods take the open store of the request; what is kept between requests (samples for rates, histograms of index
    files) is bounded and shared by all threads.

    Parameters
    ----------
    path : str
        The store's root.
    use : callable, optional
        As of `Survey`: where it is given, a store's many queues are looked at in a thread.
    """

    def __init__(self, path: str, use: Callable[[], AbstractContextManager[MessageStore]] | None = None):
        self.path = path
        self._of_overview = OverviewAnswers(use)
        self._of_index = IndexAnswers()
        self._of_settings = SettingsAnswers(path)
        self._pending_lock = threading.Lock()
        self._pending: tuple[float, Any] | None = None
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self.survey = self._of_overview.survey

    def close(self) -> None:
        """End what goes on in threads."""
        self.survey.close()

    # ---------------------------------------------------------------------------------------- what modules of their own say

    def overview(
        self, store: MessageStore, first: int = 0, max_num: int = 1000, sort: str = "topic", name: str = ""
    ) -> dict[str, Any]:
        """The store as a whole, and a page of its topics."""
        return self._of_overview.overview(store, first, max_num, sort, name)

    def queues(
        self, store: MessageStore, topic: str | None = None, first: int = 0, max_num: int = 1000, sort: str = "queue"
    ) -> dict[str, Any]:
        """A page of the queues of a topic, or of all."""
        return self._of_overview.queues(store, topic, first, max_num, sort)

    def timeline(self, store: MessageStore, bins: int) -> dict[str, Any]:
        """Messages and bytes by store time."""
        return self._of_overview.timeline(store, bins)

    def bytes_by_topic(self, store: MessageStore) -> dict[str, Any]:
        """The topics that take most of the log."""
        return self._of_overview.bytes_by_topic(store)

    def index(self, store: MessageStore) -> list[dict[str, Any]]:
        """The index files, oldest first."""
        return self._of_index.index(store)

    def index_problems(self, store: MessageStore) -> list[dict[str, str]]:
        """The index files that could not be read."""
        return self._of_index.problems(store)

    def index_file(self, store: MessageStore, name: str) -> dict[str, Any]:
        """One index file: its header, fill, and how long its chains are."""
        return self._of_index.index_file(store, name)

    def settings(self, what: str, first: int, max_num: int, sort: str, name: str) -> dict[str, Any]:
        """One list of a broker's settings."""
        return self._of_settings.settings(what, first, max_num, sort, name)

    def consumers(self, store: MessageStore, sort: str = "group") -> list[dict[str, Any]]:
        """The progress of every group in every queue: what is next, how much is left, and since when it waits."""
        rows = consumer_rows(store)
        return rows if sort == "group" else in_order(rows, sort)

    # ------------------------------------------------------------------------------------------------------------ queues

    def queue(self, store: MessageStore, topic: str, queue_id: int, start: int | None, size: int) -> dict[str, Any]:
        """One queue: its bounds and files, and its messages from queue offset `start` on; by default the newest."""
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

    # ---------------------------------------------------------------------------------------------------------- messages

    def by_key(self, store: MessageStore, selection: Selection, cursor: str | None) -> Page:
        """Messages of a key, newest first; any number of pages of `max_num` messages."""
        if not selection.topic:
            raise BadQueryError("a key is indexed together with its topic: give the topic too")
        try:
            return key_page(store, selection, cursor, message_row)
        except BadCursorError as error:
            raise BadQueryError(str(error)) from None

    def by_time(self, store: MessageStore, selection: Selection, cursor: str | None, *, newest_first: bool) -> Page:
        """Messages of a topic by store time; any number of pages of `max_num` messages."""
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
        """What a list shows of the message at that place; one that is damaged is marked, as everywhere."""
        return message_row(self._look_up(store, phy_offset))

    def message(self, store: MessageStore, phy_offset: int) -> dict[str, Any]:
        """All of a message but its body: properties, record, queue units, index entries, neighbours."""
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
        """The record's bytes."""
        message = self._look_up(store, phy_offset)
        return record_place(store, message)[2](0, message.size)

    def body(self, store: MessageStore, phy_offset: int) -> tuple[bytes, dict[str, Any]]:
        """The body and an empty dict; the body as stored and ``body_error`` where it cannot be unpacked, with ``corrupt``
        and ``damage`` where it is not what its compression flag says."""
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
        """Wait for a turn where a body is or may be large, so that many requests do not fill the memory together.

        Raises
        ------
        StoreError
            No turn came in time.
        """
        message = self._look_up(store, phy_offset)
        size, compressed = message.size, bool(message.sys_flag & 1)
        del message
        if size <= (_LARGE_STORED if compressed else LARGE_BODY):
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

    # ----------------------------------------------------------------------------------------------------------- pending

    def pending(
        self, store: MessageStore, kind: str | None, topic: str | None, first: int, max_num: int
    ) -> dict[str, Any]:
        """dict: what still waits: totals, some of the messages, what was looked at, what could not be read."""
        found = self._found_pending(store)
        # Loaded when it is asked for: the other pages do without this library, and `pending` says how to get it.
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
