"""Types of the compiled module; tests/project/test_stub.py compares the two."""

import datetime as _datetime
import enum
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rmqstore._core import Region

_Bytes: TypeAlias = bytes | bytearray | memoryview
_Message = TypeVar("_Message", bound="MessageTerm")

BYTES_COLUMNS: Final[tuple[str, ...]]
FIELD_INTS: Final[dict[str, tuple[type[FieldInt], int, bool]]]
MESSAGE_COLUMNS: Final[tuple[str, ...]]
PROPERTY_NAMES: Final[tuple[str, ...]]

class RowStatus(enum.IntFlag):
    ROW_SOUND = 0
    ROW_DAMAGED = 1
    ROW_UNREADABLE = 2
    ROW_BAD_PROPERTIES = 3

class Atom(str):
    tag: int | None
    def __new__(cls, text: str, tag: int | None = None) -> Atom: ...

class Opaque:
    data: bytes
    def __init__(self, data: _Bytes) -> None: ...

class FieldInt(int):
    code: str
    def __new__(cls, value: int) -> FieldInt: ...

class Int8(FieldInt):
    code: str

class UInt8(FieldInt):
    code: str

class Int16(FieldInt):
    code: str

class UInt16(FieldInt):
    code: str

class UInt32(FieldInt):
    code: str

class Int64(FieldInt):
    code: str

class Timestamp(FieldInt):
    code: str
    @property
    def datetime(self) -> _datetime.datetime: ...

class Float32(float):
    def __new__(cls, value: float) -> Float32: ...

class Table(dict[str, Any]):
    pairs: tuple[tuple[str, Any], ...]
    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None: ...

class MessageTerm:
    @property
    def term(self) -> bytes: ...
    @classmethod
    def from_term(cls: type[_Message], term: _Bytes) -> _Message: ...
    def load(self, term: bytes) -> None: ...
    @property
    def form(self) -> str: ...
    @property
    def readable(self) -> bool: ...
    @property
    def body(self) -> bytes: ...
    @property
    def body_size(self) -> int: ...
    @property
    def properties(self) -> dict[str, Any]: ...
    @property
    def annotated(self) -> bool: ...
    @property
    def raw_properties(self) -> bytes | None: ...
    @property
    def properties_size(self) -> int: ...
    @property
    def exchange(self) -> str: ...
    @property
    def routing_keys(self) -> list[str]: ...
    @property
    def vhost(self) -> str | None: ...
    @property
    def msg_id(self) -> bytes | None: ...
    @property
    def persistent(self) -> bool: ...

class MessageColumns:
    columns: dict[str, Any]
    count: int
    utf8: dict[str, bool]
    def __init__(self, count: int, columns: dict[str, Any], utf8: dict[str, bool]) -> None: ...
    def __getitem__(self, name: str) -> Any: ...
    def __len__(self) -> int: ...

def extent(data: _Bytes, pos: int = 0) -> int: ...
def message_id_of(term: _Bytes) -> bytes | None: ...
def decode(data: _Bytes) -> Any: ...
def encode(value: Any) -> bytes: ...
def decode_table(data: _Bytes) -> dict[str, Any]: ...
def encode_table(table: dict[str, Any]) -> bytes: ...
def decode_properties(data: _Bytes) -> dict[str, Any]: ...
def encode_properties(properties: dict[str, Any]) -> bytes: ...
def message_term(
    body: bytes,
    properties: bytes,
    exchange: bytes,
    routing_keys: list[bytes],
    vhost: bytes,
    persistent: bool,
    msg_id: bytes,
) -> bytes: ...
def message_columns(
    sources: Region | _Bytes | Sequence[Region | _Bytes],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    numbers: NDArray[np.int32] | None = None,
    columns: Sequence[str] = ...,
) -> MessageColumns: ...
