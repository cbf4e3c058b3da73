/* simulate.c - walks the orders of all ranks, each as far as its messages and credits go. */
#include "simulate.h"

#include <math.h>
#include <stdlib.h>

/* One directed edge. Messages are numbered over all steps; message n is kept at n % window. */
typedef struct {
    double *posted, *arrived; /* [window] seconds */
    int64_t mask;             /* window - 1 */
    int64_t num_posted, num_sent;
    int64_t first, num_messages; /* of the receiver's step */
    double link_free;            /* when the link has passed its last message */
    double latency, seconds_per_byte;
    int32_t source_rank, destination_rank, num_places;
    int32_t receiver_waits, sender_waits; /* the rank stands before the next message, or before a place for it */
    int32_t next_incoming;                /* edge into the same rank, -1 ends */
} link;

typedef struct {
    s1f_tape_reader reader;
    double now, busy, wait, first_start, last_end;
    int64_t num_run; /* units of this step that have run */
    uint64_t random;
    int32_t step;
    int32_t has_run;                  /* the reader's next unit has, and waits for its credit */
    int32_t in_pair;                  /* the unit after the one that has run last ran with it */
    int32_t causes, causes_of_second; /* of the unit that runs, and of the next one of its pair */
    int32_t first_incoming;
    const double *seconds;   /* [i], where given by number */
    double *start, *end;     /* [i] of the first step, NULL: not kept */
    unsigned char *recorded; /* [i] causes, the same */
} rank_state;

typedef struct {
    const s1f_tape *tape;
    const s1f_costs *costs;
    int32_t num_steps;
    double *kind_seconds;  /* [kind][segment], where given by what a unit is */
    double *message_bytes; /* [segment] */
    link *links;           /* [edge] */
    rank_state *ranks;     /* [rank] */
    int32_t *queue;        /* ranks that can go on: each at most once, as a rank waits for one thing */
    int32_t num_queued;
    int32_t num_through; /* ranks that wait for the others before their optimizer */
    double *step_end;    /* [step] last end of a unit */
    int64_t num_completed;
    s1f_simulation *simulation;
} simulator;

static s1f_status require_cost(const char *name, double value)
{
    if (!(value >= 0) || !isfinite(value))
        return s1f_fail(S1F_ERR_ARG, "%s is %g, must be finite and at least 0", name, value);
    return S1F_OK;
}

/* -- walking ------------------------------------------------------------------------------------------------------- */

/* splitmix64 [Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014]: 53 bits of 0 .. 1. */
static double draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

int32_t s1f_edge_boundary(const s1f_edge *edge)
{
    return edge->is_gradient ? edge->destination_stage : edge->source_stage;
}

/* splitmix64 goes from state to state by a constant: draw n is reached at once. */
double s1f_message_scale(const s1f_tape *tape, const s1f_costs *costs, int32_t edge, int64_t message)
{
    if (!(costs->transfer_jitter > 0))
        return 1;
    const s1f_edge *e = &tape->edges[edge];
    uint64_t stream = (uint64_t)tape->num_ranks + 2 * (uint64_t)s1f_edge_boundary(e) + (uint64_t)e->is_gradient;
    uint64_t state = costs->seed + stream * 0xd1342543de82ef95u + (uint64_t)message * 0x9e3779b97f4a7c15u;
    return 1 + costs->transfer_jitter * (2 * draw(&state) - 1);
}

static void wake(simulator *s, int32_t rank)
{
    s->queue[s->num_queued++] = rank;
}

/* A place of the receiver is free; once all messages of its step are posted it stays empty. */
static void post(simulator *s, link *l, double now)
{
    if (l->num_posted == l->first + l->num_messages)
        return;
    l->posted[l->num_posted++ & l->mask] = now;
    if (l->sender_waits) {
        l->sender_waits = 0;
        wake(s, l->source_rank);
    }
}

static void begin_step(simulator *s, int32_t rank)
{
    rank_state *r = &s->ranks[rank];
    s1f_tape_rewind(s->tape, rank, &r->reader);
    r->num_run = 0;
    for (int32_t e = r->first_incoming; e >= 0; e = s->links[e].next_incoming) {
        s->links[e].first = r->step * s->links[e].num_messages;
        for (int32_t place = 0; place < s->links[e].num_places; place++)
            post(s, &s->links[e], r->now);
    }
}

static void run_optimizer(simulator *s, int32_t rank)
{
    if (s->costs->optimizer != NULL)
        s->ranks[rank].now += s->costs->optimizer[rank];
    begin_step(s, rank);
}

/* The rank is through with its order. 1: it goes on with the next step. */
static int end_step(simulator *s, int32_t rank)
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
        return 0;
    if (!s->costs->optimizer_sync) {
        run_optimizer(s, rank);
        return 1;
    }
    if (++s->num_through < s->tape->num_ranks)
        return 0;
    s->num_through = 0;
    double all_through = 0;
    for (int32_t other = 0; other < s->tape->num_ranks; other++)
        all_through = s->ranks[other].now > all_through ? s->ranks[other].now : all_through;
    for (int32_t other = 0; other < s->tape->num_ranks; other++) {
        s->ranks[other].now = all_through;
        run_optimizer(s, other);
        if (other != rank)
            wake(s, other);
    }
    return 1;
}

/* Seconds of the next unit of a rank. */
static double duration(const simulator *s, rank_state *r, const s1f_tape_unit *unit)
{
    double seconds = r->seconds != NULL ? r->seconds[r->num_run]
                                        : s->kind_seconds[(int64_t)unit->kind * s->tape->num_segments + unit->segment];
    if (s->costs->jitter > 0)
        seconds *= 1 + s->costs->jitter * (2 * draw(&r->random) - 1);
    if (r->num_run == 0)
        r->first_start = r->now;
    if (r->start != NULL)
        r->start[r->num_run] = r->now;
    r->num_run++;
    return seconds;
}

/* Runs a unit, or the two of a pair together. */
static void run_units(const simulator *s, rank_state *r, const s1f_tape_unit *unit)
{
    double seconds = duration(s, r, unit);
    if (unit->is_pair) {
        double forward = seconds, backward = duration(s, r, unit + 1);
        seconds = forward + backward - s->costs->overlap * fmin(forward, backward);
    }
    r->now += seconds;
    r->busy += seconds;
    r->last_end = r->now;
    for (int64_t i = r->num_run - 1 - unit->is_pair; r->end != NULL && i < r->num_run; i++)
        r->end[i] = r->now;
}

static void wait_until(rank_state *r, double time, int32_t cause)
{
    if (time > r->now) {
        r->wait += time - r->now;
        r->now = time;
        r->causes |= cause;
    }
}

/* Puts the message of the unit that has run on its link. */
static void send(simulator *s, rank_state *r, link *l, int32_t segment)
{
    wait_until(r, l->posted[l->num_sent & l->mask], S1F_CAUSE_CREDIT);
    r->now += s->costs->send;
    if (l->link_free > r->now)
        r->causes |= S1F_CAUSE_LINK;
    double scale = s1f_message_scale(s->tape, s->costs, (int32_t)(l - s->links), l->num_sent);
    double transfer = scale * (s->message_bytes[segment] * l->seconds_per_byte);
    l->link_free = (l->link_free > r->now ? l->link_free : r->now) + transfer;
    l->arrived[l->num_sent++ & l->mask] = l->link_free + scale * l->latency;
    if (l->receiver_waits) {
        l->receiver_waits = 0;
        wake(s, l->destination_rank);
    }
}

/* Whether the message of a unit has come; if not the rank is woken with the next one. */
static int has_input(simulator *s, const s1f_tape_unit *unit)
{
    int32_t edge = s->tape->kinds[unit->kind].in;
    if (edge < 0 || s->links[edge].num_sent > s->links[edge].first + unit->awaited)
        return 1;
    s->links[edge].receiver_waits = 1;
    return 0;
}

static void take_input(simulator *s, rank_state *r, const s1f_tape_unit *unit)
{
    int32_t edge = s->tape->kinds[unit->kind].in;
    if (edge < 0)
        return;
    const link *in = &s->links[edge];
    wait_until(r, in->arrived[(in->first + unit->awaited) & in->mask], S1F_CAUSE_MESSAGE);
}

/* Runs the next unit, or pair. 0: an input is not there yet. */
static int start(simulator *s, rank_state *r, const s1f_tape_unit *unit)
{
    if (!has_input(s, unit) || (unit->is_pair && !has_input(s, unit + 1)))
        return 0;
    take_input(s, r, unit);
    if (unit->is_pair) { /* the later message is the cause */
        int32_t of_first = r->causes;
        r->causes = 0;
        take_input(s, r, unit + 1);
        r->causes_of_second = r->causes;
        r->causes = r->causes_of_second != 0 ? 0 : of_first;
        r->in_pair = 1;
    }
    run_units(s, r, unit);
    return 1;
}

/* Runs units of one rank until it has to wait for another rank. */
static void advance(simulator *s, int32_t rank)
{
    rank_state *r = &s->ranks[rank];
    for (;;) {
        if (r->reader.next == r->reader.end && !s1f_tape_refill(s->tape, rank, &r->reader)) {
            if (!end_step(s, rank))
                return;
            continue;
        }
        const s1f_tape_unit *unit = r->reader.next;
        const s1f_tape_kind *kind = &s->tape->kinds[unit->kind];
        if (!r->has_run) {
            r->causes = 0;
            if (r->in_pair) { /* it ran with the unit before it */
                r->causes = r->causes_of_second;
                r->in_pair = 0;
            } else if (!start(s, r, unit)) {
                return;
            }
        }
        if (kind->out >= 0) {
            link *out = &s->links[kind->out];
            if (out->num_sent == out->num_posted) {
                r->has_run = 1;
                out->sender_waits = 1;
                return;
            }
            send(s, r, out, unit->segment);
        }
        r->has_run = 0;
        for (int i = 0; i < 2; i++)
            if (kind->posts[i] >= 0)
                post(s, &s->links[kind->posts[i]], r->now);
        if (r->recorded != NULL) {
            r->recorded[r->num_run - 1 - r->in_pair] = (unsigned char)r->causes;
            s->simulation->completed[s->num_completed++] = rank;
        }
        r->reader.next++;
    }
}

/* Rarely enough to cost nothing, and many times a second: a turn is a unit or a few. */
enum { TURNS_PER_REPORT = 1 << 17 };

static s1f_status report(const simulator *s)
{
    int64_t num_run = 0;
    for (int32_t rank = 0; rank < s->tape->num_ranks; rank++) {
        const rank_state *r = &s->ranks[rank];
        num_run += r->step * s->tape->num_units[rank] + (r->step < s->num_steps ? r->num_run : 0);
    }
    return s->costs->progress(s->costs->progress_context, num_run);
}

static s1f_status run_all(simulator *s)
{
    int32_t num_ranks = s->tape->num_ranks;
    for (int32_t rank = num_ranks - 1; rank >= 0; rank--) {
        begin_step(s, rank);
        wake(s, rank);
    }
    for (int64_t turns = 1; s->num_queued > 0; turns++) {
        advance(s, s->queue[--s->num_queued]);
        if (s->costs->progress != NULL && turns % TURNS_PER_REPORT == 0) {
            s1f_status status = report(s);
            if (status != S1F_OK)
                return status;
        }
    }
    for (int32_t rank = 0; rank < num_ranks; rank++)
        if (s->ranks[rank].step < s->num_steps) /* lowering leaves no cycle */
            return s1f_fail(S1F_ERR_STATE, "the order of rank %d stops at unit %lld of %lld", rank,
                            (long long)s->ranks[rank].num_run, (long long)s->tape->num_units[rank]);
    if (!isfinite(s->step_end[s->num_steps - 1]))
        return s1f_fail(S1F_ERR_ARG, "the end of the last step is %g: the costs sum to more than a double holds",
                        s->step_end[s->num_steps - 1]);
    s->simulation->makespan = s->step_end[0]; /* the first start is 0: some unit waits for nobody */
    if (s->num_steps > 1)
        s->simulation->period = (s->step_end[s->num_steps - 1] - s->step_end[0]) / (s->num_steps - 1);
    return S1F_OK;
}

/* -- preparing ------------------------------------------------------------------------------------------------------ */

static s1f_status check_costs(const s1f_tape *tape, const s1f_costs *costs)
{
    s1f_status status;
    for (int32_t s = 0; s + 1 < tape->num_stages; s++)
        if ((costs->latency != NULL &&
             (status = require_cost("the latency of a transfer", costs->latency[s])) != S1F_OK) ||
            (costs->seconds_per_byte != NULL &&
             (status = require_cost("the time per byte", costs->seconds_per_byte[s])) != S1F_OK))
            return status;
    if ((status = require_cost("the time of a send", costs->send)) != S1F_OK)
        return status;
    if (!(costs->overlap >= 0 && costs->overlap <= 1))
        return s1f_fail(S1F_ERR_ARG, "overlap is %g, must be in 0..1", costs->overlap);
    if (!(costs->jitter >= 0 && costs->jitter <= 1))
        return s1f_fail(S1F_ERR_ARG, "jitter is %g, must be in 0..1: a share of a unit's seconds", costs->jitter);
    if (!(costs->transfer_jitter >= 0 && costs->transfer_jitter <= 1))
        return s1f_fail(S1F_ERR_ARG, "transfer_jitter is %g, must be in 0..1: a share of a message's seconds",
                        costs->transfer_jitter);
    if (costs->num_steps < 0)
        return s1f_fail(S1F_ERR_ARG, "steps is %d, must be at least 1", costs->num_steps);
    for (int32_t rank = 0; costs->optimizer != NULL && rank < tape->num_ranks; rank++)
        if ((status = require_cost("the time of an optimizer", costs->optimizer[rank])) != S1F_OK)
            return status;
    for (int32_t segment = 0; costs->message_bytes != NULL && segment < tape->num_segments; segment++)
        if (costs->message_bytes[segment] < 0)
            return s1f_fail(S1F_ERR_ARG, "message_bytes of segment %d is %lld, must be at least 0", segment,
                            (long long)costs->message_bytes[segment]);
    for (int32_t rank = 0; costs->unit_seconds != NULL && rank < tape->num_ranks; rank++)
        for (int64_t i = 0; i < tape->num_units[rank]; i++)
            if ((status = require_cost("the duration of a unit", costs->unit_seconds[rank][i])) != S1F_OK)
                return status;
    return S1F_OK;
}

/* The tables that the walk looks into. */
static s1f_status fill_seconds(simulator *s)
{
    const s1f_tape *tape = s->tape;
    int32_t k = tape->num_segments;
    for (int32_t segment = 0; segment < k; segment++)
        s->message_bytes[segment] = s->costs->message_bytes == NULL ? 0 : (double)s->costs->message_bytes[segment];
    for (int32_t kind = 0; s->kind_seconds != NULL && kind < tape->num_stages * S1F_NUM_PASSES; kind++)
        for (int32_t segment = 0; tape->kinds[kind].num_units > 0 && segment < k; segment++) {
            const double *of_pass = s->costs->pass_seconds[kind % S1F_NUM_PASSES];
            double seconds = of_pass[(int64_t)(kind / S1F_NUM_PASSES) * k + segment];
            s1f_status status = require_cost("the duration of a unit", seconds);
            if (status != S1F_OK)
                return status;
            s->kind_seconds[(int64_t)kind * k + segment] = seconds;
        }
    return S1F_OK;
}

static int create_links(simulator *s)
{
    for (int32_t e = 0; e < s->tape->num_edges; e++) {
        const s1f_edge *edge = &s->tape->edges[e];
        link *l = &s->links[e];
        *l = (link){
            .mask = s->tape->window[e] - 1,
            .num_messages = edge->num_messages,
            .source_rank = edge->source_rank,
            .destination_rank = edge->destination_rank,
            .num_places = edge->num_places,
            .latency = s->costs->latency == NULL ? 0 : s->costs->latency[s1f_edge_boundary(edge)],
            .seconds_per_byte =
                s->costs->seconds_per_byte == NULL ? 0 : s->costs->seconds_per_byte[s1f_edge_boundary(edge)],
            .next_incoming = s->ranks[edge->destination_rank].first_incoming,
        };
        s->ranks[edge->destination_rank].first_incoming = e;
        l->posted = malloc((size_t)s->tape->window[e] * sizeof *l->posted);
        l->arrived = malloc((size_t)s->tape->window[e] * sizeof *l->arrived);
        if (l->posted == NULL || l->arrived == NULL)
            return 0;
    }
    return 1;
}

static int create_arrays(simulator *s)
{
    const s1f_tape *tape = s->tape;
    size_t num_ranks = (size_t)tape->num_ranks, num_cells = (size_t)tape->num_stages * (size_t)tape->num_segments;
    s->links = calloc((size_t)tape->num_edges + 1, sizeof *s->links); /* + 1: calloc(0) may be NULL */
    s->ranks = calloc(num_ranks, sizeof *s->ranks);
    s->queue = calloc(num_ranks, sizeof *s->queue);
    s->step_end = calloc((size_t)s->num_steps, sizeof *s->step_end);
    s->message_bytes = calloc((size_t)tape->num_segments, sizeof *s->message_bytes);
    if (!s->links || !s->ranks || !s->queue || !s->step_end || !s->message_bytes)
        return 0;
    if (s->costs->unit_seconds == NULL &&
        (s->kind_seconds = calloc(num_cells, S1F_NUM_PASSES * sizeof *s->kind_seconds)) == NULL)
        return 0;
    for (int32_t rank = 0; rank < tape->num_ranks; rank++) {
        rank_state *r = &s->ranks[rank];
        r->first_incoming = -1;
        r->random = s->costs->seed + (uint64_t)rank * 0xd1342543de82ef95u;
        r->seconds = s->costs->unit_seconds != NULL ? s->costs->unit_seconds[rank] : NULL;
        r->start = s->simulation->start != NULL ? s->simulation->start[rank] : NULL;
        r->end = s->simulation->end != NULL ? s->simulation->end[rank] : NULL;
        r->recorded = s->simulation->causes != NULL ? s->simulation->causes[rank] : NULL;
    }
    return create_links(s);
}

static int create_timeline(s1f_simulation *simulation, s1f_keep keep)
{
    size_t num_ranks = (size_t)simulation->num_ranks;
    int64_t total = 0;
    simulation->start = calloc(num_ranks, sizeof *simulation->start);
    simulation->end = calloc(num_ranks, sizeof *simulation->end);
    if (simulation->start == NULL || simulation->end == NULL)
        return 0;
    if (keep >= S1F_KEEP_CAUSES && (simulation->causes = calloc(num_ranks, sizeof *simulation->causes)) == NULL)
        return 0;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++) {
        int64_t num_units = simulation->num_units[rank];
        total += num_units;
        simulation->start[rank] = malloc((size_t)num_units * sizeof **simulation->start);
        simulation->end[rank] = malloc((size_t)num_units * sizeof **simulation->end);
        if (simulation->start[rank] == NULL || simulation->end[rank] == NULL)
            return 0;
        if (keep >= S1F_KEEP_CAUSES && (simulation->causes[rank] = malloc((size_t)num_units)) == NULL)
            return 0;
    }
    return keep < S1F_KEEP_CAUSES ||
           (simulation->completed = malloc((size_t)total * sizeof *simulation->completed)) != NULL;
}

static s1f_status create_simulation(const s1f_tape *tape, s1f_keep keep, s1f_simulation **out)
{
    s1f_simulation *simulation = calloc(1, sizeof *simulation);
    size_t num_ranks = (size_t)tape->num_ranks;
    if (simulation == NULL)
        goto no_memory;
    simulation->num_ranks = tape->num_ranks;
    simulation->span = calloc(num_ranks, sizeof *simulation->span);
    simulation->busy = calloc(num_ranks, sizeof *simulation->busy);
    simulation->wait = calloc(num_ranks, sizeof *simulation->wait);
    simulation->num_units = calloc(num_ranks, sizeof *simulation->num_units);
    if (!simulation->span || !simulation->busy || !simulation->wait || !simulation->num_units)
        goto no_memory;
    for (int32_t rank = 0; rank < tape->num_ranks; rank++)
        simulation->num_units[rank] = tape->num_units[rank];
    if (keep >= S1F_KEEP_TIMELINE && !create_timeline(simulation, keep))
        goto no_memory;
    *out = simulation;
    return S1F_OK;

no_memory:
    s1f_simulation_free(simulation);
    return s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %zu ranks", num_ranks);
}

s1f_status s1f_tape_simulate(const s1f_tape *tape, const s1f_costs *costs, s1f_keep keep, s1f_simulation **out)
{
    simulator s = {.tape = tape, .costs = costs, .num_steps = costs->num_steps > 0 ? costs->num_steps : 1};
    s1f_status status = check_costs(tape, costs);
    if (status != S1F_OK || (status = create_simulation(tape, keep, &s.simulation)) != S1F_OK)
        return status;
    if (!create_arrays(&s))
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %d ranks", tape->num_ranks);
    if (status == S1F_OK && (status = fill_seconds(&s)) == S1F_OK && (status = run_all(&s)) == S1F_OK) {
        *out = s.simulation;
        s.simulation = NULL;
    }
    for (int32_t e = 0; s.links != NULL && e < tape->num_edges; e++) {
        free(s.links[e].posted);
        free(s.links[e].arrived);
    }
    free(s.message_bytes);
    free(s.kind_seconds);
    free(s.step_end);
    free(s.queue);
    free(s.ranks);
    free(s.links);
    s1f_simulation_free(s.simulation);
    return status;
}

s1f_status s1f_program_simulate(const s1f_program *program, const s1f_costs *costs, s1f_simulation **out)
{
    s1f_tape *tape = NULL;
    s1f_status status = s1f_tape_of_program(program, &tape);
    if (status == S1F_OK)
        status = s1f_tape_simulate(tape, costs, S1F_KEEP_TIMELINE, out);
    s1f_tape_free(tape);
    return status;
}

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
    free_rows(simulation->start, simulation->num_ranks);
    free_rows(simulation->end, simulation->num_ranks);
    free_rows(simulation->causes, simulation->num_ranks);
    free_rows(simulation->slack, simulation->num_ranks);
    free(simulation->path);
    free(simulation->completed);
    free(simulation->num_units);
    free(simulation->wait);
    free(simulation->busy);
    free(simulation->span);
    free(simulation);
}
