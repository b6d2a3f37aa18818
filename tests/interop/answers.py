"""What a store holds, said by rmqstore in the words of the peer's `dump`, and compared with what the peer says.

Owns the comparison of two dumps and of a dump with what was acknowledged.  A store counts as understood when every
record, unit and query answer that one side gives of it equals the other's.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections import Counter

from rmqstore import MessageStore
from rmqstore.commitlog.log_walk import Blank
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.message import host_to_bytes

__all__ = ["assert_same", "assert_whole", "differences", "dump", "lines_of"]


def host_bytes(text: str) -> bytes:
    address, _, port = text.rpartition("/")[2].rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + struct.pack(">i", int(port))


def normal(line: dict) -> dict:
    """A line of the peer with the hosts as bytes in hex; one of our own stays as it is."""
    line = dict(line)
    for name in ("bornHost", "storeHost"):
        # Java prints an address as "/1.2.3.4:5".
        if "/" in line.get(name, ""):
            line[name] = host_bytes(line[name]).hex()
    return line


def dump(store: MessageStore) -> list[dict]:
    """What the peer's `dump` says of a store, said by rmqstore."""
    lines: list[dict] = [
        {"type": "store", "minPhy": store.commit_log.min_offset, "maxPhy": store.commit_log.max_offset}
    ]
    keys: set[tuple[str, str]] = set()
    tags: set[tuple[str, str]] = set()
    for entry in store.commit_log.entries():
        if isinstance(entry, Blank):
            lines.append({"type": "blank", "offset": entry.phy_offset, "size": entry.size})
            continue
        line = {
            "type": "msg", "offset": entry.phy_offset, "size": entry.size, "topic": entry.topic,
            "queueId": entry.queue_id, "queueOffset": entry.queue_offset, "flag": entry.flag, "sysFlag": entry.sys_flag,
            "born": entry.born_timestamp, "store": entry.store_timestamp,
            "bornHost": host_to_bytes(entry.born_host).hex(), "storeHost": host_to_bytes(entry.store_host).hex(),
            "reconsume": entry.reconsume_times, "prepared": entry.prepared_transaction_offset, "crc": entry.crc,
            "bodyLen": len(entry.body_stored), "bodyCrc": zlib.crc32(entry.body_stored) & 0x7FFFFFFF,
            "msgId": entry.msg_id,
        }  # fmt: skip
        if entry.properties:
            line["props"] = entry.properties
        lines.append(line)
        keys |= {(entry.topic, key) for key in [*entry.keys, entry.unique_key] if key}
        if entry.tags:
            tags.add((entry.topic, entry.tags))
    for topic in store.topics():
        for queue_id in store.queue_ids(topic):
            queue = store.queues.find(topic, queue_id)
            low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
            units = [queue.unit(queue_offset) for queue_offset in range(low, high)]
            lines.append(
                {
                    "type": "queue", "topic": topic, "queueId": queue_id,
                    "kind": "BatchCQ" if isinstance(queue, BatchConsumeQueue) else "SimpleCQ",
                    "min": low, "max": high,
                    "units": [
                        f"{unit.queue_offset}:{unit.phy_offset}:{unit.size}:{queue.tags_code(unit)}" for unit in units
                    ],
                }
            )  # fmt: skip
    for topic, key in keys:
        lines.append({"type": "query", "topic": topic, "key": key, "offsets": store.query_offsets(topic, key)})
    for topic, tag in tags:
        offsets = store.query_offsets(topic, tag, index_type="T")
        lines.append({"type": "query", "topic": topic, "key": tag, "indexType": "T", "offsets": offsets})
    return lines


def place(line: dict) -> tuple:
    """What a line is about: each thing comes once in a dump."""
    return tuple(line.get(name) for name in ("type", "offset", "topic", "queueId", "key", "indexType"))


def differences(ours: list[dict], theirs: list[dict]) -> list:
    """Pairs of lines that say different things of one thing."""
    for lines in (ours, theirs):
        assert [name for name, count in Counter(map(place, lines)).items() if count > 1] == []
    mine = {place(line): line for line in ours}
    his = {place(line): normal(line) for line in theirs}
    return [(mine.get(name), his.get(name)) for name in {**mine, **his} if mine.get(name) != his.get(name)]


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    assert differences(ours, theirs) == []
    kinds = Counter(line["type"] for line in theirs)
    assert kinds["msg"] and kinds["queue"] and kinds["query"]


def lines_of(lines: list[dict], kind: str) -> list[dict]:
    """The lines of one type, in their order, with hosts in one form."""
    return [normal(line) for line in lines if line["type"] == kind]


def assert_whole(lines: list[dict], acknowledged: list[tuple[str, int, int, int]]) -> None:
    """A dump holds what was acknowledged, all of it once, nothing else, in the log and in the queues.

    Parameters
    ----------
    lines : list of dict
        A dump by either side.
    acknowledged : list of tuple
        Topic, queue id, queue offset and phy offset of every message, in the order of the log.
    """
    found = [(line["topic"], line["queueId"], line["queueOffset"], line["offset"]) for line in lines_of(lines, "msg")]
    assert found == acknowledged
    wanted: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for topic, queue_id, queue_offset, phy_offset in acknowledged:
        wanted.setdefault((topic, queue_id), []).append((queue_offset, phy_offset))
    queues = {(line["topic"], line["queueId"]): line for line in lines_of(lines, "queue")}
    assert set(queues) == set(wanted)
    for name, places in wanted.items():
        units = [unit.split(":") for unit in queues[name]["units"]]
        assert [(int(unit[0]), int(unit[1])) for unit in units] == places, name
        assert [queue_offset for queue_offset, _ in places] == list(range(len(places))), name
