/* test_device_end.c - do edges between GPUs carry the right data in any timing, and end a step when something breaks?
 *
 * GPUs and NCCL are stand-ins (tests/stand_ins): queues that run in order of issue, receives that block them, sends
 * that need their receive, calls that stay in progress. Ranks are threads with a GPU each. A unit is a function on the
 * GPU's stream: when it runs it reads its input, which has to be the neighbour's result, and writes its own into memory
 * that was given back most recently, so that a buffer given back too early is overwritten at once. */
#include "check.h"
#include "core/lower.h"
#include "core/receives.h"

#include "device/device_end.h"
#include "run/arena.h"
#include "run/executor.h"
#include "schedules/families.h"
#include "stand_in.h"

#include "cuda_api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const int64_t LATE_NS = 300 * 1000 * 1000;

enum {
    MAX_RANKS = 5,
    MAX_EDGES = 4 * MAX_RANKS,
    MAX_BUFFERS = 256,
    MAX_UNITS = 4096,
    ARENA_BYTES = 4 << 20,
    SEQUENCE = 24
};
static const char LIBRARY[] = ""; /* this program: the stand-ins are linked with it */

typedef enum {
    BY_NCCL,
    BY_COPIES,
} transport_kind;

typedef struct {
    const char *family;
    int32_t num_ranks, num_microbatches, num_segments, stages_per_rank;
    transport_kind transport;
    int32_t queues;
    uint64_t seed;
    int32_t injected_sync_permille;
    double timeout_s;
} setting;

typedef struct unit_work unit_work;

typedef struct { /* one rank */
    struct pipeline *p;
    int32_t rank;
    pthread_t thread;
    s1f_kv_cache *cache;
    s1f_executor *executor;
    s1f_device *device;
    s1f_watchdog *watchdog;
    CUstream compute;
    CUdeviceptr buffers[MAX_BUFFERS]; /* all */
    CUdeviceptr unused[MAX_BUFFERS];  /* a stack: those given back */
    int32_t num_unused;
    CUdeviceptr handed[32][16][16]; /* [stage][microbatch][segment]: result kept for a stage of the same rank */
    unit_work *work;
    int64_t num_run, num_work, step;
    int64_t fail_at, sleep_at; /* unit that fails, that the host does not start; or -1 */
    s1f_status status;
    char error[1024];
} rank_state;

struct unit_work {        /* one unit, until it has run on the GPU */
    const int32_t *input; /* NULL: none */
    int32_t *output;      /* NULL: none */
    int32_t expected, value;
    int64_t length;
};

typedef struct pipeline {
    s1f_schedule *schedule;
    setting set;
    s1f_program *program;
    int32_t num_stages, num_edges;
    const s1f_edge *edges;
    void *block;
    s1f_group *groups[MAX_RANKS];
    s1f_mapping *mappings[MAX_EDGES];
    s1f_edge_end *controls[MAX_RANKS][MAX_EDGES], *ends[MAX_RANKS][MAX_EDGES];
    rank_state states[MAX_RANKS];
    const s1f_nccl *nccl;
    s1f_nccl_id ids[MAX_EDGES];
    pthread_barrier_t begin, end;
    void (*job)(rank_state *state);
} pipeline;

static atomic_int wrong_inputs, units_on_gpu;

/* -- compute ------------------------------------------------------------------------------------------------------- */

static int32_t value_of(int32_t is_forward, int32_t stage, int32_t microbatch, int32_t segment, int64_t step)
{
    return (int32_t)(step * 1000003 + 100000 * is_forward + 10000 * stage + 100 * microbatch + segment);
}

static void run_on_gpu(void *argument)
{
    unit_work *work = argument;
    for (int64_t i = 0; work->input != NULL && i < work->length; i++)
        if (work->input[i] != work->expected) {
            atomic_fetch_add(&wrong_inputs, 1);
            break;
        }
    for (int64_t i = 0; work->output != NULL && i < work->length; i++)
        work->output[i] = work->value;
    atomic_fetch_add(&units_on_gpu, 1);
}

static CUdeviceptr take_buffer(rank_state *state)
{
    CHECK(state->num_unused > 0);
    return state->unused[--state->num_unused];
}

static void release(void *context, void *keep)
{
    rank_state *state = context;
    state->unused[state->num_unused++] = (CUdeviceptr)(uintptr_t)keep;
}

/* The neighbouring stage from which the unit's input comes, or -1. */
static int32_t source_stage(const pipeline *p, s1f_unit unit)
{
    if (unit.pass == S1F_PASS_FORWARD)
        return unit.stage - 1;
    if (unit.pass == S1F_PASS_BACKWARD_WEIGHT || unit.stage + 1 == p->num_stages)
        return -1;
    return unit.stage + 1;
}

static s1f_status launch(void *context, const s1f_current_unit *current, const s1f_input *inputs, int32_t num_inputs,
                         int32_t num_sends, s1f_result *result)
{
    rank_state *state = context;
    pipeline *p = state->p;
    s1f_unit unit = current->unit;
    int32_t is_forward = unit.pass == S1F_PASS_FORWARD, source = source_stage(p, unit);
    int64_t n = state->num_run++;
    if (n == state->fail_at)
        return s1f_fail(S1F_ERR_ARG, "unit %lld is bad", (long long)n);
    if (n == state->sleep_at) /* from now on, and no earlier, a rank may give up: nobody else is late for it */
        s1f_group_set_limits(p->groups[0], LATE_NS, 0);
    while (n == state->sleep_at && !s1f_group_has_failed(p->groups[state->rank]))
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    CHECK_STATUS(s1f_device_enter(state->device), S1F_OK, "");
    unit_work *work = &state->work[state->num_work++ % MAX_UNITS]; /* hosts are up to a step ahead */
    *work = (unit_work){.length = current->length,
                        .expected = value_of(is_forward, source, unit.microbatch, unit.segment, state->step),
                        .value = value_of(is_forward, unit.stage, unit.microbatch, unit.segment, state->step)};
    CUdeviceptr local = 0;
    if (num_inputs > 0) {
        const s1f_message *message = inputs->message;
        CHECK(num_inputs == 1 && message->num_tensors == 1 && message->tensors[0].sizes[0] == current->length);
        work->input = inputs->payload;
    } else if (source >= 0 && unit.pass != S1F_PASS_BACKWARD_WEIGHT) { /* from a stage of this rank */
        local = state->handed[source][unit.microbatch][unit.segment];
        work->input = (const int32_t *)(uintptr_t)local;
    }
    int32_t destination = is_forward ? unit.stage + 1 : unit.stage - 1;
    int32_t is_handed =
        num_sends == 0 && unit.pass != S1F_PASS_BACKWARD_WEIGHT && destination >= 0 && destination < p->num_stages;
    CUdeviceptr output = num_sends > 0 || is_handed ? take_buffer(state) : 0;
    work->output = (int32_t *)(uintptr_t)output;
    CHECK(cuLaunchHostFunc(state->compute, run_on_gpu, work) == CUDA_SUCCESS);
    if (local != 0)
        release(state, (void *)(uintptr_t)local);
    if (is_handed)
        state->handed[unit.stage][unit.microbatch][unit.segment] = output;
    s1f_device_leave(state->device, S1F_OK);
    if (num_sends > 0) {
        result->num_tensors = 1;
        result->tensors[0] = (s1f_tensor_header){.dtype = S1F_INT32, .ndim = 1, .sizes = {current->length}};
        result->data[0] = (const void *)(uintptr_t)output;
        result->keep = (void *)(uintptr_t)output;
    }
    return S1F_OK;
}

static s1f_status run(void *context, const s1f_current_unit *current, const s1f_input *inputs, int32_t num_inputs,
                      int32_t num_sends, s1f_result *result)
{
    const rank_state *state = context;
    S1F_TRY(s1f_device_begin_unit(state->device));
    S1F_TRY(launch(context, current, inputs, num_inputs, num_sends, result));
    return s1f_device_end_unit(state->device);
}

static s1f_status segment_sizes(void *context, int64_t sequence_length, int64_t *sizes)
{
    const rank_state *state = context;
    int64_t rest = sequence_length;
    int32_t k = state->p->set.num_segments;
    for (int32_t s = 0; s < k; s++) {
        sizes[s] = s + 1 < k ? s + 1 : rest;
        rest -= sizes[s];
    }
    return S1F_OK;
}

/* -- a pipeline of threads ----------------------------------------------------------------------------------------- */

static s1f_edge_end *make_end(pipeline *p, int32_t edge, int32_t rank)
{
    const s1f_edge *e = &p->edges[edge];
    int32_t is_receiver = e->destination_rank == rank, peer = is_receiver ? e->source_rank : e->destination_rank;
    char text[S1F_EDGE_TEXT_BYTES];
    snprintf(text, sizeof text, "%s of stage %d to %d",
             e->channel == S1F_CHANNEL_GRADIENT ? "gradients" : "activations", (int)e->source_stage,
             (int)e->destination_stage);
    s1f_edge_end *end = NULL;
    s1f_device_end *made = NULL;
    CHECK_STATUS(s1f_arena_end_create(p->groups[rank], p->mappings[edge]->memory, ARENA_BYTES, -1, peer, is_receiver,
                                      text, &p->controls[rank][edge]),
                 S1F_OK, "");
    s1f_edge_end *control = p->controls[rank][edge];
    if (p->set.transport == BY_NCCL)
        CHECK_STATUS(s1f_nccl_end_create(p->nccl, &p->ids[edge], control, p->states[rank].watchdog, &end), S1F_OK, "");
    else
        CHECK_STATUS(s1f_device_end_create(sizeof *made, &s1f_copy_mover, control, p->states[rank].watchdog, &made),
                     S1F_OK, "");
    return end == NULL ? &made->head : end;
}

static void join_pipeline(rank_state *state)
{
    pipeline *p = state->p;
    int32_t rank = state->rank;
    CHECK_STATUS(s1f_device_create(LIBRARY, rank, &state->device), S1F_OK, "");
    CHECK_STATUS(s1f_watchdog_create(p->groups[rank], state->device, 0, &state->watchdog), S1F_OK, "");
    CHECK_STATUS(s1f_device_enter(state->device), S1F_OK, "");
    CHECK(cuStreamCreateWithPriority(&state->compute, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
    for (int32_t i = 0; i < MAX_BUFFERS; i++) {
        CHECK(cuMemAlloc_v2(&state->buffers[i], SEQUENCE * sizeof(int32_t)) == CUDA_SUCCESS);
        state->unused[state->num_unused++] = state->buffers[i];
    }
    s1f_device_leave(state->device, S1F_OK);
    for (int32_t i = 0; i < p->num_edges; i++)
        if (p->edges[i].source_rank == rank || p->edges[i].destination_rank == rank)
            p->ends[rank][i] = make_end(p, i, rank);
    for (int32_t i = 0; i < p->num_edges && p->set.transport == BY_NCCL; i++)
        if (p->ends[rank][i] != NULL)
            CHECK_STATUS(s1f_device_end_settle((s1f_device_end *)p->ends[rank][i], "connecting", -1), S1F_OK, "");
    s1f_compute compute = {.context = state, .run = run, .release = release, .segment_sizes = segment_sizes};
    CHECK_STATUS(s1f_kv_cache_create(&state->cache), S1F_OK, "");
    CHECK_STATUS(s1f_executor_create(p->program, rank, p->groups[rank], state->cache, p->ends[rank], 1, &compute,
                                     &state->executor),
                 S1F_OK, "");
    state->work = calloc(MAX_UNITS, sizeof *state->work);
}

/* One thread per rank for all of its life, as communicators belong to a thread. */
static void *live(void *argument)
{
    rank_state *state = argument;
    pipeline *p = state->p;
    for (;;) {
        pthread_barrier_wait(&p->begin);
        if (p->job == NULL)
            return NULL;
        p->job(state);
        pthread_barrier_wait(&p->end);
    }
}

static void on_all_ranks(pipeline *p, void (*job)(rank_state *state))
{
    p->job = job;
    pthread_barrier_wait(&p->begin);
    pthread_barrier_wait(&p->end);
}

static void make_pipeline(setting set, pipeline *p)
{
    *p = (pipeline){.set = set};
    CHECK_STATUS(s1f_schedule_build(set.family, set.num_ranks, set.num_microbatches, set.num_segments,
                                    set.stages_per_rank, NULL, &p->schedule),
                 S1F_OK, "");
    CHECK_STATUS(s1f_schedule_lower(p->schedule, (s1f_places){.prefetch = 1}, S1F_ALL_RANKS, &p->program), S1F_OK, "");
    CHECK_STATUS(s1f_program_add_receives(p->program), S1F_OK, "");
    p->num_stages = p->program->shape.num_stages;
    p->edges = s1f_program_edges(p->program, &p->num_edges);

    stand_in_reset(set.seed);
    stand_in_set("queues", set.queues);
    stand_in_set("injected_sync_permille", set.injected_sync_permille);
    size_t block_bytes = (s1f_group_block_bytes(set.num_ranks) + 63) / 64 * 64;
    p->block = aligned_alloc(64, block_bytes);
    memset(p->block, 0, block_bytes);
    for (int32_t rank = 0; rank < set.num_ranks; rank++) {
        p->states[rank] = (rank_state){.p = p, .rank = rank, .fail_at = -1, .sleep_at = -1};
        CHECK(s1f_group_create(p->block, set.num_ranks, rank, &p->groups[rank]) == S1F_OK);
        s1f_group_set_limits(p->groups[rank], (int64_t)(set.timeout_s * 1e9), 0);
        s1f_group_progress(p->groups[rank], "set-up");
    }
    const s1f_nccl *nccl = NULL;
    CHECK_STATUS(s1f_nccl_load(LIBRARY, &nccl), S1F_OK, "");
    p->nccl = nccl;
    for (int32_t i = 0; i < p->num_edges; i++) {
        int fd = memfd_create("test_device_end", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, ARENA_BYTES) == 0);
        CHECK(s1f_mapping_create(fd, ARENA_BYTES, &p->mappings[i]) == S1F_OK);
        close(fd);
        CHECK(nccl->get_unique_id(&p->ids[i]) == S1F_NCCL_SUCCESS);
    }
    pthread_barrier_init(&p->begin, NULL, (unsigned)set.num_ranks + 1);
    pthread_barrier_init(&p->end, NULL, (unsigned)set.num_ranks + 1);
    for (int32_t rank = 0; rank < set.num_ranks; rank++)
        pthread_create(&p->states[rank].thread, NULL, live, &p->states[rank]);
    on_all_ranks(p, join_pipeline);
}

static void free_ends(rank_state *state, int32_t is_receiver)
{
    pipeline *p = state->p;
    for (int32_t i = 0; i < p->num_edges; i++)
        if ((p->edges[i].destination_rank == state->rank) == is_receiver) {
            s1f_edge_end_free(p->ends[state->rank][i]);
            s1f_edge_end_free(p->controls[state->rank][i]);
        }
}

static void free_senders(rank_state *state)
{
    free_ends(state, 0);
}

static void leave_pipeline(rank_state *state)
{
    free_ends(state, 1);
    s1f_watchdog_free(state->watchdog);
    CHECK_STATUS(s1f_device_enter(state->device), S1F_OK, "");
    cuStreamSynchronize(state->compute);
    for (int32_t i = 0; i < MAX_BUFFERS; i++)
        cuMemFree_v2(state->buffers[i]);
    cuStreamDestroy_v2(state->compute);
    s1f_device_leave(state->device, S1F_OK);
    s1f_device_free(state->device);
    s1f_executor_free(state->executor);
    s1f_kv_cache_free(state->cache);
    free(state->work);
}

static void free_pipeline(pipeline *p)
{
    for (int32_t rank = 0; rank < p->set.num_ranks; rank++) /* the farewell has as long, however busy the machine is */
        s1f_group_set_limits(p->groups[rank], 60000000000, 0);
    on_all_ranks(p, free_senders); /* who writes into places goes before these do */
    on_all_ranks(p, leave_pipeline);
    p->job = NULL;
    pthread_barrier_wait(&p->begin);
    for (int32_t rank = 0; rank < p->set.num_ranks; rank++)
        pthread_join(p->states[rank].thread, NULL);
    pthread_barrier_destroy(&p->begin);
    pthread_barrier_destroy(&p->end);
    for (int32_t rank = 0; rank < p->set.num_ranks; rank++)
        s1f_group_free(p->groups[rank]);
    for (int32_t i = 0; i < p->num_edges; i++)
        s1f_mapping_free(p->mappings[i]);
    s1f_program_free(p->program);
    s1f_schedule_free(p->schedule);
    free(p->block);
    for (int64_t i = 0; stand_in_misuse(i) != NULL; i++) {
        fprintf(stderr, "misuse: %s\n", stand_in_misuse(i));
        check_failed++;
    }
    CHECK(stand_in_count("live_allocations") == 0 && stand_in_count("live_streams") == 0 &&
          stand_in_count("live_events") == 0 && stand_in_count("live_communicators") == 0);
}

static void step_of_rank(rank_state *state)
{
    s1f_group *group = state->p->groups[state->rank];
    int64_t sizes[16];
    state->num_run = 0;
    segment_sizes(state, SEQUENCE, sizes);
    s1f_group_begin_step(group, state->step);
    CHECK_STATUS(s1f_device_begin_step(state->device, state->compute), S1F_OK, "");
    state->status = s1f_executor_step(state->executor, state->step, 1, SEQUENCE, sizes, NULL);
    if (state->status != S1F_OK) {
        snprintf(state->error, sizeof state->error, "%s", s1f_last_error());
        s1f_group_fail(group, state->rank, state->error);
    }
    s1f_group_progress(group, "code after the step");
}

static void step(pipeline *p, int64_t number)
{
    for (int32_t rank = 0; rank < p->set.num_ranks; rank++)
        p->states[rank].step = number;
    on_all_ranks(p, step_of_rank);
}

/* What one timing has to show; says which it was, once. */
static void check_setting(setting set)
{
    int failed_before = check_failed;
    pipeline p;
    make_pipeline(set, &p);
    atomic_store(&wrong_inputs, 0);
    atomic_store(&units_on_gpu, 0);
    int64_t allocations = 0, synchronisations = 0, exports = 0;
    for (int64_t number = 1; number <= 4; number++) {
        step(&p, number);
        for (int32_t rank = 0; rank < set.num_ranks; rank++)
            CHECK_STATUS(p.states[rank].status, S1F_OK, "");
        if (number == 2) { /* places are as large as a step of this shape needs them */
            allocations = stand_in_count("cuMemAlloc_v2");
            synchronisations = stand_in_count("cuStreamSynchronize");
            exports = stand_in_count("cuIpcGetEventHandle");
        }
    }
    CHECK(stand_in_drain(2000) == 0);
    CHECK(atomic_load(&wrong_inputs) == 0);
    int64_t num_units = 0;
    for (int32_t rank = 0; rank < set.num_ranks; rank++)
        num_units += p.program->ranks[rank].num_units;
    CHECK(atomic_load(&units_on_gpu) == 4 * num_units);
    CHECK(stand_in_count("cuMemAlloc_v2") == allocations);
    CHECK(stand_in_count("cuStreamSynchronize") == synchronisations);
    CHECK(stand_in_count("cuIpcGetEventHandle") == exports);
    CHECK(stand_in_misuse(0) == NULL);
    CHECK((stand_in_count("interprocess_events") > 0) == (set.transport == BY_COPIES));
    for (int32_t rank = 0; rank < set.num_ranks && check_failed != failed_before; rank++)
        if (p.states[rank].status != S1F_OK)
            fprintf(stderr, "rank %d: %s\n", rank, p.states[rank].error);
    free_pipeline(&p);
    if (check_failed != failed_before)
        fprintf(stderr, "... in %s, P %d, M %d, k %d, v %d, %s, %d queues, seed %llu, synchronisations %d\n",
                set.family, (int)set.num_ranks, (int)set.num_microbatches, (int)set.num_segments,
                (int)set.stages_per_rank, set.transport == BY_NCCL ? "NCCL" : "copies", (int)set.queues,
                (unsigned long long)set.seed, (int)set.injected_sync_permille);
}

/* Every order that has a name, on every number of ranks, in both transports, with few and many hardware queues. */
static void test_orders_and_timings(int32_t num_timings)
{
    static const int32_t queues[] = {1, 2, 8};
    int32_t num_families = 0;
    while (s1f_schedule_family(num_families) != NULL)
        num_families++;
    for (int32_t timing = 0; timing < num_timings && check_failed == 0; timing++) {
        const s1f_named_family *named = s1f_schedule_family(timing % num_families);
        int32_t ranks = 2 + timing / num_families % 4, microbatches = 2 * ranks, segments = 1 + timing % 3;
        const char *rule = "";
        for (int32_t other = 0; other < 6 && rule != NULL; other++) { /* what the family takes */
            microbatches = other % 2 == 0 ? 2 * ranks : ranks;
            segments = other / 2 == 0 ? segments : other / 2 == 1 ? ranks : 1;
            CHECK_STATUS(s1f_schedule_broken_rule(named->name->name, ranks, microbatches, segments,
                                                  named->family->stages_per_rank, NULL, &rule),
                         S1F_OK, "");
        }
        CHECK(rule == NULL);
        check_setting((setting){.family = named->name->name,
                                .num_ranks = ranks,
                                .num_microbatches = microbatches,
                                .num_segments = segments,
                                .stages_per_rank = named->family->stages_per_rank,
                                .transport = timing % 6 < 3 ? BY_NCCL : BY_COPIES,
                                .queues = queues[timing / 7 % 3],
                                .seed = (uint64_t)timing + 1,
                                .injected_sync_permille = timing % 4 == 0 ? 100 : 0,
                                .timeout_s = 60});
    }
}

/* -- faults -------------------------------------------------------------------------------------------------------- */

static const setting THREE_RANKS = {.family = "seq1f1b",
                                    .num_ranks = 3,
                                    .num_microbatches = 4,
                                    .num_segments = 2,
                                    .stages_per_rank = 1,
                                    .queues = 8,
                                    .seed = 3,
                                    .timeout_s = 0.5};

/* A unit that raises, and a host that is late: as over host memory, and nothing stays under way on the GPUs. */
static void test_faults_of_hosts(void)
{
    for (int transport = BY_NCCL; transport <= BY_COPIES; transport++)
        for (int late = 0; late < 2; late++) {
            setting set = THREE_RANKS;
            set.transport = (transport_kind)transport;
            set.timeout_s = 60;
            pipeline p;
            make_pipeline(set, &p);
            step(&p, 1);
            *(late ? &p.states[1].sleep_at : &p.states[1].fail_at) = 5;
            step(&p, 2);
            CHECK(late || (p.states[1].status == S1F_ERR_ARG && strstr(p.states[0].error, "unit 5 is bad") != NULL));
            CHECK(p.states[0].status != S1F_OK && p.states[2].status != S1F_OK);
            s1f_failure failure;
            s1f_group_failure(p.groups[0], &failure);
            CHECK(failure.rank == 1);
            CHECK(stand_in_drain(2000) == 0);
            for (int32_t rank = 0; rank < set.num_ranks; rank++)
                CHECK(p.states[rank].num_unused == MAX_BUFFERS); /* what was handed out is back */
            free_pipeline(&p);
        }
}

int main(int argc, char **argv)
{
    int is_slow = argc > 1 && strcmp(argv[1], "valgrind") == 0;
    test_orders_and_timings(argc > 2 ? atoi(argv[2]) : is_slow ? 10 : 60); /* of four steps each */
    test_faults_of_hosts();
    return check_failures();
}
