/* dualpipev.c - the micro-batches of a rank's first stage meet those on their way back in its second, so that F and B
 * take turns in the steady state: two stages per rank in a V. [DualPipe, DeepSeek-V3, arXiv:2412.19437; its V form is
 * DeepSeek's published DualPipeV]
 *
 * Warm-up and cool-down split some backwards and put their W off. F = I = W of one stage: bubble (P - 1) F,
 * peak 2 P + 1. There an F and the next B share the device at the same time; here they run one after the other.
 * M >= 2 P. */
#include "families.h"

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int32_t P = request->num_ranks, M = request->num_microbatches, behind = P - 1 - rank, half = (rank + 1) / 2;
    s1f_v_rank r = s1f_v_rank_of(request, schedule, rank);
    S1F_TRY(s1f_repeat(&r, 2 * behind, "f"));
    S1F_TRY(s1f_repeat(&r, rank + 1, "fF"));
    S1F_TRY(s1f_repeat(&r, behind, "IwF"));
    S1F_TRY(s1f_repeat(&r, M - 2 * P + rank + 1, "fBFb")); /* the steady state */
    S1F_TRY(s1f_repeat(&r, behind, "BFb"));
    S1F_TRY(s1f_repeat(&r, half, "Bb"));
    S1F_TRY(s1f_repeat(&r, rank + 1 - 2 * half, "Bi")); /* the later half of the backwards puts its W off */
    S1F_TRY(s1f_repeat(&r, half, "Ii"));
    S1F_TRY(s1f_repeat(&r, behind, "wi"));
    return s1f_repeat(&r, 2 * request->num_cells, "w");
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->num_microbatches < 2 * (int64_t)request->num_ranks)
        return "M >= 2 P";
    return request->num_segments == 1 ? NULL : "k = 1";
}

const s1f_family s1f_family_dualpipev = {
    .whole = {"dualpipev", "F of one micro-batch, then B of another: two stages per rank in a V",
              "DualPipe, arXiv:2412.19437, in its V form", "M >= 2 P, k = 1, v = 2"},
    .stages_per_rank = 2,
    .takes_equal_rows = 1,
    .splits = 1,
    .placement = S1F_PLACEMENT_V,
    .broken_rule = broken_rule,
    .order_of_rank = order_of_rank,
};
