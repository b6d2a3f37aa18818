from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Int32s: TypeAlias = npt.NDArray[np.int32]
_Int64s: TypeAlias = npt.NDArray[np.int64]

# What the core uses of a pyarrow.Array and a pyarrow.ChunkedArray of string or large_string.
class _ArrowArray(Protocol):
    @property
    def type(self) -> Any: ...
    @property
    def offset(self) -> int: ...
    @property
    def null_count(self) -> int: ...
    def buffers(self) -> Sequence[Any]: ...
    def __len__(self) -> int: ...

class _ArrowChunkedArray(Protocol):
    @property
    def type(self) -> Any: ...
    @property
    def chunks(self) -> Sequence[Any]: ...

_Keys: TypeAlias = Iterable[str] | npt.NDArray[Any] | _ArrowArray | _ArrowChunkedArray

# topic, body, properties, born_host, store_host, queue_id, flag, sys_flag, reconsume_times, version, queue_offset,
# born_timestamp, store_timestamp, prepared_transaction_offset
_EncodeRow: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, int, int, int, int, int, int, int, int, int]

# total_size, version, body_crc, queue_id, flag, queue_offset, phy_offset, sys_flag, born_timestamp, born_host,
# store_timestamp, store_host, reconsume_times, prepared_transaction_offset, body, topic, properties, crc_ok
_DecodedRecord: TypeAlias = tuple[
    int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, bytes, str, bytes, bool
]

class RecordLayout(IntEnum):
    RECORD_TOTAL_SIZE = 0
    RECORD_MAGIC = 4
    RECORD_BODY_CRC = 8
    RECORD_QUEUE_ID = 12
    RECORD_FLAG = 16
    RECORD_QUEUE_OFFSET = 20
    RECORD_PHY_OFFSET = 28
    RECORD_SYS_FLAG = 36
    RECORD_BORN_TIMESTAMP = 40
    RECORD_BORN_HOST = 48
    RECORD_FIXED_SIZE = 91
    RECORD_HOST_V6_EXTRA = 12
    BLANK_SIZE = 8
    PROP_CRC_SIZE = 20

class UnitLayout(IntEnum):
    UNIT_PHY_OFFSET = 0
    UNIT_RECORD_SIZE = 8
    UNIT_TAGS_CODE = 12
    UNIT_SIZE = 20

class BatchUnitLayout(IntEnum):
    BATCH_UNIT_PHY_OFFSET = 0
    BATCH_UNIT_RECORD_SIZE = 8
    BATCH_UNIT_TAGS_CODE = 12
    BATCH_UNIT_STORE_TIMESTAMP = 20
    BATCH_UNIT_BASE_OFFSET = 28
    BATCH_UNIT_BATCH_NUM = 36
    BATCH_UNIT_COMPACTED_OFFSET = 38
    BATCH_UNIT_RESERVED = 42
    BATCH_UNIT_SIZE = 46

class ExtUnitLayout(IntEnum):
    EXT_UNIT_LENGTH = 0
    EXT_UNIT_TAGS_CODE = 2
    EXT_UNIT_STORE_TIMESTAMP = 10
    EXT_UNIT_BITMAP_LENGTH = 18
    EXT_UNIT_MIN_SIZE = 20

class IndexLayout(IntEnum):
    INDEX_BEGIN_TIMESTAMP = 0
    INDEX_END_TIMESTAMP = 8
    INDEX_BEGIN_PHY_OFFSET = 16
    INDEX_END_PHY_OFFSET = 24
    INDEX_HASH_SLOT_COUNT = 32
    INDEX_COUNT = 36
    INDEX_HEADER_SIZE = 40
    SLOT_SIZE = 4
    ENTRY_KEY_HASH = 0
    ENTRY_PHY_OFFSET = 4
    ENTRY_TIME_DIFF = 12
    ENTRY_PREV_INDEX = 16
    ENTRY_SIZE = 20

class CheckpointLayout(IntEnum):
    CHECKPOINT_PHYSIC_MSG_TIMESTAMP = 0
    CHECKPOINT_LOGICS_MSG_TIMESTAMP = 8
    CHECKPOINT_INDEX_MSG_TIMESTAMP = 16
    CHECKPOINT_MASTER_FLUSHED_OFFSET = 24
    CHECKPOINT_CONFIRM_PHY_OFFSET = 32
    CHECKPOINT_LOGICS_PHYSICAL_OFFSET = 40
    CHECKPOINT_SIZE = 4096

class Verdict(IntEnum):
    EMPTY = 0
    RECORD = 1
    BLANK = 2
    COLUMNS_FULL = 3
    LIMIT = 4
    BAD_MAGIC = -1
    BAD_SIZE = -2
    BAD_LENGTH = -3
    BAD_PHY_OFFSET = -4
    BAD_BODY_CRC = -5
    BAD_PROP_CRC = -6

MAGIC_V1: Final[int]
MAGIC_V2: Final[int]
MAGIC_BLANK: Final[int]
PRE_FILL_SIZE: Final[int]
EXT_ADDRESS_MAX: Final[int]
EXT_ADDRESS_BASE: Final[int]

class Region:
    def __init__(self) -> None: ...
    @staticmethod
    def map(fd: int, size: int, writable: bool = False, padded: bool = False) -> Region: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def pins(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    def __len__(self) -> int: ...
    def read(self, pos: int, size: int) -> bytes: ...
    def view(self, pos: int, size: int) -> memoryview: ...
    def write(self, pos: int, data: Buffer) -> None: ...
    def zero(self, pos: int, size: int) -> None: ...
    def last_nonzero(self, pos: int, size: int) -> int: ...
    def flush(self, pos: int = 0, size: int = -1) -> None: ...
    def advise(self, how: str) -> None: ...
    def populate(self, pos: int, size: int) -> bool: ...
    def release_pages(self, pos: int, size: int) -> None: ...
    def get_i16(self, pos: int) -> int: ...
    def get_i32(self, pos: int) -> int: ...
    def get_i64(self, pos: int) -> int: ...

class RegionView:
    def __init__(self, region: Region, pos: int, size: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def java_string_hash(text: str) -> int: ...
def java_string_hash_bytes(data: bytes) -> int: ...
def index_key_hash(topic: str, key: str) -> int: ...
def crc32(data: Buffer) -> int: ...

crc32_implementation: Final[str]

def crc32_implementations() -> tuple[str, ...]: ...
def crc32_with(name: str, data: Buffer, value: int = 0) -> int: ...

class IndexRegion:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def region(self) -> Region: ...
    @property
    def slot_num(self) -> int: ...
    @property
    def index_num(self) -> int: ...
    damaged: bool
    is_distrusted: bool
    def attach(self, region: Region, slot_num: int, index_num: int) -> None: ...
    def put_key(self, key: str, phy_offset: int, store_timestamp: int) -> bool: ...
    def put_hash(self, key_hash: int, phy_offset: int, store_timestamp: int) -> bool: ...
    def put_keys(self, keys: _Keys, phy_offsets: npt.ArrayLike, store_timestamps: npt.ArrayLike) -> int: ...
    def put_hashes(self, hashes: _Int32s, phy_offsets: _Int64s, store_timestamps: _Int64s) -> int: ...
    def select_phy_offset(self, key: str, max_num: int = 64, begin: int = 0, end: int = ...) -> list[int]: ...
    def select_hash(self, key_hash: int, max_num: int = 64, begin: int = 0, end: int = ...) -> list[int]: ...
    def select_phy_offsets(
        self, keys: _Keys, max_num: int = 64, begin: int = 0, end: int = ...
    ) -> tuple[_Int64s, _Int64s]: ...
    def select_hashes(
        self, hashes: _Int32s, max_num: int = 64, begin: int = 0, end: int = ...
    ) -> tuple[_Int64s, _Int64s]: ...
    def select_chain(self, key_hash: int, index: int = -1, max_num: int = 128) -> tuple[list[int], int]: ...
    def read_header(self) -> tuple[int, int, int, int, int, int]: ...
    @property
    def is_full(self) -> bool: ...
    def write_header(
        self,
        begin_timestamp: int,
        end_timestamp: int,
        begin_phy_offset: int,
        end_phy_offset: int,
        hash_slot_count: int,
        index_count: int,
    ) -> None: ...
    def read_slot(self, slot: int) -> int: ...
    def entry_pos(self, index: int) -> int: ...
    def read_entry(self, index: int) -> tuple[int, int, int, int]: ...
    def read_entries(self, index: int, count: int) -> tuple[_Int32s, _Int64s, _Int32s]: ...
    def survey(self, end_phy_offset: int = ..., begin_phy_offset: int = 0) -> tuple[int, bool]: ...
    def relink(self, count: int, erase: bool = True) -> int: ...
    def tail_num(self, phy_offset: int) -> int: ...
    def check_links(self, end_phy_offset: int) -> list[tuple[int, str]]: ...

class SlotHeads:
    def __init__(self, slot_num: int) -> None: ...
    @property
    def slot_num(self) -> int: ...
    @property
    def used_num(self) -> int: ...
    def note(self, hashes: _Int32s, first: int) -> None: ...
    def merge(self, slots: _Int32s, entries: _Int32s) -> None: ...
    def used(self) -> tuple[_Int32s, _Int32s]: ...
    def table(self) -> npt.NDArray[np.uint8]: ...
    def encode(
        self,
        hashes: _Int32s,
        phy_offsets: _Int64s,
        store_timestamps: _Int64s,
        first: int,
        begin_timestamp: int,
        begin_before: int = 0,
    ) -> npt.NDArray[np.uint8]: ...

def decode_record(region: Region, pos: int, limit: int = -1, check_crc: int = 1) -> _DecodedRecord | Verdict: ...
def check_record(region: Region, pos: int, base_offset: int, check_crc: int = 1) -> tuple[Verdict, int, int]: ...
class RecordSearch:
    def __init__(self, region: Region, base_offset: int, check_crc: int = 1) -> None: ...
    @property
    def region(self) -> Region: ...
    def find(self, pos: int, limit: int = -1) -> int: ...

def find_record(region: Region, pos: int, base_offset: int, limit: int = -1, check_crc: int = 1) -> int: ...

class KeyKind(IntEnum):
    ANY_KEY = 0
    TAG = 1
    UNIQUE_KEY = 2
    KEYS_ONLY = 3

def record_matches(
    region: Region, pos: int, phy_offset: int, topic: bytes, key: bytes, by_tag: bool = False
) -> tuple[bool, int]: ...
def record_size(topic_size: int, body_size: int, properties_size: int, sys_flag: int, version: int) -> int: ...
def encode_records(
    region: Region,
    pos: int,
    base_offset: int,
    rows: list[_EncodeRow],
    first: int = 0,
    prop_crc: bool = False,
) -> list[int]: ...
def write_blank(region: Region, pos: int) -> None: ...

class TopicTable:
    def __init__(self) -> None: ...
    @property
    def topics(self) -> list[bytes]: ...
    @property
    def queues(self) -> list[tuple[int, int]]: ...
    def add(self, topic: bytes) -> int: ...
    def add_queue(self, topic: int, queue_id: int) -> int: ...

class RecordColumns:
    count: int
    def __init__(self, capacity: int = 8192, topics: TopicTable | None = None) -> None: ...
    @property
    def topics(self) -> TopicTable: ...
    @property
    def capacity(self) -> int: ...
    @property
    def phy_offset(self) -> _Int64s: ...
    @property
    def size(self) -> _Int32s: ...
    @property
    def queue_id(self) -> _Int32s: ...
    @property
    def queue_offset(self) -> _Int64s: ...
    @property
    def sys_flag(self) -> _Int32s: ...
    @property
    def store_timestamp(self) -> _Int64s: ...
    @property
    def tags_code(self) -> _Int64s: ...
    @property
    def topic(self) -> _Int32s: ...
    @property
    def queue(self) -> _Int32s: ...
    @property
    def inner_base(self) -> _Int64s: ...
    @property
    def inner_num(self) -> _Int32s: ...
    @property
    def multi_dispatch(self) -> npt.NDArray[np.uint8]: ...
    @property
    def prop_crc(self) -> npt.NDArray[np.uint8]: ...
    @property
    def key_start(self) -> _Int64s: ...
    @property
    def key_hash(self) -> _Int32s: ...
    def grow_keys(self) -> None: ...
    def by_queue(self, chosen: npt.NDArray[np.uint8]) -> tuple[list[tuple[int, int, int]], _Int64s]: ...
    def queued(self) -> tuple[npt.NDArray[np.uint8], bool]: ...
    def units(self, rows: _Int64s) -> tuple[_Int64s, _Int32s, _Int64s, _Int64s]: ...
    def key_records(self, begin: int, end: int) -> tuple[_Int64s, _Int64s]: ...
    def run_length(self, rows: _Int64s) -> int: ...

def scan(
    region: Region,
    pos: int,
    limit: int,
    base_offset: int,
    out: RecordColumns,
    delays: _Int64s | array[int],
    check_crc: int = 1,
    index_tags: bool = True,
    keys: bool = True,
) -> tuple[int, Verdict]: ...
def walk(
    region: Region, pos: int, limit: int, base_offset: int, check_crc: int = 0, max_num: int = ...
) -> tuple[int, Verdict, int, int]: ...
def write_unit(region: Region, pos: int, phy_offset: int, size: int, tags_code: int) -> None: ...
def write_units(region: Region, pos: int, phy_offsets: _Int64s, sizes: _Int32s, tags_codes: _Int64s) -> None: ...
def read_unit(region: Region, pos: int) -> tuple[int, int, int]: ...
def read_units(region: Region, pos: int, count: int) -> tuple[_Int64s, _Int32s, _Int64s]: ...
def agreeing_units(
    region: Region, pos: int, columns: RecordColumns, rows: _Int64s, queue_offset: int, tags: bool = True
) -> int: ...
def agreeing_unit_bytes(units: Buffer, columns: RecordColumns, rows: _Int64s, queue_offset: int) -> int: ...
def unit_ends(units: Buffer, far: int) -> tuple[int, int] | None: ...
def agreeing_entries(index: IndexRegion, first: int, columns: RecordColumns, begin: int) -> int: ...
def count_units(region: Region, unit_size: int = 20, first: int = 0) -> int: ...
def unit_at_or_after(region: Region, low: int, high: int, phy_offset: int, unit_size: int = 20) -> int: ...
def write_batch_unit(
    region: Region,
    pos: int,
    phy_offset: int,
    size: int,
    tags_code: int,
    store_timestamp: int,
    base_offset: int,
    batch_num: int,
) -> None: ...
def read_batch_unit(region: Region, pos: int) -> tuple[int, int, int, int, int, int]: ...
def read_ext_unit(region: Region, pos: int) -> tuple[int, int, bytes] | None: ...
def agreeing_ext_units(
    region: Region,
    base_offset: int,
    addresses: _Int64s,
    tags_codes: _Int64s | None = None,
    store_timestamps: _Int64s | None = None,
) -> int: ...
def write_ext_unit(region: Region, pos: int, tags_code: int, store_timestamp: int, bitmap: bytes = b"") -> int: ...

class MessageFields:
    topic: Any
    body: Any
    properties: Any
    flag: Any
    born_timestamp: Any
    born_host: Any
    sys_flag: Any
    reconsume_times: Any
    prepared_transaction_offset: Any
    store_host: Any

class FileStream:
    wrote_where: int
    file_offsets: list[int]
    def remember(self, region: Region, base: int, offsets: list[int]) -> None: ...
    def recent(self, offset: int) -> tuple[Region, int, int, int] | None: ...
    def read_recent(self, phy_offset: int, kind: type[_M], check_crc: int) -> _M | None: ...
    def read_recent_queued(
        self,
        log: FileStream,
        known: tuple[int, int],
        queue_offset: int,
        num: int,
        max_num: int,
        max_bytes: int,
        kind: type[StoredMessage],
        check_crc: int,
        result_kind: type[_R],
        status: object,
        topic: str,
        queue_id: int,
    ) -> _R | None: ...

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
    def clear(self) -> None: ...
    def take_messages(
        self, messages: list[Any], queue_ids: int | list[int], first: int, kind: type
    ) -> tuple[int, int]: ...
    def take_columns(self, table: TableRows, first: int) -> tuple[int, int]: ...
    def queues(self) -> list[tuple[int, int]]: ...
    def number(self, following: dict[int, int], store_timestamp: int, timestamps: _Int64s | array[int]) -> None: ...
    def room(self, left: int, segment_size: int) -> tuple[int, int]: ...
    def encode(self, region: Region, pos: int, base_offset: int, first: int) -> tuple[int, int]: ...
    def placed(self) -> bytes: ...
    def fill_columns(self, columns: RecordColumns, first: int, index_tags: bool = True) -> int: ...
    def columns(self) -> tuple[_Int64s, _Int64s, _Int64s, _Int64s]: ...

class FileEnd:
    def __init__(self, stream: FileStream, mapped_file: object) -> None: ...

class Appender:
    def __init__(
        self,
        batch: RowBatch,
        kind: type,
        result: type,
        clock: Callable[[], int],
        indexed: bool,
        index_tags: bool,
        max_ends: int = 1024,
    ) -> None: ...
    @property
    def writing(self) -> bool: ...
    def learn(self, log: FileEnd, index: IndexRegion | None, queue: int = -1, end: FileEnd | None = None) -> None: ...
    def put(self, message: object, queue_id: object) -> Any: ...

COLUMN_NAMES: tuple[str, ...]

class ArrowColumns:
    def __init__(
        self,
        columns: Sequence[str],
        capacity: int = 8192,
        byte_limit: int = 67108864,
        check_crc: int = 1,
        decompress: Callable[[bytes, int], bytes | None] | None = None,
        host_text: Callable[[bytes], str] | None = None,
    ) -> None: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def count(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def byte_limit(self) -> int: ...
    def choose(
        self,
        topics: Sequence[bytes] | None = None,
        queue_ids: Sequence[int] | None = None,
        tags: Sequence[bytes] | None = None,
        begin_timestamp: int = -9223372036854775808,
        end_timestamp: int = 9223372036854775807,
    ) -> None: ...
    def fill(self, region: Region, pos: int, limit: int, base_offset: int) -> tuple[int, Verdict]: ...
    def fill_at(
        self,
        regions: list[Region],
        base_offsets: _Int64s,
        numbers: _Int32s,
        phy_offsets: _Int64s,
        sizes: _Int32s,
        taken: npt.NDArray[np.uint8],
        first: int = 0,
        topic: bytes | None = None,
        queue_id: int = 0,
        queue_offsets: _Int64s | None = None,
    ) -> int: ...
    def fill_matching(
        self,
        regions: list[Region],
        base_offsets: _Int64s,
        numbers: _Int32s,
        phy_offsets: _Int64s,
        taken: npt.NDArray[np.uint8],
        key_numbers: _Int32s,
        texts: KeyTexts,
        kinds: int,
        max_num: int,
        first: int = 0,
        row_num: int = 0,
    ) -> int: ...
    def take(self) -> tuple[int, dict[str, tuple[Any, ...]]]: ...

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
    def store_size(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def crc(self) -> int: ...
    def check_queue(self, topic: str, queue_id: int, queue_offset: int) -> bool: ...
    @property
    def corrupt(self) -> bool: ...
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

_M = TypeVar("_M", bound=StoredMessage)
_L = TypeVar("_L", bound=list[Any])
_R = TypeVar("_R")
_T = TypeVar("_T", bound=tuple[Any, ...])

def put_results(placed: bytes, kind: type[_T], first: int, num: int) -> list[_T]: ...

def adopt(kind: type[StoredMessage]) -> None: ...

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
        indexes: object,
        region_of: Callable[[int], tuple[Region, int, int, int] | None],
        result_kind: type[_L],
        kind: type[_M],
        check_crc: int,
        encode: Callable[[str], bytes],
        log: FileStream,
        clock: Callable[[], float],
        interval: float,
    ) -> None: ...
    looked_at: float
    closed: bool
    def find(self, topic: str, key: str, max_num: int) -> _L | None: ...

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

class KeyTexts:
    def __init__(
        self,
        key_offsets: _Int32s,
        key_data: npt.NDArray[np.uint8],
        topic_offsets: _Int32s,
        topic_data: npt.NDArray[np.uint8],
    ) -> None: ...
    @property
    def num(self) -> int: ...
    def hashes(self, by_tag: bool = False) -> _Int32s: ...

def chain_entries(index: IndexRegion, hashes: _Int32s) -> tuple[_Int32s, _Int64s]: ...
def doubtful_entry(
    regions: list[Region], base_offsets: _Int64s, numbers: _Int32s, phy_offsets: _Int64s, key_hashes: _Int32s, first: int = 0
) -> int: ...
def entries_by_key(parts: list[tuple[_Int32s, _Int64s]], num: int) -> tuple[_Int32s, _Int64s, bool]: ...
def text_arrays(texts: tuple[Any, ...]) -> tuple[_Int32s, npt.NDArray[np.uint8]] | None: ...
