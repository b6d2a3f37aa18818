"""The compiled core against the test vectors, the golden stores and the independent oracle.

Owns the leaf functions of `rmqstore._core`: hashes, CRC, records, units and the index file; the fence itself is tested
in test_region.py.  Whatever the oracle can say is compared with it; expected numbers written here come from a vector or
from Java's arithmetic, worked out in a comment.  A test that could crash the interpreter runs in a process of its own.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import zlib

import golden
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmqstore.message  # noqa: F401  (registers the error handler by which topics are decoded)
from rmqstore import _columns, _core, _dispatch, _rows
from rmqstore._core import IndexRegion, Region, Verdict
from rmqstore._dispatch import RecordColumns, TopicTable
from rmqstore.errors import OffsetOutOfRangeError, ReadOnlyError, StoreClosedError, StoreError
from rmqstore.message import _read

MAX_I64 = 2**63 - 1
MIN_I64 = -(2**63)
NO_DELAYS = np.zeros(0, np.int64)
FIELDS = (
    "total_size version body_crc queue_id flag queue_offset phy_offset sys_flag born_timestamp born_host "
    "store_timestamp store_host reconsume_times prepared_transaction_offset body topic properties crc_ok"
).split()
PLAIN_STORES = ("base", "propcrc", "ext", "compaction", "base.running")


def mapped(data: bytes, writable: bool = True) -> Region:
    """A region over a file that holds `data` and has no name."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return Region.map(file.fileno(), len(data), writable)


def sparse(size: int) -> Region:
    """A writable region over `size` zero bytes, none of which takes place on the disk."""
    with tempfile.TemporaryFile() as file:
        try:
            file.truncate(size)
            return Region.map(file.fileno(), size, True)
        except OSError as error:
            pytest.skip(f"no file of {size} bytes here: {error}")


def content(region: Region) -> bytes:
    return region.read(0, region.size)


def index_of(slots: int, entries: int, data: bytes | None = None) -> IndexRegion:
    size = oracle.index_file_size(slots, entries)
    index = IndexRegion()
    index.attach(sparse(size) if data is None else mapped(data), slots, entries)
    return index


def decoded(region: Region, pos: int, **more) -> dict:
    values = _core.decode_record(region, pos, **more)
    assert not isinstance(values, Verdict), values
    return dict(zip(FIELDS, values, strict=True))


def encode_records(region, pos, base_offset, rows, first=0, prop_crc=False):
    """Encode prepared rows from number `first` as far as there is room; their sizes in bytes."""
    batch = _rows.RowBatch(TopicTable(), bytes(8), {}, 0, prop_crc=prop_crc)
    batch.take_prepared(rows)
    end, _ = batch.encode(region, pos, base_offset, first)
    return batch.columns()[3][first:end].tolist()


def record_size(topic_size, body_size, properties_size, version=1):
    """The size in bytes of a record with hosts of IPv4."""
    return int(_core.RecordLayout.RECORD_FIXED_SIZE) + topic_size + body_size + properties_size + (version == 2)


def encode_row(
    topic=b"T",
    body=b"",
    properties=b"",
    born_host="127.0.0.1:0",
    store_host="127.0.0.1:10911",
    queue_id=0,
    flag=0,
    sys_flag=0,
    reconsume_times=0,
    version=None,
    queue_offset=0,
    born_timestamp=0,
    store_timestamp=0,
    prepared_transaction_offset=0,
):
    """A row for `RowBatch.take_prepared`; texts are encoded as Java does, pairs of properties too."""
    if isinstance(topic, str):
        topic = oracle.java_encode(topic)
    if not isinstance(properties, bytes):
        properties = oracle.encode_properties([tuple(pair) for pair in properties])
    if version is None:
        version = 2 if len(topic) > 127 else 1
    return (
        topic,
        body,
        properties,
        oracle.encode_host(born_host),
        oracle.encode_host(store_host),
        queue_id,
        flag,
        sys_flag,
        reconsume_times,
        version,
        queue_offset,
        born_timestamp,
        store_timestamp,
        prepared_transaction_offset,
    )


def delays_of(geo) -> np.ndarray:
    return np.array(list(oracle.delay_levels(geo["message_delay_level"]).values()), np.int64)


# ---------------------------------------------------------------------------------------------------------------
# Hashes and CRC


def test_t1_java_string_hash(vectors):
    for row in vectors["T1"]:
        text = row["string"]
        assert _core.java_string_hash(text) == row["signed"], text
        if "\ud83d" not in text:
            assert _core.java_string_hash_bytes(text.encode()) == row["signed"], text
        # Cut at every "#", topic and key give the hash of the whole key.
        for at in [i for i, character in enumerate(text) if character == "#"]:
            assert _core.index_key_hash(text[:at], text[at + 1 :]) == row["index_hash"]


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=40), st.text(max_size=20))
def test_string_hash_equals_the_oracle(text, other):
    assert _core.java_string_hash(text) == oracle.java_hash(text)
    assert _core.index_key_hash(other, text) == oracle.index_hash(f"{other}#{text}")
    assert _core.index_key_hash(text, other) == oracle.index_hash(f"{text}#{other}")


@given(st.text(max_size=60))
def test_bytes_hash_of_sound_utf8_equals_the_string_hash(text):
    assert _core.java_string_hash_bytes(text.encode()) == oracle.java_hash(text)


# Bytes at which the JDK's decoder takes a different branch, so that short strings of them meet all combinations.
EDGE_BYTES = bytes.fromhex("00 41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ed ee ef f0 f1 f4 f5 f7 f8 ff")


@given(st.one_of(st.binary(max_size=24), st.lists(st.sampled_from(EDGE_BYTES), max_size=8).map(bytes)))
def test_bytes_hash_equals_javas_decoding(data):
    assert _core.java_string_hash_bytes(data) == oracle.java_hash(oracle.java_decode(data))


def test_bytes_hash_of_every_short_combination_of_edge_bytes():
    one = [bytes([byte]) for byte in EDGE_BYTES]
    two = [a + b for a in one for b in one]
    lead = [bytes([byte]) for byte in bytes.fromhex("c2 e0 e1 ed ef f0 f1 f4 f5")]
    continued = [bytes([byte]) for byte in bytes.fromhex("41 80 8f 90 9f a0 bf c2 e1 f0")]
    four = [a + b + c + d for a in lead for b in continued for c in continued for d in [b"", *continued]]
    for data in one + two + four:
        expected = oracle.java_hash(data.decode("utf-8", "surrogatepass")) if data.isascii() else None
        assert _core.java_string_hash_bytes(data) == oracle.java_hash(oracle.java_decode(data)), data.hex()
        assert expected is None or _core.java_string_hash_bytes(data) == expected


def test_hash_of_long_strings_of_each_width():
    # PyUnicode keeps 1, 2 or 4 bytes a character; the first is hashed eight characters at a time.
    for unit in ("a", "é", "订", "\U0001f600", "\ud800"):
        for size in (0, 1, 7, 8, 9, 15, 16, 17, 1000):
            text = (unit * size)[:size]
            assert _core.java_string_hash(text) == oracle.java_hash(text)


def test_hash_of_every_length():
    # Sixteen, eight and four units go in one step, and what is over goes with zeros before it.
    latin = bytes(random.Random(1).randrange(256) for _ in range(400)).decode("latin-1")
    ascii_text = "".join(chr(ord(character) & 0x7F) for character in latin)
    wide = "".join(chr(0x100 + i * 977 % 0xD000) for i in range(400))
    for text in (latin, ascii_text, wide):
        for size in range(300):
            for start in (0, 1, size % 16):
                part = text[start : start + size]
                assert _core.java_string_hash(part) == oracle.java_hash(part), (start, size)
    for size in range(100):
        part = ascii_text[size : 2 * size]
        assert _core.java_string_hash_bytes(part.encode()) == oracle.java_hash(part)
        assert _core.index_key_hash(part, latin[:size]) == oracle.index_hash(f"{part}#{latin[:size]}")


def test_bytes_hash_with_one_byte_beyond_ascii_anywhere():
    # The fast path has to notice it wherever it is, and to take nothing of what it did into the slow one.
    for size in range(1, 70):
        for at in range(size):
            data = bytearray(b"q" * size)
            data[at] = 0x80 + at
            assert _core.java_string_hash_bytes(bytes(data)) == oracle.java_hash(oracle.java_decode(bytes(data)))


GUARDED_HASHES = """
import ctypes, mmap, tempfile
import numpy as np, pyarrow
from rmqstore import _columns, _core, _dispatch, _rows
from rmqstore.message import _read

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
memory[page : 2 * page] = bytes(32 + i % 90 for i in range(page))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for at in (0, 2):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + at * page), page, 0) == 0
inside = memoryview(memory)[page : 2 * page]
file = tempfile.TemporaryFile()
file.truncate(40 + 4 * 5 + 20 * 1000)
region = _core.Region.map(file.fileno(), 40 + 4 * 5 + 20 * 1000, True)
index = _core.IndexRegion()
index.attach(region, 5, 1000)
for n in range(200):
    for i, part in enumerate((inside[:n], inside[page - n :])):
        offsets = pyarrow.py_buffer(np.array([0, n], np.int32))
        keys = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(part)])
        assert index.put_keys(keys, np.array([n]), np.array([1_700_000_000_000])) == 1
        found = region.get_i32(40 + 4 * 5 + 20 * (2 * n + i + 1))
        signed = _core.java_string_hash(bytes(part).decode())
        assert found == (0 if signed == -(2**31) else abs(signed)), n
print("done")
"""


def test_hashes_touch_no_byte_outside():
    pytest.importorskip("pyarrow")
    run = subprocess.run([sys.executable, "-c", GUARDED_HASHES], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "done"), run.stderr


def test_hashes_refuse_other_types():
    for call in (
        lambda: _core.java_string_hash(b"a"),
        lambda: _core.java_string_hash(None),
        lambda: _core.java_string_hash_bytes("a"),
        lambda: _core.java_string_hash_bytes(None),
        lambda: _core.index_key_hash("T", None),
        lambda: _core.crc32(None),
        lambda: _core.crc32("text"),
    ):
        with pytest.raises((TypeError, BufferError)):
            call()


def test_t2_body_crc(vectors):
    for row in vectors["T2"]:
        body = (row["body"] or "").encode()
        assert _core.crc32(body) == row["decimal"] == int(row["stored"], 16)


@given(st.binary(max_size=300), st.integers(0, 17))
def test_crc32_equals_zlib(data, cut):
    assert _core.crc32(data) == zlib.crc32(data) & 0x7FFFFFFF
    assert _core.crc32(memoryview(data)[cut:]) == zlib.crc32(data[cut:]) & 0x7FFFFFFF


def test_crc32_of_many_megabytes():
    data = random.Random(1).randbytes(3_000_001)
    assert _core.crc32(data) == _core.crc32(np.frombuffer(data, np.uint8)) == zlib.crc32(data) & 0x7FFFFFFF


# ---------------------------------------------------------------------------------------------------------------
# Records


def record_vectors(vectors):
    found = [(name, vectors[name], False) for name in ("T3", "T4", "T5", "T6")]
    found.append(("T7", vectors["T7"]["record"], True))
    found += [(f"T8.{i}", vector, False) for i, vector in enumerate(vectors["T8"]["records"])]
    return [*found, ("T8.inner_batch", vectors["T8"]["inner_batch"], False)]


def row_of_fields(fields):
    row = {name: value for name, value in fields.items() if name not in ("phy_offset", "batch")}
    if "batch" in fields:
        row["body"] = oracle.encode_client_messages(
            {"flag": m["flag"], "body": m["body"].encode(), "properties": [tuple(p) for p in m["properties"]]}
            for m in fields["batch"]
        )
    else:
        row["body"] = fields["body"].encode()
    return row


def test_t3_to_t8_records_decode_and_encode(vectors):
    checked = record_vectors(vectors)
    assert len(checked) >= 8
    for name, vector, prop_crc in checked:
        raw, fields = bytes.fromhex(vector["hex"]), vector["fields"]
        row = row_of_fields(fields)
        phy_offset = fields["phy_offset"]
        # Between two zero places, so that a byte too much on either side shows.
        region = sparse(16 + len(raw) + 8)
        assert encode_records(region, 16, phy_offset - 16, [encode_row(**row)], 0, prop_crc) == [len(raw)], name
        assert content(region) == bytes(16) + raw + bytes(8), name
        found = decoded(mapped(bytes(16) + raw), 16)
        for field in (
            "version queue_id flag queue_offset phy_offset sys_flag born_timestamp store_timestamp reconsume_times "
            "prepared_transaction_offset topic"
        ).split():
            assert found[field] == fields[field], (name, field)
        assert found["total_size"] == vector["length"]
        assert found["born_host"] == oracle.encode_host(fields["born_host"])
        assert found["store_host"] == oracle.encode_host(fields["store_host"])
        assert found["body"] == row["body"]
        assert found["body_crc"] == oracle.masked_crc(row["body"])
        assert found["crc_ok"] is True
        stored = oracle.encode_properties([tuple(pair) for pair in fields["properties"]])
        assert found["properties"] == stored + (raw[-20:] if prop_crc else b"")
        region = mapped(raw)
        assert _core.check_record(region, 0, phy_offset) == (Verdict.RECORD, len(raw), fields["store_timestamp"])
        assert _core.check_record(region, 0, phy_offset + 1)[0] == Verdict.BAD_PHY_OFFSET
        for cut in range(len(raw)):
            verdict = _core.decode_record(region, 0, cut)
            assert verdict == (Verdict.EMPTY if cut < 8 else Verdict.BAD_SIZE), (name, cut)


def test_t8_blank(vectors):
    blank = vectors["T8"]["blank"]
    pos, size = blank["phy_offset"], blank["segment_size"]
    region = mapped(b"\xaa" * size)
    _core.write_blank(region, pos)
    assert content(region) == b"\xaa" * pos + bytes.fromhex(blank["hex"]) + b"\xaa" * (size - pos - 8)
    assert _core.decode_record(region, pos) == Verdict.BLANK
    assert _core.check_record(region, pos, 0) == (Verdict.BLANK, blank["size"], 0)
    # The record that did not fit: 254 bytes are left, 300 and 8 are needed.
    region.zero(0, size)
    body = bytes(blank["next_record_size"] - record_size(1, 0, 0))
    assert encode_records(region, pos, 0, [encode_row(body=body)]) == []
    assert content(region) == bytes(size)
    _core.write_blank(region, size - 8)
    assert region.read(size - 8, 8) == bytes.fromhex("00000008cbd43194")
    for bad in (size - 7, size, size + 1, MAX_I64, MIN_I64, -1):
        with pytest.raises(OffsetOutOfRangeError):
            _core.write_blank(region, bad)


@pytest.mark.parametrize(
    ("properties", "extra"),
    [(b"", 20), (b"a\x01b\x02", 20), (b"a\x01b", 21), (b"\x02", 20), (b"x", 21)],
)
def test_property_crc_separator(properties, extra):
    region = sparse(400)
    row = encode_row(topic="Topic", body=b"body", properties=properties, queue_id=3)
    (size,) = encode_records(region, 0, 0, [row], 0, True)
    expected = oracle.encode_record(
        topic="Topic", body=b"body", properties=properties, queue_id=3, append_prop_crc=True
    )
    assert region.read(0, size) == expected
    assert size == record_size(5, 4, len(properties) + extra)
    assert _core.check_record(region, 0, 0)[0] == Verdict.RECORD
    # A changed byte that the body CRC does not see is seen by the property CRC only when it is asked for.
    region.write(15, b"\x07")
    assert _core.check_record(region, 0, 0)[0] == Verdict.BAD_PROP_CRC
    assert _core.check_record(region, 0, 0, False)[0] == Verdict.RECORD
    assert decoded(region, 0)["crc_ok"] is False
    assert decoded(region, 0, check_crc=False)["crc_ok"] is True


hosts = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.integers(0, 65535)).map(lambda host: f"{host[0]}:{host[1]}"),
    st.tuples(st.ip_addresses(v=6), st.integers(0, 65535)).map(lambda host: f"[{host[0]}]:{host[1]}"),
)
i32 = st.integers(-(2**31), 2**31 - 1)
i64 = st.integers(MIN_I64, MAX_I64)
record_rows = st.fixed_dictionaries(
    {
        "topic": st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
        "body": st.binary(max_size=80),
        "properties": st.binary(max_size=60),
        "born_host": hosts,
        "store_host": hosts,
        "queue_id": i32,
        "flag": i32,
        "sys_flag": i32,
        "reconsume_times": i32,
        "queue_offset": i64,
        "born_timestamp": i64,
        "store_timestamp": i64,
        "prepared_transaction_offset": i64,
    }
)


@given(st.lists(record_rows, min_size=1, max_size=70), st.booleans(), st.integers(0, 2**50))
def test_records_equal_the_oracles_and_come_back(rows, prop_crc, base_offset):
    expected = b""
    for row in rows:
        version = 2 if len(row["topic"].encode()) > 127 else 1
        expected += oracle.encode_record(
            **row, phy_offset=base_offset + len(expected), append_prop_crc=prop_crc, version=version
        )
    region = sparse(len(expected) + 8)
    sizes = encode_records(region, 0, base_offset, [encode_row(**row) for row in rows], 0, prop_crc)
    assert content(region) == expected + bytes(8)
    pos = 0
    for row, size in zip(rows, sizes, strict=True):
        found = decoded(region, pos)
        model = oracle.decode_record(expected, pos, base_offset + pos)
        assert found["total_size"] == size == model.size
        assert found["phy_offset"] == base_offset + pos
        assert found["topic"] == row["topic"]
        assert found["body"] == row["body"]
        assert found["properties"] == model.properties_raw
        assert found["sys_flag"] == model.sys_flag
        assert oracle.decode_host(found["born_host"]) == model.born_host
        assert oracle.decode_host(found["store_host"]) == model.store_host
        for name in (
            "queue_id flag reconsume_times queue_offset born_timestamp store_timestamp prepared_transaction_offset"
        ).split():
            assert found[name] == row[name]
        assert found["crc_ok"] is True
        pos += size


def test_encode_records_stops_before_the_blank_does_not_fit():
    size = record_size(1, 10, 0)
    rows = [encode_row(body=bytes([i]) * 10, queue_offset=i) for i in range(200)]
    for room, fit in ((size + 7, 0), (size + 8, 1), (3 * size + 7, 2), (130 * size + 8, 130), (200 * size + 8, 200)):
        region = sparse(room)
        assert encode_records(region, 0, 0, rows) == [size] * fit
        assert not any(region.read(fit * size, room - fit * size))
        assert _dispatch.walk(region, 0, room, 0, True)[1:3] == (Verdict.EMPTY, fit)
    # The eight bytes after the last record are set to zero, so that old bytes there are never its successor.
    region = mapped(b"\xda" * (2 * size + 20))
    assert encode_records(region, 1, 0, rows[:2]) == [size] * 2
    assert region.read(2 * size + 1, 19) == bytes(8) + b"\xda" * 11
    # `first` goes on where an earlier call ended.
    region = sparse(10 * size + 8)
    assert encode_records(region, 5 * size, 0, rows, 195) == [size] * 5
    assert [decoded(region, (5 + i) * size)["queue_offset"] for i in range(5)] == [195, 196, 197, 198, 199]
    assert encode_records(region, 0, 0, rows, 200) == []
    assert encode_records(region, 0, 0, rows, MAX_I64) == []


def test_encode_records_refuses_what_does_not_fit_the_format():
    region = sparse(200_000)
    refused = [
        encode_row(topic=b"t" * 128, version=1),
        encode_row(topic=b"t" * 32768),
        encode_row(properties=bytes(32768)),
        (*encode_row()[:3], bytes(7), *encode_row()[4:]),
        (*encode_row()[:4], bytes(12), *encode_row()[5:]),
    ]
    for row in refused:
        with pytest.raises(ValueError):
            encode_records(region, 0, 0, [row])
    for place, value in ((5, 2**31), (6, -(2**31) - 1), (10, 2**63), (12, "now"), (0, "text"), (1, 5)):
        row = list(encode_row())
        row[place] = value
        with pytest.raises((TypeError, OverflowError)):
            encode_records(region, 0, 0, [tuple(row)])
    assert content(region) == bytes(200_000)
    with pytest.raises(OffsetOutOfRangeError):
        encode_records(region, 200_001, 0, [encode_row()])
    with pytest.raises(OffsetOutOfRangeError):
        encode_records(region, -1, 0, [encode_row()])
    with pytest.raises(ReadOnlyError):
        encode_records(mapped(bytes(500), False), 0, 0, [encode_row()])


def test_encode_records_refuses_properties_that_the_crc_makes_too_long():
    # 32747 + 20 = 32767 is the most that the 16-bit length holds; one more would be stored as a negative length.
    region = sparse(70_000)
    longest = b"a\x01" + b"x" * 32744 + b"\x02"
    (size,) = encode_records(region, 0, 0, [encode_row(properties=longest)], 0, True)
    assert _core.check_record(region, 0, 0) == (Verdict.RECORD, size, 0)
    for properties in (longest[:-1] + b"x", b"b" + longest, b"b" * 32767):
        with pytest.raises(ValueError):
            encode_records(region, 0, 0, [encode_row(properties=properties)], 0, True)


def test_encode_records_refuses_an_unknown_version():
    region = sparse(1000)
    for version in (0, 3, -1):
        with pytest.raises(ValueError):
            encode_records(region, 0, 0, [encode_row(topic=b"t" * 200, version=version)])
    assert content(region) == bytes(1000)


def test_decode_record_of_a_malformed_topic_reads_as_java_reads_it():
    raw = oracle.encode_record(topic="Topic", body=b"x")
    at = raw.index(b"Topic")
    for topic in (b"T\xe8\xae\xa2i", b"\xed\xa0\x80ab", b"ab\xf0\x9f\x98", b"\xff\xfe\xfd\xfc\xfb"):
        assert decoded(mapped(raw[:at] + topic + raw[at + 5 :]), 0)["topic"] == oracle.java_decode(topic)


def test_check_record_verdicts():
    raw = oracle.encode_record(topic="Topic", body=b"body", properties=[("a", "b")], store_timestamp=5)
    zeros = bytes(len(raw))

    def verdict(data, pos=0, base_offset=0):
        return _core.check_record(mapped(data), pos, base_offset)[0]

    def with_i32(at, value):
        return raw[:at] + struct.pack(">i", value) + raw[at + 4 :]

    assert verdict(raw) == Verdict.RECORD
    assert verdict(zeros) == Verdict.EMPTY
    assert verdict(bytes(7)) == Verdict.EMPTY
    assert verdict(raw, len(raw)) == Verdict.EMPTY
    assert verdict(b"\0\0\0\0\x01" + zeros) == Verdict.BAD_MAGIC
    assert verdict(b"\0\0\0\x01" + zeros) == Verdict.BAD_MAGIC
    # The size is published last: until then nothing is there.  A size without its magic is what no writer leaves.
    assert verdict(with_i32(0, 0)) == Verdict.EMPTY
    assert verdict(with_i32(4, 0)) == Verdict.BAD_MAGIC
    assert verdict(bytes(4) + struct.pack(">I", oracle.MAGIC_BLANK) + zeros) == Verdict.EMPTY
    for size in (-1, -(2**31), 1, 90, len(raw) + 1, 2**31 - 1):
        assert verdict(with_i32(0, size)) == Verdict.BAD_SIZE
    assert verdict(with_i32(0, 91)) == Verdict.BAD_LENGTH
    assert verdict(with_i32(0, len(raw) - 1)) == Verdict.BAD_LENGTH
    body_at = raw.index(b"body")
    for length in (-1, 2**31 - 1, 3, 5, len(raw)):
        assert verdict(with_i32(body_at - 4, length)) == Verdict.BAD_LENGTH
    assert verdict(with_i32(body_at, 0)) == Verdict.BAD_BODY_CRC
    # 0x30 in the system flag makes the hosts longer, so nothing else fits.
    assert verdict(with_i32(36, 0x30)) == Verdict.BAD_LENGTH
    for pos in (-1, len(raw) + 1, MIN_I64, MAX_I64):
        with pytest.raises(OffsetOutOfRangeError):
            _core.check_record(mapped(raw), pos, 0)
        with pytest.raises(OffsetOutOfRangeError):
            _core.decode_record(mapped(raw), pos)


# ---------------------------------------------------------------------------------------------------------------
# Scanning and walking golden segments


def commit_log_of(root):
    files = oracle.read_files(root)
    return oracle.segments(files)


def scan_rows(segment: Region, base_offset: int, delays, *, index_tags: bool, capacity: int = 7, topics=None):
    """Every row of a segment as a tuple, scanned in pieces of `capacity` rows, and how the scan ended."""
    columns = RecordColumns(capacity, topics)
    pos, rows = 0, []
    while True:
        pos, verdict = _dispatch.scan(segment, pos, segment.size, base_offset, columns, delays, True, index_tags)
        for i in range(columns.count):
            keys = columns.key_hash[columns.key_start[i] : columns.key_start[i + 1]].tolist()
            rows.append(
                (
                    int(columns.phy_offset[i]),
                    int(columns.size[i]),
                    int(columns.queue_id[i]),
                    int(columns.queue_offset[i]),
                    int(columns.sys_flag[i]),
                    int(columns.store_timestamp[i]),
                    int(columns.tags_code[i]),
                    columns.topics.topics[columns.topic[i]].decode(),
                    int(columns.inner_base[i]),
                    int(columns.inner_num[i]),
                    int(columns.multi_dispatch[i]),
                    keys,
                )
            )
        if verdict != Verdict.COLUMNS_FULL:
            return rows, pos, verdict


def model_row(record: oracle.Record, geo, index_tags: bool):
    inner_base = record.queue_offset
    if record.is_inner_batch:
        inner_base = int(record.properties.get("INNER_BASE", record.queue_offset))
    return (
        record.phy_offset,
        record.size,
        record.queue_id,
        record.queue_offset,
        record.sys_flag,
        record.store_timestamp,
        oracle.tags_code(record, geo),
        record.topic,
        inner_base,
        record.batch_num,
        int("INNER_MULTI_DISPATCH" in record.properties),
        [oracle.index_hash(key) for key in oracle.index_keys_of(record, index_tags)],
    )


@pytest.mark.parametrize("name", [*PLAIN_STORES, "broker", "broker.killed"])
def test_scan_and_walk_equal_the_oracle(name, golden_store):
    geo = oracle.geometry(golden.geometry(name))
    log = commit_log_of(golden_store(name))
    assert log
    topics = TopicTable()
    delays = delays_of(geo)
    seen = 0
    for base_offset, data in log.items():
        found = list(oracle.walk_commit_log({base_offset: data}))
        records = [each for each in found if isinstance(each, oracle.Record)]
        region = mapped(data, False)
        capacity = 7 if len(data) < 10_000 else 500
        rows, end, verdict = scan_rows(
            region, base_offset, delays, index_tags=geo["index_tags"], capacity=capacity, topics=topics
        )
        assert rows == [model_row(record, geo, geo["index_tags"]) for record in records]
        if isinstance(found[-1] if found else None, oracle.Blank):
            assert (end, verdict) == (found[-1].phy_offset - base_offset, Verdict.BLANK)
        else:
            assert (end, verdict) == (records[-1].end - base_offset if records else 0, Verdict.EMPTY)
        last = records[-1].phy_offset - base_offset if records else -1
        assert _dispatch.walk(region, 0, region.size, base_offset, True) == (end, verdict, len(records), last)
        assert _dispatch.walk(region, 0, region.size, base_offset) == (end, verdict, len(records), last)
        starts = [record.phy_offset - base_offset for record in records]
        probes = starts if len(starts) < 100 else starts[:: len(starts) // 50]
        for pos in probes:
            assert _core.find_record(region, pos, base_offset) == pos
            following = [start for start in starts if start > pos]
            assert _core.find_record(region, pos + 1, base_offset) == (following[0] if following else -1)
        seen += len(records)
    assert seen >= 40
    assert len(set(topics.topics)) == len(topics.topics)


def test_scan_and_walk_stop_at_the_limit(golden_store):
    (base_offset, data), *_ = commit_log_of(golden_store("base")).items()
    records = [each for each in oracle.walk_commit_log({base_offset: data}) if isinstance(each, oracle.Record)]
    region = mapped(data)
    columns = RecordColumns(100)
    for n in range(1, len(records)):
        start = records[n].phy_offset
        for limit in (start - 1, start):
            assert _dispatch.scan(region, 0, limit, 0, columns, NO_DELAYS) == (start, Verdict.LIMIT)
            assert columns.count == n
            assert _dispatch.walk(region, 0, limit, 0) == (start, Verdict.LIMIT, n, records[n - 1].phy_offset)
        assert _dispatch.walk(region, start, start, 0) == (start, Verdict.LIMIT, 0, -1)
    assert _dispatch.scan(region, 0, -5, 0, columns, NO_DELAYS) == (0, Verdict.LIMIT)
    assert columns.count == 0
    assert _dispatch.scan(region, 0, MAX_I64, 0, columns, NO_DELAYS)[1] == Verdict.BLANK
    assert _dispatch.scan(region, len(data), MAX_I64, 0, columns, NO_DELAYS) == (len(data), Verdict.LIMIT)
    for pos in (-1, len(data) + 1, MIN_I64, MAX_I64):
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.scan(region, pos, MAX_I64, 0, columns, NO_DELAYS)
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.walk(region, pos, MAX_I64, 0)
        with pytest.raises(OffsetOutOfRangeError):
            _core.find_record(region, pos, 0)
    assert region.pins == 0
    # At another base offset every record lies about its place.
    assert _dispatch.scan(region, 0, MAX_I64, 4096, columns, NO_DELAYS) == (0, Verdict.BAD_PHY_OFFSET)
    assert _core.find_record(region, 0, 4096) == -1


def test_find_record_passes_over_garbage():
    raw = oracle.encode_record(topic="Topic", body=b"body", phy_offset=2**40 + 300)
    # Garbage with the record's first magic byte, a record that belongs elsewhere, and one with a broken body.
    elsewhere = oracle.encode_record(topic="Topic", body=b"other")
    broken = bytearray(oracle.encode_record(topic="Topic", body=b"body", phy_offset=2**40 + 200))
    broken[broken.index(b"body")] ^= 1
    data = bytearray(b"\xda" * 300 + raw + bytes(20))
    data[10 : 10 + len(elsewhere)] = elsewhere
    data[200 : 200 + len(broken)] = broken
    # The last of these overlaps the true record's place and must not hide it.
    data[300 : 300 + len(raw)] = raw
    region = mapped(bytes(data))
    for pos in range(301):
        assert _core.find_record(region, pos, 2**40) == 300
    # The magic, four bytes into the record, has to begin before the limit.
    for limit in (0, 300, 304):
        assert _core.find_record(region, 0, 2**40, limit) == -1
    for limit in (305, 300 + len(raw), len(data), len(data) + 1, MAX_I64, -1, MIN_I64):
        assert _core.find_record(region, 0, 2**40, limit) == 300
    assert _core.find_record(region, 300, 2**40, 299) == -1
    assert _core.find_record(region, 301, 2**40) == -1
    assert _core.find_record(region, len(data), 2**40) == -1


def scan_one(
    properties: bytes, *, topic="T", sys_flag=0, store_timestamp=0, delays=NO_DELAYS, index_tags=True, body=b""
):
    """Scan one record with these properties; the row and the oracle's Record."""
    raw = oracle.encode_record(
        topic=topic,
        properties=properties,
        sys_flag=sys_flag,
        store_timestamp=store_timestamp,
        body=body,
        queue_offset=9,
    )
    rows, end, verdict = scan_rows(mapped(raw), 0, delays, index_tags=index_tags)
    assert (end, verdict, len(rows)) == (len(raw), Verdict.LIMIT, 1)
    return rows[0], oracle.decode_record(raw)


NAMES = (b"KEYS", b"TAGS", b"UNIQ_KEY", b"DELAY", b"KEY", b"KEYSS", b"x", b"", b"INNER_MULTI_DISPATCH")
VALUES = (
    b"a",
    b"a b",
    b" a  b ",
    b" ",
    b"",
    b"\xe8\xae\xa2 \xe5\x8d\x95",
    b"a\x01b",
    b"\xe8\xae",
    b"\xed\xa0\x80",
    b"3",
)
property_texts = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from([*NAMES, *VALUES, b"\x01", b"\x02", b" "]), max_size=12).map(b"".join),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=6).map(
        lambda pairs: b"\x02".join(name + b"\x01" + value for name, value in pairs)
    ),
)


@given(property_texts, st.booleans(), st.sampled_from([0, 4, 8, 12]), st.sampled_from(["T", "订单", "%RETRY%g"]))
def test_index_hashes_and_tags_codes_of_any_properties(properties, index_tags, sys_flag, topic):
    row, record = scan_one(properties, topic=topic, sys_flag=sys_flag, index_tags=index_tags)
    assert row[11] == [oracle.index_hash(key) for key in oracle.index_keys_of(record, index_tags)]
    assert row[6] == oracle.tags_hash(record.tags)
    assert row[10] == int("INNER_MULTI_DISPATCH" in record.properties)


@pytest.mark.parametrize("behind", [0, 1, 63, 64, 200])
def test_properties_are_found_wherever_they_lie_in_a_long_text(behind):
    # They are read 64 bytes at a time, which must not pass the end of the segment.
    wanted = b"\x02".join(
        (b"UNIQ_KEY\x01u", b"KEYS\x01a b", b"TAGS\x01t", b"INNER_MULTI_DISPATCH\x01x", b"KEYS\x01c d")
    )
    for before in range(150):
        filler = b"n" * before + b"\x01v\x01\x02" if before else b"\x01no name\x02name\x01\x02\x02"
        for text in (filler + wanted, filler + wanted + b"\x02", filler + wanted + b"\x02KEYS\x01", wanted[:before]):
            raw = oracle.encode_record(topic="T", properties=text)
            record = oracle.decode_record(raw)
            # The bytes after it belong to something else.
            for data in (raw + b"\x02KEYS\x01z"[:behind].ljust(behind, b"\x01"), raw + bytes(behind)):
                columns = RecordColumns(1)
                _dispatch.scan(mapped(data), 0, len(raw), 0, columns, NO_DELAYS)
                keys = [oracle.index_hash(key) for key in oracle.index_keys_of(record, True)]
                assert columns.key_hash[: columns.key_start[1]].tolist() == keys
                assert columns.tags_code[0] == oracle.tags_hash(record.tags)
                assert columns.multi_dispatch[0] == ("INNER_MULTI_DISPATCH" in record.properties)


def test_topics_and_queues_of_records_that_follow_each_other():
    draw = random.Random(3)
    names = ["T", "TT", "T1", "T2", "T" * 126, "T" * 125 + "U", "订单"]
    places = [(draw.choice(names), draw.choice((0, 1, -1, 7))) for _ in range(300)]
    places = [place for place in places for _ in range(draw.choice((1, 1, 2, 9)))]
    columns = columns_of(
        [dict(topic=topic, queue_id=queue_id, properties=[("KEYS", "k")]) for topic, queue_id in places]
    )
    table = columns.topics
    assert [(table.topics[topic].decode(), queue) for topic, queue in zip(columns.topic, columns.queue_id)] == places
    assert [
        (table.topics[table.queues[queue][0]].decode(), table.queues[queue][1]) for queue in columns.queue
    ] == places
    assert columns.key_hash[: len(places)].tolist() == [oracle.index_hash(f"{topic}#k") for topic, _ in places]


@pytest.mark.parametrize("level", ["1", "2", "3", "18", "19", "2147483647", "0", "-1", "+2", "007"])
@pytest.mark.parametrize("tags", [None, "TagA"])
def test_tags_code_of_a_delayed_record_is_its_time_of_delivery(level, tags):
    geo = oracle.geometry()
    pairs = [("DELAY", level)] + ([("TAGS", tags)] if tags else [])
    properties = oracle.encode_properties(pairs)
    row, record = scan_one(
        properties, topic=oracle.SCHEDULE_TOPIC, store_timestamp=1_700_000_000_000, delays=delays_of(geo)
    )
    assert row[6] == oracle.tags_code(record, geo)
    if int(level) > 0:
        assert row[6] > 1_700_000_000_000
    # On any other topic the level means nothing.
    row, _ = scan_one(properties, topic="SCHEDULE_TOPIC_XXXY", store_timestamp=5, delays=delays_of(geo))
    assert row[6] == oracle.tags_hash(tags)


def test_delay_level_that_is_no_number_leaves_the_tags_hash():
    for level in (b"x", b"1x", b"-", b"1 ", b" 1", b"\xe4\xb8\x80"):
        row, _ = scan_one(
            b"DELAY\x01" + level + b"\x02TAGS\x01a\x02",
            topic=oracle.SCHEDULE_TOPIC,
            store_timestamp=1_700_000_000_000,
            delays=np.array([1000], np.int64),
        )
        assert row[6] == ord("a")


def test_inner_batch_columns():
    batch = b"INNER_NUM\x013\x02INNER_BASE\x0140\x02"
    row, _ = scan_one(batch, sys_flag=oracle.INNER_BATCH)
    assert row[8:10] == (40, 3)
    row, _ = scan_one(batch)
    assert row[8:10] == (9, 1)
    row, _ = scan_one(b"INNER_NUM\x013\x02", sys_flag=oracle.INNER_BATCH)
    assert row[8:10] == (9, 3)


def test_more_keys_than_the_columns_have_room_for():
    # The room begins at 4 hashes a row and 64 more; 12000 keys need it to grow several times.
    keys = " ".join(f"{i:x}" for i in range(6000))
    raw = b""
    for _ in range(2):
        raw += oracle.encode_record(topic="T", properties=[("KEYS", keys)], phy_offset=len(raw))
    columns = RecordColumns(2)
    assert _dispatch.scan(mapped(raw), 0, len(raw), 0, columns, NO_DELAYS) == (len(raw), Verdict.COLUMNS_FULL)
    assert columns.key_start.tolist() == [0, 6000, 12000]
    expected = [oracle.index_hash(f"T#{i:x}") for i in range(6000)]
    assert columns.key_hash[:12000].tolist() == expected * 2


def columns_of(records: list[dict], capacity: int | None = None) -> RecordColumns:
    raw = b""
    for record in records:
        raw += oracle.encode_record(phy_offset=len(raw), **record)
    columns = RecordColumns(len(records) if capacity is None else capacity)
    assert _dispatch.scan(mapped(raw), 0, len(raw), 0, columns, NO_DELAYS)[0] == len(raw)
    return columns


def test_a_scan_without_keys_gives_the_same_columns_without_hashes():
    records = [
        dict(topic=f"T{n % 3}", queue_id=n % 5, queue_offset=n, properties=[("KEYS", f"a{n} b"), ("TAGS", "t")])
        for n in range(40)
    ]
    raw = b""
    for record in records:
        raw += oracle.encode_record(phy_offset=len(raw), **record)
    whole, bare = RecordColumns(40), RecordColumns(40)
    _dispatch.scan(mapped(raw), 0, len(raw), 0, whole, NO_DELAYS)
    _dispatch.scan(mapped(raw), 0, len(raw), 0, bare, NO_DELAYS, 1, True, False)
    assert whole.key_start[40] == 120
    assert not bare.key_start.any()
    for (
        name
    ) in "phy_offset size queue_id queue_offset sys_flag store_timestamp tags_code topic queue inner_num".split():
        assert getattr(bare, name).tolist() == getattr(whole, name).tolist(), name


def test_rows_are_put_together_by_queue():
    dice = random.Random(5)
    # More queues than the table has room for at first, negative ids, equal ids of several topics.
    named = [(f"T{n % 7}", dice.choice([0, -1, 2**31 - 1, -(2**31), n])) for n in range(400)]
    picked = [dice.choice(named) for _ in range(3000)]
    columns = columns_of([dict(topic=topic, queue_id=queue_id) for topic, queue_id in picked])
    chosen = np.array([dice.random() < 0.7 for _ in picked])
    groups, order = columns.by_queue(chosen.view(np.uint8))
    table = columns.topics
    assert len(set(table.queues)) == len(table.queues) == len(set(picked))
    found = {}
    for number, start, end in groups:
        topic, queue_id = table.queues[number]
        assert end > start
        found[table.topics[topic].decode(), queue_id] = order[start:end].tolist()
    expected: dict = {}
    for row, queue in enumerate(picked):
        if chosen[row]:
            expected.setdefault(queue, []).append(row)
    assert found == expected
    assert len(order) == chosen.sum()
    assert columns.by_queue(np.zeros(3000, np.uint8))[0] == []
    with pytest.raises(ValueError):
        columns.by_queue(np.zeros(2999, np.uint8))
    # The columns are open to everybody: what leads outside takes no part.
    columns.queue[:10] = [-1, -(2**31), 2**31 - 1, len(table.queues), 0, 0, 0, 0, 0, 0]
    assert len(columns.by_queue(np.ones(3000, np.uint8))[1]) == 2996
    for count in (-1, 3001, MAX_I64):
        columns.count = count
        with pytest.raises(ValueError):
            columns.by_queue(np.ones(3000, np.uint8))


def test_run_length_ends_where_offsets_do_not_go_on_by_one():
    columns = columns_of([dict(topic="T", queue_offset=n) for n in (5, 6, 7, 9, 10, 10, -1, 0, MAX_I64, MIN_I64)])
    rows = np.arange(10, dtype=np.int64)
    assert [columns.run_length(rows[n:]) for n in range(11)] == [3, 2, 1, 2, 1, 1, 2, 1, 2, 1, 0]
    assert columns.run_length(np.array([0, 2], np.int64)) == 1
    for bad in ([10], [-1], [0, MAX_I64], [MIN_I64]):
        with pytest.raises(OffsetOutOfRangeError):
            columns.run_length(np.array(bad, np.int64))


def test_topic_table_numbers_topics_in_order():
    table = TopicTable()
    names = [f"topic-{i}".encode() for i in range(300)] + [b"", "订单".encode(), b"AaAa", b"BBBB", b"AaBB", b"\xff"]
    assert [table.add(name) for name in names] == list(range(len(names)))
    assert [table.add(name) for name in names] == list(range(len(names)))
    assert table.topics == names
    with pytest.raises(TypeError):
        table.add(None)
    with pytest.raises(ValueError):
        RecordColumns(0)


def test_topics_with_equal_hashes_stay_apart():
    raw = b""
    for topic in ("AaAa", "BBBB", "AaBB", "AaAa", "BBAa", "BBBB"):
        raw += oracle.encode_record(topic=topic, phy_offset=len(raw))
    rows, _, _ = scan_rows(mapped(raw), 0, NO_DELAYS, index_tags=True)
    assert [row[7] for row in rows] == ["AaAa", "BBBB", "AaBB", "AaAa", "BBAa", "BBBB"]


# ---------------------------------------------------------------------------------------------------------------
# Units


def test_t9_units(vectors):
    units = vectors["T9"]["units"]
    raw = b"".join(bytes.fromhex(unit["hex"]) for unit in units)
    rows = [(unit["phy_offset"], unit["size"], unit["tags_code"]) for unit in units]
    columns = (
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.int32),
        np.array([row[2] for row in rows], np.int64),
    )
    region = sparse(len(raw) + 40)
    for i, row in enumerate(rows):
        _core.write_unit(region, 20 + 20 * i, *row)
        assert _core.read_unit(region, 20 + 20 * i) == row
    assert content(region) == bytes(20) + raw + bytes(20)
    region.zero(0, region.size)
    _core.write_units(region, 20, *columns)
    assert content(region) == bytes(20) + raw + bytes(20)
    for read, written in zip(_core.read_units(region, 20, len(rows)), columns, strict=True):
        assert read.dtype == written.dtype
        assert read.tolist() == written.tolist()
    assert [len(column) for column in _core.read_units(region, 20, 0)] == [0, 0, 0]
    pre_fill = bytes.fromhex(vectors["T9"]["pre_fill"])
    _core.write_unit(region, 0, 0, _core.PRE_FILL_SIZE, 0)
    assert region.read(0, 20) == pre_fill == oracle.PRE_FILL_UNIT


def test_agreeing_units_sees_every_difference():
    columns = columns_of([dict(topic="T", queue_offset=3 + n, properties=[("TAGS", f"t{n}")]) for n in range(6)])
    rows = np.arange(6, dtype=np.int64)
    region = sparse(20 * 8)
    _core.write_units(region, 20, columns.phy_offset, columns.size, columns.tags_code)
    data = content(region)
    assert _dispatch.agreeing_units(region, 20, columns, rows, 3) == 6
    assert _dispatch.agreeing_units(region, 40, columns, rows[1:4], 4) == 3
    assert _dispatch.agreeing_units(region, 20, columns, rows[:0], 3) == 0
    # Right bytes at the wrong number.
    assert _dispatch.agreeing_units(region, 20, columns, rows, 4) == 0
    assert _dispatch.agreeing_units(region, 20, columns, np.array([0, 1, 3], np.int64), 3) == 2
    for pos in range(20, 140):
        for bit in (1, 128):
            hurt = mapped(data[:pos] + bytes([data[pos] ^ bit]) + data[pos + 1 :])
            unit = (pos - 20) // 20
            assert _dispatch.agreeing_units(hurt, 20, columns, rows, 3) == unit
            # Tags codes are left out where they are addresses.
            in_tags = pos % 20 >= 12
            assert _dispatch.agreeing_units(hurt, 20, columns, rows, 3, False) == (6 if in_tags else unit)
            hurt_units = data[20:140][: pos - 20] + bytes([data[pos] ^ bit]) + data[pos + 1 : 140]
            assert _dispatch.agreeing_unit_bytes(hurt_units, columns, rows, 3) == unit
    assert _dispatch.agreeing_unit_bytes(data[20:140], columns, rows, 3) == 6
    assert _dispatch.agreeing_unit_bytes(memoryview(data)[40:100], columns, rows[1:4], 4) == 3
    assert _dispatch.agreeing_unit_bytes(b"", columns, rows[:0], 3) == 0
    for units in (data[20:139], data[20:141], b""):
        with pytest.raises(ValueError, match="6 rows"):
            _dispatch.agreeing_unit_bytes(units, columns, rows, 3)
    for bad in ([6], [-1], [0, 6], [MAX_I64], [MIN_I64]):
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.agreeing_units(region, 20, columns, np.array(bad, np.int64), 3)
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.agreeing_unit_bytes(data[20 : 20 + 20 * len(bad)], columns, np.array(bad, np.int64), 3)
    for pos in (60, 160):
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.agreeing_units(region, pos, columns, rows, 3)
    assert region.pins == 0


class UnitFile:
    """What `FileEnd` asks of a file, and the end of its stream."""

    def __init__(self, region: Region, num: int, *, first: int = 0, reserved: int | None = None):
        self.pool, self.dirty, self._region = self, set(), region
        self.file_from_offset = 20 * first
        self.reserved = region.size if region is not None and reserved is None else reserved
        self.stream = _core.FileStream()
        self.stream.wrote_where = 20 * (first + num)


def settled(
    columns: RecordColumns, file: UnitFile, append: bool = True, following: int = -1
) -> tuple[tuple, list[int]]:
    """What `settle` returns of records of one queue, and the rows that it leaves."""
    end = _rows.FileEnd(file.stream)
    end.learn(file, following)
    columns.topics.ends[0] = end
    chosen = np.ones(columns.count, np.uint8)
    return _rows.settle(columns, chosen, append), np.flatnonzero(chosen).tolist()


def queue_columns(*queue_offsets: int) -> RecordColumns:
    return columns_of([dict(topic="T", queue_offset=n, properties=[("TAGS", f"t{n}")]) for n in queue_offsets])


def units_of(columns: RecordColumns) -> bytes:
    region = sparse(20 * columns.count)
    _core.write_units(region, 0, columns.phy_offset, columns.size, columns.tags_code)
    return content(region)


def test_settle_sees_every_difference():
    columns = queue_columns(*range(3, 9))
    units = units_of(columns)
    assert settled(columns, UnitFile(mapped(bytes(20) + units), 7, first=2)) == ((0, 0, -1), [])
    for pos in range(len(units)):
        hurt = units[:pos] + bytes([units[pos] ^ 128]) + units[pos + 1 :]
        region = mapped(bytes(20) + hurt)
        # Records after a unit that differs are left to the caller too.
        left = list(range(pos // 20, 6))
        assert settled(columns, UnitFile(region, 7, first=2)) == ((len(left), 0, -1), left)
        assert content(region) == bytes(20) + hurt and region.pins == 0


def test_settle_writes_what_follows_and_leaves_the_rest():
    columns = queue_columns(*range(6))
    units, nothing, phy_offset = units_of(columns), bytes(40), columns.phy_offset.tolist()
    for there in range(1, 7):
        region = sparse(160)
        region.write(0, units[: 20 * there])
        file = UnitFile(region, there)
        assert settled(columns, file, append=False) == ((6 - there, 0, -1), list(range(there, 6)))
        assert not file.dirty and content(region)[: 20 * there] == units[: 20 * there]
        written = (0, 6 - there, phy_offset[there] if there < 6 else -1)
        assert settled(columns, file) == (written, [])
        assert content(region) == units + nothing and file.stream.wrote_where == 120
        assert file.dirty == ({file} if there < 6 else set()) and region.pins == 0
    # No room, or none that has space on disk; no file, none that is mapped, or another one of the queue.
    for size, reserved, left in ((80, None, [4, 5]), (160, 100, [5]), (160, 0, [2, 3, 4, 5])):
        region = sparse(size)
        region.write(0, units[:40])
        assert settled(columns, UnitFile(region, 2, reserved=reserved))[1] == left
    assert settled(columns, UnitFile(None, 0, reserved=0))[0] == (6, 0, -1)
    assert settled(columns, UnitFile(sparse(160), 2, first=8))[0] == (6, 0, -1)
    columns.topics.ends[0] = None
    assert _rows.settle(columns, np.ones(6, np.uint8), True) == (6, 0, -1)
    # The first unit of a file may follow anything, and so may one of a record before the last one's.
    assert settled(columns, UnitFile(sparse(160), 0))[0] == (6, 0, -1)
    region = sparse(160)
    region.write(0, units_of(queue_columns(*range(7)))[120:])
    assert settled(queue_columns(1, 2), UnitFile(region, 1))[0] == (2, 0, -1)


def test_settle_refuses_other_regions():
    columns = queue_columns(0, 1)
    region = sparse(160)
    file = UnitFile(region, 1)
    region.close()
    with pytest.raises(StoreClosedError):
        settled(columns, file)
    assert settled(columns, UnitFile(Region(), 1))[0] == (2, 0, -1)
    with pytest.raises(ReadOnlyError):
        settled(columns, UnitFile(mapped(units_of(columns)[:20] + bytes(140), False), 1))


@pytest.mark.parametrize("offsets", [(0, 1, 3), (0, 1, 1), (0, 1, 0), (1, 0), (-1, 0), (MAX_I64, 0), (0, MIN_I64)])
def test_settle_leaves_records_that_do_not_follow_each_other(offsets):
    columns = queue_columns(*offsets)
    region = sparse(160)
    region.write(0, units_of(columns))
    left = list(range(len(offsets)))
    assert settled(columns, UnitFile(region, 3)) == ((len(left), 0, -1), left)
    # Nor those that do not follow the ones before.
    right = queue_columns(0, 1)
    region.write(0, units_of(right))
    assert settled(right, UnitFile(region, 2), following=0)[0] == (0, 0, -1)
    assert settled(right, UnitFile(region, 2), following=1)[0] == (2, 0, -1)
    with pytest.raises(ValueError, match="1 marks for 2 rows"):
        _rows.settle(right, np.ones(1, np.uint8), True)
    right.queue[0] = 5
    assert settled(right, UnitFile(region, 2))[1] == [0]


def test_agreeing_ext_units_sees_every_difference():
    units = [(n * 1_000_003 - 5, 1_700_000_000_000 + n, b"x" * (n % 3 * 8)) for n in range(8)]
    region = sparse(400)
    pos, addresses = 0, []
    base = 4096
    for unit in units:
        addresses.append(_core.EXT_ADDRESS_BASE + base + pos)
        pos += _core.write_ext_unit(region, pos, *unit)
    addresses = np.array(addresses, np.int64)
    tags, times = (np.array([unit[i] for unit in units], np.int64) for i in (0, 1))
    data = content(region)
    assert _dispatch.agreeing_ext_units(region, base, addresses) == 8
    assert _dispatch.agreeing_ext_units(region, base, addresses, tags, times) == 8
    assert _dispatch.agreeing_ext_units(region, base, addresses[:0]) == 0
    # An address of another file, between two units, after the last one, and outside all files.
    for address in (base - 1, base + 400, base + 381, base + 1, base + pos, 0, -1, MAX_I64, 2**62):
        odd = addresses.copy()
        odd[5] = (address + _core.EXT_ADDRESS_BASE + 2**63) % 2**64 - 2**63
        assert _dispatch.agreeing_ext_units(region, base, odd) == 5, address
    starts = (addresses - _core.EXT_ADDRESS_BASE - base).tolist()
    for place in range(pos):
        hurt = mapped(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        unit = max(n for n, start in enumerate(starts) if start <= place)
        inside = place - starts[unit]
        length = inside < 2 or 18 <= inside < 20
        assert _dispatch.agreeing_ext_units(hurt, base, addresses) == (unit if length else 8)
        assert _dispatch.agreeing_ext_units(hurt, base, addresses, tags, times) == (unit if inside < 20 else 8)
    for wrong in ((tags[:3], times), (tags, times[:3])):
        with pytest.raises(ValueError):
            _dispatch.agreeing_ext_units(region, base, addresses, *wrong)
    assert _dispatch.agreeing_ext_units(sparse(10), 0, addresses) == 0
    assert region.pins == 0


def test_t9_tags_codes_come_out_of_a_scan(vectors, golden_store):
    log = commit_log_of(golden_store("base"))
    codes = {}
    for base_offset, data in log.items():
        rows, _, _ = scan_rows(mapped(data), base_offset, delays_of(oracle.geometry()), index_tags=False)
        codes |= {row[0]: row[6] for row in rows}
    for unit in vectors["T9"]["units"]:
        assert codes[unit["phy_offset"]] == unit["tags_code"], unit
    lines = [line for line in golden.lines("base", "queue") if line["type"] == "queue"]
    assert lines


def test_t9_batch_unit(vectors):
    unit = vectors["T9"]["batch_unit"]
    row = [unit[name] for name in "phy_offset size tags_code store_timestamp base_queue_offset batch_num".split()]
    region = mapped(b"\xaa" * 138)
    _core.write_batch_unit(region, 46, *row)
    assert content(region) == b"\xaa" * 46 + bytes.fromhex(unit["hex"]) + b"\xaa" * 46
    assert _core.read_batch_unit(region, 46) == tuple(row)
    for pos in (-1, 93, 138, MAX_I64, MIN_I64):
        with pytest.raises(OffsetOutOfRangeError):
            _core.read_batch_unit(region, pos)
        with pytest.raises(OffsetOutOfRangeError):
            _core.write_batch_unit(region, pos, *row)


def test_t9_ext_units(vectors):
    units = vectors["T9"]["ext_units"]
    raw = b"".join(bytes.fromhex(unit["hex"]) for unit in units)
    region = sparse(len(raw) + 30)
    for unit in units:
        size = _core.write_ext_unit(region, unit["pos"], unit["tags_code"], unit["store_timestamp"])
        assert size == len(unit["hex"]) // 2
        assert _core.read_ext_unit(region, unit["pos"]) == (unit["tags_code"], unit["store_timestamp"], b"")
    assert region.read(0, len(raw)) == raw
    for unit in vectors["T9"]["ext_addressing_units"]:
        _, _, code = struct.unpack(">qiq", bytes.fromhex(unit["hex"]))
        assert code == _core.EXT_ADDRESS_BASE + unit["ext_pos"] == oracle.ext_address(unit["ext_pos"])
        assert code <= _core.EXT_ADDRESS_MAX
    assert oracle.is_ext_address(_core.EXT_ADDRESS_MAX) and not oracle.is_ext_address(_core.EXT_ADDRESS_MAX + 1)
    bit_map = bytes(range(7))
    assert _core.write_ext_unit(region, len(raw), -1, 2, bit_map) == 27
    assert region.read(len(raw), 27) == oracle.ExtUnit(-1, 2, bit_map).encode()
    assert _core.read_ext_unit(region, len(raw)) == (-1, 2, bit_map)
    # No unit begins in zeros, after the end, or at the -1 that closes a file.
    assert _core.read_ext_unit(sparse(100), 0) is None
    assert _core.read_ext_unit(region, region.size - 19) is None
    assert _core.read_ext_unit(region, -1) is None
    assert _core.read_ext_unit(region, MAX_I64) is None
    assert _core.read_ext_unit(mapped(b"\xff\xff" + bytes(40)), 0) is None
    # A length that goes beyond the file, or that the bitmap's does not agree with.
    good = oracle.ExtUnit(5, 6, b"abc").encode()
    assert _core.read_ext_unit(mapped(good), 0) == (5, 6, b"abc")
    assert _core.read_ext_unit(mapped(good[:-1]), 0) is None
    assert _core.read_ext_unit(mapped(good[:18] + b"\0\x04" + good[20:]), 0) is None
    assert _core.read_ext_unit(mapped(good[:18] + b"\xff\xfd" + good[20:]), 0) is None
    with pytest.raises(ValueError):
        _core.write_ext_unit(sparse(70_000), 0, 0, 0, bytes(32748))
    assert _core.write_ext_unit(sparse(70_000), 0, 0, 0, bytes(32747)) == 32767
    with pytest.raises(OffsetOutOfRangeError):
        _core.write_ext_unit(region, region.size - 19, 0, 0)


def test_columns_of_unequal_length_are_refused():
    region = sparse(400)
    two, three = np.ones(2, np.int64), np.ones(3, np.int64)
    with pytest.raises(ValueError):
        _core.write_units(region, 0, two, np.ones(3, np.int32), two)
    with pytest.raises(ValueError):
        _core.write_units(region, 0, two, np.ones(2, np.int32), three)
    with pytest.raises(ValueError):
        _core.write_units(region, 0, two, two, two)
    with pytest.raises(ValueError):
        _core.write_units(region, 0, np.ones(4, np.int64)[::2], np.ones(2, np.int32), two)
    with pytest.raises(OffsetOutOfRangeError):
        _core.write_units(region, 361, two, np.ones(2, np.int32), two)
    assert content(region) == bytes(400)


def test_read_units_checks_the_place_before_it_asks_for_memory():
    region = sparse(400)
    for pos, count in ((0, 21), (1, 20), (-20, 1), (400, 1), (0, 2**40), (0, 2**59), (0, MAX_I64), (MAX_I64, 1)):
        with pytest.raises(OffsetOutOfRangeError):
            _core.read_units(region, pos, count)
    with pytest.raises((ValueError, OffsetOutOfRangeError)):
        _core.read_units(region, 0, -1)
    assert region.pins == 0


def test_count_units():
    region = sparse(200)
    assert _core.count_units(region) == 0
    for n in range(10):
        _core.write_unit(region, 20 * n, n, 100, 0)
        assert _core.count_units(region) == n + 1
    for pos, value in ((4 * 20 + 8, 0), (4 * 20 + 8, -1), (3 * 20, -1)):
        hurt = mapped(content(region))
        hurt.write(pos, struct.pack(">i", value))
        assert _core.count_units(hurt) == pos // 20
    # A pre-fill unit counts, a piece at the end that holds no whole unit does not.
    assert _core.count_units(mapped(oracle.PRE_FILL_UNIT * 2 + bytes(20))) == 2
    assert _core.count_units(mapped(oracle.Unit(0, 1, 1).encode() + oracle.Unit(0, 1, 1).encode()[:19])) == 1
    batch = oracle.BatchUnit(5, 10, 0, 0, 0, 1).encode()
    assert _core.count_units(mapped(batch * 3 + bytes(46)), 46) == 3
    assert _core.count_units(mapped(bytes(3))) == 0
    # Those that are known are not looked at again.
    late = bytearray(oracle.Unit(1, 1, 1).encode() * 4 + bytes(20))
    late[0:20] = bytes(20)
    assert [_core.count_units(mapped(bytes(late)), 20, first) for first in (0, 1, 4, 5, 9)] == [0, 4, 4, 5, 5]
    with pytest.raises(OffsetOutOfRangeError):
        _core.count_units(mapped(bytes(20)), 20, -1)


@given(st.lists(st.integers(-3, 60), max_size=30), st.integers(-5, 70), st.data())
def test_unit_at_or_after_is_a_lower_bound(offsets, wanted, data):
    offsets = sorted(offsets)
    low = data.draw(st.integers(0, len(offsets)))
    high = data.draw(st.integers(low, len(offsets)))
    expected = low + sum(offset < wanted for offset in offsets[low:high])
    simple = mapped(b"".join(oracle.Unit(offset, 1, 0).encode() for offset in offsets) + bytes(20))
    assert _core.unit_at_or_after(simple, low, high, wanted) == expected
    batch = mapped(b"".join(oracle.BatchUnit(offset, 1, 0, 0, 0, 1).encode() for offset in offsets) + bytes(46))
    assert _core.unit_at_or_after(batch, low, high, wanted, 46) == expected


HOLES = {20: (oracle.PRE_FILL_UNIT, bytes(20)), 46: (bytes(46), bytes(8) + b"\x80" + bytes(37))}


def units_with_holes(units, unit_size):
    """Return the bytes of units, each given as a phy offset and the kind of hole that replaces it, 0 for none."""
    kinds = {20: lambda offset: oracle.Unit(offset, 1, 0), 46: lambda offset: oracle.BatchUnit(offset, 1, 0, 0, 0, 1)}
    return [HOLES[unit_size][hole - 1] if hole else kinds[unit_size](offset).encode() for offset, hole in units]


@pytest.mark.parametrize("unit_size", [20, 46])
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=40), st.integers(-5, 70), st.data())
def test_unit_at_or_after_passes_over_pre_fill_units_and_holes(unit_size, units, wanted, data):
    units = sorted(units)
    low = data.draw(st.integers(0, len(units)))
    high = data.draw(st.integers(low, len(units)))
    content = units_with_holes(units, unit_size)
    expected = next((i for i in range(low, high) if not units[i][1] and units[i][0] >= wanted), high)
    assert _core.unit_at_or_after(mapped(b"".join(content) + bytes(46)), low, high, wanted, unit_size) == expected


@pytest.mark.parametrize("unit_size", [20, 46])
@given(st.integers(1, 300), st.integers(0, 299), st.integers(1, 25), st.integers(0, 400))
def test_unit_at_or_after_is_not_led_astray_by_damaged_units(unit_size, num, begin, count, wanted):
    units = [[number + 50, 0] for number in range(num)]
    for unit in units[begin : begin + count]:
        unit[0] = 3
    expected = next((number for number, (offset, _) in enumerate(units) if offset >= wanted), num)
    region = mapped(b"".join(units_with_holes(units, unit_size)))
    assert _core.unit_at_or_after(region, 0, num, wanted, unit_size) == expected


@pytest.mark.parametrize("unit_size", [20, 46])
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_written_unit_goes_both_ways(unit_size, holes, data):
    first = data.draw(st.integers(0, len(holes) - 1))
    stop = data.draw(st.integers(-1, len(holes)))
    places = range(first, stop) if stop > first else range(first, stop, -1)
    expected = next((number for number in places if not holes[number]), -1)
    content = units_with_holes(list(enumerate(holes)), unit_size)
    assert _core.written_unit(mapped(b"".join(content)), first, stop, unit_size) == expected


def test_written_unit_bounds():
    region = sparse(200)
    for first, stop in ((-1, 5), (0, -2), (0, 11), (10, 0), (11, 11), (0, 2**60), (2**60, 0), (2**63 - 1, -1)):
        with pytest.raises(OffsetOutOfRangeError):
            _core.written_unit(region, first, stop)
    with pytest.raises(ValueError, match="unit_size 21"):
        _core.written_unit(region, 0, 1, 21)


def test_unit_at_or_after_bounds():
    region = sparse(200)
    for low, high in ((-1, 5), (5, 4), (0, 11), (0, 2**40), (11, 11)):
        with pytest.raises(OffsetOutOfRangeError):
            _core.unit_at_or_after(region, low, high, 0)
    assert _core.unit_at_or_after(region, 10, 10, 0) == 10


# ---------------------------------------------------------------------------------------------------------------
# Index


def test_t10_step_by_step(vectors):
    t10 = vectors["T10"]
    slots, entries = t10["max_hash_slot_num"], t10["max_index_num"]
    index = index_of(slots, entries)
    assert index.region.size == t10["file_size"]
    for key, phy_offset, store_timestamp in t10["puts"]:
        assert index.put_key(key, phy_offset, store_timestamp) is True
    data = content(index.region)
    assert data[:40].hex() == t10["header"]
    assert data[40:80].hex() == t10["slots"]
    for n, entry in enumerate(t10["entries"]):
        assert data[index.entry_pos(n) : index.entry_pos(n) + 20].hex() == entry
        assert index.read_entry(n) == struct.unpack(">iqii", bytes.fromhex(entry))
    assert index.read_header() == struct.unpack(">qqqqii", bytes.fromhex(t10["header"]))
    slot_values = struct.unpack(">10i", bytes.fromhex(t10["slots"]))
    assert tuple(index.read_slot(slot) for slot in range(slots)) == slot_values
    for row in t10["selections"]:
        found = index.select_phy_offset(row["key"], 64, row["begin"], row["end"])
        assert found == row["offsets"], row
        hits, starts = index.select_phy_offsets([row["key"], "none"], 64, row["begin"], row["end"])
        assert (hits.tolist(), starts.tolist()) == (row["offsets"], [0, len(found), len(found)])

    fill = t10["fill"]
    for i in range(fill["taken"]):
        assert index.put_key(
            f"{fill['key_prefix']}{i}", fill["first_phy_offset"] + i, fill["first_store_timestamp"] + i
        )
    full = content(index.region)
    refused = fill["refused_at"]
    assert refused == fill["taken"] + 1
    assert index.put_key("T#late", 9999, 1) is False
    assert index.put_hash(7, 9999, 1) is False
    assert index.put_keys(["T#late", "T#later"], [9999, 9999], [1, 1]) == 0
    assert content(index.region) == full
    assert full[:40].hex() == fill["header"]
    assert full[40:80].hex() == fill["slots"]

    rolled_vector = t10["rolled"]
    rolled = index_of(slots, entries)
    _, end_timestamp, _, end_phy_offset, _, _ = index.read_header()
    rolled.write_header(end_timestamp, end_timestamp, end_phy_offset, end_phy_offset, 0, 0)
    assert rolled.region.read(0, 40).hex() == rolled_vector["header"]
    for key, phy_offset, store_timestamp in rolled_vector["puts"]:
        assert rolled.put_key(key, phy_offset, store_timestamp)
    assert rolled.region.read(0, 40).hex() == rolled_vector["header_after"]
    for n, entry in rolled_vector["entries"].items():
        assert rolled.region.read(rolled.entry_pos(int(n)), 20).hex() == entry


def test_index_files_of_base_come_out_again(vectors, golden_store):
    root = golden_store("base")
    geo = oracle.geometry(golden.geometry("base"))
    files = oracle.read_files(root)
    golden_index = oracle.index_files(files)
    assert golden_index
    index = index_of(10, 20)
    built = [index]
    for record in oracle.records_of(oracle.segments(files)):
        for key in oracle.index_keys_of(record, geo["index_tags"]):
            if not index.put_key(key, record.phy_offset, record.store_timestamp):
                _, end_timestamp, _, end_phy_offset, _, _ = index.read_header()
                index = index_of(10, 20)
                index.write_header(end_timestamp, end_timestamp, end_phy_offset, end_phy_offset, 0, 0)
                built.append(index)
                assert index.put_key(key, record.phy_offset, record.store_timestamp)
    first = vectors["T10"]["base_first_file"]
    assert built[0].region.read(0, 80).hex() == first["header"] + first["slots"]
    assert [content(index.region) for index in built] == golden_index
    end = max(oracle.segments(files)) + 4096
    for index in built:
        assert index.check_links(end) == []
        count = max(index.read_header()[5], 1)
        assert index.survey(end)[0] == count
        assert index.relink(count) == 0
    assert [content(index.region) for index in built] == golden_index


KEYS = ("T#a", "T#b", "AaAa", "BBBB", "AaBB", "polygenelubricants", "T#订单", "T#\U0001f600", "", "a\ud83dz", "é" * 20)
# Java's difference of two times wraps at 64 bits, the oracle's does not: times that far apart have their own test.
TIMES = st.one_of(
    st.sampled_from([0, -1, 1, 999, 1000, 1_700_000_000_123, 2**31 * 1000, 2**62, MAX_I64, MAX_I64 - 5000]),
    st.integers(1_700_000_000_000, 1_700_000_100_000),
    st.integers(0, MAX_I64),
)
PUTS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, MAX_I64), TIMES), max_size=24)


def compare_selections(index, model, begin, end, max_num):
    keys = [*KEYS, "never put"]
    expected = [model.select_phy_offset(key, max_num, begin, end) for key in keys]
    assert [index.select_phy_offset(key, max_num, begin, end) for key in keys] == expected
    assert [index.select_hash(oracle.index_hash(key), max_num, begin, end) for key in keys] == expected
    hits, starts = index.select_phy_offsets(keys, max_num, begin, end)
    assert hits.dtype == starts.dtype == np.int64
    assert [hits[starts[i] : starts[i + 1]].tolist() for i in range(len(keys))] == expected


@given(PUTS, st.integers(1, 7), st.integers(1, 22), TIMES, TIMES, st.sampled_from([-1, 0, 1, 2, 64]), st.booleans())
def test_index_equals_the_oracle(puts, slots, entries, begin, end, max_num, rolled):
    model = oracle.IndexOracle(slots, entries)
    if rolled:
        model = oracle.IndexOracle(slots, entries, end_phy_offset=77, end_timestamp=1_700_000_000_000)
        puts = [(key, phy, time) for key, phy, time in puts if time < 2**60]
    start = model.bytes()
    one, many, hashed = (index_of(slots, entries, start) for _ in range(3))
    taken = [model.put_key(*put) for put in puts]
    assert [one.put_key(*put) for put in puts] == taken
    keys, phy_offsets, times = ([put[i] for put in puts] for i in range(3))
    assert many.put_keys(keys, phy_offsets, times) == sum(taken)
    hashes = np.array([oracle.index_hash(key) for key in keys], np.int32)
    columns = np.array(phy_offsets, np.int64), np.array(times, np.int64)
    assert hashed.put_hashes(hashes, *columns) == sum(taken)
    assert content(one.region) == content(many.region) == content(hashed.region) == model.bytes()
    compare_selections(one, model, begin, end, max_num)
    compare_selections(one, model, 0, MAX_I64, 64)
    for key in KEYS:
        newest_first = [
            put[1] for put, good in zip(puts, taken) if good and oracle.index_hash(put[0]) == oracle.index_hash(key)
        ]
        newest_first.reverse()
        for page in (1, 2, 128):
            found, at = [], -1
            while at != 0:
                part, at = one.select_chain(oracle.index_hash(key), at, page)
                assert len(part) <= page
                found += part
            assert found == newest_first


def test_time_difference_wraps_as_in_java():
    # Java: (storeTimestamp - beginTimestamp) as long, / 1000 towards zero, then held between 0 and 2**31 - 1.
    for begin, store, expected in (
        (1, MIN_I64, 2**31 - 1),  # wraps to 2**63 - 1
        (MAX_I64, MIN_I64, 0),  # wraps to 1 ms
        (MAX_I64, MIN_I64 + 998, 0),
        (MAX_I64, MIN_I64 + 999, 1),  # wraps to 1000 ms
        (2**62, -(2**62) - 1, 2**31 - 1),
        (2**62, -(2**62), 0),  # -2**63 exactly
        (5, 4, 0),
        (5, 1004, 0),
        (5, 1005, 1),
        (1, 2**31 * 1000 - 1000, 2**31 - 2),
        (1, 2**31 * 1000, 2**31 - 1),
        (0, 10**12, 0),
        (-1, 10**12, 0),
    ):
        index = index_of(3, 4)
        assert index.put_key("k", 1, begin)
        assert index.put_key("k", 2, store)
        assert index.read_entry(2) == (107, 2, expected, 1), (begin, store)


def test_selection_pages_and_growth():
    # One chain of 3000 entries and 50 keys at once: more than one round on the stack and one answer array hold.
    index = index_of(1, 3001)
    phy = np.arange(3000, dtype=np.int64) * 10
    assert index.put_hashes(np.full(3000, 7, np.int32), phy, phy) == 3000
    newest_first = phy[::-1].tolist()
    key = "\x07"
    for max_num in (1, 127, 128, 129, 256, 2999, 3000, 3001, MAX_I64):
        assert index.select_phy_offset(key, max_num) == newest_first[:max_num]
        hits, starts = index.select_phy_offsets([key, "x", key] * 5, max_num)
        one = min(max_num, 3000)
        assert starts.tolist() == [one * n for n in (0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10)]
        assert hits.tolist() == newest_first[:max_num] * 10
    hits, starts = index.select_phy_offsets([])
    assert (hits.tolist(), starts.tolist()) == ([], [0])
    for bad in (3001, 2**40, MAX_I64):
        with pytest.raises(OffsetOutOfRangeError):
            index.select_chain(7, bad)
    assert index.select_chain(7, 0) == ([], 0)
    assert index.select_chain(-1) == ([], 0)
    assert index.select_hash(-1) == []
    assert len(index.select_chain(7, -1, 0)[0]) == len(index.select_chain(7, -1, 999)[0]) == 128


T0 = 1_700_000_000_000


def test_many_selections_side_by_side_are_those_one_by_one():
    # Chains of very different lengths, so that lanes end at different steps; sizes around the number of lanes.
    rng = np.random.default_rng(5)
    n = 5000
    index = index_of(300, n + 1)
    hashes = (rng.zipf(1.3, n) % 900).astype(np.int32)
    index.put_hashes(hashes, np.arange(n, dtype=np.int64) * 7, T0 + np.arange(n, dtype=np.int64) * 400)
    asked = np.concatenate([rng.integers(-5, 1200, 700), [0, -1, -(2**31), 2**31 - 1]]).astype(np.int32)
    for count in (0, 1, 127, 128, 129, 256, 704):
        for max_num in (-1, 0, 1, 3, 64, 1000, MAX_I64):
            for begin, end in ((0, MAX_I64), (T0 + 500_000, T0 + 900_000), (5, 1)):
                hits, starts = index.select_hashes(asked[:count], max_num, begin, end)
                expected = [index.select_hash(key_hash, max_num, begin, end) for key_hash in asked[:count].tolist()]
                assert hits.tolist() == list(itertools.chain.from_iterable(expected))
                assert starts.tolist() == [0, *itertools.accumulate(map(len, expected))]


def test_a_chain_that_leads_elsewhere_ends_alike_side_by_side():
    # Hostile numbers: heads, previous entries and times that no writer leaves.
    rng = np.random.default_rng(6)
    index = index_of(20, 60)
    wild = np.array([0, 1, -1, 5, 59, 60, 61, 2**31 - 1, -(2**31)], np.int64)
    asked = np.arange(-3, 40, dtype=np.int32)
    for _ in range(200):
        index.write_header(T0, T0, 0, 0, 0, int(rng.choice(wild)))
        numbers = np.where(
            rng.random(20 + 60 * 5) < 0.3, rng.choice(wild, 20 + 60 * 5), rng.integers(0, 60, 20 + 60 * 5)
        )
        index.region.write(40, numbers.astype(">i4").tobytes())
        hits, starts = index.select_hashes(asked, 10)
        expected = [index.select_hash(key_hash, 10) for key_hash in asked.tolist()]
        assert hits.tolist() == list(itertools.chain.from_iterable(expected))
        assert starts.tolist() == [0, *itertools.accumulate(map(len, expected))]


def test_java_hash_at_every_length():
    rng = random.Random(7)
    for length in range(70):
        for alphabet in (range(1, 128), range(256), range(128, 256), (0, 255), range(1, 0x400), (65, 0x1F600)):
            text = "".join(chr(rng.choice(alphabet)) for _ in range(length))
            expected = oracle.java_hash(text)
            assert _core.java_string_hash(text) == expected
            assert _core.java_string_hash_bytes(text.encode()) == expected
            # Whatever lies around the text takes no part.
            wrapped = ("\xff" * 9 + text + "\xff" * 9)[9 : 9 + length]
            assert _core.java_string_hash(wrapped) == expected


def test_kinds_of_key_columns():
    pyarrow = pytest.importorskip("pyarrow")
    keys = [f"T#{i}" for i in range(200)] + ["", "T#订单", "T#\U0001f600", "é" * 9]
    n = len(keys)
    numbers = np.arange(n, dtype=np.int64)
    model = index_of(50, n + 1)
    assert [model.put_key(key, i, i) for i, key in enumerate(keys)] == [True] * n
    whole = pyarrow.array(["cut", *keys, "off"])
    large = pyarrow.array(["cut", *keys, "off"], pyarrow.large_string())
    columns = {
        "list": keys,
        "tuple": tuple(keys),
        "iterator": iter(keys),
        "dict": dict.fromkeys(keys),
        "numpy object": np.array(keys, object),
        "numpy text": np.array(keys),
        "string": pyarrow.array(keys),
        "large_string": pyarrow.array(keys, pyarrow.large_string()),
        "sliced string": whole.slice(1, n),
        "sliced large_string": large.slice(1, n),
        "chunked": pyarrow.chunked_array([whole.slice(1, 10), whole.slice(11, 0), whole.slice(11, n - 10)]),
        "chunked large": pyarrow.chunked_array([large.slice(1, n - 1), large.slice(n, 1)]),
    }
    hits, starts = model.select_phy_offsets(keys)
    for kind, column in columns.items():
        index = index_of(50, n + 1)
        if kind != "iterator":
            assert [part.tolist() for part in model.select_phy_offsets(column)] == [hits.tolist(), starts.tolist()], (
                kind
            )
        assert index.put_keys(column, numbers, numbers) == n, kind
        assert content(index.region) == content(model.region), kind
    empty = index_of(1, 2)
    chunks = pyarrow.chunked_array([], pyarrow.string())
    for none in ([], (), np.array([], object), pyarrow.array([], pyarrow.string()), whole.slice(3, 0), chunks):
        assert empty.put_keys(none, [], []) == 0
        assert [part.tolist() for part in empty.select_phy_offsets(none)] == [[], [0]]
    assert content(empty.region) == bytes(oracle.index_file_size(1, 2))


def test_lists_of_a_subclass_are_lists():
    class Keys(list):
        pass

    index = index_of(5, 10)
    assert index.put_keys(Keys(["a", "b"]), [1, 2], [3, 4]) == 2
    assert index.select_phy_offsets(Keys(["b", "a"]))[0].tolist() == [2, 1]


def test_malformed_utf8_in_arrow_text_hashes_as_java_decodes_it():
    pyarrow = pytest.importorskip("pyarrow")
    bad = [b"\xe8\xae", b"\xed\xa0\x80", b"\xff", b"a\xf0\x9f\x98", b"", b"ok"]
    binary = pyarrow.array(bad, pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(bad), binary.buffers())
    index = index_of(7, 10)
    assert index.put_keys(text, range(6), range(6)) == 6
    assert [index.read_entry(n)[0] for n in range(1, 7)] == [
        oracle.index_hash(oracle.java_decode(data)) for data in bad
    ]


def test_put_many_crosses_chunks_and_stops_where_the_file_is_full():
    # Longer than the piece of 16384 keys that is hashed at a time.
    keys = [f"T#{i % 1000}" for i in range(40_000)]
    numbers = np.arange(40_000, dtype=np.int64)
    model = oracle.IndexOracle(97, 35_001)
    for i, key in enumerate(keys):
        model.put_key(key, i, i)
    index = index_of(97, 35_001)
    assert index.put_keys(keys, numbers, numbers) == 35_000
    assert content(index.region) == model.bytes()
    assert index.put_keys(keys, numbers, numbers) == 0
    assert content(index.region) == model.bytes()


def test_read_entries_are_the_columns_of_read_entry():
    index, _ = filled_index()
    rows = [index.read_entry(n) for n in range(16)]
    for first, count in ((0, 16), (1, 12), (5, 0), (15, 1), (15, 9), (16, 3), (3, 2**40), (3, MAX_I64)):
        hashes, phy_offsets, seconds = index.read_entries(first, count)
        assert (hashes.dtype, phy_offsets.dtype, seconds.dtype) == (np.int32, np.int64, np.int32)
        expected = rows[first : first + count]
        assert list(zip(hashes.tolist(), phy_offsets.tolist(), seconds.tolist())) == [row[:3] for row in expected]
    for first in (17, 2**40, MAX_I64):
        try:
            assert [len(column) for column in index.read_entries(first, 5)] == [0, 0, 0]
        except OffsetOutOfRangeError:
            pass
    for first, count in ((-1, 1), (0, -1), (MIN_I64, MIN_I64)):
        with pytest.raises(OffsetOutOfRangeError):
            index.read_entries(first, count)


def test_index_refuses_bad_input_and_changes_nothing():
    index = index_of(5, 10)
    for call in (
        lambda: index.put_key("k", -1, 0),
        lambda: index.put_hash(-1, 0, 0),
        lambda: index.put_hash(0, -1, 0),
        lambda: index.put_keys(["a", "b"], [1, -1], [0, 0]),
        lambda: index.put_hashes(np.array([1, -1], np.int32), np.ones(2, np.int64), np.ones(2, np.int64)),
        lambda: index.read_slot(5),
        lambda: index.read_slot(-1),
        lambda: index.read_entry(10),
        lambda: index.read_entry(-1),
        lambda: index.relink(0),
        lambda: index.relink(11),
        lambda: index.relink(MAX_I64),
    ):
        with pytest.raises(OffsetOutOfRangeError):
            call()
    for call in (
        lambda: index.put_keys(["a"], [1, 2], [1]),
        lambda: index.put_keys(["a"], [1], []),
        lambda: index.put_keys(["a"], [[1]], [1]),
        lambda: index.put_hashes(np.ones(1, np.int32), np.ones(2, np.int64), np.ones(1, np.int64)),
        lambda: index.put_hashes(np.ones(1, np.int64), np.ones(1, np.int64), np.ones(1, np.int64)),
    ):
        with pytest.raises(ValueError):
            call()
    for call in (
        lambda: index.put_key(b"k", 0, 0),
        lambda: index.put_key(None, 0, 0),
        lambda: index.put_keys([b"a"], [1], [1]),
        lambda: index.put_keys([None], [1], [1]),
        lambda: index.put_keys(np.array([1, 2]), [1, 2], [1, 2]),
        lambda: index.put_keys(["a"], [1.5], [1]),
        lambda: index.put_keys(["a"], ["1"], [1]),
        lambda: index.put_keys(5, [1], [1]),
        lambda: index.put_hash(2**31, 0, 0),
        lambda: index.put_key("k", 2**63, 0),
        lambda: index.put_keys(["a"], [2**63], [1]),
        lambda: index.select_phy_offsets([1]),
    ):
        with pytest.raises((TypeError, OverflowError)):
            call()
    assert content(index.region) == bytes(oracle.index_file_size(5, 10))
    assert index.region.pins == 0


def test_arrow_columns_of_other_kinds_are_refused():
    pyarrow = pytest.importorskip("pyarrow")
    index = index_of(5, 10)
    for column, error in (
        (pyarrow.array(["a", None]), ValueError),
        (pyarrow.array([b"a", b"b"]), TypeError),
        (pyarrow.array([1, 2]), TypeError),
        (pyarrow.array(["a", "b"]).dictionary_encode(), TypeError),
        (pyarrow.chunked_array([["a"], [None]], pyarrow.string()), ValueError),
    ):
        with pytest.raises(error):
            index.select_phy_offsets(column)
        with pytest.raises(error):
            index.put_keys(column, [1, 2], [1, 2])


def test_attach_wants_the_exact_geometry():
    region = sparse(oracle.index_file_size(10, 20))
    for slots, entries in ((10, 19), (10, 21), (11, 20), (0, 22), (-5, 20), (10, 0), (2**31, 20), (2**40, 2**40)):
        with pytest.raises(ValueError):
            IndexRegion().attach(region, slots, entries)
    for slots, entries in ((MAX_I64, 1), (1, MAX_I64), (2**62, 2**62)):
        with pytest.raises(ValueError):
            IndexRegion().attach(region, slots, entries)
    # 15 slots and 19 entries make the same 480 bytes.
    index = IndexRegion()
    index.attach(region, 15, 19)
    assert (index.slot_num, index.index_num, index.region) == (15, 19, region)


def filled_index(slots=5, entries=16, num=12):
    """An index with `num` entries of several records and keys, and the end of its log."""
    index = index_of(slots, entries)
    for i in range(num):
        assert index.put_key(f"T#{i % 7}", 100 * (i // 2), 1_700_000_000_000 + 1500 * i)
    return index, 100 * num


def writes_of_one_put(before: bytes, after: bytes, slots: int, n: int, slot_count_first: bool):
    """The writes of a put of entry `n` in the order of I6, each as (name, position, bytes).

    `slot_count_first` is Java's order of the two counts; the other one must be repairable as well.
    """
    entry = 40 + 4 * slots + 20 * n
    key_hash = struct.unpack_from(">i", after, entry)[0]
    slot = 40 + 4 * (key_hash % slots)
    places = [("entry", entry + at, size) for at, size in ((0, 4), (4, 8), (12, 4), (16, 4))]
    places.append(("slot", slot, 4))
    if n == 1:
        places += [("begin", 16, 8), ("begin", 0, 8)]
    counts = [("hash_slot_count", 32, 4)] if before[32:36] != after[32:36] else []
    counts.insert(len(counts) if slot_count_first else 0, ("count", 36, 4))
    places += [*counts, ("end", 24, 8), ("end", 8, 8)]
    return [(name, pos, after[pos : pos + size]) for name, pos, size in places]


@pytest.mark.parametrize("slot_count_first", [True, False])
@pytest.mark.parametrize("fresh_count", [0, 1])
def test_a_put_cut_short_at_any_step_is_undone_or_completed(fresh_count, slot_count_first):
    slots, entries, num = 3, 14, 12
    index = index_of(slots, entries)
    index.write_header(0, 0, 0, 0, 0, fresh_count)
    end_of_log = 100 * num
    steps = set()
    for n in range(1, num + 1):
        before = content(index.region)
        assert index.put_key(f"T#{n * n % 7}", 100 * (n // 2), 1_700_000_000_000 + 1500 * n)
        after = content(index.region)
        state = bytearray(before)
        counted = False
        for name, pos, data in writes_of_one_put(before, after, slots, n, slot_count_first):
            state[pos : pos + len(data)] = data
            steps.add(name)
            counted = counted or name == "count"
            cut = index_of(slots, entries, bytes(state))
            count = cut.survey(end_of_log)[0]
            assert count == (n + 1 if counted else n)
            cut.relink(count)
            assert cut.check_links(end_of_log) == []
            assert cut.tail_num(100 * (n // 2)) == (
                (1 if counted else 0) + (1 if n % 2 and n > 1 else 0) if n > 1 else int(counted)
            )
            repaired = content(cut.region)
            expected = bytearray(after if counted else before)
            # The begin and end fields are no links: the caller of relink knows the log and writes them by write_header.
            expected[0:32] = state[0:32]
            if name == "hash_slot_count" and not counted:
                # Up to 4.7.0 every put was counted, so one too many is not told from what such a version leaves.
                expected[32:36] = repaired[32:36]
                assert struct.unpack(">i", repaired[32:36])[0] - struct.unpack(">i", before[32:36])[0] in (0, 1)
            assert repaired == bytes(expected), (n, name)
            cut.write_header(*struct.unpack(">qqqqii", after[:40] if counted else before[:40]))
            final = content(cut.region)
            if not counted and n == 1 and fresh_count == 0:
                assert final in (before, before[:36] + b"\0\0\0\1" + before[40:])
            else:
                assert final == (after if counted else before)
        assert bytes(state) == after
    assert steps == {"entry", "slot", "begin", "hash_slot_count", "count", "end"}


def test_a_survey_sees_every_kind_of_broken_entry():
    index, end = filled_index()
    data = content(index.region)
    assert index.survey(end)[0] == 13
    assert index.survey(500)[0] == 11  # entries 11 and 12 are of the record at 500
    assert index.survey(0)[0] == 1
    for n in range(1, 13):
        at = index.entry_pos(n)
        for place, value in (
            (at, struct.pack(">i", -1)),
            (at + 4, struct.pack(">q", -1)),
            (at + 4, struct.pack(">q", end)),
            (at + 12, struct.pack(">i", -1)),
            (at + 16, struct.pack(">i", n)),
            (at + 16, struct.pack(">i", -1)),
        ):
            hurt = index_of(5, 16, data[:place] + value + data[place + len(value) :])
            assert hurt.survey(end)[0] == n
            assert hurt.check_links(end)
    for count in (14, 16, 17, 2**31 - 1):
        hurt = index_of(5, 16, data[:36] + struct.pack(">i", count) + data[40:])
        # The entries after it are zeros: their phy offset 0 is before the last one.
        assert hurt.survey(end)[0] == 13
        assert hurt.relink(13) == 1
        assert content(hurt.region) == data
    for count in (0, -1, -(2**31)):
        assert index_of(5, 16, data[:36] + struct.pack(">i", count) + data[40:]).survey(end)[0] == 1


def test_a_survey_tells_whether_slots_chains_and_counts_are_right():
    index, end = filled_index()
    data = content(index.region)
    assert index.survey(end) == (13, True)
    places = [40 + 4 * slot for slot in range(5)] + [index.entry_pos(n) + 16 for n in range(1, 13)] + [32, 36]
    for place in places:
        stored = struct.unpack(">i", data[place : place + 4])[0]
        for value in {0, 1, stored - 1, stored + 1, 12, 13, -1} - {stored}:
            hurt = index_of(5, 16, data[:place] + struct.pack(">i", value) + data[place + 4 :])
            before = content(hurt.region)
            count, linked = hurt.survey(end)
            assert content(hurt.region) == before
            # Whatever is wrong, `relink` finds something to do just where the survey says so.
            assert (hurt.relink(count) == 0) == linked, (place, value)
            assert not linked or place == 36


def test_relink_equals_an_index_with_the_first_entries_only():
    index, end = filled_index()
    rows = [index.read_entry(n) for n in range(1, 13)]
    for count in range(1, 14):
        cut = index_of(5, 16, content(index.region))
        cut.relink(count)
        shorter = index_of(5, 16)
        for n, (key_hash, phy_offset, _, _) in enumerate(rows[: count - 1]):
            shorter.put_hash(key_hash, phy_offset, 1_700_000_000_000 + 1500 * n)
        expected, found = content(shorter.region), content(cut.region)
        assert found[40:] == expected[40:]
        assert cut.check_links(end) == []
        assert max(cut.read_header()[5], 1) == count
        # Slots used, or as up to 4.7.0 the entries: not above the one, not below the other.
        assert shorter.read_header()[4] <= cut.read_header()[4] <= max(count - 1, 0)
        assert cut.relink(count) == 0
        assert content(cut.region) == found


def test_relink_repairs_slots_and_chains():
    index, end = filled_index()
    data = content(index.region)
    rng = random.Random(3)
    for _ in range(200):
        hurt = bytearray(data)
        places = rng.sample([40 + 4 * i for i in range(5)] + [index.entry_pos(n) + 16 for n in range(1, 13)], 4)
        for place in places:
            hurt[place : place + 4] = struct.pack(">i", rng.choice([0, -1, 1, 5, 12, 13, 99, 2**31 - 1]))
        changed = sum(hurt[place : place + 4] != data[place : place + 4] for place in places)
        found = index_of(5, 16, bytes(hurt))
        wrong = found.check_links(end)
        assert len(wrong) == changed
        assert {pos for pos, _ in wrong} == {
            place for place in places if hurt[place : place + 4] != data[place : place + 4]
        }
        assert found.relink(13) == changed
        assert content(found.region) == data


def test_agreeing_entries_sees_every_difference():
    begin, times = 1_700_000_000_000, [0, 999, 1000, 5500, 5400]
    keys = ["a b", None, "c", "d e f", "g"]
    columns = columns_of(
        [
            dict(topic="T", store_timestamp=begin + time, properties=[("KEYS", text)] if text else [])
            for time, text in zip(times, keys)
        ],
        capacity=9,
    )
    index = index_of(5, 12)
    total = int(columns.key_start[5])
    for _ in range(2):
        assert index.put_hashes(columns.key_hash[:total], *columns.key_records(0, total)) in (7, 4)
    assert total == 7
    data = content(index.region)
    assert _dispatch.agreeing_entries(index, 1, columns, 0) == 7
    assert _dispatch.agreeing_entries(index, 3, columns, 2) == 5
    # Up to the last entry.
    assert _dispatch.agreeing_entries(index, 8, columns, 0) == 4
    assert (
        _dispatch.agreeing_entries(index, 12, columns, 0) == _dispatch.agreeing_entries(index, MAX_I64, columns, 0) == 0
    )
    assert _dispatch.agreeing_entries(index, 1, columns, 7) == 0
    assert _dispatch.agreeing_entries(index, 2, columns, 0) == 0
    first = 40 + 4 * 5 + 20
    for pos in range(first, first + 20 * 7):
        hurt = index_of(5, 12, data[:pos] + bytes([data[pos] ^ 1]) + data[pos + 1 :])
        entry, at = divmod(pos - first, 20)
        # The entry before in the chain is no matter of the record, and the first time counts from the file before.
        seen = at < 12 or (12 <= at < 16 and entry > 0)
        assert _dispatch.agreeing_entries(hurt, 1, columns, 0) == (entry if seen else 7)
    for first, start in ((0, 0), (-1, 0), (1, -1), (1, 8), (1, MAX_I64), (MIN_I64, 0)):
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.agreeing_entries(index, first, columns, start)
    # Counts in columns are not trusted.
    for count in (-1, 10, MAX_I64):
        columns.count = count
        with pytest.raises(OffsetOutOfRangeError):
            _dispatch.agreeing_entries(index, 1, columns, 0)
    columns.count = 5
    for wrong in (MIN_I64, -1, 3, 99, MAX_I64):
        kept, columns.key_start[2] = int(columns.key_start[2]), wrong
        assert 0 <= _dispatch.agreeing_entries(index, 1, columns, 0) <= 11
        columns.key_start[2] = kept
    columns.key_start[5] = MAX_I64
    with pytest.raises(OffsetOutOfRangeError):
        _dispatch.agreeing_entries(index, 1, columns, 0)
    assert index.region.pins == 0


@given(st.binary(max_size=40), st.integers(0, 40))
def test_size_without_the_zeros_at_the_end(data, zeros):
    for kind in (bytes, bytearray, memoryview):
        assert _core.nonzero_size(kind(data + bytes(zeros))) == len(data.rstrip(b"\0"))


@given(st.lists(st.sampled_from([b"{", b",", b":", b"-", b"0", b"17", b" ", b"\n", b'"', b"x", b"\xff"]), max_size=40))
def test_names_that_are_numbers_are_quoted(parts):
    text = b"".join(parts)
    expected = re.sub(rb"([{,])[ \t\r\n]*(-?[0-9]+)[ \t\r\n]*:", rb'\1"\2":', text)
    assert _core.quoted_numbers(text) == expected


def test_ends_of_units():
    def units(*places: tuple[int, int]) -> bytes:
        return b"".join(struct.pack(">qiq", phy_offset, size, 7) for phy_offset, size in places)

    fill = (0, _core.PRE_FILL_SIZE)
    assert _core.unit_ends(b"", 100) is None
    assert _core.unit_ends(units((0, 5)), 100) == (5, 5)
    assert _core.unit_ends(units((100, 5), (3, 9)), 100) == (12, 105)
    assert _core.unit_ends(units(fill, (3, 9), fill), 100) == (-1, 12)
    assert _core.unit_ends(units(fill), 100) == (-1, -1)
    for bad in ((101, 5), (-1, 5), (5, 0), (5, -1), (MAX_I64, 5), (0, 0)):
        for place in range(3):
            places = [(1, 1), (2, 2), (3, 3)]
            places[place] = bad
            assert _core.unit_ends(units(*places), 100) is None


def test_check_links_names_places_and_ends_a_long_list():
    index = index_of(2000, 3000)
    assert (
        index.put_hashes(np.arange(2500, dtype=np.int32), np.arange(2500, dtype=np.int64), np.zeros(2500, np.int64))
        == 2500
    )
    assert index.check_links(2500) == []
    index.region.zero(40, 8000)
    wrong = index.check_links(2500)
    assert len(wrong) == 1001
    assert wrong[0] == (40, "slot 0 holds 0, the entries need 2001")
    assert "1000 more" in wrong[-1][1]
    index.region.write(36, struct.pack(">i", -7))
    assert any(pos == 36 and "-7" in text for pos, text in index.check_links(2500))
    index.region.write(36, struct.pack(">i", 3001))
    assert any(pos == 36 and "3001" in text for pos, text in index.check_links(2500))


def test_check_links_accepts_both_meanings_of_the_slot_count():
    index, end = filled_index(slots=5, num=12)
    used = sum(index.read_slot(slot) > 0 for slot in range(5))
    assert 1 < used < 12
    for count in range(-1, 15):
        index.region.write(32, struct.pack(">i", count))
        assert [pos for pos, _ in index.check_links(end)] == ([] if used <= count <= 12 else [32]), count
    index.relink(13)
    assert index.read_header()[4] == used


def test_tail_num():
    index = index_of(5, 16)
    assert index.tail_num(0) == 0
    for n, phy_offset in enumerate((0, 0, 7, 7, 7, 0)):
        index.put_hash(n, phy_offset, 0)
        tail = [entry for entry in (0, 0, 7, 7, 7, 0)[: n + 1]]
        for wanted in (0, 7, 8):
            run = 0
            while run <= n and tail[n - run] == wanted:
                run += 1
            assert index.tail_num(wanted) == run
    index.region.write(36, struct.pack(">i", 2**31 - 1))
    assert index.tail_num(0) == 10  # entries 7 to 15 are zeros, entry 6 is of offset 0 too
    index.region.write(36, struct.pack(">i", 0))
    assert index.tail_num(0) == 0


def test_chains_with_cycles_end():
    index, _ = filled_index(slots=1)
    data = content(index.region)
    for n in range(1, 13):
        for prev in range(n, 17):
            at = index.entry_pos(n) + 16
            hurt = index_of(1, 16, data[:at] + struct.pack(">i", prev) + data[at + 4 :])
            for key in range(7):
                found = hurt.select_phy_offset(f"T#{key}", MAX_I64)
                assert len(found) <= 12
                assert hurt.select_phy_offsets([f"T#{key}"], MAX_I64)[0].tolist() == found
                assert hurt.select_chain(oracle.index_hash(f"T#{key}"))[1] == 0


# ---------------------------------------------------------------------------------------------------------------
# Hostile bytes: every flipped bit and every truncation


def use_segment(region: Region, columns: RecordColumns):
    """Everything that reads a segment, on whatever bytes; the results that the caller may compare."""
    size = region.size
    scanned = _dispatch.scan(region, 0, size, 0, columns, NO_DELAYS)
    walked = _dispatch.walk(region, 0, size, 0, True)
    assert walked[:2] == scanned if scanned[1] != Verdict.COLUMNS_FULL else True
    plain = _dispatch.walk(region, 0, size, 0)
    assert plain[0] >= walked[0]
    return scanned, walked, plain


def test_every_bit_flip_of_a_segment(golden_store):
    (base_offset, data), *_ = commit_log_of(golden_store("propcrc")).items()
    found = list(oracle.walk_commit_log({base_offset: data}))
    assert base_offset == 0 and isinstance(found[-1], oracle.Blank)
    records = found[:-1]
    starts = [record.phy_offset for record in found]
    owner = np.searchsorted(starts, np.arange(len(data)), side="right") - 1
    region = mapped(data)
    columns = RecordColumns(64)
    end = found[-1].phy_offset
    caught = 0
    assert _dispatch.scan(region, 0, len(data), 0, columns, NO_DELAYS) == (end, Verdict.BLANK)
    sound_offsets = columns.phy_offset[: len(records)].copy()
    sound_hashes = columns.key_hash.copy()
    for pos in range(len(data)):
        at = owner[pos]
        start = starts[at]
        for bit in range(8):
            region.write(pos, bytes([data[pos] ^ (1 << bit)]))
            (ended, verdict), walked, _ = use_segment(region, columns)
            if at == len(records):
                # A blank must fill its segment exactly; after its head nothing matters.
                expected = Verdict.BAD_SIZE if pos < end + 4 else Verdict.BAD_MAGIC if pos < end + 8 else Verdict.BLANK
                assert (ended, verdict) == (end, expected)
            elif pos >= records[at].end - 20 and verdict == Verdict.BLANK:
                # A tail that does not look like one any more is no property CRC, so only the body's is left.
                digits = range(records[at].end - 11, records[at].end - 1)
                assert pos not in digits or not bytes([data[pos] ^ (1 << bit)]).isdigit()
                assert ended == end
                region.write(pos, data[pos : pos + 1])
                continue
            else:
                # Records with a property CRC: no flipped bit gets through, and earlier records are untouched.
                assert ended == start
                # A size of which only one bit was set becomes 0: the place reads as one that is still being written.
                assert verdict < 0 or (verdict == Verdict.EMPTY and region.get_i32(start) == 0), (pos, bit, verdict)
                assert walked[2] == columns.count == at
                caught += 1
            assert np.array_equal(columns.phy_offset[: columns.count], sound_offsets[: columns.count])
            keys = columns.key_start[columns.count]
            assert np.array_equal(columns.key_hash[:keys], sound_hashes[:keys])
            answer = _core.decode_record(region, start)
            assert isinstance(answer, (tuple, Verdict))
            assert at == len(records) or not isinstance(answer, tuple) or not answer[17] or answer[6] != start
            verdict, _, _ = _core.check_record(region, start, 0, False)
            assert verdict <= Verdict.BLANK
            if bit == 0:
                following = starts[at + 1] if at + 1 < len(records) else -1
                assert _core.find_record(region, start, 0) == (following if at < len(records) else -1)
        region.write(pos, data[pos : pos + 1])
    # All but those in the 20-byte tails of the records, most of which are caught as well.
    assert caught > 8 * (end - 20 * len(records))
    assert content(region) == data
    assert region.pins == 0


def test_every_truncation_of_a_segment(golden_store):
    (_, data), *_ = commit_log_of(golden_store("base")).items()
    records = [each for each in oracle.walk_commit_log(data) if isinstance(each, oracle.Record)]
    ends = [record.end for record in records]
    columns = RecordColumns(64)
    for size in range(1, len(data)):
        region = mapped(data[:size], False)
        (ended, verdict), _, _ = use_segment(region, columns)
        whole = sum(end <= size for end in ends)
        assert (columns.count, ended) == (whole, ends[whole - 1] if whole else 0)
        left = size - ended
        # The blank at the end does not fill what is left either.
        assert verdict == (Verdict.LIMIT if not left else Verdict.EMPTY if left < 8 else Verdict.BAD_SIZE)
        assert isinstance(_core.decode_record(region, ended), Verdict)
        assert _core.find_record(region, ended, 0) == -1
        region.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_of_a_segment(seed, golden_store):
    data = commit_log_of(golden_store("base"))[0]
    rng = random.Random(seed)
    columns = RecordColumns(64)
    starts = [each.phy_offset for each in oracle.walk_commit_log(data)]
    for _ in range(100):
        hurt = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            # Mostly where lengths are: values at the edges of what a check could miss.
            at = rng.choice(starts) + rng.choice([0, 4, 36, 84, 88, rng.randrange(200)])
            value = rng.choice(
                [0, 1, -1, 90, 91, 92, 2**31 - 1, -(2**31), 2**31 - 100, rng.getrandbits(31), 4096 - at % 4096]
            )
            hurt[at : at + 4] = struct.pack(">i", value)
        region = mapped(bytes(hurt[: len(data)]))
        use_segment(region, columns)
        for start in starts:
            assert isinstance(_core.decode_record(region, start), (tuple, Verdict))
            _core.find_record(region, start, 0)


def use_index(index: IndexRegion, keys: list[str], end: int):
    """Everything that reads an index, on whatever bytes, and a repair with what must hold after it."""
    for key in keys:
        found = index.select_phy_offset(key, 1000)
        assert len(found) < index.index_num
        h = oracle.index_hash(key)
        page, at = index.select_chain(h)
        assert len(page) < index.index_num and at == 0
    hits, starts = index.select_phy_offsets(keys, 1000, 1, MAX_I64 - 1)
    assert starts[-1] == len(hits)
    index.tail_num(0)
    index.read_header()
    wrong = index.check_links(end)
    count = index.survey(end)[0]
    assert 1 <= count <= index.index_num
    changed = index.relink(count)
    assert index.check_links(end) == []
    assert index.survey(end)[0] == count
    assert index.relink(count) == 0
    return wrong, count, changed


def test_every_bit_flip_of_an_index_file(golden_store):
    files = oracle.read_files(golden_store("base"))
    data = oracle.index_files(files)[0]
    end = max(oracle.segments(files)) + 4096
    keys = ["TopicTest#k1", "TopicTest#k2", "TopicTest#订单", "T#k1", "none"]
    region = mapped(data)
    index = IndexRegion()
    index.attach(region, 10, 20)
    wrong, count, changed = use_index(index, keys, end)
    assert (wrong, count, changed) == ([], 20, 0)
    seen = 0
    for pos in range(len(data)):
        for bit in range(8):
            region.write(pos, bytes([data[pos] ^ (1 << bit)]))
            wrong, count, changed = use_index(index, keys, end)
            if 40 <= pos < 80:
                # A slot: seen, and put right.
                assert ([at for at, _ in wrong], count, changed) == ([pos & ~3], 20, 1)
                assert content(region) == data
            elif 36 <= pos < 40:
                flipped = struct.unpack(">i", data[36:pos] + bytes([data[pos] ^ (1 << bit)]) + data[pos + 1 : 40])[0]
                assert wrong and count == (1 if flipped < 1 else min(flipped, 20))
            elif pos >= 100 and (pos - 80) % 20 >= 16:
                assert wrong, (pos, bit)
            elif pos < 32 or 80 <= pos < 100:
                # Begin and end fields and the unused entry 0 are no links.
                assert (wrong, count, changed) == ([], 20, 0)
            seen += bool(wrong)
            region.write(0, data)
    assert seen > 1000


def test_every_truncation_of_an_index_file(golden_store):
    data = oracle.index_files(oracle.read_files(golden_store("base")))[0]
    keys = ["TopicTest#k1", "none"]
    for size in range(1, len(data)):
        region = mapped(data[:size])
        with pytest.raises(ValueError):
            IndexRegion().attach(region, 10, 20)
        # With the geometry that the shorter file would have, its bytes are just hostile ones.
        for slots in (1, 5, 10):
            entries, rest = divmod(size - 40 - 4 * slots, 20)
            if rest or entries < 1:
                continue
            index = IndexRegion()
            index.attach(mapped(data[:size]), slots, entries)
            use_index(index, keys, 10**9)
        region.close()


@pytest.mark.parametrize("seed", range(10))
def test_random_bytes_as_an_index_file(seed):
    rng = random.Random(seed)
    keys = [f"T#{i}" for i in range(6)]
    hashes = [oracle.index_hash(key) for key in keys]
    for _ in range(100):
        slots, entries = rng.randint(1, 6), rng.randint(1, 12)
        numbers = [0, 1, -1, entries - 1, entries, entries + 1, 2**31 - 1, -(2**31), rng.randint(0, entries)]
        data = b"".join(
            [
                rng.randbytes(32),
                struct.pack(">ii", rng.choice(numbers), rng.choice(numbers)),
                b"".join(struct.pack(">i", rng.choice(numbers)) for _ in range(slots)),
                *(
                    struct.pack(
                        ">iqii",
                        rng.choice([*hashes, -5]),
                        rng.choice([0, 5, 9, -1, MAX_I64]),
                        rng.choice(numbers),
                        rng.choice(numbers),
                    )
                    for _ in range(entries)
                ),
            ]
        )
        index = index_of(slots, entries, data)
        model = oracle.IndexOracle(slots, entries, data)
        for key in keys:
            try:
                expected = model.select_phy_offset(key, 1000)
            except oracle.EndlessWalk:
                continue
            found = index.select_phy_offset(key, 1000)
            # Where Java goes up a chain, the core ends it: what it gives is the beginning of Java's answer.
            assert found == expected[: len(found)]
        # A put into hostile bytes changes nothing outside the file and ends.
        copy = index_of(slots, entries, data)
        try:
            expected_put = model.put_key("T#1", 3, 4)
        except struct.error:
            expected_put = None
        if expected_put is not None and -1 < struct.unpack_from(">i", data, 36)[0] < entries:
            assert copy.put_key("T#1", 3, 4) == expected_put
        use_index(index, keys, 10)


# ---------------------------------------------------------------------------------------------------------------
# Sizes above 32 bits


def test_record_at_the_end_of_a_full_size_segment():
    size, base_offset = 2**30, 2**41 + 2**30
    region = sparse(size)
    row = encode_row(topic="Topic", body=b"body", properties=[("KEYS", "far")], queue_offset=2**40, store_timestamp=7)
    total = record_size(5, 4, 9)
    pos = size - 2 * total - 8
    assert encode_records(region, pos, base_offset, [row, row, row]) == [total, total]
    expected = oracle.encode_record(
        topic="Topic",
        body=b"body",
        properties=[("KEYS", "far")],
        queue_offset=2**40,
        store_timestamp=7,
        phy_offset=base_offset + pos,
    )
    assert region.read(pos, total) == expected
    _core.write_blank(region, size - 8)
    assert decoded(region, pos + total)["phy_offset"] == base_offset + pos + total
    assert _core.check_record(region, pos, base_offset) == (Verdict.RECORD, total, 7)
    assert _dispatch.walk(region, pos, size, base_offset, True) == (size - 8, Verdict.BLANK, 2, pos + total)
    columns = RecordColumns(10)
    assert _dispatch.scan(region, pos, size, base_offset, columns, NO_DELAYS) == (size - 8, Verdict.BLANK)
    assert columns.phy_offset[:2].tolist() == [base_offset + pos, base_offset + pos + total]
    assert columns.key_hash[0] == oracle.index_hash("Topic#far")
    assert _core.find_record(region, pos - 5000, base_offset) == pos
    assert region.last_nonzero(0, size) == size


def test_index_of_the_default_geometry(vectors):
    slots, entries = 5_000_000, 20_000_000
    index = index_of(slots, entries)
    rows = vectors["T1"]
    first = entries - len(rows) - 1
    index.write_header(1000, 2000, 1, 2, 5, first)
    assert index.entry_pos(first) > 400_000_000
    heads: dict[int, int] = {}
    for i, row in enumerate(rows):
        assert index.put_key(row["string"], 2**45 + i, 5000 + 1000 * i)
        n, slot = first + i, row["slot_of_5000000"]
        assert index.read_slot(slot) == n
        assert index.region.get_i32(40 + 4 * slot) == n
        expected = struct.pack(">iqii", row["index_hash"], 2**45 + i, 4 + i, heads.get(slot, 0))
        assert index.region.read(40 + 4 * slots + 20 * n, 20) == expected
        heads[slot] = n
    assert index.put_key("one too many", 2**46, 0) is True
    assert index.put_key("one too many", 2**46, 0) is False
    assert index.read_header() == (1000, 0, 1, 2**46, 5 + len(heads) + 1, entries)
    for row in rows:
        expected = [2**45 + i for i, other in enumerate(rows) if other["index_hash"] == row["index_hash"]][::-1]
        assert index.select_phy_offset(row["string"]) == expected
        assert index.select_chain(row["index_hash"]) == (expected, 0)
    hits, starts = index.select_phy_offsets([row["string"] for row in rows])
    assert starts[-1] == len(hits) > len(rows)
    assert index.tail_num(2**46) == 1


def test_index_of_the_largest_geometry():
    # 2**31 - 1 slots and entries: 51.5 GB of nothing on the disk.
    slots = entries = 2**31 - 1
    index = index_of(slots, entries)
    index.write_header(0, 0, 0, 0, 0, entries - 2)
    assert index.put_hash(2**31 - 2, 11, 5)
    assert index.put_hash(2**31 - 1, 12, 6)  # slot 0
    assert not index.put_hash(3, 13, 7)
    assert index.read_slot(slots - 1) == entries - 2
    assert index.read_slot(0) == entries - 1
    assert index.read_entry(entries - 1) == (2**31 - 1, 12, 0, 0)
    assert index.region.read(index.region.size - 20, 20) == struct.pack(">iqii", 2**31 - 1, 12, 0, 0)
    assert index.read_header()[4:] == (2, entries)
    assert index.select_hash(2**31 - 1) == [12]
    assert index.select_hash(2**31 - 2) == [11]
    assert index.tail_num(12) == 1


@given(st.integers(1, 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_slot_of_a_hash_is_the_remainder(slots, hashes):
    # The remainder is computed by two multiplications; a file with this number of slots is sparse.
    index = index_of(slots, 8)
    hashes += [slots - 1, slots & 0x7FFFFFFF]
    for n, key_hash in enumerate(hashes, 1):
        assert index.put_hash(key_hash, n, 0)
        assert index.read_slot(key_hash % slots) == n


# ---------------------------------------------------------------------------------------------------------------
# Misuse that must not reach memory: each in a process of its own, as a failure is a crash

PRELUDE = """
import array, gc, sys, tempfile
import numpy as np
import rmqstore.message
from rmqstore import _columns, _core, _dispatch, _rows
from rmqstore.message import _read
from rmqstore.errors import StoreError
def region(size=4096):
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return _core.Region.map(file.fileno(), size, True)
row = (b"T", b"b", b"", bytes(8), bytes(8), 0, 0, 0, 0, 1, 0, 0, 0, 0)
def encode(target, rows, first=0):
    batch = _rows.RowBatch(_dispatch.TopicTable(), bytes(8), {}, 0)
    batch.take_prepared(rows)
    end, _ = batch.encode(target, 0, 0, first)
    return batch.columns()[3][first:end].tolist()
def refused(call, *arguments):
    try:
        call(*arguments)
    except (StoreError, ValueError, TypeError, OverflowError):
        return
    sys.exit(f"{call.__name__}{arguments} was not refused")
"""
MISUSE = {
    "a view in a reference cycle": """
for _ in range(50):
    cycle = [region().view(0, 8)]
    cycle.append(cycle)
    del cycle
    gc.collect()
""",
    "an object of a view's subclass in a reference cycle": """
class View(_core.RegionView):
    pass
view = View(region(), 0, 8)
view.itself = view
del view
gc.collect()
""",
    "an attached index in a reference cycle": """
class Index(_core.IndexRegion):
    pass
for _ in range(50):
    index = Index()
    index.attach(region(480), 10, 20)
    index.itself = [index, index.region.view(0, 40)]
    del index
    gc.collect()
""",
    "columns that were never initialised": """
class Columns(_dispatch.RecordColumns):
    def __init__(self):
        pass
for columns in (_dispatch.RecordColumns.__new__(_dispatch.RecordColumns), Columns()):
    try:
        _dispatch.scan(region(), 0, 4096, 0, columns, np.zeros(0, np.int64))
    except (StoreError, ValueError, TypeError):
        pass
""",
    "unit numbers whose positions overflow": """
refused(_core.unit_at_or_after, region(), 0, 922337203685477581, 5)
refused(_core.unit_at_or_after, region(), 0, 2**62, 5, 4)
refused(_core.unit_at_or_after, region(), 2**62, 2**63 - 1, 5)
refused(_core.written_unit, region(), 0, 922337203685477581)
refused(_core.written_unit, region(), 922337203685477580, 0)
refused(_core.written_unit, region(), 2**63 - 1, -1, 46)
refused(_core.written_unit, region(), 2**63 - 1, 2**63 - 1)
""",
    "unit sizes that no file has": """
for size in (0, 1, 7, -20, 2**62, -2**63):
    refused(_core.count_units, region(), size)
    refused(_core.unit_at_or_after, region(), 0, 4096, 5, size)
    refused(_core.written_unit, region(), 0, 4096, size)
""",
    "a first row below zero": """
refused(encode, region(), [row], -1)
refused(encode, region(), [row], -2**63)
""",
    "rows that are no tuples of fourteen": """
for bad in (list(row), row[:3], row + (0,), None, (), 5, "fourteen chars"):
    refused(encode, region(), [bad])
""",
    "None in place of bytes": """
for place in range(5):
    refused(encode, region(), [row[:place] + (None,) + row[place + 1:]])
refused(_core.write_ext_unit, region(), 0, 1, 1, None)
refused(region().write, 0, None)
""",
    "rows that go away while they are read": """
kept = []
class Number(int):
    def __index__(self):
        rows.clear()
        gc.collect()
        kept.extend(bytes([255]) * 5000 for _ in range(50))
        return 0
rows = [(b"T", bytes([65 + i]) * 5000) + row[2:] for i in range(10)]
class Sys:
    def __and__(self, other):
        return Number().__index__()
rows.append(row[:7] + (Sys(),) + row[8:])
target = region(1 << 20)
sizes = encode(target, rows)
pos = 0
for i, size in enumerate(sizes[:10]):
    assert _core.decode_record(target, pos)[14] == bytes([65 + i]) * 5000, i
    pos += size
""",
    "None in place of objects": """
index = _core.IndexRegion()
for call, arguments in (
    (index.attach, (None, 1, 1)), (_dispatch.scan, (None, 0, 0, 0, _dispatch.RecordColumns(1), np.zeros(0, np.int64))),
    (_dispatch.scan, (region(), 0, 0, 0, None, np.zeros(0, np.int64))),
    (_dispatch.scan, (region(), 0, 0, 0, _dispatch.RecordColumns(1), None)),
    (encode, (region(), None)), (_core.RegionView, (None, 0, 0)),
    (_core.write_units, (region(), 0, None, None, None)), (index.put_hashes, (None, None, None)),
    (_dispatch.walk, (None, 0, 0, 0)), (_core.decode_record, (None, 0)), (_core.check_record, (None, 0, 0)),
    (_core.find_record, (None, 0, 0)), (_core.write_blank, (None, 0)), (_core.read_unit, (None, 0)),
    (_core.read_units, (None, 0, 1)), (_core.count_units, (None,)), (_core.read_batch_unit, (None, 0)),
    (_dispatch.agreeing_units, (None, 0, _dispatch.RecordColumns(1), np.zeros(1, np.int64), 0)),
    (_dispatch.agreeing_ext_units, (None, 0, np.zeros(1, np.int64))), (_dispatch.agreeing_ext_units, (region(), 0, None)),
    (_dispatch.agreeing_units, (region(), 0, None, np.zeros(1, np.int64), 0)),
    (_dispatch.agreeing_units, (region(), 0, _dispatch.RecordColumns(1), None, 0)),
    (_dispatch.RecordColumns(1).by_queue, (None,)), (_dispatch.RecordColumns(1).run_length, (None,)),
    (_core.read_ext_unit, (None, 0)), (_core.unit_at_or_after, (None, 0, 0, 0)), (region().advise, (None,)),
    (_core.written_unit, (None, 0, 1)),
):
    refused(call, *arguments)
""",
    "copies and pickles": """
import copy, pickle
index = _core.IndexRegion()
index.attach(region(480), 10, 20)
for thing in (region(), region().view(0, 4).obj, index, _dispatch.TopicTable()):
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        refused(call, thing)
""",
}


# One fresh interpreter for all cases, which forks for each: a crash is the end of that child alone.
MISUSE_SERVER = """
import os, sys, traceback
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            names = dict(globals())
            exec(compile(bytes.fromhex(line).decode(), "<misuse>", "exec"), names)
            # Remaining objects are freed too, like at the end of an interpreter.
            names.clear()
            gc.collect()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    print("exit status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def misuse(tmp_path_factory):
    """A function that runs a program in a child; (exit status, what it wrote to its error output)."""
    written = tmp_path_factory.mktemp("misuse") / "errors"
    with (
        open(written, "w+b") as errors,
        # It imports what this process imports: a debug build lies elsewhere than the working directory.
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", PRELUDE + MISUSE_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as server,
    ):

        def run(program: str) -> tuple[int, str]:
            before = written.stat().st_size
            server.stdin.write(program.encode().hex() + "\n")
            server.stdin.flush()
            answer = ""
            while not answer.startswith("exit status "):
                answer = server.stdout.readline()
                assert answer, written.read_text()[-2000:]
            return int(answer.split()[-1]), written.read_text()[before:][-2000:]

        yield run
        server.stdin.close()
        assert server.wait(timeout=240) == 0


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_and_never_crashes(misuse, name):
    status, errors = misuse(MISUSE[name])
    assert status == 0, f"exit status {status}\n{errors}"


def test_a_misuse_that_is_not_refused_would_be_seen(misuse):
    assert misuse("os.abort()")[0] == -signal.SIGABRT
    status, errors = misuse("refused(len, [])")
    assert status == 1
    assert "was not refused" in errors
    assert misuse("pass")[0] == 0


# ---------------------------------------------------------------------------------------------------------------
# Closed and read-only, through every function


def key_query(indexes, interval=math.inf):
    log = _core.FileStream()
    log.file_offsets, log.wrote_where = [], 0
    files = _core.OpenedIndexes()
    files.opened_files = tuple(indexes)
    return _read.KeyQuery(files, lambda phy_offset: None, 1, log, interval)


def key_texts():
    offsets = np.array([0, 1], np.int32)
    return _columns.KeyTexts(offsets, np.frombuffer(b"k", np.uint8), offsets, np.frombuffer(b"T", np.uint8))


def row_batch():
    batch = _rows.RowBatch(_dispatch.TopicTable(), b"\x7f\0\0\1\0\0\x2a\x9f", {}, 100)
    batch.topics.add_queue(batch.topics.add(b"T"), 0)
    assert batch.take_messages([fields_of({}, body=b"")], 0, 0, _core.MessageFields) == (1, 0)
    batch.number({0: 0}, 0, NO_DELAYS)
    return batch


def fields_of(properties: dict[str, str], **given) -> _core.MessageFields:
    """A message whose other fields are the plainest."""
    message = _core.MessageFields()
    message.topic, message.body, message.properties = "T", b"body", properties
    message.flag = message.sys_flag = message.reconsume_times = message.prepared_transaction_offset = 0
    for name, value in given.items():
        setattr(message, name, value)
    return message


ROWS = [
    fields_of({}),
    fields_of({"KEYS": "a bc  d ", "TAGS": "paid", "UNIQ_KEY": "0A"}),
    fields_of({"UNIQ_KEY": "", "TAGS": "", "x": "y"}, topic="Other", sys_flag=0x101),
    fields_of({"TAGS": "t" * 40, "KEYS": "k" * 200, "a": "b"}, born_host="10.0.0.1:1"),
    fields_of({"KEYS": "ключ 鍵 𝒌", "трасса": "x\x03", "TAGS": "тег"}),
    # It ends as a property CRC would, and a wrong one.
    fields_of({"KEYS": "k", "a__CRC32#": "0123456789"}),
    fields_of({"keys": "a", "Tags": "b", "uniq_key": "c", "KEYS ": "d"}, topic="Other"),
    fields_of({"KEYS": " ".join(f"key{i}" for i in range(90))}),
    fields_of({"UNIQ_KEY": "0A0B", "KEYS": " a"}),
]


@pytest.mark.parametrize("capacity", [1, 4, 100])
@pytest.mark.parametrize(("prop_crc", "index_tags"), [(False, True), (True, False)])
def test_columns_of_rows_are_those_of_a_scan_of_their_records(capacity, prop_crc, index_tags):
    region, topics = sparse(1 << 16), TopicTable()
    batch = _rows.RowBatch(topics, b"\x7f\0\0\1\0\0\x2a\x9f", {"10.0.0.1:1": bytes(8)}, 100, 255, prop_crc)
    queue_ids = [i % 2 for i in range(len(ROWS))]
    for topic, queue_id in itertools.product((b"T", b"Other"), (0, 1)):
        topics.add_queue(topics.add(topic), queue_id)
    assert batch.take_messages(ROWS, queue_ids, 0, _core.MessageFields) == (len(ROWS), 0)
    batch.number({number: 10 * number for number, _ in batch.queues()}, 77, NO_DELAYS)
    rows, scanned = RecordColumns(capacity, topics), RecordColumns(capacity, topics)
    with pytest.raises(ValueError, match="of which 0 are encoded"):
        batch.fill_columns(rows, 0)
    assert batch.encode(region, 100, 5000, 0)[0] == len(ROWS)
    done, pos = 0, 100
    while done < len(ROWS):
        first, done = done, batch.fill_columns(rows, done, index_tags)
        pos, _ = _dispatch.scan(region, pos, region.size, 5000, scanned, NO_DELAYS, 0, index_tags)
        assert rows.count == scanned.count == done - first == min(capacity, len(ROWS) - first)
        for name in (
            "phy_offset size queue_id queue_offset sys_flag store_timestamp tags_code topic queue inner_base inner_num "
            "multi_dispatch prop_crc"
        ).split():
            assert getattr(rows, name)[: rows.count].tolist() == getattr(scanned, name)[: rows.count].tolist(), name
        starts = rows.key_start[: rows.count + 1].tolist()
        assert starts == scanned.key_start[: rows.count + 1].tolist()
        assert rows.key_hash[: starts[-1]].tolist() == scanned.key_hash[: starts[-1]].tolist()
    assert batch.fill_columns(rows, done) == done and rows.count == 0
    for first in (-1, done + 1):
        with pytest.raises(ValueError, match=f"row {first} of {done}"):
            batch.fill_columns(rows, first)
    with pytest.raises(ValueError, match="another table"):
        batch.fill_columns(RecordColumns(1), 0)
    batch.clear()
    assert batch.fill_columns(rows, 0) == 0


@pytest.mark.parametrize("separator", ["\x01", "\x02"])
def test_a_separator_is_found_at_every_place_of_every_length(separator):
    batch = row_batch()
    for length in [*range(1, 27), 63, 64, 65, 66, 200]:
        for at in range(length):
            # Bytes that differ in one bit from a separator do not separate.
            plain = ("\x00\x03\x81\x82\x11!"[at % 6] if at % 2 else "x") * length
            text = plain[:at] + separator + plain[at + 1 :]
            for properties in ({plain: plain}, {"KEYS": plain + "x"}):
                assert batch.take_messages([fields_of(properties)], 0, 0, _core.MessageFields) == (1, 0)
            for properties in ({text: "x"}, {"x": text}, {"KEYS": text + "x"}, {"TAGS": text}, {"UNIQ_KEY": text}):
                assert batch.take_messages([fields_of(properties)], 0, 0, _core.MessageFields) == (0, -1)
    batch.clear()


def test_numbers_that_are_none_or_too_large_are_not_plain():
    batch = row_batch()
    for name in ("flag", "sys_flag", "reconsume_times", "prepared_transaction_offset", "born_timestamp"):
        for value in (0.0, False, True, "0", 2**63, -(2**63) - 1, np.int64(0)):
            message = fields_of({}, **{name: value})
            assert batch.take_messages([message], 0, 0, _core.MessageFields) == (0, -1), (name, value)
    for value in (0.0, False, "0", None, 2**63, -1):
        assert batch.take_messages([fields_of({})], value, 0, _core.MessageFields) == (0, -1)
        assert batch.take_messages([fields_of({})], [value], 0, _core.MessageFields) == (0, -1)


def reading_calls(region: Region, index: IndexRegion):
    columns, zeros = RecordColumns(4), np.zeros(1, np.int64)
    return {
        "decode_record": lambda: _core.decode_record(region, 0),
        "check_record": lambda: _core.check_record(region, 0, 0),
        "find_record": lambda: _core.find_record(region, 0, 0),
        "read_message": lambda: _read.read_message(region, 0, 0),
        "read_messages": lambda: _read.read_messages(region, 0, 9, 0, 1, 9),
        "read_queued": lambda: _read.read_queued(region, 0, 1, region, 0, 0, 9, [], 0, 1, 1, 1, None, None, "T", 0, 0),
        "KeyQuery.find": lambda: key_query([]).find([index], "T", "k", 0, 0, 1, 1),
        "KeyQuery.recent": lambda: key_query([index]).recent("T", "k", 1),
        "ArrowColumns.fill_matching": lambda: _columns.ArrowColumns(["topic"], 4).fill_matching(
            [region],
            zeros,
            zeros.astype(np.int32),
            zeros,
            np.zeros(1, np.uint8),
            zeros.astype(np.int32),
            key_texts(),
            1,
            9,
        ),
        "chain_entries": lambda: _core.chain_entries(
            index, np.ones(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int64)
        ),
        "doubtful_entry": lambda: _core.doubtful_entry(
            [region], np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int32)
        ),
        "ArrowColumns.fill": lambda: _columns.ArrowColumns(["topic"], 4).fill(region, 0, 100, 0),
        "scan": lambda: _dispatch.scan(region, 0, 100, 0, columns, NO_DELAYS),
        "walk": lambda: _dispatch.walk(region, 0, 100, 0),
        "read_unit": lambda: _core.read_unit(region, 0),
        "read_units": lambda: _core.read_units(region, 0, 1),
        "count_units": lambda: _core.count_units(region),
        "agreeing_units": lambda: _dispatch.agreeing_units(region, 0, columns, np.zeros(1, np.int64), 0),
        "agreeing_entries": lambda: _dispatch.agreeing_entries(index, 1, columns, 0),
        "unit_at_or_after": lambda: _core.unit_at_or_after(region, 0, 1, 0),
        "written_unit": lambda: _core.written_unit(region, 0, 1),
        "read_batch_unit": lambda: _core.read_batch_unit(region, 0),
        "read_ext_unit": lambda: _core.read_ext_unit(region, 0),
        "agreeing_ext_units": lambda: _dispatch.agreeing_ext_units(region, 0, np.zeros(1, np.int64)),
        "select_phy_offset": lambda: index.select_phy_offset("k"),
        "select_hash": lambda: index.select_hash(1),
        "select_phy_offsets": lambda: index.select_phy_offsets(["k"]),
        "select_hashes": lambda: index.select_hashes(np.ones(1, np.int32)),
        "select_chain": lambda: index.select_chain(1),
        "read_header": index.read_header,
        "read_slot": lambda: index.read_slot(0),
        "read_entry": lambda: index.read_entry(0),
        "read_entries": lambda: index.read_entries(0, 1),
        "survey": lambda: index.survey(0),
        "tail_num": lambda: index.tail_num(0),
        "check_links": lambda: index.check_links(0),
    }


def writing_calls(region: Region, index: IndexRegion):
    ones = np.ones(1, np.int64)
    return {
        "RowBatch.encode": lambda: row_batch().encode(region, 0, 0, 0),
        "write_blank": lambda: _core.write_blank(region, 0),
        "write_unit": lambda: _core.write_unit(region, 0, 1, 2, 3),
        "write_units": lambda: _core.write_units(region, 0, ones, np.ones(1, np.int32), ones),
        "write_batch_unit": lambda: _core.write_batch_unit(region, 0, 1, 2, 3, 4, 5, 6),
        "write_ext_unit": lambda: _core.write_ext_unit(region, 0, 1, 2),
        "put_key": lambda: index.put_key("k", 1, 2),
        "put_hash": lambda: index.put_hash(1, 2, 3),
        "put_keys": lambda: index.put_keys(["k"], [1], [2]),
        "put_hashes": lambda: index.put_hashes(np.ones(1, np.int32), ones, ones),
        "write_header": lambda: index.write_header(1, 2, 3, 4, 5, 6),
        "relink": lambda: index.relink(1),
    }


def test_every_region_function_is_tried_closed():
    """The two lists above hold every function and method of the core that takes bytes from a mapping."""
    named = {*reading_calls(None, index_of(1, 1)), *writing_calls(None, index_of(1, 1))}
    functions = {
        name
        for module in (_core, _dispatch, _columns, _rows, _read)
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and name[0] != "_" and value.__module__ == module.__name__
    }
    methods = {name for name, value in vars(IndexRegion).items() if callable(value) and name[0] != "_"}
    without_region = {"java_string_hash", "java_string_hash_bytes", "index_key_hash", "crc32"}
    without_region |= {"crc32_implementations", "crc32_with", "agreeing_unit_bytes", "nonzero_size", "quoted_numbers", "unit_ends"}
    # These look themselves whether the region of a stream is open, and answer None.
    without_region |= {"entries_by_key", "text_arrays", "read_recent"}
    # It leaves what is not in the region to its caller, see `test_settle_refuses_other_regions`.
    without_region |= {"settle"}
    of_other_classes = {name for name in named if "." in name}
    assert functions | methods == named - of_other_classes | without_region | {"attach", "entry_pos"}


def attached(writable: bool):
    region = mapped(bytes(oracle.index_file_size(10, 20)), writable)
    index = IndexRegion()
    index.attach(region, 10, 20)
    return region, index


@pytest.mark.parametrize("kind", ["closed", "closed read-only", "blank", "subclass"])
def test_closed_and_blank_regions_refuse_everything(kind):
    if kind.startswith("closed"):
        region, index = attached(kind == "closed")
        region.close()
    elif kind == "blank":
        region, index = Region(), IndexRegion()
    else:
        region = type("Derived", (Region,), {})()
        index = type("DerivedIndex", (IndexRegion,), {})("any", arguments=1)
    for name, call in {**reading_calls(region, index), **writing_calls(region, index)}.items():
        with pytest.raises(StoreClosedError):
            call()
            pytest.fail(f"{name} answered on a {kind} region")
    assert region.pins == 0 and index.region.pins == 0


def test_read_only_regions_refuse_writing_and_answer_reading():
    region, index = attached(False)
    for name, call in writing_calls(region, index).items():
        with pytest.raises(ReadOnlyError):
            call()
            pytest.fail(f"{name} wrote to a read-only region")
    for call in reading_calls(region, index).values():
        call()
    assert region.pins == 0
    assert content(region) == bytes(480)


@pytest.mark.parametrize("pos", [-1, MIN_I64, MAX_I64, MAX_I64 - 19, 481, 2**32, 2**62])
def test_positions_outside_are_refused(pos):
    region, _ = attached(True)
    columns = RecordColumns(4)
    ones = np.ones(1, np.int64)
    for call in (
        lambda: _core.decode_record(region, pos),
        lambda: _core.check_record(region, pos, 0),
        lambda: _core.find_record(region, pos, 0),
        lambda: _dispatch.scan(region, pos, 480, 0, columns, NO_DELAYS),
        lambda: _dispatch.walk(region, pos, 480, 0),
        lambda: _core.read_unit(region, pos),
        lambda: _core.read_units(region, pos, 1),
        lambda: _dispatch.agreeing_units(region, pos, columns, np.zeros(1, np.int64), 0),
        lambda: _core.read_batch_unit(region, pos),
        lambda: encode_records(region, pos, 0, [encode_row()]),
        lambda: _core.write_blank(region, pos),
        lambda: _core.write_unit(region, pos, 1, 2, 3),
        lambda: _core.write_units(region, pos, ones, np.ones(1, np.int32), ones),
        lambda: _core.write_batch_unit(region, pos, 1, 2, 3, 4, 5, 6),
        lambda: _core.write_ext_unit(region, pos, 1, 2),
    ):
        with pytest.raises(StoreError):
            call()
    assert _core.read_ext_unit(region, pos) is None
    assert content(region) == bytes(480)
    assert region.pins == 0
