/* test_executor.c - does the walk run every unit once, in its order, on its input, and does a failure end every rank?
 *
 * Ranks are threads over loopback arenas; compute is fake. F of stage s hands on what it got plus one, so that its
 * output is a function of (stage, micro-batch, segment), and B does the same on the way back: whoever receives can
 * tell. */
#include "check.h"

#include "model/memory.h"
#include "run/arena.h"
#include "run/executor.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RANKS = 4, MAX_EDGES = 16, ARENA_BYTES = 8 << 20, SEQUENCE = 24 };
static const int64_t SECOND = 1000000000;

typedef struct {
    s1f_schedule *schedule;
    s1f_program *program;
    int32_t num_ranks, num_stages, num_segments, num_microbatches;
    void *block;
    s1f_group *groups[MAX_RANKS];
    s1f_mapping *mappings[MAX_EDGES];
    s1f_edge_end *ends[MAX_RANKS][MAX_EDGES];
} pipeline;

typedef struct { /* one rank: its executor's context, and what it saw */
    pipeline *p;
    int32_t rank;
    s1f_kv_cache *cache;
    s1f_executor *executor;
    int64_t step, num_run; /* units run in this step */
    int64_t fail_at;       /* unit that fails, by its place in the rank's order; -1: none */
    int32_t kept;          /* results handed out and not released yet, one per SEND */
    s1f_status status;
    char error[512];
} rank_state;

typedef struct { /* what a unit hands out */
    int32_t num_sends, data[];
} shared_data;

/* -- a pipeline of threads --------------------------------------------------------------------------------------- */

/* Over an order of Seq1F1B. */
static pipeline make_pipeline(int32_t num_ranks, int32_t num_microbatches, int32_t num_segments)
{
    pipeline made = {.num_ranks = num_ranks,
                     .num_stages = num_ranks,
                     .num_segments = num_segments,
                     .num_microbatches = num_microbatches};
    CHECK_STATUS(s1f_schedule_build("seq1f1b", num_ranks, num_microbatches, num_segments, 1, NULL, &made.schedule),
                 S1F_OK, "");
    CHECK_STATUS(s1f_schedule_lower(made.schedule, (s1f_places){.prefetch = 1}, S1F_ALL_RANKS, &made.program), S1F_OK,
                 "");

    size_t block_bytes = (s1f_group_block_bytes(num_ranks) + 63) / 64 * 64;
    made.block = aligned_alloc(64, block_bytes);
    memset(made.block, 0, block_bytes);
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        CHECK(s1f_group_create(made.block, num_ranks, rank, NULL, NULL, &made.groups[rank]) == S1F_OK);
        s1f_group_set_limits(made.groups[rank], 30 * SECOND, 0);
    }
    int32_t num_edges;
    const s1f_edge *edges = s1f_program_edges(made.program, &num_edges);
    CHECK(num_edges <= MAX_EDGES);
    for (int32_t i = 0; i < num_edges; i++) {
        int fd = memfd_create("test_executor", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, ARENA_BYTES) == 0);
        CHECK(s1f_mapping_create(fd, ARENA_BYTES, &made.mappings[i]) == S1F_OK);
        close(fd);
        int32_t source = edges[i].source_rank, destination = edges[i].destination_rank;
        void *memory = made.mappings[i]->memory;
        CHECK(s1f_arena_end_create(made.groups[source], memory, ARENA_BYTES, -1, destination, 0, "edge",
                                   &made.ends[source][i]) == S1F_OK);
        CHECK(s1f_arena_end_create(made.groups[destination], memory, ARENA_BYTES, -1, source, 1, "edge",
                                   &made.ends[destination][i]) == S1F_OK);
    }
    return made;
}

static void free_pipeline(pipeline *p)
{
    for (int32_t rank = 0; rank < p->num_ranks; rank++) {
        for (int32_t i = 0; i < MAX_EDGES; i++)
            s1f_edge_end_free(p->ends[rank][i]);
        s1f_group_free(p->groups[rank]);
    }
    for (int32_t i = 0; i < MAX_EDGES; i++)
        s1f_mapping_free(p->mappings[i]);
    s1f_program_free(p->program);
    s1f_schedule_free(p->schedule);
    free(p->block);
}

/* -- fake compute ------------------------------------------------------------------------------------------------ */

static int32_t value_of(s1f_unit unit, int32_t num_stages)
{
    int32_t hops = unit.pass == S1F_PASS_FORWARD ? unit.stage : 2 * num_stages - unit.stage;
    return 10000 * unit.microbatch + 100 * unit.segment + hops;
}

static const s1f_instruction *nth_run(const rank_state *state, int64_t n)
{
    int64_t count;
    const s1f_instruction *instructions = s1f_program_instructions(state->p->program, state->rank, &count);
    for (int64_t i = 0; i < count; i++)
        if (instructions[i].opcode == S1F_OP_RUN && n-- == 0)
            return &instructions[i];
    return NULL;
}

static void check_inputs(const rank_state *state, const s1f_current_unit *unit, const s1f_input *input,
                         int32_t num_inputs)
{
    int forward = unit->unit.pass == S1F_PASS_FORWARD;
    int receives = forward ? unit->unit.stage > 0 : unit->unit.stage < state->p->num_stages - 1;
    CHECK(num_inputs == receives);
    if (num_inputs == 0)
        return;
    s1f_unit producer = unit->unit;
    producer.stage += forward ? -1 : 1;
    const s1f_tensor_header *tensor = &input->message->tensors[0];
    CHECK(input->message->num_tensors == 1 && tensor->sizes[0] == unit->length);
    const int32_t *data = (const int32_t *)((const char *)input->message + S1F_HEADER_BYTES + tensor->offset);
    for (int64_t i = 0; i < unit->length; i++)
        CHECK(data[i] == value_of(producer, state->p->num_stages));
}

/* One number per token, of which each of the SENDs releases one. */
static void hand_over(rank_state *state, const s1f_current_unit *unit, int32_t value, int32_t num_sends,
                      s1f_result *result)
{
    if (num_sends == 0)
        return;
    shared_data *shared = malloc(sizeof *shared + (size_t)unit->length * sizeof *shared->data);
    shared->num_sends = num_sends;
    for (int64_t i = 0; i < unit->length; i++)
        shared->data[i] = value;
    result->num_tensors = 1;
    result->tensors[0] = (s1f_tensor_header){.dtype = S1F_INT32, .ndim = 1, .sizes = {unit->length}};
    result->data[0] = shared->data;
    result->keep = shared;
    state->kept += num_sends;
}

static s1f_status run(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                      int32_t num_sends, s1f_result *result)
{
    rank_state *state = context;
    int64_t n = state->num_run++;
    const s1f_instruction *expected = nth_run(state, n);
    CHECK(expected != NULL && memcmp(&expected->unit, &unit->unit, sizeof unit->unit) == 0);
    CHECK(s1f_current_unit_get() == unit && unit->cache == state->cache && unit->training);
    CHECK(unit->sequence_length == SEQUENCE && result->keep == NULL && result->num_tensors == 0);
    CHECK(unit->state == NULL);
    s1f_current_unit_set_state(state);
    CHECK(unit->state == state);
    check_inputs(state, unit, inputs, num_inputs);
    if (n == state->fail_at)
        return s1f_fail(S1F_ERR_ARG, "unit %lld is bad", (long long)n);
    hand_over(state, unit, value_of(unit->unit, state->p->num_stages), num_sends, result);
    return S1F_OK;
}

static void release(void *context, void *keep)
{
    rank_state *state = context;
    shared_data *shared = keep;
    if (shared == NULL)
        return;
    state->kept--;
    if (--shared->num_sends == 0)
        free(shared);
}

/* Uneven: 1, 2, 3, ... and the rest. */
static s1f_status segment_sizes(void *context, int64_t sequence_length, int64_t *sizes)
{
    const rank_state *state = context;
    int64_t rest = sequence_length;
    for (int32_t s = 0; s < state->p->num_segments; s++) {
        sizes[s] = s + 1 < state->p->num_segments ? s + 1 : rest;
        rest -= sizes[s];
    }
    return S1F_OK;
}

/* -- steps ------------------------------------------------------------------------------------------------------- */

static void make_rank(rank_state *state, pipeline *p, int32_t rank)
{
    *state = (rank_state){.p = p, .rank = rank, .fail_at = -1};
    s1f_compute compute = {.context = state, .run = run, .release = release, .segment_sizes = segment_sizes};
    CHECK_STATUS(s1f_kv_cache_create(&state->cache), S1F_OK, "");
    CHECK_STATUS(s1f_executor_create(p->program, rank, p->groups[rank], state->cache, p->ends[rank], 1, &compute,
                                     &state->executor),
                 S1F_OK, "");
}

static void free_rank(rank_state *state)
{
    s1f_executor_free(state->executor);
    s1f_kv_cache_free(state->cache);
}

static void *step_of_rank(void *argument)
{
    rank_state *state = argument;
    int64_t sizes[16];
    state->num_run = 0;
    segment_sizes(state, SEQUENCE, sizes);
    s1f_group_begin_step(state->p->groups[state->rank], state->step);
    state->status = s1f_executor_step(state->executor, state->step, 1, state->rank == 0 ? SEQUENCE : 0,
                                      state->rank == 0 ? sizes : NULL, NULL);
    if (state->status != S1F_OK) {
        snprintf(state->error, sizeof state->error, "%s", s1f_last_error());
        s1f_group_fail(state->p->groups[state->rank], state->rank, state->error);
    }
    return NULL;
}

static void step(rank_state *states, int32_t num_ranks, int64_t number)
{
    pthread_t threads[MAX_RANKS];
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        states[rank].step = number;
        pthread_create(&threads[rank], NULL, step_of_rank, &states[rank]);
    }
    for (int32_t rank = 0; rank < num_ranks; rank++)
        pthread_join(threads[rank], NULL);
}

static void check_complete_step(const rank_state *state)
{
    const pipeline *p = state->p;
    int32_t units = p->num_microbatches * p->num_segments, wanted = p->num_ranks - state->rank - 1 + p->num_segments;
    CHECK(state->status == S1F_OK && state->kept == 0 && state->num_run == 2 * units);
    CHECK(nth_run(state, state->num_run) == NULL);

    s1f_stage_measure measure = s1f_executor_stage_measure(state->executor, state->rank);
    CHECK(measure.peak_live_units == (wanted < units ? wanted : units));
    CHECK(measure.peak_live_units == p->program->peaks[state->rank].live_units);
    int64_t sizes[MAX_RANKS * 16], count, k = p->num_segments;
    for (int32_t stage = 0; stage < p->num_stages; stage++)
        segment_sizes((void *)(uintptr_t)state, SEQUENCE, sizes + stage * k);
    s1f_memory_peak peaks[MAX_RANKS];
    CHECK_STATUS(s1f_program_memory(p->program, &(s1f_memory_bytes){.of = {[S1F_HOLDS_FOR_WEIGHT] = sizes}}, peaks),
                 S1F_OK, "");
    CHECK(measure.peak_live_tokens == peaks[state->rank].of[S1F_HOLDS_SAVED]);

    const s1f_span *spans = s1f_executor_spans(state->executor, &count);
    for (int64_t i = 0; i < count; i++)
        CHECK(spans[i].start_ns > 0 && spans[i].end_ns >= spans[i].start_ns &&
              (i == 0 || spans[i].start_ns >= spans[i - 1].end_ns));
}

/* Every unit of every rank fails in turn: all ranks end, what was handed out is released, the next step is whole. */
static void test_a_failing_unit(void)
{
    enum { RANKS = 3, MICROBATCHES = 2, SEGMENTS = 2, UNITS = 2 * MICROBATCHES * SEGMENTS };
    rank_state states[RANKS];
    pipeline p = make_pipeline(RANKS, MICROBATCHES, SEGMENTS);
    for (int32_t rank = 0; rank < RANKS; rank++)
        make_rank(&states[rank], &p, rank);
    int64_t number = 0;
    for (int32_t failing = 0; failing < RANKS; failing++)
        for (int64_t n = 0; n < UNITS; n++) {
            char wanted[40];
            snprintf(wanted, sizeof wanted, "unit %lld is bad", (long long)n);
            states[failing].fail_at = n;
            step(states, RANKS, ++number);
            CHECK(states[failing].status == S1F_ERR_ARG && strcmp(states[failing].error, wanted) == 0);
            s1f_unit last = s1f_executor_last_unit(states[failing].executor);
            CHECK(memcmp(&last, &nth_run(&states[failing], n)->unit, sizeof last) == 0);
            CHECK(states[failing].num_run == n + 1);
            for (int32_t rank = 0; rank < RANKS; rank++) {
                CHECK(states[rank].kept == 0);
                /* a rank that had all it needed has ended its step well */
                if (rank != failing && states[rank].status != S1F_OK)
                    CHECK(states[rank].status == S1F_ERR_PEER && strstr(states[rank].error, wanted) != NULL);
            }
            states[failing].fail_at = -1;
            s1f_group_clear(p.groups[0]);
            step(states, RANKS, ++number);
            for (int32_t rank = 0; rank < RANKS; rank++)
                check_complete_step(&states[rank]);
        }
    for (int32_t rank = 0; rank < RANKS; rank++)
        free_rank(&states[rank]);
    free_pipeline(&p);
}

static s1f_status other_sizes(void *context, int64_t sequence_length, int64_t *sizes)
{
    const rank_state *state = context;
    for (int32_t s = 0; s < state->p->num_segments; s++)
        sizes[s] = sequence_length / state->p->num_segments;
    return S1F_OK;
}

static void test_refusals(void)
{
    rank_state states[2];
    pipeline p = make_pipeline(2, 1, 2);
    for (int32_t rank = 0; rank < 2; rank++)
        make_rank(&states[rank], &p, rank);
    s1f_executor *executor = states[0].executor;
    s1f_group_begin_step(p.groups[0], 1);
    CHECK_STATUS(s1f_executor_step(executor, 1, 1, 0, NULL, NULL), S1F_ERR_ARG, "inputs are needed there");
    CHECK_STATUS(s1f_executor_step(executor, 1, 1, SEQUENCE, (const int64_t[]){SEQUENCE, 0}, NULL), S1F_ERR_ARG,
                 "segment 1 has 0 tokens");
    CHECK_STATUS(s1f_executor_step(executor, 1, 1, SEQUENCE, (const int64_t[]){20, 3}, NULL), S1F_ERR_ARG,
                 "sum to 23 tokens, the sequence has 24");
    CHECK(states[0].num_run == 0);

    s1f_edge_end *none[MAX_EDGES] = {NULL};
    s1f_compute compute = {.context = &states[0], .run = run, .release = release, .segment_sizes = segment_sizes};
    s1f_executor *made = NULL;
    CHECK_STATUS(s1f_executor_create(p.program, 0, p.groups[0], states[0].cache, none, 1, &compute, &made), S1F_ERR_ARG,
                 "rank 0 has no end of the edge from stage 0 to stage 1");
    CHECK(made == NULL);

    /* ranks that split differently, and one that evaluates while the other trains */
    s1f_executor_free(states[1].executor);
    compute = (s1f_compute){.context = &states[1], .run = run, .release = release, .segment_sizes = other_sizes};
    CHECK_STATUS(
        s1f_executor_create(p.program, 1, p.groups[1], states[1].cache, p.ends[1], 1, &compute, &states[1].executor),
        S1F_OK, "");
    step(states, 2, 2);
    CHECK(states[1].status == S1F_ERR_STATE && states[1].num_run == 0);
    CHECK(strstr(states[1].error, "segment 0 is tokens [0, 1) of 24 at the sender, [0, 12) of 24 here") != NULL);
    CHECK(states[0].status == S1F_ERR_PEER);
    for (int32_t rank = 0; rank < 2; rank++)
        free_rank(&states[rank]);
    free_pipeline(&p);
}

static void test_allocations_fail_in_turn(void)
{
    pipeline p = make_pipeline(1, 2, 3);
    rank_state state = {.p = &p, .fail_at = -1};
    s1f_compute compute = {.context = &state, .run = run, .release = release, .segment_sizes = segment_sizes};
    CHECK_STATUS(s1f_kv_cache_create(&state.cache), S1F_OK, "");
    for (int64_t n = 0;; n++) {
        s1f_executor *made = NULL;
        fail_allocation(n);
        s1f_status status = s1f_executor_create(p.program, 0, p.groups[0], state.cache, p.ends[0], 1, &compute, &made);
        int64_t asked = fail_allocation(-1);
        if (asked <= n) {
            CHECK(status == S1F_OK && n > 5);
            s1f_executor_free(made);
            break;
        }
        CHECK(status == S1F_ERR_MEMORY && made == NULL);
    }
    s1f_kv_cache_free(state.cache);
    free_pipeline(&p);
}

int main(void)
{
    test_a_failing_unit();
    test_refusals();
    test_allocations_fail_in_turn();
    return check_failures();
}
