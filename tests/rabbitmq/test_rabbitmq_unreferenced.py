"""Whole messages that no index has: counted, named and exportable; and what the recovery terms count is lost where it is gone."""

from __future__ import annotations

import json
import os

import golden
import pytest
from click.testing import CliRunner

from rmqstore import cli
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import (
    Consequence,
    Message,
    Vhost,
    export,
    file_messages,
    import_messages,
    repair,
    unreferenced_messages,
    verify,
)
from rmqstore.rabbitmq.transfer import object_message

CASE = "12-clean-msgstore"
STATE = ("recovery.dets", *(f"msg_store_persistent/{name}" for name in ("clean.dot", "file_summary.ets", "msg_store_index.ets")))


def run(*arguments):
    return CliRunner().invoke(cli.main, ["rabbitmq", *map(str, arguments)])


@pytest.fixture(params=["after a crash", "after a clean stop", "no directory"])
def without_index(request, golden_vhost_copy):
    """A vhost whose queue has lost its index, whether there are terms, and (id, body) of what its message file has."""
    path = golden_vhost_copy(CASE)
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        stored = {m.msg_id: m.body for m in queue.messages() if m.location == "store"}
        acked = {found.msg_id: found.message.body for found in unreferenced_messages(vhost)}
    assert len(stored) == 10 and len(acked) == 5
    (folder,) = path.glob("queues/*")
    for name in ("0.idx", "journal.jif"):
        (folder / name).unlink()
    if request.param == "no directory":
        (folder / ".queue_name").unlink()
        folder.rmdir()
    for name in STATE if request.param == "after a crash" else ():
        (path / name).unlink()
    return path, request.param != "after a crash", stored | acked


def test_they_are_counted_named_and_exportable(without_index, tmp_path):
    path, _, whole = without_index
    before = golden.tree(path)
    (finding,) = (each for each in verify(path) if each.kind == "unreferenced_messages")
    assert finding.messages == len(whole) == 15 and finding.path.endswith("0.rdq")
    assert finding.consequence is Consequence.FORGETS and "export --unreferenced" in finding.detail
    with Vhost.open(path) as vhost:
        assert {found.msg_id: found.message.body for found in unreferenced_messages(vhost)} == whole
    assert json.loads(run("info", path, "--json").stdout)["unreferenced"] == 15
    dumped = run("dump", "--unreferenced", path)
    assert dumped.exit_code == 0 and len(dumped.stdout.splitlines()) == 15
    for name in ("jsonl", "arrow", "parquet"):
        answer = run("export", "--unreferenced", path, "-O", tmp_path / f"m.{name}")
        assert answer.exit_code == 0 and "15 messages" in answer.stderr
    objects = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert {bytes.fromhex(each["msg_id"]): object_message(each)[0].body for each in objects} == whole
    assert golden.tree(path) == before


def test_a_batch_of_them_has_null_where_only_an_index_knows(without_index, tmp_path):
    pa = pytest.importorskip("pyarrow")
    path, _, whole = without_index
    with Vhost.open(path) as vhost:
        assert export(vhost, tmp_path / "m.arrow", unreferenced=True) == 15
    table = pa.ipc.open_file(tmp_path / "m.arrow").read_all()
    assert dict(zip(table["msg_id"].to_pylist(), table["body"].to_pylist(), strict=True)) == whole
    for name in ("vhost", "queue", "seq_id", "delivered", "expiry"):
        assert table[name].null_count == 15


def test_lost_is_what_the_terms_say_minus_what_is_there(without_index, tmp_path):
    path, terms, _ = without_index
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost, report.unreferenced) == (0, 20 if terms else 0, 15)
    answer = run("repair", path, tmp_path / "again")
    assert f"{20 if terms else 0} are lost" in answer.stdout and "15 whole messages" in answer.stdout
    assert "dump --unreferenced" in answer.stdout


def test_an_import_does_not_delete_them(without_index):
    path, _, _ = without_index
    before = golden.tree(path)
    with pytest.raises(StoreError, match=r"missing_index|missing_directory|segment_count_mismatch"):
        import_messages(path, "other", [Message(b"new")], declared=True)
    assert golden.tree(path) == before


def test_every_answer_names_the_queue_whose_index_is_lost(without_index):
    path, _, _ = without_index
    for words in (["info"], ["queues"], ["dump"], ["export"]):
        answer = run(*words, path)
        assert answer.exit_code == 1 and "/queues/" in answer.stderr, words


def test_one_message_file_alone(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy(CASE)
    file = tmp_path / "0.rdq"
    file.write_bytes((path / "msg_store_persistent" / "0.rdq").read_bytes())
    assert sum(1 for _ in file_messages(file)) == 15
    answer = run("dump", file)
    assert answer.exit_code == 0 and len(answer.stdout.splitlines()) == 15 and "big-28" in answer.stdout
    answer = run("export", file)
    assert answer.exit_code == 0 and len(answer.stdout.splitlines()) == 15
    # A record without its mark is named, and the rest is given.
    data = bytearray(file.read_bytes())
    data[5195] = 0
    file.write_bytes(data)
    answer = run("dump", file)
    assert answer.exit_code == 1 and "0.rdq, position 0: unwritten_record" in answer.stderr
    assert len(answer.stdout.splitlines()) == 14
    for words in (["dump", "--queue", "q", file], ["export", "--queue", "q", "--unreferenced", path]):
        answer = run(*words)
        assert answer.exit_code == 2 and "no --queue" in answer.stderr


def test_the_own_file_of_a_queue_of_version_2(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("19-clean-v2")
    (folder,) = path.glob("queues/*")
    with Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        own = {m.body for m in queue.messages() if m.location == "queue"}
        acked = {found.message.body for found in unreferenced_messages(vhost)}
    assert own and len(acked) == 3 and not own & acked
    assert {found.message.body for found in file_messages(folder / "0.qs")} == own | acked
    # Nothing is said of what was acknowledged; with the entries gone it may be whatever there is.
    assert not list(verify(path))
    (folder / "0.qi").unlink()
    with Vhost.open(path) as vhost:
        found = list(unreferenced_messages(vhost))
        assert {each.queue for each in found if each.path.endswith(".qs")} == {queue.name}
        assert {each.message.body for each in found} >= own | acked
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost) == (0, 20) and report.unreferenced == len(found)
    answer = run("dump", folder / "0.qs")
    assert answer.exit_code == 0 and len(answer.stdout.splitlines()) == len(own | acked)


def test_a_torn_entry_of_version_2_is_lost_by_the_terms(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("19-clean-v2")
    (index,) = path.glob("queues/*/0.qi")
    os.truncate(index, index.stat().st_size - 13)
    report = repair(path, tmp_path / "repaired")
    assert (report.messages, report.lost) == (19, 1)
    (finding,) = (each for each in verify(path) if each.kind == "unreferenced_messages")
    assert finding.messages == 4
