/* vocabulary.c - plays an order through by its units' seconds; a pass of a shard that may start goes before the rank's
 * next unit. */
#include "vocabulary.h"

#include "../core/check.h"
#include "../core/transform.h"
#include "in_time.h"

#include <math.h>

/* Passes of shards; first the passes for which other ranks wait. */
enum { LOSS, STATISTICS, EMBED, EMBED_GRADIENT, NUM_QUEUES, ORDER = NUM_QUEUES };
static const int32_t pass_of[NUM_QUEUES] = {S1F_PASS_LOSS, S1F_PASS_STATISTICS, S1F_PASS_EMBED,
                                            S1F_PASS_EMBED_GRADIENT};

enum { EMBEDDED_AHEAD = 2 }; /* segments whose E may have begun before their F: as many places has an edge */

typedef struct {
    s1f_unit *units; /* of the order, Fs ahead */
    int64_t num_units;
    int64_t next_of[NUM_QUEUES + 1]; /* of the cells of the stage that each follows; of the order: of units */
} rank_state;

typedef struct {
    const double *const *pass_seconds;
    double tolerance;
    s1f_pool *pool; /* of all arrays */
    s1f_board board;
    rank_state *ranks;
    s1f_unit
        *cells[NUM_QUEUES]; /* in the order in which the first or the last stage goes forward, or back; NULL: none */
    int64_t num_cells;
    int64_t num_first; /* number of Fs of the first stage that have begun */
} spreading;

static int is_forward(s1f_unit unit)
{
    return s1f_pass_makes(unit.pass, S1F_PRODUCT_OUTPUT);
}

/* Copies a rank's units with its Fs earlier: before each other unit stand `ahead` more Fs than before, and at the end
 * those that are left. */
static void copy_ahead(const s1f_unit *units, int64_t count, int64_t ahead, s1f_unit *out)
{
    int64_t forward = 0, num_before = 0, num_written = 0, written = 0; /* forward: index of the next F to be written */
    for (int64_t i = 0; i <= count; i++) {
        if (i < count && is_forward(units[i])) {
            num_before++;
            continue;
        }
        for (; forward < count && (i == count || num_written < num_before + ahead); forward++)
            if (is_forward(units[forward])) {
                out[written++] = units[forward];
                num_written++;
            }
        if (i < count)
            out[written++] = units[i];
    }
}

/* Whether the next unit of a queue may start, its inputs apart. */
static int is_due(const spreading *s, const rank_state *r, int queue)
{
    int64_t next = r->next_of[queue];
    return s->cells[queue] != NULL && next < s->num_cells && (queue != LOSS || next < r->next_of[STATISTICS]) &&
           (queue != EMBED || next < s->num_first + EMBEDDED_AHEAD);
}

static int choose(void *context, int32_t rank, double now, s1f_unit *unit, double *seconds)
{
    spreading *s = context;
    rank_state *r = &s->ranks[rank];
    for (int queue = 0; queue <= ORDER; queue++) {
        if (queue < ORDER && is_due(s, r, queue)) {
            *unit = s->cells[queue][r->next_of[queue]];
            unit->pass = pass_of[queue];
            unit->stage = rank;
        } else if (queue == ORDER && r->next_of[ORDER] < r->num_units) {
            *unit = r->units[r->next_of[ORDER]];
        } else {
            continue;
        }
        *seconds = s->pass_seconds[unit->pass][s1f_column_of_all(&s->board.shape, *unit)];
        if (s1f_board_ready(&s->board, *unit) <= now + s->tolerance) {
            r->next_of[queue]++;
            s->num_first += is_forward(*unit) && unit->stage == 0;
            return 1;
        }
    }
    return 0;
}

static s1f_status require_order(const s1f_shape *shape, int what, int64_t ahead)
{
    if (ahead < 0)
        return s1f_fail(S1F_ERR_ARG, "ahead is %lld, must be at least 0", (long long)ahead);
    if (what & S1F_SPREAD_OUTPUT && s1f_shape_makes(shape, S1F_PRODUCT_STATISTICS))
        return s1f_fail(S1F_ERR_SCHEDULE, "the order spreads its vocabulary already: it holds S and T");
    if (what & S1F_SPREAD_INPUT && s1f_shape_makes(shape, S1F_PRODUCT_EMBEDDED))
        return s1f_fail(S1F_ERR_SCHEDULE, "the order spreads its embedding already: it holds E and G");
    return s1f_shape_check_shards(shape);
}

static s1f_status require_seconds(spreading *s, int64_t num_units)
{
    const s1f_shape *shape = &s->board.shape;
    double most = 0;
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        for (int64_t i = 0; i < shape->num_stages * s1f_num_columns(shape); i++) {
            double seconds = s->pass_seconds[pass][i];
            if (!(seconds >= 0) || !isfinite(seconds * (double)num_units))
                return s1f_fail(S1F_ERR_ARG, "the duration of a unit is %g, must be finite and at least 0", seconds);
            most = fmax(most, seconds);
        }
    s->tolerance = 1e-9 * most;
    return S1F_OK;
}

/* The cells of a stage in the order in which its units make a product. */
static s1f_unit *cells_of(spreading *s, int32_t stage, s1f_product product)
{
    const rank_state *r = &s->ranks[s->board.shape.rank_of_stage[stage]];
    s1f_unit *cells = s1f_pool_take(s->pool, (size_t)s->num_cells, sizeof *cells);
    int64_t count = 0;
    for (int64_t i = 0; cells != NULL && i < r->num_units; i++)
        if (r->units[i].stage == stage && s1f_pass_makes(r->units[i].pass, product))
            cells[count++] = r->units[i];
    return cells;
}

/* Takes the order apart. passes: bits of those that are to be in it. */
static s1f_status create(spreading *s, const s1f_schedule *schedule, uint32_t passes, int64_t ahead)
{
    const s1f_shape *shape = &s->board.shape;
    s->ranks = s1f_pool_take(s->pool, (size_t)shape->num_ranks, sizeof *s->ranks);
    for (int32_t rank = 0; !s->pool->is_short && rank < shape->num_ranks; rank++) {
        rank_state *r = &s->ranks[rank];
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &r->num_units);
        if ((r->units = s1f_pool_take(s->pool, (size_t)r->num_units, sizeof *r->units)) != NULL)
            copy_ahead(units, r->num_units, ahead, r->units);
    }
    for (int queue = 0; queue < NUM_QUEUES && !s->pool->is_short; queue++)
        if (passes >> pass_of[queue] & 1)
            s->cells[queue] = cells_of(s, queue == LOSS || queue == STATISTICS ? shape->num_stages - 1 : 0,
                                       queue == EMBED_GRADIENT ? S1F_PRODUCT_INPUT_GRADIENT : S1F_PRODUCT_OUTPUT);
    return s1f_pool_status(s->pool, "the passes of a vocabulary");
}

static s1f_status spread(s1f_transform *t, int what, int64_t ahead, const double *const *pass_seconds)
{
    s1f_shape shape = t->shape;
    spreading s = {.pass_seconds = pass_seconds, .pool = &t->pool, .num_cells = s1f_num_cells(&shape)};
    uint32_t passes = what & S1F_SPREAD_OUTPUT ? 1u << S1F_PASS_STATISTICS | 1u << S1F_PASS_LOSS : 0;
    if (what & S1F_SPREAD_INPUT)
        passes |= 1u << S1F_PASS_EMBED | (s1f_shape_has_backward(&shape) ? 1u << S1F_PASS_EMBED_GRADIENT : 0);
    shape.products |= s1f_products_of_passes(passes);
    int64_t num_units = s1f_schedule_num_units(t->schedule);
    num_units += __builtin_popcount(passes) * s.num_cells * shape.num_ranks;
    S1F_TRY(s1f_board_create(&shape, s.pool, &s.board));
    S1F_TRY(create(&s, t->schedule, passes, ahead));
    S1F_TRY(require_seconds(&s, num_units));
    s1f_status status = s1f_run_in_time(&s.board, num_units, s.tolerance, choose, &s, t->out);
    if (status == S1F_ERR_SCHEDULE && ahead > 0)
        return s1f_fail(
            S1F_ERR_SCHEDULE,
            "with every unit behind %lld more Fs of its rank the ranks wait for each other: let fewer go ahead",
            (long long)ahead);
    return status;
}

s1f_status s1f_schedule_spread_vocabulary(const s1f_schedule *schedule, int what, int64_t ahead,
                                          const double *const pass_seconds[S1F_MAX_PASSES], s1f_schedule **out)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    s1f_transform t;
    S1F_TRY(require_order(&shape, what, ahead));
    s1f_status status = s1f_transform_begin(schedule, &t);
    if (status == S1F_OK)
        status = spread(&t, what, ahead, pass_seconds);
    return s1f_transform_finish(&t, status, out);
}
