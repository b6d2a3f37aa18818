"""Files that a full disk or an interrupted start cut: what is whole is read, and what the node does is said."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from rmqstore import cli
from rmqstore.rabbitmq import Vhost, verify


def run(*arguments):
    return CliRunner().invoke(cli.main, ["rabbitmq", *map(str, arguments)])


def told(path):
    return [(finding.kind, os.path.basename(finding.path), finding.consequence.value) for finding in verify(path)]


@pytest.mark.parametrize(
    ("length", "position", "ignored"), [(0, 0, True), (100, 100, True), (3000, 2996, True), (6000, 5996, False)]
)
def test_recovery_terms_that_end_early_hide_no_message(golden_vhost_copy, tmp_path, length, position, ignored):
    path = golden_vhost_copy("12-clean-msgstore")
    os.truncate(path / "recovery.dets", length)
    found = verify(path)
    terms = [finding for finding in found if finding.kind == "bad_recovery_terms"]
    assert terms[0].pos == position and all(finding.path == str(path / "recovery.dets") for finding in terms)
    assert {finding[2] for finding in told(path) if finding[0] == "bad_recovery_terms"} == {"redelivers"}
    # Without the terms of its queues the message store does not believe its own state.
    state = ("clean_state_ignored", "clean.dot", "repairs")
    assert (state in told(path)) == ignored
    answer = run("export", path, "-O", tmp_path / "out.jsonl")
    assert answer.exit_code == 0 and "20 messages" in answer.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    with Vhost.open(path, read_only=True) as vhost:
        (queue,) = vhost.queues()
        if ignored:
            assert all(message.delivered for message in queue.messages())


def test_an_index_without_bytes_leaves_its_messages_to_be_saved(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("19-clean-v2")
    (index,) = path.glob("queues/*/0.qi")
    os.truncate(index, 0)
    kinds = {kind: (name, consequence) for kind, name, consequence in told(path)}
    assert kinds["bad_head"] == ("0.qi", "deletes_segment")
    assert kinds["segment_count_mismatch"][0] == "0.qi"
    assert kinds["unreferenced_messages"] == ("0.qs", "forgets")
    for words in (["queues"], ["dump"]):
        answer = run(*words, path)
        assert answer.exit_code == 1 and "0.qi, position 0: bad_head" in answer.stderr
    answer = run("repair", path, tmp_path / "repaired")
    assert "0 messages will be delivered, 20 are lost" in answer.stdout and "--unreferenced" in answer.stdout
    answer = run("export", path, "--unreferenced", "-O", tmp_path / "saved.jsonl")
    assert len((tmp_path / "saved.jsonl").read_text().splitlines()) == 23


def test_messages_without_bytes_are_lost_one_by_one(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("19-clean-v2")
    (messages,) = path.glob("queues/*/0.qs")
    os.truncate(messages, 0)
    found = told(path)
    assert found[0] == ("bad_head", "0.qs", "blocks")
    assert set(found[1:]) == {("outside", "0.qs", "restarts")} and len(found) == 18
    answer = run("dump", path)
    assert answer.exit_code == 1 and answer.stdout.count("has no whole bytes in the queue's own files") == 17
    answer = run("repair", path, tmp_path / "repaired")
    assert "3 messages will be delivered, 17 are lost" in answer.stdout


def test_a_config_without_bytes_hangs_the_node(golden_vhost_copy):
    path = golden_vhost_copy("19-clean-v2")
    os.truncate(path / ".config", 0)
    (path / ".vhost").unlink()
    assert told(path) == [("bad_config", ".config", "hangs")]
