/* tape.c - writes tapes, and makes the units of those that are streamed. */
#include "tape.h"

#include <stdlib.h>
#include <string.h>

/* -- what programs and families share ------------------------------------------------------------------------------ */

static s1f_tape_kind *kind_of(const s1f_tape *tape, int32_t stage, int32_t pass)
{
    return &tape->kinds[(int64_t)stage * S1F_NUM_PASSES + pass];
}

/* All but units: kinds and windows are still to be filled. */
static s1f_status create(int32_t num_ranks, int32_t num_stages, int32_t num_segments, int32_t num_edges, s1f_tape **out)
{
    if (num_stages > INT32_MAX / S1F_NUM_PASSES)
        return s1f_fail(S1F_ERR_ARG, "%d stages are more than %d", num_stages, INT32_MAX / S1F_NUM_PASSES);
    s1f_tape *tape = calloc(1, sizeof *tape);
    if (tape == NULL)
        goto no_memory;
    tape->num_ranks = num_ranks;
    tape->num_stages = num_stages;
    tape->num_segments = num_segments;
    tape->num_edges = num_edges;
    tape->edges = calloc((size_t)num_edges + 1, sizeof *tape->edges); /* + 1: calloc(0) may be NULL */
    tape->window = calloc((size_t)num_edges + 1, sizeof *tape->window);
    tape->kinds = calloc((size_t)num_stages * S1F_NUM_PASSES, sizeof *tape->kinds);
    tape->num_units = calloc((size_t)num_ranks, sizeof *tape->num_units);
    if (tape->edges == NULL || tape->window == NULL || tape->kinds == NULL || tape->num_units == NULL)
        goto no_memory;
    *out = tape;
    return S1F_OK;

no_memory:
    s1f_tape_free(tape);
    return s1f_fail(S1F_ERR_MEMORY, "no memory for the tape of %d stages", num_stages);
}

static void fill_kinds(s1f_tape *tape)
{
    for (int32_t i = 0; i < tape->num_stages * S1F_NUM_PASSES; i++) {
        int32_t pass = i % S1F_NUM_PASSES;
        s1f_tape_kind *kind = &tape->kinds[i];
        kind->in = kind->out = kind->posts[0] = kind->posts[1] = -1;
        kind->last_reads = tape->has_backward ? pass == S1F_PASS_BACKWARD || pass == S1F_PASS_BACKWARD_WEIGHT : 1;
    }
    for (int32_t e = 0; e < tape->num_edges; e++) {
        const s1f_edge *edge = &tape->edges[e];
        int32_t passes[2] = {S1F_PASS_FORWARD, S1F_PASS_FORWARD};
        if (edge->is_gradient) {
            passes[0] = S1F_PASS_BACKWARD;
            passes[1] = S1F_PASS_BACKWARD_INPUT;
        }
        for (int i = 0; i < 2; i++) {
            kind_of(tape, edge->source_stage, passes[i])->out = e;
            kind_of(tape, edge->destination_stage, passes[i])->in = e;
        }
        for (int32_t pass = 0; pass < S1F_NUM_PASSES; pass++)
            if (kind_of(tape, edge->destination_stage, pass)->last_reads)
                kind_of(tape, edge->destination_stage, pass)->posts[edge->is_gradient] = e;
    }
}

/* A place holds one message at a time. Where messages are used in the order of their numbers, message n is through before
 * n + places may be sent; elsewhere any two of one step may be on their way. */
static void fill_window(s1f_tape *tape, int32_t edge, int in_order)
{
    int64_t least = in_order ? tape->edges[edge].num_places : tape->edges[edge].num_messages;
    for (tape->window[edge] = 1; tape->window[edge] < least;)
        tape->window[edge] *= 2;
}

void s1f_tape_free(s1f_tape *tape)
{
    if (tape == NULL)
        return;
    if (tape->units != NULL)
        for (int32_t rank = 0; rank < tape->num_ranks; rank++)
            free(tape->units[rank]);
    free(tape->units);
    free(tape->warmup);
    free(tape->num_units);
    free(tape->kinds);
    free(tape->window);
    free(tape->edges);
    free(tape);
}

/* -- from a program ------------------------------------------------------------------------------------------------ */

/* next_used[edge]: 1 + number of the last message used, or -1 once one was used out of turn. */
static void write_units(const s1f_program *program, int32_t rank, s1f_tape *tape, int64_t *next_used)
{
    int64_t count, awaited = -1, num_units = 0;
    const s1f_instruction *instructions = s1f_program_instructions(program, rank, &count);
    for (int64_t i = 0; i < count; i++) {
        s1f_unit unit = instructions[i].unit;
        int32_t edge = instructions[i].edge;
        if (instructions[i].opcode == S1F_OP_WAIT) { /* of the RUN that follows */
            awaited = instructions[i].sequence;
            next_used[edge] = next_used[edge] == awaited ? awaited + 1 : -1;
        } else if (instructions[i].opcode == S1F_OP_RUN) {
            int32_t kind = unit.stage * S1F_NUM_PASSES + unit.pass;
            tape->units[rank][num_units++] =
                (s1f_tape_unit){kind, unit.segment, (int32_t)awaited, instructions[i].is_pair};
            tape->kinds[kind].num_units++;
            tape->kinds[kind].rank = rank;
            awaited = -1;
        }
    }
}

s1f_status s1f_tape_of_program(const s1f_program *program, s1f_tape **out)
{
    int32_t num_edges, num_ranks = s1f_program_num_ranks(program);
    const s1f_edge *edges = s1f_program_edges(program, &num_edges);
    s1f_tape *tape = NULL;
    int64_t *next_used = NULL;
    s1f_status status =
        create(num_ranks, s1f_program_num_stages(program), s1f_program_num_segments(program), num_edges, &tape);
    if (status != S1F_OK)
        return status;
    memcpy(tape->edges, edges, (size_t)num_edges * sizeof *edges);
    tape->has_backward = s1f_program_has_backward(program);
    fill_kinds(tape);
    next_used = calloc((size_t)num_edges + 1, sizeof *next_used);
    tape->units = calloc((size_t)num_ranks, sizeof *tape->units);
    if (next_used == NULL || tape->units == NULL)
        goto no_memory;
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        tape->num_units[rank] = s1f_program_num_units(program, rank);
        tape->units[rank] = malloc((size_t)tape->num_units[rank] * sizeof **tape->units);
        if (tape->units[rank] == NULL)
            goto no_memory;
        write_units(program, rank, tape, next_used);
    }
    for (int32_t e = 0; e < num_edges; e++)
        fill_window(tape, e, next_used[e] >= 0);
    free(next_used);
    *out = tape;
    return S1F_OK;

no_memory:
    free(next_used);
    s1f_tape_free(tape);
    return s1f_fail(S1F_ERR_MEMORY, "no memory for the tape of %d ranks", num_ranks);
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

void s1f_tape_rewind(const s1f_tape *tape, int32_t rank, s1f_tape_reader *reader)
{
    reader->num_forward = reader->num_backward = 0;
    reader->forward_segment = 0;
    reader->backward_segment = tape->num_segments - 1;
    reader->next = reader->end = reader->block;
    if (tape->units != NULL) {
        reader->next = tape->units[rank];
        reader->end = reader->next + tape->num_units[rank];
    }
}

/* Forwards m.0 .. m.k-1 and backwards m.k-1 .. m.0, micro-batches in order; messages in the same order on every rank. */
int s1f_tape_refill(const s1f_tape *tape, int32_t rank, s1f_tape_reader *reader)
{
    if (tape->units != NULL)
        return 0;
    int64_t N = tape->num_forward, warmup = tape->warmup[rank];
    int32_t k = tape->num_segments, forward = rank * S1F_NUM_PASSES + S1F_PASS_FORWARD;
    int has_before = rank > 0, has_behind = rank + 1 < tape->num_ranks;
    s1f_tape_unit *unit = reader->block;
    for (; unit < reader->block + S1F_TAPE_BLOCK && reader->num_backward < N; unit++) {
        if (reader->num_forward < N && reader->num_forward <= warmup + reader->num_backward) {
            *unit =
                (s1f_tape_unit){forward, reader->forward_segment, has_before ? (int32_t)reader->num_forward : -1, 0};
            reader->forward_segment = reader->forward_segment + 1 < k ? reader->forward_segment + 1 : 0;
            reader->num_forward++;
        } else {
            *unit = (s1f_tape_unit){forward - S1F_PASS_FORWARD + S1F_PASS_BACKWARD, reader->backward_segment,
                                    has_behind ? (int32_t)reader->num_backward : -1, 0};
            reader->backward_segment = reader->backward_segment > 0 ? reader->backward_segment - 1 : k - 1;
            reader->num_backward++;
        }
    }
    reader->next = reader->block;
    reader->end = unit;
    return unit > reader->block;
}
