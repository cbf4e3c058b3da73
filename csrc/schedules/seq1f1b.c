/* seq1f1b.c - one forward, one backward, over segments. [Seq1F1B, arXiv:2406.03488]
 *
 * Forwards run m.0 .. m.k-1, backwards m.k-1 .. m.0, micro-batches in order. k = 1 is exactly 1F1B.
 * F = 1, B = 2: makespan 3 M + 3 (P - 1) / k, peak min(P - 1 + k, M k). Any counts. */
#include "families.h"

/* Warm-up length min(P - p - 2 + k, M k): backward enters a micro-batch by its last segment,
 * so k - 1 more forwards than in 1F1B come before the first one. */
static int64_t warmup_units(const s1f_request *request, int64_t p)
{
    int64_t P = request->num_ranks, M = request->num_microbatches, k = request->num_segments;
    int64_t wanted = (P - p - 1) * (1 + (int64_t)request->options.extra_warmup) + k - 1;
    return wanted < M * k ? wanted : M * k;
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int64_t num_units = (int64_t)request->num_microbatches * request->num_segments;
    int64_t warmup = warmup_units(request, rank);
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < warmup && status == S1F_OK; i++)
        status = s1f_schedule_append_forward(schedule, rank, i);
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++) { /* steady, then cool-down: no forwards left */
        if (warmup + i < num_units)
            status = s1f_schedule_append_forward(schedule, rank, warmup + i);
        if (status == S1F_OK)
            status = s1f_schedule_append_backward(schedule, rank, i);
    }
    return status;
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_by_rank(request, order_of_rank, out);
}

const s1f_family s1f_family_seq1f1b = {
    .facts = {.name = "seq1f1b",
              .description = "one forward, one backward, over segments",
              .source = "Seq1F1B, arXiv:2406.03488",
              .validity = "v = 1",
              .stages_per_rank = 1,
              .options = S1F_OPTION_EXTRA_WARMUP},
    .broken_rule = s1f_rule_one_stage_per_rank,
    .build = build,
};
