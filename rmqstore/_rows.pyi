from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rmqstore._core import FileStream, IndexRegion, Region
from rmqstore._dispatch import RecordColumns, TopicTable

_Int64s: TypeAlias = npt.NDArray[np.int64]

_T = TypeVar("_T", bound=tuple[Any, ...])
_Rows = TypeVar("_Rows", bound=PlacedRows[Any])

class TextColumn:
    def __init__(self, offsets: Any = None, data: Any = None, validity: Any = None, first: int = 0) -> None: ...

class ListColumn:
    def __init__(
        self,
        texts: TextColumn,
        offsets: _Int64s | None = None,
        validity: Any = None,
        first: int = 0,
        num: int = 0,
    ) -> None: ...

class NumberColumn:
    def __init__(
        self, values: int | _Int64s = 0, valid: npt.NDArray[np.bool_] | None = None, given: bool = True
    ) -> None: ...

class TableRows:
    def __init__(
        self,
        num: int,
        *,
        topic: TextColumn,
        body: TextColumn,
        tags: TextColumn,
        keys: ListColumn,
        properties: ListColumn,
        values: TextColumn,
        queue_id: NumberColumn,
        flag: NumberColumn,
        sys_flag: NumberColumn,
        reconsume_times: NumberColumn,
        prepared_transaction_offset: NumberColumn,
        born_timestamp: NumberColumn,
        hosts: list[bytes],
        born_host: NumberColumn,
        store_host: NumberColumn,
        keys_joined: bool = False,
    ) -> None: ...
    @property
    def num(self) -> int: ...

class RowBatch:
    def __init__(
        self,
        topics: TopicTable,
        store_host: bytes,
        hosts: dict[str, bytes],
        max_body_size: int,
        max_topic_size: int = 255,
        prop_crc: bool = False,
    ) -> None: ...
    @property
    def topics(self) -> TopicTable: ...
    @property
    def count(self) -> int: ...
    @property
    def prepared(self) -> bool: ...
    def clear(self) -> None: ...
    def take_messages(
        self, messages: list[Any], queue_ids: int | list[int], first: int, kind: type
    ) -> tuple[int, int]: ...
    def take_columns(self, table: TableRows, first: int) -> tuple[int, int]: ...
    def take_prepared(self, rows: list[tuple[Any, ...]]) -> None: ...
    def queues(self) -> list[tuple[int, int]]: ...
    def number(self, following: dict[int, int], store_timestamp: int, timestamps: _Int64s | array[int]) -> None: ...
    def room(self, left: int, segment_size: int, together: bool = False) -> tuple[int, int, int]: ...
    def encode(self, region: Region, pos: int, base_offset: int, first: int) -> tuple[int, int]: ...
    def placed(self) -> bytes: ...
    def fill_columns(self, columns: RecordColumns, first: int, index_tags: bool = True) -> int: ...
    def columns(self) -> tuple[_Int64s, _Int64s, _Int64s, _Int64s]: ...

class PlacedRows(Generic[_T]):
    def __init__(self, rows: Iterable[_T] = ()) -> None: ...
    @classmethod
    def of(cls: type[_Rows], placed: bytes, kind: type[tuple[Any, ...]], num: int) -> _Rows: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, place: SupportsIndex) -> _T: ...
    @overload
    def __getitem__(self, place: slice) -> list[_T]: ...
    def __iter__(self) -> Iterator[_T]: ...
    def __add__(self, other: list[_T] | PlacedRows[_T]) -> list[_T]: ...

class FileEnd:
    def __init__(self, stream: FileStream, mapped_file: object | None = None) -> None: ...
    @property
    def mapped_file(self) -> Any: ...
    @property
    def following(self) -> int: ...
    def learn(self, mapped_file: object | None, following: int = -1) -> None: ...

def settle(columns: RecordColumns, chosen: npt.NDArray[np.uint8], append: bool) -> tuple[int, int, int]: ...

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
    ) -> None: ...
    @property
    def writing(self) -> bool: ...
    def put(self, message: object, queue_id: int = 0) -> Any: ...
    def learn(self, log: FileEnd, index: IndexRegion | None) -> None: ...
