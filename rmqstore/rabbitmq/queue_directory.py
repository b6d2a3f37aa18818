"""One directory below a vhost's ``queues``: the index in it, whose it is, and what of it cannot be read.

Owns which files make an index of which version, and behind which damage live entries may stand.  It only reads.
Rules: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from rmqstore.errors import StoreError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.rabbitmq._core import MAX_SEQ_ID
from rmqstore.rabbitmq.index_directory import JOURNAL, SEGMENT_NAME, IndexEntry
from rmqstore.rabbitmq.layout import QueueName, read_queue_name
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.problem import Problem, unreadable_file
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2, both

if TYPE_CHECKING:
    from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["QueueDirectory", "is_journal_end"]

_V1_FILE = re.compile(r"\d+\.idx|journal\.jif")
_V2_FILE = re.compile(r"\d+\.q[is]")
# What hides no live entry: a node passes over it, or it is about numbers.  All else of an index may.
_HIDES_NOTHING = {"nul_file", "memory_only", "bad_terms", "next_seq_id_too_low"}
_HIDES_NOTHING_IN_JOURNAL = {"ack_without_publish"}


def is_journal_end(index: QueueIndex, problem: Problem) -> bool:
    """bool: a problem of the journal is what a crash leaves at its end, cut or never written."""
    return problem.kind in ("zero_tail", "nul_file") or (
        problem.kind == "torn_record" and (problem.pos or 0) >= index.journal_size
    )


class QueueDirectory(NotCopied):
    """One directory below ``queues``: a queue, or one level of a priority queue.

    Attributes
    ----------
    path : str
    name : str
        The directory's own name.
    queue_name : QueueName or None
        Whose it is; None where nothing tells.
    index_version : int
        1 or 2; 2 also while a node is half-way from one to the other.
    terms : dict or None
        The queue's recovery terms, if the last stop left any.
    """

    def __init__(self, vhost: Vhost, name: str):
        self._vhost = vhost
        self.name = name
        self.path = os.path.join(vhost.path, "queues", name)
        self.terms: dict[str, Any] | None = vhost.terms.get(name)
        self.queue_name = read_queue_name(self.path)
        self.files: list[str] = []
        # What of it cannot be opened, so that the queue is read without it.
        self.unreadable: list[Problem] = []
        if os.path.isdir(self.path):
            found = listing(self.path)
            self.files = found.names
            if found.error is not None:
                self.unreadable.append(unreadable_file(self.path, found.error))
        self.index_version = 2 if any(map(_V2_FILE.fullmatch, self.files)) else 1

    def __repr__(self) -> str:
        return f"<QueueDirectory {self.name} of {self.queue_name}>"

    @property
    def level(self) -> int | None:
        """int or None: the level of a priority queue."""
        return self.queue_name.priority if self.queue_name else None

    @property
    def is_misplaced(self) -> bool:
        """bool: its stub names a queue whose directory has another name, so that no node takes it for that queue's."""
        name = self.queue_name
        return name is not None and self._vhost.directory_of(name.vhost, name.queue, name.priority) != self.name

    @property
    def clean(self) -> bool:
        """bool: its recovery terms are there and are what a node goes by."""
        if self.terms is None:
            return False
        if self.index_version == 2:
            return "v2_index_state" in self.terms and bool(self.indexes) and self.indexes[-1].recovered_clean
        clean = all(isinstance(index, QueueIndex) and index.recovered_clean for index in self.indexes)
        return clean and not self.unreadable

    @staticmethod
    def is_read(name: str) -> bool:
        """bool: a file of this name is one that a node, or a person who looks for a queue, reads."""
        return name == ".queue_name" or any(pattern.fullmatch(name) for pattern in (_V1_FILE, _V2_FILE))

    @property
    def is_without_index(self) -> bool:
        """bool: a queue of version 1 without journal and segments, one of which a node makes along with the stub."""
        stub = self.queue_name is not None and self.queue_name.index_version == 1 and ".queue_name" in self.files
        return stub and self.index_version == 1 and not self.has_version_1

    @property
    def has_version_1(self) -> bool:
        """bool: there is a journal or a segment of version 1."""
        return any(map(_V1_FILE.fullmatch, self.files))

    @cached_property
    def indexes(self) -> list[QueueIndex | QueueIndexV2]:
        """The indexes, opened read-only: one, or both while a node is half-way from version 1 to 2.

        None where the directory cannot be read; `problems` says why.
        """
        found: list[QueueIndex | QueueIndexV2] = []
        if self.unreadable:
            return found
        try:
            if self.has_version_1 or self.index_version == 1:
                terms = self.terms if self.terms is not None and "segments" in self.terms else None
                found.append(
                    QueueIndex.open(
                        self.path,
                        segment_entry_count=self._vhost.segment_entry_count,
                        read_only=True,
                        terms=terms,
                        check_terms=self._vhost.check_terms,
                    )
                )
            if self.index_version == 2:
                found.append(QueueIndexV2.open(self.path, terms=self.terms))
        except OSError as error:
            self.unreadable.append(unreadable_file(self.path, error))
        return found

    def entries(self) -> Iterator[IndexEntry]:
        """IndexEntry: what is live, in the order of sequence ids."""
        # A node that was stopped half-way has some entries in both.
        yield from (both(*self.indexes) if len(self.indexes) == 2 else chain.from_iterable(self.indexes))

    def name_by_messages(self) -> QueueName | None:
        """Find the queue's name among the routing keys of its first messages; None without one that fits.

        The routing key of a message that went through the default exchange is the queue's name, and its hash is the
        directory's.
        """
        tried: set[str] = set()
        for number, entry in enumerate(self.entries()):
            if number == 64:
                break
            try:
                message = Message.from_term(entry.message) if entry.message is not None else None
                keys = message.routing_keys if message is not None else []
                vhost = (message.vhost if message is not None else None) or self._vhost.name
            except StoreError:
                continue
            for key in keys:
                if key not in tried:
                    tried.add(key)
                    for level in (None, *range(256)):
                        if self._vhost.directory_of(vhost, key, level) == self.name:
                            return QueueName(vhost, key, level)
        return None

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: what was met in the files of the index."""
        return [problem for index in self.indexes for problem in index.problems] + self.unreadable

    @property
    def incomplete(self) -> list[Problem]:
        """list of Problem: those of `problems` behind which live entries may stand that nobody can list."""
        found = [problem for index in self.indexes for problem in index.problems if self._hides(index, problem)]
        if self.is_without_index and self._vhost.has_unused:
            detail = (
                "there is neither a journal nor a segment; whole messages that no index has may be of this queue "
                "(rmqstore rabbitmq dump --unreferenced)"
            )
            found.append(Problem(self.path, None, "missing_index", detail))
        return found + self.unreadable

    def _hides(self, index: QueueIndex | QueueIndexV2, problem: Problem) -> bool:
        if isinstance(index, QueueIndex) and os.path.basename(problem.path) == JOURNAL:
            if is_journal_end(index, problem):
                # As after a crash: what is cut there was never whole.  After an orderly stop all of it was.
                return index.recovered_clean
            if problem.kind in _HIDES_NOTHING_IN_JOURNAL:
                return False
        if problem.kind == "segment_count_mismatch" and isinstance(index, QueueIndex):
            return self._lacks_entries(index, problem.path)
        return problem.kind not in _HIDES_NOTHING

    def _lacks_entries(self, index: QueueIndex, path: str) -> bool:
        # A segment that went away after an orderly stop leaves only what the recovery terms say of it.
        match = SEGMENT_NAME.fullmatch(os.path.basename(path))
        number = int(match[1]) if match else -1
        if not 0 <= number <= MAX_SEQ_ID // index.segment_entry_count:
            return False
        stated = (self.terms or {})["segments"]
        pairs = stated.items() if isinstance(stated, Mapping) else stated
        return index.segments.get(number, 0) < {int(key): int(count) for key, count in pairs}.get(number, 0)

    def close(self) -> None:
        """Close the files that are open."""
        for index in self.__dict__.pop("indexes", []):
            if isinstance(index, QueueIndex):
                index.close()
