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
    ncclComm_t next; /* all since reset: handles stay readable after they are destroyed */
    int32_t alive, aborted, finalized;
    int32_t number, rank, device;
    int64_t owner; /* thread */
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

typedef struct fault {
    struct fault *next;
    stand_in_fault_kind kind;
    int32_t source, destination;
    int64_t index;
    ncclResult_t result;
} fault;

static clique *cliques;
static ncclComm_t comms;
static fault *faults;
static int64_t device_messages[2][MAX_DEVICES][MAX_DEVICES]; /* [sends][source][destination] */
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
    int used = snprintf(last_error, sizeof last_error, "%s: ", call_name(call));
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

ncclResult_t ncclGetVersion(int *version)
{
    ENTER(ncclGetVersion, ncclInvalidUsage);
    if (version == NULL)
        return refuse(this_call, ncclInvalidArgument, "version is NULL");
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
    ENTER(ncclGetUniqueId, ncclInvalidUsage);
    if (id == NULL)
        return refuse(this_call, ncclInvalidArgument, "id is NULL");
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
    ENTER(ncclCommInitRankConfig, ncclInvalidUsage);
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
    *comm = (struct ncclComm){.next = comms,
                              .alive = 1,
                              .number = ++num_comms,
                              .rank = rank,
                              .device = index,
                              .owner = thread_id(),
                              .of = of,
                              .in_progress = CREATION};
    comms = comm;
    of->ranks[rank] = comm;
    machine.counters.live_communicators++;
    *out = comm;
    return settle(this_call, comm);
}

/* What every call but abort and the asking for errors demands of a communicator. */
static ncclResult_t check(api_call this_call, const struct ncclComm *comm)
{
    if (comm == NULL)
        return refuse(this_call, ncclInvalidArgument, "the communicator is NULL");
    if (!comm->alive)
        REFUSE(ncclInvalidArgument, "communicator %d is destroyed or aborted", comm->number);
    if (comm->owner != thread_id())
        misuse(this_call, "communicator %d belongs to thread %lld", comm->number, (long long)comm->owner);
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
    ENTER(ncclCommGetAsyncError, ncclInvalidUsage);
    if (comm == NULL || result == NULL)
        return refuse(this_call, ncclInvalidArgument, "an argument is NULL");
    if (!comm->alive)
        REFUSE(ncclInvalidArgument, "communicator %d is destroyed or aborted", comm->number);
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
    ENTER(ncclCommFinalize, ncclInvalidUsage);
    if (comm == NULL) /* as the real one, here and in destroy and abort */
        return ncclSuccess;
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
    ENTER(ncclCommDestroy, ncclInvalidUsage);
    if (comm == NULL)
        return ncclSuccess;
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
    ENTER(ncclCommAbort, ncclInvalidUsage);
    if (comm == NULL)
        return ncclSuccess;
    if (!comm->alive)
        REFUSE(ncclInvalidArgument, "communicator %d is destroyed or aborted", comm->number);
    comm->alive = 0;
    comm->aborted = 1;
    comm->in_progress = IDLE;
    if (comm->pending != NULL)
        comm->pending->messages->stream->groups_in_progress--;
    comm->pending = NULL;
    machine.counters.live_communicators--;
    machine.runnable_changed = 1;
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
    ENTER(ncclSend, ncclInvalidUsage);
    return add_message(this_call, buffer, count, type, peer, comm, stream, 1);
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
    ENTER(ncclRecv, ncclInvalidUsage);
    return add_message(this_call, buffer, count, type, peer, comm, stream, 0);
}

ncclResult_t ncclGroupStart(void)
{
    ENTER(ncclGroupStart, ncclInvalidUsage);
    memset(&group, 0, sizeof group);
    group.generation = machine.generation;
    group.is_open = 1;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ENTER(ncclGroupEnd, ncclInvalidUsage);
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

static const fault *find_fault(int sends, int32_t source, int32_t destination, int64_t index)
{
    for (fault *f = faults; f != NULL; f = f->next)
        if ((f->kind == STAND_IN_SENDER_LOST || f->kind == STAND_IN_SENDER_FAILS) == (sends != 0) &&
            f->source == source && f->destination == destination && f->index == index)
            return f;
    return NULL;
}

/* The group's operation reaches its stream. */
static void launch(ncclComm_t comm)
{
    operation *op = comm->pending;
    comm->pending = NULL;
    comm->idle_until = 0;
    for (nccl_message *m = op->messages; m != NULL; m = m->next) {
        int32_t peer_device = peer_of(comm)->device;
        int32_t source = m->sends ? comm->device : peer_device, destination = m->sends ? peer_device : comm->device;
        m->number = comm->numbers[m->sends]++;
        const fault *f = find_fault(m->sends, source, destination, device_messages[m->sends][source][destination]++);
        m->lost = f != NULL;
        if (f != NULL && (f->kind == STAND_IN_SENDER_FAILS || f->kind == STAND_IN_RECEIVER_FAILS))
            m->fails = f->result;
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
    comms = NULL;
    faults = NULL;
    num_ids = num_comms = 0;
    memset(device_messages, 0, sizeof device_messages);
}

void stand_in_fault(stand_in_fault_kind kind, int32_t source, int32_t destination, int64_t index, int32_t result)
{
    LOCKED;
    fault *added = keep(sizeof *added);
    *added = (fault){faults, kind, source, destination, index, (ncclResult_t)result};
    faults = added;
}

void stand_in_break_communicators(int32_t device_index, int32_t peer, int32_t result)
{
    LOCKED;
    for (ncclComm_t comm = comms; comm != NULL; comm = comm->next)
        if (comm->alive && comm->device == device_index && peer_of(comm) != NULL && peer_of(comm)->device == peer)
            comm->result = (ncclResult_t)result;
}
