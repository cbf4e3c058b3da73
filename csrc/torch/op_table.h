/* op_table.h - every op: its body, the counts of its tensors and outputs, and its schema. ops.h says what they do. */
#ifndef S1F_OP_TABLE_H
#define S1F_OP_TABLE_H

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

#endif
