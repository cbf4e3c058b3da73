/* check.h - the rules that an order must keep, whoever wrote it.
 *
 * 1. Each unit runs once: what the order makes at all (unit.h) is made once for every (stage, micro-batch, segment). An
 *    order that goes back has F of each, then B of each, or I and W of each. R is there once or not at all; so are O, A
 *    and L, all three or none, and not beside R.
 * 2. A unit comes after all that it waits for, as unit.h states it, each dependency under its own sentence.
 * 3. Program order and transfers have no cycle: else the ranks wait for each other for ever.
 * 4. At most S1F_MOST_LEAVING units of a rank are between O and A, and S1F_MOST_COMING between L and their backward.
 * 5. A rank holds at most the stated number of live units: live from F, or R where there is one, to the end of B (W
 *    where the backward is split), but not from the end of A to L; in an order that goes forward only, while it runs.
 *
 * Between two ranks rule 2 is part of rule 3: nobody runs a unit before its message has come. */
#ifndef S1F_CHECK_H
#define S1F_CHECK_H

#include "schedule.h"

/* S1F_ERR_SCHEDULE with the rule as a sentence and the units with their ranks. max_live_units 0: no cap.
 * Time and memory are linear in the number of units. Pure. */
s1f_status s1f_schedule_check(const s1f_schedule *schedule, int64_t max_live_units);

/* Whether rank r holds stage r, as a vocabulary over the ranks needs it. S1F_ERR_SCHEDULE. */
s1f_status s1f_shape_check_shards(const s1f_shape *shape);

#endif
