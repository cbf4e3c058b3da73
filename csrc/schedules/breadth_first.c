/* breadth_first.c - every micro-batch through one stage of a rank before the next stage. [arXiv:2211.05953]
 *
 * Also torch's LoopedBFS. Memory of all micro-batches, but a stage's weights are gathered and reduced only once.
 * F = 1, B = 2 per rank: makespan 3 M + 3 (P - 1) / (v k), peak v M k.
 * M k >= P, else a turn waits for the round trip. */
#include "families.h"

static const char *broken_rule(const s1f_request *request)
{
    return (int64_t)request->num_microbatches * request->num_segments >= request->num_ranks ? NULL : "M k >= P";
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int64_t num_units = (int64_t)request->stages_per_rank * request->num_microbatches * request->num_segments;
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++)
        status = s1f_schedule_append_round_forward(schedule, rank, 1, i);
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++)
        status = s1f_schedule_append_round_backward(schedule, rank, 1, i);
    return status;
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_by_rank(request, order_of_rank, out);
}

const s1f_family s1f_family_breadth_first = {
    .facts = {.name = "breadth-first",
              .description = "all micro-batches through one stage of a rank, then through its next",
              .source = "Breadth-First Pipeline Parallelism, arXiv:2211.05953",
              .validity = "M k >= P",
              .stages_per_rank = 1},
    .broken_rule = broken_rule,
    .build = build,
};
