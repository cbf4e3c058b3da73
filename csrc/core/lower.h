/* lower.h - turns an order into one program per rank (program.h).
 *
 * Edges. Messages of an edge are numbered 0.. in the order of the sender's program; both ends see that order. Message n
 * lands in place `place` of the receiver; the receiver grants it with POST n once the place is free, the sender's SEND
 * n waits for that grant (the credit), the receiver's WAIT n for the message. POSTs and SENDs of an edge are each in
 * ascending n within their program; WAITs come in the order of use.
 *
 * A rank's program starts with the POSTs of all its places. Then, unit by unit: WAITs, BACK where the unit reads what
 * was moved away, RUN, SENDs, and after the last unit that reads a message FREE and the POSTs it enables. A place lives
 * from POST to the end of the unit that reads it last: of an activation and a gradient that is B (W where the backward
 * is split, F where there is none).
 *
 * Places of an edge: the most messages that the receiver's order needs posted at once, and some more (s1f_places), at
 * most one per message, and never so few that the whole program (program order, transfers and credits) has a cycle.
 * Where both ends use the messages in one order the first is the receiver's peak of live messages. */
#ifndef S1F_LOWER_H
#define S1F_LOWER_H

#include "program.h"

/* Places beyond those that an order needs at once. All zero: none.
 *
 * By time: enough that no sender waits in a run of all ranks, and at least one, so that the next message may come while
 * the unit that reads the message before still runs. In an order that goes back, each message on its way or waiting
 * belongs to a unit which its sender, or the receiver of a gradient, holds anyway: places stay few. */
typedef struct {
    int32_t by_time;  /* 1: as many more places as the run needs; 0: `prefetch` more places */
    int32_t prefetch; /* at least 0; more are never slower */
    /* Seconds of units in that run, [pass][stage][column], finite and at least 0. NULL: F, I, W and R take 1, B 2, the
     * passes of a shard of the vocabulary and of a tier nothing. */
    const double *seconds;
    const double *latency; /* [s] seconds of a message between stages of which the lower is s; NULL: 0 */
} s1f_places;

/* Whose instructions a program has, in place of a rank. */
enum { S1F_ALL_RANKS = -1, S1F_NO_RANK = -2 };

/* Checks a schedule (check.h) and lowers it, for one rank to run: with its instructions alone, and the peaks of its
 * stages. S1F_NO_RANK: edges, places and units alone, for times and memory (model/). S1F_ERR_SCHEDULE names the rule
 * that the order breaks. *out is owned by the caller, who keeps the schedule as long, and untouched on error. Time is
 * linear in the number of units but for slots, of which the lowest free one is looked for; memory is linear. */
s1f_status s1f_schedule_lower(const s1f_schedule *schedule, s1f_places places, int32_t rank, s1f_program **out);

#endif
