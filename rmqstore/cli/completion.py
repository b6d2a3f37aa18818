"""rmqstore completion: the script for a shell; and what the Tab key completes: paths, topics, groups, options.

Owns the candidates.  They come from the names of directories and one small file, never from an opened store, and a
candidate that cannot be found is not an error: a shell in the middle of a line must not show one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import click
from click.shell_completion import CompletionItem, get_completion_class

from rmqstore.files.listing import listing

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
    # After an option that still lacks its value click has not given out the arguments.
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


def complete_queue(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The queue ids of ``TOPIC`` in the store of ``PATH``."""
    path, topic = _argument(ctx, "path", 0), _argument(ctx, "topic", 1)
    if not path or not topic or os.sep in topic:
        return []
    found = {
        name
        for kind in ("consumequeue", "batchconsumequeue")
        for name in _names_in(os.path.join(path, kind, topic))
        if name.isdigit()
    }
    return _items(found, incomplete)


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
