"""repair: a new vhost directory that a real node boots on, with all whole parts of a damaged one.

Owns the choice between copying and rewriting.  The source is only read; the output is a new directory, which is verified
before it gets its name.  Lost facts are in the report, never guessed.  Rules: RabbitMQ 3.10.8 boots on it
(docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmqstore.errors import StoreError
from rmqstore.files.durable import fsync_tree
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular
from rmqstore.files.output_file import OutputFolder
from rmqstore.rabbitmq import _term, layout
from rmqstore.rabbitmq.clean_state import CLEAN_FILES
from rmqstore.rabbitmq.dets import write_recovery_terms
from rmqstore.rabbitmq.live_index import IndexEntry
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import STORES
from rmqstore.rabbitmq.problem import UNREAD_FORMAT, UNREADABLE
from rmqstore.rabbitmq.queue import QueueDirectory
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.unreferenced import count_unreferenced
from rmqstore.rabbitmq.verify import (
    COPIED_SEGMENT,
    STALE,
    STORE_CONSEQUENCES,
    UNREADABLE_STORE,
    UNREFERENCED,
    WIDEST_GAP,
    Consequence,
    Finding,
    Met,
    verify_vhost,
)
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["RepairReport", "RepairedQueue", "repair"]

PERSISTENT, TRANSIENT = STORES
_HARMLESS = {Consequence.REPAIRS, Consequence.NONE}
# Consequences of findings that the output must not have.
_GRAVE = {*Consequence} - _HARMLESS - {Consequence.DELETES, Consequence.FORGETS, Consequence.REDELIVERS}
# Problems of an embedded term, for which the index leaves out an entry whose record is whole.
_OF_TERMS = {"bad_term", "msg_id_mismatch"}


@dataclass(frozen=True)
class RepairedQueue:
    """The result for one directory of a queue.

    Attributes
    ----------
    name : str
    level : int or None
        Of a priority queue.
    directory : str
        The directory's own name.
    messages : int
        Messages that a node delivers from the output.
    lost : int
        Live entries whose message is gone or damaged, and those `missing`.
    transient, expired : int
        Messages that a node drops at any start, left out; and expired ones, kept though they are not delivered.
    files : str
        ``"copied"`` as they are, ``"rewritten"``, or ``"left out"``: the node would delete the directory, and its messages
        count as lost.  `export` reads them.
    redelivered : str
        ``"exact"``: the flag is as before; ``"all"``: the node marks all its messages as redelivered.
    unreadable : int
        Live entries whose message may be in a file that cannot be read: not in the output, not known to be lost.
    missing : int
        Messages that the recovery terms count and no index has.
    """

    name: str
    level: int | None
    directory: str
    messages: int
    lost: int
    transient: int
    expired: int
    files: str
    redelivered: str
    unreadable: int = 0
    missing: int = 0


@dataclass(frozen=True)
class RepairReport:
    """The result of `repair`.

    Attributes
    ----------
    source, output : str
    queues : list of RepairedQueue
    findings : list of Finding
        The damage of the source.
    store_rewritten : bool
        The message files were rewritten, with the messages that queues refer to.
    unreferenced : int
        Whole messages of the source in no index, acknowledged or with their index lost: a node does not deliver them.
        `export` with ``unreferenced=True`` reads them.
    """

    source: str
    output: str
    queues: list[RepairedQueue]
    findings: list[Finding]
    store_rewritten: bool
    unreferenced: int = 0

    @property
    def messages(self) -> int:
        """int: messages that the real node delivers from the output."""
        return sum(queue.messages for queue in self.queues)

    @property
    def lost(self) -> int:
        """int: messages that an index or the recovery terms count, and that are gone or damaged."""
        return sum(queue.lost for queue in self.queues)

    @property
    def unreadable(self) -> int:
        """int: live entries whose message may be whole in a file that cannot be read."""
        return sum(queue.unreadable for queue in self.queues)


def repair(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    segment_entry_count: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Write a new vhost directory with everything that is whole in a damaged one; the source stays as it is.

    A node boots on the output in the place of the source (stop the node, move the source away, move the output to its name).
    Queues and message files in which nothing is wrong are copied byte for byte; files that no node reads stay behind.

    Parameters
    ----------
    path : path
        A vhost's directory; the node must not run.
    output : path
        Must not exist.
    segment_entry_count : int, optional
        See `Vhost.open`.
    progress : callable, optional
        Called with (queue directories done, in all).

    Raises
    ------
    StoreError
        The source is not a vhost, or is one of RabbitMQ 4.x with a damaged queue; a message file or a file of an index
        cannot be read; the output exists; or the output did not pass verification (it then stays, under its temporary
        name).
    """
    target = os.path.abspath(os.fspath(output))
    if os.path.lexists(target):
        raise StoreError("the output exists; give a directory that does not", target)
    # Resolve links, so that an output inside the source is found.
    target = os.path.join(os.path.realpath(os.path.dirname(target)), os.path.basename(target))
    with Vhost.open(path, segment_entry_count=segment_entry_count, check_terms=True) as vhost:
        if vhost.is_pre_3_7:
            raise StoreError(
                "this is the layout of before 3.7, of which no node that runs today boots; use export, then import",
                vhost.path,
            )
        source = os.path.realpath(vhost.path)
        if (target + os.sep).startswith(source + os.sep):
            raise StoreError("the output is in the source; give another directory", target)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with OutputFolder(target, outside=[source]) as made:
            report = _Repair(vhost, made.part, progress).run(target)
            try:
                _check(made.part, report)
            except StoreError:
                made.kept = True
                raise
            _force(made.part)
    return report


class _Repair:
    def __init__(self, vhost: Vhost, output: str, progress: Callable[[int, int], None] | None):
        self.vhost = vhost
        self.output = output
        self.progress = progress
        self.now = time.time_ns() // 1_000_000
        self.findings = list(verify_vhost(vhost))
        self.terms: dict[str, dict[str, Any]] = {}
        # Ids of records whose terms hold another id: the output has that.
        self.renamed: dict[bytes, bytes] = {}
        for finding in self.findings:
            if finding.kind == UNREADABLE_STORE and finding.path.startswith(os.path.join(vhost.path, PERSISTENT)):
                # Unreadable messages are not lost: the output must not seem complete.
                raise StoreError(f"{finding.detail}; make it readable first", finding.path)
            if finding.kind == UNREAD_FORMAT:
                raise StoreError(f"{finding.detail}, so that the output would lack its messages", finding.path)
            # A directory or a FIFO in the place of a file has no messages.
            if finding.kind == UNREADABLE and (
                os.path.isfile(finding.path) or os.path.dirname(finding.path) == os.path.join(vhost.path, "queues")
            ):
                raise StoreError(f"{finding.detail}; make it readable first", finding.path)

    def run(self, target: str) -> RepairReport:
        vhost = self.vhost
        if any(self._wrong(each) and not self._deleted(each) for each in vhost.directories):
            # Undamaged files of version 2 are copied.
            vhost.refuse_version_4(
                "a damaged queue cannot be written again; write its messages to a file (rmqstore rabbitmq export), and "
                "publish them to a running node"
            )
        healthy = not any(finding.consequence is not Consequence.NONE for finding in self.findings)
        self._small_files()
        store_path = os.path.join(vhost.path, PERSISTENT)
        store_wrong = any(
            finding.path.startswith(store_path) and finding.kind != UNREFERENCED for finding in self.findings
        )
        kept: set[bytes] = set()
        queues = []
        for number, directory in enumerate(vhost.directories):
            queues.append(self._queue(directory, kept))
            if self.progress is not None:
                self.progress(number + 1, len(vhost.directories))
        if os.path.isdir(store_path):
            if not store_wrong:
                self._copy_store(store_path, with_clean_state=healthy)
                # Without the clean state a node also reads the rest of the files.
                store_wrong = bool(self.renamed) or (not healthy and self._scan_meets_damage(kept))
            if store_wrong:
                self._rewrite_store(kept)
        self._recovery_terms(healthy)
        queues += self._gone()
        unreferenced, _ = count_unreferenced(vhost)
        return RepairReport(vhost.path, target, queues, self.findings, store_wrong, unreferenced)

    def _gone(self) -> list[RepairedQueue]:
        """Report the queues of which only recovery terms are left."""
        known = self.vhost.known_directories
        found = []
        for finding in self.findings:
            if finding.kind == "missing_directory":
                directory, lost = os.path.basename(finding.path), finding.messages
                name = known.get(directory)
                whose = (f"<{directory}>", None) if name is None else (name.queue, name.priority)
                found.append(RepairedQueue(*whose, directory, 0, lost, 0, 0, "left out", "all", missing=lost))
        return found

    def _small_files(self) -> None:
        vhost = self.vhost
        for name in ("queues", *STORES):
            os.makedirs(os.path.join(self.output, name), exist_ok=True)
        if vhost.name:
            self._write(".vhost", vhost.name.encode("utf-8", "surrogateescape"))
        self._write(".config", layout.format_config(vhost.segment_entry_count))

    def _write(self, name: str, data: bytes) -> None:
        with open(os.path.join(self.output, name), "wb") as file:
            file.write(data)

    def _recovery_terms(self, healthy: bool) -> None:
        source = os.path.join(self.vhost.path, "recovery.dets")
        target = os.path.join(self.output, "recovery.dets")
        if healthy and os.path.exists(source):
            shutil.copyfile(source, target)
        elif self.terms:
            write_recovery_terms(target, self.terms)

    def _queue(self, directory: QueueDirectory, kept: set[bytes]) -> RepairedQueue:
        name, terms = directory.queue_name, directory.terms
        target = os.path.join(self.output, "queues", directory.name)
        rows = _Rows(self.vhost, directory, self.now, self.renamed)
        if self._deleted(directory):
            rows.count()
            return self._report(directory, rows, "left out", False)
        # With damaged terms the node would not open the queue.
        exact = directory.clean and terms is not None
        if not self._wrong(directory):
            self._copy_queue(directory, target)
            rows.count()
            files = "copied"
            if exact and terms is not None:
                self.terms[directory.name] = terms
        else:
            new_terms = self._write_index(target, rows)
            files = "rewritten"
            stale = any(problem.kind in STALE for problem in directory.problems)
            exact = exact and directory.index_version == 1 and not stale
            if exact and terms is not None:
                # Numbers and the redelivered flag stay; counts are those of the output.
                stay: dict[str, Any] = {
                    key: terms[key] for key in ("next_seq_id", "next_deliver_seq_id", "persistent_ref") if key in terms
                }
                stay["next_seq_id"] = max(stay["next_seq_id"], new_terms["next_seq_id"])
                self.terms[directory.name] = {**new_terms, **stay}
            if name is not None:
                stub = layout.format_queue_name(name.vhost, name.queue, name.priority)
                self._write(os.path.join("queues", directory.name, ".queue_name"), stub)
        kept |= rows.stored
        return self._report(directory, rows, files, exact)

    def _wrong(self, directory: QueueDirectory) -> bool:
        """Check that the files of a queue have to be rewritten, also for damage that a node repairs by itself."""
        prefix = directory.path + os.sep
        return any(
            (finding.consequence in {*_GRAVE, Consequence.REPAIRS} or finding.kind == COPIED_SEGMENT)
            and (finding.path == directory.path or finding.path.startswith(prefix))
            for finding in self.findings
        )

    def _copy_queue(self, directory: QueueDirectory, target: str) -> None:
        # Files that no node reads stay behind; some, such as a FIFO or a broken symlink, cannot be copied.
        os.makedirs(target)
        for name in directory.files:
            source = os.path.join(directory.path, name)
            if directory.is_read(name) and os.path.isfile(source):
                shutil.copyfile(source, os.path.join(target, name))

    def _deleted(self, directory: QueueDirectory) -> bool:
        return any(
            finding.path == directory.path and finding.consequence is Consequence.DELETES for finding in self.findings
        )

    def _report(self, directory: QueueDirectory, rows: _Rows, files: str, exact: bool) -> RepairedQueue:
        missing = directory.lacking
        left_out = files == "left out"
        return RepairedQueue(
            directory.owner,
            directory.level,
            directory.name,
            0 if left_out else rows.messages - rows.expired,
            missing + rows.lost + (rows.messages if left_out else 0),
            rows.transient,
            rows.expired,
            files,
            "exact" if exact else "all",
            rows.unreadable,
            missing,
        )

    def _write_index(self, target: str, rows: _Rows) -> dict[str, Any]:
        count, shift, last = self.vhost.segment_entry_count, 0, None
        with QueueIndex.open(target, segment_entry_count=count, create=True) as index:
            for entry in rows:
                if last is not None and (entry.seq_id - shift - last) // count > WIDEST_GAP:
                    # The number is damaged: keep the order and continue in the next segment.
                    shift = entry.seq_id - (last // count + 1) * count
                last = entry.seq_id - shift
                index.publish(
                    msg_id=entry.msg_id,
                    message=entry.message,
                    size=entry.size,
                    expiry_us=entry.expiry_us,
                    persistent=True,
                    seq_id=last,
                )
                # A node since 3.10 delivers at once.
                index.deliver([last])
            index.flush()
            terms = index.close()
        assert terms is not None
        return terms

    def _copy_store(self, source: str, with_clean_state: bool) -> None:
        for name in listing(source).checked().names:
            if name.endswith((".rdq", ".rdt")) or (with_clean_state and name in CLEAN_FILES):
                shutil.copyfile(os.path.join(source, name), os.path.join(self.output, PERSISTENT, name))

    def _scan_meets_damage(self, kept: set[bytes]) -> bool:
        references = dict.fromkeys(kept, 1)
        path = os.path.join(self.output, PERSISTENT)
        scan = "auto" if self.vhost.version_4 is None else "bytewise"
        with MessageStore.open(path, read_only=True, references=references, scan=scan) as store:
            return any(STORE_CONSEQUENCES.get(problem.kind) not in _HARMLESS for problem in store.problems)

    def _rewrite_store(self, kept: set[bytes]) -> None:
        source = self.vhost.store()
        if source is None:
            return
        for path in listing(os.path.join(self.output, PERSISTENT)).checked().paths:
            os.unlink(path)
        with contextlib.closing(MessageStore.open(os.path.join(self.output, PERSISTENT), references={})) as store:
            ids = source.locations().msg_id.tobytes()
            for at in range(0, len(ids), 16):
                msg_id = ids[at : at + 16]
                if msg_id in kept:
                    store.write(self.renamed.get(msg_id, msg_id), source.read_term(msg_id))


class _Rows:
    """The entries of a directory that can be delivered, and the number of the others; iterate once."""

    def __init__(self, vhost: Vhost, directory: QueueDirectory, now: int, renamed: dict[bytes, bytes]):
        self.vhost = vhost
        self.renamed = renamed
        self.directory = directory
        self.now = now
        self.messages = self.lost = self.transient = self.expired = self.unreadable = 0
        self.stored: set[bytes] = set()

    def _doubtful(self) -> Iterator[IndexEntry]:
        """Yield entries that the index leaves out for their term, with the id of a whole term."""
        if not any(problem.kind in _OF_TERMS for problem in self.directory.problems):
            return
        with QueueIndex.open(
            self.directory.path,
            segment_entry_count=self.vhost.segment_entry_count,
            read_only=True,
            check_terms=False,
        ) as index:
            known = np.concatenate([each.columns().seq_id for each in self.directory.indexes])
            left_out = set(np.setdiff1d(index.columns().seq_id, known).tolist())
            for entry in index if left_out else ():
                if entry.seq_id in left_out:
                    found = None if entry.message is None else _term.message_id_of(entry.message)
                    yield entry._replace(msg_id=found) if found is not None else entry._replace(message=b"")

    def count(self) -> None:
        """Count without using the entries."""
        for _ in self:
            pass

    def __iter__(self) -> Iterator[IndexEntry]:
        for entry in heapq.merge(self.directory.entries(), self._doubtful(), key=lambda entry: entry.seq_id):
            if entry.message is None and not entry.persistent:
                self.transient += 1
                continue
            met = Met.of(self.vhost, entry)
            if not entry.persistent and not met.is_falsely_transient:
                self.transient += 1
            elif met.unread is not None:
                self.unreadable += 1
            elif not self._is_whole(met):
                self.lost += 1
            else:
                if entry.message is None:
                    self.stored.add(entry.msg_id)
                    entry = entry._replace(msg_id=self.renamed.get(entry.msg_id, entry.msg_id))
                self.messages += 1
                if entry.expiry is not None and entry.expiry <= self.now:
                    self.expired += 1
                yield entry

    def _is_whole(self, met: Met) -> bool:
        if met.own_id is None:
            return met.term is not None and met.reason is None
        # The message is whole.  If another message has its own id too, the right one is unknown.
        msg_id, store = met.entry.msg_id, self.vhost.store()
        if (store is not None and met.own_id in store) or met.own_id in self.renamed.values():
            return self.renamed.get(msg_id) == met.own_id
        self.renamed[msg_id] = met.own_id
        return True


def _check(path: str, report: RepairReport) -> None:
    """Read the output as a node would, and compare it with the report."""
    with Vhost.open(path, check_terms=True) as vhost:
        for finding in verify_vhost(vhost):
            if finding.consequence in _GRAVE:
                raise StoreError(
                    f"the output has {finding.kind} ({finding.detail}); it was left in place, please report this",
                    finding.path,
                    finding.pos,
                )
        written = [queue for queue in report.queues if queue.files != "left out"]
        for directory, queue in zip(sorted(vhost.directories, key=lambda each: each.name), written, strict=True):
            found = sum(entry.persistent for entry in directory.entries())
            if directory.name != queue.directory or found != queue.messages + queue.expired + (
                0 if queue.files == "rewritten" else queue.lost - queue.missing
            ):
                raise StoreError(
                    f"the output has {found} messages, not {queue.messages}; please report it", directory.path
                )


def _force(path: str) -> None:
    # Force all names and contents to the disk before the directory gets its final name.
    for folder, _, files in os.walk(path):
        for name in files:
            fd = open_regular(os.path.join(folder, name))
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    fsync_tree(path)
