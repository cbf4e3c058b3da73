/* slab.h - a block of memory of the KV cache: kept from step to step, replaced where a step needs a bigger one. */
#ifndef S1F_SLAB_H
#define S1F_SLAB_H

#include "../core/status.h"

#include <stdint.h>

typedef struct { /* memory from elsewhere than malloc, as of a device */
    /* *owner is what free takes back. */
    s1f_status (*allocate)(int64_t device, int64_t bytes, void **data, void **owner);
    void (*free)(void *owner);
} s1f_slab_memory;

typedef struct { /* zeros: an empty one */
    void *data;
    int64_t bytes;                 /* allocated */
    const s1f_slab_memory *memory; /* NULL: malloc's; borrowed */
    int64_t device;                /* handed to memory->allocate */
    void *owner;                   /* owner of the memory, NULL for malloc's */
} s1f_slab;

/* Makes the slab hold at least `bytes`, 64-byte aligned where it is malloc's, and counts its bytes in *total. What it
 * held is gone where it must grow or move: the old memory goes first, so that the two are never held together. */
s1f_status s1f_slab_reserve(s1f_slab *slab, int64_t bytes, const s1f_slab_memory *memory, int64_t device,
                            int64_t *total);
void s1f_slab_free(s1f_slab *slab);

/* Gives back the memory of rows [begin, end) (bytes) of every strip (one per batch entry and kv head), whole pages
 * only. What lies behind `end` in a strip is dead too, unless it is used. The next touch finds zeros. Only for malloc's
 * memory. */
void s1f_slab_release_rows(const s1f_slab *slab, int64_t strips, int64_t strip_bytes, int64_t begin, int64_t end,
                           int32_t is_used_behind);

#endif
