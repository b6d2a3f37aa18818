"""What waits in a store: a million timers in the files of a time wheel.

The store is written by rmqstore itself; wheel, timer log and checkpoint are laid out from the format by NumPy.
"""

import os

import numpy as np
import pyarrow as pa

from rmqstore import MessageStore, StoreConfig
from rmqstore.offline.pending import pending

from ._data import TIME, remove, sized

TIMER_TOPIC = "rmq_sys_wheel_timer"
_SLOTS = 7 * 86400 * 2
_HASH = -1187811807  # Java's of "Reminders"
_UNIT = np.dtype(
    [
        ("size", ">i4"), ("prev", ">i8"), ("magic", ">i4"), ("write_time", ">i8"), ("delay", ">i4"),
        ("phy_offset", ">i8"), ("record_size", ">i4"), ("topic_hash", ">i4"), ("reserved", ">i8"),
    ]
)  # fmt: skip
_SLOT = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("number", ">i4"), ("magic", ">i4")])


def timer_store(path, n, spread=86400):
    """A store with `n` timer messages of the topic Reminders, due in `spread` different seconds of the day to come."""
    due = TIME + 3_600_000 + 1000 * (np.arange(n, dtype=np.int64) * 7919 % spread)
    with MessageStore.open(path, config=StoreConfig(clock=lambda: TIME)) as store:
        for first in range(0, n, 1 << 16):
            numbers = range(first, min(first + (1 << 16), n))
            rows = {
                "topic": pa.array([TIMER_TOPIC] * len(numbers)),
                "queue_id": pa.array([0] * len(numbers), pa.int32()),
                "body": pa.array([b"body of a reminder"] * len(numbers)),
                "keys": pa.array([[f"TIM-{i}"] for i in numbers], pa.list_(pa.string())),
                "tags": pa.array(["t"] * len(numbers)),
                "properties": pa.array(
                    [
                        [
                            ("REAL_TOPIC", "Reminders"),
                            ("REAL_QID", str(i % 4)),
                            ("TIMER_DELIVER_MS", str(int(due[i]) + 1000)),
                            ("TIMER_OUT_MS", str(int(due[i]))),
                            ("UNIQ_KEY", f"FD00000000000000000000000000000220085FFD2B27733B{i:08X}"),
                        ]
                        for i in numbers
                    ],
                    pa.map_(pa.string(), pa.string()),
                ),
            }
            store.put_table(pa.table(rows))
    with MessageStore.open(path, read_only=True) as store:
        found = store.scan(["phy_offset", "size"], topic=TIMER_TOPIC).read_all()
    phy_offsets, sizes = found.column(0).to_numpy(), found.column(1).to_numpy()
    lay_out(path, due, phy_offsets, sizes)


def lay_out(path, due, phy_offsets, sizes, file_size=104857600):
    """Write timerwheel, timerlog and config/timercheck for messages that are due then, and lie there."""
    n = len(due)
    units = np.zeros(n, _UNIT)
    units["size"], units["magic"], units["write_time"], units["topic_hash"] = 52, 1, TIME, _HASH
    units["delay"], units["phy_offset"], units["record_size"] = due - TIME, phy_offsets, sizes
    # Whole units fill a file, and a blank of at least 16 bytes more than a unit ends it.
    in_file = (file_size - 16) // 52 - 1
    positions = np.arange(n) // in_file * file_size + np.arange(n) % in_file * 52
    order = np.lexsort((np.arange(n), due))
    first = np.ones(n, bool)
    first[1:] = due[order][1:] != due[order][:-1]
    prev = np.full(n, -1)
    prev[order[1:]] = np.where(first[1:], -1, positions[order[:-1]])
    units["prev"] = prev
    os.makedirs(os.path.join(path, "timerlog"), exist_ok=True)
    for number in range(-(-n // in_file)):
        with open(os.path.join(path, "timerlog", f"{number * file_size:020d}"), "wb") as file:
            own = units[number * in_file : (number + 1) * in_file]
            file.write(own.tobytes())
            if len(own) == in_file:
                blank = np.zeros(1, _UNIT)
                blank["size"], blank["magic"] = file_size - in_file * 52, 0xCBD43194 - (1 << 32)
                file.write(blank.tobytes()[:16])
            file.truncate(file_size)
    wheel = np.zeros(_SLOTS, _SLOT)
    starts = np.flatnonzero(first)
    ends = np.append(starts[1:], n)
    seconds = due[order][starts] // 1000
    slots = np.zeros(len(starts), _SLOT)
    slots["time"], slots["number"] = seconds, ends - starts
    slots["first"], slots["last"] = positions[order[starts]], positions[order[ends - 1]]
    wheel[seconds % _SLOTS] = slots
    wheel.tofile(os.path.join(path, "timerwheel"))
    checkpoint = np.zeros(512, ">i8")
    checkpoint[:4] = TIME, int(positions[-1]) + 52, n, n
    os.makedirs(os.path.join(path, "config"), exist_ok=True)
    checkpoint.tofile(os.path.join(path, "config", "timercheck"))


class PendingTimers:
    """What waits in a store with a million timers, as columns and as totals; and where all are due in one second."""

    timeout = 600
    number = 1
    params = (("a day", "one second"),)
    param_names = ("spread",)

    def setup_cache(self):
        """The stores, in the folder that asv gives and deletes."""
        paths = {}
        for name, spread in (("a day", 86400), ("one second", 1)):
            paths[name] = os.path.abspath(f"timers-{spread}")
            remove(paths[name])
            timer_store(paths[name], sized(1_000_000), spread)
        return paths

    def time_pending(self, paths, spread):
        """The answer as columns, in no order."""
        found = pending(paths[spread])
        assert found.counts["timer"] == sized(1_000_000) and not found.problems

    def time_ordered(self, paths, spread):
        """The answer as a table by due time."""
        assert pending(paths[spread]).table.num_rows == sized(1_000_000)

    def time_totals(self, paths, spread):
        """The answer, and its totals by kind and topic."""
        assert pending(paths[spread]).totals[0].messages == sized(1_000_000)
