/* p2p.h - point-to-point transfers between neighbouring stages: one interface, one transport behind each edge.
 *
 * An edge is directed and first-in first-out. The receiver owns its places. POST n: place is free for message n. SEND n:
 * waits for POST n, then puts header and payload into the place. WAIT n: waits for SEND n. The two directions between two
 * ranks are two edges and never wait for each other. Both ends know (sequence, place) of every message from the lowered
 * program; the header says what the message is, and WAIT checks it: a mismatch is an error, never silent corruption.
 *
 * Threads. An edge end is used by one thread. Nothing here takes Python's GIL, except transports that are Python
 * callbacks; callers hold no GIL. */
#ifndef S1F_P2P_H
#define S1F_P2P_H

#include "dtype.h"
#include "status.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
    S1F_MAX_TENSORS = 16,    /* tensors of one stage's output */
    S1F_MAX_DIMS = 8,
    S1F_HEADER_BYTES = 2048, /* a place is a header, then the payload */
    S1F_PAYLOAD_ALIGNMENT = 64
};

enum { S1F_TENSOR_REQUIRES_GRAD = 1, S1F_TENSOR_NONE = 2 /* a gradient that does not exist: no bytes follow */ };

typedef struct {
    int32_t dtype, flags, ndim, reserved;
    int64_t sizes[S1F_MAX_DIMS]; /* contiguous, row-major */
    int64_t offset, bytes;       /* in the payload; offset is a multiple of S1F_PAYLOAD_ALIGNMENT */
} s1f_tensor_header;

typedef struct { /* what a message is */
    uint32_t magic, version;
    int64_t step;                 /* the engine's count of steps */
    int64_t sequence;             /* number on the edge within the step */
    int32_t source_stage, destination_stage;
    int32_t pass, microbatch, segment; /* of the unit that produced it */
    int32_t training;             /* 1 step, 0 eval */
    int64_t sequence_length, offset, length; /* tokens: whole sequence, first of the segment, of the segment */
    int64_t payload_bytes;
    int32_t num_tensors, reserved;
    s1f_tensor_header tensors[S1F_MAX_TENSORS];
} s1f_message;

_Static_assert(sizeof(s1f_message) <= S1F_HEADER_BYTES, "the header must fit its place");

/* -- what the ranks of a pipeline share: progress and failure ------------------------------------------------- */

typedef struct s1f_group s1f_group; /* one rank's view */

/* Bytes of the shared block for num_ranks ranks; zero-filled memory is a valid empty block. */
size_t s1f_group_block_bytes(int32_t num_ranks);
/* One rank's view of a block (borrowed, must outlive the group): memory of this process for threads and for ranks on
 * several hosts (a watcher thread then copies what others publish), shared memory for processes of one host.
 * interrupted: called about ten times a second while waiting, returns S1F_OK to go on (signals); may be NULL. */
s1f_status s1f_group_create(void *block, int32_t num_ranks, int32_t rank,
                            s1f_status (*interrupted)(void *context), void *context, s1f_group **out);
void s1f_group_free(s1f_group *group);
/* How long a peer may make no progress, and how long to spin before sleeping (0: never spin). */
void s1f_group_set_limits(s1f_group *group, int64_t timeout_ns, int64_t spin_ns);
/* This rank's progress: what it does now ("F2.1", "entered step 7"; cut at 47 bytes). Also refreshes its time. */
void s1f_group_progress(s1f_group *group, const char *what);
/* The same for another rank, as learnt by a watcher. age_ns: how long ago it was. */
void s1f_group_set_progress(s1f_group *group, int32_t rank, const char *what, int64_t age_ns);
/* Ends the step on every rank: the first text wins; wakes every waiter. */
void s1f_group_fail(s1f_group *group, int32_t rank, const char *text);
/* S1F_ERR_PEER with rank and text once somebody failed. */
s1f_status s1f_group_check(const s1f_group *group);
/* The rank that failed first, -1 if none; its text. Borrowed. */
int32_t s1f_group_failed_rank(const s1f_group *group, const char **text);
void s1f_group_clear(s1f_group *group); /* forgets the failure: all ranks have left the step */

/* -- edges ------------------------------------------------------------------------------------------------------- */

typedef struct s1f_edge_end s1f_edge_end; /* one end of one directed edge */

typedef struct { /* a transport: how messages move. One static table per transport file. */
    const char *name;
    s1f_status (*begin_step)(s1f_edge_end *end, int32_t num_places);
    s1f_status (*post)(s1f_edge_end *end, int64_t sequence, int32_t place);
    s1f_status (*wait)(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message **message);
    s1f_status (*send)(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message *message,
                       const void *const *tensors);
    void (*free)(s1f_edge_end *end);
} s1f_transport;

struct s1f_edge_end { /* head of every transport's own struct */
    const s1f_transport *transport;
    s1f_group *group;      /* borrowed */
    int32_t peer_rank;
    int32_t is_receiver;
    char text[48];         /* "activations of stage 0 to 1": for messages */
};

/* Calls into the transport; each may block as its comment above says. A failure names the edge and the sequence. */
s1f_status s1f_p2p_begin_step(s1f_edge_end *end, int32_t num_places);
s1f_status s1f_p2p_post(s1f_edge_end *end, int64_t sequence, int32_t place);
/* *message: borrowed, valid until the place is posted again; payload at (char *)message + S1F_HEADER_BYTES. */
s1f_status s1f_p2p_wait(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message **message);
/* message->num_tensors data pointers; fills offsets, payload_bytes, magic, version itself. The data may be reused when it returns. */
s1f_status s1f_p2p_send(s1f_edge_end *end, int64_t sequence, int32_t place, s1f_message *message,
                        const void *const *tensors);
void s1f_edge_end_free(s1f_edge_end *end); /* NULL is fine */

/* S1F_ERR_STATE naming both unless the message is the expected one: step, sequence, stages, pass, microbatch, segment,
 * training. */
s1f_status s1f_message_check(const s1f_message *message, const s1f_message *expected);

/* -- arena: places in memory that both ends map; behind loopback (threads) and shm (processes) -------------------- */

/* Address space of one edge. Pages appear as they are touched, so it may be far larger than memory: no message outgrows
 * its place and no handshake is needed (place bytes = arena bytes / places). */
#define S1F_ARENA_BYTES (INT64_C(1) << 40)

/* An end over an arena that both ranks map. memory: zero-filled at first, `bytes` long, borrowed; process_shared: 1
 * across processes. hangup_fd: a socket whose hang-up means that the peer died, or -1. */
s1f_status s1f_arena_end_create(s1f_group *group, void *memory, int64_t bytes, int32_t process_shared, int hangup_fd,
                                int32_t peer_rank, int32_t is_receiver, const char *text, s1f_edge_end **out);
/* Physical bytes of the places of a step with this many places and this largest payload: what a plan reports. */
int64_t s1f_arena_place_bytes(int64_t payload_bytes);

#endif
