"""Stores with pending messages for tests: the real broker's, and small ones laid out from the format by plain `struct`.

Owns a second, independent knowledge of the timer's files: `TimerFiles` writes them as a broker would, one message at a
time, and `listed` reads them as docs/formats.md says, by the chains of the wheel.  It imports nothing of the package.
"""

from __future__ import annotations

import json
import lzma
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import golden

DATA = golden.DATA / "rocketmq-rocksdb"
UNIT, SLOT = struct.Struct(">iqiqiqiiq"), struct.Struct(">qqqii")
BLANK = 0xCBD43194 - (1 << 32)


def unpack(archive: str, folder: Path, name: str = "store") -> Path:
    """Unpack one folder of an archive of `tests/data/rocketmq-rocksdb` and return it."""
    with lzma.open(DATA / f"{archive}.tar.xz") as packed, tarfile.open(fileobj=packed) as opened:
        members = [each for each in opened if each.name == name or each.name.startswith(f"{name}/")]
        golden.extract(opened, folder, members)
    return folder / name


def answers(name: str, *kinds: str) -> list[dict[str, Any]]:
    """The lines of these types that the real store answered."""
    with lzma.open(DATA / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [line for line in map(json.loads, lines) if line["type"] in kinds]


def java_hash(text: str) -> int:
    """Java's String.hashCode, of text in the BMP."""
    number = 0
    for char in text:
        number = (31 * number + ord(char)) & 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number


class TimerFiles:
    """A wheel, a timer log and a checkpoint, as a broker writes them.

    Parameters
    ----------
    slot_num : int
        Slots of the wheel; a broker has 1 209 600.
    file_size : int
        Of a timer log file, bytes.
    """

    def __init__(self, root: Path, slot_num: int = 1260, file_size: int = 52 * 7, precision: int = 1000):
        self.root, self.slot_num, self.file_size, self.precision = root, slot_num, file_size, precision
        self.wheel: dict[int, list[int]] = {}
        self.files = [b""]

    @property
    def position(self) -> int:
        return (len(self.files) - 1) * self.file_size + len(self.files[-1])

    def put(
        self,
        fires: int,
        phy_offset: int,
        size: int,
        *,
        now: int,
        topic: str = "Reminders",
        roll: bool = False,
        recall: bool = False,
    ) -> int:
        """Append a unit to the slot of `fires` and return its position."""
        left = self.file_size - len(self.files[-1])
        if left < UNIT.size + 16:
            blank = struct.pack(">iqi", left, 0, BLANK)
            self.files[-1] += blank + bytes(left - len(blank))
            self.files.append(b"")
        position = self.position
        time = fires // self.precision
        slot = self.wheel.get(time % self.slot_num)
        if slot is None or slot[0] != time:
            slot = self.wheel[time % self.slot_num] = [time, -1, -1, 0]
        magic = 1 | 2 * roll | 4 * recall
        self.files[-1] += UNIT.pack(UNIT.size, slot[2], magic, now, fires - now, phy_offset, size, java_hash(topic), 0)
        slot[1:] = [position if slot[1] < 0 else slot[1], position, slot[3] + (-1 if recall else 1)]
        return position

    def write(self, last_read_time: int, taken_in: int = 0) -> None:
        """Write all files below the root."""
        (self.root / "timerlog").mkdir(parents=True, exist_ok=True)
        (self.root / "config").mkdir(exist_ok=True)
        for number, data in enumerate(self.files):
            path = self.root / "timerlog" / f"{number * self.file_size:020d}"
            path.write_bytes(data + bytes(self.file_size - len(data)))
        wheel = bytearray(self.slot_num * SLOT.size)
        for index, (time, first, last, number) in self.wheel.items():
            SLOT.pack_into(wheel, index * SLOT.size, time, first, last, number, 0)
        (self.root / "timerwheel").write_bytes(wheel)
        fields = struct.pack(">7q", last_read_time, self.position, taken_in, taken_in, 0, last_read_time, 1)
        (self.root / "config" / "timercheck").write_bytes(fields.ljust(4096, b"\0"))


def listed(root: Path, precision: int = 1000) -> list[tuple[int, int, int, int]]:
    """(time, position, magic, phy offset) of all units that wait, by the chains of the wheel, ordered by position."""
    last_read = struct.unpack(">q", (root / "config" / "timercheck").read_bytes()[:8])[0]
    files = {int(path.name): path.read_bytes() for path in (root / "timerlog").iterdir()}
    snapshots = [name for name in os.listdir(root) if name.startswith("timerwheel.")]
    name = max(snapshots, key=lambda each: int(each.split(".")[1])) if snapshots else "timerwheel"
    wheel = (root / name).read_bytes()
    found = []
    for time, _, last, _, _ in SLOT.iter_unpack(wheel):
        position = last if time * precision >= last_read and time else -1
        while position >= 0:
            base = max(each for each in files if each <= position)
            unit = UNIT.unpack_from(files[base], position - base)
            found.append((time * precision, position, unit[2], unit[5]))
            assert unit[1] < position
            position = unit[1]
    return sorted(found, key=lambda unit: unit[1])
