"""A catalogue of damage to RabbitMQ's classic queues: what is broken, what can be had back at best, what the real node does.

Owns the kinds of damage as functions on the directory of a vhost that a real node wrote, or a copy of a golden one.  What can be
had back is computed by the oracle on the undamaged directory, minus what the damage hit.  Never imports rmqstore.

Each `Damage` says what it needs: "killed" or "clean" (how the node ended), and what queues there must be: "journal" (a queue with
publishes in its journal), "segments" (one with several segments), "stored" (messages in the store), "shared" (referenced by two
queues), "v2", and "user" where root is above what is planted.  `apply` raises `Unsuitable` where a directory has nothing to
break in that way.

`node` is what RabbitMQ 3.10.8 did when it was booted on the damaged directory; `tests/interop/rabbitmq_survey.py` asked it and
wrote `tests/data/rabbitmq/damage.json`:

- "delivers": it comes up and delivers exactly what is had back at best.
- "loses": it comes up and delivers less.
- "more": it comes up and delivers what was acked or never there, besides or instead.
- "reorders": it comes up and delivers it in another order.
- "queue fails": it comes up, a queue does not, or ends when it delivers.
- "hangs": it does not come up.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import classic_queue_oracle as oracle
from classic_queue_oracle import Publish, Record

Key = tuple[str, int]
JOURNAL = "journal.jif"
SURVEY = Path(__file__).resolve().parent.parent / "data" / "rabbitmq" / "damage.json"


@functools.cache
def _survey() -> dict[str, Any]:
    return json.loads(SURVEY.read_text(encoding="utf-8"))["damages"] if SURVEY.exists() else {}


class Unsuitable(Exception):
    """The directory has nothing that could be broken in this way."""


class Expected(NamedTuple):
    """The messages that can be recovered; sequence ids by the directory of their queue, directories without any left out.

    ``recovered`` must be ``live - lost | returned``, but for ``doubtful``, of which each may be there or not.
    """

    #: Messages that the undamaged directory held.
    live: dict[str, set[int]]
    #: Of those, what nobody can have back.
    lost: dict[str, set[int]]
    #: Acked messages that nobody can know to be acked any more, and messages that the damage planted.
    returned: dict[str, set[int]]
    #: Found only by a reader that continues after the broken place, or that trusts a broken record.
    doubtful: dict[str, set[int]]
    note: str

    def best(self, directory: str) -> set[int]:
        """The most messages that can be recovered from a queue."""
        return self.live.get(directory, set()) - self.lost.get(directory, set()) | self.returned.get(directory, set())

    def check(self, recovered: dict[str, set[int]]) -> None:
        """Compare with what was recovered, by directory.

        Raises
        ------
        AssertionError
            Names the queue and the sequence ids that are missing or should not be there.
        """
        for directory in sorted({*self.live, *self.returned, *recovered}):
            doubtful = self.doubtful.get(directory, set())
            found, best = recovered.get(directory, set()), self.best(directory)
            missing, foreign = best - found - doubtful, found - best - doubtful
            assert not missing and not foreign, (
                f"{directory}: missing {sorted(missing)}, not expected {sorted(foreign)}"
            )


@dataclass(frozen=True)
class Damage:
    """A kind of damage; `apply(path, rng)` plants it below the path of a vhost."""

    name: str
    what: str
    needs: frozenset[str]
    plant: Callable[[Planting], str | None] = field(repr=False)

    @property
    def node_behaviour(self) -> dict[str, Any]:
        """The real node's reaction in the survey: outcome, what was missing or extra by queue, first errors."""
        return _survey().get(self.name, {"outcome": "not asked"})

    @property
    def node(self) -> str:
        """In one word: "delivers", "loses", "more", "reorders", "queue fails" or "hangs"."""
        return self.node_behaviour["outcome"]

    @property
    def state(self) -> str:
        """How the node must have ended: "killed" or "clean"."""
        return "clean" if "clean" in self.needs else "killed"

    def apply(
        self, vhost_path: str | os.PathLike[str], rng: random.Random, before: oracle.Vhost | None = None
    ) -> Expected:
        """Plant it; `before` is what the oracle reads of the undamaged vhost, where that is known already.

        Raises
        ------
        Unsuitable
            There is nothing to break in that way; nothing was changed.
        """
        planting = Planting(Path(vhost_path), rng, before)
        note = self.plant(planting) or ""
        return planting.expected(note)


@dataclass
class Content:
    """The former contents of a queue's directory: records of its files, by name."""

    journal: list[Record]
    segments: dict[str, list[Record]]

    def keys_from(self, file: str, begin: int) -> set[Key]:
        """Those of all records of a file that end behind `begin`."""
        return {(file, record.begin) for record in self.of(file) if record.end > begin}

    def of(self, file: str) -> list[Record]:
        """The records of a file."""
        return self.journal if file == JOURNAL else self.segments[file]


class Planting:
    """A vhost while something is planted in it; keeps what was destroyed, at best and at worst."""

    def __init__(self, path: Path, rng: random.Random, before: oracle.Vhost | None = None):
        self.path = path
        self.rng = rng
        self.before = oracle.read_vhost(path) if before is None else before
        self.count = self.before.segment_entry_count
        self.contents: dict[str, Content] = {}
        for directory, queue in self.before.queues.items():
            files = self.files(directory)
            if queue.version == 1:
                self.contents[directory] = Content(
                    oracle.parse_journal(files.get(JOURNAL, b"")).records,
                    {
                        name: oracle.parse_segment(data, int(name[:-4]), self.count).records
                        for name, data in files.items()
                        if re.fullmatch(r"\d+\.idx", name)
                    },
                )
        self.destroyed: dict[str, set[Key]] = {}
        self.uncertain: dict[str, set[Key]] = {}
        self.appended: dict[str, list[Record]] = {}
        self.lost_ids: set[bytes] = set()
        self.doubtful_ids: set[bytes] = set()
        # Values that no record has: set directly.
        self.more_lost: dict[str, set[int]] = {}
        self.more_returned: dict[str, set[int]] = {}
        self.more_doubtful: dict[str, set[int]] = {}

    # Finding something to break

    def folder(self, directory: str) -> Path:
        """The directory of a queue."""
        return self.path / "queues" / directory

    def files(self, directory: str) -> dict[str, bytes]:
        """Its files."""
        return {one.name: one.read_bytes() for one in self.folder(directory).iterdir() if one.is_file()}

    @property
    def store(self) -> Path:
        """The directory of the persistent store."""
        return self.path / "msg_store_persistent"

    def journals(self) -> str:
        """A queue whose journal has at least six publishes that live."""
        return self._pick(
            lambda content, live: len({r.seq for r in content.journal if r.pub and r.pub.term} & live) >= 6,
            "six embedded publishes in a journal",
        )

    def segmented(self, number: int = 2) -> str:
        """A queue with at least `number` segments of several live, embedded messages each."""
        return self._pick(
            lambda content, live: len(self.full_segments(content, live)) >= number,
            f"{number} segments of embedded messages",
        )

    def full_segments(self, content: Content, live: set[int]) -> list[str]:
        """Names of the segments with several live, embedded messages, in order."""
        found = [
            name
            for name, records in content.segments.items()
            if len({r.seq for r in records if r.pub and r.pub.term} & live) >= 6
        ]
        return sorted(found, key=lambda name: int(name[:-4]))

    def _pick(self, fits: Callable[[Content, set[int]], bool], what: str) -> str:
        found = sorted(
            directory
            for directory, content in self.contents.items()
            if fits(content, self.before.queues[directory].seqs)
        )
        if not found:
            raise Unsuitable(f"{self.path}: no queue has {what}")
        return self.rng.choice(found)

    def segment(self, *, full: bool = False) -> tuple[str, str, list[Record]]:
        """A segment with live embedded messages: directory, name, records."""
        directory = self.segmented(1)
        content = self.contents[directory]
        name = self.rng.choice(self.full_segments(content, self.before.queues[directory].seqs))
        return directory, name, content.segments[name]

    def live_publish(self, directory: str, records: Iterable[Record]) -> Record:
        """One of the publishes of embedded live messages, not the first three nor the last three."""
        live = self.before.queues[directory].seqs
        found = [record for record in records if record.pub and record.pub.term and record.seq in live]
        if len(found) < 3:
            raise Unsuitable(f"{directory}: too few publishes")
        edge = 3 if len(found) > 8 else 1
        return self.rng.choice(found[edge:-edge])

    def store_file(self, records: int = 3) -> tuple[Path, list[oracle.Stored]]:
        """A message file, not the highest, with at least this many messages in use."""
        numbers = sorted(int(path.stem) for path in self.store.glob("*.rdq"))
        found = []
        for number in numbers[:-1]:
            path = self.store / f"{number}.rdq"
            parsed = oracle.parse_rdq(path.read_bytes()).records
            if sum(self.in_use(path.name, record) for record in parsed) >= records:
                found.append((path, parsed))
        if not found:
            raise Unsuitable(f"{self.store}: no file before the highest with {records} messages in use")
        return self.rng.choice(found)

    def in_use(self, name: str, record: oracle.Stored) -> bool:
        """True if that record of a file has a live message."""
        return record.msg_id in self.before.references and self.before.located.get(record.msg_id, ())[:2] == (
            name,
            record.begin,
        )

    def version_2(self) -> tuple[Path, list[oracle.EntryV2]]:
        """The directory of a queue of version 2, and the entries of its first index file."""
        for directory, queue in sorted(self.before.queues.items()):
            index = self.folder(directory) / "0.qi"
            if queue.version == 2 and index.exists():
                entries = oracle.parse_qi(index.read_bytes())[2]
                if sum(entry.place == 2 for entry in entries) >= 6:
                    return index.parent, entries
        raise Unsuitable(f"{self.path}: no queue of version 2 with a store of its own")

    # Noting what is broken

    def destroy(self, directory: str, keys: Iterable[Key], *, doubtful: Iterable[Key] = ()) -> None:
        """These records are gone; of the `doubtful` ones it depends on the reader."""
        self.destroyed.setdefault(directory, set()).update(keys)
        self.uncertain.setdefault(directory, set()).update(doubtful)

    def doubt(self, directory: str, seqs: Iterable[int]) -> None:
        """Of these it depends on the reader."""
        self.more_doubtful.setdefault(directory, set()).update(seqs)

    def append_journal(self, directory: str, *records: Record) -> None:
        """Append records to a journal, which a reader is meant to obey."""
        with open(self.folder(directory) / JOURNAL, "ab") as file:
            file.write(oracle.encode_journal(records))
        self.appended.setdefault(directory, []).extend(records)

    def write(self, path: Path, data: bytes | bytearray) -> None:
        """Replace what a file says."""
        path.write_bytes(bytes(data))

    def new_publish(self, directory: str, seq: int) -> Publish:
        """A publish of a new embedded message, whose body `planted_at` reads."""
        body = b"planted %s %d" % (directory.encode(), seq)
        msg_id = self.rng.randbytes(16)
        name = self.before.queues[directory].name
        vhost = name.vhost if name is not None else b"/"
        term = oracle.message_term(body, msg_id, vhost=vhost)
        return Publish(seq, msg_id, 0, len(body), True, term)

    # What follows

    def live(self, directory: str, without: set[Key], gone_ids: set[bytes]) -> set[int]:
        """Sequence ids that a tolerant reader has of a queue without some records and messages."""
        queue = self.before.queues[directory]
        if queue.version == 2:
            return {entry.seq for entry in queue.entries if not (entry.stored and entry.msg_id in gone_ids)}
        content = self.contents[directory]
        states: dict[int, oracle.State] = {}
        for name, records in content.segments.items():
            kept = [record for record in records if (name, record.begin) not in without]
            there = {record.seq for record in kept if record.pub}
            states.update(oracle.segment_map(record for record in kept if record.seq in there))
        journal = [record for record in content.journal if (JOURNAL, record.begin) not in without]
        pending, _ = oracle.journal_map([*journal, *self.appended.get(directory, [])])
        for seq, state in pending.items():
            states[seq], _ = oracle.merge(state, states.get(seq, oracle.NOTHING))
        return {
            seq
            for seq, state in states.items()
            if state.pub is not None
            and not state.acked
            and state.pub.persistent
            and (state.pub.term or (state.pub.msg_id in self.before.located and state.pub.msg_id not in gone_ids))
        }

    def expected(self, note: str) -> Expected:
        """The sum of the notes."""
        live, lost, returned, doubtful = {}, {}, {}, {}
        for directory, queue in self.before.queues.items():
            gone, perhaps = self.destroyed.get(directory, set()), self.uncertain.get(directory, set())
            best = self.live(directory, gone, self.lost_ids)
            worst = self.live(directory, gone | perhaps, self.lost_ids | self.doubtful_ids)
            best = best - self.more_lost.get(directory, set()) | self.more_returned.get(directory, set())
            live[directory] = queue.seqs
            lost[directory] = queue.seqs - best
            returned[directory] = best - queue.seqs
            doubtful[directory] = (best ^ worst) - self.more_returned.get(directory, set()) - self.more_lost.get(
                directory, set()
            ) | self.more_doubtful.get(directory, set())
        # Directories that were not there before.
        for directory, seqs in self.more_doubtful.items():
            doubtful.setdefault(directory, set()).update(seqs)
        return Expected(
            *({d: seqs for d, seqs in each.items() if seqs} for each in (live, lost, returned, doubtful)), note
        )


def planted_at(body: bytes) -> tuple[str, int] | None:
    """The directory and sequence id under which a message was planted, None of one that was not."""
    match = re.fullmatch(rb"planted (\w+) (\d+)", body)
    return (match[1].decode(), int(match[2])) if match else None


DAMAGES: list[Damage] = []


def damage(*needs: str) -> Callable[[Callable[[Planting], str | None]], Callable[[Planting], str | None]]:
    """Put a function into the catalogue, under its name; its docstring says what is broken."""

    def add(plant: Callable[[Planting], str | None]) -> Callable[[Planting], str | None]:
        what = " ".join((plant.__doc__ or "").split())
        needed = frozenset(needs) | (frozenset() if "clean" in needs else frozenset({"killed"}))
        DAMAGES.append(Damage(plant.__name__, what, needed, plant))
        return plant

    return add


def flip(data: bytearray, at: int, bit: int) -> None:
    """Turn over one bit."""
    data[at] ^= 1 << bit


# ---------------------------------------------------------------------------------------------------------------
# Journal


@damage("journal")
def journal_torn(p: Planting) -> None:
    """The journal ends within a publish, as after a power cut."""
    directory = p.journals()
    content = p.contents[directory]
    record = p.live_publish(directory, content.journal)
    cut = p.rng.randrange(record.begin + 1, record.end)
    path = p.folder(directory) / JOURNAL
    p.write(path, path.read_bytes()[:cut])
    p.destroy(directory, content.keys_from(JOURNAL, cut))


@damage("journal")
def journal_zero_tail(p: Planting) -> None:
    """The last records of the journal are zeros, and some more zeros follow, as where a file grew before its data came."""
    directory = p.journals()
    content = p.contents[directory]
    record = p.live_publish(directory, content.journal)
    path = p.folder(directory) / JOURNAL
    data = path.read_bytes()
    p.write(path, data[: record.begin] + bytes(len(data) - record.begin + 4096))
    p.destroy(directory, content.keys_from(JOURNAL, record.begin))


@damage("journal")
def journal_few_zeros(p: Planting) -> None:
    """Fewer zeros follow the journal than a publish is long."""
    directory = p.journals()
    with open(p.folder(directory) / JOURNAL, "ab") as file:
        file.write(bytes(p.rng.randrange(1, 40)))


@damage("journal")
def journal_zeros_within(p: Planting) -> None:
    """A publish within the journal, and its deliver, are zeros; whole records follow."""
    directory = p.journals()
    content = p.contents[directory]
    record = p.live_publish(directory, content.journal)
    path = p.folder(directory) / JOURNAL
    data = bytearray(path.read_bytes())
    data[record.begin : record.end] = bytes(record.end - record.begin)
    p.write(path, data)
    p.destroy(directory, {(JOURNAL, record.begin)}, doubtful=content.keys_from(JOURNAL, record.end))


@damage("journal")
def journal_deleted(p: Planting) -> None:
    """The journal is not there."""
    directory = p.journals()
    (p.folder(directory) / JOURNAL).unlink()
    p.destroy(directory, p.contents[directory].keys_from(JOURNAL, 0))


@damage("journal")
def journal_lone_deliver(p: Planting) -> None:
    """A deliver in the journal of a message that was published nowhere."""
    directory = p.journals()
    p.append_journal(directory, Record("del", p.rng.randrange(10**6, 2**40), 0, 0))


@damage("journal")
def journal_ack_without_deliver(p: Planting) -> None:
    """A publish and its ack in the journal without a deliver between them, as nodes before 3.10 could leave."""
    directory = p.journals()
    seq = max(record.seq for record in p.contents[directory].journal) + 1
    p.append_journal(directory, Record("pub", seq, 0, 0, p.new_publish(directory, seq)), Record("ack", seq, 0, 0))


@damage("journal")
def journal_lone_ack(p: Planting) -> None:
    """An ack in the journal of a message of a segment that is gone."""
    directory = p.journals()
    p.append_journal(directory, Record("ack", p.rng.randrange(10**6, 2**40), 0, 0))


@damage("journal")
def journal_second_deliver(p: Planting) -> None:
    """Two delivers in the journal of a message that was published in it."""
    directory = p.journals()
    record = p.live_publish(directory, p.contents[directory].journal)
    p.append_journal(directory, Record("del", record.seq, 0, 0))


@damage("segments")
def journal_second_ack(p: Planting) -> None:
    """Two acks in the journal of one message of a segment."""
    directory, _, records = p.segment()
    seq = p.live_publish(directory, records).seq
    p.append_journal(directory, Record("ack", seq, 0, 0), Record("ack", seq, 0, 0))


@damage("segments")
def journal_repeats_segment(p: Planting) -> None:
    """Publish and deliver in the journal of what is in a segment already, as after a crash amid a flush."""
    directory, _, records = p.segment()
    record = p.live_publish(directory, records)
    p.append_journal(directory, Record("pub", record.seq, 0, 0, record.pub), Record("del", record.seq, 0, 0))


@damage("segments")
def journal_publish_differs(p: Planting) -> None:
    """A publish in the journal of another message under a number that a segment has."""
    directory, _, records = p.segment()
    seq = p.live_publish(directory, records).seq
    p.append_journal(directory, Record("pub", seq, 0, 0, p.new_publish(directory, seq)), Record("del", seq, 0, 0))


@damage("segments")
def journal_acks_undelivered(p: Planting) -> None:
    """An ack in the journal of a publish that has no deliver in its segment."""
    directory, name, records = p.segment()
    seq = p.live_publish(directory, records).seq
    kept = [record for record in records if record.pub or record.seq != seq]
    p.write(p.folder(directory) / name, oracle.encode_segment(kept, p.count))
    p.append_journal(directory, Record("ack", seq, 0, 0))


def _huge(p: Planting, value: int, offset: int) -> tuple[str, Record]:
    directory = p.journals()
    content = p.contents[directory]
    record = p.live_publish(directory, content.journal)
    path = p.folder(directory) / JOURNAL
    data = bytearray(path.read_bytes())
    struct.pack_into(">I", data, record.begin + offset, value)
    p.write(path, data)
    return directory, record


@damage("journal")
def journal_huge_length(p: Planting) -> None:
    """A publish in the journal says that its embedded message has 2 GiB."""
    directory, record = _huge(p, 0x7FFFFFFF, 36)
    p.destroy(directory, (), doubtful=p.contents[directory].keys_from(JOURNAL, record.begin))


@damage("journal")
def journal_negative_length(p: Planting) -> None:
    """A publish in the journal says that its embedded message has -1 bytes."""
    directory, record = _huge(p, 0xFFFFFFFF, 36)
    p.destroy(directory, (), doubtful=p.contents[directory].keys_from(JOURNAL, record.begin))


@damage("journal")
def journal_wrong_size(p: Planting) -> None:
    """The body size of a publish in the journal, which is a statistic, is -1."""
    _huge(p, 0xFFFFFFFF, 32)


@damage("journal")
def journal_number_flipped(p: Planting) -> None:
    """A bit of the number of a publish in the journal is turned over, so that its deliver has no publish."""
    directory = p.journals()
    content = p.contents[directory]
    record = p.live_publish(directory, content.journal)
    path = p.folder(directory) / JOURNAL
    data = bytearray(path.read_bytes())
    flip(data, record.begin + 3, 4)
    p.write(path, data)
    p.destroy(directory, {(JOURNAL, record.begin)})
    p.doubt(directory, {record.seq, record.seq ^ 1 << 36})


# ---------------------------------------------------------------------------------------------------------------
# Segments


@damage("segments")
def segment_deleted(p: Planting) -> None:
    """A segment is not there."""
    directory, name, _ = p.segment()
    (p.folder(directory) / name).unlink()
    p.destroy(directory, p.contents[directory].keys_from(name, 0))


def _cut(p: Planting, where: Callable[[Record], int], *, mark: bool = False) -> None:
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    if mark:
        record = records[records.index(record) + 1]
        if record.pub is not None:
            raise Unsuitable("the publish has no deliver after it")
    cut = where(record)
    path = p.folder(directory) / name
    p.write(path, path.read_bytes()[:cut])
    p.destroy(directory, p.contents[directory].keys_from(name, cut))


@damage("segments")
def segment_cut_in_head(p: Planting) -> str:
    """A segment ends within the head of a publish."""
    _cut(p, lambda record: record.begin + p.rng.randrange(20, 34))
    return "a node skips the two bytes of such a head and takes the message id for records, which may even go well"


@damage("segments")
def segment_cut_behind_number(p: Planting) -> None:
    """A segment ends after the first two bytes of a publish: a node does not notice."""
    _cut(p, lambda record: record.begin + 2)


@damage("segments")
def segment_cut_in_message(p: Planting) -> None:
    """A segment ends within an embedded message."""
    _cut(p, lambda record: p.rng.randrange(record.begin + 34, record.end))


@damage("segments")
def segment_cut_in_mark(p: Planting) -> None:
    """A segment ends within the two bytes of a deliver."""
    _cut(p, lambda record: record.begin + 1, mark=True)


@damage("segments")
def segment_cut_between(p: Planting) -> None:
    """A segment ends between two records, so that nothing in it looks broken."""
    _cut(p, lambda record: record.begin)


@damage("segments")
def segment_zero_tail(p: Planting) -> None:
    """The end of a segment is zeros."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = path.read_bytes()
    cut = p.rng.randrange(record.begin, record.end)
    p.write(path, data[:cut] + bytes(len(data) - cut))
    p.destroy(directory, p.contents[directory].keys_from(name, cut))


@damage("segments")
def segment_zeros_within(p: Planting) -> None:
    """A publish within a segment is zeros; whole records follow."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    data[record.begin : record.end] = bytes(record.end - record.begin)
    p.write(path, data)
    p.destroy(directory, {(name, record.begin)}, doubtful=p.contents[directory].keys_from(name, record.end))


@damage("segments")
def segment_all_zeros(p: Planting) -> None:
    """A segment holds nothing but zeros."""
    directory, name, _ = p.segment()
    path = p.folder(directory) / name
    p.write(path, bytes(path.stat().st_size))
    p.destroy(directory, p.contents[directory].keys_from(name, 0))


@damage("segments")
def segment_empty(p: Planting) -> None:
    """A segment has no bytes."""
    directory, name, _ = p.segment()
    p.write(p.folder(directory) / name, b"")
    p.destroy(directory, p.contents[directory].keys_from(name, 0))


@damage("segments")
def segment_no_term(p: Planting) -> None:
    """The first byte of an embedded message, the version of its term, has a bit turned over."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    flip(data, record.begin + 34, p.rng.randrange(8))
    p.write(path, data)
    p.doubt(directory, {record.seq})


@damage("segments")
def segment_message_id_differs(p: Planting) -> None:
    """The message id in a publish is another than the one in its embedded message."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    flip(data, record.begin + 2 + p.rng.randrange(16), p.rng.randrange(8))
    p.write(path, data)
    p.doubt(directory, {record.seq})


@damage("segments")
def segment_head_flipped(p: Planting) -> None:
    """The first bit of a publish is turned over, so that it looks like a deliver and its body like records."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    flip(data, record.begin, 7)
    p.write(path, data)
    p.destroy(directory, (), doubtful=p.contents[directory].keys_from(name, record.begin))


@damage("segments")
def segment_number_beyond(p: Planting) -> None:
    """The number of a publish is not below the entries of a segment."""
    if p.count > 8192:
        raise Unsuitable(f"{p.path}: every number fits into a segment of {p.count} entries")
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    data[record.begin] |= 0x20
    p.write(path, data)
    # Its deliver has no publish any more, but all around it is whole.
    p.destroy(directory, {(name, record.begin)}, doubtful=p.contents[directory].keys_from(name, record.begin))
    p.doubt(directory, {record.seq})


@damage("segments")
def segment_publish_twice(p: Planting) -> None:
    """The same publish is in its segment twice, one after the other."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = path.read_bytes()
    p.write(path, data[: record.end] + data[record.begin : record.end] + data[record.end :])


@damage("segments")
def segment_publish_twice_other(p: Planting) -> None:
    """Another message is published under the number of one that is in the segment, at its end."""
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    with open(p.folder(directory) / name, "ab") as file:
        file.write(oracle.segment_publish(p.new_publish(directory, record.seq), p.count))
    # Which of the two it is depends on the reader; that there is one under the number does not.


@damage("journal")
def segment_flush_torn(p: Planting) -> None:
    """Power was lost within a flush: the beginning of an entry that the journal has, and zeros for the rest."""
    directory = p.journals()
    publishes = [record.pub for record in p.contents[directory].journal if record.pub is not None]
    live = [pub for pub in publishes if pub.seq in p.before.queues[directory].seqs]
    number = live[-1].seq // p.count
    records = [oracle.segment_publish(pub, p.count) + oracle.segment_mark(pub.seq, p.count) for pub in live[::-1]
               if pub.seq // p.count == number]  # fmt: skip
    whole = b"".join(records[: len(records) // 2])
    size = len(b"".join(records))
    begun = records[len(records) // 2][: p.rng.randrange(3, 18)]
    with open(p.folder(directory) / f"{number}.idx", "ab") as file:
        file.write((whole + begun).ljust(size, b"\0"))


@damage("segments")
def segment_persistence_bit(p: Planting) -> None:
    """An entry says that its message is transient, which says itself that it is persistent."""
    directory, name, records = p.segment()
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    data[p.live_publish(directory, records).begin] ^= 0x40
    p.write(path, data)


@damage("segments")
def segment_third_mark(p: Planting) -> None:
    """A message that is acked in its segment has a third mark."""
    directory, name, records = p.segment()
    seq = p.live_publish(directory, records).seq
    with open(p.folder(directory) / name, "ab") as file:
        file.write(oracle.segment_mark(seq, p.count) * 2)
    p.more_lost.setdefault(directory, set()).add(seq)


@damage("segments")
def segment_mark_without_publish(p: Planting) -> None:
    """A deliver in a segment of a number that the segment does not have."""
    directory, name, records = p.segment()
    free = {*range(p.count)} - {record.seq % p.count for record in records}
    if free:
        mark = oracle.segment_mark(p.rng.choice(sorted(free)), p.count)
        with open(p.folder(directory) / name, "ab") as file:
            file.write(mark)
        return
    # A full segment: the publish goes, its deliver stays.
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = path.read_bytes()
    p.write(path, data[: record.begin] + data[record.end :])
    p.destroy(directory, {(name, record.begin)})


def _segment_field(p: Planting, offset: int, value: int) -> tuple[str, str, Record]:
    directory, name, records = p.segment()
    record = p.live_publish(directory, records)
    path = p.folder(directory) / name
    data = bytearray(path.read_bytes())
    struct.pack_into(">I", data, record.begin + offset, value)
    p.write(path, data)
    return directory, name, record


@damage("segments")
def segment_huge_length(p: Planting) -> None:
    """A publish says that its embedded message has 2 GiB."""
    directory, name, record = _segment_field(p, 30, 0x7FFFFFFF)
    p.destroy(directory, (), doubtful=p.contents[directory].keys_from(name, record.begin))


@damage("segments")
def segment_negative_length(p: Planting) -> None:
    """A publish says that its embedded message has -1 bytes."""
    directory, name, record = _segment_field(p, 30, 0xFFFFFFFF)
    p.destroy(directory, (), doubtful=p.contents[directory].keys_from(name, record.begin))


@damage("segments")
def segment_wrong_size(p: Planting) -> None:
    """The body size of a publish, which is a statistic, is -1."""
    _segment_field(p, 26, 0xFFFFFFFF)


@damage("segments")
def segment_is_a_folder(p: Planting) -> None:
    """A folder has the name of a segment, which is gone."""
    directory, name, _ = p.segment()
    path = p.folder(directory) / name
    path.unlink()
    path.mkdir()
    p.destroy(directory, p.contents[directory].keys_from(name, 0))


@damage("segments", "user")
def segment_unreadable(p: Planting) -> str:
    """A segment may not be read."""
    directory, name, _ = p.segment()
    (p.folder(directory) / name).chmod(0)
    p.destroy(directory, p.contents[directory].keys_from(name, 0))
    return "an unreadable file cannot be copied; refusing is right"


@damage("segments")
def segment_stray_name(p: Planting) -> None:
    """A file with the ending of a segment, but not with its name."""
    directory, name, _ = p.segment()
    shutil.copyfile(p.folder(directory) / name, p.folder(directory) / f"{name[:-4]}-old.idx")


# ---------------------------------------------------------------------------------------------------------------
# Small files and names

NO_COUNT = "the count must be given, or inferred from the segments; everything is there"


@damage("segments")
def config_missing(p: Planting) -> str:
    """`.config` is not there; a node takes 16384 entries a segment then."""
    p.segmented()
    (p.path / ".config").unlink()
    return NO_COUNT


@damage("segments")
def config_garbage(p: Planting) -> str:
    """`.config` is no Erlang term."""
    p.segmented()
    (p.path / ".config").write_bytes(b"\x00\xff{segment_entry_count")
    return NO_COUNT


@damage("segments")
def config_empty(p: Planting) -> str:
    """`.config` has no bytes."""
    p.segmented()
    (p.path / ".config").write_bytes(b"")
    return NO_COUNT


@damage("segments")
def config_smaller_count(p: Planting) -> str:
    """`.config` says half the entries a segment."""
    p.segmented()
    (p.path / ".config").write_bytes(oracle.config_text(p.count // 2))
    return NO_COUNT


@damage("segments")
def config_larger_count(p: Planting) -> str:
    """`.config` says more entries a segment; nothing in the segments contradicts."""
    if p.count > 8192:
        raise Unsuitable(f"{p.path}: there is no larger count than {p.count}")
    p.segmented()
    (p.path / ".config").write_bytes(oracle.config_text(p.count * 2))
    return NO_COUNT


@damage()
def queue_names_missing(p: Planting) -> None:
    """No queue has a `.queue_name`."""
    for directory in p.before.queues:
        (p.folder(directory) / ".queue_name").unlink(missing_ok=True)


@damage()
def queue_name_garbage(p: Planting) -> None:
    """A `.queue_name` says nothing that could be understood."""
    directory = p.rng.choice(sorted(p.before.queues))
    (p.folder(directory) / ".queue_name").write_bytes(b"\xff\x00VHOST")


@damage()
def vhost_name_missing(p: Planting) -> None:
    """`.vhost` is not there."""
    (p.path / ".vhost").unlink()


@damage("journal")
def foreign_folder(p: Planting) -> str:
    """A folder of a queue that the node does not know: it is deleted at the next boot."""
    directory = p.journals()
    name = oracle.queue_dir((p.path / ".vhost").read_bytes(), b"nobody knows me")
    shutil.copytree(p.folder(directory), p.folder(name))
    p.doubt(name, p.before.queues[directory].seqs)
    return "what is in the folder can be exported, but not be put back"


# ---------------------------------------------------------------------------------------------------------------
# Message store


@damage("stored")
def store_file_deleted(p: Planting) -> None:
    """A message file is not there."""
    path, records = p.store_file()
    path.unlink()
    p.lost_ids |= {record.msg_id for record in records if p.in_use(path.name, record)}


@damage("stored")
def store_file_cut(p: Planting) -> None:
    """A message file ends within a record."""
    path, records = p.store_file()
    record = p.rng.choice([record for record in records if p.in_use(path.name, record)])
    cut = p.rng.randrange(record.begin + 1, record.end - 1)
    p.write(path, path.read_bytes()[:cut])
    p.lost_ids |= {one.msg_id for one in records if one.begin >= record.begin and p.in_use(path.name, one)}


@damage("stored")
def store_bad_marker(p: Planting) -> None:
    """The last byte of a record is not the 255 that says that it is whole."""
    path, records = p.store_file()
    record = p.rng.choice([record for record in records if p.in_use(path.name, record)])
    data = bytearray(path.read_bytes())
    data[record.end - 1] = 0
    p.write(path, data)
    p.lost_ids.add(record.msg_id)
    _doubt_message(p, record.msg_id)


def _doubt_message(p: Planting, msg_id: bytes) -> None:
    for directory, queue in p.before.queues.items():
        p.doubt(directory, {entry.seq for entry in queue.entries if entry.stored and entry.msg_id == msg_id})


@damage("stored")
def store_zeros_within(p: Planting) -> None:
    """A record within a message file is zeros; whole records follow."""
    path, records = p.store_file(4)
    used = [record for record in records if p.in_use(path.name, record)]
    record = used[1]
    data = bytearray(path.read_bytes())
    data[record.begin : record.end] = bytes(record.end - record.begin)
    p.write(path, data)
    p.lost_ids.add(record.msg_id)
    p.doubtful_ids |= {one.msg_id for one in used[2:]}


def _store_size(p: Planting, size: int) -> None:
    path, records = p.store_file(4)
    used = [record for record in records if p.in_use(path.name, record)]
    data = bytearray(path.read_bytes())
    struct.pack_into(">Q", data, used[1].begin, size)
    p.write(path, data)
    p.doubtful_ids |= {one.msg_id for one in used[1:]}


@damage("stored")
def store_huge_size(p: Planting) -> None:
    """A record of a message file says that it has 2^40 bytes."""
    _store_size(p, 2**40)


@damage("stored")
def store_negative_size(p: Planting) -> None:
    """A record of a message file says that it has -1 bytes."""
    _store_size(p, 2**64 - 1)


@damage("stored")
def store_small_size(p: Planting) -> None:
    """A record of a message file says that it has fewer bytes than a message id."""
    _store_size(p, 3)


@damage("stored")
def store_temporary_file(p: Planting) -> None:
    """A compaction was broken off: the last messages of a file are in its `.rdt`."""
    path, records = p.store_file()
    begin = records[len(records) // 2].begin
    data = path.read_bytes()
    p.write(path, data[:begin])
    p.write(path.with_suffix(".rdt"), data[begin:])


@damage("stored")
def store_temporary_repeats(p: Planting) -> None:
    """A compaction was broken off: the last messages of a file are in its `.rdt` too."""
    path, records = p.store_file()
    p.write(path.with_suffix(".rdt"), path.read_bytes()[records[len(records) // 2].begin :])


@damage("stored")
def store_temporary_alone(p: Planting) -> None:
    """There is the `.rdt` of a message file, but not the file."""
    path, _ = p.store_file()
    path.rename(path.with_suffix(".rdt"))


@damage("stored")
def store_orphans(p: Planting) -> None:
    """A message file has messages that no queue refers to."""
    path, _ = p.store_file()
    with open(path, "ab") as file:
        for _ in range(3):
            msg_id = p.rng.randbytes(16)
            file.write(oracle.rdq_record(msg_id, oracle.message_term(b"orphan" * 1000, msg_id)))


@damage("stored")
def store_repeats(p: Planting) -> None:
    """A message is in two message files."""
    path, records = p.store_file()
    record = p.rng.choice([record for record in records if p.in_use(path.name, record)])
    highest = max(p.store.glob("*.rdq"), key=lambda one: int(one.stem))
    with open(highest, "ab") as file:
        file.write(oracle.rdq_record(record.msg_id, record.term))


@damage("stored")
def store_no_term(p: Planting) -> None:
    """The first byte of a message in the store, the version of its term, has a bit turned over."""
    path, records = p.store_file()
    record = p.rng.choice([record for record in records if p.in_use(path.name, record)])
    data = bytearray(path.read_bytes())
    flip(data, record.begin + 24, p.rng.randrange(8))
    p.write(path, data)
    p.doubtful_ids.add(record.msg_id)


@damage("stored")
def store_deleted(p: Planting) -> None:
    """The whole folder of the persistent store is not there."""
    p.store_file(1)
    shutil.rmtree(p.store)
    p.lost_ids |= set(p.before.references)


@damage("stored", "shared")
def store_shared_message_lost(p: Planting) -> None:
    """A message that two queues refer to is no longer whole in the store."""
    shared = sorted(msg_id for msg_id, count in p.before.references.items() if count > 1)
    if not shared:
        raise Unsuitable(f"{p.path}: no message is referred to twice")
    msg_id = p.rng.choice(shared)
    file, begin, term = p.before.located[msg_id]
    data = bytearray((p.store / file).read_bytes())
    data[begin + 24 + len(term)] = 0
    p.write(p.store / file, data)
    p.lost_ids.add(msg_id)
    _doubt_message(p, msg_id)


# ---------------------------------------------------------------------------------------------------------------
# Files of an orderly stop


def _dets(p: Planting) -> bytearray:
    if not p.before.clean:
        raise Unsuitable(f"{p.path}: the node was not stopped in an orderly way")
    return bytearray((p.path / "recovery.dets").read_bytes())


def _term_at(p: Planting, data: bytes, wanted: str) -> tuple[str, int]:
    """A v1 queue with messages, and where the value of one of its recovery terms begins."""
    candidates = sorted(d for d, queue in p.before.queues.items() if queue.version == 1 and len(queue.entries) > 6)
    directory = p.rng.choice(candidates)
    at = data.index(directory.encode())
    name = oracle.encode(oracle.Atom(wanted))[1:]
    return directory, data.index(name, at) + len(name)


@damage("clean")
def terms_missing(p: Planting) -> None:
    """`recovery.dets` is not there."""
    _dets(p)
    (p.path / "recovery.dets").unlink()


@damage("clean")
def terms_cut(p: Planting) -> None:
    """`recovery.dets` is cut."""
    data = _dets(p)
    p.write(p.path / "recovery.dets", data[: p.rng.randrange(5600, len(data) - 10)])


@damage("clean")
def terms_cut_in_header(p: Planting) -> None:
    """`recovery.dets` is cut within its header."""
    p.write(p.path / "recovery.dets", _dets(p)[: p.rng.randrange(1, 1000)])


@damage("clean")
def terms_header_flipped(p: Planting) -> None:
    """A bit of the magic number of `recovery.dets` is turned over."""
    data = _dets(p)
    flip(data, 4 + p.rng.randrange(4), p.rng.randrange(8))
    p.write(p.path / "recovery.dets", data)


@damage("clean")
def terms_zeros(p: Planting) -> None:
    """`recovery.dets` is zeros."""
    p.write(p.path / "recovery.dets", bytes(len(_dets(p))))


@damage("clean")
def terms_name_flipped(p: Planting) -> None:
    """The name of one of the recovery terms has a bit turned over."""
    data = _dets(p)
    _, at = _term_at(p, data, "next_seq_id")
    flip(data, at - 3, 1)
    p.write(p.path / "recovery.dets", data)


@damage("clean")
def terms_next_seq_id_too_low(p: Planting) -> str:
    """The recovery terms say a next sequence id that is in use already."""
    data = _dets(p)
    _, at = _term_at(p, data, "next_seq_id")
    if data[at] == 97:
        data[at + 1] = 1
    else:
        data[at + 1 : at + 5] = struct.pack(">i", 1)
    p.write(p.path / "recovery.dets", data)
    return "everything is there; the node would give its numbers a second time"


@damage("clean")
def terms_count_wrong(p: Planting) -> str:
    """The recovery terms say that there are no persistent messages."""
    data = _dets(p)
    _, at = _term_at(p, data, "persistent_count")
    data[at + 1 : at + (2 if data[at] == 97 else 5)] = bytes(1 if data[at] == 97 else 4)
    p.write(p.path / "recovery.dets", data)
    return "everything is there; the node would believe the count"


@damage("clean", "journal")
def terms_but_journal_edited(p: Planting) -> str:
    """A publish was appended to the journal of a queue whose recovery terms do not know it."""
    _dets(p)
    directory = p.journals()
    seq = p.before.queues[directory].next_seq_id
    publish = p.new_publish(directory, seq)
    p.append_journal(directory, Record("pub", seq, 0, 0, publish), Record("del", seq, 0, 0))
    return "the planted message is one of the queue's: it must come out too"


@damage("clean", "stored")
def clean_missing(p: Planting) -> None:
    """`clean.dot` is not there."""
    _dets(p)
    (p.store / "clean.dot").unlink()


@damage("clean", "stored")
def clean_garbage(p: Planting) -> None:
    """`clean.dot` is cut."""
    _dets(p)
    data = (p.store / "clean.dot").read_bytes()
    p.write(p.store / "clean.dot", data[: len(data) // 2])


@damage("clean", "stored")
def clean_foreign_reference(p: Planting) -> None:
    """`clean.dot` names a reference that no queue has."""
    _dets(p)
    data = (p.store / "clean.dot").read_bytes()
    at = data.index(b"<<") + 2
    p.write(p.store / "clean.dot", data[:at] + b"1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16>>,\n <<" + data[at:])


@damage("clean", "stored")
def index_table_cut(p: Planting) -> None:
    """`msg_store_index.ets` is cut."""
    _dets(p)
    path = p.store / "msg_store_index.ets"
    p.write(path, path.read_bytes()[: path.stat().st_size // 2])


@damage("clean", "stored")
def summary_table_flipped(p: Planting) -> None:
    """The magic number of `file_summary.ets` has a bit turned over."""
    _dets(p)
    path = p.store / "file_summary.ets"
    data = bytearray(path.read_bytes())
    flip(data, p.rng.randrange(4), p.rng.randrange(8))
    p.write(path, data)


def _edit_index(p: Planting, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    _dets(p)
    p.store_file()
    path = p.store / "msg_store_index.ets"
    items = oracle.parse_ets(path.read_bytes())
    p.write(path, oracle.encode_ets([items[0], *map(change, items[1:-1]), items[-1]]))


@damage("clean", "stored", "shared")
def index_table_wrong_counts(p: Planting) -> str:
    """Every message in `msg_store_index.ets` is referred to once, also those that two queues share."""
    if not any(count > 1 for count in p.before.references.values()):
        raise Unsuitable(f"{p.path}: no message is referred to twice")
    _edit_index(p, lambda entry: (*entry[:2], min(entry[2], 1), *entry[3:]))
    return "the node would delete a message with the first ack of it, and the other queue would lose it"


@damage("clean", "stored")
def index_table_wrong_offsets(p: Planting) -> str:
    """Every message in `msg_store_index.ets` lies a byte further than it does."""
    _edit_index(p, lambda entry: (*entry[:4], entry[4] + 1, entry[5]))
    return "everything is there; the node would read at wrong places"


# ---------------------------------------------------------------------------------------------------------------
# Version 2


def _lose_v2(p: Planting, folder: Path, seqs: Iterable[int], *, doubtful: bool = False) -> None:
    (p.more_doubtful if doubtful else p.more_lost).setdefault(folder.name, set()).update(seqs)


@damage("v2")
def v2_index_magic(p: Planting) -> None:
    """The magic number of `0.qi` has a bit turned over."""
    folder, entries = p.version_2()
    data = bytearray((folder / "0.qi").read_bytes())
    flip(data, p.rng.randrange(4), p.rng.randrange(8))
    p.write(folder / "0.qi", data)
    _lose_v2(p, folder, {entry.seq for entry in entries}, doubtful=True)


@damage("v2")
def v2_index_cut(p: Planting) -> None:
    """`0.qi` ends within an entry."""
    folder, entries = p.version_2()
    entry = entries[len(entries) // 2]
    cut = 64 + 32 * entry.seq + p.rng.randrange(1, 32)
    p.write(folder / "0.qi", (folder / "0.qi").read_bytes()[:cut])
    _lose_v2(p, folder, {one.seq for one in entries if one.seq >= entry.seq})


@damage("v2")
def v2_index_status(p: Planting) -> None:
    """An entry of `0.qi` has a status that does not exist."""
    folder, entries = p.version_2()
    entry = p.rng.choice(entries)
    data = bytearray((folder / "0.qi").read_bytes())
    data[64 + 32 * entry.seq] = 7
    p.write(folder / "0.qi", data)
    _lose_v2(p, folder, {entry.seq}, doubtful=True)


def _v2_own(p: Planting) -> tuple[Path, list[oracle.EntryV2], oracle.EntryV2]:
    folder, entries = p.version_2()
    own = sorted((entry for entry in entries if entry.place == 2), key=lambda entry: entry.offset)
    return folder, own, own[len(own) // 2]


@damage("v2")
def v2_index_offset(p: Planting) -> None:
    """An entry of `0.qi` says that its message lies at 2^40."""
    folder, _, entry = _v2_own(p)
    data = bytearray((folder / "0.qi").read_bytes())
    struct.pack_into(">Q", data, 64 + 32 * entry.seq + 4, 2**40)
    p.write(folder / "0.qi", data)
    _lose_v2(p, folder, {entry.seq}, doubtful=True)


@damage("v2")
def v2_store_cut(p: Planting) -> None:
    """`0.qs` ends within a message."""
    folder, own, entry = _v2_own(p)
    cut = entry.offset + p.rng.randrange(1, 8 + entry.term_size)
    p.write(folder / "0.qs", (folder / "0.qs").read_bytes()[:cut])
    _lose_v2(p, folder, {one.seq for one in own if one.offset >= entry.offset})


@damage("v2")
def v2_store_deleted(p: Planting) -> None:
    """`0.qs` is not there."""
    folder, own, _ = _v2_own(p)
    (folder / "0.qs").unlink()
    _lose_v2(p, folder, {one.seq for one in own})


@damage("v2")
def v2_store_flipped(p: Planting) -> None:
    """A message in `0.qs` has a bit turned over, which its checksum shows."""
    folder, _, entry = _v2_own(p)
    data = bytearray((folder / "0.qs").read_bytes())
    flip(data, entry.offset + 8 + entry.term_size // 2, p.rng.randrange(8))
    p.write(folder / "0.qs", data)
    _lose_v2(p, folder, {entry.seq})
    _lose_v2(p, folder, {entry.seq}, doubtful=True)


@damage("v2")
def v2_store_magic(p: Planting) -> None:
    """The magic number of `0.qs` has a bit turned over."""
    folder, own, _ = _v2_own(p)
    data = bytearray((folder / "0.qs").read_bytes())
    flip(data, p.rng.randrange(4), p.rng.randrange(8))
    p.write(folder / "0.qs", data)
    _lose_v2(p, folder, {one.seq for one in own}, doubtful=True)


def by_name(name: str) -> Damage:
    """The damage of that name."""
    return next(one for one in DAMAGES if one.name == name)
