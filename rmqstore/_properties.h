/* The properties text of a RocketMQ message: pairs of name 0x01 value, each ended by 0x02 (Java's MessageDecoder, 5.5.0).

   Owns the taking apart, with SSE2 where the processor has it, and the views of names and values.  Positions are
   relative to the begin of the text. */

#ifndef RMQSTORE_PROPERTIES_H
#define RMQSTORE_PROPERTIES_H

#include "_utf8.h"

/* A module may use only some of these. */
#define RMQ_MAY_BE_UNUSED __attribute__((unused))

/* Positions of the values in a properties text that are used singly; -1 = absent.  As in Java the last of equal names
   counts. */
typedef struct { int32_t keys_pos, keys_len, tags_pos, tags_len, unique_key_pos, unique_key_len; } rmq_indexed;
typedef struct {
    rmq_indexed indexed;
    int32_t delay_pos, delay_len, inner_num_pos, inner_num_len, inner_base_pos, inner_base_len;
    int32_t multi_dispatch_pos, multi_dispatch_len;
} rmq_found;

/* Whether one of n bytes is 1 or 2, which part names, values and pairs of properties, or, if that is asked for, a space.
   Most texts are short: pieces that overlap cover them, and no function of the C library is called. */
static inline int rmq_has_separator(const unsigned char *p, int64_t n, int space) {
#if defined(__SSE2__) && defined(__x86_64__)
    const __m128i one = _mm_set1_epi8(1), two = _mm_set1_epi8(2), third = _mm_set1_epi8(space ? 32 : 2);
    __m128i found = _mm_setzero_si128(), v;
    uint64_t first, last;
    uint32_t low, high;
    int64_t i;
#define RMQ_LOOK(v) \
    (found = _mm_or_si128(_mm_or_si128(found, _mm_cmpeq_epi8(v, one)), _mm_or_si128(_mm_cmpeq_epi8(v, two), _mm_cmpeq_epi8(v, third))))
    if (n >= 16) {
        for (i = 0; i < n - 16; i += 16) {
            v = _mm_loadu_si128((const __m128i *)(p + i));
            RMQ_LOOK(v);
        }
        v = _mm_loadu_si128((const __m128i *)(p + n - 16));
    } else if (n >= 8) {
        memcpy(&first, p, 8);
        memcpy(&last, p + n - 8, 8);
        v = _mm_set_epi64x((long long)last, (long long)first);
    } else if (n >= 4) {
        memcpy(&low, p, 4);
        memcpy(&high, p + n - 4, 4);
        v = _mm_cvtsi64_si128((long long)((uint64_t)high << 32 | low));
    } else {
        v = _mm_cvtsi32_si128(n > 0 ? p[0] << 16 | p[n >> 1] << 8 | p[n - 1] : 0);
    }
    RMQ_LOOK(v);
#undef RMQ_LOOK
    return _mm_movemask_epi8(found) != 0;
#else
    return memchr(p, 1, (size_t)n) || memchr(p, 2, (size_t)n) || (space && memchr(p, 32, (size_t)n));
#endif
}

typedef struct { int32_t start, split, end; } rmq_span;
/* Numbers of the pieces with these names, -1 = absent; the last of equal names counts. */
typedef struct { int32_t keys, tags, unique_key; } rmq_known;

static inline void rmq_know(rmq_known *known, const unsigned char *name, int32_t n, int32_t num) {
    if (n == 4) {
        if (memcmp(name, "KEYS", 4) == 0) known->keys = num;
        else if (memcmp(name, "TAGS", 4) == 0) known->tags = num;
    } else if (n == 8 && memcmp(name, "UNIQ_KEY", 8) == 0) known->unique_key = num;
}

/* Bits of the bytes among 64 that are 1, that are 2, and that are not ASCII. */
static inline void rmq_marks(const unsigned char *p, uint64_t *ones, uint64_t *twos, uint64_t *high) {
    uint64_t one = 0, two = 0, top = 0;
    int i;
#if defined(__SSE2__)
    for (i = 0; i < 4; i++) {
        __m128i v = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        one |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_set1_epi8(1))) << (16 * i);
        two |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_set1_epi8(2))) << (16 * i);
        top |= (uint64_t)(uint32_t)_mm_movemask_epi8(v) << (16 * i);
    }
#else
    for (i = 0; i < 64; i++) {
        one |= (uint64_t)(p[i] == 1) << i;
        two |= (uint64_t)(p[i] == 2) << i;
        top |= (uint64_t)(p[i] >> 7) << i;
    }
#endif
    *ones = one; *twos = two; *high = top;
}

/* The marks of the 64 bytes at `at` of a text of n bytes; `room` bytes may be read at its begin. */
static inline void rmq_marks_at(const unsigned char *text, int32_t at, int32_t n, int64_t room, uint64_t *ones,
                                uint64_t *twos, uint64_t *high) {
    const unsigned char *p = text + at;
    unsigned char last[64];
    room = RMQ_READABLE(n, room);
    if (at + (int64_t)64 > room) {
        memset(last, 0, sizeof last);
        memcpy(last, p, (size_t)(n - at < 64 ? n - at : 64));
        p = last;
    }
    rmq_marks(p, ones, twos, high);
    if (n - at < 64) {
        uint64_t keep = ((uint64_t)1 << (n - at)) - 1;
        *ones &= keep; *twos &= keep; *high &= keep;
    }
}

/* As `rmq_marks_at`, those that are 2 alone. */
static inline uint64_t rmq_twos_at(const unsigned char *text, int32_t at, int32_t n, int64_t room) {
    const int32_t left = n - at < 64 ? n - at : 64;
    room = RMQ_READABLE(n, room);
#if defined(__SSE2__)
    if (at + ((left + (int64_t)15) & ~(int64_t)15) <= room) {
        uint64_t twos = 0;
        int32_t i;
        for (i = 0; i < left; i += 16)
            twos |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(
                        _mm_loadu_si128((const __m128i *)(text + at + i)), _mm_set1_epi8(2))) << i;
        return left < 64 ? twos & (((uint64_t)1 << left) - 1) : twos;
    }
#endif
    {
        uint64_t ones, twos, high;
        rmq_marks_at(text, at, n, room, &ones, &twos, &high);
        return twos;
    }
}

/* The pieces of a properties text that have a name and a value: cut at 2, the first 1 of a piece ends the name (Java's
   MessageDecoder.string2messageProperties).  `room` bytes may be read; `out` takes n / 4 + 1 pieces.  *valid: the text is
   UTF-8, which Java reads as it stands. */
RMQ_MAY_BE_UNUSED static int32_t rmq_split_properties(const unsigned char *text, int32_t n, int64_t room, rmq_span *out, rmq_known *known,
                                    int *valid) {
    int32_t at = 0, start = 0, split = -1, num = 0, here;
    uint64_t ones, twos, high, both, any = 0;
    known->keys = known->tags = known->unique_key = -1;
    while (at < n) {
        rmq_marks_at(text, at, n, room, &ones, &twos, &high);
        any |= high;
        for (both = ones | twos; both; both &= both - 1) {
            int bit = __builtin_ctzll(both);
            here = at + bit;
            if (ones >> bit & 1) {
                if (split < 0) split = here;
            } else {
                if (split > start && here > split + 1) {
                    rmq_know(known, text + start, split - start, num);
                    out[num].start = start; out[num].split = split; out[num].end = here; num++;
                }
                start = here + 1;
                split = -1;
            }
        }
        at += 64;
    }
    if (split > start && n > split + 1) {
        rmq_know(known, text + start, split - start, num);
        out[num].start = start; out[num].split = split; out[num].end = n; num++;
    }
    *valid = any == 0 || rmq_is_utf8(text, n);
    return num;
}

/* What texts of one length have in common that were taken apart into the same pieces: names and separators, byte by byte,
   and where values are, any byte above both separators.  A text that fits and is valid UTF-8 need not be taken apart
   again.  A layout lies at a multiple of 16. */
#define RMQ_LAYOUT_ROOM 256
#define RMQ_LAYOUT_SPANS 24
/* The views of a piece's name and value but for what differs from text to text: `name` and `value` hold what does not,
   `keep` the bits of the value's own bytes, `name_far` and `value_far` those of the place where a text too long for a
   view stands. */
typedef struct { unsigned char name[16], name_far[16], value[16], value_far[16], keep[16]; } rmq_piece_views;
typedef struct {
    unsigned char low[RMQ_LAYOUT_ROOM], range[RMQ_LAYOUT_ROOM];  /* a byte fits that is at most `range` above `low` */
    rmq_piece_views views[RMQ_LAYOUT_SPANS];
    unsigned char names[RMQ_LAYOUT_ROOM + 64];  /* one after the other; more may be read than they are */
    int32_t name_ends[RMQ_LAYOUT_SPANS];
    rmq_span spans[RMQ_LAYOUT_SPANS];
    rmq_known known;
    int32_t n, span_num, names_len;  /* n: length of the text, 0 for no layout */
    int32_t misses;  /* texts in a row that did not fit, as far as the user of the layout counts them */
    int64_t used_by;
} __attribute__((aligned(16))) rmq_layout;

static inline int rmq_fits(const rmq_layout *l, const unsigned char *text, int32_t n, int64_t room) {
    int32_t i = 0;
    room = RMQ_READABLE(n, room);
    if (l->n != n || n <= 0) return 0;
#if defined(__SSE2__)
    if ((((int64_t)n + 15) & ~(int64_t)15) <= room) {
        /* What a byte is above its range; nothing is above that of what follows the text in its last 16 bytes. */
        __m128i beyond = _mm_setzero_si128(), high = _mm_setzero_si128();
        for (; i < n; i += 16) {
            const __m128i here = _mm_loadu_si128((const __m128i *)(text + i));
            __m128i v = _mm_sub_epi8(here, _mm_load_si128((const __m128i *)(l->low + i)));
            high = _mm_or_si128(high, here);
            beyond = _mm_or_si128(beyond, _mm_subs_epu8(v, _mm_load_si128((const __m128i *)(l->range + i))));
        }
        return _mm_movemask_epi8(_mm_cmpeq_epi8(beyond, _mm_setzero_si128())) == 0xFFFF
               && (!_mm_movemask_epi8(high) || rmq_is_utf8(text, n));
    }
#endif
    {
        int wrong = 0;
        for (; i < n; i++) wrong |= (unsigned char)(text[i] - l->low[i]) > l->range[i];
        return !wrong && rmq_is_utf8(text, n);
    }
}

/* The view of piece k's value, of a text that fits and stands at `pos` of a buffer; 16 bytes after it may be read. */
static inline void rmq_put_value_view(unsigned char *to, const rmq_layout *l, int32_t k, const unsigned char *text,
                                      int32_t buffer, int64_t pos) {
    const rmq_span *span = l->spans + k;
#if defined(__SSE2__) && !RMQ_WATCHES_THREADS
    const rmq_piece_views *views = l->views + k;
    const __m128i place = _mm_set_epi32((int32_t)pos, buffer, 0, 0);
    /* A name and its end stand before each value, so that four bytes before it are of the record. */
    __m128i v = _mm_and_si128(_mm_loadu_si128((const __m128i *)(text + span->split - 3)),
                              _mm_load_si128((const __m128i *)views->keep));
    v = _mm_or_si128(v, _mm_add_epi32(_mm_and_si128(place, _mm_load_si128((const __m128i *)views->value_far)),
                                      _mm_load_si128((const __m128i *)views->value)));
    _mm_storeu_si128((__m128i *)to, v);
#else
    rmq_put_view(to, text + span->split + 1, span->end - span->split - 1, 16, buffer, pos + span->split + 1);
#endif
}

/* As that, of the name. */
static inline void rmq_put_name_view(unsigned char *to, const rmq_layout *l, int32_t k, const unsigned char *text,
                                     int32_t buffer, int64_t pos) {
#if defined(__SSE2__)
    const rmq_piece_views *views = l->views + k;
    const __m128i place = _mm_set_epi32((int32_t)pos, buffer, 0, 0);
    (void)text;
    _mm_storeu_si128((__m128i *)to,
                     _mm_add_epi32(_mm_and_si128(place, _mm_load_si128((const __m128i *)views->name_far)),
                                   _mm_load_si128((const __m128i *)views->name)));
#else
    const rmq_span *span = l->spans + k;
    rmq_put_view(to, text + span->start, span->split - span->start, 16, buffer, pos + span->start);
#endif
}

static inline void rmq_find(rmq_found *found, const unsigned char *text, int32_t start, int32_t split, int32_t end) {
    const unsigned char *name = text + start;
    const int32_t pos = split + 1, len = end - split - 1;
    /* A piece needs at least one byte on either side of its first 1. */
    if (split <= start || len <= 0) return;
    switch (split - start) {
    case 4:
        if (memcmp(name, "KEYS", 4) == 0) found->indexed.keys_pos = pos, found->indexed.keys_len = len;
        else if (memcmp(name, "TAGS", 4) == 0) found->indexed.tags_pos = pos, found->indexed.tags_len = len;
        break;
    case 5:
        if (memcmp(name, "DELAY", 5) == 0) found->delay_pos = pos, found->delay_len = len;
        break;
    case 8:
        if (memcmp(name, "UNIQ_KEY", 8) == 0) found->indexed.unique_key_pos = pos, found->indexed.unique_key_len = len;
        break;
    case 9:
        if (memcmp(name, "INNER_NUM", 9) == 0) found->inner_num_pos = pos, found->inner_num_len = len;
        break;
    case 10:
        if (memcmp(name, "INNER_BASE", 10) == 0) found->inner_base_pos = pos, found->inner_base_len = len;
        break;
    case 20:
        if (memcmp(name, "INNER_MULTI_DISPATCH", 20) == 0)
            found->multi_dispatch_pos = pos, found->multi_dispatch_len = len;
        break;
    }
}

/* The pieces of `rmq_split_properties` of which only these are wanted; `room` bytes may be read. */
RMQ_MAY_BE_UNUSED static void rmq_find_properties(const unsigned char *text, int32_t n, int64_t room, rmq_found *found) {
    int32_t at = 0, start = 0, split = -1, here;
    uint64_t ones, twos, high, both;
    memset(found, 0xFF, sizeof *found);
    while (at < n) {
        rmq_marks_at(text, at, n, room, &ones, &twos, &high);
        for (both = ones | twos; both; both &= both - 1) {
            here = at + __builtin_ctzll(both);
            if (both & -both & ones) {
                if (split < 0) split = here;
            } else {
                rmq_find(found, text, start, split, here);
                start = here + 1;
                split = -1;
            }
        }
        at += 64;
    }
    rmq_find(found, text, start, split, n);
}

/* The position of one property's value in a properties text, and its length; -1 = absent.  The rules are those of
   `rmq_find_properties` for a name without 1 and 2; `room` bytes may be read. */
RMQ_MAY_BE_UNUSED static int32_t rmq_value_of(const unsigned char *text, int32_t n, int64_t room, const unsigned char *name, int32_t name_len,
                            int32_t *len) {
    int32_t at = 0, start = 0, value = -1, here;
    uint64_t twos = 0;
    for (;;) {
        /* The end of the text ends a piece as well. */
        while (!twos && at < n) {
            twos = rmq_twos_at(text, at, n, room);
            at += 64;
        }
        here = twos ? at - 64 + __builtin_ctzll(twos) : n;
        if (here - start > name_len + 1 && text[start + name_len] == 1 && rmq_same(text + start, name, name_len)) {
            value = start + name_len + 1;
            *len = here - value;
        }
        if (!twos) return value;
        twos &= twos - 1;
        start = here + 1;
    }
}

/* Whether two names may be equal: false says that no two are. */
static inline int rmq_names_may_repeat(const unsigned char *text, const rmq_span *spans, int32_t num) {
    uint64_t seen = 0, bit;
    int32_t k;
    for (k = 0; k < num; k++) {
        const unsigned char *name = text + spans[k].start;
        int32_t n = spans[k].split - spans[k].start;
        bit = (uint64_t)1 << ((name[0] * 7 + name[n - 1] * 3 + name[n / 2] + n) & 63);
        if (seen & bit) return 1;
        seen |= bit;
    }
    return 0;
}

/* The parts of the views of a text of n bytes at `start`, whose own bytes are known, or are those that `keep` marks. */
static inline void rmq_know_views(unsigned char *view, unsigned char *far, unsigned char *keep,
                                  const unsigned char *known, int32_t n, int32_t start) {
    const int32_t inside = n <= RMQ_VIEW_INLINE ? n : 4;
    memset(view, 0, 16);
    memset(far, 0, 16);
    memcpy(view, &n, 4);
    if (known) memcpy(view + 4, known, (size_t)inside);
    if (keep) {
        memset(keep, 0, 16);
        memset(keep + 4, 0xFF, (size_t)inside);
    }
    if (n > RMQ_VIEW_INLINE) {
        memset(far + 8, 0xFF, 8);
        memcpy(view + 12, &start, 4);
    }
}

/* Makes the layout that of a text that is UTF-8, or none of a text that is too long or whose names may repeat. */
RMQ_MAY_BE_UNUSED static void rmq_learn(rmq_layout *l, const unsigned char *text, int32_t n, const rmq_span *spans, int32_t num,
                      const rmq_known *known) {
    int32_t k, used = 0;
    l->n = 0;
    if (n > RMQ_LAYOUT_ROOM || num < 1 || num > RMQ_LAYOUT_SPANS || rmq_names_may_repeat(text, spans, num)) return;
    memcpy(l->low, text, (size_t)n);
    memset(l->range, 0, (size_t)n);
    memset(l->range + n, 0xFF, (size_t)(-n & 15));
    for (k = 0; k < num; k++) {
        const unsigned char *at = text + spans[k].start;
        rmq_piece_views *views = l->views + k;
        int32_t name = spans[k].split - spans[k].start, value = spans[k].end - spans[k].split - 1;
        memset(l->low + spans[k].split + 1, 3, (size_t)value);
        memset(l->range + spans[k].split + 1, 252, (size_t)value);
        rmq_know_views(views->name, views->name_far, NULL, at, name, spans[k].start);
        rmq_know_views(views->value, views->value_far, views->keep, NULL, value, spans[k].split + 1);
        memcpy(l->names + used, at, (size_t)name);
        used += name;
        l->name_ends[k] = used;
    }
    memcpy(l->spans, spans, (size_t)num * sizeof *spans);
    l->known = *known;
    l->span_num = num; l->names_len = used; l->n = n;
}

#endif
