"""Hostile bytes in tiered storage: flips, truncations and missing files of a small one that the oracle wrote.

Owns the promise that no answer is shorter or wrong in silence: whatever is read differs from the whole storage only with an error
or a finding that names the file, and the rest is still read.  What the format leaves unprotected is named here: fields of a
record that no CRC covers, and in an index file the hash of an item and the way to the next one, which `verify` compares with the
records and a query cannot.

Without `--slow` every seventeenth byte gets one flip (the bit by a fixed seed), with it every byte.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from pathlib import Path

import pytest
import tiered_oracle as oracle_tiered
from every_disk import open_tiered, reported_to
from hypothesis import given
from hypothesis import strategies as st
from small_store import SMALL, options_of
from test_cli import json_lines, run

from rmqstore import GetMessageStatus, Message, MessageStore, StoreConfig, StoreError
from rmqstore.files.mapped_file import MappedFile
from rmqstore.flatfile.flat_index import FlatIndexFile
from rmqstore.flatfile.flat_verify import verify_flat
from rmqstore.offline.export import ExportOptions, export

NOW = 1_700_000_000_000
#: Fields of a record that nothing covers: flag, sys flag, born time and host, store time within its second, store host,
#: reconsume times, prepared offset.
UNPROTECTED = (*range(16, 20), *range(36, 84))


def sent():
    messages = []
    for number in range(14):
        topic, queue_id = ("Orders", number % 2) if number % 7 else ("Pay", 0)
        keys = (f"k{number % 4}", "shared") if number % 3 else ()
        tags, body = "TagA" if number % 2 else None, bytes([65 + number]) * 20
        time = NOW - 5000 + 700 * number
        messages.append(oracle_tiered.Sent(topic, queue_id, keys, tags, f"U{number:05d}", body, time))
    return messages


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    oracle_tiered.write_tiered(root, sent(), log_size=400, queue_size=40)
    return root


@pytest.fixture
def copy(small, tmp_path):
    shutil.copytree(small, tmp_path / "copy")
    return tmp_path / "copy"


def files_of(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".json"]
    assert len(found) > 10
    return sorted(found)


def open_store(root, findings=None):
    return open_tiered(root / "tiered", root / "store", damage=reported_to(findings))


COLUMNS = ["topic", "queue_id", "queue_offset", "phy_offset", "keys", "tags", "body", "unique_key", "corrupt"]


def rows_of(store):
    return [
        tuple(str(each) for each in row.values())
        for row in store.scan(COLUMNS, use_threads=False).read_all().to_pylist()
    ]


def places_of(store, key, topic="Orders"):
    return [(each.queue_id, each.queue_offset) for each in store.query_message(topic, key)]


KEYS = ("k0", "k1", "shared", "U00003", "U00013", "nobody")


def test_the_whole_one(small):
    with open_store(small) as store:
        assert list(verify_flat(store.tiered)) == [] and store.tiered.notes == []
        assert len(rows_of(store)) == len(sent())
        assert [index.compacted for index in store.tiered.index.files].count(False) == 1
        assert {index.slot_num for index in store.tiered.index.files} == {4}
        for key in KEYS:
            wanted = sorted(
                (each.queue_id, number)
                for queue in ((0), (1))
                for number, each in enumerate(
                    [other for other in sent() if (other.topic, other.queue_id) == ("Orders", queue)]
                )
                if key in (*each.keys, each.unique_key)
            )
            assert sorted(places_of(store, key)) == wanted


def is_unprotected(small: Path, path: Path, pos: int) -> bool:
    """Whether nothing in the storage tells that this byte is another one."""
    data = path.read_bytes()
    if path.parent.name == "COMMIT_LOG":
        at = 0
        while at + (size := struct.unpack_from(">i", data, at)[0]) <= pos:
            at += size
        body_end = at + 88 + struct.unpack_from(">i", data, at + 84)[0]
        return pos - at in UNPROTECTED or False if pos < body_end else False
    if path.parent.name == "INDEX":
        return pos in (10, 11)  # The begin timestamp within seconds.
    if path.parent.name == "tiered_index_file":
        num = struct.unpack_from(">i", data, 24)[0]
        items = 28 + 8 * 4
        second_half_of_slot = 28 <= pos < items and (pos - 28) % 8 >= 4
        return second_half_of_slot or items <= pos < items + 32 or pos >= items + 32 * (num + 1)
    return False


def flips(path: Path, slow: bool):
    rng = random.Random(path.name)
    for pos in range(rng.randrange(17) if not slow else 0, path.stat().st_size, 1 if slow else 17):
        yield pos, 1 << rng.randrange(8)


def test_bit_flips_are_never_silent(small, copy, request):
    slow = request.config.getoption("--slow")
    with open_store(small) as store:
        intact = rows_of(store)
        answers = {key: places_of(store, key) for key in KEYS}
    looked = 0
    for path in files_of(copy):
        whole = path.read_bytes()
        is_index = path.parent.name in ("INDEX", "tiered_index_file")
        for pos, bit in flips(path, slow):
            looked += 1
            flipped = bytearray(whole)
            flipped[pos] ^= bit
            path.write_bytes(flipped)
            where = f"{path}, byte {pos}, bit {bit}"
            findings = []
            with open_store(copy) as store:
                found = list(verify_flat(store.tiered))
                if not found:
                    assert is_unprotected(small, small / path.relative_to(copy), pos), where
                else:
                    known = {str(path)} if is_index else {str(each) for each in files_of(copy)}
                    assert {each.path for each in found} & known, (where, found)
            with open_store(copy, findings) as store:
                rows = rows_of(store)
                corrupt = [row for row in rows if row[-1] == "True"]
                lost = {row[:4] for row in intact} - {row[:4] for row in rows}
                assert len(lost) <= 2 and (not lost or findings or corrupt), where
                if is_index:
                    assert rows == intact and not findings, where
                for key in KEYS:
                    got = places_of(store, key)
                    # What a query cannot see is seen by verify.
                    assert sorted(got) == sorted(answers[key]) or findings or found, where
            try:
                with open_store(copy) as store:
                    strict = rows_of(store)
                assert len(strict) == len(intact) or path.parent.name == "COMMIT_LOG", where
            except StoreError as error:
                assert error.path and str(copy) in error.path and error.pos is not None, where
                assert findings, where
        path.write_bytes(whole)
    assert looked > 200


def test_truncations_are_never_silent(small, copy):
    with open_store(small) as store:
        intact = rows_of(store)
        answers = {key: sorted(places_of(store, key)) for key in KEYS}
    for path in files_of(copy):
        whole = path.read_bytes()
        is_index = path.parent.name in ("INDEX", "tiered_index_file")
        for length in {0, 1, 19, len(whole) // 2, len(whole) - 21, len(whole) - 1} - {len(whole)}:
            if not 0 <= length < len(whole):
                continue
            path.write_bytes(whole[:length])
            findings = []
            with open_store(copy) as store:
                kinds = {each.kind for each in verify_flat(store.tiered)}
                local_empty = path.parent.name == "tiered_index_file" and length in (0, len(whole) - 21, len(whole) - 1)
                assert kinds or local_empty, (path, length)
            with open_store(copy, findings) as store:
                rows = rows_of(store)
                assert set(rows) <= set(intact)
                assert rows == intact or findings, (path, length)
                if is_index:
                    assert rows == intact
                    for key in KEYS:
                        # The records are gone over.
                        assert sorted(places_of(store, key)) == answers[key], (path, length, key)
            if rows != intact:
                with pytest.raises(StoreError) as raised, open_store(copy) as store:
                    rows_of(store)
                assert str(copy) in raised.value.path and raised.value.pos is not None
        path.write_bytes(whole)


def test_a_missing_file_in_the_middle(small, copy):
    with open_store(small) as store:
        intact = rows_of(store)
        answers = {key: sorted(places_of(store, key)) for key in KEYS}
    for metadata in (True, False):
        if not metadata:
            os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
        for kind in ("COMMIT_LOG", "CONSUME_QUEUE", "INDEX"):
            folder = next(path for path in sorted(copy.rglob(kind)) if len(list(path.iterdir())) >= 3)
            paths = sorted(folder.iterdir(), key=lambda path: path.name[8:])
            missing, whole = paths[1], paths[1].read_bytes()
            missing.unlink()
            findings = []
            with open_store(copy) as store:
                named = [each for each in verify_flat(store.tiered) if each.kind == "missing_file"]
                assert any(missing.name in each.path + each.detail for each in named)
            with open_store(copy, findings) as store:
                rows = rows_of(store)
                if kind == "INDEX":
                    assert rows == intact
                    assert {key: sorted(places_of(store, key)) for key in KEYS} == answers
                    assert findings == []
                else:
                    assert 0 < len(rows) < len(intact) and findings and set(rows) < set(intact)
                    assert any(missing.name in each.path + each.detail for each in findings)
            if kind != "INDEX":
                topic, queue_id = folder.parent.parent.name, int(folder.parent.name)
                with open_store(copy) as store:
                    with pytest.raises(StoreError, match=r"missing|cut short"):
                        rows_of(store)
                    refused = 0
                    for key in KEYS:
                        try:
                            assert sorted(places_of(store, key)) == answers[key]
                        except StoreError as error:
                            refused += 1
                            assert missing.name in str(error)
                    # Units tell of tags, and index files of keys, without their records.
                    assert refused or kind == "CONSUME_QUEUE"
                    # A get gives what is before the hole, and is an error in it.
                    at, end, errors = 0, store.max_queue_offset(topic, queue_id), 0
                    while at < end:
                        try:
                            found = store.get_message(topic, queue_id, at)
                            assert found.status is GetMessageStatus.FOUND
                            at = found.next_queue_offset
                        except StoreError as error:
                            assert missing.name in str(error)
                            errors, at = errors + 1, at + 1
                    assert errors
            missing.write_bytes(whole)


def test_a_missing_last_file_is_known_from_the_metadata(small, copy):
    for kind in ("COMMIT_LOG", "CONSUME_QUEUE"):
        folder = copy / "tiered" / f"{oracle_tiered.prefix('C')}_C" / "B" / "Orders" / "1" / kind
        last = max(folder.iterdir(), key=lambda path: path.name[8:])
        whole = last.read_bytes()
        last.unlink()
        with open_store(copy) as store:
            assert store.max_queue_offset("Orders", 1) == 6
            with pytest.raises(StoreError, match=f"(?s){last.name}"):
                store.get_table("Orders", 1)
            assert any(last.name in each.path for each in verify_flat(store.tiered))
        last.write_bytes(whole)
    # Without units nobody knows what the queue has.
    shutil.rmtree(folder)
    os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
    with open_store(copy) as store, pytest.raises(StoreError, match="no units"):
        store.get_message("Orders", 1)


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("kind", ["COMMIT_LOG", "CONSUME_QUEUE", "INDEX", "tiered_index_file"])
def test_files_that_may_not_be_read_hide_no_other(small, copy, monkeypatch, kind, metadata):
    with open_store(small) as store:
        intact = rows_of(store)
        answers = {key: sorted(places_of(store, key)) for key in KEYS}
    if not metadata:
        os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
    folder = next(
        path for path in sorted(copy.rglob(kind)) if kind == "tiered_index_file" or len(list(path.iterdir())) >= 3
    )
    refused = max(folder.iterdir(), key=lambda path: path.name[8:])
    allowed = os.access
    monkeypatch.setattr("os.access", lambda name, mode: str(name) != str(refused) and allowed(name, mode))
    findings = []
    with open_store(copy, findings) as store:
        assert str(refused) in {each.path for each in verify_flat(store.tiered)}
        rows = rows_of(store)
        if kind in ("COMMIT_LOG", "CONSUME_QUEUE"):
            assert 0 < len(rows) < len(intact) and set(rows) < set(intact)
            assert {each.path for each in findings} == {str(refused)}
        else:
            assert rows == intact and findings == []
            assert {key: sorted(places_of(store, key)) for key in KEYS} == answers
    if kind in ("COMMIT_LOG", "CONSUME_QUEUE"):
        with open_store(copy) as store, pytest.raises(StoreError, match="may not be read"):
            rows_of(store)


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("kind", ["COMMIT_LOG", "CONSUME_QUEUE", "1", "Pay", "INDEX", "tiered_index_file"])
def test_folders_that_cannot_be_listed_hide_no_other(small, copy, monkeypatch, kind, metadata):
    with open_store(small) as store:
        intact = rows_of(store)
        answers = {key: sorted(places_of(store, key)) for key in KEYS}
    if not metadata:
        os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
    (folder, *_) = [path for path in sorted(copy.rglob(kind)) if path.is_dir() and any(path.iterdir())]
    listed, looked = os.scandir, os.stat

    def refuse(call):
        def refusing(path=".", **more):
            # As where it has no permissions: it is neither listed nor gone into.
            inside = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(f"{folder}{os.sep}")
            if inside or (call is listed and isinstance(path, (str, os.PathLike)) and os.fspath(path) == str(folder)):
                raise PermissionError(13, "Permission denied", path)
            return call(path, **more)

        return refusing

    monkeypatch.setattr("os.scandir", refuse(listed))
    monkeypatch.setattr("os.stat", refuse(looked))
    findings = []
    with open_store(copy, findings) as store:
        assert any(each.path.startswith(str(folder)) and "cannot be listed" in each.detail for each in verify_flat(store.tiered))
        rows = rows_of(store)
        if kind in ("INDEX", "tiered_index_file"):
            assert rows == intact and findings == []
            assert {key: sorted(places_of(store, key)) for key in KEYS} == answers
        else:
            assert 0 < len(rows) < len(intact) and set(rows) < set(intact)
            assert any(each.path.startswith(str(folder)) for each in findings)
    if kind not in ("INDEX", "tiered_index_file"):
        queue = folder / "0" if kind == "Pay" else folder if kind == "1" else folder.parent
        topic, queue_id = queue.parent.name, int(queue.name)
        with open_store(copy) as store:
            with pytest.raises(StoreError, match="cannot be listed"):
                rows_of(store)
            with pytest.raises(StoreError, match="cannot be listed"):
                store.get_message(topic, queue_id)


def test_strange_files_are_passed_over(copy):
    folder = copy / "tiered" / f"{oracle_tiered.prefix('C')}_C" / "B" / "Orders" / "1" / "COMMIT_LOG"
    (folder / "notes.txt").write_text("mine")
    (folder / ("00000000" + "0" * 19 + "7")).write_bytes(b"renamed")
    (folder.parent.parent.parent / "readme").write_text("mine")
    (copy / "store" / "tiered_index_file" / "x").write_text("mine")
    (copy / "store" / "tiered_index_file" / "compacting").mkdir()
    with open_store(copy) as store:
        assert [each.kind for each in verify_flat(store.tiered)] == ["file"] * 4
        assert len(rows_of(store)) == len(sent())
        assert len(store.query_message("Orders", "shared")) > 3


def test_an_overlap_is_told(copy):
    folder = copy / "tiered" / f"{oracle_tiered.prefix('C')}_C" / "B" / "Orders" / "1" / "COMMIT_LOG"
    first = min(folder.iterdir(), key=lambda path: path.name[8:])
    first.write_bytes(first.read_bytes() + b"more")
    with open_store(copy) as store:
        assert {each.kind for each in verify_flat(store.tiered)} == {"overlap"}
        assert len(rows_of(store)) == len(sent())


def test_records_that_were_uploaded_again_count_once(small, copy):
    # After a crash between log and units the broker uploads the same records again, behind the first ones.
    folder = copy / "tiered" / f"{oracle_tiered.prefix('C')}_C" / "B" / "Pay" / "0"
    log, units = (
        folder / "COMMIT_LOG" / oracle_tiered.file_name(0),
        folder / "CONSUME_QUEUE" / oracle_tiered.file_name(0),
    )
    record = bytearray(log.read_bytes())
    offset, size, code = struct.unpack(">qiq", units.read_bytes()[20:40])
    again = bytearray(record[offset : offset + size])
    struct.pack_into(">q", again, 28, len(record))
    log.write_bytes(record + again)
    units.write_bytes(units.read_bytes()[:20] + struct.pack(">qiq", len(record), size, code))
    os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
    with open_store(copy) as store:
        assert store.get_table("Pay", 0, columns="queue_offset")["queue_offset"].to_pylist() == [0, 1]
        assert len(store.query_message("Pay", "U00007")) == 1
        assert "duplicate_record" in {each.kind for each in verify_flat(store.tiered)}


def test_a_gap_between_tiered_storage_and_the_local_log(tmp_path, monkeypatch):
    root = oracle_tiered.unpack("store", tmp_path)
    folder = next((root / "tiered").glob("*/golden/Orders/0"))
    for kind, keep in (("CONSUME_QUEUE", 2), ("COMMIT_LOG", 2)):
        for path in sorted((folder / kind).iterdir(), key=lambda path: path.name[8:])[keep:]:
            path.unlink()
    os.remove(root / "store" / "config" / "tieredStoreMetadata.json")
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        end = store.tiered.queue("Orders", 0).max_queue_offset
        assert 0 < end < 558
        with pytest.raises(StoreError, match=f"queue offsets {end} to 558 .* go on at 558"):
            store.get_message("Orders", 0, end)
        with pytest.raises(StoreError, match="neither"):
            store.get_table("Orders", 0)
        assert len(store.get_message("Orders", 0, 558)) > 0
        findings = store.tiered.damage.findings
        store.tiered.damage.mode = "report"
        assert store.get_message("Orders", 0, end).next_queue_offset == 558
        assert store.get_table("Orders", 0).num_rows == end + 960 - 558 and findings[-1].kind == "gap"
        assert store.scan(["queue_id"], topic="Orders", queue_id=0).read_all().num_rows == end + 960 - 558
        store.tiered.damage.mode = "fail"
        with pytest.raises(StoreError, match="neither"):
            store.scan(["queue_id"])
    with pytest.raises(StoreError, match="neither"):
        export(root / "store", tmp_path / "out.jsonl", options=ExportOptions(tiered=root / "tiered"))
    # What else is wrong takes seconds.
    monkeypatch.setattr("rmqstore.cli.verify.verify_flat", lambda *given: iter(()))
    monkeypatch.setattr("rmqstore.cli.verify.verify", lambda *given: iter(()))
    told = [
        line
        for line in json_lines(run("verify", root / "store", "--tiered", root / "tiered", "--json"))
        if "kind" in line
    ]
    assert [line["detail"] for line in told if line["kind"] == "gap"] == [findings[-1].detail]
    (described,) = json_lines(run("info", root / "store", "--tiered", root / "tiered", "--json"))
    assert described["tiered"]["gaps"] == [findings[-1].detail]


@pytest.mark.parametrize("name", ["out.jsonl", "out.arrow"])
@pytest.mark.parametrize("corrupt", ["skip", "report"])
def test_an_export_names_the_messages_that_neither_has(tmp_path, caplog, corrupt, name):
    root = tmp_path / "store"
    with MessageStore.open(root, config=StoreConfig(**SMALL)) as store:
        for _ in range(40):
            store.put_message(Message("T", bytes(250)))
    oracle_tiered.write_tiered(
        tmp_path, [oracle_tiered.Sent("T", 0, (), None, f"U{n}", b"", NOW + n) for n in range(8)]
    )
    for path in sorted((root / "commitlog").iterdir())[:2]:
        path.unlink()
    for more in ([], ["--begin-queue-offset", "0"]):
        tiered = ["--tiered", str(tmp_path / "tiered"), "--topic", "T", *options_of(SMALL), *more]
        done = run("export", root, *tiered, "--corrupt", corrupt, "-O", tmp_path / name, "--force")
        # What the package logs is a note of the command where nobody else takes it.
        assert done.exit_code == 0 and "of T/0 are in neither the local log nor tiered storage" in caplog.text
        assert "1 damaged parts of the log" in done.stderr and "rmqstore verify --tiered lists them" in done.stderr
        caplog.clear()


def test_what_a_broker_uploads_meanwhile_is_no_gap(tmp_path, monkeypatch):
    root = oracle_tiered.unpack("store", tmp_path)
    folder = next((root / "tiered").glob("*/golden/Orders/0"))
    later = []
    for kind in ("CONSUME_QUEUE", "COMMIT_LOG"):
        for path in sorted((folder / kind).iterdir(), key=lambda path: path.name[8:])[2:]:
            later.append((path, path.read_bytes()))
            path.unlink()
    os.remove(root / "store" / "config" / "tieredStoreMetadata.json")
    monkeypatch.setattr("rmqstore.flatfile.flat_store._LOOK_INTERVAL", 0)
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        assert store.tiered.queue("Orders", 0).max_queue_offset == 400
        for path, data in later:
            path.write_bytes(data)
        assert store.get_message("Orders", 0, 500).messages[0].queue_offset == 500
        assert store.scan(["queue_id"], topic="Orders", queue_id=0).read_all().num_rows == 960


@pytest.mark.parametrize("keyless", [0, 3, 300])
def test_messages_without_keys_hide_none_that_are_not_indexed(tmp_path, keyless):
    messages = sent()
    for number in range(keyless):
        messages.append(oracle_tiered.Sent("Orders", 1, (), None, "", b"none", NOW + 6000 + number))
    messages.append(oracle_tiered.Sent("Orders", 1, ("last",), None, "U-last", b"last", NOW + 9000))
    oracle_tiered.write_tiered(tmp_path, messages, log_size=100_000, queue_size=100_000)
    # Without the local store the newest index file is not there.
    for local in (tmp_path / "store", None):
        with open_tiered(tmp_path / "tiered", local) as store:
            assert [each.queue_offset for each in store.query_message("Orders", "last")] == [6 + keyless]
            assert [each.queue_offset for each in store.query_message("Orders", "U-last")] == [6 + keyless]
            assert len(store.query_message("Orders", "shared")) > 3


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("way", ["metadata", "no metadata", "alone", "expired"])
def test_what_the_oldest_index_file_had_is_still_found(small, copy, way, lost):
    with open_store(small) as store:
        answers = {key: sorted(places_of(store, key)) for key in KEYS}
    folder = next(copy.rglob("INDEX"))
    oldest = sorted(folder.iterdir(), key=lambda path: path.name[8:])[:lost]
    for path in oldest:
        path.unlink()
    path = copy / "store" / "config" / "tieredStoreMetadata.json"
    if way == "no metadata":
        path.unlink()
    if way == "expired":
        metadata = json.loads(re.sub(r"(\d+):", r'"\1":', path.read_text()))
        for each in oldest:
            del metadata["indexFileSegmentTable"]["B/rmq_sys_INDEX/0"][str(int(each.name[8:]))]
        path.write_text(re.sub(r'"(\d+)":', r"\1:", json.dumps(metadata)))
    with open_tiered(copy / "tiered", None if way == "alone" else copy / "store") as store:
        assert bool(store.tiered.index.problems) == (way == "metadata")
        assert {key: sorted(places_of(store, key)) for key in KEYS} == answers
        # Messages that index files have are not gone over.
        queue = store.tiered.queue("Orders", 0)
        assert store.tiered.keys_of(queue).indexed_from <= store.tiered.keys_of(queue).indexed_to
    with open_store(small) as store:
        for queue in store.tiered.queues():
            assert store.tiered.keys_of(queue).indexed_from == queue.min_queue_offset


@pytest.mark.parametrize("keyless", [0, 3, 300])
def test_messages_without_keys_hide_none_whose_index_file_is_gone(tmp_path, keyless):
    messages = [oracle_tiered.Sent("Orders", 1, ("first",), None, "U-first", b"first", NOW - 9000)]
    for number in range(keyless):
        messages.append(oracle_tiered.Sent("Orders", 1, (), None, "", b"none", NOW - 8000 + number))
    oracle_tiered.write_tiered(tmp_path, messages + sent(), log_size=100_000, queue_size=100_000)
    min(next(tmp_path.rglob("INDEX")).iterdir(), key=lambda path: path.name[8:]).unlink()
    with open_tiered(tmp_path / "tiered") as store:
        assert [each.queue_offset for each in store.query_message("Orders", "first")] == [0]
        assert [each.queue_offset for each in store.query_message("Orders", "U-first")] == [0]


def test_a_damaged_first_record_hides_nothing(copy):
    # Where older files are gone the first record says where the queue begins; its unit has to agree.
    folder = copy / "tiered" / f"{oracle_tiered.prefix('C')}_C" / "B" / "Orders" / "1" / "COMMIT_LOG"
    first, second = sorted(folder.iterdir(), key=lambda path: path.name[8:])[:2]
    with open_store(copy) as store:
        rows = store.get_table("Orders", 1, columns=["queue_offset", "phy_offset"]).to_pylist()
        begin = next(row["queue_offset"] for row in rows if row["phy_offset"] >= int(second.name[8:]))
    first.unlink()
    os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
    with open_store(copy) as store:
        assert store.min_queue_offset("Orders", 1) == begin > 0
    data = bytearray(second.read_bytes())
    data[27] += 1
    second.write_bytes(data)
    with open_store(copy) as store, pytest.raises(StoreError):
        rows_of(store)
    findings = []
    with open_store(copy, findings) as store:
        assert len(store.get_table("Orders", 1, columns="corrupt")) == 6 - begin and findings


@pytest.mark.parametrize("where", ["queue", "base"])
def test_a_number_of_thousands_of_digits_in_metadata_ends_nothing(small, copy, where):
    with open_store(small) as store:
        rows = rows_of(store)
    path = copy / "store" / "config" / "tieredStoreMetadata.json"
    text = path.read_text()
    if where == "queue":
        changed = text.replace('"B/Orders/1"', '"B/Orders/' + "9" * 5000 + '"')
    else:
        changed = re.sub(r"\b0: ?\{", '"' + "9" * 5000 + '":{', text)
    assert changed != text
    path.write_text(changed)
    with open_store(copy, []) as store:
        assert set(rows) <= set(rows_of(store))
        list(verify_flat(store.tiered))


def write_units(folder, first, units):
    """Write units over those from queue offset `first` on, in whichever flat files they lie."""
    for number, unit in enumerate(units, first):
        paths = [path for path in (folder / "CONSUME_QUEUE").iterdir() if int(path.name[8:]) <= 20 * number]
        path = max(paths, key=lambda path: path.name[8:])
        with open(path, "r+b") as file:
            file.seek(20 * number - int(path.name[8:]))
            file.write(unit)


def test_times_are_not_taken_from_wrong_units(tmp_path):
    root = oracle_tiered.unpack("store", tmp_path)
    folder = next((root / "tiered").glob("*/golden/Orders/0"))
    with open_store(root) as store:
        times = store.get_table("Orders", 0, columns=["store_timestamp"])["store_timestamp"].cast("int64").to_pylist()
        asked = sorted({times[offset] + more for offset in (*range(380, 560, 7), 0, 959) for more in (-1, 0, 1)})
        sought = [(time, which) for time in asked for which in ("lower", "upper")]
        whole = {each: store.offset_by_time("Orders", 0, *each) for each in sought}
    first = b"".join(path.read_bytes() for path in (folder / "CONSUME_QUEUE").glob("cfcd2084*"))
    # Zeros lead to the oldest record of all, and units of other messages to theirs.
    for wrong in ([bytes(20)] * 40, [first[20 * number : 20 * number + 20] for number in range(40)]):
        write_units(folder, 460, wrong)
        for (time, which), expected in whole.items():
            findings = []
            with open_store(root, findings) as store:
                found = store.offset_by_time("Orders", 0, time, which)
                # What is asked for may itself have no unit any more; then it is the place where it was.
                assert found == expected or (459 <= expected <= 500 and 459 <= found <= 500), (time, which)
                assert found == expected or findings
        assert findings
        assert {each.kind for each in findings} == {"bad_unit"}
        assert {Path(each.path).parent.name for each in findings} == {"CONSUME_QUEUE"}
        with open_store(root) as store, pytest.raises(StoreError, match="queue offset") as raised:
            store.offset_by_time("Orders", 0, times[400])
        assert Path(raised.value.path).parent.name == "CONSUME_QUEUE" and raised.value.pos is not None


def test_a_run_of_zero_units_is_one_finding(tmp_path):
    root = oracle_tiered.unpack("store", tmp_path)
    folder = next((root / "tiered").glob("*/golden/Orders/1/CONSUME_QUEUE"))
    last = max(folder.iterdir(), key=lambda path: path.name[8:])
    base, length = int(last.name[8:]), last.stat().st_size
    # A lost page in the middle, and a preallocated end that was never written.
    write_units(folder.parent, 250, [bytes(20)] * 30)
    os.truncate(last, 4 << 20)
    with open_store(root) as store:
        found = [(each.path, each.pos, each.kind, each.num) for each in verify_flat(store.tiered)]
        second = next(folder / name for name in os.listdir(folder) if int(name[8:]) == 4000)
        num = (base + (4 << 20)) // 20 - (base + length) // 20
        assert found == [(str(second), 1000, "bad_unit", 30), (str(last), length, "bad_unit", num)]
        with pytest.raises(StoreError, match="queue offset 250 ") as raised:
            store.scan(["queue_id"], topic="Orders", queue_id=1).read_all()
        assert raised.value.path == str(second)
    with pytest.raises(StoreError) as raised:
        export(root / "store", tmp_path / "out.jsonl", options=ExportOptions(tiered=root / "tiered"))
    assert Path(raised.value.path).parent == folder


@pytest.mark.parametrize("size", [2**40, 2**62])
def test_huge_numbers_in_metadata_end(copy, size):
    path = copy / "store" / "config" / "tieredStoreMetadata.json"
    metadata = json.loads(re.sub(r"(\d+):", r'"\1":', path.read_text()))
    for kind in ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable"):
        listed = metadata[kind]["B/Orders/1"]
        listed[max(listed, key=int)]["size"] = size
    path.write_text(re.sub(r'"(\d+)":', r"\1:", json.dumps(metadata)))
    findings = []
    with open_store(copy, findings) as store:
        assert store.max_queue_offset("Orders", 1) > size // 20
        rows = [row for row in rows_of(store) if row[:2] == ("Orders", "1")]
        assert len(rows) == 6 and findings
        assert store.get_table("Orders", 1, columns="queue_offset").num_rows == 6
        assert store.offset_by_time("Orders", 1, NOW * 2) >= 6
        assert len(store.query_message("Orders", "shared")) > 3
        assert {each.kind for each in verify_flat(store.tiered)} >= {"missing_file"}


@given(st.binary(min_size=0, max_size=400), st.booleans())
def test_any_bytes_as_an_index_file(tmp_path_factory, data, compacted):
    path = tmp_path_factory.mktemp("any") / "1"
    path.write_bytes((b"\xbc\xc5\x02\x85" if compacted else b"\xbc\xc5\x02\x89") + data)
    index = FlatIndexFile(MappedFile(path, len(data) + 4, read_only=True, padded=True), compacted=compacted)
    for key_hash in (0, 1, 77, 2**31 - 1):
        assert all(item.hash == key_hash for item in index.items(key_hash))
    list(index.survey())


@given(st.text(max_size=60))
def test_any_text_as_metadata(small, tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("metadata")
    (folder / "config").mkdir()
    (folder / "config" / "tieredStoreMetadata.json").write_text('{"commitLogFileSegmentTable":{' + text, "utf-8")
    with open_tiered(small / "tiered", folder) as store:
        assert {each.kind for each in store.tiered.problems} >= {"bad_metadata"}
        assert len(rows_of(store)) == len(sent())


@pytest.mark.parametrize("slots", [1, 3, 4, 100])
@pytest.mark.parametrize("number", [1, 5])
def test_slots_of_an_unsealed_file_alone_are_found(tmp_path, slots, number):
    oracle_tiered.write_tiered(tmp_path, sent()[:number], slots=slots, index_items=64)
    with open_store(tmp_path) as store:
        (index,) = store.tiered.index.files
        assert (index.slot_num, index.compacted, index.damage) == (slots, False, None)
        assert list(verify_flat(store.tiered)) == []


@pytest.mark.parametrize("tags", [None, "TagA"])
def test_a_get_ends_before_a_record_in_the_middle_of_a_file_that_cannot_be_read(tmp_path, tags):
    oracle_tiered.write_tiered(tmp_path, sent(), log_size=100_000, queue_size=2000)
    (folder,) = [path for path in (tmp_path / "tiered").rglob("Orders/1/COMMIT_LOG")]
    (file,) = folder.iterdir()
    with open_tiered(tmp_path / "tiered", tmp_path / "store") as store:
        places = [message.phy_offset for message in store.get_message("Orders", 1)]
        assert len(places) == 6 and len(store.get_message("Orders", 1, tags=tags)) == 6
    data = bytearray(file.read_bytes())
    data[places[2] + 4] ^= 1
    file.write_bytes(data)
    told = []
    with open_store(tmp_path, told) as store:
        got = store.get_message("Orders", 1, tags=tags)
        assert [message.queue_offset for message in got] == [0, 1] and got.next_queue_offset == 2 and not told
        got = store.get_message("Orders", 1, 2, tags=tags)
        assert [message.queue_offset for message in got] == [3, 4, 5] and got.next_queue_offset == 6
    (finding,) = told
    assert (finding.kind, finding.path, finding.pos) == ("bad_record", str(file), places[2])
