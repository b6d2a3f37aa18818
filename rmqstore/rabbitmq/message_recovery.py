"""Opening of a message store: the clean state if it is good, else a scan of all files, with what a merge left.

Owns the choice between the two, and the steps that bring an interrupted merge to its end (§8.4, §8.5).  It keeps no
state: what it finds goes into `MessageFiles`.

Invariants: whatever fails for a reason of the caller fails before the first change; whatever step a process dies at,
every message that was whole before is whole for the next opening, and for a real node; read-only nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rmqstore.errors import StoreError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.clean_state import CLEAN_FILES, forget_clean_state, read_clean_state
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.message_file import copy_bytes, refer, stop_problem
from rmqstore.rabbitmq.message_files import RDT, MessageFiles
from rmqstore.rabbitmq.problem import Problem, unreadable_file

if TYPE_CHECKING:
    References = Mapping[bytes, int] | np.ndarray | Callable[[], "Mapping[bytes, int] | np.ndarray"]

__all__ = ["Opened", "check_files", "recover"]


class Opened(NamedTuple):
    """How a store was opened; `MessageStore` says what the fields mean."""

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
    """Fill `files` with what lies in its directory, and make it ready for writing unless `read_only`.

    `doubt` says what is wrong with a clean state that was taken before: it is not looked at, as if there were none.
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
        # Part of a step that is taken again from its beginning.
        os.unlink(os.path.join(files.path, name))
    end = None
    if state is not None:
        files.table, files.summaries = state.table, state.files
        opened = Opened(None, state.client_refs, np.empty((0, 16), np.uint8), state.node)
        if not read_only:
            forget_clean_state(files.path)
    else:
        # Everything that may fail for a reason of the caller comes before the first change.
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
    """Open each message file: one that the system does not give out ends a writer, and is a problem for a reader."""
    if files.unreadable and not read_only:
        path, error = next(iter(files.unreadable.items()))
        raise StoreError(f"{error.strerror}; start a node, and write through it", path)
    current = None if read_only else max(rdq, default=None)
    for key in [*rdq, *(number | RDT for number in rdt)]:
        path = files.path_of(key)
        try:
            os.close(open_regular(path, os.O_RDWR if key == current else os.O_RDONLY))
        except OSError as error:
            # A file that is gone was merged meanwhile: the opening ends, and the caller opens again.
            if not read_only or not os.path.lexists(path):
                raise
            files.unreadable[path] = error
            files.problems.append(unreadable_file(path, error))


def _take_over_rdt(files: MessageFiles, number: int, rdq: list[int], read_only: bool) -> list[int]:
    # §8.4: what a merge had saved goes after the records of its file.  A node appends it to the file as it is; where a
    # crash came between extending the file and copying back, there are zeros, at which its scan ends, and it loses what
    # it saved.  Here it goes to where the scan ends, and nothing is ever half done: the new file replaces the old.
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
    # §8.5.  Fills the table and the summaries.  The end of the last valid record of the highest file; the ids that are
    # referred to and were found nowhere.
    mode = _messages.MessageScan.SCAN_BYTEWISE if files.scan_mode == "bytewise" else _messages.MessageScan.SCAN_SEQUENTIAL
    # A leftover .rdt first: where it is appended instead, its copies are met first.
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
            problem = stop_problem(path, region, at, stop)
            if problem is not None:
                files.problems.append(problem)
            if files.scan_mode == "auto" and (stop != _messages.MessageStop.STOP_END or unwritten or short):
                # From the beginning: a wrong size leads past whole records before anything is noticed.
                found = files.table.scan(region, key, _messages.MessageScan.SCAN_SALVAGE, adopt)
                if found[0]:
                    detail = (
                        f"{found[0]} messages beside damage were found by their terms; a node up to 3.12 loses them"
                    )
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
