/* test_executor.c - does an executor refuse what it cannot walk, and bear that its allocations fail?
 *
 * That every unit runs once, in its order and on its input, and that a failing one ends every rank and gives back what
 * was handed out: test_device_end.c, and tests/engine/test_random_steps.py over arenas. */
#include "check.h"

#include "run/arena.h"
#include "run/executor.h"

#include <stdlib.h>

enum { MAX_EDGES = 4, ARENA_BYTES = 1 << 20, SEQUENCE = 24 };

typedef struct { /* one rank of an order of Seq1F1B */
    s1f_schedule *schedule;
    s1f_program *program;
    int32_t rank, num_segments, num_edges;
    void *block;
    s1f_group *group;
    s1f_kv_cache *cache;
    void *arenas[MAX_EDGES];
    s1f_edge_end *ends[MAX_EDGES];
    s1f_compute compute;
    int64_t num_run; /* units */
} one_rank;

static s1f_status run(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                      int32_t num_sends, s1f_result *result)
{
    one_rank *state = context;
    state->num_run++;
    (void)unit;
    (void)inputs;
    (void)num_inputs;
    (void)num_sends;
    (void)result;
    return S1F_OK;
}

static s1f_status equal_sizes(void *context, int64_t sequence_length, int64_t *sizes)
{
    const one_rank *state = context;
    for (int32_t s = 0; s < state->num_segments; s++)
        sizes[s] = sequence_length / state->num_segments;
    return S1F_OK;
}

static void *zeros(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(memory, 0, bytes);
    return memory;
}

static void make_rank(one_rank *made, int32_t rank, int32_t num_ranks, int32_t num_microbatches, int32_t num_segments)
{
    *made = (one_rank){.rank = rank, .num_segments = num_segments};
    made->compute = (s1f_compute){.context = made, .run = run, .segment_sizes = equal_sizes};
    CHECK_STATUS(s1f_schedule_build("seq1f1b", num_ranks, num_microbatches, num_segments, 1, NULL, &made->schedule),
                 S1F_OK, "");
    CHECK_STATUS(s1f_schedule_lower(made->schedule, (s1f_places){.prefetch = 1}, S1F_ALL_RANKS, &made->program), S1F_OK,
                 "");
    made->block = zeros(s1f_group_block_bytes(num_ranks));
    CHECK(s1f_group_create(made->block, num_ranks, rank, &made->group) == S1F_OK);
    CHECK_STATUS(s1f_kv_cache_create(&made->cache), S1F_OK, "");
    const s1f_edge *edges = s1f_program_edges(made->program, &made->num_edges);
    CHECK(made->num_edges <= MAX_EDGES);
    for (int32_t i = 0; i < made->num_edges; i++) {
        made->arenas[i] = zeros(ARENA_BYTES);
        CHECK(s1f_arena_end_create(made->group, made->arenas[i], ARENA_BYTES, -1, 1 - rank,
                                   edges[i].destination_rank == rank, "edge", &made->ends[i]) == S1F_OK);
    }
}

static s1f_status make_executor(const one_rank *rank, s1f_edge_end *const *ends, s1f_executor **out)
{
    return s1f_executor_create(rank->program, rank->rank, rank->group, rank->cache, ends, 1, &rank->compute, out);
}

static void free_rank(one_rank *rank)
{
    for (int32_t i = 0; i < rank->num_edges; i++) {
        s1f_edge_end_free(rank->ends[i]);
        free(rank->arenas[i]);
    }
    s1f_kv_cache_free(rank->cache);
    s1f_group_free(rank->group);
    s1f_program_free(rank->program);
    s1f_schedule_free(rank->schedule);
    free(rank->block);
}

/* -- tests ------------------------------------------------------------------------------------------------------- */

static void test_refusals(void)
{
    one_rank first;
    s1f_executor *executor = NULL, *made = NULL;
    make_rank(&first, 0, 2, 1, 2);
    CHECK_STATUS(make_executor(&first, first.ends, &executor), S1F_OK, "");
    s1f_group_begin_step(first.group, 1);
    CHECK_STATUS(s1f_executor_step(executor, 1, 1, 0, NULL, NULL), S1F_ERR_ARG, "inputs are needed there");
    CHECK_STATUS(s1f_executor_step(executor, 1, 1, SEQUENCE, (const int64_t[]){SEQUENCE, 0}, NULL), S1F_ERR_ARG,
                 "segment 1 has 0 tokens");
    CHECK_STATUS(s1f_executor_step(executor, 1, 1, SEQUENCE, (const int64_t[]){20, 3}, NULL), S1F_ERR_ARG,
                 "sum to 23 tokens, the sequence has 24");
    CHECK(first.num_run == 0);
    s1f_edge_end *none[MAX_EDGES] = {NULL};
    CHECK_STATUS(make_executor(&first, none, &made), S1F_ERR_ARG,
                 "rank 0 has no end of the edge from stage 0 to stage 1");
    CHECK(made == NULL);
    s1f_executor_free(executor);
    free_rank(&first);
}

/* The first message comes from a rank that splits the sequence in another way. */
static void test_another_split(void)
{
    one_rank second;
    s1f_executor *executor = NULL;
    s1f_edge_end *sender = NULL;
    make_rank(&second, 1, 2, 1, 2);
    CHECK_STATUS(make_executor(&second, second.ends, &executor), S1F_OK, "");
    const s1f_edge *edges = s1f_program_edges(second.program, &second.num_edges);
    int32_t incoming = edges[0].destination_rank == 1 ? 0 : 1;
    CHECK(s1f_arena_end_create(second.group, second.arenas[incoming], ARENA_BYTES, -1, 1, 0, "edge", &sender) ==
          S1F_OK);
    s1f_group_begin_step(second.group, 2);
    CHECK_STATUS(s1f_p2p_begin_step(sender, edges[incoming].num_places), S1F_OK, "");
    atomic_store(&((s1f_signal *)second.arenas[incoming])->position, UINT64_MAX); /* the sender need not wait */
    s1f_message message = {
        .step = 2, .destination_stage = 1, .training = 1, .sequence_length = SEQUENCE, .offset = 0, .length = 1};
    CHECK_STATUS(s1f_p2p_send(sender, 0, 0, &message, NULL), S1F_OK, "");
    CHECK_STATUS(s1f_executor_step(executor, 2, 1, 0, NULL, NULL), S1F_ERR_STATE,
                 "segment 0 is tokens [0, 1) of 24 at the sender, [0, 12) of 24 here");
    CHECK(second.num_run == 0);
    s1f_edge_end_free(sender);
    s1f_executor_free(executor);
    free_rank(&second);
}

static void test_allocations_fail_in_turn(void)
{
    one_rank only;
    make_rank(&only, 0, 1, 2, 3);
    for (int64_t n = 0;; n++) {
        s1f_executor *made = NULL;
        fail_allocation(n);
        s1f_status status = make_executor(&only, only.ends, &made);
        int64_t asked = fail_allocation(-1);
        if (asked <= n) {
            CHECK(status == S1F_OK && n > 5);
            s1f_executor_free(made);
            break;
        }
        CHECK(status == S1F_ERR_MEMORY && made == NULL);
    }
    free_rank(&only);
}

int main(void)
{
    test_refusals();
    test_another_split();
    test_allocations_fail_in_turn();
    return check_failures();
}
