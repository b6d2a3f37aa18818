"""Pending messages, compared with the answers of real brokers and of an oracle; damage."""

from __future__ import annotations

import os
import re
import shutil
import struct

import golden
import pytest
import rocksdb_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pending_stores import UNIT, TimerFiles, answers, java_hash, unpack

pytest.importorskip("pyarrow")

import pyarrow as pa

from rmqstore import Message, MessageStore, StoreConfig, verify
from rmqstore.offline.pending import KINDS, PendingMessage, pending
from rmqstore.offline.pending_search import Properties, schema

NOW = 1_795_424_507_000
TIMER_TOPIC, SCHEDULE_TOPIC = "rmq_sys_wheel_timer", "SCHEDULE_TOPIC_XXXX"


@pytest.fixture(scope="module")
def rocksdb_store(tmp_path_factory):
    pytest.importorskip("rocksdict")
    return unpack("store", tmp_path_factory.mktemp("rocksdb"))


@pytest.fixture(scope="module")
def killed_store(tmp_path_factory):
    pytest.importorskip("rocksdict")
    return unpack("store.killed", tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    return golden.unpack("broker", tmp_path_factory.mktemp("broker"))


def trace(root):
    return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*"))


# ------------------------------------------------------------------------------------------------------- real stores


@pytest.mark.parametrize("name", ["timer-files", "timer-snapshot"])
def test_the_wheel_of_a_real_broker(tmp_path, name):
    root = unpack("variants", tmp_path, name)
    before = trace(root)
    found = pending(root, now=1_795_440_000_000)
    assert trace(root) == before
    assert found.problems == [] and found.notes == []
    assert found.counts == {"delayed": 1, "timer": 52, "transaction": 0, "retry": 0, "dlq": 0}
    messages = [message for message in found if message.kind == "timer"]
    hours = sorted({message.due for message in messages})
    assert [sum(message.due == hour for message in messages) for hour in hours] == [10, 10, 10, 10, 10, 2]
    assert {message.topic for message in messages} == {"Reminders"}
    assert all(message.overdue == (message.due < 1_795_440_000_000) for message in messages)
    # TIM-0 to TIM-4 fired, three were recalled.
    keys = {message.keys[0] for message in messages}
    assert len(keys) == 52 and not keys & {"TIM-0", "TIM-1", "TIM-2", "TIM-3", "TIM-4", "TIM-10", "TIM-11", "TIM-12"}
    (wheel,) = [source for source in found.sources if source.name == "timerlog"]
    assert (wheel.pending, wheel.recalled, wheel.came_out) == (52, 3, 0)
    (delayed,) = [message for message in found if message.kind == "delayed"]
    assert (delayed.level, delayed.keys, delayed.due) == (16, ("DELAY-3",), delayed.store_timestamp + 1_800_000)


@pytest.mark.parametrize("name", golden.VERSION_STORES)
def test_brokers_of_other_versions(tmp_path, name):
    """Of 5.3.3 with an extension, in which the times of delayed messages are; of 5.5.1 with databases."""
    if name == "5.5.1":
        pytest.importorskip("rocksdict")
    root = golden.unpack(name, tmp_path)
    found = pending(root)
    assert found.problems == []
    assert found.counts == {"delayed": 3, "timer": 0, "transaction": 1, "retry": 0, "dlq": 0}
    minutes = sorted((message.due - message.store_timestamp) // 60_000 for message in found if message.kind == "delayed")
    assert minutes == [30, 30, 60]
    (source,) = [source for source in found.sources if source.kind == "delayed"]
    assert source.came_out == 0
    if name == "5.3.3":
        shutil.rmtree(root / "consumequeue_ext")
        found = pending(root, config=StoreConfig.infer(root, read_only=True, message_delay_level="30m " * 17 + "1h"))
        told = " ".join(map(str, found.problems))
        assert len(found) == 4 and "units of SCHEDULE_TOPIC_XXXX point to nothing in the extension" in told
        assert all(0 < message.due - message.store_timestamp <= 3_600_000 for message in found if message.kind == "delayed")


def test_a_real_brokers_transactions(broker):
    found = pending(broker)
    assert found.counts == {"delayed": 30, "timer": 5, "transaction": 20, "retry": 0, "dlq": 0}
    assert found.problems == []
    halves = [message for message in found if message.kind == "transaction"]
    # Left unknown by the producer: every third; the others were committed or rolled back.
    assert sorted(int(message.keys[0][4:]) for message in halves) == list(range(2, 60, 3))
    assert {message.check_times for message in halves} == {1} and {message.group for message in halves} == {"P-tx"}
    assert all(message.queue_offset >= 60 and message.topic == "Payments" for message in halves)
    assert {total.topic for total in found.totals if total.kind == "delayed"} == {"%RETRY%G-retry", "Reminders"}


def test_a_killed_brokers_transactions(tmp_path):
    found = pending(golden.unpack("broker.killed", tmp_path), kinds="transaction")
    # The progress of the checking service was not written yet.
    assert len(found) == 20 and any("CID_RMQ_SYS_TRANS" in note for note in found.notes)
    assert sorted(int(message.keys[0][4:]) for message in found) == list(range(2, 60, 3))


def test_a_real_brokers_databases(rocksdb_store):
    before = trace(rocksdb_store)
    config = StoreConfig.infer(rocksdb_store, read_only=True, message_delay_level="1s 2s 30m 1h")
    found = pending(rocksdb_store, config=config)
    assert trace(rocksdb_store) == before
    assert found.problems == []
    wanted = {line["phy"]: line for line in answers("messages", "pendingTransaction")}
    halves = {message.phy_offset: message for message in found if message.kind == "transaction"}
    assert len(wanted) == 6 and wanted.keys() == halves.keys()
    for phy_offset, line in wanted.items():
        half = halves[phy_offset]
        assert (half.topic, half.unique_key, half.size, half.check_times) == (
            line["topic"], line["uniqKey"], line["size"], line["checkTimes"],
        )  # fmt: skip
    lines = answers("messages", "timer")
    timers = {
        (message.due, message.unique_key, message.phy_offset, message.size)
        for message in found
        if message.kind == "timer"
    }
    assert len(lines) == 11
    assert timers == {(line["fires"], line["uniqKey"], line["phy"], line["size"]) for line in lines if line["pending"]}
    delayed = [message for message in found if message.kind == "delayed"]
    assert [message.due - message.store_timestamp for message in delayed] == [1_800_000] * 4


def test_a_killed_brokers_databases_are_completed_from_the_log(killed_store):
    found = pending(killed_store)
    assert found.problems == []
    assert found.counts == {"delayed": 8, "timer": 14, "transaction": 12, "retry": 0, "dlq": 0}
    stored = {line["phy"] for line in answers("messages.killed", "timer") if line["pending"]}
    timers = {message.phy_offset: message for message in found if message.kind == "timer"}
    assert stored <= timers.keys() and len(stored) == 7
    # Of the second phase: twelve, of which four came out, the last one was recalled.
    keys = {message.keys[0] for message in timers.values()}
    assert keys == {f"TIM-{phase}-{number}" for phase in (1, 2) for number in range(4, 11)}
    (topic,) = [source for source in found.sources if source.kind == "timer" and source.name == TIMER_TOPIC]
    assert (topic.came_out, topic.recalled) == (4, 1)
    halves = {message.keys[0] for message in found if message.kind == "transaction"}
    assert halves == {f"PAY-{phase}-{number}" for phase in (1, 2) for number in range(2, 18, 3)}


def test_what_no_queue_leads_to_is_found_along_the_log(killed_store, monkeypatch):
    whole = pending(killed_store)
    # More of the log is undispatched than an open scans.
    with MessageStore.open(killed_store, read_only=True) as store:
        bounds = store.commit_log.min_offset, store.commit_log.max_offset
        monkeypatch.setattr(type(store), "unserved", property(lambda self: bounds))
        monkeypatch.setattr(type(store), "topics", lambda self: [])
        monkeypatch.setattr(type(store), "queue_ids", lambda self, topic: [])
        found = pending(store)
    assert found.counts == whole.counts and found.problems == []
    assert sorted(m.phy_offset for m in found) == sorted(m.phy_offset for m in whole)


def test_the_answer_as_a_table(broker):
    found = pending(broker)
    assert found.table.schema.equals(schema()) and found.table.num_rows == len(found) == 55
    kinds = found.table.column("kind").to_pylist()
    assert kinds == sorted(kinds, key=KINDS.index)
    rows = found.table.to_pylist()
    for row, message in zip(rows, found):
        assert isinstance(message, PendingMessage)
        assert row["phy_offset"] == message.phy_offset and row["keys"] == list(message.keys)
        assert message.as_dict()["keys"] == row["keys"]
    assert sum(total.messages for total in found.totals) == 55
    assert "30 delayed, 5 timer, 20 transaction" in repr(found)
    with MessageStore.open(broker, read_only=True) as store:
        assert pending(store, kinds=["timer"]).counts["timer"] == 5
    assert len(pending(broker, topic="Reminders")) == 15
    with pytest.raises(ValueError, match="there is no kind 'nothing'"):
        pending(broker, kinds="nothing")


def test_a_record_says_what_the_message_says(broker):
    with MessageStore.open(broker, read_only=True) as store:
        for message in pending(store):
            stored = store.message_at(message.phy_offset)
            assert (stored.topic, stored.queue_id, stored.queue_offset) == (
                message.stored_topic, message.stored_queue_id, message.queue_offset,
            )  # fmt: skip
            assert stored.properties["REAL_TOPIC"] == message.topic
            assert tuple(stored.keys) == message.keys and stored.unique_key == message.unique_key
            assert (stored.born_timestamp, stored.store_timestamp) == (message.born_timestamp, message.store_timestamp)
            if message.kind == "timer":
                assert int(stored.properties["TIMER_OUT_MS"]) == message.due


# ------------------------------------------------------------------------------------------------ lower bounds, damage


def test_without_a_delay_offset_the_log_tells_what_was_delivered(broker, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(broker, root)
    (root / "config" / "delayOffset.json").unlink()
    found = pending(root, kinds="delayed")
    assert len(found) == 30
    (source,) = found.sources
    assert source.came_out == 10 and any("no config/delayOffset.json" in note for note in found.notes)
    (root / "config" / "delayOffset.json").write_text('{"offsetTable":{1:')
    found = pending(root, kinds="delayed")
    assert len(found) == 30 and "delayOffset.json" in str(found.problems[0])


def test_the_backup_of_delay_offsets_counts_and_one_odd_level_hides_no_other(broker, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(broker, root)
    path = root / "config" / "delayOffset.json"
    whole = path.read_bytes()
    # Like a broker: the backup if the file is missing, empty or damaged.
    for damage in (None, b"", b'{"offsetTable":{1:'):
        path.with_name("delayOffset.json.bak").write_bytes(whole)
        path.unlink(missing_ok=True)
        if damage is not None:
            path.write_bytes(damage)
        found = pending(root, kinds="delayed")
        assert len(found) == 30 and found.sources[0].came_out == 0
        assert found.problems == [] and found.notes == []
    path.with_name("delayOffset.json.bak").unlink()
    levels = {int(level): offset for level, offset in re.findall(r"(\d+):(\d+)", whole.decode())}
    delivered = next(level for level, offset in levels.items() if int(offset))
    for offset in ("-1", "null", '"x"', "9223372036854775808", "{}"):
        text = ",".join(f"{level}:{offset if level == delivered else number}" for level, number in levels.items())
        path.write_text(f'{{"offsetTable":{{{text}}}}}')
        found = pending(root, kinds="delayed")
        assert len(found) == 30
        # Of this level alone all were looked at.
        assert found.sources[0].came_out == int(levels[delivered])
        (problem,) = found.problems
        assert problem.path == str(path) and f"{delivered}" in problem.text
    path.unlink()
    os.mkfifo(path)
    found = pending(root, kinds="delayed")
    assert len(found) == 30 and "not a regular file" in found.problems[0].text


def test_without_a_timer_checkpoint_the_log_tells_what_was_delivered(tmp_path):
    root = unpack("variants", tmp_path, "timer-files")
    for damage in (None, b"", bytes(7) + b"\x01" + bytes(48)):
        path = root / "config" / "timercheck"
        path.unlink(missing_ok=True)
        if damage is not None:
            path.write_bytes(damage)
        found = pending(root, kinds="timer")
        assert len(found) == 52
        assert sum(source.came_out for source in found.sources) == 5
        assert bool(found.problems) == (damage is not None) and any("timercheck" in note for note in found.notes)


@pytest.mark.parametrize("gone", ["timerwheel", "timerlog", "timerwheel timerlog config/timercheck"])
def test_timer_files_that_are_gone(tmp_path, gone):
    root = unpack("variants", tmp_path, "timer-files")
    for name in gone.split():
        shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()
    found = pending(root, kinds="timer")
    # The records are all in the log.
    assert len(found) == 52
    assert found.problems or found.notes


def test_a_folder_that_cannot_be_read_hides_nothing_else(broker, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", f"{path}/timerlog")

    monkeypatch.setattr("rmqstore.offline.pending_timers.waiting_units", refuse)
    found = pending(broker)
    assert found.counts["timer"] == 0 and found.counts["delayed"] == 30 and found.counts["transaction"] == 20
    (problem,) = found.problems
    assert problem.path.endswith("timerlog") and problem.text == "Permission denied"


@pytest.mark.parametrize(
    "gone", ["SCHEDULE_TOPIC_XXXX/2", "SCHEDULE_TOPIC_XXXX/1", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"]
)
def test_a_lost_queue_for_which_an_offset_is_noted_is_said(broker, tmp_path, gone):
    root = tmp_path / "store"
    shutil.copytree(broker, root)
    shutil.rmtree(root / "consumequeue" / gone)
    found = pending(root)
    topic = gone.partition("/")[0]
    assert any(f"of {topic}, for which the offset" in each.text and "rebuild" in each.text for each in found.problems)
    assert found.counts["timer"] == 5


@pytest.mark.parametrize("what", ["another", "timer", "transaction", "delayed"])
def test_damage_of_the_log_hides_nothing_else_and_is_said(killed_store, tmp_path, what):
    """Records after damage in the newest segment show the end of the log, so that no delivered message is pending."""
    whole = {(each.kind, each.unique_key): each for each in pending(killed_store, now=NOW)}
    root = tmp_path / "store"
    shutil.copytree(killed_store, root)
    behind = [each for (kind, _), each in whole.items() if kind == what and each.phy_offset > 1_680_568]
    phy_offset, size = (1_249_634, 100) if not behind else max((each.phy_offset, each.size) for each in behind)
    base = 1 << 20
    with open(root / "commitlog" / f"{base:020d}", "r+b") as file:
        file.seek(phy_offset - base)
        file.write(b"\xa5" * size)
    found = pending(root, now=NOW)
    lost = {name for name, each in whole.items() if each.phy_offset == phy_offset}
    assert {(each.kind, each.unique_key) for each in found} == whole.keys() - lost
    if what == "another":
        # In front of all that the walk has to see.
        assert not lost and found.problems == []
    else:
        assert lost and any("damaged stretches of the log: 1" in each.text for each in found.problems)
        (problem,) = (each for each in found.problems if "damaged stretches" in each.text)
        assert problem.pos == phy_offset - base and problem.path.endswith(f"{base:020d}")


def test_a_damaged_database_is_said_and_the_rest_read(rocksdb_store, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(rocksdb_store, root)
    for table in (root / "rocksdbstore").glob("*.sst"):
        table.write_bytes(bytes(100))
    for table in (root / "rocksdbstore").glob("*.log"):
        table.unlink()
    found = pending(root)
    assert found.problems and "rocksdbstore" in found.problems[0].path
    # By the log alone: no settlement, and not on its topic.
    assert found.counts["transaction"] == 6 and found.counts["timer"] == 7


@pytest.mark.parametrize("key", ["lastOffsetPy", "timeline_checkpoint"])
@pytest.mark.parametrize("value", [-1, 2**62, 2**63 - 1])
def test_how_far_a_database_says_that_it_came_cannot_be(rocksdb_store, tmp_path, key, value):
    root = tmp_path / "store"
    shutil.copytree(rocksdb_store, root)
    family = "trans" if key == "lastOffsetPy" else "timer"
    rocksdb_files.write(root / "rocksdbstore", {family: {key.encode(): struct.pack(">q", value)}})
    found = pending(root)
    # By the log: what is settled or on its topic does not wait.
    assert found.counts["transaction"] == 6 and found.counts["timer"] == 7
    (problem,) = found.problems
    assert problem.path.endswith("rocksdbstore") and str(value) in problem.text


def test_a_store_of_nothing(tmp_path):
    with MessageStore.open(tmp_path / "store", config=small_config()) as store:
        store.put_message(Message("Orders", b"x"))
    found = pending(tmp_path / "store")
    assert len(found) == 0 and list(found) == [] and found.totals == [] and found.sources == []
    assert found.table.num_rows == 0 and "nothing" in repr(found)


# -------------------------------------------------------------------------------------------------- stores of our own


def small_config(**more):
    return StoreConfig(
        mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20 * 1000, max_hash_slot_num=100, max_index_num=400,
        clock=lambda: NOW, **more,
    )  # fmt: skip


def timer_properties(number, out, topic="Reminders", recalls=None):
    given = {"REAL_TOPIC": topic, "REAL_QID": str(number % 4), "TIMER_OUT_MS": str(out), "UNIQ_KEY": f"{number:032X}"}
    return given | ({} if recalls is None else {"TIMER_DEL_UNIQKEY": recalls})


def timer_store(root, messages, read, taken_in=None, **layout):
    """A store whose timer took in the first `taken_in` of messages (out, recalls or None, rolled)."""
    taken_in = len(messages) if taken_in is None else taken_in
    files = TimerFiles(root, **layout)
    with MessageStore.open(root, config=small_config()) as store:
        store.put_message(Message("Orders", b"x"))
        for number, (out, recalls, rolled) in enumerate(messages):
            put = store.put_message(
                Message(
                    TIMER_TOPIC, b"x", keys=[f"K{number}"], properties=timer_properties(number, out, recalls=recalls)
                )
            )
            if number < taken_in:
                slot = out - 86_400_000 if rolled else out
                size = store.message_at(put.phy_offset).size
                files.put(slot, put.phy_offset, size, now=NOW - 1000, roll=rolled, recall=recalls is not None)
    files.write(read, taken_in)
    return root


messages = st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans(), st.integers(0, 30)), max_size=25)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages, st.integers(0, 7), st.integers(0, 25))
def test_timers_are_those_of_an_oracle(tmp_path_factory, drawn, read, taken_in):
    rows = []
    for number, (seconds, is_recall, rolled, target) in enumerate(drawn):
        out = NOW + 1000 * seconds + (86_400_000 * 2 if rolled else 0)
        recalls = None
        if is_recall and number:
            of = target % number
            out, recalls, rolled = rows[of][0], f"{of:032X}" if target % 2 else f"Reminders+{of:032X}", False
        rows.append((out, recalls, rolled))
    taken_in = min(taken_in, len(rows))
    last_read = NOW + 1000 * read
    root = timer_store(tmp_path_factory.mktemp("oracle") / "store", rows, last_read, taken_in)
    waiting = {}
    recalled = set()
    for number, (out, recalls, rolled) in enumerate(rows):
        slot = out - 86_400_000 if rolled else out
        if number < taken_in and slot < last_read:
            continue
        if recalls is None:
            waiting[number] = out
        else:
            recalled.add((out, recalls.rpartition("+")[2]))
    waiting = {number: out for number, out in waiting.items() if (out, f"{number:032X}") not in recalled}
    found = pending(root, now=NOW)
    assert {int(message.keys[0][1:]): message.due for message in found} == waiting
    assert found.problems == []


def eight(root):
    rows = [(NOW + 1000 * (number % 4), None, False) for number in range(7)]
    rows[4] = (NOW + 86_400_000 + 3000, None, True)
    rows.append((rows[3][0], f"{3:032X}", False))
    return timer_store(root, rows, NOW + 1000)


def all_flips(path):
    data = path.read_bytes()
    used = len(data.rstrip(b"\0"))
    for pos in range(used):
        for bit in range(8):
            path.write_bytes(data[:pos] + bytes([data[pos] ^ 1 << bit]) + data[pos + 1 :])
            yield pos, bit
    path.write_bytes(data)


def places(found):
    return sorted((message.phy_offset, message.due) for message in found)


@pytest.mark.parametrize(
    "part", ["timerlog/00000000000000000000", "timerlog/00000000000000000364", "config/timercheck"]
)
def test_every_flip_of_a_store_with_timers_is_said(tmp_path, part):
    root = eight(tmp_path / "store")
    truth = places(pending(root))
    assert len(truth) == 5
    with MessageStore.open(root, read_only=True) as store:
        for pos, bit in all_flips(root / part):
            found = pending(store, kinds="timer", now=NOW)
            assert found.problems or found.notes or places(found) == truth, (part, pos, bit)
            if part.startswith("timerlog"):
                # The records of the timer topic make up for what the timer log lost.
                assert {message.phy_offset for message in found} >= {phy_offset for phy_offset, _ in truth}, (pos, bit)


@pytest.mark.parametrize(
    ("pos", "value", "text"),
    [
        (4, 999, "leads to"),
        (28, 1 << 40, f"leads to no record of {TIMER_TOPIC}"),
    ],
)
def test_a_damaged_unit_is_named(tmp_path, pos, value, text):
    root = eight(tmp_path / "store")
    truth = {message.phy_offset for message in pending(root)}
    path = root / "timerlog" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    unit = next(at for at in range(0, 364, 52) if sum(struct.unpack_from(">qi", data, at + 16)) >= NOW + 1000)
    struct.pack_into(">q", data, unit + pos, value)
    path.write_bytes(data)
    found = pending(root)
    assert any(text in each.text and each.pos == unit for each in found.problems)
    # If only the unit is wrong, nothing is lost; if it names no record, one message may be.
    assert len(truth - {message.phy_offset for message in found}) <= (pos == 28)


def test_a_unit_in_front_of_the_log_is_said(tmp_path):
    root = eight(tmp_path / "store")
    # A segment that retention deleted: the log begins behind it.
    with MessageStore.open(root, config=small_config()) as store:
        for _ in range(40):
            store.put_message(Message("Fill", bytes(60_000)))
    os.unlink(root / "commitlog" / f"{0:020d}")
    found = pending(root, kinds="timer")
    assert any("the messages are deleted" in each.text for each in found.problems)


def put_transactions(root, halves, settle):
    """Half messages 0 to `halves`, and OP messages with these bodies."""
    with MessageStore.open(root, config=small_config()) as store:
        for number in range(halves):
            name = f"{number:032X}"
            given = {
                "REAL_TOPIC": "Payments",
                "REAL_QID": "1",
                "PGROUP": "P",
                "UNIQ_KEY": name,
                "__transactionId__": name,
            }
            store.put_message(Message("RMQ_SYS_TRANS_HALF_TOPIC", b"h", keys=[f"T{number}"], properties=given))
        for body in settle:
            store.put_message(Message("RMQ_SYS_TRANS_OP_HALF_TOPIC", body, tags="d"))


def test_op_messages_of_all_kinds(tmp_path):
    root = tmp_path / "store"
    put_transactions(root, 9, [b"1,4,", b"0", b"", b"7,x,8"])
    found = pending(root)
    assert [message.keys for message in found] == [("T2",), ("T3",), ("T5",), ("T6",)]
    assert [each.text for each in found.problems] == [
        "the OP message at phy offset " + found.problems[0].text.split()[6] + " holds more than numbers"
    ]


@pytest.mark.parametrize("checked_to", [0, 1, 3])
def test_a_half_message_that_was_put_again_before_it_was_settled(tmp_path, checked_to):
    # The OP message names the copy before, from which the checking service may have gone on.
    root = tmp_path / "store"
    put_transactions(root, 3, [])
    put_transactions(root, 2, [b"0,", b"2,"])
    with MessageStore.open(root) as store:
        store.consumer_offsets.commit("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC", 0, checked_to)
    found = pending(root)
    assert [(message.keys, message.queue_offset) for message in found] == [(("T1",), 4)]
    assert not found.problems


def test_a_transaction_whose_message_is_on_its_topic(tmp_path):
    root = tmp_path / "store"
    put_transactions(root, 3, [b"0,"])
    with MessageStore.open(root, read_only=True) as store:
        half = store.get_message("RMQ_SYS_TRANS_HALF_TOPIC", 0, 1).messages[0]
    with MessageStore.open(root) as store:
        row = pa.table(
            {
                "topic": ["Payments"],
                "body": [b"h"],
                "sys_flag": pa.array([8], pa.int32()),
                "prepared_transaction_offset": pa.array([half.phy_offset], pa.int64()),
            }
        )
        store.put_table(row)
    found = pending(root)
    assert [message.keys for message in found] == [("T2",)]
    assert found.sources[0].came_out == 1


def test_retries_and_dead_letters(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=small_config()) as store:
        for topic, number in (("%RETRY%G", 5), ("%RETRY%H", 2), ("%DLQ%G", 3), ("%RETRY%P_Orders", 1)):
            for i in range(number):
                given = {"RETRY_TOPIC": "Orders"} if topic != "%RETRY%H" else {}
                store.put_message(Message(topic, b"x", keys=[f"{topic}-{i}"], properties=given))
        store.consumer_offsets.commit("G", "%RETRY%G", 0, 3)
    found = pending(root)
    assert found.counts == {"delayed": 0, "timer": 0, "transaction": 0, "retry": 5, "dlq": 3}
    assert [(m.keys[0], m.topic, m.group) for m in found if m.kind == "retry"] == [
        ("%RETRY%G-3", "Orders", "G"), ("%RETRY%G-4", "Orders", "G"), ("%RETRY%H-0", "%RETRY%H", "H"),
        ("%RETRY%H-1", "%RETRY%H", "H"), ("%RETRY%P_Orders-0", "Orders", "P_Orders"),
    ]  # fmt: skip
    assert {m.group for m in found if m.kind == "dlq"} == {"G"}
    assert [note for note in found.notes if "no progress" in note] == [
        "no progress in %RETRY%H was found: all its messages are taken to wait",
        "no progress in %RETRY%P_Orders was found: all its messages are taken to wait",
    ]


def test_hostile_properties(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=small_config()) as store:
        for out in ("", "x", "9" * 40, "-1", str(2**63)):
            store.put_message(
                Message(
                    TIMER_TOPIC,
                    b"x",
                    properties={"TIMER_OUT_MS": out, "REAL_QID": "99999999999", "REAL_TOPIC": "A"},
                )
            )
        store.put_message(Message(TIMER_TOPIC, b"x"))
    found = list(pending(root))
    assert len(found) == 6 and {message.queue_id for message in found} == {None}
    assert all(isinstance(message.due, int) for message in found)


def test_a_hostile_queue_of_delayed_messages(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=small_config()) as store:
        for queue_id in (0, 5, 2**31 - 1):
            store.put_message(Message(SCHEDULE_TOPIC, b"x", properties={"REAL_TOPIC": "Orders"}), queue_id)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "delayOffset.json").write_text('{"offsetTable":{1:0,"6":9}}')
    found = pending(root)
    assert [message.stored_queue_id for message in found] == [0, 2**31 - 1]
    assert "queue 5 of SCHEDULE_TOPIC_XXXX ends at 1, before the offset 9" in str(found.problems[0])
    told = [(os.path.basename(each.path), each.detail) for each in verify(root) if each.kind == "bad_settings"]
    assert [name for name, _ in told] == ["delayOffset.json"]
    assert "offset 9 of level 6 is after the end of its queue, 1" in told[0][1]
    (root / "config" / "delayOffset.json").write_text('{"offsetTable":{1:1,"6":0,"9":7}}')
    assert not [each for each in verify(root) if each.kind == "bad_settings"]
    for text in (
        "[]",
        "{}",
        '{"offsetTable":{"x":1}}',
        '{"offsetTable":{1:-1}}',
        '{"offsetTable":{1:true}}',
        "{",
        "\xff",
    ):
        (root / "config" / "delayOffset.json").write_text(text)
        found = pending(root)
        assert len(found) == 3 and "delayOffset.json" in found.problems[0].path


def test_beside_a_writer(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=small_config()) as store:
        store.put_message(Message("Orders", b"x"))
        with MessageStore.open(root, read_only=True) as reader:
            assert len(pending(reader)) == 0
            for number in range(3):
                store.put_message(Message(TIMER_TOPIC, b"x", properties=timer_properties(number, NOW + 5000)))
                assert len(pending(store)) == len(pending(root)) == number + 1
            assert len(pending(reader)) == 3


def test_properties_are_taken_as_java_takes_them():
    kind = pa.map_(pa.string(), pa.string())
    array = pa.array([[("a", "1"), ("b", "x"), ("a", "2")], [], None or [("b", "7")], [("a", "-5")]], kind)
    properties = Properties(array)
    assert properties.text("a").to_pylist() == ["2", None, None, "-5"]
    assert properties.text("b").to_pylist() == ["x", None, "7", None]
    assert properties.text("c").to_pylist() == [None] * 4
    assert Properties(array.slice(2)).text("b").to_pylist() == ["7", None]
    assert "a" in properties and "c" not in properties
    numbers, there = properties.whole("a")
    assert numbers.tolist() == [2, 0, 0, -5] and there.tolist() == [True, False, False, True]
    texts = ["1", "1x", None, "9" * 30, "+4", ""]
    array = pa.array([[] if text is None else [("n", text)] for text in texts], kind)
    numbers, there = Properties(array).whole("n")
    assert numbers[there].tolist() == [1]


def test_the_oracles_hash_is_the_real_ones(tmp_path):
    root = unpack("variants", tmp_path, "timer-files")
    unit = UNIT.unpack_from((root / "timerlog" / f"{0:020d}").read_bytes())
    assert unit[7] == java_hash("Reminders")
