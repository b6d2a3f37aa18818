"""The demo: it runs, its checks can fail, and it says what it did not do.

Owns nothing but small runs of it; the full one is `make demo`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import golden
import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, demo
from rmqstore.offline.rebuild import rebuild

SMALL = ["--messages", "600"]
# The package's own; a debug build lies elsewhere than the checkout, so it is named by the tree.
SAMPLE = golden.DATA.parents[1] / "rmqstore" / "sample"


@pytest.fixture
def run(tmp_path):
    """A function `run(*arguments)`: the click result of the demo, which must leave nothing behind."""
    work = tmp_path / "work"
    work.mkdir()

    def run_demo(*arguments):
        # The data is named: a debug build lies elsewhere than the checkout.
        data = [] if "--data" in arguments else ["--data", str(SAMPLE)]
        result = CliRunner().invoke(demo.main, ["--dir", str(work), *data, *map(str, arguments)])
        assert list(work.iterdir()) == []
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run_demo


def test_demo_in_a_process_of_its_own(tmp_path):
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "rmqstore.demo", "--messages", "20000"),
            *("--dir", str(tmp_path), "--data", str(SAMPLE)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Everything that was checked holds." in ran.stdout
    assert list(tmp_path.iterdir()) == []
    # Every step is a row with its time; what is counted has a rate.
    rows = [line for line in ran.stdout.splitlines() if re.search(r"\s\d+\.\d\d(\s|$)", line)]
    assert len(rows) == 17
    for name, count in (
        ("rebuild", "11 013"),
        ("batches", "15 000"),
        ("one by one", "5 000"),
        ("random keys", "20 000"),
    ):
        (row,) = [line for line in rows if name in line]
        assert count in row
    (total,) = [row for row in rows if row.strip().startswith("everything")]
    times = [float(re.search(r"(\d+\.\d\d)", row)[1]) for row in rows]
    assert sum(times[:-1]) <= times[-1] + 0.2, total


def test_without_the_sample_only_the_second_half_runs(run, tmp_path):
    result = run(*SMALL, "--data", tmp_path / "nowhere")
    assert result.exit_code == 0, result.output
    assert "store.tar.xz" in result.stderr and "--data" in result.stderr
    assert "The second half holds; the first did not run." in result.stdout and "rebuild" not in result.stdout


def test_the_sample_is_given_away_once_and_whole(tmp_path):
    def unpack(*arguments):
        return CliRunner().invoke(demo.main, ["--unpack", *map(str, arguments)])

    target = tmp_path / "a shop's"
    result = unpack(target, "--data", SAMPLE)
    assert result.exit_code == 0, result.output
    # What it says to try next can be copied.
    line = next(line for line in result.stdout.splitlines() if "rmqstore query" in line)
    words = shlex.split(line)
    with MessageStore.open(words[2], read_only=True) as store:
        assert len(store.query_message(words[3], words[4])) == 4
    tree = golden.tree(target)
    result = unpack(target, "--data", SAMPLE)
    assert result.exit_code == 3 and "there already" in result.stderr and golden.tree(target) == tree
    for arguments, said in (
        ((tmp_path / "none" / "store", "--data", SAMPLE), "no folder"),
        ((tmp_path / "other", "--data", tmp_path), "--data"),
    ):
        result = unpack(*arguments)
        assert result.exit_code == 3 and said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a shop's"]


@pytest.mark.parametrize("folder", ["index", "consumequeue", "commitlog"])
def test_a_flipped_byte_after_the_rebuild_is_noticed(run, monkeypatch, folder):
    def tampered(root, **options):
        report = rebuild(root, **options)
        path = sorted(path for path in (root / folder).rglob("*") if path.is_file())[-1]
        with open(path, "r+b") as file:
            file.seek(50)
            byte = file.read(1)[0]
            file.seek(50)
            file.write(bytes([byte ^ 1]))
        return report

    monkeypatch.setattr(demo, "rebuild", tampered)
    result = run(*SMALL)
    assert result.exit_code == 1 and "this does not hold" in result.stderr
    assert "checked holds" not in result.stdout


def test_a_lost_queue_is_noticed(run, monkeypatch):
    def tampered(root, **options):
        report = rebuild(root, **options)
        shutil.rmtree(root / "consumequeue" / "Payments")
        return report

    monkeypatch.setattr(demo, "rebuild", tampered)
    assert run(*SMALL).exit_code == 1


def test_other_bodies_than_were_sent_are_noticed(run, monkeypatch):
    monkeypatch.setattr(demo, "_masked_crc", lambda body: 1)
    result = run(*SMALL)
    assert result.exit_code == 1 and "as they were sent" in result.stderr


def test_a_store_that_changes_a_body_is_noticed(run, monkeypatch, tmp_path):
    put = MessageStore.put_messages

    def tampered(self, messages, queue_id=0):
        messages = [*messages]
        first = messages[0]
        messages[0] = Message(first.topic, first.body[:-1] + b"!", keys=first.keys, tags=first.tags)
        return put(self, messages, queue_id)

    monkeypatch.setattr(MessageStore, "put_messages", tampered)
    result = run("--messages", "3000", "--data", tmp_path)
    assert result.exit_code == 1 and "this does not hold" in result.stderr


@pytest.mark.parametrize("how", ["loses one", "repeats one", "finds everything"])
def test_a_wrong_answer_to_a_query_is_noticed(run, monkeypatch, tmp_path, how):
    query = MessageStore.query_message

    def tampered(self, topic, key, *arguments, **options):
        hits = query(self, topic, key, *arguments, **options)
        if how == "loses one":
            del hits[1:2]
        elif how == "repeats one":
            hits.extend(hits[:1])
        elif not hits:
            hits.append(self.message_at(0))
        return hits

    monkeypatch.setattr(MessageStore, "query_message", tampered)
    result = run(*SMALL, "--data", tmp_path)
    assert result.exit_code == 1 and ("finds its order" in result.stderr or "finds nothing" in result.stderr)


def test_a_message_that_is_lost_on_closing_is_noticed(run, monkeypatch, tmp_path):
    bound = MessageStore.max_queue_offset
    openings = []
    opened = MessageStore.open.__func__

    def counted(cls, *arguments, **options):
        openings.append(arguments)
        return opened(cls, *arguments, **options)

    monkeypatch.setattr(MessageStore, "open", classmethod(counted))
    monkeypatch.setattr(
        MessageStore,
        "max_queue_offset",
        lambda self, topic, queue_id=0: bound(self, topic, queue_id) - (len(openings) > 1),
    )
    result = run(*SMALL, "--data", tmp_path)
    assert result.exit_code == 1 and "the queues hold" in result.stderr


def test_too_little_disk_is_said_before_anything_is_written(run, monkeypatch, tmp_path):
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    monkeypatch.setattr(MessageStore, "open", None)
    result = run("--data", tmp_path)
    assert result.exit_code == 3 and "GB are free" in result.stderr and "--dir" in result.stderr


def test_orders_are_realistic_and_always_the_same():
    bodies = [demo.order_of(number) for number in range(3000)]
    assert bodies == [demo.order_of(number) for number in range(3000)]
    sizes = [len(body) for _, _, _, body in bodies]
    assert 240 < sum(sizes) / len(sizes) < 275 and len(set(sizes)) > 10
    assert len({body for _, _, _, body in bodies}) == 3000
    assert {queue_id for _, queue_id, _, _ in bodies} == set(range(demo.QUEUES))
    # The messages of an order are in one queue, in order.
    assert [demo.order_of(number)[0] for number in range(6)] == ["ORD-00000000"] * 3 + ["ORD-00000001"] * 3
    for queue_id in range(demo.QUEUES):
        numbers = [number for number in range(2999) if bodies[number][1] == queue_id]
        assert list(demo._numbers_of_queue(queue_id, 2999)) == numbers
