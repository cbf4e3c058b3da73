/* recompute.c - copies an order, with Rs. */
#include "recompute.h"

#include "transform.h"

s1f_status s1f_schedule_recompute(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out)
{
    s1f_transform t;
    s1f_status status = s1f_transform_begin(schedule, &t);
    for (int32_t rank = 0; status == S1F_OK && rank < t.shape.num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units && status == S1F_OK; i++) {
            int is_chosen = chosen == NULL || chosen[s1f_cell_of_all(&t.shape, units[i])];
            if (is_chosen && s1f_pass_makes(units[i].pass, S1F_PRODUCT_INPUT_GRADIENT) &&
                s1f_kind_of_cell(&t.shape, units[i]) == S1F_CELL_KEPT) {
                s1f_unit again = units[i];
                again.pass = S1F_PASS_RECOMPUTE;
                status = s1f_schedule_append(t.out, again);
            }
            if (status == S1F_OK)
                status = s1f_schedule_append(t.out, units[i]);
        }
    }
    return s1f_transform_finish(&t, status, out);
}
