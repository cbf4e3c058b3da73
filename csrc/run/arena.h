/* arena.h - edges whose places lie in mapped memory.
 *
 * Shared by both ends: loopback (threads) and shm (processes; nothing differs but who maps it), the sender writes
 * straight into the receiver's place. Private to each end, with a relay in between: c10d. */
#ifndef S1F_ARENA_H
#define S1F_ARENA_H

#include "p2p.h"

/* Address space of one edge. Pages appear as they are touched, so it may be far larger than memory: no message outgrows
 * its place and no handshake is needed (place bytes = arena bytes / places). It is less where address space is limited.
 * Pages stay from step to step; a step with another number of places gives them back. */
#define S1F_ARENA_BYTES (INT64_C(1) << 40)

typedef struct s1f_mapping { /* memory mapped from a file descriptor (memfd), shared */
    void *memory;
    int64_t bytes;
} s1f_mapping;

/* Maps `bytes` of fd, which stays the caller's. S1F_ERR_MEMORY where address space is limited (ulimit -v). */
s1f_status s1f_mapping_create(int fd, int64_t bytes, s1f_mapping **out);
void s1f_mapping_free(s1f_mapping *mapping); /* NULL is fine */

/* An end over an arena that both ranks map, unless it uses a relay. memory: a mapping, zero-filled at first, `bytes`
 * long, borrowed. hangup_fd: a socket whose hang-up means that the peer died (borrowed), or -1. */
s1f_status s1f_arena_end_create(s1f_group *group, void *memory, int64_t bytes, int hangup_fd, int32_t peer_rank,
                                int32_t is_receiver, const char *text, s1f_edge_end **out);

/* For transports that use an arena for headers only, and leave notes of their own between header and payload. Both ends
 * map it; the receiver owns a place until it posts it, the sender from then (s1f_arena_wait_posted) until it has
 * sent. */
void *s1f_arena_place(s1f_edge_end *end, int32_t place);
s1f_status s1f_arena_wait_posted(s1f_edge_end *end, int64_t sequence);
_Atomic int32_t *s1f_arena_num_open(s1f_edge_end *end); /* the sender counts the receiver's memories that it has open */

/* Moves messages between two arenas that are not shared, each private to its end. It is told of an event:
 *     begin_step   number: the step; bytes: the payload that a place holds
 *     post         receiver: message `number` is to be received into this place
 *     send         sender: message `number` is to be sent from this place, with so many bytes of payload
 * Called by the thread of the end, without the GIL; must not block on the peer: completion comes by s1f_relay_done,
 * from any thread. */
typedef s1f_status s1f_relay(void *context, const char *event, int64_t number, void *place, int64_t bytes);

/* For an end that is new. context is borrowed, and must outlive the end. */
void s1f_arena_use_relay(s1f_edge_end *end, s1f_relay *relay, void *context);
/* Message `sequence` of `step` is complete: it has come (receiver), or its place may be reused (sender). In order. */
void s1f_relay_done(s1f_edge_end *end, int64_t step, int64_t sequence);
/* Sender: waits until every place may be reused. */
s1f_status s1f_relay_flush(s1f_edge_end *end);

#endif
