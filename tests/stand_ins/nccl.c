/* nccl.c - NCCL's functions over the machine, for communicators of two ranks, which are threads of one process.
 *
 * A message passes once its send and its receive are both executed, at the heads of their queues; nothing is buffered.
 * The n-th send of one rank belongs to the n-th receive of the other. A group holds messages of one communicator: they
 * are one operation of its stream, in which they progress independently.
 *
 * A nonblocking communicator is in progress after its creation, a group or ncclCommFinalize until what that needs has
 * come about and ncclCommGetAsyncError has been asked, some more times by chance; only then do the group's operations
 * reach their stream. */
#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MAX_POLLS = 3 };
static const unsigned int CONFIG_MAGIC = 0xcafebeef;

typedef struct clique clique;

struct nccl_message {
    nccl_message *next;           /* of its operation */
    nccl_message *next_in_clique; /* among those that wait for their match */
    ncclComm_t comm;
    CUstream stream;
    span memory;
    int32_t sends;
    int64_t number; /* among the messages from sender to receiver */
    int32_t executed, done, lost;
    ncclResult_t fails; /* what its communicator reports when it is executed */
};

typedef enum { IDLE, CREATION, GROUP, FINALIZE } activity;

struct ncclComm {
    int32_t alive, aborted, finalized;
    int32_t number, rank, device;
    pthread_t owner;
    clique *of;
    ncclResult_t result;  /* asynchronous error */
    activity in_progress; /* what ncclCommGetAsyncError must still be asked about */
    int32_t polls;        /* times that it says ncclInProgress although it need not */
    operation *pending;   /* of the group in progress, still to reach its stream */
    int64_t idle_until;   /* issue number that the device must reach first: an injected synchronisation; 0: none */
    int64_t outstanding;  /* operations that reached their stream and have not ended */
    int64_t numbers[2];   /* messages so far: receives, sends */
    int32_t connects[2];  /* its host has come to ncclGroupEnd with a receive, with a send */
};

struct clique {
    clique *next;
    ncclUniqueId id;
    ncclComm_t ranks[2]; /* that have arrived */
    nccl_message *messages;
};

static clique *cliques;
static struct { /* of a message, see stand_in_fault() */
    int32_t is_wanted, sends, source, destination;
    int64_t index; /* counts down */
    ncclResult_t result;
} fault;
static int32_t num_ids, num_comms;

/* The group that a thread has open. */
static _Thread_local struct {
    int64_t generation;
    int32_t is_open;
    ncclResult_t error;
    nccl_message *first, *last;
} group;
static _Thread_local char last_error[512];

/* -- errors ------------------------------------------------------------------------------------------------------ */

__attribute__((format(printf, 3, 4))) static ncclResult_t refuse(api_call call, ncclResult_t result, const char *format,
                                                                 ...)
{
    int used = snprintf(last_error, sizeof last_error, "%s: ", call);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error + used, sizeof last_error - (size_t)used, format, arguments);
    va_end(arguments);
    group.error = group.is_open && group.error == ncclSuccess ? result : group.error;
    return result;
}

/* Refuses and notes a misuse: what the caller is to be told of whatever it makes of the error. */
#define REFUSE(result, ...)                                                                                            \
    do {                                                                                                               \
        misuse(this_call, __VA_ARGS__);                                                                                \
        return refuse(this_call, result, __VA_ARGS__);                                                                 \
    } while (0)
#define NEEDS_LIVE(comm)                                                                                               \
    if (!comm->alive)                                                                                                  \
    REFUSE(ncclInvalidArgument, "communicator %d is destroyed or aborted", comm->number)

ncclResult_t ncclGetVersion(int *version)
{
    ENTER(ncclGetVersion);
    *version = (int)machine.options.nccl_version;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    ENTER_TEXT(ncclGetErrorString);
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote process exited",  "NCCL operation in progress"};
    return (unsigned int)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    ENTER_TEXT(ncclGetLastError);
    (void)comm;
    return last_error;
}

/* -- communicators ----------------------------------------------------------------------------------------------- */

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    ENTER(ncclGetUniqueId);
    clique *made = keep(sizeof *made);
    for (size_t i = 0; i < sizeof made->id.internal; i++)
        made->id.internal[i] = (char)draw(256);
    memcpy(made->id.internal, &(int32_t){++num_ids}, sizeof num_ids); /* distinct for sure */
    made->next = cliques;
    cliques = made;
    *id = made->id;
    return ncclSuccess;
}

static const struct ncclComm *peer_of(const struct ncclComm *comm)
{
    return comm->of->ranks[1 - comm->rank];
}

/* Both ends of every message of the group have come to their ncclGroupEnd, unless an earlier one connected them. */
static int connected(const struct ncclComm *comm)
{
    for (nccl_message *m = comm->pending != NULL ? comm->pending->messages : NULL; m != NULL; m = m->next)
        if (!peer_of(comm)->connects[!m->sends])
            return 0;
    return 1;
}

static int group_can_launch(const struct ncclComm *comm)
{
    return connected(comm) && (comm->idle_until == 0 || device_reached(comm->device, comm->idle_until));
}

/* Its operations have ended and its peer has come as far: finalization is collective. */
static int can_finalize(const struct ncclComm *comm)
{
    const struct ncclComm *peer = peer_of(comm);
    return comm->outstanding == 0 && (peer == NULL || peer->finalized || peer->aborted || !peer->alive);
}

static int may_go_on(const struct ncclComm *comm)
{
    switch (comm->in_progress) {
    case CREATION: return peer_of(comm) != NULL;
    case GROUP: return group_can_launch(comm);
    case FINALIZE: return can_finalize(comm);
    default: return 1;
    }
}

static void launch(ncclComm_t comm);

static void go_on(ncclComm_t comm)
{
    activity was = comm->in_progress;
    comm->in_progress = IDLE;
    if (was == GROUP)
        launch(comm);
}

/* Ends the call that left `comm` in progress, later or by chance now. */
static ncclResult_t settle(api_call call, ncclComm_t comm)
{
    comm->polls = chance(50) ? (int32_t)(1 + draw(MAX_POLLS)) : 0;
    if (comm->aborted)
        return refuse(call, ncclInternalError, "communicator %d was aborted", comm->number);
    if (comm->polls > 0 || !may_go_on(comm))
        return ncclInProgress;
    go_on(comm);
    return ncclSuccess;
}

/* As NCCL 2.18 lays it out, and nonblocking: nothing else is modelled. */
static ncclResult_t check_configuration(api_call this_call, const ncclConfig_t *config)
{
    size_t wanted = offsetof(ncclConfig_t, splitShare) + sizeof config->splitShare;
    if (config->magic != CONFIG_MAGIC || (int)config->version < NCCL_VERSION(2, 18, 0) || config->size < wanted)
        REFUSE(ncclInvalidArgument, "ncclConfig_t (size %zu, magic %x, version %d) is not one of NCCL 2.18",
               config->size, config->magic, (int)config->version);
    if (config->blocking != 0 || config->minCTAs <= 0 || config->minCTAs > config->maxCTAs)
        REFUSE(ncclInvalidArgument, "blocking %d, minCTAs %d, maxCTAs %d", config->blocking, config->minCTAs,
               config->maxCTAs);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    ENTER(ncclCommInitRankConfig);
    if (out == NULL || num_ranks != 2 || rank < 0 || rank > 1)
        REFUSE(ncclInvalidArgument, "rank %d of %d", rank, num_ranks);
    ncclResult_t result = check_configuration(this_call, config);
    if (result != ncclSuccess)
        return result;
    clique *of = cliques;
    while (of != NULL && memcmp(&of->id, &id, sizeof id) != 0)
        of = of->next;
    if (of == NULL)
        REFUSE(ncclInvalidArgument, "the id is not one of ncclGetUniqueId of this process");
    int32_t index = current_device();
    if (index < 0 || of->ranks[rank] != NULL)
        REFUSE(ncclInvalidUsage, "rank %d came before, or its thread has no context", rank);
    if (of->ranks[1 - rank] != NULL && of->ranks[1 - rank]->device == index)
        REFUSE(ncclInvalidUsage, "both ranks are on device %d", index);
    ncclComm_t comm = keep(sizeof *comm);
    *comm = (struct ncclComm){.alive = 1,
                              .number = ++num_comms,
                              .rank = rank,
                              .device = index,
                              .owner = pthread_self(),
                              .of = of,
                              .in_progress = CREATION};
    of->ranks[rank] = comm;
    machine.counters.live_communicators++;
    *out = comm;
    return settle(this_call, comm);
}

/* What every call but abort and the asking for errors demands of a communicator. */
static ncclResult_t check(api_call this_call, const struct ncclComm *comm)
{
    NEEDS_LIVE(comm);
    if (!pthread_equal(comm->owner, pthread_self()))
        misuse(this_call, "communicator %d belongs to another thread", comm->number);
    if (comm->result != ncclSuccess)
        return refuse(this_call, comm->result, "communicator %d has failed before", comm->number);
    if (comm->in_progress != IDLE)
        REFUSE(ncclInvalidArgument, "communicator %d is still in progress: ask ncclCommGetAsyncError until it is not",
               comm->number);
    return ncclSuccess;
}

/* Any thread may call this. Asking is what lets a nonblocking communicator go on. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result)
{
    ENTER(ncclCommGetAsyncError);
    NEEDS_LIVE(comm);
    *result = comm->result;
    if (comm->result != ncclSuccess || comm->in_progress == IDLE)
        return ncclSuccess;
    *result = ncclInProgress;
    if (!may_go_on(comm) || comm->polls-- > 0)
        return ncclSuccess;
    go_on(comm);
    *result = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    ENTER(ncclCommFinalize);
    ncclResult_t result = check(this_call, comm);
    if (result != ncclSuccess)
        return result;
    if (comm->finalized)
        REFUSE(ncclInvalidUsage, "communicator %d was finalized before", comm->number);
    comm->finalized = 1;
    comm->in_progress = FINALIZE;
    return settle(this_call, comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    ENTER(ncclCommDestroy);
    ncclResult_t result = check(this_call, comm);
    if (result != ncclSuccess)
        return result;
    if (!comm->finalized)
        REFUSE(ncclInvalidUsage, "communicator %d is not finalized: not modelled", comm->number);
    comm->alive = 0;
    machine.counters.live_communicators--;
    return ncclSuccess;
}

/* Any thread may call this, in any state. What waits in a stream ends; what it was to receive is undefined: NaN. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    ENTER(ncclCommAbort);
    NEEDS_LIVE(comm);
    comm->alive = 0;
    comm->aborted = 1;
    comm->in_progress = IDLE;
    if (comm->pending != NULL)
        comm->pending->messages->stream->groups_in_progress--;
    comm->pending = NULL;
    machine.counters.live_communicators--;
    look_again();
    return ncclSuccess;
}

/* -- groups ------------------------------------------------------------------------------------------------------ */

static ncclResult_t add_message(api_call this_call, const void *buffer, size_t bytes, ncclDataType_t type, int peer,
                                ncclComm_t comm, CUstream stream, int sends)
{
    ncclResult_t result = check(this_call, comm);
    if (result != ncclSuccess)
        return result;
    if (comm->finalized)
        REFUSE(ncclInvalidUsage, "communicator %d is finalized", comm->number);
    if (peer != 1 - comm->rank || type != ncclUint8)
        REFUSE(ncclInvalidArgument, "peer %d, type %d", peer, (int)type);
    if (!group.is_open || (group.first != NULL && (group.first->comm != comm || group.first->stream != stream)))
        REFUSE(ncclInvalidUsage, "outside a group, or of two communicators or streams in one: not modelled");
    if (current_device() != comm->device)
        REFUSE(ncclInvalidUsage, "communicator %d is of device %d, the thread's current one is %d", comm->number,
               comm->device, current_device());
    CUresult stream_error;
    stream = find_stream(this_call, stream, &stream_error);
    if (stream == NULL || stream->device != comm->device)
        REFUSE(ncclUnhandledCudaError, "communicator %d is of device %d, the stream is not", comm->number,
               comm->device);
    span memory;
    if (!find_span(this_call, buffer, bytes, 0, &memory))
        return refuse(this_call, ncclInvalidArgument, "%zu bytes at %p", bytes, buffer);
    if (memory.allocation != 0 && memory.device != comm->device)
        REFUSE(ncclInvalidArgument, "communicator %d is of device %d, the memory of device %d", comm->number,
               comm->device, memory.device);
    nccl_message *added = keep(sizeof *added);
    *added = (nccl_message){.comm = comm, .stream = stream, .memory = memory, .sends = sends};
    if (group.last != NULL)
        group.last->next = added;
    else
        group.first = added;
    group.last = added;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
    ENTER(ncclSend);
    return add_message(this_call, buffer, count, type, peer, comm, stream, 1);
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
    ENTER(ncclRecv);
    return add_message(this_call, buffer, count, type, peer, comm, stream, 0);
}

ncclResult_t ncclGroupStart(void)
{
    ENTER(ncclGroupStart);
    memset(&group, 0, sizeof group);
    group.generation = machine.generation;
    group.is_open = 1;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ENTER(ncclGroupEnd);
    if (!group.is_open || group.generation != machine.generation)
        REFUSE(ncclInvalidUsage, "there is no ncclGroupStart to it");
    group.is_open = 0;
    if (group.error != ncclSuccess || group.first == NULL)
        return group.error;
    ncclComm_t comm = group.first->comm;
    check_no_group_in_progress(this_call, group.first->stream);
    comm->pending = new_operation(NCCL, this_call);
    comm->pending->comm = comm;
    comm->pending->messages = group.first;
    for (const nccl_message *m = group.first; m != NULL; m = m->next)
        comm->connects[m->sends] = 1;
    comm->in_progress = GROUP;
    group.first->stream->groups_in_progress++;
    if (injection_drawn())
        comm->idle_until = machine.issued; /* NCCL's own thread waits for it */
    return settle(this_call, comm);
}

/* 1 if the message is the one that a test wants to fail. */
static int is_faulty(const nccl_message *m)
{
    const struct ncclComm *peer = peer_of(m->comm);
    return fault.is_wanted && m->sends == fault.sends &&
           m->comm->device == (m->sends ? fault.source : fault.destination) &&
           peer->device == (m->sends ? fault.destination : fault.source) && fault.index-- == 0;
}

/* The group's operation reaches its stream. */
static void launch(ncclComm_t comm)
{
    operation *op = comm->pending;
    comm->pending = NULL;
    comm->idle_until = 0;
    for (nccl_message *m = op->messages; m != NULL; m = m->next) {
        m->number = comm->numbers[m->sends]++;
        m->lost = is_faulty(m);
        m->fails = m->lost ? fault.result : ncclSuccess;
        m->next_in_clique = comm->of->messages;
        comm->of->messages = m;
    }
    comm->outstanding++;
    CUstream stream = op->messages->stream;
    stream->groups_in_progress--;
    enqueue(op, stream);
}

/* -- execution --------------------------------------------------------------------------------------------------- */

static nccl_message *match(const nccl_message *m)
{
    if (m->done || m->lost || !m->executed)
        return NULL;
    for (nccl_message *other = m->comm->of->messages; other != NULL; other = other->next_in_clique)
        if (other->comm != m->comm && other->sends != m->sends && other->number == m->number && other->executed &&
            !other->lost && !other->done)
            return other;
    return NULL;
}

static int all_done(const operation *op)
{
    for (nccl_message *m = op->messages; m != NULL; m = m->next)
        if (!m->done)
            return 0;
    return 1;
}

int nccl_can_run(operation *op)
{
    if (!op->started || op->comm->aborted || all_done(op))
        return 1;
    for (nccl_message *m = op->messages; m != NULL; m = m->next)
        if (match(m) != NULL)
            return 1;
    return 0;
}

/* Whatever was received is undefined until the operation has ended, and for good if that was by an abort. */
static void spoil(operation *op, nccl_message *m)
{
    if (!m->sends && m->memory.bytes > 0 && span_lives(op, &m->memory))
        memset(m->memory.address, 0xFF, m->memory.bytes);
}

static void start_message(operation *op, nccl_message *m)
{
    m->executed = 1;
    spoil(op, m);
    if (m->fails != ncclSuccess && m->comm->result == ncclSuccess)
        m->comm->result = m->fails;
}

static void remove_message(nccl_message *m)
{
    nccl_message **link = &m->comm->of->messages;
    while (*link != m)
        link = &(*link)->next_in_clique;
    *link = m->next_in_clique;
}

static void pass(operation *op, nccl_message *m, nccl_message *other)
{
    nccl_message *send = m->sends ? m : other, *receive = m->sends ? other : m;
    if (send->memory.bytes != receive->memory.bytes) {
        misuse(op->call, "%zu bytes are sent, %zu received (devices %d to %d, message %lld)", send->memory.bytes,
               receive->memory.bytes, send->comm->device, receive->comm->device, (long long)send->number);
        send->comm->result = receive->comm->result = ncclInvalidUsage;
    } else if (send->memory.bytes > 0 && span_lives(op, &receive->memory) && span_lives(op, &send->memory)) {
        memmove(receive->memory.address, send->memory.address, send->memory.bytes);
        damage(op->call, receive->memory.address, receive->memory.bytes);
    }
    send->done = receive->done = 1;
}

int nccl_run(operation *op)
{
    if (op->comm->aborted) {
        for (nccl_message *m = op->messages; m != NULL; m = m->next) {
            if (!m->done)
                spoil(op, m);
            m->lost |= !m->done;
            m->done = 1;
        }
    } else if (!op->started) {
        op->started = 1;
        for (nccl_message *m = op->messages; m != NULL; m = m->next)
            start_message(op, m);
    } else {
        int64_t passable = 0;
        for (nccl_message *m = op->messages; m != NULL; m = m->next)
            passable += match(m) != NULL;
        int64_t chosen = passable > 0 ? draw(passable) : -1;
        for (nccl_message *m = op->messages; m != NULL; m = m->next) {
            nccl_message *other = match(m);
            if (other != NULL && chosen-- == 0) {
                pass(op, m, other);
                break;
            }
        }
    }
    if (!all_done(op))
        return 0;
    for (nccl_message *m = op->messages; m != NULL; m = m->next)
        remove_message(m);
    op->comm->outstanding--;
    return 1;
}

/* -- control ----------------------------------------------------------------------------------------------------- */

void nccl_reset(void)
{
    cliques = NULL;
    fault.is_wanted = 0;
    num_ids = num_comms = 0;
}

void stand_in_fault(int32_t sends, int32_t source, int32_t destination, int64_t index, int32_t result)
{
    LOCKED;
    fault.is_wanted = 1;
    fault.sends = sends;
    fault.source = source;
    fault.destination = destination;
    fault.index = index;
    fault.result = (ncclResult_t)result;
}
