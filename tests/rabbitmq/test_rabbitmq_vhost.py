"""Whole vhosts: what a real node left is read as the oracle reads it, and a sound directory has no findings.

The oracle (plain struct, nothing of the package) was itself checked against what the real node delivered.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import classic_queue_oracle as oracle
import golden
import golden_rabbitmq
import numpy as np
import pytest
from click.testing import CliRunner

from rmqstore import cli
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import Consequence, QueueIndex, Vhost, dets, find_vhosts, repair, verify
from rmqstore.rabbitmq.layout import format_queue_name, parse_queue_name, queue_directory, vhost_directory
from rmqstore.rabbitmq.queue import message_in


def by_directory(vhost: Vhost) -> dict[str, list]:
    """The messages that the node would deliver, by directory, without transient ones, which it drops."""
    found = {}
    for queue in vhost.queues():
        for directory in queue.directories:
            found[directory.name] = [
                (
                    entry.seq_id,
                    entry.msg_id,
                    entry.size,
                    hashlib.sha256(message.body).hexdigest(),
                    entry.persistent,
                    entry.delivered,
                    entry.message is None,
                    entry.expiry,
                    message.exchange,
                    message.routing_keys,
                )
                for entry in directory.entries()
                if entry.persistent and (message := message_in(vhost.term_of(entry)[0])) is not None
            ]
    return found


def by_oracle(vhost: oracle.Vhost) -> dict[str, list]:
    return {
        directory: [
            (
                entry.seq,
                entry.msg_id,
                entry.size,
                entry.sha256,
                entry.persistent,
                entry.redelivered,
                entry.stored,
                entry.expiry // 1000 if entry.expiry else None,
                entry.message.exchange.decode(),
                [key.decode() for key in entry.message.routing_keys],
            )
            for entry in queue.entries
        ]
        for directory, queue in vhost.queues.items()
    }


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_a_vhost_reads_as_the_oracle_reads_it(case, golden_vhost):
    path = golden_vhost(case)
    with Vhost.open(path) as vhost:
        assert by_directory(vhost) == by_oracle(oracle.read_vhost(path))
        assert vhost.clean is ("clean" in case)
        assert vhost.name == golden_rabbitmq.manifest(case)["vhost"]
        assert not vhost.problems and not any(queue.problems for queue in vhost.queues())


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_messages_are_those_of_the_manifest(case, golden_vhost):
    manifest = golden_rabbitmq.manifest(case)
    with Vhost.open(golden_vhost(case)) as vhost:
        for name, expected in manifest["queues"].items():
            if "expect_live_seqs" not in expected or case == "18-clean-priority":
                continue  # there sequence ids are those of the levels, which the manifest does not tell apart
            published = golden_rabbitmq.published(case, name)
            live = golden_rabbitmq.seqs(expected["expect_live_seqs"])
            found = {message.seq_id: message for message in vhost.queue(name).messages() if message.persistent}
            assert sorted(found) == [seq for seq in live if published[seq]["persistent"]]
            for seq, message in found.items():
                assert len(message.body) == message.size == published[seq]["len"]
                assert hashlib.sha256(message.body).hexdigest()[:16] == published[seq]["sha256_16"]


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_what_a_node_left_has_no_findings(case, golden_vhost):
    assert list(verify(golden_vhost(case))) == []


def test_priority_queues_are_one_queue(golden_vhost):
    with Vhost.open(golden_vhost("18-clean-priority")) as vhost:
        queues = vhost.queues()
        (queue,) = [each for each in queues if len(each.directories) > 1]
        levels = [each.queue_name.priority for each in queue.directories]
        assert levels == sorted(levels) and len(set(levels)) == len(levels)
        delivered = [message.level for message in queue.messages()]
        assert delivered == sorted(delivered, reverse=True) and len(delivered) == queue.depth


def test_reading_changes_nothing(golden_vhost_copy):
    for case in ("02-kill9-segment-plus-journal", "13-clean-fanout-refcount", "19-clean-v2"):
        path = golden_vhost_copy(case)
        before = golden.tree(path)
        with Vhost.open(path) as vhost:
            for queue in vhost.queues():
                assert len(list(queue.messages())) == queue.depth
        list(verify(path))
        assert golden.tree(path) == before


def test_a_queue_without_its_stub_is_found_by_its_messages(golden_vhost_copy):
    path = golden_vhost_copy("11-clean-small")
    with Vhost.open(path) as vhost:
        names = [queue.name for queue in vhost.queues()]
    for folder, _, files in os.walk(path):
        if ".queue_name" in files:
            os.unlink(os.path.join(folder, ".queue_name"))
    with Vhost.open(path) as vhost:
        assert [queue.name for queue in vhost.queues() if queue.depth] == names


def test_names():
    assert vhost_directory("/") == "628WB79CIFDYO9LJI6DKMI09L"
    for vhost, queue, level in (("/", "q", None), ("vhost ü", "a\nb", None), ("/", "p", 0), ("/", "p", 255)):
        assert queue_directory(vhost, queue, level) == oracle.queue_dir(vhost.encode(), queue.encode(), level)
        found = parse_queue_name(format_queue_name(vhost, queue, level, 2))
        assert found is not None
        assert (found.vhost, found.queue, found.priority, found.index_version) == (vhost, queue, level, 2)
    assert parse_queue_name(b"") is None and parse_queue_name(b"VHOST: /\n") is None


def test_what_is_no_vhost(tmp_path, golden_vhost):
    with pytest.raises(StoreError, match="no such directory"):
        Vhost.open(tmp_path / "none")
    with pytest.raises(StoreError, match="not a vhost"):
        Vhost.open(tmp_path)
    data = tmp_path / "data"
    inside = data / "msg_stores" / "vhosts" / vhost_directory("c11")
    shutil.copytree(golden_vhost("11-clean-small"), inside)
    assert find_vhosts(data) == find_vhosts(data / "msg_stores") == find_vhosts(inside) == [os.fspath(inside)]
    with pytest.raises(StoreError, match="has 1"):
        Vhost.open(data)
    with pytest.raises(ValueError, match="read-only"):
        Vhost.open(inside, read_only=False)
    with Vhost.open(inside) as vhost, pytest.raises(StoreError, match="no queue 'nope'"):
        vhost.queue("nope")


def test_the_layout_of_before_3_7(golden_vhost, tmp_path):
    """All vhosts of a node together, directories named by a term, no stubs, no .config: what is known is in the messages."""
    source = golden_vhost("12-clean-msgstore")
    root = Path(shutil.copytree(source, tmp_path / "mnesia"))
    (root / "schema.DAT").write_bytes(b"")
    (root / ".config").unlink()
    name = (root / ".vhost").read_bytes()
    (root / ".vhost").unlink()
    objects = []
    terms = oracle.recovery_terms(oracle.parse_dets((root / "recovery.dets").read_bytes()))
    for folder in list((root / "queues").iterdir()):
        stub = oracle.parse_queue_name((folder / ".queue_name").read_bytes())
        (folder / ".queue_name").unlink()
        resource = (oracle.Atom("resource"), name, oracle.Atom("queue"), stub.queue)
        other = oracle.base36(hashlib.md5(oracle.encode(resource)).digest())
        objects.append(dets.recovery_object(other, dets.recovery_terms(dets.read(root / "recovery.dets"))[folder.name]))
        folder.rename(folder.with_name(other))
    assert len(objects) == len(terms)
    (root / "recovery.dets").write_bytes(dets.encode(objects))
    with Vhost.open(source) as before, Vhost.open(root) as after:
        assert after.is_pre_3_7 and after.clean and not before.is_pre_3_7
        told = {message.body: message.delivered for queue in before.queues() for message in queue.messages()}
        assert {message.body: message.delivered for queue in after.queues() for message in queue.messages()} == told
        named = {queue.name for queue in after.queues() if queue.depth}
        assert named == {queue.name for queue in before.queues() if queue.depth}
    assert [finding.kind for finding in verify(root)] == ["missing_config"]
    with pytest.raises(StoreError, match=r"before 3\.7"):
        repair(root, tmp_path / "new")


@pytest.mark.parametrize("name", ["0.idx", "journal.jif", ""])
def test_a_link_to_nothing_is_a_finding(name, golden_vhost_copy, tmp_path):
    # A disk that is not mounted, for instance: verify said that nothing is wrong.
    path = golden_vhost_copy("02-kill9-segment-plus-journal")
    (directory,) = (path / "queues").iterdir()
    place = directory / name if name else directory
    place.rename(tmp_path / "elsewhere")
    place.symlink_to("/nowhere/at/all")
    (finding,) = [each for each in verify(path) if each.path == os.fspath(place)]
    assert finding.consequence is Consequence.HANGS and "a link to nothing" in finding.detail
    if name:
        with pytest.raises(FileNotFoundError, match=name), Vhost.open(path) as vhost:
            QueueIndex.open(directory, segment_entry_count=vhost.segment_entry_count)
    assert repair(path, tmp_path / "repaired").findings
    place.unlink()
    (tmp_path / "elsewhere").rename(place)
    assert list(verify(path)) == []


def test_what_is_no_directory_among_the_queues(golden_vhost_copy):
    path = golden_vhost_copy("13-clean-fanout-refcount")
    directory = next(iter(sorted((path / "queues").iterdir())))
    directory.rename(path.with_name("elsewhere"))
    directory.write_bytes(b"")
    (path / "queues" / "notes.txt").write_bytes(b"x")
    findings = {each.path: (each.kind, each.consequence) for each in verify(path)}
    assert findings == {
        os.fspath(directory): ("no_directory", Consequence.HANGS),
        os.fspath(path / "queues" / "notes.txt"): ("no_directory", Consequence.DELETES),
    }


# ----------------------------------------------------------------------------------- one place that cannot be opened


def in_store_file(number):
    """A function that returns the messages in N.rdq of a vhost that was stopped cleanly."""

    def chosen(vhost, message):
        if message.location != "store":
            return False
        places = vhost.store(message.persistent).locations()
        rows = (places.msg_id == np.frombuffer(message.msg_id, np.uint8)).all(axis=1)
        return places.file[rows].tolist() == [number]

    return chosen


# Case, the place below the vhost, whether the clean state is there, and the messages in that place.
PLACES = {
    "N.qi beside version 1": ("13-clean-fanout-refcount", "queues/*/5.qi", True, lambda vhost, message: False),
    "N.qi": ("19-clean-v2", "queues/*/0.qi", True, lambda vhost, message: True),
    "N.qs": ("19-clean-v2", "queues/*/0.qs", True, lambda vhost, message: message.location == "queue"),
    "0.rdq, clean": ("12-clean-msgstore", "msg_store_persistent/0.rdq", True, in_store_file(0)),
    "0.rdq, not clean": ("12-clean-msgstore", "msg_store_persistent/0.rdq", False, in_store_file(0)),
    "1.rdq, clean": ("20-clean-rdq-roll-16MiB", "msg_store_persistent/1.rdq", True, in_store_file(1)),
    "1.rdq, not clean": ("20-clean-rdq-roll-16MiB", "msg_store_persistent/1.rdq", False, in_store_file(1)),
    "0.rdq, a link to nothing": ("12-clean-msgstore", "msg_store_persistent/0.rdq", None, in_store_file(0)),
}


@pytest.mark.parametrize("name", PLACES)
def test_one_file_that_cannot_be_opened_stops_nothing_else(name, golden_vhost_copy, tmp_path):
    case, pattern, clean, lies_there = PLACES[name]
    path = golden_vhost_copy(case)
    with Vhost.open(path) as vhost:
        messages = [(queue.name, each) for queue in vhost.queues() for each in queue.messages()]
        listed = {(queue, each.seq_id): lies_there(vhost, each) for queue, each in messages}
        depth = sum(queue.depth for queue in vhost.queues())
        folder = next(each.path for each in vhost.directories if each.indexes[0].depth)
    assert len(listed) == depth
    place = Path(folder if "queues" in pattern else path / "msg_store_persistent") / Path(pattern).name
    place.unlink(missing_ok=True)
    place.symlink_to("/nowhere/at/all") if clean is None else place.mkdir()
    if not clean:
        (path / "msg_store_persistent" / "clean.dot").unlink()
    left = {key for key, there in listed.items() if not there}
    before = golden.tree(path)
    findings = list(verify(path))
    assert "unreadable" in {each.kind for each in findings if each.path == os.fspath(place)}
    assert not {each.kind for each in findings} & {"lost_message", "bad_message"}
    with Vhost.open(path) as vhost:
        # The same with every call.
        assert vhost.store() is vhost.store() is not None
        for listing in (
            lambda queue, told: [each.seq_id for each in queue.messages(told)],
            lambda queue, told: [
                row["seq_id"] for batch in queue.batches(("seq_id",), told) for row in batch.to_pylist()
            ],
        ):
            told = []
            given = {(queue.name, seq_id) for queue in vhost.queues() for seq_id in listing(queue, told.append)}
            assert given == left and sum(queue.depth for queue in vhost.queues()) == len(given) + len(told)
            assert all(each.reason and "cannot be read" in str(each) for each in told)
    for command in ("info", "queues", "dump", "export"):
        done = CliRunner().invoke(cli.main, ["rabbitmq", command, os.fspath(path), "--json"])
        lacks = "queues" in pattern or (command in ("dump", "export") and left != set(listed))
        assert done.exit_code == (1 if lacks or command == "info" else 0), (command, done.output)
    report = repair(path, tmp_path / "repaired")
    assert report.lost == 0 and report.messages + sum(each.transient for each in report.queues) >= len(left)
    assert report.unreadable == (depth - len(left) if name != "N.qi" else 0)
    assert golden.tree(path) == before


def test_one_queue_that_cannot_be_opened_stops_no_other(golden_vhost_copy, tmp_path, monkeypatch):
    path = golden_vhost_copy("13-clean-fanout-refcount")
    with Vhost.open(path) as vhost:
        folder = vhost.queue("c").path
        wanted = [message.seq_id for message in vhost.queue("b").messages()]
    scandir = os.scandir

    def refused(place="."):
        if place == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)
    assert [(each.kind, each.path) for each in verify(path)] == [("unreadable", folder)]
    with Vhost.open(path) as vhost:
        assert [each.path for each in vhost.queue("c").incomplete] == [folder] and not vhost.queue("c").depth
        assert [message.seq_id for message in vhost.queue("b").messages()] == wanted
    for command in ("info", "queues", "dump", "export"):
        done = CliRunner().invoke(cli.main, ["rabbitmq", command, os.fspath(path), "--json"])
        assert done.exit_code == 1 and folder in done.stderr
        assert all(json.loads(line) for line in done.stdout.splitlines())
    # Unreadable messages are not lost: the output must not seem complete.
    with pytest.raises(StoreError, match="make it readable first"):
        repair(path, tmp_path / "repaired")
    assert not (tmp_path / "repaired").exists()


def test_queues_that_cannot_be_listed(golden_vhost_copy, monkeypatch):
    path = golden_vhost_copy("13-clean-fanout-refcount")
    folder, scandir = os.fspath(path / "queues"), os.scandir

    def refused(place="."):
        if place == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)
    assert [(each.kind, each.path) for each in verify(path)] == [("unreadable", folder)]
    with Vhost.open(path) as vhost:
        assert not vhost.queues() and [each.path for each in vhost.incomplete] == [folder]


def test_definitions_that_cannot_be_read(golden_vhost, tmp_path):
    inside = tmp_path / "data" / "msg_stores" / "vhosts" / vhost_directory("c11")
    shutil.copytree(golden_vhost("11-clean-small"), inside)
    table = tmp_path / "data" / "rabbit_durable_queue.DCD"
    table.mkdir()
    assert [(each.kind, each.path) for each in verify(inside)] == [("unreadable", os.fspath(table))]
    with Vhost.open(inside) as vhost:
        assert vhost.definitions is None and len(list(vhost.queues()[0].messages())) == 8
