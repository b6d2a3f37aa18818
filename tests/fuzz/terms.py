"""Fuzzing of terms, tables, messages and tables of a stopped store: any bytes are read or refused, never anything else.

Owns the target that judges bytes in every way that the package can; the tests give it what hypothesis makes.  Run as a
script it needs the package atheris, and takes libFuzzer's arguments: ``python tests/fuzz/terms.py
-max_total_time=20``.  It reads no file of a store and writes nothing.
"""

from __future__ import annotations

import itertools
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "rabbitmq")]

import term_oracle  # noqa: E402

from rmqstore.errors import CorruptionError, UnsupportedFormatError  # noqa: E402
from rmqstore.rabbitmq import _term, amqp, clean_state, dets, term  # noqa: E402
from rmqstore.rabbitmq.message import Message  # noqa: E402


def _message(data: bytes) -> tuple[Any, ...] | None:
    try:
        message = Message.from_term(data)
    except CorruptionError:
        return None
    parts: list[Any] = [message.exchange, message.routing_keys, message.vhost, message.msg_id, message.persistent]
    for name in ("body", "properties", "properties_size"):
        try:
            parts.append(getattr(message, name))
        except (CorruptionError, UnsupportedFormatError):
            parts.append(None)
    return tuple(parts)


def _columns(data: bytes) -> tuple[Any, ...] | None:
    columns = _term.message_columns(
        [b"", data], np.zeros(1, np.int64), np.array([len(data)], np.int64), np.array([1], np.int32)
    )
    if columns["status"][0] == _term.RowStatus.ROW_DAMAGED:
        return None
    lists, offsets, keys, _ = columns["routing_keys"]
    text = keys.tobytes()
    ends = offsets[: lists[1] + 1].tolist()
    names = [text[a:b].decode("utf-8", "surrogateescape") for a, b in itertools.pairwise(ends)]
    body = columns["body"][1].tobytes() if columns["body"][2][0] else None
    exchange = columns["exchange"][1].tobytes().decode("utf-8", "surrogateescape")
    return exchange, names, body


def neutral(value: Any) -> tuple[str, Any]:
    """A value as the oracle gives it."""
    if isinstance(value, term.Atom):
        return "atom", str(value)
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, int):
        return "integer", value
    if isinstance(value, bytes):
        return "binary", value
    if isinstance(value, term.Opaque):
        # What has no form of its own is what its bytes are.
        return term_oracle.decode_at(b"\x83" + value.data)[0]
    if isinstance(value, list):
        return "list", [neutral(each) for each in value]
    if isinstance(value, dict):
        return "map", [(neutral(key), neutral(each)) for key, each in value.items()]
    return "tuple", [neutral(each) for each in value]


def judge_term(data: bytes) -> None:
    """Compare a term with what the second reader makes of it."""
    try:
        value = term.decode(data)
    except CorruptionError as error:
        try:
            _, end = term_oracle.decode_at(data)
        except (ValueError, RecursionError):
            return
        # Depth and number of values are bounded here and not there.
        assert end < len(data) or "limit" in error.message or "deep" in error.message, error
    else:
        assert (neutral(value), len(data)) == term_oracle.decode_at(data)


def judge(data: bytes) -> None:
    """Read bytes as everything that they could be, and compare what reads the same thing in two ways."""
    judge_term(data)
    extent = _term.extent(data)
    try:
        value = term.decode(data)
    except CorruptionError as error:
        assert error.pos is not None
        assert extent == -1 or error.pos == extent < len(data) or "limit" in error.message, (extent, error)
    else:
        assert extent == len(data)
        written = term.encode(value)
        assert term.encode(term.decode(written)) == written
    message, columns = _message(data), _columns(data)
    assert (message is None) == (columns is None), (message, columns)
    if message is not None and columns is not None:
        assert (message[0], message[1], message[5]) == columns
        assert message[3] is None or _term.message_id_of(data) == message[3]
    for decode, encode in ((amqp.decode_table, amqp.encode_table), (amqp.decode_properties, amqp.encode_properties)):
        try:
            table = decode(data)
        except CorruptionError:
            continue
        # What is not as it would be written comes back as it would be.
        written = encode(table)
        assert encode(decode(written)) == written
    try:
        term.consult(data)
    except CorruptionError:
        pass
    dets.recovery_terms(dets.parse(data))
    try:
        clean_state._summaries(data, "table")
    except CorruptionError:
        pass


# Where a fuzzer may begin: one of each kind.
SEEDS = [
    Message(b"body", properties={"delivery_mode": 2, "headers": {"a": [1, {"b": None}]}}, routing_keys=["k"]).term,
    Message(b"longer body", routing_keys=["a", "b"]).term,
    term.encode((term.Atom("mc"), term.Atom("mc_amqpl"), 1, {term.Atom("id"): bytes(16)})),
    term.encode([1.5, {1: [2]}, term.Opaque(b"l\0\0\0\1a\1a\2"), 2**70, -1, list(b"text")]),
    amqp.encode_table({"a": 1, "b": {"c": [1.5, "text", b"bytes", amqp.Int8(1)]}}),
    b"{segment_entry_count, 2048}.\n",
    dets.encode([(list(b"DIR"), [(term.Atom("next_seq_id"), 1)])]),
    clean_state._image("t", "set", clean_state._item(term.encode((term.Atom("k"), 1))), 1, "node"),
]


def main() -> None:
    """Fuzz with atheris until it is stopped."""
    import importlib
    import os
    import tempfile

    import atheris
    from budget import limit_addresses

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            with open(os.path.join(corpus, str(number)), "wb") as file:
                file.write(seed)
        # What is compiled goes uninstrumented; what is not is imported again, under the fuzzer's eyes.
        with atheris.instrument_imports(include=["rmqstore.rabbitmq"]):
            for module in (term, dets, clean_state):
                importlib.reload(module)
        atheris.Setup([*sys.argv, corpus], atheris.instrument_func(judge))
        limit_addresses()
        atheris.Fuzz()


if __name__ == "__main__":
    main()
