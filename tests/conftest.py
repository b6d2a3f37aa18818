"""Fixtures that hand out the golden stores, the `--slow` switch, and the hypothesis profiles.

Never imports rmqstore.  Session fixtures share one unpacked copy of each store, read-only by convention: at the end of
the session the sizes and modification times are compared, so a test that wrote into a shared copy makes the run fail.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import golden
import pytest
from hypothesis import HealthCheck, settings
from long_tests import LONG, NIGHTLY, SWEEPS
from scratch import SCRATCH

FORCING = {
    "test_consumer_offset", "test_durability", "test_put", "test_rebuild", "test_rebuild_rocksdb_queues", "test_retention",
    "test_versions",
}  # fmt: skip

# Some machines set these for every program, clean ones do not; they change when a process writes.
for _name in ("PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONIOENCODING"):
    os.environ.pop(_name, None)

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", settings.get_profile("ci"), derandomize=False, max_examples=2000)
# `pytest --hypothesis-profile=thorough` comes later and wins.
settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", default=False, help="also run the tests marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than a few seconds; runs only with --slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One process has all tests of a file, which share fixtures; all of Spark, which share a session; all of a RabbitMQ node.

    By path: the marks of pytest-xdist's own groups do not reach its scheduler with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            name = path.rpartition("/")[2]
            if "spark/" in path or name in ("test_spark_stream.py", "test_bulk_loaded.py"):
                return "spark"
            return "rabbitmq" if "interop/test_rabbitmq" in path else path

    return ByFile(config, log)


def pytest_ignore_collect(collection_path, config):
    """Leave out the modules of which `make test` runs no test: importing them takes time, too."""
    path = collection_path.relative_to(Path(__file__).parent).as_posix() if collection_path.suffix == ".py" else ""
    return True if "not long" in config.option.markexpr and path.startswith(LONG) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    seen = set()
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        family = f"{path}::{getattr(item, 'originalname', item.name)}"
        if f"{path}::{item.name}".startswith(LONG) or "browser" in getattr(item, "fixturenames", ()) or family in seen:
            item.add_marker(pytest.mark.long)
        elif family in SWEEPS:
            seen.add(family)
        if f"{path}::{item.name}".startswith(NIGHTLY):
            item.add_marker(pytest.mark.slow)
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: give --slow to run it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def golden_store(tmp_path_factory):
    """A function `golden_store(name) -> Path`: the shared, unpacked store `name`. Do not write into it."""
    roots = {}
    trees = {}

    def unpacked(name):
        if name not in roots:
            roots[name] = golden.unpack(name, tmp_path_factory.mktemp("golden") / name)
            trees[name] = golden.tree(roots[name])
        return roots[name]

    yield unpacked
    changed = [name for name, root in roots.items() if golden.tree(root) != trees[name]]
    assert not changed, f"a test wrote into the shared golden store {', '.join(changed)}; use golden_copy instead"


@pytest.fixture
def golden_copy(tmp_path):
    """A function `golden_copy(name) -> Path`: a store of the test's own, writable; each call gives another one."""
    count = 0

    def copied(name):
        nonlocal count
        count += 1
        return golden.unpack(name, tmp_path / f"copy-{count}")

    return copied


@pytest.fixture(scope="session")
def memory():
    """A folder in memory, where there is some; it goes at the end, when no test has anything replaced any more."""
    with tempfile.TemporaryDirectory(prefix="rmqstore-tests-", dir=SCRATCH) as folder:
        yield folder


@pytest.fixture
def tmp_path(request, tmp_path):
    """Make a folder for the test; in memory, if possible, for modules that sync stores often.

    On a disk that others write to such a test waits for their bytes.
    """
    if request.module.__name__ not in FORCING:
        return tmp_path
    return Path(tempfile.mkdtemp(dir=request.getfixturevalue("memory")))


@pytest.fixture(scope="session")
def vectors():
    """The test vectors T1..T17 as a dict."""
    return golden.vectors()


@pytest.fixture(scope="session")
def base(golden_store):
    """The shared store `base`: clean exit of the plain Java store."""
    return golden_store("base")


@pytest.fixture(scope="session")
def broker(golden_store):
    """The shared store of the real 5.5.0 broker after an orderly shutdown."""
    return golden_store("broker")


@pytest.fixture(scope="session")
def broker_killed(golden_store):
    """The shared store of the real 5.5.0 broker as a killed process leaves it."""
    return golden_store("broker.killed")
