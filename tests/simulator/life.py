"""A life: the parent of the processes that have a store open, one after the other, and what each of them leaves.

Owns the forks, the kills, lost power and damage between two sessions, and the judgement of the files that are left: every
record that was acknowledged is there byte for byte, and of the operation in which a process died a beginning at most.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import faults
import oracle
from faults.power import Disk

from rmqstore import MessageStore, StoreChangedError, verify
from rmqstore.config import system_clock
from rmqstore.files.checkpoint import marked_end

from . import java, rot
from .layer import Layer
from .model import Doubt, Model, Stored
from .plan import ORDINARY, PLAIN, ROT, Opening, Operation, mix_of, opening_of, setting_of
from .session import (
    DONE,
    ENDED,
    FAILED_HALF,
    NOT_DONE,
    Notes,
    Session,
    check,
    config_of,
    places,
    run_child,
    same,
)

#: After a kill 5.5.0 deletes the newest index file, and indexes so many segments again (`commitLogRecoverMaxNum`).
SEGMENTS_SEEN_AGAIN = 10
#: Of so many stores that were not closed one is looked at with damage too.
SESSIONS_WITH_ROT = 8


class LifeFailed(Exception):
    """A life went wrong; `step` is the number of the operation in the plan, as far as that is known."""

    def __init__(self, step: int, text: str):
        super().__init__(f"at operation {step}: {text}")
        self.step, self.text = step, text


def sessions_of(plan: list[Operation]) -> Iterator[tuple[int, Operation, list[Operation]]]:
    """The sessions of a plan, and Java's turns: where it begins, its header, and what is done in it."""
    begin, header, done = 0, None, []
    for number, operation in enumerate(plan):
        if operation[0] in ("session", "java", "store", "mix", *ROT):
            if header is not None:
                yield begin, header, done
            begin, header, done = number, operation if operation[0] == "session" else None, []
            if operation[0] == "java":
                yield number, operation, []
        elif header is None:
            # Its header was left out: a plain one.
            begin, header, done = number - 1, ("session", 0), [operation]
        else:
            done.append(operation)
    if header is not None:
        yield begin, header, done


class Life:
    """One life of one store, below `scratch`."""

    def __init__(self, plan: list[Operation], scratch: str, layer: Layer, notes: Notes):
        self.plan, self.scratch, self.layer, self.notes = plan, scratch, layer, notes
        head = dict(each for each in plan if each[0] in ("mix", "store"))
        self._mix = mix_of(head["mix"]) if "mix" in head else ORDINARY
        self.model = Model(setting_of(head.get("store", 0), self._mix))
        self.steps = 0
        self.counts: dict[str, int] = {}
        self._roots = 0
        self.root = self.new_root()
        self._disk = Disk(self.root) if self.model.setting.power else None
        self._clock = 0
        #: Of the log that is left at the end, so that two lives can be compared.
        self.digest = ""
        self._watcher: MessageStore | None = None
        #: What nobody acknowledged, but is whole: a reader finds it by queue and key once a writer, or a second, has passed.
        self._half: set[int] = set()
        #: Retention and damage make queues and index something that the log alone does not give.
        self._log_gives_all = True
        #: Java was killed, and no opening of ours came to its end since: its checkpoint has Java's fields.
        self._java_checkpoint = False

    def new_root(self) -> str:
        self._roots += 1
        root = os.path.join(self.scratch, f"store{self._roots}")
        os.mkdir(root)
        return root

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def run(self) -> None:
        """Live; raises LifeFailed where the store was not as it must be."""
        step = 0
        try:
            for begin, header, operations in sessions_of(self.plan):
                step = begin
                if header[0] == "java":
                    self._java_turn(header)
                else:
                    self._session(header, operations)
            step = len(self.plan) - 1
            self._last_session()
            for kind, number in self.plan:
                if kind in rot.KINDS:
                    self.dismiss_watcher()
                    rot.KINDS[kind](self, number)
        except LifeFailed as error:
            raise LifeFailed(step + max(error.step, 0), error.text) from None
        except Exception as error:
            import traceback

            raise LifeFailed(step, f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from error
        finally:
            self.dismiss_watcher()

    # -------------------------------------------------------------------------------------------------------- sessions

    def _session(self, header: Operation, operations: list[Operation]) -> None:
        opening = opening_of(header[1], faults.CHANGING, self._mix)
        if opening.fault == "kill at store" and not self.layer.sees_stores:
            opening = opening_of(0, faults.CHANGING)
        if opening.read_only and not os.path.isdir(os.path.join(self.root, "commitlog")):
            return
        done = self._run_child(opening, operations)
        self.steps += 1 + done
        if self._disk is not None and opening.loss is not None:
            self._lose_power(header[1], opening.loss)
        elif opening.watched and self.model.doubt is None:
            self._watch(header[1])
            if opening.end != "close" and done == len(operations) and header[1] % SESSIONS_WITH_ROT == 0:
                self.dismiss_watcher()
                rot.rot_of_derived_files(self, header[1], looks=2)

    def _run_child(self, opening: Opening, operations: list[Operation]) -> int:
        notes, model = self.notes, self.model
        notes.clear()
        before = oracle.read_files(self.root) if opening.read_only else None
        log = None if self._disk is None else os.path.join(self.scratch, "calls")
        if log is not None and os.path.exists(log):
            os.unlink(log)
        self.layer.set_clock(self._clock)
        child = os.fork()
        if not child:
            run_child(Session(self.root, model, opening, self.layer, notes), operations, log)
        status = os.waitpid(child, 0)[1]
        deeds = notes.deeds(len(operations))
        reached = next((n for n, deed in enumerate(deeds) if deed == NOT_DONE), len(operations))
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            killed = os.WTERMSIG(status) == signal.SIGKILL and (opening.end == "kill" or opening.fault.startswith("kill"))
            if not killed:
                self.steps += 1 + reached
                raise LifeFailed(1 + reached, f"the process ended by {name}\n{notes.failure}")
            self.count("killed")
        elif os.WEXITSTATUS(status) != ENDED:
            self.steps += 1 + reached
            raise LifeFailed(1 + reached, notes.failure or f"exit code {os.WEXITSTATUS(status)}")
        self.count(opening.fault)
        if log is not None:
            calls = faults.read_log(log)
            self._clock = max([self._clock, *(call.end for call in calls)]) + 1
            self._disk.replay(calls)
        if before is not None:
            check(before == oracle.read_files(self.root), "a reader changed files")
            # It adopts nothing; the clock goes on.
            for (kind, number), deed in zip(operations, deeds, strict=True):
                if kind == "clock" and deed == DONE:
                    model.tick(number)
            return reached
        self._learn_opening(opening)
        self._learn_deeds(operations, deeds, reached)
        if notes.memory[8190]:
            # Closed in order.
            self._flushed()
        elif reached == len(operations):
            model.may_have_flushed()
        self._check_files()
        return reached

    def _learn_opening(self, opening: Opening) -> None:
        answer, model = self.notes.told(), self.model
        if answer is None:
            return
        self._java_checkpoint = False
        if answer["kept"] is not None:
            known = {each.phy_offset: each for each in model.records}
            expired = [each for each in model.records if not model.is_live(each)]
            model.adopt([*expired, *(known[offset] for offset in answer["kept"])], answer["next"])
            model.has_holes |= answer["holes"]
            model.durable_end = min(model.durable_end, model.end)
            model.doubt = None
            self._log_gives_all = False
        self._half.clear()
        model.end = answer["end"]
        model.state_of_progress(answer["progress"])

    def _flushed(self) -> None:
        self.model.flushed()

    def _learn_deeds(self, operations: list[Operation], deeds: bytes, reached: int) -> None:
        model = self.model
        half: Operation | None = operations[reached] if reached < len(operations) else None
        segments = 0
        consumed = iter(self.notes.consumed())
        for operation, deed in zip(operations[:reached], deeds):
            kind, number = operation
            if deed == FAILED_HALF:
                # Now, as the clock goes on after it.
                self._commit_half(operation)
            elif kind == "retain":
                segments += 1 + number % 3
            elif kind == "consume" and deed == DONE:
                if (progress := next(consumed)) is not None:
                    topic, queue_id, behind = progress
                    model.progress["loop", topic, queue_id] = behind
            elif deed != DONE:
                if kind == "flush":
                    model.may_have_flushed()
            elif kind.startswith("put"):
                predicted = model.predict(operation)
                if predicted is not None:
                    model.commit(predicted)
                    if model.waits(predicted):
                        model.durable_end = model.end
            elif kind == "clock":
                model.tick(number)
            elif kind == "flush":
                model.flushed()
            elif kind == "commit":
                group, topic, queue_id, offset = model.commit_of(number)
                model.progress[group, topic, queue_id] = offset
        if half is not None:
            kind, number = half
            if kind.startswith("put"):
                self._commit_half(half)
            elif kind == "retain":
                segments += 1 + number % 3
            elif kind == "flush":
                model.may_have_flushed()
        if segments:
            self._learn_retention(segments)

    def _commit_half(self, operation: Operation) -> None:
        # A put in which the process died, or that failed half: of its records a beginning may be there, byte for byte.
        predicted = self.model.predict(operation) or []
        whole = []
        for each in predicted:
            if self._bytes_at(each) != each.raw:
                break
            whole.append(each)
        self.model.commit(whole)
        self._half |= {each.phy_offset for each in whole}

    def _bytes_at(self, each: Stored) -> bytes:
        base = each.phy_offset // self.model.segment * self.model.segment
        try:
            with open(os.path.join(self.root, "commitlog", oracle.file_name(base)), "rb") as file:
                file.seek(each.phy_offset - base)
                return file.read(each.size)
        except FileNotFoundError:
            return b""

    def _first_segment(self) -> int:
        folder = os.path.join(self.root, "commitlog")
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return int(names[0]) if names else 0

    def _learn_retention(self, segments: int) -> None:
        model, first = self.model, self._first_segment()
        check(
            model.min_offset <= first <= model.min_offset + segments * model.segment,
            f"retention of {segments} segments went from {model.min_offset} to {first}",
        )
        self._log_gives_all &= first == model.min_offset
        model.min_offset = first

    def _check_files(self) -> None:
        """Every record of the model is in the log, byte for byte; read without the package."""
        model = self.model
        if model.doubt is not None:
            return
        segments: dict[int, bytes] = {}
        for each in model.live():
            base = each.phy_offset // model.segment * model.segment
            if base not in segments:
                path = os.path.join(self.root, "commitlog", oracle.file_name(base))
                check(os.path.exists(path), "no file holds", each)
                with open(path, "rb") as file:
                    segments[base] = file.read()
            at = each.phy_offset - base
            check(segments[base][at : at + each.size] == each.raw, "the log does not hold what was put:", each)

    # ------------------------------------------------------------------------------------------------------- Java's turn

    def _java_turn(self, operation: Operation) -> None:
        """RocketMQ's own store on the files that a session left, closed in order or not."""
        model, number = self.model, operation[1]
        if (
            java.unavailable_reason() is not None
            or model.doubt is not None
            or model.has_holes
            # 5.5.0 always indexes tags.
            or not model.setting.geometry["index_tags"]
            or not os.path.isdir(os.path.join(self.root, "commitlog"))
        ):
            return
        put = ("put_many", "put_many", "put_batch", "put_inner", "put_delayed")[number // 4 % 5], number
        puts = model.predict(put)
        if puts is None:
            return
        after_kill = os.path.exists(os.path.join(self.root, "abort"))
        if after_kill and len(os.listdir(os.path.join(self.root, "commitlog"))) > SEGMENTS_SEEN_AGAIN:
            return
        if after_kill and (self._java_checkpoint or marked_end(self.root) < 0):
            # Ours died before it wrote a checkpoint: by its own one Java deletes index files after a clock was set back.
            return
        # Where the newest record has no unit, Java does not know that it was dispatched, and puts its entries again.
        self._log_gives_all &= not model.records or model.records[-1].queued
        # After a kill it also indexes the record again where an index file ends that it keeps.
        self._log_gives_all &= not after_kill
        kill = number % 4 == 0
        segments = {int(name) for name in os.listdir(os.path.join(self.root, "commitlog"))}
        before, answers = java.turn(self.root, model, puts, kill)
        self._java_checkpoint = kill
        self._check_found(before)
        (end,) = (line["maxPhy"] for line in before if line["type"] == "store")
        if end != model.end:
            # A process died, or the disk was full, between the blank at a segment's end and the next segment.  After a kill
            # the blank is news; where Java finds no segment after it, its log ends in front of it.
            following = -(-model.end // model.segment) * model.segment
            last = max((each.end for each in model.live()), default=model.min_offset)
            in_front = end == last and model.end == following and following not in segments
            check(in_front or (after_kill and end == following), "Java's log ends at", end, "not", model.end)
            model.end = end
            puts = model.predict(put)
        self._half.clear()
        # A batch has one answer, for its first message.
        for each, answer in zip(puts[: 1 if puts[0].in_batch else None], answers, strict=True):
            check(answer["status"] == "PUT_OK", "Java put", each, "and said", answer)
            place = answer["offset"], answer["queueOffset"] if each.queued else each.queue_offset
            check(place == (each.phy_offset, each.queue_offset), "Java put", each, "and said", answer)
        model.commit(puts)
        # Closed or not, it forced everything.
        model.durable_end = model.end
        if self._disk is not None:
            self._disk = Disk(self.root)
        self.steps += 1
        self.count(f"Java{' after a kill' if after_kill else ''}, {'killed' if kill else 'closed'}")
        self._check_files()
        if opening_of(number, faults.CHANGING).watched:
            self._watch(number)

    def _check_found(self, lines: list[dict[str, Any]]) -> None:
        """What Java found when it opened the store is what the model has."""
        model = self.model
        live = model.live()
        found = [line["offset"] for line in lines if line["type"] == "msg"]
        check(found == [each.phy_offset for each in live], "Java finds", found, "of", live)
        # Where all units of a queue's first file lead before the log's start, Java lets the queue begin at 0, with nulls.
        units = {
            (line["topic"], line["queueId"]): [
                tuple(map(int, unit.split(":")[:3])) for unit in line["units"] if not unit.endswith(":null")
            ]
            for line in lines
            if line["type"] == "queue"
        }
        for queue, messages in model.queues.items():
            wanted = [(each.queue_offset, each.phy_offset, each.size) for each in messages if model.is_live(each)]
            # A unit of a batch queue comes for each of its messages.
            got = [unit for unit in dict.fromkeys(units.get(queue, [])) if unit[1] >= model.min_offset]
            check(got == wanted, "Java finds in", queue, got, "of", wanted)
        # Java's answer is what has the hash: it leaves looking at the keys themselves to clients.
        by_hash: dict[int, list[int]] = {}
        for each in reversed(live):
            if each.indexed:
                names = [*each.keys, *([f"T#{each.tags}"] if each.tags else [])]
                for number in {oracle.index_hash(f"{each.spec.topic}#{name}") for name in names}:
                    by_hash.setdefault(number, []).append(each.phy_offset)
        for line in lines:
            if line["type"] == "query":
                name = f"T#{line['key']}" if line.get("indexType") == "T" else line["key"]
                wanted = by_hash.get(oracle.index_hash(f"{line['topic']}#{name}"), [])
                # A message comes once for each of its keys that has the hash; of all it gives 64.
                got = list(dict.fromkeys(offset for offset in line["offsets"] if offset >= model.min_offset))
                all_of_them = len(line["offsets"]) < 64
                check(got == (wanted if all_of_them else wanted[: len(got)]), "Java finds by", line, "of", wanted)

    # ------------------------------------------------------------------------------------------------------- the watcher

    def dismiss_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _watch(self, number: int) -> None:
        """A reader in another process, which lives on while writers come, die and recover."""
        if not os.path.isdir(os.path.join(self.root, "commitlog")):
            return
        for attempt in range(2):
            try:
                if self._watcher is None:
                    self._watcher = MessageStore.open(self.root, config=config_of(self.model), read_only=True)
                else:
                    self._watcher.refresh()
                self._look(number)
                self.steps += 1
                return
            except StoreChangedError:
                check(attempt == 0, "a reader that was just opened says that the store changed")
                self.dismiss_watcher()

    def _look(self, number: int) -> None:
        model, dice = self.model, random.Random(number)
        live = model.live()
        for each in dice.sample(live, min(len(live), 8)):
            same(self._watcher.message_at(each.phy_offset), each)
            queue = (each.spec.topic, each.spec.queue_id)
            if each.phy_offset in self._half:
                continue
            if each.queued and not model.has_holes:
                got = self._watcher.get_message(*queue, each.queue_offset, 1)
                check(got.messages, "the watcher finds nothing at", each, got)
                same(got.messages[0], each)
            if each.indexed and each.keys:
                key = next(iter(each.keys))
                hits = places(self._watcher.query_message(each.spec.topic, key, 2000), model)
                wanted = model.hits(model.keys[each.spec.topic, key])
                hits, wanted = ([hit for hit in found if hit not in self._half] for found in (hits, wanted))
                check(hits == wanted, "the watcher finds", hits, "for", each.spec.topic, key, "put", wanted)

    # ------------------------------------------------------------------------------------------------------ lost power

    def _lose_power(self, number: int, loss: dict) -> None:
        dice = random.Random(number)
        self.dismiss_watcher()
        self.count("power lost with damage passed over" if self.model.has_holes else "power lost")
        self.steps += 1
        before = self.root
        self.root = self.new_root()
        if loss["names"] == "some" and self._has_open_retention():
            # Deletions whose names nothing forced yet come back in their order, as on a file system with a journal.
            loss = {**loss, "names": "first"}
        self._disk.lose(self.root, dice, **loss)
        shutil.rmtree(before)
        lock = os.path.join(self.root, "lock")
        if os.path.exists(lock):
            with open(lock, "wb") as file:
                file.write(b"lock")
        self._disk = Disk(self.root)
        self._judge_loss()

    def _has_open_retention(self) -> bool:
        return any(not change.sure and change.gives is None for change in self._disk.changes)

    def _judge_loss(self) -> None:
        """What the log holds now, said by the oracle: its whole beginning, and whether something lies after that."""
        model = self.model
        log = oracle.segments(oracle.read_files(self.root))
        first = min(log, default=0)
        check(first <= model.min_offset or not model.records or not log, "the first segments are lost", first)
        model.min_offset = min(model.min_offset, first) if log else model.min_offset
        known = {each.phy_offset: each for each in model.live()}
        end, following = first, first
        for item in oracle.walk_commit_log(log):
            if isinstance(item, oracle.Blank):
                following = item.phy_offset // model.segment * model.segment + model.segment
                continue
            if model.prop_crc and not item.property_crc_is_sound:
                break
            each = known.get(item.phy_offset)
            check(each is not None and each.raw == item.raw, "a whole record that nobody put at", item.phy_offset)
            end = following = item.end
        # Where damage was passed over the log goes on behind it, and what was forced there stays.
        forced = [each for each in model.live() if each.end <= model.durable_end and each.phy_offset >= end]
        missing = [each for each in forced if not model.has_holes or self._bytes_at(each) != each.raw]
        check(not missing, f"{len(missing)} messages that were on the disk up to {model.durable_end} are lost:", missing[:3])
        sure = frozenset(each.phy_offset for each in forced)
        behind = any(each.phy_offset >= end and self._bytes_at(each) == each.raw for each in model.live())
        # A later segment that holds anything says that the log went on.
        behind |= any(base >= following and base > end and any(data) for base, data in log.items())
        behind |= any(
            base >= end // model.segment * model.segment and any(data[max(following - base, 0) :]) for base, data in log.items()
        ) and any(each.phy_offset >= end for each in model.live())
        model.doubt = Doubt(end, behind, sure)
        model.durable_end = max(model.durable_end, end)

    # ---------------------------------------------------------------------------------------------------- the end of it

    def _last_session(self) -> None:
        """Open once more without a fault, compare everything, close, and compare the bytes with what the log gives."""
        self._run_child(PLAIN, [("check", 0), ("put", 1), ("flush", 0)])
        self._run_child(PLAIN, [])
        model = self.model
        log = oracle.segments(oracle.read_files(self.root))
        self.digest = hashlib.sha256(repr(sorted(log.items())).encode()).hexdigest()[:16]
        findings = [str(finding) for finding in verify(self.root, config_of(model).replace(clock=system_clock))]
        check(model.has_holes or not findings, "verify of a store that was closed in order:", findings)
        geometry = model.setting.geometry
        if self._log_gives_all and not geometry["enable_consume_queue_ext"] and model.min_offset == 0:
            files = oracle.read_files(self.root)
            got = oracle.comparable(files, oracle.QUEUES_AND_INDEX)
            expected = oracle.comparable(oracle.rebuild(files, geometry), oracle.QUEUES_AND_INDEX)
            changed = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
            check(not changed, "queues and index are not what the log gives:", changed)

    def rebuild_and_check(self, parts: tuple[str, ...], what: str) -> None:
        """Rebuild these parts of the store, open it, and compare everything."""
        disk, self._disk = self._disk, None
        try:
            self._run_child(dataclasses.replace(PLAIN, rebuild=parts), [("check", 0)])
        except LifeFailed as error:
            raise LifeFailed(error.step, f"{what}, rebuilt: {error.text}") from None
        finally:
            self._disk = disk
