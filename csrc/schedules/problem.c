/* problem.c - numbers the units of a problem, and finds what must follow what. */
#include "problem.h"

#include <math.h>

enum { MOST_RELATED = 16384 }; /* units of a micro-batch; of more, too few moves could be timed to gain anything */

static double lag_between(const s1f_problem *p, int32_t stage, int32_t other)
{
    return p->shape.rank_of_stage[stage] == p->shape.rank_of_stage[other] ? 0 : p->transfer;
}

static s1f_unit maker_of(s1f_product product, s1f_unit cell)
{
    static const int32_t passes[S1F_SPLIT_PASSES] = {S1F_PASS_FORWARD, S1F_PASS_BACKWARD_INPUT,
                                                     S1F_PASS_BACKWARD_WEIGHT};
    cell.pass = passes[product];
    return cell;
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

int32_t s1f_problem_number_of(const s1f_problem *p, s1f_unit unit)
{
    int32_t of_product = p->shape.num_stages * p->num_cells;
    return (int32_t)s1f_first_product(unit.pass) * of_product + (int32_t)s1f_cell_of_all(&p->shape, unit);
}

static void fill_unit(s1f_problem *p, int32_t id)
{
    int32_t of_pass = p->shape.num_stages * p->num_cells, pass = id / of_pass, num_earlier = 0;
    s1f_unit unit = maker_of((s1f_product)pass, s1f_forward_of_cell(&p->shape, id % of_pass));
    int64_t cell = s1f_column_of_all(&p->shape, unit);
    s1f_unit_input input;
    p->units[id] = unit;
    p->rank[id] = p->shape.rank_of_stage[unit.stage];
    p->seconds[id] = p->pass_seconds[pass][cell];
    p->bytes[id] = pass == 0 ? p->unit_bytes[cell] : pass == 2 ? -p->unit_bytes[cell] : 0;
    p->work[p->rank[id]] += p->seconds[id];
    p->earlier[id][0] = p->earlier[id][1] = -1;
    for (s1f_inputs inputs = s1f_inputs_of(&p->shape, unit); s1f_next_input(&inputs, &input);) {
        int32_t maker = s1f_problem_number_of(p, input.maker);
        if (input.way == S1F_COMES_FROM_STAGE) {
            p->source[id] = maker;
            p->target[maker] = id;
            p->lag[id] = lag_between(p, unit.stage, input.maker.stage);
        } else {
            p->earlier[id][num_earlier++] = maker;
        }
    }
}

/* What a unit waits for ends before it, and all behind it. */
static void fill_tails(s1f_problem *p, int32_t microbatch)
{
    int64_t count = (int64_t)S1F_SPLIT_PASSES * p->shape.num_stages * s1f_segments_of(&p->shape, microbatch);
    for (int64_t i = count - 1; i >= 0; i--) {
        int32_t id = s1f_problem_number_of(p, unit_in_turn(&p->shape, microbatch, i)), source = p->source[id];
        double tail = p->seconds[id] + p->tail[id];
        if (source >= 0)
            p->tail[source] = fmax(p->tail[source], p->lag[id] + tail);
        for (int j = 0; j < 2; j++)
            if (p->earlier[id][j] >= 0)
                p->tail[p->earlier[id][j]] = fmax(p->tail[p->earlier[id][j]], tail);
    }
}

/* Row of a unit in `past`. */
static int64_t related(const s1f_problem *p, s1f_unit unit)
{
    return ((int64_t)s1f_first_product(unit.pass) * p->shape.num_stages + unit.stage) * p->shape.num_segments +
           unit.segment;
}

/* A unit's past is what it waits for, and the past of that; in the longest micro-batch, and so in those with fewer
 * segments. */
static void fill_past(s1f_problem *p)
{
    int64_t count = (int64_t)S1F_SPLIT_PASSES * p->shape.num_stages * p->shape.num_segments;
    int32_t longest = 0;
    while (s1f_segments_of(&p->shape, longest) < p->shape.num_segments)
        longest++;
    for (int64_t i = 0; i < count && p->words > 0; i++) {
        s1f_unit unit = unit_in_turn(&p->shape, longest, i);
        int64_t own = related(p, unit);
        int32_t id = s1f_problem_number_of(p, unit), before[] = {p->source[id], p->earlier[id][0], p->earlier[id][1]};
        uint64_t *row = &p->past[own * p->words];
        for (int j = 0; j < 3; j++)
            for (int64_t word = 0; before[j] >= 0 && word < p->words; word++)
                row[word] |= p->past[related(p, p->units[before[j]]) * p->words + word];
        row[own / 64] |= (uint64_t)1 << own % 64;
    }
}

/* The least seconds of a stage's first unit: F of a first segment. */
static double least_first(const s1f_problem *p, int32_t stage)
{
    double least = INFINITY;
    for (int32_t m = 0; m < p->shape.num_microbatches; m++)
        least = fmin(least, p->seconds[(int64_t)stage * p->num_cells + s1f_first_cell(&p->shape, m)]);
    return least;
}

/* What follows a rank's last I, at least, and the seconds of its Ws, which that need not wait for. */
static double least_behind(const s1f_problem *p, int32_t rank)
{
    int64_t columns = s1f_num_columns(&p->shape);
    double least = INFINITY, weights = 0;
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++)
        for (int64_t i = 0; i < columns && p->shape.rank_of_stage[stage] == rank; i++) {
            int64_t cells = (int64_t)p->shape.num_stages * p->num_cells, cell = stage * p->num_cells + i;
            least = fmin(least, p->tail[S1F_PRODUCT_INPUT_GRADIENT * cells + cell]);
            weights += p->seconds[S1F_PRODUCT_WEIGHT_GRADIENT * cells + cell];
        }
    return least - weights * (p->shape.first_cell == NULL ? p->shape.num_microbatches : 1);
}

/* No rank starts before the first unit reaches it, then all its work follows, of which Fs and Is end before what a last
 * I still has to reach; and one micro-batch goes all the way. */
static double lower_bound(const s1f_problem *p)
{
    double head = 0, bound = p->seconds[0] + p->tail[0];
    for (int32_t stage = 0; stage < p->shape.num_stages; stage++) {
        int32_t rank = p->shape.rank_of_stage[stage], is_first = 1;
        for (int32_t earlier = 0; earlier < stage; earlier++)
            is_first &= p->shape.rank_of_stage[earlier] != rank;
        if (is_first)
            bound = fmax(bound, head + p->work[rank] + fmax(0, least_behind(p, rank)));
        head += least_first(p, stage);
        head += stage + 1 < p->shape.num_stages ? lag_between(p, stage, stage + 1) : 0;
    }
    return bound;
}

static void fill(s1f_problem *p)
{
    for (int32_t id = 0; id < p->num_units; id++)
        p->source[id] = p->target[id] = -1;
    for (int32_t id = 0; id < p->num_units; id++)
        fill_unit(p, id);
    for (int32_t m = 0; m < p->shape.num_microbatches; m++)
        fill_tails(p, m);
    for (int32_t id = 0; id < p->num_units; id++)
        p->first[p->rank[id] + 1]++;
    for (int32_t rank = 0; rank < p->shape.num_ranks; rank++)
        p->first[rank + 1] += p->first[rank];
    p->bound = lower_bound(p);
    fill_past(p);
}

int s1f_problem_precedes(const s1f_problem *p, s1f_unit a, s1f_unit b)
{
    int64_t i = related(p, a), j = related(p, b);
    int may = p->shape.first_cell == NULL ? a.microbatch <= b.microbatch : a.microbatch == b.microbatch;
    return may && (p->past[j * p->words + i / 64] >> i % 64 & 1);
}

s1f_status s1f_problem_number(s1f_problem *p, s1f_pool *pool)
{
    size_t P = (size_t)p->shape.num_ranks, S = (size_t)p->shape.num_stages, cells = (size_t)s1f_num_cells(&p->shape);
    size_t related = S1F_SPLIT_PASSES * S * (size_t)p->shape.num_segments, N = S1F_SPLIT_PASSES * S * cells;
    p->num_units = (int32_t)N;
    p->num_cells = (int32_t)cells;
    p->words = related <= MOST_RELATED ? (int64_t)(related + 63) / 64 : 0;
    p->work = s1f_pool_take(pool, P, sizeof *p->work);
    p->first = s1f_pool_take(pool, P + 1, sizeof *p->first);
    p->units = s1f_pool_take(pool, N, sizeof *p->units);
    p->rank = s1f_pool_take(pool, N, sizeof *p->rank);
    p->source = s1f_pool_take(pool, N, sizeof *p->source);
    p->target = s1f_pool_take(pool, N, sizeof *p->target);
    p->lag = s1f_pool_take(pool, N, sizeof *p->lag);
    p->seconds = s1f_pool_take(pool, N, sizeof *p->seconds);
    p->tail = s1f_pool_take(pool, N, sizeof *p->tail);
    p->bytes = s1f_pool_take(pool, N, sizeof *p->bytes);
    p->earlier = s1f_pool_take(pool, N, sizeof *p->earlier);
    p->past = s1f_pool_take(pool, related * (size_t)p->words, sizeof *p->past);
    S1F_TRY(s1f_pool_status(pool, "the units of a search"));
    fill(p);
    return S1F_OK;
}
