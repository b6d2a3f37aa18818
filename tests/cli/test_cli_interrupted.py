"""Commands that a signal ends, at a moment that the test chooses: nothing half made is left, and no traceback is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig

pytest.importorskip("polars")

SIZES = options_of(SMALL)
SIGNALS = [signal.SIGINT, signal.SIGTERM]

# The signal comes where `place` is called; `blocked` is a call of C that no handler interrupts.
AT_A_CALL = """
import importlib, signal, sys
module, _, place = {place!r}.partition(":")
owner = importlib.import_module(module)
*path, name = place.split(".")
for each in path:
    owner = getattr(owner, each)
real = getattr(owner, name)
def interrupted(*args, **more):
    setattr(owner, name, real)
    {come}
    return real(*args, **more)
setattr(owner, name, interrupted)
"""
ONCE = "signal.raise_signal({number})"
BLOCKED = """
    import ctypes, os, threading
    threading.Timer(0.3, os.kill, (os.getpid(), {number})).start()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
AT_AN_IMPORT = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {place!r}:
            sys.meta_path.remove(self)
            signal.raise_signal({number})
sys.meta_path.insert(0, Finder())
"""
RUN = """
from rmqstore.__main__ import main
sys.argv[1:] = {args!r}
main("rmqstore")
"""


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        opened.put_messages(
            [Message("T", b"%d" % number, keys=[f"K{number}"], properties={"DELAY": "18"}) for number in range(30)]
        )
    (tmp_path / "rows.jsonl").write_text('{"topic":"T"}\n' * 3)
    (tmp_path / "out").mkdir()
    return path


def ended(code, *args, **values):
    done = subprocess.run(
        [sys.executable, "-c", (code + RUN).format(args=[str(each) for each in args], **values)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("command", "output", "place"),
    [
        (["sql", "{store}", "select * from messages", "-O", "{out}/a.parquet"], "", "polars:LazyFrame.sink_parquet"),
        (["sql", "{store}", "select * from messages", "-O", "{out}/a.csv"], "", "polars:LazyFrame.collect"),
        (["export", "{store}", "-O", "{out}/a.jsonl"], "", "rmqstore.offline.export_files:JsonLines.message"),
        (["export", "{store}", "-O", "{out}/a", "--format", "files"], "", "os:rename"),
        (["rebuild", "{store}", "--output", "{out}/new"], "nothing was built", "rmqstore.offline.rebuild:verify_parts"),
        (["rebuild", "{store}", "--yes"], "The store was not changed", "rmqstore.offline.rebuild:verify_parts"),
        (["import", "{out}/new", "{out}/../rows.jsonl"], "", "rmqstore:MessageStore.put_table"),
        (["metrics", "{store}", "-O", "{out}/a.prom"], "", "os:fchmod"),
        (["pending", "{store}", "-O", "{out}/a.csv"], "", "rmqstore.cli.options:TableFile.write_rows"),
    ],
    ids=lambda value: value[0] + value[-1][-5:] if isinstance(value, list) else "",
)
def test_nothing_half_made_is_left(store, tmp_path, command, output, place, number):
    out = tmp_path / "out"
    before = sorted(os.listdir(store))
    args = [each.format(store=store, out=out) for each in command]
    come = ONCE.format(number=int(number))
    done = ended(AT_A_CALL.replace("{come}", come), *args, *SIZES, place=place)
    assert done.returncode == 128 + number, done.stderr
    assert output in done.stderr and ("interrupted" in done.stderr) == (number == signal.SIGINT)
    assert os.listdir(out) == [] and sorted(os.listdir(store)) == before


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGHUP], ids=lambda number: number.name)
def test_a_library_that_lets_no_handler_run_is_not_waited_for(store, tmp_path, number):
    come = BLOCKED.format(number=int(number))
    done = ended(
        AT_A_CALL.replace("    {come}\n", come),
        *("sql", store, "select * from messages", "-O", tmp_path / "out" / "a.parquet", *SIZES),
        place="polars:LazyFrame.sink_parquet",
    )
    assert done.returncode == 128 + number and os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    "module", ["rmqstore.cli", "rmqstore.cli.pending", "rmqstore.offline.pending", "pyarrow", "pyarrow.lib", "numpy"]
)
def test_an_interrupt_while_modules_are_loaded(store, module):
    done = ended("import sys\n" + AT_AN_IMPORT, "pending", store, *SIZES, place=module, number=int(signal.SIGINT))
    assert done.returncode == 130 and done.stderr == "interrupted\n"


def test_an_interrupt_where_an_object_is_cleared_away_is_not_lost(store):
    # Python only prints what is raised there, and goes on.
    code = AT_A_CALL.replace(
        "{come}",
        "type('Dying', (), {{'__del__': lambda self: signal.raise_signal(signal.SIGINT)}})()\n"
        "    import threading; threading.Event().wait(240)",
    )
    done = ended(code, "info", store, *SIZES, place="rmqstore.cli.info:_print_info")
    assert done.returncode == 130 and done.stderr == "interrupted\n"
