/* transform.c - checks an order, and makes the empty one that follows it. */
#include "transform.h"

#include "check.h"

s1f_status s1f_transform_begin(const s1f_schedule *schedule, s1f_transform *transform)
{
    *transform = (s1f_transform){.schedule = schedule};
    S1F_TRY(s1f_schedule_check(schedule, 0));
    S1F_TRY(s1f_schedule_full_shape(schedule, &transform->shape));
    return s1f_schedule_create_like(schedule, &transform->out);
}

s1f_status s1f_transform_finish(s1f_transform *transform, s1f_status status, s1f_schedule **out)
{
    if (status == S1F_OK)
        *out = transform->out;
    else
        s1f_schedule_free(transform->out);
    return status;
}
