"""The life of a vhost from one seed: writers in turns, stops of all kinds, readers held against a model, and damage.

Owns the model (what each queue must hold), the lives, and the command: ``python -m tests.rabbitmq.vhost_life --seed 7``.  The
model knows no file: it takes a note of each deed and says what may be there after a death.  What a node makes of the bytes says the
oracle.  Damage is random here and known in kind only; what it may take away is told from the bytes that it changed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    # As pytest has it.
    HERE = Path(__file__).resolve().parent
    sys.path[:0] = [str(HERE), str(HERE.parent)]

import classic_queue_oracle as oracle
import vhost_writers as writers
from scratch import SCRATCH
from vhost_writers import Death, Killed, Letter, Node, Package

from rmqstore.errors import StoreError
from rmqstore.rabbitmq import Consequence, Message, Vhost, export, import_messages, repair, verify

NAMES = ("orders", "bills", "mails")
HARMLESS = {Consequence.REPAIRS, Consequence.NONE}
DAMAGES = ("bit", "noise", "zeros", "cut", "another", "gone")
TAILS = {"torn_record", "zero_tail", "nul_file"}
NEVER = 1 << 60
Found = dict[str, dict[int, tuple[bytes, bytes]]]


class LifeFailed(Exception):
    """A reader's answer is not what the model says."""


class Answers(NamedTuple):
    """The package's view of a vhost, by the directory of a queue: (message id, body) by sequence id."""

    given: Found
    lost: dict[str, set[int]]
    incomplete: dict[str, list[Any]]
    findings: list[Any]
    exported: Counter[tuple[str, bytes]]
    #: Of those given, what the index calls transient.
    transient: dict[str, set[int]]
    #: Of those given, whose properties cannot be read: their body can.
    spoilt: dict[str, set[int]]

    def lasting(self, directory: str) -> dict[int, tuple[bytes, bytes]]:
        """Messages of a queue that survive a start of a node; others were damaged."""
        faded = self.transient.get(directory, set())
        return {seq: one for seq, one in self.given.get(directory, {}).items() if seq not in faded}


class Queue:
    """The model of a queue: the messages that are surely on the disk, and the actions since then."""

    def __init__(self, name: str):
        self.name = name
        self.directory = oracle.queue_dir(b"/", name.encode())
        self.sure: dict[int, Letter] = {}
        self.deeds: list[tuple[int, Letter | None]] = []
        #: What damage made transient: it goes when a node starts, which the model has not.
        self.faded: set[int] = set()
        #: Every message that was ever in it.
        self.ever: set[tuple[bytes, bytes]] = set()

    def publish(self, seq: int, letter: Letter) -> None:
        self.deeds.append((seq, letter))
        self.ever.add((letter.msg_id, letter.body))

    def ack(self, seq: int) -> None:
        self.deeds.append((seq, None))

    def settle(self) -> None:
        """All that was done is on the disk."""
        for seq, letter in self.deeds:
            if letter is None:
                assert seq in self.sure, f"{self.name}: {seq} was there after its ack"
                del self.sure[seq]
            else:
                self.sure[seq] = letter
        self.deeds.clear()

    def adopt(self, found: dict[int, tuple[bytes, bytes]]) -> None:
        """The state after a death or damage is the current one."""
        self.deeds.clear()
        self.sure = {seq: Letter(msg_id, body, b"") for seq, (msg_id, body) in found.items()}
        self.ever.update(found.values())

    def check(self, found: dict[int, tuple[bytes, bytes]], count: int, torn: set[int]) -> None:
        """Hold what a death left against what may be there: of each segment the state after some of its deeds.

        Of one that is `torn` any part of what was not sure: a flush writes it from the end.
        """
        numbers = {seq // count for seq in (*self.sure, *(seq for seq, _ in self.deeds), *found)}
        for number in sorted(numbers):
            state = {seq: (one.msg_id, one.body) for seq, one in self.sure.items() if seq // count == number}
            there = {seq: one for seq, one in found.items() if seq // count == number}
            may_lack: set[int] = set()
            states = [dict(state)]
            for seq, letter in self.deeds:
                if seq // count != number:
                    continue
                if letter is None:
                    assert seq in state, f"{self.name}: {seq} was there after its ack"
                    del state[seq]
                else:
                    state[seq] = (letter.msg_id, letter.body)
                    if letter.stored:
                        may_lack.add(seq)
                states.append(dict(state))
            if number in torn:
                kept = set(states[0]).intersection(*states)
                every = {seq: one for each in states for seq, one in each.items()}
                assert kept <= set(there), f"{self.name}, torn segment {number}: lacks {sorted(kept - set(there))}"
                assert all(every.get(seq) == one for seq, one in there.items()), f"{self.name}, torn segment {number}"
                continue
            for each in states:
                missing = set(each) - set(there)
                if missing <= may_lack and all(each.get(seq) == one for seq, one in there.items()):
                    break
            else:
                raise AssertionError(
                    f"{self.name}, segment {number}: found {sorted(there)}, which is none of "
                    f"{[sorted(each) for each in states]}"
                )


def tree(path: Path) -> dict[str, bytes]:
    return {os.path.relpath(file, path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def ask(path: Path) -> Answers:
    """Ask every reader, and see that none changes a byte and that they say the same."""
    before = tree(path)
    findings = list(verify(path))
    given: Found = {}
    lost: dict[str, set[int]] = {}
    incomplete: dict[str, list[Any]] = {}
    transient: dict[str, set[int]] = {}
    spoilt: dict[str, set[int]] = {}
    with Vhost.open(path) as vhost:
        stray = vhost.incomplete
        for queue in vhost.queues():
            for each in queue.directories:
                told: list[Any] = []
                rows = list(queue.messages(told.append))
                seqs = [row.seq_id for row in rows]
                assert len(set(seqs)) == len(seqs), f"{queue.name}: given twice: {seqs}"
                assert seqs == sorted(seqs), f"{queue.name}: out of order: {seqs}"
                given[each.name] = {row.seq_id: (row.msg_id, row.body) for row in rows}
                lost[each.name] = {one.seq_id for one in told}
                transient[each.name] = {row.seq_id for row in rows if not row.persistent}
                spoilt[each.name] = {row.seq_id for row in rows if is_spoilt(row.message)}
                assert queue.depth == len(rows) + len(told), f"{queue.name}: a depth of {queue.depth}"
                incomplete[each.name] = [*queue.incomplete, *stray]
        lines = io.BytesIO()
        whole: list[Any] = []
        number = export(vhost, lines, on_lost=whole.append, on_incomplete=whole.append)
    texts = [json.loads(line) for line in lines.getvalue().splitlines()]
    exported = Counter(
        (one["msg_id"], one["body"].encode() if "body" in one else base64.b64decode(one["body_base64"])) for one in texts
    )
    assert number == len(texts) <= sum(map(len, given.values()))
    assert tree(path) == before, "a reader changed a file"
    return Answers(given, lost, incomplete, findings, exported, transient, spoilt)


def is_spoilt(message: Message) -> bool:
    """bool: the properties cannot be read."""
    try:
        message.properties  # noqa: B018
    except StoreError:
        return True
    return False


def scars(path: Path) -> set[tuple[str, int]]:
    """The positions of damaged records and of records without a mark in the message files, by the oracle."""
    found = set()
    for file in (*path.glob("*.rdq"), *path.glob("*.rdt")):
        parsed = oracle.parse_rdq(file.read_bytes())
        wrong = {record.begin for record in parsed.records if not record.whole}
        wrong |= {parsed.used} if parsed.why != "end" else set()
        found |= {(file.name, at) for at in wrong}
        whole = file.with_suffix(".rdq")
        if file.suffix == ".rdt" and whole.exists():
            # The next opening moves it to the end of its file's scan.
            end = oracle.parse_rdq(whole.read_bytes()).used
            found |= {(whole.name, end + at) for at in wrong}
    return found


def by_oracle(path: Path) -> oracle.Vhost | None:
    """The messages after a start of a node; None if the oracle, which does not read hostile bytes, fails."""
    try:
        return oracle.read_vhost(path)
    except Exception:
        return None


def entries(queue: oracle.Queue) -> dict[int, tuple[bytes, bytes]]:
    return {entry.seq: (entry.msg_id, entry.message.body) for entry in queue.entries}


class Life:
    """One life, below `path`."""

    def __init__(self, seed: int, path: Path, length: int = 60):
        self.rng = random.Random(seed)
        self.path = path
        self.length = length
        self.vhost = path / "vhost"
        self.queues = {name: Queue(name) for name in NAMES[: self.rng.randint(1, 3)]}
        self.count = self.rng.choice((4, 8, 16, 64))
        self.steps = 0
        self.done: Counter[str] = Counter()
        self.story: list[str] = []
        self.numbers = 0
        #: What deaths and damages left in the message files, where nobody needs it.
        self.scars: set[tuple[str, int]] = set()
        (self.vhost / "queues").mkdir(parents=True)
        (self.vhost / ".vhost").write_bytes(b"/")
        (self.vhost / ".config").write_bytes(oracle.config_text(self.count))

    def say(self, what: str, *more: object) -> None:
        self.steps += 1
        self.done[what] += 1
        self.story.append(" ".join(map(str, (self.steps, what, *more))))

    def run(self) -> None:
        try:
            with mock.patch("os.urandom", self.rng.randbytes):
                while self.steps < self.length:
                    self.session()
                    if self.rng.random() < 0.25:
                        self.repair_and_go_on()
                    if self.rng.random() < 0.3:
                        self.importing()
                    if self.rng.random() < 0.35:
                        self.damage()
        except Exception as error:
            raise LifeFailed("\n".join([*self.story[-25:], traceback.format_exc()])) from error

    # ------------------------------------------------------------------------------------------------------ sessions

    def session(self) -> None:
        """One process writes, until it stops or dies."""
        rng = self.rng
        ours = rng.random() < 0.5
        deadly = rng.random() < 0.5
        death = Death(self.vhost, rng.randint(1, 120) if deadly else NEVER, rng, power=rng.random() < 0.5)
        names = tuple(self.queues)
        self.say("starts", "the package" if ours else "a node", f"power={death.power}" if ours else "")
        try:
            writer = Package(self.vhost, names, rng, death) if ours else Node(self.vhost, names, rng)
            for _ in range(rng.randint(2, 14)):
                self.deed(writer)
            if rng.random() < 0.5:
                self.say("closes")
                writer.close()
                for queue in self.queues.values():
                    queue.settle()
                self.hold("closed", clean=True)
                return
            self.say("dies")
            writer.die()
        except Killed as killed:
            self.say("killed", f"in {killed}, call {death.calls}")
            death.lose_pages()
        self.after_death(death.torn)

    def deed(self, writer: Node | Package) -> None:
        rng = self.rng
        what = rng.choices(("publishes", "acks", "syncs", "flushes", "merges"), (6, 5, 3, 2, 1))[0]
        name = rng.choice(list(self.queues))
        queue = self.queues[name]
        if what == "publishes":
            # A fan-out leads to one stored message from several queues.
            letters = [self.letter() for _ in range(rng.choice((1, 1, 2, 5, 9)))]
            targets = list(self.queues) if rng.random() < 0.3 else [name]
            self.say(what, targets, [len(one.body) for one in letters], "at", [writer.next_seq(one) for one in targets])
            for target in targets:
                first = writer.next_seq(target)
                for number, letter in enumerate(letters):
                    self.queues[target].publish(first + number, letter)
                writer.publish(target, letters)
        elif what == "acks":
            live = [seq for seq in writer.live(name) if seq not in queue.faded]
            oldest = live[: rng.choice((1, 3, 10, 100))] if rng.random() < 0.6 else live
            chosen = sorted(rng.sample(oldest, rng.randint(0, len(oldest))))
            self.say(what, name, chosen)
            for seq in chosen:
                queue.ack(seq)
            if chosen:
                writer.ack(name, chosen)
        elif what in ("syncs", "flushes"):
            self.say(what, name)
            getattr(writer, what[:-1] if what == "syncs" else "flush")(name)
            queue.settle()
            if rng.random() < 0.3:
                self.hold("live", only=name)
        else:
            self.say(what)
            writer.merge()

    def letter(self) -> Letter:
        self.numbers += 1
        body = b"%d." % self.numbers + b"x" * self.rng.choice((0, 5, 60, 150, 300, 700))
        msg_id = self.rng.randbytes(16)
        return Letter(msg_id, body, oracle.message_term(body, msg_id, routing_keys=[b"k"]))

    def after_death(self, written: set[Path]) -> None:
        """Hold what is left against the model; `written` are files of which something was not forced."""
        said = self.hold("dead")
        node = oracle.read_vhost(self.vhost)
        for queue in self.queues.values():
            found = said.lasting(queue.directory)
            crashes = node.queues[queue.directory].crashes if queue.directory in node.queues else []
            torn = {int(one.file[:-4]) for one in crashes if one.file.endswith(".idx")}
            torn |= {int(file.stem) for file in written if file.suffix == ".idx" and file.parent.name == queue.directory}
            queue.check(found, self.count, torn)
            queue.adopt(found)
        self.note_what_stays()
        if node.crashes:
            self.done["torn segments"] += 1
            self.repair_and_go_on()

    # ------------------------------------------------------------------------------------------------------- readers

    def hold(self, how: str, *, clean: bool = False, only: str = "") -> Answers:
        """Hold all readers against the oracle, and against the model where that knows all."""
        found = oracle.read_vhost(self.vhost)
        said = ask(self.vhost)
        grave = [one for one in said.findings if one.consequence not in HARMLESS]
        for directory, queue in found.queues.items():
            own = [one for one in grave if directory in one.path]
            if queue.crashes:
                assert any(one.consequence is Consequence.HANGS for one in own), (queue.crashes, said.findings)
                continue
            want = entries(queue)
            given = said.lasting(directory)
            assert given == want, self.difference(how, given, want)
            # A transient message may be read or missing: a node drops it.
            faded = set(queue.transient)
            assert said.transient[directory] <= faded <= said.transient[directory] | said.lost[directory]
            dropped = set(queue.dropped) - faded
            assert said.lost[directory] - faded == dropped, (said.lost[directory], queue.dropped)
            assert not said.incomplete[directory], said.incomplete[directory]
            assert bool(dropped) == bool(own), (how, own, queue.dropped)
            assert {one.kind for one in own} <= {"lost_message"}, own
        if not found.crashes:
            # What a death cut within a record, or power took of what was not forced, was never whole; verify cannot know
            # that, and names it.
            known = how in ("dead", "imported") or scars(self.vhost / writers.STORE) <= self.scars
            torn = {"torn_record", "unwritten_record", "zero_stretch"} if known else set()
            strange = [
                one
                for one in grave
                if one.kind != "lost_message" and not (one.path.endswith((".rdq", ".rdt")) and one.kind in torn)
            ]
            assert not strange, strange
            bodies = Counter(
                (entry.msg_id.hex(), entry.message.body)
                for queue in found.queues.values()
                for entry in queue.entries
            )
            for queue in self.queues.values():
                given = said.given.get(queue.directory, {})
                bodies.update((given[seq][0].hex(), given[seq][1]) for seq in said.transient.get(queue.directory, ()))
            assert said.exported == bodies
        if clean:
            assert found.clean and not said.findings, said.findings
        for name, queue in self.queues.items():
            if clean or name == only:
                want = {seq: (one.msg_id, one.body) for seq, one in queue.sure.items()}
                given = said.lasting(queue.directory)
                assert given == want, self.difference(how, given, want)
        return said

    @staticmethod
    def difference(how: str, given: dict[int, Any], want: dict[int, Any]) -> str:
        missing = sorted(set(want) - set(given))
        more = sorted(set(given) - set(want))
        other = sorted(seq for seq in set(given) & set(want) if given[seq] != want[seq])
        return f"{how}: missing {missing}, too many {more}, others {other}"

    def repaired(self) -> tuple[Path, Any]:
        """Repair into a copy, which a node must boot on and which holds what can be read here."""
        output = self.path / f"repaired-{self.steps}"
        before = tree(self.vhost)
        report = repair(self.vhost, output)
        assert tree(self.vhost) == before, "repair changed its source"
        findings = [one for one in verify(output) if one.consequence is not Consequence.NONE]
        assert not findings, findings
        found = oracle.read_vhost(output)
        crashes = [one for queue in found.queues.values() for one in queue.crashes]
        # The oracle takes no message whose decoded properties are neither there nor "none"; a node does not look at them.
        assert all(one.why.startswith("term of") for one in crashes), crashes
        return output, report

    def repair_and_go_on(self) -> None:
        self.say("repairs")
        said = ask(self.vhost)
        output, report = self.repaired()
        found = oracle.read_vhost(output)
        for directory, given in said.given.items():
            want = entries(found.queues[directory]) if directory in found.queues else {}
            assert want == given, self.difference("repaired", want, given)
        assert report.messages == sum(map(len, said.given.values()))
        assert report.lost >= sum(map(len, said.lost.values()))
        shutil.rmtree(self.vhost)
        output.rename(self.vhost)
        for queue in self.queues.values():
            queue.adopt(said.lasting(queue.directory))
        self.note_what_stays()

    def importing(self) -> None:
        """Import into a queue, perhaps to die; what was there is there, and of the new ones the first."""
        rng = self.rng
        name = rng.choice(list(self.queues))
        queue = self.queues[name]
        letters = [self.letter() for _ in range(rng.choice((1, 3, 12)))]
        messages = [Message.from_term(letter.term) for letter in letters]
        state = rng.choice(("auto", "dirty", "exact"))
        death = Death(self.vhost, rng.randint(1, 60) if rng.random() < 0.6 else NEVER, rng, power=rng.random() < 0.5)
        self.say("imports", name, state, [len(one.body) for one in letters])
        before = ask(self.vhost)
        files = tree(self.vhost)
        try:
            with death:
                report = import_messages(
                    self.vhost, name, messages, state=state, declared=True, embed_below=writers.EMBED_BELOW
                )
        except StoreError as error:
            assert state == "exact" and "no recovery terms" in str(error), error
            assert tree(self.vhost) == files, "an import that was refused changed a file"
            return
        except Killed as killed:
            self.say("killed", f"in {killed}, call {death.calls}")
            death.lose_pages()
        else:
            assert report.messages == len(letters)
        said = self.hold("imported")
        torn = oracle.read_vhost(self.vhost).crashes
        for other, one in self.queues.items():
            given = said.lasting(one.directory)
            old = before.lasting(one.directory)
            new = [value for seq, value in sorted(given.items()) if seq not in old]
            assert {seq: value for seq, value in given.items() if seq in old} == old, f"{other} lost by an import"
            want = [(letter.msg_id, letter.body) for letter in letters] if other == name else []
            if torn:
                # A segment is written from its end: of one that is cut there are the last ones.
                assert [value for value in want if value in new] == new, f"{other}: {len(new)} new ones"
            else:
                assert new == want[: len(new)], f"{other}: {len(new)} new ones"
            assert death.dead or len(new) == len(want)
        for letter in letters:
            queue.ever.add((letter.msg_id, letter.body))
        for one in self.queues.values():
            one.adopt(said.lasting(one.directory))
        self.note_what_stays()
        if torn:
            self.done["torn segments"] += 1
            self.repair_and_go_on()

    # -------------------------------------------------------------------------------------------------------- damage

    def note_what_stays(self) -> None:
        """A death or a damage may leave what nobody needs, and a message transient."""
        self.scars = scars(self.vhost / writers.STORE)
        found = oracle.read_vhost(self.vhost).queues
        for queue in self.queues.values():
            queue.faded = set(found[queue.directory].transient) if queue.directory in found else set()

    def damage(self) -> None:
        """Damage one file, and hold every reader against what the damage can have hit."""
        rng = self.rng
        before = ask(self.vhost)
        sound = oracle.read_vhost(self.vhost)
        files = sorted(file for file in self.vhost.rglob("*") if file.is_file() and file.stat().st_size)
        file = rng.choice(files)
        old = file.read_bytes()
        kind = rng.choice(DAMAGES)
        if kind == "another" and file.name == ".queue_name":
            # Two directories of one name are one queue, which has its sequence ids twice.
            return
        if kind == "gone":
            new = None
            file.unlink()
        else:
            new = changed(kind, old, rng, [one.read_bytes() for one in files if one != file])
            file.write_bytes(new)
        first, last = touched(old, new)
        self.say("damage", kind, file.relative_to(self.vhost), f"bytes {first} to {last} of {len(old)}")
        if new == old:
            return
        said = ask(self.vhost)
        found = by_oracle(self.vhost)
        judge = Judge(self, file, (first, last), kind, before, sound, said, found)
        judge.judge()
        refused = None
        try:
            output, report = self.repaired()
        except StoreError as error:
            refused = error
        self.import_into_damage(said)
        if refused is not None:
            raise AssertionError(f"repair refused: {refused}")
        repaired = by_oracle(output)
        if repaired is None or repaired.crashes:
            self.done["lives that end in a message that only the oracle refuses"] += 1
            self.steps = self.length
            return
        for directory, given in said.given.items():
            # A node's queue crashes when it comes to such a message, and repair leaves it out.
            given = {seq: one for seq, one in given.items() if seq not in said.spoilt[directory]}
            have = entries(repaired.queues[directory]) if directory in repaired.queues else {}
            if file.name in (".vhost", ".queue_name"):
                continue
            if any(one.kind in ("msg_id_mismatch", "bad_message") for one in said.findings):
                # A message whose entry has another id than itself goes on with its own.
                have = {seq: (given[seq][0] if seq in given else msg_id, body) for seq, (msg_id, body) in have.items()}
            transient = sum(one.transient for one in report.queues if one.directory == directory)
            if transient or any(one.kind == "implausible_gap" and directory in one.path for one in said.findings):
                # A bit makes a message transient, which repair counts and leaves out, there or not; a huge number is
                # given up.
                missing, more = (Counter(one.values()) - Counter(other.values()) for one, other in ((given, have), (have, given)))
                faded = Counter(given[seq] for seq in said.transient[directory])
                assert missing <= faded and missing.total() <= transient, self.difference("repaired", have, given)
                assert not more, self.difference("repaired", have, given)
                continue
            assert have == given, self.difference("repaired", have, given)
        shutil.rmtree(self.vhost)
        output.rename(self.vhost)
        (self.vhost / ".vhost").write_bytes(b"/")
        again = ask(self.vhost)
        for queue in self.queues.values():
            queue.adopt(again.lasting(queue.directory))
        self.note_what_stays()
        config = oracle.parse_config((self.vhost / ".config").read_bytes())
        self.count = config or oracle.LEGACY_SEGMENT_ENTRY_COUNT

    def import_into_damage(self, said: Answers) -> None:
        """An import is refused and changes nothing, or loses nothing that could be read."""
        copy = self.path / "import"
        shutil.copytree(self.vhost, copy)
        letter = self.letter()
        name = self.rng.choice(list(self.queues))
        before = tree(copy)
        try:
            import_messages(copy, name, [Message.from_term(letter.term)], declared=True)
        except (StoreError, OSError):
            assert tree(copy) == before, "an import that was refused changed a file"
        else:
            self.done["imports into damage"] += 1
            with Vhost.open(copy) as vhost:
                after = {
                    each.name: {row.seq_id: (row.msg_id, row.body) for row in queue.messages()}
                    for queue in vhost.queues()
                    for each in queue.directories
                }
            own = oracle.queue_dir(b"/", name.encode())
            for directory, given in said.given.items():
                there = after.get(directory, {})
                assert all(there.get(seq) == one for seq, one in given.items()), "an import lost messages"
                assert len(there) <= len(given) + (directory == own), "an import brought messages back"
        shutil.rmtree(copy)


def changed(kind: str, old: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Bytes with a damage."""
    data = bytearray(old)
    at = rng.randrange(len(data))
    size = min(len(data) - at, rng.choice((1, 2, 8, 40, 200, 5000)))
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "noise":
        data[at : at + size] = rng.randbytes(size)
    elif kind == "zeros":
        data[at : at + size] = bytes(size)
    elif kind == "cut":
        del data[at:]
    else:
        data[:] = rng.choice(others) if others else b""
    return bytes(data)


def touched(old: bytes, new: bytes | None) -> tuple[int, int]:
    """The first byte that is another one, and where equal bytes begin at the same place again, to the end."""
    if new is None:
        return 0, len(old)
    first = next((at for at, (one, other) in enumerate(zip(old, new)) if one != other), min(len(old), len(new)))
    if len(old) != len(new):
        return first, max(len(old), len(new))
    last = len(old)
    while last > first and old[last - 1] == new[last - 1]:
        last -= 1
    return first, last


class Judge:
    """Check that answers about a vhost with one damaged file are as good as they can be."""

    def __init__(
        self, life: Life, file: Path, hit: tuple[int, int], kind: str, before: Answers, sound: oracle.Vhost,
        said: Answers, found: oracle.Vhost | None,
    ):  # fmt: skip
        self.life, self.file, self.kind = life, file, kind
        self.first, self.last = hit
        self.before, self.sound, self.said, self.found = before, sound, said, found

    def judge(self) -> None:
        name = self.file.name
        if name in (".config", ".vhost", ".queue_name"):
            self.small_file()
        elif name == "recovery.dets" or name in writers.CLEAN_FILES:
            # Nothing in them is a message, and nothing in them proves that it is right.
            for directory, given in self.before.given.items():
                assert self.said.given[directory] == given, Life.difference(name, self.said.given[directory], given)
        elif self.file.parent.name == writers.STORE:
            self.message_file()
        else:
            self.index_file()

    def small_file(self) -> None:
        given = Counter(one for queue in self.said.given.values() for one in queue.values())
        want = Counter(one for queue in self.before.given.values() for one in queue.values())
        if self.file.name != ".config":
            assert given == want, f"{sum(given.values())} of {sum(want.values())} messages"
        elif given != want and not self.said.findings:
            # Another count that fits as well: it is what a node goes by.
            assert self.found is not None and not self.found.crashes
            assert self.said.given == {name: entries(queue) for name, queue in self.found.queues.items()}

    def as_a_node(self, directory: str) -> bool:
        """The bytes say what the answer says, with nothing wrong in them."""
        queue = None if self.found is None else self.found.queues.get(directory)
        if queue is None:
            return False
        return not queue.crashes and entries(queue) == self.said.given.get(directory)

    def message_file(self) -> None:
        number = self.file.name
        for directory, queue in self.sound.queues.items():
            given = self.said.given[directory]
            old = self.before.given[directory]
            for entry in queue.entries:
                one = given.get(entry.seq)
                want = old[entry.seq]
                file, begin, term = self.sound.located.get(entry.msg_id, ("", 0, b""))
                end = begin + 25 + len(term)
                beside = end <= self.first or (begin >= self.last and self.kind in ("bit", "noise", "zeros"))
                if not entry.stored or (file != number and self.file.suffix == ".rdq") or (file == number and beside):
                    assert one == want, f"{entry.seq} of {directory} was not hit, and is {'another' if one else 'missing'}"
                elif one is None:
                    assert entry.seq in self.said.lost[directory], f"{entry.seq} of {directory} is missing without a word"
                    assert self.worded(directory), f"verify does not name {entry.seq} of {directory}"
                elif one != want:
                    assert one[0] == want[0] and (self.as_a_node(directory) or self.said.findings), entry.seq
            assert set(given) <= set(old), f"{sorted(set(given) - set(old))} of {directory} were made up"

    def worded(self, directory: str) -> bool:
        return any(
            directory in one.path or writers.STORE in one.path
            for one in self.said.findings
            if one.consequence is not Consequence.NONE
        )

    def index_file(self) -> None:
        own = self.file.parent.name
        for directory in self.sound.queues:
            given = self.said.given.get(directory, {})
            old = self.before.given[directory]
            if directory != own:
                assert given == old, Life.difference(f"{directory} was not hit", given, old)
                continue
            if self.as_a_node(directory):
                continue
            missing = set(old) - set(given) - self.said.lost.get(directory, set())
            if self.file.name == "journal.jif" and not self.sound.queues[directory].clean:
                # The state after a crash, which is not a loss; verify names it.
                tails = [one for one in self.said.findings if one.path == str(self.file) and one.kind in TAILS]
                missing = set() if tails else missing
            if missing and not self.said.incomplete.get(directory):
                raise AssertionError(f"{sorted(missing)} are missing without a word; {self.said.findings}")
            if given != old:
                named = [one for one in self.said.findings if one.consequence is not Consequence.NONE]
                assert named, Life.difference("verify says nothing", given, old)
            ever = next(one.ever for one in self.life.queues.values() if one.directory == directory)
            by_node = {} if self.found is None else entries(self.found.queues[directory])
            for seq, one in given.items():
                if one in ever or by_node.get(seq) == one or self.kind == "another":
                    continue
                # A body has no checksum: any bytes in its place are used.
                assert any(one[0] == msg_id for msg_id, _ in ever) and self.kind != "cut", f"{seq} was made up"


# ---------------------------------------------------------------------------------------------------------------- command


@contextlib.contextmanager
def scratch():
    path = Path(tempfile.mkdtemp(prefix="rmqstore-vhost-life-", dir=SCRATCH))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def live(seed: int, length: int) -> Life:
    """Live a whole life; LifeFailed where a reader is wrong."""
    with scratch() as path:
        life = Life(seed, path, length)
        life.run()
        return life


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rabbitmq.vhost_life", description="Simulates a vhost's life.")
    parser.add_argument("--seed", type=int, default=1, help="the first life's seed (default 1)")
    parser.add_argument("--lives", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--minutes", type=float, help="go on for so long")
    parser.add_argument("--length", type=int, default=60, help="steps of a life (default 60)")
    parser.add_argument("--plant", metavar="NAME", help="with a planted fault")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that fails (code 1 at the end)")
    given = parser.parse_args(arguments)
    planted: Any = contextlib.nullcontext()
    if given.plant is not None:
        from vhost_planted import PLANTED

        if given.plant not in PLANTED:
            parser.error(f"--plant {given.plant}: give one of {', '.join(PLANTED)}")
        planted = PLANTED[given.plant]()
    began, lives, steps, failed, done, seed = time.monotonic(), 0, 0, 0, Counter(), given.seed
    limit = None if given.minutes is None else began + 60 * given.minutes
    with planted:
        while lives < given.lives if limit is None else time.monotonic() < limit:
            lives += 1
            with scratch() as path:
                life = Life(seed, path, given.length)
                try:
                    life.run()
                except LifeFailed as error:
                    failed += 1
                    print(f"seed {seed} failed after {steps + life.steps} steps in {lives} lives: {error}")
                    length = f" --length {given.length}" if given.length != 60 else ""
                    plant = f" --plant {given.plant}" if given.plant else ""
                    print(f"again: {parser.prog} --seed {seed}{length}{plant}", flush=True)
            steps += life.steps
            done += life.done
            if failed and not given.keep_going:
                return 1
            seed += 1
    what = ", ".join(f"{name} {number}" for name, number in sorted(done.items()))
    wrong = f" ({failed} failed)" if failed else ""
    print(f"seeds {given.seed} to {seed - 1}: {lives} lives{wrong}, {steps} steps, {time.monotonic() - began:.1f} s; {what}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
