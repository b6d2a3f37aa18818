"""Repaired vhosts under a real node: it boots on each of them and delivers what the report promised, with right bodies.

Every kind of damage of the catalogue is planted in a vhost that this node wrote, one vhost each; then `repair`, and two boots
decide on all of them.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import classic_queue_oracle as oracle
import pytest
import rabbitmq_survey as surveys
from damage import DAMAGES, Damage, Expected, Unsuitable
from rabbitmq_node import Outgoing, vhost_directory

from rmqstore.rabbitmq import Consequence, RepairReport, repair, verify

pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(600)]


@dataclass
class Repaired:
    """The repair of a vhost with planted damage."""

    before: oracle.Vhost
    expected: Expected
    report: RepairReport
    answer: surveys.Answer


@pytest.fixture(scope="module")
def repaired(rabbitmq_node, rabbitmq_base, rabbitmq_home) -> dict[str, Repaired | str]:
    """By name of the damage; a text where there was nothing to break in that way."""
    node = rabbitmq_node
    found: dict[str, Repaired | str] = {}
    folder = rabbitmq_home / "repaired"
    left = list(DAMAGES)
    while left:
        node.restore(rabbitmq_base.killed)
        planted = []
        for vhost, each in zip(rabbitmq_base.vhosts, left):
            image = rabbitmq_base.image(each.state) / "msg_stores" / "vhosts" / vhost_directory(vhost)
            path = Path(shutil.copytree(image, folder / each.name / "damaged"))
            before = oracle.read_vhost(path)
            known = surveys.known_bodies(before)
            if "user" in each.needs:
                # tests/rabbitmq/test_rabbitmq_repair.py has that, as whoever may not read everything.
                found[each.name] = "repair refuses what it may not read, so there is nothing for a node to boot on"
                continue
            try:
                expected = each.apply(path, random.Random(surveys.SEED), before)
            except Unsuitable as reason:
                found[each.name] = str(reason)
                continue
            report = repair(path, folder / each.name / "repaired")
            node.replace_vhost(vhost, folder / each.name / "repaired")
            planted.append((vhost, each, before, known, expected, report))
        node.start()
        for vhost, each, before, known, expected, report in planted:
            found[each.name] = Repaired(before, expected, report, surveys.ask(node, vhost, known))
        node.rest()
        left = left[len(rabbitmq_base.vhosts) :]
    return found


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_node_delivers_what_the_report_promised(damage: Damage, repaired):
    result = repaired[damage.name]
    if isinstance(result, str):
        pytest.skip(result)
    assert not result.answer.failed
    # A publish that the damage put into a journal is a message like any other.
    assert all(set(bodies) == {b"planted"} for bodies in result.answer.unknown.values())
    delivered = {directory: list(seqs) for directory, seqs in result.answer.delivered.items()}
    if result.answer.unknown:
        for directory, seqs in result.expected.returned.items():
            delivered.setdefault(directory, []).extend(seqs)
    result.expected.check({directory: set(seqs) for directory, seqs in delivered.items()})
    promised = {queue.directory: queue.messages for queue in result.report.queues}
    assert {name: number for name, number in promised.items() if number} == {
        directory: len(seqs) for directory, seqs in delivered.items() if seqs
    }
    # In their order, and none twice; where a number was damaged, its message can stand anywhere.
    for directory, seqs in result.answer.delivered.items():
        doubtful = result.expected.doubtful.get(directory, set())
        sure = [seq for seq in seqs if seq not in doubtful]
        assert sure == sorted(set(sure)), directory
    # The redelivered flag is what the report says: as before, or set.
    exact = {queue.directory for queue in result.report.queues if queue.redelivered == "exact"}
    for name, messages in result.answer.messages.items():
        flags = {one.body: one.redelivered for one in messages}
        for directory, queue in result.before.queues.items():
            if queue.name.queue.decode() == name:
                for entry in queue.entries:
                    if entry.message.body in flags:
                        assert flags[entry.message.body] == (entry.redelivered if directory in exact else True)


def test_a_node_goes_on_with_a_repaired_vhost(rabbitmq_node, rabbitmq_base, tmp_path):
    """More messages, an orderly stop, and the package finds nothing wrong with what the node then left."""
    node, vhost = rabbitmq_node, rabbitmq_base.vhosts[0]
    node.restore(rabbitmq_base.killed)
    path = node.vhost_path(vhost)
    by_name = {each.name: each for each in DAMAGES}
    by_name["segment_cut_in_message"].apply(path, random.Random(1))
    assert Consequence.HANGS in {finding.consequence for finding in verify(path)}
    report = repair(path, tmp_path / "repaired")
    node.replace_vhost(vhost, tmp_path / "repaired")
    node.start()
    small = next(queue for queue in report.queues if queue.name == "small")
    node.publish(vhost, [Outgoing(b"later-%d" % i, {}, "", "small") for i in range(5)])
    assert node.depth(vhost, "small") == small.messages + 5
    node.stop()
    assert list(verify(node.vhost_path(vhost))) == []
