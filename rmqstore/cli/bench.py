"""rmqstore bench: what this machine, and the disk of a directory, do with a store.

Owns the steps and their figures.  Works on a store of its own below DIR, which it removes at the end, after Ctrl-C and
after an error too; it never touches another store.  Invariants:

- Every step checks what it got (counts, bodies, places) and fails where an answer is wrong: a fast wrong answer is not a rate.
- A figure counts only the work that its line names; making the messages is not part of it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from rmqstore._version import __version__
from rmqstore.cli.completion import complete_path
from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.group import orderly_end
from rmqstore.cli.options import Given, store_options
from rmqstore.cli.terminal import Printer, Progress, format_number, format_size, note
from rmqstore.config import StoreConfig
from rmqstore.errors import MissingDependencyError, StoreError
from rmqstore.message import Message
from rmqstore.store.message_store import MessageStore

_TOPIC = "Bench"
_QUEUES = 4
_BATCH = 1000
# Records and units around a body of the benchmark: what the log and the queues take beside it.
_AROUND = 250


@dataclass(frozen=True, slots=True)
class Step:
    """One line: how often something was done, in how many seconds, over how many bytes (size), and how long one took (seconds)."""

    name: str
    unit: str
    count: int
    seconds: float
    size: int = 0
    median: float | None = None
    p99: float | None = None
    longest: float | None = None

    @property
    def rate(self) -> float:
        """float: how often a second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(), shell_complete=complete_path)
@click.option(
    "--messages",
    type=click.IntRange(min=_BATCH, max=100_000_000),
    default=200_000,
    show_default=True,
    help="Messages that are put, then read and found.",
)
@click.option(
    "--body-size", type=click.IntRange(min=0, max=4_000_000), default=256, show_default=True, help="Bytes of a body."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.05, max=3600),
    default=3.0,
    show_default=True,
    help="At most so long for each step that waits for the disk.",
)
@store_options
def bench(directory: str, messages: int, body_size: int, seconds: float, given: Given) -> None:
    """Measure what this machine and the disk of DIR do with a store.

    Puts messages into a store of its own in DIR (by default here), reads them in order, finds them by key, goes over them
    all, and asks the disk how long a flush takes. The store is removed at the end. Its geometry is RocketMQ's but for
    segments of 128 MiB and an index of a size that fits; -o sets another.
    """
    if not os.path.isdir(directory):
        raise CannotOpenError(f"there is no such directory [{directory}]", "Give a directory on the disk to measure.")
    config = _config(given, messages)
    _check_space(directory, config, messages, body_size)
    printer = Printer(given.as_json)
    steps: list[Step] = []
    with orderly_end():
        try:
            root = tempfile.mkdtemp(prefix=".rmqstore-bench-", dir=directory)
        except OSError as error:
            raise CannotOpenError(
                f"cannot write into {directory}: {error.strerror}", "Give a directory that you may write into."
            ) from None
        try:
            for step in _steps(root, config, messages, body_size, seconds):
                steps.append(step)
                if given.as_json:
                    printer.json_line(_step_object(step))
                    sys.stdout.flush()
        finally:
            shutil.rmtree(root, ignore_errors=True)
    if given.as_json:
        printer.json_line({"type": "machine", "directory": os.path.abspath(directory), **_machine(config)})
    else:
        _print(printer, directory, config, steps)


def _config(given: Given, messages: int) -> StoreConfig:
    # A key and a unique key or a tag each: up to three entries a message, in two files at least where it is not small.
    entries = max(100_000, min(3 * messages, 20_000_000))
    values: dict[str, Any] = {
        "mapped_file_size_commit_log": 128 << 20,
        "max_index_num": entries,
        "max_hash_slot_num": max(entries // 4, 1),
        **given.overrides(),
    }
    try:
        return StoreConfig(**values)
    except StoreError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _check_space(directory: str, config: StoreConfig, messages: int, body_size: int) -> None:
    log = messages * (body_size + _AROUND)
    # The newest file of each kind is laid out whole, and so is the one after it, which is made ready ahead.
    needed = log + 3 * config.mapped_file_size_commit_log + 2 * config.index_file_size
    needed += (_QUEUES * 2) * config.consume_queue_file_size + 20 * messages
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CannotOpenError(
            f"this would take about {format_size(needed)}, and {format_size(free)} are free [{directory}]",
            "Give fewer --messages, smaller files with -o mapped_file_size_commit_log=16777216, or another directory.",
        )


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise StoreError(f"the benchmark got a wrong answer: {what}; please report this with the command that you gave")


def _quantile(sorted_times: list[float], part: float) -> float:
    return sorted_times[min(int(part * len(sorted_times)), len(sorted_times) - 1)]


def _timed(name: str, unit: str, times: list[float], size: int = 0) -> Step:
    ordered = sorted(times)
    return Step(
        name, unit, len(times), sum(times), size, statistics.median(ordered), _quantile(ordered, 0.99), ordered[-1]
    )


def _steps(root: str, config: StoreConfig, messages: int, body_size: int, seconds: float) -> Iterator[Step]:
    with Progress("flush of 4 KiB by the disk", "flushes"):
        yield _flushes(root, seconds)
    for kind in ("SYNC_FLUSH", "ASYNC_FLUSH"):
        path = os.path.join(root, kind.lower())
        with MessageStore.open(path, config=config.replace(flush_disk_type=kind)) as store:
            if kind == "SYNC_FLUSH":
                yield _put_each(store, messages, body_size, seconds)
            else:
                yield from _work(store, messages, body_size, seconds)
        shutil.rmtree(path)


def _flushes(root: str, seconds: float) -> Step:
    times: list[float] = []
    block = os.urandom(4096)
    path = os.path.join(root, "flush")
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        end = time.perf_counter() + min(seconds, 2.0)
        while time.perf_counter() < end and len(times) < 10_000:
            os.write(descriptor, block)
            began = time.perf_counter()
            os.fsync(descriptor)
            times.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return _timed("flush 4 KiB (fsync)", "flushes", times, 4096 * len(times))


def _message(number: int, body_size: int) -> Message:
    # Random bytes that the number tells, so that each body can be checked and no disk can compress them away.
    body = random.Random(number).randbytes(body_size)
    return Message(_TOPIC, body, keys=[f"key-{number}"], tags=f"tag{number % 5}")


def _put_each(store: MessageStore, messages: int, body_size: int, seconds: float) -> Step:
    made = [_message(number, body_size) for number in range(min(messages, 10_000))]
    times: list[float] = []
    size = 0
    end = time.perf_counter() + seconds
    with Progress("put, one flush each", "messages") as bar:
        for number, message in enumerate(made):
            began = time.perf_counter()
            size += store.put_message(message, number % _QUEUES).size
            times.append(time.perf_counter() - began)
            if number % 64 == 0:
                bar(number, len(made))
            if time.perf_counter() > end:
                break
    _check(sum(store.max_queue_offset(_TOPIC, each) for each in range(_QUEUES)) == len(times), "messages that were put")
    return _timed("put one, SYNC_FLUSH", "messages", times, size)


def _work(store: MessageStore, messages: int, body_size: int, seconds: float) -> Iterator[Step]:
    singles = min(messages // 2, 50_000)
    made = [_message(number, body_size) for number in range(singles)]
    times: list[float] = []
    size = 0
    with Progress("put, one by one", "messages") as bar:
        for number, message in enumerate(made):
            began = time.perf_counter()
            size += store.put_message(message, number % _QUEUES).size
            times.append(time.perf_counter() - began)
            if number % 1024 == 0:
                bar(number, singles)
    yield _timed("put one, ASYNC_FLUSH", "messages", times, size)
    spent, size = 0.0, 0
    with Progress("put, in batches", "messages") as bar:
        for first in range(singles, messages, _BATCH):
            made = [_message(number, body_size) for number in range(first, min(first + _BATCH, messages))]
            queue_ids = [number % _QUEUES for number in range(first, first + len(made))]
            began = time.perf_counter()
            put = store.put_messages(made, queue_ids)
            spent += time.perf_counter() - began
            size += sum(each.size for each in put)
            bar(first - singles, messages - singles)
    yield Step(f"put {_BATCH} at once, ASYNC_FLUSH", "messages", messages - singles, spent, size)
    began = time.perf_counter()
    with Progress("flushing", ""):
        store.flush()
    yield Step("flush of what is left", "flushes", 1, time.perf_counter() - began)
    yield _get(store, messages, body_size)
    yield _query(store, messages, body_size, seconds)
    yield _walk(store, messages)
    with contextlib.suppress(MissingDependencyError):
        yield _scan(store, messages)


def _get(store: MessageStore, messages: int, body_size: int) -> Step:
    count = size = 0
    spent = 0.0
    with Progress("get, in order", "messages") as bar:
        for queue_id in range(_QUEUES):
            at = 0
            while True:
                began = time.perf_counter()
                got = store.get_message(_TOPIC, queue_id, at, 256)
                spent += time.perf_counter() - began
                if not got.messages:
                    break
                first = got.messages[0]
                _check(
                    first.body == _message(first.queue_offset * _QUEUES + queue_id, body_size).body,
                    f"the body at queue offset {first.queue_offset} of queue {queue_id}",
                )
                count += len(got.messages)
                size += sum(message.size for message in got.messages)
                at = got.next_queue_offset
                bar(count, messages)
    _check(count == messages, f"{count} of {messages} messages were read from the queues")
    return Step("get in order", "messages", count, spent, size)


def _query(store: MessageStore, messages: int, body_size: int, seconds: float) -> Step:
    chooser = random.Random(1)
    times: list[float] = []
    end = time.perf_counter() + seconds
    count = min(messages, 50_000)
    with Progress("query by key", "queries") as bar:
        for done in range(count):
            number = chooser.randrange(messages)
            began = time.perf_counter()
            found = store.query_message(_TOPIC, f"key-{number}", 32)
            times.append(time.perf_counter() - began)
            _check(
                len(found) == 1 and found[0].queue_offset * _QUEUES + found[0].queue_id == number,
                f"what has key-{number}",
            )
            if done % 1024 == 0:
                bar(done, count)
            if time.perf_counter() > end:
                break
    return _timed("query by key", "queries", times)


def _walk(store: MessageStore, messages: int) -> Step:
    log = store.commit_log
    total = log.max_offset - log.min_offset
    count = 0
    began = time.perf_counter()
    with Progress("going over the log", "bytes") as bar:
        for message in store.messages():
            count += 1
            if count % 16384 == 0:
                bar(message.phy_offset - log.min_offset, total)
    spent = time.perf_counter() - began
    _check(count == messages, f"{count} of {messages} messages are in the log")
    return Step("go over the log", "messages", count, spent, total)


def _scan(store: MessageStore, messages: int) -> Step:
    log = store.commit_log
    count = 0
    began = time.perf_counter()
    with Progress("scanning into Arrow", "messages") as bar:
        for batch in store.scan(["keys", "store_timestamp", "body"]):
            count += batch.num_rows
            bar(count, messages)
    spent = time.perf_counter() - began
    _check(count == messages, f"{count} of {messages} rows were scanned")
    return Step("scan into Arrow", "messages", count, spent, log.max_offset - log.min_offset)


# ------------------------------------------------------------------------------------------------------------- printing


def _machine(config: StoreConfig) -> dict[str, Any]:
    return {
        "rmqstore": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processors": os.cpu_count(),
        "mapped_file_size_commit_log": config.mapped_file_size_commit_log,
        "max_index_num": config.max_index_num,
    }


def _step_object(step: Step) -> dict[str, Any]:
    value: dict[str, Any] = {
        "type": "step", "name": step.name, "unit": step.unit, "count": step.count, "seconds": round(step.seconds, 6),
        "per_second": round(step.rate, 1), "size": step.size,
    }  # fmt: skip
    for name in ("median", "p99", "longest"):
        seconds = getattr(step, name)
        value[f"{name}_us"] = None if seconds is None else round(1e6 * seconds, 1)
    return value


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    micros = 1e6 * seconds
    return f"{micros:.1f} µs" if micros < 1000 else f"{micros / 1000:.1f} ms" if micros < 1e6 else f"{seconds:.2f} s"


def _print(printer: Printer, directory: str, config: StoreConfig, steps: list[Step]) -> None:
    printer.table(
        "bench",
        ("step", "count", "seconds", "a second", "bytes/s", "median", "99 %", "longest"),
        [
            (
                step.name,
                format_number(step.count),
                f"{step.seconds:.2f}",
                format_number(round(step.rate)),
                f"{format_size(round(step.size / step.seconds))}" if step.size and step.seconds else "",
                _duration(step.median),
                _duration(step.p99),
                _duration(step.longest),
            )
            for step in steps
        ],
    )
    machine = _machine(config)
    note(
        f"on {os.path.abspath(directory)}: {machine['system']}, {machine['architecture']}, {machine['processors']} processors, "
        f"Python {machine['python']}; segments of {format_size(config.mapped_file_size_commit_log)}. Other work on this machine "
        "counts in; compare only runs in which it was quiet."
    )
