"""The oracle against the real thing: every test vector, every line that Java read, every derivable byte that it wrote.

Never imports rmqstore. A comment marks each part that is not compared.
"""

from __future__ import annotations

import ast
import json
import re
import struct
import zlib
from pathlib import Path

import golden
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

LMQ = {"enable_lmq": True, "enable_multi_dispatch": True}


def record_arguments(fields):
    """Turn a vector's fields into arguments of encode_record."""
    arguments = {name: value for name, value in fields.items() if name not in ("body", "batch", "version")}
    arguments["properties"] = [tuple(pair) for pair in fields["properties"]]
    if "batch" in fields:
        arguments["body"] = oracle.encode_client_messages(
            {"flag": m["flag"], "body": m["body"].encode(), "properties": [tuple(p) for p in m["properties"]]}
            for m in fields["batch"]
        )
    else:
        arguments["body"] = fields["body"].encode()
    return arguments


def check_record_vector(vector, **more):
    raw = bytes.fromhex(vector["hex"])
    fields = vector["fields"]
    arguments = record_arguments(fields)
    assert len(raw) == vector["length"]
    assert oracle.encode_record(**arguments, **more) == raw
    record = oracle.decode_record(raw, 0, fields["phy_offset"])
    assert record.version == fields["version"]
    for name in (
        "topic queue_id flag queue_offset phy_offset sys_flag born_timestamp born_host store_timestamp store_host "
        "reconsume_times prepared_transaction_offset"
    ).split():
        assert getattr(record, name) == fields[name], name
    assert record.physical_offset == fields["phy_offset"]
    assert record.body == arguments["body"]
    assert record.body_is_sound
    properties = dict(record.properties)
    properties.pop(oracle.PROP_CRC, None)
    assert properties == {name: value for name, value in arguments["properties"] if value}
    for cut in range(len(raw)):
        with pytest.raises(ValueError):
            oracle.decode_record(raw[:cut])
    return record


# ---------------------------------------------------------------------------------------------------------------
# Vectors


def test_t1_java_string_hash(vectors):
    for row in vectors["T1"]:
        text = row["string"]
        assert oracle.java_hash(text) == row["signed"], text
        assert f"{oracle.java_hash(text) & 0xFFFFFFFF:08x}" == row["hex"]
        assert oracle.index_hash(text) == row["index_hash"]
        assert oracle.index_hash(text) % 5000000 == row["slot_of_5000000"]
        assert struct.pack(">q", oracle.tags_hash(text)).hex() == row["tags_code"]


def test_t2_body_crc(vectors):
    for row in vectors["T2"]:
        body = (row["body"] or "").encode()
        assert oracle.masked_crc(body) == row["decimal"] == int(row["stored"], 16)
        if row["crc32"] is not None:
            assert int(row["crc32"], 16) & 0x7FFFFFFF == row["decimal"]


@pytest.mark.parametrize("name", ["T3", "T4", "T5", "T6"])
def test_t3_to_t6_records(vectors, name):
    record = check_record_vector(vectors[name])
    if "msg_id" in vectors[name]:
        assert record.msg_id == vectors[name]["msg_id"]


def test_t7_property_crc(vectors):
    vector = vectors["T7"]
    assert oracle.masked_crc(b"hello") == vector["value"]
    assert oracle.property_crc_tail(b"hello").hex() == vector["tail"]
    record = check_record_vector(vector["record"], append_prop_crc=True)
    assert record.property_crc_is_sound
    assert oracle.masked_crc(record.raw[:-20]) == vector["record_crc"]
    assert record.properties[oracle.PROP_CRC] == vector["digits"]
    broken = bytearray(record.raw)
    broken[20] ^= 1  # a queue offset is covered by the property CRC but not by the body CRC
    assert oracle.decode_record(bytes(broken)).property_crc_is_sound is False


def test_t8_records_as_stored(vectors, base):
    segment = (base / "commitlog" / oracle.file_name(0)).read_bytes()
    for vector in [*vectors["T8"]["records"], vectors["T8"]["inner_batch"]]:
        record = check_record_vector(vector)
        assert segment[record.phy_offset : record.end] == record.raw
        assert record.property_crc_is_sound is None
        expected = vectors["T8"]["msg_ids"].get(str(record.phy_offset))
        if expected is not None:
            assert record.msg_id == expected
            assert oracle.decode_message_id(expected) == ("10.0.0.1:10911", record.phy_offset)
    batch = vectors["T8"]["inner_batch"]
    record = oracle.decode_record(bytes.fromhex(batch["hex"]))
    assert oracle.encode_client_messages(oracle.decode_client_messages(record.body)) == record.body
    assert (record.is_inner_batch, record.batch_num) == (True, 3)
    blank = vectors["T8"]["blank"]
    assert segment[blank["phy_offset"] : blank["phy_offset"] + 8].hex() == blank["hex"]
    assert oracle.check_record(segment, blank["phy_offset"]) == oracle.Blank(blank["phy_offset"], blank["size"])


def test_t9_units(vectors):
    vector = vectors["T9"]
    geo = oracle.geometry()
    for row in vector["units"]:
        unit = oracle.decode_unit(bytes.fromhex(row["hex"]))
        assert unit == oracle.Unit(row["phy_offset"], row["size"], row["tags_code"])
        assert unit.encode().hex() == row["hex"]
        properties = [("TAGS", row["tags"]), ("DELAY", str(row["delay_level"]) if "delay_level" in row else None)]
        record = oracle.decode_record(
            oracle.encode_record(
                topic=row["topic"], store_timestamp=row.get("store_timestamp", 0), properties=properties
            )
        )
        assert oracle.tags_code(record, geo) == row["tags_code"]
        assert not oracle.is_ext_address(row["tags_code"])
    assert oracle.PRE_FILL_UNIT.hex() == vector["pre_fill"]
    row = vector["batch_unit"]
    unit = oracle.BatchUnit(
        row["phy_offset"],
        row["size"],
        row["tags_code"],
        row["store_timestamp"],
        row["base_queue_offset"],
        row["batch_num"],
    )
    assert unit.encode().hex() == row["hex"]
    assert oracle.decode_batch_unit(bytes.fromhex(row["hex"])) == unit
    ext = oracle.ConsumeQueueExtOracle(1024)
    for row, pointing in zip(vector["ext_units"], vector["ext_addressing_units"], strict=True):
        unit = oracle.ExtUnit(row["tags_code"], row["store_timestamp"])
        assert unit.encode().hex() == row["hex"]
        assert oracle.decode_ext_unit(bytes.fromhex(row["hex"])) == unit
        address = ext.put(unit)
        assert address == oracle.ext_address(row["pos"]) and oracle.is_ext_address(address)
        assert oracle.Unit(pointing["phy_offset"], pointing["size"], address).encode().hex() == pointing["hex"]


def test_t10_index_file_step_by_step(vectors, base):
    vector = vectors["T10"]
    slots, entries = vector["max_hash_slot_num"], vector["max_index_num"]
    index = oracle.IndexOracle(slots, entries)
    assert index.bytes() == bytes(vector["file_size"])
    for key, phy_offset, timestamp in vector["puts"]:
        assert index.put_key(key, phy_offset, timestamp)

    def parts(file, flushed=False):
        data = file.bytes(flushed)
        at = 40 + 4 * slots
        return (
            data[:40].hex(),
            data[40:at].hex(),
            [data[i : i + 20].hex() for i in range(at, len(data), 20)],
        )

    header, slot_bytes, entry_bytes = parts(index)
    assert (header, slot_bytes, entry_bytes[:6]) == (vector["header"], vector["slots"], vector["entries"])
    for row in vector["selections"]:
        assert index.select_phy_offset(row["key"], 64, row["begin"], row["end"]) == row["offsets"]
    # The file is the whole state: a file opened again answers and continues alike.
    assert oracle.IndexOracle(slots, entries, index.bytes()).header == index.header
    fill = vector["fill"]
    taken = 0
    while index.put_key(
        f"{fill['key_prefix']}{taken}", fill["first_phy_offset"] + taken, fill["first_store_timestamp"] + taken
    ):
        taken += 1
    assert (taken, taken + 1) == (fill["taken"], fill["refused_at"])
    assert parts(index)[:2] == (fill["header"], fill["slots"])
    rolled = oracle.IndexOracle(
        slots, entries, end_phy_offset=index.header.end_phy_offset, end_timestamp=index.header.end_timestamp
    )
    assert parts(rolled)[0] == vector["rolled"]["header"]
    assert parts(rolled, flushed=True)[0] == vector["rolled"]["header"][:-8] + "00000001"
    for key, phy_offset, timestamp in vector["rolled"]["puts"]:
        assert rolled.put_key(key, phy_offset, timestamp)
    assert parts(rolled)[0] == vector["rolled"]["header_after"]
    for number, expected in vector["rolled"]["entries"].items():
        assert parts(rolled)[2][int(number)] == expected
    expected = vector["base_first_file"]
    first = oracle.index_files(oracle.read_files(base))[0]
    built = oracle.IndexServiceOracle(golden.geometry("base"), [])
    for record in oracle.records_of(oracle.segments(oracle.read_files(base))):
        built.build(record)
    for file in (oracle.IndexOracle(slots, entries, first), built.files[0]):
        header, slot_bytes, entry_bytes = parts(file)
        assert (header, slot_bytes) == (expected["header"], expected["slots"])
        for number, entry in expected["entries"].items():
            assert entry_bytes[int(number)] == entry


def test_t11_checkpoint(vectors):
    vector = vectors["T11"]
    checkpoint = oracle.Checkpoint(
        vector["physic_msg_timestamp"],
        vector["logics_msg_timestamp"],
        vector["index_msg_timestamp"],
        vector["master_flushed_offset"],
        vector["confirm_phy_offset"],
    )
    assert checkpoint.encode() == bytes.fromhex(vector["first_48"]) + bytes(vector["file_size"] - 48)
    assert oracle.Checkpoint.decode(checkpoint.encode()) == checkpoint
    assert checkpoint.min_timestamp == vector["min_timestamp"]
    assert oracle.Checkpoint.decode(b"") == oracle.Checkpoint()


def test_t12_ids_and_names(vectors):
    for row in vectors["T12"]["ids"]:
        assert oracle.offset_message_id(row["store_host"], row["phy_offset"]) == row["msg_id"]
        assert oracle.decode_message_id(row["msg_id"]) == (row["store_host"], row["phy_offset"])
    for offset, name in vectors["T12"]["file_names"]:
        assert oracle.file_name(offset) == name


def test_t13_properties(vectors):
    vector = vectors["T13"]
    assert oracle.encode_properties(tuple(pair) for pair in vector["pairs"]).hex() == vector["hex"]
    for row in vector["parse"]:
        assert oracle.parse_properties(row["text"]) == row["properties"], row["text"]


def test_t13_order_of_a_java_map():
    # Section 2.4: the same names in a client's map (16) and in one that a broker parsed (128).
    names = "KEYS TAGS UNIQ_KEY WAIT CLUSTER DELAY REAL_TOPIC REAL_QID".split()
    assert oracle.java_map_order(names) == "REAL_TOPIC KEYS UNIQ_KEY CLUSTER WAIT DELAY TAGS REAL_QID".split()
    assert oracle.java_map_order(names, 128) == "UNIQ_KEY CLUSTER DELAY TAGS KEYS WAIT REAL_TOPIC REAL_QID".split()


def test_t14_json_texts(vectors):
    # The oracle writes no JSON; here the vectors are held against the files that the real managers wrote.
    for key, name in (
        ("empty_consumer_offset", "consumerOffset.empty.pretty"),
        ("consumer_offset", "consumerOffset.pretty"),
        ("delay_offset_without_data_version", "delayOffset.nodv.pretty"),
        ("local_offsets", "offsets.local.pretty"),
    ):
        assert vectors["T14"][key].encode() == golden.json_bytes(name)


@pytest.fixture(scope="session")
def readers(golden_store):
    """A function that gives the StoreReader of a golden store, its index as Java has it after opening."""
    found = {}

    def reader(name):
        if name not in found:
            files = oracle.read_files(golden_store(name))
            geo = golden.geometry(name)
            limit = 10 if name in golden.BROKER_STORES else None
            index = oracle.java_recovered_index(files, geo, recover_max_num=limit)
            found[name] = oracle.StoreReader(files, geo, index)
        return found[name]

    return reader


def test_t15_get(vectors, readers):
    reader = readers("base")
    for row in vectors["T15"]:
        got = reader.get(
            row["topic"],
            row["queue_id"],
            row["queue_offset"],
            row["max_num"],
            max_bytes=row["max_bytes"],
            subscription=row["subscription"],
        )
        for name in "status next_queue_offset min_queue_offset max_queue_offset count bytes queue_offsets".split():
            assert getattr(got, name) == row[name], (row, name)


def test_t16_offset_by_time(vectors, readers):
    vector = vectors["T16"]
    reader = readers("base")
    queue = vector["topic"], vector["queue_id"]
    times = [reader.record_at(p.phy_offset).store_timestamp - vector["base_time"] for p in reader.positions(*queue)]
    assert times == vector["unit_times"]
    for row in vector["rows"]:
        time = vector["base_time"] + row["time"]
        assert reader.offset_by_time(*queue, time, "lower") == row["lower"], row
        assert reader.offset_by_time(*queue, time, "upper") == row["upper"], row


def replay(name, store, log):
    """Put the records of a golden log into a model, their raw properties without an appended CRC."""
    records = [item for item in log if isinstance(item, oracle.Record)]
    number = 0
    while number < len(records):
        record = records[number]
        same = {
            "clock": record.store_timestamp,
            "queue_id": record.queue_id,
            "sys_flag": record.sys_flag,
            "born_timestamp": record.born_timestamp,
            "born_host": record.born_host,
            "store_host": record.store_host,
            "reconsume_times": record.reconsume_times,
        }
        group = [r for r in records[number:] if "WAIT" in r.properties and r.store_timestamp == record.store_timestamp]
        raw = [r.properties_raw for r in (group or [record])]
        if golden.geometry(name)["enabled_append_prop_crc"]:
            raw = [properties[: -oracle.CRC_TAIL_SIZE] for properties in raw]
        if group and group[0] is record:
            messages = [
                {"body": r.body, "flag": r.flag, "properties": properties}
                for r, properties in zip(group, raw, strict=True)
            ]
            store.put_batch(record.topic, messages, **same)
            number += len(group)
            continue
        properties = raw[0]
        if record.is_inner_batch:
            # The text of the client: the model adds INNER_BASE and orders the map like Java.
            named = dict(record.properties)
            assert named.pop("INNER_BASE") == str(record.queue_offset)
            properties = [(key, value) for key, value in named.items() if key != oracle.PROP_CRC]
            same["property_table_size"] = 16
        store.put(
            record.topic,
            record.body,
            properties=properties,
            flag=record.flag,
            prepared_transaction_offset=record.prepared_transaction_offset,
            **same,
        )
        number += 1
    return store


def assert_same_files(got, expected):
    assert sorted(got) == sorted(expected)
    for path, data in expected.items():
        assert got[path] == data, f"{path} differs"


@pytest.mark.parametrize("name", ["base", "propcrc", "ext", "compaction"])
def test_model_writes_the_bytes_of_the_golden_store(golden_store, name):
    files = oracle.read_files(golden_store(name))
    log = oracle.walk_commit_log(oracle.segments(files))
    store = replay(name, oracle.StoreOracle(golden.geometry(name)), log)
    assert_same_files(store.files(), oracle.comparable(files))


def test_t17_light_queues(vectors, golden_store):
    # The vector's records went into `base` after its last one; their bodies are not part of it, so 12 bytes stand in.
    vector = vectors["T17"]
    log = oracle.walk_commit_log(oracle.segments(oracle.read_files(golden_store("base"))))
    store = replay("base", oracle.StoreOracle({**golden.geometry("base"), **LMQ}), log)
    for number, row in enumerate(vector["records"]):
        properties = [("TAGS", vector["tags"]), ("INNER_MULTI_DISPATCH", vector["inner_multi_dispatch"])]
        put = store.put(
            vector["topic"], b"x" * 12, queue_id=vector["queue_id"], clock=1700000060000, properties=properties
        )
        assert (put.phy_offset, put.size) == (row["phy_offset"], row["size"])
        offsets = store.records[-1].properties["INNER_MULTI_QUEUE_OFFSET"]
        assert offsets == (vector["inner_multi_queue_offset_of_first"] if number == 0 else "1,1")
    files = store.files()
    for topic, queue_id in vector["queues"]:
        data = files[f"consumequeue/{topic}/{queue_id}/{oracle.file_name(0)}"]
        assert data[:40].hex() == vector["first_bytes"]
        assert not any(data[40:])


# ---------------------------------------------------------------------------------------------------------------
# What Java read, line by line


def msg_line(record):
    line = {
        "type": "msg",
        "offset": record.phy_offset,
        "size": record.size,
        "topic": record.topic,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset,
        "flag": record.flag,
        "sysFlag": record.sys_flag,
        "born": record.born_timestamp,
        "store": record.store_timestamp,
        "bornHost": oracle.java_host(record.born_host),
        "storeHost": oracle.java_host(record.store_host),
        "reconsume": record.reconsume_times,
        "prepared": record.prepared_transaction_offset,
        "crc": record.body_crc,
        "bodyLen": len(record.body),
        "bodyCrc": oracle.masked_crc(record.body),
        "msgId": record.msg_id,
    }
    if record.properties:
        line["props"] = record.properties
    return line


def queue_line(reader, topic, queue_id, kind):
    units = [
        f"{p.queue_offset}:{p.phy_offset}:{p.size}:{p.tags_code}"
        for p in reader.positions(topic, queue_id)
        for _ in range(p.batch_num)
    ]
    return {
        "type": "queue",
        "topic": topic,
        "queueId": queue_id,
        "kind": kind,
        "min": reader.min_queue_offset(topic, queue_id),
        "max": reader.max_queue_offset(topic, queue_id),
        "units": units,
    }


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_record_that_java_read(readers, name):
    reader = readers(name)
    got = [
        {"type": "blank", "offset": item.phy_offset, "size": item.size}
        if isinstance(item, oracle.Blank)
        else msg_line(item)
        for item in reader.items
    ]
    assert got == list(golden.lines(name, "msg", "blank"))
    assert [{"type": "store", "minPhy": reader.min_phy_offset, "maxPhy": reader.max_phy_offset}] == list(
        golden.lines(name, "store")
    )
    for record in reader.records.values():
        assert record.physical_offset == record.phy_offset
        assert record.property_crc_is_sound is (True if golden.geometry(name)["enabled_append_prop_crc"] else None)


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_queue_unit_that_java_read(readers, name):
    reader = readers(name)
    expected = list(golden.lines(name, "queue"))
    assert [queue_line(reader, *queue) for queue in reader.queues()] == expected


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_query_answer_of_java(readers, name):
    reader = readers(name)
    for line in golden.lines(name, "query"):
        assert reader.index.query(line["topic"], line["key"]).offsets == line["offsets"], line


@pytest.mark.parametrize("name", golden.RECOVERED_BY_JAVA)
def test_java_indexed_exactly_the_boundary_twice(golden_store, readers, name):
    """The files as they lie there differ from Java's answers only by what Java's recovery adds.

    Java deleted the newest index file and dispatched again from a segment's start; the last record of the newest kept
    file passed the `<` test, so each of its keys is in the index once more.  Nothing else may differ.
    """
    files = oracle.read_files(golden_store(name))
    geo = golden.geometry(name)
    on_disk = oracle.IndexServiceOracle(geo, oracle.index_files(files))
    ends = {
        oracle.IndexHeader.decode(data).end_phy_offset
        for data in oracle.index_files(files)
        if oracle.IndexHeader.decode(data).end_timestamp
        <= oracle.Checkpoint.decode(files["checkpoint"]).index_msg_timestamp
    }
    boundary = max(ends)
    record = readers(name).records[boundary]
    keys = {*record.keys, record.unique_key}
    differing = set()
    for line in golden.lines(name, "query"):
        answer = on_disk.query(line["topic"], line["key"]).offsets
        if answer == line["offsets"]:
            continue
        assert line["topic"] == record.topic and line["key"] in keys, line
        assert answer.count(boundary) == 1 and line["offsets"].count(boundary) == 2, line
        assert [offset for offset in line["offsets"] if offset != boundary] == [o for o in answer if o != boundary]
        differing.add(line["key"])
    assert differing


# ---------------------------------------------------------------------------------------------------------------
# Rebuilding from the log alone


@pytest.mark.parametrize("name", golden.STORES)
def test_rebuild_gives_the_bytes_on_disk(golden_store, name):
    """Every queue and index file, byte for byte; only the names of index files cannot be known."""
    files = oracle.read_files(golden_store(name))
    clean = "abort" not in files
    rebuilt = oracle.rebuild(files, golden.geometry(name), flushed=clean)
    assert_same_files(rebuilt, oracle.comparable(files, oracle.QUEUES_AND_INDEX))
    assert any(path.startswith("consumequeue/") for path in rebuilt)
    assert any(path.startswith("index/") for path in rebuilt)


def test_rebuild_without_tags_gives_another_index(golden_store):
    files = oracle.read_files(golden_store("broker"))
    rebuilt = oracle.rebuild(files, {**golden.geometry("broker"), "index_tags": False})
    assert oracle.comparable(rebuilt, ["index"]) != oracle.comparable(files, ["index"])
    assert oracle.comparable(rebuilt, ["consumequeue"]) == oracle.comparable(files, ["consumequeue"])


def test_broker_finds_records_by_tag(readers):
    reader = readers("broker")
    tagged = [r for r in reader.records.values() if r.topic == "Documents" and r.tags]
    for tag in {r.tags for r in tagged}:
        expected = sorted((r.phy_offset for r in tagged if r.tags == tag), reverse=True)
        answer = reader.index.query("Documents", tag, index_type="T").offsets
        assert answer == expected[:64] and answer


def body_as_sent(record):
    """Return the body before compression, None where the standard library cannot undo it (LZ4 frame, ZSTD)."""
    if record.sys_flag & 1 == 0:
        return record.body
    return zlib.decompress(record.body) if record.sys_flag >> 8 & 7 in (0, 3) else None


def test_acknowledged_messages_are_where_the_broker_said(readers):
    """The client's own records, which no store reader made."""
    reader = readers("broker")
    by_unique_key = {}
    for record in reader.records.values():
        by_unique_key.setdefault(record.unique_key, []).append(record)
    seen = {"stored": 0, "batched": 0, "compressed": 0, "transaction": 0}
    for line in golden.sent():
        if line["kind"] == "batch":
            ids = zip(line["msg_id"].split(","), line["offset_msg_id"].split(","), strict=True)
            for number, (unique_key, msg_id) in enumerate(ids):
                record = reader.record_at(oracle.decode_message_id(msg_id)[1])
                assert (record.unique_key, record.msg_id, record.queue_id) == (unique_key, msg_id, line["queue_id"])
                assert record.queue_offset == line["queue_offset"] + number
                seen["batched"] += 1
            continue
        as_sent = line["body_len"], line["body_crc"]
        if "offset_msg_id" not in line:
            # A transaction is acknowledged without an offset id; its half message keeps the unique key.
            bodies = [(len(r.body), oracle.masked_crc(r.body)) for r in by_unique_key[line["msg_id"]]]
            assert bodies and set(bodies) == {as_sent}
            seen["transaction"] += 1
            continue
        host, phy_offset = oracle.decode_message_id(line["offset_msg_id"])
        record = reader.record_at(phy_offset)
        assert record.store_host == host and record.unique_key == line["msg_id"]
        assert record.keys == oracle.split_keys(line.get("keys")) and record.tags == line.get("tags")
        body = body_as_sent(record)
        if body is not None:
            assert (len(body), oracle.masked_crc(body)) == as_sent
        seen["stored" if record.sys_flag & 1 == 0 else "compressed"] += 1
    batched = sum(reader.max_queue_offset("Batches", queue_id) for queue_id in range(4))
    # The 200 000-byte body is compressed besides the 180 that were meant to be.
    assert seen == {"stored": 1222, "batched": batched, "compressed": 181, "transaction": 60}


# ---------------------------------------------------------------------------------------------------------------
# Rules that no golden byte shows


SMALL = oracle.geometry(
    mapped_file_size_commit_log=1024,
    mapped_file_size_consume_queue=100,
    max_hash_slot_num=3,
    max_index_num=7,
    mapper_file_size_batch_consume_queue=460,
)


def test_java_decode_and_encode():
    for data in (b"plain", "订单😀".encode(), b"\xff\xc3(", b"\xe4\xbd", b"\xc0\xaf", b"\xf8\x88\x80", b"\xf0\x9f\x98"):
        assert oracle.java_decode(data) == data.decode("utf-8", "replace")
    assert oracle.java_decode(b"a\xed\xa0\xbdz") == "a\ufffdz"
    assert oracle.java_decode(b"\xed\xa0\xbd\xed\xb8\x80") == "\ufffd\ufffd"
    assert oracle.java_encode("a\ud83dz") == b"a?z"
    assert oracle.java_encode("\ud83d\ude00") == "😀".encode()


@given(st.text(st.characters(exclude_categories=()), max_size=8))
def test_java_hash_equals_the_polynomial(text):
    encoded = text.encode("utf-16-be", "surrogatepass")
    units = [encoded[i] * 256 + encoded[i + 1] for i in range(0, len(encoded), 2)]
    value = sum(unit * 31 ** (len(units) - 1 - place) for place, unit in enumerate(units)) % 2**32
    assert oracle.java_hash(text) % 2**32 == value
    assert -(2**31) <= oracle.java_hash(text) < 2**31
    assert oracle.java_length(text) == len(units)


def test_consume_queue_rules():
    queue = oracle.ConsumeQueueOracle(200)
    assert queue.put(1000, 100, 7, 13)
    files = queue.store.files("q")
    assert list(files) == [f"q/{oracle.file_name(200)}"]
    data = files[f"q/{oracle.file_name(200)}"]
    assert data[:60] == oracle.PRE_FILL_UNIT * 3
    assert oracle.decode_unit(data, 60) == oracle.Unit(1000, 100, 7)
    assert queue.min_logic_offset == 260 and queue.max_queue_offset == 14
    assert not queue.put(1000, 100, 7, 13), "already there"
    assert not queue.put(1100, 100, 7, 12), "behind the end: taken as written"
    assert queue.put(1200, 100, 7, 20), "a gap is papered over"
    assert queue.max_queue_offset == 15
    for number in range(15, 25):
        assert queue.put(2000 + number, 1, 0, number) is (number >= 15)
    assert list(queue.store.files("q")) == [f"q/{oracle.file_name(200)}", f"q/{oracle.file_name(400)}"]


def test_ext_file_is_closed_by_minus_one():
    ext = oracle.ConsumeQueueExtOracle(64)
    addresses = [ext.put(oracle.ExtUnit(number, 5)) - oracle.ext_address(0) for number in range(4)]
    assert addresses == [0, 20, 40, 64]
    files = ext.store.files("x")
    assert files[f"x/{oracle.file_name(0)}"][60:] == b"\xff\xff\0\0", "the third unit leaves just 4 bytes"
    assert oracle.decode_ext_unit(files[f"x/{oracle.file_name(64)}"]) == oracle.ExtUnit(3, 5)


def test_ext_unit_must_leave_four_bytes():
    ext = oracle.ConsumeQueueExtOracle(63)
    addresses = [ext.put(oracle.ExtUnit(number, 5)) - oracle.ext_address(0) for number in range(3)]
    assert addresses == [0, 20, 63], "the third unit would leave only 3 bytes"
    assert ext.store.files("x")[f"x/{oracle.file_name(0)}"][40:] == b"\xff\xff" + bytes(21)
    assert oracle.resolve_tags_code(oracle.ext_address(63), oracle.segments(ext.store.files("x"), "x")) == 2
    assert oracle.resolve_tags_code(oracle.ext_address(40), oracle.segments(ext.store.files("x"), "x")) is None


def test_slot_beyond_the_count_is_taken_as_empty():
    index = oracle.IndexOracle(1, 5)
    assert index.put_key("T#a", 1, 1000)
    for value in (-1, 0, 3, 4):
        data = bytearray(index.bytes())
        struct.pack_into(">i", data, 40, value)
        broken = oracle.IndexOracle(1, 5, bytes(data))
        assert broken.select_phy_offset("T#a") == []
        assert broken.put_key("T#a", 2, 1000)
        assert broken.entry(2)[3] == 0
        assert broken.header.hash_slot_count == 2
        assert broken.select_phy_offset("T#a") == [2]


def test_index_query_is_capped_and_stops_at_an_older_file():
    service = oracle.IndexServiceOracle({**SMALL, "max_index_num": 200})
    for number in range(70):
        service.current_file().put_key("T#a", number, 1000)
    assert service.query("T", "a", 1000).offsets == list(range(69, 5, -1))
    assert service.query("T", "a", 3).offsets == [69, 68, 67]
    # The clock steps back when the file is full: the newer file begins before the range and ends the search.
    service = oracle.IndexServiceOracle(SMALL)
    for number, timestamp in enumerate([5000] * 6 + [1000]):
        service.current_file().put_key("T#a", number, timestamp)
    assert len(service.files) == 2
    assert service.query("T", "a", 64, 2000).offsets == []
    assert service.query("T", "a").offsets == [6, 5, 4, 3, 2, 1, 0]
    assert service.query("T", "a").last_update_timestamp == 1000
    assert service.query("T", "a").last_update_phy_offset == 6


def test_query_message_repeats_a_repeated_key():
    store = oracle.StoreOracle({**SMALL, "max_index_num": 50})
    store.put("T", b"1", clock=1000, properties=[("KEYS", "k k k"), ("UNIQ_KEY", "k")])
    store.put("T", b"2", clock=2000, properties=[("KEYS", "k"), ("TAGS", "k")])
    reader = store.reader()
    assert [record.body for record in reader.query_message("T", "k")] == [b"1"] * 4 + [b"2"]
    assert [record.body for record in reader.query_message("T", "k", 2)] == [b"1", b"2"]
    assert [record.body for record in reader.query_message("T", "k", index_type="T")] == [b"2"]
    assert reader.query_message("T", "other") == []
    assert store.query("T", "k") == [store.records[1].phy_offset, 0]
    assert store.query("T", "k", 1001) == [store.records[1].phy_offset]
    assert store.query("T", "k", 0, 1999) == [0]


def test_get_counts_the_messages_of_an_inner_batch():
    store = oracle.StoreOracle(SMALL)
    for _ in range(3):
        body = oracle.encode_client_messages([{"body": b"a"}, {"body": b"b"}])
        put = store.put("B", body, clock=1, sys_flag=0xC0, properties=[("INNER_NUM", "2")])
    assert put.queue_offset == 4 and store.records[-1].properties["INNER_BASE"] == "4"
    reader = store.reader()
    assert reader.queues() == [("B", 0, "BatchCQ")]
    assert reader.get("B", 0, 0, 3).queue_offsets == [0], "a second batch would make four"
    assert reader.get("B", 0, 0, 4).queue_offsets == [0, 2]
    assert reader.get("B", 0, 5, 4).queue_offsets == [4]
    assert reader.get("B", 0, 6, 4).status == "OFFSET_OVERFLOW_ONE"


@pytest.mark.parametrize("left, rolls", [(100, False), (99, True)])
def test_record_leaves_eight_bytes(left, rolls):
    store = oracle.StoreOracle(SMALL)
    store.put("T", bytes(1024 - left - 92), clock=1)
    assert store.end == 1024 - left
    put = store.put("T", b"", clock=1)
    assert put.size == 92
    assert (put.phy_offset == 1024) is rolls
    assert len(store.blanks) == rolls


def test_index_walk_stops_on_a_cycle():
    index = oracle.IndexOracle(1, 4)
    assert index.put_key("T#a", 1, 1000) and index.put_key("T#b", 2, 1000)
    data = bytearray(index.bytes())
    struct.pack_into(">i", data, 40 + 4 + 20 + 16, 2)
    with pytest.raises(oracle.EndlessWalk):
        oracle.IndexOracle(1, 4, bytes(data)).select_phy_offset("T#c")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["T", "U", "SCHEDULE_TOPIC_XXXX"]),
            st.integers(0, 2),
            st.binary(max_size=300),
            st.sampled_from(["", "a", "a b", "b  a", "AaAa", "BBBB", "😀 a"]),
            st.sampled_from([None, "TagA", "BB", "Aa"]),
            st.sampled_from([0, 0, 0, oracle.PREPARED, oracle.COMMIT, oracle.ROLLBACK]),
            st.integers(0, 5000),
        ),
        max_size=25,
    )
)
def test_model_agrees_with_the_readers(puts):
    """The files of the model are scanned, rebuilt, read and queried again; the exact answer is a subset of the index's."""
    store = oracle.StoreOracle(SMALL)
    clock = 1700000000000
    for topic, queue_id, body, keys, tags, sys_flag, step in puts:
        clock += step
        properties = [("KEYS", keys or None), ("TAGS", tags), ("DELAY", "1" if topic.startswith("S") else None)]
        store.put(topic, body, clock=clock, queue_id=queue_id, properties=properties, sys_flag=sys_flag)
    files = store.files()
    log = oracle.segments(files)
    assert oracle.records_of(log) == store.records
    assert oracle.log_end(log) == store.end
    assert [b for b in oracle.walk_commit_log(log) if isinstance(b, oracle.Blank)] == store.blanks
    assert_same_files(oracle.rebuild(files, SMALL), {p: d for p, d in files.items() if not p.startswith("commitlog")})
    reader = store.reader()
    for topic, queue_id, _ in reader.queues():
        expected = [
            r
            for r in store.records
            if (r.topic, r.queue_id) == (topic, queue_id) and r.transaction_type in (0, oracle.COMMIT)
        ]
        got = []
        at = 0
        while (answer := reader.get(topic, queue_id, at, 4)).status == "FOUND":
            got += answer.records
            at = answer.next_queue_offset
        assert got == expected and answer.status == "OFFSET_OVERFLOW_ONE"
        assert [r.queue_offset for r in expected] == list(range(len(expected)))
    for topic in ("T", "U", "SCHEDULE_TOPIC_XXXX"):
        for key in ("a", "b", "AaAa", "BBBB", "😀"):
            exact = store.query(topic, key)
            assert exact == sorted(
                (
                    r.phy_offset
                    for r in store.records
                    if r.topic == topic and key in r.keys and r.transaction_type != oracle.ROLLBACK
                ),
                reverse=True,
            )
            raw = reader.index.query(topic, key).offsets
            if len(raw) < 64:
                assert set(exact) <= set(raw)
        exact = store.query(topic, "Aa", index_type="T")
        assert set(exact) <= set(reader.index.query(topic, "Aa", index_type="T").offsets)


def test_store_refuses_what_fits_no_segment():
    store = oracle.StoreOracle(SMALL)
    room = 1024 - 8 - 92
    with pytest.raises(ValueError, match="do not fit"):
        store.put("T", b"x" * (room + 1), clock=1)
    assert store.put("T", b"x" * room, clock=1).size == 1016
    assert store.put("T", b"", clock=1).phy_offset == 1024
    assert store.files()[f"commitlog/{oracle.file_name(0)}"][1016:] == struct.pack(">iI", 8, oracle.MAGIC_BLANK)
    with pytest.raises(ValueError, match="do not fit"):
        store.put_batch("T", [{"body": b"x" * 500}, {"body": b"y" * 500}], clock=1)
    assert store.end == 1024 + 92


def test_first_segments_gone():
    """With the log's first segments expired the queue keeps its numbers, and a rebuild pre-fills up to them."""
    store = oracle.StoreOracle(SMALL)
    for number in range(40):
        store.put("T", b"x" * 100, clock=1700000000000 + number)
    files = store.files()
    log = {base: data for base, data in oracle.segments(files).items() if base >= 2048}
    rebuilt = oracle.rebuild(log, SMALL)
    first = oracle.records_of(log)[0]
    reader = oracle.StoreReader(
        {f"commitlog/{oracle.file_name(base)}": data for base, data in log.items()} | rebuilt, SMALL
    )
    assert reader.min_queue_offset("T", 0) == first.queue_offset > 0
    assert reader.max_queue_offset("T", 0) == 40
    assert reader.get("T", 0, 0).status == "OFFSET_TOO_SMALL"
    assert reader.get("T", 0, first.queue_offset).records[0] == first
    assert reader.record_at(0) == first, "offset 0 resolves to the first segment that exists"
    assert reader.record_at(first.phy_offset + 1) is None


# ---------------------------------------------------------------------------------------------------------------
# The oracle stays independent, the data small


def test_oracle_imports_only_the_standard_library_and_nothing_of_ours():
    allowed = set("__future__ collections dataclasses functools ipaddress os re struct typing zlib".split())
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= allowed


def test_data_stay_below_eight_mebibytes():
    sizes = [path.stat().st_size for path in golden.DATA.rglob("*") if path.is_file()]
    assert sum(sizes) < 8 * 2**20
    assert set(json.loads((golden.DATA / "vectors.json").read_text())) == {f"T{n}" for n in range(1, 18)}
    for name in golden.STORES:
        assert golden.has_lines(name) is (name in golden.STORES_WITH_LINES)
        assert not re.search(r"\s", name)
