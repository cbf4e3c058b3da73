/* edge_proof.c - messages with known bytes over an edge between GPUs. */
#include "edge_proof.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t GIVE_UP_NS = INT64_C(1000) * 1000 * 1000;

/* splitmix64, from a seed that each edge, attempt and message has alone: what another one left is not taken for it. */
static void fill(const s1f_device_end *end, int64_t sequence, char *out, int64_t bytes)
{
    uint64_t state = (uint64_t)s1f_group_step(end->head.group) << 32 | (uint64_t)sequence;
    for (const char *at = end->head.text; *at != '\0'; at++)
        state = (state ^ (unsigned char)*at) * UINT64_C(0x100000001b3);
    for (int64_t i = 0; i < bytes; i += 8) {
        uint64_t z = state += UINT64_C(0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        memcpy(out + i, &z, (size_t)(bytes - i < 8 ? bytes - i : 8));
    }
}

static s1f_status make_bytes(const s1f_device_end *end, int64_t sequence, int64_t bytes, char **out)
{
    *out = malloc((size_t)bytes);
    if (*out == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no host memory for %lld bytes", (long long)bytes);
    fill(end, sequence, *out, bytes);
    return S1F_OK;
}

/* Waits for the GPU, or for the host of the peer. */
static s1f_status wait_for(s1f_device_end *end, int (*is_done)(s1f_device_end *end, int64_t sequence), int64_t sequence,
                           const char *what)
{
    struct timespec pause = {.tv_nsec = 20 * 1000};
    s1f_wait_reason reason = s1f_device_end_reason(end, "proving", sequence);
    int64_t began = s1f_now_ns();
    for (int64_t i = 0; !is_done(end, sequence); i++) {
        s1f_status status = s1f_group_check_peer(end->head.group, &reason);
        if (status == S1F_OK)
            status = s1f_group_check(end->head.group);
        if (status == S1F_OK && end->mover->settled != NULL) { /* it says here that a transfer has failed */
            s1f_device_end_lock(end);
            status = end->mover->settled(end) < 0 ? S1F_ERR_STATE : S1F_OK;
            s1f_device_end_unlock(end);
        }
        if (status != S1F_OK)
            return status;
        if (s1f_now_ns() > end->deadline_ns)
            return s1f_fail(S1F_ERR_STATE, "%s for %.1f s", what, (double)(s1f_now_ns() - began) * 1e-9);
        nanosleep(&pause, NULL);
    }
    return S1F_OK;
}

static int header_has_come(s1f_device_end *end, int64_t sequence)
{
    return s1f_p2p_has_come(end->control, sequence);
}

static int is_over(s1f_device_end *end, int64_t sequence)
{
    (void)sequence;
    return s1f_device_end_is_idle(end);
}

/* Makes the context current, with a deadline for what follows. */
static s1f_status begin_call(s1f_device_end *end)
{
    if (end->deadline_ns == 0)
        return s1f_fail(S1F_ERR_STATE, "the end does not prove itself");
    end->deadline_ns = s1f_now_ns() + end->watchdog->proof_ns;
    return s1f_device_enter(end->device);
}

s1f_status s1f_edge_proof_begin(s1f_edge_end *head)
{
    s1f_device_end *end = (s1f_device_end *)head;
    end->deadline_ns =
        s1f_now_ns() + end->watchdog->proof_ns; /* of connecting, which may have waited for other edges */
    return s1f_p2p_begin_step(head, 1);
}

s1f_status s1f_edge_proof_post(s1f_edge_end *head, int64_t sequence, int64_t bytes)
{
    s1f_device_end *end = (s1f_device_end *)head;
    S1F_TRY(begin_call(end));
    end->largest = bytes > end->largest ? bytes : end->largest;
    return s1f_device_leave(end->device, s1f_p2p_post(head, sequence, 0));
}

/* A transfer that failed half-way has put work on the stream, and counts until that has ended. Or it is aborted. */
static void count_begun(s1f_device_end *end)
{
    if (end->mover->abort != NULL || end->started >= end->capacity || end->transfers[end->started].done == NULL)
        return;
    s1f_transfer *transfer = &end->transfers[end->started];
    if (end->device->driver->event_record(transfer->done, end->stream) == S1F_CU_SUCCESS) {
        transfer->is_over = 0;
        end->started++;
    }
}

int s1f_edge_proof_give_up(s1f_edge_end *head)
{
    s1f_device_end *end = (s1f_device_end *)head;
    if (s1f_device_enter(end->device) != S1F_OK)
        return 0;
    s1f_device_end_lock(end);
    count_begun(end);
    s1f_device_end_abort(end);
    s1f_device_end_unlock(end);
    int idle = s1f_device_end_is_idle_within(end, GIVE_UP_NS);
    s1f_device_leave(end->device, S1F_OK);
    return idle;
}

s1f_status s1f_edge_proof_send(s1f_edge_end *head, int64_t sequence, int64_t bytes, int64_t *ns)
{
    s1f_device_end *end = (s1f_device_end *)head;
    const s1f_driver *driver = end->device->driver;
    s1f_cu_address memory = 0;
    char *sent = NULL;
    S1F_TRY(begin_call(end));
    s1f_status status = make_bytes(end, sequence, bytes, &sent);
    if (status == S1F_OK)
        status = S1F_CU(driver, memory_allocate, &memory, (size_t)bytes);
    int has_memory = status == S1F_OK;
    if (status == S1F_OK)
        status = S1F_CU(driver, copy_from_host, memory, sent, (size_t)bytes, end->device->compute);
    if (status == S1F_OK)
        status = S1F_CU(driver, stream_synchronize, end->device->compute);
    int64_t began = s1f_now_ns();
    if (status == S1F_OK) {
        s1f_message message = {.step = s1f_group_step(head->group), .num_tensors = 1};
        const void *tensors[] = {(const void *)(uintptr_t)memory};
        message.tensors[0] = (s1f_tensor_header){.dtype = S1F_UINT8, .ndim = 1, .sizes = {bytes}};
        status = s1f_p2p_send(head, sequence, 0, &message, tensors);
    }
    if (status == S1F_OK)
        status = wait_for(end, is_over, sequence, "its transfer has been under way");
    *ns = s1f_now_ns() - began;
    int is_unread = status == S1F_OK || s1f_edge_proof_give_up(head);
    if (has_memory && is_unread) /* else it is lost */
        driver->memory_free(memory);
    free(sent);
    return s1f_device_leave(end->device, status);
}

static s1f_status compare(s1f_device_end *end, int64_t sequence, int64_t bytes, const void *payload)
{
    const s1f_driver *driver = end->device->driver;
    char *expected = NULL, *found = malloc((size_t)bytes);
    s1f_status status = found == NULL ? s1f_fail(S1F_ERR_MEMORY, "no host memory for %lld bytes", (long long)bytes)
                                      : make_bytes(end, sequence, bytes, &expected);
    if (status == S1F_OK)
        status = S1F_CU(driver, copy_to_host, found, (s1f_cu_address)(uintptr_t)payload, (size_t)bytes,
                        end->device->compute);
    if (status == S1F_OK)
        status = S1F_CU(driver, stream_synchronize, end->device->compute);
    if (status == S1F_OK && memcmp(found, expected, (size_t)bytes) != 0) {
        int64_t at = 0, wrong = 0;
        for (int64_t i = bytes; i-- > 0;)
            if (found[i] != expected[i]) {
                at = i;
                wrong++;
            }
        status = s1f_fail(S1F_ERR_STATE, "%lld of %lld bytes arrived wrong, the first is byte %lld", (long long)wrong,
                          (long long)bytes, (long long)at);
    }
    free(expected);
    free(found);
    return status;
}

s1f_status s1f_edge_proof_receive(s1f_edge_end *head, int64_t sequence, int64_t bytes, int64_t *ns)
{
    s1f_device_end *end = (s1f_device_end *)head;
    const s1f_message *message = NULL;
    const void *payload = NULL;
    S1F_TRY(begin_call(end));
    s1f_status status = wait_for(end, header_has_come, sequence, "no header has come");
    int64_t began = s1f_now_ns();
    if (status == S1F_OK)
        status = s1f_p2p_receive(head, sequence, 0);
    if (status == S1F_OK) /* before the stream that computes waits for it */
        status = wait_for(end, is_over, sequence, "its transfer has been under way");
    if (status == S1F_OK)
        status = s1f_p2p_wait(head, sequence, 0, &message, &payload);
    *ns = s1f_now_ns() - began;
    if (status == S1F_OK && message->payload_bytes != bytes)
        status = s1f_fail(S1F_ERR_STATE, "a message of %lld bytes arrived, %lld were sent",
                          (long long)message->payload_bytes, (long long)bytes);
    if (status == S1F_OK)
        status = compare(end, sequence, bytes, payload);
    return s1f_device_leave(end->device, status);
}

void s1f_edge_proof_end(s1f_edge_end *head)
{
    s1f_device_end *end = (s1f_device_end *)head;
    s1f_device_end_lock(end);
    end->deadline_ns = 0;
    s1f_device_end_unlock(end);
}
