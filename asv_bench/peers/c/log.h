/* What the loops share: numbers as they lie on disk, the parts of a record, and the CRC, which folds with carry-less multiplication
 * where the processor has it, else takes eight bytes at a time from tables. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return __builtin_bswap32(v); }
static uint64_t get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return __builtin_bswap64(v); }
static uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }

static void fail(const char *what) { perror(what); exit(1); }

/* ---------------------------------------------------------------------------------------------------------------- CRC-32 */

static uint32_t crc_table[8][256];

static void make_crc_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? c >> 1 ^ 0xEDB88320u : c >> 1;
        crc_table[0][i] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) crc_table[k][i] = crc_table[k - 1][i] >> 8 ^ crc_table[0][crc_table[k - 1][i] & 255];
}

/* The register before and after; neither is inverted. */
static uint32_t crc_by_tables(uint32_t c, const uint8_t *p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= c;
        c = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^ crc_table[4][low >> 24] ^
            crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^ crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    for (; n; p++, n--) c = c >> 8 ^ crc_table[0][(c ^ *p) & 255];
    return c;
}

#if defined(__x86_64__)
/* Folding after Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): 64 bytes
 * at a time, then 16; the last 16 bytes of remainder and what follows them go through the tables. */
__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i x, __m128i by, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next);
}

__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t c, const uint8_t *p, size_t n) {
    if (n < 64) return crc_by_tables(c, p, n);
    const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i *q = (const __m128i *)p;
    __m128i a = _mm_xor_si128(_mm_loadu_si128(q), _mm_cvtsi32_si128((int)c));
    __m128i b = _mm_loadu_si128(q + 1), d = _mm_loadu_si128(q + 2), e = _mm_loadu_si128(q + 3);
    for (q += 4, n -= 64; n >= 64; q += 4, n -= 64) {
        a = fold(a, by64, _mm_loadu_si128(q));
        b = fold(b, by64, _mm_loadu_si128(q + 1));
        d = fold(d, by64, _mm_loadu_si128(q + 2));
        e = fold(e, by64, _mm_loadu_si128(q + 3));
    }
    a = fold(fold(fold(a, by16, b), by16, d), by16, e);
    for (; n >= 16; q++, n -= 16) a = fold(a, by16, _mm_loadu_si128(q));
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, a);
    return crc_by_tables(crc_by_tables(0, rest, 16), (const uint8_t *)q, n);
}
#endif

static uint32_t (*crc_of)(uint32_t, const uint8_t *, size_t) = crc_by_tables;
static const char *crc_name = "tables of eight";

static void choose_crc(void) {
    make_crc_tables();
#if defined(__x86_64__)
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        uint8_t bytes[300];
        for (int i = 0; i < 300; i++) bytes[i] = (uint8_t)(i * 37 + 11);
        for (size_t n = 0; n < 300; n++)
            if (crc_by_folding(~0u, bytes, n) != crc_by_tables(~0u, bytes, n)) { fprintf(stderr, "the CRC is wrong\n"); exit(1); }
        crc_of = crc_by_folding;
        crc_name = "PCLMULQDQ";
    }
#endif
}

/* --------------------------------------------------------------------------------------------------------------- records */

typedef struct {
    uint32_t size, born_size, body_size, topic_size;
    const uint8_t *stored, *store_host, *consumed, *body, *topic, *properties, *end;
} record;

/* The parts of the record at p, after a look at its magic and the CRC of its body; the program ends where these are wrong. */
static inline record take_apart(const uint8_t *p, size_t pos) {
    uint32_t magic = get32(p + 4), sys_flag = get32(p + 36);
    record r = {get32(p), sys_flag & 0x10 ? 20 : 8, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    if (magic != 0xDAA320A7u && magic != 0xDAA320ABu) { fprintf(stderr, "no record at %zu\n", pos); exit(1); }
    r.stored = p + 48 + r.born_size;
    r.store_host = r.stored + 8;
    r.consumed = r.store_host + (sys_flag & 0x20 ? 20 : 8);
    r.body_size = get32(r.consumed + 12);
    r.body = r.consumed + 16;
    if (r.body_size && (~crc_of(~0u, r.body, r.body_size) & 0x7FFFFFFFu) != get32(p + 8)) {
        fprintf(stderr, "bad CRC at %zu\n", pos);
        exit(1);
    }
    const uint8_t *q = r.body + r.body_size;
    r.topic_size = magic == 0xDAA320A7u ? *q : get16(q);
    r.topic = q + (magic == 0xDAA320A7u ? 1 : 2);
    r.properties = r.topic + r.topic_size + 2;
    r.end = r.properties + get16(r.properties - 2);
    return r;
}

typedef struct { const uint8_t *name, *value, *next; } property;

/* The property that begins at `name`; one without a value ends the properties. */
static inline int take_property(const uint8_t *name, const uint8_t *end, property *out) {
    const uint8_t *one = name < end ? memchr(name, 1, (size_t)(end - name)) : NULL;
    if (!one) return 0;
    const uint8_t *two = memchr(one + 1, 2, (size_t)(end - one - 1));
    *out = (property){name, one + 1, two ? two : end};
    return 1;
}

static inline int is_named(const property *p, const char *name) {
    return p->value - p->name == 5 && !memcmp(p->name, name, 4);
}
