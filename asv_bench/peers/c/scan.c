/* The limit of a scan: the records of one segment as columns, in one plain loop over mapped memory.
 *
 *   scan LOG END walk|handful|body|all [views] [release] [two]
 *   scan --crc
 *
 * Steps over the records, checks the CRC of every body, takes the properties apart, and lays the columns out as Arrow
 * does, 8192 rows a batch, into the same memory again and again: "walk" lays out none, "handful" is queue_id,
 * queue_offset, keys, store_timestamp, corrupt; "body" these and the body; "all" what a scan gives by default. No text
 * is looked at for being UTF-8, and nothing checked that would not crash it.
 *
 * The log is gone through once before the clock starts, so that its pages are mapped; with "release" the loop gives
 * each 32 MiB back once it is past, as a scan does that keeps its memory small, so that both passes map every page.
 * "views" lays texts and bodies out as Arrow's views of 16 bytes. "two" gives each of two threads half of the log.
 * Prints nanoseconds, records, and the sum of the body lengths and queue offsets.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include "log.h"

enum { ROWS = 8192, WINDOW = 32 << 20 };

/* What the command line chose. */
static int only_walks, with_body, all, as_views, releases;
static const uint8_t *mapped;

/* A view: length, then the text itself, or its first 4 bytes, the buffer's number and the position in it. */
typedef struct { uint32_t size; uint8_t bytes[12]; } view;
typedef struct { int32_t *offsets; view *views; uint8_t *data; size_t room; int32_t used, rows; } text;

static void *memory(size_t size) {
    void *p = malloc(size);
    if (!p) fail("malloc");
    return p;
}

static text column(size_t values) {
    text made = {memory((values + 1) * 4), memory(values * sizeof(view)), memory(1 << 16), 1 << 16, 0, 0};
    made.offsets[0] = 0;
    return made;
}

static void empty(text *t) { t->used = t->rows = 0; }

static void put_view(text *t, const uint8_t *p, uint32_t size, int32_t buffer, int32_t pos) {
    view *v = t->views + t->rows++;
    v->size = size;
    if (size <= sizeof v->bytes) {
        memset(v->bytes, 0, sizeof v->bytes);
        memcpy(v->bytes, p, size);
        return;
    }
    memcpy(v->bytes, p, 4);
    memcpy(v->bytes + 4, &buffer, 4);
    memcpy(v->bytes + 8, &pos, 4);
}

static void copy(text *t, const uint8_t *p, uint32_t size) {
    if (t->used + (size_t)size > t->room) {
        t->room = 2 * (t->used + (size_t)size);
        if (!(t->data = realloc(t->data, t->room))) fail("realloc");
    }
    memcpy(t->data + t->used, p, size);
    t->used += (int32_t)size;
}

/* A text that stands in the log. */
static void add(text *t, const uint8_t *p, uint32_t size) {
    if (as_views) {
        put_view(t, p, size, 0, (int32_t)(p - mapped));
        return;
    }
    copy(t, p, size);
    t->offsets[++t->rows] = t->used;
}

/* A text that was made, and with views lies in a buffer of the batch. */
static void add_made(text *t, const uint8_t *p, uint32_t size) {
    if (as_views) {
        int32_t pos = t->used;
        copy(t, p, size);
        put_view(t, p, size, 1, pos);
        return;
    }
    add(t, p, size);
}

/* Hosts are mostly those of the record before. */
typedef struct { uint8_t bytes[20]; uint32_t size; char text[64]; uint32_t length; int32_t pos; } host;

static void add_host(text *t, host *last, const uint8_t *p, uint32_t size) {
    int is_other = last->size != size || memcmp(last->bytes, p, size);
    if (is_other) {
        memcpy(last->bytes, p, last->size = size);
        if (size != 8) { fprintf(stderr, "an IPv6 host\n"); exit(1); }
        last->length = (uint32_t)snprintf(last->text, sizeof last->text, "%d.%d.%d.%d:%u", p[0], p[1], p[2], p[3],
                                          get32(p + 4));
    }
    if (!as_views) {
        add(t, (const uint8_t *)last->text, last->length);
        return;
    }
    /* One text for all rows of the batch that have the same host. */
    if (is_other || t->rows == 0) {
        last->pos = t->used;
        copy(t, (const uint8_t *)last->text, last->length);
    }
    put_view(t, (const uint8_t *)last->text, last->length, 1, last->pos);
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
    add_made(t, digits, 32);
}

static void release(size_t begin, size_t end) {
    begin = (begin + 4095) / 4096 * 4096;
    end = end / 4096 * 4096;
    if (begin < end) madvise((void *)(mapped + begin), end - begin, MADV_DONTNEED);
}

/* The memory that a thread lays columns out in, batch after batch; lists may have 64 values a row. */
enum { VALUES = 64 * ROWS };
typedef struct {
    int32_t queue_id[ROWS], sizes[ROWS], flag[ROWS], sys_flags[ROWS], times[ROWS];
    int32_t key_rows[ROWS + 1], property_rows[ROWS + 1];
    int64_t queue_offset[ROWS], phy_offset[ROWS], born[ROWS], stored[ROWS], prepared[ROWS];
    uint8_t corrupt[ROWS];
    text topics, ids, keys, tags, bodies, names, values, born_hosts, store_hosts;
    host last_born, last_store;
} columns;

static columns *empty_columns(void) {
    columns *made = memory(sizeof *made);
    memset(made, 0, sizeof *made);
    made->topics = column(ROWS), made->ids = column(ROWS), made->tags = column(ROWS), made->bodies = column(ROWS);
    made->born_hosts = column(ROWS), made->store_hosts = column(ROWS);
    made->keys = column(VALUES), made->names = column(VALUES), made->values = column(VALUES);
    return made;
}

/* What one thread does, and what came of it; the middle is the last record that begins in the first half. */
typedef struct { columns *columns; size_t begin, end, middle; long records; int64_t sum; } work;

static void *scan(void *given) {
    work *work = given;
    columns *c = work->columns;
    long records = 0;
    int64_t sum = 0;
    size_t passed = work->begin;
    size_t half = work->begin + (work->end - work->begin) / 2, middle = work->begin;
    int32_t n = ROWS;
    for (size_t pos = work->begin; pos < work->end;) {
        if (n == ROWS) {
            n = 0;
            text *texts[] = {&c->topics, &c->ids, &c->keys, &c->tags, &c->bodies, &c->names, &c->values,
                             &c->born_hosts, &c->store_hosts};
            for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) empty(texts[i]);
            c->key_rows[0] = c->property_rows[0] = 0;
        }
        if (releases && pos - passed >= WINDOW) {
            release(passed, pos);
            passed = pos;
        }
        if (pos < half) middle = pos;
        const uint8_t *p = mapped + pos;
        record r = take_apart(p, pos);
        if (only_walks) {
            sum += r.body_size + (int64_t)get64(p + 20);
            records++;
            pos += r.size;
            continue;
        }
        /* A wrong CRC ended the program. */
        c->corrupt[n] = 0;
        c->stored[n] = (int64_t)get64(r.stored);
        if (with_body) add(&c->bodies, r.body, r.body_size);
        const uint8_t *key = NULL, *tag = NULL;
        uint32_t keys_size = 0, tag_size = 0;
        if (c->names.rows > VALUES - 4096 || c->keys.rows > VALUES - 4096) {
            fprintf(stderr, "too many values\n"); exit(1);
        }
        property each;
        for (const uint8_t *name = r.properties; take_property(name, r.end, &each); name = each.next + 1) {
            if (is_named(&each, "KEYS")) { key = each.value; keys_size = (uint32_t)(each.next - key); }
            if (is_named(&each, "TAGS")) { tag = each.value; tag_size = (uint32_t)(each.next - tag); }
            if (all) {
                add(&c->names, name, (uint32_t)(each.value - 1 - name));
                add(&c->values, each.value, (uint32_t)(each.next - each.value));
            }
        }
        for (const uint8_t *keys_end = key + keys_size; key < keys_end;) {
            const uint8_t *space = memchr(key, ' ', (size_t)(keys_end - key));
            if (!space) space = keys_end;
            if (space > key) add(&c->keys, key, (uint32_t)(space - key));
            key = space + 1;
        }
        c->key_rows[n + 1] = c->keys.rows;
        c->queue_id[n] = (int32_t)get32(p + 12);
        c->queue_offset[n] = (int64_t)get64(p + 20);
        sum += r.body_size + c->queue_offset[n];
        if (all) {
            c->property_rows[n + 1] = c->names.rows;
            add(&c->topics, r.topic, r.topic_size);
            add(&c->tags, tag, tag_size);
            add_id(&c->ids, r.store_host, pos);
            add_host(&c->born_hosts, &c->last_born, p + 48, r.born_size);
            add_host(&c->store_hosts, &c->last_store, r.store_host, (uint32_t)(r.consumed - r.store_host));
            c->phy_offset[n] = (int64_t)pos;
            c->sizes[n] = (int32_t)r.size;
            c->flag[n] = (int32_t)get32(p + 16);
            c->sys_flags[n] = (int32_t)get32(p + 36);
            c->born[n] = (int64_t)get64(p + 40);
            c->times[n] = (int32_t)get32(r.consumed);
            c->prepared[n] = (int64_t)get64(r.consumed + 4);
        }
        n++;
        records++;
        pos += r.size;
    }
    if (releases) release(passed, work->end);
    work->records = records;
    work->sum = sum;
    work->middle = middle;
    return NULL;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--crc")) {
        choose_crc();
        puts(crc_name);
        return 0;
    }
    if (argc < 4) { fprintf(stderr, "scan LOG END walk|handful|body|all [views] [release] [two]\n"); return 2; }
    size_t end = strtoull(argv[2], NULL, 10);
    only_walks = !strcmp(argv[3], "walk");
    all = !strcmp(argv[3], "all");
    with_body = all || !strcmp(argv[3], "body");
    int threads = 1;
    for (int i = 4; i < argc; i++) {
        if (!strcmp(argv[i], "views")) as_views = 1;
        else if (!strcmp(argv[i], "release")) releases = 1;
        else if (!strcmp(argv[i], "two")) threads = 2;
        else { fprintf(stderr, "scan knows no %s\n", argv[i]); return 2; }
    }
    choose_crc();
    int fd = open(argv[1], O_RDONLY);
    if (fd < 0) fail(argv[1]);
    mapped = mmap(NULL, end, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) fail(argv[1]);

    /* The first passes map the pages, touch what the threads write to, and find where the second thread may begin. */
    work each[2] = {{empty_columns(), 0, end, 0, 0, 0}, {empty_columns(), 0, end, 0, 0, 0}};
    for (int i = 0; i < threads; i++) scan(&each[i]);
    if (threads == 2) each[0].end = each[1].begin = each[0].middle;
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    pthread_t other;
    if (threads == 2 && pthread_create(&other, NULL, scan, &each[1])) fail("pthread_create");
    scan(&each[0]);
    if (threads == 2) {
        if (pthread_join(other, NULL)) fail("pthread_join");
        each[0].records += each[1].records;
        each[0].sum += each[1].sum;
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    long long nanoseconds = (long long)(to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
    printf("%lld %ld %lld\n", nanoseconds, each[0].records, (long long)each[0].sum);
    return 0;
}
