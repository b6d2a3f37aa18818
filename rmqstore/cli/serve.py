"""rmqstore serve: the web console.

Owns the socket, the token as it is given, and the process of the server; pages and rights are `rmqstore.console`'s.
It loads the web only when it runs.  Invariant: an address other than loopback needs a token.
"""

from __future__ import annotations

import os
import socket
import sys

import click

from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.options import Given, store_options
from rmqstore.cli.paths import FILE_THERE, STORE_PATH, check_store_path
from rmqstore.cli.terminal import Printer, escape, note
from rmqstore.errors import MissingDependencyError
from rmqstore.rabbitmq import find_vhosts

# mallopt(3): blocks from so many bytes on are mapped by themselves.
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 1 << 20


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=STORE_PATH)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; any but loopback needs a token."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option(
    "--token", envvar="RMQSTORE_TOKEN", help="What a visitor must know; better given by --token-file or RMQSTORE_TOKEN."
)
@click.option(
    "--token-file", type=FILE_THERE, help="A file with the token on its first line."
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that visitors may use; repeatable.",
)
@click.option(
    "--rabbitmq",
    multiple=True,
    type=STORE_PATH,
    metavar="DIR",
    help="A RabbitMQ vhost or data directory to show as well.",
)
@store_options
def serve(
    paths: tuple[str, ...], host: str, port: int, token: str | None, token_file: str | None,
    allowed_hosts: tuple[str, ...], rabbitmq: tuple[str, ...], given: Given,
) -> None:  # fmt: skip
    """Serve a web console over a store: pages, a JSON API and metrics; read-only.

    PATH is the store's root; of several, each has its pages below /stores/. The store may grow, be rebuilt or vanish
    meanwhile. Without a token only this machine can ask.
    """
    try:
        import uvicorn

        from rmqstore import console
        from rmqstore.console.gate import LOOPBACK_NAMES, is_loopback
        from rmqstore.console.traffic import Connection, backlog, tell_allocator
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise CannotOpenError(f"serve needs {error.name}", "Install it with pip install 'rmqstore[console]'.") from None
    token = _token(token, token_file)
    loopback = is_loopback(host)
    if not loopback and token is None:
        raise click.UsageError(
            f"--host {escape(host)} lets other machines in: give --token-file FILE (or --token), or leave --host at 127.0.0.1"
        )
    for path in paths:
        check_store_path(path)
    for path in rabbitmq:
        find_vhosts(path)
    # Options that were given hold for the whole run; otherwise the files tell again whenever a store is opened.
    config = given.config(paths[0], read_only=True) if given.options or given.config_file is not None else None
    names = {*LOOPBACK_NAMES, *allowed_hosts, host.strip("[]").lower()}
    if not loopback:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    application = console.app(
        list(paths), config=config, token=token, rabbitmq=rabbitmq, allowed_hosts=names, any_address=not loopback
    )
    # glibc raises the threshold by itself, up to 32 MiB; then each thread that once read a large body keeps as much for ever.
    tell_allocator("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK)
    listening = _listen(host, port, backlog())
    real_port = listening.getsockname()[1]
    address = f"http://{_shown(host)}:{real_port}/"
    server = uvicorn.Server(
        uvicorn.Config(
            application, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
            date_header=True, timeout_graceful_shutdown=5, timeout_keep_alive=15, backlog=backlog(), ws="none", http=Connection,
        )
    )  # fmt: skip
    printer = Printer(given.as_json)
    # The server takes signals before it is announced: one that came while asyncio makes its loop would leave half a loop.
    with server.capture_signals():
        if given.as_json:
            printer.json_line(
                {"type": "serving", "address": address, "host": host, "port": real_port, "pid": os.getpid()}
            )
        else:
            printer.line(f"the console is at {address}" + (" (it asks for the token)" if token else ""))
        sys.stdout.flush()
        note("Ctrl-C ends it")
        server.run(sockets=[listening])


def _token(token: str | None, token_file: str | None) -> str | None:
    if token_file is not None:
        if token is not None:
            raise click.UsageError("give --token or --token-file, not both")
        with open(token_file, encoding="utf-8", errors="surrogateescape") as file:
            token = file.readline(4097).strip()
    if token is not None and len(token.strip()) < 8:
        where = "the token" if token_file is None else f"the first line of {escape(token_file)}"
        raise click.UsageError(f"{where} has fewer than 8 characters; give one that is hard to guess")
    return token


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol named, asyncio sends small answers at once (TCP_NODELAY); without it each waits 40 ms.
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # From here on who comes waits for the server instead of being refused: the address is printed next.
        listening.listen(backlog)
        return listening
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotOpenError(
            f"cannot listen on {host} port {port}: {reason}", "Give another --port (0 takes a free one) or --host."
        ) from None


def _shown(host: str) -> str:
    bare = host.strip("[]")
    return f"[{bare}]" if ":" in bare else bare
