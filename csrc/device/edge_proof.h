/* edge_proof.h - the message by which an edge between GPUs proves itself at set-up, before any other depends on it.
 *
 * It goes over the edge as those of a step do. Until `end` nothing that fails is told to the group: a refusal and a
 * transfer that does not end are this end's alone (S1F_ERR_STATE, _MEMORY), and the ranks then agree on another mover.
 * A peer that dies, or a rank that fails, ends all as in a step.
 *
 * The order of the calls, which both ends keep; between two lines the ranks exchange whether all went well:
 *     post                  receiver
 *     send, receive         a one-sided mover's send first, else both at once
 *     end                   the sender's first; after an error the ends are closed instead */
#ifndef S1F_EDGE_PROOF_H
#define S1F_EDGE_PROOF_H

#include "device_end.h"

/* A step has begun (s1f_group_begin_step, s1f_device_begin_step), and the end's watchdog has a limit for proofs. */
s1f_status s1f_edge_proof_post(s1f_edge_end *end, int64_t bytes);
/* Both return once the transfer has ended on this side, with its nanoseconds. data: on the GPU; it may be
 * freed after that, or once the end is closed and keeps nothing. */
s1f_status s1f_edge_proof_send(s1f_edge_end *end, const void *data, int64_t bytes, int64_t *ns);
s1f_status s1f_edge_proof_receive(s1f_edge_end *end, int64_t bytes, const void **data, int64_t *ns);
/* From here on failures are the group's again. Gives back what places hold, and what was opened of the peer's. */
s1f_status s1f_edge_proof_end(s1f_edge_end *end);

#endif
