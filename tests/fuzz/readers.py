"""Fuzzing of readers beside an independent one: any bytes give the answer of the oracle, or one that says what is wrong.

Owns a target for each kind of file (`KINDS`), seeds from the golden stores, a mutator that knows lengths, magics,
places and check sums; `fuzz.budget` has what reading may cost.  Run as a script it needs the package
atheris and takes a kind, then libFuzzer's arguments: ``python tests/fuzz/readers.py journal -max_total_time=20``;
``ci/fuzz.sh`` makes the build that libFuzzer sees.  It never reads a file of a user and writes below a temporary folder
of its own.
"""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "rabbitmq")]

import classic_queue_oracle  # noqa: E402
import golden  # noqa: E402
import golden_rabbitmq  # noqa: E402
import oracle  # noqa: E402
from scratch import SCRATCH  # noqa: E402

if __name__ == "__main__":
    # The compiled modules tell of their edges themselves; of these the interpreter does.
    import atheris

    watched = [
        "rmqstore.offline.single_file", "rmqstore.offline.importing", "rmqstore.rabbitmq.queue_index_v2",
        "rmqstore.files.checkpoint", "rmqstore.consumer", "rmqstore.rabbitmq.dets", "rmqstore.rabbitmq.clean_state",
    ]  # fmt: skip
    if sys.argv[1:2] == ["qi"]:
        # Where arrays are compared, atheris 3 never frees what comes of it: 226 bytes of each, some gigabytes in an hour.
        watched.remove("rmqstore.rabbitmq.queue_index_v2")
    # Atheris 3 takes the whole package where a module of it is named, so that the others have to be left out by name.
    package = Path(str(importlib.util.find_spec("rmqstore").origin)).parent
    names = (".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py"))
    others = [name for name in names if not name.startswith(tuple(watched))]
    with atheris.instrument_imports(include=watched, exclude=[name.removesuffix(".__init__") for name in others]):
        import rmqstore.consumer.settings_sources
        import rmqstore.files.checkpoint
        import rmqstore.offline.importing
        import rmqstore.offline.single_file
        import rmqstore.rabbitmq.clean_state
        import rmqstore.rabbitmq.dets
        import rmqstore.rabbitmq.queue_index_v2  # noqa: F401

from fuzz import tables, texts  # noqa: E402
from fuzz.budget import judge_memory, judge_time, limit_addresses, stretched  # noqa: E402

from rmqstore.commitlog.log_walk import Blank, Damage  # noqa: E402
from rmqstore.config import StoreConfig  # noqa: E402
from rmqstore.errors import StoreError  # noqa: E402
from rmqstore.files.checkpoint import Checkpoint  # noqa: E402
from rmqstore.index.index_file import IndexFile  # noqa: E402
from rmqstore.offline.single_file import StoreFile  # noqa: E402
from rmqstore.rabbitmq import _core, _messages, _term  # noqa: E402
from rmqstore.rabbitmq.index_directory import read_segment  # noqa: E402
from rmqstore.rabbitmq.layout import map_file  # noqa: E402
from rmqstore.rabbitmq.problem import problems_of  # noqa: E402
from rmqstore.rabbitmq.queue_index_v2 import read_segment_v2, read_store_v2  # noqa: E402

_FOLDER = tempfile.TemporaryDirectory(prefix="rmqstore-fuzz-", dir=SCRATCH)
SEED_MAX = 4096
ENTRY_COUNT = 8

MAGICS = tuple(
    struct.pack(">I", magic)
    for magic in (oracle.MAGIC_V1, oracle.MAGIC_V2, oracle.MAGIC_BLANK, 0x52435149, 0x52435153, 2**31 - 1, 0)
) + (b"\xff", bytes(40), b"\x80\x01", b"\x40\x01")


class Kind(NamedTuple):
    """A kind of file.

    What reads it, what compares that with the oracle, where to begin, which check sums to make right, which bytes it is
    made of, and how many bytes in front a large file has only once.
    """

    read: Callable[[bytes], Any]
    check: Callable[[bytes, Any], None]
    seeds: Callable[[], list[bytes]]
    repair: Callable[[bytearray], None] = lambda data: None
    words: tuple[bytes, ...] = MAGICS
    head: int = 0


def _file(data: bytes) -> str:
    path = os.path.join(_FOLDER.name, "file")
    with open(path, "wb") as file:
        file.write(data)
    return path


# ------------------------------------------------------------------------------------------------------------- RocketMQ


def _read_log(data: bytes) -> list[Any]:
    return list(StoreFile(_file(data), "segment", len(data), 0).records())


def _check_log(data: bytes, found: list[Any]) -> None:
    at = 0
    for each in found:
        assert each.phy_offset == at, "what is read leaves nothing out and nothing overlaps"
        if isinstance(each, Damage):
            assert each.size > 0
            at += each.size
            continue
        record = oracle.check_record(data, at, check_crc=False)
        if isinstance(each, Blank):
            assert isinstance(record, oracle.Blank) and record.size == each.size == len(data) - at
            at = len(data)
            continue
        assert isinstance(record, oracle.Record), record
        at += record.size
        if each.corrupt:
            continue
        assert record.body_is_sound and record.physical_offset == record.phy_offset
        for name in (
            "size", "version", "queue_id", "queue_offset", "flag", "sys_flag", "born_timestamp", "store_timestamp", "topic",
            "reconsume_times", "prepared_transaction_offset", "properties", "keys", "tags", "unique_key",
        ):  # fmt: skip
            assert getattr(each, name) == getattr(record, name), name
        assert each.body_stored == record.body and each.properties_stored == record.properties_raw
    assert not any(data[at:])


def _repair_log(data: bytearray) -> None:
    at = 0
    while at + 88 <= len(data):
        size, magic = struct.unpack_from(">iI", data, at)
        (body_size,) = struct.unpack_from(">i", data, at + 84)
        if not 88 <= size <= len(data) - at or magic == oracle.MAGIC_BLANK:
            return
        struct.pack_into(">q", data, at + 28, at)
        if 0 < body_size <= size - 88:
            struct.pack_into(">I", data, at + 8, oracle.masked_crc(bytes(data[at + 88 : at + 88 + body_size])))
        at += size


def _golden(name: str, folder: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as root:
        files = oracle.read_files(golden.unpack(name, root))
    return [data[:SEED_MAX] for path, data in files.items() if path.split("/")[0] == folder and any(data)][:4]


def _read_units(kind: str) -> Callable[[bytes], list[dict[str, Any]]]:
    return lambda data: list(StoreFile(_file(data), kind, len(data), 0).units())


def _check_queue(data: bytes, found: list[dict[str, Any]]) -> None:
    wanted = []
    for pos in range(0, len(data) - 19, 20):
        unit = oracle.decode_unit(data, pos)
        if any(data[pos : pos + 20]) and (unit.phy_offset, unit.size) != (0, 2**31 - 1):
            wanted.append((pos, pos // 20, unit.phy_offset, unit.size, unit.tags_code))
    assert [(u["pos"], u["queue_offset"], u["phy_offset"], u["size"], u["tags_code"]) for u in found] == wanted


def _check_batch_queue(data: bytes, found: list[dict[str, Any]]) -> None:
    wanted = []
    for pos in range(0, len(data) - 45, 46):
        fields = struct.unpack_from(">qiqqqhii", data, pos)
        if any(data[pos : pos + 46]) and fields[:2] != (0, 2**31 - 1):
            wanted.append((pos, fields[4], fields[0], fields[1], fields[5]))
    assert [(u["pos"], u["queue_offset"], u["phy_offset"], u["size"], u["num"]) for u in found] == wanted


def _check_extension(data: bytes, found: list[dict[str, Any]]) -> None:
    at = 0
    for unit in found:
        wanted = oracle.decode_ext_unit(data, at)
        assert (unit["pos"], unit["tags_code"], unit["store_timestamp"]) == (at, wanted.tags_code, wanted.store_timestamp)
        at += 20 + len(bytes.fromhex(unit["bitmap"]))


def _read_checkpoint(data: bytes) -> Checkpoint | None:
    try:
        return Checkpoint.load(_file(data), read_only=True)
    except StoreError as error:
        assert error.path is not None
        return None


def _check_checkpoint(data: bytes, found: Checkpoint | None) -> None:
    assert (found is None) == (len(data) > 4096 or len(data) % 8 != 0)
    if found is not None:
        assert found.to_bytes()[:48] == oracle.Checkpoint.decode(data).encode()[:48]


SLOTS, ENTRIES = 8, 24
INDEX_SIZE = oracle.index_file_size(SLOTS, ENTRIES)
INDEX_KEYS = [f"Orders#key-{number}" for number in range(6)]


def _index_bytes(data: bytes) -> bytes:
    return data[:INDEX_SIZE].ljust(INDEX_SIZE, b"\0")


def _read_index(data: bytes) -> dict[str, list[int]]:
    # A file of another size is refused by it; what is compared has the right one.
    config = StoreConfig(max_hash_slot_num=SLOTS, max_index_num=ENTRIES)
    with IndexFile.open(_file(_index_bytes(data)), config, read_only=True) as index:
        index.survey()
        index.check_links(2**62)
        found = {key: index.select_phy_offset(key, 1000) for key in INDEX_KEYS}
        offsets, _ = index.select_phy_offsets(INDEX_KEYS, 1000)
        assert offsets.tolist() == [each for key in INDEX_KEYS for each in found[key]]
        return found


def _check_index(data: bytes, found: dict[str, list[int]]) -> None:
    model = oracle.IndexOracle(SLOTS, ENTRIES, _index_bytes(data))
    for key in INDEX_KEYS:
        wanted: list[int] = []
        try:
            model.select_phy_offset(key, 1000, into=wanted)
        except oracle.EndlessWalk:
            continue
        # Where Java goes up a chain, ours ends it.
        assert found[key] == wanted[: len(found[key])], key
        assert len(found[key]) == len(wanted) or _goes_up(model, key), key


def _goes_up(model: oracle.IndexOracle, key: str) -> bool:
    number, steps = model.slot_value(oracle.index_hash(key) % SLOTS), 0
    while 0 < number < ENTRIES and steps < ENTRIES:
        before = model.entry(number)[3]
        if before >= number:
            return True
        number, steps = before, steps + 1
    return not 0 <= number < ENTRIES or steps >= ENTRIES


def _index_files() -> list[bytes]:
    model = oracle.IndexOracle(SLOTS, ENTRIES)
    for number in range(3 * len(INDEX_KEYS)):
        model.put_key(INDEX_KEYS[number % len(INDEX_KEYS)], 100 * number, 1_700_000_000_000 + 700 * number)
    return [model.bytes()]


# ------------------------------------------------------------------------------------------------------------- RabbitMQ


def _read_journal(data: bytes) -> Any:
    findings = _core.Findings()
    _core.JournalMap(16384).load(data, findings, True)
    return _core.scan_journal(data), problems_of(findings, str)


def _check_journal(data: bytes, found: Any) -> None:
    columns, problems = found
    parsed = classic_queue_oracle.parse_journal(data)
    wanted = [
        ((not each.pub.persistent if each.pub else 2 if each.kind == "del" else 3), each.seq, each.begin, each.end - each.begin)
        for each in parsed.records
    ]
    got = list(zip(*(column.tolist() for column in columns), strict=True))
    assert got == wanted[: len(got)]
    # What the oracle takes for a record, and the reader does not, is a problem that names the place.
    assert got == wanted or wanted[len(got)][2] in {problem.pos for problem in problems}
    assert parsed.why == "end" or problems, parsed.why


def _check_segment(data: bytes, found: Any) -> None:
    columns, problems = found
    parsed = classic_queue_oracle.parse_segment(data, 0, ENTRY_COUNT)
    flags = columns.flags.tolist()
    rows = {
        seq: (pos, msg_id.tobytes(), expiry % 2**64, size, term_size, bool(flag & _core.ENTRY_PERSISTENT))
        for seq, pos, msg_id, expiry, size, term_size, flag in zip(
            columns.seq_id.tolist(), columns.pos.tolist(), columns.msg_id, columns.expiry_us.tolist(),
            columns.size.tolist(), columns.term_size.tolist(), flags, strict=True,
        )
    }  # fmt: skip
    marks = {
        seq: bool(flag & _core.ENTRY_DELIVER) + bool(flag & _core.ENTRY_ACK)
        for seq, flag in zip(columns.seq_id.tolist(), flags, strict=True)
    }
    assert len(rows) == len(flags), "a sequence id has one row"
    # Before the first place where something is wrong, everything is read, and nothing but what stands there.
    wrong = {problem.pos for problem in problems}
    first = min(wrong, default=len(data))
    before = [each for each in parsed.records if each.begin < first]
    wanted = {each.seq: _published(each.pub, each.begin) for each in before if each.pub is not None}
    assert {seq: row for seq, row in rows.items() if row[0] < first} == wanted
    for seq in wanted:
        number = sum(each.seq == seq and each.pub is None for each in before)
        assert number <= marks[seq] and (problems or number == marks[seq])
    if parsed.why != "end":
        # What the oracle does not get over is said, unless the reader met a term that is none before that.
        assert first == parsed.used or (first < parsed.used and _TERM_PROBLEMS & {problem.kind for problem in problems})
    # Behind it, what is salvaged is a record that lies there, with marks of its own.
    for seq, row in rows.items():
        record = classic_queue_oracle.parse_segment(data[row[0] :], 0, ENTRY_COUNT).records[0]
        assert record.pub is not None and (record.seq, _published(record.pub, row[0])) == (seq, row)
        assert marks[seq] <= data.count(classic_queue_oracle.segment_mark(seq, ENTRY_COUNT))


#: What the reader says of the term in a record, which the oracle does not look into.
_TERM_PROBLEMS = {"bad_term", "msg_id_mismatch"}


def _published(pub: classic_queue_oracle.Publish, begin: int) -> tuple[Any, ...]:
    return begin, pub.msg_id, pub.expiry, pub.size, len(pub.term), pub.persistent


def _read_message_file(data: bytes) -> Any:
    region = map_file(_file(data))
    if region is None:
        return None
    try:
        _messages.scan_messages(region, _messages.MessageScan.SCAN_SALVAGE)
        return _messages.scan_messages(region)
    finally:
        region.close()


def _check_message_file(data: bytes, found: Any) -> None:
    parsed = classic_queue_oracle.parse_rdq(data)
    if found is None:
        assert not data
        return
    ids, positions, _, flags, end, stop = found
    wanted = [(each.msg_id, each.begin, each.whole) for each in parsed.records]
    got = [
        (msg_id.tobytes(), pos, bool(flag & _messages.MessageFlag.MESSAGE_WRITTEN))
        for msg_id, pos, flag in zip(ids, positions.tolist(), flags.tolist(), strict=True)
    ]
    assert got[: len(wanted)] == wanted and end >= parsed.used
    assert (stop == _messages.MessageStop.STOP_END) == (parsed.why == "end") or parsed.why == "size below 16"


def _wrong_head(data: bytes, magic: int) -> bool:
    if len(data) < 64:
        return True
    found, version, first, end = struct.unpack_from(">IBQQ", data)
    # No node is set to more than a million entries a file.
    return (found, version) != (magic, 2) or not first < end < 2**62 or end - first > 1 << 20


def _check_qi(data: bytes, found: Any) -> None:
    kinds = [(problem.kind, problem.pos) for problem in found.problems]
    wrong = _wrong_head(data, 0x52435149)
    first, end = (0, 4096) if wrong else struct.unpack_from(">QQ", data, 5)
    # The file is 0.qi, and a node goes by the name.
    misnamed = first != 0
    if misnamed:
        first, end = 0, end - first if first % (end - first) == 0 else 4096
    assert (found.first, found.end) == (first, end) and (("bad_head", 0) in kinds) == wrong
    # Damage takes nothing away: what a head or a file leaves room for is read all the same.
    room = min(max(len(data) - 64, 0) // 32, end - first)
    entries = classic_queue_oracle.qi_entries(data[: 64 + 32 * room], first)
    fields = found.entries
    columns = found.seq_id, fields["flags"] & 1, fields["location"], fields["size"], fields["expiry"]
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (each.seq, each.persistent, each.place, each.size, each.expiry) for each in entries
    ]
    assert [msg_id.tobytes() for msg_id in fields["msg_id"]] == [each.msg_id for each in entries]
    assert list(zip(*(column.tolist() for column in found.places), strict=True)) == [
        (row, min(each.offset, 2**63 - 1), each.term_size) for row, each in enumerate(entries) if each.place == 2
    ]
    wanted = {("bad_status", at) for at in range(64, 64 + 32 * room, 32) if data[at] > 1}
    wanted |= {("bad_location", 64 + 32 * (each.seq - first)) for each in entries if each.place > 2}
    if wrong:
        wanted.add(("bad_head", 0))
    if misnamed:
        wanted.add(("range_mismatch", 5))
    over = len(data) - 64 - 32 * room
    if over > 0:
        wanted.add(("torn_entry" if over < 32 else "beyond_range", 64 + 32 * room))
    assert set(kinds) == wanted and len(kinds) == len(wanted)


def _check_qs(data: bytes, found: Any) -> None:
    records, used = classic_queue_oracle.qs_records(data)
    assert found.pos.tolist() == [at for at, _, _ in records]
    broken = [crc is not None and crc != zlib.crc32(term) & 0xFFFF for _, term, crc in records]
    assert (found.verdict != 0).tolist() == broken
    wanted = {("bad_crc", at) for (at, _, _), wrong in zip(records, broken, strict=True) if wrong}
    if _wrong_head(data, 0x52435153):
        wanted.add(("bad_head", 0))
    if used < len(data):
        wanted.add(("torn_record", used))
    assert {(problem.kind, problem.pos) for problem in found.problems} == wanted
    # 4.x may put zeros after a term; they go.
    for (_, term, _), size, wrong in zip(records, found.term_size.tolist(), broken, strict=True):
        own = term[:size]
        assert not any(term[size:]) and (own == term or (not wrong and _term.extent(own) == size))


def _repair_qs(data: bytearray) -> None:
    at = 64
    while at + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        struct.pack_into(">H", data, at + 5, zlib.crc32(data[at + 8 : at + 8 + size]) & 0xFFFF)
        at += 8 + size


def _vhost(case: str, pattern: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory() as root:
            found = sorted(golden_rabbitmq.unpack(case, root).glob(pattern))
            return [path.read_bytes()[:SEED_MAX] for path in found[:3]]

    return seeds


def _message_files() -> list[bytes]:
    (journal, *_) = _vhost("03-kill9-consumer-unacked", "queues/*/journal.jif")()
    publishes = [each.pub for each in classic_queue_oracle.parse_journal(journal).records if each.pub is not None]
    records = [classic_queue_oracle.rdq_record(each.msg_id, each.term) for each in publishes[:4]]
    return [b"".join(records), *_vhost("12-clean-msgstore", "msg_store_*/*.rdq")()]


def _segments() -> list[bytes]:
    publish = classic_queue_oracle.Publish(1, b"i" * 16, 0, 4, True, b"")
    whole = classic_queue_oracle.segment_publish(publish, ENTRY_COUNT) + 2 * classic_queue_oracle.segment_mark(1, ENTRY_COUNT)
    return [whole, *_vhost("02-kill9-segment-plus-journal", "queues/*/*.idx")()]


KINDS: dict[str, Kind] = {
    "log": Kind(_read_log, _check_log, lambda: _golden("base", "commitlog") + _golden("propcrc", "commitlog"), _repair_log),
    "queue": Kind(_read_units("queue"), _check_queue, lambda: _golden("base", "consumequeue")),
    "batch_queue": Kind(_read_units("batch_queue"), _check_batch_queue, lambda: _golden("compaction", "batchconsumequeue")),
    "queue_extension": Kind(_read_units("queue_extension"), _check_extension, lambda: _golden("ext", "consumequeue_ext")),
    "checkpoint": Kind(_read_checkpoint, _check_checkpoint, lambda: _golden("base", "checkpoint")),
    "journal": Kind(_read_journal, _check_journal, _vhost("03-kill9-consumer-unacked", "queues/*/journal.jif")),
    "segment": Kind(lambda data: read_segment(data, ENTRY_COUNT, number=0), _check_segment, _segments),
    "message_file": Kind(_read_message_file, _check_message_file, _message_files),
    "qi": Kind(lambda data: read_segment_v2(data, 0), _check_qi, _vhost("19-clean-v2", "queues/*/*.qi"), head=64),
    "qs": Kind(read_store_v2, _check_qs, _vhost("19-clean-v2", "queues/*/*.qs"), _repair_qs, head=64),
    "index": Kind(_read_index, _check_index, _index_files),
    **tables.kinds(Kind, _vhost),
    **texts.Texts(_FOLDER.name, Kind).kinds,
}


# -------------------------------------------------------------------------------------------------------------- judging


def judge(kind: Kind, data: bytes) -> None:
    """Read bytes, and compare the answer with the oracle's."""
    kind.check(data, kind.read(data))


def judge_cost(kind: Kind, data: bytes) -> None:
    """Read bytes again and again put together: what that takes may grow with them, and no faster."""
    large = stretched(data, kind.head)
    judge_time(kind.read, large)
    judge_memory(kind.read, large)


def mutate(kind: Kind, data: bytes, dice: random.Random, max_size: int) -> bytes:
    """Change bytes as one who knows the format: numbers that lead somewhere, pieces put elsewhere, check sums made right."""
    changed = bytearray(data or b"\0")
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(changed) + 1)
        end = min(at + dice.choice((1, 2, 8, 20, 46, 100)), len(changed))
        move = dice.randrange(5)
        if move == 0:
            size, code = dice.choice(((2, ">H"), (4, ">I"), (8, ">Q")))
            if at + size <= len(changed):
                (now,) = struct.unpack_from(code, changed, at)
                left = len(changed) - at
                number = dice.choice((now + 1, now - 1, left, left - size, left - 9, len(changed), at, dice.randrange(64), -1))
                struct.pack_into(code, changed, at, number % (1 << 8 * size))
        elif move == 1:
            magic = dice.choice(kind.words)
            changed[at : at + len(magic)] = magic
        elif move == 2:
            to = dice.randrange(len(changed) + 1)
            changed[to:to] = changed[at:end]
        elif move == 3:
            del changed[at:end]
        else:
            changed += changed[at:]
    del changed[max_size:]
    if dice.randrange(2):
        kind.repair(changed)
    return bytes(changed)


def main() -> None:
    """Fuzz one kind with atheris until it is stopped."""
    import atheris

    name = sys.argv.pop(1)
    kind = KINDS[name]
    if name == "qi":
        # The reader goes unseen (above), so that the oracle's branches have to lead.
        classic_queue_oracle.qi_entries = atheris.instrument_func(classic_queue_oracle.qi_entries)
        kind = kind._replace(check=atheris.instrument_func(kind.check))

    # AddressSanitizer takes time and memory of its own; what reading costs is judged without it.
    costs_count = "address" not in os.environ.get("RMQSTORE_SANITIZE", "")

    def one(data: bytes) -> None:
        judge(kind, data)
        if not costs_count:
            return
        chance = zlib.crc32(data)
        if data and chance % 512 == 0:
            judge_cost(kind, data)
        elif chance % 64 == 1:
            # A length that leads out of all bounds may be one that is repeated away.
            judge_memory(kind.read, data)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)
        if dice.randrange(2):
            return atheris.Mutate(bytes(data), max_size)
        return mutate(kind, bytes(data), dice, max_size)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(kind.seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        # What libFuzzer finds goes to the first folder; one of the caller's is kept.
        folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        arguments = [sys.argv[0], f"-max_len={2 * SEED_MAX}", *options, *folders, corpus]
        atheris.Setup(arguments, one, custom_mutator=mutator)
        limit_addresses()
        atheris.Fuzz()


if __name__ == "__main__":
    main()
