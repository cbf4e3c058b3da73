/* simulate.h - when every unit of a lowered program starts and ends, for given costs.
 *
 * The same rules as the executor: a rank walks its program in order; WAIT ends when the message has come, SEND begins
 * when the receiver has posted its place (the credit). A directed edge is one link: messages pass one after the other at
 * its bandwidth, then take the latency; the sender goes on meanwhile. Credits take no time. A pair starts once the inputs
 * of both are there, and both results leave at its end; the executor runs F and then B. */
#ifndef S1F_SIMULATE_H
#define S1F_SIMULATE_H

#include "lower.h"

typedef struct {
    /* Seconds of a unit, one of the two: by what it is, [stage][segment] for each pass that occurs; or by its number in
     * the order of its rank, [rank][i], to replay what was measured. */
    const double *pass_seconds[S1F_NUM_PASSES];
    const double *const *unit_seconds;
    double latency;               /* seconds from the end of a transfer to the arrival */
    double seconds_per_byte;      /* of a link: 1 / bandwidth; 0: infinite */
    const int64_t *message_bytes; /* [segment]: activation and gradient alike; NULL: 0 */
    double send;                  /* seconds that a sender itself spends on each SEND */
    double overlap;               /* share, 0 to 1, of the shorter unit of a pair that the other one hides */
} s1f_costs;

typedef struct {
    int32_t num_ranks;
    double makespan;       /* first start to last end over all ranks, seconds */
    double *span;          /* [rank] first start to last end of the rank */
    double *busy;          /* [rank] sum of its units */
    double *wait;          /* [rank] time in WAIT and in SEND before the credit */
    int64_t *num_units;    /* [rank] */
    double **start, **end; /* [rank][i], units in run order; first start of all is 0 */
} s1f_simulation;

/* Linear in the number of instructions. S1F_ERR_ARG if a duration or cost is negative or not finite.
 * *out is owned by the caller and untouched on error. Pure. */
s1f_status s1f_program_simulate(const s1f_program *program, const s1f_costs *costs, s1f_simulation **out);
void s1f_simulation_free(s1f_simulation *simulation); /* NULL is fine */

#endif
