"""The driver of the cluster tests, a process of its own: jobs come as lines on stdin, answers go as lines to stdout.

It asserts nothing; the tests do.  Run by `cluster.Driver`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def say(**said: Any) -> None:
    print("@" + json.dumps(said), flush=True)


def where(batches):
    """Run in a task: which process of which executor it is, where it has the package from, and what it got."""
    import os
    import sys

    import pyarrow as pa
    from pyspark import SparkFiles  # noqa: F401

    import rmqstore._core

    rows = 0
    for batch in batches:
        rows += batch.num_rows
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "pid": os.getpid(),
                    "folder": os.getcwd(),
                    "python": sys.executable,
                    "core": rmqstore._core.__file__,
                    "path": os.pathsep.join(sys.path),
                    "rows": batch.num_rows,
                }
            ]
        )


def batch(spark: Any, path: str, partition_bytes: int) -> dict[str, Any]:
    """Return the executors of the tasks of a job, and their rows."""
    frame = spark.read.format("rocketmq-store").option("partition_bytes", partition_bytes).load(path).cache()
    schema = "pid bigint, folder string, python string, core string, path string, rows bigint"
    # The cache keeps rows where they were read.
    tasks = [row.asDict() for row in frame.mapInArrow(where, schema).collect()]
    rows = [[row.phy_offset, row.topic, row.queue_offset, bytes(row.body).hex()] for row in frame.collect()]
    frame.unpersist()
    return {"tasks": tasks, "rows": rows}


def stream(spark: Any, path: str, output: str, checkpoint: str, max_bytes: int) -> dict[str, Any]:
    """Follow a store to its end in small batches into files; print every batch."""
    source = spark.readStream.format("rocketmq-store").schema("phy_offset bigint, body binary")
    frame = source.option("max_bytes_per_trigger", max_bytes).option("partition_bytes", max_bytes // 4).load(path)
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start(output)
    )
    told = -1
    while not query.awaitTermination(0.1):
        progress = query.lastProgress
        if progress is not None and progress["batchId"] > told:
            told = progress["batchId"]
            say(batch=told)
    rows = [
        [row.phy_offset, bytes(row.body).hex()] for row in spark.read.parquet(output).orderBy("phy_offset").collect()
    ]
    return {"rows": rows, "batches": len(query.recentProgress)}


def rebuild(spark: Any, path: str, output: str) -> dict[str, Any]:
    """Rebuild a store into another folder."""
    import rmqstore.spark

    report = rmqstore.spark.rebuild(spark, path, output=output)
    return {"records": report.records, "units": report.units, "index_entries": report.index_entries}


def others(spark: Any, path: str, folder: str, keys: list[str], geometry: dict[str, int]) -> dict[str, Any]:
    """Query, append and bulk load; what they say, and where their results lie below `folder`."""
    import rmqstore.spark
    from rmqstore import StoreConfig

    hits = rmqstore.spark.query(spark, path, "Orders", keys, ["phy_offset"]).collect()
    named = spark.createDataFrame([(key,) for key in keys], "key string")
    hits_by_frame = rmqstore.spark.query(spark, path, "Orders", named, ["phy_offset"]).collect()
    schema = "topic string, queue_id int, keys array<string>, tags string, body binary"
    schema += ", store_timestamp timestamp, phy_offset bigint"
    frame = spark.read.format("rocketmq-store").schema(schema).option("partition_bytes", "256k").load(path)
    options = {name: str(value) for name, value in geometry.items()}
    frame.drop("store_timestamp", "phy_offset").write.format("rocketmq-store").mode("append").options(**options).save(
        os.path.join(folder, "appended")
    )
    loaded = rmqstore.spark.bulk_load(
        frame.select("topic", "queue_id", "keys", "tags", "body", "store_timestamp", as_time("phy_offset")),
        os.path.join(folder, "loaded"),
        config=StoreConfig(**geometry),
        order_by=("store_timestamp", "born_timestamp"),
    )
    return {
        "hits": sorted([row.key, row.phy_offset] for row in hits),
        "hits_by_frame": sorted([row.key, row.phy_offset] for row in hits_by_frame),
        "loaded": loaded.records,
    }


def as_time(name: str) -> Any:
    """The offset of a record as a time, by which rows of one store time are told apart."""
    from pyspark.sql import functions as F

    return F.timestamp_millis(name).alias("born_timestamp")


def executors(spark: Any) -> dict[str, Any]:
    """How many executors there are."""
    # The driver is in this list too.
    return {"executors": spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1}


JOBS = {"batch": batch, "stream": stream, "rebuild": rebuild, "others": others, "executors": executors}


def main() -> None:
    from pyspark.sql import SparkSession

    import rmqstore.spark

    builder = SparkSession.builder.master(sys.argv[1]).appName("rmqstore cluster tests")
    for name, value in json.loads(os.environ["RMQSTORE_SPARK_SETTINGS"]).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    rmqstore.spark.register(spark)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            say(**JOBS[order.pop("job")](spark, **order))
        except Exception:
            say(error=traceback.format_exc()[-4000:])


if __name__ == "__main__":
    main()
