/* split.h - orders whose backward is split into I and W: where the W go.
 *
 * A family of this kind is an order of F and I per rank, its plan; W run in the bubbles that the plan leaves, the
 * oldest first, and before an F where the rank is full. */
#ifndef S1F_SPLIT_H
#define S1F_SPLIT_H

#include "families.h"

/* Builds a family from the plan of each rank. It is walked in time: a rank takes the next unit of its plan once its
 * inputs are there and, if it is an F, fewer than `cap` units live (F to the end of W; option cap, where given, stands
 * for `cap`); else a W; else it waits. Two liberties, which segments need. A rank that would wait may take an F ahead
 * of its plan, k - 1 times, where it has room until that F's turn: backward enters k - 1 segments later than in whole
 * micro-batches. And once no F is left, the rank's deeper stage goes first. Where costs are given the walk is done
 * three times, with equal costs, and with the given ones with W that may and that may not delay the plan; the shortest
 * stays. No F of the plan may need more than `cap` units between F and I. *out is owned by the caller and untouched on
 * error. */
s1f_status s1f_schedule_split(const s1f_request *request, s1f_placement *placement, s1f_order_of_rank *plan_of_rank,
                              int64_t cap, s1f_schedule **out);

/* A plan of one stage per rank: `ahead` (P - r - 1) + k forwards, then one I, one F. */
s1f_status s1f_plan_one_stage(const s1f_request *request, s1f_schedule *plan, int32_t rank, int32_t ahead);

/* A plan of two stages per rank in a V: a building block, shifted by 6 per segment. [Controllable memory,
 * arXiv:2405.15362] A block is F of the first stage from rank 0 down, F of the second from rank P - 1 up, I down, I up;
 * `step` is the time between neighbouring ranks on each of the four ways, `turn` that between two ways. Backward starts
 * k - 1 blocks late. */
typedef struct {
    int32_t step[4], turn[3];
} s1f_block;
s1f_status s1f_plan_blocks(const s1f_request *request, s1f_schedule *plan, int32_t rank, const s1f_block *block);

#endif
