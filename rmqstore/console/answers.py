"""What the console knows, as plain values: the same for its pages and for its JSON API.

Owns the shape of every answer.  An answer is made of dicts, lists, numbers and texts that JSON can hold; times are ms
since epoch, sizes bytes.  It only reads; what is not there raises `NotFoundError`, what was asked wrongly `BadQueryError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from rmqstore._version import __version__
from rmqstore.console.anatomy import (
    Field,
    body_crc,
    file_name,
    index_entries,
    queue_units,
    record_fields,
    record_place,
)
from rmqstore.console.paging import BadCursorError, Page, key_page, queue_page, time_page
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import CorruptionError, InvalidMessageError, OffsetOutOfRangeError, StoreError
from rmqstore.index.index_file import IndexFile
from rmqstore.message import MessageExt, decompress_body
from rmqstore.offline.describe import QueueDescription, rocksdb_folders
from rmqstore.store.message_store import MessageStore
from rmqstore.store.retention import used_ratio

__all__ = ["Answers", "BadQueryError", "NotFoundError"]

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
_OVERVIEW_KEPT = 1.0
# What waits is looked for once for all who ask within so many seconds, unless it takes more bytes than this.
_PENDING_KEPT = 10.0
_PENDING_BYTES = 256 * 1024 * 1024
_SAMPLES = 120
_RATE_SPAN = 300.0
_HISTOGRAMS_KEPT = 32
_ENTRIES_READ = 1 << 20
# RocketMQ warns above this part of the disk (diskSpaceWarningLevelRatio).
_DISK_WARNING = 0.9
_STEP_LIMIT = 64


class NotFoundError(LookupError):
    """There is nothing under that name or at that place."""


class BadQueryError(ValueError):
    """A question that cannot be asked like that; the text says how."""


def _preview(message: MessageExt) -> dict[str, Any]:
    stored = message.body_stored
    compressed = bool(message.sys_flag & 1)
    if not compressed:
        size, body = len(stored), stored
    elif len(stored) > _PREVIEW_STORED:
        return {"body_size": None, "preview": None, "body_error": "compressed, and too large for a list"}
    else:
        try:
            # A few bytes may stand for gigabytes; a list never unpacks more than this.
            body = decompress_body(stored, message.sys_flag, _PREVIEW_UNPACKED)
        except StoreError as error:
            return {"body_size": None, "preview": None, "body_error": error.message}
        size = len(body)
    text = body[: 4 * _PREVIEW].decode("utf-8", "backslashreplace")
    return {
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
        "corrupt": message.corrupt,
        "damage": message.damage,
        **_preview(message),
    }


def _queue_row(store: MessageStore, queue: AnyConsumeQueue) -> dict[str, Any]:
    return {
        **QueueDescription.of(queue, store.commit_log.min_offset).as_dict(),
        "size": queue.disk_files * queue.queue.mapped_file_size,
        "error": None,
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    max_offset: int
    totals: dict[str, int]


class Answers:
    """The answers about one store.

    Methods take the open store of the request; what is kept between requests (samples for rates, histograms of index
    files) is bounded and shared by all threads.
    """

    def __init__(self, path: str):
        self.path = path
        self._overview_lock = threading.Lock()
        self._overview: tuple[float, int, dict[str, Any]] | None = None
        self._pending_lock = threading.Lock()
        self._pending: tuple[float, Any] | None = None
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._histogram_lock = threading.Lock()
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self._histograms: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    # ---------------------------------------------------------------------------------------------------------- overview

    def overview(self, store: MessageStore) -> dict[str, Any]:
        """dict: the store as a whole: log, topics, health, rates since earlier looks."""
        # One at a time, and what was just made serves those that waited: it goes over all queues.
        with self._overview_lock:
            kept = self._overview
            if kept is not None and kept[1] == id(store) and time.monotonic() - kept[0] < _OVERVIEW_KEPT:
                return kept[2]
            value = self._make_overview(store)
            self._overview = time.monotonic(), id(store), value
            return value

    def _make_overview(self, store: MessageStore) -> dict[str, Any]:
        log = store.commit_log
        topics: dict[str, dict[str, Any]] = {}
        last: int | None = None
        errors: list[str] = []
        queues = self._queues(store)
        for row, queue in queues:
            topic = topics.setdefault(
                row["topic"],
                {"topic": row["topic"], "queues": 0, "messages": 0, "total": 0, "size": 0, "kind": row["kind"]},
            )
            topic["queues"] += 1
            topic["messages"] += row["messages"]
            topic["total"] += row["max_queue_offset"]
            topic["size"] += row["size"]
            if row["error"] is not None:
                errors.append(row["error"])
                continue
            unit = None if queue is None else queue.last_record()
            stored = -1 if unit is None else log.store_timestamp_at(unit.phy_offset)
            if stored >= 0:
                last = stored if last is None else max(last, stored)
                topic["last_store_timestamp"] = max(stored, topic.get("last_store_timestamp") or 0)
        for topic in topics.values():
            topic.setdefault("last_store_timestamp", None)
        first = next(store.messages(), None)
        rates = self._rates(log.max_offset, topics)
        return {
            "path": store.path,
            "version": __version__,
            "now": time.time_ns() // 1_000_000,
            "clean": not os.path.exists(os.path.join(store.path, "abort")),
            "commit_log": {
                "segments": len(log.queue),
                "segment_size": log.segment_size,
                "min_offset": log.min_offset,
                "max_offset": log.max_offset,
                "size": log.max_offset - log.min_offset,
                "first_store_timestamp": None if first is None else first.store_timestamp,
                "last_store_timestamp": log.last_store_timestamp() if last is None else last,
            },
            "topics": sorted(topics.values(), key=lambda topic: topic["topic"]),
            "queues": sum(topic["queues"] for topic in topics.values()),
            "messages": sum(topic["messages"] for topic in topics.values()),
            "index": self._index_summary(store),
            "checkpoint": store.checkpoint.as_dict(),
            "rates": rates,
            "health": self._health(store, last, errors, queues),
            "disk": _disk(store.path),
            "config": store.config.as_dict(),
            "assumed": list(store.config.assumed),
        }

    def _queues(self, store: MessageStore) -> list[tuple[dict[str, Any], AnyConsumeQueue | None]]:
        found: list[tuple[dict[str, Any], AnyConsumeQueue | None]] = []
        for topic, queue_id in store.queues.keys():
            queue = None
            try:
                queue = store.queues.find(topic, queue_id)
                if queue is not None:
                    found.append((_queue_row(store, queue), queue))
            except (StoreError, OSError) as error:
                found.append((_unreadable_queue(topic, queue_id, error), None))
        return found

    def _rates(self, max_offset: int, topics: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        now = time.monotonic()
        sample = _Sample(now, max_offset, {name: topic["total"] for name, topic in topics.items()})
        while self._samples and now - self._samples[0].at > _RATE_SPAN:
            self._samples.popleft()
        if self._samples and self._samples[-1].max_offset > max_offset:
            # Another log than the one that was looked at before.
            self._samples.clear()
        before = self._samples[0] if self._samples else None
        self._samples.append(sample)
        seconds = 0.0 if before is None else now - before.at
        for name, topic in topics.items():
            known = None if before is None else before.totals.get(name, 0)
            topic["rate"] = None if known is None else max(topic["total"] - known, 0) / seconds
        if before is None:
            return None
        messages = sum(max(total - before.totals.get(name, 0), 0) for name, total in sample.totals.items())
        return {
            "seconds": round(seconds, 3),
            "bytes_per_second": (max_offset - before.max_offset) / seconds,
            "messages_per_second": messages / seconds,
        }

    def _index_summary(self, store: MessageStore) -> dict[str, Any] | None:
        service = store.index_service
        if service is None:
            return None
        newest = service.newest()
        header = None if newest is None else newest.header
        return {
            "files": len(service.names),
            "size": len(service.names) * store.config.index_file_size,
            "fill": service.fill,
            "end_phy_offset": None if header is None else header.end_phy_offset,
            "end_timestamp": None if header is None else header.end_timestamp,
        }

    def _health(
        self,
        store: MessageStore,
        last: int | None,
        errors: list[str],
        queues: list[tuple[dict[str, Any], AnyConsumeQueue | None]],
    ) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []

        def note(name: str, state: str, text: str) -> None:
            found.append({"name": name, "state": state, "text": text})

        if os.path.exists(os.path.join(store.path, "abort")):
            note("closing", "note", "there is an abort file: the store is in use, or was not closed in order")
        else:
            note("closing", "good", "closed in order")
        if os.path.exists(os.path.join(store.path, ".rmqstore-rebuild")):
            note("rebuild", "bad", "a rebuild was interrupted or is running; run the same rebuild again if none is")
        damaged = [(problem.path or store.path, problem.message) for problem in store.damaged_files()]
        queue_files = sum(os.path.relpath(path, store.path).startswith("consumequeue") for path, _ in damaged)
        if errors:
            note("queues", "bad", f"{len(errors)} queues cannot be read, the first: {errors[0]}")
        elif queue_files:
            note("queues", "bad", f"{queue_files} of their files are damaged, and what those lost reads as zeros: see files")
        else:
            note("queues", "good", "every queue can be read")
        log = store.commit_log
        rocksdb = rocksdb_folders(store.path)
        database = store.queue_database
        if database is not None:
            gone_over = sum(end - begin for begin, end in database.completed)
            text = f"{database.queues} queues in {database.path}"
            if gone_over:
                text += f"; units of {gone_over} bytes of the log were lost or are damaged, and are read from it"
            note("queues in RocksDB", "bad" if gone_over or database.damage else "good", text)
        elif rocksdb and log.max_offset > log.min_offset and not any(queue.disk_files for _, queue in queues if queue):
            folders = ", ".join(f"{name}/" for name in rocksdb)
            note(
                "queue files",
                "bad",
                f"there are none; the queues are probably in RocksDB, which is not read: {folders}",
            )
        if store.undispatched is not None:
            begin, end = store.undispatched
            unserved = "" if store.unserved is None else f"; of these the last {end - store.unserved[0]} are shown in no queue here"
            note(
                "dispatch",
                "note" if store.unserved is None else "bad",
                f"no queue leads to {end - begin} bytes of the log, from phy offset {begin} on{unserved}",
            )
        point = store.checkpoint
        if last is not None and point.physic_msg_timestamp < last:
            seconds = (last - point.physic_msg_timestamp) / 1000
            text = (
                "the checkpoint was never written"
                if not point.physic_msg_timestamp
                else f"{seconds:.1f} s behind the log"
            )
            note("checkpoint", "note", text)
        else:
            note("checkpoint", "good", "up to the end of the log")
        if store.index_service is None:
            note("index", "note", "the config says not to index")
        else:
            newest = store.index_service.newest()
            if newest is None and store.database_index.is_used():
                behind = log.max_offset - store.database_index.last_offset
                note("index", "good", f"in RocksDB; its last record lies {behind} bytes before the end of the log")
            elif newest is None:
                state = "note" if log.max_offset == log.min_offset else "bad"
                note(
                    "index",
                    state,
                    "there is no index file; queries by key search the log, up to a bound. rmqstore rebuild makes the index",
                )
            else:
                behind = log.max_offset - newest.header.end_phy_offset
                note("index", "good", f"its newest entry lies {behind} bytes before the end of the log")
        disk = _disk(store.path)
        if disk is not None:
            state = "bad" if disk["used_ratio"] > _DISK_WARNING else "good"
            note("disk", state, f"{100 * disk['used_ratio']:.1f} % of it is used")
        problem = store.consumer_progress()[1]
        if problem is not None:
            note("consumer progress", "bad", f"cannot be read: {problem}")
        for path, message in damaged:
            note("files", "bad", f"{file_name(path, store.path)}: {message}")
        return found

    # ------------------------------------------------------------------------------------------------------------ queues

    def queues(self, store: MessageStore, topic: str | None = None) -> list[dict[str, Any]]:
        """The queues of a topic, or all."""
        found = []
        for name, queue_id in store.queues.keys():
            if topic is not None and name != topic:
                continue
            try:
                queue = store.queues.find(name, queue_id)
                if queue is not None:
                    found.append(_queue_row(store, queue))
            except (StoreError, OSError) as error:
                found.append(_unreadable_queue(name, queue_id, error))
        if topic is not None and not found:
            raise NotFoundError("there is no queue of that topic in this store")
        return found

    def queue(self, store: MessageStore, topic: str, queue_id: int, start: int | None, size: int) -> dict[str, Any]:
        """One queue: its bounds and files, and its messages from queue offset `start` on; by default the newest."""
        queue = store._state.queue(topic, queue_id)
        if queue is None:
            raise NotFoundError("there is no such queue in this store")
        row = _queue_row(store, queue)
        low, high = row["min_queue_offset"], row["max_queue_offset"]
        first = max(low, high - size) if start is None else min(max(start, low), high)
        rows = queue_page(store, topic, queue_id, first, size, message_row)
        following = first if not rows else rows[-1]["unit"]["queue_offset"] + max(rows[-1]["unit"]["num"], 1)
        files = [
            {
                "name": os.path.basename(mapped_file.path),
                "path": file_name(mapped_file.path, store.path),
                "from_offset": mapped_file.file_from_offset,
                "size": mapped_file.size,
            }
            for mapped_file in queue.files()
            if not queue.queue.is_memory_only(mapped_file.file_from_offset)
        ]
        return {
            **row,
            "start": first,
            "rows": rows,
            "older": max(low, first - size) if first > low else None,
            "newer": following if following < high else None,
            "queue_files": files,
            "unit_size": queue.unit_size,
        }

    # ---------------------------------------------------------------------------------------------------------- messages

    def by_key(
        self,
        store: MessageStore,
        topic: str,
        key: str,
        kind: str | None,
        begin: int | None,
        end: int | None,
        cursor: str | None,
        size: int,
    ) -> Page:
        """Messages of a key, newest first; any number of pages."""
        if not topic:
            raise BadQueryError("a key is indexed together with its topic: give the topic too")
        try:
            return key_page(store, topic, key, kind, begin, end, cursor, size, message_row)
        except BadCursorError as error:
            raise BadQueryError(str(error)) from None

    def by_time(
        self,
        store: MessageStore,
        topic: str,
        begin: int | None,
        end: int | None,
        newest_first: bool,
        cursor: str | None,
        size: int,
    ) -> Page:
        """Messages of a topic by store time."""
        if not store.queue_ids(topic):
            store.queues.refresh()
            if not store.queue_ids(topic):
                raise NotFoundError("this store has no queue of that topic")
        try:
            return time_page(store, topic, begin, end, newest_first, cursor, size, message_row)
        except BadCursorError as error:
            raise BadQueryError(str(error)) from None

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
        return {
            **message_row(message),
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

    def body(self, store: MessageStore, phy_offset: int) -> tuple[bytes, str | None]:
        """(body, None), unpacked; (body as stored, what is wrong) where it cannot be."""
        message = self._look_up(store, phy_offset)
        try:
            return decompress_body(message.body_stored, message.sys_flag, _UNPACKED_LIMIT), None
        except StoreError as error:
            return message.body_stored, error.message

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

    # ------------------------------------------------------------------------------------------------------------- index

    def index(self, store: MessageStore) -> list[dict[str, Any]]:
        """The index files, oldest first."""
        service = store.index_service
        if service is None:
            return []
        service.load()
        found = []
        for name in service.names:
            try:
                found.append(_index_row(service.file(name)))
            except (FileNotFoundError, OffsetOutOfRangeError):
                continue
        return found

    def index_file(self, store: MessageStore, name: str) -> dict[str, Any]:
        """One index file: its header, fill, and how long its chains are."""
        service = store.index_service
        if service is not None and name not in service.names:
            service.load()
        if service is None or name not in service.names:
            raise NotFoundError("there is no index file of that name in this store")
        index = service.file(name)
        row = _index_row(index)
        return {**row, "path": file_name(index.path, store.path), "chains": self._chains(index)}

    def _chains(self, index: IndexFile) -> dict[str, Any]:
        count = min(index.index_count, index.index_num)
        status = os.stat(index.path)
        # One at a time: it goes over all entries, and others ask for the same.
        with self._histogram_lock:
            key = (status.st_dev, status.st_ino, count)
            known = self._histograms.get(key)
            if known is None:
                known = _chain_lengths(index, count)
                self._histograms[key] = known
                while len(self._histograms) > _HISTOGRAMS_KEPT:
                    self._histograms.popitem(last=False)
            self._histograms.move_to_end(key)
            return known

    # --------------------------------------------------------------------------------------------------------- consumers

    def consumers(self, store: MessageStore) -> list[dict[str, Any]]:
        """The progress of every group in every queue: what is next, how much is left, and since when it waits."""
        found = []
        for (group, topic), offsets in sorted(store.consumer_offsets.list().items()):
            for queue_id, offset in sorted(offsets.items()):
                row: dict[str, Any] = {
                    "group": group,
                    "topic": topic,
                    "queue_id": queue_id,
                    "offset": offset,
                    "max_queue_offset": None,
                    "lag": None,
                    "waiting_since": None,
                    "last_store_timestamp": None,
                }
                try:
                    queue = store.queues.find(topic, queue_id)
                    if queue is not None:
                        row |= _progress(store, queue, offset)
                except (StoreError, OSError) as error:
                    row["error"] = str(error)
                found.append(row)
        return found

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


def _progress(store: MessageStore, queue: AnyConsumeQueue, offset: int) -> dict[str, Any]:
    high = queue.max_queue_offset
    waiting = queue.unit(offset) if offset < high else None
    last = queue.last_record()
    since = -1 if waiting is None else store.commit_log.store_timestamp_at(waiting.phy_offset)
    newest = -1 if last is None else store.commit_log.store_timestamp_at(last.phy_offset)
    return {
        "max_queue_offset": high,
        "lag": high - offset,
        "waiting_since": since if since >= 0 else None,
        "last_store_timestamp": newest if newest >= 0 else None,
    }


def _unreadable_queue(topic: str, queue_id: int, error: Exception) -> dict[str, Any]:
    return {
        "topic": topic,
        "queue_id": queue_id,
        "kind": "",
        "min_queue_offset": 0,
        "max_queue_offset": 0,
        "messages": 0,
        "files": 0,
        "size": 0,
        "error": str(error),
    }


def _shown(field: Field) -> int:
    # The body has a view of its own, in parts.
    return 64 if field.name == "body" else 1024


def _with_file(value: dict[str, Any], name: str, root: str) -> dict[str, Any]:
    return value | {name: file_name(value[name], root)} if value.get(name) else value


def _disk(path: str) -> dict[str, Any] | None:
    try:
        usage = shutil.disk_usage(path)
        return {"total": usage.total, "free": usage.free, "used_ratio": used_ratio(path)}
    except OSError:
        return None


def _index_row(index: IndexFile) -> dict[str, Any]:
    header = index.header
    entries = min(header.index_count, index.index_num) - 1
    return {
        "name": index.name,
        "size": index.mapped_file.size,
        "entries": entries,
        "capacity": index.index_num - 1,
        "fill": entries / max(index.index_num - 1, 1),
        "slots": index.slot_num,
        "slots_used": header.hash_slot_count,
        "begin_timestamp": header.begin_timestamp,
        "end_timestamp": header.end_timestamp,
        "begin_phy_offset": header.begin_phy_offset,
        "end_phy_offset": header.end_phy_offset,
    }


def _chain_lengths(index: IndexFile, count: int) -> dict[str, Any]:
    """How many slots have chains of which length, told by the hashes of the entries; block by block."""
    lengths = np.zeros(index.slot_num, np.int32)
    for first in range(1, count, _ENTRIES_READ):
        hashes = index.read_entries(first, min(_ENTRIES_READ, count - first))[0]
        slots = np.remainder(hashes, index.slot_num)
        lengths += np.bincount(slots, minlength=index.slot_num).astype(np.int32)
    longest = int(lengths.max(initial=0))
    used = int(np.count_nonzero(lengths))
    bins = []
    low = 1
    while low <= max(longest, 1):
        # 1, 2, 3, 4, then doubling.
        high = low if low <= 4 else 2 * (low - 1)
        bins.append({"from": low, "to": high, "slots": int(np.count_nonzero((lengths >= low) & (lengths <= high)))})
        low = high + 1
    entries = count - 1
    # What a look-up of a key that is there walks, on average: half of its chain.
    squares = float(np.dot(lengths.astype(np.float64), lengths.astype(np.float64)))
    return {
        "slots_used": used,
        "slots_empty": index.slot_num - used,
        "longest": longest,
        "mean": entries / used if used else 0.0,
        "mean_walk": squares / entries if entries > 0 else 0.0,
        "bins": bins,
    }


# Everything that a JSON document is made of; it was parsed before, so that nothing else occurs.
_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+)', re.DOTALL)
_INDENT_DEPTH = 40


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def json_text(body: bytes, limit: int) -> str | None:
    """str: a body that is JSON, indented, each of its values spelled as it was; None where it is none.

    Parameters
    ----------
    limit : int
        About how many characters to give at most; an ellipsis stands for the rest.
    """
    try:
        text = body.decode("utf-8")
        json.loads(text, parse_constant=_no_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    out: list[str] = []
    size = depth = 0
    before = ""
    for match in _JSON_TOKEN.finditer(text):
        token = match[1]
        if token in "]}":
            depth -= 1
        broken = before and (
            (before in "[{," and not (before in "[{" and token in "]}")) or (token in "]}" and before not in "[{")
        )
        if broken:
            out.append("\n" + "  " * min(depth, _INDENT_DEPTH))
            size += len(out[-1])
        out.append(token + " " if token == ":" else token)
        size += len(token)
        if token in "[{":
            depth += 1
        before = token
        if size > limit:
            out.append("\n…")
            break
    return "".join(out)
