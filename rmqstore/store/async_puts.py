"""Puts in an event loop: concurrent puts are written together, and share one flush where a put waits for the disk."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rmqstore.errors import InvalidMessageError
from rmqstore.message import Message, MessageExt
from rmqstore.store.results import PutResult, PutResults

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["AsyncPuts"]

_Waiting = list[tuple["Message | MessageExt", int, "asyncio.Future[PutResult]"]]


class AsyncPuts:
    """Put messages in an event loop; a base of `MessageStore`."""

    def _begin_async_puts(self) -> None:
        # The messages that wait, by event loop; a loop has an entry while a task of it puts.
        self._waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._put_thread: ThreadPoolExecutor | None = None

    def _end_async_puts(self) -> None:
        thread, self._put_thread = self._put_thread, None
        if thread is not None:
            thread.shutdown(wait=False)

    async def put_message_async(self, message: Message | MessageExt, queue_id: int = 0) -> PutResult:
        """Append a message like `put_message`, without blocking the event loop.

        Messages that many tasks put at the same time are written as one batch: with ``SYNC_FLUSH`` they share one flush.  If
        the task is cancelled, the message may still be put.
        """
        (result,) = await self.put_messages_async((message,), queue_id)
        return result

    async def put_messages_async(
        self, messages: Iterable[Message | MessageExt], queue_id: int | Sequence[int] = 0
    ) -> list[PutResult]:
        """Append messages in order, see `put_message_async`; an invalid one raises InvalidMessageError, the others are put."""
        import asyncio

        loop = asyncio.get_running_loop()
        given = list(messages)
        queue_ids = [queue_id] * len(given) if isinstance(queue_id, int) else queue_id
        futures: _Waiting = [(each, number, loop.create_future()) for each, number in zip(given, queue_ids, strict=True)]
        waiting = self._waiting.get(loop)
        if waiting is None:
            self._waiting[loop] = futures
            task = loop.create_task(self._put_waiting(loop))
            # A loop holds its tasks weakly.
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._end_task, loop, futures))
        else:
            waiting += futures
        results = await asyncio.gather(*(future for _, _, future in futures), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    async def _put_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        from concurrent.futures import ThreadPoolExecutor

        waiting: _Waiting = []
        try:
            while waiting := self._waiting[loop]:
                self._waiting[loop] = []
                if self._put_thread is None:
                    # A thread of its own: those of the loop's pool may all wait for these messages.
                    self._put_thread = ThreadPoolExecutor(1, thread_name_prefix="rmqstore-put")
                try:
                    outcomes = await loop.run_in_executor(self._put_thread, self._put_together, waiting)
                except RuntimeError:
                    # The thread ended, as the store was closed just now.
                    outcomes = self._put_together(waiting)
                for (_, _, future), outcome in zip(waiting, outcomes, strict=True):
                    if future.done():
                        continue
                    if isinstance(outcome, BaseException):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)
        finally:
            # If this task is cancelled, so are those that wait for it.
            _cancel(waiting + self._waiting.pop(loop))

    def _end_task(self, loop: asyncio.AbstractEventLoop, first: _Waiting, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting.get(loop) is first:
            # The task was cancelled before it began.
            _cancel(self._waiting.pop(loop))

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


def _cancel(waiting: _Waiting) -> None:
    for _, _, future in waiting:
        future.cancel()
