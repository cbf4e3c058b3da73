/* exchange.c - tensors in pieces over edges between GPUs. */
#include "exchange.h"

enum { PLACES = 4 };

static s1f_device_end *device_end_of(s1f_edge_end *end)
{
    return (s1f_device_end *)end;
}

s1f_status s1f_exchange_begin(s1f_edge_end *end)
{
    return s1f_p2p_begin_step(end, PLACES);
}

/* A mover whose sender writes into a place finds room there, also for the first piece of a size. */
static s1f_status post_piece(s1f_edge_end *end, int64_t sequence, int64_t bytes)
{
    s1f_device_end *own = device_end_of(end);
    own->largest = bytes > own->largest ? bytes : own->largest;
    return s1f_p2p_post(end, sequence, (int32_t)(sequence % PLACES));
}

static s1f_status send_piece(s1f_edge_end *end, s1f_cu_address data, int64_t bytes)
{
    int64_t sequence = device_end_of(end)->started;
    s1f_message message = {.step = s1f_group_step(end->group), .pass = S1F_NO_PASS, .training = 1, .num_tensors = 1};
    const void *tensors[] = {(const void *)(uintptr_t)data};
    message.tensors[0] = (s1f_tensor_header){.dtype = S1F_UINT8, .ndim = 1, .sizes = {bytes}};
    s1f_group_progress(end->group, end->text);
    return s1f_p2p_send(end, sequence, (int32_t)(sequence % PLACES), &message, tensors);
}

static s1f_status receive_piece(s1f_edge_end *end, s1f_cu_address data, int64_t bytes)
{
    const s1f_device *device = device_end_of(end)->device;
    const s1f_message *message = NULL;
    const void *payload = NULL;
    int64_t sequence = device_end_of(end)->started;
    int32_t place = (int32_t)(sequence % PLACES);
    s1f_group_progress(end->group, end->text);
    S1F_TRY(s1f_p2p_receive(end, sequence, place));
    S1F_TRY(s1f_p2p_wait(end, sequence, place, &message, &payload));
    if (message->payload_bytes != bytes)
        return s1f_fail(S1F_ERR_STATE, "%s, message %lld: %lld bytes have come, %lld were expected", end->text,
                        (long long)sequence, (long long)message->payload_bytes, (long long)bytes);
    if (bytes == 0)
        return S1F_OK;
    S1F_TRY(s1f_device_enter(device));
    return s1f_device_leave(
        device, S1F_CU(device->driver, copy, data, (s1f_cu_address)(uintptr_t)payload, (size_t)bytes, device->compute));
}

/* What is computed from now on may overwrite what an end has sent. */
static s1f_status order_after_sends(const s1f_device_end *end)
{
    S1F_TRY(s1f_device_enter(end->device));
    return s1f_device_leave(end->device, S1F_CU(end->device->driver, stream_wait_event, end->device->compute,
                                                end->transfers[end->started - 1].done, 0));
}

s1f_status s1f_exchange_move(const s1f_parcel *parcels, int32_t count, int64_t bytes, int64_t piece_bytes)
{
    int64_t num_pieces = bytes / piece_bytes + (bytes % piece_bytes != 0),
            last = bytes - (num_pieces - 1) * piece_bytes;
    for (int32_t i = 0; i < count; i++)
        for (int64_t n = 0; parcels[i].end->is_receiver && n < num_pieces && n < PLACES; n++)
            S1F_TRY(post_piece(parcels[i].end, device_end_of(parcels[i].end)->started + n,
                               n + 1 < num_pieces ? piece_bytes : last));
    for (int64_t n = 0; n < num_pieces; n++)
        for (int32_t i = 0; i < count; i++) {
            s1f_edge_end *end = parcels[i].end;
            s1f_cu_address data = parcels[i].data + (uint64_t)(n * piece_bytes);
            int64_t size = n + 1 < num_pieces ? piece_bytes : last;
            if (!end->is_receiver) {
                S1F_TRY(send_piece(end, data, size));
                continue;
            }
            S1F_TRY(receive_piece(end, data, size));
            if (n + PLACES < num_pieces)
                S1F_TRY(post_piece(end, device_end_of(end)->started + PLACES - 1,
                                   n + PLACES + 1 < num_pieces ? piece_bytes : last));
        }
    for (int32_t i = 0; i < count && num_pieces > 0; i++)
        if (!parcels[i].end->is_receiver)
            S1F_TRY(order_after_sends(device_end_of(parcels[i].end)));
    return S1F_OK;
}

/* The last message of an edge is an empty one: its sender has received all. */
s1f_status s1f_exchange_end(const s1f_parcel *parcels, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        S1F_TRY(s1f_p2p_finish(parcels[i].end, 0));
    for (int32_t i = 0; i < count; i++)
        if (parcels[i].end->is_receiver)
            S1F_TRY(post_piece(parcels[i].end, device_end_of(parcels[i].end)->started, 0));
    for (int32_t i = 0; i < count; i++)
        if (!parcels[i].end->is_receiver)
            S1F_TRY(send_piece(parcels[i].end, 0, 0));
    for (int32_t i = 0; i < count; i++)
        if (parcels[i].end->is_receiver)
            S1F_TRY(receive_piece(parcels[i].end, 0, 0));
    return S1F_OK;
}
