/* The limit of queries by key: keys looked up in one index file, their records read in one segment, in one plain loop
 * over mapped memory.
 *
 *   query LOG INDEX SLOTS TOPIC KEYS WIDTH COUNT
 *   query --crc
 *
 * Goes the chain of every key, steps to the records that its entries name, checks the CRC of the body, compares the
 * topic and the keys, and copies the body; no other column is laid out, no key is asked for ahead of another, and
 * nothing is checked that would not crash it. The keys are asked for once before the clock starts, so that all pages
 * are mapped. Prints nanoseconds, records, and the sum of the body lengths and queue offsets.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "log.h"

enum { HEADER = 40, SLOT = 4, ENTRY = 20, ROOM = 1 << 22 };

static const uint8_t *map_whole(const char *path) {
    struct stat status;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &status)) fail(path);
    const uint8_t *p = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) fail(path);
    close(fd);
    return p;
}

static const uint8_t *segment, *idx;
static uint32_t slot_num;
static uint8_t bodies[ROOM];

/* Whether one of the keys of the record, which spaces separate, is this one. */
static int has_key(const record *r, const uint8_t *key, uint32_t width) {
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

static long ask(const char *topic, const uint8_t *keys, uint32_t width, long count, int64_t *sum) {
    uint32_t topic_size = (uint32_t)strlen(topic), prefix = 0;
    long records = 0;
    size_t used = 0;
    for (uint32_t i = 0; i < topic_size; i++) prefix = prefix * 31 + (uint8_t)topic[i];
    prefix = prefix * 31 + '#';
    for (long i = 0; i < count; i++) {
        const uint8_t *key = keys + (size_t)i * width;
        uint32_t hash = prefix;
        for (uint32_t at = 0; at < width; at++) hash = hash * 31 + key[at];
        int32_t h = (int32_t)hash;
        uint32_t positive = h < 0 ? (h == INT32_MIN ? 0 : (uint32_t)-h) : (uint32_t)h;
        uint32_t number = get32(idx + HEADER + (size_t)SLOT * (positive % slot_num));
        while (number) {
            const uint8_t *entry = idx + HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * number;
            number = get32(entry + 16);
            if (get32(entry) != positive) continue;
            size_t pos = get64(entry + 4);
            record r = take_apart(segment + pos, pos);
            if (r.topic_size != topic_size || memcmp(r.topic, topic, topic_size) || !has_key(&r, key, width)) continue;
            if (used + r.body_size > ROOM) used = 0;
            memcpy(bodies + used, r.body, r.body_size);
            used += r.body_size;
            *sum += r.body_size + (int64_t)get64(segment + pos + 20);
            records++;
        }
    }
    return records;
}

int main(int argc, char **argv) {
    choose_crc();
    if (argc == 2 && !strcmp(argv[1], "--crc")) {
        puts(crc_name);
        return 0;
    }
    if (argc != 8) { fprintf(stderr, "query LOG INDEX SLOTS TOPIC KEYS WIDTH COUNT\n"); return 2; }
    segment = map_whole(argv[1]);
    idx = map_whole(argv[2]);
    slot_num = (uint32_t)strtoul(argv[3], NULL, 10);
    const uint8_t *keys = map_whole(argv[5]);
    uint32_t width = (uint32_t)strtoul(argv[6], NULL, 10);
    long count = strtol(argv[7], NULL, 10);
    int64_t sum = 0;
    ask(argv[4], keys, width, count, &sum);
    sum = 0;
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    long records = ask(argv[4], keys, width, count, &sum);
    clock_gettime(CLOCK_MONOTONIC, &to);
    long long nanoseconds = (long long)(to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
    printf("%lld %ld %lld\n", nanoseconds, records, (long long)sum);
    return 0;
}
