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
 * All calls are pure: no I/O, callable from any thread, nothing kept. `sizes` is the caller's, num_segments long,
 * written only on S1F_OK. S1F_ERR_ARG (message names the rule and the values): seq_len outside 1..2^40, num_segments
 * below 1 or above the units of multiple_of that the sequence holds, multiple_of below 1, mix outside [0, 1]. */
#ifndef S1F_PARTITION_H
#define S1F_PARTITION_H

#include "status.h"

#include <stdint.h>

#define S1F_MAX_SEQUENCE_LENGTH ((int64_t)1 << 40) /* tokens */

/* A decoder with grouped-query attention and a gated (SwiGLU) feed-forward of three matrices. A plain two-matrix
 * feed-forward of width f counts as ffn = 2 f / 3, a mixture of experts as the width of those that one token visits. */
typedef struct {
    int64_t hidden, layers;
    int64_t heads, kv_heads;
    int64_t ffn;      /* inner width; 0: none */
    int64_t vocab;    /* words of the output head; 0: none */
    int64_t head_dim; /* 0: hidden / heads */
} s1f_model_shape;

/* Forward floating-point operations of tokens [begin, end) attending causally to [0, end), n = end - begin:
 *   n * (layers * (4 h q + 4 h q kv_heads / heads + 6 h ffn) + 2 h vocab)   q and output, k and v, SwiGLU, head
 *   + layers * 4 q * sum of (t + 1) over t in [begin, end)                  scores and weighted values
 * with h = hidden, q = heads * head_dim. The backward pass is twice that for every token, so it does not move the
 * partition. Norms, rotary positions, the router of experts and the embedding look-up are left out.
 * S1F_ERR_ARG if a count is below its least, kv_heads does not divide heads, heads does not divide hidden where
 * head_dim is 0, or not 0 <= begin <= end <= 2^40. */
s1f_status s1f_model_flops(const s1f_model_shape *model, int64_t begin, int64_t end, double *flops);

/* Equal lengths: segments differ by at most one unit of multiple_of, the longer ones first. */
s1f_status s1f_partition_even(int64_t seq_len, int32_t num_segments, int64_t multiple_of, int64_t *sizes);

/* Equal s1f_model_flops. The computation-wise partition of Seq1F1B (arXiv:2406.03488), solved on the grid.
 *
 * documents: their lengths in tokens, row of packed documents after row; NULL: one of seq_len tokens. Attention stays
 * within a document, so only pairs of tokens within one document count. Every row holds seq_len tokens; rows are cut
 * alike, and the cost is their mean.
 * S1F_ERR_ARG if a length is below 1 or the lengths are not whole rows; S1F_ERR_MEMORY (48 bytes per document). */
s1f_status s1f_partition_flops(int64_t seq_len, int32_t num_segments, const s1f_model_shape *model,
                               const int64_t *documents, int64_t num_documents, double mix, int64_t multiple_of,
                               int64_t *sizes);

/* Equal measured cost. The sequence is cut into num_costs pieces of equal length (tokens may straddle two); costs[i] is
 * what piece i costs, in any unit, spread evenly over it. So num_costs = seq_len gives the cost of each token, and
 * timing n equal segments gives n pieces. Needs num_costs >= 1, each cost finite and >= 0, their sum > 0 and at most
 * 1e300. S1F_ERR_MEMORY if the running sums (8 bytes per piece) cannot be allocated. */
s1f_status s1f_partition_profiled(int64_t seq_len, int32_t num_segments, const double *costs, int64_t num_costs,
                                  double mix, int64_t multiple_of, int64_t *sizes);

/* Whether sizes is a partition of seq_len tokens: S1F_ERR_ARG names the segment that is below 1, or the sum. */
s1f_status s1f_partition_check(const int64_t *sizes, int32_t num_segments, int64_t seq_len);

#endif
