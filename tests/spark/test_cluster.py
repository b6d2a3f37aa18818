"""Jobs on a standalone cluster of separate processes: the wheel in an archive, and workers that are killed in the middle.

Owns what must hold when a worker, its executor and their Python processes go at one moment: the results are those of one
process anyway.  Everything is small, and the cluster is one for all tests.
"""

from __future__ import annotations

import os
import time

import pytest
from spark_setting import SETTINGS, spark_environment, unavailable_reason
from stores import messages, scanned, small_config

from rmqstore import MessageStore, rebuild, verify

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(600)]

PATIENCE = 240
GEOMETRY = {
    "mapped_file_size_commit_log": 2**16,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 50,
    "max_index_num": 4000,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = unavailable_reason()
    if reason is None and not os.path.exists("/proc/self/stat"):
        reason = "the processes of a worker are found through /proc, which this system does not have"
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    from cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("cluster") / "cluster") as started:
        yield started
    assert not started.master.processes()


@pytest.fixture(scope="module")
def driver(cluster, tmp_path_factory):
    from cluster import Driver, make_environment

    archive = make_environment(tmp_path_factory.mktemp("environment"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in spark_environment().items():
            patch.setenv(name, value)
        started = Driver(cluster, archive, SETTINGS)
    with started:
        yield started


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("store") / "store"
    with MessageStore.open(root, config=small_config(**GEOMETRY)) as store:
        by_queue: dict[int, list] = {0: [], 1: []}
        for message, queue_id in messages(8_000):
            by_queue[queue_id].append(message)
            if len(by_queue[queue_id]) == 100:
                store.put_messages(by_queue[queue_id], queue_id=queue_id)
                by_queue[queue_id].clear()
    return root


def wait_for_executors(cluster, driver, num):
    # In place of those that a test before killed.
    while len(cluster.workers) < num:
        cluster.start_worker()
    until = time.monotonic() + PATIENCE
    while driver.run("executors")["executors"] != num:
        assert time.monotonic() < until, f"there are not {num} executors"
        time.sleep(0.2)


def finished_segments(output):
    found = []
    # Folders that disappear are skipped.
    for folder, _, names in os.walk(output):
        found += [name for name in names if os.path.basename(folder) == "segments" and name.endswith(".json")]
    return found


def tree(path):
    return {
        file.relative_to(path).as_posix() if "index" not in file.parent.name else index: file.read_bytes()
        for folder in ("consumequeue", "index")
        # Names of index files are times at which they were made.
        for index, file in enumerate(sorted(each for each in (path / folder).rglob("*") if each.is_file()))
    }


def test_executors_run_the_wheel_of_the_archive_and_share_the_work(cluster, driver, path):
    wait_for_executors(cluster, driver, 2)
    answer = driver.run("batch", path=str(path), partition_bytes=2**18)
    expected = [
        [row["phy_offset"], row["topic"], row["queue_offset"], row["body"].hex()]
        for row in scanned(path, ["phy_offset", "topic", "queue_offset", "body"])
    ]
    assert answer["rows"] == expected and sum(task["rows"] for task in answer["tasks"]) == len(expected)
    folders = {task["folder"] for task in answer["tasks"]}
    assert {folder.split("/")[-3] for folder in folders} == {"worker-1", "worker-2"}
    for task in answer["tasks"]:
        environment = f"{task['folder']}/environment"
        assert task["python"] == f"{environment}/bin/python"
        assert task["core"].startswith(f"{environment}/lib/") and "/site-packages/rmqstore/_core." in task["core"]
        assert str(cluster.folder.parent) in task["folder"]
        # Nothing of the checkout, and nothing of the tests' environment but pyspark itself.
        from cluster import ROOT, spark_home

        foreign = [each for each in task["path"].split(os.pathsep) if each.startswith((str(ROOT), str(spark_home())))]
        assert all(each.startswith(str(spark_home())) for each in foreign)


def test_the_other_jobs_come_to_the_results_of_one_process(cluster, driver, path, tmp_path):
    wait_for_executors(cluster, driver, 2)
    keys = ["K1", "K7500", "G3", "nobody's"]
    answer = driver.run("others", path=str(path), folder=str(tmp_path), keys=keys, geometry=GEOMETRY)
    with MessageStore.open(path, read_only=True) as store:
        hits = [[key, hit.phy_offset] for key in keys for hit in store.query_message("Orders", key)]
    assert answer["hits"] == answer["hits_by_frame"] == sorted(hits) and len(hits) > 60
    columns = ["topic", "queue_id", "queue_offset", "keys", "tags", "body"]
    expected = scanned(path, columns)
    assert scanned(tmp_path / "appended", columns) == expected
    assert answer["loaded"] == len(expected)
    stored = scanned(path, [*columns, "store_timestamp"])
    assert scanned(tmp_path / "loaded", [*columns, "store_timestamp"]) == stored
    for name in ("appended", "loaded"):
        assert not [finding for finding in verify(tmp_path / name) if finding.level == "error"]


def test_a_worker_that_is_killed_in_the_middle_of_a_stream_changes_nothing(cluster, driver, path, tmp_path):
    wait_for_executors(cluster, driver, 2)
    driver.send(
        "stream",
        path=str(path),
        output=str(tmp_path / "out"),
        checkpoint=str(tmp_path / "checkpoint"),
        max_bytes=500_000,
    )
    said = driver.receive()
    assert said["batch"] == 0
    victim = cluster.workers[0]
    there = list(victim.processes().values())
    assert any("CoarseGrainedExecutorBackend" in command for command in there)
    assert any("pyspark.daemon" in command or "pyspark/daemon" in command for command in there), there
    killed = cluster.kill_worker(victim)
    assert len(killed) >= 3
    seen = [0]
    while "batch" in (said := driver.receive()):
        seen.append(said["batch"])
    assert said["batches"] > seen[0] + 2
    expected = [[row["phy_offset"], row["body"].hex()] for row in scanned(path, ["phy_offset", "body"])]
    assert said["rows"] == expected


def test_a_worker_that_is_killed_in_the_middle_of_a_rebuild_changes_nothing(cluster, driver, path, tmp_path):
    wait_for_executors(cluster, driver, 2)
    output = tmp_path / "output"
    driver.send("rebuild", path=str(path), output=str(output))
    until = time.monotonic() + PATIENCE
    # Some segments are done, and others are not.
    while not finished_segments(output):
        assert time.monotonic() < until, "no segment was finished"
        time.sleep(0.005)
    cluster.kill_worker(cluster.workers[0])
    assert len(finished_segments(output)) < len(os.listdir(path / "commitlog"))
    answer = driver.receive()
    single = tmp_path / "single"
    report = rebuild(path, output=single)
    assert answer == {"records": report.records, "units": report.units, "index_entries": report.index_entries}
    assert tree(output) == tree(single)
