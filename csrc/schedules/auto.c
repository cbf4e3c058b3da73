/* auto.c - the shortest order that we find for any costs, transfers and caps.
 *
 * Starts are every named family that holds for these counts and this cap, so that auto never takes longer than one of
 * them, and list scheduling under several rules (list.c); the shortest of them are then improved (search.h). Ours; any
 * counts. The search takes trees as chains, by their numbers: under a cap in bytes a nested order may fit where none of
 * these does. A whole backward has the time of I, and W takes none and follows at once. */
#include "families.h"
#include "search.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RULE_TEXT_BYTES = 64, MOST_UNITS = 1 << 22 /* minutes of lists and search */ };

/* -- named families as starts -------------------------------------------------------------------------------------- */

/* A B counts as an I, then a W. */
static void offer_schedule(const s1f_problem *p, s1f_search *search, const s1f_schedule *schedule)
{
    int32_t *next = s1f_search_order(search);
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++)
        if (s1f_schedule_shape(schedule).rank_of_stage[stage] != p->shape.rank_of_stage[stage])
            return;
    for (s1f_position at = {0}; s1f_next_unit(schedule, &at);) {
        if (at.unit.pass == S1F_PASS_BACKWARD) {
            at.unit.pass = S1F_PASS_BACKWARD_INPUT;
            *next++ = s1f_problem_number_of(p, at.unit);
            at.unit.pass = S1F_PASS_BACKWARD_WEIGHT;
        }
        *next++ = s1f_problem_number_of(p, at.unit);
    }
    s1f_search_offer(search);
}

/* One family with one set of options, if it can be built with them. */
static s1f_status offer_named(const s1f_request *request, const s1f_problem *problem, s1f_search *search,
                              const char *name, const s1f_options *options)
{
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_build(name, request->num_ranks, request->num_microbatches, request->num_segments,
                                           request->stages_per_rank, options, &schedule);
    if (status == S1F_OK)
        offer_schedule(problem, search, schedule);
    s1f_schedule_free(schedule);
    return status == S1F_ERR_SCHEDULE ? S1F_OK : status; /* a broken rule, or ranks that wait for each other */
}

/* Every family of the placement under its own choices, and under each set of ours that it takes: costs, the cap, more
 * warm-up. */
static s1f_status offer_families(const s1f_request *request, int32_t placement, const s1f_problem *problem,
                                 s1f_search *search)
{
    static const uint32_t ours[] = {S1F_OPTION_COSTS, S1F_OPTION_CAP, S1F_OPTION_EXTRA_WARMUP};
    const s1f_options *given = &request->options;
    int64_t all = request->stages_per_rank * request->num_cells;
    const s1f_named_family *named;
    for (int32_t i = 0; (named = s1f_schedule_family(i)) != NULL; i++) {
        int32_t of_family = named->family->placement == 0 ? S1F_PLACEMENT_LOOP : named->family->placement;
        int is_left_out = named->family == &s1f_family_auto || (request->stages_per_rank > 1 && of_family != placement);
        for (uint32_t set = 0; set < 8 && !is_left_out; set++) {
            s1f_options options = {.segments_of = given->segments_of, .parents = given->parents};
            uint32_t asked = 0;
            for (int bit = 0; bit < 3; bit++)
                asked |= set >> bit & 1 ? ours[bit] : 0;
            if ((asked & named->family->options) != asked || (asked & S1F_OPTION_COSTS && given->costs[0] == NULL))
                continue;
            if (asked & S1F_OPTION_COSTS)
                memcpy(options.costs, given->costs, sizeof options.costs);
            if (asked & S1F_OPTION_CAP)
                options.cap = given->cap != 0 ? given->cap : all;
            options.extra_warmup = asked & S1F_OPTION_EXTRA_WARMUP ? 1 : 0;
            S1F_TRY(s1f_check_interrupted());
            S1F_TRY(offer_named(request, problem, search, named->name->name, &options));
        }
    }
    return S1F_OK;
}

/* -- the family ---------------------------------------------------------------------------------------------------- */

/* A cap in units is one in bytes where each unit takes one. Arrays are the pool's. */
static s1f_status create_problem(const s1f_request *request, s1f_shape shape, s1f_pool *pool, s1f_problem *problem)
{
    const s1f_options *options = &request->options;
    size_t P = (size_t)shape.num_ranks, cells = (size_t)(shape.num_stages * request->num_columns);
    double *seconds = s1f_pool_take(pool, S1F_SPLIT_PASSES * cells, sizeof *seconds);
    int64_t *unit_bytes = s1f_pool_take(pool, cells, sizeof *unit_bytes);
    int64_t *cap_bytes = s1f_pool_take(pool, P, sizeof *cap_bytes);
    S1F_TRY(s1f_pool_status(pool, "the costs of units"));
    int has_costs = options->costs[0] != NULL, is_whole = options->backward == S1F_BACKWARD_WHOLE;
    for (size_t i = 0; i < cells; i++) {
        double input = has_costs ? options->costs[1][i] : 1, weight = has_costs ? options->costs[2][i] : 1;
        seconds[i] = has_costs ? options->costs[0][i] : 1;
        seconds[cells + i] = is_whole ? input + weight : input;
        seconds[2 * cells + i] = is_whole ? 0 : weight;
        unit_bytes[i] = options->unit_bytes != NULL ? options->unit_bytes[i] : 1;
    }
    for (size_t rank = 0; rank < P; rank++)
        cap_bytes[rank] = options->cap_bytes != NULL ? options->cap_bytes[rank]
                          : options->cap != 0        ? options->cap
                                                     : INT64_MAX;
    shape.trees = NULL;
    shape.products = s1f_products_of_passes(1u << S1F_PASS_FORWARD | 1u << S1F_PASS_BACKWARD);
    *problem = (s1f_problem){.shape = shape,
                             .pass_seconds = {seconds, seconds + cells, seconds + 2 * cells},
                             .transfer = options->transfer,
                             .unit_bytes = unit_bytes,
                             .cap_bytes = cap_bytes};
    return s1f_problem_number(problem, pool);
}

/* Appends the shortest order found to an empty schedule. */
static s1f_status search_order(const s1f_request *request, int32_t placement, s1f_pool *pool, double *makespan,
                               s1f_schedule *schedule)
{
    s1f_problem problem;
    s1f_search *search;
    S1F_TRY(create_problem(request, s1f_schedule_shape(schedule), pool, &problem));
    S1F_TRY(s1f_search_create(&problem, pool, &search));
    S1F_TRY(offer_families(request, placement, &problem, search));
    S1F_TRY(s1f_offer_lists(&problem, search));
    S1F_TRY(s1f_search_run(search));
    *makespan = s1f_search_makespan(search);
    if (isinf(*makespan))
        return s1f_fail(S1F_ERR_STATE, "list scheduling found no order"); /* the rules leave room for one */
    return s1f_search_take(search, request->options.backward != S1F_BACKWARD_WHOLE, schedule);
}

static s1f_status build_placed(const s1f_request *request, int32_t placement, double *makespan, s1f_schedule **out)
{
    s1f_pool pool = {0};
    s1f_schedule *schedule = NULL;
    S1F_TRY(s1f_schedule_place(request, placement, &schedule));
    s1f_status status = search_order(request, placement, &pool, makespan, schedule);
    s1f_pool_free(&pool);
    return s1f_schedule_finish(schedule, status, out);
}

/* The first rank whose cap in bytes is below one micro-batch, and how much that is; 0: none. */
static int find_short_rank(const s1f_request *request, int32_t placement, int32_t *rank, int64_t *least)
{
    const s1f_options *options = &request->options;
    int32_t P = request->num_ranks, num_kinds = options->segments_of != NULL ? request->num_microbatches : 1;
    for (*rank = 0; options->cap_bytes != NULL && *rank < P; ++*rank) {
        int64_t first = 0;
        for (int32_t m = 0; m < num_kinds; m++) {
            int32_t k = options->segments_of != NULL ? options->segments_of[m] : request->num_segments;
            *least = 0;
            for (int32_t stage = 0; stage < P * request->stages_per_rank; stage++)
                for (int32_t s = 0; s < k && s1f_rank_of_stage(placement, P, stage) == *rank; s++)
                    *least += options->unit_bytes[stage * request->num_columns + first + s];
            if (options->cap_bytes[*rank] < *least)
                return 1;
            first += k;
        }
    }
    return 0;
}

/* Whether the request allows a placement and its cap has room in it. With v = 1 both are one, the loop. */
static int may_place(const s1f_request *request, int32_t placement)
{
    int32_t wanted = request->stages_per_rank == 1 ? S1F_PLACEMENT_LOOP : request->options.placement, rank;
    int64_t least;
    return (wanted == 0 || wanted == placement) && !find_short_rank(request, placement, &rank, &least);
}

/* If no placement is given, builds both and takes the shorter; V wins ties: its turns need no transfer. */
static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    static const int32_t placements[] = {S1F_PLACEMENT_V, S1F_PLACEMENT_LOOP};
    double shortest = INFINITY, makespan;
    s1f_schedule *best = NULL;
    s1f_status status = S1F_OK;
    for (int i = 0; i < 2 && status == S1F_OK; i++) {
        s1f_schedule *made = NULL;
        if (may_place(request, placements[i]))
            status = build_placed(request, placements[i], &makespan, &made);
        if (made != NULL && makespan < shortest) {
            s1f_schedule_free(best);
            best = made;
            shortest = makespan;
        } else {
            s1f_schedule_free(made);
        }
    }
    return s1f_schedule_finish(best, status, out);
}

static const char *broken_rule(const s1f_request *request)
{
    static _Thread_local char text[RULE_TEXT_BYTES];
    int32_t rank;
    int64_t least;
    if (request->num_cells * request->num_ranks * request->stages_per_rank > MOST_UNITS / S1F_SPLIT_PASSES)
        return "3 P v M k <= 2^22";
    if (request->options.cap != 0 && request->options.cap < (int64_t)request->stages_per_rank * request->num_segments)
        return "cap >= v k";
    if (may_place(request, S1F_PLACEMENT_V) || may_place(request, S1F_PLACEMENT_LOOP))
        return NULL;
    int is_loop = request->stages_per_rank == 1 || request->options.placement == S1F_PLACEMENT_LOOP;
    find_short_rank(request, is_loop ? S1F_PLACEMENT_LOOP : S1F_PLACEMENT_V, &rank, &least);
    snprintf(text, sizeof text, "cap_bytes >= %lld on rank %d", (long long)least, rank);
    return text;
}

const s1f_family s1f_family_auto = {
    .segments = {"auto", "the shortest order found for the given costs, transfers and memory",
                 "list scheduling and a search from the families here", "3 P v M k <= 2^22"},
    .stages_per_rank = 1,
    .takes_more_stages = 1,
    .options = S1F_OPTION_CAP | S1F_OPTION_COSTS | S1F_OPTION_TRANSFER | S1F_OPTION_PLACEMENT | S1F_OPTION_UNIT_BYTES |
               S1F_OPTION_CAP_BYTES | S1F_OPTION_BACKWARD,
    .splits = 1,
    .broken_rule = broken_rule,
    .build = build,
};
