"""Recovering the index of a classic queue after kill -9, beside a real RabbitMQ node on the same files.

The queue holds embedded messages of 12 bytes in segments of 16384 entries, each published and delivered, and its node was killed:
there are no recovery terms, so everything is read.  A node reads it twice, once to count references and once for the queue; what
is measured of it is the time from its start until it takes connections, minus that of the same node with the queue empty, which
is booted right before.  Ours is the whole of opening the queue's index for writing, which recovers it, and the walk over all
entries for what the message store must have; its process is started before the clock.

"Cold": the pages of the queue's files were dropped from the page cache before; the limit is a program that does nothing but
read them in order.  "Warm": all were read before.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .jvm import ROOT
from .recovery import fresh_copy, read_files
from .rounds import Outcome, Work
from .setting import Setting, remove

PART = "rabbitmq"
NODE, OURS, DISK = "RabbitMQ", "QueueIndex.open", "reading the files' bytes"
VHOST, QUEUE = "bench", "bench"
SEGMENT_ENTRY_COUNT = 16384
# With which a full size is 202 MB in 62 segments.
BODY = 12

OPEN_HERE = """
import sys, time
import numpy as np
from rmqstore.rabbitmq.queue_index import QueueIndex
begin = time.perf_counter_ns()
index = QueueIndex.open(sys.argv[1], segment_entry_count=int(sys.argv[2]))
depth = index.depth
ready = time.perf_counter_ns() - begin
# What a node does not do before somebody consumes: it shows that the entries are those of the queue.
bodies = int(np.asarray(index.columns().size).sum())
print("opened", ready, depth, bodies)
sys.stdout.flush()
import os
os._exit(0)
"""


def works(setting: Setting) -> Iterator[Work]:
    """Recovery of one large queue, warm and cold."""
    n = setting.size(1_000_000, 20_000)
    name = "opening a queue after kill -9"
    folder = setting.folder("rabbitmq")
    source = os.path.join(folder, "vhost")
    try:
        nodes, why_not = node_module()
        directory = write_queue(source, n)
        node = prepared(nodes, Path(folder) / "node", Path(folder) / "empty") if nodes is not None else None
        try:
            for state in ("warm",) if setting.quick else ("warm", "cold"):

                def ours(warm: bool = state == "warm") -> Outcome:
                    target = fresh_copy(setting, source, os.path.join(folder, "ours"), (), warm)
                    return opened(os.path.join(target, "queues", directory), folder)

                def theirs(warm: bool = state == "warm") -> Outcome:
                    return booted(setting, node, source, Path(folder) / "empty", warm)

                def disk() -> Outcome:
                    target = fresh_copy(setting, source, os.path.join(folder, "disk"), (), False)
                    return read_files(os.path.join(target, "queues", directory), folder)

                contenders = {OURS: ours, **({NODE: theirs} if node is not None else {})}
                if state == "cold":
                    contenders[DISK] = disk
                yield Work(
                    PART,
                    f"{name}, {state}",
                    "messages",
                    n,
                    contenders,
                    base=NODE,
                    others=[DISK] if state == "cold" else [],
                    goals={OURS: 20},
                    skipped={} if node is not None else {NODE: why_not},
                    warm_up=0,
                )
        finally:
            if node is not None:
                node.close()
    finally:
        remove(folder)


def node_module() -> tuple[Any, str]:
    """What drives a node in the interoperability tests, or None and the reason why there is none."""
    folder = ROOT / "tests" / "interop"
    if not (folder / "rabbitmq_node.py").exists():
        return None, f"{folder} is not there"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    import rabbitmq_node

    reason = rabbitmq_node.unavailable_reason()
    return (rabbitmq_node, "") if reason is None else (None, reason)


def version() -> str | None:
    """That of the installed server."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
    return found[-1].name.rpartition("-")[2] if found else None


def prepared(nodes: Any, home: Path, empty: Path) -> Any:
    """A node that knows the queue; its data, without messages, are in `empty`."""
    node = nodes.Node(home, rabbit={"queue_index_segment_entry_count": str(SEGMENT_ENTRY_COUNT)}, log_level="error")
    try:
        node.start()
        node.add_vhosts([VHOST])
        with node.channel(VHOST) as channel:
            channel.queue_declare(QUEUE, durable=True)
        node.stop()
        node.save(empty)
    except BaseException:
        node.close()
        raise
    return node


def write_queue(vhost: str, n: int) -> str:
    """Write a vhost's directory with a queue of `n` messages as a node leaves it in segments; the name of the queue's directory.

    Bytes are those of 3.10.8: entries of a segment in descending order, a publish and its deliver each.
    """
    from rmqstore.rabbitmq.layout import format_config, format_queue_name, queue_directory
    from rmqstore.rabbitmq.message import Message

    os.makedirs(os.path.join(vhost, "msg_store_persistent"))
    directory = queue_directory(VHOST, QUEUE)
    folder = os.path.join(vhost, "queues", directory)
    os.makedirs(folder)
    for name, data in {
        ".config": format_config(SEGMENT_ENTRY_COUNT),
        ".vhost": VHOST.encode(),
        f"queues/{directory}/.queue_name": format_queue_name(VHOST, QUEUE),
        f"queues/{directory}/journal.jif": b"",
    }.items():
        with open(os.path.join(vhost, name), "wb") as file:
            file.write(data)
    body, msg_id = b"#" * BODY, b"<identity......>"
    message = Message(
        body, properties={"delivery_mode": 2}, routing_keys=[QUEUE], vhost=VHOST, persistent=True, msg_id=msg_id
    )
    term = bytes(message)
    before, between, after = cut_out(term, body, msg_id)
    head = struct.pack(">QII", 0, BODY, len(term))
    for first in range(0, n, SEGMENT_ENTRY_COUNT):
        parts = []
        for rel in range(min(n - first, SEGMENT_ENTRY_COUNT) - 1, -1, -1):
            text = b"%012d" % (first + rel)
            own_id = b"id: " + text
            parts += (
                (0xC000 | rel).to_bytes(2, "big"),
                own_id,
                head,
                before,
                text,
                between,
                own_id,
                after,
                (0x4000 | rel).to_bytes(2, "big"),
            )
        with open(os.path.join(folder, f"{first // SEGMENT_ENTRY_COUNT}.idx"), "wb") as file:
            file.write(b"".join(parts))
    return directory


def cut_out(term: bytes, body: bytes, msg_id: bytes) -> tuple[bytes, bytes, bytes]:
    """What is before the body, between it and the message id, and after that."""
    before, _, rest = term.partition(body)
    between, found, after = rest.partition(msg_id)
    assert found and body not in rest and msg_id not in after
    return before, between, after


def booted(setting: Setting, node: Any, source: str, empty: Path, warm: bool) -> Outcome:
    """Boot the node with the queue empty, then with its files; the seconds that it takes longer, and what is in the queue."""
    node.restore(empty)
    path = node.vhost_path(VHOST)
    forget_terms(path)
    base = node.start(120)
    node.kill9()
    node.restore(empty)
    shutil.rmtree(path)
    fresh_copy(setting, source, os.fspath(path), (), warm)
    seconds = node.start(300)
    depth = node.depth(VHOST, QUEUE)
    node.kill9()
    return Outcome(max(seconds - base, 1e-9), {"messages": depth})


def forget_terms(vhost: Path) -> None:
    """Take away what an orderly stop left, so that the boot is one after kill -9."""
    for name in (
        "recovery.dets",
        "msg_store_persistent/clean.dot",
        "msg_store_persistent/file_summary.ets",
        "msg_store_persistent/msg_store_index.ets",
    ):
        (vhost / name).unlink(missing_ok=True)


def opened(path: str, scratch: str) -> Outcome:
    """Open the queue in a process of its own."""
    command = [sys.executable, "-c", OPEN_HERE, path, str(SEGMENT_ENTRY_COUNT)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch, timeout=600)
    if result.returncode:
        raise RuntimeError(f"opening failed ({result.returncode}):\n{result.stdout}{result.stderr}")
    _, ready, depth, bodies = result.stdout.split()
    assert int(bodies) == BODY * int(depth)
    return Outcome(int(ready) / 1e9, {"messages": int(depth)})
