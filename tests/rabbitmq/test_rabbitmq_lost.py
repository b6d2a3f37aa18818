"""Messages that a queue's index has and whose bytes are lost: every answer says how many there are, and which.

The id of a stored message is overwritten in its message file, which no reader can believe then; what must be said follows from
what the sound vhost lists.  The depth of a queue is what is given and what is lost, in every front end.  What stands
after damage of an index is not even counted: every answer names the file, and the place where one is known.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from pathlib import Path

import classic_queue_oracle as oracle
import golden
import pytest
from click.testing import CliRunner

from rmqstore import cli
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import (
    Consequence,
    Message,
    QueueIndex,
    Vhost,
    export,
    import_messages,
    layout,
    repair,
    term,
    verify,
)
from rmqstore.rabbitmq.dets import write_recovery_terms
from rmqstore.rabbitmq.term import Atom

CASE = "13-clean-fanout-refcount"


def run(*arguments):
    return CliRunner().invoke(cli.main, ["rabbitmq", *map(str, arguments)])


@pytest.fixture
def damaged(golden_vhost_copy) -> tuple[Path, set[tuple[str, int]], int]:
    """A vhost, queue and sequence id of each message that is lost in it, and how many are left."""
    path = golden_vhost_copy(CASE)
    with Vhost.open(path) as vhost:
        listed = [(queue.name, message) for queue in vhost.queues() for message in queue.messages()]
        depth = sum(queue.depth for queue in vhost.queues())
    assert len(listed) == depth
    msg_id = next(message.msg_id for _, message in listed if message.location == "store")
    lost = {(name, message.seq_id) for name, message in listed if message.msg_id == msg_id}
    for file in (path / "msg_store_persistent").glob("*.rdq"):
        file.write_bytes(file.read_bytes().replace(msg_id, bytes(16)))
    assert 0 < len(lost) < depth
    return path, lost, depth - len(lost)


def test_the_api_tells_of_each(damaged, caplog):
    path, wanted, left = damaged
    with Vhost.open(path) as vhost:
        for listing in (
            lambda queue, on_lost: sum(1 for _ in queue.messages(on_lost)),
            lambda queue, on_lost: sum(batch.num_rows for batch in queue.batches(("seq_id", "body"), on_lost)),
        ):
            told, given = [], 0
            for queue in vhost.queues():
                here = listing(queue, told.append)
                given += here
                assert here + sum(each.queue == queue.name for each in told) == queue.depth
            assert {(each.queue, each.seq_id) for each in told} == wanted and len(told) == len(wanted)
            assert given == left
            assert all(each.path.startswith(str(path)) and not each.embedded for each in told)
        assert not caplog.records
        # Nobody who listens: a warning says the number, and where.
        with caplog.at_level(logging.WARNING, "rmqstore"):
            for queue in vhost.queues():
                list(queue.messages()), list(queue.batches())
    said = [record.getMessage() for record in caplog.records]
    for name, seq_id in wanted:
        assert sum(f"queue {name}: lost messages left out: 1, " in text and f"seq_id {seq_id} " in text for text in said) == 2


@pytest.mark.parametrize("format", ["jsonl", "parquet", "arrow"])
def test_an_export_says_the_number_and_ends_with_1(damaged, tmp_path, format):
    path, wanted, left = damaged
    told = []
    assert export(path, tmp_path / f"api.{format}", on_lost=told.append) == left
    assert {(each.queue, each.seq_id) for each in told} == wanted
    done = run("export", path, "-O", tmp_path / f"out.{format}")
    assert done.exit_code == 1
    assert f"{left} messages" in done.stderr and f"{len(wanted)} message" in done.stderr and "lost" in done.stderr
    for name, seq_id in wanted:
        assert f"queue {name}: lost: seq_id {seq_id} " in done.stderr
    done = run("export", path, "-O", tmp_path / f"again.{format}", "--json")
    assert done.exit_code == 1
    assert {"messages": left, "lost": len(wanted)}.items() <= json.loads(done.stdout).items()


def test_a_dump_names_them_in_their_places(damaged):
    path, wanted, left = damaged
    done = run("dump", path)
    assert done.exit_code == 1 and done.stdout.count("lost: seq_id") == len(wanted)
    done = run("dump", path, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1 and sum(line["type"] == "message" for line in lines) == left
    assert {(line["queue"], line["seq_id"]) for line in lines if line["type"] == "lost"} == wanted
    shown = {}
    for line in lines:
        shown.setdefault(line["queue"], []).append(line["seq_id"])
    assert all(numbers == sorted(numbers) for numbers in shown.values())


def deep_headers(levels: int) -> bytes:
    """Properties with a header table of this many levels."""
    table = b""
    for _ in range(levels):
        table = b"\x01kF" + len(table).to_bytes(4, "big") + table
    return b"\x20\x00" + len(table).to_bytes(4, "big") + table


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["mc_amqp", "flags", "headers"])
def test_a_message_that_cannot_be_decoded_stops_no_other(tmp_path, kind, version):
    # JSON lines and dump ended with it; Arrow and Parquet gave nulls without a word.
    msg_id = b"cannot be decode"
    if kind == "mc_amqp":
        # As 3.13 and later write what an AMQP 1.0 or MQTT publisher sent.
        about = {Atom("id"): msg_id, Atom("x"): b"", Atom("rk"): [b"q"]}
        strange = term.encode((Atom("mc"), Atom("mc_amqp"), (Atom("x"), 5), about))
    else:
        properties = b"\xff\xff\x01" if kind == "flags" else deep_headers(300)
        framing = Atom("rabbit_framing_amqp_0_9_1")
        content = (Atom("content"), 60, Atom("none"), properties, framing, [b"body"])
        exchange = (Atom("resource"), b"/", Atom("exchange"), b"")
        strange = term.encode((Atom("basic_message"), exchange, [b"q"], content, msg_id, Atom("true")))
    path = tmp_path / "vhost"
    folder = path / "queues" / layout.queue_directory("/", "q")
    folder.mkdir(parents=True)
    (path / ".vhost").write_bytes(b"/")
    (path / ".config").write_bytes(layout.format_config(2048))
    (folder / ".queue_name").write_bytes(layout.format_queue_name("/", "q"))
    terms = [Message(b"first").term, strange, Message(b"last").term]
    if version == 1:
        with QueueIndex.open(folder, create=True) as index:
            for each in terms:
                index.deliver([index.publish(message=each, size=4, persistent=True)])
            index.flush()
    else:
        store = bytearray(struct.pack(">IBQQ", 0x52435153, 2, 0, 4096).ljust(64, b"\0"))
        entries = []
        for number, each in enumerate(terms):
            entries.append(oracle.EntryV2(number, True, 2, b"", len(store), len(each), 4, 0))
            store += struct.pack(">IBHB", len(each), 1, zlib.crc32(each) & 0xFFFF, 0) + each
        (folder / "0.qi").write_bytes(oracle.encode_qi(0, 4096, entries, 64 + 32 * 4))
        (folder / "0.qs").write_bytes(store)
    before = golden.tree(path)
    told = []
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        assert [message.body for message in queue.messages(told.append, decoded=True)] == [b"first", b"last"]
        assert [each.seq_id for each in told] == [1] and told[0].reason and told[0].pos > 0
        # The requested columns can be decoded.
        whole = [message.body for message in queue.messages(told.append)]
        rows = [row["body"] for batch in queue.batches(("body",), told.append) for row in batch.to_pylist()]
        assert whole == rows == ([b"first", b"last"] if kind == "mc_amqp" else [b"first", b"body", b"last"])
        assert next(each.message for each in vhost.directories[0].entries() if each.seq_id == 1) == strange
    for format in ("jsonl", "arrow", "parquet"):
        done = run("export", path, "-O", tmp_path / f"out.{format}")
        assert done.exit_code == 1 and "2 messages" in done.stderr
        assert f"left out: seq_id 1 (message {msg_id.hex()}, {told[0].path}:{told[0].pos}) cannot be" in done.stderr
    feather = pytest.importorskip("pyarrow.feather")
    assert feather.read_table(tmp_path / "out.arrow")["body"].to_pylist() == [b"first", b"last"]
    done = run("dump", path, "--json")
    assert done.exit_code == 1
    assert [json.loads(line)["type"] for line in done.stdout.splitlines()] == ["message", "lost", "message"]
    assert run("dump", path).exit_code == (kind == "mc_amqp")
    if kind != "flags":
        # It is whole for a node, and repair keeps it.
        assert run("verify", path).exit_code == 0
        assert run("repair", path, tmp_path / "repaired").exit_code == 0
        with Vhost.open(tmp_path / "repaired") as vhost:
            assert [each.message for each in vhost.directories[0].entries()] == terms
    assert golden.tree(path) == before


def test_a_sound_vhost_ends_with_0(golden_vhost, tmp_path):
    assert run("dump", golden_vhost(CASE)).exit_code == 0
    assert run("export", golden_vhost(CASE), "-O", tmp_path / "out.jsonl").exit_code == 0


def test_the_console_names_them(damaged, tmp_path):
    pytest.importorskip("starlette")
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    path, wanted, _ = damaged
    golden_store = golden.unpack("base", tmp_path)
    client = testclient.TestClient(console.app(golden_store, rabbitmq=[path]), base_url="http://127.0.0.1:8080")
    found = set()
    for queue in client.get("/api/rabbitmq/0").json()["queue_list"]:
        value = client.get(f"/api/rabbitmq/0/queues/{queue['name']}").json()
        assert value["lost_num"] == len(value["lost"]) and len(value["rows"]) + value["lost_num"] == value["depth"]
        assert value["newer"] is None
        found |= {(each["queue"], each["seq_id"]) for each in value["lost"]}
        page = client.get(f"/rabbitmq/0/queues/{queue['name']}").text
        assert ("their bytes on disk are missing" in page) == bool(value["lost"])
    assert found == wanted


def test_a_part_of_spark_warns(damaged, caplog):
    pytest.importorskip("pyspark")
    from rmqstore.spark.rabbitmq import QueueReader, _Options, _spark_schema, read_part

    path, wanted, left = damaged
    options = _Options.parse({"path": str(path)})
    with caplog.at_level(logging.WARNING, "rmqstore"):
        rows = [
            row
            for each in QueueReader(options, _spark_schema(options.columns)).partitions()
            for batch in read_part(each, ("queue", "seq_id"))
            for row in batch.to_pylist()
        ]
    assert len(rows) == left
    assert sum("lost messages left out: 1, " in record.getMessage() for record in caplog.records) == len(wanted)


# ------------------------------------------------------------------------------------ indexes that cannot be read whole


def _to_fifo(file):
    file.unlink()
    os.mkfifo(file)


def _to_directory(file):
    file.unlink()
    file.mkdir()


def _zeros(file):
    data = file.read_bytes()
    file.write_bytes(data[:1000] + bytes(600) + data[1600:])


def _to_nothing(file):
    file.unlink()
    _link(file)


UNREADABLE = {
    "segment is a FIFO": ("0.idx", _to_fifo),
    "segment is a directory": ("0.idx", _to_directory),
    "segment is a link to nothing": ("0.idx", _to_nothing),
    "segment is gone after a clean stop": ("0.idx", os.unlink),
    "segment is cut": ("0.idx", lambda file: os.truncate(file, file.stat().st_size - 7)),
    "zeros in a segment": ("0.idx", _zeros),
    "journal is a directory": ("journal.jif", _to_directory),
    "queue is a link to nothing": ("", lambda place: (place.rename(place.parents[2] / "x"), _link(place))),
}


def _link(place):
    place.symlink_to("/nowhere/at/all")


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_index_that_cannot_be_read_whole_is_named(name, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("13-clean-fanout-refcount")
    with Vhost.open(path) as vhost:
        directory = Path(vhost.queue("c").path)
        others = sum(queue.depth for queue in vhost.queues() if queue.name != "c")
    file, spoil = UNREADABLE[name]
    place = directory / file if file else directory
    spoil(place)
    before = golden.tree(path)
    for command in ("info", "queues", "dump"):
        for more in ((), ("--json",)):
            done = run(command, path, *more)
            assert done.exit_code == 1, (command, done.output)
            assert str(place) in done.stderr and "may be missing" in done.stderr
    for format in ("jsonl", "arrow", "parquet"):
        done = run("export", path, "-O", tmp_path / f"out.{format}")
        assert done.exit_code == 1 and str(place) in done.stderr and "may be missing" in done.stderr
        told = []
        number = export(path, tmp_path / f"api.{format}", on_incomplete=told.append, on_lost=lambda lost: None)
        assert {each.path for each in told} == {str(place)} and number >= others
        if "segment is cut" in name:
            assert f"position {told[0].pos}: torn_record" in done.stderr
    # Columns that were not requested are no reason.
    assert run("export", path, "--queue", "b").exit_code == run("dump", path, "--queue", "b").exit_code == 0
    assert golden.tree(path) == before


def test_the_api_warns_of_an_index_that_cannot_be_read_whole(golden_vhost_copy, tmp_path, caplog):
    path = golden_vhost_copy("13-clean-fanout-refcount")
    with Vhost.open(path) as vhost:
        segment = Path(vhost.queue("c").path) / "0.idx"
    os.truncate(segment, segment.stat().st_size - 7)
    with Vhost.open(path) as vhost, caplog.at_level(logging.WARNING, "rmqstore"):
        queue = vhost.queue("c")
        # The node was stopped in order, so that the recovery terms count what is cut off.
        assert [each.kind for each in queue.incomplete] == ["torn_record", "segment_count_mismatch"]
        assert not vhost.queue("b").incomplete
        list(queue.messages()), list(queue.batches(("seq_id",)))
        export(vhost, tmp_path / "one.jsonl"), export(vhost, tmp_path / "two.jsonl", on_lost=lambda lost: None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 and all("queue c: messages may be left out" in text and str(segment) in text for text in said)


def test_what_a_crash_leaves_is_no_reason(golden_vhost_copy):
    # The cut end of a journal was never whole, and a segment of zeros was never written.
    path = golden_vhost_copy("01-kill9-journal-only")
    journal = next(path.rglob("journal.jif"))
    journal.write_bytes(journal.read_bytes() + journal.read_bytes()[:30])
    journal.with_name("7.idx").write_bytes(bytes(50))
    for command in ("info", "queues", "dump", "export"):
        assert run(command, path).exit_code == 0


def vhost_of_one_queue(tmp_path):
    """Queue q, without a message: the vhost's folder, and the queue's."""
    path = tmp_path / "vhost"
    directory = path / "queues" / layout.queue_directory("/", "q")
    directory.mkdir(parents=True)
    (path / ".vhost").write_bytes(b"/")
    (path / ".config").write_bytes(layout.format_config(2048))
    (directory / ".queue_name").write_bytes(layout.format_queue_name("/", "q", None))
    return path, directory


@pytest.mark.parametrize("zeros", [False, True], ids=["cut", "zeros"])
def test_a_journal_that_an_orderly_stop_left_has_no_end_of_a_crash(zeros, tmp_path):
    # Its last message was gone, and what was said was that nothing was lost: export ended with 0, and an import took a
    # message for one that nobody refers to.
    path, directory = vhost_of_one_queue(tmp_path)
    with QueueIndex.open(directory) as index:
        index.publish_many([Message(b"%d" % i, properties={"delivery_mode": 2}) for i in range(4)], deliver=True)
        # An ack that is lost with the message: no count of the recovery terms is too low then.
        index.ack([0])
        terms = index.close()
    write_recovery_terms(str(path / "recovery.dets"), {directory.name: terms | {"segments": [(0, 2)]}})
    journal = directory / "journal.jif"
    data = journal.read_bytes()
    begin = [each.begin for each in oracle.parse_journal(data).records if each.kind == "pub"][-1] + 20
    journal.write_bytes(data[:begin] + bytes(len(data) - begin) * zeros)
    before = golden.tree(path)
    with Vhost.open(path) as vhost:
        assert str(journal) in {each.path for each in vhost.queue("q").incomplete}
    own = [each for each in verify(path) if each.path == str(journal)]
    assert own and {each.consequence for each in own} & {Consequence.DROPS}
    for command in ("info", "queues", "dump", "export"):
        done = run(command, path)
        assert done.exit_code == 1 and str(journal) in done.stderr, command
    with pytest.raises(StoreError, match="nothing was changed"):
        import_messages(path, "q", [Message(b"new")], declared=True)
    assert golden.tree(path) == before


@pytest.mark.parametrize("written", [2, 9, 18, 31, 34, 37])
@pytest.mark.parametrize("stored", [False, True], ids=["embedded", "stored"])
def test_what_power_left_of_an_entry_hides_no_whole_one(written, stored, tmp_path):
    # The beginning of an entry that a flush was writing, and zeros: it was taken for another message of that number,
    # and the journal's whole one was left out everywhere.
    path, directory = vhost_of_one_queue(tmp_path)
    pubs = []
    for seq in range(3):
        msg_id, body = bytes(range(seq + 1, seq + 17)), b"body %d" % seq
        message = oracle.message_term(body, msg_id, routing_keys=[b"q"])
        pubs.append(oracle.Publish(seq, msg_id, 0, len(body), True, b"" if stored else message))
        if stored:
            (path / "msg_store_persistent").mkdir(exist_ok=True)
            with open(path / "msg_store_persistent" / "0.rdq", "ab") as file:
                file.write(oracle.rdq_record(msg_id, message))
    model = oracle.IndexModel(2048, 1 << 60)
    for pub in pubs:
        model.enqueue(pub)
    (directory / "journal.jif").write_bytes(model.journal)
    model.flush()
    blob = bytes(model.segments[0])
    half = len(oracle.segment_publish(pubs[2], 2048)) + 2 + written
    (directory / "0.idx").write_bytes(blob[:half].ljust(len(blob), b"\0"))
    assert oracle.read_vhost(path).crashes
    before = golden.tree(path)
    want = [(seq, pubs[seq].msg_id, b"body %d" % seq) for seq in range(3)]
    told = []
    with Vhost.open(path) as vhost:
        queue = vhost.queue("q")
        assert [(one.seq_id, one.msg_id, one.body) for one in queue.messages(told.append)] == want
        rows = [row for batch in queue.batches(("seq_id", "msg_id", "body"), told.append) for row in batch.to_pylist()]
        assert [(row["seq_id"], row["msg_id"], row["body"]) for row in rows] == want
        assert queue.depth == 3 and {each.path for each in queue.incomplete} == {str(directory / "0.idx")}
    assert export(path, tmp_path / "out.jsonl", on_lost=told.append, on_incomplete=lambda each: None) == 3 and not told
    assert {(each.path, each.consequence) for each in verify(path)} == {(str(directory / "0.idx"), Consequence.HANGS)}
    assert repair(path, tmp_path / "repaired").messages == 3
    assert [entry.message.body for entry in oracle.read_vhost(tmp_path / "repaired").queue(b"q").entries] == [
        body for _, _, body in want
    ]
    assert not list(verify(tmp_path / "repaired")) and golden.tree(path) == before
