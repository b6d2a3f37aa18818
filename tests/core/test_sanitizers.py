"""The builds that sanitizers watch see what they are there for: planted mistakes end a process with a report.

Owns the proof that `make sanitize` and `make sanitize-threads` can fail.  The mistakes are functions that no other build
has; each is made in a process of its own.  On an ordinary build only that is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rmqstore import _core

ROOT = Path(__file__).resolve().parents[2]
KIND = os.environ.get("RMQSTORE_SANITIZE", "")
addresses = pytest.mark.skipif(KIND != "address", reason="`make sanitize` runs it")
threads = pytest.mark.skipif(KIND != "thread", reason="`make sanitize-threads` runs it")

BEGIN = """
import ctypes, os, sys, tempfile, threading
import numpy as np
from rmqstore import _core

def region(size, length=None, writable=False):
    with tempfile.TemporaryFile() as file:
        file.truncate(size if length is None else length)
        return _core.Region.map(file.fileno(), size, writable, length is not None)

"""


def child(program, **options):
    """The finished process of a program; its sanitizer says on standard error what it finds."""
    variables = dict(os.environ)
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
        said = [
            option for option in variables.get(name, "").split(":") if option and not option.startswith("log_path=")
        ]
        variables[name] = ":".join([*said, options.pop(name, "symbolize=1")])
    variables.update(options)
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(program)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_an_ordinary_build_has_no_planted_mistakes():
    planted = {"_read_outside", "_add", "_lose", "_write_unordered"} & set(dir(_core))
    assert planted == {"address": {"_read_outside", "_add", "_lose"}, "thread": {"_write_unordered"}}.get(KIND, set())


@addresses
@pytest.mark.parametrize(
    "made, pos",
    [
        *((f"region({size})", size) for size in (1, 7, 8, 9, 4095, 4096, 5000)),
        ("region(5000)", -1),
        ("region(4096, writable=True)", -1),
        ("region(5000, writable=True)", 5000),
        ("region(9000, length=100)", 9000),
        ("region(9000, length=100)", -1),
        ("region(9000, length=0)", 9000),
    ],
)
def test_a_read_of_one_byte_outside_a_mapping_ends_the_process(made, pos):
    inside = child(f"r = {made}; print([_core._read_outside(r, at) for at in (0, len(r) - 1)])")
    assert (inside.returncode, inside.stdout) == (0, "[0, 0]\n"), inside.stderr
    outside = child(f"r = {made}; _core._read_outside(r, {pos}); print('survived')")
    assert outside.returncode not in (0, 2) and outside.stdout == ""
    assert "AddressSanitizer: use-after-poison" in outside.stderr and "READ of size 1" in outside.stderr
    assert "_read_outside" in outside.stderr


@addresses
def test_neither_a_view_nor_a_stale_address_leads_outside():
    # Readers that are not compiled with the sanitizer: the copy itself is what it knows, or the page cannot be read.  Of one
    # byte Python makes no copy.
    address = "r = region(5000); a = np.frombuffer(r.view(0, 5000), np.uint8).ctypes.data"
    for wrong in ("a - 2, 2", "a - 1, 2", "a + 5000, 2", "a + 4999, 2"):
        ran = child(f"{address}; ctypes.string_at({wrong}); print('survived')")
        assert ran.returncode not in (0, 2) and ran.stdout == "" and "AddressSanitizer: use-after-poison" in ran.stderr
    assert child(f"{address}; print(ctypes.string_at(a + 4999, 1), r.pins)").stdout == r"b'\x00' 0" + "\n"
    for mapped_again in ("", "more = [region(5000) for _ in range(20)];"):
        ran = child(f"{address}; r.close(); {mapped_again} ctypes.string_at(a, 1); print('survived')")
        assert ran.returncode not in (0, 2) and ran.stdout == "" and "AddressSanitizer: SEGV" in ran.stderr


@addresses
def test_a_read_beyond_a_bytes_object_ends_the_process():
    # RabbitMQ's readers work on these: each must be a piece of memory with an end of its own.
    program = (
        "data = bytes(range(100)) * 2; a = id(data) + bytes.__basicsize__ - 1; "
        "print(ctypes.string_at({})[-1]); print('survived')"
    )
    assert child(program.format("a, 200")).stdout == "99\nsurvived\n"
    ran = child(program.format("a, 208"))
    assert ran.returncode not in (0, 2) and "survived" not in ran.stdout and "heap-buffer-overflow" in ran.stderr


@addresses
def test_a_number_that_outgrows_its_type_ends_the_process():
    assert child("print(_core._add(2**62, 2**62 - 1))").stdout == f"{2**63 - 1}\n"
    ran = child("_core._add(2**62, 2**62); print('survived')")
    assert ran.returncode not in (0, 2) and ran.stdout == "" and "signed integer overflow" in ran.stderr


LIFE = """
import pyarrow as pa
from rmqstore import IndexFile, Message, MessageStore, StoreConfig
from rmqstore.rabbitmq import QueueIndex

with tempfile.TemporaryDirectory() as folder:
    config = StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=1000)
    for round in range(3):
        with MessageStore.open(folder + "/store", config=config) as store:
            for i in range(50):
                store.put_message(Message("Orders", b"paid" * i, keys=[f"A-{i}"], tags="EU", properties={"a": "b" * i}))
            store.put_messages([Message("Others", bytes(i)) for i in range(500)], queue_id=3)
            store.put_table(pa.table({"body": [b"x" * i for i in range(300)]}), topic="Tables", queue_id=1)
            for views in (False, True):
                for batch in store.scan(views=views):
                    assert len(batch)
                assert len(store.get_table("Tables", 1, views=views)) == 300 * (round + 1)
            assert store.get_message("Orders", 0, 10).messages[0].properties and store.query_message("Orders", "A-7")
    with IndexFile.create(folder + "/index", config) as index:
        index.put_keys([f"k{i}" for i in range(500)], np.arange(500), np.arange(500))
        index.select_phy_offsets([f"k{i}" for i in range(500)])
    os.mkdir(folder + "/queue")
    index = QueueIndex.open(folder + "/queue")
    for i in range(100):
        index.publish(msg_id=os.urandom(16), size=7, persistent=True)
    index.deliver(range(50)); index.ack(range(20)); index.flush(); index.close()
"""


@addresses
def test_memory_of_ours_is_freed(tmp_path):
    # Two frames of each allocation: who asked for memory is one of our modules, or nobody of ours.  Python's objects
    # come from Python, whose leaks this does not see.
    others = tmp_path / "lsan.supp"
    names = (
        "libpython", "/python3", "/bin/python", "libstdc++", "libc.so", "libdl", "ld-linux", "libffi", "libarrow", "numpy",
        "pyarrow", "libgomp", "libscipy", "libcrypto", "_ctypes", "libz", "lib-dynload",
    )  # fmt: skip
    others.write_text("".join(f"leak:{name}\n" for name in names))
    options = {
        "ASAN_OPTIONS": "detect_leaks=1:malloc_context_size=2:fast_unwind_on_malloc=1",
        "LSAN_OPTIONS": f"suppressions={others}:print_suppressions=0",
    }
    lost = child("_core._lose(12345); np.zeros(3)", **options)
    if "does not work under ptrace" in lost.stderr:
        pytest.skip("the system does not let a process look at its own threads")
    assert lost.returncode not in (0, 2) and "Direct leak of 12345 byte(s)" in lost.stderr and "_core" in lost.stderr
    assert "SUMMARY: AddressSanitizer: 12345 byte(s) leaked in 1 allocation(s)" in lost.stderr
    kept = child(LIFE, **options)
    assert kept.returncode == 0, kept.stderr


@threads
def test_two_threads_that_write_unordered_are_reported():
    program = """
    r = region(4096, writable=True)
    both = [threading.Thread(target=_core._write_unordered, args=(r, {}, 20_000_000)) for at in (100, 200)]
    [each.start() for each in both]
    [each.join() for each in both]
    """
    assert child(program.format("at")).returncode == 0
    ran = child(program.format("100"))
    assert ran.returncode == 66 and "ThreadSanitizer: data race" in ran.stderr and "_write_unordered" in ran.stderr


def test_nothing_of_ours_is_suppressed():
    lines = (ROOT / "ci" / "tsan.supp").read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if line and not line.startswith("#")]
    ours = ("rmq", "_core", "_dispatch", "_columns", "_rows", "_read", "_term", "_messages")
    assert not [line for line in said if any(name in line for name in ours)]
