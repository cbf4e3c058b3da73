/* slab.c - memory that grows and is kept, and gives pages back. */
#include "slab.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 64 /* bytes: one AVX-512 vector, one cache line */ };

void s1f_slab_free(s1f_slab *slab)
{
    if (slab->memory == NULL)
        free(slab->data);
    else
        slab->memory->free(slab->owner);
    *slab = (s1f_slab){0};
}

s1f_status s1f_slab_reserve(s1f_slab *slab, int64_t bytes, const s1f_slab_memory *memory, int64_t device,
                            int64_t *total)
{
    if (bytes <= slab->bytes && slab->memory == memory && slab->device == device)
        return S1F_OK;
    *total -= slab->bytes;
    s1f_slab_free(slab);
    s1f_slab made = {.bytes = bytes, .memory = memory, .device = device};
    int failed = made.memory == NULL ? posix_memalign(&made.data, ALIGNMENT, (size_t)bytes) != 0
                                     : made.memory->allocate(made.device, bytes, &made.data, &made.owner) != S1F_OK;
    if (failed)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a KV cache slab of %lld bytes (%lld are held)", (long long)bytes,
                        (long long)*total);
    *slab = made;
    *total += bytes;
    return S1F_OK;
}

void s1f_slab_release_rows(const s1f_slab *slab, int64_t strips, int64_t strip_bytes, int64_t begin, int64_t end,
                           int32_t is_used_behind)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), data = (uintptr_t)slab->data;
    for (int64_t i = 0; i < strips; i++) {
        uintptr_t strip = data + (uintptr_t)(i * strip_bytes);
        uintptr_t first = (strip + (uintptr_t)begin + page - 1) / page * page;
        uintptr_t last = (strip + (uintptr_t)end + page - 1) / page * page;
        if (is_used_behind || last > strip + (uintptr_t)strip_bytes)
            last = (strip + (uintptr_t)(is_used_behind ? end : strip_bytes)) / page * page;
        if (first < last)
            (void)madvise((void *)first, last - first, MADV_DONTNEED);
    }
}
