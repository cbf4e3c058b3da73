/* lower.c - from an order to one program per rank.
 *
 * Passes over the units: number the messages in the order of their senders and count the places that every receiver
 * needs; run all ranks against each other, in time or with credits, and add places where a sender waits or all get
 * stuck; give each message its place; write the instructions. */
#include "lower.h"

#include "check.h"
#include "walk.h"

#include <string.h>

/* State of lowering. */
typedef struct {
    s1f_program *program;
    s1f_rank_program *own; /* the rank whose instructions are written */
    s1f_pool pool;         /* of all arrays */
    int64_t num_cells;     /* of a stage */
    int64_t *counted;      /* [edge]: messages numbered, freed, placed or posted in the pass that runs */
    int64_t *used;         /* [edge]: messages waited for */
    int64_t *needed;       /* [edge]: places that the receiver needs at once */
    int32_t *most;         /* [edge]: places that it gets at most */
    /* [stage][keys and values, and their gradients][micro-batch]: */
    unsigned char *is_taken; /* of slots */
    int32_t *slot_of;        /* held now */
    int32_t *live_units;     /* [stage] */
    s1f_lifetime_table lifetimes;
    s1f_walk walk; /* of all ranks, in time or with credits */
    /* State of a run in time: */
    const s1f_places *given;
    double *now;   /* [rank] */
    double *sent;  /* [edge][number]: when the unit that makes the message ends */
    double *freed; /* [edge][i]: when the i-th place becomes free, in a walk that posts none beforehand */
} lowering;

/* Number of the unit's message on an edge. */
static int64_t *number_of(const lowering *l, int32_t edge, s1f_unit unit)
{
    return &l->program->edges->edges[edge].number[s1f_cell(&l->program->shape, unit)];
}

static const s1f_kind_edges *edges_of(const lowering *l, s1f_unit unit)
{
    return &l->program->edges->kinds[s1f_kind(unit)];
}

/* -- messages and places ------------------------------------------------------------------------------------------- */

static void number_messages(const lowering *l)
{
    for (s1f_position at = {0}; s1f_next_unit(l->program->schedule, &at);) {
        s1f_edge_list out = edges_of(l, at.unit)->out;
        for (int32_t j = 0; j < out.count; j++) {
            int64_t number = l->counted[out.edges[j]]++;
            *number_of(l, out.edges[j], at.unit) = number;
            l->program->edges->edges[out.edges[j]].sender[number] = at.number - 1;
        }
    }
}

/* Message n can be used only when messages 0..n have been posted, so the receiver needs n + 1 places less those it has
 * freed by then. */
static void count_needed_places(const lowering *l)
{
    s1f_edge *edges = l->program->edges->edges;
    int64_t *freed = l->counted, *used = l->used;
    for (int32_t e = 0; e < l->program->edges->num_edges; e++)
        edges[e].is_in_order = 1;
    for (s1f_position at = {0}; s1f_next_unit(l->program->schedule, &at);) {
        const s1f_kind_edges *uses = edges_of(l, at.unit);
        for (int32_t j = 0; j < uses->in.count; j++) {
            int32_t e = uses->in.edges[j];
            int64_t number = *number_of(l, e, at.unit);
            edges[e].receiver[number] = at.number - 1;
            edges[e].is_in_order &= number == used[e]++;
            if (number + 1 - freed[e] > l->needed[e])
                l->needed[e] = number + 1 - freed[e];
        }
        for (int32_t j = 0; j < uses->freed.count; j++)
            freed[uses->freed.edges[j]]++;
    }
}

/* A freed place goes at once to the next message of its edge, while there is one. */
static void place_messages(const lowering *l)
{
    s1f_edge *edges = l->program->edges->edges;
    for (int32_t e = 0; e < l->program->edges->num_edges; e++)
        for (int32_t place = 0; place < edges[e].num_places; place++)
            edges[e].place[l->counted[e]++] = place;
    for (s1f_position at = {0}; s1f_next_unit(l->program->schedule, &at);) {
        s1f_edge_list freed = edges_of(l, at.unit)->freed;
        for (int32_t j = 0; j < freed.count; j++) {
            s1f_edge *edge = &edges[freed.edges[j]];
            int64_t *placed = &l->counted[freed.edges[j]];
            if (*placed < edge->num_messages)
                edge->place[(*placed)++] = edge->place[*number_of(l, freed.edges[j], at.unit)];
        }
    }
}

static void give_at_least(s1f_edge *edge, int64_t places)
{
    int64_t wanted = places < edge->num_messages ? places : edge->num_messages;
    edge->num_places = wanted > edge->num_places ? (int32_t)wanted : edge->num_places;
}

static void give_needed_and(const lowering *l, int32_t prefetch)
{
    for (int32_t e = 0; e < l->program->edges->num_edges; e++)
        give_at_least(&l->program->edges->edges[e], l->needed[e] + prefetch);
}

/* -- runs of all ranks --------------------------------------------------------------------------------------------- */

static int message_has_come(void *context, const s1f_stand *at, int32_t edge)
{
    const lowering *l = context;
    return l->walk.links[edge].num_sent > l->walk.edges->edges[edge].number[at->cell];
}

/* -- credits ------------------------------------------------------------------------------------------------------- */

static const s1f_walk_rules credit_rules = {.has_come = message_has_come, .with_credits = 1};

/* Breaks the cycle in which `rank` is stuck: adds a place to one of its edges that wait for a credit and may get more.
 * The order passed its check, and nothing gets stuck with the most places, so there is one. Returns 0 if not. */
static int add_place(lowering *l, int32_t rank)
{
    int32_t num_ranks = l->walk.shape.num_ranks;
    for (int32_t step = 0; step < num_ranks; step++) /* a walk from rank to awaited rank ends in the cycle */
        rank = s1f_walk_peer(&l->walk, rank);
    for (int32_t step = 0; step < num_ranks; step++, rank = s1f_walk_peer(&l->walk, rank)) {
        int32_t e = l->walk.ranks[rank].waits_for;
        s1f_edge *edge = &l->program->edges->edges[e];
        if (!l->walk.ranks[rank].has_run || edge->num_places == l->most[e])
            continue;
        edge->num_places++;
        s1f_walk_post(&l->walk, edge->destination_rank, e, credit_rules, l);
        return 1;
    }
    return 0;
}

/* Runs all ranks against each other. A stuck state depends on the number of places only, never on who ran first, so
 * adding one and going on ends where starting again with it would. */
static s1f_status run_with_credits(lowering *l)
{
    int32_t num_ranks = l->program->shape.num_ranks, num_ended = 0;
    const s1f_edges *edges = l->program->edges;
    S1F_TRY(s1f_walk_create(l->program->schedule, &l->program->shape, edges, &l->pool, &l->walk));
    for (int32_t e = 0; e < edges->num_edges; e++)
        l->walk.links[e].num_posted = edges->edges[e].num_places;
    while (num_ended < num_ranks) {
        while (l->walk.num_ready > 0)
            num_ended += s1f_walk_go(&l->walk, l->walk.ready[--l->walk.num_ready], credit_rules, l);
        int32_t stuck = 0; /* everyone waits: a cycle through credits */
        while (stuck < num_ranks && s1f_walk_has_ended(&l->walk, stuck))
            stuck++;
        if (stuck < num_ranks && !add_place(l, stuck))
            return s1f_fail(S1F_ERR_SCHEDULE, "program order and transfers have no cycle: rank %d is stuck", stuck);
    }
    return S1F_OK;
}

/* -- places by time ------------------------------------------------------------------------------------------------ */

/* Seconds of a unit where none are given. */
static const double unit_seconds[S1F_MAX_PASSES] = {
    [S1F_PASS_FORWARD] = 1,         [S1F_PASS_BACKWARD] = 2,  [S1F_PASS_BACKWARD_INPUT] = 1,
    [S1F_PASS_BACKWARD_WEIGHT] = 1, [S1F_PASS_RECOMPUTE] = 1,
};

static void run_in_time(void *context, const s1f_stand *at)
{
    lowering *l = context;
    const s1f_shape *shape = &l->program->shape;
    const double *seconds = l->given->seconds, *latency = l->given->latency;
    double now = l->now[at->rank];
    for (int32_t i = 0; i < at->uses->in.count; i++) {
        int32_t e = at->uses->in.edges[i];
        const s1f_edge *edge = &l->program->edges->edges[e];
        double comes = l->sent[e * l->num_cells + edge->number[at->cell]];
        comes += latency == NULL ? 0 : latency[s1f_edge_boundary(edge)];
        now = comes > now ? comes : now;
    }
    if (seconds != NULL)
        seconds += at->unit->pass * s1f_table_count(shape, S1F_PER_CELL) + s1f_column_of_all(shape, *at->unit);
    l->now[at->rank] = now + (seconds != NULL ? *seconds : unit_seconds[at->unit->pass]);
}

static void send_in_time(void *context, const s1f_stand *at, int32_t edge)
{
    lowering *l = context;
    l->sent[edge * l->num_cells + l->walk.links[edge].num_sent] = l->now[at->rank];
}

static void free_in_time(void *context, int32_t rank, int32_t edge)
{
    lowering *l = context;
    l->freed[edge * l->num_cells + l->walk.links[edge].num_posted - 1] = l->now[rank];
}

static const s1f_walk_rules time_rules = {
    .has_come = message_has_come, .run = run_in_time, .send = send_in_time, .post = free_in_time};

/* The most messages of an edge that have been sent and lie in a place: both rows of times ascend. */
static int64_t most_at_once(const lowering *l, int32_t edge)
{
    const double *sent = l->sent + edge * l->num_cells, *freed = l->freed + edge * l->num_cells;
    int64_t most = 0, num_freed = 0;
    for (int64_t n = 0; n < l->walk.links[edge].num_sent; n++) {
        while (num_freed < l->walk.links[edge].num_posted && freed[num_freed] <= sent[n])
            num_freed++;
        most = n + 1 - num_freed > most ? n + 1 - num_freed : most;
    }
    return most;
}

/* Runs all ranks against each other with places for all messages, and gives each edge those that were in use. With them
 * the run is the same, but for units that take no time: such a unit frees a place in the moment in which the next
 * message is sent, though it may wait for that very message. */
static s1f_status give_by_time(lowering *l, const s1f_places *places)
{
    const s1f_shape *shape = &l->program->shape;
    const s1f_edges *edges = l->program->edges;
    size_t num_messages = (size_t)edges->num_edges * (size_t)l->num_cells;
    S1F_TRY(s1f_require_seconds("the seconds by which places are counted hold", places->seconds,
                                s1f_num_passes * s1f_table_count(shape, S1F_PER_CELL)));
    S1F_TRY(s1f_require_seconds("the latency by which places are counted is", places->latency,
                                s1f_table_count(shape, S1F_PER_PAIR)));
    l->given = places;
    l->now = s1f_pool_take(&l->pool, (size_t)shape->num_ranks, sizeof *l->now);
    l->sent = s1f_pool_take(&l->pool, num_messages, sizeof *l->sent);
    l->freed = s1f_pool_take(&l->pool, num_messages, sizeof *l->freed);
    S1F_TRY(s1f_pool_status(&l->pool, "a run of all ranks in time"));
    S1F_TRY(s1f_walk_create(l->program->schedule, shape, edges, &l->pool, &l->walk));
    while (l->walk.num_ready > 0)
        s1f_walk_go(&l->walk, l->walk.ready[--l->walk.num_ready], time_rules, l);
    for (int32_t e = 0; e < edges->num_edges; e++)
        give_at_least(&l->program->edges->edges[e], most_at_once(l, e));
    return S1F_OK;
}

/* How many places break every cycle depends on how many there are at first, and fewer may come to more on one edge. So
 * that more are never slower, they are found with one place beyond those that are needed: where there are to be more,
 * these are kept; where there is to be none, no edge gets more than it has then. */
static s1f_status give_places(lowering *l, const s1f_places *places)
{
    s1f_edge *edges = l->program->edges->edges;
    for (int32_t e = 0; e < l->program->edges->num_edges; e++)
        l->most[e] = INT32_MAX;
    give_needed_and(l, 1);
    if (places->by_time)
        S1F_TRY(give_by_time(l, places));
    S1F_TRY(run_with_credits(l));
    if (places->by_time)
        return S1F_OK;
    if (places->prefetch == 0) {
        for (int32_t e = 0; e < l->program->edges->num_edges; e++) {
            l->most[e] = edges[e].num_places;
            edges[e].num_places = 0;
        }
        give_needed_and(l, 0);
        S1F_TRY(run_with_credits(l));
    }
    give_needed_and(l, places->prefetch);
    return S1F_OK;
}

/* -- instructions -------------------------------------------------------------------------------------------------- */

static void write(const lowering *l, s1f_opcode opcode, int32_t edge, s1f_unit unit, int64_t sequence)
{
    l->own->instructions[l->own->count++] = (s1f_instruction){
        .opcode = (int32_t)opcode,
        .edge = edge,
        .unit = unit,
        .place = edge >= 0 ? l->program->edges->edges[edge].place[sequence] : -1,
        .kv_slot = -1,
        .grad_slot = -1,
        .sequence = sequence,
    };
}

/* POST of the next message, unless all are posted: the place stays empty. */
static void write_post(const lowering *l, int32_t edge)
{
    const s1f_edge *e = &l->program->edges->edges[edge];
    if (l->counted[edge] == e->num_messages)
        return;
    int64_t number = l->counted[edge]++;
    write(l, S1F_OP_POST, edge, l->own->units[e->receiver[number]], number);
}

/* RUN, with the slots that the unit takes, each the lowest that is free, and gives back. */
static void write_run(const lowering *l, s1f_unit unit, s1f_lifetimes lifetimes)
{
    static const s1f_holding holdings[2] = {S1F_HOLDS_KV, S1F_HOLDS_KV_GRADIENT};
    /* Products whose makers read or write them. */
    static const uint32_t users[2] = {1u << S1F_PRODUCT_OUTPUT | 1u << S1F_PRODUCT_RECOMPUTED |
                                          1u << S1F_PRODUCT_INPUT_GRADIENT,
                                      1u << S1F_PRODUCT_INPUT_GRADIENT};
    int64_t M = l->program->shape.num_microbatches;
    s1f_stage_peak *peak = &l->program->peaks[unit.stage];
    if (s1f_begins_to_live(lifetimes) && ++l->live_units[unit.stage] > peak->live_units)
        peak->live_units = l->live_units[unit.stage];
    write(l, S1F_OP_RUN, -1, unit, -1);
    s1f_instruction *run = &l->own->instructions[l->own->count - 1];
    int32_t *used[2] = {&run->kv_slot, &run->grad_slot}, *most[2] = {&peak->kv_slots, &peak->grad_slots};
    for (int i = 0; i < 2; i++) {
        int32_t *slot = &l->slot_of[(2 * unit.stage + i) * M + unit.microbatch];
        unsigned char *taken = &l->is_taken[(2 * unit.stage + i) * M];
        if (lifetimes.takes >> holdings[i] & 1) {
            unsigned char *lowest = memchr(taken, 0, (size_t)M);
            *slot = (int32_t)(lowest - taken);
            *lowest = 1;
            *most[i] = *slot + 1 > *most[i] ? *slot + 1 : *most[i];
        }
        *used[i] = s1f_pass_products(unit.pass) & users[i] ? *slot : -1;
        if (lifetimes.frees >> holdings[i] & 1)
            taken[*slot] = 0;
    }
}

static void write_unit(const lowering *l, s1f_unit unit)
{
    const s1f_kind_edges *uses = edges_of(l, unit);
    s1f_lifetimes lifetimes = s1f_unit_lifetimes(&l->lifetimes, unit);
    for (int32_t i = 0; i < uses->in.count; i++)
        write(l, S1F_OP_WAIT, uses->in.edges[i], unit, *number_of(l, uses->in.edges[i], unit));
    if (s1f_reads_moved(&l->program->shape, unit))
        write(l, S1F_OP_BACK, -1, unit, -1);
    write_run(l, unit, lifetimes);
    for (int32_t i = 0; i < uses->out.count; i++)
        write(l, S1F_OP_SEND, uses->out.edges[i], unit, *number_of(l, uses->out.edges[i], unit));
    if (s1f_ends_to_live(lifetimes)) {
        write(l, S1F_OP_FREE, -1, unit, -1);
        l->live_units[unit.stage]--;
    }
    for (int32_t i = 0; i < uses->freed.count; i++)
        write_post(l, uses->freed.edges[i]);
}

static int64_t count_instructions(const lowering *l, int32_t rank)
{
    int64_t count = 0;
    for (int64_t i = 0; i < l->own->num_units; i++)
        count += 3 + edges_of(l, l->own->units[i])->out.count; /* BACK, RUN, FREE and SENDs */
    for (int32_t e = 0; e < l->program->edges->num_edges; e++)
        if (l->program->edges->edges[e].destination_rank == rank)
            count += 2 * l->program->edges->edges[e].num_messages; /* POST and WAIT */
    return count;
}

static s1f_status write_program(lowering *l, int32_t rank)
{
    l->own = &l->program->ranks[rank];
    l->own->instructions =
        s1f_pool_take(&l->program->pool, (size_t)count_instructions(l, rank), sizeof *l->own->instructions);
    S1F_TRY(s1f_pool_status(&l->program->pool, "the instructions of a rank"));
    for (int32_t e = 0; e < l->program->edges->num_edges; e++)
        if (l->program->edges->edges[e].destination_rank == rank)
            for (int32_t place = 0; place < l->program->edges->edges[e].num_places; place++)
                write_post(l, e);
    for (int64_t i = 0; i < l->own->num_units; i++)
        write_unit(l, l->own->units[i]);
    return S1F_OK;
}

/* -- the whole ----------------------------------------------------------------------------------------------------- */

static s1f_status create_lowering(lowering *l)
{
    const s1f_shape *shape = &l->program->shape;
    l->lifetimes = s1f_lifetimes_of(shape);
    l->num_cells = s1f_num_cells(shape);
    size_t num_slots = 2 * (size_t)shape->num_stages * (size_t)shape->num_microbatches;
    size_t num_edges = (size_t)l->program->edges->num_edges;
    l->counted = s1f_pool_take(&l->pool, num_edges, sizeof *l->counted);
    l->used = s1f_pool_take(&l->pool, num_edges, sizeof *l->used);
    l->needed = s1f_pool_take(&l->pool, num_edges, sizeof *l->needed);
    l->most = s1f_pool_take(&l->pool, num_edges, sizeof *l->most);
    l->is_taken = s1f_pool_take(&l->pool, num_slots, 1);
    l->slot_of = s1f_pool_take(&l->pool, num_slots, sizeof *l->slot_of);
    l->live_units = s1f_pool_take(&l->pool, (size_t)shape->num_stages, sizeof *l->live_units);
    return s1f_pool_status(&l->pool, "the messages of an order");
}

static void reset_counters(const lowering *l)
{
    memset(l->counted, 0, (size_t)l->program->edges->num_edges * sizeof *l->counted);
}

static s1f_status lower(lowering *l, const s1f_places *places, int32_t rank)
{
    S1F_TRY(create_lowering(l));
    number_messages(l);
    reset_counters(l);
    count_needed_places(l);
    S1F_TRY(give_places(l, places));
    reset_counters(l);
    place_messages(l);
    reset_counters(l);
    for (int32_t own = 0; own < l->program->shape.num_ranks; own++)
        if (rank == S1F_ALL_RANKS || rank == own)
            S1F_TRY(write_program(l, own));
    return S1F_OK;
}

s1f_status s1f_schedule_lower(const s1f_schedule *schedule, s1f_places places, int32_t rank, s1f_program **out)
{
    int32_t num_ranks = s1f_schedule_shape(schedule).num_ranks;
    if (rank < S1F_NO_RANK || rank >= num_ranks)
        return s1f_fail(S1F_ERR_ARG, "rank is %d, must be in 0..%d", (int)rank, (int)num_ranks - 1);
    if (!places.by_time && places.prefetch < 0)
        return s1f_fail(S1F_ERR_ARG, "prefetch is %d, must be at least 0", (int)places.prefetch);
    lowering l = {.program = NULL};
    S1F_TRY(s1f_schedule_check(schedule, 0));
    S1F_TRY(s1f_program_create(schedule, &l.program));
    s1f_status status = lower(&l, &places, rank);
    s1f_pool_free(&l.pool);
    if (status == S1F_OK)
        *out = l.program;
    else
        s1f_program_free(l.program);
    return status;
}
