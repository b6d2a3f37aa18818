"""One file of a store alone: what it is, by path or by what it holds, and that it says what the store says of it."""

from __future__ import annotations

import os
import shutil

import pytest
from test_cli import HOSTILE, assert_harmless, json_lines, run, utc  # noqa: F401

from rmqstore import MessageStore
from rmqstore.errors import StoreError
from rmqstore.offline.single_file import KINDS, identify

SEGMENT = "00000000000001048576"


def without_type(rows, *names):
    return [{name: value for name, value in row.items() if name not in ("type", *names)} for row in rows]


def test_a_segment_is_what_the_log_has_of_it(broker, tmp_path):
    path = broker / "commitlog" / SEGMENT
    asked = ["--begin-phy-offset", 1 << 20, "--end-phy-offset", 2 << 20, "--json"]
    wanted = json_lines(run("dump", broker, *asked))
    first, *rows = json_lines(run("dump", path, "--json"))
    assert (first["kind"], first["size"], first["base"]) == ("segment", 1 << 20, 1 << 20)
    assert rows == wanted and rows[-1]["type"] == "blank" and len(rows) > 2000
    # A copy that lost its name and its folder tells by its first record.
    copy = shutil.copy(path, tmp_path / "from the backup")
    assert json_lines(run("dump", copy, "--json"))[1:] == wanted
    part = json_lines(run("dump", copy, *asked[:2], "--end-phy-offset", wanted[3]["phy_offset"], "--json"))
    assert part[1:] == wanted[:3]
    text = run("dump", path).stdout.splitlines()
    assert text[0].endswith("a segment of the commit log, 1048576 bytes, first phy offset 1048576")
    assert len(text) == len(rows) + 1


def test_damage_in_a_segment_is_named_and_passed(broker, tmp_path):
    wanted = json_lines(run("dump", broker / "commitlog" / SEGMENT, "--json"))[1:]
    path = shutil.copy(broker / "commitlog" / SEGMENT, tmp_path / SEGMENT)
    hurt, corrupt = wanted[4], wanted[9]
    with open(path, "r+b") as file:
        file.seek(hurt["phy_offset"] - (1 << 20) + 4)
        file.write(b"XXXX")
        file.seek(corrupt["phy_offset"] - (1 << 20) + corrupt["size"] - corrupt["body_size"] // 2 - 200)
        file.write(b"?")
        # Cut short, as by a copy that broke off.
        file.truncate(wanted[20]["phy_offset"] - (1 << 20) + 10)
    result = run("dump", path, "--json")
    assert result.exit_code == 1 and "damaged" in result.stderr
    rows = json_lines(result)[1:]
    damage = [row for row in rows if row["type"] == "damage"]
    assert (damage[0]["phy_offset"], damage[0]["size"], damage[0]["verdict"]) == (
        hurt["phy_offset"], hurt["size"], "BAD_MAGIC",
    )  # fmt: skip
    assert damage[-1]["phy_offset"] == wanted[20]["phy_offset"]
    whole = [row["phy_offset"] for row in rows if row["type"] == "record"]
    assert set(whole) >= {row["phy_offset"] for row in wanted[:20]} - {hurt["phy_offset"], corrupt["phy_offset"]}
    assert "no magic number of a record" in run("dump", path).stdout


def test_queue_files_are_what_the_queues_have_of_them(broker, golden_store, tmp_path):
    whole = json_lines(run("dump", broker, "--what", "queue", "--topic", "Orders", "--queue", 0, "--json"))
    folder = broker / "consumequeue" / "Orders" / "0"
    rows = []
    for name in sorted(os.listdir(folder)):
        first, *its = json_lines(run("dump", folder / name, "--json"))
        assert (first["kind"], first["topic"], first["queue_id"]) == ("queue", "Orders", 0)
        rows += its
    assert without_type(rows, "pos") == without_type(whole, "num") and len(rows) == 2500
    # Without its folders nothing says that it is of a queue.
    copy = shutil.copy(folder / "00000000000000006000", tmp_path / "part")
    assert run("dump", copy).exit_code == 3
    # Units of a compacted topic's batch queue, and of an extension.
    seen = set()
    for name in ("compaction", "ext"):
        store = golden_store(name)
        for path in sorted(store.rglob("*")):
            if path.is_file() and path.parts[-4] in ("batchconsumequeue", "consumequeue_ext"):
                first, *rows = json_lines(run("dump", path, "--json"))
                seen.add(first["kind"])
                assert rows and run("dump", path).exit_code == 0
                if first["kind"] == "batch_queue":
                    topic = path.parts[-3]
                    whole = json_lines(run("dump", store, "--what", "queue", "--topic", topic, "--json"))
                    wanted = {(row["queue_offset"], row["phy_offset"], row["num"]) for row in whole}
                    assert {(row["queue_offset"], row["phy_offset"], row["num"]) for row in rows} <= wanted
                else:
                    assert all(row["store_timestamp"] > 1e12 for row in rows)
    assert seen == {"batch_queue", "queue_extension"}


def test_an_index_file_is_what_the_store_dumps_of_it(broker, tmp_path):
    whole = json_lines(run("dump", broker, "--what", "index", "--json"))
    name = whole[0]["file"]
    path = shutil.copy(broker / "index" / name, tmp_path / "somewhere")
    for each in (broker / "index" / name, path):
        first, *rows = json_lines(run("dump", each, "--json"))
        assert first["kind"] == "index"
        wanted = [row for row in whole if row["file"] == name]
        assert without_type(rows, "file") == without_type(wanted, "file")
    os.truncate(path, 1000)
    # It is no index file any more, and nothing else either.
    assert run("dump", path).exit_code == 3
    cut = shutil.copy(path, tmp_path / "index")
    os.makedirs(tmp_path / "s" / "index")
    cut = shutil.move(cut, tmp_path / "s" / "index" / name)
    result = run("dump", cut)
    assert result.exit_code == 3 and "1000 bytes" in result.stderr and name in result.stderr


def test_the_checkpoint_says_what_it_holds(broker):
    with MessageStore.open(broker, read_only=True) as store:
        (_, value) = json_lines(run("dump", broker / "checkpoint", "--json"))
        assert value == {"type": "checkpoint", **store.checkpoint.as_dict()}


def test_what_is_no_file_of_a_store_is_said(tmp_path):
    strange = {"notes.txt": b"a note", "empty": b"", "zeros": bytes(400), "x" + HOSTILE[:3]: b"x" * 20}
    for name, content in strange.items():
        path = tmp_path / name
        path.write_bytes(content)
        result = run("dump", path)
        assert (result.exit_code, result.stdout) == (3, "") and "not a file of a store" in result.stderr, name
        assert_harmless(result.stderr)
        with pytest.raises(StoreError, match="not a file of a store"):
            identify(path)
    # An empty one whose name says what it should be holds nothing.
    segment = tmp_path / "commitlog" / ("0" * 20)
    segment.parent.mkdir()
    segment.touch()
    result = run("dump", segment)
    assert result.exit_code == 1 and "the file is empty" in result.stderr
    (tmp_path / "checkpoint").write_bytes(b"x" * 20)
    assert run("dump", tmp_path / "checkpoint").exit_code == 3
    assert run("dump", segment, "--what", "log").exit_code == 2


def test_hostile_files_end_in_an_answer(broker, tmp_path):
    import random

    random_bytes = random.Random(23)
    sources = [
        broker / "commitlog" / SEGMENT, broker / "consumequeue" / "Orders" / "0" / ("0" * 20), broker / "checkpoint",
    ]  # fmt: skip
    assert {identify(path).kind for path in sources} <= set(KINDS)
    for source in sources:
        data = bytearray(source.read_bytes()[:20_000])
        for _ in range(12):
            for _ in range(20):
                data[random_bytes.randrange(len(data))] = random_bytes.randrange(256)
            target = tmp_path / "/".join(source.parts[-4:])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data[: random_bytes.randrange(1, len(data) + 1)])
            result = run("dump", target)
            assert result.exit_code in (0, 1, 3)
            assert_harmless(result.output)
