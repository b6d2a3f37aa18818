"""The command line of RabbitMQ's queues on what it was not made for: wrong arguments, hostile names, odd files, full disks.

Owns that every such call ends with the exit code that is promised and a sentence, never a traceback, and leaves nothing behind.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from click.testing import CliRunner

import rmqstore
from rmqstore import cli
from rmqstore.cli import group
from rmqstore.rabbitmq import Vhost, dets, layout
from rmqstore.rabbitmq.term import Atom

OK, FOUND, USAGE, CANNOT_OPEN = 0, 1, 2, 3
LOOKS = ("info", "queues", "dump", "verify")


def run(*arguments, given: bytes | None = None):
    answer = CliRunner().invoke(cli.main, ["rabbitmq", *map(str, arguments)], input=given)
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer


def look(path: Path, tmp_path: Path, among: tuple[int, ...] = (OK, FOUND)) -> dict[str, str]:
    """Every command that only reads, and a repair that is verified; what they print, by name."""
    outputs = {}
    before = golden.tree(path)
    for name in LOOKS:
        for more in ((), ("--json",)):
            answer = run(name, path, *more)
            assert answer.exit_code in among, (name, answer.output)
            outputs[name + "".join(more)] = answer.output
            assert not set(answer.output) & set("\x1b\x07\u202e\r"), (name, answer.output)
            if more:
                for line in answer.stdout.splitlines():
                    json.loads(line)
    for kind in ("jsonl", "arrow", "parquet"):
        assert run("export", path, "-O", tmp_path / f"all.{kind}", "--force").exit_code in among
    shutil.rmtree(tmp_path / "repaired", ignore_errors=True)
    assert run("repair", path, tmp_path / "repaired").exit_code == OK
    assert run("verify", tmp_path / "repaired").exit_code == OK
    assert golden.tree(path) == before
    return outputs


def queue_directory(path: Path) -> Path:
    return next(each for each in sorted((path / "queues").iterdir()) if each.is_dir())


# ------------------------------------------------------------------------------------------------------------ arguments


def test_wrong_arguments(tmp_path, golden_vhost):
    path = golden_vhost("11-clean-small")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for arguments, code in (
        ((), USAGE),
        (("nope",), USAGE),
        (("info",), USAGE),
        (("info", path, "--segment-entry-count", "0"), USAGE),
        (("info", path, "--segment-entry-count", "x"), USAGE),
        (("dump", path, "--max-num", "0"), USAGE),
        (("export", path, "-O", tmp_path / "x", "--format", "csv"), USAGE),
        (("import", path, "q", tmp_path / "nope"), USAGE),
        (("import", path, "q", tmp_path / "file", "--level", "256"), USAGE),
        (("info", tmp_path / "nope"), CANNOT_OPEN),
        (("info", tmp_path / "file"), CANNOT_OPEN),
        (("info", tmp_path / "empty"), CANNOT_OPEN),
        (("dump", path, "--queue", "nope\x1b[31m"), CANNOT_OPEN),
        (("dump", path, "--vhost", "nope\x1b[31m"), CANNOT_OPEN),
        (("export", path, "-O", tmp_path / "x", "--queue", "nope"), CANNOT_OPEN),
        (("export", path, "-O", tmp_path), CANNOT_OPEN),
        (("export", path, "-O", tmp_path / "file" / "x"), CANNOT_OPEN),
        (("export", path, "-O", tmp_path / "no" / "x"), CANNOT_OPEN),
        (("export", path, "-O", tmp_path / "file"), CANNOT_OPEN),
        (("export", path, "-O", path / "inside"), CANNOT_OPEN),
        (("repair", path, tmp_path), CANNOT_OPEN),
        (("repair", path, tmp_path / "file" / "x"), CANNOT_OPEN),
        (("repair", path, path / "inside"), CANNOT_OPEN),
        (("import", path, "nope", tmp_path / "file"), CANNOT_OPEN),
    ):
        answer = run(*arguments)
        assert answer.exit_code == code, (arguments, answer.output)
        assert "\x1b" not in answer.output and answer.output
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]


def test_an_output_in_the_source_by_a_link(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("11-clean-small")
    before = golden.tree(path)
    os.symlink(path / "queues", tmp_path / "link")
    assert run("repair", path, tmp_path / "link" / "new").exit_code == CANNOT_OPEN
    assert golden.tree(path) == before
    # Nothing that exists is taken for what an earlier repair left.
    (tmp_path / "new.rmqstore-unfinished").mkdir()
    (tmp_path / "new.rmqstore-unfinished" / "mine").write_bytes(b"mine")
    assert run("repair", path, tmp_path / "new").exit_code == 0
    assert (tmp_path / "new.rmqstore-unfinished" / "mine").read_bytes() == b"mine"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


# ------------------------------------------------------------------------------------------------------- odd directories


@pytest.mark.parametrize("parts", [[".vhost"], ["queues/"], ["msg_store_persistent/"], [".vhost", "queues/"]], ids=str)
def test_empty_vhosts(parts, tmp_path):
    path = tmp_path / "vhost"
    path.mkdir()
    for part in parts:
        if part.endswith("/"):
            (path / part).mkdir()
        else:
            (path / part).write_bytes(b"/")
    assert "nothing is wrong" in look(path, tmp_path)["verify"]


@pytest.mark.parametrize(
    "name",
    [
        b"line\nbreak",
        b"\xff\xfe",
        b"\x1b[31mred\x07",
        b"",
        b"[bold]x[/bold]",
        b"x" * 255,
        b"a\0b",
        "\u202e\U0001f600".encode(),
    ],
    ids=repr,
)
def test_hostile_queue_names(name, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("11-clean-small")
    with Vhost.open(path) as vhost:
        depth, of = vhost.queues()[0].depth, vhost.name
    directory = queue_directory(path)
    (directory / ".queue_name").write_bytes(b"VHOST: " + of.encode() + b"\nQUEUE: " + name + b"\n")
    directory.rename(directory.with_name(layout.queue_directory(of, name)))
    (path / "recovery.dets").unlink()
    look(path, tmp_path)
    with Vhost.open(tmp_path / "repaired") as vhost:
        assert [queue.depth for queue in vhost.queues()] == [depth]
    text = name.decode("utf-8", "surrogateescape")
    if b"\0" not in name:
        given = b'{"body": "x"}\n'
        answer = run("import", path, text, "-", "--declared", given=given)
        assert answer.exit_code == OK and "\x1b" not in answer.output, answer.output
        lines = run("export", path, "--queue", text).stdout_bytes.splitlines()
        assert len(lines) == depth + 1 and json.loads(lines[-1])["queue"] == text


def test_queues_of_several_names_are_printed(golden_vhost):
    path = golden_vhost("13-clean-fanout-refcount")
    for command in ("dump", "export"):
        both = run(command, path, "--queue", "b", "--queue", "c", "--json")
        assert both.exit_code == OK and {json.loads(line)["queue"] for line in both.stdout.splitlines()} == {"b", "c"}


def test_strange_things_in_a_vhost(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("11-clean-small")
    queues = path / "queues"
    (queues / "file").write_bytes(b"x")
    (queues / "\x1b[31mdir\n").mkdir()
    os.mkdir(os.fsencode(queues) + b"/\xff\xfe")
    (queues / "0.idx").mkdir()
    os.symlink("file", queues / "link")
    (queue_directory(path) / "journal.jif.bak").write_bytes(b"x")
    look(path, tmp_path)
    for name in (".vhost", ".config", "recovery.dets"):
        (path / name).unlink(missing_ok=True)
        (path / name).mkdir()
    for directory in queues.iterdir():
        if directory.is_dir():
            for name in (".queue_name", "journal.jif", "0.idx"):
                (directory / name).unlink(missing_ok=True)
                (directory / name).mkdir()
    look(path, tmp_path)


def test_large_small_files(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("11-clean-small")
    (queue_directory(path) / ".queue_name").write_bytes(b"VHOST: /\nQUEUE: " + b"x" * 10_000_000 + b"\n")
    (path / ".vhost").write_bytes(b"y" * 10_000_000)
    look(path, tmp_path)


@pytest.mark.parametrize(
    "text", [b"9" * 60_000, b"-" + b"9" * 6000, b"0", b"1e400", b"16#800", b"}.\xff" * 1000, b"{" * 60_000], ids=len
)
def test_hostile_config(text, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("11-clean-small")
    (path / ".config").write_bytes(b"{segment_entry_count, " + text + b"}.")
    assert ".config" in look(path, tmp_path)["verify"]


def test_hostile_recovery_terms(golden_vhost_copy, tmp_path):
    alien = [
        (b"x",),
        (list(b"C"), 6),
        (b"A", [1, 2]),
        (b"\xff", [(Atom("persistent_ref"), b"x")]),
        (b"B", [(Atom("segments"), 5)]),
    ]
    keys = [
        Atom(name) for name in ("segments", "next_seq_id", "next_deliver_seq_id", "persistent_ref", "persistent_count")
    ]
    for values in (
        [[(1, 2, 3)]],
        [[], 1 << 80, 5, b""],
        [Atom("x")],
        [[], 5.5, b"5", b"x" * 16],
        [[(-5, 3), (1 << 90, 1)], 1000, 2000, Atom("undefined"), []],
    ):
        path = golden_vhost_copy("11-clean-small")
        name = queue_directory(path).name.encode()
        data = dets.encode([*alien, (name, list(zip(keys, values)))])
        (path / "recovery.dets").write_bytes(data)
        assert run("verify", path).exit_code == FOUND
        assert run("repair", path, path.with_name("repaired")).exit_code == OK
        with Vhost.open(path) as vhost:
            clean, queue = vhost.directories[0].clean, vhost.queues()[0].name
        answer = run("import", path, queue, "-", "--declared", "--json", given=b'{"body": "x"}')
        assert json.loads(answer.stdout)["state"] == ("exact" if clean else "dirty")
        assert run("verify", path).exit_code == OK or clean


@pytest.mark.parametrize("name", ["queues", "msg_store_persistent"])
def test_no_directory_where_one_should_be(name, golden_vhost_copy):
    path = golden_vhost_copy("11-clean-small")
    shutil.rmtree(path / name)
    (path / name).write_bytes(b"x")
    answer = run("verify", path)
    assert answer.exit_code == FOUND and "no_directory" in answer.output and "hangs" in answer.output


@pytest.mark.parametrize("name", ["clean.dot", "file_summary.ets", "0.rdq"])
def test_a_store_that_cannot_be_read(name, golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("12-clean-msgstore")
    (path / "msg_store_persistent" / name).unlink()
    (path / "msg_store_persistent" / name).mkdir()
    answer = run("verify", path)
    assert answer.exit_code == FOUND and name in answer.output
    assert "unreadable_store" not in answer.output and "lost_message" not in answer.output
    lacks = name == "0.rdq"
    # Nobody is to take what is left for all that there is.
    answer = run("export", path, "-O", tmp_path / "out.jsonl")
    assert answer.exit_code == (FOUND if lacks else OK)
    assert ("10 messages are live in the index, and may be whole" in answer.stderr) == lacks
    answer = run("repair", path, tmp_path / "out")
    assert answer.exit_code == OK and ("make it readable and repair again" in answer.stderr) == lacks
    assert ("10 messages will be delivered, 0 are lost, 10 could not be read" in answer.stdout) == lacks


def test_a_store_whose_directory_cannot_be_read(golden_vhost_copy, tmp_path, monkeypatch):
    path = golden_vhost_copy("12-clean-msgstore")
    store, scandir = os.fspath(path / "msg_store_persistent"), os.scandir

    def refused(place="."):
        if place == store:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), store)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)
    answer = run("verify", path)
    assert answer.exit_code == FOUND and "unreadable_store" in answer.output and "lost_message" not in answer.output
    # Nobody is to take what is left for all that there is.
    answer = run("repair", path, tmp_path / "out")
    assert answer.exit_code == CANNOT_OPEN and not [each for each in os.listdir(tmp_path) if each.startswith("out")]
    for command in ("info", "dump", "export"):
        answer = run(command, path)
        assert answer.exit_code == FOUND and store in answer.output
    with Vhost.open(path) as vhost:
        for _ in range(2):
            with pytest.raises(PermissionError, match="msg_store_persistent"):
                vhost.store()
        assert not vhost.clean and len(list(vhost.queues()[0].messages())) == 10


# ---------------------------------------------------------------------------------------------------- import and export


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"5", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"body": ' + b"9" * 10_000 + b"}", b"\xff", b"{}", b'{"body": 5}',
        b'{"body": "x", "properties": {"headers": ' + b'{"a":' * 500 + b"1" + b"}" * 502, b'{"body": "x", "routing_keys": "k"}',
        b'{"body": "x", "properties": {"headers": {"a": {"$decimal": "x"}}}}', b'{"body": "x", "expiry": 1e999}',
    ],
    ids=lambda line: line[:30],
)  # fmt: skip
def test_lines_that_are_no_messages(line, golden_vhost_copy):
    path = golden_vhost_copy("11-clean-small")
    before = golden.tree(path)
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0].name
    answer = run("import", path, queue, "-", "--declared", given=b'{"body": "first"}\n\n' + line + b"\n")
    assert answer.exit_code == CANNOT_OPEN and "line 3" in answer.output, answer.output
    assert golden.tree(path) == before


def test_an_import_of_nothing(golden_vhost_copy):
    path = golden_vhost_copy("11-clean-small")
    before = golden.tree(path)
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0].name
    assert run("import", path, queue, "-", "--declared", given=b"\n").exit_code == FOUND
    assert run("import", path, "never declared", "-", "--declared", given=b"").exit_code == FOUND
    assert golden.tree(path) == before


def test_an_import_into_a_vhost_of_another_name(golden_vhost_copy):
    path = golden_vhost_copy("11-clean-small")
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0].name
    (path / ".vhost").write_bytes(b"another")
    before = golden.tree(path)
    answer = run("import", path, queue, "-", "--declared", given=b'{"body": "x"}')
    assert answer.exit_code == CANNOT_OPEN and ".vhost" in answer.output
    (path / ".vhost").unlink()
    (queue_directory(path) / ".queue_name").unlink()
    before = golden.tree(path)
    answer = run("import", path, queue, "-", "--declared", given=b'{"body": "x"}')
    assert answer.exit_code == CANNOT_OPEN, answer.output
    assert golden.tree(path) == before


def start(*arguments, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(rmqstore.__file__).parent.parent)}
    command = [sys.executable, "-m", "rmqstore", "rabbitmq", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)


def test_a_reader_that_goes_and_a_disk_that_is_full(golden_vhost, tmp_path):
    path = golden_vhost("20-clean-rdq-roll-16MiB")
    with start("export", path, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == group.READER_GONE
    if os.path.exists("/dev/full"):
        for output, kind in (("/dev/full", "jsonl"), ("/dev/full", "parquet"), ("-", "jsonl")):
            with (
                open("/dev/full", "wb") as full,
                start("export", path, "-O", output, "--format", kind, stdout=full) as process,
            ):
                assert b"No space" in process.stderr.read()
            assert process.returncode == CANNOT_OPEN
        assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_ctrl_c_while_an_import_reads(golden_vhost_copy):
    path = golden_vhost_copy("11-clean-small")
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0].name
    before = golden.tree(path)
    # A process that a shell starts in the background ignores SIGINT, and so would this one's children.
    with start(
        *("import", path, queue, "-", "--declared"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        for _ in range(20_000):
            # More than a pipe takes: when this is written, the import reads.
            process.stdin.write(b'{"body": "xxxxxxxxxx"}\n')
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.stderr.read()
        process.stdin.close()
    assert process.returncode == group.INTERRUPTED
    assert golden.tree(path) == before


def test_a_directory_in_use(golden_vhost_copy, tmp_path):
    path = golden_vhost_copy("11-clean-small")
    with Vhost.open(path) as vhost:
        queue = vhost.queues()[0].name
    before = golden.tree(path)
    program = "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(queue_directory(path) / "journal.jif")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        for arguments, code in (
            (("verify", path), OK),
            (("repair", path, tmp_path / "new"), CANNOT_OPEN),
            (("import", path, queue, "-", "--declared"), CANNOT_OPEN),
        ):
            answer = run(*arguments, given=b'{"body": "x"}')
            assert answer.exit_code == code and f"process {process.pid}" in answer.output
        process.stdin.close()
    assert golden.tree(path) == before and not (tmp_path / "new").exists()
