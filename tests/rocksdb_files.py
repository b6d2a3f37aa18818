"""RocksDB databases for tests: the golden ones unpacked, and ones written with chosen keys and values.

Imports nothing of rmqstore.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import struct
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import golden

DATA = Path(__file__).resolve().parent / "data" / "rocketmq-rocksdb"


@functools.cache
def _tar_bytes(name: str) -> bytes:
    return lzma.decompress((DATA / f"{name}.tar.xz").read_bytes())


def unpack(name: str, folder: Path, below: str = "") -> Path:
    """Unpack one of the archives, or what lies at `below` in it, into `folder`; the directory that it is in."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(_tar_bytes(name))) as archive:
        below_it = f"{below}/" if below else ""
        members = [each for each in archive.getmembers() if each.name == below or each.name.startswith(below_it)]
        assert members
        golden.extract(archive, folder, members)
    return folder / (below or members[0].name.split("/")[0])


def lines(name: str, *types: str) -> Iterator[dict[str, Any]]:
    """The lines of one of the files of answers, all or those of these types."""
    for line in lzma.decompress((DATA / f"{name}.jsonl.xz").read_bytes()).splitlines():
        value = json.loads(line)
        if not types or value.get("type") in types:
            yield value


def write(path: Path, families: Mapping[str, Mapping[bytes, bytes]]) -> Path:
    """Write a database with these entries, or add them to the one that is there."""
    from rocksdict import Options, Rdict

    path.mkdir(parents=True, exist_ok=True)
    there = Rdict.list_cf(str(path), Options(raw_mode=True)) if (path / "CURRENT").exists() else []
    names = {*there, "default"}
    database = Rdict(
        str(path), Options(raw_mode=True), column_families={name: Options(raw_mode=True) for name in names}
    )
    for name, entries in families.items():
        if name not in names:
            database.create_column_family(name, Options(raw_mode=True))
        family = database.get_column_family(name)
        for key, value in entries.items():
            family.put(key, value)
        family.flush()
        del family
    database.close()
    # Files that only rocksdict makes are no part of a broker's database.
    (path / "rocksdict-config.json").unlink(missing_ok=True)
    return path


def index_entries(
    topic: str, keys: str, tags: str | None, unique_key: str | None, phy: int, time: int
) -> dict[bytes, bytes]:
    """The entries of the index that a record needs, by the format document (5.7); `keys` are separated by spaces."""
    if not unique_key:
        return {}
    texts = {f"@{topic}@K@{key}@{unique_key}@" for key in keys.split(" ") if key} | {f"@{topic}@U@{unique_key}@"}
    texts |= {f"@{topic}@T@{tags}@{unique_key}@"} if tags else set()
    hour = struct.pack(">q", time - time % 3600000)
    return {hour + text.encode() + struct.pack(">q", phy): struct.pack(">q", time) for text in texts}
