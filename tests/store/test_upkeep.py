"""Expiry of queue and index files by the log's minimum offset, and the working set of a scan."""

import os

import pytest

import rmqstore
from rmqstore import GetMessageStatus, Message, MessageStore, StoreConfig

CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=200,
    max_hash_slot_num=16,
    max_index_num=20,
    max_message_size=2000,
)


def filled(path, num=200):
    store = MessageStore.open(path, config=CONFIG)
    puts = [store.put_message(Message("Orders", b"x" * 100, keys=[f"k{i}"]), 0) for i in range(num)]
    return store, puts


def test_files_below_the_log_expire(tmp_path):
    store, puts = filled(tmp_path / "s")
    with store:
        queue = store.queues.find("Orders", 0)
        names, files = store.index_service.names, len(queue.files)
        keep_from = store.commit_log.files.offsets[3]
        assert store.commit_log.files.delete_before(keep_from) == 3
        assert store.commit_log.min_offset == keep_from
        first = next(i for i, put in enumerate(puts) if put.phy_offset >= keep_from)
        deleted_units = queue.delete_before(keep_from)
        deleted_index = store.index_service.delete_expired(keep_from)
        # Every file whose last record is gone went, and no other.
        assert deleted_units == first // 10
        assert len(queue.files) == files - deleted_units
        assert 0 < deleted_index < len(names)
        assert store.index_service.names == names[deleted_index:]
        assert store.index_service.file(names[deleted_index]).header.end_phy_offset >= keep_from
        assert store.min_queue_offset("Orders") == first
        got = store.get_message("Orders", 0, 0)
        assert (got.status, got.next_queue_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, first)
        assert store.get_message("Orders", 0, first).messages[0].phy_offset == puts[first].phy_offset
        assert store.query_message("Orders", "k0") == []
        assert [m.queue_offset for m in store.query_message("Orders", f"k{first}")] == [first]
    with MessageStore.open(tmp_path / "s", config=CONFIG) as store:
        assert store.min_queue_offset("Orders") == first
        assert store.max_queue_offset("Orders") == len(puts)
        assert store.recovery_report.units_written == store.recovery_report.index_entries_written == 0
    assert list(rmqstore.verify(tmp_path / "s", CONFIG)) == []


def test_the_newest_files_stay_whatever_expires(tmp_path):
    store, puts = filled(tmp_path / "s", 60)
    with store:
        queue = store.queues.find("Orders", 0)
        beyond = store.commit_log.max_offset + 1
        queue.delete_before(beyond)
        store.index_service.delete_expired(beyond)
        store.commit_log.files.delete_before(beyond)
        assert (len(queue.files), len(store.index_service.names), len(store.commit_log.files)) == (1, 1, 1)
        assert store.put_message(Message("Orders", b"", keys=["next"]), 0).queue_offset == len(puts)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc/self/status")
def test_a_scan_keeps_a_constant_working_set(tmp_path):
    def mapped_mib():
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("RssFile"):
                    return int(line.split()[1]) // 1024
        pytest.skip("the kernel does not say how much of a file is in memory")

    config = StoreConfig(mapped_file_size_commit_log=128 * 1024 * 1024, max_hash_slot_num=16, max_index_num=200)
    body = bytes(range(256)) * (16 * 1024 - 64)
    with MessageStore.open(tmp_path / "s", config=config) as store:
        for _ in range(96):
            store.put_message(Message("Large", body), 0)
        size = store.commit_log.max_offset - store.commit_log.min_offset
    assert size > 380 * 1024 * 1024
    with MessageStore.open(tmp_path / "s", config=config, read_only=True) as store:
        before, most, num = mapped_mib(), 0, 0
        for message in store.messages():
            num += not message.corrupt
            most = max(most, mapped_mib() - before)
        assert num == 96
        # Without letting go it would be the whole log, more than 380 MiB.
        assert most < 100
    before = mapped_mib()
    seen = []
    assert list(rmqstore.verify(tmp_path / "s", config, lambda done, total: seen.append(mapped_mib() - before))) == []
    assert max(seen) < 200
