/* kv_cache.h - keys and values of earlier segments, and their gradients on the way back.
 *
 * One slab per (stage, layer, slot): k and v, each [batch][kv_heads][sequence_length][head_dim] in the model's dtype, and
 * one fp32 slab (fp64 for fp64) per (stage, layer, grad slot) for dK and dV. Rows are addressed by unit (slot of the
 * micro-batch, offset of the segment), never appended, so recomputation, evaluation or a retry writes the same rows
 * again. Slots come from the lowered program. A slab is allocated at its first use in a step of a shape and kept.
 *
 * States. Per (layer, slot, segment): written. A forward of segment s needs 0..s-1 written by the same micro-batch. A
 * backward of segment s needs every later segment's backward finished, for then its own dK/dV rows are complete. Any use
 * out of order is S1F_ERR_STATE and names layer, micro-batch and segment.
 *
 * Layer keys: registered by s1f_layer_register (process-wide); any other value is rejected, never used as an index.
 * Threads: one cache belongs to one rank, whose units run one at a time; no lock. */
#ifndef S1F_KV_CACHE_H
#define S1F_KV_CACHE_H

#include "current_unit.h"

typedef struct s1f_kv_cache s1f_kv_cache;

typedef struct {
    int32_t stage;
    int32_t kv_slots, grad_slots; /* from s1f_program_stage_peak */
} s1f_stage_slots;

typedef struct { /* what a layer's slab holds; fixed by its first use in a step */
    int64_t batch, kv_heads, head_dim;
    int32_t dtype;      /* s1f_dtype, kernels/attention.h */
    int32_t with_docs;  /* keep document ids [batch][sequence_length] beside */
} s1f_layer_shape;

typedef struct {               /* borrowed pointers into a slab */
    void *k, *v;               /* row t of (b, h): base + ((b * kv_heads + h) * sequence_length + t) * head_dim elements */
    int32_t *docs;             /* row t of b: base + b * sequence_length + t; NULL without */
    int64_t sequence_length;   /* allocated rows per head */
} s1f_kv_rows;

typedef struct {
    void *dk, *dv;             /* float, or double where dtype is fp64; laid out as s1f_kv_rows */
    int64_t sequence_length;
    int32_t first;             /* 1: nothing was added for this micro-batch yet: store, and zero what is not stored */
} s1f_kv_grads;

s1f_status s1f_kv_cache_create(s1f_kv_cache **out);
void s1f_kv_cache_free(s1f_kv_cache *cache); /* NULL is fine */

/* Enters a step: slots of each stage, tokens per sequence, segments. Keeps slabs that still fit, forgets every state
 * (also what a failed step left). */
s1f_status s1f_kv_cache_begin_step(s1f_kv_cache *cache, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t sequence_length, int32_t num_segments);
/* Called by the executor around each RUN. begin of F: a new micro-batch takes the slot over from its last one.
 * finish of B: the segment's backward is done; of segment 0: the slots are free. */
s1f_status s1f_kv_cache_begin_unit(s1f_kv_cache *cache, const s1f_current_unit *unit);
s1f_status s1f_kv_cache_finish_unit(s1f_kv_cache *cache, const s1f_current_unit *unit);

/* Called by ops. write: rows of the unit's segment may be written, rows [0, offset + length) then read. In F the same
 * layer twice is S1F_ERR_STATE (its rows would be overwritten); in B (recomputation) it writes the same rows again. */
s1f_status s1f_kv_cache_write(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer,
                              const s1f_layer_shape *shape, s1f_kv_rows *rows);
/* read: rows [0, offset + length) for the backward of the unit; grads: the slab that its dK/dV are added to. */
s1f_status s1f_kv_cache_read(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer, s1f_layer_shape *shape,
                             s1f_kv_rows *rows, s1f_kv_grads *grads);

/* Bytes held now, and the most held since begin_step, of K/V and of dK/dV slabs. */
void s1f_kv_cache_bytes(const s1f_kv_cache *cache, int64_t *kv_bytes, int64_t *grad_bytes);

s1f_status s1f_layer_register(int64_t layer); /* S1F_ERR_ARG below 0 */
int s1f_layer_is_registered(int64_t layer);

#endif
