/* offload.c - copies an order, with Os, As and Ls. */
#include "offload.h"

#include "transform.h"

#include <stdlib.h>

/* Units from F to the backward, itself included: beside O, away, beside L, and the backward. */
enum { LEAST_DISTANCE = 4 };

typedef struct {
    const s1f_shape *shape;
    const unsigned char *chosen;
    int64_t *forward_at; /* [cell of all stages]: number of its F on its rank, negative where it stays */
    s1f_schedule *out;
} copier;

static s1f_status append(const copier *c, s1f_unit unit, s1f_pass pass)
{
    unit.pass = pass;
    return s1f_schedule_append(c->out, unit);
}

static int64_t *forward_of(const copier *c, s1f_unit unit)
{
    return &c->forward_at[s1f_cell_of_all(c->shape, unit)];
}

static void find_moved(const copier *c, const s1f_unit *units, int64_t num_units)
{
    for (int64_t i = 0; i < num_units; i++) {
        int64_t *forward = forward_of(c, units[i]), cell = forward - c->forward_at;
        if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_OUTPUT))
            *forward = -1 - i;
        if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_INPUT_GRADIENT) && (c->chosen == NULL || c->chosen[cell]) &&
            i - (-1 - *forward) >= LEAST_DISTANCE && !s1f_cell_has(c->shape, units[i], S1F_PRODUCT_RECOMPUTED))
            *forward = -1 - *forward;
    }
}

static s1f_status copy_rank(const copier *c, const s1f_unit *units, int64_t num_units)
{
    for (int64_t i = 0; i < num_units; i++) {
        if (i + 1 < num_units && s1f_pass_makes(units[i + 1].pass, S1F_PRODUCT_INPUT_GRADIENT) &&
            *forward_of(c, units[i + 1]) >= 0)
            S1F_TRY(append(c, units[i + 1], S1F_PASS_LOAD));
        S1F_TRY(s1f_schedule_append(c->out, units[i]));
        if (i > 0 && *forward_of(c, units[i - 1]) == i - 1)
            S1F_TRY(append(c, units[i - 1], S1F_PASS_AWAY));
        if (*forward_of(c, units[i]) == i)
            S1F_TRY(append(c, units[i], S1F_PASS_OUT));
    }
    return S1F_OK;
}

static s1f_status copy_with(const s1f_schedule *schedule, const copier *c)
{
    s1f_status status = S1F_OK;
    for (int32_t rank = 0; rank < c->shape->num_ranks && status == S1F_OK; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        find_moved(c, units, num_units);
        status = copy_rank(c, units, num_units);
    }
    return status;
}

s1f_status s1f_schedule_offload(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out)
{
    s1f_transform t;
    s1f_status status = s1f_transform_begin(schedule, &t);
    copier c = {.shape = &t.shape, .chosen = chosen, .out = t.out};
    int64_t num_cells = t.shape.num_stages * s1f_num_cells(&t.shape);
    if (status == S1F_OK && s1f_shape_makes(&t.shape, S1F_PRODUCT_LEAVING))
        status = s1f_fail(S1F_ERR_ARG, "the order moves units already: it has Os, As and Ls of its own");
    if (status == S1F_OK && (c.forward_at = malloc((size_t)num_cells * sizeof *c.forward_at)) == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to move %lld units", (long long)num_cells);
    for (int64_t i = 0; status == S1F_OK && i < num_cells; i++)
        c.forward_at[i] = -1;
    if (status == S1F_OK)
        status = copy_with(schedule, &c);
    free(c.forward_at);
    return s1f_transform_finish(&t, status, out);
}
