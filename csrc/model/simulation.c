/* simulation.c - memory of what a simulation tells. */
#include "simulate.h"

#include <stdlib.h>

/* Rows of all ranks, one after another in memory that begins at `block`. */
static void *rows_of(s1f_simulation *simulation, const s1f_program *program, void *block, size_t bytes)
{
    char **rows = s1f_pool_take(&simulation->pool, (size_t)simulation->num_ranks, sizeof *rows), *row = block;
    for (int32_t rank = 0; rows != NULL && row != NULL && rank < simulation->num_ranks; rank++) {
        rows[rank] = row;
        row += (size_t)program->ranks[rank].num_units * bytes;
    }
    return rows;
}

void s1f_simulation_free(s1f_simulation *simulation)
{
    if (simulation == NULL)
        return;
    s1f_pool_free(&simulation->pool);
    free(simulation->times);
    free(simulation);
}

/* All times lie in one block: malloc gives large blocks back to the system, and the next simulation would have each
 * page cleared anew. */
s1f_status s1f_simulation_create(const s1f_program *program, int with_causes, s1f_simulation **out)
{
    size_t num_ranks = (size_t)program->shape.num_ranks, total = 0;
    size_t num_kept = with_causes ? 3 : 2;
    s1f_simulation *made = calloc(1, sizeof *made);
    if (made == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %zu ranks", num_ranks);
    for (size_t rank = 0; rank < num_ranks; rank++)
        total += (size_t)program->ranks[rank].num_units;
    made->num_ranks = program->shape.num_ranks;
    made->span = s1f_pool_take(&made->pool, num_ranks, sizeof *made->span);
    made->busy = s1f_pool_take(&made->pool, num_ranks, sizeof *made->busy);
    made->wait = s1f_pool_take(&made->pool, num_ranks, sizeof *made->wait);
    made->times = malloc(num_kept * total * sizeof *made->times);
    if (made->times != NULL) {
        made->start = rows_of(made, program, made->times, sizeof *made->times);
        made->end = rows_of(made, program, made->times + total, sizeof *made->times);
    }
    if (made->times != NULL && with_causes) {
        made->slack = rows_of(made, program, made->times + 2 * total, sizeof *made->times);
        made->causes = rows_of(made, program, s1f_pool_take(&made->pool, total, 1), 1);
        made->completed = s1f_pool_take(&made->pool, total, sizeof *made->completed);
    }
    if (made->pool.is_short || made->times == NULL) {
        s1f_simulation_free(made);
        return s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %zu ranks", num_ranks);
    }
    *out = made;
    return S1F_OK;
}
