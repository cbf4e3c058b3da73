/* receives.c - one order of all transfers, found by running all ranks against each other. */
#include "receives.h"

#include "pool.h"
#include "walk.h"

#include <stdlib.h>

typedef struct { /* one rank's run */
    const s1f_rank_program *program;
    int64_t next; /* first instruction that is not yet copied */
    int64_t clock;
    int is_at_unit; /* it has what its next unit waits for, and lets the transfers of the same time go first */
    int can_go;
    s1f_instruction *out;
    int64_t num_out;
} runner;

typedef struct {
    const s1f_program *program;
    s1f_walk walk;
    s1f_pool pool; /* of all arrays but instructions */
    runner *ranks;
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
    for (int32_t rank = 0; rank < r->walk.num_ranks; rank++)
        if (r->ranks[rank].can_go && (first < 0 || goes_before(r, rank, first)))
            first = rank;
    if (first >= 0)
        r->ranks[first].can_go = 0;
    return first;
}

/* Copies a rank's instructions up to the first of this kind, which is the one that happens now. */
static const s1f_instruction *copy_until(runner *own, s1f_opcode opcode)
{
    for (;;) {
        const s1f_instruction *instruction = &own->program->instructions[own->next++];
        own->out[own->num_out++] = *instruction;
        if (instruction->opcode == (int32_t)opcode)
            return instruction;
    }
}

/* The next instructions are the WAITs of the next unit, unless it has what it waits for. */
static int has_come(void *context, const s1f_stand *at, int32_t edge)
{
    const run *r = context;
    const runner *own = &r->ranks[at->rank];
    if (own->is_at_unit)
        return 1;
    const s1f_instruction *wait = &own->program->instructions[own->next];
    while (wait->opcode != S1F_OP_WAIT || wait->edge != edge)
        wait++;
    return r->walk.links[edge].num_sent > wait->sequence;
}

/* Just before a unit the rank lets the transfers of the same time go first, and after it those that come before its
 * end. */
static int yields(void *context, int32_t rank, int has_run)
{
    run *r = context;
    runner *own = &r->ranks[rank];
    if (!has_run && own->is_at_unit) { /* its turn has come */
        own->is_at_unit = 0;
        return 0;
    }
    own->is_at_unit = !has_run;
    while (!has_run && own->program->instructions[own->next].opcode == S1F_OP_WAIT)
        copy_until(own, S1F_OP_WAIT);
    own->can_go = 1;
    return 1;
}

/* Those that the rank has woken go on at its clock, and first where they go before it. */
static int yields_to_woken(void *context, int32_t rank)
{
    run *r = context;
    int yields_now = 0;
    for (; r->walk.num_ready > 0; r->walk.num_ready--) {
        int32_t woken = r->walk.ready[r->walk.num_ready - 1];
        if (r->ranks[woken].clock < r->ranks[rank].clock)
            r->ranks[woken].clock = r->ranks[rank].clock;
        r->ranks[woken].can_go = 1;
        yields_now |= goes_before(r, woken, rank);
    }
    r->ranks[rank].can_go |= yields_now;
    return yields_now;
}

static void run_unit(void *context, const s1f_stand *at)
{
    run *r = context;
    runner *own = &r->ranks[at->rank];
    copy_until(own, S1F_OP_RUN);
    own->clock += __builtin_popcount(s1f_pass_products(at->unit->pass)); /* B makes as much as I and W */
}

/* A transfer starts: its receive goes to where the receiver stands. */
static void start_transfer(void *context, const s1f_stand *at, int32_t edge)
{
    run *r = context;
    const s1f_edge *e = &r->program->edges->edges[edge];
    runner *receiver = &r->ranks[e->destination_rank];
    s1f_instruction receive = *copy_until(&r->ranks[at->rank], S1F_OP_SEND);
    receive.opcode = S1F_OP_RECEIVE;
    receive.unit = receiver->program->units[e->receiver[receive.sequence]];
    receiver->out[receiver->num_out++] = receive;
}

static void post_place(void *context, int32_t rank, int32_t edge)
{
    (void)edge;
    copy_until(&((run *)context)->ranks[rank], S1F_OP_POST);
}

/* A FREE that no POST follows. */
static void copy_free(void *context, const s1f_stand *at)
{
    runner *own = &((run *)context)->ranks[at->rank];
    if (own->next < own->program->count && own->program->instructions[own->next].opcode == S1F_OP_FREE)
        copy_until(own, S1F_OP_FREE);
}

static const s1f_walk_rules rendezvous_rules = {.has_come = has_come,
                                                .with_credits = 1,
                                                .run = run_unit,
                                                .send = start_transfer,
                                                .post = post_place,
                                                .through = copy_free,
                                                .yields = yields,
                                                .yields_to_woken = yields_to_woken};

static void free_run(run *r)
{
    for (int32_t rank = 0; r->ranks != NULL && rank < r->program->shape.num_ranks; rank++)
        free(r->ranks[rank].out);
    s1f_pool_free(&r->pool);
    s1f_walk_free(&r->walk);
}

static s1f_status create_run(const s1f_program *program, run *r)
{
    int32_t num_ranks = program->shape.num_ranks, num_edges = program->edges->num_edges;
    *r = (run){.program = program};
    S1F_TRY(s1f_walk_create(program->edges, &program->shape, &r->walk));
    r->ranks = s1f_pool_take(&r->pool, (size_t)num_ranks, sizeof *r->ranks);
    int failed = r->pool.is_short;
    for (int32_t rank = 0; !failed && rank < num_ranks; rank++) {
        r->ranks[rank].program = &program->ranks[rank];
        int64_t num_out = program->ranks[rank].count;
        for (int32_t e = 0; e < num_edges; e++)
            num_out += program->edges->edges[e].destination_rank == rank ? program->edges->edges[e].num_messages : 0;
        r->ranks[rank].out = malloc((size_t)(num_out + 1) * sizeof *r->ranks[rank].out);
        failed = r->ranks[rank].out == NULL;
    }
    return failed ? s1f_fail(S1F_ERR_MEMORY, "no memory to order the transfers of %d ranks", (int)num_ranks) : S1F_OK;
}

/* Runs all ranks against each other in time. */
static s1f_status place_receives(run *r)
{
    int32_t num_ranks = r->program->shape.num_ranks, num_ended = 0;
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        runner *own = &r->ranks[rank];
        s1f_walk_set_units(&r->walk, rank, own->program->units, own->program->num_units);
        while (own->next < own->program->count && own->program->instructions[own->next].opcode == S1F_OP_POST)
            s1f_walk_post(&r->walk, rank, own->program->instructions[own->next].edge, rendezvous_rules, r);
        own->can_go = 1;
    }
    for (int32_t rank; (rank = pop(r)) >= 0;)
        num_ended += s1f_walk_go(&r->walk, rank, rendezvous_rules, r);
    for (int32_t rank = 0; num_ended < num_ranks && rank < num_ranks; rank++)
        if (!s1f_walk_has_ended(&r->walk, rank))
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
        free(program->ranks[rank].instructions);
        program->ranks[rank].instructions = r.ranks[rank].out;
        program->ranks[rank].count = r.ranks[rank].num_out;
        r.ranks[rank].out = NULL;
    }
    free_run(&r);
    return status;
}
