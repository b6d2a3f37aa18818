/* What the loops over keys share: files mapped whole, and the way along a key's chain to the records that have the key. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"

enum { HEADER = 40, SLOT = 4, ENTRY = 20 };

static const uint8_t *segment, *idx;
static uint32_t slot_num;

static inline const uint8_t *map_whole(const char *path) {
    struct stat status;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &status)) fail(path);
    const uint8_t *p = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) fail(path);
    close(fd);
    return p;
}

/* Whether one of the keys of the record, which spaces separate, is this one. */
static inline int has_key(const record *r, const uint8_t *key, uint32_t width) {
    property each;
    for (const uint8_t *name = r->properties; take_property(name, r->end, &each); name = each.next + 1) {
        if (!is_named(&each, "KEYS")) continue;
        for (const uint8_t *one = each.value; one < each.next;) {
            const uint8_t *space = memchr(one, ' ', (size_t)(each.next - one));
            if (!space) space = each.next;
            if ((uint32_t)(space - one) == width && !memcmp(one, key, width)) return 1;
            one = space + 1;
        }
    }
    return 0;
}

typedef struct { const char *topic; const uint8_t *key; uint32_t topic_size, width, hash, number; } chain;

/* Java's hash of a text, going on from that of what stands before it. */
static inline uint32_t java_hash(uint32_t hash, const uint8_t *text, size_t size) {
    for (size_t i = 0; i < size; i++) hash = hash * 31 + text[i];
    return hash;
}

/* What the index keeps of a hash: its amount, and 0 for the one number that has none. */
static inline uint32_t without_sign(uint32_t hash) { return hash >> 31 ? (hash == 0x80000000u ? 0 : -hash) : hash; }

/* The hash of a topic and '#'; what the hash of each of its keys goes on from. */
static inline uint32_t prefix_of(const char *topic, uint32_t topic_size) {
    return java_hash(0, (const uint8_t *)topic, topic_size) * 31 + '#';
}

static inline chain chain_of(const char *topic, uint32_t topic_size, uint32_t prefix, const uint8_t *key, uint32_t width) {
    uint32_t positive = without_sign(java_hash(prefix, key, width));
    return (chain){topic, key, topic_size, width, positive, get32(idx + HEADER + (size_t)SLOT * (positive % slot_num))};
}

/* The next record with the key, newest first, and where it is; 0 at the end of the chain. */
static inline int next_record(chain *c, record *r, size_t *pos) {
    while (c->number) {
        const uint8_t *entry = idx + HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * c->number;
        c->number = get32(entry + 16);
        if (get32(entry) != c->hash) continue;
        *pos = get64(entry + 4);
        *r = take_apart(segment + *pos, *pos);
        if (r->topic_size == c->topic_size && !memcmp(r->topic, c->topic, c->topic_size) && has_key(r, c->key, c->width))
            return 1;
    }
    return 0;
}
