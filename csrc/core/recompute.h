/* recompute.h - an order whose units keep their input alone until shortly before their backward. */
#ifndef S1F_RECOMPUTE_H
#define S1F_RECOMPUTE_H

#include "schedule.h"

/* Makes the order with an R just before B, or I, of every cell chosen[cell of all stages] (NULL: of all); a cell that
 * has one, or whose unit is moved away, stays as it is. R waits for no message: it runs while the gradient that B waits
 * for is on its way. An order that does not go back stays as it is. S1F_ERR_SCHEDULE where the order breaks a rule;
 * S1F_ERR_MEMORY. *out is owned by the caller and untouched on error. */
s1f_status s1f_schedule_recompute(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out);

#endif
