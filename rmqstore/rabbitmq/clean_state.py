"""The clean state of a message store: what an orderly close leaves, so that the next opening scans nothing.

Owns `clean.dot`, `file_summary.ets` and `msg_store_index.ets`: their reading, with every check against the message
files, their writing and their deletion.  It never changes a message file, nor what `MessageFiles` knows.  The table
of the index is read and written apart from `ets`, because the compiled module takes and gives its objects as bytes.

Invariants: `clean.dot` is written last, and without it the others mean nothing; a state that does not fit is refused.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.os_errors import is_too_large, missing_file, naming_errors
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.ets import FileSummary, clean_dot, file_summaries, header_of, is_counted, parse, parse_clean_dot
from rmqstore.rabbitmq.layout import map_file, read_present
from rmqstore.rabbitmq.message_files import MAX_FILE, MessageFiles
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.term import Atom, decode, encode

__all__ = ["CLEAN_FILES", "CleanState", "forget_clean_state", "read_clean_state", "write_clean_state"]

CLEAN_FILES = ("clean.dot", "file_summary.ets", "msg_store_index.ets")


class CleanState(NamedTuple):
    """What an orderly close says; `files` is {number: [valid size, file size]}."""

    table: _messages.LocationTable
    files: dict[int, list[int]]
    client_refs: list[bytes]
    node: str


def read_clean_state(message_files: MessageFiles, present: list[int], client_refs: list[bytes] | None) -> CleanState:
    """What an orderly close left, checked against the message files that are `present` (§7.2.5, §9).

    Raises
    ------
    FileNotFoundError
        One of the three files is missing.
    CorruptionError
        The reason why they cannot be used.
    """
    clean_path, summary_path, index_path = (os.path.join(message_files.path, name) for name in CLEAN_FILES)
    for path in (summary_path, index_path):
        if not os.path.exists(path):
            raise missing_file(path)
    refs = parse_clean_dot(_small(clean_path), path=clean_path)
    if client_refs is not None and sorted(refs) != client_refs:
        raise CorruptionError("the state was made for other queues than those with recovery terms", clean_path, 0)

    files: dict[int, list[int]] = {}
    for row in _summaries(_small(summary_path), summary_path):
        path = message_files.path_of(row.file) if 0 <= row.file <= MAX_FILE else summary_path
        if row.file in files:
            raise CorruptionError(f"the clean state has two rows of {row.file}.rdq", summary_path, 0)
        if row.file not in present:
            raise CorruptionError(f"{row.file}.rdq is known to the clean state and is not there", path, 0)
        actual = os.stat(path).st_size
        if not 0 <= row.valid_total_size <= row.file_size <= actual:
            said = f"{row.file_size} bytes, {row.valid_total_size} of them in use"
            raise CorruptionError(f"the clean state says {said}; the file has {actual}", path, 0)
        files[row.file] = [row.valid_total_size, row.file_size]
    extra = sorted(set(present) - set(files))
    if extra and extra[-1] > max(files, default=-1):
        raise CorruptionError("the clean state does not know the file", message_files.path_of(extra[-1]), 0)
    for number in extra:
        # A node that is stopped may not get round to deleting a file that it has merged into its neighbour.
        detail = "the clean state does not know the file; nothing in it is in use"
        message_files.problems.append(Problem(message_files.path_of(number), 0, "unknown_file", detail, None))
    files = dict(sorted(files.items()))

    # It has a row for each message, and may be as large as it says.
    region = map_file(index_path)
    if region is None:
        raise CorruptionError("the file is not a table that was closed", index_path, 0)
    try:
        with region.view(0, region.size) as data:
            header, at = _ets_header(data, index_path)
            table = _messages.LocationTable(min(len(data) // 60, sum(size for _, size in files.values()) // 25))
            try:
                loaded, at = table.load_ets_items(data, at)
            except StoreError as error:
                # The compiled module knows no paths.
                raise type(error)(error.message, index_path, error.pos) from None
            _check_ets_end(data, at, loaded, index_path)
    finally:
        region.close()
    numbers = np.array(list(files), np.int64)
    valid, wrong = table.sums(numbers, np.array([size for _, size in files.values()], np.int64))
    if wrong:
        raise CorruptionError(f"{wrong} messages of the clean state lie in no file, or after its end", index_path, 0)
    for i, number in enumerate(files):
        if int(valid[i]) != files[number][0]:
            raise CorruptionError(
                f"the clean state says {files[number][0]} bytes of {number}.rdq are in use, its places say {valid[i]}",
                summary_path,
                0,
            )
    return CleanState(table, files, refs, str(header.get("node", "nonode@nohost")))


def write_clean_state(message_files: MessageFiles, client_refs: list[bytes], node: str) -> None:
    """Leave the state of an orderly close, which the next opening, here or in a node, takes instead of a scan."""
    clean_path, summary_path, index_path = (os.path.join(message_files.path, name) for name in CLEAN_FILES)
    files, table = message_files.summaries, message_files.table
    numbers = list(files)
    undefined = Atom("undefined")
    rows = []
    for i, number in enumerate(numbers):
        left = numbers[i - 1] if i else undefined
        right = numbers[i + 1] if i + 1 < len(numbers) else undefined
        valid, size = files[number]
        row = (Atom("file_summary"), number, valid, left, right, size, Atom("false"), 0)
        rows.append(_ets_item(encode(row)))
    items = table.ets_items()
    tables = (
        (summary_path, "rabbit_msg_store_file_summary", "ordered_set", b"".join(rows), len(rows)),
        (index_path, "rabbit_msg_store_ets_index", "set", items, len(table)),
    )
    for path, name, kind, objects, count in tables:
        _write_file(path, _ets_bytes(name, kind, objects, count, node))
    # This one last: without it the other two mean nothing.
    fsync_directory(message_files.path)
    _write_file(clean_path, clean_dot(client_refs))
    fsync_directory(message_files.path)


def forget_clean_state(path: str) -> None:
    """Delete it before the first change: from here on a crash must leave a store that is scanned."""
    gone = False
    for name in CLEAN_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
            gone = True
    if gone:
        fsync_directory(path)


def _write_file(path: str, data: bytes) -> None:
    with naming_errors(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# --------------------------------------------------------------------------------------------------- ets tables (§9.3)

_ETS_HEAD = bytes.fromhex("0102030463584d0b")
# Bytes of the first and the last item of a table, more than they have.
_MAX_ITEM = 1 << 20


def _ets_item(term: bytes) -> bytes:
    return len(term).to_bytes(4, "big") + b"bWLA" + term


def _ets_bytes(name: str, kind: str, objects: bytes, count: int, node: str) -> bytes:
    # Only what a node needs to load the table (3.10.8): it also writes ids, owner and memory of the table that it had.
    no, yes = Atom("false"), Atom("public")
    header = (
        (Atom("read_concurrency"), no),
        (Atom("write_concurrency"), no),
        (Atom("compressed"), no),
        (Atom("name"), Atom(name)),
        (Atom("size"), count),
        (Atom("node"), Atom(node)),
        (Atom("named_table"), no),
        (Atom("type"), Atom(kind)),
        (Atom("keypos"), 2),
        (Atom("protection"), yes),
        (Atom("major_version"), 1),
        (Atom("minor_version"), 0),
        (Atom("extended_info"), [Atom("object_count")]),
    )
    end = [Atom("$end_of_table"), [(Atom("count"), count)]]
    return _ETS_HEAD + _ets_item(encode(header)) + objects + _ets_item(encode(end))


def _small(path: str) -> bytes:
    try:
        return read_present(path)
    except OSError as error:
        if not is_too_large(error):
            raise
        raise CorruptionError(error.strerror or "the file is too large", path, 0) from None


def _ets_header(data: memoryview, path: str) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(data[8:12], "big")
    if bytes(data[:8]) != _ETS_HEAD or bytes(data[12:16]) != b"bWLA" or not 0 < size <= min(len(data) - 16, _MAX_ITEM):
        raise CorruptionError("the file is not a table that was closed", path, 0)
    try:
        item = decode(bytes(data[16 : 16 + size]), max_size=0)
    except StoreError as error:
        raise CorruptionError("the table's header cannot be understood", path, 16) from error
    return dict(header_of(item, path)), 16 + size


def _summaries(data: bytes, path: str) -> list[FileSummary]:
    # The rows of a small table; that of places has as many as there are messages.
    table = parse(data, path=path)
    if not is_counted(table.end, len(table.objects)):
        raise CorruptionError("the table does not end as one that is whole", path, len(data))
    try:
        return file_summaries(table)
    except CorruptionError as error:
        raise CorruptionError(error.message, path, 0) from None


def _check_ets_end(data: memoryview, at: int, count: int, path: str) -> None:
    size = min(int.from_bytes(data[at : at + 4], "big"), _MAX_ITEM)
    with contextlib.suppress(StoreError):
        end = decode(bytes(data[at + 8 : at + 8 + size]), max_size=0)
        whole = type(end) is list and len(end) == 2 and end[0] == "$end_of_table" and at + 8 + size == len(data)
        if bytes(data[at + 4 : at + 8]) == b"bWLA" and whole and is_counted(end[1], count):
            return
    raise CorruptionError("the table does not end as one that is whole", path, at)
