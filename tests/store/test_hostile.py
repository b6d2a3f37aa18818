"""Hostile stores: bytes that somebody chose, so that an answer would be wrong, late or never come.

Owns one case for each of these that was found from outside, and searches for more of them over damaged queues.  The
records come from the oracle, never from the package.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scratch import SCRATCH

from rmqstore import Message, MessageExt, MessageStore, StoreConfig, _core, _dispatch, rebuild, verify
from rmqstore.errors import CorruptionError
from rmqstore.index.index_service import IndexService
from rmqstore.store.results import GetMessageStatus

NOW = 1_700_000_000_000
SEGMENT = 65536
BLANK_MAGIC = 0xCBD43194


def config(**more: object) -> StoreConfig:
    return StoreConfig(
        mapped_file_size_commit_log=SEGMENT,
        mapped_file_size_consume_queue=2000,
        mapper_file_size_batch_consume_queue=4600,
        max_hash_slot_num=100,
        max_index_num=400,
        clean_resource_interval=0,
        **more,
    )


CONFIG = config()


def write_log(root: str | os.PathLike[str], records: list[dict], size: int = SEGMENT) -> list[int]:
    """A store of one segment with these records and nothing else; where they lie."""
    out, places = b"", []
    for number, record in enumerate(records):
        places.append(len(out))
        out += oracle.encode_record(phy_offset=len(out), store_timestamp=NOW + number, **{"topic": "T", **record})
    os.makedirs(os.path.join(root, "commitlog"))
    Path(root, "commitlog", oracle.file_name(0)).write_bytes(out.ljust(size, b"\0"))
    return places


def region_of(data: bytes, path: Path) -> _core.Region:
    path.write_bytes(data)
    with open(path, "rb") as file:
        return _core.Region.map(file.fileno(), len(data))


def kinds(root: str | os.PathLike[str], given_config: StoreConfig = CONFIG) -> list[str]:
    return [finding.kind for finding in verify(root, given_config)]


# ---------------------------------------------------------------------------------------------------------------------
# Blanks


@pytest.fixture
def false_blank(tmp_path):
    """A store whose record 40, of 300, has the magic of a blank, and where that lies."""
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        places = [store.put_message(Message("T", b"x%d" % i * 100, keys=[f"k{i}"])).phy_offset for i in range(300)]
        assert store.commit_log.max_offset > 2 * SEGMENT
    with open(tmp_path / "store" / "commitlog" / oracle.file_name(0), "r+b") as file:
        file.seek(places[40] + 4)
        file.write(struct.pack(">I", BLANK_MAGIC))
    return tmp_path / "store", places


def test_a_blank_that_does_not_fill_its_segment_is_damage(false_blank):
    root, places = false_blank
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        whole = [place for number, place in enumerate(places) if number != 40]
        assert [message.phy_offset for message in store.messages()] == whole
        assert sum(batch.num_rows for batch in store.scan()) == 299
        damage = [each for each in store.commit_log.entries() if type(each).__name__ == "Damage"]
        assert [(each.phy_offset, each.phy_offset + each.size, each.verdict.name) for each in damage] == [
            (places[40], places[41], "BAD_SIZE")
        ]
        with pytest.raises(CorruptionError, match="BAD_SIZE"):
            store.message_at(places[40])
    findings = [finding for finding in verify(root, CONFIG) if finding.path.endswith(oracle.file_name(0))]
    assert ("bad_blank", places[40]) in {(finding.kind, finding.pos) for finding in findings}


@pytest.mark.parametrize("mode", ["strict", "skip", "truncate"])
def test_recovery_finds_the_records_behind_a_false_blank(false_blank, mode):
    root, places = false_blank
    (root / "abort").touch()
    (root / "checkpoint").unlink()
    if mode == "strict":
        before = oracle.read_files(root)
        with pytest.raises(CorruptionError, match="whole records follow"):
            MessageStore.open(root, config=CONFIG, recovery=mode)
        assert oracle.read_files(root) == before
        return
    with MessageStore.open(root, config=CONFIG, recovery=mode) as store:
        assert len(list(store.messages())) == (299 if mode == "skip" else 40)
        if mode == "skip":
            assert store.recovery_report.damage[0][:2] == (places[40], places[41] - places[40])


def test_a_rebuild_takes_the_records_behind_a_false_blank(false_blank):
    root, places = false_blank
    report = rebuild(root, config=CONFIG)
    assert report.damage == [(places[40], places[41] - places[40], "BAD_SIZE")]
    assert report.units == 299


@pytest.mark.parametrize("size", [8, 9, 92, 999, 1000 - 8, 1001, -1000, 2**31 - 1])
def test_only_the_rest_of_the_segment_is_the_size_of_a_blank(tmp_path, size):
    record = oracle.encode_record(topic="T", body=b"x" * 8)
    pos = len(record)
    rest = 1000
    data = bytearray(record.ljust(pos + rest, b"\0"))
    for stated, verdict in ((size, "BAD_SIZE"), (rest, "BLANK"), (0, "EMPTY")):
        data[pos : pos + 8] = struct.pack(">iI", stated, BLANK_MAGIC)
        region = region_of(bytes(data), tmp_path / f"segment{stated}")
        assert _core.check_record(region, pos, 0)[0].name == verdict
        assert _core.decode_record(region, pos).name == verdict
        assert _dispatch.walk(region, 0, region.size, 0)[:3] == (pos, _core.Verdict[verdict], 1)
        columns = _dispatch.RecordColumns(8)
        assert _dispatch.scan(region, 0, region.size, 0, columns, np.empty(0, np.int64)) == (pos, _core.Verdict[verdict])


def test_a_follower_waits_at_a_blank_that_is_being_written(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG) as store:
        for i in range(20):
            end = store.put_message(Message("T", b"%d" % i)).phy_offset
        end = store.commit_log.max_offset
        segment = root / "commitlog" / oracle.file_name(0)
        with MessageStore.open(root, config=CONFIG, read_only=True) as follower, open(segment, "r+b") as file:
            # The magic is there and the size is not: the writer is not done.
            file.seek(end + 4)
            file.write(struct.pack(">I", BLANK_MAGIC))
            file.flush()
            follower.refresh()
            assert follower.commit_log.max_offset == end
            file.seek(end)
            file.write(struct.pack(">i", SEGMENT - end))
            file.flush()
            follower.refresh()
            assert follower.commit_log.max_offset == SEGMENT
            file.seek(end)
            file.write(bytes(8))


# ---------------------------------------------------------------------------------------------------------------------
# Inner batches and queue offsets


def inner(num: str | None, base: str | None, **more: object) -> dict:
    pairs = [("INNER_NUM", num), ("INNER_BASE", base)]
    text = b"".join(f"{name}\x01{value}\x02".encode() for name, value in pairs if value is not None)
    return {"sys_flag": 0xC0, "properties": text, **more}


@pytest.mark.parametrize(
    "num", ["32768", "65536", "65537", "2147483647", "2147483648", "4294967297", "-5", "0", "9" * 5000]
)
@pytest.mark.parametrize("with_batch", [False, True], ids=["alone", "batch topic"])
def test_an_inner_num_that_has_no_place_in_a_unit_counts_as_one(tmp_path, num, with_batch):
    records = [inner("3", "0"), inner(num, "3", queue_offset=3)] if with_batch else [inner(num, "0")]
    root = tmp_path / "store"
    places = write_log(root, [*records, {"topic": "U"}])
    bad = places[len(records) - 1]
    assert "bad_inner_batch" in kinds(root)
    report = rebuild(tmp_path / "store", config=CONFIG, output=tmp_path / "rebuilt")
    assert [(at, kind) for at, _, kind in report.damage] == [(bad, "BAD_INNER_NUM")]
    for mode in ("strict", "skip", "truncate"):
        copy = shutil.copytree(root, tmp_path / mode)
        with MessageStore.open(copy, config=CONFIG, recovery=mode) as store:
            assert [(at, kind) for at, _, kind in store.recovery_report.damage] == [(bad, "BAD_INNER_NUM")]
            assert store.max_queue_offset("T") == (4 if with_batch else 1)
            assert len(store.get_message("T", 0, 0, 100).messages) == len(records)
            assert store.max_queue_offset("U") == 1
    command = [sys.executable, "-m", "rmqstore", "recover", os.fspath(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("base", ["999999999999999999", "100000", "-9"])
def test_an_inner_base_that_the_log_has_no_room_for_gets_no_unit(tmp_path, base):
    root = tmp_path / "store"
    places = write_log(
        root, [inner("3", "0"), inner("5", base, queue_offset=3), inner("2", "8", queue_offset=8), {"topic": "U"}]
    )
    assert "bad_inner_batch" in kinds(root)
    report = rebuild(root, config=CONFIG, output=tmp_path / "rebuilt")
    assert [(at, kind) for at, _, kind in report.damage] == [(places[1], "BAD_QUEUE_OFFSET")]
    with MessageStore.open(root, config=CONFIG, recovery="strict") as store:
        assert [(at, kind) for at, _, kind in store.recovery_report.damage] == [(places[1], "BAD_QUEUE_OFFSET")]
        assert store.max_queue_offset("T") == 10
        assert [message.phy_offset for message in store.messages()] == places


def test_a_rebuild_leaves_a_record_without_unit_whose_queue_offset_or_topic_cannot_be(tmp_path):
    root = tmp_path / "store"
    records = [{}, {"queue_offset": 10**12}, {"queue_offset": 1}, {"topic": ".."}, {"topic": "a/b"}, {"topic": "U"}]
    places = write_log(root, records)
    report = rebuild(root, config=CONFIG)
    assert report.damage == [
        (places[1], places[2] - places[1], "BAD_QUEUE_OFFSET"),
        (places[3], places[4] - places[3], "BAD_TOPIC"),
        (places[4], places[5] - places[4], "BAD_TOPIC"),
    ]
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert [store.max_queue_offset(topic) for topic in ("T", "U")] == [2, 1]
        assert len(list(store.messages())) == len(records)


# ---------------------------------------------------------------------------------------------------------------------
# Further queues (LMQ)


def multi(names: str, numbers: str, **more: object) -> dict:
    text = f"INNER_MULTI_DISPATCH\x01{names}\x02INNER_MULTI_QUEUE_OFFSET\x01{numbers}\x02"
    return {"properties": text.encode(), **more}


def test_an_inner_batch_that_names_no_further_queues_is_no_finding(tmp_path):
    given_config = config(enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(tmp_path / "store", config=given_config) as store:
        inner = oracle.INNER_BATCH | oracle.NEED_UNWRAP
        for further in ({}, {"INNER_MULTI_DISPATCH": "%LMQ%x"}):
            store.put_message(Message("Inner", b"x", properties={"INNER_NUM": "2", **further}, sys_flag=inner))
            store.put_message(Message("Orders", b"x", properties=further))
        assert store.max_queue_offset("%LMQ%x") == 2
    assert not list(verify(tmp_path / "store", given_config))


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        ("%LMQ%x", "6000000"),
        ("%LMQ%x", "9" * 5000),
        ("%LMQ%x", "-1"),
        ("%LMQ%x", "9223372036854775807"),
        ("..", "0"),
        (".", "0"),
        ("a/b", "0"),
        ("%LMQ%" + "y" * 300, "0"),
        ("%LMQ%x,%LMQ%y", "1"),
        ("%LMQ%x,..", "1,0"),
    ],
)
def test_further_queues_that_cannot_be_are_a_finding_and_not_written(tmp_path, names, numbers):
    given_config = config(enable_lmq=True, enable_multi_dispatch=True)
    root = tmp_path / "store"
    records = [multi("%LMQ%x", "0"), multi(names, numbers, queue_offset=1), {"queue_offset": 2}]
    places = write_log(root, records)
    assert (places[1], "bad_multi_dispatch") in {(finding.pos, finding.kind) for finding in verify(root, given_config)}
    report = rebuild(root, config=given_config, output=tmp_path / "rebuilt")
    assert [(at, kind) for at, _, kind in report.damage] == [(places[1], "BAD_MULTI_DISPATCH")]
    copy = shutil.copytree(root, tmp_path / "copy")
    with MessageStore.open(copy, config=given_config, recovery="strict") as store:
        assert [(at, kind) for at, _, kind in store.recovery_report.damage] == [(places[1], "BAD_MULTI_DISPATCH")]
        assert store.max_queue_offset("T") == 3
        assert store.max_queue_offset("%LMQ%x") == (2 if numbers == "1,0" else 1)
    used = sum(os.lstat(Path(folder, name)).st_blocks * 512 for folder, _, names in os.walk(copy) for name in names)
    assert used < 4 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Damaged queues: reading them comes to an end


QUEUE_KINDS = ("simple", "ext", "batch")


def write_queue(root: str | os.PathLike[str], kind: str) -> StoreConfig:
    """A small store with one queue of this kind, which is in two files."""
    given_config = StoreConfig(
        mapped_file_size_commit_log=SEGMENT,
        mapped_file_size_consume_queue=200,
        mapper_file_size_batch_consume_queue=46 * 5,
        mapped_file_size_consume_queue_ext=1024,
        enable_consume_queue_ext=kind == "ext",
        max_hash_slot_num=10,
        max_index_num=100,
        clean_resource_interval=0,
    )
    with MessageStore.open(root, config=given_config) as store:
        for number in range(8 if kind == "batch" else 14):
            more = {"sys_flag": 0xC0, "properties": {"INNER_NUM": str(number % 4 + 1)}} if kind == "batch" else {}
            store.put_message(Message("T", b"%d" % number, tags=f"tag{number % 2}", **more))
    return given_config


def read_to_the_end(store: MessageStore, tags: str | None, max_num: int) -> None:
    """Whatever is asked for, the answer leads on, and a reader that follows it comes to an end."""
    low, high = store.min_queue_offset("T"), store.max_queue_offset("T")
    ended = ("OFFSET_OVERFLOW_ONE", "OFFSET_OVERFLOW_BADLY", "NO_MESSAGE_IN_QUEUE")
    for at in {*range(max(low, 0), min(high, low + 40)), low, high - 1}:
        got = store.get_message("T", 0, at, max_num, tags)
        assert got.next_queue_offset > at or got.status.value in ended, (at, got)
        assert got.status is not GetMessageStatus.FOUND or got.next_queue_offset > at
    at, gets = low, 0
    while (got := store.get_message("T", 0, at, max_num, tags)).status.value not in ended:
        assert got.next_queue_offset > at
        at, gets = got.next_queue_offset, gets + 1
        assert gets <= 60


def consume_to_the_end(store: MessageStore, folder: Path) -> None:
    from rmqstore import ConsumerOffsets

    offsets = ConsumerOffsets.load(folder / "consumerOffset.json", read_only=False)
    at = -1
    with store.consume("T", "group", timeout=0, offsets=offsets, max_num=3) as consumer:
        for number, _ in enumerate(consumer):
            assert number < 60
            committed = offsets.get("group", "T", 0)
            assert committed >= at
            at = committed
    assert at <= store.max_queue_offset("T")


def damage(path: Path, pos: int, change: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(pos)
        file.write(change)


@pytest.mark.parametrize("kind", QUEUE_KINDS)
def test_every_flipped_bit_of_a_queue_leaves_a_reader_that_moves_on(kind):
    scratch = Path(SCRATCH or "/tmp", f"rmqstore-hostile-{os.getpid()}-{kind}")
    root = scratch / "store"
    try:
        given_config = write_queue(root, kind)
        folders = (
            ["batchconsumequeue"] if kind == "batch" else ["consumequeue", "consumequeue_ext"][: 1 + (kind == "ext")]
        )
        paths = [path for folder in folders for path in sorted((root / folder).rglob("0*")) if path.is_file()]
        assert len(paths) >= 2
        chosen = random.Random(19)
        for path in paths:
            data = path.read_bytes()
            used = len(data.rstrip(b"\0")) + 1
            for pos in range(min(used, len(data))):
                # Every bit of the fields that lead on, one of every byte elsewhere.
                leads = kind == "batch" and 28 <= pos % 46 < 38
                for bit in range(8) if leads else [chosen.randrange(8)]:
                    damage(path, pos, bytes([data[pos] ^ 1 << bit]))
                    with MessageStore.open(root, config=given_config, read_only=True) as store:
                        read_to_the_end(store, None, 3)
                        read_to_the_end(store, "tag1", 32)
                        if leads and bit == chosen.randrange(8):
                            consume_to_the_end(store, scratch)
                            (scratch / "consumerOffset.json").unlink(missing_ok=True)
                damage(path, pos, data[pos : pos + 1])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module", params=QUEUE_KINDS)
def queue_store(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("queue") / "store"
    return root, write_queue(root, request.param), oracle.read_files(root)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_reader_of_a_damaged_queue_moves_on(queue_store, data):
    root, given_config, files = queue_store
    names = sorted(name for name in files if "consumequeue" in name)
    interesting = st.one_of(
        st.binary(min_size=1, max_size=12),
        st.integers(-(2**63), 2**63 - 1).map(lambda number: struct.pack(">q", number)),
        st.sampled_from([-1, 0, 1, 2, 2**31, 2**62, 2**63 - 1]).map(lambda number: struct.pack(">q", number)),
    )
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(names))
        change = data.draw(interesting)
        damage(root / name, data.draw(st.integers(0, len(files[name]) - len(change))), change)
    try:
        with MessageStore.open(root, config=given_config, read_only=True) as store:
            read_to_the_end(store, None, data.draw(st.integers(1, 40)))
            read_to_the_end(store, "tag0", 32)
            consume_to_the_end(store, root.parent)
    finally:
        (root.parent / "consumerOffset.json").unlink(missing_ok=True)
        for name in names:
            (root / name).write_bytes(files[name])


# ---------------------------------------------------------------------------------------------------------------------
# Files that are none


FILES = ["abort", "checkpoint", "config/topics.json", "config/consumerOffset.json", "config/delayOffset.json"]


def put_in_place_of(path: Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000)


@pytest.mark.parametrize("kind", ["fifo", "zero", "deep"])
@pytest.mark.parametrize("name", [*FILES, "commitlog", "consumequeue/T/0", "index"])
def test_no_command_hangs_or_breaks_on_a_file_that_is_none(tmp_path, name, kind):
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG) as store:
        store.put_message(Message("T", b"x", keys=["k"]))
    path = root / name
    if path.is_dir():
        path = next(each for each in sorted(path.iterdir()) if each.is_file())
    put_in_place_of(path, kind)
    program = f"""
import resource, sys
from rmqstore.cli import main
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for command in ("info", "verify", "recover"):
    sys.argv[:] = ["rmqstore", command, {os.fspath(root)!r}]
    try:
        code = main()
    except SystemExit as exit:
        code = exit.code
    assert code in (None, 0, 1, 3), (command, code)
"""
    arguments = [sys.executable, "-c", program]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if kind != "deep" and name == "config/topics.json":
        with MessageStore.open(root, config=CONFIG) as store:
            assert store.get_message("T").messages


def test_every_file_of_a_store_is_opened_as_a_regular_one(tmp_path):
    # A file may become something else between listing and opening.
    from rmqstore.files.mapped_file import MappedFile, MappedFilePool
    from rmqstore.files.open_file import open_regular

    for name, kind in (("fifo", "fifo"), ("zero", "zero")):
        path = tmp_path / name
        put_in_place_of(path, kind)
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
            with pytest.raises(OSError, match=r"not a regular file|No such device or address"):
                open_regular(os.fspath(path), flags)
        for read_only in (False, True):
            mapped_file = MappedFile(
                os.fspath(path), 4096, file_from_offset=0, read_only=read_only, pool=MappedFilePool(4)
            )
            with pytest.raises(OSError, match="not a regular file"):
                _ = mapped_file.region
    with open(open_regular(__file__), "rb") as file:
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)


@pytest.mark.parametrize("name", ["topics.json", "consumerOffset.json", "delayOffset.json"])
def test_settings_of_a_terabyte_take_no_memory_and_hide_nothing_else(tmp_path, name):
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG) as store:
        store.put_message(Message("T", b"body"))
    (root / "config").mkdir(exist_ok=True)
    with open(root / "config" / name, "wb") as file:
        file.truncate(1 << 40)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for command in ("info", "verify", "topics", "queues", "pending"):
        ran = subprocess.run(
            [sys.executable, "-m", "rmqstore", command, root],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ran.returncode in (0, 1) and "Traceback" not in ran.stderr, (command, ran.stderr)
    with MessageStore.open(root, read_only=True) as store:
        assert store.get_message("T").messages[0].body == b"body"


# ---------------------------------------------------------------------------------------------------------------------
# Time


def nested(size: int, step: int = 88) -> bytes:
    """A segment whose first record is damaged, and in whose body a header stands every `step` bytes that goes up to its end."""
    end = size - 4
    body = bytearray(size)
    for pos in range(0, end - step - 64, step):
        length = end - pos - step
        head = oracle.encode_record(topic="T", phy_offset=88 + pos)[:84]
        body[pos : pos + 88] = (
            struct.pack(">i", 88 + length + 4) + head[4:8] + b"\0\0\0\1" + head[12:] + struct.pack(">i", length)
        )
    body[end:] = b"\x01T\0\0"
    return bytearray(oracle.encode_record(topic="T", body=bytes(body)))


def test_a_search_for_records_takes_time_in_proportion_to_the_bytes(tmp_path):
    record = nested(6 << 20)
    record[4] ^= 1
    whole = oracle.encode_record(topic="T", body=b"found", phy_offset=len(record))
    region = region_of(bytes(record) + whole + bytes(64), tmp_path / "segment")
    assert _core.check_record(region, 88, 0)[0].name == "BAD_BODY_CRC"
    began = time.thread_time()
    assert _core.find_record(region, 1, 0) == len(record)
    # 71 000 CRCs over 3 MiB on average are 200 GiB, some 10 s at the speed of memory.
    assert time.thread_time() - began < 3


def test_a_search_agrees_with_a_look_at_every_place(tmp_path):
    chosen = random.Random(7)
    for case in range(30):
        data = bytearray()
        for _ in range(chosen.randrange(2, 12)):
            body = chosen.randbytes(chosen.choice([0, 5, 300, 5000, 9000, 40_000]))
            crc = chosen.random() < 0.5
            record = bytearray(oracle.encode_record(topic="T", body=body, phy_offset=len(data), append_prop_crc=crc))
            if chosen.random() < 0.6:
                record[chosen.randrange(len(record))] ^= 1 << chosen.randrange(8)
            data += record + chosen.randbytes(chosen.randrange(3))
        region = region_of(bytes(data) + bytes(100), tmp_path / f"segment{case}")
        for check in (0, 1, 2):
            whole = [
                at
                for at in range(region.size - 8)
                if _core.check_record(region, at, 0, check)[0] is _core.Verdict.RECORD
            ]
            search = _core.RecordSearch(region, 0, check)
            starts = sorted(chosen.randrange(region.size) for _ in range(40)) + [0, region.size - 1, region.size]
            for start in starts:
                expected = next((at for at in whole if at >= start), -1)
                assert search.find(start) == expected == _core.find_record(region, start, 0, -1, check)
                limit = chosen.randrange(start, region.size + 1)
                assert search.find(start, limit) == (expected if expected + 4 < limit else -1)


def test_a_search_outside_its_segment_is_refused(tmp_path):
    search = _core.RecordSearch(region_of(bytes(100), tmp_path / "segment"), 0)
    for pos in (-1, 101, 2**62):
        with pytest.raises(IndexError):
            search.find(pos)
    assert search.find(100) == search.find(99) == search.find(0) == -1
    search.region.close()
    with pytest.raises(Exception, match="closed"):
        search.find(0)


def test_a_search_can_be_interrupted(tmp_path):
    # As long as it takes, Ctrl-C is heard in between: a header stands in every second byte.
    region = region_of(bytes(4) + b"\xda\xa3" * (24 << 20), tmp_path / "segment")
    began = time.thread_time()
    assert _core.find_record(region, 0, 0) == -1
    whole = time.thread_time() - began

    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        began = time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        with pytest.raises(StopError):
            _core.find_record(region, 0, 0)
        assert time.thread_time() - began < whole / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def many_damages(root: Path, num: int) -> None:
    out = bytearray()
    for number in range(num):
        record = bytearray(
            oracle.encode_record(topic="T", body=b"xy", phy_offset=len(out), queue_offset=number, store_timestamp=NOW)
        )
        record[4] ^= number % 2
        out += record
    os.makedirs(root / "commitlog")
    (root / "commitlog" / oracle.file_name(0)).write_bytes(out.ljust(1 << 20, b"\0"))


@pytest.mark.parametrize("how", ["end", "verify", "recover", "rebuild"])
def test_many_damages_take_time_in_proportion_to_their_number(tmp_path, how):
    given_config = StoreConfig(
        mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20000, max_hash_slot_num=10, max_index_num=100,
        clean_resource_interval=0,
    )  # fmt: skip
    took = []
    for num in (1000, 8000):
        root = tmp_path / str(num)
        many_damages(root, num)
        began = time.thread_time()
        if how == "end":
            with MessageStore.open(root, config=given_config, read_only=True) as store:
                log = store.commit_log
                assert log.known_end() > log.find_end()
                log.set_end(log.known_end())
                assert sum(isinstance(each, MessageExt) for each in log.entries()) == num // 2
        elif how == "verify":
            assert sum(finding.kind == "bad_magic" for finding in verify(root, given_config)) == num // 2 - 1
        elif how == "recover":
            with MessageStore.open(root, config=given_config, recovery="skip") as store:
                assert len(store.recovery_report.damage) == num // 2 - 1
        else:
            assert rebuild(root, config=given_config).units == num // 2
        took.append(time.thread_time() - began)
    # Eight times as many take eight times as long; sixty times if each scans all before it.
    assert took[1] < 24 * took[0] + 0.5, took


# ---------------------------------------------------------------------------------------------------------------------
# The index


@pytest.fixture
def indexed(tmp_path):
    """A store with three index files, and how many entries each has."""
    given_config = StoreConfig(
        mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20000, max_hash_slot_num=50, max_index_num=200,
        clean_resource_interval=0,
    )  # fmt: skip
    with MessageStore.open(tmp_path / "store", config=given_config) as store:
        for number in range(500):
            store.put_message(Message("T", b"x", keys=[f"k{number}"], properties={"UNIQ_KEY": ""}))
    paths = sorted((tmp_path / "store" / "index").iterdir())
    assert len(paths) >= 3
    assert not kinds(tmp_path / "store", given_config)
    return tmp_path / "store", given_config, paths


@pytest.mark.parametrize("full", [False, True], ids=["in one file", "a file became full"])
@pytest.mark.parametrize("record", [0, 1, 7, 19])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_record_whose_keys_java_indexed_again_is_no_fault(tmp_path, record, done, full):
    # As 5.5.0 leaves the record where an index file ends that it keeps after a kill, maybe before all of its keys.
    root, entries = tmp_path / "store", 3 * record + done
    with MessageStore.open(root, config=CONFIG) as store:
        for number in range(20):
            message = Message("T", b"x", keys=[f"a{number}", f"b{number}"], properties={"UNIQ_KEY": f"u{number}"})
            store.put_message(message)
        hashes, offsets, _ = next(store.index_service.files()).read_entries(1, 60)
        order = [
            (int(key_hash), int(offset), store.commit_log.store_timestamp_at(int(offset)))
            for key_hash, offset in zip(hashes, offsets, strict=True)
        ]
    shutil.rmtree(root / "index")
    given_config = CONFIG.replace(max_index_num=entries + 1 if full else 400)
    index_service = IndexService(root, given_config)
    index_service.load()
    for key_hash, offset, timestamp in [*order[:entries], *order[3 * record :]]:
        index_service.current().put_hash(key_hash, offset, timestamp)
    index_service.flush()
    assert len(index_service.names) > 1 or not full
    assert kinds(root, given_config) == []
    # Again, but not the record that is there last.
    index_service.current().put_hash(*order[0 if record != 19 else 3])
    index_service.close()
    assert "bad_entry" in kinds(root, given_config)


@pytest.mark.parametrize("offset", [-1, 2**62, 2**63 - 1, 600_000, "above"])
@pytest.mark.parametrize("entry", [1, 50, 198, 199])
@pytest.mark.parametrize("shift", [0, -4])
def test_a_bad_entry_is_blamed_on_its_own_file_alone(indexed, offset, entry, shift):
    root, given_config, paths = indexed
    pos = 40 + 4 * 50 + 20 * entry + 4
    data = paths[0].read_bytes()
    stored = struct.unpack_from(">q", data, pos)[0]
    number = stored + 5000 if offset == "above" else offset
    # `shift`: the hash is hit as well.
    change = b"\x7f\xff\xff\xff" + struct.pack(">q", number)[:4] if shift else struct.pack(">q", number)
    damage(paths[0], pos + shift, change)
    findings = list(verify(root, given_config))
    assert findings
    assert {finding.path for finding in findings} == {os.fspath(paths[0])}
    assert not [finding for finding in findings if finding.kind == "missing_entry"]
    # The entry is named, its chain too, and nothing that lies elsewhere.
    assert len(findings) <= 6


# ---------------------------------------------------------------------------------------------------------------------
# Bytes that change while they are read


FLIPPER = """
import mmap, os, sys
path, at, good, bad = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
end = at + len(good)
print("ready", flush=True)
while os.getppid() == int(sys.argv[5]):
    for _ in range(10000):
        memory[at:end] = bad
        memory[at:end] = good
"""


def test_a_record_that_changes_between_two_looks_is_never_half_believed(tmp_path):
    # Another process changes the body's length of a record, which is whole or not, while its topic is put into the table.
    record = oracle.encode_record(topic="Topic", body=b"x" * 40)
    path = tmp_path / "segment"
    region = region_of(record + bytes(100), path)
    at = 84
    good, bad = record[at : at + 4], struct.pack(">i", 39)
    arguments = [sys.executable, "-c", FLIPPER, os.fspath(path), str(at), good.hex(), bad.hex(), str(os.getpid())]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as flipper:
        try:
            assert flipper.stdout.readline() == b"ready\n"
            seen = set()
            until = time.monotonic() + 3
            while time.monotonic() < until:
                for _ in range(500):
                    columns = _dispatch.RecordColumns(2)
                    pos, verdict = _dispatch.scan(region, 0, region.size, 0, columns, np.empty(0, np.int64), 0)
                    assert columns.topics.topics in ([], [b"Topic"])
                    assert (pos, verdict.name) in ((0, "BAD_LENGTH"), (len(record), "EMPTY"))
                    seen.add(verdict.name)
        finally:
            flipper.kill()
    assert seen


# ---------------------------------------------------------------------------------------------------------------------
# verify, readers and recovery say the same of one store


@pytest.fixture(scope="module", params=["simple", "ext", "batch", "lmq"])
def small_store(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("small") / "store"
    given_config = StoreConfig(
        mapped_file_size_commit_log=1024,
        mapped_file_size_consume_queue=100,
        mapper_file_size_batch_consume_queue=138,
        mapped_file_size_consume_queue_ext=256,
        enable_consume_queue_ext=request.param == "ext",
        enable_lmq=request.param == "lmq",
        enable_multi_dispatch=request.param == "lmq",
        enabled_append_prop_crc=True,
        max_hash_slot_num=4,
        max_index_num=12,
        clean_resource_interval=0,
    )
    with MessageStore.open(root, config=given_config) as store:
        for number in range(12):
            more = {"sys_flag": 0xC0, "properties": {"INNER_NUM": "2"}} if request.param == "batch" else {}
            if request.param == "lmq":
                more = {"properties": {"INNER_MULTI_DISPATCH": "%LMQ%x"}}
            store.put_message(Message("T", b"body %d" % number, tags=f"t{number % 2}", keys=[f"k{number}"], **more))
    assert not kinds(root, given_config)
    return root, given_config, oracle.read_files(root)


def read_log(store: MessageStore) -> list[tuple[int, int, bytes, str]]:
    return [(m.phy_offset, m.queue_offset, bytes(m.body), m.topic) for m in store.messages() if not m.corrupt]


def read_queues(store: MessageStore) -> set[int]:
    """The phy offsets that the queues lead to, read page by page; a table of each queue has the same rows."""
    places = set()
    for topic, queue_id in store.queues.keys():
        rows, at = [], 0
        while (page := store.get_message(topic, queue_id, at, 100)).next_queue_offset > at:
            rows += [(message.phy_offset, message.corrupt) for message in page]
            at = page.next_queue_offset
        if importlib.util.find_spec("pyarrow"):
            table = store.get_table(topic, queue_id, columns=["phy_offset", "corrupt"])
            assert [tuple(row.values()) for row in table.to_pylist()] == rows
        places |= {place for place, _ in rows}
    return places


def read_keys(store: MessageStore, sound: bool) -> list[int]:
    """The phy offsets that the keys of the store lead to, in the order of the log; of a sound store all of them."""
    found = []
    for number in range(12):
        answer = store.query_message("T", f"k{number}")
        assert (answer.complete or not sound) and all(message.keys == [f"k{number}"] for message in answer)
        # After damage the log is read from the next record on that is wholly sound; an entry may lead to one before it.
        found += [message.phy_offset for message in answer if not message.corrupt]
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_verify_readers_and_recovery_agree_about_a_damaged_store(small_store, data):
    root, given_config, files = small_store
    names = sorted(
        name for name in files if name.startswith(("commitlog", "consumequeue", "batchconsumequeue", "index"))
    )
    changed, cut = set(), set()
    try:
        for _ in range(data.draw(st.integers(0, 3))):
            name = data.draw(st.sampled_from(names))
            size = len(files[name])
            # The length of most files of a folder counts, so that one of them at most is cut.
            others = [each for each in names if os.path.dirname(each) == os.path.dirname(name) and each != name]
            ways = [st.binary(min_size=1, max_size=12), st.integers(1, 64).map(bytes)]
            change = data.draw(st.one_of(*ways, st.none()) if len(others) > 1 and not cut else st.one_of(*ways))
            changed.add(name)
            if change is None:
                os.truncate(root / name, data.draw(st.integers(0, size - 1)))
                cut.add(name)
            elif name not in cut:
                change = change[:size]
                damage(root / name, data.draw(st.integers(0, size - len(change))), change)
        now = oracle.read_files(root)
        findings = list(verify(root, given_config))
        with MessageStore.open(root, config=given_config, read_only=True) as store:
            messages = read_log(store)
            queued = store.get_message("T", 0, 0, 100).messages
            by_key = read_keys(store, not findings)
            # A key leads to messages that are in the log, and where nothing is wrong to all of them.
            there = [message.phy_offset for message in store.messages()]
            assert set(by_key) <= set(there)
            assert findings or (by_key == there and read_queues(store) == set(there))
        if cut:
            assert findings
            return
        whole = [(r.phy_offset, r.queue_offset, r.body, r.topic) for r in oracle.records_of(oracle.segments(now))]
        if not findings:
            # Everything is read, by the log and by the queue, and says what an independent reader says of these bytes.
            assert messages == whole
            assert len(whole) == 12
            assert queued
        # Nothing is read that is not in the log.
        assert {message.phy_offset for message in queued} <= {message[0] for message in whole} or findings
        for mode in ("strict", "skip", "truncate"):
            copy = root.parent / mode
            shutil.copytree(root, copy)
            try:
                with MessageStore.open(copy, config=given_config, recovery=mode) as store:
                    report = store.recovery_report
                    after = read_log(store)
                if not findings:
                    assert after == messages
                    assert not report.damage
                    assert report.bytes_cut == report.units_written == report.index_entries_written == 0
            except CorruptionError:
                assert mode == "strict"
                assert findings
            finally:
                shutil.rmtree(copy)
    finally:
        for name in changed:
            (root / name).write_bytes(files[name])


@pytest.mark.parametrize("how", ["gone", "cut short"])
@pytest.mark.parametrize("number", range(5))
def test_an_index_file_that_is_lost_is_not_blamed_on_the_others(golden_copy, number, how):
    # Files begin in the middle of a record's keys; the first entry of the file after a lost one is of a later key.
    copy = golden_copy("broker")
    path = sorted((copy / "index").iterdir())[number]
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, 100_000)
    findings = list(verify(copy))
    assert {each.kind for each in findings if each.path != str(path)} <= {"missing_entry"}
    entries = 7999 if number < 4 else 36356 - 4 * 7999
    assert [each.detail for each in findings if "in all" in each.detail] == [f"{entries} entries are missing in all"]
