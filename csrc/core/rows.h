/* rows.h - where the keys of each segment lie in the slab of its micro-batch's slot.
 *
 * A segment takes rows with its F, the first gap that is long enough, and gives them back once nothing reads them: with
 * its B or I, and in an order that does not go back with the last F of what follows it. So the segments of a chain lie
 * one after another, and leaves of a tree that go back one by one use the same rows. */
#ifndef S1F_ROWS_H
#define S1F_ROWS_H

#include "status.h"
#include "unit.h"

/* rows: [cell of all stages] the first row of each segment, set for the stages of these units, those of a rank in run
 * order. sizes: [column] tokens. *most: rows that a slot needs at most; at least as it was. The order is a checked one.
 * S1F_ERR_MEMORY. */
s1f_status s1f_assign_rows(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, const int64_t *sizes,
                           int64_t *rows, int64_t *most);

#endif
