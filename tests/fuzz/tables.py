"""Kinds of `fuzz.readers` for the tables of an orderly stop: recovery.dets, and the two that `ets:tab2file` wrote.

Owns what reads them in every way that the package has, and what compares that with `table_oracle`.  A table without a
problem is the oracle's, object for object.  Of one with problems nothing is invented: what is given lies whole where it
is said to lie, and is what a search finds.  It opens no file of a user and writes none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import table_oracle
from fuzz.terms import neutral

from rmqstore.errors import CorruptionError
from rmqstore.rabbitmq import clean_state, dets
from rmqstore.rabbitmq._messages import LocationTable
from rmqstore.rabbitmq.term import Atom, encode

PATH = "table"
#: What a mutator puts in: heads, magics, and terms that are small, large, or another kind of the same.
WORDS = tuple(
    struct.pack(">I", number) for number in (table_oracle.ACTIVE, table_oracle.COOKIE, 1336, 3384, 5432, 0, 2**31 - 1)
) + (
    table_oracle.ITEM, b"h\0", b"h\2", b"j", b"k\0\1A", b"a\1", b"b\x3b\x9a\xca\0", b"m\0\0\0\2AB", b"t\0\0\0\1jj",
    b"w\5count", b"l\0\0\0\1a\1j", b"s\1a", b"d\0\1a",
    b"F" + struct.pack(">d", 3.0), b"\x83h\2", b"n\x04\0\xff\xff\xff\xff",
)  # fmt: skip
#: The reader has a limit of 256 levels, the oracle has none.
DEEP = 250


def _is_deep(value: Any) -> bool:
    level, values = 0, [value]
    while values and level <= DEEP:
        level += 1
        values = [each for outer in values if isinstance(outer, (tuple, list)) for each in outer]
    # A value is a pair, and what it holds is a list: two levels for each of the reader's, or three in a map.
    return level > DEEP


# ----------------------------------------------------------------------------------------------------------------- DETS


class _Dets(NamedTuple):
    table: dets.DetsTable
    problems: set[str]
    terms: dict[str, dict[str, Any]]
    strange: int


def _read_dets(data: bytes) -> _Dets:
    table = dets.parse(data)
    before = len(table.problems)
    assert all(0 <= problem.pos <= max(len(data), 2**32) and problem.detail for problem in table.problems)
    kinds = {problem.kind for problem in table.problems}
    terms = dets.recovery_terms(table)
    return _Dets(table, kinds, terms, len(table.problems) - before)


def _check_dets(data: bytes, found: _Dets) -> None:
    table, problems, terms, strange = found
    objects = [(at, neutral(each)) for at, each in zip(table.positions, table.objects, strict=True)]
    if len(data) < table_oracle.PLACES_FROM:
        assert problems == {"short_header"} and not objects
        return
    if not problems:
        assert objects == table_oracle.dets_objects(data)
    else:
        assert all(each in table_oracle.collection(data, at)[0] for at, each in objects), "an object is invented"
        searched = table_oracle.dets_search(data)
        if not any(_is_deep(each) for _, each in searched):
            _check_whole(data, problems)
            # Objects in a wrong slot alone are left out, and nothing is searched for.
            assert problems == {"wrong_slot"} or "gave_up" in problems or objects == searched
    wanted = table_oracle.recovery_terms([each for _, each in objects])
    assert ({name: {key: neutral(each) for key, each in own.items()} for name, own in terms.items()}, strange) == wanted


def _check_whole(data: bytes, problems: set[str]) -> None:
    try:
        table_oracle.dets_objects(data)
    except ValueError:
        return
    raise AssertionError(f"a node opens this table, and it is said to have {problems}")


def _dets_tables() -> list[bytes]:
    rows = [(list(b"DIR%d" % number), [(Atom("next_seq_id"), number)]) for number in range(3)]
    table = bytearray(dets.encode(rows))
    # A collection after all others, which no slot leads to.
    term = encode((b"key", [1]))
    put = struct.pack(">III", 12 + len(term), table_oracle.ACTIVE, 4 + len(term)) + term
    return [bytes(table), bytes(table[:-4]) + put + bytes(table[-4:]), dets.encode([(b"key", 5), (list(b"7"), [])])]


# ------------------------------------------------------------------------------------------------------------------ ETS


class _Ets(NamedTuple):
    rows: list[Any] | None
    places: dict[bytes, tuple[int, ...]] | None


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except CorruptionError as error:
        assert error.pos is not None
        return None


def _clean_places(data: bytes) -> dict[bytes, tuple[int, ...]]:
    """What an opening of a message store takes from the table, as `clean_state` does it."""
    _, at = clean_state._header(data, PATH)
    table = LocationTable(len(data) // 60)
    loaded, at = table.load_ets_items(data, at)
    clean_state._check_end(data, at, loaded, PATH)
    columns = table.columns()
    assert len(columns[0]) == loaded == len(table)
    ids, *numbers = columns
    return {
        msg_id.tobytes(): (int(references), int(file), int(place), int(size))
        for msg_id, references, file, place, size in zip(ids, *numbers, strict=True)
    }


def _read_ets(data: bytes) -> _Ets:
    rows = _or_none(lambda: clean_state._summaries(data, PATH))
    return _Ets(rows, _or_none(lambda: _clean_places(data)))


def _rows_of(read: Callable[[table_oracle.Ets], Any], table: table_oracle.Ets) -> Any:
    try:
        return read(table)
    except ValueError:
        return None


def _check_ets(data: bytes, found: _Ets) -> None:
    try:
        wanted = table_oracle.ets_table(data)
    except (ValueError, RecursionError):
        assert found.rows is None and found.places is None
        return
    counted = ("list", [("tuple", [("atom", "count"), ("integer", len(wanted.objects))])])
    is_small = not _is_deep(wanted) and len(data) < clean_state._MAX_ITEM
    summaries, locations = (_rows_of(read, wanted) for read in (table_oracle.file_summaries, table_oracle.msg_locations))
    if found.rows is not None:
        assert wanted.end == counted and found.rows == [(row[0], row[1], row[4]) for row in summaries]
    elif wanted.end == counted and is_small:
        assert summaries is None
    if found.places is not None:
        assert wanted.end == counted and len(found.places) == len(locations)
        assert found.places == {row[0]: row[1:] for row in locations}


def _ets_tables() -> list[bytes]:
    undefined, no = Atom("undefined"), Atom("false")
    summary = [(Atom("file_summary"), 0, 5, undefined, 2, 9, no, 0), (Atom("file_summary"), 2, 5, 0, undefined, 9, no, 1)]
    places = [(Atom("msg_location"), bytes([number]) * 16, 1, 0, 99 * number, 99) for number in range(4)]
    other = [(Atom("k"), 1, [1.5, b"x"])]
    return [
        clean_state._image("t", "set", b"".join(map(clean_state._item, map(encode, rows))), len(rows), "node")
        for rows in (summary, places, other)
    ]


def kinds(kind: Callable[..., Any], vhost: Callable[[str, str], Callable[[], list[bytes]]]) -> dict[str, Any]:
    """The two kinds, made by `kind`; `vhost` gives the first bytes of files of a golden vhost."""
    return {
        "dets": kind(_read_dets, _check_dets, _dets_tables, table_oracle.repair_dets, WORDS, head=5432),
        "ets": kind(
            _read_ets, _check_ets, lambda: [*_ets_tables(), *vhost("12-clean-msgstore", "msg_store_*/*.ets")()],
            table_oracle.repair_ets, WORDS, head=8,
        ),
    }  # fmt: skip
