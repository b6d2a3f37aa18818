/* The limit of a rebuild, and of appending: queues and index from one segment of the log, in one plain loop over
 * mapped memory.
 *
 *   rebuild LOG END FOLDER SLOTS ENTRIES QUEUE_BYTES [force|append|append-more]
 *   rebuild --crc
 *
 * Steps over the records, checks the CRC of every body, looks for the keys and the tag in the properties, and writes
 * the 20-byte units of each queue and the slots and entries of an index file into new files of FOLDER. No batching, no
 * prefetching, no check of anything that would not crash it. --crc says how the CRC is computed. "force" writes
 * everything to the disk before the clock stops. "append" also copies every record into a new, allocated segment of
 * FOLDER, as a put does once the record stands in memory; it goes through the log before the clock starts, whose
 * records stand for those that a caller has made. "append-more" does so after a gigabyte: before the clock starts
 * that was written to a segment before, the next one was allocated, and the slots of the index were touched. Prints
 * nanoseconds, units, index entries.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "log.h"

enum { HEADER = 40, SLOT = 4, ENTRY = 20, UNIT = 20, MAX_QUEUES = 4096, SEGMENT = 1 << 30 };

static void put32(uint8_t *p, uint32_t v) { v = __builtin_bswap32(v); memcpy(p, &v, 4); }
static void put64(uint8_t *p, uint64_t v) { v = __builtin_bswap64(v); memcpy(p, &v, 8); }

/* ----------------------------------------------------------------------------------------------------------------- output */

static uint8_t *map_file(const char *folder, const char *name, size_t size, int allocate) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0644);
    if (fd < 0 || ftruncate(fd, (off_t)size) || (allocate && posix_fallocate(fd, 0, (off_t)size))) fail(path);
    uint8_t *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) fail(path);
    close(fd);
    return p;
}

static uint8_t *map_new(const char *folder, const char *name, size_t size) {
    return map_file(folder, name, size, 0);
}

static struct queue { const uint8_t *topic; uint32_t length, id; uint8_t *units; } queues[MAX_QUEUES];
static const char *folder;
static size_t queue_bytes;
static long queue_num;

static struct queue *find_queue(const uint8_t *topic, uint32_t length, uint32_t id) {
    uint32_t h = id * 0x9E3779B1u;
    for (uint32_t i = 0; i < length; i++) h = h * 31 + topic[i];
    for (;; h++) {
        struct queue *q = &queues[h % MAX_QUEUES];
        if (!q->units) {
            char name[32];
            snprintf(name, sizeof name, "queue%ld", queue_num++);
            *q = (struct queue){topic, length, id, map_new(folder, name, queue_bytes)};
            return q;
        }
        if (q->length == length && q->id == id && !memcmp(q->topic, topic, length)) return q;
    }
}

static uint8_t *idx;
static uint32_t slot_num, count = 1, used;
static uint64_t begin_time;

static void put_index(uint32_t hash, uint64_t phy_offset, uint64_t time) {
    int32_t h = (int32_t)hash;
    uint32_t key = h < 0 ? (h == INT32_MIN ? 0 : (uint32_t)-h) : (uint32_t)h;
    uint8_t *slot = idx + HEADER + (size_t)SLOT * (key % slot_num);
    uint8_t *entry = idx + HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * count;
    uint32_t previous = get32(slot);
    if (count == 1) {
        begin_time = time;
        put64(idx, time);
        put64(idx + 16, phy_offset);
    }
    if (!previous) used++;
    put32(entry, key);
    put64(entry + 4, phy_offset);
    put32(entry + 12, (uint32_t)((time - begin_time) / 1000));
    put32(entry + 16, previous);
    put32(slot, count++);
}

static uint32_t hash_on(uint32_t h, const uint8_t *p, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) h = h * 31 + p[i];
    return h;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--crc")) {
        choose_crc();
        puts(crc_name);
        return 0;
    }
    if (argc < 7) { fprintf(stderr, "rebuild LOG END FOLDER SLOTS ENTRIES QUEUE_BYTES [force|append|append-more]\n"); return 2; }
    int forces = argc > 7 && !strcmp(argv[7], "force"), more = argc > 7 && !strcmp(argv[7], "append-more");
    int appends = more || (argc > 7 && !strcmp(argv[7], "append"));
    if (argc > 7 && !forces && !appends) { fprintf(stderr, "rebuild knows no %s\n", argv[7]); return 2; }
    size_t end = strtoull(argv[2], NULL, 10);
    folder = argv[3];
    slot_num = (uint32_t)strtoul(argv[4], NULL, 10);
    uint32_t entries = (uint32_t)strtoul(argv[5], NULL, 10);
    queue_bytes = strtoull(argv[6], NULL, 10);
    choose_crc();

    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    int fd = open(argv[1], O_RDONLY);
    if (fd < 0) fail(argv[1]);
    const uint8_t *log = mmap(NULL, end, PROT_READ, MAP_SHARED, fd, 0);
    if (log == MAP_FAILED) fail(argv[1]);
    size_t index_size = HEADER + (size_t)SLOT * slot_num + (size_t)ENTRY * entries;
    uint8_t *segment = NULL;
    if (more) {
        uint8_t *full = map_file(folder, "full", SEGMENT, 1);
        for (size_t at = 0; at < SEGMENT; at += end) memcpy(full + at, log, SEGMENT - at < end ? SEGMENT - at : end);
        segment = map_file(folder, "segment", SEGMENT, 1);
        idx = map_new(folder, "index", index_size);
        memset(idx, 0, HEADER + (size_t)SLOT * slot_num);
    }
    if (appends) {
        for (size_t pos = 0; pos < end;) pos += take_apart(log + pos, pos).size;
        clock_gettime(CLOCK_MONOTONIC, &from);
    }
    if (appends && !segment) segment = map_file(folder, "segment", SEGMENT, 1);
    if (!idx) idx = map_new(folder, "index", index_size);

    long units = 0;
    uint64_t last_offset = 0, last_time = 0;
    for (size_t pos = 0; pos < end;) {
        const uint8_t *p = log + pos;
        record r = take_apart(p, pos);
        if (appends) memcpy(segment + pos, p, r.size);
        uint64_t time = get64(r.stored);
        const uint8_t *keys = NULL, *tags = NULL;
        uint32_t keys_size = 0, tags_size = 0;
        property each;
        for (const uint8_t *name = r.properties; take_property(name, r.end, &each); name = each.next + 1) {
            if (is_named(&each, "KEYS")) { keys = each.value; keys_size = (uint32_t)(each.next - keys); }
            if (is_named(&each, "TAGS")) { tags = each.value; tags_size = (uint32_t)(each.next - tags); }
        }
        struct queue *queue = find_queue(r.topic, r.topic_size, get32(p + 12));
        uint8_t *unit = queue->units + UNIT * get64(p + 20);
        put64(unit, pos);
        put32(unit + 8, r.size);
        put64(unit + 12, (uint64_t)(int64_t)(int32_t)hash_on(0, tags, tags_size));
        units++;
        uint32_t prefix = hash_on(0, r.topic, r.topic_size) * 31 + '#';
        for (const uint8_t *key = keys, *keys_end = keys + keys_size; key < keys_end;) {
            const uint8_t *space = memchr(key, ' ', (size_t)(keys_end - key));
            if (!space) space = keys_end;
            if (space > key) put_index(hash_on(prefix, key, (uint32_t)(space - key)), pos, time);
            key = space + 1;
        }
        if (tags_size) put_index(hash_on((prefix * 31 + 'T') * 31 + '#', tags, tags_size), pos, time);
        last_offset = pos;
        last_time = time;
        pos += r.size;
    }
    put64(idx + 8, last_time);
    put64(idx + 24, last_offset);
    put32(idx + 32, used);
    put32(idx + 36, count);
    if (forces) {
        if (msync(idx, index_size, MS_SYNC)) fail("msync");
        for (int i = 0; i < MAX_QUEUES; i++)
            if (queues[i].units && msync(queues[i].units, queue_bytes, MS_SYNC)) fail("msync");
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    long long nanoseconds = (long long)(to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
    printf("%lld %ld %u\n", nanoseconds, units, count - 1);
    return 0;
}
