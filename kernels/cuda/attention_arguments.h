/* attention_arguments.h - what the launchers of attention on CUDA take; see ../attention.h for shapes and meaning.
 *
 * Differences   bfloat16 and float16, head_dim 64 or 128, v of the same, scale > 0, no slopes and no sinks; lse is
 *               float; q, k, v, out, dout, dq, dk and dv begin at multiples of 16 bytes, and so do their rows, heads
 *               and batch entries; fewer than 2^30 tokens; segment_len heads / kv_heads below 2^30
 * Slab          k, v, dk and dv may have any number of rows behind the last token: none is read or written
 *
 * A struct of its own, so that what the CPU's kernels learn does not change what a GPU has verified. */
#ifndef S1F_CUDA_ATTENTION_ARGUMENTS_H
#define S1F_CUDA_ATTENTION_ARGUMENTS_H

#include "../../csrc/core/dtype.h"
#include "../strides.h"

#include <stdint.h>

typedef struct {
    int32_t dtype;
    int64_t batch, heads, kv_heads, segment_len, head_dim, q_start;

    const void *q, *k, *v;
    s1f_strides q_strides, kv_strides; /* k and v alike */
    void *out;
    s1f_strides out_strides;
    void *lse;

    double scale;
    int64_t window;
    double softcap;
    const int32_t *docs;
    int64_t docs_batch_stride;

    /* backward */
    const void *dout;
    s1f_strides dout_strides;
    void *dq;
    s1f_strides dq_strides;
    void *dk, *dv;
    s1f_strides dkv_strides;
    int32_t store_kv_grads;
    void *own_dk, *own_dv;
    s1f_strides own_dkv_strides;

    void *scratch; /* of the device, 16-byte aligned; as many bytes as the operation's scratch_bytes says */
    int64_t scratch_bytes;
} s1f_cuda_attention;

#endif
