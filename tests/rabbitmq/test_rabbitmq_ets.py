"""Images of ETS tables and `clean.dot`: what nodes left, made again byte for byte; making them from values; damage."""

from __future__ import annotations

import classic_queue_oracle as oracle
import golden_rabbitmq
import pytest

from rmqstore.errors import CorruptionError
from rmqstore.rabbitmq import ets
from rmqstore.rabbitmq.term import Atom

CASES = [case for case in golden_rabbitmq.cases() if "clean" in case]


@pytest.mark.parametrize("case", CASES)
def test_the_files_of_an_orderly_stop_are_read_and_made_again(case, golden_vhost):
    stores = sorted(golden_vhost(case).glob("msg_store_*"))
    assert len(stores) == 2
    for store in stores:
        data = (store / "clean.dot").read_bytes()
        refs = ets.parse_clean_dot(data)
        assert refs == oracle.parse_clean(data)
        assert ets.clean_dot(refs) == data
        for name in ("file_summary.ets", "msg_store_index.ets"):
            data = (store / name).read_bytes()
            table = ets.read(store / name)
            assert ets.encode(table) == data
            assert table["size"] == len(table.objects)
            # The same rows from values; the header then says less.
            if name == "file_summary.ets":
                rows = ets.file_summaries(table)
                made = ets.file_summary_table(rows)
                assert all(row.file_size == (store / f"{row.file}.rdq").stat().st_size for row in rows)
            else:
                made = ets.msg_store_index_table(ets.msg_locations(table))
            assert made.objects == table.objects and made.end == table.end
            assert {name for name, _ in table.header} - {name for name, _ in made.header} == {
                "id",
                "memory",
                "owner",
                "heir",
            }
            assert ets.parse(ets.encode(made)).objects == table.objects
            assert oracle.parse_ets(ets.encode(made))[1:-1] == oracle.parse_ets(data)[1:-1]


def test_rows_are_sorted_and_neighbours_may_be_missing():
    rows = [ets.FileSummary(2, 5, 0, None, 9), ets.FileSummary(0, 1, None, 2, 7, True, 1)]
    table = ets.file_summary_table(rows)
    assert table.objects[0] == (Atom("file_summary"), 0, 1, Atom("undefined"), 2, 7, Atom("true"), 1)
    assert ets.file_summaries(ets.parse(ets.encode(table))) == rows[::-1]


def test_a_large_item_has_a_checksum():
    table = ets.make_table("t", "set", [(Atom("k"), 1, bytes(size)) for size in (65500, 65515, 65516, 70000)], keypos=2)
    data = ets.encode(table)
    assert ets.parse(data).objects == table.objects
    assert len(oracle.parse_ets(data)) == 6
    broken = bytearray(data)
    # The checksum stands between the head of the item and its term, which begins with 131.
    broken[data.rindex(b"\x83h", 0, data.rindex(bytes(70000))) - 1] ^= 1
    with pytest.raises(CorruptionError):
        ets.parse(bytes(broken))


def test_damage_is_refused_with_its_position():
    data = ets.encode(ets.file_summary_table([ets.FileSummary(i, 5, None, None, 9) for i in range(3)]))
    for size in range(len(data)):
        try:
            table = ets.parse(data[:size])
        except CorruptionError as error:
            assert error.pos is not None and 0 <= error.pos <= len(data)
        else:
            # Cut between two items, so that only the end is missing.
            assert table.end is None
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        try:
            ets.file_summaries(ets.parse(bytes(changed)))
        except CorruptionError:
            pass


@pytest.mark.parametrize(
    "objects",
    [
        [(Atom("other"), 1, 1, 1, 1, 1, 1, 1)],
        [(Atom("file_summary"), 1)],
        [(Atom("msg_location"), b"short", 1, 1, 1, 1)],
    ],
)
def test_rows_of_another_kind_are_refused(objects):
    table = ets.make_table("t", "set", objects)
    for read in (ets.file_summaries, ets.msg_locations):
        with pytest.raises(CorruptionError):
            read(table)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{client_refs,[1]}.\n{index_module,rabbit_msg_store_ets_index}.\n",
        b"{client_refs,[]}.\n{index_module,other}.\n",
        b"{client_refs,[<<300>>]}.\n{index_module,rabbit_msg_store_ets_index}",
        b"[].",
        b"{client_refs,[<<1,2>>",
    ],
)
def test_a_damaged_clean_dot_is_refused(text):
    with pytest.raises(CorruptionError):
        ets.parse_clean_dot(text)


def test_the_text_of_clean_dot():
    assert ets.clean_dot([]) == b"{client_refs,[]}.\n{index_module,rabbit_msg_store_ets_index}.\n"
    refs = [bytes(range(16)), b"printable text!!"]
    assert ets.clean_dot(refs).startswith(b"{client_refs,[<<0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15>>,<<112,114,")
    assert ets.parse_clean_dot(ets.clean_dot(refs)) == refs
    # As 4.x writes it.
    assert ets.parse_clean_dot(b"{client_refs,[<<\"printable text!!\">>]}.\n") == refs[1:]
