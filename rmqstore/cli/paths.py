"""Checks of PATH, with the path to give instead, and tab completion.  No store is opened."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from itertools import islice
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from rmqstore.cli.errors import CannotOpenError, of_error
from rmqstore.config.places import without_log
from rmqstore.files.listing import is_empty, listing
from rmqstore.files.open_file import is_directory

# Commands report an unreadable path themselves, with exit code 3.
STORE_PATH = click.Path(readable=False)


class _SeenPath(click.Path):
    """A path that must exist; a missing permission is reported as such."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            os.stat(value)
        except PermissionError as error:
            raise of_error(error) from None
        except (OSError, ValueError):
            pass  # Click reports it.
        return super().convert(value, param, ctx)


FILE_THERE = _SeenPath(exists=True, dir_okay=False, readable=False)
"""Of an option: a file, or a pipe."""
FOLDER_THERE = _SeenPath(exists=True, file_okay=False, readable=False)
"""Of an option: a directory."""
# A store has at least one of these folders.
_PARTS = ("commitlog", "consumequeue", "batchconsumequeue", "index")


def is_store(path: str) -> bool:
    """Return True if `path` is a directory with parts of a RocketMQ store."""
    return any(os.path.isdir(os.path.join(path, name)) for name in _PARTS)


def is_vhost(path: str) -> bool:
    """Return True if `path` is a RabbitMQ vhost's directory, or a node's data directory."""
    from rmqstore.errors import StoreError
    from rmqstore.rabbitmq import find_vhosts

    try:
        return bool(find_vhosts(path))
    except (StoreError, OSError):
        return False


def check_store_path(path: str) -> None:
    """Raise CannotOpenError, with the path to give, unless `is_store`; PermissionError if the user lacks access."""
    if is_store(path):
        return
    without_log(path)
    is_directory(path)  # raises PermissionError
    text, hint = _wrong_path(path)
    raise CannotOpenError(f"{text} [{path}]", hint)


def _wrong_path(path: str) -> tuple[str, str]:
    if not os.path.lexists(path):
        return "no such directory", _missing_hint(path)
    root = _store_above(path)
    if root is not None:
        kind = "folder" if os.path.isdir(path) else "file"
        return f"this is a {kind} inside a store", f"Give the root of the store: {_shown(root)}"
    if not os.path.exists(path):
        return "broken symlink", "Restore its target, for example by mounting the disk."
    if not os.path.isdir(path):
        return "not a directory", "Give the root of the store, the folder that contains commitlog/."
    if is_vhost(path):
        return "this is a RabbitMQ directory, not a RocketMQ store", f"Try: rmqstore rabbitmq info {_shown(path)}"
    below = _stores_below(path)
    if below:
        roots = " or ".join(_shown(each) for each in below)
        return "this directory is not a store, but contains one", f"Give the root of the store: {roots}"
    if os.path.isfile(os.path.join(path, "checkpoint")):
        return "the store is empty", "Put the first message with rmqstore import, or with a program that writes to the store."
    return (
        "this directory is empty" if is_empty(path) else "not a RocketMQ store: there is no commitlog/",
        "Give the root of the store, the folder that contains commitlog/ (storePathRootDir in broker.conf, by default ~/store).",
    )


def check_vhost_path(path: str) -> None:
    """Raise CannotOpenError if `path` is plainly a RocketMQ store."""
    if is_store(path) and not is_vhost(path):
        raise CannotOpenError(
            f"this is a RocketMQ store, not a RabbitMQ directory [{path}]", f"Try: rmqstore info {_shown(path)}"
        )


def _shown(path: str) -> str:
    import shlex

    from rmqstore.cli.terminal import escape

    return escape(shlex.quote(path))


def _missing_hint(path: str) -> str:
    at = os.path.abspath(path)
    while not os.path.isdir(at) and os.path.dirname(at) != at:
        at = os.path.dirname(at)
    return f"{_shown(at)} exists, the rest does not. Give the root of the store, the folder that contains commitlog/."


def _store_above(path: str) -> str | None:
    # The files of a queue are up to four levels below the root.
    at = os.path.abspath(path)
    for _ in range(5):
        at, name = os.path.split(at)
        if name in (*_PARTS, "config") and is_store(at):
            relative = os.path.relpath(at)
            return at if os.path.isabs(path) or len(relative) > len(at) else relative
    return None


def _stores_below(path: str) -> list[str]:
    # Many programs have folders named "index".
    return list(islice((each for each in listing(path).paths if os.path.isdir(os.path.join(each, "commitlog"))), 3))


_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print a shell script that completes commands, options, paths and topics.

    \b
    bash: add to ~/.bashrc:  eval "$(rmqstore completion bash)"
    zsh:  add to ~/.zshrc:   eval "$(rmqstore completion zsh)"
    fish: rmqstore completion fish > ~/.config/fish/completions/rmqstore.fish
    """
    from rmqstore.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(main, {}, "rmqstore", "_RMQSTORE_COMPLETE")
    # `source` would run bash to find its version.
    click.echo(made.source_template % made.source_vars())


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete directories."""
    return [CompletionItem(incomplete, type="dir")]


def _names_in(directory: str) -> list[str]:
    return listing(directory, os.DirEntry.is_dir).names


def _items(names: set[str], incomplete: str) -> list[CompletionItem]:
    # Omit names that could break the shell's list of candidates, or the terminal.
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and name.isprintable()]


def _argument(ctx: click.Context, name: str, place: int) -> str | None:
    # Click has not assigned the arguments if an option still lacks its value.
    value = ctx.params.get(name)
    if not value and place < len(ctx.args):
        value = ctx.args[place]
    return value


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the topics that have queues in the store of ``PATH``."""
    path = _argument(ctx, "path", 0)
    if not path:
        return []
    return _items(
        {name for kind in ("consumequeue", "batchconsumequeue") for name in _names_in(os.path.join(path, kind))},
        incomplete,
    )


def complete_group(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the consumer groups that have progress in the store of ``PATH``."""
    path = _argument(ctx, "path", 0)
    if not path:
        return []
    from rmqstore.config.places import progress_file
    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.errors import StoreError

    with contextlib.suppress(OSError, ValueError, StoreError):
        table = ConsumerOffsets.load(progress_file(path)).list()
        return _items({group for group, _ in table}, incomplete)
    return []


def complete_option(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the store's options, each with its ``=``."""
    from rmqstore.config import StoreConfig

    names = {
        f"{item.name}=" for item in dataclasses.fields(StoreConfig) if item.name not in ("clock", "assumed", "unknown")
    }
    return _items(names, incomplete)
