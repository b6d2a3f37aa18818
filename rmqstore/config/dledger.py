"""The folders of a commit log that is DLedger's, which this package knows of and does not read.

Owns their names, and what is said where a store has one.

Facts (RocketMQ 5.5.0 with DLedger 0.3.1, ``enableDLegerCommitLog=true``): the log lies in ``dledger-<dLegerSelfId>/data`` below
storePathRootDir, unless storePathDLedgerCommitLog names another place, and an index of its entries in
``dledger-<dLegerSelfId>/index``.  Each record stands in an entry with a header of 48 bytes.  A ``commitlog`` beside it is what the
broker wrote before; phy offsets go on from its end.
"""

from __future__ import annotations

import os

from rmqstore.errors import UnsupportedFormatError
from rmqstore.files.listing import listing

__all__ = ["dledger_folders", "is_dledger_name", "refuse_dledger", "without_log"]

_PREFIX = "dledger-"
_PARTS = ("data", "index")


def is_dledger_name(name: str) -> bool:
    """bool: DLedger's folder below a store's root may have this name."""
    return name.startswith(_PREFIX)


def dledger_folders(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """tuple of str: the folders of DLedger in the store at `root` that hold anything, sorted."""
    # Opening the store reports a directory that cannot be listed.
    folders = [entry.path for entry in listing(root) if is_dledger_name(entry.name)]
    return tuple(
        folder for folder in folders if any(_holds_anything(os.path.join(folder, part)) for part in _PARTS)
    )


def _holds_anything(folder: str) -> bool:
    found = listing(folder)
    return bool(found) or isinstance(found.error, PermissionError)


def without_log(root: str) -> None:
    """Raise UnsupportedFormatError where the store at `root`, which has no segment, keeps its commit log by DLedger."""
    for folder in dledger_folders(root):
        raise UnsupportedFormatError(
            "the commit log of this store is DLedger's (enableDLegerCommitLog=true), which this package does not read; "
            "rmqstore settings shows its topics and groups",
            folder,
        )


def refuse_dledger(root: str) -> None:
    """Raise UnsupportedFormatError if the log of the store at `root` is, or goes on as, DLedger's: it is read at most."""
    for folder in dledger_folders(root):
        raise UnsupportedFormatError(
            "the commit log of this store is DLedger's, or goes on there (enableDLegerCommitLog=true): queues and index "
            "lead to messages that this package does not see, and would be cut. What a commitlog folder beside it has "
            "can be read (read_only=True). Where no broker uses this folder any more, move it away",
            folder,
        )
