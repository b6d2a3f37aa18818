"""The options of the data source ``rocketmq-store``: texts of Spark as values.

It never imports pyspark and never touches a store, except for the geometry, which comes from ``broker_conf``, from options,
or from the store's files.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmqstore.arguments import Moment, milliseconds
from rmqstore.config import StoreConfig
from rmqstore.errors import StoreError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import offset_of_name
from rmqstore.selection import Selection
from rmqstore.spark.plan import PARTITION_BYTES
from rmqstore.store.columns import chosen_columns

__all__ = ["DATA_SOURCE_OPTIONS", "FORMAT", "ReadOptions", "number_of_bytes", "store_config", "tells_segment_size"]

FORMAT = "rocketmq-store"
"""The name under which Spark knows the data source."""

QUEUE_ID_MAX = 2**31 - 1
"""The highest number that a record has for its queue."""

CORRUPT_COLUMN = "_corrupt"
"""The column that names what is wrong with a row; null for whole records."""
UNREADABLE_BODY = "UNREADABLE_BODY"
"""The end of that text if the body does not match its compression flag."""

# Spark's own, which do not concern us.
DATA_SOURCE_OPTIONS = {"__datasource_schema__", "name", "paths"}
_COMMON = {"path", "broker_conf"}
_FIELDS = {each.name for each in dataclasses.fields(StoreConfig)} - {"clock", "assumed", "unknown"}


def _wrong(name: str, text: str, want: str) -> StoreError:
    return StoreError(f"option {name} is {text!r}; give {want}")


def number(name: str, text: str, low: int = 0, high: int | None = None) -> int:
    """Read a whole number from `low` to `high`; StoreError if the text is not one."""
    try:
        value = int(text)
    except ValueError:
        raise _wrong(name, text, "a whole number") from None
    if value < low:
        raise _wrong(name, text, f"{low} or more")
    if high is not None and value > high:
        raise _wrong(name, text, f"{high} or less")
    return value


def number_of_bytes(name: str, text: str) -> int:
    """Read a size such as 128m or 1g; StoreError if the text is not one."""
    digits, unit = text.strip().lower().removesuffix("b"), 1
    for suffix, factor in (("k", 1 << 10), ("m", 1 << 20), ("g", 1 << 30)):
        if digits.endswith(suffix):
            digits, unit = digits[:-1], factor
    try:
        value = int(digits) * unit
    except ValueError:
        raise _wrong(name, text, "a number of bytes, as 134217728 or 128m") from None
    if value < 1:
        raise _wrong(name, text, "at least 1 byte")
    return value


def boolean(name: str, text: str) -> bool:
    """Read true or false, in any case; StoreError if the text is neither."""
    if text.strip().lower() not in ("true", "false"):
        raise _wrong(name, text, "true or false")
    return text.strip().lower() == "true"


def _time(name: str, text: str) -> int:
    moment: Moment
    try:
        moment = int(text)
    except ValueError:
        try:
            moment = datetime.datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        except ValueError:
            raise _wrong(name, text, "ms since the epoch, or a time as 2024-05-01T12:00:00+00:00") from None
        if moment.tzinfo is None:
            raise _wrong(name, text, "the time with its offset from UTC, as 2024-05-01T12:00:00+00:00") from None
    try:
        # Both ends are included, so a time between two milliseconds is rounded inwards.
        return int(milliseconds(moment, name, up=name == "begin"))
    except ValueError as error:
        raise StoreError(f"option {error}") from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_names(options: Mapping[str, str], known: set[str]) -> None:
    """Raise StoreError for an option that does not exist: a filter that is spelled wrongly would give every row."""
    for name in options:
        if name.lower() not in known | _COMMON | _FIELDS | DATA_SOURCE_OPTIONS:
            raise StoreError(
                f"there is no option {name!r}; there are {', '.join(sorted(known | _COMMON))}, and the sizes of a store"
            )


def store_path(options: Mapping[str, str]) -> str:
    """Return the store's directory; StoreError if it is not given or not mounted, as files are mapped into memory."""
    path = options.get("path")
    if not path:
        raise StoreError("no store is given: load(path), or option('path', …), names the folder that holds commitlog/")
    return _directory(path)


def _directory(path: str) -> str:
    path = path.removeprefix("file://") if path.startswith("file:///") else path.removeprefix("file:")
    if "://" in path:
        raise StoreError(
            "a store is read from a directory; mount what is elsewhere, on the driver and every worker", path
        )
    return path


def tells_segment_size(root: str, options: Mapping[str, str]) -> bool:
    """Return True if the size of a segment is known from an option, a broker.conf, or a segment that is not empty."""
    if "mapped_file_size_commit_log" in options or options.get("broker_conf"):
        return True
    segments = listing(os.path.join(root, "commitlog"), lambda entry: offset_of_name(entry.name) is not None)
    try:
        return any(each.is_file() and each.stat().st_size for each in segments.checked())
    except FileNotFoundError:
        return False


def store_config(
    root: str, options: Mapping[str, str], *, index: bool = True, may_be_empty: bool = False
) -> StoreConfig:
    """The geometry of a store: from option ``broker_conf``, from options named as `StoreConfig`'s fields, from its files.

    Parameters
    ----------
    index : bool
        Infer the geometry of the index too, which an index file without entries does not tell.
    may_be_empty : bool
        Take RocketMQ's sizes where there is no segment yet; ask again when there is one.

    Raises
    ------
    ValueError, GeometryError, OSError
        Like `StoreConfig.from_properties` and `StoreConfig.infer`.
    """
    readers: dict[str, Callable[[str, str], Any]] = {"int": number, "bool": boolean}
    overrides: dict[str, Any] = {}
    for each in dataclasses.fields(StoreConfig):
        if each.name in _FIELDS and each.name in options:
            text, read = options[each.name], readers.get(str(each.type))
            overrides[each.name] = text if read is None else read(each.name, text)
    if options.get("broker_conf"):
        return StoreConfig.from_properties(options["broker_conf"], **overrides)
    if not os.path.isdir(os.path.join(root, "commitlog")) or (may_be_empty and not tells_segment_size(root, options)):
        # There is no store yet; a reader of it reports that.
        return StoreConfig(**overrides)
    if not index:
        standard = StoreConfig()
        for name in ("max_hash_slot_num", "max_index_num", "index_tags"):
            overrides.setdefault(name, getattr(standard, name))
    return StoreConfig.infer(root, read_only=True, **overrides)


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read.

    Attributes
    ----------
    path : str
    columns : tuple of str or None
        None: the columns of a scan.
    selection : Selection
        Of it topics, queue ids, tags, store times and phy offsets.
    partition_bytes : int
    decode_body : bool
        False leaves compressed bodies as they are stored.
    mode : {"commitlog", "queue"}
    corrupt : {"fail", "report", "skip"}
    max_bytes_per_trigger, max_rows_per_trigger : int or None
    fail_on_data_loss : bool
    starting_offset : {"earliest", "latest"}
    tiered : str or None
        The root of tiered storage: what the local log no longer has is read from there.
    missing : {"fail", "report", "skip"}, optional
        As `corrupt`, for segments that are not there; by default the same.  No option says it.
    """

    path: str
    columns: tuple[str, ...] | None = None
    selection: Selection = field(default_factory=Selection)
    partition_bytes: int = PARTITION_BYTES
    decode_body: bool = True
    mode: str = "commitlog"
    corrupt: str = "fail"
    max_bytes_per_trigger: int | None = None
    max_rows_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    starting_offset: str = "earliest"
    tiered: str | None = None
    missing: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Read the options as Spark passes them.

        Raises
        ------
        StoreError
            An option that does not exist, or one whose value makes no sense.
        """
        check_names(options, _READ)
        chosen = {field: read(name, options[name]) for name, (field, read) in _CHOOSE.items() if name in options}
        found = {name: read(name, options[name]) for name, read in _HOW.items() if name in options}
        return cls(path=store_path(options), selection=Selection(**chosen), **found)


def _queue_ids(name: str, text: str) -> tuple[int, ...] | None:
    return tuple(number(name, part, high=QUEUE_ID_MAX) for part in _list(text)) or None


def _columns(name: str, text: str) -> tuple[str, ...]:
    names = _list(text)
    try:
        chosen = chosen_columns(part for part in names if part != CORRUPT_COLUMN)
    except ValueError as error:
        raise StoreError(f"option {name}: {error}") from None
    return names if CORRUPT_COLUMN in names else chosen


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text.strip().lower() not in choices:
            raise _wrong(name, text, f"{', '.join(choices[:-1])} or {choices[-1]}")
        return text.strip().lower()

    return read


# By option: the field of `Selection`, and what reads its text.
_CHOOSE: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "topic": ("topics", lambda name, text: _list(text) or None),
    "queue_id": ("queue_ids", _queue_ids),
    "tags": ("tags", lambda name, text: text),
    "begin": ("begin", _time),
    "end": ("end", _time),
    "begin_phy_offset": ("begin_phy_offset", number),
    "end_phy_offset": ("end_phy_offset", number),
}
# Fields of `ReadOptions`.
_HOW: dict[str, Callable[[str, str], Any]] = {
    "columns": _columns,
    "partition_bytes": number_of_bytes,
    "decode_body": boolean,
    "mode": _one_of("commitlog", "queue"),
    "corrupt": _one_of("fail", "report", "skip"),
    "max_bytes_per_trigger": number_of_bytes,
    "max_rows_per_trigger": lambda name, text: number(name, text, 1),
    "fail_on_data_loss": boolean,
    "starting_offset": _one_of("earliest", "latest"),
    "tiered": lambda name, text: _directory(text) if text else None,
}
_READ = {*_CHOOSE, *_HOW}
