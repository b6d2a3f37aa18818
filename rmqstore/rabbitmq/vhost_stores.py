"""The two message stores of a vhost, as its reader has them.

Owns when they are opened, and that one which cannot be read says the same at every call.  They are opened read-only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import store_path

if TYPE_CHECKING:
    from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["VhostStores"]


class VhostStores:
    """The persistent and the transient message store of a vhost, each opened when it is first asked for."""

    def __init__(self, vhost: Vhost):
        self._vhost = vhost
        self._stores: dict[bool, MessageStore | None] = {}
        self._errors: dict[bool, OSError] = {}

    def get(self, persistent: bool) -> MessageStore | None:
        """Return a store, see `Vhost.store`."""
        if persistent in self._errors:
            raise self._errors[persistent].with_traceback(None)
        if persistent not in self._stores:
            path = store_path(self._vhost.path, persistent)
            try:
                self._stores[persistent] = self._open(path, persistent) if os.path.isdir(path) else None
                store = self._stores[persistent]
                # A node of 4.x compacts files in place: zeros and copies in the middle are no damage.
                if persistent and store is not None and store.problems and not store.clean and self._vhost.version_4:
                    store.close()
                    self._stores[persistent] = self._open(path, persistent, "bytewise")
            except OSError as error:
                self._stores.pop(persistent, None)
                self._errors[persistent] = error
                raise
        return self._stores[persistent]

    def _open(self, path: str, persistent: bool, scan: str = "auto") -> MessageStore:
        return MessageStore.open(
            path,
            read_only=True,
            # Nothing refers to a transient message but the queue that has it on disk.
            references=self._vhost.references if persistent else None,
            client_refs=self._vhost.client_refs() if persistent else None,
            scan=scan,
        )

    def close(self) -> None:
        """Close what is open."""
        for store in self._stores.values():
            if store is not None:
                store.close()
