/* Bytes as every compiled module takes them: byte order, order of stores, copies and comparisons of short texts.

   Owns no format.  Nothing here reads outside the bytes that it was given, but for what a function's own words allow.
   */

#ifndef RMQSTORE_BYTES_H
#define RMQSTORE_BYTES_H

#include <assert.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define rmq_swap16(v) (v)
#define rmq_swap32(v) (v)
#define rmq_swap64(v) (v)
#define RMQ_LITTLE_ENDIAN 0
#else
#define RMQ_LITTLE_ENDIAN 1
#define rmq_swap16(v) __builtin_bswap16(v)
#define rmq_swap32(v) __builtin_bswap32(v)
#define rmq_swap64(v) __builtin_bswap64(v)
#endif

/* memcpy of a constant size is one load or store, and it is right at every alignment. */
static inline int16_t rmq_get_i16(const unsigned char *p) { uint16_t v; memcpy(&v, p, 2); return (int16_t)rmq_swap16(v); }
static inline int32_t rmq_get_i32(const unsigned char *p) { uint32_t v; memcpy(&v, p, 4); return (int32_t)rmq_swap32(v); }
static inline int64_t rmq_get_i64(const unsigned char *p) { uint64_t v; memcpy(&v, p, 8); return (int64_t)rmq_swap64(v); }
static inline void rmq_put_i16(unsigned char *p, int16_t x) { uint16_t v = rmq_swap16((uint16_t)x); memcpy(p, &v, 2); }
static inline void rmq_put_i32(unsigned char *p, int32_t x) { uint32_t v = rmq_swap32((uint32_t)x); memcpy(p, &v, 4); }
static inline void rmq_put_i64(unsigned char *p, int64_t x) { uint64_t v = rmq_swap64((uint64_t)x); memcpy(p, &v, 8); }

/* Whether a sanitizer watches this build (RMQSTORE_SANITIZE in setup.py). */
#if defined(__SANITIZE_ADDRESS__)
#define RMQ_WATCHES_ADDRESSES 1
#elif defined(__SANITIZE_THREAD__)
#define RMQ_WATCHES_THREADS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RMQ_WATCHES_ADDRESSES 1
#elif __has_feature(thread_sanitizer)
#define RMQ_WATCHES_THREADS 1
#endif
#endif
#ifndef RMQ_WATCHES_ADDRESSES
#define RMQ_WATCHES_ADDRESSES 0
#endif
#ifndef RMQ_WATCHES_THREADS
#define RMQ_WATCHES_THREADS 0
#endif

/* Numbers that are read while others write them, at a multiple of their size: header and slots of an index file.
   `publish` makes what was written before it visible to whoever sees its number by `acquire`; `load` and `store`
   promise nothing but whole numbers.  On x86 all of them are plain moves. */
typedef uint32_t __attribute__((may_alias)) rmq_word32;
typedef uint64_t __attribute__((may_alias)) rmq_word64;
static inline int32_t rmq_load_i32(const unsigned char *p) {
    return (int32_t)rmq_swap32(__atomic_load_n((const rmq_word32 *)p, __ATOMIC_RELAXED));
}
static inline int64_t rmq_load_i64(const unsigned char *p) {
    return (int64_t)rmq_swap64(__atomic_load_n((const rmq_word64 *)p, __ATOMIC_RELAXED));
}
static inline void rmq_store_i32(unsigned char *p, int32_t x) {
    __atomic_store_n((rmq_word32 *)p, rmq_swap32((uint32_t)x), __ATOMIC_RELAXED);
}
static inline void rmq_store_i64(unsigned char *p, int64_t x) {
    __atomic_store_n((rmq_word64 *)p, rmq_swap64((uint64_t)x), __ATOMIC_RELAXED);
}
static inline int32_t rmq_acquire_i32(const unsigned char *p) {
    return (int32_t)rmq_swap32(__atomic_load_n((const rmq_word32 *)p, __ATOMIC_ACQUIRE));
}
static inline void rmq_publish_i32(unsigned char *p, int32_t x) {
    __atomic_store_n((rmq_word32 *)p, rmq_swap32((uint32_t)x), __ATOMIC_RELEASE);
}
static inline void rmq_publish_i64(unsigned char *p, int64_t x) {
    __atomic_store_n((rmq_word64 *)p, rmq_swap64((uint64_t)x), __ATOMIC_RELEASE);
}

/* The same for numbers that lie anywhere, as those of records do and of units at a place that a caller gives.  C has
   no atomic access at an odd address, and aarch64 no instruction for one: it is a move and a fence.  ThreadSanitizer
   knows no fences; it gets the order from the bytes, one by one. */
#if RMQ_WATCHES_THREADS
static inline void rmq_load_bytes(void *to, const unsigned char *p, int n) {
    for (int i = 0; i < n; i++) ((unsigned char *)to)[i] = __atomic_load_n(p + i, __ATOMIC_RELAXED);
}
static inline void rmq_acquire_bytes(void *to, const unsigned char *p, int n) {
    for (int i = 0; i < n; i++) ((unsigned char *)to)[i] = __atomic_load_n(p + i, __ATOMIC_ACQUIRE);
}
static inline void rmq_publish_bytes(unsigned char *p, const void *from, int n) {
    for (int i = 0; i < n; i++) __atomic_store_n(p + i, ((const unsigned char *)from)[i], __ATOMIC_RELEASE);
}
#else
static inline void rmq_load_bytes(void *to, const unsigned char *p, int n) { memcpy(to, p, (size_t)n); }
static inline void rmq_acquire_bytes(void *to, const unsigned char *p, int n) {
    memcpy(to, p, (size_t)n);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
static inline void rmq_publish_bytes(unsigned char *p, const void *from, int n) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(p, from, (size_t)n);
}
#endif
static inline int32_t rmq_load_i32_at(const unsigned char *p) {
    uint32_t v;
    rmq_load_bytes(&v, p, 4);
    return (int32_t)rmq_swap32(v);
}
static inline int16_t rmq_acquire_i16_at(const unsigned char *p) {
    uint16_t v;
    rmq_acquire_bytes(&v, p, 2);
    return (int16_t)rmq_swap16(v);
}
static inline int32_t rmq_acquire_i32_at(const unsigned char *p) {
    uint32_t v;
    rmq_acquire_bytes(&v, p, 4);
    return (int32_t)rmq_swap32(v);
}
static inline void rmq_publish_i16_at(unsigned char *p, int16_t x) {
    uint16_t v = rmq_swap16((uint16_t)x);
    rmq_publish_bytes(p, &v, 2);
}
static inline void rmq_publish_i32_at(unsigned char *p, int32_t x) {
    uint32_t v = rmq_swap32((uint32_t)x);
    rmq_publish_bytes(p, &v, 4);
}

/* Of the state of a region: closed for new uses; the bits below count its pins. */
#define RMQ_CLOSED ((int64_t)1 << 62)

/* Pins change only while the GIL is held, where there is one; then a plain addition is enough, and much cheaper. */
#ifdef Py_GIL_DISABLED
#define RMQ_HAS_GIL 0
static inline int64_t rmq_add_pins(int64_t *p, int64_t n) { return __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL); }
#else
#define RMQ_HAS_GIL 1
static inline int64_t rmq_add_pins(int64_t *p, int64_t n) { return *p += n; }
#endif
/* Ends what `rmq_atomic_or` began. */
static inline void rmq_release(int64_t *p) { __atomic_store_n(p, 0, __ATOMIC_RELEASE); }
static inline int64_t rmq_atomic_or(int64_t *p, int64_t n) { return __atomic_fetch_or(p, n, __ATOMIC_ACQ_REL); }
static inline int64_t rmq_atomic_load(int64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline unsigned char *rmq_atomic_take(unsigned char **p) { return __atomic_exchange_n(p, (unsigned char *)0, __ATOMIC_ACQ_REL); }

/* Of offsets that a caller or a file gives: what does not fit wraps, and is then refused by the offset itself. */
static inline int64_t rmq_sum(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static inline int64_t rmq_difference(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

/* The empty statement is an effect: GCC takes a function that only prefetches for one without, and drops its calls. */
static inline void rmq_prefetch(const void *p) { __builtin_prefetch(p, 1, 3); __asm__ volatile(""); }
static inline void rmq_assert(int ok) { assert(ok); (void)ok; }

/* a mod d for 32-bit a and d by two multiplications (D. Lemire et al., "Faster remainder by direct computation"). */
static inline uint64_t rmq_mod_magic(uint32_t d) { return UINT64_MAX / d + 1; }
static inline uint32_t rmq_fastmod(uint32_t a, uint64_t magic, uint32_t d) {
    uint64_t low = magic * a;
    return (uint32_t)(((__uint128_t)low * d) >> 64);
}

/* How many bytes may be read where n are wanted and there is room for more.  Reads in steps of 16 go beyond the n and
   drop what is there, where another thread may be writing the next record; ThreadSanitizer takes any such read for a
   race. */
#define RMQ_READABLE(n, room) (RMQ_WATCHES_THREADS ? (int64_t)(n) : (room))

/* Copies n bytes; where the source has 16 more bytes of room in steps of 16, of which the last goes beyond the end.
   The target always has that room. */
static inline void rmq_copy(unsigned char *to, const unsigned char *from, int64_t n, int64_t room) {
    room = RMQ_READABLE(n, room);
#if defined(__SSE2__)
    if (n <= 128 && n + 16 <= room) {
        int64_t i = 0;
        do {
            _mm_storeu_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
            i += 16;
        } while (i < n);
        return;
    }
#endif
    memcpy(to, from, (size_t)n);
}

/* Copies n bytes, and no other is read or written.  Of a short text two words that overlap cover it without a call. */
static inline void rmq_copy_exactly(unsigned char *to, const unsigned char *from, int64_t n) {
    uint64_t first, last;
    if (n < 8 || n > 16) {
        memcpy(to, from, (size_t)n);
        return;
    }
    memcpy(&first, from, 8);
    memcpy(&last, from + n - 8, 8);
    memcpy(to, &first, 8);
    memcpy(to + n - 8, &last, 8);
}

/* Whether n bytes are equal.  Keys and topics are short: two words that overlap cover them without a call. */
static inline int rmq_same(const unsigned char *p, const unsigned char *q, int64_t n) {
    uint64_t a, b, c, d;
    if (n >= 4 && n < 8) {
        uint32_t first, other, last, other_last;
        memcpy(&first, p, 4);
        memcpy(&other, q, 4);
        memcpy(&last, p + n - 4, 4);
        memcpy(&other_last, q + n - 4, 4);
        return ((first ^ other) | (last ^ other_last)) == 0;
    }
    if (n < 8 || n > 16) return memcmp(p, q, (size_t)n) == 0;
    memcpy(&a, p, 8);
    memcpy(&b, q, 8);
    memcpy(&c, p + n - 8, 8);
    memcpy(&d, q + n - 8, 8);
    return ((a ^ b) | (c ^ d)) == 0;
}

static inline int rmq_is_ascii(const unsigned char *p, int64_t n) {
    uint64_t word, any = 0;
    int64_t i;
    if (n >= 8) {
        /* The last word overlaps the one before it. */
        for (i = 0; i < n - 8; i += 8) { memcpy(&word, p + i, 8); any |= word; }
        memcpy(&word, p + n - 8, 8);
        any |= word;
    } else
        for (i = 0; i < n; i++) any |= (uint64_t)p[i] << 56;
    return (any & 0x8080808080808080u) == 0;
}

static const char rmq_digits[] = "0123456789ABCDEF";

#if defined(__SSE2__)
static inline void rmq_put_hex_16(unsigned char *to, __m128i v) {
    __m128i low = _mm_set1_epi8(15), nine = _mm_set1_epi8(9);
    __m128i a = _mm_and_si128(_mm_srli_epi16(v, 4), low), b = _mm_and_si128(v, low), x, y;
    x = _mm_unpacklo_epi8(a, b);
    y = _mm_unpackhi_epi8(a, b);
    x = _mm_add_epi8(_mm_add_epi8(x, _mm_set1_epi8('0')), _mm_and_si128(_mm_cmpgt_epi8(x, nine), _mm_set1_epi8(7)));
    y = _mm_add_epi8(_mm_add_epi8(y, _mm_set1_epi8('0')), _mm_and_si128(_mm_cmpgt_epi8(y, nine), _mm_set1_epi8(7)));
    _mm_storeu_si128((__m128i *)to, x);
    _mm_storeu_si128((__m128i *)(to + 16), y);
}
#endif

/* Upper-case hexadecimal digits of n bytes, 2 * n of them. */
static inline void rmq_put_hex(unsigned char *to, const unsigned char *from, int n) {
    int i = 0;
#if defined(__SSE2__)
    for (; i + 16 <= n; i += 16) rmq_put_hex_16(to + 2 * i, _mm_loadu_si128((const __m128i *)(from + i)));
#endif
    for (; i < n; i++) { to[2 * i] = rmq_digits[from[i] >> 4]; to[2 * i + 1] = rmq_digits[from[i] & 15]; }
}

/* Those of 8 bytes and of 8 more from elsewhere; put together in memory they would have to be waited for. */
static inline void rmq_put_hex_8_8(unsigned char *to, const unsigned char *first, const unsigned char *second) {
#if defined(__SSE2__)
    rmq_put_hex_16(to, _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)first), _mm_loadl_epi64((const __m128i *)second)));
#else
    rmq_put_hex(to, first, 8);
    rmq_put_hex(to + 16, second, 8);
#endif
}

/* Those of 8 bytes. */
static inline void rmq_put_hex_8(unsigned char *to, const unsigned char *from) {
#if defined(__SSE2__)
    __m128i low = _mm_set1_epi8(15), v = _mm_loadl_epi64((const __m128i *)from);
    v = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(v, 4), low), _mm_and_si128(v, low));
    v = _mm_add_epi8(_mm_add_epi8(v, _mm_set1_epi8('0')),
                     _mm_and_si128(_mm_cmpgt_epi8(v, _mm_set1_epi8(9)), _mm_set1_epi8(7)));
    _mm_storeu_si128((__m128i *)to, v);
#else
    rmq_put_hex(to, from, 8);
#endif
}

/* Copies n bytes and says whether all of them are ASCII. */
static inline int rmq_copy_ascii(unsigned char *to, const unsigned char *from, int64_t n, int64_t room) {
    room = RMQ_READABLE(n, room);
#if defined(__SSE2__)
    if (n <= 128 && n + 16 <= room) {
        int64_t i = 0;
        int high = 0;
        for (; i + 16 <= n; i += 16) {
            __m128i v = _mm_loadu_si128((const __m128i *)(from + i));
            _mm_storeu_si128((__m128i *)(to + i), v);
            high |= _mm_movemask_epi8(v);
        }
        if (i < n) {
            __m128i v = _mm_loadu_si128((const __m128i *)(from + i));
            _mm_storeu_si128((__m128i *)(to + i), v);
            high |= _mm_movemask_epi8(v) & ((1 << (n - i)) - 1);
        }
        return high == 0;
    }
#endif
    memcpy(to, from, (size_t)n);
    return rmq_is_ascii(to, n);
}

/* A value of an Arrow view column (Arrow's columnar format, "Variable-size Binary View Layout"): its length, and the
   bytes themselves where they are RMQ_VIEW_INLINE or fewer, else the first four, the number of a buffer and a
   position in it. */
#define RMQ_VIEW_INLINE 12
static inline void rmq_put_view(unsigned char *to, const unsigned char *p, int64_t n, int64_t room, int32_t buffer,
                                int64_t pos) {
#if RMQ_LITTLE_ENDIAN
    /* All in registers: what was stored in smaller pieces would have to be waited for. */
    uint64_t first, rest = 0;
    uint32_t more;
    room = RMQ_READABLE(n, room);
    if (n > RMQ_VIEW_INLINE) {
        memcpy(&more, p, 4);
        first = (uint64_t)more << 32;
        rest = (uint64_t)(uint32_t)buffer | (uint64_t)pos << 32;
    } else if (room >= RMQ_VIEW_INLINE) {
        memcpy(&first, p, 8);
        memcpy(&more, p + 8, 4);
        if (n <= 8) {
            first = n ? first & (UINT64_MAX >> (64 - 8 * n)) : 0;
            more = 0;
        } else {
            more &= UINT32_MAX >> (8 * (RMQ_VIEW_INLINE - n));
        }
        rest = first >> 32 | (uint64_t)more << 32;
        first <<= 32;
    } else {
        unsigned char text[16] = {0};
        memcpy(text + 4, p, (size_t)n);
        memcpy(&first, text, 8);
        memcpy(&rest, text + 8, 8);
    }
    first |= (uint32_t)n;
    memcpy(to, &first, 8);
    memcpy(to + 8, &rest, 8);
#else
    uint32_t words[4] = {(uint32_t)n, 0, (uint32_t)buffer, (uint32_t)pos};
    if (n <= RMQ_VIEW_INLINE) memset(words + 1, 0, RMQ_VIEW_INLINE);
    memcpy(words + 1, p, (size_t)(n <= RMQ_VIEW_INLINE ? n : 4));
    memcpy(to, words, 16);
#endif
}

/* The number of bytes before the first `wanted` one, or n; `room` bytes may be read. */
static inline int64_t rmq_before(const unsigned char *p, int wanted, int64_t n, int64_t room) {
    const unsigned char *found;
    room = RMQ_READABLE(n, room);
#if defined(__SSE2__)
    if (n <= 64 && n + 16 <= room) {
        int64_t i;
        for (i = 0; i < n; i += 16) {
            int bits = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(p + i)), _mm_set1_epi8((char)wanted)));
            if (bits) {
                i += __builtin_ctz((unsigned)bits);
                break;
            }
        }
        return i < n ? i : n;
    }
#endif
    found = n > 0 ? (const unsigned char *)memchr(p, wanted, (size_t)n) : NULL;
    return found != NULL ? found - p : n;
}

#endif
