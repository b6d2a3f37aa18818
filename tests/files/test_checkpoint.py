"""Tests of rmqstore.files.checkpoint."""

from __future__ import annotations

import os
import struct
import zlib

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqstore._core import CheckpointLayout
from rmqstore.errors import GeometryError, ReadOnlyError
from rmqstore.files.checkpoint import CHECKPOINT_SIZE, Checkpoint, marked_end

FIELDS = ("physic_msg_timestamp", "logics_msg_timestamp", "index_msg_timestamp", "master_flushed_offset",
          "confirm_phy_offset", "logics_physical_offset")  # fmt: skip


def test_t11(tmp_path):
    vector = golden.vectors()["T11"]
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    for name in FIELDS[:5]:
        setattr(checkpoint, name, vector[name])
    assert checkpoint.to_bytes()[:48].hex() == vector["first_48"]
    assert checkpoint.min_timestamp == 1699999997100
    checkpoint.flush()
    data = (tmp_path / "checkpoint").read_bytes()
    assert data == bytes.fromhex(vector["first_48"]).ljust(4096, b"\0") and len(data) == vector["file_size"]
    assert Checkpoint.load(tmp_path / "checkpoint") == checkpoint


def test_layout_is_that_of_the_core(tmp_path):
    assert CHECKPOINT_SIZE == 4096
    for name in FIELDS:
        checkpoint = Checkpoint(tmp_path / "c")
        setattr(checkpoint, name, 1)
        assert checkpoint.to_bytes().index(1) == getattr(CheckpointLayout, f"CHECKPOINT_{name.upper()}") + 7


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6))
def test_round_trip(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("c") / "checkpoint"
    checkpoint = Checkpoint(path)
    for name, value in zip(FIELDS, values):
        setattr(checkpoint, name, value)
    checkpoint.flush()
    assert [getattr(Checkpoint.load(path), name) for name in FIELDS] == values


@pytest.mark.parametrize("name", golden.STORES)
def test_golden_checkpoints_keep_their_bytes(name, golden_store):
    path = golden_store(name) / "checkpoint"
    checkpoint = Checkpoint.load(path, read_only=True)
    assert checkpoint.to_bytes() == path.read_bytes()
    if name == "broker":
        # The real broker left this field at 0 after an orderly shutdown.
        assert checkpoint.logics_msg_timestamp == 0 and checkpoint.min_timestamp == 0
    with pytest.raises(ReadOnlyError, match="read-only"):
        checkpoint.flush()


def test_missing_short_and_odd_files(tmp_path):
    path = tmp_path / "checkpoint"
    assert [getattr(Checkpoint.load(path), name) for name in FIELDS] == [0] * 6
    assert not path.exists()
    for size in (0, 8, 24, 48, 4088):
        path.write_bytes((b"\0" * 7 + b"\x05") * (size // 8))
        checkpoint = Checkpoint.load(path)
        assert [getattr(checkpoint, name) for name in FIELDS] == [5 if size >= 8 * (i + 1) else 0 for i in range(6)]
    for size in (1, 47, 4095, 4097, 8192):
        path.write_bytes(bytes(size))
        with pytest.raises(GeometryError, match=str(size)) as caught:
            Checkpoint.load(path)
        assert caught.value.path == str(path)


def test_unknown_fields_survive_a_flush(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(48) + b"future field" + bytes(4096 - 60))
    checkpoint = Checkpoint.load(path)
    checkpoint.physic_msg_timestamp = 3
    inode = os.stat(path).st_ino
    checkpoint.flush()
    assert path.read_bytes()[48:60] == b"future field" and path.read_bytes()[7] == 3
    assert os.stat(path).st_ino == inode


def test_values_outside_64_bits(tmp_path):
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.confirm_phy_offset = 2**63
    with pytest.raises(ValueError, match="64-bit"):
        checkpoint.flush()
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("flushed_offset", [-1, 0, 700])
def test_the_mark_holds_until_somebody_changes_a_byte(tmp_path, flushed_offset):
    path = tmp_path / "checkpoint"
    checkpoint = Checkpoint(path)
    checkpoint.physic_msg_timestamp = 5
    checkpoint.flushed_offset, checkpoint.log_end, checkpoint.process_id = flushed_offset, 900, 77
    checkpoint.flush()
    data = path.read_bytes()
    # Apart from the six fields, nothing is stored before the last 32 bytes.
    assert data[8:-32] == bytes(4096 - 8 - 32)
    places = struct.pack(">qqq", flushed_offset, 900, 77)
    assert data[-32:-4] == b"RMQS" + places and data[-4:] == zlib.crc32(data[:48] + data[-32:-4]).to_bytes(4, "big")
    loaded = Checkpoint.load(path)
    assert (loaded.flushed_offset, loaded.log_end, loaded.process_id) == (flushed_offset, 900, 77)
    assert loaded.to_bytes() == data
    for bit in [*range(48 * 8), *range((4096 - 32) * 8, 4096 * 8)]:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        loaded = Checkpoint.load(path)
        assert (loaded.flushed_offset, loaded.log_end, loaded.process_id) == (-1, -1, 0)


def test_what_tells_to_where_our_writer_had_the_log(tmp_path):
    root = str(tmp_path)
    assert marked_end(root) == -1
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.flush()
    assert marked_end(root) == -1
    # Of a store that was closed in order, the record that its last opening found last.
    checkpoint.confirm_phy_offset, checkpoint.log_end = 300, 900
    checkpoint.flush()
    assert marked_end(root) == 301
    (tmp_path / "abort").write_bytes(b"77")
    assert marked_end(root) == -1
    checkpoint.process_id = 77
    checkpoint.flush()
    assert marked_end(root) == 900
    # A writer that takes the mark over says so before its abort file is there.
    checkpoint.previous_process_id, checkpoint.process_id = 77, 78
    checkpoint.flush()
    loaded = Checkpoint.load(tmp_path / "checkpoint")
    assert (loaded.previous_process_id, loaded.process_id) == (77, 78)
    for process, end in ((b"77", 900), (b"78", 900), (b"79", -1), (b"0", -1)):
        (tmp_path / "abort").write_bytes(process)
        assert marked_end(root) == end
    # RocketMQ before 5.0.0 leaves the file empty.
    (tmp_path / "abort").write_bytes(b"")
    assert marked_end(root) == -1
    for size in (0, 5000):
        (tmp_path / "checkpoint").write_bytes(bytes(size))
        assert marked_end(root) == -1
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint").mkdir()
    assert marked_end(root) == -1


def test_min_timestamp_is_never_negative(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp = 5000, 2999
    assert checkpoint.min_timestamp == 0
    checkpoint.logics_msg_timestamp = 4000
    assert checkpoint.min_timestamp == 1000


@pytest.mark.parametrize(
    ("index_time", "queues_end", "end_time", "end", "has"),
    [
        (5000, 700, 5000, 700, True), (5000, 700, 4000, 700, True), (5000, 700, 5001, 700, False),
        # A clock that was set back: the file ends later in the log than what is on disk.
        (5000, 700, 4000, 701, False),
        # Before 5.4.0 there is no such offset.
        (5000, 0, 4000, 701, True), (0, 0, 1, 1, False), (0, 0, 0, 0, True),
    ],
)  # fmt: skip
def test_an_index_file_counts_by_its_time_and_its_offset(tmp_path, index_time, queues_end, end_time, end, has):
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.index_msg_timestamp, checkpoint.logics_physical_offset = index_time, queues_end
    assert checkpoint.has_index(end_time, end) is has
