/* test_p2p.c - do messages arrive whole and in order, and does every wait end? Ranks are threads here. */
#include "check.h"

#include "run/arena.h"
#include "run/group.h"
#include "run/p2p.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 3, ARENA_BYTES = 64 << 20 };
static const int64_t SECOND = 1000000000;
static const char EDGE[] = "activations of stage 0 to 1";

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000L}, NULL);
}

/* -- a pipeline of threads --------------------------------------------------------------------------------------- */

typedef struct {
    void *block;
    int fd;
    s1f_mapping *mapping;
    s1f_group *groups[MAX_RANKS];
    s1f_edge_end *sender, *receiver; /* rank 0 to rank 1 */
} pipeline;

static pipeline make_pipeline(int32_t num_ranks)
{
    pipeline made = {.fd = memfd_create("test_p2p", MFD_CLOEXEC)};
    CHECK(made.fd >= 0 && ftruncate(made.fd, ARENA_BYTES) == 0);
    CHECK(s1f_mapping_create(made.fd, ARENA_BYTES, &made.mapping) == S1F_OK);
    size_t block_bytes = (s1f_group_block_bytes(num_ranks) + 63) / 64 * 64;
    made.block = aligned_alloc(64, block_bytes);
    memset(made.block, 0, block_bytes);
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        CHECK(s1f_group_create(made.block, num_ranks, rank, &made.groups[rank]) == S1F_OK);
        s1f_group_set_limits(made.groups[rank], 30 * SECOND, 0);
    }
    if (num_ranks > 1) {
        void *memory = made.mapping->memory;
        CHECK(s1f_arena_end_create(made.groups[0], memory, ARENA_BYTES, -1, 1, 0, EDGE, &made.sender) == S1F_OK);
        CHECK(s1f_arena_end_create(made.groups[1], memory, ARENA_BYTES, -1, 0, 1, EDGE, &made.receiver) == S1F_OK);
    }
    return made;
}

static void free_pipeline(pipeline *p)
{
    s1f_edge_end_free(p->sender);
    s1f_edge_end_free(p->receiver);
    for (int32_t rank = 0; rank < MAX_RANKS; rank++)
        s1f_group_free(p->groups[rank]);
    s1f_mapping_free(p->mapping);
    close(p->fd);
    free(p->block);
}

static void begin(pipeline *p, int64_t step, int32_t num_places)
{
    s1f_group_begin_step(p->groups[0], step);
    s1f_group_begin_step(p->groups[1], step);
    CHECK_STATUS(s1f_p2p_begin_step(p->sender, num_places), S1F_OK, "");
    CHECK_STATUS(s1f_p2p_begin_step(p->receiver, num_places), S1F_OK, "");
}

static s1f_message message_of(int64_t elements)
{
    return (s1f_message){.step = 1,
                         .destination_stage = 1,
                         .segment = 3,
                         .training = 1,
                         .num_tensors = 1,
                         .tensors[0] = {.dtype = S1F_INT32, .ndim = 1, .sizes = {elements}}};
}

static s1f_status send_ints(s1f_edge_end *end, int64_t sequence, int32_t place, int64_t elements, int32_t value)
{
    int32_t *data = malloc((size_t)elements * sizeof *data + 1);
    for (int64_t i = 0; i < elements; i++)
        data[i] = value + (int32_t)i;
    s1f_message message = message_of(elements);
    s1f_status status = s1f_p2p_send(end, sequence, place, &message, (const void *const[]){data});
    free(data);
    return status;
}

static int holds_ints(const s1f_message *message, int64_t elements, int32_t value)
{
    const int32_t *data = (const int32_t *)((const char *)message + S1F_HEADER_BYTES + message->tensors[0].offset);
    if (message->tensors[0].bytes != elements * 4 || message->tensors[0].sizes[0] != elements)
        return 0;
    for (int64_t i = 0; i < elements; i++)
        if (data[i] != value + (int32_t)i)
            return 0;
    return 1;
}

/* Waits for a message, which must be these; returns its payload. */
static const void *receive_ints(s1f_edge_end *end, int64_t sequence, int32_t place, int64_t elements, int32_t value)
{
    const s1f_message *message = NULL;
    const void *payload = NULL;
    CHECK_STATUS(s1f_p2p_wait(end, sequence, place, &message, &payload), S1F_OK, "");
    CHECK(holds_ints(message, elements, value));
    return payload;
}

/* -- messages ---------------------------------------------------------------------------------------------------- */

/* A step that was given up leaves positions behind; the next step does not see them. */
static void test_aborted_step_is_forgotten(void)
{
    pipeline p = make_pipeline(2);
    const s1f_message *message;
    const void *payload;
    begin(&p, 1, 2);
    CHECK_STATUS(s1f_p2p_post(p.receiver, 0, 0), S1F_OK, "");
    CHECK_STATUS(s1f_p2p_post(p.receiver, 1, 1), S1F_OK, "");
    CHECK_STATUS(send_ints(p.sender, 0, 0, 5, 1), S1F_OK, "");
    begin(&p, 2, 2);
    CHECK(s1f_message_payload_bytes("not a message at all") == -1);
    s1f_group_set_limits(p.groups[0], SECOND / 20, 0);
    s1f_group_set_limits(p.groups[1], SECOND / 20, 0);
    CHECK_STATUS(s1f_p2p_post(p.receiver, 0, 0), S1F_OK, "");
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_TIMEOUT, "message 0");
    s1f_group_clear(p.groups[0]);
    CHECK_STATUS(send_ints(p.sender, 0, 0, 6, 2), S1F_OK, "");
    const unsigned char *bytes = receive_ints(p.receiver, 0, 0, 6, 2);
    CHECK_STATUS(send_ints(p.sender, 1, 1, 6, 2), S1F_ERR_TIMEOUT, "waiting for a free place for");
    CHECK_STATUS(s1f_p2p_post(p.receiver, 1, 0), S1F_OK, ""); /* which poisons the place */
    for (int i = 0; i < 6 * 4; i++)
        CHECK(bytes[i] == 0xFF);
    free_pipeline(&p);
}

static int64_t physical_bytes(int fd)
{
    struct stat found;
    CHECK(fstat(fd, &found) == 0);
    return (int64_t)found.st_blocks * 512;
}

static void test_other_places_give_pages_back(void)
{
    pipeline p = make_pipeline(2);
    enum { ELEMENTS = 1 << 20 };
    begin(&p, 1, 2);
    CHECK_STATUS(s1f_p2p_post(p.receiver, 0, 1), S1F_OK, "");
    CHECK_STATUS(send_ints(p.sender, 0, 1, ELEMENTS, 0), S1F_OK, "");
    receive_ints(p.receiver, 0, 1, ELEMENTS, 0);
    int64_t held = physical_bytes(p.fd);
    CHECK(held >= S1F_HEADER_BYTES + 4 * ELEMENTS && held < S1F_HEADER_BYTES + 4 * ELEMENTS + (1 << 17));
    begin(&p, 2, 2);
    CHECK(physical_bytes(p.fd) == held);
    begin(&p, 3, 3);
    CHECK(physical_bytes(p.fd) <= 1 << 16);
    free_pipeline(&p);
}

/* -- mistakes ---------------------------------------------------------------------------------------------------- */

static void test_mistakes(void)
{
    pipeline p = make_pipeline(2);
    const s1f_message *message;
    const void *payload;
    char out[S1F_GATHER_BYTES];
    int32_t bytes;
    CHECK_STATUS(s1f_group_gather(p.groups[0], 9, 0, 0, out, S1F_GATHER_BYTES + 1, NULL, out, &bytes), S1F_ERR_ARG,
                 "4033");
    CHECK_STATUS(s1f_p2p_begin_step(p.sender, 0), S1F_ERR_ARG, "0 places");
    CHECK_STATUS(s1f_p2p_begin_step(p.sender, ARENA_BYTES / 65536), S1F_ERR_ARG, "ulimit -v unlimited");
    begin(&p, 1, 2);
    CHECK_STATUS(s1f_p2p_post(p.sender, 0, 0), S1F_ERR_STATE, "this is the sender's end");
    CHECK_STATUS(send_ints(p.receiver, 0, 0, 1, 1), S1F_ERR_STATE, "this is the receiver's end");
    CHECK_STATUS(s1f_p2p_post(p.receiver, 1, 0), S1F_ERR_STATE, "message 1: in place 0 of 2, but message 0 is next");
    CHECK_STATUS(s1f_p2p_post(p.receiver, 0, 2), S1F_ERR_STATE, "in place 2 of 2");
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE, "without having been posted");

    s1f_message large = message_of(ARENA_BYTES);
    CHECK_STATUS(s1f_p2p_send(p.sender, 0, 0, &large, (const void *const[]){NULL}), S1F_ERR_ARG, "ulimit -v unlimited");
    s1f_message many = message_of(1);
    many.num_tensors = S1F_MAX_TENSORS + 1;
    CHECK_STATUS(s1f_p2p_send(p.sender, 0, 0, &many, NULL), S1F_ERR_ARG, "17 tensors");
    s1f_message odd = message_of(-1);
    CHECK_STATUS(s1f_p2p_send(p.sender, 0, 0, &odd, NULL), S1F_ERR_ARG, "negative size");
    odd = message_of(1);
    odd.tensors[0].dtype = S1F_NUM_DTYPES;
    CHECK_STATUS(s1f_p2p_send(p.sender, 0, 0, &odd, NULL), S1F_ERR_ARG, "unknown dtype");
    odd = message_of(INT64_MAX / 2);
    CHECK_STATUS(s1f_p2p_send(p.sender, 0, 0, &odd, NULL), S1F_ERR_ARG, "tensor 0");

    CHECK_STATUS(s1f_p2p_post(p.receiver, 0, 0), S1F_OK, "");
    CHECK_STATUS(send_ints(p.sender, 0, 0, 4, 0), S1F_OK, "");
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_OK, "");
    s1f_message expected = *message, *forged = (s1f_message *)(uintptr_t)message;
    CHECK_STATUS(s1f_message_check(message, &expected), S1F_OK, "");
    expected.segment = 2;
    CHECK_STATUS(s1f_message_check(message, &expected), S1F_ERR_STATE,
                 "received F0.3 of step 1 (train), stage 0 to 1, message 0, but the program expects F0.2");
    forged->tensors[0].offset = 64;
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE, "its header is not as it was sent");
    s1f_message_seal(forged);
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE,
                 "tensor 0 lies at bytes 64 + 16 of a payload of 16");
    forged->payload_bytes = ARENA_BYTES;
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE, "its place holds");
    forged->payload_bytes = 16;
    forged->num_tensors = S1F_MAX_TENSORS + 1;
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE, "its header holds 17 tensors");
    forged->num_tensors = 1;
    forged->sequence = 4;
    s1f_message_seal(forged);
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE, "message 4 instead");
    forged->magic = 0;
    CHECK_STATUS(s1f_p2p_wait(p.receiver, 0, 0, &message, &payload), S1F_ERR_STATE, "not a message of this version");
    free_pipeline(&p);
}

static s1f_status no_relay(void *context, const char *event, int64_t number, void *place, int64_t bytes)
{
    return s1f_fail(S1F_ERR_STATE, "%p %s %lld %p %lld", context, event, (long long)number, place, (long long)bytes);
}

static void test_failing_allocations(void)
{
    char block[1 << 15] __attribute__((aligned(64))) = {0};
    s1f_group *group = NULL;
    s1f_mapping *mapping = NULL;
    s1f_edge_end *end = NULL;
    fail_allocation(0);
    CHECK_STATUS(s1f_group_create(block, 1, 0, &group), S1F_ERR_MEMORY, "group of rank 0");
    CHECK(group == NULL && fail_allocation(-1) == 1);
    CHECK_STATUS(s1f_group_create(block, 1, 1, &group), S1F_ERR_ARG, "rank 1 of 1");
    CHECK_STATUS(s1f_group_create(block + 1, 1, 0, &group), S1F_ERR_ARG, "multiple of 64");
    int fd = memfd_create("test_p2p", MFD_CLOEXEC);
    CHECK(ftruncate(fd, 1 << 20) == 0);
    fail_allocation(0);
    CHECK_STATUS(s1f_mapping_create(fd, 1 << 20, &mapping), S1F_ERR_MEMORY, "mapping");
    CHECK(mapping == NULL && fail_allocation(-1) == 1);
    CHECK_STATUS(s1f_mapping_create(-1, 1 << 20, &mapping), S1F_ERR_SYSTEM, "mapping 1048576 bytes");
    fail_allocation(0);
    CHECK_STATUS(s1f_arena_end_create(NULL, block, 1 << 20, -1, 0, 0, EDGE, &end), S1F_ERR_MEMORY, EDGE);
    CHECK(end == NULL && fail_allocation(-1) == 1);
    CHECK_STATUS(s1f_arena_end_create(NULL, block, 4096, -1, 0, 0, EDGE, &end), S1F_ERR_ARG, "at least");
    CHECK_STATUS(s1f_arena_end_create(NULL, block, 1 << 20, -1, 1, 0, EDGE, &end), S1F_OK, "");
    s1f_arena_use_relay(end, no_relay, NULL);
    fail_allocation(0);
    CHECK_STATUS(s1f_p2p_begin_step(end, 3), S1F_ERR_MEMORY, "3 places");
    CHECK(fail_allocation(-1) == 1);
    s1f_edge_end_free(end);
    s1f_group_free(NULL);
    s1f_mapping_free(NULL);
    s1f_edge_end_free(NULL);
    close(fd);
}

/* -- waits end --------------------------------------------------------------------------------------------------- */

static atomic_int stop_progress;

static void *keep_progressing(void *group)
{
    while (!atomic_load(&stop_progress)) {
        s1f_group_progress(group, "F0.0");
        sleep_ms(10);
    }
    return NULL;
}

static void *stop_later(void *unused)
{
    (void)unused;
    for (int i = 0; i < 10; i++)
        sleep_ms(50);
    atomic_store(&stop_progress, 1);
    return NULL;
}

static void *wait_for_first(void *end)
{
    receive_ints(end, 0, 0, 1, 1);
    return NULL;
}

/* Rank 2 waits for rank 1, which waits for rank 0, which works: nobody is stuck. Once rank 0 is, it is named. */
static void test_chain_of_waits(void)
{
    pipeline p = make_pipeline(3);
    pthread_t working, waiting;
    begin(&p, 1, 1);
    s1f_group_set_limits(p.groups[2], SECOND / 5, 0);
    CHECK_STATUS(s1f_p2p_post(p.receiver, 0, 0), S1F_OK, "");
    pthread_create(&working, NULL, keep_progressing, p.groups[0]);
    pthread_create(&waiting, NULL, wait_for_first, p.receiver);
    s1f_signal never = {0};
    s1f_wait_reason reason = {.peer_rank = 1,
                              .hangup_fd = -1,
                              .purpose = "waiting for",
                              .edge = "activations of stage 1 to 2",
                              .sequence = 3};
    int64_t start = now_ns();
    sleep_ms(50);
    /* Rank 0 falls silent after 0.5 s; counted from the wait alone, the error would come after 0.2 s. */
    pthread_t stopper;
    pthread_create(&stopper, NULL, stop_later, NULL);
    CHECK_STATUS(s1f_group_wait(p.groups[2], &never, 1, &reason), S1F_ERR_TIMEOUT, "rank 0 has been in F0.0 for 0.");
    CHECK(strstr(s1f_last_error(), "activations of stage 1 to 2, message 3") != NULL);
    CHECK(now_ns() - start > SECOND / 2);
    pthread_join(stopper, NULL);
    pthread_join(working, NULL);
    s1f_group_clear(p.groups[0]);
    CHECK_STATUS(send_ints(p.sender, 0, 0, 1, 1), S1F_OK, "");
    pthread_join(waiting, NULL);
    free_pipeline(&p);
}

/* A failure ends its step and those after it. A rank that is still in the step before goes on. */
static void test_failure_of_a_later_step(void)
{
    pipeline p = make_pipeline(3);
    s1f_failure failure;
    for (int32_t rank = 0; rank < 3; rank++)
        s1f_group_begin_step(p.groups[rank], 7);
    s1f_group_enter(p.groups[0], 8);
    s1f_group_fail(p.groups[0], 0, "ValueError: no such token");
    CHECK_STATUS(s1f_group_check(p.groups[0]), S1F_ERR_PEER, "no such token");
    CHECK_STATUS(s1f_group_check(p.groups[1]), S1F_OK, "");
    s1f_group_failure(p.groups[1], &failure);
    CHECK(failure.rank == -1 && !s1f_group_has_failed(p.groups[1]));
    s1f_group_enter(p.groups[1], 8);
    CHECK_STATUS(s1f_group_check(p.groups[1]), S1F_ERR_PEER, "rank 0 ended the step: ValueError: no such token");
    s1f_group_failure(p.groups[1], &failure);
    CHECK(failure.rank == 0 && failure.step == 8 && s1f_group_has_failed(p.groups[1]));
    CHECK_STATUS(s1f_group_check(p.groups[2]), S1F_OK, "");
    CHECK(!s1f_group_fail_with(p.groups[1], &(s1f_failure){.rank = 1, .step = 7}));
    CHECK_STATUS(s1f_group_check(p.groups[2]), S1F_ERR_PEER,
                 "no such token"); /* which cannot leave its step any more */
    s1f_group_failure(p.groups[0], &failure);
    CHECK(failure.step == 7);
    s1f_group_clear(p.groups[0]);
    s1f_group_fail(p.groups[1], 1, "another");
    CHECK_STATUS(s1f_group_check(p.groups[2]), S1F_OK, "");
    free_pipeline(&p);
}

/* -- gather ------------------------------------------------------------------------------------------------------ */

/* Rank 1 of two, which stops as it waits for rank 0, until rank 0 is where the test wants it. */
typedef struct {
    void *block;
    s1f_group *groups[2];
    atomic_int stops, may_go;
    uint32_t epoch; /* of rank 1's gather */
    int32_t recovering;
    s1f_status status; /* with which it ends */
} late_rank;

static _Thread_local late_rank *late_here; /* on the thread of rank 1's gather */

static s1f_status stop(void)
{
    if (late_here == NULL)
        return S1F_OK;
    atomic_store(&late_here->stops, 1);
    while (!atomic_load(&late_here->may_go))
        sleep_ms(1);
    return S1F_OK;
}

static void gather_ok(s1f_group *group, uint32_t epoch, uint32_t round, int32_t recovering, const char *mine,
                      const char *theirs)
{
    char out[2 * S1F_GATHER_BYTES];
    int32_t bytes[2];
    CHECK_STATUS(s1f_group_gather(group, epoch, round, recovering, mine, 4, NULL, out, bytes), S1F_OK, "");
    int32_t other = memcmp(mine, "of 0", 4) == 0;
    CHECK(bytes[other] == 4 && memcmp(out + other * S1F_GATHER_BYTES, theirs, 4) == 0);
}

static void *gather_late(void *context)
{
    late_rank *late = late_here = context;
    char out[2 * S1F_GATHER_BYTES];
    int32_t bytes[2];
    late->status = s1f_group_gather(late->groups[1], late->epoch, 0, late->recovering, "of 1", 4, NULL, out, bytes);
    return NULL;
}

/* Rank 0 comes to step 3, and waits for rank 1. */
static void *meet_in_step_3(void *context)
{
    late_rank *late = context;
    s1f_group_enter(late->groups[0], 3);
    for (uint32_t round = 0; round < 2; round++)
        gather_ok(late->groups[0], 3, round, 1, "of 0", "of 1");
    return NULL;
}

static late_rank *make_late_rank(void)
{
    late_rank *late = calloc(1, sizeof *late);
    s1f_interrupted = stop;
    late->block = aligned_alloc(64, s1f_group_block_bytes(2));
    memset(late->block, 0, s1f_group_block_bytes(2));
    for (int32_t rank = 0; rank < 2; rank++) {
        CHECK(s1f_group_create(late->block, 2, rank, &late->groups[rank]) == S1F_OK);
        s1f_group_set_limits(late->groups[rank], 30 * SECOND, 0);
        s1f_group_begin_step(late->groups[rank], 1);
    }
    return late;
}

static void free_late_rank(late_rank *late)
{
    s1f_group_free(late->groups[0]);
    s1f_group_free(late->groups[1]);
    s1f_interrupted = NULL;
    free(late->block);
    free(late);
}

static void leave(s1f_group *group, int64_t step, int32_t rank)
{
    s1f_failure failure = {.rank = rank, .text = "ValueError: no such token"};
    s1f_group_leave(group, step, &failure);
}

/* Rank 0 gives to the last gather of a step, leaves the next one by an error and comes to the one after it, before rank
 * 1 has read what it gave. Rank 1 leaves the step well, hears of the failure in the next one, and meets rank 0. */
static void test_gather_of_a_step_that_another_has_left(void)
{
    late_rank *late = make_late_rank();
    pthread_t gathering, meeting;
    pthread_create(&gathering, NULL, gather_late, late);
    while (!atomic_load(&late->stops))
        sleep_ms(1);
    gather_ok(late->groups[0], 0, 0, 0, "of 0", "of 1");
    s1f_group_enter(late->groups[0], 2);
    s1f_group_begin_step(late->groups[0], 2);
    leave(late->groups[0], 2, 0);
    pthread_create(&meeting, NULL, meet_in_step_3, late);
    sleep_ms(100); /* it waits in step 3 */
    atomic_store(&late->may_go, 1);
    pthread_join(gathering, NULL);
    CHECK(late->status == S1F_OK);
    CHECK_STATUS(s1f_group_check(late->groups[1]), S1F_OK, "");
    s1f_group_enter(late->groups[1], 2);
    CHECK_STATUS(s1f_group_check(late->groups[1]), S1F_ERR_PEER, "rank 0 ended the step: ValueError: no such token");
    leave(late->groups[1], 2, 0);
    s1f_group_enter(late->groups[1], 3);
    for (uint32_t round = 0; round < 2; round++)
        gather_ok(late->groups[1], 3, round, 1, "of 1", "of 0");
    pthread_join(meeting, NULL);
    free_late_rank(late);
}

/* Rank 1 comes to step 2, after a failure, and waits for rank 0, which leaves that step by an error: before it has met
 * rank 1 there, or in the middle of it. Then rank 1 leaves it, too, and both meet in step 3. */
static void meet_a_rank_that_has_left(int has_met)
{
    late_rank *late = make_late_rank();
    pthread_t gathering, meeting;
    s1f_failure failure;
    late->epoch = 2;
    late->recovering = 1;
    for (int32_t rank = 0; rank < 2; rank++) {
        leave(late->groups[rank], 1, 0);
        s1f_group_enter(late->groups[rank], 2);
    }
    CHECK(!s1f_group_passed(late->groups[1], 2, &failure));
    pthread_create(&gathering, NULL, gather_late, late);
    while (!atomic_load(&late->stops))
        sleep_ms(1);
    if (has_met)
        gather_ok(late->groups[0], 2, 0, 1, "of 0", "of 1");
    leave(late->groups[0], 2, 0);
    pthread_create(&meeting, NULL, meet_in_step_3, late);
    sleep_ms(100);
    atomic_store(&late->may_go, 1);
    pthread_join(gathering, NULL);
    CHECK(late->status == (has_met ? S1F_OK : S1F_ERR_PEER)); /* of the first round */
    CHECK(s1f_group_passed(late->groups[1], 2, &failure));
    CHECK(failure.rank == 0 && failure.step == 2 && strcmp(failure.text, "ValueError: no such token") == 0);
    leave(late->groups[1], 2, 0);
    s1f_group_enter(late->groups[1], 3);
    for (uint32_t round = 0; round < 2; round++)
        gather_ok(late->groups[1], 3, round, 1, "of 1", "of 0");
    pthread_join(meeting, NULL);
    free_late_rank(late);
}

/* A rank whose units are done waits for those of the rank where backwards end, and hears if they fail. */
static void test_finish_step(void)
{
    pipeline p = make_pipeline(2);
    for (int32_t rank = 0; rank < 2; rank++)
        s1f_group_begin_step(p.groups[rank], 1);
    CHECK_STATUS(s1f_group_finish_step(p.groups[0], 0, -1), S1F_OK, "");
    CHECK_STATUS(s1f_group_finish_step(p.groups[1], 0, -1), S1F_OK, "");
    for (int32_t rank = 0; rank < 2; rank++)
        s1f_group_begin_step(p.groups[rank], 2);
    s1f_group_set_limits(p.groups[1], SECOND / 10, 0);
    CHECK_STATUS(s1f_group_finish_step(p.groups[1], 0, -1), S1F_ERR_TIMEOUT, "waiting for the end of the step");
    s1f_group_clear(p.groups[0]);
    s1f_group_fail(p.groups[0], 0, "ValueError: no such token");
    CHECK_STATUS(s1f_group_finish_step(p.groups[1], 0, -1), S1F_ERR_PEER, "rank 0 ended the step");
    free_pipeline(&p);
}

/* Ranks of a host, with a block each, hear of a step that one of them has spoiled, and of no other step. */
static void test_spoiled_steps(void)
{
    pipeline p[2] = {make_pipeline(2), make_pipeline(2)};
    s1f_group *one = p[0].groups[0], *other = p[1].groups[1];
    s1f_spoiled shared = {0};
    s1f_group_begin_step(one, 7);
    s1f_group_begin_step(other, 7);
    s1f_group_spoil(one, 7);
    CHECK(s1f_group_is_spoiled(one) && !s1f_group_is_spoiled(other)); /* they share nothing yet */
    s1f_group_share_spoiled(one, &shared);
    s1f_group_share_spoiled(other, &shared);
    CHECK(!s1f_group_is_spoiled(one) && !s1f_group_is_spoiled(other));
    s1f_group_spoil(one, 7);
    s1f_group_spoil(one, 8);
    CHECK(s1f_group_is_spoiled(other)); /* also where the first one has gone on, and failed again */
    for (int64_t step = 6; step <= 7 + S1F_SPOILED_STEPS; step++) {
        s1f_group_begin_step(other, step);
        CHECK(s1f_group_is_spoiled(other) == (step == 7 || step == 8));
    }
    free_pipeline(&p[0]);
    free_pipeline(&p[1]);
}

/* A rank that is in a later step will not come to a collective of the one before, unless it had given to it. */
static void test_gather_that_another_skips(void)
{
    late_rank *late = make_late_rank();
    char out[2 * S1F_GATHER_BYTES];
    int32_t bytes[2];
    pthread_t gathering;
    for (int32_t rank = 0; rank < 2; rank++)
        s1f_group_enter(late->groups[rank], 2);
    pthread_create(&gathering, NULL, gather_late, late);
    while (!atomic_load(&late->stops))
        sleep_ms(1);
    gather_ok(late->groups[0], 0, 0, 0, "of 0", "of 1");
    s1f_group_begin_step(late->groups[0], 2);
    atomic_store(&late->may_go, 1);
    pthread_join(gathering, NULL);
    CHECK(late->status == S1F_OK);
    CHECK_STATUS(s1f_group_gather(late->groups[1], 0, 1, 0, "of 1", 4, NULL, out, bytes), S1F_ERR_PEER,
                 "rank 0 has begun step 2 without a collective that rank 1 waits in");
    CHECK_STATUS(s1f_group_check(late->groups[0]), S1F_ERR_PEER, "has begun step 2");
    free_late_rank(late);
}

/* A rank that leaves a step just before another forgets the failure of the step before is not forgotten with it. A rank
 * that is in a later step without an error is named, and has told nothing. */
static void test_leaving_a_step_as_a_failure_is_forgotten(void)
{
    pipeline p = make_pipeline(3);
    s1f_failure failure;
    for (int32_t rank = 0; rank < 3; rank++) {
        leave(p.groups[rank], 1, 2);
        s1f_group_enter(p.groups[rank], 2);
    }
    s1f_group_clear(p.groups[0]);
    CHECK_STATUS(s1f_group_check(p.groups[1]), S1F_OK, "");
    leave(p.groups[1], 1, 2); /* stands again, as if it had not been forgotten yet */
    leave(p.groups[2], 2, 2);
    s1f_group_clear(p.groups[0]);
    CHECK_STATUS(s1f_group_check(p.groups[1]), S1F_ERR_PEER, "rank 2 ended the step: ValueError: no such token");
    s1f_group_enter(p.groups[1], 3);
    CHECK_STATUS(s1f_group_check(p.groups[1]), S1F_ERR_PEER, "rank 2 ended step 2, which rank 1 had left well");
    s1f_group_failure(p.groups[0], &failure);
    CHECK(failure.rank == 2 && failure.step == 2);
    CHECK(!s1f_group_passed(p.groups[0], 3, &failure) && failure.rank == -1);
    char out[3 * S1F_GATHER_BYTES];
    int32_t bytes[3];
    s1f_group_set_limits(p.groups[1], SECOND / 100, 0);
    s1f_group_enter(p.groups[1], 4);
    CHECK(s1f_group_gather(p.groups[1], 4, 0, 1, "", 0, NULL, out, bytes) != S1F_OK);
    CHECK(s1f_group_passed(p.groups[0], 3, &failure) && failure.rank == 1 && failure.text[0] == '\0');
    free_pipeline(&p);
}

int main(void)
{
    test_aborted_step_is_forgotten();
    test_other_places_give_pages_back();
    test_mistakes();
    test_failing_allocations();
    test_chain_of_waits();
    test_failure_of_a_later_step();
    test_gather_of_a_step_that_another_has_left();
    meet_a_rank_that_has_left(1);
    meet_a_rank_that_has_left(0);
    test_leaving_a_step_as_a_failure_is_forgotten();
    test_finish_step();
    test_spoiled_steps();
    test_gather_that_another_skips();
    return check_failures();
}
