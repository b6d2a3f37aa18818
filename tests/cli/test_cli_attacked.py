"""Attacks on the command line: numbers out of range, truncated files, pipes, full disks.

Every test failed once.  What the commands answer in ordinary use is in the other tests of the command line.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import subprocess
import sys
import threading

import golden_rabbitmq
import pyarrow as pa
import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

import rmqstore.offline.importing
from rmqstore import InvalidMessageError, Message, MessageStore, StoreConfig, rabbitmq
from rmqstore.cli import main
from rmqstore.cli.errors import from_here
from rmqstore.texts import parse_time

zstandard = pytest.importorskip("zstandard")

SIZES = options_of(SMALL)
ROWS = b"".join(b'{"topic":"T","keys":["K%d"],"body":"%d"}\n' % (i, i) for i in range(40))


def run(*args, **more):
    return CliRunner().invoke(main, [str(arg) for arg in args], **more)


def program(*args, **more):
    return subprocess.run([sys.executable, "-m", "rmqstore", *map(str, args)], timeout=240, **more)


def golden_vhost(folder):
    return golden_rabbitmq.unpack("11-clean-small", folder)


def bodies(path):
    with MessageStore.open(path, config=StoreConfig(**SMALL), read_only=True) as store:
        return [message.body for message in store.commit_log.entries() if hasattr(message, "body")]


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        opened.put_messages([Message("T", b"x" * 100, tags="a") for _ in range(30)])
    return path


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("number", [2**31, 2**63, 10**22])
def test_tail_of_more_messages_than_there_can_be(store, number):
    done = run("tail", store, "-n", number, *SIZES)
    assert done.exit_code == 2 and "is not in the range" in done.stderr


def test_tail_goes_back_over_many_segments_of_a_store_without_queues(tmp_path):
    # It looked ahead eight times as far for each segment, until the number had more than 64 bits.
    with MessageStore.open(
        tmp_path / "store", config=StoreConfig(**{**SMALL, "mapped_file_size_commit_log": 1024})
    ) as opened:
        opened.put_messages([Message("T", b"x" * 700, tags="a") for _ in range(30)])
    shutil.rmtree(tmp_path / "store/consumequeue")
    done = run("tail", tmp_path / "store", "-n", 100, *SIZES, "-o", "mapped_file_size_commit_log=1024")
    assert done.exit_code == 0 and done.stdout.count("tags=a") == 30


@pytest.mark.parametrize("text", ["1" * 400 + "h ago", "9" * 19 + "w ago"])
def test_a_time_longer_ago_than_numbers_reach(text):
    with pytest.raises(ValueError, match="is not a time: it does not fit"):
        parse_time(text)


@pytest.mark.parametrize(
    "args",
    [
        ("--queue", 2**31, "--queue-offset", 1),
        ("--queue", 2**64, "--latest"),
        ("--queue", 0, "--queue-offset", 2**63),
        ("--group", "", "--latest"),
        ("--group", "\udcff", "--latest"),
        ("--topic", "a@b", "--queue", 0, "--latest"),
    ],
)
def test_progress_that_the_file_cannot_hold_is_wrong_usage(store, args):
    done = run("offsets", "set", store, "--group", "g", "--topic", "T", *args, *SIZES)
    assert done.exit_code == 2 and "Error: " in done.stderr
    assert not os.path.exists(store / "config/consumerOffset.json")


def test_progress_in_a_queue_that_the_store_does_not_have_is_said(store):
    done = run("offsets", "set", store, "--group", "g", "--topic", "Tt", "--queue", 7, "--latest", *SIZES)
    assert done.exit_code == 0
    assert "topic Tt has no queue 7; the store has no topic Tt: did you mean T?" in done.stderr


@pytest.mark.parametrize("queue_id", [2**31, 2**32, 2**63 - 1, -(2**63)])
def test_a_queue_of_more_than_32_bits_in_a_file(tmp_path, queue_id):
    (tmp_path / "rows.jsonl").write_text('{"topic":"T"}\n' + json.dumps({"topic": "T", "queue_id": queue_id}) + "\n")
    done = run("import", tmp_path / "new", tmp_path / "rows.jsonl", *SIZES)
    assert done.exit_code == 3
    assert f"rows.jsonl, line 2: queue_id is {queue_id}; give an int from 0 to 2**31 - 1" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_queue_of_more_than_32_bits_in_a_table(store):
    with MessageStore.open(store, config=StoreConfig(**SMALL)) as opened:
        end = opened.commit_log.max_offset
        with pytest.raises(InvalidMessageError, match="row 1: queue_id is 2147483648"):
            opened.put_table(pa.table({"topic": ["T", "T"], "queue_id": [0, 2**31]}))
        assert opened.commit_log.max_offset == end


# ------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("cut", [10, 150])
def test_a_zstd_file_that_was_cut_is_no_shorter_file(tmp_path, cut):
    packed = zstandard.ZstdCompressor().compress(ROWS)
    assert cut < len(packed)
    (tmp_path / "rows.jsonl.zst").write_bytes(packed[:cut])
    done = run("import", tmp_path / "new", tmp_path / "rows.jsonl.zst", *SIZES)
    assert done.exit_code == 3 and "cannot be unpacked" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_zstd_file_of_several_frames_is_read_to_its_end(tmp_path):
    half = ROWS.index(b"\n", len(ROWS) // 2) + 1
    packed = b"".join(map(zstandard.ZstdCompressor().compress, (ROWS[:half], ROWS[half:], b"")))
    (tmp_path / "rows.jsonl.zst").write_bytes(packed)
    assert run("import", tmp_path / "new", tmp_path / "rows.jsonl.zst", *SIZES).exit_code == 0
    assert bodies(tmp_path / "new") == [b"%d" % i for i in range(40)]


def test_a_pipe_is_read_as_a_file_is(tmp_path):
    # The pipe of a shell's <(command).
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(ROWS,))
    writer.start()
    done = run("import", tmp_path / "new", tmp_path / "pipe", *SIZES)
    writer.join()
    assert done.exit_code == 0, done.stderr
    assert len(bodies(tmp_path / "new")) == 40


def test_standard_input_is_there_once(tmp_path):
    done = run("import", tmp_path / "new", "-", "-", input=ROWS)
    assert done.exit_code == 3 and "standard input is given twice" in done.stderr


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    done = run("import", "", "../rows.jsonl", *SIZES)
    assert done.exit_code == 3 and "the name of the store is empty" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["empty", "rows.jsonl"]
    assert not os.listdir(tmp_path / "empty")


def test_a_flag_that_is_a_number(tmp_path):
    done = run("import", tmp_path / "new", "-", *SIZES, input=b'{"topic":"T","corrupt":0}\n')
    assert done.exit_code == 3 and "line 1: corrupt is 0, not true or false" in done.stderr


@pytest.mark.parametrize("there", [False, True])
def test_the_line_of_a_bad_host_among_others_is_named(tmp_path, store, there):
    rows = [{"topic": "T"}] * 5 + [{"topic": "T", "born_host": "nowhere"}] + [{"topic": "T"}] * 5
    done = run(
        "import",
        store if there else tmp_path / "new",
        "-",
        *SIZES,
        input="".join(json.dumps(row) + "\n" for row in rows),
    )
    assert done.exit_code == 3 and "standard input, line 6: host 'nowhere' is not" in done.stderr
    assert len(bodies(store)) == 30


def test_two_imports_make_one_new_store(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    real = os.rename

    def late(source, target):
        # Somebody else is a moment earlier.
        monkeypatch.setattr(rmqstore.offline.importing.os, "rename", real)
        (tmp_path / "new/commitlog").mkdir(parents=True)
        real(source, target)

    monkeypatch.setattr(rmqstore.offline.importing.os, "rename", late)
    done = run("import", tmp_path / "new", tmp_path / "rows.jsonl", *SIZES)
    assert (
        done.exit_code == 3 and "somebody else has made this while the import ran, and nothing was put" in done.stderr
    )
    assert sorted(os.listdir(tmp_path)) == ["new", "rows.jsonl"]


# ------------------------------------------------------------------------------------------------------------ outputs


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_onto_a_full_disk(args):
    with open("/dev/full", "w") as full:
        done = program(*args, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("Error: No space left on device") and "Traceback" not in done.stderr


def test_a_note_that_nobody_can_be_told_changes_no_exit_code(store, tmp_path):
    # An export that was whole ended with the exit code of one that found nothing.
    with open("/dev/full", "w") as full:
        assert program("export", store, "-O", tmp_path / "out.jsonl", *SIZES, stderr=full).returncode == 0
        assert program("info", tmp_path / "nothing", stderr=full).returncode == 3
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 30


def test_an_odd_file_is_a_finding_whatever_else_is_given(store):
    # An option of something else made it an error with the exit code of a store that cannot be opened.
    segment = sorted((store / "commitlog").iterdir())[0]
    os.truncate(segment, 2048)
    done = run("verify", store, "-o", "message_delay_level=1s")
    assert done.exit_code == 1 and f"{segment}:2048: file: " in done.stdout
    os.truncate(segment, 4096)
    assert run("verify", store, *SIZES, "-o", "mapped_file_size_commit_log=8192").exit_code == 3


@pytest.mark.parametrize("ending", [".csv", ".jsonl.gz"])
def test_a_vhost_is_not_written_into_a_file_that_is_called_otherwise(tmp_path, ending):
    vhost = golden_vhost(tmp_path)
    done = run("rabbitmq", "export", vhost, "-O", tmp_path / f"out{ending}")
    assert done.exit_code == 3 and "says what is not written here" in done.stderr
    assert not (tmp_path / f"out{ending}").exists()
    assert run("rabbitmq", "export", vhost, "-O", tmp_path / f"out{ending}", "--format", "jsonl").exit_code == 0


def test_metrics_as_json(store):
    done = run("metrics", store, "--json", *SIZES)
    values = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(value["type"] == "sample" for value in values)
    found = [value["value"] for value in values if value["name"] == "rocketmq_producer_offset"]
    assert found == [30]
    lines = [line for line in run("metrics", store, *SIZES).stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == len(values) > 20


def test_metrics_reach_no_terminal_raw(store):
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(
            sys.executable,
            [sys.executable, "-m", "rmqstore", "metrics", str(store), "--cluster", "\x1b[31m\u202e", *SIZES],
        )
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
    except OSError:
        pass  # The error of a closed terminal on Linux.
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    assert b'cluster="\\x1b[31m\\u202e"' in shown and b"\x1b" not in shown


# ------------------------------------------------------------------------------------------------------- what is given


def test_a_directory_of_the_name_of_the_working_one_stays_in_a_path(monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: "/data")
    for path, shown in (("/mnt/data/store/x", "/mnt/data/store/x"), ("/data/store/x", "store/x"), ("/database", "/database")):
        assert from_here(path) == shown


@pytest.mark.parametrize(
    "line, said",
    [
        ("mappedFileSizeCommitLog=4k", "line 2: option mappedFileSizeCommitLog is '4k': write a whole number"),
        ("flushDiskType=SOMETIMES", "line 2: option flushDiskType"),
        ("brokerName=\\u12", "line 2: \\u needs four hex digits"),
    ],
)
@pytest.mark.parametrize("command", ["info", "verify", "metrics", "export"])
def test_a_broker_conf_that_no_broker_would_take(store, tmp_path, command, line, said):
    conf = tmp_path / "broker.conf"
    conf.write_text(f"brokerClusterName=c\n{line}\n")
    done = run(command, store, "--config", conf)
    assert done.exit_code == 2 and f"{conf}, {said}" in done.stderr, (done.exception, done.stderr)


def test_a_broker_conf_from_a_pipe_counts(store, tmp_path):
    # The pipe of a shell's <(command), which can be read once.
    os.mkfifo(tmp_path / "pipe")
    text = b"messageDelayLevel=7s\nbrokerClusterName=red\n"
    for command in (["info", "--json"], ["metrics"]):
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,))
        writer.start()
        done = run(command[0], store, *command[1:], "--config", tmp_path / "pipe")
        writer.join()
        assert done.exit_code == 0, done.stderr
        if command[0] == "info":
            assert json.loads(done.stdout)["config"]["message_delay_level"] == "7s"
        else:
            assert 'cluster="red"' in done.stdout


def test_a_key_that_is_no_text_keeps_none_of_the_others(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        opened.put_messages([Message("T", b"1", keys=["K1"]), Message("T", b"2", keys=["K2"])])
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfK1\r\nK\xe9\nK2\n")
    done = run("query", path, "T", "--keys-from", tmp_path / "keys", "--format", "%s")
    assert (done.exit_code, done.stdout) == (1, "1\n2\n"), done.stderr
    assert f"{tmp_path / 'keys'}, line 2: not UTF-8 text" in done.stderr


# ------------------------------------------------------------------------------------------------ what may not be seen


@pytest.fixture
def forbid(monkeypatch):
    """What lies in a directory is nobody's to see, as for a user who may not search it; tests may run as root."""
    stat, lstat = os.stat, os.lstat

    def of(folder):
        def refusing(function):
            def look(path, *args, **more):
                if isinstance(path, str) and path.startswith(f"{folder}{os.sep}"):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                return function(path, *args, **more)

            return look

        monkeypatch.setattr(os, "stat", refusing(stat))
        monkeypatch.setattr(os, "lstat", refusing(lstat))

    return of


@pytest.mark.parametrize(
    "command",
    [
        ["info"], ["verify"], ["query", "--phy-offset", "0"], ["recover"], ["serve", "--port", "0"], ["metrics"],
        ["settings"], ["rabbitmq", "info"], ["rabbitmq", "verify"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("inside", [True, False])
def test_where_nobody_may_look_nothing_is_said_to_be_missing(tmp_path, forbid, command, inside):
    path = tmp_path / "owner" / "store"
    path.mkdir(parents=True)
    forbid(path if inside else path.parent)
    words, options = (command[:2], command[2:]) if command[0] == "rabbitmq" else (command[:1], command[1:])
    done = run(*words, path, *options)
    assert done.exit_code == 3, (done.exception, done.output)
    assert done.stderr.startswith(f"Error: Permission denied [{path}]\nRun the command as a user with access")


def test_a_store_that_may_not_be_seen_is_an_error_of_the_library_too(tmp_path, forbid):
    (tmp_path / "owner" / "store").mkdir(parents=True)
    forbid(tmp_path / "owner")
    with pytest.raises(PermissionError):
        MessageStore.open(tmp_path / "owner" / "store", read_only=True)
    with pytest.raises(PermissionError):
        rabbitmq.find_vhosts(tmp_path / "owner" / "store")


def test_a_path_that_cannot_be_listed_is_no_wrong_usage(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    # What a command asks the system before it looks.
    monkeypatch.setattr(os, "access", lambda *args, **more: False)
    for command in (["info"], ["rabbitmq", "info"], ["metrics"], ["serve", "--port", "0"]):
        words, options = (command[:2], []) if command[0] == "rabbitmq" else (command[:1], command[1:])
        assert run(*words, tmp_path / "store", *options).exit_code == 3


def test_a_link_that_leads_nowhere_keeps_nobody_from_the_rest(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        opened.put_messages([Message("T", b"x" * 100, keys=[f"K{i}"]) for i in range(60)])
    second = sorted((path / "commitlog").iterdir())[1]
    second.unlink()
    second.symlink_to("/no/such/disk")
    done = run("query", path, "T", "K0", "--body", "none", *SIZES)
    assert done.exit_code == 1 and "keys=K0" in done.stdout and "may contain more" in done.stderr
    done = run("verify", path)
    assert done.exit_code == 1 and "a broken symlink" in done.stdout and "missing_segment" in done.stdout
    done = run("recover", path)
    assert done.exit_code == 3 and "a broken symlink" in done.stderr
    (tmp_path / "link").symlink_to("nowhere")
    assert "broken symlink" in run("info", tmp_path / "link").stderr


def test_a_link_in_a_circle_hides_no_vhost(tmp_path):
    vhost = golden_vhost(tmp_path / "unpacked")
    folder = tmp_path / "node" / "msg_stores" / "vhosts"
    folder.mkdir(parents=True)
    shutil.copytree(vhost, folder / "AB")
    (folder / "circle").symlink_to("circle")
    assert rabbitmq.find_vhosts(tmp_path / "node") == [str(folder / "AB")]


def test_a_config_folder_that_may_not_be_seen_hides_nothing_else(store, monkeypatch, caplog):
    (store / "config").mkdir(exist_ok=True)
    scandir, opened = os.scandir, builtins.open

    def refuse(function):
        def call(path=".", *args, **more):
            if isinstance(path, str) and path.startswith(str(store / "config")):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return function(path, *args, **more)

        return call

    monkeypatch.setattr(os, "scandir", refuse(scandir))
    monkeypatch.setattr(os, "open", refuse(os.open))
    monkeypatch.setattr(builtins, "open", refuse(opened))
    done = run("info", store)
    assert done.exit_code == 0 and "phy offsets" in done.stdout, (done.exception, done.stderr)
    progress = store / "config" / "consumerOffset.json"
    assert f"the progress of consumer groups is not known: Permission denied [{progress}]" in caplog.text
