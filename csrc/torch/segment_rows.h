/* segment_rows.h - the running unit's segment in the KV cache, as ops find and fill it. */
#ifndef S1F_SEGMENT_ROWS_H
#define S1F_SEGMENT_ROWS_H

#include "../run/kv_cache.h"
#include "op_call.h"

/* The unit that runs and the key in `layer`. S1F_ERR_STATE outside a step, S1F_ERR_ARG if `layer` is no handle or the
 * segment has another number of tokens. */
s1f_status s1f_current_segment(const s1f_op_tensor *layer, int64_t tokens, const s1f_current_unit **unit, int64_t *key);

/* Strides of [batch][kv_heads][num_rows][head_dim]. */
void s1f_slab_strides(int64_t kv_heads, int64_t num_rows, int64_t head_dim, int64_t strides[4]);

/* The segment's rows of the layer's slab, those of docs written. The caller writes k and v, unless the segment's F has
 * done so: rows->is_written. */
s1f_status s1f_segment_rows(const s1f_current_unit *unit, int64_t key, const s1f_layer_shape *shape,
                            const s1f_op_tensor *docs, s1f_kv_rows *rows);
/* As s1f_segment_rows; k and v are written, too. */
s1f_status s1f_segment_write(const s1f_current_unit *unit, int64_t key, const s1f_layer_shape *shape,
                             const s1f_op_tensor *k, const s1f_op_tensor *v, const s1f_op_tensor *docs,
                             s1f_kv_rows *rows);

/* Document ids of the path's keys, [batch][keys] from the slab's rows; and [keys] for parts: a number for each, 0
 * before them. */
void s1f_segment_gather_docs(const s1f_current_unit *unit, const s1f_kv_rows *rows, int64_t batch, int32_t *ids);
void s1f_segment_part_ids(const s1f_current_unit *unit, int32_t *ids);
/* S1F_ERR_ARG unless the attention of a unit that siblings share means the same for each as alone: no window, no ALiBi,
 * and one document along the path, where rows->docs says which. */
s1f_status s1f_segment_check_parts(const s1f_current_unit *unit, int64_t key, int by_distance, int64_t batch,
                                   const s1f_kv_rows *rows);

/* S1F_ERR_ARG unless the layer's slab holds what a backward of q and out with so many kv heads needs. */
s1f_status s1f_segment_check_layer(const s1f_op_tensor *q, const s1f_op_tensor *out, int64_t kv_heads, int64_t key,
                                   const s1f_layer_shape *shape);

#endif
