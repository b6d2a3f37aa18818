"""rmqstore: read and write the on-disk store of Apache RocketMQ, byte for byte.

Owns the public names of the package and nothing else; it imports neither Spark nor anything of the web.  Names that few
programs use are loaded when they are first asked for.
"""

from typing import TYPE_CHECKING

from rmqstore._version import __version__
from rmqstore.config import StoreConfig
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

if TYPE_CHECKING:
    from rmqstore.consumer import Consumer
    from rmqstore.consumer_offset import ConsumerOffsets, LocalOffsets
    from rmqstore.stats import StoreStats
else:
    # The module of each name that is loaded when it is first asked for.  No function can be one of them whose module has its
    # name (describe, rebuild, verify): the first import of that module, whenever it is, would put the module in its place.
    _LOADED_LATER = {
        "Consumer": "rmqstore.consumer",
        "ConsumerOffsets": "rmqstore.consumer_offset",
        "LocalOffsets": "rmqstore.consumer_offset",
        "StoreStats": "rmqstore.stats",
    }

    def __getattr__(name):
        if name not in _LOADED_LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_LOADED_LATER[name]), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_LOADED_LATER})
