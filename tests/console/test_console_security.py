"""Security of the console: who may ask, from where, for what, and that nothing is written or given away.

Owns requests over a plain socket to the real server, where the request line and every header are as an attacker would write
them.  The rules for every answer are those of `console_pages`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from html import escape
from unittest import mock
from urllib.parse import quote, urlencode, urlsplit

import golden
import hostile_store
import pytest
from click.testing import CliRunner
from console_pages import answer_faults, directives, header_faults, parse, walk
from console_server import ConsoleServer, ask, connection

from rmqstore.cli import main

TOKEN = "correct-horse-battery-staple"
EVIL = "evil.example"


@pytest.fixture(scope="module")
def guarded(broker, tmp_path_factory):
    """A console that wants a token."""
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    with ConsoleServer(broker, "--token-file", path) as server:
        yield server
        server.check()


def serve(*arguments):
    """`rmqstore serve` that is expected to refuse, in this process: (exit code, what it said)."""
    # One that does not refuse would listen for ever.
    with mock.patch("uvicorn.Server", side_effect=AssertionError("it would have listened")):
        done = CliRunner().invoke(
            main, ["serve", *map(str, arguments), "--port", "0"], env={"COLUMNS": "200", "NO_COLOR": "1"}
        )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def raw(server, request: bytes, limit=20) -> bytes:
    """Send bytes and return all that comes back until the server closes, or nothing more comes."""
    with socket.create_connection((server.host, server.port), timeout=limit) as link:
        link.sendall(request)
        link.settimeout(1)
        received = b""
        try:
            while part := link.recv(65536):
                received += part
        except (TimeoutError, ConnectionResetError):
            pass
    return received


# ---------------------------------------------------------------------------------------------------------------------
# Where it listens, and for whom


def test_it_listens_on_loopback_only(console):
    assert console.host == "127.0.0.1"
    # All of 127.0.0.0/8 is this machine: a server that listened everywhere would answer here as well.
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", console.port), timeout=5)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1.evil.example", "192.0.2.1", ""])
def test_no_other_address_without_a_token(broker, host):
    code, said = serve(broker, "--host", host)
    assert code == 2, said
    assert "token" in said, said
    assert "Traceback" not in said


@pytest.mark.parametrize("token", ["", " ", "a", "short"])
def test_a_token_that_can_be_guessed_is_refused(broker, token):
    code, said = serve(broker, "--host", "0.0.0.0", "--token", token)
    assert code == 2, said
    assert "token" in said and "Traceback" not in said


def test_a_token_file_that_is_not_there_or_empty_is_an_error(broker, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for path in (tmp_path / "absent", empty, tmp_path):
        code, said = serve(broker, "--token-file", path)
        assert code in (2, 3), said
        assert str(path) in said.replace("\n", "") and "Traceback" not in said


def test_other_addresses_work_with_a_token(broker, start_console, tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    server = start_console(broker, "--host", "127.0.0.2", "--token-file", path)
    assert server.host == "127.0.0.2"
    assert server.get("/").status == 401
    assert server.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200


# ---------------------------------------------------------------------------------------------------------------------
# The token

PROTECTED = (
    "/", "/messages", "/messages?topic=Orders&key=ORD-100000", "/message/0", "/queues/Orders/0", "/index", "/consumers",
    "/pending", "/verify", "/rabbitmq", "/api/openapi.json", "/api/overview",
    "/api/messages?topic=Orders&key=ORD-100000", "/api/pending", "/metrics",
    "/nowhere", "/message/0/raw", "/api/message/0", "//", "/./", "/%2e/", "/messages/", "/INDEX",
)  # fmt: skip


@pytest.mark.parametrize("target", PROTECTED)
def test_nothing_without_the_token(guarded, target):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN},
                    {"Cookie": "token=wrong; session=; rmqstore=x"}):  # fmt: skip
        answer = guarded.get(target, headers=headers)
        assert answer.status == 401, (target, headers, answer.body[:200])
        assert not header_faults(answer)
        for word in (b"Orders", b"ORD-1", b"commitlog", b"G-billing", TOKEN.encode()):
            # The form takes along what was asked, which says nothing that its sender did not know.
            assert word not in answer.body.replace(escape(target).encode(), b""), word


@pytest.mark.parametrize(
    "credentials",
    [
        "Bearer",
        "Bearer ",
        "Bearer " + TOKEN[:-1],
        "Bearer " + TOKEN + "x",
        "Bearer " + TOKEN.upper(),
        "Bearer x " + TOKEN,
        "bearer\t" + TOKEN[:3],
        "Bearer " + "A" * 20_000,
        "Bearer \xe4\xf6\xfc\xff",
        "Negotiate abc",
    ],
)
def test_a_wrong_token_of_whatever_form_is_refused(guarded, credentials):
    answer = guarded.get("/api/overview", headers={"Authorization": credentials})
    assert answer.status in (400, 401, 431), answer.status
    target = "/?token=" + quote(credentials.removeprefix("Bearer "), encoding="latin-1")
    assert guarded.get(target).status in (400, 401, 414, 431)
    assert guarded.get("/", headers={"Cookie": f"rmqstore_token={quote(credentials)}"}).status in (400, 401, 431)


def test_the_token_in_a_query_becomes_a_cookie_and_leaves_the_address(guarded):
    answer = guarded.get(f"/messages?topic=Orders&token={TOKEN}&key=ORD-100000")
    assert answer.status in (302, 303, 307), answer.status
    location = answer.header("location")
    assert TOKEN not in location
    assert not urlsplit(location).netloc, "a relative address cannot lead elsewhere"
    assert "topic=Orders" in location and "key=ORD-100000" in location
    cookie = answer.header("set-cookie")
    name, _, rest = cookie.partition("=")
    value, *attributes = [part.strip() for part in rest.split(";")]
    lowered = [attribute.lower() for attribute in attributes]
    assert "httponly" in lowered and "samesite=strict" in lowered and "path=/" in lowered
    assert not any(attribute.startswith("domain") for attribute in lowered)
    assert guarded.get(location, headers={"Cookie": f"{name}={value}"}).status == 200
    assert guarded.get("/", headers={"Cookie": f"{name}={value}x"}).status == 401
    assert guarded.get("/", headers={"Cookie": f"{name}="}).status == 401
    # An answer that sets a cookie must not be kept by a cache between.
    assert "no-store" in (answer.header("cache-control") or "")


@pytest.mark.parametrize(
    "path", ["//evil.example/", "//evil.example/%2f..", "/%5cevil.example", "/\\evil.example", "///evil.example"]
)
def test_the_way_back_after_the_token_cannot_lead_elsewhere(guarded, path):
    answer = guarded.get(f"{path}?token={TOKEN}")
    location = answer.header("location")
    if location is not None:
        # A browser takes a backslash for a slash, but not %5c.
        assert not re.match(r"[/\\]{2}|[a-z]+:", location), location
    else:
        assert answer.status in (400, 401, 404)


def test_a_token_in_a_post_is_no_pass(guarded):
    answer = guarded.get("/verify/start", method="POST", body=f"token={TOKEN}".encode(),
                         headers={"Content-Type": "application/x-www-form-urlencoded"})  # fmt: skip
    assert answer.status in (401, 403, 405)


def test_the_form_takes_only_the_token_and_leads_only_back(guarded):
    def post(token, way, **headers):
        return guarded.get(
            "/login",
            method="POST",
            body=urlencode({"token": token, "next": way}).encode(),
            headers={"Content-Type": "application/x-www-form-urlencoded", "Origin": guarded.url, **headers},
        )

    for token in (
        "",
        "wrong",
        TOKEN[:-1],
        TOKEN + "x",
        "\u202e",
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ):
        refused = post(token, "/")
        assert refused.status == 401 and refused.header("set-cookie") is None, token
        assert not answer_faults(refused)
    assert post(TOKEN, "/", Origin=f"http://{EVIL}").status == 403
    for way in (
        "/consumers",
        "//evil.example/",
        "/\\evil.example",
        "\\\\evil.example",
        "http://evil.example/",
        "\r\nX: y",
        "javascript:1",
    ):
        answer = post(TOKEN, way)
        assert answer.status == 303, way
        assert re.match(r"/(?![/\\])[!-~]*$", answer.header("location")), (way, answer.header("location"))
        assert answer.header("x") is None and "HttpOnly" in answer.header("set-cookie")


def test_the_token_appears_nowhere(guarded):
    guarded.get(f"/?token={TOKEN}")
    guarded.get(f"/static/?token={TOKEN}")
    time.sleep(0.2)
    assert not [line for line in guarded.log if TOKEN in line]
    arguments = open(f"/proc/{guarded.process.pid}/cmdline", "rb").read()
    assert TOKEN.encode() not in arguments
    page = guarded.get("/", headers={"Authorization": f"Bearer {TOKEN}"})
    assert page.status == 200 and TOKEN.encode() not in page.body


def test_health_tells_nothing_of_the_store(guarded):
    answer = guarded.get("/healthz")
    assert answer.status in (200, 401)
    assert len(answer.body) < 200 and b"/" not in answer.body.replace(b"text/", b"")


# ---------------------------------------------------------------------------------------------------------------------
# The Host header (DNS rebinding)


@pytest.mark.parametrize(
    "host",
    [
        EVIL,
        f"{EVIL}:{{port}}",
        f"127.0.0.1.{EVIL}:{{port}}",
        f"127.0.0.1:{{port}}.{EVIL}",
        f"127.0.0.1@{EVIL}",
        f"{EVIL}#127.0.0.1",
        f"{EVIL}/127.0.0.1:{{port}}",
        f"localhost.{EVIL}",
        "xlocalhost:{port}",
        "127.0.0.1:80:80",
        "[::1",
        "",
        " ",
        "127.0.0.1, evil.example",
        "0x7f000001",
        "0.0.0.0:{port}",
        "\xe4\xf6",
    ],
)
def test_a_foreign_host_is_refused(console, host):
    answer = console.get("/", host=host.format(port=console.port))
    assert answer.status in (400, 403, 421), answer.status
    assert not header_faults(answer) or answer.status == 400
    assert b"Orders" not in answer.body and EVIL.encode() not in answer.body
    for target in ("/api/messages?topic=Orders&key=ORD-100000", "/static/nothing", "/metrics", "/healthz", "/nowhere"):
        assert console.get(target, host=host.format(port=console.port)).status in (400, 403, 421), target


def test_a_missing_or_doubled_host_is_refused(console):
    for request in (
        b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nHost: evil.example\r\nConnection: close\r\n\r\n" % console.port,
        b"GET / HTTP/1.1\r\nHost: evil.example\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % console.port,
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    ):
        received = raw(console, request)
        assert re.match(rb"HTTP/1\.[01] 4\d\d ", received), received[:200]
        assert b"Orders" not in received


def test_this_machine_s_names_are_let_in(console):
    for host in (
        f"127.0.0.1:{console.port}",
        f"localhost:{console.port}",
        "localhost",
        "127.0.0.1",
        f"LOCALHOST:{console.port}",
    ):
        assert console.get("/", host=host).status == 200, host


def test_forwarded_hosts_change_nothing(console):
    plain = console.get("/")
    forwarded = {"X-Forwarded-Host": EVIL, "X-Forwarded-Proto": "https", "Forwarded": f"host={EVIL}",
                 "X-Original-URL": "/verify", "X-Rewrite-URL": "/verify", "X-Forwarded-For": "1.2.3.4",
                 "X-HTTP-Method-Override": "POST"}  # fmt: skip
    answer = console.get("/", headers=forwarded)
    assert answer.status == 200 and EVIL.encode() not in answer.body
    assert parse(answer.text).title == parse(plain.text).title


# ---------------------------------------------------------------------------------------------------------------------
# Methods and other sites


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "OPTIONS"])
def test_pages_are_only_for_reading(console, method):
    for target in ("/", "/messages?topic=Orders&key=ORD-100000", "/message/0", "/index", "/api/overview", "/metrics",
                   "/consumers", "/static/nothing"):  # fmt: skip
        answer = console.get(target, method=method)
        # A POST that says nothing of where it comes from is refused before anybody looks at its address.
        assert answer.status in (400, 404, 405, 501) + ((403,) if method == "POST" else ()), (
            method,
            target,
            answer.status,
        )
        if method == "POST":
            answer = console.get(target, method=method, headers={"Origin": console.url})
            assert answer.status in (404, 405), (target, answer.status)
        assert b"Orders" not in answer.body
        assert answer.header("access-control-allow-origin") is None
        assert answer.header("access-control-allow-methods") is None


def test_head_is_get_without_a_body(console):
    answer = console.get("/", method="HEAD")
    assert answer.status in (200, 405) and answer.body == b""


FOREIGN = (
    {"Origin": f"http://{EVIL}"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost"},
    {"Origin": "https://127.0.0.1:{port}"},
    {"Origin": "http://127.0.0.1:{port}.evil.example"},
    {"Origin": "http://127.0.0.1:{port}@evil.example"},
    {"Origin": "http://evil.example?http://127.0.0.1:{port}"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Referer": f"http://{EVIL}/"},
    {},
)


@pytest.mark.parametrize("number", range(len(FOREIGN)))
@pytest.mark.parametrize("target", ["/verify/start", "/verify/stop", "/api/verify/start", "/api/verify/stop"])
def test_no_other_site_starts_or_stops_a_verify(console, target, number):
    headers = {name: value.format(port=console.port) for name, value in FOREIGN[number].items()}
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json"):
        answer = console.get(target, method="POST", headers={**headers, "Content-Type": kind}, body=b"")
        assert answer.status == 403, (headers, answer.status)
    assert console.get("/api/verify").json()["state"] == "idle"


def test_a_huge_request_is_not_kept(console):
    before = console.anonymous_memory()
    size = 64 << 20
    head = (
        f"POST /verify/start HTTP/1.1\r\nHost: 127.0.0.1:{console.port}\r\nOrigin: http://127.0.0.1:{console.port}\r\n"
        f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {size}\r\n\r\n"
    ).encode()
    peak = before
    with socket.create_connection((console.host, console.port), timeout=20) as link:
        link.settimeout(5)
        try:
            link.sendall(head)
            for _ in range(size >> 20):
                link.sendall(b"a=" + b"x" * ((1 << 20) - 2))
                peak = max(peak, console.anonymous_memory())
        except OSError:
            pass  # it may well close
    assert peak - before < 16 << 20
    assert console.get("/healthz").status == 200


# ---------------------------------------------------------------------------------------------------------------------
# Headers


@pytest.mark.parametrize(
    "target",
    ["/", "/messages", "/messages?topic=Orders&key=ORD-100000", "/message/0", "/message/1", "/message/x", "/queues/Orders/0",
     "/queues/No/0", "/index", "/index/0", "/consumers", "/pending", "/verify", "/rabbitmq", "/api/openapi.json", "/api/nowhere",
     "/api/messages", "/metrics", "/healthz", "/nowhere", "/static/nowhere", "/favicon.ico"],
)  # fmt: skip
def test_every_answer_keeps_the_rules(console, target):
    answer = console.get(target)
    assert answer.status in (200, 204, 302, 303, 307, 400, 404, 422), answer.status
    if answer.status != 204 and answer.body:
        assert not answer_faults(answer)
    assert not header_faults(answer)


def test_the_policy_allows_nothing_but_our_own(console):
    policy = directives(console.get("/").header("content-security-policy"))
    for name in ("script-src", "style-src"):
        assert policy.get(name, policy["default-src"]) == ["'self'"], name
    assert policy["frame-ancestors"] == ["'none'"]
    assert policy.get("object-src", policy["default-src"]) == ["'none'"]


def test_what_a_store_holds_is_not_kept_in_caches(console):
    for target in ("/", "/messages?topic=Orders&key=ORD-100000", "/message/0", "/api/message/0"):
        assert "no-store" in (console.get(target).header("cache-control") or ""), target


# ---------------------------------------------------------------------------------------------------------------------
# Paths and parameters

OUTSIDE = (
    "../../../../../../../../etc/passwd", "..%2f..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd",
    "..%252f..%252fetc%252fpasswd", "..%5c..%5cetc%5cpasswd", "....//....//etc/passwd", "%2fetc%2fpasswd", "/etc/passwd",
    "..%c0%af..%c0%afetc/passwd", "%00", "passwd%00.css", "..", ".", "%2e%2e", "../checkpoint", "..%2fcheckpoint",
    "../commitlog/00000000000000000000", "..%2fcommitlog%2f00000000000000000000", "~root", "file:///etc/passwd", "CON",
    "../app.py", "../__init__.py", "%2e%2e%2f__init__.py", "../templates/base.html", "..%2ftemplates%2fbase.html",
)  # fmt: skip


@pytest.mark.parametrize("prefix", ["/static/", "/index/", "/api/index/", "/queues/", "/queues/Orders/", "/api/queues/",
                                    "/rabbitmq/", "/api/rabbitmq/", "/message/", "/api/message/", "/"])  # fmt: skip
def test_no_path_leads_out(console, prefix):
    for path in OUTSIDE:
        for tail in ("", "/0", "/raw"):
            answer = console.get(prefix + path + tail)
            assert answer.status < 500, (prefix, path, answer.body[:300])
            assert b"root:x:" not in answer.body and b"root:*:" not in answer.body, path
            assert b"{%" not in answer.body and b"import " not in answer.body, path
            kind = answer.header("content-type") or ""
            assert not kind.startswith("application/octet-stream"), f"a file came: {prefix + path + tail}"
            if kind.startswith("text/html") and answer.status == 200:
                # What is left after the dots may well be a page of ours.
                assert not answer_faults(answer)


VALUES = (
    "<script>window.pwned=1</script>", "\"'><img src=x onerror=window.pwned=1>", "-1", "0", "9223372036854775808", "1" * 5000,
    "NaN", "1e999", "null", "\u202egnp", "%00", "\x00", "\ud800", "a" * 6000, "../../etc/passwd", "%s%n", "{{7*7}}", "²", "٣",
    "1_0", " 1", "true", "2h ago", "9999999999h ago", "99999999999999999999d ago", "1969-01-01", "99999-01-01", "-99999999999999",
    "9223372036854775807", "20261121053239614.7.0", "20261121053239614.99999999.5", "0.0.0", "1.2", "\r\nSet-Cookie: pwned=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("base", "names"),
    [
        ("/messages?", ("topic", "key", "type", "id", "offset", "begin", "end", "order", "cursor", "size")),
        ("/messages?topic=Orders&", ("key", "begin", "end", "cursor", "size")),
        ("/messages?topic=Orders&key=ORD-100000&", ("type", "begin", "end", "cursor", "size")),
        ("/api/messages?topic=Orders&", ("key", "id", "begin", "cursor", "max_num")),
        ("/api/messages?topic=Orders&key=ORD-100000&", ("type", "end", "cursor", "max_num")),
        ("/message/0?", ("body", "from")),
        ("/api/message/0?", ("body",)),
        ("/queues/Orders/0?", ("from", "size")),
        ("/api/queues/Orders/0?", ("from", "max_num")),
        ("/queues?", ("topic", "first")),
        ("/index?", ("first",)),
        ("/consumers?", ("group", "first")),
        ("/pending?", ("kind", "topic", "first")),
        ("/verify?", ("first",)),
        ("/?", ("topic", "first")),
        ("/rabbitmq/0?", ("first",)),
    ],
)
def test_no_parameter_breaks_a_page_or_comes_back_as_markup(console, base, names):
    link = connection(console.host, console.port)
    # Lists of a few messages, so that less is laid out and looked at.
    few = {"/messages": "&max_num=5", "/queues/Orders/0": "&max_num=5"}
    few |= {f"/api{path}": "&max_num=5" for path in few}
    for name in names:
        more = "" if name in ("size", "max_num") else few.get(base.partition("?")[0], "")
        for value in VALUES:
            target = f"{base}{name}={quote(value, safe='', errors='surrogatepass')}{more}"
            answer = ask(link, target)
            assert answer.status < 500, (target[:300], answer.body[:300])
            assert answer.header("set-cookie") is None
            if answer.status == 303:
                assert re.fullmatch(r"/message/\d+", answer.header("location")), answer.header("location")
                continue
            faults = answer_faults(answer)
            assert not faults, (target[:300], faults)
            assert b"window.pwned=1</script>" not in answer.body or "json" in (answer.header("content-type") or "")
    link.close()


@pytest.mark.parametrize("path", ["/message/{}", "/message/{}/body", "/queues/Orders/{}", "/index/{}", "/rabbitmq/{}",
                                  "/api/message/{}", "/api/queues/Orders/{}", "/api/rabbitmq/{}", "/queues/{}/0",
                                  "/rabbitmq/0/queues/{}", "/stores/{}"])  # fmt: skip
def test_no_number_in_an_address_breaks_a_page(console, path):
    for value in VALUES:
        answer = console.get(path.format(quote(value, safe="", errors="surrogatepass")))
        assert answer.status in (200, 400, 404, 405), (path, value[:50], answer.status, answer.body[:200])
        assert not answer_faults(answer), (path, value[:50], answer_faults(answer))


def test_parameters_that_come_twice_or_by_the_thousand(console):
    for target in (
        "/messages?topic=Orders&topic=Stock&key=a&key=b",
        "/messages?" + "&".join(f"a{n}=1" for n in range(3000)),
        "/messages?topic[]=Orders&topic[x]=y&key",
        "/messages?;;&&==&%&%zz&topic=%ff%fe",
        "/messages?topic=" + "%ff" * 2000,
        "/api/messages?topic=Orders&key=" + "%f0%9f%99%82" * 2000,
    ):
        answer = console.get(target)
        assert answer.status < 500, (target[:100], answer.body[:300])
        assert not answer_faults(answer)


def test_requests_that_are_none(console):
    for request in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nzz\r\n",
        b"POST /verify/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET /%ff%fe/%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"",
    ):
        received = raw(console, request)
        assert (
            not re.match(rb"HTTP/1\.1 (2|5)\d\d", received)
            or b"/%ff" in request
            or b"\r\nHost: localhost\r\nContent" in request
        ), (
            request[:60],
            received[:200],
        )
    assert console.get("/").status == 200


def test_connections_that_say_nothing_keep_nobody_out(console):
    idle = []
    try:
        for _ in range(300):
            link = socket.create_connection((console.host, console.port), timeout=10)
            link.sendall(b"GET / HTTP/1.1\r\nHost: localho")
            idle.append(link)
        for _ in range(5):
            assert console.get("/healthz").status == 200
            assert console.get("/").status == 200
    finally:
        for link in idle:
            link.close()


# ---------------------------------------------------------------------------------------------------------------------
# What is left behind


@pytest.fixture
def protected(golden_copy):
    """A store in which nobody but root may change anything, until the test ends."""
    root = golden_copy("broker")
    for path in sorted(root.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield root
    for path in root.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def test_nothing_is_written_whatever_is_asked(protected, start_console):
    root = protected
    before = golden.tree(root)
    server = start_console(root)
    routes, faults = walk(server, each=4, limit=80)
    assert not faults
    assert len(routes) > 6
    server.get("/verify/start", method="POST", body=b"", headers={"Origin": server.url, "Sec-Fetch-Site": "same-origin",
               "Content-Type": "application/x-www-form-urlencoded"})  # fmt: skip
    time.sleep(1)
    assert golden.tree(root) == before
    # The lock of a writer is free: a broker may start beside the console.
    assert not [link for link in os.listdir(f"/proc/{server.process.pid}/fd")
                if os.path.realpath(f"/proc/{server.process.pid}/fd/{link}").endswith("/lock")]  # fmt: skip


def test_ctrl_c_ends_it_quietly(golden_copy):
    for end in (signal.SIGINT, signal.SIGTERM):
        server = ConsoleServer(golden_copy("broker"))
        link = connection(server.host, server.port)
        assert ask(link, "/").status == 200
        begin = time.monotonic()
        server.process.send_signal(end)
        code = server.process.wait(240)
        # An open connection without a request is nothing to wait for.
        assert time.monotonic() - begin < 15
        server.stop()
        link.close()
        assert code in ((130, 0) if end == signal.SIGINT else (143, 0, -15)), code
        assert not server.tracebacks(), server.log


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_server_starts_ends_it_quietly(golden_copy, end):
    # The address is out already, so a program that started the console may end it now.
    program = (
        "import asyncio.base_events as events, signal, sys\n"
        "begin = events.BaseEventLoop.__init__\n"
        "def begin_at_a_bad_time(self):\n"
        f"    signal.raise_signal({int(end)})\n"
        "    begin(self)\n"
        "events.BaseEventLoop.__init__ = begin_at_a_bad_time\n"
        "from rmqstore.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "serve", str(golden_copy("broker")), "--port", "0"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert ended.stdout.startswith("the console is at http://127.0.0.1:")
    assert ended.returncode == (130 if end == signal.SIGINT else -signal.SIGTERM)
    assert ended.stderr.splitlines() == ["press Ctrl-C to stop", *["interrupted"] * (end == signal.SIGINT)]


def test_the_page_of_an_error_shows_what_was_asked_as_text(hostile_console):
    for text in (*hostile_store.SCRIPTS, *hostile_store.INVISIBLE, *hostile_store.WITH_SLASH):
        encoded = quote(text, safe="")
        for target in (f"/{encoded}", f"/queues/{encoded}/0", f"/index/{encoded}", f"/message/{encoded}",
                       f"/messages?id={encoded}", f"/rabbitmq/{encoded}"):  # fmt: skip
            answer = hostile_console.get(target)
            # A text that is the unique key of a message leads to it.
            assert answer.status in ((303,) if "?id=" in target else ()) + (200, 400, 404), (target, answer.status)
            if answer.status != 303:
                assert not answer_faults(answer), target
