/* Moves the wall clock of single processes, and no other clock.
 *
 * Loaded by LD_PRELOAD into drivers and slots. CHAOS_CLOCKS names a directory. While it has a file
 * PID, CLOCK_REALTIME of that process is later by the seconds in the file, which may be negative.
 * The first look at the moved clock creates PID.seen. Waits until a moment of the moved clock last as
 * long as they should: the kernel knows the true clock alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
#define DAY_S (24 * 3600)

static long read_offset_s(void) {
    const char *directory = getenv("CHAOS_CLOCKS");
    if (directory == NULL) return 0;
    int before = errno;
    long offset = 0;
    char path[PATH_MAX], text[32];
    snprintf(path, sizeof path, "%s/%ld", directory, (long)syscall(SYS_getpid));
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t length = syscall(SYS_read, fd, text, sizeof text - 1);
        syscall(SYS_close, fd);
        if (length > 0) {
            text[length] = '\0';
            offset = strtol(text, NULL, 10);
        }
    }
    if (offset != 0) {
        snprintf(path, sizeof path, "%s/%ld.seen", directory, (long)syscall(SYS_getpid));
        fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (fd >= 0) syscall(SYS_close, fd);
    }
    errno = before;
    return offset;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += read_offset_s();
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    int status = syscall(SYS_gettimeofday, now, zone);
    if (status == 0) now->tv_sec += read_offset_s();
    return status;
}

time_t time(time_t *now) {
    struct timespec moved;
    clock_gettime(CLOCK_REALTIME, &moved);
    if (now != NULL) *now = moved.tv_sec;
    return moved.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    if (base != TIME_UTC) return 0;
    return clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

/* Return `moment` by the true clock. Moments of CLOCK_MONOTONIC are days away from now. */
static struct timespec to_true_clock(const struct timespec *moment) {
    struct timespec result = *moment, now;
    long offset = read_offset_s();
    if (offset == 0) return result;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    long from_true = labs(moment->tv_sec - now.tv_sec);
    long from_moved = labs(moment->tv_sec - now.tv_sec - offset);
    if (from_moved < from_true && from_moved < DAY_S) result.tv_sec -= offset;
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec true_moment = to_true_clock(until);
    /* The default version of the symbol: dlsym may find the one of old programs. */
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (next == NULL) {
        next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        if (next == NULL) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    return next(condition, mutex, &true_moment);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec true_moment = to_true_clock(until);
    return NEXT(int, pthread_mutex_timedlock, pthread_mutex_t *, const struct timespec *)(mutex, &true_moment);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec true_moment = to_true_clock(until);
    return NEXT(int, sem_timedwait, sem_t *, const struct timespec *)(semaphore, &true_moment);
}

int cnd_timedwait(cnd_t *condition, mtx_t *mutex, const struct timespec *until) {
    struct timespec true_moment = to_true_clock(until);
    return NEXT(int, cnd_timedwait, cnd_t *, mtx_t *, const struct timespec *)(condition, mutex, &true_moment);
}

int mtx_timedlock(mtx_t *mutex, const struct timespec *until) {
    struct timespec true_moment = to_true_clock(until);
    return NEXT(int, mtx_timedlock, mtx_t *, const struct timespec *)(mutex, &true_moment);
}
