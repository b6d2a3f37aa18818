"""A pytest plugin: the fixture `message_store`, a fresh small store, and an assertion on the messages of a topic.

pytest loads it by itself where rmqstore is installed; `pytest -p no:rmqstore` switches it off.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rmqstore import MessageExt, MessageStore

__all__ = ["assert_messages", "message_store"]

# In memory a store opens and closes without waiting for a disk.
_MEMORY = "/dev/shm"


@pytest.fixture
def message_store() -> Iterator[MessageStore]:
    """Open a fresh store for writing, with small files in memory where the machine has `/dev/shm`, and delete it afterwards."""
    from rmqstore import MessageStore, StoreConfig

    folder = tempfile.mkdtemp(prefix="rmqstore-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    config = StoreConfig.embedded(
        mapped_file_size_commit_log=8 << 20, commit_log_growth_size=1 << 16, max_hash_slot_num=1000, max_index_num=4000
    )
    try:
        with MessageStore.open(os.path.join(folder, "store"), config=config) as store:
            yield store
    finally:
        shutil.rmtree(folder)


def assert_messages(
    store: MessageStore,
    topic: str,
    bodies: Iterable[bytes] | None = None,
    *,
    keys: Iterable[str] | None = None,
    tags: Iterable[str | None] | None = None,
) -> list[MessageExt]:
    """Assert what the messages of a topic are, in the order of the log, and return them.

    Parameters
    ----------
    bodies, tags : iterable, optional
        The expected body, or tag, of each message.
    keys : iterable of str, optional
        The expected keys of all messages, one after the other.
    """
    __tracebackhide__ = True
    messages = [message for message in store.messages() if message.topic == topic]
    if bodies is not None:
        found, expected = [message.body for message in messages], list(bodies)
        assert found == expected, f"bodies of {topic}: {found} instead of {expected}"
    if keys is not None:
        names, wanted = [key for message in messages for key in message.keys], list(keys)
        assert names == wanted, f"keys of {topic}: {names} instead of {wanted}"
    if tags is not None:
        given, chosen = [message.tags for message in messages], list(tags)
        assert given == chosen, f"tags of {topic}: {given} instead of {chosen}"
    return messages
