"""A standalone Spark cluster on this machine: a master and workers as processes of their own, and the wheel for its tasks.

Owns the processes that it starts, their logs and work folders, and the archive with the environment of the tasks.  They are
started with the classes of the installed pyspark, listen on the loopback address only, and take free ports.  Invariants:

- Every process is the first of a session of its own, so that whatever it starts (executors, their Python processes, which
  leave its process group) can be found and ended with it.
- All of them end: by `stop`, or, where the tests themselves are killed, by a signal that the system sends in their name.
- Tasks run the wheel of this project out of the archive, never the checkout: no path of the checkout reaches an executor.

It never touches a cluster that it did not start, and knows nothing of RocketMQ.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spark_setting import JAVA_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1"
# Packages that the Python of a task needs next to the wheel; pyspark itself comes with the executor.
PACKAGES = ("numpy", "pyarrow")
# Seconds until a daemon has started on a machine that is busy.
PATIENCE = 240
# The switch of Linux by which a process gets a signal when its parent is gone.
_PR_SET_PDEATHSIG = 1


def spark_home() -> Path:
    """The folder of the installed pyspark, which holds a whole Spark."""
    import pyspark

    return Path(pyspark.__file__).resolve().parent


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def processes_of_session(session: int) -> dict[int, str]:
    """The processes of a session by id, with their command lines; without zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # The name is in parentheses and may contain anything; after it: state, parent, group, session.
            state, _, _, sid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # It is gone.
        if int(sid) == session and state != "Z":
            found[int(entry)] = command
    return found


class Daemon:
    """A master or a worker: `spark-class` in a session of its own, its output in a file."""

    def __init__(self, name: str, folder: Path, arguments: Iterable[str], environment: dict[str, str]):
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(spark_home() / "bin" / "spark-class"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_for(self, pattern: str) -> str:
        """The first group of what its log matches, once it does.

        Raises
        ------
        RuntimeError
            It ended, or took too long; holds the end of the log.
        """
        until = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.log.read_text(errors="replace"))
            if found:
                return found[1] if found.groups() else found[0]
            if ended or time.monotonic() > until:
                raise RuntimeError(
                    f"{self.name} {'ended' if ended else 'is not ready'}:\n{self.log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """All processes that belong to it, itself included."""
        return processes_of_session(self.process.pid)

    def kill(self) -> list[int]:
        """End it and all that it started with SIGKILL, at one moment as far as that is possible; the ids."""
        killed: list[int] = []
        # The next round finds processes that start while this list is made.
        while there := self.processes():
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += [pid for pid in there if pid not in killed]
            if self.process.poll() is None:
                self.process.wait()
            time.sleep(0.02)
        self.process.wait()
        return killed


class Cluster:
    """A master and workers; usable in a ``with`` statement.

    Parameters
    ----------
    folder : Path
        An empty folder for logs and for what executors write.
    workers : int
        How many.
    cores, memory : int, str
        Of each worker.
    """

    def __init__(self, folder: Path, workers: int = 2, cores: int = 1, memory: str = "2g"):
        self.folder = folder
        self.cores, self.memory = cores, memory
        self.workers: list[Daemon] = []
        self._number = 0
        # Nothing of the tests' own Python reaches a task: an executor inherits the environment of its worker.
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))
        }
        self.environment = kept | {
            "SPARK_HOME": str(spark_home()),
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_CONF_DIR": str(folder / "conf"),
        }
        for name in ("local", "conf"):
            (folder / name).mkdir(parents=True)
        self.master = self._daemon("master", "master.Master", "--host", LOOPBACK, "--port", "0", "--webui-port", "0")
        try:
            self.url = self.master.wait_for(r"Starting Spark master at (spark://[\w.]+:\d+)")
            self.master.wait_for(r"I have been elected leader")
            for worker in [self.start_worker(wait=False) for _ in range(workers)]:
                worker.wait_for("Successfully registered with master")
        except BaseException:
            self.stop()
            raise

    def _daemon(self, name: str, of: str, *arguments: str) -> Daemon:
        return Daemon(name, self.folder, [f"org.apache.spark.deploy.{of}", *arguments], self.environment)

    def start_worker(self, wait: bool = True) -> Daemon:
        """A further worker."""
        self._number += 1
        name = f"worker-{self._number}"
        worker = self._daemon(
            name, "worker.Worker", "--host", LOOPBACK, "--port", "0", "--webui-port", "0", "--cores", str(self.cores),
            "--memory", self.memory, "--work-dir", str(self.folder / name), self.url,
        )  # fmt: skip
        self.workers.append(worker)
        if wait:
            worker.wait_for("Successfully registered with master")
        return worker

    def kill_worker(self, worker: Daemon) -> list[int]:
        """SIGKILL for a worker, its executors and their Python processes; the ids."""
        self.workers.remove(worker)
        return worker.kill()

    def stop(self) -> None:
        """End everything."""
        for daemon in [*self.workers, self.master]:
            daemon.kill()
        self.workers.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


# ---------------------------------------------------------------------------------------------------------------------
# What tasks run


def build_wheel(folder: Path) -> Path:
    """The wheel of this project, with the compiled core that these tests import, made in `folder`."""
    import rmqstore._core

    package = Path(rmqstore._core.__file__).parent
    base = folder / "build"
    # A build finds each compiled module where it would put it, newer than its sources, and compiles none once more.
    for source in (ROOT / "rmqstore").rglob("*.pyx"):
        inside = source.parent.relative_to(ROOT / "rmqstore")
        (module,) = (package / inside).glob(source.stem + sysconfig.get_config_var("EXT_SUFFIX"))
        library = base / "lib" / "rmqstore" / inside
        library.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, library / module.name)
    subprocess.run(
        [
            sys.executable, "setup.py", "-q", "build", "--build-base", str(base), "--build-lib", str(base / "lib"),
            "egg_info", "--egg-base", str(base),
            "bdist_wheel", "--bdist-dir", str(base / "wheel"), "--dist-dir", str(folder),
        ],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def link_package(name: str, target: Path) -> None:
    """Put an installed package into a folder of packages, by links to its folders: executors run on this machine."""
    files = importlib.metadata.distribution(name).files or ()
    # Scripts lie above the folder of packages.
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        (target / top).symlink_to(importlib.metadata.distribution(name).locate_file(top))


def make_environment(folder: Path, packages: Iterable[str] = PACKAGES) -> Path:
    """An archive of a virtual environment with the wheel, and with links to what it needs, for ``spark.archives``."""
    import venv_pack

    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    for name in packages:
        link_package(name, site_packages)
    wheel = build_wheel(folder)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check",
            "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel),
        ],
        check=True,
    )  # fmt: skip
    # Spark unpacks a .tar.gz with the system's tar; a plain .tar it unpacks by itself, and stumbles over symbolic links.
    archive = folder / "environment.tar.gz"
    venv_pack.pack(prefix=str(environment), output=str(archive), compress_level=1)
    return archive


class Driver:
    """A process that runs the jobs of cluster_driver.py on a cluster, as they are asked for; usable in a ``with`` statement.

    Parameters
    ----------
    cluster : Cluster
    archive : Path
        Of `make_environment`.
    settings : dict of str to str
        Of the session.
    """

    def __init__(self, cluster: Cluster, archive: Path, settings: dict[str, str]):
        self.log = cluster.folder / "driver.log"
        own = {
            "spark.archives": f"{archive}#environment",
            "spark.executor.cores": str(cluster.cores),
            "spark.executor.memory": "1g",
            "spark.local.dir": str(cluster.folder / "local"),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("cluster_driver.py")), cluster.url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Spark runs the Python of a data source here too, to plan a job, by the same relative name.
                cwd=archive.parent,
                env={
                    **os.environ,
                    "PYSPARK_PYTHON": "./environment/bin/python",
                    "PYSPARK_DRIVER_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": LOOPBACK,
                    "RMQSTORE_SPARK_SETTINGS": json.dumps(settings | own),
                },
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def send(self, job: str, **arguments: Any) -> None:
        """Ask for a job."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The next thing that it says.

        Raises
        ------
        RuntimeError
            It ended or reports an error; holds the end of its log.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Whatever else is on the stream is not ours.
            if line.startswith("@"):
                said = json.loads(line[1:])
                if "error" not in said:
                    return said
                raise RuntimeError(f"{said['error']}\n{self.log.read_text(errors='replace')[-2000:]}")
        raise RuntimeError(f"the driver ended:\n{self.log.read_text(errors='replace')[-4000:]}")

    def run(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Ask for a job and wait for its answer."""
        self.send(job, **arguments)
        return self.receive()

    def close(self) -> None:
        """End it, and the JVM that it started."""
        for pid in processes_of_session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
