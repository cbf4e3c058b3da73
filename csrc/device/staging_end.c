/* staging_end.c - moving payloads by copies to and from pinned memory that two processes share. */
#include "staging_end.h"

#include "../run/arena.h"
#include "staging_relay.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_SLOTS = S1F_STAGING_SLOTS, SLOT_ALIGNMENT = 65536, PINNED_BLOCK = 2 << 20 };

typedef struct {
    s1f_device_end base;
    s1f_staging_ring *words;
    s1f_staging_relay *relay;                 /* NULL: both processes map the ring */
    s1f_cu_address device_words;              /* as the GPU sees them */
    int64_t ring_bytes, stride, pinned_bytes; /* of a slot: its room, and what of it is pinned */
    int32_t num_pinned;                       /* slots */
    uint64_t last[MOST_SLOTS];                /* sender: what each slot held last */
} staging_end;

static const int64_t CLOSING_NS = INT64_C(1000) * 1000 * 1000;

_Static_assert(sizeof(s1f_staging_ring) % SLOT_ALIGNMENT == 0, "slots begin on pages");

static uint64_t position_of(const staging_end *end, int64_t sequence)
{
    return ((uint64_t)s1f_group_step(end->base.head.group) << 32) + (uint64_t)sequence + 1;
}

static char *slot_of(const staging_end *end, int32_t slot)
{
    return (char *)(end->words + 1) + slot * end->stride;
}

static s1f_cu_address word_address(const staging_end *end, const _Atomic uint64_t *word)
{
    return end->device_words + (uint64_t)((const char *)word - (const char *)end->words);
}

static void unpin_slots(staging_end *end)
{
    while (end->num_pinned > 0)
        end->base.device->driver->host_unregister(slot_of(end, --end->num_pinned));
    end->pinned_bytes = 0;
}

/* Room of a slot, the same at both ends: it depends on the number of places in a few large steps only. */
static int64_t stride_for(const staging_end *end, int32_t num_places)
{
    int64_t num_slots = 8;
    while (num_slots < num_places)
        num_slots *= 8;
    return (end->ring_bytes - (int64_t)sizeof *end->words) / num_slots / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

/* Sender with a relay: slots that are laid out anew overwrite what waits in the old ones, of a step that went well. */
static s1f_status wait_for_slots(staging_end *end)
{
    s1f_status status = S1F_OK;
    for (int32_t i = 0; end->relay != NULL && status == S1F_OK && i < MOST_SLOTS; i++)
        if (end->last[i] > 0)
            status = S1F_CU(end->base.device->driver, stream_wait_value, end->base.stream,
                            word_address(end, &end->words->drained[i]), end->last[i], S1F_CU_WAIT_GEQ);
    return status;
}

/* Pins as much of every slot as a message takes. What the end has begun goes on meanwhile, and is waited for. */
static s1f_status pin_slots(staging_end *end, int64_t bytes)
{
    const s1f_driver *driver = end->base.device->driver;
    int32_t num_places = end->base.num_places;
    int64_t stride = num_places <= MOST_SLOTS ? stride_for(end, num_places) : 0;
    if (bytes > stride)
        return s1f_fail(S1F_ERR_ARG,
                        "%lld bytes do not fit in one of %d slots in the edge's %lld bytes of address space",
                        (long long)bytes, (int)num_places, (long long)end->ring_bytes);
    if (stride == end->stride && bytes <= end->pinned_bytes && num_places <= end->num_pinned)
        return S1F_OK;
    S1F_TRY(S1F_CU(driver, stream_synchronize, end->base.stream));
    s1f_status status = S1F_OK;
    bytes = bytes > end->pinned_bytes || stride != end->stride ? bytes : end->pinned_bytes;
    bytes = (bytes + PINNED_BLOCK - 1) / PINNED_BLOCK * PINNED_BLOCK;
    bytes = bytes < stride ? bytes : stride;
    unpin_slots(end);
    if (stride != end->stride)
        status = wait_for_slots(end);
    end->stride = stride;
    for (int32_t i = 0; status == S1F_OK && i < num_places; i++) {
        status = S1F_CU(driver, host_register, slot_of(end, i), (size_t)bytes, S1F_CU_HOST_REGISTER_PORTABLE);
        end->num_pinned += status == S1F_OK;
    }
    end->pinned_bytes = bytes;
    if (status != S1F_OK) {
        unpin_slots(end);
        return s1f_fail_prefixed(status, "pinning %d times %lld bytes of host memory: ", (int)num_places,
                                 (long long)bytes);
    }
    return S1F_OK;
}

static s1f_status staging_prepare_send(s1f_device_end *base, int64_t sequence, int32_t number, s1f_message *message,
                                       const void **tensors)
{
    (void)number;
    (void)tensors;
    staging_end *end = (staging_end *)base;
    if (end->relay == NULL) /* so all of the step before has been received */
        S1F_TRY(s1f_arena_wait_posted(base->control, sequence));
    return message->payload_bytes > 0 ? pin_slots(end, message->payload_bytes) : S1F_OK;
}

static s1f_status staging_prepare_receive(s1f_device_end *base, int32_t number)
{
    int64_t bytes = base->places[number].message->payload_bytes;
    return bytes > 0 ? pin_slots((staging_end *)base, bytes) : S1F_OK;
}

static s1f_status staging_send(s1f_device_end *base, int32_t number, const s1f_message *message,
                               const void *const *tensors)
{
    staging_end *end = (staging_end *)base;
    const s1f_driver *driver = base->device->driver;
    uint64_t position = position_of(end, message->sequence);
    s1f_cu_address written = word_address(end, &end->words->written[number]);
    uint64_t before = end->last[number];
    int32_t is_awaited = end->relay != NULL ? before > 0 : before >> 32 == position >> 32;
    if (is_awaited) /* what an earlier step left in a ring that both map has been received */
        S1F_TRY(S1F_CU(driver, stream_wait_value, base->stream, word_address(end, &end->words->drained[number]), before,
                       S1F_CU_WAIT_GEQ));
    for (int32_t i = 0; i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        if (tensor->bytes > 0)
            S1F_TRY(S1F_CU(driver, copy_to_host, slot_of(end, number) + tensor->offset,
                           (s1f_cu_address)(uintptr_t)tensors[i], (size_t)tensor->bytes, base->stream));
    }
    S1F_TRY(S1F_CU(driver, stream_write_value, base->stream, written, position, 0));
    if (end->relay != NULL)
        S1F_TRY(s1f_staging_relay_send(end->relay, number, end->stride, position, message->payload_bytes));
    end->last[number] = position;
    return S1F_OK;
}

static s1f_status staging_receive(s1f_device_end *base, int32_t number, const s1f_message *message)
{
    staging_end *end = (staging_end *)base;
    const s1f_driver *driver = base->device->driver;
    uint64_t position = position_of(end, message->sequence);
    S1F_TRY(S1F_CU(driver, stream_wait_value, base->stream, word_address(end, &end->words->written[number]), position,
                   S1F_CU_WAIT_GEQ));
    S1F_TRY(S1F_CU(driver, copy_from_host, base->places[number].address, slot_of(end, number),
                   (size_t)message->payload_bytes, base->stream));
    return S1F_CU(driver, stream_write_value, base->stream, word_address(end, &end->words->drained[number]), position,
                  0);
}

/* Only the words that this end's stream waits for, and only once all of earlier steps has ended there: a peer may still
 * be in the step before, which goes well, and what it waits for is not promised too early. */
static void staging_release(s1f_device_end *base, int64_t step)
{
    staging_end *end = (staging_end *)base;
    uint64_t all = (uint64_t)step << 32 | UINT32_MAX;
    if (end->relay != NULL && !base->head.is_receiver &&
        !s1f_staging_relay_may_release(end->relay, step, s1f_group_timeout_ns(base->head.group)))
        return;
    if (base->is_closed || base->device->driver->event_query(base->step_start) != S1F_CU_SUCCESS)
        return;
    for (int32_t i = 0; i < base->num_places && i < MOST_SLOTS; i++) {
        _Atomic uint64_t *word = base->head.is_receiver ? &end->words->written[i] : &end->words->drained[i];
        if (atomic_load(word) < all)
            atomic_store(word, all);
    }
}

static void staging_close(s1f_device_end *base)
{
    staging_end *end = (staging_end *)base;
    int32_t is_sender = end->relay != NULL && !base->head.is_receiver;
    s1f_staging_relay_free(end->relay);
    end->relay = NULL;
    for (int32_t i = 0; is_sender && i < MOST_SLOTS; i++) /* what waits for the relay goes on */
        if (atomic_load(&end->words->drained[i]) < end->last[i])
            atomic_store(&end->words->drained[i], end->last[i]);
    if (is_sender)
        s1f_device_end_is_idle_within(base, CLOSING_NS);
    unpin_slots(end);
    if (end->device_words != 0)
        base->device->driver->host_unregister(end->words);
    end->device_words = 0;
}

#define STAGING                                                                                                        \
    .name = "staging", .prepare_send = staging_prepare_send, .prepare_receive = staging_prepare_receive,               \
    .receive = staging_receive, .send = staging_send, .is_one_sided = 1, .release = staging_release,                   \
    .close = staging_close
static const s1f_mover staging_mover = {STAGING};

/* -- between hosts ------------------------------------------------------------------------------------------------- */

/* A receive has begun and its message is not there. */
static int32_t awaits(const s1f_device_end *base)
{
    int64_t last = base->head.is_receiver ? base->started - 1 : -1;
    while (last >= 0 && base->transfers[last].is_over) /* without bytes */
        last--;
    return last >= 0 && !s1f_device_end_is_over(base, last);
}

static int relayed_settled(s1f_device_end *base)
{
    return s1f_staging_relay_check(((staging_end *)base)->relay, awaits(base)) == S1F_OK ? 1 : -1;
}

static void relayed_disown(s1f_device_end *base, int64_t step)
{
    s1f_staging_relay_disown(((staging_end *)base)->relay, step);
}

static int relayed_has_left(s1f_device_end *base)
{
    return s1f_staging_relay_is_idle(((staging_end *)base)->relay);
}

static const s1f_mover relayed_mover = {STAGING, .settled = relayed_settled, .has_left = relayed_has_left,
                                        .disown = relayed_disown};

s1f_status s1f_staging_end_connect(s1f_edge_end *head, int fd)
{
    staging_end *end = (staging_end *)head;
    s1f_staging_relay *relay;
    S1F_TRY(s1f_staging_relay_create(fd, head->is_receiver, end->words, end->ring_bytes, &relay));
    s1f_device_end_lock(&end->base);
    end->relay = relay;
    end->base.mover = &relayed_mover;
    s1f_device_end_unlock(&end->base);
    return S1F_OK;
}

/* -- creation ------------------------------------------------------------------------------------------------------ */

static s1f_status pin_words(staging_end *end)
{
    const s1f_driver *driver = end->base.device->driver;
    S1F_TRY(s1f_device_enter(end->base.device));
    s1f_status status = S1F_CU(driver, host_register, end->words, sizeof *end->words,
                               S1F_CU_HOST_REGISTER_PORTABLE | S1F_CU_HOST_REGISTER_MAPPED);
    if (status == S1F_OK) {
        status = S1F_CU(driver, host_address, &end->device_words, end->words, 0);
        if (status != S1F_OK)
            driver->host_unregister(end->words);
    }
    return s1f_device_leave(end->base.device, status);
}

s1f_status s1f_staging_end_create(s1f_edge_end *control, s1f_edge_end *ring, s1f_watchdog *watchdog, s1f_edge_end **out)
{
    s1f_device_end *base;
    S1F_TRY(s1f_device_end_create(sizeof(staging_end), &staging_mover, control, watchdog, &base));
    staging_end *end = (staging_end *)base;
    end->words = s1f_arena_memory(ring, &end->ring_bytes);
    s1f_status status = pin_words(end);
    if (status == S1F_OK)
        *out = &base->head;
    else
        s1f_edge_end_free(&base->head);
    return status;
}
