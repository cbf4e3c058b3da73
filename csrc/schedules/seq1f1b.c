/* seq1f1b.c - one forward, one backward, over segments. [Seq1F1B, arXiv:2406.03488]
 *
 * Forwards run m.0 .. m.k-1, backwards m.k-1 .. m.0, micro-batches in order. k = 1 is exactly 1F1B. */
#include "families.h"

/* Warm-up length min(P - p - 2 + k, M k): backward enters a micro-batch by its last segment,
 * so k - 1 more forwards than in 1F1B come before the first one. */
static int64_t warmup_units(int64_t P, int64_t p, int64_t M, int64_t k)
{
    int64_t wanted = P - p - 2 + k;
    return wanted < M * k ? wanted : M * k;
}

static s1f_status order_of_rank(s1f_schedule *schedule, int32_t rank)
{
    int64_t M = s1f_schedule_num_microbatches(schedule), k = s1f_schedule_num_segments(schedule);
    int64_t warmup = warmup_units(s1f_schedule_num_ranks(schedule), rank, M, k);
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < warmup && status == S1F_OK; i++)
        status = s1f_schedule_append_forward(schedule, rank, i);
    for (int64_t i = 0; i < M * k && status == S1F_OK; i++) { /* steady, then cool-down once forwards are used up */
        if (warmup + i < M * k)
            status = s1f_schedule_append_forward(schedule, rank, warmup + i);
        if (status == S1F_OK)
            status = s1f_schedule_append_backward(schedule, rank, i);
    }
    return status;
}

s1f_status s1f_schedule_seq1f1b(int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                                int32_t stages_per_rank, s1f_schedule **out)
{
    return s1f_schedule_one_stage_per_rank("seq1f1b", order_of_rank, num_ranks, num_microbatches, num_segments,
                                           stages_per_rank, out);
}
