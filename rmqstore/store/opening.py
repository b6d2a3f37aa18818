"""Open and close a store: the ``abort`` file, recovery, what is forced when, and stores that were garbage-collected.

``abort`` exists while a store is open for writing, contains the process id, and stays after a failed write.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from rmqstore.commitlog.commit_log import check_store_root
from rmqstore.config import StoreConfig
from rmqstore.config.places import dledger_folders, without_log
from rmqstore.config.saved_options import load_options, save_options, with_saved_options
from rmqstore.errors import (
    OpenReadOnly,
    Sentence,
    StoreChangedError,
    StoreError,
    StoreNotFoundError,
    UnsupportedFormatError,
)
from rmqstore.files.durable import fsync_directory, fsync_tree
from rmqstore.files.listing import is_empty, listing
from rmqstore.files.mapped_file import STAGING_PREFIX
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors
from rmqstore.files.store_lock import abort_process
from rmqstore.rocksdb.database import check_queue_databases, queue_databases
from rmqstore.store.flushing import Flushing
from rmqstore.store.recovery import RecoveryReport, recover
from rmqstore.store.store_state import Older, StoreState

if TYPE_CHECKING:
    from rmqstore.files.store_lock import StoreLock
    from rmqstore.flatfile.flat_store import FlatStore
    from rmqstore.store.flushing import Flushing
    from rmqstore.store.store_state import StoreState
    from rmqstore.store.upkeep import Upkeep

__all__ = [
    "REBUILD_COMPLETE",
    "REBUILD_DIRECTORY",
    "SWAPPING",
    "Closing",
    "check_has_store",
    "close_forgotten",
    "close_in_order",
    "config_to_read",
    "config_to_write",
    "has_store",
    "is_swapping",
    "older_of",
    "recover_state",
    "refuse_rocksdb",
    "save_changed",
    "saved_config",
    "wait_for_store",
    "warn_of_dledger",
    "warn_of_swapping",
]

logger = logging.getLogger(__name__)

# Seconds between two looks for a store that does not exist yet.
_POLL = 0.05

REBUILD_DIRECTORY = ".rmqstore-rebuild"
"""The folder of a store in which a rebuild makes new queues and a new index."""
REBUILD_COMPLETE = "complete"
"""The file there that says what is complete, and takes its place from then on."""
SWAPPING = (
    "a rebuild was interrupted while its new queues or index took their place, or does that just now: some may be out "
    "of sight; run the same rebuild again, which finishes it"
)
"""What to say of a store with this file."""


def is_swapping(root: str) -> bool:
    """bool: a rebuild puts its new files into their place in the store at `root`, or was interrupted while it did."""
    return os.path.exists(os.path.join(root, REBUILD_DIRECTORY, REBUILD_COMPLETE))


def warn_of_swapping(root: str) -> None:
    """Log that what is read of the store at `root` may not be all, where a rebuild did not end."""
    if is_swapping(root):
        logger.warning("%s: %s", root, SWAPPING)


def refuse_rocksdb(root: str) -> None:
    """Raise UnsupportedFormatError if the store at `root` has queues in RocksDB: a message put there would be in none of them."""
    check_queue_databases(root)
    for folder in queue_databases(root):
        raise UnsupportedFormatError(
            Sentence(
                "the consume queues of this store are in RocksDB, which can be read and not written: make queue files of them "
                "(rmqstore rebuild --what consumequeue; the broker then needs storeType=default)",
                OpenReadOnly("the store"),
                ". Where no broker uses this folder any more, move it away",
            ),
            folder,
        )


def warn_of_dledger(state: StoreState) -> None:
    """Log that the log of a store that is read goes on by DLedger; UnsupportedFormatError where all of it is there."""
    if not len(state.commit_log.files):
        if state.older.one_log:
            without_log(state.path)
        return
    for folder in dledger_folders(state.path):
        logger.warning(
            "%s: from phy offset %d on the commit log is DLedger's (enableDLegerCommitLog=true), which this package does "
            "not read: newer messages are missing here",
            folder, state.commit_log.max_offset,
        )  # fmt: skip


def has_store(root: str) -> bool:
    """bool: the directory has files of a store."""
    return any(
        os.path.isdir(os.path.join(root, name)) and not is_empty(os.path.join(root, name))
        for name in ("commitlog", "consumequeue", "batchconsumequeue", "index")
    )


def check_has_store(root: str) -> None:
    """Raise StoreNotFoundError if there is no store at `root`; an empty one, which a writer made, is a store."""
    check_store_root(root)
    if not has_store(root) and not os.path.exists(os.path.join(root, "checkpoint")):
        raise StoreNotFoundError(
            "there is no store in this directory, and create=False makes none; give the folder that holds commitlog/",
            root,
        )


def wait_for_store(root: str, seconds: float, tiered: object) -> None:
    """Return when a reader can open the store at `root`, or after the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            config_to_read(root, tiered)
            return
        except StoreNotFoundError:
            time.sleep(_POLL)


def config_to_write(root: str, config: StoreConfig | None, reconfigure: bool) -> StoreConfig:
    """Return the config of a store that is opened for writing; that of a new store is saved, see `MessageStore.open`."""
    if config is None:
        config = saved_config(root)
    elif not reconfigure:
        config = with_saved_options(root, config)
    # A broker's store gets no such file.
    if not (has_store(root) or load_options(root, StoreConfig)):
        save_options(root, config)
    return config


def save_changed(root: str, config: StoreConfig) -> None:
    """Save the config of a store whose files fit it, if the store has a file of options."""
    if load_options(root, StoreConfig):
        save_options(root, config)


def saved_config(root: str) -> StoreConfig:
    """Return the config that the store in directory `root` was made with, RocketMQ's defaults for a new store."""
    return StoreConfig.infer(root) if has_store(root) or load_options(root, StoreConfig) else StoreConfig()


def config_to_read(root: str, tiered: object) -> StoreConfig:
    """Return the config of a store that is only read; where tiered storage has its messages, there need be no log."""
    if tiered and not os.path.isdir(os.path.join(root, "commitlog")):
        return StoreConfig()
    return StoreConfig.infer(root, read_only=True)


def older_of(state: StoreState, tiered: str | os.PathLike[str] | FlatStore | None) -> Older:
    """Return what a store has besides its log; for `tiered` see `MessageStore.open`."""
    if tiered is None:
        return Older(state)
    if not state.read_only:
        raise ValueError("tiered storage is only read; open the store with read_only=True")
    # Imported here because few stores have tiered storage.
    from rmqstore.flatfile.flat_store import FlatStore
    from rmqstore.store.tiered import Tiered

    return Tiered(state, tiered if isinstance(tiered, FlatStore) else FlatStore(os.path.abspath(tiered), state.path))


def recover_state(state: StoreState, flushing: Flushing, mode: str, drop_units: int) -> RecoveryReport:
    """Recover the loaded files of a store and set the abort mark; `mode` and `drop_units` as of `MessageStore.open`."""
    abort = os.path.join(state.path, "abort")
    clean = not os.path.exists(abort)
    checkpoint, process = state.checkpoint, abort_process(state.path)
    is_ours = checkpoint.is_of(process)
    if clean:
        checkpoint.flushed_offset = -1
    elif not is_ours:
        # Somebody else had the store after the one who wrote the mark.
        checkpoint.flushed_offset = checkpoint.log_end = -1

    def before_writing(end: int) -> None:
        # The mark counts for the one who had the store before until `abort` names this process: should it die in between, or
        # before its first flush, it is still known how far the log went.
        if checkpoint.flushed_offset < 0:
            # A flush of ours has said so already, and old index files need not be opened for it.  Recovery, which comes next,
            # repairs an index file that is damaged, or says what is the matter with it.
            with contextlib.suppress(StoreError, OSError):
                flushing.allow_for_abort(end)
        checkpoint.log_end = end
        checkpoint.previous_process_id, checkpoint.process_id = process if is_ours else 0, os.getpid()
        checkpoint.flush()
        # From the first change on an interrupted opening counts as an unclean exit.
        with (
            naming_errors(abort),
            open(open_regular(abort, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "w", encoding="ascii") as file,
        ):
            file.write(str(os.getpid()))
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(state.path)
        if not clean:
            # The process that died may have made folders and files whose names it did not come to force.
            fsync_tree(state.path)
        for entry in listing(state.path, lambda entry: entry.name.startswith(STAGING_PREFIX)).checked():
            os.unlink(entry.path)

    report = recover(state, clean=clean, mode=mode, drop_units=drop_units, before_writing=before_writing)
    last = checkpoint.confirm_phy_offset
    if state.commit_log.max_offset > state.commit_log.min_offset:
        state.last_store_timestamp = max(state.commit_log.store_timestamp_at(last), 0)
    checkpoint.previous_process_id = 0
    if clean:
        with flushing.lock:
            flushing.flush_all()
        return report
    # What recovery wrote is forced now.  What the process that died left in memory is forced by the next flushes; until
    # then the checkpoint must not speak for it.
    state.commit_log.flush()
    state.queues.flush()
    if state.index_service is not None:
        state.index_service.flush()
    checkpoint.flushed_offset = min(checkpoint.flushed_offset, state.commit_log.max_offset)
    if checkpoint.flushed_offset < 0:
        # Recovery may have cut the index.
        flushing.allow_for_abort(state.commit_log.max_offset)
    checkpoint.flush()
    for base in state.commit_log.files.offsets:
        if base + state.commit_log.segment_size > report.began_at:
            state.commit_log.files.file(base).adopt()
    for queue in state.queues:
        for mapped_file in queue.mapped_files():
            mapped_file.adopt()
    if state.index_service is not None:
        state.index_service.adopt(checkpoint.has_index)
    flushing.flushed_where = flushing.all_flushed_where = -1
    return report


def close_in_order(state: StoreState, flushing: Flushing) -> None:
    """Force everything and take the abort mark away; the caller holds the flush lock."""
    try:
        if state.poison is None:
            with contextlib.suppress(StoreChangedError):
                # That was logged, and the next opening recovers it.
                flushing.flush_all(closing=True)
    finally:
        state.progress.persist()
    if state.poison is None:
        abort = os.path.join(state.path, "abort")
        if os.path.exists(abort):
            os.unlink(abort)
            fsync_directory(state.path)
            # Until here the mark says how far the log goes: should power be lost meanwhile, `abort` may be there again.
            state.checkpoint.flushed_offset = state.checkpoint.log_end = -1
            state.checkpoint.flush()


# Strong references: what the collector finds with a forgotten store has lost its weak references before anyone is told.
_writers: dict[int, Closing] = {}
_forgotten: dict[int, Closing] = {}


def _after_fork_in_child() -> None:
    # They are the parent's to close.
    _writers.clear()
    _forgotten.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Closing:
    """Closes the parts of one store, once."""

    def __init__(self, state: StoreState, flushing: Flushing):
        self.state, self.flushing = state, flushing
        self.upkeep: Upkeep | None = None
        self.store_lock: StoreLock | None = None
        self.done = False
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Make the lock new, in a forked child."""
        self._lock = threading.RLock()

    def keep(self) -> None:
        """Hold the parts of a store that is open for writing, until they are closed."""
        _writers[id(self)] = self

    def forget(self) -> None:
        """Take over from a store that was forgotten; called by its finalizer, it waits for nothing."""
        if _writers.pop(id(self), None) is not None and self.upkeep is not None:
            _forgotten[id(self)] = self
            self.upkeep.end_with(self._close_forgotten)

    def _close_forgotten(self) -> None:
        # On the housekeeping thread.  Whoever is closing it already may be waiting for this thread.
        if self._lock.acquire(blocking=False):
            try:
                self.close()
            except Exception as error:
                logger.error("%s was forgotten, and could not be closed in order: %s", self.state.path, error)
            finally:
                self._lock.release()

    def close(self) -> None:
        """As `MessageStore.close`."""
        state = self.state
        with self._lock:
            if state.closed:
                self._let_go()
                return
            # A forked child only lets go: the store, its lock and its abort file are the parent's, as is the thread.
            own = state.pid == os.getpid()
            if self.upkeep is not None and own:
                self.upkeep.stop()
            with state.lock:
                # From here on nothing is put; puts that wait for the disk get their flush.
                state.closing = True
                state.appender = None
            try:
                if not state.read_only and own:
                    with self.flushing.lock:
                        close_in_order(state, self.flushing)
            finally:
                self._let_go()

    def abandon(self, error: BaseException) -> None:
        """Let go of a store whose opening failed with `error`, as a crash would; `abort` stays."""
        # No task begins any more, of whichever thread.
        self.state.poison = error
        if self.upkeep is not None:
            self.upkeep.stop()
        self._let_go()

    def _let_go(self) -> None:
        # Each step may be done again: whatever an interrupt leaves undone is done by the next call.
        if self.done:
            return
        state = self.state
        state.closed = True
        for short_way in (state.key_query, state.queue_gets):
            if short_way is not None:
                short_way.closed = True
        state.older.close()
        try:
            with state.lock:
                state.close_files()
        finally:
            if self.store_lock is not None:
                self.store_lock.release()
            _writers.pop(id(self), None)
            _forgotten.pop(id(self), None)
            with state.arrived:
                state.arrived.notify_all()
            self.done = True


def close_forgotten(root: str | None = None) -> None:
    """Close what was forgotten of the store at `root`, or of all, and wait for it; what fails there is logged."""
    path = None if root is None else os.path.realpath(root)
    for closing in list(_forgotten.values()):
        if path is None or os.path.realpath(closing.state.path) == path:
            try:
                closing.close()
            except Exception as error:
                logger.error("%s was forgotten, and could not be closed in order: %s", closing.state.path, error)


# Runs before what is still open is closed, as its module was imported before this one.
atexit.register(close_forgotten)
