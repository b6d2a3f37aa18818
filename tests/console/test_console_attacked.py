"""Attempts to break the console that once worked, or that annoyed.

Owns odd numbers, forged forms, leavers in the middle, tokens with white space, and a random walk over the OpenAPI document,
asked in this process through ASGI.  What needs a plain socket or a browser is in the files beside this one.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import sys
import threading
from html import unescape
from types import SimpleNamespace
from urllib.parse import quote, urlencode

import pytest
from click.testing import CliRunner

pytest.importorskip("starlette", reason="needs the extra console")
anyio = pytest.importorskip("anyio")
httpx = pytest.importorskip("httpx")

from starlette.applications import Starlette  # noqa: E402
from starlette.routing import Mount  # noqa: E402

from rmqstore import Message, MessageStore, StoreConfig, console  # noqa: E402
from rmqstore.cli import main  # noqa: E402
from rmqstore.console.gate import is_loopback  # noqa: E402

HOST = "127.0.0.1:8080"
ORIGIN = {"Origin": f"http://{HOST}"}
TOKEN = "correct-horse-battery-staple"


class Visitor:
    """A browser, or a program, that follows no redirect; `jar` are its cookies."""

    def __init__(self, app):
        self.app = app
        self.jar = httpx.Cookies()

    def ask(self, method, target, headers=None, content=None):
        async def asked():
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", cookies=self.jar) as client:
                request = client.build_request(method, "/", headers=headers, content=content)
                # As it stands: nothing made canonical.
                request.url = request.url.copy_with(raw_path=target.encode("ascii"))
                response = await client.send(request)
                self.jar = client.cookies
                return response

        return anyio.run(asked)

    def get(self, target, headers=None):
        return self.ask("GET", target, headers)


@pytest.fixture(scope="module")
def open_console(broker, rabbitmq_vhost):
    return Visitor(console.app(broker, rabbitmq=[rabbitmq_vhost]))


@pytest.mark.parametrize("number", [2**31, 2**63 - 50, 2**63 - 1])
def test_a_place_behind_the_end_of_a_rabbitmq_queue(open_console, number):
    name = quote(open_console.get("/api/rabbitmq/0").json()["queue_list"][0]["name"], safe="")
    value = open_console.get(f"/api/rabbitmq/0/queues/{name}?first={number}")
    assert value.status_code == 200 and value.json()["rows"] == [] and value.json()["newer"] is None
    assert open_console.get(f"/rabbitmq/0/queues/{name}?first={number}").status_code == 200
    assert open_console.get(f"/rabbitmq/0/queues/{name}?message={number}").status_code == 404


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "LOCALHOST", "127.0.0.2"])
def test_every_spelling_of_loopback_is_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["[::]", "::", "0.0.0.0", "[fe80::1]", "localhost.example", "[]", "", "::ffff:10.0.0.1"]
)
def test_nothing_else_is_loopback(broker, host):
    assert not is_loopback(host)
    answer = CliRunner().invoke(main, ["serve", str(broker), "--host", host, "--port", "0"])
    assert answer.exit_code == 2 and "token" in answer.output


@pytest.mark.parametrize("token", [TOKEN + "\n", f"  {TOKEN}\r\n", TOKEN])
def test_a_token_with_the_line_break_of_its_variable(broker, token):
    guarded = Visitor(console.app(broker, token=token))
    assert guarded.get("/api/queues", {"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert guarded.get("/api/queues", {"Authorization": f"Bearer {TOKEN[:-1]}"}).status_code == 401
    # As it is pasted, with a space behind it.
    form = urlencode({"token": TOKEN + " ", "next": "/"})
    assert guarded.ask("POST", "/login", ORIGIN, form).status_code == 303
    assert guarded.get("/api/queues").status_code == 200


def hidden_way(page):
    return unescape(re.search('name="next" value="([^"]*)"', page)[1])


@pytest.mark.parametrize(
    "target",
    [
        "/messages?topic=Orders&key=CUST-1",
        "/messages?topic=a%26b&key=%2B%20x",
        "/queues/a%2Fb%25c/0?from=3",
        "/queues/%ff/0",
        "/message/484?body=hex",
    ],
)
@pytest.mark.parametrize("root", ["", "/console"])
def test_the_form_for_the_token_leads_to_what_was_asked(broker, target, root):
    app = console.app(broker, token=TOKEN)
    guarded = Visitor(Starlette(routes=[Mount(root, app)]) if root else app)
    refused = guarded.get(root + target)
    assert refused.status_code == 401
    wrong = guarded.ask("POST", root + "/login", ORIGIN, urlencode({"token": "x", "next": hidden_way(refused.text)}))
    assert wrong.status_code == 401
    right = guarded.ask("POST", root + "/login", ORIGIN, urlencode({"token": TOKEN, "next": hidden_way(wrong.text)}))
    assert (right.status_code, right.headers["location"]) == (303, root + target)
    # The same with the token in the address, right and wrong.
    both = f"{root}{target}{'&' if '?' in target else '?'}token="
    assert guarded.get(both + TOKEN).headers["location"] == root + target
    assert hidden_way(Visitor(app).get(f"{target}{'&' if '?' in target else '?'}token=wrong").text) == target


def test_the_form_after_a_post_leads_to_a_page(broker):
    guarded = Visitor(console.app(broker, token=TOKEN))
    way = hidden_way(guarded.ask("POST", "/verify/start", ORIGIN, "").text)
    right = guarded.ask("POST", "/login", ORIGIN, urlencode({"token": TOKEN, "next": way}))
    assert guarded.get(right.headers["location"]).status_code == 200


def test_a_long_address_is_no_obstacle_to_the_token(broker):
    app = console.app(broker, token=TOKEN)
    for length in (2000, 4000, 30_000):
        guarded = Visitor(app)
        way = hidden_way(guarded.get("/messages?topic=Orders&key=" + "%2F" * (length // 3)).text)
        answer = guarded.ask("POST", "/login", ORIGIN, urlencode({"token": TOKEN, "next": way}))
        assert answer.status_code == 303, length


def test_who_leaves_in_the_middle_of_the_form_is_no_error(broker, caplog):
    app = console.app(broker, token=TOKEN)
    sent = []
    parts = [{"type": "http.request", "body": b"token=", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return parts.pop(0) if len(parts) > 1 else parts[0]

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/login", "raw_path": b"/login", "query_string": b"", "scheme": "http",
        "root_path": "", "headers": [(b"host", HOST.encode()), (b"origin", ORIGIN["Origin"].encode())],
    }  # fmt: skip
    anyio.run(app, scope, receive, send)
    assert not caplog.records, caplog.text
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
@pytest.mark.parametrize("headers", [{}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_errors_of_the_api_are_json_whoever_refuses(broker, method, headers):
    stores = Visitor(console.app([broker, broker], token=TOKEN))
    for target in (
        "/stores/0/api/overview",
        "/api/overview",
        "/stores/1/api/verify/start",
        "/stores/1/metrics",
        "/api",
    ):
        answer = stores.ask(method, target, headers)
        assert answer.status_code in (400, 401, 403, 405), target
        assert answer.headers["content-type"] == "application/json", target
        assert answer.json()["status"] == answer.status_code and answer.json()["error"]
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"


def test_a_damaged_message_is_found_by_its_ids(golden_copy):
    root = golden_copy("broker")
    with MessageStore.open(root, read_only=True) as store:
        message = next(each for each in store.messages() if each.topic == "Orders")
    with open(root / "commitlog" / ("0" * 20), "r+b") as file:
        data = file.read()
        file.seek(data.index(message.body, message.phy_offset))
        file.write(bytes([message.body[0] ^ 1]))
    visitor = Visitor(console.app(root))
    for name in (message.msg_id, message.unique_key):
        answer = visitor.get(f"/api/messages?id={name}")
        assert answer.status_code == 200, answer.text
        (row,) = answer.json()["messages"]
        assert (row["phy_offset"], row["corrupt"]) == (message.phy_offset, True)


def test_who_begins_a_run_while_the_one_before_ends_gets_it(monkeypatch):
    from rmqstore.console import followed_store

    told, go_on = threading.Event(), threading.Event()
    runs = []

    def verify(path, config, progress):
        runs.append(path)
        if len(runs) == 1:
            told.set()
            # As one that is in a long step when it is told to end.
            assert go_on.wait(240)
            progress(1, 2)
        yield from ()

    monkeypatch.setattr(followed_store, "verify", verify)
    run = followed_store.VerifyRun("/nowhere", None)
    assert run.start() and told.wait(240)
    assert run.stop(timeout=0) and run.status()["state"] == "running"
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    assert run.start(), "the run of the second visitor was swallowed"
    timer.join()
    run._thread.join(240)
    assert run.status()["state"] == "finished" and len(runs) == 2


# ---------------------------------------------------------------------------------------------------------- the document


def test_a_random_walk_over_the_document_finds_nothing_that_it_does_not_allow(open_console):
    """Any value for any parameter: every status is one that the document names, and every answer has its shape."""
    jsonschema = pytest.importorskip("jsonschema")
    hypothesis = pytest.importorskip("hypothesis")
    some = hypothesis.strategies
    document = open_console.get("/api/openapi.json").json()
    index = open_console.get("/api/index").json()["files"][0]["name"]
    vhost = open_console.get("/api/rabbitmq/0").json()
    known = [
        "Orders",
        "CUST-1",
        "484",
        "0",
        "1",
        index,
        f"{index}.-1.-1",
        f"{index}.1.484",
        vhost["queue_list"][0]["name"],
    ]
    odd = [
        "",
        " ",
        "\0",
        "..",
        "a/b",
        "\u0661",
        "1e3",
        "-1",
        "9" * 19,
        "9" * 20,
        "9" * 5000,
        "nan",
        "9" * 400 + "h ago",
        "%",
    ]
    edges = [-(2**63), -(2**31), -1, 0, 1, 50, 1000, 1001, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64]
    answers = {
        (path, status): jsonschema.Draft202012Validator(
            {**response["content"]["application/json"]["schema"], "components": document["components"]}
        )
        for path, operations in document["paths"].items()
        if "get" in operations
        for status, response in operations["get"]["responses"].items()
    }
    paths = sorted({path for path, _ in answers})
    statuses = set()

    def value_of(schema):
        kinds = [some.sampled_from(known + odd), some.sampled_from(edges), some.text(max_size=8)]
        if "enum" in schema:
            kinds.append(some.sampled_from(schema["enum"]))
        elif schema["type"] == "integer":
            kinds += [some.integers(schema["minimum"], schema["maximum"]), some.integers(0, 9)] * 3
        else:
            kinds += [some.sampled_from(known)] * 4
        return some.one_of(kinds)

    @hypothesis.settings(
        max_examples=250, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(some.data())
    def walk(data):
        path = data.draw(some.sampled_from(paths))
        target, query = path, []
        for each in document["paths"][path]["get"]["parameters"]:
            if not each["required"] and data.draw(some.booleans()):
                continue
            text = quote(str(data.draw(value_of(each["schema"]))).encode("utf-8", "replace"), safe="")
            if each["in"] == "path":
                # An empty segment is another address, and so is one of dots, which the client of this test takes out.
                target = target.replace("{" + each["name"] + "}", text.replace(".", "%2E") or "%20")
            else:
                query.append(f"{each['name']}={text}")
        target += "?" + "&".join(query)
        answer = open_console.get(target)
        statuses.add(answer.status_code)
        # Where no store is gone, none may be said to be.
        assert answer.status_code in (200, 400, 404), (target, answer.text)
        validator = answers[path, str(answer.status_code)]
        assert not [error.message for error in validator.iter_errors(answer.json())], target

    walk()
    assert statuses == {200, 400, 404}


# --------------------------------------------------------------------------------------------------- readers and connections


MEDIUM = 1 << 20
HELD = 16 << 20


class SlowReader:
    """Takes what a server takes at once: it makes the application wait from the part after the first on."""

    def __init__(self, app, target, full):
        self.app, self.target, self.full = app, target, full
        self.status, self.headers, self.received, self.largest = 0, {}, 0, 0

    async def go(self):
        async def receive():
            await anyio.sleep_forever()

        async def send(message):
            if self.received:
                await self.full.wait()
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                self.received += len(message["body"])
                self.largest = max(self.largest, len(message["body"]))

        scope = {
            "type": "http", "method": "GET", "path": self.target, "raw_path": self.target.encode(), "query_string": b"",
            "scheme": "http", "root_path": "", "headers": [(b"host", HOST.encode())], "client": ("10.0.0.1", 1),
        }  # fmt: skip
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A console over one message of 3 MB, and one of 1 MiB."""
    config = StoreConfig(
        mapped_file_size_commit_log=4 << 20, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=20,
        clean_resource_interval=0, max_message_size=4 << 20,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("large") / "store"
    with MessageStore.open(path, config=config) as store:
        store.put_message(Message("T", bytes(range(256)) * 12_000, keys=["k"]))
        app = console.app(path, config=config)
        app.state.medium = f"/message/{store.put_message(Message('T', bytes(MEDIUM), keys=['m'])).phy_offset}/body"
    return app


def readers(app, full, number):
    return [SlowReader(app, "/message/0/body", full) for _ in range(number)]


def test_a_reader_that_sleeps_does_not_keep_others_from_downloading(large, monkeypatch, caplog):
    monkeypatch.setattr("rmqstore.console.traffic._READER_PATIENCE", 0.05)
    monkeypatch.setattr("rmqstore.console.traffic._MOST_HELD", 12 * MEDIUM)

    async def sleepers_first():
        never, now = anyio.Event(), anyio.Event()
        now.set()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for reader in readers(large, never, 4):
                    tasks.start_soon(reader.go)
        (awake,) = readers(large, now, 1)
        await awake.go()
        return awake

    awake = anyio.run(sleepers_first)
    assert (awake.status, awake.received) == (200, 256 * 12_000)
    assert caplog.text.count("read nothing") == 4 and "Traceback" not in caplog.text


async def go_until_held(tasks, slow):
    # The first part of each went out, or it was refused.
    for reader in slow:
        tasks.start_soon(reader.go)
    with anyio.fail_after(120):
        while not all(reader.received for reader in slow):
            await anyio.sleep(0.01)


def test_bodies_are_bounded_together(large, monkeypatch):
    """Each of a thousand readers that take nothing would keep its whole body."""
    monkeypatch.setattr("rmqstore.console.traffic._MOST_HELD", HELD)

    async def many():
        full, now = anyio.Event(), anyio.Event()
        now.set()
        async with anyio.create_task_group() as tasks:
            slow = [SlowReader(large, large.state.medium, full) for _ in range(80)]
            await go_until_held(tasks, slow)
            small = SlowReader(large, "/healthz", now)
            await small.go()
            full.set()
        last = [SlowReader(large, large.state.medium, now) for _ in range(40)]
        for reader in last:
            await reader.go()
        return slow, small, last

    slow, small, last = anyio.run(many)
    assert sum(reader.status == 200 for reader in slow) == HELD // MEDIUM
    for reader in slow:
        assert reader.status in (200, 503)
        if reader.status == 200:
            assert reader.received == MEDIUM and reader.largest <= MEDIUM // 4
        else:
            assert reader.headers["retry-after"] == "2" and "content-disposition" not in reader.headers
            assert reader.headers["x-content-type-options"] == "nosniff" and reader.received < 200
    # Nothing stays counted.
    assert [small.status, *(reader.status for reader in last)] == [200] * 41


def test_pages_are_counted_as_bodies_are(large, monkeypatch):
    monkeypatch.setattr("rmqstore.console.traffic._MOST_HELD", 100_000)
    monkeypatch.setattr("rmqstore.console.traffic._SMALL", 0)

    async def pages_first():
        full = anyio.Event()
        slow = [SlowReader(large, "/api/openapi.json", full) for _ in range(40)]
        async with anyio.create_task_group() as tasks:
            await go_until_held(tasks, slow)
            full.set()
        return slow

    slow = anyio.run(pages_first)
    sizes = [int(reader.headers["content-length"]) for reader in slow if reader.status == 200]
    assert sizes and sum(sizes) <= max(100_000, sizes[0])
    assert {reader.status for reader in slow} == {200, 503}


def test_what_is_larger_than_the_room_goes_out_alone(large, monkeypatch):
    monkeypatch.setattr("rmqstore.console.traffic._MOST_HELD", MEDIUM // 2)

    async def two():
        full = anyio.Event()
        first, second = (SlowReader(large, large.state.medium, full) for _ in range(2))
        async with anyio.create_task_group() as tasks:
            await go_until_held(tasks, [first])
            await go_until_held(tasks, [second])
            full.set()
        return first, second

    first, second = anyio.run(two)
    assert (first.status, first.received, second.status) == (200, MEDIUM, 503)


def test_a_reader_of_a_page_that_sleeps_is_given_up(large, monkeypatch, caplog):
    monkeypatch.setattr("rmqstore.console.traffic._READER_PATIENCE", 0.05)
    monkeypatch.setattr("rmqstore.console.traffic._SMALL", 1000)

    async def asleep():
        reader = SlowReader(large, "/", anyio.Event())
        with anyio.fail_after(30):
            await reader.go()
        return reader

    assert anyio.run(asleep).status == 200
    assert caplog.text.count("read nothing") == 1 and "Traceback" not in caplog.text


class Transport:
    """What a connection is told to do to its socket."""

    def __init__(self, peer=None):
        self.peer, self.aborted, self.left, self.closing, self.kept = peer, False, 0, False, None

    def set_write_buffer_limits(self, high=None, low=None):
        self.kept = high

    def get_extra_info(self, name, default=None):
        return self.peer if name == "peername" else default

    def get_write_buffer_size(self):
        return self.left

    def is_closing(self):
        return self.aborted or self.closing

    def abort(self):
        self.aborted = True


def test_silent_and_superfluous_connections_end(monkeypatch):
    uvicorn = pytest.importorskip("uvicorn")
    from uvicorn.server import ServerState

    from rmqstore.console import traffic

    async def talk():
        config = uvicorn.Config(lambda *_: None, log_level="warning", ws="none", http=traffic.Connection)
        config.load()
        state = ServerState()

        def connect():
            transport = Transport()
            made = traffic.Connection(config, state, {})
            made.connection_made(transport)
            return made, transport

        made = [connect() for _ in range(3)]
        assert [transport.aborted for _, transport in made] == [False, False, False]
        (silent, _), (partial, _), (busy, busy_transport) = made
        partial.data_received(b"GET / HTT")

        busy.cycle = SimpleNamespace(response_complete=False, more_body=False, message_event=anyio.Event())
        for connection in (silent, partial, busy, busy):
            connection._look_after()
        assert [transport.aborted for _, transport in made[:3]] == [True, True, False]
        # Answered, and the answer is being read.
        busy.cycle.response_complete = True
        for left in (300, 200, 100):
            busy_transport.left = left
            busy._look_after()
        assert not busy_transport.aborted
        busy._look_after()
        assert busy_transport.aborted
        # Given up in the middle of its answer: it is closed when the rest was taken, or nothing of it is.
        given_up, transport = connect()
        made.append((given_up, transport))
        given_up.cycle = SimpleNamespace(response_complete=False, more_body=False, message_event=anyio.Event())
        transport.left, transport.closing = 300, True
        given_up._look_after()
        assert not transport.aborted
        given_up._look_after()
        assert transport.aborted
        # Nothing waits in this process after it counts as sent.
        assert all(transport.kept == 0 for _, transport in made)
        for connection, _ in made:
            connection.connection_lost(OSError())
        assert not state.connections

    anyio.run(talk)


def test_room_is_made_by_those_that_wait_longest(monkeypatch):
    uvicorn = pytest.importorskip("uvicorn")
    from uvicorn.server import ServerState

    from rmqstore.console import traffic

    monkeypatch.setattr(traffic, "_most", lambda: 4)

    async def talk():
        config = uvicorn.Config(lambda *_: None, log_level="warning", ws="none", http=traffic.Connection)
        config.load()
        state = ServerState()
        transports, connections = [], []

        def connect():
            transport = Transport()
            made = traffic.Connection(config, state, {})
            made.connection_made(transport)
            transports.append(transport)
            connections.append(made)

        def ended():
            return [number for number, transport in enumerate(transports) if transport.aborted]

        for _ in range(4):
            connect()
        assert not ended()
        # The first one was answered just now, so the second one waits longest; the answer of the third one is still read.
        connections[0].waiting_since = connections[3].waiting_since + 1
        connect()
        assert ended() == [1]
        transports[2].left = 300
        connect()
        assert ended() == [1, 3]
        # Where nobody only waits there is no room.
        for connection in connections:
            connection.cycle = SimpleNamespace(
                response_complete=False, more_body=False, disconnected=False, message_event=anyio.Event()
            )
        connect()
        assert ended() == [1, 3, 6]
        for connection in connections:
            connection.connection_lost(OSError())
        assert not state.connections

    anyio.run(talk)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2")
def test_half_requests_keep_nobody_out(broker, start_console):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The server has it from this process.
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    try:
        server = start_console(broker)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with contextlib.ExitStack() as stack:
        for number in range(400):
            half = stack.enter_context(socket.socket())
            half.bind(("127.0.0.2", 0))
            half.connect((server.host, server.port))
            with contextlib.suppress(OSError):
                half.sendall(b"GET / HT" if number % 2 else b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab")
        # Long before a silent connection is closed for itself, whoever asks from there or from elsewhere is answered.
        for source in ("127.0.0.1", "127.0.0.2"):
            link = http.client.HTTPConnection(server.host, server.port, timeout=240, source_address=(source, 0))
            link.request("GET", "/healthz")
            assert link.getresponse().status == 200
            link.close()
    server.check()


def test_connections_leave_files_for_the_store(monkeypatch):
    from rmqstore.console import traffic

    for limit, most in ((1024, 512), (20_000, 4096), (traffic.resource.RLIM_INFINITY, 4096), (1, 1)):
        monkeypatch.setattr(traffic.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert traffic._most() == most


# ------------------------------------------------------------------------------------------------------------- for the eyes


def test_a_plot_has_the_colours_that_the_system_forces(console, open_page):
    name = console.get("/api/index").json()["files"][0]["name"]
    watched = open_page(console, forced_colors="active")
    watched.open(f"/index/{name}")
    forced, *found = watched.page.evaluate(
        """() => {
            const probe = document.body.appendChild(document.createElement("p"));
            probe.style.color = "CanvasText";
            const style = (name) => getComputedStyle(document.querySelector(name));
            return [getComputedStyle(probe).color,
                style(".plot .bar").fill, style(".plot .label").fill, style(".plot .axis").stroke];
        }"""
    )
    assert found == [forced] * 3
