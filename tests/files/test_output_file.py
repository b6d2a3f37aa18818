"""Outputs: nothing that exists is opened, followed, emptied or replaced on the way, whoever put it there and whenever."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import golden
import golden_rabbitmq
import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig, StoreError
from rmqstore.cli import main
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.files import output_file
from rmqstore.files.output_file import OutputFile, OutputFolder, check_outside
from rmqstore.offline.export import ExportOptions, export
from rmqstore.rabbitmq import Vhost

VICTIM = b"precious"
SIZES = options_of(SMALL)
# Each command, and its output; {} is the folder of the output.
COMMANDS = {
    "export": ["export", "store", "-O", "{}/o.jsonl", *SIZES],
    "export csv.gz": ["export", "store", "-O", "{}/o.csv.gz", *SIZES],
    "export parquet": ["export", "store", "-O", "{}/o.parquet", *SIZES],
    "export files": ["export", "store", "-O", "{}/o", "--format", "files", *SIZES],
    "sql": ["sql", "store", "select topic from messages", "-O", "{}/o.csv", *SIZES],
    "sql parquet": ["sql", "store", "select topic from messages", "-O", "{}/o.parquet", *SIZES],
    "pending": ["pending", "store", "-O", "{}/o.csv", *SIZES],
    "metrics": ["metrics", "store", "-O", "{}/o.prom", *SIZES],
    "rabbitmq export": ["rabbitmq", "export", "vhost", "-O", "{}/o.jsonl"],
    "rabbitmq repair": ["rabbitmq", "repair", "vhost", "{}/o"],
    "rebuild": ["rebuild", "store", "-O", "{}", *SIZES],
    "import": ["import", "{}/o", "rows.jsonl"],
}
LIBRARIES = {"sql": "polars.io.plugins", "sql parquet": "polars.io.plugins", "metrics": "prometheus_client"}
opened: list[str] | None = None


def _hear(event, arguments):
    if opened is not None and event in ("open", "os.mkdir", "os.rename", "os.link", "os.symlink"):
        opened.extend(os.path.basename(each) for each in arguments if isinstance(each, str))


sys.addaudithook(_hear)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with a store, a vhost and rows to import."""
    folder = tmp_path_factory.mktemp("sources")
    with MessageStore.open(folder / "store", config=StoreConfig(**SMALL)) as store:
        store.put_messages([Message("T", b"x" * 100, keys=["k"], tags="a") for _ in range(30)])
    golden_rabbitmq.unpack("11-clean-small", folder).rename(folder / "vhost")
    (folder / "rows.jsonl").write_text('{"topic": "T", "body": "b"}\n')
    return folder


def run(sources, name, folder):
    before = os.getcwd()
    os.chdir(sources)
    try:
        return CliRunner().invoke(main, [word.replace("{}", str(folder)) for word in COMMANDS[name]])
    finally:
        os.chdir(before)


def names_of(sources, name, folder):
    # All that a run of the command opens, makes or renames, by the last part of its path.
    global opened
    folder.mkdir()
    opened = []
    try:
        run(sources, name, folder)
        names = set(opened)
    finally:
        opened = None
    return names | {each.name for each in folder.iterdir()}


@pytest.mark.parametrize("how", ["link", "hard link"])
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_that_exists_is_opened_or_replaced(sources, tmp_path, name, how):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    names = names_of(sources, name, tmp_path / "first")
    made = {path.name for path in (tmp_path / "first").iterdir()}
    names |= {f"{each}{ending}" for each in made for ending in (".part", ".new", ".unfinished", ".rmqstore-unfinished")}
    segment = tmp_path / "segment"
    segment.write_bytes(VICTIM)
    folder = tmp_path / "folder"
    folder.mkdir()
    for each in names - made - {"", ".", ".."}:
        (os.symlink if how == "link" else os.link)(segment, folder / each)
    planted = {each: os.lstat(folder / each).st_ino for each in os.listdir(folder)}
    assert made and planted
    before = golden.tree(sources)
    done = run(sources, name, folder)
    assert done.exit_code in (0, 1), done.output
    assert segment.read_bytes() == VICTIM and golden.tree(sources) == before
    # They are where they were, and the output is next to them.
    assert {each: os.lstat(folder / each).st_ino for each in planted} == planted
    assert set(os.listdir(folder)) == planted.keys() | made
    for each in made:
        assert not (folder / each).is_symlink()


@pytest.mark.parametrize("how", ["link", "hard link", "file"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_name_that_is_taken(sources, tmp_path, name, how):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    names_of(sources, name, tmp_path / "first")
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    victim.write_bytes(VICTIM)
    for made in (tmp_path / "first").iterdir():
        if how == "file":
            (folder / made.name).write_bytes(VICTIM)
        else:
            (os.symlink if how == "link" else os.link)(victim, folder / made.name)
    done = run(sources, name, folder)
    assert victim.read_bytes() == VICTIM
    if name == "metrics" and how != "link":
        # It replaces its file, and nothing else that has the same bytes.
        assert done.exit_code == 0 and os.stat(folder / "o.prom").st_nlink == 1
        return
    assert done.exit_code in (2, 3), done.output
    for made in folder.iterdir():
        assert made.read_bytes() == VICTIM and made.is_symlink() == (how == "link")


def test_each_writer_has_a_temporary_file_of_its_own(tmp_path):
    # A file with an old temporary name does not count as the remains of a killed writer.
    (tmp_path / "a.part").write_bytes(b"half a download")
    with pytest.raises(StoreError, match="the output exists"), OutputFile(tmp_path / "a") as late:
        late.write(b"complete after the other")
        with OutputFile(tmp_path / "a") as early:
            early.write(b"complete first")
    assert (tmp_path / "a").read_bytes() == b"complete first"
    with OutputFile(tmp_path / "a", force=True) as file:
        file.write(b"forced")
    assert (tmp_path / "a").read_bytes() == b"forced"
    assert (tmp_path / "a.part").read_bytes() == b"half a download"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.part"]
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(output_file.os, "link", refused)
    with OutputFile(tmp_path / "a") as file:
        file.write(b"whole")
    with pytest.raises(StoreError, match="the output exists"), OutputFile(tmp_path / "b") as file:
        (tmp_path / "b").write_bytes(b"mine")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"whole", "b": b"mine"}


@pytest.mark.parametrize("force", [False, True])
def test_a_temporary_file_that_is_swapped(tmp_path, force):
    victim = tmp_path / "victim"
    victim.write_bytes(VICTIM)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(StoreError, match="another process replaced"), OutputFile(folder / "a", force=force) as file:
        file.write(b"text")
        (part,) = folder.iterdir()
        part.unlink()
        part.symlink_to(victim)
    assert victim.read_bytes() == VICTIM and not os.path.lexists(folder / "a")


def test_a_temporary_folder_that_is_swapped(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.mkdir(), folder.mkdir()
    with pytest.raises(StoreError, match="another process replaced"), OutputFolder(folder / "a") as made:
        Path(made.part).rename(folder / "elsewhere")
        Path(made.part).symlink_to(victim)
        made.make_folder("bodies")
        with made.new_file("bodies/0") as file:
            file.write(b"text")
        with pytest.raises(FileExistsError):
            made.new_file("bodies/0")
    assert [*victim.iterdir()] == [] and not os.path.lexists(folder / "a")


def test_a_folder_that_is_swapped_for_the_store(sources, tmp_path):
    store, folder = sources / "store", tmp_path / "folder"
    before = golden.tree(store)
    folder.mkdir()
    made = OutputFile(folder / "a", outside=[store])
    with made as file:
        file.write(b"text")
        folder.rename(tmp_path / "moved")
        folder.symlink_to(store / "commitlog")
    # It is in the directory that was opened, by whatever name.
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["a"]
    folder.unlink()
    folder.mkdir()
    for kind in (OutputFile, OutputFolder):
        made = kind(folder / "b", outside=[store])
        folder.rmdir()
        folder.symlink_to(store / "commitlog")
        with pytest.raises(StoreError, match="is in the store"), made:
            pass
        folder.unlink()
        folder.mkdir()
    assert golden.tree(store) == before


def test_paths_into_a_store(sources, tmp_path):
    store = sources / "store"
    (tmp_path / "link").symlink_to(store / "commitlog")
    (tmp_path / "to").symlink_to("link/../../store")
    for output in (store, store / "a", tmp_path / "link" / "a", tmp_path / "to" / "a", tmp_path / "to" / "index" / "a"):
        for kind in (OutputFile, OutputFolder):
            with pytest.raises(StoreError, match="is in the store"):
                kind(output, outside=[tmp_path / "other", store])
    check_outside(tmp_path / "a", store)
    (tmp_path / "tiered").mkdir()
    with pytest.raises(StoreError, match="is in the store"):
        export(
            store,
            tmp_path / "tiered" / "a.jsonl",
            options=ExportOptions(tiered=tmp_path / "tiered", config=StoreConfig(**SMALL)),
        )


def test_a_device_that_becomes_a_file(tmp_path):
    os.mkfifo(tmp_path / "a")
    made = OutputFile(tmp_path / "a")
    os.unlink(tmp_path / "a")
    (tmp_path / "a").write_bytes(VICTIM)
    with pytest.raises(StoreError, match="the output exists"), made:
        pass
    assert (tmp_path / "a").read_bytes() == VICTIM


def test_an_output_by_the_name_of_a_descriptor(tmp_path):
    # As -O /dev/stdout with a pipe: it has no path of its own.
    reader, writer = os.pipe()
    with OutputFile(f"/dev/fd/{writer}") as file:
        file.write(b"text")
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"text"


def test_a_long_name(tmp_path):
    for name in ("x" * 255, "取消" * 42):
        with OutputFile(tmp_path / name) as file:
            file.write(b"text")
        assert (tmp_path / name).read_bytes() == b"text"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name.split()[0] in ("export", "sql", "pending", "metrics")]
)
def test_a_full_disk_ends_every_command_the_same_way(sources, tmp_path, name):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    output = COMMANDS[name][COMMANDS[name].index("-O") + 1]
    if name == "export files":
        pytest.skip("a folder is no device")
    os.symlink("/dev/full", output.replace("{}", str(tmp_path)))
    done = run(sources, name, tmp_path)
    assert done.exit_code == 3, done.output
    if name != "metrics":
        assert "Error: No space left on device" in done.stderr and "Usage" not in done.stderr


@pytest.mark.parametrize("name", ["export", "sql", "pending", "metrics", "rabbitmq export", "rebuild"])
def test_no_memory_is_one_line(sources, tmp_path, name, monkeypatch):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])

    def taken(*arguments, **options):
        raise MemoryError

    for kind, method in ((MessageStore, "open"), (Vhost, "open"), (CommitLog, "load")):
        monkeypatch.setattr(kind, method, taken)
    done = run(sources, name, tmp_path)
    assert done.exit_code == 3 and done.stderr.startswith("Error: out of memory\n"), done.output
    assert [*tmp_path.iterdir()] == []
