"""The process that the crash tests of the message store run their children from: forks one a case, under tests/faults.

Runs under faults.c (LD_PRELOAD).  A request is a line of JSON on the standard input, the answer one on the output, given when
the child is dead.  The child arms the layer, lives the life of a store and writes a line before and after every deed; whoever
asked holds it against what is on disk.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import json
import os
import signal
import sys
import traceback

import classic_queue_oracle as oracle

from rmqstore.errors import StoreError
from rmqstore.rabbitmq.message_store import MessageStore

LIMIT = 1500


def message_id(number: int) -> bytes:
    return hashlib.md5(b"%d" % number).digest()


def term_of(number: int) -> bytes:
    return oracle.message_term(b"%d." % number + b"x" * (number % 7 * 20), message_id(number))


def script() -> list[tuple[str, list[int]]]:
    """A run of a store: writes that roll, removes that delete and merge, closes of both kinds, references."""
    steps: list[tuple[str, list[int]]] = [("write", [n]) for n in range(8)]
    steps += [("write", list(range(8, 30))), ("write", [0]), ("sync", [])]
    steps += [("remove", [n]) for n in range(1, 12, 2)]
    steps += [("remove", [n for n in range(30) if n % 3 == 1 and n not in range(1, 12, 2)]), ("close clean", [])]
    steps += [("write", [n]) for n in (30, 31, 0)] + [("remove", list(range(14, 24, 3))), ("merge", [])]
    steps += [("close", []), ("write", list(range(40, 52))), ("remove", [0, 26, 27]), ("remove", list(range(40, 50)))]
    steps += [("merge", []), ("write", [60, 61]), ("close clean", []), ("remove", [60]), ("close clean", [])]
    return steps


def apply(model: collections.Counter[int], what: str, numbers: list[int]) -> None:
    """Apply an action to the reference counts."""
    for number in numbers:
        model[number] += {"write": 1, "remove": -1}.get(what, 0)


def live(request: dict, layer: ctypes.CDLL) -> None:
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    model: collections.Counter[int] = collections.Counter(request["there"])
    clean = False

    def say(**values) -> None:
        os.write(said, json.dumps({**values, "hits": layer.faults_hits()}).encode() + b"\n")

    def opened() -> MessageStore:
        references = {message_id(number): count for number, count in model.items() if count > 0}
        return MessageStore.open(request["root"], file_size_limit=LIMIT, references=references)

    def check() -> None:
        # Whatever failed, what was acknowledged can be read.
        if not store.closed:
            for number, count in model.items():
                if count > 0 and number not in doubtful:
                    assert store.read_term(message_id(number)) == term_of(number), number

    doubtful: set[int] = set()
    store = None
    for i, (what, numbers) in enumerate(request["steps"] or script()):
        say(begin=i)
        try:
            if store is None or store.closed:
                store = opened()
            if what == "write":
                store.write_many([message_id(n) for n in numbers], [term_of(n) for n in numbers])
            elif what == "remove":
                store.remove_many([message_id(n) for n in numbers])
            elif what == "merge":
                store.merge()
            elif what == "sync":
                store.sync()
            else:
                clean = what == "close clean"
                store.close([bytes(16)] if clean else None)
        except (OSError, StoreError) as error:
            if not request["patient"]:
                raise
            say(failed=i, kind=type(error).__name__, text=str(error))
            doubtful.update(numbers)
            if store is None or store.closed:
                break
            check()
            store.abandon()
            break
        apply(model, what, numbers)
        say(done=i)
    if store is not None and not store.closed:
        store.close([bytes(16)])
    say(end=layer.faults_count())


def run_child(request: dict, layer: ctypes.CDLL) -> None:
    code = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(errors, 2)
        signal.alarm(60)
        layer.faults_arm(
            os.fsencode(request["root"]), request["names"], request["number"], request["action"], request["error"],
            request["lasts"], None, 0,
        )  # fmt: skip
        live(request, layer)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def main() -> None:
    layer = ctypes.CDLL(sys.argv[1])
    layer.faults_arm.argtypes = [
        ctypes.c_char_p, ctypes.c_uint32, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p,
        ctypes.c_int,
    ]  # fmt: skip
    for function in ("faults_count", "faults_hits"):
        getattr(layer, function).restype = ctypes.c_long
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        child = os.fork()
        if not child:
            run_child(request, layer)
        status = os.waitpid(child, 0)[1]
        sys.stdout.write(json.dumps({"status": status}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
