"""A process that dies or gets an error at any system call: what was acknowledged stays, and nothing fails in silence.

Owns the cases of kill -9 at every call that changes or forces a file (a store's whole life, recovery, rebuild) and at
random moments, of every error of every call, and of real full and read-only file systems.  The children run under the
layer of `faults`; what must hold afterwards is `check_recovered` of test_crash, which compares with the oracle.
"""

from __future__ import annotations

import errno
import os
import platform
import random
import subprocess
import time

import faults
import oracle
import pytest
from faults import fixtures
from faults.fixtures import emptied
from faults.power import Disk
from test_crash import (
    SEGMENT,
    changes,
    check_readable,
    check_recovered,
    config_of,
    geometry,
    make_unclean,
    overwrite,
    without_crowded_keys,
    write_files,
)

from rmqstore import Message, MessageStore, StoreError
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.offline.rebuild import REBUILD_DIRECTORY, rebuild

FLUSH_TYPES = ("ASYNC_FLUSH", "SYNC_FLUSH")
#: Calls that this system's Python has not (`make test-portable`); others do their work.
ABSENT = [name for name, call in {"fallocate": "posix_fallocate", "fdatasync": "fdatasync"}.items() if not hasattr(os, call)]

copy, root, server, thorough = fixtures.copy, fixtures.root, fixtures.server, fixtures.thorough


def finish_rebuild(root: str, geo: dict) -> None:
    """Where a rebuild died while it swapped its files in, nobody may write until it was finished; do it."""
    config = config_of(geo)
    if not os.path.exists(os.path.join(root, REBUILD_DIRECTORY, "complete")):
        return
    before = oracle.read_files(root)
    with MessageStore.open(root, config=config, read_only=True) as store:
        assert len(list(store.messages())) == len(oracle.records_of(oracle.segments(before)))
    with pytest.raises(StoreError, match="rebuild"):
        MessageStore.open(root, config=config)
    # The bytes of the lock mean nothing; a power loss may have taken them.
    assert set(changes(before, oracle.read_files(root))) <= {"lock"}
    # With an empty mark nothing was swapped yet, and the rebuild begins again.
    marked = bool(before[f"{REBUILD_DIRECTORY}/complete"])
    assert rebuild(root, config=config).resumed == marked
    assert not os.path.exists(os.path.join(root, REBUILD_DIRECTORY))


def check_left(root: str, geo: dict, outcome: faults.Outcome, earlier: list[tuple] = ()) -> None:
    """Hold what a store promises that a dead process left; `earlier` was acknowledged to the processes before it."""
    finish_rebuild(root, geo)
    check_offsets(root, outcome)
    assert check_recovered(root, geo, [*earlier, *faults.acknowledged_of(outcome.said)]) == "recovered"
    check_offsets(root, outcome)


def check_offsets(root: str, outcome: faults.Outcome) -> None:
    sure = max((line["offset"] for line in outcome.said if line["what"] == "persist"), default=-1)
    there = ConsumerOffsets.load(os.path.join(root, "config", "consumerOffset.json")).get("group", "Orders", 0)
    assert there in (-1, 3, 7, 9)
    assert there >= sure


def blame(outcome: faults.Outcome, **case) -> str:
    where = f"killed at {outcome.calls[-1]}" if outcome.calls else "no call was made"
    return f"{case}: {where}; {outcome}"


# ------------------------------------------------------------------------------------------------------- what is seen


def test_the_layer_sees_every_kind_of_call(server, root):
    outcome = server.run("life", root)
    assert outcome.ended, outcome
    seen = {call.name for call in outcome.calls}
    # Stores are neither cut nor written to by other calls than these.  macOS has two of them not.  Instructions that write
    # to a mapping are seen only where they are asked for.
    assert seen >= set(faults.NAMES) - {"ftruncate", "photo", "store"} - set(ABSENT)
    assert not any(call.error for call in outcome.calls if call.name in ("msync", "fsync", "fdatasync", "fallocate"))
    numbers = sorted(call.number for call in outcome.calls if call.name in faults.CHANGING)
    assert numbers == list(range(1, len(numbers) + 1)) == list(range(1, outcome.said[-1]["count"] + 1))
    # A mapped file is forced where it is in the file, and every file that was made is seen by its place.
    made = {call.second for call in outcome.calls if call.name == "link"}
    forced = {call.path for call in outcome.calls if call.name == "msync"}
    assert {path for path in made if path.startswith(("/commitlog/", "/consumequeue/", "/index/"))} & forced
    assert "/checkpoint" in {call.path for call in outcome.calls if call.name == "pwrite"}


def test_a_child_dies_before_or_after_the_call_that_was_named(server, root):
    whole = server.run("life", root)
    for action, extra in (("kill before", -1), ("kill after", 0)):
        for number in (5, 40):
            outcome = server.run("life", emptied(root), action=action, number=number)
            assert outcome.killed, outcome
            calls = [call for call in outcome.calls if call.name in faults.CHANGING]
            expected = [call for call in whole.calls if call.name in faults.CHANGING][: number + extra]
            assert [call.name for call in calls][:number] == [call.name for call in expected]


# ------------------------------------------------------------------------------------------------------------ kill -9


def kills_at(total: int, want: int, thorough: bool) -> list[tuple[str, int]]:
    """(before or after, number of the call): all of them when thorough, else `want` spread evenly, both kinds."""
    every = [(action, number) for number in range(1, total + 1) for action in ("kill before", "kill after")]
    if thorough or len(every) <= want:
        return every
    return [every[at * len(every) // want] for at in range(want)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flush_disk_type", FLUSH_TYPES)
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_killed_at_every_call_of_a_life(server, root, thorough, name, flush_disk_type):
    geo, options = geometry(name), {"flush_disk_type": flush_disk_type}
    whole = server.run("life", root, geometry=name, options=options)
    assert whole.ended, whole
    total = whole.said[-1]["count"]
    cases = kills_at(total, 32, thorough)
    killed = 0
    for action, number in cases:
        outcome = server.run("life", emptied(root), geometry=name, options=options, action=action, number=number)
        # Threads of the store may make it a few calls more or less.
        assert outcome.killed or (outcome.ended and number > total * 3 // 4), outcome
        killed += outcome.killed
        try:
            check_left(root, geo, outcome)
        except BaseException as error:
            raise AssertionError(blame(outcome, action=action, number=number)) from error
    assert killed > len(cases) * 9 // 10


GROWTH = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 40_000,
    "max_hash_slot_num": 100,
    "max_index_num": 1000,
}


def growth_calls(server, root: str) -> list[faults.Call]:
    """The calls that give the queue files of the scenario "growth" their space."""
    whole = server.run("growth", root, values={"sizes": GROWTH})
    assert whole.ended, whole
    calls = [call for call in whole.calls if call.name == "fallocate"]
    grown = [call for call in calls if call.path.startswith("/consumequeue/")]
    # First in a file that has no name yet, then where it is full, and from its first byte after an opening.
    assert [(call.offset, call.size) for call in grown if "/Orders/" in call.path] == [(8192, 12288), (0, 40_000)], grown
    return [call for call in calls if call in grown or call.size == 8192]


def check_kills_at(server, root: str, calls: list[faults.Call], sizes: dict[str, int]) -> None:
    """Kill the scenario "growth" before and after each of these calls, and check what is left."""
    geo = {**geometry("plain"), **sizes}
    for call in calls:
        for action in ("kill before", "kill after"):
            outcome = server.run(
                "growth", emptied(root), values={"sizes": sizes}, action=action, number=call.number
            )
            assert outcome.killed, outcome
            try:
                check_left(root, geo, outcome)
            except BaseException as error:
                raise AssertionError(blame(outcome, action=action, number=call.number)) from error


@pytest.mark.skipif("fallocate" in ABSENT, reason="needs posix_fallocate")
def test_killed_while_a_queue_grows(server, root):
    calls = growth_calls(server, root)
    assert len(calls) == 6
    check_kills_at(server, root, calls, GROWTH)


@pytest.mark.skipif("fallocate" in ABSENT, reason="needs posix_fallocate")
def test_a_queue_that_cannot_grow_is_an_error_before_anything_is_written(server, root):
    geo = {**geometry("plain"), **GROWTH}
    for call in growth_calls(server, root):
        values = {"sizes": GROWTH, "patient": True}
        outcome = server.run(
            "growth", emptied(root), values=values, action="fail", number=call.number, error=errno.ENOSPC
        )
        assert outcome.ended, outcome
        failures = failures_of(outcome)
        assert [(line["deed"], os.strerror(errno.ENOSPC) in line["text"]) for line in failures] == [("put", True)], failures
        acknowledged = faults.acknowledged_of(outcome.said)
        log = oracle.segments(oracle.read_files(root))
        # Every other put went in, and nothing of the one that failed.
        assert len(acknowledged) == len(oracle.records_of(log)) == 15 * 250 + 1
        check_left(root, geo, outcome)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_killed_at_every_call_of_recovery_and_rebuild(server, root, thorough, name):
    geo = geometry(name)
    whole = server.run("life", root, geometry=name)
    closing = next(call.number for call in whole.calls if (call.name, call.path) == ("unlink", "/abort"))
    left = server.run("life", emptied(root), geometry=name, action="kill before", number=closing - 5)
    assert left.killed and os.path.exists(os.path.join(root, "abort"))
    earlier = faults.acknowledged_of(left.said)
    assert len(earlier) > 10
    killed_files = oracle.read_files(root)
    # The other stores have lost their queues and index, or what was in them.
    only_log = {
        path: data for path, data in killed_files.items() if path.split("/")[0] in ("commitlog", "abort", "config")
    }
    zeroed = {
        path: data if path in only_log else bytes(len(data))
        for path, data in killed_files.items()
        if path not in ("checkpoint", "rmqstore.json")
    }
    for scenario, files in (
        ("recovery", killed_files),
        ("recovery", only_log),
        ("recovery", zeroed),
        ("rebuilding", None),
    ):
        if files is None:
            write_files(emptied(root), killed_files)
            MessageStore.open(root, config=config_of(geo)).close()
            files = oracle.read_files(root)
        write_files(emptied(root), files)
        whole = server.run(scenario, root, geometry=name)
        assert whole.ended, whole
        for action, number in kills_at(whole.said[-1]["count"], 7, thorough):
            write_files(emptied(root), files)
            outcome = server.run(scenario, root, geometry=name, action=action, number=number)
            assert outcome.killed or outcome.ended, outcome
            try:
                check_left(root, geo, outcome, earlier)
            except BaseException as error:
                raise AssertionError(blame(outcome, scenario=scenario, action=action, number=number)) from error


@pytest.mark.skipif(platform.machine() != "x86_64", reason="single instructions that store are seen on x86-64 only")
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_killed_at_every_store_of_a_cut(server, root, name):
    """Half a unit must not pass for one that leads elsewhere, above all where it is the first of its file."""
    geo = geometry(name)
    inner = {"sys_flag": 0xC0, "properties": {"INNER_NUM": "2"}}
    with MessageStore.open(root, config=config_of(geo)) as store:
        store.put_message(Message("Pay", b"stays", keys=["n1"]))
        store.put_message(Message("Inner", b"stays", **inner))
        lost = store.put_message(Message("Orders", b"lost", keys=["n2"])).phy_offset
        store.put_message(Message("Orders", b"lost", tags="T", keys=["n3"]))
        store.put_message(Message("Inner", b"lost", **inner))
        store.put_message(Message("Pay", b"lost", keys=["n4"]))
        end = store.commit_log.max_offset
    assert end < SEGMENT
    make_unclean(root)
    # The bytes after the magic are lost, and the rest of the log.
    overwrite(root, os.path.join("commitlog", oracle.file_name(0)), lost + 8, bytes(end - lost - 8))
    files = oracle.read_files(root)
    number = killed = 0
    while True:
        number += 1
        write_files(emptied(root), files)
        # The child's messages are after the cut: only earlier ones are read.
        outcome = server.run("recovery", root, geometry=name, names=("store",), action="kill before", number=number)
        if not outcome.killed or any(line["what"] == "put" for line in outcome.said):
            break
        killed += 1
        try:
            assert check_recovered(root, geo, []) == "recovered"
        except BaseException as error:
            raise AssertionError(blame(outcome, number=number)) from error
    assert killed > 50


def kill_at_random(server, root: str, name: str, flush_disk_type: str, seed: int) -> faults.Outcome:
    """Kill a child that puts without an end at a moment by the dice, and hold what is promised."""
    dice = random.Random(seed)
    outcome = server.run(
        "endless",
        emptied(root),
        geometry=name,
        options={"flush_disk_type": flush_disk_type},
        kill_after=dice.random() ** 2 * 0.12,
    )
    assert outcome.killed, outcome
    acknowledged = faults.acknowledged_of(outcome.said)
    acknowledged = without_crowded_keys(dice.sample(acknowledged, min(len(acknowledged), 60)))
    # Keys of the script come again and again.
    acknowledged = [
        (*each[:4], tuple(key for key in each[4] if key.startswith("n")), *each[5:]) for each in acknowledged
    ]
    try:
        assert check_recovered(root, geometry(name), acknowledged) == "recovered"
    except BaseException as error:
        raise AssertionError(blame(outcome, seed=seed, name=name, flush_disk_type=flush_disk_type)) from error
    return outcome


@pytest.mark.parametrize("flush_disk_type", FLUSH_TYPES)
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_killed_at_random_moments(server, root, name, flush_disk_type):
    said = seed = 0
    # A slow machine says less before the kill; it then takes more kills, not another verdict.
    while seed < 8 or said <= 20:
        said += len(kill_at_random(server, root, name, flush_disk_type, seed).said)
        seed += 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_kills(server, root, capsys):
    # The figure that docs/testing.md gives.  Half at calls by the dice, half at any moment.
    begin, kills, seed = time.monotonic(), 0, 0
    while kills < 10_000:
        seed += 1
        dice = random.Random(seed)
        name, flush_disk_type = dice.choice(("plain", "propcrc-ext")), dice.choice(FLUSH_TYPES)
        if seed % 2:
            kill_at_random(server, root, name, flush_disk_type, seed)
            kills += 1
            continue
        outcome = server.run(
            "life", emptied(root), geometry=name, options={"flush_disk_type": flush_disk_type},
            action=dice.choice(("kill before", "kill after")), number=dice.randrange(1, 500),
        )  # fmt: skip
        assert outcome.killed or outcome.ended, outcome
        try:
            check_left(root, geometry(name), outcome)
        except BaseException as error:
            raise AssertionError(blame(outcome, seed=seed)) from error
        kills += outcome.killed
    with capsys.disabled():
        print(f"\n{kills} kills, nothing lost, in {time.monotonic() - begin:.0f} s")


# -------------------------------------------------------------------------------------------------------------- errors

#: What a call may fail with, by the manual pages and by what disks, quotas and limits do.
ERRORS = {
    "create": (errno.ENOSPC, errno.EMFILE, errno.EDQUOT, errno.EROFS, errno.EIO),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "pwrite": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fallocate": (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG),
    "link": (errno.EDQUOT, errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC, errno.EROFS),
    "unlink": (errno.EIO, errno.EROFS),
    "mkdir": (errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    "rmdir": (errno.EIO,),
    "msync": (errno.EIO, errno.ENOMEM),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "fdatasync": (errno.EIO, errno.ENOSPC),
    "open": (errno.EMFILE, errno.ENFILE, errno.EIO),
    "mmap": (errno.ENOMEM,),
}
#: Reads may not be answered while these fail.
READING = ("open", "mmap")
FORCING = ("msync", "fsync", "fdatasync")


def check_error(server, root: str, copy: str, geo: dict, outcome: faults.Outcome, names, error: int) -> None:
    """Hold what is promised of a process in which a call failed: see the module."""
    assert outcome.ended, outcome
    said = outcome.said
    failures = [line for line in said if line["what"] == "failed"]
    for at, line in enumerate(failures):
        if "rebuild was interrupted" in line["text"]:
            assert any(each["deed"] == "rebuild" for each in failures[:at])
            continue
        assert os.strerror(error) in line["text"], f"an error that does not say what failed: {line}"
        assert root in line["text"], f"an error that names no file: {line}"
        # Reading goes on, whatever cannot be written.
        assert line["deed"] != "read" or set(names) & set(READING), line
    healed = next(at for at, line in enumerate(said) if line["what"] == "healed")
    assert not [line for line in said[healed:] if line["what"] == "failed"], "not usable after the fault is gone"
    check_poisoned(said, names)
    check_left(root, geo, outcome)


def check_poisoned(said: list[dict], names) -> None:
    """Until it is opened again, a store that could not flush takes nothing and leaves `abort` to the next opening."""
    # A put that could not make a file has written nothing, and the next one may do; one that could not force its bytes has.
    fatal = ("flush", "put") if set(names) <= {"msync", "fdatasync"} else ("flush",)
    poisoned = False
    for line in said:
        if line["what"] == "failed":
            poisoned |= line["kind"] == "StorePoisonedError" or line["deed"] in fatal
            assert line["kind"] == "StorePoisonedError" or line["deed"] not in fatal or line["kind"] == "OSError", line
        elif line["what"] == "closed":
            assert line["abort"] or not poisoned
            poisoned = False
        elif line["what"] in ("put", "flush"):
            assert not poisoned, f"the store goes on after a failed flush: {line}"


def check_not_silent(disks: list[Disk], copy: str, geo: dict, outcome: faults.Outcome) -> None:
    """What was promised is on disk: a store of which everything is lost that was never forced has it.

    That must be so at the end and when the first promises after the fault were given; a later flush may hide a lost one.
    """
    said = outcome.said
    moments = [
        at
        for at, line in enumerate(said)
        if line["hits"] and (faults.is_promise(line) or (line["what"] == "put" and line["sync"]))
    ]
    for disk, at in zip(disks, [len(said) - 1, *moments]):
        disk.replay([call for call in outcome.calls if call.end < said[at]["done"]])
        disk.lose(emptied(copy), random.Random(0), loss=1.0, page=64, names="none")
        finish_rebuild(copy, geo)
        with MessageStore.open(copy, config=config_of(geo), recovery="truncate") as store:
            check_readable(store, faults.acknowledged_of(said[: at + 1], durable=True))


def inject(
    server, root: str, copy: str, name: str, flush_disk_type: str, names, number: int, error: int, **more
) -> bool:
    """One case; whether the fault was met."""
    geo = geometry(name)
    emptied(root)
    disks = [Disk(root) for _ in range(4)]
    outcome = server.run(
        "life", root, geometry=name, options={"flush_disk_type": flush_disk_type}, names=names, number=number,
        error=error, data=True, **{"action": "fail", **more},
    )  # fmt: skip
    try:
        check_error(server, root, copy, geo, outcome, names, error)
        # The checks above changed the store, so its contents are not those of the log of calls any more; what was forced is.
        check_not_silent(disks, copy, geo, outcome)
    except BaseException as problem:
        failed = [str(call) for call in outcome.calls if call.error == error and call.number >= number][:3]
        case = {"names": names, "number": number, "error": errno.errorcode.get(error, error), **more}
        failures = [line for line in outcome.said if line["what"] == "failed"]
        raise AssertionError(f"{problem}\n{case}: {failed}\n{failures}\n{outcome}") from problem
    return any(line["hits"] for line in outcome.said)


def occurrences(total: int, share: int, thorough: bool, dice: random.Random) -> list[int]:
    return list(range(1, total + 1)) if thorough else sorted(dice.sample(range(1, total + 1), min(share, total)))


#: Geometry and flush type; the quick run takes them in turns.
KINDS = (("plain", "SYNC_FLUSH"), ("propcrc-ext", "ASYNC_FLUSH"))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("call", [call for call in ERRORS if call not in ABSENT])
def test_every_call_fails_once(server, root, copy, thorough, call):
    met = tried = 0
    for name, flush_disk_type in KINDS:
        whole = server.run("life", emptied(root), geometry=name, options={"flush_disk_type": flush_disk_type})
        assert whole.ended, whole
        total = sum(each.name == call for each in whole.calls)
        for turn, error in enumerate(ERRORS[call], KINDS.index((name, flush_disk_type))):
            if not thorough and turn % 2 and call not in FORCING:
                continue
            share = 2 if call in FORCING else 1
            for number in occurrences(total, share, thorough, random.Random(f"{call} {error} {name}")):
                tried += 1
                met += inject(server, root, copy, name, flush_disk_type, (call,), number, error)
    assert met > tried // 2


#: What is out of order for a while: names of calls that all fail, and how.
OUTAGES = {
    "disk full": (("create", "write", "pwrite", "fallocate", "mkdir", "link", "rename"), errno.ENOSPC),
    "quota": (("create", "write", "pwrite", "fallocate", "mkdir", "link", "rename"), errno.EDQUOT),
    "disk broken": (faults.CHANGING, errno.EIO),
    "read-only": (faults.CHANGING, errno.EROFS),
    "no descriptors": (("create", "open"), errno.EMFILE),
    "no memory to map": (("mmap",), errno.ENOMEM),
    "forcing fails": (FORCING, errno.EIO),
}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("outage", OUTAGES)
def test_calls_fail_for_a_while(server, root, copy, thorough, outage):
    names, error = OUTAGES[outage]
    for name, flush_disk_type in KINDS:
        whole = server.run("life", emptied(root), geometry=name, options={"flush_disk_type": flush_disk_type})
        assert whole.ended, whole
        total = sum(each.name in names for each in whole.calls)
        for number in occurrences(total, 1, thorough, random.Random(f"{outage} {name}")):
            inject(server, root, copy, name, flush_disk_type, names, number, error, lasts=True)


def test_a_write_that_takes_only_half_goes_on(server, root, copy):
    for number in (1, 2, 3, 5):
        for call in ("write", "pwrite"):
            inject(
                server, root, copy, "plain", "SYNC_FLUSH", (call,), number, 0, action="short write", lasts=number == 5
            )


# ------------------------------------------------------------------------------------------------------ real outages


@pytest.fixture
def small_disk(server, request):
    """A function that mounts a tmpfs of a number of pages of 4096 bytes, or mounts it again with other options."""
    path = os.path.join(server.scratch, "small")
    os.mkdir(path)

    def mount(options: str) -> str:
        again = "remount," if os.path.ismount(path) else ""
        command = ["mount", "-t", "tmpfs", "-o", again + options, "rmqstore-tests", path]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            # Continuous integration runs these in a namespace of their own, where they must run.
            assert not os.environ.get("RMQSTORE_MOUNTS"), done.stderr
            pytest.skip(f"needs the right to mount a tmpfs (root in most places): {done.stderr.strip()}")
        return path

    yield mount
    if os.path.ismount(path):
        subprocess.run(["umount", path], check=True)
    os.rmdir(path)


def failures_of(outcome: faults.Outcome) -> list[dict]:
    return [line for line in outcome.said if line["what"] == "failed"]


@pytest.mark.parametrize("pages", [14, 17, 18, 19, 20, 25, 33])
def test_a_full_disk_is_an_error_and_space_repairs_it(server, small_disk, pages):
    geo = geometry("plain")
    path = small_disk(f"size={pages * 4096}")
    root = os.path.join(path, "store")
    os.mkdir(root)
    outcome = server.run("fill", root, values={"patient": True})
    assert outcome.ended, outcome
    failures = failures_of(outcome)
    assert failures and all(os.strerror(errno.ENOSPC) in line["text"] for line in failures), failures
    assert failures[0]["kind"] == "DiskFullError", failures
    assert "read" not in [line["deed"] for line in failures]
    acknowledged = faults.acknowledged_of(outcome.said)
    # Full as it is, it can be read, also by another process.
    if os.path.exists(os.path.join(root, "commitlog")):
        with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
            assert [each[3] for each in acknowledged] == [
                message.phy_offset for message in store.messages() if message.phy_offset <= acknowledged[-1][3]
            ][: len(acknowledged)]
    small_disk(f"size={pages * 4096 + (1 << 20)}")
    more = server.run("recovery", root)
    assert more.ended, more
    check_left(root, geo, more, acknowledged)


@pytest.mark.parametrize("pages", range(270, 284, 2))
def test_a_queue_that_grows_on_a_full_disk(server, small_disk, pages):
    # The segment and the index file have their space, so that it is a queue of 6 MB that finds none.
    sizes = {**GROWTH, "mapped_file_size_consume_queue": 6_000_000}
    geo = {**geometry("plain"), **sizes}
    root = os.path.join(small_disk(f"size={pages * 4096}"), "store")
    os.mkdir(root)
    outcome = server.run("growth", root, values={"patient": True, "sizes": sizes})
    assert outcome.ended, outcome
    failures = failures_of(outcome)
    assert {(line["deed"], line["kind"]) for line in failures} == {("put", "DiskFullError")}, failures
    assert all(os.strerror(errno.ENOSPC) in line["text"] and "/consumequeue/" in line["text"] for line in failures)
    small_disk(f"size={pages * 4096 + (1 << 20)}")
    more = server.run("recovery", root, values={"sizes": sizes})
    assert more.ended, more
    check_left(root, geo, more, faults.acknowledged_of(outcome.said))


SEGMENT_GROWTH = {
    "mapped_file_size_commit_log": 1 << 19,
    "commit_log_growth_size": 1 << 16,
    "mapped_file_size_consume_queue": 40_000,
    "max_hash_slot_num": 100,
    "max_index_num": 5000,
}


@pytest.mark.skipif("fallocate" in ABSENT, reason="needs posix_fallocate")
def test_killed_while_a_segment_grows(server, root):
    whole = server.run("growth", root, values={"sizes": SEGMENT_GROWTH})
    assert whole.ended, whole
    grown = [call for call in whole.calls if call.name == "fallocate" and call.path.startswith("/commitlog/")]
    # In steps, and from the first byte after the store was opened again.
    assert {call.size for call in grown if call.offset} == {1 << 16} and [call for call in grown if not call.offset], grown
    check_kills_at(server, root, grown[::2], SEGMENT_GROWTH)


@pytest.mark.parametrize("pages", range(90, 104, 2))
def test_a_segment_that_grows_on_a_full_disk(server, small_disk, pages):
    geo = {**geometry("plain"), **SEGMENT_GROWTH}
    root = os.path.join(small_disk(f"size={pages * 4096}"), "store")
    os.mkdir(root)
    outcome = server.run("fill", root, values={"patient": True, "sizes": SEGMENT_GROWTH})
    assert outcome.ended, outcome
    failures = failures_of(outcome)
    assert {(line["deed"], line["kind"]) for line in failures} == {("put", "DiskFullError")}, failures
    small_disk(f"size={pages * 4096 + (1 << 20)}")
    more = server.run("recovery", root, values={"sizes": SEGMENT_GROWTH})
    assert more.ended, more
    check_left(root, geo, more, faults.acknowledged_of(outcome.said))


def test_a_hole_of_a_full_disk_is_an_error(server, small_disk):
    # A Java store only extends its segments: a store to mapped memory that needs a new page would be a SIGBUS.
    geo = {**geometry("plain"), "mapped_file_size_commit_log": 1 << 20}
    path = small_disk(f"size={1 << 22}")
    root = os.path.join(path, "store")
    sizes = {"mapped_file_size_commit_log": 1 << 20}
    os.makedirs(os.path.join(root, "commitlog"))
    with open(os.path.join(root, "commitlog", oracle.file_name(0)), "wb") as file:
        file.truncate(1 << 20)
    with open(os.path.join(path, "ballast"), "wb") as file:
        file.write(bytes((1 << 22) - (1 << 19)))
    outcome = server.run("fill", root, values={"patient": True, "sizes": sizes})
    assert outcome.ended, outcome
    assert all(os.strerror(errno.ENOSPC) in line["text"] for line in failures_of(outcome)), outcome
    assert {line["kind"] for line in failures_of(outcome)} == {"DiskFullError"}, outcome
    assert [line for line in failures_of(outcome) if line["deed"] in ("open", "put")]
    os.unlink(os.path.join(path, "ballast"))
    more = server.run("recovery", root, values={"sizes": sizes})
    assert more.ended, more
    check_left(root, geo, more, faults.acknowledged_of(outcome.said))


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_read_only_file_system(server, small_disk, clean):
    geo = geometry("plain")
    root = os.path.join(small_disk(f"size={1 << 21}"), "store")
    os.mkdir(root)
    outcome = server.run("life", root, **({} if clean else {"action": "kill before", "number": 150}))
    assert outcome.ended == clean
    acknowledged = faults.acknowledged_of(outcome.said)
    before = oracle.read_files(root)
    small_disk("ro")
    with pytest.raises(OSError) as refused:
        MessageStore.open(root, config=config_of(geo))
    assert refused.value.errno == errno.EROFS
    with pytest.raises(OSError) as refused:
        rebuild(root, config=config_of(geo))
    assert refused.value.errno == errno.EROFS
    with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
        check_readable(store, acknowledged)
    assert not changes(before, oracle.read_files(root))
    small_disk("rw")
    check_left(root, geo, outcome)


@pytest.mark.parametrize("limit", [100, 300, 2000, 5000])
def test_files_may_not_become_so_large(server, root, limit):
    # RLIMIT_FSIZE: the system refuses with EFBIG; the signal that goes with it is ignored by Python.
    geo = geometry("plain")
    values = {"patient": True, "limit": limit, "limit_at": 3, "puts": 30}
    outcome = server.run("fill", root, values=values)
    assert outcome.ended, outcome
    failures = failures_of(outcome)
    assert bool(failures) == (limit < 4096), failures
    assert all(os.strerror(errno.EFBIG) in line["text"] for line in failures), failures
    assert "read" not in [line["deed"] for line in failures]
    check_left(root, geo, outcome)
