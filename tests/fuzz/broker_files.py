"""Fuzzing of what a 5.x broker keeps beside its plain files: any bytes are read or refused, never anything else.

Owns the target that judges bytes as entries of its RocksDB databases, as files of the time wheel, and as metadata and index
files of tiered storage; the tests give it what hypothesis makes.  The first byte chooses what they are.  Run as a script it
needs the package atheris, and takes libFuzzer's arguments: ``python tests/fuzz/broker_files.py -max_total_time=20``.  It reads
no file of a store, and writes below a temporary folder of its own.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator

from rmqstore.errors import CorruptionError, Finding
from rmqstore.files.mapped_file import MappedFile
from rmqstore.flatfile.flat_files import TieredMetadata
from rmqstore.flatfile.flat_index import FlatIndexFile
from rmqstore.rocksdb import index, queues, settings, waiting
from rmqstore.timer.timer_files import waiting_units

_FOLDER = tempfile.TemporaryDirectory(prefix="rmqstore-fuzz-")
PATH = "somewhere"


class Entries:
    """Entries as a `Database` has them: of each a byte for the length of its key, one for that of its value, and both."""

    path = PATH

    def __init__(self, data: bytes):
        self.entries: dict[bytes, bytes] = {}
        while len(data) >= 2:
            key_end = 2 + data[0]
            self.entries[data[2:key_end]] = data[key_end : key_end + data[1]]
            data = data[key_end + data[1] :]

    def get(self, key: bytes, *, family: str = "default") -> bytes | None:
        return self.entries.get(key)

    def items(
        self, begin: bytes = b"", end: bytes | None = None, *, family: str = "default"
    ) -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(self.entries):
            if begin <= key and (end is None or key < end):
                yield key, self.entries[key]


def _timers(data: bytes) -> None:
    entries = Entries(data)
    found = waiting.read_timers(entries)  # type: ignore[arg-type]
    assert len(found.timers) + len(found.problems) <= len(entries.entries) + 2
    assert all(time >= max(found.timeline_checkpoint or 0, 0) for time, _ in found.timers)


def _transactions(data: bytes) -> None:
    entries = Entries(data)
    found = waiting.read_transactions(entries)  # type: ignore[arg-type]
    assert len(found.check_times) + len(found.problems) <= len(entries.entries)


def _keys(data: bytes) -> None:
    for key, value in Entries(data).entries.items():
        entry = index.parse_entry(key, value)
        assert entry is None or isinstance(entry, index.IndexEntry)
        record = waiting._record(key, value)
        assert isinstance(record, waiting.PopRecord | str)
        parts = settings._offset_key(key)
        assert parts is None or len(parts) == 3
        try:
            topic, _, _ = queues._offset_key(key, PATH)
        except CorruptionError as error:
            assert error.path == PATH
        else:
            assert topic in key


def _metadata(data: bytes) -> None:
    try:
        metadata = TieredMetadata._parse(data, PATH)
    except CorruptionError as error:
        assert error.path == PATH
    else:
        assert all(isinstance(topic_id, int) for topic_id in metadata.topic_ids)


def _index_file(data: bytes, compacted: bool) -> None:
    path = os.path.join(_FOLDER.name, "index")
    with open(path, "wb") as file:
        file.write((b"\xbc\xc5\x02\x85" if compacted else b"\xbc\xc5\x02\x89") + data)
    file_index = FlatIndexFile(MappedFile(path, len(data) + 4, read_only=True, padded=True), compacted=compacted)
    for key_hash in (0, 1, 2**31 - 1):
        assert all(item.hash == key_hash for item in file_index.items(key_hash))
    assert all(isinstance(each, tuple | Finding) for each in file_index.survey())


def _timer_files(data: bytes) -> None:
    root = os.path.join(_FOLDER.name, "timers")
    for folder in ("config", "timerlog"):
        os.makedirs(os.path.join(root, folder), exist_ok=True)
    # A checkpoint of four numbers, a wheel of four slots, and the rest is the log.
    for name, begin, end in (
        ("config/timercheck", 0, 32),
        ("timerwheel", 32, 160),
        ("timerlog/00000000000000000000", 160, None),
    ):
        with open(os.path.join(root, name), "wb") as file:
            file.write(data[begin:end])
    found = waiting_units(root)
    assert all(isinstance(each, CorruptionError) for each in found.problems)
    assert len(found.units) * 52 <= max(len(data) - 160, 0)


KINDS: tuple[Callable[[bytes], None], ...] = (
    _timers,
    _transactions,
    _keys,
    _metadata,
    lambda data: _index_file(data, True),
    lambda data: _index_file(data, False),
    _timer_files,
)


def judge(data: bytes) -> None:
    """Read bytes as what their first one says."""
    if data:
        KINDS[data[0] % len(KINDS)](data[1:])


def _entry(key: bytes, value: bytes) -> bytes:
    return bytes([len(key), len(value)]) + key + value


_POP = b'{"popTime":1,"groupId":"G","topicId":"T","queueId":0,"retryFlag":0,"invisibleTime":2,"offset":2,"attemptTimes":0}'
# Where a fuzzer may begin: one of each kind, and of the keys one of each database.
SEEDS = [
    b"\0" + _entry(b"timeline_checkpoint", struct.pack(">q", 5)) + _entry(struct.pack(">q", 7) + b"ID", bytes(12)),
    b"\1" + _entry(b"lastOffsetPy", bytes(8)) + _entry(struct.pack(">q", 7) + b"@T@ID", bytes(8)),
    b"\2" + _entry(struct.pack(">q", 3) + b"G@T@" + struct.pack(">i", 0) + b"@" + struct.pack(">q", 2), _POP),
    b"\2" + _entry(struct.pack(">q", 3_600_000) + b"@T@K@key@ID@" + struct.pack(">q", 9), struct.pack(">q", 3_600_001)),
    b"\2" + _entry(struct.pack(">i", 1) + b"\1T\1max\1" + struct.pack(">i", 0), bytes(16)),
    b"\2" + _entry(b"\1\0\1\2" + struct.pack(">h", 1) + b"G\1" + struct.pack(">h", 1) + b"T\1" + bytes(4), bytes(8)),
    b'\3{"topicMetadataTable":{"T":{"topicId":1}},"indexFileSegmentTable":{"b/rmq_sys_INDEX/0":{0:{"size":100}}}}',
    b"\4" + struct.pack(">qqii", 1, 2, 1, 1) + struct.pack(">ii", 36, 28) + struct.pack(">iiiqii", 1, 1, 0, 0, 9, 0),
    b"\5" + struct.pack(">qqii", 1, 2, 1, 1) + struct.pack(">ii", 1, 0) + bytes(32) + struct.pack(">iiiqiii", 1, 1, 0, 0, 9, 0, 0),
    b"\6" + struct.pack(">qqqq", 0, 52, 1, 1) + struct.pack(">qqqii", 1, 0, 0, 1, 0) + bytes(96)
    + struct.pack(">iqiqiqiiq", 52, -1, 1, 500, 500, 0, 100, 0, 0),
]  # fmt: skip


def main() -> None:
    """Fuzz with atheris until it is stopped."""
    import atheris
    from budget import limit_addresses

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            with open(os.path.join(corpus, str(number)), "wb") as file:
                file.write(seed)
        atheris.instrument_func(judge)
        for module in (index, queues, settings, waiting):
            for name, value in vars(module).items():
                if callable(value) and getattr(value, "__module__", None) == module.__name__ and not isinstance(value, type):
                    setattr(module, name, atheris.instrument_func(value))
        atheris.Setup([*sys.argv, corpus], judge)
        limit_addresses()
        atheris.Fuzz()


if __name__ == "__main__":
    main()
