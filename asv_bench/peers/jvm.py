"""The Java peer: compiling it, starting it, and asking it.

Owns one long-lived process that answers commands (java/Peer.java), so that rounds alternate within one run and its code is
compiled before it counts.  The jars are those of `ci/java.sh`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from . import memory
from .rounds import Outcome

ROOT = Path(__file__).resolve().parents[2]
JAVA = ROOT / "build" / "java"
CLASSES = ROOT / "build" / "peers"
SOURCES = Path(__file__).resolve().parent / "java"
OPTIONS = [
    # RocketMQ on Java 17 uses these packages.
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "-Xms1g",
    "-Xmx4g",
    "-Xlog:disable",
    "-Duser.timezone=UTC",
]


class PeerError(Exception):
    """The peer is missing or refused a command."""


def is_there() -> bool:
    """Whether `ci/java.sh` has fetched and compiled what the peer needs."""
    return (JAVA / "stamp").exists()


def classpath() -> str:
    """Our classes, those of the interoperability tests, and RocketMQ's."""
    return f"{CLASSES}:{JAVA}/tool.jar:{JAVA}/lib/*"


def compile_sources() -> None:
    """Compile the sources that are newer than their classes."""
    CLASSES.mkdir(parents=True, exist_ok=True)
    newest = max(source.stat().st_mtime for source in SOURCES.glob("*.java"))
    stamp = CLASSES / "stamp"
    if not stamp.exists() or stamp.stat().st_mtime < newest:
        sources = [str(source) for source in sorted(SOURCES.glob("*.java"))]
        command = [
            "javac",
            "-nowarn",
            "-proc:none",
            "-encoding",
            "UTF-8",
            "-cp",
            classpath(),
            "-d",
            str(CLASSES),
            *sources,
        ]
        subprocess.run(command, check=True)
        stamp.touch()


class JavaClass:
    """How to run the main function of one of our classes in a process of its own: `command`, arguments come behind it."""

    def __init__(self, name: str, scratch: str):
        if not is_there():
            raise PeerError("build/java is missing: run ci/java.sh, which needs Java 17 and Maven")
        compile_sources()
        self.command = [
            "java",
            *OPTIONS,
            # RocketMQ and its RocksDB write into both.
            f"-Duser.home={scratch}",
            f"-Djava.io.tmpdir={scratch}",
            f"-Drmq.logback.configurationFile={SOURCES}/logback-off.xml",
            "-cp",
            classpath(),
            name,
        ]


class Java:
    """The process; usable in a ``with`` statement."""

    def __init__(self, scratch: str):
        command = JavaClass("rmqstore.interop.Peer", scratch).command
        self.log = open(f"{scratch}/java.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=scratch,
        )
        self.version = self.ask("hello")["java"]

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises
        ------
        PeerError
            The peer died or reports an error; holds the end of what it logged.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the peer ended with code {self.process.wait()}"}
        if "error" in answer:
            self.log.seek(0)
            raise PeerError(f"Java, {op}: {answer['error']}\n{self.log.read()[-4000:]}")
        return answer

    def timed(self, op: str, **arguments: Any) -> Outcome:
        """As `ask`; its nanoseconds as seconds, the rest as the answer."""
        memory.provide()
        answer = self.ask(op, **arguments)
        return Outcome(answer.pop("ns") / 1e9, answer)

    def close(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self.log.close()

    def __enter__(self) -> Java:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
