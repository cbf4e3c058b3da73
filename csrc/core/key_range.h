/* key_range.h - where keys that follow one another along a path lie in memory: in rows that do, too. */
#ifndef S1F_KEY_RANGE_H
#define S1F_KEY_RANGE_H

#include <stdint.h>

typedef struct {
    int64_t begin, end; /* keys, counted along the path */
    int64_t row;        /* of the first one; the others lie in the rows after it */
} s1f_key_range;

#endif
