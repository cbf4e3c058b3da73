/* pool.h - arrays made one by one and freed together; and an array that grows. */
#ifndef S1F_POOL_H
#define S1F_POOL_H

#include "status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct { /* zeros: an empty one */
    struct s1f_pool_block *blocks;
    int is_short; /* memory ran out: what was asked for then, and since, is NULL */
} s1f_pool;

/* Zeroed room for `count` elements, which may be 0. */
void *s1f_pool_take(s1f_pool *pool, size_t count, size_t element_bytes);
/* S1F_ERR_MEMORY where memory ran out: "no memory for <what>". */
s1f_status s1f_pool_status(const s1f_pool *pool, const char *what);
void s1f_pool_free(s1f_pool *pool);

/* *array, of *count elements, grows to `wanted` if it is smaller, new elements zero; free takes it back. array: the
 * address of a pointer to elements. S1F_ERR_MEMORY leaves it as it is: "no memory for <wanted> <what>". */
s1f_status s1f_array_grow(void *array, int64_t *count, int64_t wanted, size_t element_bytes, const char *what);

#endif
