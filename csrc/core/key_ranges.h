/* key_ranges.h - where the keys lie to which a unit attends: a list of ranges along its path, in a chain a single one.
 *
 * A segment takes rows in the slab of its micro-batch's slot with its F, the first gap that is long enough, and gives
 * them back once nothing reads them: with its B or I, and in an order that does not go back with the last F of what
 * follows it. So the segments of a chain lie one after another, and leaves of a tree that go back one by one use the
 * same rows. */
#ifndef S1F_KEY_RANGES_H
#define S1F_KEY_RANGES_H

#include "status.h"
#include "unit.h"

/* Keys that follow one another along a path, and lie in rows that do, too. */
typedef struct {
    int64_t begin, end; /* keys, counted along the path */
    int64_t row;        /* of the first key; the other keys lie in the rows after it */
} s1f_key_range;

/* rows: [cell of all stages] the first row of each segment, set for the stages of these units, those of a rank in run
 * order. sizes: [column] tokens. *most: rows that a slot needs at most; at least as it was. The order is a checked one.
 * S1F_ERR_MEMORY. */
s1f_status s1f_assign_rows(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, const int64_t *sizes,
                           int64_t *rows, int64_t *most);

/* The ranges of a unit: the keys of all segments of its path, its own in the last. offsets: [column] the position of
 * each segment's first token along its path. Written up to `end`, which has room for num_segments before it; returns
 * the first. */
s1f_key_range *s1f_key_ranges_of(const s1f_shape *shape, s1f_unit unit, const int64_t *rows, const int64_t *offsets,
                                 const int64_t *sizes, s1f_key_range *end);

#endif
