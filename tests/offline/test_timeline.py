"""Messages and bytes over time: exact where the log is gone over, near it where places are looked at, and never many of them.

Owns the comparison of what is concluded with every record, the count of what is read, and times that lie.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.offline import timeline as module
from rmqstore.offline.timeline import timeline

START = 1_700_000_000_000
CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000, max_hash_slot_num=100, max_index_num=400,
    clean_resource_interval=0, populate_ahead_size=0, message_index_enable=False,
)  # fmt: skip


def make(path, messages, seed=1):
    """Bursts of messages of several sizes, with pauses of an hour between some of them."""
    rng = random.Random(seed)
    now = START
    done = 0
    with MessageStore.open(path, config=CONFIG.replace(clock=lambda: now)) as store:
        while done < messages:
            batch = [Message(rng.choice("ABC"), bytes(rng.randrange(50, 600)))] * rng.randrange(1, 40)
            store.put_messages(batch, rng.randrange(3))
            done += len(batch)
            now += rng.choice((10, 50, 200, 3_600_000 if rng.random() < 0.02 else 10))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make(tmp_path_factory.mktemp("timeline") / "store", 20_000)


def counted(store, bins):
    """Return the counts of all records by the edges of `bins`."""
    messages, sizes = Counter(), Counter()
    for message in store.messages():
        time = message.store_timestamp
        number = next(i for i, each in enumerate(bins) if each["begin"] <= time < each["end"])
        messages[number] += 1
        sizes[number] += message.size
    return messages, sizes


def test_a_short_log_is_gone_over(path):
    with MessageStore.open(path, read_only=True) as store:
        found = timeline(store, bins=37)
        bins = found["bins"]
        assert found["exact"] and found["places"] == 0 and 1 < len(bins) <= 37
        assert all(a["end"] == b["begin"] for a, b in itertools.pairwise(bins))
        messages, sizes = counted(store, bins)
        assert [each["messages"] for each in bins] == [messages[i] for i in range(len(bins))]
        assert [each["bytes"] for each in bins] == [sizes[i] for i in range(len(bins))]


def test_a_long_log_is_sampled(path, monkeypatch):
    with MessageStore.open(path, read_only=True) as store:
        whole = timeline(store, bins=24)["bins"]
        total = sum(each["messages"] for each in whole)
        monkeypatch.setattr(module, "EXACT_BYTES", 0)
        found = timeline(store, bins=24, messages=total)
        bins = found["bins"]
        assert not found["exact"] and 0 < found["places"] <= 256
        assert [(each["begin"], each["end"]) for each in bins] == [(each["begin"], each["end"]) for each in whole]
        # Blank ends of segments are bytes of the log too.
        log = store.commit_log
        assert sum(each["bytes"] for each in bins) == log.max_offset - log.min_offset
        assert sum(each["messages"] for each in bins) == total
        # No column is wrong by more than a fiftieth of all.
        for near, exact in zip(bins, whole, strict=True):
            assert abs(near["bytes"] - exact["bytes"]) < (log.max_offset - log.min_offset) / 50
            assert abs(near["messages"] - exact["messages"]) < total / 50


def test_what_is_read_does_not_grow_with_the_log(path, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXACT_BYTES", 0)
    records = 0
    real = CommitLog.stretches

    def counted(self, *arguments, **options):
        nonlocal records
        for stretch in real(self, *arguments, **options):
            records += stretch.records
            yield stretch

    monkeypatch.setattr(CommitLog, "stretches", counted)
    seen = []
    for root in (path, make(tmp_path / "longer", 80_000)):
        with MessageStore.open(root, read_only=True) as store:
            records = 0
            found = timeline(store)
            assert 0 < records <= 64 * found["places"]
            seen.append(found["places"])
    assert 250 < min(seen) and max(seen) <= 256


def test_times_that_lie_are_passed_over(tmp_path, monkeypatch):
    path = make(tmp_path / "store", 6000)
    with MessageStore.open(path, read_only=True) as store:
        usual = timeline(store, bins=10)
        places = [message.phy_offset for message in store.messages()]
    # A time of the far past, and one of the far future, at places that are looked at: the starts of segments.
    with MessageStore.open(path, read_only=True) as store:
        starts = list(store.commit_log.files.offsets)
    assert len(starts) > 2 and set(starts) <= set(places)
    for base, time in ((starts[1], 5), (starts[2], 2**61)):
        with open(path / "commitlog" / f"{base:020d}", "r+b") as file:
            file.seek(56)
            file.write(time.to_bytes(8, "big"))
    monkeypatch.setattr(module, "EXACT_BYTES", 0)
    with MessageStore.open(path, read_only=True) as store:
        found = timeline(store, bins=10)
    for at, name in ((0, "begin"), (-1, "end")):
        assert found["bins"][at][name] == usual["bins"][at][name]


def test_an_empty_log_and_wrong_questions(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        assert timeline(store) == {"bins": [], "exact": True, "places": 0}
        store.put_message(Message("T", b"x"))
        (only,) = timeline(store)["bins"]
        assert (only["messages"], only["end"] - only["begin"]) == (1, 1)
        with pytest.raises(ValueError, match="at least 2"):
            timeline(store, bins=1)
