"""The files of a timer: real ones, ones laid out by an oracle, and damaged ones."""

from __future__ import annotations

import os
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pending_stores import BLANK, SLOT, UNIT, TimerFiles, listed, unpack

from rmqstore.errors import CorruptionError
from rmqstore.timer.timer_files import TimerCheckpoint, TimerLog, TimerWheel, waiting_units

NOW = 1_795_424_507_000


def as_tuples(units):
    return [tuple(map(int, row)) for row in units[["time", "position", "magic", "phy_offset"]].tolist()]


@pytest.mark.parametrize("name", ["timer-files", "timer-snapshot"])
def test_real_files(tmp_path, name):
    root = unpack("variants", tmp_path, name)
    found = waiting_units(root)
    assert found.problems == [] and found.notes == []
    # 52 that wait, 3 that were recalled, and their recalls.
    assert as_tuples(found.units) == listed(root) and len(found.units) == 58
    assert np.count_nonzero(found.units["magic"] == 5) == 3 and np.count_nonzero(found.units["magic"] == 3) == 2
    assert found.wheel.endswith("timerwheel" if name == "timer-files" else "timerwheel.3328")
    assert found.checkpoint.taken_in == 63 and found.checkpoint.last_timer_log_flush_pos == 3328
    log = TimerLog(root / "timerlog")
    assert len(log.units(0)) == 63 and log.problems == []


def test_nothing_there(tmp_path):
    found = waiting_units(tmp_path)
    assert not found.present and not len(found.units) and not found.problems
    assert TimerCheckpoint.load(tmp_path / "timercheck") is None


times = st.integers(0, 40).map(lambda seconds: NOW + 1000 * seconds)
puts = st.lists(st.tuples(times, st.booleans(), st.booleans()), max_size=40)


@settings(max_examples=60, deadline=None)
@given(puts, st.integers(-1, 41), st.sampled_from([100, 200, 500, 1000]), st.sampled_from([332, 364, 380]))
def test_units_are_those_of_the_chains(tmp_path_factory, messages, read, precision, file_size):
    root = tmp_path_factory.mktemp("timer")
    files = TimerFiles(root, precision=precision, file_size=file_size)
    for number, (fires, roll, recall) in enumerate(messages):
        files.put(fires, 300 * number, 300, now=NOW - 1000, roll=roll, recall=recall)
    files.write(NOW + 1000 * read)
    found = waiting_units(root)
    assert as_tuples(found.units) == listed(root, precision)
    assert found.problems == [] and found.notes == []


@pytest.fixture
def small(tmp_path):
    files = TimerFiles(tmp_path)
    for number in range(14):
        fires = NOW + 1000 * (number % 5)
        files.put(fires, 300 * number, 300, now=NOW - 1000, roll=number == 8, recall=number == 12)
    files.write(NOW + 1000, 14)
    return tmp_path


def flips(data, positions):
    for pos in positions:
        for bit in range(8):
            yield pos, bit, data[:pos] + bytes([data[pos] ^ 1 << bit]) + data[pos + 1 :]


def said(root, truth):
    """Return whether the answer changed or damage is reported; there must be an answer."""
    found = waiting_units(root)
    if found.problems or found.notes:
        return True
    assert as_tuples(found.units) == truth
    return False


def test_every_flip_of_a_wheel(small):
    truth = listed(small)
    path = small / "timerwheel"
    data = path.read_bytes()
    used = [i * SLOT.size + j for i, slot in enumerate(SLOT.iter_unpack(data)) if slot[0] for j in range(SLOT.size)]
    unused = [i * SLOT.size + 3 for i, slot in enumerate(SLOT.iter_unpack(data)) if not slot[0]][::60]
    live = {i for i, slot in enumerate(SLOT.iter_unpack(data)) if slot[0] * 1000 > NOW}
    silent = []
    for pos, bit, flipped in flips(data, used + unused):
        path.write_bytes(flipped)
        if not said(small, truth):
            silent.append((pos, bit))
        # The log is the truth: no damage of the wheel takes a message away.
        assert as_tuples(waiting_units(small).units) == truth
    # Fired units do not matter, except for their time.
    assert not [pos for pos, _ in silent if pos // SLOT.size in live]


def test_every_flip_of_a_timer_log(small):
    truth = listed(small)
    for path in sorted((small / "timerlog").iterdir()):
        data = path.read_bytes()
        silent = set()
        for pos, _, flipped in flips(data, range(len(data))):
            path.write_bytes(flipped)
            if not said_or_field(small, truth):
                silent.add(pos)
        path.write_bytes(data)
        # Phy offset, size, hash and whether it was rolled are held against the record, which is not here.  A unit that
        # fired may lead anywhere, and behind the head of a blank anything may stand.
        for pos in silent:
            unit, inside = divmod(pos, UNIT.size)
            row = data[unit * UNIT.size : (unit + 1) * UNIT.size]
            blank = len(row) < UNIT.size or struct.unpack_from(">i", row, 12)[0] == BLANK or not any(row)
            fired = not blank and sum(struct.unpack_from(">qi", row, 16)) < NOW + 1000
            free = not any(row) or (blank and (inside >= 16 or len(row) < UNIT.size))
            assert free or 28 <= inside < 44 or inside == 15 or (fired and 4 <= inside < 12), (path, pos)


def said_or_field(root, truth):
    found = waiting_units(root)
    if not found.problems and not found.notes:
        assert [each[:2] for each in as_tuples(found.units)] == [each[:2] for each in truth]
        return False
    return True


def test_every_flip_of_a_checkpoint(small):
    path = small / "config" / "timercheck"
    data = path.read_bytes()
    for pos, bit, flipped in flips(data, range(64)):
        path.write_bytes(flipped)
        found = waiting_units(small)
        if pos < 8:
            # No flip of one bit leaves a multiple of 100 ms.
            assert found.problems and len(found.units) == 14, bit


def test_truncated_files(small):
    truth = listed(small)
    for path in [*sorted((small / "timerlog").iterdir()), small / "timerwheel", small / "config" / "timercheck"]:
        data = path.read_bytes()
        for length in [0, 1, 31, 33, 51, 53, 105, len(data) - 1]:
            if length < len(data):
                path.write_bytes(data[:length])
                found = waiting_units(small)
                lost = set(truth) - set(as_tuples(found.units))
                assert not lost or found.problems, (path, length)
        path.write_bytes(data)
    first = min((small / "timerlog").iterdir())
    first.unlink()
    assert waiting_units(small).problems


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="terabytes of zeros are read where the system does not tell holes")
def test_files_with_terabytes_that_were_never_written(small):
    truth = listed(small)
    last = max((small / "timerlog").iterdir())
    for path, size in ((small / "timerwheel", 1 << 43), (last, (1 << 43) // 52 * 52)):
        whole = path.stat().st_size
        os.truncate(path, size)
        found = waiting_units(small)
        assert as_tuples(found.units) == truth
        os.truncate(path, whole)
    assert waiting_units(small).problems == []
    # A hole where units were is told, with whatever follows.
    first = min((small / "timerlog").iterdir())
    data = first.read_bytes()
    first.write_bytes(b"")
    os.truncate(first, len(data))
    assert any("zeros" in str(each) and str(first) in str(each) for each in waiting_units(small).problems)


@pytest.mark.parametrize("base", [2**63 - 1, 2**63 - 52, 10**20 - 1])
def test_a_file_beyond_all_positions_is_told(small, base):
    truth = listed(small)
    path = small / "timerlog" / f"{base:020d}"
    path.write_bytes(min((small / "timerlog").iterdir()).read_bytes())
    found = waiting_units(small)
    assert as_tuples(found.units) == truth
    assert any("beyond all positions" in str(each) and str(path) in str(each) for each in found.problems)


@pytest.mark.parametrize("name", ["config/timercheck", "timerwheel", "timerwheel.99", "timerlog/00000000000000000000", "timerlog"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "file"])
def test_what_is_no_file_is_told_and_not_waited_for(small, name, kind):
    path = small / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"")
    found = waiting_units(small)
    assert found.problems and any(str(path) in str(each) for each in found.problems), found.problems


def test_a_lagging_wheel_takes_nothing_away(small):
    # The wheel of a killed broker is older than its timer log.
    files = TimerFiles(small)
    for number in range(14):
        files.put(NOW + 1000 * (number % 5), 300 * number, 300, now=NOW - 1000)
    wheel = {index: list(slot) for index, slot in files.wheel.items()}
    for number in range(14, 20):
        files.put(NOW + 1000 * (number % 7), 300 * number, 300, now=NOW - 1000)
    truth_wheel, files.wheel = files.wheel, wheel
    files.write(NOW, 20)
    found = waiting_units(small)
    assert found.problems == [] and "newer than the time wheel" in found.notes[0]
    files.wheel = truth_wheel
    files.write(NOW, 20)
    assert as_tuples(found.units) == listed(small)


def test_a_chain_that_runs_in_a_circle_ends(tmp_path):
    files = TimerFiles(tmp_path, file_size=5200)
    for number in range(20):
        files.put(NOW, 300 * number, 300, now=NOW - 1000)
    data = bytearray(files.files[0])
    for number in range(20):
        # Each leads to the one after it, the last to the first.
        struct.pack_into(">q", data, 52 * number + 4, 52 * ((number + 1) % 20))
    files.files[0] = bytes(data)
    files.write(NOW)
    found = waiting_units(tmp_path)
    assert len(found.units) == 20 and found.problems
    assert all("leads to" in str(each) or "damaged unit" in str(each) for each in found.problems)


def test_errors_name_file_and_place(small):
    path = small / "config" / "timercheck"
    path.write_bytes(struct.pack(">7q", 5, 0, 0, 0, 0, 0, 0))
    with pytest.raises(CorruptionError, match="last_read_time of the timer's checkpoint is 5") as caught:
        TimerCheckpoint.load(path)
    assert caught.value.path == str(path) and caught.value.pos == 0
    # A multiple of 100 ms that would let everything have fired.
    path.write_bytes(struct.pack(">7q", 2**62 // 100 * 100, 0, 0, 0, 0, 0, 0))
    with pytest.raises(CorruptionError, match="which cannot be"):
        TimerCheckpoint.load(path)
    wheel = small / "timerwheel"
    wheel.write_bytes(bytes(33))
    with pytest.raises(CorruptionError, match="33 bytes"):
        TimerWheel(wheel)
