"""Opening a RocksDB database of a broker: what is found, that nothing is left below the store, and what damage says."""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import golden
import pytest
from click.testing import CliRunner

pytest.importorskip("rocksdict")

from rmqstore import settings, verify
from rmqstore.cli import main
from rmqstore.errors import CorruptionError, StoreClosedError, StoreError
from rmqstore.rocksdb.database import Database, _torn_manifest, is_database, load_rocksdict, wrong_types

DATA = golden.DATA / "rocketmq-rocksdb"


def unpack(name: str, folder: Path) -> Path:
    with lzma.open(DATA / f"{name}.tar.xz") as packed, tarfile.open(fileobj=packed) as archive:
        golden.extract(archive, folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return unpack("store", tmp_path_factory.mktemp("rocksdb")) / "store"


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_a_database_holds(store):
    with Database(store / "consumequeue") as database:
        assert set(database.families) == {"default", "offset"}
        assert "offset" in database.families and "absent" not in database.families
        units = list(database.items())
        assert len(units) == 1403
        keys = [key for key, _ in units]
        assert keys == sorted(keys)
        checkpoint = database.get(
            struct.pack(">i", 16) + b"\x01CHECKPOINT_TOPIC\x01max\x01" + bytes(4), family="offset"
        )
        assert len(checkpoint) == 8
        assert database.get(b"nothing") is None
        assert database.get(b"nothing", family="absent") is None
        assert list(database.items(family="absent")) == []
        assert database.get(keys[7]) == units[7][1]
        assert list(database.items(keys[3], keys[6])) == units[3:6]
        assert database.last() == units[-1]
        assert database.last(keys[5]) == units[4]
        assert database.last(keys[0]) is None


def test_reading_leaves_no_trace(store, tmp_path, monkeypatch):
    before = contents(store)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Database(store / "rocksdbstore") as database:
        assert list(database.items()) and len(list(tmp_path.iterdir())) == 1
    assert contents(store) == before
    assert not list(tmp_path.iterdir())


def test_a_directory_without_a_database(tmp_path):
    assert not is_database(tmp_path)
    with pytest.raises(FileNotFoundError, match="CURRENT"):
        Database(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_database(store):
    database = Database(store / "consumequeue")
    database.close()
    database.close()
    with pytest.raises(StoreClosedError):
        database.get(b"")


def test_a_missing_table(tmp_path):
    folder = unpack("store", tmp_path) / "store" / "consumequeue"
    gone = next(folder.glob("*.sst"))
    gone.unlink()
    with pytest.raises(CorruptionError) as caught:
        Database(folder)
    assert gone.name in str(caught.value) and str(folder) in str(caught.value)
    assert "rmqstore-rocksdb-" not in str(caught.value)


def test_a_database_without_its_current(tmp_path):
    folder = unpack("store", tmp_path) / "store" / "consumequeue"
    (folder / "CURRENT").unlink()
    assert is_database(folder)
    with pytest.raises(CorruptionError, match="CURRENT is missing"):
        Database(folder)
    # A topic may have such a name, and its folder is no file.
    for path in folder.glob("MANIFEST-*"):
        path.unlink()
        path.mkdir()
    assert not is_database(folder)


@pytest.mark.parametrize(
    "sizes", [[10, 20], [32768 - 14, 5, 7], [32768 - 13, 5], [100_000, 3], [32768 - 7, 32768 - 7, 1], [32768 - 20]]
)
def test_where_a_manifest_was_cut(tmp_path, sizes):
    """Records as RocksDB lays them out, by its format's description, cut at every byte near a border."""
    data, ends = b"", [0]
    for size in sizes:
        left, first = bytes([size % 251]) * size, True
        while first or left:
            room = 32768 - len(data) % 32768
            if room < 7:
                data += bytes(room)
                continue
            part, left = left[: room - 7], left[room - 7 :]
            kind = 1 if first and not left else 2 if first else 3 if left else 4
            data += struct.pack("<IHB", 7, len(part), kind) + part
            first = False
        ends.append(len(data))
    (tmp_path / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    near = {end + more for end in [*ends, *range(32768, len(data), 32768)] for more in range(-9, 10)}
    for cut in sorted(each for each in near if 0 <= each <= len(data)):
        (tmp_path / "MANIFEST-000001").write_bytes(data[:cut])
        rest = data[max(end for end in ends if end <= cut) : cut]
        # Zeros fill up a block.
        assert (_torn_manifest(str(tmp_path)) is None) == (not any(rest)), (cut, ends)
    (tmp_path / "MANIFEST-000001").write_bytes(data + bytes(5000))
    assert _torn_manifest(str(tmp_path)) is None


def test_tables_that_the_manifest_does_not_have(tmp_path):
    folder = unpack("store", tmp_path) / "store" / "config" / "topics"
    with Database(folder) as database:
        assert database.unlisted == () and database.log_damage is None
    tables = sorted(folder.glob("*.sst"))
    # An obsolete one is older; a newer one is what the MANIFEST should have.
    shutil.copy(tables[0], folder / "000001.sst")
    with Database(folder) as database:
        assert database.unlisted == ()
    shutil.copy(tables[0], folder / "999999.sst")
    with Database(folder) as database:
        assert database.unlisted == ("999999.sst",)


def test_files_that_change_at_each_try(tmp_path, monkeypatch):
    """A broker that compacts faster than the opening: several tries, then an error."""
    folder = unpack("store", tmp_path) / "store" / "consumequeue"
    tries = []

    def link(self, links):
        # A table goes, and another comes, after the directory was listed.
        linked = linking(self, links)
        table = next(folder.glob("*.sst"))
        table.rename(folder / f"{len(tries) + 900:06}.sst")
        tries.append(linked)
        return linked

    linking = Database._link
    monkeypatch.setattr(Database, "_link", link)
    with pytest.raises(CorruptionError, match="its files changed at each of several tries"):
        Database(folder)
    assert len(tries) == 10
    # One that is gone is no reason to try more than once in each mode.
    monkeypatch.setattr(Database, "_link", lambda self, links: tries.append(0) or linking(self, links))
    tries.clear()
    with pytest.raises(CorruptionError, match="rebuild it"):
        Database(folder)
    assert len(tries) == 2


@pytest.mark.parametrize("name", ["*.sst", "MANIFEST-*", "CURRENT"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name):
    folder = unpack("store", tmp_path) / "store" / "consumequeue"
    (file, *_) = folder.glob(name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CorruptionError) as caught:
        Database(folder)
    assert "not a regular file" in str(caught.value) or "CURRENT is missing" in str(caught.value)


def test_folders_with_the_names_of_files_do_not_matter(tmp_path):
    folder = unpack("store", tmp_path) / "store" / "consumequeue"
    with Database(folder) as database:
        whole = list(database.items())
    for name in ("MANIFEST-000001", "topic.sst", "topic.log"):
        (folder / name / "0").mkdir(parents=True)
    with Database(folder) as database:
        assert list(database.items()) == whole


def test_no_place_for_temporary_files_is_not_taken_for_absence(store, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(store / "nowhere"))
    with pytest.raises(StoreError, match="set TMPDIR") as caught:
        Database(store / "consumequeue")
    assert not isinstance(caught.value, FileNotFoundError)


def no_room_for_links(monkeypatch, room):
    """The temporary folder takes this number of links, and then maybe rocksdict's own file."""
    real, left = os.symlink, [room]

    def symlink(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *args)
        return real(*args)

    class Full:
        def __getattr__(self, name):
            return getattr(load_rocksdict(), name)

        class Rdict:
            list_cf = load_rocksdict().Rdict.list_cf

            def __new__(cls, *args, **kwargs):
                # The message of rocksdict for a full disk; without inodes it is an OSError with this text.
                raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(os, "symlink", symlink)
    if room > 1000:
        monkeypatch.setattr("rmqstore.rocksdb.database.load_rocksdict", Full)


@pytest.mark.parametrize("room", [0, 3, 9999])
def test_a_full_temporary_folder_is_not_taken_for_damage(store, monkeypatch, room, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    store, temporary = tmp_path / "store", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    no_room_for_links(monkeypatch, room)
    with pytest.raises(StoreError, match="set TMPDIR") as caught:
        Database(store / "consumequeue")
    assert type(caught.value) is StoreError and os.listdir(temporary) == []
    assert f"the temporary folder {temporary}" in caught.value.message and "No space left" in caught.value.message
    assert caught.value.path == str(store / "consumequeue") and "backup" not in caught.value.message
    found = list(verify(store))
    assert {finding.kind for finding in found} == {"not_checked"} and all("set TMPDIR" in each.detail for each in found)
    told = {os.path.relpath(finding.path, store) for finding in found}
    config = {f"config/{name}" for name in ("topics", "subscriptionGroups", "consumerOffsets")}
    assert told == {"consumequeue", "rocksdbstore", "kvStore", *config}
    shown = settings(store)
    assert {finding.kind for finding in shown.findings} == {"not_checked"} and len(shown.findings) == 4
    for arguments in (["settings"], ["offsets", "show"], ["queues"]):
        answer = CliRunner().invoke(main, [*arguments, str(store)])
        assert answer.exit_code == (1 if arguments == ["settings"] else 3) and "set TMPDIR" in answer.stderr


def test_a_limit_of_files_is_not_taken_for_damage(store):
    """In a process as users start it; the limit stands for a full disk."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); "
        "from rmqstore.rocksdb.database import Database; Database(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", program, store / "consumequeue"], capture_output=True, text=True)
    assert "StoreError: the RocksDB database was not read: the temporary folder" in done.stderr
    assert "File too large" in done.stderr and "set TMPDIR" in done.stderr


def test_a_forked_child_takes_nothing_away_from_its_parent(store):
    program = """
import os, sys
from rmqstore.rocksdb.database import Database
database = Database(sys.argv[1])
pid = os.fork()
if not pid:
    code = 1
    try:
        code = int(len(list(database.items())) != 1403)
        database.close()
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
links = database._rdict.path()
assert os.path.isdir(links) and len(list(database.items())) == 1403
database.close()
assert not os.path.exists(links)
"""
    subprocess.run([sys.executable, "-c", program, store / "consumequeue"], check=True, timeout=240)


def test_a_flipped_bit_in_a_table_is_never_a_shorter_answer(tmp_path):
    folder = unpack("store", tmp_path) / "store" / "consumequeue"
    with Database(folder) as database:
        whole = {family: list(database.items(family=family)) for family in database.families}
    raised = 0
    for table in sorted(folder.glob("*.sst")):
        data = table.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 40)):
            table.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
            try:
                with Database(folder) as database:
                    assert {family: list(database.items(family=family)) for family in database.families} == whole
            except CorruptionError:
                raised += 1
        table.write_bytes(data)
    assert raised > 40


@pytest.mark.parametrize("below", ["kvStore", "config/topics"])
def test_a_damaged_log_is_told_and_a_torn_end_is_not(below, tmp_path):
    folder = unpack("store.killed", tmp_path) / "store" / below
    with Database(folder) as database:
        assert database.log_damage is None
        whole = {family: dict(database.items(family=family)) for family in database.families}
    (log,) = [path for path in sorted(folder.glob("*.log")) if path.stat().st_size][-1:]
    data = log.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 25)):
        log.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with Database(folder) as database, Database(folder, skip_damaged=True) as skipping:
            assert database.log_damage is not None and skipping.log_damage is not None
            for family in database.families:
                assert (
                    dict(database.items(family=family)).keys()
                    <= whole[family].keys() | dict(skipping.items(family=family)).keys()
                )
        log.write_bytes(data[:at])
        with Database(folder) as database:
            assert database.log_damage is None


# Each bit of every type in the logs of a database, and records of any type behind their end.
TYPES = """
import struct, sys
from pathlib import Path
from rmqstore.errors import CorruptionError
from rmqstore.rocksdb import database as module
module._PAUSE = 0
folder = Path(sys.argv[1])
def contents():
    with module.Database(folder) as database:
        return database.log_damage, {family: list(database.items(family=family)) for family in database.families}
damage, whole = contents()
assert damage is None
cases = told = 0
for path in sorted([*folder.glob("MANIFEST-*"), *folder.glob("*.log")]):
    data, pos, places = path.read_bytes(), 0, []
    while pos + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, pos)
        places.append(pos + 6)
        pos += 7 + length
    changed = [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in places for bit in range(8)]
    changed += [data + struct.pack("<IHB", 7, 5, kind) + b"abcde" for kind in range(1, 14)]
    for each in changed:
        path.write_bytes(each)
        cases += 1
        print(path.name, cases, flush=True)
        try:
            damage, found = contents()
            assert found == whole or damage is not None
            told += damage is not None
        except CorruptionError:
            told += 1
    path.write_bytes(data)
assert contents() == (None, whole)
print("cases", cases, "told", told)
"""


@pytest.mark.parametrize("below", ["config/consumerOffsets", "kvStore"])
def test_no_type_of_a_record_holds_a_reader_up_or_hides_anything(below, tmp_path):
    """RocksDB loops at a record that only marks its file as used again."""
    folder = unpack("store.killed", tmp_path) / "store" / below
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", TYPES, folder], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, (ran.stdout[-100:], ran.stderr)
    cases, told = map(int, ran.stdout.split()[-3::2])
    assert cases > 100 and told > cases // 2


# Ends without closing, so that the log stays; a thread of RocksDB's may be flushing then, as at any kill.
WRITE_AND_DIE = """
import os, sys
from rocksdict import Options, Rdict
options = Options(raw_mode=True)
options.set_recycle_log_file_num(2)
options.set_write_buffer_size(64 << 10)
database = Rdict(sys.argv[1], options)
for number in range(3000):
    database[b"%05d" % number] = bytes(100)
    if number % 500 == 0:
        database.flush()
os._exit(0)
"""


def test_a_log_that_is_used_again_is_read(tmp_path):
    folder = tmp_path / "database"
    subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(folder)], check=True, timeout=300)
    logs = [path for path in folder.glob("*.log") if path.stat().st_size]
    assert logs and any(path.read_bytes()[6] > 4 for path in logs)
    assert [wrong_types(path) for path in logs] == [[]] * len(logs)
    with Database(folder) as database:
        assert database.log_damage is None
        assert [key for key, _ in database.items()] == [b"%05d" % number for number in range(3000)]
