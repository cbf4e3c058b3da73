/* fit.h - which units give up what their F has saved, so that each rank holds no more than it has room for.
 *
 * Each rank's order is walked once. Whenever it would hold more than its room, the live unit whose backward is furthest
 * away gives up: it is recomputed, or moved to a tier. Where all units are alike, no other choice gives up fewer: the
 * rule is Belady's, with backwards in place of reads. */
#ifndef S1F_FIT_H
#define S1F_FIT_H

#include "memory.h"

typedef struct {
    const s1f_memory_bytes *bytes;
    const int64_t *room;      /* [rank] of all that memory.h counts */
    const int64_t *tier_room; /* [rank] bytes of moved units that its tier holds at once; NULL: any number */
    /* What units may do. With both a unit moves where that hides, and is recomputed elsewhere; for this alone: */
    int32_t recomputes, moves;
    const double *start;        /* seconds of all units, of a rank after those of the rank before, as the order is */
    const double *tier_seconds; /* [stage][column] one way */
} s1f_fit;

/* kinds[cell of all stages]: an s1f_cell_kind. A rank whose room is too little for any choice gives up what it can.
 * S1F_ERR_ARG: the order recomputes or moves units already, or as s1f_program_memory; S1F_ERR_MEMORY. */
s1f_status s1f_program_fit(const s1f_program *program, const s1f_fit *fit, unsigned char *kinds);

#endif
