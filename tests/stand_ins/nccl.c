/* nccl.c - NCCL's functions over the machine, for communicators of two ranks, which are threads of one process.
 *
 * The first rank of a communicator sends, the other one receives: nothing else is modelled. A group is one operation of
 * its stream. It passes once it and the other rank's are both at the heads of their queues; nothing is buffered.
 *
 * A nonblocking communicator is in progress after its creation, or a group, until what that needs has come about and
 * ncclCommGetAsyncError has been asked, some more times by chance; only then does the group's operation reach its
 * stream. */
#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MAX_POLLS = 3 };

struct nccl_message {
    nccl_message *next; /* of its group */
    span memory;
};

typedef enum { IDLE, CREATION, GROUP } activity;

typedef struct clique {
    struct clique *next;
    ncclUniqueId id;
    ncclComm_t ranks[2]; /* that have arrived */
} clique;

struct ncclComm {
    int32_t alive, aborted;
    int32_t number, rank, device;
    pthread_t owner;
    clique *of;
    ncclResult_t result;  /* asynchronous error */
    activity in_progress; /* what ncclCommGetAsyncError must still be asked about */
    int32_t polls;        /* times that it says ncclInProgress although it need not */
    CUstream stream;      /* of its last group */
    operation *pending;   /* the group in progress, still to reach its stream */
    operation *waiting;   /* the group that waits for the other rank's, at the head of its queue */
    int64_t idle_until;   /* issue number that the device must reach first: an injected synchronisation; 0: none */
    int32_t connects;     /* its host has come to an ncclGroupEnd */
};

static clique *cliques;
static struct { /* of a message, see stand_in_fault() */
    int32_t is_wanted, rank, devices[2];
    int64_t index; /* counts down */
    ncclResult_t result;
} fault;
static int32_t num_ids, num_comms;

/* The group that a thread has open. */
static _Thread_local struct {
    int32_t is_open;
    ncclResult_t error;
    ncclComm_t comm; /* of all its messages */
    CUstream stream;
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

/* The first transfer connects: the other host has to come to its own. */
static int may_go_on(const struct ncclComm *comm)
{
    if (comm->in_progress == CREATION)
        return peer_of(comm) != NULL;
    return comm->in_progress == IDLE ||
           (peer_of(comm)->connects && (comm->idle_until == 0 || device_reached(comm->device, comm->idle_until)));
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

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    ENTER(ncclCommInitRankConfig);
    if (num_ranks != 2 || config->blocking != 0)
        REFUSE(ncclInvalidArgument, "%d ranks, blocking %d: not modelled", num_ranks, config->blocking);
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

/* Any thread may call this, in any state. What waits in a stream ends; what it was to receive is undefined: NaN. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    ENTER(ncclCommAbort);
    NEEDS_LIVE(comm);
    comm->alive = 0;
    comm->aborted = 1;
    comm->in_progress = IDLE;
    if (comm->pending != NULL)
        comm->stream->groups_in_progress--;
    comm->pending = NULL;
    machine.counters.live_communicators--;
    look_again();
    return ncclSuccess;
}

/* -- groups ------------------------------------------------------------------------------------------------------ */

static ncclResult_t add_message(api_call this_call, const void *buffer, size_t bytes, ncclDataType_t type, int peer,
                                ncclComm_t comm, CUstream stream)
{
    ncclResult_t result = check(this_call, comm);
    if (result != ncclSuccess)
        return result;
    if (peer != 1 - comm->rank || type != ncclUint8 || !group.is_open)
        REFUSE(ncclInvalidArgument, "peer %d, type %d, or no group: not modelled", peer, (int)type);
    CUresult stream_error;
    stream = find_stream(this_call, stream, &stream_error);
    if (current_device() != comm->device || stream == NULL || stream->device != comm->device)
        REFUSE(ncclInvalidUsage, "communicator %d is of another device than stream or thread", comm->number);
    nccl_message *added = keep(sizeof *added);
    if (!find_span(this_call, buffer, bytes, 0, &added->memory))
        return refuse(this_call, ncclInvalidArgument, "%zu bytes at %p", bytes, buffer);
    group.comm = comm;
    group.stream = stream;
    *(group.last != NULL ? &group.last->next : &group.first) = added;
    group.last = added;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
    ENTER(ncclSend);
    return add_message(this_call, buffer, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream)
{
    ENTER(ncclRecv);
    return add_message(this_call, buffer, count, type, peer, comm, stream);
}

ncclResult_t ncclGroupStart(void)
{
    ENTER(ncclGroupStart);
    memset(&group, 0, sizeof group);
    group.is_open = 1;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ENTER(ncclGroupEnd);
    group.is_open = 0;
    if (group.error != ncclSuccess || group.first == NULL)
        return group.error;
    ncclComm_t comm = group.comm;
    check_no_group_in_progress(this_call, group.stream);
    comm->stream = group.stream;
    comm->pending = new_operation(NCCL, this_call);
    comm->pending->comm = comm;
    comm->pending->messages = group.first;
    comm->connects = 1;
    comm->in_progress = GROUP;
    comm->stream->groups_in_progress++;
    if (injection_drawn())
        comm->idle_until = machine.issued; /* NCCL's own thread waits for it */
    return settle(this_call, comm);
}

/* The group's operation reaches its stream. */
static void launch(ncclComm_t comm)
{
    operation *op = comm->pending;
    comm->pending = NULL;
    comm->idle_until = 0;
    op->is_lost = fault.is_wanted && comm->rank == fault.rank && comm->device == fault.devices[comm->rank] &&
                  peer_of(comm)->device == fault.devices[1 - comm->rank] && fault.index-- == 0;
    comm->stream->groups_in_progress--;
    if (machine.devices[comm->device].asserts_in < 0)
        comm->result = ncclUnhandledCudaError;
    else
        enqueue(op, comm->stream);
}

/* -- execution --------------------------------------------------------------------------------------------------- */

static int can_pass(const operation *op)
{
    const operation *other = peer_of(op->comm)->waiting;
    return op->comm->waiting == op && other != NULL && !op->is_lost && !other->is_lost;
}

int nccl_can_run(operation *op)
{
    return !op->started || op->comm->aborted || op->comm->waiting != op || can_pass(op);
}

/* Whatever was received is undefined until the operation has ended, and for good if that was by an abort. */
static void spoil(operation *op)
{
    for (nccl_message *m = op->messages; m != NULL && op->comm->rank == 1; m = m->next)
        if (m->memory.bytes > 0 && span_lives(op, &m->memory))
            memset(m->memory.address, 0xFF, m->memory.bytes);
}

static void pass(operation *op)
{
    operation *other = peer_of(op->comm)->waiting;
    const nccl_message *send = (op->comm->rank == 0 ? op : other)->messages;
    const nccl_message *receive = (op->comm->rank == 0 ? other : op)->messages;
    for (; send != NULL && receive != NULL; send = send->next, receive = receive->next) {
        if (send->memory.bytes != receive->memory.bytes) {
            misuse(op->call, "%zu bytes are sent, %zu received", send->memory.bytes, receive->memory.bytes);
        } else if (send->memory.bytes > 0 && span_lives(op, &receive->memory) && span_lives(op, &send->memory)) {
            memmove(receive->memory.address, send->memory.address, send->memory.bytes);
            damage(op->call, receive->memory.address, receive->memory.bytes);
        }
    }
    if (send != receive)
        misuse(op->call, "a group has more messages than the other rank's");
    op->comm->waiting = other->comm->waiting = NULL;
}

int nccl_run(operation *op)
{
    ncclComm_t comm = op->comm;
    if (!op->started && !comm->aborted) {
        op->started = 1;
        comm->waiting = op;
        spoil(op);
        if (op->is_lost && comm->result == ncclSuccess)
            comm->result = fault.result;
        return 0;
    }
    if (comm->aborted && (!op->started || comm->waiting == op))
        spoil(op);
    else if (can_pass(op))
        pass(op);
    if (comm->waiting == op)
        comm->waiting = NULL;
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
    fault.rank = sends ? 0 : 1;
    fault.devices[0] = source;
    fault.devices[1] = destination;
    fault.index = index;
    fault.result = (ncclResult_t)result;
}
