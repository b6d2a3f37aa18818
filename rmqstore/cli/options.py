"""The options that every command on a store has, and the config that they give.

Owns how a name of RocketMQ's becomes a field of `StoreConfig`, in each of its spellings, and which source counts: an
option, then the file of --config, then what the store's own files tell.  It decides no default.  Invariant:
`Given.open` opens read-only.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from rmqstore.cli.completion import complete_option, complete_path, complete_topic
from rmqstore.cli.paths import FILE_THERE, FOLDER_THERE, STORE_PATH, check_store_path
from rmqstore.cli.terminal import escape, note
from rmqstore.cli.words import did_you_mean
from rmqstore.config import StoreConfig
from rmqstore.config.broker_conf import read_java_properties, values_of_lines
from rmqstore.config.log_folder import refuse_other_log
from rmqstore.errors import StoreError
from rmqstore.files.again import ask_again
from rmqstore.store.message_store import MessageStore


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
        near = did_you_mean(_plain(name), _OPTIONS)
        for plain, each in _OPTIONS.items():
            near = near.replace(plain, each.name)
        advice = near or "see the fields of rmqstore.StoreConfig"
        raise click.BadParameter(escape(f"there is no option {name!r}; {advice}"), param_hint="-o")
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


def _overrides(told: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    values = dict(told)
    for option in options:
        name, separator, text = option.partition("=")
        if not separator:
            raise click.BadParameter(f"{option!r} has no '=': write NAME=VALUE", param_hint="-o")
        field, value = _option_value(name.strip(), text)
        values[field] = value
    return values


def _config(
    path: str, overrides: Mapping[str, Any], with_conf: bool, read_only: bool, alone: bool = False
) -> StoreConfig:
    """The store's config: what its files say, overridden by the broker.conf and then by the options.

    With `alone` there need be no local log: tiered storage has its messages.
    """
    refuse_other_log(path, overrides.get("unknown", {}))
    if alone and os.path.isdir(path) and not os.path.isdir(os.path.join(path, "commitlog")):
        return StoreConfig(**overrides)
    check_store_path(path)
    try:
        config = StoreConfig.infer(path, read_only=read_only, **overrides)
    except StoreError:
        raise
    except ValueError as error:
        raise click.UsageError(escape(str(error))) from None
    if with_conf:
        # An option that neither the files nor broker.conf have gets RocketMQ's default, as in a broker. The default of enable_lmq
        # would drop light queues from a rebuild.
        kept = ("index_tags", "enable_lmq")
        rocketmq = StoreConfig.from_properties({})
        known = {name: getattr(rocketmq, name) for name in config.assumed if name not in kept}
        config = config.replace(**known)
    return config


def note_assumed(config: StoreConfig, names: Iterable[str]) -> None:
    """Say on stderr which of the options `names` the store does not tell."""
    for name in names:
        if name in config.assumed:
            note(f"note: the store does not tell {name}; {getattr(config, name)!r} is assumed (give -o {name}=...)")


@dataclasses.dataclass
class Given:
    """The options that every command on a store has."""

    config_file: str | None
    options: tuple[str, ...]
    as_json: bool
    tiered: str | None = None

    @functools.cached_property
    def broker_conf(self) -> list[tuple[str, str, int]]:
        """Name, value and line number of each option in the file of ``--config``; none without it.

        It is read once: a pipe, as of a shell's ``<(...)``, has nothing more for whoever comes again.
        """
        if self.config_file is None:
            return []
        try:
            return read_java_properties(self.config_file)
        except ValueError as error:
            raise click.BadParameter(escape(str(error)), param_hint="--config") from None

    @functools.cached_property
    def _told(self) -> dict[str, Any]:
        # The fields of StoreConfig that the broker.conf says.
        if self.config_file is None:
            return {}
        try:
            told = values_of_lines(StoreConfig, self.broker_conf, self.config_file, {})
            StoreConfig(**told)
        except ValueError as error:
            raise click.BadParameter(escape(str(error)), param_hint="--config") from None
        return told

    def overrides(self) -> dict[str, Any]:
        """dict: the fields of StoreConfig that the options say, of the broker.conf and of each ``-o``."""
        return _overrides(self._told, self.options)

    def config(self, path: str, *, read_only: bool = False) -> StoreConfig:
        """StoreConfig: that of the store in `path`; for whoever only reads also where the index does not tell its own."""
        with_conf = self.config_file is not None
        return _config(path, self.overrides(), with_conf, read_only, alone=self.tiered is not None)

    def open(self, path: str) -> MessageStore:
        """Open the store at `path` read-only with these options."""
        # A broker may delete a file that was listed just before.
        return ask_again(lambda: self._opened(path), gone=FileNotFoundError)

    def _opened(self, path: str) -> MessageStore:
        store = MessageStore.open(path, config=self.config(path, read_only=True), read_only=True, tiered=self.tiered)
        for text in () if store.tiered is None else store.tiered.notes:
            note(f"note: tiered storage: {text}")
        return store


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config``, ``-o`` and ``--json``; the command gets them as one argument `given`."""

    def wrapped(
        config_file: str | None, options: tuple[str, ...], as_json: bool, tiered: str | None = None, **others: Any
    ) -> Any:
        return function(given=Given(config_file, options, as_json, tiered), **others)

    wrapped.__doc__ = function.__doc__
    wrapped.__name__ = function.__name__
    wrapped.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    name_help = "An option of the store, spelled as in StoreConfig or in RocketMQ; repeatable."
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
        click.option(
            "-o", "options", multiple=True, metavar="NAME=VALUE", help=name_help, shell_complete=complete_option
        ),
        click.option("--config", "config_file", type=FILE_THERE, help="The broker's broker.conf."),
    ):
        wrapped = option(wrapped)
    return wrapped


safe_csv_option = click.option(
    "--safe-csv", is_flag=True, help="In CSV, put ' before each text that a spreadsheet would run as a formula."
)
tiered_option = click.option(
    "--tiered",
    type=FOLDER_THERE,
    metavar="DIR",
    help="The broker's tieredStoreFilePath: also what the local log no longer has.",
)
path_argument = click.argument("path", type=STORE_PATH, shell_complete=complete_path)
topic_argument = click.argument("topic", shell_complete=complete_topic)
optional_topic_argument = click.argument("topic", required=False, shell_complete=complete_topic)


def check_safe_csv(safe_csv: bool, kind: str | None) -> None:
    """UsageError where --safe-csv is given for another format."""
    if safe_csv and kind != "csv":
        raise click.UsageError("--safe-csv is for CSV: give --output FILE.csv")
