/* walk.c - what every walk has. */
#include "walk.h"

void s1f_walk_begin(s1f_walk *walk, const s1f_schedule *schedule, int32_t rank)
{
    int64_t num_units;
    walk->ranks[rank].next = s1f_schedule_units(schedule, rank, &num_units);
    walk->ranks[rank].end = walk->ranks[rank].next + num_units;
}

s1f_status s1f_walk_create(const s1f_schedule *schedule, const s1f_shape *shape, const s1f_edges *edges, s1f_pool *pool,
                           s1f_walk *walk)
{
    size_t num_ranks = (size_t)shape->num_ranks;
    *walk = (s1f_walk){
        .edges = edges,
        .shape = *shape,
        .ranks = s1f_pool_take(pool, num_ranks, sizeof *walk->ranks),
        .links = s1f_pool_take(pool, (size_t)edges->num_edges, sizeof *walk->links),
        .ready = s1f_pool_take(pool, num_ranks, sizeof *walk->ready),
    };
    S1F_TRY(s1f_pool_status(pool, "a run of all ranks against each other"));
    for (int32_t e = 0; e < edges->num_edges; e++)
        walk->links[e].most_posted = edges->edges[e].num_messages;
    for (int32_t rank = walk->shape.num_ranks - 1; rank >= 0; rank--) {
        s1f_walk_begin(walk, schedule, rank);
        s1f_walk_wake(walk, rank);
    }
    return S1F_OK;
}

int32_t s1f_walk_peer(const s1f_walk *walk, int32_t rank)
{
    const s1f_walker *own = &walk->ranks[rank];
    const s1f_edge *edge = &walk->edges->edges[own->waits_for];
    return own->has_run ? edge->destination_rank : edge->source_rank;
}
