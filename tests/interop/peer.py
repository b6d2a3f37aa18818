"""The peer on the other side: RocketMQ's own store and broker, driven through `tests/interop/rocketmq` as subprocesses.

Owns how the Java tools are found, started, read and ended.  It never imports rmqstore, so that a test may compare the
two, and never decodes a store file.  Java's opening writes (it cuts tails, locks, recreates files); therefore every
reading call of `JavaStore` works on a copy of the directory unless `in_place` is given, and the caller's directory
stays as it was.  `JavaBroker` always works on the directory itself.  No process outlives its call or its context.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["JavaBroker", "JavaStore", "PeerError", "copy_store", "disk_size"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "java"
JVM_OPTIONS = Path(__file__).with_name("rocketmq") / "jvm.options"
MAX_LONG = 2**63 - 1

# Options of the Java store, most of them fields of StoreConfig, and what they are called there.
OPTIONS = {
    "mapped_file_size_commit_log": "mappedFileSizeCommitLog",
    "mapped_file_size_consume_queue": "mappedFileSizeConsumeQueue",
    "mapped_file_size_consume_queue_ext": "mappedFileSizeConsumeQueueExt",
    "mapper_file_size_batch_consume_queue": "mapperFileSizeBatchConsumeQueue",
    "max_hash_slot_num": "maxHashSlotNum",
    "max_index_num": "maxIndexNum",
    "message_delay_level": "messageDelayLevel",
    "message_index_enable": "messageIndexEnable",
    "message_index_safe": "messageIndexSafe",
    "max_message_size": "maxMessageSize",
    "enabled_append_prop_crc": "enabledAppendPropCRC",
    "force_verify_prop_crc": "forceVerifyPropCRC",
    "enable_consume_queue_ext": "enableConsumeQueueExt",
    "enable_lmq": "enableLmq",
    "enable_multi_dispatch": "enableMultiDispatch",
    "flush_disk_type": "flushDiskType",
    "commit_log_recover_max_num": "commitLogRecoverMaxNum",
}


class PeerError(Exception):
    """The Java tool failed; the text holds the command, the exit code and what it wrote to standard error."""


def _command(tool: str, home: str, arguments: Sequence[str]) -> list[str]:
    """The command line of one of the Java tools; what it unpacks and logs goes into `home`."""
    reason = JavaStore.unavailable_reason()
    if reason is not None:
        raise PeerError(reason)
    return [
        "java",
        f"@{JVM_OPTIONS}",
        f"-XX:SharedArchiveFile={BUILD / 'classes.jsa'}",
        f"-Duser.home={home}",
        f"-Djava.io.tmpdir={home}",
        f"-Drmq.logback.configurationFile={BUILD / 'classes' / 'logback-stderr.xml'}",
        "-cp",
        f"{BUILD / 'tool.jar'}{os.pathsep}{BUILD / 'lib'}{os.sep}*",
        f"rmqstore.interop.{tool}",
        *arguments,
    ]


class _ToolProcess:
    """One of the Java tools that is spoken to by lines, its output and its log; ended by `end`, at the latest."""

    def __init__(self, tool: str, arguments: Sequence[str], timeout: float):
        self.tool = tool
        self.timeout = timeout
        self._home = tempfile.TemporaryDirectory(prefix="peer-jvm-")
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log_begin = 0
        try:
            command = _command(tool, self._home.name, arguments)
            with open(os.path.join(self._home.name, "stderr"), "wb") as stderr:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0
                )
        except BaseException:
            self._home.cleanup()
            raise
        # The thread ends with the process, whose output is then at its end.
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, what: str, lines: str) -> None:
        """Write a request, `what` in errors; what the log says from now on belongs to it."""
        self._log_begin = len(self._log())
        data = memoryview(lines.encode())
        assert self.process.stdin is not None
        try:
            while data:
                data = data[self.process.stdin.write(data) :]
        except BrokenPipeError as error:
            raise self.failed(what, "the process is gone") from error

    def answers(self, what: str) -> Iterator[dict[str, Any]]:
        """The answers up to `done`.

        Raises
        ------
        PeerError
            The tool said `error`, or ended, or said nothing for `timeout` seconds.
        """
        while True:
            try:
                text = self._lines.get(timeout=self.timeout)
            except queue.Empty:
                raise self.failed(what, f"no answer within {self.timeout} s") from None
            if text is None:
                self._lines.put(None)
                raise self.failed(what, f"the process ended with code {self.process.wait(self.timeout)}")
            try:
                line = json.loads(text)
            except ValueError as error:
                raise self.failed(what, f"not a JSON line: {text[:200]}") from error
            if line["type"] == "done":
                return
            if line["type"] == "error":
                raise self.failed(what, line["message"])
            yield line

    def wait(self, what: str) -> None:
        """Wait until the process has ended well by itself."""
        try:
            code = self.process.wait(self.timeout)
        except subprocess.TimeoutExpired as error:
            raise self.failed(what, f"the process did not end within {self.timeout} s") from error
        if code != 0:
            raise self.failed(what, f"exit code {code}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(self.timeout)

    def end(self) -> None:
        """Kill the process if it still runs and let go of everything; may be called twice."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self._home.cleanup()

    def failed(self, what: str, why: str) -> PeerError:
        return PeerError(f"{self.tool} {what}: {why}\n{self._log()[self._log_begin :][-20000:]}")

    def _log(self) -> str:
        try:
            return Path(self._home.name, "stderr").read_text("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        try:
            while chunk := self.process.stdout.read(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    self._lines.put(line.decode("utf-8"))
        except (OSError, ValueError):
            # `end` closed the pipe; nobody waits for lines any more.
            pass
        # What a killed process wrote of a line is no answer.
        self._lines.put(None)


def _copy_file(source: str, target: str) -> str:
    """Copy one file and keep its holes: store files are preallocated and mostly empty."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        # All of them before the first read: what is read ahead of an allocated hole counts as data from then on.
        for start, end in _extents(reader.fileno(), size):
            reader.seek(start)
            writer.seek(start)
            left = end - start
            while left:
                chunk = reader.read(min(left, 1 << 20))
                if not chunk:
                    raise PeerError(f"{source} became shorter while it was copied")
                # What was allocated beforehand and never written, or only read, is zeros and stays a hole.
                if chunk.count(0) == len(chunk):
                    writer.seek(len(chunk), os.SEEK_CUR)
                else:
                    writer.write(chunk)
                left -= len(chunk)
        writer.truncate(size)
    return target


def disk_size(root: str | os.PathLike[str]) -> int:
    """Bytes that the files below a directory take on the disk; less than their lengths while they have holes."""
    return sum(path.stat().st_blocks * 512 for path in Path(root).rglob("*") if path.is_file())


def _extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Where a file has data: start and end of each piece."""
    extents = []
    pos = 0
    while pos < size:
        try:
            start = os.lseek(descriptor, pos, os.SEEK_DATA)
        except OSError:
            # ENXIO: only a hole is left.
            break
        pos = os.lseek(descriptor, start, os.SEEK_HOLE)
        extents.append((start, pos))
    return extents


def copy_store(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Copy a store directory, sparse and writable, whatever the permissions of the original.

    Parameters
    ----------
    source : path
        The store directory.
    target : path
        A path that does not exist yet.

    Returns
    -------
    pathlib.Path
        `target`.
    """
    source = Path(source)
    target = Path(target)
    target.mkdir(parents=True)
    # No copytree: it would carry the modes of read-only directories over before they are filled.
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            copy_store(entry, target / entry.name)
        else:
            _copy_file(str(entry), str(target / entry.name))
    return target


def _message_line(message: Mapping[str, Any]) -> dict[str, Any]:
    """One script line: bytes bodies as base64, properties as pairs in their order."""
    line = dict(message)
    if "body" in line:
        body = line["body"]
        line["body"] = body if isinstance(body, str) else base64.b64encode(bytes(body)).decode("ascii")
    properties = line.get("properties")
    if isinstance(properties, Mapping):
        line["properties"] = [[name, value] for name, value in properties.items()]
    if "batch" in line:
        line["batch"] = [_message_line(inner) for inner in line["batch"]]
    return line


class JavaStore:
    """RocketMQ's DefaultMessageStore in a subprocess, opened again for each call.

    One process serves many calls, as starting it takes longer than most of them; a call that ends by `kill`, or fails,
    ends the process, and the next one starts another.  Use it by ``with``, or call `close`.

    Parameters
    ----------
    timeout : float
        Seconds that one call may take before the process is killed and `PeerError` raised.

    Notes
    -----
    `config` is in every method an object or a mapping with StoreConfig's field names (see `OPTIONS`); missing fields
    and None take RocketMQ's default.  `batch_topics` names topics whose queues are batch queues (`queue.type=BatchCQ`);
    those that already have a directory in `batchconsumequeue` are found without it.  `extra` holds further RocketMQ
    options by RocketMQ's own names, such as `{"enableCompaction": True}`.
    """

    def __init__(self, timeout: float = 120.0):
        self.timeout = timeout
        self._server: _ToolProcess | None = None

    def __enter__(self) -> JavaStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if one runs."""
        server, self._server = self._server, None
        if server is not None:
            server.end()

    @staticmethod
    def unavailable_reason() -> str | None:
        """Why the peer cannot be used on this machine, or None when it can."""
        if shutil.which("java") is None:
            return "java is not installed"
        if not (BUILD / "stamp").is_file():
            return "the RocketMQ artifacts are not built: run ci/java.sh"
        return None

    @classmethod
    def available(cls) -> bool:
        """Whether Java is installed and `ci/java.sh` has been run."""
        return cls.unavailable_reason() is None

    def dump(
        self,
        path: str | os.PathLike[str],
        config: Any = None,
        *,
        in_place: bool = False,
        kill: bool = False,
        batch_topics: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Everything that the Java store reads back, as the lines of `golden/rocketmq/*.jsonl`.

        Parameters
        ----------
        path : path
            The store directory.
        config : object or mapping, optional
            Geometry, see the class.
        in_place : bool
            Open the directory itself instead of a copy, and close it in order: afterwards it is a store that Java
            recovered and shut down.
        kill : bool
            With `in_place`: end the process without closing the store, so that `abort` stays.
        batch_topics, extra
            See the class.

        Returns
        -------
        list of dict
            `store` (minPhy, maxPhy), `msg` / `blank` in log order, `queue` by topic and queue id with the units
            `queueOffset:phyOffset:size:tagsCode`, `query` by topic and key with the index's offsets (newest first, at
            most 64, all time).  After them the same `query` lines for tags, with `"indexType": "T"`: 5.4.0 and later
            index tags, older stores answer an empty list.

        Raises
        ------
        PeerError
            The Java store refused the directory or failed.
        """
        arguments = _store_options(config, batch_topics, extra)
        return self._on(path, in_place, kill, lambda target, end: self._run(["dump", target, *arguments, *end]))

    def write(
        self,
        path: str | os.PathLike[str],
        config: Any = None,
        messages: Iterable[Mapping[str, Any]] = (),
        *,
        kill: bool = False,
        batch_topics: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Put messages into the store at `path` itself (created when missing) and close it.

        Parameters
        ----------
        path : path
            The store directory.
        config : object or mapping, optional
            Geometry, see the class.  `index_tags=False` is refused: 5.4.0 and later always index tags.
        messages : iterable of mapping
            `topic`, `queueId`, `body` (bytes, or str that is base64 already), `properties` (mapping or list of pairs;
            the order is kept), `flag`, `sysFlag`, `bornTimestamp`, `storeTimestamp` (ms; the store's clock stands
            there while this message is put), `bornHost` and `storeHost` ("ip:port"), `reconsumeTimes`,
            `preparedTransactionOffset`.  With `batch` (a list of `body`, `properties`, `flag`) the line is one client
            batch through putMessages.  The store, not a broker, takes them: delayed messages and transactions must
            come in the form in which a broker would put them.
        kill : bool
            End the process after the last message is dispatched and flushed, without closing the store.
        batch_topics, extra
            See the class.

        Returns
        -------
        list of dict
            One a message: `status`, `appendStatus`, `offset`, `size`, `queueOffset`, `store`, `count`, `msgId`.

        Raises
        ------
        PeerError
            The Java store failed; a refused message is no failure but a status.
        """
        if config is not None and _field(config, "index_tags") is False:
            raise ValueError("RocketMQ 5.4.0 and later always index tags; they cannot write with index_tags=False")
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        script = "".join(json.dumps(_message_line(message), ensure_ascii=False) + "\n" for message in messages)
        options = _store_options(config, batch_topics, extra)
        return self._run(["write", str(target), *options, *(["--kill"] if kill else []), "-"], script)

    def turn(
        self,
        path: str | os.PathLike[str],
        config: Any,
        messages: Iterable[Mapping[str, Any]],
        *,
        kill: bool = False,
        batch_topics: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        """Open the store at `path` itself, dump it, put messages, dump it again, and close it: all in one process.

        Parameters
        ----------
        path, config, messages, kill, batch_topics, extra
            As for `write`; at least one message.

        Returns
        -------
        before, answers, after : lists of dict
            The dump as it was found, one `put` line a message, the dump before the end.
        """
        lines = [_message_line(message) for message in messages]
        if not lines:
            raise ValueError("a turn needs a message: it parts what was before from what is after")
        dump = {"op": "dump"}
        script = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [dump, *lines, dump])
        options = _store_options(config, batch_topics, extra)
        said = self._run(["write", str(path), *options, *(["--kill"] if kill else []), "-"], script)
        puts = [number for number, line in enumerate(said) if line["type"] == "put"]
        if len(puts) != len(lines) or puts[-1] - puts[0] != len(lines) - 1:
            raise PeerError(f"{len(lines)} messages and {len(puts)} answers")
        return said[: puts[0]], said[puts[0] : puts[-1] + 1], said[puts[-1] + 1 :]

    def ask(
        self,
        path: str | os.PathLike[str],
        config: Any = None,
        requests: Iterable[Mapping[str, Any]] = (),
        *,
        in_place: bool = False,
        kill: bool = False,
        batch_topics: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Many questions to one opened store; each answer repeats its question.

        Parameters
        ----------
        path, config, in_place, kill, batch_topics, extra
            As for `dump`.
        requests : iterable of mapping
            `{"op": "query", topic, key, maxNum, begin, end, indexType?}`: `offsets` is the index service's answer,
            `messages` the phy offsets of queryMessage's records.
            `{"op": "get", topic, queueId, offset, maxNum, maxBytes, sub?}`: `status`, `next`, `min`, `max`, `count`,
            `bytes`, `records` of `queueOffset`, `offset`, `size`.
            `{"op": "time", topic, queueId, timestamp, boundary}`: `queueOffset`.
            `{"op": "look", offset}`: `message`, a `msg` line or None.
            Times are ms since the epoch, `boundary` is "LOWER" or "UPPER".

        Returns
        -------
        list of dict
            One answer a request, in order.

        Raises
        ------
        PeerError
            The Java store refused the directory or a request.
        """
        arguments = _store_options(config, batch_topics, extra)
        lines = [json.dumps(dict(request), ensure_ascii=False) for request in requests]
        script = "".join(line + "\n" for line in lines)
        return self._on(
            path, in_place, kill, lambda target, end: self._run(["query", target, *arguments, *end], script)
        )

    def query(
        self,
        path: str | os.PathLike[str],
        config: Any,
        topic: str,
        keys: str | Sequence[str],
        *,
        max_num: int = 64,
        begin: int = 0,
        end: int = MAX_LONG,
        index_type: str | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """`ask` for one or several keys of a topic: one `query` answer a key."""
        question = {"op": "query", "topic": topic, "maxNum": max_num, "begin": begin, "end": end}
        if index_type is not None:
            question["indexType"] = index_type
        names = [keys] if isinstance(keys, str) else keys
        return self.ask(path, config, [{**question, "key": key} for key in names], **options)

    def get(
        self,
        path: str | os.PathLike[str],
        config: Any,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_num: int = 32,
        max_bytes: int = 1 << 20,
        sub: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """`ask` for one getMessage: its status, offsets and records."""
        question = {"op": "get", "topic": topic, "queueId": queue_id, "offset": offset}
        question |= {"maxNum": max_num, "maxBytes": max_bytes, "sub": sub}
        return self.ask(path, config, [question], **options)[0]

    def offset_by_time(
        self,
        path: str | os.PathLike[str],
        config: Any,
        topic: str,
        queue_id: int,
        timestamp: int,
        boundary: str = "LOWER",
        **options: Any,
    ) -> int:
        """`ask` for one queue offset by time (ms since the epoch)."""
        question = {"op": "time", "topic": topic, "queueId": queue_id, "timestamp": timestamp, "boundary": boundary}
        return self.ask(path, config, [question], **options)[0]["queueOffset"]

    @staticmethod
    def _on(
        path: str | os.PathLike[str],
        in_place: bool,
        kill: bool,
        run: Callable[[str, list[str]], list[dict[str, Any]]],
    ) -> list[dict[str, Any]]:
        if not Path(path).is_dir():
            raise NotADirectoryError(f"no store directory at {os.fspath(path)}")
        if in_place:
            return run(str(path), ["--kill"] if kill else [])
        if kill:
            raise ValueError("kill needs in_place: the copy is thrown away anyway")
        with tempfile.TemporaryDirectory(prefix="peer-store-") as scratch:
            return run(str(copy_store(path, Path(scratch) / "store")), [])

    def _run(self, arguments: list[str], script: str = "") -> list[dict[str, Any]]:
        what = " ".join(arguments)
        if self._server is None:
            self._server = _ToolProcess("StoreTool", ["serve"], self.timeout)
        kill = "--kill" in arguments
        try:
            head = json.dumps({"words": arguments, "lines": script.count("\n")}, ensure_ascii=False)
            self._server.send(what, head + "\n" + script)
            lines = list(self._server.answers(what))
            if kill:
                # Its lock is gone only with the process.
                self._server.wait(what)
        except BaseException:
            kill = True
            raise
        finally:
            if kill:
                self.close()
        return lines


def _field(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _option_text(value: Any) -> str:
    # An enumeration such as FlushDiskType goes by its name.
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "name", value))


def _store_options(config: Any, batch_topics: Sequence[str], extra: Mapping[str, Any] | None) -> list[str]:
    words: list[str] = []
    settings: dict[str, Any] = {}
    for name, java_name in OPTIONS.items():
        value = None if config is None else _field(config, name)
        if value is not None:
            settings[java_name] = value
    settings.update(extra or {})
    for java_name, value in settings.items():
        words += ["--set", f"{java_name}={_option_text(value)}"]
    for topic in batch_topics:
        words += ["--batch-topic", topic]
    return words


class JavaBroker:
    """A real RocketMQ broker with its name server, in one process on loopback, on a store directory.

    Use it by ``with``: entering starts both and waits until the store is recovered and dispatched, leaving kills what
    still runs.  `shutdown` ends it in order, `kill` as SIGKILL does.  Requests are answered one at a time, also when
    several threads ask.

    Parameters
    ----------
    path : path
        The store directory; made when missing, and changed.
    config : object or mapping, optional
        Geometry, as for `JavaStore`.
    extra, broker_extra : mapping, optional
        Further options of MessageStoreConfig and of BrokerConfig by RocketMQ's own names.
    timeout : float
        Seconds that the start, a request or the shutdown may take; then the process is killed and `PeerError` raised.

    Notes
    -----
    Messages are answered as `msg` lines are (see `JavaStore.dump`), with the body as bytes in `body`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        broker_extra: Mapping[str, Any] | None = None,
        timeout: float = 90.0,
    ):
        self.path = Path(path)
        self.timeout = timeout
        self._options = _store_options(config, (), extra)
        for name, value in (broker_extra or {}).items():
            self._options += ["--broker-set", f"{name}={_option_text(value)}"]
        self._turn = threading.RLock()
        self._killed = False
        self._tool: _ToolProcess | None = None

    # ----------------------------------------------------------------------------------------------------- its life

    def __enter__(self) -> JavaBroker:
        self.path.mkdir(parents=True, exist_ok=True)
        self._tool = _ToolProcess("BrokerTool", [str(self.path), *self._options], self.timeout)
        try:
            list(self._tool.answers("start"))
        except BaseException:
            self._tool.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tool is not None:
            self._tool.end()

    def shutdown(self) -> None:
        """Stop the broker in order and wait for the end of the process."""
        self._request("shutdown")
        self._running().wait("shutdown")

    def kill(self) -> None:
        """End the process by SIGKILL and wait until it is gone; may be called while another thread waits for it."""
        self._killed = True
        self._running().kill()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._tool is not None and self._tool.process.poll() is None

    def _running(self) -> _ToolProcess:
        if self._tool is None:
            raise PeerError("the broker was not started: use it by `with`")
        return self._tool

    # ----------------------------------------------------------------------------------------------------- requests

    def topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic, or change its number of queues, and wait until the name server knows it."""
        self._request("topic", topic=topic, queues=queues)

    def produce(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send messages through a real producer, one after the other, and return the answers.

        Parameters
        ----------
        messages : iterable of mapping
            `topic`, `queueId`, `body` (bytes), `keys` (separated by spaces), `tags`, `flag`, `properties`, `delayLevel`;
            with `batch` (a list of `body`, `keys`, `tags`, `flag`, `properties`) they are one client batch.

        Returns
        -------
        list of dict
            `status`, `msgId` (the unique key; those of a batch joined by commas), `offsetMsgId`, `queueId`, `queueOffset`
            (the first of a batch), `offsets` (in the log, one a message).
        """
        return list(self.producing(messages))

    def producing(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """As `produce`, but each answer comes when it was given; ends early, without error, when the broker is killed."""
        sent = [_message_line(message) for message in messages]
        with self._turn:
            self._send("produce", messages=sent)
            try:
                yield from self._answers("produce")
            except PeerError:
                if not self._killed:
                    raise

    def consume(
        self, group: str, topic: str, *, sub: str | None = None, count: int | None = None, more: bool = False
    ) -> list[dict[str, Any]]:
        """Let one real consumer of a group take messages from every queue, from the committed offsets on, and commit.

        Parameters
        ----------
        group, topic : str
        sub : str, optional
            Subscription by tags, such as "a || b"; needs `count`.
        count : int, optional
            How many to take; by default all up to the end of the queues.
        more : bool
            After `count` messages, wait half a second for others and return them too.

        Returns
        -------
        list of dict
            The messages in the order in which they came: in order within a queue.
        """
        return self._request("consume", group=group, topic=topic, sub=sub, count=count, more=more)

    def query(
        self, topic: str, key: str, *, unique: bool = False, max_num: int = 64, begin: int = 0, end: int = MAX_LONG
    ) -> list[dict[str, Any]]:
        """Messages by key, or by unique key, through RocketMQ's admin client."""
        return self._request("query", topic=topic, key=key, unique=unique, maxNum=max_num, begin=begin, end=end)

    def offsets(self, group: str) -> dict[str, dict[int, int]]:
        """The committed offsets of a group: topic -> queue id -> next offset."""
        table: dict[str, dict[int, int]] = {}
        for line in self._request("offsets", group=group):
            table.setdefault(line["topic"], {})[line["queueId"]] = line["offset"]
        return table

    def persist(self) -> None:
        """Write the consumer progress to `config/consumerOffset.json`, as the broker's timer does every few seconds."""
        self._request("persist")

    def dispatched(self) -> dict[str, Any]:
        """Wait until the log is dispatched; `minPhy`, `maxPhy`, `nameServer`, `broker`."""
        (state,) = self._request("dispatched")
        return state

    def _request(self, op: str, **parameters: Any) -> list[dict[str, Any]]:
        with self._turn:
            self._send(op, **parameters)
            return list(self._answers(op))

    def _send(self, op: str, **parameters: Any) -> None:
        # The tool gives up before we do, and then says why.
        request = {"op": op, "timeoutMs": int(self.timeout * 800), **parameters}
        self._running().send(op, json.dumps(request, ensure_ascii=False) + "\n")

    def _answers(self, op: str) -> Iterator[dict[str, Any]]:
        for line in self._running().answers(op):
            if "body" in line:
                line["body"] = base64.b64decode(line["body"])
            yield line
