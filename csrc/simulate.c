/* simulate.c - walks the programs of all ranks, each as far as its messages and credits go. */
#include "simulate.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    double *posted, *arrived;        /* [sequence] seconds */
    int64_t num_posted, num_arrived; /* how many are known */
    double link_free;                /* when the link has passed its last message */
} link;

typedef struct {
    double now;
    int64_t done;      /* instructions */
    int64_t num_units; /* that have run */
    int32_t in_pair;   /* the next RUN ran with the one before it */
    int32_t is_queued;
} rank_state;

typedef struct {
    const s1f_program *program;
    const s1f_costs *costs;
    const s1f_edge *edges;
    link *links;       /* [edge] */
    rank_state *ranks; /* [rank] */
    int32_t *queue;    /* ranks that may be able to go on; each at most once */
    int32_t num_queued;
    s1f_simulation *simulation;
} simulator;

static s1f_status require_cost(const char *name, double value)
{
    if (!(value >= 0) || !isfinite(value))
        return s1f_fail(S1F_ERR_ARG, "%s is %g, must be finite and at least 0", name, value);
    return S1F_OK;
}

static void wake(simulator *s, int32_t rank)
{
    if (s->ranks[rank].is_queued)
        return;
    s->ranks[rank].is_queued = 1;
    s->queue[s->num_queued++] = rank;
}

static void wait_until(simulator *s, int32_t rank, double time)
{
    rank_state *state = &s->ranks[rank];
    if (time > state->now) {
        s->simulation->wait[rank] += time - state->now;
        state->now = time;
    }
}

static s1f_status duration(const simulator *s, int32_t rank, int64_t i, s1f_unit unit, double *seconds)
{
    int64_t cost = (int64_t)unit.stage * s1f_program_num_segments(s->program) + unit.segment;
    *seconds =
        s->costs->unit_seconds != NULL ? s->costs->unit_seconds[rank][i] : s->costs->pass_seconds[unit.pass][cost];
    return require_cost("the duration of a unit", *seconds);
}

/* The next `count` units of a rank, 1 or a pair, take so many seconds together. */
static void run_units(simulator *s, int32_t rank, int count, double seconds)
{
    rank_state *state = &s->ranks[rank];
    for (int i = 0; i < count; i++, state->num_units++) {
        s->simulation->start[rank][state->num_units] = state->now;
        s->simulation->end[rank][state->num_units] = state->now + seconds;
    }
    state->now += seconds;
    s->simulation->busy[rank] += seconds;
}

static s1f_status run_unit(simulator *s, int32_t rank, s1f_unit unit)
{
    double seconds;
    s1f_status status = duration(s, rank, s->ranks[rank].num_units, unit, &seconds);
    if (status == S1F_OK)
        run_units(s, rank, 1, seconds);
    return status;
}

/* From the RUN of a pair's F. *runs: whether the input of its B is there, too. */
static s1f_status run_pair(simulator *s, int32_t rank, const s1f_instruction *first, int *runs)
{
    const s1f_instruction *second = first + 1;
    double forward, backward;
    *runs = 0;
    for (; second->opcode != S1F_OP_RUN; second++) {
        if (second->opcode != S1F_OP_WAIT)
            continue;
        const link *l = &s->links[second->edge];
        if (l->num_arrived <= second->sequence)
            return S1F_OK;
        wait_until(s, rank, l->arrived[second->sequence]);
    }
    int64_t i = s->ranks[rank].num_units;
    s1f_status status = duration(s, rank, i, first->unit, &forward);
    if (status == S1F_OK)
        status = duration(s, rank, i + 1, second->unit, &backward);
    if (status != S1F_OK)
        return status;
    run_units(s, rank, 2, forward + backward - s->costs->overlap * fmin(forward, backward));
    s->ranks[rank].in_pair = *runs = 1;
    return S1F_OK;
}

static void transfer(simulator *s, int32_t rank, const s1f_instruction *send)
{
    link *l = &s->links[send->edge];
    wait_until(s, rank, l->posted[send->sequence]);
    s->ranks[rank].now += s->costs->send;
    double begin = s->ranks[rank].now > l->link_free ? s->ranks[rank].now : l->link_free;
    double bytes = s->costs->message_bytes != NULL ? (double)s->costs->message_bytes[send->unit.segment] : 0;
    l->link_free = begin + bytes * s->costs->seconds_per_byte;
    l->arrived[l->num_arrived++] = l->link_free + s->costs->latency;
}

/* Runs instructions of one rank until one has to wait for another rank. */
static s1f_status advance(simulator *s, int32_t rank)
{
    rank_state *state = &s->ranks[rank];
    int64_t count;
    const s1f_instruction *instructions = s1f_program_instructions(s->program, rank, &count);
    for (; state->done < count; state->done++) {
        const s1f_instruction *instruction = &instructions[state->done];
        link *l = instruction->edge >= 0 ? &s->links[instruction->edge] : NULL;
        s1f_status status = S1F_OK;
        switch ((s1f_opcode)instruction->opcode) {
        case S1F_OP_POST:
            l->posted[l->num_posted++] = state->now;
            wake(s, s->edges[instruction->edge].source_rank);
            break;
        case S1F_OP_WAIT:
            if (l->num_arrived <= instruction->sequence)
                return S1F_OK;
            wait_until(s, rank, l->arrived[instruction->sequence]);
            break;
        case S1F_OP_RUN:
            if (state->in_pair) {
                state->in_pair = 0;
            } else if (instruction->is_pair) {
                int runs;
                if ((status = run_pair(s, rank, instruction, &runs)) == S1F_OK && !runs)
                    return S1F_OK;
            } else {
                status = run_unit(s, rank, instruction->unit);
            }
            break;
        case S1F_OP_SEND:
            if (l->num_posted <= instruction->sequence)
                return S1F_OK;
            transfer(s, rank, instruction);
            wake(s, s->edges[instruction->edge].destination_rank);
            break;
        case S1F_OP_FREE: break;
        }
        if (status != S1F_OK)
            return status;
    }
    return S1F_OK;
}

static s1f_status run_all(simulator *s)
{
    int32_t num_ranks = s1f_program_num_ranks(s->program);
    s1f_status status = S1F_OK;
    for (int32_t rank = num_ranks - 1; rank >= 0; rank--)
        wake(s, rank);
    while (s->num_queued > 0 && status == S1F_OK) {
        int32_t rank = s->queue[--s->num_queued];
        s->ranks[rank].is_queued = 0;
        status = advance(s, rank);
    }
    for (int32_t rank = 0; rank < num_ranks && status == S1F_OK; rank++) {
        int64_t count;
        s1f_program_instructions(s->program, rank, &count);
        if (s->ranks[rank].done < count) /* lowering leaves no cycle */
            status = s1f_fail(S1F_ERR_STATE, "the program of rank %d stops at instruction %lld of %lld", rank,
                              (long long)s->ranks[rank].done, (long long)count);
    }
    return status;
}

static void measure(s1f_simulation *simulation)
{
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++) {
        int64_t n = simulation->num_units[rank];
        double start = simulation->start[rank][0], end = simulation->end[rank][n - 1];
        simulation->span[rank] = end - start;
        if (end > simulation->makespan)
            simulation->makespan = end; /* the first start is 0: some unit waits for nobody */
    }
}

static s1f_status create_simulation(const s1f_program *program, s1f_simulation **out)
{
    s1f_simulation *simulation = calloc(1, sizeof *simulation);
    size_t num_ranks = (size_t)s1f_program_num_ranks(program);
    if (simulation == NULL)
        goto no_memory;
    simulation->num_ranks = (int32_t)num_ranks;
    simulation->span = calloc(num_ranks, sizeof *simulation->span);
    simulation->busy = calloc(num_ranks, sizeof *simulation->busy);
    simulation->wait = calloc(num_ranks, sizeof *simulation->wait);
    simulation->num_units = calloc(num_ranks, sizeof *simulation->num_units);
    simulation->start = calloc(num_ranks, sizeof *simulation->start);
    simulation->end = calloc(num_ranks, sizeof *simulation->end);
    if (!simulation->span || !simulation->busy || !simulation->wait || !simulation->num_units || !simulation->start ||
        !simulation->end)
        goto no_memory;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++) {
        int64_t num_units = s1f_program_num_units(program, rank);
        simulation->num_units[rank] = num_units;
        simulation->start[rank] = malloc((size_t)num_units * sizeof **simulation->start);
        simulation->end[rank] = malloc((size_t)num_units * sizeof **simulation->end);
        if (simulation->start[rank] == NULL || simulation->end[rank] == NULL)
            goto no_memory;
    }
    *out = simulation;
    return S1F_OK;

no_memory:
    s1f_simulation_free(simulation);
    return s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %zu ranks", num_ranks);
}

s1f_status s1f_program_simulate(const s1f_program *program, const s1f_costs *costs, s1f_simulation **out)
{
    int32_t num_edges;
    simulator s = {.program = program, .costs = costs, .edges = s1f_program_edges(program, &num_edges)};
    size_t num_ranks = (size_t)s1f_program_num_ranks(program);
    s1f_status status;
    if ((status = require_cost("the latency of a transfer", costs->latency)) != S1F_OK ||
        (status = require_cost("the time per byte", costs->seconds_per_byte)) != S1F_OK ||
        (status = require_cost("the time of a send", costs->send)) != S1F_OK)
        return status;
    if (!(costs->overlap >= 0 && costs->overlap <= 1))
        return s1f_fail(S1F_ERR_ARG, "overlap is %g, must be in 0..1", costs->overlap);
    for (int32_t segment = 0; costs->message_bytes != NULL && segment < s1f_program_num_segments(program); segment++)
        if (costs->message_bytes[segment] < 0)
            return s1f_fail(S1F_ERR_ARG, "message_bytes of segment %d is %lld, must be at least 0", segment,
                            (long long)costs->message_bytes[segment]);
    if ((status = create_simulation(program, &s.simulation)) != S1F_OK)
        return status;
    s.links = calloc((size_t)num_edges + 1, sizeof *s.links);
    s.ranks = calloc(num_ranks, sizeof *s.ranks);
    s.queue = calloc(num_ranks, sizeof *s.queue);
    if (s.links == NULL || s.ranks == NULL || s.queue == NULL)
        goto no_memory;
    for (int32_t e = 0; e < num_edges; e++) {
        s.links[e].posted = malloc((size_t)s.edges[e].num_messages * sizeof *s.links[e].posted);
        s.links[e].arrived = malloc((size_t)s.edges[e].num_messages * sizeof *s.links[e].arrived);
        if (s.links[e].posted == NULL || s.links[e].arrived == NULL)
            goto no_memory;
    }
    if ((status = run_all(&s)) == S1F_OK) {
        measure(s.simulation);
        *out = s.simulation;
        s.simulation = NULL;
    }
    goto done;

no_memory:
    status = s1f_fail(S1F_ERR_MEMORY, "no memory to simulate %zu ranks", num_ranks);
done:
    for (int32_t e = 0; s.links != NULL && e < num_edges; e++) {
        free(s.links[e].posted);
        free(s.links[e].arrived);
    }
    free(s.queue);
    free(s.ranks);
    free(s.links);
    s1f_simulation_free(s.simulation);
    return status;
}

void s1f_simulation_free(s1f_simulation *simulation)
{
    if (simulation == NULL)
        return;
    for (int32_t rank = 0; rank < simulation->num_ranks; rank++) {
        if (simulation->start != NULL)
            free(simulation->start[rank]);
        if (simulation->end != NULL)
            free(simulation->end[rank]);
    }
    free(simulation->end);
    free(simulation->start);
    free(simulation->num_units);
    free(simulation->wait);
    free(simulation->busy);
    free(simulation->span);
    free(simulation);
}
