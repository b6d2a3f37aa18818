from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rmqstore._core import Region, Verdict

_Int32s: TypeAlias = npt.NDArray[np.int32]
_Int64s: TypeAlias = npt.NDArray[np.int64]

COLUMN_NAMES: tuple[str, ...]

class RoomPool: ...
class Room: ...

class ArrowColumns:
    def __init__(
        self,
        columns: Sequence[str],
        capacity: int = 8192,
        byte_limit: int = 67108864,
        check_crc: int = 1,
        decompress: Callable[[bytes, int], bytes | None] | None = None,
        host_text: Callable[[bytes], str] | None = None,
        views: bool = False,
    ) -> None: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def count(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def byte_limit(self) -> int: ...
    @property
    def views(self) -> bool: ...
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
    def take(self) -> tuple[int, dict[str, tuple[Any, ...]], list[memoryview | bytes]]: ...
    def take_arrays(self, import_array: Callable[[int, Any], Any], types: Sequence[Any]) -> list[Any]: ...

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

def entries_by_key(parts: list[tuple[_Int32s, _Int64s]], num: int) -> tuple[_Int32s, _Int64s, bool]: ...
def text_arrays(texts: tuple[Any, ...]) -> tuple[_Int32s, npt.NDArray[np.uint8]] | None: ...
