/* table.h - values that a caller gives per rank, stage, segment or cell, and where the one of a unit lies.
 *
 * In C they are flat, stage after stage, each with its columns. A column is a segment where all micro-batches are
 * alike; in an order of rows it is a cell of the stage, for then each micro-batch has lengths of its own. */
#ifndef S1F_TABLE_H
#define S1F_TABLE_H

#include "status.h"
#include "unit.h"

static inline int64_t s1f_column(const s1f_shape *shape, s1f_unit unit)
{
    return shape->first_cell == NULL ? unit.segment : s1f_cell(shape, unit);
}
static inline int64_t s1f_num_columns(const s1f_shape *shape)
{
    return shape->first_cell == NULL ? shape->num_segments : s1f_num_cells(shape);
}
/* Number of a unit's value among those of all stages. */
static inline int64_t s1f_column_of_all(const s1f_shape *shape, s1f_unit unit)
{
    return unit.stage * s1f_num_columns(shape) + s1f_column(shape, unit);
}

/* How many values there are. */
int64_t s1f_table_count(const s1f_shape *shape, s1f_per per);

/* S1F_ERR_ARG unless all of them, none where NULL, are finite and at least 0. what: "the latency of a transfer is". */
s1f_status s1f_require_seconds(const char *what, const double *seconds, int64_t count);

/* S1F_ERR_ARG unless all of them, none where NULL, are in 0..most. */
s1f_status s1f_require_bytes(const char *name, const int64_t *bytes, int64_t count, int64_t most);

/* Seconds of passes, each [stage][column], that stand in for those not given: W is half of B, I the rest of it, R as F;
 * a pass that is neither stays as it is. given: their bits. S1F_ERR_ARG: W is more than B. */
s1f_status s1f_table_fill_in(double *const passes[], uint32_t given, int64_t count);

#endif
