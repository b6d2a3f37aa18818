/* The limit of a scan: the records of one segment as columns, in one plain loop over mapped memory.
 *
 *   scan LOG END walk|handful|body|all
 *   scan --crc
 *
 * Steps over the records, checks the CRC of every body, takes the properties apart, and lays the columns out as Arrow does, 8192 rows a
 * batch, into the same memory again and again: "walk" lays out none, "handful" is queue_id, queue_offset, keys, store_timestamp, corrupt; "body" these and the
 * body; "all" what a scan gives by default. No text is looked at for being UTF-8, and nothing checked that would not crash it. The log
 * is gone through once before the clock starts, so that its pages are mapped. Prints nanoseconds, records, and the sum of the body
 * lengths and queue offsets.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

#include "log.h"

enum { ROWS = 8192 };

typedef struct { int32_t *offsets; uint8_t *data; size_t room; int32_t used, rows; } text;

static void *memory(size_t size) {
    void *p = malloc(size);
    if (!p) fail("malloc");
    return p;
}

static text column(size_t values) {
    text made = {memory((values + 1) * 4), memory(1 << 16), 1 << 16, 0, 0};
    made.offsets[0] = 0;
    return made;
}

static void empty(text *t) { t->used = t->rows = 0; }

static void add(text *t, const uint8_t *p, uint32_t size) {
    if (t->used + (size_t)size > t->room) {
        t->room = 2 * (t->used + (size_t)size);
        if (!(t->data = realloc(t->data, t->room))) fail("realloc");
    }
    memcpy(t->data + t->used, p, size);
    t->used += (int32_t)size;
    t->offsets[++t->rows] = t->used;
}

/* Hosts are mostly those of the record before. */
typedef struct { uint8_t bytes[20]; uint32_t size; char text[64]; uint32_t length; } host;

static void add_host(text *t, host *last, const uint8_t *p, uint32_t size) {
    if (last->size != size || memcmp(last->bytes, p, size)) {
        memcpy(last->bytes, p, last->size = size);
        if (size != 8) { fprintf(stderr, "an IPv6 host\n"); exit(1); }
        last->length = (uint32_t)snprintf(last->text, sizeof last->text, "%d.%d.%d.%d:%u", p[0], p[1], p[2], p[3], get32(p + 4));
    }
    add(t, (const uint8_t *)last->text, last->length);
}

static void add_id(text *t, const uint8_t *p, uint64_t phy_offset) {
    uint8_t bytes[16], digits[32];
    memcpy(bytes, p, 8);
    phy_offset = __builtin_bswap64(phy_offset);
    memcpy(bytes + 8, &phy_offset, 8);
    for (int i = 0; i < 16; i++) {
        digits[2 * i] = (uint8_t)"0123456789ABCDEF"[bytes[i] >> 4];
        digits[2 * i + 1] = (uint8_t)"0123456789ABCDEF"[bytes[i] & 15];
    }
    add(t, digits, 32);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--crc")) {
        choose_crc();
        puts(crc_name);
        return 0;
    }
    if (argc != 4) { fprintf(stderr, "scan LOG END walk|handful|body|all\n"); return 2; }
    size_t end = strtoull(argv[2], NULL, 10);
    int only_walks = !strcmp(argv[3], "walk"), all = !strcmp(argv[3], "all"), with_body = all || !strcmp(argv[3], "body");
    choose_crc();
    int fd = open(argv[1], O_RDONLY);
    if (fd < 0) fail(argv[1]);
    const uint8_t *log = mmap(NULL, end, PROT_READ, MAP_SHARED, fd, 0);
    if (log == MAP_FAILED) fail(argv[1]);

    int32_t *queue_id = memory(4 * ROWS), *sizes = memory(4 * ROWS), *flag = memory(4 * ROWS), *sys_flags = memory(4 * ROWS);
    int32_t *times = memory(4 * ROWS), *key_rows = memory(4 * (ROWS + 1)), *property_rows = memory(4 * (ROWS + 1));
    int64_t *queue_offset = memory(8 * ROWS), *phy_offset = memory(8 * ROWS), *born = memory(8 * ROWS), *stored = memory(8 * ROWS);
    int64_t *prepared = memory(8 * ROWS);
    uint8_t *corrupt = memory(ROWS);
    /* Values of lists: more than fit end the loop. */
    enum { VALUES = 64 * ROWS };
    text topics = column(ROWS), ids = column(ROWS), keys = column(VALUES), tags = column(ROWS), bodies = column(ROWS);
    text names = column(VALUES), values = column(VALUES), born_hosts = column(ROWS), store_hosts = column(ROWS);
    host last_born = {{0}, 0, {0}, 0}, last_store = {{0}, 0, {0}, 0};

    long records = 0;
    int64_t sum = 0;
    struct timespec from, to;
    for (int counts = 0; counts < 2; counts++) {
        int32_t n = ROWS;
        records = 0;
        sum = 0;
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (size_t pos = 0; pos < end;) {
            if (n == ROWS) {
                n = 0;
                text *texts[] = {&topics, &ids, &keys, &tags, &bodies, &names, &values, &born_hosts, &store_hosts};
                for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) empty(texts[i]);
                key_rows[0] = property_rows[0] = 0;
            }
            const uint8_t *p = log + pos;
            record r = take_apart(p, pos);
            if (only_walks) {
                sum += r.body_size + (int64_t)get64(p + 20);
                records++;
                pos += r.size;
                continue;
            }
            /* A wrong CRC ended the program. */
            corrupt[n] = 0;
            stored[n] = (int64_t)get64(r.stored);
            if (with_body) add(&bodies, r.body, r.body_size);
            const uint8_t *key = NULL, *tag = NULL;
            uint32_t keys_size = 0, tag_size = 0;
            if (names.rows > VALUES - 4096 || keys.rows > VALUES - 4096) { fprintf(stderr, "too many values\n"); return 1; }
            property each;
            for (const uint8_t *name = r.properties; take_property(name, r.end, &each); name = each.next + 1) {
                if (is_named(&each, "KEYS")) { key = each.value; keys_size = (uint32_t)(each.next - key); }
                if (is_named(&each, "TAGS")) { tag = each.value; tag_size = (uint32_t)(each.next - tag); }
                if (all) {
                    add(&names, name, (uint32_t)(each.value - 1 - name));
                    add(&values, each.value, (uint32_t)(each.next - each.value));
                }
            }
            for (const uint8_t *keys_end = key + keys_size; key < keys_end;) {
                const uint8_t *space = memchr(key, ' ', (size_t)(keys_end - key));
                if (!space) space = keys_end;
                if (space > key) add(&keys, key, (uint32_t)(space - key));
                key = space + 1;
            }
            key_rows[n + 1] = keys.rows;
            queue_id[n] = (int32_t)get32(p + 12);
            queue_offset[n] = (int64_t)get64(p + 20);
            sum += r.body_size + queue_offset[n];
            if (all) {
                property_rows[n + 1] = names.rows;
                add(&topics, r.topic, r.topic_size);
                add(&tags, tag, tag_size);
                add_id(&ids, r.store_host, pos);
                add_host(&born_hosts, &last_born, p + 48, r.born_size);
                add_host(&store_hosts, &last_store, r.store_host, (uint32_t)(r.consumed - r.store_host));
                phy_offset[n] = (int64_t)pos;
                sizes[n] = (int32_t)r.size;
                flag[n] = (int32_t)get32(p + 16);
                sys_flags[n] = (int32_t)get32(p + 36);
                born[n] = (int64_t)get64(p + 40);
                times[n] = (int32_t)get32(r.consumed);
                prepared[n] = (int64_t)get64(r.consumed + 4);
            }
            n++;
            records++;
            pos += r.size;
        }
        clock_gettime(CLOCK_MONOTONIC, &to);
    }
    printf("%lld %ld %lld\n", (long long)(to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec, records, (long long)sum);
    return 0;
}
