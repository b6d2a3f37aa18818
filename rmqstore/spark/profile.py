"""What is in a store, counted by a cluster: figures as Parquet files, and a page that shows them (`report`).

Owns what is counted, and how.  It never changes the store.  Invariants:

- Bodies stay where they are read: a task measures them and hands over sums, so that what goes between processes grows with the
  number of groups and not with that of bytes.
- A task keeps one batch in memory, and of keys a bounded number.
- What is estimated is called so: different keys by HyperLogLog, and the most frequent keys with the number of messages that
  they may have beside those that were counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmqstore.errors import StoreError
from rmqstore.files.output_file import OutputFile
from rmqstore.message import SysFlag
from rmqstore.spark.export import check_target, option_text
from rmqstore.spark.options import CORRUPT_COLUMN, UNREADABLE_BODY
from rmqstore.spark.report import Figures, KeyFigures, TopKey, VolumeFigures, page
from rmqstore.spark.source import StoreSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["PARTS", "frequent_keys", "key_counts", "profile", "volumes"]

PARTS = ("volume", "keys", "top_keys")
"""The Parquet files that `profile` writes."""

_HOUR = 3_600_000
# Keys that a task counts at a time; the rarest go when there are twice as many.
_KEYS_KEPT = 4096
_LISTED = 200

_GROUPS = "topic string, tags string, hour bigint, body_bits int, compressed boolean, damaged boolean"
_SUMS = "messages bigint, bytes bigint, body_bytes bigint, stored_bytes bigint, undecoded bigint"
_COLUMNS = ("topic", "tags", "store_timestamp", "size", "sys_flag", "body", "body_stored", "corrupt")
# Three bits of the system flag name how a body is compressed; the lowest of a group of bits says that it is.
_COMPRESSED = SysFlag.COMPRESSED.value


def volumes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Sum up a batch of a scan by topic, tag, hour, size of body and compression.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        With the columns topic, tags, store_timestamp, size, sys_flag, body, body_stored and corrupt, and maybe ``_corrupt``.

    Returns
    -------
    pyarrow.RecordBatch
        One row for each group; ``hour`` counts from the epoch, ``body_bits`` is the number of bits of the body's length.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    def numbers(array: Any, kind: Any = np.int64) -> np.ndarray:
        filled = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
        values: np.ndarray = filled.to_numpy(zero_copy_only=False).astype(kind, copy=False)
        return values

    times = batch.column("store_timestamp")
    moments = numbers(times.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
    body = numbers(pc.binary_length(batch.column("body")))
    stored = numbers(pc.binary_length(batch.column("body_stored")))
    # A row without a topic tells of a stretch that holds no whole record.
    damaged = numbers(pc.is_null(batch.column("topic")), bool) | numbers(batch.column("corrupt"), bool)
    undecoded = np.zeros(batch.num_rows, bool)
    if CORRUPT_COLUMN in batch.schema.names:
        undecoded = numbers(pc.ends_with(batch.column(CORRUPT_COLUMN), UNREADABLE_BODY), bool)
        damaged &= ~undecoded
    compressed = (numbers(batch.column("sys_flag")) & _COMPRESSED != 0) & ~undecoded & ~damaged
    whole = ~damaged
    bits = np.frexp(body.astype(np.float64))[1].astype(np.int32)
    table = pa.table(
        {
            "topic": batch.column("topic"),
            "tags": batch.column("tags"),
            "hour": moments // (_HOUR * 1000),
            "body_bits": np.where(undecoded | damaged, -1, bits).astype(np.int32),
            "compressed": compressed,
            "damaged": damaged,
            "messages": np.ones(batch.num_rows, np.int64),
            "bytes": numbers(batch.column("size")),
            "body_bytes": body * (whole & ~undecoded),
            "stored_bytes": stored * (whole & ~undecoded),
            "undecoded": undecoded.astype(np.int64),
        }
    )
    groups = table.schema.names[:6]
    sums = table.schema.names[6:]
    grouped = table.group_by(groups, use_threads=False).aggregate([(name, "sum") for name in sums])
    columns = [grouped.column(name) for name in groups] + [grouped.column(f"{name}_sum") for name in sums]
    return pa.table(columns, names=[*groups, *sums]).combine_chunks().to_batches()[0]


def key_counts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The keys of a batch of a scan, each with its number; a row without a key has the messages of the topic that have any.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        With the columns topic and keys.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    keys, topics = batch.column("keys"), batch.column("topic")
    one = pa.table({"topic": topics.take(pc.list_parent_indices(keys)), "key": pc.list_flatten(keys)})
    found = one.group_by(["topic", "key"], use_threads=False).aggregate([([], "count_all")])
    having = pa.table({"topic": topics.filter(pc.fill_null(pc.greater(pc.list_value_length(keys), 0), False))})
    messages = having.group_by(["topic"], use_threads=False).aggregate([([], "count_all")])
    whole = pa.concat_tables(
        [
            pa.table(
                [found["topic"], found["key"], found["count_all"]],
                names=["topic", "key", "num"],
            ),
            pa.table(
                [messages["topic"], pa.nulls(len(messages), pa.string()), messages["count_all"]],
                names=["topic", "key", "num"],
            ),
        ]
    ).cast(pa.schema([("topic", pa.string()), ("key", pa.string()), ("num", pa.int64())]))
    batches = whole.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=whole.schema)


def frequent_keys(counts: Iterable[pa.RecordBatch], kept: int = _KEYS_KEPT) -> tuple[dict[tuple[str, str], int], int]:
    """Find the most frequent of any number of keys in a bounded memory (Misra and Gries' summary, taken in batches).

    Parameters
    ----------
    counts : iterable of pyarrow.RecordBatch
        As of `key_counts`.
    kept : int
        At least so many keys are left, if there are so many.

    Returns
    -------
    dict of (str, str) to int
        Topic and key, with a number of messages that is not too high.
    int
        By how much any of these numbers may be too low; a key that is missing has at most so many.
    """
    known: dict[tuple[str, str], int] = {}
    uncounted = 0
    for batch in counts:
        for topic, key, num in zip(*(batch.column(name).to_pylist() for name in ("topic", "key", "num"))):
            if key is not None:
                known[topic, key] = known.get((topic, key), 0) + num
        if len(known) > 2 * kept:
            less = sorted(known.values(), reverse=True)[kept]
            known = {each: num - less for each, num in known.items() if num > less}
            uncounted += less
    return known, uncounted


def _source(path: str, options: Mapping[str, Any], columns: Sequence[str]) -> Any:
    # The reader and the partitions of a scan, as Spark would get them.
    texts = {name: option_text(name, value) for name, value in options.items() if value is not None}
    # The data source takes the names of options in any case.
    texts = {**texts, "path": path, "columns": ",".join(columns), "corrupt": texts.get("corrupt", "report")}
    source = StoreSource(texts)
    reader = source.reader(source.schema())
    return reader, reader.partitions()


def _over_pieces(
    spark: SparkSession,
    source: tuple[Any, Sequence[Any]],
    schema: str,
    measure: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
) -> DataFrame:
    # A DataFrame of what `measure` makes of the batches of each piece; it runs where the piece is read.
    reader, pieces = source

    def work(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from measure(iter(reader.read(pieces[number])))

    return spark.range(0, len(pieces), 1, max(len(pieces), 1)).mapInArrow(work, schema)


def _measure_volumes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (volumes(batch) for batch in batches if batch.num_rows)


def _measure_keys(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (key_counts(batch) for batch in batches if batch.num_rows)


def _measure_frequent(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    known, uncounted = frequent_keys(_measure_keys(batches))
    rows = list(known)
    yield pa.RecordBatch.from_arrays(
        [
            pa.array([topic for topic, _ in rows] + [None], pa.string()),
            pa.array([key for _, key in rows] + [None], pa.string()),
            pa.array([*known.values(), uncounted], pa.int64()),
        ],
        names=["topic", "key", "num"],
    )


def _volume(row: Any) -> VolumeFigures:
    return VolumeFigures(**{name: int(row[name] or 0) for name in VolumeFigures.__dataclass_fields__})


def _sums() -> list[Any]:
    from pyspark.sql import functions as F

    plain = [F.sum(name).alias(name) for name in ("messages", "bytes", "body_bytes", "stored_bytes", "undecoded")]
    compressed = {
        "compressed": "messages",
        "compressed_body_bytes": "body_bytes",
        "compressed_stored_bytes": "stored_bytes",
    }
    return plain + [
        F.sum(F.when(F.col("compressed"), F.col(of)).otherwise(0)).alias(name) for name, of in compressed.items()
    ]


def _figures_of_volume(measured: DataFrame) -> dict[str, Any]:
    # Everything that the page shows but keys, from the sums of all tasks.
    from pyspark.sql import functions as F

    whole = measured.where("not damaged")
    damage = measured.where("damaged").agg(F.sum("messages"), F.sum("bytes")).first()
    by_topic = whole.groupBy("topic").agg(*_sums())
    by_tag = whole.groupBy("topic", "tags").agg(*_sums())
    # No pair is left out because its tag is null.
    pair = F.struct("topic", "tags")
    total = whole.agg(*_sums(), F.countDistinct("topic").alias("topics"), F.countDistinct(pair).alias("pairs")).first()
    hours = whole.groupBy("hour").agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"))
    sizes = whole.where("body_bits >= 0").groupBy("body_bits").agg(F.sum("messages").alias("messages"))
    assert total is not None and damage is not None
    return {
        "total": _volume(total),
        "topic_num": int(total["topics"]),
        "tag_num": int(total["pairs"]),
        "topics": [
            (row["topic"], _volume(row)) for row in by_topic.orderBy(F.desc("bytes"), "topic").limit(_LISTED).collect()
        ],
        "tags": [
            (row["topic"], row["tags"], _volume(row))
            for row in by_tag.orderBy(F.desc("messages"), "topic", "tags").limit(_LISTED).collect()
        ],
        "hours": [(row["hour"] * _HOUR, row["messages"], row["bytes"]) for row in hours.orderBy("hour").collect()],
        "sizes": [(row["body_bits"], row["messages"]) for row in sizes.orderBy("body_bits").collect()],
        "damaged": int(damage[0] or 0),
        "damaged_bytes": int(damage[1] or 0),
    }


def profile(
    spark: SparkSession,
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    top_keys: int = 30,
    overwrite: bool = False,
    **options: Any,
) -> Figures:
    """Count what is in a store and write a page about it.

    Messages and bytes by topic, tag and hour, sizes of bodies, compression, and keys: how many there are, how many different
    ones, which are the most frequent.  The store is read three times, with its bodies once.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    path : str
        The store.
    output : str
        A folder that this process and the tasks share; made if it is missing.  It gets ``report.html``, one file that needs
        nothing else, and the figures as Parquet: ``volume.parquet`` (sums by topic, tag, hour, bits of the body's length and
        compression), ``keys.parquet`` and ``top_keys.parquet``.
    top_keys : int
        How many of the most frequent keys are named; 0 for none, which saves the third reading.
    overwrite : bool
        Replace a profile that is in `output`.
    **options
        Of the data source.  Damage is counted and passed over, unless ``corrupt`` says something else.

    Returns
    -------
    Figures

    Raises
    ------
    StoreError
        There is no such store, an option does not exist, or `output` is in the store or holds a profile already.
    pyspark.errors.PySparkException
        The store cannot be read.
    """
    from pyspark.sql import functions as F

    root, target = os.path.abspath(os.fspath(path)), Path(output).absolute()
    names = ["report.html", *(f"{part}.parquet" for part in PARTS)]
    check_target(target, root)
    links = [name for name in names if (target / name).is_symlink()]
    if links:
        raise StoreError(f"a profile replaces no link ({', '.join(links)}); give another folder", target)
    there = [name for name in names if (target / name).exists()]
    if there and not overwrite:
        raise StoreError(f"there is a profile already ({', '.join(there)}); give another folder, or overwrite", target)
    for name in ("columns", "decode_body"):
        if options.get(name) is not None:
            raise StoreError(f"a profile reads the columns that it needs; leave option {name} out")
    made_at = time.time_ns() // 1_000_000
    columns = [*_COLUMNS] + [CORRUPT_COLUMN] * (options.get("corrupt", "report") == "report")
    measured = _over_pieces(spark, _source(root, options, columns), f"{_GROUPS}, {_SUMS}", _measure_volumes)
    groups = [part.split()[0] for part in _GROUPS.split(", ")]
    measured = measured.groupBy(*groups).agg(
        *(F.sum(part.split()[0]).alias(part.split()[0]) for part in _SUMS.split(", "))
    )
    target.mkdir(parents=True, exist_ok=True)

    def write(frame: DataFrame, part: str) -> None:
        frame.write.mode("overwrite").parquet((target / f"{part}.parquet").as_uri())

    measured = measured.persist()
    try:
        write(measured.withColumn("hour", F.timestamp_seconds(F.col("hour") * 3600)), "volume")
        found = _figures_of_volume(measured)
    finally:
        measured.unpersist()

    keys_schema = "topic string, key string, num bigint"
    source = _source(root, options, ["topic", "keys"])
    keys = (
        _over_pieces(spark, source, keys_schema, _measure_keys)
        .where("topic is not null")
        .groupBy("topic")
        .agg(
            F.coalesce(F.sum(F.when(F.col("key").isNull(), F.col("num"))), F.lit(0)).alias("messages"),
            F.coalesce(F.sum(F.when(F.col("key").isNotNull(), F.col("num"))), F.lit(0)).alias("keys"),
            F.approx_count_distinct("key", 0.02).alias("distinct_keys"),
        )
        .orderBy(F.desc("keys"), "topic")
    )
    key_rows = [KeyFigures(row["topic"], row["messages"], row["keys"], row["distinct_keys"]) for row in keys.collect()]
    write(
        spark.createDataFrame(
            [(each.topic, each.messages, each.keys, each.distinct) for each in key_rows],
            "topic string, messages bigint, keys bigint, distinct_keys bigint",
        ),
        "keys",
    )
    top: list[TopKey] = []
    if top_keys > 0:
        frequent = (
            _over_pieces(spark, source, keys_schema, _measure_frequent)
            .groupBy("topic", "key")
            .agg(F.sum("num").alias("num"))
            .orderBy(F.col("key").isNull().desc(), F.desc("num"), "topic", "key")
            .limit(top_keys + 1)
            .collect()
        )
        uncounted = sum(row["num"] for row in frequent if row["key"] is None)
        top = [TopKey(row["topic"], row["key"], row["num"], uncounted) for row in frequent if row["key"] is not None]
    write(
        spark.createDataFrame(
            [(each.topic, each.key, each.messages, each.uncounted) for each in top],
            "topic string, key string, messages bigint, uncounted bigint",
        ),
        "top_keys",
    )
    asked = {name: option_text(name, value) for name, value in options.items() if value is not None}
    figures = Figures(path=root, made_at=made_at, keys=key_rows, top_keys=top, options=asked, **found)
    # The page is there when all is there, and at once.
    with OutputFile(target / "report.html", force=True, outside=[root]) as file:
        file.write(page(figures).encode("utf-8", "backslashreplace"))
    return figures
