"""Opening a store after a crash: rmqstore and RocketMQ's own DefaultMessageStore on the same files, in one run.

    python asv_bench/peers/recovery.py            # 2 000 000 messages, 760 MB of log; takes some minutes
    python asv_bench/peers/recovery.py --messages 200000 --rounds 3

Needs Java and `bash ci/java.sh`.  Makes the store once, and gives every opening a fresh copy, because opening after a crash
changes it.  Both sides open alternately, each in a new process; the clock runs inside of it, so that starting Python or the
JVM is not in the figures.  Two kinds of crash: a process that was killed, whose queues and index are all there, and a store
that lost both, so that everything is dispatched again.  The checkpoint is lost in both, so that all of the log is looked at.

"Cold": the pages of the copy were dropped from the page cache before.  "Warm": everything was read before.  For Java there are
two figures: the first opening in a JVM, which is what a crashed broker does, and the second, of another copy, for which
the compiler has warmed up.  Both are the time of its `load`, which recovers; the second that `start` takes on top is left
out.  Ours is the whole of `MessageStore.open`, what was written forced to the disk.  The table gives medians, the spread
(lowest to highest), and how many times longer Java takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "build" / "java" / "lib"
CLASSES = ROOT / "build" / "peers"
SOURCE = Path(__file__).resolve().parent / "java" / "TimeOpen.java"
KINDS = {"killed": (), "queues and index lost": ("consumequeue", "index")}
JVM = [
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "-Xms1g",
    "-Xmx4g",
]

OPEN_HERE = """
import sys, time
from rmqstore import MessageStore, StoreConfig
config = StoreConfig()
begin = time.perf_counter_ns()
store = MessageStore.open(sys.argv[1], config=config)
ready = time.perf_counter_ns() - begin
units = sum(store.max_queue_offset(topic, queue_id) for topic, queue_id in store.queues.keys())
print("opened", ready, ready, store.commit_log.max_offset, units)
sys.stdout.flush()
import os
os._exit(0)
"""


def make_store(path: str, messages: int) -> None:
    """A store of default geometry as a crash before the first flush leaves it: `abort` is there, the checkpoint is not."""
    from rmqstore import Message, MessageStore, StoreConfig

    body = bytes(i * 7 % 251 for i in range(211))
    now = [1_700_000_000_000]
    with MessageStore.open(path, config=StoreConfig(clock=lambda: now[0])) as store:
        for start in range(0, messages, 500):
            now[0] += 25
            topic = ("Orders", "Payments", "Audit", "Mail")[start // 500 % 4]
            store.put_messages(
                [
                    Message(
                        topic,
                        body,
                        keys=[f"ORD-{number:08d}"],
                        tags=("created", "paid", "shipped")[number % 3],
                        properties={"UNIQ_KEY": f"0A000001000018B4AAC2{number:012X}"},
                    )
                    for number in range(start, min(start + 500, messages))
                ],
                queue_id=start // 2000 % 4,
            )
        size = store.commit_log.max_offset
    make_unclean(path)
    print(f"{messages} messages, {size / 1e6:.0f} MB of log")


def make_unclean(path: str) -> None:
    """Let it look as after a crash."""
    with open(os.path.join(path, "abort"), "w"):
        pass
    if os.path.exists(os.path.join(path, "checkpoint")):
        os.unlink(os.path.join(path, "checkpoint"))


def fresh_copy(source: str, target: str, lost: tuple[str, ...], warm: bool) -> str:
    """A sparse copy without the folders `lost`, on disk, and in the page cache or not."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", "--sparse=always", source, target], check=True)
    for folder in lost:
        shutil.rmtree(os.path.join(target, folder))
    os.sync()
    for folder, _, names in os.walk(target):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if warm:
                    read_written(fd)
            finally:
                os.close(fd)
    return target


def read_written(fd: int) -> None:
    """Read what was written of a file, not its holes."""
    size, at = os.fstat(fd).st_size, 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        os.posix_fadvise(fd, at, end - at, os.POSIX_FADV_SEQUENTIAL)
        os.lseek(fd, at, os.SEEK_SET)
        while at < end and (data := os.read(fd, min(1 << 22, end - at))):
            at += len(data)


def compile_java() -> None:
    """Compile the timing class if it is newer than what is there."""
    if not LIBRARIES.is_dir():
        sys.exit("build/java is missing: run ci/java.sh, which needs Java 17 and Maven")
    target = CLASSES / "TimeOpen.class"
    if not target.exists() or target.stat().st_mtime < SOURCE.stat().st_mtime:
        CLASSES.mkdir(parents=True, exist_ok=True)
        subprocess.run(["javac", "-cp", f"{LIBRARIES}/*", "-d", str(CLASSES), str(SOURCE)], check=True)


def timed(command: list[str], scratch: str) -> list[tuple[float, ...]]:
    """Run an opening in a process of its own: for each store seconds of loading, seconds until ready, end of log, units."""
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch)
    if result.returncode:
        sys.exit(f"{command[0]} failed ({result.returncode}):\n{result.stdout}{result.stderr}")
    # RocketMQ logs to the same stream.
    rows = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("opened ")]
    return [(int(load) / 1e9, int(ready) / 1e9, int(end), int(units)) for load, ready, end, units in rows]


def main() -> None:
    """Make the store, open its copies in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", help="a folder on the disk to measure, by default the system's temporary one")
    options = parser.parse_args()
    compile_java()
    scratch = tempfile.mkdtemp(prefix="rmqstore-peers-", dir=options.scratch)
    classpath = f"{CLASSES}{os.pathsep}{LIBRARIES}/*"
    java = ["java", *JVM, f"-Duser.home={scratch}", f"-Djava.io.tmpdir={scratch}", "-cp", classpath, "TimeOpen"]
    found: dict[tuple[str, str, str], list[float]] = {}
    try:
        source = os.path.join(scratch, "store")
        make_store(source, options.messages)
        for number in range(options.rounds):
            for kind, lost in KINDS.items():
                for state in ("warm", "cold"):
                    ours = fresh_copy(source, os.path.join(scratch, "ours"), lost, state == "warm")
                    ((_, ready, end, units),) = timed([sys.executable, "-c", OPEN_HERE, ours], scratch)
                    theirs = [
                        fresh_copy(source, os.path.join(scratch, f"theirs{n}"), lost, state == "warm") for n in (1, 2)
                    ]
                    first, second = timed([*java, *theirs], scratch)
                    if {(end, units)} != {first[2:], second[2:]} or units != options.messages:
                        sys.exit(f"not the same work: {(end, units)} here, {first[2:]} and {second[2:]} there")
                    for who, seconds in (("rmqstore", ready), ("Java, first", first[0]), ("Java, second", second[0])):
                        found.setdefault((kind, state, who), []).append(seconds)
                    print(
                        f"round {number + 1}, {kind}, {state}: {ready:.3f} s, Java {first[0]:.3f} / {second[0]:.3f} s"
                    )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"\n{'crash':24}{'pages':8}{'who':14}{'median s':>10}{'spread s':>18}{'us/message':>12}{'times ours':>12}")
    for (kind, state, who), seconds in found.items():
        median = statistics.median(seconds)
        ratio = median / statistics.median(found[kind, state, "rmqstore"])
        spread = f"{min(seconds):.3f}-{max(seconds):.3f}"
        each = median / options.messages * 1e6
        print(f"{kind:24}{state:8}{who:14}{median:10.3f}{spread:>18}{each:12.2f}{ratio:12.1f}")


if __name__ == "__main__":
    main()
