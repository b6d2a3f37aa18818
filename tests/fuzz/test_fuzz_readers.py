"""The targets of the fuzzer: seeds, what was found before, and bytes that the mutator makes are judged in every run."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzz import readers
from fuzz.budget import OverBudgetError, judge_memory, judge_time, memory, stretched
from fuzz.readers import KINDS, judge, mutate

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
    for data in found:
        judge_memory(kind.read, data)
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
        judge_time(KINDS[name].read, stretched(seed, KINDS[name].head), calls, AT_ALL, A_BYTE, tries=1)


def test_a_quadratic_walk_is_over_the_budget(calls):
    def walk(data):
        # For each record every one before it again, as a reader that looks for its begin.
        for at in range(0, len(data), 192):
            for before in range(0, at, 192):
                data.startswith(b"\1", before)

    with pytest.raises(OverBudgetError, match="262144 bytes take"):
        judge_time(walk, stretched(bytes(64)), calls, AT_ALL, A_BYTE, tries=1)


@pytest.mark.parametrize("name", KINDS)
def test_reading_takes_the_memory_that_the_bytes_need(name):
    for seed in KINDS[name].seeds()[:2]:
        judge_memory(KINDS[name].read, seed)
        judge_memory(KINDS[name].read, stretched(seed, KINDS[name].head))


def by_python(size):
    return bytes(size)


def by_numpy(size):
    return np.empty(size, np.uint8)


def by_compiled_code(size):
    # What tracemalloc does not see: a place is taken and written to.
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    libc.free(place)


@pytest.mark.parametrize("take", [by_python, by_numpy, by_compiled_code])
def test_a_reader_that_believes_a_length_is_over_the_budget(take):
    if take is by_compiled_code and not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not tell the peak")

    def read(data):
        take(int.from_bytes(data[:4], "big"))

    judge_memory(read, (1000).to_bytes(4, "big"))
    with pytest.raises(OverBudgetError, match="bytes of memory"):
        judge_memory(read, (200 << 20).to_bytes(4, "big"))


def test_memory_that_grows_faster_than_the_input_is_over_the_budget():
    judge_memory(lambda data: [data] * len(data), bytes(1 << 18))
    with pytest.raises(OverBudgetError):
        judge_memory(lambda data: [bytes(len(data)) for _ in range(0, len(data), 512)], bytes(1 << 18))
    assert memory(len, b"") < 1 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits addresses")
def test_what_nobody_touches_is_refused():
    tests = str(Path(__file__).resolve().parents[1])
    code = f"import sys; sys.path.append({tests!r})\nfrom fuzz.budget import *\nlimit_addresses()\nbytes(1 << 31)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0 and "MemoryError" in done.stderr


#: Where a seed has a byte whose lowest bit changes the answer: a position, or bytes that the seed has.
OTHER = {
    "log": 12, "queue": 11, "journal": 7, "segment": 33, "message_file": 8, "qi": 12, "qs": 67, "checkpoint": 3,
    "dets": b"next_seq_id", "ets": b"file_summary",
    "index": 40 + 4 * readers.SLOTS + 20 + 11, "consumer_offset": b"2, ", "delay_offset": b"4,", "topics": b"4,",
    "import_jsonl": b"3,", "import_arrow": b"two",
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
