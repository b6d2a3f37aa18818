"""Rules for every command on every kind of store, wherever it is damaged.

A command ends with an exit code of the table and without a traceback; reading changes no byte; what `verify` calls clean
is read whole; `verify` blames no file that has nothing to do with the one that was damaged.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import golden
import golden_rabbitmq
import oracle
import pytest
import rocksdb_stores
import tiered_oracle
from test_cli import run


class Made(NamedTuple):
    """A kind of store: its root, the options that its commands need, and what stands in for the name of a topic."""

    root: Path
    options: tuple[str, ...] = ()
    topic: str = "Orders"


def _plain(name: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        geometry = tuple(f"-o{option}={value}" for option, value in golden.geometry(name).items())
        return Made(golden.unpack(name, folder), geometry, "TopicTest" if name in golden.JAVA_STORES else "Orders")

    return make


def _tiered(folder: Path) -> Made:
    made = tiered_oracle.unpack("store", folder)
    return Made(made / "store", ("--tiered", str(made / "tiered")))


KINDS: dict[str, Callable[[Path], Made]] = {
    **{name: _plain(name) for name in ("base", "ext", "compaction", "propcrc", "broker.killed", "4.9.7", "5.3.3")},
    "rocksdb": lambda folder: Made(rocksdb_stores.unpack("store", folder)),
    "rocksdb batch": lambda folder: Made(rocksdb_stores.unpack("batch", folder)),
    "tiered": _tiered,
}
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("info",), ("topics",), ("topics", "TOPIC"), ("queues",), ("verify",), ("dump",), ("dump", "--what", "index"),
    ("dump", "--what", "queue", "--topic", "TOPIC"), ("get", "TOPIC", "0"), ("query", "TOPIC", "key"),
    ("query", "--phy-offset", "0"), ("tail",), ("offsets", "show"), ("pending",), ("settings",), ("metrics",),
    ("sql", "select count(*) from messages"), ("export", "-O", "OUTPUT"),
)  # fmt: skip
#: Commands that know nothing of a store's geometry, or of tiered storage.
WITHOUT_OPTIONS = {"settings", "metrics"}
WITHOUT_TIERED = {"topics", "queues", "dump", "tail", "offsets", "pending", "sql", "settings", "metrics"}
RABBITMQ = ("02-kill9-segment-plus-journal", "03-kill9-consumer-unacked", "12-clean-msgstore", "19-clean-v2")
RABBITMQ_COMMANDS = ("info", "queues", "verify", "dump", "export -O OUTPUT")


def damage(path: Path, dice: random.Random) -> str:
    """Damage a file in one of the ways that disks, kills and people have; says which."""
    content = path.read_bytes()
    used = len(content.rstrip(b"\0")) or 1
    how = dice.choice(("flip", "zeros", "other bytes", "cut", "longer", "gone", "a folder"))
    at = dice.randrange(used)
    if how == "flip":
        content = content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]
    elif how == "zeros":
        content = content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :]
    elif how == "other bytes":
        other = dice.randbytes(min(dice.choice((1, 4, 64)), len(content) - at))
        content = content[:at] + other + content[at + len(other) :]
    elif how == "cut":
        content = content[:at]
    elif how == "longer":
        content += dice.randbytes(dice.choice((1, 20, 4096)))
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(content)
    return f"{how} at {at}"


def restore(path: Path, content: bytes) -> None:
    """Put a file back as it was."""
    if path.is_dir():
        path.rmdir()
    path.write_bytes(content)


def files_below(root: Path) -> list[Path]:
    """The files that hold something."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size and path.name != "lock")


def state(root: Path) -> dict[str, bytes]:
    """The bytes of all files, and the folders."""
    return oracle.read_files(root) | {str(path): b"" for path in root.rglob("*") if path.is_dir()}


def bodies(output: Path) -> list[tuple[Any, ...]]:
    """What an export wrote, as far as a check sum protects it."""
    if not output.exists():
        return []
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return sorted((row.get("phy_offset", row.get("seq_id")), row["body"]) for row in rows)


def check(root: Path, commands: list[list[str]], output: Path, whole: list[tuple[Any, ...]] | None, what: str) -> bool:
    """Run the commands: whether `verify` found nothing."""
    before, codes = state(root), {}
    output.unlink(missing_ok=True)
    for command in commands:
        result = run(*command)
        assert result.exit_code in (0, 1, 3), (what, command, result.output)
        assert "Traceback" not in result.output, (what, command)
        codes[command[command[0] == "rabbitmq"]] = result.exit_code
    assert state(root) == before, f"{what}: reading changed something"
    if codes["verify"] == 0 and whole is not None:
        assert codes["export"] == 0 and bodies(output) == whole, f"{what}: verify found nothing, and not all is read"
    return codes["verify"] == 0


def commands_of(made: Made, output: Path) -> list[list[str]]:
    """The commands with their arguments."""
    made_of = []
    for name, *arguments in COMMANDS:
        options = (
            []
            if name in WITHOUT_OPTIONS or (made.options[:1] == ("--tiered",) and name in WITHOUT_TIERED)
            else made.options
        )
        words = {"TOPIC": made.topic, "OUTPUT": str(output)}
        verb = [arguments.pop(0)] if name == "offsets" else []
        made_of.append([name, *verb, str(made.root), *(words.get(word, word) for word in arguments), *options])
    return made_of


@pytest.mark.parametrize("name", KINDS)
def test_every_command_on_a_damaged_store_ends_in_order(tmp_path, name):
    made = KINDS[name](tmp_path / "given")
    output = tmp_path / "exported.jsonl"
    commands = commands_of(made, output)
    healthy = check(made.root, commands, output, None, "healthy")
    whole = bodies(output)
    assert whole, "the export of a healthy store"
    dice = random.Random(name)
    roots = [made.root, *([Path(made.options[1])] if made.options[:1] == ("--tiered",) else [])]
    for _ in range(3):
        root = dice.choice(roots)
        # A kind of file as often as another, however many there are of each.
        folder = dice.choice(sorted({path.relative_to(root).parts[0] for path in files_below(root)}))
        path = dice.choice([each for each in files_below(root) if each.relative_to(root).parts[0] == folder])
        content = path.read_bytes()
        how = f"{name}, {path.relative_to(root)}: {damage(path, dice)}"
        check(made.root, commands, output, whole if healthy else None, how)
        restore(path, content)


@pytest.mark.parametrize("name", RABBITMQ)
def test_every_command_on_a_damaged_vhost_ends_in_order(tmp_path, name):
    root = golden_rabbitmq.unpack(name, tmp_path / "given")
    output = tmp_path / "exported.jsonl"
    commands = [
        ["rabbitmq", verb, str(root), *(str(output) if word == "OUTPUT" else word for word in more)]
        for verb, *more in map(str.split, RABBITMQ_COMMANDS)
    ]
    check(root, commands, output, None, "healthy")
    whole = bodies(output)
    dice = random.Random(name)
    for _ in range(6):
        path = dice.choice(files_below(root))
        content = path.read_bytes()
        how = f"{name}, {path.relative_to(root)}: {damage(path, dice)}"
        # A journal has no check sums, and a queue may have none: what is missing of it leaves no trace.
        check(root, commands, output, None if path.name == "journal.jif" else whole, how)
        restore(path, content)


#: Parts of a store, and the parts that a finding may name when one of its files is damaged: what refers to it is not blamed.
OWN = {
    "index": {"index"}, "consumequeue": {"consumequeue"}, "consumequeue_ext": {"consumequeue_ext", "consumequeue"},
    "checkpoint": {"checkpoint"}, "config": {"config"},
}  # fmt: skip


@pytest.mark.parametrize("name", ["base", "ext", "broker.killed", "5.3.3"])
def test_verify_blames_no_healthy_file(tmp_path, name):
    made = KINDS[name](tmp_path / "given")

    def blamed() -> set[tuple[str, str]]:
        result = run("verify", made.root, *made.options, "--json")
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        return {(os.path.relpath(line["path"], made.root), line["kind"]) for line in lines if "kind" in line}

    healthy = blamed()
    dice = random.Random(name)
    folders = [folder for folder in OWN if (made.root / folder).exists()]
    for folder in folders * 3:
        top = made.root / folder
        path = dice.choice(files_below(top)) if top.is_dir() else top
        content = path.read_bytes()
        how = damage(path, dice)
        found = {path for path, _ in blamed() - healthy}
        assert {each.split(os.sep)[0] for each in found} <= OWN[folder], (path, how, found)
        restore(path, content)


def test_a_store_that_anything_can_be_read_of_is_opened(tmp_path):
    # One file of each folder is left, and the folder of the log.
    made = KINDS["base"](tmp_path / "given")
    for folder in ("index", "consumequeue", "checkpoint", "config"):
        path = made.root / folder
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        assert run("dump", made.root, *made.options).exit_code in (0, 1)
        assert "messages" in run("info", made.root, *made.options).output
