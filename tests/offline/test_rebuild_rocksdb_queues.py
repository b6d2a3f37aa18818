"""rebuild makes queue files of queues in RocksDB: the database is kept, and the store is one like any other afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile

import golden
import pytest
import rocksdb_stores
from click.testing import CliRunner

pytest.importorskip("rocksdict")

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.errors import GeometryError, StoreError
from rmqstore.offline import rebuild as module
from rmqstore.offline import rebuild_queue_database as rocksdb_module
from rmqstore.offline.rebuild import rebuild
from rmqstore.offline.rebuild_queue_database import rebuild_queue_database
from rmqstore.offline.verify import verify
from rmqstore.rocksdb import queues
from rmqstore.rocksdb.database import load_rocksdict, queue_databases

GEOMETRY = {
    "mapped_file_size_consume_queue": 2000,
    "mapper_file_size_batch_consume_queue": 4600,
    "max_hash_slot_num": 100,
    "max_index_num": 1000,
    "message_delay_level": "1s 2s 30m 1h",
    "index_tags": True,
    "message_index_enable": False,
}
SMALL_INDEX = {"max_hash_slot_num": 10, "max_index_num": 40}
FOLDERS = {"double-separate-lmq": "consumequeue_rocksdb"}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory, monkeypatch):
    """A stopped or killed process leaves the links to a database; the test deletes them."""
    folder = os.fspath(tmp_path_factory.mktemp("temporary"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


def config(root, **more):
    return StoreConfig.infer(root, **GEOMETRY, **more)


def in_queues(store):
    found = {}
    for queue in store.queues:
        low, high = queue.bounds(store.commit_log.min_offset)
        units, at = [], low
        while at < high:
            part = list(queue.read(at, 1 << 20))
            units += [tuple(unit) for unit in part]
            at = part[-1].queue_offset + part[-1].num if part else queue.next_file_offset(at)
        found[queue.topic, queue.queue_id] = units
    return found


@pytest.mark.parametrize("name", [*rocksdb_stores.STORES, *rocksdb_stores.QUEUE_VARIANTS])
def test_queue_files_hold_what_was_read_from_the_database(tmp_path, name):
    root = rocksdb_stores.unpack(name, tmp_path)
    folder = FOLDERS.get(name, "consumequeue")
    database = golden.tree(root / folder)
    with MessageStore.open(root, read_only=True, config=config(root)) as store:
        before = in_queues(store)
    report = rebuild(root, "consumequeue", config(root))
    aside = root / f"{folder}.rocksdb-1"
    assert report.moved_aside == (str(aside),) and golden.tree(aside) == database
    assert queue_databases(root) == () and not (root / folder / "CURRENT").exists()
    options = config(root, enable_lmq=True, enable_multi_dispatch=True)
    assert [finding for finding in verify(root, options) if "consumequeue" in finding.path] == []
    with MessageStore.open(root, read_only=True, config=options) as store:
        after = in_queues(store)
        assert store.queue_database is None and store.undispatched is None
    if name == "compacted":
        # The topic that was deleted is in the log, which is all that a rebuild asks.
        after = {key: units for key, units in after.items() if key[0] != "C"}
        units = after.pop(("%LMQ%y", 0), None)
        assert units is None or before.pop(("%LMQ%y", 0), units) == units
    assert {key: units for key, units in after.items() if key in before} == before
    with MessageStore.open(root, config=options) as store:
        put = store.put_message(Message("New", b"one more"))
        assert store.get_message("New", 0, put.queue_offset).messages[0].body == b"one more"


def test_into_another_directory_the_store_stays_as_it_is(tmp_path):
    root = rocksdb_stores.unpack("lost", tmp_path)
    before = golden.tree(root)
    report = rebuild(root, "consumequeue", config(root), output=tmp_path / "out")
    assert golden.tree(root) == before and report.units == 6000 and report.moved_aside == ()
    assert (tmp_path / "out" / "consumequeue" / "A" / "0").is_dir()


@pytest.mark.parametrize("step", (1, 2, 3))
@pytest.mark.parametrize("name", ["lost", "double-separate-lmq"])
def test_a_kill_while_the_files_are_swapped(tmp_path, monkeypatch, name, step):
    root = rocksdb_stores.unpack(name, tmp_path)
    folder = FOLDERS.get(name, "consumequeue")
    database = golden.tree(root / folder)
    done = 0
    rename = os.rename

    def killed(source, target):
        nonlocal done
        done += 1
        if done > step:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", killed)
    # Renamed are the marker, then the database and the new folder, in whatever order the two places need.
    with contextlib.suppress(KeyboardInterrupt):
        rebuild(root, "consumequeue", config(root))
    monkeypatch.setattr(module.os, "rename", rename)
    if (root / module.REBUILD_DIRECTORY / "complete").exists():
        report = rebuild(root, "consumequeue", config(root))
        assert report.resumed and len(report.moved_aside) == 1
    asides = [path for path in root.iterdir() if ".rocksdb-" in path.name]
    assert [golden.tree(path) for path in asides] == [database]
    with MessageStore.open(root, config=config(root, enable_lmq=True, enable_multi_dispatch=True)) as store:
        found = {key: len(units) for key, units in in_queues(store).items()}
    assert sum(found.values()) == (6000 if name == "lost" else 420)


def test_a_second_database_does_not_replace_the_first(tmp_path):
    root = rocksdb_stores.unpack("lost", tmp_path)
    shutil.copytree(root / "consumequeue", tmp_path / "copy")
    rebuild(root, "consumequeue", config(root))
    shutil.rmtree(root / "consumequeue")
    shutil.copytree(tmp_path / "copy", root / "consumequeue")
    report = rebuild(root, "consumequeue", config(root))
    assert [os.path.basename(path) for path in report.moved_aside] == ["consumequeue.rocksdb-1", "consumequeue.rocksdb-2"]


def test_the_command_says_where_the_database_is(tmp_path):
    root = rocksdb_stores.unpack("lost", tmp_path)
    options = [each for name, value in GEOMETRY.items() if "index_enable" not in name for each in ("-o", f"{name}={value}")]
    answer = CliRunner().invoke(main, ["rebuild", str(root), "--what", "consumequeue", "--yes", *options])
    assert answer.exit_code == 0, answer.output
    assert "kept in" in answer.stdout and "consumequeue.rocksdb-1" in answer.stdout
    assert "now requires storeType=default\n" in answer.stdout


# ------------------------------------------------------------------------------------------------- the database again


@pytest.mark.parametrize("name", [*rocksdb_stores.STORES, *rocksdb_stores.QUEUE_VARIANTS])
def test_the_database_again(tmp_path, name):
    """It has all old units unchanged, and lost or unflushed ones too."""
    root = rocksdb_stores.unpack(name, tmp_path)
    folder = FOLDERS.get(name, "consumequeue")
    old_units, old_offsets = rocksdb_stores.stored_units(root / folder)
    report = rebuild_queue_database(root, config(root))
    assert report.moved_aside == (str(root / f"{folder}.rocksdb-1"),)
    assert queue_databases(root) == (str(root / folder),) and not (root / ".rmqstore-rebuild").exists()
    units, offsets = rocksdb_stores.stored_units(root / folder)
    wanted = rocksdb_stores.queued(root)
    assert {key: value[:2] for key, value in units.items()} == {
        (*queue, offset): (record["phy_offset"], record["size"])
        for queue, records in wanted.items()
        for offset, record in records.items()
    }
    begin = min(record["phy_offset"] for record in rocksdb_stores.records(root))
    live = {key: value for key, value in old_units.items() if value[0] >= begin}
    assert {key: units[key] for key in live} == live
    (last,) = [each for each in rocksdb_stores.records(root)][-1:]
    assert offsets.pop(("CHECKPOINT_TOPIC", 0, "max")) == (last["phy_offset"] + last["size"],)
    old = {key: value for key, value in old_offsets.items() if key[2] == "max" and key[0] != "CHECKPOINT_TOPIC"}
    if name in ("store", "double", "double-separate-lmq", "batch"):
        # `double` was written by a broker that put no units of the further queues into either place.
        assert {key: value for key, value in offsets.items() if key in old} == old
    with MessageStore.open(root, read_only=True, config=config(root)) as store:
        assert store.undispatched is None and store.queue_database.completed == ()
    assert not {path.name for path in (root / folder).iterdir()} & {"rocksdict-config.json", "LOG", "LOCK"}


def test_the_database_of_a_store_with_queue_files(tmp_path):
    root = tmp_path / "s"
    options = StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=2000, **SMALL_INDEX)
    with MessageStore.open(root, config=options) as store:
        for number in range(200):
            store.put_message(Message("AB"[number % 2], b"x" * 100, tags="t"), number % 3)
        wanted = in_queues(store)
    report = rebuild_queue_database(root, options, output=tmp_path / "out")
    assert report.units == 200 and queue_databases(root) == () and queue_databases(tmp_path / "out")
    arguments = ["rebuild", str(root), "--what", "consumequeue", "--rocksdb", "--yes"]
    answer = CliRunner().invoke(main, [*arguments, "-o", "max_hash_slot_num=10", "-o", "max_index_num=40"])
    assert answer.exit_code == 0 and "consumequeue.files-1" in answer.stdout
    assert "now requires storeType=defaultRocksDB" in answer.stdout
    with MessageStore.open(root, read_only=True, config=options) as store:
        assert in_queues(store) == wanted and store.undispatched is None
    answer = CliRunner().invoke(main, ["rebuild", str(root), "--rocksdb", "--what", "index", "--yes"])
    assert answer.exit_code == 2 and "no other --what" in answer.stderr


def test_the_database_goes_where_it_was_and_a_second_one_goes_aside(tmp_path):
    root = rocksdb_stores.unpack("double-separate-lmq", tmp_path)
    options = [each for name, value in GEOMETRY.items() if "index_enable" not in name for each in ("-o", f"{name}={value}")]
    answer = CliRunner().invoke(main, ["rebuild", str(root), "--rocksdb", "--yes", *options])
    assert answer.exit_code == 0, answer.output
    assert "now requires storeType=defaultRocksDB and useSeparateStorePathForRocksdbCQ=true" in answer.stdout
    # A broker does not start with one in either place.
    shutil.copytree(root / "consumequeue_rocksdb", root / "other")
    for path in (root / "other").iterdir():
        path.rename(root / "consumequeue" / path.name)
    report = rebuild_queue_database(root, config(root))
    assert [os.path.basename(path) for path in report.moved_aside] == ["consumequeue.rocksdb-1", "consumequeue_rocksdb.rocksdb-2"]
    assert queue_databases(root) == (str(root / "consumequeue"),)


def test_delay_levels_must_be_known_for_it(tmp_path):
    root = rocksdb_stores.unpack("store", tmp_path)
    before = golden.tree(root)
    with pytest.raises(GeometryError, match="message_delay_level"):
        rebuild_queue_database(root, StoreConfig.infer(root, index_tags=True))
    assert {name: size for name, (size, _) in golden.tree(root).items() if name != "lock"} == {
        name: size for name, (size, _) in before.items() if name != "lock"
    }


def unlocked(root):
    """The contents of a store without the lock of a rebuild."""
    return {name: entry for name, entry in golden.tree(root).items() if name != "lock"}


def write_store(root):
    """Make a store with queues as files; the options of its rebuild."""
    options = StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20000, **SMALL_INDEX)
    with MessageStore.open(root, config=options) as store:
        for number in range(2000):
            store.put_message(Message("AB"[number % 2], b"x" * 100, tags=str(number)), number % 3)
    return ["-o", "max_hash_slot_num=10", "-o", "max_index_num=40"]


def test_a_disk_that_takes_no_more_ends_it_with_a_sentence(tmp_path):
    """The limit of a file's size stands for a full disk: RocksDB's writes fail, in a process as users start it."""
    root, out = tmp_path / "s", tmp_path / "out"
    options = write_store(root)
    before = unlocked(root)
    arguments = [sys.executable, "-m", "rmqstore", "rebuild", root, "--rocksdb", *options]
    for limit in (40, 8000):
        for more in (["--yes"], ["-O", out]):
            done = subprocess.run(
                [*map(str, arguments), *map(str, more)],
                preexec_fn=lambda size=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
                capture_output=True,
                text=True,
            )
            assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
            assert "the new database of queues cannot be written (IO error: " in done.stderr
            assert "File too large" in done.stderr and "make room" in done.stderr
            assert (".rmqstore-rebuild" if "--yes" in more else f"[{out}/rebuild.") in done.stderr
            assert unlocked(root) == before and (not out.exists() or os.listdir(out) == [])


@pytest.mark.parametrize("where", ["Rdict", "write", "put", "flush", "close"])
@pytest.mark.parametrize("aside", [False, True])
def test_nothing_half_made_is_left_wherever_the_writing_fails(tmp_path, monkeypatch, where, aside):
    root = rocksdb_stores.unpack("double-separate-lmq", tmp_path)
    before = unlocked(root)

    class Failing:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            def call(*args, **kwargs):
                if name == where:
                    if where == "close":
                        self.real.close()
                    raise Exception("IO error: No space left on device: While appending to file: 000004.sst")
                answer = getattr(self.real, name)(*args, **kwargs)
                return Failing(answer) if name in ("Rdict", "get_column_family") else answer

            called = name in ("Rdict", "WriteBatch") or not name[0].isupper()
            return call if called else getattr(self.real, name)

    monkeypatch.setattr(queues, "load_rocksdict", lambda: Failing(load_rocksdict()))
    out = tmp_path / "out" if aside else None
    with pytest.raises(StoreError, match=r"cannot be written \(IO error: No space left") as caught:
        rebuild_queue_database(root, config(root), output=out)
    assert type(caught.value) is StoreError and "rebuild again" in caught.value.message
    assert unlocked(root) == before and (out is None or os.listdir(out) == [])
    monkeypatch.undo()
    rebuild_queue_database(root, config(root), output=out)
    assert queue_databases(out or root)


def test_a_kill_leaves_no_half_database_in_the_output(tmp_path, monkeypatch):
    root, out = rocksdb_stores.unpack("lost", tmp_path), tmp_path / "out"

    def killed(*args):
        assert queue_databases(out) == () and os.listdir(out) != []
        raise KeyboardInterrupt

    monkeypatch.setattr(rocksdb_module, "_compare", killed)
    with pytest.raises(KeyboardInterrupt):
        rebuild_queue_database(root, config(root), output=out)
    assert os.listdir(out) == []


def swapping(root, caplog):
    """Return whether verify and a reader report an interrupted rebuild; the command line prints the log of a reader."""
    told = "interrupted_rebuild" in {finding.kind for finding in verify(root)}
    caplog.clear()
    with MessageStore.open(root, read_only=True):
        assert ("run the same rebuild again" in caplog.text) == told
    return told


def killed_at(step, monkeypatch, work):
    """Run `work` and stop it in front of the `step`th change of a name, with all that would clear up after it."""
    done, dead = 0, False
    real = {name: getattr(os, name) for name in ("rename", "unlink")}
    trees = module.delete_tree

    def change(name, *args, **kwargs):
        nonlocal done, dead
        if dead or done == step:
            dead = True
            raise KeyboardInterrupt
        done += 1
        return real[name](*args, **kwargs)

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, functools.partial(change, name))
        for each in (module, rocksdb_module):
            patch.setattr(each, "delete_tree", lambda *args, **kwargs: None if dead else trees(*args, **kwargs))
        try:
            work()
        except KeyboardInterrupt:
            return True
    return False


@pytest.mark.parametrize("name", ["double-separate-lmq", "both", "files"])
def test_a_kill_at_any_step_shows_the_old_queues_or_the_new_or_says_so(tmp_path, monkeypatch, caplog, name):
    if name == "files":
        whole = tmp_path / "s"
        write_store(whole)
        options, places = StoreConfig.infer(whole, **SMALL_INDEX), ["consumequeue"]
    else:
        whole = rocksdb_stores.unpack("double-separate-lmq", tmp_path)
        places = ["consumequeue_rocksdb"]
        if name == "both":
            for path in (whole / "consumequeue_rocksdb").iterdir():
                shutil.copy2(path, whole / "consumequeue")
            places = ["consumequeue", "consumequeue_rocksdb"]
        options = config(whole)
    before = [golden.tree(whole / place) for place in places]
    shutil.copytree(whole, tmp_path / "new")
    rebuild_queue_database(tmp_path / "new", options)
    new = rocksdb_stores.stored_units(tmp_path / "new" / places[0])
    told = set()
    for step in range(100):
        root = tmp_path / str(step)
        shutil.copytree(whole, root)
        if not killed_at(step, monkeypatch, lambda root=root: rebuild_queue_database(root, options)):
            break
        there = [os.path.basename(path) for path in queue_databases(root)]
        is_old = [golden.tree(root / place) for place in places if (root / place).exists()] == before
        is_new = there == places[:1] and not is_old and rocksdb_stores.stored_units(root / places[0]) == new
        told.add(says := swapping(root, caplog))
        assert says or is_old or is_new, (step, there)
        again = rebuild_queue_database(root, options)
        assert again.resumed == says
        # It ends in the same place, and what was there is kept once.
        assert queue_databases(root) == (str(root / places[0]),) and not swapping(root, caplog)
        assert rocksdb_stores.stored_units(root / places[0]) == new
        kept = {path.name: golden.tree(path) for path in root.iterdir() if "queue" in path.name and "." in path.name}
        if not (is_new and not says):
            assert len(kept) == len(again.moved_aside) == len(before) and all(each in before for each in kept.values())
        assert not (root / ".rmqstore-rebuild").exists()
    assert told == {False, True} and step > 4


def test_a_rebuild_of_another_kind_ends_what_was_interrupted(tmp_path, monkeypatch, caplog):
    """Neither takes what the other had made ready for rubbish: old index files lie there in the middle of a swap."""
    whole = tmp_path / "s"
    write_store(whole)
    options = StoreConfig.infer(whole, **SMALL_INDEX, index_tags=True)
    index = {path.name: path.read_bytes() for path in (whole / "index").iterdir()}
    for step in range(100):
        root = tmp_path / str(step)
        shutil.copytree(whole, root)
        if not killed_at(step, monkeypatch, lambda root=root: rebuild(root, config=options)):
            break
        rebuild_queue_database(root, options)
        assert sorted(path.read_bytes() for path in (root / "index").iterdir()) == sorted(index.values())
        assert queue_databases(root) == (str(root / "consumequeue"),) and not swapping(root, caplog)
    for step in range(100):
        root = tmp_path / f"other-{step}"
        shutil.copytree(whole, root)
        if not killed_at(step, monkeypatch, lambda root=root: rebuild_queue_database(root, options)):
            break
        rebuild(root, "consumequeue", options)
        assert queue_databases(root) == () and list(verify(root, options)) == []


def test_a_real_kill_between_its_two_renames(tmp_path, caplog):
    root = rocksdb_stores.unpack("double-separate-lmq", tmp_path)
    old = golden.tree(root / "consumequeue_rocksdb")
    arguments = ["rebuild", str(root), "--rocksdb", "--yes"]
    program = (
        "import os, sys; real = os.rename\n"
        "os.rename = lambda a, b: os.kill(os.getpid(), 9) if str(a).endswith('/queues') else real(a, b)\n"
        "from rmqstore.cli import main; main(args=sys.argv[1:], prog_name='rmqstore')"
    )
    options = ["-o", "message_delay_level=1s 2s 30m 1h"]
    assert subprocess.run([sys.executable, "-c", program, *arguments, *options]).returncode == -9
    assert queue_databases(root) == () and swapping(root, caplog)
    queues = subprocess.run([sys.executable, "-m", "rmqstore", "queues", root], capture_output=True, text=True)
    assert "run the same rebuild again" in queues.stderr
    with pytest.raises(StoreError, match="run the same rebuild again"):
        MessageStore.open(root)
    answer = CliRunner().invoke(main, [*arguments, *options])
    assert answer.exit_code == 0 and "finished an interrupted rebuild" in answer.stdout
    assert "useSeparateStorePathForRocksdbCQ=true" in answer.stdout
    assert queue_databases(root) == (str(root / "consumequeue_rocksdb"),)
    assert golden.tree(root / "consumequeue_rocksdb.rocksdb-1") == old
