/* executor.h - walks one rank's program: posts, waits, calls back, sends, frees. It decides nothing.
 *
 * Runs on the caller's thread, without Python's GIL; compute is a callback. One executor per (engine, program): the
 * training order and the forward-only one each have theirs and share edge ends and cache. */
#ifndef S1F_EXECUTOR_H
#define S1F_EXECUTOR_H

#include "../core/lower.h"
#include "current_unit.h"
#include "kv_cache.h"
#include "p2p.h"
#include "step_layout.h"

typedef struct { /* tensors that a unit hands to other stages */
    int32_t num_tensors;
    s1f_tensor_header tensors[S1F_MAX_TENSORS]; /* dtype, flags, ndim, sizes, bytes */
    const void *data[S1F_MAX_TENSORS];          /* contiguous; NULL where flagged S1F_TENSOR_NONE */
    void *keep;                                 /* the callback's reference; released once per SEND */
} s1f_result;

typedef struct { /* a message for a unit */
    const s1f_message *message;
    const void *payload;
    int32_t edge, place;
} s1f_input;

typedef struct {
    void *context;
    /* Computes the unit. inputs: messages of other ranks, in the order of the unit's WAITs. `result` is zeroed before,
     * read only if num_sends > 0; each of these SENDs, of the same data on different edges, releases `keep` once. */
    s1f_status (*run)(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                      int32_t num_sends, s1f_result *result);
    void (*release)(void *context, void *keep);
    /* Runs a part of `unit`, a W whose I has run, while the rank waits. *is_left: 0 once nothing of the W is left.
     * NULL: waits are not filled. */
    s1f_status (*fill)(void *context, s1f_unit unit, int32_t *is_left);
    /* Segment sizes for a sequence length that another rank chose: fills sizes, [column] (s1f_column). */
    s1f_status (*segment_sizes)(void *context, int64_t sequence_length, int64_t *sizes);
    /* The place of an edge is about to be free for the next message. Whoever still reads the last message must get
     * memory of its own before this returns. NULL: nobody reads on. */
    s1f_status (*leave_place)(void *context, int32_t edge, int32_t place);
    /* Waits until what a moved unit has saved is back. cell: the unit's, of all stages. */
    s1f_status (*back)(void *context, int64_t cell);
    /* For s1f_executor_settle_times: when the step's n-th unit ran on the device, on the monotonic clock. */
    s1f_status (*unit_times)(void *context, int64_t number, int64_t *start_ns, int64_t *end_ns);
    s1f_status (*back_time)(void *context, int64_t cell, int64_t *ns); /* when `back` was over there */
} s1f_compute;

typedef struct { /* of one instruction, on the monotonic clock */
    int64_t start_ns, end_ns;
} s1f_span;

typedef struct { /* a part of W that ran while the rank waited for a message, within that WAIT's span */
    s1f_unit unit;
    s1f_span span;
} s1f_fill;

typedef struct { /* measured at one stage during the last step */
    int32_t peak_live_units;
    int64_t peak_live_tokens;
} s1f_stage_measure;

typedef struct s1f_executor s1f_executor;

/* program, group, cache and ends are borrowed and must outlive the executor. ends[i]: this rank's end of edge i, NULL
 * where it has none. thread_scope: 1 where ranks are threads of one process. */
s1f_status s1f_executor_create(const s1f_program *program, int32_t rank, s1f_group *group, s1f_kv_cache *cache,
                               s1f_edge_end *const *ends, int32_t thread_scope, const s1f_compute *compute,
                               s1f_executor **out);
void s1f_executor_free(s1f_executor *executor); /* NULL is fine */

/* Runs one step. sequence_length: tokens of the longest sequence, in a tree those of all segments; 0: learn it from the
 * first message, where all are equal chains. sizes: those of the segments, [column] (s1f_column), NULL with 0.
 * parts: borrowed until the step's end; NULL: no unit holds siblings.
 * Blocks. On an error the step is abandoned where it stood; the caller ends it on the other ranks (s1f_group_fail). */
s1f_status s1f_executor_step(s1f_executor *executor, int64_t step, int32_t training, int64_t sequence_length,
                             const int64_t *sizes, const s1f_unit_parts *parts);

/* The unit of the last instruction that began in the last step: where a step that failed stood. */
s1f_unit s1f_executor_last_unit(const s1f_executor *executor);
/* A device may work behind the host. Once after a step that has ended on the device, and to which the device came at
 * start_ns: replaces the spans by those of the device. A WAIT ends when its message has come to the device, and begins,
 * as a RUN may, when the instruction before has ended: a gap between two spans is the time by which the host was
 * late. */
s1f_status s1f_executor_settle_times(s1f_executor *executor, int64_t start_ns);
/* Spans of the last step, one per instruction of the rank's program; a step that failed leaves zeros at its end.
 * Borrowed. */
const s1f_span *s1f_executor_spans(const s1f_executor *executor, int64_t *count);
/* Parts of Ws that filled waits of the last step, in order; the RUNs of these Ws have less left to do. Borrowed. */
const s1f_fill *s1f_executor_fills(const s1f_executor *executor, int64_t *count);
s1f_stage_measure s1f_executor_stage_measure(const s1f_executor *executor, int32_t stage);

#endif
