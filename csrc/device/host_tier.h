/* host_tier.h - a tier of pinned host memory, for units that compute on a GPU.
 *
 * Copies run on two streams of their own, one for each way, and the host waits for none of them:
 *   out   the stream waits for what compute has been given so far, then copies
 *   wait  compute waits for the end of that copy: whatever is started there later may use the memory that has gone
 *   in    the caller has taken memory on compute; the stream waits for what compute has been given so far, then copies
 *   wait  compute waits for the end of that copy
 * So a load's room is written only after compute has waited for the last copy that used it. Room grows in the first
 * step of a shape, for equal steps find the same room (tier.h): later no memory is pinned. */
#ifndef S1F_HOST_TIER_H
#define S1F_HOST_TIER_H

#include "../run/tier.h"
#include "device.h"

/* device is borrowed; s1f_device_begin_step names the stream that computes. check_host: refuses so many bytes more of
 * pinned memory where the host is short of them, before they are asked for; may be NULL. *out is the caller's
 * (s1f_tier_free, which waits for the copies that run) and untouched on error.
 * s1f_tier_out is S1F_ERR_MEMORY where memory cannot be pinned: values and remedy. */
s1f_status s1f_host_tier_create(s1f_device *device, s1f_status (*check_host)(void *context, int64_t bytes),
                                void *context, s1f_tier **out);

#endif
