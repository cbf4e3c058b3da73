/* step_layout.h - the places of the tokens of a rank's units in a step: their positions along the paths, the rows of
 * their keys, and the parts of units that several siblings share. In a chain a row is a position. */
#ifndef S1F_STEP_LAYOUT_H
#define S1F_STEP_LAYOUT_H

#include "../core/pool.h"
#include "../core/program.h"
#include "../core/table.h"
#include "current_unit.h"

typedef struct {           /* parts of a unit: siblings of a tree that share the unit */
    const int64_t *tokens; /* tokens of each part, all columns one after another */
    const int64_t *first;  /* [column + 1] (s1f_column): the first part of each; a segment of one part may have none */
} s1f_unit_parts;

typedef struct {
    const s1f_shape *shape; /* borrowed, as are the units: those of the rank in run order */
    const s1f_unit *units;
    int64_t num_units;
    int64_t *sizes, *offsets, *totals; /* [column]: tokens, position of the first one, tokens of the micro-batch */
    int64_t *rows;                     /* [cell of all stages] first rows of the rank's segments */
    s1f_key_range *ranges;             /* [num_segments] room for the ranges of a unit */
    s1f_unit_parts parts;              /* first NULL: none; borrowed during the step */
    int32_t is_known;                  /* sizes are set */
} s1f_step_layout;

/* Arrays are the pool's, which may be short afterwards. */
void s1f_layout_create(const s1f_program *program, int32_t rank, s1f_pool *pool, s1f_step_layout *out);
/* Fixes the sizes of a step, [column], whose longest micro-batch has so many tokens. parts: NULL for none;
 * nothing follows a segment of several. *num_rows: that a slot needs. S1F_ERR_ARG names the segment whose tokens do not
 * fit; S1F_ERR_MEMORY. */
s1f_status s1f_layout_set(s1f_step_layout *layout, int64_t sequence_length, const int64_t *sizes,
                          const s1f_unit_parts *parts, int64_t *num_rows);
/* Fills what current->unit has by its segment. Its ranges are valid until the next call. */
void s1f_layout_describe(const s1f_step_layout *layout, s1f_current_unit *current);

/* Tokens of a unit, the position of its first one, and tokens of its micro-batch (0: not known yet). */
static inline int64_t s1f_size_of(const s1f_step_layout *layout, s1f_unit unit)
{
    return layout->sizes[s1f_column(layout->shape, unit)];
}
static inline int64_t s1f_offset_of(const s1f_step_layout *layout, s1f_unit unit)
{
    return layout->offsets[s1f_column(layout->shape, unit)];
}
static inline int64_t s1f_total_of(const s1f_step_layout *layout, s1f_unit unit)
{
    return layout->is_known ? layout->totals[s1f_column(layout->shape, unit)] : 0;
}

#endif
