/* Callgrind's client requests as functions, so that Python can say which part of a run counts.  Outside of valgrind they do nothing. */

#include <valgrind/callgrind.h>

int running_on_valgrind(void) { return (int)RUNNING_ON_VALGRIND; }

void begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

/* Writes what was counted since the last begin or mark under this name, and counts from 0 again. */
void mark(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }

void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
