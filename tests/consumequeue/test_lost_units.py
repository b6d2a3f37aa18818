"""Places of a queue whose message was lost: holes and pre-fill units, between units that lead to messages."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.files.mapped_file import MappedFilePool

CONFIG = StoreConfig(mapped_file_size_consume_queue=80)
TAGS = ("Alpha", "Beta", "Gamma")
HOLE = bytes(20)
TORN = struct.pack(">qiq", 0, 100, 7)
PRE_FILL = struct.pack(">qiq", 0, 0x7FFFFFFF, 0)


def unit(number: int) -> bytes:
    return struct.pack(">qiq", 100 * number, 100, 7)


def places(text: str) -> list[bytes]:
    """Of each character the unit at its place.

    `u` is one that leads to a message, `.` a hole, `p` a pre-fill unit, `t` one whose phy offset was never written, `s` leads
    to the same message as the one before.
    """
    units = {".": HOLE, "p": PRE_FILL, "t": TORN}
    return [units.get(each, unit(number - (each == "s"))) for number, each in enumerate(text)]


def queue_of(root: Path, text: str) -> ConsumeQueue:
    """A queue of four units a file, as a writer has it open that counts them all."""
    folder = root / "consumequeue" / "T" / "0"
    folder.mkdir(parents=True)
    units = places(text)
    for first in range(0, len(units), 4):
        (folder / f"{first * 20:020d}").write_bytes(b"".join(units[first : first + 4]).ljust(80, b"\0"))
    queue = ConsumeQueue(str(root), "T", 0, CONFIG, MappedFilePool(4))
    queue.load()
    queue.files.wrote_where = len(units) * 20
    return queue


def read(root: Path) -> tuple[list[bytes], int]:
    """The units on the disk, and how many a second reader takes for written: those before the first hole of the last file."""
    files = sorted((root / "consumequeue" / "T" / "0").glob("*"))
    data = b"".join(path.read_bytes() for path in files)
    units = [data[at : at + 20] for at in range(0, len(data), 20)]
    last = units[-4:]
    count = last.index(HOLE) if HOLE in last else 4
    return units, int(files[0].name) // 20 + len(units) - 4 + count if files else 0


@pytest.mark.parametrize(
    ("before", "phy_offset", "after"),
    [
        ("u.u", 0, "upu"),
        ("u..u.u.u", 0, "uppupupu"),
        ("uu.uu...u", 0, "uupuupppu"),
        # At the end nothing is left: neither holes, nor pre-fill units, by which RocketMQ takes 2 GiB for dispatched.
        ("uu.u..", 0, "uupu"),
        ("uutu.uut", 0, "uupupuu"),
        ("uu.p", 0, "uu"),
        ("u.u.........", 0, "upu"),
        ("uuup....", 0, "uuu"),
        ("....", 0, ""),
        ("pp..p", 0, ""),
        # Earlier files lost nothing.
        ("u.uuuuuuu..u", 500, "u.uuuuuuuppu"),
        ("uuuu", 0, "uuuu"),
    ],
)
def test_holes_get_pre_fill_units_and_none_are_left_at_the_end(tmp_path, before, phy_offset, after):
    queue = queue_of(tmp_path, before)
    filled = queue.fill_holes(phy_offset)
    assert filled == sum(before[: len(after)].count(each) - after.count(each) for each in ".t")
    assert queue.unit_num == len(after)
    queue.flush()
    queue.close()
    if after:
        units, written = read(tmp_path)
        assert units[: len(after)] == places(after) and not any(map(any, units[len(after) :]))
        assert written == len(after)
    else:
        assert not list((tmp_path / "consumequeue").rglob("0*0"))
    again = ConsumeQueue(str(tmp_path), "T", 0, CONFIG, MappedFilePool(4))
    again.load()
    assert again.unit_num == len(after)
    assert [again.unit(number) is not None for number in range(len(after))] == [each == "u" for each in after]
    again.close()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("uuut", 3), ("uuuuutu", 7), ("uuuu", 4), ("pput", 3), ("u.ut", 3), ("uuuuu", 5), ("uusu", 4), ("uutt", 2), ("", 0),
        ("uuuuuutt", 6), ("uuup", 4),
    ],
)  # fmt: skip
def test_a_unit_at_the_end_of_which_only_a_part_is_left_is_known(tmp_path, text, end):
    queue = queue_of(tmp_path, text)
    assert queue.whole_end() == end
    assert queue.leads_before(0, 100) == text.startswith("u")
    for number in range(len(text)):
        part = text[number : number - number % 4 + 4]
        assert queue.leads_before(number, 100 * (number + 1)) == (part[0] in "us")
        assert queue.leads_before(number, 10_000) == ("u" in part or "s" in part)
    queue.close()


@pytest.mark.parametrize(
    ("text", "min_phy_offset", "deleted"),
    [
        # The last place that leads to a message decides: of a hole and of a pre-fill unit the phy offset is 0.
        ("uuu.uuuu", 200, 0), ("uuupuuuu", 200, 0), ("uuu.uuuu", 201, 1), ("u...uuuu", 0, 0), ("u...uuuu", 1, 1),
        ("uppp....uuuu", 1, 2), ("ppppuuuu", 1, 1), ("uuuuuuuu", 301, 1), ("uuuuuuuu", 300, 0), ("uuuu", 9999, 0),
    ],
)  # fmt: skip
def test_retention_deletes_no_file_that_leads_to_a_message(tmp_path, text, min_phy_offset, deleted):
    queue = queue_of(tmp_path, text)
    assert queue.delete_before(min_phy_offset) == deleted
    assert queue.first_unit == 4 * deleted
    queue.close()


# ------------------------------------------------------------------------------------------------- files that are cut short


def cut_config(extended):
    return StoreConfig(
        mapped_file_size_commit_log=16384,
        mapped_file_size_consume_queue=400,
        mapper_file_size_batch_consume_queue=3 * 46,
        mapped_file_size_consume_queue_ext=404,
        enable_consume_queue_ext=extended,
        max_hash_slot_num=50,
        max_index_num=200,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "extended"])
def tagged(request, tmp_path_factory):
    """A store with thirty messages of three tags in a simple queue, and thirty records of two messages in a batch queue."""
    path = tmp_path_factory.mktemp("tagged") / "store"
    with MessageStore.open(path, config=cut_config(request.param)) as store:
        for number in range(30):
            store.put_message(Message("Orders", b"%d" % number, tags=TAGS[number % 3]), 0)
            inner = {"INNER_NUM": "2"}
            store.put_message(Message("Inner", b"%d" % number, tags=TAGS[number % 3], sys_flag=0xC0, properties=inner), 0)
    return path, cut_config(request.param)


def got(store, topic, tags=None):
    """Queue offset and tags of what gets give, one after the other."""
    found, at = [], 0
    while True:
        result = store.get_message(topic, 0, at, 4, tags=tags)
        assert not any(message.corrupt for message in result.messages)
        found += [(message.queue_offset, message.tags) for message in result.messages]
        if result.next_queue_offset <= at:
            return found
        at = result.next_queue_offset


CUTS = [
    ("consumequeue/Orders", 20, 5, range(12, 20)),
    ("consumequeue/Orders", 20, 6, range(12, 20)),
    # The first unit of the extension may be led to by mistake, and has the tags of this one.
    ("consumequeue_ext/Orders", 20, 5, range(1, 20)),
    ("batchconsumequeue/Inner", 46, 4, range(12, 46)),
]


@pytest.mark.parametrize(("folder", "size", "number", "cuts"), CUTS)
def test_a_cut_unit_hides_no_message_from_whoever_asks_for_tags(tagged, tmp_path, folder, size, number, cuts):
    path, config = tagged
    if not (path / folder).exists():
        pytest.skip("there is no extension")
    topic = folder.partition("/")[2]
    for cut in cuts:
        copy = shutil.copytree(path, tmp_path / str(cut))
        file = sorted((copy / folder / "0").iterdir())[number * size // (138 if size == 46 else 400)]
        os.truncate(file, number * size - int(file.name) + cut)
        with MessageStore.open(copy, config=config, read_only=True) as store:
            table = store.get_table(topic, 0, columns=["queue_offset", "tags"])
            every = list(zip(*(table.column(name).to_pylist() for name in ("queue_offset", "tags"))))
            assert (number * (2 if topic == "Inner" else 1), TAGS[number % 3]) in every
            for tags in TAGS:
                wanted = [each for each in every if each[1] == tags]
                chosen = store.get_table(topic, 0, tags=tags, columns=["queue_offset"]).column(0).to_pylist()
                assert [(at, tags) for at in chosen] == wanted, (cut, tags)
                assert got(store, topic, tags) == wanted, (cut, tags)


@pytest.mark.parametrize("number", range(3))
def test_a_batch_unit_that_lost_its_base_hides_no_other_from_a_get(tagged, tmp_path, number):
    # It has queue offset 0, like the first message.
    path, config = tagged
    for cut in (12, 28, 35):
        copy = shutil.copytree(path, tmp_path / str(cut))
        os.truncate(copy / "batchconsumequeue" / "Inner" / "0" / f"{0:020d}", number * 46 + cut)
        with MessageStore.open(copy, config=config, read_only=True) as store:
            left = [*range(0, 2 * number + 2, 2), *range(6, 60, 2)]
            assert [at for at, _ in got(store, "Inner")] == left
            for at in left:
                assert store.get_message("Inner", 0, at, 1).messages[0].queue_offset == at
