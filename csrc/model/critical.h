/* critical.h - which units decide the makespan, and how much later the others might end.
 *
 * The slack of a unit is the time by which it alone may take longer while the makespan stays: the latest end that
 * delays nobody's latest start, less its end. A message is late for its receiver, for the next message on its link, and
 * for the sender's next unit; a unit that frees a place is late for the message that waits for it. */
#ifndef S1F_CRITICAL_H
#define S1F_CRITICAL_H

#include "simulate.h"

/* Fills slack, path and path_length of a simulation of this program with these costs that keeps its causes. The path
 * leads from a unit that starts at 0 to one that ends last; each waited for the one before it on the path. Time and
 * memory are linear in the number of units. */
s1f_status s1f_simulation_find_slack(const s1f_program *program, const s1f_costs *costs, s1f_simulation *simulation);

#endif
