/* nccl_end.c - moving payloads by ncclSend and ncclRecv over nonblocking communicators. */
#include "device_end.h"

#include <limits.h>

enum { SENDER = 0, RECEIVER = 1 }; /* ranks in an edge's communicator */

typedef struct {
    s1f_device_end base;
    const s1f_nccl *nccl;
    s1f_nccl_comm comm; /* NULL once it is aborted */
} nccl_end;

static s1f_status checked(const nccl_end *end, int32_t result, const char *what)
{
    return s1f_nccl_status(end->nccl, result, end->comm, what);
}

static int nccl_settled(s1f_device_end *base)
{
    nccl_end *end = (nccl_end *)base;
    int32_t state = S1F_NCCL_SUCCESS;
    if (end->comm == NULL)
        return 1;
    int32_t result = end->nccl->async_error(end->comm, &state);
    if (checked(end, result, "ncclCommGetAsyncError") != S1F_OK || checked(end, state, "NCCL") != S1F_OK)
        return state == S1F_NCCL_REMOTE_ERROR ? -2 : -1;
    return state != S1F_NCCL_IN_PROGRESS;
}

/* The tensors of a message as one group. */
static s1f_status nccl_move(s1f_device_end *base, int32_t number, const s1f_message *message,
                            const void *const *tensors)
{
    const nccl_end *end = (nccl_end *)base;
    s1f_cu_stream stream = base->stream;
    char *place = (char *)(uintptr_t)base->places[number].address;
    s1f_status status = checked(end, end->nccl->group_start(), "ncclGroupStart");
    for (int32_t i = 0; status == S1F_OK && i < message->num_tensors; i++) {
        size_t bytes = (size_t)message->tensors[i].bytes;
        if (bytes > 0 && tensors != NULL)
            status = checked(end, end->nccl->send(tensors[i], bytes, S1F_NCCL_UINT8, RECEIVER, end->comm, stream),
                             "ncclSend");
        else if (bytes > 0)
            status = checked(end,
                             end->nccl->receive(place + message->tensors[i].offset, bytes, S1F_NCCL_UINT8, SENDER,
                                                end->comm, stream),
                             "ncclRecv");
    }
    s1f_status ended = checked(end, end->nccl->group_end(), "ncclGroupEnd");
    return status == S1F_OK ? ended : status;
}

/* It ends so in a step that has failed, and when its end is closed: nothing is under way then, and finalizing would
 * wait for a peer, which may be gone. */
static void nccl_abort(s1f_device_end *base)
{
    nccl_end *end = (nccl_end *)base;
    if (end->comm != NULL)
        end->nccl->comm_abort(end->comm);
    end->comm = NULL;
}

static const s1f_mover nccl_mover = {
    .move = nccl_move,
    .settled = nccl_settled,
    .abort = nccl_abort,
};

s1f_status s1f_nccl_end_create(const s1f_nccl *nccl, const s1f_nccl_id *id, s1f_edge_end *control,
                               s1f_watchdog *watchdog, s1f_edge_end **out)
{
    s1f_device_end *base = NULL;
    s1f_status status = s1f_device_end_create(sizeof(nccl_end), &nccl_mover, control, watchdog, &base);
    if (status == S1F_OK && (status = s1f_device_enter(base->device)) == S1F_OK) {
        nccl_end *end = (nccl_end *)base;
        end->nccl = nccl;
        s1f_nccl_config config = {
            .size = sizeof config,
            .magic = 0xcafebeef,
            .version = 21800,
            .blocking = 0, /* a first transfer connects to a peer that may be gone: abortable only so */
            .cga_cluster_size = INT_MIN,
            .min_ctas = 1,
            .max_ctas = 2, /* a receive that waits for its sender holds these */
            .split_share = INT_MIN,
        };
        status = checked(end, nccl->comm_init(&end->comm, 2, *id, base->head.is_receiver ? RECEIVER : SENDER, &config),
                         "ncclCommInitRankConfig");
        s1f_device_leave(base->device, status);
    }
    if (status != S1F_OK) {
        s1f_edge_end_free(base == NULL ? NULL : &base->head);
        return s1f_fail_prefixed(status, "%s: ", control->text);
    }
    *out = &base->head;
    return S1F_OK;
}
