/* simulation.c - memory of what a simulation tells. */
#include "simulation.h"

#include <stdlib.h>

/* Rows of all ranks, one after another in memory that begins at `block`; NULL: no memory. */
static void *rows_of(const s1f_simulation *simulation, void *block, size_t bytes)
{
    char **rows = block == NULL ? NULL : calloc((size_t)simulation->num_ranks, sizeof *rows), *row = block;
    for (int32_t rank = 0; rows != NULL && rank < simulation->num_ranks; rank++) {
        rows[rank] = row;
        row += (size_t)simulation->num_units[rank] * bytes;
    }
    return rows;
}

void s1f_simulation_free(s1f_simulation *simulation)
{
    if (simulation == NULL)
        return;
    free(simulation->times);
    free(simulation->all_causes);
    free(simulation->start);
    free(simulation->end);
    free(simulation->slack);
    free(simulation->causes);
    free(simulation->path);
    free(simulation->completed);
    free(simulation->num_units);
    free(simulation->wait);
    free(simulation->busy);
    free(simulation->span);
    free(simulation);
}

/* All times lie in one block: malloc gives large blocks back to the system, and the next simulation would have each
 * page cleared anew. */
static int create_timeline(s1f_simulation *simulation, s1f_keep keep)
{
    int64_t total = 0;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++)
        total += simulation->num_units[rank];
    double *times = simulation->times = malloc((keep >= S1F_KEEP_CAUSES ? 3 : 2) * (size_t)total * sizeof *times);
    simulation->start = rows_of(simulation, times, sizeof *times);
    simulation->end = rows_of(simulation, times == NULL ? NULL : times + total, sizeof *times);
    if (keep < S1F_KEEP_CAUSES || times == NULL)
        return simulation->start != NULL && simulation->end != NULL;
    simulation->all_causes = malloc((size_t)total);
    simulation->causes = rows_of(simulation, simulation->all_causes, 1);
    simulation->slack = rows_of(simulation, times + 2 * total, sizeof *times);
    simulation->completed = malloc((size_t)total * sizeof *simulation->completed);
    return simulation->start != NULL && simulation->end != NULL && simulation->causes != NULL &&
           simulation->slack != NULL && simulation->completed != NULL;
}

s1f_status s1f_simulation_create(const s1f_program *program, s1f_keep keep, s1f_simulation **out)
{
    s1f_simulation *simulation = calloc(1, sizeof *simulation);
    size_t num_ranks = (size_t)program->shape.num_ranks;
    if (simulation == NULL)
        goto no_memory;
    simulation->num_ranks = program->shape.num_ranks;
    simulation->span = calloc(num_ranks, sizeof *simulation->span);
    simulation->busy = calloc(num_ranks, sizeof *simulation->busy);
    simulation->wait = calloc(num_ranks, sizeof *simulation->wait);
    simulation->num_units = calloc(num_ranks, sizeof *simulation->num_units);
    if (!simulation->span || !simulation->busy || !simulation->wait || !simulation->num_units)
        goto no_memory;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++)
        simulation->num_units[rank] = program->ranks[rank].num_units;
    if (keep >= S1F_KEEP_TIMELINE && !create_timeline(simulation, keep))
        goto no_memory;
    *out = simulation;
    return S1F_OK;

no_memory:
    s1f_simulation_free(simulation);
    return s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %zu ranks", num_ranks);
}
