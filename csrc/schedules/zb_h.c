/* zb_h.c - one stage per rank, W wait for the bubbles. [Zero Bubble, arXiv:2401.10241]
 *
 * A rank runs `ahead` (P - r - 1) + k forwards, then I and F in turn. Segments are ours: 1F1B's warm-up becomes that of
 * Seq1F1B. F = I = W = 1 per micro-batch:
 *   zb-h1, ahead = 1   makespan 3 M + (P - 1) / k, in 1F1B's memory: peak P - 1 + k on every rank
 *   zb-h2, ahead = 2   the same makespan, but the span of each rank is 3 M: without a barrier between steps there is no
 *                      bubble. Peak 2 P - 2 + k, twice 1F1B's
 * M k is at least the peak. */
#include "families.h"

static int32_t ahead_of(const s1f_request *request)
{
    return request->family == &s1f_family_zb_h1 ? 1 : 2;
}

static int64_t peak(const s1f_request *request)
{
    return ahead_of(request) * ((int64_t)request->num_ranks - 1) + request->num_segments;
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    int64_t ahead = (int64_t)ahead_of(request) * (request->num_ranks - rank - 1);
    s1f_v_rank r = s1f_v_rank_of(request, plan, rank);
    S1F_TRY(s1f_repeat(&r, ahead + request->num_segments - 1, "f"));
    return s1f_repeat(&r, request->num_cells, "fi");
}

const s1f_family s1f_family_zb_h1 = {
    .whole = {"zb-h1", "1f1b whose weight gradients fill the bubbles, in 1f1b's memory",
              "Zero Bubble, arXiv:2401.10241", "M >= P, k = 1, v = 1"},
    .segments = {"seq-zb-h1", "seq1f1b whose weight gradients fill the bubbles, in seq1f1b's memory",
                 "Zero Bubble, arXiv:2401.10241, over segments", "M k >= P - 1 + k, v = 1"},
    .stages_per_rank = 1,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .order_of_rank = plan_of_rank,
    .most_live = peak,
    .least_units = peak,
    .cap_rule = "cap >= P - 1 + k",
};

const s1f_family s1f_family_zb_h2 = {
    .whole = {"zb-h2", "no bubble between steps, for twice 1f1b's memory", "Zero Bubble, arXiv:2401.10241",
              "M >= 2 P - 1, k = 1, v = 1"},
    .segments = {"seq-zb-h2", "no bubble between steps, for less than twice seq1f1b's memory",
                 "Zero Bubble, arXiv:2401.10241, over segments", "M k >= 2 P - 2 + k, v = 1"},
    .stages_per_rank = 1,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS,
    .order_of_rank = plan_of_rank,
    .most_live = peak,
    .least_units = peak,
    .cap_rule = "cap >= 2 P - 2 + k",
};
