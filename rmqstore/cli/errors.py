"""Errors, findings and warnings in the words of the command line, and the exit code of a store that cannot be read.

Remedies and verdicts, which come as data from `rmqstore.errors`, become commands and options.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from rmqstore._core import Verdict
from rmqstore.cli.terminal import discard, escape
from rmqstore.commitlog.log_walk import VERDICT_WORDS
from rmqstore.errors import (
    ChooseRecovery,
    DeclareQueue,
    DropUnits,
    GeometryError,
    GiveOptions,
    InferConfig,
    OpenReadOnly,
    Recover,
    Sentence,
    StoreError,
    UseBrokerConf,
    placed,
)
from rmqstore.files.os_errors import is_denied, is_full

CANNOT_OPEN = 3


class CannotOpenError(click.ClickException):
    """An error with exit code 3; `hint` is printed on a line of its own."""

    exit_code = CANNOT_OPEN

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        # Keep the order if both streams go to one place.
        try:
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout)
        # If stderr cannot be written (its disk is full), the exit code still reports the error.
        try:
            super().show(file)
        except OSError:
            discard(sys.stderr)

    def format_message(self) -> str:
        return escape(self.message) + (f"\n{self.hint}" if self.hint else "")


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """Turn a ValueError about an argument into a UsageError."""
    try:
        yield
    except StoreError:
        raise
    except ValueError as error:
        raise click.UsageError(escape(str(error))) from None


def of_error(error: Exception) -> CannotOpenError:
    """Return the error of the command line for one of the store or of the operating system, with a hint."""
    # No option changes the length of a checkpoint.
    if isinstance(error, GeometryError) and os.path.basename(error.path or "") != "checkpoint":
        return CannotOpenError(
            error_text(error), "Give options as -o NAME=VALUE, or all of them with --config broker.conf."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return CannotOpenError(
            placed(error.strerror or type(error).__name__, from_here(os.fsdecode(error.filename)), None),
            "Run the command as a user with access, for example the broker's user." if is_denied(error) else "",
        )
    if isinstance(error, MemoryError):
        return CannotOpenError("out of memory", "Request less at once, or run it on a machine with more free memory.")
    if is_full(error):
        # Without a file name this is most likely stdout.
        return CannotOpenError(f"{error.strerror}: the output cannot be written", "Free space, or write to another disk.")
    return CannotOpenError(error_text(error))


def error_text(error: Exception) -> str:
    """Return the text of an error with the options of the command line."""
    if not isinstance(error, StoreError):
        return str(error)
    return placed(typed(error.message), None if error.path is None else from_here(error.path), error.pos)


def warning_text(record: logging.LogRecord) -> str:
    """Return the text of a warning with the options of the command line."""
    text = str(_as_typed(record.msg))
    args = record.args
    return text % tuple(map(_as_typed, args)) if isinstance(args, tuple) and args else text


def _as_typed(value: object) -> object:
    if isinstance(value, StoreError):
        return error_text(value)
    return from_here(typed(value)) if isinstance(value, str) else value


def from_here(path: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:
        return path
    return path if here == os.sep else path.removeprefix(here)


def typed(text: str) -> str:
    """Return a text of the package with remedies as options of the command line, and verdicts in words."""
    return text.spelled(_typed_part) if isinstance(text, Sentence) else text


def _typed_part(part: object) -> str:
    match part:
        case Verdict():
            return VERDICT_WORDS[part.name]
        case OpenReadOnly():
            return "; read-only commands still work"
        case ChooseRecovery():
            return (
                "; nothing was changed. rmqstore export --corrupt skip exports the undamaged messages; rmqstore recover --mode "
                "skip keeps the messages after the damage; --mode truncate deletes them, as RocketMQ does"
            )
        case Recover(mode):
            return f"rmqstore recover --mode {mode}"
        case DropUnits(num, recovery):
            return f"rmqstore recover --drop-units {num}" if recovery else f"--drop-units {num}"
        case GiveOptions(options):
            return " ".join(f"-o {each}" for each in options)
        case UseBrokerConf():
            return "--config broker.conf"
        case InferConfig():
            return ", or omit -o and --config to infer them from the files"
        case DeclareQueue():
            return "--declared"
    return str(part)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion of similar `known` names, or ""."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""
