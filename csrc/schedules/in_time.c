/* in_time.c - times of products, and the clock. */
#include "in_time.h"

#include <math.h>
#include <string.h>

/* -- the board ----------------------------------------------------------------------------------------------------- */

static int64_t num_cells(const s1f_shape *shape)
{
    return shape->num_stages * s1f_num_cells(shape);
}

s1f_status s1f_board_create(const s1f_shape *shape, s1f_pool *pool, s1f_board *board)
{
    *board = (s1f_board){.shape = *shape};
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        if (s1f_shape_makes(shape, (s1f_product)product))
            board->end[product] = s1f_pool_take(pool, (size_t)num_cells(shape), sizeof(double));
    if (pool->is_short)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to order the units of %d stages", shape->num_stages);
    s1f_board_clear(board);
    return S1F_OK;
}

void s1f_board_clear(s1f_board *board)
{
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        for (int64_t i = 0; board->end[product] != NULL && i < num_cells(&board->shape); i++)
            board->end[product][i] = INFINITY;
}

double s1f_board_ready(const s1f_board *board, s1f_unit unit)
{
    double ready = 0;
    s1f_unit_input input;
    for (s1f_inputs inputs = s1f_inputs_of(&board->shape, unit); s1f_next_input(&inputs, &input);)
        ready = fmax(ready, board->end[input.product][s1f_cell_of_all(&board->shape, input.maker)]);
    return ready;
}

void s1f_board_start(s1f_board *board, s1f_unit unit, double end)
{
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        if (s1f_pass_makes(unit.pass, (s1f_product)product))
            board->end[product][s1f_cell_of_all(&board->shape, unit)] = end;
}

/* -- the clock ----------------------------------------------------------------------------------------------------- */

enum { LOOKS_PER_CHECK = 1024 };

typedef struct {
    s1f_board *board;
    s1f_edges *edges;
    const s1f_clock_rules *rules;
    void *context;
    double now, tolerance; /* seconds */
    double *free;          /* [rank] end of the rank's unit */
    s1f_unit *running;     /* [rank] */
    unsigned char *look;   /* [rank] whether the rank's choice may have changed since the last look */
    int64_t num_started;
} run_in_time;

/* The rank's unit has ended: ranks that may wait for the unit look again. */
static void end_unit(run_in_time *c, int32_t rank)
{
    if (c->rules->all_look)
        memset(c->look, 1, (size_t)c->board->shape.num_ranks);
    s1f_edge_list out = c->edges->kinds[s1f_kind(c->running[rank])].out;
    for (int32_t i = 0; i < out.count; i++)
        c->look[c->edges->edges[out.edges[i]].destination_rank] = 1;
}

static s1f_status start_unit(run_in_time *c, int32_t rank, s1f_unit unit, double seconds)
{
    c->free[rank] = c->now + seconds;
    c->running[rank] = unit;
    s1f_board_start(c->board, unit, c->free[rank]);
    c->num_started++;
    return c->rules->start(c->context, rank, unit);
}

/* Starts what can start now, rank after rank; again, where a unit that takes no time woke a rank before its own. */
static s1f_status start_units(run_in_time *c)
{
    s1f_status status = S1F_OK;
    unsigned char *end = c->look + c->board->shape.num_ranks, *look = c->look;
    for (;; look++) {
        look = memchr(look, 1, (size_t)(end - look));
        if (look == NULL && (look = memchr(c->look, 1, (size_t)(end - c->look))) == NULL)
            return S1F_OK;
        int32_t rank = (int32_t)(look - c->look);
        s1f_unit unit;
        double seconds;
        *look = 0;
        while (c->free[rank] <= c->now + c->tolerance && c->rules->choose(c->context, rank, c->now, &unit, &seconds)) {
            if ((status = start_unit(c, rank, unit, seconds)) != S1F_OK)
                return status;
            if (c->free[rank] <= c->now + c->tolerance)
                end_unit(c, rank);
        }
    }
}

/* Goes on to the time at which the next unit ends; INFINITY: none runs. */
static void end_units(run_in_time *c)
{
    int32_t num_ranks = c->board->shape.num_ranks;
    double before = c->now + c->tolerance, next = INFINITY;
    for (int32_t rank = 0; rank < num_ranks; rank++)
        if (c->free[rank] > before && c->free[rank] < next)
            next = c->free[rank];
    c->now = next;
    for (int32_t rank = 0; rank < num_ranks; rank++)
        if (c->free[rank] > before && c->free[rank] <= next + c->tolerance) {
            c->look[rank] = 1;
            end_unit(c, rank);
        }
}

s1f_status s1f_run_in_time(s1f_board *board, int64_t num_units, double tolerance, const s1f_clock_rules *rules,
                           void *context)
{
    size_t num_ranks = (size_t)board->shape.num_ranks;
    s1f_pool pool = {0};
    run_in_time c = {.board = board, .rules = rules, .context = context, .tolerance = tolerance};
    s1f_status status = s1f_edges_create(&board->shape, &c.edges);
    c.free = s1f_pool_take(&pool, num_ranks, sizeof *c.free);
    c.running = s1f_pool_take(&pool, num_ranks, sizeof *c.running);
    c.look = s1f_pool_take(&pool, num_ranks, 1);
    if (status == S1F_OK && pool.is_short)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to run %zu ranks in time", num_ranks);
    if (status == S1F_OK)
        memset(c.look, 1, num_ranks);
    for (int64_t n = 0; status == S1F_OK && c.num_started < num_units; n++) {
        if (n % LOOKS_PER_CHECK == 0 && (status = s1f_check_interrupted()) != S1F_OK)
            break;
        if ((status = start_units(&c)) != S1F_OK || c.num_started == num_units)
            break;
        end_units(&c);
        if (isinf(c.now))
            status = s1f_fail(S1F_ERR_SCHEDULE, "the ranks wait for each other");
    }
    s1f_pool_free(&pool);
    s1f_edges_free(c.edges);
    return status;
}
