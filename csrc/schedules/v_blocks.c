/* v_blocks.c - two stages per rank in a V, in less than 1F1B's memory. [Controllable memory, arXiv:2405.15362]
 *
 * A building block says how long F and I take from rank to rank and where they turn (split.h). The turns are such that
 * few units of a rank meet, so they differ with P. Segments are ours. F = I = W = 1 per micro-batch and rank, h the
 * segments of a stage that are held beyond those of one micro-batch:
 *   v-half, h = floor(P / 2)         half of 1F1B's memory, makespan at most 3 M + 3 (P - 1) / (2 k)
 *   v-min,  h = floor((P + 1) / 3)   a third of it, makespan at most 3 M + 2 (P - 1) / k
 * Peak 2 (h + k). M k >= h + k. */
#include "split.h"

typedef struct {
    int32_t added, divisor;       /* h = floor((P + added) / divisor) */
    s1f_block blocks[3], of_four; /* for P ranks blocks[P % divisor], but of_four where P = 4 */
    const char *cap_rule;
} numbers;

static const numbers half = {
    .divisor = 2,
    .blocks = {{{1, 2, 1, 2}, {3, 1, 4}}, {{1, 2, 1, 2}, {1, 1, 1}}},
    .of_four = {{1, 2, 2, 2}, {3, 1, 3}}, /* found by search: 3 M + 5/2 from M = 4 on */
    .cap_rule = "cap >= 2 floor((P + 2) / 2) + 2 (k - 1)",
};
static const numbers min = {
    .added = 1,
    .divisor = 3,
    .blocks = {{{1, 1, 1, 1}, {2, 1, 3}}, {{1, 1, 1, 1}, {1, 1, 1}}, {{1, 1, 1, 1}, {1, 1, 1}}},
    .of_four = {{1, 1, 1, 1}, {1, 1, 1}},
    .cap_rule = "cap >= 2 floor((P + 4) / 3) + 2 (k - 1)",
};

static int64_t units_of_stage(const s1f_request *request)
{
    const numbers *n = request->family->numbers;
    return ((int64_t)request->num_ranks + n->added) / n->divisor + request->num_segments;
}

static const char *broken_rule(const s1f_request *request)
{
    const numbers *n = request->family->numbers;
    int64_t units = units_of_stage(request);
    return request->stages_per_rank != 2 ? "v = 2" : s1f_rule_split(request, units, 2 * units, n->cap_rule);
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    const numbers *n = request->family->numbers;
    int32_t P = request->num_ranks;
    return s1f_plan_blocks(request, plan, rank, P == 4 ? &n->of_four : &n->blocks[P % n->divisor]);
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_split(request, s1f_placement_wave, plan_of_rank, 2 * units_of_stage(request), out);
}

const s1f_family s1f_family_v_half = {
    .whole = {"v-half", "half of 1f1b's memory, half of its bubble: two stages per rank in a V",
              "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362", "M >= floor(P / 2) + 1, k = 1, v = 2"},
    .segments = {"seq-v-half", "v-half over segments",
                 "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, over segments",
                 "M k >= floor(P / 2) + k, v = 2"},
    .stages_per_rank = 2,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .splits = 1,
    .needs_whole = 1,
    .takes_rows = 1,
    .placement = S1F_PLACEMENT_V,
    .broken_rule = broken_rule,
    .build = build,
    .numbers = &half,
};

const s1f_family s1f_family_v_min = {
    .whole = {"v-min", "a third of 1f1b's memory, two thirds of its bubble: two stages per rank in a V",
              "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
              "M >= floor((P + 4) / 3), k = 1, v = 2"},
    .segments = {"seq-v-min", "v-min over segments",
                 "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, over segments",
                 "M k >= floor((P + 1) / 3) + k, v = 2"},
    .stages_per_rank = 2,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .splits = 1,
    .needs_whole = 1,
    .takes_rows = 1,
    .placement = S1F_PLACEMENT_V,
    .broken_rule = broken_rule,
    .build = build,
    .numbers = &min,
};
