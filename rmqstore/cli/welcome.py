"""What ``rmqstore`` alone says: the first steps, with the store that lies here if one does.

Owns that text.  It looks at names in the current folder and opens nothing.  Invariant: a name that a shell would take
apart stands in no line that is to be copied.
"""

from __future__ import annotations

import os
import textwrap

import click

from rmqstore._version import __version__
from rmqstore.files.listing import listing


def welcome(context: click.Context) -> str:
    """str: a page for somebody who knows no command yet."""
    here = "."
    if not os.path.isdir("commitlog"):
        # The name that a broker's own store has comes first.
        names = sorted(listing(".").names, key=lambda name: name != "store")
        below = [name for name in names if os.path.isdir(os.path.join(name, "commitlog"))]
        here = below[0] if below else ""
    # A name that a shell would take apart stands for itself in no line that is to be copied.
    if here and not all(char.isalnum() or char in "._-/" for char in here):
        here = ""
    path = here or "PATH"
    commands = context.command.list_commands(context) if isinstance(context.command, click.Group) else []
    lines = [
        f"rmqstore {__version__}: look into, check and repair the on-disk store of Apache RocketMQ.",
        "",
        f"A store lies here: {here}"
        if here
        else "PATH is a store's root, the folder that holds commitlog/ (a broker's ~/store).",
        "",
        "First steps:",
        f"  rmqstore info {path:<22} what the store is: geometry, log, queues, index, consumers",
        f"  rmqstore topics {path:<20} what it holds",
        f"  rmqstore tail -f {path:<19} the newest messages, and those that come",
        f"  rmqstore query {path} --key KEY{'':<{max(11 - len(path), 1)}} messages by key, of all topics",
        f"  rmqstore verify {path:<20} what is wrong with it",
        f"  rmqstore serve {path:<21} all of it in a browser",
        f"  rmqstore rabbitmq info {'PATH':<13} the same for RabbitMQ's classic queues",
        f"  rmqstore demo {'--unpack store':<22} no store at hand? This brings one along",
        "",
        "Commands:",
        textwrap.fill(" ".join(commands), 100, initial_indent="  ", subsequent_indent="  "),
        "",
        "rmqstore --help says more about them, rmqstore COMMAND --help everything about one, with examples.",
    ]
    return "\n".join(lines)
