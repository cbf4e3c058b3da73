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
 * Places are memory of the GPU, and grow when they are needed: where the sender writes into them, when they are posted.
 * The watchdog (watchdog.h) looks after what the host does not wait for. */
#ifndef S1F_DEVICE_END_H
#define S1F_DEVICE_END_H

#include "../core/schedule.h"
#include "../run/p2p.h"
#include "nccl.h"
#include "watchdog.h"

typedef struct s1f_device_end s1f_device_end;

typedef struct {
    s1f_cu_address address; /* receiver: own; sender: the receiver's, by a mover that opens it */
    int64_t capacity;       /* receiver: bytes, 0: none yet */
    uint64_t generation;    /* counts the memories that the place has had */
    s1f_cu_event freed;     /* of the last POST */
    s1f_cu_event copied;    /* end of a copy into the place, and the event's name */
    s1f_cu_handle name;
    const s1f_message *message;
    const void *host_payload; /* payload of a message that came over the host */
} s1f_device_place;

typedef struct { /* one message of this step; events are made once and used again by every step */
    s1f_cu_event started, done;
    s1f_unit unit;   /* the unit that produced the message */
    int32_t is_over; /* nothing to wait for: the message had no bytes, or went through host memory */
} s1f_transfer;

typedef struct { /* how bytes move. Called with the GPU's context current; a function may be NULL. */
    /* These two may wait. */
    s1f_status (*post)(s1f_device_end *end, int32_t place); /* receiver, before the place is granted */
    /* Sender. Clears message->on_device if the message has to go through host memory. */
    s1f_status (*prepare_send)(s1f_device_end *end, int64_t sequence, int32_t place, s1f_message *message);
    /* Enqueues a send, or a receive (tensors NULL), on end->stream, under the watchdog's lock. */
    s1f_status (*move)(s1f_device_end *end, int32_t place, const s1f_message *message, const void *const *tensors);
    int32_t is_one_sided; /* the send needs no receive, and its event has to be recorded when the header is read */
    /* The next two are called under the lock.
     * settled: 1 once the last call is enqueued, which may need the peer; with an error recorded, -1: it failed here,
     * -2: at the peer. NULL: at once. */
    int (*settled)(s1f_device_end *end);
    /* Ends what is under way, and what the mover itself holds, from any thread, once. */
    void (*abort)(s1f_device_end *end);
    /* Closes what it opened of the peer's memory. Nothing is under way. 0: the peer has not closed what it opened. */
    int (*forget)(s1f_device_end *end);
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
    int64_t num_places;
    s1f_transfer *transfers; /* by message */
    int64_t capacity, started, over;
    s1f_cu_address *retired; /* what places outgrew: it stays to the end */
    int64_t num_retired;
    int64_t largest; /* receiver: payload so far */
    char *staging;   /* host memory of a message */
    int64_t staging_bytes;
    /* not 0: the end proves itself (s1f_edge_proof_post): what fails is its own, each wait ends so soon */
    int64_t proof_ns;
    int32_t is_aborted, is_finished, is_closed;
    int32_t is_leaked;           /* memory of the end on the GPU stays for good */
    struct s1f_device_end *next; /* of the watchdog's */
    /* the watchdog's: */
    int64_t seen_over, seen_started, stuck_since_ns;
};

/* A mover's struct of so many bytes, zero behind its head: stream, events, the control edge (borrowed, must outlive the
 * end). It is under the watchdog's eyes. */
s1f_status s1f_device_end_create(size_t bytes, const s1f_mover *mover, s1f_edge_end *control, s1f_watchdog *watchdog,
                                 s1f_device_end **out);
extern const s1f_transport s1f_device_transport;
/* Ends what the end does; its memory stays until it is freed, as tensors may lie there. Freeing closes as well. Senders
 * close first: a receiver waits for its own. What still proves itself has failed, and is aborted. 0: the GPU, or the
 * sender, does not end what it began by the time of farewell, in 5 s or the group's limit; then nothing is closed or
 * freed, ever. */
int s1f_device_end_close(s1f_edge_end *end);
int64_t s1f_device_end_farewell_ns(const s1f_device_end *end);

/* The watchdog calls these, under the lock. has: whether an event of the message's transfer has come; an error of the
 * GPU, which every later call tells as well, fails. fail: ends the step on every rank; sequence is -1 if no message is
 * to blame; is_peers: the peer is to blame. abort: ends what is under way, once. */
int s1f_device_end_has(s1f_device_end *end, s1f_cu_event event, int64_t sequence);
int s1f_device_end_is_over(s1f_device_end *end, int64_t sequence);
void s1f_device_end_fail(s1f_device_end *end, int64_t sequence, int32_t is_peers, const char *why);
void s1f_device_end_abort(s1f_device_end *end);

/* Waits for the GPU, NCCL, or the host of the peer. is_done: below 0, with an error recorded, while an end proves
 * itself. */
s1f_status s1f_device_end_wait(s1f_device_end *end, int (*is_done)(void *end), const s1f_wait_reason *reason);
/* Waits until the mover's last call is enqueued; at first, until its end is connected to the peer's. */
s1f_status s1f_device_end_settle(s1f_device_end *end, const char *purpose, int64_t sequence);
/* Makes a place hold at least so many bytes; what it held is lost. */
s1f_status s1f_device_place_grow(s1f_device_end *end, s1f_device_place *place, int64_t bytes);
/* A message by way of pageable host memory, with copies that the host waits for: from the GPU, after which tensors[]
 * name host memory; and into the place where it has come. */
s1f_status s1f_device_end_to_host(s1f_device_end *end, const s1f_message *message, const void **tensors);
s1f_status s1f_device_end_from_host(s1f_device_end *end, const s1f_device_place *place);
/* Gives back the memory of all places. Nothing is under way. */
s1f_status s1f_device_end_free_places(s1f_device_end *end);

/* The mover whose sender's copy engine writes straight into the receiver's places: ranks of one host, on one GPU or on
 * several. No multiprocessor takes part, and no transfer waits for another one's start.
 *
 * With POST the receiver says where the place is; with the header the sender says which event ends the copy: both by
 * CUDA's IPC handles, which a driver opens in another process only. A message that is larger than its place (in the
 * first step of a shape) goes through host memory, and the place has grown when it is posted again. The control edge is
 * over an arena that both ranks map (s1f_arena_end_create). */
extern const s1f_mover s1f_copy_mover;

/* An end that moves by NCCL: a communicator of two ranks, and a stream, per directed edge. NCCL's sends and receives
 * need each other (rendezvous), so the program has to have RECEIVEs (receives.h). Starts to create the communicator and
 * returns at once; s1f_device_end_settle waits for it, and for the peer. So all ends of a rank can be created before
 * any is connected, and no order among edges is needed. id: the same 128 bytes at both ends, used once. */
s1f_status s1f_nccl_end_create(const s1f_nccl *nccl, const s1f_nccl_id *id, s1f_edge_end *control,
                               s1f_watchdog *watchdog, s1f_edge_end **out);

/* The message by which an edge proves itself at set-up, before any other depends on it (edge_proof.c).
 *
 * It goes over the edge as those of a step do. Until `end` nothing that fails is told to the group: a refusal and a
 * transfer that does not end are this end's alone (S1F_ERR_STATE, _MEMORY), and the ranks then agree on another mover.
 * A peer that dies, or a rank that fails, ends all as in a step.
 *
 * The order of the calls, which both ends keep; between two lines the ranks exchange whether all went well:
 *     post                  receiver
 *     send, receive         a one-sided mover's send first, else both at once
 *     end                   the sender's first; after an error the ends are closed instead
 *
 * A step has begun (s1f_group_begin_step, s1f_device_begin_step), and the end's watchdog has a limit for proofs. */
s1f_status s1f_edge_proof_post(s1f_edge_end *end, int64_t bytes);
/* Both return once the transfer has ended on this side, with its nanoseconds. data: on the GPU; it may be
 * freed after that, or once the end is closed and keeps nothing. */
s1f_status s1f_edge_proof_send(s1f_edge_end *end, const void *data, int64_t bytes, int64_t *ns);
s1f_status s1f_edge_proof_receive(s1f_edge_end *end, const void **data, int64_t *ns);
/* From here on failures are the group's again. Gives back what places hold, and what was opened of the peer's. */
s1f_status s1f_edge_proof_end(s1f_edge_end *end);

#endif
