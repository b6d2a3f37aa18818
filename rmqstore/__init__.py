"""rmqstore: read and write the on-disk store of Apache RocketMQ, byte for byte.

Owns the public names of the package and nothing else; it imports neither Spark nor anything of the web.  Names that few
programs use are loaded when they are first asked for.
"""

from typing import TYPE_CHECKING

from rmqstore._version import __version__

try:
    # Asked for first, so that the absence of one is explained.
    import rmqstore._columns
    import rmqstore._core
    import rmqstore._dispatch
    import rmqstore._rows
    import rmqstore.message._read  # noqa: F401
except ModuleNotFoundError as _error:
    from rmqstore import _unbuilt

    if _error.name not in _unbuilt.COMPILED:
        raise
    raise ImportError(_unbuilt.explain(_error.name), name=_error.name, path=__file__) from None

from rmqstore.config import StoreConfig
from rmqstore.errors import (
    ChecksumError,
    CorruptionError,
    DiskFullError,
    FlushDiskTimeoutError,
    GeometryError,
    IndexFileError,
    InvalidMessageError,
    LostLogError,
    MissingDependencyError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StoreNotFoundError,
    StorePoisonedError,
    UnsupportedFormatError,
)
from rmqstore.index.index_file import IndexFile
from rmqstore.message import Message, MessageExt
from rmqstore.offline.describe import StoreDescription, describe
from rmqstore.offline.rebuild import RebuildReport, rebuild
from rmqstore.offline.verify import Finding, verify
from rmqstore.store.message_store import MessageStore
from rmqstore.store.recovery import RecoveryReport
from rmqstore.store.results import (
    GetMessageResult,
    GetMessageStatus,
    PutResult,
    PutResults,
    PutTableResult,
    QueryResult,
)

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
    "LostLogError",
    "Message",
    "MessageExt",
    "MessageStore",
    "MissingDependencyError",
    "OffsetOutOfRangeError",
    "Pending",
    "PendingMessage",
    "PutResult",
    "PutResults",
    "PutTableResult",
    "QueryResult",
    "ReadOnlyError",
    "RebuildReport",
    "RecoveryReport",
    "Settings",
    "StoreChangedError",
    "StoreClosedError",
    "StoreConfig",
    "StoreDescription",
    "StoreError",
    "StoreLockedError",
    "StoreNotFoundError",
    "StorePoisonedError",
    "StoreStats",
    "UnsupportedFormatError",
    "__version__",
    "describe",
    "pending",
    "rebuild",
    "settings",
    "verify",
]

if TYPE_CHECKING:
    from rmqstore.consumer.consumer import Consumer
    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.offline.pending import Pending, PendingMessage, pending
    from rmqstore.offline.settings import Settings, settings
    from rmqstore.store.stats import StoreStats
else:
    # The module of each name that is loaded when it is first asked for.
    _LOADED_LATER = {
        "Consumer": "rmqstore.consumer.consumer",
        "ConsumerOffsets": "rmqstore.consumer.consumer_offset",
        "Settings": "rmqstore.offline.settings",
        "settings": "rmqstore.offline.settings",
        "Pending": "rmqstore.offline.pending",
        "PendingMessage": "rmqstore.offline.pending",
        "StoreStats": "rmqstore.store.stats",
        "pending": "rmqstore.offline.pending",
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
