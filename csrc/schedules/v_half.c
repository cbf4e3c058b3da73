/* v_half.c - half of 1F1B's memory: two stages per rank in a V. [Controllable memory, arXiv:2405.15362]
 *
 * A building block in which F takes 1 step per rank down and 2 up, I 1 down and 2 up; the turns are such that few units
 * of a rank meet, and differ with P's parity. Segments are ours. F = I = W = 1 per micro-batch and rank: makespan at
 * most 3 M + 3 (P - 1) / (2 k), peak 2 floor((P + 2) / 2) + 2 (k - 1). M k >= floor(P / 2) + k. */
#include "split.h"

static int64_t peak(const s1f_request *request)
{
    return 2 * ((int64_t)request->num_ranks / 2 + request->num_segments);
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->stages_per_rank != 2)
        return "v = 2";
    if ((int64_t)request->num_microbatches * request->num_segments < peak(request) / 2)
        return request->num_segments == 1 ? "M >= floor(P / 2) + 1" : "M k >= floor(P / 2) + k";
    if (request->options.cap != 0 && request->options.cap < peak(request))
        return "cap >= 2 floor((P + 2) / 2) + 2 (k - 1)";
    return NULL;
}

static const char *broken_rule_whole(const s1f_request *request)
{
    return request->num_segments == 1 ? broken_rule(request) : "k = 1 (seq-v-half takes segments)";
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    static const s1f_block odd = {.step = {1, 2, 1, 2}, .turn = {1, 1, 1}}, even = {{1, 2, 1, 2}, {3, 1, 4}};
    static const s1f_block four = {{1, 2, 2, 2}, {3, 1, 3}}; /* found by search: 3 M + 5/2 from M = 4 on */
    int32_t P = request->num_ranks;
    return s1f_plan_blocks(request, plan, rank, P == 4 ? &four : P % 2 == 0 ? &even : &odd);
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_split(request, s1f_placement_wave, plan_of_rank, peak(request), out);
}

const s1f_family s1f_family_v_half = {
    .facts = {.name = "v-half",
              .description = "half of 1f1b's memory, half of its bubble: two stages per rank in a V",
              .source = "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
              .validity = "M >= floor(P / 2) + 1, k = 1, v = 2",
              .stages_per_rank = 2,
              .options = S1F_OPTION_CAP | S1F_OPTION_COSTS},
    .broken_rule = broken_rule_whole,
    .build = build,
};

const s1f_family s1f_family_seq_v_half = {
    .facts = {.name = "seq-v-half",
              .description = "v-half over segments",
              .source = "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, over segments",
              .validity = "M k >= floor(P / 2) + k, v = 2",
              .stages_per_rank = 2,
              .options = S1F_OPTION_CAP | S1F_OPTION_COSTS},
    .broken_rule = broken_rule,
    .build = build,
};
