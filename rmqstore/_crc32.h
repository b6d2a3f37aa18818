/* CRC-32 (IEEE 802.3, reflected: zlib's) over a pointer and a length, in the fastest form that the machine has.

   Owns the implementations, the constants that they need and the choice among them at run time.  It never reads outside
   the bytes that it was given, allocates nothing and keeps no pointer.  Every implementation gives the same value for the
   same bytes; tests/core/test_crc.py compares all that a machine has with zlib.

   The names of the implementations, from the slowest to the fastest of a machine:
     table      slicing-by-16, portable C
     pclmul     x86-64 with PCLMULQDQ and SSE4.1, four registers of 16 bytes
     vpclmul    x86-64 with VPCLMULQDQ and AVX2, four registers of 32 bytes
     crc        aarch64 with the CRC instructions

   Inside, `crc` is the inverted register of the algorithm, as between the two inversions of the definition.

   Folding follows V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel,
   2009).  A register holds a polynomial over GF(2) with the first bit as its highest term; carry-less multiplication of
   two such registers gives the product times x, so the constant that moves 64 bits by d places is x^(d-1) mod G.  G is
   x^32+x^26+x^23+x^22+x^16+x^12+x^11+x^10+x^8+x^7+x^5+x^4+x^2+x+1.  tests/core/test_crc.py derives every
   constant again. */

#ifndef RMQSTORE_CRC32_H
#define RMQSTORE_CRC32_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* RMQSTORE_PORTABLE: the build of `make test-portable`, see setup.py. */
#if defined(RMQSTORE_PORTABLE)
#elif defined(__x86_64__) && defined(__GNUC__)
#define RMQ_CRC32_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__) && (defined(__linux__) || defined(__APPLE__))
#define RMQ_CRC32_ARM 1
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

typedef uint32_t (*rmq_crc32_function)(uint32_t crc, const uint8_t *p, size_t n);

static uint32_t rmq_crc32_tables[16][256];

static inline uint32_t rmq_crc32_le32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}

static uint32_t rmq_crc32_table(uint32_t crc, const uint8_t *p, size_t n) {
    const uint32_t(*t)[256] = (const uint32_t(*)[256])rmq_crc32_tables;
    for (; n >= 16; p += 16, n -= 16) {
        uint32_t a = rmq_crc32_le32(p) ^ crc, b = rmq_crc32_le32(p + 4);
        uint32_t c = rmq_crc32_le32(p + 8), d = rmq_crc32_le32(p + 12);
        crc = t[15][a & 0xFF] ^ t[14][a >> 8 & 0xFF] ^ t[13][a >> 16 & 0xFF] ^ t[12][a >> 24] ^
              t[11][b & 0xFF] ^ t[10][b >> 8 & 0xFF] ^ t[9][b >> 16 & 0xFF] ^ t[8][b >> 24] ^
              t[7][c & 0xFF] ^ t[6][c >> 8 & 0xFF] ^ t[5][c >> 16 & 0xFF] ^ t[4][c >> 24] ^
              t[3][d & 0xFF] ^ t[2][d >> 8 & 0xFF] ^ t[1][d >> 16 & 0xFF] ^ t[0][d >> 24];
    }
    for (; n > 0; p++, n--) crc = crc >> 8 ^ t[0][(crc ^ *p) & 0xFF];
    return crc;
}

static void rmq_crc32_fill_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0u);
        rmq_crc32_tables[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 16; k++) {
            uint32_t c = rmq_crc32_tables[k - 1][i];
            rmq_crc32_tables[k][i] = c >> 8 ^ rmq_crc32_tables[0][c & 0xFF];
        }
}

#ifdef RMQ_CRC32_X86

#define RMQ_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define RMQ_VPCLMUL __attribute__((target("vpclmulqdq,avx2,pclmul,sse4.1")))

/* x^(d+63) and x^(d-1) mod G: what moves the first and the second 64 bits of a register by d bits. */
#define RMQ_FOLD_128 0x65673b4600000000, 0x9ba54c6f00000000
#define RMQ_FOLD_256 0x9570d49500000000, 0x01b5fd1d00000000
#define RMQ_FOLD_512 0x653d982200000000, 0xcad38e8f00000000
#define RMQ_FOLD_1024 0x7d657a1000000000, 0x7406fa9500000000
#define RMQ_X95 0xccaa009e                 /* x^95 mod G */
#define RMQ_QUOTIENT 0xb4e5b025f7011641    /* x^96 / G without its last bit, which no quotient of 64 bits needs */
#define RMQ_POLYNOMIAL 0x1db710641         /* G */

/* 16 bytes from (table + 16 - r) move a register up by r bytes, from (table + 16 + r) down; zeros come in. */
static const uint8_t rmq_crc32_moves[48] = {
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
    0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};

RMQ_PCLMUL static inline __m128i rmq_crc32_load(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

RMQ_PCLMUL static inline __m128i rmq_crc32_constants(uint64_t first, uint64_t second) {
    return _mm_set_epi64x((long long)second, (long long)first);
}

RMQ_PCLMUL static inline __m128i rmq_crc32_fold(__m128i x, __m128i k) {
    return _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11));
}

/* t holds 96 bits: the remainder by G, by Barrett's method with a quotient of 64 bits. */
RMQ_PCLMUL static inline uint32_t rmq_crc32_remainder96(__m128i t) {
    const __m128i k = rmq_crc32_constants(RMQ_QUOTIENT, RMQ_POLYNOMIAL);
    __m128i q = _mm_clmulepi64_si128(t, k, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(t, _mm_clmulepi64_si128(q, k, 0x10)), 2);
}

RMQ_PCLMUL static inline uint32_t rmq_crc32_remainder(__m128i x) {
    __m128i t = _mm_clmulepi64_si128(x, rmq_crc32_constants(RMQ_X95, 0), 0x00);
    return rmq_crc32_remainder96(_mm_xor_si128(t, _mm_srli_si128(x, 8)));
}

/* Up to 15 bytes, moved to the end of a register: zeros before a polynomial change nothing. */
RMQ_PCLMUL static inline uint32_t rmq_crc32_short(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t low, high;
    if (n >= 8) {
        memcpy(&low, p, 8);
        memcpy(&high, p + n - 8, 8);
        low = (low ^ crc) << 8 << 8 * (15 - n);
        high ^= (uint64_t)crc >> 8 * (n - 8);
        return rmq_crc32_remainder(_mm_set_epi64x((long long)high, (long long)low));
    }
    if (n >= 4) {
        low = (rmq_crc32_le32(p) | (uint64_t)rmq_crc32_le32(p + n - 4) << 8 * (n - 4)) ^ crc;
        return rmq_crc32_remainder96(_mm_cvtsi64_si128((long long)(low << 8 * (8 - n))));
    }
    if (n == 0) return crc;
    low = crc ^ (p[0] | (uint64_t)p[n >> 1] << 8 * (n >> 1) | (uint64_t)p[n - 1] << 8 * (n - 1));
    return rmq_crc32_remainder96(_mm_cvtsi64_si128((long long)(low << 8 * (8 - n)))) ^ (uint32_t)(low >> 8 * n);
}

/* Takes the bytes that are over from whole registers, so that p and n go on with whole ones.  Returns the register of
   these bytes; *rest is what of `crc` belongs to the bytes after them. */
RMQ_PCLMUL static inline __m128i rmq_crc32_head(uint32_t crc, const uint8_t **p, size_t *n, __m128i *rest) {
    const size_t r = *n & 15;
    const __m128i c = _mm_cvtsi32_si128((int)crc), x = _mm_xor_si128(rmq_crc32_load(*p), c);
    if (r == 0) {
        *p += 16, *n -= 16;
        *rest = _mm_setzero_si128();
        return x;
    }
    *p += r, *n -= r;
    *rest = _mm_shuffle_epi8(c, rmq_crc32_load(rmq_crc32_moves + 16 + r));
    return _mm_shuffle_epi8(x, rmq_crc32_load(rmq_crc32_moves + r));
}

RMQ_PCLMUL static uint32_t rmq_crc32_pclmul(uint32_t crc, const uint8_t *p, size_t n) {
    if (n < 16) return rmq_crc32_short(crc, p, n);
    const __m128i k128 = rmq_crc32_constants(RMQ_FOLD_128);
    __m128i rest, x = rmq_crc32_head(crc, &p, &n, &rest);
    if (n == 0) return rmq_crc32_remainder(x);
    x = _mm_xor_si128(_mm_xor_si128(rmq_crc32_fold(x, k128), rest), rmq_crc32_load(p));
    p += 16, n -= 16;
    if (n >= 112) {
        const __m128i k512 = rmq_crc32_constants(RMQ_FOLD_512);
        __m128i y = rmq_crc32_load(p), z = rmq_crc32_load(p + 16), w = rmq_crc32_load(p + 32);
        for (p += 48, n -= 48; n >= 64; p += 64, n -= 64) {
            x = _mm_xor_si128(rmq_crc32_fold(x, k512), rmq_crc32_load(p));
            y = _mm_xor_si128(rmq_crc32_fold(y, k512), rmq_crc32_load(p + 16));
            z = _mm_xor_si128(rmq_crc32_fold(z, k512), rmq_crc32_load(p + 32));
            w = _mm_xor_si128(rmq_crc32_fold(w, k512), rmq_crc32_load(p + 48));
        }
        const __m128i k256 = rmq_crc32_constants(RMQ_FOLD_256);
        y = _mm_xor_si128(rmq_crc32_fold(x, k128), y);
        w = _mm_xor_si128(rmq_crc32_fold(z, k128), w);
        x = _mm_xor_si128(rmq_crc32_fold(y, k256), w);
    }
    for (; n > 0; p += 16, n -= 16) x = _mm_xor_si128(rmq_crc32_fold(x, k128), rmq_crc32_load(p));
    return rmq_crc32_remainder(x);
}

RMQ_VPCLMUL static inline __m256i rmq_crc32_load2(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

RMQ_VPCLMUL static inline __m256i rmq_crc32_fold2(__m256i x, __m256i k) {
    return _mm256_xor_si256(_mm256_clmulepi64_epi128(x, k, 0x00), _mm256_clmulepi64_epi128(x, k, 0x11));
}

RMQ_VPCLMUL static uint32_t rmq_crc32_vpclmul(uint32_t crc, const uint8_t *p, size_t n) {
    if (n < 144) return rmq_crc32_pclmul(crc, p, n);
    const __m128i k128 = rmq_crc32_constants(RMQ_FOLD_128);
    __m128i rest, x = rmq_crc32_head(crc, &p, &n, &rest);
    x = _mm_xor_si128(rmq_crc32_fold(x, k128), rest);
    const __m256i k1024 = _mm256_broadcastsi128_si256(rmq_crc32_constants(RMQ_FOLD_1024));
    __m256i a = _mm256_xor_si256(rmq_crc32_load2(p), _mm256_inserti128_si256(_mm256_setzero_si256(), x, 0)), b = rmq_crc32_load2(p + 32);
    __m256i c = rmq_crc32_load2(p + 64), d = rmq_crc32_load2(p + 96);
    for (p += 128, n -= 128; n >= 128; p += 128, n -= 128) {
        a = _mm256_xor_si256(rmq_crc32_fold2(a, k1024), rmq_crc32_load2(p));
        b = _mm256_xor_si256(rmq_crc32_fold2(b, k1024), rmq_crc32_load2(p + 32));
        c = _mm256_xor_si256(rmq_crc32_fold2(c, k1024), rmq_crc32_load2(p + 64));
        d = _mm256_xor_si256(rmq_crc32_fold2(d, k1024), rmq_crc32_load2(p + 96));
    }
    const __m256i k512 = _mm256_broadcastsi128_si256(rmq_crc32_constants(RMQ_FOLD_512));
    const __m256i k256 = _mm256_broadcastsi128_si256(rmq_crc32_constants(RMQ_FOLD_256));
    c = _mm256_xor_si256(rmq_crc32_fold2(a, k512), c);
    d = _mm256_xor_si256(rmq_crc32_fold2(b, k512), d);
    if (n >= 64) {
        c = _mm256_xor_si256(rmq_crc32_fold2(c, k512), rmq_crc32_load2(p));
        d = _mm256_xor_si256(rmq_crc32_fold2(d, k512), rmq_crc32_load2(p + 32));
        p += 64, n -= 64;
    }
    d = _mm256_xor_si256(rmq_crc32_fold2(c, k256), d);
    if (n >= 32) {
        d = _mm256_xor_si256(rmq_crc32_fold2(d, k256), rmq_crc32_load2(p));
        p += 32, n -= 32;
    }
    x = _mm_xor_si128(rmq_crc32_fold(_mm256_castsi256_si128(d), k128), _mm256_extracti128_si256(d, 1));
    if (n > 0) x = _mm_xor_si128(rmq_crc32_fold(x, k128), rmq_crc32_load(p));
    return rmq_crc32_remainder(x);
}

#endif

#ifdef RMQ_CRC32_ARM

#ifdef __clang__
#define RMQ_ARM_CRC __attribute__((target("crc")))
#define rmq_crc32_8(crc, v) __builtin_arm_crc32b(crc, v)
#define rmq_crc32_16(crc, v) __builtin_arm_crc32h(crc, v)
#define rmq_crc32_32(crc, v) __builtin_arm_crc32w(crc, v)
#define rmq_crc32_64(crc, v) __builtin_arm_crc32d(crc, v)
#else
#define RMQ_ARM_CRC __attribute__((target("+crc")))
#define rmq_crc32_8(crc, v) __builtin_aarch64_crc32b(crc, v)
#define rmq_crc32_16(crc, v) __builtin_aarch64_crc32h(crc, v)
#define rmq_crc32_32(crc, v) __builtin_aarch64_crc32w(crc, v)
#define rmq_crc32_64(crc, v) __builtin_aarch64_crc32x(crc, v)
#endif

RMQ_ARM_CRC static uint32_t rmq_crc32_arm(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t v;
    uint16_t half;
    for (; n >= 32; p += 32, n -= 32) {
        memcpy(&v, p, 8), crc = rmq_crc32_64(crc, v);
        memcpy(&v, p + 8, 8), crc = rmq_crc32_64(crc, v);
        memcpy(&v, p + 16, 8), crc = rmq_crc32_64(crc, v);
        memcpy(&v, p + 24, 8), crc = rmq_crc32_64(crc, v);
    }
    for (; n >= 8; p += 8, n -= 8) memcpy(&v, p, 8), crc = rmq_crc32_64(crc, v);
    if (n & 4) crc = rmq_crc32_32(crc, rmq_crc32_le32(p)), p += 4;
    if (n & 2) memcpy(&half, p, 2), crc = rmq_crc32_16(crc, half), p += 2;
    if (n & 1) crc = rmq_crc32_8(crc, *p);
    return crc;
}

#endif

/* ------------------------------------------------------------------------------------------------ the choice */

static struct {
    const char *name;
    rmq_crc32_function function;
} rmq_crc32_implementations[4];

static int rmq_crc32_implementation_num;
static rmq_crc32_function rmq_crc32_chosen;

static void rmq_crc32_offer(const char *name, rmq_crc32_function function) {
    rmq_crc32_implementations[rmq_crc32_implementation_num].name = name;
    rmq_crc32_implementations[rmq_crc32_implementation_num++].function = function;
    rmq_crc32_chosen = function;
}

/* Once, before the first use: the last implementation that is offered is chosen. */
static void rmq_crc32_start(void) {
    rmq_crc32_implementation_num = 0;
    rmq_crc32_fill_tables();
    rmq_crc32_offer("table", rmq_crc32_table);
#ifdef RMQ_CRC32_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        rmq_crc32_offer("pclmul", rmq_crc32_pclmul);
        if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"))
            rmq_crc32_offer("vpclmul", rmq_crc32_vpclmul);
    }
#endif
#ifdef RMQ_CRC32_ARM
#if defined(__APPLE__)
    rmq_crc32_offer("crc", rmq_crc32_arm);
#else
    if (getauxval(AT_HWCAP) & 1 << 7 /* HWCAP_CRC32 */) rmq_crc32_offer("crc", rmq_crc32_arm);
#endif
#endif
}

static const char *rmq_crc32_name(int i) { return rmq_crc32_implementations[i].name; }

static uint32_t rmq_crc32_by(int i, uint32_t crc, const uint8_t *p, size_t n) {
    return ~rmq_crc32_implementations[i].function(~crc, p, n);
}

/* As zlib's crc32(crc, p, n): 0 starts, and the value of the first part goes in with the next. */
static inline uint32_t rmq_crc32_update(uint32_t crc, const uint8_t *p, size_t n) {
    return ~rmq_crc32_chosen(~crc, p, n);
}

/* The product of two polynomials modulo G, first bit highest term as everywhere here. */
static inline uint32_t rmq_crc32_product(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a & 0x80000000u) product ^= b;
        b = b & 1 ? b >> 1 ^ 0xEDB88320u : b >> 1;
    }
    return product;
}

/* What the value of some bytes counts for in that of these bytes and n further ones: the CRC of both parts together is this
   ^ the CRC of the second (as zlib's crc32_combine).  It is `crc` times x^(8n). */
static inline uint32_t rmq_crc32_shifted(uint32_t crc, uint64_t n) {
    uint32_t power = 0x00800000u; /* x^8 */
    for (; n; n >>= 1) {
        if (n & 1) crc = rmq_crc32_product(power, crc);
        power = rmq_crc32_product(power, power);
    }
    return crc;
}

#endif
