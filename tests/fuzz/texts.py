"""Kinds of `fuzz.readers` whose files are texts or Arrow: a broker's settings, and files to import.

The targets of consumerOffset.json, delayOffset.json and topics.json are compared with Python's own JSON, imports of JSON
lines and Arrow with a reader of single rows.  A file is read with the answer of the other reader, or refused by name; an
import that is refused leaves nothing.  It reads no file of a user and writes below the folder
that it is given.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from rmqstore import MessageStore, StoreConfig
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.consumer.json_files import load_with_backup
from rmqstore.errors import CorruptionError, InvalidMessageError, StoreError
from rmqstore.offline import pending_queues
from rmqstore.offline.importing import ImportOptions, import_files
from rmqstore.offline.settings import settings

SMALL = StoreConfig(
    mapped_file_size_commit_log=1 << 20,
    mapped_file_size_consume_queue=20 * 64,
    max_hash_slot_num=8,
    max_index_num=64,
    max_message_size=1 << 16,
)
#: What a mutator puts in: pieces of JSON, numbers and times.
WORDS = tuple(
    word.encode()
    for word in (
        *'{}[]":,\'\n', "-1", "0", "2147483648", "9223372036854775808", "1e9", "1.5", "null", "true", "\\ud83d\\ude00", "\\ud800",
        '"offsetTable"', '"keys"', '"body_encoding":"hex",', "2026-11-20T10:00:00Z", "//", "/*", "\ufeff", "é",
    )
)  # fmt: skip
I64 = range(-(2**63), 2**63)


class NotPlainError(ValueError):
    """The oracle does not say what such a text means."""


def plain_json(data: bytes) -> Any:
    """What a broker's settings say, by Python's own JSON, after names that are numbers got their quotes."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', data.decode())
    parts[::2] = [re.sub(r"([{,]\s*)(-?[0-9]+)(\s*:)", r'\1"\2"\3', part) for part in parts[::2]]

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise NotPlainError("a name comes twice")
        return dict(pairs)

    def constant(text: str) -> Any:
        raise NotPlainError(text)

    found = json.loads("".join(parts), object_pairs_hook=table, parse_float=Decimal, parse_constant=constant)
    # Half a character has no place in a text; both sides would have to agree what stands there instead.
    json.dumps(found, ensure_ascii=False, default=str).encode()
    return found


def _where_plain(tell: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """A reader of bytes that gives what `tell` makes of their JSON, and None where that is not without any doubt."""

    def told(data: bytes) -> Any:
        try:
            return tell(plain_json(data))
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    return told


def _numbers(table: Any, names: range, values: range) -> dict[int, int]:
    for name, value in table.items():
        if not re.fullmatch("0|-?[1-9][0-9]{0,18}", name) or int(name) not in names:
            raise NotPlainError(name)
        if type(value) is not int or value not in values:
            raise NotPlainError(value)
    return {int(name): value for name, value in table.items()}


@_where_plain
def _offsets_of(document: Any) -> dict[str, dict[int, int]]:
    """The offset table."""
    if any(document.get(name) for name in ("pullOffsetTable", "lmqOffsetTable", "dataVersion")):
        raise NotPlainError("other tables")
    return {key: _numbers(queues, range(-(2**31), 2**31), I64) for key, queues in document["offsetTable"].items()}


@_where_plain
def _levels_of(document: Any) -> dict[int, int]:
    return _numbers(document["offsetTable"], range(1, 1 << 20), range(2**63))


@_where_plain
def _topics_of(document: Any) -> dict[str, Any]:
    table = document["topicConfigTable"]
    if not all(type(members) is dict for members in table.values()):
        raise NotPlainError("a topic without members")
    return dict(table)


class Texts:
    """What reads and judges the texts; `folder` holds their files, `Kind` is that of `fuzz.readers`."""

    def __init__(self, folder: str, kind: Callable[..., Any]):
        self.folder = folder
        self.kinds = {
            "consumer_offset": kind(
                self.offsets_reader("consumerOffset.json", lambda path: ConsumerOffsets.load(path).offset_table),
                self.check_consumer_offset, self.consumer_offsets, words=WORDS,
            ),
            "delay_offset": kind(
                self.offsets_reader(
                    "delayOffset.json", lambda path: load_with_backup(path, True, pending_queues._delay_offsets)[0]
                ),
                self.check_delay_offset, self.delay_offsets, words=WORDS,
            ),
            "topics": kind(self.read_topics, self.check_topics, self.topics, words=WORDS),
            "import_jsonl": kind(self.reader("jsonl"), self.check_jsonl, self.jsonl, words=WORDS),
            "import_arrow": kind(self.reader("arrow"), self.check_arrow, self.arrow),
        }  # fmt: skip

    def file(self, name: str, data: bytes) -> str:
        """Write a file, in folders of its own; its path."""
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        return path

    # ------------------------------------------------------------------------------------------------------- settings

    def offsets_reader(self, name: str, load: Callable[[str], Any]) -> Callable[[bytes], Any]:
        """A function that gives what `load` reads of a file of ``config``, or its error, which names the file."""

        def read(data: bytes) -> Any:
            path = self.file(f"config/{name}", data)
            try:
                return load(path)
            except CorruptionError as error:
                assert error.path is not None and error.path.startswith(path)
                return error

        return read

    @staticmethod
    def check_consumer_offset(data: bytes, found: Any) -> None:
        wanted = _offsets_of(data)
        assert wanted is None or found == wanted or _is_too_deep(found), found

    @staticmethod
    def consumer_offsets() -> list[bytes]:
        table = {f"Orders-{number}@group": {"0": number, "1": 2**40 + number} for number in range(3)}
        whole = json.dumps({"offsetTable": table, "dataVersion": {}}).encode()
        return [whole, re.sub(rb'"([0-9]+)":', rb"\1:", whole), b'{"offsetTable":{}}']

    @staticmethod
    def check_delay_offset(data: bytes, found: Any) -> None:
        wanted = _levels_of(data)
        assert wanted is None or found == (wanted, []) or _is_too_deep(found), found

    @staticmethod
    def delay_offsets() -> list[bytes]:
        return [b'{\n\t"offsetTable":{1:4,2:0,18:9223372036854775807}\n}', b'{"offsetTable":{"1":4,"2":5,"16":77777}}']

    def read_topics(self, data: bytes) -> Any:
        """The answer of `settings`."""
        # A store of its own: what another target left in config would be a finding of this one.
        self.file("topics/config/topics.json", data)
        os.makedirs(os.path.join(self.folder, "topics", "commitlog"), exist_ok=True)
        return settings(os.path.join(self.folder, "topics"))

    @staticmethod
    def check_topics(data: bytes, found: Any) -> None:
        wanted = _topics_of(data)
        if wanted is not None and not found.findings:
            assert {name: dict(members) for name, members in found.topics.items()} == wanted
        assert all(each.path and each.detail for each in found.findings)

    @staticmethod
    def topics() -> list[bytes]:
        members = {"order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG", "writeQueueNums": 4}
        table = {f"Orders-{number}": {**members, "topicName": f"Orders-{number}"} for number in range(3)}
        return [json.dumps({"dataVersion": {"counter": 3}, "topicConfigTable": table}, separators=(",", ":")).encode()]

    # -------------------------------------------------------------------------------------------------------- imports

    def reader(self, form: str) -> Callable[[bytes], Any]:
        """A function that imports bytes into a new store: its rows, or the error."""

        def read(data: bytes) -> Any:
            path = self.file(f"rows.{form}", data)
            root = os.path.join(self.folder, "imported", "store")
            shutil.rmtree(os.path.dirname(root), ignore_errors=True)
            try:
                report = import_files(root, [path], ImportOptions(config=SMALL, format=form))
            except (InvalidMessageError, StoreError) as error:
                assert path in str(error), error
                assert not os.path.isdir(os.path.dirname(root)) or os.listdir(os.path.dirname(root)) == []
                return error
            if not report.messages:
                # No store is made of no message, and nothing is left in its place.
                assert os.listdir(os.path.dirname(root)) == [] and not report.created
                return []
            with MessageStore.open(root, read_only=True, config=SMALL) as store:
                table = store.scan(["topic", "queue_id", "body", "corrupt"]).read_all()
            assert table.num_rows == report.messages and not any(table["corrupt"].to_pylist())
            return table.select(["topic", "queue_id", "body"]).to_pylist()

        return read

    @staticmethod
    def check_jsonl(data: bytes, found: Any) -> None:
        if not isinstance(found, Exception):
            lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
            _compare([json.loads(line) for line in lines], found)

    @staticmethod
    def check_arrow(data: bytes, found: Any) -> None:
        if not isinstance(found, Exception):
            opened = pa.ipc.open_file(data) if data.startswith(b"ARROW1") else pa.ipc.open_stream(data)
            table = opened.read_all()
            # Without a row nobody asks for the names of columns, which may be no text.
            _compare(table.to_pylist() if table.num_rows else [], found)

    @staticmethod
    def jsonl() -> list[bytes]:
        rows = [
            {"topic": "Orders", "keys": ["ORDER-1"], "tags": "created", "body": "grün"},
            {
                "topic": "Orders",
                "queue_id": 3,
                "body": "00ff",
                "body_encoding": "hex",
                "born_timestamp": 1_700_000_000_000,
            },
            {"topic": "Rest", "body": "aGFsbG8=", "body_encoding": "base64", "properties": {"a": "b"}},
        ]
        return [b"".join(json.dumps(row).encode() + b"\n" for row in rows), json.dumps(rows[0]).encode()]

    @staticmethod
    def arrow() -> list[bytes]:
        table = pa.table(
            {"topic": ["Orders", "Rest"], "queue_id": pa.array([0, 3], pa.int32()), "body": [b"one", b"two"]}
        )
        made = []
        for new in (pa.ipc.new_stream, pa.ipc.new_file):
            sink = io.BytesIO()
            with new(sink, table.schema) as writer:
                writer.write_table(table)
            made.append(sink.getvalue())
        return made


def _is_too_deep(found: Any) -> bool:
    """Levels and digits are bounded, so that a text cannot fill memory; the oracle has other bounds."""
    return isinstance(found, CorruptionError) and bool(
        re.search("levels deep|a number of [0-9]+ characters", str(found))
    )


def _compare(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert len(rows) == len(found)
    for row, got in zip(rows, found, strict=True):
        assert got["topic"] == row["topic"]
        if row.get("queue_id") not in (None, ""):
            assert got["queue_id"] == int(row["queue_id"])
        body, encoding = row.get("body"), row.get("body_encoding", "utf-8")
        if isinstance(body, str):
            decode = {"hex": bytes.fromhex, "base64": base64.b64decode, "utf-8": str.encode}[encoding or "utf-8"]
            body = decode(body)
        assert (got["body"] or b"") == (body or b"")
