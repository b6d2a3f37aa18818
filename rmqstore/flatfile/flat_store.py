"""The tiered storage of one broker: its folders, its queues, which are opened on demand, and its messages by key.

Facts (RocketMQ 5.5.0): <path>/<8 hex of the MD5 of the cluster>_<cluster>/<broker>/<topic>/<queue id>/.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rmqstore.errors import CorruptionError, Finding, StoreClosedError, StoreError
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.mapped_file import MappedFilePool, NotCopied
from rmqstore.files.open_file import is_directory
from rmqstore.flatfile.flat_files import TieredMetadata, name_prefix
from rmqstore.flatfile.flat_index import FlatIndex, FlatKeys
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.index.key_source import SoughtKeys
from rmqstore.message import MessageExt
from rmqstore.selection import Selection
from rmqstore.sources import DamagePolicy

__all__ = ["INDEX_TOPIC", "FlatRange", "FlatStore"]

INDEX_TOPIC = "rmq_sys_INDEX"
"""The folder among the topics that has the index files."""

# Seconds.
_LOOK_INTERVAL = 1.0


class FlatRange(NamedTuple):
    """The messages of a queue from queue offset `begin` up to but not including `end`."""

    queue: FlatQueue
    begin: int
    end: int


class FlatStore(NotCopied):
    """The flat files of one broker, read-only.

    - `path`: the root of tiered storage (RocketMQ's tieredStoreFilePath); `folder`: the broker's folder in it.
    - `store_path`: the root of the broker's local store, with the metadata and the newest index files.
    - `cluster`, `broker`: needed if there are several; StoreError if several or none match.
    - `damage`: unreadable places are reported to it; by default it raises CorruptionError.  It and `goes_on`, see `FlatFiles`, can
      be set until the first queue is opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        store_path: str | os.PathLike[str] | None = None,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        damage: DamagePolicy | None = None,
        goes_on: bool = False,
    ):
        self.path = os.fspath(path)
        self.store_path = None if store_path is None else os.fspath(store_path)
        self.damage, self.goes_on = damage or DamagePolicy(), goes_on
        self._pool = MappedFilePool(1024)
        self.metadata: TieredMetadata | None = None
        self._metadata_problem: Finding | None = None
        self._load_metadata()
        self.folder, self.cluster, self.broker = self._choose(cluster, broker)
        self._queues: dict[tuple[str, int], FlatQueue] = {}
        self._keys: dict[tuple[str, int], FlatKeys] = {}
        # Folders of topics that cannot be listed, by topic; "" for the broker's own.
        self._unlisted: dict[str, Finding] = {}
        self.closed = False
        self._loaded_at = time.monotonic()
        path = os.path.join(self.folder, INDEX_TOPIC, "0", "INDEX")
        self.index = FlatIndex(path, self.store_path, self._pool, self.said("INDEX", INDEX_TOPIC, 0))

    # ------------------------------------------------------------------------------------------------------ folders

    def _load_metadata(self) -> None:
        self.metadata, self._metadata_problem = None, None
        if self.store_path is None:
            return
        try:
            self.metadata = TieredMetadata.load(self.store_path)
        except CorruptionError as error:
            detail = f"{error.message}; sizes are taken from the files"
            self._metadata_problem = Finding(error.path or self.store_path, error.pos or 0, "bad_metadata", detail)

    def _choose(self, cluster: str | None, broker: str | None) -> tuple[str, str, str]:
        if not is_directory(self.path):
            raise StoreError(
                "tiered storage: there is no such directory; give the broker's tieredStoreFilePath", self.path
            )
        found = [
            (os.path.join(self.path, name, each), name[9:], each)
            for name in listing(self.path).checked().names
            if len(name) > 9 and name[8] == "_" and name[:8] == name_prefix(name[9:]) and cluster in (None, name[9:])
            for each in listing(os.path.join(self.path, name), os.DirEntry.is_dir).existing().names
            if broker in (None, each)
        ]
        if len(found) > 1 and broker is None and self.metadata is not None:
            found = [each for each in found if each[2] in self.metadata.brokers] or found
        if len(found) == 1:
            return found[0]
        if not found:
            raise StoreError(
                "there is no tiered storage of RocketMQ here, or none of this cluster and broker; give the broker's "
                "tieredStoreFilePath, the folder that holds <8 digits>_<cluster>/",
                self.path,
            )
        names = ", ".join(f"{name} of cluster {group}" for _, group, name in found)
        raise StoreError(f"several brokers keep their messages here: {names}; say which (broker, cluster)", self.path)

    def said(self, kind: str, topic: str, queue_id: int) -> dict[int, int] | None:
        """Return the sizes of files of one kind in the metadata, by base offset, see `TieredMetadata`."""
        if self.metadata is None:
            return None
        return self.metadata.sizes.get((kind, f"{self.broker}/{topic}/{queue_id}"))

    def keys(self, topic: str | None = None) -> list[tuple[str, int]]:
        """Return topic and queue id of all queues, or those of one topic; also those that only the metadata have."""
        self.check_open()
        found = {
            (each, int(name))
            for each in self._topics(topic)
            for name in self._listed(each, os.path.join(self.folder, each))
            if _is_queue_id(name)
        }
        if self.metadata is not None:
            for kind, path in self.metadata.sizes:
                broker, _, rest = path.partition("/")
                each, _, name = rest.rpartition("/")
                if kind != "INDEX" and broker == self.broker and each and _is_queue_id(name) and topic in (None, each):
                    found.add((each, int(name)))
        return sorted(found)

    def _topics(self, topic: str | None) -> list[str]:
        return [each for each in (self._listed("", self.folder) if topic is None else [topic]) if _is_topic(each)]

    def _listed(self, topic: str, path: str) -> list[str]:
        try:
            return listing(path, os.DirEntry.is_dir).existing().names
        except OSError as error:
            self._unlisted[topic] = Finding(path, 0, "file", f"cannot be listed: {error.strerror or error}")
            return []

    def report_unlisted(self, topics: Iterable[str] | None = None) -> None:
        """Report the folders that `keys` could not list, of all topics or of these: queues may be in there."""
        for topic, finding in self._unlisted.items():
            if topics is None or not topic or topic in topics:
                self.damage.finding(finding)

    def queue(self, topic: str, queue_id: int) -> FlatQueue | None:
        """Return a queue; None if nothing of it is in tiered storage."""
        self.check_open()
        known = self._queues.get((topic, queue_id))
        if known is not None:
            return known
        if not _is_topic(topic):
            return None
        path = os.path.join(self.folder, topic, str(queue_id))
        log, units = self.said("COMMIT_LOG", topic, queue_id), self.said("CONSUME_QUEUE", topic, queue_id)
        if log is None and units is None and not _may_be_there(path):
            return None
        queue = FlatQueue(path, topic, queue_id, self._pool, self.damage, log, units, goes_on=self.goes_on)
        return self._queues.setdefault((topic, queue_id), queue)

    def queues(self, topic: str | None = None) -> Iterator[FlatQueue]:
        """Yield every queue, or those of one topic, in the order of `keys`."""
        for name, queue_id in self.keys(topic):
            queue = self.queue(name, queue_id)
            if queue is not None:
                yield queue

    @property
    def notes(self) -> list[str]:
        """list of str: what is unknown, and what that means."""
        found = []
        if self.store_path is None:
            found.append("the broker's local store is not known: newest messages and index files may be there only")
        unnoticed = "sizes are those of the files, and a queue, or a first or last file, that is missing is not noticed"
        if self._metadata_problem is not None:
            found.append(f"the metadata in {self._metadata_problem.path} cannot be read: {unnoticed}")
        elif self.metadata is None:
            found.append(f"there are no metadata: {unnoticed}")
        elif self.metadata.is_backup:
            found.append(
                f"the metadata are those of {self.metadata.path}, as the file itself is missing or cannot be read: "
                "what was uploaded since and is missing is not noticed"
            )
        return found

    @property
    def problems(self) -> list[Finding]:
        """list of Finding: problems of the metadata, and of files of queues and index as a whole."""
        own = [] if self._metadata_problem is None else [self._metadata_problem]
        of_queues = [each for queue in self.queues() for each in queue.problems]
        return [*own, *self._unlisted.values(), *of_queues, *self.index.problems]

    # ------------------------------------------------------------------------------------------------- messages, findings

    def ranges(self, selection: Selection) -> Iterator[FlatRange]:
        """Yield the range of each queue of a selection; folders that cannot be listed are reported."""
        keys = self.keys()
        self.report_unlisted(selection.topics)
        for topic, queue_id in keys:
            queue = self.queue(topic, queue_id) if selection.has_queue(topic, queue_id) else None
            if queue is None:
                continue
            queue.report_lacking()
            if queue.min_queue_offset < queue.max_queue_offset:
                yield FlatRange(queue, queue.min_queue_offset, queue.max_queue_offset)

    def keys_of(self, queue: FlatQueue) -> FlatKeys:
        """Return the index of a queue as it is now."""
        found = self._keys.get((queue.topic, queue.queue_id))
        if found is None:
            topic_ids = {} if self.metadata is None else self.metadata.topic_ids
            others = {queue_id for _, queue_id in self.keys(queue.topic)}
            found = self._keys[queue.topic, queue.queue_id] = FlatKeys(queue, self.index, topic_ids, others)
        return found

    def find_messages(self, selection: Selection) -> list[MessageExt]:
        """Return every message of one topic with one key and a store time in the range, newest first, checked by its record."""
        self.check_open()
        self.refresh()
        return ask_again(lambda: self._find_messages(selection), self.load)

    def _find_messages(self, selection: Selection) -> list[MessageExt]:
        sought, found = SoughtKeys.of(selection), list[MessageExt]()
        queues = list(self.queues(selection.topic))
        self.report_unlisted((selection.topic,))
        for queue in queues:
            queue.report_lacking()
            found += self.keys_of(queue).messages(sought)
        return sorted(found, key=lambda each: (-each.store_timestamp, each.queue_id, -each.queue_offset))

    def gaps(self, begins: Mapping[tuple[str, int], int]) -> Iterator[Finding]:
        """Yield a finding for queue offsets that neither tiered storage nor the local store has any more.

        `begins` has the first queue offset of each local queue, by topic and queue id.
        """
        # The broker uploads before it deletes, so a listing after the local queues is complete.
        self.refresh()
        for queue, begin, end in self.ranges(Selection()):
            low = begins.get((queue.topic, queue.queue_id), 0)
            if begin < end < low:
                yield queue.gap(end, low)

    # ------------------------------------------------------------------------------------------------ state, closing

    def load(self) -> None:
        """List all files again."""
        self.check_open()
        self._loaded_at = time.monotonic()
        self._load_metadata()
        for (topic, queue_id), queue in list(self._queues.items()):
            queue.load(self.said("COMMIT_LOG", topic, queue_id), self.said("CONSUME_QUEUE", topic, queue_id))
        self._keys, self._unlisted = {}, {}
        self.index.load(self.said("INDEX", INDEX_TOPIC, 0))

    def refresh(self) -> None:
        """Call `load` unless it ran within the last second: a broker uploads every 20 seconds."""
        if time.monotonic() - self._loaded_at >= _LOOK_INTERVAL:
            self.load()

    def check_open(self) -> None:
        """Raise StoreClosedError after `close`."""
        if self.closed:
            raise StoreClosedError("tiered storage was closed; open it again", self.path)

    def close(self) -> None:
        """Close the files; closing twice does nothing."""
        self.closed = True
        for queue in self._queues.values():
            queue.close()
        self.index.close()


def _may_be_there(path: str) -> bool:
    # A folder that this user may not read exists.
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return os.path.isdir(path)


def _is_topic(name: str) -> bool:
    # It is the name of a folder, and must not point outside the broker's.
    return bool(name) and os.sep not in name and "\0" not in name and name not in (".", "..", INDEX_TOPIC)


def _is_queue_id(name: str) -> bool:
    # Metadata may contain thousands of digits, which `int` refuses.
    return re.fullmatch("0|[1-9][0-9]{0,9}", name) is not None and int(name) < 2**31
