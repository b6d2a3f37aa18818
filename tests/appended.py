"""Messages that rmqstore appends to the golden stores of older brokers, for their own version to read.

Owns the messages and their times, so that `ci/golden_versions.sh`, which shows the result to the real broker, and the
test that compares with what that read do the same.  Run as a program it appends to a store in place:
``python tests/appended.py STORE NAME``, where NAME is the golden store's.
"""

from __future__ import annotations

import os
import sys

import golden

from rmqstore import Message, MessageStore, StoreConfig

#: Later than any of the stores was written.
TIME = 1_850_000_000_000


def messages() -> list[tuple[int, int, list[Message]]]:
    """Time, queue id and the messages of each put: several of them are a client's batch."""
    puts = []
    for number in range(45):
        message = Message(
            "Orders",
            f"appended {number}".encode(),
            keys=[f"ORD-{1000 + number}", f"NEW-{number % 4}"],
            tags=("created", "取消", None)[number % 3],
            properties={"UNIQ_KEY": f"{number:032X}", "region": "ΕΕ"},
            flag=number,
            born_timestamp=TIME - number,
        )
        puts.append((TIME + 300 * number, number % 4, [message]))
    later = TIME + 20_000
    odd = [
        Message("Documents", b"", keys="Aa BB 😀-1", tags="odd"),
        Message("New_topic", b"the first of a topic", keys="钥匙"),
        Message("Payments", bytes(range(256)) * 12, keys="LARGE-0", properties={"UNIQ_KEY": "F" * 32}),
        Message("Payments", b"waits", keys="DELAY-4", properties={"DELAY": "4"}),
        Message("Payments", b"flags", tags="odd", flag=-1, sys_flag=0, reconsume_times=2, born_host="[2001:db8::7]:1"),
    ]
    puts += [(later + number, 0, [message]) for number, message in enumerate(odd)]
    batch = [
        Message("Payments", f"of a batch {number}".encode(), keys=f"PAY-{number}", tags="batch") for number in range(5)
    ]
    return [*puts, (later + 100, 1, batch)]


def append(root: str | os.PathLike[str], name: str) -> int:
    """Open the store at `root` with the geometry of golden store `name`, put `messages()`, close it; their number."""
    now = TIME
    config = StoreConfig(**golden.geometry(name), clock=lambda: now)
    count = 0
    with MessageStore.open(root, config=config) as store:
        for time, queue_id, together in messages():
            now = time
            if len(together) > 1:
                count += len(store.put_message_batch(together, queue_id))
            else:
                store.put_message(together[0], queue_id)
                count += 1
    return count


if __name__ == "__main__":
    append(sys.argv[1], sys.argv[2])
