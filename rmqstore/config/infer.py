"""Infer the geometry of a store, and a few of its options, from its files.

Nothing is written or locked.  Numbers from files are hostile: every read is bounded and every walk ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._core import BatchUnitLayout, IndexLayout, Region, UnitLayout, decode_record, index_key_hash
from rmqstore.config.places import is_named, other_progress_file, progress_file, refuse_other_log, without_log
from rmqstore.config.saved_options import SIZES, load_options
from rmqstore.errors import GeometryError, GiveOptions, Sentence, StoreChangedError, StoreError, StoreNotFoundError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.open_file import is_directory, open_regular, opened, read_at, why_unreadable, written_end
from rmqstore.files.os_errors import is_unreadable, naming_errors
from rmqstore.message import MessageExt, SysFlag, host_to_bytes

if TYPE_CHECKING:
    from rmqstore.config.store_config import StoreConfig

__all__ = ["AssumedSizes", "has_no_entry", "infer", "is_usual_size", "own_size"]

logger = logging.getLogger(__name__)

UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
BATCH_UNIT_SIZE = int(BatchUnitLayout.BATCH_UNIT_SIZE)
INDEX_HEADER_SIZE = int(IndexLayout.INDEX_HEADER_SIZE)
INDEX_SLOT_SIZE = int(IndexLayout.SLOT_SIZE)
INDEX_ENTRY_SIZE = int(IndexLayout.ENTRY_SIZE)


def infer(cls: type[StoreConfig], root: str, read_only: bool, overrides: Mapping[str, Any]) -> StoreConfig:
    """See `StoreConfig.infer`."""
    # A listed file may be gone when it is opened; the next try lists them again.
    return ask_again(lambda: _infer_once(cls, root, read_only, overrides), gone=FileNotFoundError, tries=10)


def _infer_once(cls: type[StoreConfig], root: str, read_only: bool, overrides: Mapping[str, Any]) -> StoreConfig:
    found: dict[str, Any] = dict(overrides)
    assumed: list[str] = []
    if os.path.isfile(root):
        # A single index file.
        _infer_index_geometry([_File(root, 0, os.stat(root).st_size)], found, assumed)
        return cls(**{"assumed": tuple(assumed), **found})
    if not is_directory(root):
        raise StoreNotFoundError("there is no store directory: give the broker's storePathRootDir", root)
    refuse_other_log(root, overrides.get("unknown", {}))
    unknown_names = set(overrides) - set(cls.__dataclass_fields__)
    if unknown_names:
        raise TypeError(f"no such option: {', '.join(sorted(unknown_names))}")
    saved = load_options(root, cls, read_only=read_only)
    found = {name: value for name, value in saved.items() if value or name not in _BY_FOLDERS}
    found = {name: value for name, value in found.items() if name not in SIZES} | dict(overrides)
    segments = _numbered_files(os.path.join(root, "commitlog"))
    if "mapped_file_size_commit_log" in saved and not segments and _is_new(root):
        found.setdefault("mapped_file_size_commit_log", saved["mapped_file_size_commit_log"])
    _infer_sizes(root, segments, read_only, found, assumed)
    index_files = _numbered_files(os.path.join(root, "index"), digits=None, skip_unreadable=read_only)
    if read_only:
        # The opening of the index reports unreadable files.
        index_files = [file for file in index_files if why_unreadable(file.path) is None]
    if "max_index_num" in saved and _usual_index_size(index_files) in (0, cls(**saved).index_file_size):
        # The saved numbers also settle a size that fits several.
        found = {name: saved[name] for name in ("max_hash_slot_num", "max_index_num")} | found
    try:
        _infer_index_geometry(index_files, found, assumed)
    except GeometryError as error:
        if not read_only:
            raise
        if not all(has_no_entry(file.path) for file in index_files):
            logger.warning("the index is skipped, and no key is found by it: %s", error)
        assumed += [name for name in ("max_hash_slot_num", "max_index_num") if name not in found]
    assumed += [name for name in ("message_delay_level", "index_tags") if name not in found]
    found = {name: saved[name] for name in assumed if name in saved} | found
    assumed = [name for name in assumed if name not in saved or name in _BY_FOLDERS]
    config = cls(**found)
    records = (_records(segment, config.mapped_file_size_commit_log, read_only) for segment in segments[:2])
    first = next(itertools.chain.from_iterable(records), None)
    if first is not None:
        if "enabled_append_prop_crc" not in found:
            found["enabled_append_prop_crc"] = bool(_PROPERTIES_CRC.search(first.properties_stored))
        if "store_host" not in found:
            with contextlib.suppress(StoreError, ValueError):
                host_to_bytes(first.store_host)
                found["store_host"] = first.store_host
    if "index_tags" not in found:
        whole = [file for file in index_files if file.size == config.index_file_size]
        index_tags = _infer_index_tags(whole, segments, config, read_only)
        if index_tags is not None:
            found["index_tags"] = index_tags
            assumed.remove("index_tags")
    return cls(**{"assumed": tuple(assumed), **found})


# ------------------------------------------------------------------------------------------------ sizes of files

_MAX_QUEUE_FILES = 512
# Names that a store has in its root, some of them before its first segment.
_NAMES = ("commitlog", "checkpoint", "abort", "lock", "consumequeue", "batchconsumequeue", "index", "config")
# Options that folders of the store can show too.
_BY_FOLDERS = frozenset(("enable_consume_queue_ext", "enable_lmq", "enable_multi_dispatch"))


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    number: int
    size: int


def _numbered_files(directory: str, digits: int | None = 20, *, skip_unreadable: bool = False) -> list[_File]:
    """Return the regular files whose names are decimal numbers, in their order; none for a missing directory."""
    files: list[_File] = []
    is_number = re.compile("[0-9]{20}" if digits == 20 else "[0-9]{1,19}").fullmatch
    for entry in listing(directory, lambda entry: is_number(entry.name) is not None).existing(unreadable=skip_unreadable):
        try:
            status = entry.stat()
        except OSError as error:
            # Deleted by retention, or reported elsewhere: a broken symlink, an unreadable file.
            if isinstance(error, FileNotFoundError) or entry.is_symlink() or (skip_unreadable and is_unreadable(error)):
                continue
            raise
        if stat.S_ISREG(status.st_mode):
            files.append(_File(entry.path, int(entry.name), status.st_size))
    return sorted(files, key=lambda file: file.number)


def _queue_files(directory: str, *, skip_unreadable: bool = False) -> Iterator[_File]:
    """Yield the files of <directory>/<topic>/<queueId>/, unordered, like `_numbered_files`."""
    passed = (is_unreadable,) if skip_unreadable else ()
    for topic in listing(directory, os.DirEntry.is_dir).existing(unreadable=skip_unreadable).paths:
        for queue in listing(topic, os.DirEntry.is_dir).checked(*passed).paths:
            yield from _numbered_files(queue, skip_unreadable=skip_unreadable)


def _usual_size(files: list[_File]) -> int:
    """Return the size that `files` were created with, 0 if it is unknown.

    Files that were cut short or damaged have another length.  The name of a file is the offset of its first byte: a multiple of the
    size, and one size before the next file.  A length that fits the names is preferred, then a frequent one, then a longer one.
    """
    sizes = Counter(file.size for file in files if file.size)
    if len(sizes) <= 1:
        return next(iter(sizes), 0)
    ordered = sorted(files, key=lambda file: (os.path.dirname(file.path), file.number))
    steps = {
        later.number - file.number
        for file, later in itertools.pairwise(ordered)
        if os.path.dirname(file.path) == os.path.dirname(later.path)
    }
    fitting = [size for size in sizes if all(file.number % size == 0 for file in files)]
    if not fitting:
        return min(steps, default=max(sizes, key=lambda size: (sizes[size], size)))
    return max(fitting, key=lambda size: (size in steps, sizes[size], size))


def _usual_index_size(files: list[_File]) -> int:
    """Return the most frequent length of index files, whose names are times; the longest of equally frequent ones."""
    sizes = Counter(file.size for file in files if file.size)
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def is_usual_size(root: str | os.PathLike[str], kind: str, size: int) -> bool:
    """Return True if the files of one kind in a store were created with `size` bytes each; some may be damaged.

    - `kind`: the directory's name: "commitlog", "index", "consumequeue", "batchconsumequeue" or "consumequeue_ext".
    """
    directory = os.path.join(root, kind)
    if kind == "index":
        return _usual_index_size(_numbered_files(directory, digits=None, skip_unreadable=True)) == size
    if kind == "commitlog":
        return _usual_size(_numbered_files(directory)) == size
    files = itertools.islice(_queue_files(directory, skip_unreadable=True), _MAX_QUEUE_FILES)
    return _usual_size(list(files)) == size


def own_size(directory: str, usual: int, unit: int) -> int:
    """Return the size of the files of one queue if it differs from `usual`, as after a change of the option; else `usual`.

    A single shorter file counts as cut.
    """
    files = _numbered_files(directory, skip_unreadable=True)
    size = files[0].size if files else 0
    if size in (0, usual) or size % unit or (len(files) == 1 and size < usual):
        return usual
    in_a_row = all(file.size == size and file.number == files[0].number + at * size for at, file in enumerate(files))
    return size if in_a_row and files[0].number % size == 0 else usual


def _common_size(files: list[_File], kind: str, *options: str) -> int:
    """Return the usual size; GeometryError if it is unknown."""
    size = _usual_index_size(files) if kind == "an index file" else _usual_size(files)
    if not size:
        raise _unknown(files[0].path, f"{kind} of 0 bytes: the size is unknown; give ", *options)
    return size


def _unknown(path: str, text: str, *options: str, after: str = "") -> GeometryError:
    # `text` ends before the options to give.
    give = GiveOptions(tuple(f"{name}=..." for name in options), infer=False)
    return GeometryError(Sentence(text, give, *([after] if after else [])), path)


def _infer_sizes(
    root: str, segments: list[_File], read_only: bool, found: dict[str, Any], assumed: list[str]
) -> None:
    if "mapped_file_size_commit_log" not in found:
        if segments:
            found["mapped_file_size_commit_log"] = _common_size(
                segments, "a commit log segment", "mapped_file_size_commit_log"
            )
        else:
            without_log(root)
            if not any(os.path.lexists(os.path.join(root, name)) for name in _NAMES):
                raise StoreNotFoundError(
                    "there is no store in this directory; give the folder that holds commitlog/, or wait for its writer", root
                )
            if not (read_only and _is_new(root)):
                raise _unknown(
                    os.path.join(root, "commitlog"),
                    "the store has no commit log segment, so its geometry is unknown: give the options (",
                    "mapped_file_size_commit_log",
                    after=" at least) or the broker.conf",
                )
            assumed.append("mapped_file_size_commit_log")
    _infer_queue_sizes(root, read_only, found, assumed)
    # Queues of light message queues exist only where a broker dispatches to them.
    topics = listing(os.path.join(root, "consumequeue")).existing(unreadable=read_only)
    dispatches = any(name.startswith("%LMQ%") for name in topics.names)
    if "enable_lmq" not in found:
        plain = progress_file(root, lmq=False)
        of_lmq = other_progress_file(plain) is not None
        found["enable_lmq"] = dispatches or of_lmq
        # With two files of progress, or only the plain one, the broker's option decides.
        if found["enable_lmq"] and (is_named(plain) or is_named(plain + ".bak")):
            assumed.append("enable_lmq")
    if found["enable_lmq"]:
        # The records name their light queues.
        found.setdefault("enable_multi_dispatch", True)


def _is_new(root: str) -> bool:
    # A writer has put nothing yet: no message was forced to the disk, and nothing points into a log.
    if not any(os.path.exists(os.path.join(root, name)) for name in ("commitlog", "checkpoint", "abort", "lock")):
        return False
    if Checkpoint.load_or_zeros(os.path.join(root, "checkpoint")).physic_msg_timestamp > 0:
        return False
    folders = ("consumequeue", "batchconsumequeue")
    queues = (file for folder in folders for file in _queue_files(os.path.join(root, folder), skip_unreadable=True))
    return next(queues, None) is None and not _numbered_files(
        os.path.join(root, "index"), digits=None, skip_unreadable=True
    )


def _infer_queue_sizes(root: str, read_only: bool, found: dict[str, Any], assumed: list[str]) -> None:
    for directory, option, unit in (
        ("consumequeue", "mapped_file_size_consume_queue", UNIT_SIZE),
        ("batchconsumequeue", "mapper_file_size_batch_consume_queue", BATCH_UNIT_SIZE),
        ("consumequeue_ext", "mapped_file_size_consume_queue_ext", 1),
    ):
        if option in found and (directory != "consumequeue_ext" or "enable_consume_queue_ext" in found):
            continue
        listed = _queue_files(os.path.join(root, directory), skip_unreadable=read_only)
        files = list(itertools.islice(listed, _MAX_QUEUE_FILES))
        if directory == "consumequeue_ext":
            found.setdefault("enable_consume_queue_ext", bool(files))
            if option in found:
                continue
        if not files or (read_only and not any(file.size for file in files)):
            # A Java store creates a file and then extends it.
            assumed.append(option)
            continue
        size = _common_size(files, f"a file of {directory}", option)
        if size % unit:
            text = f"a file of {directory} of {size} bytes is not made of whole units of {unit} bytes: give "
            raise _unknown(files[0].path, text, option, after=" if it is to be read nevertheless")
        found[option] = size


class AssumedSizes:
    """Sizes that a reader assumed without a file, inferred again when the first file of the kind exists."""

    def __init__(self, root: str):
        self.root = root
        # Headers of index files at the last call.
        self._index_heads: list[tuple[str, bytes]] = []

    def learn(self, config: StoreConfig) -> StoreConfig:
        """Return `config` with newly inferred sizes; the same object without any."""
        if not SIZES.intersection(config.assumed):
            return config
        found = {name: value for name, value in config.as_dict().items() if name not in config.assumed}
        if "mapped_file_size_consume_queue_ext" in config.assumed:
            del found["enable_consume_queue_ext"]
        assumed: list[str] = []
        try:
            if "mapped_file_size_commit_log" in config.assumed:
                segments = _numbered_files(os.path.join(self.root, "commitlog"), skip_unreadable=True)
                if not segments:
                    return config
                name = "mapped_file_size_commit_log"
                found[name] = _common_size(segments, "a commit log segment", name)
            _infer_queue_sizes(self.root, True, found, assumed)
            if "max_index_num" in config.assumed:
                self._learn_index(found, assumed)
        except (FileNotFoundError, GeometryError):
            # A file came or went, or its size is unknown yet.
            return config
        learned = [name for name in config.assumed if name in found and name not in assumed]
        return config.replace(**{name: found[name] for name in ("enable_consume_queue_ext", *learned)}) if learned else config

    def _learn_index(self, found: dict[str, Any], assumed: list[str]) -> None:
        files = _numbered_files(os.path.join(self.root, "index"), digits=None, skip_unreadable=True)
        files = [file for file in files if why_unreadable(file.path) is None]
        heads = []
        for file in files[-8:]:
            with open(open_regular(file.path), "rb", buffering=0) as handle:
                heads.append((file.path, handle.read(INDEX_HEADER_SIZE)))
        if heads == self._index_heads:
            return
        self._index_heads = heads
        # The opening reported unclear files.
        with contextlib.suppress(GeometryError):
            _infer_index_geometry(files, found, assumed)


# ---------------------------------------------------------------------------------------------- index geometry

INDEX_HEADER = struct.Struct(">qqqqii")
_ENTRY = [("hash", ">i4"), ("phy_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
_ENTRIES_CHECKED = 100_000
_DEFAULT_SLOTS = 5_000_000
_DEFAULT_ENTRIES = 20_000_000


def _infer_index_geometry(files: list[_File], found: dict[str, Any], assumed: list[str]) -> None:
    slots, entries = found.get("max_hash_slot_num"), found.get("max_index_num")
    if slots is not None and entries is not None:
        return
    if not files:
        assumed += [name for name in ("max_hash_slot_num", "max_index_num") if name not in found]
        return
    size = _common_size(files, "an index file", "max_hash_slot_num", "max_index_num")
    files = [file for file in files if file.size == size]
    words, odd = divmod(size - INDEX_HEADER_SIZE, 4)
    if odd or words < 1 + 5 * 2:
        text = f"an index file of {size} bytes: no number of slots and entries gives that size; give "
        raise _unknown(files[0].path, text, "max_hash_slot_num", "max_index_num", after=" or move the file away")
    if slots is not None or entries is not None:
        # One of the two is known: the other follows from the length.
        other, rest = divmod(words - slots, 5) if slots is not None else (words - 5 * (entries or 0), 0)
        if rest or other < 1:
            known = f"max_hash_slot_num={slots}" if slots is not None else f"max_index_num={entries}"
            raise GeometryError(f"an index file of {size} bytes does not fit {known}", files[0].path)
        chosen = slots if slots is not None else other
        for file in list(reversed(files))[:8]:
            fitting = _fitting_slot_counts(file.path, words)
            if fitting and chosen not in fitting:
                raise GeometryError(
                    f"the index file was written with {fitting[0]} slots, not {chosen}; leave out max_hash_slot_num and "
                    "max_index_num, or give the right ones",
                    file.path,
                )
        found["max_hash_slot_num"], found["max_index_num"] = (slots, other) if slots is not None else (other, entries)
        return
    votes: Counter[int] = Counter()
    witness: dict[int, str] = {}
    ambiguous: tuple[str, list[int]] | None = None
    # The newest files first: they have the current geometry.
    for file in list(reversed(files))[:8]:
        with naming_errors(file.path):
            fitting = _fitting_slot_counts(file.path, words)
        if len(fitting) == 1:
            votes[fitting[0]] += 1
            witness.setdefault(fitting[0], file.path)
        elif fitting:
            ambiguous = ambiguous or (file.path, fitting)
    if len(votes) > 1:
        (first, _), (second, _) = votes.most_common(2)
        text = f"the index files disagree: this one has {second} slots, {witness[first]} has {first}; give "
        raise _unknown(witness[second], text, "max_hash_slot_num")
    if votes:
        (slots,) = votes
    elif words == _DEFAULT_SLOTS + 5 * _DEFAULT_ENTRIES:
        # The contents decide nothing, but the length is that of RocketMQ's defaults.
        slots = _DEFAULT_SLOTS
        assumed += ["max_hash_slot_num", "max_index_num"]
    elif ambiguous:
        path, fitting = ambiguous
        shown = ", ".join(map(str, fitting[:4])) + (", ..." if len(fitting) > 4 else "")
        text = f"an index file of {size} bytes fits {len(fitting)} numbers of slots ({shown}): give "
        raise _unknown(path, text, "max_hash_slot_num")
    else:
        text = f"an index file of {size} bytes fits many numbers of slots, and it is empty or damaged: give "
        raise _unknown(files[-1].path, text, "max_hash_slot_num")
    found["max_hash_slot_num"], found["max_index_num"] = slots, (words - slots) // 5


def has_no_entry(path: str) -> bool:
    """Return True for an index file without a key: nothing after its header, and no count in it."""
    with opened(path) as descriptor:
        header = read_at(descriptor, INDEX_HEADER_SIZE, 0)
        if len(header) < INDEX_HEADER_SIZE or INDEX_HEADER.unpack(header)[-1] > 1:
            return False
        return written_end(descriptor) <= INDEX_HEADER_SIZE


def _fitting_slot_counts(path: str, words: int) -> list[int]:
    """Return the numbers of slots that fit the contents of an index file; none if it is empty or damaged.

    The length gives slots + 5 * entries = `words`: the entry table begins at one place in 20 bytes.  The last byte that is not zero
    is in the newest entry, whose number is in the header.  Both leave one place (two after an interrupted put), which slots and
    chains must confirm.
    """
    with opened(path) as descriptor:
        header = read_at(descriptor, INDEX_HEADER_SIZE, 0)
        if len(header) < INDEX_HEADER_SIZE:
            return []
        counts = INDEX_HEADER.unpack(header)[-3:]
        end_phy_offset, _, index_count = counts
        if index_count <= 1 or index_count > words // 5:
            return []
        last = written_end(descriptor) - 1
        if last < INDEX_HEADER_SIZE:
            return []
        candidates = set()
        # The newest entry, number indexCount - 1, holds `last`, or the next one after an interrupted put.  If all are of the record
        # at offset 0, the newest may be all zeros, so earlier ones are tried too.
        deepest = min(index_count, 64) if end_phy_offset == 0 else 1
        for newest in range(index_count - deepest, index_count + 1):
            # 40 + 4 * slots + 20 * newest <= last < 40 + 4 * slots + 20 * (newest + 1)
            highest = (last - INDEX_HEADER_SIZE) // 4 - 5 * newest
            slots = highest - (highest - words) % 5
            if slots >= 1 and (words - slots) // 5 >= max(index_count, 2):
                candidates.add(slots)
        return sorted(slots for slots in candidates if _split_fits(descriptor, slots, counts))


def _split_fits(descriptor: int, slots: int, counts: tuple[int, ...]) -> bool:
    # `counts` are the last fields of the header.
    end_phy_offset, hash_slot_count, index_count = counts
    table_pos = INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * slots
    head_num = min(index_count, _ENTRIES_CHECKED)
    tail_first = max(1, index_count - _ENTRIES_CHECKED)
    head_data = read_at(descriptor, head_num * INDEX_ENTRY_SIZE, table_pos)
    tail_data = read_at(
        descriptor, (index_count - tail_first) * INDEX_ENTRY_SIZE, table_pos + tail_first * INDEX_ENTRY_SIZE
    )
    if len(head_data) < head_num * INDEX_ENTRY_SIZE or len(tail_data) < (index_count - tail_first) * INDEX_ENTRY_SIZE:
        return False
    head = np.frombuffer(head_data, _ENTRY)
    tail = np.frombuffer(tail_data, _ENTRY)
    if any(head_data[:INDEX_ENTRY_SIZE]) or int(tail["phy_offset"][-1]) != end_phy_offset:
        return False
    for part, first in ((head[1:], 1), (tail, tail_first)):
        fields = np.array([part[name] for name, _ in _ENTRY], np.int64)
        if (fields < 0).any() or (fields[-1] >= np.arange(first, first + len(part))).any():
            return False
    # Replay the chains: the previous entry is the last one before it with the same slot.
    numbers = np.arange(1, head_num, dtype=np.int64)
    places = head["hash"][1:].astype(np.int64) % slots
    order = np.argsort(places, kind="stable")
    same_slot = places[order][1:] == places[order][:-1]
    expected = np.zeros(head_num - 1, dtype=np.int64)
    expected[order[1:][same_slot]] = numbers[order[:-1][same_slot]]
    if not np.array_equal(expected, head["previous"][1:]):
        return False
    slot_table = np.frombuffer(read_at(descriptor, slots * INDEX_SLOT_SIZE, INDEX_HEADER_SIZE), ">i4")
    # An interrupted put may have left the number `index_count` in its slot.
    if len(slot_table) < slots or (slot_table < 0).any() or (slot_table > index_count).any():
        return False
    used = int(np.count_nonzero(slot_table))
    # RocketMQ before 4.7.1 counted every put, later ones count the slots, and not an interrupted put.
    if hash_slot_count not in (used, used - 1, index_count - 1):
        return False
    # Every slot holds the newest entry of its chain.
    for part, first in ((head[1:], 1), (tail, tail_first)):
        newest = slot_table[part["hash"].astype(np.int64) % slots]
        if (newest < np.arange(first, first + len(part))).any():
            return False
    in_tail = (slot_table >= tail_first) & (slot_table < index_count)
    held = slot_table[in_tail].astype(np.int64) - tail_first
    return np.array_equal(tail["hash"][held].astype(np.int64) % slots, np.flatnonzero(in_tail))


# ------------------------------------------------------------------------------------------- first records of a log

_PROPERTIES_CRC = re.compile(rb"(?:\A|\x02)__CRC32#\x01[0-9]{10}\x02\Z")
_MAX_RECORDS = 1000
_DECISIVE_RECORDS = 16


def _records(segment: _File, segment_size: int, read_only: bool) -> Iterator[MessageExt]:
    # The records of a segment from its start up to other bytes.  For readers an unreadable segment has none here.
    try:
        with opened(segment.path) as descriptor:
            size = min(os.fstat(descriptor).st_size, segment_size)
            if not size:
                return
            region = Region.map(descriptor, size)
        try:
            pos = 0
            while pos < size and isinstance(record := decode_record(region, pos, -1, 0), tuple):
                message = MessageExt(record)
                yield message
                pos += message.size
        finally:
            region.close()
    except (OSError, StoreChangedError) as error:
        if not (read_only and (isinstance(error, StoreChangedError) or is_unreadable(error))):
            raise


@dataclass(frozen=True, slots=True)
class _IndexHead:
    path: str
    begin_phy_offset: int
    end_phy_offset: int
    index_count: int


def _infer_index_tags(
    index_files: list[_File], segments: list[_File], config: StoreConfig, read_only: bool
) -> bool | None:
    """Return True if the index of a store has tags, False if not, None if that is unknown.

    Searches the records of the first segment, and of the one with the first record of the newest index file, at most 1000 of each.
    """
    heads = []
    for file in index_files:
        with open(open_regular(file.path), "rb", buffering=0) as handle:
            header = handle.read(INDEX_HEADER_SIZE)
        if len(header) == INDEX_HEADER_SIZE:
            _, _, begin, end, _, index_count = INDEX_HEADER.unpack(header)
            if 1 < index_count <= config.max_index_num:
                heads.append(_IndexHead(file.path, begin, end, index_count))
    if not heads or not segments:
        return None
    looked_at = [segments[0]]
    for segment in reversed(segments):
        if segment.number <= heads[-1].begin_phy_offset:
            looked_at += [segment] if segment.number != segments[0].number else []
            break
    votes = {True: 0, False: 0}
    for segment in looked_at:
        records = _records(segment, config.mapped_file_size_commit_log, read_only)
        for record in itertools.islice(records, _MAX_RECORDS):
            vote = _tags_vote(record, heads, config.max_hash_slot_num)
            if vote is not None:
                votes[vote] += 1
                if sum(votes.values()) >= _DECISIVE_RECORDS:
                    break
        if votes[True] != votes[False]:
            return votes[True] > votes[False]
    return None


def _tags_vote(record: MessageExt, heads: list[_IndexHead], slots: int) -> bool | None:
    properties = record.properties
    tags = properties.get("TAGS")
    # Rollbacks are not indexed.
    if not tags or record.sys_flag & SysFlag.TRANSACTION_MASK.value == SysFlag.TRANSACTION_ROLLBACK.value:
        return None
    covering = [head for head in heads if head.begin_phy_offset <= record.phy_offset <= head.end_phy_offset]
    if not covering:
        return None

    def is_indexed(key: str) -> bool:
        return any(_holds(head, slots, record.topic, key, record.phy_offset) for head in covering)

    if is_indexed(f"T#{tags}"):
        return True
    keys = [key for key in properties.get("KEYS", "").split(" ") if key]
    if "UNIQ_KEY" in properties:
        keys.append(properties["UNIQ_KEY"])
    if keys:
        return False if all(is_indexed(key) for key in keys[:8]) else None
    inside = any(head.begin_phy_offset < record.phy_offset < head.end_phy_offset for head in covering)
    return False if inside else None


def _holds(head: _IndexHead, slots: int, topic: str, key: str, phy_offset: int) -> bool:
    """Return True if an index file has an entry for ``topic#key`` and `phy_offset`.

    Entries are in the order of the log: bisection finds those of the record.  A chain may be as long as the file.
    """
    hash_code = index_key_hash(topic, key)
    with open(open_regular(head.path), "rb", buffering=0) as file:

        def entry(number: int) -> tuple[int, int]:
            data = read_at(file.fileno(), 20, INDEX_HEADER_SIZE + 4 * slots + 20 * number)
            stored_hash, stored_phy_offset, _, _ = struct.unpack(">iqii", data.ljust(20, b"\0"))
            return stored_hash, stored_phy_offset

        low, high = 1, head.index_count
        while low < high:
            middle = (low + high) // 2
            if entry(middle)[1] < phy_offset:
                low = middle + 1
            else:
                high = middle
        for number in range(low, min(low + _ENTRIES_CHECKED, head.index_count)):
            stored_hash, stored_phy_offset = entry(number)
            if stored_phy_offset != phy_offset:
                return False
            if stored_hash == hash_code:
                return True
    return False
