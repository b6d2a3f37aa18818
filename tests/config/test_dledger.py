"""A store of DLedger mode: its log is named and not read, and nothing is written next to it."""

from __future__ import annotations

import os
import shutil

import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig, UnsupportedFormatError, rebuild, verify
from rmqstore.cli import main

SIZES = options_of(SMALL)
COMMANDS = ["info", "verify", "topics", "tail", "dump", "export", "recover", "rebuild"]


@pytest.fixture
def mixed(tmp_path):
    """A store whose broker went on with DLedger; without its commitlog folder one that began with it."""
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        opened.put_messages([Message("T", b"%d" % number, keys=[f"K{number}"]) for number in range(5)])
    for part in ("data", "index"):
        (path / "dledger-n0" / part).mkdir(parents=True)
        (path / "dledger-n0" / part / f"{0:020d}").write_bytes(bytes(4096))
    (path / "config").mkdir(exist_ok=True)
    (path / "config" / "topics.json").write_text('{"topicConfigTable":{"T":{"topicName":"T"}}}')
    return path


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def tree(path):
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("only", [True, False])
def test_a_store_that_has_only_dledger_is_not_said_to_be_none(mixed, command, only):
    for name in os.listdir(mixed):
        if name == "commitlog" or (only and name not in ("dledger-n0", "config")):
            shutil.rmtree(mixed / name) if (mixed / name).is_dir() else (mixed / name).unlink()
    before = tree(mixed)
    for more in ([], SIZES):
        done = run(command, mixed, *more)
        # verify reports it like every other problem.
        assert done.exit_code == 3 or (command == "verify" and done.exit_code == 1), done.output
        assert f"{mixed / 'dledger-n0'}" in done.output and "DLedger's" in done.output
    done = run("settings", mixed)
    assert done.exit_code == 0 and "T" in done.stdout
    assert tree(mixed) == before


def test_what_lies_in_front_of_dledger_is_read(mixed, caplog):
    with MessageStore.open(mixed, read_only=True) as store:
        assert [message.body for message in store.get_message("T").messages] == [b"0", b"1", b"2", b"3", b"4"]
        assert f"from phy offset {store.commit_log.max_offset} on the commit log is DLedger's" in caplog.text
    findings = list(verify(mixed, StoreConfig(**SMALL)))
    assert [finding.kind for finding in findings] == ["not_checked"] and "DLedger" in findings[0].detail


def test_nothing_is_written_beside_dledger(mixed, tmp_path):
    before = tree(mixed)
    for config in (None, StoreConfig(**SMALL)):
        with pytest.raises(UnsupportedFormatError, match="DLedger's"):
            MessageStore.open(mixed, config=config)
        with pytest.raises(UnsupportedFormatError, match="DLedger's"):
            rebuild(mixed, config=config)
    (tmp_path / "rows.jsonl").write_text('{"topic":"T"}\n')
    done = run("import", mixed, tmp_path / "rows.jsonl", *SIZES)
    assert done.exit_code == 3 and "DLedger's" in done.stderr
    assert tree(mixed) == before


def test_a_folder_of_that_name_that_holds_nothing_stops_nobody(mixed):
    shutil.rmtree(mixed / "dledger-n0" / "data")
    os.remove(mixed / "dledger-n0" / "index" / f"{0:020d}")
    assert list(verify(mixed, StoreConfig(**SMALL))) == []
    with MessageStore.open(mixed) as store:
        store.put_message(Message("T", b"5"))
