"""Bytes that a browser stores and does not show.

Owns sending them in parts, so that a reader that takes nothing is noticed and given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rmqstore.texts import escape

__all__ = ["Download"]

logger = logging.getLogger(__name__)

_DOWNLOAD_PART = 256 * 1024
# Seconds that a reader may take nothing; who sleeps does not keep others from downloading.
_DOWNLOAD_PATIENCE = 60


class Download(Response):
    """Bytes that a browser stores and does not show; `done` is called when they are sent, or cannot be."""

    def __init__(self, data: bytes, name: str, done: Callable[[], None] | None):
        super().__init__(
            data,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In parts, each of which waits until the one before it is on its way: a server takes in a whole body at once, and
        # would keep it for a reader that takes nothing, after this download was counted as sent.
        body = memoryview(self.body)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for first in range(0, len(body), _DOWNLOAD_PART):
                with anyio.fail_after(_DOWNLOAD_PATIENCE):
                    part = bytes(body[first : first + _DOWNLOAD_PART])
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            with anyio.fail_after(_DOWNLOAD_PATIENCE):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # The connection is closed by the server, since the body is not whole.
            logger.warning("a reader of %s took nothing for %d s", escape(scope["path"]), _DOWNLOAD_PATIENCE)
        finally:
            del body
            self.body = b""
            if self._done is not None:
                self._done()
