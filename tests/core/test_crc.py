"""CRC-32: every implementation that this machine has against zlib.

Owns `_core.crc32_with` and the choice among the implementations; what a record does with its CRC is tested in
test_core.py.  The constants of the folding are derived here from the polynomial alone and compared with the header's.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from rmqstore import _core

HEADER = Path(__file__).resolve().parents[2] / "rmqstore" / "_crc32.h"
POLYNOMIAL = 0x104C11DB7
IMPLEMENTATIONS = _core.crc32_implementations()

each = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def aligned(size: int) -> np.ndarray:
    """Random bytes whose first lies at a multiple of 64."""
    data = np.frombuffer(random.Random(size).randbytes(size + 64), np.uint8).copy()
    return data[-data.ctypes.data % 64 :][:size]


def test_what_this_machine_has():
    assert IMPLEMENTATIONS[0] == "table"
    assert _core.crc32_implementation == IMPLEMENTATIONS[-1]
    assert len(set(IMPLEMENTATIONS)) == len(IMPLEMENTATIONS)
    expected = ["table"]
    if os.environ.get("RMQSTORE_PORTABLE"):
        pass  # make test-portable: a build that takes nothing from its processor
    elif platform.machine() == "x86_64":
        flags = re.search(r"(?m)^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text())
        has = set(flags[1].split())
        if {"pclmulqdq", "sse4_1"} <= has:
            expected.append("pclmul")
            if {"vpclmulqdq", "avx2"} <= has:
                expected.append("vpclmul")
    elif platform.machine() == "aarch64" and sys.platform == "linux":
        # Not from /proc/cpuinfo: under qemu that is the machine's below.
        if ctypes.CDLL(None).getauxval(16) & 1 << 7:  # AT_HWCAP, HWCAP_CRC32
            expected.append("crc")
    else:
        pytest.skip("the system does not say what the processor has")
    assert list(IMPLEMENTATIONS) == expected


@each
def test_every_length_at_every_alignment(name):
    data = aligned(4096 + 16)
    for start in range(16):
        at = memoryview(data)[start:]
        for n in range(4097):
            if _core.crc32_with(name, at[:n]) != zlib.crc32(at[:n]):
                pytest.fail(f"{name}: {n} bytes at alignment {start}")


@each
def test_every_length_after_other_bytes(name):
    # The register that comes in reaches beyond the bytes where these are fewer than four.
    data = memoryview(aligned(700))
    random_values = random.Random(5)
    for n in range(700):
        for value in (0, 1, 0xFFFFFFFF, random_values.getrandbits(32)):
            assert _core.crc32_with(name, data[:n], value) == zlib.crc32(data[:n], value), (n, value)


@each
def test_the_crc_of_parts_is_that_of_the_whole(name):
    data = memoryview(aligned(3000))
    cuts = random.Random(6)
    for _ in range(500):
        value, at = 0, 0
        while at < len(data):
            end = min(len(data), at + int(cuts.expovariate(1 / cuts.choice((3, 20, 300)))))
            value = _core.crc32_with(name, data[at:end], value)
            assert value == zlib.crc32(data[:end])
            at = end


@each
def test_large(name):
    data = memoryview(aligned(9 * 1024 * 1024 + 77))
    sizes = random.Random(7)
    for _ in range(10):
        start = sizes.randrange(4096)
        end = sizes.randrange(1 << 20, len(data))
        assert _core.crc32_with(name, data[start:end]) == zlib.crc32(data[start:end])


@each
def test_single_bits(name):
    # A CRC is linear: each bit at each place shows by itself, with nothing around to hide a wrong constant.
    for n in (1, 3, 4, 7, 8, 15, 16, 17, 31, 64, 127, 128, 129, 143, 144, 200, 257, 300):
        for at in range(n):
            data = bytearray(n)
            data[at] = 1 << at % 8
            assert _core.crc32_with(name, data) == zlib.crc32(data), (n, at)


def test_zlib_says_what_a_record_holds():
    for n in (0, 1, 15, 16, 200, 5000):
        data = aligned(n)
        assert _core.crc32(data) == zlib.crc32(data) & 0x7FFFFFFF == _core.crc32_with("table", data) & 0x7FFFFFFF


def test_refusals():
    with pytest.raises(ValueError, match=r"no CRC-32 implementation 'sse9' here, only table"):
        _core.crc32_with("sse9", b"data")
    for arguments in [(None, b""), ("table", None), ("table", "text"), ("table", b"", "1")]:
        with pytest.raises(TypeError):
            _core.crc32_with(*arguments)
    for value in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            _core.crc32_with("table", b"", value)


GUARDED = """
import ctypes, mmap, random, zlib
from rmqstore import _core

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 4 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory[page : 3 * page] = random.Random(1).randbytes(2 * page)
libc = ctypes.CDLL(None, use_errno=True)
for at in (0, 3):
    assert libc.mprotect(ctypes.c_void_p(address + at * page), page, 0) == 0, ctypes.get_errno()
inside = memoryview(memory)[page : 3 * page]
for name in _core.crc32_implementations():
    for n in range(600):
        for part in (inside[:n], inside[len(inside) - n :]):
            assert _core.crc32_with(name, part) == zlib.crc32(part), (name, n)
print("done")
"""


def test_no_byte_outside_is_touched():
    ran = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr


def remainder(degree: int) -> int:
    """x**degree mod POLYNOMIAL."""
    value = 1 << degree
    while value.bit_length() > 32:
        value ^= POLYNOMIAL << value.bit_length() - 33
    return value


def quotient(degree: int) -> int:
    """x**degree / POLYNOMIAL."""
    value, found = 1 << degree, 0
    while value.bit_length() > 32:
        shift = value.bit_length() - 33
        found |= 1 << shift
        value ^= POLYNOMIAL << shift
    return found


def reflected(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def test_the_constants_follow_from_the_polynomial():
    stated = {
        name: [int(number, 16) for number in re.findall(r"0x[0-9a-f]+", numbers)]
        for name, numbers in re.findall(r"(?m)^#define RMQ_(\w+) (0x.*)$", HEADER.read_text(encoding="utf-8"))
    }
    expected = {
        f"FOLD_{d}": [reflected(remainder(d + 63), 32) << 32, reflected(remainder(d - 1), 32) << 32]
        for d in (128, 256, 512, 1024)
    }
    expected["X95"] = [reflected(remainder(95), 32)]
    # Its 65 bits are reflected, the last then falls off.
    expected["QUOTIENT"] = [reflected(quotient(96), 65) & (1 << 64) - 1]
    expected["POLYNOMIAL"] = [reflected(POLYNOMIAL, 33)]
    names = {name: [number for number in numbers if number > 0xFF] for name, numbers in stated.items()}
    assert names == expected
