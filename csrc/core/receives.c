/* receives.c - one order of all transfers, found by walking the programs of all ranks in time. */
#include "receives.h"

typedef struct { /* one rank's run */
    const s1f_rank_program *program;
    int64_t next; /* first instruction that is not yet copied */
    int64_t clock;
    int is_at_unit; /* it has what its next unit waits for, and lets the transfers of the same time go first */
    int can_go;
    int32_t waits_for; /* edge on which it waits for a message, or for a place; -1 */
    s1f_instruction *out;
    int64_t num_out;
} runner;

typedef struct {
    const s1f_program *program;
    s1f_pool pool; /* of all arrays but instructions, which are the program's */
    runner *ranks;
    int64_t *posted, *sent; /* [edge] */
} run;

/* At the same time transfers go before units, so that a receive starts beside the unit and not after it. */
static int goes_before(const run *r, int32_t a, int32_t b)
{
    const runner *left = &r->ranks[a], *right = &r->ranks[b];
    if (left->clock != right->clock)
        return left->clock < right->clock;
    return left->is_at_unit != right->is_at_unit ? right->is_at_unit : a < b;
}

/* The earliest of the ranks that can go on, which no more can then; -1: none. */
static int32_t pop(run *r)
{
    int32_t first = -1;
    for (int32_t rank = 0; rank < r->program->shape.num_ranks; rank++)
        if (r->ranks[rank].can_go && (first < 0 || goes_before(r, rank, first)))
            first = rank;
    if (first >= 0)
        r->ranks[first].can_go = 0;
    return first;
}

static const s1f_instruction *next_of(const runner *own)
{
    return own->next < own->program->count ? &own->program->instructions[own->next] : NULL;
}

static void copy_next(runner *own)
{
    own->out[own->num_out++] = own->program->instructions[own->next++];
}

/* Wakes another rank if it waits on this edge: it goes on at this rank's clock. 1: before this rank does. */
static int wake(run *r, int32_t rank, int32_t other, int32_t edge)
{
    runner *own = &r->ranks[rank], *woken = &r->ranks[other];
    if (woken->waits_for != edge)
        return 0;
    woken->waits_for = -1;
    woken->clock = woken->clock < own->clock ? own->clock : woken->clock;
    woken->can_go = 1;
    own->can_go = goes_before(r, other, rank);
    return own->can_go;
}

/* A transfer starts: its receive goes to where the receiver stands. */
static void start_transfer(run *r, const s1f_instruction *send)
{
    const s1f_edge *edge = &r->program->edges->edges[send->edge];
    runner *receiver = &r->ranks[edge->destination_rank];
    s1f_instruction receive = *send;
    receive.opcode = S1F_OP_RECEIVE;
    receive.unit = receiver->program->units[edge->receiver[send->sequence]];
    receiver->out[receiver->num_out++] = receive;
    r->sent[send->edge]++;
}

/* Before its unit a rank copies its WAITs once all messages have come, then lets the transfers of the same time go
 * first; after the unit, those that come before its end. */
static void go_to_unit(const run *r, runner *own)
{
    const s1f_instruction *wait = next_of(own);
    if (own->is_at_unit) { /* its turn has come */
        own->is_at_unit = 0;
        while (own->program->instructions[own->next].opcode != S1F_OP_RUN)
            copy_next(own);
        /* B makes as much as I and W */
        own->clock += __builtin_popcount(s1f_pass_products(next_of(own)->unit.pass));
        copy_next(own);
        own->can_go = 1;
        return;
    }
    for (; wait->opcode == S1F_OP_WAIT; wait++)
        if (r->sent[wait->edge] <= wait->sequence) {
            own->waits_for = wait->edge;
            return;
        }
    while (next_of(own)->opcode == S1F_OP_WAIT)
        copy_next(own);
    own->is_at_unit = own->can_go = 1;
}

/* Lets a rank go on until it waits, lets others go first, or is at its end. */
static void go(run *r, int32_t rank)
{
    runner *own = &r->ranks[rank];
    const s1f_instruction *instruction;
    while ((instruction = next_of(own)) != NULL) {
        int32_t e = instruction->edge, other_goes = 0;
        switch (instruction->opcode) {
        case S1F_OP_POST:
            r->posted[e]++;
            other_goes = wake(r, rank, r->program->edges->edges[e].source_rank, e);
            break;
        case S1F_OP_SEND:
            if (r->posted[e] <= instruction->sequence) {
                own->waits_for = e;
                return;
            }
            start_transfer(r, instruction);
            other_goes = wake(r, rank, r->program->edges->edges[e].destination_rank, e);
            break;
        case S1F_OP_FREE: break;
        default: go_to_unit(r, own); return;
        }
        copy_next(own);
        if (other_goes)
            return;
    }
}

static s1f_status create_run(s1f_program *program, run *r)
{
    int32_t num_ranks = program->shape.num_ranks, num_edges = program->edges->num_edges;
    *r = (run){.program = program};
    r->ranks = s1f_pool_take(&r->pool, (size_t)num_ranks, sizeof *r->ranks);
    r->posted = s1f_pool_take(&r->pool, (size_t)num_edges, sizeof *r->posted);
    r->sent = s1f_pool_take(&r->pool, (size_t)num_edges, sizeof *r->sent);
    S1F_TRY(s1f_pool_status(&r->pool, "the transfers of all ranks"));
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        int64_t num_out = program->ranks[rank].count;
        for (int32_t e = 0; e < num_edges; e++)
            num_out += program->edges->edges[e].destination_rank == rank ? program->edges->edges[e].num_messages : 0;
        s1f_instruction *out = s1f_pool_take(&program->pool, (size_t)num_out, sizeof *out);
        r->ranks[rank] = (runner){.program = &program->ranks[rank], .can_go = 1, .waits_for = -1, .out = out};
    }
    return s1f_pool_status(&program->pool, "the instructions of all ranks");
}

/* Runs all ranks against each other in time. */
static s1f_status place_receives(run *r)
{
    for (int32_t rank; (rank = pop(r)) >= 0;)
        go(r, rank);
    for (int32_t rank = 0; rank < r->program->shape.num_ranks; rank++)
        if (next_of(&r->ranks[rank]) != NULL)
            return s1f_fail(S1F_ERR_SCHEDULE, "rank %d is stuck at instruction %lld of %lld: credits have a cycle",
                            (int)rank, (long long)r->ranks[rank].next, (long long)r->ranks[rank].program->count);
    return S1F_OK;
}

s1f_status s1f_program_add_receives(s1f_program *program)
{
    run r;
    s1f_status status = create_run(program, &r);
    if (status == S1F_OK)
        status = place_receives(&r);
    for (int32_t rank = 0; status == S1F_OK && rank < program->shape.num_ranks; rank++) {
        program->ranks[rank].instructions = r.ranks[rank].out;
        program->ranks[rank].count = r.ranks[rank].num_out;
    }
    s1f_pool_free(&r.pool);
    return status;
}
