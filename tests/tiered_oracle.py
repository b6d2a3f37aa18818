"""A second reader and writer of tiered storage in plain Python: `struct` and files, nothing of the package.

Owns the golden archives of tiered storage, a reader of every structure of section 7 of the format document, and a writer of small
storages for tests that damage them.  It trusts what it reads: it is for files that are whole.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import struct
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import golden
import oracle

DATA = Path(__file__).resolve().parent / "data" / "rocketmq-tiered"
#: After an orderly shutdown, and copied while the broker ran.
STORES = ("store", "store.running")
#: Slots of the golden index files, as the broker was configured.
SLOTS = 100


def unpack(name: str, directory: Path) -> Path:
    """Unpack a golden archive; the folder that holds store/ and tiered/."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        golden.extract(archive, directory)
    return directory


def lines(name: str) -> list[dict[str, Any]]:
    """The answers of the real system: "messages" or "messages.tiered"."""
    return [json.loads(line) for line in lzma.open(DATA / f"{name}.jsonl.xz", "rt", encoding="utf-8")]


def prefix(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()[:8]


def file_name(base: int) -> str:
    return f"{prefix(str(base))}{base:020d}"


def key_hash(topic: str, key: str) -> int:
    return abs(oracle.java_hash(f"{topic}#{key}"))


class Item(NamedTuple):
    hash: int
    topic_id: int
    queue_id: int
    log_offset: int
    size: int
    seconds: int


class IndexFile(NamedTuple):
    compacted: bool
    begin: int
    end: int
    used: int
    items: list[list[Item]]  # of each slot, newest first


def read_index(data: bytes, compacted: bool, slots: int = SLOTS) -> IndexFile:
    _, begin, end, used, num = struct.unpack_from(">Iqqii", data)
    found: list[list[Item]] = []
    for slot in range(slots):
        at, length = struct.unpack_from(">ii", data, 28 + 8 * slot)
        chain = []
        if compacted:
            chain = [Item(*struct.unpack_from(">iiiqii", data, pos)) for pos in range(at, at + length, 28)]
        else:
            while at:
                *item, previous = struct.unpack_from(">iiiqiii", data, 28 + 8 * slots + 32 * at)
                chain.append(Item(*item))
                at = previous
        found.append(chain)
    assert sum(map(len, found)) == num
    return IndexFile(compacted, begin, end, used, found)


class Tiered:
    """Everything in a golden tiered storage, read by its file names alone."""

    def __init__(self, root: Path):
        self.root = root
        self.base = root / "tiered" / f"{prefix('golden')}_golden" / "golden"
        text = (root / "store" / "config" / "tieredStoreMetadata.json").read_text()
        self.metadata = json.loads(re.sub(r"([{,]\s*)(\d+):", r'\1"\2":', text))
        self.topic_ids = {each["topicId"]: topic for topic, each in self.metadata["topicMetadataTable"].items()}

    def queues(self) -> list[tuple[str, int]]:
        found = [(path.parent.name, int(path.name)) for path in self.base.glob("*/*")]
        return sorted(each for each in found if each[0] != "rmq_sys_INDEX")

    def stream(self, topic: str, queue_id: int, kind: str) -> tuple[int, bytes]:
        """The position of the bytes, and the bytes."""
        paths = sorted((self.base / topic / str(queue_id) / kind).iterdir(), key=lambda path: path.name[8:])
        data, first = b"", int(paths[0].name[8:])
        for path in paths:
            assert path.name == file_name(first + len(data))
            data += path.read_bytes()
        return first, data

    def messages(self, topic: str, queue_id: int) -> list[oracle.Record]:
        first, units = self.stream(topic, queue_id, "CONSUME_QUEUE")
        base, log = self.stream(topic, queue_id, "COMMIT_LOG")
        assert first == base == 0
        records = []
        for pos in range(0, len(units), 20):
            offset, size, _ = struct.unpack_from(">qiq", units, pos)
            record = oracle.decode_record(log[offset : offset + size], phy_offset=offset)
            records.append(record)
        return records

    def index_files(self) -> list[IndexFile]:
        uploaded = sorted((self.base / "rmq_sys_INDEX" / "0" / "INDEX").iterdir(), key=lambda path: path.name[8:])
        local = sorted((self.root / "store" / "tiered_index_file").glob("[0-9]*"))
        return [read_index(path.read_bytes(), True) for path in uploaded] + [
            read_index(path.read_bytes(), False) for path in local
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class Sent(NamedTuple):
    topic: str
    queue_id: int
    keys: tuple[str, ...]
    tags: str | None
    unique_key: str
    body: bytes
    store_timestamp: int


def write_tiered(
    root: Path,
    sent: list[Sent],
    *,
    log_size: int = 600,
    queue_size: int = 60,
    slots: int = 4,
    index_items: int = 8,
    unsealed: bool = True,
    now: int = 1_700_000_000_000,
) -> None:
    """Write store/config/tieredStoreMetadata.json, tiered/ and index files as a broker does; `index_items` a file at most."""
    base = root / "tiered" / f"{prefix('C')}_C" / "B"
    topics = sorted({each.topic for each in sent})
    metadata: dict[str, Any] = {
        name: {} for name in ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable", "indexFileSegmentTable")
    }
    metadata["topicMetadataTable"] = {
        topic: {"topicId": number, "topic": topic, "status": 0} for number, topic in enumerate(topics)
    }
    logs: dict[tuple[str, int], list[bytes]] = {}
    units: dict[tuple[str, int], list[bytes]] = {}
    entries: list[list[Item]] = [[]]
    for each in sent:
        queue = each.topic, each.queue_id
        records = logs.setdefault(queue, [])
        offset = sum(map(len, records))
        properties = [("UNIQ_KEY", each.unique_key)] if each.unique_key else []
        properties += [("KEYS", " ".join(each.keys))] if each.keys else []
        properties += [("TAGS", each.tags)] if each.tags is not None else []
        record = oracle.encode_record(
            topic=each.topic, queue_id=each.queue_id, queue_offset=len(records), phy_offset=offset, body=each.body,
            properties=properties, store_timestamp=each.store_timestamp, born_timestamp=each.store_timestamp - 1,
        )  # fmt: skip
        records.append(record)
        code = oracle.tags_hash(each.tags)
        units.setdefault(queue, []).append(struct.pack(">qiq", offset, len(record), code))
        keys = sorted({each.unique_key, *each.keys} - {""})
        if len(entries[-1]) + len(keys) >= index_items:
            entries.append([])
        seconds = int((each.store_timestamp - now - 1000 * len(entries)) / 1000)
        entries[-1] += [
            Item(key_hash(each.topic, key), topics.index(each.topic), each.queue_id, offset, len(record), seconds)
            for key in keys
        ]
    for (topic, queue_id), records in logs.items():
        for kind, table, pieces, size in (
            ("COMMIT_LOG", "commitLogFileSegmentTable", records, log_size),
            ("CONSUME_QUEUE", "consumeQueueFileSegmentTable", units[topic, queue_id], queue_size),
        ):
            listed = metadata[table].setdefault(f"B/{topic}/{queue_id}", {})
            _write_run(base / topic / str(queue_id) / kind, pieces, size, listed)
    times = {
        (topics.index(each.topic), each.queue_id, struct.unpack_from(">q", unit)[0]): each.store_timestamp
        for queue in units
        for each, unit in zip([other for other in sent if (other.topic, other.queue_id) == queue], units[queue])
    }
    position, listed = 0, metadata["indexFileSegmentTable"].setdefault("B/rmq_sys_INDEX/0", {})
    for number, items in enumerate(entries):
        begin = now + 1000 * (number + 1)
        end = max(times[item.topic_id, item.queue_id, item.log_offset] for item in items)
        if unsealed and number == len(entries) - 1:
            path = root / "store" / "tiered_index_file" / str(begin)
            data = _unsealed(items, begin, end, slots, index_items)
        else:
            path = base / "rmq_sys_INDEX" / "0" / "INDEX" / file_name(position)
            data = _compacted(items, begin, end, slots)
            listed[str(position)] = {"baseOffset": position, "size": len(data), "type": 2}
            position += len(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    path = root / "store" / "config" / "tieredStoreMetadata.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keys that are numbers have no quotes.
    path.write_text(re.sub(r'"(\d+)":', r"\1:", json.dumps(metadata, indent=1)))


def _write_run(folder: Path, pieces: list[bytes], size: int, listed: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    base, data = 0, b""
    for piece in [*pieces, b""]:
        if not piece or (data and len(data) + len(piece) > size):
            (folder / file_name(base)).write_bytes(data)
            listed[str(base)] = {"baseOffset": base, "size": len(data), "type": 0}
            base, data = base + len(data), b""
        data += piece


def _by_slot(items: list[Item], slots: int) -> list[list[int]]:
    return [[number for number, item in enumerate(items, 1) if item.hash % slots == slot] for slot in range(slots)]


def _compacted(items: list[Item], begin: int, end: int, slots: int) -> bytes:
    table, placed = b"", b""
    of_slot = _by_slot(items, slots)
    for numbers in of_slot:
        table += struct.pack(">ii", 28 + 8 * slots + len(placed), 28 * len(numbers))
        placed += b"".join(struct.pack(">iiiqii", *items[number - 1]) for number in reversed(numbers))
    used = sum(map(bool, of_slot))
    return struct.pack(">Iqqii", 0xBCC50285, begin, end, used, len(items)) + table + placed


def _unsealed(items: list[Item], begin: int, end: int, slots: int, index_items: int) -> bytes:
    of_slot = _by_slot(items, slots)
    table = b"".join(struct.pack(">ii", numbers[-1] if numbers else 0, 0) for numbers in of_slot)
    placed = bytes(32)
    for number, item in enumerate(items, 1):
        before = [each for each in of_slot[item.hash % slots] if each < number]
        placed += struct.pack(">iiiqiii", *item, before[-1] if before else 0)
    header = struct.pack(">Iqqii", 0xBCC50289, begin, end, sum(map(bool, of_slot)), len(items))
    return (header + table + placed).ljust(28 + 8 * slots + 32 * index_items, b"\0")
