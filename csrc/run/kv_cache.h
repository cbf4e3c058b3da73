/* kv_cache.h - keys and values of earlier segments, and their gradients on the way back.
 *
 * One slab per (stage, layer, slot): k and v, each [batch][kv_heads][num_rows][its head size] in the model's
 * dtype, and one fp32 slab (fp64 for fp64) per (stage, layer, grad slot) for dK and dV. Rows are addressed by unit
 * (slot of the micro-batch, row of the segment), never appended: recomputation finds them written, evaluation or a
 * retry writes the same rows again. Whoever makes the unit gives a segment its rows; they may serve another segment
 * after its backward. Slots come from the lowered program. A slab is allocated at its first use and kept;
 * it is replaced where a step needs a bigger one. Memory appears as rows are touched, and a slab of a long sequence
 * gives the rows of a segment back once its backward is done, for nothing reads them any more: it holds the tokens that
 * are live, not its slots. Memory of a device comes from a table of functions; it is held whole.
 *
 * States. The segments of a micro-batch are a tree: each but the first follows another one, its parent. In a chain that
 * is the one before it. F(m.0) takes its slot over, F(m.s) follows F of the parent, B(m.s) follows F(m.s) and the Bs of
 * all that follow s; the first B takes the gradient slot over; B(m.0) gives both back. Each F gets a serial number, and
 * a layer's rows of a segment are *written* if they carry the serial of the slot's latest F of that segment: nothing is
 * ever cleared, yet rows of an earlier micro-batch or of a failed step are never read. A forward needs all segments of
 * its path written. The rows of dK and dV of a segment are *stored* by the same kind of number: the first contribution
 * to them stores, later ones add, whichever segment it comes from (a layer may be skipped in the last). A contribution
 * goes to a whole path, so the segments of a path that have been stored come first: one number says which.
 * Any use out of order is S1F_ERR_STATE and names stage, layer, micro-batch and segment.
 *
 * Layer keys: any number; compared, never used as an index.
 * Threads: one cache belongs to one rank, whose units run one at a time; no lock. */
#ifndef S1F_KV_CACHE_H
#define S1F_KV_CACHE_H

#include "../core/dtype.h"
#include "kv_slots.h"
#include "slab.h"

typedef struct s1f_kv_cache s1f_kv_cache;

typedef struct { /* what a layer's slab holds, and where; fixed by its first use in a step */
    int64_t batch, kv_heads, head_dim, v_head_dim; /* head_dim: of k */
    int32_t dtype;                                 /* FLOAT32, FLOAT64, BFLOAT16 or FLOAT16 */
    int32_t with_docs;                             /* keep document ids [batch][num_rows] beside */
    const s1f_slab_memory *memory;                 /* NULL: malloc's; borrowed for the life of the cache */
    int64_t device;                                /* handed to memory->allocate */
} s1f_layer_shape;

typedef struct {        /* borrowed pointers into a slab, valid until the next begin_step or free */
    void *k, *v;        /* row t of (b, h): base + ((b * kv_heads + h) * num_rows + t) * its head size elements */
    int32_t *docs;      /* row t of b: base + b * num_rows + t; NULL without */
    int64_t num_rows;   /* per head */
    int32_t is_written; /* the unit's own rows hold its keys and values: its F has written them */
} s1f_kv_rows;

typedef struct {
    void *dk, *dv; /* float, or double where dtype is fp64; laid out as s1f_kv_rows */
    int64_t kept;  /* keys, along the path: rows of the first so many are added to, those of the others stored */
} s1f_kv_grads;

s1f_status s1f_kv_cache_create(s1f_kv_cache **out);
void s1f_kv_cache_free(s1f_kv_cache *cache); /* NULL is fine */

/* Enters a step: slots of each stage, rows that a slot has, the most segments of a micro-batch. Keeps slabs, forgets
 * every state and shape (also what a failed step left). */
s1f_status s1f_kv_cache_begin_step(s1f_kv_cache *cache, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t num_rows, int32_t num_segments);
/* Called by the executor around each RUN. begin of F: of segment 0, the micro-batch takes the slot over. finish of F
 * and B: the segment is done; finish of the last F where no backward follows (training 0), and of B.0, frees the slot.
 * I (the gradient of the input) counts as B; R reads what its F has written; W touches nothing. A unit that failed is
 * not finished: it may begin again. */
s1f_status s1f_kv_cache_begin_unit(s1f_kv_cache *cache, const s1f_current_unit *unit);
void s1f_kv_cache_finish_unit(s1f_kv_cache *cache, const s1f_current_unit *unit);

/* Called by ops. write: rows of the unit's segment may be written, those of its path then read. In F the same
 * layer twice is S1F_ERR_STATE (its rows would be overwritten); in R and B (recomputation) its rows are written. */
s1f_status s1f_kv_cache_write(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer,
                              const s1f_layer_shape *shape, s1f_kv_rows *rows);
/* read: rows of the path for the backward of the unit; grads: the slab that its dK/dV go to. One contribution
 * per layer and B; the rows of the unit's own segment are complete once it is made. */
s1f_status s1f_kv_cache_read(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer, s1f_layer_shape *shape,
                             s1f_kv_rows *rows, s1f_kv_grads *grads);

/* At least `bytes` of memory for the computation of an op, 64-byte aligned, with anything in it: borrowed until the
 * next call or free. One for the whole cache, kept and replaced by a bigger one like a slab, so that the steps after
 * the first allocate none; its memory goes back after each unit of a long sequence, as rows do. */
s1f_status s1f_kv_cache_scratch(s1f_kv_cache *cache, int64_t bytes, void **out);

/* Bytes reserved for K/V slabs (document ids included) and of dK/dV slabs. Slabs are only ever added or replaced by
 * bigger ones, so that this is also the most held. */
void s1f_kv_cache_bytes(const s1f_kv_cache *cache, int64_t *kv_bytes, int64_t *grad_bytes);

/* Layers used since begin_step, index ascending from 0: 0 past the last, else 1 and what its slabs hold. */
int s1f_kv_cache_layer(const s1f_kv_cache *cache, int32_t index, int32_t *stage, s1f_layer_shape *shape);

#endif
