"""How cost grows with size: ``python -m asv_bench.growth`` (`make bench-growth`).

    keys      putting and selecting, per key, with 1 000 to 100 000 000 keys in the index
    chains    selecting a key that lies 1 to 1000 entries deep
    queues    opening a store of 1 to 100 000 queues, in a process of its own: seconds and memory
    segments  opening a store of 1 to 10 000 segments of 1 GiB, which are sparse

``--axis`` measures commands and calls at three sizes, ten and a hundred times apart, of one number (`AXES`).

Owns what is measured there, the plots, and their place in asv_bench/FIGURES.md.  The figures are of one machine and one run; the
shapes are what counts.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.testing import CliRunner

from rmqstore import IndexFile, Message, MessageStore, StoreConfig
from rmqstore._core import MAGIC_BLANK, Region
from rmqstore._dispatch import TopicTable
from rmqstore._rows import RowBatch
from rmqstore.cli import main as cli
from rmqstore.index.index_service import IndexService

from . import document, machine
from .peers import data

FOLDER = document.DOCS / "growth"
RESULT = FOLDER / "growth.json"
AXES_RESULT = FOLDER / "axes.json"
NAME = "growth"
CHUNK = 1_000_000
HOST = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")
Point = dict[str, float]
Series = dict[str, list[Point]]


def seconds_of(work: Callable[[], object]) -> float:
    """How long a call took."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e9


# -------------------------------------------------------------------------------------------------------------- keys


def keys(scratch: str, quick: bool) -> Iterator[tuple[str, Point]]:
    """Nanoseconds a key: files of RocketMQ's default geometry, as many as it takes; and one file with a slot for four keys."""
    sizes = [1000, 10_000, 100_000] + ([] if quick else [1_000_000, 10_000_000, 100_000_000])
    for number in sizes:
        config = StoreConfig(max_hash_slot_num=max(number // 4, 100), max_index_num=number + 2)
        path = os.path.join(scratch, "20260101000000000")
        with IndexFile.create(path, config) as index:
            put, sample = fill(index.put_keys, index.put_hashes, number)
            yield "put_keys, 4 keys a slot", {"x": number, "y": put}
            yield "select_phy_offsets, 4 keys a slot", {"x": number, "y": per_key(index.select_phy_offsets, sample)}
            yield "select_phy_offset, 4 keys a slot", {"x": number, "y": one_by_one(index.select_phy_offset, sample)}
        os.unlink(path)
    config = StoreConfig()
    for number in sizes:
        folder = tempfile.mkdtemp(dir=scratch)
        service = IndexService(folder, config)
        service.load()
        _, sample = fill(None, service.put_hashes, number)
        ask = service.query_offset
        cost = one_by_one(lambda key, ask=ask: ask(data.TOPIC, key.partition("#")[2], 64, 0, 2**63 - 1), sample)
        yield "IndexService.query_offset, default files", {"x": number, "y": cost}
        service.close()
        shutil.rmtree(folder)


def fill(put_keys: Any, put_hashes: Any, number: int) -> tuple[float, list[str]]:
    """Put random keys; nanoseconds for each of the last million, and a sample of keys from all over the file."""
    from .peers.index import index_hash

    rng = np.random.default_rng(7)
    sample: list[str] = []
    cost = 0.0
    for at in range(0, number, CHUNK):
        count = min(CHUNK, number - at)
        offsets = (at + np.arange(count, dtype=np.int64)) * data.STEP
        times = np.full(count, data.TIME, np.int64)
        last = at + count == number
        # Hashes stand for most keys: making a hundred million texts takes longer than all that is measured.
        known = count if last and put_keys is not None else max(count // 100, 1)
        texts = data.whole_keys(known, seed=1000 + at // CHUNK)
        sample += texts[:: max(1, known * -(-number // CHUNK) // 50_000)]
        if last and put_keys is not None:
            cost = (
                seconds_of(lambda texts=texts, offsets=offsets, times=times: put_keys(texts, offsets, times))
                / count
                * 1e9
            )
            continue
        hashes = rng.integers(0, 2**31, count, dtype=np.int32)
        hashes[:: max(count // known, 1)][:known] = [index_hash(text) for text in texts]
        put_hashes(hashes, offsets, times)
    order = rng.permutation(len(sample))
    return cost, [sample[i] for i in order]


def per_key(select: Callable[[list[str]], object], sample: list[str]) -> float:
    """Nanoseconds a key of a batch; the best of three, because the first touches pages of the file."""
    return min(seconds_of(lambda: select(sample)) for _ in range(3)) / len(sample) * 1e9


def one_by_one(select: Callable[[str], object], sample: list[str]) -> float:
    """Nanoseconds a call; the best of three."""

    def ask() -> None:
        for key in sample:
            select(key)

    return min(seconds_of(ask) for _ in range(3)) / len(sample) * 1e9


# ------------------------------------------------------------------------------------------------------------ chains


def chains(scratch: str, quick: bool) -> Iterator[tuple[str, Point]]:
    """Nanoseconds a select of a key with so many entries of other keys in front of it; a million entries in all."""
    from .peers.index import index_hash

    slots = 2_000_003
    entries = 100_000 if quick else 1_000_000
    config = StoreConfig(max_hash_slot_num=slots, max_index_num=entries + 2)
    rng = np.random.default_rng(8)
    for depth in (1, 2, 5, 10, 20, 50, 100) + (() if quick else (200, 500, 1000)):
        path = os.path.join(scratch, "20260101000000000")
        texts = data.whole_keys(entries // depth, seed=9)
        own = np.array([index_hash(text) for text in texts], np.int64)
        # Keys whose slots are their own, so that each chain is as deep as it should be.
        _, first = np.unique(own % slots, return_index=True)
        own, texts = own[first], [texts[i] for i in first]
        with IndexFile.create(path, config) as index:
            for level in range(depth):
                hashes = own
                if level:
                    others = (own // slots + 1 + rng.integers(0, 500, len(own))) % (2**31 // slots)
                    hashes = (
                        np.where(others == own // slots, (others + 1) % (2**31 // slots), others) * slots + own % slots
                    )
                order = rng.permutation(len(own))
                index.put_hashes(
                    hashes[order].astype(np.int32),
                    np.full(len(own), level * data.STEP, np.int64),
                    np.full(len(own), data.TIME, np.int64),
                )
            sample = [texts[i] for i in rng.permutation(len(texts))[: 2_000_000 // depth]]
            counts = index.select_phy_offsets(sample)[1]
            assert len(counts) in (len(sample), len(sample) + 1)
            yield "select_phy_offsets, batch", {"x": depth, "y": per_key(index.select_phy_offsets, sample)}
            yield "select_phy_offset, one call", {"x": depth, "y": one_by_one(index.select_phy_offset, sample)}
        os.unlink(path)


# ----------------------------------------------------------------------------------------------------------- opening

OPEN = """
import json, sys, time
from rmqstore import MessageStore

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

own = memory("RssAnon")
begin = time.perf_counter_ns()
store = MessageStore.open(sys.argv[1], read_only=sys.argv[2] == "read-only")
seconds = (time.perf_counter_ns() - begin) / 1e9
found = {"seconds": seconds, "peak": memory("VmHWM"), "own": memory("RssAnon") - own}
found["queues"], found["end"] = len(store.queues.keys()), store.commit_log.max_offset
store.close()
print(json.dumps(found))
"""

KILLED = """
import os, sys
from rmqstore import MessageStore

store = MessageStore.open(sys.argv[1])
os._exit(0)
"""


def opened(path: str, how: str, times: int = 3) -> dict[str, float]:
    """Medians of opening in a process of its own: "read-only", "writing" after an orderly close, "killed" after a kill."""
    rows = []
    for _ in range(times):
        if how == "killed":
            subprocess.run([sys.executable, "-c", KILLED, path], check=True)
        command = [sys.executable, "-c", OPEN, path, how]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def rows_of(numbers: range, topic: Callable[[int], bytes], queue_id: Callable[[int], int]) -> list[Any]:
    """Messages for `encode`: the first of its queue each, with one key."""
    return [
        (
            topic(i),
            b"x" * 100,
            b"KEYS\x01key%d\x02" % i,
            HOST,
            HOST,
            queue_id(i),
            0,
            0,
            0,
            1,
            0,
            data.TIME,
            data.TIME,
            0,
        )
        for i in numbers
    ]


def encode(region: Region, pos: int, base_offset: int, rows: list[Any]) -> list[int]:
    """Encode these rows; their sizes."""
    batch = RowBatch(TopicTable(), HOST, {}, 0)
    batch.take_prepared(rows)
    batch.encode(region, pos, base_offset, 0)
    sizes: list[int] = batch.columns()[3].tolist()
    return sizes


def make_queues(path: str, number: int, config: StoreConfig) -> None:
    """A closed store of so many queues, ten a topic, with a message each; its files are made here, which is quicker."""

    def topic(i: int) -> bytes:
        return b"Topic%05d" % (i // 10)

    os.makedirs(os.path.join(path, "commitlog"))
    segment = os.path.join(path, "commitlog", f"{0:020d}")
    with open(segment, "wb") as file:
        file.truncate(config.mapped_file_size_commit_log)
    fd = os.open(segment, os.O_RDWR)
    region = Region.map(fd, config.mapped_file_size_commit_log, True)
    os.close(fd)
    at = 0
    for first in range(0, number, 10_000):
        numbers = range(first, min(first + 10_000, number))
        for i, size in zip(numbers, encode(region, at, 0, rows_of(numbers, topic, lambda i: i % 10))):
            folder = os.path.join(path, "consumequeue", topic(i).decode(), str(i % 10))
            os.makedirs(folder)
            with open(os.path.join(folder, f"{0:020d}"), "wb") as file:
                file.write(struct.pack(">qiq", at, size, 0))
                file.truncate(config.consume_queue_file_size)
            at += size
    region.close()
    # This makes the index and ends in order.
    MessageStore.open(path, config=config).close()


def make_segments(path: str, number: int, config: StoreConfig) -> None:
    """A closed store of so many sparse segments with a message each, which a blank follows."""
    size = config.mapped_file_size_commit_log
    os.makedirs(os.path.join(path, "commitlog"))
    scratch = os.path.join(path, "scratch")
    with open(scratch, "wb") as file:
        file.truncate(4096)
    fd = os.open(scratch, os.O_RDWR)
    region = Region.map(fd, 4096, True)
    os.close(fd)
    for i in range(number):
        (row,) = rows_of(range(i, i + 1), lambda i: b"Orders", lambda i: 0)
        (length,) = encode(region, 0, i * size, [(*row[:10], i, *row[11:])])
        blank = struct.pack(">ii", size - length, MAGIC_BLANK) if i + 1 < number else b""
        with open(os.path.join(path, "commitlog", f"{i * size:020d}"), "wb") as file:
            file.write(region.read(0, length) + blank)
            file.truncate(size)
    region.close()
    os.unlink(scratch)
    MessageStore.open(path, config=config).close()


def openings(
    scratch: str, numbers: list[int], make: Callable[[str, int, StoreConfig], None], config: StoreConfig
) -> Iterator[tuple[str, Point]]:
    """Seconds and memory of each kind of opening."""
    for number in numbers:
        path = os.path.join(scratch, "store")
        make(path, number, config)
        for how, name in (
            ("read-only", "read-only"),
            ("writing", "for writing, after an orderly close"),
            ("killed", "for writing, after a kill"),
        ):
            found = opened(path, how, 3 if number < 50_000 else 1)
            yield name, {"x": number, "y": found["seconds"], "peak": found["peak"], "own": found["own"]}
        shutil.rmtree(path)


def queues(scratch: str, quick: bool) -> Iterator[tuple[str, Point]]:
    """Seconds and bytes; queue files of 4000 bytes, because of the disk."""
    config = StoreConfig(mapped_file_size_consume_queue=4000, max_hash_slot_num=100_000, max_index_num=400_000)
    numbers = [1, 10, 100, 1000] + ([] if quick else [10_000, 100_000])
    yield from openings(scratch, numbers, make_queues, config)


def segments(scratch: str, quick: bool) -> Iterator[tuple[str, Point]]:
    """Seconds and bytes; RocketMQ's default of 1 GiB a segment."""
    config = StoreConfig(max_hash_slot_num=100_000, max_index_num=400_000)
    numbers = [1, 10, 100] + ([] if quick else [1000, 10_000])
    yield from openings(scratch, numbers, make_segments, config)


# -------------------------------------------------------------------------------------------------------------- axes


def command(*arguments: str) -> Callable[[str, int], object]:
    """A command on the store of an axis, in this process: the start of an interpreter does not grow."""

    def work(path: str, number: int) -> object:
        result = CliRunner().invoke(cli, [*arguments[:1], path, *arguments[1:]])
        if result.exit_code:
            raise RuntimeError(f"rmqstore {' '.join(arguments)} failed: {result.output[-500:]}{result.exception!r}")
        return result

    return work


def call(ask: Callable[[MessageStore, int], object]) -> Callable[[str, int], object]:
    """A call on the store of an axis, opened for reading; the opening is part of it."""

    def work(path: str, number: int) -> object:
        with MessageStore.open(path, read_only=True) as store:
            return ask(store, number)

    return work


def ten_per_topic(path: str, number: int) -> None:
    """A store of this number of queues, with small queue files."""
    make_queues(path, number, SMALL)


def progress(path: str, groups: int, entries: int) -> None:
    """A thousand queues, and this number of groups with this number of entries of progress each."""
    ten_per_topic(path, 1000)
    table = {
        f"Topic{entry:05d}@group{group:05d}": dict.fromkeys(range(10), 0)
        for group in range(groups)
        for entry in range(entries)
    }
    names = {f"group{group:05d}": {"groupName": f"group{group:05d}"} for group in range(groups)}
    config = Path(path, "config")
    config.mkdir(exist_ok=True)
    # A broker does not quote the numbers of queues.
    text = re.sub(r'"(\d+)":', r"\1:", json.dumps({"offsetTable": table}))
    (config / "consumerOffset.json").write_text(text, encoding="utf-8")
    (config / "subscriptionGroup.json").write_text(json.dumps({"subscriptionGroupTable": names}), encoding="utf-8")


def keyed(path: str, number: int, key: str, config: StoreConfig) -> None:
    """A queue of this number of messages with a key each."""
    with MessageStore.open(path, config=config) as store:
        for first in range(0, number, 10_000):
            numbers = range(first, min(first + 10_000, number))
            store.put_messages([Message("Orders", b"x" * 8, keys=[key.format(i)]) for i in numbers])


def hot(path: str, number: int) -> None:
    """100 000 messages of one key."""
    keyed(path, 100_000, "hot", replace(SMALL, max_index_num=400_000))


def index_files(path: str, number: int) -> None:
    """This number of full index files, of 400 entries each."""
    keyed(path, number * 400, "key{}", replace(SMALL, max_hash_slot_num=100, max_index_num=401))


def sparse_segments(path: str, number: int) -> None:
    """This number of sparse segments of 1 MiB."""
    make_segments(path, number, replace(SMALL, mapped_file_size_commit_log=2**20))


SMALL = StoreConfig(
    mapped_file_size_commit_log=2**26,
    mapped_file_size_consume_queue=4000,
    max_hash_slot_num=1000,
    max_index_num=400_000,
    index_tags=False,
)
# The fixture, its smallest size, and what is asked of it.
AXES: dict[str, tuple[Callable[[str, int], None], int, dict[str, Callable[[str, int], object]]]] = {
    "queues": (
        ten_per_topic,
        100,
        {
            "open": call(lambda store, n: store),
            "info": command("info"),
            "queues": command("queues"),
            "metrics": command("metrics"),
            "tail": command("tail"),
            "tail TOPIC": command("tail", "Topic00000"),
        },
    ),
    "groups": (
        lambda path, n: progress(path, n, 10),
        10,
        {"offsets": command("offsets"), "metrics": command("metrics")},
    ),
    "entries of progress": (
        lambda path, n: progress(path, 10, n),
        1,
        {"offsets": command("offsets"), "query --key": command("query", "--key", "key1")},
    ),
    "hot keys": (
        hot,
        1,
        {"query_table, max_num=1": call(lambda store, n: store.query_table(["hot"] * n, "Orders", max_num=1))},
    ),
    "index files": (
        index_files,
        10,
        {
            "query_message": call(lambda store, n: store.query_message("Orders", "key7")),
            "query_table, 1000 keys": call(
                lambda store, n: store.query_table([f"key{i}" for i in range(1000)], "Orders", max_num=1)
            ),
        },
    ),
    "segments": (
        sparse_segments,
        10,
        {
            "open": call(lambda store, n: store),
            "scan of a second without messages": call(
                lambda store, n: list(
                    store.scan(columns=["topic"], begin=data.TIME + 10**6, end=data.TIME + 10**6 + 999)
                )
            ),
        },
    ),
}


def measure_axis(axis: str, scratch: str) -> list[dict[str, Any]]:
    """A row for each question of an axis: sizes, seconds (the better of two), and the exponent of the last tenfold."""
    make, smallest, questions = AXES[axis]
    sizes = [smallest, 10 * smallest, 100 * smallest]
    seconds: dict[str, list[float]] = {name: [] for name in questions}
    for size in sizes:
        path = os.path.join(scratch, "store")
        make(path, size)
        for name, work in questions.items():
            seconds[name].append(min(seconds_of(partial(work, path, size)) for _ in range(2)))
        shutil.rmtree(path)
    rows = []
    for name, took in seconds.items():
        exponent = math.log10(took[2] / took[1])
        rows.append({"axis": axis, "question": name, "sizes": sizes, "seconds": took, "exponent": exponent})
    return rows


def table_of_axes(rows: list[dict[str, Any]]) -> str:
    """The table of the axes that were measured."""
    lines = ["| number of | question | sizes | seconds | exponent |", "|---|---|---|---|---|"]
    for row in rows:
        sizes = ", ".join(f"{size:,}".replace(",", " ") for size in row["sizes"])
        took = ", ".join(f"{seconds:.2g}" for seconds in row["seconds"])
        lines.append(f"| {row['axis']} | {row['question']} | {sizes} | {took} | {row['exponent']:.1f} |")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------ plots and document

PARTS: dict[str, tuple[Callable[[str, bool], Iterator[tuple[str, Point]]], str, str, str]] = {
    "keys": (keys, "keys in the index", "ns a key", "Index: cost of a key"),
    "chains": (chains, "entries of the chain", "ns a key", "Index: cost of a chain"),
    "queues": (queues, "queues", "s", "Opening a store of many queues"),
    "segments": (segments, "segments", "s", "Opening a store of many segments"),
}


def plot(part: str, series: Series, path: Path) -> None:
    """A plot of a part, both axes logarithmic; beside it the memory, if there is any, which begins at zero."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same result gives the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": part, "font.size": 9})
    import matplotlib.pyplot as plt

    _, x_label, y_label, title = PARTS[part]
    with_memory = any("peak" in point for points in series.values() for point in points)
    figure, axes = plt.subplots(1, 2 if with_memory else 1, figsize=(9 if with_memory else 6, 3.6), squeeze=False)
    panels = [("y", y_label, 1.0)] + ([("peak", "MiB, peak of the process", 2**20)] if with_memory else [])
    for axis, (what, label, unit) in zip(axes[0], panels):
        for name, points in series.items():
            axis.plot([p["x"] for p in points], [p[what] / unit for p in points], marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log" if what == "y" else "linear", xlabel=x_label, ylabel=label)
        if what != "y":
            axis.set_ylim(bottom=0)
        axis.grid(True, linewidth=0.3)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def markdown(result: dict[str, Any]) -> str:
    """The plots and a table of each."""
    at = result["machine"]
    lines = [
        f"`{result['command']}` on {result['date']}, commit {result['commit']}; {at['processor']}, {at['cores']} cores,",
        f"{at['memory'] / 2**30:.0f} GiB, {at['system']}, Python {at['python']}.",
        "",
    ]
    for part, series in result["parts"].items():
        _, x_label, y_label, title = PARTS[part]
        numbers = sorted({int(point["x"]) for points in series.values() for point in points})
        lines += [
            f"![{title}](../docs/growth/{part}.svg)",
            "",
            f"| {x_label} | {' | '.join(f'{number:,}'.replace(',', ' ') for number in numbers)} |",
            "|---" * (len(numbers) + 1) + "|",
        ]
        for name, points in series.items():
            by_number = {int(point["x"]): point for point in points}
            lines.append(
                f"| {name}, {y_label} | " + " | ".join(figure(by_number.get(n, {}).get("y"), 1) for n in numbers) + " |"
            )
            for what, label in (("peak", "peak, MiB"), ("own", "of it own memory that opening took, MiB")):
                if any(what in point for point in points):
                    cells = " | ".join(figure(by_number.get(n, {}).get(what), 2**20) for n in numbers)
                    lines.append(f"| {name}, {label} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def figure(value: float | None, unit: float) -> str:
    """A number with three digits, nothing for none."""
    return "" if value is None else f"{value / unit:.3g}" if value / unit < 1000 else f"{value / unit:.0f}"


def write(result: dict[str, Any]) -> None:
    """Result, plots and block."""
    FOLDER.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for part, series in result["parts"].items():
        plot(part, series, FOLDER / f"{part}.svg")
    document.write_block(NAME, markdown(result))


@click.command()
@click.option(
    "--only", multiple=True, type=click.Choice(list(PARTS)), help="Only this part (may be given more than once)."
)
@click.option("--axis", "axes", multiple=True, type=click.Choice(list(AXES)), help="Only this axis; repeatable.")
@click.option("--quick", is_flag=True, help="Small sizes: shows that everything runs.")
@click.option("--scratch", type=click.Path(exists=True, file_okay=False), help="A folder on the disk to measure.")
@click.option("--document", "documented", is_flag=True, help="Write docs/growth and its place in asv_bench/FIGURES.md.")
def main(only: tuple[str, ...], axes: tuple[str, ...], quick: bool, scratch: str | None, documented: bool) -> None:
    """Measure how cost grows with size, write build/growth.json, and with --document the plots of the documentation."""
    if quick and documented:
        raise click.UsageError("the sizes of a quick run are too small; leave --quick or --document out")
    if axes:
        rows = json.loads(AXES_RESULT.read_text(encoding="utf-8")) if AXES_RESULT.exists() else []
        for axis in axes:
            with tempfile.TemporaryDirectory(prefix="rmqstore-growth-", dir=scratch) as folder:
                measured = measure_axis(axis, folder)
            click.echo(table_of_axes(measured))
            rows = [row for row in rows if row["axis"] != axis] + measured
            if documented:
                rows.sort(key=lambda row: list(AXES).index(row["axis"]))
                AXES_RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                document.write_block("axes", table_of_axes(rows), document.PERFORMANCE)
        return
    result: dict[str, Any] = {
        "command": " ".join(["python -m asv_bench.growth", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": machine.commit(),
        "machine": machine.described(),
        "parts": {},
    }
    if documented and only and RESULT.exists():
        # The other parts stay as they were measured.
        result["parts"] = json.loads(RESULT.read_text(encoding="utf-8"))["parts"]
    for part, (measure, *_) in PARTS.items():
        if only and part not in only:
            continue
        folder = tempfile.mkdtemp(prefix="rmqstore-growth-", dir=scratch)
        series: Series = {}
        try:
            for name, point in measure(folder, quick):
                series.setdefault(name, []).append(point)
                rest = {what: round(value / 2**20) for what, value in point.items() if what not in "xy"}
                click.echo(f"{part}  {name}: {point['x']:,} {point['y']:.4g}  {rest or ''}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result["parts"][part] = series
    if documented:
        write(result)
    else:
        path = document.DOCS.parent / "build" / "growth.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
