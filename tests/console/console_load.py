"""Many questions at once to a console whose store is being written: the load of the tests, and a measurement by hand.

Owns the store (keys that are known by their number), the writer process and the askers, which are threads with a connection
each that all ask at the same time and compare every answer.  As a program it makes the store with 20 000 000 index entries,
asks from 200 connections, and for the metrics once a second, and prints one line of JSON::

    python tests/console/console_load.py --entries 20000000 --askers 200 --seconds 20

A writer at full speed (`--pause 0`) takes tens of gigabytes an hour.  With `--disk-used 50` it deletes its oldest segments,
by RocketMQ's rule, where more than 50 % of the disk is used, and the questions follow what is written.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from console_server import Answer, ConsoleServer, ask, connection

from rmqstore import MessageStore, StoreConfig

TOPIC = "Orders"
QUEUES = 4
#: A message leaves its unique key, its own key, its group's key and its tag in the index.
ENTRIES_PER_MESSAGE = 4
GROUP = 10
TAGS = 997
_BATCH = 100_000

#: Seconds after which the console must know what was put; it looks at the store once a second.
SEEN_AFTER = 10
#: So many of the newest messages are asked for where older ones are deleted.
RECENT = 2_000_000

_WRITER = """
import sys, time
from rmqstore import Message, MessageStore, StoreConfig
path, number, pause, disk_used = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
config = StoreConfig(disk_space_clean_forcibly_ratio=disk_used) if disk_used else None
told = 0
with MessageStore.open(path, config=config) as store:
    while not sys.stdin.closed:
        batch = [Message("Orders", b"live %d" % n, keys=[f"K{n}", f"G{n // 10}"], tags="live") for n in range(number, number + 20)]
        store.put_messages(batch, [n % 4 for n in range(number, number + 20)])
        number += 20
        if time.monotonic() - told > 0.01:
            told = time.monotonic()
            print(number, flush=True)
        if pause:
            time.sleep(pause)
"""


def make_store(path: Path, messages: int, config: StoreConfig | None = None) -> Path:
    """Put `messages` messages, numbered from 0: keys `K<n>` and `G<n // 10>`, body `body <n>`, queue n % 4."""
    import pyarrow as pa

    with MessageStore.open(path, config=config) as store:
        for begin in range(0, messages, _BATCH):
            numbers = range(begin, min(begin + _BATCH, messages))
            store.put_table(
                pa.table(
                    {
                        "body": pa.array([b"body %d" % n for n in numbers], pa.binary()),
                        "keys": pa.array([f"K{n} G{n // GROUP}" for n in numbers]),
                        "tags": pa.array([f"tag{n % TAGS}" for n in numbers]),
                        "queue_id": pa.array([n % QUEUES for n in numbers], pa.int32()),
                        "properties": pa.array(
                            [[("UNIQ_KEY", f"U{n:031d}")] for n in numbers], pa.map_(pa.string(), pa.string())
                        ),
                    }
                ),
                topic=TOPIC,
            )
    return path


class Writer:
    """A process that goes on putting 20 messages and a pause (s), numbered from `first` on, until it is stopped.

    With `disk_used` (percent) it deletes its oldest segments where more of the disk is used.
    """

    def __init__(self, path: Path, first: int, pause: float = 0.01, disk_used: int = 0):
        self.first = first
        self.next = first
        #: Second by second, which number was next.
        self._history = deque([(time.monotonic(), first)], maxlen=2 * SEEN_AFTER)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(first), str(pause), str(disk_used)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.next = int(line)
            if time.monotonic() - self._history[-1][0] >= 1:
                self._history.append((time.monotonic(), self.next))

    def recent(self) -> range:
        """Numbers of the newest messages that the console must know by now."""
        before = time.monotonic() - SEEN_AFTER
        end = max((number for when, number in list(self._history) if when <= before), default=self.first)
        return range(max(end - RECENT, 0), end)

    def wait_until(self, number: int, limit: float = 60) -> None:
        """Wait until message `number` was put."""
        end = time.monotonic() + limit
        while self.next <= number:
            assert self.process.poll() is None, f"the writer ended with {self.process.returncode}"
            assert time.monotonic() < end, f"the writer has put {self.next - self.first} messages only"
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(240)
        self._reader.join(240)


@dataclass
class LoadReport:
    """Results of the clients: number of responses, seconds of each, the first faults."""

    answers: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    took: float = 0.0

    def percentile(self, part: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def message_query(key: str, page: bool = False) -> str:
    """The target that asks for a key, as JSON or as a page."""
    return ("/messages?" if page else "/api/messages?") + urlencode({"topic": TOPIC, "key": key})


def run_load(
    server: ConsoleServer,
    askers: int,
    question: Callable[[random.Random], tuple[str, Callable[[Answer], str | None]]],
    *,
    each: int | None = None,
    seconds: float | None = None,
) -> LoadReport:
    """Let `askers` connections ask at the same time, `each` questions or for `seconds`.

    `question(random)` gives a target and a function that says what is wrong with the answer, or None.
    """
    report = LoadReport()
    lock = threading.Lock()
    together = threading.Barrier(askers)

    def work(number: int) -> None:
        choice = random.Random(number)
        times: list[float] = []
        wrong: list[str] = []
        link = connection(server.host, server.port, timeout=120)
        try:
            link.connect()
            together.wait(120)
            end = time.monotonic() + (seconds if seconds is not None else math.inf)
            while (each is None or len(times) < each) and time.monotonic() < end:
                target, check = question(choice)
                before = time.monotonic()
                answer = ask(link, target)
                times.append(time.monotonic() - before)
                complaint = f"status {answer.status}" if answer.status != 200 else check(answer)
                if complaint:
                    wrong.append(f"{target}: {complaint}: {answer.body[:300]!r}")
        except (OSError, http.client.HTTPException, threading.BrokenBarrierError) as error:
            together.abort()
            wrong.append(f"asker {number} after {len(times)} answers: {error!r}")
        finally:
            link.close()
        with lock:
            report.answers += len(times)
            report.seconds += times
            report.wrong += wrong[:5]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(askers)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600 + (seconds or 0))
        assert not thread.is_alive(), "an asker hangs"
    report.took = time.monotonic() - begin
    return report


def key_questions(numbers: Callable[[], range]) -> Callable[[random.Random], tuple[str, Callable[[Answer], str | None]]]:
    """Questions for keys of the messages with `numbers()`: a message's own, a group's, one that is not there; JSON and pages."""

    def question(choice: random.Random) -> tuple[str, Callable[[Answer], str | None]]:
        number = choice.choice(numbers())
        kind = choice.randrange(8)
        if kind == 0:
            return message_query(f"absent{number}"), lambda answer: _differs(answer, [])
        if kind == 1:
            # Groups are whole: messages are put in multiples of twenty.
            first = number - number % GROUP
            members = list(range(first, first + GROUP))[::-1]
            return message_query(f"G{number // GROUP}"), lambda answer: _differs(answer, members)
        if kind == 2:
            bodies = (f"body {number}", f"live {number}")
            return (
                message_query(f"K{number}", page=True),
                lambda answer: None if any(body in answer.text for body in bodies) else f"the page lacks {bodies}",
            )
        return message_query(f"K{number}"), lambda answer: _differs(answer, [number])

    return question


def _differs(answer: Answer, numbers: list[int]) -> str | None:
    """Say how the messages of an answer differ from those with `numbers`, newest first."""
    found = [message["keys"][0] for message in answer.json()["messages"]]
    wanted = [f"K{number}" for number in numbers]
    return None if found == wanted else f"found {found}, wanted {wanted}"


class MemoryWatch:
    """The largest anonymous memory of a process, looked at ten times a second."""

    def __init__(self, server: ConsoleServer):
        self.server = server
        self.samples: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.samples.append(self.server.anonymous_memory())

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join(240)
        self.samples.append(self.server.anonymous_memory())


class MetricsWatch:
    """Asks for the metrics once a second: seconds of each answer, and what was wrong."""

    def __init__(self, server: ConsoleServer):
        self.server = server
        self.report = LoadReport()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        newest = -1
        while not self._done.wait(1):
            before = time.monotonic()
            answer = self.server.get("/metrics")
            self.report.seconds.append(time.monotonic() - before)
            ends = [line for line in answer.text.splitlines() if line.startswith("rocketmq_brokeruntime_commitlog_maxoffset{")]
            if answer.status != 200 or len(ends) != 1:
                self.report.wrong.append(f"/metrics: {answer.status} {answer.body[:200]!r}")
                continue
            end = int(float(ends[0].split()[-1]))
            if end < newest:
                self.report.wrong.append(f"/metrics: the log goes to {end}, and went to {newest} before")
            newest = end

    def __enter__(self) -> MetricsWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join(120)


def newest_is_found(server: ConsoleServer, writer: Writer, limit: float = SEEN_AFTER) -> list[str]:
    """Say what is wrong if a message that the writer has put is not found by its key soon after."""
    number = writer.next - 1
    end = time.monotonic() + limit
    while True:
        answer = server.get(message_query(f"K{number}"))
        if answer.status == 200 and any(row["keys"][0] == f"K{number}" for row in answer.json()["messages"]):
            return []
        if time.monotonic() > end:
            return [f"K{number}, which was put {limit} s ago, is not found: {answer.status} {answer.body[:200]!r}"]
        time.sleep(0.1)


def measure(path: Path, messages: int, askers: int, seconds: float, pause: float = 0.01, disk_used: int = 0) -> dict[str, Any]:
    """Run the load on a store that `make_store` made, beside a writer; figures, and what was wrong."""
    writer = Writer(path, messages, pause, disk_used)
    try:
        writer.wait_until(messages + 100)
        with ConsoleServer(path) as server:
            questions = key_questions(writer.recent if disk_used else lambda: range(messages))
            warm = run_load(server, askers, questions, each=5)
            before = server.anonymous_memory()
            with MemoryWatch(server) as memory, MetricsWatch(server) as metrics:
                report = run_load(server, askers, questions, seconds=seconds)
            written = writer.next - messages
            found_last = newest_is_found(server, writer)
            log = server.tracebacks()
    finally:
        writer.stop()
    return {
        "messages": messages, "index_entries": messages * ENTRIES_PER_MESSAGE, "askers": askers,
        "answers": report.answers, "answers_per_second": round(report.answers / report.took),
        "median_ms": round(report.percentile(0.5) * 1000, 1), "p99_ms": round(report.percentile(0.99) * 1000, 1),
        "max_ms": round(max(report.seconds, default=math.nan) * 1000, 1),
        "metrics": len(metrics.report.seconds), "metrics_p99_ms": round(metrics.report.percentile(0.99) * 1000, 1),
        # Flat is what does not grow from tenth to tenth.
        "memory_by_tenth_mib": [sample >> 20 for sample in memory.samples[:: max(len(memory.samples) // 10, 1)]],
        "memory_before_mib": before >> 20, "memory_peak_mib": max(memory.samples) >> 20,
        "memory_after_mib": memory.samples[-1] >> 20, "written_meanwhile": written,
        "first_segment": min(entry.name for entry in (path / "commitlog").iterdir()),
        "wrong": (warm.wrong + report.wrong + metrics.report.wrong + found_last + log)[:20],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=20_000_000)
    parser.add_argument("--askers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--pause", type=float, default=0.01, help="of the writer after 20 messages, s")
    parser.add_argument("--disk-used", type=int, default=0, help="percent of the disk, above which the writer deletes")
    parser.add_argument("--store", type=Path, help="where the store is kept (and found again); else a temporary one")
    options = parser.parse_args()
    messages = options.entries // ENTRIES_PER_MESSAGE
    with tempfile.TemporaryDirectory(prefix="rmqstore-console-load-") as scratch:
        path = options.store or Path(scratch) / "store"
        done = path.with_name(path.name + ".made")
        if not done.exists():
            make_store(path, messages)
            done.touch()
        report = measure(path, messages, options.askers, options.seconds, options.pause, options.disk_used)
    print(json.dumps(report))
    sys.exit(1 if report["wrong"] else 0)


if __name__ == "__main__":
    main()
