/* pool.c - a list of blocks; and an array that grows. */
#include "pool.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct s1f_pool_block {
    struct s1f_pool_block *next;
    _Alignas(max_align_t) char memory[];
};

void *s1f_pool_take(s1f_pool *pool, size_t count, size_t element_bytes)
{
    size_t most = (SIZE_MAX - sizeof(struct s1f_pool_block)) / element_bytes;
    struct s1f_pool_block *block =
        pool->is_short || count > most ? NULL : calloc(1, sizeof *block + count * element_bytes);
    pool->is_short = block == NULL;
    if (block == NULL)
        return NULL;
    block->next = pool->blocks;
    pool->blocks = block;
    return block->memory;
}

s1f_status s1f_pool_status(const s1f_pool *pool, const char *what)
{
    return pool->is_short ? s1f_fail(S1F_ERR_MEMORY, "no memory for %s", what) : S1F_OK;
}

void s1f_pool_free(s1f_pool *pool)
{
    while (pool->blocks != NULL) {
        struct s1f_pool_block *next = pool->blocks->next;
        free(pool->blocks);
        pool->blocks = next;
    }
}

s1f_status s1f_array_grow(void *array, int64_t *count, int64_t wanted, size_t element_bytes, const char *what)
{
    char *memory;
    if (wanted <= *count)
        return S1F_OK;
    memcpy(&memory, array, sizeof memory); /* as the pointer's own type is not known */
    memory = realloc(memory, (size_t)wanted * element_bytes);
    if (memory == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld %s", (long long)wanted, what);
    memset(memory + (size_t)*count * element_bytes, 0, (size_t)(wanted - *count) * element_bytes);
    memcpy(array, &memory, sizeof memory);
    *count = wanted;
    return S1F_OK;
}
