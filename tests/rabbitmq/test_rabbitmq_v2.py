"""Queue indexes of version 2, against what a real node left and against plain `struct`.

Owns: the golden case, made files of every kind of entry, the padded terms of 4.x, damage of every bit, and a directory in the
middle of a conversion.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import classic_queue_oracle as oracle
import golden_rabbitmq
import numpy as np
import pytest

from rmqstore.rabbitmq import Vhost, _messages, dets, repair, verify
from rmqstore.rabbitmq.batches import Batches
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.live_index import JoinedIndex
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2, read_segment_v2, read_store_v2
from rmqstore.rabbitmq.term import Atom

CASE = "19-clean-v2"


def message_id(number: int) -> bytes:
    return hashlib.md5(b"%d" % number).digest()


def term_of(number: int) -> bytes:
    return oracle.message_term(b"body %d" % number, message_id(number))


def golden_queue(golden_vhost):
    vhost = golden_vhost(CASE)
    queue = golden_rabbitmq.manifest(CASE)["queues"]["q"]
    dets = oracle.recovery_terms(oracle.parse_dets((vhost / "recovery.dets").read_bytes()))
    return vhost, queue, vhost / "queues" / queue["dir"], dets[queue["dir"]]


def test_the_golden_queue(golden_vhost):
    vhost, queue, path, terms = golden_queue(golden_vhost)
    index = QueueIndexV2.open(path, terms=terms)
    assert not index.problems
    published = golden_rabbitmq.published(CASE, "q")
    live = golden_rabbitmq.seqs(queue["expect_live_seqs"])
    entries = list(index)
    assert [entry.seq_id for entry in entries] == live and index.depth == len(index) == len(live)
    assert index.next_seq_id == queue["next_seq"]
    recovered = queue["node_recovered"]["messages"]
    with MessageStore.open(vhost / "msg_store_persistent", read_only=True) as store:
        for entry, said in zip(entries, recovered, strict=True):
            message = store.read(entry.msg_id) if entry.message is None else Message.from_term(entry.message)
            assert message.msg_id == entry.msg_id
            known = published[entry.seq_id]
            assert len(message.body) == entry.size == known["len"] == said["len"]
            assert hashlib.sha256(message.body).hexdigest()[:16] == known["sha256_16"] == said["sha256_16"]
            assert entry.persistent == known["persistent"] and entry.delivered == said["redelivered"]
            assert (entry.expiry is not None) == ("expiration_ms" in known)
            assert message.properties.get("expiration") == known.get("expiration_ms")
        ids = {entry.msg_id for entry in entries if entry.message is None}
        assert {one.tobytes() for one in index.references()} == ids == set(store)
    # After a crash everything counts as delivered.
    assert all(entry.delivered for entry in QueueIndexV2.open(path))


def test_the_golden_files_against_plain_struct(golden_vhost):
    _, _, path, _ = golden_queue(golden_vhost)
    data = (path / "0.qi").read_bytes()
    first, end, entries = oracle.parse_qi(data)
    assert oracle.encode_qi(first, end, entries, len(data)) == data
    segment = read_segment_v2(path / "0.qi")
    assert (segment.first, segment.end) == (first, end) and not segment.problems
    assert segment.seq_id.tolist() == [entry.seq for entry in entries]
    fields = segment.entries
    assert (fields["flags"] & 1).tolist() == [entry.persistent for entry in entries]
    assert fields["location"].tolist() == [entry.place for entry in entries]
    assert fields["size"].tolist() == [entry.size for entry in entries]
    assert fields["expiry"].tolist() == [entry.expiry for entry in entries]
    for row, entry in enumerate(entries):
        if entry.place == 1:
            assert fields["msg_id"][row].tobytes() == entry.msg_id
        else:
            assert (fields["offset"][row], fields["term_size"][row]) == (entry.offset, entry.term_size)
    store = (path / "0.qs").read_bytes()
    records = {offset: (term, crc) for offset, term, crc in oracle.parse_qs(store)[2]}
    for entry in entries:
        if entry.place == 2:
            term, crc = records[entry.offset]
            assert len(term) == entry.term_size and crc == zlib.crc32(term) & 0xFFFF


def made(path, *, padding: int = 0, crc: bool = True, number: int = 0, first: int = 0, end: int = 4096) -> list[int]:
    """A queue of all kinds of entries; the live sequence ids."""
    path.mkdir(exist_ok=True)
    store = bytearray(struct.pack(">IBQQ", 0x52435153, 2, first, end).ljust(64, b"\0"))
    entries = []
    for rel in range(10):
        seq = first + rel
        if rel in (3, 4):
            continue
        if rel % 3 == 1:
            entries.append(oracle.EntryV2(seq, True, 1, message_id(seq), 0, 0, 5000, 0))
            continue
        term = term_of(seq) + bytes(padding)
        offset = len(store)
        check = zlib.crc32(term) & 0xFFFF if crc else 0
        store += struct.pack(">IBHB", len(term), crc, check, 0) + term
        entries.append(
            oracle.EntryV2(seq, rel != 5, 2, b"", offset, len(term), len(b"body %d" % seq), 1_700_000_000_000_000 * rel)
        )
    (path / f"{number}.qi").write_bytes(oracle.encode_qi(first, end, entries, 64 + 32 * 12))
    (path / f"{number}.qs").write_bytes(store)
    return [entry.seq for entry in entries]


@pytest.mark.parametrize("padding", [0, 1, 500])
@pytest.mark.parametrize("crc", [True, False])
def test_made_files(tmp_path, padding, crc):
    path = tmp_path / "queue"
    live = made(path, padding=padding, crc=crc) + made(path, padding=padding, crc=crc, number=1, first=4096, end=8192)
    index = QueueIndexV2.open(path)
    assert not index.problems and index.next_seq_id == 8192
    entries = list(index)
    assert [entry.seq_id for entry in entries] == live
    for entry in entries:
        stored = entry.seq_id % 4096 % 3 == 1
        assert entry.msg_id == message_id(entry.seq_id)
        assert entry.message == (None if stored else term_of(entry.seq_id))
        rel = entry.seq_id % 4096
        assert entry.expiry == (None if stored or not rel else 1_700_000_000_000 * rel)
        assert entry.persistent == (rel != 5)
        with open(entry.path, "rb") as file:
            data = file.read()
        if stored:
            assert data[entry.pos + 4 : entry.pos + 20] == entry.msg_id
        else:
            assert data[entry.pos + 8 :].startswith(entry.message)
    assert {one.tobytes() for one in index.references()} == {entry.msg_id for entry in entries if entry.message is None}
    said = QueueIndexV2.open(path, terms={"next_seq_id": 4100, "next_deliver_seq_id": 5})
    assert said.next_seq_id == 4100
    assert [entry.seq_id for entry in said if entry.delivered] == [seq for seq in live if seq < 5]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"next_seq_id": Atom("undefined")}, "bad_terms"),
        ({"next_deliver_seq_id": [1]}, "bad_terms"),
        ({"next_seq_id": -5}, "bad_terms"),
        ({"next_seq_id": 1 << 80}, "bad_terms"),
        ({"next_deliver_seq_id": 2.5}, "bad_terms"),
        ({"v2_index_state": 5}, "bad_terms"),
        ({"v2_index_state": (1, {0: 20})}, "bad_terms"),
        ({"v2_index_state": (2, [0])}, "bad_terms"),
        ({"v2_index_state": (2, {Atom("a"): 20})}, "bad_terms"),
        ({"v2_index_state": (2, {0: 7})}, "segment_count_mismatch"),
        ({"v2_index_state": (2, {0: 20, 1: 1})}, "segment_count_mismatch"),
        ({"next_seq_id": 5}, "next_seq_id_too_low"),
        ({"persistent_count": 1}, "count_mismatch"),
        ({"persistent_bytes": 1}, "count_mismatch"),
    ],
)
def test_recovery_terms_that_a_node_would_not_take(golden_vhost_copy, tmp_path, change, kind):
    # Each was a ValueError or TypeError of every command, or nothing was said.
    path = golden_vhost_copy("19-clean-v2")
    terms = dets.recovery_terms(dets.read(path / "recovery.dets"))
    changed = (dets.recovery_object(name, {**each, **change}) for name, each in terms.items())
    (path / "recovery.dets").write_bytes(dets.encode(changed))
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        assert sum(1 for _ in queue.messages()) == 20
        (index,) = vhost.directories[0].indexes
        if kind == "bad_terms":
            assert not vhost.directories[0].clean and not index.recovered_clean
            assert (index.next_seq_id, index.next_deliver_seq_id) == (4096, 4096)
            assert next(iter(change)) in index.problems[0].detail
    assert [finding.kind for finding in verify(path)] == [kind]
    assert repair(path, tmp_path / "repaired").messages == 20 and not list(verify(tmp_path / "repaired"))


def test_damage_is_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "queue"
    live = made(path)
    index_data, store_data = (path / "0.qi").read_bytes(), (path / "0.qs").read_bytes()

    def opened(qi=index_data, qs=store_data):
        (path / "0.qi").write_bytes(qi)
        (path / "0.qs").unlink(missing_ok=True)
        if qs is not None:
            (path / "0.qs").write_bytes(qs)
        index = QueueIndexV2.open(path)
        return list(index), [problem.kind for problem in index.problems]

    own = [seq for seq in live if seq % 3 != 1]
    entries, kinds = opened(qs=None)
    assert [entry.seq_id for entry in entries] == live and kinds == ["missing_store"]
    assert all(entry.message is None for entry in entries)
    entries, kinds = opened(qs=store_data[:-1])
    assert kinds == ["outside"] and [entry.seq_id for entry in entries if entry.message] == own[:-1]
    for at, kind in ((64, "size_mismatch"), (64 + 8, "bad_crc"), (64 + 5, "bad_crc"), (0, "bad_head"), (4, "bad_head")):
        entries, kinds = opened(qs=store_data[:at] + bytes([store_data[at] ^ 1]) + store_data[at + 1 :])
        assert kinds == [kind]
        assert [entry.seq_id for entry in entries if entry.message] == own[kind != "bad_head" :]
    for at, kind in (
        (64, "bad_status"),
        (64 + 3, "bad_location"),
        (3, "bad_head"),
        (64 + 10, "outside"),
        (64 + 15, "size_mismatch"),
    ):
        entries, kinds = opened(qi=index_data[:at] + bytes([index_data[at] ^ 4]) + index_data[at + 1 :])
        assert kind in kinds, at
    assert opened(qi=index_data[:-5])[1] == ["torn_entry"]
    assert opened(qi=index_data[:13] + struct.pack(">Q", 4) + index_data[21:])[1] == ["beyond_range"]
    assert opened(qi=b"")[1] == ["bad_head"]
    entries, kinds = opened(qi=index_data[:67] + b"\0" + index_data[68:])
    assert kinds == ["memory_only"] and entries[0].message is None
    (path / "0.qi").unlink()
    index = QueueIndexV2.open(path)
    assert not list(index) and [problem.kind for problem in index.problems] == ["store_without_index"]
    # An acknowledged entry is zeros, after a crash only its status.
    entries, kinds = opened(qi=index_data[:64] + b"\0" + index_data[65:])
    assert [entry.seq_id for entry in entries] == live[1:] and not kinds


@pytest.mark.parametrize("how", ["copied", "old copy", "renamed", "head"])
def test_a_file_under_another_number(golden_vhost_copy, tmp_path, how):
    # Its head was believed: copied files gave every message twice, and nothing was said.
    path = golden_vhost_copy(CASE)
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        sound = [(message.seq_id, message.body) for message in queue.messages()]
        depth = queue.depth
    (folder,) = path.glob("queues/*")
    for ending in ("qi", "qs"):
        file = folder / f"0.{ending}"
        if how == "renamed":
            file.rename(folder / f"7.{ending}")
        elif how != "head":
            (folder / f"7.{ending}").write_bytes(file.read_bytes())
    data = bytearray((folder / "0.qi").read_bytes()) if how != "renamed" else b""
    if how == "old copy":
        # Its first message was acknowledged since.
        data[64 + 32 * sound[0][0]] = 0
        sound, depth = sound[1:], depth - 1
    elif how == "head":
        struct.pack_into(">QQ", data, 5, 4096, 8192)
    if data:
        (folder / "0.qi").write_bytes(data)
    shift = 7 * 4096 if how == "renamed" else 0
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        assert [(message.seq_id - shift, message.body) for message in queue.messages()] == sound
        assert queue.depth == depth
    kinds = {finding.kind for finding in verify(path)}
    assert "range_mismatch" in kinds and ("copied_segment" in kinds) == ("cop" in how)
    report = repair(path, tmp_path / "repaired")
    # The terms count the message that was acknowledged behind the node's back.
    assert (report.messages, report.lost) == (len(sound), how == "old copy")
    assert list(verify(tmp_path / "repaired")) == []


def test_a_name_or_a_head_beyond_all_sequence_ids(tmp_path):
    made(tmp_path, number=10**17)
    kinds = [problem.kind for problem in QueueIndexV2.open(tmp_path).problems]
    assert kinds == ["range_mismatch", "bad_name", "beyond_range"]
    assert read_segment_v2(oracle.encode_qi(0, 2**60, [], 64)).problems[0].kind == "bad_head"


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit(tmp_path, step):
    path = tmp_path / "queue"
    live = made(path)
    expected = {entry.seq_id: entry for entry in QueueIndexV2.open(path)}
    for name in ("0.qi", "0.qs"):
        data = bytearray((path / name).read_bytes())
        for bit in range(0, 8 * len(data), step):
            data[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(data)
            data[bit // 8] ^= 1 << bit % 8
            index = QueueIndexV2.open(path)
            entries = list(index)
            if name == "0.qs":
                # The check sum has 16 bits, but one bit never gets past it.
                wrong = [entry for entry in entries if entry != expected[entry.seq_id]]
                assert len(entries) == len(live) and all(entry.message is None for entry in wrong) and len(wrong) <= 1
                assert index.problems or not wrong
            elif bit >= 64 * 8:
                assert sum(entry != expected.get(entry.seq_id) for entry in entries) <= 1
        (path / name).write_bytes(data)


def test_the_check_of_a_store_believes_no_number():
    data = bytes(64) + struct.pack(">IBHB", 3, 0, 0, 0) + b"abc"
    numbers = [-(2**63), -1, 0, 1, 3, 63, 64, 65, 67, 72, len(data), 2**31, 2**63 - 1]
    pos, size = (column.ravel() for column in np.meshgrid(np.array(numbers, np.int64), np.array(numbers, np.int64)))
    found, _, _ = _messages.check_queue_store(data, pos.copy(), size.copy())
    good = (pos == 64) & (size == 3)
    assert (found[good] == 0).all() and (found[~good] != 0).all()
    assert (_messages.check_queue_store(b"", pos.copy(), size.copy())[0] == _messages.QueueStoreVerdict.QUEUE_STORE_OUTSIDE).all()
    with pytest.raises(ValueError):
        _messages.check_queue_store(data, pos.copy(), size[:1].copy())


def test_no_index_can_be_made_by_hand_and_a_missing_directory_is_named(tmp_path):
    with pytest.raises(TypeError):
        QueueIndexV2()
    with pytest.raises(FileNotFoundError):
        QueueIndexV2.open(tmp_path / "none")
    assert QueueIndexV2.open(tmp_path).depth == 0 == QueueIndexV2.open(tmp_path).next_seq_id


def test_both_versions_in_one_directory(tmp_path):
    path = tmp_path / "queue"
    with QueueIndex.open(path, create=True) as index:
        for seq in (0, 2, 11, 20, 21):
            index.publish(message=oracle.message_term(b"old", message_id(seq)), seq_id=seq)
    live = made(path)
    version_2 = list(QueueIndexV2.open(path))
    with QueueIndex.open(path, read_only=True) as index:
        joined = JoinedIndex([index, QueueIndexV2.open(path)])
        entries = list(joined)
        assert [entry.seq_id for entry in entries] == [*live, 11, 20, 21]
        assert entries[:-3] == version_2 and entries[-3:] == list(index)[-3:]
        (batch,) = Batches(QueueName("/", "q"), lambda persistent: None, ["seq_id", "body", "msg_id"]).of_index(joined)
        whole = [entry for entry in entries if entry.message is not None]
        assert batch["seq_id"].to_pylist() == [entry.seq_id for entry in whole]
        assert batch["msg_id"].to_pylist() == [entry.msg_id for entry in whole]
        assert batch["body"].to_pylist() == [Message.from_term(entry.message).body for entry in whole]


def test_an_expiry_of_64_bits_in_a_batch(tmp_path):
    index = QueueIndex.open(tmp_path / "queue", create=True)
    expiries = (2**64 - 1, 2**63 - 1, 0)
    for expiry_us in expiries:
        index.publish(message=Message(b"body"), expiry_us=expiry_us)
    (batch,) = Batches(QueueName("/", "q"), lambda persistent: None, ["expiry"]).of_index(index)
    assert batch["expiry"].cast("int64").to_pylist() == [each // 1000 or None for each in expiries]
    index.abandon()


def terms_in(data: bytes, found) -> list[bytes]:
    return [data[at + 8 : at + 8 + size] for at, size in zip(found.pos.tolist(), found.term_size.tolist())]


def test_a_store_by_itself(golden_vhost, tmp_path):
    _, _, path, _ = golden_queue(golden_vhost)
    data = (path / "0.qs").read_bytes()
    expected = oracle.parse_qs(data)[2]
    found = read_store_v2(path / "0.qs")
    assert not found.problems and not found.verdict.any()
    assert found.pos.tolist() == [offset for offset, _, _ in expected]
    assert terms_in(data, found) == [term for _, term, _ in expected]
    queue = tmp_path / "queue"
    made(queue, padding=9)
    ids = [Message.from_term(term).msg_id for term in terms_in((queue / "0.qs").read_bytes(), read_store_v2(queue / "0.qs"))]
    assert ids == [entry.msg_id for entry in QueueIndexV2.open(queue) if entry.message is not None]
    for size in range(0, len(data), 7):
        cut = read_store_v2(data[:size])
        whole = [term for offset, term, _ in expected if offset + 8 + len(term) <= size]
        assert terms_in(data, cut) == whole and len(cut.problems) <= 1
    broken = bytearray(data)
    broken[expected[0][0] + 20] ^= 1
    found = read_store_v2(bytes(broken))
    assert found.verdict.tolist() == [_messages.QueueStoreVerdict.QUEUE_STORE_CRC] + [0] * (len(expected) - 1)
    assert [problem.kind for problem in found.problems] == ["bad_crc"]
