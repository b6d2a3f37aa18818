from collections.abc import Callable
from typing import Any, TypeVar

from rmqstore._core import FileStream, IndexRegion
from rmqstore._rows import RowBatch

_F = TypeVar("_F", bound=Callable[..., Any])

class FileEnd:
    def __init__(self, stream: FileStream, mapped_file: object) -> None: ...

class Appender:
    asked: int | None
    def __init__(
        self,
        batch: RowBatch,
        kind: type,
        result: type,
        clock: Callable[[], int] | None,
        after_put: Callable[[int, tuple[Any]], object],
        indexed: bool,
        index_tags: bool,
        max_ends: int = 1024,
    ) -> None: ...
    @property
    def writing(self) -> bool: ...
    def learn(self, log: FileEnd, index: IndexRegion | None, queue: int = -1, end: FileEnd | None = None) -> None: ...

def append_first(method: _F) -> _F: ...
