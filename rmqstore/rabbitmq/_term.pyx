"""Erlang's external term format and RabbitMQ's messages in it: bytes to values and back, messages to columns.

Owns the tags in RabbitMQ's files, their limits of depth and number, the shape of a message term, and AMQP 0-9-1
properties.  It knows bytes, not files.  Leaves are ``noexcept nogil`` over a pointer and integers; ``def`` functions wrap
them.

Invariants: every number in a term is hostile, so that memory is allocated only for values whose bytes are there; each step
of a walk takes at least one byte, and nesting is counted, so that it ends.  Malformed input is `CorruptionError` with a
position, never anything else.

Tags: Erlang/OTP 25 and 26 (docs/rabbitmq.md); every integer in a term is big-endian but the digits of a big one.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_INCREF
from libc.float cimport DBL_MAX
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

import datetime
import decimal
import struct

import numpy as np

from rmqstore._bytes cimport get_i16, get_i32, get_i64, put_i32, put_i64
from rmqstore._core cimport Region

from rmqstore.errors import CorruptionError, InvalidMessageError, StoreError, UnsupportedFormatError

cdef extern from "Python.h":
    object PyTuple_New(Py_ssize_t n)
    void PyTuple_SET_ITEM(object made, Py_ssize_t i, object value)
    int64_t PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1
    str PyUnicode_DecodeUTF8(const char* s, Py_ssize_t size, const char* errors)

cdef extern from "_utf8.h":
    bint is_utf8 "rmq_is_utf8"(const unsigned char* p, int64_t n) noexcept nogil

cdef double MAX_FLOAT = DBL_MAX


# --------------------------------------------------------------------------------------------------------- leaves

cdef enum:
    VERSION = 131
    MAX_NESTING = 256
    MAX_VALUES = 1 << 20
    # The payload of a frame at the frame_max that a node offers, 131072, without the frame's own 8 bytes.
    FRAGMENT_SIZE = 131064

    TAG_NEW_FLOAT = 70
    TAG_BIT_BINARY = 77
    TAG_NEW_PID = 88
    TAG_NEW_PORT = 89
    TAG_NEWER_REFERENCE = 90
    TAG_SMALL_INTEGER = 97
    TAG_INTEGER = 98
    TAG_ATOM = 100
    TAG_REFERENCE = 101
    TAG_PORT = 102
    TAG_PID = 103
    TAG_SMALL_TUPLE = 104
    TAG_LARGE_TUPLE = 105
    TAG_NIL = 106
    TAG_STRING = 107
    TAG_LIST = 108
    TAG_BINARY = 109
    TAG_SMALL_BIG = 110
    TAG_LARGE_BIG = 111
    TAG_NEW_REFERENCE = 114
    TAG_SMALL_ATOM = 115
    TAG_MAP = 116
    TAG_ATOM_UTF8 = 118
    TAG_SMALL_ATOM_UTF8 = 119
    TAG_V4_PORT = 120

cdef enum:
    CUT = 1
    BAD_TAG
    NO_VERSION
    TOO_DEEP
    BAD_ATOM
    BAD_NUMBER
    BAD_BITS
    BAD_REFERENCE
    NOT_A_MESSAGE
    TRAILING_BYTES

cdef dict FAULTS = {
    CUT: "the term ends before what it states",
    BAD_TAG: "no tag of an external term is here",
    NO_VERSION: "an external term begins with 131",
    TOO_DEEP: f"the term is nested deeper than {MAX_NESTING} levels",
    BAD_ATOM: "an atom of more than 255 characters, or one that is not UTF-8",
    BAD_NUMBER: "a number that Erlang does not write",
    BAD_BITS: "a bit string whose last byte has no bits, or more than 8",
    BAD_REFERENCE: "a reference of more than 5 words",
    NOT_A_MESSAGE: "the term is not a message as a node writes it",
    TRAILING_BYTES: "bytes after the end of the term",
}


cdef inline int64_t fail(Fault* fault, int code, int64_t pos) noexcept nogil:
    fault.code, fault.pos = code, pos
    return -1


cdef inline uint16_t get_u16(const unsigned char* p) noexcept nogil:
    return <uint16_t>get_i16(p)


cdef inline int64_t get_u32(const unsigned char* p) noexcept nogil:
    return <int64_t><uint32_t>get_i32(p)


cdef inline double get_double(const unsigned char* p) noexcept nogil:
    cdef int64_t bits = get_i64(p)
    cdef double value
    memcpy(&value, &bits, 8)
    return value


cdef inline void put_double(unsigned char* p, double value) noexcept nogil:
    cdef int64_t bits
    memcpy(&bits, &value, 8)
    put_i64(p, bits)


cdef bint is_atom_text(const unsigned char* p, int64_t n) noexcept nogil:
    # UTF-8 of at most 255 characters.
    cdef int64_t i, count = n
    if n > 255:
        for i in range(n):
            count -= p[i] & 0xC0 == 0x80
    return count <= 255 and is_utf8(p, n)


cdef int64_t atom_text(const unsigned char* p, int64_t pos, int64_t end, int64_t* length, Fault* fault) noexcept nogil:
    # The position of an atom's text, its bytes in `length`; -1 if no well-formed atom is at `pos`.
    cdef int64_t head, n
    cdef unsigned char tag
    if pos >= end:
        return fail(fault, CUT, pos)
    tag = p[pos]
    if tag == TAG_ATOM or tag == TAG_ATOM_UTF8:
        head = 3
        if end - pos < 3:
            return fail(fault, CUT, pos)
        n = get_u16(p + pos + 1)
    elif tag == TAG_SMALL_ATOM or tag == TAG_SMALL_ATOM_UTF8:
        head = 2
        if end - pos < 2:
            return fail(fault, CUT, pos)
        n = p[pos + 1]
    else:
        return fail(fault, BAD_TAG, pos)
    if n > end - pos - head:
        return fail(fault, CUT, pos)
    if tag == TAG_ATOM or tag == TAG_SMALL_ATOM:
        if n > 255:
            return fail(fault, BAD_ATOM, pos)
    elif not is_atom_text(p + pos + head, n):
        return fail(fault, BAD_ATOM, pos)
    length[0] = n
    return pos + head


cdef int64_t identity_extent(const unsigned char* p, int64_t pos, int64_t end, Fault* fault) noexcept nogil:
    # The position after a process, port or reference: the name of a node, then numbers; -1 for anything else.
    cdef int64_t at = pos + 1, length = 0, words
    cdef unsigned char tag = p[pos]
    if tag == TAG_NEWER_REFERENCE or tag == TAG_NEW_REFERENCE:
        if end - pos < 3:
            return fail(fault, CUT, pos)
        words = get_u16(p + pos + 1)
        if words > 5:
            return fail(fault, BAD_REFERENCE, pos)
        at = pos + 3
        length = 4 * words + (4 if tag == TAG_NEWER_REFERENCE else 1)
    elif tag == TAG_NEW_PID or tag == TAG_V4_PORT:
        length = 12
    elif tag == TAG_PID:
        length = 9
    elif tag == TAG_NEW_PORT:
        length = 8
    elif tag == TAG_PORT or tag == TAG_REFERENCE:
        length = 5
    else:
        return fail(fault, BAD_TAG, pos)
    words = 0
    at = atom_text(p, at, end, &words, fault)
    if at < 0:
        return -1
    at += words
    return fail(fault, CUT, pos) if length > end - at else at + length


cdef int64_t scalar_extent(const unsigned char* p, int64_t pos, int64_t end, Fault* fault) noexcept nogil:
    # The position after the value at `pos` that holds no others; -1 for containers (BAD_TAG) and for malformed ones.
    # Functions that walk return a `pos` of -1 as it is, so that a caller checks once, at the end.
    cdef int64_t room = end - pos, length = 0, at
    cdef unsigned char tag
    if pos < 0:
        return -1
    if room < 1:
        return fail(fault, CUT, pos)
    tag = p[pos]
    if tag == TAG_ATOM or tag == TAG_SMALL_ATOM_UTF8 or tag == TAG_ATOM_UTF8 or tag == TAG_SMALL_ATOM:
        at = atom_text(p, pos, end, &length, fault)
        return -1 if at < 0 else at + length
    if tag == TAG_NIL:
        return pos + 1
    if tag == TAG_SMALL_INTEGER:
        length = 2
    elif tag == TAG_INTEGER:
        length = 5
    elif tag == TAG_NEW_FLOAT:
        length = 9
    elif tag == TAG_BINARY:
        length = 5 if room < 5 else 5 + get_u32(p + pos + 1)
    elif tag == TAG_STRING:
        length = 3 if room < 3 else 3 + get_u16(p + pos + 1)
    elif tag == TAG_SMALL_BIG:
        length = 3 if room < 3 else 3 + p[pos + 1]
    elif tag == TAG_LARGE_BIG:
        length = 6 if room < 6 else 6 + get_u32(p + pos + 1)
    elif tag == TAG_BIT_BINARY:
        length = 6 if room < 6 else 6 + get_u32(p + pos + 1)
    else:
        return identity_extent(p, pos, end, fault)
    if length > room:
        return fail(fault, CUT, pos)
    # All bits of the exponent set: infinity or no number, neither of which Erlang has.
    if tag == TAG_NEW_FLOAT and (get_i64(p + pos + 1) >> 52) & 0x7FF == 0x7FF:
        return fail(fault, BAD_NUMBER, pos)
    if tag == TAG_BIT_BINARY and (length == 6 or not 1 <= p[pos + 5] <= 8):
        return fail(fault, BAD_BITS, pos)
    return pos + length


cdef inline int64_t opened(const unsigned char* p, int64_t pos, int64_t end, int64_t* inside, Fault* fault) noexcept nogil:
    # The position after the head of a container, with the number of its values in `inside`; 0: no container is here.
    cdef int64_t n
    cdef unsigned char tag = p[pos]
    inside[0] = 0
    if tag == TAG_SMALL_TUPLE:
        if end - pos < 2:
            return fail(fault, CUT, pos)
        n = p[pos + 1]
        pos += 2
    elif tag == TAG_LIST or tag == TAG_LARGE_TUPLE or tag == TAG_MAP:
        if end - pos < 5:
            return fail(fault, CUT, pos)
        n = get_u32(p + pos + 1)
        # The tail of a list is a value too.
        n = 2 * n if tag == TAG_MAP else n + 1 if tag == TAG_LIST else n
        pos += 5
    else:
        return 0
    inside[0] = n
    # A value takes at least a byte.
    return fail(fault, CUT, pos) if n > end - pos else pos


cdef int64_t value_extent(const unsigned char* p, int64_t pos, int64_t end, Fault* fault) noexcept nogil:
    # The position after the well-formed value at `pos`; -1 with the reason and its place in `fault`.
    cdef int64_t[MAX_NESTING + 1] left
    cdef int64_t at, inside = 0
    cdef int depth = 0
    if pos < 0:
        return -1
    if pos < end and (p[pos] == TAG_ATOM or p[pos] == TAG_SMALL_ATOM_UTF8 or p[pos] == TAG_BINARY):
        return scalar_extent(p, pos, end, fault)
    left[0] = 1
    while True:
        while left[depth] == 0:
            if depth == 0:
                return pos
            depth -= 1
        left[depth] -= 1
        if pos >= end:
            return fail(fault, CUT, pos)
        at = opened(p, pos, end, &inside, fault)
        if at < 0:
            return -1
        if at == 0:
            pos = scalar_extent(p, pos, end, fault)
            if pos < 0:
                return -1
            continue
        if inside:
            if depth == MAX_NESTING:
                return fail(fault, TOO_DEEP, pos)
            depth += 1
            left[depth] = inside
        pos = at


cdef int64_t term_extent(const unsigned char* p, int64_t n, Fault* fault) noexcept nogil:
    if n < 2 or p[0] != VERSION:
        return fail(fault, NO_VERSION if n and p[0] != VERSION else CUT, 0)
    return value_extent(p, 1, n, fault)


cdef inline int64_t after_atom(const unsigned char* p, int64_t pos, int64_t end, const char* name, int64_t size) noexcept nogil:
    # The position after the atom `name` (ASCII) at `pos`; -1 if something else is there.
    if pos < 0 or end - pos < size + 2:
        return -1
    if (p[pos] == TAG_ATOM or p[pos] == TAG_ATOM_UTF8) and get_u16(p + pos + 1) == size and end - pos > size + 2:
        pos += 3
    elif (p[pos] == TAG_SMALL_ATOM_UTF8 or p[pos] == TAG_SMALL_ATOM) and p[pos + 1] == size:
        pos += 2
    else:
        return -1
    return pos + size if memcmp(p + pos, name, <size_t>size) == 0 else -1


cdef inline bint is_atom(const unsigned char* p, int64_t pos, int64_t end, const char* name, int64_t size) noexcept nogil:
    return after_atom(p, pos, end, name, size) >= 0


def extent(const uint8_t[::1] data not None, int64_t pos=0):
    """Return the length of the well-formed term at `pos`, its first byte (131) included; -1 if there is no term."""
    cdef Fault fault
    if pos < 0 or pos >= data.shape[0]:
        return -1
    return term_extent(&data[pos], data.shape[0] - pos, &fault)


# ------------------------------------------------------------------------------------------------------------- values

class Atom(str):
    """An Erlang atom; `encode` writes it with the `tag` it was read with: 100 or 115 (Latin-1), 118 or 119 (UTF-8), or None.

    Atoms of equal text are equal, whatever their tags.
    """

    __slots__ = ("tag",)

    def __new__(cls, text, tag=None):
        made = str.__new__(cls, text)
        made.tag = tag
        return made

    def __repr__(self):
        return f"Atom({str.__repr__(self)})"

    def __reduce__(self):
        return Atom, (str(self), self.tag)


class Opaque:
    """A value that is kept as its bytes in `data`: a process, port or reference, a bit string, an improper list, or a map
    whose keys a dict cannot have."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = bytes(data)

    def __eq__(self, other):
        return isinstance(other, Opaque) and self.data == other.data

    def __hash__(self):
        return hash((Opaque, self.data))

    def __repr__(self):
        return f"Opaque({self.data!r})"


# ----------------------------------------------------------------------------------------------------------- decoding

cdef struct Reader:
    const unsigned char* p
    int64_t pos
    int64_t end
    # How many values may still be made; a container pays for its own when it is opened.
    int64_t budget

# Known atoms by their bytes; emptied when a hostile file has filled it.
cdef dict KNOWN_ATOMS = {}


cdef object atom_of(bytes written):
    cdef unsigned char tag = written[0]
    text = written[3:] if tag == TAG_ATOM or tag == TAG_ATOM_UTF8 else written[2:]
    made = Atom(text.decode("latin-1" if tag == TAG_ATOM or tag == TAG_SMALL_ATOM else "utf-8"), tag)
    if len(KNOWN_ATOMS) >= 1024:
        KNOWN_ATOMS.clear()
    KNOWN_ATOMS[written] = made
    return made


cdef object take_container(Reader* r, int64_t inside):
    # The tuple, list or map at the reader's position, which moves after it; it holds `inside` values.
    cdef const unsigned char* p = r.p
    cdef int64_t begin = r.pos, i
    cdef unsigned char tag = p[begin]
    cdef list items = []
    r.budget -= inside
    if r.budget < 0:
        raise CorruptionError("the term holds more values than the limit", pos=begin)
    r.pos += 2 if tag == TAG_SMALL_TUPLE else 5
    if tag == TAG_SMALL_TUPLE or tag == TAG_LARGE_TUPLE:
        made = PyTuple_New(inside)
        for i in range(inside):
            item = take_value(r)
            Py_INCREF(item)
            PyTuple_SET_ITEM(made, i, item)
        return made
    if tag == TAG_LIST:
        for i in range(inside - 1):
            items.append(take_value(r))
        if p[r.pos] == TAG_NIL:
            r.pos += 1
            return items
        take_value(r)
    else:
        for i in range(inside // 2):
            key = take_value(r)
            items.append((key, take_value(r)))
        try:
            made = dict(items)
        except TypeError:
            made = None
        if made is not None and len(made) == len(items):
            return made
    return Opaque(p[begin:r.pos])


cdef object take_value(Reader* r):
    # The value at the reader's position, which moves after it.  The whole term is known to be well-formed.
    cdef const unsigned char* p = r.p
    cdef int64_t pos = r.pos, at, inside = 0, i
    cdef unsigned char tag = p[pos]
    cdef Fault fault
    if opened(p, pos, r.end, &inside, &fault):
        return take_container(r, inside)
    at = r.pos = scalar_extent(p, pos, r.end, &fault)
    if tag == TAG_BINARY:
        return PyBytes_FromStringAndSize(<const char*>p + pos + 5, at - pos - 5)
    if tag == TAG_ATOM or tag == TAG_SMALL_ATOM_UTF8 or tag == TAG_ATOM_UTF8 or tag == TAG_SMALL_ATOM:
        written = PyBytes_FromStringAndSize(<const char*>p + pos, at - pos)
        value = KNOWN_ATOMS.get(written)
        return atom_of(written) if value is None else value
    if tag == TAG_SMALL_INTEGER:
        return p[pos + 1]
    if tag == TAG_INTEGER:
        return get_i32(p + pos + 1)
    if tag == TAG_NIL:
        return []
    if tag == TAG_STRING:
        r.budget -= at - pos - 3
        if r.budget < 0:
            raise CorruptionError("the term holds more values than the limit", pos=pos)
        return list(PyBytes_FromStringAndSize(<const char*>p + pos + 3, at - pos - 3))
    if tag == TAG_SMALL_BIG or tag == TAG_LARGE_BIG:
        # Erlang takes every sign but 0 for a minus.
        i = 3 if tag == TAG_SMALL_BIG else 6
        value = int.from_bytes(PyBytes_FromStringAndSize(<const char*>p + pos + i, at - pos - i), "little")
        return -value if p[pos + i - 1] else value
    if tag == TAG_NEW_FLOAT:
        return get_double(p + pos + 1)
    return Opaque(p[pos:at])


def decode(data):
    """Decode `data`, which is one external term and nothing else.

    An Erlang string is a list of integers, as in Erlang; other values are Atom, int, float, bytes, list, tuple, dict and
    Opaque.  CorruptionError where the bytes are not a well-formed term, or it holds more than 2**20 values; `pos` is where.
    """
    cdef Reader r
    cdef Fault fault
    cdef bytes kept = bytes(data)
    cdef const unsigned char* p = kept
    cdef int64_t n = len(kept), end
    with nogil:
        end = term_extent(p, n, &fault)
        if 0 <= end < n:
            end = fail(&fault, TRAILING_BYTES, end)
    if end < 0:
        raise CorruptionError(FAULTS[fault.code], pos=fault.pos)
    r.p, r.pos, r.end, r.budget = p, 1, n, MAX_VALUES
    return take_value(&r)


# ----------------------------------------------------------------------------------------------------------- encoding

cdef bytes atom_bytes(object text, tag):
    # With the tag it was read with; else as OTP 25 does, in Latin-1 if that has the characters.
    cdef bytes plain
    if len(text) > 255:
        raise ValueError(f"an atom has at most 255 characters, this has {len(text)}")
    if tag is None or tag == TAG_ATOM or tag == TAG_SMALL_ATOM:
        try:
            plain = text.encode("latin-1")
            return (bytes((TAG_SMALL_ATOM, len(plain))) if tag == TAG_SMALL_ATOM else bytes((TAG_ATOM, 0, len(plain)))) + plain
        except UnicodeEncodeError:
            pass
    plain = text.encode("utf-8")
    if len(plain) <= 255 and tag != TAG_ATOM_UTF8:
        return bytes((TAG_SMALL_ATOM_UTF8, len(plain))) + plain
    return bytes((TAG_ATOM_UTF8, len(plain) >> 8, len(plain) & 255)) + plain


cdef int put_head(bytearray out, int tag, int64_t n) except -1:
    if n > 0xFFFFFFFF:
        raise ValueError(f"a term cannot hold {n} bytes or values in one place")
    cdef unsigned char[5] five
    five[0] = <unsigned char>tag
    put_i32(five + 1, <int32_t><uint32_t>n)
    out += five[:5]
    return 0


cdef int put_binary(bytearray out, bytes data) except -1:
    put_head(out, TAG_BINARY, len(data))
    out += data
    return 0


cdef bint is_string(list items):
    # True if Erlang writes the list as STRING_EXT: 1 to 65535 integers from 0 to 255, and nothing else.
    if not 1 <= len(items) <= 65535:
        return False
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= 255:
            return False
    return True


cdef int put_int(bytearray out, object value) except -1:
    cdef int overflow = 0
    cdef int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if not overflow and 0 <= number <= 255:
        out += bytes((TAG_SMALL_INTEGER, number))
    elif not overflow and INT32_MIN <= number <= INT32_MAX:
        put_head(out, TAG_INTEGER, number & 0xFFFFFFFF)
    else:
        magnitude = abs(value)
        digits = magnitude.to_bytes((magnitude.bit_length() + 7) // 8, "little")
        if len(digits) <= 255:
            out += bytes((TAG_SMALL_BIG, len(digits)))
        else:
            put_head(out, TAG_LARGE_BIG, len(digits))
        out.append(value < 0)
        out += digits
    return 0


cdef int put_list(bytearray out, list value, int depth) except -1:
    if not value:
        out.append(TAG_NIL)
    elif is_string(value):
        out += bytes((TAG_STRING, len(value) >> 8, len(value) & 255))
        out += bytes(value)
    else:
        put_head(out, TAG_LIST, len(value))
        for item in value:
            put_value(out, item, depth + 1)
        out.append(TAG_NIL)
    return 0


cdef int put_value(bytearray out, object value, int depth) except -1:
    cdef unsigned char[9] nine
    if isinstance(value, (tuple, list, dict)) and depth == MAX_NESTING and len(value):
        raise ValueError(FAULTS[TOO_DEEP])
    if isinstance(value, bytes):
        put_binary(out, value)
    elif isinstance(value, Atom):
        out += atom_bytes(value, value.tag)
    elif isinstance(value, bool):
        out += atom_bytes("true" if value else "false", None)
    elif isinstance(value, int):
        put_int(out, value)
    elif isinstance(value, float):
        if not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise ValueError(f"Erlang has no float {value!r}")
        nine[0] = TAG_NEW_FLOAT
        put_double(nine + 1, value)
        out += nine[:9]
    elif isinstance(value, tuple):
        if len(value) <= 255:
            out += bytes((TAG_SMALL_TUPLE, len(value)))
        else:
            put_head(out, TAG_LARGE_TUPLE, len(value))
        for item in value:
            put_value(out, item, depth + 1)
    elif isinstance(value, list):
        put_list(out, value, depth)
    elif isinstance(value, dict):
        put_head(out, TAG_MAP, len(value))
        for key, item in value.items():
            put_value(out, key, depth + 1)
            put_value(out, item, depth + 1)
    elif isinstance(value, Opaque):
        out += value.data
    elif isinstance(value, str):
        raise TypeError(f"{value!r} could be an atom, a binary or a list of characters: give Atom, bytes or list(b'...')")
    else:
        raise TypeError(f"a term cannot hold a {type(value).__name__}")
    return 0


def encode(value):
    """Encode a value, as `decode` returns them, as `term_to_binary` of Erlang/OTP 25 does.

    True and False are atoms.  TypeError, ValueError if the format cannot hold the value; nesting is limited to 256 levels.
    """
    cdef bytearray out = bytearray(b"\x83")
    put_value(out, value, 0)
    return bytes(out)


# ------------------------------------------------------------------------------------- AMQP 0-9-1: types and tables

class FieldInt(int):
    """An integer of an AMQP table with another type than a plain int has; `code` is the letter of the type."""

    code = "?"

    def __new__(cls, value):
        made = int.__new__(cls, value)
        _, size, signed = FIELD_INTS[cls.code]
        try:
            made.to_bytes(size, "big", signed=signed)
        except OverflowError:
            raise ValueError(f"{cls.__name__} has {8 * size} bits{'' if signed else ' and no sign'}, not {int(made)}") from None
        return made

    def __repr__(self):
        return f"{type(self).__name__}({int.__repr__(self)})"


class Int8(FieldInt):
    """``b``, byte."""

    code = "b"


class UInt8(FieldInt):
    """``B``, unsignedbyte."""

    code = "B"


class Int16(FieldInt):
    """``s``, short, as RabbitMQ has it."""

    code = "s"


class UInt16(FieldInt):
    """``u``, unsignedshort."""

    code = "u"


class UInt32(FieldInt):
    """``i``, unsignedint."""

    code = "i"


class Int64(FieldInt):
    """``l``, long: for a number that would fit into 32 bits."""

    code = "l"


class Timestamp(FieldInt):
    """``T``: whole seconds since the Unix epoch."""

    code = "T"

    @property
    def datetime(self):
        """datetime.datetime: in UTC; OverflowError beyond the year 9999."""
        return datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(seconds=int(self))


class Float32(float):
    """``f``: a float of 32 bits."""

    def __new__(cls, value):
        return float.__new__(cls, struct.unpack(">f", struct.pack(">f", value))[0])

    def __repr__(self):
        return f"Float32({float.__repr__(self)})"


class Table(dict):
    """A table with a name that occurs more than once: all of it in `pairs`, the first of each name, as for a node, in the dict."""

    __slots__ = ("pairs",)

    def __init__(self, pairs):
        self.pairs = tuple(pairs)
        dict.__init__(self, reversed(self.pairs))

    def __reduce__(self):
        return Table, (self.pairs,)


# Class, bytes and whether there is a sign, by the letter of the type.
FIELD_INTS = {
    "b": (Int8, 1, True), "B": (UInt8, 1, False), "s": (Int16, 2, True), "u": (UInt16, 2, False), "i": (UInt32, 4, False),
    "l": (Int64, 8, True), "T": (Timestamp, 8, False),
}

cdef object AMQP_CUT = "an AMQP table or property list ends before what it states"


cdef inline const unsigned char* amqp_take(Reader* r, int64_t n) except NULL:
    # The next n bytes.
    cdef const unsigned char* p = r.p + r.pos
    if n > r.end - r.pos:
        raise CorruptionError(AMQP_CUT, pos=r.pos)
    r.pos += n
    return p


cdef inline str text_of(const unsigned char* p, int64_t n):
    return PyUnicode_DecodeUTF8(<const char*>p, n, "surrogateescape")


cdef object take_field(Reader* r, int depth):
    # The value of a field, which begins with the letter of its type.
    cdef unsigned char code = amqp_take(r, 1)[0]
    cdef const unsigned char* p
    cdef int64_t n, end
    if code == c'S':
        n = get_u32(amqp_take(r, 4))
        return text_of(amqp_take(r, n), n)
    if code == c'I':
        return get_i32(amqp_take(r, 4))
    if code == c't':
        return amqp_take(r, 1)[0] != 0
    if code == c'l' or code == c'L':
        # The specification has the second letter: a node reads both and writes the first.
        n = get_i64(amqp_take(r, 8))
        return make_field(Int64, n) if INT32_MIN <= n <= INT32_MAX else n
    if code == c'T':
        return make_field(Timestamp, <uint64_t>get_i64(amqp_take(r, 8)))
    if code == c'd':
        return get_double(amqp_take(r, 8))
    if code == c'V':
        return None
    if code == c'x':
        n = get_u32(amqp_take(r, 4))
        p = amqp_take(r, n)
        return PyBytes_FromStringAndSize(<const char*>p, n)
    if code == c'F' or code == c'A':
        n = get_u32(amqp_take(r, 4))
        if depth == MAX_NESTING:
            raise CorruptionError(FAULTS[TOO_DEEP], pos=r.pos)
        amqp_take(r, n)
        end = r.end
        r.end = r.pos
        r.pos -= n
        value = take_table(r, depth + 1) if code == c'F' else take_array(r, depth + 1)
        r.end = end
        return value
    if code == c'f':
        return Float32(struct.unpack(">f", amqp_take(r, 4)[:4])[0])
    if code == c'D':
        p = amqp_take(r, 5)
        return decimal.Decimal((0, tuple(map(int, str(get_u32(p + 1)))), -p[0]))
    if chr(code) not in FIELD_INTS:
        raise CorruptionError(f"{chr(code)!r} is not a type of an AMQP field", pos=r.pos - 1)
    kind, size, signed = FIELD_INTS[chr(code)]
    p = amqp_take(r, size)
    return make_field(kind, int.from_bytes(p[:<int64_t>size], "big", signed=signed))


cdef inline object make_field(kind, value):
    # Without the check of the range: the value has the right number of bits.
    return int.__new__(kind, value)


cdef object take_table(Reader* r, int depth):
    cdef list pairs = []
    cdef int64_t n
    while r.pos < r.end:
        n = amqp_take(r, 1)[0]
        name = text_of(amqp_take(r, n), n)
        pairs.append((name, take_field(r, depth)))
    table = dict(pairs)
    return table if len(table) == len(pairs) else Table(pairs)


cdef list take_array(Reader* r, int depth):
    cdef list items = []
    while r.pos < r.end:
        items.append(take_field(r, depth))
    return items


def decode_table(data):
    """Decode the fields of an AMQP 0-9-1 table, without the four bytes of its length; CorruptionError if they are damaged.

    Values are bool (``t``), int (``I``, and ``l`` beyond 32 bits), float (``d``), str (``S``; bytes that are not UTF-8 as
    surrogates), bytes (``x``), None (``V``), list (``A``), dict (``F``), `decimal.Decimal` (``D``), `Timestamp` (``T``)
    or, for other integers and floats, a type of this module.
    """
    cdef Reader r
    cdef bytes kept = bytes(data)
    r.p, r.pos, r.end, r.budget = kept, 0, len(kept), 0
    return take_table(&r, 0)


# The properties of the class basic, from the highest bit of the flags.
PROPERTY_NAMES = (
    "content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration",
    "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id",
)

cdef enum:
    PROPERTY_NUM = 14
    P_HEADERS = 2
    P_DELIVERY_MODE = 3
    P_PRIORITY = 4
    P_TIMESTAMP = 9


cdef struct PropertySpans:
    # The place of each property's value, relative to the first flag; size -1: it is not there.
    int32_t[PROPERTY_NUM] pos
    int32_t[PROPERTY_NUM] size


cdef int64_t span_properties(const unsigned char* p, int64_t n, PropertySpans* s) noexcept nogil:
    # -1, or the position of damage.  Only lengths are checked, not the fields of headers.
    cdef int64_t pos = 2, more, size
    cdef int i
    cdef uint16_t flags, further
    for i in range(PROPERTY_NUM):
        s.size[i] = -1
    if n < 2:
        return 0
    flags = further = get_u16(p)
    # Bit 0 says that more flags follow; the class basic has none that could be set there, nor bit 1.
    if flags & 2:
        return 0
    while further & 1:
        if n - pos < 2:
            return pos
        further = get_u16(p + pos)
        if further & 0xFFFE:
            return pos
        pos += 2
    for i in range(PROPERTY_NUM):
        if not flags & (<uint16_t>0x8000 >> i):
            continue
        if i == P_DELIVERY_MODE or i == P_PRIORITY:
            more, size = 0, 1
        elif i == P_TIMESTAMP:
            more, size = 0, 8
        elif i == P_HEADERS:
            if n - pos < 4:
                return pos
            more, size = 4, get_u32(p + pos)
        else:
            if n - pos < 1:
                return pos
            more, size = 1, p[pos]
        if size > n - pos - more:
            return pos
        pos += more
        s.pos[i], s.size[i] = <int32_t>pos, <int32_t>size
        pos += size
    return -1 if pos == n else pos


cdef tuple PROPERTY_NAMES_C = PROPERTY_NAMES


cdef dict properties_of(const unsigned char* p, int64_t n):
    cdef PropertySpans s
    cdef Reader r
    cdef dict made = {}
    cdef int i
    cdef int64_t wrong = -2 if n > INT32_MAX else span_properties(p, n, &s)
    if wrong != -1:
        raise CorruptionError(AMQP_CUT if wrong >= 2 else "flags that AMQP 0-9-1 does not have", pos=wrong)
    for i in range(PROPERTY_NUM):
        if s.size[i] < 0:
            continue
        if i == P_HEADERS:
            r.p, r.pos, r.end, r.budget = p, s.pos[i], s.pos[i] + s.size[i], 0
            made["headers"] = take_table(&r, 0)
        elif i == P_DELIVERY_MODE or i == P_PRIORITY:
            made[PROPERTY_NAMES_C[i]] = p[s.pos[i]]
        elif i == P_TIMESTAMP:
            made["timestamp"] = make_field(Timestamp, <uint64_t>get_i64(p + s.pos[i]))
        else:
            made[PROPERTY_NAMES_C[i]] = text_of(p + s.pos[i], s.size[i])
    return made


def decode_properties(data):
    """Decode property flags and list of a content of the class basic; CorruptionError if they are damaged.

    Returns a dict of the present ones, by their names with underscores, in their order; `headers` as for `decode_table`.
    """
    cdef bytes kept = bytes(data)
    return properties_of(kept, len(kept))


cdef int put_number(bytearray out, int size, int64_t number) except -1:
    cdef unsigned char[8] eight
    put_i64(eight, number)
    out += (eight + 8 - size)[:size]
    return 0


cdef int put_text(bytearray out, str text, int head, str what) except -1:
    # A short (head 1) or long (head 4) string.
    cdef bytes encoded = text.encode("utf-8", "surrogateescape")
    if head == 1 and len(encoded) > 255 or len(encoded) > 0xFFFFFFFF:
        raise InvalidMessageError(f"{what} has {len(encoded)} bytes; AMQP allows {255 if head == 1 else 0xFFFFFFFF}")
    put_number(out, head, len(encoded))
    out += encoded
    return 0


cdef int64_t seconds_of(object value, str what) except? -1:
    # The 64 bits of a timestamp.
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            raise InvalidMessageError(f"{what} is a time without a zone: give it one, such as datetime.timezone.utc")
        value = int(value.timestamp())
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise InvalidMessageError(f"{what} is {value!r}, not a time in whole seconds since 1970")
    return <int64_t><uint64_t>value


cdef int put_length(bytearray out, Py_ssize_t begin) except -1:
    # Fills in the four bytes before `begin`.
    if len(out) - begin > 0xFFFFFFFF:
        raise InvalidMessageError("a table or array of more than 4 GiB")
    out[begin - 4:begin] = (len(out) - begin).to_bytes(4, "big")
    return 0


cdef int put_field(bytearray out, object value, str what, int depth) except -1:
    cdef int overflow = 0
    cdef int64_t number
    cdef unsigned char[9] nine
    if isinstance(value, str):
        out.append(c'S')
        put_text(out, str(value), 4, what)
    elif value is None:
        out.append(c'V')
    elif isinstance(value, bool):
        out += b"t\x01" if value else b"t\x00"
    elif isinstance(value, FieldInt):
        _, size, signed = FIELD_INTS[value.code]
        out += value.code.encode() + value.to_bytes(size, "big", signed=signed)
    elif isinstance(value, int):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            raise InvalidMessageError(f"{what} is an integer of more than 64 bits, which no AMQP field holds")
        if INT32_MIN <= number <= INT32_MAX:
            out.append(c'I')
            put_number(out, 4, number)
        else:
            out.append(c'l')
            put_number(out, 8, number)
    elif isinstance(value, Float32):
        out.append(c'f')
        out += struct.pack(">f", value)
    elif isinstance(value, float):
        nine[0] = c'd'
        put_double(nine + 1, value)
        out += nine[:9]
    elif isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value)
        if len(value) > 0xFFFFFFFF:
            raise InvalidMessageError(f"{what} has more than 4 GiB")
        out.append(c'x')
        put_number(out, 4, len(value))
        out += value
    elif isinstance(value, decimal.Decimal):
        sign, digits, exponent = value.as_tuple()
        if isinstance(exponent, str) or sign or not -255 <= exponent <= 0:
            raise InvalidMessageError(f"{what} is {value}; an AMQP decimal is not negative and has up to 255 places")
        unscaled = int("".join(map(str, digits)))
        if unscaled > 0xFFFFFFFF:
            raise InvalidMessageError(f"{what} is {value}; an AMQP decimal has 32 bits without its point")
        out.append(c'D')
        put_number(out, 1, -exponent)
        put_number(out, 4, unscaled)
    elif isinstance(value, datetime.datetime):
        out.append(c'T')
        put_number(out, 8, seconds_of(value, what))
    elif isinstance(value, (dict, list, tuple)):
        if depth == MAX_NESTING:
            raise InvalidMessageError(f"{what}: {FAULTS[TOO_DEEP]}")
        out += b"F\0\0\0\0" if isinstance(value, dict) else b"A\0\0\0\0"
        begin = len(out)
        if isinstance(value, dict):
            put_table(out, value, depth + 1)
        else:
            for item in value:
                put_field(out, item, what, depth + 1)
        put_length(out, begin)
    else:
        raise InvalidMessageError(f"{what} is a {type(value).__name__}, which no AMQP field holds")
    return 0


cdef int put_table(bytearray out, object table, int depth) except -1:
    for name, value in table.pairs if isinstance(table, Table) else table.items():
        if not isinstance(name, str):
            raise InvalidMessageError(f"{name!r} is not a name of a field; names are str")
        put_text(out, name, 1, "the name of a field")
        put_field(out, value, name, depth)
    return 0


def encode_table(table not None):
    """Encode the fields of an AMQP 0-9-1 table, without the four bytes of its length.

    Plain values become ``t`` (bool), ``I`` or beyond 32 bits ``l`` (int), ``d`` (float), ``S`` (str), ``x`` (bytes), ``V`` (None),
    ``A`` (list, tuple), ``F`` (dict), ``D`` (decimal.Decimal) and ``T`` (datetime.datetime, `Timestamp`); the other fields
    have types in this module.  InvalidMessageError for a value that no field holds.
    """
    cdef bytearray out = bytearray()
    if not isinstance(table, dict):
        raise InvalidMessageError(f"a table is a dict, not a {type(table).__name__}")
    put_table(out, table, 0)
    return bytes(out)


def encode_properties(dict properties not None):
    """Encode properties of the class basic as property flags and list; None stands for a property that is not there.

    InvalidMessageError for an unknown name, or a value that its property cannot hold.
    """
    cdef bytearray out = bytearray(2)
    cdef int i
    cdef uint16_t flags = 0
    unknown = [str(name) for name in properties if name not in PROPERTY_NAMES_C]
    if unknown:
        raise InvalidMessageError(f"no property is called {unknown[0]!r}; there are {', '.join(PROPERTY_NAMES)}")
    for i in range(PROPERTY_NUM):
        name = PROPERTY_NAMES_C[i]
        value = properties.get(name)
        if value is None:
            continue
        flags |= <uint16_t>0x8000 >> i
        if i == P_HEADERS:
            if not isinstance(value, dict):
                raise InvalidMessageError(f"headers are a dict, not a {type(value).__name__}")
            out += b"\0\0\0\0"
            begin = len(out)
            put_table(out, value, 0)
            put_length(out, begin)
        elif i == P_DELIVERY_MODE or i == P_PRIORITY:
            if not isinstance(value, int) or not 0 <= value <= 255:
                raise InvalidMessageError(f"{name} is {value!r}, not an int from 0 to 255")
            out.append(value)
        elif i == P_TIMESTAMP:
            put_number(out, 8, seconds_of(value, name))
        elif isinstance(value, str):
            put_text(out, value, 1, name)
        else:
            raise InvalidMessageError(f"{name} is a {type(value).__name__}, not a str")
    out[0], out[1] = flags >> 8, flags & 255
    return bytes(out)


# ----------------------------------------------------------------------------------------------------- message terms

cdef enum:
    FORM_NONE = 0
    FORM_BASIC_MESSAGE
    FORM_MC
    # A message container whose content is not that of AMQP 0-9-1.
    FORM_MC_OTHER

cdef struct MessageParts:
    # The places of the parts, relative to the version byte; a size or position of -1: not there.
    int form
    bint persistent
    # A message container has annotations that change the properties which a node delivers.
    bint annotated
    int64_t vhost, vhost_size
    int64_t exchange, exchange_size
    int64_t keys, key_num, keys_size
    int64_t props, props_size
    # The term of a decoded P_basic, where there are no encoded properties.
    int64_t record, record_end
    int64_t fragments, fragment_num, body_size
    int64_t id


cdef inline int64_t binary_at(const unsigned char* p, int64_t pos, int64_t end, int64_t* start, int64_t* size, Fault* fault) noexcept nogil:
    # The position after the binary at `pos`, and the place of its bytes.
    if pos < 0:
        return -1
    if pos >= end or p[pos] != TAG_BINARY:
        return fail(fault, NOT_A_MESSAGE if pos < end else CUT, pos)
    if end - pos < 5 or get_u32(p + pos + 1) > end - pos - 5:
        return fail(fault, CUT, pos)
    start[0], size[0] = pos + 5, get_u32(p + pos + 1)
    return pos + 5 + size[0]


cdef int64_t binaries_at(const unsigned char* p, int64_t pos, int64_t end, int64_t* first, int64_t* num, int64_t* size,
                         Fault* fault) noexcept nogil:
    # The position after the list of binaries at `pos`; the position of the first, their number and total size.
    cdef int64_t i, n, start = 0, one = 0, sum = 0
    first[0] = pos
    num[0] = size[0] = 0
    if pos < 0:
        return -1
    if pos < end and p[pos] == TAG_NIL:
        return pos + 1
    if pos >= end or p[pos] != TAG_LIST:
        return fail(fault, NOT_A_MESSAGE if pos < end else CUT, pos)
    if end - pos < 5 or get_u32(p + pos + 1) > end - pos - 5:
        return fail(fault, CUT, pos)
    n = get_u32(p + pos + 1)
    pos += 5
    first[0] = pos
    for i in range(n):
        pos = binary_at(p, pos, end, &start, &one, fault)
        if pos < 0:
            return -1
        sum += one
    if pos >= end or p[pos] != TAG_NIL:
        return fail(fault, NOT_A_MESSAGE if pos < end else CUT, pos)
    num[0], size[0] = n, sum
    return pos + 1


cdef inline int64_t tuple_at(const unsigned char* p, int64_t pos, int64_t end, int size, const char* name, int64_t name_size,
                             Fault* fault) noexcept nogil:
    # The position of the second element of a tuple of `size` whose first is the atom `name`.
    if pos < 0:
        return -1
    if end - pos < 2:
        return fail(fault, CUT, pos)
    if p[pos] != TAG_SMALL_TUPLE or p[pos + 1] != size:
        return fail(fault, NOT_A_MESSAGE, pos)
    cdef int64_t at = after_atom(p, pos + 2, end, name, name_size)
    return at if at >= 0 else fail(fault, NOT_A_MESSAGE, pos + 2)


cdef int64_t content_at(const unsigned char* p, int64_t pos, int64_t end, MessageParts* m, Fault* fault) noexcept nogil:
    cdef int64_t properties, encoded, after
    pos = tuple_at(p, pos, end, 6, b"content", 7, fault)
    properties = scalar_extent(p, pos, end, fault)
    encoded = after_atom(p, properties, end, b"none", 4)
    if encoded < 0:
        encoded = value_extent(p, properties, end, fault)
    pos = encoded
    if 0 <= pos < end and p[pos] == TAG_BINARY:
        pos = binary_at(p, pos, end, &m.props, &m.props_size, fault)
    else:
        # Only the decoded form is there: P_basic is a tuple of 15.
        pos = scalar_extent(p, pos, end, fault)
        if pos >= 0 and not is_atom(p, encoded, end, b"none", 4):
            return fail(fault, NOT_A_MESSAGE, encoded)
        if pos >= 0 and not (p[properties] == TAG_SMALL_TUPLE and p[properties + 1] == 15):
            return fail(fault, NOT_A_MESSAGE, properties)
        m.record, m.record_end = properties, encoded
    after = after_atom(p, pos, end, b"rabbit_framing_amqp_0_9_1", 25)
    if after < 0:
        after = scalar_extent(p, pos, end, fault)
    return binaries_at(p, after, end, &m.fragments, &m.fragment_num, &m.body_size, fault)


cdef inline bint is_header(const unsigned char* p, int64_t n) noexcept nogil:
    # A name of an annotation that a node delivers as a header.
    return (n > 2 and p[0] == 0x78 and p[1] == 0x2D) or (n == 15 and memcmp(p, <const char*>b"timestamp_in_ms", 15) == 0)


cdef int64_t annotations_at(const unsigned char* p, int64_t pos, int64_t end, MessageParts* m, Fault* fault) noexcept nogil:
    # The map after a message container's content.  Its keys are words in older versions, and letters since.
    cdef int64_t i, pairs, value, key, length = 0, size = 0
    if pos < 0:
        return -1
    if pos >= end or p[pos] != TAG_MAP:
        return fail(fault, NOT_A_MESSAGE if pos < end else CUT, pos)
    if end - pos < 5:
        return fail(fault, CUT, pos)
    pairs = get_u32(p + pos + 1)
    pos += 5
    for i in range(pairs):
        key = pos
        value = value_extent(p, key, end, fault)
        pos = value_extent(p, value, end, fault)
        if pos < 0:
            return -1
        if p[key] == TAG_BINARY:
            if binary_at(p, key, end, &length, &size, fault) < 0:
                return -1
            if is_header(p + length, size):
                m.annotated = True
        elif is_atom(p, key, end, b"deaths", 6) or (
                is_atom(p, key, end, b"ttl", 3) and is_atom(p, value, end, b"undefined", 9)):
            m.annotated = True
        elif is_atom(p, key, end, b"x", 1) or is_atom(p, key, end, b"exchange", 8):
            if binary_at(p, value, end, &m.exchange, &m.exchange_size, fault) < 0:
                return -1
        elif is_atom(p, key, end, b"rk", 2) or is_atom(p, key, end, b"routing_keys", 12):
            if binaries_at(p, value, end, &m.keys, &m.key_num, &m.keys_size, fault) < 0:
                return -1
        elif is_atom(p, key, end, b"id", 2):
            if binary_at(p, value, end, &length, &size, fault) < 0:
                return -1
            if size == 16:
                m.id = length
        elif is_atom(p, key, end, b"d", 1) or is_atom(p, key, end, b"durable", 7):
            m.persistent = is_atom(p, value, end, b"true", 4)
    return pos


cdef int64_t message_at(const unsigned char* p, int64_t n, MessageParts* m, Fault* fault) noexcept nogil:
    # The length of the message term of n bytes at p and the places of its parts, or -1.
    cdef int64_t pos, at, size = 0
    m.form = FORM_NONE
    m.vhost_size = m.exchange_size = m.props_size = m.record = m.id = -1
    m.keys = m.key_num = m.keys_size = m.fragments = m.fragment_num = m.body_size = 0
    m.persistent = m.annotated = False
    if n < 4:
        return fail(fault, CUT, 0)
    if p[0] != VERSION:
        return fail(fault, NO_VERSION, 0)
    if p[1] == TAG_SMALL_TUPLE and p[2] == 4:
        pos = tuple_at(p, 1, n, 4, b"mc", 2, fault)
        m.persistent = True
        m.form = FORM_MC if pos >= 0 and is_atom(p, pos, n, b"mc_amqpl", 8) else FORM_MC_OTHER
        pos = value_extent(p, pos, n, fault)
        pos = content_at(p, pos, n, m, fault) if m.form == FORM_MC else value_extent(p, pos, n, fault)
        return annotations_at(p, pos, n, m, fault)
    m.form = FORM_BASIC_MESSAGE
    pos = tuple_at(p, 1, n, 6, b"basic_message", 13, fault)
    pos = tuple_at(p, pos, n, 4, b"resource", 8, fault)
    at = binary_at(p, pos, n, &m.vhost, &m.vhost_size, fault)
    pos = after_atom(p, at, n, b"exchange", 8)
    if pos < 0 <= at:
        return fail(fault, NOT_A_MESSAGE, at)
    pos = binary_at(p, pos, n, &m.exchange, &m.exchange_size, fault)
    pos = binaries_at(p, pos, n, &m.keys, &m.key_num, &m.keys_size, fault)
    at = content_at(p, pos, n, m, fault)
    pos = binary_at(p, at, n, &m.id, &size, fault)
    if pos >= 0 and size != 16:
        return fail(fault, NOT_A_MESSAGE, at)
    at = after_atom(p, pos, n, b"true", 4)
    m.persistent = at >= 0
    if pos >= 0 and at < 0:
        at = after_atom(p, pos, n, b"false", 5)
        if at < 0:
            return fail(fault, NOT_A_MESSAGE, pos)
    return at


cdef const unsigned char* message_id(const unsigned char* p, int64_t n, int64_t* body_size) noexcept nogil:
    cdef MessageParts m
    cdef Fault fault
    if message_at(p, n, &m, &fault) != n or m.id < 0:
        return NULL
    body_size[0] = -1 if m.form == FORM_MC_OTHER else m.body_size
    return p + m.id


def message_id_of(const uint8_t[::1] term not None):
    """Return the message id inside a message term; None for another term, or one without an id."""
    cdef int64_t size = 0
    cdef const unsigned char* found = NULL
    if term.shape[0]:
        found = message_id(&term[0], term.shape[0], &size)
    return None if found == NULL else found[:16]


cdef dict RECORD_KINDS = {
    "byte": Int8, "unsignedbyte": UInt8, "short": Int16, "unsignedshort": UInt16, "unsignedint": UInt32, "float": Float32,
    "timestamp": Timestamp,
}


cdef object record_field(kind, value, int depth):
    # The value of {Type, Value} as a node keeps it where it has decoded a header.
    if depth > MAX_NESTING:
        raise ValueError
    if kind == "longstr":
        return (<bytes?>value).decode("utf-8", "surrogateescape")
    if kind == "long":
        return Int64(value) if INT32_MIN <= value <= INT32_MAX else int(value)
    if kind == "signedint":
        return value + 0
    if kind == "bool":
        if value != "true" and value != "false":
            raise ValueError
        return value == "true"
    if kind == "table":
        return record_table(value, depth + 1)
    if kind == "array":
        return [record_field(inner, item, depth + 1) for inner, item in <list?>value]
    if kind == "void":
        return None
    if kind == "double":
        return float(value)
    if kind == "binary":
        return <bytes?>value
    if kind == "decimal":
        places, unscaled = value
        return decimal.Decimal((0, tuple(map(int, str(unscaled))), -places))
    return RECORD_KINDS[kind](value)


cdef object record_table(items, int depth):
    pairs = []
    for name, kind, value in <list?>items:
        pairs.append(((<bytes?>name).decode("utf-8", "surrogateescape"), record_field(kind, value, depth)))
    table = dict(pairs)
    return table if len(table) == len(pairs) else Table(pairs)


cdef dict record_properties(record):
    # The decoded P_basic record, which a node writes if it has changed properties: 14 values, ``undefined`` if not there.
    made = {}
    try:
        if len(record) != PROPERTY_NUM + 1 or record[0] != "P_basic":
            raise ValueError
        for name, value in zip(PROPERTY_NAMES, record[1:]):
            if isinstance(value, Atom):
                if value != "undefined":
                    raise ValueError
            elif name == "headers":
                made[name] = record_table(value, 0)
            elif name == "timestamp":
                made[name] = Timestamp(value)
            elif name == "delivery_mode" or name == "priority":
                made[name] = int(UInt8(value))
            else:
                made[name] = (<bytes?>value).decode("utf-8", "surrogateescape")
    except (ValueError, TypeError, KeyError, OverflowError, struct.error):
        raise CorruptionError("the decoded properties are not as a node writes them") from None
    return made


cdef list header_pairs(key, value):
    # The headers that a node makes of an annotation.
    if isinstance(key, bytes) and is_header(<const unsigned char*><bytes>key, len(key)):
        name = key.decode("utf-8", "surrogateescape")
        if isinstance(value, Atom):
            return [(name, value == "true")] if value in ("true", "false") else []
        if isinstance(value, bytes):
            return [(name, value.decode("utf-8", "surrogateescape"))]
        return [(name, Int64(value))] if type(value) is int and -2**63 <= value < 2**63 else []
    if key != "deaths":
        return []
    try:
        # 3.13 had a record of a map first; the last death comes first.
        if isinstance(value, tuple):
            value = sorted(value[3].items(), key=lambda one: -one[1][4]["last_time"])
        return [("x-death", [death(place, record) for place, record in value])]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, IndexError):
        return []


cdef dict death(place, record):
    queue, reason = place
    _, exchange, keys, count, times = record
    made = {
        "count": Int64(count),
        "reason": str(reason),
        "queue": queue.decode("utf-8", "surrogateescape"),
        "time": Timestamp(times["first_time"] // 1000),
        "exchange": exchange.decode("utf-8", "surrogateescape"),
        "routing-keys": [key.decode("utf-8", "surrogateescape") for key in keys],
    }
    if "ttl" in times:
        made["original-expiration"] = str(int(times["ttl"]))
    return made


cdef dict delivered_properties(dict properties, annotations):
    # As mc_amqpl at delivery (RabbitMQ 4.0.5 and 4.3.6).
    added = []
    for key, value in annotations.items() if isinstance(annotations, dict) else ():
        added += header_pairs(key, value)
        if key == "ttl" and value == "undefined":
            properties.pop("expiration", None)
    if added:
        headers = properties.get("headers", {})
        added += headers.pairs if isinstance(headers, Table) else headers.items()
        # By name; of two of a name the first.
        table = {}
        for name, value in sorted(added, key=lambda pair: pair[0]):
            table.setdefault(name, value)
        properties["headers"] = table
        properties = {name: properties[name] for name in PROPERTY_NAMES if name in properties}
    return properties


cdef class MessageTerm:
    """A message as its external `term`; parts are decoded on demand."""

    cdef readonly bytes term
    cdef MessageParts parts
    cdef bytes whole

    @classmethod
    def from_term(cls, term):
        """Parse a message term; CorruptionError, with a position, if it is not well-formed."""
        cdef MessageTerm made = cls.__new__(cls)
        made.load(term if type(term) is bytes else bytes(term))
        return made

    cpdef load(self, bytes term):
        """Parse `term`; for subclasses that make terms."""
        cdef Fault fault
        cdef int64_t n = len(term), used = message_at(term, n, &self.parts, &fault)
        if 0 <= used < n:
            used = fail(&fault, TRAILING_BYTES, used)
        if used < 0:
            raise CorruptionError(FAULTS[fault.code], pos=fault.pos)
        self.term = term
        self.whole = None

    cdef bytes slice_of(self, int64_t pos, int64_t size):
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.term) + pos, size)

    cdef list slices_of(self, int64_t pos, int64_t num):
        cdef list found = []
        cdef int64_t i, size
        for i in range(num):
            size = get_u32(<const unsigned char*>PyBytes_AS_STRING(self.term) + pos + 1)
            found.append(self.slice_of(pos + 5, size))
            pos += 5 + size
        return found

    cdef int need_content(self) except -1:
        if self.parts.form == FORM_MC_OTHER:
            raise UnsupportedFormatError(
                "the message came by another protocol than AMQP 0-9-1 and is stored in that protocol's form, which this release "
                "does not decode; exchange, routing_keys, msg_id and term can be read")
        return 0

    @property
    def form(self):
        """str: "basic_message", or "mc" for a message container (RabbitMQ 3.13 and later)."""
        return "basic_message" if self.parts.form == FORM_BASIC_MESSAGE else "mc"

    @property
    def readable(self):
        """bool: body and properties can be read; False for a container of another protocol."""
        return self.parts.form != FORM_MC_OTHER

    @property
    def body(self):
        """bytes: the payload.  UnsupportedFormatError if not `readable`."""
        if self.whole is None:
            self.need_content()
            if self.parts.fragment_num == 1:
                self.whole = self.slice_of(self.parts.fragments + 5, self.parts.body_size)
            else:
                self.whole = b"".join(reversed(self.slices_of(self.parts.fragments, self.parts.fragment_num)))
        return self.whole

    @property
    def body_size(self):
        """int: the bytes of the payload.  UnsupportedFormatError if not `readable`."""
        self.need_content()
        return self.parts.body_size

    @property
    def properties(self):
        """dict: the properties that are there, as for `decode_properties`; decoded again at each call.

        A message container (3.13 and later) has those that a node delivers: with the headers of dead-lettering, and without
        an expiration that the node has removed.  CorruptionError if they are damaged, UnsupportedFormatError if the message
        is not `readable`.
        """
        cdef dict made
        self.need_content()
        if self.parts.props_size < 0:
            made = record_properties(self.record())
        else:
            made = properties_of(<const unsigned char*>PyBytes_AS_STRING(self.term) + self.parts.props, self.parts.props_size)
        return delivered_properties(made, decode(self.term)[3]) if self.parts.annotated else made

    @property
    def annotated(self):
        """bool: a node has added or removed `properties`; `raw_properties` are the published ones."""
        return bool(self.parts.annotated)

    cdef tuple record(self):
        return decode(b"\x83" + self.slice_of(self.parts.record, self.parts.record_end - self.parts.record))

    @property
    def raw_properties(self):
        """bytes or None: property flags and list as they were published; None where only the decoded form was kept."""
        self.need_content()
        return None if self.parts.props_size < 0 else self.slice_of(self.parts.props, self.parts.props_size)

    @property
    def properties_size(self):
        """int: the size of the properties by which a node decides to embed the message (RabbitMQ 3.10.8).

        Bytes of the encoded ones; 100 for each header if only the decoded form was kept.
        """
        self.need_content()
        if self.parts.props_size >= 0:
            return self.parts.props_size
        headers = self.record()[3]
        return 100 * len(headers) if isinstance(headers, list) else 0

    @property
    def exchange(self):
        """str: the exchange that it was published to; bytes that are not UTF-8 as surrogates."""
        if self.parts.exchange_size < 0:
            return ""
        return text_of(<const unsigned char*>PyBytes_AS_STRING(self.term) + self.parts.exchange, self.parts.exchange_size)

    @property
    def routing_keys(self):
        """list of str: the routing key, and those of the headers CC and BCC."""
        return [key.decode("utf-8", "surrogateescape") for key in self.slices_of(self.parts.keys, self.parts.key_num)]

    @property
    def vhost(self):
        """str or None: the virtual host of the exchange; None for a message container."""
        if self.parts.vhost_size < 0:
            return None
        return text_of(<const unsigned char*>PyBytes_AS_STRING(self.term) + self.parts.vhost, self.parts.vhost_size)

    @property
    def msg_id(self):
        """bytes or None: the 16 bytes of its identity; a message container may have none."""
        return None if self.parts.id < 0 else self.slice_of(self.parts.id, 16)

    @property
    def persistent(self):
        """bool: it was published as persistent; True by default for a message container."""
        return bool(self.parts.persistent)


def message_term(bytes body not None, bytes properties not None, bytes exchange not None, list routing_keys not None,
                 bytes vhost not None, bint persistent, bytes msg_id not None):
    """Make the term of a message as node 3.10.8 on OTP 25 does; `properties` are flags and list."""
    cdef int64_t n = len(body), at, size
    cdef bytearray out = bytearray(b"\x83h\x06d\0\x0dbasic_messageh\x04d\0\x08resource")
    put_binary(out, vhost)
    out += b"d\0\x08exchange"
    put_binary(out, exchange)
    if routing_keys:
        put_head(out, TAG_LIST, len(routing_keys))
        for key in routing_keys:
            put_binary(out, key)
    out += b"jh\x06d\0\x07contenta<d\0\x04none"
    put_binary(out, properties)
    out += b"d\0\x19rabbit_framing_amqp_0_9_1"
    if n:
        put_head(out, TAG_LIST, (n + FRAGMENT_SIZE - 1) // FRAGMENT_SIZE)
        # The last part comes first, as in a node.
        at = (n - 1) // FRAGMENT_SIZE * FRAGMENT_SIZE
        while at >= 0:
            size = min(<int64_t>FRAGMENT_SIZE, n - at)
            put_head(out, TAG_BINARY, size)
            out += body if size == n else body[at:at + size]
            at -= FRAGMENT_SIZE
    out += b"j"
    put_binary(out, msg_id)
    out += b"d\0\x04true" if persistent else b"d\0\x05false"
    return bytes(out)


# ---------------------------------------------------------------------------------------------------- many at a time

cpdef enum RowStatus:
    # The readable parts of a message.
    ROW_SOUND = 0
    # No message term: everything is null.
    ROW_DAMAGED = 1
    # A container of another protocol: body and properties are null.
    ROW_UNREADABLE = 2
    # The properties are null, the rest is there.
    ROW_BAD_PROPERTIES = 3

# Columns of bytes of varying length; those after "headers" are properties, in their order.
BYTES_COLUMNS = ("body", "exchange", "headers") + tuple(
    name for name in PROPERTY_NAMES if name not in ("headers", "delivery_mode", "priority", "timestamp"))
MESSAGE_COLUMNS = ("status", "routing_keys", "delivery_mode", "priority", "timestamp") + BYTES_COLUMNS

cdef enum:
    COL_BODY = 0
    COL_EXCHANGE = 1
    COL_HEADERS = 2
    BYTES_NUM = 13

# The number of the property of a column of bytes, or -1.
cdef int[BYTES_NUM] PROPERTY_OF
for _index in range(BYTES_NUM):
    PROPERTY_OF[_index] = PROPERTY_NAMES.index(BYTES_COLUMNS[_index]) if BYTES_COLUMNS[_index] in PROPERTY_NAMES else -1

cdef struct Row:
    const unsigned char* p
    int64_t size
    # Encoded properties: those of the term, or those that a node delivers instead.
    const unsigned char* props
    int64_t props_size
    int status
    MessageParts m
    PropertySpans s


cdef void span_row(Row* row) noexcept nogil:
    cdef int i
    if row.props_size > INT32_MAX or span_properties(row.props, row.props_size, &row.s) >= 0:
        row.status = ROW_BAD_PROPERTIES
        for i in range(PROPERTY_NUM):
            row.s.size[i] = -1


cdef bint parse_row(Row* row) noexcept nogil:
    # True if the properties have to be made in Python.
    cdef Fault fault
    cdef int i
    row.status = ROW_SOUND
    row.props_size = -1
    for i in range(PROPERTY_NUM):
        row.s.size[i] = -1
    if message_at(row.p, row.size, &row.m, &fault) != row.size:
        row.status = ROW_DAMAGED
    elif row.m.form == FORM_MC_OTHER:
        row.status = ROW_UNREADABLE
    elif row.m.props_size < 0 or row.m.annotated:
        return True
    else:
        row.props, row.props_size = row.p + row.m.props, row.m.props_size
        span_row(row)
    return False


cdef inline const unsigned char* bytes_of(Row* row, int column, int64_t* size) noexcept nogil:
    # The place and size of the bytes of a column; -1: null.  Of a body in parts the first part.
    cdef const unsigned char* base = row.p
    cdef int64_t pos
    size[0] = -1
    if row.status == ROW_DAMAGED or (row.status == ROW_UNREADABLE and column != COL_EXCHANGE):
        return NULL
    if column == COL_EXCHANGE:
        size[0], pos = row.m.exchange_size, row.m.exchange
    elif column == COL_BODY:
        size[0], pos = row.m.body_size, row.m.fragments + 5
    else:
        size[0], pos, base = row.s.size[PROPERTY_OF[column]], row.s.pos[PROPERTY_OF[column]], row.props
    return base + pos if size[0] >= 0 else NULL


cdef void copy_body(Row* row, unsigned char* out) noexcept nogil:
    # The last part comes first.  Lengths are read a second time, and checked a second time.
    cdef int64_t left = row.m.body_size, pos = row.m.fragments, i, size
    for i in range(row.m.fragment_num):
        if row.size - pos < 5:
            return
        size = get_u32(row.p + pos + 1)
        pos += 5
        if size > left or size > row.size - pos:
            return
        left -= size
        memcpy(out + left, row.p + pos, size)
        pos += size


cdef void fill_bytes(Row* rows, int64_t n, int column, int32_t* offsets, unsigned char* data, unsigned char* valid,
                     bint* utf8) noexcept nogil:
    cdef int64_t i, size, used = 0
    cdef const unsigned char* p
    offsets[0] = 0
    for i in range(n):
        p = bytes_of(&rows[i], column, &size)
        valid[i] = size >= 0
        if size > 0:
            if column == COL_BODY and rows[i].m.fragment_num > 1:
                copy_body(&rows[i], data + used)
            else:
                memcpy(data + used, p, size)
            if column != COL_BODY and column != COL_HEADERS and utf8[0]:
                utf8[0] = is_utf8(data + used, size)
            used += size
        offsets[i + 1] = <int32_t>used


cdef void fill_keys(Row* rows, int64_t n, int32_t* lists, int32_t* offsets, unsigned char* data, unsigned char* valid,
                    bint* utf8) noexcept nogil:
    cdef int64_t i, j, pos, size, left, count = 0, used = 0
    lists[0] = offsets[0] = 0
    for i in range(n):
        valid[i] = rows[i].status != ROW_DAMAGED
        if valid[i]:
            pos, left = rows[i].m.keys, rows[i].m.keys_size
            for j in range(rows[i].m.key_num):
                size = get_u32(rows[i].p + pos + 1) if rows[i].size - pos >= 5 else 0
                pos += 5
                if size > left or size > rows[i].size - pos:
                    size = 0
                left -= size
                memcpy(data + used, rows[i].p + pos, size)
                if utf8[0]:
                    utf8[0] = is_utf8(data + used, size)
                used += size
                pos += size
                count += 1
                offsets[count] = <int32_t>used
        lists[i + 1] = <int32_t>count


class MessageColumns:
    """Messages as `columns` of `count` rows, in arrays for Arrow; `utf8` is True for a column whose texts are all UTF-8.

    ``status``: uint8, values of `RowStatus`.  ``routing_keys``: (int32 offsets of the lists, int32 offsets of the keys,
    uint8 bytes, valid).  ``delivery_mode`` and ``priority``: (uint8, valid).  ``timestamp``: (uint64 seconds, valid).
    `BYTES_COLUMNS`: (int32 offsets, uint8 bytes, valid); ``headers`` are for `decode_table`.  ``valid`` is an array of
    uint8, 1 for a row with a value.
    """

    __slots__ = ("columns", "count", "utf8")

    def __init__(self, count, columns, utf8):
        self.count, self.columns, self.utf8 = count, columns, utf8

    def __getitem__(self, name):
        return self.columns[name]

    def __len__(self):
        return self.count


cdef const unsigned char* bytes_at(const uint8_t[::1] view) noexcept:
    return &view[0] if view.shape[0] else NULL


def message_columns(sources not None, const int64_t[::1] positions not None, const int64_t[::1] sizes not None, numbers=None,
                    columns=MESSAGE_COLUMNS):
    """Decode many message terms into `MessageColumns`, most of it with the GIL released.

    Parameters
    ----------
    sources : Region, bytes-like, or list of those
    positions, sizes : array of int64
        The place of each term in its source.
    numbers : array of int32, optional
        The source of each term; default: the first.
    columns : sequence of str
        Of `MESSAGE_COLUMNS`; others are not filled.

    A term that is damaged, or outside its source, is a row of nulls with its `status`.  ValueError if an argument does not
    fit, or a column has more than 2 GiB: give fewer terms at a time.
    """
    cdef int64_t n = positions.shape[0], i, size, total, key_total = 0, key_bytes = 0
    cdef int column, number
    cdef bint utf8
    cdef const int32_t[::1] source_of
    cdef int32_t[::1] lists, offsets
    cdef uint8_t[::1] data, valid, small
    cdef uint64_t[::1] seconds
    cdef Row* rows = NULL
    cdef const unsigned char* p
    cdef const unsigned char** bases = NULL
    cdef int64_t* lengths = NULL
    cdef int64_t source_num
    cdef Region region
    cdef list pinned = [], kept = [], made_anew = []
    for name in columns:
        if name not in MESSAGE_COLUMNS:
            raise ValueError(f"there is no column {name!r}; there are {', '.join(MESSAGE_COLUMNS)}")
    if not isinstance(sources, (list, tuple)):
        sources = [sources]
    source_num = len(sources)
    if numbers is None:
        if n and not source_num:
            raise ValueError("terms without a source")
        numbers = np.zeros(n, np.int32)
    source_of = numbers
    if sizes.shape[0] != n or source_of.shape[0] != n:
        raise ValueError("positions, sizes and numbers have different lengths")
    wanted = frozenset(columns)
    made, is_text = {}, {}
    try:
        rows = <Row*>malloc(<size_t>(n + 1) * sizeof(Row))
        bases = <const unsigned char**>malloc(<size_t>(source_num + 1) * sizeof(void*))
        lengths = <int64_t*>malloc(<size_t>(source_num + 1) * sizeof(int64_t))
        if rows == NULL or bases == NULL or lengths == NULL:
            raise MemoryError
        for i in range(source_num):
            if isinstance(sources[i], Region):
                region = sources[i]
                bases[i] = region.pin(0, region.size)
                pinned.append(region)
                lengths[i] = region.size
            else:
                view = memoryview(sources[i]).cast("B")
                kept.append(view)
                bases[i], lengths[i] = bytes_at(view), len(view)
        for i in range(n):
            if not 0 <= source_of[i] < source_num:
                raise ValueError(f"there is no source {source_of[i]}")
        with nogil:
            for i in range(n):
                number = source_of[i]
                size = sizes[i]
                if size < 1 or size > INT32_MAX or positions[i] < 0 or positions[i] > lengths[number] - size:
                    rows[i].p, rows[i].size, rows[i].status = NULL, 0, ROW_DAMAGED
                    rows[i].m.form = FORM_NONE
                    continue
                rows[i].p, rows[i].size = bases[number] + positions[i], size
                if parse_row(&rows[i]):
                    with gil:
                        made_anew.append(i)
        for i in made_anew:
            # Another process may write to the file, so it is read once more.
            term = PyBytes_FromStringAndSize(<const char*>rows[i].p, rows[i].size)
            try:
                encoded = encode_properties(MessageTerm.from_term(term).properties)
            except (StoreError, TypeError, ValueError):
                rows[i].status = ROW_BAD_PROPERTIES
                continue
            kept.append(encoded)
            rows[i].props, rows[i].props_size = <const unsigned char*>PyBytes_AS_STRING(encoded), len(encoded)
            span_row(&rows[i])
        for column in range(BYTES_NUM):
            name = BYTES_COLUMNS[column]
            if name not in wanted:
                continue
            total = 0
            with nogil:
                for i in range(n):
                    bytes_of(&rows[i], column, &size)
                    if size > 0:
                        total += size
            if total > INT32_MAX:
                raise ValueError(f"the column {name} would take {total} bytes; give fewer terms at a time")
            made[name] = (np.empty(n + 1, np.int32), np.empty(total, np.uint8), np.empty(n, np.uint8))
            offsets, data, valid = made[name]
            utf8 = True
            with nogil:
                fill_bytes(rows, n, column, &offsets[0], &data[0] if total else NULL, &valid[0] if n else NULL, &utf8)
            if column not in (COL_BODY, COL_HEADERS):
                is_text[name] = bool(utf8)
        if "routing_keys" in wanted:
            for i in range(n):
                if rows[i].status != ROW_DAMAGED:
                    key_total += rows[i].m.key_num
                    key_bytes += rows[i].m.keys_size
            if key_bytes > INT32_MAX or key_total >= INT32_MAX:
                raise ValueError(f"the column routing_keys would take {key_bytes} bytes; give fewer terms at a time")
            made["routing_keys"] = (np.empty(n + 1, np.int32), np.empty(key_total + 1, np.int32), np.empty(key_bytes, np.uint8),
                                    np.empty(n, np.uint8))
            lists, offsets, data, valid = made["routing_keys"]
            utf8 = True
            with nogil:
                fill_keys(rows, n, &lists[0], &offsets[0], &data[0] if key_bytes else NULL, &valid[0] if n else NULL, &utf8)
            is_text["routing_keys"] = bool(utf8)
        if "status" in wanted:
            made["status"] = np.empty(n, np.uint8)
            small = made["status"]
            for i in range(n):
                small[i] = rows[i].status
        for name, number in (("delivery_mode", P_DELIVERY_MODE), ("priority", P_PRIORITY), ("timestamp", P_TIMESTAMP)):
            if name not in wanted:
                continue
            values, made_valid = np.zeros(n, np.uint64), np.empty(n, np.uint8)
            seconds, valid = values, made_valid
            for i in range(n):
                valid[i] = rows[i].status == ROW_SOUND and rows[i].s.size[number] >= 0
                if valid[i]:
                    p = rows[i].props + rows[i].s.pos[number]
                    seconds[i] = <uint64_t>get_i64(p) if number == P_TIMESTAMP else p[0]
            made[name] = values if number == P_TIMESTAMP else values.astype(np.uint8), made_valid
        return MessageColumns(n, {name: made[name] for name in columns}, is_text)
    finally:
        free(rows)
        free(bases)
        free(lengths)
        for region in pinned:
            region.unpin()
