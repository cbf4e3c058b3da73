/* key_ranges.c - keeps the live segments of each micro-batch in the order of their rows, and follows a path. */
#include "key_ranges.h"

#include "pool.h"
#include "table.h"

#include <string.h>

typedef struct {       /* of a micro-batch at a stage: [segment] */
    int32_t *live;     /* segments that have rows, in their order; the first *num_live are set */
    int32_t *waiting;  /* children that are not through, in an order that does not go back */
    int32_t *num_live; /* one number */
    int64_t *rows;
    const int64_t *sizes;
} slot;

static void take(slot s, int32_t segment, int64_t *most)
{
    int32_t place = 0;
    int64_t begin = 0, size = s.sizes[segment];
    while (place < *s.num_live && s.rows[s.live[place]] - begin < size) {
        begin = s.rows[s.live[place]] + s.sizes[s.live[place]];
        place++;
    }
    memmove(s.live + place + 1, s.live + place, (size_t)(*s.num_live - place) * sizeof *s.live);
    s.live[place] = segment;
    ++*s.num_live;
    s.rows[segment] = begin;
    *most = begin + size > *most ? begin + size : *most;
}

static void give_back(slot s, int32_t segment)
{
    int32_t place = 0;
    while (s.live[place] != segment)
        place++;
    --*s.num_live;
    memmove(s.live + place, s.live + place + 1, (size_t)(*s.num_live - place) * sizeof *s.live);
}

/* The F of a unit is the last that reads its rows where nothing follows it, and so may be for those above it. */
static void leave(const s1f_shape *shape, slot s, s1f_unit unit)
{
    s.waiting[unit.segment] += s1f_num_children(shape, unit);
    while (unit.segment >= 0 && s.waiting[unit.segment] == 0) {
        give_back(s, unit.segment);
        unit.segment = s1f_parent_of(shape, unit);
        if (unit.segment >= 0)
            s.waiting[unit.segment]--;
    }
}

s1f_status s1f_assign_rows(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, const int64_t *sizes,
                           int64_t *rows, int64_t *most)
{
    s1f_pool pool = {0};
    size_t cells = (size_t)(shape->num_stages * s1f_num_cells(shape));
    int32_t *live = s1f_pool_take(&pool, cells, sizeof *live);
    int32_t *waiting = s1f_pool_take(&pool, cells, sizeof *waiting);
    int32_t *num_live = s1f_pool_take(&pool, cells, sizeof *num_live); /* at the first segment of a micro-batch */
    for (int64_t i = 0; i < num_units && !pool.is_short; i++) {
        s1f_unit first = {units[i].pass, units[i].stage, units[i].microbatch, 0};
        int64_t cell = s1f_cell_of_all(shape, first);
        slot s = {live + cell, waiting + cell, num_live + cell, rows + cell, sizes + s1f_column(shape, first)};
        if (s1f_pass_makes(first.pass, S1F_PRODUCT_OUTPUT)) {
            take(s, units[i].segment, most);
            if (!s1f_shape_has_backward(shape))
                leave(shape, s, units[i]);
        } else if (s1f_pass_makes(first.pass, S1F_PRODUCT_INPUT_GRADIENT)) {
            give_back(s, units[i].segment);
        }
    }
    s1f_status status = s1f_pool_status(&pool, "the rows of segments");
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
