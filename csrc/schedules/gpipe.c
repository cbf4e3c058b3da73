/* gpipe.c - all forwards, then all backwards. [GPipe, arXiv:1811.06965]
 *
 * With k segments it is TeraPipe's order [arXiv:2102.07988]: forwards m.0 .. m.k-1, then backwards m.k-1 .. m.0,
 * micro-batches in order both times. */
#include "families.h"

static s1f_status order_of_rank(s1f_schedule *schedule, int32_t rank)
{
    int64_t num_units = (int64_t)s1f_schedule_num_microbatches(schedule) * s1f_schedule_num_segments(schedule);
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++)
        status = s1f_schedule_append_forward(schedule, rank, i);
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++)
        status = s1f_schedule_append_backward(schedule, rank, i);
    return status;
}

s1f_status s1f_schedule_gpipe(int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                              int32_t stages_per_rank, s1f_schedule **out)
{
    return s1f_schedule_one_stage_per_rank("gpipe", order_of_rank, num_ranks, num_microbatches, num_segments,
                                           stages_per_rank, out);
}
