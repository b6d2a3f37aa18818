"""The oracle of RabbitMQ's classic queues against what a real node left: every file, every byte, every message.

Never imports rmqstore: nothing here depends on the package.
"""

from __future__ import annotations

import itertools
import struct
import zlib

import classic_queue_oracle as oracle
import golden_rabbitmq
import pytest
from hypothesis import given
from hypothesis import strategies as st

CASES = golden_rabbitmq.cases()


@pytest.fixture(scope="session")
def read(golden_vhost):
    """A function `read(case)`: what the oracle makes of it, once."""
    known = {}

    def reader(case):
        if case not in known:
            known[case] = oracle.read_vhost(golden_vhost(case))
        return known[case]

    return reader


def files(golden_vhost, case, pattern):
    return sorted(golden_vhost(case).glob(pattern))


def test_all_cases_are_there():
    assert len(CASES) == 14


@pytest.mark.parametrize("case", CASES)
def test_names(golden_vhost, case):
    vhost, manifest = golden_vhost(case), golden_rabbitmq.manifest(case)
    name = (vhost / ".vhost").read_bytes()
    assert name.decode() == manifest["vhost"]
    assert oracle.vhost_dir(name) == manifest["vhost_dir"]
    config = (vhost / ".config").read_bytes()
    assert oracle.parse_config(config) == manifest["segment_entry_count"]
    assert oracle.config_text(manifest["segment_entry_count"]) == config
    for path in files(golden_vhost, case, "queues/*/.queue_name"):
        stub = oracle.parse_queue_name(path.read_bytes())
        assert oracle.queue_name_text(stub) == path.read_bytes()
        assert oracle.queue_dir(stub.vhost, stub.queue, stub.priority) == path.parent.name
        if stub.priority is None:
            assert manifest["queues"][stub.queue.decode()]["dir"] == path.parent.name


def test_the_directory_of_the_default_vhost():
    assert oracle.vhost_dir(b"/") == "628WB79CIFDYO9LJI6DKMI09L"


@pytest.mark.parametrize("case", CASES)
def test_messages(read, case):
    vhost = read(case)
    manifest = golden_rabbitmq.manifest(case)
    assert not vhost.crashes
    assert vhost.clean == ("-clean-" in case)
    for name, entry in manifest["queues"].items():
        if entry["args"].get("x-max-priority"):
            continue
        queue = vhost.queues[entry["dir"]]
        published = golden_rabbitmq.published(case, name)
        assert [one.seq for one in queue.entries] == golden_rabbitmq.seqs(entry["expect_live_seqs"])
        for one in queue.entries:
            expected = published[one.seq]
            assert (one.size, len(one.message.body)) == (expected["len"], expected["len"])
            assert one.sha256[:16] == expected["sha256_16"]
            assert one.persistent and one.message.persistent and one.message.vhost.decode() == manifest["vhost"]
            assert one.message.properties["delivery_mode"] == 2
            assert one.stored == (one.size >= oracle.EMBED_BELOW)
            assert ("expiration_ms" in expected) <= (one.expiry > 0)
            # From 3.10 on every publish is followed by its deliver; version 2 keeps none.
            assert one.delivered == (queue.version == 1)
        if queue.clean:
            assert queue.next_seq_id == entry["next_seq"]


@pytest.mark.parametrize("case", CASES)
def test_what_the_node_delivered(read, case):
    for name, entry in golden_rabbitmq.manifest(case)["queues"].items():
        recovered = entry.get("node_recovered")
        if recovered is None:
            assert entry["args"] == {"x-max-priority": 3}, name
            continue
        queue = read(case).queues[entry["dir"]]
        assert len(queue.entries) == recovered["ready_count_at_boot"] == recovered["delivered"]
        assert sum(one.redelivered for one in queue.entries) == recovered["redelivered_true"]
        for one, message in zip(queue.entries, recovered.get("messages", queue.entries)):
            if message is not one:
                assert (one.sha256[:16], one.size, one.redelivered) == (
                    message["sha256_16"],
                    message["len"],
                    message["redelivered"],
                )


def test_priorities(read):
    case = "18-clean-priority"
    queues = [read(case).queue(b"q", priority) for priority in range(4)]
    bodies = [[one.message.body.decode() for one in queue.entries] for queue in queues]
    published = [one["body"] for one in golden_rabbitmq.published(case, "q").values()]
    for level, found in enumerate(bodies):
        assert found == [body for body in published if min(int(body.split("-")[1]), 3) == level]
        assert [one.seq for one in queues[level].entries] == list(range(len(found)))


@pytest.mark.parametrize("case", CASES)
def test_journals_and_segments_byte_for_byte(golden_vhost, case):
    count = golden_rabbitmq.manifest(case)["segment_entry_count"]
    for path in files(golden_vhost, case, "queues/*/journal.jif"):
        data = path.read_bytes()
        parsed = oracle.parse_journal(data)
        assert (parsed.used, parsed.why) == (len(data), "end")
        assert oracle.encode_journal(parsed.records) == data
        check_terms(record.pub for record in parsed.records)
    for path in files(golden_vhost, case, "queues/*/*.idx"):
        data = path.read_bytes()
        parsed = oracle.parse_segment(data, int(path.stem), count)
        assert (parsed.used, parsed.why) == (len(data), "end")
        assert oracle.encode_segment(parsed.records, count) == data
        check_terms(record.pub for record in parsed.records)


def check_terms(publishes):
    for pub in publishes:
        if pub is not None and pub.term:
            value = oracle.decode(pub.term)
            assert oracle.encode(value) == pub.term
            message = oracle.message_of(value)
            assert (message.msg_id, len(message.body), message.persistent) == (pub.msg_id, pub.size, pub.persistent)


@pytest.mark.parametrize("case", CASES)
def test_message_files_byte_for_byte(golden_vhost, read, case):
    for path in files(golden_vhost, case, "msg_store_*/*.rdq"):
        data = path.read_bytes()
        parsed = oracle.parse_rdq(data)
        assert (parsed.used, parsed.why) == (len(data), "end")
        assert all(record.whole for record in parsed.records)
        assert oracle.encode_rdq(parsed.records) == data
        for record in parsed.records:
            value = oracle.decode(record.term)
            assert oracle.encode(value) == record.term
            assert oracle.message_of(value).msg_id == record.msg_id
    vhost = read(case)
    assert set(vhost.references) <= set(vhost.located)


def test_version_2_byte_for_byte(golden_vhost):
    (path,) = files(golden_vhost, "19-clean-v2", "queues/*/0.qi")
    first, end, entries = oracle.parse_qi(path.read_bytes())
    assert (first, end, len(entries)) == (0, 4096, 20)
    # The node leaves zeros where an acked entry was.
    assert oracle.encode_qi(first, end, entries, path.stat().st_size) == path.read_bytes()
    data = path.with_suffix(".qs").read_bytes()
    first, end, records = oracle.parse_qs(data)
    assert oracle.encode_qs(first, end, [term for _, term, _ in records]) == data
    assert all(crc == zlib.crc32(term) & 0xFFFF for _, term, crc in records)
    assert {entry.offset for entry in entries if entry.place == 2} <= {offset for offset, _, _ in records}


@pytest.mark.parametrize("case", [case for case in CASES if "-clean-" in case])
def test_files_of_an_orderly_stop(golden_vhost, read, case):
    vhost, found = golden_vhost(case), read(case)
    terms = oracle.recovery_terms(oracle.parse_dets((vhost / "recovery.dets").read_bytes()))
    assert set(terms) >= set(found.queues)
    for directory, queue in found.queues.items():
        own = terms[directory]
        assert own["persistent_count"] == len(queue.entries)
        assert own["persistent_bytes"] == sum(one.size for one in queue.entries)
        if queue.version == 1:
            per_segment = dict(own["segments"])
            live = itertools.groupby(
                sorted([*queue.seqs, *queue.dropped]), key=lambda seq: seq // found.segment_entry_count
            )
            assert {n: count for n, count in per_segment.items() if count} == {n: len(list(seqs)) for n, seqs in live}
    for name in ("file_summary.ets", "msg_store_index.ets"):
        for path in files(golden_vhost, case, f"msg_store_*/{name}"):
            items = oracle.parse_ets(path.read_bytes())
            assert oracle.encode_ets(items) == path.read_bytes()
            assert items[-1] == ["$end_of_table", [("count", len(items) - 2)]]
    index = oracle.parse_ets((vhost / "msg_store_persistent" / "msg_store_index.ets").read_bytes())[1:-1]
    counts = {entry[1]: entry[2] for entry in index if entry[2]}
    assert counts == found.references
    for _, msg_id, _, file, offset, size in index:
        data = (vhost / "msg_store_persistent" / f"{file}.rdq").read_bytes()
        # The total size is that of the whole record.
        assert struct.unpack_from(">Q16s", data, offset) == (size - 9, msg_id)


@pytest.mark.parametrize("case", [case for case in CASES if "-kill9-" in case])
def test_a_killed_node_leaves_empty_recovery_terms(golden_vhost, case):
    data = (golden_vhost(case) / "recovery.dets").read_bytes()
    assert len(data) == 5464 and oracle.parse_dets(data) == []


# The operations of a case that bytes depend on; None is a flush of an idle queue.
REPLAYS = {
    "01-kill9-journal-only": [
        ("pub", range(0, 20)),
        ("pub", [21]),
        ("ack", [0]),
        ("ack", [1]),
        ("ack", [3]),
        ("pub", [22, 23]),
    ],
    "02-kill9-segment-plus-journal": [("pub", range(100)), None, ("ack", range(30)), ("pub", range(100, 140))],
    "03-kill9-consumer-unacked": [("pub", range(50)), ("ack", [0]), ("ack", [1]), ("ack", [2]), ("ack", [3])],
    "06-kill9-multisegment": [("pub", range(36000)), ("ack", range(17383, -1, -1))],
    "30-kill9-default-2048-segments": [("pub", range(7000)), ("ack", range(2499, -1, -1)), None],
    "12-clean-msgstore": [("pub", range(30)), ("ack", range(10)), None],
}


@pytest.mark.parametrize("case", REPLAYS)
def test_a_replay_gives_the_nodes_bytes(golden_vhost, case):
    """The model of the journal, fed with the operations, writes the very files of the node."""
    count = golden_rabbitmq.manifest(case)["segment_entry_count"]
    (folder,) = (golden_vhost(case) / "queues").iterdir()
    expected = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".queue_name"}
    publishes = {}
    for name, data in expected.items():
        parsed = (
            oracle.parse_journal(data) if name == "journal.jif" else oracle.parse_segment(data, int(name[:-4]), count)
        )
        publishes |= {record.seq: record.pub for record in parsed.records if record.pub is not None}
    model = oracle.IndexModel(count)
    for operation in REPLAYS[case]:
        if operation is None:
            model.flush()
        elif operation[0] == "pub":
            for seq in operation[1]:
                # Of what was acked before it was flushed nothing is left; its size decides nothing.
                model.enqueue(publishes.get(seq, oracle.Publish(seq, bytes(16), 0, 0, True, b"gone")))
        else:
            model.ack(operation[1])
    assert model.files() == expected
    assert model.flushes == {"06-kill9-multisegment": 2}.get(case, REPLAYS[case].count(None))


# Rows and columns of the table of 7.1: what is left of journal and segment together, "!" where the node crashes.
MERGE_TABLE = """
pub         |  pub         | pub          | pub+del!     | pub+del+ack!
pub+del     |  pub+del     | pub+del      | pub+del      | pub+del+ack!
del         |  absent!     | pub+del      | pub+del      | pub+del+ack!
ack         |  absent      | pub+del+ack! | pub+del+ack  | pub+del+ack
del+ack     |  absent      | pub+del+ack  | pub+del+ack  | pub+del+ack
"""


PUB = oracle.Publish(7, bytes(16), 0, 1, True, b"t")


def state(text, pub=PUB):
    parts = text.strip(" !").split("+")
    return oracle.State(pub if "pub" in parts else None, "del" in parts, "ack" in parts)


def test_merge_table():
    for line in MERGE_TABLE.strip().splitlines():
        journal, *cells = line.split("|")
        for segment, cell in zip(("absent", "pub", "pub+del", "pub+del+ack"), cells):
            merged, crash = oracle.merge(state(journal), state(segment))
            assert (merged, bool(crash)) == (state(cell), "!" in cell), (journal, segment)
    other = oracle.Publish(7, bytes(16), 0, 2, True, b"t")
    for mine, theirs in itertools.product(("pub", "pub+del"), ("pub", "pub+del", "pub+del+ack")):
        merged, crash = oracle.merge(state(mine, other), state(theirs))
        assert merged == state(theirs) and crash


def test_what_ends_a_journal():
    pub = oracle.journal_publish(oracle.Publish(0, b"i" * 16, 0, 1, True, b"term"))
    whole = pub + oracle.journal_deliver(0)
    for cut, why in ((0, "end"), (7, "short word"), (8, "short publish"), (39, "short publish"), (43, "short publish")):
        parsed = oracle.parse_journal(whole + pub[:cut])
        assert (len(parsed.records), parsed.used, parsed.why) == (2, len(whole), why)
    assert oracle.parse_journal(whole + bytes(40) + pub).why == "zeros"
    # Fewer zeros are no such end: they are a cut publish.
    assert oracle.parse_journal(whole + bytes(39)).why == "short publish"
    huge = bytearray(pub)
    huge[36:40] = b"\xff" * 4
    assert oracle.parse_journal(bytes(huge)).why == "short publish"


def test_what_ends_a_segment():
    pub = oracle.segment_publish(oracle.Publish(3, b"i" * 16, 0, 1, True, b"term"), 8)
    mark, other = oracle.segment_mark(3, 8), oracle.segment_mark(4, 8)
    whole = pub + mark
    for more, why in (
        (b"", "end"),
        (mark, "end"),
        (mark + mark, "third mark"),
        (other, "mark without publish"),
        (pub, "second publish"),
        (b"\x00\x03", "prefix 00"),
        (b"\x40", "short head"),
        (oracle.segment_mark(5, 8)[:1] + b"\x09", "number beyond the segment"),
        (oracle.segment_publish(oracle.Publish(4, b"i" * 16, 0, 1, True, b"term"), 8)[:37], "short publish"),
    ):
        assert oracle.parse_segment(whole + more, 0, 8).why == why
    assert oracle.parse_segment(bytes(64), 0, 8) == ([], 0, "zeros")


def test_embedding():
    assert [oracle.embedded(size, 3) for size in (4092, 4093, 4096)] == [True, False, False]
    assert not oracle.embedded(0, 0, 0)


TERMS = st.recursive(
    st.integers(-(2**80), 2**80)
    | st.binary(max_size=20)
    | st.floats(allow_nan=False)
    | st.text("abcåØ_", max_size=8).map(oracle.Atom),
    lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple),
    max_leaves=20,
)


@given(TERMS)
def test_terms_survive_a_round(value):
    assert oracle.decode(oracle.encode(value)) == value
    compressed = zlib.compress(oracle.encode(value)[1:])
    assert oracle.decode(b"\x83\x50" + struct.pack(">I", len(oracle.encode(value)) - 1) + compressed) == value


def test_terms_of_other_versions():
    for tag in (b"\x64\x00\x02", b"\x73\x02", b"\x76\x00\x02", b"\x77\x02"):
        assert oracle.decode(b"\x83" + tag + b"ok") == oracle.Atom("ok")
    for broken in (
        b"",
        b"\x83",
        b"\x82\x6a",
        b"\x83\x6a\x6a",
        b"\x83\x6c\xff\xff\xff\xff",
        b"\x83\x6d\x00\x00\x00\x05abc",
    ):
        with pytest.raises(oracle.TermError):
            oracle.decode(broken)


def test_a_written_message_has_the_overhead_that_was_measured():
    """163 bytes with the default vhost and exchange, a routing key of two bytes and the delivery mode alone (section 5)."""
    assert len(oracle.message_term(b"x" * 12, bytes(16), routing_keys=[b"q1"])) == 12 + 163


@pytest.mark.parametrize("case", ["01-kill9-journal-only", "12-clean-msgstore"])
def test_a_message_is_written_as_the_node_wrote_it(read, case):
    (queue,) = read(case).queues.values()
    assert queue.entries
    for one in queue.entries:
        message = one.message
        assert one.term == oracle.message_term(
            message.body,
            message.msg_id,
            properties=oracle.decode(one.term)[3][3],
            routing_keys=message.routing_keys,
            vhost=message.vhost,
            exchange=message.exchange,
        )
