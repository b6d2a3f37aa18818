"""The demo: it runs, its checks can fail, and the sample store is unpacked once and whole.

Owns nothing but small runs of it; the full one is `make demo`.
"""

from __future__ import annotations

import shlex
import shutil

import golden
import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, demo
from rmqstore.offline.rebuild import rebuild


@pytest.fixture(autouse=True)
def sample(monkeypatch):
    """The package's own sample; a debug build lies elsewhere than the checkout, so it is named by the tree."""
    monkeypatch.setattr(demo, "SAMPLE", golden.DATA.parents[1] / "rmqstore" / "sample")


@pytest.fixture
def run(tmp_path):
    """A function `run(messages)`: the click result of the demo, which must leave nothing behind."""
    work = tmp_path / "work"
    work.mkdir()

    def run_demo(messages=600):
        result = CliRunner().invoke(demo.main, ["--dir", str(work), "--messages", str(messages)])
        assert list(work.iterdir()) == []
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run_demo


def test_demo(run):
    result = run(6001)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("All checks passed.\n")
    # Every step is a line with its time, count and rate.
    rows = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert len(rows) == 8 and all(" s " in row and row.endswith("/s") for row in rows)
    for name, count in (("rebuild", "11 013 records"), ("batches", "6 001 messages"), ("random keys", "6 001 queries")):
        (row,) = [line for line in rows if name in line]
        assert count in row


def test_the_sample_is_unpacked_once_and_whole(tmp_path):
    def unpack(target):
        return CliRunner().invoke(demo.main, ["--unpack", str(target)])

    target = tmp_path / "a shop's"
    result = unpack(target)
    assert result.exit_code == 0, result.output
    # What it says to try next can be copied.
    line = next(line for line in result.stdout.splitlines() if "rmqstore query" in line)
    words = shlex.split(line)
    with MessageStore.open(words[2], read_only=True) as store:
        assert len(store.query_message(words[3], words[4])) == 4
    tree = golden.tree(target)
    result = unpack(target)
    assert result.exit_code == 3 and "already exists" in result.stderr and golden.tree(target) == tree
    result = unpack(tmp_path / "none" / "store")
    assert result.exit_code == 3 and "no such folder" in result.stderr
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
    result = run()
    assert result.exit_code == 1 and "check failed" in result.stderr
    assert "All checks passed" not in result.stdout


def test_a_lost_queue_is_noticed(run, monkeypatch):
    def tampered(root, **options):
        report = rebuild(root, **options)
        shutil.rmtree(root / "consumequeue" / "Payments")
        return report

    monkeypatch.setattr(demo, "rebuild", tampered)
    assert run().exit_code == 1


def test_other_bodies_than_were_sent_are_noticed(run, monkeypatch):
    monkeypatch.setattr(demo.zlib, "crc32", lambda body: 1)
    result = run()
    assert result.exit_code == 1 and "as it was sent" in result.stderr


def test_a_store_that_changes_a_body_is_noticed(run, monkeypatch):
    put = MessageStore.put_messages

    def tampered(self, messages, queue_id=0):
        first, *rest = messages
        changed = Message(first.topic, first.body[:-1] + b"!", keys=first.keys, tags=first.tags)
        return put(self, [changed, *rest], queue_id)

    monkeypatch.setattr(MessageStore, "put_messages", tampered)
    result = run(3000)
    assert result.exit_code == 1 and "check failed" in result.stderr


@pytest.mark.parametrize("how", ["loses one", "repeats one"])
def test_a_wrong_answer_to_a_query_is_noticed(run, monkeypatch, how):
    query = MessageStore.query_message

    def tampered(self, topic, key, *arguments, **options):
        hits = query(self, topic, key, *arguments, **options)
        if self.config.message_delay_level == demo.SAMPLE_DELAY_LEVEL:
            return hits
        if how == "loses one":
            del hits[1:2]
        else:
            hits.extend(hits[:1])
        return hits

    monkeypatch.setattr(MessageStore, "query_message", tampered)
    result = run()
    assert result.exit_code == 1 and "finds its order" in result.stderr


def test_a_message_that_is_lost_on_closing_is_noticed(run, monkeypatch):
    bound = MessageStore.max_queue_offset

    def tampered(self, topic, queue_id=0):
        reopened = self.recovery_report is not None and self.recovery_report.records > 0
        return bound(self, topic, queue_id) - reopened

    monkeypatch.setattr(MessageStore, "max_queue_offset", tampered)
    result = run()
    assert result.exit_code == 1 and "the reopened store has" in result.stderr


def test_orders_are_always_the_same():
    orders = [demo.order_of(number) for number in range(3000)]
    assert [each.body for each in orders] == [demo.order_of(number).body for number in range(3000)]
    assert len({each.body for each in orders}) == 3000
    assert [[*demo.order_of(number).keys] for number in range(6)] == [["ORD-00000000"]] * 3 + [["ORD-00000001"]] * 3
