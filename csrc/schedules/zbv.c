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

static int64_t least_units(const s1f_request *request)
{
    return 2 * ((int64_t)request->num_ranks - 1) + request->num_segments;
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    int64_t P = request->num_ranks, k = request->num_segments;
    s1f_v_rank r = s1f_v_rank_of(request, plan, rank);
    S1F_TRY(s1f_repeat(&r, 2 * (P - rank) - 1, "f"));
    S1F_TRY(s1f_repeat(&r, rank + k - 1, "Ff"));
    S1F_TRY(s1f_repeat(&r, P - rank, "FI"));
    return s1f_repeat(&r, request->num_cells, "fiFI");
}

const s1f_family s1f_family_zbv = {
    .whole = {"zbv", "no bubble between steps, in 1f1b's memory: two stages per rank in a V",
              "Zero Bubble, arXiv:2401.10241", "M >= 2 P - 1, k = 1, v = 2"},
    .segments = {"seq-zbv", "no bubble between steps, in seq1f1b's memory: two stages per rank in a V",
                 "Zero Bubble, arXiv:2401.10241, over segments", "M k >= 2 P - 2 + k, v = 2"},
    .stages_per_rank = 2,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .placement = S1F_PLACEMENT_V,
    .order_of_rank = plan_of_rank,
    .most_live = peak,
    .least_units = least_units,
    .cap_rule = "cap >= 2 P + 2 (k - 1)",
};
