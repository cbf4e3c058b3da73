/* device_end.h - edges whose payloads stay in GPU memory: the part that NCCL's and the copy engine's share.
 *
 * Headers go over a control edge, which is an edge of host memory (arena.h): so credits, checks of messages, waiting,
 * failures and a lost peer are those of every other edge, and a rank knows each message before its data. The host never
 * waits for the GPU between two units: what a transfer needs is said to the GPU by events. Each end has a stream of its
 * own, on which its transfers run in order of message:
 *
 *     POST n     event `freed` on the stream that computes: all readers of the place have been started before
 *     RECEIVE n  host: waits for header n. Stream: after `freed`, and after the start of the last unit that was
 *                started, so that no transfer occupies the GPU long before it is due: receive, event `done`
 *     WAIT n     the stream that computes waits for `done`
 *     SEND n     host: waits for POST n, sends the header. Stream: after an event on the stream that computes: send,
 *                `done`
 *     finish     host: waits until what it received is there (so that no optimizer's step reads half a gradient)
 *
 * No receive is enqueued before its header has come, and whoever sent the header enqueues the send, and waits until it
 * is enqueued, before anything else. So each receive on a GPU ends without this host, and calls that wait for the whole
 * GPU (an allocation, loading a kernel) delay a step but cannot stop it for ever.
 *
 * Places are memory of the GPU. The first message of a size reserves all places of its edge that hold nothing: no later
 * one of its step allocates beside another edge's receive, and from the second step of a shape on nothing is allocated.
 * Movers whose sender writes into a place reserve the rest at the step's end. The watchdog (watchdog.h) looks after
 * what the host does not wait for. */
#ifndef S1F_DEVICE_END_H
#define S1F_DEVICE_END_H

#include "../core/schedule.h"
#include "../run/p2p.h"
#include "watchdog.h"

typedef struct s1f_device_end s1f_device_end;

typedef struct {
    s1f_cu_address address;
    int64_t capacity;    /* bytes, 0: none yet */
    uint64_t generation; /* counts the memories it has had */
    s1f_cu_event freed;  /* receiver: of the last POST */
    const s1f_message *message;
    const void *host_payload; /* of a message that came over the host */
} s1f_device_place;

typedef struct { /* one message of this step; events are made once and used again by every step */
    s1f_cu_event started, done;
    s1f_unit unit;   /* that produced it */
    int32_t is_over; /* nothing to wait for: it had no bytes, or went through host memory */
} s1f_transfer;

typedef struct { /* how bytes move. Called with the GPU's context current; a function may be NULL. */
    /* These two may wait. */
    s1f_status (*post)(s1f_device_end *end, int32_t place); /* receiver, before the place is granted */
    /* Sender. Clears message->on_device if the message has to go through host memory. */
    s1f_status (*prepare_send)(s1f_device_end *end, int64_t sequence, int32_t place, s1f_message *message);
    /* Enqueue on end->stream, under the watchdog's lock. NULL: every message goes through host memory, and the receiver
     * waits for it no sooner than WAIT. */
    s1f_status (*receive)(s1f_device_end *end, int32_t place, const s1f_message *message);
    s1f_status (*send)(s1f_device_end *end, int32_t place, const s1f_message *message, const void *const *tensors);
    int32_t is_one_sided; /* the send needs no receive, and its event has to be recorded when the header is read */
    /* The next three are called under the lock.
     * settled: 1 once the last call is enqueued, which may need the peer; -1, with an error recorded: it failed.
     * NULL: at once. */
    int (*settled)(s1f_device_end *end);
    void (*abort)(s1f_device_end *end); /* ends what is under way, from any thread, once */
    void (*leave)(s1f_device_end *end); /* starts to close what needs the peer to be closed */
    /* Nothing is under way. */
    void (*forget)(s1f_device_end *end); /* closes what it opened of the peer's memory */
    void (*close)(s1f_device_end *end);
} s1f_mover;

struct s1f_device_end { /* head of each mover's own struct */
    s1f_edge_end head;
    const s1f_mover *mover;
    s1f_edge_end *control; /* borrowed */
    s1f_watchdog *watchdog;
    s1f_device *device;
    s1f_cu_stream stream;
    s1f_cu_event ready; /* sender: the result is computed */
    s1f_device_place *places;
    int32_t num_places;
    s1f_transfer *transfers; /* by message */
    int64_t capacity, started, over;
    s1f_cu_address *retired; /* what places outgrew, where the sender writes into them: it stays to the end */
    int32_t num_retired;
    int64_t largest; /* receiver: payload so far */
    char *staging;   /* host memory of a message */
    int64_t staging_bytes;
    int64_t proof_ns; /* not 0: the end proves itself (edge_proof.h): what fails is its own, each wait ends so soon */
    int hangup_fd;
    int32_t is_aborted, is_finished, is_closed;
    struct s1f_device_end *next; /* of the watchdog's */
    /* the watchdog's: */
    int64_t seen_over, seen_started, stuck_since_ns;
};

/* A mover's struct of so many bytes, zero behind its head: stream, events, the control edge (borrowed, must outlive the
 * end). It is under the watchdog's eyes. */
s1f_status s1f_device_end_create(size_t bytes, const s1f_mover *mover, s1f_edge_end *control, s1f_watchdog *watchdog,
                                 s1f_device_end **out);
extern const s1f_transport s1f_device_transport;
/* An end whose messages all go through pageable host memory, over the control edge: it needs nothing but copies to and
 * from the host, which waits for two copies a message. */
s1f_status s1f_host_end_create(s1f_edge_end *control, s1f_watchdog *watchdog, s1f_edge_end **out);
/* Waits until the mover's end is connected to the peer's. */
s1f_status s1f_device_end_connect(s1f_edge_end *end);
/* Starts to close what needs the peer to be closed, and returns at once; closing the end waits for it. A rank that
 * leaves calls it on all its ends before it closes one, or ranks may wait for each other in different ends. */
void s1f_device_end_leave(s1f_edge_end *end);
/* Ends what the end does, after a while for what is under way; its memory stays until it is freed, as tensors may lie
 * there. Freeing does it as well. */
void s1f_device_end_close(s1f_edge_end *end);

/* The watchdog calls these, under the lock. is_over: the transfer of a message has ended. fail: ends the step on every
 * rank; sequence is -1 if no message is to blame. abort: ends what is under way, once. */
int s1f_device_end_is_over(const s1f_device_end *end, int64_t sequence);
void s1f_device_end_fail(s1f_device_end *end, int64_t sequence, const char *why);
void s1f_device_end_abort(s1f_device_end *end);
/* purpose: "waiting for"; sequence: -1: none. */
s1f_wait_reason s1f_device_end_reason(const s1f_device_end *end, const char *purpose, int64_t sequence);

/* Waits for the GPU, NCCL, or the host of the peer. */
s1f_status s1f_device_end_wait(s1f_device_end *end, int (*is_done)(void *end), const s1f_wait_reason *reason);
/* Waits until the mover's last call is enqueued. */
s1f_status s1f_device_end_settle(s1f_device_end *end, const char *purpose, int64_t sequence);
/* Makes a place hold at least so many bytes; what it held is lost. May wait for the GPU. */
s1f_status s1f_device_place_grow(s1f_device_end *end, s1f_device_place *place, int64_t bytes);
/* For a message that has come: its place, and the others of the edge that hold nothing. So later ones find room. */
s1f_status s1f_device_place_reserve(s1f_device_end *end, s1f_device_place *place, int64_t bytes);
/* All places for the largest message so far. Those into which the sender writes cannot change once they are posted, so
 * they wait for the end of the step, when all that was sent has come. */
s1f_status s1f_device_end_reserve(s1f_device_end *end);
/* A message by way of pageable host memory, with copies that the host waits for: from the GPU, after which tensors[]
 * name host memory; and into the place where it has come. */
s1f_status s1f_device_end_to_host(s1f_device_end *end, const s1f_message *message, const void **tensors);
s1f_status s1f_device_end_from_host(s1f_device_end *end, const s1f_device_place *place);
/* 1 once all that the end began on its stream has ended. */
int s1f_device_end_is_idle(s1f_device_end *end);
/* Waits so long for that: aborted transfers end as well. */
int s1f_device_end_is_idle_within(s1f_device_end *end, int64_t ns);

#endif
