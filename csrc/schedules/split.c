/* split.c - walks a plan of F and I in time and puts W into its bubbles, the oldest first, and before an F where the
 * rank is full. */
#include "families.h"

#include "in_time.h"

#include <math.h>
#include <string.h>

typedef struct {
    const s1f_unit *plan;  /* F and I */
    unsigned char *ran;    /* [unit of the plan] */
    int64_t num_units, at; /* the first unit that has not run */
    int64_t place;         /* in the plan, of the unit chosen; -1: a W */
    int64_t forwards_left, live;
    int64_t num_inputs, num_weights; /* that have run */
    s1f_unit *inputs;                /* the I that have run, in their order, which W follow */
    int32_t num_ahead;
    double free; /* when its last unit ends, as an order is timed */
} rank_state;

typedef struct {
    const s1f_request *request;
    s1f_board board;
    int64_t cap;
    int is_equal;     /* all units take 1 second */
    int may_delay;    /* W may run into the time of the plan's next unit */
    double tolerance; /* seconds */
    s1f_pool pool;    /* of all arrays */
    rank_state *ranks;
    s1f_schedule *out;
} walk;

static double seconds(const walk *w, s1f_unit unit)
{
    return w->is_equal
               ? 1
               : w->request->options.costs[s1f_first_product(unit.pass)][s1f_column_of_all(&w->board.shape, unit)];
}

static int is_ready(const walk *w, s1f_unit unit, double now)
{
    return s1f_board_ready(&w->board, unit) <= now + w->tolerance;
}

/* The next unit of the plan; once no F is left, the next I of the deepest stage that is ready. Units of a stage are in
 * order: where one is not ready, later ones are not, either. */
static int64_t next_of_plan(const walk *w, const rank_state *r, double now)
{
    int64_t best = r->at;
    if (r->forwards_left > 0 || w->request->stages_per_rank == 1)
        return best;
    for (int64_t i = r->at; i < r->num_units; i++)
        if (!r->ran[i] && r->plan[i].stage > r->plan[best].stage)
            return is_ready(w, r->plan[i], now) ? i : best;
    return best;
}

/* An F that the rank may take ahead of its plan, -1 if none: ready, and with room for it until its turn comes. */
static int64_t find_ahead(const walk *w, const rank_state *r, double now)
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
            if (i > r->at && is_ready(w, unit, now))
                return i;
            if (seen >= 0 || w->request->stages_per_rank == 1)
                return -1; /* both stages of the rank have been looked at */
            seen = unit.stage;
        }
        held += unit.pass == S1F_PASS_FORWARD ? 1 : -1;
    }
    return -1;
}

/* What a free rank does now, and its place in the plan; 0: it waits. */
static int find_next(const walk *w, rank_state *r, double now, s1f_unit *unit, double *taken)
{
    double next_ready = INFINITY;
    int is_full = 0;
    if (r->at < r->num_units) {
        r->place = next_of_plan(w, r, now);
        *unit = r->plan[r->place];
        *taken = seconds(w, *unit);
        is_full = unit->pass == S1F_PASS_FORWARD && r->live >= w->cap;
        next_ready = s1f_board_ready(&w->board, *unit);
        if (next_ready <= now + w->tolerance && !is_full)
            return 1;
    }
    if (r->num_weights < r->num_inputs) {
        r->place = -1;
        *unit = r->inputs[r->num_weights];
        unit->pass = S1F_PASS_BACKWARD_WEIGHT;
        *taken = seconds(w, *unit);
        if (is_full || w->may_delay || now + *taken <= next_ready + w->tolerance)
            return 1;
    }
    if ((r->place = find_ahead(w, r, now)) < 0)
        return 0;
    *unit = r->plan[r->place];
    *taken = seconds(w, *unit);
    return 1;
}

static void note(rank_state *r, s1f_unit unit)
{
    if (unit.pass == S1F_PASS_BACKWARD_WEIGHT) {
        r->num_weights++;
        r->live--;
        return;
    }
    if (unit.pass == S1F_PASS_FORWARD) {
        r->forwards_left--;
        r->live++;
        r->num_ahead += r->place != r->at;
    } else {
        r->inputs[r->num_inputs++] = unit;
    }
    r->ran[r->place] = 1;
    while (r->at < r->num_units && r->ran[r->at])
        r->at++;
}

static int choose(void *context, int32_t rank, double now, s1f_unit *unit, double *taken)
{
    walk *w = context;
    rank_state *r = &w->ranks[rank];
    int is_found = find_next(w, r, now, unit, taken);
    if (is_found)
        note(r, *unit);
    return is_found;
}

/* Fills w->out. */
static s1f_status walk_plan(walk *w, const s1f_schedule *plan)
{
    s1f_board_clear(&w->board);
    for (int32_t rank = 0; rank < w->request->num_ranks; rank++) {
        rank_state *r = &w->ranks[rank];
        *r = (rank_state){.ran = r->ran, .inputs = r->inputs};
        r->plan = s1f_schedule_units(plan, rank, &r->num_units);
        r->forwards_left = r->num_units / 2;
        memset(r->ran, 0, (size_t)r->num_units);
    }
    int64_t num_units = s1f_schedule_num_units(plan) / 2 * S1F_SPLIT_PASSES; /* an F and an I, and a W of these */
    s1f_status status = s1f_run_in_time(&w->board, num_units, w->tolerance, choose, w, w->out);
    if (status == S1F_ERR_SCHEDULE)
        return s1f_fail(S1F_ERR_SCHEDULE, "the ranks wait for each other under a cap of %lld units", (long long)w->cap);
    return status;
}

static s1f_status create_walk(walk *w, const s1f_schedule *plan)
{
    s1f_shape shape = s1f_schedule_shape(plan);
    shape.products = s1f_products_of_passes(1u << S1F_PASS_FORWARD | 1u << S1F_PASS_BACKWARD);
    size_t of_rank = (size_t)s1f_schedule_num_units(plan) / (size_t)shape.num_ranks; /* alike on all ranks */
    w->ranks = s1f_pool_take(&w->pool, (size_t)shape.num_ranks, sizeof *w->ranks);
    for (int32_t rank = 0; !w->pool.is_short && rank < shape.num_ranks; rank++) {
        w->ranks[rank].ran = s1f_pool_take(&w->pool, of_rank, 1);
        w->ranks[rank].inputs = s1f_pool_take(&w->pool, of_rank, sizeof *w->ranks[rank].inputs);
    }
    S1F_TRY(s1f_pool_status(&w->pool, "the units of all ranks"));
    return s1f_board_create(&shape, &w->pool, &w->board);
}

static double largest_cost(const s1f_request *request)
{
    const s1f_options *options = &request->options;
    int64_t count = (int64_t)request->num_ranks * request->stages_per_rank * request->num_columns;
    double largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, fmax(options->costs[0][i], fmax(options->costs[1][i], options->costs[2][i])));
    return largest;
}

/* -- the time of an order ------------------------------------------------------------------------------------------ */

/* When the last unit of w->out ends at the request's costs. */
static double time_order(walk *w)
{
    double last = 0;
    s1f_board_clear(&w->board);
    for (int32_t rank = 0; rank < w->request->num_ranks; rank++) {
        w->ranks[rank].at = 0;
        w->ranks[rank].free = 0;
    }
    for (int64_t left = s1f_schedule_num_units(w->out); left > 0;)
        for (int32_t rank = 0; rank < w->request->num_ranks; rank++) {
            rank_state *r = &w->ranks[rank];
            int64_t num_units;
            const s1f_unit *units = s1f_schedule_units(w->out, rank, &num_units);
            for (double ready; r->at < num_units && !isinf(ready = s1f_board_ready(&w->board, units[r->at])); left--) {
                r->free = fmax(r->free, ready) + seconds(w, units[r->at]);
                s1f_board_start(&w->board, units[r->at++], r->free);
            }
            last = fmax(last, r->free);
        }
    return last;
}

/* Walks the plan as if all units took the same, then, where costs are given, with them in both ways; *out is the
 * shortest, so that costs never make an order worse. */
s1f_status s1f_schedule_split(const s1f_request *request, const s1f_schedule *plan, s1f_schedule **out)
{
    int64_t cap = request->options.cap != 0 ? request->options.cap : request->family->most_live(request);
    int has_costs = request->options.costs[0] != NULL;
    double tolerance = has_costs ? 1e-9 * largest_cost(request) : 0, shortest = INFINITY;
    walk w = {.request = request, .cap = cap};
    s1f_schedule *best = NULL;
    s1f_status status = create_walk(&w, plan);
    for (int way = 0; way < (has_costs ? 3 : 1) && status == S1F_OK; way++) {
        w.is_equal = way == 0;
        w.may_delay = way == 2;
        w.tolerance = w.is_equal ? 0 : tolerance;
        w.out = NULL;
        if ((status = s1f_schedule_create_like(plan, &w.out)) == S1F_OK)
            status = walk_plan(&w, plan);
        w.is_equal = !has_costs;
        double last = status == S1F_OK ? time_order(&w) : INFINITY;
        if (last < shortest - tolerance) {
            s1f_schedule *longer = best;
            best = w.out;
            w.out = longer;
            shortest = last;
        }
        s1f_schedule_free(w.out);
    }
    s1f_pool_free(&w.pool);
    return s1f_schedule_finish(best, status, out);
}
