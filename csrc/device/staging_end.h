/* staging_end.h - edges whose payloads go through pinned host memory that both ranks of a host map.
 *
 * Where GPUs cannot reach each other: a copy to the host on the sender's stream, a copy from there on the receiver's,
 * and no host waits for either. Each place of the edge has a slot of the ring, and each slot two words:
 *
 *     SEND n     stream: waits until `drained` of the slot says that its last message has left it; copies; writes n to
 *                `written`
 *     RECEIVE n  stream: waits until `written` says n; copies; writes n to `drained`
 *
 * n is (step, message), so that no step waits for what another one left. The words lie in pinned memory: where a step
 * has failed, each end lets its own stream go on by writing the word that this one waits for (`release`). The ring
 * grows with the largest message, in the first step of a shape, and each process pins it for itself.
 *
 * Between two hosts each rank has a ring of its own, and a relay (staging_relay.h) does to it what the other rank's
 * stream would: nothing else differs. */
#ifndef S1F_STAGING_END_H
#define S1F_STAGING_END_H

#include "device_end.h"

/* ring: an arena end of its own between these two ranks (arena.h), of which no step begins; control and ring are
 * borrowed and outlive the end. */
s1f_status s1f_staging_end_create(s1f_edge_end *control, s1f_edge_end *ring, s1f_watchdog *watchdog,
                                  s1f_edge_end **out);
/* Before its first step, if the ring is this end's alone (as many bytes as the other end's): starts the relay. fd: a
 * connection of byte streams to the other end; stays the caller's. */
s1f_status s1f_staging_end_connect(s1f_edge_end *end, int fd);

#endif
