"""tieredStoreMetadata.json: which flat files a broker says that it uploaded, and the numbers of its topics.

Owns parsing that file, whose every value may be anything.  It never looks at a flat file: what the file says and what is there
are compared by `FlatFiles` and `verify`.

Facts (RocketMQ 5.5.0): the file lies in config/ of the broker's local store, a ``.bak`` beside it; base offsets and queue ids
are unquoted keys.  Queue bounds in it are -1 while the broker runs, so they are not read.  A flat file may be longer than the
size here, and is right then; a shorter one lacks something.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from rmqstore.consumer.json_files import parse_fastjson
from rmqstore.errors import CorruptionError
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import is_unreadable

__all__ = ["METADATA_FILE", "FlatFileMetadata", "TieredMetadata"]

METADATA_FILE = os.path.join("config", "tieredStoreMetadata.json")
"""Where the metadata lies below the root of the broker's local store."""

_TABLES = {
    "COMMIT_LOG": "commitLogFileSegmentTable",
    "CONSUME_QUEUE": "consumeQueueFileSegmentTable",
    "INDEX": "indexFileSegmentTable",
}
_BACKUP = ".bak"
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class FlatFileMetadata:
    """What the metadata say of one flat file.

    Attributes
    ----------
    base_offset, size : int
        Bytes.
    begin_timestamp, end_timestamp : int
        Store times of its first and last record, ms since epoch.
    """

    base_offset: int
    size: int
    begin_timestamp: int
    end_timestamp: int


@dataclass(frozen=True, slots=True)
class TieredMetadata:
    """The metadata of a broker's tiered storage.

    Attributes
    ----------
    path : str
        The file that was read.
    flat_files : dict
        By kind (``"COMMIT_LOG"``, ``"CONSUME_QUEUE"``, ``"INDEX"``) and path (``"broker/topic/queue id"``): what is said of
        each flat file, by base offset.
    topic_ids : dict of int to str
        The topics by the numbers that index files have for them.
    """

    path: str
    flat_files: dict[tuple[str, str], dict[int, FlatFileMetadata]] = field(default_factory=dict)
    topic_ids: dict[int, str] = field(default_factory=dict)

    @property
    def is_backup(self) -> bool:
        """bool: the file itself is missing or could not be read."""
        return self.path.endswith(_BACKUP)

    @property
    def brokers(self) -> set[str]:
        """set of str: the brokers whose files are listed."""
        return {path.partition("/")[0] for _, path in self.flat_files}

    @classmethod
    def load(cls, store_path: str | os.PathLike[str]) -> TieredMetadata | None:
        """TieredMetadata or None: of the local store at `store_path`; None where it has none.

        Raises
        ------
        CorruptionError
            Neither the file nor its backup can be read: both are damaged, or the system does not give them out.
        """
        path = os.path.join(store_path, METADATA_FILE)
        failure: CorruptionError | None = None
        for each in (path, path + _BACKUP):
            try:
                data = read_small_file(each)
                if data is not None:
                    return cls._parse(data, each)
            except CorruptionError as error:
                failure = failure or error
            except OSError as error:
                if not is_unreadable(error):
                    raise
                failure = failure or CorruptionError(f"cannot be read: {error.strerror}", each, 0)
        if failure is not None:
            raise failure
        return None

    @classmethod
    def _parse(cls, data: bytes, path: str) -> TieredMetadata:
        try:
            document = parse_fastjson(data.decode("utf-8"), path)
        except UnicodeDecodeError as error:
            raise CorruptionError("damaged JSON: no UTF-8", path, error.start) from None
        document = _table(document, "the file", path)
        metadata = cls(path)
        for kind, name in _TABLES.items():
            for place, files in _table(document.get(name) or {}, name, path).items():
                listed = metadata.flat_files.setdefault((kind, str(place)), {})
                for base, values in _table(files, f"{name} of {place}", path).items():
                    values = _table(values, f"{name} of {place}, {base}", path)
                    offset = _number(values.get("baseOffset", _as_int(base)), f"baseOffset of {place}", path)
                    listed[offset] = FlatFileMetadata(
                        offset,
                        _number(values.get("size", 0), f"size of {place}, {base}", path),
                        _number(values.get("beginTimestamp", 0), f"beginTimestamp of {place}", path, low=-_INT64_MAX - 1),
                        _number(values.get("endTimestamp", 0), f"endTimestamp of {place}", path, low=-_INT64_MAX - 1),
                    )
        for name, values in _table(document.get("topicMetadataTable") or {}, "topicMetadataTable", path).items():
            values = _table(values, f"topicMetadataTable of {name}", path)
            metadata.topic_ids[_number(values.get("topicId"), f"topicId of {name}", path)] = str(name)
        return metadata


def _table(value: Any, what: str, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CorruptionError(f"damaged metadata: {what} is not an object", path, 0)
    return value


def _as_int(value: Any) -> Any:
    # Python refuses to make a number of thousands of digits.
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


def _number(value: Any, what: str, path: str, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= _INT64_MAX:
        raise CorruptionError(f"damaged metadata: {what} is {value!r}, no number that it can be", path, 0)
    return value
