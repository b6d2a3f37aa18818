"""Merging of message files: two neighbours with garbage become one without, and the second is deleted (§8.4).

Owns when that is worth it, which pair is next, and the steps of one merge.  It never changes a file in place: the new
one is written beside the old one and takes its place.  It is not thread-safe: `MessageStore` has the lock.

Invariant: whatever step a process dies at, each message lies whole in a file that an opening reads.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
from collections.abc import Collection

import numpy as np

from rmqstore.files.durable import fsync_directory
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors
from rmqstore.rabbitmq.message_file import copy_bytes
from rmqstore.rabbitmq.message_files import RDT, MessageFiles
from rmqstore.rabbitmq.problem import Problem

__all__ = ["Merging"]

_GARBAGE_FRACTION = 0.5
_MAX_PAIRS = 2


class Merging:
    """The merging of one store's files.

    Attributes
    ----------
    suspended : bool
        A copy could not be written; nothing is merged by itself any more.
    """

    def __init__(self, files: MessageFiles):
        self._files = files
        self.suspended = False

    def merge_while_worth_it(self) -> None:
        """Merge as long as more than half of all bytes is garbage, and pairs fit (§8.4).

        A node looks after every batch of removes, after every roll and after every merge.  It has up to two pairs in
        work, whose garbage still counts while it decides; a busy node therefore merges one pair more than the share of
        garbage asks for, and so does this.
        """
        files = self._files
        under_way: collections.deque[tuple[int, int]] = collections.deque()
        while not self.suspended and (under_way or self._is_merging_worth_it()):
            while len(under_way) < _MAX_PAIRS and self._is_merging_worth_it():
                pair = self._pair_to_merge({number for pair in under_way for number in pair})
                if pair is None:
                    break
                under_way.append(pair)
            if not under_way:
                return
            pair = under_way.popleft()
            try:
                self._merge(*pair)
            except OSError as error:
                # As long as nothing was replaced, a full disk is not a reason to refuse removes and writes.
                if files.failure is not None:
                    raise
                self.suspended = True
                files.problems.append(Problem(files.path_of(pair[0]), 0, "merge_failed", str(error), None))

    def merge_all(self) -> int:
        """Merge as long as two neighbours fit into one, whatever the share of garbage is; how many were merged."""
        self.suspended = False
        merged = 0
        while (pair := self._pair_to_merge()) is not None:
            self._merge(*pair)
            merged += 1
        return merged

    def _is_merging_worth_it(self) -> bool:
        files = self._files
        size = files.size
        return size > 2 * files.file_size_limit and (size - files.valid_size) / size > _GARBAGE_FRACTION

    def _pair_to_merge(self, locked: Collection[int] = ()) -> tuple[int, int] | None:
        # The first two neighbours, the current file not among them, that fit into one file and are not empty.
        files = self._files
        numbers = list(files.summaries)
        for destination, source in itertools.pairwise(numbers[:-1]):
            first, second = files.summaries[destination][0], files.summaries[source][0]
            if destination in locked or source in locked:
                continue
            if first > 0 and second > 0 and first + second <= files.file_size_limit:
                return destination, source
        return None

    def _merge(self, destination: int, source: int) -> None:
        # §8.4 with the same result, byte for byte, by other steps.  A node copies aside what lies after the first gap,
        # cuts the file, and copies back; between the two its own recovery loses messages.  Here the .rdt gets the whole
        # new file and takes the place of the old one.  A crash leaves, before the rename, an .rdt whose records are all
        # whole elsewhere; after it, a source whose messages are in the destination as well.
        files, moves = self._files, []
        path, rdt_path = files.path_of(destination), files.path_of(destination | RDT)
        at = 0
        try:
            with open(rdt_path, "wb") as new, naming_errors(rdt_path):
                for number in (destination, source):
                    ids, positions, sizes, dead = files.live(number)
                    with open(open_regular(files.path_of(number)), "rb") as old:
                        for begin, size in _runs(positions, sizes):
                            copy_bytes(old, begin, size, new)
                    ends = at + np.cumsum(sizes)
                    moves.append((ids, ends - sizes, dead))
                    at = int(ends[-1])
                new.flush()
                os.fsync(new.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(rdt_path)
            raise
        try:
            os.rename(rdt_path, path)
        except OSError as error:
            files.fail(error)
            raise
        files.take_merged(destination, source, moves, at)
        try:
            # The source may only go when the name of the new file is on the disk.
            fsync_directory(files.path)
            os.unlink(files.path_of(source))
        except OSError as error:
            files.fail(error)
            raise


def _runs(positions: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int]]:
    # Records that lie one after the other are copied as one.
    starts = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + sizes[:-1])))
    ends = np.append(starts[1:], len(positions)) - 1
    return [
        (int(positions[first]), int(positions[last] + sizes[last] - positions[first]))
        for first, last in zip(starts, ends, strict=True)
    ]
