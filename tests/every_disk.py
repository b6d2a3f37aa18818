"""Every kind of disk, small, from one list of messages, and the rows that a question about that list is answered with.

Answers come from the list, and places in the log from the oracle's layout: nothing here asks the package what it reads.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import oracle
import rocksdb_files
import rocksdb_stores
import tiered_oracle

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.errors import Finding
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.sources import DamagePolicy

T0 = 1_700_000_000_000
NUM = 48
SMALL = {
    "mapped_file_size_commit_log": 2048, "mapped_file_size_consume_queue": 100, "mapper_file_size_batch_consume_queue": 230,
    "mapped_file_size_consume_queue_ext": 400, "max_hash_slot_num": 10, "max_index_num": 60, "clean_resource_interval": 0,
    "populate_ahead_size": 0,
}  # fmt: skip
COLUMNS = ("topic", "queue_id", "queue_offset", "keys", "tags", "unique_key", "body", "store_timestamp")
QUEUES = (("Orders", 0), ("Orders", 1), ("Pay", 0), ("Pay", 1))
# Two with one hash, so that only the text tells them apart; text of which a character has three bytes; of all; of nobody.
TAGS = ("Aa", "BB", "已付")
KEYS = ("K7", "K20", "U00031", "Aa", "BB", "all", "钥匙3", "已付", "nobody", "K")


class Row(NamedTuple):
    """A message as every question shows it."""

    topic: str
    queue_id: int
    queue_offset: int
    keys: tuple[str, ...]
    tags: str | None
    unique_key: str
    body: bytes
    store_timestamp: int

    def has_key(self, key: str, index_type: str | None = None) -> bool:
        """Return whether a query for this key finds it."""
        if index_type == "T":
            return self.tags == key
        return (index_type != "K" and self.unique_key == key) or (index_type != "U" and key in self.keys)


def sent(num: int = NUM) -> list[tiered_oracle.Sent]:
    """The messages, in the order of the log; store times rise."""
    made = []
    for number in range(num):
        topic, queue_id = ("Pay" if number % 3 == 2 else "Orders"), number // 3 % 2
        keys = () if number % 11 == 10 else (f"K{number}", ("Aa", "BB")[number % 2], "all", f"钥匙{number % 5}")
        tags = (None, *TAGS)[number // 2 % 4]
        body = b"<%d>" % number + bytes(range(60 + number % 7))
        made.append(tiered_oracle.Sent(topic, queue_id, keys, tags, f"U{number:05d}", body, T0 + 700 * number))
    return made


def rows_of(messages: Iterable[tiered_oracle.Sent], step: int = 1) -> list[Row]:
    """The rows of these messages, each of which takes `step` places of its queue."""
    ends: dict[tuple[str, int], int] = {}
    rows = []
    for each in messages:
        at = ends.get((each.topic, each.queue_id), 0)
        ends[each.topic, each.queue_id] = at + step
        rows.append(
            Row(each.topic, each.queue_id, at, each.keys, each.tags, each.unique_key, each.body, each.store_timestamp)
        )
    return rows


def properties_of(message: tiered_oracle.Sent, inner: bool = False) -> dict[str, str]:
    """The properties of a message."""
    found = {"UNIQ_KEY": message.unique_key, "KEYS": " ".join(message.keys), "TAGS": message.tags}
    return {name: text for name, text in {**found, "INNER_NUM": "2" if inner else None}.items() if text}


def places_of(messages: Iterable[tiered_oracle.Sent], geometry: dict[str, Any], inner: bool) -> list[tuple[int, int]]:
    """Phy offset and size of each, as the oracle lays them out."""
    model = oracle.StoreOracle(geometry)
    puts = [
        model.put(
            each.topic, each.body, clock=each.store_timestamp, queue_id=each.queue_id, sys_flag=0xC0 if inner else 0,
            properties=list(properties_of(each, inner).items()), born_timestamp=each.store_timestamp - 1,
        )
        for each in messages
    ]  # fmt: skip
    return [(put.phy_offset, put.size) for put in puts]


def open_tiered(tiered: Path, store: Path | None = None, **options: Any) -> MessageStore:
    """Open tiered storage by itself; of the local store only its metadata and index files are read."""
    flat_store = FlatStore(tiered, store, **options)
    return MessageStore.open(tiered, read_only=True, tiered=flat_store)


def reported_to(findings: list[Finding] | None) -> DamagePolicy:
    """A policy that adds to `findings` what cannot be read; without them that is an error."""
    policy = DamagePolicy("fail" if findings is None else "report")
    policy.findings = [] if findings is None else findings
    return policy


@dataclass(frozen=True)
class Disk:
    """A store of one kind: where it is, how it is opened, and what is in it.

    Attributes
    ----------
    rows : list of Row
        In the order in which a scan has them.
    places : dict of Row to int
        Phy offsets, of what the local log has.
    step : int
        Places of its queue that a message takes.
    """

    root: Path
    config: StoreConfig
    rows: list[Row]
    places: dict[Row, int] = field(default_factory=dict)
    step: int = 1
    tiered: Path | None = None
    alone: bool = False
    writable: bool = False

    def open(self, findings: list[Finding] | None = None) -> Any:
        """Open it for reading."""
        if self.alone:
            return open_tiered(self.tiered, self.root, damage=reported_to(findings))
        return MessageStore.open(self.root, config=self.config, read_only=not self.writable, tiered=self.tiered)

    def copied(self, folder: Path) -> Disk:
        """Return the same disk in another folder."""
        shutil.copytree(self.root.parent, folder)
        tiered = None if self.tiered is None else folder / self.tiered.relative_to(self.root.parent)
        return replace(self, root=folder / self.root.name, tiered=tiered)

    def geometry(self) -> dict[str, str]:
        """The options of the configuration, as text."""
        return {name: str(getattr(self.config, name)).lower() for name in (*SMALL, "enable_consume_queue_ext")}

    def options(self) -> list[str]:
        """The options of a command for this store."""
        given = [f"-o{name}={value}" for name, value in self.geometry().items()]
        return given if self.tiered is None else [*given, "--tiered", str(self.tiered)]

    def queue(self, topic: str, queue_id: int) -> list[Row]:
        """The rows of one queue, in its order."""
        found = [row for row in self.rows if (row.topic, row.queue_id) == (topic, queue_id)]
        return sorted(found, key=lambda row: row.queue_offset)

    def newest_first(self, rows: Iterable[Row]) -> list[Row]:
        """These rows as a query has them."""
        return sorted(rows, key=lambda row: -row.store_timestamp)


# ---------------------------------------------------------------------------------------------------------------- making


def put(store: MessageStore, messages: Iterable[tiered_oracle.Sent], inner: bool = False) -> None:
    """Put these messages; the store's clock must have their times."""
    for each in messages:
        flag = 0xC0 if inner else 0
        born = each.store_timestamp - 1
        given = properties_of(each, inner)
        message = Message(each.topic, each.body, properties=given, sys_flag=flag, born_timestamp=born)
        store.put_message(message, each.queue_id)


def config_of(times: Iterable[int] = (), **more: Any) -> StoreConfig:
    """The configuration of a small store, and a clock with these times."""
    clock = iter((*times, *[T0 + 10**6] * 1000)).__next__
    return StoreConfig(**{**SMALL, **more}, clock=clock)


def local(folder: Path, messages: list[tiered_oracle.Sent], inner: bool = False, **more: Any) -> Disk:
    """A closed store that has all these messages in its log, queue and index files."""
    with MessageStore.open(folder / "store", config=config_of([each.store_timestamp for each in messages], **more)) as store:
        put(store, messages, inner)
    step = 2 if inner else 1
    rows = rows_of(messages, step)
    places = places_of(messages, {**SMALL, **more}, inner)
    return Disk(folder / "store", config_of(**more), rows, {row: at for row, (at, _) in zip(rows, places)}, step)


def killed(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """A store whose writer died: queues and index lack the newest third, and the mark of an open store is there."""
    before = len(messages) * 2 // 3
    old = local(folder / "old", messages[:before])
    disk = local(folder, messages)
    for part in ("consumequeue", "index", "checkpoint"):
        path = disk.root / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.move(old.root / part, path)
    shutil.rmtree(folder / "old")
    (disk.root / "abort").write_bytes(b"12345")
    return disk


def rocksdb_queues(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """A store whose queues are in RocksDB, by the format document."""
    disk = local(folder, messages)
    shutil.rmtree(disk.root / "consumequeue")
    write_queues(disk, messages)
    return disk


def write_queues(disk: Disk, messages: list[tiered_oracle.Sent]) -> None:
    """Write the database of queues that leads to these messages."""
    units: dict[bytes, bytes] = {}
    offsets: dict[bytes, bytes] = {}
    end = 0
    for row, (at, size) in zip(disk.rows, places_of(messages, SMALL, False)):
        key = rocksdb_stores.unit_key(row.topic, row.queue_id, row.queue_offset)
        units[key] = struct.pack(">qiqq", at, size, oracle.tags_hash(row.tags), row.store_timestamp)
        offsets[rocksdb_stores.max_key(row.topic, row.queue_id)] = struct.pack(">qq", at, row.queue_offset)
        end = at + size
    offsets[rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0)] = struct.pack(">q", end)
    rocksdb_files.write(disk.root / "consumequeue", {"default": units, "offset": offsets})


def rocksdb_index(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """A store whose index is in RocksDB, by the format document."""
    disk = local(folder, messages)
    shutil.rmtree(disk.root / "index")
    write_index(disk)
    return disk


def write_index(disk: Disk) -> None:
    """Write the database with the entries of all rows."""
    entries: dict[bytes, bytes] = {}
    for row in disk.rows:
        entries |= rocksdb_files.index_entries(
            row.topic, " ".join(row.keys), row.tags, row.unique_key, disk.places[row], row.store_timestamp
        )
    last = disk.rows[-1]
    entries[b"lastOffsetPy"] = struct.pack(">q", disk.places[last])
    entries[b"lastStoreTimeStamp"] = struct.pack(">q", last.store_timestamp)
    rocksdb_files.write(disk.root / "rocksdbstore", {"default": entries})


def tiered_alone(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """Tiered storage without the local store's log."""
    tiered_oracle.write_tiered(folder, messages)
    rows = sorted(rows_of(messages), key=lambda row: row[:3])
    return Disk(folder / "store", config_of(), rows, tiered=folder / "tiered", alone=True)


def tiered_without_log(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """The same, opened as a store whose local log is gone."""
    return replace(tiered_alone(folder, messages), alone=False)


def written(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """A store that is open for writing while it is asked."""
    return replace(local(folder, messages), writable=True)


def tiered(folder: Path, messages: list[tiered_oracle.Sent]) -> Disk:
    """A store whose older messages are in tiered storage alone, some in both, and the newest in the local log alone."""
    disk = local(folder, messages)
    size = SMALL["mapped_file_size_commit_log"]
    gone = [disk.root / "commitlog" / f"{number * size:020}" for number in range(2)]
    for path in gone:
        path.unlink()
    tiered_oracle.write_tiered(folder, messages[: len(messages) * 2 // 3])
    places = {row: at for row, at in disk.places.items() if at >= len(gone) * size}
    older = sorted((row for row in disk.rows if row not in places), key=lambda row: row[:3])
    return replace(disk, rows=[*older, *places], places=places, tiered=folder / "tiered")


MAKE: dict[str, Callable[[Path, list[tiered_oracle.Sent]], Disk]] = {
    "plain": local,
    "extension": lambda folder, messages: local(folder, messages, enable_consume_queue_ext=True),
    "batch": lambda folder, messages: local(folder, messages, inner=True),
    "rocksdb queues": rocksdb_queues,
    "rocksdb index": rocksdb_index,
    "tiered": tiered,
    "tiered alone": tiered_alone,
    "tiered without log": tiered_without_log,
    "killed": killed,
    "open for writing": written,
}


def grow(disk: Disk, after: Disk) -> None:
    """Write into the files of a disk what one with more messages has, in place, as a broker does; databases get entries."""
    for path in sorted(after.root.parent.rglob("*")):
        target = disk.root.parent / path.relative_to(after.root.parent)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif not (path.parent / "CURRENT").exists():
            with open(target, "r+b" if target.exists() else "wb") as file:
                file.write(path.read_bytes())
    if (disk.root / "consumequeue" / "CURRENT").exists():
        write_queues(replace(disk, rows=after.rows), sent(len(after.rows)))


# --------------------------------------------------------------------------------------------------------------- damaging


class Harm(NamedTuple):
    """A change that was made to a disk.

    Attributes
    ----------
    path : Path
        The file that was damaged.
    lost : set of Row
        Messages that no file has any more.
    hidden : set of Row
        Messages whose unit is gone.
    changed : Row or None
        The message whose body is another one.
    """

    path: Path
    lost: frozenset[Row] = frozenset()
    hidden: frozenset[Row] = frozenset()
    changed: Row | None = None


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def _unit_files(disk: Disk) -> list[Path]:
    # Those of queue 0 of Orders, five units each but in tiered storage, where there are three.
    if disk.tiered is not None:
        return sorted(disk.tiered.glob("*/B/Orders/0/CONSUME_QUEUE/*"), key=lambda path: path.name[8:])
    folder = "batchconsumequeue" if disk.step == 2 else "consumequeue"
    return sorted((disk.root / folder / "Orders" / "0").iterdir())


def _rows_of_second(disk: Disk) -> list[Row]:
    num = 5 if disk.tiered is None else 3
    return disk.queue("Orders", 0)[num : 2 * num]


def _log_files(disk: Disk) -> list[Path]:
    # Those of the log, or of queue 0 of Orders in tiered storage.
    if disk.tiered is not None:
        return sorted(disk.tiered.glob("*/B/Orders/0/COMMIT_LOG/*"), key=lambda path: path.name[8:])
    return sorted((disk.root / "commitlog").iterdir())


def zero_unit(disk: Disk) -> Harm:
    """Zero a unit in the middle of the second file of a queue."""
    path = _unit_files(disk)[1]
    size = 46 if disk.step == 2 else 20
    _overwrite(path, size, bytes(size))
    return Harm(path, hidden=frozenset(_rows_of_second(disk)[1:2]))


def lose_units(disk: Disk) -> Harm:
    """Delete the second file of a queue."""
    path = _unit_files(disk)[1]
    path.unlink()
    return Harm(path, hidden=frozenset(_rows_of_second(disk)))


def flip_bit(disk: Disk) -> Harm:
    """Change a bit in the body of a message in the second file of the log."""
    path = _log_files(disk)[1]
    data = path.read_bytes()
    row = next(row for row in disk.rows if row.body in data)
    at = data.index(row.body) + 5
    _overwrite(path, at, bytes([data[at] ^ 4]))
    return Harm(path, changed=row)


def lose_log(disk: Disk) -> Harm:
    """Delete the second file of the log."""
    path = _log_files(disk)[1]
    data = path.read_bytes()
    path.unlink()
    return Harm(path, frozenset(row for row in disk.rows if row.body in data))


def cut_index(disk: Disk) -> Harm:
    """Cut the oldest index file in two; of an index in RocksDB delete the tables."""
    if (disk.root / "rocksdbstore").exists():
        for path in (disk.root / "rocksdbstore").glob("*.sst"):
            path.unlink()
        return Harm(disk.root / "rocksdbstore")
    if disk.tiered is not None:
        path = sorted(disk.tiered.glob("*/B/rmq_sys_INDEX/0/INDEX/*"), key=lambda path: path.name[8:])[0]
    else:
        path = sorted((disk.root / "index").iterdir())[0]
    os.truncate(path, path.stat().st_size // 2)
    return Harm(path)


def lose_database(disk: Disk) -> Harm:
    """Delete the tables of the database of queues."""
    for path in (disk.root / "consumequeue").glob("*.sst"):
        path.unlink()
    return Harm(disk.root / "consumequeue")


DAMAGE: dict[str, Callable[[Disk], Harm]] = {
    "a zeroed unit": zero_unit,
    "a lost file of units": lose_units,
    "a flipped bit": flip_bit,
    "a lost segment": lose_log,
    "a cut index file": cut_index,
    "a lost database of queues": lose_database,
}


def can_have(disk: Disk, damage: str) -> bool:
    """Return whether there is such a kind of damage on this disk."""
    if (disk.root / "consumequeue" / "CURRENT").exists():
        return damage not in ("a zeroed unit", "a lost file of units")
    return damage != "a lost database of queues"
