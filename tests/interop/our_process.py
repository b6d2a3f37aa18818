"""rmqstore in a process of its own, that holds a store open and can be killed.

Owns the process, both sides of it: run as a script it opens a store and does what it is told.  Requests and answers are
pickles on standard input and output.  No process outlives its context, and each wait has an end.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["RmqstoreProcess", "our_config"]


def our_config(settings: dict, **others: Any) -> Any:
    """The configuration of rmqstore's turns; whether the index is safe is a question for Java alone."""
    from rmqstore import StoreConfig

    return StoreConfig(**{name: value for name, value in settings.items() if name != "message_index_safe"}, **others)


class RmqstoreProcess:
    """A writable `MessageStore` in another process.

    Use it by ``with``: entering opens the store, leaving kills the process if it still runs.

    Parameters
    ----------
    path : path
        The store directory.
    settings : dict
        What StoreConfig takes, without `clock`: the store's clock stands at the time of each put.
    timeout : float
        Seconds that a request may take; then the process is killed and the request raises EOFError.

    Attributes
    ----------
    clean : bool
        What the recovery report said.
    """

    clean: bool

    def __init__(self, path: Path, settings: dict[str, Any], timeout: float = 60.0):
        self._opening = (str(path), settings)
        self._timeout = timeout

    def __enter__(self) -> RmqstoreProcess:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        try:
            self.clean = self._ask(self._opening)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def put(self, puts: Sequence[tuple[int, Any, int]]) -> list[tuple[int, int]]:
        """Put messages: (store time in ms, Message, queue id) each; answers (queue offset, phy offset) each."""
        return self._ask(("put", puts))

    def flush(self) -> None:
        """Flush the store."""
        self._ask(("flush",))

    def dump(self) -> list[dict]:
        """What `answers.dump` says of the open store."""
        return self._ask(("dump",))

    def written(self) -> int:
        """Bytes of pages that the process made dirty, which the disk has to take."""
        return self._ask(("written",))

    def kill(self) -> None:
        """End the process by SIGKILL, with the store open, and wait until it is gone."""
        self._process.kill()
        self._process.wait(self._timeout)

    def _end(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _ask(self, request: tuple) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        watch = threading.Timer(self._timeout, self._process.kill)
        watch.start()
        try:
            data = memoryview(pickle.dumps(request))
            while data:
                data = data[self._process.stdin.write(data) :]
            return pickle.load(_Whole(self._process.stdout))
        finally:
            watch.cancel()


class _Whole:
    """A raw pipe as pickle wants it: a read gives all that was asked for, short only at the end."""

    def __init__(self, pipe: Any):
        self._pipe = pipe

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (chunk := self._pipe.read(size - len(data))):
            data += chunk
        return data

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := self._pipe.read(1)):
            line += byte
        return line


def _serve() -> None:
    from answers import dump

    from rmqstore import MessageStore

    requests, answers = sys.stdin.buffer, sys.stdout.buffer

    def answer(value: Any) -> None:
        pickle.dump(value, answers)
        answers.flush()

    now = 0
    path, settings = pickle.load(requests)
    store = MessageStore.open(path, config=our_config(settings, clock=lambda: now))
    answer(store.recovery_report.clean)
    while True:
        # At the end of the input, when the test is gone, this raises and the process ends.
        name, *arguments = pickle.load(requests)
        if name == "put":
            places = []
            for now, message, queue_id in arguments[0]:  # noqa: B007 - the clock reads it
                put = store.put_message(message, queue_id)
                places.append((put.queue_offset, put.phy_offset))
            answer(places)
        elif name == "flush":
            answer(store.flush())
        elif name == "written":
            with open("/proc/self/io") as lines:
                (count,) = [int(line.split()[1]) for line in lines if line.startswith("write_bytes:")]
            answer(count)
        else:
            answer(dump(store))


if __name__ == "__main__":
    _serve()
