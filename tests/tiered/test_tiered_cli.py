"""The command line and exports over a store with tiered storage, golden ones.

Owns the option ``--tiered``: the same answers as of the library, for a store and for tiered storage alone.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
import tiered_oracle as oracle_tiered
from test_cli import json_lines, run

from rmqstore import CorruptionError, MessageStore
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return oracle_tiered.unpack("store", tmp_path_factory.mktemp("tiered"))


def places(lines):
    return [(line["topic"], line["queue_id"], line["queue_offset"]) for line in lines]


def test_get_query_info_and_verify(root):
    tiered = ["--tiered", str(root / "tiered")]
    found = json_lines(run("get", root / "store", "Orders", "0", "--max-num", "700", "--json", *tiered))
    assert [line["queue_offset"] for line in found] == list(range(700))
    found = json_lines(run("query", root / "store", "Orders", "ORD-100400", "--json", *tiered))
    assert [line["queue_offset"] for line in found] == [536, 535, 534, 533]
    alone = run("query", root / "store", "Orders", "ORD-100400")
    assert alone.exit_code == 1 and "in tiered storage, which was not searched: give --tiered DIR" in alone.stderr
    assert "was not searched" not in run("query", root / "store", "Orders", "ORD-100400", *tiered).stderr
    (described,) = json_lines(run("info", root / "store", "--json", *tiered))
    queues = [(each["topic"], each["queue_id"], each["max_queue_offset"]) for each in described["tiered"]["queues"]]
    assert queues[1] == ("Orders", 0, 960) and len(described["tiered"]["index_files"]) == 5
    shown = run("info", root / "store", *tiered)
    assert "queues in tiered storage" in shown.stdout and "golden of cluster golden" in shown.stdout
    assert "nothing is wrong" in run("verify", root / "store", *tiered).stdout


def test_tiered_storage_alone(root):
    tiered = str(root / "tiered")
    got = run("get", tiered, "Orders", "0", "--tiered", tiered, "--json")
    assert [line["queue_offset"] for line in json_lines(got)] == list(range(32))
    assert "no metadata" in got.stderr
    assert "nothing is wrong" in run("verify", tiered, "--tiered", tiered).stdout
    assert run("info", tiered, "--tiered", tiered).exit_code == 0
    assert run("get", tiered, "Orders", "0").exit_code != 0


def test_damage_is_said(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    folder = next((tmp_path / "copy" / "tiered").glob("*/golden/Orders/0/COMMIT_LOG"))
    missing = sorted(folder.iterdir(), key=lambda path: path.name[8:])[1]
    missing.unlink()
    tiered = ["--tiered", str(tmp_path / "copy" / "tiered")]
    checked = run("verify", tmp_path / "copy" / "store", "--json", *tiered)
    assert checked.exit_code == 1 and any(missing.name in line.get("path", "") for line in json_lines(checked))
    got = run("get", tmp_path / "copy" / "store", "Orders", "0", "--max-num", "500", *tiered)
    assert got.exit_code not in (0, 1) and missing.name in got.stderr
    output = tmp_path / "out.jsonl"
    with pytest.raises(CorruptionError, match=missing.name):
        export(tmp_path / "copy" / "store", output, options=ExportOptions(tiered=tmp_path / "copy" / "tiered"))
    assert not output.exists()
    report = export(
        tmp_path / "copy" / "store", output, options=ExportOptions(corrupt="skip", tiered=tmp_path / "copy" / "tiered")
    )
    assert report.damaged_stretches > 100 and report.messages + report.damaged_stretches == 3007


SELECTIONS = {
    "all": Selection(),
    "topic and tags": Selection(("Orders",), (0, 2), "paid || created"),
    "keys": Selection(("Orders",), keys=("CUST-7", "ORD-100400")),
    "keys of any topic": Selection(keys=("CUST-7",)),
    "queue offsets": Selection(("Orders",), begin_queue_offset=500, end_queue_offset=600),
    "times": Selection(begin=1795423822000, end=1795423861800),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_exports_have_each_message_once(root, tmp_path, selection):
    wanted = SELECTIONS[selection]
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        rows = store.scan(
            ["topic", "queue_id", "queue_offset", "keys", "tags", "unique_key", "store_timestamp"]
        ).read_all()
    expected = [
        (row["topic"], row["queue_id"], row["queue_offset"])
        for row in rows.to_pylist()
        if (not wanted.topics or row["topic"] in wanted.topics)
        and (not wanted.queue_ids or row["queue_id"] in wanted.queue_ids)
        and (wanted.tags is None or row["tags"] in wanted.tags)
        and (not wanted.keys or set(wanted.keys) & {*row["keys"], row["unique_key"]})
        and (not wanted.by_queue_offset or 500 <= row["queue_offset"] < 600)
        and (wanted.begin is None
             or wanted.begin <= row["store_timestamp"].timestamp() * 1000 <= wanted.end)
    ]  # fmt: skip
    assert expected
    for name in ("out.jsonl", "out.parquet", "out.csv"):
        report = export(root / "store", tmp_path / name, wanted, ExportOptions(tiered=root / "tiered"))
        assert report.messages == len(expected)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(places(lines)) == sorted(expected)
    import pyarrow.parquet

    assert places(pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()) == places(lines)


def test_single_files(root, tmp_path):
    report = export(
        root / "store",
        tmp_path / "bodies",
        Selection(("Orders",)),
        ExportOptions(format="files", tiered=root / "tiered"),
    )
    manifest = [json.loads(line) for line in next((tmp_path / "bodies").glob("*.jsonl")).read_text().splitlines()]
    assert report.messages == len(manifest) == len({line["body_file"] for line in manifest}) == 2872
    assert all(os.path.isfile(tmp_path / "bodies" / line["body_file"]) for line in manifest)


@pytest.mark.parametrize("state", ["whole", "damaged", "missing", "backup"])
def test_what_is_not_noticed_without_metadata_is_said(root, tmp_path, state):
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(next((tmp_path / "copy" / "tiered").glob("*/golden/Payments")))
    path = tmp_path / "copy" / "store" / "config" / "tieredStoreMetadata.json"
    backup = path.with_suffix(".json.bak")
    backup.unlink(missing_ok=True)
    if state == "backup":
        shutil.copy(path, backup)
    if state == "missing":
        path.unlink()
    elif state != "whole":
        path.write_text("{")
    store, tiered = tmp_path / "copy" / "store", ["--tiered", str(tmp_path / "copy" / "tiered")]
    for command in (
        ["export", store, "--output", tmp_path / "out.jsonl", "--force"],
        ["export", store, "--output", tmp_path / "some.jsonl", "--topic", "Orders"],
        ["get", store, "Payments", "0"],
        ["query", store, "Orders", "ORD-100400"],
        ["verify", store],
    ):
        done = run(*command, *tiered)
        is_refused = state in ("whole", "backup") and (command[0] == "get" or "--force" in command)
        assert (done.exit_code not in (0, 1)) == is_refused, command
        # An export that fails says what is missing, and no more.
        if not (is_refused and command[0] == "export"):
            assert ("missing is not noticed" in done.stderr) == (state != "whole"), command
    if state != "whole":
        report = export(
            store, tmp_path / "again.jsonl", Selection(("Orders",)), ExportOptions(tiered=tmp_path / "copy" / "tiered")
        )
        assert len(report.notes) == 1 and "metadata" in report.notes[0]


def test_verify_advises_no_rebuild_for_units_of_tiered_storage(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    folder = next((tmp_path / "copy" / "tiered").glob("*/golden/Orders/0/CONSUME_QUEUE"))
    os.truncate(max(folder.iterdir(), key=lambda path: path.name[8:]), 1 << 20)
    found = run("verify", tmp_path / "copy" / "store", "--tiered", str(tmp_path / "copy" / "tiered"))
    assert found.exit_code == 1 and "bad_unit: restore the files of tiered storage from a backup" in found.stdout
