from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol, TypeAlias

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
    def lost(self) -> bool: ...
    path: str | None
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

def write_blank(region: Region, pos: int) -> None: ...
def write_unit(region: Region, pos: int, phy_offset: int, size: int, tags_code: int) -> None: ...
def write_units(region: Region, pos: int, phy_offsets: _Int64s, sizes: _Int32s, tags_codes: _Int64s) -> None: ...
def read_unit(region: Region, pos: int) -> tuple[int, int, int]: ...
def read_units(region: Region, pos: int, count: int) -> tuple[_Int64s, _Int32s, _Int64s]: ...
def nonzero_size(data: Buffer) -> int: ...
def unit_ends(units: Buffer, far: int) -> tuple[int, int] | None: ...
def count_units(region: Region, unit_size: int = 20, first: int = 0) -> int: ...
def written_unit(region: Region, first: int, stop: int, unit_size: int = 20) -> int: ...
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

class OpenedIndexes:
    opened_files: Any

class StateFields:
    lock: Any
    appender: Any
    key_query: Any
    last_store_timestamp: int
    waiting: int
    sync_flush: bool

def chain_entries(index: IndexRegion, hashes: _Int32s) -> tuple[_Int32s, _Int64s]: ...
def doubtful_entry(
    regions: list[Region], base_offsets: _Int64s, numbers: _Int32s, phy_offsets: _Int64s, key_hashes: _Int32s, first: int = 0
) -> int: ...
