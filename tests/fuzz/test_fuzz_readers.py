"""The targets of the fuzzer: seeds, what was found before, and bytes that the mutator makes are judged in every run."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import pytest
from fuzz import readers
from fuzz.readers import KINDS, Kind, OverBudgetError, judge, judge_cost, mutate

FOUND = Path(__file__).resolve().parents[1] / "data" / "fuzz"


@pytest.mark.parametrize("name", KINDS)
def test_seeds_findings_and_their_changes_are_judged(name):
    kind = KINDS[name]
    seeds = kind.seeds()
    assert seeds and any(len(seed) > 40 for seed in seeds)
    assert not any(isinstance(kind.read(seed), Exception) for seed in seeds), "a seed is a file that is read"
    found = [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
    dice = random.Random(name)
    for data in [b"", *seeds, *found]:
        judge(kind, data)
    for _ in range(150):
        judge(kind, mutate(kind, dice.choice(seeds), dice, 8192))


def test_every_finding_is_of_a_kind():
    assert {path.name for path in FOUND.glob("*/")} <= set(KINDS)


@pytest.fixture
def calls():
    """A clock that counts calls, of Python's functions and of C's, as time must not decide a test."""
    number = 0

    def count(frame, event, argument):
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    yield lambda: number
    sys.setprofile(before)


#: Calls that reading may take, at all and a byte.
AT_ALL, A_BYTE = 1000, 2


@pytest.mark.parametrize("name", KINDS)
def test_reading_costs_what_the_bytes_do(name, calls):
    for seed in KINDS[name].seeds()[:1]:
        judge_cost(KINDS[name], seed, calls, AT_ALL, A_BYTE, tries=1)


def test_a_quadratic_walk_is_over_the_budget(calls):
    def walk(data):
        # For each record every one before it again, as a reader that looks for its begin.
        for at in range(0, len(data), 192):
            for before in range(0, at, 192):
                data.startswith(b"\1", before)

    with pytest.raises(OverBudgetError, match="262144 bytes take"):
        judge_cost(Kind(walk, lambda data, found: None, list), bytes(64), calls, AT_ALL, A_BYTE, tries=1)


#: Where a seed has a byte whose lowest bit changes the answer: a position, or bytes that the seed has.
OTHER = {
    "log": 12, "queue": 11, "journal": 7, "segment": 33, "message_file": 8, "qi": 12, "qs": 67, "checkpoint": 3,
    "dets": b"next_seq_id", "ets": b"msg_location",
    "index": 40 + 4 * readers.SLOTS + 20 + 11, "consumer_offset": b"2, ", "delay_offset": b"4,", "topics": b"4,",
    "import_jsonl": b"3,", "import_csv": b"1,ORDER", "import_arrow": b"two",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_a_reader_that_answers_something_else_is_caught(name):
    # The oracle gets other bytes than the reader, which is what a wrong reader looks like.
    kind = KINDS[name]
    (seed, *_) = kind.seeds()
    other = bytearray(seed)
    at = OTHER[name]
    other[at if isinstance(at, int) else seed.index(at)] ^= 1
    with pytest.raises((AssertionError, ValueError, struct.error)):
        kind.check(bytes(other), kind.read(seed))
    assert readers.judge(kind, seed) is None
