"""The data source ``rabbitmq-queue``: the messages of classic queues on a stopped node's disk, as a Spark DataFrame.

Owns the schema as Spark has it, and the cutting of queues into parts: a part is some segments of one queue's directory, so that a
task reads those and the journal, and nothing else of the queue.  `rmqstore.rabbitmq` decodes; nothing is changed on disk.

Each task finds the messages that it needs in the message store: in the store's tables after a clean stop, by one scan of the
message files after an unclean one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from rmqstore.errors import StoreError
from rmqstore.rabbitmq.batches import COLUMNS, Batches, schema
from rmqstore.rabbitmq.index_directory import SEGMENT_NAME
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import find_vhosts, store_path
from rmqstore.rabbitmq.queue import Queue, QueueDirectory
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.vhost import Vhost
from rmqstore.spark.options import DATA_SOURCE_OPTIONS, number_of_bytes
from rmqstore.spark.plan import PARTITION_BYTES
from rmqstore.spark.reader import check_field
from rmqstore.spark.tasks import spare_collector

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RABBITMQ_FORMAT", "QueueSource"]

RABBITMQ_FORMAT = "rabbitmq-queue"
"""The name under which Spark knows the data source."""

_OPTIONS = {"path", "queue", "columns", "partition_bytes", "segment_entry_count"}
_LAST_SEGMENT = 1 << 62


def _spark_schema(columns: tuple[str, ...]) -> StructType:
    return StructType([StructField(field.name, from_arrow_type(field.type)) for field in _arrow_schema(columns)])


def _arrow_schema(columns: tuple[str, ...]) -> pa.Schema:
    """Return the same as Arrow types: Spark's times are microseconds, and it has no unsigned numbers."""
    import pyarrow as pa

    types = {"expiry": pa.timestamp("us", "UTC"), "timestamp": pa.timestamp("us", "UTC"), "msg_id": pa.binary()}
    types |= dict.fromkeys(("level", "delivery_mode", "priority"), pa.int32())
    return pa.schema([pa.field(field.name, types.get(field.name, field.type)) for field in schema(columns)])


@dataclass(frozen=True)
class _Options:
    path: str
    queues: tuple[str, ...] | None
    columns: tuple[str, ...]
    partition_bytes: int
    segment_entry_count: int | None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> _Options:
        unknown = sorted(set(given) - _OPTIONS - DATA_SOURCE_OPTIONS)
        if unknown:
            raise StoreError(f"there is no option {unknown[0]!r}; there are {', '.join(sorted(_OPTIONS))}")
        path = given.get("path")
        if not path:
            raise StoreError("no path was given: load() the directory of a vhost, or a node's data directory")
        queues = given.get("queue")
        columns = tuple(name.strip() for name in given["columns"].split(",")) if "columns" in given else COLUMNS
        schema(columns)
        count = given.get("segment_entry_count")
        if count is not None and not count.isdigit():
            raise StoreError(f"option segment_entry_count is {count!r}; give a whole number")
        return cls(
            path,
            None if queues is None else tuple(name.strip() for name in queues.split(",")),
            columns,
            number_of_bytes("partition_bytes", given["partition_bytes"])
            if "partition_bytes" in given
            else PARTITION_BYTES,
            None if count is None else int(count),
        )


@dataclass(frozen=True)
class QueuePart(InputPartition):
    """The work of one task: some segments of a queue's directory, and what is needed to read them."""

    vhost_path: str
    vhost: str
    queue: str
    level: int | None
    directory: str
    segment_entry_count: int
    terms: dict[str, Any] | None
    first: int
    end: int


def _ranges(directory: QueueDirectory, partition_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of segments of about `partition_bytes` together, from the first possible one to the last."""
    numbers = sorted(int(match[1]) for match in map(SEGMENT_NAME.fullmatch, directory.files) if match)
    first, size = 0, 0
    for number in numbers:
        here = os.path.getsize(os.path.join(directory.path, f"{number}.idx"))
        if size and size + here > partition_bytes:
            yield first, number
            first, size = number, 0
        size += here
    yield first, _LAST_SEGMENT


def _parts(vhost: Vhost, queue: Queue, partition_bytes: int) -> Iterator[QueuePart]:
    for directory in reversed(queue.directories):
        version_1 = directory.index_version == 1
        # Of version 2, and half-way to it, a directory is read as a whole.
        ranges = _ranges(directory, partition_bytes) if version_1 else iter([(0, _LAST_SEGMENT)])
        for first, end in ranges:
            yield QueuePart(
                vhost.path,
                queue.vhost,
                queue.name,
                directory.level,
                directory.name,
                vhost.segment_entry_count,
                directory.terms if directory.clean else None,
                first,
                end,
            )


def read_part(part: QueuePart, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a part, with Spark's types."""
    spare_collector()
    wanted = _arrow_schema(columns)
    with Vhost.open(part.vhost_path, segment_entry_count=part.segment_entry_count, check_terms=False) as vhost:
        directory = QueueDirectory(vhost, part.directory)
        if directory.index_version == 1:
            index = QueueIndex.open(
                directory.path,
                segment_entry_count=part.segment_entry_count,
                read_only=True,
                terms=part.terms,
                check_terms=False,
                segments=range(part.first, part.end),
            )
            directory.__dict__["indexes"] = [index]
        opened: dict[bool, MessageStore | None] = {}

        def store(persistent: bool) -> MessageStore | None:
            if persistent not in opened:
                path = store_path(part.vhost_path, persistent)
                opened[persistent] = None
                if os.path.isdir(path):
                    # Of an unclean store only what this part refers to is looked for.
                    opened[persistent] = MessageStore.open(
                        path,
                        read_only=True,
                        references=directory.indexes[0].references if persistent else None,
                        client_refs=vhost.client_refs() if persistent else None,
                    )
            return opened[persistent]

        try:
            batches = Batches(QueueName(part.vhost, part.queue, part.level), store, columns)
            for batch in batches.of_index(directory.live):
                yield batch.cast(wanted)
        finally:
            directory.close()
            for each in opened.values():
                if each is not None:
                    each.close()


class QueueReader(DataSourceReader):
    """A reader of the queues of a stopped node."""

    def __init__(self, options: _Options, asked: StructType):
        self.options = options
        self.columns = tuple(asked.fieldNames())
        wanted = _spark_schema(COLUMNS)
        for field in asked:
            check_field(field, wanted)

    def partitions(self) -> list[InputPartition]:
        """Return the parts of all queues, by vhost and name."""
        options = self.options
        found: list[InputPartition] = []
        missing = set(options.queues or ())
        for path in find_vhosts(options.path):
            with Vhost.open(path, segment_entry_count=options.segment_entry_count, check_terms=False) as vhost:
                for queue in vhost.queues():
                    if options.queues is None or queue.name in options.queues:
                        missing.discard(queue.name)
                        found += _parts(vhost, queue, options.partition_bytes)
        if missing:
            raise StoreError(f"there is no queue {sorted(missing)[0]!r} with a directory", options.path)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one part."""
        # Spark makes its own partition if we return none.
        return read_part(partition, self.columns) if isinstance(partition, QueuePart) else iter(())


class QueueSource(DataSource):
    """The data source ``rabbitmq-queue``; `rmqstore.spark.register` makes it known."""

    @classmethod
    def name(cls) -> str:
        """Return ``rabbitmq-queue``."""
        return RABBITMQ_FORMAT

    def schema(self) -> StructType:
        """Return the schema of option ``columns``, or of all columns."""
        return _spark_schema(_Options.parse(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch job."""
        return QueueReader(_Options.parse(self.options), schema)
