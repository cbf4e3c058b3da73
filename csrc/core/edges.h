/* edges.h - the directed edges that an order's placement has, and which of them each kind of unit uses.
 *
 * One edge per (channel, source stage, destination stage) whose ranks differ; a message on it belongs to one cell
 * (micro-batch, segment). The edges follow from the inputs of unit.h: an edge may join any two stages, and a unit may
 * have any number of edges. Stages on one rank hand over without an edge. */
#ifndef S1F_EDGES_H
#define S1F_EDGES_H

#include "pool.h"
#include "unit.h"

typedef struct {
    int32_t channel; /* s1f_channel */
    int32_t product; /* s1f_product of the edge's messages */
    int32_t source_stage, destination_stage, source_rank, destination_rank;
    int64_t num_messages; /* one per cell */
    /* Set by lower.h: */
    int32_t num_places;  /* receive buffers */
    int32_t is_in_order; /* 1: the receiver uses the messages in the order in which they are sent */
    int64_t *number;     /* [cell]: number of the cell's message, in the order of sending */
    int64_t *sender;     /* [number of a message]: the sending unit, by its number on the source's rank */
    int64_t *receiver;   /* [number of a message]: the waiting unit, by its number on the destination's rank */
    int32_t *place;      /* [number of a message]: its receive buffer */
} s1f_edge;

/* The lower of the two stages that an edge joins. */
static inline int32_t s1f_edge_boundary(const s1f_edge *edge)
{
    return edge->source_stage < edge->destination_stage ? edge->source_stage : edge->destination_stage;
}

typedef struct { /* edges, in ascending order; borrowed from s1f_edges */
    const int32_t *edges;
    int32_t count;
} s1f_edge_list;

/* All units of one stage and pass. */
typedef struct {
    s1f_edge_list in;    /* a message of each is waited for */
    s1f_edge_list out;   /* the unit's result is sent on each */
    s1f_edge_list freed; /* the unit is the last to read a message of each, whose place is free afterwards */
} s1f_kind_edges;

typedef struct {
    int32_t num_edges;
    s1f_edge *edges;
    s1f_kind_edges *kinds; /* [s1f_kind(unit)] */
} s1f_edges;

/* *out is the pool's, and untouched on error. S1F_ERR_MEMORY. */
s1f_status s1f_edges_create(const s1f_shape *shape, s1f_pool *pool, s1f_edges **out);

#endif
