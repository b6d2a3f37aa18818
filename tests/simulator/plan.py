"""Plans: what happens in a store's life, from one seed.

Owns the kinds of operations and how often each comes, and what a number stands for: a message, a geometry, a fault.  An
operation is ``[kind, number]``; it never refers to another one, so that operations can be left out.
"""

from __future__ import annotations

import dataclasses
import errno
import random
from typing import Any

import oracle

Operation = tuple[str, int]

NOW = 1_700_000_000_000
TOPICS = ("Orders", "Pay", "AaTopic", "BBTopic", "%RETRY%billing", "x" * 127)
INNER_TOPIC = "Inner"
BATCH_TOPICS = ("Orders", "Pay", "AaTopic")
LIGHT_QUEUES = ("%LMQ%a", "%LMQ%b", "%LMQ%订单")
GROUPS = ("billing", "g@broadcast", "组😀")
#: Keys that come again and again, some with one hash in Java ("Aa" and "BB"), some beyond 16 bits.
KEYS = ("Aa", "BB", "k1", "k2", "订单-1", "😀", "T#TagA", "*")
TAGS = ("TagA", "Aa", "BB", "标签", "😀")
STEPS_OF_CLOCK = (0, 1, 499, 500, 999, 1000, 7_000, 61_000, 3_600_000, -1, -1500, -30_000, -3_600_000)

#: How many of the lives have turns of Java, which take a hundred times as long as others.
LIVES_WITH_JAVA = 0.08
#: How many end with damage to queues, index, checkpoint or progress.
LIVES_WITH_DERIVED_ROT = 0.25
#: How many have a `Mix` of their own.
LIVES_WITH_A_MIX = 0.4
#: Which part of the puts of a message goes into light message queues (LMQ) too, in a life that has them.
LIGHT_PUTS = 0.3

#: How often each kind comes within a session, of the sum of all.
WEIGHTS = {
    "put": 300,
    "put_odd": 60,
    "put_many": 40,
    "put_batch": 25,
    "put_inner": 25,
    "put_delayed": 20,
    "put_table": 12,
    "put_refused": 10,
    "get": 150,
    "query": 110,
    "at": 90,
    "by_time": 15,
    "bounds": 25,
    "scan": 2,
    "consume": 5,
    "clock": 60,
    "flush": 30,
    "commit": 50,
    "progress": 25,
    "follow": 15,
    "second": 1,
    "fork": 2,
    "retain": 4,
    "fullness": 2,
    "check": 1,
}
WRITING = frozenset(kind for kind in WEIGHTS if kind.startswith("put")) | {
    "put_light", "flush", "commit", "consume", "second", "fork", "retain", "fullness", "progress", "scan", "check",
}  # fmt: skip
FAULTS = ("none", "kill before", "kill after", "kill at store", "fail", "short write")
RECOVERIES = ("strict", "truncate", "skip")
ENDS = ("close", "kill", "leave")
#: What comes at the end of a life: see the module `rot`.
ROT = ("rot_derived", "rot")

#: What calls may fail with.
ERRORS = {
    "create": (errno.ENOSPC, errno.EMFILE, errno.EIO),
    "write": (errno.ENOSPC, errno.EIO),
    "pwrite": (errno.ENOSPC, errno.EIO),
    "fallocate": (errno.ENOSPC, errno.EDQUOT, errno.EIO),
    "link": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC),
    "unlink": (errno.EIO,),
    "mkdir": (errno.ENOSPC,),
    "msync": (errno.EIO,),
    "fsync": (errno.EIO, errno.ENOSPC),
    "fdatasync": (errno.EIO,),
    "open": (errno.EMFILE, errno.EIO),
    "mmap": (errno.ENOMEM,),
}
#: What a full disk does not give.
SPACE = ("create", "write", "pwrite", "fallocate", "link", "mkdir")


@dataclasses.dataclass(frozen=True)
class Mix:
    """What a life is made of: how often each kind of operation, each fault, recovery and end comes, and what is likely.

    `length` is the range of a session's operations, as powers of two.
    """

    weights: dict[str, float]
    faults: tuple[float, ...] = (52, 9, 8, 14, 15, 2)
    recoveries: tuple[float, ...] = (70, 15, 15)
    ends: tuple[float, ...] = (70, 20, 10)
    length: tuple[float, float] = (2, 8.5)
    power: float = 0.2
    loss: float = 0.45
    rebuild: float = 0.05
    light: float = 0.15


ORDINARY = Mix(WEIGHTS)


def mix_of(number: int) -> Mix:
    """What ("mix", number) stands for.

    Where every life has some of everything, what goes wrong only after much of one thing, or without another, stays hidden
    ("swarm testing": Groce and others, ISSTA 2012).
    """
    dice = random.Random(number)

    def some(weights: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(weight * dice.choice((0.2, 1, 4)) for weight in weights)

    weights = {kind: weight * dice.choice((0, 0.3, 1, 1, 3, 10)) for kind, weight in WEIGHTS.items()}
    # Without messages there is nothing to lose.
    weights["put"] = max(weights["put"], 30)
    return Mix(
        weights=weights,
        faults=some(ORDINARY.faults),
        recoveries=some(ORDINARY.recoveries),
        ends=some(ORDINARY.ends),
        length=dice.choice((ORDINARY.length, (0, 4), (1, 5), (5, 9))),
        power=0.5,
        loss=dice.choice((0.2, 0.5, 0.9)),
        rebuild=dice.choice((0, 0.05, 0.3)),
        light=0.25,
    )


def make_plan(seed: int, steps: int) -> list[Operation]:
    """A plan of about `steps` operations: ("store", n), then sessions, each a ("session", n) and what is done in it.

    A life with a mix of its own says so first, ("mix", n); between two sessions Java may have a turn, ("java", n).
    """
    # Dice of its own, here and below, so that lives without it are what they were before there was any.
    dice = random.Random(f"{seed} of its own")
    own = [("mix", dice.getrandbits(32))] if dice.random() < LIVES_WITH_A_MIX else []
    mix = mix_of(own[0][1]) if own else ORDINARY
    dice = random.Random(seed)
    plan: list[Operation] = [*own, ("store", dice.getrandbits(32))]
    while len(plan) < steps:
        plan.append(("session", dice.getrandbits(32)))
        length = int(2 ** dice.uniform(*mix.length))
        for kind in dice.choices(list(mix.weights), mix.weights.values(), k=length):
            plan.append((kind, dice.getrandbits(32)))
    if dice.random() < 0.6:
        plan.append(("rot", dice.getrandbits(32)))
    dice = random.Random(f"rot of derived files in {seed}")
    if dice.random() < LIVES_WITH_DERIVED_ROT:
        # Before the log itself is damaged.
        plan.insert(len(plan) - (plan[-1][0] == "rot"), ("rot_derived", dice.getrandbits(32)))
    if setting_of(plan[len(own)][1], mix).geometry["enable_lmq"]:
        dice = random.Random(f"light queues in {seed}")
        plan = [
            ("put_light", number) if kind == "put" and dice.random() < LIGHT_PUTS else (kind, number)
            for kind, number in plan
        ]
    dice = random.Random(f"Java in {seed}")
    if dice.random() < LIVES_WITH_JAVA:
        # From behind, as each one that is put in moves what follows it.
        for at in reversed([at for at, (kind, _) in enumerate(plan) if kind == "session" and at > len(own) + 1]):
            if dice.random() < 0.3:
                plan.insert(at, ("java", dice.getrandbits(32)))
    return plan


# ------------------------------------------------------------------------------------------------------------ the store


@dataclasses.dataclass(frozen=True)
class Setting:
    """The geometry of a life's store, the options that the format does not tell, and whether power may be lost."""

    geometry: dict[str, Any]
    options: dict[str, Any]
    power: bool


def setting_of(number: int, mix: Mix = ORDINARY) -> Setting:
    """What ("store", number) stands for."""
    dice = random.Random(number)
    power = dice.random() < mix.power
    # Without the CRC of properties the format cannot tell that a page with nothing else is gone; what may be lost then is
    # the matter of test_power_loss.
    prop_crc = power or dice.random() < 0.4
    light = random.Random(f"light queues with {number}").random() < mix.light
    geometry = oracle.geometry(
        mapped_file_size_commit_log=dice.choice((1024, 2048, 4096, 4096, 8192, 16384, *((16384, 16384) if power else ()))),
        mapped_file_size_consume_queue=20 * dice.choice((3, 5, 8, 20)),
        mapper_file_size_batch_consume_queue=46 * dice.choice((3, 6)),
        mapped_file_size_consume_queue_ext=dice.choice((100, 150, 400)),
        max_hash_slot_num=dice.choice((4, 20, 50, 100)),
        max_index_num=dice.choice((12, 60, 200, 500)),
        enabled_append_prop_crc=prop_crc,
        enable_consume_queue_ext=dice.random() < 0.3,
        index_tags=dice.random() < 0.8,
        enable_lmq=light,
        enable_multi_dispatch=light,
    )
    options = {
        "force_verify_prop_crc": prop_crc,
        "flush_disk_type": dice.choice(("ASYNC_FLUSH", "ASYNC_FLUSH", "SYNC_FLUSH")),
        "max_mapped_files": dice.choice((4, 20, 1024, 1024, 1024)),
    }
    return Setting(geometry, options, power)


# ------------------------------------------------------------------------------------------------------------- sessions


@dataclasses.dataclass(frozen=True)
class Opening:
    """How one process opens the store, how it ends, and which fault it meets.

    `end` is "close", "kill" (SIGKILL after the last operation), or "leave" (the process ends without a close).  `fault` is "none",
    "kill before", "kill after", "kill at store", "fail" or "short write"; it comes at the `number`-th of the calls `names`.
    """

    recovery: str
    read_only: bool
    rebuild: tuple[str, ...]
    end: str
    fault: str
    number: int
    names: tuple[str, ...]
    error: int
    lasts: bool
    heals: bool
    loss: dict[str, Any] | None
    watched: bool


#: An opening without a fault, closed in order.
PLAIN = Opening("strict", False, (), "close", "none", 1, (), 0, False, False, None, False)


def opening_of(number: int, changing: tuple[str, ...], mix: Mix = ORDINARY) -> Opening:
    """What ("session", number) stands for; `changing` are the names of the calls that change or force something."""
    dice = random.Random(number)
    fault = dice.choices(FAULTS, mix.faults)[0]
    read_only = dice.random() < 0.06
    names, error, lasts = changing, 0, False
    at = int(2 ** dice.uniform(0, 10))
    if fault == "kill at store":
        at, names = int(2 ** dice.uniform(2, 13)), ("store",)
    elif fault == "fail":
        which = dice.random()
        if which < 0.3:
            names, error, lasts = SPACE, errno.ENOSPC, True
        elif which < 0.6:
            names, error, lasts = (*changing, "open", "mmap"), errno.EIO, dice.random() < 0.3
        else:
            name = dice.choice(list(ERRORS))
            names, error, lasts = (name,), dice.choice(ERRORS[name]), dice.random() < 0.3
            at = int(2 ** dice.uniform(0, 5))
    elif fault == "short write":
        names, at = ("write", "pwrite"), int(2 ** dice.uniform(0, 4))
    loss = None
    if dice.random() < mix.loss:
        loss = {
            "loss": dice.choice((0.05, 0.3, 0.7, 1.0)),
            # A torn sector, a page, and what is small enough to tear any record of these stores.
            "page": dice.choice((64, 512, 512, 4096)),
            "names": dice.choice(("none", "all", "some", "first")),
        }
    return Opening(
        recovery=dice.choices(RECOVERIES, mix.recoveries)[0],
        read_only=read_only,
        rebuild=dice.choice((("index",), ("consumequeue",), ("index", "consumequeue"))) if dice.random() < mix.rebuild else (),
        end=dice.choices(ENDS, mix.ends)[0],
        fault="none" if read_only else fault,
        number=at,
        names=names,
        error=error,
        lasts=lasts,
        heals=dice.random() < 0.5,
        loss=loss,
        watched=dice.random() < 0.3,
    )


# ------------------------------------------------------------------------------------------------------------- messages


@dataclasses.dataclass(slots=True)
class Spec:
    """A message to put; `pairs` are its properties in the order in which they are stored."""

    topic: str
    queue_id: int
    body: bytes
    pairs: list[tuple[str, str]]
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = NOW - 5
    born_host: str = "192.168.1.10:50000"
    store_host: str = "127.0.0.1:10911"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


def _body(dice: random.Random) -> bytes:
    which = dice.random()
    size = dice.randrange(40) if which < 0.85 else dice.randrange(700) if which < 0.97 else dice.randrange(3000)
    return dice.randbytes(size)


def _plain(dice: random.Random, number: int) -> Spec:
    keys = [f"u{number}"]
    if dice.random() < 0.4:
        keys.append(dice.choice(KEYS))
    pairs = [("KEYS", " ".join(keys))]
    if dice.random() < 0.5:
        pairs.append(("TAGS", dice.choice(TAGS)))
    return Spec(dice.choice(TOPICS), dice.randrange(2), _body(dice), pairs)


def _odd(dice: random.Random, number: int) -> Spec:
    spec = _plain(dice, number)
    if dice.random() < 0.3:
        spec.pairs = [pair for pair in spec.pairs if pair[0] == "TAGS"]
    if dice.random() < 0.4:
        spec.pairs.append(("UNIQ_KEY", dice.choice((f"U{number}", "k1", "😀"))))
    for name in ("a", "属性", "😀😀", "WAIT", "e"):
        if dice.random() < 0.3:
            value = dice.choice(("true", "false")) if name == "WAIT" else dice.choice(("", "1", "值😀", " ", "=" * 90))
            spec.pairs.append((name, value))
    spec.flag = dice.choice((0, 1, -(2**31), 2**31 - 1))
    spec.sys_flag = dice.choice((0, 0, 0, oracle.PREPARED, oracle.COMMIT, oracle.ROLLBACK))
    spec.born_timestamp = dice.choice((0, -1, NOW - 5, 2**63 - 1))
    spec.born_host = dice.choice(("192.168.1.10:50000", "[2001:db8::2]:1"))
    spec.store_host = dice.choice(("127.0.0.1:10911", "[2001:db8::1]:10911"))
    spec.reconsume_times = dice.choice((0, 16))
    spec.prepared_transaction_offset = dice.choice((0, 1234))
    return spec


def specs_of(operation: Operation) -> list[Spec]:
    """The messages that a put operation stands for."""
    kind, number = operation
    dice = random.Random(number)
    if kind == "put":
        return [_plain(dice, number)]
    if kind == "put_odd":
        return [_odd(dice, number)]
    if kind == "put_many":
        odd = dice.random() < 0.3
        return [(_odd if odd else _plain)(dice, number + n) for n in range(dice.choice((1, 2, 4, 9, 14)))]
    if kind == "put_batch":
        topic, queue_id = dice.choice(BATCH_TOPICS), dice.randrange(2)
        specs = [_plain(dice, number + n) for n in range(dice.randrange(1, 5))]
        return [dataclasses.replace(spec, topic=topic, queue_id=queue_id, body=spec.body[:60]) for spec in specs]
    if kind == "put_inner":
        spec = _plain(dice, number)
        spec.topic, spec.sys_flag = INNER_TOPIC, oracle.INNER_BATCH | oracle.NEED_UNWRAP
        spec.pairs = [("INNER_BASE", "7"), *spec.pairs, ("INNER_NUM", str(dice.randrange(1, 4)))]
        return [spec]
    if kind == "put_light":
        spec = _plain(dice, number)
        # Topics of retries have none.
        spec.topic = dice.choice(BATCH_TOPICS)
        spec.pairs.append(("INNER_MULTI_DISPATCH", ",".join(dice.sample(LIGHT_QUEUES, dice.randrange(1, 4)))))
        return [spec]
    if kind == "put_delayed":
        spec = _plain(dice, number)
        spec.topic = oracle.SCHEDULE_TOPIC
        spec.pairs = [pair for pair in spec.pairs if pair[0] == "TAGS"]
        if dice.random() < 0.8:
            spec.pairs.append(("DELAY", dice.choice(("0", "1", "3", "99"))))
        return [spec]
    if kind == "put_table":
        topic, queue_id = dice.choice(TOPICS), dice.randrange(2)
        specs = [_plain(dice, number + n) for n in range(dice.choice((1, 3, 7, 20)))]
        return [dataclasses.replace(spec, topic=topic, queue_id=queue_id, body=spec.body[:100]) for spec in specs]
    if kind == "put_refused":
        spec = _plain(dice, number)
        return [dataclasses.replace(spec, body=bytes(20_000))]
    raise ValueError(f"{kind} puts nothing")
