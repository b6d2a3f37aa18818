"""rmqstore tail: the newest messages, and with --follow new ones.

Messages appear in the order of the log, each once; those that cannot be shown (damaged, or deleted by retention before they
were read) are reported on stderr with their phy offset.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import click

from rmqstore.cli.errors import CannotOpenError
from rmqstore.cli.group import INTERRUPTED, exit_not_found
from rmqstore.cli.messages import MessageForm, about_queues, form_options, print_message
from rmqstore.cli.options import (
    Given,
    optional_topic_argument,
    path_argument,
    queues_option,
    selecting,
    store_options,
    tags_option,
)
from rmqstore.cli.terminal import Progress, note
from rmqstore.commitlog.log_walk import VERDICT_WORDS, Blank, Damage
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import OffsetOutOfRangeError, StoreChangedError
from rmqstore.files.listing import ask_again
from rmqstore.message import MessageExt
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore

# Records to remember, to continue after the newest one that a writer's recovery keeps.
_REMEMBERED = 4096
_REMEMBERED_AT_FIRST = 256
# Size of the first step back from the end of the log.
_BACK = 1 << 16
_POLL_SECONDS = 0.2
# Polls without progress before the search for damage before a newer segment.
_PATIENCE = 3


@click.command()
@path_argument
@optional_topic_argument
@click.option("-f", "--follow", is_flag=True, help="Follow new messages until Ctrl-C.")
@queues_option
@tags_option
@click.option("--key", help="Only messages with this key or unique key.")
@click.option(
    "-n",
    "--max-num",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=10,
    show_default=True,
    help="Number of newest messages to show first.",
)
@click.option(
    "--begin-phy-offset",
    type=click.IntRange(min=0),
    help="Show all messages from this phy offset, instead of the newest.",
)
@form_options
@store_options
@selecting("topic", "queue_ids", "tags", "key", "max_num", "begin_phy_offset")
def tail(path: str, selection: Selection, follow: bool, form: MessageForm, given: Given) -> None:
    """Show the newest messages, and follow new ones with -f.

    Messages are shown oldest first. A broker or another process may be writing to the store: tail takes no lock and
    changes no consumer progress. It reports, and survives, files that retention deletes, a log that recovery truncates,
    and a store that is replaced.
    """
    if selection.topics is None and selection.queue_ids:
        raise click.UsageError("--queue requires TOPIC")
    printer = form.printer(given.as_json)
    # New messages are shown wherever they are.
    begin, selection = selection.begin_phy_offset, replace(selection, begin_phy_offset=None)

    def show(message: MessageExt) -> None:
        print_message(printer, message, form)

    try:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(given.open(path))
            end = store.commit_log.max_offset
            shown = 0
            # Read first, so that every message shown is known to have existed then.
            before = _newest_of_moment(store, end, Selection(max_num=_REMEMBERED_AT_FIRST)) if follow else []
            if begin is not None:
                newest: Iterable[MessageExt] = _from_offset(store, begin, end, selection)
            else:
                newest = _newest_of_moment(store, end, selection)
            for message in newest:
                shown += 1
                show(message)
            if not follow:
                if not shown and selection.max_num:
                    about = "" if selection.topics is None else about_queues(store, selection.topic, selection.queue_ids or ())
                    exit_not_found(f"no message {_described(selection)}{about}")
                return
            if selection.topics is not None and selection.topic not in store.topics():
                note(f"topic {selection.topic} has no queue yet; waiting for its first message")
            _Follower(path, given, store, stack, end).run(before, selection, show)
    except KeyboardInterrupt:
        # The usual end of --follow.
        sys.stdout.flush()
        click.get_current_context().exit(INTERRUPTED)


# ----------------------------------------------------------------------------------------------------------- the newest


def _described(selection: Selection) -> str:
    parts = [
        f"of topic {selection.topics[0]}" if selection.topics else "",
        f"in queue {', '.join(map(str, sorted(selection.queue_ids)))}" if selection.queue_ids else "",
        f"with tags {' || '.join(sorted(selection.tags))}" if selection.tags is not None else "",
        f"with key {selection.keys[0]}" if selection.keys else "",
    ]
    return " ".join(part for part in parts if part) or "in the log"


def _messages(
    store: MessageStore, begin: int, end: int, selection: Selection, progress: Progress | None = None
) -> Iterator[MessageExt]:
    for number, entry in enumerate(store.commit_log.entries(begin, end)):
        if progress is not None and number % 4096 == 0:
            progress(entry.phy_offset - begin, end - begin)
        if isinstance(entry, MessageExt) and selection.has(entry):
            yield entry


def _from_offset(store: MessageStore, begin: int, end: int, selection: Selection) -> Iterator[MessageExt]:
    log = store.commit_log
    first = max(begin, log.min_offset)
    # Start at the beginning of a record: the middle of one would look like damage.
    start = first if log.look_up(first) is not None else max(first - first % log.segment_size, log.min_offset)
    return (message for message in _messages(store, start, end, selection) if message.phy_offset >= begin)


def _newest_of_moment(store: MessageStore, end: int, selection: Selection) -> list[MessageExt]:
    """Call `_newest` again if retention deletes a file while it is being read."""
    return ask_again(lambda: _newest(store, end, selection), store.refresh, (OffsetOutOfRangeError, FileNotFoundError))


def _newest(store: MessageStore, end: int, selection: Selection) -> list[MessageExt]:
    """Return the newest selected messages that begin before `end`, oldest first."""
    max_num = selection.max_num or 0
    if max_num == 0:
        return []
    any_topic = selection.topics is None
    by_key = selection.keys is not None and _has_index(store) and not (any_topic and store.queues.unseen)
    queues = [] if any_topic else list(_readable(store, selection))
    # If some queues cannot be read, the log has more than the others.
    if not by_key and (any_topic or store.queues.unseen or store.queues.unread):
        return _newest_of_log(store, end, selection)
    log = store.commit_log
    # Read messages that are not in a queue yet from the log.
    dispatched = min(max(_dispatched_end(store), log.min_offset), end)
    with Progress("reading the log", "bytes") as progress:
        undispatched = deque(_messages(store, dispatched, end, selection, progress), maxlen=max_num)
    older = _by_key(store, selection) if by_key else _by_queue(store, selection, queues)
    found = list(undispatched)[::-1]
    for message in older:
        if len(found) >= max_num:
            break
        if message.phy_offset < dispatched:
            found.append(message)
    return found[::-1]


def _dispatched_end(store: MessageStore) -> int:
    """Return the phy offset of the end of the newest record that is in its queue, or -1."""
    end = store.queues.dispatched_end(store.commit_log)
    if end >= 0:
        return end
    units = [queue.last_record() for queue in _readable(store, Selection())]
    return max((unit.phy_offset + unit.size for unit in units if unit is not None), default=-1)


def _newest_of_log(store: MessageStore, end: int, selection: Selection) -> list[MessageExt]:
    """Read the log backwards from `end`, in growing parts that begin with a record."""
    log = store.commit_log
    max_num = selection.max_num or 0
    found: list[MessageExt] = []
    begin, size = end, _BACK
    with Progress("reading backwards", "bytes") as progress:
        while len(found) < max_num and begin > log.min_offset:
            stop = begin
            begin = log.step_before(log.min_offset, max(stop - size, log.min_offset))
            progress(end - stop, end - log.min_offset)
            found[:0] = deque(_messages(store, begin, stop, selection), maxlen=max_num - len(found))
            size *= 4
    return found


def _has_index(store: MessageStore) -> bool:
    return store.index_service is not None and (bool(store.index_service.names) or store.database_index.is_used())


def _units(store: MessageStore, queues: Iterable[AnyConsumeQueue]) -> Iterator[tuple[Unit, AnyConsumeQueue]]:
    """Yield the units of the queues, those of the newest records first; a record may have several."""

    def newest_first(queue: AnyConsumeQueue) -> Iterator[tuple[Unit, AnyConsumeQueue]]:
        return ((unit, queue) for unit in queue.backward(*queue.bounds(store.commit_log.min_offset)))

    return heapq.merge(*map(newest_first, queues), key=lambda each: -each[0].phy_offset)


def _readable(store: MessageStore, selection: Selection) -> Iterator[AnyConsumeQueue]:
    """Yield the selected queues, and warn of unreadable ones."""
    for name, queue_id in store.queues.keys():
        if selection.has_queue(name, queue_id):
            try:
                queue = store.queues.find(name, queue_id)
                if queue is not None:
                    queue.last_record()
            except FileNotFoundError:
                raise
            except OSError as error:
                store.queues.leave_out(name, queue_id, error)
                continue
            if queue is not None:
                yield queue


def _by_queue(
    store: MessageStore, selection: Selection, queues: Iterable[AnyConsumeQueue]
) -> Iterator[MessageExt]:
    before = -1
    for unit, queue in _units(store, queues):
        if unit.phy_offset == before:
            continue
        before = unit.phy_offset
        if selection.tags is not None and not selection.may_have_code(queue.tags_code(unit)):
            continue
        message = store.commit_log.look_up(unit.phy_offset, unit.size)
        if message is not None and selection.has(message):
            yield message


def _by_key(store: MessageStore, selection: Selection) -> list[MessageExt]:
    """Return the newest messages with a key from the index, newest first."""
    max_num = selection.max_num or 0
    found = []
    for topic in store.topics() if selection.topics is None else selection.topics:
        ask = max_num
        while True:
            hits = store.query_message(topic, selection.key, ask)
            chosen = [message for message in hits if selection.has(message)]
            if len(chosen) >= max_num or not hits.truncated:
                found += chosen
                break
            ask *= 8
    return sorted(found, key=lambda message: -message.phy_offset)


# ------------------------------------------------------------------------------------------------------------ following


@dataclass(slots=True)
class _Follower:
    """The position in a growing log."""

    path: str
    given: Given
    store: MessageStore
    stack: contextlib.ExitStack
    position: int
    # (phy offset, size, store time) of previous records, the newest last.
    passed: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    idle: int = 0

    def run(self, before: list[MessageExt], selection: Selection, show: Callable[[MessageExt], None]) -> None:
        """Show new messages after `before`, forever."""
        for message in before:
            self._remember(message)
        pause = _Pause()
        while True:
            try:
                self._look(selection, show)
            except StoreChangedError:
                self._begin_again()
                continue
            except (OffsetOutOfRangeError, FileNotFoundError):
                # A file was deleted while it was read; the next poll lists the files again.
                if not os.path.isdir(os.path.join(self.path, "commitlog")):
                    self._say_gone()
            sys.stdout.flush()
            pause(_POLL_SECONDS)

    def _remember(self, message: MessageExt) -> None:
        self.passed.append((message.phy_offset, message.size, message.store_timestamp))

    def _look(self, selection: Selection, show: Callable[[MessageExt], None]) -> None:
        log = self.store.commit_log
        log.refresh()
        if not log.files.offsets and (self.position or not os.path.isdir(os.path.join(self.path, "commitlog"))):
            self._say_gone()
        end = log.max_offset
        if end <= self.position:
            self.idle += 1
            self._look_behind_damage()
            return
        self.idle = 0
        # Deleted parts are reported below.
        for entry in log.entries(self.position, end, on_gone=lambda begin, until: None):
            if entry.phy_offset > self.position:
                note(
                    f"phy offsets {self.position} to {entry.phy_offset} were deleted before they were shown (retention)"
                )
            if isinstance(entry, Damage):
                note(
                    f"{entry.size} bytes at phy offset {entry.phy_offset} are damaged "
                    f"({VERDICT_WORDS[entry.verdict.name]}); continuing after them"
                )
            elif not isinstance(entry, Blank):
                self._remember(entry)
                if selection.has(entry):
                    show(entry)
            self.position = entry.phy_offset + entry.size
        if self.position < log.min_offset:
            note(f"phy offsets {self.position} to {log.min_offset} were deleted before they were shown (retention)")
        self.position = max(self.position, end)

    def _look_behind_damage(self) -> None:
        # After a damaged part a writer continues in the next segment, past the current end of the log.
        log = self.store.commit_log
        newer = [base for base in log.files.offsets if base > self.position]
        # A preallocated segment is empty.
        if self.idle >= _PATIENCE and any(any(log.files.file(base).region.read(0, 8)) for base in newer):
            log.set_end(max(log.find_end(), log.max_offset))

    def _begin_again(self) -> None:
        """Reopen the store and continue after the newest record that is unchanged."""
        if not os.path.isdir(os.path.join(self.path, "commitlog")):
            self._say_gone()
        self.stack.close()
        self.store = self.stack.enter_context(self.given.open(self.path))
        log = self.store.commit_log
        position = None
        while self.passed and position is None:
            phy_offset, size, timestamp = self.passed[-1]
            if phy_offset < log.min_offset:
                break
            now = log.look_up(phy_offset) if phy_offset < log.max_offset else None
            if now is not None and (now.size, now.store_timestamp) == (size, timestamp):
                position = phy_offset + size
            else:
                self.passed.pop()
        if position is not None:
            if position < self.position:
                note(f"the log was truncated at or after phy offset {position} (recovery by its writer); continuing there")
        elif self.passed:
            # All files of previous records were deleted.
            position = log.min_offset
            note(f"phy offsets {self.position} to {position} were deleted before they were shown (retention)")
        else:
            position = log.min_offset
            note(f"the store was replaced; continuing with its first message, at phy offset {position}")
        self.position = position
        self.idle = 0

    def _say_gone(self) -> None:
        raise CannotOpenError(
            f"the commit log was deleted or moved away [{self.path}]",
            "If the store is somewhere else now, run the command again with that path.",
        )


class _Pause:
    """A pause that raises BrokenPipeError if the reader of stdout is gone."""

    def __init__(self) -> None:
        self._poll: select.poll | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = sys.stdout.fileno()
            self._poll = select.poll()
            self._poll.register(descriptor, 0)

    def __call__(self, seconds: float) -> None:
        if self._poll is None:
            time.sleep(seconds)
        elif self._poll.poll(max(round(seconds * 1000), 1)):
            raise BrokenPipeError
