"""A web application that stores events as they come, at a high rate, and finds them by key.

    python examples/web_events.py [--events 20000] [DIRECTORY]     runs it, sends events, asks for them, and checks
    uvicorn --factory web_events:application                       serves it; the store is $EVENTS_STORE, or ./events

    POST /events        one event, or a list of them: {"user": "u-17", "kind": "click", …}; 202 with the ids of their messages
    GET  /events/USER   the newest events of a user, ?limit=20&before=MILLISECONDS
    GET  /health        how many there are

A request is answered when its events are stored.  Putting a message takes microseconds, and the requests that wait at
the same moment go into the store as **one** batch: one lock, and with SYNC_FLUSH one flush for all of them.  A thread of its own
does that, so that no request waits for the disk of another, and the event loop never does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rmqstore import Message, MessageStore, StoreConfig

TOPIC = "Events"
LARGEST_REQUEST = 4 * 2**20
MOST_EVENTS_A_REQUEST = 1000


class Writer:
    """Puts what requests bring, as many as wait at once in one batch, in a thread of its own."""

    def __init__(self, store: MessageStore):
        self._store = store
        self._waiting: queue.SimpleQueue[tuple[list[Message], asyncio.Future[list[str]]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="event writer")
        self._thread.start()
        self.batches = 0

    async def put(self, messages: list[Message]) -> list[str]:
        """Store messages; returns their ids when they can be found."""
        done: asyncio.Future[list[str]] = self._loop.create_future()
        self._waiting.put((messages, done))
        return await done

    def close(self) -> None:
        """Store what waits, then end."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            requests = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while requests[-1] is not None:
                    requests.append(self._waiting.get_nowait())
            last = requests[-1] is None
            taken = [request for request in requests if request is not None]
            if taken:
                self._store_all(taken)

    def _store_all(self, taken: list[tuple[list[Message], asyncio.Future[list[str]]]]) -> None:
        try:
            puts = self._store.put_messages([message for messages, _ in taken for message in messages])
        except Exception as error:
            for _, done in taken:
                self._loop.call_soon_threadsafe(_fail, done, error)
            return
        self.batches += 1
        at = 0
        for messages, done in taken:
            ids = [put.msg_id for put in puts[at : at + len(messages)]]
            at += len(messages)
            self._loop.call_soon_threadsafe(_finish, done, ids)


def _finish(done: asyncio.Future[list[str]], ids: list[str]) -> None:
    # A client that went away has cancelled its wait.
    if not done.done():
        done.set_result(ids)


def _fail(done: asyncio.Future[list[str]], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def message_of(event: Any) -> Message:
    """The message of one event; its user is its key, its kind the tag.

    Raises
    ------
    ValueError
        It is no event.
    """
    if not isinstance(event, dict):
        raise ValueError("an event is a JSON object")
    user, kind = event.get("user"), event.get("kind")
    for name, value in (("user", user), ("kind", kind)):
        if (
            not isinstance(value, str)
            or not value
            or len(value) > 100
            or not value.isprintable()
            or " " in value
            or "|" in value
        ):
            raise ValueError(f"{name} is a text of 1 to 100 printable characters without spaces and without |")
    return Message(TOPIC, json.dumps(event, separators=(",", ":")).encode(), keys=[user], tags=kind)


async def post_events(request: Request) -> JSONResponse:
    """Store the events of a request."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_REQUEST:
            return JSONResponse({"error": f"at most {LARGEST_REQUEST} bytes at once"}, status_code=413)
    try:
        events = json.loads(body)
        events = events if isinstance(events, list) else [events]
        if not 0 < len(events) <= MOST_EVENTS_A_REQUEST:
            raise ValueError(f"1 to {MOST_EVENTS_A_REQUEST} events at once")
        messages = [message_of(event) for event in events]
    except (ValueError, RecursionError) as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    ids = await request.app.state.writer.put(messages)
    return JSONResponse({"stored": ids}, status_code=202)


async def get_events(request: Request) -> JSONResponse:
    """The newest events of a user."""
    try:
        limit = min(int(request.query_params.get("limit", 20)), 1000)
        before = int(request.query_params["before"]) if "before" in request.query_params else None
        if limit < 1:
            raise ValueError
    except ValueError:
        return JSONResponse({"error": "limit is 1 or more, before a time in ms since the epoch"}, status_code=400)
    store: MessageStore = request.app.state.store
    # A look-up reads files: not in the event loop.
    found = await run_in_threadpool(store.query_message, TOPIC, request.path_params["user"], max_num=limit, end=before)
    events = [{"at": message.store_timestamp, "event": json.loads(message.body)} for message in found]
    return JSONResponse({"events": events, "more": found.truncated})


async def health(request: Request) -> JSONResponse:
    """How many events there are, and in how many batches they came since the start."""
    state = request.app.state
    return JSONResponse({"events": state.store.max_queue_offset(TOPIC), "batches": state.writer.batches})


def application(path: str | os.PathLike[str] | None = None) -> Starlette:
    """The application over the store at `path`, by default $EVENTS_STORE, else ./events."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        config = StoreConfig(mapped_file_size_commit_log=64 * 2**20, max_hash_slot_num=500_000, max_index_num=2_000_000)
        with MessageStore.open(path or os.environ.get("EVENTS_STORE", "events"), config=config) as store:
            app.state.store = store
            app.state.writer = Writer(store)
            yield
            app.state.writer.close()

    routes = [
        Route("/events", post_events, methods=["POST"]),
        Route("/events/{user}", get_events),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


# ------------------------------------------------------------------------------------------------ running it, and a look


@contextlib.contextmanager
def served(app: Starlette) -> Any:
    """The application on a free port of this machine; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def ask(url: str, value: Any = None) -> Any:
    """The JSON that a GET answers, or a POST of `value`."""
    body = None if value is None else json.dumps(value).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=30
    ) as answer:
        return json.load(answer)


def run(directory: Path, count: int) -> None:
    """Send events from several clients at once, ask for them, and check."""
    a_request = 50
    events = [{"user": f"u-{number % 100}", "kind": "click", "number": number} for number in range(count)]
    with served(application(directory)) as address:
        begun = time.perf_counter()
        with ThreadPoolExecutor(8) as clients:
            answers = list(
                clients.map(
                    lambda at: ask(f"{address}/events", events[at : at + a_request]), range(0, count, a_request)
                )
            )
        seconds = time.perf_counter() - begun
        ids = [each for answer in answers for each in answer["stored"]]
        assert len(set(ids)) == count
        mine = ask(f"{address}/events/u-7?limit=1000")
        expected = {event["number"] for event in events if event["user"] == "u-7"}
        assert {each["event"]["number"] for each in mine["events"]} == expected or mine["more"]
        state = ask(f"{address}/health")
        assert state["events"] == count and state["batches"] <= len(answers)
    with MessageStore.open(directory, read_only=True) as store:
        assert store.message_by_id(ids[-1]).topic == TOPIC
    print(
        f"{count} events, {len(answers)} requests, {state['batches']} batches, {count / seconds:,.0f} events/s over HTTP; all found"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="where the store lies; by default a temporary one")
    parser.add_argument("--events", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run(options.directory or Path(scratch) / "events", options.events)
