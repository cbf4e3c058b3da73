/* interleaved.c - several stages per rank: micro-batches go round the ranks v times, in rounds.
 *
 * 1F1B in rounds [Megatron-LM, arXiv:2104.04473; over segments Seq1F1B-I, arXiv:2406.03488].
 * A round is a whole number of micro-batches with at least P segments, else it comes back before the rank is free;
 * rounds are as even as possible, larger ones first. With the published warm-up, which takes a round to be P long,
 * ranks wait for each other for ever where k does not divide P. F = 1, B = 2 per rank and micro-batch, R1 = segments of
 * the first round: makespan 3 M + 3 (P - 1) / (v k), peak min(v M k, (v - 1) R1 + 2 (P - 1) + k). M k >= P, v >= 2.
 *
 * If a round is a micro-batch with k > P segments, k - P messages wait at the first rank for its next turn, each in a
 * place. By option its segments go round in floor(k / P) rounds of their own, each of at least P: fewer messages wait,
 * peak and makespan stay; with one place more than are needed at once, the makespan stays if P divides k.
 *
 * SlimPipe's order [arXiv:2504.14519] is this one with k >= P, where a round is one micro-batch, and with v = 1, too.
 * The rest of SlimPipe is not in the order: its slices have equal length, and ranks even out their attention between
 * them.
 *
 * Breadth-first [arXiv:2211.05953; torch's LoopedBFS] is one round, all forwards first: every micro-batch through one
 * stage of a rank before the next stage. Memory of all micro-batches, but a stage's weights are gathered and reduced
 * only once. F = 1, B = 2 per rank: makespan 3 M + 3 (P - 1) / (v k), peak v M k. M k >= P, else a turn waits for the
 * round trip. */
#include "families.h"

/* Finds the i-th unit of a walk in rounds: its stage, counted from the rank's first, and its number in plain order of
 * the stage. A rank takes a round through all its v stages, one stage after the other. A round holds some of num_items
 * items, which have item_size units of each stage. Rounds are as even as possible: the first num_items % num_rounds of
 * them hold one item more than the others. */
static void find_in_rounds(int64_t num_items, int64_t item_size, int64_t v, int64_t num_rounds, int64_t i,
                           int32_t *turn, int64_t *number)
{
    int64_t small = num_items / num_rounds * item_size, large = small + item_size, num_large = num_items % num_rounds;
    int64_t before = 0, size = large;
    if (i >= num_large * large * v) {
        i -= num_large * large * v;
        before = num_large * large;
        size = small;
    }
    *turn = (int32_t)(i % (size * v) / size);
    *number = before + i / (size * v) * size + i % size;
}

/* Appends a rank's i-th unit of a pass. The last stage of a rank goes back first; where each micro-batch has rounds of
 * its segments, its way back is its way forward, read from the end. */
static s1f_status append(const s1f_request *request, s1f_schedule *schedule, int32_t rank, s1f_pass pass,
                         int64_t num_rounds, int64_t i)
{
    int32_t P = request->num_ranks, k = request->num_segments, v = request->stages_per_rank, turn;
    int64_t number, units = (int64_t)v * k, is_forward = pass == S1F_PASS_FORWARD;
    if (request->options.rounds == S1F_ROUNDS_OF_SEGMENTS) {
        find_in_rounds(k, 1, v, num_rounds, is_forward ? i % units : units - 1 - i % units, &turn, &number);
        number = i / units * k + (is_forward ? number : k - 1 - number);
    } else {
        find_in_rounds(request->num_microbatches, k, v, num_rounds, i, &turn, &number);
        turn = is_forward ? turn : v - 1 - turn;
    }
    return s1f_schedule_append_nth(schedule, pass, turn * P + rank, number);
}

/* `warmup` forwards, then one forward and one backward in turn, then the backwards that are left. */
static s1f_status alternate(const s1f_request *request, s1f_schedule *schedule, int32_t rank, int64_t warmup,
                            int64_t num_rounds)
{
    int64_t count = request->stages_per_rank * request->num_cells;
    for (int64_t i = 0; i < warmup + count; i++) {
        if (i < count)
            S1F_TRY(append(request, schedule, rank, S1F_PASS_FORWARD, num_rounds, i));
        if (i >= warmup)
            S1F_TRY(append(request, schedule, rank, S1F_PASS_BACKWARD, num_rounds, i - warmup));
    }
    return S1F_OK;
}

/* Fewest micro-batches of a round. */
static int32_t least_round(const s1f_request *request)
{
    int32_t k = request->num_segments;
    int32_t least = request->num_ranks / k + (request->num_ranks % k != 0);
    return request->options.round != 0 ? request->options.round : least;
}

/* A round is one micro-batch, or a part of it. */
static const char *broken_rule_slices(const s1f_request *request)
{
    return request->num_segments >= request->num_ranks ? NULL : "k >= P";
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->stages_per_rank < 2)
        return "v >= 2";
    if (request->options.rounds == S1F_ROUNDS_OF_SEGMENTS)
        return request->options.round != 0 ? "no round where rounds is 'segments'" : broken_rule_slices(request);
    if ((int64_t)least_round(request) * request->num_segments < request->num_ranks)
        return "round k >= P";
    if (request->num_microbatches < least_round(request))
        return request->options.round != 0 ? "M >= round" : s1f_rule_of_units(request);
    return NULL;
}

static const char *broken_rule_breadth_first(const s1f_request *request)
{
    return (int64_t)request->num_microbatches * request->num_segments >= request->num_ranks ? NULL : "M k >= P";
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int64_t P = request->num_ranks, M = request->num_microbatches, k = request->num_segments;
    int64_t v = request->stages_per_rank, num_rounds = M / least_round(request);
    int64_t first_round = (M + num_rounds - 1) / num_rounds * k;
    int64_t warmup = (v - 1) * first_round + 2 * (P - rank - 1) + k - 1;
    int is_by_segments = request->options.rounds == S1F_ROUNDS_OF_SEGMENTS;
    return alternate(request, schedule, rank, warmup, is_by_segments ? k / P : num_rounds);
}

static s1f_status breadth_first(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    return alternate(request, schedule, rank, request->stages_per_rank * request->num_cells, 1);
}

const s1f_family s1f_family_interleaved = {
    .whole = {"interleaved-1f1b", "1f1b with several stages per rank", "Megatron-LM, arXiv:2104.04473",
              "M >= P, v >= 2, k = 1"},
    .segments = {"seq1f1b-interleaved", "seq1f1b with several stages per rank",
                 "Seq1F1B-I, arXiv:2406.03488; rounds for any k here", "M k >= P, v >= 2"},
    .stages_per_rank = 2,
    .takes_more_stages = 1,
    .takes_equal_rows = 1,
    .options = S1F_OPTION_ROUND | S1F_OPTION_ROUNDS,
    .broken_rule = broken_rule,
    .order_of_rank = order_of_rank,
};

const s1f_family s1f_family_slimpipe = {
    .segments = {"slimpipe",
                 "many slices of a micro-batch in flight, warm-up by rounds; order only, no context exchange",
                 "SlimPipe, arXiv:2504.14519", "k >= P"},
    .stages_per_rank = 1,
    .takes_more_stages = 1,
    .takes_equal_rows = 1,
    .broken_rule = broken_rule_slices,
    .order_of_rank = order_of_rank,
};

const s1f_family s1f_family_breadth_first = {
    .whole = {"breadth-first", "all micro-batches through one stage of a rank, then through its next",
              "Breadth-First Pipeline Parallelism, arXiv:2211.05953", "M k >= P"},
    .stages_per_rank = 1,
    .takes_more_stages = 1,
    .takes_equal_rows = 1,
    .broken_rule = broken_rule_breadth_first,
    .order_of_rank = breadth_first,
};
