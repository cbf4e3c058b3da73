/* attention.h - causal attention of one segment over its prefix.
 *
 *   out[i] = sum_j p[i][j] v[j],   p[i] = softmax_j(logit[i][j]) over the visible j and the head's sink
 *   logit[i][j] = cap(scale q[i].k[j]) - slope (t_i - j),   t_i = q_start + i,   cap(x) = softcap tanh(x / softcap)
 *   visible: j <= t_i, t_i - j < window, docs[j] == docs[t_i] or j < shared_keys
 *   keys seen by a 3-row segment at q_start = 2:  111.. / 1111. / 11111
 *   sink: one more logit, alike in all rows, that takes part in the softmax's sum and has no value. With
 *   lse[i] = log(exp(sink) + sum_j exp(logit[i][j])), dsink = -sum_i exp(sink - lse[i]) (dout[i] . out[i]); the other
 *   gradients take p from lse and dout . out from out, and both have the sink in them
 *
 * Shapes    q, dq (B, Hq, S, D); k (B, Hkv, T, D), T = q_start + S; v (B, Hkv, T, Dv); out, dout (B, Hq, S, Dv);
 *           lse (B, Hq, S); Hkv divides Hq; query head h reads kv head h / (Hq / Hkv)
 * Numerics  fp64 for fp64; otherwise fp32 sums and row statistics, one rounding at the end
 * Rows      key t is counted along the path of its segments. It lies in row t of k, v, dk and dv, or where `ranges`
 *           says; everything else that has a key in it (visible, docs, ALiBi) is about t
 * Truth     s1f_attention_ref_forward/backward: plain C, every option, every size, any strides
 * On CUDA   arguments of their own (cuda/attention_arguments.h) */
#ifndef S1F_ATTENTION_H
#define S1F_ATTENTION_H

#include "../csrc/core/dtype.h"
#include "../csrc/core/key_ranges.h"
#include "../csrc/core/status.h"
#include "strides.h"

#include <stdint.h>

typedef struct {
    int32_t dtype; /* of q, k, v, out, dout, dq: FLOAT32, FLOAT64, BFLOAT16 or FLOAT16 */
    int64_t batch, heads, kv_heads, segment_len, head_dim, v_head_dim, q_start; /* T = q_start + segment_len */

    const void *q, *k, *v;
    s1f_strides q_strides, k_strides, v_strides;
    const s1f_key_range *ranges; /* rows of k, v, dk and dv: they cover keys [0, T) in order, no row is in two, and keys
                                    [q_start, T) are in the last one. NULL: key t is row t */
    int32_t num_ranges;
    void *out; /* forward: written; backward: read */
    s1f_strides out_strides;
    void *lse; /* float (double for fp64), (B, Hq, S) contiguous: natural log of the row sums */

    double scale;
    int64_t window;      /* keys that a query sees, its own included; 0: all */
    double softcap;      /* 0: none */
    const float *slopes; /* ALiBi, (B, Hq) with slopes_batch_stride 0 or Hq; NULL: none */
    int64_t slopes_batch_stride;
    const int32_t *docs; /* (B, T), row stride docs_batch_stride; NULL: one document */
    int64_t docs_batch_stride;
    int64_t shared_keys; /* keys [0, shared_keys), at most q_start, are visible whatever their document: siblings share
                            them. Not with a window or ALiBi, for siblings do not follow one another */
    const void *sinks;   /* float (double for fp64), (Hq), below infinity; -infinity is no sink. NULL: none */

    /* backward */
    const void *dout;
    s1f_strides dout_strides;
    void *dq;
    s1f_strides dq_strides;
    void *dk, *dv; /* float (double for fp64), rows of keys [0, T) */
    s1f_strides dk_strides, dv_strides;
    int64_t kept_kv_grads; /* dk and dv of keys [0, kept_kv_grads) are added to, those of keys from it on are stored */
    void *own_dk, *own_dv; /* of dtype: the sums of keys [q_start, T), to which later segments have added; their rows of
                              dk and dv then hold nothing of use. NULL: not asked for */
    s1f_strides own_dk_strides, own_dv_strides;
    void *dsinks; /* float (double for fp64), (Hq): stored, where there are sinks. NULL: not asked for */
} s1f_attention_args;

/* Runs body(begin, end, context) over [begin, end) on a pool, in any pieces: results do not depend on them. Must not be
 * called from within a body. */
typedef void (*s1f_parallel_body)(int64_t begin, int64_t end, void *context);
typedef void (*s1f_parallel_for)(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context);

typedef struct {
    s1f_parallel_for parallel_for; /* NULL: serial */
    int32_t num_threads;           /* of the pool: a hint for splitting; results do not depend on it */
    void *scratch;                 /* at least s1f_attention_scratch_bytes, 64-byte aligned; NULL: allocated per call */
    int64_t scratch_bytes;
} s1f_attention_context;

/* The truth: sums in double for every dtype, and rounds once, when it stores. */
s1f_status s1f_attention_ref_forward(const s1f_attention_args *args, const s1f_attention_context *context);
s1f_status s1f_attention_ref_backward(const s1f_attention_args *args, const s1f_attention_context *context);

/* The chosen path: the blocked kernels of the fastest instruction set, or the truth for arguments that they do not
 * cover. S1F_ERR_ARG on bad sizes, and if scratch is given but too small; S1F_ERR_MEMORY only if no scratch is given.
 * Results are bit-equal from run to run and over thread counts. */
s1f_status s1f_attention_forward(const s1f_attention_args *args, const s1f_attention_context *context);
s1f_status s1f_attention_backward(const s1f_attention_args *args, const s1f_attention_context *context);
/* Bytes that the chosen path needs with a context of num_threads; 0 for arguments it would refuse. Reads sizes and
 * options, follows no pointer but that of ranges. */
int64_t s1f_attention_scratch_bytes(const s1f_attention_args *args, int32_t num_threads, int backward);

/* Name of the instruction set in use: "avx512bf16" (that is "avx512" with bf16 products of bf16 inputs), "avx512",
 * "avx2", "neon", "portable", "reference". Chosen at first use: the fastest, or the one that the environment variable
 * SEQ1F1B_ISA names. bf16 products are chosen where they are measured to be faster. */
const char *s1f_attention_isa(void);
/* Forces an instruction set, for tests; NULL: the fastest again. S1F_ERR_ARG if the machine lacks it. */
s1f_status s1f_attention_set_isa(const char *name);

#endif
