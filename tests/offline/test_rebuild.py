"""rebuild: the bytes that the real systems wrote, from their commit log alone; kills, damage, and what it refuses."""

import os
import shutil
import signal
import sys
import traceback

import golden
import oracle
import pytest

import rmqstore
from rmqstore import (
    CorruptionError,
    GeometryError,
    Message,
    MessageStore,
    StoreConfig,
    StoreError,
    StoreLockedError,
)
from rmqstore.offline.rebuild import REBUILD_DIRECTORY

FOLDERS = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index")
SMALL = StoreConfig(
    mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=200, max_hash_slot_num=16, max_index_num=40
)


def config_of(name):
    return StoreConfig(**golden.geometry(name))


def built(root, folders=FOLDERS):
    """Contents by path, index files in their order instead of by name, which is the time of their making."""
    return oracle.comparable(oracle.read_files(root), folders)


def logs(root):
    return {path: data for path, data in oracle.read_files(root).items() if path.startswith("commitlog/")}


@pytest.mark.parametrize("lost", ["nothing", "index", "consumequeue", "both"])
@pytest.mark.parametrize("name", golden.STORES)
def test_every_byte_is_the_brokers(golden_copy, name, lost):
    root = golden_copy(name)
    before, log = built(root), logs(root)
    assert before
    for kind in {"nothing": (), "both": ("index", "consumequeue")}.get(lost, (lost,)):
        for folder in ("index",) if kind == "index" else FOLDERS[:3]:
            shutil.rmtree(root / folder, ignore_errors=True)
    done = []
    report = rmqstore.rebuild(root, config=config_of(name), progress=lambda *args: done.append(args))
    assert built(root) == before
    assert logs(root) == log
    assert not (root / REBUILD_DIRECTORY).exists()
    assert report.damage == [] and report.records and report.units and report.index_entries
    assert done[-1] == (report.log_bytes, report.log_bytes)
    assert list(rmqstore.verify(root, config_of(name))) == []


@pytest.mark.parametrize("name", golden.BROKER_STORES)
def test_each_kind_alone_and_into_another_folder(golden_copy, tmp_path, name):
    root = golden_copy(name)
    tree = oracle.read_files(root)
    for kind, folders in (("index", ("index",)), ("consumequeue", ("consumequeue",))):
        output = tmp_path / f"out-{kind}"
        rmqstore.rebuild(root, what=(kind,), config=config_of(name), output=output)
        assert built(output) == built(root, folders)
        with pytest.raises(StoreError, match="exists in the output directory"):
            rmqstore.rebuild(root, what=(kind,), config=config_of(name), output=output)
    assert oracle.read_files(root) == tree


def test_what_is_only_assumed_is_asked_for(golden_copy):
    root = golden_copy("broker")
    with pytest.raises(GeometryError, match="message_delay_level"):
        rmqstore.rebuild(root)
    shutil.rmtree(root / "index")
    tree = oracle.read_files(root)
    with pytest.raises(GeometryError, match="max_hash_slot_num"):
        rmqstore.rebuild(root, what=("index",))
    with pytest.raises(GeometryError, match="index_tags"):
        rmqstore.rebuild(root, what="index", config=StoreConfig.infer(root, max_hash_slot_num=1000, max_index_num=8000))
    with pytest.raises(ValueError, match="give 'index'"):
        rmqstore.rebuild(root, what=("commitlog",))
    assert {path for path in oracle.read_files(root) if path != "lock"} == {path for path in tree if path != "lock"}


def test_a_store_in_use_is_refused(tmp_path):
    with MessageStore.open(tmp_path / "s", config=SMALL) as store:
        store.put_message(Message("T", b"x", keys=["k"]))
        with pytest.raises(StoreLockedError):
            rmqstore.rebuild(tmp_path / "s", config=SMALL)


def filled(root, num=200):
    with MessageStore.open(root, config=SMALL) as store:
        return [
            store.put_message(Message("T", bytes([i]) * 50, keys=[f"k{i}"], tags=f"t{i % 3}"), i % 2)
            for i in range(num)
        ]


def test_damage_is_reported_and_passed_over(tmp_path):
    puts = filled(tmp_path / "s")
    segment = tmp_path / "s" / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    rotten, torn = puts[5], puts[9]
    data[rotten.phy_offset + 90] ^= 1  # in the body
    data[torn.phy_offset + 4] ^= 1  # in the magic
    segment.write_bytes(data)
    report = rmqstore.rebuild(tmp_path / "s", config=SMALL)
    assert report.damage == [
        (rotten.phy_offset, rotten.size, "BAD_BODY_CRC"),
        (torn.phy_offset, torn.size, "BAD_MAGIC"),
    ]
    with MessageStore.open(tmp_path / "s", config=SMALL, read_only=True) as store:
        for i, put in enumerate(puts):
            got = store.get_message("T", i % 2, put.queue_offset, max_num=1).messages
            hits = store.query_message("T", f"k{i}")
            if put is torn:
                assert [m.phy_offset for m in got] != [put.phy_offset] and hits == []
            else:
                assert [m.phy_offset for m in got] == [m.phy_offset for m in hits] == [put.phy_offset]
                assert got[0].corrupt == (put is rotten)


def test_a_checkpoint_of_an_odd_length_stops_no_rebuild(tmp_path, caplog):
    root = tmp_path / "s"
    puts = filled(root)
    before = built(root)
    os.truncate(root / "checkpoint", 4)
    shutil.rmtree(root / "index")
    rmqstore.rebuild(root, config=SMALL)
    assert built(root) == before
    assert (root / "checkpoint").stat().st_size == 4
    assert not (root / REBUILD_DIRECTORY).exists()
    assert [str(root / "checkpoint") in message for message in caplog.messages] == [True]
    # Nobody writes with it, and its advice works.
    with pytest.raises(GeometryError, match="move it away"):
        MessageStore.open(root, config=SMALL)
    (root / "checkpoint").unlink()
    with MessageStore.open(root, config=SMALL) as store:
        assert [message.phy_offset for message in store.query_message("T", "k3")] == [puts[3].phy_offset]


def test_a_wrong_build_is_never_swapped_in(tmp_path, monkeypatch):
    from rmqstore.store.dispatcher import CommitLogDispatcher

    filled(tmp_path / "s")
    tree = oracle.read_files(tmp_path / "s")
    dispatch = CommitLogDispatcher.dispatch_columns

    def wrong(self, columns, *args, **kwargs):
        columns.tags_code[3] += 1
        dispatch(self, columns, *args, **kwargs)

    monkeypatch.setattr(CommitLogDispatcher, "dispatch_columns", wrong)
    with pytest.raises(CorruptionError, match="nothing was swapped in"):
        rmqstore.rebuild(tmp_path / "s", config=SMALL)
    assert oracle.read_files(tmp_path / "s") == tree


def killed_at(steps, root):
    """Rebuild in a forked child that is killed after so many steps; its status, as `subprocess` gives it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # Nothing of the parent's may run here: only the rebuild, then death.
    try:
        module = sys.modules["rmqstore.offline.rebuild_swap"]

        def counted(call):
            def step(*args, **kwargs):
                nonlocal steps
                steps -= 1
                if steps < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return step

        # Every change of names in the swap, and every piece of the build, is a step.
        os.rename, os.link, module.fsync_directory = (
            counted(os.rename),
            counted(os.link),
            counted(module.fsync_directory),
        )
        shutil.rmtree = counted(shutil.rmtree)
        rmqstore.rebuild(root, config=SMALL)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def test_killed_at_every_step_and_started_again(tmp_path):
    filled(tmp_path / "whole", 60)
    whole = built(tmp_path / "whole")
    ended = False
    for steps in range(200):
        root = tmp_path / f"s{steps}"
        shutil.copytree(tmp_path / "whole", root)
        shutil.rmtree(root / "index")
        status = killed_at(steps, root)
        if status == 0:
            ended = True
            break
        assert status == -signal.SIGKILL
        if (root / REBUILD_DIRECTORY / "complete").exists():
            with pytest.raises(StoreError, match="run the same rebuild again"):
                MessageStore.open(root, config=SMALL)
        rmqstore.rebuild(root, config=SMALL)
        assert built(root) == whole
        assert not os.path.exists(root / REBUILD_DIRECTORY)
        with MessageStore.open(root, config=SMALL) as store:
            assert store.query_message("T", "k7")
        assert list(rmqstore.verify(root, SMALL)) == []
        shutil.rmtree(root)
    assert ended and steps > 20
