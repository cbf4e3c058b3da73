/* check.h - the rules that an order must keep, whoever wrote it.
 *
 *  1. Each unit runs once.            F of every (stage, micro-batch, segment); then B of each, or I and W of each.
 *  2. A segment goes forward after the one before it.                     F(m.s) after F(m.s-1), same stage
 *  3. A stage goes forward after the stage before it.                     F of stage i after F of stage i-1
 *  4. A segment goes back after its own forward.                          B(m.s) after F(m.s), same stage
 *  5. The last segment goes back after every forward of its micro-batch.  B(m.k-1) after F(m.0) .. F(m.k-1)
 *  6. A segment goes back after the one behind it.                        B(m.s) after B(m.s+1), same stage
 *  7. A stage goes back after the stage behind it.                        B of stage i after B of stage i+1
 *  8. A weight gradient comes after its input gradient.                   W(m.s) after I(m.s), same stage
 *  9. A pair is of two micro-batches.                                     F and B that start together
 * 10. Program order and transfers have no cycle.                          else the ranks wait for each other for ever
 * 11. A rank holds at most the stated number of live units.               live: from F to the end of B (W where split)
 *
 * I stands for B in rules 4 to 7. An order without any backward unit (eval) is held to rules 1, 2, 3, 10 and 11; a unit
 * is then live while it runs. Rules 3 and 7 between ranks are rule 10: nobody runs a unit before its message has come. */
#ifndef S1F_CHECK_H
#define S1F_CHECK_H

#include "schedule.h"

/* S1F_ERR_SCHEDULE with the rule as a sentence and the units with their ranks. max_live_units 0: no cap.
 * Time and memory are linear in the number of units. Pure. */
s1f_status s1f_schedule_check(const s1f_schedule *schedule, int64_t max_live_units);

#endif
