"""Types of the compiled module; tests/project/test_stub.py compares the two."""

from typing import Any, Final

import numpy as np

from rmqstore._core import Region

# ------------------------------------------------------------------------------------------------ journal and segments

ENTRY_PUBLISH: Final[int]
ENTRY_DELIVER: Final[int]
ENTRY_ACK: Final[int]
ENTRY_PERSISTENT: Final[int]
ENTRY_EMBEDDED: Final[int]
ENTRY_DAMAGED: Final[int]
MAX_SEQ_ID: Final[int]

class Findings:
    count: int
    total: int
    def __init__(self) -> None: ...
    def table(self) -> np.ndarray: ...

class Segment:
    number: int
    unacked: int
    size: int
    end: int
    malformed: bool
    def __init__(self, number: int) -> None: ...

def load_segment(
    source: Region | bytes | None,
    segment: Segment,
    entry_count: int,
    findings: Findings,
    check_terms: bool = False,
) -> None: ...
def scan_journal(source: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
def terms_at(source: Any, starts: np.ndarray, sizes: np.ndarray) -> list[bytes]: ...
def checked_ids(terms: list[bytes], ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

class JournalMap:
    segment_entry_count: int
    used: int
    written: int
    dirty_count: int
    depth: int
    published_end: int
    segments: dict[int, Segment]
    def __init__(self, segment_entry_count: int) -> None: ...
    def load(self, data: bytes, findings: Findings, check_terms: bool = False) -> tuple[int, bool]: ...
    def collect(self) -> tuple[np.ndarray, np.ndarray]: ...
    def replace(self, seqs: np.ndarray, words: np.ndarray, more: int = 0) -> None: ...
    def merge(
        self, segment: Segment, source: Region | bytes | None, seqs: np.ndarray, words: np.ndarray, findings: Findings
    ) -> int: ...
    def marks(self, seqs: np.ndarray, ack: bool) -> tuple[int, int]: ...
    def publish(
        self,
        first: int,
        count: int,
        ids: np.ndarray,
        sizes: np.ndarray,
        expiries: np.ndarray,
        persistent: np.ndarray,
        terms: list[bytes] | None,
        deliver: bool,
        start: int,
        max_entries: int,
        max_size: int,
    ) -> int: ...
    def publish_one(
        self,
        seq: int,
        msg_id: bytes | None,
        term: bytes | None,
        size: int,
        expiry: int,
        persistent: int,
        known_free: bool,
    ) -> bool: ...
    def unwritten(self) -> bytes: ...
    def image_view(self) -> np.ndarray: ...
    def encode(self, segment: Segment, seqs: np.ndarray, words: np.ndarray) -> bytes: ...
    def applied(self, segment: Segment, seqs: np.ndarray, words: np.ndarray) -> None: ...
    def forget(self, segment: Segment) -> None: ...
    def clear(self) -> None: ...
    def rows(
        self,
        segment: Segment,
        source: Region | bytes | None,
        seqs: np.ndarray,
        words: np.ndarray,
        live: bool,
        numbers: np.ndarray,
        flags: np.ndarray,
        msg_id: np.ndarray,
        at: int,
    ) -> int: ...
