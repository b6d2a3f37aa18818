"""The files that RocksDB writes as logs: a MANIFEST, a write-ahead log.

Owns the layout of their records, and the search for types that RocksDB does not come past.  It only reads.

Layout (RocksDB, `db/log_format.h`): blocks of 32 KiB; a record has a masked CRC-32C of type and content, a length of
two bytes and a type, little-endian, and is cut where a block ends.  Types 1 to 4 are a whole record, a first, a middle
and a last part; 5 to 8 and 11 the same in a file that is used again, with the file's number behind the type.  0 fills a
block up.
"""

from __future__ import annotations

import os
import struct

__all__ = ["BLOCK", "FIRST", "HEAD", "LAST", "wrong_types"]

BLOCK = 1 << 15
HEAD = struct.Struct("<IHB")
FIRST, LAST = 2, 4
_OF_FILES_USED_AGAIN = (5, 6, 7, 8, 11)
_CRC_MASK = 0xA282EAD8


def wrong_types(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """List of (int, int): where a type stands that this file cannot have, and the one that it may have been.

    RocksDB (to 10.x) takes a file for one that is used again by its first record alone, and where a later one only says
    so it reads the same record for ever.  Where the first one says so wrongly it reads nothing, in silence.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    found: list[tuple[int, int]] = []
    with open(path, "rb") as file:
        at = 0
        while block := file.read(BLOCK):
            pos = 0
            while pos + HEAD.size <= len(block):
                crc, length, kind = HEAD.unpack_from(block, pos)
                if not kind and not length:
                    break
                if kind in _OF_FILES_USED_AGAIN:
                    before = kind - LAST if kind <= 2 * LAST else 1
                    content = block[pos + HEAD.size : pos + HEAD.size + length]
                    if at == pos == 0 and crc != _masked_crc(bytes([before]) + content):
                        # This file is used again.
                        return []
                    found.append((at + pos + HEAD.size - 1, before))
                pos += HEAD.size + length
            at += len(block)
    return found


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _CRC_MASK) % 2**32
