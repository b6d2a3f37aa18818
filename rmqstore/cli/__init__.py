"""The command line: a diagnostic instrument for a store on disk.

Owns the list of commands; each lies in a module of its own, which is loaded when the command is used.  Every answer comes
from the package's public functions.  Invariants:

- Only ``import``, ``rebuild``, ``recover``, ``offsets set`` and ``rabbitmq import`` write into a store (and ``demo``, into
  one of its own); every other command opens read-only.
- Exit codes: 0 fine, 1 findings or nothing found, 2 wrong usage, 3 the store cannot be opened or read.
- Text from a store never reaches the terminal raw: control and other invisible characters are escaped.
- ``--json`` prints one object a line on stdout and nothing else there; notes, progress and errors go to stderr.

Shared by all commands: `group` (exit codes, lazy commands, examples of each help), `errors` (how they read, with the options
of the command line), `terminal` (how an answer looks), `options`, `paths` (what a wrong PATH is, and completion), `messages`
(a message as a line or an object).

A new command is a module here and a line in `_COMMANDS`.
"""

from __future__ import annotations

import os
import textwrap

import click

from rmqstore._version import __version__
from rmqstore.cli.group import StoreGroup

__all__ = ["main"]

# By name: module, attribute, and the first sentence of its help (a test holds it equal), so that a list of commands loads none.
_COMMANDS = {
    "backup": (
        "rmqstore.cli.backup",
        "backup_command",
        "Back up a store into a folder, also while a broker or a program writes to it.",
    ),
    "completion": (
        "rmqstore.cli.paths",
        "completion",
        "Print the script that makes a shell complete commands, options, paths and topics.",
    ),
    "demo": ("rmqstore.demo", "main", "Run the main job on a real broker's store, with checks and rates."),
    "dump": ("rmqstore.cli.dump", "dump", "Print a store's structures as they lie on disk, damage included."),
    "export": (
        "rmqstore.cli.transfer",
        "export_command",
        "Write messages to a file: JSON lines, CSV, Arrow, Parquet, or a file for each body.",
    ),
    "get": ("rmqstore.cli.query", "get", "Read messages of a queue in order."),
    "import": (
        "rmqstore.cli.transfer",
        "import_command",
        "Put the messages of files into a store, after those that are there; a new store is made.",
    ),
    "info": ("rmqstore.cli.info", "info", "Describe a store: geometry, log, queues, index, checkpoint."),
    "metrics": (
        "rmqstore.cli.metrics",
        "metrics_command",
        "Print the metrics of stores for Prometheus: queues, consumer lag, disk, index, checkpoint.",
    ),
    "offsets": (
        "rmqstore.cli.offsets",
        "offsets",
        "Progress of consumer groups: what is next for each, and its lag.",
    ),
    "pending": (
        "rmqstore.cli.pending",
        "pending_command",
        "List what still waits: delayed and timer messages, transactions, retries, dead letters.",
    ),
    "query": (
        "rmqstore.cli.query",
        "query",
        "Find messages by key in the index, newest first, each checked against its message.",
    ),
    "queues": (
        "rmqstore.cli.info",
        "queues",
        "List the queues: queue offsets, messages, files, and the store times of the first and the last.",
    ),
    "rabbitmq": (
        "rmqstore.cli.rabbitmq",
        "main",
        "Look into RabbitMQ's classic queues on disk, repair them, and carry messages out and in.",
    ),
    "rebuild": ("rmqstore.cli.rebuild", "rebuild_command", "Rebuild index and consume queues from the commit log."),
    "recover": (
        "rmqstore.cli.rebuild",
        "recover_command",
        "Do what a start after a crash does, say what it was, and close the store in order.",
    ),
    "serve": (
        "rmqstore.cli.serve",
        "serve",
        "Serve a web console over a store: pages, a JSON API and metrics; read-only.",
    ),
    "settings": (
        "rmqstore.cli.settings",
        "settings_command",
        "Show a broker's topics, groups, consumer offsets and pop records.",
    ),
    "sql": (
        "rmqstore.cli.sql",
        "sql",
        "Ask a store in SQL: the tables are messages, queues, index_entries and consumers.",
    ),
    "tail": ("rmqstore.cli.tail", "tail", "Show the newest messages, oldest first, and with -f those that come."),
    "topics": (
        "rmqstore.cli.info",
        "topics",
        "List the topics: queues, messages, and the store times of the first and the last.",
    ),
    "verify": (
        "rmqstore.cli.verify",
        "verify_command",
        "Look for everything that is wrong in a store; exit code 1 if anything is.",
    ),
}


class _MainGroup(StoreGroup):
    lazy_commands = _COMMANDS
    writing_commands = frozenset({"import", "rebuild", "recover"})


@click.group(
    name="rmqstore",
    cls=_MainGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="rmqstore")
@click.pass_context
def main(context: click.Context) -> None:
    """Look into, check and repair the on-disk store of Apache RocketMQ.

    PATH is the store's root (RocketMQ's storePathRootDir, the folder that holds commitlog/). Commands marked [writes],
    offsets set and rabbitmq import write into a store; every other opens it read-only, locks nothing and works beside a
    running broker.

    Exit codes: 0 fine, 1 findings or nothing found, 2 wrong usage, 3 the store cannot be opened.
    """
    if context.invoked_subcommand is None:
        click.echo(_welcome(main.list_commands(context)))


def _welcome(commands: list[str]) -> str:
    # For somebody who knows no command yet: the first steps, with the store in this folder if there is one.
    path = next((each for each in (".", "store") if os.path.isdir(os.path.join(each, "commitlog"))), "PATH")
    lines = [
        f"rmqstore {__version__}: look into, check and repair the on-disk store of Apache RocketMQ.",
        "",
        "PATH is a store's root, the folder that holds commitlog/ (a broker's ~/store).",
        "",
        "First steps:",
        f"  rmqstore info {path:<22} what the store is: geometry, log, queues, index",
        f"  rmqstore topics {path:<20} what it holds",
        f"  rmqstore tail -f {path:<19} the newest messages, and those that come",
        f"  rmqstore query {path} --key KEY{'':<{11 - len(path)}} messages by key, of all topics",
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
