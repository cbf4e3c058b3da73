/* watchdog.h - looks after the transfers between GPUs that the host does not wait for.
 *
 * One thread per rank and device. A failed group, a peer that is gone, an error of a transfer, and a transfer that has
 * started and does not end: each ends the step on every rank and aborts the transfers, so that a host which waits for
 * the GPU elsewhere comes back. */
#ifndef S1F_WATCHDOG_H
#define S1F_WATCHDOG_H

#include "../run/group.h"
#include "device.h"

#include <pthread.h>

struct s1f_device_end;

typedef struct s1f_watchdog { /* for device_end.c and watchdog.c alone */
    s1f_group *group;
    s1f_device *device;
    pthread_t thread;
    pthread_mutex_t lock; /* for the fields of ends that both threads touch, and for every call of a mover */
    int32_t is_ending;
    int64_t progress_ns;
    int64_t proof_ns; /* not 0: its ends prove themselves first, each wait within so long (device_end.h) */
    struct s1f_device_end *ends;
} s1f_watchdog;

/* group and device are borrowed. A transfer that has started and does not end for as long as the group's limit, while
 * no other of the rank ended either, is a failure. */
s1f_status s1f_watchdog_create(s1f_group *group, s1f_device *device, int64_t proof_ns, s1f_watchdog **out);
void s1f_watchdog_free(s1f_watchdog *watchdog); /* after its ends; NULL is fine */
/* Whether its ends, and the stream that computes, end by then all that they have begun. If not, the device is stuck.
 * Its context is current. */
int s1f_watchdog_is_idle_by(s1f_watchdog *watchdog, int64_t until_ns);

#endif
