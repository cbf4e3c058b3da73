/* key_ranges.c - keeps the live segments of each micro-batch in the order of their rows, and follows a path. */
#include "key_ranges.h"

#include "pool.h"
#include "table.h"

#include <string.h>

typedef struct {
    const s1f_shape *shape;
    const int64_t *sizes;
    int64_t *rows, *most;
    /* [cell of all stages]: */
    int32_t *live;     /* segments of a micro-batch that have rows, in their order; the first num_live[.] are set */
    int32_t *waiting;  /* of a segment: children that are not through, in an order that does not go back */
    int32_t *num_live; /* [stage][micro-batch] */
} assignment;

static int64_t cell_at(const assignment *a, s1f_unit unit, int32_t segment)
{
    unit.segment = segment;
    return s1f_cell_of_all(a->shape, unit);
}

static int64_t size_of(const assignment *a, s1f_unit unit, int32_t segment)
{
    unit.segment = segment;
    return a->sizes[s1f_column(a->shape, unit)];
}

static int32_t *count_of(const assignment *a, s1f_unit unit)
{
    return &a->num_live[(int64_t)unit.stage * a->shape->num_microbatches + unit.microbatch];
}

static void take(const assignment *a, s1f_unit unit)
{
    int32_t *live = a->live + cell_at(a, unit, 0), *count = count_of(a, unit), place = 0;
    int64_t begin = 0, size = size_of(a, unit, unit.segment);
    while (place < *count && a->rows[cell_at(a, unit, live[place])] - begin < size) {
        begin = a->rows[cell_at(a, unit, live[place])] + size_of(a, unit, live[place]);
        place++;
    }
    memmove(live + place + 1, live + place, (size_t)(*count - place) * sizeof *live);
    live[place] = unit.segment;
    ++*count;
    a->rows[cell_at(a, unit, unit.segment)] = begin;
    *a->most = begin + size > *a->most ? begin + size : *a->most;
}

static void give_back(const assignment *a, s1f_unit unit, int32_t segment)
{
    int32_t *live = a->live + cell_at(a, unit, 0), *count = count_of(a, unit), place = 0;
    while (live[place] != segment)
        place++;
    --*count;
    memmove(live + place, live + place + 1, (size_t)(*count - place) * sizeof *live);
}

/* The F of a unit is the last that reads its rows where nothing follows it, and so may be for those above it. */
static void leave(const assignment *a, s1f_unit unit)
{
    a->waiting[cell_at(a, unit, unit.segment)] += s1f_num_children(a->shape, unit);
    while (unit.segment >= 0 && a->waiting[cell_at(a, unit, unit.segment)] == 0) {
        give_back(a, unit, unit.segment);
        unit.segment = s1f_parent_of(a->shape, unit);
        if (unit.segment >= 0)
            a->waiting[cell_at(a, unit, unit.segment)]--;
    }
}

s1f_status s1f_assign_rows(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, const int64_t *sizes,
                           int64_t *rows, int64_t *most)
{
    s1f_pool pool = {0};
    size_t cells = (size_t)(shape->num_stages * s1f_num_cells(shape));
    assignment a = {.shape = shape, .sizes = sizes, .rows = rows, .most = most};
    a.live = s1f_pool_take(&pool, cells, sizeof *a.live);
    a.waiting = s1f_pool_take(&pool, cells, sizeof *a.waiting);
    a.num_live = s1f_pool_take(&pool, (size_t)shape->num_stages * (size_t)shape->num_microbatches, sizeof *a.num_live);
    for (int64_t i = 0; i < num_units && !pool.is_short; i++) {
        if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_OUTPUT)) {
            take(&a, units[i]);
            if (!s1f_shape_has_backward(shape))
                leave(&a, units[i]);
        } else if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_INPUT_GRADIENT)) {
            give_back(&a, units[i], units[i].segment);
        }
    }
    s1f_status status =
        pool.is_short ? s1f_fail(S1F_ERR_MEMORY, "no memory for the rows of %zu segments", cells) : S1F_OK;
    s1f_pool_free(&pool);
    return status;
}

s1f_key_range *s1f_key_ranges_of(const s1f_shape *shape, s1f_unit unit, const int64_t *rows, const int64_t *offsets,
                                 const int64_t *sizes, s1f_key_range *end)
{
    s1f_key_range *range = end;
    for (; unit.segment >= 0; unit.segment = s1f_parent_of(shape, unit)) {
        int64_t column = s1f_column(shape, unit), row = rows[s1f_cell_of_all(shape, unit)];
        if (range < end && row + sizes[column] == range->row)
            *range = (s1f_key_range){offsets[column], range->end, row};
        else
            *--range = (s1f_key_range){offsets[column], offsets[column] + sizes[column], row};
    }
    return range;
}
