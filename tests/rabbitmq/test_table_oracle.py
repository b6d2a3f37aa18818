"""The second reader of tables is itself right: over what real nodes left, and by hashes that Erlang told."""

from __future__ import annotations

import random
import shutil
import subprocess

import classic_queue_oracle
import golden_rabbitmq
import pytest
import table_oracle as oracle
import term_oracle
from test_rabbitmq_dets import HASHES

from rmqstore.rabbitmq.term import encode

CASES = golden_rabbitmq.cases()


def plain(value):
    """A value of `term_oracle` as `classic_queue_oracle` gives it, which decodes by itself."""
    kind, inner = value
    if kind == "atom":
        return classic_queue_oracle.Atom(inner)
    if kind == "tuple":
        return tuple(map(plain, inner))
    if kind == "list":
        return [plain(each) for each in inner]
    if kind == "map":
        return {plain(key): plain(each) for key, each in inner}
    return inner


@pytest.mark.parametrize("case", CASES)
def test_what_a_node_left_is_read_in_two_ways(case, golden_vhost):
    vhost = golden_vhost(case)
    data = (vhost / "recovery.dets").read_bytes()
    found = [each for _, each in oracle.dets_objects(data)]
    other = classic_queue_oracle.parse_dets(data)
    assert sorted(map(plain, found), key=repr) == sorted(other, key=repr)
    assert sorted(map(repr, found)) == sorted(repr(each) for _, each in oracle.dets_search(data))
    terms, strange = oracle.recovery_terms(found)
    assert strange == 0
    assert {
        name: {key: plain(each) for key, each in own.items()} for name, own in terms.items()
    } == classic_queue_oracle.recovery_terms(other)
    for path in vhost.glob("msg_store_*/*.ets"):
        data = path.read_bytes()
        table = oracle.ets_table(data)
        assert list(map(plain, table.objects)) == classic_queue_oracle.parse_ets(data)[1:-1]
        rows = oracle.file_summaries(table) if path.stem == "file_summary" else oracle.msg_locations(table)
        assert len(rows) == dict(table.header)["size"][1]


@pytest.mark.parametrize(("value", "number"), HASHES, ids=lambda part: repr(part)[:30])
def test_the_hash_is_erlangs(value, number):
    assert oracle.phash2(term_oracle.decode_at(encode(value))[0]) % (1 << 26) == number


def test_a_table_that_is_made_right_again_is_read(golden_vhost):
    whole = (golden_vhost("12-clean-msgstore") / "recovery.dets").read_bytes()
    for at in (33, 39, 60, 170, len(whole) - 1):
        data = bytearray(whole)
        data[at] ^= 1
        if at != 60:
            with pytest.raises(ValueError):
                oracle.dets_objects(bytes(data))
        oracle.repair_dets(data)
        assert oracle.dets_objects(bytes(data)) == oracle.dets_objects(whole)


@pytest.mark.skipif(shutil.which("escript") is None, reason="needs Erlang")
def test_erlang_has_the_same_hash_of_any_value(tmp_path):
    dice = random.Random(7)
    terms = [encode(dice.choice((bytes, list))(dice.randbytes(dice.randrange(40)))) for _ in range(500)]
    (tmp_path / "terms").write_bytes(encode(terms))
    script = r"""
    main([]) ->
        {ok, Bytes} = file:read_file("terms"),
        [io:format("~b~n", [erlang:phash2(binary_to_term(T))]) || T <- binary_to_term(Bytes)].
    """
    (tmp_path / "script").write_text("#!/usr/bin/env escript\n" + script)
    done = subprocess.run(["escript", "script"], cwd=tmp_path, check=True, timeout=240, capture_output=True)
    assert [oracle.phash2(term_oracle.decode_at(term)[0]) for term in terms] == list(map(int, done.stdout.split()))
