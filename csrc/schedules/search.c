/* search.c - times orders of one problem and moves units of their critical paths. */
#include "search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    NUM_STARTS = 4,       /* orders that are improved, the shortest first */
    MOST_STEPS = 20000,   /* of each; small problems settle within */
    MOST_TIMED = 8000000, /* units timed for each: some tenths of a second */
    MOST_RELATED = 16384, /* units of a micro-batch; of more, too few moves could be timed to gain anything */
    HISTORY = 250         /* steps back whose makespan a new one may reach again */
};
static const double SLACK = 1e-9;        /* of the makespan: sums in another order */
static const double HISTORY_RISE = 1.01; /* how much longer than its start a search may begin to go */

typedef struct {
    double makespan;
    int32_t *order;
} start;

typedef struct {
    double *start, *end; /* [id] seconds */
} times;

struct s1f_search {
    const s1f_problem *problem;
    s1f_shape shape;
    int32_t num_units;
    double bound;   /* no order takes less */
    double *work;   /* [rank] seconds of its units */
    int32_t *first; /* [rank + 1]: where the units of a rank begin in an order */

    s1f_unit *units; /* [id] */
    int32_t *rank;   /* [id] */
    int32_t *source; /* [id] of the unit of a neighbouring stage that it waits for, -1: none */
    int32_t *target; /* [id] of the one that waits for it */
    double *lag;     /* [id] from its source to it */
    double *seconds, *tail;
    int64_t *bytes;        /* [id] W: negative, freed at its end */
    int32_t (*earlier)[2]; /* [id] of the units of its stage that it must follow, -1: none */
    uint64_t *past;        /* [unit of a micro-batch][word]: bits of those that always come before it, and its own */
    int64_t words;         /* of a row of `past`; 0: there is none, and no search */

    int32_t *order; /* ids, rank by rank */
    int32_t *place; /* [id]: its index in the order */
    int64_t *live;  /* [index]: bytes of the rank before that unit */
    int32_t *count; /* [rank] units of a start that is being written */
    int is_broken;  /* it names a unit that does not exist, or one too many */
    times now, trial;

    int32_t *at, *awaited, *stack; /* [rank] while times are taken */
    double *rank_free, *rank_left;

    uint64_t random;
    double history[HISTORY];
    int32_t num_starts;
    start starts[NUM_STARTS + 1]; /* shortest first; the last one is for writing */
};

/* -- the problem --------------------------------------------------------------------------------------------------- */

static double lag_between(const s1f_problem *p, int32_t stage, int32_t other)
{
    return p->rank_of_stage[stage] == p->rank_of_stage[other] ? 0 : p->transfer;
}

s1f_shape s1f_problem_shape(const s1f_problem *p)
{
    return (s1f_shape){
        .num_ranks = p->num_ranks,
        .num_stages = p->num_stages,
        .num_microbatches = p->num_microbatches,
        .num_segments = p->num_segments,
        .products = s1f_products_of_passes(1u << S1F_PASS_FORWARD | 1u << S1F_PASS_BACKWARD),
        .rank_of_stage = p->rank_of_stage,
        .first_cell = p->first_cell,
    };
}

/* Row of a product in tables by pass: it is made by one of F, I and W. */
static int32_t split_pass(int32_t pass)
{
    int32_t product = S1F_PRODUCT_OUTPUT;
    while (!s1f_pass_makes(pass, (s1f_product)product))
        product++;
    return product;
}

static s1f_unit maker_of(s1f_product product, s1f_unit cell)
{
    static const int32_t passes[S1F_SPLIT_PASSES] = {S1F_PASS_FORWARD, S1F_PASS_BACKWARD_INPUT,
                                                     S1F_PASS_BACKWARD_WEIGHT};
    cell.pass = passes[product];
    return cell;
}

/* Lengthens the tails of all that a unit waits for by way of it. */
static void lengthen_inputs(const s1f_problem *p, const s1f_shape *shape, s1f_unit unit, double *tails)
{
    int64_t columns = s1f_num_columns(shape), cells = p->num_stages * columns;
    int64_t cell = unit.stage * columns + s1f_column(shape, unit);
    int32_t pass = split_pass(unit.pass);
    double tail = p->seconds[pass][cell] + tails[pass * cells + cell];
    s1f_unit_input input;
    for (s1f_inputs inputs = s1f_inputs_of(shape, unit); s1f_next_input(&inputs, &input);) {
        int64_t earlier = input.maker.stage * columns + s1f_column(shape, input.maker);
        double *longest = &tails[(int64_t)input.product * cells + earlier];
        *longest = fmax(*longest, lag_between(p, unit.stage, input.maker.stage) + tail);
    }
}

/* Unit i of a micro-batch, counted so that each comes after all that it waits for. */
static s1f_unit unit_in_turn(const s1f_shape *shape, int32_t microbatch, int64_t i)
{
    int32_t S = shape->num_stages, k = s1f_segments_of(shape, microbatch);
    int32_t product = (int32_t)(i / k / S), stage = (int32_t)(i / k % S), segment = (int32_t)(i % k);
    int goes_on = product == S1F_PRODUCT_OUTPUT; /* to later stages and segments */
    return maker_of((s1f_product)product,
                    (s1f_unit){0, goes_on ? stage : S - 1 - stage, microbatch, goes_on ? segment : k - 1 - segment});
}

/* Seconds from the end of a unit to the end of all, if no rank ever were busy; tails[pass][stage][column]. */
static void find_tails(const s1f_problem *p, double *tails)
{
    s1f_shape shape = s1f_problem_shape(p);
    int64_t count = S1F_SPLIT_PASSES * p->num_stages * s1f_num_columns(&shape);
    for (int64_t i = 0; i < count; i++)
        tails[i] = 0;
    for (int32_t m = 0; m < (p->first_cell == NULL ? 1 : p->num_microbatches); m++)
        for (int64_t i = (int64_t)S1F_SPLIT_PASSES * p->num_stages * s1f_segments_of(&shape, m) - 1; i >= 0; i--)
            lengthen_inputs(p, &shape, unit_in_turn(&shape, m, i), tails);
}

static int32_t id_of_product(const s1f_search *x, s1f_product product, s1f_unit cell)
{
    int64_t of_product = x->shape.num_stages * s1f_num_cells(&x->shape);
    return (int32_t)((int32_t)product * of_product + s1f_cell_of_all(&x->shape, cell));
}

static int32_t id_of(const s1f_search *x, s1f_unit unit)
{
    return id_of_product(x, (s1f_product)split_pass(unit.pass), unit);
}

static void fill_unit(s1f_search *x, s1f_unit unit, const double *tails)
{
    const s1f_problem *p = x->problem;
    int32_t id = id_of(x, unit), pass = split_pass(unit.pass);
    int64_t columns = s1f_num_columns(&x->shape), cells = p->num_stages * columns;
    int64_t cell = unit.stage * columns + s1f_column(&x->shape, unit);
    int num_earlier = 0;
    s1f_unit_input input;
    x->units[id] = unit;
    x->rank[id] = p->rank_of_stage[unit.stage];
    x->seconds[id] = p->seconds[pass][cell];
    x->tail[id] = tails[pass * cells + cell];
    x->bytes[id] = pass == 0 ? p->unit_bytes[cell] : pass == 2 ? -p->unit_bytes[cell] : 0;
    x->work[x->rank[id]] += x->seconds[id];
    x->earlier[id][0] = x->earlier[id][1] = -1;
    for (s1f_inputs inputs = s1f_inputs_of(&x->shape, unit); s1f_next_input(&inputs, &input);) {
        int32_t maker = id_of_product(x, input.product, input.maker);
        if (input.way == S1F_COMES_FROM_STAGE) {
            x->source[id] = maker;
            x->target[maker] = id;
            x->lag[id] = lag_between(p, unit.stage, input.maker.stage);
        } else {
            x->earlier[id][num_earlier++] = maker;
        }
    }
}

/* Row of a unit in `past`. */
static int64_t related(const s1f_search *x, s1f_unit unit)
{
    return ((int64_t)split_pass(unit.pass) * x->problem->num_stages + unit.stage) * x->problem->num_segments +
           unit.segment;
}

/* A unit's past is what it waits for, and the past of that; in the longest micro-batch, and so in those with fewer
 * segments. */
static void fill_past(s1f_search *x)
{
    int64_t count = (int64_t)S1F_SPLIT_PASSES * x->problem->num_stages * x->problem->num_segments;
    int32_t longest = 0;
    while (s1f_segments_of(&x->shape, longest) < x->problem->num_segments)
        longest++;
    for (int64_t i = 0; i < count && x->words > 0; i++) {
        s1f_unit unit = unit_in_turn(&x->shape, longest, i);
        int64_t own = related(x, unit);
        uint64_t *row = &x->past[own * x->words];
        s1f_unit_input input;
        for (s1f_inputs inputs = s1f_inputs_of(&x->shape, unit); s1f_next_input(&inputs, &input);) {
            const uint64_t *earlier = &x->past[related(x, maker_of(input.product, input.maker)) * x->words];
            for (int64_t word = 0; word < x->words; word++)
                row[word] |= earlier[word];
        }
        row[own / 64] |= (uint64_t)1 << own % 64;
    }
}

/* The least seconds of a stage's first unit: F of a first segment. */
static double least_first(const s1f_search *x, int32_t stage)
{
    const double *seconds = &x->problem->seconds[0][stage * s1f_num_columns(&x->shape)];
    double least = seconds[0];
    for (int32_t m = 1; x->shape.first_cell != NULL && m < x->shape.num_microbatches; m++)
        least = fmin(least, seconds[x->shape.first_cell[m]]);
    return least;
}

/* What follows a rank's last I, at least, and the seconds of its Ws, which that need not wait for. */
static double least_behind(const s1f_search *x, int32_t rank, const double *tails)
{
    const s1f_problem *p = x->problem;
    int64_t columns = s1f_num_columns(&x->shape), cells = p->num_stages * columns;
    double least = INFINITY, weights = 0;
    for (int32_t stage = 0; stage < p->num_stages; stage++)
        for (int64_t i = 0; i < columns && p->rank_of_stage[stage] == rank; i++) {
            int64_t cell = stage * columns + i;
            least = fmin(least, tails[S1F_PRODUCT_INPUT_GRADIENT * cells + cell]);
            weights += p->seconds[S1F_PRODUCT_WEIGHT_GRADIENT][cell];
        }
    return least - weights * (p->first_cell == NULL ? p->num_microbatches : 1);
}

/* No rank starts before the first unit reaches it, then all its work follows, of which Fs and Is end before what a last
 * I still has to reach; and one micro-batch goes all the way. */
static double lower_bound(const s1f_search *x, const double *tails)
{
    const s1f_problem *p = x->problem;
    double head = 0, bound = p->seconds[0][0] + tails[0];
    for (int32_t stage = 0; stage < p->num_stages; stage++) {
        int32_t rank = p->rank_of_stage[stage], is_first = 1;
        for (int32_t earlier = 0; earlier < stage; earlier++)
            is_first &= p->rank_of_stage[earlier] != rank;
        if (is_first)
            bound = fmax(bound, head + x->work[rank] + fmax(0, least_behind(x, rank, tails)));
        head += least_first(x, stage);
        head += stage + 1 < p->num_stages ? lag_between(p, stage, stage + 1) : 0;
    }
    return bound;
}

static void fill(s1f_search *x, const double *tails)
{
    const s1f_problem *p = x->problem;
    for (int32_t id = 0; id < x->num_units; id++)
        x->source[id] = x->target[id] = -1;
    for (int product = 0; product < S1F_SPLIT_PASSES; product++)
        for (int32_t stage = 0; stage < p->num_stages; stage++)
            for (int32_t m = 0; m < p->num_microbatches; m++)
                for (int32_t s = 0; s < s1f_segments_of(&x->shape, m); s++)
                    fill_unit(x, maker_of((s1f_product)product, (s1f_unit){0, stage, m, s}), tails);
    for (int32_t id = 0; id < x->num_units; id++)
        x->first[x->rank[id] + 1]++;
    for (int32_t rank = 0; rank < p->num_ranks; rank++)
        x->first[rank + 1] += x->first[rank];
    x->bound = lower_bound(x, tails);
    fill_past(x);
}

s1f_status s1f_search_create(const s1f_problem *p, s1f_search **out)
{
    s1f_shape shape = s1f_problem_shape(p);
    size_t P = (size_t)p->num_ranks, S = (size_t)p->num_stages, cells = S * (size_t)s1f_num_columns(&shape);
    size_t N = S1F_SPLIT_PASSES * S * (size_t)s1f_num_cells(&shape);
    s1f_search *x = calloc(1, sizeof *x);
    double *tails = malloc(S1F_SPLIT_PASSES * cells * sizeof *tails);
    int is_short = x == NULL || tails == NULL;
    if (!is_short) {
        x->problem = p;
        x->shape = shape;
        x->num_units = (int32_t)N;
        size_t related = S1F_SPLIT_PASSES * S * (size_t)p->num_segments; /* units of one micro-batch */
        x->words = related <= MOST_RELATED ? (int64_t)(related + 63) / 64 : 0;
        is_short =
            (x->past = calloc(related * (size_t)x->words + 1, sizeof *x->past)) == NULL ||
            (x->work = calloc(P, sizeof *x->work)) == NULL || (x->first = calloc(P + 1, sizeof *x->first)) == NULL ||
            (x->units = malloc(N * sizeof *x->units)) == NULL || (x->rank = malloc(N * sizeof *x->rank)) == NULL ||
            (x->source = malloc(N * sizeof *x->source)) == NULL ||
            (x->target = malloc(N * sizeof *x->target)) == NULL || (x->lag = calloc(N, sizeof *x->lag)) == NULL ||
            (x->seconds = malloc(N * sizeof *x->seconds)) == NULL || (x->tail = malloc(N * sizeof *x->tail)) == NULL ||
            (x->bytes = malloc(N * sizeof *x->bytes)) == NULL ||
            (x->earlier = malloc(N * sizeof *x->earlier)) == NULL ||
            (x->order = malloc(N * sizeof *x->order)) == NULL || (x->place = malloc(N * sizeof *x->place)) == NULL ||
            (x->live = malloc(N * sizeof *x->live)) == NULL || (x->count = calloc(P, sizeof *x->count)) == NULL ||
            (x->now.start = malloc(N * sizeof(double))) == NULL || (x->now.end = malloc(N * sizeof(double))) == NULL ||
            (x->trial.start = malloc(N * sizeof(double))) == NULL ||
            (x->trial.end = malloc(N * sizeof(double))) == NULL || (x->at = malloc(P * sizeof *x->at)) == NULL ||
            (x->awaited = malloc(P * sizeof *x->awaited)) == NULL ||
            (x->stack = malloc(P * sizeof *x->stack)) == NULL ||
            (x->rank_free = malloc(P * sizeof *x->rank_free)) == NULL ||
            (x->rank_left = malloc(P * sizeof *x->rank_left)) == NULL;
        for (int i = 0; i <= NUM_STARTS && !is_short; i++)
            is_short = (x->starts[i].order = malloc(N * sizeof *x->order)) == NULL;
    }
    if (!is_short) {
        find_tails(p, tails);
        fill(x, tails);
        *out = x;
    } else {
        s1f_search_free(x);
    }
    free(tails);
    return is_short ? s1f_fail(S1F_ERR_MEMORY, "no memory to search orders of %zu units", N) : S1F_OK;
}

s1f_search_units s1f_search_units_of(const s1f_search *x)
{
    return (s1f_search_units){.num_units = x->num_units,
                              .num_cells = (int32_t)s1f_num_cells(&x->shape),
                              .rank = x->rank,
                              .source = x->source,
                              .target = x->target,
                              .lag = x->lag,
                              .seconds = x->seconds,
                              .tail = x->tail,
                              .bytes = x->bytes,
                              .work = x->work};
}

double s1f_search_limit(const s1f_search *x)
{
    return x->num_starts == NUM_STARTS ? x->starts[NUM_STARTS - 1].makespan * (1 + SLACK) : INFINITY;
}

void s1f_search_free(s1f_search *x)
{
    if (x == NULL)
        return;
    for (int i = 0; i <= NUM_STARTS; i++)
        free(x->starts[i].order);
    free(x->rank_left);
    free(x->rank_free);
    free(x->stack);
    free(x->awaited);
    free(x->at);
    free(x->trial.end);
    free(x->trial.start);
    free(x->now.end);
    free(x->now.start);
    free(x->count);
    free(x->live);
    free(x->place);
    free(x->order);
    free(x->past);
    free(x->earlier);
    free(x->bytes);
    free(x->tail);
    free(x->seconds);
    free(x->lag);
    free(x->target);
    free(x->source);
    free(x->rank);
    free(x->units);
    free(x->first);
    free(x->work);
    free(x);
}

/* -- the time of an order ------------------------------------------------------------------------------------------ */

/* Fills x->trial for x->order. INFINITY where ranks wait for each other, or it is sure to take more than `limit`. */
static double time_order(s1f_search *x, double limit)
{
    int32_t P = x->problem->num_ranks, num_stacked = 0, num_ended = 0;
    double last = 0;
    for (int32_t rank = P - 1; rank >= 0; rank--) {
        x->at[rank] = x->first[rank];
        x->awaited[rank] = -1;
        x->rank_free[rank] = 0;
        x->rank_left[rank] = x->work[rank];
        x->stack[num_stacked++] = rank;
    }
    while (num_stacked > 0) {
        int32_t rank = x->stack[--num_stacked], i = x->at[rank], behind = x->first[rank + 1];
        double now = x->rank_free[rank], left = x->rank_left[rank];
        for (; i < behind; i++) {
            int32_t id = x->order[i], source = x->source[id], target = x->target[id];
            x->at[rank] = i;
            if (source >= 0) {
                if (x->place[source] >= x->at[x->rank[source]]) {
                    x->awaited[rank] = source;
                    break;
                }
                now = fmax(now, x->trial.end[source] + x->lag[id]);
            }
            x->trial.start[id] = now;
            now += x->seconds[id];
            left -= x->seconds[id];
            if (now + fmax(left, x->tail[id]) > limit)
                return INFINITY;
            x->trial.end[id] = now;
            if (target >= 0 && x->awaited[x->rank[target]] == id) {
                x->awaited[x->rank[target]] = -1;
                x->stack[num_stacked++] = x->rank[target];
            }
        }
        x->at[rank] = i;
        x->rank_free[rank] = now;
        x->rank_left[rank] = left;
        if (i == behind) {
            num_ended++;
            last = fmax(last, now);
        }
    }
    return num_ended == P ? last : INFINITY;
}

/* Bytes before each unit of the rank from index `from` up to `to`, whose own bytes follow; 0 where the cap is
 * broken. */
static int count_live(s1f_search *x, int32_t rank, int32_t from, int32_t to)
{
    int64_t cap = x->problem->cap_bytes[rank], live = from == x->first[rank] ? 0 : x->live[from];
    for (int32_t i = from; i <= to; i++) {
        int64_t bytes = x->bytes[x->order[i]];
        x->live[i] = live;
        live += bytes;
        if (bytes > 0 && live > cap)
            return 0;
    }
    return 1;
}

/* 1 where a comes before b whatever the ranks do: by its inputs, or because micro-batches take turns where all are
 * equal. */
static int precedes(const s1f_search *x, s1f_unit a, s1f_unit b)
{
    int64_t i = related(x, a), j = related(x, b);
    int may = x->shape.first_cell == NULL ? a.microbatch <= b.microbatch : a.microbatch == b.microbatch;
    return may && (x->past[j * x->words + i / 64] >> i % 64 & 1);
}

/* -- starts -------------------------------------------------------------------------------------------------------- */

void s1f_search_begin(s1f_search *x)
{
    memset(x->count, 0, (size_t)x->problem->num_ranks * sizeof *x->count);
    x->is_broken = 0;
}

void s1f_search_append(s1f_search *x, s1f_unit unit)
{
    if (unit.pass == S1F_PASS_BACKWARD) {
        unit.pass = S1F_PASS_BACKWARD_INPUT;
        s1f_search_append(x, unit);
        unit.pass = S1F_PASS_BACKWARD_WEIGHT;
    }
    s1f_search_append_number(x, id_of(x, unit));
}

void s1f_search_append_number(s1f_search *x, int32_t id)
{
    int32_t rank = x->rank[id], i = x->first[rank] + x->count[rank];
    x->is_broken |= i >= x->first[rank + 1];
    if (x->is_broken)
        return;
    x->count[rank]++;
    x->order[i] = id;
    x->place[id] = i;
}

/* Whether a unit comes after all that it waits for at its own stage. */
static int keeps_rules(const s1f_search *x, int32_t id)
{
    for (int i = 0; i < 2; i++)
        if (x->earlier[id][i] >= 0 && x->place[x->earlier[id][i]] >= x->place[id])
            return 0;
    return 1;
}

/* Each unit once, in an order within each rank that keeps the rules of one stage, and within the cap. */
static int is_order(s1f_search *x)
{
    const s1f_problem *p = x->problem;
    for (int32_t rank = 0; rank < p->num_ranks; rank++) {
        if (x->is_broken || x->first[rank] + x->count[rank] != x->first[rank + 1])
            return 0;
        for (int32_t i = x->first[rank]; i < x->first[rank + 1]; i++)
            if (x->place[x->order[i]] != i || !keeps_rules(x, x->order[i])) /* else a unit twice, another missing */
                return 0;
        if (!count_live(x, rank, x->first[rank], x->first[rank + 1] - 1))
            return 0;
    }
    return 1;
}

void s1f_search_offer(s1f_search *x)
{
    if (!is_order(x))
        return;
    double makespan = time_order(x, s1f_search_limit(x));
    if (isinf(makespan))
        return;
    for (int32_t other = 0; other < x->num_starts; other++)
        if (fabs(x->starts[other].makespan - makespan) <= SLACK * makespan)
            return; /* most likely the same order in another guise */
    start entry = {makespan, x->starts[NUM_STARTS].order};
    memcpy(entry.order, x->order, (size_t)x->num_units * sizeof *x->order);
    int32_t i = x->num_starts;
    if (i < NUM_STARTS)
        x->starts[NUM_STARTS] = x->starts[x->num_starts++];
    for (; i > 0 && x->starts[i - 1].makespan > makespan; i--)
        x->starts[i] = x->starts[i - 1];
    x->starts[i] = entry;
}

/* -- search -------------------------------------------------------------------------------------------------------- */

/* 0 .. below - 1. [xorshift64*, Vigna 2016] */
static int32_t draw(s1f_search *x, int32_t below)
{
    x->random ^= x->random >> 12;
    x->random ^= x->random << 25;
    x->random ^= x->random >> 27;
    return (int32_t)((x->random * 2685821657736338717u >> 33) % (uint64_t)below);
}

static int follows_at_once(const s1f_search *x, int32_t i)
{
    return x->now.end[x->order[i - 1]] == x->now.start[x->order[i]];
}

/* The index of a unit on a random critical path that waits for the one before it on its rank, each with the same
 * chance; -1: no unit does, and nothing can be gained. */
static int32_t find_critical(s1f_search *x, double makespan)
{
    int32_t rank = draw(x, x->problem->num_ranks), chosen = -1, num_seen = 0;
    while (x->now.end[x->order[x->first[rank + 1] - 1]] < makespan)
        rank = rank + 1 < x->problem->num_ranks ? rank + 1 : 0;
    int32_t id = x->order[x->first[rank + 1] - 1];
    for (;;) {
        int32_t i = x->place[id], source = x->source[id];
        int on_rank = i > x->first[x->rank[id]] && follows_at_once(x, i);
        int from_source = source >= 0 && x->now.end[source] + x->lag[id] == x->now.start[id];
        if (on_rank && !(from_source && draw(x, 2))) {
            if (draw(x, ++num_seen) == 0)
                chosen = i;
            id = x->order[i - 1];
        } else if (from_source) {
            id = source;
        } else {
            return chosen;
        }
    }
}

/* Moves the unit at index `from` to index `to`, those between by one. */
static void move(s1f_search *x, int32_t from, int32_t to)
{
    int32_t id = x->order[from], step = from < to ? 1 : -1;
    for (int32_t i = from; i != to; i += step) {
        x->order[i] = x->order[i + step];
        x->place[x->order[i]] = i;
    }
    x->order[to] = id;
    x->place[id] = to;
}

/* How far from index `from` towards `to` a unit may go without passing one that it must follow or precede. */
static int32_t reach(const s1f_search *x, int32_t from, int32_t to)
{
    s1f_unit unit = x->units[x->order[from]];
    int32_t step = from < to ? 1 : -1, i = from;
    for (; i != to; i += step) {
        s1f_unit other = x->units[x->order[i + step]];
        if (step > 0 ? precedes(x, unit, other) : precedes(x, other, unit))
            break;
    }
    return i;
}

/* A move of one of two units that follow each other on a critical path: past the other, to the end of their busy block,
 * or anywhere between. *from == *to where a rule stands against it. */
static void draw_move(s1f_search *x, int32_t i, int32_t *from, int32_t *to)
{
    int32_t rank = x->rank[x->order[i]], last = i, way = draw(x, 6);
    if (way < 3) {
        *from = i;
        for (last = i - 1; last > x->first[rank] && follows_at_once(x, last);)
            last--;
        *to = way == 0 ? i - 1 : way == 1 ? last : last + draw(x, i - last);
    } else {
        *from = i - 1;
        while (last + 1 < x->first[rank + 1] && follows_at_once(x, last + 1))
            last++;
        *to = way == 3 ? i : way == 4 ? last : i + draw(x, last - i + 1);
    }
    *to = reach(x, *from, *to);
}

/* Tries one move from x->order, whose times are x->now; the makespan after it, `current` where it was taken back. */
static double step(s1f_search *x, double current, double limit)
{
    int32_t i = find_critical(x, current), from, to;
    if (i < 0)
        return current;
    draw_move(x, i, &from, &to);
    if (from == to)
        return current;
    int32_t rank = x->rank[x->order[from]], low = from < to ? from : to, high = from < to ? to : from;
    move(x, from, to);
    double makespan = count_live(x, rank, low, high) ? time_order(x, limit) : INFINITY;
    if (isinf(makespan)) {
        move(x, to, from);
        count_live(x, rank, low, high);
        return current;
    }
    times before = x->now;
    x->now = x->trial;
    x->trial = before;
    return makespan;
}

/* Late acceptance: a step stays where it is no longer than the order before it or the one HISTORY steps back. */
static void improve(s1f_search *x, start *best)
{
    const s1f_problem *p = x->problem;
    double current = best->makespan, slack = SLACK * current;
    int64_t most = MOST_TIMED / x->num_units;
    memcpy(x->order, best->order, (size_t)x->num_units * sizeof *x->order);
    for (int32_t i = 0; i < x->num_units; i++)
        x->place[x->order[i]] = i;
    for (int32_t rank = 0; rank < p->num_ranks; rank++)
        count_live(x, rank, x->first[rank], x->first[rank + 1] - 1);
    time_order(x, INFINITY);
    times before = x->now;
    x->now = x->trial;
    x->trial = before;
    for (int i = 0; i < HISTORY; i++)
        x->history[i] = current * HISTORY_RISE;
    for (int64_t i = 0; i < most && i < MOST_STEPS && best->makespan > x->bound + slack; i++) {
        double *late = &x->history[i % HISTORY];
        current = step(x, current, fmax(current, *late) + slack);
        *late = fmin(*late, current);
        if (current < best->makespan - slack) {
            memcpy(best->order, x->order, (size_t)x->num_units * sizeof *x->order);
            best->makespan = current;
        }
    }
}

s1f_status s1f_search_run(s1f_search *x)
{
    s1f_status status = S1F_OK;
    x->random = 88172645463325252u; /* anything but 0 */
    for (int32_t i = 0; i < x->num_starts && x->words > 0 && s1f_search_makespan(x) > x->bound * (1 + SLACK); i++) {
        if ((status = s1f_check_interrupted()) != S1F_OK)
            break;
        improve(x, &x->starts[i]);
    }
    return status;
}

static const start *shortest(const s1f_search *x)
{
    const start *best = &x->starts[0];
    for (int32_t i = 1; i < x->num_starts; i++)
        best = x->starts[i].makespan < best->makespan ? &x->starts[i] : best;
    return best;
}

double s1f_search_makespan(const s1f_search *x)
{
    return x->num_starts > 0 ? shortest(x)->makespan : INFINITY;
}

s1f_status s1f_search_take(const s1f_search *x, int is_split, s1f_schedule *schedule)
{
    s1f_status status = S1F_OK;
    for (int32_t i = 0; i < x->num_units && status == S1F_OK; i++) {
        s1f_unit unit = x->units[shortest(x)->order[i]];
        if (!is_split && unit.pass == S1F_PASS_BACKWARD_WEIGHT)
            continue;
        if (!is_split && unit.pass == S1F_PASS_BACKWARD_INPUT)
            unit.pass = S1F_PASS_BACKWARD;
        status = s1f_schedule_append(schedule, unit);
    }
    return status;
}
