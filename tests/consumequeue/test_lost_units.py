"""Places of a queue whose message was lost: holes and pre-fill units, between units that lead to messages."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rmqstore import StoreConfig
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.files.mapped_file import MappedFilePool

CONFIG = StoreConfig(mapped_file_size_consume_queue=80)
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
        # Nothing was lost in files that lie before.
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
