"""Exports and imports without a node: every way out says the same, and what came out goes in again."""

from __future__ import annotations

import contextlib
import decimal
import io
import json
import os
import stat
import threading
from pathlib import Path

import golden
import golden_rabbitmq
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from rmqstore import cli
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.rabbitmq import Message, Vhost, amqp, export, import_messages, layout, verify
from rmqstore.rabbitmq.amqp import json_value
from rmqstore.rabbitmq.batches import COLUMNS
from rmqstore.rabbitmq.dets import write_recovery_terms
from rmqstore.rabbitmq.layout import lock_directory
from rmqstore.rabbitmq.transfer import message_object, object_message

PERSISTENT = {"delivery_mode": 2}


def as_row(queue, message) -> dict:
    properties = dict(message.properties)
    headers = properties.pop("headers", None)
    timestamp = properties.pop("timestamp", None)
    return {
        **dict.fromkeys(COLUMNS),
        **properties,
        "vhost": queue.vhost,
        "queue": queue.name,
        "level": message.level,
        "seq_id": message.seq_id,
        "msg_id": message.msg_id,
        "persistent": message.persistent,
        "delivered": message.delivered,
        "expiry": message.expiry,
        "size": message.size,
        "location": message.location,
        "exchange": message.exchange,
        "routing_keys": message.routing_keys,
        "body": message.body,
        "headers": None if headers is None else json_value(headers),
        "timestamp": None if timestamp is None else int(timestamp),
    }


def plain(row: dict) -> dict:
    row = dict(row)
    if row["headers"] is not None:
        row["headers"] = json.loads(row["headers"])
    for name in ("expiry", "timestamp"):
        if row[name] is not None:
            row[name] = round(row[name].timestamp() * (1000 if name == "expiry" else 1))
    return row


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_batches_are_the_messages(case, golden_vhost):
    with Vhost.open(golden_vhost(case)) as vhost:
        for queue in vhost.queues():
            expected = [as_row(queue, message) for message in queue.messages()]
            found = [plain(row) for batch in queue.batches() for row in batch.to_pylist()]
            assert found == expected
            some = [row for batch in queue.batches(["body", "seq_id"]) for row in batch.to_pylist()]
            assert some == [{"body": row["body"], "seq_id": row["seq_id"]} for row in expected]
        with pytest.raises(ValueError, match="no column 'nope'"):
            list(vhost.queues()[0].batches(["nope"]))


@pytest.mark.parametrize("case", ["12-clean-msgstore", "13-clean-fanout-refcount", "18-clean-priority", "19-clean-v2"])
def test_every_format_says_the_same(case, golden_vhost, tmp_path):
    with Vhost.open(golden_vhost(case)) as vhost:
        expected = [(queue, message) for queue in vhost.queues() for message in queue.messages()]
        for name in ("all.jsonl", "all.arrow", "all.parquet"):
            assert export(vhost, tmp_path / name) == len(expected) > 0
        lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert lines == [message_object(queue, message) for queue, message in expected]
        rows = [as_row(queue, message) for queue, message in expected]
        assert [plain(row) for row in parquet.read_table(tmp_path / "all.parquet").to_pylist()] == rows
        with pa.ipc.open_file(tmp_path / "all.arrow") as file:
            assert [plain(row) for row in file.read_all().to_pylist()] == rows
        out = io.BytesIO()
        assert export(vhost, out, queues=vhost.queues()[0].name) == vhost.queues()[0].depth
        with pytest.raises(ValueError, match="format"):
            export(vhost, tmp_path / "x", format="csv")
        assert sorted(os.listdir(tmp_path)) == ["all.arrow", "all.jsonl", "all.parquet"]


def test_what_came_out_goes_in_again(golden_vhost_copy, tmp_path):
    source, target = golden_vhost_copy("12-clean-msgstore"), golden_vhost_copy("11-clean-small")
    with Vhost.open(source) as vhost:
        queue = next(each for each in vhost.queues() if each.depth)
        before = [(message.body, message.properties, message.routing_keys) for message in queue.messages()]
        export(vhost, tmp_path / "out.jsonl", queues=[queue.name])
    with Vhost.open(target) as vhost:
        into = vhost.queues()[0].name
        there = [message.body for message in vhost.queue(into).messages()]
        flags = [message.delivered for message in vhost.queue(into).messages()]
    answer = CliRunner().invoke(
        cli.main, ["rabbitmq", "import", str(target), into, str(tmp_path / "out.jsonl"), "--declared", "--json"]
    )
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    assert report["messages"] == len(before) and report["state"] == "exact" and report["stored"]
    assert list(verify(target)) == []
    with Vhost.open(target) as vhost:
        assert vhost.clean
        found = list(vhost.queue(into).messages())
        assert [message.body for message in found[: len(there)]] == there
        assert [message.delivered for message in found] == flags + [False] * len(before)
        assert [(each.body, each.properties, each.routing_keys) for each in found[len(there) :]] == before


def test_a_dirty_import_forgets_all_terms(golden_vhost_copy):
    target = golden_vhost_copy("11-clean-small")
    with Vhost.open(target) as vhost:
        queue = vhost.queues()[0]
        into, depth = queue.name, queue.depth
    report = import_messages(target, into, [Message(b"x", properties=PERSISTENT)], state="dirty", declared=True)
    assert report.state == "dirty" and report.embedded == 1
    assert list(verify(target)) == []
    with Vhost.open(target) as vhost:
        assert not vhost.clean and not vhost.terms
        found = list(vhost.queue(into).messages())
        assert len(found) == depth + 1 and found[-1].body == b"x" and all(message.delivered for message in found)


def test_an_import_that_cannot_be(golden_vhost_copy):
    target = golden_vhost_copy("01-kill9-journal-only")
    with Vhost.open(target) as vhost:
        into = vhost.queues()[0].name
    some = [Message(b"x", properties=PERSISTENT)]
    for arguments, reason in (
        ({}, "cannot be told"),
        ({"declared": True, "state": "exact"}, "not stopped cleanly"),
    ):
        with pytest.raises(StoreError, match=reason):
            import_messages(target, into, some, **arguments)
    with pytest.raises(ValueError, match="state"):
        import_messages(target, into, some, state="half")

    def failing():
        yield from some
        raise RuntimeError("the source of the messages fails")

    with pytest.raises(RuntimeError):
        import_messages(target, into, failing(), declared=True)
    assert list(verify(target)) == []


def test_objects_of_messages():
    for value, reason in (
        ([], "JSON object"),
        ({}, "neither body"),
        ({"body": 5}, "not a message"),
        ({"body_base64": "?"}, "not a message"),
        ({"body": "x", "msg_id": "zz"}, "not a message"),
        ({"body": "x", "properties": {"nope": 1}}, "no property is called 'nope'"),
    ):
        with pytest.raises(InvalidMessageError, match=reason):
            object_message(value)
    message, expiry = object_message({"body": "grün", "queue": "q", "expiry": 5})
    assert (message.body, message.routing_keys, expiry) == ("grün".encode(), ["q"], 5)


# -------------------------------------------------------------------------------------------- what an import must not do


def queue_of(path):
    with Vhost.open(path) as vhost:
        return vhost.queues()[0].name


def bodies_of(path, name):
    with Vhost.open(path) as vhost:
        return [message.body for message in vhost.queue(name).messages()]


@pytest.mark.parametrize("state", ["exact", "dirty"])
def test_an_import_whose_source_fails_changes_nothing(state, golden_vhost_copy):
    target = golden_vhost_copy("12-clean-msgstore")
    into, before = queue_of(target), golden.tree(target)

    def failing(error):
        yield Message(b"x" * 9000, properties=PERSISTENT)
        yield Message(b"x", properties=PERSISTENT)
        raise error

    for error in (RuntimeError(), KeyboardInterrupt(), StoreError("no")):
        with pytest.raises(type(error)):
            import_messages(target, into, failing(error), state=state, declared=True)
    some = Message(b"x", properties=PERSISTENT)
    for wrong in (
        5,
        b"x",
        {"body": "x"},
        (some, "5"),
        (some, 0),
        (some, -1),
        (some, True),
        (some, 1 << 63),
        (some, 1.5),
    ):
        with pytest.raises(InvalidMessageError):
            import_messages(target, into, [some, wrong], state=state, declared=True)
    report = import_messages(target, into, [], state=state, declared=True)
    assert report.messages == 0
    with Vhost.open(target) as vhost:
        assert report.first_seq_id == vhost.queue(into).directories[0].indexes[0].next_seq_id
    assert golden.tree(target) == before


def test_an_import_into_a_damaged_queue_changes_nothing(golden_vhost_copy):
    target = golden_vhost_copy("11-clean-small")
    into = queue_of(target)
    journal = next((target / "queues").rglob("journal.jif"))
    journal.write_bytes(journal.read_bytes() + b"\xc0" + bytes(6) + b"\x99" + bytes(30) + b"\x80\1")
    segment = journal.with_name("0.idx")
    segment.write_bytes(b"\x3f\xff" + (segment.read_bytes() if segment.exists() else b""))
    before = golden.tree(target)
    with pytest.raises(StoreError, match=r"damage|repair"):
        import_messages(target, into, [Message(b"x", properties=PERSISTENT)], declared=True)
    assert golden.tree(target) == before


def embedded_place(path, name):
    """(file, position) of a message in a segment of a queue's index."""
    with Vhost.open(path) as vhost:
        entries = vhost.queue(name).directories[0].entries()
        entry = next(each for each in entries if each.message is not None and each.path.endswith(".idx"))
        return Path(entry.path), entry.pos + 34


def flip(file, pos):
    data = bytearray(file.read_bytes())
    data[pos] ^= 1
    file.write_bytes(data)


def to_nothing(place):
    place.rename(place.parents[3] / "elsewhere")
    place.symlink_to("/nowhere/at/all")


def to_directory(place):
    place.unlink()
    place.mkdir()


DOUBTS = {
    # A change of the index of queue c, its directory and the vhost; and the file that the refusal names.
    "unreadable": lambda index, path: (to_directory(index), index)[-1],
    "fifo": lambda index, path: (index.unlink(), os.mkfifo(index), index)[-1],
    "link to nothing": lambda index, path: (to_nothing(index), index)[-1],
    "torn": lambda index, path: (os.truncate(index, index.stat().st_size - 3), index)[-1],
    "gone after a clean stop": lambda index, path: (index.unlink(), index)[-1],
    "bad_name": lambda index, path: index.rename(index.with_name("x.idx")),
    "journal": lambda index, path: (to_directory(index.with_name("journal.jif")), index.with_name("journal.jif"))[-1],
    "directory": lambda index, path: (to_nothing(index.parent), index.parent)[-1],
    "bad_term": lambda index, path: (flip(*embedded_place(path, "c")), index)[-1],
    "bad_config": lambda index, path: ((path / ".config").write_bytes(b"{other, 1}."), path / ".config")[-1],
    "unreadable_store": lambda index, path: (
        to_directory(path / "msg_store_persistent" / "0.rdq"),
        path / "msg_store_persistent" / "0.rdq",
    )[-1],
    "strange_name": lambda index, path: (
        (path / "msg_store_persistent" / "0.rdq").rename(path / "msg_store_persistent" / "00.rdq")
    ),
    "rdt_without_rdq": lambda index, path: (
        (path / "msg_store_persistent" / "0.rdq").rename(path / "msg_store_persistent" / "7.rdt")
    ),
}


@pytest.mark.parametrize("state", ["auto", "dirty"])
@pytest.mark.parametrize("name", DOUBTS)
def test_an_import_is_refused_where_not_all_references_are_known(name, state, golden_vhost_copy):
    # The message store deletes what nobody refers to: what queue c has, while c cannot be read.
    target = golden_vhost_copy("13-clean-fanout-refcount")
    with Vhost.open(target) as vhost:
        index = Path(vhost.queue("c").path) / "0.idx"
    named = DOUBTS[name](index, target)
    before = golden.tree(target)
    for body in (b"small", b"x" * 5000):
        with pytest.raises(StoreError, match="nothing was changed") as caught:
            import_messages(target, "b", [Message(body, properties=PERSISTENT)], state=state, declared=True)
        assert caught.value.path == os.fspath(named) and "rmqstore rabbitmq repair" in str(caught.value)
    assert golden.tree(target) == before


@pytest.mark.parametrize("what", ["bad_term", "msg_id_mismatch", "0.rdq", "a writer"])
def test_a_refused_import_leaves_the_clean_state(what, golden_vhost_copy):
    target = golden_vhost_copy("13-clean-fanout-refcount")
    file, pos = embedded_place(target, "b")
    with contextlib.ExitStack() as held:
        if what == "0.rdq":
            to_directory(target / "msg_store_persistent" / "0.rdq")
        elif what == "a writer":
            held.callback(os.close, lock_directory(os.fspath(file.parent), "the test has it"))
        else:
            # The term's first byte, or the first of the record's message id.
            flip(file, pos if what == "bad_term" else pos - 32)
        before = golden.tree(target)
        with pytest.raises((StoreError, OSError)):
            import_messages(target, "b", [Message(b"x", properties=PERSISTENT)], declared=True)
        assert golden.tree(target) == before and (target / "msg_store_persistent" / "clean.dot").exists()


def test_an_import_after_a_crash_that_cut_the_journal(golden_vhost_copy):
    # A record cut by a crash is no reason to refuse: it was never whole.
    target = golden_vhost_copy("01-kill9-journal-only")
    into = queue_of(target)
    before = bodies_of(target, into)
    journal = next(target.rglob("journal.jif"))
    journal.write_bytes(journal.read_bytes() + journal.read_bytes()[:30])
    journal.with_name("7.idx").write_bytes(bytes(50))
    assert import_messages(target, into, [Message(b"x", properties=PERSISTENT)], declared=True).messages == 1
    assert bodies_of(target, into) == [*before, b"x"]


def test_an_import_of_ids_that_are_taken(golden_vhost_copy):
    target = golden_vhost_copy("13-clean-fanout-refcount")
    with Vhost.open(target) as vhost:
        queue = next(each for each in vhost.queues() if any(m.location == "store" for m in each.messages()))
        into = queue.name
        same = next(m for m in queue.messages() if m.location == "store").message
        counts = {msg_id: vhost.store().refcount(msg_id) for msg_id in vhost.store()}
    other = Message(b"other" * 2000, properties=PERSISTENT, vhost=same.vhost, msg_id=same.msg_id)
    twice = [
        Message(body, properties=PERSISTENT, vhost=same.vhost, msg_id=b"7" * 16)
        for body in (b"a" * 5000, b"b" * 5000, b"small", b"c" * 5000)
    ]
    before = bodies_of(target, into)
    import_messages(target, into, [other, *twice], declared=True)
    import_messages(target, into, [same], declared=True)
    assert bodies_of(target, into) == before + [other.body, *(each.body for each in twice), same.body]
    with Vhost.open(target) as vhost:
        assert vhost.clean
        ids = [message.msg_id for message in vhost.queue(into).messages()][len(before) :]
        assert len(set(ids)) == len(ids) and ids[0] != same.msg_id and ids[1] == b"7" * 16 and ids[-1] == same.msg_id
        assert vhost.store().refcount(same.msg_id) == counts[same.msg_id] + 1
    assert list(verify(target)) == []


def test_an_import_beside_lost_messages_leaves_them_to_the_node(golden_vhost_copy):
    # Half-clean: with a clean state the node would not look for what is lost, and crash when it comes to it.
    target = golden_vhost_copy("12-clean-msgstore")
    into = queue_of(target)
    store = target / "msg_store_persistent"
    os.unlink(store / "clean.dot")
    with Vhost.open(target) as vhost:
        lost = [message.msg_id for message in vhost.queue(into).messages() if message.location == "store"]
    for file in store.glob("*.rdq"):
        file.write_bytes(b"")
    target_of = Message(b"x" * 5000, properties=PERSISTENT, msg_id=lost[0])
    name = "another queue"
    report = import_messages(target, name, [target_of], declared=True, state="dirty")
    assert report.stored == 1
    assert bodies_of(target, name) == [target_of.body]
    assert not (store / "clean.dot").exists()
    assert {finding.kind for finding in verify(target)} == {"lost_message"}


def test_large_transient_and_expiring_messages(golden_vhost_copy):
    target = golden_vhost_copy("11-clean-small")
    into = queue_of(target)
    before = bodies_of(target, into)
    messages = [
        Message(b"\0\xff" * (9 << 20), properties=PERSISTENT),
        Message(b"transient", properties={"delivery_mode": 1, "headers": {"a": [1, None]}}),
        (Message(b"expires", properties=PERSISTENT), 1_700_000_000_123),
        Message(b""),
    ]
    plain = [each[0] if isinstance(each, tuple) else each for each in messages]
    report = import_messages(target, into, messages, declared=True)
    assert (report.embedded, report.stored, report.state) == (3, 1, "exact")
    assert bodies_of(target, into) == before + [message.body for message in plain]
    with Vhost.open(target) as vhost:
        found = list(vhost.queue(into).messages())[len(before) :]
        assert [message.expiry for message in found] == [None, None, 1_700_000_000_123, None]
        assert all(message.persistent and message.message.persistent for message in found)
        assert [message.properties for message in found] == [message.properties for message in plain]
    assert list(verify(target)) == []


def test_a_queue_that_was_never_written_to_stays_exact(golden_vhost_copy):
    # A clean stop leaves it recovery terms and no directory.
    target = golden_vhost_copy("11-clean-small")
    with Vhost.open(target) as vhost:
        into, name, terms = vhost.queues()[0].name, layout.queue_directory(vhost.name, "never"), dict(vhost.terms)
        flags = [message.delivered for message in vhost.queue(into).messages()]
    terms[name] = {"segments": [], "next_seq_id": 0, "next_deliver_seq_id": 0, "persistent_ref": b"r" * 16}
    write_recovery_terms(os.fspath(target / "recovery.dets"), terms)
    report = import_messages(target, "never", [Message(b"x" * 5000, properties=PERSISTENT)], declared=True)
    assert report.state == "exact" and report.directory == name and report.stored == 1
    assert list(verify(target)) == []
    with Vhost.open(target) as vhost:
        assert vhost.clean and not any(message.delivered for message in vhost.queue("never").messages())
        assert [message.delivered for message in vhost.queue(into).messages()] == flags


def test_the_last_and_the_first_expiry(golden_vhost_copy):
    target = golden_vhost_copy("11-clean-small")
    into = queue_of(target)
    last = (1 << 63) // 1000 - 1
    message = Message(b"x", properties={**PERSISTENT, "timestamp": amqp.Timestamp(2**64 - 1)})
    import_messages(target, into, [(message, last), (message, 1)], declared=True)
    with Vhost.open(target) as vhost:
        assert [each.expiry for each in vhost.queue(into).messages()][-2:] == [last, 1]
    before = golden.tree(target)
    with pytest.raises(InvalidMessageError):
        import_messages(target, into, [(message, last + 1)], declared=True)
    assert golden.tree(target) == before
    assert CliRunner().invoke(cli.main, ["rabbitmq", "dump", os.fspath(target)]).exit_code == 0


def test_a_priority_queue_needs_its_level(golden_vhost_copy):
    priorities, plain = golden_vhost_copy("18-clean-priority"), golden_vhost_copy("11-clean-small")
    for target, level in ((priorities, None), (plain, 0)):
        before = golden.tree(target)
        with pytest.raises(StoreError, match="level"):
            import_messages(target, queue_of(target), [Message(b"x")], declared=True, level=level)
        assert golden.tree(target) == before
    assert import_messages(priorities, queue_of(priorities), [Message(b"x")], declared=True, level=1).state == "exact"
    assert list(verify(priorities)) == []


def test_headers_of_every_type_come_back(golden_vhost_copy, tmp_path):
    headers = {
        "t": True, "b": amqp.Int8(-3), "B": amqp.UInt8(200), "u": amqp.UInt16(65535),
        "s": amqp.Int16(-5), "I": 5, "i": amqp.UInt32(5), "l": 1 << 40, "l small": amqp.Int64(1),
        "f": amqp.Float32(1.5), "f nan": amqp.Float32(float("nan")), "f inf": amqp.Float32(float("-inf")), "d": 2.5,
        "d nan": float("nan"), "d inf": float("inf"), "D": decimal.Decimal("1.25"), "S": "x\U0001f600\u2028\0",
        "S no UTF-8": "\udcff", "x": b"\xff", "A": [1, "a", [2, {"q": 1}], []], "T": amqp.Timestamp(2**64 - 1), "F": {},
        "F like binary": {"$binary": "x"}, "F like float": {"$float32": 1}, "F like a table": {"$table": {"$table": {}}},
        "F like pairs": {"$pairs": [1]}, "F twice": amqp.Table([("k", 1), ("k", "2"), ("j", {"$x": None})]), "V": None,
        "\U0001f600": 1, "\udcfe": 1, "": 1,
    }  # fmt: skip
    target = golden_vhost_copy("11-clean-small")
    into = queue_of(target)
    before = len(bodies_of(target, into))
    message = Message(
        "\U0001f600 body".encode(),
        properties={**PERSISTENT, "headers": headers, "timestamp": 5, "type": "\U0001f601", "priority": 255},
        exchange="\U0001f602",
        routing_keys=["\U0001f603", "\udc80", "line\nbreak"],
        vhost=Vhost.open(target).name,
    )
    odd = Message(b"\xff\xfe", properties={**PERSISTENT, "headers": {"$odd": 1}}, vhost=message.vhost)
    import_messages(target, into, [message, odd], declared=True)
    assert export(target, tmp_path / "out.jsonl") == before + 2
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()[before:]

    def strict(word):
        raise AssertionError(f"{word} is no JSON")

    for line, one in zip(lines, (message, odd)):
        back, _ = object_message(json.loads(line, parse_constant=strict))
        assert back.term == one.term
    assert export(target, tmp_path / "out.parquet") == before + 2
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist()[-1]["body"] == b"\xff\xfe"


@pytest.mark.parametrize(
    "value",
    [
        {"body": "x", "routing_keys": "abc"},
        {"body": "x", "routing_keys": [5]},
        {"body": "x", "persistent": "no"},
        {"body": "x", "expiry": "5"},
        {"body": "x", "expiry": 1e400},
        {"body": "x", "expiry": 0},
        {"body": "x", "msg_id": 5},
        {"body": "x", "msg_id": "00"},
        {"body": "x", "queue": ["q"]},
        {"body": "x", "exchange": {}},
        {"body": "x", "vhost": 1},
        {"body": "x", "properties": [["type", "x"]]},
        {"body": "x", "properties": {"$binary": "AAA="}},
        {"body": "x", "properties": {"headers": {"a": {"$decimal": "x"}}}},
        {"body": "x", "properties": {"headers": {"a": {"$decimal": []}}}},
        {"body": "x", "properties": {"headers": {"a": {"$timestamp": -1}}}},
        {"body": "x", "properties": {"headers": {"a": {"$int8": 300}}}},
        {"body": "x", "properties": {"headers": {"a": {"$pairs": 5}}}},
        {"body": "x", "properties": {"headers": {"a": {"$pairs": [[5, 5]]}}}},
        {"body": "x", "properties": {"headers": {"a": {"$table": 5}}}},
        {"body": "x", "properties": {"headers": {"a": {"$float32": "x"}}}},
        {"body": "x", "properties": {"headers": {"a": {"$float32": 1e300}}}},
        {"body": "x", "properties": {"headers": {"a": 1 << 70}}},
        {"body": "x", "properties": {"headers": 5}},
        {"body": "x", "properties": {"headers": {"a" * 256: 5}}},
        {"body": "x", "properties": {"delivery_mode": 3}},
        {"body": "x", "properties": {"priority": 256}},
        {"body": "x", "properties": {"type": 5}},
        {"body": "\ud800"},
    ],
    ids=str,
)
def test_objects_that_are_no_messages(value):
    with pytest.raises(InvalidMessageError):
        object_message(json.loads(json.dumps(value)))


def test_an_export_never_replaces_what_is_no_file(golden_vhost, tmp_path):
    source = golden_vhost("11-clean-small")
    with pytest.raises(StoreError, match="directory"):
        export(source, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    read: list[bytes] = []
    reader.start()
    number = export(source, tmp_path / "pipe")
    reader.join()
    assert len(read[0].splitlines()) == number
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    (tmp_path / "real.jsonl").write_bytes(b"old")
    os.symlink("real.jsonl", tmp_path / "link.jsonl")
    with pytest.raises(StoreError, match="exists"):
        export(source, tmp_path / "link.jsonl")
    assert (tmp_path / "real.jsonl").read_bytes() == b"old"
    export(source, tmp_path / "link.jsonl", force=True)
    assert os.path.islink(tmp_path / "link.jsonl") and (tmp_path / "real.jsonl").read_bytes() == read[0]
    if os.path.exists("/dev/full"):
        with pytest.raises(OSError, match="space"):
            export(source, "/dev/full")
        assert stat.S_ISCHR(os.stat("/dev/full").st_mode) and not os.path.exists("/dev/full.part")
