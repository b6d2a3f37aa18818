"""Sizes beyond 32 bits and many files: default geometry, offsets above 2**40, ten thousand files with few mapped.

Large files are sparse: what a test writes on disk stays small.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import oracle
import pytest
from mappings import mappings

from rmqstore import GeometryError, IndexFile, Message, MessageStore, StoreConfig
from rmqstore.commitlog.log_walk import Blank
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.files.mapped_file import MappedFilePool

T0 = 1700000000000
GIB = 1 << 30
FAR = 1024 * GIB  # 2**40


def sparse_file(path: Path, size: int, pieces: dict[int, bytes]) -> None:
    """A file of `size` bytes that holds `pieces` (position: bytes) and holes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for pos, data in pieces.items():
            file.seek(pos)
            file.write(data)
        file.truncate(size)


def used_bytes(root) -> int:
    """Return the bytes on disk of the files below `root`."""
    return sum(
        os.stat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names
    )


def encode(count: int, base: int, first_queue_offset: int, time: int = T0) -> tuple[bytes, list[oracle.Record]]:
    """`count` records of topic Far, one behind the other from phy offset `base` on, a millisecond apart."""
    data = b""
    records = []
    for number in range(count):
        record = oracle.encode_record(
            topic="Far",
            body=b"%d" % number * 20,
            properties=[("KEYS", f"k{number} all"), ("TAGS", "t")],
            queue_offset=first_queue_offset + number,
            phy_offset=base + len(data),
            store_timestamp=time + number,
            born_timestamp=T0,
        )
        records.append(oracle.decode_record(record, 0, base + len(data)))
        data += record
    return data, records


def blank(base: int, pos: int, segment_size: int) -> bytes:
    """The first bytes of the blank record that closes the segment at `base` from `pos` on."""
    return (segment_size - pos).to_bytes(4, "big") + bytes.fromhex("cbd43194")


def maps_of(root) -> list[str]:
    """The files below `root` that this process has mapped."""
    return [line.split(maxsplit=5)[5] for line in mappings(root)]


# ----------------------------------------------------------------------------------------- far out, at default geometry


@pytest.fixture
def far_store(tmp_path):
    """A broker's store at default geometry whose log begins at 2**40: two segments and a queue at 5 000 000 000."""
    root = tmp_path / "far"
    first = 5_000_000_000
    head, records = encode(50, FAR, first)
    following, more = encode(30, FAR + GIB, first + 50, T0 + 50)
    records += more
    sparse_file(root / "commitlog" / f"{FAR:020}", GIB, {0: head, len(head): blank(FAR, len(head), GIB)})
    sparse_file(root / "commitlog" / f"{FAR + GIB:020}", GIB, {0: following})
    queue_base = first * 20 - first * 20 % 6_000_000
    units = b"".join(oracle.Unit(record.phy_offset, record.size, oracle.tags_hash("t")).encode() for record in records)
    sparse_file(
        root / "consumequeue" / "Far" / "0" / f"{queue_base:020}",
        6_000_000,
        {0: oracle.PRE_FILL_UNIT * ((first * 20 - queue_base) // 20), first * 20 - queue_base: units},
    )
    return root, records, first


def test_a_log_beyond_two_to_the_forty(far_store):
    root, records, first = far_store
    assert used_bytes(root) < 16 << 20
    for config in (None, StoreConfig()):
        with MessageStore.open(root, config=config, read_only=True) as store:
            assert store.config.mapped_file_size_commit_log == GIB
            assert store.commit_log.min_offset == FAR
            assert store.commit_log.max_offset == records[-1].end
            for record in records:
                message = store.message_at(record.phy_offset)
                assert message.phy_offset == record.phy_offset
                assert (message.body, message.queue_offset) == (record.body, record.queue_offset)
                assert message.msg_id == record.msg_id
                assert store.message_by_id(record.msg_id) == message
            entries = list(store.commit_log.entries())
            assert len(entries) == 81
            assert entries[50] == Blank(records[49].end, FAR + GIB - records[49].end)
            assert (store.min_queue_offset("Far"), store.max_queue_offset("Far")) == (first, first + 80)
            got = store.get_message("Far", 0, first, 100)
            assert [message.phy_offset for message in got] == [record.phy_offset for record in records]
            assert got.next_queue_offset == first + 80
            assert store.get_message("Far", 0, 2**32).status.name == "OFFSET_TOO_SMALL"
            assert store.get_message("Far", 0, first + 80).status.name == "OFFSET_OVERFLOW_ONE"
            for number in (0, 1, 49, 50, 79):
                assert store.offset_by_time("Far", 0, records[number].store_timestamp) == first + number
                assert store.offset_by_time("Far", 0, records[number].store_timestamp, "upper") == first + number
    # Reading it took no disk.
    assert used_bytes(root) < 16 << 20


@pytest.mark.slow
def test_default_geometry_rolls_at_the_end_of_a_gibibyte(tmp_path):
    # Makes files of 1 GiB and 420 MB, allocated by the file system but hardly written.
    if shutil.disk_usage(tmp_path).free < 6 * GIB:
        pytest.skip("less than 6 GiB of disk are free")
    head, _ = encode(1, FAR, 0)
    sparse_file(tmp_path / "commitlog" / f"{FAR:020}", GIB, {0: head})
    (tmp_path / "abort").write_text("1")
    puts = []
    with MessageStore.open(tmp_path, config=StoreConfig(max_message_size=64 << 20)) as store:
        while store.commit_log.max_offset < FAR + GIB + (1 << 20):
            number = len(puts)
            puts.append(store.put_message(Message("Far", bytes([number]) * (63 << 20), keys=[f"p{number}"])))
        (closing,) = [entry for entry in store.commit_log.entries(puts[-2].phy_offset) if isinstance(entry, Blank)]
        assert closing.phy_offset + closing.size == FAR + GIB
        for number in (0, len(puts) - 2, len(puts) - 1):
            (message,) = store.query_message("Far", f"p{number}")
            assert (message.phy_offset, message.queue_offset) == (puts[number].phy_offset, number + 1)
            assert message.body == bytes([number]) * (63 << 20)
        assert puts[-1].phy_offset == FAR + GIB
    with MessageStore.open(tmp_path) as store:
        assert store.message_at(puts[-1].phy_offset).queue_offset == len(puts)
        assert len(store.query_message("Far", "k0")) == 1


def test_a_tiny_store_far_out_recovered_and_written(tmp_path):
    geometry = {
        "mapped_file_size_commit_log": 4096,
        "mapped_file_size_consume_queue": 200,
        "max_hash_slot_num": 10,
        "max_index_num": 20,
    }
    first = 5_000_000_003
    data, records = encode(20, FAR, first)
    sparse_file(tmp_path / "commitlog" / f"{FAR:020}", 4096, {0: data})
    (tmp_path / "abort").write_text("1")
    with MessageStore.open(tmp_path, config=StoreConfig(**geometry)) as store:
        assert store.recovery_report.units_written == 20
        assert store.min_queue_offset("Far") == first
        puts = store.put_messages([Message("Far", b"%d" % number * 20, keys=["new", "all"]) for number in range(30)])
        assert [put.queue_offset for put in puts] == list(range(first + 20, first + 50))
        assert puts[-1].phy_offset > FAR + 4096
        offsets = [record.phy_offset for record in records] + [put.phy_offset for put in puts]
        assert [message.phy_offset for message in store.query_message("Far", "all")] == offsets[::-1]
        assert store.query_offsets("Far", "k3") == [records[3].phy_offset]
        assert store.message_by_id(puts[-1].msg_id).body == b"29" * 20
        at, got = first, []
        while at < store.max_queue_offset("Far"):
            result = store.get_message("Far", 0, at, 100)
            got += [message.phy_offset for message in result]
            at = result.next_queue_offset
        assert got == offsets
        header = next(store.index_service.files()).header
        assert header.end_phy_offset == offsets[-1] > 2**40
    with MessageStore.open(tmp_path, config=StoreConfig(**geometry)) as store:
        assert [message.phy_offset for message in store.query_message("Far", "all")] == offsets[::-1]
        assert store.max_queue_offset("Far") == first + 50
    files = oracle.read_files(tmp_path)
    names = sorted(path for path in files if path.startswith("consumequeue/"))
    assert names[0] == f"consumequeue/Far/0/{first // 10 * 200:020}"
    rebuilt = oracle.rebuild(files, oracle.geometry(geometry))
    assert oracle.comparable(files, oracle.QUEUES_AND_INDEX) == oracle.comparable(rebuilt, oracle.QUEUES_AND_INDEX)


@pytest.mark.parametrize("queue_offset", [2**31, 2**32 + 7, 10**12, 2**58, (2**63 - 1) // 20 - 600_000])
def test_queue_offsets_at_large_values(tmp_path, queue_offset):
    config = StoreConfig(mapped_file_size_consume_queue=2000)
    queue = ConsumeQueue(str(tmp_path), "T", 0, config, MappedFilePool())
    for number in range(250):
        assert queue.put(Unit(queue_offset + number, FAR + number * 100, 100, number), T0)
    assert queue.max_queue_offset == queue_offset + 250
    assert queue.min_queue_offset(0) == queue_offset
    assert queue.unit(queue_offset + 249) == (queue_offset + 249, FAR + 24900, 100, 249, 1)
    phy_offsets, sizes, _ = queue.units(queue_offset, 300)
    assert len(phy_offsets) == min(100 - queue_offset % 100, 250)
    assert phy_offsets[0] == FAR
    assert set(sizes.tolist()) == {100}
    queue.flush()
    queue.close()
    again = ConsumeQueue(str(tmp_path), "T", 0, config, MappedFilePool(), read_only=True)
    again.load()
    assert (again.min_queue_offset(FAR), again.max_queue_offset) == (queue_offset, queue_offset + 250)
    assert again.min_queue_offset(FAR + 10_001) == queue_offset + 101
    assert again.min_queue_offset(FAR + GIB) == queue_offset + 250
    again.close()


# --------------------------------------------------------------------------------------- an index of 20 000 000 entries


@pytest.fixture
def large_index(tmp_path):
    """An index file at default geometry, sparse, in which ten entries are free."""
    path = tmp_path / "20231114221320000"
    sparse_file(path, 420_000_040, {})
    with IndexFile.open(path, StoreConfig()) as index:
        assert index.put_key("T#early", FAR, T0)
        assert index.put_key("T#both", FAR + 1, T0 + 1000)
        index.write_header(T0, T0 + 1000, FAR, FAR + 1, 2, 19_999_990)
        yield index
    assert used_bytes(tmp_path) < 1 << 20


def test_entries_near_the_end_of_a_large_index(large_index):
    index = large_index
    assert (index.slot_num, index.index_num) == (5_000_000, 20_000_000)
    assert index.entry_pos(19_999_999) + 20 == 420_000_040
    taken = [index.put_key("T#both" if i % 2 else f"T#late{i}", 2**62 + i, T0 + 10**9 + i) for i in range(12)]
    assert taken == [True] * 10 + [False] * 2
    assert index.is_full
    assert index.header.index_count == 20_000_000
    assert index.header.end_phy_offset == 2**62 + 9
    assert index.select_phy_offset("T#both") == [2**62 + i for i in (9, 7, 5, 3, 1)] + [FAR + 1]
    assert index.select_phy_offset("T#both", 64, T0, T0 + 5000) == [FAR + 1]
    assert index.select_phy_offset("T#early") == [FAR]
    assert index.select_phy_offset("T#late8") == [2**62 + 8]
    assert index.select_phy_offset("T#late10") == []
    # The bytes, as the format says.
    key_hash = oracle.index_hash("T#late8")
    slot_pos = 40 + 4 * (key_hash % 5_000_000)
    assert index.region.get_i32(slot_pos) == 19_999_998
    entry = index.region.read(40 + 4 * 5_000_000 + 20 * 19_999_998, 20)
    assert entry == key_hash.to_bytes(4, "big") + (2**62 + 8).to_bytes(8, "big") + (10**6).to_bytes(4, "big") + bytes(4)


def test_many_keys_near_the_end_of_a_large_index(large_index):
    index = large_index
    keys = [f"T#m{i}" for i in range(50)]
    assert index.put_keys(keys, np.arange(50) + FAR, np.full(50, T0 + 5000)) == 10
    offsets, rows = index.select_phy_offsets(keys)
    assert offsets.tolist() == list(range(FAR, FAR + 10))
    assert rows.tolist() == [min(i, 10) for i in range(51)]


def test_a_full_index_of_another_length_is_refused(tmp_path):
    path = tmp_path / "20231114221320000"
    for length in (420_000_039, 420_000_041, 420_000_060):
        sparse_file(path, length, {})
        with pytest.raises(GeometryError, match=f"has {length} bytes.*make 420000040"):
            IndexFile.open(path, StoreConfig())
        assert os.path.getsize(path) == length


# ----------------------------------------------------------------------------------------------------------- many files

FILES = 10_000


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    """A store of 10 000 segments of 512 bytes, one record and a blank in each, and 200 queue files."""
    root = tmp_path_factory.mktemp("many") / "store"
    (root / "commitlog").mkdir(parents=True)
    (root / "consumequeue" / "Far" / "0").mkdir(parents=True)
    units = b""
    for number in range(FILES):
        base = number * 512
        data = oracle.encode_record(
            topic="Far", body=b"%d" % number, queue_offset=number, phy_offset=base, store_timestamp=T0 + number
        )
        units += oracle.Unit(base, len(data), 0).encode()
        if number < FILES - 1:
            data += blank(base, len(data), 512)
        (root / "commitlog" / f"{base:020}").write_bytes(data.ljust(512, b"\0"))
    for base in range(0, len(units), 1000):
        (root / "consumequeue" / "Far" / "0" / f"{base:020}").write_bytes(units[base : base + 1000])
    return root


def many_config(**options) -> StoreConfig:
    return StoreConfig(
        mapped_file_size_commit_log=512,
        mapped_file_size_consume_queue=1000,
        max_hash_slot_num=10,
        max_index_num=20,
        **options,
    )


def test_ten_thousand_files_are_opened_with_few_mapped(many_files):
    with MessageStore.open(many_files, config=many_config(max_mapped_files=16), read_only=True) as store:
        assert len(store.commit_log.files) == FILES
        assert len(store._state.pool) <= 2
        assert len(maps_of(many_files)) <= 2
        most = 0
        for number in range(0, FILES, 3):
            assert store.message_at(number * 512).body == b"%d" % number
            if number % 500 == 0:
                most = max(most, len(maps_of(many_files)))
        for number in range(0, FILES, 61):
            (message,) = store.get_message("Far", 0, number, 1)
            assert message.body == b"%d" % number
            assert len(store._state.pool) <= 16
        assert most <= 16
        assert len(maps_of(many_files)) <= 16
    assert maps_of(many_files) == []


def test_scanning_ten_thousand_files_keeps_the_bound(many_files):
    with MessageStore.open(many_files, config=many_config(max_mapped_files=16), read_only=True) as store:
        count = 0
        for message in store.messages():
            count += 1
            if count % 1000 == 0:
                assert message.queue_offset == count - 1
                assert len(maps_of(many_files)) <= 17  # One more while the next file takes the place of another.
                assert len(os.listdir("/proc/self/fd")) < 200
        assert count == FILES
        assert store.offset_by_time("Far", 0, T0 + 7777) == 7777
        assert len(maps_of(many_files)) <= 16


def test_the_default_bound_is_kept_too(many_files):
    with MessageStore.open(many_files, read_only=True, config=many_config()) as store:
        assert sum(1 for _ in store.messages()) == FILES
        assert store.config.max_mapped_files == 1024
        assert len(store._state.pool) <= 1024
        assert len(maps_of(many_files)) <= 1024
    assert maps_of(many_files) == []


def test_one_mapped_file_is_enough(many_files):
    with MessageStore.open(many_files, read_only=True, config=many_config(max_mapped_files=1)) as store:
        for number in (0, 9999, 5000, 1):
            (message,) = store.get_message("Far", 0, number, 1)
            assert message.body == b"%d" % number
        assert len(maps_of(many_files)) <= 2


def test_a_held_view_survives_eviction(many_files):
    with MessageStore.open(many_files, read_only=True, config=many_config(max_mapped_files=4)) as store:
        view = store.commit_log.segment(0).hold(0, 8)
        for number in range(1, 200):
            store.message_at(number * 512)
        assert bytes(view)[4:8] == bytes.fromhex("daa320a7")
        view.release()


@pytest.mark.slow
def test_ten_thousand_files_opened_for_writing(many_files, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(many_files, root)
    (root / "abort").write_text("1")
    config = many_config(max_mapped_files=16)
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.records == FILES
        assert len(maps_of(root)) <= 34
        assert store.put_message(Message("Far", b"new")).queue_offset == FILES
        assert len(list(store.messages())) == FILES + 1


def test_many_index_files_keep_the_bound(tmp_path):
    config = StoreConfig(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=4,
        max_mapped_files=16,
    )  # fmt: skip
    with MessageStore.open(tmp_path, config=config) as store:
        for number in range(360):
            store.put_message(Message("T", bytes(100), keys=[f"k{number % 7}"]))
        assert len(store.index_service.names) == 120
        assert len(maps_of(tmp_path)) <= 34
        for number in range(7):
            assert len(store.query_message("T", f"k{number}", 100)) == len(range(number, 360, 7))
            assert len(store.query_offsets("T", f"k{number}")) == len(range(number, 360, 7))
        assert len(maps_of(tmp_path)) <= 34
    with MessageStore.open(tmp_path, config=config, read_only=True) as store:
        assert len(maps_of(tmp_path)) <= 2
        for number in range(7):
            assert len(store.query_message("T", f"k{number}", 100)) == len(range(number, 360, 7))
        assert len(maps_of(tmp_path)) <= 34
