/* list.h - list scheduling, whose orders are starts of a search.
 *
 * The walk is in time: a free rank takes the first unit, by its rule, among the units that are ready or, with patience,
 * will be soon; it takes a W if there is time left, or memory is short. No rule fills a rank with forwards that leave
 * no room for the rest of the oldest micro-batch, so ranks never wait for each other for ever [Dijkstra's banker:
 * micro-batches end in their order]. */
#ifndef S1F_LIST_H
#define S1F_LIST_H

#include "search.h"

/* Offers the search an order by each of the rules, as far as that takes seconds. S1F_ERR_MEMORY, or what
 * s1f_check_interrupted says. */
s1f_status s1f_offer_lists(const s1f_problem *problem, s1f_search *search);

#endif
