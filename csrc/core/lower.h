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
 * Places of an edge = the most messages that the receiver's order needs posted at once + prefetch (with 1 the next
 * message may come while the unit that reads the one before it still runs), at most one per message, and more only if
 * the whole program (program order, transfers and credits) would otherwise have a cycle. Where both ends use the
 * messages in one order that is the receiver's peak of live messages. */
#ifndef S1F_LOWER_H
#define S1F_LOWER_H

#include "program.h"
#include "schedule.h"

/* Checks a schedule (check.h) and lowers it. prefetch: places beyond what is needed, at least 0.
 * S1F_ERR_SCHEDULE names the rule that the order breaks. *out is owned by the caller and untouched on error. Time is
 * linear in the number of units but for slots, which come from a heap; memory is linear. */
s1f_status s1f_schedule_lower(const s1f_schedule *schedule, int32_t prefetch, s1f_program **out);
/* Lowers for one rank to run: with its instructions and those of its neighbours, whose SENDs to others have no place,
 * and with the peaks of its stages. */
s1f_status s1f_schedule_lower_rank(const s1f_schedule *schedule, int32_t prefetch, int32_t rank, s1f_program **out);
/* Lowers without instructions and peaks: edges, places and units, all that times and memory (model/) ask for. */
s1f_status s1f_schedule_lower_edges(const s1f_schedule *schedule, int32_t prefetch, s1f_program **out);

#endif
