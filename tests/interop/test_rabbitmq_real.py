"""Facts of classic queues with a real RabbitMQ 3.10.8 node: the oracle reads what it wrote, and it treats damage as recorded.

Never imports rmqstore: what the oracle and the catalogue of damage say is what the package's tests stand on.  One boot decides
on all vhosts: golden cases, untouched ones, one that the oracle wrote, and a sample of the damage that hangs no boot.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import classic_queue_oracle as oracle
import damage
import golden_rabbitmq
import pytest
import rabbitmq_images as image_vhosts
import rabbitmq_survey as surveys
from rabbitmq_node import Node, NodeHungError, Outgoing, is_alive, send, vhost_directory

pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(600)]

KILLED, CLEAN, WRITTEN = "v00", "v01", "v02"
SAMPLE = (
    "journal_torn",
    "journal_zero_tail",
    "journal_zeros_within",
    "journal_deleted",
    "journal_lone_ack",
    "journal_repeats_segment",
    "journal_huge_length",
    "segment_deleted",
    "segment_cut_between",
    "segment_all_zeros",
    "config_missing",
    "queue_names_missing",
    "foreign_folder",
    "store_file_cut",
    "store_bad_marker",
    "store_zeros_within",
    "store_temporary_file",
    "store_shared_message_lost",
    "terms_cut",
    "clean_missing",
    "terms_but_journal_edited",
)


@dataclass
class Booted:
    """The node that came up, and what was put under it."""

    node: Node
    seconds: float
    #: Of each vhost before the boot (of a damaged one, before the damage).
    before: dict[str, oracle.Vhost] = field(default_factory=dict)
    known: dict[str, dict[str, dict[bytes, tuple[str, int]]]] = field(default_factory=dict)
    #: Damage and what it should come to, by vhost.
    planted: dict[str, tuple[damage.Damage, damage.Expected]] = field(default_factory=dict)

    def note(self, vhost: str, path: Path) -> None:
        """Keep what is in a vhost."""
        self.before[vhost] = oracle.read_vhost(path)
        self.known[vhost] = surveys.known_bodies(self.before[vhost])

    def vhost_of(self, name: str) -> str:
        """The place of a damage."""
        return next(vhost for vhost, (each, _) in self.planted.items() if each.name == name)


@pytest.fixture(scope="module")
def booted(rabbitmq_node, rabbitmq_base, golden_vhosts) -> Iterator[Booted]:
    """One boot for all; ends with an orderly stop."""
    node = rabbitmq_node
    node.restore(rabbitmq_base.killed)
    result = Booted(node, 0.0)
    result.note(KILLED, node.vhost_path(KILLED))
    result.note(CLEAN, replace(node, CLEAN, rabbitmq_base.clean))
    write_by_model(node.vhost_path(WRITTEN))
    result.note(WRITTEN, node.vhost_path(WRITTEN))
    for vhost, path in golden_vhosts.items():
        node.replace_vhost(vhost, path)
        result.before[vhost] = oracle.read_vhost(path)
    vhosts = [vhost for vhost in rabbitmq_base.vhosts if vhost not in (KILLED, CLEAN, WRITTEN)]
    for vhost, name in zip(vhosts, SAMPLE):
        each = damage.by_name(name)
        path = replace(node, vhost, rabbitmq_base.clean) if each.state == "clean" else node.vhost_path(vhost)
        result.note(vhost, path)
        result.planted[vhost] = each, each.apply(path, random.Random(surveys.SEED), result.before[vhost])
    result.seconds = node.start()
    try:
        yield result
    finally:
        if node.running:
            node.rest()


def replace(node: Node, vhost: str, image: Path) -> Path:
    """Take a vhost of another image."""
    return node.replace_vhost(vhost, image / "msg_stores" / "vhosts" / vhost_directory(vhost))


@pytest.fixture(scope="module")
def golden_vhosts(rabbitmq_home) -> dict[str, Path]:
    """{vhost: path} of the golden cases, unpacked."""
    return {
        golden_rabbitmq.manifest(case)["vhost"]: golden_rabbitmq.unpack(case, rabbitmq_home / "golden" / case)
        for case in golden_rabbitmq.cases()
    }


def write_by_model(path: Path) -> None:
    """Write the queues fresh and small of a vhost again: embedded and stored messages, acks, a flush, as after a crash."""
    name = (path / ".vhost").read_bytes()
    records = []
    for queue, number, acked in ((b"fresh", 20, (0, 3)), (b"small", 200, range(70))):
        model = oracle.IndexModel(image_vhosts.SEGMENT_ENTRY_COUNT, image_vhosts.MAX_JOURNAL_ENTRIES)
        for seq in range(number):
            msg_id = b"%-8s%08d" % (queue, seq)
            stored = queue == b"fresh" and seq % 5 == 0
            body = (b"written-%s-%03d" % (queue, seq)).ljust(6000 if stored else 0, b".")
            term = oracle.message_term(body, msg_id, vhost=name, routing_keys=[queue])
            if stored:
                records.append((msg_id, term))
            model.enqueue(oracle.Publish(seq, msg_id, 0, len(body), True, b"" if stored else term))
        for seq in acked:
            model.ack([seq])
        folder = path / "queues" / oracle.queue_dir(name, queue)
        for old in folder.iterdir():
            if old.name != ".queue_name":
                old.unlink()
        for file, data in model.files().items():
            (folder / file).write_bytes(data)
    highest = max(path.glob("msg_store_persistent/*.rdq"), key=lambda one: int(one.stem))
    with open(highest, "ab") as store:
        store.write(b"".join(oracle.rdq_record(*record) for record in records))


# The messages of 15-clean-ttl lived for a day.
@pytest.mark.parametrize("case", [case for case in golden_rabbitmq.cases() if case != "15-clean-ttl"])
def test_a_golden_case_is_delivered_as_it_was(booted, case):
    manifest = golden_rabbitmq.manifest(case)
    vhost = booted.before[manifest["vhost"]]
    for name, entry in manifest["queues"].items():
        messages = booted.node.get_all(manifest["vhost"], name)
        if entry["args"].get("x-max-priority"):
            expected = [one for level in (3, 2, 1, 0) for one in vhost.queue(b"q", level).entries]
        else:
            expected = vhost.queues[entry["dir"]].entries
            assert len(expected) == entry["node_recovered"]["delivered"]
        assert [one.body for one in messages] == [one.message.body for one in expected]
        assert [one.redelivered for one in messages] == [one.redelivered for one in expected]


@pytest.mark.parametrize("vhost", [KILLED, CLEAN, WRITTEN])
def test_the_node_delivers_what_the_oracle_reads(booted, vhost):
    before = booted.before[vhost]
    assert not before.crashes and before.clean == (vhost == CLEAN)
    answer = surveys.ask(booted.node, vhost, booted.known[vhost])
    assert not answer.failed and not answer.unknown
    for name, messages in answer.messages.items():
        queues = [queue for queue in before.queues.values() if queue.name.queue == name.encode()]
        if len(queues) > 1:
            # The highest priority comes first.
            queues.sort(key=lambda queue: -queue.name.priority)
        expected = [entry for queue in queues for entry in queue.entries]
        assert [one.body for one in messages] == [one.message.body for one in expected], name
        assert [one.redelivered for one in messages] == [one.redelivered for one in expected], name
        for received, entry in zip(messages, expected):
            assert received.exchange.encode() == entry.message.exchange
            # A priority of no use is one all the same; what nobody set is not there.
            assert received.properties == as_client_sees(entry.message.properties)


def as_client_sees(properties: dict[str, Any]) -> dict[str, Any]:
    """Convert properties as pika does."""
    return {
        name: {key.decode(): field_as_client_sees(one) for key, one in value}
        if name == "headers"
        else value.decode()
        if isinstance(value, bytes)
        else value
        for name, value in properties.items()
    }


def field_as_client_sees(typed: oracle.Typed) -> Any:
    """Convert a field as pika does, which cuts floats to whole numbers."""
    letter, value = typed
    if letter == "F":
        return {key.decode(): field_as_client_sees(one) for key, one in value}
    if letter == "A":
        return [field_as_client_sees(one) for one in value]
    if letter == "S":
        return value.decode()
    if letter in "fd":
        return int(value)
    if letter == "T":
        return datetime.fromtimestamp(value, timezone.utc)
    if letter == "D":
        return Decimal(value[1]).scaleb(-value[0])
    return value


@pytest.mark.parametrize("name", SAMPLE)
def test_the_node_treats_damage_as_recorded(booted, name):
    vhost = booted.vhost_of(name)
    each, expected = booted.planted[vhost]
    answer = surveys.ask(booted.node, vhost, booted.known[vhost])
    found = surveys.outcome(answer, expected)
    assert found["outcome"] == each.node, found
    if found["outcome"] == "delivers":
        expected.check(answer.recovered)


def test_a_folder_of_nobody_is_deleted(booted):
    vhost = booted.vhost_of("foreign_folder")
    left = {path.name for path in (booted.node.vhost_path(vhost) / "queues").iterdir()}
    # The boot makes a folder for the queue that had none yet.
    unused = oracle.queue_dir(vhost.encode(), b"unused")
    assert left == {*booted.before[vhost].queues, unused}


def test_what_the_node_wrote_after_the_boot_is_read(booted, rabbitmq_node):
    """The last of the boot: more messages, an orderly stop, and the oracle reads old and new."""
    node, vhost = booted.node, WRITTEN
    queue = booted.before[vhost].queue(b"small")
    with node.channel(vhost) as channel:
        send(channel, (Outgoing(b"later-%d" % i, {}, "", "small") for i in range(5)))
    node.rest()
    after = oracle.read_vhost(node.vhost_path(vhost)).queues[queue.directory]
    assert after.clean and not after.crashes
    assert [one.message.body for one in after.entries] == [
        *(one.message.body for one in queue.entries),
        *(b"later-%d" % i for i in range(5)),
    ]
    # A dirty recovery goes on at the next segment.
    first = queue.next_seq_id
    assert [one.seq for one in after.entries[-5:]] == list(range(first, first + 5))


def test_a_malformed_journal_hangs_the_boot(rabbitmq_node, rabbitmq_base):
    each = damage.by_name("journal_lone_deliver")
    assert each.node == "hangs"
    if rabbitmq_node.running:
        rabbitmq_node.rest()
    rabbitmq_node.restore(rabbitmq_base.killed)
    each.apply(rabbitmq_node.vhost_path(KILLED), random.Random(surveys.SEED))
    with pytest.raises(NodeHungError, match=r"\[error\]"):
        rabbitmq_node.start(patience=3.0)
    assert not rabbitmq_node.running


FIRST_THREAD_ENDS = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_lives_as_long_as_one_of_its_threads():
    # A node that is killed may have its port open still when its first thread is gone already.
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 240
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert is_alive(process.pid)
        process.stdin.close()
        while is_alive(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


KILLED_INTERPRETER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from rabbitmq_node import Node
node = Node(sys.argv[2])
node.start()
print(node.pid, node._mapper.pid, node._server.pid, node._watcher.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_interpreter(rabbitmq_home, tmp_path):
    command = [sys.executable, "-c", KILLED_INTERPRETER, str(Path(__file__).parent), str(tmp_path / "node")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4, done.stderr
    deadline = time.monotonic() + 240
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)
