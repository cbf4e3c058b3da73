/* walk.c - what every walk has. */
#include "walk.h"

#include <stdlib.h>

s1f_status s1f_walk_create(const s1f_edges *edges, const s1f_shape *shape, s1f_walk *walk)
{
    int32_t num_ranks = shape->num_ranks;
    *walk = (s1f_walk){
        .edges = edges,
        .num_ranks = num_ranks,
        .shape = *shape,
        .ranks = calloc((size_t)num_ranks, sizeof *walk->ranks),
        .links = calloc((size_t)edges->num_edges + 1, sizeof *walk->links), /* + 1: calloc(0) may be NULL */
        .ready = calloc((size_t)num_ranks, sizeof *walk->ready),
    };
    if (walk->ranks == NULL || walk->links == NULL || walk->ready == NULL) {
        s1f_walk_free(walk);
        return s1f_fail(S1F_ERR_MEMORY, "no memory to run %d ranks against each other", (int)num_ranks);
    }
    for (int32_t e = 0; e < edges->num_edges; e++)
        walk->links[e].most_posted = edges->edges[e].num_messages;
    return S1F_OK;
}

void s1f_walk_free(s1f_walk *walk)
{
    free(walk->ready);
    free(walk->links);
    free(walk->ranks);
    *walk = (s1f_walk){0};
}

void s1f_walk_ready_all(s1f_walk *walk)
{
    walk->num_ready = 0;
    for (int32_t rank = walk->num_ranks - 1; rank >= 0; rank--)
        s1f_walk_wake(walk, rank);
}

int32_t s1f_walk_peer(const s1f_walk *walk, int32_t rank)
{
    const s1f_walker *own = &walk->ranks[rank];
    const s1f_edge *edge = &walk->edges->edges[own->waits_for];
    return own->has_run ? edge->destination_rank : edge->source_rank;
}
