/* gpipe.c - all forwards, then all backwards. [GPipe, arXiv:1811.06965]
 *
 * With k segments it is TeraPipe's order [arXiv:2102.07988]: forwards m.0 .. m.k-1, then backwards m.k-1 .. m.0,
 * micro-batches in order both times. F = 1, B = 2: makespan 3 M + 3 (P - 1) / k, peak M k. Any counts. */
#include "families.h"

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    return s1f_alternate_groups(request, schedule, rank, 1, request->num_microbatches);
}

const s1f_family s1f_family_gpipe = {
    .whole = {"gpipe", "all forwards, then all backwards", "GPipe, arXiv:1811.06965", "v = 1"},
    .stages_per_rank = 1,
    .order_of_rank = order_of_rank,
};

const s1f_family s1f_family_terapipe = {
    .segments = {"terapipe", "all forwards, then all backwards, over segments: gpipe by its other name",
                 "TeraPipe, arXiv:2102.07988", "v = 1"},
    .stages_per_rank = 1,
    .order_of_rank = order_of_rank,
};
