/* split.c - walks a plan of F and I in time and puts W into its bubbles. */
#include "split.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_PERIOD = 6 }; /* F, I and W of two stages */

typedef struct {
    const s1f_unit *plan;  /* F and I */
    unsigned char *ran;    /* [unit of the plan] */
    int64_t num_units, at; /* the first that has not run */
    int64_t forwards_left, live;
    int64_t num_inputs, num_weights; /* that have run */
    s1f_unit *inputs;                /* in the order they ran, W after W follows it */
    int32_t num_ahead;
    double free; /* when the running unit ends */
    s1f_unit running;
} rank_state;

typedef struct {
    const s1f_request *request;
    s1f_placement *placement;
    int64_t cap;
    int is_equal;                    /* all units take 1 second */
    int may_delay;                   /* W may run into the time of the plan's next unit */
    double now, tolerance;           /* seconds */
    double *forward_end, *input_end; /* [stage][i], INFINITY: not started */
    rank_state *ranks;
    unsigned char *look; /* [rank] whether what it may do can have changed since it was looked at last */
    s1f_schedule *out;
} walk;

static int64_t units_per_stage(const s1f_request *request)
{
    return (int64_t)request->num_microbatches * request->num_segments;
}

static double *forward_end(const walk *w, int32_t stage, int32_t microbatch, int32_t segment)
{
    int64_t k = w->request->num_segments;
    return &w->forward_end[stage * units_per_stage(w->request) + microbatch * k + segment];
}

static double *input_end(const walk *w, int32_t stage, int32_t microbatch, int32_t segment)
{
    int64_t k = w->request->num_segments;
    return &w->input_end[stage * units_per_stage(w->request) + microbatch * k + segment];
}

static double seconds(const walk *w, s1f_unit unit)
{
    const s1f_options *options = &w->request->options;
    int64_t cost = (int64_t)unit.stage * w->request->num_segments + unit.segment;
    if (w->is_equal)
        return 1;
    return unit.pass == S1F_PASS_FORWARD          ? options->forward_costs[cost]
           : unit.pass == S1F_PASS_BACKWARD_INPUT ? options->input_costs[cost]
                                                  : options->weight_costs[cost];
}

/* When the inputs of an F or I of the plan are there, as far as is known now; else INFINITY. Units of the same stage
 * run in plain order, so the last segment's F stands for all of its micro-batch. */
static double ready_time(const walk *w, s1f_unit unit)
{
    int32_t last_stage = w->request->num_ranks * w->request->stages_per_rank - 1, m = unit.microbatch;
    if (unit.pass == S1F_PASS_FORWARD)
        return unit.stage == 0 ? 0 : *forward_end(w, unit.stage - 1, m, unit.segment);
    double own = *forward_end(w, unit.stage, m, w->request->num_segments - 1);
    double next = unit.stage == last_stage ? 0 : *input_end(w, unit.stage + 1, m, unit.segment);
    return own > next ? own : next;
}

static int is_ready(const walk *w, s1f_unit unit)
{
    return ready_time(w, unit) <= w->now + w->tolerance;
}

/* The next unit of the plan; once no F is left, the next I of the deepest stage that is ready. */
static int64_t next_of_plan(const walk *w, const rank_state *r)
{
    int64_t best = r->at;
    if (r->forwards_left > 0 || w->request->stages_per_rank == 1)
        return best;
    for (int64_t i = r->at; i < r->num_units; i++) {
        int is_deeper = r->plan[i].stage > r->plan[best].stage;
        if (!r->ran[i] && is_deeper)
            return is_ready(w, r->plan[i]) ? i : best; /* units of a stage are in order: later ones are not ready */
    }
    return best;
}

/* An F that the rank may take ahead of its plan, -1 if none: ready, and with room for it until its turn comes. */
static int64_t find_ahead(const walk *w, const rank_state *r)
{
    if (r->forwards_left == 0 || r->num_ahead >= w->request->num_segments - 1 || r->live >= w->cap)
        return -1;
    int64_t held = r->live - (r->num_inputs - r->num_weights); /* F without I */
    int32_t seen = -1;                                         /* stage whose next F was not ready */
    for (int64_t i = r->at; i < r->num_units && held < w->cap; i++) {
        s1f_unit unit = r->plan[i];
        if (r->ran[i])
            continue;
        if (unit.pass == S1F_PASS_FORWARD && unit.stage != seen) {
            if (i > r->at && is_ready(w, unit))
                return i;
            if (seen >= 0 || w->request->stages_per_rank == 1)
                return -1; /* both stages of the rank have been looked at */
            seen = unit.stage;
        }
        held += unit.pass == S1F_PASS_FORWARD ? 1 : -1;
    }
    return -1;
}

/* What a free rank does now: 1 and the unit, with its place in the plan or -1 for a W; 0: it waits. */
static int choose(const walk *w, const rank_state *r, s1f_unit *unit, int64_t *place)
{
    double next_ready = INFINITY;
    int is_full = 0;
    if (r->at < r->num_units) {
        *place = next_of_plan(w, r);
        *unit = r->plan[*place];
        is_full = unit->pass == S1F_PASS_FORWARD && r->live >= w->cap;
        next_ready = ready_time(w, *unit);
        if (next_ready <= w->now + w->tolerance && !is_full)
            return 1;
    }
    if (r->num_weights < r->num_inputs) {
        *place = -1;
        *unit = r->inputs[r->num_weights];
        unit->pass = S1F_PASS_BACKWARD_WEIGHT;
        if (is_full || w->may_delay || w->now + seconds(w, *unit) <= next_ready + w->tolerance)
            return 1;
    }
    if ((*place = find_ahead(w, r)) < 0)
        return 0;
    *unit = r->plan[*place];
    return 1;
}

static s1f_status start(walk *w, rank_state *r, s1f_unit unit, int64_t place)
{
    r->free = w->now + seconds(w, unit);
    r->running = unit;
    if (unit.pass == S1F_PASS_BACKWARD_WEIGHT) {
        r->num_weights++;
        r->live--;
        return s1f_schedule_append(w->out, unit);
    }
    if (unit.pass == S1F_PASS_FORWARD) {
        *forward_end(w, unit.stage, unit.microbatch, unit.segment) = r->free;
        r->forwards_left--;
        r->live++;
        r->num_ahead += place != r->at;
    } else {
        *input_end(w, unit.stage, unit.microbatch, unit.segment) = r->free;
        r->inputs[r->num_inputs++] = unit;
    }
    r->ran[place] = 1;
    while (r->at < r->num_units && r->ran[r->at])
        r->at++;
    return s1f_schedule_append(w->out, unit);
}

/* The unit that the rank ran has ended: the rank that waits for it may go on. Nothing but a unit of its own or one that
 * it waits for changes what a rank may do. */
static void end_unit(walk *w, const rank_state *r)
{
    int32_t step = r->running.pass == S1F_PASS_FORWARD ? 1 : r->running.pass == S1F_PASS_BACKWARD_INPUT ? -1 : 0;
    int32_t stage = r->running.stage + step;
    if (stage >= 0 && stage < w->request->num_ranks * w->request->stages_per_rank)
        w->look[w->placement(w->request->num_ranks, stage)] = 1;
}

/* Starts what can start now, rank after rank; again, where a unit that takes no time woke a rank before its own. */
static s1f_status start_units(walk *w, int64_t *num_started)
{
    s1f_status status = S1F_OK;
    unsigned char *end = w->look + w->request->num_ranks, *look = w->look;
    for (;; look++) {
        look = memchr(look, 1, (size_t)(end - look));
        if (look == NULL && (look = memchr(w->look, 1, (size_t)(end - w->look))) == NULL)
            return S1F_OK;
        rank_state *r = &w->ranks[look - w->look];
        s1f_unit unit;
        int64_t place;
        *look = 0;
        while (r->free <= w->now + w->tolerance && choose(w, r, &unit, &place)) {
            if ((status = start(w, r, unit, place)) != S1F_OK)
                return status;
            ++*num_started;
            if (r->free <= w->now + w->tolerance)
                end_unit(w, r);
        }
    }
}

/* Goes on to the time at which the next unit ends; INFINITY: none runs. */
static void end_units(walk *w)
{
    double before = w->now + w->tolerance, next = INFINITY;
    for (int32_t rank = 0; rank < w->request->num_ranks; rank++)
        if (w->ranks[rank].free > before && w->ranks[rank].free < next)
            next = w->ranks[rank].free;
    w->now = next;
    for (int32_t rank = 0; rank < w->request->num_ranks; rank++)
        if (w->ranks[rank].free > before && w->ranks[rank].free <= next + w->tolerance) {
            w->look[rank] = 1;
            end_unit(w, &w->ranks[rank]);
        }
}

static void reset(walk *w, const s1f_schedule *plan)
{
    int64_t cells = units_per_stage(w->request) * w->request->num_ranks * w->request->stages_per_rank;
    for (int64_t i = 0; i < cells; i++)
        w->forward_end[i] = w->input_end[i] = INFINITY;
    w->now = 0;
    memset(w->look, 1, (size_t)w->request->num_ranks);
    for (int32_t rank = 0; rank < w->request->num_ranks; rank++) {
        rank_state *r = &w->ranks[rank];
        unsigned char *ran = r->ran;
        s1f_unit *inputs = r->inputs;
        *r = (rank_state){.ran = ran, .inputs = inputs};
        r->plan = s1f_schedule_units(plan, rank, &r->num_units);
        r->forwards_left = r->num_units / 2;
        for (int64_t i = 0; i < r->num_units; i++)
            ran[i] = 0;
    }
}

/* Fills w->out. */
static s1f_status walk_plan(walk *w, const s1f_schedule *plan)
{
    int64_t total = 3 * units_per_stage(w->request) * w->request->num_ranks * w->request->stages_per_rank, started = 0;
    s1f_status status = S1F_OK;
    reset(w, plan);
    while (started < total) {
        if ((status = start_units(w, &started)) != S1F_OK || started == total)
            break;
        end_units(w);
        if (isinf(w->now))
            return s1f_fail(S1F_ERR_SCHEDULE, "the ranks wait for each other under a cap of %lld units",
                            (long long)w->cap);
    }
    return status;
}

static s1f_status create_walk(walk *w, const s1f_schedule *plan)
{
    size_t num_ranks = (size_t)w->request->num_ranks;
    size_t cells = num_ranks * (size_t)w->request->stages_per_rank * (size_t)units_per_stage(w->request);
    w->forward_end = malloc(cells * sizeof *w->forward_end);
    w->input_end = malloc(cells * sizeof *w->input_end);
    w->ranks = calloc(num_ranks, sizeof *w->ranks);
    w->look = malloc(num_ranks);
    int is_short = w->forward_end == NULL || w->input_end == NULL || w->ranks == NULL || w->look == NULL;
    for (int32_t rank = 0; !is_short && rank < w->request->num_ranks; rank++) {
        int64_t num_units;
        s1f_schedule_units(plan, rank, &num_units);
        w->ranks[rank].ran = malloc((size_t)num_units);
        w->ranks[rank].inputs = malloc((size_t)num_units * sizeof *w->ranks[rank].inputs);
        is_short = w->ranks[rank].ran == NULL || w->ranks[rank].inputs == NULL;
    }
    return is_short ? s1f_fail(S1F_ERR_MEMORY, "no memory to place the units of %zu ranks", num_ranks) : S1F_OK;
}

static void free_walk(walk *w)
{
    for (int32_t rank = 0; w->ranks != NULL && rank < w->request->num_ranks; rank++) {
        free(w->ranks[rank].inputs);
        free(w->ranks[rank].ran);
    }
    free(w->look);
    free(w->ranks);
    free(w->input_end);
    free(w->forward_end);
}

static double largest_cost(const s1f_request *request)
{
    const s1f_options *options = &request->options;
    int64_t count = (int64_t)request->num_ranks * request->stages_per_rank * request->num_segments;
    double largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest =
            fmax(largest, fmax(options->forward_costs[i], fmax(options->input_costs[i], options->weight_costs[i])));
    return largest;
}

/* Ends of a rank's units from its next on, as far as their inputs are known; 1 where some were. */
static int advance(walk *w, rank_state *r, const s1f_unit *units, int64_t num_units)
{
    int64_t before = r->at;
    for (; r->at < num_units; r->at++) {
        s1f_unit unit = units[r->at];
        double ready = unit.pass == S1F_PASS_BACKWARD_WEIGHT ? 0 : ready_time(w, unit);
        if (isinf(ready))
            break;
        r->free = (ready > r->free ? ready : r->free) + seconds(w, unit);
        if (unit.pass == S1F_PASS_FORWARD)
            *forward_end(w, unit.stage, unit.microbatch, unit.segment) = r->free;
        else if (unit.pass == S1F_PASS_BACKWARD_INPUT)
            *input_end(w, unit.stage, unit.microbatch, unit.segment) = r->free;
    }
    return r->at > before;
}

/* When the last unit of w->out ends at the request's costs. */
static double makespan(walk *w, const s1f_schedule *plan)
{
    double last = 0;
    int goes_on = 1;
    reset(w, plan);
    while (goes_on) {
        goes_on = 0;
        for (int32_t rank = 0; rank < w->request->num_ranks; rank++) {
            int64_t num_units;
            const s1f_unit *units = s1f_schedule_units(w->out, rank, &num_units);
            goes_on |= advance(w, &w->ranks[rank], units, num_units);
            last = fmax(last, w->ranks[rank].free);
        }
    }
    return last;
}

/* Walks the plan as if all units took the same, then, where costs are given, with them in both ways; *out is the
 * shortest, so that costs never make an order worse. */
static s1f_status fill_weights(const s1f_request *request, s1f_placement *placement, const s1f_schedule *plan,
                               int64_t cap, s1f_schedule **out)
{
    int has_costs = request->options.forward_costs != NULL;
    double tolerance = has_costs ? 1e-9 * largest_cost(request) : 0, shortest = INFINITY;
    walk w = {.request = request, .placement = placement, .cap = cap};
    s1f_schedule *best = NULL;
    s1f_status status = create_walk(&w, plan);
    for (int way = 0; way < (has_costs ? 3 : 1) && status == S1F_OK; way++) {
        w.is_equal = way == 0;
        w.may_delay = way == 2;
        w.tolerance = w.is_equal ? 0 : tolerance;
        w.out = NULL;
        if ((status = s1f_schedule_place(request, placement, &w.out)) == S1F_OK)
            status = walk_plan(&w, plan);
        w.is_equal = !has_costs;
        double taken = status == S1F_OK ? makespan(&w, plan) : INFINITY;
        if (taken < shortest - tolerance) {
            s1f_schedule *longer = best;
            best = w.out;
            w.out = longer;
            shortest = taken;
        }
        s1f_schedule_free(w.out);
    }
    free_walk(&w);
    if (status != S1F_OK) {
        s1f_schedule_free(best);
        return status;
    }
    *out = best;
    return S1F_OK;
}

s1f_status s1f_schedule_split(const s1f_request *request, s1f_placement *placement, s1f_order_of_rank *plan_of_rank,
                              int64_t cap, s1f_schedule **out)
{
    s1f_schedule *plan = NULL;
    s1f_status status = s1f_schedule_place(request, placement, &plan);
    for (int32_t rank = 0; rank < request->num_ranks && status == S1F_OK; rank++)
        status = plan_of_rank(request, plan, rank);
    if (status == S1F_OK)
        status = fill_weights(request, placement, plan, request->options.cap != 0 ? request->options.cap : cap, out);
    s1f_schedule_free(plan);
    return status;
}

/* -- plans --------------------------------------------------------------------------------------------------------- */

s1f_status s1f_plan_input(s1f_schedule *plan, int32_t stage, int64_t i)
{
    int32_t k = s1f_schedule_num_segments(plan);
    s1f_unit unit = {S1F_PASS_BACKWARD_INPUT, stage, (int32_t)(i / k), k - 1 - (int32_t)(i % k)};
    return s1f_schedule_append(plan, unit);
}

s1f_status s1f_plan_one_stage(const s1f_request *request, s1f_schedule *plan, int32_t rank, int32_t ahead)
{
    int64_t num_units = units_per_stage(request);
    int64_t wanted = (int64_t)ahead * (request->num_ranks - rank - 1) + request->num_segments;
    int64_t warmup = wanted < num_units ? wanted : num_units;
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < warmup && status == S1F_OK; i++)
        status = s1f_schedule_append_forward(plan, rank, i);
    for (int64_t i = 0; i < num_units && status == S1F_OK; i++) {
        status = s1f_plan_input(plan, rank, i);
        if (warmup + i < num_units && status == S1F_OK)
            status = s1f_schedule_append_forward(plan, rank, warmup + i);
    }
    return status;
}

s1f_status s1f_plan_blocks(const s1f_request *request, s1f_schedule *plan, int32_t rank, const s1f_block *block)
{
    int64_t P = request->num_ranks, num_units = units_per_stage(request), next[4] = {0, 0, 0, 0}, time[4], start = 0;
    int32_t first = rank, second = 2 * request->num_ranks - 1 - rank;
    for (int way = 0; way < 4; way++) { /* F first, F second, I second, I first: down, up, down, up the ranks */
        time[way] = start + block->step[way] * (way % 2 == 0 ? rank : P - 1 - rank);
        start += block->step[way] * (P - 1) + (way < 3 ? block->turn[way] : 0);
    }
    time[2] += (int64_t)BLOCK_PERIOD * (request->num_segments - 1);
    time[3] += (int64_t)BLOCK_PERIOD * (request->num_segments - 1);
    s1f_status status = S1F_OK;
    for (int64_t i = 0; i < 4 * num_units && status == S1F_OK; i++) {
        int way = -1;
        for (int candidate = 0; candidate < 4; candidate++)
            if (next[candidate] < num_units && (way < 0 || time[candidate] < time[way]))
                way = candidate;
        int32_t stage = way == 0 || way == 3 ? first : second;
        status = way < 2 ? s1f_schedule_append_forward(plan, stage, next[way]) : s1f_plan_input(plan, stage, next[way]);
        next[way]++;
        time[way] += BLOCK_PERIOD;
    }
    return status;
}
