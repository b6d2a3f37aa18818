"""Damage in a file as a value: its place, a stable name for programs, and a sentence for people.

Owns `Problem` and the sentences for the compiled module's findings in journals and segments.  It opens no file.  What a
node would do about a problem is `verify`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from rmqstore.rabbitmq._core import Findings

__all__ = ["UNREADABLE", "UNREAD_FORMAT", "Problem", "problems_of", "unreadable_file"]

# The kind of a file that cannot be read, as opposed to a damaged one.
UNREADABLE = "unreadable"
# The kind of a file whose format this version does not read.
UNREAD_FORMAT = "unread_format"

# In the order of the compiled module's numbers.
_DETAILS = {
    "torn_record": "a record is cut after {extent} bytes",
    "bad_prefix": "{extent} bytes begin like no record",
    "zero_stretch": "{extent} bytes begin with zeros where a record should",
    "bad_term": "{extent} bytes: the term of a message is not well-formed",
    "zero_tail": "the last {extent} bytes are zeros",
    "nul_file": "all {extent} bytes of the file are zeros",
    "rel_out_of_range": (
        "a record's place in the segment is not below segment_entry_count: is that as the vhost's .config says?"
    ),
    "duplicate_publish": "the same message was published again",
    "different_publish": "another message has the same sequence id; the first whole one counts",
    "publish_after_ack": "a publish comes after its ack; the ack counts",
    "publish_after_deliver": "a publish comes after its deliver",
    "deliver_without_publish": "a deliver of a message that was never published",
    "duplicate_deliver": "a message was marked as delivered twice",
    "deliver_after_ack": "a deliver comes after the ack",
    "ack_without_publish": "an ack of a message that was never published",
    "ack_without_deliver": "an ack of a message that was never delivered; it counts",
    "third_mark": "a third mark of a message that is acked already",
    "msg_id_mismatch": "the record and the message inside it have different message ids",
    "salvage_given_up": "what follows looks so much like records everywhere that the search for whole ones was ended",
    "torn_mark": "a mark is cut after its first byte, and looks like one of this message; it does not count",
}


class Problem(NamedTuple):
    """Damage that was met while reading a file.

    Attributes
    ----------
    path : str
    pos : int or None
        Position in bytes.
    kind : str
        Short, stable, snake_case: for programs.
    detail : str
        For people.
    seq_id : int or None
        The affected entry, if it is known.
    """

    path: str
    pos: int | None
    kind: str
    detail: str
    seq_id: int | None = None

    @property
    def is_unreadable(self) -> bool:
        """bool: it is a file or directory that cannot be opened, as opposed to one that is damaged."""
        return self.kind == UNREADABLE

    @property
    def place(self) -> str:
        """str: path and position, for people."""
        return self.path if self.pos is None else f"{self.path}, position {self.pos}"


def problems_of(findings: Findings, path_of: Callable[[int], str]) -> list[Problem]:
    """Convert the findings of a reading; `path_of` returns the path of a segment, of the journal for a negative number."""
    problems = []
    kinds = list(_DETAILS.items())
    for number, pos, seq_id, extent, segment in findings.table().tolist():
        kind, detail = kinds[number]
        problem = Problem(path_of(segment), pos, kind, detail.format(extent=extent), None if seq_id < 0 else seq_id)
        problems.append(problem)
    if findings.total > findings.count:
        more = findings.total - findings.count
        problems.append(Problem(path_of(-1), None, "more_problems", f"{more} more problems are not listed"))
    return problems


def unreadable_file(path: str, error: OSError) -> Problem:
    """Make the problem of a file or directory that cannot be read; `path` is used if the error names no file."""
    named = path if error.filename is None else os.fsdecode(error.filename)
    return Problem(named, None, UNREADABLE, f"the file cannot be read: {error.strerror}")
