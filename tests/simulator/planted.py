"""Faults put into the package on purpose: what each of them breaks the simulator must see.

Owns the patches of the package's methods, the only place here that knows its inside.  A planted fault is put into this
process before the first child is forked, and never taken out again.  `PLANTED` has them by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rmqstore import _core
from rmqstore.commitlog import commit_log, log_walk
from rmqstore.consumequeue import unit_queue
from rmqstore.consumer import consumer_offset
from rmqstore.files import checkpoint, mapped_file, mapped_file_queue, prepared_files, store_lock
from rmqstore.index import index_service
from rmqstore.offline import verify_units
from rmqstore.store import dispatcher, judgement, opening, retention, writing

PLANTED: dict[str, Callable[[], None]] = {}


def planted(function: Callable[[], None]) -> Callable[[], None]:
    PLANTED[function.__name__.replace("_", "-")] = function
    return function


@planted
def flush_left_out() -> None:
    """A segment of the log is not forced, and everybody believes it was."""
    flush = mapped_file.MappedFile.flush

    def patched(self):
        if os.sep + "commitlog" + os.sep in self.path:
            self.take_dirty()
            self._taken = False
        else:
            flush(self)

    mapped_file.MappedFile.flush = patched


@planted
def published_before_the_payload() -> None:
    """Of a record the properties are written last, after its magic and its size."""
    append = commit_log.CommitLog.append_rows

    class Rows:
        def __init__(self, rows):
            self._rows = rows

        def __getattr__(self, name):
            return getattr(self._rows, name)

        def encode(self, region, pos, base, first):
            scratch = mapped_file.MemoryFile("scratch", region.size)
            done, end = self._rows.encode(scratch.region, pos, base, first)
            at = pos
            for size in self._rows.columns()[3][first:done].tolist():
                record = scratch.region.read(at, size)
                properties = size - min(size // 3, 60)
                region.write(at + 8, record[8:properties])
                region.write(at, record[:8])
                for piece in range(properties, size, 4):
                    region.write(at + piece, record[piece : piece + 4])
                at += size
            scratch.close()
            return done, end

    def patched(self, batch, **more):
        return append(self, Rows(batch), **more)

    take = writing.Writing.enable_writes

    def enable_writes(self):
        # One message is put as rows, too.
        take(self)
        self.state.appender = None

    commit_log.CommitLog.append_rows = patched
    writing.Writing.enable_writes = enable_writes


@planted
def crc_skipped() -> None:
    """No CRC is looked at, neither by readers nor by recovery."""
    make = commit_log.CommitLog.__init__

    def patched(self, *args, **options):
        make(self, *args, **options)
        self.crc_check = self._walk.crc_check = self._end.crc_check = 0

    commit_log.CommitLog.__init__ = patched


@planted
def blank_believed() -> None:
    """A blank counts wherever it stands and whatever its size, as in RocketMQ: the log goes on in the next segment."""

    def believing(call):
        def patched(self, region, start, limit, base):
            pos, verdict, num, last = call(self, region, start, limit, base)
            if pos + 8 <= region.size and region.read(pos + 4, 4) == b"\xcb\xd4\x31\x94":
                verdict = _core.Verdict.BLANK
            return pos, verdict, num, last

        return patched

    check = _core.check_record

    def check_record(region, pos, *rest):
        found = check(region, pos, *rest)
        is_blank = pos + 8 <= region.size and region.read(pos + 4, 4) == b"\xcb\xd4\x31\x94"
        return (_core.Verdict.BLANK, *found[1:]) if is_blank else found

    _core.check_record = check_record
    log_walk._Walk.__call__ = believing(log_walk._Walk.__call__)
    log_walk._Scan.__call__ = believing(log_walk._Scan.__call__)
    log_walk._ScanAhead.__call__ = believing(log_walk._ScanAhead.__call__)


@planted
def queue_unit_lost() -> None:
    """Of every seventh lot of messages that is dispatched from the log no unit is written."""
    dispatch, count = dispatcher.CommitLogDispatcher._dispatch_units, [0]

    def patched(self, *args):
        count[0] += 1
        if count[0] % 7:
            dispatch(self, *args)

    dispatcher.CommitLogDispatcher._dispatch_units = patched


@planted
def index_entry_to_the_wrong_offset() -> None:
    """The last entry of a lot leads one byte too far."""
    put = index_service.IndexService.put_hashes

    def patched(self, hashes, phy_offsets, store_timestamps):
        phy_offsets = phy_offsets.copy()
        phy_offsets[-1] += 1
        put(self, hashes, phy_offsets, store_timestamps)

    index_service.IndexService.put_hashes = patched


@planted
def cut_off_by_one() -> None:
    """Where the log is cut at its end, the byte in front of that goes too."""
    truncate = mapped_file_queue.MappedFileQueue.truncate

    def patched(self, offset):
        log = os.path.basename(self.path) == "commitlog"
        return truncate(self, max(offset - 1, 0) if log else offset)

    mapped_file_queue.MappedFileQueue.truncate = patched


@planted
def progress_written_in_place() -> None:
    """The file of consumer progress is written over, without a new file and without a backup."""

    def patched(path, data, keep):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            for at in range(0, len(data), 16):
                file.write(data[at : at + 16])
            os.fsync(file.fileno())

    consumer_offset._replace_file = patched


@planted
def one_record_too_many_cut() -> None:
    """After an unclean exit the log is cut in front of its last record."""
    judge = judgement.LogJudge.judge

    def patched(self, begin, marked_end, mode):
        judged = judge(self, begin, marked_end, mode)
        if not self.clean and judged.last_record > begin:
            judged.end = judged.last_record
            judged.ranges = [(low, min(high, judged.end)) for low, high in judged.ranges if low < judged.end]
        return judged

    judgement.LogJudge.judge = patched


@planted
def retention_too_far() -> None:
    """Retention looks at no age."""
    delete = retention._delete_segments

    def patched(commit_log, lock, now, force, pause):
        return delete(commit_log, lock, now, True, pause)

    retention._delete_segments = patched


@planted
def lock_not_taken() -> None:
    """Nobody is kept out."""

    class Fcntl:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def lockf(*args):
            pass

    store_lock.fcntl = Fcntl


@planted
def folder_not_forced() -> None:
    """The name of a new file is not forced."""
    prepared_files.fsync_directory = lambda path: None


@planted
def checkpoint_ahead_of_the_log() -> None:
    """The checkpoint says that more was forced than was."""
    flush = checkpoint.Checkpoint.flush

    def patched(self):
        if self.flushed_offset >= 0:
            self.flushed_offset += 4096
        flush(self)

    checkpoint.Checkpoint.flush = patched


@planted
def queue_file_deleted_too_early() -> None:
    """Retention of a queue goes a page further than that of the log."""
    delete_before = unit_queue.UnitQueue.delete_before
    unit_queue.UnitQueue.delete_before = lambda self, min_phy_offset: delete_before(self, min_phy_offset + 4096)


@planted
def closed_before_the_flush() -> None:
    """A close takes the mark of an open store away before it forces anything."""
    close_in_order = opening.close_in_order

    def patched(state, flushing):
        abort = os.path.join(state.path, "abort")
        if os.path.exists(abort):
            os.unlink(abort)
            opening.fsync_directory(state.path)
        close_in_order(state, flushing)

    opening.close_in_order = patched


@planted
def verify_blind_to_units() -> None:
    """verify compares no unit of a queue with its record."""
    verify_units.QueueCheck.tell = lambda self, queue, number, kind, detail: iter(())
