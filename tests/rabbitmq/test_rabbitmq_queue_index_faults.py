"""The queue index, version 1, under random histories, crashes, damage and hostile bytes.

Owns the model of a whole life (publish, deliver, ack, sync, flush, orderly and sudden ends, reopening) against a plain one of
dictionaries and bytes; every state that a directory is in while the writer calls the system; bit flips, cuts and invented
lengths.  A test may only find: no crash of the process, no hang, no change by a reader, and nothing lost that was whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import classic_queue_oracle as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scratch import SCRATCH
from test_rabbitmq_queue_index import files_of, kinds, publish_of, put, write_files

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.rabbitmq import queue_index
from rmqstore.rabbitmq._core import Findings, JournalMap, scan_journal
from rmqstore.rabbitmq.index_directory import read_segment
from rmqstore.rabbitmq.queue_index import QueueIndex

COUNT = 8


@pytest.fixture
def scratch():
    path = Path(tempfile.mkdtemp(prefix="rmqstore-index-", dir=SCRATCH))
    yield path
    shutil.rmtree(path)


def live_of(files: dict[str, bytes]) -> dict[int, oracle.State]:
    states, _ = oracle.load_index(files, COUNT)
    return {seq: state for seq, state in states.items() if state.pub is not None and not state.acked}


def check_entries(index: QueueIndex, expected: dict[int, oracle.State], context: object = "") -> None:
    """The index has exactly these entries, by iteration and as columns."""
    entries = list(index)
    assert [entry.seq_id for entry in entries] == sorted(expected), context
    for entry in entries:
        state = expected[entry.seq_id]
        assert state.pub is not None
        assert (entry.msg_id, entry.size, entry.message or b"") == (state.pub.msg_id, state.pub.size, state.pub.term), (
            context
        )
    assert index.depth == len(entries) == len(index.columns().seq_id), context


# ----------------------------------------------------------------------------------------------------------- the model


def recovered_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Recover a directory as dirty: live entries get their deliver, all is flushed (section 7.4)."""
    merged, crashes = oracle.load_index(files, COUNT)
    assert not crashes
    out = {"journal.jif": b""}
    for number in sorted({seq // COUNT for seq in merged} | {int(n[:-4]) for n in files if n.endswith(".idx")}):
        data = files.get(f"{number}.idx", b"")
        before = oracle.segment_map(oracle.parse_segment(data, number, COUNT).records)
        mine = {seq: state for seq, state in merged.items() if seq // COUNT == number}
        if all(state.acked or state.pub is None for state in mine.values()):
            continue
        for seq in sorted(mine, reverse=True):
            state, old = mine[seq], before.get(seq, oracle.NOTHING)
            if old.pub is None:
                data += oracle.segment_publish(state.pub, COUNT)
            data += oracle.segment_mark(seq, COUNT) * ((not old.delivered) + (state.acked and not old.acked))
        out[f"{number}.idx"] = data
    return out


class Life:
    """An index and its model side by side; the model's files on disk are what was written of them."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.model = oracle.IndexModel(COUNT, limit)
        self.on_disk: dict[str, bytes] = {"journal.jif": b""}
        self.live: dict[int, bool] = {}
        self.next_seq = 0
        self.index = self.open()

    def open(self, terms=None) -> QueueIndex:
        return QueueIndex.open(self.path, segment_entry_count=COUNT, max_journal_entries=self.limit, terms=terms)

    def flushed(self, before: int) -> None:
        if self.model.flushes != before:
            self.on_disk = {"journal.jif": b""} | {n: d for n, d in self.model.files().items() if n != "journal.jif"}

    def publish(self, number: int, deliver: bool, many: bool, stored: bool) -> None:
        before = self.model.flushes
        pubs = [publish_of(self.next_seq + i, stored=stored) for i in range(number)]
        for pub in pubs:
            self.model.publish(pub)
            if deliver:
                self.model.deliver([pub.seq])
            self.live[pub.seq] = deliver
        if many:
            terms = None if stored else [pub.term for pub in pubs]
            ids, sizes = [pub.msg_id for pub in pubs], [pub.size for pub in pubs]
            answer = self.index.publish_many(terms, msg_ids=ids, sizes=sizes, deliver=deliver)
            assert answer == range(self.next_seq, self.next_seq + number)
        else:
            for pub in pubs:
                put(self.index, pub, deliver=deliver)
        self.next_seq += number
        self.flushed(before)

    def mark(self, seqs: list[int], ack: bool) -> None:
        before = self.model.flushes
        if ack:
            self.model.ack(seqs)
            self.index.ack(np.array(seqs, np.int64))
        else:
            self.model.deliver(seqs)
            self.index.deliver(seqs)
        for seq in seqs:
            if ack:
                del self.live[seq]
            else:
                self.live[seq] = True
        self.flushed(before)

    def sync(self) -> None:
        self.index.sync()
        self.on_disk["journal.jif"] = bytes(self.model.journal)

    def flush(self, idle: bool) -> None:
        before = self.model.flushes
        if idle:
            if self.model.dirty_count:
                self.model.flush()
            self.index.idle()
        else:
            self.model.flush()
            self.index.flush()
        self.flushed(before)

    def reopen(self) -> None:
        terms = self.index.close()
        self.on_disk["journal.jif"] = bytes(self.model.journal)
        assert terms["next_seq_id"] == self.next_seq
        assert dict(terms["segments"]) | {n: 0 for n, c in self.model.unacked.items() if c == 0} == self.model.unacked
        self.index = self.open(terms)
        assert self.index.recovered_clean and not self.index.problems

    def crash(self) -> None:
        self.index.abandon()
        assert files_of(self.path) == self.on_disk
        expected = live_of(self.on_disk)
        after = recovered_files(self.on_disk)
        with QueueIndex.open(self.path, segment_entry_count=COUNT, read_only=True) as reader:
            check_entries(reader, expected)
            assert not reader.problems
        assert files_of(self.path) == self.on_disk
        self.index = self.open()
        assert files_of(self.path) == after
        self.on_disk = after
        self.live = {seq: True for seq in expected}
        self.model = oracle.IndexModel(COUNT, self.limit)
        self.model.segments = {int(n[:-4]): bytearray(d) for n, d in after.items() if n.endswith(".idx")}
        for seq in expected:
            self.model.unacked[seq // COUNT] = self.model.unacked.get(seq // COUNT, 0) + 1
        self.next_seq = (max(self.model.segments) + 1) * COUNT if self.model.segments else 0
        assert self.index.next_seq_id == self.next_seq

    def check(self) -> None:
        assert files_of(self.path) == self.on_disk
        assert self.index.dirty_count == self.model.dirty_count
        assert self.index.journal_size == len(self.model.journal)
        assert [(entry.seq_id, entry.marked) for entry in self.index] == sorted(self.live.items())
        assert self.index.depth == len(self.live)
        assert {n: c for n, c in self.index.segments.items() if c} == {n: c for n, c in self.model.unacked.items() if c}


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 20), st.booleans(), st.booleans(), st.booleans()),
    st.tuples(st.sampled_from(["deliver", "ack", "ack"]), st.integers(1, 20), st.randoms(use_true_random=False)),
    st.tuples(st.sampled_from(["sync", "flush", "idle", "reopen", "crash"])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=3, max_size=30), limit=st.sampled_from([0, 3, 20, 1000]))
def test_any_life(steps, limit):
    path = Path(tempfile.mkdtemp(prefix="rmqstore-index-", dir=SCRATCH))
    life = Life(path, limit)
    try:
        for step in steps:
            if step[0] == "publish":
                life.publish(*step[1:])
            elif step[0] in ("deliver", "ack"):
                possible = [seq for seq, delivered in life.live.items() if delivered == (step[0] == "ack")]
                if possible:
                    life.mark(step[2].sample(possible, min(step[1], len(possible))), step[0] == "ack")
            elif step[0] in ("flush", "idle"):
                life.flush(step[0] == "idle")
            else:
                getattr(life, step[0])()
            life.check()
        life.crash()
        life.check()
    finally:
        life.index.abandon()
        shutil.rmtree(path)


# ----------------------------------------------------------------------------------------- dying at every system call


class Film:
    """The directory before and after every call that changes or forces something, and in the middle of writes."""

    CALLS = ("write", "pwrite", "fsync", "ftruncate", "unlink", "open")

    def __init__(self, path: Path):
        self.path = path
        self.pictures: list[tuple[str, dict[str, bytes], object]] = []
        self.promise: object = None
        self.real = {name: getattr(os, name) for name in self.CALLS}

    def take(self, label: str) -> None:
        files = files_of(self.path)
        if not self.pictures or self.pictures[-1][1:] != (files, self.promise):
            self.pictures.append((label, files, self.promise))

    def call(self, name: str, *args, **kwargs):
        self.take(f"before {name}")
        if name in ("write", "pwrite") and len(args[1]) > 1:
            # The first half of the bytes is there and the process dies.
            size = os.fstat(args[0]).st_size
            for part in (1, len(args[1]) // 2, len(args[1]) - 1):
                self.real[name](args[0], bytes(args[1])[:part], *args[2:])
                self.take(f"within {name}")
                self.real["ftruncate"](args[0], size)
        answer = self.real[name](*args, **kwargs)
        self.take(f"after {name}")
        return answer

    def __enter__(self) -> Film:
        for name in self.CALLS:
            setattr(queue_index.os, name, lambda *args, _name=name, **kwargs: self.call(_name, *args, **kwargs))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(queue_index.os, name, function)


def filmed_life(path: Path, seed: int):
    """A life with everything in it; each picture with what was safely there (present) and what may be there (possible)."""
    chance = random.Random(seed)
    index = QueueIndex.open(path, segment_entry_count=COUNT, max_journal_entries=chance.choice([6, 25, 1000]))
    live: set[int] = set()
    # Present: published and synced, and not acked since.  Gone: acked and synced.
    present: set[int] = set()
    gone: set[int] = set()
    acked: set[int] = set()
    film = Film(path)

    def promise() -> None:
        film.promise = (frozenset(present), frozenset(gone))

    promise()
    with film:
        for _ in range(25):
            step = chance.choice(["publish", "publish", "ack", "ack", "sync", "flush"])
            if step == "publish":
                count = chance.randrange(1, 8)
                first = index.next_seq_id
                pubs = [publish_of(seq, stored=seq % 5 == 0) for seq in range(first, first + count)]
                deliver = chance.random() < 0.8
                for pub in pubs:
                    put(index, pub, deliver=deliver)
                live.update(range(first, first + count))
                undelivered = [entry.seq_id for entry in index if not entry.marked]
                if chance.random() < 0.5:
                    index.deliver(undelivered)
            elif step == "ack":
                possible = [entry.seq_id for entry in index if entry.marked]
                chosen = chance.sample(possible, chance.randrange(len(possible) + 1))
                present.difference_update(chosen)
                promise()
                index.ack(chosen)
                live.difference_update(chosen)
                acked.update(chosen)
            else:
                index.sync() if step == "sync" else index.flush()
                present, gone = set(live), set(acked)
                promise()
        film.take("end")
    index.abandon()
    return film.pictures


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 400), marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=str
)
def test_dying_at_every_call(scratch, seeds):
    for seed in seeds:
        check_filmed_life(scratch, seed)
        shutil.rmtree(scratch / "lived")


def check_filmed_life(scratch: Path, seed: int) -> None:
    """Every picture of a life can be opened, and holds what was promised."""
    (scratch / "lived").mkdir()
    pictures = filmed_life(scratch / "lived", seed)
    assert len(pictures) > 3
    path = scratch / "again"
    for number, (label, files, (present, gone)) in enumerate(pictures):
        shutil.rmtree(path, ignore_errors=True)
        write_files(path, files)
        # A node would crash at most on the end of one segment, as on its own (section 10).
        crashes = oracle.load_index(files, COUNT)[1]
        assert {crash.why for crash in crashes} <= {"short head", "short publish"}, (label, crashes)
        assert not crashes or label == "within write"
        with QueueIndex.open(path, segment_entry_count=COUNT, read_only=True) as index:
            found = {entry.seq_id for entry in index}
        assert present <= found and not gone & found, (label, present - found, gone & found)
        if number % 16 == seed % 16:
            check_filmed_recovery(path, found)
            write_files(path, files)
        with QueueIndex.open(path, segment_entry_count=COUNT) as index:
            assert {entry.seq_id for entry in index} == found, label
            seq = index.publish(message=publish_of(index.next_seq_id).term)
            index.deliver(seq)
            index.ack(sorted(found))
            index.flush()
            assert {entry.seq_id for entry in index} == {seq}
        assert not oracle.load_index(files_of(path), COUNT)[1]


def check_filmed_recovery(path: Path, found: set[int]) -> None:
    """Recovering may die at every call too: nothing is lost by that, and the next one ends well."""
    film = Film(path)
    with film:
        # The recovery acks messages in no store.
        dropped = {seq for seq in found if seq % 5 == 0}
        ids = {publish_of(seq).msg_id for seq in dropped}
        QueueIndex.open(path, segment_entry_count=COUNT, is_stored=lambda msg_id: msg_id not in ids).abandon()
        film.take("end")
    again = path.parent / "recovered"
    for label, files, _ in film.pictures:
        shutil.rmtree(again, ignore_errors=True)
        write_files(again, files)
        crashes = oracle.load_index(files, COUNT)[1]
        assert {crash.why for crash in crashes} <= {"short head", "short publish"}, (label, crashes)
        with QueueIndex.open(again, segment_entry_count=COUNT) as index:
            left = {entry.seq_id for entry in index}
            assert found - dropped <= left <= found, label
        assert not oracle.load_index(files_of(again), COUNT)[1]
    for name in files_of(path):
        (path / name).unlink()


CHILD = """
import sys
sys.path[:0] = {paths!r}
from test_rabbitmq_queue_index import publish_of
from rmqstore.rabbitmq.queue_index import QueueIndex
index = QueueIndex.open({path!r}, segment_entry_count=8, max_journal_entries=40)
known = [entry.seq_id for entry in index]
while True:
    first = index.next_seq_id
    new = list(index.publish_many([publish_of(seq).term for seq in range(first, first + 9)], deliver=True))
    index.sync()
    print("published", *new, flush=True)
    known += new
    out, known = known[:8], known[8:]
    print("acking", *out, flush=True)
    index.ack(out)
    index.flush()
    print("acked", *out, flush=True)
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_kill_9(scratch, rounds):
    path = scratch / "queue"
    path.mkdir()
    chance = random.Random(rounds)
    present: set[int] = set()
    acking: set[int] = set()
    for _ in range(rounds):
        script = CHILD.format(paths=[os.path.dirname(__file__), *sys.path], path=str(path))
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(chance.randrange(1, 150)):
            line = child.stdout.readline()
            assert line
        child.send_signal(signal.SIGKILL)
        lines = [line, *child.stdout.read().splitlines()]
        child.wait()
        child.stdout.close()
        # The lines before this one matter as well, so the directory is the judge of all but the last few.
        acking = set()
        published: set[int] = set()
        for text in lines:
            what, *numbers = text.split()
            if what == "published":
                published.update(map(int, numbers))
            elif what == "acking":
                acking.update(map(int, numbers))
        with QueueIndex.open(path, segment_entry_count=COUNT, read_only=True) as index:
            found = {entry.seq_id for entry in index}
            assert published - acking <= found
            assert kinds(index) <= {"torn_record"}
        with QueueIndex.open(path, segment_entry_count=COUNT) as index:
            assert {entry.seq_id for entry in index} == found
        assert not oracle.load_index(files_of(path), COUNT)[1]
        present = found
    assert present


# ------------------------------------------------------------------------------------------------------------ damage


def small_queue() -> dict[str, bytes]:
    """Two segments and a journal, with every kind of record and what a damaged byte may hit."""
    model = oracle.IndexModel(COUNT, 1000)
    for seq in range(6):
        model.enqueue(publish_of(seq, stored=seq in (2, 3)))
    model.flush()
    model.ack([1, 3])
    model.enqueue(publish_of(9, expiry=1_700_000_000_000_000))
    model.publish(publish_of(10, persistent=False))
    model.flush()
    model.ack([0])
    model.deliver([10])
    model.enqueue(publish_of(11))
    model.publish(publish_of(12, stored=True))
    model.enqueue(publish_of(13))
    return model.files()


def check_damaged(path: Path, files: dict[str, bytes], context: object) -> None:
    """Readers answer and change nothing; a writer refuses without a change, or leaves a directory without damage."""
    shutil.rmtree(path, ignore_errors=True)
    write_files(path, files)
    with QueueIndex.open(path, segment_entry_count=COUNT, read_only=True) as index:
        found = {(entry.seq_id, entry.msg_id) for entry in index}
        index.columns(live=False)
        index.references()
        problems = index.problems
    for name, data in files.items():
        if name.endswith(".idx"):
            read_segment(path / name, COUNT)
            read_segment(data, COUNT, check_terms=False)
    assert files_of(path) == files, context
    try:
        index = QueueIndex.open(path, segment_entry_count=COUNT)
    except CorruptionError:
        assert problems and files_of(path) == files, context
        return
    with index:
        kept = {(entry.seq_id, entry.msg_id) for entry in index}
    # A flipped bit may have made a message transient, and such are dropped.
    assert kept <= found, context
    crashes = [crash for crash in oracle.load_index(files_of(path), COUNT)[1] if "term" not in crash.why]
    assert not crashes, (context, crashes)


def flips(files: dict[str, bytes], step: int):
    places = [(name, bit) for name in sorted(files) for bit in range(8 * len(files[name]))]
    for name, bit in places[::step]:
        data = bytearray(files[name])
        data[bit // 8] ^= 1 << bit % 8
        yield (name, bit), {**files, name: bytes(data)}


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_bit_flips(scratch, step):
    for context, files in flips(small_queue(), step):
        check_damaged(scratch / "queue", files, context)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_cuts(scratch, step):
    good = small_queue()
    for name, data in good.items():
        for end in range(0, len(data), step):
            check_damaged(scratch / "queue", {**good, name: data[:end]}, (name, end))


def before_and_within_a_flush(
    count: int, first: int, more: bool, acked: bool = False
) -> tuple[dict[str, bytes], str, bytes]:
    """Files of an index that is to be flushed, the segment that this appends to, and what: `more` and acks."""
    chance = random.Random(count)
    model = oracle.IndexModel(count, 1000)

    def put_one(seq: int, stored: bool) -> None:
        pub = publish_of(seq, b"", stored=stored)
        # With ids of its own making, which have no zeros where another one has none.
        msg_id = chance.randbytes(16)
        term = b"" if stored else oracle.message_term(b"", msg_id)
        model.enqueue(pub._replace(msg_id=msg_id, size=chance.randrange(1, 1 << 16), term=term))

    # Number 0 is live and delivered: another mark of it would be its ack.
    for seq in (0, 1, 2, 3, first - 1):
        put_one(seq, seq == 1)
    model.flush()
    if acked:
        # Its ack is the last record then, and no tear of what follows may take it back.
        model.ack([0])
        model.flush()
    model.ack([2, 3])
    if more:
        for seq in range(first, first + 5):
            put_one(seq, seq % 3 != 0)
        model.publish(publish_of(first + 5))
        model.ack([first + 2])
    before = model.files()
    model.flush()
    blob = bytes(model.segments[0])[len(before["0.idx"]) :]
    assert len(model.segments) == 1 and blob
    return before, "0.idx", blob


@pytest.mark.parametrize(
    ("count", "first", "more", "acked"),
    [(16, 5, True, False), (512, 254, True, False), (16, 5, False, False), (16, 5, True, True)],
)
@pytest.mark.parametrize("zeros", [False, True], ids=["cut", "zeros"])
def test_power_is_lost_within_a_flush(scratch, count, first, more, acked, zeros):
    # Of what was not forced any part is there, and zeros may stand for the rest.  The journal still has all of it.
    before, name, blob = before_and_within_a_flush(count, first, more, acked)
    states, crashes = oracle.load_index(before, count)
    assert not crashes
    want = {seq: state.pub for seq, state in states.items() if state.pub is not None and not state.acked}
    assert len(want) == (8 if more else 3) - acked
    path = scratch / "queue"

    def given(**options) -> dict[int, oracle.Publish]:
        with QueueIndex.open(path, segment_entry_count=count, **options) as index:
            entries = list(index)
            assert index.depth == len(entries) == len(index.columns().seq_id)
            problems[:] = index.problems
        return {
            each.seq_id: oracle.Publish(
                each.seq_id, each.msg_id, each.expiry_us, each.size, each.persistent, each.message or b""
            )
            for each in entries
        }

    problems: list = []
    begins = [record.begin for record in oracle.parse_segment(blob, 0, count).records]
    near = {begin + more for begin in begins for more in (*range(6), 17, 18, 25, *range(29, 37))}
    for keep in sorted(near | {len(blob) - 1, len(blob)}):
        files = {**before, name: before[name] + blob[:keep].ljust(len(blob) if zeros else 0, b"\0")}
        shutil.rmtree(path, ignore_errors=True)
        write_files(path, files)
        for check_terms in (True, False):
            assert given(read_only=True, check_terms=check_terms) == want, keep
            hangs = oracle.load_index(files, count)[1]
            assert not hangs or any(problem.path == str(path / name) for problem in problems), keep
        assert given(read_only=True, segments=range(1), check_terms=False) == want, keep
        assert files_of(path) == files, keep
        try:
            assert given() == want, keep
        except CorruptionError:
            # The beginning of an embedded message may be any damage.
            assert zeros and files_of(path) == files, keep
            continue
        after, crashes = oracle.load_index(files_of(path), count)
        assert not crashes, keep
        live = {seq: state.pub for seq, state in after.items() if state.pub is not None and not state.acked}
        assert live == want, keep


def test_lengths_of_every_kind(scratch):
    good = small_queue()
    parsed = [("journal.jif", 40, record) for record in oracle.parse_journal(good["journal.jif"]).records]
    for name in good:
        if name.endswith(".idx"):
            parsed += [(name, 34, record) for record in oracle.parse_segment(good[name], int(name[:-4]), COUNT).records]
    for name, fixed, record in parsed:
        if record.pub is None:
            continue
        for length in (
            0,
            1,
            2,
            16,
            255,
            256,
            1 << 15,
            1 << 31,
            0x7FFFFFFF,
            0xFFFFFFFF,
            0xFFFFFFD8,
            len(record.pub.term) + 1,
        ):
            data = bytearray(good[name])
            struct.pack_into(">I", data, record.begin + fixed - 4, length)
            check_damaged(scratch / "queue", {**good, name: bytes(data)}, (name, record.begin, length))


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400), count=st.integers(1, 16384))
def test_any_bytes(data, count):
    columns, problems = read_segment(data, count)
    expected = oracle.parse_segment(data, 0, count)
    if expected.why == "end" and not problems:
        states = oracle.segment_map(expected.records)
        assert columns.seq_id.tolist() == sorted(states)
    findings = Findings()
    JournalMap(count).load(data, findings, True)
    _, seqs, places, _ = scan_journal(data)
    parsed = oracle.parse_journal(data)
    ours = list(zip(seqs.tolist(), places.tolist()))
    theirs = [(record.seq, record.begin) for record in parsed.records]
    # We also stop at an embedded message that does not begin like a term.
    assert ours == theirs[: len(ours)]
    assert len(ours) == len(theirs) or findings.count


def test_salvage_finds_every_whole_message(scratch):
    pubs = [publish_of(seq) for seq in range(COUNT)]
    records = [oracle.segment_publish(pub, COUNT) + oracle.segment_mark(pub.seq, COUNT) for pub in pubs]
    for hit in range(COUNT - 1):
        for damage in (b"\0" * 50, b"\xff" * 50, b"\x7f\xff" * 25, bytes(range(50)), b"\xc0\x01" * 25):
            broken = bytearray(b"".join(records))
            begin = sum(map(len, records[:hit]))
            broken[begin : begin + 50] = damage
            write_files(scratch, {"0.idx": bytes(broken)})
            with QueueIndex.open(scratch, segment_entry_count=COUNT, read_only=True) as index:
                found = {entry.seq_id: entry.message for entry in index}
            whole = {pub.seq: pub.term for pub in pubs if pub.seq != hit}
            assert whole.items() <= found.items() and index.problems, (hit, damage)
    journal = [oracle.journal_publish(pub) + oracle.journal_deliver(pub.seq) for pub in pubs]
    (scratch / "0.idx").unlink()
    for hit in range(COUNT - 1):
        for damage in (b"\0" * 50, b"\x7f" * 50):
            broken = bytearray(b"".join(journal))
            begin = sum(map(len, journal[:hit]))
            broken[begin : begin + 50] = damage
            write_files(scratch, {"journal.jif": bytes(broken)})
            with QueueIndex.open(scratch, segment_entry_count=COUNT, read_only=True) as index:
                assert {entry.seq_id for entry in index} == {pub.seq for pub in pubs} - {hit}
            with pytest.raises(CorruptionError):
                QueueIndex.open(scratch, segment_entry_count=COUNT)


def test_salvage_of_entries_in_a_store(scratch):
    pubs = [publish_of(seq, stored=True) for seq in range(COUNT)]
    records = [oracle.segment_publish(pub, COUNT) + oracle.segment_mark(pub.seq, COUNT) for pub in pubs]
    broken = bytearray(b"".join(records))
    broken[36 * 2 : 36 * 2 + 36] = b"\0" * 36
    write_files(scratch, {"0.idx": bytes(broken)})
    with QueueIndex.open(scratch, segment_entry_count=COUNT, read_only=True) as index:
        assert {entry.seq_id for entry in index} == {0, 1, 3, 4, 5, 6, 7}
        assert [(problem.kind, problem.pos) for problem in index.problems] == [("bad_prefix", 72)]


@pytest.mark.parametrize(
    "pattern",
    [
        b"\x80",
        b"\xc0\x00",
        b"\xff",
        b"\x7f",
        b"\x01",
        b"\x00\x00\x00\x01",
        b"\x83h\x06",
        b"\x80" + bytes(33),
        bytes(33) + b"\x83",
    ],
    ids=bytes.hex,
)
def test_no_pattern_makes_salvage_slow(pattern):
    # A megabyte each: what were quadratic would not end within the test's time.
    data = (pattern * (1 << 20))[: 1 << 20]
    read_segment(b"\x00" + data, 16384)
    JournalMap(COUNT).load(bytes(40) + data, Findings(), True)
    term = oracle.message_term(b"x" * 100, b"I" * 16)
    nested = (b"\x80" + bytes(31) + struct.pack(">H", 0x0FFF) + term)[:34] + term
    read_segment(b"\x00" + nested * 5000, 16384)


def test_a_journal_with_ids_from_everywhere(scratch):
    # Each id in a segment of its own: memory follows the bytes, not the ids.
    chance = random.Random(5)
    seqs = chance.sample(range(1 << 62), 20000)
    journal = b"".join(struct.pack(">Q", 3 << 62 | seq) for seq in seqs)
    journal += b"".join(struct.pack(">Q", 2 << 62 | seq) for seq in seqs[:5000])
    journal += b"".join(oracle.journal_publish(publish_of(seq, stored=True)) for seq in range(0, 1 << 40, 1 << 29))
    write_files(scratch, {"journal.jif": journal})
    with QueueIndex.open(scratch, segment_entry_count=16384, read_only=True) as index:
        assert index.depth == 2048 and len(list(index)) == 2048
        assert "deliver_after_ack" in kinds(index)


def test_more_problems_than_are_listed(scratch):
    data = b"".join(struct.pack(">Q", 2 << 62 | 5) for _ in range(40000))
    write_files(scratch, {"journal.jif": data})
    with QueueIndex.open(scratch, segment_entry_count=COUNT, read_only=True) as index:
        assert index.problems[-1].kind == "more_problems" and len(index.problems) == 16385


def test_files_that_cannot_be_read(scratch):
    write_files(scratch, {"1.idx": oracle.segment_publish(publish_of(COUNT), COUNT)})
    (scratch / "0.idx").mkdir()
    with QueueIndex.open(scratch, segment_entry_count=COUNT, read_only=True) as index:
        assert kinds(index) == {"unreadable"} and [entry.seq_id for entry in index] == [COUNT]
    with pytest.raises((OSError, StoreError)):
        QueueIndex.open(scratch, segment_entry_count=COUNT)
