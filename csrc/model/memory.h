/* memory.h - the bytes that each rank holds while it walks its order.
 *
 * What lives from when to when, by passes of the same stage (I stands for B where the backward is split):
 *   activations        what F saved, from F to the end of B; where split, all of it to the end of I and the part that
 *                      W reads to the end of W
 *   output gradients   what I leaves for W, from I to the end of W
 *   KV slot            of a micro-batch, from F of segment 0 to the end of B of segment 0
 *   dK/dV slab         of a micro-batch, from B of the last segment to the end of B of segment 0
 *   receive places     the whole step, each as large as the largest message
 * Where nothing goes back an activation lives while F runs and a KV slot ends with F of the last segment.
 * A rank runs its units one after the other, so peaks follow from the order and not from the times. */
#ifndef S1F_MEMORY_H
#define S1F_MEMORY_H

#include "tape.h"

typedef struct {                     /* NULL: nothing, but for `kept` */
    const int64_t *activation;       /* [stage][segment] bytes of a unit */
    const int64_t *kept;             /* [stage][segment] the part of them that I leaves to W; NULL: all */
    const int64_t *output_gradient;  /* [stage][segment] */
    const int64_t *kv, *kv_gradient; /* [stage] bytes of a micro-batch */
    const int64_t *message;          /* [segment] */
} s1f_memory_bytes;

typedef struct { /* of one rank: units, then bytes; each kind at its own peak */
    int64_t units, activations, output_gradients, kv, kv_gradients, receive;
    int64_t total; /* most of all kinds together at one time */
} s1f_memory_peak;

/* peaks[num_ranks]. S1F_ERR_ARG if a number is negative, if `kept` is more than the whole, or if the sums could
 * overflow. Linear in the number of units. Pure. */
s1f_status s1f_tape_memory(const s1f_tape *tape, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks);

#endif
