"""What opening a queue does after a stop: recovery terms against the files, and the marks that a node would set.

Owns the comparison of recovery terms with what was loaded, the sequence id of the next publish, and the acks and
delivers of an opening after a crash (section 7.4).  It keeps no state, and writes through `IndexWriter` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmqstore.rabbitmq._core import ENTRY_DELIVER, ENTRY_EMBEDDED, ENTRY_PERSISTENT, MAX_SEQ_ID, says_persistent
from rmqstore.rabbitmq.index_columns import IndexColumns
from rmqstore.rabbitmq.index_directory import IndexDirectory
from rmqstore.rabbitmq.index_files import map_present, release
from rmqstore.rabbitmq.index_writer import IndexWriter
from rmqstore.rabbitmq.problem import Problem

__all__ = ["RecoveryTerms", "checked_terms", "next_seq_ids", "recover"]


class RecoveryTerms(NamedTuple):
    """What of a queue's recovery terms its index takes over."""

    next_seq_id: int
    next_deliver_seq_id: int
    persistent_ref: bytes | None


def checked_terms(
    directory: IndexDirectory, terms: Mapping[str, Any] | Iterable[tuple[str, Any]], chosen: range | None
) -> RecoveryTerms | None:
    """The terms of an orderly stop, with a problem for each that the files contradict; None where they are not terms."""
    try:
        clean = {str(key): value for key, value in (terms.items() if isinstance(terms, Mapping) else terms)}
        numbers = clean["segments"]
        pairs = numbers.items() if isinstance(numbers, Mapping) else numbers
        clean["segments"] = {int(number): int(count) for number, count in pairs}
        for key in ("next_seq_id", "next_deliver_seq_id"):
            clean[key] = int(clean[key])
            if not 0 <= clean[key] <= MAX_SEQ_ID + 1:
                raise ValueError(key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # A node without "segments" in the terms recovers as if there were none.
        detail = f"the recovery terms lack or spoil {error}; the queue counts as dirty"
        directory.problems.append(Problem(directory.path, None, "bad_terms", detail))
        return None
    stated = {
        number: count for number, count in clean["segments"].items() if count and (chosen is None or number in chosen)
    }
    found = {number: count for number, count in directory.unacked().items() if count}
    for number in sorted(stated.keys() | found.keys()):
        if stated.get(number, 0) != found.get(number, 0):
            detail = f"the recovery terms say {stated.get(number, 0)} unacked entries, the files {found.get(number, 0)}"
            directory.problems.append(Problem(directory.path_of(number), None, "segment_count_mismatch", detail))
    highest = directory.highest_seq_id()
    if highest >= clean["next_seq_id"]:
        detail = f"the recovery terms say that the next sequence id is {clean['next_seq_id']}, but {highest} is taken"
        directory.problems.append(Problem(directory.path, None, "next_seq_id_too_low", detail, highest))
        clean["next_seq_id"] = highest + 1
    ref = clean.get("persistent_ref")
    return RecoveryTerms(
        clean["next_seq_id"],
        clean["next_deliver_seq_id"],
        bytes(ref) if isinstance(ref, (bytes, bytearray)) else None,
    )


def next_seq_ids(directory: IndexDirectory, clean: RecoveryTerms | None) -> tuple[int, int]:
    """The sequence ids of the next publish and of the next deliver."""
    if clean is not None:
        return clean.next_seq_id, min(clean.next_deliver_seq_id, clean.next_seq_id)
    remaining = [number for number, count in directory.unacked().items() if count]
    after = (max(remaining) + 1) * directory.segment_entry_count if remaining else 0
    return after, after


def recover(
    directory: IndexDirectory,
    writer: IndexWriter,
    clean: RecoveryTerms | None,
    store_clean: bool,
    is_stored: Callable[[bytes], bool] | None,
) -> None:
    """Bring the files to where a node's opening leaves them."""
    directory.refuse_damage()
    writer.open_journal()
    if clean is None or not store_clean:
        _settle(directory, clean is None, is_stored)
        writer.flush()
    elif directory.merged or directory.problems:
        writer.flush()


def _settle(directory: IndexDirectory, dirty: bool, is_stored: Callable[[bytes], bool] | None) -> None:
    """Section 7.4: what is in no store, or was transient, is acked; in a dirty queue the rest counts as delivered."""
    for numbers in directory.chunks():
        columns = directory.columns_of(numbers, 1)
        if not len(columns.seq_id):
            continue
        embedded = (columns.flags & ENTRY_EMBEDDED) != 0
        present = (columns.flags & ENTRY_PERSISTENT) != 0
        _look_into_terms(directory, numbers, columns, embedded, present)
        if is_stored is not None:
            for i in np.flatnonzero(~embedded).tolist():
                present[i] = bool(is_stored(columns.msg_id[i].tobytes()))
        undelivered = (columns.flags & ENTRY_DELIVER) == 0
        for seqs, ack in (
            (columns.seq_id[undelivered & (dirty | ~present)], False),
            (columns.seq_id[~present], True),
        ):
            verdict, _ = directory.journal.marks(seqs, ack)
            assert verdict == 0, "an entry that was just listed takes its marks"


def _look_into_terms(
    directory: IndexDirectory, numbers: list[int], columns: IndexColumns, embedded: np.ndarray, present: np.ndarray
) -> None:
    # A node asks the embedded message itself whether it is persistent.
    term_pos = columns.term_pos
    for number in (-1, *numbers):
        within = embedded & (columns.segment == number)
        if not within.any():
            continue
        source: Any = directory.journal.image_view() if number < 0 else map_present(directory.path_of(number))
        try:
            for flag in (True, False):
                rows = np.flatnonzero(within & (present == flag))
                if source is not None and len(rows):
                    present[rows] = says_persistent(source, term_pos[rows], columns.term_size[rows], flag)
        finally:
            release(source)
