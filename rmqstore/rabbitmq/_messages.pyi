"""Types of the compiled module; tests/project/test_stub.py compares the two."""

from collections.abc import Buffer  # type: ignore[attr-defined]
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from rmqstore._core import Region

# ------------------------------------------------------------------------------------------------------- message files

class MessageRecordLayout(IntEnum):
    MESSAGE_RECORD_SIZE = 0
    MESSAGE_RECORD_MSG_ID = 8
    MESSAGE_RECORD_TERM = 24
    MESSAGE_RECORD_EXTRA = 25
    MESSAGE_RECORD_MARK = 255

class MessageScan(IntEnum):
    SCAN_SEQUENTIAL = 0
    SCAN_BYTEWISE = 1
    SCAN_SALVAGE = 2

class MessageStop(IntEnum):
    STOP_END = 0
    STOP_ZERO = 1
    STOP_TORN = 2
    STOP_ROWS = 3
    STOP_WORK = 4

class MessageFlag(IntEnum):
    MESSAGE_WRITTEN = 1
    MESSAGE_TOO_SHORT = 4

def scan_messages(
    region: Region, mode: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], int, int]: ...

class LocationTable:
    def __init__(self, expected: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def reserve(self, expected: int) -> None: ...
    def get(self, msg_id: bytes) -> tuple[int, int, int, int] | None: ...
    def put(self, msg_id: bytes, refcount: int, file: int = -1, pos: int = 0, size: int = 0) -> None: ...
    def discard_many(self, msg_ids: NDArray[np.uint8]) -> None: ...
    def refer(self, msg_ids: NDArray[np.uint8], counts: NDArray[np.int64] | None = None) -> None: ...
    def scan(
        self, region: Region, file: int, mode: int = 0, adopt: bool = False
    ) -> tuple[int, int, int, int, int, int, int]: ...
    def entries(
        self, msg_ids: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]: ...
    def move(self, msg_ids: NDArray[np.uint8], file: int, positions: NDArray[np.int64]) -> None: ...
    def columns(
        self, file: int = -2
    ) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]: ...
    def sums(self, files: NDArray[np.int64], file_sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]: ...
    def load_ets_items(self, data: Buffer, pos: int) -> tuple[int, int]: ...

# ------------------------------------------------------------------------------------------------------------ version 2

class QueueStoreVerdict(IntEnum):
    QUEUE_STORE_OK = 0
    QUEUE_STORE_OUTSIDE = 1
    QUEUE_STORE_SIZE = 2
    QUEUE_STORE_CRC = 3

def check_queue_store(
    data: Buffer, positions: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]: ...
