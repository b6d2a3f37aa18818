"""What the benchmarks share: keys, messages, and stores in a scratch folder.

Owns test data only.  "Cold" means that the pages of the file were never touched since it was made; "warm" that every
page was touched before.  The figures that count are ratios within one run, see docs/benchmarks.md.
"""

import os
import shutil
import tempfile

import numpy as np

from rmqstore import Message, StoreConfig

TIME = 1_700_000_000_000


def sized(n):
    """`n`, or a tenth of it where the benchmarks only have to show that they run (`make bench`)."""
    return n // 10 if os.environ.get("RMQSTORE_BENCH_QUICK") else n


def scratch():
    """A new folder; give it to `remove` afterwards."""
    return tempfile.mkdtemp(prefix="rmqstore-bench-")


def remove(folder):
    """Delete a folder of `scratch`."""
    shutil.rmtree(folder, ignore_errors=True)


def copy_sparse(source, target):
    """Copy a file and keep its holes: store files are allocated in full and mostly empty."""
    extents = []
    with open(source, "rb") as reader, open(target, "wb") as writer:
        size, at = os.fstat(reader.fileno()).st_size, 0
        # All of them first: reading makes the system read ahead, and what it has read counts as written.
        while at < size:
            try:
                start = os.lseek(reader.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            extents.append((start, at))
        for at, end in extents:
            os.lseek(writer.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(writer.fileno(), reader.fileno(), at, end - at)
        writer.truncate(size)
    return target


def keys(n):
    """n different whole keys, ``topic#key``."""
    return [f"Orders#ORD-{i:08d}" for i in range(n)]


def columns(n):
    """phy offsets and store times for n keys."""
    return np.arange(n, dtype=np.int64) * 256, np.full(n, TIME, np.int64) + np.arange(n, dtype=np.int64) // 50


def messages(n, size):
    """n messages with a body of `size` bytes, a key and a tag."""
    body = bytes(i * 7 % 251 for i in range(size))
    return [
        Message("Orders", body, keys=[f"ORD-{i:08d}"], tags=("created", "paid", "shipped")[i % 3]) for i in range(n)
    ]


def default_config():
    """RocketMQ's geometry: 1 GiB segments, 5 M slots, 20 M entries."""
    return StoreConfig()
