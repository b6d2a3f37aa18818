"""Errors, findings and warnings as a person at a shell reads them, and the exit code of a store that cannot be read.

Owns the command line's spelling of remedies and verdicts, which come as data from `rmqstore.errors`, and which known name is
near a wrong one. Programs that ask for JSON get Python's.
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
    """Shown without a traceback, `hint` on a line of its own; exit code 3."""

    exit_code = CANNOT_OPEN

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        # What was printed before it comes first where both streams go to one place.
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
    """Turn a ValueError, which is about an argument, into wrong usage."""
    try:
        yield
    except StoreError:
        raise
    except ValueError as error:
        raise click.UsageError(escape(str(error))) from None


def of_error(error: Exception) -> CannotOpenError:
    """Return the error of the command line for one of the store or of the operating system, with what to do there."""
    # A checkpoint has one length, which no option changes.
    if isinstance(error, GeometryError) and os.path.basename(error.path or "") != "checkpoint":
        return CannotOpenError(
            error_text(error), "Here an option is given as -o NAME=VALUE, or all with --config broker.conf."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return CannotOpenError(
            placed(error.strerror or type(error).__name__, from_here(os.fsdecode(error.filename)), None),
            "Run the command as a user who may, such as the one that the broker runs as." if is_denied(error) else "",
        )
    if isinstance(error, MemoryError):
        return CannotOpenError("there is not enough memory", "Ask for less at once, or run it where more memory is free.")
    if is_full(error):
        # Without a name it is most likely what the command prints.
        return CannotOpenError(f"{error.strerror}, where the output goes", "Make room, or send the output elsewhere.")
    return CannotOpenError(error_text(error))


def error_text(error: Exception) -> str:
    """Return what an error says, with the options of the command line."""
    if not isinstance(error, StoreError):
        return str(error)
    return placed(typed(error.message), None if error.path is None else from_here(error.path), error.pos)


def warning_text(record: logging.LogRecord) -> str:
    """Return what a warning of the package says, with the options of the command line."""
    text = str(_as_typed(record.msg))
    args = record.args
    return text % tuple(map(_as_typed, args)) if isinstance(args, tuple) and args else text


def _as_typed(value: object) -> object:
    if isinstance(value, StoreError):
        return error_text(value)
    return from_here(typed(value)) if isinstance(value, str) else value


def from_here(path: str) -> str:
    """Return a path below the working directory as it is typed there."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:
        return path
    return path if here == os.sep else path.removeprefix(here)


def typed(text: str) -> str:
    """Return a text of the package with the options of the command line, and verdicts in words."""
    return text.spelled(_typed_part) if isinstance(text, Sentence) else text


def _typed_part(part: object) -> str:
    match part:
        case Verdict():
            return VERDICT_WORDS[part.name]
        case OpenReadOnly():
            return "; commands that only read work all the same"
        case ChooseRecovery():
            return (
                "; nothing was changed. rmqstore export --corrupt skip gets out what is whole; rmqstore recover --mode skip goes "
                "on after the damage, --mode truncate cuts the log there as RocketMQ does, which deletes everything after it"
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
            return ", or without -o and --config, so that they are found from the files"
        case DeclareQueue():
            return "--declared"
    return str(part)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question whether one of the `known` names was meant; "" where none is near."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""
