/* Java's String.hashCode (h = 31 * h + unit, in 32 bits) over text of one and of two bytes a unit.

   Owns the arithmetic and no text: what is a unit is decided in _core.pyx.  It never reads outside the bytes that it was
   given.  tests/core/test_core.py compares it with the oracle at all lengths and alignments.

   The powers of 31 need 32 bits, but a pair of units (first * 31 + second <= 8160) needs 13 bits and four units
   (first pair * 961 + second <= 7 849 920) need 23, so eight units take three multiplications of a 64-bit word, and sixteen
   take five of a register of 16 bytes; these are in every x86-64 (SSE2), so nothing is chosen at run time.  Bytes that are
   over are taken with zeros before them, which add nothing. */

#ifndef RMQSTORE_JAVA_HASH_H
#define RMQSTORE_JAVA_HASH_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) && defined(__x86_64__)
#define RMQ_JAVA_HASH_SSE2 1
#include <emmintrin.h>
#endif

#define RMQ_31_4 923521u
#define RMQ_31_8 2487512833u
#define RMQ_31_12 2487512833u * 923521u
#define RMQ_31_16 2487512833u * 2487512833u

static const uint32_t rmq_powers_of_31[16] = {
    1u,         31u,         961u,        29791u,      923521u,     28629151u,   887503681u,  1742810335u,
    2487512833u, 4098453791u, 2498015937u, 129082719u,  4001564289u, 3789408671u, 1507551809u, 3784433119u};

static inline uint64_t rmq_java_hash_load(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    w = __builtin_bswap64(w);
#endif
    return w;
}

#ifdef RMQ_JAVA_HASH_SSE2
/* From here + r on: as many zeros as leave the last r of sixteen bytes. */
static const uint8_t rmq_java_hash_masks[32] = {0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,
                                                0,    0,    0,    0,    0,    0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                                0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};

static inline uint32_t rmq_java_hash_register(__m128i x) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i by_31 = _mm_set1_epi32(31 | 1 << 16), by_961 = _mm_set1_epi32(961 | 1 << 16);
    __m128i low = _mm_madd_epi16(_mm_unpacklo_epi8(x, zero), by_31);
    __m128i high = _mm_madd_epi16(_mm_unpackhi_epi8(x, zero), by_31);
    __m128i fours = _mm_madd_epi16(_mm_packs_epi32(low, high), by_961);
    __m128i even = _mm_mul_epu32(fours, _mm_set_epi32(0, (int)RMQ_31_4, 0, (int)(RMQ_31_12)));
    __m128i odd = _mm_mul_epu32(_mm_srli_epi64(fours, 32), _mm_set_epi32(0, 1, 0, (int)RMQ_31_8));
    even = _mm_add_epi32(even, odd);
    return (uint32_t)_mm_cvtsi128_si32(_mm_add_epi32(even, _mm_unpackhi_epi64(even, even)));
}
#else
/* The hash of eight units, the first in the lowest byte. */
static inline uint32_t rmq_java_hash_word(uint64_t w) {
    w = (w & 0x00FF00FF00FF00FFu) * 31u + (w >> 8 & 0x00FF00FF00FF00FFu);
    w = (w & 0x0000FFFF0000FFFFu) * 961u + (w >> 16 & 0x0000FFFF0000FFFFu);
    return (uint32_t)w * RMQ_31_4 + (uint32_t)(w >> 32);
}
#endif

/* The hash of n units of one byte after h; *beyond is 0 if all of them are ASCII, and only then. */
static inline uint32_t rmq_java_hash_any(uint32_t h, const uint8_t *p, int64_t n, uint64_t *beyond) {
    uint64_t all = 0, w;
#ifdef RMQ_JAVA_HASH_SSE2
    if (n >= 16) {
        __m128i x, every = _mm_setzero_si128();
        const int64_t over = n & 15;
        const uint8_t *end = p + (n - over);
        do {
            x = _mm_loadu_si128((const __m128i *)p);
            every = _mm_or_si128(every, x);
            h = h * (RMQ_31_16) + rmq_java_hash_register(x);
            p += 16;
        } while (p < end);
        if (over) {
            x = _mm_loadu_si128((const __m128i *)(p + over - 16));
            every = _mm_or_si128(every, x);
            x = _mm_and_si128(x, _mm_loadu_si128((const __m128i *)(rmq_java_hash_masks + over)));
            h = h * rmq_powers_of_31[over] + rmq_java_hash_register(x);
        }
        *beyond = (uint64_t)_mm_movemask_epi8(every);
        return h;
    }
    if (n >= 8) {
        const uint64_t first = rmq_java_hash_load(p), last = rmq_java_hash_load(p + n - 8);
        *beyond = (first | last) & 0x8080808080808080u;
        w = first << 8 << 8 * (15 - n);
        return h * rmq_powers_of_31[n] + rmq_java_hash_register(_mm_set_epi64x((long long)last, (long long)w));
    }
#else
    if (n >= 8) {
        const int64_t over = n & 7;
        const uint8_t *end = p + (n - over);
        do {
            w = rmq_java_hash_load(p);
            all |= w;
            h = h * RMQ_31_8 + rmq_java_hash_word(w);
            p += 8;
        } while (p < end);
        if (over) {
            w = rmq_java_hash_load(p + over - 8);
            all |= w;
            h = h * rmq_powers_of_31[over] + rmq_java_hash_word(w >> 8 * (8 - over) << 8 * (8 - over));
        }
        n = 0;
    }
#endif
    for (; n > 0; p++, n--) {
        all |= *p;
        h = h * 31u + *p;
    }
    *beyond = all & 0x8080808080808080u;
    return h;
}

/* The hash of n Latin-1 units after h. */
static inline uint32_t rmq_java_hash_8(uint32_t h, const uint8_t *p, int64_t n) {
    uint64_t beyond;
    return rmq_java_hash_any(h, p, n, &beyond);
}

/* Whether all n bytes are ASCII; only then *h becomes the hash after them. */
static inline int rmq_java_hash_ascii(uint32_t *h, const uint8_t *p, int64_t n) {
    uint64_t beyond;
    const uint32_t after = rmq_java_hash_any(*h, p, n, &beyond);
    if (beyond) return 0;
    *h = after;
    return 1;
}

/* The hash after h of n units, at most RMQ_JAVA_HASH_JOINED, whose own hash is `after`. */
#define RMQ_JAVA_HASH_JOINED 15
static inline uint32_t rmq_java_hash_joined(uint32_t h, uint32_t after, int64_t n) {
    return h * rmq_powers_of_31[n] + after;
}

/* The hash of n UTF-16 units after h. */
static inline uint32_t rmq_java_hash_16(uint32_t h, const uint16_t *p, int64_t n) {
    for (; n >= 4; p += 4, n -= 4) h = h * RMQ_31_4 + (p[0] * 29791u + p[1] * 961u + p[2] * 31u + p[3]);
    for (; n > 0; p++, n--) h = h * 31u + *p;
    return h;
}

#endif
