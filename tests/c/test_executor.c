/* test_executor.c - does an executor refuse what it cannot walk, and bear that its allocations fail?
 *
 * That every unit runs once, in its order and on its input, and that a failing one ends every rank and gives back what
 * was handed out: test_device_end.c, and tests/engine/test_random_steps.py over arenas. */
#include "check.h"

#include "run/arena.h"
#include "run/executor.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RANKS = 2, MAX_EDGES = 16, ARENA_BYTES = 8 << 20, SEQUENCE = 24 };
static const int64_t SECOND = 1000000000;

typedef struct {
    s1f_schedule *schedule;
    s1f_program *program;
    int32_t num_ranks, num_segments;
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
    int64_t num_run; /* units */
    s1f_status status;
    char error[512];
} rank_state;

/* -- a pipeline of threads --------------------------------------------------------------------------------------- */

/* Over an order of Seq1F1B. */
static pipeline make_pipeline(int32_t num_ranks, int32_t num_microbatches, int32_t num_segments)
{
    pipeline made = {.num_ranks = num_ranks, .num_segments = num_segments};
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

static s1f_status run(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                      int32_t num_sends, s1f_result *result)
{
    static const int32_t data[SEQUENCE];
    rank_state *state = context;
    state->num_run++;
    (void)inputs;
    (void)num_inputs;
    if (num_sends > 0) {
        result->num_tensors = 1;
        result->tensors[0] = (s1f_tensor_header){.dtype = S1F_INT32, .ndim = 1, .sizes = {unit->length}};
        result->data[0] = data;
    }
    return S1F_OK;
}

static void release(void *context, void *keep)
{
    (void)context;
    CHECK(keep == NULL);
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

static void *step_of_rank(void *argument)
{
    rank_state *state = argument;
    int64_t sizes[16];
    segment_sizes(state, SEQUENCE, sizes);
    s1f_group_begin_step(state->p->groups[state->rank], 2);
    state->status = s1f_executor_step(state->executor, 2, 1, state->rank == 0 ? SEQUENCE : 0,
                                      state->rank == 0 ? sizes : NULL, NULL);
    if (state->status != S1F_OK) {
        snprintf(state->error, sizeof state->error, "%s", s1f_last_error());
        s1f_group_fail(state->p->groups[state->rank], state->rank, state->error);
    }
    return NULL;
}

/* -- tests ------------------------------------------------------------------------------------------------------- */

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
    for (int32_t rank = 0; rank < 2; rank++) {
        states[rank] = (rank_state){.p = &p, .rank = rank};
        s1f_compute compute = {.context = &states[rank],
                               .run = run,
                               .release = release,
                               .segment_sizes = rank ? other_sizes : segment_sizes};
        CHECK_STATUS(s1f_kv_cache_create(&states[rank].cache), S1F_OK, "");
        CHECK_STATUS(s1f_executor_create(p.program, rank, p.groups[rank], states[rank].cache, p.ends[rank], 1, &compute,
                                         &states[rank].executor),
                     S1F_OK, "");
    }
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

    pthread_t threads[2]; /* ranks that split differently */
    for (int32_t rank = 0; rank < 2; rank++)
        pthread_create(&threads[rank], NULL, step_of_rank, &states[rank]);
    for (int32_t rank = 0; rank < 2; rank++)
        pthread_join(threads[rank], NULL);
    CHECK(states[1].status == S1F_ERR_STATE && states[1].num_run == 0);
    CHECK(strstr(states[1].error, "segment 0 is tokens [0, 1) of 24 at the sender, [0, 12) of 24 here") != NULL);
    CHECK(states[0].status == S1F_ERR_PEER);
    for (int32_t rank = 0; rank < 2; rank++) {
        s1f_executor_free(states[rank].executor);
        s1f_kv_cache_free(states[rank].cache);
    }
    free_pipeline(&p);
}

static void test_allocations_fail_in_turn(void)
{
    pipeline p = make_pipeline(1, 2, 3);
    rank_state state = {.p = &p};
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
    test_refusals();
    test_allocations_fail_in_turn();
    return check_failures();
}
