/* allocation.c - allocations that fail on request; the linker's --wrap puts these before the C library's. */
#include "check.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

static _Atomic int64_t fail_at = -1;
static _Atomic int64_t asked;

int64_t fail_allocation(int64_t n)
{
    int64_t before = atomic_exchange(&asked, 0);
    atomic_store(&fail_at, n);
    return before;
}

static int refused(void)
{
    if (atomic_fetch_add(&asked, 1) != atomic_load(&fail_at))
        return 0;
    errno = ENOMEM; /* the C library relies on it: in a static program its own allocations come here, too */
    return 1;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
int __real_posix_memalign(void **out, size_t alignment, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    return refused() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return refused() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
    return refused() ? NULL : __real_realloc(old, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return refused() ? NULL : __real_aligned_alloc(alignment, bytes);
}

int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes)
{
    return refused() ? ENOMEM : __real_posix_memalign(out, alignment, bytes);
}
