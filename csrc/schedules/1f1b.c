/* 1f1b.c - one forward, one backward, over whole micro-batches or groups of them. [PipeDream-Flush, arXiv:2006.09503]
 *
 * With k segments a micro-batch still goes forward, and back, as a whole: its k units run one after the other. That is
 * 1F1B's memory (P micro-batches on rank 0) with shorter messages; seq1f1b is the order that gains from segments.
 * k = 1, F = 1, B = 2: makespan 3 M + 3 (P - 1), peak min(P, M). Any counts.
 *
 * kfkb [Ada-Grouper, arXiv:2303.01675] runs q forwards, then q backwards: the messages of a group overlap its other
 * micro-batches, which hides slow links; the price is memory. The same makespan without transfers, peak min(q P, M).
 * q = option group, 2 unless given. q divides M. */
#include "families.h"

/* 1f1b takes no option group. */
static int32_t group_of(const s1f_request *request)
{
    int32_t unless_given = request->family == &s1f_family_kfkb ? 2 : 1;
    return request->options.group != 0 ? request->options.group : unless_given;
}

static const char *broken_rule_kfkb(const s1f_request *request)
{
    return request->num_microbatches % group_of(request) == 0 ? NULL : "group divides M";
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int64_t warmup = request->num_ranks - rank - 1 + s1f_extra_warmup(request, rank);
    return s1f_alternate_groups(request, schedule, rank, warmup, group_of(request));
}

const s1f_family s1f_family_1f1b = {
    .whole = {"1f1b", "one forward, one backward, over whole micro-batches", "PipeDream-Flush, arXiv:2006.09503",
              "v = 1"},
    .stages_per_rank = 1,
    .options = S1F_OPTION_EXTRA_WARMUP,
    .order_of_rank = order_of_rank,
};

const s1f_family s1f_family_kfkb = {
    .whole = {"kfkb", "groups of micro-batches go forward, and back, together: hides slow links",
              "Ada-Grouper, arXiv:2303.01675", "group (2 unless given) divides M, v = 1"},
    .stages_per_rank = 1,
    .options = S1F_OPTION_GROUP | S1F_OPTION_EXTRA_WARMUP,
    .broken_rule = broken_rule_kfkb,
    .order_of_rank = order_of_rank,
};
