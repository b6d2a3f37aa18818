"""Fixtures that hand out the vhosts of the golden cases of RabbitMQ.

Never imports rmqstore.  The session's fixture shares one unpacked copy of each case; at the end of the session sizes and
modification times are compared, so a test that wrote into a shared copy makes the run fail.
"""

from __future__ import annotations

import golden
import golden_rabbitmq
import golden_rabbitmq4
import pytest


def shared(unpack, folder):
    """Yield `unpack`, with each case unpacked once below `folder`; fail at the end if a test wrote into one."""
    roots = {}
    trees = {}

    def unpacked(case):
        if case not in roots:
            roots[case] = unpack(case, folder / case)
            trees[case] = golden.tree(roots[case])
        return roots[case]

    yield unpacked
    changed = [case for case, root in roots.items() if golden.tree(root) != trees[case]]
    assert not changed, f"a test wrote into the shared copy of {', '.join(changed)}; use the fixture of copies instead"


@pytest.fixture(scope="session")
def golden_vhost(tmp_path_factory):
    """A function `golden_vhost(case) -> Path`: the shared, unpacked vhost of `case`. Do not write into it."""
    yield from shared(golden_rabbitmq.unpack, tmp_path_factory.mktemp("golden-rabbitmq"))


@pytest.fixture
def golden_vhost_copy(tmp_path):
    """A function `golden_vhost_copy(case) -> Path`: a vhost of the test's own, writable; each call gives another one."""
    count = 0

    def copied(case):
        nonlocal count
        count += 1
        return golden_rabbitmq.unpack(case, tmp_path / f"vhost-{count}")

    return copied


@pytest.fixture(scope="session")
def golden_node(tmp_path_factory):
    """A function `golden_node(case) -> Path`: the shared, unpacked data directory of a 4.x node. Do not write into it."""
    yield from shared(golden_rabbitmq4.unpack, tmp_path_factory.mktemp("golden-rabbitmq4"))


@pytest.fixture
def golden_node_copy(tmp_path):
    """A function `golden_node_copy(case) -> Path`: a data directory of the test's own, writable."""
    return lambda case: golden_rabbitmq4.unpack(case, tmp_path / f"node-{case}")
