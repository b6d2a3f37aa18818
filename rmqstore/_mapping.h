/* How a file comes into memory, and how it leaves.

   Owns the calls of mmap for a `Region`.  A build that AddressSanitizer watches has pages around each mapping that
   nobody may touch, and the rest of its last page is poisoned; a mapping that is gone stays reserved for a while.  So
   a read of one byte too far, too early or too late ends the process with a report, where elsewhere it may meet
   another file. */

#ifndef RMQSTORE_MAPPING_H
#define RMQSTORE_MAPPING_H

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_bytes.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

#if RMQ_WATCHES_ADDRESSES
#include <sanitizer/asan_interface.h>

#define RMQ_GUARD_SIZE 65536
/* How many mappings that are gone stay reserved.  Whoever maps and unmaps has the GIL. */
#define RMQ_GONE 64
static struct { char *area; size_t size; } rmq_gone[RMQ_GONE];
static int rmq_gone_at = 0;

static size_t rmq_whole_pages(size_t size) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

/* Reserve address space for `size` bytes between two guards. */
static char *rmq_reserve(size_t size) {
    const size_t whole = rmq_whole_pages(size);
    char *area = (char *)mmap(NULL, whole + 2 * RMQ_GUARD_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                              -1, 0);
    if (area == (char *)MAP_FAILED) return NULL;
    return area + RMQ_GUARD_SIZE;
}

static void rmq_guard(char *base, size_t size) {
    ASAN_POISON_MEMORY_REGION(base - RMQ_GUARD_SIZE, RMQ_GUARD_SIZE);
    ASAN_POISON_MEMORY_REGION(base + size, rmq_whole_pages(size) - size + RMQ_GUARD_SIZE);
}

static void rmq_unmap(void *base, size_t size) {
    const size_t whole = rmq_whole_pages(size);
    char *area = (char *)base - RMQ_GUARD_SIZE, *oldest = rmq_gone[rmq_gone_at].area;
    const size_t oldest_size = rmq_gone[rmq_gone_at].size;
    mmap(base, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    /* Whatever maps memory here later knows nothing of what was poisoned. */
    ASAN_UNPOISON_MEMORY_REGION(area, RMQ_GUARD_SIZE);
    ASAN_UNPOISON_MEMORY_REGION((char *)base + size, whole - size + RMQ_GUARD_SIZE);
    rmq_gone[rmq_gone_at].area = area;
    rmq_gone[rmq_gone_at].size = whole + 2 * RMQ_GUARD_SIZE;
    rmq_gone_at = (rmq_gone_at + 1) % RMQ_GONE;
    if (oldest) munmap(oldest, oldest_size);
}
#else
#define rmq_guard(base, size) ((void)0)
static void rmq_unmap(void *base, size_t size) { munmap(base, size); }
#endif

/* `size` bytes of address space, NULL where the system refuses.  Where the file has only `length` of them, pages of
   zeros that belong to no file lie after those of the file; the system fills the file's last page with zeros itself.
   */
static void *rmq_map(int fd, size_t size, size_t length, int prot) {
    void *place = NULL, *base;
    int fixed = 0;
#if RMQ_WATCHES_ADDRESSES
    if (!(place = rmq_reserve(size))) return NULL;
    fixed = MAP_FIXED;
#endif
    if (length >= size) {
        base = mmap(place, size, prot, MAP_SHARED | fixed, fd, 0);
    } else {
        base = mmap(place, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
        if (base != MAP_FAILED && length > 0
                && mmap(base, length, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            const int refused = errno;
            munmap(base, size);
            errno = refused;
            base = MAP_FAILED;
        }
    }
    if (base == MAP_FAILED) {
#if RMQ_WATCHES_ADDRESSES
        const int refused = errno;
        munmap((char *)place - RMQ_GUARD_SIZE, rmq_whole_pages(size) + 2 * RMQ_GUARD_SIZE);
        errno = refused;
#endif
        return NULL;
    }
    rmq_guard((char *)base, size);
    return base;
}

#endif
