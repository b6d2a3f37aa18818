"""Message files after a crash: the scan of one file, the opening of a store, and merging.

Owns the scans of N.rdq and N.rdt, the choice between the clean state and a scan of all files, the end of an interrupted
merge (§8.5), and merging itself: two neighbours with garbage become one without, and the second is deleted (§8.4).  An
opening fills `MessageFiles`.  It is not thread-safe: `MessageStore` has the lock.

Invariants: errors of the caller come before the first change; no file is changed in place; after a death at any step,
every message that was whole before is whole in a file that the next opening, or a real node, reads; a read-only opening
changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import StoreError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import failed_read, naming_errors
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.clean_state import CLEAN_FILES, forget_clean_state, read_clean_state
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.message_files import RDT, MessageFiles
from rmqstore.rabbitmq.problem import Problem, unreadable_file

if TYPE_CHECKING:
    References = Mapping[bytes, int] | np.ndarray | Callable[[], "Mapping[bytes, int] | np.ndarray"]

__all__ = ["FileScan", "Opened", "check_files", "merge", "merge_all", "recover", "refer", "scan_file"]

_COPY_SIZE = 1 << 20
# Most problems of a file for one kind of damage.
_NAMED = 1000


# ---------------------------------------------------------------------------------------------------------- one file


class FileScan(NamedTuple):
    """The records of a message file, in their order, and the `end` of the scan.

    `msg_id` (n, 16) uint8; `pos` (n,) int64, bytes; `size` (n,) int64, bytes of the term, negative where the record is too
    short for an id; `flags` (n,) uint8 of `MessageFlag`.
    """

    msg_id: np.ndarray
    pos: np.ndarray
    size: np.ndarray
    flags: np.ndarray
    end: int
    problems: list[Problem]


def _stop_problem(path: str, region: Region, end: int, stop: int) -> Problem | None:
    """Return the problem of a scan that ended before the end of the file."""
    if stop == _messages.MessageStop.STOP_END:
        return None
    left = region.size - end
    if stop == _messages.MessageStop.STOP_WORK:
        return Problem(path, end, "overlapping_records", "more overlapping records than a real file has", None)
    if stop == _messages.MessageStop.STOP_ZERO:
        if region.last_nonzero(end, left) == end:
            return Problem(path, end, "zero_tail", f"the last {left} bytes are zero; they hold nothing", None)
        return Problem(
            path, end, "zero_size", f"a size of zero; a node up to 3.12 reads none of the {left} bytes from here", None
        )
    return Problem(
        path, end, "torn_record", f"a record that does not fit; a node up to 3.12 reads none of the {left} bytes", None
    )


def refer(table: _messages.LocationTable, references: Mapping[bytes, int] | np.ndarray) -> None:
    """Count references in `table`: {id: count}, or ids (n, 16) uint8 of which each row counts one."""
    table.reserve(len(table) + len(references))
    if isinstance(references, np.ndarray):
        table.refer(np.ascontiguousarray(references, np.uint8))
        return
    short = next((msg_id for msg_id in references if len(msg_id) != 16), None)
    if short is not None:
        raise ValueError(f"a message id has 16 bytes, not {len(short)}: {short!r}")
    ids = np.frombuffer(b"".join(references), np.uint8).reshape(-1, 16)
    table.refer(ids, np.array(list(references.values()), np.int64))


def scan_file(path: str | os.PathLike[str], mode: str = "sequential") -> FileScan:
    """Read the records of an N.rdq or N.rdt; never raises for damage, OSError if it cannot be read.

    `mode` is "sequential": from record to record, as RabbitMQ up to 3.12 (§8.1), a record without its mark being a row
    without `MESSAGE_WRITTEN`; "salvage": at every position a record whose term is well-formed, of exactly its length, and
    holds the record's id; or "auto": sequential, and salvage after damage.
    """
    path = os.fspath(path)
    problems: list[Problem] = []
    if mode not in ("sequential", "salvage", "auto"):
        raise ValueError(f"mode is {mode!r}, not sequential, salvage or auto")
    region = map_file(path)
    if region is None:
        return FileScan(
            np.empty((0, 16), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8), 0, problems
        )
    salvage = _messages.MessageScan.SCAN_SALVAGE
    try:
        first = salvage if mode == "salvage" else _messages.MessageScan.SCAN_SEQUENTIAL
        found = _messages.scan_messages(region, first)
        columns: list[np.ndarray] = [*found[:4]]
        end, stop = found[4:]
        problem = _stop_problem(path, region, end, stop)
        if problem is not None:
            problems.append(problem)
        flags = columns[3]
        if mode == "auto" and (problem is not None or not (flags & _messages.MessageFlag.MESSAGE_WRITTEN).all()):
            found = _messages.scan_messages(region, salvage)
            more: list[np.ndarray] = [*found[:4]]
            end = found[4]
            new = ~np.isin(more[1], columns[1])
            columns = [np.concatenate((column, each[new])) for column, each in zip(columns, more)]
            order = np.argsort(columns[1], kind="stable")
            columns = [column[order] for column in columns]
    finally:
        region.close()
    ids, pos, size, flags = columns
    for rows, kind, detail in (
        (
            flags & _messages.MessageFlag.MESSAGE_WRITTEN == 0,
            "unwritten_record",
            "a record without its mark; this message is lost",
        ),
        (
            flags & _messages.MessageFlag.MESSAGE_TOO_SHORT != 0,
            "short_record",
            "a record too short for an id; a node may stop here",
        ),
    ):
        problems += [Problem(path, int(pos[row]), kind, detail, None) for row in np.flatnonzero(rows)[:_NAMED]]
    return FileScan(ids, pos, size, flags, end, problems)


def copy_bytes(source: Any, begin: int, size: int, destination: Any) -> None:
    """Append a stretch of one open file to another; OSError if the file is shorter."""
    source.seek(begin)
    while size > 0:
        data = source.read(min(size, _COPY_SIZE))
        if not data:
            raise failed_read(source.name, "the file is shorter than its records")
        destination.write(data)
        size -= len(data)


# ----------------------------------------------------------------------------------------------------------- opening


class Opened(NamedTuple):
    """Fields of `MessageStore` that its opening finds, and the node that wrote the clean state."""

    dirty_reason: str | None
    client_refs: list[bytes]
    missing: np.ndarray
    node: str


def recover(
    files: MessageFiles,
    references: References | None,
    client_refs: list[bytes] | None,
    read_only: bool,
    doubt: Problem | None = None,
) -> Opened:
    """Fill `files` from its directory, and get it ready for writing unless `read_only`.

    `doubt` is the fault of a clean state that was used before, and is ignored now.
    """
    rdq, rdt, staged = files.listing()
    check_files(files, rdq, rdt, read_only)
    state, reason = None, None
    if doubt is not None:
        reason = doubt.detail
        files.problems.append(doubt)
    elif rdt:
        reason = "a merge was under way (N.rdt)"
    elif not rdq and not any(os.path.exists(os.path.join(files.path, name)) for name in CLEAN_FILES):
        reason = "the store is empty"
    else:
        try:
            state = read_clean_state(files, rdq, client_refs)
        except FileNotFoundError as error:
            reason = f"there is no {os.path.basename(error.filename)}"
        except StoreError as error:
            reason = str(error)
            files.problems.append(
                Problem(error.path or files.path, error.pos or 0, "clean_state_ignored", error.message, None)
            )
        except OSError as error:
            if not read_only:
                raise
            problem = unreadable_file(files.path, error)
            reason = problem.detail
            files.problems.append(Problem(problem.path, 0, "clean_state_ignored", reason, None))
    for name in staged if not read_only else ():
        # The step that made it begins again.
        os.unlink(os.path.join(files.path, name))
    end = None
    if state is not None:
        files.table, files.summaries = state.table, state.files
        opened = Opened(None, state.client_refs, np.empty((0, 16), np.uint8), state.node)
        if not read_only:
            forget_clean_state(files.path)
    else:
        # Errors of the caller come before the first change.
        if callable(references):
            references = references()
        if references is not None:
            refer(files.table, references)
        for number in rdt:
            rdq = _take_over_rdt(files, number, rdq, read_only)
        if not read_only:
            forget_clean_state(files.path)
        end, missing = _scan_files(files, rdq, rdt if read_only else [], references is None)
        opened = Opened(reason, [], missing, "nonode@nohost")
    files.add_up()
    if not read_only:
        files.begin(end)
    return opened


def check_files(files: MessageFiles, rdq: list[int], rdt: list[int], read_only: bool) -> None:
    """Open each message file: an unreadable one is an error for a writer, and a problem for a reader."""
    if files.unreadable and not read_only:
        path, error = next(iter(files.unreadable.items()))
        raise StoreError(f"{error.strerror}; start a node, and write through it", path)
    current = None if read_only else max(rdq, default=None)
    for key in [*rdq, *(number | RDT for number in rdt)]:
        path = files.path_of(key)
        try:
            os.close(open_regular(path, os.O_RDWR if key == current else os.O_RDONLY))
        except OSError as error:
            # A file that is gone was merged by a writer: the caller opens again.
            if not read_only or not os.path.lexists(path):
                raise
            files.unreadable[path] = error
            files.problems.append(unreadable_file(path, error))


def _take_over_rdt(files: MessageFiles, number: int, rdq: list[int], read_only: bool) -> list[int]:
    # §8.4: what a merge saved belongs after the records of its file.  A node appends it to the whole file: after a crash
    # between extending the file and copying back, its scan ends at zeros before it.  Here it goes to the end of the scan,
    # and a new file replaces the old one.
    rdt_path, path = files.path_of(number | RDT), files.path_of(number)
    files.problems.append(Problem(rdt_path, 0, "leftover_rdt", "a merge was interrupted; its messages are kept", None))
    if number not in rdq:
        files.problems.append(
            Problem(rdt_path, 0, "rdt_without_rdq", f"there is no {number}.rdq; a node stops with an error", None)
        )
        if not read_only:
            os.rename(rdt_path, path)
            fsync_directory(files.path)
            return sorted([*rdq, number])
        return rdq
    if read_only:
        return rdq
    region = map_file(path)
    end, tail = 0, 0
    if region is not None:
        try:
            end, stop = _messages.scan_messages(region)[4:]
            tail = 0 if stop == _messages.MessageStop.STOP_END else region.last_nonzero(end, region.size - end) - end
        finally:
            region.close()
    staged = f"{path}.rmqstore"
    with (
        naming_errors(staged),
        open(open_regular(path), "rb") as old,
        open(open_regular(rdt_path), "rb") as saved,
        open(staged, "wb") as new,
    ):
        copy_bytes(old, 0, end, new)
        copy_bytes(saved, 0, os.fstat(saved.fileno()).st_size, new)
        copy_bytes(old, end, tail, new)
        new.flush()
        os.fsync(new.fileno())
    os.rename(staged, path)
    fsync_directory(files.path)
    os.unlink(rdt_path)
    return rdq


def _scan_files(files: MessageFiles, rdq: list[int], rdt: list[int], adopt: bool) -> tuple[int, np.ndarray]:
    # §8.5: fill the table and the summaries.  Returns the end of the last valid record of the highest file, and the ids
    # that are referred to and were not found.
    mode = _messages.MessageScan.SCAN_BYTEWISE if files.scan_mode == "bytewise" else _messages.MessageScan.SCAN_SEQUENTIAL
    # A leftover .rdt comes first, as its copies do where it is appended.
    keys = sorted([*rdq, *(number | RDT for number in rdt)], key=lambda key: (key & ~RDT, not key & RDT))
    end = 0
    for key in keys:
        path = files.path_of(key)
        region = None if path in files.unreadable else map_file(path)
        end = 0
        files.summaries[key] = [0, 0]
        if region is None:
            continue
        try:
            _, end, unwritten, short, fault, at, stop = files.table.scan(region, key, mode, adopt)
            if unwritten:
                detail = f"{unwritten} records without their mark, this the first; their messages are lost"
                files.problems.append(Problem(path, fault, "unwritten_record", detail, None))
            if short:
                detail = f"{short} records too short for an id; a node may stop with an error"
                files.problems.append(Problem(path, fault, "short_record", detail, None))
            problem = _stop_problem(path, region, at, stop)
            if problem is not None:
                files.problems.append(problem)
            if files.scan_mode == "auto" and (stop != _messages.MessageStop.STOP_END or unwritten or short):
                # From the beginning: a wrong size leads past whole records before anything is noticed.
                found = files.table.scan(region, key, _messages.MessageScan.SCAN_SALVAGE, adopt)
                if found[0]:
                    detail = f"{found[0]} messages next to damage were found by their terms; a node up to 3.12 loses them"
                    files.problems.append(Problem(path, at, "messages_beside_damage", detail, None))
                    end = max(end, found[1])
            files.summaries[key][1] = region.size
        finally:
            region.close()
    missing = files.table.columns(-1)[0]
    files.table.discard_many(missing)
    numbers = sorted(files.summaries)
    if numbers:
        sizes = [files.summaries[number][1] for number in numbers]
        valid, _ = files.table.sums(np.array(numbers, np.int64), np.array(sizes, np.int64))
        files.summaries = {number: [int(valid[i]), sizes[i]] for i, number in enumerate(numbers)}
    return end, missing


# ----------------------------------------------------------------------------------------------------------- merging


def merge_all(files: MessageFiles) -> int:
    """Merge as long as two neighbours fit into one, and return the number of merges."""
    merged = 0
    while (pair := _pair_to_merge(files)) is not None:
        merge(files, *pair)
        merged += 1
    return merged


def _pair_to_merge(files: MessageFiles) -> tuple[int, int] | None:
    # The first two neighbours, the current file not among them, that fit into one file and are not empty.
    for destination, source in itertools.pairwise(list(files.summaries)[:-1]):
        first, second = files.summaries[destination][0], files.summaries[source][0]
        if first > 0 and second > 0 and first + second <= files.file_size_limit:
            return destination, source
    return None


def merge(files: MessageFiles, destination: int, source: int) -> None:
    """Replace a file by the messages in use in it and in the next one, and delete the next one (§8.4).

    The bytes are those of a node's merge.  A node cuts the file in between, and a crash may lose messages.  Here the .rdt
    gets the whole new file and replaces the old one, so that each record is whole in a file at any time.
    """
    moves = []
    path, rdt_path = files.path_of(destination), files.path_of(destination | RDT)
    at = 0
    try:
        with open(rdt_path, "wb") as new, naming_errors(rdt_path):
            for number in (destination, source):
                ids, positions, sizes, dead = files.live(number)
                with open(open_regular(files.path_of(number)), "rb") as old:
                    for begin, size in _runs(positions, sizes):
                        copy_bytes(old, begin, size, new)
                ends = at + np.cumsum(sizes)
                moves.append((ids, ends - sizes, dead))
                at = int(ends[-1])
            new.flush()
            os.fsync(new.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(rdt_path)
        raise
    try:
        os.rename(rdt_path, path)
    except OSError as error:
        files.fail(error)
        raise
    files.take_merged(destination, source, moves, at)
    try:
        # The name of the new file has to be on the disk before the source is deleted.
        fsync_directory(files.path)
        os.unlink(files.path_of(source))
    except OSError as error:
        files.fail(error)
        raise


def _runs(positions: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int]]:
    # Adjacent records are copied as one.
    starts = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + sizes[:-1])))
    ends = np.append(starts[1:], len(positions)) - 1
    return [
        (int(positions[first]), int(positions[last] + sizes[last] - positions[first]))
        for first, last in zip(starts, ends, strict=True)
    ]
