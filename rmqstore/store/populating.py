"""Pages ahead of the writer: made ready before a put comes to them, so that it does not pay for their first touch.

Owns how far ahead of each end that is: in proportion to what was written since the last look, up to
`StoreConfig.populate_ahead_size`, and never past a file's end but into the one that is prepared to follow it.  A slow writer
gets none: what is made ready becomes dirty, and a flush would write it before anything is in it.  It runs on a thread of its
own (`Upkeep.start`), since a flush may hold up the other one for seconds.  It takes no lock that a put takes for
long, reads the ends as they stand, changes no byte, and raises nothing: what it missed costs a put the fault that it would
have cost anyway.
"""

from __future__ import annotations

import contextlib
import weakref

from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import StoreError
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.index.index_service import IndexService

__all__ = ["PopulateAhead"]

# Looks this often (ms) while something is written, and less and less often while nothing is.  Each look takes the
# interpreter lock from the writer for a moment.
_SHORTEST, _LONGEST = 20, 160
# Ahead of an end lies so often what was written between two looks: the next look may come late.
_LOOKS_AHEAD = 4
# At once, so that a writer that overtook is noticed, and a close waits for no more than this.
_STEP = 2 << 20
# Less than this is not worth a call, and a writer that needs less is slow.
_LEAST_STEP = 64 << 10
# Entries between two looks, from which on the hash slots are made ready: they are some thousand pages.
_MANY_ENTRIES = 100
# A queue takes 20 bytes a message; with more queues than this each grows too slowly for it to matter.
_MOST_QUEUES = 64


class _Window:
    """What is known of one end.

    Where it was at the last look and in which file, up to where pages are ready, and how much is expected to be written
    until they are made ready again.
    """

    __slots__ = ("end", "expected", "file", "ready")

    def __init__(self, end: int):
        self.end = self.ready = end
        self.file: int | None = None
        self.expected = 0.0

    def move(self, end: int, weight: float) -> int:
        """The end is here now; int: by how much it grew."""
        grown = end - self.end
        if grown < 0:
            # The stream was cut; some pages after the cut are ready, but which is not worth keeping.
            self.ready, grown = end, 0
        self.end = end
        # A batch comes as a whole, and then nothing for some looks.
        self.expected = max(grown * weight, self.expected / 2)
        return grown


class PopulateAhead:
    """The pages ahead of the ends of a store's log, queues and newest index file.

    Parameters
    ----------
    log : MappedFileQueue
        The segments.
    queues : ConsumeQueueStore
    index_service : IndexService or None
    size : int
        Bytes ahead of each end at most.
    """

    def __init__(self, log: MappedFileQueue, queues: ConsumeQueueStore, index_service: IndexService | None, size: int):
        self.size = size
        self._log = log
        self._queues = queues
        self._index_service = index_service
        self._windows: weakref.WeakKeyDictionary[MappedFileQueue, _Window] = weakref.WeakKeyDictionary()
        self._index_name: str | None = None
        self._index_window = _Window(0)
        self._slots_ready = False
        self._interval = _SHORTEST

    def look(self) -> int:
        """Make pages ready ahead of every end that grew; int: ms until the next look is worth while."""
        # What came together in a long pause says less about the next moment.
        weight = _LOOKS_AHEAD * _SHORTEST / self._interval
        grew = self._follow(self._log, weight)
        queues = self._queues.opened()
        if len(queues) <= _MOST_QUEUES:
            for queue in queues:
                grew |= self._follow(queue.files, weight)
        # An index file that is closed meanwhile needs no pages.
        with contextlib.suppress(StoreError):
            grew |= self._follow_index(weight)
        self._interval = _SHORTEST if grew else min(self._interval + self._interval // 4 + 1, _LONGEST)
        return self._interval

    def _follow(self, files: MappedFileQueue, weight: float) -> bool:
        window = self._windows.get(files)
        if window is None:
            window = self._windows[files] = _Window(files.wrote_where)
        offsets = files.offsets
        if not offsets:
            return False
        is_new, window.file = window.file != offsets[-1], offsets[-1]
        grown = window.move(files.wrote_where, weight)
        end, wanted = window.end, self._wanted(window)
        file_end = offsets[-1] + files.mapped_file_size
        target = min(end + wanted, file_end)
        start = max(window.ready, end)
        if target - start >= _step(wanted) or start < target == file_end:
            while start < target and files.populate(start, min(start + _STEP, target)):
                window.ready = min(start + _STEP, target)
                start = max(window.ready, files.wrote_where)
        if end + wanted > file_end:
            files.populate(file_end, end + wanted)
        return grown > 0 or is_new

    def _follow_index(self, weight: float) -> bool:
        service = self._index_service
        index = None if service is None else service.opened_newest()
        if service is None or index is None:
            return False
        mapped_file = index.mapped_file
        end = index.entry_pos(min(index.index_count, index.index_num - 1))
        if index.name != self._index_name:
            self._index_name, self._index_window, self._slots_ready = index.name, _Window(end), False
        window = self._index_window
        grown = window.move(end, weight)
        # Slots are written in no order, so that all of them are needed from the first entries on.
        slots_end = index.entry_pos(0)
        if not self._slots_ready and slots_end <= self.size and grown * weight >= _LOOKS_AHEAD * _MANY_ENTRIES * 20:
            self._slots_ready = mapped_file.populate(0, slots_end)
        wanted = self._wanted(window)
        target = min(end + wanted, mapped_file.size)
        start = max(window.ready, end)
        if target - start >= _step(wanted) and mapped_file.populate(start, target - start):
            window.ready = target
        if end + wanted > mapped_file.size:
            service.prepared.populate(min(slots_end + _STEP, self.size))
        return grown > 0

    def _wanted(self, window: _Window) -> int:
        # Bytes that should be ready ahead of the end.
        return min(int(window.expected), self.size) if window.expected >= _LEAST_STEP else 0


def _step(wanted: int) -> int:
    return max(min(wanted // _LOOKS_AHEAD, _STEP), _LEAST_STEP)
