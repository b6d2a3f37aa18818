"""Files that do not have their length, and small files that are damaged: what can be read is read, the rest is named.

Every file of a small store is cut short, made empty or too long, and each front end is asked: none may refuse the store,
lose a message that is whole, or keep silent about the file.  Opening for writing refuses, and its advice works.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import golden
import oracle
import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, StoreConfig, describe, verify
from rmqstore.cli import main
from rmqstore.errors import GeometryError, LostLogError, StoreError

BASE = golden.geometry("base")
LOG, QUEUE, INDEX = "commitlog", "consumequeue/TopicTest/0", "index"
SIZES = {LOG: 4096, QUEUE: 200, INDEX: 480}
CASES = [
    (part, which, length)
    for part in SIZES
    for which in (0, 1, 2)
    for length in (0, 13, 199, 4097)
    # A newest file without bytes is what a crash leaves, see below.
    if length or which < 2 or part == INDEX
]


@pytest.fixture
def base(golden_copy) -> Path:
    return golden_copy("base")


def damage(root: Path, part: str, which: int, length: int) -> Path:
    path = root / part / sorted(os.listdir(root / part))[which]
    os.truncate(path, length)
    return path


def places(store: MessageStore) -> list[int]:
    return [message.phy_offset for message in store.messages()]


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def whole_places(root: Path, part: str, which: int, length: int) -> list[int]:
    """Return the places of the whole records in the undamaged store that lost no byte."""
    kept = range(4096 * which + min(length, 4096), 4096 * (which + 1)) if part == LOG else range(0)
    with MessageStore.open(root, read_only=True) as store:
        return [
            message.phy_offset
            for message in store.messages()
            if not (message.phy_offset + message.size > kept.start and message.phy_offset < kept.stop)
        ]


@pytest.mark.parametrize("told", [True, False], ids=["configured", "inferred"])
@pytest.mark.parametrize(("part", "which", "length"), CASES)
def test_a_reader_reads_what_is_left(base, caplog, part, which, length, told):
    wanted = whole_places(base, part, which, length)
    path = damage(base, part, which, length)
    before = oracle.read_files(base)
    config = StoreConfig(**BASE) if told else None
    empty_newest_index = (part, which, length) == (INDEX, 2, 0)
    with caplog.at_level(logging.WARNING, "rmqstore"), MessageStore.open(base, config=config, read_only=True) as store:
        assert [place for place in places(store) if not store.message_at(place).corrupt] == wanted
        assert [row["phy_offset"] for batch in store.scan() for row in batch.to_pylist() if not row["corrupt"]] == wanted
        found = [message.phy_offset for at in range(30) for message in store.get_message("TopicTest", 0, at, 1).messages]
        assert found and set(found) <= set(places(store))
        store.query_message("TopicTest", "key1"), store.stats(), store.refresh()
    told_of = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert len(told_of) == (0 if empty_newest_index else 1)
    findings = [finding for finding in verify(base, config) if finding.kind == "file"]
    assert [finding.path for finding in findings] == [str(path)]
    # A segment gets its size back, a queue or an index is rebuilt from the log.
    advice = "truncate -s 4096 FILE" if part == LOG else "rebuild"
    assert f"has {length} bytes" in findings[0].detail and advice in findings[0].detail
    assert oracle.read_files(base) == before


@pytest.mark.parametrize(("part", "which", "length"), CASES)
def test_opening_for_writing_refuses_and_says_what_to_do(base, part, which, length):
    wanted = whole_places(base, part, which, length)
    path = damage(base, part, which, length)
    before = oracle.read_files(base)
    with pytest.raises(GeometryError, match=f"has {length} bytes.*restore the file from a copy") as caught:
        MessageStore.open(base)
    assert caught.value.path == str(path) and "infer" not in str(caught.value)
    assert {name: data for name, data in oracle.read_files(base).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }
    # The advice of the error: give the file its size, and skip what it lost; or rebuild the index.
    if part == INDEX:
        assert run("rebuild", base, "--yes", *[f"-o{name}={value}" for name, value in BASE.items()]).exit_code in (0, 1)
    else:
        os.truncate(path, SIZES[part])
    gone = 0
    if part == LOG and which == 2 and length < SIZES[LOG]:
        # Of the newest segment nothing follows the zeros, so that the units that lead there go: only if that is asked for.
        with pytest.raises(LostLogError) as lost:
            MessageStore.open(base, config=StoreConfig(**BASE), recovery="skip")
        gone = lost.value.num
    with MessageStore.open(base, config=StoreConfig(**BASE), recovery="skip", drop_units=gone) as store:
        assert set(wanted) <= set(places(store))
        store.put_message(Message("TopicTest", b"again"))


@pytest.mark.parametrize(("part", "which", "length"), [(LOG, 1, 199), (LOG, 0, 0), (QUEUE, 1, 13), (INDEX, 1, 100)])
def test_every_command_answers(base, tmp_path, caplog, part, which, length):
    path = damage(base, part, which, length)
    shown = run("info", base, "--json")
    assert shown.exit_code == 0, shown.output
    assert str(path) in caplog.text
    assert str(path) in [each["path"] for each in json.loads(shown.stdout)["damaged_files"]] or part == QUEUE
    for command in (
        ["query", base, "TopicTest", "key23"],
        ["query", base, "--phy-offset", 0] if (part, which) != (LOG, 0) else ["query", base, "--phy-offset", 8192],
        ["dump", base],
        ["get", base, "TopicTest", 0],
        ["tail", base],
        ["export", base, "--corrupt", "skip", "-O", tmp_path / "out.jsonl"],
        ["metrics", base],
        ["topics", base],
    ):
        done = run(*command)
        assert done.exit_code in (0, 1), (command, done.output)
        assert done.stdout or command[0] == "export", command
    assert (tmp_path / "out.jsonl").stat().st_size
    done = run("verify", base)
    assert done.exit_code == 1 and f"{path}:" in done.stdout


@pytest.mark.parametrize(("part", "which", "length"), [(LOG, 1, 199), (LOG, 2, 13), (LOG, 0, 0), (LOG, 1, 4097)])
@pytest.mark.parametrize("partition_bytes", [500, 1 << 20])
def test_spark_reads_what_is_left(base, part, which, length, partition_bytes):
    pytest.importorskip("pyarrow")
    from rmqstore.errors import CorruptionError
    from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
    from rmqstore.spark.options import ReadOptions
    from rmqstore.spark.plan import LogPlan

    wanted = whole_places(base, part, which, length)
    path = damage(base, part, which, length)
    plan = LogPlan.of(base)

    def rows(corrupt: str) -> list[dict]:
        options, schema = ReadOptions(plan.root, corrupt=corrupt), spark_arrow_schema(("phy_offset", "corrupt"))
        return [
            row
            for piece in plan.pieces(partition_bytes)
            for batch in piece_batches(ReadJob.of(plan, options, schema), piece)
            for row in batch.to_pylist()
        ]

    assert [row["phy_offset"] for row in rows("skip") if not row["corrupt"]] == wanted
    if length < 4096 and which < 2:
        with pytest.raises(CorruptionError) as caught:
            rows("fail")
        assert caught.value.path == str(path)


def test_the_console_answers(base):
    pytest.importorskip("starlette")
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    wanted = whole_places(base, LOG, 1, 199)
    path = damage(base, LOG, 1, 199)
    damage(base, INDEX, 1, 100)
    (base / "config").mkdir(exist_ok=True)
    (base / "config" / "consumerOffset.json").write_text("{")
    client = testclient.TestClient(console.app(base), base_url="http://127.0.0.1:8080")
    for page in ("/", "/metrics", f"/message/{wanted[-1]}", f"/api/message/{wanted[0]}", "/api/queues", "/api/index"):
        assert client.get(page).status_code == 200, page
    notes = [note["text"] for note in client.get("/api/overview").json()["health"] if note["state"] == "bad"]
    assert any(f"{LOG}/{path.name}: the file has 199 bytes" in note for note in notes)
    assert any(f"{INDEX}/" in note and "100 bytes" in note for note in notes)
    assert any("consumerOffset.json" in note for note in notes)


def test_the_length_of_most_files_counts(base):
    for name in sorted(os.listdir(base / LOG))[1:]:
        os.unlink(base / LOG / name)
    # One file that was cut cannot be told from a store with smaller files, until another one is there.
    for name, length in ((0, 1000), (4096, 4096), (8192, 2000)):
        (base / LOG / f"{name:020}").touch()
        os.truncate(base / LOG / f"{name:020}", length)
    assert StoreConfig.infer(base).mapped_file_size_commit_log == 4096
    # Two lengths, and neither is right: the names say which it was.
    os.truncate(base / LOG / f"{4096:020}", 3000)
    assert StoreConfig.infer(base).mapped_file_size_commit_log == 4096


def test_a_size_that_is_wrong_for_all_files_is_still_refused(base):
    for changes in (
        {"mapped_file_size_commit_log": 8192}, {"mapped_file_size_commit_log": 2048}, {"max_hash_slot_num": 20},
    ):  # fmt: skip
        with pytest.raises(GeometryError, match="infer"):
            MessageStore.open(base, config=StoreConfig(**{**BASE, **changes}), read_only=True)


@pytest.mark.parametrize("length", [0, 100, 404])
def test_an_index_of_one_damaged_file_stops_nobody_who_reads(base, length):
    for name in sorted(os.listdir(base / INDEX))[1:]:
        os.unlink(base / INDEX / name)
    path = damage(base, INDEX, 0, length)
    with MessageStore.open(base, read_only=True) as store:
        assert len(places(store)) == 41
    assert run("info", base).exit_code == 0
    assert str(path) in [finding.path for finding in verify(base)]


@pytest.mark.parametrize("length", [7, 8192])
def test_a_checkpoint_of_an_odd_length_stops_nobody_who_reads(base, length):
    os.truncate(base / "checkpoint", length)
    with MessageStore.open(base, read_only=True) as store:
        assert len(places(store)) == 41
        assert store.stats().checkpoint["physic_msg_timestamp"] == 0
    assert run("info", base).exit_code == 0
    assert str(base / "checkpoint") in [finding.path for finding in verify(base)]


@pytest.mark.parametrize("data", [b"{", b'{"offsetTable": 7}', b"\xff\xfe"])
def test_bad_consumer_progress_stops_no_other_answer(base, caplog, data):
    (base / "config").mkdir(exist_ok=True)
    path = base / "config" / "consumerOffset.json"
    path.write_bytes(data)
    description = describe(base)
    assert description.commit_log.max_offset > 0 and description.consumer_offsets == {}
    assert str(path) in description.consumer_offsets_error
    shown = run("info", base, "--json")
    assert shown.exit_code == 0 and str(path) in json.loads(shown.stdout)["consumer_offsets_error"]
    caplog.clear()
    assert run("info", base).exit_code == 0 and str(path) in caplog.text
    with MessageStore.open(base, read_only=True) as store:
        assert str(path) in store.stats().consumer_offsets_error
        with pytest.raises(StoreError):
            store.consumer_offsets.list()
    done = run("metrics", base)
    assert done.exit_code == 0 and "rocketmq_" in done.stdout
    assert run("offsets", "show", base).exit_code == 3


# ------------------------------------------------------------------------------------------------ files without a byte


@pytest.mark.parametrize("made", [True, False], ids=["made by a crash", "lost what it held"])
@pytest.mark.parametrize("part", [LOG, QUEUE])
def test_verify_names_a_newest_file_without_bytes(base, part, made):
    # README: files that no writer leaves are reported; such a file was skipped in silence.
    path = base / part / f"{SIZES[part] * (3 if made else 2):020}"
    path.touch()
    os.truncate(path, 0)
    found = [finding for finding in verify(base) if finding.path == str(path)]
    assert [(finding.kind, finding.pos) for finding in found] == [("file", 0)]
    assert "no bytes" in found[0].detail and "restore it from a copy" in found[0].detail
    done = run("verify", base)
    assert done.exit_code == 1 and str(path) in done.stdout


# ------------------------------------------------------------------------------------------------- unreadable files

HOWS = {"not allowed": errno.EACCES, "bad disk": errno.EIO}
PASSED_OVER = [(INDEX, 0), (INDEX, 1), (INDEX, 2), ("checkpoint", 0)]
UNREAD = [*PASSED_OVER, *((part, which) for part in (QUEUE, LOG) for which in (0, 1, 2))]


@pytest.fixture
def withhold(monkeypatch):
    """Make a file unreadable: when it is opened, or when it is read."""

    def planted(path: Path, how: str) -> None:
        real_open, real_pread, name = os.open, os.pread, str(path)

        def no_open(file, *args, **kwargs):
            if os.fspath(file) == name:
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return real_open(file, *args, **kwargs)

        def no_pread(fd, *args):
            if os.path.samestat(os.fstat(fd), os.stat(name)):
                raise OSError(HOWS[how], os.strerror(HOWS[how]))
            return real_pread(fd, *args)

        if how == "not allowed":
            monkeypatch.setattr(os, "open", no_open)
        else:
            monkeypatch.setattr(os, "pread", no_pread)

    return planted


def file_of(root: Path, part: str, which: int) -> Path:
    return root / part if part == "checkpoint" else root / part / sorted(os.listdir(root / part))[which]


def found_by_keys(store: MessageStore) -> dict[str, list[int]]:
    return {
        key: sorted({message.phy_offset for message in store.query_message(message.topic, key, 100)})
        for message in store.messages()
        for key in message.keys
    }


@pytest.mark.parametrize("told", [True, False], ids=["configured", "inferred"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("part", "which"), PASSED_OVER)
def test_an_index_file_or_checkpoint_that_cannot_be_read_stops_no_reader(
    base, caplog, withhold, monkeypatch, part, which, how, told
):
    config = StoreConfig(**BASE) if told else None
    with MessageStore.open(base, config=config, read_only=True) as store:
        wanted, by_key = places(store), found_by_keys(store)
    assert len(wanted) == 41 and by_key
    path = file_of(base, part, which)
    before = oracle.read_files(base)
    withhold(path, how)
    with caplog.at_level(logging.WARNING, "rmqstore"), MessageStore.open(base, config=config, read_only=True) as store:
        assert places(store) == wanted
        # The entries of the file are searched in the log.
        assert found_by_keys(store) == by_key
        assert all(store.query_message("TopicTest", key, 100).complete for key in by_key)
        assert [problem.path for problem in store.damaged_files()] == ([str(path)] if part == INDEX else [])
        store.stats(), store.refresh()
    told_of = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert len(told_of) == 1 and "cannot be read" in told_of[0] and os.strerror(HOWS[how]) in told_of[0]
    assert run("info", base).exit_code == 0
    monkeypatch.undo()
    assert oracle.read_files(base) == before


def test_an_index_file_that_can_be_read_again_is_taken(base, withhold, monkeypatch):
    withhold(file_of(base, INDEX, 1), "bad disk")
    store = MessageStore.open(base, read_only=True)
    assert len(store.damaged_files()) == 1
    monkeypatch.undo()
    with store:
        store.refresh()
        assert store.damaged_files() == [] and len(store.index_service.names) == 3


@pytest.mark.parametrize("told", [True, False], ids=["configured", "inferred"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("part", "which"), UNREAD)
def test_verify_names_what_cannot_be_read_and_goes_on(base, withhold, part, which, how, told):
    config = StoreConfig(**BASE) if told else None
    assert not list(verify(base, StoreConfig(**BASE)))
    path = file_of(base, part, which)
    other = base / QUEUE / "stray"
    other.write_bytes(b"?")
    withhold(path, how)
    found = list(verify(base, config))
    about = [finding for finding in found if finding.path == str(path)]
    assert [(finding.kind, finding.pos) for finding in about] == [("file", 0)]
    assert "cannot be read" in about[0].detail and "let this user read it" in about[0].detail.lower()
    # The rest was looked at, and of what a file would say nothing is said.
    closed = part == QUEUE and which == 2 and how == "not allowed"
    stray = "not_read" if closed else "file"
    assert str(other) in [finding.path for finding in found if finding.kind == stray]
    assert {finding.kind for finding in found} <= {"file", stray, *(["missing_entry"] if part == INDEX else [])}
    done = run("verify", base)
    assert done.exit_code == 1 and f"{path}:" in done.stdout


@pytest.mark.parametrize("told", [True, False], ids=["configured", "inferred"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("part", "which"), PASSED_OVER)
def test_nothing_is_written_where_a_file_cannot_be_read(base, withhold, monkeypatch, part, which, how, told):
    before = oracle.read_files(base)
    path = file_of(base, part, which)
    withhold(path, how)
    with pytest.raises(OSError, match=os.strerror(HOWS[how])) as caught:
        MessageStore.open(base, config=StoreConfig(**BASE) if told else None)
    assert str(path) in str(caught.value)
    monkeypatch.undo()
    after = oracle.read_files(base)
    assert {name: data for name, data in after.items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }


def test_too_many_open_files_say_nothing_of_an_index_file(base, monkeypatch):
    path, real_open = file_of(base, INDEX, 1), os.open

    def no_room(file, *args, **kwargs):
        if os.fspath(file) == str(path):
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_room)
    with pytest.raises(OSError, match="Too many open files"):
        MessageStore.open(base, config=StoreConfig(**BASE), read_only=True)


def test_a_whole_store_has_no_such_finding(base):
    assert [finding for finding in verify(base, StoreConfig(**BASE)) if finding.kind == "file"] == []
