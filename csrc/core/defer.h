/* defer.h - an order whose weight gradients come as late as may be, for a runtime that fills waits with them. */
#ifndef S1F_DEFER_H
#define S1F_DEFER_H

#include "schedule.h"

/* Makes the order with every backward as I, and W in the order of the rank's I, each where its rank would else hold
 * more than max_live_units live units (F to the end of the backward, R to it where they are recomputed); the others at
 * the end. max_live_units 0: the most that any rank holds in the order as it is. S1F_ERR_SCHEDULE where the order
 * breaks a rule; S1F_ERR_ARG where a rank holds more units whenever its Ws run; S1F_ERR_MEMORY. *out is owned by the
 * caller and untouched on error. */
s1f_status s1f_schedule_defer_weights(const s1f_schedule *schedule, int64_t max_live_units, s1f_schedule **out);

typedef struct {   /* W of a unit whose backward is split: numbers in the order of its rank */
    int64_t ready; /* of its I */
    int64_t run;   /* of itself */
} s1f_late_weight;

/* All of one rank's order, which keeps the rules, in the order of their W. *out: free(). S1F_ERR_MEMORY. */
s1f_status s1f_find_late_weights(const s1f_shape *shape, const s1f_unit *units, int64_t num_units,
                                 s1f_late_weight **out, int64_t *count);

#endif
