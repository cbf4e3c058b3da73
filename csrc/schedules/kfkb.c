/* kfkb.c - q forwards, q backwards: 1F1B over groups of q micro-batches. [Ada-Grouper, arXiv:2303.01675]
 *
 * The messages of a group overlap its other micro-batches, which hides slow links; the price is memory. F = 1, B = 2:
 * makespan 3 M + 3 (P - 1) without transfers, peak min(q P, M). q = option group, 2 unless given. q divides M. */
#include "families.h"

static int32_t group_of(const s1f_request *request)
{
    return request->options.group != 0 ? request->options.group : 2;
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->num_microbatches % group_of(request) != 0)
        return "group divides M";
    return s1f_rule_one_stage_per_rank(request);
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    return s1f_schedule_append_groups(schedule, rank, group_of(request), request->options.extra_warmup);
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_by_rank(request, order_of_rank, out);
}

const s1f_family s1f_family_kfkb = {
    .facts = {.name = "kfkb",
              .description = "groups of micro-batches go forward, and back, together: hides slow links",
              .source = "Ada-Grouper, arXiv:2303.01675",
              .validity = "group (2 unless given) divides M, v = 1",
              .stages_per_rank = 1,
              .options = S1F_OPTION_GROUP | S1F_OPTION_EXTRA_WARMUP},
    .broken_rule = broken_rule,
    .build = build,
};
