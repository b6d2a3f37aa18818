"""Two files of progress: which one counts, for every answer; and that none is written in doubt."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from small_store import SMALL

import rmqstore
from rmqstore import ConsumerOffsets, Message, MessageStore, ReadOnlyError, StoreConfig
from rmqstore.cli import main

PLAIN, LMQ = "consumerOffset.json", "lmqConsumerOffset.json"
CONFIG = StoreConfig(**SMALL, clean_resource_interval=0)
LIGHT = CONFIG.replace(enable_lmq=True, enable_multi_dispatch=True)


@pytest.fixture
def root(tmp_path):
    """A store with five messages in one queue, whose progress files a test writes."""
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_messages([Message("Orders", b"%d" % number, keys=[f"K-{number}"]) for number in range(5)])
    return tmp_path / "store"


def write(root, name, offset, written=1_700_000_000):
    path = root / "config" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"offsetTable": {"Orders@G": {"0": offset}}}))
    os.utime(path, (written, written))
    return path


def command(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def offsets_of(root, **overrides):
    with MessageStore.open(root, config=StoreConfig.infer(root, **overrides), read_only=True) as store:
        return store.consumer_offsets.list().get(("G", "Orders"), {}).get(0)


def answers(root):
    """The offset of the group as each answer has it."""
    found = {"api": offsets_of(root), "settings": rmqstore.settings(root).consumer_offsets["G", "Orders"][0]}
    found["describe"] = rmqstore.describe(root).consumer_offsets["G", "Orders"][0]
    shown = command("offsets", "show", root, "--json")
    found["offsets show"] = json.loads(shown[1].splitlines()[0])["queue_offset"]
    found["info"] = json.loads(command("info", root, "--json")[1].splitlines()[0])["consumer_offsets"][0]["offset"]
    lag = next(line for line in command("metrics", root)[1].splitlines() if line.startswith("rocketmq_consumer_offset{"))
    found["metrics"] = int(float(lag.split()[-1]))
    with MessageStore.open(root, read_only=True) as store:
        consumer = store.consume("Orders", "G", offsets=ConsumerOffsets(root.parent / "own.json", read_only=False),
                                 consume_from="progress", timeout=0)  # fmt: skip
        found["consume"] = next(consumer).queue_offset
    return found


@pytest.mark.parametrize("name", [PLAIN, LMQ])
def test_the_only_file_counts_and_is_written(root, name):
    path = write(root, name, 3)
    assert set(answers(root).values()) == {3}
    assert "enable_lmq" not in StoreConfig.infer(root).assumed
    code, _, err = command("offsets", "set", root, "--group", "G", "--topic", "Orders", "--earliest")
    assert (code, err) == (0, "")
    assert offsets_of(root) == 0 and ConsumerOffsets.load(path).get("G", "Orders", 0) == 0
    assert {each.name for each in path.parent.iterdir()} == {name, f"{name}.bak"}
    with MessageStore.open(root) as store:
        store.consumer_offsets.commit("G", "Orders", 0, 4)
    assert ConsumerOffsets.load(path).get("G", "Orders", 0) == 4


@pytest.mark.parametrize("newer", [PLAIN, LMQ])
def test_of_two_files_the_newer_is_read_and_the_other_named(root, newer, caplog):
    older = LMQ if newer == PLAIN else PLAIN
    write(root, older, 1)
    write(root, newer, 3, 1_700_000_001)
    assert set(answers(root).values()) == {3}
    for each in (["offsets", "show"], ["info"], ["metrics"], ["pending"]):
        caplog.clear()
        command(*each, root)
        assert f"{older} is not read" in caplog.text and "enable_lmq" in caplog.text, each
    sources = [each for each in rmqstore.settings(root).sources if each.kind == "consumer_offsets"]
    assert [(os.path.basename(each.path), each.taken) for each in sources] == [(newer, True), (older, False)]
    assert older in rmqstore.settings(root).reasons["consumer_offsets"]
    assert offsets_of(root, enable_lmq=newer == LMQ) == 3 and offsets_of(root, enable_lmq=newer != LMQ) == 1


def test_nothing_is_written_in_doubt(root):
    write(root, PLAIN, 1)
    write(root, LMQ, 3, 1_700_000_001)
    before = {each.name: each.read_bytes() for each in (root / "config").iterdir()}
    code, out, err = command("offsets", "set", root, "--group", "G", "--topic", "Orders", "--earliest")
    assert code == 3 and out == "" and "-o enableLmq=true" in err
    with MessageStore.open(root) as store:
        for change in (
            lambda: store.consumer_offsets.commit("G", "Orders", 0, 0),
            lambda: store.consumer_offsets.remove(group="G"),
            lambda: store.consume("Orders", "G", timeout=0),
        ):
            with pytest.raises(ReadOnlyError, match="enable_lmq"):
                change()
        store.flush()
    assert {each.name: each.read_bytes() for each in (root / "config").iterdir()} == before
    reset = ["offsets", "set", root, "--group", "G", "--topic", "Orders", "--latest"]
    assert command(*reset, "-o", "enableLmq=false")[0] == 0
    assert ConsumerOffsets.load(root / "config" / PLAIN).get("G", "Orders", 0) == 5
    assert (root / "config" / LMQ).read_bytes() == before[LMQ]


def test_light_queues_beside_a_plain_file_alone_are_a_doubt(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=LIGHT) as store:
        store.put_message(Message("Orders", b"0", keys=["K"], properties={"INNER_MULTI_DISPATCH": "%LMQ%a"}))
    assert StoreConfig.infer(root).enable_lmq and "enable_lmq" not in StoreConfig.infer(root).assumed
    # A broker's store does not have its options saved.
    os.unlink(root / "rmqstore.json")
    path = write(root, PLAIN, 1)
    config = StoreConfig.infer(root)
    # The light queues stay known, so a rebuild restores them.
    assert config.enable_lmq and config.enable_multi_dispatch and "enable_lmq" in config.assumed
    assert offsets_of(root) == 1 and offsets_of(root, enable_lmq=True) is None
    before = path.read_bytes()
    set_ = ["offsets", "set", root, "--group", "G", "--topic", "Orders", "--queue-offset", "0"]
    assert command(*set_)[0] == 3 and path.read_bytes() == before
    assert command(*set_, "-o", "enableLmq=true")[0] == 0 and path.read_bytes() == before
    assert ConsumerOffsets.load(root / "config" / LMQ).get("G", "Orders", 0) == 0


def test_a_backup_alone_counts(root):
    path = write(root, LMQ, 3)
    path.rename(f"{path}.bak")
    assert offsets_of(root) == 3


def test_the_console_names_the_second_file(root):
    pytest.importorskip("starlette")
    from rmqstore.console.overview_answers import health
    from rmqstore.console.survey import Survey
    from rmqstore.offline.describe import consumer_places

    write(root, PLAIN, 1)
    write(root, LMQ, 3, 1_700_000_001)
    with MessageStore.open(root, read_only=True) as store:
        assert [place[3] for place in consumer_places(store)] == [3]
        told = [each for each in health(store, None, Survey().known(store)) if each["name"] == "consumer progress"]
    assert [each["state"] for each in told] == ["note"] and PLAIN in told[0]["text"]


def test_sql_reads_the_file_that_counts(root):
    pytest.importorskip("polars")
    write(root, LMQ, 3)
    code, out, _ = command("sql", root, 'select queue_offset from consumers where "group" = \'G\'', "--json")
    assert code == 0 and json.loads(out.splitlines()[0]) == {"queue_offset": 3}


def test_a_file_that_did_not_change_is_read_once(root, monkeypatch):
    path, reads = write(root, PLAIN, 2), []
    load = ConsumerOffsets.load
    monkeypatch.setattr(ConsumerOffsets, "load", lambda *key, **options: (reads.append(key), load(*key, **options))[1])
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:

        def offset():
            store.refresh()
            return store.consumer_offsets.get("G", "Orders", 0)

        assert (offset(), offset(), len(reads)) == (2, 2, 1)
        written = path.with_name("new")
        written.write_bytes(path.read_bytes().replace(b"2", b"3"))
        os.utime(written, ns=(0, path.stat().st_mtime_ns))
        written.replace(path)
        assert (offset(), offset(), len(reads)) == (3, 3, 2)
        path.unlink()
        assert (offset(), offset(), len(reads)) == (-1, -1, 3)
