/* transform.c - walks each rank of an order that keeps its rules, and writes another. */
#include "transform.h"

#include "check.h"

s1f_status s1f_transform_begin(const s1f_schedule *schedule, s1f_transform *transform)
{
    *transform = (s1f_transform){.schedule = schedule};
    S1F_TRY(s1f_schedule_check(schedule, 0));
    S1F_TRY(s1f_schedule_full_shape(schedule, &transform->pool, &transform->shape));
    return s1f_schedule_create_like(schedule, &transform->out);
}

s1f_status s1f_transform_finish(s1f_transform *transform, s1f_status status, s1f_schedule **out)
{
    s1f_pool_free(&transform->pool);
    return s1f_schedule_finish(transform->out, status, out);
}

/* -- recomputation ------------------------------------------------------------------------------------------------- */

typedef struct {
    s1f_transform t;
    const unsigned char *chosen;
    int64_t *forward_at; /* [cell of all stages]: number of its F on its rank, from 1; 0: it stays; of moves */
} change;

static s1f_status append(const change *c, s1f_unit unit, s1f_pass pass)
{
    unit.pass = pass;
    return s1f_schedule_append(c->t.out, unit);
}

static int is_chosen(const change *c, s1f_unit unit)
{
    return c->chosen == NULL || c->chosen[s1f_cell_of_all(&c->t.shape, unit)];
}

s1f_status s1f_schedule_recompute(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out)
{
    change c = {.chosen = chosen};
    s1f_status status = s1f_transform_begin(schedule, &c.t);
    for (s1f_position at = {0}; status == S1F_OK && s1f_next_unit(schedule, &at);) {
        if (s1f_pass_makes(at.unit.pass, S1F_PRODUCT_INPUT_GRADIENT) && is_chosen(&c, at.unit) &&
            s1f_kind_of_cell(&c.t.shape, at.unit) == S1F_CELL_KEPT)
            status = append(&c, at.unit, S1F_PASS_RECOMPUTE);
        if (status == S1F_OK)
            status = s1f_schedule_append(c.t.out, at.unit);
    }
    return s1f_transform_finish(&c.t, status, out);
}

/* -- moves --------------------------------------------------------------------------------------------------------- */

/* Units from F to the backward, itself included: beside O, away, beside L, and the backward. */
enum { LEAST_DISTANCE = 4 };

static int64_t *forward_of(const change *c, s1f_unit unit)
{
    return &c->forward_at[s1f_cell_of_all(&c->t.shape, unit)];
}

static void find_moved(const change *c)
{
    for (s1f_position at = {0}; s1f_next_unit(c->t.schedule, &at);) {
        int64_t *forward = forward_of(c, at.unit);
        if (s1f_pass_makes(at.unit.pass, S1F_PRODUCT_OUTPUT))
            *forward = at.number;
        if (s1f_pass_makes(at.unit.pass, S1F_PRODUCT_INPUT_GRADIENT) &&
            (!is_chosen(c, at.unit) || at.number - *forward < LEAST_DISTANCE ||
             s1f_cell_has(&c->t.shape, at.unit, S1F_PRODUCT_RECOMPUTED)))
            *forward = 0;
    }
}

static s1f_status write_with_moves(const change *c)
{
    s1f_position before = {0};
    for (s1f_position at = {0}; s1f_next_unit(c->t.schedule, &at); before = at) {
        s1f_position next = at;
        if (s1f_next_unit(c->t.schedule, &next) && s1f_pass_makes(next.unit.pass, S1F_PRODUCT_INPUT_GRADIENT) &&
            next.rank == at.rank && *forward_of(c, next.unit) > 0)
            S1F_TRY(append(c, next.unit, S1F_PASS_LOAD));
        S1F_TRY(s1f_schedule_append(c->t.out, at.unit));
        if (at.number > 1 && *forward_of(c, before.unit) == before.number)
            S1F_TRY(append(c, before.unit, S1F_PASS_AWAY));
        if (*forward_of(c, at.unit) == at.number)
            S1F_TRY(append(c, at.unit, S1F_PASS_OUT));
    }
    return S1F_OK;
}

s1f_status s1f_schedule_offload(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out)
{
    change c = {.chosen = chosen};
    s1f_status status = s1f_transform_begin(schedule, &c.t);
    int64_t num_cells = c.t.shape.num_stages * s1f_num_cells(&c.t.shape);
    if (status == S1F_OK && s1f_shape_makes(&c.t.shape, S1F_PRODUCT_LEAVING))
        status = s1f_fail(S1F_ERR_ARG, "the order moves units already: it has Os, As and Ls of its own");
    if (status == S1F_OK) {
        c.forward_at = s1f_pool_take(&c.t.pool, (size_t)num_cells, sizeof *c.forward_at);
        status = s1f_pool_status(&c.t.pool, "the moves of units");
    }
    if (status == S1F_OK && s1f_shape_has_backward(&c.t.shape))
        find_moved(&c);
    if (status == S1F_OK)
        status = write_with_moves(&c);
    return s1f_transform_finish(&c.t, status, out);
}

/* -- late weight gradients ----------------------------------------------------------------------------------------- */

/* A walk over a rank's order. Each backward becomes I, and its W joins a queue. The oldest W leaves the queue where the
 * rank would else hold more than `most` units, all others at the end. */
typedef struct {
    s1f_transform t;
    s1f_unit *pending;  /* units whose W is due, oldest first */
    int64_t first, end; /* of pending */
    int64_t live;       /* units that hold what their W reads */
    int64_t most;       /* units that may live at once */
    s1f_lifetime_table lifetimes;
} deferral;

/* At the end of a rank no unit is live. */
static int64_t count_most_live(const deferral *d)
{
    int64_t live = 0, most = 0;
    for (s1f_position at = {0}; s1f_next_unit(d->t.schedule, &at);) {
        s1f_lifetimes own = s1f_unit_lifetimes(&d->lifetimes, at.unit);
        live += s1f_begins_to_live(own);
        most = live > most ? live : most;
        live -= s1f_ends_to_live(own);
    }
    return most;
}

static s1f_status append_oldest_weight(deferral *d)
{
    s1f_unit unit = d->pending[d->first++];
    unit.pass = S1F_PASS_BACKWARD_WEIGHT;
    d->live--;
    return s1f_schedule_append(d->t.out, unit);
}

/* Appends the unit, I in place of a backward; W waits in the queue. */
static s1f_status append_or_queue(deferral *d, s1f_unit unit, int32_t rank)
{
    s1f_status status = S1F_OK;
    s1f_lifetimes lifetimes = s1f_unit_lifetimes(&d->lifetimes, unit);
    if (s1f_begins_to_live(lifetimes)) {
        if (d->live >= d->most && d->first == d->end) {
            char text[48];
            s1f_unit_text(unit, 1, text, sizeof text);
            return s1f_fail(S1F_ERR_ARG, "max_live_units is %lld, but rank %d must hold more at %s, whenever W runs",
                            (long long)d->most, (int)rank, text);
        }
        if (d->live >= d->most)
            status = append_oldest_weight(d);
        d->live += !s1f_ends_to_live(lifetimes); /* an order that does not go back holds nothing */
    } else if (s1f_pass_makes(unit.pass, S1F_PRODUCT_AWAY)) {
        d->live--;
    } else if (s1f_pass_makes(unit.pass, S1F_PRODUCT_INPUT_GRADIENT)) {
        unit.pass = S1F_PASS_BACKWARD_INPUT;
        d->pending[d->end++] = unit;
    } else if (s1f_pass_makes(unit.pass, S1F_PRODUCT_WEIGHT_GRADIENT)) {
        return S1F_OK;
    }
    return status == S1F_OK ? s1f_schedule_append(d->t.out, unit) : status;
}

static s1f_status write_deferred(deferral *d)
{
    for (s1f_position at = {0}; s1f_next_unit(d->t.schedule, &at);) {
        while (at.number == 1 && d->first < d->end) /* of the rank before */
            S1F_TRY(append_oldest_weight(d));
        S1F_TRY(append_or_queue(d, at.unit, at.rank));
    }
    while (d->first < d->end)
        S1F_TRY(append_oldest_weight(d));
    return S1F_OK;
}

s1f_status s1f_schedule_defer_weights(const s1f_schedule *schedule, int64_t max_live_units, s1f_schedule **out)
{
    deferral d = {.most = max_live_units};
    s1f_status status = s1f_transform_begin(schedule, &d.t); /* the queue holds each unit once, and each is there */
    if (status == S1F_OK) {
        d.lifetimes = s1f_lifetimes_of(&d.t.shape);
        d.pending =
            s1f_pool_take(&d.t.pool, (size_t)(d.t.shape.num_stages * s1f_num_cells(&d.t.shape)), sizeof *d.pending);
        status = s1f_pool_status(&d.t.pool, "late weight gradients");
    }
    if (status == S1F_OK && max_live_units == 0)
        d.most = count_most_live(&d);
    if (status == S1F_OK)
        status = write_deferred(&d);
    return s1f_transform_finish(&d.t, status, out);
}
