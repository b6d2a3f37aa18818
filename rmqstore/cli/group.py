"""Groups of commands: exit codes, signals, lazy loading, and the examples in the help.

No traceback reaches a user.  tests/cli/test_cli_examples.py runs every example on a real broker's store.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from rmqstore.cli.errors import did_you_mean, of_error, warning_text
from rmqstore.cli.terminal import discard, escape, note
from rmqstore.errors import StoreError

FOUND_NOTHING = 1
# A shell's exit codes for SIGINT and SIGPIPE.
INTERRUPTED = 128 + 2
READER_GONE = 128 + 13
# The signals that end a command, and the seconds for which a library may continue after one.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 1.0
_ENDED = tuple(128 + number for number in _ENDING)


class StoreGroup(click.Group):
    """A group that maps errors to exit codes, and loads `lazy_commands` when they are used."""

    # By name: module, attribute, short help.
    lazy_commands: dict[str, tuple[str, str, str]] = {}
    # Those of them that write to a store.
    writing_commands: frozenset[str] = frozenset()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy_commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy_commands:
            module, attribute, _ = self.lazy_commands[cmd_name]
            command: click.Command | None = getattr(importlib.import_module(module), attribute)
        else:
            command = super().get_command(ctx, cmd_name)
        if command is not None and not command.epilog:
            # The first word is the program, which may have any name.
            command.epilog = epilog_of(" ".join([*ctx.command_path.split()[1:], cmd_name]))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and name not in self.list_commands(ctx):
            near = did_you_mean(name, self.list_commands(ctx))
            if near:
                advice = near[0].upper() + near[1:]
            elif os.path.exists(name):
                advice = f"Give the path after the command: {ctx.command_path} COMMAND {name}"
            else:
                advice = f"See {ctx.command_path} --help."
            raise click.UsageError(escape(f"no such command {name!r}. {advice}"), ctx)
        return super().resolve_command(ctx, args)

    def _short(self, ctx: click.Context, name: str) -> tuple[str, bool]:
        # The help of a command in a line, and whether it writes.
        if name in self.lazy_commands:
            return self.lazy_commands[name][2], name in self.writing_commands
        command = self.get_command(ctx, name)
        assert command is not None
        return command.get_short_help_str(90), "THIS COMMAND WRITES" in (command.help or "")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._short(ctx, name)[0]) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            short, writes = self._short(ctx, name)
            rows.append((name, f"[writes] {short}" if writes else short))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command; a full disk under stdout or stderr ends it with an exit code, without a traceback."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            # While printing the help, the version or a usage error.
            shown = of_error(error)
            shown.show()
            sys.exit(shown.exit_code)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except KeyboardInterrupt:
            # `invoke` handles those that come later.
            note("interrupted")
            sys.exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        for name in ("stdin", "stdout", "stderr"):
            # If a shell closed it (>&-), take its descriptor before a file of a store could get it.
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        for stream in (sys.stdout, sys.stderr):
            # Escape characters that the terminal's encoding lacks.
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            with _logging_escaped(), _no_interrupt_lost():
                try:
                    result = super().invoke(ctx)
                except click.exceptions.Exit:
                    sys.stdout.flush()
                    raise
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # For example head or a pager has exited.
            discard(sys.stdout)
            ctx.exit(READER_GONE)
        except KeyboardInterrupt:
            note("interrupted")
            ctx.exit(INTERRUPTED)
        except click.Abort as error:
            # Ctrl-C or the end of input at a prompt.
            if isinstance(error.__context__, KeyboardInterrupt):
                click.echo(err=True)
                note("interrupted")
                ctx.exit(INTERRUPTED)
            click.echo(err=True)
            exit_not_found("nothing was changed")
        except click.UsageError as error:
            hint = _where_output_goes(error)
            if hint:
                raise click.UsageError(error.message + hint, error.ctx) from None
            raise
        except (StoreError, OSError, MemoryError) as error:
            raise of_error(error) from None


def _where_output_goes(error: click.UsageError) -> str:
    # Many programs take the output file as a second argument.  A group in a group calls this twice.
    if error.ctx is None or "unexpected extra argument (" not in error.message or "--output" in error.message:
        return ""
    takes = [each for each in error.ctx.command.params if "--output" in each.opts]
    return ". Give the output file with --output" if takes else ""


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(warning_text(record))
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def orderly_end(clear_away: Callable[[], object] | None = None) -> Iterator[None]:
    """End the block on SIGTERM or SIGHUP like on Ctrl-C, so that it removes unfinished files.

    No handler runs during a long call of a library: a thread then calls `clear_away` and ends the process.
    """

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        # Fails outside the main thread.
        with contextlib.suppress(ValueError):
            number = getattr(signal, name)
            before[number] = signal.signal(number, end)
    try:
        with contextlib.nullcontext() if clear_away is None or not before else _watched(clear_away):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _watched(clear_away: Callable[[], object]) -> Iterator[None]:
    # Python writes signals to the wakeup descriptor at once, whatever the main thread does.
    over = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        for number in iter(lambda: reader.recv(1), b""):
            if number[0] in _ENDING and not over.wait(_PATIENCE):
                clear_away()
                os._exit(128 + number[0])

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="rmqstore-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        writer.close()
        watcher.join()
        reader.close()


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Repeat a signal that arrives during an object's finalizer, where Python would only print it."""

    over = threading.Event()

    def again(number: int) -> None:
        # Wait for the end of the hook, and for a library that may have noticed the first signal.
        if not over.wait(_PATIENCE):
            os.kill(os.getpid(), number)

    def hook(lost: Any, /) -> None:
        code = getattr(lost.exc_value, "code", None)
        if issubclass(lost.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, (signal.SIGINT,))
        elif issubclass(lost.exc_type, SystemExit) and code in _ENDED:
            _thread.start_new_thread(again, (code - 128,))
        else:
            before(lost)

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        over.set()
        sys.unraisablehook = before


@contextlib.contextmanager
def _logging_escaped() -> Iterator[None]:
    """Print warnings of the package as notes; Python's default handler would not escape names from a store."""
    log = logging.getLogger("rmqstore")
    if log.hasHandlers():
        # A program that runs the command has set up logging, or this is a group in a group.
        yield
        return
    handler = _NoteHandler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def exit_not_found(text: str) -> NoReturn:
    """Print the text on stderr and exit with the code of findings, or of nothing found."""
    note(text)
    click.get_current_context().exit(FOUND_NOTHING)


EXAMPLES: dict[str, tuple[str, ...]] = {
    "completion": ('eval "$(rmqstore completion bash)"',),
    "demo": ("rmqstore demo --unpack sample", "rmqstore demo", "rmqstore demo --messages 100000 --dir /tmp"),
    "dump": (
        "rmqstore dump store --begin-phy-offset 1048000 --end-phy-offset 1049500",
        "rmqstore dump store --what queue --topic Payments --queue 1",
        "rmqstore dump store --what index | grep longest",
        "rmqstore dump store/commitlog/00000000000001048576 --end-phy-offset 1049500",
        "rmqstore dump store/checkpoint",
    ),
    "export": (
        "rmqstore export store --topic Orders -O orders.parquet",
        "rmqstore export store --begin 2026-11-21 --end 2026-11-21 -O 2026-11-21.jsonl.gz",
        "rmqstore export store --topic Orders --tags 'paid || shipped' --begin 2026-11-21T05:32:45Z -O orders.csv.gz",
        "rmqstore export store --topic Payments --columns keys,store_timestamp,body | head -n 2",
        "rmqstore export store --topic Documents --format files -O bodies",
    ),
    "get": (
        "rmqstore get store Orders 3",
        "rmqstore get store Orders 3 --begin 2026-11-21T05:32:45Z --tags 'paid || shipped'",
        "rmqstore get store Orders 3 --max-num 5 --format '%T %p/%o %k %s'",
        "rmqstore get store Orders 3 --begin-queue-offset 7 --max-num 100 --json --body none",
    ),
    "import": (
        "rmqstore export store --topic Payments -O payments.jsonl && rmqstore import new payments.jsonl",
        "rmqstore export store -O all.parquet && rmqstore import copy all.parquet --keep-timestamps",
    ),
    "info": ("rmqstore info store", "rmqstore info store --json | python3 -m json.tool | less"),
    "metrics": (
        "rmqstore metrics store | grep rocketmq_group_diff",
        "rmqstore metrics store -O rmqstore.prom --cluster DefaultCluster --broker broker-a",
    ),
    "offsets": ("rmqstore offsets store", "rmqstore offsets show store --group G-billing"),
    "offsets set": (
        "rmqstore offsets set store --group G-billing --topic Orders --queue 1 --queue-offset 2500",
        "rmqstore offsets set store --group G-billing --topic Orders --time '2h ago'",
    ),
    "offsets show": ("rmqstore offsets show store", "rmqstore offsets show store --group G-billing --json"),
    "pending": (
        "rmqstore pending store",
        "rmqstore pending store --kind timer --kind delayed --overdue",
        "rmqstore pending store --topic Payments --json",
        "rmqstore pending store -O pending.parquet",
    ),
    "query": (
        "rmqstore query store Orders ORD-100000",
        "rmqstore query store --key ORD-100000",
        "rmqstore query store Orders CUST-1 --begin 2026-11-21T05:32:40Z --max-num 10 --body none",
        "rmqstore query store Orders created --type tag --max-num 5",
        "rmqstore query store Orders ORD-100000 ORD-100001 --max-num 1 --body none",
        "rmqstore query store --id 7F0000010000518C000000000000037E --json",
        "rmqstore query store --phy-offset 484 --body hex",
    ),
    "queues": ("rmqstore queues store", "rmqstore queues store Orders --json"),
    "rabbitmq": ("rmqstore rabbitmq queues vhost",),
    "rabbitmq dump": ("rmqstore rabbitmq dump vhost --queue q --max-num 2",),
    "rabbitmq export": ("rmqstore rabbitmq export vhost -O messages.jsonl",),
    "rabbitmq import": (
        "rmqstore rabbitmq export vhost -O messages.jsonl && rmqstore rabbitmq import vhost q messages.jsonl --declared",
    ),
    "rabbitmq info": ("rmqstore rabbitmq info vhost",),
    "rabbitmq queues": ("rmqstore rabbitmq queues vhost --json",),
    "rabbitmq repair": ("rmqstore rabbitmq repair vhost repaired",),
    "rabbitmq verify": ("rmqstore rabbitmq verify vhost",),
    "rebuild": (
        "rmqstore rebuild store --output rebuilt -o messageDelayLevel='1s 2s 30m 1h'",
        "rmqstore rebuild store --what index --yes -o messageDelayLevel='1s 2s 30m 1h'",
    ),
    "recover": (
        "rmqstore recover store -o messageDelayLevel='1s 2s 30m 1h'",
        "rmqstore recover store --mode skip -o messageDelayLevel='1s 2s 30m 1h'",
    ),
    "serve": ("rmqstore serve store --port 0", "rmqstore serve store --port 0 --rabbitmq vhost"),
    "settings": (
        "rmqstore settings store",
        "rmqstore settings store --what topics --json",
    ),
    "sql": (
        """rmqstore sql store "select topic, count(*) as n from messages group by topic order by n desc limit 5\"""",
        """rmqstore sql store "select tags, body from messages where topic = 'Orders' and 'ORD-100000' = any(keys)\"""",
        """rmqstore sql store "select * from consumers where lag > 0" --json""",
        """rmqstore sql store "select keys, tags, body from messages where topic = 'Orders'" -O orders.parquet""",
    ),
    "tail": (
        "rmqstore tail store",
        "rmqstore tail store Orders -n 3 --tags 'paid || shipped' --body none",
        "rmqstore tail store -n 5 --format '%d %t/%p %k'",
        "rmqstore tail store Orders --key CUST-1 -n 2 --json",
        "rmqstore tail -f store Orders",
    ),
    "topics": ("rmqstore topics store", "rmqstore topics store Orders", "rmqstore topics store --sort bytes"),
    "verify": ("rmqstore verify store", "rmqstore verify store -o messageDelayLevel='1s 2s 30m 1h' --json | tail -1"),
}


def epilog_of(command: str) -> str | None:
    """Return the examples of `command` (the words after ``rmqstore``) for its help, if there are any."""
    lines = EXAMPLES.get(command)
    if lines is None:
        return None
    # \b keeps click from rewrapping the lines.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
