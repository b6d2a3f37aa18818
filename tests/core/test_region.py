"""The fence around mapped memory: bounds, read-only and closed regions, views, threads, finalizers, unmapping.

Owns `rmqstore._core.Region` and what `IndexRegion`, `scan` and their like do with it when it is closed under them.  A
failure of the fence is a crash of the interpreter, so these tests are few in asserts and many in tries; what the bytes
mean is tested in test_core.py.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import oracle
import pytest
from mappings import mappings
from scratch import SCRATCH

from rmqstore import _core, _dispatch
from rmqstore._core import IndexRegion, Region
from rmqstore._dispatch import RecordColumns
from rmqstore.errors import OffsetOutOfRangeError, ReadOnlyError, StoreClosedError, StoreError
from rmqstore.files.mapped_file import MappedFile

MAX_I64 = 2**63 - 1
MIN_I64 = -(2**63)
PAGE = mmap.PAGESIZE
NO_DELAYS = np.zeros(0, np.int64)
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc/self/maps")


def mapped(size: int, writable: bool = True, data: bytes = b"") -> Region:
    """A region over a file without a name."""
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        file.write(data)
        file.flush()
        return Region.map(file.fileno(), size, writable)


def named(path: Path, size: int, writable: bool = True) -> Region:
    with open(path, "w+b") as file:
        file.truncate(size)
        return Region.map(file.fileno(), size, writable)


def is_mapped(path: Path) -> bool:
    return any(line.endswith(str(path)) for line in mappings(path))


# ---------------------------------------------------------------------------------------------------------------
# Reading and writing


def test_bytes_and_numbers():
    region = mapped(100)
    assert (len(region), region.size, region.writable, region.closed, region.pins) == (100, 100, True, False, 0)
    region.write(3, b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8")
    assert region.read(2, 10) == b"\0\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\0"
    assert region.get_i32(3) == int.from_bytes(b"\xff\xfe\xfd\xfc", "big", signed=True)
    assert region.get_i64(3) == int.from_bytes(b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8", "big", signed=True)
    region.write(98, memoryview(b"abcd")[1:3])
    region.write(0, bytearray(b"x"))
    region.write(1, np.array([7], np.uint8))
    region.write(100, b"")
    assert (region.read(0, 2), region.read(98, 2), region.read(100, 0)) == (b"x\x07", b"bc", b"")
    for wrong in ("text", None, 5, np.zeros(2, np.int32), np.zeros(4, np.uint8)[::2]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            region.write(0, wrong)


def test_what_is_written_is_in_the_file(tmp_path):
    path = tmp_path / "file"
    region = named(path, 3 * PAGE)
    region.write(2 * PAGE - 2, b"over")
    for pos, size in ((0, -1), (2 * PAGE - 2, 4), (2 * PAGE, 0), (3 * PAGE, 0), (3 * PAGE, -1), (PAGE + 1, -1)):
        region.flush(pos, size)
    assert path.read_bytes() == bytes(2 * PAGE - 2) + b"over" + bytes(PAGE - 2)
    with open(path, "rb") as file:
        other = Region.map(file.fileno(), 3 * PAGE)
    assert not other.writable
    assert other.read(2 * PAGE - 2, 4) == b"over"
    region.write(2 * PAGE - 2, b"seen")
    assert other.read(2 * PAGE - 2, 4) == b"seen"
    other.flush()


def test_zero_and_last_nonzero():
    size = 3 * PAGE + 5
    region = mapped(size)
    assert region.last_nonzero(0, size) == 0
    assert region.last_nonzero(7, 20) == 7
    for pos in (0, 1, 7, 8, 9, PAGE - 1, PAGE, 2 * PAGE + 3, size - 1):
        region.write(pos, b"\x01")
        for start in range(max(0, pos - 20), pos + 1):
            assert region.last_nonzero(start, size - start) == pos + 1
        assert region.last_nonzero(pos + 1, size - pos - 1) == pos + 1
        region.zero(pos, 1)
        assert region.last_nonzero(0, size) == 0
    for start, length in (
        (0, size),
        (1, size - 2),
        (PAGE - 1, 2),
        (PAGE, PAGE),
        (5, 0),
        (size, 0),
        (3, 4096),
        (3, 8191),
    ):
        region.write(0, b"\xaa" * size)
        region.zero(start, length)
        assert region.read(0, size) == b"\xaa" * start + bytes(length) + b"\xaa" * (size - start - length)
        assert region.last_nonzero(0, start + length) == start


@pytest.mark.parametrize("tells", [True, False], ids=["holes told", "holes not told"])
def test_the_last_byte_of_a_file_is_found_without_touching_its_holes(monkeypatch, tmp_path, tells):
    # In memory a look at a hole through a mapping gives it a page; when memory is full that is a SIGBUS.
    if not tells:
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    elif not hasattr(os, "SEEK_DATA"):
        pytest.skip("this system does not tell holes")
    path = Path(tempfile.mkdtemp(dir=SCRATCH or tmp_path)) / "sparse"
    size = 2 * (1 << 20) + 2 * PAGE + 5
    try:
        path.touch()
        os.truncate(path, size)
        file = MappedFile(path, size)
        assert [file.last_nonzero(pos) for pos in (0, 7, PAGE, size - 1, size)] == [0, 7, PAGE, size - 1, size]
        assert os.stat(path).st_blocks == 0
        for at in (0, 7, PAGE - 1, PAGE, (1 << 20) - 1, 1 << 20, (1 << 20) + PAGE + 7, 2 << 20, size - 1):
            with open(path, "r+b") as other:
                other.seek(at)
                other.write(b"\x01")
            for pos in {0, max(0, at - PAGE - 3), max(0, at - 1), at}:
                assert file.last_nonzero(pos) == at + 1
            assert file.last_nonzero(at + 1) == at + 1
        # Of a reader's file that lost its end, or has too much of it, only what belongs to it counts.
        for length in (size + 3, (1 << 20) + PAGE + 8, 3, 0):
            os.truncate(path, length)
            padded = MappedFile(path, size, read_only=True, padded=True)
            assert padded.last_nonzero() == {size + 3: size, 3: 1}.get(length, length)
            padded.close()
        file.close()
    finally:
        shutil.rmtree(path.parent)


@linux
def test_zero_leaves_a_sparse_file_sparse(tmp_path):
    path = tmp_path / "sparse"
    region = named(path, 64 << 20)
    region.zero(0, 64 << 20)
    region.flush()
    assert os.stat(path).st_blocks * 512 < 1 << 20


def test_advise():
    region = mapped(PAGE)
    for how in ("sequential", "random", "willneed", "normal"):
        region.advise(how)
    for how in ("", "Sequential", "dontneed"):
        with pytest.raises(ValueError):
            region.advise(how)


def test_map_refuses():
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        # Behind the end of the file lies SIGBUS.
        for size in (0, -1, MIN_I64, PAGE + 1, 2**62):
            with pytest.raises(ValueError):
                Region.map(file.fileno(), size)
    with pytest.raises(OSError) as caught:
        Region.map(-1, PAGE)
    assert caught.value.errno
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(PAGE)
        with open(file.name, "rb") as read_only, pytest.raises(PermissionError):
            Region.map(read_only.fileno(), PAGE, True)


# ---------------------------------------------------------------------------------------------------------------
# Bounds

EXTENTS = [
    (-1, 1),
    (-1, 0),
    (0, -1),
    (100, 1),
    (101, 0),
    (99, 2),
    (0, 101),
    (0, MAX_I64),
    (MAX_I64, 0),
    (MAX_I64, 1),
    (MAX_I64, MAX_I64),
    (MIN_I64, 0),
    (MIN_I64, MIN_I64),
    (1, MAX_I64),
    (100, MIN_I64),
    (50, MAX_I64 - 49),
    (2**32, 1),
    (2**32 + 5, 1),
    (2**62, 2**62),
    (-(2**62), 2**62 + 10),
]


@pytest.mark.parametrize(("pos", "size"), EXTENTS)
def test_extents_outside_are_refused(pos, size):
    region = mapped(100)
    for call in (region.read, region.view, region.zero, region.last_nonzero, region.populate, region.release_pages):
        with pytest.raises(OffsetOutOfRangeError):
            call(pos, size)
    with pytest.raises(OffsetOutOfRangeError):
        _core.RegionView(region, pos, size)
    if size >= 0:
        # A negative size means "to the end" here.
        with pytest.raises(OffsetOutOfRangeError):
            region.flush(pos, size)
    assert region.pins == 0
    assert region.read(0, 100) == bytes(100)


@pytest.mark.parametrize("pos", [-1, -8, 93, 99, 100, 101, 2**32, 2**62, MAX_I64, MAX_I64 - 7, MIN_I64])
def test_positions_outside_are_refused(pos):
    region = mapped(100)
    calls = [lambda: region.get_i64(pos), lambda: region.write(pos, b"12345678"), lambda: region.read(pos, 8)]
    if not 0 <= pos <= 96:
        calls.append(lambda: region.get_i32(pos))
    if not 0 <= pos <= 100:
        calls += [lambda: region.write(pos, b""), lambda: region.read(pos, 0)]
    for call in calls:
        with pytest.raises(OffsetOutOfRangeError) as caught:
            call()
        assert caught.value.pos == pos
    assert region.pins == 0
    assert region.read(0, 100) == bytes(100)


def test_numbers_beyond_64_bits_are_refused():
    region = mapped(100)
    for number in (2**63, -(2**63) - 1, 2**64, 2**64 + 1):
        with pytest.raises(OverflowError):
            region.read(number, 1)
        with pytest.raises(OverflowError):
            region.read(0, number)
        with pytest.raises(OverflowError):
            region.get_i64(number)
    with pytest.raises(TypeError):
        region.read("0", 1)


def test_positions_above_32_bits():
    with tempfile.TemporaryFile() as file:
        try:
            file.truncate(6 << 30)
            region = Region.map(file.fileno(), 6 << 30, True)
        except OSError as error:
            pytest.skip(f"no file of 6 GiB here: {error}")
    for pos in (2**31 - 4, 2**31, 2**32 - 4, 2**32, 5 << 30, (6 << 30) - 8):
        region.write(pos, pos.to_bytes(8, "big"))
        assert region.get_i64(pos) == pos
        assert region.last_nonzero(pos, 8) >= pos + 4
        assert bytes(region.view(pos, 8)) == pos.to_bytes(8, "big")
        region.flush(pos, 8)
        region.zero(pos, 8)
    assert region.read(2**32 - 100, 200) == bytes(200)


# ---------------------------------------------------------------------------------------------------------------
# Read-only and closed


def all_calls(region: Region):
    return [
        lambda: region.read(0, 1),
        lambda: region.view(0, 1),
        lambda: _core.RegionView(region, 0, 1),
        lambda: region.last_nonzero(0, 1),
        lambda: region.flush(),
        lambda: region.advise("normal"),
        lambda: region.get_i32(0),
        lambda: region.get_i64(0),
        lambda: region.write(0, b"x"),
        lambda: region.zero(0, 1),
    ]


def test_a_read_only_region_refuses_writing():
    region = mapped(100, False)
    for call in (lambda: region.write(0, b"x"), lambda: region.write(0, b""), lambda: region.zero(0, 1)):
        with pytest.raises(ReadOnlyError):
            call()
    # Even where the bounds would be refused too.
    with pytest.raises(ReadOnlyError):
        region.write(1000, b"x")
    for call in all_calls(region)[:-2]:
        call()
    gc.collect()
    assert region.pins == 0


class Derived(Region):
    pass


@pytest.mark.parametrize("make", [Region, Derived, lambda: Region.__new__(Region), lambda: Derived.__new__(Derived)])
def test_a_blank_region_is_closed(make):
    region = make()
    assert (region.closed, region.size, len(region), region.writable, region.pins) == (True, 0, 0, False, 0)
    for call in all_calls(region):
        with pytest.raises(StoreClosedError):
            call()
    region.close()
    region.close()
    assert region.pins == 0


@pytest.mark.parametrize("writable", [True, False])
def test_a_closed_region_refuses_everything(writable):
    region = mapped(100, writable)
    region.close()
    for _ in range(2):
        assert region.closed and region.pins == 0
        for call in all_calls(region):
            with pytest.raises(StoreClosedError):
                call()
        with pytest.raises(StoreClosedError):
            region.read(1000, -1)
        region.close()
    assert (region.size, region.pins) == (100, 0)


def test_attributes_are_read_only():
    region = mapped(100)
    for name in ("size", "writable", "closed", "pins"):
        with pytest.raises(AttributeError):
            setattr(region, name, 1)
    index = IndexRegion()
    for name in ("region", "slot_num", "index_num"):
        with pytest.raises(AttributeError):
            setattr(index, name, region)


def test_an_index_that_is_not_attached_is_closed():
    index = IndexRegion()
    assert index.region.closed
    for call in (
        lambda: index.put_key("k", 0, 0),
        lambda: index.select_phy_offset("k"),
        lambda: index.select_phy_offsets(["k"]),
        lambda: index.relink(1),
        lambda: index.check_links(0),
        lambda: index.read_slot(0),
        lambda: index.read_entry(0),
        index.read_header,
    ):
        with pytest.raises(StoreClosedError):
            call()


# ---------------------------------------------------------------------------------------------------------------
# Views and unmapping


@linux
def test_close_unmaps(tmp_path):
    path = tmp_path / "mapped-file"
    region = named(path, 3 * PAGE)
    assert is_mapped(path)
    region.close()
    assert not is_mapped(path)


@linux
def test_dealloc_unmaps(tmp_path):
    path = tmp_path / "mapped-file"
    region = named(path, PAGE)
    assert is_mapped(path)
    del region
    gc.collect()
    assert not is_mapped(path)


@linux
def test_many_regions_leave_no_mapping(tmp_path):
    path = tmp_path / "mapped-file"
    for i in range(500):
        region = named(path, PAGE)
        if i % 2:
            region.close()
        if i % 3:
            view = region.view(0, 8) if not region.closed else None
            region.close()
            del view
    del region
    gc.collect()
    assert not is_mapped(path)


@linux
def test_a_view_holds_the_mapping_after_close(tmp_path):
    path = tmp_path / "mapped-file"
    region = named(path, 2 * PAGE)
    region.write(PAGE - 2, b"kept")
    view, other = region.view(PAGE - 2, 4), region.view(0, 2 * PAGE)
    assert region.pins == 2
    region.close()
    assert (region.closed, region.pins) == (True, 2)
    with pytest.raises(StoreClosedError):
        region.read(0, 1)
    assert region.pins == 2
    gc.collect()
    assert bytes(view) == b"kept" and other[PAGE] == ord("p") and is_mapped(path)
    other.release()
    del other
    part = view[1:3]
    array = np.frombuffer(view, np.uint8)
    del view
    gc.collect()
    assert region.pins == 1 and bytes(part) == b"ep" and array.tolist() == list(b"kept")
    region.close()
    assert is_mapped(path)
    del part
    assert array[0] == ord("k") and is_mapped(path)
    del array
    gc.collect()
    assert region.pins == 0 and not is_mapped(path)


def test_a_view_is_read_only_and_alive():
    region = mapped(100)
    view = region.view(10, 20)
    assert view.readonly and view.nbytes == 20 and view.format == "B" and view.contiguous
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises((ValueError, BufferError)):
        np.frombuffer(view, np.uint8)[0] = 1
    with pytest.raises((TypeError, BufferError)):
        # A writable buffer is asked for.
        (ctypes.c_char * 20).from_buffer(view)
    with pytest.raises((TypeError, BufferError)):
        (ctypes.c_char * 20).from_buffer(_core.RegionView(region, 10, 20))
    region.write(10, b"new")
    assert bytes(view[:3]) == b"new"
    assert len(region.view(100, 0)) == 0
    assert bytes(region.view(0, 0)) == b""
    for _ in range(1000):
        region.view(0, 100)
    gc.collect()
    assert region.pins == 1


@linux
def test_a_view_alone_keeps_a_dropped_region(tmp_path):
    path = tmp_path / "mapped-file"
    region = named(path, PAGE)
    region.write(0, b"kept")
    view = region.view(0, 4)
    alive = weakref.ref(region)
    del region
    gc.collect()
    assert alive() is not None and bytes(view) == b"kept" and is_mapped(path)
    del view
    gc.collect()
    assert alive() is None and not is_mapped(path)


@linux
def test_an_index_keeps_its_region(tmp_path):
    path = tmp_path / "mapped-file"
    index = IndexRegion()
    index.attach(named(path, oracle.index_file_size(3, 4)), 3, 4)
    gc.collect()
    assert index.put_key("k", 1, 2) and is_mapped(path)
    index.region.close()
    assert not is_mapped(path)
    with pytest.raises(StoreClosedError):
        index.put_key("k", 1, 2)


@linux
def test_an_error_gives_its_pin_back(tmp_path):
    path = tmp_path / "mapped-file"
    region = named(path, oracle.index_file_size(10, 20))
    index = IndexRegion()
    index.attach(region, 10, 20)
    columns = RecordColumns(4)
    for call in (
        lambda: region.read(0, 10_000),
        lambda: region.write(480, b"x"),
        lambda: _dispatch.scan(region, -1, 5, 0, columns, NO_DELAYS),
        lambda: _dispatch.walk(region, 481, 500, 0),
        lambda: index.relink(100),
        lambda: index.select_chain(1, 20),
        lambda: index.put_keys(["a", 5], [1, 2], [1, 2]),
        lambda: index.put_keys(["a"], [-1], [1]),
        lambda: index.put_hashes(np.array([-1], np.int32), np.array([1]), np.array([1])),
        lambda: _core.read_units(region, 0, 1000),
        lambda: _core.RegionView(region, 0, 481),
    ):
        with pytest.raises((StoreError, TypeError, ValueError)):
            call()
        assert region.pins == 0
    region.close()
    assert not is_mapped(path)


# ---------------------------------------------------------------------------------------------------------------
# Threads

ROUNDS = 30


def run_until_closed(calls, regions):
    """Run each call again and again in a thread of its own while the main thread closes `regions` one by one."""
    failures: list[BaseException] = []
    started = threading.Barrier(len(calls) + 1)

    def loop(call):
        started.wait()
        try:
            for _ in range(1_000_000):
                call()
        except StoreClosedError:
            return
        except BaseException as error:
            failures.append(error)
            return
        failures.append(AssertionError("the region was never closed"))

    threads = [threading.Thread(target=loop, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    started.wait()
    for region in regions:
        time.sleep(0.001)
        region.close()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    assert failures == []
    assert all(region.pins == 0 for region in regions)


class ClosingUnderAView:
    """Closes a region while a view of it lives, reads through the view, and lets it go."""

    def __init__(self, region: Region):
        self.region = region
        self.view = region.view(0, 40)

    @property
    def pins(self) -> int:
        return self.region.pins

    def close(self) -> None:
        self.region.close()
        assert len(bytes(self.view)) == 40
        self.view.release()


def index_calls(index: IndexRegion):
    n = 2000
    hashes, numbers = np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int64)
    keys = [f"T#{i}" for i in range(n)]
    return [
        lambda: index.put_hashes(hashes, numbers, numbers),
        lambda: index.put_keys(keys[:100], numbers[:100], numbers[:100]),
        lambda: index.put_key("T#1", 5, 6),
        lambda: index.select_phy_offsets(keys[:50], 1000),
        lambda: index.select_phy_offset("T#1", 1000),
        lambda: index.check_links(n),
    ]


@linux
def test_close_under_threads_that_put_and_select(tmp_path):
    path = tmp_path / "index"
    for _ in range(ROUNDS):
        index = IndexRegion()
        index.attach(named(path, oracle.index_file_size(100, 20_000)), 100, 20_000)
        run_until_closed(index_calls(index), [ClosingUnderAView(index.region)])
        del index
        gc.collect(0)
        assert not is_mapped(path)


def segment_calls(region: Region):
    size = region.size
    small, large = RecordColumns(64), RecordColumns(5000)
    return [
        lambda: _dispatch.scan(region, 0, size, 0, small, NO_DELAYS),
        lambda: _dispatch.scan(region, 0, size, 0, large, NO_DELAYS),
        lambda: _dispatch.walk(region, 0, size, 0, True),
        lambda: _core.find_record(region, 5, 0),
        lambda: _core.decode_record(region, 0),
        lambda: bytes(region.view(0, 1000)),
        lambda: region.last_nonzero(0, size),
    ]


def test_close_under_threads_that_scan_and_walk():
    raw = b""
    while len(raw) < 200_000:
        raw += oracle.encode_record(
            topic=f"T{len(raw) % 7}", body=bytes(300), properties=[("KEYS", "a b c")], phy_offset=len(raw)
        )
    for _ in range(ROUNDS):
        region = mapped(len(raw) + 8, True, raw)
        run_until_closed(segment_calls(region), [region])


def test_puts_of_many_threads_are_each_whole():
    threads_num, each = 4, 300
    index = IndexRegion()
    index.attach(mapped(oracle.index_file_size(7, 10_000)), 7, 10_000)
    numbers = np.zeros(each, np.int64)

    def put(i):
        for _ in range(3):
            index.put_hashes(np.full(each, i, np.int32), numbers, numbers)
            for _ in range(50):
                index.put_hash(i, 0, 0)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(threads_num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    total = threads_num * 3 * (each + 50)
    assert index.read_header()[5] == total + 1
    assert [len(index.select_hash(i, total)) for i in range(threads_num)] == [3 * (each + 50)] * threads_num
    assert index.check_links(10**6) == []


def test_close_in_another_thread_while_a_view_lives():
    for _ in range(100):
        region = mapped(PAGE, True, b"kept")
        view = region.view(0, PAGE)
        thread = threading.Thread(target=region.close)
        thread.start()
        for _ in range(20):
            assert bytes(view[:4]) == b"kept"
        thread.join(240)
        assert region.closed and region.pins == 1
        assert bytes(view[:4]) == b"kept"
        # The last use ends in another thread than the one that closed.
        last = [view]
        del view
        thread = threading.Thread(target=last.clear)
        thread.start()
        thread.join(240)
        assert region.pins == 0


def test_close_twice_at_once():
    for _ in range(200):
        region = mapped(PAGE)
        threads = [threading.Thread(target=region.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        assert region.closed and region.pins == 0


# ---------------------------------------------------------------------------------------------------------------
# Finalizers: the collector may run wherever an object is made, also in the middle of a call


class Closer:
    """Closes a region when the collector finds it; it is in a reference cycle, so nothing else does."""

    def __init__(self, region):
        self.region = region
        self.itself = self

    def __del__(self):
        self.region.close()


@pytest.fixture
def eager_collector():
    before = gc.get_threshold()
    gc.collect()
    # Only objects made by the test are collected from here, otherwise each collection would take long.
    gc.freeze()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.parametrize("threshold", [1, 2, 3, 5, 8, 13])
def test_a_finalizer_that_closes_in_the_middle_of_a_call(threshold, eager_collector):
    raw = b""
    for _ in range(100):
        raw += oracle.encode_record(topic="T", body=b"body", properties=[("KEYS", "a b")], phy_offset=len(raw))
    size = oracle.index_file_size(10, 2000)
    outcomes = set()

    def select(region):
        index = IndexRegion()
        index.attach(region, 10, 2000)
        assert index.put_keys(["k"] * 300, range(300), range(300)) == 300
        return lambda: (
            index.select_phy_offset("k", 300),
            [part.tolist() for part in index.select_phy_offsets(["k"] * 9, 99)],
        )

    def scan(region):
        region.write(0, raw)
        columns = RecordColumns(200)

        def call():
            pos, _ = _dispatch.scan(region, 0, len(raw), 0, columns, NO_DELAYS)
            return (
                pos,
                [_core.decode_record(region, 0) for _ in range(20)],
                [bytes(region.view(0, 50)) for _ in range(20)],
            )

        return call

    def check(region):
        index = IndexRegion()
        index.attach(region, 10, 2000)
        index.put_keys(["k"] * 300, range(300), range(300))
        region.write(45, b"\x07" * 30)
        return lambda: index.check_links(10)

    for prepare in (select, scan, check):
        reference = prepare(mapped(size))()
        for _ in range(20):
            region = mapped(size)
            call = prepare(region)
            view = region.view(0, 16)
            kept = bytes(view)
            Closer(region)
            gc.set_threshold(threshold)
            try:
                assert call() == reference
                outcomes.add("answered")
            except StoreClosedError:
                outcomes.add("closed")
            finally:
                gc.set_threshold(700)
            gc.collect()
            assert region.closed and region.pins == 1
            assert bytes(view) == kept
            with pytest.raises(StoreClosedError):
                call()
            del view
            assert region.pins == 0
    assert outcomes


def test_a_weakref_callback_that_closes():
    region = mapped(PAGE)
    other = mapped(PAGE)
    reference = weakref.ref(other, lambda _: region.close())
    assert region.read(0, 4) == bytes(4)
    del other
    gc.collect()
    assert reference() is None and region.closed


def test_finalize_closes_at_exit_without_a_crash():
    code = """
import gc, tempfile, threading, weakref
from rmqstore import _core, _dispatch
regions = []
for i in range(50):
    with tempfile.TemporaryFile() as file:
        file.truncate(480)
        region = _core.Region.map(file.fileno(), 480, True)
    weakref.finalize(region, print, end="")
    index = _core.IndexRegion()
    index.attach(region, 10, 20)
    view = region.view(0, 40)
    regions.append((region, index, view))
regions.append(regions)
def loop():
    while True:
        regions[0][1].put_key("k", 1, 1)
        bytes(regions[1][2])
threading.Thread(target=loop, daemon=True).start()
"""
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_closes_only_its_own_mapping():
    region = mapped(PAGE, True, b"kept")
    code = os.fork()
    if code == 0:
        region.write(0, b"seen")
        region.close()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(code, 0)[1] == signal.SIGKILL
    assert not region.closed
    assert region.read(0, 4) == b"seen"
