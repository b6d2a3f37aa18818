"""One process that has the store open: it does the operations of a session and holds every answer against the model.

Owns what a child of `life` does between its fork and its end, which may come at any call.  What it has done it notes in
memory that it shares with the parent (`Notes`), one byte an operation, so that the parent knows it however the child ends.
An operation that fails where no fault was injected, and every answer that is not the model's, ends the child with a report.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import random
import signal
import struct
import traceback
from types import SimpleNamespace

import oracle

from rmqstore import (
    CorruptionError,
    DiskFullError,
    InvalidMessageError,
    LostLogError,
    Message,
    MessageExt,
    MessageStore,
    OffsetOutOfRangeError,
    StoreConfig,
    StoreError,
    StoreLockedError,
    verify,
)
from rmqstore import rebuild as rebuild_store

from .layer import Layer
from .model import Doubt, Model, Stored
from .plan import KEYS, LIGHT_QUEUES, TAGS, WRITING, Opening, Operation, Spec, setting_of, specs_of

logging.getLogger("rmqstore").setLevel(logging.CRITICAL)

EXPECTED = (StoreError, OSError)
#: What became of an operation.
NOT_DONE, DONE, FAILED, FAILED_HALF, LEFT_OUT = range(5)
#: Exit codes of a child.
ENDED, CHECK_FAILED = 0, 3
#: Seconds that a session may take, also on a machine that does other things.
TIMEOUT = 600


def as_told(call, *arguments, **options):
    """Call, and again with the number of units that go, as the error for a lost part of the log says."""
    try:
        return call(*arguments, **options)
    except LostLogError as error:
        return call(*arguments, **options, drop_units=error.num)


class SimulatedFailure(AssertionError):
    """The store is not as it must be."""


class Notes:
    """What a child tells its parent, in memory that both have."""

    DEEDS, ANSWER, ERROR, CONSUMED = 0, 8192, 8192 + 131072, 8192 + 131072 + 65536
    END = CONSUMED + 131072

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self.END)

    def clear(self) -> None:
        self.memory[: self.DEEDS + 8192] = bytes(8192)
        for place in (self.ANSWER, self.ERROR, self.CONSUMED):
            self.memory[place : place + 4] = bytes(4)

    def note(self, number: int, deed: int) -> None:
        self.memory[number] = deed

    def deeds(self, count: int) -> bytes:
        return self.memory[:count]

    def _put(self, place: int, data: bytes) -> None:
        self.memory[place + 4 : place + 4 + len(data)] = data
        self.memory[place : place + 4] = struct.pack("<i", len(data))

    def _get(self, place: int) -> bytes:
        (size,) = struct.unpack("<i", self.memory[place : place + 4])
        return self.memory[place + 4 : place + 4 + size]

    def tell(self, answer: dict) -> None:
        self._put(self.ANSWER, pickle.dumps(answer))

    def told(self) -> dict | None:
        data = self._get(self.ANSWER)
        return pickle.loads(data) if data else None

    def tell_consumed(self, progress: list[tuple[str, int, int] | None]) -> None:
        self._put(self.CONSUMED, pickle.dumps(progress))

    def consumed(self) -> list[tuple[str, int, int] | None]:
        """Topic, queue and progress of every ("consume", number); only who saw what retention left can say them."""
        data = self._get(self.CONSUMED)
        return pickle.loads(data) if data else []

    def fail(self, text: str) -> None:
        self._put(self.ERROR, text.encode("utf-8", "backslashreplace")[:60000])

    @property
    def failure(self) -> str:
        return self._get(self.ERROR).decode()


def config_of(model: Model) -> StoreConfig:
    """The options of a life's store; no task of a thread ever comes due."""
    values = {name: value for name, value in model.setting.geometry.items() if name != "batch_topics"}
    return StoreConfig(
        **values,
        **model.setting.options,
        clock=lambda: model.now,
        flush_interval_commit_log=0,
        flush_interval_consume_queue=0,
        flush_consumer_offset_interval=0,
        clean_resource_interval=0,
        delete_commit_log_files_interval=0,
        clean_file_forcibly_enable=False,
    )


def message_of(spec: Spec) -> Message:
    return Message(
        spec.topic,
        spec.body,
        properties=dict(spec.pairs),
        flag=spec.flag,
        sys_flag=spec.sys_flag,
        born_timestamp=spec.born_timestamp,
        born_host=spec.born_host,
        store_host=spec.store_host,
        reconsume_times=spec.reconsume_times,
        prepared_transaction_offset=spec.prepared_transaction_offset,
    )


def places(found, model: Model) -> list[int]:
    """Phy offsets of what a query found; a damaged message whose key can be read is found too, and marked."""
    return [message.phy_offset for message in found if not (model.has_holes and message.corrupt)]


def check(condition: object, what: str, *values: object) -> None:
    if not condition:
        raise SimulatedFailure(" ".join([what, *map(repr, values)]))


def same(message, stored: Stored) -> None:
    """Hold a message that was read against the model's."""
    spec = stored.spec
    got = (
        message.phy_offset, message.topic, message.queue_id, message.queue_offset, message.body, message.store_timestamp,
        message.flag, message.born_timestamp, message.born_host, message.corrupt,
    )  # fmt: skip
    wanted = (
        stored.phy_offset, spec.topic, spec.queue_id, stored.queue_offset, spec.body, stored.timestamp,
        spec.flag, spec.born_timestamp, spec.born_host, False,
    )  # fmt: skip
    if got != wanted:
        raise SimulatedFailure(f"read {got}\nput  {wanted}")
    properties = {name: value for name, value in message.properties.items() if name != oracle.PROP_CRC}
    pairs = dict(spec.pairs)
    if stored.light:
        pairs["INNER_MULTI_QUEUE_OFFSET"] = ",".join(str(number) for _, number in stored.light)
    if "INNER_BASE" in pairs:
        pairs["INNER_BASE"] = str(stored.queue_offset)
    # What RocketMQ's rules of reading properties drop: a value of no length.
    check(
        properties == {name: value for name, value in pairs.items() if value}, "properties at", stored.phy_offset, properties
    )


def walk(
    store: MessageStore, queue: tuple[str, int], at: int, what: str = "", tags: str | None = None
) -> list[MessageExt]:
    """The whole messages of a queue from `at` on; `what` begins the report where it goes no further."""
    found, high = [], store.max_queue_offset(*queue)
    while at < high:
        answer = store.get_message(*queue, at, 64, tags)
        found += [message for message in answer.messages if not message.corrupt]
        check(answer.next_queue_offset > at, f"{what} no way on in".lstrip(), queue, at, answer)
        at = answer.next_queue_offset
    return found


class Session:
    """The store as one process has it open."""

    def __init__(self, root: str, model: Model, opening: Opening, layer: Layer, notes: Notes):
        self.root, self.model, self.opening, self.layer, self.notes = root, model, opening, layer, notes
        self.config = config_of(model)
        self.store: MessageStore | None = None
        self.follower: MessageStore | None = None
        #: Something may be there that the model does not know: a put failed half.
        self.loose = False
        self.adopted: dict = {"kept": None, "next": None}
        #: Which of the states of consumer progress that could be there was there.
        self.found_progress: int | None = None
        self.consumed: list[tuple[str, int, int] | None] = []
        self.fullness = 0.5
        os.statvfs = self._statvfs  # How full the machine's disk is, is no part of a plan.

    def _statvfs(self, path: str) -> SimpleNamespace:
        free = int(1000 * (1 - self.fullness))
        return SimpleNamespace(f_blocks=1000, f_bfree=free, f_bavail=free)

    # ------------------------------------------------------------------------------------------------- begin and end

    def run(self, operations: list[Operation]) -> None:
        if self.opening.rebuild and not self.opening.read_only:
            self._rebuild()
        self._open()
        for number, operation in enumerate(operations):
            self.notes.note(number, self._do(operation))
            if self.model.setting.power and number % 8 == 7:
                self.layer.photo()
        self._end()

    def _rebuild(self) -> None:
        model = self.model
        if model.doubt is not None or model.has_holes or not model.live():
            return
        if os.path.exists(os.path.join(self.root, "abort")):
            return
        if "consumequeue" in self.opening.rebuild and any(
            low == high for low, high in map(model.bounds, model.next_offsets)
        ):
            # The log says nothing of a queue all of whose messages retention deleted: rebuilt it begins at 0 again.
            return
        try:
            as_told(rebuild_store, self.root, self.opening.rebuild, self.config)
        except EXPECTED:
            if not self.layer.hits:
                raise

    def _open(self) -> None:
        for attempt in range(3):
            try:
                self._open_once()
                return
            except EXPECTED:
                if not self.layer.hits or attempt == 2:
                    raise
                # The fault is gone: an opening makes the store whole.
                self.layer.heal()
                if self.store is not None:
                    store, self.store = self.store, None
                    with contextlib.suppress(*EXPECTED):
                        store.close()

    def _open_once(self) -> None:
        if os.path.exists(os.path.join(self.root, ".rmqstore-rebuild", "complete")) and not self.opening.read_only:
            # A rebuild died while it swapped its files in; it is to be finished.
            as_told(rebuild_store, self.root, self.opening.rebuild or ("index", "consumequeue"), self.config)
        model, doubt = self.model, self.model.doubt
        if self.opening.read_only:
            self.store = MessageStore.open(self.root, config=self.config, read_only=True)
            self._check_doubt_of_reader() if doubt else self.check_everything()
            return
        # Damage that was passed over stays where it is, so that every other mode would find it again.
        recovery = "skip" if model.has_holes else self.opening.recovery
        try:
            self.store = as_told(MessageStore.open, self.root, config=self.config, recovery=recovery)
        except CorruptionError:
            check(doubt is not None and doubt.behind and recovery == "strict", "opening refused a log without damage", doubt)
            recovery = ("truncate", "skip")[self.opening.number % 2]
            self.store = as_told(MessageStore.open, self.root, config=self.config, recovery=recovery)
        if doubt is not None:
            kept, following = self._adopt(doubt, recovery)
            # A fault may make another attempt of what follows.
            self.adopted = {"kept": [each.phy_offset for each in kept], "next": following, "holes": model.has_holes}
        self._check_end()
        progress = self._find_progress()
        model.state_of_progress(progress)
        if self.found_progress is None:
            # Another attempt finds the same; its number counts among what was left of these.
            self.found_progress = progress
        self.notes.tell({**self.adopted, "end": model.end, "progress": self.found_progress})
        self.check_everything()

    def _check_end(self) -> None:
        # After a blank the log goes on in the next segment.
        model, end = self.model, self.store.commit_log.max_offset
        following = -(-model.end // model.segment) * model.segment
        check(
            end in (model.end, following) or (not model.live() and end % model.segment == 0),
            f"the log ends at {end}, the last message that was acknowledged at {model.end}",
        )
        model.end = end

    def _find_progress(self) -> int:
        found = {
            (group, topic, queue_id): offset
            for (group, topic), queues in self.store.consumer_offsets.list().items()
            for queue_id, offset in queues.items()
        }
        check(found in self.model.persisted, "progress", found, "is none of", self.model.persisted)
        number = self.model.persisted.index(found)
        return number

    def _whole_messages(self) -> list[Stored]:
        # What the log gives out, each of which must have been put.
        known = {each.phy_offset: each for each in self.model.records}
        kept = []
        for message in self.store.messages():
            if message.corrupt:
                continue
            check(message.phy_offset in known, "a message that nobody put at", message.phy_offset)
            same(message, known[message.phy_offset])
            kept.append(known[message.phy_offset])
        return kept

    def _check_doubt_of_reader(self) -> None:
        doubt = self.model.doubt
        given = {each.phy_offset for each in self._whole_messages()}
        wanted = {each.phy_offset for each in self.model.live() if doubt.lets_stand(each.phy_offset)}
        check(wanted <= given, "a reader does not give out", sorted(wanted - given))
        self.loose = True

    def _adopt(self, doubt: Doubt, recovery: str) -> tuple[list[Stored], dict]:
        model = self.model
        kept = self._whole_messages()
        prefix = [each for each in model.live() if each.phy_offset < doubt.prefix_end]
        check(kept[: len(prefix)] == prefix, f"{recovery} lost some of", prefix, "left", kept)
        if recovery == "truncate" or not doubt.behind:
            check(kept == prefix, f"{recovery} kept more than the whole beginning of the log", kept[len(prefix) :])
        else:
            missing = doubt.sure - {each.phy_offset for each in kept}
            check(not missing, f"{recovery} lost what is whole", sorted(missing))
        old = dict(model.next_offsets)
        # Before the model learns anything: where a call fails, another attempt finds it as it was.
        ends = {queue: self.store.max_queue_offset(*queue) for queue in old}
        expired = [each for each in model.records if not model.is_live(each)]
        # Where damage was once passed over, what is lost there keeps its place, also when retention has taken the rest.
        holes = model.has_holes or kept != prefix
        model.adopt(kept, None)
        behind_kept = model.next_offsets
        model.adopt([*expired, *kept], None)
        for queue, high in old.items() if holes else list(model.next_offsets.items()):
            goes_on = ends[queue]
            # Where the log has nothing of a queue's end any more, the units that lost power took come back from nowhere.
            low = behind_kept.get(queue, 0)
            check(low <= goes_on <= high, "queue", queue, "goes on at", goes_on, (low, high))
            model.next_offsets[queue] = goes_on
        model.has_holes = holes
        model.doubt = None
        return kept, dict(model.next_offsets)

    def _end(self) -> None:
        if self.follower is not None:
            self.follower.close()
        if self.opening.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.opening.end == "leave":
            return
        try:
            self.store.close()
        except EXPECTED:
            if not self.layer.hits:
                raise
            return
        marked = os.path.exists(os.path.join(self.root, "abort"))
        check(self.layer.hits or not marked or self.opening.read_only, "closed in order, but abort is there")
        # After a write that failed a close forces nothing and leaves the mark, so that the next opening recovers.
        self.notes.note(8190, not marked)

    # --------------------------------------------------------------------------------------------------- operations

    def _do(self, operation: Operation) -> int:
        kind, number = operation
        if self.opening.read_only and kind in WRITING:
            return LEFT_OUT
        if self.loose and kind not in ("at", "clock"):
            return LEFT_OUT
        if kind == "consume" and self.opening.fault in ("fail", "short write"):
            # Where a consumer stands that failed half-way, only the store knows.
            return LEFT_OUT
        try:
            if kind.startswith("put"):
                return self._put(operation)
            getattr(self, f"_{kind}")(number)
            return DONE
        except EXPECTED:
            if not self.layer.hits:
                raise
        return FAILED

    def _put(self, operation: Operation) -> int:
        kind = operation[0]
        model, store = self.model, self.store
        predicted = model.predict(operation)
        specs = specs_of(operation) if predicted is None else [each.spec for each in predicted]
        try:
            if kind == "put_table":
                answer = store.put_table(_table(specs), topic=specs[0].topic, queue_id=specs[0].queue_id)
                places = list(zip(answer.phy_offset.tolist(), answer.queue_offset.tolist(), answer.size.tolist()))
            else:
                messages = [message_of(spec) for spec in specs]
                if kind == "put_many":
                    answers = store.put_messages(messages, [spec.queue_id for spec in specs])
                elif kind == "put_batch":
                    answers = store.put_message_batch(messages, specs[0].queue_id)
                else:
                    answers = [store.put_message(messages[0], specs[0].queue_id)]
                places = [(each.phy_offset, each.queue_offset, each.size) for each in answers]
        except InvalidMessageError:
            check(predicted is None, "refused", operation)
            return DONE
        except EXPECTED:
            if not self.layer.hits:
                raise
            if store.commit_log.max_offset == model.end:
                return FAILED
            self.loose = True
            return FAILED_HALF
        check(predicted is not None, "took what fits no segment", operation)
        wanted = [(each.phy_offset, each.queue_offset, each.size) for each in predicted]
        check(places == wanted, kind, "went to", places, "and not to", wanted)
        model.commit(predicted)
        try:
            # What was put can be read at once.
            same(store.message_at(predicted[-1].phy_offset), predicted[-1])
        except EXPECTED:
            # A fault may meet the look; the put was answered.
            if not self.layer.hits:
                raise
        if model.waits(predicted):
            model.durable_end = model.end
        return DONE

    def _at(self, number: int) -> None:
        each, doubt = self.model.some(number), self.model.doubt
        if each is None:
            return
        if doubt is not None and not doubt.lets_stand(each.phy_offset):
            # A reader adopts nothing: nobody knows yet whether it is there.
            return
        same(self.store.message_at(each.phy_offset), each)
        if number & 0x20000 and not self.loose:
            try:
                self.store.message_at(each.phy_offset + 1)
            except (CorruptionError, OffsetOutOfRangeError):
                return
            raise SimulatedFailure(f"a message begins at {each.phy_offset + 1}")

    def _get(self, number: int, store: MessageStore | None = None) -> None:
        model, each = self.model, self.model.some(number)
        store = self.store if store is None else store
        if each is None or not each.queued:
            return
        spec = each.spec
        if each.num > 1 or spec.topic == "Inner" or model.has_holes:
            got = store.get_message(spec.topic, spec.queue_id, each.queue_offset, 1)
            check(got.messages, "nothing at", each, got)
            same(got.messages[0], each)
            return
        queue = model.queues[spec.topic, spec.queue_id]
        low, high = model.bounds((spec.topic, spec.queue_id))
        begin, max_num = each.queue_offset, (1, 2, 5, 32)[number // 7 % 4]
        # The walk ends with the queue file.
        num = min(max_num, model.units_of_file - begin % model.units_of_file, high - begin)
        wanted = queue[len(queue) - (high - begin) :][:num]
        got = store.get_message(spec.topic, spec.queue_id, begin, max_num)
        check(len(got.messages) == num, spec.topic, spec.queue_id, begin, max_num, "got", len(got.messages), "wanted", num)
        for message, stored in zip(got.messages, wanted, strict=True):
            same(message, stored)
        bounds = (got.next_queue_offset, got.min_queue_offset, got.max_queue_offset)
        if store is not self.store:
            # What retention could not delete is there for a reader of the files.
            low = min(low, bounds[1])
        check(bounds == (begin + num, low, high), "bounds", bounds, (begin + num, low, high))
        tag = each.tags
        if tag and spec.topic != oracle.SCHEDULE_TOPIC:
            tagged = [each.phy_offset for each in wanted if each.tags == tag]
            got = store.get_message(spec.topic, spec.queue_id, begin, max_num, tag)
            found = [message.phy_offset for message in got.messages]
            check(found[:1] == tagged[:1] and found[: len(tagged)] == tagged[: len(found)], "tagged", found, tagged)

    def _query(self, number: int, store: MessageStore | None = None) -> None:
        model, each = self.model, self.model.some(number)
        store = self.store if store is None else store
        if each is None:
            return
        topic = each.spec.topic
        which, index_type, found = number // 11 % 10, None, model.keys
        if which == 0 and model.setting.geometry["index_tags"]:
            key, index_type, found = each.tags or TAGS[number % len(TAGS)], "T", model.tags
        elif which < 4:
            key = KEYS[number // 3 % len(KEYS)]
        else:
            key = next(iter(each.keys), "nothing")
        times: dict = {}
        if which == 9:
            times = {"begin": max(each.timestamp - 1000, 0), "end": each.timestamp}
        hits = model.hits(found.get((topic, key)), *times.values())
        max_num = (1, 64, 2000)[number // 5 % 3]
        got = store.query_message(topic, key, max_num, index_type=index_type, **times)
        offsets = places(got, model)
        if store is not self.store:
            # What retention could not delete is there for a reader of the files.
            offsets = [offset for offset in offsets if offset >= model.min_offset]
        if len(hits) > max_num:
            check(got.truncated and len(got) == max_num and set(offsets) <= set(hits), topic, key, offsets, hits)
        else:
            # Damage that was gone over for it may have held another.
            whole = got.complete or model.has_holes
            check(offsets == hits and whole, "query", topic, key, index_type, times, "found", offsets, "put", hits)

    def _by_time(self, number: int) -> None:
        model, each = self.model, self.model.some(number)
        if each is None or not each.queued or each.spec.topic == "Inner" or model.has_holes:
            return
        queue = (each.spec.topic, each.spec.queue_id)
        live = [stored for stored in model.queues[queue] if model.is_live(stored)]
        at = each.timestamp + (0, 1, -1)[number % 3]
        got = self.store.offset_by_time(*queue, at)
        later = [one.queue_offset for one in live if one.timestamp >= at]
        wanted = later[0] if later else model.bounds(queue)[1]
        check(got == wanted, "by time", queue, at, got, wanted)

    def _bounds(self, number: int, store: MessageStore | None = None) -> None:
        each = self.model.some(number)
        if each is None or not each.queued:
            return
        store = self.store if store is None else store
        queue = (each.spec.topic, each.spec.queue_id)
        got = (store.min_queue_offset(*queue), store.max_queue_offset(*queue))
        wanted = self.model.bounds(queue)
        if store is not self.store:
            wanted = (min(got[0], wanted[0]), wanted[1])
        check(got[1] == wanted[1] and (self.model.has_holes or got == wanted), "bounds of", queue, got, wanted)
        for offset in (wanted[1], wanted[1] + 3):
            check(not store.get_message(*queue, offset, 4).messages, "something behind the end of", queue)

    def _scan(self, number: int) -> None:
        table = self.store.scan(["phy_offset", "body", "queue_offset"]).read_all()
        got = list(zip(*(table.column(name).to_pylist() for name in ("phy_offset", "body", "queue_offset"))))
        wanted = [(each.phy_offset, each.spec.body, each.queue_offset) for each in self.model.live()]
        if self.model.has_holes:
            # Damaged messages are rows too.
            got = [row for row in got if row in wanted]
        check(got == wanted, "scan gives", [row[0] for row in got], "put were", [row[0] for row in wanted])

    def _consume(self, number: int) -> None:
        meant = self.model.consume_of(number)
        if meant is None:
            self._tell_consumed(None)
            return
        (topic, queue_id), wanted, behind = meant
        got = [one.phy_offset for one in self.store.consume(topic, "loop", queue_ids=[queue_id], timeout=0)]
        check(got == wanted, "consumed", got, wanted)
        reached = self.store.consumer_offsets.get("loop", topic, queue_id)
        check(reached == behind, "the consumer's progress is", reached, "and not", behind)
        if behind >= 0:
            self.model.progress["loop", topic, queue_id] = behind
        self._tell_consumed((topic, queue_id, behind) if behind >= 0 else None)

    def _tell_consumed(self, progress: tuple[str, int, int] | None) -> None:
        # Only of what came to its end.
        self.consumed.append(progress)
        self.notes.tell_consumed(self.consumed)

    def _clock(self, number: int) -> None:
        self.model.tick(number)

    def _flush(self, number: int) -> None:
        self.model.may_have_flushed()
        self.store.flush()
        self.model.flushed()

    def _commit(self, number: int) -> None:
        group, topic, queue_id, offset = self.model.commit_of(number)
        self.store.consumer_offsets.commit(group, topic, queue_id, offset)
        self.model.progress[group, topic, queue_id] = offset

    def _progress(self, number: int) -> None:
        group, topic, queue_id, _ = self.model.commit_of(number)
        got = self.store.consumer_offsets.get(group, topic, queue_id)
        check(got == self.model.progress.get((group, topic, queue_id), -1), "progress of", group, topic, queue_id, got)

    def _follow(self, number: int) -> None:
        """A reader beside the writer, which stays open."""
        if self.follower is None or number % 5 == 0:
            if self.follower is not None:
                self.follower.close()
            self.follower = MessageStore.open(self.root, config=self.config, read_only=True)
        elif number % 5 == 1:
            # Unasked it looks every five milliseconds, and where it would otherwise say that there is nothing.
            each = self.model.some(number)
            if each is not None and each.queued:
                got = self.follower.get_message(each.spec.topic, each.spec.queue_id, each.queue_offset, 1)
                check(got.messages, "a follower finds nothing at", each, got)
                same(got.messages[0], each)
            return
        else:
            self.follower.refresh()
        self._bounds(number, self.follower)
        self._get(number // 3, self.follower)
        self._query(number // 5, self.follower)

    def _in_child(self, deed) -> None:
        child = os.fork()
        if not child:
            code = 1
            try:
                self.layer.disarm()
                deed()
                code = 0
            except BaseException:
                self.notes.fail(traceback.format_exc())
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        check(status == 0, "a forked process ended with", status, self.notes.failure)

    def _second(self, number: int) -> None:
        """A second process wants the store."""

        def deed() -> None:
            # The registry of this process is none of the second one's; a fork forgets it.
            with contextlib.suppress(StoreLockedError):
                MessageStore.open(self.root, config=self.config)
                raise SimulatedFailure("a second process may write")

        self._in_child(deed)

    def _fork(self, number: int) -> None:
        """The store in a forked child: it reads, does not write, and takes nothing with it."""

        def deed() -> None:
            self._at(number)
            try:
                self.store.put_message(Message("Orders", b"from a child"))
            except StoreError:
                pass
            else:
                raise SimulatedFailure("a forked child may put")
            self.store.close()

        self._in_child(deed)

    def _retain(self, number: int) -> None:
        """Retention: the oldest segments have had their time."""
        model = self.model
        folder = os.path.join(self.root, "commitlog")
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        count = 1 + number % 3
        for at, name in enumerate(names):
            written = model.now / 1000 - (360_000 if at < count else 0)
            os.utime(os.path.join(folder, name), (written, written))
        gone = min(count, max(len(names) - 1, 0))
        try:
            report = self.store.delete_expired_files()
        except EXPECTED:
            # What could not be deleted is there again when the store is opened next.
            first = self.store.commit_log.min_offset
            check(not names or model.min_offset <= first <= int(names[gone]), "retention went too far, to", first)
            model.min_offset = first
            raise
        check(report.segments == gone, "retention deleted", report.segments, "segments and not", gone)
        if names:
            model.min_offset = int(names[gone])
            check(self.store.commit_log.min_offset == model.min_offset, "the log begins at", self.store.commit_log.min_offset)

    def _fullness(self, number: int) -> None:
        """The disk is used above the level at which puts are refused, and then is not."""
        folder = os.path.join(self.root, "commitlog")
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            os.utime(os.path.join(folder, name), (self.model.now / 1000, self.model.now / 1000))
        self.fullness = 0.95
        try:
            check(self.store.delete_expired_files().segments == 0, "deleted what has not expired")
            with contextlib.suppress(DiskFullError):
                self.store.put_message(Message("Orders", b"too much"))
                raise SimulatedFailure("a full disk takes a message")
        finally:
            self.fullness = 0.5
            self.store.delete_expired_files()

    def _check(self, number: int) -> None:
        self.check_everything()

    def check_everything(self) -> None:
        """Every message by the log and by its queue, and the keys of some."""
        model, store = self.model, self.store
        live = model.live()
        given = list(store.messages())
        check(
            [message.phy_offset for message in given if not message.corrupt] == [each.phy_offset for each in live],
            "the log gives", [message.phy_offset for message in given], "put were", [each.phy_offset for each in live],
        )  # fmt: skip
        if not model.has_holes:
            check(not any(message.corrupt for message in given), "a message is damaged")
            for message, each in zip(given, live, strict=True):
                if message.body != each.spec.body:
                    same(message, each)
        for queue, stored in model.queues.items():
            self._check_queue(queue, stored)
        dice = random.Random(len(live))
        for each in dice.sample(live, min(len(live), 12)):
            same(store.message_at(each.phy_offset), each)
            if not each.indexed:
                continue
            for key in each.keys:
                hits = places(store.query_message(each.spec.topic, key, 2000), model)
                wanted = model.hits(model.keys[each.spec.topic, key])
                check(hits == wanted, "key", each.spec.topic, key, "finds", hits, "put", wanted)

    def _check_queue(self, queue: tuple[str, int], stored: list[Stored]) -> None:
        model, store = self.model, self.store
        low, high = model.bounds(queue)
        got = store.max_queue_offset(*queue)
        check(got == high, "the end of queue", queue, got, high)
        # A message in a light queue says the queue offset of its own.
        is_light = queue[0] in LIGHT_QUEUES
        wanted = [(0 if is_light else each.queue_offset, each.phy_offset) for each in stored if model.is_live(each)]
        found = [(0 if is_light else message.queue_offset, message.phy_offset) for message in walk(store, queue, low)]
        check(found == wanted, "queue", queue, "has", found, "put", wanted)


def _table(specs: list[Spec]):
    import pyarrow as pa

    return pa.table(
        {
            "body": pa.array([spec.body for spec in specs], pa.binary()),
            "keys": pa.array([dict(spec.pairs)["KEYS"].split(" ") for spec in specs], pa.list_(pa.string())),
            "tags": pa.array([dict(spec.pairs).get("TAGS") for spec in specs], pa.string()),
            "born_timestamp": pa.array([spec.born_timestamp for spec in specs], pa.int64()),
            "born_host": pa.array([spec.born_host for spec in specs], pa.string()),
        }
    )


def warm_up(folder: str) -> None:
    """Have this process import all that a session needs, so that not every child does."""
    model = Model(setting_of(0))
    config = config_of(model)
    with MessageStore.open(folder, config=config) as store:
        for number, kind in enumerate(("put", "put_odd", "put_table", "put_batch", "put_inner", "put_many")):
            stored = model.predict((kind, number)) or []
            for each in stored:
                store.put_message(message_of(each.spec), each.spec.queue_id)
            model.commit(stored)
        specs = specs_of(("put_table", 1))
        store.put_table(_table(specs), topic="Orders", queue_id=0)
        list(store.consume("Orders", "loop", timeout=0))
        store.scan(["phy_offset", "body", "queue_offset"]).read_all().column("body").to_pylist()
        store.query_message("Orders", "u1")
        store.delete_expired_files()
        store.flush()
    rebuild_store(folder, ("index", "consumequeue"), config)
    with MessageStore.open(folder, config=config, read_only=True) as store:
        list(store.messages())
    list(verify(folder, config))


def run_child(session: Session, operations: list[Operation], log: str | None) -> None:
    """All that a child does; never returns."""
    code = CHECK_FAILED
    try:
        signal.alarm(TIMEOUT)
        opening = session.opening
        action = {"none": "nothing", "kill at store": "kill before"}.get(opening.fault, opening.fault)
        session.layer.arm(session.root, opening.names, opening.number, action, opening.error, opening.lasts, log)
        session.run(operations)
        code = ENDED
    except BaseException:
        session.notes.fail(traceback.format_exc())
    finally:
        os._exit(code)
