"""A thread that flushes a queue index after a while without actions, as a node does before its queue hibernates.

Owns its thread and nothing of the index: it calls `QueueIndex.idle` and never keeps the index alive.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from rmqstore.errors import StoreError

if TYPE_CHECKING:
    from rmqstore.rabbitmq.queue_index import QueueIndex

__all__ = ["IdleThread"]

logger = logging.getLogger(__name__)


class IdleThread:
    """Calls `QueueIndex.idle` when nothing was done for a while; it never keeps the index alive."""

    def __init__(self, index: QueueIndex, interval: float):
        self._index = weakref.ref(index)
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmqstore-rabbitmq-idle", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait = self._interval
        while not self._stopping.wait(wait):
            index = self._index()
            if index is None:
                return
            wait = self._interval
            since = time.monotonic() - index._last_action
            if since < self._interval:
                wait = self._interval - since
            elif index.dirty_count:
                try:
                    index.idle()
                except StoreError:
                    return
                except OSError as error:
                    logger.error("%s could not be flushed: %s", index.path, error)
                    return
            del index

    def stop(self) -> None:
        """End the thread; waits for it unless the thread itself asks."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
