"""Rot: damage to the files of a store that nobody has open, and what every way of opening makes of it.

Owns which bytes are damaged and what may be said of them.  Of a damaged log nothing else is lost, and nothing invented.
Of damaged queues, index, checkpoint or progress no answer is wrong in silence: where one differs from the model's,
`verify` has a finding, and a rebuild makes it right.  Each look is at a copy of the store.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import oracle

from rmqstore import CorruptionError, GeometryError, MessageStore, verify
from rmqstore.config import system_clock

from .model import Stored
from .plan import LIGHT_QUEUES
from .session import EXPECTED, as_told, check, config_of, places, same, walk

if TYPE_CHECKING:
    from .life import Life

#: What damages a message.
ROTS = ("zeros", "blank", "blank", "noise", "body", "body")
#: What damages a file that is made from the log.
DERIVED_ROTS = (
    "bit", "bit", "bit", "byte", "zeros", "noise", "sector", "again", "again", "copied", "cut", "longer", "empty",
    "gone",
)  # fmt: skip
#: How many of them a life meets.
DERIVED_LOOKS = 4
DERIVED = (
    "consumequeue/", "batchconsumequeue/", "consumequeue_ext/", "index/", "checkpoint", "config/consumerOffset.json",
)  # fmt: skip


@contextlib.contextmanager
def _copy(life: Life) -> Iterator[None]:
    """Let the life go on in a copy of its store, for so long."""
    pristine, life.root = life.root, life.new_root()
    shutil.copytree(pristine, life.root, dirs_exist_ok=True)
    yield
    shutil.rmtree(life.root)
    life.root = pristine


def rot_of_a_message(life: Life, number: int) -> None:
    """Damage to one message of a store that was closed in order, which every way of opening meets."""
    model, dice = life.model, random.Random(number)
    live = [each for each in model.live() if not model.has_holes]
    if not live:
        return
    kind = dice.choice(ROTS)
    victims = [each for each in live if each.spec.body] if kind == "body" else live
    if not victims:
        return
    victim = dice.choice(victims)
    base = victim.phy_offset // model.segment * model.segment
    at = victim.phy_offset - base
    room = model.segment - at
    with open(os.path.join(life.root, "commitlog", oracle.file_name(base)), "r+b") as file:
        if kind == "body":
            place = at + victim.raw.index(victim.spec.body, 84) + dice.randrange(len(victim.spec.body))
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << dice.randrange(8)]))
        else:
            data = {
                "zeros": bytes(min(victim.size, 512)),
                # A blank counts only if it fills the rest of its segment.
                "blank": (dice.choice((0, 8, victim.size, room - 8))).to_bytes(4, "big")
                + oracle.MAGIC_BLANK.to_bytes(4, "big"),
                "noise": dice.randbytes(min(victim.size, 32)),
            }[kind]
            file.seek(at)
            file.write(data)
    life.count(f"rot: {kind}")
    for recovery, read_only in (("strict", True), ("strict", False), ("truncate", False), ("skip", False)):
        life.steps += 1
        with _copy(life):
            _open_rotten(life, victim, kind, recovery, read_only)


def _open_rotten(life: Life, victim: Stored, kind: str, recovery: str, read_only: bool) -> None:
    model = life.model
    known = {each.phy_offset: each for each in model.live()}
    others = [offset for offset in known if offset != victim.phy_offset]
    before = [offset for offset in others if offset < victim.phy_offset]
    what = f"damage ({kind}) of the message at {victim.phy_offset}, opened {'read-only' if read_only else recovery}"
    config = config_of(model)
    files = oracle.read_files(life.root)
    try:
        store = as_told(MessageStore.open, life.root, config=config, recovery=recovery, read_only=read_only)
    except CorruptionError:
        check(recovery == "strict" and not read_only and (others != before or victim.end <= model.end), what, "refused")
        after = oracle.read_files(life.root)
        check({**after, "lock": b""} == {**files, "lock": b""}, what, "refused, but files changed")
        return
    with store:
        given = [message.phy_offset for message in store.messages() if not message.corrupt]
        for message in store.messages():
            if not message.corrupt:
                check(message.phy_offset in known, what, "a message that nobody put at", message.phy_offset)
                same(message, known[message.phy_offset])
        # A record with a damaged body keeps its place.
        if recovery == "truncate":
            check(given in (before, others), what, "left", given, "of", others)
        else:
            check(given == others, what, "gives", given, "of", others)
        for offset in given:
            each = known[offset]
            if each.indexed and each.keys and recovery != "truncate":
                key = next(iter(each.keys))
                hits = {hit.phy_offset for hit in store.query_message(each.spec.topic, key, 2000) if not hit.corrupt}
                wanted = {hit for hit in model.hits(model.keys[each.spec.topic, key]) if hit != victim.phy_offset}
                check(hits == wanted, what, "key", key, "finds", hits, "of", wanted)
    if read_only:
        check(oracle.read_files(life.root) == files, what, "changed files")


# ------------------------------------------------------------------------------ queues, index, checkpoint, progress


def rot_of_derived_files(life: Life, number: int, looks: int = DERIVED_LOOKS) -> None:
    """Damage to files that a rebuild can make from the log, or that only say how far it went, one after the other."""
    if life.model.has_holes or not life.model.live():
        return
    dice = random.Random(number)
    names = [name for name in sorted(oracle.read_files(life.root)) if name.startswith(DERIVED)]
    for _ in range(looks if names else 0):
        name = dice.choice(names)
        life.steps += 1
        life.count(f"rot of {name.split('/')[0]}")
        with _copy(life):
            what = _damage(life.root, name, dice)
            _look_at_rotten(life, what)
            with _copy(life):
                _write_on_rotten(life, what)
            _rebuild_rotten(life, name, what)


def _damage(root: str, name: str, dice: random.Random) -> str:
    """Change a file; what was done to it."""
    path = os.path.join(root, name)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    kind = dice.choice(DERIVED_ROTS)
    # Nothing but zeros lies behind the last of the written bytes, most often.
    used = len(data.rstrip(b"\0")) if dice.random() < 0.9 else len(data)
    at = dice.randrange(max(used, 1))
    size = {
        "bit": 0,
        "byte": 1,
        "zeros": dice.choice((1, 4, 8, 20, 46)),
        "noise": dice.choice((2, 4, 8, 20)),
        "sector": 64,
    }.get(kind, 0)
    if kind == "sector":
        at -= at % 64
    end = min(at + size, len(data))
    if kind == "bit" and data:
        data[at] ^= 1 << dice.randrange(8)
    elif kind in ("byte", "noise"):
        data[at:end] = dice.randbytes(end - at)
    elif kind in ("zeros", "sector"):
        data[at:end] = bytes(end - at)
    elif kind == "again":
        # A unit stands at another place too, behind the end most often.
        unit = 46 if name.startswith("batch") else 20
        number = dice.choice((-(-used // unit), dice.randrange(len(data) // unit + 1)))
        source = dice.randrange(max(used // unit, 1)) * unit
        if data[source : source + 20] != oracle.PRE_FILL_UNIT:
            # One of these says by right that a message was lost.
            data[number * unit : (number + 1) * unit] = data[source : source + unit]
        size, at = unit, number * unit
    elif kind == "copied":
        # A file of the same folder, or of another queue, as a copy that went wrong would leave it.
        folder = os.path.dirname(os.path.dirname(path)) if name.count("/") > 1 else os.path.dirname(path)
        files = [os.path.join(where, each) for where, _, inside in os.walk(folder) for each in inside]
        with open(dice.choice(sorted(files)), "rb") as file:
            data = bytearray(file.read())
    elif kind == "cut":
        del data[dice.randrange(len(data) + 1) :]
    elif kind == "longer":
        data += bytes(dice.choice((1, 20, 4096)))
    elif kind == "empty":
        data.clear()
    if kind == "gone":
        os.unlink(path)
    else:
        with open(path, "wb") as file:
            file.write(data)
    return f"{name}: {kind}, {size} bytes at {at}, of {used}"


def _look_at_rotten(life: Life, what: str) -> None:
    """A reader, and whether verify knows of what it does not say."""
    files = oracle.read_files(life.root)
    config = config_of(life.model)
    found = [str(finding) for finding in verify(life.root, config.replace(clock=system_clock))]
    try:
        store = MessageStore.open(life.root, config=config, read_only=True)
    except GeometryError:
        # The only file of its kind has another length than the numbers say: who gives none is not refused.
        check("index" in what, what, "refused")
        store = MessageStore.open(life.root, read_only=True)
    with store:
        differs = list(_differences(life, store, what))
    check(found or not differs, what, "verify finds nothing, but", differs)
    check(oracle.read_files(life.root) == files, what, "a reader changed files")


def _differences(life: Life, store: MessageStore, what: str) -> Iterator[str]:
    """Answers that are not the model's; one that is made up raises SimulatedFailure."""
    model = life.model
    live = model.live()
    known = {each.phy_offset: each for each in live}
    given = list(store.messages())
    check([message.phy_offset for message in given] == list(known), what, "the log gives", given)
    for message in given:
        same(message, known[message.phy_offset])
    for queue, stored in model.queues.items():
        units = [(each.queue_offset, each.phy_offset) for each in stored if model.is_live(each)]
        try:
            got = walk(store, queue, model.bounds(queue)[0], what)
            bounds = store.min_queue_offset(*queue), store.max_queue_offset(*queue)
        except EXPECTED as error:
            yield f"queue {queue}: {error}"
            continue
        for message in got:
            check(message.phy_offset in known, what, "queue", queue, "gives a message that nobody put", message)
            same(message, known[message.phy_offset])
        if queue[0] in LIGHT_QUEUES:
            wanted = [phy_offset for _, phy_offset in units]
            places_of = [message.phy_offset for message in got]
        else:
            wanted = units
            places_of = [(message.queue_offset, message.phy_offset) for message in got]
        strange = [each for each in places_of if each not in wanted]
        check(not strange, what, "queue", queue, "gives", strange, "of", wanted)
        if not wanted:
            # Retention deleted all of its messages: nothing but its units says where it goes on.
            continue
        if places_of != wanted or bounds != model.bounds(queue):
            yield f"queue {queue}: {places_of}, {bounds} of {wanted}, {model.bounds(queue)}"
        tags = sorted({each.tags for each in map(known.get, (phy_offset for _, phy_offset in units)) if each.tags})
        for tag in tags if queue[0] not in (*LIGHT_QUEUES, oracle.SCHEDULE_TOPIC) else ():
            tagged = [known[phy_offset].phy_offset for _, phy_offset in units if known[phy_offset].tags == tag]
            got = [message.phy_offset for message in walk(store, queue, model.bounds(queue)[0], what, tag)]
            check(set(got) <= set(tagged), what, "queue", queue, "tag", tag, "gives", got, "of", tagged)
            if got != tagged:
                yield f"queue {queue}, tag {tag}: {got} of {tagged}"
    dice = random.Random(len(live))
    for each in dice.sample(live, min(len(live), 12)):
        for key in each.keys if each.indexed else ():
            wanted = model.hits(model.keys[each.spec.topic, key])
            try:
                found = store.query_message(each.spec.topic, key, 2000)
            except EXPECTED as error:
                yield f"key {key}: {error}"
                continue
            hits = places(found, model)
            check(set(hits) <= set(wanted), what, "key", key, "finds", hits, "of", wanted)
            for message in found:
                if not message.corrupt:
                    same(message, known[message.phy_offset])
            if hits != wanted and found.complete:
                yield f"key {each.spec.topic} {key}: {hits} of {wanted}"


def _write_on_rotten(life: Life, what: str) -> None:
    """A writer opens it or refuses; the log stays as it was, and nothing that is wrong is hidden by it."""
    model = life.model
    config, root = config_of(model), life.root
    files = oracle.read_files(root)
    try:
        with MessageStore.open(root, config=config) as store:
            differs = list(_differences(life, store, f"{what}, opened for writing"))
    except EXPECTED:
        after = oracle.read_files(root)
        check({**after, "lock": b""} == {**files, "lock": b""}, what, "refused, but files changed")
    else:
        found = [str(finding) for finding in verify(root, config.replace(clock=system_clock))]
        check(found or not differs, what, "after a writer verify finds nothing, but", differs)
        log, after = oracle.segments(files), oracle.segments(oracle.read_files(root))
        # Of a store that was not closed it cuts what is no whole record.
        check(log == after or "abort" in files, what, "a writer changed the log")


def _rebuild_rotten(life: Life, name: str, what: str) -> None:
    """A rebuild makes it right."""
    model = life.model
    if os.path.exists(os.path.join(life.root, "abort")):
        # A store that was not closed is recovered, not rebuilt.
        return
    path = os.path.join(life.root, name)
    if name == "checkpoint" and os.path.exists(path) and os.path.getsize(path) not in range(0, 4097, 8):
        # No writer opens a store with it; the advice is to move it away.
        os.unlink(path)
    is_queue = "consumequeue" in name.split("/")[0]
    if name.startswith("config/") or (
        is_queue and any(low == high for low, high in map(model.bounds, model.next_offsets))
    ):
        # Progress is in no log; nor is a queue all of whose messages retention deleted: rebuilt it begins at 0 again.
        return
    life.rebuild_and_check(
        ("consumequeue",) if is_queue else ("index",) if name.startswith("index/") else ("index", "consumequeue"), what
    )


KINDS: dict[str, Callable[[Life, int], None]] = {"rot": rot_of_a_message, "rot_derived": rot_of_derived_files}
