"""The three questions, by log, by queue and by key, asked of every kind of disk; the answers come from one list of messages.

Owns the promise that nothing but the place of the bytes differs between kinds of disk: each question has the same rows on all,
as messages and as columns. Damage denies nothing that is there and is named; what a writer adds is seen.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import every_disk
import pytest
from every_disk import COLUMNS, KEYS, MAKE, QUEUES, T0, Row, open_tiered

from rmqstore import ConsumerOffsets, MessageStore, StoreError, verify
from rmqstore.flatfile.flat_verify import verify_flat

pytest.importorskip("pyarrow")

TIMES = {
    "all": (None, None),
    "from": (T0 + 700 * 10, None),
    "until": (None, T0 + 700 * 30),
    "between": (T0 + 700 * 15 + 1, T0 + 700 * 33 - 1),
    "one": (T0 + 700 * 20, T0 + 700 * 20),
    "none": (T0 + 700 * 20 + 1, T0 + 700 * 20 + 2),
}
LOG_FILTERS = (
    (None, None, None), ("Orders", None, None), (["Pay", "nobody"], None, None), ("nobody", None, None), (None, 1, None),
    ("Orders", [0, 7], None), (None, None, "Aa || 已付"), ("Pay", 1, ["BB"]), ("Orders", None, "nobody"),
)  # fmt: skip
KEYS_IN_TIME = (("Orders", "all"), ("Orders", "Aa"), ("Pay", "U00032"), ("Pay", "已付"))
TAG_FILTERS = (None, "*", "Aa", ["BB"], "Aa || 已付", "nobody")


@pytest.fixture(scope="module", params=MAKE)
def disk(request, tmp_path_factory):
    if request.param.startswith("rocksdb"):
        pytest.importorskip("rocksdict")
    return MAKE[request.param](tmp_path_factory.mktemp("disk"), every_disk.sent())


@pytest.fixture(scope="module")
def store(disk):
    with disk.open() as opened:
        yield opened


def of_message(message) -> Row:
    assert not message.corrupt
    return Row(
        message.topic, message.queue_id, message.queue_offset, tuple(message.keys), message.tags, message.unique_key,
        message.body, message.store_timestamp,
    )  # fmt: skip


def of_table(table, *more: str) -> list:
    """The rows of columns; with `more` columns, tuples of a row and their values."""
    at = table.schema.get_field_index("store_timestamp")
    times = table.column(at).cast("int64").to_pylist()
    found = []
    for row, time in zip(table.to_pylist(), times):
        made = Row(**{name: row[name] for name in COLUMNS} | {"keys": tuple(row["keys"] or ()), "store_timestamp": time})
        found.append((made, *(row[name] for name in more)) if more else made)
    return found


def in_times(row: Row, begin, end) -> bool:
    return (begin is None or row.store_timestamp >= begin) and (end is None or row.store_timestamp <= end)


def has_tags(row: Row, tags) -> bool:
    if tags is None or tags == "*":
        return True
    return row.tags in ([each.strip() for each in tags.split("||")] if isinstance(tags, str) else tags)


def walked(store, topic: str, queue_id: int, at: int = 0, **options) -> list:
    """The messages that gets have, one get after the other."""
    found = []
    while True:
        result = store.get_message(topic, queue_id, at, **options)
        found += result.messages
        if result.next_queue_offset <= at or result.status.name.startswith("OFFSET_OVERFLOW"):
            return found
        at = result.next_queue_offset


# ---------------------------------------------------------------------------------------------------------------- the log


@pytest.mark.parametrize("times", TIMES)
def test_by_log(disk, store, times):
    begin, end = TIMES[times]
    for topic, queue_id, tags in LOG_FILTERS:
        wanted = [
            row[:3]
            for row in disk.rows
            if in_times(row, begin, end)
            and has_tags(row, tags)
            and (topic is None or row.topic in ([topic] if isinstance(topic, str) else topic))
            and (queue_id is None or row.queue_id in ([queue_id] if isinstance(queue_id, int) else queue_id))
        ]
        asked = {"topic": topic, "queue_id": queue_id, "tags": tags, "begin": begin, "end": end}
        table = store.scan(COLUMNS[:3], use_threads=False, **asked).read_all()
        assert list(zip(*(table[name].to_pylist() for name in COLUMNS[:3]))) == wanted, asked


def test_by_log_in_every_form(disk, store):
    forms = {"views": {"views": True}, "small": {"batch_size": 3}, "one thread": {"use_threads": False}}
    for name, options in {**forms, "dictionaries": {"read_dictionary": ["topic", "tags"]}}.items():
        assert of_table(store.scan(COLUMNS, **options).read_all()) == disk.rows, name
    every = store.scan(COLUMNS).read_all()
    for name in COLUMNS:
        assert store.scan([name], use_threads=False).read_all()[name].equals(every[name]), name
    if not disk.places:
        return
    here = list(disk.places)
    assert [of_message(message) for message in store.messages()] == here
    for row in here[::7]:
        message = store.message_at(disk.places[row])
        assert of_message(message) == row and message.phy_offset == disk.places[row]
        assert of_message(store.message_by_id(message.msg_id)) == row
    for low, high in ((5, None), (None, len(here) - 5), (3, 4), (7, 7)):
        begin, end = (None if each is None else disk.places[here[each]] for each in (low, high))
        table = store.scan([*COLUMNS, "phy_offset"], begin_phy_offset=begin, end_phy_offset=end).read_all()
        assert of_table(table, "phy_offset") == [(row, disk.places[row]) for row in here[low:high]]
        assert [of_message(message) for message in store.messages(begin, end)] == here[low:high]


# -------------------------------------------------------------------------------------------------------------- by queue


@pytest.mark.parametrize(("topic", "queue_id"), QUEUES)
def test_by_queue(disk, store, topic, queue_id):
    rows = disk.queue(topic, queue_id)
    end = len(rows) * disk.step
    assert (store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)) == (0, end)
    for tags, num in itertools.product(TAG_FILTERS, (2, 70)):
        wanted = [row for row in rows if has_tags(row, tags)]
        messages = walked(store, topic, queue_id, tags=tags, max_num=num)
        assert [of_message(message) for message in messages] == wanted, (tags, num)
        at = disk.step * (num % 7)
        table = store.get_table(topic, queue_id, at, num, tags=tags, columns=COLUMNS, views=num == 2)
        assert of_table(table) == [row for row in wanted if row.queue_offset >= at][:num], (tags, num)
    for at, row in list(enumerate(rows))[::3]:
        first = store.get_message(topic, queue_id, row.queue_offset, 1)
        assert first.status.name == "FOUND" and [of_message(message) for message in first.messages] == [row]
        assert (first.next_queue_offset, first.min_queue_offset, first.max_queue_offset) == ((at + 1) * disk.step, 0, end)


def test_beside_a_queue(disk, store):
    assert sorted(store.topics()) == ["Orders", "Pay"] and store.queue_ids("Orders") == [0, 1]
    end = len(disk.queue("Orders", 0)) * disk.step
    for at, name, following in ((end, "ONE", end), (end + 1, "BADLY", end)):
        found = store.get_message("Orders", 0, at)
        assert (found.status.name, found.next_queue_offset) == (f"OFFSET_OVERFLOW_{name}", following)
        assert found.messages == [] and store.get_table("Orders", 0, at).num_rows == 0
    for topic, queue_id in (("Orders", 9), ("nobody", 0)):
        found = store.get_message(topic, queue_id)
        assert (found.status.name, found.messages, found.max_queue_offset) == ("NO_MESSAGE_IN_QUEUE", [], 0)
        assert store.get_table(topic, queue_id).num_rows == store.max_queue_offset(topic, queue_id) == 0


@pytest.mark.parametrize(("topic", "queue_id"), QUEUES)
def test_by_time(disk, store, topic, queue_id):
    rows = disk.queue(topic, queue_id)
    times = [row.store_timestamp for row in rows]
    for moment in [0, *times[::2], *(time + more for time in times[::3] for more in (-1, 1)), T0 + 10**6]:
        later = [row.queue_offset for row in rows if row.store_timestamp >= moment]
        earlier = [row.queue_offset for row in rows if row.store_timestamp <= moment]
        end = len(rows) * disk.step
        assert store.offset_by_time(topic, queue_id, moment) == min(later, default=end), moment
        assert store.offset_by_time(topic, queue_id, moment, "upper") == max(earlier, default=0), moment


def test_consumed(disk, store, tmp_path):
    for number, (tags, queue_ids) in enumerate(itertools.product((None, "Aa || 已付"), (None, [1]))):
        offsets = ConsumerOffsets.load(tmp_path / f"{number}.json", read_only=False)
        with store.consume("Orders", "g", tags=tags, queue_ids=queue_ids, offsets=offsets, timeout=0) as consumer:
            found = [of_message(message) for message in consumer]
        wanted = [row for row in disk.rows if row.topic == "Orders" and has_tags(row, tags)]
        assert sorted(found) == sorted(row for row in wanted if queue_ids is None or row.queue_id in queue_ids)
        for queue_id in queue_ids or (0, 1):
            mine = [row for row in found if row.queue_id == queue_id]
            assert mine == sorted(mine, key=lambda row: row.queue_offset)
            end = len(disk.queue("Orders", queue_id)) * disk.step
            assert offsets.get("g", "Orders", queue_id) in (end, (mine[-1].queue_offset + disk.step) if mine else -1)


# ---------------------------------------------------------------------------------------------------------------- by key


@pytest.mark.parametrize("index_type", [None, "K", "U", "T"])
def test_by_key(disk, store, index_type):
    for times, (begin, end) in TIMES.items():
        given = {"begin": begin, "end": end, "index_type": index_type}
        pairs = itertools.product(("Orders", "Pay", "nobody"), KEYS)
        by_key = {
            (topic, key): disk.newest_first(
                row
                for row in disk.rows
                if row.topic == topic and row.has_key(key, index_type) and in_times(row, begin, end)
            )
            for topic, key in (pairs if times == "all" else KEYS_IN_TIME)
        }
        for (topic, key), wanted in by_key.items():
            for num in (2, 1000):
                found = store.query_message(topic, key, num, **given)
                assert [of_message(message) for message in found] == wanted[:num], (topic, key, num)
                assert found.truncated == (len(wanted) > num) and found.complete
        if not disk.alone:
            topics, keys = zip(*by_key)
            table = store.query_table(list(keys), list(topics), COLUMNS, 3, **given)
            wanted = [(row, key, at) for at, ((_, key), rows) in enumerate(by_key.items()) for row in rows[:3]]
            assert of_table(table, "key", "key_number") == wanted
            table = store.query_table(["all", "Aa"], "Orders", COLUMNS, 1000, views=True, **given)
            assert of_table(table) == [row for key in ("all", "Aa") for row in by_key["Orders", key]]


def test_by_id(disk, store):
    for row in disk.rows[::5]:
        assert of_message(store.message_by_id(row.unique_key)) == row
        assert of_message(store.message_by_id(row.unique_key, row.topic)) == row


# --------------------------------------------------------------------------------------------------- a writer next to it


def ask_all(disk, store) -> None:
    """Ask each question once."""
    assert of_table(store.scan(COLUMNS).read_all()) == disk.rows
    for topic, queue_id in QUEUES:
        rows = disk.queue(topic, queue_id)
        assert [of_message(message) for message in walked(store, topic, queue_id)] == rows
        assert of_table(store.get_table(topic, queue_id, columns=COLUMNS)) == rows
        newest = rows[-1]
        assert store.offset_by_time(topic, queue_id, newest.store_timestamp) == newest.queue_offset
    for key in ("all", "K7", "K44", "U00047"):
        for topic in ("Orders", "Pay"):
            wanted = disk.newest_first(row for row in disk.rows if row.topic == topic and row.has_key(key))
            assert [of_message(message) for message in store.query_message(topic, key)] == wanted, key


@pytest.mark.parametrize("kind", ["plain", "extension", "batch", "rocksdb index", "killed"])
def test_what_a_writer_puts_is_seen(tmp_path, kind):
    pytest.importorskip("rocksdict")
    messages = every_disk.sent()
    before, more = messages[:30], messages[30:]
    disk = MAKE[kind](tmp_path, before)
    after = replace(disk, rows=every_disk.rows_of(messages, disk.step))
    with disk.open() as store:
        ask_all(disk, store)
        config = disk.config.replace(clock=iter([each.store_timestamp for each in more] + [T0 + 10**6] * 99).__next__)
        with MessageStore.open(disk.root, config=config) as writer:
            for number in range(0, len(more), 9):
                every_disk.put(writer, more[number : number + 9], disk.step == 2)
                so_far = 30 + min(number + 9, len(more))
                ask_all(replace(disk, rows=after.rows[:so_far]), store)
        ask_all(after, store)


@pytest.mark.parametrize("kind", ["rocksdb queues", "tiered", "tiered alone", "tiered without log"])
def test_what_a_broker_adds_is_seen(tmp_path, kind):
    pytest.importorskip("rocksdict")
    disk = MAKE[kind](tmp_path / "before", every_disk.sent(30))
    after = MAKE[kind](tmp_path / "after", every_disk.sent())
    with disk.open() as store:
        ask_all(disk, store)
        every_disk.grow(disk, after)
        store.refresh()
        ask_all(after, store)


# ----------------------------------------------------------------------------------------------------------------- damage


def places(messages) -> list[tuple[str, int, int]]:
    return [(message.topic, message.queue_id, message.queue_offset) for message in messages]


@pytest.mark.parametrize("damage", every_disk.DAMAGE)
def test_damage_hides_nothing_else_and_is_named(disk, tmp_path, damage):
    if disk.writable or not every_disk.can_have(disk, damage):
        pytest.skip("this disk cannot have that")
    copy = disk.copied(tmp_path / "copy")
    harm = every_disk.DAMAGE[damage](copy)
    left = [row for row in copy.rows if row not in harm.lost]
    by_units = [row for row in left if row not in harm.hidden]
    findings, refused = [], []

    def answered(wanted, ask, *arguments, **options):
        # All that is left, or an error that names the file.
        try:
            assert places(ask(*arguments, **options)) == [row[:3] for row in wanted], arguments
        except StoreError as error:
            assert copy.tiered is not None and not copy.alone and harm.path.name in str(error)
            refused.append(error)

    with copy.open(findings) as store:

        def scanned():
            rows = of_table(store.scan([*COLUMNS, "corrupt"]).read_all(), "corrupt")
            assert [row[:3] for row, corrupt in rows if corrupt] == ([harm.changed[:3]] if harm.changed else [])
            assert [row for row, corrupt in rows if not corrupt and row not in left] == []
            return [row for row, _ in rows]

        def table(topic, queue_id):
            return of_table(store.get_table(topic, queue_id, columns=COLUMNS))

        # Units are the only way into a tiered queue.
        answered(left if copy.tiered is None else by_units, scanned)
        for topic, queue_id in QUEUES:
            rows = [row for row in copy.queue(topic, queue_id) if row in by_units]
            answered(rows, table, topic, queue_id)
            answered(rows, walked, store, topic, queue_id)
        for topic, key in itertools.product(("Orders", "Pay"), ("all", "Aa", "K7", "K20", "U00001")):
            wanted = copy.newest_first(row for row in left if row.topic == topic and row.has_key(key))
            answered(wanted, store.query_message, topic, key, 100)
            if harm.lost and copy.tiered is None:
                assert not store.query_message(topic, key).complete
    if copy.tiered is None:
        findings += verify(copy.root, copy.config)
    else:
        with open_tiered(copy.tiered, copy.root) as flat:
            findings += verify_flat(flat.tiered)
    assert not refused or damage != "a cut index file"
    near = str(harm.path if harm.path.is_dir() else harm.path.parent)
    assert any((each.path or "").startswith(near) for each in findings), findings
