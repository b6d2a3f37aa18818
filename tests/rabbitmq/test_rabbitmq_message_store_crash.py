"""A message store whose process dies, or gets an error, at any system call that changes a file.

Owns: a real process under tests/faults is killed before or after each of its changing calls (writes, rolls, deletions, every
step of a merge, both kinds of close, recovery), gets an error there, or writes only half.  What holds then: every message that
was acknowledged and not removed is read by the next opening, by a read-only one that changes nothing, and by the rules of a
real node up to 3.12 in plain Python; nothing torn is left; and a clean state says exactly what is there.
"""

from __future__ import annotations

import collections
import errno
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile

import classic_queue_oracle as oracle
import faults
import message_store_life as life
import pytest
from scratch import SCRATCH

from rmqstore.rabbitmq.message_store import MessageStore

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """A function that lets a child live and die: (status, what it said, how many calls)."""
    library = faults.build_library(str(tmp_path_factory.mktemp("faults")))
    scratch = tempfile.mkdtemp(prefix="rmqstore-rabbitmq-", dir=SCRATCH)
    said, errors = os.path.join(scratch, "said"), os.path.join(scratch, "errors")
    root = os.path.join(scratch, "store")
    paths = [HERE, os.path.dirname(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, os.path.join(HERE, "message_store_life.py"), library],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(filter(None, (os.environ.get("LD_PRELOAD"), library))),
            "PYTHONPATH": os.pathsep.join(paths),
        },
    )

    def run(
        action: str = "nothing", number: int = 0, *, error: int = 0, lasts: bool = False, files=None, there=(), steps=()
    ):
        shutil.rmtree(root, ignore_errors=True)
        if files:
            os.mkdir(root)
        for name, data in (files or {}).items():
            with open(os.path.join(root, name), "wb") as file:
                file.write(data)
        for path in (said, errors):
            if os.path.exists(path):
                os.unlink(path)
        request = {
            "root": root, "said": said, "errors": errors, "number": number, "action": faults.ACTIONS[action],
            "error": error, "lasts": int(lasts), "there": list(there), "steps": list(steps),
            "patient": action in ("fail", "short write"),
            "names": sum(1 << faults.NAMES.index(name) for name in faults.CHANGING),
        }  # fmt: skip
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 120)[0], "the server of the children does not answer"
        status = json.loads(process.stdout.readline())["status"]
        with open(errors, encoding="utf-8") as file:
            text = file.read()
        lines = []
        if os.path.exists(said):
            with open(said, "rb") as file:
                lines = [json.loads(line) for line in file]
        return root, status, lines, text

    yield run
    process.stdin.close()
    process.wait(240)
    process.stdout.close()
    shutil.rmtree(scratch, ignore_errors=True)


def models(lines: list[dict]) -> tuple[collections.Counter, collections.Counter, bool]:
    """Reference counts before and after the deed that was under way, and whether the last close was a clean one."""
    before: collections.Counter[int] = collections.Counter()
    script = life.script()
    clean = False
    for line in lines:
        if "done" in line:
            what, numbers = script[line["done"]]
            life.apply(before, what, numbers)
            clean = what == "close clean"
    after = before.copy()
    if lines and "done" not in lines[-1] and "end" not in lines[-1]:
        life.apply(after, *script[lines[-1].get("begin", lines[-1].get("failed"))])
    return before, after, clean


def nodes_answer(root: str, wanted: set[bytes]) -> set[bytes]:
    """Which of `wanted` a node up to 3.12 finds: an .rdt is appended to its file, then from record to record (§8.4, §8.5)."""
    found = set()
    for name in os.listdir(root):
        if name.endswith(".rdq"):
            with open(os.path.join(root, name), "rb") as file:
                data = file.read()
            if os.path.exists(os.path.join(root, name[:-1] + "t")):
                with open(os.path.join(root, name[:-1] + "t"), "rb") as file:
                    data += file.read()
            found |= {record.msg_id for record in oracle.parse_rdq(data).records if record.whole}
    assert all(
        os.path.exists(os.path.join(root, name[:-1] + "q")) for name in os.listdir(root) if name.endswith(".rdt")
    )
    return found & wanted


def tree(root: str) -> dict[str, bytes]:
    found = {}
    for name in sorted(os.listdir(root)):
        with open(os.path.join(root, name), "rb") as file:
            found[name] = file.read()
    return found


def check_left(root: str, lines: list[dict]) -> None:
    """Everything that holds of what a dead process left."""
    before, after, _ = models(lines)
    # The messages that are referred to whichever part of the last action was done.
    sure = {number for number in before | after if before[number] > 0 and after[number] > 0}
    if not os.path.isdir(root):
        assert not sure
        return
    left = tree(root)
    wanted = {life.message_id(number) for number in sure}
    assert nodes_answer(root, wanted) == wanted
    terms = {life.message_id(number): life.term_of(number) for number in range(100)}
    references = {life.message_id(number): before[number] for number in sure}
    with MessageStore.open(root, read_only=True, references=references) as store:
        assert {msg_id: store.read_term(msg_id) for msg_id in wanted} == {msg_id: terms[msg_id] for msg_id in wanted}
        if store.clean:
            counts = {msg_id: store.refcount(msg_id) for msg_id in store}
            assert counts in [
                {life.message_id(number): count for number, count in model.items() if count > 0}
                for model in (before, after)
            ]
        else:
            assert not len(store.missing)
    assert tree(root) == left
    with MessageStore.open(root, references=references, file_size_limit=life.LIMIT) as store:
        assert {store.read_term(msg_id) for msg_id in wanted} == {terms[msg_id] for msg_id in wanted}
        store.write(life.message_id(99), life.term_of(99))
        store.merge()
        assert {msg_id: store.read_term(msg_id) for msg_id in store} == {msg_id: terms[msg_id] for msg_id in store}
        assert all(summary.valid_size for number, summary in store.files.items() if number != max(store.files))
    recovered = tree(root)
    for name, data in recovered.items():
        assert name.endswith(".rdq"), f"{name} was left behind"
        assert oracle.parse_rdq(data).why == "end"
    with MessageStore.open(root, read_only=True, references={**references, life.message_id(99): 1}) as store:
        assert set(store) == wanted | {life.message_id(99)}


def test_the_life_without_a_fault(child):
    root, status, lines, errors = child()
    assert status == 0, errors
    before, after, clean = models(lines)
    assert before == after and clean and lines[-1]["end"] > 100
    with MessageStore.open(root, read_only=True) as store:
        assert store.clean
        assert {store.refcount(msg_id) for msg_id in store} == {count for count in before.values() if count}
        assert len(store) == sum(count > 0 for count in before.values())
    kinds = {name.rpartition(".")[2] for name in os.listdir(root)}
    assert kinds == {"rdq", "ets", "dot"}
    check_left(root, lines)


@pytest.mark.parametrize("action", ["kill before", "kill after"])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step(child, action, step):
    _, _, lines, _ = child()
    met = 0
    for number in range(1, lines[-1]["end"] + 1, step):
        root, status, lines, errors = child(action, number)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, (number, errors)
        check_left(root, lines)
        met += 1
    assert met


@pytest.mark.parametrize(
    ("action", "error", "lasts"),
    [("fail", errno.ENOSPC, False), ("fail", errno.EIO, True), ("short write", 0, False), ("short write", 0, True)],
)
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_errors_at_every_step(child, action, error, lasts, step):
    _, _, lines, _ = child()
    failed = 0
    for number in range(1, lines[-1]["end"] + 1, step):
        root, status, lines, errors = child(action, number, error=error, lasts=lasts)
        assert status == 0, (number, errors)
        failed += any("failed" in line for line in lines)
        if "end" in lines[-1]:
            lines.pop()
        check_left(root, lines)
    assert failed or action == "short write"


@pytest.mark.parametrize("action", ["kill before", "kill after", "fail", "short write"])
def test_recovery_dies_at_every_step(child, action):
    # A node died in a merge, after cutting its file to the prefix and before copying back (§8.4 c); then so does the recovery.
    records = {n: oracle.rdq_record(life.message_id(n), life.term_of(n)) for n in range(8)}
    there = [0, 2, 3, 4, 6]
    files = {
        "0.rdq": records[0] + bytes(len(records[2]) + len(records[3])),
        "0.rdt": records[2],
        "1.rdq": records[5] + records[3],
        "3.rdq": records[7],
        "4.rdq": records[4] + records[6] + records[1],
        "clean.dot": b"old",
    }
    steps = [("write", [70]), ("close clean", [])]
    run = {"files": files, "there": there, "steps": steps}
    _, status, lines, errors = child(**run)
    assert status == 0, errors
    for number in range(1, lines[-1]["end"] + 1):
        root, status, lines, errors = child(action, number, error=errno.EIO, **run)
        assert os.WIFSIGNALED(status) or (action in ("fail", "short write") and status == 0), (number, errors)
        references = {life.message_id(n): 1 for n in there}
        for read_only in (True, False):
            with MessageStore.open(root, read_only=read_only, references=references) as store:
                if store.clean:
                    references[life.message_id(70)] = 1
                found = {msg_id: store.read_term(msg_id) for msg_id in store}
            assert found == {
                life.message_id(n): life.term_of(n) for n in [*there, 70] if life.message_id(n) in references
            }
        assert nodes_answer(root, set(references)) == set(references)
