"""The fixtures that hand out the peers; shared by every test that compares with the real RocketMQ or RabbitMQ."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import golden_rabbitmq
import pytest
import rabbitmq_images as image_vhosts
import rabbitmq_node as nodes
from peer import JavaBroker, JavaStore

# Its asserts say what differs, as those in the tests do.
pytest.register_assert_rewrite("answers")


@pytest.fixture(scope="session")
def java_store() -> Iterator[JavaStore]:
    """The Java store.  Without it a test is skipped with the reason; with CI=true it fails, since it must be there."""
    reason = JavaStore.unavailable_reason()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    with JavaStore() as store:
        yield store


@pytest.fixture(scope="session")
def java_broker(java_store) -> type[JavaBroker]:
    """The class `JavaBroker`, where it can be used; skipped or failed otherwise as `java_store` is."""
    return JavaBroker


# Nodes and their images take a third of it.
ROOM = 1 << 30


@pytest.fixture(scope="session")
def rabbitmq_home(tmp_path_factory) -> Iterator[Path]:
    """A folder for nodes and their images.  Without a server a test is skipped; with CI=true it fails.

    In memory where there is room: a node forces what it confirms to the disk, and nothing here depends on that, since a killed
    process leaves what the system has in its cache.
    """
    reason = nodes.unavailable_reason()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    memory = Path("/dev/shm")
    if not (os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM):
        yield tmp_path_factory.mktemp("rabbitmq")
        return
    home = Path(tempfile.mkdtemp(prefix="rmqstore-rabbitmq-", dir=memory))
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def rabbitmq_node(rabbitmq_home) -> Iterator[nodes.Node]:
    """The session's node, which a test finds stopped and leaves stopped; it has the settings of the images."""
    with nodes.Node(rabbitmq_home / "node", rabbit=image_vhosts.SETTINGS) as node:
        yield node


@pytest.fixture(scope="session")
def rabbitmq_base(rabbitmq_node, rabbitmq_home) -> image_vhosts.Images:
    """Images of a node's data with many vhosts alike (`rabbitmq_images.py`), and empty ones for the golden cases; read-only.

    Put one in place with ``rabbitmq_node.restore(rabbitmq_base.killed)``.
    """
    golden = {
        manifest["vhost"]: {name: entry["args"] for name, entry in manifest["queues"].items()}
        for manifest in map(golden_rabbitmq.manifest, golden_rabbitmq.cases())
    }
    return image_vhosts.build(rabbitmq_node, rabbitmq_home / "images", more=golden)
