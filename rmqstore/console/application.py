"""Putting the console together: routes, the gate in front of them, starting and ending.

Owns the list of addresses.  One store's pages lie at the root; several stores lie below ``/stores/<number>`` each.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Sequence

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount, Route

from rmqstore.config import StoreConfig
from rmqstore.console.api import Api
from rmqstore.console.downloads import Outgoing
from rmqstore.console.gate import LOOPBACK_NAMES, Admission, Gate
from rmqstore.console.pages import Console, Entrance, Pages, error_page, refused_page

__all__ = ["app"]

_SHORTEST_TOKEN = 8


class _PlaceConvertor(Convertor[int]):
    """A whole number of at most 19 digits; Starlette's own takes so many that Python refuses them."""

    regex = "[0-9]{1,19}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


class _RestConvertor(Convertor[str]):
    """The rest of the address, whatever is in it: a folder's name may hold a line break."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("place", _PlaceConvertor())
register_url_convertor("rest", _RestConvertor())


def app(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    config: StoreConfig | None = None,
    token: str | None = None,
    rabbitmq: Iterable[str | os.PathLike[str]] = (),
    allowed_hosts: Iterable[str] = LOOPBACK_NAMES,
    any_address: bool = False,
) -> Starlette:
    """The console as an ASGI application.

    Parameters
    ----------
    path : path or sequence of paths
        The root of a store; of several, each has its pages below ``/stores/<number>``.
    config : StoreConfig, optional
        The stores' geometry; by default found from their files.
    token : str, optional
        What every request has to show: once as ``?token=``, which gives a browser a cookie, or as ``Authorization: Bearer``.
    rabbitmq : iterable of path
        Vhosts, or data directories of nodes, to be shown as well.
    allowed_hosts : iterable of str
        Names that a request's Host may have; by default those of the loopback interface.  ``"*"`` is any.
    any_address : bool
        Allow any IP address as Host besides; for a server that listens on addresses which it does not know.

    Returns
    -------
    starlette.applications.Starlette

    Raises
    ------
    ValueError
        No path, or a token of fewer than 8 characters.

    Notes
    -----
    Whoever serves it on anything but loopback has to give a token: bodies of messages are there for everyone who can ask.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise ValueError("give the path of a store")
    if token is not None and len(token.strip()) < _SHORTEST_TOKEN:
        raise ValueError(
            f"the token has fewer than {_SHORTEST_TOKEN} characters; give one that is hard to guess, or None"
        )
    places = [os.fspath(each) for each in rabbitmq]
    consoles = [Console(os.fspath(each), config, places) for each in paths]
    entrance = Entrance([console.path for console in consoles])
    routes: list[BaseRoute] = [
        Route("/healthz", entrance.health),
        Route("/login", entrance.login, methods=["POST"]),
        Route("/static/{name}", entrance.static),
    ]
    if len(consoles) == 1:
        routes += _routes(consoles[0])
    else:
        routes.append(Route("/", entrance.stores))
        for number, console in enumerate(consoles):
            routes.append(
                Mount(f"/stores/{number}", routes=[Route("/static/{name}", entrance.static), *_routes(console)])
            )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for console in consoles:
                console.close()

    realm = "\n".join(os.path.abspath(console.path) for console in consoles)
    admission = Admission(token, tuple(allowed_hosts), any_address, realm)
    made = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(Outgoing),
            Middleware(Gate, admission=admission, refused=refused_page),
        ],
        exception_handlers={404: error_page, 405: error_page},
    )
    # For the pages of errors, which no store's page answers.
    made.state.stores = {
        f"/stores/{number}" if len(consoles) > 1 else "": (console.path, bool(places))
        for number, console in enumerate(consoles)
    }
    entrance.gate = Gate(made, admission=admission, refused=refused_page)
    return made


def _routes(console: Console) -> list[BaseRoute]:
    pages, api = Pages(console), Api(console)
    return [
        Route("/", pages.overview),
        Route("/queues", pages.queues),
        Route("/queues/{place:rest}", pages.queue),
        Route("/messages", pages.messages),
        Route("/message/{phy_offset:place}", pages.message),
        Route("/message/{phy_offset:place}/body", pages.body),
        Route("/message/{phy_offset:place}/record", pages.record),
        Route("/index", pages.index),
        Route("/index/{name}", pages.index_file),
        Route("/consumers", pages.consumers),
        Route("/pending", pages.pending),
        Route("/settings", pages.settings),
        Route("/verify", pages.verify),
        Route("/verify/start", pages.verify_start, methods=["POST"]),
        Route("/verify/stop", pages.verify_stop, methods=["POST"]),
        Route("/rabbitmq", pages.rabbitmq),
        Route("/rabbitmq/{number:place}", pages.rabbitmq_vhost),
        Route("/rabbitmq/{number:place}/queues/{name:rest}", pages.rabbitmq_queue),
        Route("/metrics", pages.metrics),
        *(Route(path, getattr(api, name), methods=[method]) for path, name, method in api.addresses()),
    ]
