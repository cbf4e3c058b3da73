/* memory.h - the bytes that each rank holds while it walks its order.
 *
 * Kinds of bytes, and from when to when each lives, are the holdings of unit.h: activations (S1F_HOLDS_SAVED and
 * S1F_HOLDS_FOR_WEIGHT), output gradients, KV slots and dK/dV slabs or the rows of both, inputs of recomputed units and
 * what else stays, logits of a shard of the vocabulary. In addition receive places, for the whole step, each as large
 * as the largest message that comes into it.
 * A rank runs its units one after the other, so peaks follow from the order and not from the times. */
#ifndef S1F_MEMORY_H
#define S1F_MEMORY_H

#include "../core/program.h"
#include "../core/table.h"

typedef struct {
    const int64_t *of[S1F_NUM_HOLDINGS]; /* flat tables as the row of the holding in unit.c says; NULL: nothing */
    const int64_t *message;              /* [column] */
    const int64_t *statistics;           /* [column] of a message from shard to shard of the vocabulary */
} s1f_memory_bytes;

typedef struct { /* of one rank */
    int64_t units;
    int64_t of[S1F_NUM_HOLDINGS]; /* peak bytes of the holdings that count with this one; 0: it counts with another */
    int64_t receive;
    int64_t total; /* most bytes of all kinds together at one time */
} s1f_memory_peak;

/* peaks[num_ranks]. S1F_ERR_ARG if a number is negative or the sums could overflow; S1F_ERR_MEMORY. Linear in the
 * number of units. Pure. */
s1f_status s1f_program_memory(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks);

/* Finds the bytes of single units; what `bytes` points to must outlive it. */
typedef struct {
    const s1f_shape *shape;
    uint32_t given; /* bits (1 << s1f_holding) */
    struct {
        const int64_t *values;
        int64_t stage, column; /* the value of a unit is number unit.stage * stage + s1f_column * column */
        s1f_holding_facts facts;
    } of[S1F_NUM_HOLDINGS];
} s1f_byte_tables;

s1f_byte_tables s1f_byte_tables_of(const s1f_shape *shape, const s1f_memory_bytes *bytes);
/* Bytes of some holdings (bits 1 << s1f_holding) that a unit takes, or that it frees. */
int64_t s1f_changed_bytes(const s1f_byte_tables *tables, uint32_t holdings, s1f_unit unit, int takes);

#endif
