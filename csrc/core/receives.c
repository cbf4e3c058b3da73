/* receives.c - one order of all transfers, found by running all ranks against each other; and the proof that it holds. */
#include "receives.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- placing ------------------------------------------------------------------------------------------------------- */

typedef struct { /* one rank's run */
    const s1f_instruction *instructions;
    int64_t count, next;
    int64_t clock;
    s1f_instruction *out;
    int64_t num_out;
} runner;

typedef struct {
    int64_t posted, sent;
    int32_t sender_waits, receiver_waits; /* for POST `posted`; for SEND `sent` or a later one */
    int64_t awaited;                      /* the message that the receiver waits for */
    const s1f_instruction **posts;        /* [place]: the last POST of it */
} edge_state;

typedef struct {
    const s1f_program *program;
    const s1f_edge *edges;
    int32_t num_edges, num_ranks;
    runner *ranks;
    edge_state *states;
    int32_t *heap; /* ranks that can go on, the earliest first */
    int32_t heap_size;
} run;

static int64_t duration(s1f_unit unit)
{
    return unit.pass == S1F_PASS_BACKWARD ? 2 : 1;
}

/* At the same time transfers go before units, so that a receive starts beside the unit and not after it. */
static int goes_before(const run *r, int32_t a, int32_t b)
{
    const runner *left = &r->ranks[a], *right = &r->ranks[b];
    if (left->clock != right->clock)
        return left->clock < right->clock;
    int left_runs = left->instructions[left->next].opcode == S1F_OP_RUN;
    int right_runs = right->instructions[right->next].opcode == S1F_OP_RUN;
    return left_runs != right_runs ? left_runs < right_runs : a < b;
}

static void push(run *r, int32_t rank)
{
    int32_t i = r->heap_size++;
    for (; i > 0 && goes_before(r, rank, r->heap[(i - 1) / 2]); i = (i - 1) / 2)
        r->heap[i] = r->heap[(i - 1) / 2];
    r->heap[i] = rank;
}

static int32_t pop(run *r)
{
    int32_t first = r->heap[0], last = r->heap[--r->heap_size], i = 0;
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child + 1 < r->heap_size && goes_before(r, r->heap[child + 1], r->heap[child]))
            child++;
        if (child >= r->heap_size || !goes_before(r, r->heap[child], last))
            break;
        r->heap[i] = r->heap[child];
        i = child;
    }
    r->heap[i] = last;
    return first;
}

static void wake(run *r, int32_t rank, int64_t clock)
{
    if (r->ranks[rank].clock < clock)
        r->ranks[rank].clock = clock;
    push(r, rank);
}

static void start_receive(run *r, const s1f_instruction *send)
{
    s1f_instruction receive = *r->states[send->edge].posts[send->place]; /* the unit that will use it */
    receive.opcode = S1F_OP_RECEIVE;
    runner *receiver = &r->ranks[r->edges[send->edge].destination_rank];
    receiver->out[receiver->num_out++] = receive;
}

/* Runs a rank's next instruction; 0 if it has to wait for a peer, who will wake it. */
static int advance(run *r, int32_t rank)
{
    runner *own = &r->ranks[rank];
    const s1f_instruction *instruction = &own->instructions[own->next];
    edge_state *state = instruction->edge >= 0 ? &r->states[instruction->edge] : NULL;
    switch (instruction->opcode) {
    case S1F_OP_POST:
        state->posts[instruction->place] = instruction;
        state->posted++;
        if (state->sender_waits) {
            state->sender_waits = 0;
            wake(r, r->edges[instruction->edge].source_rank, own->clock);
        }
        break;
    case S1F_OP_WAIT:
        if (state->sent <= instruction->sequence) {
            state->receiver_waits = 1;
            state->awaited = instruction->sequence;
            return 0;
        }
        break;
    case S1F_OP_SEND:
        if (state->posted <= instruction->sequence) {
            state->sender_waits = 1;
            return 0;
        }
        start_receive(r, instruction);
        state->sent++;
        if (state->receiver_waits && state->sent > state->awaited) {
            state->receiver_waits = 0;
            wake(r, r->edges[instruction->edge].destination_rank, own->clock);
        }
        break;
    case S1F_OP_RUN: own->clock += duration(instruction->unit); break;
    default: break;
    }
    own->out[own->num_out++] = *instruction;
    own->next++;
    return 1;
}

static void free_run(run *r)
{
    for (int32_t e = 0; r->states != NULL && e < r->num_edges; e++)
        free(r->states[e].posts);
    for (int32_t rank = 0; r->ranks != NULL && rank < r->num_ranks; rank++)
        free(r->ranks[rank].out);
    free(r->states);
    free(r->ranks);
    free(r->heap);
}

static s1f_status create_run(const s1f_program *program, run *r)
{
    *r = (run){.program = program, .num_ranks = s1f_program_num_ranks(program)};
    r->edges = s1f_program_edges(program, &r->num_edges);
    r->ranks = calloc((size_t)r->num_ranks, sizeof *r->ranks);
    r->heap = calloc((size_t)r->num_ranks, sizeof *r->heap);
    r->states = calloc((size_t)r->num_edges + 1, sizeof *r->states);
    int failed = r->ranks == NULL || r->heap == NULL || r->states == NULL;
    for (int32_t rank = 0; !failed && rank < r->num_ranks; rank++) {
        runner *own = &r->ranks[rank];
        own->instructions = s1f_program_instructions(program, rank, &own->count);
        int64_t num_out = own->count;
        for (int32_t e = 0; e < r->num_edges; e++)
            num_out += r->edges[e].destination_rank == rank ? r->edges[e].num_messages : 0;
        own->out = malloc((size_t)(num_out + 1) * sizeof *own->out);
        failed = own->out == NULL;
    }
    for (int32_t e = 0; !failed && e < r->num_edges; e++) {
        r->states[e].posts = calloc((size_t)r->edges[e].num_places + 1, sizeof *r->states[e].posts);
        failed = r->states[e].posts == NULL;
    }
    return failed ? s1f_fail(S1F_ERR_MEMORY, "no memory to order the transfers of %d ranks", (int)r->num_ranks)
                  : S1F_OK;
}

s1f_status s1f_receives_place(const s1f_program *program, s1f_instruction **instructions, int64_t *counts)
{
    run r;
    s1f_status status = create_run(program, &r);
    memset(instructions, 0, (size_t)r.num_ranks * sizeof *instructions);
    for (int32_t rank = 0; status == S1F_OK && rank < r.num_ranks; rank++)
        if (r.ranks[rank].count > 0)
            push(&r, rank);
    while (status == S1F_OK && r.heap_size > 0) {
        int32_t rank = pop(&r);
        if (advance(&r, rank) && r.ranks[rank].next < r.ranks[rank].count)
            push(&r, rank);
    }
    for (int32_t rank = 0; status == S1F_OK && rank < r.num_ranks; rank++)
        if (r.ranks[rank].next < r.ranks[rank].count)
            status = s1f_fail(S1F_ERR_SCHEDULE, "rank %d is stuck at instruction %lld of %lld: credits have a cycle",
                              (int)rank, (long long)r.ranks[rank].next, (long long)r.ranks[rank].count);
    for (int32_t rank = 0; status == S1F_OK && rank < r.num_ranks; rank++) {
        instructions[rank] = r.ranks[rank].out;
        counts[rank] = r.ranks[rank].num_out;
        r.ranks[rank].out = NULL;
    }
    free_run(&r);
    return status;
}

/* -- the proof ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const s1f_instruction *instructions;
    int64_t count, next;
    int32_t is_ready; /* in the list of those to walk */
} walker;

typedef struct {
    int64_t posted, received;
} received_edge;

static const s1f_instruction *current(const walker *w)
{
    return w->next < w->count ? &w->instructions[w->next] : NULL;
}

static void text_of(const s1f_instruction *instruction, char text[64])
{
    static const char *const names[S1F_NUM_OPS] = {"POST", "WAIT", "RUN", "SEND", "FREE", "RECEIVE"};
    char unit[48];
    s1f_unit_text(instruction->unit, 1, unit, sizeof unit);
    snprintf(text, 64, "%s %s", names[instruction->opcode], unit);
}

static s1f_status out_of_turn(int32_t rank, const s1f_instruction *instruction, const s1f_edge *edge, const char *rule)
{
    char text[64];
    text_of(instruction, text);
    return s1f_fail(S1F_ERR_SCHEDULE, "rank %d, %s, message %lld of stage %d to %d: %s", (int)rank, text,
                    (long long)instruction->sequence, (int)edge->source_stage, (int)edge->destination_stage, rule);
}

static s1f_status stuck(const s1f_program *program, const walker *walkers)
{
    char texts[2][64] = {"", ""};
    int32_t ranks[2] = {-1, -1}, found = 0;
    for (int32_t rank = 0; rank < s1f_program_num_ranks(program) && found < 2; rank++)
        if (current(&walkers[rank]) != NULL) {
            text_of(current(&walkers[rank]), texts[found]);
            ranks[found++] = rank;
        }
    return s1f_fail(S1F_ERR_SCHEDULE,
                    "program order and transfers that need both ends have a cycle: rank %d waits in %s, rank %d in %s",
                    (int)ranks[0], texts[0], (int)ranks[1], texts[1]);
}

/* Walks one rank until it waits for a peer, or ends. *met: a rank whose transfer this one has completed, -1 if none. */
static s1f_status walk(const s1f_edge *edges, walker *walkers, received_edge *states, int32_t rank, int32_t *met)
{
    *met = -1;
    for (const s1f_instruction *i; (i = current(&walkers[rank])) != NULL; walkers[rank].next++) {
        received_edge *state = i->edge >= 0 ? &states[i->edge] : NULL;
        const s1f_edge *edge = i->edge >= 0 ? &edges[i->edge] : NULL;
        if (i->opcode == S1F_OP_POST)
            state->posted++;
        if (i->opcode == S1F_OP_WAIT && state->received <= i->sequence)
            return out_of_turn(rank, i, edge, "it is waited for before its receive has started");
        if (i->opcode == S1F_OP_RECEIVE && (state->posted <= i->sequence || state->received != i->sequence))
            return out_of_turn(rank, i, edge, "its receive starts before its place is posted, or out of turn");
        if (i->opcode != S1F_OP_SEND && i->opcode != S1F_OP_RECEIVE)
            continue;
        int32_t peer = i->opcode == S1F_OP_SEND ? edge->destination_rank : edge->source_rank;
        const s1f_instruction *theirs = current(&walkers[peer]);
        int32_t wanted = i->opcode == S1F_OP_SEND ? S1F_OP_RECEIVE : S1F_OP_SEND;
        if (theirs == NULL || theirs->opcode != wanted || theirs->edge != i->edge || theirs->sequence != i->sequence)
            return S1F_OK; /* the peer will find this one here */
        if (state->posted <= i->sequence || state->received != i->sequence)
            return out_of_turn(peer, theirs, edge, "its receive starts before its place is posted, or out of turn");
        state->received++;
        walkers[peer].next++;
        walkers[rank].next++;
        *met = peer;
        return S1F_OK;
    }
    return S1F_OK;
}

s1f_status s1f_receives_check(const s1f_program *program)
{
    int32_t num_edges, num_ranks = s1f_program_num_ranks(program), num_ready = 0, finished = 0;
    const s1f_edge *edges = s1f_program_edges(program, &num_edges);
    walker *walkers = calloc((size_t)num_ranks, sizeof *walkers);
    received_edge *states = calloc((size_t)num_edges + 1, sizeof *states);
    int32_t *ready = calloc((size_t)num_ranks, sizeof *ready);
    s1f_status status = S1F_OK;
    if (walkers == NULL || states == NULL || ready == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to check the transfers of %d ranks", (int)num_ranks);
    for (int32_t rank = 0; status == S1F_OK && rank < num_ranks; rank++) {
        walkers[rank].instructions = s1f_program_instructions(program, rank, &walkers[rank].count);
        walkers[rank].is_ready = 1;
        ready[num_ready++] = rank;
    }
    while (status == S1F_OK && num_ready > 0) {
        int32_t pair[2] = {ready[--num_ready], -1}; /* a rank, and whom it met at a transfer: both go on */
        walkers[pair[0]].is_ready = 0;
        status = walk(edges, walkers, states, pair[0], &pair[1]);
        for (int32_t i = 0; i < 2 && pair[1] >= 0; i++)
            if (!walkers[pair[i]].is_ready) {
                walkers[pair[i]].is_ready = 1;
                ready[num_ready++] = pair[i];
            }
    }
    for (int32_t rank = 0; status == S1F_OK && rank < num_ranks; rank++)
        finished += current(&walkers[rank]) == NULL;
    if (status == S1F_OK && finished < num_ranks)
        status = stuck(program, walkers);
    free(ready);
    free(states);
    free(walkers);
    return status;
}
