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

/* For transports that use an arena for headers only, and leave notes of their own between header and payload. Both ends
 * map it; the receiver owns a place until it posts it, the sender from then (s1f_arena_wait_posted) until it has
 * sent. */
void *s1f_arena_place(s1f_edge_end *end, int32_t place);
s1f_status s1f_arena_wait_posted(s1f_edge_end *end, int64_t sequence);
_Atomic int32_t *s1f_arena_num_open(s1f_edge_end *end); /* the sender counts the receiver's memories that it has open */

/* Moves a message between two arenas that are not shared, each private to its end: receives one of at most so many
 * bytes of payload into a place, or sends one of just so many from there. Called by the thread of the end, without the
 * GIL; must not block on the peer: completion comes by s1f_relay_done, from any thread. */
typedef s1f_status s1f_relay(void *context, int64_t position, void *place, int64_t payload_bytes);

/* An end over an arena that both ranks map, or over one of its own and a relay (NULL: none), to which context belongs.
 * memory: a mapping, zero-filled at first, `bytes` long. Memory and context are borrowed, and must outlive the end. */
s1f_status s1f_arena_end_create(s1f_group *group, void *memory, int64_t bytes, s1f_relay *relay, void *context,
                                int32_t peer_rank, int32_t is_receiver, const char *text, s1f_edge_end **out);
/* The messages up to this position are complete: they have come (receiver), or their places may be reused (sender). */
void s1f_relay_done(s1f_edge_end *end, int64_t position);
/* Sender: waits until every place may be reused. */
s1f_status s1f_relay_flush(s1f_edge_end *end);

#endif
