/* program.c - holds the programs of all ranks, and says what is live in them. */
#include "program.h"

#include "trees.h"

#include <stdlib.h>
#include <string.h>

const char *const s1f_opcode_names[S1F_NUM_OPS] = {
    [S1F_OP_POST] = "POST", [S1F_OP_WAIT] = "WAIT",       [S1F_OP_RUN] = "RUN",   [S1F_OP_SEND] = "SEND",
    [S1F_OP_FREE] = "FREE", [S1F_OP_RECEIVE] = "RECEIVE", [S1F_OP_BACK] = "BACK",
};

s1f_status s1f_program_create(const s1f_shape *shape, s1f_program **out)
{
    size_t num_stages = (size_t)shape->num_stages;
    s1f_program *program = calloc(1, sizeof *program);
    if (program == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a program");
    program->rank_of_stage = malloc(num_stages * sizeof *program->rank_of_stage);
    program->peaks = calloc(num_stages, sizeof *program->peaks);
    program->ranks = calloc((size_t)shape->num_ranks, sizeof *program->ranks);
    s1f_status status = S1F_OK;
    if (program->rank_of_stage == NULL || program->peaks == NULL || program->ranks == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for a program of %zu stages", num_stages);
    program->shape = *shape;
    size_t bytes = ((size_t)shape->num_microbatches + 1) * sizeof *program->first_cell;
    size_t cells = num_stages * (size_t)s1f_num_cells(shape) * sizeof *program->marks;
    if (shape->marks != NULL && (program->marks = malloc(cells)) == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for what becomes of the units of %zu stages", num_stages);
    if (shape->first_cell != NULL && (program->first_cell = malloc(bytes)) == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for a program of %d micro-batches", (int)shape->num_microbatches);
    if (status == S1F_OK && shape->trees != NULL)
        status = s1f_trees_create(shape, shape->trees->parent, &program->trees);
    if (status == S1F_OK) {
        if (program->first_cell != NULL)
            memcpy(program->first_cell, shape->first_cell, bytes);
        program->shape.first_cell = program->first_cell;
        program->shape.trees = program->trees;
        if (program->marks != NULL)
            memcpy(program->marks, shape->marks, cells);
        program->shape.marks = program->marks;
        memcpy(program->rank_of_stage, shape->rank_of_stage, num_stages * sizeof *program->rank_of_stage);
        program->shape.rank_of_stage = program->rank_of_stage;
        status = s1f_edges_create(&program->shape, &program->edges);
    }
    if (status != S1F_OK) {
        s1f_program_free(program);
        return status;
    }
    *out = program;
    return S1F_OK;
}

void s1f_program_free(s1f_program *program)
{
    if (program == NULL)
        return;
    for (int32_t rank = 0; program->ranks != NULL && rank < program->shape.num_ranks; rank++) {
        free(program->ranks[rank].instructions);
        free(program->ranks[rank].units);
    }
    free(program->ranks);
    s1f_edges_free(program->edges);
    free(program->peaks);
    free(program->rank_of_stage);
    free(program->first_cell);
    free(program->marks);
    s1f_trees_free(program->trees);
    free(program);
}

int64_t s1f_program_peak_tokens(const s1f_program *program, int32_t stage, const int64_t *segment_sizes)
{
    const s1f_rank_program *own = &program->ranks[program->rank_of_stage[stage]];
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    int64_t live = 0, peak = 0;
    for (int64_t i = 0; i < own->num_units; i++) {
        s1f_unit unit = own->units[i];
        if (unit.stage != stage)
            continue;
        s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
        int64_t tokens = segment_sizes[s1f_column(&program->shape, unit)];
        live += s1f_begins_to_live(lifetimes) ? tokens : 0;
        peak = live > peak ? live : peak;
        live -= s1f_ends_to_live(lifetimes) ? tokens : 0;
    }
    return peak;
}
