/* memory.h - the bytes that each rank holds while it walks its order.
 *
 * Kinds of bytes, and from when to when each lives, are the holdings of unit.h: activations (S1F_HOLDS_SAVED and
 * S1F_HOLDS_FOR_WEIGHT), output gradients, KV slots and dK/dV slabs or the rows of both, inputs of recomputed units and
 * what else stays, what a unit allocates for a while, logits of a shard of the vocabulary. In addition receive places,
 * for the whole step, each as large as the largest message that comes into it.
 * A rank runs its units one after the other, so peaks follow from the order and not from the times. */
#ifndef S1F_MEMORY_H
#define S1F_MEMORY_H

#include "../core/program.h"

typedef struct {                     /* NULL: nothing, but for `kept`; columns: s1f_column */
    const int64_t *activation;       /* [stage][column] bytes of a unit */
    const int64_t *kept;             /* [stage][column] the part of them that I leaves to W; NULL: all */
    const int64_t *output_gradient;  /* [stage][column] */
    const int64_t *kv, *kv_gradient; /* [stage] bytes of a micro-batch: its slot, of the longest one */
    const int64_t *input;            /* [stage][column] of a recomputed unit, beyond its receive place */
    /* [stage][column] keys and values that a unit wrote, and their gradients, in place of `kv` and `kv_gradient` */
    const int64_t *kv_rows, *kv_gradient_rows;
    const int64_t *staying;                      /* [stage][column] of a unit, whatever becomes of what it saved */
    const int64_t *forward_work, *backward_work; /* [stage][column] that F or R, and B or I, allocate for a while */
    const int64_t *logits;                       /* [column] of a shard of the vocabulary, from S to T */
    const int64_t *message;                      /* [column] */
    const int64_t *statistics;                   /* [column] of a message from shard to shard */
} s1f_memory_bytes;

typedef struct { /* of one rank: units, then bytes; each kind at its own peak */
    int64_t units, activations, output_gradients, kv, kv_gradients, inputs, logits, receive;
    int64_t total; /* most of all kinds together at one time */
} s1f_memory_peak;

/* peaks[num_ranks]. S1F_ERR_ARG if a number is negative, if `kept` is more than the whole, or if the sums could
 * overflow; S1F_ERR_MEMORY. Linear in the number of units. Pure. */
s1f_status s1f_program_memory(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks);

/* Bytes of some holdings (bits 1 << s1f_holding) that a unit takes, and that it frees. */
int64_t s1f_taken_bytes(const s1f_shape *shape, const s1f_memory_bytes *bytes, uint32_t holdings, s1f_unit unit);
int64_t s1f_freed_bytes(const s1f_shape *shape, const s1f_memory_bytes *bytes, uint32_t holdings, s1f_unit unit);

#endif
