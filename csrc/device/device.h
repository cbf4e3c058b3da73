/* device.h - one GPU as a rank sees it: its context, the stream that computes, and when each unit ran there.
 *
 * Times of units are timed events on the stream that computes: a unit's start comes after all that it waits for, its
 * end after all that it has started. Nothing waits for them within a step. They are read after it, as nanoseconds of
 * the host's monotonic clock, so that ranks can be compared: an event for which the host waits joins the two clocks. */
#ifndef S1F_DEVICE_H
#define S1F_DEVICE_H

#include "driver.h"

typedef struct { /* one unit of the step; events are made once and used again by every step */
    s1f_cu_event start, end;
} s1f_device_unit;

typedef struct s1f_device {
    const s1f_driver *driver;
    int device; /* CUdevice */
    s1f_cu_context context;
    s1f_cu_stream compute;    /* the stream of the caller's kernels; NULL: the default stream */
    s1f_cu_event first, last; /* recorded there at the step's begin, and when its times are read */
    int64_t first_ns;         /* when the first happened, on the host's clock, once times are settled */
    s1f_device_unit *units;   /* units of the step, in the order of their begins */
    int64_t num_units, capacity;
    int32_t is_open;   /* the last unit has no end yet */
    int64_t num_steps; /* steps that have begun */
    /* Work on the GPU does not end, as a copy for a peer that has died: to free or close anything there would wait for
     * that work, in a real driver for ever. So all memory there stays. */
    int32_t is_stuck;
    /* Makes torch give back its free memory on the GPU. NULL: no torch. */
    void (*make_room)(void *context);
    void *room_context;
} s1f_device;

/* Retains the GPU's primary context, the one that torch uses. driver_path NULL: the system's driver. */
s1f_status s1f_device_create(const char *driver_path, int32_t ordinal, s1f_device **out);
void s1f_device_free(s1f_device *device); /* NULL is fine */

/* Calls of the driver stand between these two, which make the GPU's context the thread's. */
s1f_status s1f_device_enter(const s1f_device *device);
s1f_status s1f_device_leave(const s1f_device *device, s1f_status status); /* returns `status` */

/* Waits until the clock (s1f_now_ns) is there, or not at all: 1 once all that the stream was given has ended, else 0;
 * -1, with an error recorded: the GPU has failed. */
int s1f_device_is_idle_by(const s1f_device *device, s1f_cu_stream stream, int64_t until_ns);

/* The stream on which the units of the next step compute. */
s1f_status s1f_device_begin_step(s1f_device *device, s1f_cu_stream compute);
/* Called before the work of each unit is started, and after. A unit that is begun again before its end has its start
 * then; a unit whose end is set keeps that end. */
s1f_status s1f_device_begin_unit(s1f_device *device);
s1f_status s1f_device_restart_unit(s1f_device *device);
s1f_status s1f_device_end_unit(s1f_device *device);
/* The event at the start of the last unit that has begun in this step; NULL: there is none yet. */
s1f_cu_event s1f_device_unit_start(const s1f_device *device);

/* After a step: waits until all of it has happened, and joins the clocks. */
s1f_status s1f_device_settle_times(s1f_device *device);
/* After that: when a timed event of the step happened, on the host's monotonic clock. */
s1f_status s1f_device_time_of(const s1f_device *device, s1f_cu_event event, int64_t *ns);

#endif
