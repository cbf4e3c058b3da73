/* zbv.c - zero bubble in 1F1B's memory: two stages per rank in a V. [Zero Bubble, arXiv:2401.10241, section 6]
 *
 * Rank r runs 2 (P - r) - 1 F of its first stage, r + k - 1 pairs of F, P - r pairs F I of its second, then in turn F I
 * of the first and F I of the second. Segments are ours: they add the k - 1 pairs. F = I = W = 1 per micro-batch and
 * rank: makespan 3 M + (P - 1) / (2 k), span 3 M, peak 2 P + 2 (k - 1). M k >= 2 P - 2 + k. */
#include "families.h"

static int64_t peak(const s1f_request *request)
{
    return 2 * ((int64_t)request->num_ranks + request->num_segments - 1);
}

static const char *broken_rule(const s1f_request *request)
{
    int64_t least_units = 2 * ((int64_t)request->num_ranks - 1) + request->num_segments;
    if (request->stages_per_rank != 2)
        return "v = 2";
    return s1f_rule_split(request, least_units, peak(request), "cap >= 2 P + 2 (k - 1)");
}

enum { F_FIRST, F_SECOND, I_FIRST, I_SECOND, NUM_KINDS };

typedef struct {
    s1f_schedule *plan;
    int32_t stages[NUM_KINDS];
    int64_t num_units, done[NUM_KINDS];
} writer;

/* Appends the next unit of each given kind, `times` over; kinds that are used up are left out. */
static s1f_status repeat(writer *w, int64_t times, const int *kinds, int num_kinds)
{
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < times * num_kinds && status == S1F_OK; i++) {
        int kind = kinds[i % num_kinds];
        if (w->done[kind] == w->num_units)
            continue;
        s1f_pass pass = kind == F_FIRST || kind == F_SECOND ? S1F_PASS_FORWARD : S1F_PASS_BACKWARD_INPUT;
        status = s1f_schedule_append_nth(w->plan, pass, w->stages[kind], w->done[kind]++);
    }
    return status;
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    static const int down[] = {F_FIRST}, both[] = {F_SECOND, F_FIRST}, turn[] = {F_SECOND, I_SECOND};
    static const int steady[] = {F_FIRST, I_FIRST, F_SECOND, I_SECOND};
    int64_t P = request->num_ranks, k = request->num_segments;
    int32_t second = 2 * request->num_ranks - 1 - rank;
    writer w = {.plan = plan, .stages = {rank, second, rank, second}, .num_units = request->num_cells};
    s1f_status status;
    if ((status = repeat(&w, 2 * (P - rank) - 1, down, 1)) != S1F_OK ||
        (status = repeat(&w, rank + k - 1, both, 2)) != S1F_OK || (status = repeat(&w, P - rank, turn, 2)) != S1F_OK)
        return status;
    return repeat(&w, w.num_units, steady, NUM_KINDS);
}

const s1f_family s1f_family_zbv = {
    .whole = {"zbv", "no bubble between steps, in 1f1b's memory: two stages per rank in a V",
              "Zero Bubble, arXiv:2401.10241", "M >= 2 P - 1, k = 1, v = 2"},
    .segments = {"seq-zbv", "no bubble between steps, in seq1f1b's memory: two stages per rank in a V",
                 "Zero Bubble, arXiv:2401.10241, over segments", "M k >= 2 P - 2 + k, v = 2"},
    .stages_per_rank = 2,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .splits = 1,
    .needs_whole = 1,
    .takes_rows = 1,
    .placement = S1F_PLACEMENT_V,
    .broken_rule = broken_rule,
    .order_of_rank = plan_of_rank,
    .most_live = peak,
};
