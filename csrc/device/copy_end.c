/* copy_end.c - moving payloads by copies between GPUs' memories. */
#include "copy_end.h"

#include "../run/arena.h"

#include <stdlib.h>
#include <string.h>

typedef struct { /* in a place, behind the header: written by the receiver before POST */
    s1f_cu_handle memory, freed;
    int64_t capacity;
    uint64_t generation; /* of the memory: 0 before there is any */
} posted_note;

typedef struct { /* behind that: written by the sender before the header */
    s1f_cu_handle copied;
} sent_note;

typedef struct {
    posted_note posted;
    sent_note sent;
} place_notes;

_Static_assert(sizeof(s1f_message) + sizeof(place_notes) <= S1F_HEADER_BYTES, "the notes fit behind the header");

typedef struct {         /* what this end knows of a place beside s1f_device_place */
    s1f_cu_event copied; /* sender: own; receiver: the sender's */
    s1f_cu_handle name;  /* sender: of it */
    /* sender: the receiver's */
    s1f_cu_address target;
    s1f_cu_event freed;
    uint64_t generation;
} copy_place;

typedef struct {
    s1f_device_end base;
    copy_place *places;
    int32_t num_places;
} copy_end;

static place_notes *notes_of(copy_end *end, int32_t place)
{
    return (place_notes *)((char *)s1f_arena_place(end->base.control, place) + S1F_HEADER_BYTES - sizeof(place_notes));
}

static s1f_status reserve_places(copy_end *end)
{
    if (end->num_places >= end->base.num_places)
        return S1F_OK;
    copy_place *grown = realloc(end->places, (size_t)end->base.num_places * sizeof *grown);
    if (grown == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d places", (int)end->base.num_places);
    memset(grown + end->num_places, 0, (size_t)(end->base.num_places - end->num_places) * sizeof *grown);
    end->places = grown;
    end->num_places = end->base.num_places;
    return S1F_OK;
}

/* The other end's event, opened once. */
static s1f_status find_event(const copy_end *end, s1f_cu_handle name, s1f_cu_event *event)
{
    return *event != NULL ? S1F_OK : S1F_CU(end->base.device->driver, ipc_open_event, event, name);
}

/* -- receiver ------------------------------------------------------------------------------------------------------ */

static s1f_status copy_post(s1f_device_end *base, int32_t number)
{
    copy_end *end = (copy_end *)base;
    const s1f_driver *driver = base->device->driver;
    s1f_device_place *place = &base->places[number];
    posted_note *note = &notes_of(end, number)->posted;
    s1f_status status = s1f_device_place_grow(base, place, base->largest);
    int is_new = place->capacity > 0 && place->generation != note->generation;
    if (status == S1F_OK && is_new)
        status = S1F_CU(driver, ipc_export_memory, &note->memory, place->address);
    if (status == S1F_OK && is_new)
        status = S1F_CU(driver, ipc_export_event, &note->freed, place->freed);
    note->capacity = place->capacity;
    if (status == S1F_OK && is_new)
        note->generation = place->generation;
    return status;
}

static s1f_status copy_receive(s1f_device_end *base, int32_t number, const s1f_message *message)
{
    copy_end *end = (copy_end *)base;
    S1F_TRY(reserve_places(end));
    (void)message;
    S1F_TRY(find_event(end, notes_of(end, number)->sent.copied, &end->places[number].copied));
    return S1F_CU(base->device->driver, stream_wait_event, base->stream, end->places[number].copied, 0);
}

/* -- sender -------------------------------------------------------------------------------------------------------- */

/* The receiver's place, opened here once per memory that it has had. */
static s1f_status find_target(copy_end *end, const posted_note *note, copy_place *place)
{
    const s1f_driver *driver = end->base.device->driver;
    S1F_TRY(find_event(end, note->freed, &place->freed));
    if (place->generation == note->generation)
        return S1F_OK;
    if (place->generation != 0)
        driver->ipc_close_memory(place->target);
    place->generation = 0;
    S1F_TRY(S1F_CU(driver, ipc_open_memory, &place->target, note->memory, S1F_CU_IPC_LAZY_PEER_ACCESS));
    place->generation = note->generation;
    return S1F_OK;
}

static s1f_status copy_prepare_send(s1f_device_end *base, int64_t sequence, int32_t number, s1f_message *message)
{
    copy_end *end = (copy_end *)base;
    const s1f_driver *driver = base->device->driver;
    S1F_TRY(s1f_arena_wait_posted(base->control, sequence));
    S1F_TRY(reserve_places(end));
    place_notes *notes = notes_of(end, number);
    copy_place *place = &end->places[number];
    message->on_device = message->payload_bytes <= notes->posted.capacity;
    if (!message->on_device)
        return S1F_OK;
    if (message->payload_bytes > 0)
        S1F_TRY(find_target(end, &notes->posted, place));
    if (place->copied == NULL) {
        S1F_TRY(S1F_CU(driver, event_create, &place->copied, S1F_CU_EVENT_DISABLE_TIMING | S1F_CU_EVENT_INTERPROCESS));
        S1F_TRY(S1F_CU(driver, ipc_export_event, &place->name, place->copied));
    }
    notes->sent.copied = place->name;
    return S1F_OK;
}

static s1f_status copy_send(s1f_device_end *base, int32_t number, const s1f_message *message,
                            const void *const *tensors)
{
    copy_end *end = (copy_end *)base;
    const s1f_driver *driver = base->device->driver;
    const copy_place *place = &end->places[number];
    S1F_TRY(S1F_CU(driver, stream_wait_event, base->stream, place->freed, 0));
    for (int32_t i = 0; i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        if (tensor->bytes > 0)
            S1F_TRY(S1F_CU(driver, copy, place->target + (uint64_t)tensor->offset,
                           (s1f_cu_address)(uintptr_t)tensors[i], (size_t)tensor->bytes, base->stream));
    }
    return S1F_CU(driver, event_record, place->copied, base->stream);
}

/* -- both ---------------------------------------------------------------------------------------------------------- */

static void copy_forget(s1f_device_end *base)
{
    copy_end *end = (copy_end *)base;
    for (int32_t i = 0; i < end->num_places; i++) {
        copy_place *place = &end->places[i];
        if (place->generation != 0)
            base->device->driver->ipc_close_memory(place->target);
        place->generation = 0;
    }
}

static void copy_close(s1f_device_end *base)
{
    copy_end *end = (copy_end *)base;
    const s1f_driver *driver = base->device->driver;
    copy_forget(base);
    for (int32_t i = 0; i < end->num_places; i++) {
        s1f_driver_event_destroy(driver, end->places[i].copied);
        s1f_driver_event_destroy(driver, end->places[i].freed);
    }
    free(end->places);
}

static const s1f_mover copy_mover = {
    .post = copy_post,
    .prepare_send = copy_prepare_send,
    .receive = copy_receive,
    .send = copy_send,
    .is_one_sided = 1,
    .forget = copy_forget,
    .close = copy_close,
};

s1f_status s1f_copy_end_create(s1f_edge_end *control, s1f_watchdog *watchdog, s1f_edge_end **out)
{
    s1f_device_end *end;
    S1F_TRY(s1f_device_end_create(sizeof(copy_end), &copy_mover, control, watchdog, &end));
    *out = &end->head;
    return S1F_OK;
}
