"""Files of an orderly stop: what nodes left, read and written again; damage.  Opening stores is tested elsewhere."""

from __future__ import annotations

import classic_queue_oracle as oracle
import golden_rabbitmq
import pytest

from rmqstore.errors import CorruptionError
from rmqstore.rabbitmq import clean_state
from rmqstore.rabbitmq.term import Atom, encode

CASES = [case for case in golden_rabbitmq.cases() if "clean" in case]


def image(objects, name="t"):
    items = b"".join(map(clean_state._item, map(encode, objects)))
    return clean_state._image(name, "ordered_set", items, len(objects), "rabbit@node")


UNDEFINED = Atom("undefined")


def summary(number, left=UNDEFINED, right=UNDEFINED, readers=0):
    return Atom("file_summary"), number, 5, left, right, 9, Atom("false"), readers


@pytest.mark.parametrize("case", CASES)
def test_the_files_of_an_orderly_stop_are_read_and_made_again(case, golden_vhost):
    stores = sorted(golden_vhost(case).glob("msg_store_*"))
    assert len(stores) == 2
    for store in stores:
        data = (store / "clean.dot").read_bytes()
        refs = clean_state._client_refs(data, "clean.dot")
        assert refs == oracle.parse_clean(data)
        assert clean_state._clean_dot(refs) == data
        data = (store / "file_summary.ets").read_bytes()
        header, *rows, end = oracle.parse_ets(data)
        found = clean_state._summaries(data, "file_summary.ets")
        assert found == [(row[1], row[2], row[5]) for row in rows]
        assert all(size == (store / f"{number}.rdq").stat().st_size for number, _, size in found)
        assert clean_state._header(data, "file_summary.ets")[0]["size"] == len(rows)
        made = oracle.parse_ets(image([clean_state.decode(oracle.encode(row)) for row in rows]))
        assert made[1:] == [*rows, end] and {key for key, _ in made[0]} <= {key for key, _ in header}


def test_neighbours_may_be_missing_and_readers_not_counted():
    rows = [summary(0, right=2), summary(2, left=0), summary(3, readers=UNDEFINED)]
    assert clean_state._summaries(image(rows), "t") == [(0, 5, 9), (2, 5, 9), (3, 5, 9)]
    assert clean_state._summaries(image([]), "t") == []


def test_damage_is_refused_with_its_position():
    data = image([summary(i) for i in range(3)])
    wanted = clean_state._summaries(data, "t")
    for size in range(len(data)):
        with pytest.raises(CorruptionError) as caught:
            clean_state._summaries(data[:size], "t")
        assert caught.value.path == "t" and 0 <= caught.value.pos <= len(data)
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        try:
            assert len(clean_state._summaries(bytes(changed), "t")) == len(wanted)
        except CorruptionError as error:
            assert error.path == "t" and 0 <= error.pos <= len(data)


@pytest.mark.parametrize(
    "row",
    [
        (Atom("other"), 1, 1, 1, 1, 1, Atom("false"), 1),
        (Atom("file_summary"), 1),
        (*summary(1)[:6], Atom("maybe"), 0),
        summary(1.0),
        summary(1, left=b"0"),
        Atom("x"),
        {},
    ],
)
def test_rows_of_another_kind_are_refused(row):
    with pytest.raises(CorruptionError):
        clean_state._summaries(image([row]), "t")


def test_an_item_with_a_checksum_is_refused():
    with pytest.raises(CorruptionError):
        clean_state._summaries(image([(Atom("file_summary"), bytes(65528))]), "t")


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
        clean_state._client_refs(text, "clean.dot")


def test_the_text_of_clean_dot():
    assert clean_state._clean_dot([]) == b"{client_refs,[]}.\n{index_module,rabbit_msg_store_ets_index}.\n"
    refs = [bytes(range(16)), b"printable text!!"]
    text = clean_state._clean_dot(refs)
    assert text.startswith(b"{client_refs,[<<0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15>>,<<112,114,")
    assert clean_state._client_refs(text, "clean.dot") == refs
    # As 4.x writes it.
    assert clean_state._client_refs(b"{client_refs,[<<\"printable text!!\">>]}.\n", "clean.dot") == refs[1:]
