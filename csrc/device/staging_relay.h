/* staging_relay.h - a thread that joins a ring of pinned memory to the ring of another host, over a TCP connection.
 *
 * Each of the two ends has a ring of its own (staging_end.h), and a thread that does to it what the other rank's stream
 * does to a ring that both map:
 *
 *     sender's thread    in order: waits until `written` of the message's slot says n; sends it; `drained` says n
 *     receiver's thread  takes the next message from the connection; waits until `drained` says that the slot's last
 *                        message has left it; receives the bytes; `written` says n
 *
 * So no host waits for a copy, and no stream takes bytes that have not come.
 *
 * The other rank may be a step behind, and hears late of a failure. What a failed step still sends may be wrong, as the
 * streams of its rank have been released: so each message ends with a word that says whether its step still went well
 * when its last byte was read, and nobody is given one that says no. */
#ifndef S1F_STAGING_RELAY_H
#define S1F_STAGING_RELAY_H

#include "../core/status.h"

#include <stdatomic.h>
#include <stdint.h>

enum { S1F_STAGING_SLOTS = 4096 };

typedef struct { /* the first bytes of a ring, by slot: position (step, message) of the last message */
    _Atomic uint64_t written[S1F_STAGING_SLOTS], drained[S1F_STAGING_SLOTS];
} s1f_staging_ring;

typedef struct s1f_staging_relay s1f_staging_relay;

/* Starts the thread. ring: borrowed; as many bytes on both hosts. fd: of the connection; it stays the caller's, and
 * the relay has a duplicate. S1F_ERR_SYSTEM: no thread, or no descriptor. */
s1f_status s1f_staging_relay_create(int fd, int32_t is_receiver, s1f_staging_ring *ring, int64_t ring_bytes,
                                    s1f_staging_relay **out);
/* Ends the thread, whatever it waits for, and the connection. NULL is fine. */
void s1f_staging_relay_free(s1f_staging_relay *relay);
/* Sender: the message that the GPU writes into a slot goes next. stride: bytes from slot to slot. Does not wait. */
s1f_status s1f_staging_relay_send(s1f_staging_relay *relay, int32_t slot, int64_t stride, uint64_t position,
                                  int64_t bytes);
/* This rank's step has failed: what it has sent in it and is not on its way is worth nothing, and it does not read what
 * came. Before any stream of the rank is released. */
void s1f_staging_relay_disown(s1f_staging_relay *relay, int64_t step);
/* Sender: 1 if its slots may be overwritten, as it disowns this step and no message of an earlier one is in them. A
 * receiver that has not taken these for so long gets none of them: the connection ends. */
int s1f_staging_relay_may_release(s1f_staging_relay *relay, int64_t step, int64_t patience_ns);
/* Sender: 1 once all is on its way. */
int s1f_staging_relay_is_idle(s1f_staging_relay *relay);
/* S1F_ERR_STATE once the connection is broken; or has ended well, if this end still awaits a message. */
s1f_status s1f_staging_relay_check(const s1f_staging_relay *relay, int32_t awaits);

#endif
