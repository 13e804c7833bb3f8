/* Takes down every system call that changes what stands below one directory. Loaded by LD_PRELOAD; recorder.py reads it.
 *
 * TORTURE_DIR    the directory, as realpath() says it
 * TORTURE_TRACE  the file that gets the records
 * TORTURE_FAIL   `calls:first:count:errno ...`: of the calls whose letters stand in `calls`, from the first-th on `count`
 *                fail without any effect; a pwrite that finds no room (ENOSPC) writes half of its data before that
 * TORTURE_KILL   the process dies, as by kill -9, at the entry of this call
 * TORTURE_SYNC_US  each fsync takes so long
 * TORTURE_WIRE   set: what is read from and written to accepted connections is recorded as well
 *
 * A record: its length, then struct head, a name and data. Moments are ticks of one counter for all threads: a call has
 * begun and ended between two of them. A record is written when its call has ended; a kill waits for calls under way.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define FILES 65536
#define FAULTS 8
#define ALL_CALLS "ocwtarumsd"

struct head {
    uint64_t begun, ended, begun_ns, ended_ns;
    int64_t at, result; /* a failed call's result is the negative of its errno */
    int32_t fd, thread;
    uint32_t name_bytes, data_bytes;
    uint32_t call, flags;
};

struct fault {
    char calls[16];
    long first, count;
    int error;
};

static atomic_ulong ticks = 1;
static atomic_int under_way, dying;
static atomic_long changes;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static int trace = -1, wire;
static char directory[PATH_MAX];
static size_t directory_bytes;
static long kill_at, sync_us;
static struct fault faults[FAULTS];
static int fault_count;
static atomic_long seen[FAULTS];
static unsigned char known[FILES]; /* 1: a file or directory that is recorded, 2: a socket */

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static uint64_t now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

__attribute__((constructor)) static void begin(void)
{
    const char *dir = getenv("TORTURE_DIR"), *path = getenv("TORTURE_TRACE"), *text;
    int used;
    if (!dir || !path) return;
    snprintf(directory, sizeof directory, "%s", dir);
    directory_bytes = strlen(directory);
    trace = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    wire = getenv("TORTURE_WIRE") != NULL;
    kill_at = (text = getenv("TORTURE_KILL")) ? atol(text) : 0;
    sync_us = (text = getenv("TORTURE_SYNC_US")) ? atol(text) : 0;
    for (text = getenv("TORTURE_FAIL"); text && fault_count < FAULTS; text += used) {
        struct fault *each = &faults[fault_count];
        if (sscanf(text, " %15[a-z]:%ld:%ld:%d%n", each->calls, &each->first, &each->count, &each->error, &used) != 4) break;
        fault_count++;
    }
    /* What this process starts, such as a compiler, is not recorded. */
    unsetenv("LD_PRELOAD");
}

static void put(struct head *head, const char *name, const void *data)
{
    uint32_t length = (uint32_t)(sizeof *head) + head->name_bytes + head->data_bytes;
    char *record = malloc(length + 4u), *to = record;
    if (!record) abort();
    memcpy(to, &length, 4), to += 4;
    memcpy(to, head, sizeof *head), to += sizeof *head;
    if (head->name_bytes) memcpy(to, name, head->name_bytes), to += head->name_bytes;
    if (head->data_bytes) memcpy(to, data, head->data_bytes);
    pthread_mutex_lock(&writing);
    for (size_t done = 0; done < length + 4u;) {
        long wrote = syscall(SYS_write, trace, record + done, length + 4u - done);
        if (wrote < 0 && errno != EINTR) abort();
        if (wrote > 0) done += (size_t)wrote;
    }
    pthread_mutex_unlock(&writing);
    free(record);
}

/* A call begins. Returns the errno that it is to fail with, or 0. */
static int enter(struct head *head, char call, int fd)
{
    int error = 0;
    memset(head, 0, sizeof *head);
    if (atomic_load(&dying)) for (;;) pause();
    if (kill_at && strchr(ALL_CALLS, call) && atomic_fetch_add(&changes, 1) + 1 == kill_at) {
        atomic_store(&dying, 1);
        while (atomic_load(&under_way)) usleep(20);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    atomic_fetch_add(&under_way, 1);
    for (int at = 0; at < fault_count; at++) {
        if (!strchr(faults[at].calls, call)) continue;
        long number = atomic_fetch_add(&seen[at], 1) + 1;
        if (number >= faults[at].first && number < faults[at].first + faults[at].count) error = faults[at].error;
    }
    head->call = (uint32_t)call;
    head->fd = fd;
    head->thread = (int32_t)syscall(SYS_gettid);
    head->begun_ns = now();
    head->begun = atomic_fetch_add(&ticks, 1);
    return error;
}

/* It ends, and errno stays what it is. */
static void leave(struct head *head, int64_t result, const char *name, const void *data)
{
    int error = errno;
    head->ended = atomic_fetch_add(&ticks, 1);
    head->ended_ns = now();
    head->result = result < 0 ? -(int64_t)error : result;
    head->name_bytes = name ? (uint32_t)strlen(name) : 0;
    put(head, name, data);
    atomic_fetch_sub(&under_way, 1);
    errno = error;
}

/* The path below the directory, "" for the directory itself, NULL for any other. */
static const char *below(const char *path)
{
    if (trace < 0 || !path || strncmp(path, directory, directory_bytes)) return NULL;
    if (!path[directory_bytes]) return path + directory_bytes;
    return path[directory_bytes] == '/' ? path + directory_bytes + 1 : NULL;
}

static int is_known(int fd, int kind)
{
    return trace >= 0 && fd >= 0 && fd < FILES && known[fd] == kind;
}

void torture_mark(const char *text, size_t length)
{
    struct head head;
    if (trace < 0) return;
    enter(&head, 'M', -1);
    head.data_bytes = (uint32_t)length;
    leave(&head, 0, NULL, text);
}

static int opened(int (*open_it)(int, const char *, int, mode_t), int at, const char *path, int flags, mode_t mode)
{
    const char *name = below(path);
    struct head head;
    int fd, error;
    if (!name) return open_it(at, path, flags, mode);
    error = enter(&head, flags & O_CREAT ? 'c' : 'o', -1);
    if (error) fd = -1, errno = error;
    else fd = open_it(at, path, flags, mode);
    if (fd >= 0 && fd < FILES) known[fd] = 1;
    head.fd = fd;
    head.flags = (uint32_t)flags;
    leave(&head, fd, name, NULL);
    return fd;
}

static int open_at(int at, const char *path, int flags, mode_t mode)
{
    REAL(openat);
    return real(at, path, flags, mode);
}

#define OPEN(at) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    } \
    return opened(open_at, at, path, flags, mode)

int open(const char *path, int flags, ...) { OPEN(AT_FDCWD); }
int open64(const char *path, int flags, ...) { OPEN(AT_FDCWD); }
int openat(int at, const char *path, int flags, ...) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat");
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    return opened((int (*)(int, const char *, int, mode_t))real, at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) { OPEN(at); }

int close(int fd)
{
    REAL(close);
    struct head head;
    if (!is_known(fd, 1)) {
        if (fd >= 0 && fd < FILES) known[fd] = 0;
        return real(fd);
    }
    enter(&head, 'C', fd);
    known[fd] = 0;
    int result = real(fd);
    leave(&head, result, NULL, NULL);
    return result;
}

static ssize_t wrote(int fd, const void *data, size_t size, off_t at)
{
    static ssize_t (*real)(int, const void *, size_t, off_t);
    struct head head;
    ssize_t result;
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    if (!is_known(fd, 1)) return real(fd, data, size, at);
    int error = enter(&head, 'w', fd);
    head.at = at;
    if (error == ENOSPC && size > 1) result = real(fd, data, size / 2, at);
    else if (error) result = -1, errno = error;
    else result = real(fd, data, size, at);
    head.data_bytes = result > 0 ? (uint32_t)result : 0;
    leave(&head, result, NULL, data);
    return result;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return wrote(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return wrote(fd, data, size, at); }

static ssize_t told(ssize_t (*real)(int, const void *, size_t), int fd, const void *data, size_t size);

ssize_t write(int fd, const void *data, size_t size)
{
    REAL(write);
    if (is_known(fd, 2)) return told(real, fd, data, size);
    if (!is_known(fd, 1)) return real(fd, data, size);
    off_t at = lseek(fd, 0, SEEK_CUR);
    struct head head;
    ssize_t result;
    int error = enter(&head, 'w', fd);
    head.at = at;
    if (error) result = -1, errno = error;
    else result = real(fd, data, size);
    head.data_bytes = result > 0 ? (uint32_t)result : 0;
    leave(&head, result, NULL, data);
    return result;
}

static int truncated(int fd, off_t size)
{
    static int (*real)(int, off_t);
    struct head head;
    int result;
    if (!real) real = (int (*)(int, off_t))dlsym(RTLD_NEXT, "ftruncate");
    if (!is_known(fd, 1)) return real(fd, size);
    int error = enter(&head, 't', fd);
    head.at = size;
    if (error) result = -1, errno = error;
    else result = real(fd, size);
    leave(&head, result, NULL, NULL);
    return result;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size); }

static int allocated(int fd, off_t at, off_t size)
{
    static int (*real)(int, off_t, off_t);
    struct head head;
    if (!real) real = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate");
    if (!is_known(fd, 1)) return real(fd, at, size);
    int error = enter(&head, 'a', fd);
    head.at = at + size;
    if (!error) error = real(fd, at, size);
    errno = error;
    leave(&head, error ? -1 : 0, NULL, NULL);
    return error;
}

int posix_fallocate(int fd, off_t at, off_t size) { return allocated(fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { return allocated(fd, at, size); }

static int synced(int (*real)(int), int fd)
{
    struct head head;
    int result;
    if (!is_known(fd, 1)) return real(fd);
    int error = enter(&head, 's', fd);
    if (sync_us) usleep((useconds_t)sync_us);
    if (error) result = -1, errno = error;
    else result = real(fd);
    leave(&head, result, NULL, NULL);
    return result;
}

int fsync(int fd) { REAL(fsync); return synced(real, fd); }
int fdatasync(int fd) { REAL(fdatasync); return synced(real, fd); }

int unlink(const char *path)
{
    REAL(unlink);
    const char *name = below(path);
    struct head head;
    int result;
    if (!name) return real(path);
    int error = enter(&head, 'u', -1);
    if (error) result = -1, errno = error;
    else result = real(path);
    leave(&head, result, name, NULL);
    return result;
}

int unlinkat(int at, const char *path, int flags)
{
    REAL(unlinkat);
    return below(path) && !flags ? unlink(path) : real(at, path, flags);
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    const char *name = below(from), *new_name = below(to);
    struct head head;
    int result;
    if (!name || !new_name) return real(from, to);
    int error = enter(&head, 'r', -1);
    if (error) result = -1, errno = error;
    else result = real(from, to);
    head.data_bytes = (uint32_t)strlen(new_name);
    leave(&head, result, name, new_name);
    return result;
}

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    const char *name = below(path);
    struct head head;
    int result;
    if (!name) return real(path, mode);
    int error = enter(&head, 'm', -1);
    if (error) result = -1, errno = error;
    else result = real(path, mode);
    leave(&head, result, name, NULL);
    return result;
}

/* What clients are told is begun before it leaves; what they ask for has ended when it is here. */
static ssize_t told(ssize_t (*real)(int, const void *, size_t), int fd, const void *data, size_t size)
{
    struct head head;
    enter(&head, 'S', fd);
    ssize_t result = real(fd, data, size);
    head.data_bytes = result > 0 ? (uint32_t)result : 0;
    leave(&head, result, NULL, data);
    return result;
}

ssize_t read(int fd, void *data, size_t size)
{
    REAL(read);
    struct head head;
    if (!is_known(fd, 2)) return real(fd, data, size);
    enter(&head, 'R', fd);
    ssize_t result = real(fd, data, size);
    head.data_bytes = result > 0 ? (uint32_t)result : 0;
    leave(&head, result, NULL, data);
    return result;
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
    REAL(accept4);
    int result = real(fd, address, length, flags);
    if (wire && result >= 0 && result < FILES) known[result] = 2;
    return result;
}
