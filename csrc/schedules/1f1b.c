/* 1f1b.c - one forward, one backward, over whole micro-batches. [PipeDream-Flush, arXiv:2006.09503]
 *
 * With k segments a micro-batch still goes forward, and back, as a whole: its k units run one after the other. That is
 * 1F1B's memory (P micro-batches on rank 0) with shorter messages; seq1f1b is the order that gains from segments.
 * k = 1, F = 1, B = 2: makespan 3 M + 3 (P - 1), peak min(P, M). Any counts. */
#include "families.h"

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    return s1f_schedule_append_groups(schedule, rank, 1, request->options.extra_warmup);
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_by_rank(request, order_of_rank, out);
}

const s1f_family s1f_family_1f1b = {
    .facts = {.name = "1f1b",
              .description = "one forward, one backward, over whole micro-batches",
              .source = "PipeDream-Flush, arXiv:2006.09503",
              .validity = "v = 1",
              .stages_per_rank = 1,
              .options = S1F_OPTION_EXTRA_WARMUP},
    .broken_rule = s1f_rule_one_stage_per_rank,
    .build = build,
};
