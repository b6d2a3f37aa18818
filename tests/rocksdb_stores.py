"""Stores with RocksDB databases that a real broker wrote, what it answers on them, and a second reader of their queues.

Owns the names of these data sets.  It never imports rmqstore; the second reader is `struct` and rocksdict, by the format document.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import os
import struct
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden

DATA = golden.DATA / "rocketmq-rocksdb"
STORES = ("store", "store.killed")
#: Small stores whose queues are in RocksDB.
QUEUE_VARIANTS = ("double", "double-separate-lmq", "compacted", "batch", "killed-wal", "lost")
_LINES = {"store": "messages.jsonl.xz", "store.killed": "messages.killed.jsonl.xz"}


@functools.cache
def _tar(name: str) -> bytes:
    return lzma.decompress((DATA / f"{name}.tar.xz").read_bytes())


def unpack(name: str, folder: Path) -> Path:
    """Unpack one of `STORES`, or of the variants, below `folder`; the store's root."""
    archive_name = name if name in STORES else "variants"
    with tarfile.open(fileobj=io.BytesIO(_tar(archive_name))) as archive:
        if name in STORES:
            golden.extract(archive, folder)
            return folder / "store"
        members = [member for member in archive if member.name.removeprefix("./").split("/")[0] == name]
        golden.extract(archive, folder, members)
    return folder / name


def lines(name: str, *types: str) -> Iterator[dict[str, Any]]:
    """Return the answers of the real `RocksDBMessageStore` on a store, of these types."""
    for text in lzma.open(DATA / _LINES[name]):
        line = json.loads(text)
        if line["type"] in types:
            yield line


def records(root: Path) -> Iterator[dict[str, Any]]:
    """The records of a commit log in order, as far as a queue needs them."""
    for path in sorted((root / "commitlog").iterdir()):
        data, pos = path.read_bytes(), 0
        while pos + 8 <= len(data):
            size, magic = struct.unpack_from(">iI", data, pos)
            if magic != 0xDAA320A7 or size <= 0:
                break
            body_size = struct.unpack_from(">i", data, pos + 84)[0]
            at = pos + 88 + body_size
            topic = data[at + 1 : at + 1 + data[at]].decode()
            at += 1 + data[at]
            properties = data[at + 2 : at + 2 + struct.unpack_from(">h", data, at)[0]].decode()
            queue_id, _, queue_offset, phy_offset, sys_flag = struct.unpack_from(">iiqqi", data, pos + 12)
            yield {
                "topic": topic,
                "queue_id": queue_id,
                "queue_offset": queue_offset,
                "phy_offset": phy_offset,
                "size": size,
                "store_timestamp": struct.unpack_from(">q", data, pos + 56)[0],
                "sys_flag": sys_flag,
                "properties": dict(pair.split("\x01", 1) for pair in properties.split("\x02") if pair),
            }
            pos += size


def queued(root: Path) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """The records that belong to each queue by queue offset, those of further queues (LMQ) included."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for record in records(root):
        if record["sys_flag"] & 0xC in (0x4, 0xC):
            continue
        found.setdefault((record["topic"], record["queue_id"]), {})[record["queue_offset"]] = record
        names = record["properties"].get("INNER_MULTI_DISPATCH", "").split(",")
        numbers = record["properties"].get("INNER_MULTI_QUEUE_OFFSET", "").split(",")
        for topic, number in zip(names, numbers, strict=True) if names != [""] else ():
            found.setdefault((topic, 0), {})[int(number)] = record
    return found


def stored_units(folder: Path) -> tuple[dict[tuple[str, int, int], tuple[int, ...]], dict[tuple[str, int, str], tuple]]:
    """Units by topic, queue id and queue offset, and the entries of family ``offset``, read by rocksdict alone."""
    from rocksdict import AccessType, Options, Rdict

    with tempfile.TemporaryDirectory() as farm:
        for name in os.listdir(folder):
            if (folder / name).is_file():
                os.symlink(folder / name, Path(farm) / name)
        families = Rdict.list_cf(farm, Options(raw_mode=True))
        database = Rdict(
            farm,
            options=Options(raw_mode=True),
            column_families={name: Options(raw_mode=True) for name in families},
            access_type=AccessType.read_only(False),
        )
        units, offsets = {}, {}
        for key, value in _walk(database.get_column_family("default")):
            n = struct.unpack_from(">i", key)[0]
            assert len(key) == 19 + n and key[4] == key[5 + n] == key[10 + n] == 1 and len(value) == 28
            place = key[5 : 5 + n].decode(), struct.unpack_from(">i", key, 6 + n)[0], struct.unpack_from(">q", key, 11 + n)[0]
            units[place] = struct.unpack(">qiqq", value)
        for key, value in _walk(database.get_column_family("offset")):
            n = struct.unpack_from(">i", key)[0]
            assert len(key) == 14 + n
            name = key[5 : 5 + n].decode(), struct.unpack_from(">i", key, 10 + n)[0], key[6 + n : 9 + n].decode()
            offsets[name] = struct.unpack(">q" if len(value) == 8 else ">qq", value)
        database.close()
    return units, offsets


def _walk(family: Any) -> Iterator[tuple[bytes, bytes]]:
    iterator = family.iter()
    iterator.seek_to_first()
    while iterator.valid():
        yield iterator.key(), iterator.value()
        iterator.next()
    iterator.status()


def write_database(folder: Path, families: dict[str, dict[bytes, bytes]]) -> Path:
    """Make a database with these entries, its files alone."""
    from rocksdict import Options, Rdict

    folder.mkdir(parents=True, exist_ok=True)
    options = Options(raw_mode=True)
    options.create_missing_column_families(True)
    options.create_if_missing(True)
    names = {name: Options(raw_mode=True) for name in families}
    database = Rdict(str(folder), options=options, column_families=names)
    for name, entries in families.items():
        family = database.get_column_family(name)
        for key, value in entries.items():
            family.put(key, value)
        family.flush()
    database.close()
    (folder / "rocksdict-config.json").unlink(missing_ok=True)
    return folder


def copy_database(source: Path, target: Path, change) -> Path:
    """Write a database of queues again with what `change(units, offsets)`, dicts of bytes, makes of it."""
    families = {name: dict(entries) for name, entries in raw_entries(source).items()}
    change(families["default"], families["offset"])
    return write_database(target, families)


def raw_entries(folder: Path) -> dict[str, dict[bytes, bytes]]:
    """Keys and values of every family."""
    from rocksdict import AccessType, Options, Rdict

    with tempfile.TemporaryDirectory() as farm:
        for name in os.listdir(folder):
            if (folder / name).is_file():
                os.symlink(folder / name, Path(farm) / name)
        families = Rdict.list_cf(farm, Options(raw_mode=True))
        database = Rdict(
            farm,
            options=Options(raw_mode=True),
            column_families={name: Options(raw_mode=True) for name in families},
            access_type=AccessType.read_only(False),
        )
        found = {name: dict(_walk(database.get_column_family(name))) for name in families}
        database.close()
    return found


def unit_key(topic: str, queue_id: int, queue_offset: int) -> bytes:
    """The key of a unit."""
    name = topic.encode()
    prefix = struct.pack(">i", len(name)) + b"\1" + name + b"\1"
    return prefix + struct.pack(">i", queue_id) + b"\1" + struct.pack(">q", queue_offset)


def max_key(topic: str, queue_id: int) -> bytes:
    """The key of a queue's last unit in family ``offset``."""
    name = topic.encode()
    return struct.pack(">i", len(name)) + b"\1" + name + b"\1max\1" + struct.pack(">i", queue_id)
