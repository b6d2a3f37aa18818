"""Fixtures of tests under the layer: the server of their children, and folders next to its files.

A test module gives the fixtures that it uses their names in itself.  What must hold in a store afterwards is the tests' business.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from scratch import SCRATCH

from . import Server, build_library


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The process that forks the children of one module's tests."""
    scratch = tempfile.mkdtemp(prefix="rmqstore-faults-", dir=SCRATCH)
    try:
        with Server(build_library(scratch), scratch) as running:
            yield running
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def folder(server: Server, name: str) -> Iterator[str]:
    path = os.path.join(server.scratch, name)
    os.mkdir(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def root(server: Server) -> Iterator[str]:
    """An empty folder for a child's store."""
    yield from folder(server, "store")


@pytest.fixture
def copy(server: Server) -> Iterator[str]:
    """An empty folder for what may be left of that store."""
    yield from folder(server, "copy")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Return True if every case is to be tried, as with `--slow`."""
    return request.config.getoption("--slow")


def emptied(root: str) -> str:
    """The same folder with nothing in it."""
    shutil.rmtree(root)
    os.mkdir(root)
    return root
