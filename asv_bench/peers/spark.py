"""Spark on two cores: reading and rebuilding, beside Parquet, a source that makes up its rows, and a decoder in Python.

All readers give the same rows to Spark's noop sink, which takes and forgets them.  Parquet holds the very messages, written by
Spark from the store: what a columnar file can do is the upper limit.  The source that makes up its rows hands over ready record
batches of the same columns, which is the limit of Python data sources.  The decoder is what people do without this package: the
segments as `binaryFile`, taken apart with `struct` in mapInArrow; it gives the columns that it needs no properties for.

A rebuild with Spark is compared with the same tasks in two processes without Spark, and with one process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import rmqstore
from rmqstore import MessageStore, StoreConfig

from . import data
from .rounds import Outcome, Work
from .setting import Setting, remove, timed

BODY = 256
CORES = 2
PART = "spark"
# A piece of the default size, and small enough for the binaryFile source, which takes a whole segment into the memory of Java.
SEGMENT = 128 * 1024 * 1024
PIECE = "128m"
SETTINGS = {
    "spark.driver.memory": "4g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": str(CORES),
    "spark.sql.session.timeZone": "UTC",
    # For all that comes from Python, see docs/spark.md.
    "spark.python.unix.domain.socket.enabled": "true",
    # A segment is a file of its own here, and so a task.
    "spark.sql.files.openCostInBytes": str(SEGMENT),
}
MADE_UP = "made-up"


def works(setting: Setting) -> Iterator[Work]:
    """Reading with all columns, with three and with two, counting; rebuilding."""
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        yield Work(
            PART,
            "read all columns",
            "rows",
            1,
            {},
            base="made-up rows",
            skipped={"rmqstore": f"{error.name} is missing"},
        )
        return
    from pyspark.sql import SparkSession

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # An installed package has its bytecode; without it every job's planner would compile this one's modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    folder = setting.folder("spark")
    builder = SparkSession.builder.master(f"local[{CORES}]").config("spark.local.dir", os.path.join(folder, "local"))
    # The system takes no long path for a socket, and Spark does not remove it.
    sockets = tempfile.mkdtemp()
    builder = builder.config("spark.python.unix.domain.socket.dir", sockets)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        yield from _works(setting, spark, folder)
    finally:
        spark.stop()
        remove(folder)
        remove(sockets)


def _works(setting: Setting, spark: Any, folder: str) -> Iterator[Work]:
    import rmqstore.spark

    rmqstore.spark.register(spark)
    spark.dataSource.register(made_up_source())
    n = setting.size(8_000_000, 20_000)
    path, parquet = os.path.join(folder, "store"), os.path.join(folder, "parquet")
    config = StoreConfig(mapped_file_size_commit_log=SEGMENT if not setting.quick else 1 << 20)
    with MessageStore.open(path, config=config) as store:
        data.fill(store, data.keys(n), data.bodies(n, BODY), BODY)
        end = store.commit_log.max_offset
        sample = next(iter(store.scan(batch_size=8192)))
    piece = PIECE if not setting.quick else "1m"

    def ours(columns: list[str]) -> Any:
        reader = spark.read.format("rocketmq-store").option("partition_bytes", piece)
        return reader.option("columns", ",".join(columns)).load(path)

    def made_up(names: list[str]) -> Any:
        reader = spark.read.format(MADE_UP).options(rows=n, tasks=max(end // SEGMENT, CORES), columns=",".join(names))
        return reader.option("sample", sample_file).load()

    sample_file = os.path.join(folder, "sample.arrow")
    names = [name for name in sample.schema.names if name != "corrupt"]
    _write_sample(sample.select(names), sample_file)
    ours(names).write.parquet(parquet)
    setting.settle()

    def to_noop(frame: Callable[[], Any]) -> Callable[[], Outcome]:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        def run() -> Outcome:
            rows = Observation()
            observed = frame().observe(rows, F.count(F.lit(1)).alias("rows"))
            seconds, _ = timed(lambda: observed.write.format("noop").mode("overwrite").save())
            return Outcome(seconds, {"rows": rows.get["rows"]})

        return run

    def counted(frame: Callable[[], Any]) -> Callable[[], Outcome]:
        def run() -> Outcome:
            chosen = frame()
            seconds, rows = timed(chosen.count)
            return Outcome(seconds, {"rows": rows})

        return run

    def with_struct(columns: list[str]) -> Any:
        files = spark.read.format("binaryFile").load(os.path.join(path, "commitlog"))
        schema = ", ".join(f"{name} {kind}" for name, kind in DECODED.items() if name in columns)
        return files.select("content").mapInArrow(decoder(columns), schema)

    base, limit, loop = "made-up rows", "Spark, Parquet", "binaryFile + struct in mapInArrow"
    chosen = {
        "read all columns": names,
        "read topic, body and store_timestamp": ["topic", "body", "store_timestamp"],
        "read topic and store_timestamp": ["topic", "store_timestamp"],
    }
    for name, columns in chosen.items():
        decoded = list(DECODED) if columns is names else columns
        yield Work(
            PART,
            name,
            "rows",
            n,
            {
                "rmqstore": to_noop(lambda columns=columns: ours(columns)),
                base: to_noop(lambda columns=columns: made_up(columns)),
                limit: to_noop(lambda columns=columns: spark.read.parquet(parquet).select(*columns)),
                loop: to_noop(lambda decoded=decoded: with_struct(decoded)),
            },
            base=base,
            others=[limit, loop],
            goals={"rmqstore": 0.83},
            warm_up=setting.warm_up(1),
        )
    for name, columns in {
        "count": ["phy_offset"],
        "count with topic and store_timestamp": ["topic", "store_timestamp"],
    }.items():
        yield Work(
            PART,
            name,
            "rows",
            n,
            {
                "rmqstore": counted(lambda columns=columns: ours(columns)),
                base: counted(lambda columns=columns: made_up(columns)),
                limit: counted(lambda: spark.read.parquet(parquet)),
            },
            base=base,
            others=[limit],
            warm_up=setting.warm_up(1),
        )
    yield from rebuilding(setting, spark, folder, path, config, n)


# ------------------------------------------------------------------------------------------------------- made-up rows


def _write_sample(sample: Any, path: str) -> None:
    # The batch as Spark takes it: its own types of times.
    import pyarrow as pa

    from rmqstore.spark.batches import in_spark_layout, spark_arrow_schema
    from rmqstore.spark.reader import NULLABLE

    names = sample.schema.names
    batch = in_spark_layout(sample, spark_arrow_schema(names, set(names) - NULLABLE))
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def made_up_source() -> type:
    """A data source that gives the rows of one batch, over and over."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    from rmqstore.spark.reader import spark_schema

    class MadeUpReader(DataSourceReader):
        def __init__(self, options: Any):
            self.sample, self.columns = options["sample"], options["columns"].split(",")
            self.rows, self.tasks = int(options["rows"]), int(options["tasks"])

        def partitions(self) -> list[Any]:
            step = -(-self.rows // self.tasks)
            return [InputPartition(min(step, self.rows - at)) for at in range(0, self.rows, step)]

        def read(self, partition: Any) -> Iterator[Any]:
            import pyarrow as pa

            with pa.memory_map(self.sample) as file:
                batch = pa.ipc.open_file(file).get_batch(0).select(self.columns)
                left = partition.value
                while left > 0:
                    yield batch if left >= batch.num_rows else batch.slice(0, left)
                    left -= batch.num_rows

    class MadeUpSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return MADE_UP

        def schema(self) -> Any:
            return spark_schema(self.options["columns"].split(","), damage=False)

        def reader(self, schema: Any) -> Any:
            return MadeUpReader(self.options)

    return MadeUpSource


# ------------------------------------------------------------------------------------------------- a decoder in Python

DECODED = {
    "topic": "string",
    "queue_id": "int",
    "queue_offset": "bigint",
    "phy_offset": "bigint",
    "size": "int",
    "body": "binary",
    "store_timestamp": "timestamp",
}


def decoder(columns: list[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for mapInArrow that takes segments apart, record by record, as one writes it without a library."""

    def decode(batches: Iterator[Any]) -> Iterator[Any]:
        import struct

        import pyarrow as pa

        magics = (-626843481, -626843477)
        fixed, long, integer = struct.Struct(">iiiiiqqiq"), struct.Struct(">q"), struct.Struct(">i")
        types = {
            "topic": pa.string(), "queue_id": pa.int32(), "queue_offset": pa.int64(), "phy_offset": pa.int64(),
            "size": pa.int32(), "body": pa.binary(), "store_timestamp": pa.timestamp("us", "UTC"),
        }  # fmt: skip

        def taken(rows: list[tuple[Any, ...]]) -> Any:
            lists = dict(zip(types, zip(*rows)))
            return pa.RecordBatch.from_arrays([pa.array(lists[name], types[name]) for name in columns], names=columns)

        for batch in batches:
            for content in batch.column(0):
                segment = content.as_buffer()
                view, at, rows = memoryview(segment), 0, []
                while at + 91 <= len(view):
                    size, magic, _, queue_id, _, queue_offset, phy_offset, flags, _ = fixed.unpack_from(view, at)
                    if magic not in magics:
                        break
                    host = 8 if not flags & 16 else 20
                    stored = long.unpack_from(view, at + 48 + host)[0]
                    place = at + 56 + host + (8 if not flags & 32 else 20) + 12
                    length = integer.unpack_from(view, place)[0]
                    body = view[place + 4 : place + 4 + length].tobytes()
                    place += 4 + length
                    if magic == magics[0]:
                        topic = str(view[place + 1 : place + 1 + view[place]], "utf-8")
                    else:
                        topic = str(view[place + 2 : place + 2 + 256 * view[place] + view[place + 1]], "utf-8")
                    rows.append((topic, queue_id, queue_offset, phy_offset, size, body, stored * 1000))
                    if len(rows) == 8192:
                        yield taken(rows)
                        rows = []
                    at += size
                if rows:
                    yield taken(rows)

    return decode


# ---------------------------------------------------------------------------------------------------------- rebuilding


def _call(work: tuple[Any, Any, Any]) -> Any:
    function, plan, task = work
    return function(plan, task)


def _nothing(plan: Any, task: Any) -> None:
    import rmqstore.spark.rebuild  # noqa: F401


def rebuilding(setting: Setting, spark: Any, folder: str, path: str, config: StoreConfig, n: int) -> Iterator[Work]:
    """Queues and index from the log into another folder: with Spark, in processes without it, in one process."""
    from rmqstore.offline.rebuild import RebuildJob
    from rmqstore.spark.rebuild import rebuild, rebuild_with

    def run(work: Callable[[str], Any]) -> Callable[[], Outcome]:
        def once() -> Outcome:
            output = os.path.join(folder, "rebuilt")
            remove(output)
            setting.settle()
            seconds, report = timed(lambda: work(output))
            answer = {"records": report.records, "units": report.units, "entries": report.index_entries}
            remove(output)
            return Outcome(seconds, answer)

        return once

    # Processes that are there and have imported the package, as those of Spark are.
    pool = multiprocessing.get_context("spawn").Pool(CORES)
    pool.map(_call, [(_nothing, None, None)] * CORES * 4, chunksize=1)

    def in_tasks(function: Any, plan: Any, tasks: Any) -> list[Any]:
        return pool.map(_call, [(function, plan, task) for task in tasks], chunksize=1)

    def in_processes(output: str) -> Any:
        return rebuild_with(in_tasks, RebuildJob.of(path, config=config, output=output), CORES)

    base = f"{CORES} processes without Spark"
    yield Work(
        PART,
        "rebuild into another folder",
        "messages",
        n,
        {
            "rmqstore.spark.rebuild": run(lambda output: rebuild(spark, path, config=config, output=output)),
            base: run(in_processes),
            "rmqstore.rebuild, one process": run(lambda output: rmqstore.rebuild(path, config=config, output=output)),
        },
        base=base,
        others=["rmqstore.rebuild, one process"],
        goals={"rmqstore.spark.rebuild": 0.7},
        warm_up=setting.warm_up(1),
    )
    pool.terminate()
    pool.join()
