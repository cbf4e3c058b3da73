/* split.h - orders whose backward is split into I and W: where the W go.
 *
 * A family of this kind is an order of F and I per rank, its plan; W run in the bubbles that the plan leaves, the
 * oldest first, and before an F where the rank is full. */
#ifndef S1F_SPLIT_H
#define S1F_SPLIT_H

#include "families.h"

/* The order of a plan, walked in time: a rank takes the next unit of its plan once its inputs are there and, if it is an
 * F, fewer units live (F to the end of W) than the family's most_live says, or option cap; else a W; else it waits. Two
 * liberties, which segments need. A rank that would wait may take an F ahead of its plan, k - 1 times, where it has room
 * until that F's turn: backward enters k - 1 segments later than in whole micro-batches. And once no F is left, the
 * rank's deeper stage goes first. Where costs are given the walk is done three times, with equal costs, and with the
 * given ones with W that may and that may not delay the plan; the shortest stays. No F of the plan may need more units
 * between F and I than that. *out is owned by the caller and untouched on error. */
s1f_status s1f_schedule_split(const s1f_request *request, const s1f_schedule *plan, s1f_schedule **out);

#endif
