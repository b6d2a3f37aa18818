"""Loading of the test data: stores that real RocketMQ processes wrote, what those read back, and the test vectors.

Owns the names of the data sets and the geometry that each was written with.  It never imports rmqstore and never writes
below `tests/data`; a store is always unpacked somewhere else.  Geometry is a plain dict whose keys are the field names
of StoreConfig, so that neither side has to trust the other's defaults.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"

DEFAULT_DELAY_LEVEL = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

#: Stores of the plain Java `DefaultMessageStore` (5.3.3 and a little later); `.running` was copied while it was open.
JAVA_STORES = (
    "base",
    "base.running",
    "propcrc",
    "propcrc.running",
    "ext",
    "ext.running",
    "compaction",
    "compaction.running",
)
#: Stores of a whole RocketMQ 5.5.0 broker: after an orderly shutdown, and as a killed process leaves it.
BROKER_STORES = ("broker", "broker.killed")
#: Stores of whole brokers of the versions that they are named by, after an orderly shutdown.
VERSION_STORES = ("4.9.7", "5.1.4", "5.3.3", "5.5.1")
#: The store that comes with the package: laid out as "broker", with bodies that can be read. Documents run on it.
SAMPLE = "sample"
STORES = JAVA_STORES + BROKER_STORES + VERSION_STORES
#: The stores for which the data hold what the Java store itself reads from them.
STORES_WITH_LINES = (
    "base",
    "base.running",
    "propcrc",
    "ext",
    "compaction",
    "broker",
    "broker.killed",
    *VERSION_STORES,
)
#: Of those, the ones that Java had to recover first: its index then holds the record of the boundary twice.
RECOVERED_BY_JAVA = ("base.running", "broker.killed")

_VERSIONS = DATA / "rocketmq-versions"
_ARCHIVES = {
    **{name: DATA / "rocketmq" / f"{name}.tar.xz" for name in JAVA_STORES},
    "broker": DATA / "rocketmq-broker" / "store.tar.xz",
    "broker.killed": DATA / "rocketmq-broker" / "store.killed.tar.xz",
    **{name: _VERSIONS / f"{name}.tar.xz" for name in VERSION_STORES},
    SAMPLE: DATA.parents[1] / "rmqstore" / "sample" / "store.tar.xz",
}
_LINES = {
    **{name: DATA / "rocketmq" / f"{name}.jsonl" for name in JAVA_STORES},
    "broker": DATA / "rocketmq-broker" / "store.jsonl.xz",
    "broker.killed": DATA / "rocketmq-broker" / "store.killed.jsonl.xz",
    **{name: _VERSIONS / f"{name}.jsonl.xz" for name in VERSION_STORES},
    # The messages that the versions read after `appended.append` had written to their stores.
    **{f"{name}.appended": _VERSIONS / f"{name}.appended.jsonl.xz" for name in VERSION_STORES},
}


def geometry(name: str) -> dict[str, Any]:
    """Return the geometry that golden store `name` was written with, keyed by StoreConfig's field names.

    Sizes are bytes.  `index_tags` is False for the stores of 5.3.x and before, and True for those of 5.5.0 and 5.5.1.
    """
    if name in VERSION_STORES:
        return {
            "mapped_file_size_commit_log": 16384,
            "mapped_file_size_consume_queue": 200,
            "max_hash_slot_num": 50,
            "max_index_num": 150,
            "mapped_file_size_consume_queue_ext": 256 if name == "5.3.3" else 50331648,
            "message_delay_level": "1s 2s 30m 1h",
            "index_tags": name == "5.5.1",
            "enable_consume_queue_ext": name == "5.3.3",
            "enabled_append_prop_crc": name == "5.3.3",
        }
    if name in (*BROKER_STORES, SAMPLE):
        return {
            "mapped_file_size_commit_log": 1048576,
            "mapped_file_size_consume_queue": 6000,
            "max_hash_slot_num": 1000,
            "max_index_num": 8000,
            "mapped_file_size_consume_queue_ext": 50331648,
            "message_delay_level": "1s 2s 30m 1h",
            "index_tags": True,
            "enable_consume_queue_ext": False,
            "enabled_append_prop_crc": False,
        }
    if name not in JAVA_STORES:
        raise KeyError(f"no golden store {name!r}; there are {', '.join(STORES)}")
    with_ext = name.startswith("ext")
    return {
        "mapped_file_size_commit_log": 4096,
        "mapped_file_size_consume_queue": 200,
        "max_hash_slot_num": 10,
        "max_index_num": 20,
        "mapped_file_size_consume_queue_ext": 1024 if with_ext else 50331648,
        "message_delay_level": DEFAULT_DELAY_LEVEL,
        "index_tags": False,
        "enable_consume_queue_ext": with_ext,
        "enabled_append_prop_crc": name.startswith("propcrc"),
    }


@functools.cache
def _tar_bytes(name: str) -> bytes:
    return lzma.decompress(_ARCHIVES[name].read_bytes())


def extract(archive: tarfile.TarFile, directory: str | os.PathLike[str], members: Any = None) -> None:
    """Unpack all of an archive of ours, or these members, with the interpreter's filter where it has one."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(directory, members, filter="data")
    else:
        archive.extractall(directory, members)  # Python before 3.10.12 and 3.11.4; the archives are our own.


def unpack(name: str, directory: str | os.PathLike[str]) -> Path:
    """Unpack golden store `name` below `directory` and return the store's root directory.

    Files with long runs of zeros come out sparse; modification times are those of the archive.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(_tar_bytes(name)), mode="r:") as archive:
        root = archive.next()
        if root is None or not root.isdir():
            raise ValueError(f"{_ARCHIVES[name]}: the first member must be the store's directory")
        extract(archive, directory)
    return directory / root.name.rstrip("/")


def has_lines(name: str) -> bool:
    """Tell whether the data hold what Java reads from store `name`."""
    return _LINES[name].exists()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    data = path.read_bytes()
    for line in (lzma.decompress(data) if path.suffix == ".xz" else data).splitlines():
        yield json.loads(line)


def lines(name: str, *types: str) -> Iterator[dict[str, Any]]:
    """Yield what Java reads from store `name`, one dict a line; with `types` only lines of these types.

    Types: `store` (bounds), `msg`, `blank`, `queue` (units as `queueOffset:phyOffset:size:tagsCode`; a batch queue
    gives its unit once for every queue offset in it) and `query` (offsets, newest first).
    """
    # Every call gives dicts of its own, which tests take apart.
    for kind, text in _lines_and_types(name):
        if not types or kind in types:
            yield json.loads(text)


@functools.cache
def _lines_and_types(name: str) -> list[tuple[str, str]]:
    """Each line's type and text: most who ask want few of the lines, and the whole file is unpacked and parsed once."""
    return [(line["type"], json.dumps(line)) for line in _json_lines(_LINES[name])]


def sent() -> Iterator[dict[str, Any]]:
    """Yield what the producers of the broker stores got acknowledged: body length and CRC of the body as sent."""
    yield from _json_lines(DATA / "rocketmq-broker" / "sent.jsonl.xz")


def json_bytes(name: str) -> bytes:
    """Return one of the exact JSON config files of `tests/data/rocketmq/json`, for instance `topics.pretty`."""
    return (DATA / "rocketmq" / "json" / name).read_bytes()


@functools.cache
def vectors() -> dict[str, Any]:
    """Return the test vectors T1..T17 (see `tests/data/README.md`); treat the result as read-only."""
    return json.loads((DATA / "vectors.json").read_text(encoding="utf-8"))


def tree(root: str | os.PathLike[str]) -> dict[str, tuple[int, int]]:
    """Return {relative path: (size in bytes, modification time in ns)} of all below `root`; directories: (-1, ns)."""
    found = {}
    root = os.fspath(root)
    for folder, folders, files in os.walk(root):
        for entry in folders:
            path = os.path.join(folder, entry)
            found[os.path.relpath(path, root)] = (-1, os.stat(path).st_mtime_ns)
        for entry in files:
            path = os.path.join(folder, entry)
            # A link to nothing is itself.
            status = os.stat(path, follow_symlinks=os.path.exists(path))
            found[os.path.relpath(path, root)] = (status.st_size, status.st_mtime_ns)
    return found
