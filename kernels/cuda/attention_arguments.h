/* attention_arguments.h - what the launchers of attention on CUDA take; see attention.h for shapes and meaning.
 *
 * Differences   bfloat16 and float16, head_dim 64 or 128, scale > 0, no slopes; lse is float; q, k, v, out, dout, dq,
 *               dk and dv begin at multiples of 16 bytes, and so do their rows, heads and batch entries; fewer than
 *               2^30 tokens; segment_len heads / kv_heads below 2^30
 * Slab          k, v, dk and dv may have any number of rows behind the last token: none is read or written */
#ifndef S1F_CUDA_ATTENTION_ARGUMENTS_H
#define S1F_CUDA_ATTENTION_ARGUMENTS_H

#ifdef __cplusplus
extern "C" {
#endif
#include "../attention.h"
#ifdef __cplusplus
}
#endif

typedef struct {
    s1f_attention_args attention;
    int32_t num_parts;     /* ranges of keys, summed in the order of their index; 0: chosen, from the shape alone */
    int32_t deterministic; /* backward: dq too is bit-equal for equal inputs */
    void *scratch;         /* of the device, 16-byte aligned; as many bytes as the operation's scratch_bytes says */
    int64_t scratch_bytes;
} s1f_cuda_attention_args;

#endif
