"""Erlang's external term format: extents, decoding, encoding, and that hostile input is refused."""

from __future__ import annotations

import pickle
import shutil
import struct
import subprocess
import tracemalloc

import classic_queue_oracle as oracle
import golden_rabbitmq
import pytest
from fuzz import terms as fuzz_terms
from hypothesis import given, settings
from hypothesis import strategies as st

from rmqstore.errors import CorruptionError
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq.dets import phash2
from rmqstore.rabbitmq.term import Atom, Opaque, consult, decode, encode

# A message as node 3.10.8 on OTP 25 writes it: vhost "/", exchange "", routing key "qk", delivery_mode 2, body "hello".
MESSAGE = bytes.fromhex(
    "83680664000d62617369635f6d65737361676568046400087265736f757263656d000000012f64000865786368616e67656d00000000"
    "6c000000016d00000002716b6a680664000763"
    "6f6e74656e74613c6400046e6f6e656d0000000310000264001972616262"
    "69745f6672616d696e675f616d71705f305f395f316c000000016d0000000568656c6c6f6a"
    "6d00000010000102030405060708090a0b0c0d0e0f640004"
    "74727565"
)


def test_the_extent_of_a_message_and_its_id():
    assert _term.extent(MESSAGE) == len(MESSAGE) == _term.extent(MESSAGE + b"\x00\x83")
    assert _term.extent(b"??" + MESSAGE, 2) == len(MESSAGE)
    assert _term.message_id_of(MESSAGE) == bytes(range(16))
    assert all(_term.extent(MESSAGE[:n]) == -1 for n in range(len(MESSAGE)))


@pytest.mark.parametrize("opening", [b"h\x01", b"l\x00\x00\x00\x01", b"i\x00\x00\x00\x01"])
def test_nesting_is_bounded(opening):
    for depth, good in ((255, True), (256, True), (257, False), (100_000, False)):
        term = b"\x83" + opening * depth + (b"j" * (depth + 1) if opening[0] == 108 else b"j")
        assert (_term.extent(term) == len(term)) == good


# ---------------------------------------------------------------------------------------------------------------------
# Values

EVERY_TAG = [
    ("6100", 0),
    ("61ff", 255),
    ("6200000100", 256),
    ("62ffffffff", -1),
    ("627fffffff", 2**31 - 1),
    ("6e040000000080", 2**31),
    ("6280000000", -(2**31)),
    ("6e040101000080", -(2**31) - 1),
    ("463ff8000000000000", 1.5),
    ("468000000000000000", -0.0),
    ("6a", []),
    ("6b0003616263", [97, 98, 99]),
    ("6c0000000162000001006a", [256]),
    ("6c00000001640001616400 0162", Opaque(b"l\0\0\0\1d\0\1ad\0\1b")),
    ("6800", ()),
    ("6802610161 02", (1, 2)),
    ("6d00000000", b""),
    ("6d000000026162", b"ab"),
    ("64000161", Atom("a")),
    ("640001e9", Atom("é")),
    ("64 0000", Atom("")),
    ("7302 6162", Atom("ab")),
    ("7702c3a9", Atom("é")),
    ("760002c3a9", Atom("é")),
    ("7400000000", {}),
    ("74000000026400016161016d00000001626102", {Atom("a"): 1, b"b": 2}),
    ("74000000016a6101", Opaque(b"t\0\0\0\1ja\1")),
    ("74000000026101610161016102", Opaque(b"t\0\0\0\2a\1a\1a\1a\2")),
    ("4d000000010320", Opaque(b"M\0\0\0\1\3\x20")),
    ("58 64000161 00000001 00000002 00000003", Opaque(bytes.fromhex("5864000161000000010000000200000003"))),
    ("59 64000161 00000001 00000002", Opaque(bytes.fromhex("59640001610000000100000002"))),
    ("5a 0001 64000161 00000001 00000002", Opaque(bytes.fromhex("5a0001640001610000000100000002"))),
    ("65 64000161 00000001 02", Opaque(bytes.fromhex("65640001610000000102"))),
    ("66 64000161 00000001 02", Opaque(bytes.fromhex("66640001610000000102"))),
    ("67 64000161 00000001 00000002 03", Opaque(bytes.fromhex("6764000161000000010000000203"))),
    ("72 0001 64000161 01 00000002", Opaque(bytes.fromhex("720001640001610100000002"))),
    ("78 64000161 0000000000000001 00000002", Opaque(bytes.fromhex("7864000161000000000000000100000002"))),
]

@pytest.mark.parametrize(("text", "value"), EVERY_TAG, ids=lambda part: repr(part)[:24])
def test_every_tag_is_read_and_written_again(text, value):
    data = bytes.fromhex("83" + text)
    decoded = decode(data)
    assert decoded == value and type(decoded) is type(value)
    assert encode(decoded) == data
    assert encode(pickle.loads(pickle.dumps(decoded))) == data
    assert _term.extent(data) == len(data)
    # Inside something else, and after it.
    assert encode(decode(b"\x83h\x01" + data[1:])) == b"\x83h\x01" + data[1:]
    assert _term.extent(b"xx" + data + b"yy", 2) == len(data)
    for size in range(len(data)):
        assert _term.extent(data[:size]) == -1
        with pytest.raises(CorruptionError) as caught:
            decode(data[:size])
        assert caught.value.pos is not None and caught.value.pos <= size


@pytest.mark.skipif(shutil.which("escript") is None, reason="needs Erlang")
def test_erlang_itself_writes_the_same_terms(tmp_path):
    terms = [bytes.fromhex("83" + text) for text, _ in EVERY_TAG if not text.startswith("74000000026101")]
    terms += [SOME, MESSAGE]
    terms += [
        encode(value) for value in (2**2040, -(2**64), [1] * 65535, [1] * 65536, tuple(range(256)), Atom("\u4e2d"))
    ]
    script = r"""
    main([In, Out]) -> {ok, B} = file:read_file(In), ok = file:write_file(Out, go(B)).
    go(<<N:32, T:N/binary, R/binary>>) ->
        E = term_to_binary(binary_to_term(T)), H = erlang:phash2(binary_to_term(T)),
        [<<(byte_size(E)):32, E/binary, H:32>> | go(R)];
    go(<<>>) -> [].
    """
    (tmp_path / "script").write_text("#!/usr/bin/env escript\n" + script)
    (tmp_path / "in").write_bytes(b"".join(struct.pack(">I", len(term)) + term for term in terms))
    subprocess.run(["escript", "script", "in", "out"], cwd=tmp_path, check=True, timeout=240)
    data, at = (tmp_path / "out").read_bytes(), 0
    for term in terms:
        (size,) = struct.unpack_from(">I", data, at)
        value = decode(term)
        # OTP 25 and 26 differ in how atoms are written, and old forms of identities become new ones.
        if type(value) is not Opaque:
            assert decode(data[at + 4 : at + 4 + size]) == value
        try:
            number = phash2(value)
        except TypeError:
            assert not isinstance(value, bytes)
        else:
            assert number == struct.unpack_from(">I", data, at + 4 + size)[0]
        at += size + 8
    assert at == len(data)


def test_large_things():
    for value in [
        2**2040,
        -(2**2040),
        2**2032,
        2**100_000,
        [1] * 65535,
        [1] * 65536,
        tuple(range(255)),
        tuple(range(256)),
    ]:
        data = encode(value)
        assert decode(data) == value and encode(decode(data)) == data and _term.extent(data) == len(data)
    assert encode([1] * 65535)[1] == 107 and encode([1] * 65536)[1] == 108
    assert encode(tuple(range(256)))[1] == 105
    assert encode(2**2040)[1] == 111 and encode(2**2032)[1] == 110


def test_how_atoms_are_written():
    plain, wide = Atom("é"), Atom("\u4e2d")
    assert encode(plain) == b"\x83d\0\1\xe9" and encode(Atom("é", 119)) == b"\x83w\2\xc3\xa9"
    assert encode(wide) == b"\x83w\3\xe4\xb8\xad"
    assert encode(Atom("\u4e2d" * 100))[:4] == b"\x83v\1\x2c"
    assert encode(True) == encode(Atom("true"))
    assert encode(decode(b"\x83w\1a")) == b"\x83w\1a"
    assert decode(b"\x83w\1a") == Atom("a") == decode(b"\x83d\0\1a")
    with pytest.raises(ValueError):
        encode(Atom("a" * 256))


@pytest.mark.parametrize(
    "text",
    ["", "00", "83", "8300", "83ff", "83640100" + "61" * 256, "83770261ff", "8376000480808080", "8377 03 eda080", "837702c080",
     "837705f490808080", "837704f0808080", "8377 03e08080",  "83467ff0000000000000",
     "8346fff8000000000000", "834d000000010920", "834d0000000003",
     "834d000000010020", "835a000664000161" + "00" * 40, "836cffffffff6a", "8369ffffffff", "8374ffffffff", "836dffffffff",
     "836bffff", "836fffffffff00", "8368ff", "83505050", "8363" + b"1.5".ljust(31, b"\0").hex()],
)  # fmt: skip
def test_what_is_no_term(text):
    data = bytes.fromhex(text)
    with pytest.raises(CorruptionError) as caught:
        decode(data)
    assert caught.value.pos is not None
    assert _term.extent(data) == -1


def test_what_no_term_holds():
    endless: list[object] = []
    endless.append(endless)
    for value, error in [("text", TypeError), (None, TypeError), (object(), TypeError), (float("nan"), ValueError),
                         (float("inf"), ValueError), (endless, ValueError), ({1: endless}, ValueError)]:  # fmt: skip
        with pytest.raises(error):
            encode(value)


def test_limits_of_number_and_size():
    assert len(decode(encode([0] * (1 << 20)))) == 1 << 20
    with pytest.raises(CorruptionError, match="limit"):
        decode(encode([[0] * (1 << 19)] * 3))
    with pytest.raises(CorruptionError) as caught:
        decode(b"\x83j\x6a")
    assert caught.value.pos == 2
    tracemalloc.start()
    # Counts that no bytes stand behind, nested, so that each would reserve what the one around it did.
    for opening in (b"l\x00\x0f\x00\x00", b"i\x00\x0f\x00\x00", b"t\x00\x07\x00\x00"):
        with pytest.raises(CorruptionError):
            decode(b"\x83" + opening * 250 + bytes(10**6))
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()


values = st.recursive(
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.binary(max_size=20)
    | st.text(max_size=20).map(Atom)
    | st.binary(max_size=20).map(list),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.binary(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
@settings(max_examples=120, deadline=None)
def test_values_come_back(value):
    data = encode(value)
    assert decode(data) == value
    assert encode(decode(data)) == data
    assert _term.extent(data) == len(data)
    try:
        assert oracle.encode(oracle.decode(data)) == data
    except UnicodeEncodeError:
        pass  # The oracle writes atoms of Latin-1 only.


@given(st.binary(max_size=80), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_term_or_refused(data, head):
    agree((b"", b"\x83", b"\x83h\x02")[head] + data)


def agree(data):
    """Both that judge bytes give the same verdict."""
    extent = _term.extent(data)
    try:
        value = decode(data)
    except CorruptionError as error:
        assert error.pos is not None
        assert extent == -1 or error.pos == extent < len(data)
    else:
        assert extent == len(data)
        assert decode(encode(value)) == value
    _term.message_id_of(data)


SOME = encode(
    (
        Atom("a"),
        [1, 2**40, -1.5, b"binary", Opaque(b"l\0\0\0\1d\0\1bb\0\0\1\x2c")],
        {b"k": "é".encode()},
        list(b"text"),
        Opaque(b"M\0\0\0\1\3\x20"),
    )
)


@pytest.mark.parametrize("data", [SOME, MESSAGE])
def test_every_flipped_bit_is_judged(data):
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        agree(bytes(changed))


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_every_term_of_a_node_comes_back(case, golden_vhost):
    count = 0
    for path in sorted(golden_vhost(case).rglob("*")):
        if path.suffix not in (".ets", ".dets", ".rdq", ".qs"):
            continue
        data = path.read_bytes()
        at = data.find(b"\x83h")
        while at >= 0:
            size = _term.extent(data, at)
            if size > 20:
                assert encode(decode(data[at : at + size])) == data[at : at + size]
                assert oracle.encode(oracle.decode(data[at : at + size])) == data[at : at + size]
                count += 1
                at += size - 1
            at = data.find(b"\x83h", at + 1)
    assert count > 0 or "kill9" in case


# ---------------------------------------------------------------------------------------------------------------------
# Text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("%% comment\n{segment_entry_count, 2048}.", [(Atom("segment_entry_count"), 2048)]),
        ("", []),
        ("  % only a comment", []),
        ("a. b.\n'quoted atom'. 'it\\'s'. 'A\\x{e9}'.", [Atom("a"), Atom("b"), Atom("quoted atom"), Atom("it's"), Atom("Aé")]),
        ("[]. {}. #{}. <<>>.", [[], (), {}, b""]),
        ("1. -1. +1.", [1, -1, 1]),
        ("1.5. -1.5e3. 2.0E-1.", [1.5, -1500.0, 0.2]),
        ('"abc". "\\"\\x41\\101\\^A".', [[97, 98, 99], [34, 65, 65, 1]]),
        ('<<1,2,255>>. <<"abc">>. <<"a",1>>. <<"\u00e9"/utf8>>.', [b"\1\2\xff", b"abc", b"a\1", b"\xc3\xa9"]),
        ("#{a => 1, <<\"k\">> => [2]}.", [{Atom("a"): 1, b"k": [2]}]),
        ("{a,%x\n b}.\n\n", [(Atom("a"), Atom("b"))]),
    ],
)  # fmt: skip
def test_terms_of_a_text(text, value):
    assert consult(text) == value


@pytest.mark.parametrize(
    "text",
    ["a", "{a", "[a", "[a,", "{a,}.", "a b.", "a.b.", "Variable.", "1.5e999.", "37#1.", "2#9.", "'open", '"open', "<<1", "<<a>>.",
     "<<1:9>>.", "<<1:3,2>>.", '<<"\u4e2d">>.', "#{a}.", "#{a => }.", "#{[] => 1}.", "[a|b].", "$a.", "16#ff.",
     "-a.", "-.", "\x00.", "'\\x{110000}'.",
     "1" * 5000 + ".",
     "{" * 300 + "}" * 300 + ".", "[" * 100_000, "'" + "a" * 256 + "'.", "fun() -> ok end.", "#Ref<0.1.2.3>."],
)  # fmt: skip
def test_texts_that_are_no_terms(text):
    with pytest.raises(CorruptionError) as caught:
        consult(text, path="some.config")
    assert caught.value.path == "some.config" and caught.value.pos is not None


def test_texts_as_bytes():
    assert consult("é.".encode()) == consult("é.".encode("latin-1")) == [Atom("é")]


@given(st.text(alphabet="ab'\"\\<>{}[](),.#=|$%1290_-e:/ \n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_terms_or_refused(text):
    try:
        encode(consult(text))
    except CorruptionError as error:
        assert error.pos is not None and 0 <= error.pos <= len(text)


# ---------------------------------------------------------------------------------------------------------------------
# The target of the fuzzer, over what hypothesis makes


def test_the_target_of_the_fuzzer_takes_its_seeds():
    for seed in fuzz_terms.SEEDS:
        fuzz_terms.judge(seed)


@given(st.sampled_from(fuzz_terms.SEEDS), st.data())
@settings(max_examples=150, deadline=None)
def test_changed_seeds_are_judged(seed, draw):
    at = draw.draw(st.integers(0, len(seed)))
    cut = draw.draw(st.integers(0, 6))
    fuzz_terms.judge(seed[:at] + draw.draw(st.binary(max_size=6)) + seed[at + cut :])


def test_a_reader_that_makes_something_else_of_a_term_is_caught(monkeypatch):
    data = fuzz_terms.term.encode((b"a", 1))
    fuzz_terms.judge_term(data)
    for other in ((b"a", 2), (b"a", 1.0), [b"a", 1], (b"a",)):
        monkeypatch.setattr(fuzz_terms.term, "decode", lambda data, other=other: other)
        with pytest.raises(AssertionError):
            fuzz_terms.judge_term(data)
