/* ops.h - the ops that torch's dispatcher knows under the namespace seq1f1b.
 *
 *   attention     forward: out, lse; backward: dq, dk, dv, dsinks
 *   cache_write   keys, values and doc_ids of tokens [0, end of the segment), document ids written; to_k and to_v, the
 *                 segment's own rows, which the caller writes before they are read, and which have no tokens where a
 *                 forward that runs again finds its rows written
 *   cache_read    keys, values, dk, dv and doc_ids of them; held: as many elements as dk and dv have tokens whose sums
 *                 they hold: all, to be added to, or before the first contribution none
 *
 * cache_write and cache_read are for every device: on other devices than the CPU attention is Python's, by torch's own
 * ops (seq1f1b/device/cuda_attention.py), over these views of slabs that torch's allocator gave. The views are borrowed
 * until the unit ends. The other ops have CPU kernels here.
 * The first pair is functional. The second runs within a unit of a step: it keeps k and v in the KV cache of the
 * current unit, adds dK and dV of the prefix to the cache's slab and returns the complete ones of its own rows. An
 * empty tensor stands for "none". Heads of v, and so of out and dout, may have another size than those of q and k.
 * Every (batch, heads, tokens, head_dim) result is laid out as (batch, tokens, heads, head_dim), so that the transpose
 * that follows attention is free. Autograd, fake kernels and the checks that a user meets are Python's. */
#ifndef S1F_OPS_H
#define S1F_OPS_H

#include "op_call.h"

/* The options of attention: three tensors, then three numbers.
 * X(name, tensors, which come first in the schema, outputs, 1: for any device, schema) */
#define S1F_OPTIONS "Tensor slopes, Tensor doc_ids, Tensor sinks, float scale, SymInt window, float softcap"
#define S1F_OPS(X)                                                                                                     \
    X(causal_attention, 6, 2, 0, "(Tensor q, Tensor k, Tensor v, " S1F_OPTIONS ") -> (Tensor, Tensor)")                \
    X(causal_attention_backward, 9, 4, 0,                                                                              \
      "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " S1F_OPTIONS                               \
      ") -> (Tensor, Tensor, Tensor, Tensor)")                                                                         \
    X(segment_attention, 7, 2, 0, "(Tensor q, Tensor k, Tensor v, Tensor layer, " S1F_OPTIONS ") -> (Tensor, Tensor)") \
    X(segment_attention_backward, 8, 4, 0,                                                                             \
      "(Tensor dout, Tensor q, Tensor out, Tensor lse, Tensor layer, " S1F_OPTIONS                                     \
      ", SymInt kv_heads) -> (Tensor, Tensor, Tensor, Tensor)")                                                        \
    X(cache_write, 4, 5, 1,                                                                                            \
      "(Tensor k, Tensor v, Tensor doc_ids, Tensor layer) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")                \
    X(cache_read, 3, 6, 1,                                                                                             \
      "(Tensor q, Tensor out, Tensor layer, SymInt kv_heads) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")

#define S1F_OP_BODY(name, num_tensors, num_outputs, any_device, schema) s1f_status s1f_op_##name(s1f_op_call *call);
S1F_OPS(S1F_OP_BODY)
#undef S1F_OP_BODY

/* Registers the ops with the torch that is bound (s1f_torch_bind); once per process. */
s1f_status s1f_ops_register(void);

#endif
