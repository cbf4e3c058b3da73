/* critical.c - the walk of simulate.c once more, from the last completed unit to the first. */
#include "critical.h"

#include <math.h>

typedef struct {
    const s1f_program *program;
    const s1f_edge *edges;
    const s1f_costs *costs;
    s1f_simulation *simulation;
    s1f_pool pool;     /* of all arrays */
    int64_t num_cells; /* of a stage, and messages of an edge */
    int64_t *granter;  /* [edge][message] number of the unit after which its place is posted, on the
                                               destination's rank; -1: at the start */
    double *latest_arrival, *latest_credit; /* [edge][message] seconds */
    int64_t *num_posted;                    /* [edge] by the units not yet walked back over */
    double *latest_transfer;                /* [edge] latest begin of the next message */
    int64_t *left;                          /* [rank] units not yet walked back over */
    double *latest_start;                   /* [rank] of the unit walked back over last */
} walk;

static s1f_status create_walk(walk *w)
{
    const s1f_shape *shape = &w->program->shape;
    size_t num_edges = (size_t)w->program->edges->num_edges + 1, num_ranks = (size_t)shape->num_ranks; /* never 0 */
    w->edges = w->program->edges->edges;
    w->num_cells = s1f_num_cells(shape);
    size_t total = num_edges * (size_t)w->num_cells;
    w->granter = s1f_pool_take(&w->pool, total, sizeof *w->granter);
    w->latest_arrival = s1f_pool_take(&w->pool, total, sizeof *w->latest_arrival);
    w->latest_credit = s1f_pool_take(&w->pool, total, sizeof *w->latest_credit);
    w->num_posted = s1f_pool_take(&w->pool, num_edges, sizeof *w->num_posted);
    w->latest_transfer = s1f_pool_take(&w->pool, num_edges, sizeof *w->latest_transfer);
    w->left = s1f_pool_take(&w->pool, num_ranks, sizeof *w->left);
    w->latest_start = s1f_pool_take(&w->pool, num_ranks, sizeof *w->latest_start);
    return s1f_pool_status(&w->pool, "the slack of units");
}

static const s1f_unit *unit_at(const walk *w, s1f_numbered_unit unit)
{
    return &w->program->ranks[unit.rank].units[unit.i];
}

static const s1f_kind_edges *edges_of(const walk *w, s1f_numbered_unit unit)
{
    return &w->program->edges->kinds[s1f_kind(*unit_at(w, unit))];
}

/* Index of message `number` of an edge. */
static int64_t message(const walk *w, int32_t edge, int64_t number)
{
    return edge * w->num_cells + number;
}

/* Number of the message that belongs to the cell of a unit. */
static int64_t number_of(const walk *w, int32_t edge, s1f_numbered_unit unit)
{
    return w->edges[edge].number[s1f_cell(&w->program->shape, *unit_at(w, unit))];
}

/* Who grants the place of each message. */
static void find_granters(walk *w)
{
    for (int32_t e = 0; e < w->program->edges->num_edges; e++)
        for (; w->num_posted[e] < w->edges[e].num_places; w->num_posted[e]++)
            w->granter[message(w, e, w->num_posted[e])] = -1;
    for (s1f_position at = {0}; s1f_next_unit(w->program->schedule, &at);) {
        s1f_edge_list freed = w->program->edges->kinds[s1f_kind(at.unit)].freed;
        for (int32_t j = 0; j < freed.count; j++) {
            int32_t e = freed.edges[j];
            if (w->num_posted[e] < w->edges[e].num_messages)
                w->granter[message(w, e, w->num_posted[e]++)] = at.number - 1;
        }
    }
}

/* The latest end of a unit whose result leaves on this edge, if its rank may be through with that at `through`. */
static double walk_back_over_send(walk *w, int32_t edge, s1f_numbered_unit unit, double through)
{
    s1f_link_costs link = s1f_link_costs_of(w->costs, &w->edges[edge]);
    int64_t number = number_of(w, edge, unit), column = s1f_column(&w->program->shape, *unit_at(w, unit));
    double scale = s1f_message_scale(w->program, w->costs, edge, number);
    double passed = fmin(w->latest_arrival[message(w, edge, number)] - scale * link.latency, w->latest_transfer[edge]);
    w->latest_transfer[edge] = passed - scale * s1f_transfer_seconds(&link, column);
    double latest_end = fmin(through, w->latest_transfer[edge]) - w->costs->send;
    w->latest_credit[message(w, edge, number)] = latest_end;
    return latest_end;
}

static void walk_back_over(walk *w, int32_t rank)
{
    s1f_numbered_unit unit = {rank, --w->left[rank]};
    const s1f_kind_edges *uses = edges_of(w, unit);
    double latest_end = w->latest_start[rank]; /* latest time at which the rank is through with the unit */
    for (int32_t j = uses->freed.count - 1; j >= 0; j--) {
        int32_t e = uses->freed.edges[j];
        int64_t last = message(w, e, w->num_posted[e] - 1);
        if (w->num_posted[e] > 0 && w->granter[last] == unit.i) {
            w->num_posted[e]--;
            latest_end = fmin(latest_end, w->latest_credit[last]);
        }
    }
    for (int32_t j = uses->out.count - 1; j >= 0; j--)
        latest_end = walk_back_over_send(w, uses->out.edges[j], unit, latest_end);
    double start = w->simulation->start[rank][unit.i], end = w->simulation->end[rank][unit.i];
    latest_end = fmin(latest_end, w->simulation->makespan);
    w->latest_start[rank] = latest_end - (end - start);
    w->simulation->slack[rank][unit.i] = latest_end > end ? latest_end - end : 0; /* below 0 by rounding */
    for (int32_t j = 0; j < uses->in.count; j++) {
        int32_t e = uses->in.edges[j];
        w->latest_arrival[message(w, e, number_of(w, e, unit))] = w->latest_start[rank];
    }
}

static void find_slack(walk *w)
{
    int64_t total = s1f_program_num_units(w->program);
    for (int32_t rank = 0; rank < w->program->shape.num_ranks; rank++) {
        w->left[rank] = w->program->ranks[rank].num_units;
        w->latest_start[rank] = INFINITY;
    }
    for (int32_t e = 0; e < w->program->edges->num_edges; e++)
        w->latest_transfer[e] = INFINITY;
    while (total > 0)
        walk_back_over(w, w->simulation->completed[--total]);
}

/* The unit that sends the message which decided when message `number` left its link. */
static s1f_numbered_unit first_of_busy_link(const walk *w, int32_t edge, int64_t number)
{
    int32_t rank = w->edges[edge].source_rank;
    while (w->simulation->causes[rank][w->edges[edge].sender[number]] & S1F_CAUSE_LINK)
        number--;
    return (s1f_numbered_unit){rank, w->edges[edge].sender[number]};
}

/* The unit that decided when the rank was through with this one: itself, or the last one that granted a place for which
 * its message waited. */
static s1f_numbered_unit deciding(const walk *w, s1f_numbered_unit unit)
{
    while (w->simulation->causes[unit.rank][unit.i] & S1F_CAUSE_CREDIT) {
        s1f_edge_list out = edges_of(w, unit)->out;
        s1f_numbered_unit last = {-1, -1};
        double latest = -1;
        for (int32_t j = 0; j < out.count; j++) {
            int32_t e = out.edges[j], rank = w->edges[e].destination_rank;
            int64_t i = w->granter[message(w, e, number_of(w, e, unit))];
            if (i >= 0 && w->simulation->end[rank][i] > latest) {
                latest = w->simulation->end[rank][i];
                last = (s1f_numbered_unit){rank, i};
            }
        }
        unit = last;
    }
    return unit;
}

/* The unit that this one's start waited for; 0: none. */
static int before_on_path(const walk *w, s1f_numbered_unit unit, s1f_numbered_unit *before)
{
    s1f_numbered_unit awaited = {unit.rank, unit.i - 1};
    if (w->simulation->causes[unit.rank][unit.i] & S1F_CAUSE_MESSAGE) {
        s1f_edge_list in = edges_of(w, unit)->in;
        double latest = -1;
        for (int32_t j = 0; j < in.count; j++) { /* of several messages the one that was sent by the last to end */
            int32_t e = in.edges[j];
            s1f_numbered_unit sender = first_of_busy_link(w, e, number_of(w, e, unit));
            if (w->simulation->end[sender.rank][sender.i] > latest) {
                latest = w->simulation->end[sender.rank][sender.i];
                awaited = sender;
            }
        }
    } else if (unit.i == 0) {
        return 0;
    }
    *before = deciding(w, awaited);
    return 1;
}

static s1f_status find_path(walk *w)
{
    s1f_simulation *simulation = w->simulation;
    int64_t at = s1f_program_num_units(w->program);
    s1f_numbered_unit unit = {0, 0}, *path = s1f_pool_take(&simulation->pool, (size_t)at, sizeof *path);
    double latest = -1;
    S1F_TRY(s1f_pool_status(&simulation->pool, "the critical path"));
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++)
        if (simulation->end[rank][w->program->ranks[rank].num_units - 1] > latest) {
            unit = (s1f_numbered_unit){rank, w->program->ranks[rank].num_units - 1};
            latest = simulation->end[rank][unit.i];
        }
    do
        path[--at] = unit;
    while (before_on_path(w, unit, &unit));
    simulation->path = path + at;
    simulation->path_length = s1f_program_num_units(w->program) - at;
    return S1F_OK;
}

s1f_status s1f_simulation_find_slack(const s1f_program *program, const s1f_costs *costs, s1f_simulation *simulation)
{
    walk w = {.program = program, .costs = costs, .simulation = simulation};
    if (simulation->causes == NULL)
        return s1f_fail(S1F_ERR_STATE, "slack needs a simulation that keeps its causes");
    s1f_status status = create_walk(&w);
    if (status == S1F_OK) {
        find_granters(&w);
        find_slack(&w);
        status = find_path(&w);
    }
    s1f_pool_free(&w.pool);
    return status;
}
