/* group_block.h - what lies in the block of memory that ranks share, and one rank's view: for group.c and gather.c. */
#ifndef S1F_GROUP_BLOCK_H
#define S1F_GROUP_BLOCK_H

#include "group.h"

enum { CACHE_LINE = 64, WHAT_WORDS = S1F_WHAT_BYTES / 8 };

typedef struct { /* what a rank does; one cache line, written by that rank (or its watcher's copy), read by all */
    _Atomic uint32_t version;    /* odd while it is written */
    _Atomic int32_t waiting_for; /* rank + 1; 0: nobody */
    _Atomic int64_t time_ns;     /* 0: never reported */
    _Atomic uint64_t what[WHAT_WORDS];
} progress_row;

_Static_assert(sizeof(progress_row) == CACHE_LINE, "a row is one cache line");

typedef struct {                                    /* to one round of a gather */
    _Alignas(CACHE_LINE) _Atomic uint64_t position; /* (epoch, round + 1); 0: being written */
    int32_t bytes;
    char data[S1F_GATHER_BYTES];
} contribution;

/* What a rank gives to gathers. It has two buffers for rounds: a rank that writes round g + 2 has seen every rank's
 * g + 1, so all have read round g. A rank may leave an epoch's last rounds behind, fail in the next step and meet in
 * the next epoch while another one still reads them: so there are two more for that, which epochs use by turns. */
typedef struct {
    _Alignas(CACHE_LINE) s1f_signal given; /* (epoch, round + 1) */
    _Atomic int64_t begun;                 /* the last step that the rank began */
    s1f_signal finished;                   /* the last step that the rank finished */
    _Atomic int64_t passed;                /* the last step in which nobody can meet this rank */
    s1f_failure failure;                   /* the failure by which the rank left `step`; 0: none */
    contribution buffers[2][2];            /* by epoch and by round */
} mailbox;

enum { FAILURE_NONE = 0, FAILURE_BEING_WRITTEN, FAILURE_STANDS };

typedef struct {
    _Atomic uint32_t failed;
    _Atomic int32_t lost; /* rank + 1 that died: never forgotten */
    s1f_failure failure;
    _Atomic int64_t step; /* first step that the failure ends; 0: none */
    s1f_spoiled spoiled;
} failure_block;

enum { FAILURE_BLOCK_BYTES = (sizeof(failure_block) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE };

struct s1f_group {
    failure_block *failure;
    progress_row *rows;
    mailbox *mailboxes;
    int32_t num_ranks, rank;
    _Atomic int64_t timeout_ns; /* a watchdog reads it */
    int64_t spin_ns;
    _Atomic int64_t step; /* a watchdog reads it */
    uint32_t epoch;       /* epoch of this rank's last gather */
    int32_t buffer;       /* buffer of this epoch */
    _Atomic int64_t turn; /* the step of this rank, or the next: ended by a failure of that step or an earlier one */
    s1f_spoiled *spoiled; /* the block's, or what a host shares */
};

/* From here on nobody can meet this rank in that step, nor in one before. */
void s1f_group_pass(s1f_group *group, int64_t step);

#endif
