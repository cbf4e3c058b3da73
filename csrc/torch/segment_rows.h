/* segment_rows.h - the running unit's segment in the KV cache, as ops find and fill it. */
#ifndef S1F_SEGMENT_ROWS_H
#define S1F_SEGMENT_ROWS_H

#include "../run/kv_cache.h"
#include "op_call.h"

typedef struct { /* the segment of the running unit in one layer */
    const s1f_current_unit *unit;
    int64_t key; /* of the layer */
    s1f_layer_shape shape;
    s1f_kv_rows rows;
    s1f_kv_grads grads; /* in a backward alone */
} s1f_segment;

/* The segment of a forward, with document ids written. The caller writes k and v (s1f_segment_write), unless the
 * segment's F has done so: rows.is_written. memory and device: of the slab, NULL and 0 for malloc's. S1F_ERR_STATE
 * outside a step; S1F_ERR_ARG if `layer` is no handle, or the unit has another number of tokens. */
s1f_status s1f_segment_forward(const s1f_op_tensor *layer, const s1f_op_tensor *k, const s1f_op_tensor *v,
                               const s1f_op_tensor *docs, const s1f_slab_memory *memory, int64_t device,
                               s1f_segment *out);
/* The segment of a backward of q and out; fails alike, and with S1F_ERR_ARG unless the layer's slab has their sizes and
 * so many kv heads. */
s1f_status s1f_segment_backward(const s1f_op_tensor *layer, const s1f_op_tensor *q, const s1f_op_tensor *out,
                                int64_t kv_heads, s1f_segment *segment);
s1f_status s1f_segment_write(const s1f_segment *segment, const s1f_op_tensor *k, const s1f_op_tensor *v);

/* Whether the keys of the path lie in the slab's first rows, in order. */
int s1f_segment_is_in_place(const s1f_segment *segment);
/* Strides of [batch][kv_heads][num_rows][head_dim] in the slab. */
void s1f_segment_strides(const s1f_segment *segment, int64_t head_dim, int64_t strides[4]);

/* Document ids of the path's keys, [batch][keys] from the slab's rows; and [keys] for parts: a number for each, 0
 * before them. */
void s1f_segment_gather_docs(const s1f_segment *segment, int32_t *ids);
void s1f_segment_part_ids(const s1f_segment *segment, int32_t *ids);
/* S1F_ERR_ARG unless the attention of a unit that siblings share means the same for each as alone: no window, no ALiBi,
 * and one document along the path. */
s1f_status s1f_segment_check_parts(const s1f_segment *segment, int by_distance);

#endif
