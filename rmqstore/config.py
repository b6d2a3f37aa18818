"""StoreConfig: the options of a store, where they come from, and what a store's own files say about them.

Owns RocketMQ's option names (in snake_case) with its defaults, the reading of a broker.conf, and `StoreConfig.infer`,
which finds the geometry of a store from its files alone.  It never writes, locks or maps anything and never takes a
size for granted that the files contradict.  Invariants:

- A config is immutable; `replace` makes a changed copy.
- `assumed` names the fields that `infer` filled in without evidence; whoever writes bytes that depend on them asks.
- Numbers from files are hostile: every read is bounded and every walk ends.

Names and defaults are those of Apache RocketMQ 5.5.0 (MessageStoreConfig, BrokerConfig).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmqstore import _numpy as np
from rmqstore._core import (
    MAGIC_V1,
    MAGIC_V2,
    BatchUnitLayout,
    IndexLayout,
    UnitLayout,
    index_key_hash,
)
from rmqstore.errors import GeometryError, StoreError
from rmqstore.message import decode_java_utf8, host_from_bytes, host_to_bytes, parse_properties

__all__ = ["StoreConfig", "parse_java_properties", "system_clock"]

CONSUME_QUEUE_UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
BATCH_CONSUME_QUEUE_UNIT_SIZE = int(BatchUnitLayout.BATCH_UNIT_SIZE)
INDEX_HEADER_SIZE = int(IndexLayout.INDEX_HEADER_SIZE)
INDEX_SLOT_SIZE = int(IndexLayout.SLOT_SIZE)
INDEX_ENTRY_SIZE = int(IndexLayout.ENTRY_SIZE)

# Java holds sizes and positions inside one file in 32-bit ints.
_MAX_FILE_SIZE = 2**31 - 1
_DELAY_UNITS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def system_clock() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


@functools.lru_cache(maxsize=64)
def _parse_delay_levels(text: str) -> tuple[int, ...]:
    levels = []
    for piece in text.split():
        unit = _DELAY_UNITS.get(piece[-1])
        if unit is None or not re.fullmatch("[0-9]{1,12}", piece[:-1]):
            raise ValueError(
                f"message_delay_level: {piece!r} is not a delay: write numbers with a unit s, m, h or d, as '1s 5m 2h'"
            )
        levels.append(int(piece[:-1]) * unit)
    return tuple(levels)


# Marks a field that is ours: RocketMQ has no option for it, so that no broker.conf sets it.
_OWN = {"own": True}

_DEFAULT_STORE_HOST = "127.0.0.1:10911"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Options of a store; all of them are given by name.

    Sizes are in bytes, intervals in milliseconds, unless the name or the comment says otherwise.

    Raises
    ------
    ValueError
        A value of the wrong kind or outside its range.
    GeometryError
        Sizes that RocketMQ cannot work with.
    """

    # Geometry of the files.
    mapped_file_size_commit_log: int = 1_073_741_824
    mapped_file_size_consume_queue: int = 6_000_000
    mapper_file_size_batch_consume_queue: int = 13_800_000
    enable_consume_queue_ext: bool = False
    mapped_file_size_consume_queue_ext: int = 50_331_648
    bit_map_length_consume_queue_ext: int = 64  # bits
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000

    # What is written.
    message_index_enable: bool = True
    message_index_safe: bool = False
    max_message_size: int = 4_194_304
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    enabled_append_prop_crc: bool = False
    force_verify_prop_crc: bool = False
    auto_message_version_on_topic_len: bool = True
    enable_lmq: bool = False
    enable_multi_dispatch: bool = False

    # Flushing.
    flush_disk_type: str = "ASYNC_FLUSH"
    flush_interval_commit_log: int = 500
    flush_commit_log_least_pages: int = 4
    flush_commit_log_thorough_interval: int = 10_000
    flush_interval_consume_queue: int = 1000
    flush_consume_queue_least_pages: int = 2
    flush_consume_queue_thorough_interval: int = 60_000
    sync_flush_timeout: int = 5000
    flush_consumer_offset_interval: int = 5000
    consumer_offset_update_version_step: int = 500

    # Recovery.
    check_crc_on_recover: bool = True
    commit_log_recover_max_num: int = 10
    check_commit_log_offset_on_recover: bool = False
    recheck_reput_offset_from_cq: bool = False

    # Reading.
    max_msgs_num_batch: int = 64
    default_query_max_num: int = 32
    max_transfer_bytes_on_message_in_memory: int = 262_144
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_disk: int = 65_536
    max_transfer_count_on_message_in_disk: int = 8
    access_message_in_memory_max_ratio: int = 40  # percent of RAM
    travel_cq_file_num_when_get_message: int = 1

    # Retention.
    delete_when: str = "04"  # local hours joined by ';'
    file_reserved_time: int = 72  # hours
    disk_max_used_space_ratio: int = 75  # percent
    disk_space_clean_forcibly_ratio: int = 85  # percent
    disk_space_warning_level_ratio: int = 90  # percent
    clean_file_forcibly_enable: bool = True
    clean_resource_interval: int = 10_000
    delete_file_batch_max: int = 10
    delete_commit_log_files_interval: int = 100
    delete_consume_queue_files_interval: int = 100

    # Ours.
    index_tags: bool = field(default=True, metadata=_OWN)
    """Tags go into the index: RocketMQ does so since 5.4.0 and has no option for it."""
    store_host: str = field(default=_DEFAULT_STORE_HOST, metadata=_OWN)
    clock: Callable[[], int] = field(default=system_clock, repr=False, compare=False, metadata=_OWN)
    generate_unique_key: bool = field(default=False, metadata=_OWN)
    max_mapped_files: int = field(default=1024, metadata=_OWN)
    """Bound on the number of files that are mapped at the same time."""
    populate_ahead_size: int = field(default=33_554_432, metadata=_OWN)
    """Up to so many bytes ahead of each end that grows fast are made ready by a thread of the store; 0 = none, no thread."""
    assumed: tuple[str, ...] = field(default=(), metadata=_OWN)
    """Fields that `infer` could not tell from the store and filled with defaults."""
    unknown: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False, metadata=_OWN)
    """Names and values of a broker.conf that are no option of a store, as they were written there."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_kind(item.name, item.type, getattr(self, item.name))
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}: give a number from {low} to {high}")
        if self.flush_disk_type not in ("ASYNC_FLUSH", "SYNC_FLUSH"):
            raise ValueError(f"flush_disk_type is {self.flush_disk_type!r}: give 'ASYNC_FLUSH' or 'SYNC_FLUSH'")
        for hour in self.delete_when.split(";"):
            if hour.strip() and not (re.fullmatch("[0-9]{1,2}", hour.strip()) and int(hour) < 24):
                raise ValueError(f"delete_when is {self.delete_when!r}: give hours of 00 to 23, joined by ';'")
        if not callable(self.clock):
            raise ValueError("clock must be callable and return milliseconds since the epoch")
        _parse_delay_levels(self.message_delay_level)
        host_to_bytes(self.store_host)
        for name in ("consume_queue_file_size", "batch_consume_queue_file_size", "index_file_size"):
            size = getattr(self, name)
            if size > _MAX_FILE_SIZE:
                what = "max_hash_slot_num and max_index_num" if name == "index_file_size" else "the configured size"
                raise GeometryError(
                    f"{what} make a file of {size} bytes: RocketMQ computes it in 32 bits and breaks above "
                    f"{_MAX_FILE_SIZE}; give smaller numbers"
                )

    @property
    def consume_queue_file_size(self) -> int:
        """Size of a consume-queue file: `mapped_file_size_consume_queue` rounded up to whole units of 20 bytes."""
        return -(-self.mapped_file_size_consume_queue // CONSUME_QUEUE_UNIT_SIZE) * CONSUME_QUEUE_UNIT_SIZE

    @property
    def batch_consume_queue_file_size(self) -> int:
        """Size of a batch consume-queue file: rounded up to whole units of 46 bytes."""
        unit = BATCH_CONSUME_QUEUE_UNIT_SIZE
        return -(-self.mapper_file_size_batch_consume_queue // unit) * unit

    @property
    def index_file_size(self) -> int:
        """Size of an index file: 40 + 4 * `max_hash_slot_num` + 20 * `max_index_num`."""
        return INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * self.max_hash_slot_num + INDEX_ENTRY_SIZE * self.max_index_num

    @property
    def delay_levels(self) -> tuple[int, ...]:
        """Delays in milliseconds; level n is item n - 1."""
        return _parse_delay_levels(self.message_delay_level)

    def as_dict(self) -> dict[str, Any]:
        """dict: the options by name, without `clock`, `assumed` and `unknown`."""
        left_out = ("clock", "assumed", "unknown")
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name not in left_out}

    def replace(self, **changes: Any) -> StoreConfig:
        """A copy with some fields changed; what is given is no longer `assumed`."""
        if "assumed" not in changes:
            changes["assumed"] = tuple(name for name in self.assumed if name not in changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_properties(cls, source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> StoreConfig:
        """Read a broker.conf, or a mapping with RocketMQ's option names.

        The names of 4.x (mapedFileSizeCommitLog, mapedFileSizeConsumeQueue) are taken too.  brokerIP1 and listenPort
        become `store_host`.  Names that are no option of a store stay in `unknown`.

        Raises
        ------
        ValueError
            A value of the wrong kind or range; names file and line.
        OSError
            The file cannot be read.
        """
        if isinstance(source, Mapping):
            items = [(str(name), str(value), f"option {name}") for name, value in source.items()]
        else:
            path = os.fspath(source)
            # Java's Properties.load reads bytes as ISO-8859-1; other characters come as escapes.
            with open(path, encoding="iso-8859-1", newline="") as file:
                text = file.read()
            items = [
                (name, value, f"{path}, line {line}: option {name}")
                for name, value, line in parse_java_properties(text, path)
            ]
        values: dict[str, Any] = {}
        unknown: dict[str, str] = {}
        address, port = _DEFAULT_STORE_HOST.rsplit(":", 1)
        places: dict[str, str] = {}
        for name, text, place in items:
            target = _FIELDS_BY_OPTION.get(name)
            if target is not None:
                values[target.name] = _parse_option(target, text, place)
                places[target.name] = place
            elif name == "brokerIP1":
                address = f"[{text.strip()}]" if ":" in text and not text.strip().startswith("[") else text.strip()
                places["store_host"] = place
            elif name == "listenPort":
                port = text.strip()
                places["store_host"] = place
            else:
                unknown[name] = text
        if "store_host" in places:
            values["store_host"] = f"{address}:{port}"
        for name, value in values.items():
            # One by one first, so that the error can say where the value stands.
            if name not in overrides and name not in ("max_hash_slot_num", "max_index_num"):
                try:
                    cls(**{name: value})
                except (ValueError, StoreError) as error:
                    raise ValueError(f"{places[name]}: {error}") from None
        return cls(**{"unknown": unknown, **values, **overrides})

    @classmethod
    def infer(cls, path: str | os.PathLike[str], **overrides: Any) -> StoreConfig:
        """Find the geometry of the store in `path` from its files; nothing is written, locked or mapped.

        Sizes come from the files' lengths, slot and entry counts of the index from header, slots and entries,
        `enabled_append_prop_crc` and `store_host` from the first record, `index_tags` from looking up the tags of the
        first records.  Fields that the store cannot tell keep their defaults and are listed in `assumed`.

        Parameters
        ----------
        path : path-like
            The store's directory (storePathRootDir), or an index file, of which only the index geometry is found.
        **overrides
            Fields that are known; they are taken as given.

        Raises
        ------
        StoreError
            There is no such directory.
        GeometryError
            Files of one kind that differ in size, an empty store, or an index that more than one geometry fits; names
            the file and the option to give.
        """
        root = os.fspath(path)
        if os.path.isfile(root):
            # One index file on its own.
            single: dict[str, Any] = dict(overrides)
            unclear: list[str] = []
            _infer_index_geometry(
                os.path.dirname(root) or ".", [_File(root, 0, os.stat(root).st_size)], single, unclear
            )
            return cls(**{"assumed": tuple(unclear), **single})
        if not os.path.isdir(root):
            raise StoreError("there is no store directory: give the broker's storePathRootDir", root)
        unknown_names = set(overrides) - set(cls.__dataclass_fields__)
        if unknown_names:
            raise TypeError(f"no such option: {', '.join(sorted(unknown_names))}")
        found: dict[str, Any] = dict(overrides)
        assumed: list[str] = []
        segments = _numbered_files(os.path.join(root, "commitlog"))
        _infer_sizes(root, segments, found, assumed)
        index_files = _numbered_files(os.path.join(root, "index"), digits=None)
        _infer_index_geometry(root, index_files, found, assumed)
        for name in ("message_delay_level", "index_tags"):
            if name not in found:
                assumed.append(name)
        config = cls(**found)
        first = next(_first_records(segments, config.mapped_file_size_commit_log), None) if segments else None
        if first is not None:
            if "enabled_append_prop_crc" not in found:
                found["enabled_append_prop_crc"] = bool(_PROPERTIES_CRC.search(first.properties))
            if "store_host" not in found:
                try:
                    found["store_host"] = host_from_bytes(first.store_host)
                    host_to_bytes(found["store_host"])
                except (StoreError, ValueError):
                    del found["store_host"]
        if "index_tags" not in found:
            index_tags = _infer_index_tags(index_files, segments, config)
            if index_tags is not None:
                found["index_tags"] = index_tags
                assumed.remove("index_tags")
        return cls(**{"assumed": tuple(assumed), **found})


_FIELD_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "str": (str,)}


def _check_kind(name: str, annotation: Any, value: object) -> None:
    kinds = _FIELD_KINDS.get(annotation)
    if kinds is None:
        return
    # A bool is an int for Python, but max_index_num=True is a mistake.
    if not isinstance(value, kinds) or (annotation == "int" and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r}: give {'an' if annotation == 'int' else 'a'} {annotation}")


_BOUNDS: tuple[tuple[str, int, int], ...] = (
    # A segment holds at least the smallest record (92 bytes) and the 8 bytes of a blank.
    ("mapped_file_size_commit_log", 100, _MAX_FILE_SIZE),
    ("mapped_file_size_consume_queue", 1, _MAX_FILE_SIZE),
    ("mapper_file_size_batch_consume_queue", 1, _MAX_FILE_SIZE),
    # One unit without a bitmap (20 bytes) and the 4 bytes that must stay after it.
    ("mapped_file_size_consume_queue_ext", 24, _MAX_FILE_SIZE),
    ("bit_map_length_consume_queue_ext", 0, 32767 * 8),
    ("max_hash_slot_num", 1, 2**31 - 1),
    # Entry 0 is never used, so that fewer than two entries hold nothing.
    ("max_index_num", 2, 2**31 - 1),
    ("max_message_size", 1, _MAX_FILE_SIZE),
    *(
        (name, 0, 2**31 - 1)
        for name in (
            "flush_interval_commit_log",
            "flush_commit_log_least_pages",
            "flush_commit_log_thorough_interval",
            "flush_interval_consume_queue",
            "flush_consume_queue_least_pages",
            "flush_consume_queue_thorough_interval",
            "sync_flush_timeout",
            "flush_consumer_offset_interval",
            "file_reserved_time",
            "clean_resource_interval",
            "delete_commit_log_files_interval",
            "delete_consume_queue_files_interval",
            "populate_ahead_size",
        )
    ),
    *(
        (name, 1, 2**31 - 1)
        for name in (
            "consumer_offset_update_version_step",
            "commit_log_recover_max_num",
            "max_msgs_num_batch",
            "default_query_max_num",
            "max_transfer_bytes_on_message_in_memory",
            "max_transfer_count_on_message_in_memory",
            "max_transfer_bytes_on_message_in_disk",
            "max_transfer_count_on_message_in_disk",
            "travel_cq_file_num_when_get_message",
            "delete_file_batch_max",
            "max_mapped_files",
        )
    ),
    *(
        (name, 0, 100)
        for name in (
            "access_message_in_memory_max_ratio",
            "disk_max_used_space_ratio",
            "disk_space_clean_forcibly_ratio",
            "disk_space_warning_level_ratio",
        )
    ),
)


# -------------------------------------------------------------------------------------------------- broker.conf

_ODD_OPTION_NAMES = {
    "check_crc_on_recover": "checkCRCOnRecover",
    "enabled_append_prop_crc": "enabledAppendPropCRC",
    "force_verify_prop_crc": "forceVerifyPropCRC",
}


def _option_name(field_name: str) -> str:
    first, *rest = field_name.split("_")
    return _ODD_OPTION_NAMES.get(field_name) or first + "".join(word.capitalize() for word in rest)


_FIELDS_BY_OPTION: dict[str, dataclasses.Field[Any]] = {
    _option_name(item.name): item for item in dataclasses.fields(StoreConfig) if not item.metadata.get("own")
}
# RocketMQ 4.x spelled these two with one p.
for _name in ("CommitLog", "ConsumeQueue"):
    _FIELDS_BY_OPTION["mapedFileSize" + _name] = _FIELDS_BY_OPTION["mappedFileSize" + _name]


def _parse_option(target: dataclasses.Field[Any], text: str, place: str) -> Any:
    text = text.strip()
    if target.type == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{place} is {text!r}: write true or false")
        return text.lower() == "true"
    if target.type == "int":
        if not re.fullmatch("[+-]?[0-9]{1,19}", text):
            raise ValueError(f"{place} is {text!r}: write a whole number")
        return int(text)
    return text


_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_java_properties(text: str, path: str | None = None) -> Iterator[tuple[str, str, int]]:
    """Parse the text of a Java .properties file into (name, value, line number), as java.util.Properties reads it.

    Comments begin with # or !; a name ends at =, : or white space; a backslash at the end of a line joins the next one;
    escapes are those of Java.  A name may come several times; the last one counts for Java.

    Raises
    ------
    ValueError
        A damaged unicode escape; names file and line.
    """
    where = f"{path}, line " if path else "line "
    lines = enumerate(re.split(r"\r\n|\r|\n", text), 1)
    for number, line in lines:
        line = line.lstrip(" \t\f")
        if not line or line[0] in "#!":
            continue
        # An odd number of backslashes at the end joins the next line, without its leading white space.
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1]
            try:
                line += next(lines)[1].lstrip(" \t\f")
            except StopIteration:
                break
        pos = 0
        while pos < len(line) and line[pos] not in "=: \t\f":
            pos += 2 if line[pos] == "\\" else 1
        rest = line[pos:].lstrip(" \t\f")
        if rest[:1] in ("=", ":"):
            rest = rest[1:].lstrip(" \t\f")
        yield _unescape(line[:pos], f"{where}{number}"), _unescape(rest, f"{where}{number}"), number


def _unescape(text: str, place: str) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[:1] == "u":
            if len(code) != 5:
                raise ValueError(f"{place}: \\u needs four hex digits")
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, code)

    text = re.sub(r"\\(u[0-9a-fA-F]{0,4}|.|\Z)", replace, text, flags=re.DOTALL)
    # Characters beyond U+FFFF come as two escapes.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ------------------------------------------------------------------------------------------------ sizes of files

_MAX_QUEUE_FILES_LOOKED_AT = 512


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    number: int
    size: int


def _numbered_files(directory: str, digits: int | None = 20) -> list[_File]:
    """The regular files whose names are decimal numbers, in their order; a missing directory has none."""
    files = []
    try:
        entries = list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    is_number = re.compile("[0-9]{20}" if digits == 20 else "[0-9]{1,19}").fullmatch
    for entry in entries:
        if not is_number(entry.name):
            continue
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            files.append(_File(entry.path, int(entry.name), status.st_size))
    return sorted(files, key=lambda file: file.number)


def _queue_files(directory: str) -> Iterator[_File]:
    """Files of <directory>/<topic>/<queueId>/, in the order in which the file system gives them."""
    try:
        topics = [entry.path for entry in os.scandir(directory) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return
    for topic in topics:
        for queue in sorted(entry.path for entry in os.scandir(topic) if entry.is_dir()):
            yield from _numbered_files(queue)


def _common_size(files: list[_File], kind: str, option: str) -> int:
    """The size that all `files` have, else a GeometryError that names the odd one.

    A last file of 0 bytes, as a crash leaves it, says nothing.
    """
    newest: dict[str, int] = {}
    for file in files:
        folder = os.path.dirname(file.path)
        newest[folder] = max(newest.get(folder, 0), file.number)
    files = [file for file in files if file.size or file.number != newest[os.path.dirname(file.path)]] or files
    sizes = Counter(file.size for file in files)
    size, count = sizes.most_common(1)[0]
    if len(sizes) > 1:
        odd = next(file for file in files if file.size != size)
        raise GeometryError(
            f"{kind} of {odd.size} bytes, {count} other{'s have' if count > 1 else ' has'} {size}: "
            f"all must have one size; repair or move the odd file, or give {option}=...",
            odd.path,
        )
    if not size:
        raise GeometryError(f"{kind} of 0 bytes: the size cannot be told; give {option}=...", files[0].path)
    return size


def _infer_sizes(root: str, segments: list[_File], found: dict[str, Any], assumed: list[str]) -> None:
    if "mapped_file_size_commit_log" not in found:
        if not segments:
            raise GeometryError(
                "the store has no commit log segment, so that its geometry cannot be told: give the options "
                "(mapped_file_size_commit_log=... at least) or the broker.conf",
                os.path.join(root, "commitlog"),
            )
        found["mapped_file_size_commit_log"] = _common_size(
            segments, "a commit log segment", "mapped_file_size_commit_log"
        )
    for directory, option, unit in (
        ("consumequeue", "mapped_file_size_consume_queue", CONSUME_QUEUE_UNIT_SIZE),
        ("batchconsumequeue", "mapper_file_size_batch_consume_queue", BATCH_CONSUME_QUEUE_UNIT_SIZE),
        ("consumequeue_ext", "mapped_file_size_consume_queue_ext", 1),
    ):
        if directory == "consumequeue_ext" and option in found and "enable_consume_queue_ext" in found:
            continue
        if directory != "consumequeue_ext" and option in found:
            continue
        files = list(itertools.islice(_queue_files(os.path.join(root, directory)), _MAX_QUEUE_FILES_LOOKED_AT))
        if directory == "consumequeue_ext":
            found.setdefault("enable_consume_queue_ext", bool(files))
            if option in found:
                continue
        if not files:
            assumed.append(option)
            continue
        size = _common_size(files, f"a file of {directory}", option)
        if size % unit:
            raise GeometryError(
                f"a file of {directory} of {size} bytes is not made of whole units of {unit} bytes: "
                f"give {option}=... if it is to be read nevertheless",
                files[0].path,
            )
        found[option] = size
    # Queues of light message queues exist only where a broker dispatches to them.
    try:
        with os.scandir(os.path.join(root, "consumequeue")) as entries:
            dispatches = any(entry.name.startswith("%LMQ%") for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        dispatches = False
    if dispatches:
        found.setdefault("enable_lmq", True)
        found.setdefault("enable_multi_dispatch", True)


# ---------------------------------------------------------------------------------------------- index geometry

_INDEX_HEADER = struct.Struct(">qqqqii")
_ENTRY = [("hash", ">i4"), ("phy_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
_ENTRIES_CHECKED = 100_000
_CHUNK = 4 * 1024 * 1024
_DEFAULT_SLOTS = 5_000_000
_DEFAULT_ENTRIES = 20_000_000


def _read(descriptor: int, size: int, pos: int) -> bytes:
    """`size` bytes at `pos`; fewer when the file ends there."""
    parts = []
    while size > 0:
        data = os.pread(descriptor, min(size, 64 * 1024 * 1024), pos)
        if not data:
            break
        parts.append(data)
        pos += len(data)
        size -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _last_nonzero(descriptor: int, size: int) -> int:
    """Position of the last byte that is not zero, -1 if there is none; holes of sparse files are skipped."""
    extents: list[tuple[int, int]] = []
    pos = 0
    while pos < size:
        try:
            start = os.lseek(descriptor, pos, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        except (OSError, AttributeError):
            # ENXIO: only a hole is left.  Anything else: the file system cannot tell, so that all of it is data.
            if not extents and pos == 0:
                extents = [(0, size)]
            break
        extents.append((start, end))
        pos = end
    for start, end in reversed(extents):
        while end > start:
            begin = max(start, end - _CHUNK)
            data = _read(descriptor, end - begin, begin)
            stripped = data.rstrip(b"\0") if data and np.frombuffer(data, np.uint8).max() else b""
            if stripped:
                return begin + len(stripped) - 1
            end = begin
    return -1


def _infer_index_geometry(root: str, files: list[_File], found: dict[str, Any], assumed: list[str]) -> None:
    slots, entries = found.get("max_hash_slot_num"), found.get("max_index_num")
    if slots is not None and entries is not None:
        return
    if not files:
        for name in ("max_hash_slot_num", "max_index_num"):
            if name not in found:
                assumed.append(name)
        return
    size = _common_size(files, "an index file", "max_hash_slot_num=..., max_index_num")
    words, odd = divmod(size - INDEX_HEADER_SIZE, 4)
    if odd or words < 1 + 5 * 2:
        raise GeometryError(
            f"an index file of {size} bytes: no number of slots and entries gives that size; "
            "give max_hash_slot_num=... and max_index_num=... or move the file away",
            files[0].path,
        )
    if slots is not None or entries is not None:
        # One of the two is known, so that the length tells the other.
        other, rest = divmod(words - slots, 5) if slots is not None else (words - 5 * (entries or 0), 0)
        if rest or other < 1:
            known = f"max_hash_slot_num={slots}" if slots is not None else f"max_index_num={entries}"
            raise GeometryError(f"an index file of {size} bytes does not fit {known}", files[0].path)
        chosen = slots if slots is not None else other
        for file in list(reversed(files))[:8]:
            fitting = _fitting_slot_counts(file.path, words)
            if fitting and chosen not in fitting:
                raise GeometryError(
                    f"the index file's contents say {fitting[0]} slots, not {chosen}; leave max_hash_slot_num and "
                    "max_index_num out, or give what the file was written with",
                    file.path,
                )
        found["max_hash_slot_num"], found["max_index_num"] = (slots, other) if slots is not None else (other, entries)
        return
    votes: Counter[int] = Counter()
    witness: dict[int, str] = {}
    ambiguous: tuple[str, list[int]] | None = None
    # The newest files are looked at first: they are the ones that are surely of the current geometry.
    for file in list(reversed(files))[:8]:
        fitting = _fitting_slot_counts(file.path, words)
        if len(fitting) == 1:
            votes[fitting[0]] += 1
            witness.setdefault(fitting[0], file.path)
        elif fitting:
            ambiguous = ambiguous or (file.path, fitting)
    if len(votes) > 1:
        (first, _), (second, _) = votes.most_common(2)
        raise GeometryError(
            f"the index files disagree: this one has {second} slots, {witness[first]} has {first}; "
            "give max_hash_slot_num=...",
            witness[second],
        )
    if votes:
        (slots,) = votes
    elif words == _DEFAULT_SLOTS + 5 * _DEFAULT_ENTRIES:
        # Nothing in the files speaks for or against it, but the length is that of RocketMQ's defaults.
        slots = _DEFAULT_SLOTS
        assumed += ["max_hash_slot_num", "max_index_num"]
    elif ambiguous:
        path, fitting = ambiguous
        raise GeometryError(
            f"an index file of {size} bytes fits {len(fitting)} numbers of slots "
            f"({', '.join(map(str, fitting[:4]))}{', ...' if len(fitting) > 4 else ''}): give max_hash_slot_num=...",
            path,
        )
    else:
        raise GeometryError(
            f"an index file of {size} bytes fits many numbers of slots and its contents do not tell which (empty or "
            "damaged): give max_hash_slot_num=...",
            files[-1].path,
        )
    found["max_hash_slot_num"], found["max_index_num"] = slots, (words - slots) // 5


def _fitting_slot_counts(path: str, words: int) -> list[int]:
    """Numbers of slots that the contents of an index file agree with; none when it is empty or damaged.

    The length gives slots + 5 * entries = `words`, so that the entry table can only begin at one place in 20 bytes; the
    last byte that is not zero lies in the newest entry, whose number the header has.  Both together leave one place
    (two, if the put of one more entry was cut off); the slots and the chains then have to confirm it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        size = INDEX_HEADER_SIZE + 4 * words
        header = _read(descriptor, INDEX_HEADER_SIZE, 0)
        if len(header) < INDEX_HEADER_SIZE:
            return []
        *_, end_phy_offset, hash_slot_count, index_count = _INDEX_HEADER.unpack(header)
        if index_count <= 1 or index_count > words // 5:
            return []
        last = _last_nonzero(descriptor, size)
        if last < INDEX_HEADER_SIZE:
            return []
        candidates = set()
        # The newest entry, number indexCount - 1, holds `last`, or the next one whose put was cut off.  When all of
        # them are of the record at offset 0 the newest may be all zeros, so that earlier ones are tried too.
        deepest = min(index_count, 64) if end_phy_offset == 0 else 1
        for newest in range(index_count - deepest, index_count + 1):
            # 40 + 4 * slots + 20 * newest <= last < 40 + 4 * slots + 20 * (newest + 1)
            highest = (last - INDEX_HEADER_SIZE) // 4 - 5 * newest
            slots = highest - (highest - words) % 5
            if slots >= 1 and (words - slots) // 5 >= max(index_count, 2):
                candidates.add(slots)
        return sorted(
            slots
            for slots in candidates
            if _split_fits(descriptor, slots, words, hash_slot_count, index_count, end_phy_offset)
        )
    finally:
        os.close(descriptor)


def _split_fits(
    descriptor: int, slots: int, words: int, hash_slot_count: int, index_count: int, end_phy_offset: int
) -> bool:
    table_pos = INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * slots
    head_num = min(index_count, _ENTRIES_CHECKED)
    tail_first = max(1, index_count - _ENTRIES_CHECKED)
    head_data = _read(descriptor, head_num * INDEX_ENTRY_SIZE, table_pos)
    tail_data = _read(
        descriptor, (index_count - tail_first) * INDEX_ENTRY_SIZE, table_pos + tail_first * INDEX_ENTRY_SIZE
    )
    if len(head_data) < head_num * INDEX_ENTRY_SIZE or len(tail_data) < (index_count - tail_first) * INDEX_ENTRY_SIZE:
        return False
    head = np.frombuffer(head_data, _ENTRY)
    tail = np.frombuffer(tail_data, _ENTRY)
    if any(head_data[:INDEX_ENTRY_SIZE]) or int(tail["phy_offset"][-1]) != end_phy_offset:
        return False
    for part, first in ((head[1:], 1), (tail, tail_first)):
        previous = part["previous"].astype(np.int64)
        if (
            (part["hash"] < 0).any()
            or (part["phy_offset"] < 0).any()
            or (part["seconds"] < 0).any()
            or (previous < 0).any()
            or (previous >= np.arange(first, first + len(part))).any()
        ):
            return False
    # From entry 1 on the chains can be replayed: the previous entry is the last one before it with the same slot.
    numbers = np.arange(1, head_num, dtype=np.int64)
    places = head["hash"][1:].astype(np.int64) % slots
    order = np.argsort(places, kind="stable")
    same_slot = places[order][1:] == places[order][:-1]
    expected = np.zeros(head_num - 1, dtype=np.int64)
    expected[order[1:][same_slot]] = numbers[order[:-1][same_slot]]
    if not np.array_equal(expected, head["previous"][1:]):
        return False
    slot_table = np.frombuffer(_read(descriptor, slots * INDEX_SLOT_SIZE, INDEX_HEADER_SIZE), ">i4")
    # A put that was cut off may have left the number `index_count` in its slot.
    if len(slot_table) < slots or (slot_table < 0).any() or (slot_table > index_count).any():
        return False
    used = int(np.count_nonzero(slot_table))
    # RocketMQ before 4.7.1 counted every put, later ones count the slots; a cut-off put is not counted yet.
    if hash_slot_count not in (used, used - 1, index_count - 1):
        return False
    # Every slot holds the newest entry of its chain.
    for part, first in ((head[1:], 1), (tail, tail_first)):
        newest = slot_table[part["hash"].astype(np.int64) % slots]
        if (newest < np.arange(first, first + len(part))).any():
            return False
    in_tail = (slot_table >= tail_first) & (slot_table < index_count)
    held = slot_table[in_tail].astype(np.int64) - tail_first
    return np.array_equal(tail["hash"][held].astype(np.int64) % slots, np.flatnonzero(in_tail))


# ------------------------------------------------------------------------------------------- first records of a log

_PROPERTIES_CRC = re.compile(rb"(?:\A|\x02)__CRC32#\x01[0-9]{10}\x02\Z")
_RECORDS_LOOKED_AT = 1000
_DECISIVE_RECORDS = 16


@dataclass(frozen=True, slots=True)
class _Record:
    phy_offset: int
    sys_flag: int
    store_host: bytes
    topic: str
    properties: bytes


def _records_of_segment(segment: _File, segment_size: int) -> Iterator[_Record]:
    """The records of a segment from its start up to the first bytes that are no record; only a few fields are read."""
    descriptor = os.open(segment.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        limit = min(segment.size, segment_size)
        pos = 0
        while pos + 91 <= limit:
            head = _read(descriptor, 112, pos)
            if len(head) < 91:
                return
            total_size, magic = struct.unpack_from(">ii", head)
            if magic not in (MAGIC_V1, MAGIC_V2) or not 91 <= total_size <= limit - pos:
                return
            (sys_flag,) = struct.unpack_from(">i", head, 36)
            store_host_pos = 56 + (20 if sys_flag & 0x10 else 8)
            host_size = 20 if sys_flag & 0x20 else 8
            # Body length, which the reconsume times and the prepared transaction offset precede.
            body_length_pos = store_host_pos + host_size + 12
            if body_length_pos + 4 > len(head):
                return
            (body_size,) = struct.unpack_from(">i", head, body_length_pos)
            rest = total_size - body_length_pos - 4
            if not 0 <= body_size <= rest:
                return
            tail_size = min(rest - body_size, 2 + 32767 + 2 + 32767)
            tail = _read(descriptor, tail_size, pos + body_length_pos + 4 + body_size)
            topic_format, topic_length_size = (">b", 1) if magic == MAGIC_V1 else (">h", 2)
            if len(tail) < topic_length_size + 2:
                return
            (topic_size,) = struct.unpack_from(topic_format, tail)
            properties_pos = topic_length_size + topic_size + 2
            if topic_size < 0 or properties_pos > len(tail):
                return
            (properties_size,) = struct.unpack_from(">h", tail, properties_pos - 2)
            if properties_size < 0 or properties_pos + properties_size > len(tail):
                return
            yield _Record(
                segment.number + pos,
                sys_flag,
                head[store_host_pos : store_host_pos + host_size],
                decode_java_utf8(tail[topic_length_size : topic_length_size + topic_size]),
                tail[properties_pos : properties_pos + properties_size],
            )
            pos += total_size
    finally:
        os.close(descriptor)


def _first_records(segments: list[_File], segment_size: int) -> Iterator[_Record]:
    for segment in segments[:2]:
        yield from _records_of_segment(segment, segment_size)


@dataclass(frozen=True, slots=True)
class _IndexHead:
    path: str
    begin_phy_offset: int
    end_phy_offset: int
    index_count: int


def _infer_index_tags(index_files: list[_File], segments: list[_File], config: StoreConfig) -> bool | None:
    """Whether the index of a store holds tags; None when no record shows it.

    The records of the first segment, and of the one where the newest index file begins, are looked up (at most 1000 of
    each).  A record that the index covers and whose tags are not found there speaks for an index without tags.
    """
    heads = []
    for file in index_files:
        if file.size != config.index_file_size:
            continue
        with open(file.path, "rb", buffering=0) as handle:
            header = handle.read(INDEX_HEADER_SIZE)
        if len(header) == INDEX_HEADER_SIZE:
            _, _, begin, end, _, index_count = _INDEX_HEADER.unpack(header)
            if 1 < index_count <= config.max_index_num:
                heads.append(_IndexHead(file.path, begin, end, index_count))
    if not heads or not segments:
        return None
    looked_at = [segments[0]]
    for segment in reversed(segments):
        if segment.number <= heads[-1].begin_phy_offset:
            looked_at += [segment] if segment.number != segments[0].number else []
            break
    votes = {True: 0, False: 0}
    for segment in looked_at:
        records = _records_of_segment(segment, config.mapped_file_size_commit_log)
        for record in itertools.islice(records, _RECORDS_LOOKED_AT):
            vote = _tags_vote(record, heads, config.max_hash_slot_num)
            if vote is not None:
                votes[vote] += 1
                if sum(votes.values()) >= _DECISIVE_RECORDS:
                    break
        if votes[True] != votes[False]:
            return votes[True] > votes[False]
    return None


def _tags_vote(record: _Record, heads: list[_IndexHead], slots: int) -> bool | None:
    properties = parse_properties(record.properties)
    tags = properties.get("TAGS")
    # Records of a rollback are not indexed.
    if not tags or record.sys_flag & 0xC == 0xC:
        return None
    covering = [head for head in heads if head.begin_phy_offset <= record.phy_offset <= head.end_phy_offset]
    if not covering:
        return None

    def is_indexed(key: str) -> bool:
        return any(_holds(head, slots, record.topic, key, record.phy_offset) for head in covering)

    if is_indexed(f"T#{tags}"):
        return True
    keys = [key for key in properties.get("KEYS", "").split(" ") if key]
    if "UNIQ_KEY" in properties:
        keys.append(properties["UNIQ_KEY"])
    if keys:
        return False if all(is_indexed(key) for key in keys[:8]) else None
    inside = any(head.begin_phy_offset < record.phy_offset < head.end_phy_offset for head in covering)
    return False if inside else None


def _holds(head: _IndexHead, slots: int, topic: str, key: str, phy_offset: int) -> bool:
    """Whether an index file has an entry for ``topic#key`` and `phy_offset`.

    Entries are in the order of the log, so the record's are found by bisection; a chain may be as long as the file.
    """
    hash_code = index_key_hash(topic, key)
    with open(head.path, "rb", buffering=0) as file:

        def entry(number: int) -> tuple[int, int]:
            data = _read(file.fileno(), 20, INDEX_HEADER_SIZE + 4 * slots + 20 * number)
            stored_hash, stored_phy_offset, _, _ = struct.unpack(">iqii", data.ljust(20, b"\0"))
            return stored_hash, stored_phy_offset

        low, high = 1, head.index_count
        while low < high:
            middle = (low + high) // 2
            if entry(middle)[1] < phy_offset:
                low = middle + 1
            else:
                high = middle
        for number in range(low, min(low + _ENTRIES_CHECKED, head.index_count)):
            stored_hash, stored_phy_offset = entry(number)
            if stored_phy_offset != phy_offset:
                return False
            if stored_hash == hash_code:
                return True
    return False
