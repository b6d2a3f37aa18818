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
#include <time.h>

#include "index.h"

enum { ROOM = 1 << 22 };

static uint8_t bodies[ROOM];

static long ask(const char *topic, const uint8_t *keys, uint32_t width, long count, int64_t *sum) {
    uint32_t topic_size = (uint32_t)strlen(topic), prefix = prefix_of(topic, topic_size);
    long records = 0;
    size_t used = 0, pos;
    for (long i = 0; i < count; i++) {
        chain c = chain_of(topic, topic_size, prefix, keys + (size_t)i * width, width);
        for (record r; next_record(&c, &r, &pos); records++) {
            if (used + r.body_size > ROOM) used = 0;
            memcpy(bodies + used, r.body, r.body_size);
            used += r.body_size;
            *sum += r.body_size + (int64_t)get64(segment + pos + 20);
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
