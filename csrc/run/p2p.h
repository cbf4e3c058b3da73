/* p2p.h - point-to-point transfers between neighbouring stages: one interface, one transport behind each edge.
 *
 * An edge is directed and first-in first-out. The receiver owns its places. POST n: place is free for message n. SEND
 * n: waits for POST n, then puts header and payload into the place. WAIT n: waits for SEND n. The two directions
 * between two ranks are two edges and never wait for each other. RECEIVE n, where a program has it, lets the transfer
 * start: a transport whose transfers need both ends needs it. Both ends know (sequence, place) of every message from
 * the lowered program; the header says what the message is, and WAIT checks it: a mismatch is an error, never silent
 * corruption.
 *
 * Threads. An edge end is used by one thread. Nothing here takes Python's GIL, except transports that are Python
 * callbacks; callers hold no GIL. */
#ifndef S1F_P2P_H
#define S1F_P2P_H

#include "../core/dtype.h"
#include "../core/status.h"
#include "group.h"

#include <stddef.h>
#include <stdint.h>

enum {
    S1F_MAX_TENSORS = 16, /* tensors of one stage's output */
    S1F_MAX_DIMS = 8,
    S1F_HEADER_BYTES = 2048, /* a place is a header, then the payload */
    S1F_PAYLOAD_ALIGNMENT = 64
};

enum { S1F_TENSOR_REQUIRES_GRAD = 1, S1F_TENSOR_NONE = 2 /* the gradient does not exist: no bytes follow */ };

typedef struct {
    int32_t dtype, flags, ndim, reserved;
    int64_t sizes[S1F_MAX_DIMS]; /* contiguous, row-major */
    int64_t offset, bytes;       /* in the payload; offset is a multiple of S1F_PAYLOAD_ALIGNMENT */
} s1f_tensor_header;

typedef struct { /* header of a message */
    uint32_t magic, version;
    uint64_t checksum; /* of the header from here on */
    int64_t step;      /* the engine's count of steps */
    int64_t sequence;  /* number on the edge within the step */
    int32_t source_stage, destination_stage;
    int32_t pass, microbatch, segment;       /* the unit that produced the message */
    int32_t training;                        /* 1 step, 0 eval */
    int64_t sequence_length, offset, length; /* tokens: whole sequence, first of the segment, of the segment */
    int64_t payload_bytes;
    int32_t num_tensors;
    int32_t on_device; /* 1: the payload is not behind this header but in a GPU's memory */
    s1f_tensor_header tensors[S1F_MAX_TENSORS];
} s1f_message;

_Static_assert(sizeof(s1f_message) <= S1F_HEADER_BYTES, "the header must fit its place");

typedef struct s1f_edge_end s1f_edge_end; /* one end of one directed edge */

typedef struct {             /* a transport: how messages move. One static table per transport file. */
    int32_t is_between_gpus; /* 1: payloads may lie in a GPU's memory */
    s1f_status (*begin_step)(s1f_edge_end *end, int32_t num_places);
    s1f_status (*post)(s1f_edge_end *end, int64_t sequence, int32_t place);
    s1f_status (*receive)(s1f_edge_end *end, int64_t sequence, int32_t place); /* NULL: nothing to do */
    int (*has_come)(s1f_edge_end *end, int64_t sequence);                      /* NULL: cannot tell */
    s1f_status (*wait)(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message **message,
                       const void **payload);
    /* After the step, once the device's times are settled: when message `sequence` had come, on the monotonic clock.
     * NULL: when WAIT had returned. */
    s1f_status (*arrived)(s1f_edge_end *end, int64_t sequence, int64_t *ns);
    s1f_status (*send)(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message *message,
                       const void *const *tensors);
    s1f_status (*count_sent)(s1f_edge_end *end, int64_t *count); /* NULL: `send` has read the data when it returns */
    s1f_status (*finish)(s1f_edge_end *end, int32_t failed);     /* NULL: nothing to do */
    void (*free)(s1f_edge_end *end);
} s1f_transport;

struct s1f_edge_end { /* head of every transport's own struct */
    const s1f_transport *transport;
    s1f_group *group; /* borrowed */
    int32_t peer_rank;
    int32_t is_receiver;
    int hangup_fd;                  /* a socket that hangs up when the peer dies (borrowed), or -1 */
    char text[S1F_EDGE_TEXT_BYTES]; /* "activations of stage 0 to 1": for messages */
};

/* Calls into the transport; each may block as its comment above says. A failure names the edge and the sequence.
 * begin_step comes after s1f_group_begin_step. POSTs, and SENDs, of a step count from 0. */
s1f_status s1f_p2p_begin_step(s1f_edge_end *end, int32_t num_places);
s1f_status s1f_p2p_post(s1f_edge_end *end, int64_t sequence, int32_t place);
s1f_status s1f_p2p_receive(s1f_edge_end *end, int64_t sequence, int32_t place);
/* *message and *payload: borrowed, valid until the place is posted again. On a GPU the payload is there for what is
 * started after this on the stream that computes. */
s1f_status s1f_p2p_wait(s1f_edge_end *end, int64_t sequence, int32_t place, const s1f_message **message,
                        const void **payload);
/* Whether `wait` would return without waiting: a posted message has come, or the step has failed. Also 1 where the
 * transport cannot tell. */
int s1f_p2p_has_come(s1f_edge_end *end, int64_t sequence);
/* message->num_tensors data pointers; fills sequence, tensor bytes and offsets, and payload_bytes, and seals the
 * header. The data of message n may be reused once s1f_p2p_count_sent says more than n; unchanged until then. */
s1f_status s1f_p2p_send(s1f_edge_end *end, int64_t sequence, int32_t place, s1f_message *message,
                        const void *const *tensors);
/* Messages of this step whose data is no longer read. */
s1f_status s1f_p2p_count_sent(s1f_edge_end *end, int64_t *count);
/* Ends a step: all that was received is there, and what is started after this on the stream that computes may overwrite
 * what was sent. failed: the step is given up, and so is what is under way. */
s1f_status s1f_p2p_finish(s1f_edge_end *end, int32_t failed);
void s1f_edge_end_free(s1f_edge_end *end); /* NULL is fine */

/* Why an end waits for its peer. purpose: "waiting for"; sequence: -1: none. */
s1f_wait_reason s1f_edge_reason(const s1f_edge_end *end, const char *purpose, int64_t sequence);

/* Bytes behind the header of the message in a place, -1 if there is no message: for transports that move bytes. */
int64_t s1f_message_payload_bytes(const void *place);

/* Makes magic, version and checksum those of a header whose other fields stand. At most S1F_MAX_TENSORS tensors. */
void s1f_message_seal(s1f_message *message);
/* S1F_ERR_STATE unless a place holds message `sequence` of its edge as it was sent, and every tensor lies within its
 * payload. Then its header may be followed; what it says of tokens is not looked at here. The payload has no
 * checksum. */
s1f_status s1f_message_check_sound(const s1f_message *message, int64_t sequence);
/* S1F_ERR_STATE naming both unless the message is the expected one: step, sequence, stages, direction, microbatch,
 * segment, training. */
s1f_status s1f_message_check(const s1f_message *message, const s1f_message *expected);

#endif
