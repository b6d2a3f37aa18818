"""A node's data directory: what is not read is named, and a directory that is not a vhost says which to give."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
from click.testing import CliRunner

from rmqstore import cli
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import Vhost, export, find_vhosts, unread_parts


def run(*arguments):
    return CliRunner().invoke(cli.main, ["rabbitmq", *map(str, arguments)])


@pytest.fixture(scope="module", params=["4.0.5-clean", "4.3.6-clean"])
def node(request, golden_node, tmp_path_factory):
    """A node of which one vhost with few messages is left, with its quorum queues and its stream."""
    source = golden_node(request.param)
    root = tmp_path_factory.mktemp("node") / "rabbit@n1"
    shutil.copytree(source, root, ignore=shutil.ignore_patterns("queues", "msg_store_*"))
    for vhost in (root / "msg_stores" / "vhosts").iterdir():
        (vhost / "queues").mkdir()
    return root


def size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_what_is_not_read_is_listed(node):
    parts = {(part.kind, part.queue): part for part in unread_parts(node)}
    wanted = {("quorum queue", "qq1"), ("quorum queue", "qqbig"), ("stream", "st1"), ("log of quorum queues", "")}
    khepri = not (node / "schema.DAT").exists()
    assert set(parts) == wanted | ({("metadata in Khepri", "")} if khepri else set())
    assert all(parts[key].vhost == "/" for key in wanted if key[1])
    (stream,) = (node / "stream").iterdir()
    assert parts["stream", "st1"].path == str(stream) and parts["stream", "st1"].size == size(stream)
    (log,) = (node / "quorum").glob("*/*.wal")
    assert parts["log of quorum queues", ""].size >= log.stat().st_size
    # A vhost by itself has none of it.
    assert unread_parts(find_vhosts(node)[0]) == []


@pytest.mark.parametrize("words", [["info"], ["queues"], ["dump", "--vhost", "/"], ["verify"], ["export", "--vhost", "/"]])
def test_every_command_names_it(node, words):
    answer = run(*words, node)
    for name in ("qq1", "qqbig", "st1"):
        assert re.search(rf"{name}' of vhost '/' \(\d+ bytes\) is not read", answer.stderr), answer.output
    assert "nothing is wrong\n" not in answer.output
    objects = [json.loads(line) for line in run("info", "--json", node).stdout.splitlines()]
    assert {"qq1", "qqbig", "st1"} <= {each["queue"] for each in objects if each["type"] == "unread"}


@pytest.mark.parametrize(("queue", "kind"), [("qq1", "quorum queue"), ("st1", "stream")])
def test_asking_for_one_is_an_error_that_says_its_type(node, queue, kind, tmp_path):
    for words in (["dump"], ["export"]):
        answer = run(*words, "--vhost", "/", "--queue", queue, node)
        assert answer.exit_code == 3 and f"queue {queue!r} is a {kind}" in answer.stderr
    path = next(path for path in find_vhosts(node) if path.endswith("628WB79CIFDYO9LJI6DKMI09L"))
    with Vhost.open(path) as vhost:
        with pytest.raises(StoreError, match=f"is a {kind}, not a classic queue"):
            vhost.queue(queue)
        with pytest.raises(StoreError, match=f"is a {kind}"):
            export(vhost, tmp_path / "m.jsonl", queues=[queue])
        with pytest.raises(StoreError, match="no queue 'other'"):
            vhost.queue("other")


def test_a_directory_that_is_no_vhost_says_which_to_give(node, tmp_path, golden_vhost):
    base = tmp_path / "mnesia"
    for number, name in enumerate(("rabbit@3f2a1c", "rabbit@9b77e0")):
        shutil.copytree(golden_vhost("11-clean-small"), base / name / "msg_stores" / "vhosts" / "A")
        for folder in (base / name, base / name / "msg_stores" / "vhosts"):
            os.utime(folder, (number, number))
    for path in (base, tmp_path):
        with pytest.raises(StoreError, match=r"holds 2 nodes: .*rabbit@3f2a1c, .*give one .*rabbit@9b77e0 was written"):
            find_vhosts(path)
    shutil.rmtree(base / "rabbit@3f2a1c")
    with pytest.raises(StoreError, match=f"holds a node: give {base}/rabbit@9b77e0"):
        find_vhosts(base)
    vhost = base / "rabbit@9b77e0" / "msg_stores" / "vhosts" / "A"
    for path in (vhost / "msg_store_persistent", vhost / "queues", next((vhost / "queues").iterdir())):
        with pytest.raises(StoreError, match=f"part of a vhost: give the vhost's directory, {vhost}"):
            find_vhosts(path)
    for path in (node / "quorum", node / "stream"):
        with pytest.raises(StoreError, match="does not read"):
            find_vhosts(path)
    alone = shutil.copytree(node, tmp_path / "alone", ignore=shutil.ignore_patterns("msg_stores"))
    with pytest.raises(StoreError, match=r"no classic queues.* 2 x quorum queue, 1 x stream"):
        find_vhosts(alone)


STRAYS = {
    "notes.txt": "file", "old": "directory", "queues/notes.txt": "file", "queues/{queue}/notes.txt": "file",
    "queues/{queue}/old": "directory", "msg_store_persistent/notes.txt": "file", "msg_store_transient/old": "directory",
}  # fmt: skip


@pytest.mark.parametrize("given", ["vhost", "vhosts", "node"])
def test_strays_inside_a_vhost_are_named(golden_vhost, tmp_path, given):
    vhost = tmp_path / "node" / "msg_stores" / "vhosts" / "V"
    shutil.copytree(golden_vhost("12-clean-msgstore"), vhost)
    path = {"vhost": vhost, "vhosts": vhost.parent, "node": tmp_path / "node"}[given]
    assert unread_parts(path) == []
    queue = min(each.name for each in (vhost / "queues").iterdir())
    strays = {vhost / name.format(queue=queue): kind for name, kind in STRAYS.items()}
    for stray, kind in strays.items():
        (stray / "inside" if kind == "directory" else stray).parent.mkdir(exist_ok=True)
        (stray / "inside" if kind == "directory" else stray).write_bytes(bytes(7))
    (vhost / "queues" / "empty").write_bytes(b"")
    assert {part.path: (part.kind, part.size) for part in unread_parts(path)} == {
        str(stray): (kind, 7) for stray, kind in strays.items()
    }
    for words in (["info"], ["verify"], ["queues"]):
        answer = run(*words, path)
        assert all(f"{stray}: {kind} (7 bytes) is not read" in answer.stderr for stray, kind in strays.items()), words
        assert "nothing is wrong\n" not in answer.output
