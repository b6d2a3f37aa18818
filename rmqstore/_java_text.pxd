# Texts as Java reads them: `String.hashCode`, RocketMQ's index hash, and UTF-8 with what Java makes of malformed bytes.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint8_t
from libc.string cimport memcmp, memcpy

from rmqstore._bytes cimport same_bytes_at
from rmqstore._python cimport PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_KIND


cdef extern from "_java_hash.h":
    uint32_t hash_units8 "rmq_java_hash_8"(uint32_t h, const uint8_t* p, int64_t n) noexcept nogil
    uint32_t hash_units16 "rmq_java_hash_16"(uint32_t h, const uint16_t* p, int64_t n) noexcept nogil
    bint hash_ascii "rmq_java_hash_ascii"(uint32_t* h, const uint8_t* p, int64_t n) noexcept nogil
    uint32_t hash_joined "rmq_java_hash_joined"(uint32_t h, uint32_t after, int64_t n) noexcept nogil
    enum: JOINED_UNITS "RMQ_JAVA_HASH_JOINED"


cdef extern from "_utf8.h":
    bint is_utf8 "rmq_is_utf8"(const unsigned char* p, int64_t n) noexcept nogil


cdef inline uint32_t hash_units32(uint32_t h, const uint32_t* p, int64_t n) noexcept nogil:
    # A character outside the BMP contributes its two surrogates, the high one first.
    cdef int64_t i
    cdef uint32_t c
    for i in range(n):
        c = p[i]
        if c >= 0x10000:
            c -= 0x10000
            h = h * 31u + (0xD800u + (c >> 10))
            h = h * 31u + (0xDC00u + (c & 0x3FFu))
        else:
            h = h * 31u + c
    return h


cdef inline uint32_t hash_str(uint32_t h, object text):
    return hash_text(h, <PyObject*>text)


cdef inline uint32_t hash_text(uint32_t h, PyObject* text):
    cdef int kind = PyUnicode_KIND(text)
    cdef void* data = PyUnicode_DATA(text)
    cdef Py_ssize_t n = PyUnicode_GET_LENGTH(text)
    if kind == 1:
        return hash_units8(h, <const uint8_t*>data, n)
    if kind == 2:
        return hash_units16(h, <const uint16_t*>data, n)
    return hash_units32(h, <const uint32_t*>data, n)


cdef inline uint32_t hash_utf8(uint32_t h, const uint8_t* p, int64_t n) noexcept nogil:
    # The hash of the UTF-16 text that Java 17's `new String(bytes, UTF_8)` makes of these bytes: every malformed part
    # counts as U+FFFD, and the lengths of malformed parts are the JDK's (java.lang.String, sun.nio.cs.UTF_8).
    cdef int64_t i = 0
    cdef uint32_t b1, b2, b3, b4, c
    # Nearly all keys, tags and topics are ASCII, whose hash takes no decoding.
    if hash_ascii(&h, p, n):
        return h
    while i < n:
        b1 = p[i]
        if b1 < 0x80:
            h = h * 31u + b1
            i += 1
        elif 0xC2 <= b1 <= 0xDF:
            if i + 1 < n and (p[i + 1] & 0xC0) == 0x80:
                h = h * 31u + (((b1 & 0x1F) << 6) | (p[i + 1] & 0x3F))
                i += 2
            else:
                h = h * 31u + 0xFFFDu
                i += 1
        elif 0xE0 <= b1 <= 0xEF:
            if i + 2 < n:
                b2, b3 = p[i + 1], p[i + 2]
                if (b1 == 0xE0 and (b2 & 0xE0) == 0x80) or (b2 & 0xC0) != 0x80:
                    h = h * 31u + 0xFFFDu
                    i += 1
                elif (b3 & 0xC0) != 0x80:
                    h = h * 31u + 0xFFFDu
                    i += 2
                else:
                    c = ((b1 & 0x0F) << 12) | ((b2 & 0x3F) << 6) | (b3 & 0x3F)
                    h = h * 31u + (0xFFFDu if 0xD800 <= c <= 0xDFFF else c)
                    i += 3
            else:
                h = h * 31u + 0xFFFDu
                if i + 1 < n and ((b1 == 0xE0 and (p[i + 1] & 0xE0) == 0x80) or (p[i + 1] & 0xC0) != 0x80):
                    i += 1
                else:
                    return h
        elif 0xF0 <= b1 <= 0xF7:
            if i + 3 < n:
                b2, b3, b4 = p[i + 1], p[i + 2], p[i + 3]
                c = ((b1 & 0x07) << 18) | ((b2 & 0x3F) << 12) | ((b3 & 0x3F) << 6) | (b4 & 0x3F)
                if ((b2 & 0xC0) != 0x80 or (b3 & 0xC0) != 0x80 or (b4 & 0xC0) != 0x80 or c < 0x10000 or c > 0x10FFFF):
                    h = h * 31u + 0xFFFDu
                    if (b1 > 0xF4 or (b1 == 0xF0 and (b2 < 0x90 or b2 > 0xBF)) or (b1 == 0xF4 and (b2 & 0xF0) != 0x80)
                            or (b2 & 0xC0) != 0x80):
                        i += 1
                    elif (b3 & 0xC0) != 0x80:
                        i += 2
                    else:
                        i += 3
                else:
                    c -= 0x10000
                    h = h * 31u + (0xD800u + (c >> 10))
                    h = h * 31u + (0xDC00u + (c & 0x3FFu))
                    i += 4
            else:
                h = h * 31u + 0xFFFDu
                if b1 > 0xF4:
                    i += 1
                elif i + 1 < n and ((b1 == 0xF0 and (p[i + 1] < 0x90 or p[i + 1] > 0xBF))
                                    or (b1 == 0xF4 and (p[i + 1] & 0xF0) != 0x80) or (p[i + 1] & 0xC0) != 0x80):
                    i += 1
                elif i + 2 < n and (p[i + 2] & 0xC0) != 0x80:
                    i += 2
                else:
                    return h
        else:
            h = h * 31u + 0xFFFDu
            i += 1
    return h


cdef inline int32_t index_hash(uint32_t h) noexcept nogil:
    # abs() as Java has it; -2**31 stays negative there, and the index file maps it to 0 (RocketMQ IndexFile).
    cdef int32_t signed_hash = <int32_t>h
    if signed_hash >= 0:
        return signed_hash
    if h == 0x80000000u:
        return 0
    return -signed_hash


cdef inline int64_t put_java_utf8(unsigned char* to, const unsigned char* p, int64_t n) noexcept nogil:
    # Valid UTF-8 of the text that Java makes of these bytes, at most 3 * n of them; the steps are those of `hash_utf8`.
    cdef int64_t i = 0, used = 0, step
    cdef uint32_t b1, b2, b3, b4, c
    cdef bint good, ends
    while i < n:
        b1 = p[i]
        good, ends, step = True, False, 1
        if b1 < 0x80:
            pass
        elif 0xC2 <= b1 <= 0xDF:
            if i + 1 < n and (p[i + 1] & 0xC0) == 0x80:
                step = 2
            else:
                good = False
        elif 0xE0 <= b1 <= 0xEF:
            if i + 2 < n:
                b2, b3 = p[i + 1], p[i + 2]
                if (b1 == 0xE0 and (b2 & 0xE0) == 0x80) or (b2 & 0xC0) != 0x80:
                    good = False
                elif (b3 & 0xC0) != 0x80:
                    good, step = False, 2
                else:
                    c = ((b1 & 0x0F) << 12) | ((b2 & 0x3F) << 6) | (b3 & 0x3F)
                    good, step = not 0xD800 <= c <= 0xDFFF, 3
            else:
                good = False
                ends = not (i + 1 < n and ((b1 == 0xE0 and (p[i + 1] & 0xE0) == 0x80) or (p[i + 1] & 0xC0) != 0x80))
        elif 0xF0 <= b1 <= 0xF7:
            if i + 3 < n:
                b2, b3, b4 = p[i + 1], p[i + 2], p[i + 3]
                c = ((b1 & 0x07) << 18) | ((b2 & 0x3F) << 12) | ((b3 & 0x3F) << 6) | (b4 & 0x3F)
                if ((b2 & 0xC0) != 0x80 or (b3 & 0xC0) != 0x80 or (b4 & 0xC0) != 0x80 or c < 0x10000 or c > 0x10FFFF):
                    good = False
                    if (b1 > 0xF4 or (b1 == 0xF0 and (b2 < 0x90 or b2 > 0xBF)) or (b1 == 0xF4 and (b2 & 0xF0) != 0x80)
                            or (b2 & 0xC0) != 0x80):
                        step = 1
                    elif (b3 & 0xC0) != 0x80:
                        step = 2
                    else:
                        step = 3
                else:
                    step = 4
            else:
                good = False
                if b1 > 0xF4:
                    step = 1
                elif i + 1 < n and ((b1 == 0xF0 and (p[i + 1] < 0x90 or p[i + 1] > 0xBF))
                                    or (b1 == 0xF4 and (p[i + 1] & 0xF0) != 0x80) or (p[i + 1] & 0xC0) != 0x80):
                    step = 1
                elif i + 2 < n and (p[i + 2] & 0xC0) != 0x80:
                    step = 2
                else:
                    ends = True
        else:
            good = False
        if good:
            memcpy(to + used, p + i, step)
            used += step
        else:
            to[used] = 0xEF
            to[used + 1] = 0xBF
            to[used + 2] = 0xBD
            used += 3
        if ends:
            break
        i += step
    return used


cdef inline bint same_text(unsigned char* scratch, const unsigned char* p, int64_t n, const unsigned char* wanted,
                           int64_t size, bint valid=False) noexcept nogil:
    # Whether Java reads `wanted`, which is valid UTF-8, at p.  `valid` says that UTF-8 is there, if that is known.
    if n == size and same_bytes_at(p, wanted, n):
        return True
    return not valid and not is_utf8(p, n) and put_java_utf8(scratch, p, n) == size and memcmp(scratch, wanted, size) == 0
