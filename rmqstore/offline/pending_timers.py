"""Find pending timer messages: those of the timer's files, of RocksDB, and later ones of the timer topic, without recalled ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmqstore.offline.pending_search import (
    PendingSource,
    Records,
    Search,
    records_at,
    rows,
)
from rmqstore.rocksdb.waiting import StoredTimers, read_timers
from rmqstore.store.columns import import_pyarrow
from rmqstore.texts import format_time
from rmqstore.timer.timer_files import WaitingUnits, waiting_units

__all__ = ["search_timers"]

_TOPIC = "rmq_sys_wheel_timer"
_TOLD = 20


@dataclass
class _Found:
    """Rows of timers before recalls are applied, and the recalls: pairs of TIMER_OUT_MS and TIMER_DEL_UNIQKEY."""

    now: int
    batches: list[tuple[PendingSource, Any]] = field(default_factory=list)
    recalls: set[tuple[int, str]] = field(default_factory=set)
    phy_offsets: list[np.ndarray] = field(default_factory=list)

    def known(self) -> np.ndarray:
        return np.concatenate(self.phy_offsets) if self.phy_offsets else np.empty(0, np.int64)

    def take(self, source: PendingSource, records: Records, due: np.ndarray, keep: np.ndarray) -> None:
        properties = records.properties
        self.phy_offsets.append(records.numbers_of("phy_offset")[keep])
        if "TIMER_DEL_UNIQKEY" in properties:
            deleted = properties.text("TIMER_DEL_UNIQKEY")
            is_recall = deleted.is_valid().to_numpy(zero_copy_only=False)
            chosen = np.flatnonzero(is_recall & keep)
            self.recalls.update(zip(due[chosen].tolist(), deleted.take(import_pyarrow().array(chosen)).to_pylist()))
            keep = keep & ~is_recall
        real = {"topic": properties.text("REAL_TOPIC"), "queue_id": properties.int32("REAL_QID")}
        self.batches.append((source, rows(records, source, self.now, {**real, "due": due}, keep)))


def search_timers(search: Search) -> None:
    """Find the timer messages that wait."""
    units = waiting_units(search.store.path)
    stored, is_read = search.stored_in_database(read_timers, StoredTimers())
    is_read |= not search.has_database
    search.take_problems(stored.problems)
    if not units.present and stored.scan_offset is None and not stored.timers and _TOPIC not in search.topics:
        return
    search.take_problems(units.problems)
    search.notes += units.notes
    found = _Found(search.now)
    if units.present:
        _of_wheel(search, units, found)
    if stored.scan_offset is not None or stored.timers:
        _of_database(search, stored, found)
        _of_topic(search, found, stored.scan_offset or 0, None)
    elif not is_read or not units.present:
        if _TOPIC in search.topics:
            what = "there are no timer files" if is_read else "rocksdbstore cannot be read, where timers may be"
            search.notes.append(f"{what}: of {_TOPIC} all messages are taken to wait that are not on their topic")
        _of_topic(search, found, 0, None)
    else:
        _of_topic(search, found, _taken_in(search, units), units)
    _without_recalled(search, found)


# ---------------------------------------------------------------------------------------------------------------- files


def _of_wheel(search: Search, waiting: WaitingUnits, found: _Found) -> None:
    checkpoint = waiting.checkpoint
    begin = "the begin of the timer log" if checkpoint is None else format_time(checkpoint.last_read_time)
    source = search.source("timer", "timerlog", begin)
    if checkpoint is None:
        search.notes.append(
            "config/timercheck tells nothing: of the timer log all messages are taken to wait that are not on their "
            "topic"
        )
    # Records are read in the order of the log.
    units = waiting.units[np.argsort(waiting.units["phy_offset"], kind="stable")]
    again = np.diff(units["phy_offset"], prepend=units["phy_offset"][:1] - 1) == 0
    _tell_units(search, units[again], "leads to the same record as another unit")
    units = units[~again]
    led = np.zeros(len(units), bool)
    for records in records_at(search.store, units["phy_offset"], _TOPIC):
        own = units[records.numbers]
        led[records.numbers] = True
        out, has_out = records.properties.whole("TIMER_OUT_MS")
        found.take(source, records, np.where(has_out, out, own["time"]), np.ones(len(records), bool))
    lost, low = units[~led], search.store.commit_log.min_offset
    gone = lost["phy_offset"] < low
    if gone.any():
        search.tell(
            f"{np.count_nonzero(gone)} units of the timer log point before the log, which begins at {low}: "
            "the messages are deleted"
        )
    _tell_units(search, lost[~gone], f"leads to no record of {_TOPIC}")


def _tell_units(search: Search, units: np.ndarray, what: str) -> None:
    path = f"{search.store.path}/timerlog"
    for unit in units[:_TOLD]:
        position = int(unit["position"])
        text = f"timer log: the unit at {position} {what} (phy offset {int(unit['phy_offset'])})"
        search.tell(text, path, position)
    if len(units) > _TOLD:
        search.tell(f"timer log: the same holds for {len(units) - _TOLD} more units", path)


# -------------------------------------------------------------------------------------------------------------- RocksDB


def _of_database(search: Search, stored: StoredTimers, found: _Found) -> None:
    begin = "the first entry" if stored.timeline_checkpoint is None else format_time(stored.timeline_checkpoint)
    source = search.source("timer", "rocksdbstore, family timer", begin)
    if stored.timeline_checkpoint is None:
        search.notes.append(
            "rocksdbstore holds no timeline_checkpoint: all its timers are taken to wait that are not on their topic"
        )
    places = np.array(list(stored.timers.values()), np.int64)
    dues = np.array([time for time, _ in stored.timers], np.int64)
    new = ~np.isin(places, found.known())
    order = np.flatnonzero(new)[np.argsort(places[new], kind="stable")]
    places, dues = places[order], dues[order]
    led = 0
    for records in records_at(search.store, places, _TOPIC):
        led += len(records)
        found.take(source, records, dues[records.numbers], np.ones(len(records), bool))
    if led < len(places):
        search.tell(f"{len(places) - led} timers of rocksdbstore lead to no record of {_TOPIC} in the log")


# ---------------------------------------------------------------------------------------------------------------- topic


def _taken_in(search: Search, units: WaitingUnits) -> int:
    """Return the queue offset of the timer topic up to which the timer log has all pending messages; 0 if it is damaged."""
    if units.problems or any(problem.path.endswith("timerlog") for problem in search.problems):
        return 0
    if units.last_unit is not None:
        for records in records_at(search.store, np.array([units.last_unit["phy_offset"]], np.int64), _TOPIC):
            # This is what a broker does when it recovers.
            return int(records.numbers_of("queue_offset")[0]) + 1
    return 0 if units.checkpoint is None or units.last_unit is not None else units.checkpoint.taken_in


def _of_topic(search: Search, found: _Found, begin: int, units: WaitingUnits | None) -> None:
    if _TOPIC not in search.topics and begin == 0:
        return
    source = search.source("timer", _TOPIC, f"queue offset {begin} of queue 0")
    checkpoint = None if units is None else units.checkpoint
    made_up = 0
    # A message that was rolled has two records with the same key and time, by which a database has it.
    known = _keys(found) if begin == 0 or units is None else None
    for records in search.records_of(_TOPIC, {0: begin}):
        out, there = records.properties.whole("TIMER_OUT_MS")
        keep = ~np.isin(records.numbers_of("phy_offset"), found.known())
        if checkpoint is not None:
            # A message that was due when it was taken in never gets a unit; a rolled one has another record.
            taken = records.numbers_of("queue_offset") < checkpoint.taken_in
            keep &= ~(taken & there & (out < checkpoint.last_read_time))
        if known is not None:
            _without_known(records, out, keep, known)
        if checkpoint is not None:
            made_up += int(np.count_nonzero(taken & keep))
        found.take(source, records, np.where(there, out, records.numbers_of("store_timestamp")), keep)
    if made_up and checkpoint is not None:
        text = f"{made_up} records of {_TOPIC} up to queue offset {checkpoint.taken_in}, which config/timercheck says "
        text += "was taken in, have no unit in the timer log; they are counted as waiting"
        search.tell(text, f"{search.store.path}/timerlog")


def _without_known(records: Records, out: np.ndarray, keep: np.ndarray, known: set[tuple[int, str | None]]) -> None:
    # Of messages with the same key and time only the first counts; a recall has a key of its own.
    keys = records.batch.column("unique_key")
    for place in np.flatnonzero(keep & keys.is_valid().to_numpy(zero_copy_only=False)).tolist():
        named = int(out[place]), keys[place].as_py()
        keep[place] = named not in known
        known.add(named)


def _keys(found: _Found) -> set[tuple[int, str | None]]:
    pa = import_pyarrow()
    known: set[tuple[int, str | None]] = set()
    for _, batch in found.batches:
        known.update(zip(batch.column("due").view(pa.int64()).to_pylist(), batch.column("unique_key").to_pylist()))
    return known


def _without_recalled(search: Search, found: _Found) -> None:
    # A recall has the unique key, or topic+key, and the same time.
    import pyarrow.compute as pc

    pa = import_pyarrow()
    names = {name for _, name in found.recalls}
    values = pa.array(sorted(names | {name.partition("+")[2] for name in names if "+" in name}), pa.string())
    for source, batch in found.batches:
        if names:
            hits = np.flatnonzero(pc.is_in(batch.column("unique_key"), value_set=values).to_numpy(zero_copy_only=False))
            keep = np.ones(batch.num_rows, bool)
            near = batch.take(pa.array(hits))
            dues = near.column("due").view(pa.int64()).to_pylist()
            for place, due, key, topic in zip(
                hits.tolist(), dues, near.column("unique_key").to_pylist(), near.column("topic").to_pylist()
            ):
                keep[place] = (due, key) not in found.recalls and (due, f"{topic}+{key}") not in found.recalls
            source.recalled += int(np.count_nonzero(~keep))
            batch = batch.filter(pa.array(keep))
        source.pending += batch.num_rows
        search.add(batch)
