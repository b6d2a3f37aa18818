"""Every face, asked about every kind of disk: the same rows as the API, which `test_every_disk.py` compares with the messages.

Owns the promise that faces only ask and render. Commands run in this process, the console is asked through ASGI, and of Spark
the planner and the tasks run without a session.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import every_disk
import pytest
from click.testing import CliRunner
from every_disk import COLUMNS, MAKE, T0, Row

from rmqstore.cli import main

pytest.importorskip("pyarrow")


class Asked(NamedTuple):
    """A question in plain values; None is no condition."""

    topic: str | None = None
    queue_id: int | None = None
    tags: tuple[str, ...] = ()
    key: str | None = None
    begin: int | None = None
    end: int | None = None
    first: int | None = None
    last: int | None = None

    def has(self, row: Row) -> bool:
        """Return whether the message is asked for."""
        return (
            (self.topic in (None, row.topic))
            and (self.queue_id in (None, row.queue_id))
            and (not self.tags or row.tags in self.tags)
            and (self.key is None or row.has_key(self.key))
            and (self.begin is None or row.store_timestamp >= self.begin)
            and (self.end is None or row.store_timestamp <= self.end)
            and (self.first is None or row.queue_offset >= self.first)
            and (self.last is None or row.queue_offset < self.last)
        )

    def words(self, names: dict[str, str]) -> list[str]:
        """The options of a command, by the names that it has for them."""
        found = []
        for field, name in names.items():
            value = getattr(self, field)
            if value not in (None, ()):
                found += [name, " || ".join(value) if field == "tags" else str(value)]
        return found


LOW, HIGH = T0 + 700 * 9 + 1, T0 + 700 * 37 - 1
ASKED = (
    Asked(), Asked("Orders"), Asked("Pay", 1), Asked(tags=("Aa", "已付")), Asked(begin=LOW, end=HIGH),
    Asked("Orders", key="Aa"), Asked("Orders", key="U00031"), Asked("Orders", 0, ("BB",), "all", LOW, HIGH),
)  # fmt: skip
OF_QUEUE = (
    Asked("Orders", 0), Asked("Pay", 1, ("Aa", "BB")), Asked("Orders", 1, begin=LOW, end=HIGH), Asked("Orders", 1, first=4),
)  # fmt: skip
OF_KEY = (Asked("Orders", key="Aa"), Asked("Pay", key="钥匙3", begin=LOW), Asked("Orders", key="all", begin=LOW, end=HIGH))


@pytest.fixture(scope="module", params=[name for name in MAKE if name not in ("tiered alone", "open for writing")])
def disk(request, tmp_path_factory):
    if request.param.startswith("rocksdb"):
        pytest.importorskip("rocksdict")
    return MAKE[request.param](tmp_path_factory.mktemp("disk"), every_disk.sent())


def only_local(disk) -> None:
    if disk.tiered is not None:
        pytest.skip("this face reads no tiered storage")


def row_of(found: dict[str, Any]) -> Row:
    """A row of an object in JSON whose body is hexadecimal, or missing."""
    given = {"keys": tuple(found["keys"] or ()), "body": bytes.fromhex(found.get("body", ""))}
    return Row(**{name: found[name] for name in COLUMNS if name not in given}, **given)


def run(disk, command: str, *words: object) -> list[Row]:
    """Return the output of a command with ``--json --body hex``."""
    given = [command, str(disk.root), *map(str, words), *disk.options(), "--json", "--body", "hex"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code in (0, 1) and (result.exit_code == 0 or not result.stdout), (given, result.output)
    return [row_of(json.loads(line)) for line in result.stdout.splitlines()]


COLUMNS_ASKED = ("--columns", ",".join(COLUMNS))
NAMES = {"tags": "--tags", "key": "--key", "begin": "--begin", "end": "--end", "topic": "--topic", "queue_id": "--queue"}


def test_export(disk):
    for asked in ASKED:
        found = run(disk, "export", *COLUMNS_ASKED, *asked.words(NAMES))
        assert found == list(filter(asked.has, disk.rows)), asked
    for asked in (Asked("Orders", first=3 * disk.step, last=9 * disk.step), Asked("Pay", 1, ("Aa",), first=2 * disk.step)):
        names = {**NAMES, "first": "--begin-queue-offset", "last": "--end-queue-offset"}
        found = run(disk, "export", *COLUMNS_ASKED, *asked.words(names))
        assert sorted(found) == sorted(filter(asked.has, disk.rows)), asked


def test_get(disk):
    names = {"tags": "--tags", "begin": "--begin", "end": "--end", "first": "--begin-queue-offset"}
    for asked in OF_QUEUE:
        wanted = list(filter(asked.has, disk.queue(asked.topic, asked.queue_id)))
        found = run(disk, "get", asked.topic, asked.queue_id, "--max-num", 100, *asked.words(names))
        assert found == wanted and wanted, asked


def test_query(disk):
    for asked in OF_KEY:
        wanted = disk.newest_first(filter(asked.has, disk.rows))
        for num in (2, 100):
            words = asked.words({"begin": "--begin", "end": "--end"})
            found = run(disk, "query", asked.topic, asked.key, "--max-num", num, *words)
            assert found == wanted[:num] and wanted, asked
    tagged = [row for row in disk.rows if (row.topic, row.tags) == ("Orders", "BB")]
    assert run(disk, "query", "Orders", "BB", "--type", "tag") == disk.newest_first(tagged)
    anywhere = [row for row in disk.rows if row.has_key("钥匙3")]
    assert sorted(run(disk, "query", "--key", "钥匙3")) == sorted(anywhere)


def test_tail(disk):
    only_local(disk)
    names = {"queue_id": "--queue", "tags": "--tags", "key": "--key"}
    for asked in (Asked(), Asked("Orders"), Asked("Orders", 1, ("Aa", "BB")), Asked("Pay", key="all")):
        topic = [] if asked.topic is None else [asked.topic]
        wanted = list(filter(asked.has, disk.rows))
        for num in (3, 100):
            found = run(disk, "tail", *topic, "-n", num, *asked.words(names))
            assert found == wanted[-num:], (asked, num)


# ---------------------------------------------------------------------------------------------------------------- console


def without_bodies(rows: Iterable[Row]) -> list[Row]:
    return [row._replace(body=b"") for row in rows]


def test_console(disk):
    only_local(disk)
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    client = testclient.TestClient(console.app(disk.root, config=disk.config), base_url="http://localhost")

    def pages(**given: Any) -> list[Row]:
        rows, cursor = [], {}
        while True:
            answer = client.get("/api/messages", params={**given, **cursor}).json()
            assert answer["complete"], answer
            rows += [row_of({**row, "body": ""}) for row in answer["messages"]]
            if answer["next_cursor"] is None:
                return rows
            cursor = {"cursor": answer["next_cursor"]}

    for asked in OF_KEY:
        times = {name: getattr(asked, name) for name in ("begin", "end") if getattr(asked, name) is not None}
        wanted = without_bodies(disk.newest_first(filter(asked.has, disk.rows)))
        for num in (3, 100):
            assert pages(topic=asked.topic, key=asked.key, max_num=num, **times) == wanted, (asked, num)
    tagged = [row for row in disk.rows if (row.topic, row.tags) == ("Orders", "BB")]
    assert pages(topic="Orders", key="BB", type="tag") == without_bodies(disk.newest_first(tagged))
    for order, times in (("newest", {}), ("oldest", {"begin": LOW, "end": HIGH})):
        asked = Asked("Orders", **times)
        wanted = disk.newest_first(filter(asked.has, disk.rows))[:: 1 if order == "newest" else -1]
        assert pages(topic="Orders", order=order, max_num=4, **times) == without_bodies(wanted)
    for topic, queue_id, at in (("Orders", 0, 0), ("Pay", 1, 2 * disk.step)):
        answer = client.get(f"/api/queues/{topic}/{queue_id}", params={"from": at, "max_num": 100}).json()
        wanted = [row for row in disk.queue(topic, queue_id) if row.queue_offset >= at]
        assert [row_of({**row["message"], "body": ""}) for row in answer["rows"]] == without_bodies(wanted)
    row = disk.rows[11]
    answer = client.get(f"/api/message/{disk.places[row]}", params={"body": "hex"}).json()
    assert row_of(answer) == row


# --------------------------------------------------------------------------------------------------------- Polars, SQL


def of_frame(frame: Any) -> list[Row]:
    times = frame["store_timestamp"].dt.epoch("ms").to_list()
    return [
        Row(**{name: row[name] for name in COLUMNS} | {"keys": tuple(row["keys"] or ()), "store_timestamp": time})
        for row, time in zip(frame.to_dicts(), times)
    ]


def test_polars(disk):
    only_local(disk)
    pl = pytest.importorskip("polars")
    from rmqstore.polars import scan_store

    messages, col = scan_store(disk.root, COLUMNS, config=disk.config), pl.col
    time = col("store_timestamp").dt.epoch("ms")
    conditions = {
        "topic": lambda text: col("topic") == text,
        "queue_id": lambda number: col("queue_id") == number,
        "tags": lambda texts: col("tags").is_in(texts),
        "key": lambda text: col("keys").list.contains(pl.lit(text)) | (col("unique_key") == text),
        "begin": lambda moment: time >= moment,
        "end": lambda moment: time <= moment,
        "first": lambda number: col("queue_offset") >= number,
        "last": lambda number: col("queue_offset") < number,
    }
    for asked in (*ASKED, Asked("Orders", 1, first=2 * disk.step, last=7 * disk.step)):
        found = messages
        for name, condition in conditions.items():
            if getattr(asked, name) not in (None, ()):
                found = found.filter(condition(getattr(asked, name)))
        assert of_frame(found.collect()) == list(filter(asked.has, disk.rows)), asked


def test_sql(disk):
    only_local(disk)
    pytest.importorskip("polars")
    conditions = {"topic": "topic = '{}'", "queue_id": "queue_id = {}", "key": "'{}' = any(keys)", "first": "queue_offset >= {}"}
    for asked in (*ASKED[:3], ASKED[5], Asked("Orders", 1, (), "all", LOW, HIGH), Asked("Pay", first=2 * disk.step)):
        given = [(text, getattr(asked, name)) for name, text in conditions.items()]
        chosen = [text.format(value) for text, value in given if value is not None]
        where = f" where {' and '.join(chosen)}" if chosen else ""
        times = asked.words({"begin": "--begin", "end": "--end"})
        text = f"select topic, queue_id, queue_offset, unique_key from messages{where}"
        result = CliRunner().invoke(main, ["sql", str(disk.root), text, *disk.options(), *times, "--json"])
        found = [tuple(json.loads(line).values()) for line in result.stdout.splitlines()]
        assert found == [(*row[:3], row.unique_key) for row in disk.rows if asked.has(row)], (text, result.output)


# ------------------------------------------------------------------------------------------------------------------ Spark


def test_spark(disk):
    pytest.importorskip("pyspark")
    from rmqstore.spark.source import StoreSource

    def tasks(**given: Any) -> list[Row]:
        options = {"path": str(disk.root), "columns": ",".join(COLUMNS), "partition_bytes": "700", **given}
        options |= disk.geometry() | ({} if disk.tiered is None else {"tiered": str(disk.tiered)})
        source = StoreSource(options)
        reader = source.reader(source.schema())
        rows = []
        for partition in reader.partitions():
            for batch in reader.read(partition):
                times = batch.column("store_timestamp").cast("int64").to_pylist()
                for row, time in zip(batch.to_pylist(), times):
                    keys = tuple(row["keys"] or ())
                    rows.append(Row(**{name: row[name] for name in COLUMNS} | {"keys": keys, "store_timestamp": time // 1000}))
        return rows

    names = {"topic": "topic", "queue_id": "queue_id", "tags": "tags", "begin": "begin", "end": "end"}
    for asked in (*(asked for asked in ASKED if asked.key is None), Asked("Orders", 0, ("BB",), None, LOW, HIGH)):
        words = asked.words(names)
        given, wanted = dict(zip(words[::2], words[1::2])), list(filter(asked.has, disk.rows))
        assert tasks(**given) == wanted, asked
        assert sorted(tasks(mode="queue", **given)) == sorted(wanted), asked
