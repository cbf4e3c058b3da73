/* device_places.c - memory of the places of an edge between GPUs, and a message's way through host memory. */
#include "device_end.h"

#include "../core/pool.h"

#include <stdlib.h>

/* Memory of another size may lie in one block with other memory, all of which its handle would share (CUDA C++
 * Programming Guide, "Interprocess Communication"). */
static const int64_t SHARED_BLOCK_BYTES = 2 << 20;

/* The sender may have it open, and a tensor may lie there. */
static s1f_status retire_memory(s1f_device_end *end, s1f_device_place *place)
{
    S1F_TRY(s1f_array_grow(&end->retired, &end->num_retired, end->num_retired + 1, sizeof *end->retired,
                           "memories that places outgrew"));
    end->retired[end->num_retired - 1] = place->address;
    place->capacity = 0;
    return S1F_OK;
}

static s1f_status allocate(const s1f_device *device, int64_t bytes, s1f_cu_address *address)
{
    s1f_status status = S1F_CU(device->driver, memory_allocate, address, (size_t)bytes);
    if (status != S1F_ERR_MEMORY || device->make_room == NULL)
        return status;
    device->make_room(device->room_context);
    return S1F_CU(device->driver, memory_allocate, address, (size_t)bytes);
}

s1f_status s1f_device_place_grow(s1f_device_end *end, s1f_device_place *place, int64_t bytes)
{
    if (bytes <= place->capacity)
        return S1F_OK;
    if (bytes < place->capacity + place->capacity / 2)
        bytes = place->capacity + place->capacity / 2; /* so that what is retired stays a fraction */
    bytes = (bytes + SHARED_BLOCK_BYTES - 1) / SHARED_BLOCK_BYTES * SHARED_BLOCK_BYTES;
    s1f_status status = place->capacity > 0 ? retire_memory(end, place) : S1F_OK;
    if (status == S1F_OK)
        status = allocate(end->device, bytes, &place->address);
    if (status != S1F_OK)
        return s1f_fail_prefixed(status, "%lld bytes for a message: ", (long long)bytes);
    place->capacity = bytes;
    place->generation++;
    return S1F_OK;
}

s1f_status s1f_device_end_free_places(s1f_device_end *end)
{
    const s1f_driver *driver = end->device->driver;
    s1f_status status = S1F_OK;
    for (int64_t i = 0; status == S1F_OK && i < end->num_places; i++) {
        if (end->places[i].capacity > 0)
            status = S1F_CU(driver, memory_free, end->places[i].address);
        end->places[i].capacity = 0;
        end->places[i].message = NULL;
    }
    while (status == S1F_OK && end->num_retired > 0)
        status = S1F_CU(driver, memory_free, end->retired[--end->num_retired]);
    end->largest = 0;
    return status;
}

s1f_status s1f_device_end_to_host(s1f_device_end *end, const s1f_message *message, const void **tensors)
{
    const s1f_driver *driver = end->device->driver;
    if (message->payload_bytes > end->staging_bytes) {
        free(end->staging);
        end->staging = malloc((size_t)message->payload_bytes);
        end->staging_bytes = end->staging == NULL ? 0 : message->payload_bytes;
        if (end->staging == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no host memory for a message of %lld bytes",
                            (long long)message->payload_bytes);
    }
    S1F_TRY(S1F_CU(driver, event_record, end->ready, end->device->compute));
    S1F_TRY(S1F_CU(driver, stream_wait_event, end->stream, end->ready, 0));
    for (int32_t i = 0; i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        char *host = end->staging + tensor->offset;
        if (tensor->bytes > 0)
            S1F_TRY(S1F_CU(driver, copy_to_host, host, (s1f_cu_address)(uintptr_t)tensors[i], (size_t)tensor->bytes,
                           end->stream));
        tensors[i] = host;
    }
    return S1F_CU(driver, stream_synchronize, end->stream);
}

s1f_status s1f_device_end_from_host(s1f_device_end *end, const s1f_device_place *place)
{
    const s1f_driver *driver = end->device->driver;
    int64_t bytes = place->message->payload_bytes;
    S1F_TRY(S1F_CU(driver, stream_wait_event, end->stream, place->freed, 0));
    if (bytes > 0)
        S1F_TRY(S1F_CU(driver, copy_from_host, place->address, place->host_payload, (size_t)bytes, end->stream));
    return S1F_CU(driver, stream_synchronize, end->stream);
}
