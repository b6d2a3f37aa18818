"""The message store against what a real node left, against plain `struct`, and against a dict.

Owns: every golden .rdq byte for byte, the clean state's tables, the merge of a real node replayed, scans of damaged files, the
location table, and a hypothesis model of the store's life.  Dying at every step is `test_rabbitmq_message_store_crash`'s.
"""

from __future__ import annotations

import collections
import errno
import functools
import hashlib
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import threading

import classic_queue_oracle as oracle
import golden_rabbitmq
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmqstore._core import Region
from rmqstore.errors import (
    CorruptionError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreClosedError,
    StoreLockedError,
    StorePoisonedError,
)
from rmqstore.rabbitmq import _messages, message_files, message_recovery
from rmqstore.rabbitmq.clean_state import index_rows
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore, scan_file
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2

CASES = ("12-clean-msgstore", "13-clean-fanout-refcount", "17-clean-lazy-transient", "19-clean-v2")
CLEAN = (*CASES, "20-clean-rdq-roll-16MiB")
ALL = (*CLEAN, "32-kill9-gc-merged-files")
MERGED = "32-kill9-gc-merged-files"


def message_id(number: int) -> bytes:
    return hashlib.md5(b"%d" % number).digest()


def term_of(number: int, size: int = 40) -> bytes:
    return oracle.message_term(b"%d." % number + b"x" * size, message_id(number))


def read_all(path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


def filled(path, count: int, *, limit: int = 1000, size: int = 40, **options) -> MessageStore:
    store = MessageStore.open(path, file_size_limit=limit, **options)
    store.write_many([message_id(n) for n in range(count)], [term_of(n, size) for n in range(count)])
    return store


# ------------------------------------------------------------------------------------------------------ golden stores


def stores_of(vhost) -> list:
    return [vhost / name for name in ("msg_store_persistent", "msg_store_transient") if (vhost / name).is_dir()]


def scanned_bytewise(path, references) -> list[int]:
    table = _messages.LocationTable()
    message_recovery.refer(table, references)
    region = message_recovery.map_file(str(path))
    if region is None:
        return []
    try:
        table.scan(region, 0, _messages.MessageScan.SCAN_BYTEWISE)
    finally:
        region.close()
    return sorted(table.columns(0)[3].tolist())


@pytest.mark.parametrize("case", ALL)
def test_every_golden_file_is_read_and_written_again(golden_vhost, case):
    met = 0
    for folder in stores_of(golden_vhost(case)):
        for path in folder.glob("*.rdq"):
            data = path.read_bytes()
            records = oracle.parse_rdq(data).records
            found = scan_file(path)
            assert not found.problems and found.end == len(data)
            assert found.pos.tolist() == [record.begin for record in records]
            assert found.size.tolist() == [len(record.term) for record in records]
            assert [ids.tobytes() for ids in found.msg_id] == [record.msg_id for record in records]
            assert set(found.flags.tolist()) <= {1}
            assert b"".join(message_files.encode_record(r.msg_id, r.term) for r in records) == data
            salvaged = scan_file(path, "salvage")
            assert salvaged.pos.tolist() == found.pos.tolist() and set(salvaged.flags.tolist()) <= {1}
            wanted = {record.msg_id: 1 for record in records}
            assert scanned_bytewise(path, wanted) == found.pos.tolist()
            met += len(records)
    assert met


@pytest.mark.parametrize("case", CLEAN)
def test_the_clean_state_is_taken(golden_vhost, case):
    for folder in stores_of(golden_vhost(case)):
        with MessageStore.open(folder, read_only=True) as store:
            assert store.clean and store.dirty_reason is None and not store.problems
            assert store.client_refs == oracle.parse_clean((folder / "clean.dot").read_bytes())
            summary = oracle.parse_ets((folder / "file_summary.ets").read_bytes())[1:-1]
            assert {n: tuple(s) for n, s in store.files.items()} == {row[1]: (row[2], row[5]) for row in summary}
            index = oracle.parse_ets((folder / "msg_store_index.ets").read_bytes())[1:-1]
            places = store.locations()
            rows = zip(*(column.tolist() for column in places[1:]), strict=True)
            found = {ids.tobytes(): row for ids, row in zip(places.msg_id, rows, strict=True)}
            assert found == {row[1]: tuple(row[2:]) for row in index}
            for msg_id in store:
                message = store.read(msg_id)
                assert message.msg_id == msg_id
                file, pos, size = found[msg_id][1:]
                assert store.read_term(msg_id) == (folder / f"{file}.rdq").read_bytes()[pos + 24 : pos + size - 1]


@pytest.mark.parametrize("case", CLEAN)
def test_a_scan_finds_what_the_clean_state_says(golden_vhost, tmp_path, case):
    for folder in stores_of(golden_vhost(case)):
        copy = tmp_path / folder.name
        with MessageStore.open(folder, read_only=True) as store:
            files, places = store.files, store.locations()
        shutil.copytree(folder, copy)
        (copy / "clean.dot").unlink()
        used = places.refcount > 0
        references = {
            ids.tobytes(): count for ids, count in zip(places.msg_id[used], places.refcount[used].tolist(), strict=True)
        }
        for given_references in (references, lambda: np.repeat(places.msg_id[used], places.refcount[used], axis=0)):  # noqa: B023
            with MessageStore.open(copy, read_only=True, references=given_references) as store:
                assert not store.clean and "clean.dot" in store.dirty_reason
                # Bytes after the last message in use of the highest file do not count after a cut.
                assert {n: s.valid_size for n, s in store.files.items()} == {n: s.valid_size for n, s in files.items()}
                found = store.locations()
                for name in found._fields:
                    assert getattr(found, name).tolist() == getattr(places, name)[used].tolist(), name


@pytest.mark.parametrize("case", CASES)
def test_the_clean_state_is_written_as_the_node_wrote_it(golden_vhost_copy, case):
    for folder in stores_of(golden_vhost_copy(case)):
        before = read_all(folder)
        with MessageStore.open(folder) as store:
            assert not [name for name in os.listdir(folder) if not name.endswith(".rdq")]
            store.close(store.client_refs)
        after = read_all(folder)
        assert after.keys() == before.keys()
        assert after["clean.dot"] == before["clean.dot"]
        assert after["0.rdq"] == before["0.rdq"]
        for name in ("file_summary.ets", "msg_store_index.ets"):
            ours, nodes = oracle.parse_ets(after[name]), oracle.parse_ets(before[name])
            # The order of a hash table is the node's own; its header has its process and its memory.
            assert sorted(ours[1:-1], key=repr) == sorted(nodes[1:-1], key=repr)
            assert ours[-1] == nodes[-1]
            assert oracle.encode_ets(ours) == after[name]
            said, known = dict(ours[0]), dict(nodes[0])
            assert {key: value for key, value in known.items() if key in said} == said
        if case != "17-clean-lazy-transient":
            assert set(split_items(after["file_summary.ets"])[1:]) == set(split_items(before["file_summary.ets"])[1:])
            assert set(split_items(after["msg_store_index.ets"])[1:]) == set(
                split_items(before["msg_store_index.ets"])[1:]
            )


def split_items(data: bytes) -> list[bytes]:
    items, at = [], 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        items.append(data[at : at + 8 + size])
        at += 8 + size
    return items


def test_the_nodes_merge_is_repeated_byte_for_byte(golden_vhost, tmp_path):
    folder = golden_vhost(MERGED) / "msg_store_persistent"
    published = golden_rabbitmq.published(MERGED, "q")
    queue = golden_rabbitmq.manifest(MERGED)["queues"]["q"]
    by_body = {entry["sha256_16"]: seq for seq, entry in published.items()}
    terms: dict[int, tuple[bytes, bytes]] = {}
    for path in folder.glob("*.rdq"):
        for record in oracle.parse_rdq(path.read_bytes()).records:
            body = oracle.message_of(oracle.decode(record.term)).body
            terms[by_body[hashlib.sha256(body).hexdigest()[:16]]] = (record.msg_id, record.term)
    size = {len(term) for _, term in terms.values()}
    assert len(size) == 1 and len(terms) == 43
    for seq in published.keys() - terms.keys():
        # Of what the node merged away only the size is known, which was the same for all.
        term = oracle.message_term(b"gone", message_id(seq))
        term = oracle.message_term(b"x" * (size.copy().pop() - len(term) + 4), message_id(seq))
        assert len(term) in size
        terms[seq] = (message_id(seq), term)
    with MessageStore.open(tmp_path / "store", file_size_limit=65536) as store:
        for seq in range(100):
            assert store.write(*terms[seq])
        assert list(store.files) == list(range(10))
        store.remove_many([terms[seq][0] for seq in golden_rabbitmq.seqs(queue["acked"])])
        # The node merged by itself when more than half of all bytes was garbage.
        for left in (0, 2, 4, 6):
            message_recovery.merge(store._files, left, left + 1)
    assert read_all(tmp_path / "store") == read_all(folder)


# ------------------------------------------------------------------------------------------------------- life of a store


def test_files_roll_after_the_message_that_reaches_the_limit(tmp_path):
    record = len(term_of(0)) + 25
    with filled(tmp_path, 10, limit=2 * record + 1) as store:
        assert [size.file_size for size in store.files.values()] == [3 * record] * 3 + [record]
        assert max(store.files) == 3
        for n in range(10):
            assert store.read_term(message_id(n)) == term_of(n)
    with filled(tmp_path / "exact", 4, limit=2 * record) as store:
        assert [size.file_size for size in store.files.values()] == [2 * record, 2 * record, 0]


def test_one_by_one_and_in_batches_give_the_same_bytes(tmp_path):
    numbers = [0, 1, 1, 2, 0, 3, 4, 4, 5, 6]
    with MessageStore.open(tmp_path / "one", file_size_limit=700) as store:
        new = sum(store.write(message_id(n), term_of(n)) for n in numbers)
    with MessageStore.open(tmp_path / "many", file_size_limit=700) as many:
        assert many.write_many([message_id(n) for n in numbers], [term_of(n) for n in numbers]) == new == 7
        assert [many.refcount(message_id(n)) for n in range(8)] == [2, 2, 1, 1, 2, 1, 1, 0]
    assert read_all(tmp_path / "one") == read_all(tmp_path / "many")


def test_a_known_message_only_gets_a_reference(tmp_path):
    with filled(tmp_path, 2) as store:
        size = store.file_size
        assert not store.write(message_id(0), term_of(0)) and store.refcount(message_id(0)) == 2
        assert store.remove(message_id(0)) == 1 and store.valid_size == size
        assert store.remove(message_id(0)) == 0 and store.valid_size == size - len(term_of(0)) - 25
        assert message_id(0) not in store and message_id(1) in store
        for call in (store.read, store.read_term, store.remove):
            with pytest.raises(KeyError):
                call(message_id(0))
            with pytest.raises(KeyError):
                call(b"short")
        # §8.3: as long as the file is there, nobody needs to write the data again.
        assert 0 in store.locations().refcount
        assert not store.write(message_id(0), term_of(0)) and store.file_size == size == store.valid_size
        assert store.read_term(message_id(0)) == term_of(0)


def test_a_file_without_messages_goes_and_what_was_in_it_is_written_again(tmp_path):
    with filled(tmp_path, 12, limit=600) as store:
        numbers = list(store.files)
        places = store.locations()
        first = [ids.tobytes() for ids in places.msg_id[places.file == 0]]
        store.remove_many(first)
        assert list(store.files) == numbers[1:] and not (tmp_path / "0.rdq").exists()
        assert store.write(first[0], term_of(0)) and store.read_term(first[0]) == term_of(0)
        # The current file stays, whatever is in it.
        store.remove_many(list(store))
        assert list(store.files) == [max(store.files)] == [int(name[:-4]) for name in os.listdir(tmp_path)]


def test_merging_puts_records_together_in_their_order(tmp_path):
    record = len(term_of(0)) + 25
    with filled(tmp_path, 13, limit=4 * record) as store:
        assert list(store.files) == [0, 1, 2, 3]
        for n in (1, 2, 5, 6):
            store.remove(message_id(n))
        assert store.merge() == 1
        assert list(store.files) == [0, 2, 3]
        expected = b"".join(oracle.rdq_record(message_id(n), term_of(n)) for n in (0, 3, 4, 7))
        assert (tmp_path / "0.rdq").read_bytes() == expected
        assert tuple(store.files[0]) == (len(expected), len(expected))
        for n in (0, 3, 4, 7, 8, 12):
            assert store.read_term(message_id(n)) == term_of(n)
        # Their entries went with their files.
        assert not (store.locations().refcount == 0).any()
        store.remove(message_id(8))
        assert sorted(os.listdir(tmp_path)) == ["0.rdq", "2.rdq", "3.rdq"]
        assert store.merge() == 0  # Three and four do not fit into one.


def test_without_references_nothing_is_lost_and_with_them_the_rest_is_garbage(tmp_path):
    filled(tmp_path, 30, limit=600).close()
    before = read_all(tmp_path)
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert len(store) == 30 and store.dirty_reason == "there is no file_summary.ets"
    with MessageStore.open(tmp_path) as store:
        assert len(store) == 30
    assert read_all(tmp_path) == before
    wanted = {message_id(7): 2, message_id(8): 1, message_id(9999): 1}
    with MessageStore.open(tmp_path, references=wanted, read_only=True) as store:
        assert {msg_id: store.refcount(msg_id) for msg_id in store} == {message_id(7): 2, message_id(8): 1}
        assert [ids.tobytes() for ids in store.missing] == [message_id(9999)]
    assert read_all(tmp_path) == before
    highest = max(int(name[:-4]) for name in before)
    with MessageStore.open(tmp_path, references=wanted) as store:
        # The highest file stays and is cut to nothing, others without a message go.
        assert store.files[highest] == (0, 0) and len(store.files) <= 3
        assert store.write(message_id(9999), term_of(9999)) and store.refcount(message_id(7)) == 2


def test_the_highest_file_is_cut_behind_its_last_message(tmp_path):
    filled(tmp_path, 3, limit=10**6).close()
    record = len(term_of(0)) + 25
    references = {message_id(1): 1}
    with MessageStore.open(tmp_path, references=references, read_only=True) as store:
        assert (tmp_path / "0.rdq").stat().st_size == 3 * record
        assert store.read_term(message_id(1)) == term_of(1)
    with MessageStore.open(tmp_path, references=references) as store:
        assert (tmp_path / "0.rdq").stat().st_size == 2 * record
        store.write(message_id(5), term_of(5))
        assert store.locations().pos.tolist() == [record, 2 * record]


def test_of_two_records_of_one_id_the_last_counts(tmp_path):
    record = oracle.rdq_record(message_id(0), term_of(0, 10))
    last = oracle.rdq_record(message_id(0), oracle.message_term(b"last", message_id(0)))
    (tmp_path / "0.rdq").write_bytes(record + last)
    (tmp_path / "1.rdq").write_bytes(record)
    with MessageStore.open(tmp_path, references={message_id(0): 1}) as store:
        assert store.read(message_id(0)).body == b"last"
        assert store.files[0] == (len(last), len(record) + len(last))
        assert store.files[1] == (0, 0)
    (tmp_path / "0.rdq").write_bytes(record + last)
    assert scanned_bytewise(tmp_path / "0.rdq", {message_id(0): 1}) == [0]  # 3.13 and later: the first.


def test_clean_state_goes_with_the_first_opening_for_writing(tmp_path):
    store = filled(tmp_path, 5)
    refs = [bytes(16), bytes(range(16))]
    store.close(refs)
    clean = read_all(tmp_path)
    assert {"clean.dot", "file_summary.ets", "msg_store_index.ets"} <= clean.keys()
    with MessageStore.open(tmp_path, read_only=True, client_refs=reversed(refs)) as store:
        assert store.clean and store.client_refs == refs
    with MessageStore.open(tmp_path, read_only=True, client_refs=refs[:1]) as store:
        assert not store.clean and "other queues" in store.dirty_reason
    assert read_all(tmp_path) == clean
    store = MessageStore.open(tmp_path)
    assert store.clean and sorted(os.listdir(tmp_path)) == [name for name in clean if name.endswith(".rdq")]
    store.abandon()
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert not store.clean and len(store) == 5


def with_a_row_twice(data):
    header, *rows, _ = oracle.parse_ets(data)
    rows.append(rows[0])
    return oracle.encode_ets([header, *rows, [oracle.Atom("$end_of_table"), [(oracle.Atom("count"), len(rows))]]])


def test_a_clean_state_that_does_not_fit_is_not_taken(tmp_path):
    filled(tmp_path / "good", 12, limit=600).close([])
    good = read_all(tmp_path / "good")
    damages = {
        "clean.dot": lambda files: files.update({"clean.dot": files["clean.dot"][:20]}),
        "module": lambda files: files.update({"clean.dot": files["clean.dot"].replace(b"_ets_", b"_map_")}),
        # Made to bytes, a number would be as many zeros.
        "numbers for references": lambda files: files.update(
            {"clean.dot": b"{client_refs,[1%s]}.\n{index_module,rabbit_msg_store_ets_index}.\n" % (b"0" * 30)}
        ),
        "summary of another kind": lambda files: files.update({"file_summary.ets": files["msg_store_index.ets"]}),
        "row twice": lambda files: files.update({"file_summary.ets": with_a_row_twice(files["file_summary.ets"])}),
        "summary cut": lambda files: files.update({"file_summary.ets": files["file_summary.ets"][:-5]}),
        "index cut": lambda files: files.update({"msg_store_index.ets": files["msg_store_index.ets"][:-5]}),
        "index in the middle": lambda files: files.update(
            {"msg_store_index.ets": files["msg_store_index.ets"].replace(b"msg_location", b"msg_locatiom", 1)}
        ),
        "file missing": lambda files: files.pop("0.rdq"),
        "file short": lambda files: files.update({"0.rdq": files["0.rdq"][:-1]}),
        "file too many": lambda files: files.update({"99.rdq": b""}),
        "no index": lambda files: files.pop("msg_store_index.ets"),
        "rdt": lambda files: files.update({"0.rdt": b""}),
    }
    for name, damage in damages.items():
        files = dict(good)
        damage(files)
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        with MessageStore.open(folder, read_only=True) as store:
            assert not store.clean and store.dirty_reason, name
        assert read_all(folder) == files
        with MessageStore.open(folder) as store:
            assert not store.clean
            assert len(store) == 12 - (name == "file missing") * 3 - (name == "file short"), name


@pytest.mark.parametrize("fault", ["id", "files", "offset", "references"])
def test_a_clean_state_that_leads_elsewhere_gives_way_to_a_scan(tmp_path, fault):
    # Nothing in it says so; readers gave none of these messages, and repair dropped them.
    store = filled(tmp_path, 8, limit=300)
    ids = [message_id(n) for n in range(8)]
    if fault == "references":
        # The ack went with damage to the journal.  It depended on what was read before whether the message was there.
        store.remove(ids[2])
    store.close([])
    table = tmp_path / "msg_store_index.ets"
    if fault == "id":
        data = table.read_bytes()
        table.write_bytes(data.replace(ids[2], bytes([ids[2][0] ^ 1]) + ids[2][1:]))
    elif fault == "files":
        os.rename(tmp_path / "0.rdq", tmp_path / "t")
        os.rename(tmp_path / "1.rdq", tmp_path / "0.rdq")
        os.rename(tmp_path / "t", tmp_path / "1.rdq")
    elif fault == "offset":
        header, *rows, end = oracle.parse_ets(table.read_bytes())
        moved = [(*row[:4], 0, row[5]) for row in rows]
        table.write_bytes(oracle.encode_ets([header, *moved, end]))
    before = read_all(tmp_path)
    with MessageStore.open(tmp_path, read_only=True, references=lambda: dict.fromkeys(ids, 1)) as store:
        assert store.clean
        assert [store.read_term(each) for each in ids] == [term_of(n) for n in range(8)]
        assert not store.clean and store.dirty_reason and ids[2] in store and len(store) == 8
        assert [(problem.kind, problem.path) for problem in store.problems] == [("clean_state_misfit", str(table))]
    assert read_all(tmp_path) == before
    # Messages that no queue needs, or that the message files have lost, are not a fault of the clean state.
    with MessageStore.open(tmp_path / "other", file_size_limit=170) as store:
        store.write_many(ids, [term_of(n) for n in range(8)])
        store.close([])
    (tmp_path / "other" / "0.rdq").write_bytes(bytes((tmp_path / "other" / "0.rdq").stat().st_size))
    needed = dict.fromkeys([*ids, bytes(16)], 1)
    with MessageStore.open(tmp_path / "other", read_only=True, references=needed) as store:
        assert bytes(16) not in store and b"x" * 16 not in store
        with pytest.raises(CorruptionError, match="changed"):
            store.read_term(ids[0])
        assert store.clean and store.read_term(ids[7]) == term_of(7) and not store.problems


def test_a_file_that_was_merged_away_and_not_deleted_yet(tmp_path):
    # A real node leaves one when it is stopped in time; seen with 3.10.8.
    record = len(term_of(0)) + 25
    store = filled(tmp_path, 9, limit=4 * record)
    for n in (0, 1, 4, 5):
        store.remove(message_id(n))
    old = (tmp_path / "1.rdq").read_bytes()
    assert store.merge() == 1
    store.close([])
    (tmp_path / "1.rdq").write_bytes(old)
    with MessageStore.open(tmp_path) as store:
        assert store.clean and list(store.files) == [0, 2]
        assert [problem.kind for problem in store.problems] == ["unknown_file"]
    with MessageStore.open(tmp_path, references={message_id(n): 1 for n in (2, 3, 6, 7, 8)}) as store:
        assert not store.clean and list(store.files) == [0, 2] and not (tmp_path / "1.rdq").exists()
        assert len(store) == 5


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_the_clean_state(tmp_path, step):
    # Whatever it says, opening answers with what is in the files, or with a state that agrees with them.
    filled(tmp_path, 3, limit=500).close([bytes(range(16))])
    with MessageStore.open(tmp_path, read_only=True) as store:
        expected = {msg_id: store.read_term(msg_id) for msg_id in store}
    for name in ("clean.dot", "file_summary.ets", "msg_store_index.ets"):
        data = bytearray((tmp_path / name).read_bytes())
        for bit in range(0, 8 * len(data), step):
            data[bit // 8] ^= 1 << bit % 8
            (tmp_path / name).write_bytes(data)
            data[bit // 8] ^= 1 << bit % 8
            with MessageStore.open(tmp_path, read_only=True) as store:
                if not store.clean:
                    assert {msg_id: store.read_term(msg_id) for msg_id in store} == expected
                else:
                    for msg_id in store:
                        try:
                            assert store.read_term(msg_id) == expected[msg_id]
                        except CorruptionError:
                            assert name == "msg_store_index.ets"
        (tmp_path / name).write_bytes(data)


def test_a_leftover_of_a_merge_is_taken_back(tmp_path):
    terms = [oracle.rdq_record(message_id(n), term_of(n)) for n in range(6)]
    # §8.4 between (c) and (d): cut to the prefix, extended with zeros, nothing copied back yet; the source is whole.
    states = {
        "before c": (terms[0] + terms[1] + terms[2], terms[2]),
        "after c": (terms[0] + bytes(len(terms[2]) + len(terms[3])), terms[2]),
        "within d": (terms[0] + terms[2][:30] + bytes(len(terms[2]) - 30 + len(terms[3])), terms[2]),
        "after d": (terms[0] + terms[2] + bytes(len(terms[3])), terms[2]),
        "torn rdt": (terms[0] + terms[1] + terms[2], terms[2][:50]),
        "empty rdt": (terms[0] + terms[2], b""),
        "empty rdq": (b"", terms[0] + terms[2]),
    }
    references = {message_id(n): 1 for n in (0, 2, 3, 4)}
    for name, (rdq, rdt) in states.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "0.rdq").write_bytes(rdq)
        (folder / "0.rdt").write_bytes(rdt)
        (folder / "1.rdq").write_bytes(terms[3] + terms[5])
        (folder / "2.rdq").write_bytes(terms[4])
        before = read_all(folder)
        with MessageStore.open(folder, read_only=True, references=references) as store:
            assert {msg_id: store.read_term(msg_id) for msg_id in store} == {
                message_id(n): term_of(n) for n in (0, 2, 3, 4)
            }, name
            assert any(problem.kind == "leftover_rdt" for problem in store.problems)
        assert read_all(folder) == before
        with MessageStore.open(folder, references=references) as store:
            assert {msg_id: store.read_term(msg_id) for msg_id in store} == {
                message_id(n): term_of(n) for n in (0, 2, 3, 4)
            }, name
            assert not list(folder.glob("*.rdt")) and not list(folder.glob("*.rmqstore"))
        # A node up to 3.12, which goes from record to record, finds them as well.
        found = {record.msg_id for record in oracle.parse_rdq((folder / "0.rdq").read_bytes()).records if record.whole}
        assert {message_id(0), message_id(2)} <= found, name


def test_an_rdt_without_its_rdq_becomes_it(tmp_path):
    (tmp_path / "3.rdt").write_bytes(oracle.rdq_record(message_id(0), term_of(0)))
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert store.read_term(message_id(0)) == term_of(0)
        assert [problem.kind for problem in store.problems] == ["leftover_rdt", "rdt_without_rdq"]
    with MessageStore.open(tmp_path) as store:
        assert store.read_term(message_id(0)) == term_of(0) and list(store.files) == [3]


@pytest.mark.parametrize("case", [*CLEAN, MERGED])
def test_a_scan_for_what_the_indexes_refer_to(golden_vhost_copy, case):
    vhost = golden_vhost_copy(case)
    (vhost / "msg_store_persistent" / "clean.dot").unlink(missing_ok=True)
    references: collections.Counter[bytes] = collections.Counter()
    wanted: dict[bytes, str] = {}
    for name, queue in golden_rabbitmq.manifest(case)["queues"].items():
        published = golden_rabbitmq.published(case, name)
        path = vhost / "queues" / queue["dir"]
        opened = QueueIndexV2.open if case == "19-clean-v2" else functools.partial(QueueIndex.open, read_only=True)
        for entry in opened(path):
            if entry.message is None and entry.persistent:
                references[entry.msg_id] += 1
                wanted[entry.msg_id] = published[entry.seq_id]["sha256_16"]
    assert references
    with MessageStore.open(vhost / "msg_store_persistent", references=references) as store:
        assert not store.clean and not len(store.missing) and not store.problems
        assert {msg_id: store.refcount(msg_id) for msg_id in store} == references
        for msg_id, sha256 in wanted.items():
            assert hashlib.sha256(store.read(msg_id).body).hexdigest()[:16] == sha256
        if case == MERGED:
            # Nine messages that were acknowledged after the merges are garbage now.
            assert (store.valid_size, store.file_size) == (34 * 6196, 43 * 6196)


# ----------------------------------------------------------------------------------------------------- refusals and locks


def test_after_a_failed_write_nothing_is_written(tmp_path, monkeypatch):
    store = filled(tmp_path, 5, limit=10**6)
    size = store.file_size

    def full(fd, data, pos):
        return pwrite(fd, bytes(data[:20]), pos) if pos == size else 0

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=re.escape("0.rdq")):
        store.write(message_id(9), term_of(9))
    monkeypatch.undo()
    assert (tmp_path / "0.rdq").stat().st_size == size == store.file_size
    for call in (
        lambda: store.write(message_id(9), term_of(9)),
        lambda: store.remove(message_id(0)),
        store.merge,
        store.sync,
    ):
        with pytest.raises(StorePoisonedError, match=re.escape("0.rdq")):
            call()
    assert len(store) == 5 and store.read_term(message_id(4)) == term_of(4)
    with pytest.raises(StorePoisonedError):
        store.close([])
    assert store.closed and os.listdir(tmp_path) == ["0.rdq"]
    store.close()
    MessageStore.open(tmp_path).close()


def test_a_failed_sync_ends_writing_too(tmp_path, monkeypatch):
    store = filled(tmp_path, 2)

    def fails(fd):
        raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no disk"):
        store.sync()
    monkeypatch.undo()
    with pytest.raises(StorePoisonedError, match="no disk"):
        store.sync()
    store.close()


def test_a_full_disk_ends_a_merge_and_nothing_else(tmp_path, monkeypatch):
    record = len(term_of(0)) + 25
    store = filled(tmp_path, 12, limit=4 * record)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(message_recovery, "copy_bytes", full)
    store.remove_many([message_id(n) for n in (0, 1, 2, 4, 5, 8, 9)])
    with pytest.raises(OSError, match="space"):
        store.merge()
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.rdt"))
    assert store.write(message_id(20), term_of(20)) and store.merge() == 1
    assert {msg_id: store.read_term(msg_id) for msg_id in store} == {
        message_id(n): term_of(n) for n in (3, 6, 7, 10, 11, 20)
    }
    store.close()


def test_a_forked_child_writes_nothing(tmp_path):
    store = filled(tmp_path, 2)
    child = os.fork()
    if not child:
        try:
            store.write(message_id(3), term_of(3))
        except StoreLockedError:
            store.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.write(message_id(3), term_of(3))
    with pytest.raises(StoreLockedError):
        MessageStore.open(tmp_path)
    store.close()


def test_one_writer(tmp_path):
    with MessageStore.open(tmp_path) as store:
        with pytest.raises(StoreLockedError, match="open for writing already"):
            MessageStore.open(tmp_path)
        code = f"""
import sys
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.errors import StoreLockedError
MessageStore.open({str(tmp_path)!r}, read_only=True).close()
try:
    MessageStore.open({str(tmp_path)!r})
except StoreLockedError:
    sys.exit(7)
"""
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
        store.write(message_id(0), term_of(0))
    MessageStore.open(tmp_path).close()


def test_read_only_changes_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        MessageStore.open(tmp_path / "none", read_only=True)
    assert not os.listdir(tmp_path)
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert len(store) == 0 and not store.files and store.dirty_reason == "the store is empty"
        for call in (
            lambda: store.write(message_id(0), term_of(0)),
            lambda: store.remove(message_id(0)),
            lambda: store.remove_many([message_id(0)]),
            store.merge,
            store.sync,
        ):
            with pytest.raises(ReadOnlyError):
                call()
        store.close([])
    assert not os.listdir(tmp_path)
    for call in (lambda: store.read(message_id(0)), lambda: store.write(message_id(0), term_of(0)), store.sync):
        with pytest.raises(StoreClosedError):
            call()
    store.close()


def test_what_a_node_would_not_boot_on_is_not_written(tmp_path):
    with MessageStore.open(tmp_path) as store:
        with pytest.raises(InvalidMessageError, match="not boot"):
            store.write(message_id(0), term_of(1))
        with pytest.raises(InvalidMessageError, match="term"):
            store.write(message_id(0), term_of(0)[:-1])
        with pytest.raises(InvalidMessageError, match="16 bytes"):
            store.write(b"short", term_of(0))
        with pytest.raises(InvalidMessageError):
            store.write_many([message_id(0), message_id(1)], [term_of(0), b""])
        assert store.file_size == 0
        message = Message(b"body", properties={"delivery_mode": 2}, routing_keys=["q"])
        assert store.write(message.msg_id, message) and store.read(message.msg_id) == message
        assert store.write(message_id(0), memoryview(term_of(0)))
    for options in ({"file_size_limit": 0}, {"scan": "guess"}, {"scan": "bytewise"}):
        with pytest.raises(ValueError):
            MessageStore.open(tmp_path, **options)
    with pytest.raises(ValueError):
        MessageStore.open(tmp_path, references={b"short": 1})
    with pytest.raises(ValueError):
        MessageStore.open(tmp_path, references={message_id(0): -1})


def test_a_record_that_changed_is_not_handed_out(tmp_path):
    with filled(tmp_path, 2, limit=10**6) as store, open(tmp_path / "0.rdq", "r+b") as file:
        file.seek(8)
        file.write(b"another id......")
        file.flush()
        with pytest.raises(CorruptionError, match="changed") as caught:
            store.read(message_id(0))
        assert (caught.value.path, caught.value.pos) == (str(tmp_path / "0.rdq"), 0)
        assert store.read_term(message_id(1)) == term_of(1)


# ----------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, -1, -(2**63), 2**63 - 1, 2**63 - 9, 2**62, 1 << 32, 0xFFFFFFFF])
@pytest.mark.parametrize("mode", ["sequential", "salvage", "auto"])
def test_hostile_sizes(tmp_path, size, mode):
    record = oracle.rdq_record(message_id(1), term_of(1))
    for tail in (b"", bytes(16), b"\xff" * 40, message_id(0) + b"\xff"):
        data = record + struct.pack(">Q", size % 2**64) + tail + record
        (tmp_path / "0.rdq").write_bytes(data)
        assert scanned_bytewise(tmp_path / "0.rdq", {message_id(1): 1})[0] == 0
        found = scan_file(tmp_path / "0.rdq", mode)
        assert found.pos[0] == 0 and found.msg_id[0].tobytes() == message_id(1)
        if mode in ("salvage", "auto"):
            assert found.pos[-1] == len(data) - len(record) or mode == "auto"
        if mode == "sequential":
            expected = oracle.parse_rdq(data)
            assert found.pos.tolist()[: len(expected.records)] == [entry.begin for entry in expected.records]
        with MessageStore.open(tmp_path, read_only=True) as store:
            assert store.read_term(message_id(1)) == term_of(1)


def damaged_answers(path, terms: dict[bytes, bytes]) -> None:
    """Whatever the bytes are: all ways of reading end, nothing changes, and what is given is what was written."""
    data = path.read_bytes()
    for mode in ("sequential", "salvage", "auto"):
        found = scan_file(path, mode)
        assert (found.pos >= 0).all() and (found.pos + found.size + 25 <= len(data)).all()
    scanned_bytewise(path, dict.fromkeys(terms, 1))
    for options in (
        {},
        {"references": dict.fromkeys(terms, 1)},
        {"references": dict.fromkeys(terms, 1), "scan": "bytewise"},
    ):
        with MessageStore.open(path.parent, read_only=True, **options) as store:
            for msg_id in store:
                store.read_term(msg_id)
    assert path.read_bytes() == data


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_a_message_file(tmp_path, step):
    terms = {message_id(n): term_of(n, 8 * n) for n in range(4)}
    path = tmp_path / "0.rdq"
    data = bytearray(b"".join(oracle.rdq_record(*pair) for pair in terms.items()))
    ends = np.cumsum([len(term) + 25 for term in terms.values()]).tolist()
    for bit in range(0, 8 * len(data), step):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        damaged_answers(path, terms)
        # At most the record that holds the bit is lost.
        hit = next(i for i, end in enumerate(ends) if bit // 8 < end)
        with MessageStore.open(tmp_path, read_only=True) as store:
            found = {msg_id: store.read_term(msg_id) for msg_id in store}
        lost = [i for i, msg_id in enumerate(terms) if found.get(msg_id) != terms[msg_id]]
        assert lost in ([], [hit]), (bit, lost)
        assert set(found) - set(terms) == set() or lost == [hit]
        assert set(scan_file(path, "salvage").pos.tolist()) >= {
            end - len(term) - 25 for i, (end, term) in enumerate(zip(ends, terms.values(), strict=True)) if i != hit
        }
        data[bit // 8] ^= 1 << bit % 8


def test_threads_read_while_one_writes_and_merges(tmp_path):
    store = MessageStore.open(tmp_path, file_size_limit=3000)
    kept = [message_id(n) for n in range(0, 400, 10)]
    store.write_many(kept, [term_of(n) for n in range(0, 400, 10)])
    failures = []

    def read():
        try:
            for _ in range(20):
                for n, msg_id in enumerate(kept):
                    assert store.read_term(msg_id) == term_of(10 * n)
                store.locations()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(1, 400):
        if n % 10:
            store.write(message_id(n), term_of(n))
            if n > 20 and (n - 20) % 10:
                store.remove(message_id(n - 20))
    for thread in threads:
        thread.join()
    store.close()
    assert not failures


def test_every_truncation_of_a_message_file(tmp_path):
    terms = {message_id(n): term_of(n, 8 * n) for n in range(3)}
    path = tmp_path / "0.rdq"
    data = b"".join(oracle.rdq_record(*pair) for pair in terms.items())
    ends = np.cumsum([0, *(len(term) + 25 for term in terms.values())]).tolist()
    for size in range(0, len(data), 3):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends) - 1
        found = scan_file(path)
        assert len(found.pos) == whole and found.end == ends[whole]
        assert [problem.kind for problem in found.problems] == (["torn_record"] if size > ends[whole] else [])
        with MessageStore.open(tmp_path) as store:
            assert len(store) == whole
        assert path.read_bytes() == data[: ends[whole]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 3), st.integers(8, 60).map(bytes)), max_size=8))
def test_scans_of_pieces_agree_with_plain_struct(tmp_path, pieces):
    data = b"".join(oracle.rdq_record(message_id(p), term_of(p)) if isinstance(p, int) else p for p in pieces)
    path = tmp_path / "0.rdq"
    path.write_bytes(data)
    expected = oracle.parse_rdq(data)
    found = scan_file(path)
    if expected.why != "size below 16":
        assert found.pos.tolist() == [record.begin for record in expected.records] and found.end == expected.used
        assert (found.flags & 1).astype(bool).tolist() == [record.whole for record in expected.records]
    salvaged = scan_file(path, "salvage")
    at = 0
    positions = []
    for piece in pieces:
        if isinstance(piece, int):
            positions.append(at)
        at += len(oracle.rdq_record(message_id(0), term_of(0))) if isinstance(piece, int) else len(piece)
    assert salvaged.pos.tolist() == positions
    references = {message_id(n): 1 for n in range(3)}
    plain = bytewise(data, references)
    assert scanned_bytewise(path, references) == plain
    damaged_answers(path, {message_id(n): term_of(n) for n in range(4)})


def bytewise(data: bytes, references) -> list[int]:
    """The rule of 3.13 and later in plain Python (§11)."""
    found: dict[bytes, int] = {}
    at = 0
    while at + 8 <= len(data):
        (size,) = struct.unpack_from(">Q", data, at)
        end = at + size + 9
        msg_id = data[at + 8 : at + 24]
        if size >= 16 and end <= len(data) and data[end - 1] == 255 and msg_id in references and msg_id not in found:
            found[msg_id] = at
            at = end
        else:
            at += 1
    return sorted(found.values())


def test_holes_and_duplicates_of_later_versions(tmp_path):
    # 3.13 and later compact in place: a zero run where records were, and the moved message in two places.
    records = [oracle.rdq_record(message_id(n), term_of(n)) for n in range(5)]
    data = records[0] + records[3] + bytes(200) + records[2] + bytes(len(records[1])) + records[3] + records[4]
    (tmp_path / "0.rdq").write_bytes(data)
    (tmp_path / "1.rdq").write_bytes(b"")
    references = {message_id(n): 1 for n in (0, 2, 3)}
    with MessageStore.open(tmp_path, read_only=True, references=references, scan="sequential") as store:
        assert sorted(store) == sorted(message_id(n) for n in (0, 3))
        assert [problem.kind for problem in store.problems] == ["zero_size"]
    for scan in ("bytewise", "auto"):
        with MessageStore.open(tmp_path, read_only=True, references=references, scan=scan) as store:
            assert {store.read_term(msg_id) for msg_id in store} == {term_of(n) for n in (0, 2, 3)}
            assert store.files[0].valid_size == sum(len(records[n]) for n in (0, 2, 3))
    copies = {"bytewise": tmp_path / "b", "auto": tmp_path / "a"}
    for scan, folder in copies.items():
        folder.mkdir()
        for name, number in (("0.rdq", 0), ("1.rdq", 1)):
            (folder / name).write_bytes((data, records[1])[number])
        (folder / "2.rdq").write_bytes(b"")
        with MessageStore.open(
            folder, references={**references, message_id(1): 1}, scan=scan, file_size_limit=2000
        ) as store:
            # Messages after a hole are merged too.
            assert store.merge() == 1
            assert (folder / "0.rdq").read_bytes() == b"".join(records[n] for n in (0, 3, 2, 1))
            for n in range(4):
                assert store.read_term(message_id(n)) == term_of(n)


# ------------------------------------------------------------------------------------------------------- location table


def test_the_table_is_a_dict():
    random_numbers = random.Random(3)
    table, model = _messages.LocationTable(), {}
    for _ in range(20_000):
        msg_id = message_id(random_numbers.randrange(700))
        what = random_numbers.random()
        if what < 0.5:
            row = tuple(random_numbers.randrange(1 << 20) for _ in range(4))
            table.put(msg_id, *row)
            model[msg_id] = row
        elif what < 0.9:
            table.discard_many(np.frombuffer(msg_id, np.uint8).reshape(1, 16))
            model.pop(msg_id, None)
        else:
            assert table.get(msg_id) == model.get(msg_id)
        assert len(table) == len(model)
    ids, *columns = table.columns()
    rows = zip(*(column.tolist() for column in columns), strict=True)
    assert dict(zip((one.tobytes() for one in ids), rows, strict=True)) == model
    assert table.get(b"short") is None


def test_the_table_refuses_what_cannot_be(tmp_path):
    table = _messages.LocationTable()
    for row in ((-1, 0, 0, 0), (0, -2, 0, 0), (0, 0, -1, 0), (0, 0, 0, -1)):
        with pytest.raises(ValueError):
            table.put(bytes(16), *row)
    with pytest.raises(ValueError):
        table.put(b"", 1)
    with pytest.raises(ValueError):
        table.refer(np.zeros((2, 15), np.uint8))
    with pytest.raises(ValueError):
        table.refer(np.zeros((2, 16), np.uint8), np.array([2**31 - 1, 1]))
    with pytest.raises(MemoryError):
        table.reserve(1 << 60)
    (tmp_path / "f").write_bytes(bytes(100))
    with open(tmp_path / "f", "rb") as file:
        region = Region.map(file.fileno(), 100)
    for call in (
        lambda: table.load_ets_items(b"", 1),
    ):
        with pytest.raises(OffsetOutOfRangeError):
            call()
    for call in (lambda: table.scan(region, 0, 1, True), lambda: _messages.scan_messages(region, 1)):
        with pytest.raises(ValueError):
            call()
    region.close()
    with pytest.raises(StoreClosedError):
        table.scan(region, 0)
    with pytest.raises(StoreClosedError):
        _messages.scan_messages(region)


def test_places_of_any_size_go_into_a_table_file_and_come_back():
    table = _messages.LocationTable()
    numbers = [0, 1, 255, 256, 65535, 65536, 2**31 - 1]
    rows = [(n % 7, file, pos, size) for n, (file, pos, size) in enumerate(
        (file, pos, size) for file in numbers for pos in (*numbers, 2**31, 2**40, 2**62 - 1) for size in (25, 2**33)
    )]  # fmt: skip
    for n, row in enumerate(rows):
        table.put(message_id(n), *row)
    data, count = index_rows(table)
    assert count == len(rows)
    terms = [oracle.decode(item[8:]) for item in split_items(bytes(8) + data)]
    assert {term[1]: tuple(term[2:]) for term in terms} == {message_id(n): row for n, row in enumerate(rows)}
    assert b"".join(oracle.encode_ets([term])[8:] for term in terms) == data
    again = _messages.LocationTable()
    assert again.load_ets_items(data, 0) == (len(rows), len(data))
    assert sorted(split_items(bytes(8) + index_rows(again)[0])) == sorted(split_items(bytes(8) + data))
    with pytest.raises(CorruptionError, match="two places"):
        again.load_ets_items(data, 0)
    for atom in (b"v\x00\x0c", b"s\x0c", b"w\x0c"):
        other = re.sub(rb"(?s)....bWLA\x83h\x06d\x00\x0cmsg_location", lambda match: (
            (int.from_bytes(match[0][:4], "big") + len(atom) - 3).to_bytes(4, "big")  # noqa: B023
            + match[0][4:11] + atom + b"msg_location"  # noqa: B023
        ), data)  # fmt: skip
        again = _messages.LocationTable()
        assert again.load_ets_items(other, 0) == (len(rows), len(other)) and again.get(message_id(5)) == table.get(
            message_id(5)
        )


def test_every_bit_of_a_table_file():
    table = _messages.LocationTable()
    for n in range(3):
        table.put(message_id(n), n, n, 300 * n, 2**31 + n)
    data = bytearray(index_rows(table)[0])
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        again = _messages.LocationTable()
        try:
            loaded, end = again.load_ets_items(data, 0)
            assert loaded == len(again) <= 3 and 0 <= end <= len(data)
        except CorruptionError as error:
            assert error.pos is not None
        data[bit // 8] ^= 1 << bit % 8


# ------------------------------------------------------------------------------------------------------------- model


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 25)),
        st.tuples(st.just("write"), st.integers(0, 25)),
        st.tuples(st.just("write"), st.integers(0, 25)),
        st.tuples(st.just("remove"), st.integers(0, 25)),
        st.tuples(st.just("remove"), st.integers(0, 25)),
        st.tuples(
            st.sampled_from(["merge", "sync", "reopen clean", "reopen", "crash", "reopen without references"]),
            st.just(0),
        ),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(150, 900))
def test_model(tmp_path_factory, steps, limit):
    path = tmp_path_factory.mktemp("model")
    model: collections.Counter[bytes] = collections.Counter()
    terms = {message_id(n): term_of(n, n * 5) for n in range(26)}
    store = MessageStore.open(path, file_size_limit=limit)
    for what, n in steps:
        msg_id = message_id(n)
        if what == "write":
            was = {ids.tobytes() for ids in store.locations().msg_id}
            assert store.write(msg_id, terms[msg_id]) == (msg_id not in was)
            model[msg_id] += 1
        elif what == "remove" and model[msg_id]:
            model[msg_id] -= 1
            assert store.remove(msg_id) == model[msg_id]
        elif what == "merge":
            store.merge()
        elif what == "sync":
            store.sync()
        elif what == "reopen clean":
            store.close([bytes(16)])
            store = MessageStore.open(path, file_size_limit=limit, client_refs=[bytes(16)], references={})
            assert store.clean
        elif what in ("reopen", "crash"):
            store.close() if what == "reopen" else store.abandon()
            store = MessageStore.open(path, file_size_limit=limit, references=+model)
            assert not store.clean and not len(store.missing)
        elif what == "reopen without references":
            with MessageStore.open(path, read_only=True) as reader:
                assert set(+model) <= set(reader)
        live = +model
        assert {one: store.refcount(one) for one in store} == live
        assert {one: store.read_term(one) for one in live} == {one: terms[one] for one in live}
        assert not store.problems
        # The tables agree with the files.
        sizes = {int(name[:-4]): (path / name).stat().st_size for name in os.listdir(path)}
        assert {number: summary.file_size for number, summary in store.files.items()} == sizes
        assert max(sizes) == max(store.files)
        assert (store.valid_size, store.file_size) == tuple(map(sum, zip(*store.files.values(), strict=True)))
        valid = collections.Counter({number: 0 for number in sizes})
        for file, size, count in zip(
            *(getattr(store.locations(), name).tolist() for name in ("file", "size", "refcount")), strict=True
        ):
            valid[file] += size if count else 0
        assert dict(valid) == {number: summary.valid_size for number, summary in store.files.items()}
        assert all(valid[number] for number in sizes if number != max(store.files))
    store.abandon()
    shutil.rmtree(path)
