"""rmqstore sql: SQL queries by Polars over the tables of `rmqstore.polars`."""

from __future__ import annotations

import decimal
import math
import os
import re
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.group import exit_not_found, orderly_end
from rmqstore.cli.options import (
    Given,
    TableFile,
    begin_option,
    end_option,
    path_argument,
    selecting,
    store_options,
    table_file_options,
)
from rmqstore.cli.terminal import Printer, escape, format_size, note
from rmqstore.files.output_file import OutputFile
from rmqstore.polars.scan import import_polars, scan_tables
from rmqstore.selection import Selection

if TYPE_CHECKING:
    import polars as pl

# The most rows of a table, and characters of a value.
_ROWS_SHOWN, _TEXT_SHOWN = 1000, 200
# The first word of a statement, after comments and parentheses.
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*(\w*)", re.DOTALL)
_ASKING = {"select", "with", "from", "values", "show", "explain", "table"}
# The prefix of errors from a source in Polars before 2.0.
_OF_SOURCE = re.compile(r"caught exception during execution of a Python source, exception: (?:\w+: )?")
# The suffix of errors from the operating system.
_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")


@click.command()
@path_argument
@click.argument("query", metavar="QUERY")
@begin_option
@end_option
@table_file_options("Write the result to this .parquet, .arrow, .csv or .jsonl file.")
@store_options
@selecting("begin", "end")
def sql(path: str, query: str, selection: Selection, file: TableFile, given: Given) -> None:
    """Query a store in SQL; the tables are messages, queues, index_entries and consumers.

    Only the columns in QUERY are read. Conditions on topic, queue_id, queue_offset, phy_offset, keys ('k' = any(keys)),
    unique_key, tags and store_timestamp limit the messages that are read. Times in QUERY are UTC unless they have a time
    zone.
    """
    polars = import_polars("SQL needs", "sql")
    word = _FIRST_WORD.match(query)
    if word is None or word[1].lower() not in _ASKING:
        raise click.UsageError("QUERY must begin with SELECT or WITH: the store is read-only")
    kind, made = file.kind(), file.make(path)
    with given.open(path) as store:
        if store.unserved is not None and not store.queues.unseen and "queues" in query.lower():
            note(
                f"messages after phy offset {store.unserved[0]} are not in a queue, and not counted in the table queues"
            )
        tables = scan_tables(store)
        for compare, time in ((polars.Expr.ge, selection.begin), (polars.Expr.le, selection.end)):
            if time is not None:
                moment = polars.lit(time).cast(polars.Datetime("ms", "UTC"))
                tables["messages"] = tables["messages"].filter(compare(polars.col("store_timestamp"), moment))
        try:
            answer = polars.SQLContext(tables).execute(query)
            if made is not None and kind is not None:
                size = _write(answer, made, kind, file)
                note(f"wrote {file.output} ({format_size(size)})")
                return
            frame = answer.collect(engine="streaming")
        except polars.exceptions.PolarsError as error:
            _refuse(error, sorted(tables))
    if not frame.height:
        exit_not_found("no rows")
    _show(frame, Printer(given.as_json))


def _refuse(error: Exception, tables: list[str]) -> NoReturn:
    # Without Polars' query plan.
    text = str(error)
    of_source = _OF_SOURCE.match(text)
    if of_source is not None:
        raise CannotOpenError(text[of_source.end() :]) from None
    of_system = _OF_SYSTEM.search(text)
    if of_system is not None:
        # The output: Polars reads no file here.
        raise OSError(int(of_system[1]), os.strerror(int(of_system[1]))) from None
    text = text.partition("\n\n")[0].strip()
    if re.match("relation '.*' was not found", text):
        text += f"; the tables are {', '.join(tables)}"
    elif "Datetime(" in text and "comparison" in text:
        text = (
            "store times have a time zone, the other side of the comparison has none: write '2026-11-21 05:30:00' (UTC) or "
            "'2026-11-21T05:30:00+01:00', or give --begin '2h ago'"
        )
    raise click.UsageError(escape(text)) from None


def _write(answer: pl.LazyFrame, made: OutputFile, kind: str, table: TableFile) -> int:
    with orderly_end(made.abandon), made as file:
        if kind == "parquet":
            # Row group by row group, never in memory as a whole.
            answer.sink_parquet(file)
        elif kind == "arrow":
            answer.sink_ipc(file)
        else:
            frame = answer.collect(engine="streaming")
            rows = ([_value(each) for each in row] for row in _plain(frame).iter_rows())
            table.write_rows(file, kind, frame.columns, rows)
        return file.tell()


def _show(frame: pl.DataFrame, printer: Printer) -> None:
    if printer.as_json:
        for row in _plain(frame).iter_rows():
            printer.json_line({name: _value(value) for name, value in zip(frame.columns, row)})
        return
    left = {place for place, each in enumerate(frame.dtypes) if not each.is_numeric()}
    times = {place for place, each in enumerate(frame.dtypes) if getattr(each, "time_zone", None)}
    rows = [
        [
            printer.time(value) if place in times and value is not None else _cell(value)
            for place, value in enumerate(row)
        ]
        for row in _plain(frame.head(_ROWS_SHOWN)).iter_rows()
    ]
    printer.table("result", frame.columns, rows, left=left)
    if frame.height > _ROWS_SHOWN:
        note(f"there are {frame.height} rows; give --json or -O FILE for all")


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    # Times and durations in ms, as in the JSON of other commands, dates as text: born times may be any number, and Polars
    # crashes the process at a year that Python's calendar lacks.
    import polars

    def nested(dtype: Any, leaf: Any) -> Any:
        if isinstance(dtype, polars.List):
            return polars.List(nested(dtype.inner, leaf))
        if isinstance(dtype, polars.Struct):
            return polars.Struct({each.name: nested(each.dtype, leaf) for each in dtype.fields})
        return leaf(dtype)

    def in_ms(dtype: Any) -> Any:
        if isinstance(dtype, polars.Datetime):
            return polars.Datetime("ms", dtype.time_zone)
        return polars.Duration("ms") if isinstance(dtype, polars.Duration) else dtype

    def plain(dtype: Any) -> Any:
        if isinstance(dtype, polars.Duration) or getattr(dtype, "time_zone", None):
            return polars.Int64
        return polars.String if dtype.is_temporal() else dtype

    return polars.DataFrame([each.cast(nested(each.dtype, in_ms)).cast(nested(each.dtype, plain)) for each in frame])


def _value(value: Any) -> Any:
    # As in the JSON of other commands.
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "\\x" + value.hex()
    if isinstance(value, dict):
        return {name: _value(each) for name, each in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(each, dict) and each.keys() == {"key", "value"} for each in value):
            # A map in Polars before 2.0.
            return {each["key"]: _value(each["value"]) for each in value}
        return [_value(each) for each in value]
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no NaN and no infinity.
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _cell(value: Any) -> str:
    plain = _value(value)
    if isinstance(plain, list):
        text = " ".join(_cell(each) for each in value)
    elif isinstance(plain, dict):
        text = " ".join(f"{name}={each}" for name, each in plain.items())
    else:
        text = "-" if plain is None else str(plain)
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."
