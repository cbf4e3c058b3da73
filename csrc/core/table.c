/* table.c - counts and forms of tables. */
#include "table.h"

#include <stdio.h>

int64_t s1f_table_count(const s1f_shape *shape, s1f_per per)
{
    switch (per) {
    case S1F_PER_RANK: return shape->num_ranks;
    case S1F_PER_STAGE: return shape->num_stages;
    case S1F_PER_PAIR: return shape->num_stages - 1;
    case S1F_PER_SEGMENT: return s1f_num_columns(shape);
    case S1F_PER_CELL: return shape->num_stages * s1f_num_columns(shape);
    }
    return 0;
}

void s1f_table_form(const s1f_shape *shape, s1f_per per, char *text, size_t bytes)
{
    int count = (int)s1f_table_count(shape, per), M = (int)shape->num_microbatches,
        has_rows = shape->first_cell != NULL;
    switch (per) {
    case S1F_PER_RANK: snprintf(text, bytes, "a number or hold %d, one of each rank", count); break;
    case S1F_PER_STAGE: snprintf(text, bytes, "a number or hold %d, one of each stage", count); break;
    case S1F_PER_PAIR:
        snprintf(text, bytes, "a number or hold %d, one of each pair of neighbouring stages", count);
        break;
    case S1F_PER_SEGMENT:
        if (has_rows)
            snprintf(text, bytes, "a number or hold %d micro-batches, each with one value for each of its segments", M);
        else
            snprintf(text, bytes, "a number or hold %d, one of each segment", count);
        break;
    case S1F_PER_CELL:
        if (has_rows)
            snprintf(text, bytes,
                     "a number or hold %d stages of %d micro-batches each, with one value for each of their segments",
                     (int)shape->num_stages, M);
        else
            snprintf(text, bytes, "a number or hold %d stages of %d segments each", (int)shape->num_stages,
                     (int)shape->num_segments);
        break;
    }
}

s1f_status s1f_table_fill_in(double *const passes[], uint32_t given, int64_t count)
{
    const double *forward = passes[S1F_PASS_FORWARD], *backward = passes[S1F_PASS_BACKWARD];
    double *weight = passes[S1F_PASS_BACKWARD_WEIGHT], *input = passes[S1F_PASS_BACKWARD_INPUT];
    int has_weight = given >> S1F_PASS_BACKWARD_WEIGHT & 1, has_input = given >> S1F_PASS_BACKWARD_INPUT & 1;
    for (int64_t i = 0; i < count; i++) {
        if (!has_weight)
            weight[i] = 0.5 * backward[i];
        if (!has_input)
            input[i] = backward[i] - weight[i];
        if (!(given >> S1F_PASS_RECOMPUTE & 1))
            passes[S1F_PASS_RECOMPUTE][i] = forward[i];
        if (has_weight && !has_input && input[i] < 0)
            return s1f_fail(S1F_ERR_ARG, "weight is more than backward, of which it is a part");
    }
    return S1F_OK;
}
