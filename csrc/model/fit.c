/* fit.c - walks the order of each rank, with the units that a choice would add. */
#include "fit.h"

#include <string.h>

typedef struct {
    const s1f_program *program;
    const s1f_fit *fit;
    s1f_lifetime_table table;
    s1f_byte_tables bytes;
    unsigned char *kinds;
    unsigned char *stays;              /* [cell of all stages] whether it must not move: it came back to a full rank */
    int64_t *forward_at, *backward_at; /* [cell of all stages] numbers on their rank */
    int64_t *queue;                    /* cells that could give up, in the order of their backwards */
    int64_t num_queued, held;
    int64_t *away;       /* [unit]: bytes in the tier as it runs; of all ranks, the walked rank's first */
    double tier_busy;    /* seconds that the rank's tier has been given */
    const double *start; /* the same */
} walker;

static int64_t cell_of(const walker *w, s1f_unit unit)
{
    return s1f_cell_of_all(&w->program->shape, unit);
}

/* What a pass takes, or frees, in a cell of this kind. */
static int64_t taken_by(const walker *w, s1f_unit unit, s1f_pass pass, int kind)
{
    unit.pass = (int32_t)pass;
    return s1f_changed_bytes(&w->bytes, s1f_lifetimes_as(&w->table, unit, (s1f_cell_kind)kind).takes, unit, 1);
}

static int64_t freed_by(const walker *w, s1f_unit unit, s1f_pass pass, int kind)
{
    unit.pass = (int32_t)pass;
    return s1f_changed_bytes(&w->bytes, s1f_lifetimes_as(&w->table, unit, (s1f_cell_kind)kind).frees, unit, 0);
}

static void take(walker *w, s1f_unit unit, s1f_pass pass)
{
    w->held += taken_by(w, unit, pass, w->kinds[cell_of(w, unit)]);
}

static void give_back(walker *w, s1f_unit unit, s1f_pass pass)
{
    w->held -= freed_by(w, unit, pass, w->kinds[cell_of(w, unit)]);
}

/* A later forward mostly goes back later, so its place is near the end. */
static void push(walker *w, int64_t cell)
{
    int64_t i = w->num_queued++;
    for (; i > 0 && w->backward_at[w->queue[i - 1]] > w->backward_at[cell]; i--)
        w->queue[i] = w->queue[i - 1];
    w->queue[i] = cell;
}

/* -- the choice ---------------------------------------------------------------------------------------------------- */

static double tier_seconds(const walker *w, s1f_unit unit)
{
    return w->fit->tier_seconds[s1f_column_of_all(&w->program->shape, unit)];
}

/* Whether each way hides behind the unit that runs beside it, and the tier is through with all before. */
static int hides(const walker *w, int64_t cell)
{
    s1f_unit unit = s1f_forward_of_cell(&w->program->shape, cell);
    int64_t forward = w->forward_at[cell], backward = w->backward_at[cell];
    double seconds = tier_seconds(w, unit);
    return w->start[forward + 2] - w->start[forward + 1] >= seconds &&
           w->start[backward] - w->start[backward - 1] >= seconds && w->start[backward] >= w->tier_busy + 2 * seconds;
}

/* Whether the tier takes so many bytes of the cell beside all that it holds then. */
static int tier_takes(const walker *w, int32_t rank, int64_t cell, int64_t i, int64_t bytes)
{
    if (w->fit->tier_room == NULL)
        return 1;
    int64_t most = w->away[i]; /* now the tier is mostly as full as it gets */
    for (int64_t at = w->forward_at[cell]; at < w->backward_at[cell] && most + bytes <= w->fit->tier_room[rank]; at++)
        most = w->away[at] > most ? w->away[at] : most;
    return most + bytes <= w->fit->tier_room[rank];
}

/* The cell, at unit i of its rank, becomes one of this kind, unless it has nothing to give up. 0: not now. */
static int ask(walker *w, int32_t rank, int64_t cell, int64_t i, s1f_cell_kind kind)
{
    s1f_unit unit = s1f_forward_of_cell(&w->program->shape, cell);
    int64_t kept = taken_by(w, unit, S1F_PASS_FORWARD, S1F_CELL_KEPT);
    int64_t left = taken_by(w, unit, S1F_PASS_FORWARD, kind), moved = 0;
    if (kind == S1F_CELL_MOVED) {
        /* O stands behind F, A one unit later, L one unit before the backward: between these it is away. */
        if (w->stays[cell] || i < w->forward_at[cell] + 2 || i + 1 >= w->backward_at[cell] ||
            (w->fit->recomputes && !hides(w, cell)))
            return 0;
        moved = freed_by(w, unit, S1F_PASS_AWAY, kind);
        if (!tier_takes(w, rank, cell, i, moved))
            return 0;
        left -= moved;
    }
    if (left >= kept)
        return 1;
    if (kind == S1F_CELL_MOVED && w->fit->tier_seconds != NULL)
        w->tier_busy += 2 * tier_seconds(w, unit);
    for (int64_t at = w->forward_at[cell]; moved > 0 && at < w->backward_at[cell]; at++)
        w->away[at] += moved;
    w->held -= kept - left;
    w->kinds[cell] = (unsigned char)kind;
    return 1;
}

/* Cells become of this kind until the rank, at its unit i, holds no more than its room. */
static void make_room_by(walker *w, int32_t rank, int64_t i, s1f_cell_kind kind)
{
    int64_t num_waiting = 0, *waiting = w->queue + w->num_queued; /* cells that leave the queue make room at its end */
    while (w->held > w->fit->room[rank] && w->num_queued > 0) {
        int64_t cell = w->queue[--w->num_queued];
        int is_live = w->backward_at[cell] > i; /* those before it in the queue go back even earlier */
        if (is_live && !ask(w, rank, cell, i, kind)) {
            num_waiting++;
            *--waiting = cell;
        }
    }
    for (; num_waiting > 0; num_waiting--)
        push(w, *waiting++);
}

/* Returns whether the rank still holds more than its room. */
static int make_room(walker *w, int32_t rank, int64_t i)
{
    if (w->fit->moves)
        make_room_by(w, rank, i, S1F_CELL_MOVED);
    if (w->fit->recomputes)
        make_room_by(w, rank, i, S1F_CELL_RECOMPUTED);
    return w->held > w->fit->room[rank];
}

/* Whether unit i of the rank is the pass of its cell that `at` says, and the cell of this kind. */
static int is_one_of(const walker *w, s1f_unit unit, int64_t i, const int64_t *at, s1f_cell_kind kind)
{
    int64_t cell = cell_of(w, unit);
    return at[cell] == i && w->kinds[cell] == kind;
}

/* Walks the order of a rank with so many bytes of receive places. Returns how many units came back from the tier to the
 * full rank: these must not move in the next walk, which may recompute them. */
static int64_t walk(walker *w, int32_t rank, int64_t receive)
{
    const s1f_unit *units = w->program->ranks[rank].units;
    int64_t num_units = w->program->ranks[rank].num_units, num_staying = 0;
    memset(w->away, 0, (size_t)num_units * sizeof *w->away);
    w->held = receive;
    w->num_queued = 0;
    w->tier_busy = 0;
    for (int64_t i = 0; i < num_units; i++) {
        int64_t cell = cell_of(w, units[i]);
        if (w->forward_at[cell] == i)
            w->kinds[cell] = S1F_CELL_KEPT;
        int is_full = 0, comes = i + 1 < num_units && is_one_of(w, units[i + 1], i + 1, w->backward_at, S1F_CELL_MOVED);
        if (comes)
            take(w, units[i + 1], S1F_PASS_LOAD);
        if (is_one_of(w, units[i], i, w->backward_at, S1F_CELL_RECOMPUTED)) {
            take(w, units[i], S1F_PASS_RECOMPUTE);
            is_full = make_room(w, rank, i);
            give_back(w, units[i], S1F_PASS_RECOMPUTE);
        }
        take(w, units[i], (s1f_pass)units[i].pass);
        if (is_one_of(w, units[i], i, w->forward_at, S1F_CELL_KEPT))
            push(w, cell);
        is_full |= make_room(w, rank, i);
        if (is_full && comes && w->fit->recomputes) {
            w->stays[cell_of(w, units[i + 1])] = 1;
            num_staying++;
        }
        give_back(w, units[i], (s1f_pass)units[i].pass);
        if (i > 0 && is_one_of(w, units[i - 1], i - 1, w->forward_at, S1F_CELL_MOVED))
            give_back(w, units[i - 1], S1F_PASS_AWAY);
    }
    return num_staying;
}

static void find_passes(const walker *w)
{
    for (s1f_position at = {0}; s1f_next_unit(w->program->schedule, &at);) {
        if (s1f_pass_makes(at.unit.pass, S1F_PRODUCT_OUTPUT))
            w->forward_at[cell_of(w, at.unit)] = at.number - 1;
        if (s1f_pass_makes(at.unit.pass, S1F_PRODUCT_INPUT_GRADIENT))
            w->backward_at[cell_of(w, at.unit)] = at.number - 1;
    }
}

s1f_status s1f_program_fit(const s1f_program *program, const s1f_fit *fit, unsigned char *kinds)
{
    const s1f_shape *shape = &program->shape;
    int64_t num_cells = shape->num_stages * s1f_num_cells(shape);
    walker w = {.program = program, .fit = fit, .kinds = kinds, .start = fit->start};
    if (s1f_shape_makes(shape, S1F_PRODUCT_RECOMPUTED) || s1f_shape_makes(shape, S1F_PRODUCT_COMING))
        return s1f_fail(S1F_ERR_ARG, "the order recomputes or moves units already: fit one that keeps all");
    s1f_pool pool = {0};
    s1f_memory_peak *receive = s1f_pool_take(&pool, (size_t)shape->num_ranks, sizeof *receive);
    w.queue = s1f_pool_take(&pool, (size_t)num_cells, sizeof *w.queue);
    w.stays = s1f_pool_take(&pool, (size_t)num_cells, sizeof *w.stays);
    w.forward_at = s1f_pool_take(&pool, (size_t)num_cells, sizeof *w.forward_at);
    w.backward_at = s1f_pool_take(&pool, (size_t)num_cells, sizeof *w.backward_at);
    w.away = s1f_pool_take(&pool, (size_t)s1f_program_num_units(program), sizeof *w.away);
    s1f_status status = s1f_pool_status(&pool, "what units give up");
    if (status == S1F_OK)
        status = s1f_program_memory(program, fit->bytes, receive);
    if (status == S1F_OK) {
        memset(kinds, S1F_CELL_KEPT, (size_t)num_cells);
        w.table = s1f_lifetimes_of(shape);
        w.bytes = s1f_byte_tables_of(shape, fit->bytes);
        for (int64_t i = 0; i < num_cells; i++)
            w.forward_at[i] = w.backward_at[i] = -1;
        find_passes(&w);
    }
    for (int32_t rank = 0; status == S1F_OK && rank < shape->num_ranks; rank++) {
        int64_t room = fit->room[rank], tier_room = fit->tier_room == NULL ? 0 : fit->tier_room[rank];
        if (room < 0 || tier_room < 0) {
            status = s1f_fail(S1F_ERR_ARG, "%s holds %lld bytes, must be at least 0", room < 0 ? "room" : "tier_room",
                              (long long)(room < 0 ? room : tier_room));
            break;
        }
        while (walk(&w, rank, receive[rank].receive) > 0)
            ;
        w.away += program->ranks[rank].num_units;
        w.start += w.start == NULL ? 0 : program->ranks[rank].num_units;
    }
    s1f_pool_free(&pool);
    return status;
}
