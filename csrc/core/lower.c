/* lower.c - from an order to one program per rank.
 *
 * Three passes over the units, each linear: number the messages in the order of their senders and count the places that
 * every receiver needs; run all ranks against each other with credits and add places where they get stuck; write the
 * instructions, where a freed place goes at once to the next message of its edge. */
#include "lower.h"

#include "check.h"
#include "receives.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    s1f_instruction *instructions;
    int64_t count;
} rank_program;

struct s1f_program {
    int32_t num_ranks, num_stages, num_microbatches, num_segments, num_edges;
    int has_backward;
    int32_t *rank_of_stage; /* [num_stages] */
    s1f_stage_peak *peaks;  /* [num_stages] */
    s1f_edge *edges;        /* [num_edges] */
    rank_program *programs; /* [num_ranks] */
};

/* What lowering needs to know on its way. */
typedef struct {
    const s1f_schedule *schedule;
    s1f_program *program;
    int64_t units_per_stage;            /* forward units: M k */
    int32_t *activation_edge;           /* [stage]: edge on which its activations come in, -1 if none */
    int32_t *gradient_edge;             /* [stage]: the same for gradients */
    int64_t *sequence[2];               /* [is_gradient][cell of the sender's unit]: number of its message */
    s1f_unit *consumers;                /* [edge][sequence]: unit that uses the message */
    int32_t *places;                    /* [edge][sequence]: where it lands */
    int64_t *freed, *sent;              /* [edge]: counters of the pass that runs */
    int32_t *live_units;                /* [stage]: now */
    int32_t *kv_slot_of, *grad_slot_of; /* [stage][microbatch]: slot held now */
    unsigned char *kv_used, *grad_used; /* [stage][slot] */
} lowering;

static int64_t cell(const lowering *l, s1f_unit unit)
{
    return unit.stage * l->units_per_stage + (int64_t)unit.microbatch * l->program->num_segments + unit.segment;
}

static int gives_input_gradient(s1f_unit unit)
{
    return unit.pass == S1F_PASS_BACKWARD || unit.pass == S1F_PASS_BACKWARD_INPUT;
}

/* The last unit that reads what its segment saved. */
static int is_last_reader(const lowering *l, s1f_unit unit)
{
    if (!l->program->has_backward)
        return 1;
    return unit.pass == S1F_PASS_BACKWARD || unit.pass == S1F_PASS_BACKWARD_WEIGHT;
}

/* Edge and number of the message that a unit consumes; edge -1 if it comes from its own rank, or there is none. */
static int32_t incoming(const lowering *l, s1f_unit unit, int64_t *sequence)
{
    int is_gradient = gives_input_gradient(unit);
    if (!is_gradient && unit.pass != S1F_PASS_FORWARD)
        return -1;
    int32_t edge = is_gradient ? l->gradient_edge[unit.stage] : l->activation_edge[unit.stage];
    if (edge < 0)
        return -1;
    unit.stage += is_gradient ? 1 : -1;
    *sequence = l->sequence[is_gradient][cell(l, unit)];
    return edge;
}

/* Edge on which a unit's result leaves the rank, -1 if it does not. */
static int32_t outgoing(const lowering *l, s1f_unit unit)
{
    if (unit.pass == S1F_PASS_FORWARD && unit.stage + 1 < l->program->num_stages)
        return l->activation_edge[unit.stage + 1];
    if (gives_input_gradient(unit) && unit.stage > 0)
        return l->gradient_edge[unit.stage - 1];
    return -1;
}

static s1f_unit *consumers_of(const lowering *l, int32_t edge)
{
    return l->consumers + edge * l->units_per_stage;
}

static int32_t *places_of(const lowering *l, int32_t edge)
{
    return l->places + edge * l->units_per_stage;
}

/* -- edges and messages ------------------------------------------------------------------------------------------ */

static void add_edge(s1f_program *program, int32_t source_stage, int32_t destination_stage, int32_t *edge_of_stage)
{
    int32_t source_rank = program->rank_of_stage[source_stage];
    int32_t destination_rank = program->rank_of_stage[destination_stage];
    if (source_rank == destination_rank)
        return;
    edge_of_stage[destination_stage] = program->num_edges;
    program->edges[program->num_edges++] = (s1f_edge){
        .source_stage = source_stage,
        .destination_stage = destination_stage,
        .source_rank = source_rank,
        .destination_rank = destination_rank,
        .is_gradient = destination_stage < source_stage,
        .num_messages = (int64_t)program->num_microbatches * program->num_segments,
    };
}

static void number_messages(const lowering *l)
{
    for (int32_t rank = 0; rank < l->program->num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(l->schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units; i++) {
            int32_t edge = outgoing(l, units[i]);
            if (edge >= 0)
                l->sequence[gives_input_gradient(units[i])][cell(l, units[i])] = l->sent[edge]++;
        }
    }
}

static void count_freed(const lowering *l, s1f_unit unit)
{
    if (!is_last_reader(l, unit))
        return;
    if (l->activation_edge[unit.stage] >= 0)
        l->freed[l->activation_edge[unit.stage]]++;
    if (l->gradient_edge[unit.stage] >= 0)
        l->freed[l->gradient_edge[unit.stage]]++;
}

/* Message n can be used only when messages 0..n have been posted, so the receiver needs n + 1 places less those it has
 * freed by then. */
static void count_places(const lowering *l, int32_t prefetch)
{
    s1f_edge *edges = l->program->edges;
    for (int32_t rank = 0; rank < l->program->num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(l->schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units; i++) {
            int64_t sequence = 0;
            int32_t edge = incoming(l, units[i], &sequence);
            if (edge >= 0) {
                consumers_of(l, edge)[sequence] = units[i];
                if (sequence + 1 - l->freed[edge] > edges[edge].num_places)
                    edges[edge].num_places = (int32_t)(sequence + 1 - l->freed[edge]);
            }
            count_freed(l, units[i]);
        }
    }
    for (int32_t e = 0; e < l->program->num_edges; e++) {
        int64_t wanted = (int64_t)edges[e].num_places + prefetch;
        edges[e].num_places = (int32_t)(wanted < edges[e].num_messages ? wanted : edges[e].num_messages);
    }
}

/* -- credits ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t done;                      /* units of the rank that are through, their SEND and FREE included */
    int32_t has_run;                   /* units[done] has run and waits for its credit */
    int32_t peer;                      /* rank it waits for, once stuck */
    int32_t next_waiter, first_waiter; /* lists of ranks that wait for one rank, -1 ends */
} progress;

/* Runs units of one rank until it waits: returns 0, with .peer set, or 1 at the end of its order. */
static int advance(const lowering *l, progress *ranks, int32_t rank)
{
    const s1f_edge *edges = l->program->edges;
    progress *own = &ranks[rank];
    int64_t num_units;
    const s1f_unit *units = s1f_schedule_units(l->schedule, rank, &num_units);
    for (; own->done < num_units; own->done++, own->has_run = 0) {
        s1f_unit unit = units[own->done];
        int32_t out = outgoing(l, unit), is_pair = s1f_schedule_is_pair(l->schedule, rank, own->done);
        for (int32_t i = 0; i <= is_pair && !own->has_run; i++) {
            int64_t sequence = 0;
            int32_t in = incoming(l, units[own->done + i], &sequence);
            if (in >= 0 && l->sent[in] <= sequence) {
                own->peer = edges[in].source_rank;
                return 0;
            }
        }
        own->has_run = 1;
        if (out >= 0) {
            if (l->sent[out] >= edges[out].num_places + l->freed[out]) {
                own->peer = edges[out].destination_rank;
                return 0;
            }
            l->sent[out]++;
        }
        count_freed(l, unit);
    }
    return 1;
}

/* Breaks the cycle in which `rank` is stuck: adds a place to one of its edges that wait for a credit. The order passed its
 * check, so there is one. Returns 0 if not. */
static int add_place(const lowering *l, const progress *ranks, int32_t rank)
{
    for (int32_t step = 0; step < l->program->num_ranks; step++) /* whoever waits for whom ends in the cycle */
        rank = ranks[rank].peer;
    for (int32_t step = 0; step < l->program->num_ranks; step++, rank = ranks[rank].peer)
        if (ranks[rank].has_run) {
            int64_t num_units;
            int32_t out = outgoing(l, s1f_schedule_units(l->schedule, rank, &num_units)[ranks[rank].done]);
            l->program->edges[out].num_places++;
            return 1;
        }
    return 0;
}

/* Runs all ranks against each other. A stuck state depends on the number of places only, never on who ran first, so
 * adding one and going on ends where starting again with it would. */
static s1f_status run_with_credits(const lowering *l)
{
    int32_t num_ranks = l->program->num_ranks, num_runnable = 0, num_finished = 0;
    progress *ranks = calloc((size_t)num_ranks, sizeof *ranks);
    int32_t *runnable = calloc((size_t)num_ranks, sizeof *runnable); /* a rank is here, waits, or is finished */
    unsigned char *finished = calloc((size_t)num_ranks, 1);
    s1f_status status = S1F_OK;
    if (ranks == NULL || runnable == NULL || finished == NULL) {
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to lower the order of %d ranks", num_ranks);
        goto done;
    }
    for (int32_t rank = num_ranks - 1; rank >= 0; rank--) {
        ranks[rank].first_waiter = -1;
        runnable[num_runnable++] = rank;
    }
    while (num_finished < num_ranks) {
        if (num_runnable == 0) { /* everyone waits: a cycle through credits */
            int32_t stuck = 0;
            while (finished[stuck])
                stuck++;
            if (!add_place(l, ranks, stuck)) {
                status =
                    s1f_fail(S1F_ERR_SCHEDULE, "program order and transfers have no cycle: rank %d is stuck", stuck);
                goto done;
            }
            for (int32_t rank = 0; rank < num_ranks; rank++) { /* rare: wake all */
                ranks[rank].first_waiter = -1;
                if (!finished[rank])
                    runnable[num_runnable++] = rank;
            }
        }
        int32_t rank = runnable[--num_runnable];
        int64_t done_before = ranks[rank].done;
        int32_t had_run = ranks[rank].has_run;
        if (advance(l, ranks, rank)) {
            finished[rank] = 1;
            num_finished++;
        } else {
            progress *peer = &ranks[ranks[rank].peer];
            ranks[rank].next_waiter = peer->first_waiter;
            peer->first_waiter = rank;
        }
        if (ranks[rank].done != done_before || ranks[rank].has_run != had_run || finished[rank]) {
            int32_t waiting = ranks[rank].first_waiter;
            ranks[rank].first_waiter = -1;
            for (; waiting >= 0; waiting = ranks[waiting].next_waiter)
                runnable[num_runnable++] = waiting;
        }
    }

done:
    free(finished);
    free(runnable);
    free(ranks);
    return status;
}

/* -- instructions ------------------------------------------------------------------------------------------------ */

typedef struct {
    const lowering *l;
    rank_program *program;
    int64_t *posted; /* [edge] */
} writer;

static void write(writer *w, s1f_opcode opcode, int32_t edge, s1f_unit unit, int64_t sequence)
{
    w->program->instructions[w->program->count++] = (s1f_instruction){
        .opcode = (int32_t)opcode,
        .edge = edge,
        .unit = unit,
        .place = edge >= 0 ? places_of(w->l, edge)[sequence] : -1,
        .kv_slot = -1,
        .grad_slot = -1,
        .sequence = sequence,
    };
}

static void write_post(writer *w, int32_t edge, int32_t place)
{
    int64_t sequence = w->posted[edge];
    if (sequence == w->l->program->edges[edge].num_messages)
        return; /* the place stays empty */
    w->posted[edge]++;
    places_of(w->l, edge)[sequence] = place;
    write(w, S1F_OP_POST, edge, consumers_of(w->l, edge)[sequence], sequence);
}

/* The place of the message on `edge` that belongs to the segment of `unit` is free. */
static void write_repost(writer *w, int32_t edge, s1f_unit unit)
{
    if (edge < 0)
        return;
    int is_gradient = w->l->program->edges[edge].is_gradient;
    unit.stage += is_gradient ? 1 : -1;
    write_post(w, edge, places_of(w->l, edge)[w->l->sequence[is_gradient][cell(w->l, unit)]]);
}

static int32_t take_lowest_slot(unsigned char *used, int32_t *peak)
{
    int32_t slot = 0;
    while (used[slot])
        slot++;
    used[slot] = 1;
    if (slot + 1 > *peak)
        *peak = slot + 1; /* first-free slots: the highest ever used is the peak */
    return slot;
}

static void write_run(writer *w, s1f_unit unit)
{
    const lowering *l = w->l;
    int32_t k = l->program->num_segments, M = l->program->num_microbatches;
    s1f_stage_peak *peak = &l->program->peaks[unit.stage];
    int64_t stage_base = (int64_t)unit.stage * M;
    int32_t *kv_slot = &l->kv_slot_of[stage_base + unit.microbatch];
    int32_t *grad_slot = &l->grad_slot_of[stage_base + unit.microbatch];
    write(w, S1F_OP_RUN, -1, unit, -1);
    if (unit.pass == S1F_PASS_FORWARD && ++l->live_units[unit.stage] > peak->live_units)
        peak->live_units = l->live_units[unit.stage];
    if (unit.pass == S1F_PASS_BACKWARD_WEIGHT)
        return; /* attention has no weights: W reads neither slot */

    s1f_instruction *run = &w->program->instructions[w->program->count - 1];
    if (unit.pass == S1F_PASS_FORWARD && unit.segment == 0)
        *kv_slot = take_lowest_slot(l->kv_used + stage_base, &peak->kv_slots);
    run->kv_slot = *kv_slot;
    if (gives_input_gradient(unit)) {
        if (unit.segment == k - 1)
            *grad_slot = take_lowest_slot(l->grad_used + stage_base, &peak->grad_slots);
        run->grad_slot = *grad_slot;
        if (unit.segment == 0) {
            l->kv_used[stage_base + *kv_slot] = 0;
            l->grad_used[stage_base + *grad_slot] = 0;
        }
    } else if (!l->program->has_backward && unit.segment == k - 1) {
        l->kv_used[stage_base + *kv_slot] = 0;
    }
}

static int64_t count_instructions(const lowering *l, int32_t rank)
{
    int64_t num_units, count = 0;
    const s1f_unit *units = s1f_schedule_units(l->schedule, rank, &num_units);
    for (int64_t i = 0; i < num_units; i++)
        count += 1 + (outgoing(l, units[i]) >= 0) + is_last_reader(l, units[i]);
    for (int32_t e = 0; e < l->program->num_edges; e++)
        if (l->program->edges[e].destination_rank == rank)
            count += 2 * l->program->edges[e].num_messages; /* POST and WAIT */
    return count;
}

/* Places of messages are known once their receiver's program is written; SENDs get theirs at the end. */
static s1f_status write_program(const lowering *l, int64_t *posted, int32_t rank)
{
    writer w = {l, &l->program->programs[rank], posted};
    int64_t num_instructions = count_instructions(l, rank);
    w.program->instructions = malloc((size_t)num_instructions * sizeof *w.program->instructions);
    if (w.program->instructions == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld instructions of rank %d", (long long)num_instructions,
                        rank);

    for (int32_t e = 0; e < l->program->num_edges; e++)
        if (l->program->edges[e].destination_rank == rank)
            for (int32_t place = 0; place < l->program->edges[e].num_places; place++)
                write_post(&w, e, place);
    int64_t num_units;
    const s1f_unit *units = s1f_schedule_units(l->schedule, rank, &num_units);
    for (int64_t i = 0; i < num_units; i++) {
        s1f_unit unit = units[i];
        int64_t sequence = 0;
        int32_t in = incoming(l, unit, &sequence), out = outgoing(l, unit);
        if (in >= 0)
            write(&w, S1F_OP_WAIT, in, unit, sequence);
        write_run(&w, unit);
        w.program->instructions[w.program->count - 1].is_pair = s1f_schedule_is_pair(l->schedule, rank, i);
        if (out >= 0)
            write(&w, S1F_OP_SEND, out, unit, l->sequence[gives_input_gradient(unit)][cell(l, unit)]);
        if (is_last_reader(l, unit)) {
            write(&w, S1F_OP_FREE, -1, unit, -1);
            l->live_units[unit.stage]--;
            write_repost(&w, l->activation_edge[unit.stage], unit);
            write_repost(&w, l->gradient_edge[unit.stage], unit);
        }
    }
    return S1F_OK;
}

static void fill_send_places(const lowering *l)
{
    for (int32_t rank = 0; rank < l->program->num_ranks; rank++)
        for (int64_t i = 0; i < l->program->programs[rank].count; i++) {
            s1f_instruction *send = &l->program->programs[rank].instructions[i];
            if (send->opcode == S1F_OP_SEND)
                send->place = places_of(l, send->edge)[send->sequence];
        }
}

/* -- the whole --------------------------------------------------------------------------------------------------- */

static s1f_status create_program(const s1f_schedule *schedule, s1f_program **out)
{
    s1f_program *program = calloc(1, sizeof *program);
    if (program == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a program");
    program->num_ranks = s1f_schedule_num_ranks(schedule);
    program->num_stages = s1f_schedule_num_stages(schedule);
    program->num_microbatches = s1f_schedule_num_microbatches(schedule);
    program->num_segments = s1f_schedule_num_segments(schedule);
    program->has_backward = s1f_schedule_has_backward(schedule);
    size_t num_stages = (size_t)program->num_stages;
    program->rank_of_stage = malloc(num_stages * sizeof *program->rank_of_stage);
    program->peaks = calloc(num_stages, sizeof *program->peaks);
    program->edges = calloc(2 * num_stages, sizeof *program->edges);
    program->programs = calloc((size_t)program->num_ranks, sizeof *program->programs);
    if (program->rank_of_stage == NULL || program->peaks == NULL || program->edges == NULL ||
        program->programs == NULL) {
        s1f_program_free(program);
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a program of %zu stages", num_stages);
    }
    for (int32_t stage = 0; stage < program->num_stages; stage++)
        program->rank_of_stage[stage] = s1f_schedule_rank_of_stage(schedule, stage);
    *out = program;
    return S1F_OK;
}

static s1f_status create_lowering(const s1f_schedule *schedule, s1f_program *program, lowering *l)
{
    *l = (lowering){.schedule = schedule, .program = program};
    l->units_per_stage = (int64_t)program->num_microbatches * program->num_segments;
    size_t num_stages = (size_t)program->num_stages;
    l->activation_edge = malloc(num_stages * sizeof *l->activation_edge);
    l->gradient_edge = malloc(num_stages * sizeof *l->gradient_edge);
    if (l->activation_edge == NULL || l->gradient_edge == NULL)
        goto no_memory;
    for (int32_t stage = 0; stage < program->num_stages; stage++)
        l->activation_edge[stage] = l->gradient_edge[stage] = -1;
    for (int32_t stage = 0; stage + 1 < program->num_stages; stage++)
        add_edge(program, stage, stage + 1, l->activation_edge);
    for (int32_t stage = 1; stage < program->num_stages && program->has_backward; stage++)
        add_edge(program, stage, stage - 1, l->gradient_edge);

    size_t num_edges = (size_t)program->num_edges + 1; /* never 0: malloc(0) may be NULL */
    size_t num_cells = num_stages * (size_t)l->units_per_stage;
    size_t num_messages = num_edges * (size_t)l->units_per_stage;
    size_t num_slots = num_stages * (size_t)program->num_microbatches;
    l->sequence[0] = malloc(num_cells * sizeof *l->sequence[0]);
    l->sequence[1] = malloc(num_cells * sizeof *l->sequence[1]);
    l->consumers = malloc(num_messages * sizeof *l->consumers);
    l->places = malloc(num_messages * sizeof *l->places);
    l->freed = calloc(num_edges, sizeof *l->freed);
    l->sent = calloc(num_edges, sizeof *l->sent);
    l->live_units = calloc(num_stages, sizeof *l->live_units);
    l->kv_slot_of = malloc(num_slots * sizeof *l->kv_slot_of);
    l->grad_slot_of = malloc(num_slots * sizeof *l->grad_slot_of);
    l->kv_used = calloc(num_slots, 1);
    l->grad_used = calloc(num_slots, 1);
    if (l->sequence[0] && l->sequence[1] && l->consumers && l->places && l->freed && l->sent && l->live_units &&
        l->kv_slot_of && l->grad_slot_of && l->kv_used && l->grad_used)
        return S1F_OK;

no_memory:
    return s1f_fail(S1F_ERR_MEMORY, "no memory to lower %lld units of %d stages", (long long)l->units_per_stage,
                    program->num_stages);
}

static void free_lowering(lowering *l)
{
    free(l->activation_edge);
    free(l->gradient_edge);
    free(l->sequence[0]);
    free(l->sequence[1]);
    free(l->consumers);
    free(l->places);
    free(l->freed);
    free(l->sent);
    free(l->live_units);
    free(l->kv_slot_of);
    free(l->grad_slot_of);
    free(l->kv_used);
    free(l->grad_used);
}

static void reset_counters(const lowering *l)
{
    memset(l->freed, 0, (size_t)l->program->num_edges * sizeof *l->freed);
    memset(l->sent, 0, (size_t)l->program->num_edges * sizeof *l->sent);
}

s1f_status s1f_schedule_lower(const s1f_schedule *schedule, int32_t prefetch, s1f_program **out)
{
    if (prefetch < 0)
        return s1f_fail(S1F_ERR_ARG, "prefetch is %d, must be at least 0", prefetch);
    s1f_program *program = NULL;
    lowering l = {0};
    s1f_status status = s1f_schedule_check(schedule, 0);
    if (status != S1F_OK)
        return status;
    if ((status = create_program(schedule, &program)) != S1F_OK ||
        (status = create_lowering(schedule, program, &l)) != S1F_OK)
        goto done;

    number_messages(&l);
    count_places(&l, prefetch);
    reset_counters(&l);
    if ((status = run_with_credits(&l)) != S1F_OK)
        goto done;
    reset_counters(&l);
    for (int32_t rank = 0; rank < program->num_ranks && status == S1F_OK; rank++)
        status = write_program(&l, l.sent, rank);
    if (status != S1F_OK)
        goto done;
    fill_send_places(&l);
    *out = program;
    program = NULL;

done:
    free_lowering(&l);
    s1f_program_free(program);
    return status;
}

s1f_status s1f_program_add_receives(s1f_program *program)
{
    size_t num_ranks = (size_t)program->num_ranks;
    s1f_instruction **instructions = calloc(num_ranks, sizeof *instructions);
    int64_t *counts = calloc(num_ranks, sizeof *counts);
    rank_program *without = program->programs, *with = calloc(num_ranks, sizeof *with);
    s1f_status status = S1F_OK;
    if (instructions == NULL || counts == NULL || with == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for the receives of %zu ranks", num_ranks);
    if (status == S1F_OK)
        status = s1f_receives_place(program, instructions, counts);
    if (status == S1F_OK) {
        for (size_t rank = 0; rank < num_ranks; rank++)
            with[rank] = (rank_program){instructions[rank], counts[rank]};
        program->programs = with;
        if ((status = s1f_receives_check(program)) != S1F_OK)
            program->programs = without;
    }
    rank_program *unused = status == S1F_OK ? without : with; /* its arrays are in `instructions` already */
    for (size_t rank = 0; unused != NULL && instructions != NULL && rank < num_ranks; rank++)
        free(status == S1F_OK ? without[rank].instructions : instructions[rank]);
    free(unused);
    free(counts);
    free(instructions);
    return status;
}

void s1f_program_free(s1f_program *program)
{
    if (program == NULL)
        return;
    if (program->programs != NULL)
        for (int32_t rank = 0; rank < program->num_ranks; rank++)
            free(program->programs[rank].instructions);
    free(program->programs);
    free(program->edges);
    free(program->peaks);
    free(program->rank_of_stage);
    free(program);
}

const s1f_instruction *s1f_program_instructions(const s1f_program *program, int32_t rank, int64_t *count)
{
    *count = program->programs[rank].count;
    return program->programs[rank].instructions;
}

int64_t s1f_program_num_units(const s1f_program *program, int32_t rank)
{
    int64_t num_units = 0;
    for (int64_t i = 0; i < program->programs[rank].count; i++)
        num_units += program->programs[rank].instructions[i].opcode == S1F_OP_RUN;
    return num_units;
}

const s1f_edge *s1f_program_edges(const s1f_program *program, int32_t *count)
{
    *count = program->num_edges;
    return program->edges;
}

s1f_stage_peak s1f_program_stage_peak(const s1f_program *program, int32_t stage)
{
    return program->peaks[stage];
}

/* Peak of the summed weights of the live units of one rank, of one stage of it or (-1) of all. */
static int64_t peak_weight(const s1f_program *program, int32_t rank, int32_t stage, const int64_t *weights,
                           int64_t stage_stride)
{
    int64_t live = 0, peak = 0;
    for (int64_t i = 0; i < program->programs[rank].count; i++) {
        const s1f_instruction *instruction = &program->programs[rank].instructions[i];
        s1f_unit unit = instruction->unit;
        if (stage >= 0 && unit.stage != stage)
            continue;
        int64_t weight = weights[unit.stage * stage_stride + unit.segment];
        if (instruction->opcode == S1F_OP_RUN && unit.pass == S1F_PASS_FORWARD) {
            live += weight;
            peak = live > peak ? live : peak;
        } else if (instruction->opcode == S1F_OP_FREE) {
            live -= weight;
        }
    }
    return peak;
}

int64_t s1f_program_peak_tokens(const s1f_program *program, int32_t stage, const int64_t *segment_sizes)
{
    return peak_weight(program, program->rank_of_stage[stage], stage, segment_sizes, 0);
}

int64_t s1f_program_rank_peak(const s1f_program *program, int32_t rank, const int64_t *weights)
{
    return peak_weight(program, rank, -1, weights, program->num_segments);
}

int32_t s1f_program_num_ranks(const s1f_program *program)
{
    return program->num_ranks;
}

int32_t s1f_program_num_stages(const s1f_program *program)
{
    return program->num_stages;
}

int32_t s1f_program_num_microbatches(const s1f_program *program)
{
    return program->num_microbatches;
}

int32_t s1f_program_num_segments(const s1f_program *program)
{
    return program->num_segments;
}

int32_t s1f_program_rank_of_stage(const s1f_program *program, int32_t stage)
{
    return program->rank_of_stage[stage];
}

int s1f_program_has_backward(const s1f_program *program)
{
    return program->has_backward;
}
