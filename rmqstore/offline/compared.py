"""The files that `verify` and a rebuild compare: a commit log, and queues and index; findings about unreadable files."""

from __future__ import annotations

import os

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore, unseen_text
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.os_errors import is_unreadable
from rmqstore.index.index_service import IndexService
from rmqstore.store.dispatch_rules import DeletedTopics

__all__ = ["Compared"]


class Compared:
    """A commit log, and the queues and index below a directory that are compared with it.

    Parameters
    ----------
    commit_log : CommitLog
        The caller closes it.
    root : str
        The store's root, which findings name.
    parts_root : str, optional
        The directory that contains the queues and the index; by default `root`.
    kinds : tuple of str
        The parts to compare, as for `rebuild`.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        root: str,
        config: StoreConfig,
        *,
        parts_root: str | None = None,
        kinds: tuple[str, ...] = ("index", "consumequeue"),
    ):
        self.commit_log, self.root, self.config = commit_log, root, config
        self.has_queues, self.has_index = "consumequeue" in kinds, "index" in kinds
        parts_root = root if parts_root is None else parts_root
        pool = MappedFilePool(config.max_mapped_files)
        self.queues = ConsumeQueueStore(parts_root, config, pool, read_only=True)
        self.index_service = IndexService(parts_root, config, read_only=True)
        self.deleted = DeletedTopics(root)
        # Check CRCs: a record that fails is damage; otherwise it is compared like every other.
        self.check_crc = True
        # Phy offsets of records without a unit, as their queue offset or topic cannot be right.
        self.without_unit: frozenset[int] = frozenset()
        # Queues without a unit, as their topic was deleted.
        self.without_queue: frozenset[tuple[str, int]] = frozenset()
        # The units are new, and only a part of the log is compared.
        self.is_built = False
        # Phy offsets, begin and end, of segments that cannot be read; ascending.
        self.unread: list[tuple[int, int]] = []

    def is_unread(self, begin: int, end: int) -> bool:
        """Return whether all phy offsets from `begin` up to but not including `end` are in segments that cannot be read."""
        for first, last in self.unread:
            if first <= begin < last:
                begin = last
        return begin >= end

    def close(self) -> None:
        """Close queues and index."""
        self.queues.close()
        self.index_service.close()


def unread_file(path: str, error: OSError, left_out: str) -> Finding:
    """Return the finding that a file cannot be read because of `error`; `left_out` says what follows from that."""
    detail = f"the file cannot be read ({error.strerror or error}), and {left_out}; let this user read it, or restore it "
    return Finding(path, 0, "file", detail + "from a copy where the disk fails")


def unread_folder(path: str, error: OSError) -> Finding:
    """Return the finding that a folder of queues cannot be read because of `error`."""
    return Finding(path, 0, "file", f"{unseen_text(error)}; queues that may be there are not compared with the log")


def unread_database(path: str, error: StoreError | OSError, what: str) -> Finding:
    """Return the finding that a database with `what` cannot be read because of `error`."""
    if isinstance(error, MissingDependencyError):
        return Finding(path, 0, "not_checked", f"{what}: {error.message}")
    if isinstance(error, CorruptionError):
        return Finding(error.path or path, error.pos or 0, "damaged_database", f"{what}: {error.message}")
    if is_unreadable(error):
        where = path if error.filename is None else os.fsdecode(error.filename)
        text = f"{what}: this cannot be read ({error.strerror or error}), and is not compared with the log; let this user read "
        return Finding(where, 0, "file", text + "it, or restore it from a copy where the disk fails")
    return Finding(path, 0, "not_checked", f"{what}: {error}")
