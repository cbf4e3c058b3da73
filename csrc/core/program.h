/* program.h - what one rank walks: its order with receives, sends and frees, a place for every message and a slot for
 * every KV cache. Written by lower.h; an executor decides nothing. */
#ifndef S1F_PROGRAM_H
#define S1F_PROGRAM_H

#include "edges.h"
#include "pool.h"
#include "schedule.h"
#include "table.h"

typedef enum {
    S1F_OP_POST = 0,    /* receiver: place is free, message `sequence` may come */
    S1F_OP_WAIT = 1,    /* receiver: message `sequence` has come; it is an input of `unit`, the next RUN */
    S1F_OP_RUN = 2,     /* compute `unit` */
    S1F_OP_SEND = 3,    /* sender: message `sequence` is the result of `unit`, which has just run */
    S1F_OP_FREE = 4,    /* `unit`, which has just run, is the last to read its segment's saved state and places */
    S1F_OP_RECEIVE = 5, /* receiver: message `sequence`, an input of `unit`, may start to come (receives.h) */
    S1F_OP_BACK = 6, /* the activations that `unit`, the next RUN, reads are back from the tier: its L has run before */
    S1F_NUM_OPS = 7
} s1f_opcode;
extern const char *const s1f_opcode_names[S1F_NUM_OPS];

typedef struct {
    int32_t opcode;    /* s1f_opcode */
    int32_t edge;      /* index into edges, -1 for RUN, FREE and BACK */
    s1f_unit unit;     /* POST, RECEIVE, WAIT: the consuming unit; SEND: the producing unit */
    int32_t place;     /* POST, RECEIVE, WAIT, SEND; -1 otherwise */
    int32_t kv_slot;   /* RUN: slot of the micro-batch's KV cache, -1 where the unit uses none (S1F_HOLDS_KV) */
    int32_t grad_slot; /* RUN: slot of its dK/dV, -1 where the unit uses none (S1F_HOLDS_KV_GRADIENT) */
    int64_t sequence;  /* POST, RECEIVE, WAIT, SEND: number of the message on its edge; -1 otherwise */
} s1f_instruction;

typedef struct {        /* peaks of one stage, in units and slots */
    int32_t live_units; /* units between F, or R where they are recomputed, and the end of their backward, but for those
                       that are away; in a forward-only program: 1 */
    int32_t kv_slots;   /* micro-batches whose KV cache is held */
    int32_t grad_slots; /* micro-batches whose dK/dV are held */
} s1f_stage_peak;

typedef struct {
    s1f_instruction *instructions;
    int64_t count;
    const s1f_unit *units; /* of its RUNs: the order; borrowed */
    int64_t num_units;
} s1f_rank_program;

/* The programs of all ranks. Its fields are for reading; only lower.h and receives.h write them. What its shape points
 * to, but for marks, is the schedule's, which must live as long, and stay as it is. */
typedef struct s1f_program {
    const s1f_schedule *schedule; /* borrowed */
    s1f_shape shape;              /* with marks */
    s1f_edges *edges;
    s1f_stage_peak *peaks;   /* [stage] */
    s1f_rank_program *ranks; /* [rank] */
    s1f_pool pool;           /* of all arrays */
} s1f_program;

/* A program without instructions. S1F_ERR_MEMORY. *out is owned by the caller and untouched on error. */
s1f_status s1f_program_create(const s1f_schedule *schedule, s1f_program **out);
void s1f_program_free(s1f_program *program); /* NULL is fine */

static inline const s1f_instruction *s1f_program_instructions(const s1f_program *program, int32_t rank, int64_t *count)
{
    *count = program->ranks[rank].count;
    return program->ranks[rank].instructions;
}
static inline const s1f_edge *s1f_program_edges(const s1f_program *program, int32_t *count)
{
    *count = program->edges->num_edges;
    return program->edges->edges;
}

static inline int64_t s1f_program_num_units(const s1f_program *program) /* of all ranks */
{
    return s1f_schedule_num_units(program->schedule);
}

typedef struct {   /* W of a unit whose backward is split: numbers in the order of its rank */
    int64_t ready; /* of its I */
    int64_t run;   /* of itself */
} s1f_late_weight;

/* All of one rank's order, which keeps the rules, in the order of their W; returns how many. *out is the pool's, which
 * may be short afterwards. */
int64_t s1f_find_late_weights(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, s1f_pool *pool,
                              s1f_late_weight **out);

#endif
