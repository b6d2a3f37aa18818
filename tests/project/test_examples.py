"""The programs in examples/: they run, they say what they did, and what they promise holds where it is hard.

Owns nothing of the examples' own checks: each program fails by itself if what it shows is not so.  The commands of
examples/README.md are run by tests/project/test_docs_run.py.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rmqstore import MessageStore, verify

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_listed_and_run():
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in EXAMPLES]
    assert len(files) >= 3
    assert sorted(re.findall(r"\[(\w+\.py)\]\(\1\)", text)) == files
    assert sorted(re.findall(r"(?m)^python examples/(\w+\.py)", text)) == files
    for path in EXAMPLES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        imported = {name.split(".")[0] for name in names}
        # Only what the extra `examples` brings.
        known = {"rmqstore", "pandas", "polars", "pyarrow", "starlette", "uvicorn", *sys.stdlib_module_names}
        assert imported <= known, path.name


def test_the_order_service_survives_many_kills_and_goes_on_in_the_same_store(tmp_path):
    answer = run("order_service.py", tmp_path, "--orders", 500, "--kills", 4, "--seed", 7)
    assert answer.count("then kill -9") == 4
    assert "500 orders stored once, billed once and shipped once, after 4 kills" in answer
    # The same orders sent once more are not stored, billed or shipped again.
    assert "500 orders stored once" in run("order_service.py", tmp_path, "--orders", 500, "--kills", 0)


def test_the_check_of_the_order_service_notices_a_loss(tmp_path):
    service = load("order_service")
    import random

    service.run(tmp_path, 50, 0, random.Random(1))
    book = tmp_path / "billing.txt"
    book.write_text(book.read_text() + "ORD-000003\n")
    with pytest.raises(AssertionError, match="billing"):
        service.run(tmp_path, 50, 0, random.Random(1))


def test_a_store_of_a_broker_goes_through_the_data_frames(broker):
    answer = run("dataframes.py", broker)
    assert "11013 messages in 28 queues" in answer and "10003 rows" in answer


# ---------------------------------------------------------------------------------------------- the web application


def request(app, method, path, body=b"", query=b""):
    """(status, value) of one request by the ASGI interface, without a server."""

    async def ask():
        sent, pieces = [], [body[at : at + 65536] for at in range(0, len(body), 65536)] or [b""]

        async def receive():
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query, "headers": [],
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "root_path": "",
            "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    return ask()


def test_the_web_application_refuses_what_is_no_event(tmp_path):
    web = load("web_events")

    async def story():
        app = web.application(tmp_path / "events")
        async with app.router.lifespan_context(app):
            for body, status in [
                (b"", 400), (b"{", 400), (b"[]", 400), (b"7", 400), (b"{}", 400), (b"[" * 100_000, 400), (b'"\xff"', 400),
                (b'{"user": "a b", "kind": "x"}', 400), (b'{"user": "a\\u0001", "kind": "x"}', 400),
                (b'{"user": 7, "kind": "x"}', 400), (b'{"user": "a", "kind": "x||y"}', 400), (b" " * (5 << 20), 413),
                (json.dumps([{"user": "a", "kind": "x"}] * 1001).encode(), 400),
                (b'{"user": "\\ud83d\\ude00", "kind": "x"}', 202), (b'[{"user": "a", "kind": "x", "deep": {"\\u0000": 1}}]', 202),
            ]:  # fmt: skip
                answered, value = await request(app, "POST", "/events", body)
                assert answered == status, (body[:60], answered, value)
            # One event that is wrong keeps the others of its request out.
            answered, _ = await request(app, "POST", "/events", b'[{"user": "b", "kind": "x"}, {"user": "b"}]')
            assert answered == 400
            for path, query, status in [
                ("/events/a", b"", 200), ("/events/a", b"limit=0", 400), ("/events/a", b"limit=x", 400),
                ("/events/nobody", b"before=17", 200), ("/events/a", b"before=" + b"9" * 400, 200),
            ]:  # fmt: skip
                answered, value = await request(app, "GET", path, query=query)
                assert answered == status, (path, query, answered, value)
            assert json.loads((await request(app, "GET", "/health"))[1])["events"] == 2
            many = await asyncio.gather(
                *(request(app, "POST", "/events", b'{"user": "u-%d", "kind": "k"}' % number) for number in range(300))
            )
            assert {status for status, _ in many} == {202}
            assert len({json.loads(value)["stored"][0] for _, value in many}) == 300
            # Requests that waited at the same moment were one batch.
            assert json.loads((await request(app, "GET", "/health"))[1])["batches"] < 300

    asyncio.run(story())
    assert list(verify(tmp_path / "events")) == []
    with MessageStore.open(tmp_path / "events", read_only=True) as store:
        assert len(store.query_message("Events", "b")) == 0 and len(store.query_message("Events", "u-7")) == 1
