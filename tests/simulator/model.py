"""The model: what must be in a store, in plain Python, without a look at the package.

Owns the messages that are there, where each lies byte for byte, which queue offsets they have, what their keys find, what is
surely on the disk, and how far each consumer group is.  It never touches a file.  What may or may not be there after a
fault is told to it: `predict` says what an operation would store, `commit` that it did, `cut` and `adopt` what is left.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import oracle

from .plan import GROUPS, INNER_TOPIC, NOW, STEPS_OF_CLOCK, TOPICS, Operation, Setting, Spec, specs_of

BLANK = 8


class Stored:
    """A message where it lies in the log."""

    __slots__ = (
        "_raw", "in_batch", "indexed", "keys", "light", "num", "phy_offset", "prop_crc", "properties", "queue_offset",
        "queued", "size", "spec", "tags", "timestamp",
    )  # fmt: skip

    def __init__(self, spec: Spec, prop_crc: bool, in_batch: bool):
        self.spec, self.prop_crc, self.in_batch = spec, prop_crc, in_batch
        self.num = 1
        #: The light message queues that it is in too, with its queue offset there.
        self.light: list[tuple[str, int]] = []
        self._raw: bytes | None = None

    @property
    def end(self) -> int:
        return self.phy_offset + self.size

    @property
    def raw(self) -> bytes:
        """The record as the oracle encodes it."""
        if self._raw is None:
            spec = self.spec
            self._raw = oracle.encode_record(
                topic=spec.topic, body=spec.body, properties=self.properties, queue_id=spec.queue_id, flag=spec.flag,
                queue_offset=self.queue_offset, phy_offset=self.phy_offset, sys_flag=spec.sys_flag,
                born_timestamp=spec.born_timestamp, born_host=spec.born_host, store_timestamp=self.timestamp,
                store_host=spec.store_host, reconsume_times=spec.reconsume_times,
                prepared_transaction_offset=spec.prepared_transaction_offset, append_prop_crc=self.prop_crc,
                in_classic_batch=self.in_batch,
            )  # fmt: skip
            assert len(self._raw) == self.size, "the model does not know the size of a record"
        return self._raw

    def __repr__(self) -> str:
        return f"{self.spec.topic[:20]}/{self.spec.queue_id} {self.queue_offset} at {self.phy_offset}, {self.size} bytes"


class Light:
    """A message where it lies in a light message queue."""

    __slots__ = ("num", "phy_offset", "queue_offset", "size")

    def __init__(self, stored: Stored, queue_offset: int):
        self.phy_offset, self.size, self.queue_offset, self.num = stored.phy_offset, stored.size, queue_offset, 1

    def __repr__(self) -> str:
        return f"light {self.queue_offset} at {self.phy_offset}, {self.size} bytes"


@dataclasses.dataclass
class Doubt:
    """What is not known of the log until a store was opened: it is whole up to `prefix_end`, damaged after that.

    `behind`: something of the log lies after the damage, so that a strict opening may refuse.  `sure` are the phy offsets that
    no opening but a truncating one may lose.
    """

    prefix_end: int
    behind: bool
    sure: frozenset[int] = frozenset()

    def lets_stand(self, phy_offset: int) -> bool:
        """What lies there is whole, and a reader gives it out."""
        return phy_offset < self.prefix_end or phy_offset in self.sure


class Model:
    """What must be there."""

    def __init__(self, setting: Setting):
        self.setting = setting
        geometry = setting.geometry
        self.segment = geometry["mapped_file_size_commit_log"]
        self.units_of_file = -(-geometry["mapped_file_size_consume_queue"] // 20)
        self.prop_crc = geometry["enabled_append_prop_crc"]
        self.sync = setting.options["flush_disk_type"] == "SYNC_FLUSH"
        self.now = NOW
        self.min_offset = 0
        #: Up to here everything is surely on the disk.
        self.durable_end = 0
        self.end = 0
        self.records: list[Stored] = []
        self.queues: dict[tuple[str, int], list[Stored | Light]] = {}
        self.next_offsets: dict[tuple[str, int], int] = {}
        self.keys: dict[tuple[str, str], list[Stored]] = {}
        self.tags: dict[tuple[str, str], list[Stored]] = {}
        #: Consumer progress: as it was committed, and as it may be on the disk; the first of these is surely there or newer.
        self.progress: dict[tuple[str, str, int], int] = {}
        self.persisted: list[dict[tuple[str, str, int], int]] = [{}]
        self.doubt: Doubt | None = None
        #: Queues may have holes, where a message was lost that a later one follows.
        self.has_holes = False

    # ------------------------------------------------------------------------------------------------------- putting

    def predict(self, operation: Operation) -> list[Stored] | None:
        """What a put would store, None where it must be refused."""
        kind, _ = operation
        specs = specs_of(operation)
        together = kind == "put_batch"
        following: dict[tuple[str, int], int] = {}
        stored = []
        for spec in specs:
            each = Stored(spec, self.prop_crc, together)
            transaction = spec.sys_flag & oracle.TRANSACTION_MASK
            each.queued = transaction in (0, oracle.COMMIT)
            each.indexed = transaction != oracle.ROLLBACK
            each.timestamp = self.now
            pairs = spec.pairs
            queue = spec.topic, spec.queue_id
            each.queue_offset = 0
            if each.queued:
                each.queue_offset = following.get(queue, self.next_offsets.get(queue, 0))
            if kind == "put_inner":
                pairs = [(name, str(each.queue_offset) if name == "INNER_BASE" else value) for name, value in pairs]
                each.num = int(dict(pairs)["INNER_NUM"])
            if each.queued:
                following[queue] = each.queue_offset + each.num
            if names := dict(pairs).get("INNER_MULTI_DISPATCH"):
                for name in names.split(","):
                    number = following.get((name, 0), self.next_offsets.get((name, 0), 0))
                    each.light.append((name, number))
                    following[name, 0] = number + 1
                pairs = [*pairs, ("INNER_MULTI_QUEUE_OFFSET", ",".join(str(number) for _, number in each.light))]
            named = dict(pairs)
            each.properties = oracle.encode_properties(pairs)
            each.keys = dict.fromkeys(
                [*oracle.split_keys(named.get("KEYS")), *([named["UNIQ_KEY"]] if named.get("UNIQ_KEY") else [])]
            )
            each.tags = named.get("TAGS")
            each.size = (
                91 + len(spec.topic.encode()) + len(spec.body) + len(each.properties)
                + 12 * (spec.born_host[0] == "[") + 12 * (spec.store_host[0] == "[") + 20 * self.prop_crc
            )  # fmt: skip
            stored.append(each)
        sizes = [each.size for each in stored]
        if (sum(sizes) if together else max(sizes)) + BLANK > self.segment:
            return None
        at = self.end
        for number, each in enumerate(stored):
            wanted = sum(sizes) if together and number == 0 else each.size
            left = self.segment - at % self.segment
            if (not together or number == 0) and wanted + BLANK > left:
                at += left
            each.phy_offset = at
            at += each.size
        return stored

    def commit(self, stored: Iterable[Stored]) -> None:
        """They were stored."""
        for each in stored:
            topic, queue_id = each.spec.topic, each.spec.queue_id
            self.records.append(each)
            self.end = each.end
            if each.queued:
                self.queues.setdefault((topic, queue_id), []).append(each)
                self.next_offsets[topic, queue_id] = each.queue_offset + each.num
            for name, number in each.light:
                self.queues.setdefault((name, 0), []).append(Light(each, number))
                self.next_offsets[name, 0] = number + 1
            if each.indexed:
                for key in each.keys:
                    self.keys.setdefault((topic, key), []).append(each)
                if each.tags:
                    self.tags.setdefault((topic, each.tags), []).append(each)

    def waits(self, stored: list[Stored]) -> bool:
        """Whether a put of these returns only when they are on the disk."""
        return self.sync and any(dict(each.spec.pairs).get("WAIT", "true") == "true" for each in stored)

    # ---------------------------------------------------------------------------------------------------- other deeds

    def tick(self, number: int) -> None:
        """The clock goes on, or back."""
        self.now += STEPS_OF_CLOCK[number % len(STEPS_OF_CLOCK)]

    def flushed(self) -> None:
        """A flush returned: all of it is on the disk, and the progress that was committed."""
        self.durable_end = self.end
        self.persisted = [dict(self.progress)]

    def may_have_flushed(self) -> None:
        """A flush or a close began and did not come to its end."""
        if self.progress not in self.persisted:
            self.persisted.append(dict(self.progress))

    @staticmethod
    def commit_of(number: int) -> tuple[str, str, int, int]:
        """Group, topic, queue and offset of a ("commit", number)."""
        return (
            GROUPS[number % 3], TOPICS[number // 3 % len(TOPICS)], number // 32 % 2,
            (0, 1, 7, 2**63 - 1, number // 64 % 1000)[number // 64 % 5],
        )  # fmt: skip

    def consume_of(self, number: int) -> tuple[tuple[str, int], list[int], int] | None:
        """What a consumer of ("consume", number) gets: the queue, phy offsets, and its progress after that, -1: none."""
        each = self.some(number)
        if each is None or not each.queued or each.spec.topic == INNER_TOPIC or self.has_holes:
            return None
        queue = each.spec.topic, each.spec.queue_id
        start = self.progress.get(("loop", *queue), -1)
        wanted = [one.phy_offset for one in self.queues[queue] if one.queue_offset >= start and self.is_live(one)]
        return queue, wanted, self.next_offsets[queue] if wanted else start

    # -------------------------------------------------------------------------------------------------------- reading

    def some(self, number: int) -> Stored | None:
        """A message that is there, the newer ones more often."""
        records = self.records
        if not records:
            return None
        place = number % len(records) if number & 0x10000 else len(records) - 1 - number % min(len(records), 20)
        each = records[place]
        return each if self.is_live(each) else records[-1] if self.is_live(records[-1]) else None

    def live(self) -> list[Stored]:
        """Every message that was not deleted by retention."""
        return self.records[bisect_left(self.records, self.min_offset, key=lambda each: each.phy_offset) :]

    def is_live(self, each: Stored | Light) -> bool:
        return each.phy_offset >= self.min_offset

    def bounds(self, queue: tuple[str, int]) -> tuple[int, int]:
        """Queue offset of the first message that is there, and of the next to come."""
        high = self.next_offsets.get(queue, 0)
        return next((each.queue_offset for each in self.queues.get(queue, ()) if self.is_live(each)), high), high

    def hits(self, found: list[Stored] | None, begin: int = -(2**63), end: int = 2**63) -> list[int]:
        """Phy offsets, newest first, of those stored within these times."""
        return [
            each.phy_offset
            for each in reversed(found or ())
            if each.phy_offset >= self.min_offset and begin <= each.timestamp <= end
        ]

    # ----------------------------------------------------------------------------------------------------------- loss

    def cut(self, end: int) -> None:
        """Everything from phy offset `end` on is gone."""
        kept = [each for each in self.records if each.phy_offset < end]
        self.adopt(kept, None)
        self.durable_end = min(self.durable_end, self.end)

    def adopt(self, kept: list[Stored], next_offsets: dict[tuple[str, int], int] | None) -> None:
        """Exactly these are left; queues go on at `next_offsets`, None: after their last message."""
        self.records, self.queues, self.keys, self.tags, self.next_offsets = [], {}, {}, {}, {}
        self.end = 0
        self.commit(kept)
        if next_offsets is not None:
            self.next_offsets = dict(next_offsets)

    def state_of_progress(self, number: int) -> None:
        """What was read when the store was opened is the `number`-th of what could be there."""
        self.progress = dict(self.persisted[number])
        self.persisted = [dict(self.progress)]


def describe(model: Model) -> dict[str, Any]:
    """A few numbers, for reports."""
    return {"messages": len(model.records), "log": model.end, "queues": len(model.queues), "keys": len(model.keys)}
