/* simulation.h - what a simulation tells: times of ranks and of units. */
#ifndef S1F_SIMULATION_H
#define S1F_SIMULATION_H

#include "../core/pool.h"
#include "../core/program.h"

/* How much to keep: each holds what stands above it. */
typedef enum {
    S1F_KEEP_TOTALS,   /* makespan and what is told per rank */
    S1F_KEEP_TIMELINE, /* start and end of every unit of the first step */
    S1F_KEEP_CAUSES    /* and what critical.h needs */
} s1f_keep;

/* Why a unit of the first step stands where it does; bits. */
enum {
    S1F_CAUSE_MESSAGE = 1, /* it started when its message came; else when the unit before it was through */
    S1F_CAUSE_CREDIT = 2,  /* its message waited for a place */
    S1F_CAUSE_LINK = 4     /* its message waited for the one before it on the link */
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
    double *busy;            /* [rank] sum of its units */
    double *wait;            /* [rank] time in WAIT, in SEND before the credit, and for the tier */
    double **start, **end;   /* [rank][i], units in run order; first start of all is 0; NULL: not kept */
    unsigned char **causes;  /* [rank][i] bits; NULL: not kept */
    int32_t *completed;      /* the rank of every unit in an order in which each comes after all it waited for */
    double **slack;          /* [rank][i]: filled by s1f_simulation_find_slack; NULL: causes are not kept */
    s1f_numbered_unit *path; /* the same */
    int64_t path_length;
    double *times; /* what start, end and slack point into: all units of a rank after those before it */
    s1f_pool pool; /* of all other arrays */
} s1f_simulation;

/* All zero, with room for what is kept. *out is owned by the caller and untouched on error. S1F_ERR_MEMORY. */
s1f_status s1f_simulation_create(const s1f_program *program, s1f_keep keep, s1f_simulation **out);
void s1f_simulation_free(s1f_simulation *simulation); /* NULL is fine */

#endif
