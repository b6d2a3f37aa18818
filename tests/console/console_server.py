"""The console as a process of its own, as `rmqstore serve` starts it, and plain requests to it.

Owns the process (started on a free port, ended by its id) and requests over a socket, where every byte of the request line and
of the headers is the test's.  It never imports rmqstore.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"http://(\[[0-9a-f:.]+\]|[^\s:/]+):(\d+)")
START_LIMIT = 60


@dataclass(frozen=True)
class Answer:
    """A response: status, headers by lower-case name (several of one name in one list), body."""

    status: int
    headers: Mapping[str, list[str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The header's only value, or None."""
        found = self.headers.get(name.lower(), [])
        assert len(found) <= 1, f"{name} comes {len(found)} times"
        return found[0] if found else None

    @property
    def text(self) -> str:
        return self.body.decode("utf-8")

    def json(self) -> Any:
        # NaN and infinities are no JSON, whatever Python's parser thinks.
        def refuse(word: str) -> Any:
            raise ValueError(f"{word} is no JSON")

        return json.loads(self.body, parse_constant=refuse)


def connection(host: str, port: int, timeout: float = 60) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(host, port, timeout=timeout)


def ask(
    link: http.client.HTTPConnection,
    target: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    host: str | None = None,
    body: bytes | None = None,
) -> Answer:
    """Send a request on an open connection: `target` as it is, nothing made canonical; `host` instead of the true Host."""
    link.putrequest(method, target, skip_host=host is not None, skip_accept_encoding=True)
    if host is not None:
        link.putheader("Host", host)
    for name, value in (headers or {}).items():
        link.putheader(name, value)
    if body is not None:
        link.putheader("Content-Length", str(len(body)))
    link.endheaders(body)
    response = link.getresponse()
    collected: dict[str, list[str]] = {}
    for name, value in response.getheaders():
        collected.setdefault(name.lower(), []).append(value)
    return Answer(response.status, collected, response.read())


class ConsoleServer:
    """`rmqstore serve PATH…` in a process of its own.

    Attributes
    ----------
    host, port, url : str, int, str
        Where it listens, as it says itself; `url` has no slash at its end.
    process : subprocess.Popen
    log : list of str
        The lines that it wrote to stdout and stderr so far.
    ends_with_test : bool
        No other test asks it.
    """

    def __init__(self, *arguments: Any, port: int = 0, environment: Mapping[str, str] | None = None):
        command = [sys.executable, "-m", "rmqstore", "serve", *map(str, arguments), "--port", str(port)]
        env = {**os.environ, "TZ": "UTC", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "200"}
        env.update(environment or {})
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.log: list[str] = []
        self.ends_with_test = False
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()
        self.host, self.port = self._address(lines)
        self.url = f"http://{self.host}:{self.port}"
        self._wait_until_it_answers()

    def _read(self, lines: queue.SimpleQueue[str | None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))
            lines.put(line)
        lines.put(None)

    def _address(self, lines: queue.SimpleQueue[str | None]) -> tuple[str, int]:
        end = time.monotonic() + START_LIMIT
        while True:
            try:
                line = lines.get(timeout=max(0, end - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise AssertionError(f"the console did not say where it listens: {self.log}") from None
            if line is None:
                raise AssertionError(f"the console ended with {self.process.wait()}: " + "\n".join(self.log))
            found = _ADDRESS.search(line)
            if found and int(found[2]):
                return found[1].strip("[]"), int(found[2])

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + START_LIMIT
        while True:
            try:
                self.get("/healthz")
                return
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    self.stop()
                    raise AssertionError(f"the console does not answer: {self.log}") from None
                time.sleep(0.05)

    def get(self, target: str, **options: Any) -> Answer:
        """One request on a connection of its own; options of `ask`."""
        link = connection(self.host, self.port)
        try:
            return ask(link, target, **options)
        finally:
            link.close()

    def anonymous_memory(self) -> int:
        """Bytes of the process's own memory; pages of mapped files do not count."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
        assert found, text
        return int(found[1]) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def tracebacks(self) -> list[str]:
        """The lines of the log that show an error that nobody caught."""
        words = ("Traceback (most recent", "Exception in ASGI", "Task exception was never retrieved")
        return [line for line in self.log if any(word in line for word in words)]

    def check(self) -> None:
        """Fail if the server has ended, or wrote of an error that nobody caught."""
        code = self.process.poll()
        assert code is None, f"the console ended with {code}: " + "\n".join(self.log)
        assert not self.tracebacks(), "\n".join(self.log)

    def stop(self) -> int:
        """End the process as Ctrl-C does and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(240)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self._reader.join(240)
        return code

    def __enter__(self) -> ConsoleServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
