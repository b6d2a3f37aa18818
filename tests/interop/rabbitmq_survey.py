"""The real node's reaction to each damage of the catalogue: ``python tests/interop/rabbitmq_survey.py [names]``.

Owns `tests/data/rabbitmq/damage.json`, which it writes; takes a quarter of an hour.  Each damage has a boot of its own, since one
directory that hangs a boot hides all others.  Never imports rmqstore.

`ask` is for tests too: what a running node delivers from a vhost, by sequence ids of the directories.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rabbitmq")]

import classic_queue_oracle as oracle  # noqa: E402
import damage  # noqa: E402
import rabbitmq_images  # noqa: E402
from rabbitmq_node import Node, NodeError, NodeHungError, Received, receive  # noqa: E402

SEED = 7
#: A boot is hung that has not come up this many seconds after its first error.
PATIENCE = 6.0
QUEUE_TIMEOUT = 8.0


@dataclass
class Answer:
    """The messages that a node delivers from a vhost: by queue, sequence ids in order by directory, queues that failed."""

    messages: dict[str, list[Received]] = field(default_factory=dict)
    delivered: dict[str, list[int]] = field(default_factory=dict)
    unknown: dict[str, list[bytes]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def recovered(self) -> dict[str, set[int]]:
        """Sequence ids by directory."""
        return {directory: set(seqs) for directory, seqs in self.delivered.items()}


def known_bodies(vhost: oracle.Vhost) -> dict[str, dict[bytes, tuple[str, int]]]:
    """{queue: {body: (directory, sequence id)}} of every message that a directory has, acked ones too."""
    found: dict[str, dict[bytes, tuple[str, int]]] = {}
    stored = {one.msg_id: one.term for path in vhost.path.glob("msg_store_persistent/*.rdq") for one in _records(path)}
    for directory, queue in vhost.queues.items():
        assert queue.name is not None
        bodies = found.setdefault(queue.name.queue.decode(), {})
        folder = vhost.path / "queues" / directory
        publishes = list(queue.entries)
        for path in folder.iterdir():
            records: list[oracle.Record] = []
            if path.name == damage.JOURNAL:
                records = oracle.parse_journal(path.read_bytes()).records
            elif path.suffix == ".idx":
                records = oracle.parse_segment(path.read_bytes(), int(path.stem), vhost.segment_entry_count).records
            for record in records:
                term = (record.pub.term or stored.get(record.pub.msg_id, b"")) if record.pub is not None else b""
                if term:
                    bodies[oracle.message_of(oracle.decode(term)).body] = (directory, record.seq)
        bodies |= {entry.message.body: (directory, entry.seq) for entry in publishes}
    return found


def _records(path: Path) -> list[oracle.Stored]:
    return oracle.parse_rdq(path.read_bytes()).records


def ask(
    node: Node,
    vhost: str,
    known: Mapping[str, Mapping[bytes, tuple[str, int]]],
    *,
    queues: Iterable[str] = tuple(rabbitmq_images.QUEUES),
    timeout: float = QUEUE_TIMEOUT,
) -> Answer:
    """Take every message of every queue of a running node's vhost; they go back."""
    import pika.exceptions

    answer = Answer()
    left = list(queues)
    while left:
        # A queue that fails takes the channel with it; the others get a new one.
        try:
            with node.channel(vhost, timeout=2 * timeout) as channel:
                while left:
                    answer.messages[left[0]] = receive(channel, left[0], timeout=timeout)
                    left.pop(0)
        except (NodeError, pika.exceptions.AMQPError) as error:
            answer.failed[left.pop(0)] = f"{type(error).__name__}: {error}"[:200]
    for queue, messages in answer.messages.items():
        for message in messages:
            place = known.get(queue, {}).get(message.body) or damage.planted_at(message.body)
            if place is not None:
                answer.delivered.setdefault(place[0], []).append(place[1])
            else:
                answer.unknown.setdefault(queue, []).append(message.body[:40])
    return answer


def outcome(answer: Answer, expected: damage.Expected) -> dict[str, Any]:
    """Compare what was delivered with what is had back at best."""
    found: dict[str, Any] = {"outcome": "delivers"}
    missing, more, reordered = {}, {}, []
    for directory in sorted({*expected.live, *answer.delivered}):
        seqs, best = answer.delivered.get(directory, []), expected.best(directory)
        if best - set(seqs):
            missing[directory] = ranges(best - set(seqs))
        if set(seqs) - best or len(seqs) != len(set(seqs)):
            more[directory] = ranges(set(seqs) - best)
        if seqs != sorted(seqs):
            reordered.append(directory)
    unknown = {queue: [body.decode("latin-1") for body in bodies] for queue, bodies in answer.unknown.items()}
    if unknown:
        found["unknown"] = unknown
    for name, value in (("missing", missing), ("more", more), ("reordered", reordered), ("failed", answer.failed)):
        if value:
            found[name] = value
    if answer.failed:
        found["outcome"] = "queue fails"
    elif missing:
        found["outcome"] = "loses"
    elif more or unknown:
        found["outcome"] = "more"
    elif reordered:
        found["outcome"] = "reorders"
    return found


def ranges(seqs: Iterable[int]) -> list[str]:
    """Sequence ids as texts such as "3" and "5-9"."""
    found: list[list[int]] = []
    for seq in sorted(seqs):
        if found and found[-1][1] == seq - 1:
            found[-1][1] = seq
        else:
            found.append([seq, seq])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


def survey(names: Iterable[str]) -> None:
    """Ask the node about each damage; what it does is kept as soon as it is known."""
    found = json.loads(damage.SURVEY.read_text(encoding="utf-8"))["damages"] if damage.SURVEY.exists() else {}
    with tempfile.TemporaryDirectory(prefix="survey-") as folder, contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(Path(folder) / "node", rabbit=rabbitmq_images.SETTINGS, log_level="warning"))
        images = rabbitmq_images.build(node, Path(folder) / "images", 1)
        (vhost,) = images.vhosts
        for name in names:
            each = damage.by_name(name)
            node.restore(images.image(each.state))
            path = node.vhost_path(vhost)
            known = known_bodies(oracle.read_vhost(path))
            expected = each.apply(path, random.Random(SEED))
            try:
                node.start(90, patience=PATIENCE)
            except NodeHungError:
                found[name] = {"outcome": "hangs", "errors": errors(node)}
            else:
                answer = ask(node, vhost, known)
                found[name] = {**outcome(answer, expected), "errors": errors(node)}
                node.kill9()
            if not found[name]["errors"]:
                del found[name]["errors"]
            print(name, json.dumps(found[name])[:230], flush=True)
            ordered = {each.name: found[each.name] for each in damage.DAMAGES if each.name in found}
            text = json.dumps({"node": "RabbitMQ 3.10.8, OTP 25.2.3", "seed": SEED, "damages": ordered}, indent=1)
            damage.SURVEY.write_text(text + "\n", encoding="utf-8")


def errors(node: Node, number: int = 3) -> list[str]:
    """The first lines of errors in its log that say something, without times and processes."""
    lines = [line.partition("> ")[2].strip() for line in node.log_errors()]
    telling = [
        line for line in lines if any(word in line for word in ("badmatch", "error", "clause", "reason", "exit"))
    ]
    return [line[:160] for line in dict.fromkeys(telling)][:number]


if __name__ == "__main__":
    asked = sys.argv[1:] or [each.name for each in damage.DAMAGES if "user" not in each.needs]
    survey(asked)
