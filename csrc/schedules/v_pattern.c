/* v_pattern.c - writes the order of a rank with two stages as a few patterns that repeat. */
#include "families.h"

s1f_v_rank s1f_v_rank_of(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    return (s1f_v_rank){.schedule = schedule,
                        .rank = rank,
                        .stages = {rank, 2 * request->num_ranks - 1 - rank},
                        .num_cells = request->num_cells};
}

static s1f_status append_oldest_weight(s1f_v_rank *r)
{
    int64_t num_units, i = r->place_of_weight;
    const s1f_unit *units = s1f_schedule_units(r->schedule, r->rank, &num_units);
    while (i < num_units && units[i].pass != S1F_PASS_BACKWARD_INPUT)
        i++;
    if (i == num_units)
        return S1F_OK;
    r->place_of_weight = i + 1;
    s1f_unit weight = units[i];
    weight.pass = S1F_PASS_BACKWARD_WEIGHT;
    return s1f_schedule_append(r->schedule, weight);
}

static s1f_status append_letter(s1f_v_rank *r, char letter)
{
    int is_second = letter < 'a';
    s1f_pass pass = (s1f_pass)s1f_pass_from_letter(is_second ? letter : (char)(letter - 'a' + 'A'));
    if (pass == S1F_PASS_BACKWARD_WEIGHT)
        return append_oldest_weight(r);
    int64_t *done = pass == S1F_PASS_FORWARD ? &r->forwards[is_second] : &r->backwards[is_second];
    return *done < r->num_cells ? s1f_schedule_append_nth(r->schedule, pass, r->stages[is_second], (*done)++) : S1F_OK;
}

s1f_status s1f_repeat(s1f_v_rank *r, int64_t times, const char *pattern)
{
    for (int64_t i = 0; i < times; i++)
        for (const char *letter = pattern; *letter != '\0'; letter++)
            S1F_TRY(append_letter(r, *letter));
    return S1F_OK;
}

s1f_status s1f_alternate_groups(const s1f_request *request, s1f_schedule *schedule, int32_t rank, int64_t warmup,
                                int64_t size)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    s1f_v_rank r = s1f_v_rank_of(request, schedule, rank);
    int64_t num_groups = shape.num_microbatches / size;
    for (int64_t i = 0; i < warmup + num_groups; i++) {
        int64_t forward = i < num_groups ? i + 1 : num_groups, back = i < warmup ? 0 : i - warmup + 1;
        S1F_TRY(s1f_repeat(&r, s1f_first_cell(&shape, (int32_t)(forward * size)) - r.forwards[0], "f"));
        S1F_TRY(s1f_repeat(&r, s1f_first_cell(&shape, (int32_t)(back * size)) - r.backwards[0], "b"));
    }
    return S1F_OK;
}
