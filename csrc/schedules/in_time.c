/* in_time.c - times of products, and the clock. */
#include "in_time.h"

#include <math.h>

/* -- the board ----------------------------------------------------------------------------------------------------- */

s1f_status s1f_board_create(const s1f_shape *shape, s1f_pool *pool, s1f_board *board)
{
    size_t num_cells = (size_t)(shape->num_stages * s1f_num_cells(shape));
    *board = (s1f_board){.shape = *shape};
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        if (s1f_shape_makes(shape, (s1f_product)product))
            board->end[product] = s1f_pool_take(pool, num_cells, sizeof(double));
    S1F_TRY(s1f_pool_status(pool, "the times of units"));
    s1f_board_clear(board);
    return S1F_OK;
}

void s1f_board_clear(s1f_board *board)
{
    int64_t num_cells = board->shape.num_stages * s1f_num_cells(&board->shape);
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        for (int64_t i = 0; board->end[product] != NULL && i < num_cells; i++)
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

enum { TIMES_PER_CHECK = 1024 };

typedef struct {
    s1f_board *board;
    s1f_choose *choose;
    void *context;
    double now, tolerance; /* seconds */
    double *free;          /* [rank] end of the rank's unit */
    s1f_schedule *out;
} run_in_time;

static int is_free(const run_in_time *c, int32_t rank)
{
    return c->free[rank] <= c->now + c->tolerance;
}

/* Starts what can start now, rank after rank; again, where a unit that takes no time may be one that a rank before its
 * own waits for. */
static s1f_status start_units(run_in_time *c)
{
    s1f_unit unit;
    double seconds;
    for (int again = 1; again;) {
        again = 0;
        for (int32_t rank = 0; rank < c->board->shape.num_ranks; rank++)
            while (is_free(c, rank) && c->choose(c->context, rank, c->now, &unit, &seconds)) {
                c->free[rank] = c->now + seconds;
                s1f_board_start(c->board, unit, c->free[rank]);
                S1F_TRY(s1f_schedule_append(c->out, unit));
                again |= is_free(c, rank);
            }
    }
    return S1F_OK;
}

s1f_status s1f_run_in_time(s1f_board *board, int64_t num_units, double tolerance, s1f_choose *choose, void *context,
                           s1f_schedule *out)
{
    s1f_pool pool = {0};
    run_in_time c = {.board = board, .choose = choose, .context = context, .tolerance = tolerance, .out = out};
    c.free = s1f_pool_take(&pool, (size_t)board->shape.num_ranks, sizeof *c.free);
    s1f_status status = s1f_pool_status(&pool, "a run of all ranks in time");
    for (int64_t n = 0; status == S1F_OK; n++) {
        if (n % TIMES_PER_CHECK == 0 && (status = s1f_check_interrupted()) != S1F_OK)
            break;
        if ((status = start_units(&c)) != S1F_OK || s1f_schedule_num_units(out) == num_units)
            break;
        double next = INFINITY; /* when the next unit ends */
        for (int32_t rank = 0; rank < board->shape.num_ranks; rank++)
            next = is_free(&c, rank) ? next : fmin(next, c.free[rank]);
        c.now = next;
        if (isinf(next))
            status = s1f_fail(S1F_ERR_SCHEDULE, "the ranks wait for each other");
    }
    s1f_pool_free(&pool);
    return status;
}
