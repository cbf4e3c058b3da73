/* problem.c - numbers the units of a problem, and finds what must follow what. */
#include "problem.h"

#include <math.h>

enum { MOST_RELATED = 16384 }; /* units of a micro-batch; of more, too few moves could be timed to gain anything */

static double lag_between(const s1f_problem *p, int32_t stage, int32_t other)
{
    return p->shape.rank_of_stage[stage] == p->shape.rank_of_stage[other] ? 0 : p->transfer;
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
static void lengthen_inputs(const s1f_problem *p, s1f_unit unit, double *tails)
{
    const s1f_shape *shape = &p->shape;
    int64_t columns = s1f_num_columns(shape), cells = p->shape.num_stages * columns;
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
    const s1f_shape *shape = &p->shape;
    for (int32_t m = 0; m < (p->shape.first_cell == NULL ? 1 : p->shape.num_microbatches); m++)
        for (int64_t i = (int64_t)S1F_SPLIT_PASSES * p->shape.num_stages * s1f_segments_of(shape, m) - 1; i >= 0; i--)
            lengthen_inputs(p, unit_in_turn(shape, m, i), tails);
}

static int32_t id_of_product(const s1f_problem_units *x, s1f_product product, s1f_unit cell)
{
    int64_t of_product = x->shape.num_stages * s1f_num_cells(&x->shape);
    return (int32_t)((int32_t)product * of_product + s1f_cell_of_all(&x->shape, cell));
}

int32_t s1f_problem_number_of(const s1f_problem_units *x, s1f_unit unit)
{
    return id_of_product(x, (s1f_product)split_pass(unit.pass), unit);
}

static void fill_unit(const s1f_problem *p, s1f_problem_units *x, s1f_unit unit, const double *tails)
{
    int32_t id = s1f_problem_number_of(x, unit), pass = split_pass(unit.pass);
    int64_t columns = s1f_num_columns(&x->shape), cells = p->shape.num_stages * columns;
    int64_t cell = unit.stage * columns + s1f_column(&x->shape, unit);
    int num_earlier = 0;
    s1f_unit_input input;
    x->units[id] = unit;
    x->rank[id] = p->shape.rank_of_stage[unit.stage];
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
static int64_t related(const s1f_problem_units *x, s1f_unit unit)
{
    return ((int64_t)split_pass(unit.pass) * x->shape.num_stages + unit.stage) * x->shape.num_segments + unit.segment;
}

/* A unit's past is what it waits for, and the past of that; in the longest micro-batch, and so in those with fewer
 * segments. */
static void fill_past(s1f_problem_units *x)
{
    int64_t count = (int64_t)S1F_SPLIT_PASSES * x->shape.num_stages * x->shape.num_segments;
    int32_t longest = 0;
    while (s1f_segments_of(&x->shape, longest) < x->shape.num_segments)
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
static double least_first(const s1f_problem *p, const s1f_problem_units *x, int32_t stage)
{
    const double *seconds = &p->seconds[0][stage * s1f_num_columns(&x->shape)];
    double least = seconds[0];
    for (int32_t m = 1; x->shape.first_cell != NULL && m < x->shape.num_microbatches; m++)
        least = fmin(least, seconds[x->shape.first_cell[m]]);
    return least;
}

/* What follows a rank's last I, at least, and the seconds of its Ws, which that need not wait for. */
static double least_behind(const s1f_problem *p, const s1f_problem_units *x, int32_t rank, const double *tails)
{
    int64_t columns = s1f_num_columns(&x->shape), cells = p->shape.num_stages * columns;
    double least = INFINITY, weights = 0;
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++)
        for (int64_t i = 0; i < columns && p->shape.rank_of_stage[stage] == rank; i++) {
            int64_t cell = stage * columns + i;
            least = fmin(least, tails[S1F_PRODUCT_INPUT_GRADIENT * cells + cell]);
            weights += p->seconds[S1F_PRODUCT_WEIGHT_GRADIENT][cell];
        }
    return least - weights * (p->shape.first_cell == NULL ? p->shape.num_microbatches : 1);
}

/* No rank starts before the first unit reaches it, then all its work follows, of which Fs and Is end before what a last
 * I still has to reach; and one micro-batch goes all the way. */
static double lower_bound(const s1f_problem *p, const s1f_problem_units *x, const double *tails)
{
    double head = 0, bound = p->seconds[0][0] + tails[0];
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++) {
        int32_t rank = p->shape.rank_of_stage[stage], is_first = 1;
        for (int32_t earlier = 0; earlier < stage; earlier++)
            is_first &= p->shape.rank_of_stage[earlier] != rank;
        if (is_first)
            bound = fmax(bound, head + x->work[rank] + fmax(0, least_behind(p, x, rank, tails)));
        head += least_first(p, x, stage);
        head += stage + 1 < p->shape.num_stages ? lag_between(p, stage, stage + 1) : 0;
    }
    return bound;
}

static void fill(const s1f_problem *p, s1f_problem_units *x, const double *tails)
{
    for (int32_t id = 0; id < x->num_units; id++)
        x->source[id] = x->target[id] = -1;
    for (int product = 0; product < S1F_SPLIT_PASSES; product++)
        for (int32_t stage = 0; stage < p->shape.num_stages; stage++)
            for (int32_t m = 0; m < p->shape.num_microbatches; m++)
                for (int32_t s = 0; s < s1f_segments_of(&x->shape, m); s++)
                    fill_unit(p, x, maker_of((s1f_product)product, (s1f_unit){0, stage, m, s}), tails);
    for (int32_t id = 0; id < x->num_units; id++)
        x->first[x->rank[id] + 1]++;
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        x->first[rank + 1] += x->first[rank];
    x->bound = lower_bound(p, x, tails);
    fill_past(x);
}

int s1f_problem_precedes(const s1f_problem_units *x, s1f_unit a, s1f_unit b)
{
    int64_t i = related(x, a), j = related(x, b);
    int may = x->shape.first_cell == NULL ? a.microbatch <= b.microbatch : a.microbatch == b.microbatch;
    return may && (x->past[j * x->words + i / 64] >> i % 64 & 1);
}

s1f_status s1f_problem_number(const s1f_problem *p, s1f_pool *pool, s1f_problem_units *out)
{
    s1f_shape shape = p->shape;
    size_t P = (size_t)p->shape.num_ranks, S = (size_t)p->shape.num_stages,
           related = S1F_SPLIT_PASSES * S * (size_t)p->shape.num_segments;
    size_t N = S1F_SPLIT_PASSES * S * (size_t)s1f_num_cells(&shape);
    *out = (s1f_problem_units){.shape = shape, .num_units = (int32_t)N, .num_cells = (int32_t)s1f_num_cells(&shape)};
    out->words = related <= MOST_RELATED ? (int64_t)(related + 63) / 64 : 0;
    out->work = s1f_pool_take(pool, P, sizeof *out->work);
    out->first = s1f_pool_take(pool, P + 1, sizeof *out->first);
    out->units = s1f_pool_take(pool, N, sizeof *out->units);
    out->rank = s1f_pool_take(pool, N, sizeof *out->rank);
    out->source = s1f_pool_take(pool, N, sizeof *out->source);
    out->target = s1f_pool_take(pool, N, sizeof *out->target);
    out->lag = s1f_pool_take(pool, N, sizeof *out->lag);
    out->seconds = s1f_pool_take(pool, N, sizeof *out->seconds);
    out->tail = s1f_pool_take(pool, N, sizeof *out->tail);
    out->bytes = s1f_pool_take(pool, N, sizeof *out->bytes);
    out->earlier = s1f_pool_take(pool, N, sizeof *out->earlier);
    out->past = s1f_pool_take(pool, related * (size_t)out->words, sizeof *out->past);
    double *tails = s1f_pool_take(pool, S1F_SPLIT_PASSES * S * (size_t)s1f_num_columns(&shape), sizeof *tails);
    if (pool->is_short)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to search orders of %zu units", N);
    find_tails(p, tails);
    fill(p, out, tails);
    return S1F_OK;
}
