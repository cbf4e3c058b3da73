/* defer.c - walks each rank's order once, and lets a queue of weight gradients follow it. */
#include "defer.h"

#include "transform.h"

#include <stdlib.h>

typedef struct {
    s1f_schedule *schedule; /* that is made */
    s1f_unit *pending;      /* units whose W is due, oldest first */
    int64_t first, end;     /* of pending */
    int64_t live;           /* units that hold what their W reads */
    s1f_lifetime_table lifetimes;
} deferral;

static int64_t most_live(const s1f_lifetime_table *lifetimes, const s1f_unit *units, int64_t num_units)
{
    int64_t live = 0, most = 0;
    for (int64_t i = 0; i < num_units; i++) {
        s1f_lifetimes own = s1f_unit_lifetimes(lifetimes, units[i]);
        live += s1f_begins_to_live(own);
        most = live > most ? live : most;
        live -= s1f_ends_to_live(own);
    }
    return most;
}

static s1f_status append_oldest(deferral *d)
{
    s1f_unit unit = d->pending[d->first++];
    unit.pass = S1F_PASS_BACKWARD_WEIGHT;
    d->live--;
    return s1f_schedule_append(d->schedule, unit);
}

/* Appends the unit, I in place of a backward; W waits in the queue. */
static s1f_status append_or_queue(deferral *d, s1f_unit unit, int32_t rank, int64_t most)
{
    s1f_status status = S1F_OK;
    s1f_lifetimes lifetimes = s1f_unit_lifetimes(&d->lifetimes, unit);
    if (s1f_begins_to_live(lifetimes)) {
        if (d->live >= most && d->first == d->end) {
            char text[48];
            s1f_unit_text(unit, 1, text, sizeof text);
            return s1f_fail(S1F_ERR_ARG, "max_live_units is %lld, but rank %d must hold more at %s, whenever W runs",
                            (long long)most, (int)rank, text);
        }
        if (d->live >= most)
            status = append_oldest(d);
        d->live += !s1f_ends_to_live(lifetimes); /* an order that does not go back holds nothing */
    } else if (s1f_pass_makes(unit.pass, S1F_PRODUCT_AWAY)) {
        d->live--;
    } else if (s1f_pass_makes(unit.pass, S1F_PRODUCT_INPUT_GRADIENT)) {
        unit.pass = S1F_PASS_BACKWARD_INPUT;
        d->pending[d->end++] = unit;
    } else if (s1f_pass_makes(unit.pass, S1F_PRODUCT_WEIGHT_GRADIENT)) {
        return S1F_OK;
    }
    return status == S1F_OK ? s1f_schedule_append(d->schedule, unit) : status;
}

static s1f_status defer(const s1f_schedule *schedule, deferral *d, int64_t most)
{
    for (int32_t rank = 0; rank < s1f_schedule_shape(schedule).num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        s1f_status status = S1F_OK;
        d->first = d->end = d->live = 0;
        for (int64_t i = 0; i < num_units && status == S1F_OK; i++)
            status = append_or_queue(d, units[i], rank, most);
        while (d->first < d->end && status == S1F_OK)
            status = append_oldest(d);
        if (status != S1F_OK)
            return status;
    }
    return S1F_OK;
}

s1f_status s1f_schedule_defer_weights(const s1f_schedule *schedule, int64_t max_live_units, s1f_schedule **out)
{
    s1f_transform t; /* of a checked order: the queue holds each unit once, and each is there */
    s1f_status status = s1f_transform_begin(schedule, &t);
    deferral d = {.schedule = t.out, .lifetimes = s1f_lifetimes_of(&t.shape)};
    int64_t most = max_live_units, cells = t.shape.num_stages * s1f_num_cells(&t.shape);
    if (status == S1F_OK && (d.pending = malloc((size_t)cells * sizeof *d.pending)) == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to defer the weight gradients of %lld units", (long long)cells);
    for (int32_t rank = 0; status == S1F_OK && rank < t.shape.num_ranks && max_live_units == 0; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        int64_t own = most_live(&d.lifetimes, units, num_units);
        most = own > most ? own : most;
    }
    if (status == S1F_OK)
        status = defer(schedule, &d, most);
    free(d.pending);
    return s1f_transform_finish(&t, status, out);
}

s1f_status s1f_find_late_weights(const s1f_shape *shape, const s1f_unit *units, int64_t num_units,
                                 s1f_late_weight **out, int64_t *count)
{
    int64_t cells = s1f_num_cells(shape);
    int64_t *ready = malloc((size_t)(shape->num_stages * cells) * sizeof *ready);
    s1f_late_weight *weights = malloc(((size_t)num_units + 1) * sizeof *weights);
    if (ready == NULL || weights == NULL) {
        free(ready);
        free(weights);
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the weight gradients of %lld units", (long long)num_units);
    }
    *count = 0;
    for (int64_t i = 0; i < num_units; i++) {
        int64_t cell = units[i].stage * cells + s1f_cell(shape, units[i]);
        int makes_input = s1f_pass_makes(units[i].pass, S1F_PRODUCT_INPUT_GRADIENT);
        if (makes_input)
            ready[cell] = i;
        else if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_WEIGHT_GRADIENT))
            weights[(*count)++] = (s1f_late_weight){ready[cell], i};
    }
    free(ready);
    *out = weights;
    return S1F_OK;
}
