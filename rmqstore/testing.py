"""A pytest plugin: the fixture `message_store`, a fresh small store, and an assertion on the messages of a topic.

Load it by ``pytest_plugins = ["rmqstore.testing"]`` in a `conftest.py`, or by `pytest -p rmqstore.testing`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rmqstore.message import MessageExt
    from rmqstore.store.message_store import MessageStore

__all__ = ["assert_messages", "message_store"]

# In memory a store opens and closes without waiting for a disk.
_MEMORY = "/dev/shm"


@pytest.fixture
def message_store() -> Iterator[MessageStore]:
    """Open a fresh store for writing, with small files in memory where the machine has `/dev/shm`, and delete it afterwards."""
    from rmqstore.config import StoreConfig
    from rmqstore.store.message_store import MessageStore

    folder = tempfile.mkdtemp(prefix="rmqstore-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    config = StoreConfig.embedded(
        mapped_file_size_commit_log=8 << 20, commit_log_growth_size=1 << 16, max_hash_slot_num=1000, max_index_num=4000
    )
    try:
        with MessageStore.open(os.path.join(folder, "store"), config=config) as store:
            yield store
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def assert_messages(
    store: MessageStore,
    topic: str,
    bodies: Iterable[bytes] | None = None,
    *,
    keys: Iterable[str] | str | None = None,
    tags: Iterable[str | None] | None = None,
) -> list[MessageExt]:
    """Assert what the messages of a topic are, in the order of the log, and return them.

    Parameters
    ----------
    bodies, tags : iterable, optional
        The expected body, or tag, of each message.
    keys : iterable of str, or str, optional
        The expected keys of all messages, one after the other; one string is split at spaces.
    """
    __tracebackhide__ = True
    messages = [message for message in store.messages() if message.topic == topic]
    if bodies is not None:
        found, expected = [message.body for message in messages], list(bodies)
        assert found == expected, f"bodies of {topic}: {found} instead of {expected}"
    if keys is not None:
        names = [key for message in messages for key in message.keys]
        wanted = keys.split() if isinstance(keys, str) else list(keys)
        assert names == wanted, f"keys of {topic}: {names} instead of {wanted}"
    if tags is not None:
        given, chosen = [message.tags for message in messages], list(tags)
        assert given == chosen, f"tags of {topic}: {given} instead of {chosen}"
    return messages
