/* program.c - holds the programs of all ranks. */
#include "program.h"

#include <stdlib.h>

const char *const s1f_opcode_names[S1F_NUM_OPS] = {
    [S1F_OP_POST] = "POST", [S1F_OP_WAIT] = "WAIT",       [S1F_OP_RUN] = "RUN",   [S1F_OP_SEND] = "SEND",
    [S1F_OP_FREE] = "FREE", [S1F_OP_RECEIVE] = "RECEIVE", [S1F_OP_BACK] = "BACK",
};

/* Room for what lower.h says of messages. */
static void take_messages(s1f_program *program)
{
    size_t cells = (size_t)s1f_num_cells(&program->shape);
    for (int32_t e = 0; e < program->edges->num_edges; e++) {
        s1f_edge *edge = &program->edges->edges[e];
        edge->number = s1f_pool_take(&program->pool, cells, sizeof *edge->number);
        edge->sender = s1f_pool_take(&program->pool, cells, sizeof *edge->sender);
        edge->receiver = s1f_pool_take(&program->pool, cells, sizeof *edge->receiver);
        edge->place = s1f_pool_take(&program->pool, cells, sizeof *edge->place);
    }
}

s1f_status s1f_program_create(const s1f_schedule *schedule, s1f_program **out)
{
    s1f_program *program = calloc(1, sizeof *program);
    if (program == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a program");
    program->schedule = schedule;
    s1f_shape *shape = &program->shape;
    s1f_status status = s1f_schedule_full_shape(schedule, &program->pool, shape);
    if (status == S1F_OK)
        status = s1f_edges_create(shape, &program->pool, &program->edges);
    if (status == S1F_OK) {
        program->peaks = s1f_pool_take(&program->pool, (size_t)shape->num_stages, sizeof *program->peaks);
        program->ranks = s1f_pool_take(&program->pool, (size_t)shape->num_ranks, sizeof *program->ranks);
        take_messages(program);
        status = s1f_pool_status(&program->pool, "a program");
    }
    for (int32_t rank = 0; status == S1F_OK && rank < shape->num_ranks; rank++)
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
    s1f_pool_free(&program->pool);
    free(program);
}

int64_t s1f_find_late_weights(const s1f_shape *shape, const s1f_unit *units, int64_t num_units, s1f_pool *pool,
                              s1f_late_weight **out)
{
    int64_t count = 0, *ready = s1f_pool_take(pool, (size_t)(shape->num_stages * s1f_num_cells(shape)), sizeof *ready);
    s1f_late_weight *weights = *out = s1f_pool_take(pool, (size_t)num_units, sizeof *weights);
    for (int64_t i = 0; !pool->is_short && i < num_units; i++) {
        int64_t cell = s1f_cell_of_all(shape, units[i]);
        if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_INPUT_GRADIENT))
            ready[cell] = i;
        else if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_WEIGHT_GRADIENT))
            weights[count++] = (s1f_late_weight){ready[cell], i};
    }
    return count;
}
