/* trees.c - what follows what in a micro-batch. */
#include "trees.h"

#include <string.h>

static s1f_status check_parents(const s1f_shape *shape, const int32_t *parents)
{
    for (int64_t cell = 0; cell < s1f_num_cells(shape); cell++) {
        s1f_unit unit = s1f_unit_of_cell(shape, S1F_PASS_FORWARD, 0, cell);
        if (unit.segment == 0 ? parents[cell] == -1 : parents[cell] >= 0 && parents[cell] < unit.segment)
            continue;
        if (unit.segment == 0)
            return s1f_fail(S1F_ERR_ARG,
                            "parents of micro-batch %d: segment 0 is the root and follows none, its parent is -1, not "
                            "%d",
                            (int)unit.microbatch, (int)parents[cell]);
        if (parents[cell] == -1)
            return s1f_fail(S1F_ERR_ARG,
                            "parents of micro-batch %d: segment %d follows none, so the tree has two roots; make it a "
                            "micro-batch of its own",
                            (int)unit.microbatch, (int)unit.segment);
        return s1f_fail(S1F_ERR_ARG,
                        "parents of micro-batch %d: segment %d follows segment %d, must follow one of 0..%d: a parent "
                        "comes before its children",
                        (int)unit.microbatch, (int)unit.segment, (int)parents[cell], (int)unit.segment - 1);
    }
    return S1F_OK;
}

s1f_status s1f_trees_create(const s1f_shape *shape, const int32_t *parents, s1f_pool *pool, s1f_trees *out)
{
    S1F_TRY(check_parents(shape, parents));
    int64_t count = s1f_num_cells(shape);
    int32_t *parent = s1f_pool_take(pool, 3 * (size_t)count, sizeof *parent);
    S1F_TRY(s1f_pool_status(pool, "the trees of an order"));
    int32_t *child = parent + count, *sibling = child + count;
    memcpy(parent, parents, (size_t)count * sizeof *parent);
    memset(child, -1, 2 * (size_t)count * sizeof *child);
    for (int64_t cell = count - 1; cell >= 0; cell--) { /* descends, so that children ascend in their list */
        int32_t segment = s1f_unit_of_cell(shape, S1F_PASS_FORWARD, 0, cell).segment;
        int64_t above = cell - segment + parents[cell];
        if (parents[cell] < 0)
            continue;
        sibling[cell] = child[above];
        child[above] = segment;
    }
    *out = (s1f_trees){parent, child, sibling};
    return S1F_OK;
}

/* is_open: something of the cell's tree below it, or itself, has gone back. */
void s1f_trees_mark(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, unsigned char *is_open,
                    uint16_t *marks)
{
    for (int64_t i = num_units - 1; i >= 0; i--) { /* is_open of the root: its last forward has been met */
        s1f_unit root = units[i];
        root.segment = 0;
        if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_OUTPUT) && !is_open[s1f_cell_of_all(shape, root)]) {
            is_open[s1f_cell_of_all(shape, root)] = 1;
            marks[s1f_cell_of_all(shape, units[i])] |= S1F_MARK_LAST_FORWARD;
        }
    }
    for (int64_t i = 0; i < num_units; i++)
        is_open[s1f_cell_of_all(shape, (s1f_unit){0, units[i].stage, units[i].microbatch, 0})] = 0;
    for (int64_t i = 0; i < num_units; i++) {
        s1f_unit unit = units[i];
        if (!s1f_pass_makes(unit.pass, S1F_PRODUCT_INPUT_GRADIENT) || is_open[s1f_cell_of_all(shape, unit)])
            continue;
        int64_t cell = s1f_cell_of_all(shape, unit);
        is_open[cell] = 1;
        while ((unit.segment = s1f_parent_of(shape, unit)) >= 0 && !is_open[s1f_cell_of_all(shape, unit)]) {
            marks[cell] |= S1F_MARK_OPENS_PARENT;
            cell = s1f_cell_of_all(shape, unit);
            is_open[cell] = 1;
        }
        if (unit.segment < 0) /* the climb came through the root */
            marks[s1f_cell_of_all(shape, units[i])] |= S1F_MARK_FIRST_BACKWARD;
    }
}
