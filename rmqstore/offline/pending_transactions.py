"""Pending transactions: half messages that are neither committed nor rolled back, of both ways a broker keeps them.

Owns which half messages wait.  In files: those from the offset of the checking service on that no OP message names.  In
RocksDB: the keys of its database, completed from the log beyond what it holds.  It only reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import numpy as np

from rmqstore.errors import StoreError
from rmqstore.offline.pending_rows import (
    PendingSource,
    Records,
    Waiting,
    int32_property,
    records_at,
    records_in_log,
)
from rmqstore.offline.pending_search import Problem, Search, chosen_records, taken_down
from rmqstore.rocksdb.waiting import StoredTransactions, read_transactions
from rmqstore.store.columns import import_pyarrow

__all__ = ["search_transactions"]

_HALF, _OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
_ROCKSDB_HALF, _ROCKSDB_OP = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"
_SERVICE = "CID_RMQ_SYS_TRANS"
_COMMIT_TYPE, _TYPE_BITS = 8, 12


def search_transactions(search: Search) -> None:
    """Find the pending transactions of both ways."""
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
    # Whatever the clock says: an OP message is stored after the half messages that it names.
    if _OP not in search.topics:
        return np.empty(0, np.int64)
    begin, first = 0, min(int(records.numbers_of("phy_offset").min()) for records in halves)
    if search.store.unserved is None:
        with contextlib.suppress(StoreError, OSError):
            queue = search.store.queues.find(_OP, 0)
            begin = 0 if queue is None else queue.first_unit_at_or_after(first)
    found: list[int] = []
    for records in search.records_of(_OP, {0: begin}, body=True):
        bodies = records.texts_of("body_stored").to_pylist()
        for body, phy_offset in zip(bodies, records.numbers_of("phy_offset").tolist()):
            pieces = [piece.strip() for piece in body.split(b",")]
            numbers = [int(piece) for piece in pieces if piece.isdigit() and len(piece) < 19]
            found += numbers
            if len(numbers) < sum(1 for piece in pieces if piece):
                search.problems.append(
                    Problem(
                        search.store.path, None, f"the OP message at phy offset {phy_offset} holds more than numbers"
                    )
                )
    return np.array(sorted(set(found)), np.int64)


def _settled_ids(search: Search, halves: list[Records], settled: np.ndarray, begin: int) -> object:
    # OP messages are written seconds late: a check in between puts the half message again, and the OP names the one before.
    pa = import_pyarrow()
    try:
        queue = search.store.queues.find(_HALF, 0)
    except OSError:  # a closed folder, which is named already
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
    # A check puts an unanswered half message again at the end: of a transaction the last one counts.
    pa = import_pyarrow()
    ids = pa.chunked_array([_ids(records) for records in found], pa.string())
    phy_offsets = np.concatenate([records.numbers_of("phy_offset") for records in found])
    codes = ids.combine_chunks().dictionary_encode()
    if isinstance(codes, pa.ChunkedArray):
        codes = codes.combine_chunks()
    numbers = codes.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    newest = np.full(len(codes.dictionary) + 1, -1, np.int64)
    np.maximum.at(newest, numbers, phy_offsets)
    # Without an id each stands for itself.
    latest: np.ndarray = (numbers < 0) | (newest[numbers] == phy_offsets)
    return latest


def _ids(records: Records) -> object:
    import pyarrow.compute as pc

    return pc.coalesce(records.properties.text("__transactionId__"), records.texts_of("unique_key"))


# -------------------------------------------------------------------------------------------------------------- RocksDB


def _in_rocksdb(search: Search) -> None:
    stored, readable = search.stored_in_database(read_transactions, StoredTransactions())
    taken_down(search, stored.problems)
    low = search.store.commit_log.min_offset
    last = stored.last_phy_offset if readable else None
    end = search.store.commit_log.max_offset
    if last is not None and not 0 <= last < max(end, 1):
        path = os.path.join(search.store.path, "rocksdbstore")
        text = f"transactions: the last half message that it knows is at phy offset {last}, and the log ends at {end}; "
        search.problems.append(Problem(path, None, text + "the whole log was gone over"))
        stored.last_phy_offset = last = None
    if last is None and not stored.check_times and not search.topics & {_ROCKSDB_HALF, _ROCKSDB_OP}:
        return
    begin = low if last is None else max(last, low)
    name = "rocksdbstore, family trans" if last is not None else _ROCKSDB_HALF
    source = search.source("transaction", name, f"the database, and the log from phy offset {begin} on")
    if last is None:
        search.notes.append(
            f"no database says which transactions of {_ROCKSDB_HALF} are pending: those that the log holds no "
            "settlement of are taken"
        )
    gone = sorted(offset for offset in stored.check_times if offset < low)
    if gone:
        search.problems.append(
            Problem(
                search.store.path, None,
                f"{len(gone)} pending transactions lie in front of the log, the first at {gone[0]}: their messages are "
                "deleted",
            )
        )  # fmt: skip
    halves: list[Records] = []
    settled: list[np.ndarray] = []
    search.walk_from(begin)
    for records in records_in_log(search.store, (_ROCKSDB_HALF, _ROCKSDB_OP), begin):
        is_half = np.asarray(records.texts_of("topic").to_numpy(zero_copy_only=False) == _ROCKSDB_HALF)
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
    # What the database holds, and what the log holds beyond it, less what was settled since.
    low = search.store.commit_log.min_offset
    in_log = np.concatenate([half.numbers_of("phy_offset") for half in halves]) if halves else np.empty(0, np.int64)
    wanted = np.array(sorted(offset for offset in stored.check_times if offset >= low), np.int64)
    wanted = wanted[~np.isin(wanted, settled) & ~np.isin(wanted, in_log)]
    kept = list(records_at(search.store, wanted, _ROCKSDB_HALF))
    missing = len(wanted) - sum(map(len, kept))
    if missing:
        search.problems.append(
            Problem(
                search.store.path,
                None,
                f"{missing} pending transactions of rocksdbstore lead to no half message in the log",
            )
        )
    last = stored.last_phy_offset
    for half in halves:
        offsets = half.numbers_of("phy_offset")
        keep = ~np.isin(offsets, settled)
        if last is not None and last not in stored.check_times:
            # The one that the database wrote last and does not hold any more was settled.
            keep &= offsets != last
        chosen = chosen_records(half, keep)
        if chosen is not None:
            kept.append(chosen)
    _add(search, source, kept, stored.check_times)


# ----------------------------------------------------------------------------------------------------------------- both


def _add(search: Search, source: PendingSource, kept: list[Records], checked: dict[int, int] | None) -> None:
    # How often each was checked stands in the record, or in the database.
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
        waiting = Waiting(
            topic=records.properties.text("REAL_TOPIC"),
            queue_id=int32_property(records, "REAL_QID"),
            group=records.properties.text("PGROUP"),
            check_times=pa.array(np.clip(times, 0, 2**31 - 1), pa.int32(), mask=~known),
        )
        search.take(source, records, waiting, keep)


def _committed(search: Search, kept: Iterable[Records]) -> np.ndarray:
    # A broker that was killed may have put the message on its topic, and not yet noted that the transaction is settled.
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
