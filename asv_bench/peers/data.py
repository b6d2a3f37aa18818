"""The generated data: keys, bodies, messages and stores, the same bytes for everyone.

Owns what is measured on, never how.  All of it follows from a seed.  Keys are random, so that neither an order of keys nor a
pattern in them helps anyone; bodies do not compress.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rmqstore import Message

TIME = 1_700_000_000_000
TOPIC = "Orders"
TAGS = ("created", "paid", "shipped")
QUEUES = 4
# So many messages in a row go to one queue.
RUN = 1000
KEY_WIDTH = 16
# Where the records of index keys would begin.
STEP = 256


def keys(n: int, seed: int = 1) -> list[str]:
    """n different keys of 16 hexadecimal digits."""
    text = np.random.default_rng(seed).bytes(8 * n).hex()
    return [text[i : i + KEY_WIDTH] for i in range(0, KEY_WIDTH * n, KEY_WIDTH)]


def whole_keys(n: int, seed: int = 1) -> list[str]:
    """n keys as the index has them, with their topic."""
    return [f"{TOPIC}#{key}" for key in keys(n, seed)]


def made_anew(texts: list[str]) -> list[str]:
    """The same texts as new objects, one behind the other in memory, as Java's are when a round begins."""
    return [text.encode("ascii").decode("ascii") for text in texts]


def write_keys(path: str, texts: list[str]) -> dict[str, Any]:
    """Write texts of one length; what a command to Java needs to read them."""
    with open(path, "w", encoding="ascii") as file:
        file.write("".join(texts))
    return {"keys": path, "width": len(texts[0]), "count": len(texts)}


def bodies(n: int, size: int, seed: int = 2) -> bytes:
    """n bodies of `size` bytes, one behind the other."""
    return np.random.default_rng(seed).bytes(n * size)


def queue_ids(n: int) -> np.ndarray:
    """The queue of each of n messages."""
    return (np.arange(n, dtype=np.int32) // RUN) % QUEUES


def messages(texts: list[str], blob: bytes, size: int) -> list[Message]:
    """New messages, one for each key; `blob` holds their bodies."""
    return [
        Message(TOPIC, blob[i * size : (i + 1) * size], keys=[key], tags=TAGS[i % len(TAGS)])
        for i, key in enumerate(texts)
    ]


def table(texts: list[str], blob: bytes, size: int) -> Any:
    """The same messages as an Arrow table."""
    import pyarrow as pa

    n = len(texts)
    return pa.table(
        {
            "queue_id": pa.array(queue_ids(n)),
            "keys": pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32)), pa.array(texts, pa.string())),
            "tags": pa.array([TAGS[i % len(TAGS)] for i in range(n)], pa.string()),
            "body": pa.Array.from_buffers(
                pa.binary(),
                n,
                [None, pa.py_buffer(np.arange(n + 1, dtype=np.int32) * np.int32(size)), pa.py_buffer(blob)],
            ),
        }
    )


def fill(store: Any, texts: list[str], blob: bytes, size: int) -> None:
    """Put the messages into a store, in the way that is quickest."""
    if hasattr(store, "put_table"):
        whole = table(texts, blob, size)
        for at in range(0, len(texts), 10_000):
            store.put_table(whole.slice(at, 10_000), topic=TOPIC)
        return
    for at in range(0, len(texts), RUN):
        batch = messages(texts[at : at + RUN], blob[at * size : (at + RUN) * size], size)
        store.put_messages(batch, queue_id=at // RUN % QUEUES)
