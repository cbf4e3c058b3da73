/* copy_end.c - moving payloads by copies between GPUs' memories. */
#include "device_end.h"

#include "../run/arena.h"

#include <time.h>

typedef struct { /* in a place, behind the header */
    /* Written by the receiver before POST. */
    s1f_cu_handle memory, freed;
    int64_t capacity;
    uint64_t generation; /* of the memory: 0 before there is any */
    /* Written by the sender before the header. */
    s1f_cu_handle copied;
} place_note;

_Static_assert(sizeof(s1f_message) + sizeof(place_note) <= S1F_HEADER_BYTES, "the note fits behind the header");

static place_note *note_of(s1f_device_end *end, int32_t place)
{
    return (place_note *)((char *)s1f_arena_place(end->control, place) + S1F_HEADER_BYTES - sizeof(place_note));
}

/* The other end's event, opened once. */
static s1f_status find_event(const s1f_device_end *end, s1f_cu_handle name, s1f_cu_event *event)
{
    return *event != NULL ? S1F_OK : S1F_CU(end->device->driver, ipc_open_event, event, name);
}

/* -- receiver ------------------------------------------------------------------------------------------------------ */

static s1f_status copy_post(s1f_device_end *end, int32_t number)
{
    const s1f_driver *driver = end->device->driver;
    s1f_device_place *place = &end->places[number];
    place_note *note = note_of(end, number);
    S1F_TRY(s1f_device_place_grow(end, place, end->largest));
    note->capacity = place->capacity;
    if (place->capacity == 0 || place->generation == note->generation)
        return S1F_OK;
    S1F_TRY(S1F_CU(driver, ipc_export_memory, &note->memory, place->address));
    S1F_TRY(S1F_CU(driver, ipc_export_event, &note->freed, place->freed));
    note->generation = place->generation;
    return S1F_OK;
}

static s1f_status copy_receive(s1f_device_end *end, int32_t number)
{
    s1f_cu_event *copied = &end->places[number].copied;
    S1F_TRY(find_event(end, note_of(end, number)->copied, copied));
    return S1F_CU(end->device->driver, stream_wait_event, end->stream, *copied, 0);
}

/* -- sender -------------------------------------------------------------------------------------------------------- */

static void close_target(s1f_device_end *end, s1f_device_place *place)
{
    if (place->generation == 0)
        return;
    end->device->driver->ipc_close_memory(place->address);
    place->generation = 0;
    atomic_fetch_sub(s1f_arena_num_open(end->control), 1);
}

/* The receiver's place, opened here once per memory that it has had. */
static s1f_status find_target(s1f_device_end *end, const place_note *note, s1f_device_place *place)
{
    const s1f_driver *driver = end->device->driver;
    S1F_TRY(find_event(end, note->freed, &place->freed));
    if (place->generation == note->generation)
        return S1F_OK;
    close_target(end, place);
    S1F_TRY(S1F_CU(driver, ipc_open_memory, &place->address, note->memory, S1F_CU_IPC_LAZY_PEER_ACCESS));
    place->generation = note->generation;
    atomic_fetch_add(s1f_arena_num_open(end->control), 1);
    return S1F_OK;
}

static s1f_status copy_prepare_send(s1f_device_end *end, int64_t sequence, int32_t number, s1f_message *message)
{
    const s1f_driver *driver = end->device->driver;
    S1F_TRY(s1f_arena_wait_posted(end->control, sequence));
    place_note *note = note_of(end, number);
    s1f_device_place *place = &end->places[number];
    message->on_device = message->payload_bytes <= note->capacity;
    if (!message->on_device)
        return S1F_OK;
    if (message->payload_bytes > 0)
        S1F_TRY(find_target(end, note, place));
    if (place->copied == NULL) {
        S1F_TRY(S1F_CU(driver, event_create, &place->copied, S1F_CU_EVENT_DISABLE_TIMING | S1F_CU_EVENT_INTERPROCESS));
        S1F_TRY(S1F_CU(driver, ipc_export_event, &place->name, place->copied));
    }
    note->copied = place->name;
    return S1F_OK;
}

static s1f_status copy_move(s1f_device_end *end, int32_t number, const s1f_message *message, const void *const *tensors)
{
    if (tensors == NULL)
        return copy_receive(end, number);
    const s1f_driver *driver = end->device->driver;
    const s1f_device_place *place = &end->places[number];
    S1F_TRY(S1F_CU(driver, stream_wait_event, end->stream, place->freed, 0));
    for (int32_t i = 0; i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        if (tensor->bytes > 0)
            S1F_TRY(S1F_CU(driver, copy, place->address + (uint64_t)tensor->offset,
                           (s1f_cu_address)(uintptr_t)tensors[i], (size_t)tensor->bytes, end->stream));
    }
    return S1F_CU(driver, event_record, place->copied, end->stream);
}

/* -- both ---------------------------------------------------------------------------------------------------------- */

/* A sender closes what it opened. A receiver waits for that: as long as the sender lives, it may write there. */
static int copy_forget(s1f_device_end *end)
{
    s1f_wait_reason reason = s1f_edge_reason(&end->head, "closing", -1);
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    for (int32_t i = 0; !end->head.is_receiver && i < end->num_places; i++)
        close_target(end, &end->places[i]);
    for (int64_t until = s1f_device_end_farewell_ns(end);
         end->head.is_receiver && atomic_load(s1f_arena_num_open(end->control)) > 0; nanosleep(&pause, NULL))
        if (s1f_group_check_peer(end->head.group, &reason) != S1F_OK)
            return 1;
        else if (s1f_now_ns() >= until)
            return 0;
    return 1;
}

const s1f_mover s1f_copy_mover = {
    .post = copy_post,
    .prepare_send = copy_prepare_send,
    .move = copy_move,
    .is_one_sided = 1,
    .forget = copy_forget,
};
