/* Lets writes, renames and flushes below one directory fail with EIO while a control file exists.
 *
 * Loaded by LD_PRELOAD into drivers and slots. CHAOS_FAILING_DISK names the control file, whose text is
 * the directory. Each failure appends a byte to the file with the same name and ".hits".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int read_directory(char *directory, size_t size) {
    const char *control = getenv("CHAOS_FAILING_DISK");
    if (control == NULL) return 0;
    int fd = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = syscall(SYS_read, fd, directory, size - 1);
    syscall(SYS_close, fd);
    if (length <= 0) return 0;
    directory[length] = '\0';
    return 1;
}

static int fail(void) {
    char hits[PATH_MAX];
    snprintf(hits, sizeof hits, "%s.hits", getenv("CHAOS_FAILING_DISK"));
    int fd = syscall(SYS_openat, AT_FDCWD, hits, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
        syscall(SYS_write, fd, ".", 1);
        syscall(SYS_close, fd);
    }
    errno = EIO;
    return 1;
}

static int path_fails(const char *path) {
    int before = errno;
    char directory[PATH_MAX];
    if (read_directory(directory, sizeof directory) && strncmp(path, directory, strlen(directory)) == 0)
        return fail();
    errno = before;
    return 0;
}

static int fd_fails(int fd) {
    int before = errno;
    char directory[PATH_MAX], name[64], path[PATH_MAX];
    if (read_directory(directory, sizeof directory)) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(name, path, sizeof path - 1);
        if (length > 0) {
            path[length] = '\0';
            if (strncmp(path, directory, strlen(directory)) == 0) return fail();
        }
    }
    errno = before;
    return 0;
}

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    return fd_fails(fd) ? -1 : NEXT(ssize_t, write, int, const void *, size_t)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return fd_fails(fd) ? -1 : NEXT(ssize_t, writev, int, const struct iovec *, int)(fd, parts, count);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    return fd_fails(fd) ? -1
                        : NEXT(ssize_t, pwrite64, int, const void *, size_t, off64_t)(fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return pwrite64(fd, data, size, offset);
}

int fsync(int fd) { return fd_fails(fd) ? -1 : NEXT(int, fsync, int)(fd); }

int fdatasync(int fd) { return fd_fails(fd) ? -1 : NEXT(int, fdatasync, int)(fd); }

int rename(const char *from, const char *to) {
    return path_fails(to) ? -1 : NEXT(int, rename, const char *, const char *)(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    return path_fails(to) ? -1
                          : NEXT(int, renameat, int, const char *, int, const char *)(from_directory, from,
                                                                                      to_directory, to);
}

int link(const char *from, const char *to) {
    return path_fails(to) ? -1 : NEXT(int, link, const char *, const char *)(from, to);
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags) {
    return path_fails(to)
               ? -1
               : NEXT(int, linkat, int, const char *, int, const char *, int)(from_directory, from,
                                                                              to_directory, to, flags);
}
