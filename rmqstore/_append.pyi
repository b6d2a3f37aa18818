from collections.abc import Callable
from typing import Any

from rmqstore._core import FileStream, IndexRegion
from rmqstore._rows import RowBatch

class FileEnd:
    def __init__(self, stream: FileStream, mapped_file: object) -> None: ...

class Appender:
    asked: int | None
    def __init__(
        self,
        state: object,
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
    def put(self, message: object, queue_id: int = 0) -> Any: ...
    def learn(self, log: FileEnd, index: IndexRegion | None, queue: int = -1, end: FileEnd | None = None) -> None: ...
