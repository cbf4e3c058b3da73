/* zb_h1.c - 1F1B whose W wait for the bubbles, in 1F1B's memory. [Zero Bubble, arXiv:2401.10241]
 *
 * Segments are ours: 1F1B's warm-up becomes that of Seq1F1B. F = I = W = 1 per micro-batch: makespan 3 M + (P - 1) / k,
 * peak P - 1 + k on every rank. M k >= P - 1 + k. */
#include "split.h"

static int64_t peak(const s1f_request *request)
{
    return (int64_t)request->num_ranks - 1 + request->num_segments;
}

static const char *broken_rule(const s1f_request *request)
{
    if ((int64_t)request->num_microbatches * request->num_segments < peak(request))
        return request->num_segments == 1 ? "M >= P" : "M k >= P - 1 + k";
    if (request->options.cap != 0 && request->options.cap < peak(request))
        return "cap >= P - 1 + k";
    return s1f_rule_one_stage_per_rank(request);
}

static const char *broken_rule_whole(const s1f_request *request)
{
    return request->num_segments == 1 ? broken_rule(request) : "k = 1 (seq-zb-h1 takes segments)";
}

static s1f_status plan_of_rank(const s1f_request *request, s1f_schedule *plan, int32_t rank)
{
    return s1f_plan_one_stage(request, plan, rank, 1);
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_split(request, s1f_placement_loop, plan_of_rank, peak(request), out);
}

const s1f_family s1f_family_zb_h1 = {
    .facts = {.name = "zb-h1",
              .description = "1f1b whose weight gradients fill the bubbles, in 1f1b's memory",
              .source = "Zero Bubble, arXiv:2401.10241",
              .validity = "M >= P, k = 1, v = 1",
              .stages_per_rank = 1,
              .options = S1F_OPTION_CAP | S1F_OPTION_COSTS},
    .broken_rule = broken_rule_whole,
    .build = build,
};

const s1f_family s1f_family_seq_zb_h1 = {
    .facts = {.name = "seq-zb-h1",
              .description = "seq1f1b whose weight gradients fill the bubbles, in seq1f1b's memory",
              .source = "Zero Bubble, arXiv:2401.10241, over segments",
              .validity = "M k >= P - 1 + k, v = 1",
              .stages_per_rank = 1,
              .options = S1F_OPTION_CAP | S1F_OPTION_COSTS},
    .broken_rule = broken_rule,
    .build = build,
};
