"""The peer on the other side: RocketMQ's own store, driven through `tests/interop/rocketmq` as a subprocess.

Owns how the Java tool is found, started and read.  It never imports rmqstore, so that a test may compare the two, and
never decodes a store file.  Java's opening writes (it cuts tails, locks, recreates files); therefore every reading
call works on a copy of the directory unless `in_place` is given, and the caller's directory stays as it was.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["JavaStore", "PeerError", "copy_store"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "java"
MAX_LONG = 2**63 - 1

# RocketMQ 5.5.0 on Java 17 reaches into these packages.
JVM_FLAGS = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    # Index files are named by local time.
    "-Duser.timezone=UTC",
    "-Dfile.encoding=UTF-8",
)

# StoreConfig's field names that mean something to the Java store, and what they are called there.
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
    "check_crc_on_recover": "checkCRCOnRecover",
    "enable_consume_queue_ext": "enableConsumeQueueExt",
    "enable_lmq": "enableLmq",
    "enable_multi_dispatch": "enableMultiDispatch",
    "flush_disk_type": "flushDiskType",
    "commit_log_recover_max_num": "commitLogRecoverMaxNum",
}


class PeerError(Exception):
    """The Java tool failed; the text holds the command, the exit code and what it wrote to standard error."""


def _copy_file(source: str, target: str) -> str:
    """Copy one file and keep its holes: store files are preallocated and mostly empty."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        pos = 0
        while pos < size:
            try:
                start = os.lseek(reader.fileno(), pos, os.SEEK_DATA)
            except OSError:
                # ENXIO: only a hole is left.
                break
            end = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            reader.seek(start)
            writer.seek(start)
            left = end - start
            while left:
                chunk = reader.read(min(left, 1 << 20))
                if not chunk:
                    raise PeerError(f"{source} became shorter while it was copied")
                writer.write(chunk)
                left -= len(chunk)
            pos = end
        writer.truncate(size)
    return target


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
    """RocketMQ 5.5.0's DefaultMessageStore as a subprocess for each call.

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
        arguments = self._options(config, batch_topics, extra)
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
            Geometry, see the class.  `index_tags=False` is refused: 5.5.0 always indexes tags.
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
            raise ValueError("RocketMQ 5.5.0 always indexes tags; it cannot write with index_tags=False")
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        script = "".join(json.dumps(_message_line(message), ensure_ascii=False) + "\n" for message in messages)
        options = self._options(config, batch_topics, extra)
        return self._run(["write", str(target), *options, *(["--kill"] if kill else []), "-"], script)

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
        arguments = self._options(config, batch_topics, extra)
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
    def _options(config: Any, batch_topics: Sequence[str], extra: Mapping[str, Any] | None) -> list[str]:
        words: list[str] = []
        settings: dict[str, Any] = {}
        for name, java_name in OPTIONS.items():
            value = None if config is None else _field(config, name)
            if value is not None:
                settings[java_name] = value
        settings.update(extra or {})
        for java_name, value in settings.items():
            # An enumeration such as FlushDiskType goes by its name.
            text = str(value).lower() if isinstance(value, bool) else str(getattr(value, "name", value))
            words += ["--set", f"{java_name}={text}"]
        for topic in batch_topics:
            words += ["--batch-topic", topic]
        return words

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
            # An orderly shutdown takes three seconds and nobody looks at the copy again.
            return run(str(copy_store(path, Path(scratch) / "store")), ["--kill"])

    def _run(self, arguments: list[str], script: str = "") -> list[dict[str, Any]]:
        reason = self.unavailable_reason()
        if reason is not None:
            raise PeerError(reason)
        with tempfile.TemporaryDirectory(prefix="peer-jvm-") as home:
            # The store unpacks native libraries and writes logs; both go away with this directory.
            command = [
                "java",
                *JVM_FLAGS,
                f"-Duser.home={home}",
                f"-Djava.io.tmpdir={home}",
                f"-Drmq.logback.configurationFile={BUILD / 'classes' / 'logback-stderr.xml'}",
                "-cp",
                f"{BUILD / 'classes'}{os.pathsep}{BUILD / 'lib'}{os.sep}*",
                "rmqstore.interop.StoreTool",
                *arguments,
            ]
            shown = " ".join(["StoreTool", *arguments])
            try:
                done = subprocess.run(command, input=script.encode(), capture_output=True, timeout=self.timeout)
            except subprocess.TimeoutExpired as error:
                stderr = (error.stderr or b"").decode("utf-8", "replace")
                raise PeerError(f"{shown}: no end after {self.timeout} s\n{stderr}") from error
        stderr = done.stderr.decode("utf-8", "replace")
        if done.returncode != 0:
            raise PeerError(f"{shown}: exit code {done.returncode}\n{stderr}")
        lines = []
        # No splitlines: a property may hold U+2028, which the tool writes as it is.
        for line in done.stdout.decode("utf-8").split("\n"):
            if not line:
                continue
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise PeerError(f"{shown}: not a JSON line: {line[:200]}\n{stderr}") from error
        return lines


def _field(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)
