/* interleaved.c - 1F1B with several stages per rank: micro-batches go round the ranks v times.
 * [Megatron-LM, arXiv:2104.04473; over segments Seq1F1B-I, arXiv:2406.03488]
 *
 * A round is a whole number of micro-batches with at least P segments, else it comes back before the rank is free;
 * rounds are as even as possible, larger ones first. With the published warm-up, which takes a round to be P long,
 * ranks wait for each other for ever where k does not divide P. F = 1, B = 2 per rank and micro-batch, R1 = segments of
 * the first round: makespan 3 M + 3 (P - 1) / (v k), peak min(v M k, (v - 1) R1 + 2 (P - 1) + k). M k >= P, v >= 2.
 *
 * SlimPipe's order [arXiv:2504.14519] is this one with k >= P, where a round is one micro-batch, and with v = 1, too.
 * What else makes SlimPipe is no matter of order: slices of equal length, whose attention ranks then even out between
 * them. */
#include "families.h"

/* Fewest micro-batches of a round. */
static int32_t least_round(const s1f_request *request)
{
    int32_t k = request->num_segments;
    int32_t least = request->num_ranks / k + (request->num_ranks % k != 0);
    return request->options.round != 0 ? request->options.round : least;
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->stages_per_rank < 2)
        return "v >= 2";
    if ((int64_t)least_round(request) * request->num_segments < request->num_ranks)
        return "round k >= P";
    if (request->num_microbatches < least_round(request))
        return request->options.round != 0 ? "M >= round" : request->num_segments == 1 ? "M >= P" : "M k >= P";
    return NULL;
}

static const char *broken_rule_whole(const s1f_request *request)
{
    return request->num_segments == 1 ? broken_rule(request) : "k = 1 (seq1f1b-interleaved takes segments)";
}

/* A round of one micro-batch, on one stage per rank, too. */
static const char *broken_rule_slices(const s1f_request *request)
{
    return request->num_segments >= request->num_ranks ? NULL : "k >= P";
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int64_t P = request->num_ranks, M = request->num_microbatches, k = request->num_segments;
    int64_t v = request->stages_per_rank, num_units = v * M * k;
    int32_t num_rounds = (int32_t)(M / least_round(request));
    int64_t first_round = (M + num_rounds - 1) / num_rounds * k;
    int64_t wanted = (v - 1) * first_round + 2 * (P - rank - 1) + k - 1;
    int64_t warmup = wanted < num_units ? wanted : num_units;
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < warmup && status == S1F_OK; i++)
        status = s1f_schedule_append_round_forward(schedule, rank, num_rounds, i);
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++) {
        if (warmup + i < num_units)
            status = s1f_schedule_append_round_forward(schedule, rank, num_rounds, warmup + i);
        if (status == S1F_OK)
            status = s1f_schedule_append_round_backward(schedule, rank, num_rounds, i);
    }
    return status;
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    return s1f_schedule_by_rank(request, order_of_rank, out);
}

const s1f_family s1f_family_interleaved_1f1b = {
    .facts = {.name = "interleaved-1f1b",
              .description = "1f1b with several stages per rank",
              .source = "Megatron-LM, arXiv:2104.04473",
              .validity = "M >= P, v >= 2, k = 1",
              .stages_per_rank = 2,
              .options = S1F_OPTION_ROUND},
    .broken_rule = broken_rule_whole,
    .build = build,
};

const s1f_family s1f_family_seq1f1b_interleaved = {
    .facts = {.name = "seq1f1b-interleaved",
              .description = "seq1f1b with several stages per rank",
              .source = "Seq1F1B-I, arXiv:2406.03488; rounds for any k here",
              .validity = "M k >= P, v >= 2",
              .stages_per_rank = 2,
              .options = S1F_OPTION_ROUND},
    .broken_rule = broken_rule,
    .build = build,
};

const s1f_family s1f_family_slimpipe = {
    .facts = {.name = "slimpipe",
              .description =
                  "many slices of a micro-batch in flight, warm-up by rounds; order only, no context exchange",
              .source = "SlimPipe, arXiv:2504.14519",
              .validity = "k >= P",
              .stages_per_rank = 1},
    .broken_rule = broken_rule_slices,
    .build = build,
};
