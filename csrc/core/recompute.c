/* recompute.c - copies an order, with Rs. */
#include "recompute.h"

#include "check.h"

#include <stdlib.h>

static s1f_status copy_with(const s1f_schedule *schedule, const s1f_shape *shape, const unsigned char *chosen,
                            s1f_schedule *out)
{
    s1f_status status = S1F_OK;
    for (int32_t rank = 0; rank < shape->num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units && status == S1F_OK; i++) {
            int64_t cell = s1f_cell_of_all(shape, units[i]);
            int stays = s1f_cell_has(shape, units[i], S1F_PRODUCT_RECOMPUTED) ||
                        s1f_cell_has(shape, units[i], S1F_PRODUCT_COMING);
            if (s1f_pass_makes(units[i].pass, S1F_PRODUCT_INPUT_GRADIENT) && !stays &&
                (chosen == NULL || chosen[cell])) {
                s1f_unit again = units[i];
                again.pass = S1F_PASS_RECOMPUTE;
                status = s1f_schedule_append(out, again);
            }
            if (status == S1F_OK)
                status = s1f_schedule_append(out, units[i]);
        }
    }
    return status;
}

s1f_status s1f_schedule_recompute(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    uint16_t *optional = NULL;
    s1f_schedule *copy = NULL;
    s1f_status status = s1f_schedule_check(schedule, 0);
    if (status == S1F_OK)
        status = s1f_schedule_find_optional(schedule, &optional);
    shape.optional = optional;
    if (status == S1F_OK)
        status = s1f_schedule_create_like(schedule, &copy);
    if (status == S1F_OK)
        status = copy_with(schedule, &shape, chosen, copy);
    free(optional);
    if (status != S1F_OK) {
        s1f_schedule_free(copy);
        return status;
    }
    *out = copy;
    return S1F_OK;
}
