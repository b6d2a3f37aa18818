/*
 * The time of day that the sample's broker and clients see: it begins where SAMPLE_CLOCK says, in milliseconds since the
 * epoch, and goes as fast as the number after it says, 1 being real time.  Loaded with LD_PRELOAD.  Clocks that only go
 * forward, by which threads wait, stay as they are.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double begin_ms, rate;
static struct timespec loaded;

__attribute__((constructor)) static void load(void)
{
    const char *text = getenv("SAMPLE_CLOCK");
    char *rest;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &loaded);
    if (text == NULL)
        abort();
    begin_ms = strtod(text, &rest);
    rate = strtod(rest, NULL);
    if (begin_ms <= 0 || rate <= 0)
        abort();
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    long long nanoseconds;
    int answer = (int)syscall(SYS_clock_gettime, clock, time);
    if (answer != 0 || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return answer;
    nanoseconds = (time->tv_sec - loaded.tv_sec) * 1000000000LL + (time->tv_nsec - loaded.tv_nsec);
    nanoseconds = (long long)begin_ms * 1000000LL + (long long)((double)nanoseconds * rate);
    time->tv_sec = nanoseconds / 1000000000LL;
    time->tv_nsec = nanoseconds % 1000000000LL;
    return 0;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}
