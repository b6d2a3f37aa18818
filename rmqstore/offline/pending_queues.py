"""Find pending messages of delay levels, retry and dead-letter topics, and transactions.

The first pending one follows from config/delayOffset.json, a group's progress, or the offset of the service that checks
transactions; OP messages settle half messages.  Pending transactions in RocksDB are keys of the database; later ones are found in
the log.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from rmqstore._core import EXT_ADDRESS_MAX
from rmqstore.consumer.json_files import load_with_backup, whole_number
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.message import DLQ_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC
from rmqstore.offline.pending_search import (
    PendingSource,
    Records,
    Search,
    chosen_records,
    records_at,
    records_in_log,
)
from rmqstore.rocksdb.waiting import StoredTransactions, read_transactions
from rmqstore.store.columns import import_pyarrow

__all__ = ["search_delayed", "search_dlq", "search_retry"]


def search_delayed(search: Search) -> None:
    """Find the pending messages of the delay levels."""
    path = os.path.join(search.store.path, "config", "delayOffset.json")
    offsets: dict[int, int] = {}
    known = False
    try:
        (offsets, odd), read = load_with_backup(path, True, _delay_offsets)
        known = read is not None
        search.take_problems(odd)
    except (CorruptionError, OSError) as error:
        search.problem(error)
    else:
        if not known and SCHEDULE_TOPIC in search.topics:
            search.notes.append(
                "there is no config/delayOffset.json: of each delay level all messages are taken to wait that are not on "
                "their topic"
            )
    if SCHEDULE_TOPIC not in search.topics and not offsets:
        return
    source = search.source(
        "delayed",
        SCHEDULE_TOPIC,
        "the offsets of config/delayOffset.json" if known else "the first message of each queue",
    )
    store = search.store
    if store.undispatched is not None and "message_delay_level" in store.config.assumed:
        search.notes.append(
            "when delayed messages without a unit on disk are due follows from message_delay_level, which the store "
            f"does not tell: {store.config.message_delay_level!r} is assumed"
        )
    begins = {level - 1: offset for level, offset in offsets.items()}
    # A broker notes a level only if its queue exists.
    for records in search.records_of(SCHEDULE_TOPIC, begins, zero_is_noted=True):
        levels = records.numbers_of("queue_id") + 1
        waiting = {
            "topic": records.properties.text("REAL_TOPIC"),
            "queue_id": records.properties.int32("REAL_QID"),
            "due": _due_by_level(search, records, levels),
            "level": np.minimum(levels, 2**31 - 1),
        }
        search.take(source, records, waiting)


def _due_by_level(search: Search, records: Records, levels: np.ndarray) -> np.ndarray:
    unknown = np.ones(len(records), bool) if records.tags_codes is None else records.tags_codes <= EXT_ADDRESS_MAX
    if records.tags_codes is not None and not unknown.any():
        # A unit of such a queue has the due time of its message instead of the hash of its tags.
        return records.tags_codes
    delays = np.array([0, *search.store.config.delay_levels], np.int64)
    due: np.ndarray = records.numbers_of("store_timestamp") + delays[np.clip(levels, 0, len(delays) - 1)]
    if records.tags_codes is not None:
        # Without an entry in the extension a broker uses the level too.
        due[~unknown] = records.tags_codes[~unknown]
        text = f"{np.count_nonzero(unknown)} units of {SCHEDULE_TOPIC} point to nothing in the extension of their queue; when "
        text += f"their messages are due follows from message_delay_level {search.store.config.message_delay_level!r}"
        search.tell(text)
    return due


def check_delay_offsets(root: str) -> tuple[dict[int, int], list[CorruptionError]]:
    """Return the offsets of config/delayOffset.json by level, and its problems; a missing file, or one without members, is right.

    Raises
    ------
    CorruptionError, OSError
        It cannot be read, and has no backup.
    """
    told: list[CorruptionError] = []

    def decode(document: Any, path: str) -> tuple[dict[int, int], list[CorruptionError]]:
        return ({}, []) if document == {} else _delay_offsets(document, path)

    (offsets, problems), _ = load_with_backup(os.path.join(root, "config", "delayOffset.json"), True, decode, told)
    return offsets, told + problems


def _delay_offsets(document: Any, path: str) -> tuple[dict[int, int], list[CorruptionError]]:
    """Return the next queue offset by delay level, and what is wrong; all messages of a level without an offset are pending."""
    if document is None:
        return {}, []
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise CorruptionError("delayOffset.json has no offsetTable", path)
    offsets: dict[int, int] = {}
    odd = []
    for level, offset in table.items():
        try:
            number = whole_number(level, "a level", path, 32)
            value = whole_number(offset, f"the offset of level {number}", path)
        except CorruptionError as error:
            odd.append(CorruptionError(f"delayOffset.json: {error.message}", path))
            continue
        if 1 <= number <= 1 << 20 and value >= 0:
            offsets[number] = value
        else:
            odd.append(CorruptionError(f"delayOffset.json: level {number} with the offset {value}", path))
    return offsets, odd


def search_retry(search: Search) -> None:
    """Find the messages of retry topics that their groups have not consumed."""
    for topic in sorted(name for name in search.topics if name.startswith(RETRY_PREFIX)):
        begins, group = _progress(search, topic)
        known = "the group's progress"
        if not begins:
            known = "the first message of each queue"
            search.notes.append(f"no progress in {topic} was found: all its messages are taken to wait")
        # Queues of pop consumers have the topic after the group.
        name = group or topic[len(RETRY_PREFIX) :].partition("+")[0]
        _whole_queues(search, search.source("retry", topic, known), begins, name)


def search_dlq(search: Search) -> None:
    """Find the dead letters of groups."""
    for topic in sorted(name for name in search.topics if name.startswith(DLQ_PREFIX)):
        begins, _ = _progress(search, topic)
        known = "the progress of those who consume it" if begins else "the first message of each queue"
        _whole_queues(search, search.source("dlq", topic, known), begins, topic[len(DLQ_PREFIX) :])


def _progress(search: Search, topic: str) -> tuple[dict[int, int], str | None]:
    # The least progress of all groups that read the topic.
    found: dict[int, int] = {}
    groups = [group for group, name in search.progress if name == topic]
    for group in groups:
        for queue_id, offset in search.progress[group, topic].items():
            found[queue_id] = min(offset, found.get(queue_id, offset))
    return found, groups[0] if len(groups) == 1 else None


def _whole_queues(search: Search, source: PendingSource, begins: dict[int, int], group: str) -> None:
    import pyarrow.compute as pc

    pa = import_pyarrow()
    for records in search.records_of(source.name, begins):
        properties = records.properties
        real = pc.coalesce(
            properties.text("DLQ_ORIGIN_TOPIC"), properties.text("RETRY_TOPIC"), records.batch.column("topic")
        )
        search.take(source, records, {"topic": real, "group": pa.repeat(group, len(records))})


_HALF, _OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
_ROCKSDB_HALF, _ROCKSDB_OP = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"
_SERVICE = "CID_RMQ_SYS_TRANS"
_COMMIT_TYPE, _TYPE_BITS = 8, 12


def search_transactions(search: Search) -> None:
    """Find the pending transactions, in files and in RocksDB."""
    _in_files(search)
    _in_rocksdb(search)


# ---------------------------------------------------------------------------------------------------------------- files


def _in_files(search: Search) -> None:
    progress = search.progress.get((_SERVICE, _HALF), {})
    begin = progress.get(0, 0)
    if _HALF not in search.topics and begin == 0:
        return
    if not progress:
        search.notes.append(
            f"no progress of {_SERVICE} was found: of each transaction the last half message counts, from the first one "
            "there on"
        )
    source = search.source("transaction", _HALF, f"queue offset {begin} of queue 0")
    found = list(search.records_of(_HALF, {0: begin}))
    if not found:
        return
    import pyarrow.compute as pc

    settled = _settled_offsets(search, found)
    settled_ids = _settled_ids(search, found, settled, begin)
    latest = _latest(found)
    place = 0
    kept = []
    for records in found:
        keep = latest[place : place + len(records)]
        place += len(records)
        keep = keep & ~np.isin(records.numbers_of("queue_offset"), settled)
        keep &= ~pc.is_in(_ids(records), value_set=settled_ids).to_numpy(zero_copy_only=False)
        chosen = chosen_records(records, keep)
        if chosen is not None:
            kept.append(chosen)
    _add(search, source, kept, None)


def _settled_offsets(search: Search, halves: list[Records]) -> np.ndarray:
    # By place and not by time: an OP message is stored after the half messages that it settles.
    if _OP not in search.topics:
        return np.empty(0, np.int64)
    begin, first = 0, min(int(records.numbers_of("phy_offset").min()) for records in halves)
    if search.store.unserved is None:
        with contextlib.suppress(StoreError, OSError):
            queue = search.store.queues.find(_OP, 0)
            begin = 0 if queue is None else queue.first_unit_at_or_after(first)
    found: list[int] = []
    for records in search.records_of(_OP, {0: begin}, body=True):
        bodies = records.batch.column("body_stored").to_pylist()
        for body, phy_offset in zip(bodies, records.numbers_of("phy_offset").tolist()):
            pieces = [piece.strip() for piece in body.split(b",")]
            numbers = [int(piece) for piece in pieces if piece.isdigit() and len(piece) < 19]
            found += numbers
            if len(numbers) < sum(1 for piece in pieces if piece):
                search.tell(f"the OP message at phy offset {phy_offset} holds more than numbers")
    return np.array(sorted(set(found)), np.int64)


def _settled_ids(search: Search, halves: list[Records], settled: np.ndarray, begin: int) -> object:
    # OP messages are seconds late: a check before puts the half message again, and the OP message has the old queue offset.
    pa = import_pyarrow()
    try:
        queue = search.store.queues.find(_HALF, 0)
    except OSError:  # A folder that cannot be read, which is a problem already.
        queue = None
    units = [] if queue is None else [queue.unit(number) for number in settled[settled < begin].tolist()]
    places = np.array(sorted(unit.phy_offset for unit in units if unit is not None), np.int64)
    places = places[places >= search.store.commit_log.min_offset]
    found = [_ids(records) for records in records_at(search.store, places, _HALF)]
    for records in halves:
        chosen = chosen_records(records, np.isin(records.numbers_of("queue_offset"), settled))
        if chosen is not None:
            found.append(_ids(chosen))
    return pa.chunked_array(found, pa.string()).drop_null().combine_chunks()


def _latest(found: list[Records]) -> np.ndarray:
    # A check puts an unanswered half message at the end again: only the last one of a transaction counts.
    pa = import_pyarrow()
    ids = pa.chunked_array([_ids(records) for records in found], pa.string())
    phy_offsets = np.concatenate([records.numbers_of("phy_offset") for records in found])
    codes = ids.combine_chunks().dictionary_encode()
    if isinstance(codes, pa.ChunkedArray):
        codes = codes.combine_chunks()
    numbers = codes.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    newest = np.full(len(codes.dictionary) + 1, -1, np.int64)
    np.maximum.at(newest, numbers, phy_offsets)
    # Half messages without an id are transactions of their own.
    latest: np.ndarray = (numbers < 0) | (newest[numbers] == phy_offsets)
    return latest


def _ids(records: Records) -> object:
    import pyarrow.compute as pc

    return pc.coalesce(records.properties.text("__transactionId__"), records.batch.column("unique_key"))


# -------------------------------------------------------------------------------------------------------------- RocksDB


def _in_rocksdb(search: Search) -> None:
    stored, readable = search.stored_in_database(read_transactions, StoredTransactions())
    search.take_problems(stored.problems)
    low = search.store.commit_log.min_offset
    last = stored.last_phy_offset if readable else None
    end = search.store.commit_log.max_offset
    if last is not None and not 0 <= last < max(end, 1):
        path = os.path.join(search.store.path, "rocksdbstore")
        text = f"transactions: the last half message that it knows is at phy offset {last}, and the log ends at {end}; "
        search.tell(text + "the whole log was scanned", path)
        stored.last_phy_offset = last = None
    if last is None and not stored.check_times and not search.topics & {_ROCKSDB_HALF, _ROCKSDB_OP}:
        return
    begin = low if last is None else max(last, low)
    name = "rocksdbstore, family trans" if last is not None else _ROCKSDB_HALF
    source = search.source("transaction", name, f"the database, and the log from phy offset {begin}")
    if last is None:
        search.notes.append(
            f"no database says which transactions of {_ROCKSDB_HALF} are pending: those that the log holds no "
            "settlement of are taken"
        )
    gone = sorted(offset for offset in stored.check_times if offset < low)
    if gone:
        search.tell(
            f"{len(gone)} pending transactions are before the log, the first at {gone[0]}: their messages are "
            "deleted"
        )
    halves: list[Records] = []
    settled: list[np.ndarray] = []
    search.walk_from(begin)
    for records in records_in_log(search.store, (_ROCKSDB_HALF, _ROCKSDB_OP), begin):
        is_half = np.asarray(records.batch.column("topic").to_numpy(zero_copy_only=False) == _ROCKSDB_HALF)
        half, op = chosen_records(records, is_half), chosen_records(records, ~is_half)
        if half is not None:
            halves.append(half)
        if op is not None:
            offsets, there = op.properties.whole("TRANS_OFFSET")
            settled.append(offsets[there])
    _of_both(search, source, stored, halves, np.concatenate(settled) if settled else np.empty(0, np.int64))


def _of_both(
    search: Search, source: PendingSource, stored: StoredTransactions, halves: list[Records], settled: np.ndarray
) -> None:
    # The transactions of the database, and later ones of the log, without settled ones.
    low = search.store.commit_log.min_offset
    in_log = np.concatenate([half.numbers_of("phy_offset") for half in halves]) if halves else np.empty(0, np.int64)
    wanted = np.array(sorted(offset for offset in stored.check_times if offset >= low), np.int64)
    wanted = wanted[~np.isin(wanted, settled) & ~np.isin(wanted, in_log)]
    kept = list(records_at(search.store, wanted, _ROCKSDB_HALF))
    missing = len(wanted) - sum(map(len, kept))
    if missing:
        search.tell(f"{missing} pending transactions of rocksdbstore lead to no half message in the log")
    last = stored.last_phy_offset
    for half in halves:
        offsets = half.numbers_of("phy_offset")
        keep = ~np.isin(offsets, settled)
        if last is not None and last not in stored.check_times:
            # The one that the database wrote last, and no longer has, was settled.
            keep &= offsets != last
        chosen = chosen_records(half, keep)
        if chosen is not None:
            kept.append(chosen)
    _add(search, source, kept, stored.check_times)


# ----------------------------------------------------------------------------------------------------------------- both


def _add(search: Search, source: PendingSource, kept: list[Records], checked: dict[int, int] | None) -> None:
    # The number of checks is in the record, or in the database.
    pa = import_pyarrow()
    committed = _committed(search, kept)
    for records in kept:
        offsets = records.numbers_of("phy_offset")
        if checked is None:
            times, _ = records.properties.whole("TRANSACTION_CHECK_TIMES")
            known = np.ones(len(records), bool)
        else:
            times = np.array([checked.get(offset, 0) for offset in offsets.tolist()], np.int64)
            known = np.array([offset in checked for offset in offsets.tolist()], bool)
        keep = ~np.isin(offsets, committed)
        source.came_out += int(np.count_nonzero(~keep))
        waiting = {
            "topic": records.properties.text("REAL_TOPIC"),
            "queue_id": records.properties.int32("REAL_QID"),
            "group": records.properties.text("PGROUP"),
            "check_times": pa.array(np.clip(times, 0, 2**31 - 1), pa.int32(), mask=~known),
        }
        search.take(source, records, waiting, keep)


def _committed(search: Search, kept: Iterable[Records]) -> np.ndarray:
    # A killed broker may have put the message on its topic without noting that the transaction is settled.
    import pyarrow.compute as pc

    pa = import_pyarrow()
    offsets, topics = [], set()
    for records in kept:
        offsets.append(records.numbers_of("phy_offset"))
        topics.update(pc.unique(records.properties.text("REAL_TOPIC")).to_pylist())
    topics.discard(None)
    if not offsets or not topics:
        return np.empty(0, np.int64)
    wanted = np.concatenate(offsets)
    values = pa.array(np.unique(wanted))
    found = []
    first = int(wanted.min())
    search.walk_from(first)
    scan = search.store.scan(
        ["sys_flag", "prepared_transaction_offset"], topic=sorted(topics), begin_phy_offset=first
    )
    for batch in scan:
        flags = batch.column(0).to_numpy()
        hits = pc.is_in(batch.column(1), value_set=values).to_numpy(zero_copy_only=False)
        hits &= (flags & _TYPE_BITS) == _COMMIT_TYPE
        if hits.any():
            found.append(batch.column(1).to_numpy()[hits])
    return np.concatenate(found) if found else np.empty(0, np.int64)
