"""Directories of RabbitMQ 4.0.5 and 4.3.6: what they hold is read as the node delivers it, and nothing writes version 1 there.

4.3 ignores an index of version 1, so that a repair or an import that writes one loses every message in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import golden
import golden_rabbitmq4
import numpy as np
import pytest
from click.testing import CliRunner

from rmqstore import cli
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import (
    Message,
    MessageStore,
    QueueIndex,
    Vhost,
    export,
    import_messages,
    layout,
    repair,
    term,
    unreferenced_messages,
    verify,
)
from rmqstore.rabbitmq._term import message_columns
from rmqstore.rabbitmq.amqp import decode_properties, decode_table
from rmqstore.rabbitmq.term import Atom
from rmqstore.rabbitmq.transfer import object_message

CLEAN = ["4.0.5-clean", "4.3.6-clean"]
ROOT = "628WB79CIFDYO9LJI6DKMI09L"


def vhost_of(node):
    return node / "msg_stores" / "vhosts" / ROOT


def queue_path(vhost, name):
    return vhost / "queues" / layout.queue_directory("/", name)


def run(*arguments):
    return CliRunner().invoke(cli.main, ["rabbitmq", *map(str, arguments)])


# ----------------------------------------------------------------------------------------------- nothing of version 1


@pytest.mark.parametrize(
    ("case", "alone"),
    [("4.0.5-clean", False), ("4.3.6-clean", True), ("4.3.6-kill9-idle", True), ("4.0.5-khepri", False)],
)
def test_a_damaged_queue_is_not_written_as_version_1(case, alone, golden_node_copy, tmp_path):
    path = vhost_of(golden_node_copy(case))
    if alone:
        path = shutil.move(path, tmp_path / "alone")
    with Vhost.open(path) as vhost:
        queue = max(vhost.queues(), key=lambda queue: queue.depth)
    index = next(file for file in sorted(os.listdir(queue.path)) if file.endswith(".qi"))
    index = os.path.join(queue.path, index)
    os.truncate(index, os.path.getsize(index) - 13)
    before = golden.tree(path)
    with pytest.raises(StoreError, match=r"RabbitMQ 4\.x .*version 1.*rmqstore rabbitmq export"):
        repair(path, tmp_path / "repaired")
    answer = run("repair", path, tmp_path / "repaired")
    assert answer.exit_code == 3 and "RabbitMQ 4.x" in answer.output
    assert not list(tmp_path.glob("repaired*")) and golden.tree(path) == before


@pytest.mark.parametrize("case", ["4.3.6-clean"])
def test_a_sound_directory_is_still_copied(case, golden_node, tmp_path):
    path = vhost_of(golden_node(case))
    report = repair(path, tmp_path / "copy")
    assert {queue.files for queue in report.queues} == {"copied"} and not report.lost and not report.findings
    for file in (path / "queues").rglob("*"):
        if file.is_file():
            assert (tmp_path / "copy" / file.relative_to(path)).read_bytes() == file.read_bytes()
    assert not list((tmp_path / "copy").rglob("*.idx")) and not list((tmp_path / "copy").rglob("*.jif"))


@pytest.mark.parametrize("queue", ["small", "empty"])
@pytest.mark.parametrize("case", [*CLEAN, "4.3.6-kill9-idle"])
def test_an_import_is_refused(case, queue, golden_node_copy):
    path = vhost_of(golden_node_copy(case))
    before = golden.tree(path)
    with pytest.raises(StoreError, match=r"RabbitMQ 4\.x .*publish the messages to the running node"):
        import_messages(path, queue, [Message(b"new")], declared=True)
    assert golden.tree(path) == before


@pytest.mark.parametrize("queue", ["small", "empty"])
def test_no_index_of_version_1_is_opened_for_writing_in_a_queue_of_version_2(queue, golden_node_copy):
    path = queue_path(vhost_of(golden_node_copy("4.3.6-clean")), queue)
    before = golden.tree(path)
    with pytest.raises(StoreError, match="version 2"):
        QueueIndex.open(path, create=True)
    assert golden.tree(path) == before


def test_what_shows_a_node_of_4(golden_vhost_copy, golden_node_copy):
    node = golden_node_copy("4.0.5-clean")
    path = vhost_of(node)

    def seen():
        with Vhost.open(path) as vhost:
            return vhost.version_4

    assert "clean.dot" in seen()
    (path / "msg_store_persistent" / "clean.dot").unlink()
    assert "version 2" in seen()
    (node / "schema.DAT").unlink()
    assert "Khepri" in seen()
    # 3.x has queues of version 2 as well, and its own clean.dot or terms.
    path = golden_vhost_copy("19-clean-v2")
    assert seen() is None
    (path / "msg_store_persistent" / "clean.dot").unlink()
    assert seen() is None


def test_files_of_the_next_format_are_named_and_nothing_is_written_beside_them(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("12-clean-msgstore")
    store = path / "msg_store_persistent"
    for name in ("clean.dot", "file_summary.ets", "msg_store_index.ets"):
        (store / name).unlink()
    (store / "0.rdq").rename(store / "0.sqs")
    before = golden.tree(path)
    kinds = [finding.kind for finding in verify(path)]
    # Messages that may be in it are not lost.
    assert "unread_format" in kinds and "unreadable_message" in kinds and "lost_message" not in kinds
    with Vhost.open(path) as vhost:
        lost = []
        assert not [each for queue in vhost.queues() for each in queue.messages(lost.append) if each.location == "store"]
    assert lost and all("0.sqs" in each.reason for each in lost)
    answer = run("info", path)
    assert answer.exit_code == 1 and "0.sqs" in answer.output
    for write in (
        lambda: MessageStore.open(store),
        lambda: repair(path, tmp_path / "repaired"),
        lambda: import_messages(path, "q", [Message(b"new")], declared=True),
    ):
        with pytest.raises(StoreError, match=r"\.sqs"):
            write()
    assert golden.tree(path) == before


# ------------------------------------------------------------------------------------------ what is there, as it is


@pytest.mark.parametrize("case", [*CLEAN, "4.3.6-kill9-idle"])
def test_every_message_is_as_the_node_delivers_it(case, golden_node):
    wanted = golden_rabbitmq4.delivered(case)
    found = {}
    for path in sorted((golden_node(case) / "msg_stores" / "vhosts").iterdir()):
        with Vhost.open(path) as vhost:
            assert vhost.clean == ("clean" in case)
            for queue in vhost.queues():
                rows = [
                    (hashlib.sha256(m.body).hexdigest()[:16], m.exchange, m.routing_keys[0], m.delivered, m.properties)
                    for m in queue.messages()
                    if m.persistent
                ]
                if rows:
                    found[vhost.name, queue.name] = rows
    for (vhost, queue), rows in found.items():
        assert rows == [
            (m["sha"], m["x"], m["rk"], m["r"], decode_properties(bytes.fromhex(m["p"]))) for m in wanted[vhost, queue]
        ], queue
    assert sum(map(len, found.values())) == 6067


def test_a_dead_lettered_message_has_what_the_node_delivers(golden_node, tmp_path):
    pytest.importorskip("pyarrow")
    with Vhost.open(vhost_of(golden_node("4.3.6-clean"))) as vhost:
        queue = vhost.queue("dtgt")
        *_, expired = queue.messages()
        rows = [row for batch in queue.batches(("headers", "expiration", "msg_id")) for row in batch.to_pylist()]
        assert export(vhost, tmp_path / "m.jsonl", queues=["dtgt"]) == len(rows) == 4
    # It expired in `dexp` after 200 ms, and was rejected in `dsrc`.
    assert expired.message.annotated and "expiration" not in expired.properties
    deaths = expired.properties["headers"]["x-death"]
    assert [(each["queue"], each["reason"]) for each in deaths] == [("dsrc", "rejected"), ("dexp", "expired")]
    assert deaths[1]["original-expiration"] == "200"
    line = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert json.loads(rows[-1]["headers"]) == line["properties"]["headers"] and rows[-1]["expiration"] is None
    # The imported messages are those that the node would have delivered.
    again = Message.from_term(object_message(line)[0].term)
    assert again.properties == expired.properties


@pytest.mark.parametrize(
    ("annotations", "headers"),
    [
        ({Atom("deaths"): 7}, None),
        ({Atom("deaths"): [(b"q", 1)], b"x-own": b"a"}, {"x-own": "a"}),
        ({b"x-n": 5, b"x-b": Atom("true"), b"other": b"a", b"x-f": 1.5}, {"x-b": True, "x-n": 5}),
        (
            {
                Atom("deaths"): (
                    Atom("deaths"),
                    (b"q", Atom("expired")),
                    (b"q", Atom("expired")),
                    {(b"q", Atom("expired")): (Atom("death"), b"", [b"k"], 2, {Atom("first_time"): 5000, Atom("last_time"): 6000})},
                )
            },
            {
                "x-death": [
                    {"count": 2, "reason": "expired", "queue": "q", "time": 5, "exchange": "", "routing-keys": ["k"]}
                ]
            },
        ),
    ],
)
def test_annotations_that_a_node_delivers(annotations, headers):
    content = (Atom("content"), 60, Atom("none"), b"\x10\x00\x02", Atom("rabbit_framing_amqp_0_9_1"), [b"body"])
    common = {Atom("x"): b"", Atom("rk"): [b"q"], Atom("id"): bytes(16)}
    value = term.encode((Atom("mc"), Atom("mc_amqpl"), content, {**common, **annotations}))
    wanted = {"delivery_mode": 2} | ({} if headers is None else {"headers": headers})
    assert Message.from_term(value).properties == wanted
    columns = message_columns(value, np.zeros(1, np.int64), np.full(1, len(value)), columns=["status", "headers"])
    found = columns["headers"]
    assert columns["status"][0] == 0
    assert (decode_table(found[1].tobytes()) if found[2][0] else None) == headers


@pytest.mark.parametrize("case", [*CLEAN, "4.3.6-kill9-idle", "4.0.5-khepri"])
def test_nothing_is_wrong_in_what_a_node_left(case, golden_node):
    assert list(verify(golden_node(case))) == []


def test_a_file_that_the_node_compacted_in_place_is_sound(golden_node, tmp_path):
    path = shutil.copytree(vhost_of(golden_node("4.3.6-kill9-idle")), tmp_path / "vhost")
    with Vhost.open(path) as vhost:
        garbage = [found for found in unreferenced_messages(vhost) if found.path.endswith("0.rdq")]
        places = vhost.store().locations()
        bodies = {queue.name: [m.body for m in queue.messages()] for queue in vhost.queues()}
    file = path / "msg_store_persistent" / "0.rdq"
    data = bytearray(file.read_bytes())
    room = min(found.pos for found in garbage)
    for found in garbage:
        size = len(found.message.term) + 25
        data[found.pos : found.pos + size] = bytes(size)
    # The last message that fits was moved to the front, and the file was not cut yet.
    hole = next(len(found.message.term) + 25 for found in garbage if found.pos == room)
    rows = [row for row in range(len(places.pos)) if places.file[row] == 0 and places.size[row] <= hole]
    start, size = int(places.pos[rows[-1]]), int(places.size[rows[-1]])
    data[room : room + size] = data[start : start + size]
    file.write_bytes(data)
    assert list(verify(path)) == []
    with Vhost.open(path) as vhost:
        assert {queue.name: [m.body for m in queue.messages()] for queue in vhost.queues()} == bodies
    # Its damage is still found: a message without its mark.
    data[room + size - 1] = data[start + size - 1] = 0
    file.write_bytes(data)
    assert [finding.kind for finding in verify(path)] == ["lost_message"]


# ------------------------------------------------------------------------------------- what the node does with damage


def poke(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def flip_body(path):
    data = bytearray(path.read_bytes())
    data[data.index(b"small-000200")] ^= 1
    path.write_bytes(data)


# Damage, and what both nodes did: with `many`, 5452 messages were out of reach; with `fan3`, 20 went with their file.
DAMAGES = {
    "torn entry": ("many", "2.qi", lambda path: os.truncate(path, path.stat().st_size - 13), "torn_entry", "blocks"),
    "head": ("fan3", "0.qi", lambda path: poke(path, 0, bytes(64)), "bad_head", "deletes_segment"),
    "version": ("ttlq", "0.qi", lambda path: poke(path, 4, b"\x03"), "bad_head", "deletes_segment"),
    "check sum": ("small", "0.qs", flip_body, "bad_crc", "restarts"),
    "store cut": ("edge", "0.qs", lambda path: os.truncate(path, path.stat().st_size - 40), "outside", "restarts"),
    "store gone": ("ttlq", "0.qs", lambda path: path.unlink(), "missing_store", "restarts"),
    "index gone": ("fan1", "0.qi", lambda path: path.unlink(), "segment_count_mismatch", "restarts"),
}
SENTENCES = {
    "blocks": "none of its messages can be reached",
    "deletes_segment": "deletes this .qi and its .qs, with all messages",
    "restarts": "goes on without it, and redelivers all messages",
}


def one_queue(vhost, queue, target):
    """Copy one queue of a vhost, with the vhost's small files."""
    for name in (".vhost", ".config", "recovery.dets"):
        target.mkdir(exist_ok=True)
        shutil.copyfile(vhost / name, target / name)
    shutil.copytree(queue_path(vhost, queue), queue_path(target, queue))
    return queue_path(target, queue)


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_says_what_the_node_does(damage, golden_node, tmp_path):
    queue, name, apply, kind, consequence = DAMAGES[damage]
    folder = one_queue(vhost_of(golden_node("4.3.6-clean")), queue, tmp_path / "vhost")
    apply(folder / name)
    said = [f.consequence for f in verify(tmp_path / "vhost") if (f.path, f.kind) == (str(folder / name), kind)]
    assert said == [consequence] and SENTENCES[consequence] in said[0].sentence


def test_an_index_of_version_1_is_named_where_the_node_ignores_it(golden_vhost_copy, tmp_path):
    # The output of a repair, in the place of the damaged directory of a 4.3 node.
    path = tmp_path / "rabbit@n1" / "msg_stores" / "vhosts" / ROOT
    path.parent.mkdir(parents=True)
    shutil.move(golden_vhost_copy("11-clean-small"), path)
    assert not list(verify(path))
    (tmp_path / "rabbit@n1" / "coordination").mkdir()
    (finding,) = verify(path)
    assert (finding.kind, finding.consequence, finding.messages) == ("version_1_in_4", "ignores", 8)
    assert "4.3 and later ignores it" in finding.consequence.sentence
    with pytest.raises(StoreError, match="RabbitMQ 4"):
        repair(path, tmp_path / "repaired")


def test_after_a_crash_the_node_leaves_out_what_is_cut(golden_node, tmp_path):
    for queue, name, apply, kind, _ in (DAMAGES["check sum"], DAMAGES["store cut"]):
        folder = one_queue(vhost_of(golden_node("4.3.6-kill9-idle")), queue, tmp_path / queue)
        apply(folder / name)
        said = [f.consequence for f in verify(tmp_path / queue) if (f.path, f.kind) == (str(folder / name), kind)]
        assert said == ["drops"]
