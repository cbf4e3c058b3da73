/* executor.c - one rank's walk over its lowered program. */
#include "executor.h"

#include "../core/pool.h"

#include <stdlib.h>
#include <string.h>

typedef struct {        /* an edge of this rank, from either end */
    void **keeps;       /* sender, [num_messages]: results on their way; a GPU reads them after SEND has returned */
    int64_t first, end; /* of keeps: not released yet */
} edge_state;

typedef struct {
    s1f_stage_measure measure;
    int32_t live_units;
    int64_t live_tokens;
} stage_count;

struct s1f_executor {
    s1f_pool pool; /* of all arrays */
    const s1f_program *program;
    const s1f_instruction *instructions; /* the rank's */
    const s1f_edge *edges;
    int64_t num_instructions;
    int32_t num_edges, thread_scope;
    s1f_group *group;
    s1f_kv_cache *cache;
    s1f_compute compute;
    s1f_edge_end **ends;
    edge_state *edge_states;
    s1f_stage_slots *slots; /* of this rank's stages */
    s1f_lifetime_table lifetimes;
    int32_t num_slots;
    s1f_span *spans;
    s1f_late_weight *weights; /* numbers of instructions, RUNs */
    s1f_fill *fills;          /* room for one entry of each wait and each weight */
    int64_t num_weights;
    /* in the current step: */
    int64_t next_weight, num_fills;
    int64_t step;
    int32_t training;
    s1f_step_layout layout;
    stage_count *stages; /* [stage] */
    /* between two RUNs: */
    s1f_input *inputs; /* for the next RUN */
    int32_t num_inputs;
    s1f_result result; /* of the last RUN */
    int32_t num_unsent;
};

void s1f_executor_free(s1f_executor *executor)
{
    if (executor == NULL)
        return;
    s1f_pool_free(&executor->pool);
    free(executor);
}

/* Most messages that one unit of the rank waits for. */
static int32_t most_inputs(const s1f_executor *executor)
{
    int32_t most = 0, count = 0;
    for (int64_t i = 0; i < executor->num_instructions; i++) {
        if (executor->instructions[i].opcode == S1F_OP_RUN)
            count = 0;
        else if (executor->instructions[i].opcode == S1F_OP_WAIT)
            most = ++count > most ? count : most;
    }
    return most;
}

/* Takes this rank's ends of edges. */
static s1f_status set_edges(s1f_executor *executor, int32_t rank, s1f_edge_end *const *ends)
{
    for (int32_t i = 0; i < executor->num_edges; i++) {
        const s1f_edge *edge = &executor->edges[i];
        edge_state *state = &executor->edge_states[i];
        executor->ends[i] = ends[i];
        if (edge->source_rank != rank && edge->destination_rank != rank)
            continue;
        if (ends[i] == NULL)
            return s1f_fail(S1F_ERR_ARG, "rank %d has no end of the edge from stage %d to stage %d", (int)rank,
                            (int)edge->source_stage, (int)edge->destination_stage);
        if (edge->source_rank == rank)
            state->keeps = s1f_pool_take(&executor->pool, (size_t)edge->num_messages, sizeof *state->keeps);
    }
    return S1F_OK;
}

static void set_weights(s1f_executor *executor, const s1f_rank_program *own)
{
    s1f_pool *pool = &executor->pool;
    int64_t num_waits = 0, unit = 0, *run = s1f_pool_take(pool, (size_t)own->num_units, sizeof *run);
    executor->num_weights =
        s1f_find_late_weights(&executor->program->shape, own->units, own->num_units, pool, &executor->weights);
    for (int64_t i = 0; !pool->is_short && i < own->count; i++) {
        num_waits += own->instructions[i].opcode == S1F_OP_WAIT;
        if (own->instructions[i].opcode == S1F_OP_RUN)
            run[unit++] = i;
    }
    for (int64_t w = 0; w < executor->num_weights; w++) {
        s1f_late_weight *weight = &executor->weights[w];
        *weight = (s1f_late_weight){run[weight->ready], run[weight->run]};
    }
    executor->fills = s1f_pool_take(pool, (size_t)(num_waits + executor->num_weights), sizeof *executor->fills);
}

static void set_slots(s1f_executor *executor, int32_t rank)
{
    const s1f_program *program = executor->program;
    for (int32_t stage = 0; stage < program->shape.num_stages; stage++) {
        s1f_stage_peak peak = program->peaks[stage];
        if (program->shape.rank_of_stage[stage] == rank)
            executor->slots[executor->num_slots++] = (s1f_stage_slots){stage, peak.kv_slots, peak.grad_slots};
    }
}

s1f_status s1f_executor_create(const s1f_program *program, int32_t rank, s1f_group *group, s1f_kv_cache *cache,
                               s1f_edge_end *const *ends, int32_t thread_scope, const s1f_compute *compute,
                               s1f_executor **out)
{
    s1f_executor *executor = calloc(1, sizeof *executor);
    if (executor == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the executor");
    executor->program = program;
    executor->instructions = s1f_program_instructions(program, rank, &executor->num_instructions);
    executor->edges = s1f_program_edges(program, &executor->num_edges);
    executor->lifetimes = s1f_lifetimes_of(&program->shape);
    executor->thread_scope = thread_scope;
    executor->group = group;
    executor->cache = cache;
    executor->compute = *compute;
    s1f_pool *pool = &executor->pool;
    size_t num_edges = (size_t)executor->num_edges, num_stages = (size_t)program->shape.num_stages;
    s1f_layout_create(program, rank, pool, &executor->layout);
    executor->ends = s1f_pool_take(pool, num_edges, sizeof *executor->ends);
    executor->slots = s1f_pool_take(pool, num_stages, sizeof *executor->slots);
    executor->spans = s1f_pool_take(pool, (size_t)executor->num_instructions, sizeof *executor->spans);
    executor->stages = s1f_pool_take(pool, num_stages, sizeof *executor->stages);
    executor->inputs = s1f_pool_take(pool, (size_t)most_inputs(executor), sizeof *executor->inputs);
    executor->edge_states = s1f_pool_take(pool, num_edges, sizeof *executor->edge_states);
    s1f_status status = pool->is_short ? S1F_ERR_MEMORY : set_edges(executor, rank, ends);
    set_weights(executor, &program->ranks[rank]);
    if (pool->is_short)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for an executor of %lld instructions",
                          (long long)executor->num_instructions);
    if (status != S1F_OK) {
        s1f_executor_free(executor);
        return status;
    }
    set_slots(executor, rank);
    *out = executor;
    return S1F_OK;
}

/* Fixes the split of the sequence for this step and enters the cache's step. */
static s1f_status set_sizes(s1f_executor *executor, int64_t sequence_length, const int64_t *sizes,
                            const s1f_unit_parts *parts)
{
    int64_t num_rows;
    S1F_TRY(s1f_layout_set(&executor->layout, sequence_length, sizes, parts, &num_rows));
    return s1f_kv_cache_begin_step(executor->cache, executor->slots, executor->num_slots, num_rows,
                                   executor->program->shape.num_segments);
}

static s1f_status learn_sizes(s1f_executor *executor, const s1f_message *message)
{
    int64_t num_columns = s1f_num_columns(&executor->program->shape);
    int64_t *sizes = malloc((size_t)num_columns * sizeof *sizes);
    if (sizes == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld segment sizes", (long long)num_columns);
    s1f_status status = executor->compute.segment_sizes(executor->compute.context, message->sequence_length, sizes);
    if (status == S1F_OK)
        status = set_sizes(executor, message->sequence_length, sizes, NULL);
    free(sizes);
    return status;
}

/* The message of a SEND or WAIT, as far as the program and the step say what it is. */
static s1f_message describe(const s1f_executor *executor, const s1f_instruction *instruction, s1f_unit producer)
{
    const s1f_edge *edge = &executor->edges[instruction->edge];
    return (s1f_message){
        .step = executor->step,
        .sequence = instruction->sequence,
        .source_stage = edge->source_stage,
        .destination_stage = edge->destination_stage,
        .pass = producer.pass,
        .microbatch = producer.microbatch,
        .segment = producer.segment,
        .training = executor->training,
        .sequence_length = s1f_total_of(&executor->layout, producer),
        .offset = s1f_offset_of(&executor->layout, producer),
        .length = s1f_size_of(&executor->layout, producer),
    };
}

/* Runs parts of the next W, whose I has run, until the message of the WAIT at i has come. */
static s1f_status fill_wait(s1f_executor *executor, int64_t i)
{
    const s1f_instruction *instruction = &executor->instructions[i];
    int64_t first = executor->num_fills;
    while (executor->compute.fill != NULL && executor->next_weight < executor->num_weights &&
           executor->weights[executor->next_weight].ready < i &&
           !s1f_p2p_has_come(executor->ends[instruction->edge], instruction->sequence)) {
        s1f_unit unit = executor->instructions[executor->weights[executor->next_weight].run].unit;
        int32_t is_left = 0;
        int64_t start = s1f_now_ns();
        S1F_TRY(executor->compute.fill(executor->compute.context, unit, &is_left));
        const s1f_fill *last = executor->num_fills > first ? &executor->fills[executor->num_fills - 1] : NULL;
        if (last == NULL || memcmp(&last->unit, &unit, sizeof unit) != 0)
            executor->fills[executor->num_fills++] = (s1f_fill){unit, {start, start}};
        executor->fills[executor->num_fills - 1].span.end_ns = s1f_now_ns();
        executor->next_weight += !is_left;
    }
    return S1F_OK;
}

static s1f_status wait_input(s1f_executor *executor, int64_t i)
{
    const s1f_instruction *instruction = &executor->instructions[i];
    S1F_TRY(fill_wait(executor, i));
    s1f_edge_end *end = executor->ends[instruction->edge];
    s1f_input *input = &executor->inputs[executor->num_inputs];
    *input = (s1f_input){.edge = instruction->edge, .place = instruction->place};
    S1F_TRY(s1f_p2p_wait(end, instruction->sequence, instruction->place, &input->message, &input->payload));
    const s1f_message *message = input->message;
    const s1f_edge *edge = &executor->edges[instruction->edge];
    s1f_unit producer = executor->program->ranks[edge->source_rank].units[edge->sender[instruction->sequence]];
    s1f_message expected = describe(executor, instruction, producer);
    S1F_TRY(s1f_message_check(message, &expected));
    if (!executor->layout.is_known)
        S1F_TRY(learn_sizes(executor, message));
    int64_t offset = s1f_offset_of(&executor->layout, producer), length = s1f_size_of(&executor->layout, producer);
    int64_t sequence = s1f_total_of(&executor->layout, producer);
    if (message->sequence_length != sequence || message->offset != offset || message->length != length)
        /* the end may wrap where a header is corrupted */
        return s1f_fail(S1F_ERR_STATE,
                        "%s: segment %d is tokens [%lld, %lld) of %lld at the sender, [%lld, %lld) of %lld here: "
                        "give every rank the same segment_sizes",
                        end->text, (int)producer.segment, (long long)message->offset,
                        (long long)((uint64_t)message->offset + (uint64_t)message->length),
                        (long long)message->sequence_length, (long long)offset, (long long)(offset + length),
                        (long long)sequence);
    executor->num_inputs++;
    return S1F_OK;
}

/* A segment's saved state lives from the unit that saves it to FREE. */
static void count_live(s1f_executor *executor, s1f_unit unit)
{
    if (!s1f_begins_to_live(s1f_unit_lifetimes(&executor->lifetimes, unit)))
        return;
    stage_count *stage = &executor->stages[unit.stage];
    s1f_stage_measure *measure = &stage->measure;
    int32_t units = ++stage->live_units;
    int64_t tokens = stage->live_tokens += s1f_size_of(&executor->layout, unit);
    measure->peak_live_units = units > measure->peak_live_units ? units : measure->peak_live_units;
    measure->peak_live_tokens = tokens > measure->peak_live_tokens ? tokens : measure->peak_live_tokens;
}

static void free_unit(s1f_executor *executor, s1f_unit unit)
{
    executor->stages[unit.stage].live_units--;
    executor->stages[unit.stage].live_tokens -= s1f_size_of(&executor->layout, unit);
}

static s1f_status run_unit(s1f_executor *executor, const s1f_instruction *instruction)
{
    s1f_unit unit = instruction->unit;
    if (!executor->layout.is_known)
        return s1f_fail(S1F_ERR_ARG,
                        "stage %d runs first on its rank and knows no sequence length: inputs are needed there",
                        (int)unit.stage);
    s1f_current_unit current = {
        .unit = unit,
        .kv_slot = instruction->kv_slot,
        .grad_slot = instruction->grad_slot,
        .training = executor->training,
        .cache = executor->cache,
    };
    s1f_layout_describe(&executor->layout, &current);
    char text[48];
    s1f_unit_text(unit, executor->num_slots > 1, text, sizeof text);
    s1f_group_progress(executor->group, text);
    S1F_TRY(s1f_kv_cache_begin_unit(executor->cache, &current));
    count_live(executor, unit);
    if (executor->thread_scope)
        s1f_current_unit_set_thread(&current);
    else
        S1F_TRY(s1f_current_unit_set_process(&current));
    s1f_status status = executor->compute.run(executor->compute.context, &current, executor->inputs,
                                              executor->num_inputs, executor->num_unsent, &executor->result);
    if (executor->thread_scope)
        s1f_current_unit_set_thread(NULL);
    else
        (void)s1f_current_unit_set_process(NULL);
    if (status == S1F_OK)
        s1f_kv_cache_finish_unit(executor->cache, &current);
    return status;
}

/* Releases the results that no transfer reads any more. */
static s1f_status release_sent(s1f_executor *executor, int32_t edge)
{
    edge_state *state = &executor->edge_states[edge];
    int64_t count;
    if (state->first == state->end)
        return S1F_OK;
    s1f_status status = s1f_p2p_count_sent(executor->ends[edge], &count);
    while (status == S1F_OK && state->first < state->end && state->first < count)
        executor->compute.release(executor->compute.context, state->keeps[state->first++]);
    return status;
}

/* SENDs of the RUN at i. */
static int32_t count_sends(const s1f_executor *executor, int64_t i)
{
    int32_t count = 0;
    while (++i < executor->num_instructions && executor->instructions[i].opcode != S1F_OP_RUN)
        count += executor->instructions[i].opcode == S1F_OP_SEND;
    return count;
}

static s1f_status run(s1f_executor *executor, int64_t i)
{
    executor->num_unsent = count_sends(executor, i);
    if (executor->next_weight < executor->num_weights && executor->weights[executor->next_weight].run == i)
        executor->next_weight++;
    s1f_status status = run_unit(executor, &executor->instructions[i]);
    executor->num_inputs = 0;
    for (int32_t edge = 0; status == S1F_OK && edge < executor->num_edges; edge++)
        status = release_sent(executor, edge);
    return status;
}

static s1f_status send(s1f_executor *executor, const s1f_instruction *instruction)
{
    const s1f_result *result = &executor->result;
    s1f_message message = describe(executor, instruction, instruction->unit);
    message.num_tensors = result->num_tensors;
    memcpy(message.tensors, result->tensors, (size_t)result->num_tensors * sizeof *result->tensors);
    s1f_status status = s1f_p2p_send(executor->ends[instruction->edge], instruction->sequence, instruction->place,
                                     &message, result->data);
    edge_state *state = &executor->edge_states[instruction->edge];
    state->keeps[state->end++] = result->keep; /* on an error as well: part of it may be under way */
    if (--executor->num_unsent == 0)
        executor->result = (s1f_result){0};
    return status == S1F_OK ? release_sent(executor, instruction->edge) : status;
}

static s1f_status post(s1f_executor *executor, const s1f_instruction *instruction)
{
    if (executor->compute.leave_place != NULL)
        S1F_TRY(executor->compute.leave_place(executor->compute.context, instruction->edge, instruction->place));
    return s1f_p2p_post(executor->ends[instruction->edge], instruction->sequence, instruction->place);
}

static s1f_status walk(s1f_executor *executor)
{
    for (int64_t i = 0; i < executor->num_instructions; i++) {
        const s1f_instruction *instruction = &executor->instructions[i];
        s1f_status status = S1F_OK;
        executor->spans[i].start_ns = s1f_now_ns();
        switch (instruction->opcode) {
        case S1F_OP_POST: status = post(executor, instruction); break;
        case S1F_OP_RECEIVE:
            status = s1f_p2p_receive(executor->ends[instruction->edge], instruction->sequence, instruction->place);
            break;
        case S1F_OP_WAIT: status = wait_input(executor, i); break;
        case S1F_OP_RUN: status = run(executor, i); break;
        case S1F_OP_SEND: status = send(executor, instruction); break;
        case S1F_OP_FREE: free_unit(executor, instruction->unit); break;
        case S1F_OP_BACK:
            status = executor->compute.back(executor->compute.context,
                                            s1f_cell_of_all(&executor->program->shape, instruction->unit));
            break;
        }
        executor->spans[i].end_ns = s1f_now_ns();
        if (status != S1F_OK)
            return status;
    }
    return S1F_OK;
}

/* Nothing of the step is under way after this, on either side of an error. */
static s1f_status finish_transfers(s1f_executor *executor, s1f_status status)
{
    for (int32_t i = 0; status == S1F_OK && i < executor->num_edges; i++)
        if (executor->ends[i] != NULL)
            status = s1f_p2p_finish(executor->ends[i], 0);
    for (int32_t i = 0; status != S1F_OK && i < executor->num_edges; i++)
        if (executor->ends[i] != NULL)
            (void)s1f_p2p_finish(executor->ends[i], 1);
    for (int32_t i = 0; i < executor->num_edges; i++)
        for (edge_state *state = &executor->edge_states[i]; state->first < state->end; state->first++)
            executor->compute.release(executor->compute.context, state->keeps[state->first]);
    for (; executor->result.keep != NULL && executor->num_unsent > 0; executor->num_unsent--)
        executor->compute.release(executor->compute.context, executor->result.keep);
    return status;
}

/* Places that an edge is cut into. Orders of rows change from step to step, and with them the places that they need; a
 * power of two is most often what is there already, so that no memory is given back and touched again. */
static int32_t count_places(const s1f_executor *executor, int32_t edge)
{
    int32_t needed = executor->edges[edge].num_places, count = 4;
    if (executor->program->shape.first_cell == NULL || needed > INT32_MAX / 2)
        return needed;
    while (count < needed)
        count *= 2;
    return count;
}

s1f_status s1f_executor_step(s1f_executor *executor, int64_t step, int32_t training, int64_t sequence_length,
                             const int64_t *sizes, const s1f_unit_parts *parts)
{
    memset(executor->spans, 0, (size_t)executor->num_instructions * sizeof *executor->spans);
    memset(executor->stages, 0, (size_t)executor->program->shape.num_stages * sizeof *executor->stages);
    executor->step = step;
    executor->training = training;
    executor->layout.is_known = 0;
    executor->num_inputs = executor->num_unsent = 0;
    executor->next_weight = executor->num_fills = 0;
    executor->result = (s1f_result){0};
    for (int32_t i = 0; i < executor->num_edges; i++)
        executor->edge_states[i].first = executor->edge_states[i].end = 0;
    if (sequence_length != 0)
        S1F_TRY(set_sizes(executor, sequence_length, sizes, parts));
    for (int32_t i = 0; i < executor->num_edges; i++)
        if (executor->ends[i] != NULL)
            S1F_TRY(s1f_p2p_begin_step(executor->ends[i], count_places(executor, i)));
    return finish_transfers(executor, walk(executor));
}

s1f_unit s1f_executor_last_unit(const s1f_executor *executor)
{
    int64_t i = executor->num_instructions;
    if (i == 0)
        return (s1f_unit){0};
    while (--i > 0 && executor->spans[i].start_ns == 0)
        continue;
    return executor->instructions[i].unit;
}

s1f_status s1f_executor_settle_times(s1f_executor *executor, int64_t start_ns)
{
    const s1f_compute *compute = &executor->compute;
    int64_t at = start_ns, number = 0;
    for (int64_t i = 0; i < executor->num_instructions; i++) {
        s1f_span *span = &executor->spans[i], found = {at, at};
        const s1f_instruction *instruction = &executor->instructions[i];
        if (instruction->opcode == S1F_OP_RUN)
            S1F_TRY(compute->unit_times(compute->context, number++, &found.start_ns, &found.end_ns));
        else if (instruction->opcode == S1F_OP_BACK)
            S1F_TRY(compute->back_time(compute->context, s1f_cell_of_all(&executor->program->shape, instruction->unit),
                                       &found.end_ns));
        else if (instruction->opcode == S1F_OP_WAIT || instruction->opcode == S1F_OP_SEND) {
            s1f_edge_end *end = executor->ends[instruction->edge];
            if (end->transport->arrived == NULL)
                found.end_ns = span->end_ns; /* the host had the message then, or had waited for the unit, and copied */
            else if (instruction->opcode == S1F_OP_WAIT)
                S1F_TRY(end->transport->arrived(end, instruction->sequence, &found.end_ns));
        }
        found.start_ns = found.start_ns < at ? at : found.start_ns;
        found.end_ns = found.end_ns < found.start_ns ? found.start_ns : found.end_ns;
        *span = found;
        at = found.end_ns;
    }
    return S1F_OK;
}

const s1f_span *s1f_executor_spans(const s1f_executor *executor, int64_t *count)
{
    *count = executor->num_instructions;
    return executor->spans;
}

const s1f_fill *s1f_executor_fills(const s1f_executor *executor, int64_t *count)
{
    *count = executor->num_fills;
    return executor->fills;
}

s1f_stage_measure s1f_executor_stage_measure(const s1f_executor *executor, int32_t stage)
{
    return executor->stages[stage].measure;
}
