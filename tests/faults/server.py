"""The process that the tests of faults run their children from: imports rmqstore once, then forks a child a case.

Runs under faults.c (LD_PRELOAD).  A request is a line of JSON on the standard input, the answer one on the output, given
when the child is dead.  The child arms the layer, runs one of `SCENARIOS` and writes a line for each thing that was done
or failed; whoever asked holds it against what is on disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [TESTS, os.path.join(TESTS, "store")]

# A store that is opened for writing needs it; importing it in every child would take longer than most children live.
import numpy  # noqa: E402, F401
import test_crash  # noqa: E402

from rmqstore import Message, MessageStore, StoreError  # noqa: E402
from rmqstore.index import index_service  # noqa: E402
from rmqstore.offline.rebuild import REBUILD_DIRECTORY, rebuild  # noqa: E402

EXPECTED = (StoreError, OSError)
# A new index file is tried three times, a second apart.
index_service._CREATE_PAUSE = 0.0


class Life:
    """Actions of a child on its store; each is reported when it is done.

    With `patient` a deed that fails says so and the next one follows, so that errors may be injected; without it the
    child ends with the first failure.
    """

    def __init__(self, request: dict, layer: ctypes.CDLL, *, patient: bool):
        self.layer = layer
        self.patient = patient
        self.root = request["root"]
        self.values = request["values"]
        self.options = request["options"]
        self.clock = [test_crash.NOW + self.values.get("later", 0)]
        self.geometry = {**test_crash.geometry(request["geometry"]), **self.values.get("sizes", {})}
        self.config = test_crash.config_of({**self.geometry, **self.options}, lambda: self.clock[0])
        self.sync = self.options.get("flush_disk_type") == "SYNC_FLUSH"
        self.store: MessageStore | None = None
        self.acknowledged: list[tuple] = []
        self._said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, what: str, **values) -> None:
        values = {"what": what, "hits": self.layer.faults_hits(), "done": self.layer.faults_clock(), **values}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, limits[1]))
        os.write(self._said, json.dumps(values).encode() + b"\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def deed(self, what: str, action, **values):
        """Do it and say so; None when it failed."""
        values["began"] = self.layer.faults_clock()
        try:
            answer = action()
        except EXPECTED as error:
            if not self.patient:
                raise
            self.say("failed", deed=what, kind=type(error).__name__, text=str(error), began=values["began"])
            if what != "read":
                self.read()
            return None
        self.say(what, **values)
        self.layer.faults_photo()
        return answer

    def open(self, recovery: str = "strict") -> bool:
        def action():
            self.store = MessageStore.open(self.root, config=self.config, recovery=recovery)

        self.deed("open", action)
        return self.store is not None

    def put(self, kind: str, messages: list[Message], queue_id: int) -> None:
        store, writer = self.store, test_crash.Writer(self.store, self.clock)
        if store is None:
            return
        rows: list = []

        def action():
            writer.put(kind, messages, queue_id)
            rows.extend([*each[:6], each[6].hex()] for each in writer.acknowledged)
            self.acknowledged += writer.acknowledged

        self.deed("put", action, messages=rows, sync=self.sync)

    def run(self, steps: list) -> None:
        for step in steps:
            if self.store is None:
                return
            if step == "flush":
                self.deed("flush", self.store.flush)
            else:
                self.put(*step)

    def commit(self, offset: int) -> None:
        if self.store is not None:
            store = self.store
            self.deed("commit", lambda: store.consumer_offsets.commit("group", "Orders", 0, offset), offset=offset)
            self.deed("persist", lambda: store.consumer_offsets.persist(), offset=offset)

    def read(self) -> None:
        """Whatever failed: what was acknowledged is read by offset, queue and key (an answer that is wrong ends the child)."""
        if self.store is not None and not self.store.closed:
            self.deed("read", lambda: test_crash.check_readable(self.store, self.acknowledged))

    def close(self) -> None:
        if self.store is not None:
            store, self.store = self.store, None
            began = self.layer.faults_clock()
            self.deed("close", store.close)
            self.say("closed", abort=os.path.exists(os.path.join(self.root, "abort")), began=began)

    def heal(self) -> None:
        """The fault is gone: an opening makes the store whole, also in the same process."""
        self.close()
        self.layer.faults_heal()
        self.say("healed")
        if os.path.exists(os.path.join(self.root, REBUILD_DIRECTORY, "complete")):
            self.rebuild()
        self.open()
        self.read()
        self.run([one(900), "flush"])
        self.read()
        self.close()

    def rebuild(self) -> None:
        self.deed("rebuild", lambda: rebuild(self.root, config=self.config))


def one(number: int, topic: str = "Orders", size: int = 6) -> tuple:
    return ("one", [Message(topic, b"%06d" % number * (size // 6), keys=[f"n{number}"], tags="T1")], 0)


def life(child: Life) -> None:
    """A store's whole life: puts of every kind, rolls, flushes, offsets, orderly closes, a rebuild, more puts."""
    steps = test_crash.script(14)
    child.open()
    child.run(steps[:5])
    child.commit(3)
    child.run(steps[5:])
    child.commit(7)
    child.close()
    child.open()
    child.run([one(100), "flush", one(101)])
    child.commit(9)
    child.close()
    child.rebuild()
    child.open()
    child.run([one(102)])
    child.close()
    if child.patient:
        child.heal()


def recovery(child: Life) -> None:
    """Open a store that was left by a crash, and go on."""
    child.open(child.values.get("recovery", "strict"))
    child.run([one(200), one(201, "Pay"), "flush", one(202)])
    child.close()


def rebuilding(child: Life) -> None:
    """Rebuild a closed store and use it."""
    child.rebuild()
    child.open()
    child.run([one(300)])
    child.close()


def threads(child: Life) -> None:
    """Several threads put at once, one flushes now and then."""
    child.open()

    def puts(number: int) -> None:
        for i in range(child.values.get("puts", 6)):
            child.put(*one(1000 * number + i, ("Orders", "Pay")[number % 2], 6 * (1 + i % 4)))

    workers = [threading.Thread(target=puts, args=(number,)) for number in range(1, 5)]
    for worker in workers:
        worker.start()
    for _ in range(3):
        child.run(["flush"])
    for worker in workers:
        worker.join()
    child.close()


def puts(child: Life) -> None:
    """A few puts and as many flushes as wanted; then the process dies."""
    child.open()
    child.run([one(number) for number in range(5)])
    child.run(["flush"] * child.values["flushes"])
    os.kill(os.getpid(), signal.SIGKILL)


def fill(child: Life) -> None:
    """Put until there is no more space, or so many times; the limit of a file's size may come down before."""
    child.open()
    for number in range(child.values.get("puts", 1000)):
        if number == child.values.get("limit_at"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (child.values["limit"], resource.RLIM_INFINITY))
        before = len(child.acknowledged)
        child.put(*one(number, ("Orders", "Pay")[number % 2], 300))
        if len(child.acknowledged) == before:
            break
    child.run(["flush"])
    child.read()
    child.close()
    if "limit" in child.values:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        child.heal()


def growth(child: Life) -> None:
    """Put batches until two queues have grown page by page to a whole file; the store is closed and opened on the way."""
    child.open()
    for number in range(8):
        for topic in ("Orders", "Pay"):
            child.put("many", [Message(topic, b"%d.%d" % (number, i)) for i in range(250)], 0)
        if number == 3:
            child.close()
            child.open()
    child.close()
    if child.patient:
        child.heal()


def endless(child: Life) -> None:
    """Put until killed."""
    child.open()
    number = 0
    while True:
        for step in test_crash.script(8):
            number += 1
            child.run([step, one(10_000 + number)])


SCENARIOS = {
    "life": life,
    "growth": growth,
    "recovery": recovery,
    "rebuilding": rebuilding,
    "threads": threads,
    "endless": endless,
    "fill": fill,
    "puts": puts,
}


def run_child(request: dict, layer: ctypes.CDLL) -> None:
    code = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        signal.alarm(request["timeout"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        child = Life(request, layer, patient=request["action"] >= 3 or request["values"].get("patient", False))
        layer.faults_arm(
            os.fsencode(request["root"]), request["names"], request["number"], request["action"], request["error"],
            request["lasts"], os.fsencode(request["log"]), request["data"],
        )  # fmt: skip
        SCENARIOS[request["scenario"]](child)
        child.say("end", count=layer.faults_count())
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
    for function in ("faults_count", "faults_hits", "faults_clock"):
        getattr(layer, function).restype = ctypes.c_long
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        child = os.fork()
        if not child:
            run_child(request, layer)
        if request["kill_after"] is not None:
            time.sleep(request["kill_after"])
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        sys.stdout.write(json.dumps({"status": status}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
