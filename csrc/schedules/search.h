/* search.h - how long an order takes, and a bounded search for a shorter one.
 *
 * Backward is split here; a B counts as I, then W. A unit waits for at most two others: the one before it on its rank
 * and one of a neighbouring stage. All other rules of check.h, and the cap, are a matter of order within a rank. So an
 * order is one list of units per rank, its time one pass over them, and a step of the search moves one unit within a
 * list: a unit of a critical path, as only that can shorten it [van Laarhoven, Aarts, Lenstra 1992], to before or after
 * others of its busy block [Dell'Amico, Trubian 1993]; late acceptance decides whether the step stays [Burke, Bykov
 * 2017]. Random numbers are ours and start alike: the same problem gives the same order everywhere. */
#ifndef S1F_SEARCH_H
#define S1F_SEARCH_H

#include "problem.h"

typedef struct s1f_search s1f_search; /* opaque */

/* A search over the orders of a problem whose units have their numbers, and which it borrows. *out is the pool's, and
 * untouched on error. S1F_ERR_MEMORY. */
s1f_status s1f_search_create(const s1f_problem *problem, s1f_pool *pool, s1f_search **out);

/* Seconds beyond which an order is forgotten: INFINITY until there are enough starts. */
double s1f_search_limit(const s1f_search *search);

/* A start is written here: the numbers of all units (problem.h), rank by rank, each rank's in run order. Offer forgets
 * it unless it keeps the cap and the order of passes, and is one of the shortest. */
int32_t *s1f_search_order(s1f_search *search);
void s1f_search_offer(s1f_search *search);

/* Offers an order by each of the rules of list.c, as far as that takes seconds. S1F_ERR_MEMORY, or what
 * s1f_check_interrupted says. */
s1f_status s1f_offer_lists(const s1f_problem *problem, s1f_search *search);

/* Improves the starts within a fixed number of steps and units timed; ends early at a lower bound. */
s1f_status s1f_search_run(s1f_search *search);
/* Seconds of the shortest order so far; INFINITY: none. */
double s1f_search_makespan(const s1f_search *search);
/* Appends the shortest order, of which there is one, to an empty schedule with the problem's counts and placement: as I
 * and W, or as a B where I is. */
s1f_status s1f_search_take(const s1f_search *search, int is_split, s1f_schedule *schedule);

#endif
