/* device.h - one GPU as a rank's transports see it: its context, the stream that computes, and where a unit starts. */
#ifndef S1F_DEVICE_H
#define S1F_DEVICE_H

#include "driver.h"

typedef struct {
    const s1f_driver *driver;
    int32_t ordinal;
    int device; /* CUdevice */
    s1f_cu_context context;
    s1f_cu_stream compute;   /* the stream of the caller's kernels; NULL: the default stream */
    s1f_cu_event unit_start; /* recorded there before each unit */
    int32_t unit_started;    /* in this step */
} s1f_device;

/* Retains the GPU's primary context, the one that torch uses. driver_path NULL: the system's driver. */
s1f_status s1f_device_create(const char *driver_path, int32_t ordinal, s1f_device **out);
void s1f_device_free(s1f_device *device); /* NULL is fine */

/* Calls of the driver go between these: they make the GPU's context the thread's. */
s1f_status s1f_device_enter(const s1f_device *device);
void s1f_device_leave(const s1f_device *device);

/* The stream on which the units of the next step compute. */
void s1f_device_begin_step(s1f_device *device, s1f_cu_stream compute);
/* Called before the work of each unit is started. */
s1f_status s1f_device_begin_unit(s1f_device *device);

/* Bytes that are free on the GPU. */
s1f_status s1f_device_free_bytes(const s1f_device *device, int64_t *bytes);

#endif
