/* seq1f1b.c - one forward, one backward, over segments. [Seq1F1B, arXiv:2406.03488]
 *
 * Forwards run m.0 .. m.k-1, backwards m.k-1 .. m.0, micro-batches in order. k = 1 is exactly 1F1B.
 * F = 1, B = 2: makespan 3 M + 3 (P - 1) / k, peak min(P - 1 + k, M k). Any counts. */
#include "families.h"

/* Warm-up length min(P - p - 2 + k, M k), the F before the first B included in the steady state: backward enters a
 * micro-batch by its last segment, so k - 1 more forwards than in 1F1B come before the first one. Where micro-batches
 * differ in k, the warm-up is that of the longest: i + k forwards before B number i are enough for any. A warm-up that
 * follows the micro-batches at hand was never shorter on 300 random orders, and 4 % longer on their mean. */
static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    return s1f_schedule_alternate_units(schedule, rank, s1f_warmup_of_rank(request, rank) + request->num_segments - 1);
}

const s1f_family s1f_family_seq1f1b = {
    .segments = {"seq1f1b", "one forward, one backward, over segments", "Seq1F1B, arXiv:2406.03488", "v = 1"},
    .stages_per_rank = 1,
    .options = S1F_OPTION_EXTRA_WARMUP,
    .broken_rule = s1f_rule_one_stage_per_rank,
    .order_of_rank = order_of_rank,
    .takes_rows = 1,
};
