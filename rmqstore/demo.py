"""The demo: the main job on a real broker's store, then a million messages in a store of our own, every answer checked.

Owns the order of the steps, their checks and the table of rates, and the sample store that comes with the package
(`rmqstore/sample`), which ``--unpack`` gives away.  It works in a directory of its own below a temporary one, which it
removes, and never changes the sample that it unpacks from.  Invariants:

- Every step that claims something compares it with what somebody else said: the broker's files, the producers' account
  of what they sent, or the formula that made a message.  A comparison that fails ends the demo with exit code 1.
- A rate counts only the work that its row names; making the messages has a row of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import lzma
import random
import shlex
import shutil
import tarfile
import tempfile
import time
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.terminal import escape
from rmqstore.config import StoreConfig
from rmqstore.errors import StoreError
from rmqstore.message import Message, MessageExt
from rmqstore.offline.describe import describe
from rmqstore.offline.rebuild import rebuild
from rmqstore.offline.verify import verify
from rmqstore.store.message_store import MessageStore
from rmqstore.store.results import GetMessageStatus, QueryResult

__all__ = ["main"]

# The sample store's delay levels: the one option of its broker that no file of a store tells.
SAMPLE_DELAY_LEVEL = "1s 2s 30m 1h"
SAMPLE = Path(__file__).resolve().parent / "sample"
SAMPLE_FILES = ("store.tar.xz", "sent.jsonl.xz")

TOPIC = "Orders"
QUEUES = 8
EVENTS = ("created", "paid", "shipped")
BATCH = 1000
SINGLE_PUTS = 5000
QUERIES = 100_000
SEED = 20261121


class CheckFailedError(Exception):
    """An answer was wrong."""


def check(holds: bool, what: str) -> None:
    """Raise CheckFailedError unless `holds`."""
    if not holds:
        raise CheckFailedError(what)


# --------------------------------------------------------------------------------------------------------- the table


@dataclass
class Step:
    """One row: what was done, how often, over how many bytes, in how many seconds."""

    name: str
    unit: str = ""
    count: int = 0
    size: int = 0
    seconds: float = 0.0
    remark: str = ""


@dataclass
class Steps:
    """The rows so far; prints what goes on as it goes."""

    rows: list[Step] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str, unit: str = "") -> Iterator[Step]:
        """Time what is done within; the count and bytes are set by whoever does it."""
        row = Step(name, unit)
        click.echo(f"  {name} ...", err=True)
        started = time.perf_counter()
        yield row
        # A step that takes only a part of its wall time has said so itself.
        row.seconds = row.seconds or time.perf_counter() - started
        self.rows.append(row)

    def print(self, seconds: float) -> None:
        """The table, on stdout."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, title="rmqstore demo", title_justify="left")
        table.add_column("step", no_wrap=True)
        for name in ("seconds", "count", "", "rate/s", "MB/s"):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        table.add_column("", overflow="fold")
        for row in self.rows:
            per_second = row.count / row.seconds if row.seconds and row.count else None
            megabytes = row.size / row.seconds / 1e6 if row.seconds and row.size else None
            table.add_row(
                row.name,
                f"{row.seconds:.2f}",
                f"{row.count:,}".replace(",", " ") if row.count else "",
                row.unit,
                "" if per_second is None else f"{per_second:,.0f}".replace(",", " "),
                "" if megabytes is None else f"{megabytes:,.1f}".replace(",", " "),
                row.remark,
            )
        table.add_section()
        table.add_row("everything", f"{seconds:.2f}")
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=140)
        console.print(table)


# ------------------------------------------------------------------------------------------------ a real broker's store


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
            found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sent(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _masked_crc(body: bytes) -> int:
    # RocketMQ clears the top bit of its CRCs.
    return zlib.crc32(body) & 0x7FFFFFFF


def _as_sent(message: MessageExt, sent: dict[str, Any]) -> bool:
    """Whether a message is the one that a producer got acknowledged."""
    return (
        len(message.body) == sent["body_len"]
        and _masked_crc(message.body) == sent["body_crc"]
        and (message.queue_id, message.queue_offset) == (sent["queue_id"], sent["queue_offset"])
        and message.unique_key == sent["msg_id"]
        and message.msg_id == sent["offset_msg_id"]
        and message.tags == sent.get("tags")
        and message.keys == sent.get("keys", "").split()
        and not message.corrupt
    )


def _unpack(archive: Path, directory: Path) -> Path:
    with tarfile.open(archive, "r:xz") as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(directory, filter="data")
        else:  # Python before 3.10.12; the archive is our own.
            tar.extractall(directory)
    (root,) = directory.iterdir()
    return root


def unpack_sample(data: Path, target: Path) -> None:
    """Give the sample store away as `target`, which is there only when all of it is."""
    if target.exists() or target.is_symlink():
        raise CannotOpenError(f"{escape(str(target))} is there already", "Give the name of a folder that is not there.")
    if not target.parent.is_dir():
        raise CannotOpenError(f"there is no folder {escape(str(target.parent))}", "Make it, or give another name.")
    archive = data / SAMPLE_FILES[0]
    if not archive.is_file():
        raise CannotOpenError(f"the sample store is not in {escape(str(data))}", "Give its place with --data.")
    with tempfile.TemporaryDirectory(prefix=".rmqstore-sample-", dir=target.parent) as beside:
        _unpack(archive, Path(beside)).rename(target)


def broker_store(steps: Steps, data: Path, directory: Path) -> None:
    """Describe, verify, rebuild and search the store that a real RocketMQ 5.5.0 broker wrote."""
    with steps.step("unpack the broker's store", "files") as row:
        root = _unpack(data / "store.tar.xz", directory)
        sent = _sent(data / "sent.jsonl.xz")
        row.count, row.size = len(_digests(root)), _size(root)
    config = StoreConfig.infer(root, message_delay_level=SAMPLE_DELAY_LEVEL)

    with steps.step("describe it", "queues") as row:
        description = describe(root, config)
        log = description.commit_log
        row.count = len(description.queues)
        row.remark = f"{log.max_offset:,} bytes of log, {len(description.index_files)} index files".replace(",", " ")
        check(description.clean and log.min_offset == 0, "the sample store is whole and clean")
    with steps.step("verify it, CRCs included", "findings") as row:
        # Without the libraries of compression, verify names the bodies that it did not check.
        findings = [each for each in verify(root, config) if each.kind != "not_checked"]
        row.size, row.remark = log.max_offset, "none" if not findings else str(findings[0])
        check(not findings, f"the broker's store has no finding, but: {findings[:3]}")

    with steps.step("delete index and queues, rebuild", "records") as row:
        log_before = _digests(root / "commitlog")
        queues_before, index_before = _digests(root / "consumequeue"), _digests(root / "index")
        check(len(queues_before) > 20 and len(index_before) == 5, "the sample has queues and five index files")
        shutil.rmtree(root / "consumequeue")
        shutil.rmtree(root / "index")
        started = time.perf_counter()
        report = rebuild(root, config=config)
        row.seconds = time.perf_counter() - started
        row.count, row.size = report.records, report.log_bytes
        row.remark = f"{report.units} queue units, {report.index_entries} index entries"
    with steps.step("compare SHA-256 of every file", "files") as row:
        queues, index = _digests(root / "consumequeue"), _digests(root / "index")
        row.count = len(queues) + len(index)
        row.size = _size(root / "consumequeue") + _size(root / "index")
        wrong = sorted(name for name in {*queues, *queues_before} if queues.get(name) != queues_before.get(name))
        check(not wrong, f"rebuilt queue files equal the broker's, but not {wrong[:3]}")
        # The names of index files are the times at which they were made; their order is what counts.
        check(list(index.values()) == list(index_before.values()), "rebuilt index files equal the broker's")
        check(_digests(root / "commitlog") == log_before, "the commit log was not touched")
        row.remark = "all equal to the broker's"

    with MessageStore.open(root, config=config, read_only=True) as store:
        _find_orders(steps, store, sent)


def _find_orders(steps: Steps, store: MessageStore, sent: list[dict[str, Any]]) -> None:
    key = "ORD-100000"
    with steps.step(f"find order {key} by key", "messages") as row:
        hits = store.query_message(TOPIC, key)
        wanted = [each for each in sent if each["topic"] == TOPIC and key in each.get("keys", "").split()]
        row.count = len(hits)
        row.remark = ", ".join(str(hit.tags) for hit in reversed(hits))
        check(len(wanted) > 1, "the producers sent that order several times")
        check({hit.msg_id for hit in hits} == {each["offset_msg_id"] for each in wanted}, "found is what was sent")
        by_id = {hit.msg_id: hit for hit in hits}
        check(
            all(_as_sent(by_id[each["offset_msg_id"]], each) for each in wanted), "found messages are as they were sent"
        )
        first = min(hits, key=lambda hit: hit.phy_offset)
        later = store.query_message(TOPIC, key, begin=first.store_timestamp + 1)
        check(
            [hit.phy_offset for hit in later]
            == [hit.phy_offset for hit in hits if hit.store_timestamp > first.store_timestamp],
            "a range that begins a millisecond after the first message leaves it out",
        )
        check(len(later) < len(hits), "the range left something out")

    orders = [each for each in sent if each["kind"] == "plain" and each["topic"] == TOPIC]
    with steps.step("find every sent order by key", "queries") as row:
        for each in orders:
            found = store.query_message(TOPIC, each["keys"].split()[0], begin=0)
            hit = next((hit for hit in found if hit.msg_id == each["offset_msg_id"]), None)
            check(hit is not None and _as_sent(hit, each), f"the message {each['msg_id']} is found as it was sent")
        row.count = len(orders)
        check(row.count > 1000, "the producers' account has more than a thousand orders")

    with steps.step("find orders by time", "messages") as row:
        times = sorted(message.store_timestamp for message in store.messages() if message.topic == TOPIC)
        begin, end = times[len(times) // 4], times[len(times) // 2]
        started = time.perf_counter()
        found_ids: dict[str, MessageExt] = {}
        for queue_id in store.queue_ids(TOPIC):
            at = store.offset_by_time(TOPIC, queue_id, begin, "lower")
            stop = store.offset_by_time(TOPIC, queue_id, end, "upper") + 1
            while at < stop:
                result = store.get_message(TOPIC, queue_id, at, stop - at)
                check(result.status is GetMessageStatus.FOUND, f"queue {queue_id} gives its messages: {result.status}")
                # A clock that is set right while the broker runs leaves others between them.
                inside_range = [each for each in result.messages if begin <= each.store_timestamp <= end]
                found_ids |= {message.msg_id: message for message in inside_range}
                at = result.next_queue_offset
        row.seconds = time.perf_counter() - started
        row.count = len(found_ids)
        row.remark = f"stored within {end - begin} ms"
        # Counted by a scan of the log, which uses neither queues nor index.
        check(row.count == sum(begin <= each <= end for each in times), "as many as the log holds in that range")
        inside = [each for each in orders if begin <= store.message_by_id(each["offset_msg_id"]).store_timestamp <= end]
        check(len(inside) > 100, "the range holds messages of the producers' account")
        check(
            all(
                each["offset_msg_id"] in found_ids and _as_sent(found_ids[each["offset_msg_id"]], each)
                for each in inside
            ),
            "every acknowledged message of the range is found as it was sent",
        )


# ------------------------------------------------------------------------------------------------- a store of our own


_CITIES = ("Berlin", "Lisboa", "São Paulo", "杭州", "Nairobi", "Wien", "Boston", "Pune")
_GOODS = ("espresso beans 1 kg", "porcelain cup", "grinder burr set", "paper filters 100", "milk jug 600 ml")


def order_of(number: int) -> tuple[str, int, str, bytes]:
    """(key, queue id, tag, body) of message `number`; an order makes three messages, its queue keeps them in order."""
    order, event = divmod(number, len(EVENTS))
    # A cheap mixer, so that neighbours differ and the same number always gives the same order.
    mixed = (order * 2654435761 + 40503) % 2**32
    quantity, cents = mixed % 9 + 1, mixed // 7 % 50_000 + 199
    key = f"ORD-{order:08d}"
    body = (
        f'{{"order":"{key}","event":"{EVENTS[event]}","customer":"CUST-{mixed % 90_000:05d}",'
        f'"city":"{_CITIES[mixed % 8]}","lines":[{{"sku":"SKU-{mixed // 11 % 10_000:04d}","name":"{_GOODS[mixed % 5]}",'
        f'"quantity":{quantity},"price_cents":{cents}}}],"currency":"EUR","carrier":"parcel post","total_cents":{quantity * cents},'
        f'"trace":"{mixed:08x}{number:08x}"}}'
    )
    return key, order % QUEUES, EVENTS[event], body.encode()


def _message(number: int) -> tuple[Message, int]:
    key, queue_id, tag, body = order_of(number)
    return Message(TOPIC, body, keys=[key], tags=tag), queue_id


def _numbers_of_queue(queue_id: int, messages: int) -> Iterator[int]:
    for order in range(queue_id, -(-messages // len(EVENTS)), QUEUES):
        yield from range(order * len(EVENTS), min((order + 1) * len(EVENTS), messages))


def _disk_needed(config: StoreConfig, messages: int) -> int:
    # 480 bytes are more than a record of ours takes with everything around its body.
    segments = messages * 480 // config.mapped_file_size_commit_log + 1
    index_files = messages * 2 // (config.max_index_num - 1) + 1
    units = config.consume_queue_file_size // 20
    queue_files = QUEUES * (messages // QUEUES // units + 1)
    return (
        segments * config.mapped_file_size_commit_log
        + index_files * config.index_file_size
        + queue_files * config.consume_queue_file_size
    )


def own_store(steps: Steps, root: Path, messages: int) -> None:
    """Fill a fresh store of RocketMQ's default geometry, read a queue back, query keys, reopen."""
    config = StoreConfig()
    needed, free = _disk_needed(config, messages), shutil.disk_usage(root.parent).free
    if free < needed + needed // 10:
        raise CannotOpenError(
            f"the store needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {root.parent}: give --dir on a larger "
            "disk, or fewer --messages"
        )
    single = min(SINGLE_PUTS, messages // 4)
    places = array("q")
    store = MessageStore.open(root, config=config)
    with contextlib.closing(store):
        _fill(steps, store, messages, single, places)
        _read_back(steps, store, messages, places)
        _query(steps, store, messages, places)
        with steps.step("flush and close"):
            log_end = store.commit_log.max_offset
            ends = [store.max_queue_offset(TOPIC, queue_id) for queue_id in range(QUEUES)]
            store.close()
    with steps.step("open it again, check its bounds") as row:
        with MessageStore.open(root, config=config) as again:
            report = again.recovery_report
            check(report is not None and report.clean, f"the store was closed in order: {report}")
            check(again.commit_log.min_offset == 0, "the log begins at 0")
            check(again.commit_log.max_offset == log_end, "the log ends where it ended")
            numbers = [sum(1 for _ in _numbers_of_queue(queue_id, messages)) for queue_id in range(QUEUES)]
            check(ends == numbers, f"the queues held {numbers} messages, they say {ends}")
            found = [again.max_queue_offset(TOPIC, queue_id) for queue_id in range(QUEUES)]
            check(found == numbers, f"the queues hold {numbers} messages, they say {found}")
            check(sum(numbers) == messages, "every message is in a queue")
            last = again.message_at(places[-1])
            check(last.body == order_of(messages - 1)[3], "the last message is the last that was put")
            check(last.phy_offset + last.size == log_end, "nothing lies after it")
            _check_hits(again.query_message(TOPIC, order_of(messages - 1)[0]), messages - 1, messages, places)
        row.remark = f"{log_end:,} bytes of log".replace(",", " ")


def _fill(steps: Steps, store: MessageStore, messages: int, single: int, places: array[int]) -> None:
    making = Step("make the messages (not RocketMQ's work)", "messages", messages)
    clock = time.perf_counter
    size = 0
    with steps.step(f"put them in batches of {BATCH}", "messages") as row:
        batches = messages - single
        for first in range(0, batches, BATCH):
            started = clock()
            batch, queue_ids = zip(*map(_message, range(first, min(first + BATCH, batches))))
            made = clock()
            results = store.put_messages(batch, queue_ids)
            row.seconds += clock() - made
            making.seconds += made - started
            places.extend(result.phy_offset for result in results)
            size += sum(len(message.body) for message in batch)
        row.count, row.size = batches, store.commit_log.max_offset
        row.remark = f"bodies of {size // max(batches, 1)} B on average, each with a key and a tag in the index"
    with steps.step("put the rest one by one", "messages") as row:
        before = store.commit_log.max_offset
        for number in range(batches, messages):
            started = clock()
            message, queue_id = _message(number)
            made = clock()
            result = store.put_message(message, queue_id)
            row.seconds += clock() - made
            making.seconds += made - started
            places.append(result.phy_offset)
        row.count, row.size = single, store.commit_log.max_offset - before
    steps.rows.insert(len(steps.rows) - 2, making)
    check(len(places) == messages, "every put was answered")
    check(all(a < b for a, b in itertools.pairwise(places)), "phy offsets rise")


def _read_back(steps: Steps, store: MessageStore, messages: int, places: array[int]) -> None:
    queue_id = 3
    with steps.step(f"read queue {queue_id} back, compare each", "messages") as row:
        expected = _numbers_of_queue(queue_id, messages)
        began = time.perf_counter()
        at = 0
        while True:
            started = time.perf_counter()
            result = store.get_message(TOPIC, queue_id, at, BATCH)
            row.seconds += time.perf_counter() - started
            if result.status is not GetMessageStatus.FOUND:
                break
            for message in result.messages:
                number = next(expected, -1)
                check(number >= 0, "the queue holds no more than was put")
                key, _, tag, body = order_of(number)
                check(
                    message.body == body
                    and message.keys == [key]
                    and message.tags == tag
                    and message.queue_offset == row.count
                    and message.phy_offset == places[number]
                    and not message.corrupt,
                    f"message {number} comes back as it was put",
                )
                row.count += 1
                row.size += message.size
            at = result.next_queue_offset
        check(result.status is GetMessageStatus.OFFSET_OVERFLOW_ONE, f"the queue ends: {result.status}")
        check(next(expected, None) is None, "the queue holds all that was put into it")
        row.remark = f"and {time.perf_counter() - began - row.seconds:.1f} s to compare them"


def _check_hits(hits: QueryResult, number: int, messages: int, places: array[int]) -> None:
    """The key of message `number` finds the messages of its order, newest first, as they were put, and no others."""
    first = number - number % len(EVENTS)
    wanted = range(min(first + len(EVENTS), messages) - 1, first - 1, -1)
    check(
        not hits.truncated
        and [hit.phy_offset for hit in hits] == [places[each] for each in wanted]
        and all(hit.body == order_of(each)[3] for hit, each in zip(hits, wanted)),
        f"the key of message {number} finds its order",
    )


def _query(steps: Steps, store: MessageStore, messages: int, places: array[int]) -> None:
    chooser = random.Random(SEED)
    numbers = [chooser.randrange(messages) for _ in range(min(QUERIES, messages))]
    clock = time.perf_counter
    with steps.step("query random keys, compare each", "queries") as row:
        began = clock()
        for number in numbers:
            key = order_of(number)[0]
            started = clock()
            hits = store.query_message(TOPIC, key)
            row.seconds += clock() - started
            _check_hits(hits, number, messages, places)
            row.size += sum(hit.size for hit in hits)
        row.count = len(numbers)
        row.remark = f"{len(EVENTS)} messages a key; and {clock() - began - row.seconds:.1f} s to compare them"
    with steps.step("query keys that nobody put", "queries") as row:
        row.count = min(10_000, messages)
        for number in range(row.count):
            check(not store.query_message(TOPIC, f"NONE-{number:08d}"), "a key that was never put finds nothing")


# ------------------------------------------------------------------------------------------------------------ command


@click.command(name="demo")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=SAMPLE,
    help="Where store.tar.xz and sent.jsonl.xz of the sample lie.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    help="Work below this directory (default: the system's).",
)
@click.option(
    "--unpack",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Only unpack the sample store, as FOLDER, to try the other commands on.",
)
@click.option("--messages", type=click.IntRange(min=100), default=1_000_000, show_default=True, help="How many to put.")
def main(data: Path, directory: str | None, unpack: Path | None, messages: int) -> None:
    """Run the main job on a real broker's store, with checks and rates.

    Rebuilds index and queues of a store that RocketMQ 5.5.0 wrote and compares them byte for byte, finds its orders, then
    fills a store of its own and asks it. Every answer is checked; one that is wrong ends it with exit code 1.

    The store comes with the package; with --unpack it stays, and nothing else is done.
    """
    if unpack is not None:
        unpack_sample(data, unpack)
        name = shlex.quote(str(unpack))
        click.echo(f"a RocketMQ 5.5.0 broker's store of a shop's orders is in {escape(str(unpack))}; now try:")
        for command in (f"info {name}", f"query {name} Orders ORD-102499", f"serve {name}"):
            click.echo(f"  rmqstore {escape(command)}")
        return
    started = time.perf_counter()
    steps = Steps()
    try:
        with tempfile.TemporaryDirectory(prefix="rmqstore-demo-", dir=directory) as work:
            (Path(work) / "broker").mkdir()
            missing = [name for name in SAMPLE_FILES if not (data / name).is_file()]
            if missing:
                click.echo(
                    f"The sample store of a real broker ({' and '.join(missing)}) is not in {data}: it comes with the "
                    "package, in rmqstore/sample; give its place with --data. Running only the second half.",
                    err=True,
                )
            else:
                click.echo("A real broker's store:", err=True)
                broker_store(steps, data, Path(work) / "broker")
            click.echo("A store of our own:", err=True)
            own_store(steps, Path(work) / "own", messages)
    except CheckFailedError as error:
        steps.print(time.perf_counter() - started)
        raise click.ClickException(f"this does not hold: {escape(str(error))}") from None
    except StoreError as error:
        steps.print(time.perf_counter() - started)
        raise click.ClickException(f"{type(error).__name__}: {escape(str(error))}") from None
    steps.print(time.perf_counter() - started)
    click.echo("Everything that was checked holds." if not missing else "The second half holds; the first did not run.")


if __name__ == "__main__":
    main(prog_name="python -m rmqstore.demo")
