/* partition.h - how one sequence is cut into segments.
 *
 * A segment is a run of consecutive tokens; sizes[s] is the length of segment s, each at least 1 token, summing to the
 * sequence. Under causal attention later tokens cost more, so segments of equal cost grow shorter towards the end.
 *
 * Cost. C(t) is the cost of the first t tokens, never decreasing; segment [a, b) costs C(b) - C(a). The partition
 * minimises the cost of the costliest segment over all partitions on the grid (optimal, not rounded from a real
 * solution), and among those keeps each boundary as near to equal cost as the optimum allows.
 *
 * Grid. Sizes are multiples of multiple_of. If it does not divide the sequence, exactly one segment holds the remainder
 * (size = remainder modulo multiple_of); which one is part of the minimisation.
 *
 * Mix. The cost is mix * C(t) + (1 - mix) * C(seq_len) * t / seq_len: 1 balances cost, 0 is the even split.
 *
 * The call is pure: no I/O, callable from any thread, nothing kept. `sizes` is the caller's, num_segments long, written
 * only on S1F_OK. S1F_ERR_ARG (message names the rule and the values): seq_len outside 1..2^40, num_segments below 1 or
 * above the units of multiple_of that the sequence holds, multiple_of below 1, mix outside [0, 1]. */
#ifndef S1F_PARTITION_H
#define S1F_PARTITION_H

#include "status.h"

#include <stdint.h>

#define S1F_MAX_SEQUENCE_LENGTH ((int64_t)1 << 40) /* tokens */

/* What tokens cost: by a formula, or as measured. */
typedef struct {
    /* The first t tokens of a document cost linear t + quadratic t (t + 1): matrices, and attention to all before,
     * which stays within a document. documents: their lengths in tokens, row of packed documents after row; NULL: one
     * of seq_len tokens. Every row holds seq_len tokens; rows are cut alike, and the cost is their mean. S1F_ERR_ARG if
     * a length is below 1 or the lengths are not whole rows; S1F_ERR_MEMORY (48 bytes per document). */
    double linear, quadratic;
    const int64_t *documents;
    int64_t num_documents;
    /* In their place: the sequence is cut into num_costs pieces of equal length (tokens may straddle two); costs[i] is
     * what piece i costs, in any unit, spread evenly over it. So num_costs = seq_len gives the cost of each token, and
     * timing n equal segments gives n pieces. Needs num_costs >= 1, each cost finite and >= 0, their sum > 0 and at
     * most 1e300. S1F_ERR_MEMORY if the running sums (8 bytes per piece) cannot be allocated. */
    const double *costs;
    int64_t num_costs;
} s1f_token_costs;

/* The computation-wise partition of Seq1F1B (arXiv:2406.03488), solved on the grid. With mix 0 segments differ by at
 * most one unit of multiple_of, the longer ones first. */
s1f_status s1f_partition(int64_t seq_len, int64_t num_segments, const s1f_token_costs *costs, double mix,
                         int64_t multiple_of, int64_t *sizes);

#endif
