"""DETS tables: those of nodes, rebuilt byte for byte; the hash; damage of every kind, and the objects that are still found."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
import subprocess

import golden_rabbitmq
import pytest

from rmqstore.rabbitmq import dets
from rmqstore.rabbitmq.term import Atom, encode

# erlang:phash2(Term, 1 bsl 26) of OTP 25.
HASHES = [
    (list(b"ABC"), 50864094),
    (list(b"628WB79CIFDYO9LJI6DKMI09L"), 43454496),
    ([], 46318638),
    (b"", 13708901),
    (b"abc", 31119611),
    (b"0123456789abcdef", 54037525),
    (list(b"a"), 49011133),
    (list(b"ab"), 31319459),
    (list(b"abcd"), 7922743),
    (list(b"abcde"), 4061040),
]


@pytest.mark.parametrize(("value", "number"), HASHES, ids=lambda part: repr(part)[:30])
def test_the_hash_is_erlangs(value, number):
    assert dets.phash2(value) % (1 << 26) == number


def test_what_has_no_hash():
    for value in ({}, "text", None, Atom("a"), 1, (), [1, 300], [b"a"]):
        with pytest.raises(TypeError):
            dets.phash2(value)


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_recovery_dets_of_a_node_is_read_and_made_again(case, golden_vhost):
    data = (golden_vhost(case) / "recovery.dets").read_bytes()
    table = dets.parse(data)
    assert table.problems == []
    assert dets.encode(table.objects) == data
    terms = dets.recovery_terms(table)
    assert table.problems == [] and len(terms) == len(table.objects)
    assert dets.encode([dets.recovery_object(name, one) for name, one in terms.items()]) == data


def some_objects(num, largest=900):
    return [(list(b"KEY%d" % i), [(Atom("a"), i), (Atom("b"), [Atom("x")] * (i * 37 % largest))]) for i in range(num)]


@pytest.mark.parametrize("num", [0, 1, 20, 256, 257, 700])
def test_tables_of_any_size(num, tmp_path):
    objects = some_objects(num)
    path = tmp_path / "some.dets"
    path.write_bytes(dets.encode(objects))
    table = dets.read(path)
    assert table.problems == []
    by_key = sorted(table.objects, key=lambda one: int(bytes(one[0][3:])))
    assert by_key == objects
    assert dets.encode(objects[::-1]) == path.read_bytes()


def test_objects_of_the_same_size_class_and_beyond():
    for size in (1, 230, 240, 250, 251, 252, 500, 100_000):
        objects = [(b"k%d" % i, bytes(size)) for i in range(3)]
        table = dets.parse(dets.encode(objects))
        assert table.problems == [] and sorted(table.objects) == objects


def test_what_cannot_be_a_key():
    with pytest.raises(ValueError):
        dets.encode([(b"a", 1), (b"a", 2)])
    with pytest.raises(TypeError):
        dets.encode([((), 1)])


def damaged(data, pos, new):
    return data[:pos] + new + data[pos + len(new) :]


KINDS = {
    "bad_cookie": (4, b"\xff"),
    "not_closed": (11, b"\0"),
    "bad_version": (19, b"\x08"),
    "bad_type": (15, b"\2"),
    "bad_hash_method": (51, b"\0"),
    "bad_header_md5": (170, b"\0\0"),
    "bad_count": None,
    "bad_part": (312, b"\xff\xff\xff\xff"),
    "bad_segment": (1336, b"\xff\xff\xff\xff"),
    "bad_trailer": (-4, b"\0\0\0\0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_and_the_objects_are_found_all_the_same(kind):
    objects = some_objects(20)
    data = dets.encode(objects)
    if kind == "bad_count":
        data = damaged(data, 32, struct.pack(">I", 21))
        data = damaged(data, 168, hashlib.md5(data[12:168]).digest())
    else:
        pos, new = KINDS[kind]
        data = damaged(data, pos % len(data), new)
    table = dets.parse(data)
    assert kind in {problem.kind for problem in table.problems}
    assert sorted(table.objects) == sorted(objects)


def test_damaged_slots_and_collections():
    objects = some_objects(20)
    data = dets.encode(objects)
    sound = dets.parse(data)
    # The slots are lost: all objects are found by their heads.
    assert sorted(dets.parse(data[:3384] + bytes(2048) + data[5432:]).objects) == sorted(objects)
    lost = sound.positions[3]
    table = dets.parse(damaged(data, lost + 4, b"\0\0\0\0"))
    assert "bad_slot" in {problem.kind for problem in table.problems}
    assert sorted(table.objects) == sorted(one for at, one in zip(sound.positions, sound.objects) if at != lost)
    cut = dets.parse(data[: sound.positions[-1] + 20])
    assert len(cut.objects) == 19 and cut.problems
    short = dets.parse(data[:100])
    assert short.objects == [] and short.problems[0].kind == "short_header"
    assert dets.parse(b"").problems


def test_every_flipped_bit_is_survived():
    objects = some_objects(3, largest=5)
    data = dets.encode(objects)
    used = [at for at, byte in enumerate(data) if byte]
    places = {8 * at + bit for at in used for bit in range(8)}
    places |= set(random.Random(5).sample(range(8 * len(data)), 600))
    for at in sorted(places):
        table = dets.parse(damaged(data, at // 8, bytes((data[at // 8] ^ 1 << at % 8,))))
        # Two objects at least are untouched by one bit.
        assert sum(one in objects for one in table.objects) >= 2
        dets.recovery_terms(table)
    for size in range(0, len(data), 7):
        dets.parse(data[:size])


def test_a_made_up_file_does_not_take_forever():
    # Every step of 16 bytes claims a collection that goes on to the end.
    head = struct.pack(">II", 0, dets.ACTIVE)
    body = bytearray((head + bytes(8)) * 20_000)
    for at in range(0, len(body), 16):
        struct.pack_into(">I", body, at, len(body) - at)
        struct.pack_into(">I", body, at + 8, len(body) - at - 8)
    table = dets.parse(bytes(1336) + bytes(body))
    assert table.objects == []
    assert table.problems[-1].kind == "gave_up"
    # Every slot of every segment leads to the same collection.
    data = bytearray(dets.encode([(b"k", 1)]))
    at = dets.parse(bytes(data)).positions[0]
    size = struct.unpack_from(">I", data, at)[0]
    for slot in range(256):
        struct.pack_into(">II", data, 3384 + 8 * slot, size, at)
    table = dets.parse(bytes(data))
    assert table.objects == [(b"k", 1)] and len(table.problems) >= 255


def test_objects_that_are_no_terms_of_a_queue():
    table = dets.parse(dets.encode([(list(b"A"), [(Atom("next_seq_id"), 1)]), (b"x", 5), (b"y", [1])]))
    assert dets.recovery_terms(table) == {"A": {"next_seq_id": 1}}
    assert [problem.kind for problem in table.problems] == ["bad_object", "bad_object"]


def test_the_free_lists_of_many_places():
    # More free places of one size than a record of the lists holds.
    buddies = dets._Buddies(0)
    places = [buddies.take(16)[0] for _ in range(3000)]
    assert places == [16 * i for i in range(3000)]
    buddies.free[4] = places[::2]
    lists = buddies.lists()
    assert struct.unpack_from(">III", lists) == (12 + 4 * 1021, dets.FREE, 5)
    assert lists.endswith(struct.pack(">III", 12, dets.FREE, dets.END_OF_FREE_LISTS))
    assert encode(1)


def test_an_object_in_a_wrong_slot_is_left_out():
    # A node does not find it by its key, and neither do we; one damaged key must not hide another queue's terms.
    objects = [(list(b"KEY%d" % i), i) for i in range(3)]
    data = dets.encode(objects)
    at = data.index(b"KEY1")
    table = dets.parse(damaged(data, at, b"KEY0"))
    assert [problem.kind for problem in table.problems] == ["wrong_slot"]
    assert sorted(table.objects) == [objects[0], objects[2]]


@pytest.mark.skipif(shutil.which("escript") is None, reason="needs Erlang")
@pytest.mark.parametrize("num", [0, 3, 256, 700])
def test_erlang_itself_opens_our_tables(num, tmp_path):
    objects = some_objects(num, largest=60)
    (tmp_path / "our.dets").write_bytes(dets.encode(objects))
    (tmp_path / "objects").write_bytes(encode(objects))
    # Opened without a repair; every key is found; it takes more, and what it leaves is sound.
    script = r"""
    main([]) ->
        {ok, Bytes} = file:read_file("objects"), Objects = binary_to_term(Bytes),
        {ok, T} = dets:open_file(our, [{file, "our.dets"}, {repair, false}]),
        [[O] = dets:lookup(T, element(1, O)) || O <- Objects],
        N = length(Objects), N = dets:info(T, size),
        [ok = dets:insert(T, {"NEW" ++ integer_to_list(I), I}) || I <- lists:seq(1, 300)],
        ok = dets:delete(T, "KEY1"), ok = dets:close(T),
        {ok, New} = dets:open_file(new, [{file, "new.dets"}]), ok = dets:insert(New, Objects), ok = dets:close(New).
    """
    (tmp_path / "script").write_text("#!/usr/bin/env escript\n" + script)
    subprocess.run(["escript", "script"], cwd=tmp_path, check=True, timeout=240)
    table = dets.read(tmp_path / "our.dets")
    assert table.problems == []
    assert len(table.objects) == num + 300 - (num > 1)
    new = (tmp_path / "new.dets").read_bytes()
    assert dets.parse(new).problems == []
    if num <= 256:
        assert dets.encode(objects) == new
