"""Repair: every kind of damage of the catalogue, planted in what a real node left, is named and gets out of the way.

Owns the comparison of `verify` and `repair` with the oracle, which computes what can be had back from the undamaged directory, and
which reads the output as a node does.  The real node itself boots on repaired directories in tests/interop.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
from pathlib import Path

import classic_queue_oracle as oracle
import golden
import golden_rabbitmq
import pytest
from damage import DAMAGES, Damage, Unsuitable

from rmqstore.errors import StoreError
from rmqstore.rabbitmq import (
    Consequence,
    Message,
    MessageStore,
    QueueIndex,
    Vhost,
    layout,
    live_index,
    repair,
    verify,
)

LARGE = {"06-kill9-multisegment", "20-clean-rdq-roll-16MiB", "30-kill9-default-2048-segments"}


@pytest.fixture(scope="module")
def undamaged(golden_vhost):
    """A function `undamaged(case)`: the golden vhost as the oracle reads it, which takes longer than anything else here."""
    return functools.cache(lambda case: oracle.read_vhost(golden_vhost(case)))


def lacks(damage: Damage, before: oracle.Vhost) -> bool:
    """True if, without a copy, a vhost clearly has no place for this damage."""
    if "v2" in damage.needs and not any(queue.version == 2 for queue in before.queues.values()):
        return True
    return "shared" in damage.needs and not any(count > 1 for count in before.references.values())


def planted(damage: Damage, shared, undamaged, folder, seed: int = 0):
    """(path, Expected, before): the first golden vhost that has what this damage needs, with it, and as the oracle read it."""
    if "user" in damage.needs and os.geteuid() == 0:
        pytest.skip("nothing is unreadable for root")
    # Small ones first.
    for case in sorted(golden_rabbitmq.cases(), key=lambda case: case in LARGE):
        if damage.state not in case.replace("kill9", "killed"):
            continue
        before = undamaged(case)
        if lacks(damage, before):
            continue
        path = Path(shutil.copytree(shared(case), folder / case))
        try:
            return path, damage.apply(path, random.Random(f"{damage.name} {seed}"), before), before
        except Unsuitable:
            shutil.rmtree(path)
    pytest.skip(f"no golden vhost has {', '.join(sorted(damage.needs))}; the real node's have, in tests/interop")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damage_is_named_and_repaired(damage, golden_vhost, undamaged, tmp_path):
    path, expected, sound = planted(damage, golden_vhost, undamaged, tmp_path)
    before = golden.tree(path)
    findings = list(verify(path))
    consequences = {finding.consequence for finding in findings}
    if damage.node == "hangs":
        assert Consequence.HANGS in consequences
    elif damage.node != "delivers":
        assert findings
    if "user" in damage.needs:
        # Unreadable messages are not lost: a user who can read them repairs them.
        with pytest.raises(StoreError, match="make it readable first"):
            repair(path, tmp_path / "repaired")
        assert golden.tree(path) == before
        return
    report = repair(path, tmp_path / "repaired")
    assert golden.tree(path) == before
    after = oracle.read_vhost(tmp_path / "repaired")
    assert not after.crashes
    # A message whose number was damaged is known by its id.
    known = {
        (directory, entry.msg_id): entry.seq for directory, queue in sound.queues.items() for entry in queue.entries
    }
    recovered = {
        directory: {known.get((directory, entry.msg_id), entry.seq) for entry in queue.entries}
        for directory, queue in after.queues.items()
    }
    expected.check(recovered)
    assert {
        queue.directory: queue.messages + queue.expired for queue in report.queues if queue.files != "left out"
    } == {directory: len(seqs) for directory, seqs in recovered.items()}
    # The output is as good as a node's directory.
    assert {f.consequence for f in verify(tmp_path / "repaired")} <= {Consequence.NONE}


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_repairing_what_is_sound_copies_it(case, golden_vhost, tmp_path):
    path = golden_vhost(case)
    report = repair(path, tmp_path / "copy")
    assert not report.findings and not report.lost and {queue.files for queue in report.queues} <= {"copied"}
    for file in path.rglob("*"):
        if file.is_file() and "msg_store_transient" not in file.parts and file.name != ".config":
            assert (tmp_path / "copy" / file.relative_to(path)).read_bytes() == file.read_bytes(), file
    with Vhost.open(path) as source, Vhost.open(tmp_path / "copy") as copy:
        assert copy.clean == source.clean


def test_a_clean_state_that_does_not_fit_hides_no_message(golden_vhost_copy, tmp_path):
    # A bit of an id in its table: the message is whole, and was dropped as one that the store has not.
    path = golden_vhost_copy("12-clean-msgstore")
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        messages = list(queue.messages())
    wanted = [(message.seq_id, message.body) for message in messages]
    msg_id = next(message.msg_id for message in messages if message.location == "store")
    table = path / "msg_store_persistent" / "msg_store_index.ets"
    table.write_bytes(table.read_bytes().replace(msg_id, bytes([msg_id[0] ^ 1]) + msg_id[1:]))
    assert [(finding.kind, finding.path) for finding in verify(path)] == [("clean_state_misfit", str(table))]
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost) == (len(wanted), 0)
    for each in (path, tmp_path / "repaired"):
        with Vhost.open(each) as vhost:
            found = [(message.seq_id, message.body) for queue in vhost.queues() for message in queue.messages()]
            rows = sum(batch.num_rows for queue in vhost.queues() for batch in queue.batches(("seq_id",)))
        assert found == wanted and rows == len(wanted)
    assert list(verify(tmp_path / "repaired")) == []


def made(tmp_path, count: int = 4) -> tuple[Path, list[Message]]:
    """A vhost with one queue of embedded messages, and these."""
    path = tmp_path / "vhost"
    (path / "queues").mkdir(parents=True)
    (path / ".vhost").write_bytes(b"/")
    (path / ".config").write_bytes(layout.format_config(2048))
    messages = [Message(b"body %d" % n, properties={"delivery_mode": 2}, routing_keys=["q"]) for n in range(count)]
    with QueueIndex.open(path / "queues" / layout.queue_directory("/", "q"), create=True) as index:
        index.publish_many(messages, deliver=True)
        index.flush()
    return path, messages


def test_an_entry_that_one_bit_made_transient_is_named_and_kept(tmp_path):
    # Verify said nothing, a node's queue crashes on it, and a repair for another reason left the message out.
    path, messages = made(tmp_path)
    (segment,) = path.glob("queues/*/0.idx")
    data = bytearray(segment.read_bytes())
    publishes = [record for record in oracle.parse_segment(bytes(data), 0, 2048).records if record.pub]
    data[publishes[1].begin] ^= 0x40
    segment.write_bytes(data)
    (finding,) = verify(path)
    assert (finding.kind, finding.consequence, finding.messages) == ("transient_entry", Consequence.CRASHES, 1)
    assert (finding.path, finding.pos) == (str(segment), publishes[1].begin)
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost, [queue.transient for queue in report.queues]) == (4, 0, [0])
    (queue,) = oracle.read_vhost(tmp_path / "repaired").queues.values()
    assert [entry.message.body for entry in queue.entries] == [message.body for message in messages]
    assert not list(verify(tmp_path / "repaired"))
    # A message that is transient in both is as a node wrote it.
    index = QueueIndex.open(segment.parent)
    index.publish(message=Message(b"of today", properties={"delivery_mode": 1}, routing_keys=["q"]))
    index.sync()
    index.abandon()
    assert [(each.kind, each.messages) for each in verify(path)] == [("transient_entry", 1)]


@pytest.mark.parametrize("file", ["0.idx", "journal.jif"])
def test_what_the_index_leaves_out_for_its_term_is_given_or_counted(tmp_path, file):
    # A repair dropped both and said that none is lost, though dump shows the first one whole.
    path, messages = made(tmp_path)
    if file == "journal.jif":
        with QueueIndex.open(next(path.glob("queues/*"))) as index:
            messages += [Message(b"body %d" % n, properties={"delivery_mode": 2}) for n in range(4, 8)]
            index.publish_many(messages[4:], deliver=True)
            index.sync()
            index.abandon()
    (damaged,) = path.glob(f"queues/*/{file}")
    data = bytearray(damaged.read_bytes())
    of_id, of_term = messages[-3:-1]
    data[data.find(of_id.msg_id)] ^= 1
    data[data.find(of_term.body) - 5] ^= 0x40
    damaged.write_bytes(data)
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost) == (len(messages) - 1, 1)
    with Vhost.open(tmp_path / "repaired") as vhost:
        (queue,) = vhost.queues()
        found = list(queue.messages())
    assert [message.term for message in found] == [each.term for each in messages if each is not of_term]
    assert [message.msg_id for message in found] == [each.msg_id for each in messages if each is not of_term]
    assert list(verify(tmp_path / "repaired")) == []


@pytest.mark.parametrize(
    ("name", "tail", "kind"),
    [
        ("journal.jif", bytes(7) + b"\1" * 30, "torn_record"),
        ("journal.jif", bytes(500), "zero_tail"),
        ("9.idx", bytes(500), "nul_file"),
    ],
)
def test_what_a_node_repairs_by_itself_is_not_in_the_output(tmp_path, name, tail, kind):
    # It was copied as it is, though the output is promised to be without it.
    path, messages = made(tmp_path)
    (folder,) = path.glob("queues/*")
    with open(folder / name, "ab") as file:
        file.write(tail)
    assert [(finding.kind, finding.consequence) for finding in verify(path)] == [(kind, Consequence.REPAIRS)]
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost) == (len(messages), 0) and list(verify(tmp_path / "repaired")) == []
    with Vhost.open(tmp_path / "repaired") as vhost:
        (queue,) = vhost.queues()
        assert [(message.seq_id, message.term) for message in queue.messages()] == [
            (seq_id, message.term) for seq_id, message in enumerate(messages)
        ]


def test_what_no_node_reads_ends_no_repair(tmp_path):
    # Each ended it with a Python list for a message; verify says rightly that nothing is wrong.
    path, messages = made(tmp_path)
    (folder,) = path.glob("queues/*")
    os.mkfifo(folder / ".queue_name")
    os.mkfifo(folder / "fifo")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "here").symlink_to(".")
    (folder / "folder").mkdir()
    assert list(verify(path)) == []
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost, report.queues[0].files) == (len(messages), 0, "copied")
    (output,) = (tmp_path / "repaired").glob("queues/*")
    assert sorted(each.name for each in output.iterdir()) == ["0.idx", "journal.jif"]
    assert (output / "0.idx").read_bytes() == (folder / "0.idx").read_bytes()
    assert list(verify(tmp_path / "repaired")) == []


@pytest.mark.parametrize("unwritten", [False, True])
def test_a_stored_message_with_another_id_than_its_record(tmp_path, unwritten):
    # verify said nothing, and where the message files had to be written again the repair ended with an error.
    path, (small,) = made(tmp_path, 1)
    large = [Message(b"%d" % n + b"x" * 6000, properties={"delivery_mode": 2}) for n in range(4)]
    with MessageStore.open(path / "msg_store_persistent", references={}) as store:
        store.write_many([each.msg_id for each in large], large)
    for name in ("q", "second"):
        with QueueIndex.open(path / "queues" / layout.queue_directory("/", name), create=True) as index:
            index.publish_many(msg_ids=[each.msg_id for each in large], sizes=[6001] * 4, deliver=True)
            index.flush()
    file = path / "msg_store_persistent" / "0.rdq"
    data = bytearray(file.read_bytes())
    data[data.rfind(large[1].msg_id)] ^= 1
    data[-1] = 0 if unwritten else data[-1]
    file.write_bytes(data)
    inner = bytes([large[1].msg_id[0] ^ 1]) + large[1].msg_id[1:]
    findings = [finding for finding in verify(path) if finding.kind == "bad_message"]
    assert len(findings) == 2 and all(inner.hex() in finding.detail for finding in findings)
    report = repair(path, tmp_path / "repaired")
    assert report.lost == 2 * unwritten and list(verify(tmp_path / "repaired")) == []
    kept = [each.body for each in (large[:-1] if unwritten else large)]
    with Vhost.open(tmp_path / "repaired") as vhost:
        for queue in vhost.queues():
            messages = [message for message in queue.messages() if message.body != small.body]
            assert [message.body for message in messages] == kept
            assert messages[1].msg_id == messages[1].message.msg_id == inner


def test_a_segment_that_the_system_does_not_give_out_is_not_lost(tmp_path, monkeypatch):
    path, _ = made(tmp_path)
    real = live_index.map_file

    def refused(name):
        if name.endswith("0.idx"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(name)

    monkeypatch.setattr(live_index, "map_file", refused)
    with pytest.raises(StoreError, match="make it readable first") as caught:
        repair(path, tmp_path / "repaired")
    assert caught.value.path == str(next(path.glob("queues/*/0.idx")))
    assert not list(tmp_path.glob("repaired*"))


def test_a_path_that_is_relative(golden_vhost_copy, tmp_path, monkeypatch):
    path = golden_vhost_copy("02-kill9-segment-plus-journal")
    (segment,) = path.glob("queues/*/0.idx")
    with open(segment, "r+b") as file:
        file.truncate(segment.stat().st_size - 9)
    monkeypatch.chdir(path.parent)
    assert {finding.path for finding in verify(path.name)} == {str(segment)}
    report = repair(path.name, "repaired")
    assert report.queues[0].files == "rewritten" and list(verify("repaired")) == []


def test_what_cannot_be(golden_vhost, tmp_path):
    path = golden_vhost("11-clean-small")
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreError, match="exists"):
        repair(path, tmp_path / "there")
    with pytest.raises(StoreError, match="in the source"):
        repair(path, path / "inside")
    with pytest.raises(StoreError, match="no such directory"):
        repair(tmp_path / "none", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_time_ends_no_repair(tmp_path):
    # A number of more than 63 bits, which noise over an entry leaves, was refused by the index that repair writes.
    path = tmp_path / "vhost"
    directory = path / "queues" / layout.queue_directory("/", "orders")
    directory.parent.mkdir(parents=True)
    (path / ".vhost").write_text("/")
    (path / ".config").write_bytes(layout.format_config(2048))
    planted, damaged = 0x1122334455667788, 0xEE22334455667788
    with QueueIndex.open(directory, create=True) as index:
        for number in range(4):
            message = Message(b"%d" % number, properties={"delivery_mode": 2})
            index.publish(message=message, expiry_us=planted if number < 3 else 0)
    (directory / ".queue_name").write_text("VHOST: /\nQUEUE: orders\n")
    journal = directory / "journal.jif"
    assert journal.read_bytes().count(planted.to_bytes(8, "big")) == 3
    # The last message is cut: files without damage are copied.
    journal.write_bytes(journal.read_bytes().replace(planted.to_bytes(8, "big"), damaged.to_bytes(8, "big"))[:-1])
    (queue,) = repair(path, tmp_path / "repaired").queues
    assert (queue.messages, queue.expired) == (3, 0)
    (found,) = oracle.read_vhost(tmp_path / "repaired").queues.values()
    assert [(each.message.body, each.expiry) for each in found.entries] == [
        (b"0", damaged), (b"1", damaged), (b"2", damaged),
    ]  # fmt: skip
