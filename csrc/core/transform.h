/* transform.h - what every way to make another order of an order begins and ends with. */
#ifndef S1F_TRANSFORM_H
#define S1F_TRANSFORM_H

#include "schedule.h"

typedef struct {
    const s1f_schedule *schedule; /* keeps the rules; borrowed */
    s1f_shape shape;              /* of it, with what becomes of its cells */
    s1f_schedule *out;            /* empty, with its counts and placement */
} s1f_transform;

/* S1F_ERR_SCHEDULE where the order breaks a rule; S1F_ERR_MEMORY. s1f_transform_finish is due either way. */
s1f_status s1f_transform_begin(const s1f_schedule *schedule, s1f_transform *transform);
/* Hands the new order to the caller if the status says that it is made, and frees it otherwise. Returns the status. */
s1f_status s1f_transform_finish(s1f_transform *transform, s1f_status status, s1f_schedule **out);

#endif
