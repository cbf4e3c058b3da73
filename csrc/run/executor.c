/* executor.c - one rank's walk over its lowered program. */
#include "executor.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { /* results that are on their way over one edge, by message; a GPU reads them after SEND has returned */
    void **keeps; /* [num_messages] */
    int64_t first, end;
} held_results;

struct s1f_executor {
    const s1f_instruction *instructions;
    int64_t num_instructions;
    const s1f_edge *edges;
    int32_t num_edges, num_stages, num_segments, thread_scope;
    s1f_group *group;
    s1f_kv_cache *cache;
    s1f_compute compute;
    s1f_edge_end **ends;
    s1f_stage_slots *slots; /* of this rank's stages */
    int32_t num_slots;
    int64_t *sizes, *offsets; /* of the segments, in the current step; sizes[0] == 0: not known yet */
    s1f_span *spans;
    s1f_stage_measure *measures; /* per stage */
    int32_t *live_units;         /* per stage */
    int64_t *live_tokens;
    s1f_unit last_unit;
    int64_t sequence_length;
    s1f_device *device; /* NULL: none */
    held_results *held; /* per edge */
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void s1f_executor_free(s1f_executor *executor)
{
    if (executor == NULL)
        return;
    for (int32_t i = 0; executor->held != NULL && i < executor->num_edges; i++)
        free(executor->held[i].keeps);
    free(executor->held);
    free(executor->ends);
    free(executor->slots);
    free(executor->sizes);
    free(executor->offsets);
    free(executor->spans);
    free(executor->measures);
    free(executor->live_units);
    free(executor->live_tokens);
    free(executor);
}

s1f_status s1f_executor_create(const s1f_program *program, int32_t rank, s1f_group *group, s1f_kv_cache *cache,
                               s1f_edge_end *const *ends, int32_t thread_scope, const s1f_compute *compute,
                               s1f_executor **out)
{
    s1f_executor *executor = calloc(1, sizeof *executor);
    if (executor == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the executor");
    executor->instructions = s1f_program_instructions(program, rank, &executor->num_instructions);
    executor->edges = s1f_program_edges(program, &executor->num_edges);
    executor->num_stages = s1f_program_num_stages(program);
    executor->num_segments = s1f_program_num_segments(program);
    executor->thread_scope = thread_scope;
    executor->group = group;
    executor->cache = cache;
    executor->compute = *compute;

    /* one element more than needed, so that an empty table is no special case */
    size_t num_edges = (size_t)executor->num_edges + 1, num_stages = (size_t)executor->num_stages;
    size_t num_segments = (size_t)executor->num_segments;
    executor->ends = calloc(num_edges, sizeof *executor->ends);
    executor->slots = calloc(num_stages, sizeof *executor->slots);
    executor->sizes = calloc(num_segments, sizeof *executor->sizes);
    executor->offsets = calloc(num_segments, sizeof *executor->offsets);
    executor->spans = calloc((size_t)executor->num_instructions + 1, sizeof *executor->spans);
    executor->measures = calloc(num_stages, sizeof *executor->measures);
    executor->live_units = calloc(num_stages, sizeof *executor->live_units);
    executor->live_tokens = calloc(num_stages, sizeof *executor->live_tokens);
    executor->held = calloc(num_edges, sizeof *executor->held);
    int no_memory = executor->held == NULL;
    for (int32_t i = 0; !no_memory && i < executor->num_edges; i++)
        if (executor->edges[i].source_rank == rank) {
            executor->held[i].keeps = calloc((size_t)executor->edges[i].num_messages, sizeof(void *));
            no_memory = executor->held[i].keeps == NULL;
        }
    if (no_memory || !executor->ends || !executor->slots || !executor->sizes || !executor->offsets ||
        !executor->spans || !executor->measures || !executor->live_units || !executor->live_tokens) {
        s1f_status status = s1f_fail(S1F_ERR_MEMORY, "no memory for an executor of %lld instructions",
                                     (long long)executor->num_instructions);
        s1f_executor_free(executor);
        return status;
    }
    for (int32_t i = 0; i < executor->num_edges; i++) {
        const s1f_edge *edge = &executor->edges[i];
        executor->ends[i] = ends[i];
        if ((edge->source_rank == rank || edge->destination_rank == rank) && ends[i] == NULL) {
            s1f_executor_free(executor);
            return s1f_fail(S1F_ERR_ARG, "rank %d has no end of the edge from stage %d to stage %d", (int)rank,
                            (int)edge->source_stage, (int)edge->destination_stage);
        }
    }
    for (int64_t i = 0; i < executor->num_instructions; i++) {
        int32_t stage = executor->instructions[i].unit.stage, known = 0;
        if (executor->instructions[i].opcode != S1F_OP_RUN)
            continue;
        for (int32_t j = 0; j < executor->num_slots; j++)
            known |= executor->slots[j].stage == stage;
        if (!known) {
            s1f_stage_peak peak = s1f_program_stage_peak(program, stage);
            executor->slots[executor->num_slots++] = (s1f_stage_slots){stage, peak.kv_slots, peak.grad_slots};
        }
    }
    *out = executor;
    return S1F_OK;
}

/* Fixes the split of the sequence for this step and enters the cache's step. */
static s1f_status set_sizes(s1f_executor *executor, int64_t sequence_length, const int64_t *sizes)
{
    int64_t sum = 0;
    for (int32_t s = 0; s < executor->num_segments; s++) {
        if (sizes[s] < 1)
            return s1f_fail(S1F_ERR_ARG, "segment %d has %lld tokens, must have at least 1", (int)s,
                            (long long)sizes[s]);
        executor->sizes[s] = sizes[s];
        executor->offsets[s] = sum;
        sum += sizes[s];
    }
    if (sum != sequence_length)
        return s1f_fail(S1F_ERR_ARG, "segment sizes sum to %lld tokens, the sequence has %lld", (long long)sum,
                        (long long)sequence_length);
    executor->sequence_length = sequence_length;
    return s1f_kv_cache_begin_step(executor->cache, executor->slots, executor->num_slots, sequence_length,
                                   executor->num_segments);
}

static s1f_status learn_sizes(s1f_executor *executor, const s1f_message *message)
{
    int64_t *sizes = malloc((size_t)executor->num_segments * sizeof *sizes);
    if (sizes == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d segment sizes", (int)executor->num_segments);
    s1f_status status = executor->compute.segment_sizes(executor->compute.context, message->sequence_length, sizes);
    if (status == S1F_OK)
        status = set_sizes(executor, message->sequence_length, sizes);
    free(sizes);
    return status;
}

static s1f_message describe(const s1f_executor *executor, const s1f_instruction *instruction, s1f_unit producer,
                            int64_t step, int32_t training)
{
    const s1f_edge *edge = &executor->edges[instruction->edge];
    int32_t segment = instruction->unit.segment;
    return (s1f_message){
        .step = step,
        .sequence = instruction->sequence,
        .source_stage = edge->source_stage,
        .destination_stage = edge->destination_stage,
        .pass = producer.pass,
        .microbatch = producer.microbatch,
        .segment = segment,
        .training = training,
        .sequence_length = executor->sequence_length,
        .offset = executor->offsets[segment],
        .length = executor->sizes[segment],
    };
}

static s1f_status wait_input(s1f_executor *executor, const s1f_instruction *instruction, int64_t step, int32_t training,
                             s1f_input *input)
{
    s1f_edge_end *end = executor->ends[instruction->edge];
    const s1f_message *message = NULL;
    const void *payload = NULL;
    s1f_status status = s1f_p2p_wait(end, instruction->sequence, instruction->place, &message, &payload);
    if (status != S1F_OK)
        return status;
    s1f_unit producer = instruction->unit; /* the same pass of the same segment, one stage away */
    s1f_message expected = describe(executor, instruction, producer, step, training);
    status = s1f_message_check(message, &expected);
    if (status != S1F_OK)
        return status;
    if (executor->sizes[0] == 0 && (status = learn_sizes(executor, message)) != S1F_OK)
        return status;
    int32_t segment = instruction->unit.segment;
    if (message->sequence_length != executor->sequence_length || message->offset != executor->offsets[segment] ||
        message->length != executor->sizes[segment])
        return s1f_fail(
            S1F_ERR_STATE,
            "%s: segment %d is tokens [%lld, %lld) of %lld at the sender, [%lld, %lld) of %lld here: "
            "give every rank the same segment_sizes",
            end->text, (int)segment, (long long)message->offset, (long long)(message->offset + message->length),
            (long long)message->sequence_length, (long long)executor->offsets[segment],
            (long long)(executor->offsets[segment] + executor->sizes[segment]), (long long)executor->sequence_length);
    *input = (s1f_input){message, payload, instruction->edge, instruction->place};
    return S1F_OK;
}

static s1f_status run_unit(s1f_executor *executor, const s1f_instruction *instruction, int32_t training,
                           const s1f_input *input, int32_t is_sent, s1f_result *result)
{
    s1f_unit unit = instruction->unit;
    if (executor->sizes[0] == 0)
        return s1f_fail(S1F_ERR_ARG,
                        "stage %d runs first on its rank and knows no sequence length: inputs are needed there",
                        (int)unit.stage);
    s1f_current_unit current = {
        .unit = unit,
        .num_segments = executor->num_segments,
        .kv_slot = instruction->kv_slot,
        .grad_slot = instruction->grad_slot,
        .training = training,
        .offset = executor->offsets[unit.segment],
        .length = executor->sizes[unit.segment],
        .sequence_length = executor->sequence_length,
        .cache = executor->cache,
    };
    char text[48];
    s1f_unit_text(unit, executor->num_slots > 1, text, sizeof text);
    s1f_group_progress(executor->group, text);
    s1f_status status = s1f_kv_cache_begin_unit(executor->cache, &current);
    if (status == S1F_OK && executor->device != NULL)
        status = s1f_device_begin_unit(executor->device);
    if (status != S1F_OK)
        return status;
    if (unit.pass == S1F_PASS_FORWARD) {
        s1f_stage_measure *measure = &executor->measures[unit.stage];
        int32_t units = ++executor->live_units[unit.stage];
        int64_t tokens = executor->live_tokens[unit.stage] += current.length;
        measure->peak_live_units = units > measure->peak_live_units ? units : measure->peak_live_units;
        measure->peak_live_tokens = tokens > measure->peak_live_tokens ? tokens : measure->peak_live_tokens;
    }
    if (executor->thread_scope)
        s1f_current_unit_set_thread(&current);
    else if ((status = s1f_current_unit_set_process(&current)) != S1F_OK)
        return status;
    status = executor->compute.run(executor->compute.context, &current, input, is_sent, result);
    if (executor->thread_scope)
        s1f_current_unit_set_thread(NULL);
    else
        (void)s1f_current_unit_set_process(NULL);
    return status == S1F_OK ? s1f_kv_cache_finish_unit(executor->cache, &current) : status;
}

static s1f_status send_result(s1f_executor *executor, const s1f_instruction *instruction, int64_t step,
                              int32_t training, const s1f_result *result)
{
    s1f_message message = describe(executor, instruction, instruction->unit, step, training);
    message.num_tensors = result->num_tensors;
    memcpy(message.tensors, result->tensors, (size_t)result->num_tensors * sizeof *result->tensors);
    return s1f_p2p_send(executor->ends[instruction->edge], instruction->sequence, instruction->place, &message,
                        result->data);
}

/* Releases the results that no transfer reads any more. */
static s1f_status release_sent(s1f_executor *executor, int32_t edge)
{
    held_results *held = &executor->held[edge];
    int64_t count;
    if (held->first == held->end)
        return S1F_OK;
    s1f_status status = s1f_p2p_count_sent(executor->ends[edge], &count);
    while (status == S1F_OK && held->first < held->end && held->first < count)
        executor->compute.release(executor->compute.context, held->keeps[held->first++]);
    return status;
}

static s1f_status release_all_sent(s1f_executor *executor)
{
    s1f_status status = S1F_OK;
    for (int32_t i = 0; status == S1F_OK && i < executor->num_edges; i++)
        status = release_sent(executor, i);
    return status;
}

/* Nothing of the step is under way after this, on either side of an error. */
static s1f_status finish_transfers(s1f_executor *executor, s1f_status status)
{
    int32_t failed = status != S1F_OK;
    for (int32_t i = 0; i < executor->num_edges; i++) {
        if (executor->ends[i] == NULL)
            continue;
        s1f_status finished = failed ? S1F_OK : s1f_p2p_finish(executor->ends[i], 0);
        if (finished != S1F_OK) {
            failed = 1;
            status = finished;
        }
    }
    for (int32_t i = 0; failed && i < executor->num_edges; i++)
        if (executor->ends[i] != NULL)
            (void)s1f_p2p_finish(executor->ends[i], 1);
    for (int32_t i = 0; i < executor->num_edges; i++)
        for (held_results *held = &executor->held[i]; held->first < held->end; held->first++)
            executor->compute.release(executor->compute.context, held->keeps[held->first]);
    return status;
}

static void free_unit(s1f_executor *executor, s1f_unit unit)
{
    executor->live_units[unit.stage]--;
    executor->live_tokens[unit.stage] -= executor->sizes[unit.segment];
}

/* Whether a SEND belongs to the RUN at i; only RECEIVEs may stand between. */
static int is_sent_after(const s1f_executor *executor, int64_t i)
{
    while (++i < executor->num_instructions && executor->instructions[i].opcode == S1F_OP_RECEIVE)
        continue;
    return i < executor->num_instructions && executor->instructions[i].opcode == S1F_OP_SEND;
}

static s1f_status send_and_hold(s1f_executor *executor, const s1f_instruction *send, int64_t step, int32_t training,
                                s1f_result *result)
{
    held_results *held = &executor->held[send->edge];
    s1f_status status = send_result(executor, send, step, training, result);
    held->keeps[held->end++] = result->keep; /* on an error as well: part of it may be under way */
    *result = (s1f_result){0};
    return status == S1F_OK ? release_sent(executor, send->edge) : status;
}

static s1f_status walk(s1f_executor *executor, int64_t step, int32_t training, s1f_result *result)
{
    s1f_input input = {NULL, NULL, -1, -1};
    for (int64_t i = 0; i < executor->num_instructions; i++) {
        const s1f_instruction *instruction = &executor->instructions[i];
        s1f_status status = S1F_OK;
        executor->spans[i].start_ns = now_ns();
        executor->last_unit = instruction->unit;
        switch (instruction->opcode) {
        case S1F_OP_POST:
            status = s1f_p2p_post(executor->ends[instruction->edge], instruction->sequence, instruction->place);
            break;
        case S1F_OP_RECEIVE:
            status = s1f_p2p_receive(executor->ends[instruction->edge], instruction->sequence, instruction->place);
            break;
        case S1F_OP_WAIT: status = wait_input(executor, instruction, step, training, &input); break;
        case S1F_OP_RUN:
            status = run_unit(executor, instruction, training, &input, is_sent_after(executor, i), result);
            input = (s1f_input){NULL, NULL, -1, -1};
            if (status == S1F_OK)
                status = release_all_sent(executor);
            break;
        case S1F_OP_SEND: status = send_and_hold(executor, instruction, step, training, result); break;
        case S1F_OP_FREE: free_unit(executor, instruction->unit); break;
        }
        executor->spans[i].end_ns = now_ns();
        if (status != S1F_OK)
            return status;
    }
    return S1F_OK;
}

s1f_status s1f_executor_step(s1f_executor *executor, int64_t step, int32_t training, int64_t sequence_length,
                             const int64_t *sizes)
{
    s1f_status status = S1F_OK;
    memset(executor->spans, 0, (size_t)executor->num_instructions * sizeof *executor->spans);
    memset(executor->measures, 0, (size_t)executor->num_stages * sizeof *executor->measures);
    memset(executor->live_units, 0, (size_t)executor->num_stages * sizeof *executor->live_units);
    memset(executor->live_tokens, 0, (size_t)executor->num_stages * sizeof *executor->live_tokens);
    executor->sizes[0] = 0;
    executor->sequence_length = 0;
    if (executor->num_instructions > 0)
        executor->last_unit = executor->instructions[0].unit;
    if (sequence_length != 0 && (status = set_sizes(executor, sequence_length, sizes)) != S1F_OK)
        return status;
    for (int32_t i = 0; i < executor->num_edges; i++)
        if (executor->ends[i] != NULL &&
            (status = s1f_p2p_begin_step(executor->ends[i], executor->edges[i].num_places)) != S1F_OK)
            return status;
    for (int32_t i = 0; i < executor->num_edges; i++)
        executor->held[i].first = executor->held[i].end = 0;
    s1f_result result = {0};
    status = finish_transfers(executor, walk(executor, step, training, &result));
    if (result.keep != NULL)
        executor->compute.release(executor->compute.context, result.keep);
    return status;
}

void s1f_executor_set_device(s1f_executor *executor, s1f_device *device)
{
    executor->device = device;
}

s1f_unit s1f_executor_last_unit(const s1f_executor *executor)
{
    return executor->last_unit;
}

const s1f_span *s1f_executor_spans(const s1f_executor *executor, int64_t *count)
{
    *count = executor->num_instructions;
    return executor->spans;
}

s1f_stage_measure s1f_executor_stage_measure(const s1f_executor *executor, int32_t stage)
{
    return executor->measures[stage];
}
