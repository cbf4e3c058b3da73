/* strides.h - where the rows of a tensor (batch, heads, rows, columns) lie. */
#ifndef S1F_STRIDES_H
#define S1F_STRIDES_H

#include <stdint.h>

typedef struct { /* in elements; the last dimension has stride 1 */
    int64_t batch, head, row;
} s1f_strides;

#endif
