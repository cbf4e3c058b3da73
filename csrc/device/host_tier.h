/* host_tier.h - pinned memory of the host, to which a GPU's copy engines move what units have saved, and back.
 *
 * What moves is a load: the parts of one unit, under a number of the caller's, who also says where in the room each
 * part lies. Copies run on two streams of their own, one for each way, and the host waits for none of them:
 *   out   the stream waits for what compute has been given so far, then copies
 *   wait  compute waits for the end of that copy: whatever is started there later may use the memory that has gone
 *   in    the caller has taken memory on compute; the stream waits for what compute has been given so far, then copies
 *   wait  compute waits for the end of that copy
 * So a load's room is written only after compute has waited for the last copy that used it. Room grows in the first
 * step of a shape, for equal steps take the same room: later no memory is pinned. Used by one thread. */
#ifndef S1F_HOST_TIER_H
#define S1F_HOST_TIER_H

#include "device.h"

typedef struct s1f_host_tier s1f_host_tier;

typedef struct {
    void *data;            /* on the GPU */
    int64_t bytes, offset; /* offset: in the room; ascending within a load */
} s1f_tier_part;

typedef struct {
    int64_t room_bytes;
    int64_t bytes_out, bytes_in; /* of the step's copies that have ended by now */
    int64_t ns_out, ns_in;       /* that these took, without the time in which they waited for others */
} s1f_host_tier_facts;

/* device is borrowed; s1f_device_begin_step names the stream that computes. check_host: refuses so many bytes more of
 * pinned memory where the host is short of them, before they are asked for; may be NULL. *out is the caller's, and
 * untouched on error. */
s1f_status s1f_host_tier_create(s1f_device *device, s1f_status (*check_host)(void *context, int64_t bytes),
                                void *context, s1f_host_tier **out);
/* Waits for the copies that run. NULL is fine; a forked process leaves the tier as it is. */
void s1f_host_tier_free(s1f_host_tier *tier);

/* Before the units of a step. most_loads: that are out at once in it. S1F_ERR_STATE: copies have failed for good. */
s1f_status s1f_host_tier_begin_step(s1f_host_tier *tier, int64_t most_loads);
/* Begins to copy a load out, or back into memory of the same sizes. Memory of a part is the tier's until the wait, or
 * the reset. S1F_ERR_MEMORY where memory cannot be pinned: values and remedy. */
s1f_status s1f_host_tier_move(s1f_host_tier *tier, int32_t is_out, int64_t number, const s1f_tier_part *parts,
                              int32_t num_parts);
/* Makes the stream that computes wait for what was asked last of the load. */
s1f_status s1f_host_tier_wait(s1f_host_tier *tier, int64_t number);
/* Waits for the copies that run: afterwards nothing touches memory of a load. */
void s1f_host_tier_reset(s1f_host_tier *tier);

s1f_host_tier_facts s1f_host_tier_get_facts(s1f_host_tier *tier);
/* After a step whose times are settled (device.h): when the load was back, on the monotonic clock. */
s1f_status s1f_host_tier_came_back(const s1f_host_tier *tier, int64_t number, int64_t *ns);

#endif
