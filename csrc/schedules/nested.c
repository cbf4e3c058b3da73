/* nested.c - one forward, one backward, over trees: one branch after another.
 *
 * Forwards run parents first and one branch after another, backwards branch after branch and parents last. A rank then
 * holds a path and P - 1 units more, in place of a tree, and of n equal units the makespan is 3 n + 3 (P - 1) as by
 * numbers. */
#include "families.h"

typedef struct {
    const s1f_shape *shape;
    s1f_unit *forwards, *backwards; /* units of one stage, in turn */
    int64_t *number;                /* [cell]: number of its F among the units */
    int64_t num_forwards, num_backwards;
} nested;

/* Appends the units of a tree. By hand in place of a recursion, for a tree may be deep. */
static void walk_tree(nested *n, s1f_unit root)
{
    const s1f_trees *trees = n->shape->trees;
    s1f_unit unit = root;
    for (int goes_down = 1;;) {
        int64_t cell = s1f_cell(n->shape, unit);
        if (goes_down) {
            n->number[cell] = n->num_forwards;
            n->forwards[n->num_forwards++] = unit;
            if (trees->first_child[cell] >= 0) {
                unit.segment = trees->first_child[cell];
                continue;
            }
        }
        n->backwards[n->num_backwards] = unit;
        n->backwards[n->num_backwards++].pass = S1F_PASS_BACKWARD;
        if (trees->parent[cell] < 0)
            return;
        goes_down = trees->next_sibling[cell] >= 0;
        unit.segment = goes_down ? trees->next_sibling[cell] : trees->parent[cell];
    }
}

/* B number i comes after i + ahead forwards. Some B needs so many, as k of a chain does; where fewer are enough at
 * first, a rank that takes one more forward later on makes the others wait. */
static s1f_status append_nested(s1f_schedule *schedule, const nested *n, int64_t warmup)
{
    int64_t ahead = 0, forwards = 0;
    for (int64_t i = 0; i < n->num_backwards; i++) {
        int64_t needed = n->number[s1f_cell(n->shape, n->backwards[i])] + 1 - i;
        ahead = needed > ahead ? needed : ahead;
    }
    for (int64_t i = 0; i < n->num_backwards; i++) {
        while (forwards < n->num_forwards && forwards < i + ahead + warmup)
            S1F_TRY(s1f_schedule_append(schedule, n->forwards[forwards++]));
        S1F_TRY(s1f_schedule_append(schedule, n->backwards[i]));
    }
    return S1F_OK;
}

s1f_status s1f_order_nested(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    s1f_pool pool = {0};
    size_t cells = (size_t)s1f_num_cells(&shape);
    nested n = {.shape = &shape};
    n.forwards = s1f_pool_take(&pool, cells, sizeof *n.forwards);
    n.backwards = s1f_pool_take(&pool, cells, sizeof *n.backwards);
    n.number = s1f_pool_take(&pool, cells, sizeof *n.number);
    s1f_status status = s1f_pool_status(&pool, "an order of trees");
    for (int32_t m = 0; status == S1F_OK && m < shape.num_microbatches; m++)
        walk_tree(&n, (s1f_unit){S1F_PASS_FORWARD, rank, m, 0});
    if (status == S1F_OK)
        status = append_nested(schedule, &n, request->num_ranks - rank - 1 + s1f_extra_warmup(request, rank));
    s1f_pool_free(&pool);
    return status;
}
