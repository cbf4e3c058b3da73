/* simulate.c - walks the orders of all ranks, each as far as its messages and credits go. */
#include "simulate.h"

#include "../core/walk.h"

#include <math.h>
#include <stdlib.h>

/* One directed edge. Messages are numbered over all steps. A place holds one message at a time, so message n +
 * num_places is posted after n has been sent: the times of posts lie in a ring. */
typedef struct {
    double *posted;  /* [n & mask] seconds */
    double *arrived; /* [n & mask] seconds, or [cell] where the receiver uses messages in another order; NOT_COME before
                         the message is sent and after it is used */
    int64_t mask;    /* a power of two, at least num_places, less 1 */
    int64_t num_used; /* messages that the receiver has used */
    int32_t is_in_order;
    double link_free; /* when the link has passed its last message */
    s1f_link_costs costs;
    int32_t next_incoming; /* edge into the same rank, -1 ends */
} link;

typedef struct {
    const s1f_unit *units;
    int64_t num_units;
    double now, busy, wait, first_start, last_end;
    uint64_t random;
    int32_t step;
    int32_t causes; /* of the unit that runs */
    int32_t first_incoming;
    const double *seconds;    /* [i], where given by number */
    s1f_late_weight *weights; /* that may fill waits, NULL: none */
    int64_t num_weights;
    int64_t next_own;        /* of weights: whose place comes next */
    int64_t next_fill;       /* of weights: that fills the next wait */
    double filled;           /* seconds of it that have run */
    double tier_free;        /* when the tier has moved all that it was given */
    double *start, *end;     /* [i] of the first step, NULL: not kept */
    unsigned char *recorded; /* [i] causes, the same */
} rank_state;

typedef struct {
    const s1f_program *program;
    const s1f_costs *costs;
    s1f_walk walk;
    s1f_pool pool; /* of all arrays */
    int32_t num_steps;
    int64_t num_columns;  /* s1f_column */
    double *kind_seconds; /* [kind][column], where given by what a unit is */
    double *tier_end;     /* [cell of all stages]: when the tier has moved its unit, out or back; NULL: at once */
    link *links;          /* [edge] */
    rank_state *ranks;    /* [rank] */
    int32_t num_through;  /* ranks that wait for the others before their optimizer */
    double *step_end;     /* [step] last end of a unit */
    int64_t num_completed;
    s1f_simulation *simulation;
} simulator;

static const double NOT_COME = -1;

/* -- walking ------------------------------------------------------------------------------------------------------- */

/* splitmix64 [Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014]: 53 bits of 0 .. 1. */
static double draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* splitmix64 goes from state to state by a constant: draw n is reached at once. */
double s1f_message_scale(const s1f_program *program, const s1f_costs *costs, int32_t edge, int64_t message)
{
    if (!(costs->transfer_jitter > 0))
        return 1;
    const s1f_edge *e = &program->edges->edges[edge];
    int64_t behind = e->channel > S1F_CHANNEL_GRADIENT ? e->channel - S1F_CHANNEL_GRADIENT : 0;
    int64_t stream = program->shape.num_ranks + 2 * (int64_t)s1f_edge_boundary(e) +
                     (e->destination_stage < e->source_stage) + 2 * behind * program->shape.num_stages;
    uint64_t state = costs->seed + (uint64_t)stream * 0xd1342543de82ef95u + (uint64_t)message * 0x9e3779b97f4a7c15u;
    return 1 + costs->transfer_jitter * (2 * draw(&state) - 1);
}

static inline double *arrival(const link *l, int64_t number, int64_t cell)
{
    return &l->arrived[l->is_in_order ? number & l->mask : cell];
}

static inline int has_come(void *context, const s1f_stand *at, int32_t edge)
{
    const simulator *s = context;
    return *arrival(&s->links[edge], s->links[edge].num_used, at->cell) >= 0;
}

/* Extras are jitter, seconds by number, Ws in waits, a tier, and causes to keep. Whether there are any is a constant in
 * each copy of the walk, so that the plain one does nothing for them. */
static inline void wait_until(rank_state *r, const int extras, double time, int32_t cause)
{
    if (time > r->now) {
        r->wait += time - r->now;
        r->now = time;
        if (extras)
            r->causes |= cause;
    }
}

static inline double seconds_of(const simulator *s, const rank_state *r, const int extras, int64_t i, uint64_t *random)
{
    s1f_unit unit = r->units[i];
    double seconds = extras && r->seconds != NULL
                         ? r->seconds[i]
                         : s->kind_seconds[s1f_kind(unit) * s->num_columns + s1f_column(&s->walk.shape, unit)];
    if (extras && s->costs->jitter > 0)
        seconds *= 1 + s->costs->jitter * (2 * draw(random) - 1);
    return seconds;
}

/* Runs Ws until the message of unit i comes. splitmix64 goes from state to state by a constant. */
static void fill_until(const simulator *s, rank_state *r, int64_t i, double time)
{
    while (r->now < time && r->next_fill < r->num_weights && r->weights[r->next_fill].ready < i) {
        int64_t w = r->weights[r->next_fill].run;
        uint64_t random = r->random + (uint64_t)(w - i) * 0x9e3779b97f4a7c15u;
        double left = seconds_of(s, r, 1, w, &random) - r->filled, part = fmin(left, time - r->now);
        r->now += part;
        r->busy += part;
        r->filled += part;
        if (part < left)
            return;
        r->next_fill++;
        r->filled = 0;
    }
}

/* Seconds of unit i less those that have filled waits. */
static double left_of(rank_state *r, int64_t i, double seconds)
{
    if (r->next_own == r->num_weights || r->weights[r->next_own].run != i)
        return seconds;
    if (r->next_own++ < r->next_fill)
        return 0;
    seconds -= r->filled;
    r->next_fill++;
    r->filled = 0;
    return fmax(seconds, 0);
}

/* The tier of a rank moves one unit at a time, in the order of its Os and Ls. */
static void start_tier(const simulator *s, rank_state *r, s1f_unit unit)
{
    if (!s1f_pass_makes(unit.pass, S1F_PRODUCT_LEAVING) && !s1f_pass_makes(unit.pass, S1F_PRODUCT_COMING))
        return;
    double seconds = s->costs->tier_seconds[s1f_column_of_all(&s->walk.shape, unit)];
    r->tier_free = fmax(r->now, r->tier_free) + seconds;
    s->tier_end[s1f_cell_of_all(&s->walk.shape, unit)] = r->tier_free;
}

static inline void run(simulator *s, const int extras, const s1f_stand *at)
{
    rank_state *r = &s->ranks[at->rank];
    int64_t i = at->unit - r->units;
    if (extras)
        r->causes = 0;
    for (int32_t e = 0; e < at->uses->in.count; e++) {
        link *l = &s->links[at->uses->in.edges[e]];
        double *arrived = arrival(l, l->num_used++, at->cell);
        if (extras && r->weights != NULL)
            fill_until(s, r, i, *arrived);
        wait_until(r, extras, *arrived, S1F_CAUSE_MESSAGE);
        *arrived = NOT_COME;
    }
    if (extras && s->tier_end != NULL &&
        (s1f_pass_makes(at->unit->pass, S1F_PRODUCT_AWAY) || s1f_reads_moved(&s->walk.shape, *at->unit)))
        wait_until(r, 1, s->tier_end[s1f_cell_of_all(&s->walk.shape, *at->unit)], 0);
    double seconds = seconds_of(s, r, extras, i, &r->random);
    if (extras && r->weights != NULL)
        seconds = left_of(r, i, seconds);
    if (i == 0)
        r->first_start = r->now;
    double begin = r->now;
    r->now += seconds;
    r->busy += seconds;
    r->last_end = r->now;
    if (extras && s->tier_end != NULL)
        start_tier(s, r, *at->unit);
    if (r->start != NULL) {
        r->start[i] = begin;
        r->end[i] = r->now;
        __builtin_prefetch(&r->start[i + 8], 1); /* the next cache line, to write; as in walk.h */
        __builtin_prefetch(&r->end[i + 8], 1);
    }
}

/* Puts the message of the unit that has run on its link. */
static inline void send(simulator *s, const int extras, const s1f_stand *at, int32_t edge)
{
    rank_state *r = &s->ranks[at->rank];
    link *l = &s->links[edge];
    int64_t number = s->walk.links[edge].num_sent;
    wait_until(r, extras, l->posted[number & l->mask], S1F_CAUSE_CREDIT);
    r->now += s->costs->send;
    if (extras && l->link_free > r->now)
        r->causes |= S1F_CAUSE_LINK;
    double scale = extras ? s1f_message_scale(s->program, s->costs, edge, number) : 1;
    double transfer = scale * s1f_transfer_seconds(&l->costs, s1f_column(&s->walk.shape, *at->unit));
    l->link_free = (l->link_free > r->now ? l->link_free : r->now) + transfer;
    *arrival(l, number, at->cell) = l->link_free + scale * l->costs.latency;
}

static inline void post(void *context, int32_t rank, int32_t edge)
{
    simulator *s = context;
    link *l = &s->links[edge];
    l->posted[(s->walk.links[edge].num_posted - 1) & l->mask] = s->ranks[rank].now;
}

static inline void record(void *context, const s1f_stand *at)
{
    simulator *s = context;
    rank_state *r = &s->ranks[at->rank];
    if (r->recorded != NULL) {
        r->recorded[at->unit - r->units] = (unsigned char)r->causes;
        s->simulation->completed[s->num_completed++] = at->rank;
    }
}

/* A copy of the walk: go_NAME lets one rank go on until it waits, or ends its list (1). */
#define DEFINE_WALK(NAME, EXTRAS)                                                                                      \
    static inline void run_##NAME(void *context, const s1f_stand *at)                                                  \
    {                                                                                                                  \
        run(context, EXTRAS, at);                                                                                      \
    }                                                                                                                  \
    static inline void send_##NAME(void *context, const s1f_stand *at, int32_t edge)                                   \
    {                                                                                                                  \
        send(context, EXTRAS, at, edge);                                                                               \
    }                                                                                                                  \
    static int go_##NAME(simulator *s, int32_t rank)                                                                   \
    {                                                                                                                  \
        return s1f_walk_go(&s->walk, rank,                                                                             \
                           (s1f_walk_rules){.has_come = has_come,                                                      \
                                            .with_credits = 1,                                                         \
                                            .run = run_##NAME,                                                         \
                                            .send = send_##NAME,                                                       \
                                            .post = post,                                                              \
                                            .through = (EXTRAS) ? record : NULL},                                      \
                           s);                                                                                         \
    }
DEFINE_WALK(plain, 0)
DEFINE_WALK(whole, 1)

/* -- steps --------------------------------------------------------------------------------------------------------- */

static void begin_step(simulator *s, int32_t rank)
{
    rank_state *r = &s->ranks[rank];
    s1f_walk_begin(&s->walk, s->program->schedule, rank);
    r->next_own = r->next_fill = 0;
    r->filled = 0;
    for (int32_t e = r->first_incoming; e >= 0; e = s->links[e].next_incoming) {
        const s1f_edge *edge = &s->program->edges->edges[e];
        s->walk.links[e].most_posted = (r->step + 1) * edge->num_messages;
        for (int32_t place = 0; place < edge->num_places; place++)
            s1f_walk_post(&s->walk, rank, e, (s1f_walk_rules){.post = post}, s);
    }
}

static void run_optimizer(simulator *s, int32_t rank)
{
    if (s->costs->optimizer != NULL)
        s->ranks[rank].now += s->costs->optimizer[rank];
    begin_step(s, rank);
    s1f_walk_wake(&s->walk, rank);
}

/* The rank is through with its order; it goes on with the next step, or all ranks do. */
static void end_step(simulator *s, int32_t rank)
{
    rank_state *r = &s->ranks[rank];
    if (r->step == 0) {
        s->simulation->span[rank] = r->last_end - r->first_start;
        s->simulation->busy[rank] = r->busy;
        s->simulation->wait[rank] = r->wait;
        r->start = r->end = NULL;
        r->recorded = NULL;
    }
    if (r->last_end > s->step_end[r->step])
        s->step_end[r->step] = r->last_end;
    if (++r->step == s->num_steps)
        return;
    if (!s->costs->optimizer_sync) {
        run_optimizer(s, rank);
        return;
    }
    if (++s->num_through < s->walk.shape.num_ranks)
        return;
    s->num_through = 0;
    double all_through = 0;
    for (int32_t other = 0; other < s->walk.shape.num_ranks; other++)
        all_through = s->ranks[other].now > all_through ? s->ranks[other].now : all_through;
    for (int32_t other = 0; other < s->walk.shape.num_ranks; other++) {
        s->ranks[other].now = all_through;
        run_optimizer(s, other);
    }
}

/* Rarely enough to cost nothing, and many times a second: a turn is a unit or a few. */
enum { TURNS_PER_CHECK = 1 << 17 };

static s1f_status run_all(simulator *s)
{
    int32_t num_ranks = s->walk.shape.num_ranks;
    const s1f_costs *costs = s->costs;
    int has_extras = costs->unit_seconds != NULL || costs->fills || costs->tier_seconds != NULL || costs->jitter > 0 ||
                     costs->transfer_jitter > 0 || s->simulation->causes != NULL;
    for (int32_t rank = 0; rank < num_ranks; rank++)
        begin_step(s, rank);
    for (int64_t turns = 1; s->walk.num_ready > 0; turns++) {
        int32_t rank = s->walk.ready[--s->walk.num_ready];
        if (has_extras ? go_whole(s, rank) : go_plain(s, rank))
            end_step(s, rank);
        if (turns % TURNS_PER_CHECK == 0)
            S1F_TRY(s1f_check_interrupted());
    }
    if (!isfinite(s->step_end[s->num_steps - 1]))
        return s1f_fail(S1F_ERR_ARG, "the end of the last step is %g: the costs sum to more than a double holds",
                        s->step_end[s->num_steps - 1]);
    s->simulation->makespan = s->step_end[0]; /* the first start is 0: some unit waits for nobody */
    if (s->num_steps > 1)
        s->simulation->period = (s->step_end[s->num_steps - 1] - s->step_end[0]) / (s->num_steps - 1);
    return S1F_OK;
}

/* -- what it tells ------------------------------------------------------------------------------------------------- */

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

/* All times lie in one block: malloc gives large blocks back to the system, and the next simulation would have each
 * page cleared anew. */
static s1f_status create_simulation(const s1f_program *program, int with_causes, s1f_simulation **out)
{
    size_t num_ranks = (size_t)program->shape.num_ranks, total = (size_t)s1f_program_num_units(program);
    size_t num_kept = with_causes ? 3 : 2;
    s1f_simulation *made = calloc(1, sizeof *made);
    if (made == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a simulation");
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
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a simulation");
    }
    *out = made;
    return S1F_OK;
}

void s1f_simulation_free(s1f_simulation *simulation)
{
    if (simulation == NULL)
        return;
    s1f_pool_free(&simulation->pool);
    free(simulation->times);
    free(simulation);
}

/* -- preparing ----------------------------------------------------------------------------------------------------- */

static s1f_status check_costs(const s1f_program *program, const s1f_costs *costs)
{
    const s1f_shape *shape = &program->shape;
    int64_t num_pairs = s1f_table_count(shape, S1F_PER_PAIR);
    S1F_TRY(s1f_require_seconds("the latency of a transfer is", costs->latency, num_pairs));
    S1F_TRY(s1f_require_seconds("the time per byte is", costs->seconds_per_byte, num_pairs));
    S1F_TRY(s1f_require_seconds("the time of a send is", &costs->send, 1));
    S1F_TRY(s1f_require_seconds("the time of the tier is", costs->tier_seconds, s1f_table_count(shape, S1F_PER_CELL)));
    S1F_TRY(s1f_require_seconds("the time of an optimizer is", costs->optimizer, shape->num_ranks));
    S1F_TRY(s1f_require_seconds("the duration of a unit is", costs->unit_seconds, s1f_program_num_units(program)));
    if (!(costs->jitter >= 0 && costs->jitter <= 1))
        return s1f_fail(S1F_ERR_ARG, "jitter is %g, must be in 0..1: a share of a unit's seconds", costs->jitter);
    if (!(costs->transfer_jitter >= 0 && costs->transfer_jitter <= 1))
        return s1f_fail(S1F_ERR_ARG, "transfer_jitter is %g, must be in 0..1: a share of a message's seconds",
                        costs->transfer_jitter);
    if (costs->num_steps < 0)
        return s1f_fail(S1F_ERR_ARG, "steps is %d, must be at least 1", costs->num_steps);
    S1F_TRY(s1f_require_bytes("message_bytes", costs->message_bytes, s1f_num_columns(shape), INT64_MAX));
    return s1f_require_bytes("statistics_bytes", costs->statistics_bytes, s1f_num_columns(shape), INT64_MAX);
}

/* The tables that the walk looks into; durations of passes that the order does not have may be anything. */
static s1f_status fill_seconds(simulator *s)
{
    const s1f_shape *shape = &s->program->shape;
    int64_t k = s->num_columns;
    uint32_t occurs = s1f_schedule_passes(s->program->schedule);
    for (int64_t i = 0; s->kind_seconds != NULL && i < shape->num_stages * k; i++)
        for (int32_t pass = 0; pass < s1f_num_passes; pass++) {
            const double *of_pass = s->costs->pass_seconds[pass];
            if (!(occurs >> pass & 1))
                continue;
            if (of_pass == NULL)
                return s1f_fail(S1F_ERR_ARG, "the order has units of pass %c, and no seconds are given for them",
                                s1f_pass_letter(pass));
            S1F_TRY(s1f_require_seconds("the duration of a unit is", &of_pass[i], 1));
            s->kind_seconds[(i / k * S1F_MAX_PASSES + pass) * k + i % k] = of_pass[i];
        }
    return S1F_OK;
}

static void create_links(simulator *s)
{
    for (int32_t e = 0; e < s->program->edges->num_edges; e++) {
        const s1f_edge *edge = &s->program->edges->edges[e];
        link *l = &s->links[e];
        int64_t ring = 1, num_arrivals;
        while (ring < edge->num_places)
            ring *= 2;
        num_arrivals = edge->is_in_order ? ring : edge->num_messages;
        *l = (link){
            .mask = ring - 1,
            .is_in_order = edge->is_in_order,
            .costs = s1f_link_costs_of(s->costs, edge),
            .next_incoming = s->ranks[edge->destination_rank].first_incoming,
        };
        s->ranks[edge->destination_rank].first_incoming = e;
        l->posted = s1f_pool_take(&s->pool, (size_t)ring, sizeof *l->posted);
        l->arrived = s1f_pool_take(&s->pool, (size_t)num_arrivals, sizeof *l->arrived);
        for (int64_t i = 0; l->arrived != NULL && i < num_arrivals; i++)
            l->arrived[i] = NOT_COME;
    }
}

static s1f_status create_arrays(simulator *s)
{
    const s1f_shape *shape = &s->program->shape;
    size_t num_ranks = (size_t)shape->num_ranks, num_costs = (size_t)shape->num_stages * (size_t)s->num_columns;
    s->links = s1f_pool_take(&s->pool, (size_t)s->program->edges->num_edges, sizeof *s->links);
    s->ranks = s1f_pool_take(&s->pool, num_ranks, sizeof *s->ranks);
    s->step_end = s1f_pool_take(&s->pool, (size_t)s->num_steps, sizeof *s->step_end);
    if (s->costs->unit_seconds == NULL)
        s->kind_seconds = s1f_pool_take(&s->pool, num_costs, S1F_MAX_PASSES * sizeof *s->kind_seconds);
    if (s->costs->tier_seconds != NULL)
        s->tier_end = s1f_pool_take(&s->pool, (size_t)(shape->num_stages * s1f_num_cells(shape)), sizeof *s->tier_end);
    S1F_TRY(s1f_pool_status(&s->pool, "a simulation"));
    const double *seconds = s->costs->unit_seconds;
    for (int32_t rank = 0; rank < shape->num_ranks; rank++) {
        rank_state *r = &s->ranks[rank];
        r->units = s->program->ranks[rank].units;
        r->num_units = s->program->ranks[rank].num_units;
        if (s->costs->fills)
            r->num_weights = s1f_find_late_weights(shape, r->units, r->num_units, &s->pool, &r->weights);
        r->first_incoming = -1;
        r->random = s->costs->seed + (uint64_t)rank * 0xd1342543de82ef95u;
        r->seconds = seconds;
        seconds += seconds == NULL ? 0 : r->num_units;
        r->start = s->simulation->start[rank];
        r->end = s->simulation->end[rank];
        r->recorded = s->simulation->causes != NULL ? s->simulation->causes[rank] : NULL;
    }
    create_links(s);
    return s1f_pool_status(&s->pool, "a simulation");
}

static s1f_status simulate(simulator *s, int with_causes)
{
    S1F_TRY(check_costs(s->program, s->costs));
    if (s->costs->fills && with_causes)
        return s1f_fail(S1F_ERR_ARG, "slack is not known where W fills waits: its causes are many");
    if (s->costs->tier_seconds != NULL && with_causes)
        return s1f_fail(S1F_ERR_ARG, "slack is not known where the tier takes time");
    S1F_TRY(create_simulation(s->program, with_causes, &s->simulation));
    S1F_TRY(s1f_walk_create(s->program->schedule, &s->program->shape, s->program->edges, &s->pool, &s->walk));
    S1F_TRY(create_arrays(s));
    S1F_TRY(fill_seconds(s));
    return run_all(s);
}

s1f_status s1f_program_simulate(const s1f_program *program, const s1f_costs *costs, int with_causes,
                                s1f_simulation **out)
{
    simulator s = {.program = program,
                   .costs = costs,
                   .num_steps = costs->num_steps > 0 ? costs->num_steps : 1,
                   .num_columns = s1f_num_columns(&program->shape)};
    s1f_status status = simulate(&s, with_causes);
    s1f_pool_free(&s.pool);
    if (status == S1F_OK)
        *out = s.simulation;
    else
        s1f_simulation_free(s.simulation);
    return status;
}
