"""The queue index, version 1: what is read of a real node's directories, and bytes that are a real node's.

Owns the golden cases (read, and replayed byte for byte), every cell of the merge table, recovery clean and dirty, the
three reasons to flush, and what is refused.  Random histories, crashes and damage are in test_rabbitmq_queue_index_faults.
Expected bytes come from real files or from `classic_queue_oracle`, never from rmqstore.
"""

from __future__ import annotations

import errno
import fcntl
import os

import classic_queue_oracle as oracle
import golden_rabbitmq
import numpy as np
import pytest

from rmqstore.errors import (
    CorruptionError,
    GeometryError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreLockedError,
    StorePoisonedError,
)
from rmqstore.rabbitmq import index_directory, queue_index
from rmqstore.rabbitmq._core import ENTRY_ACK, ENTRY_DELIVER
from rmqstore.rabbitmq.index_directory import read_segment
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.queue_index import QueueIndex

COUNT = 16


def publish_of(seq: int, body: bytes | None = None, *, persistent: bool = True, stored: bool = False, expiry: int = 0):
    """A publish as the oracle has it; the id follows from the number."""
    body = b"body-%d" % seq if body is None else body
    msg_id = b"ID" + seq.to_bytes(14, "big")
    term = b"" if stored else oracle.message_term(body, msg_id, persistent=persistent)
    return oracle.Publish(seq, msg_id, expiry, len(body), persistent, term)


def put(index: QueueIndex, pub: oracle.Publish, *, deliver: bool = True) -> None:
    """Publish into the index what the oracle says."""
    seq = index.publish(
        msg_id=pub.msg_id,
        message=pub.term or None,
        size=pub.size,
        expiry_us=pub.expiry,
        persistent=pub.persistent,
        seq_id=pub.seq,
    )
    assert seq == pub.seq
    if deliver:
        index.deliver([seq])


def files_of(path) -> dict[str, bytes]:
    """The index files of a directory."""
    return {
        name: (path / name).read_bytes() for name in sorted(os.listdir(path)) if name.endswith((".idx", "journal.jif"))
    }


def write_files(path, files: dict[str, bytes]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)


def kinds(index: QueueIndex) -> set[str]:
    return {problem.kind for problem in index.problems}


@pytest.fixture
def queue(tmp_path):
    path = tmp_path / "queues" / "Q"
    path.mkdir(parents=True)
    return path


# ------------------------------------------------------------------------------------------------------ golden cases

QUEUES = [
    (case, queue, entry["dir"])
    for case in golden_rabbitmq.cases()
    for queue, entry in golden_rabbitmq.manifest(case)["queues"].items()
    if "expect_live_seqs" in entry and case != "19-clean-v2"
]


@pytest.mark.parametrize(("case", "queue", "directory"), QUEUES)
def test_reads_what_a_node_left(golden_vhost, case, queue, directory):
    path = golden_vhost(case) / "queues" / directory
    if not path.exists():
        pytest.skip("a queue that was never written has no directory")
    states, crashes = oracle.load_index(files_of(path), golden_rabbitmq.manifest(case)["segment_entry_count"])
    assert not crashes
    expected = {seq: state for seq, state in states.items() if state.pub is not None and not state.acked}
    live = set(golden_rabbitmq.seqs(golden_rabbitmq.manifest(case)["queues"][queue]["expect_live_seqs"]))
    with QueueIndex.open(path, read_only=True) as index:
        assert index.problems == []
        entries = list(index)
        columns = index.columns()
        assert {entry.seq_id for entry in entries if entry.persistent} == live
        assert index.depth == len(entries) == len(columns.seq_id)
        assert sum(index.segments.values()) == len(entries)
        for entry in entries:
            pub = expected[entry.seq_id].pub
            assert (entry.msg_id, entry.expiry_us, entry.size, entry.persistent, entry.message or b"") == pub[1:]
            assert entry.marked == expected[entry.seq_id].delivered
            assert entry.expiry == (pub.expiry // 1000 or None)
        assert columns.seq_id.tolist() == sorted(expected)
        assert columns.expiry_us.tolist() == [expected[seq].pub.expiry for seq in sorted(expected)]
        assert [row.tobytes() for row in columns.msg_id] == [expected[seq].pub.msg_id for seq in sorted(expected)]
        assert [row.tobytes() for row in index.references()] == [
            state.pub.msg_id for _, state in sorted(expected.items()) if state.pub.persistent and not state.pub.term
        ]


def replayed(tmp_path, golden, case: str, queue: str):
    """An index for writing, what the node had published, and the bytes that its files must become."""
    entry = golden_rabbitmq.manifest(case)["queues"][queue]
    path = golden / "queues" / entry["dir"]
    files = files_of(path)
    count = golden_rabbitmq.manifest(case)["segment_entry_count"]
    states, _ = oracle.load_index(files, count)
    records = oracle.parse_journal(files["journal.jif"]).records
    pubs = {seq: state.pub for seq, state in states.items()}
    pubs |= {record.seq: record.pub for record in records if record.pub is not None}
    ours = tmp_path / "ours"
    ours.mkdir()
    return QueueIndex.open(ours, segment_entry_count=count), pubs, files, ours


def invented(seq: int) -> oracle.Publish:
    """A message that was published and acked and of which the node left nothing."""
    return publish_of(seq, b"gone")


def test_replay_of_journal_only(tmp_path, golden_vhost):
    index, pubs, files, ours = replayed(tmp_path, golden_vhost("01-kill9-journal-only"), "01-kill9-journal-only", "q")
    for seq in [*range(20), 21]:
        put(index, pubs[seq])
    index.ack([0, 1, 3])
    for seq in (22, 23):
        put(index, pubs[seq])
    index.sync()
    assert files_of(ours) == files
    index.abandon()


def test_replay_of_segment_plus_journal(tmp_path, golden_vhost):
    case = "02-kill9-segment-plus-journal"
    index, pubs, files, ours = replayed(tmp_path, golden_vhost(case), case, "q")
    for seq in range(100):
        put(index, pubs[seq])
    index.idle()
    index.ack(range(30))
    first = index.publish_many(
        [pubs[seq].term for seq in range(100, 140)],
        sizes=[pubs[seq].size for seq in range(100, 140)],
        deliver=True,
    )
    assert first == range(100, 140)
    index.sync()
    assert files_of(ours) == files
    index.abandon()


def test_replay_of_unacked_messages(tmp_path, golden_vhost):
    case = "03-kill9-consumer-unacked"
    index, pubs, files, ours = replayed(tmp_path, golden_vhost(case), case, "q")
    index.publish_many([pubs[seq].term for seq in range(50)], deliver=True)
    index.ack(range(4))
    index.sync()
    assert files_of(ours) == files
    index.abandon()


def test_replay_of_several_segments(tmp_path, golden_vhost):
    # Two flushes by the number of actions, one of them between a publish and its deliver; then a long ack of many.
    case = "06-kill9-multisegment"
    index, pubs, files, ours = replayed(tmp_path, golden_vhost(case), case, "q")
    for batch in (1, 1000, 36000):
        if batch == 1:
            for seq in range(36000):
                put(index, pubs[seq])
        else:
            for begin in range(0, 36000, batch):
                chosen = [pubs[seq] for seq in range(begin, begin + batch)]
                index.publish_many([pub.term for pub in chosen], sizes=[pub.size for pub in chosen], deliver=True)
        index.ack(np.arange(17383, -1, -1))
        index.sync()
        assert files_of(ours) == files
        index.abandon()
        for name in os.listdir(ours):
            (ours / name).unlink()
        index = QueueIndex.open(ours, segment_entry_count=16384)
    index.abandon()


def test_replay_of_small_segments(tmp_path, golden_vhost):
    # Acked before the flush: of the first segment nothing is ever written.
    case = "30-kill9-default-2048-segments"
    index, pubs, files, ours = replayed(tmp_path, golden_vhost(case), case, "q")
    index.publish_many([(pubs.get(seq) or invented(seq)).term for seq in range(7000)], deliver=True)
    index.ack(range(2500))
    index.idle()
    assert files_of(ours) == files
    assert index.segments == {1: 1596, 2: 2048, 3: 856}
    index.abandon()


def test_replay_with_deleted_segments(tmp_path):
    # The history of a case that is not among the golden ones (14): 36 000 messages, long queues of acks, segments deleted.
    model, ours = oracle.IndexModel(2048), tmp_path / "ours"
    ours.mkdir()
    index = QueueIndex.open(ours, segment_entry_count=2048)
    acked = 0
    for begin in range(0, 36000, 500):
        # In a store, which makes them quicker to put together here.
        pubs = [publish_of(seq, stored=True) for seq in range(begin, begin + 500)]
        for pub in pubs:
            model.enqueue(pub)
        index.publish_many(msg_ids=[pub.msg_id for pub in pubs], sizes=[pub.size for pub in pubs], deliver=True)
        if begin % 3000 == 2500:
            chosen = range(acked, acked + 2000)
            acked += 2000
            model.ack(chosen[::-1])
            index.ack(chosen[::-1])
    model.flush()
    index.flush()
    assert files_of(ours) == model.files()
    assert 0 not in index.segments and index.depth == 36000 - acked
    index.abandon()


def test_segments_are_asked_for_before_they_are_read(tmp_path, monkeypatch):
    index = QueueIndex.open(tmp_path, segment_entry_count=8)
    index.publish_many(msg_ids=[publish_of(seq, stored=True).msg_id for seq in range(80)], sizes=[4] * 80)
    index.flush()
    index.abandon()
    asked, mapped = [], []
    map_present = index_directory.map_present

    def watched(path):
        name = os.path.basename(path)
        mapped.append(name)
        assert asked == [f"{number}.idx" for number in range(min(len(mapped) + 4, 10))]
        return map_present(path)

    monkeypatch.setattr(index_directory, "read_ahead", lambda path: asked.append(os.path.basename(path)))
    monkeypatch.setattr(index_directory, "map_present", watched)
    QueueIndex.open(tmp_path, segment_entry_count=8, read_only=True).close()
    assert mapped == [f"{number}.idx" for number in range(10)]


@pytest.mark.parametrize("case", ["11-clean-small", "12-clean-msgstore", "15-clean-ttl", "32-kill9-gc-merged-files"])
def test_entries_written_again_have_the_same_bytes(tmp_path, golden_vhost, case):
    # Expiry, stored messages and delivery marks, by what the index itself read.
    for entry in golden_rabbitmq.manifest(case)["queues"].values():
        path = golden_vhost(case) / "queues" / entry["dir"]
        ours = tmp_path / entry["dir"]
        with QueueIndex.open(path, read_only=True) as source, QueueIndex.open(ours, create=True) as index:
            for one in source:
                index.publish(
                    msg_id=one.msg_id,
                    message=one.message,
                    size=one.size,
                    expiry_us=one.expiry_us,
                    persistent=one.persistent,
                    seq_id=one.seq_id,
                )
                index.deliver(one.seq_id)
            index.flush()
        states = oracle.segment_map(oracle.parse_segment((path / "0.idx").read_bytes(), 0, 16384).records)
        if not any(state.acked for state in states.values()):
            assert sorted(files_of(ours)) == sorted(files_of(path))
            kept = sorted(oracle.parse_segment((path / "0.idx").read_bytes(), 0, 16384).records, key=lambda r: r[:2])
            made = sorted(oracle.parse_segment((ours / "0.idx").read_bytes(), 0, 16384).records, key=lambda r: r[:2])
            assert [r.pub for r in kept] == [r.pub for r in made]
            assert len((ours / "0.idx").read_bytes()) == len((path / "0.idx").read_bytes())


def test_the_count_comes_from_the_config(golden_vhost, golden_vhost_copy):
    vhost = golden_vhost("30-kill9-default-2048-segments")
    (directory,) = os.listdir(vhost / "queues")
    with QueueIndex.open(vhost / "queues" / directory, read_only=True) as index:
        assert index.segment_entry_count == 2048
        assert index.next_seq_id == index.next_deliver_seq_id == 8192
        assert all(entry.delivered for entry in index)
    copy = golden_vhost_copy("02-kill9-segment-plus-journal")
    (directory,) = os.listdir(copy / "queues")
    (copy / ".config").unlink(missing_ok=True)
    with QueueIndex.open(copy / "queues" / directory, read_only=True) as index:
        assert index.segment_entry_count == 16384
    (copy / ".config").write_bytes(b"{segment_entry_count, 16}.")
    with QueueIndex.open(copy / "queues" / directory, read_only=True) as index:
        assert "rel_out_of_range" in kinds(index)
    for bad in (b"{segment_entry_count, 16385}.", b"{segment_entry_count, 0}."):
        (copy / ".config").write_bytes(bad)
        with pytest.raises(GeometryError):
            QueueIndex.open(copy / "queues" / directory, read_only=True)
    with pytest.raises(GeometryError):
        QueueIndex.open(copy / "queues" / directory, segment_entry_count=20000, read_only=True)


# --------------------------------------------------------------------------------------------------- the merge table

JOURNAL_CELLS = {
    "absent": [],
    "pub": ["pub"],
    "pub+del": ["pub", "del"],
    "del": ["del"],
    "ack": ["ack"],
    "del+ack": ["del", "ack"],
    "pub+ack": ["pub", "ack"],
    "pub+del+ack": ["pub", "del", "ack"],
    "pub+pub": ["pub", "pub"],
    "other": ["pub", "other"],
    "del+del": ["pub", "del", "del"],
    "ack+pub": ["ack", "pub"],
    "ack+del": ["ack", "del"],
    "ack+ack": ["del", "ack", "ack"],
}
SEGMENT_CELLS = {"absent": [], "pub": ["pub"], "pub+del": ["pub", "rel"], "pub+del+ack": ["pub", "rel", "rel"]}
#: What the real node crashes on, and how we call it; the rest it takes in silence.
CRASHES = {
    ("pub", "pub+del"): "duplicate_publish",
    ("pub", "pub+del+ack"): "duplicate_publish",
    ("pub+del", "pub+del+ack"): "duplicate_publish",
    ("del", "absent"): "deliver_without_publish",
    ("del", "pub+del+ack"): "deliver_after_ack",
    ("ack", "pub"): "ack_without_deliver",
}
CRASHES_ALONE = {
    "pub+ack": "ack_without_deliver",
    "pub+pub": "duplicate_publish",
    "other": "different_publish",
    "del+del": "duplicate_deliver",
    "ack+pub": "publish_after_ack",
    "ack+del": "deliver_after_ack",
    "ack+ack": "third_mark",
}


@pytest.mark.parametrize("journal_cell", JOURNAL_CELLS)
@pytest.mark.parametrize("segment_cell", SEGMENT_CELLS)
def test_merge_table(queue, journal_cell, segment_cell):
    pub, other, bystander = publish_of(3), publish_of(3, b"another"), publish_of(5)
    journal = b"".join(
        {
            "pub": oracle.journal_publish(pub),
            "other": oracle.journal_publish(other),
            "del": oracle.journal_deliver(3),
            "ack": oracle.journal_ack(3),
        }[step]
        for step in JOURNAL_CELLS[journal_cell]
    )
    segment = b"".join(
        oracle.segment_publish(pub, COUNT) if step == "pub" else oracle.segment_mark(3, COUNT)
        for step in SEGMENT_CELLS[segment_cell]
    )
    # Another entry keeps the segment alive.
    segment += oracle.segment_publish(bystander, COUNT) + oracle.segment_mark(5, COUNT)
    files = {"journal.jif": journal, "0.idx": segment}
    write_files(queue, files)
    states, crashes = oracle.load_index(files, COUNT)
    state = states.get(3, oracle.NOTHING)
    live = state.pub is not None and not state.acked
    expected = set()
    if journal_cell in CRASHES_ALONE:
        expected.add(CRASHES_ALONE[journal_cell])
    expected |= {CRASHES[cell] for cell in [(journal_cell, segment_cell)] if cell in CRASHES}

    with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True) as index:
        entries = {entry.seq_id: entry for entry in index}
        assert (3 in entries, 5 in entries, index.depth) == (live, True, 1 + live)
        if live:
            assert (entries[3].message, entries[3].marked) == (pub.term, state.delivered)
        assert expected <= kinds(index)
        assert bool(crashes) == bool(index.problems)
        for problem in index.problems:
            assert problem.seq_id == 3 and problem.path == str(queue / "journal.jif") and problem.detail
    assert files_of(queue) == files

    # For writing the same, and afterwards a node has nothing to crash on.
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert {entry.seq_id for entry in index} == set(entries)
    states, crashes = oracle.load_index(files_of(queue), COUNT)
    assert not crashes
    assert {seq for seq, s in states.items() if s.pub is not None and not s.acked} == set(entries)
    assert all(states[seq].delivered for seq in entries)


def test_a_different_publish_in_journal_and_segment(queue):
    segment = oracle.segment_publish(publish_of(3), COUNT) + oracle.segment_mark(3, COUNT)
    for other in (
        publish_of(3, b"BODY-3"),
        publish_of(3, persistent=False),
        publish_of(3, expiry=1),
        publish_of(3, stored=True),
        publish_of(3)._replace(msg_id=b"x" * 16, term=b""),
        publish_of(3)._replace(size=7),
    ):
        write_files(queue, {"0.idx": segment, "journal.jif": oracle.journal_publish(other) + oracle.journal_deliver(3)})
        with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True) as index:
            assert kinds(index) == {"different_publish"}
            assert [entry.message for entry in index] == [publish_of(3).term]
        # Both are whole, and a writer would empty the journal of one.
        before = files_of(queue)
        with pytest.raises(CorruptionError, match="rmqstore rabbitmq repair"):
            QueueIndex.open(queue, segment_entry_count=COUNT)
        assert files_of(queue) == before


@pytest.mark.parametrize("check_terms", [True, False])
def test_of_two_different_publishes_the_whole_one_counts(queue, check_terms):
    whole, other = publish_of(3), publish_of(3, b"another")
    wrong = {
        "bad_term": other._replace(term=b"\x83" + other.term[1:-9] + b"\x07" * 9),
        "msg_id_mismatch": other._replace(msg_id=b"?" * 16),
        "torn_record": whole._replace(msg_id=whole.msg_id[:9] + bytes(7), size=0, term=b""),
    }
    after = oracle.segment_publish(publish_of(2), COUNT) + oracle.segment_mark(2, COUNT)
    journal = oracle.journal_publish(whole) + oracle.journal_deliver(3)
    for kind, pub in wrong.items():
        for marks in range(3):
            segment = oracle.segment_publish(pub, COUNT) + oracle.segment_mark(3, COUNT) * marks + after
            write_files(queue, {"0.idx": segment, "journal.jif": journal})
            with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True, check_terms=check_terms) as index:
                # Its ack is whole.
                live = [publish_of(2).term] + [whole.term] * (marks < 2)
                assert [entry.message for entry in index] == live and index.depth == len(live), (kind, marks)
                assert kinds(index) == {kind} and all(entry.marked for entry in index)
                assert [(each.path, each.pos, each.seq_id) for each in index.problems] == [(str(queue / "0.idx"), 0, 3)]
            before = files_of(queue)
            with pytest.raises(CorruptionError, match=kind):
                QueueIndex.open(queue, segment_entry_count=COUNT, check_terms=check_terms)
            assert files_of(queue) == before
    # If the journal's is not whole either, the segment's stays.
    both, journal = wrong["bad_term"], oracle.journal_publish(wrong["msg_id_mismatch"])
    write_files(queue, {"0.idx": oracle.segment_publish(both, COUNT), "journal.jif": journal})
    with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True, check_terms=False) as index:
        assert [entry.message for entry in index] == [both.term] and kinds(index) == {"different_publish"}


@pytest.mark.parametrize("marks", [1, 2])
def test_a_mark_whose_publish_is_gone_hides_no_publish_of_the_journal(queue, marks):
    # It counted in the depth and was given by no reader.
    stored = publish_of(4, stored=True)
    segment = b"".join(oracle.segment_mark(seq, COUNT) * marks for seq in (3, 4))
    segment += oracle.segment_publish(publish_of(5), COUNT)
    journal = b"".join(oracle.journal_publish(pub) + oracle.journal_deliver(pub.seq) for pub in (publish_of(3), stored))
    write_files(queue, {"0.idx": segment, "journal.jif": journal})
    with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True) as index:
        assert [(entry.seq_id, entry.msg_id) for entry in index] == [(seq, publish_of(seq).msg_id) for seq in (3, 4, 5)]
        assert index.depth == 3 and index.references().tobytes() == stored.msg_id
        assert kinds(index) == set(("deliver_without_publish", "ack_without_publish")[:marks])
    with pytest.raises(CorruptionError, match="rmqstore rabbitmq repair"):
        QueueIndex.open(queue, segment_entry_count=COUNT)


# ----------------------------------------------------------------------------------------------------------- recovery


def test_dirty_recovery_acts_as_a_node(queue):
    pubs = {seq: publish_of(seq) for seq in range(8)}
    pubs[1] = publish_of(1, persistent=False)
    pubs[2] = publish_of(2, stored=True)
    pubs[3] = publish_of(3, stored=True)
    pubs[4] = publish_of(4, persistent=False, stored=True)
    delivered = {0, 1, 3, 6}
    segment = b"".join(
        oracle.segment_publish(pubs[seq], COUNT) + (oracle.segment_mark(seq, COUNT) if seq in delivered else b"")
        for seq in range(6)
    )
    journal = b"".join(
        oracle.journal_publish(pubs[seq]) + (oracle.journal_deliver(seq) if seq in delivered else b"") for seq in (6, 7)
    )
    write_files(queue, {"0.idx": segment, "journal.jif": journal})
    asked = []
    with QueueIndex.open(
        queue, segment_entry_count=COUNT, is_stored=lambda msg_id: asked.append(msg_id) or msg_id == pubs[2].msg_id
    ) as index:
        assert sorted(asked) == [pubs[seq].msg_id for seq in (2, 3, 4)]
        assert [entry.seq_id for entry in index] == [0, 2, 5, 6, 7]
        assert all(entry.delivered and entry.marked for entry in index)
        assert (index.next_seq_id, index.next_deliver_seq_id, index.journal_size) == (COUNT, COUNT, 0)
        assert not index.recovered_clean
    # One blob, from the highest id down: what was missing.
    added = b""
    for seq, marks in ((7, 1), (6, 1), (5, 1), (4, 2), (3, 1), (2, 1), (1, 1)):
        if seq in (6, 7):
            added += oracle.segment_publish(pubs[seq], COUNT)
        added += oracle.segment_mark(seq, COUNT) * marks
    assert files_of(queue) == {"0.idx": segment + added, "journal.jif": b""}


def test_dirty_recovery_of_nothing_starts_at_zero(queue):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert (index.next_seq_id, index.depth, index.segments) == (0, 0, {})
    # A segment without unacked entries goes; its number is not counted.
    pub = publish_of(COUNT * 3)
    write_files(queue, {"3.idx": oracle.segment_publish(pub, COUNT) + oracle.segment_mark(COUNT * 3, COUNT) * 2})
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert (index.next_seq_id, index.segments) == (0, {})
    assert files_of(queue) == {"journal.jif": b""}


def clean_terms(**changed):
    terms = {
        "segments": [(0, 3)],
        "next_seq_id": 9,
        "next_deliver_seq_id": 4,
        "persistent_ref": b"R" * 16,
        "persistent_count": 3,
        "persistent_bytes": 18,
    }
    return {**terms, **changed}


@pytest.fixture
def three(queue):
    """Entries 1, 3 and 5: 1 and 3 in a segment, 3 without its deliver, 5 in the journal."""
    segment = oracle.segment_publish(publish_of(1), COUNT) + oracle.segment_mark(1, COUNT)
    segment += oracle.segment_publish(publish_of(3), COUNT)
    journal = oracle.journal_publish(publish_of(5)) + oracle.journal_deliver(5)
    write_files(queue, {"0.idx": segment, "journal.jif": journal})
    return queue


@pytest.mark.parametrize("form", [dict, lambda terms: list(terms.items())])
def test_clean_queue(three, form):
    before = files_of(three)
    terms = form(clean_terms())
    with QueueIndex.open(three, segment_entry_count=COUNT, terms=terms, read_only=True) as index:
        assert index.recovered_clean
        assert [(entry.seq_id, entry.delivered, entry.marked) for entry in index] == [
            (1, True, True),
            (3, True, False),
            (5, False, True),
        ]
        assert (index.next_seq_id, index.next_deliver_seq_id, index.problems) == (9, 4, [])
        assert index.close() is None
    index = QueueIndex.open(three, segment_entry_count=COUNT, terms=terms)
    # Nothing was flushed: a clean queue goes on where it was.
    assert (files_of(three), index.dirty_count, index.journal_size) == (before, 2, len(before["journal.jif"]))
    index.deliver(3)
    index.next_deliver_seq_id = 6
    assert index.publish(message=publish_of(9).term) == 9
    assert index.close() == clean_terms(
        segments=[(0, 4)], next_seq_id=10, next_deliver_seq_id=6, persistent_count=4, persistent_bytes=24
    )
    assert files_of(three)["journal.jif"] == before["journal.jif"] + oracle.journal_deliver(3) + oracle.journal_publish(
        publish_of(9)
    )


def test_half_clean_queue(three):
    with QueueIndex.open(three, segment_entry_count=COUNT, terms=clean_terms(), store_clean=False) as index:
        assert not index.recovered_clean
        assert (index.next_seq_id, index.next_deliver_seq_id) == (9, 4)
        assert [(entry.seq_id, entry.marked) for entry in index] == [(1, True), (3, False), (5, True)]
        assert index.journal_size == 0


@pytest.mark.parametrize(
    ("changed", "kind", "next_seq_id"),
    [
        ({"segments": [(0, 2)]}, "segment_count_mismatch", 9),
        ({"segments": [(0, 3), (4, 1)]}, "segment_count_mismatch", 9),
        ({"next_seq_id": 5}, "next_seq_id_too_low", 6),
        ({"next_seq_id": -1}, "bad_terms", COUNT),
        ({"segments": 7}, "bad_terms", COUNT),
        ({"segments": [(1,)]}, "bad_terms", COUNT),
        ({"next_deliver_seq_id": None}, "bad_terms", COUNT),
    ],
)
def test_terms_that_do_not_fit(three, changed, kind, next_seq_id):
    for read_only in (True, False):
        with QueueIndex.open(
            three, segment_entry_count=COUNT, terms=clean_terms(**changed), read_only=read_only
        ) as index:
            if read_only:
                assert kind in kinds(index)
            assert index.depth == 3 and index.next_seq_id == next_seq_id


def test_an_overlap_is_flushed_before_more_is_appended(three):
    # A crash between append and truncate: without the flush, an ack would cancel the journal's copy and the segment's stay.
    segment = (three / "0.idx").read_bytes()
    segment += oracle.segment_publish(publish_of(5), COUNT) + oracle.segment_mark(5, COUNT)
    (three / "0.idx").write_bytes(segment)
    with QueueIndex.open(three, segment_entry_count=COUNT, terms=clean_terms()) as index:
        assert index.journal_size == 0 and files_of(three) == {"0.idx": segment, "journal.jif": b""}
        index.ack(5)
    with QueueIndex.open(three, segment_entry_count=COUNT, read_only=True) as index:
        assert [entry.seq_id for entry in index] == [1, 3]


# ---------------------------------------------------------------------------------------------------------- flushing


def test_flush_by_actions(queue):
    model = oracle.IndexModel(COUNT, 10)
    with QueueIndex.open(queue, segment_entry_count=COUNT, max_journal_entries=10) as index:
        for seq in range(5):
            model.enqueue(publish_of(seq))
            put(index, publish_of(seq))
        # Ten actions are not more than ten.
        assert index.dirty_count == 10 and "0.idx" not in files_of(queue)
        # The batch is tested once, after all of it.
        model.ack(range(5))
        index.ack(range(5))
        assert index.dirty_count == 0 and index.depth == 0
        for seq in range(5, 11):
            model.enqueue(publish_of(seq))
            put(index, publish_of(seq))
        # The eleventh action was the sixth publish: its deliver is the first of the next round.
        assert (index.dirty_count, index.journal_size) == (1, 8) == (model.dirty_count, len(model.journal))
        index.sync()
        assert files_of(queue) == model.files()


def test_flush_by_bytes(queue, monkeypatch):
    monkeypatch.setattr(queue_index, "_MAX_JOURNAL_SIZE", 1000)
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        put(index, publish_of(0, b"x" * 700))
        assert index.journal_size > 700 and not index.segments == {}
        put(index, publish_of(1, b"x" * 700))
        assert index.journal_size == 8  # The second publish was over the limit; its deliver came after.
        assert [entry.seq_id for entry in index] == [0, 1]


def test_nothing_reaches_the_file_before_sync(queue):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        put(index, publish_of(0))
        assert files_of(queue) == {"journal.jif": b""}
        index.sync()
        first = oracle.journal_publish(publish_of(0)) + oracle.journal_deliver(0)
        assert files_of(queue) == {"journal.jif": first}
        index.ack(0)
        index.sync()
        index.sync()
        assert files_of(queue) == {"journal.jif": first + oracle.journal_ack(0)}
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert index.depth == 0
    assert files_of(queue) == {"journal.jif": b""}


def test_abandon_loses_what_was_not_synced(queue):
    index = QueueIndex.open(queue, segment_entry_count=COUNT)
    put(index, publish_of(0))
    index.sync()
    put(index, publish_of(1))
    index.abandon()
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert [entry.seq_id for entry in index] == [0]


# --------------------------------------------------------------------------------------- publishing in all its forms


def test_forms_of_publishing_write_the_same(tmp_path):
    pubs = [publish_of(seq, expiry=(seq % 3) * 1000, persistent=seq % 4 != 3) for seq in range(20)]
    pubs += [publish_of(seq, stored=True) for seq in range(20, 24)]
    written = []
    for form in range(4):
        path = tmp_path / str(form)
        index = QueueIndex.open(path, create=True, segment_entry_count=COUNT, max_journal_entries=12)
        if form == 0:
            for pub in pubs:
                put(index, pub)
        else:
            embedded, stored = pubs[:20], pubs[20:]
            terms = [pub.term for pub in embedded]
            sizes = None if form == 1 else np.array([pub.size for pub in embedded], np.uint32)
            ids = [pub.msg_id for pub in embedded] if form == 2 else None
            flags = None if form == 1 else [pub.persistent for pub in embedded]
            expiries = [pub.expiry // 1000 or None for pub in embedded]
            answer = index.publish_many(
                terms, msg_ids=ids, sizes=sizes, expiries=expiries, persistent=flags, deliver=True
            )
            assert answer == range(20)
            ids = np.frombuffer(b"".join(pub.msg_id for pub in stored), np.uint8).reshape(-1, 16)
            assert index.publish_many(msg_ids=ids, sizes=[pub.size for pub in stored], deliver=True) == range(20, 24)
        index.sync()
        written.append(files_of(path))
        index.close()
    model = oracle.IndexModel(COUNT, 12)
    for pub in pubs:
        model.enqueue(pub)
    assert written == [model.files()] * 4


def test_batches_of_nothing(queue):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert index.publish_many([]) == range(0)
        assert index.publish_many(msg_ids=np.empty((0, 16), np.uint8), sizes=[]) == range(0)
        for empty in ([], range(0), np.empty(0, np.int64), iter(())):
            index.ack(empty)
            index.deliver(empty)
        assert index.dirty_count == 0 and list(index) == [] and len(index.columns().seq_id) == 0
        assert index.references().shape == (0, 16)


TERM = publish_of(0).term
BAD_PUBLISHES = [
    {},
    {"msg_id": b"x" * 16},
    {"size": 3},
    {"msg_id": b"x" * 15, "size": 3},
    {"msg_id": b"x" * 16, "size": -1},
    {"msg_id": b"x" * 16, "size": 1 << 32},
    {"msg_id": b"x" * 16, "size": 1 << 70},
    {"msg_id": b"x" * 16, "size": 1.5},
    {"msg_id": b"x" * 16, "size": 3, "expiry": -5},
    {"msg_id": b"x" * 16, "size": 3, "expiry": 1 << 62},
    {"msg_id": b"x" * 16, "size": 3, "expiry_us": -1},
    {"msg_id": b"x" * 16, "size": 3, "expiry_us": 1 << 64},
    {"msg_id": b"x" * 16, "size": 3, "seq_id": -1},
    {"msg_id": b"x" * 16, "size": 3, "seq_id": 1 << 62},
    {"msg_id": b"x" * 16, "message": TERM},
    {"message": TERM[:-1]},
    {"message": TERM + b"\0"},
    {"message": b""},
    {"message": b"\x83"},
    {"message": b"\x83a\x01"},
    {"message": b"\x83h\xff\xff"},
]


@pytest.mark.parametrize("arguments", BAD_PUBLISHES, ids=str)
def test_a_publish_that_cannot_be_changes_nothing(queue, arguments):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        with pytest.raises(InvalidMessageError):
            index.publish(**arguments)
        assert (index.depth, index.dirty_count, index.journal_size, index.next_seq_id) == (0, 0, 0, 0)
        put(index, publish_of(0))


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": [TERM, TERM[:-2]]},
        {"messages": [TERM], "msg_ids": []},
        {"messages": [TERM], "sizes": [1, 2]},
        {"messages": [TERM], "persistent": [True, False]},
        {"messages": [TERM], "expiries": [None, None]},
        {"msg_ids": np.zeros((2, 15), np.uint8), "sizes": [1, 2]},
        {"msg_ids": np.zeros((2, 16), np.int8), "sizes": [1, 2]},
        {"msg_ids": np.zeros((2, 16), np.uint8), "sizes": [1]},
    ],
)
def test_a_batch_that_cannot_be_changes_nothing(queue, arguments):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        with pytest.raises(InvalidMessageError):
            index.publish_many(**arguments)
        assert (index.depth, index.dirty_count, index.journal_size, index.next_seq_id) == (0, 0, 0, 0)


def test_marks_that_cannot_be_change_nothing(queue):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        index.publish_many([publish_of(seq).term for seq in range(6)])
        index.deliver(range(4))
        index.flush()
        index.deliver(4)
        index.ack([0, 4])
        before = (index.depth, index.dirty_count, index.journal_size, index.segments, index.columns(live=False))
        for seqs, refused in (
            ([1, 2, 6], OffsetOutOfRangeError),
            ([1, 2, -1], OffsetOutOfRangeError),
            ([1, 1], OffsetOutOfRangeError),
            ([2, 5], InvalidMessageError),
            ([2, 0], OffsetOutOfRangeError),
            ([2, 4], OffsetOutOfRangeError),
            ([1 << 62], OffsetOutOfRangeError),
            ([1 << 80], OffsetOutOfRangeError),
            ([1.0], OffsetOutOfRangeError),
            (np.zeros((2, 2), np.int64), OffsetOutOfRangeError),
        ):
            with pytest.raises(refused):
                index.ack(seqs)
        for seqs, refused in (
            ([5, 1], InvalidMessageError),
            ([5, 5], InvalidMessageError),
            ([5, 0], OffsetOutOfRangeError),
        ):
            with pytest.raises(refused):
                index.deliver(seqs)
        after = (index.depth, index.dirty_count, index.journal_size, index.segments, index.columns(live=False))
        assert before[:4] == after[:4]
        assert all(np.array_equal(a, b) for a, b in zip(before[4], after[4], strict=True))
        with pytest.raises(InvalidMessageError, match="5 is in use"):
            index.publish(message=publish_of(5).term, seq_id=5)
        index.ack(np.array([3, 1], np.uint16))
        assert [entry.seq_id for entry in index] == [2, 5]


def test_high_and_scattered_ids(queue):
    seqs = [0, 5, 1_000_000, (1 << 40) + 3, (1 << 62) - 1]
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        for seq in seqs:
            put(index, publish_of(seq))
        with pytest.raises(InvalidMessageError):
            index.publish(message=TERM)
        assert [entry.seq_id for entry in index] == seqs
        index.sync()
    assert [record.seq for record in oracle.parse_journal((queue / "journal.jif").read_bytes()).records[::2]] == seqs
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert [entry.seq_id for entry in index] == seqs
        assert index.next_seq_id == 1 << 62
        with pytest.raises(InvalidMessageError):
            index.publish(message=TERM)
        index.ack(seqs[1:])
        index.flush()
    assert sorted(files_of(queue)) == ["0.idx", "journal.jif"]


# ------------------------------------------------------------------------------------------- who may do what, and when


def test_read_only_changes_and_locks_nothing(three):
    with open(three / "0.idx", "ab") as file:
        file.write(b"\xc0")
    before = {name: (data, os.stat(three / name).st_mtime_ns) for name, data in files_of(three).items()}
    os.chmod(three, 0o500)
    try:
        with (
            QueueIndex.open(three, segment_entry_count=COUNT, read_only=True) as index,
            QueueIndex.open(three, segment_entry_count=COUNT, read_only=True),
        ):
            fd = os.open(three, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
            assert index.depth == 3 and kinds(index) == {"torn_record"}
            for call in (
                lambda: index.publish(message=TERM),
                lambda: index.deliver(1),
                lambda: index.ack(1),
                index.flush,
                index.idle,
                index.sync,
                lambda: setattr(index, "next_deliver_seq_id", 1),
            ):
                with pytest.raises(ReadOnlyError):
                    call()
    finally:
        os.chmod(three, 0o700)
    assert {name: (data, os.stat(three / name).st_mtime_ns) for name, data in files_of(three).items()} == before


def test_one_writer(queue):
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        put(index, publish_of(0))
        with pytest.raises(StoreLockedError):
            QueueIndex.open(queue, segment_entry_count=COUNT)
        index.sync()
        with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True) as reader:
            assert reader.depth == 1
        assert sorted(os.listdir(queue)) == ["journal.jif"]
    QueueIndex.open(queue, segment_entry_count=COUNT).close()


def test_after_close(queue):
    index = QueueIndex.open(queue, segment_entry_count=COUNT)
    put(index, publish_of(0))
    entries = iter(index)
    assert index.close()["segments"] == [(0, 1)]
    assert index.close() is None and index.closed
    for call in (
        lambda: index.publish(message=TERM),
        lambda: index.ack(0),
        index.flush,
        index.sync,
        index.columns,
        index.references,
        lambda: next(iter(index)),
        lambda: next(entries),
    ):
        with pytest.raises(StoreClosedError):
            call()
    index.abandon()


def test_a_directory_that_is_not_there(tmp_path):
    for read_only in (True, False):
        with pytest.raises(FileNotFoundError):
            QueueIndex.open(tmp_path / "none", read_only=read_only, segment_entry_count=COUNT)
    with pytest.raises(FileNotFoundError):
        QueueIndex.open(tmp_path / "none", read_only=True, create=True, segment_entry_count=COUNT)
    QueueIndex.open(tmp_path / "some" / "more", create=True, segment_entry_count=COUNT).close()
    with pytest.raises(NotADirectoryError):
        QueueIndex.open(tmp_path / "some" / "more" / "journal.jif", segment_entry_count=COUNT)


def test_somebody_else_writes(three):
    index = QueueIndex.open(three, segment_entry_count=COUNT, terms=clean_terms())
    with open(three / "0.idx", "ab") as file:
        file.write(b"\x40\x03")
    index.ack(1)
    before = files_of(three)
    with pytest.raises(StoreChangedError):
        index.flush()
    assert files_of(three)["0.idx"] == before["0.idx"]
    assert files_of(three)["journal.jif"] == before["journal.jif"] + oracle.journal_ack(1)
    with pytest.raises(StorePoisonedError):
        index.ack(5)
    assert [entry.seq_id for entry in index] == [3, 5]
    os.truncate(three / "0.idx", 10)
    with pytest.raises(StoreChangedError):
        list(index)
    with pytest.raises(StorePoisonedError):
        index.close()
    assert index.closed


@pytest.mark.parametrize("name", ["pwrite", "fsync", "write", "ftruncate", "unlink"])
def test_a_failed_call_poisons(three, monkeypatch, name):
    index = QueueIndex.open(three, segment_entry_count=COUNT, terms=clean_terms())
    put(index, publish_of(40))
    index.sync()
    index.ack([1, 40])
    put(index, publish_of(9))
    before = files_of(three)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(queue_index.os, name, fail)
        if name == "unlink":
            index.flush()  # There is no file to be deleted.
            return index.abandon()
        with pytest.raises(OSError, match=str(three)) as caught:
            index.sync() if name in ("pwrite", "fsync") else index.flush()
        assert caught.value.errno == errno.ENOSPC
    assert [entry.seq_id for entry in index] == [3, 5, 9]
    for call in (lambda: put(index, publish_of(10)), lambda: index.ack(5), index.sync, index.flush, index.idle):
        with pytest.raises(StorePoisonedError, match="No space left"):
            call()
    with pytest.raises(StorePoisonedError):
        index.close()
    if name in ("write", "pwrite"):
        after = files_of(three)
        assert {key: after[key] for key in before if key != "journal.jif"} == {
            key: before[key] for key in before if key != "journal.jif"
        }
    with QueueIndex.open(three, segment_entry_count=COUNT) as index:
        assert {1, 3, 5} - {1} <= {entry.seq_id for entry in index}
    assert not oracle.load_index(files_of(three), COUNT)[1]


# ------------------------------------------------------------------------------------------------ pieces for other tools


def test_read_segment(three):
    columns, problems = read_segment(three / "0.idx", COUNT)
    assert problems == [] and columns.seq_id.tolist() == [1, 3]
    assert (columns.flags & ENTRY_DELIVER).tolist() == [ENTRY_DELIVER, 0] and not (columns.flags & ENTRY_ACK).any()
    assert [int(pos) for pos in columns.pos] == [0, len(oracle.segment_publish(publish_of(1), COUNT)) + 2]
    data = (three / "0.idx").read_bytes()
    for row in range(2):
        begin = int(columns.term_pos[row])
        assert data[begin : begin + int(columns.term_size[row])] == publish_of([1, 3][row]).term
    again, problems = read_segment(data, COUNT, number=2)
    assert again.seq_id.tolist() == [33, 35] and problems == []
    (three / "7.idx").write_bytes(data)
    assert read_segment(three / "7.idx", COUNT)[0].seq_id.tolist() == [113, 115]
    assert len(read_segment(b"", COUNT)[0].seq_id) == 0
    with pytest.raises(FileNotFoundError):
        read_segment(three / "9.idx", COUNT)


def test_foreign_names(three):
    for name in ("00.idx", "x.idx", f"{1 << 62}.idx", "1.idx.tmp"):
        (three / name).write_bytes(b"\xff" * 10)
    with QueueIndex.open(three, segment_entry_count=COUNT, read_only=True) as index:
        assert sorted(os.path.basename(p.path) for p in index.problems) == ["00.idx", f"{1 << 62}.idx", "x.idx"]
        assert kinds(index) == {"bad_name"} and index.depth == 3


def test_damage_is_refused_for_writing(three):
    good = files_of(three)
    publish = oracle.segment_publish
    cases = {
        "bad_prefix": {"0.idx": b"\x00\x07" + good["0.idx"]},
        "third_mark": {"0.idx": good["0.idx"] + oracle.segment_mark(1, COUNT) * 2},
        "deliver_without_publish": {"0.idx": good["0.idx"] + oracle.segment_mark(7, COUNT)},
        "ack_without_publish": {"0.idx": good["0.idx"] + oracle.segment_mark(7, COUNT) * 2},
        "rel_out_of_range": {"0.idx": good["0.idx"] + publish(publish_of(20), 64)},
        "duplicate_publish": {"0.idx": good["0.idx"] + publish(publish_of(1), COUNT)},
        "different_publish": {"0.idx": good["0.idx"] + publish(publish_of(1, b"other"), COUNT)},
        "msg_id_mismatch": {"0.idx": good["0.idx"] + publish(publish_of(9)._replace(msg_id=b"?" * 16), COUNT)},
        "bad_term": {"0.idx": good["0.idx"] + publish(publish_of(9)._replace(term=b"\x83h\x02a\x01"), COUNT)},
        "torn_record": {"0.idx": publish(publish_of(9), COUNT)[:30] + b"\x7f\xff\xff\xff" + good["0.idx"]},
        "zero_stretch": {"journal.jif": bytes(64) + good["journal.jif"]},
    }
    for kind, files in cases.items():
        write_files(three, {**good, **files})
        before = files_of(three)
        with QueueIndex.open(three, segment_entry_count=COUNT, read_only=True) as index:
            assert kind in kinds(index), (kind, index.problems)
            assert {entry.seq_id for entry in index} == ({3, 5} if kind == "third_mark" else {1, 3, 5}), kind
        with pytest.raises(CorruptionError, match="rmqstore rabbitmq repair"):
            QueueIndex.open(three, segment_entry_count=COUNT)
        assert files_of(three) == before
        # The lock is free again.
        fd = os.open(three, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


@pytest.mark.parametrize("clean", [True, False])
def test_what_a_crash_leaves_is_cut(three, clean):
    good = files_of(three)
    tails = {
        "torn_record": oracle.segment_publish(publish_of(9, b"z" * 99), COUNT)[:-1],
        "zero_tail": bytes(1000),
    }
    for kind, tail in tails.items():
        for end in range(1, len(tail), 37):
            write_files(three, {**good, "0.idx": good["0.idx"] + tail[:end]})
            terms = clean_terms() if clean else None
            with QueueIndex.open(three, segment_entry_count=COUNT, terms=terms) as index:
                assert kinds(index) == {kind} and index.depth == 3
                assert [p.pos for p in index.problems] == [len(good["0.idx"])]
            assert not oracle.load_index(files_of(three), COUNT)[1]
    for tail in (b"\x00" * 7, oracle.journal_publish(publish_of(9))[:-1], bytes(100)):
        write_files(three, {**good, "journal.jif": good["journal.jif"] + tail})
        with QueueIndex.open(three, segment_entry_count=COUNT, terms=clean_terms() if clean else None) as index:
            assert kinds(index) <= {"torn_record", "zero_tail"} and index.depth == 3 and index.problems
            put(index, publish_of(index.next_seq_id))
        states, crashes = oracle.load_index(files_of(three), COUNT)
        assert not crashes and len(states) == 4
    write_files(three, {**good, "4.idx": bytes(5000)})
    with QueueIndex.open(three, segment_entry_count=COUNT, terms=clean_terms() if clean else None) as index:
        assert kinds(index) == {"nul_file"} and index.depth == 3
    assert "4.idx" not in files_of(three)


def test_a_deliver_never_stays_alone_in_the_journal(queue, monkeypatch):
    # Publish in a segment, deliver in the journal's file, ack in memory only: a crash right after the segment was deleted
    # must not leave the deliver without its publish, on which a node hangs.
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        put(index, publish_of(0), deliver=False)
        index.flush()
        index.deliver(0)
        index.sync()
        index.ack(0)
        seen = []
        unlink = os.unlink

        def watched(path):
            unlink(path)
            seen.append(oracle.load_index(files_of(queue), COUNT))

        monkeypatch.setattr(queue_index.os, "unlink", watched)
        index.flush()
        assert seen == [({}, [])]


# ------------------------------------------------------------------------------------------- with the package's messages


def test_messages_of_the_package(queue):
    messages = [
        Message(b"plain"),
        Message(b"lasting", properties={"delivery_mode": 2, "headers": {"n": 1}}, routing_keys=["a", "b"]),
        Message(b"", properties={"delivery_mode": 2}),
        Message(b"x" * 300_000, properties={"delivery_mode": 2}),
    ]
    # A decoded form of the properties, which only a look at the whole term tells the size of.
    pub = publish_of(9)
    content = list(oracle.decode(pub.term))
    basic = [oracle.Atom("P_basic"), *[oracle.Atom("undefined")] * 14]
    basic[4] = 2
    content[3] = (oracle.Atom("content"), 60, tuple(basic), oracle.Atom("none"), oracle.Atom("none"), [b"two", b"one "])
    decoded = oracle.encode(tuple(content))
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert index.publish_many([*messages, decoded], deliver=True) == range(5)
        for message in [*messages, decoded]:
            index.deliver(index.publish(message=message))
        index.flush()
        entries = list(index)
    assert [entry.size for entry in entries] == [5, 7, 0, 300_000, 7] * 2
    assert [entry.persistent for entry in entries] == [False, True, True, True, True] * 2
    for entry, message in zip(entries, [*messages, Message.from_term(decoded)] * 2):
        assert entry.msg_id == message.msg_id and Message.from_term(entry.message).body == message.body
    with QueueIndex.open(queue, segment_entry_count=COUNT, read_only=True) as index:
        assert index.problems == [] and index.depth == 10
        # A dirty recovery drops transient messages.
    with QueueIndex.open(queue, segment_entry_count=COUNT) as index:
        assert [entry.seq_id for entry in index] == [1, 2, 3, 4, 6, 7, 8, 9]
