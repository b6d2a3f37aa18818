"""Distributed rebuild: the single-process rebuild's bytes, whatever the pieces, the order of the tasks, the damage and the kills.

All but the last section runs the tasks without Spark, in this process or in several.
"""

import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import golden
import oracle
import pytest
from mapped_rebuild import in_order, rebuild_with
from unprivileged import closed

import rmqstore
import rmqstore.spark.rebuild
from rmqstore import CorruptionError, GeometryError, Message, MessageStore, StoreConfig, StoreError, StoreLockedError
from rmqstore.offline.rebuild import REBUILD_DIRECTORY
from rmqstore.spark import rebuild_index, rebuild_records
from rmqstore.spark.tasks import answer_of

ROOT = Path(__file__).resolve().parents[2]
# The package's attribute of this name is the function.
module = sys.modules["rmqstore.spark.rebuild"]

FOLDERS = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index")
SMALL = StoreConfig(
    mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=200, max_hash_slot_num=16, max_index_num=40
)


def backwards(function, plan, tasks):
    return [function(plan, task) for task in tasks[::-1]][::-1]


def twice(function, plan, tasks):
    first = [function(plan, task) for task in tasks]
    again = [function(plan, task) for task in tasks]
    assert first == again
    return again


MAPPERS = (in_order, backwards, twice)
# The stores of older versions have no layout that these have not; `test_rebuild.py` has them.
LAYOUTS = golden.JAVA_STORES + golden.BROKER_STORES


def built(root):
    return oracle.comparable(oracle.read_files(root), FOLDERS)


def config_of(name):
    return StoreConfig(**golden.geometry(name))


@pytest.fixture(autouse=True)
def small_work(monkeypatch):
    """No task is too small for being one."""
    monkeypatch.setattr(module, "_FEW_UNITS", 0)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_every_byte_is_the_brokers(golden_copy, tmp_path, number):
    name = LAYOUTS[number]
    root, config = golden_copy(name), config_of(name)
    before = built(root)
    want = rmqstore.rebuild(root, config=config, output=tmp_path / "want")
    if number % 2:
        for folder in FOLDERS:
            shutil.rmtree(root / folder, ignore_errors=True)
    got = rebuild_with(MAPPERS[number % 3], root, config=config, parallelism=64)
    assert built(root) == before
    for field in ("what", "records", "units", "index_entries", "damage", "log_bytes"):
        assert getattr(got, field) == getattr(want, field)
    assert not (root / REBUILD_DIRECTORY).exists()
    with MessageStore.open(root, config=config):
        pass


def test_queues_are_not_made_where_settings_are_closed(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=SMALL) as store:
        store.put_message(Message("Orders", b"x", keys=["K"]), 0)
    topics = root / "config" / "topics.json"
    topics.parent.mkdir(exist_ok=True)
    topics.write_text('{"topicConfigTable":{"Orders":{"attributes":{"+queue.type":"BatchCQ"}}}}')
    before = sorted(os.listdir(root))
    with closed(topics):
        for output in (None, tmp_path / "new"):
            with pytest.raises(PermissionError, match=re.escape(str(topics))):
                rebuild_with(in_order, root, config=SMALL, output=output)
        assert sorted(os.listdir(root)) == before
        # The index is the same for every kind of queue.
        assert rebuild_with(in_order, root, ("index",), SMALL).index_entries == 1


# ------------------------------------------------------------------------------------------------------------ odd stores


def odd_config(rnd):
    further = rnd.random() < 0.3
    return StoreConfig(
        mapped_file_size_commit_log=rnd.choice([2048, 8192]),
        mapped_file_size_consume_queue=rnd.choice([200, 2000]),
        max_hash_slot_num=rnd.choice([3, 16, 1000]),
        max_index_num=rnd.choice([2, 7, 40, 1000]),
        enable_consume_queue_ext=rnd.random() < 0.1,
        mapped_file_size_consume_queue_ext=1024,
        enable_lmq=further,
        enable_multi_dispatch=further,
        index_tags=rnd.random() < 0.5,
    )


def put_odd_messages(root, rnd, config):
    """Fill a store with messages with and without keys, tags, transactions, further queues; where their records lie."""
    places = []
    with MessageStore.open(root, config=config) as store:
        for i in range(rnd.choice([0, 1, 5, 60, 120])):
            properties = {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b"} if config.enable_lmq and rnd.random() < 0.2 else {}
            message = Message(
                f"T{rnd.randrange(3)}",
                bytes([i % 256]) * rnd.randrange(200),
                keys=[f"k{rnd.randrange(40)}" for _ in range(rnd.randrange(3))] if rnd.random() < 0.7 else (),
                tags=f"t{i % 3}" if rnd.random() < 0.4 else None,
                properties=properties,
            )
            if rnd.random() < 0.1:
                message.sys_flag = rnd.choice([0x4, 0x8, 0xC])
            put = store.put_message(message, rnd.randrange(2))
            places.append((put.phy_offset, put.size))
    return places


def damage(root, rnd, segment_size, places):
    """Change queue offsets, queue ids, flags, bodies, magic, sizes; zero a stretch; take a segment away."""
    log = Path(root) / "commitlog"

    def edit(at, data):
        segment = log / f"{at - at % segment_size:020d}"
        if segment.exists():
            with open(segment, "r+b") as file:
                file.seek(at % segment_size)
                file.write(data[: segment_size - at % segment_size])

    for _ in range(rnd.choice([0, 0, 1, 2, 5]) if places else 0):
        at, size = rnd.choice(places)
        kind = rnd.randrange(9)
        if kind == 0:
            edit(at + 20, struct.pack(">q", rnd.choice([0, 1, 5, 3000, -1, 2**40])))
        elif kind == 1:
            edit(at + 88 + rnd.randrange(3), b"\xaa")
        elif kind == 2:
            edit(at + 4, b"\x01\x02")
        elif kind == 3:
            edit(at, struct.pack(">i", rnd.choice([0, 5, -3, 100000, size + 4])))
        elif kind == 4:
            edit(at + rnd.randrange(size), bytes(rnd.randrange(300)))
        elif kind == 5:
            segments = sorted(log.iterdir())
            if len(segments) > 2:
                rnd.choice(segments[:-1]).unlink()
        elif kind == 6:
            edit(at + 12, struct.pack(">i", rnd.choice([0, 1, 7])))
        elif kind == 7:
            edit(at + 36, struct.pack(">i", rnd.choice([0, 4, 8, 12, 0x80])))
        else:
            edit(at + 20, struct.pack(">q", rnd.randrange(40)))


def outcome(call, output):
    """Return the report and the files of a rebuild, or its refusal."""
    try:
        report = call(output)
    except StoreError as error:
        return type(error).__name__
    folders = sorted(os.listdir(output))
    return (report.records, report.units, report.index_entries, report.damage, report.log_bytes), built(output), folders


@pytest.mark.parametrize("seed", range(40))
def test_odd_and_damaged_stores(tmp_path, caplog, seed):
    caplog.set_level(logging.CRITICAL)
    rnd = random.Random(seed)
    config, root = odd_config(rnd), tmp_path / "s"
    damage(root, rnd, config.mapped_file_size_commit_log, put_odd_messages(root, rnd, config))
    kinds = rnd.choice([("index", "consumequeue"), ("index",), ("consumequeue",)])
    if rnd.random() < 0.3:
        for folder in FOLDERS:
            shutil.rmtree(root / folder, ignore_errors=True)
    want = outcome(lambda output: rmqstore.rebuild(root, kinds, config, output), tmp_path / "want")
    for parallelism in (1, 64):
        got = outcome(
            lambda output, parallelism=parallelism: rebuild_with(
                in_order, root, kinds, config, output, parallelism=parallelism
            ),
            tmp_path / f"got{parallelism}",
        )
        assert got == want


def filled(root, num=200, config=SMALL):
    with MessageStore.open(root, config=config) as store:
        return [
            store.put_message(
                Message(f"T{i % 3}", bytes([i % 256]) * (i % 90), keys=[f"k{i}"], tags=f"t{i % 3}"), i % 2
            )
            for i in range(num)
        ]


# ----------------------------------------------------------------------------------------------- kills, turns, processes


def test_several_processes_and_every_task_twice_at_once(tmp_path):
    filled(tmp_path / "s")
    want = built(tmp_path / "s")
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:

        def mapper(function, plan, tasks):
            work = [(function, plan, task) for task in tasks for _ in range(2)]
            answers = list(pool.map(answer_of, *zip(*work, strict=True))) if work else []
            assert all(error is None for error, _ in answers)
            return [answer for _, answer in answers[1::2]]

        rebuild_with(mapper, tmp_path / "s", config=SMALL, parallelism=64)
    assert built(tmp_path / "s") == want


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from rmqstore import StoreConfig
    import rmqstore.spark.rebuild
    from rmqstore.offline.rebuild import RebuildJob
    module = sys.modules["rmqstore.spark.rebuild"]
    steps, root = int(sys.argv[1]), sys.argv[2]
    def counted(call):
        def step(*args, **kwargs):
            global steps
            steps -= 1
            if steps < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return step
    # Every change of names and every write into a shared file is a step.
    os.rename, os.replace, os.pwrite = counted(os.rename), counted(os.replace), counted(os.pwrite)
    def in_order(function, plan, tasks):
        return [function(plan, task) for task in tasks]
    kills = 0
    # Every run is a process of its own, a copy of this one, which has imported all and done nothing.
    while (run := os.fork()) != 0:
        status = os.waitpid(run, 0)[1]
        if status == 0:
            print(kills)
            sys.exit()
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit("a run failed")
        # A run that is killed after the swap, during the clean-up, is complete: the next run begins again.
        kills += 1
        steps += 1
        if kills == 60:
            sys.exit("nothing is kept of what was done")
    config = StoreConfig(
        mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=2000, max_hash_slot_num=16, max_index_num=40)
    module.rebuild_with(in_order, RebuildJob.of(root, config=config), 64)
    """
)


@pytest.mark.parametrize("steps", [11, 14, 19, 24])
def test_killed_again_and_again_and_gone_on_with(tmp_path, steps):
    config = StoreConfig(
        mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=2000, max_hash_slot_num=16, max_index_num=40
    )
    filled(tmp_path / "whole", 60, config)
    whole = built(tmp_path / "whole")
    root = tmp_path / "s"
    shutil.copytree(tmp_path / "whole", root)
    shutil.rmtree(root / "index")
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(steps), str(root)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
    assert built(root) == whole
    assert not (root / REBUILD_DIRECTORY).exists()
    assert list(rmqstore.verify(root, config)) == []


def test_what_was_done_is_not_done_again(tmp_path, monkeypatch):
    filled(tmp_path / "s")
    want = built(tmp_path / "s")
    scans = []
    run = rebuild_records._SegmentScan.run
    monkeypatch.setattr(rebuild_records._SegmentScan, "run", lambda self: (scans.append(self.number), run(self))[1])

    def failing(function, plan, tasks):
        if function is module.check_part:
            raise OSError("a worker died")
        return in_order(function, plan, tasks)

    with pytest.raises(OSError, match="a worker died"):
        rebuild_with(failing, tmp_path / "s", ("index",), SMALL, parallelism=64)
    assert built(tmp_path / "s") == want
    done = len(scans)
    # Other options are another plan: what was done is no help to it, and goes.
    with pytest.raises(OSError, match="a worker died"):
        rebuild_with(failing, tmp_path / "s", config=SMALL, parallelism=64)
    assert len(scans) > done
    done = len(scans)
    # With other groups of segments, too.
    rebuild_with(in_order, tmp_path / "s", config=SMALL, parallelism=1)
    assert len(scans) == done
    assert built(tmp_path / "s") == want
    # A store that was written to since is another log.
    with pytest.raises(OSError, match="a worker died"):
        rebuild_with(failing, tmp_path / "s", config=SMALL)
    with MessageStore.open(tmp_path / "s", config=SMALL) as store:
        store.put_message(Message("T0", b"x", keys=["new"]))
    want = built(tmp_path / "s")
    rebuild_with(in_order, tmp_path / "s", config=SMALL)
    assert built(tmp_path / "s") == want


@pytest.mark.parametrize("part", ["units", "entries"])
def test_a_wrong_build_is_never_swapped_in(tmp_path, monkeypatch, part):
    filled(tmp_path / "s")
    tree = oracle.read_files(tmp_path / "s")
    if part == "units":
        units_of = rebuild_records._units_of

        def wrong(columns, rows):
            made = units_of(columns, rows)
            made["tags_code"][-1] += 1
            return made

        monkeypatch.setattr(rebuild_records, "_units_of", wrong)
    else:
        entries_of = rebuild_index._entries

        def wrong(plan, segment, first, count):
            entries = entries_of(plan, segment, first, count)
            entries["store_timestamp"] += first == 0
            return entries

        monkeypatch.setattr(rebuild_index, "_entries", wrong)
    with pytest.raises(CorruptionError, match="nothing was swapped in"):
        rebuild_with(in_order, tmp_path / "s", config=SMALL)
    assert oracle.read_files(tmp_path / "s") == tree


def test_what_is_refused(golden_copy, tmp_path):
    root = golden_copy("broker")
    with pytest.raises(GeometryError, match="message_delay_level"):
        rebuild_with(in_order, root)
    with pytest.raises(ValueError, match="give 'index'"):
        rebuild_with(in_order, root, what=("commitlog",))
    with pytest.raises(StoreError, match="does not exist"):
        rebuild_with(in_order, tmp_path / "nothing")
    (tmp_path / "out" / "index").mkdir(parents=True)
    with pytest.raises(StoreError, match="exists in the output directory"):
        rebuild_with(in_order, root, config=config_of("broker"), output=tmp_path / "out")
    with MessageStore.open(root, config=config_of("broker")):
        with pytest.raises(StoreLockedError):
            rebuild_with(in_order, root, config=config_of("broker"))
    assert not (root / REBUILD_DIRECTORY).exists()


# -------------------------------------------------------------------------------------------------------------- on Spark


@pytest.mark.spark
@pytest.mark.java
def test_on_spark(spark, golden_copy, tmp_path):
    import rmqstore.spark

    root, config = golden_copy("broker"), config_of("broker")
    before = built(root)
    want = rmqstore.rebuild(root, config=config, output=tmp_path / "want")
    got = rmqstore.spark.rebuild(spark, root, config=config, output=tmp_path / "got")
    assert built(tmp_path / "got") == built(tmp_path / "want")
    assert (got.records, got.units, got.index_entries) == (want.records, want.units, want.index_entries)
    # An error of a task is raised here.
    with pytest.raises(GeometryError, match="message_delay_level"):
        rmqstore.spark.rebuild(spark, root, what="consumequeue")

    # The Python worker of a task dies; what the others did is not done again.
    mapper = module.spark_map(spark)
    mark = tmp_path / "died"

    def dies(plan, task):
        if task[0] == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return module.scan_segments(plan, task)

    def deadly(function, plan, tasks):
        return mapper(dies if function is module.scan_segments else function, plan, tasks)

    with pytest.raises(Exception, match=r"crashed|exited|died|lost"):
        rebuild_with(deadly, root, config=config, parallelism=64)
    assert built(root) == before
    assert (root / REBUILD_DIRECTORY).exists()
    rmqstore.spark.rebuild(spark, root, config=config)
    assert built(root) == before
    assert not (root / REBUILD_DIRECTORY).exists()
