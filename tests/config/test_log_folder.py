"""A broker.conf that places the log in another folder: refused by the option's name, in every command and call."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of, tree_bytes

from rmqstore import Message, MessageStore, StoreConfig, UnsupportedFormatError, rebuild, verify
from rmqstore.cli import main

OPTIONS = ("storePathCommitLog", "readOnlyCommitLogStorePaths", "storePathDLedgerCommitLog")


@pytest.fixture
def moved(tmp_path):
    """A store whose log is in a folder of its own; `commitlog` of the store has the older half of it."""
    root = tmp_path / "store"
    with MessageStore.open(root, config=StoreConfig(**SMALL)) as store:
        store.put_messages([Message("T", bytes(400), keys=[f"K{number}"]) for number in range(40)])
    os.rename(root / "commitlog", tmp_path / "log")
    (root / "commitlog").mkdir()
    first = min(os.listdir(tmp_path / "log"))
    (root / "commitlog" / first).write_bytes((tmp_path / "log" / first).read_bytes())
    return root


def config(**options):
    return StoreConfig.from_properties(options, **SMALL)


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.mark.parametrize("option", OPTIONS)
def test_another_folder_is_refused_by_name(moved, tmp_path, option):
    before = tree_bytes(tmp_path)
    elsewhere = config(**{option: str(tmp_path / "log")})
    for ask in (
        lambda: MessageStore.open(moved, config=elsewhere, read_only=True),
        lambda: MessageStore.open(moved, config=elsewhere),
        lambda: MessageStore.open(tmp_path / "new", config=elsewhere),
        lambda: rebuild(moved, config=elsewhere),
        lambda: list(verify(moved, elsewhere)),
        lambda: StoreConfig.infer(moved, unknown=elsewhere.unknown),
    ):
        with pytest.raises(UnsupportedFormatError, match=option) as caught:
            ask()
        assert caught.value.path == str(tmp_path / "log")
    assert tree_bytes(tmp_path) == before


@pytest.mark.parametrize(
    "command",
    [["info"], ["verify"], ["query", "T", "K1"], ["get", "T", "0"], ["export"], ["recover"], ["rebuild", "--yes"]],
)
def test_every_command_refuses_it(moved, tmp_path, command):
    before = tree_bytes(moved)
    conf = tmp_path / "broker.conf"
    conf.write_text(f"storePathRootDir={moved}\nstorePathCommitLog={tmp_path / 'log'},{tmp_path / 'log2'}\n")
    done = run(command[0], moved, *command[1:], "--config", conf, *options_of(SMALL))
    assert done.exit_code == 3 and "storePathCommitLog" in done.stderr and str(tmp_path / "log") in done.stderr
    assert tree_bytes(moved) == before


def test_the_stores_own_folder_is_fine_under_any_name(moved, tmp_path):
    os.rename(moved, tmp_path / "moved")
    os.symlink(tmp_path / "moved", moved)
    fine = [
        {"storePathCommitLog": f"{moved}/commitlog"},
        {"storePathCommitLog": f"{moved}/./commitlog/,"},
        {"storePathCommitLog": str(tmp_path / "moved" / "commitlog")},
        # A copy of a store, with the broker.conf of where it was.
        {"storePathRootDir": "/data/store", "storePathCommitLog": "/data/store/commitlog"},
        {"storePathRootDir": "/data/store", "storePathDLedgerCommitLog": "/data/store/dledger-n0"},
        {"enableDLegerCommitLog": "false", "storePathDLedgerCommitLog": "/elsewhere"},
    ]
    for options in fine:
        with MessageStore.open(moved, config=config(**options), read_only=True) as store:
            assert len(store.commit_log.files) == 1
    (moved / "commitlog" / f"{0:020d}").unlink()
    (moved / "commitlog").rmdir()
    os.symlink(tmp_path / "log", moved / "commitlog")
    with MessageStore.open(moved, config=config(storePathCommitLog=str(tmp_path / "log")), read_only=True) as store:
        assert store.query_message("T", "K39").messages
