/* simulate.h - when every unit of an order starts and ends, for given costs.
 *
 * The rules are the executor's: a rank walks its program in order; WAIT ends when the message has come, SEND begins
 * when the receiver has posted its place (the credit). A directed edge is one link: messages pass one after the other
 * at its bandwidth, then take the latency; the sender goes on meanwhile. Credits take no time. */
#ifndef S1F_SIMULATE_H
#define S1F_SIMULATE_H

#include "../core/program.h"

typedef struct {
    /* Columns: s1f_column. Seconds of units, in one of two forms: [stage][column] for each pass (NULL: the order does
     * not have the pass); or by number, rank by rank, to replay measured seconds. */
    const double *pass_seconds[S1F_MAX_PASSES];
    const double *unit_seconds;
    /* [s] up to the last stage but one, for the edges whose lower stage is s, both ways alike; NULL: 0. */
    const double *latency;           /* seconds from the end of a transfer to the arrival */
    const double *seconds_per_byte;  /* of a link: 1 / bandwidth; 0: infinite */
    const int64_t *message_bytes;    /* [column]: activation and gradient alike; NULL: 0 */
    const int64_t *statistics_bytes; /* [column]: a message from shard to shard of the vocabulary; NULL: 0 */
    double send;                     /* seconds of the sending rank for each SEND */
    /* [stage][column] seconds that a rank's tier takes for a unit, out or back: one after the other, beside units. A
     * and the backward of a moved unit wait for it. NULL: 0. Not with causes. */
    const double *tier_seconds;
    /* Every unit takes its seconds times a number drawn evenly from 1 - jitter .. 1 + jitter, at most 1; 0: none. Unit
     * i of a rank, counted over all steps, takes draw i of splitmix64 started at seed + rank * 0xd1342543de82ef95. */
    double jitter;
    /* Spread, as jitter, of a message's time on the link and of its latency. Message n of an edge, counted over all
     * steps, takes draw n of splitmix64 started at seed + (num_ranks + 2 s + b) * 0xd1342543de82ef95, s the lower of
     * its two stages, b 1 where it goes to the lower stage (and 2 num_stages more for each channel behind the
     * gradients). Each message arrives by itself: a late one may come after the next. */
    double transfer_jitter;
    uint64_t seed;
    /* 1: while a rank waits for a message it runs W, of units whose I has run, in the order of its Ws and for as long
     * as the wait takes; at its own place a W takes what is left. Not with causes. */
    int32_t fills;
    /* Steps in a row; 0 counts as 1. After a step a rank runs its optimizer for optimizer[rank] seconds (NULL: 0), at
     * once or, with optimizer_sync, when all ranks are through with the step. Then it begins the next. */
    int32_t num_steps, optimizer_sync;
    const double *optimizer;
} s1f_costs;

/* What the messages of an edge cost. */
typedef struct {
    double latency, seconds_per_byte;
    const int64_t *bytes; /* [column]; NULL: 0 */
} s1f_link_costs;

static inline s1f_link_costs s1f_link_costs_of(const s1f_costs *costs, const s1f_edge *edge)
{
    int32_t s = s1f_edge_boundary(edge);
    return (s1f_link_costs){
        .latency = costs->latency == NULL ? 0 : costs->latency[s],
        .seconds_per_byte = costs->seconds_per_byte == NULL ? 0 : costs->seconds_per_byte[s],
        .bytes = edge->channel == S1F_CHANNEL_STATISTICS ? costs->statistics_bytes : costs->message_bytes,
    };
}
/* Seconds that a message of this column takes on the link, without jitter. */
static inline double s1f_transfer_seconds(const s1f_link_costs *link, int64_t column)
{
    return link->bytes == NULL ? 0 : (double)link->bytes[column] * link->seconds_per_byte;
}

/* -- what a simulation tells --------------------------------------------------------------------------------------- */

/* Why a unit of the first step stands where it does; bits. */
enum {
    S1F_CAUSE_MESSAGE = 1, /* the unit started when its message came; else when the unit before ended */
    S1F_CAUSE_CREDIT = 2,  /* the unit's message waited for a place */
    S1F_CAUSE_LINK = 4     /* the unit's message waited for the message before it on the link */
};

typedef struct {
    int32_t rank;
    int64_t i; /* number in the order of the rank */
} s1f_numbered_unit;

typedef struct { /* of the first step, but for `period` */
    int32_t num_ranks;
    double makespan;         /* first start to last end over all ranks, seconds */
    double period;           /* last end of the last step less that of the first, per step; 0 for one step */
    double *span;            /* [rank] first start to last end of the rank */
    double *busy;            /* [rank] sum of the rank's units */
    double *wait;            /* [rank] time in WAIT, in SEND before the credit, and for the tier */
    double **start, **end;   /* [rank][i], units in run order; first start of all is 0 */
    unsigned char **causes;  /* [rank][i] bits; NULL: not kept */
    int32_t *completed;      /* the rank of every unit in an order in which each comes after all it waited for */
    double **slack;          /* [rank][i]: filled by s1f_simulation_find_slack; NULL: causes are not kept */
    s1f_numbered_unit *path; /* the same */
    int64_t path_length;
    double *times; /* memory of start, end and slack: all units, rank by rank */
    s1f_pool pool; /* memory of all other arrays */
} s1f_simulation;

void s1f_simulation_free(s1f_simulation *simulation); /* NULL is fine */

/* With causes it keeps what critical.h needs. Time and memory are linear in the number of units.
 * S1F_ERR_ARG if a duration or cost is negative or not finite, or num_steps or jitter out of range; or what
 * s1f_check_interrupted says. *out is owned by the caller and untouched on error. */
s1f_status s1f_program_simulate(const s1f_program *program, const s1f_costs *costs, int with_causes,
                                s1f_simulation **out);
/* What jitter multiplies the seconds of a message by, counted over all steps; 1 without. */
double s1f_message_scale(const s1f_program *program, const s1f_costs *costs, int32_t edge, int64_t message);

#endif
