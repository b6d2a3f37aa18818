"""A store's messages as files that any tool reads, and their number.

It reads the store through the data source and writes through Spark only, to wherever Spark can; it never changes the store.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F

from rmqstore.errors import StoreError
from rmqstore.files.output_file import check_outside
from rmqstore.spark.source import FORMAT, ensure_registered

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["FORMATS", "PARTITIONS", "ExportReport", "check_target", "count", "export", "option_text", "read"]

FORMATS = ("parquet", "json", "orc")
PARTITIONS = ("topic", "queue_id", "tags", "day", "hour")
SAVE_MODES = ("errorifexists", "overwrite", "append")

_HOUR = 3_600_000
# Columns that hold bytes.
_BODIES = ("body", "body_stored")


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote: rows, with ``corrupt=report`` also those of damage; columns of the files, then of the folders."""

    output: str
    format: str
    messages: int
    columns: tuple[str, ...]


def option_text(name: str, value: Any) -> str:
    """str: a value as the data source takes it; several are joined by its separators."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple, set, frozenset)):
        return ("||" if name == "tags" else ",").join(str(each) for each in value)
    return str(value)


def read(spark: SparkSession, path: str | os.PathLike[str], options: Mapping[str, Any]) -> DataFrame:
    """DataFrame: the store in `path`, with options of the data source that are not None."""
    ensure_registered(spark)
    texts = {name: option_text(name, value) for name, value in options.items() if value is not None}
    return spark.read.format(FORMAT).options(**texts).load(os.path.abspath(os.fspath(path)))


def check_target(output: str | os.PathLike[str], path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise StoreError for an output on this machine that is in the store, or that holds it and is overwritten by Spark."""
    address = urllib.parse.urlsplit(os.fspath(output))
    if address.scheme not in ("", "file"):
        return
    target = urllib.parse.unquote(address.path) if address.scheme else os.fspath(output)
    check_outside(target, path)
    try:
        if overwrite:
            check_outside(path, target)
    except StoreError:
        raise StoreError("the store lies in the output; give another folder", target) from None


def derived(name: str) -> Column:
    """Column: ``day`` (a date) or ``hour`` (0 to 23) of the store time, in UTC, whatever time zone the session has."""
    hours = F.floor(F.unix_millis("store_timestamp") / F.lit(_HOUR))
    if name == "day":
        return F.date_from_unix_date(F.floor(hours / F.lit(24)).cast("int"))
    return F.pmod(hours, F.lit(24)).cast("int")


def _as_text(frame: DataFrame) -> DataFrame:
    # Bytes as text where they are UTF-8, else as base64, with a column after each that says which.
    columns: list[Any] = []
    for name in frame.columns:
        if name not in _BODIES:
            columns.append(F.col(name))
            continue
        text = F.col(name).cast("string")
        is_text = F.is_valid_utf8(text)
        # Spark breaks base64 into lines, depending on its version and settings.
        coded = F.translate(F.base64(name), "\r\n", "")
        columns.append(F.when(is_text, text).otherwise(coded).alias(name))
        columns.append(
            F.when(F.col(name).isNull(), F.lit(None))
            .when(is_text, "utf-8")
            .otherwise("base64")
            .alias(f"{name}_encoding")
        )
    return frame.select(columns)


def export(
    spark: SparkSession,
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str = "parquet",
    partition_by: Iterable[str] = ("topic", "day"),
    save_mode: str = "errorifexists",
    **options: Any,
) -> ExportReport:
    """Write the messages of a store into files.

    Bodies are decompressed unless ``decode_body=False``.  In JSON, which has one object a line, a body is text where it is
    UTF-8 and base64 where it is not; ``body_encoding`` is "utf-8" or "base64"; times are ISO 8601 in UTC.  Every task writes
    a file for each folder that it has rows for.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    path : str
        The store.
    output : str
        A folder, or an address of any file system that Spark can write to.
    format : {"parquet", "json", "orc"}
    partition_by : iterable of str
        The folders, the outermost first: of ``topic``, ``queue_id``, ``tags``, ``day`` and ``hour``, of the store time in UTC.
        Nothing writes into one folder.
    save_mode : {"errorifexists", "overwrite", "append"}
        What to do where `output` is there already, as in Spark.
    **options
        Of the data source: ``topic``, ``columns``, ``corrupt`` and so on; lists where there may be several.

    Returns
    -------
    ExportReport

    Raises
    ------
    StoreError
        `output` is in the store, or holds it and would be overwritten.
    ValueError
        A format, folder or `save_mode` that there is not.
    pyspark.errors.PySparkException
        The store cannot be read, or `output` not written; names file and position of damage in the store.
    """
    check_target(output, path, overwrite=save_mode == "overwrite")
    folders = list(partition_by)
    for value, what, known in [(format, "format", FORMATS), (save_mode, "save_mode", SAVE_MODES)]:
        if value not in known:
            raise ValueError(f"{what} is {value!r}; give {', '.join(known[:-1])} or {known[-1]}")
    for name in folders:
        if name not in PARTITIONS or folders.count(name) > 1:
            raise ValueError(f"partition_by has {name!r}; give any of {', '.join(PARTITIONS)}, each once")
    frame = read(spark, path, _with_columns_of(folders, options))
    frame = frame.withColumns({name: derived(name) for name in folders if name in ("day", "hour")})
    if options.get("columns") is not None:
        # What was read for the folders alone is in no file.
        asked = option_text("columns", options["columns"]).split(",")
        kept = {name.strip() for name in asked} | {"_corrupt"} | set(folders)
        frame = frame.select([name for name in frame.columns if name in kept])
    if format == "json":
        frame = _as_text(frame)
    rows = Observation()
    writer = frame.observe(rows, F.count(F.lit(1)).alias("messages")).write.mode(save_mode)
    if folders:
        writer = writer.partitionBy(*folders)
    if format == "json":
        # Every object has every name, so that the first few tell the schema.
        writer = writer.option("timeZone", "UTC").option("ignoreNullFields", "false")
    target = os.fspath(output)
    writer.format(format).save(target)
    files = [name for name in frame.columns if name not in folders]
    return ExportReport(target, format, int(rows.get["messages"]), (*files, *folders))


def _with_columns_of(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    # The options, with what the folders are made of among the columns.
    if options.get("columns") is None:
        return dict(options)
    columns = [each.strip() for each in option_text("columns", options["columns"]).split(",") if each.strip()]
    needed = ["store_timestamp" if name in ("day", "hour") else name for name in names]
    return {**options, "columns": [*columns, *(name for name in dict.fromkeys(needed) if name not in columns)]}


def count(
    spark: SparkSession, path: str | os.PathLike[str], by: Iterable[str] = (), **options: Any
) -> int | dict[tuple[Any, ...], int]:
    """Count the messages of a store, all or in groups; no body is read.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    path : str
    by : iterable of str
        Of ``topic``, ``queue_id``, ``tags``, ``day`` and ``hour``, of the store time in UTC.
    **options
        Of the data source.

    Returns
    -------
    int, or dict of tuple to int
        The number of messages; with `by` that of each group, in its order.

    Raises
    ------
    ValueError
        `by` has something that there is not.
    pyspark.errors.PySparkException
        The store cannot be read.
    """
    groups = list(by)
    for name in groups:
        if name not in PARTITIONS or groups.count(name) > 1:
            raise ValueError(f"by has {name!r}; give any of {', '.join(PARTITIONS)}, each once")
    needed = dict.fromkeys("store_timestamp" if name in ("day", "hour") else name for name in groups)
    frame = read(spark, path, {**options, "columns": list(needed) or ["phy_offset"]})
    if not groups:
        return frame.count()
    frame = frame.withColumns({name: derived(name) for name in groups if name in ("day", "hour")})
    found = frame.groupBy(*groups).agg(F.count(F.lit(1)).alias("messages")).collect()
    rows = {tuple(row[name] for name in groups): int(row["messages"]) for row in found}
    return dict(sorted(rows.items(), key=lambda each: [(value is not None, value) for value in each[0]]))
