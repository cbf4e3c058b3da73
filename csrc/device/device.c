/* device.c - a GPU's context, and the events that tell when units ran. */
#include "device.h"

#include "../core/pool.h"
#include "../run/group.h"

#include <stdlib.h>
#include <time.h>

s1f_status s1f_device_enter(const s1f_device *device)
{
    return S1F_CU(device->driver, context_push, device->context);
}

s1f_status s1f_device_leave(const s1f_device *device, s1f_status status)
{
    s1f_cu_context context;
    device->driver->context_pop(&context);
    return status;
}

int s1f_device_is_idle_by(const s1f_device *device, s1f_cu_stream stream, int64_t until_ns)
{
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    s1f_cu_result found;
    while ((found = device->driver->stream_query(stream)) == S1F_CU_ERROR_NOT_READY && s1f_now_ns() < until_ns)
        nanosleep(&pause, NULL);
    if (found == S1F_CU_ERROR_NOT_READY)
        return 0;
    return s1f_driver_status(device->driver, found, "cuStreamQuery") == S1F_OK ? 1 : -1;
}

s1f_status s1f_device_create(const char *driver_path, int32_t ordinal, s1f_device **out)
{
    const s1f_driver *driver;
    S1F_TRY(s1f_driver_load(driver_path, &driver));
    s1f_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a device");
    device->driver = driver;
    s1f_status status = S1F_CU(driver, device_get, &device->device, ordinal);
    if (status == S1F_OK)
        status = S1F_CU(driver, context_retain, &device->context, device->device);
    if (status == S1F_OK && (status = s1f_device_enter(device)) == S1F_OK) {
        status = s1f_driver_event_make(driver, &device->first, S1F_CU_EVENT_TIMED);
        if (status == S1F_OK)
            status = s1f_driver_event_make(driver, &device->last, S1F_CU_EVENT_TIMED);
        s1f_device_leave(device, status);
    }
    if (status != S1F_OK) {
        s1f_device_free(device);
        return s1f_fail_prefixed(status, "GPU %d: ", (int)ordinal);
    }
    *out = device;
    return S1F_OK;
}

void s1f_device_free(s1f_device *device)
{
    if (device == NULL)
        return;
    if (device->context != NULL && s1f_device_enter(device) == S1F_OK) {
        s1f_driver_event_destroy(device->driver, device->first);
        s1f_driver_event_destroy(device->driver, device->last);
        for (int64_t i = 0; i < device->capacity; i++) {
            s1f_driver_event_destroy(device->driver, device->units[i].start);
            s1f_driver_event_destroy(device->driver, device->units[i].end);
        }
        s1f_device_leave(device, S1F_OK);
    }
    if (device->context != NULL)
        device->driver->context_release(device->device);
    free(device->units);
    free(device);
}

/* -- when units run ------------------------------------------------------------------------------------------------ */

static s1f_status record(const s1f_device *device, s1f_cu_event event)
{
    return S1F_CU(device->driver, event_record, event, device->compute);
}

static s1f_status enter_and_record(const s1f_device *device, s1f_cu_event event)
{
    S1F_TRY(s1f_device_enter(device));
    return s1f_device_leave(device, record(device, event));
}

s1f_status s1f_device_begin_step(s1f_device *device, s1f_cu_stream compute)
{
    device->compute = compute;
    device->num_units = 0;
    device->is_open = 0;
    device->num_steps++;
    return enter_and_record(device, device->first);
}

/* Room and events for one unit more. */
static s1f_status make_room(s1f_device *device)
{
    S1F_TRY(s1f_array_grow(&device->units, &device->capacity, device->num_units + 1, sizeof *device->units,
                           "units' times on the GPU"));
    s1f_device_unit *unit = &device->units[device->num_units];
    S1F_TRY(s1f_driver_event_make(device->driver, &unit->start, S1F_CU_EVENT_TIMED));
    return s1f_driver_event_make(device->driver, &unit->end, S1F_CU_EVENT_TIMED);
}

s1f_status s1f_device_begin_unit(s1f_device *device)
{
    S1F_TRY(s1f_device_enter(device));
    s1f_status status = make_room(device);
    if (status == S1F_OK)
        status = record(device, device->units[device->num_units].start);
    if (status == S1F_OK) {
        device->num_units++;
        device->is_open = 1;
    }
    return s1f_device_leave(device, status);
}

s1f_status s1f_device_restart_unit(s1f_device *device)
{
    return device->is_open ? enter_and_record(device, device->units[device->num_units - 1].start) : S1F_OK;
}

s1f_status s1f_device_end_unit(s1f_device *device)
{
    if (!device->is_open)
        return S1F_OK;
    device->is_open = 0;
    return enter_and_record(device, device->units[device->num_units - 1].end);
}

s1f_cu_event s1f_device_unit_start(const s1f_device *device)
{
    return device->num_units == 0 ? NULL : device->units[device->num_units - 1].start;
}

/* -- reading the times --------------------------------------------------------------------------------------------- */

static s1f_status elapsed_ns(const s1f_device *device, s1f_cu_event event, int64_t *ns)
{
    float milliseconds = 0;
    s1f_status status = S1F_CU(device->driver, event_elapsed, &milliseconds, device->first, event);
    *ns = (int64_t)((double)milliseconds * 1e6);
    return status;
}

s1f_status s1f_device_settle_times(s1f_device *device)
{
    int64_t since = 0;
    S1F_TRY(s1f_device_enter(device));
    s1f_status status = record(device, device->last);
    if (status == S1F_OK)
        status = S1F_CU(device->driver, stream_synchronize, device->compute);
    int64_t now = s1f_now_ns();
    if (status == S1F_OK)
        status = elapsed_ns(device, device->last, &since);
    device->first_ns = now - since;
    return s1f_device_leave(device, status);
}

s1f_status s1f_device_time_of(const s1f_device *device, s1f_cu_event event, int64_t *ns)
{
    S1F_TRY(s1f_device_enter(device));
    s1f_status status = elapsed_ns(device, event, ns);
    *ns += device->first_ns;
    return s1f_device_leave(device, status);
}
