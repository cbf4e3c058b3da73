/* vocabulary.c - runs the order in time, and lets S and T go first wherever they can. */
#include "vocabulary.h"

#include "../core/check.h"
#include "in_time.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    s1f_unit *units; /* of the order, Fs ahead */
    int64_t num_units, next;
    int64_t next_statistics, next_loss; /* of the cells of the last stage */
} rank_state;

typedef struct {
    const double *const *pass_seconds;
    double tolerance;
    s1f_board board;
    rank_state *ranks;
    s1f_unit *cells; /* of the last stage, in the order of its Fs */
    int64_t num_cells;
    s1f_schedule *out;
} spreading;

static int is_forward(s1f_unit unit)
{
    return s1f_pass_makes(unit.pass, S1F_PRODUCT_OUTPUT);
}

/* Copies the units, each that is no F behind `ahead` more Fs. */
static void copy_ahead(const s1f_unit *units, int64_t count, int64_t ahead, s1f_unit *out)
{
    int64_t forward = 0, num_before = 0, num_written = 0, written = 0; /* forward: index of the next F to be written */
    for (int64_t i = 0; i < count; i++) {
        num_before += is_forward(units[i]);
        if (is_forward(units[i]))
            continue;
        for (; forward < count && num_written < num_before + ahead; forward++)
            if (is_forward(units[forward])) {
                out[written++] = units[forward];
                num_written++;
            }
        out[written++] = units[i];
    }
    for (; forward < count; forward++)
        if (is_forward(units[forward]))
            out[written++] = units[forward];
}

static int can_start(const spreading *s, s1f_unit unit, double now)
{
    return s1f_board_ready(&s->board, unit) <= now + s->tolerance;
}

static double seconds_of(const spreading *s, s1f_unit unit)
{
    return s->pass_seconds[unit.pass][(int64_t)unit.stage * s->board.shape.num_segments + unit.segment];
}

/* T before S before the order's own: others wait for both. */
static int choose(void *context, int32_t rank, double now, s1f_unit *unit, double *seconds)
{
    const spreading *s = context;
    const rank_state *r = &s->ranks[rank];
    s1f_unit candidates[3];
    int count = 0;
    if (r->next_loss < r->next_statistics) {
        candidates[count] = s->cells[r->next_loss];
        candidates[count++].pass = S1F_PASS_LOSS;
    }
    if (r->next_statistics < s->num_cells) {
        candidates[count] = s->cells[r->next_statistics];
        candidates[count++].pass = S1F_PASS_STATISTICS;
    }
    for (int i = 0; i < count; i++)
        candidates[i].stage = rank;
    if (r->next < r->num_units)
        candidates[count++] = r->units[r->next];
    for (int i = 0; i < count; i++)
        if (can_start(s, candidates[i], now)) {
            *unit = candidates[i];
            *seconds = seconds_of(s, *unit);
            return 1;
        }
    return 0;
}

static s1f_status start(void *context, int32_t rank, s1f_unit unit)
{
    spreading *s = context;
    rank_state *r = &s->ranks[rank];
    if (unit.pass == S1F_PASS_LOSS)
        r->next_loss++;
    else if (unit.pass == S1F_PASS_STATISTICS)
        r->next_statistics++;
    else
        r->next++;
    return s1f_schedule_append(s->out, unit);
}

static s1f_status require_order(const s1f_schedule *schedule, const s1f_shape *shape, int64_t ahead)
{
    if (ahead < 0)
        return s1f_fail(S1F_ERR_ARG, "ahead is %lld, must be at least 0", (long long)ahead);
    if (s1f_shape_makes(shape, S1F_PRODUCT_STATISTICS))
        return s1f_fail(S1F_ERR_SCHEDULE, "the order spreads its vocabulary already: it holds S and T");
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        if (shape->rank_of_stage[rank] != rank)
            return s1f_fail(
                S1F_ERR_SCHEDULE,
                "a vocabulary is spread over stages that lie on the ranks of their numbers: stage %d lies on "
                "rank %d",
                (int)rank, (int)shape->rank_of_stage[rank]);
    return s1f_schedule_check(schedule, 0);
}

static s1f_status require_seconds(spreading *s, int64_t num_units)
{
    const s1f_shape *shape = &s->board.shape;
    double most = 0;
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        for (int64_t i = 0; i < (int64_t)shape->num_stages * shape->num_segments; i++) {
            double seconds = s->pass_seconds[pass][i];
            if (!(seconds >= 0) || !isfinite(seconds * (double)num_units))
                return s1f_fail(S1F_ERR_ARG, "the duration of a unit is %g, must be finite and at least 0", seconds);
            most = fmax(most, seconds);
        }
    s->tolerance = 1e-9 * most;
    return S1F_OK;
}

/* Takes the order apart; *num_units: of it and of all S and T. */
static s1f_status create(spreading *s, const s1f_schedule *schedule, const s1f_shape *shape, int64_t ahead,
                         int64_t *num_units)
{
    s->ranks = calloc((size_t)shape->num_ranks, sizeof *s->ranks);
    s->cells = malloc((size_t)s->num_cells * sizeof *s->cells);
    int is_short = s->ranks == NULL || s->cells == NULL;
    *num_units = 2 * s->num_cells * shape->num_ranks;
    for (int32_t rank = 0; !is_short && rank < shape->num_ranks; rank++) {
        rank_state *r = &s->ranks[rank];
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &r->num_units);
        *num_units += r->num_units;
        r->units = malloc((size_t)(r->num_units + 1) * sizeof *r->units); /* + 1: malloc(0) may be NULL */
        if (!(is_short = r->units == NULL))
            copy_ahead(units, r->num_units, ahead, r->units);
    }
    if (is_short)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to spread the vocabulary over %d ranks", (int)shape->num_ranks);
    int32_t last = shape->num_stages - 1;
    const rank_state *r = &s->ranks[shape->rank_of_stage[last]];
    int64_t count = 0;
    for (int64_t i = 0; i < r->num_units; i++)
        if (r->units[i].stage == last && is_forward(r->units[i]))
            s->cells[count++] = r->units[i];
    s1f_status status = s1f_board_create(shape, 0, &s->board);
    return status == S1F_OK ? require_seconds(s, *num_units) : status;
}

s1f_status s1f_schedule_spread_vocabulary(const s1f_schedule *schedule, int64_t ahead,
                                          const double *const pass_seconds[S1F_MAX_PASSES], s1f_schedule **out)
{
    static const s1f_clock_rules rules = {choose, start};
    s1f_shape shape = s1f_schedule_shape(schedule);
    s1f_status status = require_order(schedule, &shape, ahead);
    unsigned char *recomputed = NULL;
    if (status == S1F_OK)
        status = s1f_schedule_find_recomputed(schedule, &recomputed);
    if (status != S1F_OK)
        return status;
    shape.recomputed = recomputed;
    shape.products |= s1f_products_of_passes(1u << S1F_PASS_STATISTICS);
    spreading s = {.pass_seconds = pass_seconds, .num_cells = (int64_t)shape.num_microbatches * shape.num_segments};
    int64_t num_units;
    status = create(&s, schedule, &shape, ahead, &num_units);
    if (status == S1F_OK)
        status = s1f_schedule_create(shape.num_ranks, shape.num_stages, shape.num_microbatches, shape.num_segments,
                                     shape.rank_of_stage, &s.out);
    if (status == S1F_OK)
        status = s1f_run_in_time(&s.board, num_units, s.tolerance, &rules, &s);
    for (int32_t rank = 0; s.ranks != NULL && rank < shape.num_ranks; rank++)
        free(s.ranks[rank].units);
    free(s.ranks);
    free(s.cells);
    s1f_board_free(&s.board);
    free(recomputed);
    if (status != S1F_OK) {
        s1f_schedule_free(s.out);
        return status;
    }
    *out = s.out;
    return S1F_OK;
}
