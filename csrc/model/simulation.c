/* simulation.c - memory of what a simulation tells. */
#include "simulation.h"

#include <stdlib.h>

static void free_rows(void *rows, int32_t num_rows)
{
    void **row = rows;
    for (int32_t i = 0; row != NULL && i < num_rows; i++)
        free(row[i]);
    free(row);
}

void s1f_simulation_free(s1f_simulation *simulation)
{
    if (simulation == NULL)
        return;
    free_rows(simulation->start, 1);
    free(simulation->end);
    free_rows(simulation->causes, 1);
    free_rows(simulation->slack, simulation->num_ranks);
    free(simulation->path);
    free(simulation->completed);
    free(simulation->num_units);
    free(simulation->wait);
    free(simulation->busy);
    free(simulation->span);
    free(simulation);
}

/* All rows of a table lie in one block, which their first row begins: malloc gives large blocks back to the system, and
 * the next simulation would have each page cleared anew. */
static int create_timeline(s1f_simulation *simulation, s1f_keep keep)
{
    size_t num_ranks = (size_t)simulation->num_ranks;
    int64_t total = 0;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++)
        total += simulation->num_units[rank];
    simulation->start = calloc(num_ranks, sizeof *simulation->start);
    simulation->end = calloc(num_ranks, sizeof *simulation->end);
    if (simulation->start == NULL || simulation->end == NULL ||
        (simulation->start[0] = malloc(2 * (size_t)total * sizeof **simulation->start)) == NULL)
        return 0;
    if (keep >= S1F_KEEP_CAUSES && ((simulation->causes = calloc(num_ranks, sizeof *simulation->causes)) == NULL ||
                                    (simulation->causes[0] = malloc((size_t)total)) == NULL))
        return 0;
    simulation->end[0] = simulation->start[0] + total;
    for (int32_t rank = 1; rank < simulation->num_ranks; rank++) {
        int64_t before = simulation->num_units[rank - 1];
        simulation->start[rank] = simulation->start[rank - 1] + before;
        simulation->end[rank] = simulation->end[rank - 1] + before;
        if (simulation->causes != NULL)
            simulation->causes[rank] = simulation->causes[rank - 1] + before;
    }
    return keep < S1F_KEEP_CAUSES ||
           (simulation->completed = malloc((size_t)total * sizeof *simulation->completed)) != NULL;
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
