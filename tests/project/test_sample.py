"""The sample store that comes with the package: a real broker's, laid out as the golden one, with bodies to be read.

Owns what makes it a sample.  That the broker's files are whole and can be made again is shown by the demo
(tests/project/test_demo.py), and every document with a command runs on it.
"""

from __future__ import annotations

import json
import sys

import golden
import pytest

from rmqstore import MessageStore, StoreConfig, demo, verify

# Topics whose messages come when the broker sees to them, in an order of their own.
BY_THE_BROKER = {
    "Reminders",
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "Payments",
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The messages of the sample and of the golden store, and the sample's root."""
    folder = tmp_path_factory.mktemp("sample")
    root = golden.unpack("sample", folder / "sample")
    found = []
    for path in (root, golden.unpack("broker", folder / "golden")):
        with MessageStore.open(path, read_only=True) as store:
            found.append(list(store.messages()))
    return (*found, root)


def test_it_is_whole_and_has_what_others_have(stores):
    sample, other, root = stores
    assert list(verify(root, StoreConfig.infer(root, message_delay_level=demo.SAMPLE_DELAY_LEVEL))) == []
    assert len(sample) == len(other) == 11013
    ends = [messages[-1].phy_offset + messages[-1].size for messages in (sample, other)]
    assert ends[0] == ends[1]
    # What documents say of places and counts holds for both.
    for place in (0, 484, 894, 1348, 1048576, 4194304, 5060341):
        (one,), (two,) = ([m for m in messages if m.phy_offset == place] for messages in (sample, other))
        assert (one.topic, one.keys, one.tags, one.size) == (two.topic, two.keys, two.tags, two.size)
    alike = [
        [
            (m.topic, m.queue_id, m.queue_offset, m.keys, m.tags, m.unique_key)
            for m in messages
            if m.topic not in BY_THE_BROKER
        ]
        for messages in (sample, other)
    ]
    assert alike[0] == alike[1] and len(alike[0]) > 10_800
    for messages in (sample, other):
        assert sum(m.topic == "Payments" for m in messages) == 20
        assert sum(m.topic == "RMQ_SYS_TRANS_HALF_TOPIC" for m in messages) == 80


def test_its_bodies_can_be_read(stores):
    sample, other, _ = stores
    lengths = {}
    for message in sample:
        if message.topic == "RMQ_SYS_TRANS_OP_HALF_TOPIC" or message.body == b"collide":
            continue
        assert not message.corrupt
        value = json.loads(message.body)
        if message.topic == "Orders" and message.keys and message.tags != "大" and message.tags != "BB":
            assert value["order"] == message.keys[0] and message.tags in message.body.decode()
            lengths[message.phy_offset] = len(message.body)
    assert lengths == {m.phy_offset: len(m.body) for m in other if m.phy_offset in lengths} and len(lengths) == 10_000
    # Three kinds of packing, and an order that says the same in all of its messages.
    assert {m.sys_flag & 0x700 for m in sample if m.topic == "Documents"} == {0x100, 0x200, 0x300}


def test_its_messages_are_those_of_the_program_that_made_them(stores, monkeypatch):
    sample, _, _ = stores
    folder = golden.DATA.parent / "interop" / "rocketmq" / "sample"
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    import messages

    for message in sample[:10_000:97]:
        order = messages.Order(int(message.keys[0].partition("-")[2]), message.properties["region"])
        assert order.body(message.tags, len(message.body)) == message.body
    bills = [message for message in sample if message.topic == "Documents"]
    assert [messages.bill(m.keys[0], number) for number, m in enumerate(bills)] == [m.body for m in bills]


def test_it_is_small():
    assert sum(path.stat().st_size for path in demo.SAMPLE.iterdir()) < 900_000
