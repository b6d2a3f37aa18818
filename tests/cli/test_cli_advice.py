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
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import rocksdb_files
import rocksdb_stores
import tiered_oracle
from click.testing import CliRunner
from pending_stores import TimerFiles
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.commitlog.log_walk import DAMAGE_KINDS
from rmqstore.offline.rebuild_queue_database import rebuild_queue_database
from rmqstore.rocksdb.index import keys_of_message

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [*options_of(SMALL), "-o", "index_tags=true", "-o", "message_delay_level=1s 5s"]
HONEST = "cannot be repaired"
# What a kind is called where it is no constant of the call.
_CALLS = ("Finding", "finding_of", "_tell", "_Run")


class Whole(NamedTuple):
    """A store that is whole, in a folder of its own that is copied, and the places of its records in the log."""

    home: Path
    places: list[int]
    tiered: bool = False


def run(*args: object):
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "1000"})


def _store(home: Path, **more: object) -> Whole:
    with MessageStore.open(home / "store", config=StoreConfig(**SMALL, **more)) as store:
        puts = [
            store.put_message(Message("T", b"body %d" % n + bytes(250), keys=[f"K{n}"], tags="A"), n % 2)
            for n in range(60)
        ]
    return Whole(home, [put.phy_offset for put in puts])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Whole:
    return _store(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def with_crcs(tmp_path_factory) -> Whole:
    return _store(tmp_path_factory.mktemp("crcs"), enabled_append_prop_crc=True)


@pytest.fixture(scope="module")
def queue_database(tmp_path_factory) -> Whole:
    """Queues in RocksDB."""
    pytest.importorskip("rocksdict")
    whole = _store(tmp_path_factory.mktemp("queues"))
    rebuild_queue_database(whole.home / "store", StoreConfig(**SMALL, message_delay_level="1s 5s", index_tags=True))
    for aside in (whole.home / "store").glob("consumequeue.*"):
        shutil.rmtree(aside)
    return whole


@pytest.fixture(scope="module")
def index_database(tmp_path_factory) -> Whole:
    """Index, timers and transactions in RocksDB, and timer files and pop records too."""
    pytest.importorskip("rocksdict")
    home = tmp_path_factory.mktemp("index")
    root = home / "store"
    entries: dict[bytes, bytes] = {}
    with MessageStore.open(root, config=StoreConfig(**SMALL, generate_unique_key=True)) as store:
        for topic in ("T", "rmq_sys_wheel_timer", "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"):
            put = store.put_messages([Message(topic, bytes(250), keys=[f"K{n}"], tags="A") for n in range(20)])[0]
            for message in store.get_message(topic, max_num=20).messages:
                entries |= {key: struct.pack(">q", message.store_timestamp) for key in keys_of_message(message)}
            if topic == "rmq_sys_wheel_timer":
                timer = put
        half = put
    shutil.rmtree(root / "index")
    timers = {struct.pack(">q", 2**41) + b"KEY": struct.pack(">iq", timer.size, timer.phy_offset)}
    transactions = {struct.pack(">q", half.phy_offset) + b"@T@ID": struct.pack(">ii", 0, half.size)}
    families = {"default": entries, "timer": timers, "trans": transactions}
    entries[b"lastOffsetPy"] = struct.pack(">q", half.phy_offset)
    rocksdb_files.write(root / "rocksdbstore", families)
    pop = {"popTime": 1, "groupId": "G", "topicId": "T", "queueId": 0, "retryFlag": 0, "invisibleTime": 9, "offset": 3}
    key = struct.pack(">q", 10) + b"G@T" + struct.pack(">cicq", b"@", 0, b"@", 3)
    records = {key: json.dumps(pop | {"attemptTimes": 0}).encode()}
    rocksdb_files.write(root / "kvStore", {"popState": records})
    rocksdb_files.write(root / "config" / "topics", {"default": {b"T": b'{"topicName":"T"}'}, "kvDataVersion": {}})
    now = timer.store_timestamp // 1000 * 1000
    files = TimerFiles(root)
    files.put(now + 60_000, timer.phy_offset, timer.size, now=now)
    files.write(now)
    return Whole(home, [])


@pytest.fixture(scope="module")
def tiered(tmp_path_factory) -> Whole:
    """Tiered storage of a topic whose newest messages the local store has."""
    home = tmp_path_factory.mktemp("tiered")
    whole = _store(home)
    sent = [
        tiered_oracle.Sent("T", 0, (f"K{n}",), "A", f"U{n}", bytes(20), 1_700_000_000_000 + 700 * n) for n in range(8)
    ]
    tiered_oracle.write_tiered(home, sent, log_size=400, queue_size=40)
    return whole._replace(tiered=True)


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


def changed_database(folder: str, change: Callable[..., None]) -> Callable[[Path, Whole], None]:
    """Write the database again with what `change(default, other families)` makes of its entries."""

    def damage(root: Path, base: Whole) -> None:
        families = rocksdb_stores.raw_entries(root / folder)
        change(families)
        shutil.rmtree(root / folder)
        rocksdb_stores.write_database(root / folder, families)

    return damage


def unit_of(number: int) -> bytes:
    return rocksdb_stores.unit_key("T", 0, number)


def lost_unit(families: dict[str, dict[bytes, bytes]]) -> None:
    del families["default"][unit_of(7)]


def wrong_unit(families: dict[str, dict[bytes, bytes]]) -> None:
    families["default"][unit_of(7)] = struct.pack(">qiqq", 7, 7, 7, 7)


def further_unit(families: dict[str, dict[bytes, bytes]]) -> None:
    families["default"][unit_of(90)] = struct.pack(">qiqq", 7, 7, 7, 7)


def units_of_nobody(name: str) -> Callable[[dict[str, dict[bytes, bytes]]], None]:
    def change(families: dict[str, dict[bytes, bytes]]) -> None:
        value = families["default"][unit_of(7)]
        families["default"][rocksdb_stores.unit_key(name, 0, 0)] = value
        families["offset"][rocksdb_stores.max_key(name, 0)] = value[:8] + bytes(8)

    return change


def far_checkpoint(families: dict[str, dict[bytes, bytes]]) -> None:
    families["offset"][rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0)] = struct.pack(">q", 2**40)


def behind(families: dict[str, dict[bytes, bytes]]) -> None:
    last = families["default"].pop(unit_of(29))
    before = families["default"][unit_of(28)]
    families["offset"][rocksdb_stores.max_key("T", 0)] = before[:8] + struct.pack(">q", 28)
    families["offset"][rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0)] = last[:8]


def lost_entry(families: dict[str, dict[bytes, bytes]]) -> None:
    del families["default"][next(key for key in families["default"] if b"@T@K@K5@" in key)]


def wrong_entry(families: dict[str, dict[bytes, bytes]]) -> None:
    key = next(key for key in families["default"] if b"@T@K@K5@" in key)
    families["default"][key] = bytes(8)


def more(family: str, key: bytes, value: bytes = b"") -> Callable[[dict[str, dict[bytes, bytes]]], None]:
    return lambda families: families[family].update({key: value})


def damaged(folder: str) -> Callable[[Path, Whole], None]:
    return in_first(f"{folder}/*.sst", 20, b"!!!!")


def second_database(root: Path, base: Whole) -> None:
    shutil.copytree(root / "consumequeue", root / "consumequeue_rocksdb")


# Of the tiered queue T/0, whose records have one length: three a file.
FLAT = f"../tiered/{tiered_oracle.prefix('C')}_C/B/T/0"


def flat(kind: str, which: int, change: Callable[[bytes], bytes | None]) -> Callable[[Path, Whole], None]:
    """Change a file of the tiered queue, or delete it where `change` gives None."""

    def damage(root: Path, base: Whole) -> None:
        path = sorted((root / FLAT / kind).iterdir(), key=lambda path: path.name[8:])[which]
        data = change(path.read_bytes())
        path.unlink() if data is None else path.write_bytes(data)

    return damage


def put_at(pos: int, field: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:pos] + field + data[pos + len(field) :]


def uploaded_again(root: Path, base: Whole) -> None:
    # After a crash between log and units the broker uploads records again.
    (root / "config" / "tieredStoreMetadata.json").unlink()
    log = max((root / FLAT / "COMMIT_LOG").iterdir(), key=lambda path: path.name[8:])
    data = log.read_bytes()
    size = struct.unpack_from(">i", data)[0]
    end = int(log.name[8:]) + len(data)
    log.write_bytes(data + data[:28] + struct.pack(">q", end) + data[36:size])


def without_index_item(root: Path, base: Whole) -> None:
    index = max((root / "tiered_index_file").iterdir())
    data = index.read_bytes()
    # The hash of its oldest item becomes another one of its slot.
    at = 28 + 8 * 4 + 32
    index.write_bytes(put_at(at, struct.pack(">i", struct.unpack_from(">i", data, at)[0] ^ 1 << 20))(data))


def lost_tiered_unit(root: Path, base: Whole) -> None:
    (root / "config" / "tieredStoreMetadata.json").unlink()
    flat("CONSUME_QUEUE", -1, lambda data: data[:-20])(root, base)


def local_log_gone(root: Path, base: Whole) -> None:
    # Retention took what was not uploaded.
    for path in sorted((root / "commitlog").iterdir())[:2]:
        path.unlink()


def dledger(root: Path, base: Whole) -> None:
    (root / "dledger-n0" / "data").mkdir(parents=True)
    (root / "dledger-n0" / "data" / f"{0:020d}").write_bytes(bytes(4096))


def library_gone(root: Path, base: Whole) -> None:
    """Of `index_database`: what is missing is said by the test."""


class Case(NamedTuple):
    """How a store is damaged, and which store; the kind of finding is the case's name, up to a colon.

    Without `told` the first verify is not told the geometry.  `library` is one that is not installed.
    """

    damage: Callable[[Path, Whole], None]
    store: str = "plain"
    options: tuple[str, ...] = ()
    told: bool = True
    library: str = ""


QUEUE = "consumequeue/T/0/*"
CASES: dict[str, Case] = {
    "interrupted_rebuild": Case(interrupted),
    "geometry": Case(without("commitlog"), told=False),
    "file: stray segment": Case(written("commitlog/notes.txt", "mine")),
    "file: short segment": Case(lambda root, base: os.truncate(min((root / "commitlog").iterdir()), 999)),
    "file: short queue": Case(lambda root, base: os.truncate(min(root.glob(QUEUE)), 333)),
    "file: short index": Case(lambda root, base: os.truncate(min(root.glob("index/*")), 333)),
    "missing_segment: middle": Case(without("commitlog/*", 2)),
    "missing_segment: newest": Case(without("commitlog/*", -1)),
    "bad_magic": Case(spoil(4, b"XXXX")),
    "bad_size": Case(spoil(0, struct.pack(">i", -7))),
    "bad_length": Case(spoil(84, struct.pack(">i", 1 << 20))),
    "bad_phy_offset": Case(spoil(28, struct.pack(">q", 77))),
    "bad_body": Case(spoil(36, struct.pack(">i", 1))),
    "bad_body_crc": Case(spoil(90, b"!!")),
    "bad_prop_crc": Case(bad_property, store="with_crcs"),
    "bad_blank": Case(bad_blank),
    "missing_blank": Case(missing_blank),
    "stale_tail": Case(stale_tail),
    "missing_prop_crc": Case(missing_prop_crc, store="with_crcs"),
    "bad_inner_batch": Case(inner_batch),
    "bad_multi_dispatch": Case(further_queue, options=("-o", "enable_lmq=true", "-o", "enable_multi_dispatch=true")),
    "bad_checkpoint": Case(in_first("checkpoint", 0, struct.pack(">q", 2**60))),
    "bad_checkpoint: short": Case(lambda root, base: os.truncate(root / "checkpoint", 99)),
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
    "missing_unit: database": Case(changed_database("consumequeue", lost_unit), "queue_database"),
    "bad_unit: database": Case(changed_database("consumequeue", wrong_unit), "queue_database"),
    "dangling_unit: database": Case(changed_database("consumequeue", units_of_nobody("Ghost")), "queue_database"),
    "bad_topic": Case(changed_database("consumequeue", units_of_nobody("../x")), "queue_database"),
    "bad_checkpoint: database": Case(changed_database("consumequeue", far_checkpoint), "queue_database"),
    "stale_unit": Case(changed_database("consumequeue", further_unit), "queue_database"),
    "queues_behind_log": Case(changed_database("consumequeue", behind), "queue_database"),
    "bad_database": Case(damaged("consumequeue"), "queue_database"),
    "second_database": Case(second_database, "queue_database"),
    "damaged_database: index": Case(damaged("rocksdbstore"), "index_database"),
    "damaged_database: pop records": Case(damaged("kvStore"), "index_database"),
    "damaged_database: topics": Case(damaged("config/topics"), "index_database"),
    "missing_index_entry": Case(changed_database("rocksdbstore", lost_entry), "index_database"),
    "bad_index_entry": Case(changed_database("rocksdbstore", wrong_entry), "index_database"),
    "bad_pop_record": Case(changed_database("kvStore", more("popState", b"none")), "index_database"),
    "bad_timer": Case(changed_database("rocksdbstore", more("timer", bytes(8))), "index_database"),
    "bad_timer: files": Case(in_first("timerlog/*", 28, struct.pack(">q", 77)), "index_database"),
    "bad_transaction": Case(changed_database("rocksdbstore", more("trans", b"none")), "index_database"),
    "not_checked": Case(library_gone, "index_database", library="rocksdict"),
    "not_checked: DLedger": Case(dledger),
    "bad_metadata": Case(written("config/tieredStoreMetadata.json", "{"), "tiered"),
    "bad_record": Case(flat("COMMIT_LOG", 0, put_at(0, bytes(4))), "tiered"),
    "bad_size: tiered": Case(flat("COMMIT_LOG", 0, put_at(0, b"\xff" * 4)), "tiered"),
    "bad_unit: tiered": Case(flat("CONSUME_QUEUE", 0, put_at(0, struct.pack(">q", 77))), "tiered"),
    "bad_index: tiered": Case(in_first("tiered_index_file/*", 12, bytes(8)), "tiered"),
    "duplicate_record": Case(uploaded_again, "tiered"),
    "gap": Case(local_log_gone, "tiered"),
    "missing_file": Case(flat("COMMIT_LOG", 1, lambda data: None), "tiered"),
    "not_indexed": Case(without_index_item, "tiered"),
    "not_queued": Case(lost_tiered_unit, "tiered"),
    "overlap": Case(flat("COMMIT_LOG", 0, lambda data: data + b"more"), "tiered"),
    "wrong_queue": Case(flat("COMMIT_LOG", 0, put_at(12, struct.pack(">i", 3))), "tiered"),
    "file: stray in tiered storage": Case(written(f"{FLAT}/../../notes.txt", "mine"), "tiered"),
}


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
    # The last one is what retention took, which is no finding of verify.
    return found - {"missing", "directory", "compacted", "unsealed", "expired"}


def test_every_kind_has_a_case():
    tried = {name.partition(":")[0] for name in CASES}
    assert kinds_in_source() - tried == set()


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
    option = r"(?: -o (?:'[^']*'|\S+)| --(?:mode|what|corrupt) \w+| --tiered \S+| --rocksdb)"
    return [shlex.split(found)[1:] for found in re.findall(rf"rmqstore \w+ {place}{option}*", advice)]


def follow(root: Path, advice: str, found: list[dict]) -> None:
    """Do what is advised to somebody who has no backup."""
    for finding in found:
        path = Path(finding["path"])
        if ("move the file away" in advice or "move foreign files away" in advice) and path.is_file():
            path.rename(root.parent / "moved away")
        elif "move away the folder that the broker does not use" in advice:
            path.rename(root.parent / "moved away")
    again = [["rebuild", str(root), "--what", "index", *OPTIONS]] if "run the same rebuild again" in advice else []
    for command in [*again, *commands_of(root, advice)]:
        if command[0] == "rebuild":
            command.append("--yes")
        done = run(*command)
        assert done.exit_code in (0, 1), (command, done.output[-2000:])


def restore(home: Path, backup: Path, advice: str, found: list[dict]) -> None:
    """Take from the backup what the advice says, or the findings name."""
    paths = {Path(finding["path"]) for finding in found}
    if "files of tiered storage" in advice:
        paths = {home / each for each in ("tiered", "store/tiered_index_file", "store/config", "store/commitlog")}
    for path in paths:
        source = backup / path.relative_to(home)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if source.is_dir():
            shutil.copytree(source, path)
        elif source.exists():
            shutil.copyfile(source, path)


@pytest.mark.parametrize("name", CASES)
def test_what_is_advised_can_be_done(name, request, tmp_path, monkeypatch):
    case = CASES[name]
    kind = name.partition(":")[0]
    base = request.getfixturevalue(case.store)
    root = tmp_path / "home" / "store"
    shutil.copytree(base.home, root.parent)
    options = (*OPTIONS, *case.options, *(("--tiered", str(root.parent / "tiered")) if base.tiered else ()))
    case.damage(root, base)
    if case.library:
        monkeypatch.setitem(sys.modules, case.library, None)
    found, advice = findings(root, options if case.told else ())
    assert kind in found, found
    assert "docs/formats.md" not in advice[kind]
    if case.library:
        assert "install the library" in advice[kind] and all("install" in each["detail"] for each in found[kind])
        monkeypatch.undo()
    if "from a backup" in advice[kind]:
        shutil.copytree(root.parent, tmp_path / "again")
    follow(root, advice[kind], found[kind])
    left, _ = findings(root, options)
    if "rmqstore query" in advice[kind]:
        shown = run("query", root, "T", "K5", *options)
        assert shown.exit_code == 0 and "keys=K5" in shown.output, shown.output
    else:
        assert kind not in left or HONEST in advice[kind], (advice[kind], left[kind])
    if "from a backup" in advice[kind]:
        shutil.rmtree(root.parent)
        (tmp_path / "again").rename(root.parent)
        restore(root.parent, base.home, advice[kind], found[kind])
        if "foreign files" not in advice[kind]:
            assert kind not in findings(root, options)[0]


@pytest.mark.parametrize("store", sorted({case.store for case in CASES.values()}))
def test_nothing_is_wrong_with_the_stores_that_are_damaged(store, request, tmp_path):
    base = request.getfixturevalue(store)
    tiered = ("--tiered", str(base.home / "tiered")) if base.tiered else ()
    assert findings(base.home / "store", (*OPTIONS, *tiered)) == ({}, {})
