/* v_blocks.c - two stages per rank in a V, in less than 1F1B's memory. [Controllable memory, arXiv:2405.15362]
 *
 * A building block says how long F and I take from rank to rank and where they turn. The turns are such that
 * few units of a rank meet, so they differ with P. Segments are ours. F = I = W = 1 per micro-batch and rank, h the
 * segments of a stage that are held beyond those of one micro-batch:
 *   v-half, h = floor(P / 2)         half of 1F1B's memory, makespan at most 3 M + 3 (P - 1) / (2 k)
 *   v-min,  h = floor((P + 1) / 3)   a third of it, makespan at most 3 M + 2 (P - 1) / k
 * Peak 2 (h + k). M k >= h + k. */
#include "families.h"

enum { BLOCK_PERIOD = 6 }; /* F, I and W of two stages */

/* A block is F of the first stage from rank 0 down, F of the second from rank P - 1 up, I down, I up; `step` is the
 * time between neighbouring ranks on each of the four ways, `turn` that between two ways. A plan shifts it by its
 * period per segment; backward starts k - 1 blocks late. */
typedef struct {
    int32_t step[4], turn[3];
} building_block;

typedef struct {
    int32_t added, divisor;            /* h = floor((P + added) / divisor) */
    building_block blocks[3], of_four; /* for P ranks blocks[P % divisor], but of_four where P = 4 */
} numbers;

static const numbers of_half = {
    .divisor = 2,
    .blocks = {{{1, 2, 1, 2}, {3, 1, 4}}, {{1, 2, 1, 2}, {1, 1, 1}}},
    .of_four = {{1, 2, 2, 2}, {3, 1, 3}}, /* found by search: 3 M + 5/2 from M = 4 on */
};
static const numbers of_min = {
    .added = 1,
    .divisor = 3,
    .blocks = {{{1, 1, 1, 1}, {2, 1, 3}}, {{1, 1, 1, 1}, {1, 1, 1}}, {{1, 1, 1, 1}, {1, 1, 1}}},
    .of_four = {{1, 1, 1, 1}, {1, 1, 1}},
};

static int64_t least_units(const s1f_request *request)
{
    const numbers *n = request->family == &s1f_family_v_half ? &of_half : &of_min;
    return ((int64_t)request->num_ranks + n->added) / n->divisor + request->num_segments;
}

static int64_t peak(const s1f_request *request)
{
    return 2 * least_units(request);
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    const numbers *n = request->family == &s1f_family_v_half ? &of_half : &of_min;
    const building_block *block = request->num_ranks == 4 ? &n->of_four : &n->blocks[request->num_ranks % n->divisor];
    int64_t P = request->num_ranks, num_units = request->num_cells, next[4] = {0, 0, 0, 0}, time[4], start = 0;
    int32_t first = rank, second = 2 * request->num_ranks - 1 - rank;
    for (int way = 0; way < 4; way++) { /* F first, F second, I second, I first: down, up, down, up the ranks */
        time[way] = start + block->step[way] * (way % 2 == 0 ? rank : P - 1 - rank);
        time[way] += way < 2 ? 0 : (int64_t)BLOCK_PERIOD * (request->num_segments - 1);
        start += block->step[way] * (P - 1) + (way < 3 ? block->turn[way] : 0);
    }
    for (int64_t i = 0; i < 4 * num_units; i++) {
        int way = -1;
        for (int candidate = 0; candidate < 4; candidate++)
            if (next[candidate] < num_units && (way < 0 || time[candidate] < time[way]))
                way = candidate;
        int32_t stage = way == 0 || way == 3 ? first : second;
        s1f_pass pass = way < 2 ? S1F_PASS_FORWARD : S1F_PASS_BACKWARD_INPUT;
        S1F_TRY(s1f_schedule_append_nth(plan, pass, stage, next[way]++));
        time[way] += BLOCK_PERIOD;
    }
    return S1F_OK;
}

const s1f_family s1f_family_v_half = {
    .whole = {"v-half", "half of 1f1b's memory, half of its bubble: two stages per rank in a V",
              "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362", "M >= floor(P / 2) + 1, k = 1, v = 2"},
    .segments = {"seq-v-half", "v-half over segments",
                 "Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, over segments",
                 "M k >= floor(P / 2) + k, v = 2"},
    .stages_per_rank = 2,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .placement = S1F_PLACEMENT_V,
    .order_of_rank = plan_of_rank,
    .most_live = peak,
    .least_units = least_units,
    .cap_rule = "cap >= 2 floor((P + 2) / 2) + 2 (k - 1)",
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
    .placement = S1F_PLACEMENT_V,
    .order_of_rank = plan_of_rank,
    .most_live = peak,
    .least_units = least_units,
    .cap_rule = "cap >= 2 floor((P + 4) / 3) + 2 (k - 1)",
};
