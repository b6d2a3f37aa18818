"""The clean state of a message store, which an orderly close writes so that the next opening scans nothing.

Owns `clean.dot`, `file_summary.ets` and `msg_store_index.ets`: reading, with every check against the message files,
writing and deletion.  The tables are images that `ets:tab2file` writes into a log of `disk_log`.  It never changes a
message file.

Invariants: `clean.dot` is written last, and without it the others mean nothing; a state that does not fit is refused, as
in a node, which then scans its files.  Rules: Erlang/OTP 25, RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import is_too_large, missing_file, naming_errors
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.message_files import MAX_FILE, MessageFiles
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.term import Atom, consult, decode, encode

__all__ = [
    "CLEAN_FILES",
    "CleanState",
    "clean_dot_values",
    "forget_clean_state",
    "index_rows",
    "read_clean_state",
    "write_clean_state",
]

CLEAN_FILES = ("clean.dot", "file_summary.ets", "msg_store_index.ets")


class CleanState(NamedTuple):
    """The state of an orderly close; `files` is {number: [valid size, file size]}."""

    table: _messages.LocationTable
    files: dict[int, list[int]]
    client_refs: list[bytes]
    node: str


def read_clean_state(message_files: MessageFiles, present: list[int], client_refs: list[bytes] | None) -> CleanState:
    """Read the state, checked against the message files that are `present` (§7.2.5, §9).

    FileNotFoundError if one of the three files is missing; CorruptionError if they cannot be used.
    """
    clean_path, summary_path, index_path = (os.path.join(message_files.path, name) for name in CLEAN_FILES)
    for path in (summary_path, index_path, clean_path):
        if not os.path.exists(path):
            raise missing_file(path)
    refs = _client_refs(_small(clean_path), clean_path)
    if client_refs is not None and sorted(refs) != client_refs:
        raise CorruptionError("the state was made for other queues than those with recovery terms", clean_path, 0)

    files: dict[int, list[int]] = {}
    for number, valid_size, size in _summaries(_small(summary_path), summary_path):
        path = message_files.path_of(number) if 0 <= number <= MAX_FILE else summary_path
        if number in files:
            raise CorruptionError(f"the clean state has two rows of {number}.rdq", summary_path, 0)
        if number not in present:
            raise CorruptionError(f"{number}.rdq is known to the clean state and is not there", path, 0)
        actual = os.stat(path).st_size
        if not 0 <= valid_size <= size <= actual:
            said = f"{size} bytes, {valid_size} of them in use"
            raise CorruptionError(f"the clean state says {said}; the file has {actual}", path, 0)
        files[number] = [valid_size, size]
    extra = sorted(set(present) - set(files))
    if extra and extra[-1] > max(files, default=-1):
        raise CorruptionError("the clean state does not know the file", message_files.path_of(extra[-1]), 0)
    for number in extra:
        # A node may be stopped before it deletes a file that it has merged into its neighbour.
        detail = "the clean state does not know the file; nothing in it is in use"
        message_files.problems.append(Problem(message_files.path_of(number), 0, "unknown_file", detail, None))
    files = dict(sorted(files.items()))

    region = map_file(index_path)
    if region is None:
        raise CorruptionError("the file is not a table that was closed", index_path, 0)
    try:
        with region.view(0, region.size) as data:
            header, at = _header(data, index_path)
            table = _messages.LocationTable(min(len(data) // 60, sum(size for _, size in files.values()) // 25))
            try:
                loaded, at = table.load_ets_items(data, at)
            except StoreError as error:
                raise type(error)(error.message, index_path, error.pos) from None
            _check_end(data, at, loaded, index_path)
    finally:
        region.close()
    numbers = np.array(list(files), np.int64)
    valid, wrong = table.sums(numbers, np.array([size for _, size in files.values()], np.int64))
    if wrong:
        raise CorruptionError(f"{wrong} messages of the clean state are in no file, or after its end", index_path, 0)
    for i, number in enumerate(files):
        if int(valid[i]) != files[number][0]:
            raise CorruptionError(
                f"the clean state says {files[number][0]} bytes of {number}.rdq are in use, its places say {valid[i]}",
                summary_path,
                0,
            )
    return CleanState(table, files, refs, str(header.get("node", "nonode@nohost")))


def write_clean_state(message_files: MessageFiles, client_refs: list[bytes], node: str) -> None:
    """Write the state that the next opening, here or in a node, uses instead of a scan."""
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
        rows.append(_item(encode(row)))
    _write_file(summary_path, _image("rabbit_msg_store_file_summary", "ordered_set", b"".join(rows), len(rows), node))
    _write_file(index_path, _image(_INDEX_MODULE, "set", *index_rows(table), node))
    # This one last: without it the other two mean nothing.
    fsync_directory(message_files.path)
    _write_file(clean_path, _clean_dot(client_refs))
    fsync_directory(message_files.path)


def forget_clean_state(path: str) -> None:
    """Delete the state before the first change, so that the store is scanned after a crash."""
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


def _small(path: str) -> bytes:
    try:
        return read_small_file(path) or b""
    except OSError as error:
        if not is_too_large(error):
            raise
        raise CorruptionError(error.strerror or "the file is too large", path, 0) from None


# ----------------------------------------------------------------------------------------------------- clean.dot (§9.1)

_INDEX_MODULE = "rabbit_msg_store_ets_index"


def _clean_dot(client_refs: Iterable[bytes]) -> bytes:
    refs = ",".join("<<" + ",".join(map(str, ref)) + ">>" for ref in client_refs)
    return f"{{client_refs,[{refs}]}}.\n{{index_module,{_INDEX_MODULE}}}.\n".encode()


def clean_dot_values(data: bytes, path: str) -> dict[str, Any]:
    """Return the values of a `clean.dot` by name; CorruptionError if it is damaged."""
    found: dict[str, Any] = {}
    for one in consult(data, path=path):
        if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], Atom):
            raise CorruptionError("clean.dot holds something else than names and values", path, 0)
        found[str(one[0])] = one[1]
    return found


def _client_refs(data: bytes, path: str) -> list[bytes]:
    found = clean_dot_values(data, path)
    refs = found.get("client_refs")
    if not isinstance(refs, list) or not all(isinstance(ref, bytes) for ref in refs):
        raise CorruptionError("clean.dot has no client_refs", path, 0)
    # 4.x has one module for the index, and does not name it.
    if found.get("index_module", _INDEX_MODULE) != _INDEX_MODULE:
        raise CorruptionError(f"clean.dot names the index module {found['index_module']}, not {_INDEX_MODULE}", path, 0)
    return refs


# --------------------------------------------------------------------------------------------------- ets tables (§9.3)

_ETS_HEAD = bytes.fromhex("0102030463584d0b")
# Longer items have a checksum before them; these tables have no such items.
_MAX_ITEM = 65527


def _item(term: bytes) -> bytes:
    return len(term).to_bytes(4, "big") + b"bWLA" + term


def _image(name: str, kind: str, objects: bytes, count: int, node: str) -> bytes:
    # The fields that a node needs to load the table (3.10.8); its own have ids, owner and memory, too.
    no = Atom("false")
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
        (Atom("protection"), Atom("public")),
        (Atom("major_version"), 1),
        (Atom("minor_version"), 0),
        (Atom("extended_info"), [Atom("object_count")]),
    )
    end = [Atom("$end_of_table"), [(Atom("count"), count)]]
    return _ETS_HEAD + _item(encode(header)) + objects + _item(encode(end))


def index_rows(table: _messages.LocationTable) -> tuple[bytes, int]:
    """Return the rows of `msg_store_index.ets` as items, by file and position, and their number."""
    ids, refcounts, files, positions, sizes = table.columns()
    order = np.lexsort((positions, files))
    located = order[files[order] >= 0]
    name, id_bytes = Atom("msg_location"), ids[located].tobytes()
    numbers = zip(*(column[located].tolist() for column in (refcounts, files, positions, sizes)), strict=True)
    rows = [_item(encode((name, id_bytes[16 * i : 16 * i + 16], *row))) for i, row in enumerate(numbers)]
    return b"".join(rows), len(rows)


def _item_at(data: bytes | memoryview, at: int, path: str) -> tuple[Any, int]:
    # The value of the item at `at`, and its end.
    size = int.from_bytes(data[at : at + 4], "big")
    if bytes(data[at + 4 : at + 8]) != b"bWLA" or size > min(len(data) - at - 8, _MAX_ITEM):
        raise CorruptionError("no item of the table is here", path, at)
    try:
        return decode(data[at + 8 : at + 8 + size]), at + 8 + size
    except CorruptionError as error:
        raise CorruptionError(error.message, path, at + 8 + (error.pos or 0)) from None


def _header(data: bytes | memoryview, path: str) -> tuple[dict[str, Any], int]:
    if bytes(data[:8]) != _ETS_HEAD:
        raise CorruptionError("the file is not a table that was closed", path, 0)
    item, at = _item_at(data, 8, path)
    if not isinstance(item, tuple) or not all(
        isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], Atom) for one in item
    ):
        raise CorruptionError("the header of the table is not a list of names and values", path, 8)
    return {str(name): value for name, value in item}, at


def _check_end(data: bytes | memoryview, at: int, count: int, path: str) -> None:
    item, end = _item_at(data, at, path)
    # Not 3.0 for 3, and not True for 1.
    if repr(item) != repr([Atom("$end_of_table"), [(Atom("count"), count)]]) or end != len(data):
        raise CorruptionError("the table does not end as one that is whole", path, at)


def _summaries(data: bytes, path: str) -> list[Sequence[int]]:
    # Number, valid size and size of each file.
    undefined = Atom("undefined")
    rows: list[Sequence[int]] = []
    _, at = _header(data, path)
    while True:
        row, end = _item_at(data, at, path)
        if isinstance(row, list):
            _check_end(data, at, len(rows), path)
            return rows
        if not isinstance(row, tuple) or len(row) != 8 or row[0] != "file_summary" or row[6] not in ("true", "false"):
            raise CorruptionError(f"{row!r} is not a row of file_summary.ets", path, at)
        # Neighbours may be missing, and 4.x counts no readers.
        numbers = [*row[1:3], row[5], *(one for one in (*row[3:5], row[7]) if one != undefined)]
        if not all(type(one) is int for one in numbers):
            raise CorruptionError(f"{row!r} is not a row of file_summary.ets", path, at)
        rows.append((row[1], row[2], row[5]))
        at = end
