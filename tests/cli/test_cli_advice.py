"""What `verify` advises can be done: the advice about every kind of finding is followed on a store of its own.

A case damages a copy of a small store.  Then every command of the advice runs, and ends as one that worked; what it asks of a
person is done (a file moved away, a file from the backup).  After that the finding is gone, or the advice said that nothing
repairs it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.commitlog.log_walk import DAMAGE_KINDS

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [*options_of(SMALL), "-o", "index_tags=true", "-o", "message_delay_level=1s 5s"]
HONEST = "nothing repairs"
# What a kind is called where it is no constant of the call.
_CALLS = ("Finding", "finding_of", "_tell", "_Run")


class Whole(NamedTuple):
    """A store that is whole, to be copied, and the places of its records in the log."""

    root: Path
    places: list[int]


def run(*args: object):
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "1000"})


def _store(path: Path, **more: object) -> Whole:
    with MessageStore.open(path, config=StoreConfig(**SMALL, **more)) as store:
        puts = [
            store.put_message(Message("T", b"body %d" % n + bytes(250), keys=[f"K{n}"], tags="A"), n % 2)
            for n in range(60)
        ]
    return Whole(path, [put.phy_offset for put in puts])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Whole:
    return _store(tmp_path_factory.mktemp("plain") / "store")


@pytest.fixture(scope="module")
def with_crcs(tmp_path_factory) -> Whole:
    return _store(tmp_path_factory.mktemp("crcs") / "store", enabled_append_prop_crc=True)


# ---------------------------------------------------------------------------------------------------------- damage


def change(path: Path, pos: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(pos)
        file.write(data)


def segment(root: Path, phy_offset: int) -> tuple[Path, int]:
    return root / "commitlog" / f"{phy_offset - phy_offset % 4096:020d}", phy_offset % 4096


def spoil(pos: int, data: bytes, record: int = 5) -> Callable[[Path, Whole], None]:
    def damage(root: Path, base: Whole) -> None:
        path, at = segment(root, base.places[record])
        change(path, at + pos, data)

    return damage


def in_first(pattern: str, pos: int, data: bytes) -> Callable[[Path, Whole], None]:
    def damage(root: Path, base: Whole) -> None:
        change(min(root.glob(pattern)), pos, data)

    return damage


def written(name: str, text: str) -> Callable[[Path, Whole], None]:
    def damage(root: Path, base: Whole) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)

    return damage


def without(pattern: str, which: int = 0) -> Callable[[Path, Whole], None]:
    def damage(root: Path, base: Whole) -> None:
        path = sorted(root.glob(pattern))[which]
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def blank_of_first(root: Path) -> tuple[Path, int]:
    path = root / "commitlog" / f"{0:020d}"
    return path, path.read_bytes().index(struct.pack(">I", 0xCBD43194)) - 4


def bad_blank(root: Path, base: Whole) -> None:
    change(*blank_of_first(root), struct.pack(">i", 1 << 20))


def missing_blank(root: Path, base: Whole) -> None:
    path, at = blank_of_first(root)
    change(path, at, bytes(8))


def stale_tail(root: Path, base: Whole) -> None:
    path, at = segment(root, base.places[-1])
    size = struct.unpack(">i", path.read_bytes()[at : at + 4])[0]
    change(path, at + size + 20, b"stale")


def bad_property(root: Path, base: Whole) -> None:
    path, at = segment(root, base.places[5])
    change(path, path.read_bytes().index(b"KEYS\x01K5", at), b"KEYS\x01J5")


def missing_prop_crc(root: Path, base: Whole) -> None:
    path, at = segment(root, base.places[5])
    data = path.read_bytes()
    change(path, data.index(b"__CRC32#", at), b"__CRC33#")


def inner_batch(root: Path, base: Whole) -> None:
    path, at = segment(root, base.places[5])
    change(path, at + 36, struct.pack(">i", 0x80))


def further_queue(root: Path, base: Whole) -> None:
    config = StoreConfig(**SMALL, enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(root, config=config) as store:
        names = {"INNER_MULTI_DISPATCH": "%LMQ%x,%LMQ%y"}
        store.put_message(Message("T", b"more", properties=names))
        store.put_message(Message("T", b"more", properties=names))
    path = max((root / "commitlog").iterdir())
    # A number that follows no other.
    change(path, path.read_bytes().index(b"INNER_MULTI_QUEUE_OFFSET\x011,1") + 25, b"9")


def interrupted(root: Path, base: Whole) -> None:
    work = root / ".rmqstore-rebuild"
    shutil.copytree(root / "index", work / "index")
    (work / "complete").write_text("index")


class Case(NamedTuple):
    """How a store is damaged, which store, and what the kind of finding is where the name of the case says more.

    Without `told` the first verify is not told the geometry.
    """

    damage: Callable[[Path, Whole], None]
    crcs: bool = False
    kind: str = ""
    options: tuple[str, ...] = ()
    told: bool = True


QUEUE = "consumequeue/T/0/*"
CASES: dict[str, Case] = {
    "interrupted_rebuild": Case(interrupted),
    "geometry": Case(without("commitlog"), told=False),
    "file: stray segment": Case(written("commitlog/notes.txt", "mine"), kind="file"),
    "file: short segment": Case(lambda root, base: os.truncate(min((root / "commitlog").iterdir()), 999), kind="file"),
    "file: short queue": Case(lambda root, base: os.truncate(min(root.glob(QUEUE)), 333), kind="file"),
    "file: short index": Case(lambda root, base: os.truncate(min(root.glob("index/*")), 333), kind="file"),
    "missing_segment: middle": Case(without("commitlog/*", 2), kind="missing_segment"),
    "missing_segment: newest": Case(without("commitlog/*", -1), kind="missing_segment"),
    "bad_magic": Case(spoil(4, b"XXXX")),
    "bad_size": Case(spoil(0, struct.pack(">i", -7))),
    "bad_length": Case(spoil(84, struct.pack(">i", 1 << 20))),
    "bad_phy_offset": Case(spoil(28, struct.pack(">q", 77))),
    "bad_body": Case(spoil(36, struct.pack(">i", 1))),
    "bad_body_crc": Case(spoil(90, b"!!")),
    "bad_prop_crc": Case(bad_property, crcs=True),
    "bad_blank": Case(bad_blank),
    "missing_blank": Case(missing_blank),
    "stale_tail": Case(stale_tail),
    "missing_prop_crc": Case(missing_prop_crc, crcs=True),
    "bad_inner_batch": Case(inner_batch),
    "bad_multi_dispatch": Case(further_queue, options=("-o", "enable_lmq=true", "-o", "enable_multi_dispatch=true")),
    "bad_checkpoint": Case(in_first("checkpoint", 0, struct.pack(">q", 2**60))),
    "bad_checkpoint: short": Case(lambda root, base: os.truncate(root / "checkpoint", 99), kind="bad_checkpoint"),
    "missing_unit": Case(without("consumequeue/T/0")),
    "bad_unit": Case(in_first(QUEUE, 20 * 3, struct.pack(">q", 7))),
    "dangling_unit": Case(in_first(QUEUE, 20 * 30, struct.pack(">qiq", 7, 100, 0))),
    "gap_in_queue": Case(in_first(QUEUE, 20 * 40, struct.pack(">qiq", 7, 100, 0))),
    "missing_index": Case(without("index")),
    "bad_index": Case(in_first("index/*", 36, struct.pack(">i", 3))),
    "missing_entry": Case(without("index/*", -1)),
    "bad_entry": Case(in_first("index/*", 40 + 4 * 20 + 20 * 5, struct.pack(">i", 77))),
    "bad_consumer_offset": Case(written("config/consumerOffset.json", '{"offsetTable":{"T@bad":{0:"x"}}}')),
    "not_read": Case(written("compaction/log", "compacted")),
    "bad_settings": Case(written("config/topics.json", "{")),
}
# Kinds of databases and of tiered storage, and the tests that make them; their advice is not followed here.
ELSEWHERE = {
    "queues_behind_log": "offline/test_rebuild_rocksdb_queues.py",
    "second_database": "offline/test_verify_rocksdb_queues.py",
    "damaged_database": "offline/test_rebuild_rocksdb_queues.py",
    "bad_database": "offline/test_settings.py",
    "missing_index_entry": "store/test_rocksdb_index.py",
    "bad_index_entry": "store/test_rocksdb_index.py",
    "bad_pop_record": "offline/test_settings.py",
    "bad_timer": "offline/test_verify_waiting.py",
    "bad_transaction": "offline/test_verify_waiting.py",
    "bad_topic": "offline/test_verify_rocksdb_queues.py",
    "stale_unit": "offline/test_verify_rocksdb_queues.py",
    "not_checked": "config/test_dledger.py",
    **dict.fromkeys(
        ("bad_metadata", "bad_record", "duplicate_record", "gap", "missing_file", "not_indexed", "not_queued", "overlap",
         "wrong_queue", "expired"), "tiered/test_tiered_damage.py",
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the source


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)


def kinds_in_source() -> set[str]:
    found = set(DAMAGE_KINDS.values())
    for path in sorted((ROOT / "rmqstore").rglob("*.py")):
        if {"rabbitmq", "spark"} & set(path.parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                values = node.args if name in _CALLS else []
            elif isinstance(node, ast.Assign) and any(
                getattr(each, "id", "") in ("kind", "EXPIRED") for each in node.targets
            ):
                values = [node.value] if "verify" in path.name or "flat" in path.name else []
            else:
                continue
            found |= {text for value in values for text in _texts(value) if re.fullmatch("[a-z]+(_[a-z]+)*", text)}
    return found - {"missing", "directory", "compacted", "unsealed"}


def test_every_kind_has_a_case():
    tried = {case.kind or name for name, case in CASES.items()}
    assert kinds_in_source() - tried - set(ELSEWHERE) == set()
    for path in ELSEWHERE.values():
        assert (ROOT / "tests" / path).is_file()


# ---------------------------------------------------------------------------------------------------------- advice


def findings(root: Path, options: tuple[str, ...]) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """The findings by kind, and what to do about each kind."""
    done = run("verify", root, *options, "--json")
    assert done.exit_code in (0, 1), done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found: dict[str, list[dict]] = {}
    for line in lines[:-1]:
        found.setdefault(line["kind"], []).append(line)
    advice = {kind: step for kinds, step in lines[-1].get("next", {}).items() for kind in kinds.split(", ")}
    return found, advice


def commands_of(root: Path, advice: str) -> list[list[str]]:
    """The commands that an advice has: each ends with its last option, or with the path."""
    place = re.escape(shlex.quote(str(root)))
    option = r"(?: -o (?:'[^']*'|\S+)| --(?:mode|what|corrupt|tiered) \w+| --rocksdb)"
    return [shlex.split(found)[1:] for found in re.findall(rf"rmqstore \w+ {place}{option}*", advice)]


def follow(root: Path, backup: Path, advice: str, found: list[dict], with_backup: bool) -> None:
    for finding in found:
        path = Path(finding["path"])
        if with_backup and "from a backup" in advice:
            shutil.rmtree(root)
            shutil.copytree(backup, root)
        elif ("move the file away" in advice or "move strays away" in advice) and path.is_file():
            path.rename(root.parent / "moved away")
    again = [["rebuild", str(root), "--what", "index", *OPTIONS]] if "run the same rebuild again" in advice else []
    for command in [*again, *commands_of(root, advice)]:
        if command[0] == "rebuild":
            command.append("--yes")
        done = run(*command)
        assert done.exit_code in (0, 1), (command, done.output[-2000:])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_backup", [False, True], ids=["alone", "with a backup"])
def test_what_is_advised_can_be_done(name, with_backup, request, tmp_path):
    case = CASES[name]
    kind = case.kind or name
    base = request.getfixturevalue("with_crcs" if case.crcs else "plain")
    root = tmp_path / "store"
    shutil.copytree(base.root, root)
    case.damage(root, base)
    options = (*OPTIONS, *case.options)
    found, advice = findings(root, options if case.told else ())
    assert kind in found, found
    assert "docs/formats.md" not in advice[kind]
    if with_backup and "from a backup" not in advice[kind]:
        return
    follow(root, base.root, advice[kind], found[kind], with_backup)
    left, _ = findings(root, options)
    if with_backup:
        assert left == {}
    else:
        assert kind not in left or HONEST in advice[kind], (advice[kind], left[kind])
