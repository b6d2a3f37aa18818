"""Messages by key on Spark: what `query_table` finds, for lists and frames of keys."""

from __future__ import annotations

import shutil
import sys

import pytest
from stores import START, make_store

from rmqstore import MessageStore, StoreConfig

pytestmark = [pytest.mark.spark, pytest.mark.java]

COLUMNS = ["phy_offset", "topic", "keys", "tags", "body"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # Entries of 400 messages fill several index files of 200; with 50 slots most keys share theirs with foreign ones.
    return make_store(tmp_path_factory.mktemp("query") / "store", 400)


def wanted(path, keys, topic, **choice):
    with MessageStore.open(path, read_only=True) as store:
        assert len(store.index_service.names) > 4
        table = store.query_table(keys, topic, COLUMNS, **choice)
        return sorted(map(str, table.drop_columns(["key_number"]).to_pylist()))


def found(frame):
    rows = [row.asDict() for row in frame.collect()]
    return sorted(str({**row, "body": bytes(row["body"])}) for row in rows)


def test_few_keys(spark, path):
    from rmqstore.spark import query

    keys = ["K7", "G3", "K7", "none", "G0", "K398"]
    once = list(dict.fromkeys(keys))
    every = [f"G{i}" for i in range(7)]
    for choice in ({}, {"max_num": 5}, {"begin": START + 60_000, "end": START + 250_000}, {"index_type": "K"}):
        frame = query(spark, path, "Orders", keys, COLUMNS, **choice)
        assert frame.columns == ["key", *COLUMNS]
        assert found(frame) == wanted(path, once, "Orders", **choice)
    assert found(query(spark, path, "Stock", ["EU"], COLUMNS, index_type="T", max_num=1000)) == wanted(
        path, ["EU"], "Stock", index_type="T", max_num=1000
    )
    assert len(found(query(spark, path, "Orders", every, COLUMNS, max_num=1000))) > 200
    assert query(spark, path, "Orders", [], COLUMNS).count() == 0
    frame = query(spark, path, "Orders", ["G1"], ["body"], max_num=2)
    assert frame.columns == ["key", "body"] and frame.count() == 2


def test_a_frame_of_keys(spark, path):
    from rmqstore.spark import query

    keys = [f"K{i}" for i in range(0, 450, 3)] + ["G1", "G1"]
    frame = spark.createDataFrame([(key,) for key in keys], "key string").repartition(2)
    want = wanted(path, list(dict.fromkeys(keys)), "Stock", max_num=20)
    assert found(query(spark, path, "Stock", frame, COLUMNS, max_num=20)) == want
    with_topic = spark.createDataFrame(
        [("K1", "Orders"), ("K1", "Stock"), ("K3", "Stock"), (None, "Stock")], "key string, topic string"
    )
    assert found(query(spark, path, None, with_topic, COLUMNS)) == sorted(
        wanted(path, ["K1"], "Orders") + wanted(path, ["K3"], "Stock")
    )


def test_index_files_that_go_meanwhile(spark, path, tmp_path):
    from rmqstore.spark import query

    copy = tmp_path / "store"
    shutil.copytree(path, copy)
    whole = found(query(spark, copy, "Orders", ["K7", "G1"], COLUMNS, max_num=1000))
    frame = query(spark, copy, "Orders", ["K7", "G1"], COLUMNS, max_num=1000)
    files = sorted((copy / "index").iterdir())
    # Retention takes the oldest.
    files[0].unlink()
    assert 0 < len(found(frame)) < len(whole)
    # A second query finds the records of that file in the log.
    assert found(query(spark, copy, "Orders", ["K7", "G1"], COLUMNS, max_num=1000)) == whole
    # A rebuild replaces all.  Spark keeps what it has shuffled of a frame, so that others are asked.
    frame = query(spark, copy, "Orders", ["K7", "G1"], COLUMNS)
    for file in files[1:]:
        file.rename(file.with_name(str(int(file.name) + 10**9)))
    with pytest.raises(Exception, match="replaced since the query was made"):
        frame.collect()


@pytest.mark.parametrize("gone", [[0], [2, 4], [-1], "all"])
def test_what_the_index_lacks_is_searched_in_the_log(spark, path, tmp_path, gone):
    from rmqstore.spark import query

    config = StoreConfig.infer(path)
    copy = tmp_path / "store"
    shutil.copytree(path, copy)
    files = sorted((copy / "index").iterdir())
    for file in files if gone == "all" else [files[i] for i in gone]:
        file.unlink()
    keys = [f"K{i}" for i in range(0, 400, 7)] + ["G1"]
    want = wanted(path, keys, "Orders", max_num=1000)
    assert found(query(spark, copy, "Orders", keys, COLUMNS, max_num=1000, config=config)) == want


def test_what_is_not_searched_is_said(spark, path, tmp_path, monkeypatch, caplog):
    from rmqstore.spark import query

    config = StoreConfig.infer(path)
    copy = tmp_path / "store"
    shutil.copytree(path, copy)
    shutil.rmtree(copy / "index")
    monkeypatch.setattr(sys.modules[query.__module__], "DEFAULT_LOG_BYTES", 1000)
    query(spark, copy, "Orders", ["K1"], COLUMNS, config=config)
    assert "the index does not cover" in caplog.text


def test_questions_that_make_no_sense(spark, path):
    from rmqstore.spark import query

    with pytest.raises(TypeError, match="key 7 is not text"):
        query(spark, path, "Orders", [7])
    with pytest.raises(ValueError, match="index_type is 'X'"):
        query(spark, path, "Orders", ["K1"], index_type="X")
    with pytest.raises(ValueError, match="there is no column 'bodies'"):
        query(spark, path, "Orders", ["K1"], ["bodies"])
    with pytest.raises(ValueError, match="needs a DataFrame"):
        query(spark, path, None, ["K1"])
