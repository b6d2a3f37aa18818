"""Units and entries that lead outside the log: no rebuild and no opening for writing takes them, unless told how many go."""

from __future__ import annotations

import os
import shutil
import struct

import pytest
from click.testing import CliRunner
from mapped_rebuild import in_order, rebuild_with
from small_store import SMALL, options_of, tree_bytes

from rmqstore import LostLogError, Message, MessageStore, StoreConfig, rebuild
from rmqstore.cli import main
from rmqstore.offline.rebuild import check_config

CONFIG = StoreConfig(**SMALL)
SEGMENT = SMALL["mapped_file_size_commit_log"]
UNITS = 60


@pytest.fixture
def root(tmp_path):
    """A store of two queues over several segments, with a key each."""
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as store:
        for number in range(UNITS):
            store.put_message(Message("T", bytes(300), keys=[f"K{number}"]), number % 2)
        assert len(store.commit_log.files) > 5
    return path


def segments(root):
    return sorted((root / "commitlog").iterdir())


def leading_to(root, begins):
    """How many units and how many entries lead to segments that begin there."""
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        places = [
            unit.phy_offset // SEGMENT * SEGMENT
            for queue_id in (0, 1)
            for unit in store.queues.find("T", queue_id).read(0, UNITS)
        ]
        entries = [
            phy // SEGMENT * SEGMENT
            for file in store.index_service.files()
            for phy in file.read_entries(1, file.index_count - 1)[1].tolist()
        ]
    assert len(places) == len(entries) == UNITS
    return sum(place in begins for place in places), sum(entry in begins for entry in entries)


def by_spark(root, kinds, drop_units=0):
    return rebuild_with(in_order, root, kinds, CONFIG, drop_units=drop_units)


def by_one_process(root, kinds, drop_units=0):
    return rebuild(root, kinds, CONFIG, drop_units=drop_units)


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "1000"})


@pytest.mark.parametrize("rebuilt", [by_one_process, by_spark])
@pytest.mark.parametrize("lost", ["all", "newest", "middle", "not mounted"])
@pytest.mark.parametrize("kinds", [("index",), ("consumequeue",), ("index", "consumequeue")])
def test_no_rebuild_replaces_what_the_log_lacks(root, lost, kinds, rebuilt):
    paths = segments(root)
    gone = {"newest": paths[-2:], "middle": paths[2:4]}.get(lost, paths)
    units, entries = leading_to(root, [int(path.name) for path in gone])
    num = units * ("consumequeue" in kinds) + entries * ("index" in kinds)
    for path in gone:
        path.unlink()
    if lost == "not mounted":
        (root / "commitlog").rmdir()
    before = tree_bytes(root)
    before.pop("lock", None)
    for told in (0, num - 1):
        with pytest.raises(LostLogError, match=f"^{num} queue units and index entries .* drop_units={num}") as refused:
            rebuilt(root, kinds, told)
        assert refused.value.num == num and refused.value.path.startswith(str(root / min(kinds)))
        after = tree_bytes(root)
        after.pop("lock", None)
        assert after == before
    with pytest.raises(LostLogError):
        check_config(root, kinds, CONFIG)
    report = rebuilt(root, kinds, num)
    assert report.units == (UNITS - units) * ("consumequeue" in kinds)
    assert report.index_entries == (UNITS - entries) * ("index" in kinds)


def test_a_rebuild_into_another_directory_replaces_nothing(root, tmp_path):
    segments(root)[-1].unlink()
    before = tree_bytes(root)
    assert rebuild(root, ("consumequeue",), CONFIG, tmp_path / "out").units < UNITS
    assert tree_bytes(root) == before


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("recovery", ["strict", "truncate", "skip"])
@pytest.mark.parametrize("lost", ["all", "newest", "no queues", "newest half"])
def test_no_opening_cuts_what_the_log_lacks(root, lost, recovery, clean):
    paths = segments(root)
    gone = paths if lost == "all" else paths[-2:]
    num = sum(leading_to(root, [int(path.name) for path in gone]))
    for path in gone:
        path.unlink()
    if lost == "no queues":
        shutil.rmtree(root / "consumequeue")
        num //= 2
    if lost == "newest half":
        # A copy from before: the checkpoint says that more was forced.
        data = paths[-3].read_bytes()
        size = struct.unpack(">i", data[:4])[0]
        paths[-3].write_bytes(data[:size].ljust(SEGMENT, b"\0"))
        num += 2 * (leading_to(root, [int(paths[-3].name)])[0] - 1)
    if not clean:
        (root / "abort").touch()
    before = tree_bytes(root)
    if lost == "newest half" and clean and recovery == "strict":
        # The zeros are damage of the log, which is reported first.
        recovery = "truncate"
    for told in (0, 1):
        with pytest.raises(LostLogError, match=rf"open\(path, drop_units={num}\)") as refused:
            MessageStore.open(root, config=CONFIG, recovery=recovery, drop_units=told)
        assert refused.value.num == num
        assert tree_bytes(root) == before
    with MessageStore.open(root, config=CONFIG, recovery=recovery, drop_units=num) as store:
        assert store.recovery_report.units_cut + store.recovery_report.index_entries_cut == num
    with MessageStore.open(root, config=CONFIG, drop_units=0) as store:
        store.put_message(Message("T", b"more"))


def test_what_lost_power_took_is_no_lost_log(root):
    # The newest record and nothing else, after the last flush.
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        newest = list(store.messages())[-1]
    with open(segments(root)[-1], "r+b") as file:
        file.seek(newest.phy_offset % SEGMENT)
        file.write(bytes(newest.size))
    (root / "abort").touch()
    with open(root / "checkpoint", "r+b") as file:
        file.write(struct.pack(">q", newest.store_timestamp - 1))
        file.seek(0)
        own = bytearray(file.read())
        own[48:] = bytes(len(own) - 48)
        file.seek(0)
        file.write(own)
    with MessageStore.open(root, config=CONFIG) as store:
        assert store.recovery_report.units_cut == 1


def test_a_unit_that_lost_a_bit_stops_no_rebuild(root):
    file = root / "consumequeue" / "T" / "0" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    # Of a unit in the middle, and far outside the log.
    data[5 * 20 + 3] ^= 0x40
    file.write_bytes(data)
    assert rebuild(root, ("consumequeue",), CONFIG).units == UNITS


def test_what_retention_left_stops_no_rebuild(root):
    # Units before the oldest segment lead to what was deleted in its time.
    for path in segments(root)[:2]:
        path.unlink()
    assert rebuild(root, ("consumequeue", "index"), CONFIG).units < UNITS


def test_queue_files_of_older_segments_are_kept(root):
    # Retention deletes such a file together with the segments, so that these went in another way.
    with MessageStore.open(root, config=CONFIG) as store:
        for _ in range(4):
            store.put_messages([Message("T", bytes(300)) for _ in range(60)])
    gone = [path for path in segments(root) if int(path.name) < 100_000]
    for path in gone:
        path.unlink()
    with pytest.raises(LostLogError) as refused:
        rebuild(root, ("consumequeue",), CONFIG)
    assert refused.value.num >= 100 and refused.value.num % 100 == 0
    assert rebuild(root, ("consumequeue",), CONFIG, drop_units=refused.value.num).units < 300 - refused.value.num


def test_commands_say_how_many_and_take_the_number(root, tmp_path):
    gone = segments(root)[-1:]
    units, entries = leading_to(root, [int(path.name) for path in gone])
    gone[0].unlink()
    before = tree_bytes(root)
    before.pop("lock", None)
    (tmp_path / "rows.jsonl").write_text('{"topic":"T"}\n')
    sizes = options_of(SMALL)
    for words, num, advice in (
        (["rebuild", root, "--yes", "-o", "index_tags=true"], units + entries, "--drop-units"),
        (["rebuild", root, "--yes", "--what", "consumequeue"], units, "--drop-units"),
        (["recover", root, "--yes"], units + entries, "rmqstore recover --drop-units"),
        (["recover", root, "--yes", "--mode", "truncate"], units + entries, "rmqstore recover --drop-units"),
        (["recover", root, "--yes", "--mode", "skip"], units + entries, "rmqstore recover --drop-units"),
        (["import", root, tmp_path / "rows.jsonl"], units + entries, "rmqstore recover --drop-units"),
    ):
        done = run(*words, *sizes)
        assert done.exit_code == 3 and f"{advice} {num} " in done.stderr, (words, done.output)
        after = tree_bytes(root)
        after.pop("lock", None)
        assert after == before
    done = run("recover", root, "--drop-units", units + entries, *sizes)
    assert done.exit_code == 0, done.output
    assert run("verify", root, *sizes, "-o", "index_tags=true").exit_code == 0


def test_batch_units_count_too(tmp_path):
    # Of 46 bytes each, wherever what follows the size stands.
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG) as store:
        store.put_message(Message("T", b"x"))
    folder = root / "batchconsumequeue" / "B" / "0"
    folder.mkdir(parents=True)
    unit = struct.pack(">qiqqqhii", SEGMENT * 7, 100, 0, 1, 0, 1, 0, 0)
    (folder / f"{0:020d}").write_bytes(unit.ljust(46 * 10, b"\0"))
    with pytest.raises(LostLogError) as refused:
        rebuild(root, ("consumequeue",), CONFIG)
    assert refused.value.num == 1 and refused.value.path == os.fspath(folder / f"{0:020d}")
