/* 1f1b.c - one forward, one backward, over whole micro-batches. [PipeDream-Flush, arXiv:2006.09503]
 *
 * With k segments a micro-batch still goes forward, and back, as a whole: its k units run one after the other. That is
 * 1F1B's memory (P micro-batches on rank 0) with shorter messages; seq1f1b is the order that gains from segments. */
#include "families.h"

static s1f_status append_microbatch(s1f_schedule *schedule, int32_t stage, int64_t microbatch,
                                    s1f_status (*append)(s1f_schedule *schedule, int32_t stage, int64_t i))
{
    int64_t k = s1f_schedule_num_segments(schedule);
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < k && status == S1F_OK; i++)
        status = append(schedule, stage, microbatch * k + i);
    return status;
}

static s1f_status order_of_rank(s1f_schedule *schedule, int32_t rank)
{
    int64_t P = s1f_schedule_num_ranks(schedule), M = s1f_schedule_num_microbatches(schedule);
    int64_t warmup = P - rank - 1 < M ? P - rank - 1 : M;
    s1f_status status = S1F_OK;
    for (int64_t m = 0; m < warmup && status == S1F_OK; m++)
        status = append_microbatch(schedule, rank, m, s1f_schedule_append_forward);
    for (int64_t m = 0; m < M && status == S1F_OK; m++) {
        if (warmup + m < M)
            status = append_microbatch(schedule, rank, warmup + m, s1f_schedule_append_forward);
        if (status == S1F_OK)
            status = append_microbatch(schedule, rank, m, s1f_schedule_append_backward);
    }
    return status;
}

s1f_status s1f_schedule_1f1b(int32_t num_ranks, int32_t num_microbatches, int32_t num_segments, int32_t stages_per_rank,
                             s1f_schedule **out)
{
    return s1f_schedule_one_stage_per_rank("1f1b", order_of_rank, num_ranks, num_microbatches, num_segments,
                                           stages_per_rank, out);
}
