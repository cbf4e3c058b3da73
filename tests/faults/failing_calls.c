/* failing_calls.c - preloaded into a process: makes one of its next system calls fail.
 * Only calls of the interpreter and of our extension count. gloo, which tests have no say over, ends the process where
 * one of its own fails. Offsets have 64 bits, so that names that end in 64 are aliases, as in the C library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CALL_MMAP = 1, CALL_MEMFD = 2, CALL_SOCKET = 4, CALL_THREAD = 8, CALL_OPEN = 16, CALL_WRITE = 32 };

static _Atomic int armed; /* calls of which one fails */
static _Atomic long left; /* how many of them go well before */
static _Atomic int struck;
static int error_number;

void failing_calls_arm(int calls, long after, int error)
{
    atomic_store(&left, after);
    atomic_store(&struck, 0);
    error_number = error;
    atomic_store(&armed, calls);
}

/* Returns whether a call has failed. */
int failing_calls_disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&struck);
}

/* Memory of the interpreter is left alone: where a new thread finds none as it begins, CPython 3.11's Thread.start
 * waits for it for ever (python/cpython#140746). */
static int is_ours(int call, const void *caller)
{
    Dl_info info;
    if (!dladdr(caller, &info) || info.dli_fname == NULL)
        return 0;
    if (strstr(info.dli_fname, "/seq1f1b/_C.") != NULL)
        return 1;
    return call != CALL_MMAP && strstr(info.dli_fname, "python") != NULL &&
           strstr(info.dli_fname, "-packages/") == NULL;
}

static int fails(int call, const void *caller)
{
    if (!(atomic_load(&armed) & call) || !is_ours(call, caller) || atomic_fetch_sub(&left, 1) != 0)
        return 0;
    atomic_store(&armed, 0);
    atomic_store(&struck, 1);
    errno = error_number;
    return 1;
}

#define CALLER __builtin_return_address(0)
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    return fails(CALL_MMAP, CALLER) ? MAP_FAILED : REAL(mmap)(address, length, protection, flags, fd, offset);
}

void *mmap64(void *, size_t, int, int, int, off64_t) __attribute__((alias("mmap")));

int memfd_create(const char *name, unsigned flags)
{
    return fails(CALL_MEMFD, CALLER) ? -1 : REAL(memfd_create)(name, flags);
}

int socket(int domain, int type, int protocol)
{
    return fails(CALL_SOCKET, CALLER) ? -1 : REAL(socket)(domain, type, protocol);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
    return fails(CALL_THREAD, CALLER) ? error_number : REAL(pthread_create)(thread, attributes, run, argument);
}

int open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return fails(CALL_OPEN, CALLER) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *, int, ...) __attribute__((alias("open")));

/* Only a write to a file fails: the ranks need their pipes to the harness. */
ssize_t write(int fd, const void *data, size_t bytes)
{
    struct stat about;
    int is_file = atomic_load(&armed) & CALL_WRITE && fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
    return is_file && fails(CALL_WRITE, CALLER) ? -1 : REAL(write)(fd, data, bytes);
}
