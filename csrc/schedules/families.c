/* families.c - the table of names, and what families with one stage per rank share. */
#include "families.h"

#include <stdlib.h>

const s1f_family s1f_families[] = {
    {"seq1f1b", s1f_schedule_seq1f1b},
    {"1f1b", s1f_schedule_1f1b},
    {"gpipe", s1f_schedule_gpipe},
    {NULL, NULL},
};

s1f_status s1f_schedule_one_stage_per_rank(const char *family, s1f_order_of_rank *order_of_rank, int32_t num_ranks,
                                           int32_t num_microbatches, int32_t num_segments, int32_t stages_per_rank,
                                           s1f_schedule **out)
{
    if (stages_per_rank != 1)
        return s1f_fail(S1F_ERR_SCHEDULE, "%s holds one stage per rank, stages_per_rank is %d", family,
                        stages_per_rank);
    int32_t *rank_of_stage = calloc((size_t)num_ranks, sizeof *rank_of_stage);
    if (rank_of_stage == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the placement of %d stages", num_ranks);
    for (int32_t rank = 0; rank < num_ranks; rank++)
        rank_of_stage[rank] = rank;

    s1f_schedule *schedule = NULL;
    s1f_status status =
        s1f_schedule_create(num_ranks, num_ranks, num_microbatches, num_segments, rank_of_stage, &schedule);
    free(rank_of_stage);
    for (int32_t rank = 0; rank < num_ranks && status == S1F_OK; rank++)
        status = order_of_rank(schedule, rank);
    if (status != S1F_OK) {
        s1f_schedule_free(schedule);
        return status;
    }
    *out = schedule;
    return S1F_OK;
}

s1f_status s1f_schedule_append_forward(s1f_schedule *schedule, int32_t stage, int64_t i)
{
    int32_t k = s1f_schedule_num_segments(schedule);
    s1f_unit unit = {S1F_PASS_FORWARD, stage, (int32_t)(i / k), (int32_t)(i % k)};
    return s1f_schedule_append(schedule, unit);
}

s1f_status s1f_schedule_append_backward(s1f_schedule *schedule, int32_t stage, int64_t i)
{
    int32_t k = s1f_schedule_num_segments(schedule);
    s1f_unit unit = {S1F_PASS_BACKWARD, stage, (int32_t)(i / k), k - 1 - (int32_t)(i % k)};
    return s1f_schedule_append(schedule, unit);
}
