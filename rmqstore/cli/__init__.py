"""The command line.  Each command is a module here and a line in `_COMMANDS`, and is loaded when it is used.

- Only ``import``, ``rebuild``, ``recover``, ``offsets set`` and ``rabbitmq import`` write to a store (and ``demo``, to its
  own); all other commands open it read-only.
- Exit codes: 0 success, 1 findings or nothing found, 2 wrong usage, 3 the store cannot be opened or read.
- Control and other invisible characters from a store are escaped before they reach the terminal.
- ``--json`` prints one object a line on stdout and nothing else; notes, progress and errors go to stderr.

Commands share `group` (exit codes, lazy loading, examples), `errors` (messages with the options of the command line),
`terminal` (tables, JSON lines, progress), `options`, `paths` (checks of PATH, and completion) and `messages` (messages as
lines or objects).
"""

from __future__ import annotations

import os
import textwrap

import click

from rmqstore._version import __version__
from rmqstore.cli.group import StoreGroup

__all__ = ["main"]

# By name: module, attribute, and the first sentence of the help (a test compares them), to list commands without loading them.
_COMMANDS = {
    "completion": (
        "rmqstore.cli.paths",
        "completion",
        "Print a shell script that completes commands, options, paths and topics.",
    ),
    "demo": ("rmqstore.demo", "main", "Verify, rebuild and read a real broker's store, and measure the speed."),
    "dump": ("rmqstore.cli.dump", "dump", "Print the structures on disk, including damaged ones."),
    "export": (
        "rmqstore.cli.transfer",
        "export_command",
        "Export messages as JSON lines, CSV, Arrow, Parquet, or one file per body.",
    ),
    "get": ("rmqstore.cli.query", "get", "Read the messages of a queue in order."),
    "import": (
        "rmqstore.cli.transfer",
        "import_command",
        "Append messages from files to a store, which is created if it does not exist.",
    ),
    "info": ("rmqstore.cli.info", "info", "Describe a store: geometry, log, queues, index, checkpoint."),
    "metrics": (
        "rmqstore.cli.metrics",
        "metrics_command",
        "Print metrics for Prometheus: queues, consumer lag, disk, index, checkpoint.",
    ),
    "offsets": (
        "rmqstore.cli.offsets",
        "offsets",
        "Show and set the progress of consumer groups.",
    ),
    "pending": (
        "rmqstore.cli.pending",
        "pending_command",
        "List pending messages: delayed, timer, transactions, retries, dead letters.",
    ),
    "query": (
        "rmqstore.cli.query",
        "query",
        "Find messages by key, id or phy offset, newest first.",
    ),
    "queues": (
        "rmqstore.cli.info",
        "queues",
        "List the queues with their offsets, messages, files, and first and last store times.",
    ),
    "rabbitmq": (
        "rmqstore.cli.rabbitmq",
        "main",
        "Inspect, repair, export and import RabbitMQ's classic queues on disk.",
    ),
    "rebuild": ("rmqstore.cli.rebuild", "rebuild_command", "Rebuild the index and the consume queues from the commit log."),
    "recover": (
        "rmqstore.cli.rebuild",
        "recover_command",
        "Recover a store after a crash, as a broker does at startup, and shut it down cleanly.",
    ),
    "serve": (
        "rmqstore.cli.serve",
        "serve",
        "Serve a read-only web console with a JSON API and metrics.",
    ),
    "settings": (
        "rmqstore.cli.settings",
        "settings_command",
        "Show a broker's topics, groups, consumer offsets and pop records.",
    ),
    "sql": (
        "rmqstore.cli.sql",
        "sql",
        "Query a store in SQL; the tables are messages, queues, index_entries and consumers.",
    ),
    "tail": ("rmqstore.cli.tail", "tail", "Show the newest messages, and follow new ones with -f."),
    "topics": (
        "rmqstore.cli.info",
        "topics",
        "List the topics with their queues, messages, and first and last store times.",
    ),
    "verify": (
        "rmqstore.cli.verify",
        "verify_command",
        "Check a store for damage and inconsistencies.",
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
    """Inspect, check and repair the on-disk store of Apache RocketMQ.

    PATH is the root of the store (RocketMQ's storePathRootDir), the folder that contains commitlog/. Commands marked
    [writes], offsets set and rabbitmq import write to the store. All other commands are read-only, take no lock, and can
    run while the broker is running.

    Exit codes: 0 success, 1 findings or nothing found, 2 wrong usage, 3 the store cannot be opened or read.
    """
    if context.invoked_subcommand is None:
        click.echo(_welcome(main.list_commands(context)))


def _welcome(commands: list[str]) -> str:
    # The path is that of a store in this folder, if there is one.
    path = next((each for each in (".", "store") if os.path.isdir(os.path.join(each, "commitlog"))), "PATH")
    lines = [
        f"rmqstore {__version__}: inspect, check and repair the on-disk store of Apache RocketMQ.",
        "",
        "PATH is the root of a store, the folder that contains commitlog/ (a broker's ~/store).",
        "",
        "First steps:",
        f"  rmqstore info {path:<22} describe the store: geometry, log, queues, index",
        f"  rmqstore topics {path:<20} list its topics",
        f"  rmqstore tail -f {path:<19} show the newest messages, and follow new ones",
        f"  rmqstore query {path} --key KEY{'':<{11 - len(path)}} find messages by key",
        f"  rmqstore verify {path:<20} check it for damage",
        f"  rmqstore serve {path:<21} open it in a browser",
        f"  rmqstore rabbitmq info {'PATH':<13} describe RabbitMQ's classic queues",
        f"  rmqstore demo {'--unpack store':<22} unpack a sample store to try this on",
        "",
        "Commands:",
        textwrap.fill(" ".join(commands), 100, initial_indent="  ", subsequent_indent="  "),
        "",
        "Run rmqstore --help for a summary of each, and rmqstore COMMAND --help for options and examples.",
    ]
    return "\n".join(lines)
