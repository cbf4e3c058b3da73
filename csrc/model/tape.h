/* tape.h - what times and memory ask of an order: 16 bytes for each unit, read from front to back.
 *
 * A program's instructions say more than a simulation needs: where its waits, sends and frees stand follows from stage
 * and pass of the unit. A tape is written from a program; or it stands for an order that never exists as a list (1e8
 * units): then its units are made in blocks while it is read. */
#ifndef S1F_TAPE_H
#define S1F_TAPE_H

#include "../core/lower.h"

enum { S1F_TAPE_BLOCK = 64 }; /* units of a block: 1024 bytes, so that the readers of 1024 ranks stay in the cache */

typedef struct {
    int32_t kind; /* stage * S1F_NUM_PASSES + pass */
    int32_t segment;
    int32_t awaited; /* number of the message that it consumes on its kind's edge `in`; -1: none */
    int32_t is_pair; /* it and the next unit are a pair, whose inputs both have to be there */
} s1f_tape_unit;

typedef struct {        /* what all units of one stage and pass have in common; edges are -1 where there is none */
    int32_t in, out;    /* edge of the message that it consumes, and of the one that it sends */
    int32_t posts[2];   /* edges that get a place back after it */
    int32_t rank;       /* that runs it */
    int32_t last_reads; /* 1: the last to read what its segment saved */
    int64_t num_units;  /* 0: no such unit occurs */
} s1f_tape_kind;

typedef struct {
    int32_t num_ranks, num_stages, num_segments, num_edges, has_backward;
    s1f_edge *edges;
    int64_t *window;       /* [edge] messages n and n + window are never both on their way; a power of two */
    s1f_tape_kind *kinds;  /* [stage][pass] */
    int64_t *num_units;    /* [rank] */
    s1f_tape_unit **units; /* [rank]; NULL: streamed */
    int64_t *warmup;       /* streamed, [rank]: forwards before the first backward; then one forward, one backward */
    int64_t num_forward;   /* streamed: forwards of a rank */
} s1f_tape;

/* *out is owned by the caller (s1f_tape_free), untouched on error, and does not need the program any more. */
s1f_status s1f_tape_of_program(const s1f_program *program, s1f_tape **out);
void s1f_tape_free(s1f_tape *tape); /* NULL is fine */

/* Reads the units of one rank: while (reader.next < reader.end || s1f_tape_refill(...)) use(*reader.next++); */
typedef struct {
    const s1f_tape_unit *next, *end;
    int64_t num_forward, num_backward; /* streamed: made so far */
    int32_t forward_segment, backward_segment;
    s1f_tape_unit block[S1F_TAPE_BLOCK];
} s1f_tape_reader;

void s1f_tape_rewind(const s1f_tape *tape, int32_t rank, s1f_tape_reader *reader);
int s1f_tape_refill(const s1f_tape *tape, int32_t rank, s1f_tape_reader *reader); /* 0: the order has ended */

#endif
