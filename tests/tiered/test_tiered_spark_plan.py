"""Partitions of tiered storage, without Spark: together with those of the local log they give each message once."""

from __future__ import annotations

import itertools
import pickle
import shutil
from dataclasses import replace

import pytest
import tiered_oracle as oracle_tiered
from unprivileged import closed

from rmqstore import CorruptionError, MessageStore
from rmqstore.selection import Selection
from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
from rmqstore.spark.options import ReadOptions
from rmqstore.spark.plan import LogPlan
from rmqstore.spark.tiered import tiered_piece_batches, tiered_pieces

pytest.importorskip("pyarrow")

COLUMNS = ("topic", "queue_id", "queue_offset", "phy_offset", "keys", "body")


@pytest.fixture(scope="module", params=oracle_tiered.STORES)
def root(request, tmp_path_factory):
    return oracle_tiered.unpack(request.param, tmp_path_factory.mktemp("tiered"))


def options_of(root, **more):
    chosen = {name: more.pop(name) for name in ("topics", "queue_ids", "tags", "begin", "end") if name in more}
    return ReadOptions(str(root / "store"), selection=Selection(**chosen), tiered=str(root / "tiered"), **more)


def read_tiered(root, size, columns=COLUMNS, **more):
    plan, options = LogPlan.of(root / "store"), options_of(root, **more)
    pieces = list(tiered_pieces(plan, replace(options, partition_bytes=size)))
    rows = []
    for piece in pickle.loads(pickle.dumps(pieces)):
        for batch in tiered_piece_batches(ReadJob.of(plan, options, spark_arrow_schema(columns)), piece):
            rows += batch.to_pylist()
    return pieces, rows


@pytest.mark.parametrize("size", [2000, 50_000, 1 << 30])
def test_every_message_once(root, size):
    pieces, rows = read_tiered(root, size)
    plan = LogPlan.of(root / "store")
    for piece in plan.pieces():
        for batch in piece_batches(ReadJob.of(plan, options_of(root), spark_arrow_schema(COLUMNS)), piece):
            rows += batch.to_pylist()
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        assert rows == store.scan(COLUMNS).read_all().to_pylist()
    assert len(rows) == 3007
    # One for each flat file at least, and one for each message at most.
    assert 11 <= len(pieces) <= 1717 and (len(pieces) == 11) == (size == 1 << 30)
    assert all(first.end <= second.begin for first, second in itertools.pairwise(pieces) if first.path == second.path)


def test_options(root):
    rows = read_tiered(root, 10_000, ("topic", "tags", "queue_id"), topics=("Orders",), queue_ids=(1,), tags=("paid",))[1]
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        low = store.queues.find("Orders", 1).bounds(store.commit_log.min_offset)[0]
        wanted = store.get_table("Orders", 1, columns=["topic", "tags", "queue_id"]).slice(0, low).to_pylist()
    assert rows == [row for row in wanted if row["tags"] == "paid"] and rows


def test_damage(root, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    folder = next((copy / "tiered").glob("*/golden/Orders/0/COMMIT_LOG"))
    first, missing = sorted(folder.iterdir(), key=lambda path: path.name[8:])[:2]
    missing.unlink()
    with pytest.raises(CorruptionError, match=missing.name):
        read_tiered(copy, 1 << 20)
    every = read_tiered(root, 1 << 20)[1]
    skipped = read_tiered(copy, 1 << 20, corrupt="skip")[1]
    reported = read_tiered(copy, 1 << 20, (*COLUMNS, "_corrupt"), corrupt="report")[1]
    bad = [row["_corrupt"] for row in reported if row["_corrupt"]]
    assert len(skipped) + len(bad) == len(every) and len(bad) > 100 and all(missing.name in text for text in bad)
    data = bytearray(first.read_bytes())
    data[100] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptionError, match=first.name):
        read_tiered(copy, 1 << 20)
    rows = read_tiered(copy, 1 << 20, ("phy_offset", "body", "_corrupt"), corrupt="report")[1]
    (text,) = {row["_corrupt"] for row in rows} - {*bad, None}
    assert first.name in text and "BAD_BODY_CRC" in text


def test_what_no_task_can_tell_is_said_by_the_plan(root, tmp_path, caplog):
    copy = shutil.copytree(root, tmp_path / "copy")
    for path in (copy / "store" / "config").glob("tieredStoreMetadata.json*"):
        path.unlink()
    topic = next((copy / "tiered").glob("*/golden/Orders"))
    with closed(topic):
        rows = read_tiered(copy, 1 << 20, corrupt="skip")[1]
        assert rows and all(row["topic"] != "Orders" for row in rows)
        texts = [record.getMessage() for record in caplog.records]
        assert any(f"{topic}: cannot be listed" in text and "left out" in text for text in texts)
        assert any("there are no metadata" in text for text in texts)
        with pytest.raises(CorruptionError, match="cannot be listed"):
            read_tiered(copy, 1 << 20)


def test_metadata_that_may_not_be_read_stop_nobody(root, tmp_path, caplog):
    copy = shutil.copytree(root, tmp_path / "copy")
    for path in (copy / "store" / "config").glob("tieredStoreMetadata.json.bak"):
        path.unlink()
    metadata = copy / "store" / "config" / "tieredStoreMetadata.json"
    with closed(metadata):
        assert len(read_tiered(copy, 1 << 20)[1]) == len(read_tiered(root, 1 << 20)[1])
        assert any(f"the metadata in {metadata} cannot be read" in record.getMessage() for record in caplog.records)
        with MessageStore.open(copy / "store", read_only=True, tiered=copy / "tiered") as store:
            assert store.scan(["queue_id"]).read_all().num_rows == 3007
            assert "not noticed" in "".join(store.tiered.notes)
            assert [each.kind for each in store.tiered.problems] == ["bad_metadata"]
