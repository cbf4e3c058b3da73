/* edge_proof.h - what an edge between GPUs shows at set-up, before any message depends on it.
 *
 * Messages of some sizes go over the edge as those of a step do, through one place, with bytes that no other message
 * has; the receiver compares what has arrived in its place on the GPU. Until `end` nothing that fails is told to the
 * group: a refusal, wrong bytes and a transfer that does not end are this end's alone (S1F_ERR_STATE, _MEMORY), and the
 * ranks then agree on another mover. A peer that dies, or a rank that fails, ends all as in a step.
 *
 * The order of the calls, which both ends keep; between two lines the ranks exchange whether all went well:
 *     begin
 *     post                  receiver
 *     send, receive         a one-sided mover's send first, else both at once
 *     give_up               after an error: nothing more is begun
 *     end */
#ifndef S1F_EDGE_PROOF_H
#define S1F_EDGE_PROOF_H

#include "device_end.h"

/* The end was made while its watchdog proves (s1f_watchdog_prove), and a step has begun (s1f_group_begin_step,
 * s1f_device_begin_step). */
s1f_status s1f_edge_proof_begin(s1f_edge_end *end);
s1f_status s1f_edge_proof_post(s1f_edge_end *end, int64_t sequence, int64_t bytes);
/* Returns once the transfer has ended on this side, with the nanoseconds that it took. */
s1f_status s1f_edge_proof_send(s1f_edge_end *end, int64_t sequence, int64_t bytes, int64_t *ns);
s1f_status s1f_edge_proof_receive(s1f_edge_end *end, int64_t sequence, int64_t bytes, int64_t *ns);
/* Aborts what is under way. 0: it does not end, so neither the end nor what it uses can be freed. */
int s1f_edge_proof_give_up(s1f_edge_end *end);
/* From here on failures are the group's again. */
void s1f_edge_proof_end(s1f_edge_end *end);

#endif
