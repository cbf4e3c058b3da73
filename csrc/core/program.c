/* program.c - holds the programs of all ranks. */
#include "program.h"

#include <stdlib.h>

const char *const s1f_opcode_names[S1F_NUM_OPS] = {
    [S1F_OP_POST] = "POST", [S1F_OP_WAIT] = "WAIT",       [S1F_OP_RUN] = "RUN",   [S1F_OP_SEND] = "SEND",
    [S1F_OP_FREE] = "FREE", [S1F_OP_RECEIVE] = "RECEIVE", [S1F_OP_BACK] = "BACK",
};

s1f_status s1f_program_create(const s1f_schedule *schedule, s1f_program **out)
{
    s1f_shape shape;
    S1F_TRY(s1f_schedule_full_shape(schedule, &shape));
    s1f_program *program = calloc(1, sizeof *program);
    if (program == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a program");
    program->shape = shape;
    program->peaks = calloc((size_t)shape.num_stages, sizeof *program->peaks);
    program->ranks = calloc((size_t)shape.num_ranks, sizeof *program->ranks);
    s1f_status status = program->peaks == NULL || program->ranks == NULL
                            ? s1f_fail(S1F_ERR_MEMORY, "no memory for a program of %d stages", (int)shape.num_stages)
                            : s1f_edges_create(&shape, &program->edges);
    for (int32_t rank = 0; status == S1F_OK && rank < shape.num_ranks; rank++)
        program->ranks[rank].units = s1f_schedule_units(schedule, rank, &program->ranks[rank].num_units);
    if (status != S1F_OK)
        s1f_program_free(program);
    else
        *out = program;
    return status;
}

void s1f_program_free(s1f_program *program)
{
    if (program == NULL)
        return;
    for (int32_t rank = 0; program->ranks != NULL && rank < program->shape.num_ranks; rank++)
        free(program->ranks[rank].instructions);
    free(program->ranks);
    s1f_edges_free(program->edges);
    free(program->peaks);
    free(program);
}
