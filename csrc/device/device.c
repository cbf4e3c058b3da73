/* device.c - a GPU's context and the event that marks where a unit starts. */
#include "device.h"

#include <stdlib.h>

s1f_status s1f_device_enter(const s1f_device *device)
{
    return s1f_driver_status(device->driver, device->driver->context_push(device->context), "cuCtxPushCurrent");
}

void s1f_device_leave(const s1f_device *device)
{
    s1f_cu_context context;
    device->driver->context_pop(&context);
}

s1f_status s1f_device_create(const char *driver_path, int32_t ordinal, s1f_device **out)
{
    const s1f_driver *driver;
    s1f_status status = s1f_driver_load(driver_path, &driver);
    if (status != S1F_OK)
        return status;
    s1f_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a device");
    device->driver = driver;
    device->ordinal = ordinal;
    status = s1f_driver_status(driver, driver->device_get(&device->device, ordinal), "cuDeviceGet");
    if (status == S1F_OK)
        status = s1f_driver_status(driver, driver->context_retain(&device->context, device->device),
                                   "cuDevicePrimaryCtxRetain");
    if (status == S1F_OK && (status = s1f_device_enter(device)) == S1F_OK) {
        status = s1f_driver_status(driver, driver->event_create(&device->unit_start, S1F_CU_EVENT_DISABLE_TIMING),
                                   "cuEventCreate");
        s1f_device_leave(device);
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
    if (device->unit_start != NULL && s1f_device_enter(device) == S1F_OK) {
        device->driver->event_destroy(device->unit_start);
        s1f_device_leave(device);
    }
    if (device->context != NULL)
        device->driver->context_release(device->device);
    free(device);
}

void s1f_device_begin_step(s1f_device *device, s1f_cu_stream compute)
{
    device->compute = compute;
    device->unit_started = 0;
}

s1f_status s1f_device_begin_unit(s1f_device *device)
{
    s1f_status status = s1f_device_enter(device);
    if (status != S1F_OK)
        return status;
    status = s1f_driver_status(device->driver, device->driver->event_record(device->unit_start, device->compute),
                               "cuEventRecord");
    device->unit_started = 1;
    s1f_device_leave(device);
    return status;
}

s1f_status s1f_device_free_bytes(const s1f_device *device, int64_t *bytes)
{
    size_t unused = 0, total;
    s1f_status status = s1f_device_enter(device);
    if (status != S1F_OK)
        return status;
    status = s1f_driver_status(device->driver, device->driver->memory_info(&unused, &total), "cuMemGetInfo");
    s1f_device_leave(device);
    *bytes = (int64_t)unused;
    return status;
}
