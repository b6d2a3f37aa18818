"""The demo: verify, rebuild and search a real broker's store, then write and read a million messages.

Each step compares its result with the broker's files, the messages that the producers sent, or the formula of a message; a
difference ends the demo with exit code 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import random
import shlex
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.terminal import escape, format_number
from rmqstore.config import StoreConfig
from rmqstore.errors import StoreError
from rmqstore.message import Message, MessageExt
from rmqstore.offline.rebuild import rebuild
from rmqstore.offline.verify import verify
from rmqstore.store.message_store import MessageStore

__all__ = ["main"]

# The delay levels of the sample store's broker, which no file of a store records.
SAMPLE_DELAY_LEVEL = "1s 2s 30m 1h"
SAMPLE = Path(__file__).resolve().parent / "sample"
TOPIC = "Orders"
QUEUES = 8
BATCH = 1000


def check(holds: bool, what: str) -> None:
    """Raise a click error unless `holds`."""
    if not holds:
        raise click.ClickException(f"check failed: {escape(what)}")


@dataclass
class Step:
    """A count, and the seconds that it took."""

    count: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


@contextlib.contextmanager
def step(name: str, unit: str) -> Iterator[Step]:
    """Print a line with the rate of the block, or of its timed parts."""
    row, started = Step(), time.perf_counter()
    yield row
    seconds = row.seconds or time.perf_counter() - started
    rate = f"{format_number(round(row.count / seconds))}/s"
    click.echo(f"  {name:<36}{seconds:>8.2f} s {format_number(row.count):>10} {unit:<9}{rate:>14}")


# ------------------------------------------------------------------------------------------------ a real broker's store


def _digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _as_sent(message: MessageExt, sent: dict[str, Any]) -> bool:
    return (
        len(message.body) == sent["body_len"]
        # RocketMQ clears the top bit of its CRCs.
        and zlib.crc32(message.body) & 0x7FFFFFFF == sent["body_crc"]
        and (message.queue_id, message.queue_offset) == (sent["queue_id"], sent["queue_offset"])
        and (message.unique_key, message.msg_id) == (sent["msg_id"], sent["offset_msg_id"])
        and message.tags == sent.get("tags")
        and message.keys == sent.get("keys", "").split()
        and not message.corrupt
    )


def unpack_sample(target: Path) -> None:
    """Unpack the sample store as `target`, which appears only when it is complete."""
    if target.exists() or target.is_symlink():
        raise CannotOpenError(f"{escape(str(target))} already exists", "Give the name of a new folder.")
    if not target.parent.is_dir():
        raise CannotOpenError(f"no such folder: {escape(str(target.parent))}", "Create it, or give another name.")
    with tempfile.TemporaryDirectory(prefix=".rmqstore-sample-", dir=target.parent) as beside:
        with tarfile.open(SAMPLE / "store.tar.xz", "r:xz") as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(beside, filter="data")
            else:  # Python before 3.10.12; the archive is our own.
                tar.extractall(beside)
        (root,) = Path(beside).iterdir()
        root.rename(target)


def broker_store(root: Path) -> None:
    """Verify, rebuild and search the store that a real RocketMQ 5.5.0 broker wrote."""
    with step("unpack it", "files") as row:
        unpack_sample(root)
        row.count = len(_digests(root))
    config = StoreConfig.infer(root, message_delay_level=SAMPLE_DELAY_LEVEL)
    with step("verify it, CRCs included", "bytes") as row:
        # Without the compression libraries, verify does not check all bodies.
        findings = [each for each in verify(root, config) if each.kind != "not_checked"]
        row.count = sum(path.stat().st_size for path in (root / "commitlog").iterdir())
        check(not findings, f"the broker's store has no findings, but: {findings[:3]}")
    with step("rebuild its lost index and queues", "records") as row:
        log, queues, index = (_digests(root / folder) for folder in ("commitlog", "consumequeue", "index"))
        check(len(queues) > 20 and len(index) == 5, "the sample has queues and five index files")
        shutil.rmtree(root / "consumequeue")
        shutil.rmtree(root / "index")
        with row.timed():
            row.count = rebuild(root, config=config).records
    with step("compare them with the broker's", "files") as row:
        row.count = len(queues) + len(index)
        check(_digests(root / "consumequeue") == queues, "rebuilt queue files equal the broker's")
        # The names of index files are creation times, which differ.
        check([*_digests(root / "index").values()] == [*index.values()], "rebuilt index files equal the broker's")
        check(_digests(root / "commitlog") == log, "the commit log was not touched")
    with lzma.open(SAMPLE / "sent.jsonl.xz", "rt", encoding="utf-8") as file:
        sent = [json.loads(line) for line in file]
    orders = [each for each in sent if each["kind"] == "plain" and each["topic"] == TOPIC]
    check(len(orders) > 1000, "the producers' account has more than a thousand orders")
    with (
        MessageStore.open(root, config=config, read_only=True) as store,
        step("find every sent order by key", "queries") as row,
    ):
        row.count = len(orders)
        for each in orders:
            hits = store.query_message(TOPIC, each["keys"].split()[0])
            hit = next((hit for hit in hits if hit.msg_id == each["offset_msg_id"]), None)
            check(hit is not None and _as_sent(hit, each), f"the message {each['msg_id']} is found as it was sent")


# ------------------------------------------------------------------------------------------------------- a new store


def order_of(number: int) -> Message:
    """Return message `number`; three of them are one order, with one key and in one queue."""
    order, event = divmod(number, 3)
    mixed = (order * 2654435761 + 40503) % 2**32
    tag = ("created", "paid", "shipped")[event]
    key = f"ORD-{order:08d}"
    body = (
        f'{{"order":"{key}","event":"{tag}","customer":"CUST-{mixed % 90_000:05d}","city":"São Paulo","lines":[{{"sku":'
        f'"SKU-{mixed // 11 % 10_000:04d}","name":"espresso beans 1 kg","quantity":{mixed % 9 + 1},"price_cents":'
        f'{mixed // 7 % 50_000 + 199}}}],"currency":"EUR","carrier":"parcel post","trace":"{mixed:08x}{number:08x}"}}'
    )
    return Message(TOPIC, body.encode(), keys=[key], tags=tag)


def own_store(root: Path, messages: int) -> None:
    """Fill a new store of RocketMQ's default geometry, read its queues back, and query keys."""
    with MessageStore.open(root, config=StoreConfig()) as store:
        with step(f"put them in batches of {BATCH}", "messages") as row:
            for first in range(0, messages, BATCH):
                numbers = range(first, min(first + BATCH, messages))
                batch, queue_ids = [order_of(number) for number in numbers], [number // 3 % QUEUES for number in numbers]
                with row.timed():
                    store.put_messages(batch, queue_ids)
            row.count = messages
        _read_back(store, messages)
        with step("query random keys", "queries") as row:
            chooser = random.Random(20261121)
            row.count = min(100_000, messages)
            for number in (chooser.randrange(messages) for _ in range(row.count)):
                wanted = [order_of(each) for each in range(number - number % 3, min(number - number % 3 + 3, messages))]
                with row.timed():
                    hits = store.query_message(TOPIC, wanted[0].keys[0])
                found = [hit.body for hit in reversed(hits)]
                check(found == [each.body for each in wanted], f"the key of message {number} finds its order")
    with MessageStore.open(root, config=StoreConfig()) as again:
        report = again.recovery_report
        check(report is not None and report.clean, f"the store was shut down cleanly: {report}")
        total = sum(again.max_queue_offset(TOPIC, queue_id) for queue_id in range(QUEUES))
        check(total == messages, f"the reopened store has {messages} messages, not {total}")


def _read_back(store: MessageStore, messages: int) -> None:
    with step("read them back, queue by queue", "messages") as row:
        for queue_id in range(QUEUES):
            numbers = (number for number in range(messages) if number // 3 % QUEUES == queue_id)
            at, end = 0, store.max_queue_offset(TOPIC, queue_id)
            while at < end:
                with row.timed():
                    got = store.get_message(TOPIC, queue_id, at, BATCH)
                for message in got.messages:
                    wanted = order_of(next(numbers, 0))
                    same = (message.body, message.keys, message.tags) == (wanted.body, [*wanted.keys], wanted.tags)
                    check(same and not message.corrupt, f"number {message.queue_offset} of queue {queue_id} is as it was put")
                row.count += len(got.messages)
                at = got.next_queue_offset
        check(row.count == messages, f"{messages} messages were put, and {row.count} are read back")


# ------------------------------------------------------------------------------------------------------------ command


@click.command(name="demo")
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    help="Directory for temporary files; by default that of the operating system.",
)
@click.option(
    "--unpack",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Only unpack the sample store to FOLDER, to try the other commands on it.",
)
@click.option(
    "--messages", type=click.IntRange(min=100), default=1_000_000, show_default=True, help="Number of messages to put."
)
def main(directory: str | None, unpack: Path | None, messages: int) -> None:
    """Verify, rebuild and read a real broker's store, and measure the speed.

    Rebuilds the index and queues of a store written by RocketMQ 5.5.0, compares them byte for byte, and finds its orders;
    then fills a new store and reads it back. Every result is checked, and the exit code is 1 if one is wrong.

    The sample store is part of the package. With --unpack it is kept, and nothing else is done.
    """
    if unpack is not None:
        unpack_sample(unpack)
        name = shlex.quote(str(unpack))
        click.echo(f"unpacked the store of a RocketMQ 5.5.0 broker with a shop's orders to {escape(str(unpack))}; now try:")
        for command in (f"info {name}", f"query {name} Orders ORD-102499", f"serve {name}"):
            click.echo(f"  rmqstore {escape(command)}")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="rmqstore-demo-", dir=directory) as work:
            click.echo("A real broker's store:")
            broker_store(Path(work) / "broker")
            click.echo("A new store:")
            own_store(Path(work) / "own", messages)
    except StoreError as error:
        raise click.ClickException(f"{type(error).__name__}: {escape(str(error))}") from None
    click.echo("All checks passed.")


if __name__ == "__main__":
    main(prog_name="python -m rmqstore.demo")
