/* trees.h - micro-batches whose segments are trees: made from parents, copied, and how an order goes through them.
 *
 * Segment 0 is the root; every other segment follows its parent, whose number is lower. So forwards in the order of
 * numbers and backwards in the reverse obey every rule, and each builder of chains builds for trees. */
#ifndef S1F_TREES_H
#define S1F_TREES_H

#include "pool.h"
#include "unit.h"

/* parents: [cell of a stage], of a shape with first_cell. S1F_ERR_ARG names the micro-batch and the segment that has no
 * parent before it. *out is the pool's. */
s1f_status s1f_trees_create(const s1f_shape *shape, const int32_t *parents, s1f_pool *pool, s1f_trees *out);

/* Sets the marks of trees in marks[cell of all stages], from the units of the ranks in turn. is_open: as many zeros,
 * for all ranks. */
void s1f_trees_mark(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, unsigned char *is_open,
                    uint16_t *marks);

#endif
