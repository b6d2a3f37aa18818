"""rmqstore completion: the script for a shell; and what the Tab key completes: paths, topics, groups, options.

Owns the candidates.  They come from the names of directories and one small file, never from an opened store, and a
candidate that cannot be found is no error: a shell in the middle of a line must not show one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os

import click
from click.shell_completion import CompletionItem, get_completion_class

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
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
    return []


def _items(names: set[str], incomplete: str) -> list[CompletionItem]:
    # A name that could break the shell's line of candidates, or the terminal, is left out.
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and name.isprintable()]


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The topics that have queues in the store of ``PATH``."""
    path = ctx.params.get("path")
    if not path:
        return []
    return _items(
        {name for kind in ("consumequeue", "batchconsumequeue") for name in _names_in(os.path.join(path, kind))},
        incomplete,
    )


def complete_queue(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The queue ids of ``TOPIC`` in the store of ``PATH``."""
    path, topic = ctx.params.get("path"), ctx.params.get("topic")
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
    path = ctx.params.get("path")
    if not path:
        return []
    groups: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        with open(os.path.join(path, "config", "consumerOffset.json"), encoding="utf-8") as file:
            table = json.load(file).get("offsetTable") or {}
        # A line is topic@group; neither may hold another @.
        groups = {key.partition("@")[2] for key in table if isinstance(key, str) and "@" in key}
    return _items(groups, incomplete)


def complete_option(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of the store's options, with ``=`` behind."""
    from rmqstore.config import StoreConfig

    names = {
        f"{item.name}=" for item in dataclasses.fields(StoreConfig) if item.name not in ("clock", "assumed", "unknown")
    }
    return _items(names, incomplete)
