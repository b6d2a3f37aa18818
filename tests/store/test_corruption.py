"""Corruption test: every single-bit flip and every truncation of a small store.

Owns the proof of I4 (every number read from a file is hostile) and of the promise that no answer is wrong in silence: a
store with one flipped bit is opened, everything is read from it, and whatever differs from the intact store must come
with an error, a message that is marked corrupt, or a finding of `verify`.  What RocketMQ's format leaves unprotected
without the property CRC is named here, field by field; with it nothing in the log may escape.

One process, files in memory, flip and flip back.  Without `--slow` every third byte gets one flip (the bit by a fixed seed);
with it every byte all eight.  That meets each field of three bytes and more in every record, and a shorter one in some.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tempfile

import oracle
import pytest
from scratch import SCRATCH
from test_model import content

import rmqstore
from rmqstore import Message, MessageStore, StoreConfig, StoreError

NOW = 1_700_000_000_000
SEGMENT = 1536
CHECKPOINT_USED = 48
GEOMETRY = {
    "mapped_file_size_commit_log": SEGMENT,
    "mapped_file_size_consume_queue": 100,
    "mapper_file_size_batch_consume_queue": 138,
    "max_hash_slot_num": 4,
    "max_index_num": 12,
}


@dataclasses.dataclass(repr=False)
class Intact:
    """A whole store and what is read from it."""

    root: str
    config: StoreConfig
    files: dict[str, bytes]
    records: list[oracle.Record]
    answers: dict = dataclasses.field(default_factory=dict)

    @property
    def geometry(self):
        return oracle.geometry(GEOMETRY, enabled_append_prop_crc=self.config.enabled_append_prop_crc)


def write_store(root: str, config: StoreConfig, now: list[int]) -> None:
    with MessageStore.open(root, config=config) as store:
        for number, (topic, queue_id, message) in enumerate(
            [
                ("Orders", 0, {"keys": ["k1", "k2"], "tags": "TagA", "properties": {"UNIQ_KEY": "U000001"}}),
                ("Orders", 1, {"keys": ["k1"], "properties": {"color": "red"}}),
                ("Orders", 0, {"tags": "Aa"}),
                ("Pay", 0, {"keys": ["k3"], "born_host": "[2001:db8::2]:1"}),
                ("Orders", 0, {"properties": {"color": "blue"}}),
                ("InnerTopic", 0, {"sys_flag": 0xC0, "keys": ["k5"], "properties": {"INNER_NUM": "2"}}),
                ("Orders", 0, {"keys": ["k1"], "sys_flag": 4}),
                ("Orders", 0, {"keys": ["k7"], "tags": "TagB"}),
                ("Orders", 0, {"keys": ["订单"], "sys_flag": 8, "prepared_transaction_offset": 1000}),
                ("Orders", 0, {"keys": ["k1"], "tags": "BB"}),
                ("Pay", 0, {"keys": ["k3"], "properties": {"UNIQ_KEY": "U000002"}}),
                ("InnerTopic", 0, {"sys_flag": 0xC0, "keys": ["k6"], "properties": {"INNER_NUM": "1"}}),
                ("Orders", 0, {"keys": ["k8"]}),
            ]
        ):
            now[0] += 700
            more = {"born_host": "10.0.0.9:1234", "born_timestamp": NOW - 9, **message}
            body = b"" if number == 4 else b"body %d" % number
            store.put_message(Message(topic, body, flag=number, **more), queue_id)


@pytest.fixture(scope="module", params=["plain", "propcrc"])
def intact(request):
    now = [NOW]
    scratch = tempfile.mkdtemp(prefix="rmqstore-corruption-", dir=SCRATCH)
    config = StoreConfig(**GEOMETRY, enabled_append_prop_crc=request.param == "propcrc", clock=lambda: now[0])
    root = os.path.join(scratch, "store")
    write_store(root, config, now)
    files = oracle.read_files(root)
    log = oracle.segments(files)
    assert len(log) == 2
    assert len(oracle.index_files(files)) == 2
    store = Intact(root, config, files, oracle.records_of(log))
    rebuilt = oracle.comparable(oracle.rebuild(log, store.geometry))
    assert not changes(oracle.comparable(files, oracle.QUEUES_AND_INDEX), rebuilt)
    store.answers = read_everything(store, all_offsets=True)
    assert not store.answers["errors"]
    assert not list(rmqstore.verify(root, config))
    yield store
    assert not changes(files, oracle.read_files(root))
    shutil.rmtree(scratch)


def keys_of(intact: Intact) -> list[tuple[str, str, str | None]]:
    keys = {(record.topic, key, None) for record in intact.records for key in (*record.keys, record.unique_key) if key}
    return sorted(keys | {(record.topic, record.tags, "T") for record in intact.records if record.tags}, key=str)


def read_everything(intact: Intact, *, all_offsets: bool = False) -> dict:
    """All answers of the store as it lies on disk now; errors of ours are answers too, everything else is a failure."""
    answers: dict = {"errors": []}

    def ask(name, question, *args, **options):
        try:
            answers[name] = question(*args, **options)
        except (StoreError, OSError) as error:
            answers["errors"].append(name)
            answers[name] = None
            assert str(error)

    try:
        store = MessageStore.open(intact.root, config=intact.config, read_only=True)
    except (StoreError, OSError):
        answers["errors"].append("open")
        return answers
    with store:
        # Every field of every message is decoded once here; elsewhere only where the comparison comes so far.
        ask("messages", lambda: known(store.messages()))
        for topic, queue_id in (("Orders", 0), ("Orders", 1), ("Pay", 0), ("InnerTopic", 0)):
            ask(("queue", topic, queue_id), read_queue, store, topic, queue_id)
            for time in (NOW, NOW + 2100, NOW + 6000):
                ask(("time", topic, queue_id, time), store.offset_by_time, topic, queue_id, time)
        for topic, key, index_type in keys_of(intact):
            name = topic, key, index_type
            ask(("exact", *name), store.query_message, topic, key, index_type=index_type)
            ask(("offsets", *name), store.query_offsets, topic, key, index_type=index_type)
            ask(("compat", *name), store.query_message, topic, key, index_type=index_type, compat=True)
        for phy_offset in range(2 * SEGMENT) if all_offsets else [record.phy_offset for record in intact.records]:
            try:
                message = store.message_at(phy_offset)
                answers["at", phy_offset] = content(message)
            except (StoreError, OSError):
                answers["at", phy_offset] = None
    return answers


def known(messages) -> list[tuple]:
    # A message that is marked corrupt is no wrong answer.
    return [(message.phy_offset, None if message.corrupt else content(message)) for message in messages]


def read_queue(store: MessageStore, topic: str, queue_id: int) -> list:
    found, at = [], 0
    for _ in range(50):
        got = store.get_message(topic, queue_id, at, 32)
        found += got.messages
        if got.next_queue_offset <= at and got.status.name != "OFFSET_TOO_SMALL":
            return found
        at = got.next_queue_offset
    raise AssertionError("a reader that follows next_queue_offset never comes to an end")


def is_wrong(intact: Intact, answers: dict) -> list:
    """The answers that differ from the intact store's without saying so."""
    wrong = []
    for name, expected in intact.answers.items():
        if name == "errors" or name not in answers or name in answers["errors"]:
            continue
        got = answers[name]
        if name[0] == "at":
            # An error is a right answer here; another message is not.
            if got is not None and got != expected:
                wrong.append(name)
        elif name[0] in ("queue", "exact", "compat") or name == "messages":
            got, expected = (known(each) if name != "messages" else each for each in (got, expected))
            marked = {phy_offset for phy_offset, what in got if what is None}
            if [each for each in got if each[1] is not None] != [each for each in expected if each[0] not in marked]:
                wrong.append(name)
        elif got != expected:
            wrong.append(name)
    return wrong


def findings(intact: Intact) -> list:
    """Return the findings of verify, which never raises for damage, and never stops at the first."""
    found = list(rmqstore.verify(intact.root, intact.config))
    for finding in found:
        assert finding.path.startswith(intact.root)
        assert finding.kind
        assert finding.detail
    return found


def check(intact: Intact, what: object, *, all_offsets: bool = False) -> tuple[bool, str]:
    """Read everything and verify; whether a wrong answer escaped, and which."""
    answers = read_everything(intact, all_offsets=all_offsets)
    found = findings(intact)
    if "open" in answers["errors"]:
        assert found, f"{what}: the store cannot be opened, but verify finds nothing"
        return False, ""
    wrong = [] if found else is_wrong(intact, answers)
    return bool(wrong), f"{what}: {wrong[:3]}"


def fields_of(record: oracle.Record) -> list[tuple[str, int, int]]:
    """(name, first byte, number of bytes) of every field of a record, from its begin."""
    born = 20 if record.sys_flag & oracle.BORN_HOST_V6 else 8
    store = 20 if record.sys_flag & oracle.STORE_HOST_V6 else 8
    fields, at = [], 0
    for name, size in (
        ("total_size", 4), ("magic", 4), ("body_crc", 4), ("queue_id", 4), ("flag", 4), ("queue_offset", 8),
        ("physical_offset", 8), ("sys_flag", 4), ("born_timestamp", 8), ("born_host", born), ("store_timestamp", 8),
        ("store_host", store), ("reconsume_times", 4), ("prepared_transaction_offset", 8), ("body_length", 4),
        ("body", len(record.body)), ("topic_length", 1 if record.version == 1 else 2),
        ("topic", len(record.topic.encode())), ("properties_length", 2),
    ):  # fmt: skip
        fields.append((name, at, size))
        at += size
    for pair in record.properties_raw.split(b"\x02")[:-1]:
        name = pair.split(b"\x01")[0].decode()
        fields.append((f"property {name}", at, len(pair) + 1))
        at += len(pair) + 1
    assert at == record.size
    return fields


def field_at(intact: Intact, path: str, pos: int) -> str:
    """The name of the field at a position of a file; of records by the field, elsewhere by the folder."""
    folder, _, name = path.partition("/")
    if folder != "commitlog":
        return folder
    phy_offset = int(name) + pos
    for record in intact.records:
        if record.phy_offset <= phy_offset < record.end:
            for field, at, size in fields_of(record):
                if at <= phy_offset - record.phy_offset < at + size:
                    prepared = record.transaction_type == oracle.PREPARED
                    return f"{field} of a prepared message" if prepared and field.startswith("queue_") else field
    return "blank or tail"


def positions(intact: Intact) -> list[tuple[str, int]]:
    return [
        (path, pos)
        for path, data in intact.files.items()
        if path.split("/")[0] in ("commitlog", "consumequeue", "batchconsumequeue", "index", "checkpoint")
        for pos in range(CHECKPOINT_USED if path == "checkpoint" else len(data))
    ]


def flips(intact: Intact, slow: bool) -> list[tuple[str, int, int]]:
    dice = random.Random(20231114)
    every = range(8)
    found = []
    for path, pos in positions(intact):
        if slow:
            found += [(path, pos, bit) for bit in every]
        elif pos % 3:
            # There are many records, so that every field of a record is still damaged.
            continue
        elif pos % 16 == 0 or any(intact.files[path][max(pos - 20, 0) : pos + 20]):
            # Of the long ranges of zeros after the ends every 16th byte is enough.
            found.append((path, pos, dice.randrange(8)))
    return found


#: Nothing in the format covers these without the property CRC; a change of them is only seen where it breaks something
#: else (a store time that the index or the search by time contradicts, for instance).
UNPROTECTED = {
    "flag",
    "sys_flag",
    "born_timestamp",
    "born_host",
    "store_timestamp",
    "store_host",
    "reconsume_times",
    "prepared_transaction_offset",
    "property color",
    # These are in no queue.
    "queue_id of a prepared message",
    "queue_offset of a prepared message",
}


def flip_all(intact: Intact, slow: bool) -> None:
    escaped: dict[str, list[str]] = {}
    descriptors = {path: os.open(os.path.join(intact.root, path), os.O_RDWR) for path in intact.files}
    try:
        for path, pos, bit in flips(intact, slow):
            byte = intact.files[path][pos]
            os.pwrite(descriptors[path], bytes([byte ^ 1 << bit]), pos)
            try:
                escapes, text = check(intact, f"{path} byte {pos} bit {bit}")
            finally:
                os.pwrite(descriptors[path], bytes([byte]), pos)
            if escapes:
                escaped.setdefault(field_at(intact, path, pos), []).append(text)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    expected = set() if intact.config.enabled_append_prop_crc else UNPROTECTED
    strange = {name: (len(texts), texts[:5]) for name, texts in escaped.items() if name not in expected}
    assert not strange, f"wrong answers that nothing tells of: {strange}"
    assert set(escaped) == expected


def test_bit_flips_are_never_silent(intact):
    flip_all(intact, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bit_flip_is_never_silent(intact):
    flip_all(intact, slow=True)


def damaged(intact: Intact, path: str, data: bytes | None):
    """Put other bytes in the place of a file for one check; None takes the file away."""
    full = os.path.join(intact.root, path)
    try:
        if data is None:
            os.unlink(full)
        else:
            with open(full, "wb") as file:
                file.write(data)
        return check(intact, path)
    finally:
        with open(full, "wb") as file:
            file.write(intact.files[path])


def structures(intact: Intact) -> list[str]:
    return sorted({path for path, _ in positions(intact)})


def lengths(size: int, slow: bool, seed: str) -> list[int]:
    if slow:
        return list(range(size))
    dice = random.Random(seed)
    edges = {0, 1, 4, 8, 19, 20, 39, 40, 41, 46, 48, size - 20, size - 1}
    return sorted({n for n in edges if 0 <= n < size} | set(dice.sample(range(size), min(size, size // 24 + 4))))


def truncate_all(intact: Intact, slow: bool) -> None:
    for path in structures(intact):
        size = len(intact.files[path])
        used = CHECKPOINT_USED + 8 if path == "checkpoint" else size
        for length in lengths(used, slow, path):
            escapes, text = damaged(intact, path, intact.files[path][:length])
            assert not escapes, f"cut at {length}: {text}"
            escapes, text = damaged(intact, path, intact.files[path][:length].ljust(size, b"\0"))
            assert not escapes, f"zeroed from {length} on: {text}"


def test_truncated_files_are_never_silent(intact):
    truncate_all(intact, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_truncation_is_never_silent(intact):
    truncate_all(intact, slow=True)


def test_missing_files_are_never_silent(intact):
    first_segment = f"commitlog/{oracle.file_name(0)}"
    for path in structures(intact):
        if path not in ("checkpoint", first_segment):
            escapes, text = damaged(intact, path, None)
            assert not escapes, f"removed: {text}"


def test_a_log_without_its_first_segment_begins_later(intact):
    # That is what retention leaves, and no finding: the rest is there, and nothing else.
    first_segment = f"commitlog/{oracle.file_name(0)}"
    full = os.path.join(intact.root, first_segment)
    os.unlink(full)
    try:
        answers = read_everything(intact)
        kept = [each for each in intact.answers["messages"] if each[0] >= SEGMENT]
        assert kept
        same = answers["messages"] == kept
        assert same
        for name, expected in intact.answers.items():
            if name[0] in ("queue", "exact"):
                later = [each for each in known(expected) if each[0] >= SEGMENT]
                same = known(answers[name]) == later
                assert same, name
    finally:
        with open(full, "wb") as file:
            file.write(intact.files[first_segment])


def test_longer_files_are_never_silent(intact):
    for path in structures(intact):
        for more in (1, 20, 4096):
            escapes, text = damaged(intact, path, intact.files[path] + bytes(more))
            assert not escapes, f"{more} bytes longer: {text}"


def test_zeroed_stretches_and_noise_are_never_silent(intact):
    dice = random.Random(7)
    for path in structures(intact):
        data = intact.files[path]
        used = CHECKPOINT_USED if path == "checkpoint" else len(data)
        for _ in range(12):
            begin = dice.randrange(used)
            end = min(begin + dice.choice((1, 4, 8, 20, 64, 300)), used)
            for fill in (bytes(end - begin), dice.randbytes(end - begin), b"\xff" * (end - begin)):
                escapes, text = damaged(intact, path, data[:begin] + fill + data[end:])
                touched = {field_at(intact, path, pos) for pos in range(begin, end)}
                if escapes:
                    assert not intact.config.enabled_append_prop_crc, text
                    assert touched <= UNPROTECTED, f"{begin} to {end}: {text}"


def test_inference_survives_every_flip(intact):
    # The geometry is guessed from damaged files: an answer or an error of ours, and never a crash.
    for path, pos, bit in flips(intact, slow=False):
        if path == "checkpoint":
            continue
        full = os.path.join(intact.root, path)
        descriptor = os.open(full, os.O_RDWR)
        byte = intact.files[path][pos]
        os.pwrite(descriptor, bytes([byte ^ 1 << bit]), pos)
        try:
            StoreConfig.infer(intact.root)
        except (StoreError, OSError) as error:
            assert str(error)
        finally:
            os.pwrite(descriptor, bytes([byte]), pos)
            os.close(descriptor)


# ------------------------------------------------------------------------------------------------ opening for writing


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Names of the files that are not what they were (pytest's own comparison of long bytes takes minutes)."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def open_damaged_for_writing(intact: Intact, path: str, pos: int, bit: int, clean: bool, recovery: str) -> None:
    copy = os.path.join(os.path.dirname(intact.root), "copy")
    shutil.copytree(intact.root, copy)
    try:
        if not clean:
            # An unclean exit whose checkpoint never reached the disk: everything is looked at.
            with open(os.path.join(copy, "abort"), "wb") as file:
                file.write(b"1")
            if path != "checkpoint":
                os.unlink(os.path.join(copy, "checkpoint"))
        full = os.path.join(copy, path)
        with open(full, "r+b") as file:
            file.seek(pos)
            file.write(bytes([intact.files[path][pos] ^ 1 << bit]))
        before = oracle.read_files(copy)
        what = f"{path} byte {pos} bit {bit}, {'clean' if clean else 'unclean'}, recovery={recovery}"
        hit = None
        if path.startswith("commitlog/"):
            phy_offset = int(path.split("/")[1]) + pos
            hit = next((record for record in intact.records if record.phy_offset <= phy_offset < record.end), None)
        try:
            store = MessageStore.open(copy, config=intact.config, recovery=recovery)
        except (StoreError, OSError) as error:
            assert str(error)
            changed = changes(before, oracle.read_files(copy))
            assert not changed, f"{what}: refused ({error}), but changed {changed}"
            return
        with store:
            whole = {message.phy_offset: content(message) for message in store.messages() if not message.corrupt}
            for record in intact.records:
                if record is not hit:
                    same = whole.get(record.phy_offset) == intact.answers["at", record.phy_offset]
                    assert same, f"{what}: the record at {record.phy_offset} is gone; {store.recovery_report}"
            if not clean and hit is None:
                for name, expected in intact.answers.items():
                    if name[0] == "queue" and path != "checkpoint":
                        got = read_queue(store, *name[1:])
                        same = known(got) == known(expected)
                        assert same, f"{what}: {name} reads otherwise; {store.recovery_report}"
    finally:
        shutil.rmtree(copy)


def write_flips(intact: Intact, slow: bool) -> list[tuple[str, int, int]]:
    every = flips(intact, slow)
    return every if slow else random.Random(11).sample(every, 150)


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
@pytest.mark.parametrize("recovery", ["strict", "skip"])
def test_writing_on_damage_loses_nothing(intact, clean, recovery):
    for path, pos, bit in write_flips(intact, slow=False):
        open_damaged_for_writing(intact, path, pos, bit, clean, recovery)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
@pytest.mark.parametrize("recovery", ["strict", "skip"])
def test_writing_on_every_damage_loses_nothing(intact, clean, recovery):
    for path, pos, bit in write_flips(intact, slow=True):
        open_damaged_for_writing(intact, path, pos, bit, clean, recovery)
