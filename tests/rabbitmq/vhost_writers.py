"""The writers of a simulated vhost: the oracle's node, and the package, which may die at any call.

Owns the bytes that a node leaves (journals, segments, message files, merges, a clean stop), the death of a process that writes
with the package, and the loss of what was not forced to the disk.  Both writers take the same calls, so that `vhost_life` need
not know which one works.  A node keeps nothing here but what a real one keeps: what is on disk is read again at every start.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import classic_queue_oracle as oracle
from classic_queue_oracle import NOTHING, Atom, State

from rmqstore.rabbitmq import MessageStore, QueueIndex, Vhost
from rmqstore.rabbitmq.dets import write_recovery_terms

FILE_LIMIT = 2500
EMBED_BELOW = 160
STORE = "msg_store_persistent"
CLEAN_FILES = ("clean.dot", "file_summary.ets", "msg_store_index.ets")


class Letter(NamedTuple):
    """A message that was published."""

    msg_id: bytes
    body: bytes
    term: bytes

    @property
    def stored(self) -> bool:
        """It is in the message store."""
        return len(self.body) >= EMBED_BELOW


class Killed(BaseException):
    """The death of a process: what catches errors must not be needed, and no call does anything after it."""


class Death:
    """Kills what runs within it at its call number `stop`, and may take what was written and not forced to the disk.

    The call that it dies in is not done, or half of it is if it writes.
    """

    CALLS = (
        "write", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "open",
        "sendfile", "copy_file_range",
    )  # fmt: skip

    def __init__(self, path: Path, stop: int, rng: random.Random, *, power: bool):
        self.path, self.stop, self.rng, self.power = path, stop, rng, power
        self.calls = 0
        self.began = self.dead = False
        self.real = {name: getattr(os, name) for name in self.CALLS if hasattr(os, name)}
        self.real_open = builtins.open
        self.forced: dict[int, int] = {}
        #: Of what files something was written, whole or in part, and not forced.
        self.torn: set[Path] = set()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return self.real[name](*args, **kwargs)
        self.before(name, *args)
        if name in ("unlink", "remove"):
            # The next file may get its number.
            self.forced.pop(os.stat(args[0]).st_ino if os.path.exists(args[0]) else 0, None)
        done = self.real[name](*args, **kwargs)
        if name in ("fsync", "fdatasync"):
            self.forced[os.fstat(args[0]).st_ino] = os.fstat(args[0]).st_size
        elif name == "ftruncate":
            number = os.fstat(args[0]).st_ino
            self.forced[number] = min(self.forced.get(number, 0), args[1])
        return done

    def before(self, name: str, *args: Any) -> None:
        self.calls += 1
        if not self.dead and self.calls >= self.stop:
            self.dead = True
            if name in ("write", "pwrite"):
                data = bytes(args[1])
                self.real[name](args[0], data[: self.rng.randrange(len(data) + 1)], *args[2:])
        if self.dead:
            raise Killed(name)

    def opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            self.before("open")
        return self.real_open(file, mode, *args, **kwargs)

    def __enter__(self) -> Death:
        if not self.began:
            self.began = True
            for file in self.path.rglob("*"):
                self.forced[file.stat().st_ino] = file.stat().st_size
        for name in self.real:
            setattr(os, name, lambda *args, _name=name, **kwargs: self.call(_name, *args, **kwargs))
        builtins.open = self.opened
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(os, name, function)
        builtins.open = self.real_open

    def lose_pages(self) -> None:
        """Cut, or fill with zeros, what was written and never forced."""
        for file in sorted(self.path.rglob("*")):
            if not file.is_file():
                continue
            forced, size = self.forced.get(file.stat().st_ino, 0), file.stat().st_size
            if size <= forced:
                continue
            self.torn.add(file)
            if self.power:
                keep = self.rng.randint(forced, size)
                with open(file, "r+b") as torn:
                    torn.truncate(keep)
                    if self.rng.random() < 0.3:
                        torn.truncate(size)


# ------------------------------------------------------------------------------------------------------------ a real node


class NodeQueue:
    """The state of a node's process for one queue; `written` bytes of the journal are on disk."""

    def __init__(self, path: Path, name: str, count: int):
        self.folder = path / "queues" / oracle.queue_dir(b"/", name.encode())
        self.count = count
        self.index = oracle.IndexModel(count, 1 << 60)
        self.live: dict[int, oracle.Publish] = {}
        self.next_seq = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        stub = self.folder / ".queue_name"
        if not stub.exists():
            stub.write_bytes(oracle.queue_name_text(oracle.QueueName(b"/", name.encode(), None, 1)))
        files = {one.name: one.read_bytes() for one in self.folder.iterdir() if one.is_file()}
        parsed = oracle.parse_journal(files.get("journal.jif", b""))
        journal, _ = oracle.journal_map(parsed.records)
        states: dict[int, State] = {}
        for each, data in files.items():
            if not each.endswith(".idx"):
                continue
            segment = oracle.parse_segment(data, int(each[:-4]), count)
            if segment.why == "zeros":
                (self.folder / each).unlink()
                continue
            self.index.segments[int(each[:-4])] = bytearray(data)
            self.index.unacked[int(each[:-4])] = 0
            states.update(oracle.segment_map(segment.records))
        for seq, state in journal.items():
            there = states.get(seq, NOTHING)
            merged, _ = oracle.merge(state, there)
            rest = State(
                merged.pub if there.pub is None else None,
                merged.delivered and not there.delivered,
                merged.acked and not there.acked,
            )
            if rest != NOTHING:
                self.index.pending.setdefault(seq // count, {})[seq % count] = rest
            if merged != NOTHING:
                states[seq] = merged
        for seq, state in states.items():
            assert state.pub is not None
            self.index.unacked.setdefault(seq // count, 0)
            if not state.acked:
                self.live[seq] = state.pub
                self.index.unacked[seq // count] += 1
        self.states = states
        self.index.journal[:] = files.get("journal.jif", b"")[: parsed.used]
        self.index.dirty_count = len(parsed.records)
        self.written = len(self.index.journal)
        with open(self.folder / "journal.jif", "ab") as file:
            file.truncate(self.written)

    def settle(self, exact: bool, located: set[bytes]) -> None:
        """Start a node: after an unclean stop all is delivered, and messages in no store are acked."""
        for seq, pub in sorted(self.live.items()):
            gone = not pub.term and pub.msg_id not in located
            if not self.states[seq].delivered and (gone or not exact):
                self.index.deliver([seq])
            if gone:
                self.index.ack([seq])
                del self.live[seq]

    def sync(self) -> None:
        with open(self.folder / "journal.jif", "r+b") as file:
            file.seek(self.written)
            file.write(self.index.journal[self.written :])
        self.written = len(self.index.journal)

    def flush(self, stop: int | None = None, cut: float = 1.0) -> None:
        """Out of the journal into the segments; a death comes after `stop` of these steps, with a part of the next one."""
        before = {number: len(data) for number, data in self.index.segments.items()}
        self.index.flush()
        steps = 0
        for number in sorted({*before, *self.index.segments}):
            new = self.index.segments.get(number)
            path = self.folder / f"{number}.idx"
            if new is not None and len(new) == before.get(number, 0):
                continue
            if steps == stop:
                return
            steps += 1
            if new is None:
                path.unlink()
            else:
                with open(path, "ab") as file:
                    file.write(new[before.get(number, 0) :])
        if stop is not None:
            return
        (self.folder / "journal.jif").write_bytes(b"")
        self.written = 0


class Node:
    """A node on a vhost, by the oracle; `start` must find nothing that a node would not boot on."""

    def __init__(self, path: Path, names: tuple[str, ...], rng: random.Random):
        self.path, self.rng, self.store = path, rng, path / STORE
        found = oracle.read_vhost(path)
        assert not found.crashes
        terms: dict[str, Any] = {}
        if (path / "recovery.dets").exists():
            terms = oracle.recovery_terms(oracle.parse_dets((path / "recovery.dets").read_bytes()))
        self.queues = {name: NodeQueue(path, name, found.segment_entry_count) for name in names}
        self.store.mkdir(exist_ok=True)
        for name in CLEAN_FILES:
            (self.store / name).unlink(missing_ok=True)
        (path / "recovery.dets").unlink(missing_ok=True)
        self.ref: dict[bytes, list[Any]] = {}
        self.size: dict[int, int] = {}
        self._open_files(found)
        for queue in self.queues.values():
            was = found.queues.get(queue.folder.name)
            exact = queue.folder.name in terms
            queue.settle(exact, set(found.located))
            if was is None or not was.clean:
                queue.flush()
            after = (max(queue.live) // queue.count + 1) * queue.count if queue.live else 0
            queue.next_seq = terms[queue.folder.name]["next_seq_id"] if exact else after

    def _open_files(self, found: oracle.Vhost) -> None:
        for rest in sorted(self.store.glob("*.rdt")):
            whole = self.store / f"{rest.stem}.rdq"
            data = whole.read_bytes()
            whole.write_bytes(data[: oracle.parse_rdq(data).used] + rest.read_bytes())
            rest.unlink()
        for file in self.store.glob("*.rdq"):
            data = file.read_bytes()
            self.size[int(file.stem)] = oracle.parse_rdq(data).used
        for msg_id, (name, begin, term) in found.located.items():
            if found.references.get(msg_id):
                self.ref[msg_id] = [found.references[msg_id], int(name[:-4]), begin, 25 + len(term)]
        self.current = max(self.size, default=0)
        self.size.setdefault(self.current, 0)
        with open(self.store / f"{self.current}.rdq", "ab") as file:
            file.truncate(self.size[self.current])
        self.buffer = bytearray()
        for number in sorted(self.size):
            self._delete_if_empty(number)

    def _delete_if_empty(self, number: int) -> None:
        if number != self.current and not any(place[1] == number for place in self.ref.values()):
            (self.store / f"{number}.rdq").unlink()
            del self.size[number]

    def next_seq(self, name: str) -> int:
        return self.queues[name].next_seq

    def live(self, name: str) -> list[int]:
        return sorted(self.queues[name].live)

    def publish(self, name: str, letters: list[Letter]) -> None:
        queue = self.queues[name]
        for letter in letters:
            if letter.stored:
                self._write(letter)
            term = b"" if letter.stored else letter.term
            pub = oracle.Publish(queue.next_seq, letter.msg_id, 0, len(letter.body), True, term)
            queue.index.enqueue(pub)
            queue.live[pub.seq] = pub
            queue.next_seq += 1

    def _write(self, letter: Letter) -> None:
        if letter.msg_id in self.ref:
            self.ref[letter.msg_id][0] += 1
            return
        record = oracle.rdq_record(letter.msg_id, letter.term)
        self.ref[letter.msg_id] = [1, self.current, self.size[self.current], len(record)]
        self.buffer += record
        self.size[self.current] += len(record)
        if self.size[self.current] >= FILE_LIMIT:
            self._write_out()
            before = self.current
            self.current += 1
            self.size[self.current] = 0
            (self.store / f"{self.current}.rdq").write_bytes(b"")
            self._delete_if_empty(before)

    def _write_out(self) -> None:
        with open(self.store / f"{self.current}.rdq", "ab") as file:
            file.write(self.buffer)
        self.buffer.clear()

    def ack(self, name: str, seqs: list[int]) -> None:
        """The journal is on disk before the message store forgets a message."""
        queue = self.queues[name]
        queue.index.ack(seqs)
        gone = [queue.live.pop(seq) for seq in seqs]
        if any(not pub.term for pub in gone):
            self.sync(name)
        for pub in gone:
            if not pub.term:
                place = self.ref[pub.msg_id]
                place[0] -= 1
                if not place[0]:
                    del self.ref[pub.msg_id]
                    self._delete_if_empty(place[1])

    def sync(self, name: str) -> None:
        """For a publisher that waits for a confirm."""
        self._write_out()
        self.queues[name].sync()

    def flush(self, name: str) -> None:
        self._write_out()
        self.queues[name].flush()

    def merge(self, stop: int | None = None) -> bool:
        """Merge the first two neighbours that fit into one; `stop` is the step that a death comes before."""
        numbers = sorted(self.size)
        for left, right in itertools.pairwise(numbers):
            if right == self.current:
                continue
            places = {
                number: sorted((place[2], msg_id) for msg_id, place in self.ref.items() if place[1] == number)
                for number in (left, right)
            }
            total = sum(self.ref[msg_id][3] for one in places.values() for _, msg_id in one)
            if total <= FILE_LIMIT and total < self.size[left] + self.size[right]:
                self._merge(left, right, places, stop)
                return True
        return False

    def _merge(self, left: int, right: int, places: dict[int, list[tuple[int, bytes]]], stop: int | None) -> None:
        data = {number: (self.store / f"{number}.rdq").read_bytes() for number in (left, right)}
        gap = 0
        moved = list(places[left])
        while moved and moved[0][0] == gap:
            gap += self.ref[moved.pop(0)[1]][3]
        saved = b"".join(data[left][at : at + self.ref[msg_id][3]] for at, msg_id in moved)
        rest = b"".join(data[right][at : at + self.ref[msg_id][3]] for at, msg_id in places[right])
        one, temporary = self.store / f"{left}.rdq", self.store / f"{left}.rdt"

        def append(more: bytes) -> None:
            with open(one, "ab") as file:
                file.write(more)

        steps = [
            lambda: temporary.write_bytes(saved) if saved else None,
            lambda: os.truncate(one, gap),
            lambda: append(saved),
            lambda: temporary.unlink() if saved else None,
            lambda: append(rest),
            lambda: (self.store / f"{right}.rdq").unlink(),
        ]
        for step in steps[:stop]:
            step()
        at = gap
        for _, msg_id in [*moved, *places[right]]:
            self.ref[msg_id][1:3] = left, at
            at += self.ref[msg_id][3]
        self.size[left] = at
        del self.size[right]

    def close(self) -> None:
        """A clean stop, with recovery terms and the clean state of the message store."""
        self._write_out()
        terms, refs = {}, []
        for queue in self.queues.values():
            queue.sync()
            refs.append(self.rng.randbytes(16))
            terms[queue.folder.name] = {
                "segments": sorted((number, count) for number, count in queue.index.unacked.items() if count),
                "next_seq_id": queue.next_seq,
                "next_deliver_seq_id": self.rng.randint(0, queue.next_seq),
                "persistent_ref": refs[-1],
                "persistent_count": len(queue.live),
                "persistent_bytes": sum(pub.size for pub in queue.live.values()),
            }
        # The bytes of this table are the matter of test_rabbitmq_dets.
        write_recovery_terms(os.fspath(self.path / "recovery.dets"), terms)
        numbers = sorted(self.size)
        nothing = Atom("undefined")
        rows = []
        for left, number, right in zip([nothing, *numbers], numbers, [*numbers[1:], nothing]):
            valid = sum(place[3] for place in self.ref.values() if place[1] == number)
            row = (Atom("file_summary"), number, valid, left, right, self.size[number], Atom("false"), 0)
            rows.append(row)
        (self.store / "file_summary.ets").write_bytes(_table("rabbit_msg_store_file_summary", "ordered_set", rows))
        places = [(Atom("msg_location"), msg_id, *place) for msg_id, place in self.ref.items()]
        (self.store / "msg_store_index.ets").write_bytes(_table("rabbit_msg_store_ets_index", "set", places))
        texts = b",\n              ".join(b"<<" + b",".join(b"%d" % byte for byte in ref) + b">>" for ref in refs)
        (self.store / "clean.dot").write_bytes(
            b"{client_refs,[%s]}.\n{index_module,rabbit_msg_store_ets_index}.\n" % texts
        )

    def die(self) -> None:
        """Each file gets a part of its buffer; or the death comes within a flush or a merge."""
        dice = self.rng.random()
        name = self.rng.choice(list(self.queues))
        if dice < 0.3:
            self._write_out()
            self.queues[name].sync()
            self.queues[name].flush(self.rng.randrange(4))
        elif dice < 0.5:
            self._write_out()
            self.merge(self.rng.randrange(6))
        with open(self.store / f"{self.current}.rdq", "ab") as file:
            file.write(self.buffer[: self.rng.randrange(len(self.buffer) + 1)])
        for other, queue in self.queues.items():
            if dice >= 0.3 or other != name:
                del queue.index.journal[self.rng.randint(queue.written, len(queue.index.journal)) :]
                queue.sync()


def _table(name: str, kind: str, rows: list[tuple[Any, ...]]) -> bytes:
    """A table of ETS with the header that a reader needs."""
    header = tuple(
        (Atom(key), value)
        for key, value in (
            ("read_concurrency", Atom("true")), ("write_concurrency", Atom("true")), ("compressed", Atom("false")),
            ("memory", 1234), ("owner", Atom("none")), ("heir", Atom("none")), ("name", Atom(name)), ("size", len(rows)),
            ("node", Atom("rabbit@host")), ("named_table", Atom("false")), ("type", Atom(kind)), ("keypos", 2),
            ("protection", Atom("public")), ("major_version", 1), ("minor_version", 0),
            ("extended_info", [Atom("object_count")]),
        )
    )  # fmt: skip
    return oracle.encode_ets([header, *rows, [Atom("$end_of_table"), [(Atom("count"), len(rows))]]])


# ------------------------------------------------------------------------------------------------------------ the package


class Package:
    """The package's writers on all queues of a vhost, in the order that docs/rabbitmq.md asks of a caller."""

    def __init__(self, path: Path, names: tuple[str, ...], rng: random.Random, death: Death):
        self.path, self.death = path, death
        self.queues: dict[str, QueueIndex] = {}
        self.store: MessageStore | None = None
        with Vhost.open(path, check_terms=True) as vhost:
            terms, refs, references = vhost.terms, vhost.client_refs(), vhost.references()
            count = vhost.segment_entry_count
        self.references = references
        with self.mortal():
            self.store = MessageStore.open(
                path / STORE, file_size_limit=FILE_LIMIT, references=references, client_refs=refs
            )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / "recovery.dets")
            for name in names:
                folder = path / "queues" / oracle.queue_dir(b"/", name.encode())
                self.queues[name] = QueueIndex.open(
                    folder,
                    segment_entry_count=count,
                    create=True,
                    max_journal_entries=40,
                    terms=terms.get(folder.name),
                    store_clean=self.store.clean,
                    is_stored=self.store.contains,
                )
                stub = folder / ".queue_name"
                if not stub.exists():
                    stub.write_bytes(oracle.queue_name_text(oracle.QueueName(b"/", name.encode(), None, 1)))

    @contextlib.contextmanager
    def mortal(self):
        """Within it the process may die; it leaves its files as they are."""
        try:
            with self.death:
                yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        for queue in self.queues.values():
            queue.abandon()
        if self.store is not None:
            self.store.abandon()

    def next_seq(self, name: str) -> int:
        return self.queues[name].next_seq_id

    def live(self, name: str) -> list[int]:
        return self.queues[name].columns().seq_id.tolist()

    def publish(self, name: str, letters: list[Letter]) -> None:
        stored = [letter for letter in letters if letter.stored]
        index = self.queues[name]
        with self.mortal():
            if stored:
                self.store.write_many([letter.msg_id for letter in stored], [letter.term for letter in stored])
                self.store.sync()
            for letter in letters:
                message = None if letter.stored else letter.term
                seq = index.publish(msg_id=letter.msg_id, message=message, size=len(letter.body))
                index.deliver([seq])

    def ack(self, name: str, seqs: list[int]) -> None:
        index = self.queues[name]
        gone = {entry.seq_id: entry for entry in index if entry.seq_id in set(seqs)}
        stored = [gone[seq].msg_id for seq in seqs if gone[seq].message is None]
        with self.mortal():
            index.ack(seqs)
            if stored:
                index.sync()
                self.store.remove_many(stored)

    def sync(self, name: str) -> None:
        with self.mortal():
            self.store.sync()
            self.queues[name].sync()

    def flush(self, name: str) -> None:
        with self.mortal():
            self.store.sync()
            self.queues[name].flush()

    def merge(self) -> None:
        with self.mortal():
            self.store.merge()

    def close(self) -> None:
        terms = {}
        with self.mortal():
            for queue in self.queues.values():
                closed = queue.close()
                assert closed is not None
                terms[os.path.basename(queue.path)] = closed
            write_recovery_terms(os.fspath(self.path / "recovery.dets"), terms)
            self.store.close([one["persistent_ref"] for one in terms.values()])

    def die(self) -> None:
        """A kill between two calls, or with the power gone."""
        self.abandon()
        self.death.lose_pages()
