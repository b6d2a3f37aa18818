"""Options that several commands share: the config of a store, the selection of messages, the output file.

The config comes from ``-o``, else from the file of ``--config``, else from the store's own files.  A command gets options that
belong together as one argument (`gathered`), and the selection of messages as one `Selection`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, TypeAlias

import click

from rmqstore.cli.errors import as_usage, did_you_mean
from rmqstore.cli.paths import (
    FILE_THERE,
    FOLDER_THERE,
    STORE_PATH,
    check_store_path,
    complete_option,
    complete_path,
    complete_topic,
)
from rmqstore.cli.terminal import BEGIN_HELP, END_HELP, END_TIME, TIME, escape, note
from rmqstore.config import StoreConfig
from rmqstore.config.places import refuse_other_log
from rmqstore.config.store_config import read_java_properties, values_of_lines
from rmqstore.files.listing import ask_again
from rmqstore.files.output_file import OutputFile, format_of
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore
from rmqstore.texts import harmless_cell

# A function that becomes a command, called with the arguments and options of a line.
_Command: TypeAlias = Callable[..., Any]


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
    # The field of StoreConfig, and its value.
    item = _OPTIONS.get(_plain(name))
    if item is None:
        near = did_you_mean(_plain(name), _OPTIONS)
        for plain, each in _OPTIONS.items():
            near = near.replace(plain, each.name)
        advice = near or "see the fields of rmqstore.StoreConfig"
        raise click.BadParameter(escape(f"no such option {name!r}; {advice}"), param_hint="-o")
    text = text.strip()
    if item.type == "bool":
        if text.lower() not in ("true", "false"):
            raise click.BadParameter(f"{name} is {text!r}; give true or false", param_hint="-o")
        return item.name, text.lower() == "true"
    if item.type == "int":
        if not re.fullmatch("[+-]?[0-9]{1,19}", text):
            raise click.BadParameter(f"{name} is {text!r}; give a whole number", param_hint="-o")
        return item.name, int(text)
    return item.name, text


def note_assumed(config: StoreConfig, names: Iterable[str]) -> None:
    """Print a note for each of the options `names` that the store does not record."""
    for name in names:
        if name in config.assumed:
            note(f"note: the store does not record {name}; assuming {getattr(config, name)!r} (set it with -o {name}=...)")


@dataclasses.dataclass
class Given:
    """The options of every command on a store."""

    config_file: str | None
    options: tuple[str, ...]
    as_json: bool
    tiered: str | None = None

    @functools.cached_property
    def broker_conf(self) -> list[tuple[str, str, int]]:
        """The name, value and line number of each option in the file of ``--config``, read once because it may be a pipe."""
        if self.config_file is None:
            return []
        try:
            return read_java_properties(self.config_file)
        except ValueError as error:
            raise click.BadParameter(escape(str(error)), param_hint="--config") from None

    @functools.cached_property
    def _of_file(self) -> dict[str, Any]:
        if self.config_file is None:
            return {}
        try:
            found = values_of_lines(StoreConfig, self.broker_conf, self.config_file, {})
            StoreConfig(**found)
        except ValueError as error:
            raise click.BadParameter(escape(str(error)), param_hint="--config") from None
        return found

    def overrides(self) -> dict[str, Any]:
        """Return the fields of StoreConfig in the file of ``--config`` and in each ``-o``."""
        values = dict(self._of_file)
        for option in self.options:
            name, separator, text = option.partition("=")
            if not separator:
                raise click.BadParameter(f"{option!r} has no '='; give NAME=VALUE", param_hint="-o")
            field, value = _option_value(name.strip(), text)
            values[field] = value
        return values

    def config(self, path: str, *, read_only: bool = False) -> StoreConfig:
        """Infer the config from the files of the store, overridden by broker.conf and then by ``-o``.

        With tiered storage, which may have all messages, a local log is optional.
        """
        overrides = self.overrides()
        refuse_other_log(path, overrides.get("unknown", {}))
        if self.tiered and os.path.isdir(path) and not os.path.isdir(os.path.join(path, "commitlog")):
            return StoreConfig(**overrides)
        check_store_path(path)
        with as_usage():
            config = StoreConfig.infer(path, read_only=read_only, **overrides)
        if self.config_file is not None:
            # As in a broker, other options have RocketMQ's defaults; that of enable_lmq would drop light queues from a rebuild.
            kept = ("index_tags", "enable_lmq")
            rocketmq = StoreConfig.from_properties({})
            config = config.replace(**{name: getattr(rocketmq, name) for name in config.assumed if name not in kept})
        return config

    def open(self, path: str) -> MessageStore:
        """Open the store at `path` read-only with these options."""
        # A broker may delete a file that was listed just before.
        return ask_again(lambda: self._opened(path), gone=FileNotFoundError)

    def _opened(self, path: str) -> MessageStore:
        store = MessageStore.open(path, config=self.config(path, read_only=True), read_only=True, tiered=self.tiered)
        for text in store.older.notes:
            note(f"note: tiered storage: {text}")
        return store


def gathered(kind: Callable[..., object], argument: str, *names: str) -> Callable[[_Command], _Command]:
    """Pass several options, by default the fields of the dataclass `kind`, to the command as one argument."""
    taken = names or tuple(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]

    def decorated(function: _Command) -> _Command:
        # It has the options that `function` has.
        @functools.wraps(function)
        def wrapped(**values: Any) -> Any:
            parts = {name: values.pop(name) for name in taken if name in values}
            return function(**{argument: kind(**parts)}, **values)

        return wrapped

    return decorated


def optioned(function: _Command, *options: Callable[[_Command], _Command]) -> _Command:
    """Return `function` with these options, in the order of ``--help``."""
    for option in reversed(options):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


def store_options(function: _Command) -> _Command:
    """Add ``--config``, ``-o`` and ``--json``, and pass them, and ``--tiered``, as one argument `given`."""
    return optioned(gathered(Given, "given")(function), *GIVEN_OPTIONS)


GIVEN_OPTIONS = (
    click.option("--config", "config_file", type=FILE_THERE, help="The broker's broker.conf."),
    click.option(
        "-o",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set an option of the store, named as in StoreConfig or RocketMQ; repeatable.",
        shell_complete=complete_option,
    ),
    json_option,
)
tiered_option = click.option(
    "--tiered",
    type=FOLDER_THERE,
    metavar="DIR",
    help="Also read tiered storage: the broker's tieredStoreFilePath.",
)
path_argument = click.argument("path", type=STORE_PATH, shell_complete=complete_path)
topic_argument = click.argument("topic", shell_complete=complete_topic)
optional_topic_argument = click.argument("topic", required=False, shell_complete=complete_topic)


# ------------------------------------------------------------------------------------------------------- which messages

begin_option = click.option("--begin", type=TIME, help=BEGIN_HELP)
end_option = click.option("--end", type=END_TIME, help=END_HELP)
tags_option = click.option("--tags", help="Only messages with one of these tags: 'a || b'.")
queues_option = click.option(
    "--queue", "queue_ids", type=click.IntRange(0, 2**31 - 1), multiple=True, help="Only this queue; repeatable."
)
topics_option = click.option(
    "--topic", "topics", multiple=True, help="Only this topic; repeatable.", shell_complete=complete_topic
)


def selecting(*names: str) -> Callable[[_Command], _Command]:
    """Pass options as one `Selection`; each is named like a field, in the singular if it is given once."""
    return gathered(_selection, "selection", *names)


_SINGULAR = {"topic": "topics", "queue_id": "queue_ids", "key": "keys"}


def _selection(**values: Any) -> Selection:
    fields = {}
    for name, value in values.items():
        if name in _SINGULAR and value is not None:
            value = (value,)
        # A repeatable option that is missing is no condition.
        fields[_SINGULAR.get(name, name)] = None if value == () else value
    with as_usage():
        return Selection(**fields)


# ------------------------------------------------------------------------------------------------ where an answer goes

force_option = click.option("--force", is_flag=True, help="Replace FILE if it exists.")
safe_csv_option = click.option(
    "--safe-csv", is_flag=True, help="In CSV, put ' before text that a spreadsheet would run as a formula."
)
_TABLE_FORMATS = ("parquet", "arrow", "csv", "jsonl")


@dataclasses.dataclass(frozen=True)
class TableFile:
    """The output file, if any."""

    output: str | None
    force: bool
    safe_csv: bool

    def kind(self) -> str | None:
        """Return the format of the file by its name, None without a file; raise UsageError for other names."""
        kind, compression = (None, None) if self.output is None else format_of(self.output)
        if self.output is not None and (kind not in _TABLE_FORMATS or compression is not None):
            raise click.UsageError("--output FILE must end with .parquet, .arrow, .csv or .jsonl")
        check_safe_csv(self.safe_csv, kind)
        return kind

    def make(self, store: str) -> OutputFile | None:
        """Return the output file, which must not be in the store; None without one."""
        return None if self.output is None else OutputFile(self.output, force=self.force, outside=[store])

    def write_rows(self, file: IO[bytes], kind: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Write rows of values that JSON can hold as CSV or JSON lines."""
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        if kind == "csv":
            table = csv.writer(text)
            for row in itertools.chain([names], rows):
                cells = [encode(each) if isinstance(each, (list, dict)) else each for each in row]
                table.writerow([harmless_cell(each) if self.safe_csv and isinstance(each, str) else each for each in cells])
        else:
            for row in rows:
                text.write(encode(dict(zip(names, row))) + "\n")
        text.detach()


def table_file_options(help_text: str) -> Callable[[_Command], _Command]:
    """Add ``--output``, ``--force`` and ``--safe-csv``, and pass them as one argument `file`."""

    def decorated(function: _Command) -> _Command:
        output = click.option("-O", "--output", metavar="FILE", help=help_text)
        return optioned(gathered(TableFile, "file")(function), output, force_option, safe_csv_option)

    return decorated


def check_safe_csv(safe_csv: bool, kind: str | None) -> None:
    """Raise UsageError if --safe-csv is given for another format."""
    if safe_csv and kind != "csv":
        raise click.UsageError("--safe-csv requires CSV; give --output FILE.csv")
