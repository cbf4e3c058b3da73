/* vocabulary.h - spreads a vocabulary over the ranks of an order: passes S and T of the output layer, E and G of the
 * input embedding.
 *
 * Once the last stage has gone forward, every rank computes the logits of its shard (S), and, from the statistics of
 * all shards, the loss and the shard's gradients (T); then the last stage goes back. S and T run as soon as they can,
 * between the units of the order. In an order whose last stage goes back right after its forward, that stage would wait
 * for two messages and back each time: so the forwards of every rank may go ahead of its other units.
 *
 * Every rank looks up its rows of the embedding (E) shortly before the first stage needs them, and adds up their
 * gradients (G) once that stage has gone back. [Vocabulary parallelism, arXiv:2411.05288] */
#ifndef S1F_VOCABULARY_H
#define S1F_VOCABULARY_H

#include "../core/schedule.h"

enum {
    S1F_SPREAD_OUTPUT = 1, /* S and T */
    S1F_SPREAD_INPUT = 2   /* E, and G where the order goes back */
};

/* Makes the order with the passes of `what`, bits, of every cell; before each unit other than F stand `ahead` more Fs
 * of its rank. pass_seconds: of every pass, [stage][column], by which they find their places. S1F_ERR_SCHEDULE where
 * the order breaks a rule, holds such passes already, or rank r does not hold stage r; S1F_ERR_ARG for a number out of
 * range. *out is owned by the caller and untouched on error. */
s1f_status s1f_schedule_spread_vocabulary(const s1f_schedule *schedule, int what, int64_t ahead,
                                          const double *const pass_seconds[S1F_MAX_PASSES], s1f_schedule **out);

#endif
