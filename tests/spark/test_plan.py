"""Pieces of a log: together they give what one scan gives, wherever it is cut and whatever bodies contain.

Needs neither Spark nor Java.  The bodies hold records that are right in every detail, and the cuts lie just before them.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace

import golden
import pytest
import rocksdb_stores
from stores import SEGMENT, START, look_alike, make_store, messages, overwrite, scanned, small_config

from rmqstore import CorruptionError, GeometryError, Message, MessageStore, StoreConfig, StoreError
from rmqstore.selection import Selection
from rmqstore.spark import plan as plan_module
from rmqstore.spark.batches import ReadJob, in_spark_layout, piece_batches, queue_piece_batches, spark_arrow_schema
from rmqstore.spark.options import ReadOptions
from rmqstore.spark.plan import LogPlan, Piece, QueuePiece, first_offset, open_log, queue_pieces

pytest.importorskip("pyarrow")

COLUMNS = ("phy_offset", "size", "topic", "queue_offset", "body")
ORDERS = Selection(topics=("Orders",), queue_ids=(0,))
# Position of the body in a record with IPv4 hosts.
BODY = 88


def pieces_of(path, partition_bytes, config=None):
    plan = LogPlan.of(path, config)
    return plan, plan.pieces(partition_bytes)


def batches_of(plan, piece, columns=COLUMNS, **options):
    return piece_batches(ReadJob.of(plan, ReadOptions(plan.root, **options), spark_arrow_schema(columns)), piece)


def read(path, partition_bytes, columns=COLUMNS, config=None, **options):
    """Return the rows of all pieces, in order."""
    plan, pieces = pieces_of(path, partition_bytes, config)
    rows = []
    for piece in pieces:
        for batch in batches_of(plan, piece, columns, **{"corrupt": "skip", **options}):
            rows += batch.to_pylist()
    return rows


@pytest.fixture(params=["near", "queues", "no queues"])
def way(request, monkeypatch):
    """How pieces are reached: from the segment's start, by consume queues, and without any."""
    if request.param != "near":
        monkeypatch.setattr(plan_module, "_NEAR", 0)
    return request.param


def without_queues(path, way):
    if way == "no queues":
        shutil.rmtree(path / "consumequeue", ignore_errors=True)
    return path


@pytest.mark.parametrize("name", [name for name in golden.STORES])
def test_pieces_of_golden_stores_are_one_scan(golden_store, tmp_path, name, way):
    path = golden_store(name)
    if way == "no queues":
        path = golden.unpack(name, tmp_path)
        without_queues(path, way)
    config = StoreConfig(**{key: value for key, value in golden.geometry(name).items()})
    expected = scanned(path, list(COLUMNS), config=config)
    segment = config.mapped_file_size_commit_log
    for size in (segment // 40 + 1, segment // 3, segment, 10 * segment):
        assert read(path, size, config=config) == expected, size


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A store with look-alikes in its bodies, and where they are."""
    path = tmp_path_factory.mktemp("planted") / "store"
    places = []
    with MessageStore.open(path, config=small_config()) as store:
        for i, (message, queue_id) in enumerate(messages(150)):
            end = store.commit_log.max_offset
            if i % 3 == 1 and end % SEGMENT + 1000 < SEGMENT:
                lead = b"." * (i % 50)
                size = 200
                at = end + BODY + len(lead)
                alike = look_alike(at, size)
                if i % 2:
                    # Its end is the end of the record around it: topic and properties belong to both.
                    body_size = size - 91 - 6
                    total = 91 + body_size + 6 + 10
                    alike = look_alike(at, size, total=total)[: 88 + body_size]
                    message = Message("Orders", lead + alike, tags="look")
                else:
                    message = Message("Orders", lead + alike + b".." + look_alike(at + size + 2, 150) + b"...")
                    places.append(at + size + 2)
                places.append(at)
            store.put_message(message, queue_id)
    return path, places


def test_the_look_alikes_look_alike(planted):
    path, places = planted
    plan = LogPlan.of(path)
    assert len(places) > 50
    ends = {row["phy_offset"] + row["size"] for row in scanned(path, ["phy_offset", "size"])}
    shared = 0
    for at in places:
        log = open_log(plan.root, plan.config, Piece(at, at + 1))
        region = log.segment(at).region
        base = at - at % SEGMENT
        verdict, size, _ = plan_module._core.check_record(region, at - base, base, 1)
        assert verdict == 1
        assert plan_module._core.find_record(region, at - base, base) == at - base
        shared += at + size in ends
        log.close()
    assert shared > 10


def test_no_piece_begins_at_a_look_alike(planted, tmp_path, way):
    path, places = planted
    if way == "no queues":
        path = without_queues(shutil.copytree(path, tmp_path / "store"), way)
    plan = LogPlan.of(path)
    starts = [row["phy_offset"] for row in scanned(path, ["phy_offset"])]
    for at in places:
        base = at - at % SEGMENT
        stops = [start for start in starts if at <= start < base + SEGMENT]
        log = open_log(plan.root, plan.config, Piece(base, base + SEGMENT))
        for cut in (at - 1, at, at + 1):
            found = first_offset(log, Piece(cut, base + SEGMENT))
            # Behind the last record there is the blank one, which no piece needs.
            assert found == stops[0] if stops else found > max(start for start in starts if start < at)
        log.close()


def test_pieces_with_look_alikes_are_one_scan(planted, tmp_path, way):
    path, _ = planted
    if way == "no queues":
        path = without_queues(shutil.copytree(path, tmp_path / "store"), way)
    expected = scanned(path, list(COLUMNS))
    for size in (333, 1000, 4096, 7001, SEGMENT):
        assert read(path, size) == expected, size


def test_queues_shorten_the_way(planted, monkeypatch):
    path, _ = planted
    monkeypatch.setattr(plan_module, "_NEAR", 0)
    plan = LogPlan.of(path)
    way = []
    for piece in plan.pieces(1000):
        log = open_log(plan.root, plan.config, piece)
        step_to = log.step_to
        monkeypatch.setattr(
            log, "step_to", lambda begin, goal, step_to=step_to: way.append(goal - begin) or step_to(begin, goal)
        )
        first_offset(log, piece)
        log.close()
    # The largest record is below 1000 bytes, so the way is never longer than one.
    assert len(way) > 20 and max(way) < 1000


def test_every_single_cut(tmp_path, way):
    path = without_queues(make_store(tmp_path / "store", 45), way)
    plan = LogPlan.of(path)
    starts = [row["phy_offset"] for row in scanned(path, ["phy_offset"])]
    log = open_log(plan.root, plan.config, Piece(0, plan.end))
    for cut in range(0, min(plan.end, SEGMENT), 7):
        expected = min((start for start in starts if start >= cut), default=plan.end)
        assert first_offset(log, Piece(cut, plan.end)) == expected
    log.close()


# ---------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("sound") / "store", 200)


@pytest.mark.parametrize("seed", range(12))
def test_pieces_of_a_damaged_log_are_one_scan(sound, tmp_path, way, seed):
    dice = random.Random(seed)
    path = without_queues(shutil.copytree(sound, tmp_path / "store"), way)
    end = LogPlan.of(path).end
    starts = [row["phy_offset"] for row in scanned(path, ["phy_offset"])]
    for _ in range(dice.randrange(1, 6)):
        at = dice.choice(starts) if dice.random() < 0.6 else dice.randrange(end)
        size = dice.choice((1, 4, 30, 400, 2000))
        size = min(size, SEGMENT - at % SEGMENT, end - at)
        overwrite(path, at, dice.choice((bytes(size), dice.randbytes(size), b"\xda" * size)))
    # A scan does not compute the CRC of these columns, so `corrupt` is asked of neither.
    columns = ["phy_offset", "size", "topic", "queue_offset"]
    expected = scanned(path, columns)
    for size in (500, 2500, SEGMENT):
        assert read(path, size, tuple(columns)) == expected
        # What cannot be read is told once, wherever the log is cut.
        told = read(path, size, ("phy_offset", "size", "_corrupt"), corrupt="report")
        assert [
            row["phy_offset"] for row in told if row["phy_offset"] in {each["phy_offset"] for each in expected}
        ] == [each["phy_offset"] for each in expected]
        whole = [(row["phy_offset"], row["size"]) for row in told]
        assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(whole))
        assert told == read(path, 10**9, ("phy_offset", "size", "_corrupt"), corrupt="report")


def test_behind_damage_a_piece_begins_where_a_scan_goes_on(sound, tmp_path, way):
    # The header of one record is gone and the next one fails its CRC: a scan skips both, and a cut between them does too.
    path = without_queues(shutil.copytree(sound, tmp_path / "store"), way)
    rows = scanned(path, ["phy_offset", "size"])
    first, second, third = [row["phy_offset"] for row in rows[10:13]]
    overwrite(path, first, bytes(20))
    overwrite(path, second + BODY, b"\xff")
    expected = scanned(path, ["phy_offset"])
    assert third in [row["phy_offset"] for row in expected] and {"phy_offset": second} not in expected
    for cut in (first, first + 1, second, second + 1):
        assert read(path, cut, ("phy_offset",)) == expected


def test_a_record_in_the_middle_whose_crc_fails(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    row = scanned(path, ["phy_offset", "size", "body"])[50]
    overwrite(path, row["phy_offset"] + BODY, b"\xff")
    segment = f"{row['phy_offset'] - row['phy_offset'] % SEGMENT:020d}"
    place = f"{segment}, position {row['phy_offset'] % SEGMENT}"
    with pytest.raises(CorruptionError, match=place):
        read(path, 3000, corrupt="fail")
    assert len(read(path, 3000, corrupt="skip")) == 199
    told = [each for each in read(path, 3000, (*COLUMNS, "_corrupt"), corrupt="report") if each["_corrupt"]]
    assert [(each["phy_offset"], each["topic"]) for each in told] == [
        (row["phy_offset"], "Stock" if 50 % 3 == 0 else "Orders")
    ]
    assert told[0]["_corrupt"].endswith(f"{place}: BAD_BODY_CRC")
    # Without the body nothing is said of it, and no CRC computed.
    assert len(read(path, 3000, ("topic",), corrupt="fail")) == 200


def test_a_damaged_stretch(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    rows = scanned(path, ["phy_offset", "size"])
    first, after = rows[70], rows[72]
    overwrite(path, first["phy_offset"], bytes(first["size"] + 40))
    place = f"{first['phy_offset'] - first['phy_offset'] % SEGMENT:020d}, position {first['phy_offset'] % SEGMENT}"
    with pytest.raises(CorruptionError, match=place):
        read(path, 3000, ("topic",), corrupt="fail")
    assert len(read(path, 3000, corrupt="skip")) == 198
    (told,) = [each for each in read(path, 300, (*COLUMNS, "_corrupt"), corrupt="report") if each["_corrupt"]]
    assert place in told["_corrupt"]
    assert told["phy_offset"] == first["phy_offset"]
    assert told["size"] == after["phy_offset"] - first["phy_offset"]
    assert told["topic"] is told["body"] is None


def test_damage_in_the_newest_segment_does_not_hide_what_follows(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    rows = scanned(path, ["phy_offset", "size"])
    damaged = rows[-5]
    assert damaged["phy_offset"] // SEGMENT == rows[-1]["phy_offset"] // SEGMENT
    overwrite(path, damaged["phy_offset"], b"\0\0\0\1")
    assert [row["phy_offset"] for row in read(path, 1000)] == [row["phy_offset"] for row in rows if row != damaged]
    with pytest.raises(CorruptionError, match="BAD_SIZE"):
        read(path, 1000, corrupt="fail")


def test_a_missing_segment(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    os.unlink(path / "commitlog" / f"{SEGMENT:020d}")
    _, pieces = pieces_of(path, 5000)
    assert [piece for piece in pieces if piece.missing] == [Piece(SEGMENT, 2 * SEGMENT, missing=True)]
    with pytest.raises(CorruptionError, match=f"missing.*{SEGMENT:020d}, position 0"):
        read(path, 5000, corrupt="fail")
    expected = scanned(path, list(COLUMNS))
    assert read(path, 5000) == expected
    (told,) = [row for row in read(path, 5000, ("phy_offset", "size", "_corrupt"), corrupt="report") if row["_corrupt"]]
    assert told == {
        "phy_offset": SEGMENT,
        "size": SEGMENT,
        "_corrupt": f"{path / 'commitlog' / f'{SEGMENT:020d}'}, position 0: MISSING",
    }


def test_a_segment_that_expires_after_the_plan(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    plan, pieces = pieces_of(path, 5000)
    os.unlink(path / "commitlog" / f"{0:020d}")

    def read_piece(piece, corrupt):
        batches = batches_of(plan, piece, ("phy_offset", "size", "_corrupt"), corrupt=corrupt)
        return [row for batch in batches for row in batch.to_pylist()]

    for piece in pieces[:2]:
        assert read_piece(piece, "skip") == []
        assert [(row["phy_offset"], row["size"]) for row in read_piece(piece, "report")] == [(piece.begin, 5000)]
        with pytest.raises(CorruptionError, match="missing"):
            read_piece(piece, "fail")


@pytest.mark.parametrize("mode", ["commitlog", "queue"])
@pytest.mark.parametrize("part", ["middle", "end", "end of the newest segment"])
def test_a_lost_part_is_damage(tmp_path, caplog, part, mode):
    path = tmp_path / "store"
    config = StoreConfig(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=2000, max_hash_slot_num=20, max_index_num=80
    )
    with MessageStore.open(path, config=config) as store:
        puts = [store.put_message(Message("T", bytes(300), keys=["K"])) for _ in range(60)]
    segments = sorted((path / "commitlog").iterdir())
    if part == "middle":
        gone = (int(segments[2].name), int(segments[3].name))
        segments[2].unlink()
    elif part == "end":
        gone = int(segments[-2].name), puts[-1].phy_offset + puts[-1].size
        segments[-1].unlink()
        segments[-2].unlink()
    else:
        # A segment of an older copy.
        base = int(segments[-1].name)
        gone = next(put.phy_offset for put in puts if put.phy_offset > base), puts[-1].phy_offset + puts[-1].size
        with open(segments[-1], "r+b") as file:
            file.truncate(gone[0] - base)
            file.truncate(4096)
    plan = LogPlan.of(path, config, ends=True)
    assert plan.lost[-1][0] == gone[0]
    left = [put.phy_offset for put in puts if not gone[0] <= put.phy_offset < gone[1]]
    schema = spark_arrow_schema(("phy_offset", "size", "_corrupt"))
    pieces = plan.pieces(5000) if mode == "commitlog" else list(queue_pieces(plan, Selection(), 5000))
    read_piece = piece_batches if mode == "commitlog" else queue_piece_batches

    def read_all(corrupt):
        options = ReadOptions(plan.root, corrupt=corrupt)
        found = [read_piece(ReadJob.of(plan, options, schema), piece) for piece in pieces]
        return [row for batches in found for batch in batches for row in batch.to_pylist()]

    with pytest.raises(CorruptionError, match=f"missing|{gone[0]}"):
        read_all("fail")
    assert [row["phy_offset"] for row in read_all("skip")] == left
    rows = read_all("report")
    assert [row["phy_offset"] for row in rows if row["_corrupt"] is None] == left
    assert min(row["phy_offset"] for row in rows if row["_corrupt"]) == gone[0]
    plan.warn_of_lost()
    assert f"lacks phy offsets {gone[0]} to" in caplog.text


NO_FILES = {
    "a directory": lambda file: file.mkdir(),
    "a FIFO": os.mkfifo,
    "a link to a directory": lambda file: file.symlink_to(file.parent),
    "a link to nowhere": lambda file: file.symlink_to(file.parent / "nothing"),
}


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_in_the_place_of_a_segment_is_damage(sound, tmp_path, kind, place):
    rows = scanned(sound, ["phy_offset"])
    path = shutil.copytree(sound, tmp_path / "store")
    before = LogPlan.of(path)
    base = before.segments[place]
    segment = path / "commitlog" / f"{base:020d}"
    segment.unlink()
    NO_FILES[kind](segment)
    after = LogPlan.of(path, ends=True)
    left = [row["phy_offset"] for row in rows if not base <= row["phy_offset"] < base + SEGMENT]
    # True if it appeared before the job was planned.
    for plan in (before, after):

        def read_all(plan=plan, **options):
            columns = ("phy_offset", "size", "_corrupt")
            found = [batches_of(plan, piece, columns, **options) for piece in plan.pieces(5000)]
            return [row for batches in found for batch in batches for row in batch.to_pylist()]

        with pytest.raises(CorruptionError, match=f"missing.*{base:020d}, position"):
            read_all(corrupt="fail")
        assert [row["phy_offset"] for row in read_all(corrupt="skip")] == left
        found = read_all(corrupt="report")
        assert [row["phy_offset"] for row in found if row["_corrupt"] is None] == left
        told = [row for row in found if row["_corrupt"]]
        assert all(f"{segment}, position " in row["_corrupt"] and "MISSING" in row["_corrupt"] for row in told)
        assert told[0]["phy_offset"] == base
        end = base + SEGMENT if plan is after else min(base + SEGMENT, before.end)
        assert sum(row["size"] for row in told) == end - base


def test_what_is_no_file_and_stands_in_no_place_of_a_segment_says_nothing(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    plan = LogPlan.of(path)
    last = plan.segments[-1]
    assert plan.end < last + SEGMENT
    # A file after a segment that is not full never had messages.
    places = (last + SEGMENT, last + 7 * SEGMENT, 2**62, 1)
    for name in [*(f"{place:020d}" for place in places), "notes"]:
        (path / "commitlog" / name).mkdir()
    assert LogPlan.of(path, ends=True) == LogPlan.of(path) == plan


def test_wrong_geometry_and_truncated_files(sound, tmp_path, caplog):
    with pytest.raises(GeometryError, match=r"16384 bytes where the configuration says 8192.*0{20}, position 8192"):
        LogPlan.of(sound, StoreConfig(mapped_file_size_commit_log=8192))
    path = shutil.copytree(sound, tmp_path / "store")
    plan, pieces = pieces_of(path, 5000)
    last = plan.segments[-1]
    os.truncate(path / "commitlog" / f"{last:020d}", 5000)
    # What is left of a segment that was cut short is read, and a plan says that it was.
    whole = [row["phy_offset"] for row in read(sound, 5000, ("phy_offset",))]
    left = [offset for offset in whole if offset < last + 5000]
    caplog.clear()
    found = [row["phy_offset"] for row in read(path, 5000, ("phy_offset",))]
    assert len(whole) > len(found) > len(whole) // 2 and found in (left, left[:-1])
    assert f"{last:020d}: the file has 5000 bytes" in caplog.text and "cut short" in caplog.text
    # A task of a plan that was made before finds damage.
    with pytest.raises(CorruptionError):
        [list(batches_of(plan, piece)) for piece in pieces]
    skipped = [batch for piece in pieces for batch in batches_of(plan, piece, ("phy_offset",), corrupt="skip")]
    assert [row["phy_offset"] for batch in skipped for row in batch.to_pylist()] == found
    with pytest.raises(StoreError, match="does not exist"):
        LogPlan.of(tmp_path / "nothing")


def test_the_end_is_that_of_the_plan(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=small_config()) as store:
        store.put_messages([message for message, _ in messages(20)])
        plan, pieces = pieces_of(path, 2000)
        store.put_messages([message for message, _ in messages(20, 20)])
        numbers = []
        for piece in pieces:
            for batch in batches_of(plan, piece, ["body"]):
                numbers += [int(body[8:14]) for body in batch.column("body").to_pylist()]
        assert numbers == list(range(20))
        # A record that is still being written is not there yet.
        before = LogPlan.of(path)
    overwrite(path, before.end, struct.pack(">ii", 200, -626843481))
    assert LogPlan.of(path).end == before.end


def test_pieces_cut_at_multiples_within_segments(sound):
    plan = LogPlan.of(sound)
    for size in (1, 1000, 5000, SEGMENT - 1, SEGMENT, SEGMENT + 1):
        pieces = plan.pieces(size) if size > 1 else plan.pieces(1, 0, 100)
        assert pieces[0].begin == 0
        assert all(a.end == b.begin for a, b in itertools.pairwise(pieces))
        assert all(0 < piece.end - piece.begin <= size for piece in pieces)
        assert all((piece.end - 1) // SEGMENT == piece.begin // SEGMENT for piece in pieces)
    assert plan.pieces(10**9, 100, 20000) == [Piece(100, SEGMENT), Piece(SEGMENT, 20000)]
    assert plan.pieces(10**9, 10**9) == plan.pieces(10**9, 50, 50) == []


def test_any_range_of_offsets(sound):
    # A range takes the records that begin in it, also where it does not begin at one.
    rows = scanned(sound, list(COLUMNS))
    plan = LogPlan.of(sound)
    dice = random.Random(1)
    for _ in range(30):
        begin, end = sorted((dice.randrange(plan.end), dice.randrange(plan.end)))
        got = []
        for piece in plan.pieces(3000, begin, end):
            for batch in batches_of(plan, piece):
                got += batch.to_pylist()
        assert got == [row for row in rows if begin <= row["phy_offset"] < end]


# ---------------------------------------------------------------------------------------------------------------- queues


def test_pieces_of_queues(sound):
    plan = LogPlan.of(sound)
    with MessageStore.open(sound, read_only=True) as store:
        for size in (1, 3000, 10**9):
            pieces = list(queue_pieces(plan, Selection(), size))
            rows = {}
            for piece in pieces:
                for batch in queue_piece_batches(
                    ReadJob.of(plan, ReadOptions(str(sound)), spark_arrow_schema(COLUMNS)), piece
                ):
                    rows.setdefault((piece.topic, piece.queue_id), []).extend(batch.to_pylist())
            assert sorted(rows) == [(topic, number) for topic in store.topics() for number in store.queue_ids(topic)]
            for (topic, number), got in rows.items():
                assert got == store.get_table(topic, number, columns=COLUMNS).to_pylist()
        chosen = list(queue_pieces(plan, Selection(topics=("Stock",), queue_ids=(1,)), 3000))
        assert {(piece.topic, piece.queue_id) for piece in chosen} == {("Stock", 1)}


@pytest.mark.parametrize("name", ["store.killed", "lost", "double-separate-lmq", "batch"])
def test_pieces_of_queues_in_rocksdb(name, tmp_path):
    pytest.importorskip("rocksdict")
    root = rocksdb_stores.unpack(name, tmp_path)
    before = golden.tree(root)
    plan = LogPlan.of(root)
    with MessageStore.open(root, read_only=True) as store:
        rows = {}
        for piece in queue_pieces(plan, Selection(), 100_000):
            for batch in queue_piece_batches(
                ReadJob.of(plan, ReadOptions(str(root)), spark_arrow_schema(COLUMNS)), piece
            ):
                rows.setdefault((piece.topic, piece.queue_id), []).extend(batch.to_pylist())
        assert sorted(rows) == [(topic, number) for topic in store.topics() for number in store.queue_ids(topic)]
        for (topic, number), got in rows.items():
            assert got == store.get_table(topic, number, columns=COLUMNS).to_pylist()
    assert golden.tree(root) == before


def test_units_that_a_database_does_not_have_any_more_are_named(tmp_path):
    pytest.importorskip("rocksdict")
    root = rocksdb_stores.unpack("store.killed", tmp_path)
    plan = LogPlan.of(root)

    def told(piece):
        chosen, schema = ReadOptions(str(root), mode="queue", corrupt="report"), spark_arrow_schema(["_corrupt"])
        found = queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
        texts = [row["_corrupt"] for batch in found for row in batch.to_pylist()]
        return texts.count(None), [text.partition(": MISSING")[2] for text in texts if text]

    assert told(QueuePiece("Orders", 3, 410, 430)) == (8, [", queue offsets 418 to 429 of Orders/3"])
    assert told(QueuePiece("Batches", 0, 0, 70)) == (60, [", queue offsets 60 to 69 of Batches/0"])
    assert told(QueuePiece("None", 0, 0, 70)) == (0, [", queue offsets 0 to 69 of None/0"])
    # The log begins with the record of queue offset 13.
    assert told(QueuePiece("Orders", 0, 0, 20)) == (7, 13 * [""])


def test_a_unit_whose_record_is_damaged(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    row = scanned(path, ["phy_offset", "size"])[4]
    overwrite(path, row["phy_offset"] + 4, b"\0\0\0\0")
    plan = LogPlan.of(path)
    (piece,) = queue_pieces(plan, ORDERS, 10**9)

    def rows(**options):
        chosen = ReadOptions(str(path), mode="queue", **options)
        schema = spark_arrow_schema(["phy_offset", "size", "_corrupt"])
        batches = queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
        return [each for batch in batches for each in batch.to_pylist()]

    with pytest.raises(CorruptionError, match=f"position {row['phy_offset'] % SEGMENT}"):
        rows()
    told = [each for each in rows(corrupt="report") if each["_corrupt"]]
    assert [(each["phy_offset"], each["size"]) for each in told] == [(row["phy_offset"], row["size"])]
    assert len(rows(corrupt="skip")) == len(rows(corrupt="report")) - 1


def queue_files(path, topic="Orders", queue_id=0):
    directory = path / "consumequeue" / topic / str(queue_id)
    return [directory / name for name in sorted(os.listdir(directory))]


def as_directory(file):
    file.unlink()
    file.mkdir()


# How files of a queue go between the plan and the reading, and the queue offsets that have no unit then; 20 are in a
# file, the queue of the test has 66.
GONE = {
    "retention": (lambda files: [file.unlink() for file in files[:2]], [(0, 40)]),
    "a file in the middle": (lambda files: files[1].unlink(), [(20, 40)]),
    "the newest files": (lambda files: [file.unlink() for file in files[2:]], [(40, 66)]),
    "every file": (lambda files: [file.unlink() for file in files], [(0, 66)]),
    "the folder": (lambda files: shutil.rmtree(files[0].parent), [(0, 66)]),
    "cut short": (lambda files: os.truncate(files[1], 100), [(25, 40)]),
    "the newest cut short": (lambda files: os.truncate(files[3], 60), [(63, 66)]),
    "no bytes": (lambda files: os.truncate(files[0], 0), [(0, 20)]),
    "a directory": (lambda files: as_directory(files[2]), [(40, 60)]),
    "a lost page": (lambda files: files[1].write_bytes(files[1].read_bytes()[:200] + bytes(200)), [(30, 40)]),
    "two of them": (lambda files: [file.unlink() for file in files[::2]], [(0, 20), (40, 60)]),
}


@pytest.mark.parametrize("how", GONE)
def test_units_that_go_after_the_plan_are_named(sound, tmp_path, caplog, how):
    path = shutil.copytree(sound, tmp_path / "store")
    plan = LogPlan.of(path)
    change, gone = GONE[how]
    columns = ("queue_offset", "body")
    with MessageStore.open(path, read_only=True) as store:
        table = store.get_table("Orders", 0, columns=columns).to_pylist()
    assert len(table) == 66
    pieces_by_size = [list(queue_pieces(plan, ORDERS, size)) for size in (3000, 10**9)]
    change(queue_files(path))
    for pieces in pieces_by_size:

        def read_all(*more, pieces=pieces, **options):
            chosen = ReadOptions(str(path), mode="queue", **options)
            schema = spark_arrow_schema((*columns, *more))
            return [
                row
                for piece in pieces
                for batch in queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
                for row in batch.to_pylist()
            ]

        said = rf"(?s)queue offsets? {gone[0][0]}\b.*Orders/0.*Plan the job again.*corrupt="
        with pytest.raises(CorruptionError, match=said):
            read_all()
        # What is read and what is named is what was planned.
        left = [row for row in table if not any(first <= row["queue_offset"] < end for first, end in gone)]
        caplog.clear()
        assert read_all(corrupt="skip") == left
        said = "".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert f"queue offsets {gone[0][0]} to" in said and "of Orders/0: passed over" in said
        found = read_all("topic", "queue_id", "phy_offset", "_corrupt", corrupt="report")
        assert [{name: row[name] for name in columns} for row in found if row["_corrupt"] is None] == left
        told = [row for row in found if row["_corrupt"] is not None]
        named = []
        for row in told:
            assert (row["topic"], row["queue_id"], row["body"], row["phy_offset"]) == ("Orders", 0, None, None)
            name = re.compile(r": MISSING, queue offsets? (\d+)(?: to (\d+))? of Orders/0$")
            first, last = name.search(row["_corrupt"]).groups()
            assert row["queue_offset"] == int(first)
            named += range(int(first), int(last or first) + 1)
            if how not in ("every file", "the folder"):
                base = int(first) * 20 // 400 * 400
                assert f"Orders/0/{base:020d}, position {int(first) * 20 - base}: " in row["_corrupt"]
        assert named == [number for first, end in gone for number in range(first, end)]


@pytest.mark.parametrize("number", [25, 40, 65])
def test_a_unit_that_was_cut_in_its_tags_code_is_not_taken_for_one_of_other_tags(sound, tmp_path, number):
    path = shutil.copytree(sound, tmp_path / "store")
    plan = LogPlan.of(path)
    (piece,) = queue_pieces(plan, ORDERS, 10**9)
    rows = scanned(sound, ["tags"], topic="Orders", queue_id=0)
    tags = rows[number - 1]["tags"]
    if tags is None:
        number, tags = number - 1, rows[number - 2]["tags"]
    # The unit before that number loses all but the first byte of its tags code.
    os.truncate(queue_files(path)[(number - 1) // 20], (number - 1) % 20 * 20 + 13)
    chosen = ReadOptions(str(path), mode="queue", selection=Selection(tags=(tags,)), corrupt="skip")
    schema = spark_arrow_schema(["queue_offset"])
    found = queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
    got = [row["queue_offset"] for batch in found for row in batch.to_pylist()]
    lost = range(number, -(-number // 20) * 20)
    assert got == [at for at, row in enumerate(rows) if row["tags"] == tags and at not in lost]


def lose_unit(file):
    file.write_bytes(file.read_bytes()[:46] + bytes(46) + file.read_bytes()[92:])


def jump(files):
    # As where a recovery went on after damage: the units from the seventh on say queue offsets that are 5 higher.
    for number in range(6, 10):
        with files[number // 3].open("r+b") as file:
            pos = number % 3 * 46
            file.seek(pos + 28)
            file.write(struct.pack(">q", 2 * number + 5))


GONE_BATCHES = {
    "retention": (lambda files: files[0].unlink(), [(0, 6)]),
    "a file in the middle": (lambda files: files[1].unlink(), [(6, 12)]),
    "the newest files": (lambda files: [file.unlink() for file in files[2:]], [(12, 20)]),
    "two of them": (lambda files: [file.unlink() for file in files[::2]], [(0, 6), (12, 18)]),
    "cut short": (lambda files: os.truncate(files[1], 46), [(8, 12)]),
    "a lost unit": (lambda files: lose_unit(files[1]), [(8, 10)]),
}


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """A store with a batch queue of ten records of two messages each, three in a file."""
    path = tmp_path_factory.mktemp("batches") / "store"
    with MessageStore.open(path, config=small_config(mapper_file_size_batch_consume_queue=3 * 46)) as store:
        for number in range(10):
            store.put_message(Message("Inner", b"%d" % number, sys_flag=0xC0, properties={"INNER_NUM": "2"}))
    return path


@pytest.mark.parametrize("how", GONE_BATCHES)
def test_units_of_a_batch_queue_that_go_after_the_plan_are_named(batches, tmp_path, how):
    path = shutil.copytree(batches, tmp_path / "store")
    plan = LogPlan.of(path)
    change, gone = GONE_BATCHES[how]
    (piece,) = queue_pieces(plan, Selection(), 10**9)
    directory = path / "batchconsumequeue" / "Inner" / "0"
    change([directory / name for name in sorted(os.listdir(directory))])

    def read_all(**options):
        chosen = ReadOptions(str(path), mode="queue", **options)
        schema = spark_arrow_schema(["queue_offset", "body", "_corrupt"])
        found = queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
        return [row for batch in found for row in batch.to_pylist()]

    with pytest.raises(CorruptionError, match=f"queue offsets {gone[0][0]} to {gone[0][1] - 1} of Inner/0"):
        read_all()
    left = [number for number in range(0, 20, 2) if not any(first <= number < end for first, end in gone)]
    assert [(row["queue_offset"], row["body"]) for row in read_all(corrupt="skip")] == [
        (number, b"%d" % (number // 2)) for number in left
    ]
    told = [row["_corrupt"].partition(": ")[2] for row in read_all(corrupt="report") if row["_corrupt"]]
    assert told == [f"MISSING, queue offsets {first} to {end - 1} of Inner/0" for first, end in gone]
    # A table goes on after what is lost as well.
    with MessageStore.open(path, config=plan.config, read_only=True) as store:
        assert store.get_table("Inner", 0, columns=["queue_offset"]).column(0).to_pylist() == left


@pytest.mark.parametrize("unit", [0, 1, 2])
def test_a_batch_unit_that_lost_its_base_hides_no_other(batches, tmp_path, unit):
    # Cut after its phy offset, size and tags code it says queue offset 0, which the search for others comes by.
    path = shutil.copytree(batches, tmp_path / "store")
    plan = LogPlan.of(path)
    (piece,) = queue_pieces(plan, Selection(), 10**9)
    os.truncate(path / "batchconsumequeue" / "Inner" / "0" / f"{138:020d}", unit * 46 + 20)
    chosen = ReadOptions(str(path), mode="queue", corrupt="report")
    schema = spark_arrow_schema(["queue_offset", "_corrupt"])
    found = queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
    rows = [row for batch in found for row in batch.to_pylist()]
    read = [*range(0, 6 + 2 * unit + 2, 2), *range(12, 20, 2)]
    assert [row["queue_offset"] for row in rows if row["_corrupt"] is None] == read
    told = [row["_corrupt"].partition("queue offsets ")[2] for row in rows if row["_corrupt"]]
    # Of the last message of the unit nobody knows.
    assert told == ([] if unit == 2 else [f"{6 + 2 * unit + 1} to 11 of Inner/0"])
    with MessageStore.open(path, config=plan.config, read_only=True) as store:
        for start in range(0, 21):
            table = store.get_table("Inner", 0, start, columns=["queue_offset"]).column(0).to_pylist()
            assert [at for at in table if at >= start] == [at for at in read if at >= start]


def test_queue_offsets_that_a_batch_queue_has_no_place_for_are_not_gone(batches, tmp_path):
    path = shutil.copytree(batches, tmp_path / "store")
    directory = path / "batchconsumequeue" / "Inner" / "0"
    jump([directory / name for name in sorted(os.listdir(directory))])
    plan = LogPlan.of(path)
    (piece,) = queue_pieces(plan, Selection(), 10**9)
    assert (piece.begin, piece.end) == (0, 25)
    chosen, schema = ReadOptions(str(path), mode="queue", corrupt="report"), spark_arrow_schema(["body", "_corrupt"])
    found = queue_piece_batches(ReadJob.of(plan, chosen, schema), piece)
    rows = [row for batch in found for row in batch.to_pylist()]
    assert [row["body"] for row in rows] == [b"%d" % number for number in range(10)]
    assert all("MISSING" not in (row["_corrupt"] or "") for row in rows)


def test_a_count_of_damage_needs_no_column(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    plan = LogPlan.of(path)
    (piece,) = queue_pieces(plan, ORDERS, 10**9)
    queue_files(path)[0].unlink()
    chosen = ReadOptions(str(path), mode="queue", corrupt="report")
    batches = queue_piece_batches(ReadJob.of(plan, chosen, spark_arrow_schema(())), piece)
    assert sum(batch.num_rows for batch in batches) == 46 + 1


def test_what_goes_in_front_of_what_is_wanted_is_not_missed(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    plan = LogPlan.of(path)
    rows = scanned(path, ["phy_offset", "queue_offset"], topic="Orders", queue_id=0)
    begin = rows[45]["phy_offset"]
    (piece,) = queue_pieces(plan, replace(ORDERS, begin_phy_offset=begin), 10**9)
    assert piece == QueuePiece("Orders", 0, 45, 66)
    for file in queue_files(path)[:2]:
        file.unlink()
    chosen = ReadOptions(str(path), mode="queue", selection=Selection(begin_phy_offset=begin))
    batches = queue_piece_batches(ReadJob.of(plan, chosen, spark_arrow_schema(["queue_offset"])), piece)
    assert [row["queue_offset"] for batch in batches for row in batch.to_pylist()] == list(range(45, 66))
    # Nothing before the first one is planned.
    assert not list(queue_pieces(plan, replace(ORDERS, begin_phy_offset=10**9), 10**9))


def test_pre_fill_units_are_not_gone(sound, tmp_path):
    from rmqstore._core import PRE_FILL_SIZE

    path = shutil.copytree(sound, tmp_path / "store")
    file = queue_files(path)[1]
    file.write_bytes(struct.pack(">qiq", 0, PRE_FILL_SIZE, 0) * 20)
    plan = LogPlan.of(path)
    (piece,) = queue_pieces(plan, ORDERS, 10**9)
    chosen = ReadOptions(str(path), mode="queue")
    batches = queue_piece_batches(ReadJob.of(plan, chosen, spark_arrow_schema(["queue_offset"])), piece)
    found = [row["queue_offset"] for batch in batches for row in batch.to_pylist()]
    assert found == [*range(20), *range(40, 66)]


def test_what_a_filter_leaves_out_of_a_queue_is_no_damage(sound):
    plan = LogPlan.of(sound)
    (piece,) = queue_pieces(plan, ORDERS, 10**9)
    for choice in ({}, {"begin": START + 100_000}, {"tags": ("US",)}):
        want = scanned(sound, ["body"], topic="Orders", queue_id=0, **choice)
        chosen = ReadOptions(str(sound), mode="queue", selection=Selection(**choice))
        batches = queue_piece_batches(ReadJob.of(plan, chosen, spark_arrow_schema(["body"])), piece)
        assert [row for batch in batches for row in batch.to_pylist()] == want
        assert 30 < len(want) < 70


# --------------------------------------------------------------------------------------------------------------- options


def test_options():
    parsed = ReadOptions.parse(
        {
            "path": "file:/store", "topic": "A, B", "queue_id": "0,3", "tags": "X || Y", "partition_bytes": "64m",
            "begin": "2023-11-14T22:13:20Z", "end": "1700000000001", "decode_body": "False",
            "mode": "queue", "corrupt": "REPORT", "columns": "body,_corrupt", "max_bytes_per_trigger": "1g",
        }
    )  # fmt: skip
    assert parsed == ReadOptions(
        "/store", ("body", "_corrupt"), Selection(("A", "B"), (0, 3), ("X", "Y"), None, START, START + 1), 64 << 20,
        decode_body=False, mode="queue", corrupt="report", max_bytes_per_trigger=1 << 30,
    )  # fmt: skip
    assert ReadOptions.parse({"path": "file:///store", "tags": "*"}) == ReadOptions("/store")


def test_times_between_two_milliseconds_go_inwards():
    parsed = ReadOptions.parse(
        {"path": "/store", "begin": "2023-11-14T22:13:20.0004+00:00", "end": "2023-11-14T22:13:20.0096+00:00"}
    )
    assert parsed.selection.times == (START + 1, START + 9)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topics": "A"}, "there is no option 'topics'"),
        ({"partition_bytes": "0"}, "at least 1 byte"),
        ({"partition_bytes": "big"}, "134217728 or 128m"),
        ({"queue_id": "-1"}, "0 or more"),
        ({"queue_id": "0,2147483648"}, "2147483647 or less"),
        ({"begin": "1700000000"}, "begin .*looks like seconds"),
        ({"end": "1700000000"}, "end .*looks like seconds"),
        ({"corrupt": "ignore"}, "fail, report or skip"),
        ({"mode": "index"}, "commitlog or queue"),
        ({"begin": "yesterday"}, "ms since the epoch"),
        ({"begin": "2023-11-14T22:13:20"}, "offset from UTC"),
        ({"decode_body": "1"}, "true or false"),
        ({"columns": "bodies"}, "there is no column 'bodies'"),
        ({"path": ""}, "no store is given"),
        ({"path": "hdfs://node/store"}, "mount what is elsewhere"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(StoreError, match=message):
        ReadOptions.parse({"path": "/store", **options})


def test_planning_needs_no_pyspark():
    statements = (
        "import sys\n"
        "sys.modules['pyspark'] = None\n"
        "import rmqstore.spark, rmqstore.spark.plan, rmqstore.spark.options, rmqstore.spark.batches\n"
        "try:\n"
        "    rmqstore.spark.register\n"
        "except rmqstore.MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "pip install 'rmqstore[spark]'" in ran.stdout


def test_the_layout_of_spark():
    schema = spark_arrow_schema(["keys", "store_timestamp", "_corrupt"])
    assert str(schema.field("keys").type) == "list<element: string>"
    assert str(schema.field("store_timestamp").type) == "timestamp[us, tz=UTC]"
    assert str(schema.field("_corrupt").type) == "string"


@pytest.mark.parametrize("mode", ["log", "queue", "query"])
def test_times_that_microseconds_cannot_hold_are_the_nearest_they_can(tmp_path, mode):
    most = 2**63 // 1000
    times = [0, 1_700_000_000_123, -5, most, most + 1, 2**63 - 1, -most - 1, -(2**63)]
    with MessageStore.open(tmp_path, config=small_config()) as store:
        store.put_messages(
            [Message("Orders", b"x", keys=[f"k{i}"], born_timestamp=time) for i, time in enumerate(times)]
        )
    want = [max(min(time, most), -most) * 1000 for time in times]
    plan = LogPlan.of(tmp_path)
    names = ["born_timestamp", "keys"]
    if mode == "log":
        found = [batch for piece in plan.pieces() for batch in batches_of(plan, piece, names)]
    elif mode == "queue":
        found = [
            batch
            for piece in queue_pieces(plan, Selection(), 4096)
            for batch in queue_piece_batches(ReadJob.of(plan, ReadOptions(plan.root), spark_arrow_schema(names)), piece)
        ]
    else:
        with MessageStore.open(tmp_path, read_only=True) as store:
            table = store.query_table([f"k{i}" for i in range(len(times))], topic="Orders", columns=names)
        found = [in_spark_layout(batch.select(names), spark_arrow_schema(names)) for batch in table.to_batches()]
    got = []
    for batch in found:
        batch.validate(full=True)
        assert batch.schema.equals(spark_arrow_schema(names))
        assert str(batch.schema.field("born_timestamp").type) == "timestamp[us, tz=UTC]"
        got += zip(
            batch.column("born_timestamp").view("int64").to_pylist(), batch.column("keys").to_pylist(), strict=True
        )
    assert sorted(got, key=lambda row: row[1]) == [(time, [f"k{i}"]) for i, time in enumerate(want)]


READ_A_PIECE = """
import resource, sys
from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
from rmqstore.spark.options import ReadOptions
from rmqstore.spark.plan import LogPlan

path, partition_bytes = sys.argv[1], int(sys.argv[2])
plan = LogPlan.of(path)
piece = plan.pieces(partition_bytes)[-2]
next(piece_batches(ReadJob.of(plan, ReadOptions(path), spark_arrow_schema(["body"])), plan.pieces(4096)[0]), None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = 0
schema = spark_arrow_schema(["topic", "body", "keys"])
for batch in piece_batches(ReadJob.of(plan, ReadOptions(path), schema), piece):
    size += batch.nbytes
print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is in other units elsewhere")
def test_memory_of_a_task_follows_its_piece_and_not_the_store(tmp_path):
    peaks = {}
    for segments in (2, 12):
        path = tmp_path / str(segments)
        with MessageStore.open(path, config=small_config(mapped_file_size_commit_log=4 << 20)) as store:
            batch = [Message("Orders", b"x" * 2000, keys=[f"K{i}"]) for i in range(100)]
            while len(store.commit_log.files) < segments:
                store.put_messages(batch)
        command = [sys.executable, "-c", READ_A_PIECE, str(path), str(2 << 20)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        size, peaks[segments] = map(int, said.split())
        assert size > 1 << 20
    # The piece's pages, which are mapped, and a few batches; the larger store has six times as many bytes.
    assert max(peaks.values()) < 16 << 20 and abs(peaks[12] - peaks[2]) < 8 << 20, peaks
