"""rmqstore: read and write the on-disk store of Apache RocketMQ, byte for byte.

Owns the public names of the package and nothing else; it imports neither Spark nor anything of the web.
"""

from rmqstore._version import __version__
from rmqstore.config import StoreConfig
from rmqstore.consumer import Consumer
from rmqstore.consumer_offset import ConsumerOffsets, LocalOffsets
from rmqstore.describe import StoreDescription, describe
from rmqstore.errors import (
    ChecksumError,
    CorruptionError,
    DiskFullError,
    FlushDiskTimeoutError,
    GeometryError,
    IndexFileError,
    InvalidMessageError,
    MissingDependencyError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StorePoisonedError,
    UnsupportedFormatError,
)
from rmqstore.index_file import IndexFile
from rmqstore.message import Message, MessageExt
from rmqstore.message_store import (
    GetMessageResult,
    GetMessageStatus,
    MessageStore,
    PutResult,
    PutResults,
    PutTableResult,
    QueryResult,
)
from rmqstore.rebuild import RebuildReport, rebuild
from rmqstore.recovery import RecoveryReport
from rmqstore.stats import StoreStats
from rmqstore.verify import Finding, verify

__all__ = [
    "ChecksumError",
    "Consumer",
    "ConsumerOffsets",
    "CorruptionError",
    "DiskFullError",
    "Finding",
    "FlushDiskTimeoutError",
    "GeometryError",
    "GetMessageResult",
    "GetMessageStatus",
    "IndexFile",
    "IndexFileError",
    "InvalidMessageError",
    "LocalOffsets",
    "Message",
    "MessageExt",
    "MessageStore",
    "MissingDependencyError",
    "OffsetOutOfRangeError",
    "PutResult",
    "PutResults",
    "PutTableResult",
    "QueryResult",
    "ReadOnlyError",
    "RebuildReport",
    "RecoveryReport",
    "StoreChangedError",
    "StoreClosedError",
    "StoreConfig",
    "StoreDescription",
    "StoreError",
    "StoreLockedError",
    "StorePoisonedError",
    "StoreStats",
    "UnsupportedFormatError",
    "__version__",
    "describe",
    "rebuild",
    "verify",
]
