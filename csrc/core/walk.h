/* walk.h - runs all ranks against each other, each along its list of units.
 *
 * A rank waits for the messages of its next unit, runs it, sends its result on every edge, and posts the places that
 * the unit frees; if the rank has to wait for another rank, it stands still until that rank has gone on. Who goes first
 * changes nothing but the order in which the rules below are called. Rules say what the walk is for: nothing (is there
 * a cycle?), credits (are there places enough?), times (when does each unit start?).
 *
 * s1f_walk_go is inlined into each user with rules that are known there, so that an empty rule costs nothing. */
#ifndef S1F_WALK_H
#define S1F_WALK_H

#include "edges.h"
#include "schedule.h"

typedef struct {
    const s1f_unit *next, *end; /* the unit that the rank runs next, or whose result it sends; of its list, borrowed */
    int32_t has_run;            /* `*next` has run */
    int32_t sent;               /* edges on which the result of `*next` has been sent */
    int32_t waits_for;          /* edge on which the rank waits for a message, or for a place (has_run); -1 */
} s1f_walker;

typedef struct {
    int64_t num_posted, num_sent;
    int64_t most_posted; /* a place freed later stays empty */
    int32_t receiver_waits, sender_waits;
} s1f_link;

typedef struct {
    const s1f_edges *edges;
    s1f_shape shape;   /* of the order; what it points to is borrowed */
    s1f_walker *ranks; /* [num_ranks] */
    s1f_link *links;   /* [edge] */
    int32_t *ready;    /* ranks that can go on, each at most once: the last goes first */
    int32_t num_ready;
} s1f_walk;

typedef struct { /* a rank before or after a unit */
    int32_t rank;
    const s1f_unit *unit;
    int64_t cell; /* s1f_cell of the unit */
    const s1f_kind_edges *uses;
} s1f_stand;

typedef struct {
    /* Whether the message has come that a rank's next unit waits for on this edge. */
    int (*has_come)(void *context, const s1f_stand *at, int32_t edge);
    int with_credits; /* a message is sent only into a place that its receiver has posted */
    /* What happens; any may be NULL. `through`: the rank is done with its unit. */
    void (*run)(void *context, const s1f_stand *at);
    void (*send)(void *context, const s1f_stand *at, int32_t edge);
    void (*post)(void *context, int32_t rank, int32_t edge);
    void (*through)(void *context, const s1f_stand *at);
} s1f_walk_rules;

/* All ranks are ready to go along their orders in a schedule of this shape, rank 0 first; no place is posted. Arrays
 * are the pool's. S1F_ERR_MEMORY. */
s1f_status s1f_walk_create(const s1f_schedule *schedule, const s1f_shape *shape, const s1f_edges *edges, s1f_pool *pool,
                           s1f_walk *walk);
/* Puts a rank before the first unit of its order. */
void s1f_walk_begin(s1f_walk *walk, const s1f_schedule *schedule, int32_t rank);
static inline int s1f_walk_has_ended(const s1f_walk *walk, int32_t rank)
{
    return walk->ranks[rank].next == walk->ranks[rank].end;
}
/* The rank for which a rank that stands still waits. */
int32_t s1f_walk_peer(const s1f_walk *walk, int32_t rank);

static inline void s1f_walk_wake(s1f_walk *walk, int32_t rank)
{
    walk->ready[walk->num_ready++] = rank;
}

/* Posts a free place of an edge into this rank. */
static inline __attribute__((always_inline)) void s1f_walk_post(s1f_walk *walk, int32_t rank, int32_t edge,
                                                                const s1f_walk_rules rules, void *context)
{
    s1f_link *link = &walk->links[edge];
    if (link->num_posted == link->most_posted)
        return;
    link->num_posted++;
    if (rules.post != NULL)
        rules.post(context, rank, edge);
    if (link->sender_waits) {
        link->sender_waits = 0;
        s1f_walk_wake(walk, walk->edges->edges[edge].source_rank);
    }
}

/* Writes back the rank's place within a unit when it stands still. */
static inline int s1f_walk_stop(s1f_walker *own, const s1f_unit *unit, int32_t has_run, int32_t sent)
{
    own->next = unit;
    own->has_run = has_run;
    own->sent = sent;
    return 0;
}

/* Lets one rank go on until it waits, or is at the end of its list (1). */
static inline __attribute__((always_inline)) int s1f_walk_go(s1f_walk *walk, int32_t rank, const s1f_walk_rules rules,
                                                             void *context)
{
    s1f_walker *own = &walk->ranks[rank];
    const s1f_unit *unit = own->next, *end = own->end;
    int32_t has_run = own->has_run, sent = own->sent;
    for (; unit != end; unit++, has_run = sent = 0) {
        __builtin_prefetch(unit + 4); /* the next cache line: ranks take turns, so the processor does not foresee it */
        const s1f_kind_edges *uses = &walk->edges->kinds[s1f_kind(*unit)];
        const s1f_stand at = {rank, unit, s1f_cell(&walk->shape, *unit), uses};
        if (!has_run) {
            for (int32_t i = 0; i < uses->in.count; i++)
                if (!rules.has_come(context, &at, uses->in.edges[i])) {
                    walk->links[uses->in.edges[i]].receiver_waits = 1;
                    own->waits_for = uses->in.edges[i];
                    return s1f_walk_stop(own, unit, 0, 0);
                }
            if (rules.run != NULL)
                rules.run(context, &at);
            has_run = 1;
        }
        while (sent < uses->out.count) {
            int32_t edge = uses->out.edges[sent];
            s1f_link *link = &walk->links[edge];
            if (rules.with_credits && link->num_sent == link->num_posted) {
                link->sender_waits = 1;
                own->waits_for = edge;
                return s1f_walk_stop(own, unit, 1, sent);
            }
            if (rules.send != NULL)
                rules.send(context, &at, edge);
            link->num_sent++;
            sent++;
            if (link->receiver_waits) {
                link->receiver_waits = 0;
                s1f_walk_wake(walk, walk->edges->edges[edge].destination_rank);
            }
        }
        for (int32_t i = 0; i < uses->freed.count; i++)
            s1f_walk_post(walk, rank, uses->freed.edges[i], rules, context);
        if (rules.through != NULL)
            rules.through(context, &at);
    }
    s1f_walk_stop(own, unit, 0, 0);
    return 1;
}

#endif
