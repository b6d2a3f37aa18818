"""rmqstore serve: the socket, the token and the server process of the web console (`rmqstore.console`)."""

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

# mallopt(3): larger blocks have mappings of their own.
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 1 << 20


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=STORE_PATH)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; requires a token unless it is loopback."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port; 0 picks a free one.")
@click.option(
    "--token", envvar="RMQSTORE_TOKEN", help="Token for access; --token-file or RMQSTORE_TOKEN keep it out of ps."
)
@click.option("--token-file", type=FILE_THERE, help="Read the token from the first line of this file.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Accept requests to this host name; repeatable.",
)
@click.option(
    "--rabbitmq",
    multiple=True,
    type=STORE_PATH,
    metavar="DIR",
    help="Also show this RabbitMQ vhost or data directory; repeatable.",
)
@store_options
def serve(
    paths: tuple[str, ...], host: str, port: int, token: str | None, token_file: str | None,
    allowed_hosts: tuple[str, ...], rabbitmq: tuple[str, ...], given: Given,
) -> None:  # fmt: skip
    """Serve a read-only web console with a JSON API and metrics.

    PATH is the root of a store; with several stores, the pages of each are below /stores/. The store may grow, be rebuilt
    or be deleted while the server runs. Without a token the console is reachable from this machine only.
    """
    try:
        import uvicorn

        from rmqstore import console
        from rmqstore.console.gate import LOOPBACK_NAMES, is_loopback
        from rmqstore.console.traffic import Connection, backlog, tell_allocator
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise CannotOpenError(f"serve requires {error.name}", "Install it with pip install 'rmqstore[console]'.") from None
    token = _token(token, token_file)
    loopback = is_loopback(host)
    if not loopback and token is None:
        raise click.UsageError(
            f"--host {escape(host)} admits other machines: give --token-file FILE (or --token), or omit --host"
        )
    for path in paths:
        check_store_path(path)
    for path in rabbitmq:
        find_vhosts(path)
    # Without options the config is inferred whenever a store is opened.
    config = given.config(paths[0], read_only=True) if given.options or given.config_file is not None else None
    names = {*LOOPBACK_NAMES, *allowed_hosts, host.strip("[]").lower()}
    if not loopback:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    application = console.app(
        list(paths), config=config, token=token, rabbitmq=rabbitmq, allowed_hosts=names, any_address=not loopback
    )
    # Otherwise glibc raises the threshold up to 32 MiB, and each thread that has read a large body keeps as much forever.
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
    # Handle signals before printing the address: one during the creation of asyncio's loop would leave half a loop.
    with server.capture_signals():
        if given.as_json:
            printer.json_line(
                {"type": "serving", "address": address, "host": host, "port": real_port, "pid": os.getpid()}
            )
        else:
            printer.line(f"the console is at {address}" + (" (log in with the token)" if token else ""))
        sys.stdout.flush()
        note("press Ctrl-C to stop")
        server.run(sockets=[listening])


def _token(token: str | None, token_file: str | None) -> str | None:
    if token_file is not None:
        if token is not None:
            raise click.UsageError("give --token or --token-file, not both")
        with open(token_file, encoding="utf-8", errors="surrogateescape") as file:
            token = file.readline(4097).strip()
    if token is not None and len(token.strip()) < 8:
        where = "the token" if token_file is None else f"the first line of {escape(token_file)}"
        raise click.UsageError(f"{where} has fewer than 8 characters; use a token that is hard to guess")
    return token


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sets TCP_NODELAY only if the protocol is given; without it small responses wait 40 ms.
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # Clients now wait for the server instead of being refused: the address is printed next.
        listening.listen(backlog)
        return listening
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotOpenError(
            f"cannot listen on {host} port {port}: {reason}", "Give another --port (0 picks a free one) or --host."
        ) from None


def _shown(host: str) -> str:
    bare = host.strip("[]")
    return f"[{bare}]" if ":" in bare else bare
