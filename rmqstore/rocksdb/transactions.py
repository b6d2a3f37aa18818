"""Pending transactions in RocksDB: family ``trans`` of ``rocksdbstore/``.

Owns the layout of its keys and values.  It says what the database holds, which lags behind the commit log.

A key is the phy offset of the half message (i64), ``@``, the real topic, ``@``, the transaction's id; a value how
often it was checked (i32) and the record's size (i32).  A settlement deletes the key, so that every key is a pending
transaction.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from rmqstore.errors import CorruptionError
from rmqstore.rocksdb.database import Database

__all__ = ["FAMILY", "StoredTransactions", "read_transactions"]

FAMILY = "trans"
_LAST_OFFSET = b"lastOffsetPy"
_OFFSET, _VALUE = struct.Struct(">q"), struct.Struct(">ii")


@dataclass
class StoredTransactions:
    """What the database says of transactions.

    Attributes
    ----------
    last_phy_offset : int or None
        The largest phy offset of a half message that was written; None where no broker kept transactions here.
    check_times : dict of int to int
        How often each was checked, by the phy offset of its half message.
    problems : list of CorruptionError
        Entries that are none.
    """

    last_phy_offset: int | None = None
    check_times: dict[int, int] = field(default_factory=dict)
    problems: list[CorruptionError] = field(default_factory=list)


def read_transactions(database: Database) -> StoredTransactions:
    """StoredTransactions: all that are there.

    Raises
    ------
    CorruptionError
        The database is damaged.
    """
    found = StoredTransactions()
    for key, value in database.items(family=FAMILY):
        if key == _LAST_OFFSET and len(value) == _OFFSET.size:
            found.last_phy_offset = _OFFSET.unpack(value)[0]
        elif len(key) > _OFFSET.size + 1 and key[_OFFSET.size : _OFFSET.size + 1] == b"@" and len(value) == _VALUE.size:
            found.check_times[_OFFSET.unpack_from(key)[0]] = _VALUE.unpack(value)[0]
        else:
            found.problems.append(
                CorruptionError(
                    f"RocksDB transactions: an entry with the key {key!r} and {len(value)} bytes", database.path
                )
            )
    return found
