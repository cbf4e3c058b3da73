/* table.c - counts of tables, and seconds that stand in for others. */
#include "table.h"

#include <math.h>

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

s1f_status s1f_require_seconds(const char *what, const double *seconds, int64_t count)
{
    for (int64_t i = 0; seconds != NULL && i < count; i++)
        if (!(seconds[i] >= 0) || !isfinite(seconds[i]))
            return s1f_fail(S1F_ERR_ARG, "%s %g, must be finite and at least 0", what, seconds[i]);
    return S1F_OK;
}

s1f_status s1f_require_bytes(const char *name, const int64_t *bytes, int64_t count, int64_t most)
{
    for (int64_t i = 0; bytes != NULL && i < count; i++)
        if (bytes[i] < 0 || bytes[i] > most)
            return s1f_fail(S1F_ERR_ARG, "%s holds %lld bytes, must be in 0..%lld", name, (long long)bytes[i],
                            (long long)most);
    return S1F_OK;
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
