/* v_min.c - a third of 1F1B's memory: two stages per rank in a V. [Controllable memory, arXiv:2405.15362]
 *
 * A building block in which F and I take 1 step per rank, down and up; where 3 divides P units of a rank would meet,
 * and the turns are longer. Segments are ours. F = I = W = 1 per micro-batch and rank: makespan at most 3 M + 2 (P - 1)
 * / k, peak 2 floor((P + 4) / 3) + 2 (k - 1). M k >= floor((P + 1) / 3) + k. */
#include "split.h"

static int64_t peak(const s1f_request *request)
{
    return 2 * (((int64_t)request->num_ranks + 1) / 3 + request->num_segments);
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->stages_per_rank != 2)
        return "v = 2";
    if ((int64_t)request->num_microbatches * request->num_segments < peak(request) / 2)
        return request->num_segments == 1 ? "M >= floor((P + 4) / 3)" : "M k >= floor((P + 1) / 3) + k";
    if (request->options.cap != 0 && request->options.cap < peak(request))
        return "cap >= 2 floor((P + 4) / 3) + 2 (k - 1)";
    return NULL;
}

static const char *broken_rule_whole(const s1f_request *request)
{
    return request->num_segments == 1 ? broken_rule(request) : "k = 1 (seq-v-min takes segments)";
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    static const s1f_block usual = {.step = {1, 1, 1, 1}, .turn = {1, 1, 1}}, of_three = {{1, 1, 1, 1}, {2, 1, 3}};
    return s1f_plan_blocks(request, plan, rank, request->num_ranks % 3 == 0 ? &of_three : &usual);
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_split(request, s1f_placement_wave, plan_of_rank, peak(request), out);
}

const s1f_family s1f_family_v_min = {
    .facts = {.name = "v-min",
              .description = "a third of 1f1b's memory, two thirds of its bubble: two stages per rank in a V",
              .source = "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
              .validity = "M >= floor((P + 4) / 3), k = 1, v = 2",
              .stages_per_rank = 2,
              .options = S1F_OPTION_CAP | S1F_OPTION_COSTS},
    .broken_rule = broken_rule_whole,
    .build = build,
};

const s1f_family s1f_family_seq_v_min = {
    .facts = {.name = "seq-v-min",
              .description = "v-min over segments",
              .source = "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, over segments",
              .validity = "M k >= floor((P + 1) / 3) + k, v = 2",
              .stages_per_rank = 2,
              .options = S1F_OPTION_CAP | S1F_OPTION_COSTS},
    .broken_rule = broken_rule,
    .build = build,
};
