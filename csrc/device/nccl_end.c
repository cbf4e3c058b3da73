/* nccl_end.c - moving payloads by ncclSend and ncclRecv over nonblocking communicators. */
#include "nccl_end.h"

#include <stdlib.h>
#include <time.h>

static const int64_t FAREWELL_POLLS = 2000; /* of a millisecond: a peer that is gone does not answer */
enum { SENDER = 0, RECEIVER = 1 };          /* ranks in an edge's communicator */

typedef struct {
    s1f_device_end base;
    const s1f_nccl *nccl;
    s1f_nccl_comm comm; /* NULL once it is aborted */
    int32_t is_leaving;
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
        return -1;
    return state != S1F_NCCL_IN_PROGRESS;
}

/* The tensors of a message as one group. sent: those of the sender; NULL: they come to `place`. */
static s1f_status move(const nccl_end *end, const s1f_message *message, const void *const *sent, char *place)
{
    s1f_cu_stream stream = end->base.stream;
    s1f_status status = checked(end, end->nccl->group_start(), "ncclGroupStart");
    for (int32_t i = 0; status == S1F_OK && i < message->num_tensors; i++) {
        size_t bytes = (size_t)message->tensors[i].bytes;
        if (bytes > 0 && sent != NULL)
            status =
                checked(end, end->nccl->send(sent[i], bytes, S1F_NCCL_UINT8, RECEIVER, end->comm, stream), "ncclSend");
        else if (bytes > 0)
            status = checked(end,
                             end->nccl->receive(place + message->tensors[i].offset, bytes, S1F_NCCL_UINT8, SENDER,
                                                end->comm, stream),
                             "ncclRecv");
    }
    s1f_status ended = checked(end, end->nccl->group_end(), "ncclGroupEnd");
    return status == S1F_OK ? ended : status;
}

static s1f_status nccl_receive(s1f_device_end *base, int32_t number, const s1f_message *message)
{
    return move((nccl_end *)base, message, NULL, (char *)(uintptr_t)base->places[number].address);
}

static s1f_status nccl_send(s1f_device_end *base, int32_t number, const s1f_message *message,
                            const void *const *tensors)
{
    (void)number;
    return move((nccl_end *)base, message, tensors, NULL);
}

static void nccl_abort(s1f_device_end *base)
{
    nccl_end *end = (nccl_end *)base;
    if (end->comm != NULL)
        end->nccl->comm_abort(end->comm);
    end->comm = NULL;
}

static void nccl_leave(s1f_device_end *base)
{
    nccl_end *end = (nccl_end *)base;
    if (end->comm == NULL || end->is_leaving)
        return;
    end->is_leaving = 1;
    int32_t result = end->nccl->comm_finalize(end->comm);
    if (result != S1F_NCCL_SUCCESS && result != S1F_NCCL_IN_PROGRESS)
        nccl_abort(base);
}

/* A communicator ends as it began, with its peer; without one it is aborted. */
static void nccl_close(s1f_device_end *base)
{
    nccl_end *end = (nccl_end *)base;
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    int settled = 0;
    s1f_device_end_leave(&base->head);
    if (end->comm == NULL)
        return;
    for (int64_t i = 0; i < FAREWELL_POLLS && (settled = nccl_settled(base)) == 0; i++)
        nanosleep(&pause, NULL);
    if (settled == 1)
        end->nccl->comm_destroy(end->comm);
    else
        end->nccl->comm_abort(end->comm);
    end->comm = NULL;
}

static const s1f_mover nccl_mover = {
    .receive = nccl_receive,
    .send = nccl_send,
    .settled = nccl_settled,
    .abort = nccl_abort,
    .leave = nccl_leave,
    .close = nccl_close,
};

s1f_status s1f_nccl_end_create(const s1f_nccl *nccl, const s1f_nccl_id *id, s1f_edge_end *control,
                               s1f_watchdog *watchdog, s1f_edge_end **out)
{
    s1f_device_end *base = NULL;
    s1f_status status = s1f_device_end_create(sizeof(nccl_end), &nccl_mover, control, watchdog, &base);
    if (status == S1F_OK && (status = s1f_device_enter(base->device)) == S1F_OK) {
        nccl_end *end = (nccl_end *)base;
        end->nccl = nccl;
        s1f_nccl_config config = S1F_NCCL_CONFIG;
        config.blocking = 0; /* a first transfer connects to a peer that may be gone: abortable only so */
        config.min_ctas = 1;
        config.max_ctas = 2; /* a receive that waits for its sender holds these */
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
