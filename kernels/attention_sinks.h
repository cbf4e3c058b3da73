/* attention_sinks.h - attention whose heads have a sink: one more logit, alike in all rows, that takes part in the
 * softmax's sum and has no value.
 *
 *   p[i] = exp(logit[i] - lse[i]),   lse[i] = log(exp(sink) + sum_j exp(logit[i][j]))
 *   dsink = -sum_i exp(sink - lse[i]) (dout[i] . out[i])
 *
 * Only the end of a row's forward differs. A backward of attention.h needs no sinks: it takes p from lse and
 * dout . out from out, and both have the sink in them.
 *
 * sinks, dsinks: float (double for fp64), (Hq); a sink is below infinity, and -infinity is none. Truth: the _ref_
 * forward. This is no part of attention.h, from which CUDA kernels are compiled: there sinks are applied to what a
 * kernel returns. */
#ifndef S1F_ATTENTION_SINKS_H
#define S1F_ATTENTION_SINKS_H

#include "attention.h"

/* As s1f_attention_forward and s1f_attention_ref_forward, which are these without sinks (NULL). */
s1f_status s1f_attention_forward_with_sinks(const s1f_attention_args *args, const void *sinks,
                                            const s1f_attention_context *context);
s1f_status s1f_attention_ref_forward_with_sinks(const s1f_attention_args *args, const void *sinks,
                                                const s1f_attention_context *context);
/* Stores dsinks from the arguments of a backward: sums in double, in an order that does not depend on the pool. Next to
 * that backward it costs nothing. */
s1f_status s1f_attention_sink_gradients(const s1f_attention_args *args, const void *sinks, void *dsinks,
                                        const s1f_attention_context *context);

#endif
