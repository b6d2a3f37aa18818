"""Power loss: whatever the disk had not been told to keep is gone, in any combination, and no acknowledged message is.

A child runs under the layer of `faults`, which logs what is forced to the disk, and is killed at any call; `faults.power`
then makes the directories that a power loss at that moment may leave: pages as they were at any time since they were
forced, changes of names done or not.  What holds: every message that was acknowledged under SYNC_FLUSH, or before a
`flush` that returned, is there by offset, queue and key; every message that is there was put; queues and index are what
the log gives.  Pages are as small as the files are; with 4096 bytes, a real page, the files are larger.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil

import faults
import oracle
import pytest
import test_crash
from faults import fixtures
from faults.fixtures import emptied
from faults.power import Disk
from test_crash import changes, check_bytes, check_readable, config_of, geometry
from test_faults import blame, check_offsets, finish_rebuild
from test_model import content

from rmqstore import MessageStore

#: Larger files, of whole pages and of many messages.
LARGE = {
    "mapped_file_size_commit_log": 16384,
    "mapped_file_size_consume_queue": 4000,
    "mapper_file_size_batch_consume_queue": 4600,
    "mapped_file_size_consume_queue_ext": 8192,
    "max_hash_slot_num": 500,
    "max_index_num": 400,
}

copy, root, server, thorough = fixtures.copy, fixtures.root, fixtures.server, fixtures.thorough


def records_in(root: str) -> list[oracle.Record]:
    return oracle.records_of(oracle.segments(oracle.read_files(root)))


def queues_in(root: str, folder: str) -> set[tuple[str, str]]:
    path = os.path.join(root, folder)
    topics = os.listdir(path) if os.path.isdir(path) else []
    return {(topic, queue_id) for topic in topics for queue_id in os.listdir(os.path.join(path, topic))}


def check_lost(
    copy: str, geo: dict, outcome: faults.Outcome, killed: dict[int, oracle.Record], earlier: list[tuple] = ()
) -> str:
    """Hold what is promised after a power loss.

    `killed` are the records that the log held before it, `earlier` what was promised by processes before the last one.
    """
    finish_rebuild(copy, geo)
    for topic, queue_id in queues_in(copy, "consumequeue_ext") - queues_in(copy, "consumequeue"):
        # An extension that was made, but whose queue was not: nothing is in it, and nobody looks at it.
        folder = os.path.join(copy, "consumequeue_ext", topic, queue_id)
        if not any(any(data) for data in oracle.read_files(folder).values()):
            shutil.rmtree(folder)
    sure = [*earlier, *faults.acknowledged_of(outcome.said, durable=True)]
    with_crc = geo["enabled_append_prop_crc"]
    left = list(itertools.takewhile(lambda each: each.property_crc_is_sound or not with_crc, records_in(copy)))
    offsets = {record.phy_offset for record in left}
    missing = [each for each in sure if each[3] not in offsets]
    assert not missing, f"{len(missing)} of {len(sure)} messages that were promised are not in the log: {missing[:3]}"
    check_offsets(copy, outcome)
    # Without property CRC the format cannot tell that bytes outside of a body are gone; then only what was promised counts.
    unsound = [each for each in left if each.phy_offset not in killed or killed[each.phy_offset].raw != each.raw]
    assert not (unsound and with_crc)
    acknowledged = [*earlier, *(each for each in faults.acknowledged_of(outcome.said) if each[3] in offsets)]
    if not unsound:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_crash, "check_bytes", check_units)
            answer = test_crash.check_recovered(copy, geo, acknowledged, refusal_allowed=True)
        if answer == "recovered":
            check_invented(copy, geo, killed)
            return answer
        check_refusal(copy, left, killed)
    for recovery in ("truncate", "skip"):
        other = f"{copy}.{recovery}"
        shutil.copytree(copy, other)
        try:
            for _ in range(2):
                with MessageStore.open(other, config=config_of(geo), recovery=recovery) as store:
                    check_readable(store, sure if unsound else acknowledged)
            check_invented(other, geo, killed)
        finally:
            shutil.rmtree(other)
    return "unsound" if unsound else "refused"


def check_units(root: str, geo: dict) -> None:
    """`check_bytes`, but a tags code may stand in a unit itself where the log gives it a place in the extension.

    An extension is only appended to, so that a hole in front of what was kept of it cannot be filled; readers take the
    tags code from either place.
    """
    if not geo["enable_consume_queue_ext"]:
        check_bytes(root, geo)
        return
    files = oracle.read_files(root)
    got, expected = (meaning(each) for each in (files, oracle.rebuild(files, geo)))
    changed = changes(expected, got)
    assert not changed, f"not what the log gives: {changed}"


def meaning(files: dict[str, bytes]) -> dict:
    """The files of queues and index, those of extended queues as units with the tags code that they lead to."""
    found: dict = {}
    for path, data in oracle.comparable(files, oracle.QUEUES_AND_INDEX).items():
        kind, *queue = path.split("/")
        if kind == "consumequeue":
            extension = oracle.segments(files, "/".join(("consumequeue_ext", *queue[:-1])))
            units = [oracle.decode_unit(data, at) for at in range(0, len(data), oracle.UNIT_SIZE)]
            found[path] = [
                (unit.phy_offset, unit.size, oracle.resolve_tags_code(unit.tags_code, extension)) for unit in units
            ]
        elif kind == "index" and not any(data[:36]) and not any(data[40:]):
            continue  # The first file keeps its place when everything was cut.
        elif kind != "consumequeue_ext":
            found[path] = data
    return found


def check_invented(root: str, geo: dict, killed: dict[int, oracle.Record]) -> None:
    """Every message that is there was put: the same bytes, without property CRC the same body."""
    with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
        for message in store.messages():
            if message.corrupt or message.body == b"after":
                continue
            assert message.phy_offset in killed, f"invented at {message.phy_offset}: {content(message)}"
            record = killed[message.phy_offset]
            if geo["enabled_append_prop_crc"]:
                assert (message.topic, message.queue_id, message.queue_offset) == (
                    record.topic,
                    record.queue_id,
                    record.queue_offset,
                )
                assert (
                    dict(message.properties).items()
                    >= {name: value for name, value in record.properties.items() if name != oracle.PROP_CRC}.items()
                )
            assert message.body == record.body


def check_refusal(copy: str, left: list[oracle.Record], killed: dict[int, oracle.Record]) -> None:
    """A store may be refused only if there are bytes of the log after a hole."""
    end = left[-1].end if left else 0
    behind = False
    for base, data in oracle.segments(oracle.read_files(copy)).items():
        for phy_offset in killed:
            if end < phy_offset and 0 <= phy_offset - base < len(data):
                behind |= oracle.check_record(data, phy_offset - base, phy_offset=phy_offset) is not None
        # A later segment that holds anything says that the log went on.
        behind |= base > end and any(data)
    assert behind, f"refused, but nothing of the log is behind {end}"


def lose(disk: Disk, target: str, dice: random.Random, **loss) -> list[str]:
    lost = disk.lose(emptied(target), dice, **loss)
    if os.path.exists(os.path.join(target, "lock")):
        # Its bytes mean nothing and are written at each opening, also at one that is refused then.
        with open(os.path.join(target, "lock"), "wb") as file:
            file.write(b"lock")
    return lost


def losses(dice: random.Random, rounds: int, pages: tuple[int, ...]):
    """The worst that can be, then by the dice."""
    yield {"loss": 1.0, "page": pages[0], "names": "none"}
    for _ in range(rounds):
        yield {
            "loss": dice.choice((0.05, 0.3, 0.7, 1.0)),
            "page": dice.choice(pages),
            "names": dice.choice(("none", "all", "some", "some", "first")),
        }


def lose_power(
    server, root: str, copy: str, seed: int, *, name: str, flush_disk_type: str, total: int, rounds: int = 3,
    scenario: str = "life", sizes: dict | None = None, pages: tuple[int, ...] = (64, 512), again: bool = False,
) -> list[str]:  # fmt: skip
    """Kill a child at a call by the dice and lose what was not forced, in several ways; what became of each.

    With `again` the store that is left is opened by a child that is killed as well, and the power is lost once more.
    """
    dice = random.Random(seed)
    geo = {**geometry(name), **(sizes or {})}
    disk = Disk(emptied(root))
    case = {"geometry": name, "options": {"flush_disk_type": flush_disk_type}, "data": True}
    number, action = dice.randrange(1, total + 1), dice.choice(("kill before", "kill after"))
    outcome = server.run(scenario, root, action=action, number=number, values={"sizes": sizes or {}}, **case)
    assert outcome.killed or outcome.ended, outcome
    disk.replay(outcome.calls)
    killed = {record.phy_offset: record for record in records_in(root)}
    answers = []
    for loss in losses(dice, rounds, pages):
        lost = lose(disk, copy, dice, **loss)
        where = f"names that were lost: {lost}\n" + blame(
            outcome, seed=seed, number=number, action=action, name=name, flush_disk_type=flush_disk_type,
            sizes=bool(sizes), scenario=scenario, **loss,
        )  # fmt: skip
        try:
            if again:
                finish_rebuild(copy, geo)
                second, records = Disk(copy), {**killed}
                values = {"sizes": sizes or {}, "recovery": "truncate", "later": 60_000}
                number = dice.randrange(1, 60)
                more = server.run("recovery", copy, action=action, number=number, values=values, **case)
                where += f"\nthen call {number}: {more}"
                assert more.killed or more.ended, more
                second.replay(more.calls)
                records |= {record.phy_offset: record for record in records_in(copy)}
                again_loss = {**loss, "loss": dice.choice((0.3, 1.0))}
                where += f"\nlost then: {lose(second, root, dice, **again_loss)}"
                sure = faults.acknowledged_of(outcome.said, durable=True)
                answers.append(check_lost(root, geo, more, records, sure))
            else:
                answers.append(check_lost(copy, geo, outcome, killed))
        except BaseException as error:
            raise AssertionError(f"{error}\n{where}") from error
    return answers


def calls_of(
    server, root: str, name: str, flush_disk_type: str, scenario: str = "life", sizes: dict | None = None
) -> int:
    options = {"flush_disk_type": flush_disk_type}
    whole = server.run(scenario, emptied(root), geometry=name, options=options, values={"sizes": sizes or {}})
    assert whole.ended, whole
    return whole.said[-1]["count"]


# ---------------------------------------------------------------------------------------------------------- the model


def test_what_is_not_forced_can_be_lost_and_nothing_else(server, root, copy):
    # The model itself: without a flush everything goes, after one nothing does, and without a loss nothing changes.
    for number, there in ((0, True), (1, False)):
        disk = Disk(emptied(root))
        outcome = server.run("puts", root, data=True, values={"flushes": 1 - number})
        assert outcome.killed, outcome
        disk.replay(outcome.calls)
        disk.lose(emptied(copy), random.Random(0), loss=1.0, page=64, names="none")
        assert (len(records_in(copy)) == len(records_in(root)) == 5) == there
        assert len(records_in(copy)) in (0, 5)
        disk.lose(emptied(copy), random.Random(0), loss=0.0, page=64, names="all")
        assert oracle.read_files(copy) == oracle.read_files(root)


def test_a_closed_store_has_lost_nothing(server, root, copy):
    for name in ("plain", "propcrc-ext"):
        disk = Disk(emptied(root))
        outcome = server.run("life", root, geometry=name, data=True)
        assert outcome.ended, outcome
        disk.replay(outcome.calls)
        disk.lose(emptied(copy), random.Random(0), loss=1.0, page=64, names="none")
        left, closed = oracle.read_files(copy), oracle.read_files(root)
        # The lock says nothing; what a rebuild left behind and a next segment that nobody wrote to may stay or go.
        for files in (left, closed):
            files.pop("lock")
        left = {path: data for path, data in left.items() if not path.startswith(".rmqstore-")}
        assert left == closed


# ------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("flush_disk_type", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_power_lost_at_any_call(server, root, copy, thorough, name, flush_disk_type):
    total = calls_of(server, root, name, flush_disk_type)
    answers = []
    for seed in range(1000 if thorough else 8):
        answers += lose_power(server, root, copy, seed, name=name, flush_disk_type=flush_disk_type, total=total)
    assert answers.count("recovered") > len(answers) // 2


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_power_lost_with_pages_of_4096_bytes(server, root, copy, thorough, name):
    case = {"name": name, "flush_disk_type": "SYNC_FLUSH", "sizes": LARGE}
    total = calls_of(server, root, **case)
    answers = []
    for seed in range(500 if thorough else 4):
        answers += lose_power(server, root, copy, seed, total=total, pages=(4096, 512), **case)
    assert answers.count("recovered") > len(answers) // 2


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_power_lost_while_threads_put(server, root, copy, thorough, name):
    # Group commit: a put returns when another thread's flush has forced its bytes.
    case = {"name": name, "flush_disk_type": "SYNC_FLUSH", "scenario": "threads"}
    total = calls_of(server, root, **case)
    answers = []
    for seed in range(500 if thorough else 6):
        answers += lose_power(server, root, copy, seed, total=total, **case)
    assert answers.count("recovered") > len(answers) // 2


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_power_lost_again_during_recovery(server, root, copy, thorough, name):
    case = {"name": name, "flush_disk_type": "SYNC_FLUSH"}
    total = calls_of(server, root, **case)
    answers = []
    for seed in range(500 if thorough else 6):
        answers += lose_power(server, root, copy, seed, total=total, rounds=1, again=True, **case)
    assert answers.count("recovered") > len(answers) // 2
