"""One store in turns: rmqstore writes, RocketMQ reads it and appends, rmqstore recovers and appends, and so on.

Either side closes in order or is killed.  After each opening and each append everything is compared: with what was
acknowledged, and with what the other side said last.  What Java may get wrong after a kill is named where it is allowed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter

import oracle
import pytest
from answers import assert_same, assert_whole, differences, dump, lines_of
from our_process import RmqstoreProcess, our_config
from peer import copy_store, disk_size

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.files import prepared_files
from rmqstore.store import recovery

pytestmark = pytest.mark.java

T0 = 1700000000000
# Store times are this far apart, so that each turn is longer than the three seconds that recovery goes back.
STEP = 331
SMALL = {
    "mapped_file_size_commit_log": 16384,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 120,
}
GEOMETRIES = {
    "small": SMALL,
    "large": {
        "mapped_file_size_commit_log": 1 << 20,
        "mapped_file_size_consume_queue": 6000,
        "max_hash_slot_num": 1000,
        "max_index_num": 8000,
    },
    "property CRC": {**SMALL, "enabled_append_prop_crc": True},
    "property CRC verified": {**SMALL, "enabled_append_prop_crc": True, "force_verify_prop_crc": True},
    "extension": {**SMALL, "enable_consume_queue_ext": True, "mapped_file_size_consume_queue_ext": 1024},
    "index safe": {**SMALL, "max_index_num": 900, "message_index_safe": True},
    "sync flush": {**SMALL, "flush_disk_type": "SYNC_FLUSH"},
    "deep chains": {**SMALL, "mapped_file_size_commit_log": 32768, "max_hash_slot_num": 10, "max_index_num": 2500},
}
# For each turn: whether rmqstore is killed, whether Java is.
SCHEDULES = {
    "closed": [(False, False)] * 4,
    "rmqstore killed": [(True, False)] * 4,
    "java killed": [(False, True)] * 4,
    "both killed": [(True, True)] * 4,
    "mixed": [(False, False), (True, False), (False, True), (True, True)],
}
CASES = [("small", schedule, 4) for schedule in SCHEDULES if schedule != "mixed"]
CASES += [(name, "mixed", 4) for name in GEOMETRIES if name != "small"]
# Of turns that are all of one kind the second is the first that finds what such a turn left; the others say the same.  The
# store with checked properties has the bytes of the one where they are verified too.
SHORT = [(name, schedule, 4 if schedule == "mixed" else 2) for name, schedule, _ in CASES if name != "property CRC"]
CASES = [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in SHORT)]


def script(first: int, count: int) -> list[dict]:
    """Messages in the words of the peer's scripts; the fifth has no properties at all."""
    lines = []
    for number in range(first, first + count):
        line = {
            "topic": "Payments" if number % 6 == 0 else "Orders", "queueId": number % 3,
            "body": b"message %d " % number * (1 + number % 9),
            "storeTimestamp": T0 + number * STEP, "bornTimestamp": T0 + number * STEP - 7,
            "properties": {
                "UNIQ_KEY": f"U{number:05}", "KEYS": f"O-{number} CUST-{number % 17} 订单-{number % 19}",
                "TAGS": f"t{number % 13}",
            },
        }  # fmt: skip
        if number % 5 == 4:
            line["properties"] = {}
        lines.append(line)
    return lines


def as_put(line: dict) -> tuple[int, Message, int]:
    """A line of a script for rmqstore: store time, message, queue id."""
    properties = dict(line["properties"])
    message = Message(
        line["topic"], line["body"], keys=properties.pop("KEYS", "").split(), tags=properties.pop("TAGS", None),
        properties=properties, born_timestamp=line["bornTimestamp"],
    )  # fmt: skip
    return line["storeTimestamp"], message, line["queueId"]


class Clock:
    """The store's clock: it stands where the script says."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Ledger:
    """Everything that was acknowledged, by either side, in the order of the log."""

    def __init__(self):
        self.places: list[tuple[str, int, int, int]] = []
        self.keys: dict[tuple[str, str, str | None], list[int]] = {}

    def add(self, line: dict, queue_offset: int, phy_offset: int) -> None:
        topic, properties = line["topic"], line["properties"]
        self.places.append((topic, line["queueId"], queue_offset, phy_offset))
        names = [(key, None) for key in [*properties.get("KEYS", "").split(), properties.get("UNIQ_KEY")] if key]
        if "TAGS" in properties:
            names.append((properties["TAGS"], "T"))
        for key, index_type in names:
            self.keys.setdefault((topic, key, index_type), []).insert(0, phy_offset)

    def note(self, lines: list[dict], puts: list[dict]) -> None:
        """Add lines that Java put, with its answers."""
        for line, put in zip(lines, puts, strict=True):
            self.add(line, put["queueOffset"], put["offset"])

    def assert_found(self, lines: list[dict]) -> None:
        """A dump has all of it in its queues, and every message under some key; more than once, it may be."""
        assert_whole(lines, self.places)
        assert {offset for line in lines_of(lines, "query") for offset in line["offsets"]} == {
            offset for offsets in self.keys.values() for offset in offsets
        }

    def assert_in(self, lines: list[dict], doubled: int) -> None:
        """A dump holds all of it; at most `doubled` records come twice in the index, each time the index was made again."""
        assert_whole(lines, self.places)
        found = {
            (line["topic"], line["key"], line.get("indexType")): line["offsets"] for line in lines_of(lines, "query")
        }
        assert set(found) == set(self.keys)
        twice: set[int] = set()
        for name, offsets in self.keys.items():
            # The peer gives at most 64, ours are fewer.
            assert len(offsets) + doubled <= 64
            assert list(dict.fromkeys(found[name])) == offsets, name
            twice |= {offset for offset, count in Counter(found[name]).items() if count > 1}
        assert len(twice) <= doubled


def seconds_apart(lines: list[dict]) -> list[dict]:
    """The lines, each stored a second later: Java begins three seconds before the checkpoint's time."""
    for number, line in enumerate(lines):
        line["storeTimestamp"] += 1000 * number
    return lines


def put_all(process: RmqstoreProcess, ledger: Ledger, lines: list[dict]) -> None:
    """Put lines of a script through rmqstore, and note what it acknowledged."""
    places = process.put([as_put(line) for line in lines])
    for line, (queue_offset, phy_offset) in zip(lines, places, strict=True):
        ledger.add(line, queue_offset, phy_offset)


def assert_alike(ours: list[dict], theirs: list[dict]) -> None:
    """Two dumps differ at most in that a record comes twice under a key."""
    for mine, his in differences(ours, theirs):
        assert mine["type"] == his["type"] == "query", (mine, his)
        assert set(mine["offsets"]) == set(his["offsets"]), (mine, his)


@pytest.mark.parametrize(("name", "schedule", "turns"), CASES)
def test_rmqstore_and_java_in_turns(java_store, tmp_path, name, schedule, turns):
    settings = {**GEOMETRIES[name], "store_host": "10.0.0.1:10911"}
    count = 90 if name == "deep chains" else 36
    root = tmp_path / "store"
    ledger = Ledger()
    number = 0
    theirs: list[dict] = []
    java_killed = False
    # A record at the end of an index file that is kept may be indexed again where Java makes the rest again.
    doubled = 0
    for kill_ours, kill_java in SCHEDULES[schedule][:turns]:
        ours_script, java_script = script(number, count), script(number + count, count)
        number += 2 * count
        clock = Clock()
        config = our_config(settings, clock=clock)
        if theirs:
            with MessageStore.open(root, config=config, read_only=True) as store:
                ours = dump(store)
                if not java_killed:
                    assert_same(ours, theirs)
                assert_whole(ours, ledger.places)

        puts = [as_put(line) for line in ours_script]
        half = len(puts) // 2
        if kill_ours:
            with RmqstoreProcess(root, settings) as process:
                assert process.clean is not java_killed
                if theirs:
                    ours = process.dump()
                    ledger.assert_in(ours, doubled)
                    assert_alike(ours, theirs)
                places = process.put(puts[:half])
                process.flush()
                places += process.put(puts[half:])
                for line, (queue_offset, phy_offset) in zip(ours_script, places, strict=True):
                    ledger.add(line, queue_offset, phy_offset)
                ours = process.dump()
                process.kill()
        else:
            with MessageStore.open(root, config=config) as store:
                assert store.recovery_report.clean is not java_killed
                if theirs:
                    ours = dump(store)
                    ledger.assert_in(ours, doubled)
                    assert_alike(ours, theirs)
                for line, (clock.now, message, queue_id) in zip(ours_script, puts, strict=True):
                    put = store.put_message(message, queue_id)
                    ledger.add(line, put.queue_offset, put.phy_offset)
                ours = dump(store)
        assert (root / "abort").exists() is kill_ours
        ledger.assert_in(ours, doubled)

        before, answers, theirs = java_store.turn(root, settings, java_script, kill=kill_java)
        doubled += kill_ours
        if kill_ours:
            assert_alike(ours, before)
        else:
            assert_same(ours, before)
        ledger.assert_in(before, doubled)
        for line, answer in zip(java_script, answers, strict=True):
            assert answer["status"] == "PUT_OK"
            ledger.add(line, answer["queueOffset"], answer["offset"])
        ledger.assert_in(theirs, doubled)
        assert (root / "abort").exists() is kill_java
        java_killed = kill_java

    with MessageStore.open(root, config=our_config(settings)) as store:
        ours = dump(store)
        ledger.assert_in(ours, doubled)
        assert_alike(ours, theirs)
        if name == "deep chains":
            counts = [index.index_count - 1 for index in store.index_service.files()]
            # Ten slots: chains of 200 and more.
            assert len(counts) == 2 and sum(counts) >= 2000
    with MessageStore.open(root, config=our_config(settings), read_only=True) as store:
        assert_same(dump(store), ours)


def test_default_geometry(java_store, tmp_path):
    """Segments of 1 GiB and index files of 420 MB: they are allocated, but nothing writes more than what they hold."""
    made = tmp_path / "made"
    ledger = Ledger()
    clock = Clock()
    config = StoreConfig(clock=clock)
    with MessageStore.open(made, config=config) as store:
        for line in script(0, 60):
            clock.now, message, queue_id = as_put(line)
            put = store.put_message(message, queue_id)
            ledger.add(line, put.queue_offset, put.phy_offset)
        ours = dump(store)
    sizes = {path.stat().st_size for path in made.rglob("*") if path.is_file() and path.name.isdigit()}
    assert sizes == {1 << 30, 6_000_000, 420_000_040}
    root = copy_store(made, tmp_path / "store")
    shutil.rmtree(made)
    assert disk_size(root) < 64 << 20

    # Java is killed, rmqstore recovers, appends and is killed, Java goes on and closes, rmqstore reads.
    java_script = script(60, 60)
    before, answers, theirs = java_store.turn(root, config, java_script, kill=True)
    assert_same(ours, before)
    for line, answer in zip(java_script, answers, strict=True):
        ledger.add(line, answer["queueOffset"], answer["offset"])
    ledger.assert_in(theirs, 0)
    assert disk_size(root) < 64 << 20

    with RmqstoreProcess(root, {}) as process:
        assert not process.clean
        put_all(process, ledger, script(120, 60))
        ours = process.dump()
        ledger.assert_in(ours, 0)
        assert process.written() < 64 << 20
        process.kill()
    assert disk_size(root) < 2 << 30

    java_script = script(180, 60)
    before, answers, theirs = java_store.turn(root, config, java_script)
    assert_alike(ours, before)
    for line, answer in zip(java_script, answers, strict=True):
        ledger.add(line, answer["queueOffset"], answer["offset"])
    ledger.assert_in(theirs, 1)
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean
        assert_same(dump(store), theirs)
    assert disk_size(root) < 2 << 30
    # Not left for the next runs of pytest, which keeps the folders of the last three.
    shutil.rmtree(root)


@pytest.mark.parametrize("kill_java", [False, True], ids=["java closed", "java killed"])
def test_a_segment_prepared_beforehand(java_store, tmp_path, kill_java):
    """Killed when the next segment lay ready: Java finds all, goes on into a segment of its own, and rmqstore after it."""
    settings = {**GEOMETRIES["large"], "max_index_num": 600}
    size = settings["mapped_file_size_commit_log"]
    root = tmp_path / "store"
    ledger = Ledger()
    lines = script(0, 120)
    for line in lines:
        line["body"] = line["body"] * 400

    with RmqstoreProcess(root, settings) as process:
        # Message by message up to three quarters of the first segment.
        while not ledger.places or ledger.places[-1][3] < size * 3 // 4:
            put_all(process, ledger, [lines.pop(0)])
        deadline = time.monotonic() + 240
        while [path.stat().st_size for path in root.rglob("*") if path.is_file()].count(size) < 2:
            assert time.monotonic() < deadline, "no segment was prepared"
            time.sleep(0.05)
        process.kill()
    before, answers, theirs = java_store.turn(root, settings, lines, kill=kill_java)
    ledger.assert_in(before, 1)
    for line, answer in zip(lines, answers, strict=True):
        ledger.add(line, answer["queueOffset"], answer["offset"])
    assert ledger.places[-1][3] > size
    ledger.assert_in(theirs, 1)
    more = script(120, 40)
    with RmqstoreProcess(root, settings) as process:
        assert process.clean is not kill_java
        ours = process.dump()
        assert_alike(ours, theirs)
        put_all(process, ledger, more)
        ledger.assert_in(process.dump(), 1)
        process.kill()
    with MessageStore.open(root, config=our_config(settings)) as store:
        ledger.assert_in(dump(store), 1)
    # Nothing that was prepared, or half made, is left.
    assert sorted(path.name for path in root.iterdir() if path.is_file()) in (
        ["abort.bak", "checkpoint", "lock", "rmqstore.json"],
        ["checkpoint", "lock", "rmqstore.json"],
    )


@pytest.mark.parametrize("opened_first", [False, True], ids=["Java at once", "rmqstore first"])
def test_a_kill_with_more_than_ten_segments_since_the_last_full_index_file(java_store, tmp_path, opened_first):
    """Java (5.5.0) deletes the newest index file and looks at ten segments; where we opened it before, it has all keys."""
    settings = {**SMALL, "mapped_file_size_commit_log": 4096, "max_index_num": 20_000}
    root = tmp_path / "store"
    ledger = Ledger()
    lines = script(0, 500)
    with RmqstoreProcess(root, settings) as process:
        put_all(process, ledger, lines)
        process.kill()
    segments = sorted(int(path.name) for path in (root / "commitlog").iterdir())
    assert len(segments) > 12
    if opened_first:
        MessageStore.open(root, config=our_config(settings)).close()
    copy = copy_store(root, tmp_path / "copy")
    found, _, _ = java_store.turn(copy, settings, script(500, 1))
    assert_whole(found, ledger.places)
    by_key = {offset for line in lines_of(found, "query") for offset in line["offsets"]}
    with_key = {offset for offsets in ledger.keys.values() for offset in offsets}
    if opened_first:
        assert by_key == with_key
    else:
        # The newest of the segments that are there may have no record yet.
        assert {offset for offset in with_key if offset >= segments[-9]} <= by_key
        assert min(by_key) >= segments[-12] and by_key < with_key
    with MessageStore.open(root, config=our_config(settings), read_only=True) as store:
        ledger.assert_in(dump(store), 0)


@pytest.mark.parametrize("hours", [(0, -1), (0, -1, 2), (0, -1, -2), (0, -1, 0)], ids=str)
def test_a_kill_after_the_clock_was_set_back(java_store, tmp_path, hours):
    """Java deletes index files by their time, and begins by that of segments: our checkpoint allows for it."""
    settings = {**SMALL, "mapped_file_size_commit_log": 32768}
    root = tmp_path / "store"
    ledger = Ledger()
    lines = script(0, 400)
    for number, line in enumerate(lines):
        # After the first change two index files become full, after the others none.
        change = 0 if number < 150 else 1 if number < 380 else 2
        line["storeTimestamp"] += 3_600_000 * hours[min(change, len(hours) - 1)]
    with RmqstoreProcess(root, settings) as process:
        for part in (lines[:200], lines[200:]):
            put_all(process, ledger, part)
            process.flush()
        process.kill()
    found, _, _ = java_store.turn(root, settings, script(400, 1))
    ledger.assert_found(found)


@pytest.mark.parametrize(
    ("flushed", "changes"),
    [
        # Index files become full after the flush and before the change; a later one ends before the checkpoint's time.
        (150, [(260, -1)]),
        (150, [(260, -1), (270, -2)]),
        # A segment begins in the hour before, within an index file that ends after the checkpoint's time.
        (150, [(200, -1), (300, 1)]),
    ],
    ids=str,
)
def test_a_kill_after_the_clock_was_set_back_since_the_last_flush(java_store, tmp_path, flushed, changes):
    """The put that sees it flushes first: no index file is between those that Java keeps, and no segment begins too early."""
    settings = {**SMALL, "max_index_num": 240}
    root = tmp_path / "store"
    ledger = Ledger()
    lines = script(0, 320)
    for number, line in enumerate(lines):
        line["storeTimestamp"] += 3_600_000 * ([0] + [hours for first, hours in changes if first <= number])[-1]
    with RmqstoreProcess(root, settings) as process:
        put_all(process, ledger, lines[:flushed])
        process.flush()
        put_all(process, ledger, lines[flushed:])
        process.kill()
    found, _, _ = java_store.turn(root, settings, script(400, 1))
    ledger.assert_found(found)


def open_and_die(root, settings):
    """Open the store in a process that dies when its abort file is there and it has flushed nothing."""
    child = os.fork()
    if not child:
        recovery._cut_log = lambda *args: os._exit(7)
        MessageStore.open(root, config=our_config(settings))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("max_index_num", [20_000, 120], ids=["none full", "some full"])
@pytest.mark.parametrize("left_by", ["java closed", "java killed", "rmqstore closed"])
def test_a_kill_within_an_opening(java_store, tmp_path, left_by, max_index_num):
    """Java's checkpoint says that all was dispatched: by that it would begin behind keys of the index file it deletes."""
    settings = {**SMALL, "max_index_num": max_index_num}
    root = tmp_path / "store"
    root.mkdir()
    ledger, lines = Ledger(), seconds_apart(script(0, 260))
    if left_by == "rmqstore closed":
        with RmqstoreProcess(root, settings) as process:
            put_all(process, ledger, lines)
        MessageStore.open(root, config=our_config(settings)).close()
    else:
        # Java says so when it closes, and one that is killed after it leaves that as it is.
        kills = [False, True][: 1 + (left_by == "java killed")]
        for part, kill in zip((lines[:250], lines[250:]), kills):
            _, puts, _ = java_store.turn(root, settings, part, kill=kill)
            ledger.note(part, puts)
    assert 2 < len(os.listdir(root / "commitlog")) <= 10
    open_and_die(root, settings)
    found, _, _ = java_store.turn(root, settings, script(400, 1))
    ledger.assert_found(found)


def test_a_kill_before_the_first_entry_of_an_index_file(java_store, tmp_path):
    """Java takes a file without its head for one that lacks everything, and puts the entries of all files again."""
    root = tmp_path / "store"
    child = os.fork()
    if not child:
        forced = prepared_files.fsync_directory

        def force(path):
            forced(path)
            if os.path.basename(path) == "index" and len(os.listdir(path)) == 2:
                os._exit(7)

        prepared_files.fsync_directory = force
        store = MessageStore.open(root, config=StoreConfig(**SMALL, clock=lambda: T0))
        for number in range(SMALL["max_index_num"]):
            store.put_message(Message("Orders", b"body", keys=[f"k{number}"]), 0)
            # So that the checkpoint speaks for the first file, which Java keeps then.
            store.flush()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    newest = max((root / "index").iterdir())
    assert oracle.read_files(root)[f"index/{newest.name}"][36:40] == bytes(4), "it has entries"
    found, _, _ = java_store.turn(root, SMALL, script(400, 1))
    queries = {line["key"]: line["offsets"] for line in lines_of(found, "query")}
    # After a kill Java also indexes the record again where an index file ends that it keeps.
    last = f"k{SMALL['max_index_num'] - 2}"
    assert len(queries) == SMALL["max_index_num"] and {key for key in queries if len(queries[key]) != 1} == {last}


@pytest.mark.parametrize("openings", [1, 2])
def test_a_kill_right_after_opening_what_a_killed_broker_left_after_a_clock_was_set_back(
    java_store, tmp_path, openings
):
    """Java's own checkpoint names the time of the newest full index file: ours allows for those that end later."""
    settings = {**SMALL, "mapped_file_size_commit_log": 32768}
    root = tmp_path / "store"
    ledger = Ledger()
    lines = script(0, 300)
    for number, line in enumerate(lines):
        line["storeTimestamp"] -= 3_600_000 * (number >= 150)
    with RmqstoreProcess(root, settings) as process:
        put_all(process, ledger, lines[:200])
    found, puts, _ = java_store.turn(root, settings, lines[200:], kill=True)
    assert_whole(found, ledger.places)
    ledger.note(lines[200:], puts)
    if openings == 2:
        open_and_die(root, settings)
    with RmqstoreProcess(root, settings) as process:
        assert not process.clean
        process.kill()
    found, _, _ = java_store.turn(root, settings, script(400, 1))
    ledger.assert_found(found)


def test_a_kill_before_the_first_flush_after_a_killed_broker(java_store, tmp_path):
    """Java's checkpoint says that all was dispatched, and a put since makes Java delete the index file: ours takes it back."""
    settings = {**SMALL, "max_index_num": 20_000}
    root = tmp_path / "store"
    root.mkdir()
    ledger, lines = Ledger(), seconds_apart(script(0, 300))
    # It says so when it closes, and the next one leaves that as it is.
    for part, kill in ((lines[:250], False), (lines[250:260], True)):
        _, puts, _ = java_store.turn(root, settings, part, kill=kill)
        ledger.note(part, puts)
    with RmqstoreProcess(root, settings) as process:
        assert not process.clean
        put_all(process, ledger, lines[260:])
        process.kill()
    assert 2 < len(os.listdir(root / "commitlog")) <= 10
    found, _, _ = java_store.turn(root, settings, script(400, 1))
    ledger.assert_found(found)


def test_a_batch_queue_whose_units_were_all_cut(java_store, tmp_path):
    """Java ends with a NullPointerException where it asks a batch queue whose folder is empty: we leave none."""
    settings = {**SMALL, "store_host": "10.0.0.1:10911"}
    root = tmp_path / "store"
    ledger = Ledger()
    lines = script(0, 3)
    inner = {"sysFlag": 0xC0, "properties": {"INNER_NUM": "2"}}
    with RmqstoreProcess(root, settings) as process:
        put_all(process, ledger, lines)
        process.flush()
        end = (root / "commitlog" / f"{0:020}").read_bytes().rindex(b"message 2")
        message = Message("Inner", b"inner", sys_flag=inner["sysFlag"], properties=inner["properties"])
        (place,) = process.put([(T0 + 3 * STEP, message, 0)])
        assert place[1] > end and any((root / "batchconsumequeue" / "Inner" / "0").iterdir())
        process.kill()
    # As a loss of power leaves it: the unit is there, its record is not.
    with open(root / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(place[1])
        file.write(bytes(512))
    with RmqstoreProcess(root, settings) as process:
        assert not process.clean
        process.kill()
    assert not (root / "batchconsumequeue" / "Inner" / "0").exists()
    line = {**lines[0], **inner, "topic": "Inner"}
    found, answers, after = java_store.turn(root, settings, [line], batch_topics=["Inner"])
    assert_whole(found, ledger.places)
    assert [(answer["status"], answer["queueOffset"]) for answer in answers] == [("PUT_OK", 0)]
    assert [unit["queueId"] for unit in lines_of(after, "queue") if unit["topic"] == "Inner"] == [0]
