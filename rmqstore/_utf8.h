/* Whether bytes are valid UTF-8, which Java reads as they stand (Unicode 15, table 3-7; java.lang.String of JDK 17).

   With SSSE3 by the lookup of Keiser and Lemire ("Validating UTF-8 In Less Than One Instruction Per Byte", 2020): three
   tables, by both halves of a byte and the upper half of the next, give the faults that a pair of bytes may have. */

#ifndef RMQSTORE_UTF8_H
#define RMQSTORE_UTF8_H

#include "_bytes.h"

static inline int rmq_is_utf8_by_byte(const unsigned char *p, int64_t n) {
    int64_t i = 0;
    while (i < n) {
        uint32_t c = p[i];
        if (c < 0x80) {
            i++;
        } else if (c < 0xE0) {
            if (c < 0xC2 || i + 1 >= n || (p[i + 1] & 0xC0) != 0x80) return 0;
            i += 2;
        } else if (c < 0xF0) {
            if (i + 2 >= n || (p[i + 1] & 0xC0) != 0x80 || (p[i + 2] & 0xC0) != 0x80) return 0;
            c = (c & 15) << 12 | (uint32_t)(p[i + 1] & 63) << 6;
            if (c < 0x800 || (c >= 0xD800 && c < 0xE000)) return 0;
            i += 3;
        } else {
            if (c > 0xF4 || i + 3 >= n || (p[i + 1] & 0xC0) != 0x80 || (p[i + 2] & 0xC0) != 0x80 || (p[i + 3] & 0xC0) != 0x80)
                return 0;
            c = (c & 7) << 18 | (uint32_t)(p[i + 1] & 63) << 12;
            if (c < 0x10000 || c > 0x10FFFF) return 0;
            i += 4;
        }
    }
    return 1;
}

#if defined(__SSE2__) && defined(__x86_64__) && !defined(RMQSTORE_PORTABLE)
#include <tmmintrin.h>
#define RMQ_SSSE3 __attribute__((target("ssse3")))

/* Faults of two adjacent bytes; the last bit is no fault by itself: for a third or fourth byte it must be set. */
enum {
    RMQ_SHORT = 1, RMQ_LONG = 2, RMQ_OVERLONG_3 = 4, RMQ_LARGE = 8, RMQ_SURROGATE = 16, RMQ_OVERLONG_2 = 32,
    RMQ_OVERLONG_4 = 64, RMQ_CONTINUED = 128, RMQ_ANY_LOW = RMQ_SHORT | RMQ_LONG | RMQ_CONTINUED
};

RMQ_SSSE3 static inline __m128i rmq_utf8_faults(__m128i before, __m128i v) {
    const char large = (char)(RMQ_ANY_LOW | RMQ_LARGE | RMQ_OVERLONG_4);
    const char lead = (char)(RMQ_LONG | RMQ_OVERLONG_2 | RMQ_CONTINUED);
    const __m128i by_high = _mm_setr_epi8(
        RMQ_LONG, RMQ_LONG, RMQ_LONG, RMQ_LONG, RMQ_LONG, RMQ_LONG, RMQ_LONG, RMQ_LONG,
        (char)RMQ_CONTINUED, (char)RMQ_CONTINUED, (char)RMQ_CONTINUED, (char)RMQ_CONTINUED,
        RMQ_SHORT | RMQ_OVERLONG_2, RMQ_SHORT, RMQ_SHORT | RMQ_OVERLONG_3 | RMQ_SURROGATE,
        RMQ_SHORT | RMQ_LARGE | RMQ_OVERLONG_4);
    const __m128i by_low = _mm_setr_epi8(
        (char)(RMQ_ANY_LOW | RMQ_OVERLONG_2 | RMQ_OVERLONG_3 | RMQ_OVERLONG_4), (char)(RMQ_ANY_LOW | RMQ_OVERLONG_2),
        (char)RMQ_ANY_LOW, (char)RMQ_ANY_LOW, (char)(RMQ_ANY_LOW | RMQ_LARGE), large, large, large, large, large, large,
        large, large, (char)(large | RMQ_SURROGATE), large, large);
    const __m128i by_next = _mm_setr_epi8(
        RMQ_SHORT, RMQ_SHORT, RMQ_SHORT, RMQ_SHORT, RMQ_SHORT, RMQ_SHORT, RMQ_SHORT, RMQ_SHORT,
        (char)(lead | RMQ_OVERLONG_3 | RMQ_OVERLONG_4), (char)(lead | RMQ_OVERLONG_3 | RMQ_LARGE),
        (char)(lead | RMQ_SURROGATE | RMQ_LARGE), (char)(lead | RMQ_SURROGATE | RMQ_LARGE),
        RMQ_SHORT, RMQ_SHORT, RMQ_SHORT, RMQ_SHORT);
    const __m128i half = _mm_set1_epi8(15);
    const __m128i first = _mm_alignr_epi8(v, before, 15);
    const __m128i pair = _mm_and_si128(
        _mm_and_si128(_mm_shuffle_epi8(by_high, _mm_and_si128(_mm_srli_epi16(first, 4), half)),
                      _mm_shuffle_epi8(by_low, _mm_and_si128(first, half))),
        _mm_shuffle_epi8(by_next, _mm_and_si128(_mm_srli_epi16(v, 4), half)));
    /* The upper bit where the byte two or three before begins a character of three or four. */
    const __m128i third = _mm_subs_epu8(_mm_alignr_epi8(v, before, 14), _mm_set1_epi8(0x60));
    const __m128i fourth = _mm_subs_epu8(_mm_alignr_epi8(v, before, 13), _mm_set1_epi8(0x70));
    return _mm_xor_si128(pair, _mm_and_si128(_mm_or_si128(third, fourth), _mm_set1_epi8((char)0x80)));
}

RMQ_SSSE3 static __attribute__((noinline, unused)) int rmq_is_utf8_by_16(const unsigned char *p, int64_t n) {
    __m128i before = _mm_setzero_si128(), faults = _mm_setzero_si128(), v;
    unsigned char last[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v = _mm_loadu_si128((const __m128i *)(p + i));
        faults = _mm_or_si128(faults, rmq_utf8_faults(before, v));
        before = v;
    }
    /* At least one zero follows, which a character that is cut off cannot have. */
    memcpy(last, p + i, (size_t)(n - i));
    faults = _mm_or_si128(faults, rmq_utf8_faults(before, _mm_loadu_si128((const __m128i *)last)));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(faults, _mm_setzero_si128())) == 0xFFFF;
}
#endif

static inline int rmq_is_utf8(const unsigned char *p, int64_t n) {
    if (rmq_is_ascii(p, n)) return 1;
#ifdef RMQ_SSSE3
    if (n > 12 && __builtin_cpu_supports("ssse3")) return rmq_is_utf8_by_16(p, n);
#endif
    return rmq_is_utf8_by_byte(p, n);
}

#endif
