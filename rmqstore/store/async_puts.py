"""Puts in an event loop: concurrent puts are written together, and share one flush where a put waits for the disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rmqstore.errors import InvalidMessageError
from rmqstore.message import Message, MessageExt
from rmqstore.store.results import PutResult, PutResults

if TYPE_CHECKING:
    import asyncio

__all__ = ["AsyncPuts"]

_Waiting = list[tuple["Message | MessageExt", int, "asyncio.Future[PutResult]"]]


class AsyncPuts:
    """Put messages in an event loop; a base of `MessageStore`."""

    def _begin_async_puts(self) -> None:
        # The messages that wait, by event loop, and the task of the loop that puts them: a loop holds tasks weakly.
        self._waiting: weakref.WeakKeyDictionary[Any, _Waiting] = weakref.WeakKeyDictionary()
        self._tasks: weakref.WeakKeyDictionary[Any, asyncio.Task[None]] = weakref.WeakKeyDictionary()

    async def put_message_async(self, message: Message | MessageExt, queue_id: int = 0) -> PutResult:
        """Append a message like `put_message`, without blocking the event loop.

        Messages that many tasks put at the same time are written as one batch: with ``SYNC_FLUSH`` they share one flush.  If
        the task is cancelled, the message may still be put.
        """
        (result,) = await self.put_messages_async((message,), queue_id)
        return result

    async def put_messages_async(
        self, messages: Iterable[Message | MessageExt], queue_id: int = 0
    ) -> list[PutResult]:
        """Append messages in order, see `put_message_async`; an invalid one raises InvalidMessageError, the others are put."""
        import asyncio

        loop = asyncio.get_running_loop()
        futures = [(message, queue_id, loop.create_future()) for message in messages]
        waiting = self._waiting.get(loop)
        if waiting is None:
            self._waiting[loop] = futures
            self._tasks[loop] = loop.create_task(self._put_waiting(loop))
        else:
            waiting += futures
        results = await asyncio.gather(*(future for _, _, future in futures), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    async def _put_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        while waiting := self._waiting[loop]:
            self._waiting[loop] = []
            outcomes = await asyncio.to_thread(self._put_together, waiting)
            for (_, _, future), outcome in zip(waiting, outcomes, strict=True):
                if future.cancelled():
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
        del self._waiting[loop], self._tasks[loop]

    def _put_together(self, waiting: _Waiting) -> list[PutResult | BaseException]:
        try:
            return list(self.put_messages([message for message, _, _ in waiting], [queue_id for _, queue_id, _ in waiting]))
        except InvalidMessageError as error:
            if len(waiting) == 1:
                return [error]
        except Exception as error:
            return [error] * len(waiting)
        # Nothing was written: put the halves, so that one invalid message costs few flushes.
        middle = len(waiting) // 2
        return self._put_together(waiting[:middle]) + self._put_together(waiting[middle:])

    def put_messages(self, messages: Iterable[Message | MessageExt], queue_id: Any = 0) -> PutResults:
        """See `MessageStore.put_messages`."""
        raise NotImplementedError
