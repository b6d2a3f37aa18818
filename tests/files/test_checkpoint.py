"""Tests of rmqstore.files.checkpoint."""

from __future__ import annotations

import os

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqstore._core import CheckpointLayout
from rmqstore.errors import GeometryError, ReadOnlyError
from rmqstore.files.checkpoint import CHECKPOINT_SIZE, Checkpoint

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
