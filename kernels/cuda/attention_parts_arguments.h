/* attention_parts_arguments.h - what the launcher of the work around attention over ranges of keys takes.
 *
 *   merge    outs[0] = attention over two disjoint sets of keys, from the attention over each, parts[0] and parts[1],
 *            and from the logarithms of their sums, lse[0] and lse[1]; lse[2] = logarithm of both sums together. -inf
 *            stands for no key; the results of a row that sees no key are finite
 *   add      slabs[i] += parts[i]; with `store` slabs[i] = parts[i], and nothing is read of the slabs
 *   finish   outs[i] = slabs[i] + parts[i]; with `store` outs[i] = parts[i]. The slabs stay as they are
 *   total    outs[0] = parts[0] + ... + parts[num_parts - 1]
 *
 * Shapes    all (batch, heads, rows, head_dim); add and finish take two tensors of each kind, those of k (i = 0) and of
 *           v (i = 1), whose head_dim may differ; lse (batch, heads, rows), contiguous
 * Dtypes    parts and outs bfloat16 or float16, slabs and lse float
 * Memory    head_dim is a multiple of 8; rows, heads and batch entries begin at multiples of 16 bytes
 * Numerics  sums in fp32, rounded once */
#ifndef S1F_CUDA_ATTENTION_PARTS_ARGUMENTS_H
#define S1F_CUDA_ATTENTION_PARTS_ARGUMENTS_H

#include "../../csrc/core/dtype.h"
#include "../strides.h"

#include <stdint.h>

enum { S1F_PARTS_MERGE, S1F_PARTS_ADD, S1F_PARTS_FINISH, S1F_PARTS_TOTAL, S1F_NUM_PARTS_OPERATIONS };
enum { S1F_MOST_PARTS = 8 };

typedef struct {
    void *memory;
    s1f_strides strides;
} s1f_parts_rows;

typedef struct {
    int32_t what, dtype, store, num_parts;
    int64_t batch, heads, rows, head_dim[2];
    s1f_parts_rows parts[S1F_MOST_PARTS]; /* read alone */
    s1f_parts_rows slabs[2], outs[2];
    float *lse[3];
} s1f_attention_parts;

#endif
