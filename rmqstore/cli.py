"""The command line: a diagnostic instrument for a store on disk.

Owns options, printing and exit codes; every answer comes from the package's public functions.  Invariants:

- Only ``rebuild``, ``recover``, ``offsets set`` and ``spark rebuild`` write into a store (and ``demo``, into one of its own);
  every other command opens read-only.
- Exit codes: 0 fine, 1 findings or nothing found, 2 wrong usage, 3 the store cannot be opened or read.
- Text from a store never reaches the terminal raw: control and other invisible characters are escaped.
- ``--json`` prints one object a line on stdout and nothing else there; notes, progress and errors go to stderr.

A new command is a function below `main`, or, if its imports are heavy, a line in `_LAZY_COMMANDS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import click

from rmqstore._core import IndexLayout
from rmqstore._version import __version__
from rmqstore.commit_log import Blank, Damage
from rmqstore.config import StoreConfig, parse_java_properties
from rmqstore.consume_queue import BatchConsumeQueue
from rmqstore.consume_queue_store import AnyConsumeQueue
from rmqstore.consumer_offset import ConsumerOffsets
from rmqstore.describe import StoreDescription, describe
from rmqstore.errors import CorruptionError, GeometryError, OffsetOutOfRangeError, StoreError
from rmqstore.index_file import IndexFile
from rmqstore.message import MessageExt
from rmqstore.message_store import MessageStore
from rmqstore.rebuild import REBUILD_DIRECTORY, RebuildReport, rebuild
from rmqstore.recovery import RECOVERY_MODES
from rmqstore.store_lock import StoreLock
from rmqstore.verify import verify

__all__ = ["main"]

FOUND_NOTHING = 1
WRONG_USAGE = 2
CANNOT_OPEN = 3
# As a shell reports a program that these signals ended.
INTERRUPTED = 128 + 2
READER_GONE = 128 + 13

# Commands whose modules cost start-up time, or that stand to the right of this one: loaded when they are asked for.
_LAZY_COMMANDS = {
    "demo": ("rmqstore.demo", "Run the main job on a real broker's store, with checks and rates."),
    "rabbitmq": (
        "rmqstore.rabbitmq_command",
        "Look into RabbitMQ's classic queues, repair them, export and import messages.",
    ),
    "spark": ("rmqstore.spark.command", "Count, export, profile, query or rebuild a store with Apache Spark."),
}

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_AGO = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|sec|m|min|h|d|w)\s+ago\s*")
_AGO_UNITS = {
    "ms": 1,
    "s": 1000,
    "sec": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
_PREVIEW = 60
_BODY_SHOWN = 1024


# ------------------------------------------------------------------------------------------------------------ printing


def escape(text: str) -> str:
    """str: `text` on one line, with what a terminal could obey or hide (control, format, surrogates) as \\x.. or \\u...."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escaped(char) for char in text
    )


def _escaped(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def format_time(timestamp: int | None) -> str:
    """str: ms since epoch as ISO 8601 in the local zone; the bare number where no calendar reaches."""
    if timestamp is None:
        return "-"
    try:
        moment = (_EPOCH + datetime.timedelta(milliseconds=timestamp)).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{timestamp} ms"
    return moment.isoformat(timespec="milliseconds")


def format_size(size: int) -> str:
    """str: bytes for people, in units of 1024."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def parse_time(text: str) -> int:
    """int: ms since epoch of an ISO time (local zone unless it names one), of ms since epoch, or of ``2h ago``.

    Raises
    ------
    ValueError
        It is none of them.
    """
    text = text.strip()
    if re.fullmatch("-?[0-9]{1,19}", text):
        return int(text)
    if text == "now":
        return time.time_ns() // 1_000_000
    ago = _AGO.fullmatch(text)
    if ago:
        return time.time_ns() // 1_000_000 - round(float(ago[1]) * _AGO_UNITS[ago[2]])
    # Python 3.10 knows neither Z nor fractions of other than 3 or 6 digits.
    fraction = re.compile(r"\.([0-9]{1,9})(?=$|[-+zZ])")
    iso = fraction.sub(lambda match: "." + match[1].ljust(6, "0")[:6], re.sub("[zZ]$", "+00:00", text))
    try:
        moment = datetime.datetime.fromisoformat(iso)
        return (moment.astimezone(datetime.timezone.utc) - _EPOCH) // datetime.timedelta(milliseconds=1)
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is no time: write 2026-11-21T05:32:39.596+00:00 (local zone without one), ms since epoch, or '2h ago'"
        ) from None


class _TimeType(click.ParamType):
    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = _TimeType()
# What JSON leaves raw although a terminal may obey or hide it; inside a JSON string \u.... means the same.
_RAW_IN_JSON = re.compile(
    "[\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


class Printer:
    """Prints answers on stdout: tables and lines for people, or one JSON object a line."""

    def __init__(self, as_json: bool):
        self.as_json = as_json
        self.terminal = not as_json and sys.stdout.isatty()
        self._ascii = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"

    def line(self, text: str = "") -> None:
        """One line, which the caller has escaped."""
        sys.stdout.write(text + "\n")

    def json_line(self, value: dict[str, Any]) -> None:
        """One JSON object."""
        text = json.dumps(value, ensure_ascii=self._ascii, separators=(",", ":"))
        sys.stdout.write(_RAW_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one a line."""
        rows = list(pairs)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            text = f"{name:<{width}}  {escape(value)}".rstrip()
            if self.terminal:
                columns = max(shutil.get_terminal_size().columns, width + 20)
                text = textwrap.fill(text, columns, subsequent_indent=" " * (width + 2), drop_whitespace=False)
            self.line(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> None:
        """A table; all columns but the first `left` hold numbers.  Sized to a terminal, plain columns elsewhere."""
        cells = [[escape(str(cell)) for cell in row] for row in rows]
        if self.terminal:
            from rich import box
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text

            shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
            for number, column in enumerate(columns):
                shown.add_column(column, justify="left" if number < left else "right", overflow="fold")
            for row in cells:
                # Text, so that nothing in a store is taken for markup.
                shown.add_row(*(Text(cell) for cell in row))
            Console(file=sys.stdout, highlight=False).print(shown)
            return
        widths = [max([len(column), *(len(row[number]) for row in cells)]) for number, column in enumerate(columns)]
        self.line(f"\n{title}")
        for row in [list(columns), *cells]:
            parts = (
                f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths))
            )
            self.line(("  " + "  ".join(parts)).rstrip())


def note(text: str) -> None:
    """A line for people on stderr, after all that stdout has got so far."""
    sys.stdout.flush()
    click.echo(escape(text), err=True)


class Progress:
    """A bar on stderr, drawn only if that is a terminal; until it is called it shows that something goes on."""

    def __init__(self, what: str):
        self.what = what
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                console=Console(file=sys.stderr), transient=True, redirect_stdout=sys.stdout.isatty(), redirect_stderr=False,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """So much of `total` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


# -------------------------------------------------------------------------------------------------- errors and groups


class CannotOpenError(click.ClickException):
    """Shown without a traceback, `hint` on a line of its own; exit code 3."""

    exit_code = CANNOT_OPEN

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        # What was printed before it comes first where both streams go to one place.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        super().show(file)

    def format_message(self) -> str:
        return escape(self.message) + (f"\n{self.hint}" if self.hint else "")


def of_error(error: Exception) -> CannotOpenError:
    """CannotOpenError: what an error of the store or of the system says, with what to do at the command line."""
    if isinstance(error, GeometryError):
        return CannotOpenError(
            str(error), "Here an option is given as -o NAME=VALUE, or all with --config broker.conf."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return CannotOpenError(f"{error.strerror or type(error).__name__} [{os.fsdecode(error.filename)}]")
    return CannotOpenError(str(error))


class StoreGroup(click.Group):
    """Maps what goes wrong to exit codes, and loads commands of `lazy_commands` when they are used."""

    lazy_commands: dict[str, tuple[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy_commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy_commands:
            return importlib.import_module(self.lazy_commands[cmd_name][0]).main
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self.lazy_commands:
                rows.append((name, self.lazy_commands[name][1]))
            else:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append((name, command.get_short_help_str(90)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # What the terminal's encoding lacks is escaped instead of failing half-way.
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader (head, a pager) has seen enough; what is buffered must not fail once more at exit.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(READER_GONE)
        except KeyboardInterrupt:
            note("interrupted")
            ctx.exit(INTERRUPTED)
        except (StoreError, OSError) as error:
            raise of_error(error) from None


class _MainGroup(StoreGroup):
    lazy_commands = _LAZY_COMMANDS


# -------------------------------------------------------------------------------------------------- config and opening


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


# mappedFileSizeCommitLog, mapedFileSizeCommitLog (4.x) and mapped_file_size_commit_log are one option.
_OPTIONS = {
    _plain(item.name): item
    for item in dataclasses.fields(StoreConfig)
    if item.name not in ("clock", "assumed", "unknown")
}
_OPTIONS |= {
    name.replace("mapped", "maped", 1): item for name, item in _OPTIONS.items() if name.startswith("mappedfile")
}


def _option_value(name: str, text: str) -> tuple[str, Any]:
    """(field of StoreConfig, value) of a name in either spelling."""
    item = _OPTIONS.get(_plain(name))
    if item is None:
        raise click.BadParameter(
            f"there is no option {name!r}; see the fields of rmqstore.StoreConfig", param_hint="-o"
        )
    text = text.strip()
    if item.type == "bool":
        if text.lower() not in ("true", "false"):
            raise click.BadParameter(f"{name} is {text!r}: write true or false", param_hint="-o")
        return item.name, text.lower() == "true"
    if item.type == "int":
        if not re.fullmatch("[+-]?[0-9]{1,19}", text):
            raise click.BadParameter(f"{name} is {text!r}: write a whole number", param_hint="-o")
        return item.name, int(text)
    return item.name, text


def _overrides(config_file: str | None, options: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if config_file is not None:
        with open(config_file, encoding="iso-8859-1", newline="") as file:
            names = {name for name, _, _ in parse_java_properties(file.read(), config_file)}
        config = StoreConfig.from_properties(config_file)
        for name in names:
            item = _OPTIONS.get(_plain(name))
            if item is not None and name not in config.unknown:
                values[item.name] = getattr(config, item.name)
        if names & {"brokerIP1", "listenPort"}:
            values["store_host"] = config.store_host
    for option in options:
        name, separator, text = option.partition("=")
        if not separator:
            raise click.BadParameter(f"{option!r} has no '=': write NAME=VALUE", param_hint="-o")
        field, value = _option_value(name.strip(), text)
        values[field] = value
    return values


def _config(path: str, config_file: str | None, options: Sequence[str]) -> StoreConfig:
    """The store's config: what its files say, overridden by the broker.conf and then by the options."""
    try:
        config = StoreConfig.infer(path, **_overrides(config_file, options))
    except StoreError:
        raise
    except ValueError as error:
        raise click.UsageError(escape(str(error))) from None
    if config_file is not None:
        # An option that neither the files nor its broker.conf tell has RocketMQ's default: a broker takes it too.
        rocketmq = StoreConfig.from_properties({})
        known = {name: getattr(rocketmq, name) for name in config.assumed if name != "index_tags"}
        config = config.replace(**known)
    return config


def note_assumed(config: StoreConfig, names: Iterable[str]) -> None:
    for name in names:
        if name in config.assumed:
            note(f"note: the store does not tell {name}; {getattr(config, name)!r} is assumed (give -o {name}=...)")


@dataclasses.dataclass
class Given:
    """The options that every command on a store has."""

    config_file: str | None
    options: tuple[str, ...]
    as_json: bool

    def overrides(self) -> dict[str, Any]:
        """dict: the fields of StoreConfig that the options say, of the broker.conf and of each ``-o``."""
        return _overrides(self.config_file, self.options)

    def config(self, path: str) -> StoreConfig:
        """StoreConfig: that of the store in `path`."""
        return _config(path, self.config_file, self.options)

    def open(self, path: str) -> MessageStore:
        return MessageStore.open(path, config=self.config(path), read_only=True)


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config``, ``-o`` and ``--json``; the command gets them as one argument `given`."""

    def wrapped(config_file: str | None, options: tuple[str, ...], as_json: bool, **others: Any) -> Any:
        return function(given=Given(config_file, options, as_json), **others)

    wrapped.__doc__ = function.__doc__
    wrapped.__name__ = function.__name__
    wrapped.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    name_help = "An option of the store, spelled as in StoreConfig or in RocketMQ; repeatable."
    conf_type = click.Path(exists=True, dir_okay=False)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
        click.option("-o", "options", multiple=True, metavar="NAME=VALUE", help=name_help),
        click.option("--config", "config_file", type=conf_type, help="The broker's broker.conf."),
    ):
        wrapped = option(wrapped)
    return wrapped


path_argument = click.argument("path", type=click.Path())


@click.group(
    name="rmqstore", cls=_MainGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="rmqstore")
def main() -> None:
    """Look into, check and mend the on-disk store of Apache RocketMQ.

    PATH is the store's root (RocketMQ's storePathRootDir, the folder that holds commitlog/). Every command but rebuild
    opens it read-only, locks nothing and works beside a running broker.

    Exit codes: 0 fine, 1 findings or nothing found, 2 wrong usage, 3 the store cannot be opened.
    """


# ---------------------------------------------------------------------------------------------------------------- info


@main.command()
@path_argument
@store_options
def info(path: str, given: Given) -> None:
    """Describe a store: geometry, log, queues, index, checkpoint, consumers."""
    description = describe(path, given.config(path))
    printer = Printer(given.as_json)
    if given.as_json:
        printer.json_line(_info_object(description))
    else:
        _print_info(printer, description)


def _config_object(config: StoreConfig) -> dict[str, Any]:
    left_out = ("clock", "assumed", "unknown")
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.name not in left_out}


def _progress_rows(description: StoreDescription) -> list[tuple[str, str, int, int, int | None]]:
    """(group, topic, queue id, offset, messages that are left or None for a queue that is not there)."""
    ends = {(queue.topic, queue.queue_id): queue.max_queue_offset for queue in description.queues}
    rows: list[tuple[str, str, int, int, int | None]] = []
    for (group, topic), queues in sorted(description.consumer_offsets.items()):
        for queue_id, offset in sorted(queues.items()):
            end = ends.get((topic, queue_id))
            rows.append((group, topic, queue_id, offset, None if end is None else end - offset))
    return rows


def _info_object(description: StoreDescription) -> dict[str, Any]:
    log = description.commit_log
    return {
        "path": description.path,
        "clean": description.clean,
        "config": _config_object(description.config),
        "assumed": list(description.config.assumed),
        "commit_log": {**dataclasses.asdict(log), "size": log.max_offset - log.min_offset},
        "topics": list(description.topics),
        "queues": [
            {**dataclasses.asdict(queue), "messages": queue.max_queue_offset - queue.min_queue_offset}
            for queue in description.queues
        ],
        "index_files": [dataclasses.asdict(index) for index in description.index_files],
        "checkpoint": dataclasses.asdict(description.checkpoint),
        "consumer_offsets": [
            dict(zip(("group", "topic", "queue_id", "offset", "lag"), row)) for row in _progress_rows(description)
        ],
    }


def _print_info(printer: Printer, description: StoreDescription) -> None:
    log, config, point = description.commit_log, description.config, description.checkpoint
    printer.fields(
        [
            ("store", description.path),
            ("state", "clean" if description.clean else "in use, or not closed in order (there is an abort file)"),
            ("commit log", f"{log.max_offset - log.min_offset} bytes ({format_size(log.max_offset - log.min_offset)})"),
            ("  phy offsets", f"{log.min_offset} to {log.max_offset}"),
            ("  segments", f"{log.segments} of {log.segment_size} bytes ({format_size(log.segment_size)})"),
            ("  first stored", format_time(log.first_store_timestamp)),
            ("  last stored", format_time(log.last_store_timestamp)),
            ("queue files", f"{config.consume_queue_file_size} bytes, {config.consume_queue_file_size // 20} units"),
            ("index files", f"{config.index_file_size} bytes, {config.max_hash_slot_num} slots, {config.max_index_num} entries"),
            ("index of tags", "yes" if config.index_tags else "no"),
            ("store host", config.store_host),
            ("assumed", ", ".join(config.assumed) or "nothing"),
        ]
    )  # fmt: skip
    printer.table(
        "queues",
        ("topic", "kind", "queue", "min", "max", "messages", "files"),
        [
            (
                queue.topic, queue.kind, queue.queue_id, queue.min_queue_offset, queue.max_queue_offset,
                queue.max_queue_offset - queue.min_queue_offset, queue.files,
            )
            for queue in description.queues
        ],
        left=2,
    )  # fmt: skip
    printer.table(
        "index files",
        ("name", "first entry", "last entry", "entries", "full", "slots used"),
        [
            (
                index.name, format_time(index.begin_timestamp), format_time(index.end_timestamp), index.entries,
                f"{100 * index.entries / max(index.capacity, 1):.1f} %", index.used_slots,
            )
            for index in description.index_files
        ],
        left=3,
    )  # fmt: skip
    printer.table(
        "checkpoint",
        ("field", "value"),
        [
            (item.name, _checkpoint_value(item.name, getattr(point, item.name)))
            for item in dataclasses.fields(point)
        ],
        left=2,
    )  # fmt: skip
    rows = _progress_rows(description)
    if rows:
        printer.table(
            "consumer progress",
            ("group", "topic", "queue", "offset", "lag"),
            [(*row[:4], "no queue" if row[4] is None else row[4]) for row in rows],
            left=2,
        )


def _checkpoint_value(name: str, value: int) -> str:
    return format_time(value) if name.endswith("timestamp") and value else str(value)


# -------------------------------------------------------------------------------------------------------------- verify


@main.command(name="verify")
@path_argument
@store_options
def verify_command(path: str, given: Given) -> None:
    """Look for everything that is wrong in a store; exit code 1 if anything is.

    Compares the log with itself (lengths, offsets, CRCs) and queues, index, checkpoint and config files with the log.
    """
    config: StoreConfig | None
    try:
        config = given.config(path)
        note_assumed(config, ("message_delay_level", "index_tags"))
    except GeometryError:
        if given.options or given.config_file is not None:
            raise
        config = None  # That the geometry cannot be told is a finding.
    printer = Printer(given.as_json)
    kinds: Counter[str] = Counter()
    with Progress("verifying") as progress:
        for finding in verify(path, config, progress):
            kinds[finding.kind] += 1
            if given.as_json:
                printer.json_line({"type": "finding", **dataclasses.asdict(finding)})
            else:
                printer.line(f"{escape(finding.path)}:{finding.pos}: {finding.kind}: {escape(finding.detail)}")
            sys.stdout.flush()
    if given.as_json:
        printer.json_line({"type": "summary", "findings": kinds.total(), "kinds": dict(sorted(kinds.items()))})
    elif not kinds:
        printer.line("nothing is wrong")
    else:
        printer.table(f"{kinds.total()} findings", ("kind", "number"), sorted(kinds.items()))
    if kinds:
        click.get_current_context().exit(FOUND_NOTHING)


# --------------------------------------------------------------------------------------------------- messages: printing


body_option = click.option(
    "--body", type=click.Choice(["text", "hex", "none"]), default="text", show_default=True, help="How to show bodies."
)


def _message_object(message: MessageExt, body: str) -> dict[str, Any]:
    value = message.to_dict()
    if body == "none":
        del value["body"], value["body_encoding"]
    elif body == "hex":
        raw = message.body_stored if "body_error" in value else message.body
        value |= {"body": raw.hex(), "body_encoding": "hex"}
    return value


def _message_line(message: MessageExt) -> str:
    """What identifies a message, on one line."""
    parts = [
        format_time(message.store_timestamp),
        f"phy {message.phy_offset:>12}",
        f"{message.store_size:>6} B",
        f"{escape(message.topic)}/{message.queue_id} #{message.queue_offset}",
    ]
    if message.tags:
        parts.append(f"tags={escape(message.tags)}")
    if message.keys:
        parts.append(f"keys={escape(' '.join(message.keys))}")
    if message.corrupt:
        parts.append("CORRUPT (CRC)")
    return "  ".join(parts)


def _print_message(printer: Printer, message: MessageExt, body: str) -> None:
    if printer.as_json:
        printer.json_line(_message_object(message, body))
        return
    printer.line(_message_line(message))
    if body == "none":
        return
    try:
        raw = message.body
    except StoreError as error:
        printer.line(f"    the body cannot be decoded: {escape(error.message)}")
        raw = message.body_stored
    rest = len(raw) - _BODY_SHOWN
    shown = raw[:_BODY_SHOWN]
    text = shown.hex(" ") if body == "hex" else escape(shown.decode("utf-8", "backslashreplace"))
    printer.line(f"    {text}" + (f" ... {rest} bytes more, --json shows all" if rest > 0 else ""))


def nothing(text: str) -> NoReturn:
    """Say so on stderr and end with the exit code of findings, or of nothing found."""
    note(text)
    click.get_current_context().exit(FOUND_NOTHING)


# --------------------------------------------------------------------------------------------------------------- query

_INDEX_TYPES = {None: None, "key": "K", "unique": "U", "tag": "T"}


@main.command()
@path_argument
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option(
    "--type",
    "key_type",
    type=click.Choice(["key", "unique", "tag"]),
    help="What KEY is; by default a key or unique key.",
)
@click.option("--begin", type=TIME, help="Stored at or after: ISO time, ms since epoch, or '2h ago'.")
@click.option("--end", type=TIME, help="Stored at or before.")
@click.option("--max-num", type=click.IntRange(min=1), default=64, show_default=True, help="At most so many.")
@click.option("--compat", is_flag=True, help="Answer as RocketMQ's queryMessage does, quirks included.")
@click.option("--id", "msg_id", help="Instead of TOPIC and KEY: an offset message id.")
@click.option("--offset", "phy_offset", type=int, help="Instead of TOPIC and KEY: a phy offset.")
@body_option
@store_options
def query(
    path: str,
    topic: str | None,
    key: str | None,
    key_type: str | None,
    begin: int | None,
    end: int | None,
    max_num: int,
    compat: bool,
    msg_id: str | None,
    phy_offset: int | None,
    body: str,
    given: Given,
) -> None:
    """Find messages by key in the index, newest first, each checked against its message."""
    by_place = (msg_id is not None) + (phy_offset is not None)
    if by_place + (topic is not None) != 1 or (topic is not None and key is None):
        raise click.UsageError("give TOPIC and KEY, or --id, or --offset")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if by_place:
            message = _message_at(store, msg_id, phy_offset)
            _print_message(printer, message, body)
            if message.corrupt:
                nothing("the message does not agree with its CRC")
            return
        assert topic is not None and key is not None
        if key_type == "tag":
            note_assumed(store.config, ("index_tags",))
        found = store.query_message(
            topic, key, max_num, begin, end, index_type=_INDEX_TYPES[key_type], compat=compat
        )  # fmt: skip
        for message in found:
            _print_message(printer, message, body)
        if not found:
            nothing(f"no message of topic {topic} has {key_type or 'key'} {key}")
        if found.truncated:
            note(f"there are more than {max_num}; give --max-num or a time range")


def _message_at(store: MessageStore, msg_id: str | None, phy_offset: int | None) -> MessageExt:
    try:
        if msg_id is not None:
            return store.message_by_id(msg_id)
        assert phy_offset is not None
        message = store.commit_log.look_up(phy_offset)
        # A corrupt message is shown and said to be so; where there is none the error tells why.
        return store.message_at(phy_offset) if message is None else message
    except (OffsetOutOfRangeError, CorruptionError) as error:
        nothing(str(error))
    except ValueError as error:
        raise click.BadParameter(escape(str(error)), param_hint="--id") from None


# ----------------------------------------------------------------------------------------------------------------- get


@main.command()
@path_argument
@click.argument("topic")
@click.argument("queue_id", metavar="QUEUE", type=click.IntRange(min=0))
@click.option("--from", "queue_offset", type=int, help="Queue offset to begin with; by default the first there is.")
@click.option("--time", "timestamp", type=TIME, help="Begin with the first message stored at or after this time.")
@click.option("--max-num", type=click.IntRange(min=1), default=32, show_default=True, help="At most so many.")
@click.option("--tags", help="Only these tags: 'a || b'.")
@body_option
@store_options
def get(
    path: str,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    timestamp: int | None,
    max_num: int,
    tags: str | None,
    body: str,
    given: Given,
) -> None:
    """Read messages of a queue in order."""
    if queue_offset is not None and timestamp is not None:
        raise click.UsageError("give --from or --time, not both")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if timestamp is not None:
            queue_offset = store.offset_by_time(topic, queue_id, timestamp)
        elif queue_offset is None:
            queue_offset = store.min_queue_offset(topic, queue_id)
        left = max_num
        while True:
            # A get ends with its queue file, and one with tags may pass over all that it examines.
            result = store.get_message(topic, queue_id, queue_offset, left, tags)
            for message in result.messages:
                _print_message(printer, message, body)
            left -= len(result.messages)
            if left <= 0 or not queue_offset < result.next_queue_offset < result.max_queue_offset:
                break
            queue_offset = result.next_queue_offset
        if left == max_num:
            nothing(
                f"{result.status.name}: nothing at queue offset {queue_offset} of {topic}/{queue_id}, which holds "
                f"{result.min_queue_offset} to {result.max_queue_offset}"
            )
        if result.next_queue_offset < result.max_queue_offset:
            note(f"there are more: go on with --from {result.next_queue_offset}")


# ---------------------------------------------------------------------------------------------------------------- dump


@main.command()
@path_argument
@click.option("--what", type=click.Choice(["log", "queue", "index"]), default="log", show_default=True)
@click.option("--from", "begin", type=click.IntRange(min=0), help="Begin with this phy offset.")
@click.option("--to", "end", type=click.IntRange(min=0), help="Stop before this phy offset.")
@click.option("--topic", help="Only this topic; a queue dump needs it.")
@click.option("--queue", "queue_id", type=click.IntRange(min=0), help="Only this queue of the topic.")
@store_options
def dump(
    path: str, what: str, begin: int | None, end: int | None, topic: str | None, queue_id: int | None, given: Given
) -> None:
    """Print a store's structures as they lie on disk, damage included.

    log: one line a record, blank or damaged stretch. queue: the units of a topic's queues. index: header, entries and
    slots (with the lengths of their chains) of every index file.
    """
    if what == "queue" and topic is None:
        raise click.UsageError("a queue dump needs --topic")
    if what == "index" and topic is not None:
        raise click.UsageError("the index holds hashes and no topics; leave --topic out")
    if queue_id is not None and topic is None:
        raise click.UsageError("--queue needs --topic")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if what == "log":
            shown = _dump_log(printer, store, begin, end, topic, queue_id)
        elif what == "queue":
            assert topic is not None
            shown = _dump_queues(printer, store, begin, end, topic, queue_id)
        else:
            shown = _dump_index(printer, store, begin, end)
        if not shown:
            nothing("there is nothing of that kind to dump")


def _dump_progress(printer: Printer, what: str) -> contextlib.AbstractContextManager[Progress | None]:
    # A bar below scrolling lines on one terminal would only be in the way.
    return contextlib.nullcontext() if sys.stdout.isatty() else Progress(what)


def _dump_log(
    printer: Printer, store: MessageStore, begin: int | None, end: int | None, topic: str | None, queue_id: int | None
) -> int:
    log = store.commit_log
    first = max(log.min_offset, begin or 0)
    last = log.max_offset if end is None else min(end, log.max_offset)
    # Behind damage in the newest segment more records may follow; the store itself stops before it.
    if end is None or end > log.max_offset:
        last = log.find_end_behind_damage()
        log.set_end(last)
        last = last if end is None else min(end, last)
    # Begins the walk where a record is known to begin, so that the middle of one is not taken for damage.
    start = first if log.look_up(first) is not None else max(first - first % log.segment_size, log.min_offset)
    shown = 0
    with _dump_progress(printer, "dumping the log") as progress:
        for number, entry in enumerate(log.entries(start, last)):
            if progress is not None and number % 512 == 0:
                progress(entry.phy_offset - start, max(last - start, 1))
            if entry.phy_offset + (entry.store_size if isinstance(entry, MessageExt) else entry.size) <= first:
                continue
            if isinstance(entry, MessageExt):
                if (topic is not None and entry.topic != topic) or (
                    queue_id is not None and entry.queue_id != queue_id
                ):
                    continue
            elif topic is not None and isinstance(entry, Blank):
                continue
            shown += 1
            if printer.as_json:
                printer.json_line(_log_object(entry))
            else:
                printer.line(_log_line(entry))
    return shown


def _log_object(entry: MessageExt | Blank | Damage) -> dict[str, Any]:
    if isinstance(entry, MessageExt):
        return {"type": "record", **entry.to_dict()}
    if isinstance(entry, Blank):
        return {"type": "blank", "phy_offset": entry.phy_offset, "size": entry.size}
    return {"type": "damage", "phy_offset": entry.phy_offset, "size": entry.size, "verdict": entry.verdict.name}


def _log_line(entry: MessageExt | Blank | Damage) -> str:
    if isinstance(entry, Blank):
        return f"{entry.phy_offset:>12}  {entry.size:>7}  BLANK to the end of the segment"
    if isinstance(entry, Damage):
        return f"{entry.phy_offset:>12}  {entry.size:>7}  DAMAGE {entry.verdict.name}"
    parts = [
        f"{entry.phy_offset:>12}  {entry.store_size:>7}",
        f"{escape(entry.topic)}/{entry.queue_id} #{entry.queue_offset}",
        format_time(entry.store_timestamp),
        f"keys={escape(' '.join(entry.keys))}" if entry.keys else "",
        f"tags={escape(entry.tags)}" if entry.tags else "",
        "CORRUPT (CRC)" if entry.corrupt else "",
        _preview(entry),
    ]
    return "  ".join(part for part in parts if part)


def _preview(message: MessageExt) -> str:
    try:
        raw = message.body
    except StoreError:
        return f"({len(message.body_stored)} bytes that cannot be decoded)"
    text = escape(raw[: 4 * _PREVIEW].decode("utf-8", "backslashreplace"))
    if len(text) <= _PREVIEW and len(raw) <= 4 * _PREVIEW:
        return text
    # No half of an escape at the end.
    cut = re.sub(r"\\(x[0-9a-f]?|u[0-9a-f]{0,3}|U[0-9a-f]{0,7})?$", "", text[:_PREVIEW])
    return f"{cut}... ({len(raw)} bytes)"


def _queues_of(store: MessageStore, topic: str, queue_id: int | None) -> Iterator[AnyConsumeQueue]:
    for each in store.queue_ids(topic):
        queue = store.queues.find(topic, each) if queue_id in (None, each) else None
        if queue is not None:
            yield queue


def _dump_queues(
    printer: Printer, store: MessageStore, begin: int | None, end: int | None, topic: str, queue_id: int | None
) -> int:
    shown = 0
    for queue in _queues_of(store, topic, queue_id):
        kind = "BatchCQ" if isinstance(queue, BatchConsumeQueue) else "SimpleCQ"
        low, high = queue.min_queue_offset(0), queue.max_queue_offset
        if not printer.as_json:
            printer.line(f"{escape(queue.topic)}/{queue.queue_id}  {kind}  queue offsets {low} to {high}")
            printer.line(f"{'queue offset':>14}  {'phy offset':>14}  {'size':>9}  {'tags code':>20}  messages")
        at = low
        while at < high:
            following = at
            for unit in queue.read(at, 4096):
                following = unit.queue_offset + max(unit.num, 1)
                if unit.phy_offset < (begin or 0) or (end is not None and unit.phy_offset >= end):
                    continue
                shown += 1
                if printer.as_json:
                    printer.json_line(
                        {"type": "unit", "topic": queue.topic, "queue_id": queue.queue_id, **unit._asdict()}
                    )
                else:
                    printer.line(
                        f"{unit.queue_offset:>14}  {unit.phy_offset:>14}  {unit.size:>9}  {unit.tags_code:>20}  {unit.num}"
                    )
            # Nothing was read where a file is missing, or where only pre-fill units lie.
            at = following if following > at else max(queue.next_file_offset(at), at + 1)
    return shown


def _dump_index(printer: Printer, store: MessageStore, begin: int | None, end: int | None) -> int:
    if store.index_service is None:
        return 0
    shown = 0
    for name in store.index_service.names:
        index = store.index_service.file(name)
        _dump_index_header(printer, index)
        with _dump_progress(printer, f"dumping {name}") as progress:
            depths = _dump_entries(printer, index, begin, end, progress)
        longest, used = _dump_slots(printer, index, depths)
        if printer.as_json:
            printer.json_line(
                {"type": "index_chains", "file": index.name, "slots_used": used, "longest_chain": longest}
            )
        else:
            printer.line(f"slots used {used} of {index.slot_num}; the longest chain has {longest} entries")
        shown += 1
    return shown


def _dump_index_header(printer: Printer, index: IndexFile) -> None:
    header = dataclasses.asdict(index.header)
    if printer.as_json:
        printer.json_line(
            {"type": "index_header", "file": index.name, **header, "slots": index.slot_num, "capacity": index.index_num}
        )
        return
    printer.line(f"index file {escape(index.name)}: {index.slot_num} slots, {index.index_num} entries")
    for field, value in header.items():
        printer.line(f"  {field:<18} {value}" + (f"  {format_time(value)}" if field.endswith("timestamp") else ""))


def _dump_entries(
    printer: Printer, index: IndexFile, begin: int | None, end: int | None, progress: Progress | None
) -> array[int]:
    """Print the entries; the number of entries in the chain from each one down, -1 where it does not decrease."""
    count = min(index.index_count, index.index_num)
    depths = array("i", bytes(4 * max(count, 1)))
    start = index.header.begin_timestamp
    if not printer.as_json:
        printer.line(f"{'entry':>10}  {'slot':>10}  {'hash':>11}  {'phy offset':>14}  {'seconds':>8}  {'previous':>10}")
    for number in range(1, count):
        key_hash, phy_offset, seconds, previous = index.read_entry(number)
        if 0 < previous < number:
            depths[number] = depths[previous] + 1 if depths[previous] > 0 else -1
        else:
            # RocketMQ ends a chain at 0; anything else that does not lead down is damage.
            depths[number] = 1 if previous == 0 else -1
        if progress is not None and number % 4096 == 0:
            progress(number, count)
        if phy_offset < (begin or 0) or (end is not None and phy_offset >= end):
            continue
        slot = key_hash % index.slot_num
        if printer.as_json:
            printer.json_line(
                {
                    "type": "index_entry", "file": index.name, "index": number, "pos": index.entry_pos(number), "slot": slot,
                    "key_hash": key_hash, "phy_offset": phy_offset, "seconds": seconds,
                    "timestamp": start + 1000 * seconds, "previous": previous,
                }
            )  # fmt: skip
        else:
            damage = "  DAMAGE: the chain does not lead down" if depths[number] < 0 else ""
            printer.line(
                f"{number:>10}  {slot:>10}  {key_hash:>11}  {phy_offset:>14}  {seconds:>8}  {previous:>10}{damage}"
            )
    return depths


def _dump_slots(printer: Printer, index: IndexFile, depths: array[int]) -> tuple[int, int]:
    """Print the used slots with their newest entry and the length of the chain; (longest chain, used slots)."""
    longest = used = 0
    if not printer.as_json:
        printer.line(f"{'slot':>10}  {'newest entry':>12}  {'chain':>6}")
    for slot in range(index.slot_num):
        newest = index.read_slot(slot)
        if newest == 0:
            continue
        used += 1
        chain = depths[newest] if 0 < newest < len(depths) else -1
        longest = max(longest, chain)
        if printer.as_json:
            pos = int(IndexLayout.INDEX_HEADER_SIZE) + slot * int(IndexLayout.SLOT_SIZE)
            printer.json_line(
                {"type": "index_slot", "file": index.name, "slot": slot, "pos": pos, "newest": newest, "chain": chain}
            )
        else:
            damage = "  DAMAGE: leads to no entry" if chain < 0 else ""
            printer.line(f"{slot:>10}  {newest:>12}  {chain:>6}{damage}")
    return longest, used


# ------------------------------------------------------------------------------------------------------------- rebuild


@main.command(name="rebuild")
@path_argument
@click.option(
    "--what", multiple=True, type=click.Choice(["index", "consumequeue"]), help="What to make anew; by default both."
)
@click.option("--output", type=click.Path(), help="Build into this directory and leave the store as it is.")
@click.option("--yes", is_flag=True, help="Replace without asking.")
@store_options
def rebuild_command(path: str, what: tuple[str, ...], output: str | None, yes: bool, given: Given) -> None:
    """Make index and consume queues anew from the commit log.

    THIS COMMAND WRITES. Without --output it replaces index/ and consumequeue/ of the store, after the new files are
    complete and checked against the log; the commit log is never touched and the broker must not run. An interrupted
    rebuild leaves the store as it was: run it again.
    """
    kinds = what or ("index", "consumequeue")
    config = given.config(path)
    agree_to_replace(path, kinds, output, yes)
    try:
        with Progress("rebuilding") as progress:
            report = rebuild(path, kinds, config, output, progress)
    except KeyboardInterrupt:
        if output is not None:
            note(f"The store is as it was, and nothing was built in {output}.")
        elif os.path.isdir(os.path.join(path, REBUILD_DIRECTORY)):
            note(
                "The new files are complete, their exchange with the old ones is not: run the same command again, which ends it."
            )
        else:
            note("The store is as it was.")
        raise
    except CorruptionError as error:
        nothing(str(error))
    print_rebuild(report, output or path, given)


def agree_to_replace(path: str, kinds: tuple[str, ...], output: str | None, yes: bool) -> None:
    """Ask whether a rebuild shall replace files of the store, unless that was answered before; a No ends the command."""
    if output is not None or yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            "this replaces files of the store; without a terminal to ask on give --yes (or --output DIR)"
        )
    note(f"{' and '.join(kinds)} of {path} will be replaced by what the commit log says.")
    if not click.confirm("Go on?", err=True):
        nothing("nothing was changed")


def print_rebuild(report: RebuildReport, target: str, given: Given) -> None:
    """Say what a rebuild into `target` did; damage in the log makes the exit code that of something found."""
    printer = Printer(given.as_json)
    if given.as_json:
        value = dataclasses.asdict(report)
        value["damage"] = [dict(zip(("phy_offset", "size", "verdict"), each)) for each in report.damage]
        printer.json_line({"type": "rebuild", **value})
    else:
        for offset, size, verdict in report.damage:
            printer.line(f"nothing was built of {size} bytes at phy offset {offset}: {verdict}")
        if report.resumed:
            printer.line(f"finished the swap of an earlier rebuild: {' and '.join(report.what)} in {escape(target)}")
        else:
            printer.line(f"rebuilt {' and '.join(report.what)} in {escape(target)}")
            printer.line(
                f"{report.records} records, {report.units} queue units, {report.index_entries} index entries from "
                f"{format_size(report.log_bytes)} of log"
            )
            if printer.terminal:
                printer.line(f"{report.seconds:.2f} s")
    if report.damage:
        click.get_current_context().exit(FOUND_NOTHING)


# ------------------------------------------------------------------------------------------------------------- recover


@main.command(name="recover")
@path_argument
@click.option(
    "--mode",
    type=click.Choice(RECOVERY_MODES),
    default="strict",
    show_default=True,
    help="Where the log is damaged in front of whole records: refuse; cut it there as RocketMQ does, which deletes "
    "everything behind; or keep what is whole on both sides.",
)
@click.option("--yes", is_flag=True, help="Do not ask before --mode truncate deletes.")
@store_options
def recover_command(path: str, mode: str, yes: bool, given: Given) -> None:
    """Do what a start after a crash does, say what it was, and close the store in order.

    THIS COMMAND WRITES. The log is judged first; with --mode strict a store with damage in the middle of its log is
    left exactly as it is. What a crash left torn behind the last whole record is cut; queues and index are brought into
    line with the log. The broker must not run.
    """
    if not os.path.isdir(os.path.join(path, "commitlog")):
        raise of_error(StoreError("there is no store here; give the folder that holds commitlog/", path))
    config = given.config(path)
    if mode == "truncate" and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "this may delete whole records behind damage; without a terminal to ask on give --yes"
            )
        note(f"If the log of {path} is damaged, everything behind the damage will be deleted, whole or not.")
        if not click.confirm("Go on?", err=True):
            nothing("nothing was changed")
    with MessageStore.open(path, config=config, recovery=mode) as store:
        report = store.recovery_report
    assert report is not None
    printer = Printer(given.as_json)
    if given.as_json:
        printer.json_line({"type": "recovery", "path": path, **report.as_dict()})
    else:
        printer.line(f"{'closed in order' if report.clean else 'not closed in order'} before")
        printer.line(f"scanned      {report.records} records, phy offsets {report.began_at} to {report.end}")
        printer.line(f"cut          {format_size(report.bytes_cut)}, {report.segments_deleted} segments of the log")
        printer.line(
            f"queues       {report.units_cut} units cut, {report.units_written} written, {report.units_mended} mended"
        )
        printer.line(f"index        {report.index_entries_cut} entries cut, {report.index_entries_written} written")
        for offset, size, verdict in report.damage:
            printer.line(f"left damaged {size} bytes at phy offset {offset}: {verdict}")
        if printer.terminal:
            printer.line(f"{report.seconds:.2f} s")
    if report.damage:
        click.get_current_context().exit(FOUND_NOTHING)


# ------------------------------------------------------------------------------------------------------------- offsets


@main.group()
def offsets() -> None:
    """Progress of consumer groups: what is next for each, and how far behind it is."""


@offsets.command(name="show")
@path_argument
@click.option("--group", help="Only this consumer group.")
@click.option("--topic", help="Only this topic.")
@store_options
def offsets_show(path: str, group: str | None, topic: str | None, given: Given) -> None:
    """Show the progress of every group."""
    printer = Printer(given.as_json)
    found = 0
    with MessageStore.open(path, config=given.config(path), read_only=True) as store:
        table = store.consumer_offsets.list()
        if not given.as_json and table:
            printer.line(
                f"{'group':<24}  {'topic':<24}  {'queue':>5}  {'offset':>12}  {'max offset':>12}  {'behind':>10}"
            )
        for (name, its_topic), queues in sorted(table.items()):
            if group not in (None, name) or topic not in (None, its_topic):
                continue
            for queue_id, queue_offset in sorted(queues.items()):
                found += 1
                newest = store.max_queue_offset(its_topic, queue_id)
                behind = max(newest - queue_offset, 0)
                if given.as_json:
                    printer.json_line(
                        {
                            "type": "progress", "group": name, "topic": its_topic, "queue_id": queue_id,
                            "queue_offset": queue_offset, "max_queue_offset": newest, "behind": behind,
                        }
                    )  # fmt: skip
                else:
                    printer.line(
                        f"{escape(name):<24}  {escape(its_topic):<24}  {queue_id:>5}  {queue_offset:>12}  {newest:>12}  "
                        f"{behind:>10}"
                    )
    if not found:
        nothing("no progress is known")


@offsets.command(name="set")
@path_argument
@click.option("--group", required=True, help="The consumer group.")
@click.option("--topic", required=True, help="The topic.")
@click.option(
    "--queue", "queue_id", type=click.IntRange(min=0), multiple=True, help="A queue; repeatable, by default all."
)
@click.option("--to", "queue_offset", type=click.IntRange(min=0), help="This queue offset.")
@click.option("--time", "timestamp", type=TIME, help="The first message stored at or after this time.")
@click.option("--earliest", is_flag=True, help="The oldest message that is there.")
@click.option("--latest", is_flag=True, help="Behind the newest message.")
@store_options
def offsets_set(
    path: str,
    group: str,
    topic: str,
    queue_id: tuple[int, ...],
    queue_offset: int | None,
    timestamp: int | None,
    earliest: bool,
    latest: bool,
    given: Given,
) -> None:
    """Set the progress of a group in a topic, or reset it by time.

    THIS COMMAND WRITES config/consumerOffset.json (the one before stays as .bak) and nothing else. The broker must not
    run: it keeps progress in memory and would overwrite the file.
    """
    ways = [queue_offset is not None, timestamp is not None, earliest, latest]
    if sum(ways) != 1:
        raise click.UsageError("give one of --to, --time, --earliest and --latest")
    printer = Printer(given.as_json)
    config = given.config(path)
    with MessageStore.open(path, config=config, read_only=True) as store, StoreLock(path):
        progress = ConsumerOffsets.load(store.consumer_offsets.path, read_only=False)
        for each in queue_id or store.queue_ids(topic):
            before = progress.get(group, topic, each)
            if timestamp is not None:
                after = store.offset_by_time(topic, each, timestamp)
            elif queue_offset is not None:
                after = queue_offset
            else:
                after = store.min_queue_offset(topic, each) if earliest else store.max_queue_offset(topic, each)
            progress.commit(group, topic, each, after)
            if given.as_json:
                printer.json_line(
                    {
                        "type": "progress_set",
                        "group": group,
                        "topic": topic,
                        "queue_id": each,
                        "before": before,
                        "queue_offset": after,
                    }
                )
            else:
                printer.line(
                    f"{escape(group)} in {escape(topic)}/{each}: {after} (before: {before if before >= 0 else 'unknown'})"
                )
        if not (queue_id or store.queue_ids(topic)):
            nothing(f"topic {escape(topic)} has no queues; name them with --queue")
        progress.persist()


if __name__ == "__main__":
    main()
