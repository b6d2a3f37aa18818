"""rmqstore tail: which messages it begins with, and that it follows a store through all that happens to one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading

import golden
import pytest
from test_cli import HOSTILE, assert_harmless, environment, json_lines, run, utc  # noqa: F401

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore

GEOMETRY = StoreConfig(
    mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=100, max_index_num=1000
)
BODY = b"x" * 500


def put(store, numbers, topic="T", body=BODY):
    for number in numbers:
        store.put_message(Message(topic, body, keys=[f"k{number}"], tags=f"t{number % 3}"), number % 2)


class Follower:
    """A `tail -f` in a process of its own; `take(n)` waits for its next n messages."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rmqstore", "tail", "-f", "--json", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True,
            # A run in the background of a shell inherits that the signal is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)

    def take(self, number):
        return [json.loads(self.lines.get(timeout=240)) for _ in range(number)]

    def keys(self, number):
        return [message["keys"][0] for message in self.take(number)]

    def end(self, expected=-1):
        """(exit code, stderr), and nothing more was shown."""
        if expected == -1:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=240)
        assert self.lines.empty()
        return code, self.process.stderr.read()


@contextlib.contextmanager
def following(*arguments):
    follower = Follower(*arguments)
    try:
        yield follower
    finally:
        follower.process.kill()
        follower.process.wait()
        follower.process.stdout.close()
        follower.process.stderr.close()


# ---------------------------------------------------------------------------------------------------------------------
# The newest


def by_place(lines):
    return sorted(lines, key=lambda line: line["offset"])


def test_the_newest_are_those_of_the_log(broker):
    wanted = by_place(golden.lines("broker", "msg"))
    for number in (1, 10, 700):
        shown = json_lines(run("tail", broker, "-n", number, "--json", "--body", "none"))
        assert [message["phy_offset"] for message in shown] == [line["offset"] for line in wanted[-number:]]
    everything = json_lines(run("tail", broker, "-n", 10**6, "--json", "--body", "none"))
    assert len(everything) == len(wanted) > 10_000


@pytest.mark.parametrize("topic", ["Orders", "Payments", "Batches"])
def test_the_newest_of_a_topic_queue_and_tag(broker, topic):
    wanted = [line for line in by_place(golden.lines("broker", "msg")) if line["topic"] == topic]
    all_of_it = json_lines(run("tail", broker, topic, "-n", 10**6, "--json", "--body", "none"))
    assert [message["phy_offset"] for message in all_of_it] == [line["offset"] for line in wanted]
    shown = json_lines(run("tail", broker, topic, "-n", 5, "--json", "--body", "none"))
    assert shown == all_of_it[-5:]
    shown = json_lines(run("tail", broker, topic, "--queue", 1, "--queue", 2, "-n", 7, "--json", "--body", "none"))
    assert shown == [message for message in all_of_it if message["queue_id"] in (1, 2)][-7:]
    tagged = [message for message in all_of_it if message["tags"] in ("paid", "shipped")]
    result = run("tail", broker, topic, "--tags", "paid || shipped", "-n", 9, "--json", "--body", "none")
    assert json_lines(result) == tagged[-9:] and result.exit_code == (0 if tagged else 1)


def test_the_newest_with_a_key(broker):
    by_query = json_lines(run("query", broker, "Orders", "CUST-1", "--json", "--max-num", 1000))
    for options, wanted in ([], by_query[:10]), (["-n", "2"], by_query[:2]):
        for topic in (["Orders"], []):
            assert json_lines(run("tail", broker, *topic, "--key", "CUST-1", "--json", *options)) == wanted[::-1]
    tagged = [message for message in by_query if message["tags"] == "paid"]
    assert json_lines(run("tail", broker, "Orders", "--key", "CUST-1", "--tags", "paid", "-n1", "--json")) == tagged[:1]


def test_from_an_offset(broker):
    wanted = [line["offset"] for line in by_place(golden.lines("broker", "msg"))]
    # 484 begins a record, 485 lies in one; at 2**40 there is nothing.
    for begin in (484, 485):
        shown = json_lines(run("tail", broker, "--begin-phy-offset", begin, "--json", "--body", "none"))
        assert [message["phy_offset"] for message in shown] == [offset for offset in wanted if offset >= begin]
    assert run("tail", broker, "--begin-phy-offset", 2**40).exit_code == 1


def test_what_no_queue_has_is_read_from_the_log(golden_copy):
    copy = golden_copy("broker")
    newest = json_lines(run("tail", copy, "Payments", "-n", 3, "--json"))
    of_log = json_lines(run("tail", copy, "-n", 50, "--json"))
    shutil.rmtree(copy / "consumequeue")
    assert json_lines(run("tail", copy, "Payments", "-n", 3, "--json")) == newest
    assert json_lines(run("tail", copy, "-n", 50, "--json")) == of_log


def test_a_key_without_an_index_is_looked_for_in_the_log(golden_copy):
    copy = golden_copy("broker")
    for topic in (["Orders"], []):
        wanted = json_lines(run("tail", copy, *topic, "--key", "CUST-1", "--json"))
        assert len(wanted) == 7
        (copy / "index").rename(copy / "away")
        options = ["-o", "max_hash_slot_num=1000", "-o", "max_index_num=8000"]
        assert json_lines(run("tail", copy, *topic, "--key", "CUST-1", "--json", *options)) == wanted
        (copy / "away").rename(copy / "index")


def test_nothing_is_1_and_wrong_usage_2(broker):
    for arguments in (["NoSuchTopic"], ["Orders", "--key", "none"], ["Orders", "--tags", "none"], ["--key", "none"]):
        result = run("tail", broker, *arguments)
        assert (result.exit_code, result.stdout) == (1, "") and "no message" in result.stderr
    assert run("tail", broker, "-n", 0).exit_code == 0
    for arguments in (["--queue", "1"], ["-n", "-1"]):
        assert run("tail", broker, *arguments).exit_code == 2


def test_every_java_store_has_its_newest(golden_store):
    for name in golden.STORES_WITH_LINES:
        geometry = [f"-o{option}={value}" for option, value in golden.geometry(name).items()]
        wanted = [line["offset"] for line in by_place(golden.lines(name, "msg"))][-5:]
        shown = json_lines(run("tail", golden_store(name), "-n", 5, "--json", *geometry))
        assert [message["phy_offset"] for message in shown] == wanted, name


def test_it_leaves_no_trace(golden_copy):
    copy = golden_copy("broker.killed")
    before = golden.tree(copy)
    run("tail", copy), run("tail", copy, "Orders", "--key", "CUST-1"), run("topics", copy), run("queues", copy)
    assert golden.tree(copy) == before


# ---------------------------------------------------------------------------------------------------------------------
# Following


def test_it_follows_over_segments_and_filters(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(10))
        with following(root, "-n", 3) as every, following(root, "T", "--queue", 1, "--tags", "t1 || t2") as some:
            assert every.keys(3) == ["k7", "k8", "k9"]
            assert some.keys(3) == ["k1", "k5", "k7"]
            put(store, range(10, 400))
            put(store, range(400, 410), "Other")
            assert every.keys(400) == [f"k{number}" for number in range(10, 410)]
            chosen = [number for number in range(10, 400) if number % 2 == 1 and number % 3 > 0]
            assert some.keys(len(chosen)) == [f"k{number}" for number in chosen]
            assert len(os.listdir(root / "commitlog")) > 3
            assert every.end() == (130, "") and some.end() == (130, "")


def test_a_topic_that_comes_later_and_a_key(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(10))
        with following(root, "Later", "--key", "k50") as follower:
            # Its note says that it has begun to wait.
            assert "Later has no queue yet" in follower.process.stderr.readline()
            put(store, range(40, 60), "Later")
            assert follower.keys(1) == ["k50"]
            assert follower.end() == (130, "")


def test_it_says_what_retention_deleted_before_it_was_shown(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY.replace(file_reserved_time=0)) as store:
        put(store, range(10))
        with following(root, "-n", 1) as follower:
            assert follower.keys(1) == ["k9"]
            follower.process.send_signal(signal.SIGSTOP)
            put(store, range(10, 600))
            for name in sorted(os.listdir(root / "commitlog"))[:-1]:
                os.utime(root / "commitlog" / name, (1, 1))
            assert store.delete_expired_files().segments > 3
            first = next(store.messages())
            follower.process.send_signal(signal.SIGCONT)
            left = [f"k{number}" for number in range(int(first.keys[0][1:]), 600)]
            shown = follower.keys(1)
            while shown[-1] != left[-1]:
                shown += follower.keys(1)
            # One that was stopped in the middle of a look shows the rest of the segment that it had mapped, too.
            early = shown.index(left[0])
            assert shown == [f"k{number}" for number in range(10, 10 + early)] + left
            code, errors = follower.end()
            assert code == 130 and f"to {first.phy_offset} were deleted before they were shown" in errors


def test_a_log_that_recovery_cut_is_followed(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(10))
        last = list(store.messages())[-1]
    with following(root, "-n", 2) as follower:
        assert follower.keys(2) == ["k8", "k9"]
        follower.process.send_signal(signal.SIGSTOP)
        # What a machine that lost power leaves: the last record never came to the disk.
        (root / "abort").touch()
        with open(root / "commitlog" / ("0" * 20), "r+b") as segment:
            segment.seek(last.phy_offset)
            segment.write(bytes(last.size))
        with MessageStore.open(root, config=GEOMETRY) as store:
            assert store.commit_log.max_offset == last.phy_offset
            put(store, range(20, 30), body=b"other")
        follower.process.send_signal(signal.SIGCONT)
        assert follower.keys(10) == [f"k{number}" for number in range(20, 30)]
        code, errors = follower.end()
        assert code == 130 and f"truncated at or after phy offset {last.phy_offset}" in errors


def test_a_store_that_was_replaced_is_followed_from_its_beginning(tmp_path):
    root = tmp_path / "store"
    for path, numbers in ((root, range(10)), (tmp_path / "other", range(100, 120))):
        with MessageStore.open(path, config=GEOMETRY) as store:
            put(store, numbers)
    with following(root, "-n", 1) as follower:
        assert follower.keys(1) == ["k9"]
        follower.process.send_signal(signal.SIGSTOP)
        root.rename(tmp_path / "old")
        (tmp_path / "other").rename(root)
        follower.process.send_signal(signal.SIGCONT)
        assert follower.keys(20) == [f"k{number}" for number in range(100, 120)]
        code, errors = follower.end()
        assert code == 130 and "the store was replaced" in errors


@pytest.mark.parametrize("what", ["store", "store/commitlog"])
def test_a_store_that_vanishes_is_an_error(tmp_path, what):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(10))
    with following(root, "-n", 1) as follower:
        follower.take(1)
        (tmp_path / what).rename(tmp_path / "elsewhere")
        code, errors = follower.end(3)
        assert code == 3 and "the commit log was deleted or moved away" in errors and "Traceback" not in errors


def test_damage_in_front_of_a_newer_segment_is_passed_over(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(300))
        second = store.commit_log.files.offsets[1]
        damaged = next(message for message in store.messages(second))
    source = tmp_path / "whole"
    root.rename(source)
    # A log that ends in its first segment grows by one that is damaged at its start, and a third.
    shutil.copytree(source, root)
    for name in sorted(os.listdir(root / "commitlog"))[1:]:
        (root / "commitlog" / name).unlink()
    with following(root, "-n", 1) as follower:
        (last,) = follower.take(1)
        assert last["phy_offset"] < second
        broken = tmp_path / "broken"
        shutil.copy(source / "commitlog" / f"{second:020d}", broken)
        with open(broken, "r+b") as segment:
            segment.seek(4)
            segment.write(b"XXXX")
        broken.rename(root / "commitlog" / f"{second:020d}")
        third = f"{second + 65536:020d}"
        shutil.copy(source / "commitlog" / third, tmp_path / third)
        (tmp_path / third).rename(root / "commitlog" / third)
        with MessageStore.open(source, config=GEOMETRY, read_only=True) as store:
            following_keys = [message.keys[0] for message in store.messages(second, second + 2 * 65536)][1:]
        assert follower.keys(len(following_keys)) == following_keys
        follower.process.send_signal(signal.SIGINT)
        assert follower.process.wait(timeout=240) == 130
        assert f"phy offset {damaged.phy_offset} are damaged" in follower.process.stderr.read()


def test_a_reader_that_leaves_ends_it(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(10))
    ran = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m rmqstore tail -f "{root}" | head -n 1; echo "${{PIPESTATUS[0]}}"'],
        capture_output=True, env=environment(), timeout=240, check=True, text=True,
    )  # fmt: skip
    # Nothing is put: it notices by itself.
    assert ran.stdout.splitlines()[-1] == "141" and ran.stderr == ""


def test_hostile_content_stays_harmless(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        store.put_message(Message("Topic", HOSTILE.encode(), keys=["k" + HOSTILE], tags="t" + HOSTILE))
    for arguments in ([], ["Topic"], ["Topic", "--key", "k" + HOSTILE], ["x" + HOSTILE], ["--key", "x" + HOSTILE]):
        result = run("tail", root, *arguments)
        assert result.output
        assert_harmless(result.output)


def test_a_store_that_is_open_in_this_process(tmp_path):
    """The same store opened read-only beside its writer, in one process: nothing is locked twice."""
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(4))
        assert [message["keys"][0] for message in json_lines(run("tail", root, "-n", 2, "--json"))] == ["k2", "k3"]
        put(store, range(4, 5))
        assert [message["keys"][0] for message in json_lines(run("tail", root, "T", "-n", 2, "--json"))] == ["k3", "k4"]


def test_the_tail_of_a_topic_opens_no_other_queue(tmp_path, monkeypatch):
    with MessageStore.open(tmp_path / "store", config=GEOMETRY) as store:
        for number in range(60):
            store.put_message(Message(f"T{number % 20}", b"%d" % number), queue_id=number % 2)
    opened = []
    inner = ConsumeQueueStore._open

    def counted(self, topic, queue_id):
        opened.append((topic, queue_id))
        return inner(self, topic, queue_id)

    monkeypatch.setattr(ConsumeQueueStore, "_open", counted)
    done = run("tail", tmp_path / "store", "T7", "--json")
    assert [each["body"] for each in json_lines(done)] == ["7", "27", "47"]
    assert opened == [("T7", 1)]


def test_plain_tail_reads_the_end_of_the_log_and_no_queue(tmp_path, monkeypatch):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        for number in range(1200):
            put(store, [number], f"T{number % 40}")
        size = store.commit_log.max_offset
    assert size > 10 * 65536
    asked, read = [], []
    for name in ("find", "unit", "look"):
        method = getattr(ConsumeQueueStore, name)
        monkeypatch.setattr(
            ConsumeQueueStore, name, lambda self, *args, method=method, **k: asked.append(args) or method(self, *args, **k)
        )
    entries = CommitLog.entries
    monkeypatch.setattr(
        CommitLog, "entries", lambda self, begin, end: read.append(end - begin) or entries(self, begin, end)
    )
    for number, most in ((10, 70_000), (300, 400_000), (2000, size)):
        asked.clear(), read.clear()
        shown = json_lines(run("tail", root, "-n", number, "--json"))
        assert [each["keys"] for each in shown] == [[f"k{each}"] for each in range(max(1200 - number, 0), 1200)]
        assert sum(read) <= most and not asked


def test_plain_tail_passes_lost_parts_of_the_log(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=GEOMETRY) as store:
        put(store, range(600))
        kept = [each for each in store.messages() if each.phy_offset // 65536 != 2]
        damaged = next(each for each in kept if each.phy_offset // 65536 == 3 and each.phy_offset % 65536 > 30_000)
    names = sorted(os.listdir(root / "commitlog"))
    (root / "commitlog" / names[2]).unlink()
    with open(root / "commitlog" / names[3], "r+b") as segment:
        segment.seek(damaged.phy_offset % 65536 + 4)
        segment.write(b"XXXX")
    wanted = [each.phy_offset for each in kept if each.phy_offset != damaged.phy_offset]
    for number in (1, 150, 10**6):
        shown = json_lines(run("tail", root, "-n", number, "--json"))
        assert [each["phy_offset"] for each in shown] == wanted[-number:]
