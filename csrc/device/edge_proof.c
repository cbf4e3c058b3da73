/* edge_proof.c - one message over an edge between GPUs that nobody depends on. */
#include "device_end.h"

static int header_has_come(void *end)
{
    return s1f_p2p_has_come(((s1f_device_end *)end)->control, 0);
}

static int is_over(void *end)
{
    const s1f_device_end *of = end;
    return s1f_device_is_idle_by(of->device, of->stream, 0);
}

static s1f_status wait_until(s1f_device_end *end, int (*is_done)(void *end), const char *what)
{
    s1f_wait_reason reason = s1f_edge_reason(&end->head, what, 0);
    S1F_TRY(s1f_device_enter(end->device));
    return s1f_device_leave(end->device, s1f_device_end_wait(end, is_done, &reason));
}

s1f_status s1f_edge_proof_post(s1f_edge_end *head, int64_t bytes)
{
    s1f_device_end *end = (s1f_device_end *)head;
    S1F_TRY(s1f_p2p_begin_step(head, 1));
    end->largest = bytes;
    return s1f_p2p_post(head, 0, 0);
}

s1f_status s1f_edge_proof_send(s1f_edge_end *head, const void *data, int64_t bytes, int64_t *ns)
{
    int64_t began = s1f_now_ns();
    s1f_message message = {.step = s1f_group_step(head->group), .num_tensors = 1};
    message.tensors[0] = (s1f_tensor_header){.dtype = S1F_UINT8, .ndim = 1, .sizes = {bytes}};
    S1F_TRY(s1f_p2p_begin_step(head, 1));
    S1F_TRY(s1f_p2p_send(head, 0, 0, &message, &data));
    S1F_TRY(wait_until((s1f_device_end *)head, is_over, "its transfer has been under way"));
    *ns = s1f_now_ns() - began;
    return S1F_OK;
}

s1f_status s1f_edge_proof_receive(s1f_edge_end *head, const void **data, int64_t *ns)
{
    s1f_device_end *end = (s1f_device_end *)head;
    const s1f_message *message;
    S1F_TRY(wait_until(end, header_has_come, "no header has come"));
    int64_t began = s1f_now_ns();
    S1F_TRY(s1f_p2p_receive(head, 0, 0));
    /* Before the stream that computes waits for it. */
    S1F_TRY(wait_until(end, is_over, "its transfer has been under way"));
    S1F_TRY(s1f_p2p_wait(head, 0, 0, &message, data));
    *ns = s1f_now_ns() - began;
    return S1F_OK;
}

s1f_status s1f_edge_proof_end(s1f_edge_end *head)
{
    s1f_device_end *end = (s1f_device_end *)head;
    pthread_mutex_lock(&end->watchdog->lock);
    end->proof_ns = 0;
    pthread_mutex_unlock(&end->watchdog->lock);
    S1F_TRY(s1f_device_enter(end->device));
    if (end->mover->forget != NULL)
        end->mover->forget(end);
    s1f_status status = S1F_CU(end->device->driver, stream_synchronize, end->device->compute);
    if (status == S1F_OK)
        status = s1f_device_end_free_places(end);
    return s1f_device_leave(end->device, status);
}
