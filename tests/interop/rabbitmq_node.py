"""The node on the other side: Debian's RabbitMQ server, driven as a private node on loopback.

Owns how a node is found, started, asked and ended.  It never imports rmqstore and never decodes a file of a queue.  Invariants:

- Everything of a node lies in its own home, a folder of the caller; no file of the system is read as configuration, and nothing
  listens but on 127.0.0.1.
- Whatever happens, no process outlives the interpreter: `close` ends node and port mapper, and where not even that comes to run
  (a killed interpreter), a watcher does, whose standard input then ends.
- Every call has a timeout.  A malformed directory does not fail a boot, it hangs it; `start` then ends the node and raises what
  the log says.

The name of the node is part of its data, so it is the same for all; ports and port mapper keep several apart.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

SERVER = Path("/usr/lib/rabbitmq/bin")
VERSION = "3.10."
NODE_NAME = "rmqs@localhost"
USER = "guest"
# Seconds that a boot may take on a busy machine; it takes four on an idle one, and one where the Erlang machine was kept.
BOOT_TIMEOUT = 60.0
STOP_TIMEOUT = 60.0
CALL_TIMEOUT = 60.0

# Ends what is left when the standard input ends, which is when the interpreter is gone.
_WATCHER = """
read -r _
for pid in $(cat "$0/rabbit.pid" 2>/dev/null) $(cat "$0/pids" 2>/dev/null); do kill -9 "$pid"; done 2>/dev/null
"""

_open_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


class NodeError(Exception):
    """A call of the node's tools failed; the text holds what they said."""


class NodeHungError(NodeError):
    """The node did not come up, which is what a malformed queue does to it; the text holds the errors in its log."""


class Received(NamedTuple):
    """A message as a client gets it; `properties` are those that are there, by their AMQP names."""

    body: bytes
    properties: dict[str, Any]
    redelivered: bool
    exchange: str
    routing_key: str


class Outgoing(NamedTuple):
    """A message to publish; `properties` are arguments of pika.BasicProperties."""

    body: bytes
    properties: Mapping[str, Any] = {}
    exchange: str = ""
    routing_key: str = ""


class Field(NamedTuple):
    """A value of a headers table that pika would send as another type: the letter of its type, and its bytes."""

    letter: str
    data: bytes


@functools.cache
def unavailable_reason() -> str | None:
    """Why there is no node to test with, or None."""
    if not (SERVER / "rabbitmq-server").exists():
        return "there is no RabbitMQ server: run ci/rabbitmq.sh"
    found = [path.name.rpartition("-")[2] for path in Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")]
    if not any(version.startswith(VERSION) for version in found):
        return f"RabbitMQ {', '.join(found) or 'of an unknown version'} is installed, not {VERSION}x"
    for program, what in (("epmd", "port mapper"), ("erl_call", "program for calls from outside")):
        if shutil.which(program) is None:
            return f"Erlang's {what} ({program}) is missing"
    try:
        import pika  # noqa: F401
    except ImportError:
        return "the client pika is missing: pip install --group test"
    return None


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody uses."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(number):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
        return ports


class Node:
    """A private node whose home is `home`; a context manager that ends it.

    Parameters
    ----------
    home : path
        A folder of its own; created.
    rabbit : mapping
        Settings of the application `rabbit` as texts of Erlang, for instance ``{"msg_store_file_size_limit": "65536"}``.
    log_level : str
        Of the log in `log_text`.
    """

    def __init__(
        self, home: str | os.PathLike[str], *, rabbit: Mapping[str, str] | None = None, log_level: str = "info"
    ):
        self.home = Path(home)
        self.data = self.home / "mnesia" / "db"
        self.port, self._dist_port, self._mapper_port = free_ports(3)
        for name in ("log", "mnesia", "gen"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        settings = ", ".join(f"{{{name}, {value}}}" for name, value in (rabbit or {}).items())
        for name, text in {
            "rabbitmq-env.conf": "",
            "rabbitmq.conf": f"log.file.level = {log_level}\ndisk_free_limit.absolute = 1MB\n",
            "advanced.config": f"[{{rabbit, [{settings}]}}].\n",
            "enabled_plugins": "[].\n",
        }.items():
            (self.home / name).write_text(text, encoding="ascii")
        cookie = self.home / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(secrets.token_hex(16), encoding="ascii")
            cookie.chmod(0o400)
        self._server: subprocess.Popen[bytes] | None = None
        self._mapper: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        # Check that the Erlang machine runs without the broker, and find the last start in the log.
        self._resting = False
        self._log_begin = 0
        _open_nodes.add(self)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _environment(self) -> dict[str, str]:
        home = os.fspath(self.home)
        loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        return kept | {
            "HOME": home,
            "RABBITMQ_NODENAME": NODE_NAME,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{loopback} +S 2:2",
            "RABBITMQ_CTL_ERL_ARGS": f"{loopback} +S 1:1",
            "RABBITMQ_MNESIA_BASE": f"{home}/mnesia",
            "RABBITMQ_MNESIA_DIR": os.fspath(self.data),
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_LOGS": f"{home}/log/rabbit.log",
            "RABBITMQ_PID_FILE": f"{home}/rabbit.pid",
            "RABBITMQ_CONF_ENV_FILE": f"{home}/rabbitmq-env.conf",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{home}/gen",
        }

    # Starting and ending

    @property
    def pid(self) -> int | None:
        """The process of the running node."""
        try:
            return int((self.home / "rabbit.pid").read_text())
        except (OSError, ValueError):
            return None

    @property
    def running(self) -> bool:
        """Check that the process is there, with the broker in it."""
        return self._process_runs and not self._resting

    @property
    def _process_runs(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def start(self, timeout: float = BOOT_TIMEOUT, *, patience: float | None = None) -> float:
        """Boot; the seconds until the node took connections.

        After `rest` the broker boots in the machine that was kept, which goes through the same recovery.

        Parameters
        ----------
        timeout : float
            Seconds after which a boot counts as hung.
        patience : float, optional
            Seconds after the first error in the log after which it counts as hung.

        Raises
        ------
        NodeHungError
            It did not come up, or ended; it was killed.
        """
        if self.running:
            raise NodeError("the node runs already")
        self._start_mapper()
        log = self.home / "log" / "rabbit.log"
        begin = time.monotonic()
        if self._process_runs:
            # The machine has the file open.
            self._log_begin = log.stat().st_size
            # Not waited for, since a boot may hang.
            self.eval("spawn(fun() -> rabbit:start() end), ok")
            self._resting = False
        else:
            (self.home / "rabbit.pid").unlink(missing_ok=True)
            log.unlink(missing_ok=True)
            self._log_begin, self._resting = 0, False
            with open(self.home / "log" / "output", "wb") as output:
                self._server = subprocess.Popen(
                    [SERVER / "rabbitmq-server"],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._note_pids()
        assert self._server is not None
        first_error = 0.0
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return time.monotonic() - begin
            now = time.monotonic()
            why = ""
            if self._server.poll() is not None:
                why = f"the node ended with code {self._server.returncode}"
            elif now - begin > timeout:
                why = f"the node did not come up within {timeout} s"
            elif patience is not None and not first_error and self.log_errors():
                first_error = now
            elif patience is not None and first_error and now - first_error > patience:
                why = f"the node did not come up within {patience} s of its first error"
            if why:
                self.kill9()
                errors = self.log_errors()
                raise NodeHungError("\n".join([why, *(errors[:40] or [self.log_text()[-2000:], self._output()])]))
            time.sleep(0.05)

    def _start_mapper(self) -> None:
        if self._mapper is not None and self._mapper.poll() is None:
            return
        self._mapper = subprocess.Popen(
            ["epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._watcher is None:
            self._watcher = subprocess.Popen(
                ["sh", "-c", _WATCHER, os.fspath(self.home)], stdin=subprocess.PIPE, start_new_session=True
            )
        deadline = time.monotonic() + CALL_TIMEOUT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._mapper_port), 1):
                return
            if time.monotonic() > deadline or self._mapper.poll() is not None:
                raise NodeError("Erlang's port mapper did not start")
            time.sleep(0.02)

    def _note_pids(self) -> None:
        # A negative number is a process group: that of the server's script, which has no pid file yet while it starts.
        groups = [-process.pid for process in (self._server, self._mapper) if process is not None]
        (self.home / "pids").write_text("\n".join(map(str, groups)))

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Stop in an orderly way and wait for the end."""
        pid = self.pid
        if not self.running or pid is None:
            raise NodeError("the node does not run")
        os.kill(pid, signal.SIGTERM)
        self._wait(timeout)

    def rest(self, timeout: float = STOP_TIMEOUT) -> None:
        """Stop the broker in an orderly way but keep its Erlang machine, which holds no file of the data then.

        The next `start` takes a second of processor time rather than seven, most of which are for loading code.
        """
        if not self.running:
            raise NodeError("the node does not run")
        # Its database is stopped with it, or the data must not be touched.
        answer = self.eval("{rabbit:stop(), mnesia:system_info(is_running)}", timeout)
        if answer != "{ok,no}":
            raise NodeError(f"the broker did not stop: {answer}")
        self._resting = True

    def kill9(self) -> None:
        """End the process as a power switch would, but for what the system has in its cache."""
        if self._server is None:
            return
        pid = self.pid
        if self._server.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
        self._wait(STOP_TIMEOUT)

    def _wait(self, timeout: float) -> None:
        assert self._server is not None
        pid = self.pid
        try:
            self._server.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise NodeError(f"the node did not end within {timeout} s") from error
        deadline = time.monotonic() + timeout
        # The script may be gone before its child; nobody may touch the data before that.
        while pid is not None and is_alive(pid):
            if time.monotonic() > deadline:
                raise NodeError(f"process {pid} of the node did not end within {timeout} s")
            time.sleep(0.02)
        (self.home / "rabbit.pid").unlink(missing_ok=True)
        self._server = None
        self._resting = False
        self._note_pids()

    def close(self) -> None:
        """End the node however it is, and its port mapper; the home stays."""
        _open_nodes.discard(self)
        with contextlib.suppress(NodeError):
            self.kill9()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
            self._mapper = None
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None

    # The log and the tools

    def log_text(self) -> str:
        """The log since the last start."""
        try:
            data = (self.home / "log" / "rabbit.log").read_bytes()[self._log_begin :]
            return data.decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def log_errors(self) -> list[str]:
        """Its lines of errors."""
        return [line for line in self.log_text().splitlines() if "[error]" in line or "[critical]" in line]

    def _output(self) -> str:
        return (self.home / "log" / "output").read_text(encoding="utf-8", errors="replace")[-2000:]

    def eval(self, code: str, timeout: float = CALL_TIMEOUT) -> str:
        """The value of an Erlang expression in the node, as it prints it.

        By Erlang's own small program in C: ``rabbitmqctl eval`` starts a machine of its own, most of a second of processor time.
        """
        command = [
            "erl_call",
            "-sname",
            NODE_NAME,
            "-c",
            (self.home / ".erlang.cookie").read_text(encoding="ascii"),
            "-e",
        ]
        # A binary is printed as the numbers of its bytes, whatever they are.
        text = f'unicode:characters_to_binary(io_lib:format("~0tp", [begin {code} end])).\n'
        try:
            done = subprocess.run(
                command,
                check=False,
                env=self._environment,
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise NodeError(f"{code[:200]} took over {timeout} s") from error
        found = re.fullmatch(r"\{ok, #Bin<([0-9,]*)>\}", done.stdout.strip())
        if done.returncode or found is None:
            raise NodeError(f"{code[:200]}: {done.stdout}{done.stderr}")
        return bytes(map(int, filter(None, found[1].split(",")))).decode("utf-8", "replace")

    # The data

    def vhost_path(self, vhost: str) -> Path:
        """The directory of a vhost."""
        return self.data / "msg_stores" / "vhosts" / vhost_directory(vhost)

    def save(self, target: Path) -> None:
        """Copy all data of the stopped node to `target`."""
        assert not self.running
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", os.fspath(self.data), os.fspath(target)], check=True)

    def restore(self, source: Path) -> None:
        """Put a copy that `save` made in the place of the stopped node's data."""
        assert not self.running
        shutil.rmtree(self.data, ignore_errors=True)
        subprocess.run(["cp", "-a", os.fspath(source), os.fspath(self.data)], check=True)

    def replace_vhost(self, vhost: str, source: Path) -> Path:
        """Put a copy of the directory `source` in the place of the stopped node's directory of a vhost; its path."""
        assert not self.running
        target = self.vhost_path(vhost)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", os.fspath(source), os.fspath(target)], check=True)
        return target

    def add_vhosts(self, vhosts: Iterable[str]) -> None:
        """Create vhosts that the client may use, in one call."""
        names = ", ".join(f'<<"{name}">>' for name in vhosts)
        code = (
            f'[begin ok = rabbit_vhost:add(V, <<"test">>), ok = rabbit_auth_backend_internal:set_permissions('
            f'<<"{USER}">>, V, <<".*">>, <<".*">>, <<".*">>, <<"test">>) end || V <- [{names}]], ok'
        )
        answer = self.eval(code)
        if answer != "ok":
            raise NodeError(answer)

    # The client

    @contextlib.contextmanager
    def channel(self, vhost: str = "/", *, timeout: float = 2 * CALL_TIMEOUT) -> Iterator[Any]:
        """A channel of pika on a connection of its own, which is cut after `timeout` seconds."""
        import pika
        import pika.exceptions

        parameters = pika.ConnectionParameters(
            "127.0.0.1",
            self.port,
            vhost,
            pika.PlainCredentials(USER, USER),
            heartbeat=0,
            blocked_connection_timeout=CALL_TIMEOUT,
            socket_timeout=CALL_TIMEOUT,
            stack_timeout=CALL_TIMEOUT,
        )
        connection = pika.BlockingConnection(parameters)
        # pika waits for answers without end; a node that gives none must not hang the run.
        timer = threading.Timer(timeout, _cut, (connection,))
        timer.daemon = True
        timer.start()
        try:
            yield connection.channel()
        finally:
            with contextlib.suppress(pika.exceptions.AMQPError):
                connection.close()
            timer.cancel()

    def publish(self, vhost: str, messages: Iterable[Outgoing], *, confirm: bool = True) -> None:
        """Publish; with `confirm` all of them are on the node's disk afterwards."""
        with self.channel(vhost) as channel:
            send(channel, messages, confirm=confirm)

    def depth(self, vhost: str, queue: str) -> int:
        """How many messages are ready."""
        with self.channel(vhost) as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    def get_all(self, vhost: str, queue: str, *, ack: bool = False, timeout: float = CALL_TIMEOUT) -> list[Received]:
        """All ready messages in order; they go back into the queue unless `ack` is given.

        Raises
        ------
        NodeError
            Fewer came than the queue said.
        """
        with self.channel(vhost) as channel:
            return receive(channel, queue, ack=ack, timeout=timeout)


def _cut(connection: Any) -> None:
    # Called in another thread, in which nothing of pika may be called; it notices that its socket has ended.
    with contextlib.suppress(OSError, AttributeError):
        connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)


def is_alive(pid: int) -> bool:
    """Check that such a process has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    # If only the first thread has ended, the others still have its files and ports open.
    return fields[0] != "Z" or int(fields[17]) > 1


def vhost_directory(vhost: str) -> str:
    """The name of a vhost's directory."""
    import hashlib

    number, text = int.from_bytes(hashlib.md5(vhost.encode(), usedforsecurity=False).digest(), "big"), ""
    while number:
        number, digit = divmod(number, 36)
        text = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit] + text
    return text


def send(channel: Any, messages: Iterable[Outgoing], *, confirm: bool = True) -> None:
    """Publish on a channel; with `confirm` wait until all have been confirmed, and so are on the node's disk."""
    import pika

    state = _confirmations(channel) if confirm else None
    _send_fields_of_any_type()
    for message in messages:
        properties = pika.BasicProperties(**{"delivery_mode": 2, **message.properties})
        channel._impl.basic_publish(message.exchange, message.routing_key, message.body, properties)
        if state is not None:
            state["sent"] += 1
    deadline = time.monotonic() + CALL_TIMEOUT
    while state is not None and state["confirmed"] < state["sent"]:
        channel.connection.process_data_events(0.05)
        if time.monotonic() > deadline:
            raise NodeError(f"{state['sent'] - state['confirmed']} messages were not confirmed")


@functools.cache
def _send_fields_of_any_type() -> None:
    # pika knows no way to send an unsigned byte, a short or a float in a table.
    import pika.data

    original = pika.data.encode_value

    def encode_value(pieces: list[bytes], value: Any) -> int:
        if isinstance(value, Field):
            pieces.append(value.letter.encode() + value.data)
            return 1 + len(value.data)
        return original(pieces, value)

    pika.data.encode_value = encode_value


def _confirmations(channel: Any) -> dict[str, int]:
    # pika's own confirming publish waits for each message; one wait for all of them is a hundred times as fast.
    state: dict[str, int] | None = getattr(channel, "confirmations", None)
    if state is None:
        state = channel.confirmations = {"sent": 0, "confirmed": 0, "ready": 0}

        def on_answer(frame: Any) -> None:
            state["confirmed"] = max(state["confirmed"], frame.method.delivery_tag)

        def on_ready(_: Any) -> None:
            state["ready"] = 1

        channel._impl.confirm_delivery(on_answer, on_ready)
        deadline = time.monotonic() + CALL_TIMEOUT
        while not state["ready"]:
            channel.connection.process_data_events(0.05)
            if time.monotonic() > deadline:
                raise NodeError("the node did not answer confirm.select")
    return state


def receive(
    channel: Any,
    queue: str,
    *,
    ack: bool | Callable[[int], bool] = False,
    limit: int = 0,
    timeout: float = CALL_TIMEOUT,
) -> list[Received]:
    """All ready messages of a queue, or the first `limit`; `ack` says, for all or by number in order, which are acknowledged.

    The others stay with the channel until it is closed, and are redelivered then.
    """
    expected = int(channel.queue_declare(queue, passive=True).method.message_count)
    if limit:
        expected = min(limit, expected)
        channel.basic_qos(prefetch_count=limit)
    found: list[tuple[Any, Received]] = []

    def on_message(_: Any, method: Any, properties: Any, body: bytes) -> None:
        there = {name: value for name, value in vars(properties).items() if value is not None}
        received = Received(body, there, method.redelivered, method.exchange, method.routing_key)
        found.append((method.delivery_tag, received))

    deadline = time.monotonic() + timeout
    tag = channel.basic_consume(queue, on_message)
    while len(found) < expected:
        channel.connection.process_data_events(0.05)
        if time.monotonic() > deadline:
            raise NodeError(f"of {expected} messages of {queue} only {len(found)} came")
    # Before the acknowledgements, so that nothing more comes.
    channel.basic_cancel(tag)
    for i, (delivery, _) in enumerate(found):
        if ack(i) if callable(ack) else ack:
            channel.basic_ack(delivery)
    # The answer to a question comes after what the channel did with the acknowledgements.
    channel.queue_declare(queue, passive=True)
    return [received for _, received in found]


@atexit.register
def _close_all() -> None:
    for node in list(_open_nodes):
        node.close()
