"""What people stumbled over in the ten-minute walk: exit codes on damage, what comes next, what is lost before it is lost.

Owns small stores with damage at known places, and what a command says about it; what it finds is in the tests of each room.
"""

from __future__ import annotations

import pytest
from test_cli import json_lines, run, utc  # noqa: F401

from rmqstore import Message, MessageStore, StoreConfig

SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 100,
    "clean_resource_interval": 0,
}
GEOMETRY = [f"-o{name}={value}" for name, value in SMALL.items()]


@pytest.fixture
def store(tmp_path):
    """Twelve messages in one queue, each with a key of its own and the key ALL; returns the path and the puts."""
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        puts = [
            opened.put_message(Message("Orders", b"body %d" % n, keys=[f"K-{n}", "ALL"], tags="EU" if n % 2 else "US"))
            for n in range(12)
        ]
    return path, puts


def damage(path, pos, data):
    with open(path / "commitlog" / ("0" * 20), "r+b") as file:
        file.seek(pos)
        file.write(data)


def spoil_body(path, put):
    # The body stands after 84 bytes and its length.
    damage(path, put.phy_offset + 88, b"X")


def spoil_magic(path, put):
    damage(path, put.phy_offset + 4, bytes(4))


# ---------------------------------------------------------------------------------------------------------------------
# A message that is damaged


def test_get_of_a_corrupt_message_shows_it_and_ends_with_1(store):
    path, puts = store
    assert run("get", path, "Orders", 0, *GEOMETRY).exit_code == 0
    spoil_body(path, puts[3])
    result = run("get", path, "Orders", 0, *GEOMETRY)
    assert result.exit_code == 1 and result.stdout.count("CORRUPT") == 1 and result.stdout.count("phy ") == 12
    assert f"1 message is CORRUPT; next: rmqstore verify {path}" in result.stderr
    # One that is not shown says nothing.
    assert run("get", path, "Orders", 0, "--max-num", 3, *GEOMETRY).exit_code == 0
    result = run("get", path, "Orders", 0, "--json", *GEOMETRY)
    assert result.exit_code == 1 and [each["corrupt"] for each in json_lines(result)].count(True) == 1
    spoil_body(path, puts[5])
    assert "2 messages are CORRUPT" in run("get", path, "Orders", 0, *GEOMETRY).stderr


def test_get_says_which_message_cannot_be_read_at_all(store):
    path, puts = store
    spoil_magic(path, puts[3])
    result = run("get", path, "Orders", 0, *GEOMETRY)
    assert result.exit_code == 1 and result.stdout.count("phy ") == 11
    assert (
        f"1 queue offset of Orders/0 leads to no whole message: queue offset 3 (phy offset {puts[3].phy_offset}); "
        f"next: rmqstore verify {path}" in result.stderr
    )
    spoil_magic(path, puts[10])
    result = run("get", path, "Orders", 0, *GEOMETRY)
    assert "2 queue offsets of Orders/0 lead to no whole message: queue offset 3, 10 (phy" in result.stderr
    # With tags, one that has others is not missed.
    assert run("get", path, "Orders", 0, "--tags", "US", "--max-num", 4, *GEOMETRY).exit_code == 0
    assert run("get", path, "Orders", 0, "--tags", "EU", *GEOMETRY).exit_code == 1
    # Only what lies in what was asked for counts.
    assert run("get", path, "Orders", 0, "--begin-queue-offset", 4, "--max-num", 5, *GEOMETRY).exit_code == 0
    # Nothing else is there: the sentence is the same, not "nothing at queue offset".
    result = run("get", path, "Orders", 0, "--begin-queue-offset", 10, "--max-num", 1, *GEOMETRY)
    assert result.exit_code == 1 and "queue offset 10" in result.stderr


def test_query_of_a_corrupt_message_shows_it_and_ends_with_1(store):
    path, puts = store
    assert run("query", path, "Orders", "ALL", *GEOMETRY).exit_code == 0
    spoil_body(path, puts[3])
    assert run("query", path, "Orders", "K-4", *GEOMETRY).exit_code == 0
    for command in (["Orders", "K-3"], ["--key", "K-3"], ["Orders", "K-4", "ALL"], ["--phy-offset", puts[3].phy_offset]):
        result = run("query", path, *command, *GEOMETRY)
        assert result.exit_code == 1 and result.stdout.count("CORRUPT (CRC)") == 1, command
        assert "CORRUPT" in result.stderr and f"next: rmqstore verify {path}" in result.stderr


def test_query_says_where_the_log_cannot_be_read(store):
    path, puts = store
    spoil_magic(path, puts[3])
    result = run("query", path, "Orders", "ALL", *GEOMETRY)
    assert result.exit_code == 1 and result.stdout.count("phy ") == 11
    size, place = puts[3].size, puts[3].phy_offset
    assert f"{size} bytes of the log at phy offset {place} cannot be read, and may hold more; next:" in result.stderr
