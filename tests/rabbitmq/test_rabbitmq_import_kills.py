"""Imports and repairs that are killed at every step: what a node finds then, and what a second attempt does.

Owns the film of a vhost's directory: a picture before every call that changes something in it.  A picture may have nothing that
a node would hang, hide, crash or drop messages on, and by the oracle it holds every message that was there before, in order,
and a beginning of the imported ones.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import classic_queue_oracle as oracle
import golden
import pytest
from scratch import SCRATCH

from rmqstore.rabbitmq import Consequence, Message, Vhost, import_messages, importing, repair, verify

PERSISTENT = {"delivery_mode": 2}
SMALL = [Message(b"small %d" % i, properties=PERSISTENT, routing_keys=["k"]) for i in range(5)]
LARGE = [Message(b"%05d" % i * 900, properties=PERSISTENT, routing_keys=["k"]) for i in range(5)]
MESSAGES = {"embedded": SMALL, "stored": LARGE, "both": [one for pair in zip(SMALL, LARGE) for one in pair]}
GRAVE = {Consequence.HANGS, Consequence.HIDES, Consequence.CRASHES, Consequence.DROPS}
CASES = ("11-clean-small", "12-clean-msgstore", "13-clean-fanout-refcount")


@pytest.fixture
def tmp_path():
    """In memory where there is such a folder: forcing a disk is most of what an import does, and no disk dies here."""
    path = Path(tempfile.mkdtemp(prefix="rmqstore-film-", dir=SCRATCH))
    yield path
    shutil.rmtree(path)


def tree(path: Path) -> dict[str, bytes | None]:
    """All files with their bytes, and the directories, below `path`; nothing where it is missing."""
    found: dict[str, bytes | None] = {}
    for folder, _, files in os.walk(path):
        found[os.path.relpath(folder, path)] = None
        for name in files:
            file = os.path.join(folder, name)
            found[os.path.relpath(file, path)] = Path(file).read_bytes()
    return found


def plant(files: dict[str, bytes | None], path: Path) -> None:
    for name, data in files.items():
        if data is None:
            (path / name).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if data is not None:
            (path / name).write_bytes(data)


class Film:
    """Pictures of a directory before every call that changes something in it, and at the end; each one only once."""

    CALLS = (
        "write", "pwrite", "fsync", "ftruncate", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "open", "sendfile",
        "copy_file_range",
    )  # fmt: skip

    def __init__(self, path: Path, stop: int | None = None):
        self.path = path
        self.stop = stop
        self.calls = 0
        self.pictures: list[tuple[str, dict[str, bytes | None]]] = []
        self.real = {name: getattr(os, name) for name in self.CALLS if hasattr(os, name)}
        self.real_open = builtins.open

    def before(self, label: str) -> None:
        self.calls += 1
        if self.stop is not None:
            if self.calls == self.stop:
                raise Killed(label)
            return
        files = tree_of(self, self.path)
        if not self.pictures or self.pictures[-1][1] != files:
            self.pictures.append((label, files))

    def call(self, name, *args, **kwargs):
        if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self.before(f"{self.calls}: {name} {args[0] if isinstance(args[0], (str, os.PathLike)) else ''}")
        return self.real[name](*args, **kwargs)

    def open(self, file, mode="r", *args, **kwargs):
        if set(mode) & set("wax+"):
            self.before(f"{self.calls}: opening {file}")
        return self.real_open(file, mode, *args, **kwargs)

    def __enter__(self) -> Film:
        for name in self.real:
            setattr(os, name, lambda *args, _name=name, **kwargs: self.call(_name, *args, **kwargs))
        builtins.open = self.open
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(os, name, function)
        builtins.open = self.real_open
        self.stop = None
        self.before("end")


def tree_of(film: Film, path: Path) -> dict[str, bytes | None]:
    # Pictures are taken with the real functions, so that they do not show up as calls.
    patched, builtins.open = builtins.open, film.real_open
    try:
        return tree(path)
    finally:
        builtins.open = patched


class Killed(BaseException):
    """Stands for the death of the process: whatever catches errors must not be needed."""


def check_picture(path: Path, before: oracle.Vhost, directory: str, imported: list[Message], label: str) -> int:
    """int: how many of the imported messages there are; fails if anything is worse than before."""
    found = [finding for finding in verify(path) if finding.consequence in GRAVE]
    assert not found, (label, found)
    after = oracle.read_vhost(path)
    assert not after.crashes, (label, [queue.crashes for queue in after.queues.values()])
    number = 0
    for name in {**before.queues, **after.queues}:
        old = [(entry.seq, entry.term) for entry in before.queues[name].entries] if name in before.queues else []
        queue = after.queues.get(name)
        new = [(entry.seq, entry.term) for entry in queue.entries] if queue is not None else []
        assert new[: len(old)] == old, (label, name)
        more = new[len(old) :]
        if name != directory:
            assert not more, (label, name)
            continue
        assert [oracle.message_of(oracle.decode(term)).body for _, term in more] == [
            message.body for message in imported[: len(more)]
        ], label
        number = len(more)
    return number


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("state", ["exact", "dirty"])
@pytest.mark.parametrize("case", CASES)
def test_an_import_dies_at_every_step(case, state, kind, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy(case)
    before = oracle.read_vhost(path)
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0]
        into, directory = queue.name, queue.directories[0].name
    with Film(path) as film:
        report = import_messages(path, into, MESSAGES[kind], state=state, declared=True)
    assert report.state == state
    assert film.calls > 5
    counts = []
    for number, (label, files) in enumerate(film.pictures):
        again = tmp_path / f"picture-{number}"
        plant(files, again)
        counts.append(check_picture(again, before, directory, MESSAGES[kind], label))
        shutil.rmtree(again)
    assert counts[0] == 0 and counts[-1] == len(MESSAGES[kind]) and counts == sorted(counts)
    # The flags of those that were there stay.
    if state == "exact":
        old, new = before.queues[directory], oracle.read_vhost(path).queues[directory]
        assert [one.redelivered for one in new.entries] == [one.redelivered for one in old.entries] + [False] * counts[
            -1
        ]


@pytest.mark.parametrize("made", [False, True], ids=["there", "made"])
@pytest.mark.parametrize("case", CASES)
def test_an_import_after_a_death_goes_on(case, made, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy(case)
    messages = MESSAGES["both"]
    before = oracle.read_vhost(path)
    with Vhost.open(path) as vhost:
        into = "of a directory that is made" if made else vhost.queues()[0].name
    again = tmp_path / "filmed"
    shutil.copytree(path, again)
    state = "dirty" if made else "exact"
    with Film(again) as film:
        directory = import_messages(again, into, messages, state=state, declared=True).directory
    shutil.rmtree(again)
    for label, files in film.pictures:
        plant(files, again)
        there = check_picture(again, before, directory, messages, label)
        import_messages(again, into, messages, state="dirty", declared=True)
        new = list(oracle.read_vhost(again).queues[directory].entries)
        old = len(before.queues[directory].entries) if directory in before.queues else 0
        bodies = [message.body for message in messages]
        assert [entry.message.body for entry in new[old:]] == bodies[:there] + bodies, label
        assert not [finding for finding in verify(again) if finding.consequence in GRAVE], label
        with Vhost.open(again) as vhost:
            assert vhost.queue(into).directories[0].name == directory
        shutil.rmtree(again)


def test_an_import_of_many_flushes_on_its_way(golden_vhost_copy, tmp_path, monkeypatch):
    # Small batches, so that there are several, and an index that flushes by itself.
    monkeypatch.setattr(importing, "BATCH_ROWS", 3)
    opened = importing.QueueIndex.open
    monkeypatch.setattr(
        importing.QueueIndex, "open", lambda *args, **kwargs: opened(*args, **kwargs, max_journal_entries=4)
    )
    path = golden_vhost_copy("12-clean-msgstore")
    before = oracle.read_vhost(path)
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0]
        into, directory = queue.name, queue.directories[0].name
    with Film(path) as film:
        import_messages(path, into, MESSAGES["both"], declared=True)
    counts = []
    for number, (label, files) in enumerate(film.pictures):
        again = tmp_path / f"picture-{number}"
        plant(files, again)
        counts.append(check_picture(again, before, directory, MESSAGES["both"], label))
    assert counts == sorted(counts) and len(set(counts)) > 2


@pytest.mark.parametrize("case", ["11-clean-small", "13-clean-fanout-refcount"])
@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
def test_a_repair_dies_at_every_step(case, damaged, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy(case)
    if damaged:
        segment = next(iter(sorted((path / "queues").rglob("*.idx"))), None) or next((path / "queues").rglob("*.jif"))
        segment.write_bytes(segment.read_bytes() + b"\x80\x05rubbish")
        (path / "msg_store_persistent" / "0.rdq").open("ab").write(b"\0" * 7 + b"\x99 torn")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    source = golden.tree(path)
    with Film(outputs) as film:
        first = repair(path, outputs / "new")
    good = tree(outputs / "new")
    assert golden.tree(path) == source
    assert len(film.pictures) > 5
    shutil.rmtree(outputs)
    for label, files in film.pictures[:-1]:
        plant(files, outputs)
        if (outputs / "new").exists():
            # It has its name only when all is there.
            assert tree(outputs / "new") == good, label
        else:
            second = repair(path, outputs / "new")
            assert second.queues == first.queues
            # The file of the first run has a unique name, so that no other run uses it.
            assert sum(name == "new" or name.endswith(".part") for name in os.listdir(outputs)) == len(os.listdir(outputs)) <= 2
            assert [name for name in tree(outputs / "new")] and not [
                finding for finding in verify(outputs / "new") if finding.consequence in GRAVE
            ], label
        shutil.rmtree(outputs)


def test_a_repair_that_fails_leaves_nothing(golden_vhost, tmp_path):
    path = golden_vhost("13-clean-fanout-refcount")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    with Film(outputs) as film:
        repair(path, outputs / "new")
    shutil.rmtree(outputs / "new")
    for stop in range(1, film.calls):
        with contextlib.suppress(Killed), Film(outputs, stop=stop):
            repair(path, outputs / "new")
        assert set(os.listdir(outputs)) <= {"new"}, stop
        if (outputs / "new").exists():
            shutil.rmtree(outputs / "new")


def test_who_lists_a_folder_is_no_node(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for what, seen in ((".", False), ("file", True)):
        program = f"import os, sys\nos.open({os.fspath(tmp_path / what)!r}, os.O_RDONLY)\nprint(flush=True)\nsys.stdin.read()"
        with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as other:
            assert other.stdout.readline()
            assert importing.node_process(tmp_path) == (other.pid if seen else None)
