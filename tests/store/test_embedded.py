"""Stores of one program: the preset `StoreConfig.embedded`, how much disk it takes, and the pytest plugin."""

from __future__ import annotations

import os

import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.testing import assert_messages

pytest_plugins = ["pytester", "rmqstore.testing"]
MIB = 1 << 20


def disk_size(root):
    return sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names)


def test_a_store_with_one_message_is_small(tmp_path):
    with MessageStore.open(tmp_path / "store", config=StoreConfig.embedded()) as store:
        store.put_message(Message("Orders", b"x", keys="K"))
        assert disk_size(store.path) <= 2 * MIB
    assert disk_size(tmp_path / "store") <= 2 * MIB


@pytest.mark.parametrize("one_by_one", [False, True])
def test_files_grow_with_use(tmp_path, one_by_one):
    with MessageStore.open(tmp_path / "store", config=StoreConfig.embedded()) as store:
        for queue_id in range(8):
            messages = [Message("Orders", b"%0100d" % i, keys=f"{queue_id}-{i}") for i in range(12_500)]
            if one_by_one:
                for message in messages:
                    store.put_message(message, queue_id)
            else:
                store.put_messages(messages, queue_id)
        size = store.commit_log.max_offset
        assert disk_size(store.path) <= 1.3 * size
    with MessageStore.open(tmp_path / "store") as store:
        assert store.config == StoreConfig.embedded() and store.get_table("Orders", 7).num_rows == 12_500
        assert [message.queue_offset for message in store.query_message("Orders", "7-12499")] == [12_499]
        # The next message goes on in the segment that has space for some.
        store.put_message(Message("Orders", b"more"))
        assert disk_size(store.path) <= 1.3 * size


def test_a_segment_has_space_before_it_is_written(tmp_path):
    config = StoreConfig.embedded(mapped_file_size_commit_log=1 << 18, commit_log_growth_size=1 << 14)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        for number in range(300):
            store.put_messages([Message("Orders", bytes(number * 7))] * (1 + number % 9))
            newest = store.commit_log.files.last()
            end = store.commit_log.max_offset - newest.file_from_offset
            assert os.stat(newest.path).st_blocks * 512 >= min(end + 8, newest.size)
        assert len(store.commit_log.files) > 5
        bodies = [len(message.body) for message in store.messages()]
    assert bodies == [number * 7 for number in range(300) for _ in range(1 + number % 9)]
    assert StoreConfig.broker() == StoreConfig()


def test_the_fixture(message_store):
    message_store.put_messages([Message("Orders", b"1", keys=["a", "b"], tags="new"), Message("Orders", b"2", keys="c")])
    message_store.put_message(Message("Other", b"3"))
    messages = assert_messages(message_store, "Orders", [b"1", b"2"], keys=["a", "b", "c"], tags=["new", None])
    assert [message.queue_offset for message in messages] == [0, 1]
    for wrong in ({"bodies": [b"1"]}, {"keys": ["a"]}, {"tags": ["new", "old"]}):
        with pytest.raises(AssertionError, match="instead of"):
            assert_messages(message_store, "Orders", **wrong)


def test_a_test_of_a_user_has_the_fixture(pytester):
    pytester.makepyfile(
        """
        import os
        from rmqstore import Message
        seen = []

        def test_one(message_store):
            message_store.put_message(Message("T", b"x"))
            seen.append(message_store.path)

        def test_two(message_store):
            assert message_store.topics() == [] and not os.path.exists(seen[0])
        """
    )
    pytester.runpytest_subprocess("-p", "rmqstore.testing").assert_outcomes(passed=2)
