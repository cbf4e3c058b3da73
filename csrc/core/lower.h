/* lower.h - turns an order into one program per rank that an executor walks without deciding anything.
 *
 * Added to the units: receives, sends and frees; a place for every message and a slot for every KV cache, both
 * assigned from lifetimes, so that the peak of each is known before anything runs.
 *
 * Edges. One directed edge per (source stage, destination stage) whose ranks differ: activations flow s -> s + 1,
 * gradients s + 1 -> s. Messages of an edge are numbered 0.. in the order of the sender's program; both ends see that
 * order. Message n lands in place `place` of the receiver; the receiver grants it with POST n once the place is free,
 * the sender's SEND n waits for that grant (the credit), the receiver's WAIT n for the message. POSTs and SENDs of an
 * edge are each in ascending n within their program; WAITs come in the order of use.
 * A rank's program starts with the POSTs of all its places. Then, unit by unit: WAIT, RUN, SEND, and after the last unit
 * that reads a message FREE and the POSTs it enables. A place lives from POST to FREE: an activation to the end of its B
 * (its W where the backward is split, its F where there is none), a gradient to the end of its B (W).
 * Places of an edge = the most messages that the receiver's order needs posted at once + prefetch (1: engine decision
 * 30), at most one per message, and more only if the whole program (program order, transfers and credits) would
 * otherwise have a cycle. Where both ends use the messages in one order that is the receiver's peak of live messages.
 * Neighbouring stages on one rank hand over without an edge. */
#ifndef S1F_LOWER_H
#define S1F_LOWER_H

#include "schedule.h"

typedef enum {
    S1F_OP_POST = 0, /* receiver: place is free, message `sequence` may come */
    S1F_OP_WAIT = 1, /* receiver: message `sequence` has come; it is an input of `unit`, the next RUN that names it */
    S1F_OP_RUN = 2,  /* compute `unit` */
    S1F_OP_SEND = 3, /* sender: message `sequence` is the result of `unit`, which has just run */
    S1F_OP_FREE = 4, /* `unit`, which has just run, is the last to read its segment's saved state and places */
    S1F_OP_RECEIVE = 5, /* receiver: message `sequence`, an input of `unit`, may start to come (receives.h) */
    S1F_NUM_OPS = 6
} s1f_opcode;

typedef struct {
    int32_t opcode;    /* s1f_opcode */
    int32_t edge;      /* index into edges, -1 for RUN and FREE */
    s1f_unit unit;     /* POST, RECEIVE, WAIT: the consuming unit; SEND: the producing unit */
    int32_t place;     /* POST, RECEIVE, WAIT, SEND; -1 otherwise */
    int32_t kv_slot;   /* RUN: slot of the micro-batch's KV cache at this stage, from F(m.0) to B(m.0) (I where the
                          backward is split, F(m.k-1) where there is none); -1 for W and what does not run */
    int32_t grad_slot; /* RUN of B or I: slot of its dK/dV, from B(m.k-1) to B(m.0); -1 otherwise */
    int32_t is_pair;   /* RUN: it and the next RUN are a pair, whose inputs both have to be there */
    int64_t sequence;  /* POST, RECEIVE, WAIT, SEND: number of the message on its edge; -1 otherwise */
} s1f_instruction;

typedef struct {
    int32_t source_stage, destination_stage, source_rank, destination_rank;
    int32_t is_gradient; /* destination_stage == source_stage - 1 */
    int32_t num_places;
    int64_t num_messages;
} s1f_edge;

typedef struct {        /* peaks of one stage, in units and slots */
    int32_t live_units; /* forward units whose backward is not finished; in a forward-only program: 1 */
    int32_t kv_slots;   /* micro-batches whose KV cache is held */
    int32_t grad_slots; /* micro-batches whose dK/dV are held */
} s1f_stage_peak;

typedef struct s1f_program s1f_program; /* all ranks; opaque */

/* Checks a schedule (check.h) and lowers it. prefetch: places beyond what is needed, at least 0.
 * S1F_ERR_SCHEDULE names the rule that the order breaks. *out is owned by the caller and untouched on error. Time and
 * memory are linear in the number of units. */
s1f_status s1f_schedule_lower(const s1f_schedule *schedule, int32_t prefetch, s1f_program **out);
/* Adds the RECEIVEs of receives.h, for transports whose transfers need both ends, and proves that none waits for ever.
 * Once per program; it is unchanged on an error. */
s1f_status s1f_program_add_receives(s1f_program *program);
void s1f_program_free(s1f_program *program); /* NULL is fine */

const s1f_instruction *s1f_program_instructions(const s1f_program *program, int32_t rank,
                                                int64_t *count);               /* borrowed */
const s1f_edge *s1f_program_edges(const s1f_program *program, int32_t *count); /* borrowed */
s1f_stage_peak s1f_program_stage_peak(const s1f_program *program, int32_t stage);
/* Peak live tokens of a stage for given segment sizes[num_segments]: forward units not yet freed, in tokens. */
int64_t s1f_program_peak_tokens(const s1f_program *program, int32_t stage, const int64_t *segment_sizes);
/* The same of all stages of a rank together, weights[num_stages][num_segments] per unit: 1, tokens or bytes. */
int64_t s1f_program_rank_peak(const s1f_program *program, int32_t rank, const int64_t *weights);
int64_t s1f_program_num_units(const s1f_program *program, int32_t rank); /* RUNs of the rank */
int32_t s1f_program_num_ranks(const s1f_program *program);
int32_t s1f_program_num_stages(const s1f_program *program);
int32_t s1f_program_num_microbatches(const s1f_program *program);
int32_t s1f_program_num_segments(const s1f_program *program);
int32_t s1f_program_rank_of_stage(const s1f_program *program, int32_t stage);
int s1f_program_has_backward(const s1f_program *program); /* 0: eval */

#endif
