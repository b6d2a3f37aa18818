"""Findings about files, folders and databases that exist and cannot be read."""

from __future__ import annotations

import os

from rmqstore.consumequeue.consume_queue_store import unseen_text
from rmqstore.errors import Finding, StoreError
from rmqstore.files.os_errors import is_unreadable

__all__ = ["unread_database", "unread_file", "unread_folder"]


def unread_file(path: str, error: OSError, left_out: str) -> Finding:
    """Return the finding that a file cannot be read, because of `error`; `left_out` is what follows."""
    return Finding(
        path,
        0,
        "file",
        f"the file cannot be read ({error.strerror or error}), and {left_out}; let this user read it, or restore it "
        "from a copy where the disk fails",
    )


def unread_folder(path: str, error: OSError) -> Finding:
    """Return the finding that a folder of queues cannot be read, because of `error`."""
    return Finding(path, 0, "file", f"{unseen_text(error)}; queues that may be there are not compared with the log")


def unread_database(path: str, error: StoreError | OSError, what: str) -> Finding:
    """Return the finding that `what` is in a database which cannot be read, because of `error`."""
    if is_unreadable(error):
        where = path if error.filename is None else os.fsdecode(error.filename)
        text = f"{what}: this cannot be read ({error.strerror or error}), and is not compared with the log; let this user read "
        return Finding(where, 0, "file", text + "it, or restore it from a copy where the disk fails")
    return Finding(path, 0, "not_checked", f"{what}: {error}")
