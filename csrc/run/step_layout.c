/* step_layout.c - positions, rows and parts of a step's segments, and of one unit. */
#include "step_layout.h"

#include "../core/key_ranges.h"

void s1f_layout_create(const s1f_program *program, int32_t rank, s1f_pool *pool, s1f_step_layout *out)
{
    const s1f_shape *shape = &program->shape;
    size_t num_columns = (size_t)s1f_num_columns(shape);
    *out = (s1f_step_layout){
        .shape = shape, .units = program->ranks[rank].units, .num_units = program->ranks[rank].num_units};
    out->sizes = s1f_pool_take(pool, num_columns, sizeof *out->sizes);
    out->offsets = s1f_pool_take(pool, num_columns, sizeof *out->offsets);
    out->totals = s1f_pool_take(pool, num_columns, sizeof *out->totals);
    out->ranges = s1f_pool_take(pool, (size_t)shape->num_segments, sizeof *out->ranges);
    out->rows = s1f_pool_take(pool, (size_t)(shape->num_stages * s1f_num_cells(shape)), sizeof *out->rows);
}

/* The parts of a unit, NULL for one. */
static const int64_t *parts_of(const s1f_step_layout *layout, s1f_unit unit, int32_t *count)
{
    int64_t column = s1f_column(layout->shape, unit);
    *count = 1;
    if (layout->parts.first == NULL || layout->parts.first[column + 1] - layout->parts.first[column] < 2)
        return NULL;
    *count = (int32_t)(layout->parts.first[column + 1] - layout->parts.first[column]);
    return layout->parts.tokens + layout->parts.first[column];
}

/* Sets the segment's size and position; with the last one of a micro-batch of `total` tokens so far, that number. */
static void set_column(s1f_step_layout *layout, s1f_unit unit, int64_t size, int64_t total)
{
    int64_t column = s1f_column(layout->shape, unit), first = column - unit.segment;
    int32_t parent = s1f_parent_of(layout->shape, unit);
    layout->sizes[column] = size;
    layout->offsets[column] = parent < 0 ? 0 : layout->offsets[first + parent] + layout->sizes[first + parent];
    if (unit.segment + 1 == s1f_segments_of(layout->shape, unit.microbatch))
        for (int64_t i = first; i <= column; i++)
            layout->totals[i] = total;
}

s1f_status s1f_layout_set(s1f_step_layout *layout, int64_t sequence_length, const int64_t *sizes,
                          const s1f_unit_parts *parts, int64_t *num_rows)
{
    const s1f_shape *shape = layout->shape;
    int64_t sum = 0, longest = 0;
    layout->parts = parts == NULL ? (s1f_unit_parts){NULL, NULL} : *parts;
    for (int64_t column = 0; column < s1f_num_columns(shape); column++) {
        s1f_unit unit = s1f_unit_of_cell(shape, S1F_PASS_FORWARD, 0, column);
        if (sizes[column] < 1)
            return s1f_fail(S1F_ERR_ARG, "segment %d has %lld tokens, must have at least 1", (int)unit.segment,
                            (long long)sizes[column]);
        sum = unit.segment == 0 ? sizes[column] : sum + sizes[column];
        longest = sum > longest ? sum : longest;
        set_column(layout, unit, sizes[column], sum);
    }
    if (longest != sequence_length)
        return s1f_fail(S1F_ERR_ARG, "segment sizes sum to %lld tokens, the sequence has %lld", (long long)longest,
                        (long long)sequence_length);
    *num_rows = 1;
    S1F_TRY(s1f_assign_rows(shape, layout->units, layout->num_units, sizes, layout->rows, num_rows));
    layout->is_known = 1;
    return S1F_OK;
}

void s1f_layout_describe(const s1f_step_layout *layout, s1f_current_unit *current)
{
    const s1f_shape *shape = layout->shape;
    s1f_unit unit = current->unit;
    current->num_segments = s1f_segments_of(shape, unit.microbatch);
    current->parent = s1f_parent_of(shape, unit);
    current->num_children = s1f_num_children(shape, unit);
    current->offset = s1f_offset_of(layout, unit);
    current->length = s1f_size_of(layout, unit);
    current->sequence_length = s1f_total_of(layout, unit);
    current->parts = parts_of(layout, unit, &current->num_parts);
    current->row = layout->rows[s1f_cell_of_all(shape, unit)];
    s1f_key_range *end = layout->ranges + shape->num_segments;
    current->ranges = s1f_key_ranges_of(shape, unit, layout->rows, layout->offsets, layout->sizes, end);
    current->num_ranges = (int32_t)(end - current->ranges);
}
