/* test_nccl_stand_in.c - does the stand-in for NCCL keep the rules that transports rely on, block where the real one
 * may block, and report each trap? */
#include "stand_in_test.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_RANKS = 4 };

static ncclConfig_t nonblocking(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

/* Asks until the communicator is no longer in progress; ncclInProgress if it stays so for 10 s. */
static ncclResult_t poll(ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress, asked = ncclSuccess;
    time_t began = time(NULL);
    while (asked == ncclSuccess && result == ncclInProgress && time(NULL) - began < 10) {
        asked = ncclCommGetAsyncError(comm, &result);
        sched_yield();
    }
    CHECK(asked == ncclSuccess);
    return result;
}

static int settled(ncclResult_t result, ncclComm_t comm)
{
    return (result == ncclSuccess || result == ncclInProgress) && poll(comm) == ncclSuccess;
}

/* Two ranks, on devices 0 and 1, both of this thread, with a stream, a sent and a received word of memory each. */
typedef struct {
    ncclComm_t comm[2];
    CUstream stream[2];
    CUdeviceptr sent[2], received[2];
} pair;

static pair new_pair(uint64_t seed, int64_t queues, int blocking)
{
    pair made;
    ncclUniqueId id;
    ncclConfig_t config = nonblocking();
    config.blocking = blocking;
    begin(seed, queues);
    OK(ncclGetUniqueId(&id));
    OK(ncclGroupStart());
    for (int rank = 0; rank < 2; rank++) {
        use_device(rank);
        OK(ncclCommInitRankConfig(&made.comm[rank], 2, id, rank, &config));
        made.stream[rank] = new_stream();
        made.sent[rank] = new_memory(8);
        made.received[rank] = new_memory(8);
        *(uint64_t *)host(made.sent[rank]) = (uint64_t)rank + 40;
    }
    ncclResult_t result = ncclGroupEnd();
    for (int rank = 0; rank < 2; rank++)
        CHECK(settled(result, made.comm[rank]));
    return made;
}

static void end_pair(const pair *p)
{
    for (int rank = 0; rank < 2; rank++) {
        OK(cuMemFree_v2(p->sent[rank]));
        OK(cuMemFree_v2(p->received[rank]));
    }
}

static ncclResult_t send_from(const pair *p, int rank)
{
    use_device(rank);
    return ncclSend(host(p->sent[rank]), 1, ncclInt64, 1 - rank, p->comm[rank], p->stream[rank]);
}

static ncclResult_t receive_on(const pair *p, int rank)
{
    use_device(rank);
    return ncclRecv(host(p->received[rank]), 1, ncclInt64, 1 - rank, p->comm[rank], p->stream[rank]);
}

static uint64_t received_on(const pair *p, int rank)
{
    return *(const uint64_t *)host(p->received[rank]);
}

static void test_message(void)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        pair p = new_pair(seed, 1, 0);
        int number;
        OK(ncclCommCount(p.comm[1], &number));
        CHECK(number == 2);
        OK(ncclCommUserRank(p.comm[1], &number));
        CHECK(number == 1);
        void *registration;
        OK(ncclCommRegister(p.comm[1], host(p.received[1]), 8, &registration));
        OK(ncclCommDeregister(p.comm[1], registration));

        clear_trace();
        OK(stand_in_set("in_progress_percent", 100));
        *(uint64_t *)host(p.received[1]) = 5;
        ncclResult_t received = receive_on(&p, 1), sent = send_from(&p, 0);
        CHECK(settled(received, p.comm[1]));
        use_device(1);
        run_letter(new_stream(), "k"); /* on the same queue: behind the receive */
        if (seed == 0)                 /* the receive has begun, so what was there is gone */
            CHECK(stuck_with("receive of message 0, 8 bytes, from device 0") && traced == 0 &&
                  received_on(&p, 1) == UINT64_MAX);
        CHECK(settled(sent, p.comm[0]));
        CHECK(drained() && traced == 1 && received_on(&p, 1) == 40);
        CHECK(stand_in_count("send") == 1 && stand_in_count("receive") == 1 && stand_in_count("nccl") == 2);

        ncclResult_t first = ncclCommFinalize(p.comm[0]), again;
        CHECK(first == ncclInProgress); /* whoever comes first waits for the others */
        for (int i = 0; i < 10; i++) {
            OK(ncclCommGetAsyncError(p.comm[0], &again));
            CHECK(again == ncclInProgress);
        }
        CHECK(settled(ncclCommFinalize(p.comm[1]), p.comm[1]) && settled(first, p.comm[0]));
        CHECK(stand_in_count("live_communicators") == 2);
        OK(ncclCommDestroy(p.comm[0]));
        OK(ncclCommDestroy(p.comm[1]));
        CHECK(stand_in_count("live_communicators") == 0);
        end_pair(&p);
    }
}

/* The second receive, free to run, does not take the first message. */
static void test_messages_keep_their_order(void)
{
    pair p = new_pair(27, 8, 0);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    use_device(1);
    CUstream second = new_stream();
    CUdeviceptr gate = new_gate(p.stream[1]), word = new_memory(8);
    OK(receive_on(&p, 1));
    OK(ncclRecv(host(word), 1, ncclInt64, 0, p.comm[1], second));
    OK(send_from(&p, 0));
    CHECK(stuck_with("receive of message 1"));
    open_gate(gate);
    *(uint64_t *)host(p.received[0]) = 41;
    OK(ncclSend(host(p.received[0]), 1, ncclInt64, 1, p.comm[0], p.stream[0]));
    CHECK(drained() && received_on(&p, 1) == 40 && *(uint64_t *)host(word) == 41);
    OK(cuMemFree_v2(gate));
    OK(cuMemFree_v2(word));
    end_pair(&p);
}

/* A receive that has not begun: what it should have filled is undefined all the same. */
static void test_abort_before_it_begins(void)
{
    pair p = new_pair(28, 8, 0);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    use_device(1);
    CUdeviceptr gate = new_gate(p.stream[1]);
    *(uint64_t *)host(p.received[1]) = 5;
    OK(receive_on(&p, 1));
    OK(ncclCommAbort(p.comm[1]));
    CHECK(stuck_with("value wait") && received_on(&p, 1) == 5);
    open_gate(gate);
    CHECK(drained() && received_on(&p, 1) == UINT64_MAX);
    OK(cuMemFree_v2(gate));
    end_pair(&p);
}

static void test_configuration(void)
{
    begin(20, 8);
    ncclComm_t comm = NULL;
    ncclUniqueId id, other = {{0}};
    int version;
    OK(ncclGetVersion(&version));
    CHECK(version == 22907 && strcmp(ncclGetErrorString(ncclInProgress), "NCCL operation in progress") == 0);
    OK(ncclGetUniqueId(&id));
    CHECK(ncclCommInitRank(&comm, 1, other, 0) == ncclInvalidArgument);
    expect_misuse("not one of ncclGetUniqueId");
    CHECK(ncclCommInitRank(&comm, 2, id, 2) == ncclInvalidArgument);
    expect_misuse("rank 2 of 2");
    CHECK(strstr(ncclGetLastError(NULL), "ncclCommInitRank: rank 2 of 2") != NULL);

    ncclConfig_t config = nonblocking();
    config.magic++;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    expect_misuse("NCCL_CONFIG_INITIALIZER");
    config = nonblocking();
    config.size = 40; /* as of 2.17, yet it says 2.18 */
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    expect_misuse("version 21801 has 40 bytes");
    config = nonblocking();
    config.blocking = 2;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    expect_misuse("blocking is 2");
    config = nonblocking();
    config.minCTAs = 3;
    config.maxCTAs = 2;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument && comm == NULL);
    expect_misuse("minCTAs 3, maxCTAs 2");

    config = nonblocking();
    config.version = NCCL_VERSION(2, 14, 3); /* knows `blocking` and no more: what follows is not read */
    config.size = 24;
    config.minCTAs = -5;
    ncclResult_t result = ncclCommInitRankConfig(&comm, 1, id, 0, &config);
    CHECK(settled(result, comm));
    OK(ncclCommDestroy(comm)); /* a rank alone need not wait for others */
    CHECK(ncclCommDestroy(comm) == ncclInvalidArgument);
    expect_misuse("communicator 1 is destroyed");

    OK(ncclGetUniqueId(&id));
    config = nonblocking();
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 1, &config) == ncclInvalidUsage); /* one GPU for two ranks */
    expect_misuse("both on device 0");
    OK(cuCtxSetCurrent(NULL)); /* then the runtime takes device 0 */
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 1, &config) == ncclInvalidUsage);
    expect_misuse("both on device 0");
    OK(ncclCommAbort(comm));
}

static void *use_communicator(void *comm)
{
    ncclResult_t result;
    int count;
    OK(ncclCommGetAsyncError(comm, &result)); /* these two may come from any thread */
    OK(ncclCommCount(comm, &count));
    return NULL;
}

static void *abort_communicator(void *comm)
{
    OK(ncclCommAbort(comm));
    return NULL;
}

static void in_thread(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    OK(pthread_create(&thread, NULL, function, argument));
    OK(pthread_join(thread, NULL));
}

static void test_traps(void)
{
    pair p = new_pair(21, 8, 0);
    OK(stand_in_set("in_progress_percent", 100));
    CUevent event = new_event();
    CHECK(receive_on(&p, 1) == ncclInProgress);
    CHECK(receive_on(&p, 1) == ncclInvalidArgument);
    expect_misuse("still in progress");
    use_device(0);
    event = new_event();
    CHECK(send_from(&p, 0) == ncclInProgress);
    OK(cuEventRecord(event, p.stream[0]));
    expect_misuse("cuEventRecord on main: on stream 1 while an NCCL group");
    OK(cuEventSynchronize(event)); /* reached before the send that it should follow has begun */
    CHECK(stand_in_count("nccl") == 0);
    OK(cuStreamQuery(p.stream[1]));
    expect_misuse("cuStreamQuery on main: on stream 2 while an NCCL group");
    OK(cuCtxSynchronize());
    expect_misuse("cuCtxSynchronize on main: on stream 1 while an NCCL group");
    CHECK(poll(p.comm[0]) == ncclSuccess && poll(p.comm[1]) == ncclSuccess);
    CHECK(drained() && received_on(&p, 1) == 40);

    in_thread(use_communicator, p.comm[0]);
    expect_misuse("ncclCommCount");
    use_device(1);
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], p.stream[0]) == ncclInvalidUsage);
    expect_misuse("is of device 0, the thread's current one is 1");
    use_device(0);
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], p.stream[1]) == ncclUnhandledCudaError);
    expect_misuse("the stream is not");
    CHECK(ncclSend(host(p.sent[1]), 1, ncclInt64, 1, p.comm[0], p.stream[0]) == ncclInvalidArgument);
    expect_misuse("is of device 0, the memory of device 1");
    CHECK(ncclSend(host(p.sent[0]), 2, ncclInt64, 1, p.comm[0], p.stream[0]) == ncclInvalidArgument);
    expect_misuse("16 bytes at offset 0 of an allocation of 8 bytes");
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 2, p.comm[0], p.stream[0]) == ncclInvalidArgument);
    expect_misuse("peer 2 of 2");
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 0, p.comm[0], p.stream[0]) == ncclInvalidUsage);
    expect_misuse("to itself");
    OK(ncclGroupStart());
    OK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], p.stream[0]));
    CHECK(ncclSend(host(p.sent[0]), 1, ncclInt64, 1, p.comm[0], new_stream()) == ncclInvalidUsage);
    expect_misuse("not modelled");
    CHECK(ncclGroupEnd() == ncclInvalidUsage); /* and nothing of it is executed */
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    expect_misuse("no ncclGroupStart");
    CHECK(stand_in_count("nccl") == 2);

    CHECK(receive_on(&p, 1) == ncclInProgress);
    in_thread(abort_communicator, p.comm[1]);
    CHECK(drained()); /* it never reached its stream */
    CHECK(ncclCommAbort(p.comm[1]) == ncclInvalidArgument);
    expect_misuse("destroyed or aborted");
    OK(ncclCommAbort(p.comm[0]));
    end_pair(&p);

    p = new_pair(22, 8, 0);
    ncclUniqueId id;
    ncclComm_t blocking;
    OK(ncclGetUniqueId(&id));
    use_device(0);
    OK(ncclCommInitRank(&blocking, 1, id, 0));
    OK(ncclGroupStart());
    OK(send_from(&p, 0));
    OK(ncclSend(host(p.sent[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    OK(ncclRecv(host(p.received[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    expect_misuse("blocking and nonblocking");
    OK(ncclGroupStart()); /* a rank may send to itself, both ends in one group */
    OK(ncclSend(host(p.sent[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    OK(ncclRecv(host(p.received[0]), 1, ncclInt64, 0, blocking, p.stream[0]));
    OK(ncclGroupEnd());
    OK(cuStreamSynchronize(p.stream[0]));
    CHECK(received_on(&p, 0) == 40);
    OK(ncclCommDestroy(blocking));
    end_pair(&p);
}

/* Three ranks of one communicator, all of this thread: what one group holds goes its own ways. */
static void test_groups(void)
{
    begin(29, 1);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    ncclUniqueId id;
    ncclConfig_t config = nonblocking();
    ncclComm_t comm[3];
    CUstream stream[3];
    CUdeviceptr words[3];
    OK(ncclGetUniqueId(&id));
    OK(ncclGroupStart());
    for (int rank = 0; rank < 3; rank++) {
        use_device(rank);
        OK(ncclCommInitRankConfig(&comm[rank], 3, id, rank, &config));
        stream[rank] = new_stream();
        words[rank] = new_memory(32);
        for (int i = 0; i < 4; i++)
            ((uint64_t *)host(words[rank]))[i] = (uint64_t)(10 * rank + i);
    }
    OK(ncclGroupEnd());
    uint64_t *held[3] = {host(words[0]), host(words[1]), host(words[2])};

    use_device(0); /* one word to rank 2, and two to rank 1, in order */
    OK(ncclGroupStart());
    OK(ncclSend(held[0] + 2, 1, ncclInt64, 2, comm[0], stream[0]));
    OK(ncclGroupStart()); /* only the outermost end counts */
    OK(ncclSend(held[0], 1, ncclInt64, 1, comm[0], stream[0]));
    OK(ncclGroupEnd());
    OK(ncclSend(held[0] + 1, 1, ncclInt64, 1, comm[0], stream[0]));
    CHECK(stand_in_count("issued") == 0);
    OK(ncclGroupEnd());
    CHECK(stand_in_count("issued") == 1);
    use_device(2); /* rank 2 gets its word though rank 1 has not come */
    OK(ncclRecv(held[2], 1, ncclInt64, 0, comm[2], stream[2]));
    OK(cuStreamSynchronize(stream[2]));
    CHECK(held[2][0] == 2 && stuck_with("send of message 0, 8 bytes, to device 1"));
    use_device(1);
    OK(ncclRecv(held[1], 1, ncclInt64, 0, comm[1], stream[1]));
    OK(ncclRecv(held[1] + 1, 1, ncclInt64, 0, comm[1], stream[1]));
    CHECK(drained() && held[1][0] == 0 && held[1][1] == 1);
    CHECK(stand_in_count("send") == 3 && stand_in_count("receive") == 3 && stand_in_count("nccl") == 4);

    OK(ncclGroupStart()); /* over the communicators of two ranks: an operation on the stream of each */
    OK(ncclSend(held[1] + 3, 1, ncclInt64, 2, comm[1], stream[1]));
    use_device(2);
    OK(ncclRecv(held[2] + 1, 1, ncclInt64, 1, comm[2], stream[2]));
    OK(ncclGroupEnd());
    CHECK(drained() && held[2][1] == 13);
    for (int rank = 0; rank < 3; rank++) {
        OK(ncclCommAbort(comm[rank]));
        OK(cuMemFree_v2(words[rank]));
    }
}

/* NCCL may synchronise the device before it launches: the group stays in progress until the device is idle. */
static void test_injected_synchronisation_of_nccl(void)
{
    pair p = new_pair(30, 8, 0);
    OK(stand_in_set("in_progress_percent", 0));
    OK(stand_in_set("connection_setup", 0));
    OK(stand_in_set("injected_sync_permille", 1000));
    use_device(0);
    CUstream other = new_stream();
    CUdeviceptr gate = new_memory(8);
    *(uint64_t *)host(gate) = 0;
    OK(cuStreamWaitValue64_v2(other, gate, 1, CU_STREAM_WAIT_VALUE_EQ));
    ncclResult_t asked;
    CHECK(send_from(&p, 0) == ncclInProgress);
    for (int i = 0; i < 10; i++) {
        OK(ncclCommGetAsyncError(p.comm[0], &asked));
        CHECK(asked == ncclInProgress);
    }
    OK(receive_on(&p, 1)); /* its device is idle */
    CHECK(stuck_with("value wait") && stand_in_count("injected_synchronisations") == 2);
    open_gate(gate);
    CHECK(poll(p.comm[0]) == ncclSuccess && drained() && received_on(&p, 1) == 40);
    OK(cuMemFree_v2(gate));
    end_pair(&p);
}

/* The first message of a pair waits for both hosts, the second does not. */
static void test_connection(void)
{
    for (int setup = 0; setup <= 1; setup++) {
        pair p = new_pair(23, 8, 0);
        OK(stand_in_set("connection_setup", setup));
        for (int message = 0; message < 2; message++) {
            ncclResult_t sent = send_from(&p, 0), asked = sent;
            for (int i = 0; i < 10 && asked == ncclInProgress; i++)
                OK(ncclCommGetAsyncError(p.comm[0], &asked));
            CHECK(asked == (setup && message == 0 ? ncclInProgress : ncclSuccess));
            CHECK(settled(receive_on(&p, 1), p.comm[1]) && settled(sent, p.comm[0]) && drained());
        }
        end_pair(&p);
    }
}

static void test_failing_calls(void)
{
    pair p = new_pair(26, 8, 0);
    size_t free_bytes, total;
    stand_in_fail_call("cuMem", 1, CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    OK(cuCtxSynchronize());
    CHECK(stand_in_count("failed_calls") == 0);
    CHECK(cuMemGetInfo_v2(&free_bytes, &total) == CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    CHECK(stand_in_count("failed_calls") == 1 && stand_in_count("cuMemGetInfo_v2") == 3);

    ncclResult_t result;
    stand_in_fail_call("ncclSend", 0, ncclSystemError);
    CHECK(send_from(&p, 0) == ncclSystemError);
    stand_in_break_communicators(1, 2, ncclRemoteError); /* no rank is on device 2 */
    OK(ncclCommGetAsyncError(p.comm[1], &result));
    CHECK(result == ncclSuccess);
    stand_in_break_communicators(1, 0, ncclRemoteError);
    OK(ncclCommGetAsyncError(p.comm[1], &result));
    CHECK(result == ncclRemoteError && receive_on(&p, 1) == ncclRemoteError);
    OK(ncclCommGetAsyncError(p.comm[0], &result));
    CHECK(result == ncclSuccess);
    end_pair(&p);
}

static void test_unequal_sizes(void)
{
    pair p = new_pair(24, 8, 0);
    use_device(1);
    ncclResult_t received = ncclRecv(host(p.received[1]), 4, ncclUint8, 0, p.comm[1], p.stream[1]), result;
    ncclResult_t sent = send_from(&p, 0);
    CHECK(settled(sent, p.comm[0]));
    /* Both may have run by the time the second is asked. */
    while (received == ncclInProgress)
        OK(ncclCommGetAsyncError(p.comm[1], &received));
    CHECK(drained());
    expect_misuse("rank 0 sends 1 elements of type 4, rank 1 receives 4 of type 1");
    OK(ncclCommGetAsyncError(p.comm[0], &result));
    CHECK(result == ncclInvalidUsage && received_on(&p, 1) == UINT64_MAX);
    CHECK(send_from(&p, 0) == ncclInvalidUsage); /* a failed communicator refuses */
    end_pair(&p);
}

static void test_faults(void)
{
    for (int kind = STAND_IN_SENDER_LOST; kind <= STAND_IN_RECEIVER_FAILS; kind++)
        for (int aborts = 0; aborts <= 1; aborts++) {
            pair p = new_pair(25, 8, 0);
            stand_in_fault((stand_in_fault_kind)kind, 0, 1, 1, ncclRemoteError);
            for (int message = 0; message < 2; message++) {
                ncclResult_t received = receive_on(&p, 1), sent = send_from(&p, 0);
                ncclResult_t ends[2] = {poll(p.comm[0]), poll(p.comm[1])};
                if (message == 1) /* it may have failed by now */
                    continue;
                CHECK(received == ncclSuccess || received == ncclInProgress);
                CHECK(sent == ncclSuccess || sent == ncclInProgress);
                CHECK(ends[0] == ncclSuccess && ends[1] == ncclSuccess && drained() && received_on(&p, 1) == 40);
            }
            CHECK(stuck_with("lost by a fault"));
            for (int rank = 0; rank < 2; rank++) {
                ncclResult_t result, wanted = ncclSuccess;
                if (kind == (rank == 0 ? STAND_IN_SENDER_FAILS : STAND_IN_RECEIVER_FAILS))
                    wanted = ncclRemoteError;
                OK(ncclCommGetAsyncError(p.comm[rank], &result));
                CHECK(result == wanted);
                if (aborts)
                    in_thread(abort_communicator, p.comm[rank]);
            }
            if (!aborts)
                stand_in_end_faults();
            CHECK(drained());
            CHECK(received_on(&p, 1) == (aborts ? UINT64_MAX : 40));
            end_pair(&p);
        }
}

/* -- ranks as threads -------------------------------------------------------------------------------------------- */

typedef struct ranks ranks;
struct ranks {
    int num_ranks;
    ncclUniqueId ids[MAX_RANKS];
    void (*body)(ranks *all, int rank);
    int variant;
    atomic_int failed; /* ranks that saw a deadlock */
};
typedef struct {
    ranks *all;
    int rank;
} rank_argument;

static void *run_rank(void *argument)
{
    rank_argument *me = argument;
    char name[16];
    snprintf(name, sizeof name, "rank %d", me->rank);
    stand_in_name_thread(name);
    use_device(me->rank);
    me->all->body(me->all, me->rank);
    return NULL;
}

static void run_ranks(ranks *all)
{
    pthread_t threads[MAX_RANKS];
    rank_argument arguments[MAX_RANKS];
    for (int i = 0; i < MAX_RANKS; i++)
        OK(ncclGetUniqueId(&all->ids[i]));
    for (int rank = 0; rank < all->num_ranks; rank++) {
        arguments[rank] = (rank_argument){all, rank};
        OK(pthread_create(&threads[rank], NULL, run_rank, &arguments[rank]));
    }
    for (int rank = 0; rank < all->num_ranks; rank++)
        OK(pthread_join(threads[rank], NULL));
}

enum { SEND_FIRST, IN_GROUP };

/* Two ranks exchange a word: each sends, then receives on its other stream, or both in one group. */
static void exchange(ranks *all, int rank)
{
    ncclComm_t comm;
    CUstream sends = new_stream(), receives = new_stream();
    CUdeviceptr sent = new_memory(8), received = new_memory(8);
    *(uint64_t *)host(sent) = (uint64_t)rank + 70;
    OK(ncclCommInitRank(&comm, 2, all->ids[0], rank));
    if (all->variant == IN_GROUP)
        OK(ncclGroupStart());
    int failed = ncclSend(host(sent), 1, ncclInt64, 1 - rank, comm, sends) != ncclSuccess;
    if (!failed) {
        CUstream other = all->variant == IN_GROUP ? sends : receives; /* one group takes one stream */
        OK(ncclRecv(host(received), 1, ncclInt64, 1 - rank, comm, other));
        if (all->variant == IN_GROUP)
            OK(ncclGroupEnd());
        failed = cuCtxSynchronize() != CUDA_SUCCESS;
    }
    if (failed) {
        OK(ncclCommAbort(comm));
        OK(cuCtxSynchronize());
    } else {
        OK(ncclCommDestroy(comm));
    }
    all->failed += failed;
    CHECK(*(uint64_t *)host(received) == (failed ? UINT64_MAX : (uint64_t)(1 - rank) + 70));
}

static void test_rendezvous(void)
{
    static const struct {
        int64_t queues, setup, buffered;
        int variant;
        const char *deadlock;
    } cases[] = {
        {1, 0, 0, SEND_FIRST, "send of message 0, 8 bytes, to device 1"}, /* nothing buffers */
        {2, 0, 0, SEND_FIRST, NULL},
        {1, 0, 8, SEND_FIRST, NULL},
        {1, 0, 7, SEND_FIRST, "send of message 0"}, /* larger than what is buffered */
        {1, 0, 0, IN_GROUP, NULL},
        {8, 1, 0, SEND_FIRST, "rank 0 waits in ncclSend"}, /* hosts: each comes with the end that the other does not */
        {1, 1, 0, IN_GROUP, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint64_t seed = 0; seed < (slow ? 2 : 20); seed++) {
            begin(seed, cases[i].queues);
            OK(stand_in_set("connection_setup", cases[i].setup));
            OK(stand_in_set("buffered_bytes", cases[i].buffered));
            OK(stand_in_set("hosts", 2));
            ranks all = {.num_ranks = 2, .body = exchange, .variant = cases[i].variant};
            run_ranks(&all);
            const char *deadlock = stand_in_deadlock();
            CHECK((deadlock != NULL) == (cases[i].deadlock != NULL));
            CHECK(all.failed == (cases[i].deadlock != NULL ? 2 : 0));
            if (deadlock != NULL && cases[i].deadlock != NULL && strstr(deadlock, cases[i].deadlock) == NULL) {
                fprintf(stderr, "%swanted \"%s\"\n", deadlock, cases[i].deadlock);
                CHECK(!"the deadlock that was wanted");
            }
            CHECK(drained());
        }
}

/* A chain of ranks: each receives a word, adds one and sends it on, message after message, through two buffers, with a
 * communicator and a stream per edge. What the last rank gets tells whether each wait was honoured. */
enum { MESSAGES = 6, BUFFERS = 2, NO_REUSE_WAIT = 1 };

static void add_one(void *words)
{
    uint64_t *const *w = words;
    *w[1] = *w[0] + 1;
}

static void chain(ranks *all, int rank)
{
    int first = rank == 0, last = rank == all->num_ranks - 1;
    ncclComm_t before = NULL, after = NULL;
    ncclConfig_t config = nonblocking();
    ncclResult_t results[2] = {ncclSuccess, ncclSuccess};
    if (!first)
        results[0] = ncclCommInitRankConfig(&before, 2, all->ids[rank - 1], 1, &config);
    if (!last)
        results[1] = ncclCommInitRankConfig(&after, 2, all->ids[rank], 0, &config);
    CHECK((first || settled(results[0], before)) && (last || settled(results[1], after)));
    CUstream receives = new_stream(), computes = new_stream(), sends = new_stream();
    CUevent received[BUFFERS], computed[BUFFERS], sent[BUFFERS];
    CUdeviceptr in = new_memory(BUFFERS * 8), out = new_memory(BUFFERS * 8);
    uint64_t *words[BUFFERS][2], results_of[MESSAGES] = {0}, *result_words[MESSAGES][2];
    for (int b = 0; b < BUFFERS; b++) {
        received[b] = new_event();
        computed[b] = new_event();
        sent[b] = new_event();
        words[b][0] = (uint64_t *)host(in) + b;
        words[b][1] = (uint64_t *)host(out) + b;
    }
    uint64_t inputs[MESSAGES];
    for (int m = 0; m < MESSAGES; m++) {
        int b = m % BUFFERS;
        inputs[m] = (uint64_t)m * 100;
        if (all->variant != NO_REUSE_WAIT)
            OK(cuStreamWaitEvent(receives, computed[b], 0)); /* its buffer was read */
        if (first)
            OK(cuMemcpyHtoDAsync_v2(in + (CUdeviceptr)b * 8, &inputs[m], 8, receives));
        else
            CHECK(settled(ncclRecv(words[b][0], 1, ncclInt64, 0, before, receives), before));
        OK(cuEventRecord(received[b], receives));
        OK(cuStreamWaitEvent(computes, received[b], 0));
        OK(cuStreamWaitEvent(computes, sent[b], 0));
        result_words[m][0] = words[b][0];
        result_words[m][1] = &results_of[m];
        OK(cuLaunchHostFunc(computes, add_one, last ? result_words[m] : words[b]));
        OK(cuEventRecord(computed[b], computes));
        if (!last) {
            OK(cuStreamWaitEvent(sends, computed[b], 0));
            CHECK(settled(ncclSend(words[b][1], 1, ncclInt64, 1, after, sends), after));
            OK(cuEventRecord(sent[b], sends));
        }
    }
    CHECK(stand_in_deadlock() == NULL);
    OK(cuCtxSynchronize());
    for (int m = 0; last && m < MESSAGES; m++)
        all->failed += results_of[m] != (uint64_t)(m * 100 + all->num_ranks);
    if (!first)
        results[0] = ncclCommFinalize(before);
    if (!last)
        results[1] = ncclCommFinalize(after);
    CHECK((first || settled(results[0], before)) && (last || settled(results[1], after)));
    OK(ncclCommDestroy(before));
    OK(ncclCommDestroy(after));
    OK(cuMemFree_v2(in));
    OK(cuMemFree_v2(out));
}

static void test_chain(void)
{
    int wrong_without_wait = 0;
    for (int variant = 0; variant <= NO_REUSE_WAIT; variant++)
        for (uint64_t seed = 0; seed < (slow ? 4 : 40); seed++) {
            static const int64_t queues[] = {8, 1, 2, 32};
            begin(seed, queues[seed % 4]);
            ranks all = {.num_ranks = 2 + (int)(seed % 3), .body = chain, .variant = variant};
            run_ranks(&all);
            CHECK(variant == NO_REUSE_WAIT || all.failed == 0);
            wrong_without_wait += variant == NO_REUSE_WAIT && all.failed > 0;
            CHECK(stand_in_count("synchronisations") == all.num_ranks && stand_in_count("live_allocations") == 0);
            CHECK(stand_in_count("receive") == MESSAGES * (all.num_ranks - 1));
        }
    CHECK(slow || wrong_without_wait > 0); /* the timings differ enough to find a missing wait */
}

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "sanitize") != 0;
    stand_in_name_thread("main");
    test_message();
    test_messages_keep_their_order();
    test_abort_before_it_begins();
    test_configuration();
    test_traps();
    test_groups();
    test_injected_synchronisation_of_nccl();
    test_connection();
    test_failing_calls();
    test_unequal_sizes();
    test_faults();
    test_rendezvous();
    test_chain();
    expect_no_misuse();
    return check_failures();
}
