"""The peer itself: RocketMQ must read the golden stores as they were read, and write them again byte for byte.

These tests are about the Java tool and its wrapper and never import rmqstore: a difference between rmqstore and Java
means something only while they pass.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path
from typing import Any

import golden
import pytest
from peer import MAX_LONG, JavaStore, PeerError, copy_store

pytestmark = pytest.mark.java

BLANK_MAGIC = 0xCBD43194
V2_MAGIC = 0xDAA320AB
# In `base` these three records came as one client batch.
BATCH_OFFSETS = (1528, 1705, 1882)


def host(raw: bytes) -> str:
    ip = ipaddress.ip_address(raw[:-4])
    (port,) = struct.unpack(">i", raw[-4:])
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def script_of(store: Path) -> list[dict[str, Any]]:
    """What must be put to get the log of `base` again: each record taken apart by the format's table, in order."""
    log = b"".join(path.read_bytes() for path in sorted((store / "commitlog").iterdir()))
    (end,) = (line["maxPhy"] for line in golden.lines("base", "store"))
    script: list[dict[str, Any]] = []
    batch: list[dict[str, Any]] = []
    pos = 0
    while pos < end:
        size, magic, _, queue_id, flag, _, _, sys_flag, born = struct.unpack_from(">iIiiiqqiq", log, pos)
        if magic == BLANK_MAGIC:
            pos += size
            continue
        at = pos + 48
        born_host = log[at : at + (20 if sys_flag & 0x10 else 8)]
        at += len(born_host)
        (store_timestamp,) = struct.unpack_from(">q", log, at)
        at += 8
        store_host = log[at : at + (20 if sys_flag & 0x20 else 8)]
        at += len(store_host)
        reconsume_times, prepared, body_size = struct.unpack_from(">iqi", log, at)
        at += 16
        body = log[at : at + body_size]
        at += body_size
        (topic_size,) = struct.unpack_from(">H" if magic == V2_MAGIC else ">B", log, at)
        at += 2 if magic == V2_MAGIC else 1
        topic = log[at : at + topic_size].decode()
        at += topic_size
        (properties_size,) = struct.unpack_from(">h", log, at)
        at += 2
        text = log[at : at + properties_size].decode()
        assert at + properties_size == pos + size
        own = {
            "body": body,
            "flag": flag,
            "properties": [pair.split("\x01") for pair in text.split("\x02") if pair],
        }
        shared = {
            "topic": topic,
            "queueId": queue_id,
            "sysFlag": sys_flag,
            "bornTimestamp": born,
            "storeTimestamp": store_timestamp,
            "bornHost": host(born_host),
            "storeHost": host(store_host),
            "reconsumeTimes": reconsume_times,
        }
        if pos in BATCH_OFFSETS:
            batch.append(own)
            if pos == BATCH_OFFSETS[-1]:
                script.append({**shared, "batch": batch})
        else:
            script.append({**shared, **own, "preparedTransactionOffset": prepared})
        pos += size
    assert len(batch) == len(BATCH_OFFSETS)
    return script


def split_dump(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines that the golden files have, and the answers for tags, which only 5.4.0 and later index."""
    return (
        [line for line in lines if "indexType" not in line],
        [line for line in lines if "indexType" in line],
    )


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_dump_reads_the_golden_stores_as_they_were_read(java_store, golden_store, name):
    lines, tags = split_dump(java_store.dump(golden_store(name), golden.geometry(name)))
    assert lines == list(golden.lines(name))
    assert tags
    if golden.geometry(name)["index_tags"]:
        assert all(line["offsets"] for line in tags)
    elif name not in golden.RECOVERED_BY_JAVA:
        # Recovery by 5.5.0 indexes the tags of the records that it dispatches again; otherwise there are none.
        assert not any(line["offsets"] for line in tags)


@pytest.mark.parametrize("name", ["base", "propcrc", "ext"])
def test_write_makes_the_same_bytes_again(java_store, golden_store, tmp_path, name):
    source = golden_store(name)
    target = tmp_path / "store"
    script = script_of(golden_store("base"))
    config = {**golden.geometry(name), "index_tags": True}
    answers = java_store.write(target, config, script, batch_topics=["BatchTopic"])
    assert [answer["status"] for answer in answers] == ["PUT_OK"] * len(script)
    compared = 0
    for folder in ("commitlog", "consumequeue", "consumequeue_ext", "batchconsumequeue"):
        files = sorted(path.relative_to(source) for path in (source / folder).rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(target) for path in (target / folder).rglob("*") if path.is_file())
        for path in files:
            assert (target / path).read_bytes() == (source / path).read_bytes(), path
        compared += len(files)
    assert compared > 10
    assert not (target / "abort").exists()
    lines, tags = split_dump(java_store.dump(target, config))
    assert lines == list(golden.lines(name))
    assert all(line["offsets"] or line["key"] == "TagT" for line in tags)


def test_write_killed_leaves_the_store_open(java_store, golden_store, tmp_path):
    config = {**golden.geometry("base"), "index_tags": True}
    target = tmp_path / "store"
    java_store.write(target, config, script_of(golden_store("base")), batch_topics=["BatchTopic"], kill=True)
    # The process is gone, its number is left, and so is the segment that was prepared ahead.
    assert (target / "abort").read_text().isdigit()
    assert sorted(os.listdir(target / "commitlog"))[-1] == f"{3 * 4096:020}"
    wanted = list(golden.lines("base", "store", "msg", "blank", "queue"))
    lines = java_store.dump(target, config)
    assert [line for line in lines if line["type"] != "query"] == wanted


def test_dump_leaves_the_directory_alone_unless_in_place(java_store, golden_copy):
    store = golden_copy("base.running")
    config = golden.geometry("base.running")
    before = golden.tree(store)
    java_store.dump(store, config)
    assert golden.tree(store) == before
    java_store.dump(store, config, in_place=True)
    assert not (store / "abort").exists()


def test_get_answers_as_written_down(java_store, base, vectors):
    requests = [
        {
            "op": "get",
            "topic": row["topic"],
            "queueId": row["queue_id"],
            "offset": row["queue_offset"],
            "maxNum": row["max_num"],
            "maxBytes": row["max_bytes"],
            "sub": row["subscription"],
        }
        for row in vectors["T15"]
    ]
    answers = java_store.ask(base, golden.geometry("base"), requests)
    assert len(answers) == len(vectors["T15"]) > 20
    for row, answer in zip(vectors["T15"], answers):
        assert answer["status"] == row["status"], row
        assert answer["next"] == row["next_queue_offset"], row
        assert (answer["min"], answer["max"]) == (row["min_queue_offset"], row["max_queue_offset"]), row
        assert (answer["count"], answer["bytes"]) == (row["count"], row["bytes"]), row
        assert [record["queueOffset"] for record in answer["records"]] == row["queue_offsets"], row


def test_offset_by_time_answers_as_written_down(java_store, base, vectors):
    table = vectors["T16"]
    requests = [
        {
            "op": "time",
            "topic": table["topic"],
            "queueId": table["queue_id"],
            "timestamp": table["base_time"] + row["time"],
            "boundary": boundary,
        }
        for row in table["rows"]
        for boundary in ("LOWER", "UPPER")
    ]
    answers = java_store.ask(base, golden.geometry("base"), requests)
    wanted = [row[boundary] for row in table["rows"] for boundary in ("lower", "upper")]
    assert [answer["queueOffset"] for answer in answers] == wanted


def test_query_look_and_single_questions(java_store, base):
    config = golden.geometry("base")
    hit, missing = java_store.query(base, config, "TopicTest", ["k1", "no such key"])
    assert (hit["offsets"], hit["messages"]) == ([0], [0])
    assert (missing["offsets"], missing["messages"]) == ([], [])
    (early,) = java_store.query(base, config, "TopicTest", "k1", begin=0, end=1)
    assert early["offsets"] == []
    first, inside, beyond = java_store.ask(
        base, config, [{"op": "look", "offset": offset} for offset in (168, 169, MAX_LONG)]
    )
    assert first["message"] in golden.lines("base", "msg")
    assert first["message"]["offset"] == 168
    assert inside["message"] is None
    assert beyond["message"] is None
    answer = java_store.get(base, config, "TopicTest", 0, 4, max_num=2)
    assert answer["records"] == [
        {"queueOffset": 4, "offset": 2942, "size": 300},
        {"queueOffset": 5, "offset": 3242, "size": 300},
    ]
    assert java_store.offset_by_time(base, config, "TopicTest", 0, 1700000000999) == 1


def test_tags_are_found_by_index_type(java_store, broker):
    config = golden.geometry("broker")
    wanted = [line["offset"] for line in golden.lines("broker", "msg") if line.get("props", {}).get("TAGS") == "取消"]
    (answer,) = java_store.query(broker, config, "Orders", "取消", index_type="T")
    assert answer["offsets"] == wanted[::-1][:64]
    assert answer["messages"] == sorted(answer["offsets"])
    assert len(wanted) > 64


def test_light_queues(java_store, golden_copy, vectors):
    expected = vectors["T17"]
    store = golden_copy("base")
    config = {**golden.geometry("base"), "index_tags": True, "enable_lmq": True, "enable_multi_dispatch": True}
    message = {
        "topic": expected["topic"],
        "queueId": expected["queue_id"],
        "properties": {"TAGS": expected["tags"], "INNER_MULTI_DISPATCH": expected["inner_multi_dispatch"]},
    }
    first, second = java_store.write(store, config, [message, message])
    assert first["offset"] == expected["records"][0]["phy_offset"]
    lines = java_store.dump(store, config)
    records = [line for line in lines if line["type"] == "msg" and line["topic"] == expected["topic"]]
    assert records[0]["props"]["INNER_MULTI_QUEUE_OFFSET"] == expected["inner_multi_queue_offset_of_first"]
    units = {(line["topic"], line["queueId"]): line["units"] for line in lines if line["type"] == "queue"}
    for topic, queue_id in expected["queues"]:
        assert [unit.split(":")[1] for unit in units[topic, queue_id]] == [str(first["offset"]), str(second["offset"])]


def test_failures_say_why(java_store, golden_copy, tmp_path):
    store = golden_copy("base")
    wrong = {**golden.geometry("base"), "mapped_file_size_commit_log": 8192}
    with pytest.raises(PeerError, match="length not matched"):
        java_store.dump(store, wrong)
    with pytest.raises(PeerError, match="no option mappedFileSizeComitLog"):
        java_store.dump(store, extra={"mappedFileSizeComitLog": 1})
    with pytest.raises(PeerError, match="unknown field tpoic"):
        java_store.write(tmp_path / "new", golden.geometry("broker"), [{"tpoic": "T"}])
    with pytest.raises(PeerError, match="maxNum is missing"):
        java_store.ask(store, golden.geometry("base"), [{"op": "query", "topic": "T", "key": "k"}])
    with pytest.raises(ValueError, match="index_tags=False"):
        java_store.write(tmp_path / "new", golden.geometry("base"), [])
    with pytest.raises(NotADirectoryError):
        java_store.dump(tmp_path / "nothing here")
    with pytest.raises(PeerError, match="no answer within"), JavaStore(timeout=0.01) as hasty:
        hasty.dump(store, golden.geometry("base"))


def test_refused_message_is_a_status(java_store, tmp_path):
    config = golden.geometry("broker")
    message = {"topic": "T", "properties": {"KEYS": "k" * 40000}}
    (answer,) = java_store.write(tmp_path / "store", config, [message], kill=True)
    assert answer["status"] == "PROPERTIES_SIZE_EXCEEDED"


def test_copy_store_keeps_bytes_and_holes(base, tmp_path):
    copy = copy_store(base, tmp_path / "copy")
    files = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    assert files == {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    for path in files:
        assert (copy / path).read_bytes() == (base / path).read_bytes()
        assert (copy / path).stat().st_blocks <= (base / path).stat().st_blocks + 8
