/* Report the calls of gcc's -fsanitize-coverage=trace-pc,trace-cmp to libFuzzer.
 *
 * libFuzzer no longer takes trace-pc: it wants a table of 8-bit counters, one for each edge, and a table of where the edges
 * are.  clang writes both into an object; gcc writes only calls.  So this looks for those calls in the machine code of the
 * module that it is linked into, when the module is loaded, numbers them, and registers as many counters.  A call then finds its
 * number by the address that it returns to: no two edges share a counter.
 *
 * Linked into every module of a build with RMQSTORE_SANITIZE=fuzzer, and into no other.  x86-64 and ELF only, which is where
 * atheris, whose libFuzzer this is for, has wheels.  What compares numbers goes to libFuzzer itself; only comparisons of
 * floating-point numbers have no taker there.
 */

#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNSEEN __attribute__((no_sanitize_coverage))
#define INSIDE __attribute__((visibility("hidden")))

void __sanitizer_cov_8bit_counters_init(uint8_t *begin, uint8_t *end);
void __sanitizer_cov_pcs_init(const uintptr_t *begin, const uintptr_t *end);

/* Number 0 is of no edge: a call that the search did not find counts there. */
static uint8_t *counters;
static uint32_t *number_of; /* Indexed by return address, relative to `code`. */
static uintptr_t code;
static size_t code_size;

INSIDE UNSEEN void __sanitizer_cov_trace_pc(void) {
    uintptr_t at = (uintptr_t)__builtin_return_address(0) - code;
    if (at < code_size && counters != NULL) {
        uint8_t *counter = &counters[number_of[at]];
        /* Never back to 0, which would say that the edge was not taken. */
        *counter += *counter == 255 ? 0 : 1;
    }
}

INSIDE UNSEEN void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
INSIDE UNSEEN void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }

/* Find the machine code that contains this function. */
static UNSEEN int find_code(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t begin = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && part->p_flags & PF_X && (uintptr_t)find_code - begin < part->p_memsz) {
            code = begin;
            code_size = part->p_memsz;
            return 1;
        }
    }
    return 0;
}

__attribute__((constructor)) static UNSEEN void register_edges(void) {
    const uint8_t *bytes;
    uintptr_t *places;
    uint32_t count = 0;
    if (!dl_iterate_phdr(find_code, NULL) || code_size < 5)
        return;
    bytes = (const uint8_t *)code;
    number_of = calloc(code_size, sizeof *number_of);
    if (number_of == NULL)
        abort();
    for (size_t at = 0; at + 5 <= code_size; at++) {
        int32_t distance;
        if (bytes[at] != 0xE8) /* call, relative to what follows */
            continue;
        memcpy(&distance, bytes + at + 1, 4);
        if (code + at + 5 + (intptr_t)distance == (uintptr_t)__sanitizer_cov_trace_pc)
            number_of[at + 5] = ++count;
    }
    counters = calloc(count + 1, 1);
    places = calloc(2 * (count + 1), sizeof *places);
    if (counters == NULL || places == NULL)
        abort();
    places[0] = code;
    for (size_t at = 0; at < code_size; at++)
        if (number_of[at])
            places[2 * number_of[at]] = code + at;
    __sanitizer_cov_8bit_counters_init(counters, counters + count + 1);
    __sanitizer_cov_pcs_init(places, places + 2 * (count + 1));
}
