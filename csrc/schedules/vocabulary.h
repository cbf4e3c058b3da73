/* vocabulary.h - spreads the output layer's vocabulary over the ranks of an order: passes S and T.
 *
 * Once the last stage has gone forward, every rank computes the logits of its shard (S), and, from the statistics of all
 * shards, the loss and the shard's gradients (T); then the last stage goes back. S and T run as soon as they can, between
 * the units of the order. In an order whose last stage goes back right after its forward, that stage would wait for two
 * messages and back each time: so the forwards of every rank may go ahead of its other units.
 * [Vocabulary parallelism, arXiv:2411.05288] */
#ifndef S1F_VOCABULARY_H
#define S1F_VOCABULARY_H

#include "../core/schedule.h"

/* The same order with S and T of every cell, and with each unit that is no F behind `ahead` more Fs of its rank.
 * pass_seconds: of every pass, [stage][segment], by which S and T find their places.
 * S1F_ERR_SCHEDULE where the order breaks a rule, holds an S already, or rank r does not hold stage r; S1F_ERR_ARG for a
 * number out of range. *out is owned by the caller and untouched on error. */
s1f_status s1f_schedule_spread_vocabulary(const s1f_schedule *schedule, int64_t ahead,
                                          const double *const pass_seconds[S1F_MAX_PASSES], s1f_schedule **out);

#endif
