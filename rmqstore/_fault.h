/* Faults in mappings: a page of a file that is gone while somebody reads or writes it (SIGBUS).

   Owns the list of the mappings of this process and the handler of SIGBUS.  Where the page belongs to a mapping in which an
   operation is under way, a page of zeros takes its place and the mapping is marked as lost, so that the operation goes on to
   its end and gives an error instead of its answer.  So does libwayland for shared memory (wl_shm_buffer_begin_access); a
   jump out of the handler would leave whatever the operation holds.  Every other SIGBUS goes to whoever handled it before.

   The handler takes no lock, calls only mmap, sigaction and raise, and reads slots that are never freed. */

#ifndef RMQSTORE_FAULT_H
#define RMQSTORE_FAULT_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_bytes.h"

/* One mapping.  `base` is written last when it is put in, and first when it is taken out. */
typedef struct {
    unsigned char *base;
    size_t size;
    int prot;
    int64_t *state, *lent;
    int *lost;
    int taken;
} rmq_watched;

enum { RMQ_WATCHED_NUM = 256 };

typedef struct rmq_watched_block {
    rmq_watched slots[RMQ_WATCHED_NUM];
    struct rmq_watched_block *next;
} rmq_watched_block;

static rmq_watched_block rmq_watched_first;
static struct sigaction rmq_fault_before;
static volatile sig_atomic_t rmq_fault_passed_on;

static int rmq_serve_fault(unsigned char *at) {
    rmq_watched_block *block;
    int i;
    long page = sysconf(_SC_PAGESIZE);
    for (block = &rmq_watched_first; block != NULL; block = __atomic_load_n(&block->next, __ATOMIC_ACQUIRE)) {
        for (i = 0; i < RMQ_WATCHED_NUM; i++) {
            rmq_watched *w = &block->slots[i];
            unsigned char *base = __atomic_load_n(&w->base, __ATOMIC_ACQUIRE);
            if (base == NULL || at < base || at >= base + w->size) continue;
            /* Views that are lent out pin too, and are read by others' code, which no error reaches. */
            if ((__atomic_load_n(w->state, __ATOMIC_ACQUIRE) & ~RMQ_CLOSED) <= __atomic_load_n(w->lent, __ATOMIC_ACQUIRE)) return 0;
            __atomic_store_n(w->lost, 1, __ATOMIC_RELEASE);
            return mmap((void *)((uintptr_t)at / (uintptr_t)page * (uintptr_t)page), (size_t)page, w->prot,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
        }
    }
    return 0;
}

static void rmq_on_fault(int number, siginfo_t *info, void *context) {
    int saved = errno;
    /* Above 0: the processor met it.  What `kill` sent has no address. */
    if (info->si_code > 0 && rmq_serve_fault((unsigned char *)info->si_addr)) {
        errno = saved;
        return;
    }
    if (!rmq_fault_passed_on && (rmq_fault_before.sa_flags & SA_SIGINFO)) {
        rmq_fault_passed_on = 1;
        rmq_fault_before.sa_sigaction(number, info, context);
    } else if (!rmq_fault_passed_on && rmq_fault_before.sa_handler != SIG_DFL && rmq_fault_before.sa_handler != SIG_IGN) {
        rmq_fault_passed_on = 1;
        rmq_fault_before.sa_handler(number);
    } else {
        /* The load or store is done once more and ends the process, as it would have without us. */
        struct sigaction end;
        memset(&end, 0, sizeof end);
        end.sa_handler = SIG_DFL;
        sigaction(number, &end, NULL);
        if (info->si_code <= 0) raise(number);
    }
    errno = saved;
}

/* Install the handler; it calls handlers that were installed in the meantime. */
static void rmq_catch_faults(void) {
    struct sigaction now, ours;
    const char *off = getenv("RMQSTORE_SIGBUS");
    if ((off != NULL && strcmp(off, "default") == 0) || sigaction(SIGBUS, NULL, &now) != 0) return;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == rmq_on_fault) return;
    rmq_fault_before = now;
    rmq_fault_passed_on = 0;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = rmq_on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, NULL);
}

/* The slot of a new mapping, NULL where there is no memory for one; faults in it then end the process. */
static rmq_watched *rmq_watch(unsigned char *base, size_t size, int prot, int64_t *state, int64_t *lent, int *lost) {
    rmq_watched_block *block = &rmq_watched_first;
    int i;
    for (;;) {
        for (i = 0; i < RMQ_WATCHED_NUM; i++) {
            rmq_watched *w = &block->slots[i];
            int no = 0;
            if (__atomic_load_n(&w->taken, __ATOMIC_RELAXED) || !__atomic_compare_exchange_n(&w->taken, &no, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
            w->size = size, w->prot = prot, w->state = state, w->lent = lent, w->lost = lost;
            __atomic_store_n(&w->base, base, __ATOMIC_RELEASE);
            return w;
        }
        rmq_watched_block *next = __atomic_load_n(&block->next, __ATOMIC_ACQUIRE);
        if (next == NULL) {
            rmq_watched_block *made = (rmq_watched_block *)calloc(1, sizeof *made);
            if (made == NULL) return NULL;
            if (__atomic_compare_exchange_n(&block->next, &next, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) next = made;
            else free(made);
        }
        block = next;
    }
}

static void rmq_unwatch(rmq_watched *w) {
    if (w == NULL) return;
    __atomic_store_n(&w->base, (unsigned char *)NULL, __ATOMIC_RELEASE);
    __atomic_store_n(&w->taken, 0, __ATOMIC_RELEASE);
}

#endif
