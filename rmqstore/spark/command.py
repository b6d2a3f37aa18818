"""The command line of a store with Spark: ``rmqstore spark …``, and the same as a program for ``spark-submit``.

Owns options, printing and exit codes, which are those of `rmqstore.cli`; every answer comes from the functions of
`rmqstore.spark`.  It imports pyspark when a command runs, so that ``--help`` needs neither pyspark nor Java.  Only ``rebuild``
writes into a store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.group import FOUND_NOTHING, StoreGroup, nothing
from rmqstore.cli.options import (
    GIVEN_OPTIONS,
    Given,
    begin_option,
    end_option,
    gathered,
    optioned,
    path_argument,
    tags_option,
)
from rmqstore.cli.rebuild import (
    Task,
    agree_to_replace,
    drop_units_option,
    output_option,
    print_rebuild,
    what_option,
    yes_option,
)
from rmqstore.cli.terminal import Printer, escape
from rmqstore.commitlog.commit_log import check_store_root
from rmqstore.config.places import refuse_other_log
from rmqstore.errors import MissingDependencyError
from rmqstore.offline.rebuild import check_config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["main"]

_INSTALL = "pip install 'rmqstore[spark]'"
_GROUPS = ("topic", "queue_id", "tags", "day", "hour")
# How Spark cites an error of ours that was raised in a task, or where Spark planned the job.
_CITED = re.compile(r"rmqstore\.errors\.\w+: (.+?)\s*$", re.MULTILINE)


# -------------------------------------------------------------------------------------------------------- the session


def _cannot(error: Any) -> CannotOpenError:
    # What Spark's error says, without the traces of Java and Python around it.
    text = str(error)
    cited = _CITED.findall(text)
    if cited:
        return CannotOpenError(cited[-1])
    if "JAVA_GATEWAY_EXITED" in text or "Java gateway" in text:
        return CannotOpenError("Spark did not start: it needs Java 17 or later", "Install it, or set JAVA_HOME.")
    lines = [line for line in text.split("JVM stacktrace:")[0].splitlines() if line.strip()]
    return CannotOpenError(lines[0] if lines else type(error).__name__)


@dataclasses.dataclass
class SparkGiven(Given):
    """The options that every command has: those of a store, and where Spark runs."""

    master: str | None = None
    settings: tuple[str, ...] = ()

    def sizes(self, path: str) -> dict[str, Any]:
        """dict: the sizes of the store in `path` that the command line has, as options of the data source."""
        fields = self.overrides()
        refuse_other_log(path, fields.pop("unknown", {}))
        return fields

    @contextlib.contextmanager
    def session(self) -> Iterator[SparkSession]:
        """Yield the session that is there, or a new one, configured by spark-submit if that runs; a new one ends with the block."""
        try:
            import pyarrow  # noqa: F401
            from pyspark.errors import PySparkException
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise MissingDependencyError(f"this needs {error.name or 'pyspark'}: install it with {_INSTALL}") from None
        # PySpark 4.3 warns of pandas 3 at every start; nothing here goes through pandas.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        # A task must run a Python that has this package; where nothing else is said, this one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.appName("rmqstore")
        if not sys.stderr.isatty():
            builder = builder.config("spark.ui.showConsoleProgress", "false")
        if self.master is not None:
            builder = builder.master(self.master)
        for setting in self.settings:
            name, separator, value = setting.partition("=")
            if not separator:
                raise click.BadParameter(f"{setting!r} has no '=': write NAME=VALUE", param_hint="--conf")
            builder = builder.config(name.strip(), value.strip())
        try:
            there = SparkSession.getActiveSession()
            spark = builder.getOrCreate() if there is None else there
            if there is None and not any(setting.startswith("spark.log.level") for setting in self.settings):
                with contextlib.suppress(AttributeError, PySparkException):
                    spark.sparkContext.setLogLevel("OFF")
            try:
                yield spark
            finally:
                if there is None:
                    spark.stop()
        except PySparkException as error:
            raise _cannot(error) from None
        except Exception as error:
            # Py4J's own, which are not PySpark exceptions.
            if type(error).__module__.partition(".")[0] == "py4j":
                raise _cannot(error) from None
            raise


def spark_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--master``, ``--conf`` and the options of a store; the command gets them as one argument `given`."""

    @functools.wraps(function)
    def checked(path: str, **others: Any) -> Any:
        # Spark takes seconds to start, and a name is soon mistyped.
        check_store_root(path)
        return function(path=path, **others)

    return optioned(
        gathered(SparkGiven, "given")(checked),
        click.option(
            "--master", help="Where Spark runs, as local[4] or spark://host:7077; by default as Spark is set up."
        ),
        click.option("--conf", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; repeatable."),
        *GIVEN_OPTIONS,
    )


_CHOICE = ("topic", "queue_id", "tags", "begin", "end", "partition_bytes", "corrupt", "columns")


def _choice(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, ())}


def read_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the data source that choose messages; the command gets those that are given as one dict `choice`."""
    return optioned(
        gathered(_choice, "choice", *_CHOICE)(function),
        click.option("--topic", multiple=True, help="Only this topic; repeatable."),
        click.option(
            "--queue", "queue_id", multiple=True, type=click.IntRange(min=0), help="Only this queue; repeatable."
        ),
        tags_option,
        begin_option,
        end_option,
        click.option("--partition-bytes", help="Bytes of log for one task, as 134217728 or 128m (the default)."),
        click.option("--corrupt", type=click.Choice(["fail", "report", "skip"]), help="What damage in the log does."),
    )


@click.group(
    name="spark", cls=StoreGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
def main() -> None:
    """Work on a store with Apache Spark, on this machine or on a cluster.

    PATH is the store's root, under the same name on every machine. Every command but rebuild leaves the store as it is.
    Needs the extra spark (pip install 'rmqstore[spark]') and Java 17 or later.
    """


def _target(output: str) -> str:
    # A relative name is one of this folder, wherever Java believes to be.
    return output if "://" in output or os.path.isabs(output) else Path(output).absolute().as_uri()


# --------------------------------------------------------------------------------------------------------------- count


@main.command(name="count")
@path_argument
@click.option("--by", multiple=True, type=click.Choice(_GROUPS), help="Count in groups of these; repeatable.")
@read_options
@spark_options
def count_command(path: str, by: tuple[str, ...], choice: dict[str, Any], given: SparkGiven) -> None:
    """Count messages, all or by topic, queue, tag, day or hour (UTC)."""
    with given.session() as spark:
        from rmqstore.spark.export import count

        found = count(spark, path, by, **choice, **given.sizes(path))
    groups = found if isinstance(found, dict) else {(): found}
    printer = Printer(given.as_json)
    if given.as_json:
        for group, messages in groups.items():
            names = {name: value.isoformat() if name == "day" else value for name, value in zip(by, group)}
            printer.json_line({"type": "count", **names, "messages": messages})
    elif not by:
        printer.line(str(found))
    elif groups:
        rows = [(*("-" if value is None else str(value) for value in group), n) for group, n in groups.items()]
        printer.table("messages", (*by, "number"), rows, left=len(by))
    if not any(groups.values()):
        nothing("no messages")


# -------------------------------------------------------------------------------------------------------------- export


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files that an export makes."""

    output: str
    format_name: str
    partition_by: tuple[str, ...]
    mode: str


@main.command(name="export")
@path_argument
@click.argument("output")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["parquet", "json", "orc"]),
    default="parquet",
    show_default=True,
    help="JSON has one object a line, with bodies as text or base64.",
)
@click.option(
    "--partition-by",
    multiple=True,
    type=click.Choice([*_GROUPS, "none"]),
    default=("topic", "day"),
    show_default=True,
    help="A level of folders; repeatable, the outermost first. none: one folder.",
)
@click.option("--columns", metavar="A,B", help="Only these columns; by default all.")
@click.option("--mode", type=click.Choice(["errorifexists", "overwrite", "append"]), default="errorifexists",
              show_default=True, help="What happens if OUTPUT is there.")  # fmt: skip
@read_options
@spark_options
@gathered(_Files, "files")
def export_command(path: str, files: _Files, choice: dict[str, Any], given: SparkGiven) -> None:
    """Write messages into files at OUTPUT, a folder or any address that Spark can write to."""
    folders = () if "none" in files.partition_by else files.partition_by
    options = choice | given.sizes(path)
    with given.session() as spark:
        from rmqstore.spark.export import export

        try:
            report = export(spark, path, _target(files.output), files.format_name, folders, files.mode, **options)
        except ValueError as error:
            raise click.UsageError(escape(str(error))) from None
    printer = Printer(given.as_json)
    if given.as_json:
        printer.json_line({"type": "export", **dataclasses.asdict(report)})
    else:
        printer.line(f"wrote {report.messages} messages as {report.format} into {escape(files.output)}")
    if not report.messages:
        click.get_current_context().exit(FOUND_NOTHING)


# ------------------------------------------------------------------------------------------------------------- rebuild


@main.command(name="rebuild")
@path_argument
@what_option
@output_option
@drop_units_option
@yes_option
@spark_options
@gathered(Task, "task")
def rebuild_command(path: str, task: Task, given: SparkGiven) -> None:
    """Rebuild index and consume queues from the commit log, with the tasks of a cluster.

    THIS COMMAND WRITES, as rmqstore rebuild does: without --output it replaces index/ and consumequeue/ of the store, after
    the new files are complete and checked. Every machine must see the store under PATH and may write there. The broker must
    not run. An interrupted rebuild leaves the store as it was: run it again, and it goes on with what was finished.
    """
    kinds = task.what or ("index", "consumequeue")
    config = given.config(path)
    if task.output is None:
        check_config(path, kinds, config, task.drop_units)
    agree_to_replace(path, kinds, task)
    with given.session() as spark:
        from rmqstore.spark.rebuild import rebuild

        report = rebuild(spark, path, kinds, config, task.output, drop_units=task.drop_units)
    print_rebuild(report, task.output or path, given)


if __name__ == "__main__":
    main(prog_name="rmqstore spark")
