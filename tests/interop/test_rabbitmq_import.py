"""Directories that the package wrote, under a real node: publishes, acks, flushes, merged files, shared messages, imports.

The node must deliver everything in order with right bodies, properties and redelivered flags, take more, and leave what the
package reads again.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from decimal import Decimal

import pytest
from click.testing import CliRunner
from rabbitmq_images import FILE_SIZE_LIMIT, QUEUES, SEGMENT_ENTRY_COUNT
from rabbitmq_node import Outgoing, vhost_directory

from rmqstore import cli
from rmqstore.errors import StoreError, StoreLockedError
from rmqstore.rabbitmq import Message, MessageStore, QueueIndex, Vhost, durable_queues, export, import_messages, verify
from rmqstore.rabbitmq.amqp import Float32, Int8, Int16, Timestamp, UInt8, UInt16, UInt32
from rmqstore.rabbitmq.layout import queue_directory

pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(600)]

PERSISTENT = {"delivery_mode": 2}
DAY_AHEAD = 24 * 3600 * 1000
HEADERS = {
    "text": "grün", "bytes": b"\x00\xff", "int": -5, "long": 2**40, "true": True, "void": None, "decimal": Decimal("3.14"),
    "time": Timestamp(1_700_000_000), "table": {"inner": [1, "two", {"three": 3}]}, "byte": Int8(-3), "ubyte": UInt8(254),
    "short": Int16(-300), "ushort": UInt16(60000), "uint": UInt32(4_000_000_000), "float": Float32(0.5), "double": 2.0,
}  # fmt: skip
# Pika cuts floats to whole numbers, gives times as datetime and byte arrays as bytes.
HEADERS_SEEN = HEADERS | {"time": datetime.fromtimestamp(1_700_000_000, timezone.utc), "float": 0, "double": 2}


def body(name: str, number: int, size: int = 0) -> bytes:
    return f"{name}-{number:05}".encode().ljust(size, b".")


def message(vhost: str, queue: str, number: int, size: int = 0, **more) -> Message:
    properties = PERSISTENT | more.pop("properties", {})
    return Message(body(queue, number, size), properties=properties, routing_keys=[queue], vhost=vhost, **more)


def write_small(path, vhost: str) -> list[bytes]:
    """Embedded messages over segments, with flushes, acks, a segment that goes away, a journal at the end; what is left."""
    with QueueIndex.open(
        path / "queues" / queue_directory(vhost, "fresh"), create=True, max_journal_entries=300
    ) as index:
        for each in list(index):
            index.ack([each.seq_id])
        seqs = []
        for number in range(500):
            seqs.append(index.publish(message=message(vhost, "fresh", number)))
            index.deliver(seqs[-1:])
        index.ack(seqs[:200])
        index.flush()
        index.ack(seqs[300:310])
        more = index.publish_many([message(vhost, "fresh", number) for number in range(500, 520)], deliver=True)
        index.ack(range(more[0], more[5]))
        index.sync()
        left = [*range(200, 300), *range(310, 500), *range(505, 520)]
        assert index.depth == len(left)
    return [body("fresh", number) for number in left]


def write_stored(path, vhost: str) -> dict[str, list[bytes]]:
    """Large messages shared by two queues, over message files of which some go and some are merged; what is left."""
    names = ("fan.a", "fan.b")
    paths = {name: path / "queues" / queue_directory(vhost, name) for name in names}
    with Vhost.open(path) as reader:
        references = reader.references()
    store = MessageStore.open(path / "msg_store_persistent", references=references, file_size_limit=FILE_SIZE_LIMIT)
    indexes = {name: QueueIndex.open(each, is_stored=store.contains) for name, each in paths.items()}
    for index in indexes.values():
        for entry in list(index):
            index.ack([entry.seq_id])
            if entry.message is None:
                store.remove(entry.msg_id)
    held = []
    for number in range(60):
        each = message(vhost, "fan", number, 6000)
        for index in indexes.values():
            store.write(each.msg_id, each)
            held.append((index, index.publish(msg_id=each.msg_id, size=6000), each.msg_id))
            index.deliver([held[-1][1]])
    files = set(store.files)
    for number, (index, seq, msg_id) in enumerate(held):
        # Of the first forty, a keeps every fifth and b every tenth.
        position, of_b = divmod(number, 2)
        if position < 40 and position % (10 if of_b else 5):
            index.ack([seq])
            store.remove(msg_id)
    store.merge()
    assert set(store.files) < files, "no file went away"
    left = {
        name: [body("fan", number, 6000) for number in range(60) if number >= 40 or number % step == 0]
        for name, step in (("fan.a", 5), ("fan.b", 10))
    }
    store.sync()
    for index in indexes.values():
        index.close()
    store.close()
    return left


@pytest.fixture(scope="module")
def written(rabbitmq_node, rabbitmq_base):
    """The node, booted on vhosts that the package wrote into; what it must deliver, by vhost and queue."""
    node = rabbitmq_node
    node.restore(rabbitmq_base.killed)
    killed, stored, imported, exact = rabbitmq_base.vhosts[:4]
    expected: dict[str, dict[str, list]] = {}
    expected[killed] = {"fresh": write_small(node.vhost_path(killed), killed)}
    expected[stored] = write_stored(node.vhost_path(stored), stored)

    # A dirty import beside what is there already.
    path = node.vhost_path(imported)
    with Vhost.open(path) as vhost:
        before = {queue.name: [each.body for each in queue.messages() if each.persistent] for queue in vhost.queues()}
    rows = [message(imported, "small", number, 6000 if number % 10 == 0 else 0) for number in range(200)]
    report = import_messages(path, "small", rows)
    assert (report.messages, report.embedded, report.stored, report.state) == (200, 180, 20, "dirty")
    expected[imported] = before | {"small": before["small"] + [each.body for each in rows]}

    # An exact one: flags and numbers of all queues stay.
    path = node.replace_vhost(exact, rabbitmq_base.clean / "msg_stores" / "vhosts" / vhost_directory(exact))
    with Vhost.open(path) as vhost:
        flags = {
            queue.name: [(each.body, each.delivered) for each in queue.messages() if each.persistent]
            for queue in vhost.queues()
        }
    one = message(
        exact, "big", 1, properties={"headers": HEADERS, "content_type": "text/plain", "priority": 3, "type": "t"}
    )
    rows = [one, *(message(exact, "big", number, 5000 * (number % 2)) for number in range(2, 80))]
    late = (datetime.now(timezone.utc).timestamp() * 1000) // 1 + DAY_AHEAD
    report = import_messages(path, "big", [(each, int(late)) for each in rows], state="exact")
    assert report.state == "exact" and report.messages == 79
    levels = [message(exact, "priority", number, properties={"priority": 2}) for number in range(10)]
    import_messages(path, "priority", levels, level=2)
    flags["big"] += [(each.body, False) for each in rows]
    assert not [finding for finding in verify(path) if finding.consequence.value != "none"]
    node.start()
    yield node, expected, (exact, flags, levels, one)
    if node.running:
        node.rest()


def test_what_was_published_acked_and_flushed(written, rabbitmq_base):
    node, expected, _ = written
    for vhost, queues in expected.items():
        for name, bodies in queues.items():
            if name == "priority":
                continue
            got = node.get_all(vhost, name)
            assert [each.body for each in got] == bodies, (vhost, name)
            assert all(each.redelivered for each in got)


def test_an_exact_import_keeps_flags_and_properties(written):
    node, _, (vhost, flags, levels, one) = written
    for name, expected in flags.items():
        if name == "priority":
            continue
        got = [(each.body, each.redelivered) for each in node.get_all(vhost, name)]
        assert got == expected, name
    (received,) = [each for each in node.get_all(vhost, "big") if each.body == one.body]
    headers = received.properties.pop("headers")
    assert received.properties == {"delivery_mode": 2, "content_type": "text/plain", "priority": 3, "type": "t"}
    assert headers == HEADERS_SEEN
    bodies = [each.body for each in node.get_all(vhost, "priority")]
    assert sorted(bodies) == sorted([each for each, _ in flags["priority"]] + [each.body for each in levels])


def test_the_node_goes_on_and_what_it_leaves_is_read(written, rabbitmq_base, tmp_path):
    """The last of the boot: more messages, an orderly stop, no findings, and an export of all of it."""
    node, _, (exact, flags, _, _) = written
    later = [Outgoing(b"later-%d" % number, {}, "", "big") for number in range(5)]
    node.publish(exact, later)
    node.rest()
    path = node.vhost_path(exact)
    assert list(verify(path)) == []
    with Vhost.open(path) as vhost:
        assert vhost.clean
        big = list(vhost.queue("big").messages())
        assert [each.body for each in big] == [each for each, _ in flags["big"]] + [each.body for each in later]
        number = export(vhost, tmp_path / "all.jsonl", queues=["big"])
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert number == len(lines) == len(big)
    assert [hashlib.sha256(line["body"].encode()).digest() for line in lines] == [
        hashlib.sha256(each.body).digest() for each in big
    ]


def test_a_queue_that_the_node_does_not_know_is_refused(rabbitmq_node, rabbitmq_base):
    node = rabbitmq_node
    node.restore(rabbitmq_base.clean)
    path = node.vhost_path(rabbitmq_base.vhosts[0])
    known = durable_queues(path.parents[2])
    assert known is not None and {name for vhost, name in known if vhost == rabbitmq_base.vhosts[0]} == set(QUEUES)
    before = sorted(each.relative_to(path) for each in path.rglob("*"))
    some = [Message(b"x", properties=PERSISTENT)]
    for name, level, reason in (
        ("nobody", None, "knows no durable queue"),
        ("priority", None, "give a level"),
        ("small", 3, "no priorities"),
        ("two", None, "version 2"),
    ):
        with pytest.raises(StoreError, match=reason):
            import_messages(path, name, some, level=level)
    assert sorted(each.relative_to(path) for each in path.rglob("*")) == before
    # The same over the command line, and a queue that was declared but never written to.
    runner = CliRunner()
    text = json.dumps({"body": "from a file", "properties": PERSISTENT, "routing_keys": ["unused"]})
    answer = runner.invoke(cli.main, ["rabbitmq", "import", str(path), "nobody", "-"], input=text)
    assert answer.exit_code == 3 and "declare the queue" in answer.stderr
    answer = runner.invoke(cli.main, ["rabbitmq", "import", str(path), "unused", "-", "--json"], input=text)
    assert answer.exit_code == 0 and json.loads(answer.stdout)["messages"] == 1
    node.start()
    assert [each.body for each in node.get_all(rabbitmq_base.vhosts[0], "unused")] == [b"from a file"]
    with pytest.raises(StoreLockedError, match="stop the node"):
        import_messages(path, "unused", some)
    node.rest()


def test_sizes_of_the_settings():
    # The directories above span several segments and message files because of these.
    assert SEGMENT_ENTRY_COUNT * 4 < 500 and FILE_SIZE_LIMIT < 60 * 6000
