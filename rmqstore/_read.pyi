from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from rmqstore._core import (
    FileStream,
    IndexRegion,
    MessageFields,
    OpenedIndexes,
    QueueTable,
    Region,
    Verdict,
    _DecodedRecord,
)

class StoredMessage(MessageFields):
    def __init__(self, record: _DecodedRecord) -> None: ...
    @property
    def _record(self) -> _DecodedRecord: ...
    @property
    def _born_host_stored(self) -> bytes: ...
    @property
    def _store_host_stored(self) -> bytes: ...
    @property
    def topic(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def body_stored(self) -> bytes: ...
    @property
    def properties(self) -> dict[str, str]: ...
    @property
    def properties_stored(self) -> bytes: ...
    @property
    def keys(self) -> list[str]: ...
    @property
    def tags(self) -> str | None: ...
    @property
    def unique_key(self) -> str | None: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def crc(self) -> int: ...
    def check_queue(self, topic: str, queue_id: int, queue_offset: int) -> bool: ...
    @property
    def corrupt(self) -> bool: ...
    @property
    def crc_agrees(self) -> bool: ...
    @property
    def queue_id(self) -> int: ...
    @property
    def queue_offset(self) -> int: ...
    @property
    def phy_offset(self) -> int: ...
    @property
    def flag(self) -> int: ...
    @property
    def sys_flag(self) -> int: ...
    @property
    def born_timestamp(self) -> int: ...
    @property
    def store_timestamp(self) -> int: ...
    @property
    def reconsume_times(self) -> int: ...
    @property
    def prepared_transaction_offset(self) -> int: ...

def adopt(kind: type[StoredMessage]) -> None: ...
_M = TypeVar("_M", bound=StoredMessage)
_L = TypeVar("_L", bound=list[Any])
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

def read_message(region: Region, pos: int, base_offset: int, kind: type[_M], check_crc: int = 1) -> _M | Verdict: ...
def read_messages(
    region: Region,
    pos: int,
    limit: int,
    base_offset: int,
    kind: type[_M],
    max_num: int,
    max_bytes: int,
    check_crc: int = 1,
) -> tuple[list[_M], int]: ...
def read_queued(
    units: Region,
    pos: int,
    num: int,
    segment: Region,
    base_offset: int,
    low: int,
    high: int,
    kind: type[_M],
    out: list[_M],
    size: int,
    max_num: int,
    max_bytes: int,
    check_crc: int,
    tags_codes: frozenset[int] | None,
    tags: frozenset[str] | None,
    topic: str,
    queue_id: int,
    first: int,
) -> tuple[int, int, int, bool, bool]: ...
def read_recent(stream: FileStream, phy_offset: int, kind: type[_M], check_crc: int) -> _M | None: ...
class QueueGets(Generic[_R]):
    def __init__(
        self,
        queues: QueueTable,
        queue_kind: type,
        log: FileStream,
        kind: type[StoredMessage],
        check_crc: int,
        result_kind: type[_R],
        status: object,
        num: int,
        max_bytes: int,
        interval: float,
        looks_ahead: bool,
    ) -> None: ...
    closed: bool
    def get(self, topic: str, queue_id: int, queue_offset: int, max_num: int) -> _R | None: ...

def get_first(method: _F) -> _F: ...
def find_messages(
    indexes: Iterable[IndexRegion],
    region_of: Callable[[int], tuple[Region, int, int, int] | None],
    topic: str,
    key: str,
    key_kind: int,
    begin: int,
    end: int,
    max_num: int,
    result_kind: type[_L],
    kind: type[_M],
    check_crc: int,
    encode: Callable[[str], bytes],
    log: FileStream | None = None,
) -> _L | None: ...

class KeyQuery(Generic[_L, _M]):
    def __init__(
        self,
        indexes: OpenedIndexes,
        region_of: Callable[[int], tuple[Region, int, int, int] | None],
        result_kind: type[_L],
        kind: type[_M],
        check_crc: int,
        encode: Callable[[str], bytes],
        log: FileStream,
        interval: float,
    ) -> None: ...
    looked_at: float
    closed: bool
    def find(self, topic: str, key: str, max_num: int) -> _L | None: ...

def query_first(method: _F) -> _F: ...

class KeySearch:
    def __init__(
        self,
        topic: str,
        key: str,
        key_kind: int,
        begin: int,
        end: int,
        max_num: int,
        messages: list[_M],
        kind: type[_M],
        check_crc: int,
        encode: Callable[[str], bytes],
        log: FileStream | None = None,
    ) -> None: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def descending(self) -> bool: ...
    def walk(
        self, index: IndexRegion, at: int, region_of: Callable[[int], tuple[Region, int, int, int] | None]
    ) -> int: ...
