/* transform.h - makes an order from another order: with recomputed units, with units whose activations are away while
 * no unit reads them, or with weight gradients as late as possible, for a runtime that fills waits. S1F_ERR_SCHEDULE
 * where the order breaks a rule; S1F_ERR_MEMORY. *out is owned by the caller and untouched on error. */
#ifndef S1F_TRANSFORM_H
#define S1F_TRANSFORM_H

#include "schedule.h"

/* Makes the order with an R just before B, or I, of every cell chosen[cell of all stages] (NULL: of all); a cell that
 * has one, or whose unit is moved away, stays as it is. R waits for no message: it runs while the gradient that B waits
 * for is on its way. An order that does not go back stays as it is. */
s1f_status s1f_schedule_recompute(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out);

/* Makes the order with O, A and L of cells chosen[cell of all stages] (NULL: of all). O stands right after F, A one
 * unit later, L one unit before B or I: one unit of the rank runs beside each way. A unit stays here if it would not be
 * away while another one runs, or if R makes again what it saves. An order that does not go back stays as it is.
 * S1F_ERR_ARG where the order moves units already. */
s1f_status s1f_schedule_offload(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out);

/* Makes the order with every backward as I, and W in the order of the rank's I, each where its rank would else hold
 * more than max_live_units live units (F to the end of the backward, R to it where they are recomputed); the others at
 * the end. max_live_units 0: the most that any rank holds in the order as it is. S1F_ERR_ARG where a rank
 * holds more units whenever its Ws run. */
s1f_status s1f_schedule_defer_weights(const s1f_schedule *schedule, int64_t max_live_units, s1f_schedule **out);

/* -- begin and end of each transform ----------------------------------------------------------------------------- */

typedef struct {
    const s1f_schedule *schedule; /* keeps the rules; borrowed */
    s1f_shape shape;              /* its shape, with marks */
    s1f_schedule *out;            /* empty, with its counts and placement */
    s1f_pool pool;                /* of whatever the transform needs */
} s1f_transform;

/* S1F_ERR_SCHEDULE where the order breaks a rule; S1F_ERR_MEMORY. s1f_transform_finish is due either way. */
s1f_status s1f_transform_begin(const s1f_schedule *schedule, s1f_transform *transform);
/* s1f_schedule_finish, and frees the pool. */
s1f_status s1f_transform_finish(s1f_transform *transform, s1f_status status, s1f_schedule **out);

#endif
