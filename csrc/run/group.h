/* group.h - what the ranks of a pipeline share beside messages: progress, failure, small collectives.
 *
 * All of it lives in one block of plain memory that every rank of a host maps: a row per rank that only this rank
 * writes, and one place for the first failure. So a rank that waits can see what its peer does, how long it has been
 * doing it, and whom the peer itself waits for, without a thread that sends heartbeats. */
#ifndef S1F_GROUP_H
#define S1F_GROUP_H

#include "../core/status.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct s1f_group s1f_group; /* one rank's view */
typedef struct s1f_wait_reason s1f_wait_reason;

enum {
    S1F_WHAT_BYTES = 48, /* bytes of a progress text, with its terminator */
    S1F_EDGE_TEXT_BYTES = 48,
    S1F_FAILURE_BYTES = 1024,
    S1F_GATHER_BYTES = 4032 /* most bytes of one rank in one gather */
};

/* Bytes of the shared block for num_ranks ranks; zero-filled memory is a valid empty block. */
size_t s1f_group_block_bytes(int32_t num_ranks);
/* One rank's view of a block (borrowed, must outlive the group): memory of this process for threads and for ranks on
 * several hosts (a watcher thread then copies what others publish), shared memory for processes of one host.
 * While it waits it asks s1f_check_interrupted about ten times a second.
 * A group is used by one thread, except set_progress, fail and check, which a watcher may call beside it. */
s1f_status s1f_group_create(void *block, int32_t num_ranks, int32_t rank, s1f_group **out);
void s1f_group_free(s1f_group *group); /* NULL is fine */
/* How long a peer may make no progress, and how long to spin before sleeping (0: never spin).
 * At first 300 s and 20 us. */
void s1f_group_set_limits(s1f_group *group, int64_t timeout_ns, int64_t spin_ns);
int64_t s1f_group_timeout_ns(const s1f_group *group);
/* This rank comes to a step, and may still find that it cannot begin it. A step that went well is left by coming to the
 * next one: code between steps, and its collectives, belong to that. Steps are counted from 1 by every rank for itself,
 * those included that end with an error: so the ranks pair by their counts. */
void s1f_group_enter(s1f_group *group, int64_t step);
/* Begins the step, with or without s1f_group_enter before. Positions on edges are (step, sequence), so that messages
 * left by a failed step are not taken for those of the new step. */
void s1f_group_begin_step(s1f_group *group, int64_t step);
int64_t s1f_group_step(const s1f_group *group);
int32_t s1f_group_rank(const s1f_group *group);
/* This rank's units of the step are done. Waits until those of last_rank are done, too: the rank on which backwards
 * end, after all messages of other ranks. So no rank leaves a step well in which last_rank fails. Needs a block that
 * all ranks share. hangup_fd: as of an arena end. Blocks. */
s1f_status s1f_group_finish_step(s1f_group *group, int32_t last_rank, int hangup_fd);

/* This rank's progress: what it does now ("F2.1", "the start of step 7"; cut at 47 bytes). Also refreshes its time. */
void s1f_group_progress(s1f_group *group, const char *what);
/* Sets another rank's progress, as learnt by a watcher. age_ns: how long ago it was; waiting_for: a rank or -1. */
void s1f_group_set_progress(s1f_group *group, int32_t rank, const char *what, int64_t age_ns, int32_t waiting_for);
typedef struct { /* what a rank does, for how long (-1: it never reported), and whom it waits for (-1: nobody) */
    char what[S1F_WHAT_BYTES];
    int64_t age_ns;
    int32_t waiting_for;
} s1f_progress;
s1f_progress s1f_group_get_progress(const s1f_group *group, int32_t rank);

/* Ends the step that this rank is in, on every rank: the first failure wins; waiters find it within 20 ms.
 *
 * A failure ends its step and all later steps. A rank that is still in an earlier step does not see the failure: the
 * failed rank has left that step, and has given the others all messages that they need to leave it, too. If a rank
 * fails in an earlier step while a failure stands, the failure that stands ends that step as well. */
void s1f_group_fail(s1f_group *group, int32_t rank, const char *text);
typedef struct {
    int32_t rank; /* the rank that failed first, -1: nobody */
    char unit[S1F_WHAT_BYTES], edge[S1F_EDGE_TEXT_BYTES], text[S1F_FAILURE_BYTES]; /* "" where unknown */
    int64_t step; /* the first step that it ends; for fail_with, 0: this rank's step */
} s1f_failure;
/* Texts that are too long are cut. */
s1f_failure s1f_failure_of(int32_t rank, const char *text, const char *unit, const char *edge, int64_t step);
/* As s1f_group_fail, with all that a watcher (watchdog.h, transport/store.py) knows of a failure elsewhere. In this
 * rank's step, an unknown unit becomes what the failed rank last reported. Returns 0 if another failure came first: the
 * first one's text stands. */
int s1f_group_fail_with(s1f_group *group, const s1f_failure *failure);
/* S1F_ERR_PEER with rank and text once a failure ends the step that this rank is in. */
s1f_status s1f_group_check(const s1f_group *group);
int s1f_group_has_failed(const s1f_group *group); /* s1f_group_check without a text */
/* This rank's present or last step if a failure ends that step; else 0. */
int64_t s1f_group_failed_step(const s1f_group *group);
void s1f_group_failure(const s1f_group *group, s1f_failure *out);
/* The peer behind a reason's hangup_fd is gone: ends the step on every rank. S1F_OK while it is there. */
s1f_status s1f_group_check_peer(s1f_group *group, const s1f_wait_reason *reason);
/* This rank leaves a step, and all before it, by an error; `failure` is what the others are told if they wait to meet
 * it there. Also ends the step on every rank. */
void s1f_group_leave(s1f_group *group, int64_t step, const s1f_failure *failure);
/* Whether another rank has left a step by an error, or all of it by coming to a later one: then nobody can meet all
 * ranks in it. *out: of the lowest such rank; a rank of -1 if there is none, no text if it has told nothing. */
int s1f_group_passed(const s1f_group *group, int64_t step, s1f_failure *out);
/* Forgets the failure, as all ranks have met in this rank's step; but not one of this step. By one rank alone. */
void s1f_group_clear(s1f_group *group);

/* Failed steps in which a rank lets its GPU go on without a message that never came: later messages of that GPU are
 * worthless, and may reach other ranks of the host before the failure does. */
enum { S1F_SPOILED_STEPS = 64 }; /* the last ones: ranks of a host are fewer steps apart */
typedef struct {
    _Atomic int64_t steps[S1F_SPOILED_STEPS];
} s1f_spoiled;
/* Before the GPU goes on. From any thread. */
void s1f_group_spoil(s1f_group *group, int64_t step);
/* Whether this rank's step has been spoiled, asked when all messages of the step have come. */
int s1f_group_is_spoiled(const s1f_group *group);
/* For ranks of a host that have a block each: memory that they all map, zero at first, borrowed. */
void s1f_group_share_spoiled(s1f_group *group, s1f_spoiled *spoiled);

/* Every rank gives `bytes` <= S1F_GATHER_BYTES and gets everyone's: out[rank * S1F_GATHER_BYTES], out_bytes[rank].
 * S1F_ERR_PEER where a rank meets in a later epoch already: what it gave to this round is gone. (epoch, round) is the
 * same on all ranks and rises; rounds of an epoch count from 0. Needs a block that all ranks share. recovering: the
 * ranks meet in the step that is the epoch's number, and a failure of an earlier one does not end the wait:
 * S1F_ERR_PEER once a rank has passed the step. hangup_fds[num_ranks]: as of an arena end, or NULL. Blocks. */
s1f_status s1f_group_gather(s1f_group *group, uint32_t epoch, uint32_t round, int32_t recovering, const void *data,
                            int32_t bytes, const int *hangup_fds, char *out, int32_t *out_bytes);

/* A rank waits for signals: 64-bit positions that another thread or process raises. A futex lies on the low half. */
typedef struct {
    _Atomic uint64_t position;
    _Atomic uint32_t sleepers;
} s1f_signal;

struct s1f_wait_reason { /* who is waited for and why: for errors */
    int32_t peer_rank;
    int32_t recovering;  /* a standing failure does not end the wait, a rank that passed the step does */
    int32_t meets;       /* the peer comes in this step or never */
    int32_t patient;     /* the time-out does not end the wait: another thread looks after it */
    int hangup_fd;       /* a socket that hangs up when the peer dies, or -1 */
    const char *purpose; /* "waiting for" */
    const char *edge;    /* "activations of stage 0 to 1" */
    int64_t sequence;    /* -1: none */
};

/* Waits until signal->position >= target. Spins, then sleeps in slices of 20 ms; each looks for a failure, the peer's
 * hang-up (S1F_ERR_PEER), interruption, and the time-out (S1F_ERR_TIMEOUT), which counts from the last progress of
 * the peer, or of whoever the peer in turn waits for. Hang-up and time-out are published as failures of the group. */
s1f_status s1f_group_wait(s1f_group *group, s1f_signal *signal, uint64_t target, const s1f_wait_reason *reason);
/* Waits for something that raises no signal, as work on a GPU: asks is_done, at first without pause, then every 50 us.
 * is_done may report progress of this rank. */
s1f_status s1f_group_poll(s1f_group *group, int (*is_done)(void *context), void *context,
                          const s1f_wait_reason *reason);
/* Nanoseconds of the clock that all of this goes by, CLOCK_MONOTONIC. */
int64_t s1f_now_ns(void);
/* Raises the position and wakes who sleeps on it. */
void s1f_signal_raise(s1f_signal *signal, uint64_t position);

#endif
