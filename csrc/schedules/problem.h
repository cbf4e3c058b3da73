/* problem.h - what a search orders: the units of a problem, each by a number, what it waits for, and a time that no
 * order takes less than. Backward is split here: F, I and W of every cell. */
#ifndef S1F_PROBLEM_H
#define S1F_PROBLEM_H

#include "../core/schedule.h"
#include "../core/table.h"

typedef struct {
    /* Given, and borrowed: */
    s1f_shape shape;                              /* of the orders, which split the backward; without trees */
    const double *pass_seconds[S1F_SPLIT_PASSES]; /* each [stage][column] (s1f_column) */
    double transfer;                              /* seconds between two ranks */
    const int64_t *unit_bytes;                    /* [stage][column]: held from the start of F to the end of W */
    const int64_t *cap_bytes;                     /* [rank]; INT64_MAX: no cap. The bytes of all units fit in int64_t */
    /* Units by their numbers: pass by pass (F, I, W), stage by stage, cell by cell. */
    int32_t num_units, num_cells; /* units of all stages and passes; of one stage */
    double bound;                 /* no order takes less */
    double *work;                 /* [rank] seconds of the rank's units */
    int32_t *first;               /* [rank + 1]: where the units of a rank begin in an order */
    s1f_unit *units;              /* [number], as the next */
    int32_t *rank;
    int32_t *source; /* the unit of a neighbouring stage for which this unit waits, -1: none */
    int32_t *target; /* the unit of a neighbouring stage that waits for this unit, -1: none */
    double *lag;     /* seconds of the message from its source */
    double *seconds;
    double *tail;          /* from its end to the end of all, if no rank ever were busy */
    int64_t *bytes;        /* memory that the unit takes, or frees (W): negative */
    int32_t (*earlier)[2]; /* units of its stage that the unit must follow, -1: none */
    uint64_t *past;        /* [unit of a micro-batch][word]: bits of the units that always come before, and its own */
    int64_t words;         /* of a row of `past`; 0: there is none, as a micro-batch has too many units */
} s1f_problem;

/* Fills what is not given. Needs 3 units per (stage, micro-batch, segment) to be at most INT32_MAX. Arrays are the
 * pool's. S1F_ERR_MEMORY. */
s1f_status s1f_problem_number(s1f_problem *problem, s1f_pool *pool);
int32_t s1f_problem_number_of(const s1f_problem *problem, s1f_unit unit); /* of a B: that of its I */
/* 1 where a comes before b whatever the ranks do: by its inputs, or because micro-batches take turns where all are
 * equal. Needs `past`. */
int s1f_problem_precedes(const s1f_problem *problem, s1f_unit a, s1f_unit b);

#endif
