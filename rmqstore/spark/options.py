"""The options of the data source ``rocketmq-store``: their names, and what they may say.

Owns turning the texts that Spark hands over into values.  It never imports pyspark and never touches a store, but for the
geometry, which comes from ``broker_conf``, from options, or from the store's files.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping
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

# Spark's own; they say nothing to us.
DATA_SOURCE_OPTIONS = {"__datasource_schema__", "name", "paths"}
_COMMON = {"path", "broker_conf"}
_FIELDS = {each.name for each in dataclasses.fields(StoreConfig)} - {"clock", "assumed", "unknown"}


def _wrong(name: str, text: str, want: str) -> StoreError:
    return StoreError(f"option {name} is {text!r}; give {want}")


def number(name: str, text: str, low: int = 0, high: int | None = None) -> int:
    """int: a whole number from `low` to `high`; StoreError if it is none."""
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
    """int: a size as Spark's own, such as 128m or 1g; StoreError if it is none."""
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
    """bool: true or false, in any case; StoreError if it is neither."""
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
        # Both ends are included, so what lies between two milliseconds goes inwards.
        return int(milliseconds(moment, name, up=name == "begin"))
    except ValueError as error:
        raise StoreError(f"option {error}") from None


def _choice(name: str, text: str, *choices: str) -> str:
    if text.strip().lower() not in choices:
        raise _wrong(name, text, f"{', '.join(choices[:-1])} or {choices[-1]}")
    return text.strip().lower()


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_names(options: Mapping[str, str], known: set[str]) -> None:
    """Refuse an option that does not exist: a filter that is spelled wrongly would give every row.

    Raises
    ------
    StoreError
        Names the option and those that there are.
    """
    for name in options:
        if name.lower() not in known | _COMMON | _FIELDS | DATA_SOURCE_OPTIONS:
            raise StoreError(
                f"there is no option {name!r}; there are {', '.join(sorted(known | _COMMON))}, and the sizes of a store"
            )


def store_path(options: Mapping[str, str]) -> str:
    """str: the store's directory.

    Raises
    ------
    StoreError
        None is given, or one that no file system has mounted: files are mapped into memory.
    """
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
    """bool: the size of a segment is known: an option or a broker.conf says it, or there is one that is not empty."""
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
        False for who only reads log and queues: the geometry of the index, which an index file without entries does not
        tell, is then not looked for.
    may_be_empty : bool
        True for who waits for the first segment: without one the sizes are RocketMQ's, until there is one and this is
        asked again.

    Raises
    ------
    ValueError, GeometryError, OSError
        As of `StoreConfig.from_properties` and `StoreConfig.infer`.
    """
    given = {name: options[name] for name in _FIELDS if name in options}
    overrides: dict[str, Any] = {}
    for each in dataclasses.fields(StoreConfig):
        if each.name in given:
            text = given[each.name]
            kind = str(each.type)
            overrides[each.name] = (
                number(each.name, text) if kind == "int" else boolean(each.name, text) if kind == "bool" else text
            )
    if options.get("broker_conf"):
        return StoreConfig.from_properties(options["broker_conf"], **overrides)
    if not os.path.isdir(os.path.join(root, "commitlog")) or (may_be_empty and not tells_segment_size(root, options)):
        # A store that is still to be made, or none: who reads it says so.
        return StoreConfig(**overrides)
    if not index:
        standard = StoreConfig()
        for name in ("max_hash_slot_num", "max_index_num", "index_tags"):
            overrides.setdefault(name, getattr(standard, name))
    return StoreConfig.infer(root, read_only=True, **overrides)


@dataclass(frozen=True)
class ReadOptions:
    """What to read, and how.

    Attributes
    ----------
    path : str
    columns : tuple of str or None
        None: as of a scan.
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
        """Read the options as Spark hands them over.

        Raises
        ------
        StoreError
            An option that does not exist, or one whose value makes no sense.
        """
        check_names(options, _READ)
        given = {name: options[name] for name in _READ if name in options}
        found: dict[str, object] = {}
        chosen: dict[str, Any] = {}
        for name, text in given.items():
            if name == "topic":
                chosen["topics"] = _list(text) or None
            elif name == "queue_id":
                chosen["queue_ids"] = tuple(number(name, part, high=QUEUE_ID_MAX) for part in _list(text)) or None
            elif name == "tags":
                chosen["tags"] = text
            elif name == "columns":
                try:
                    found["columns"] = chosen_columns(part for part in _list(text) if part != CORRUPT_COLUMN)
                except ValueError as error:
                    raise StoreError(f"option columns: {error}") from None
                if CORRUPT_COLUMN in _list(text):
                    found["columns"] = _list(text)
            elif name in ("begin", "end"):
                chosen[name] = _time(name, text)
            elif name in ("begin_phy_offset", "end_phy_offset"):
                chosen[name] = number(name, text)
            elif name in ("partition_bytes", "max_bytes_per_trigger"):
                found[name] = number_of_bytes(name, text)
            elif name == "max_rows_per_trigger":
                found[name] = number(name, text, 1)
            elif name in ("decode_body", "fail_on_data_loss"):
                found[name] = boolean(name, text)
            elif name == "mode":
                found[name] = _choice(name, text, "commitlog", "queue")
            elif name == "corrupt":
                found[name] = _choice(name, text, "fail", "report", "skip")
            elif name == "starting_offset":
                found[name] = _choice(name, text, "earliest", "latest")
            elif name == "tiered":
                found[name] = _directory(text) if text else None
        return cls(path=store_path(options), selection=Selection(**chosen), **found)  # type: ignore[arg-type]


CORRUPT_COLUMN = "_corrupt"
"""The column that says what is wrong with a row; null for whole records."""
UNREADABLE_BODY = "UNREADABLE_BODY"
"""With this ends what it says of a body that is not what its compression flag says."""

_CHOSEN = {"topic", "queue_id", "tags", "begin", "end", "begin_phy_offset", "end_phy_offset"}
_READ = {each.name for each in dataclasses.fields(ReadOptions)} - {"path", "selection", "missing"} | _CHOSEN
