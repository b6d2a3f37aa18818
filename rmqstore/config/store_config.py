"""StoreConfig: RocketMQ's options in snake_case, with its defaults and bounds; and reading a broker.conf.

A config is immutable; `replace` returns a changed copy.  `assumed` names the fields that `infer` filled in without evidence;
writers of bytes that depend on them refuse.  Names and defaults are those of Apache RocketMQ 5.5.0 (MessageStoreConfig,
BrokerConfig).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmqstore.config.infer import (
    BATCH_UNIT_SIZE,
    INDEX_ENTRY_SIZE,
    INDEX_HEADER_SIZE,
    INDEX_SLOT_SIZE,
    UNIT_SIZE,
    infer,
)
from rmqstore.errors import GeometryError, StoreError
from rmqstore.message import host_to_bytes

__all__ = [
    "DEFAULT_STORE_HOST", "StoreConfig", "fields_by_option", "parse_java_properties", "read_java_properties", "system_clock",
    "values_of_lines",
]  # fmt: skip

# Java holds sizes and positions inside one file in 32-bit ints.
_MAX_FILE_SIZE = 2**31 - 1
_DELAY_UNITS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def system_clock() -> int:
    """Return the time in ms since the epoch."""
    return time.time_ns() // 1_000_000


@functools.lru_cache(maxsize=64)
def _parse_delay_levels(text: str) -> tuple[int, ...]:
    levels = []
    for piece in text.split():
        unit = _DELAY_UNITS.get(piece[-1])
        if unit is None or not re.fullmatch("[0-9]{1,12}", piece[:-1]):
            text = f"message_delay_level: {piece!r} is not a delay: write numbers with a unit s, m, h or d, as '1s 5m 2h'"
            raise ValueError(text)
        levels.append(int(piece[:-1]) * unit)
    return tuple(levels)


DEFAULT_STORE_HOST = "127.0.0.1:10911"
_ODD_OPTION_NAMES = {
    "enabled_append_prop_crc": "enabledAppendPropCRC",
    "force_verify_prop_crc": "forceVerifyPropCRC",
}


def _option_name(field_name: str) -> str:
    first, *rest = field_name.split("_")
    return _ODD_OPTION_NAMES.get(field_name) or first + "".join(word.capitalize() for word in rest)


def fields_by_option(cls: type[StoreConfig]) -> dict[str, dataclasses.Field[Any]]:
    """Return the field of each of RocketMQ's option names, also of the two that 4.x spelled with one p."""
    fields = {_option_name(item.name): item for item in dataclasses.fields(cls) if not item.metadata.get("own")}
    for name in ("CommitLog", "ConsumeQueue"):
        fields["mapedFileSize" + name] = fields["mappedFileSize" + name]
    return fields


def read_java_properties(path: str | os.PathLike[str]) -> list[tuple[str, str, int]]:
    """Return (name, value, line number) of each line of a .properties file, see `parse_java_properties`."""
    # Java's Properties.load reads ISO-8859-1; other characters are escaped.
    with open(path, encoding="iso-8859-1", newline="") as file:
        return list(parse_java_properties(file.read(), os.fspath(path)))


def values_of_lines(
    cls: type[StoreConfig], lines: Iterable[tuple[str, str, int]], path: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields in lines of the broker.conf `path`, see `StoreConfig.from_properties`."""
    items = [(name, value, f"{path}, line {line}: option {name}") for name, value, line in lines]
    return _values(cls, items, overrides)


def _values(
    cls: type[StoreConfig], items: list[tuple[str, str, str]], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    fields = fields_by_option(cls)
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    address, port = DEFAULT_STORE_HOST.rsplit(":", 1)
    places: dict[str, str] = {}
    for name, text, place in items:
        target = fields.get(name)
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
        # One by one, so that the error has the place of the value.
        if name not in overrides and name not in ("max_hash_slot_num", "max_index_num"):
            try:
                cls(**{name: value})
            except (ValueError, StoreError) as error:
                raise ValueError(f"{places[name]}: {error}") from None
    return {"unknown": unknown, **values, **overrides}


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
    """Parse a Java .properties file into (name, value, line number), like java.util.Properties.

    Comments begin with # or !; a name ends at =, : or white space; a backslash at the end of a line joins the next one;
    escapes are those of Java.  A name may come several times; the last one counts for Java.
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


# Marks a field without an option of RocketMQ: no broker.conf sets it.
_OWN = {"own": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Options of a store, given by name; sizes are in bytes and intervals in milliseconds by default.

    Raises ValueError for a value of the wrong kind or outside its range, and GeometryError for impossible sizes.
    """

    # Geometry of the files.
    mapped_file_size_commit_log: int = 1_073_741_824
    mapped_file_size_consume_queue: int = 6_000_000
    mapper_file_size_batch_consume_queue: int = 13_800_000
    enable_consume_queue_ext: bool = False
    mapped_file_size_consume_queue_ext: int = 50_331_648
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000

    # Written records.
    message_index_enable: bool = True
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

    # Reading.
    max_msgs_num_batch: int = 64

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

    # Ours.
    index_tags: bool = field(default=True, metadata=_OWN)
    """Put tags into the index, like RocketMQ since 5.4.0, which has no option for it."""
    store_host: str = field(default=DEFAULT_STORE_HOST, metadata=_OWN)
    clock: Callable[[], int] = field(default=system_clock, repr=False, compare=False, metadata=_OWN)
    generate_unique_key: bool = field(default=False, metadata=_OWN)
    max_mapped_files: int = field(default=1024, metadata=_OWN)
    """The number of mapped files at most, without the newest file of each written queue."""
    populate_ahead_size: int = field(default=33_554_432, metadata=_OWN)
    """The bytes ahead of each fast-growing end that a thread of the store prepares; 0 = no thread."""
    commit_log_growth_size: int = field(default=0, metadata=_OWN)
    """A segment gets space on disk in steps of this many bytes as it is written; 0 = all of it at its creation."""
    assumed: tuple[str, ...] = field(default=(), metadata=_OWN)
    """Fields that `infer` could not find and filled with defaults."""
    unknown: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False, metadata=_OWN)
    """Other names and values of a broker.conf, as they were written there."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_kind(item.name, item.type, getattr(self, item.name))
        for item in dataclasses.fields(self):
            low, high = _LEAST.get(item.name, 0), _MOST.get(item.name, _MAX_FILE_SIZE)
            if item.type == "int" and not low <= (value := getattr(self, item.name)) <= high:
                raise ValueError(f"{item.name} is {value}: give a number from {low} to {high}")
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
        """The size of a consume-queue file: `mapped_file_size_consume_queue` rounded up to whole units of 20 bytes."""
        return -(-self.mapped_file_size_consume_queue // UNIT_SIZE) * UNIT_SIZE

    @property
    def batch_consume_queue_file_size(self) -> int:
        """The size of a batch consume-queue file: rounded up to whole units of 46 bytes."""
        return -(-self.mapper_file_size_batch_consume_queue // BATCH_UNIT_SIZE) * BATCH_UNIT_SIZE

    @property
    def index_file_size(self) -> int:
        """The size of an index file: 40 + 4 * `max_hash_slot_num` + 20 * `max_index_num`."""
        return INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * self.max_hash_slot_num + INDEX_ENTRY_SIZE * self.max_index_num

    @property
    def delay_levels(self) -> tuple[int, ...]:
        """The delays in milliseconds; level n is item n - 1."""
        return _parse_delay_levels(self.message_delay_level)

    def as_dict(self) -> dict[str, Any]:
        """Return the options by name, without `clock`, `assumed` and `unknown`."""
        left_out = ("clock", "assumed", "unknown")
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name not in left_out}

    def replace(self, **changes: Any) -> StoreConfig:
        """Return a copy with some fields changed, which are no longer `assumed`."""
        if "assumed" not in changes:
            changes["assumed"] = tuple(name for name in self.assumed if name not in changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def embedded(cls, **changes: Any) -> StoreConfig:
        """Return options for a store that belongs to one program: files that grow with use, and nothing is deleted.

        A new store takes less than 2 MiB. No thread deletes files or watches how full the disk is: set
        ``clean_resource_interval`` and ``file_reserved_time`` to delete old messages.
        """
        return cls(**{**_EMBEDDED, **changes})

    @classmethod
    def broker(cls, **changes: Any) -> StoreConfig:
        """Return RocketMQ's options, which are the defaults of this class."""
        return cls(**changes)

    @classmethod
    def from_properties(cls, source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> StoreConfig:
        """Read a broker.conf, or a mapping with RocketMQ's option names.

        The names of 4.x (mapedFileSizeCommitLog, mapedFileSizeConsumeQueue) count too.  brokerIP1 and listenPort become
        `store_host`.  Other names stay in `unknown`.  Raises ValueError with file and line for a bad value, or OSError.
        """
        if not isinstance(source, Mapping):
            return cls(**values_of_lines(cls, read_java_properties(source), os.fspath(source), overrides))
        items = [(str(name), str(value), f"option {name}") for name, value in source.items()]
        return cls(**_values(cls, items, overrides))

    @classmethod
    def infer(cls, path: str | os.PathLike[str], *, read_only: bool = False, **overrides: Any) -> StoreConfig:
        """Infer the geometry of the store in `path` from its files; nothing is written or locked.

        Sizes come from the files' lengths, slot and entry counts of the index from its contents, `enabled_append_prop_crc` and
        `store_host` from the first record, `index_tags` from searching the tags of the first records, `enable_lmq` from light
        queues and their file of progress.  Other fields keep their defaults and are listed in `assumed`.  If files of one kind
        differ in length, the length that fits their names counts, or else the most frequent one.

        - `path`: the store's directory (storePathRootDir), or an index file for its geometry only.
        - `read_only`: skip unclear index files and unreadable files instead of raising.
        - `overrides`: known fields, taken as given.

        Raises StoreError for a missing directory, and GeometryError, with the option to give, for an empty store or an index that
        fits no geometry or several.
        """
        return infer(cls, os.fspath(path), read_only, overrides)


_FIELD_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "str": (str,)}


def _check_kind(name: str, annotation: Any, value: object) -> None:
    kinds = _FIELD_KINDS.get(annotation)
    if kinds is None:
        return
    # max_index_num=True is a mistake.
    if not isinstance(value, kinds) or (annotation == "int" and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r}: give {'an' if annotation == 'int' else 'a'} {annotation}")


_EMBEDDED = {
    "mapped_file_size_commit_log": 64 << 20,
    "commit_log_growth_size": 1 << 20,
    "max_hash_slot_num": 10_000,
    "max_index_num": 30_000,
    "populate_ahead_size": 0,
    "clean_resource_interval": 0,
}

# Bounds other than 0 and 2**31 - 1.
_LEAST = {
    # A segment holds at least the smallest record (92 bytes) and the 8 bytes of a blank.
    "mapped_file_size_commit_log": 100,
    "mapped_file_size_consume_queue": 1,
    "mapper_file_size_batch_consume_queue": 1,
    # One unit without a bitmap (20 bytes) and the 4 bytes that must stay after it.
    "mapped_file_size_consume_queue_ext": 24,
    "max_hash_slot_num": 1,
    # Entry 0 is never used.
    "max_index_num": 2,
    "max_message_size": 1,
    "consumer_offset_update_version_step": 1,
    "max_msgs_num_batch": 1,
    "delete_file_batch_max": 1,
    "max_mapped_files": 1,
}
_MOST = dict.fromkeys(
    ("disk_max_used_space_ratio", "disk_space_clean_forcibly_ratio", "disk_space_warning_level_ratio"), 100
)
