"""What a wrong PATH is and what to give instead, and what the Tab key completes.

It looks at names only, and never opens a store; a path is looked at after a command found that it cannot work there.
"""

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

# Whether it can be read is for the command to say, with the exit code of a store that cannot.
STORE_PATH = click.Path(readable=False)


class _SeenPath(click.Path):
    """A path that must be there; where this user may not look, nothing is said to be missing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            os.stat(value)
        except PermissionError as error:
            raise of_error(error) from None
        except (OSError, ValueError):
            pass  # Click says what is wrong.
        return super().convert(value, param, ctx)


FILE_THERE = _SeenPath(exists=True, dir_okay=False, readable=False)
"""Of an option: a file, or a pipe."""
FOLDER_THERE = _SeenPath(exists=True, file_okay=False, readable=False)
"""Of an option: a directory."""
# What the root of a store holds; one of them is enough for a command to have something to look at.
_PARTS = ("commitlog", "consumequeue", "batchconsumequeue", "index")


def is_store(path: str) -> bool:
    """bool: `path` is a directory with parts of a RocketMQ store."""
    return any(os.path.isdir(os.path.join(path, name)) for name in _PARTS)


def is_vhost(path: str) -> bool:
    """bool: `path` is a directory of RabbitMQ's classic queues, or holds one where a node has it."""
    from rmqstore.errors import StoreError
    from rmqstore.rabbitmq import find_vhosts

    try:
        return bool(find_vhosts(path))
    except (StoreError, OSError):
        return False


def check_store_path(path: str) -> None:
    """Raise CannotOpenError, with the path to give, unless `path` is a directory with parts of a RocketMQ store.

    PermissionError where this user may not look.
    """
    if is_store(path):
        return
    without_log(path)
    # Where this user may not look, nothing is known to be missing.
    is_directory(path)
    if not os.path.lexists(path):
        raise CannotOpenError(f"there is no such directory [{path}]", _missing_hint(path))
    root = _store_above(path)
    if root is not None:
        kind = "a part" if os.path.isdir(path) else "a file"
        raise CannotOpenError(f"this is {kind} of a store [{path}]", f"Give the store's root: {_shown(root)}")
    if not os.path.exists(path):
        raise CannotOpenError(
            f"this is a link that leads nowhere [{path}]", "Bring back what it leads to, as by mounting its disk."
        )
    if not os.path.isdir(path):
        raise CannotOpenError(
            f"this is a file and no directory [{path}]", "Give the store's root, the folder that holds commitlog/."
        )
    if is_vhost(path):
        raise CannotOpenError(
            f"these are RabbitMQ's queues and no RocketMQ store [{path}]",
            f"Try: rmqstore rabbitmq info {_shown(path)}",
        )
    below = _stores_below(path)
    if below:
        raise CannotOpenError(
            f"this directory is not a store, but one lies below it [{path}]",
            f"Give the store's root: {' or '.join(_shown(each) for each in below)}",
        )
    if os.path.isfile(os.path.join(path, "checkpoint")):
        raise CannotOpenError(
            f"this is a store into which nothing was put yet [{path}]",
            "It has no message to show. rmqstore import, or a program that opens it for writing, puts the first.",
        )
    raise CannotOpenError(
        f"this directory is {'empty' if is_empty(path) else 'no RocketMQ store: it has no commitlog/'} [{path}]",
        "Give the store's root (storePathRootDir of the broker.conf, by default ~/store), the folder that holds commitlog/.",
    )


def check_vhost_path(path: str) -> None:
    """Raise CannotOpenError if `path` is plainly a RocketMQ store."""
    if is_store(path) and not is_vhost(path):
        raise CannotOpenError(
            f"this is a RocketMQ store and no RabbitMQ directory [{path}]", f"Try: rmqstore info {_shown(path)}"
        )


def _shown(path: str) -> str:
    import shlex

    from rmqstore.cli.terminal import escape

    return escape(shlex.quote(path))


def _missing_hint(path: str) -> str:
    # How far the path is right.
    at = os.path.abspath(path)
    while not os.path.isdir(at) and os.path.dirname(at) != at:
        at = os.path.dirname(at)
    return f"{_shown(at)} is there, what follows is not. Give the store's root, the folder that holds commitlog/."


def _store_above(path: str) -> str | None:
    # commitlog/ and index/ are one below the root, a queue's directory and its files are up to four.
    at = os.path.abspath(path)
    below = ""
    for _ in range(5):
        at, name = os.path.split(at)
        below = name
        if below in (*_PARTS, "config") and is_store(at):
            relative = os.path.relpath(at)
            return at if os.path.isabs(path) or len(relative) > len(at) else relative
    return None


def _stores_below(path: str) -> list[str]:
    # Only what a store has for certain: many programs have folders of the name "index".
    return list(islice((each for each in listing(path).paths if os.path.isdir(os.path.join(each, "commitlog"))), 3))


_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the script that makes a shell complete commands, options, paths and topics.

    \b
    bash: add to ~/.bashrc:  eval "$(rmqstore completion bash)"
    zsh:  add to ~/.zshrc:   eval "$(rmqstore completion zsh)"
    fish: rmqstore completion fish > ~/.config/fish/completions/rmqstore.fish
    """
    from rmqstore.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(main, {}, "rmqstore", "_RMQSTORE_COMPLETE")
    # Not `source`, which runs the bash that is installed here to learn its version.
    click.echo(made.source_template % made.source_vars())


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Directories: the shell knows them."""
    return [CompletionItem(incomplete, type="dir")]


def _names_in(directory: str) -> list[str]:
    return listing(directory, os.DirEntry.is_dir).names


def _items(names: set[str], incomplete: str) -> list[CompletionItem]:
    # A name that could break the shell's line of candidates, or the terminal, is left out.
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and name.isprintable()]


def _argument(ctx: click.Context, name: str, place: int) -> str | None:
    # After an option that still lacks its value click has not assigned the arguments.
    value = ctx.params.get(name)
    if not value and place < len(ctx.args):
        value = ctx.args[place]
    return value


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The topics that have queues in the store of ``PATH``."""
    path = _argument(ctx, "path", 0)
    if not path:
        return []
    return _items(
        {name for kind in ("consumequeue", "batchconsumequeue") for name in _names_in(os.path.join(path, kind))},
        incomplete,
    )


def complete_group(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The consumer groups that have progress in the store of ``PATH``."""
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
    """The names of the store's options, each with its ``=``."""
    from rmqstore.config import StoreConfig

    names = {
        f"{item.name}=" for item in dataclasses.fields(StoreConfig) if item.name not in ("clock", "assumed", "unknown")
    }
    return _items(names, incomplete)
