/* fit.h - which units give up the activations that their F saved, so that each rank keeps within its room.
 *
 * Each rank's order is walked once. Whenever the rank would hold more than its room, the live unit whose backward is
 * furthest away gives up: the unit is recomputed, or moved to a tier. If all units are alike, no other choice gives up
 * fewer units: the rule is Belady's, with backwards in place of reads. */
#ifndef S1F_FIT_H
#define S1F_FIT_H

#include "memory.h"

typedef struct {
    const s1f_memory_bytes *bytes;
    const int64_t *room;      /* [rank] most bytes of all holdings (memory.h) */
    const int64_t *tier_room; /* [rank] bytes of moved units that its tier holds at once; NULL: any number */
    /* What units may do. With both a unit moves where that hides and the rank has room as it comes back, and is
     * recomputed elsewhere; for this alone: */
    int32_t recomputes, moves;
    const double *start;        /* seconds of all units, of a rank after those of the rank before, as the order is */
    const double *tier_seconds; /* [stage][column] seconds, one way */
} s1f_fit;

/* kinds[cell of all stages]: an s1f_cell_kind. A rank whose room is too little for any choice gives up what it can.
 * S1F_ERR_ARG: the order recomputes or moves units already, or as s1f_program_memory; S1F_ERR_MEMORY. */
s1f_status s1f_program_fit(const s1f_program *program, const s1f_fit *fit, unsigned char *kinds);

#endif
