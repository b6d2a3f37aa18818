"""A few stored bytes that are a large body: as text they are written in pieces, in every output.

The memory of an output is counted in bytes that Python allocates, and compared with the body.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import sys
import tracemalloc
import zlib

import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.message import BodyText, body_text, json_pieces, text_pieces
from rmqstore.offline.export import ExportOptions, export

SIZE = 5 << 20
# A zero is six characters in JSON; a single character beyond Latin makes a whole text four times as large.
LARGE = b"\0" * (SIZE - 4) + "😀".encode()


def build(path, bodies):
    geometry = {"mapped_file_size_commit_log": 1 << 16, "max_hash_slot_num": 100, "max_index_num": 400}
    with MessageStore.open(path, config=StoreConfig(**geometry)) as store:
        for body in bodies:
            store.put_message(Message("T", zlib.compress(body), keys=["K"], sys_flag=0x301))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    # Several, so that no list of messages holds them all.
    return build(folder / "small", [b"small"]), build(folder / "large", [LARGE, LARGE])


class _Counted(io.RawIOBase):
    """Counts what is written, and keeps the first bytes of it."""

    size = 0

    def writable(self):
        return True

    def write(self, data):
        self.size += len(data)
        return len(data)


def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "arguments",
    [
        ["query", "STORE", "T", "K", "--json"],
        ["query", "STORE", "T", "K", "--json", "--body", "hex"],
        ["query", "STORE", "T", "K", "--format", "%k %s", "--body", "hex"],
        ["query", "STORE", "T", "K"],
        ["get", "STORE", "T", "0", "--json"],
        ["tail", "STORE", "T", "--json"],
        ["dump", "STORE", "--json"],
        ["export", "STORE"],
        ["export", "STORE", "--format", "csv"],
        ["export", "STORE", "--body", "hex"],
    ],
    ids=" ".join,
)
def test_an_output_takes_three_times_the_body_at_most(paths, arguments, monkeypatch):
    small, large = ([str(path) if each == "STORE" else each for each in arguments] for path in paths)
    sink = _Counted()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(sink), encoding="utf-8"))
    # Modules loaded at first use do not count.
    main(small, standalone_mode=False)
    assert peak_of(lambda: main(large, standalone_mode=False)) < 3 * SIZE
    sys.stdout.flush()
    assert sink.size > SIZE or arguments[-1] == "K"


@pytest.mark.parametrize("form", ["text", "hex", "base64"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_large_bodies_are_written_as_small_ones(tmp_path, form, name):
    csv.field_size_limit(1 << 30)
    bodies = [b'a "quoted", body\r\n' * 20_000, "中".encode() * 200_000, b"\xff" * 300_000, LARGE[-300_000:], b"small"]
    with MessageStore.open(tmp_path / "s", config=StoreConfig(mapped_file_size_commit_log=1 << 22)) as store:
        store.put_messages([Message("T", body, keys=[str(number)]) for number, body in enumerate(bodies)])
    for columns in (["body"], ["keys", "body", "topic"], ["body", "body_stored"], ["body_stored", "keys"]):
        export(tmp_path / "s", tmp_path / name, options=ExportOptions(columns=columns, body=form, force=True))
        with open(tmp_path / name, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file)) if name.endswith("csv") else [json.loads(line) for line in file]
        for column in columns:
            if column.startswith("body"):
                assert [decoded(row[column], row[f"{column}_encoding"]) for row in rows] == bodies
        if "topic" in columns:
            assert [row["topic"] for row in rows] == ["T"] * len(bodies)


def decoded(text: str, encoding: str) -> bytes:
    if encoding == "utf-8":
        return text.encode()
    return bytes.fromhex(text) if encoding == "hex" else base64.b64decode(text)


@pytest.mark.parametrize("body", [b"", b"x", "é中😀".encode() * 90_000, b"\xff" * 400_000, b"x" * 400_000 + b"\xe4"])
def test_pieces_are_the_whole(body):
    for form in ("text", "hex", "base64"):
        text, encoding = body_text(body, form)
        assert decoded(str(text), encoding) == body
        assert isinstance(text, BodyText) == (len(body) > 1 << 18)
        row = {"a": [1, {"b": None}], "body": text, "é": "ü"}
        whole = "".join(json_pieces(row, json.JSONEncoder(ensure_ascii=False).encode))
        assert json.loads(whole) == row | {"body": str(text)}
    assert "".join(text_pieces(body, "backslashreplace")) == body.decode("utf-8", "backslashreplace")
    assert body_text(b"\0", zeros=False) == ("AA==", "base64")
