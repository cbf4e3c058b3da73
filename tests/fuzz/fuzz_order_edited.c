/* fuzz_order_edited.c - is an order that differs from a sound one in a few units lowered well, or refused?
 *
 * Text that a fuzzer writes hardly ever keeps the rules. So this starts from an order of a family and moves, doubles,
 * drops and changes units, among which are orders that no family has. */
#include "order.h"

enum { MOST_UNITS = 512, MOST_EDITS = 12 };

typedef struct {
    s1f_unit units[MOST_UNITS];
    int32_t count;
} unit_list;

static void move_unit(unit_list *list, int32_t from, int32_t to)
{
    s1f_unit moved = list->units[from];
    memmove(&list->units[from], &list->units[from + 1], (size_t)(list->count - from - 1) * sizeof moved);
    memmove(&list->units[to + 1], &list->units[to], (size_t)(list->count - to - 1) * sizeof moved);
    list->units[to] = moved;
}

static void insert_unit(unit_list *list, int32_t at, s1f_unit unit)
{
    if (list->count == MOST_UNITS)
        return;
    memmove(&list->units[at + 1], &list->units[at], (size_t)(list->count - at) * sizeof unit);
    list->units[at] = unit;
    list->count++;
}

static void edit(fuzz_input *in, unit_list *list)
{
    if (list->count == 0)
        return;
    uint8_t kind = (uint8_t)take_bits(in, 1);
    int32_t at = take_below(in, list->count), other = take_below(in, list->count);
    s1f_unit *unit = &list->units[at];
    switch (kind % 8) {
    case 0:
    case 1:
    case 2: move_unit(list, at, other); break;
    case 3: /* split a backward: W stands anywhere behind its I */
    case 4:
        if (unit->pass == S1F_PASS_BACKWARD) {
            s1f_unit weight = *unit;
            unit->pass = S1F_PASS_BACKWARD_INPUT;
            weight.pass = S1F_PASS_BACKWARD_WEIGHT;
            insert_unit(list, other > at ? other : at + 1, weight);
        }
        break;
    case 5: insert_unit(list, other, *unit); break;
    case 6:
        memmove(unit, unit + 1, (size_t)(list->count - at - 1) * sizeof *unit);
        list->count--;
        break;
    default: unit->pass = kind / 8 % 4;
    }
}

/* All units of a rank with their backward split, each W right behind its I. */
static void split_all(unit_list *list)
{
    for (int32_t i = 0; i < list->count; i++)
        if (list->units[i].pass == S1F_PASS_BACKWARD && list->count < MOST_UNITS) {
            s1f_unit weight = list->units[i];
            list->units[i].pass = S1F_PASS_BACKWARD_INPUT;
            weight.pass = S1F_PASS_BACKWARD_WEIGHT;
            insert_unit(list, i + 1, weight);
        }
}

static s1f_schedule *build(fuzz_input *in)
{
    static const char *const families[] = {"seq1f1b", "gpipe",   "seq1f1b-interleaved", "seq-zbv", "seq-zb-h1",
                                           "hanayo",  "slimpipe"};
    const char *family = families[take_below(in, sizeof families / sizeof *families)];
    int32_t P = 1 + take_below(in, 3), M = 1 + take_below(in, 3), k = 1 + take_below(in, 3), v = 1 + take_below(in, 3);
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_build(family, P, M, k, v, NULL, &schedule);
    if (status != S1F_OK)
        REQUIRE_REFUSED(status);
    return schedule;
}

/* An empty order of these counts whose segments follow any one before them: an order of chains obeys its rules. */
static s1f_schedule *create_trees(fuzz_input *in, const s1f_shape *shape)
{
    enum { MOST_SEGMENTS = 16 };
    int32_t parents[MOST_SEGMENTS * MOST_SEGMENTS], at = 0;
    int64_t first_cell[MOST_SEGMENTS + 1] = {0};
    s1f_schedule *made = NULL;
    s1f_shape trees = *shape;
    REQUIRE(shape->num_microbatches <= MOST_SEGMENTS && shape->num_segments <= MOST_SEGMENTS);
    for (int32_t m = 0; m < shape->num_microbatches; m++) {
        first_cell[m + 1] = first_cell[m] + shape->num_segments;
        for (int32_t s = 0; s < shape->num_segments; s++)
            parents[at++] = s == 0 ? -1 : take_below(in, s);
    }
    trees.first_cell = first_cell;
    REQUIRE(s1f_schedule_create(&trees, parents, &made) == S1F_OK);
    return made;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unit_list lists[4];
    fuzz_input in = {data, size};
    s1f_schedule *schedule = build(&in), *edited = NULL;
    if (schedule == NULL)
        return 0;
    s1f_shape shape = s1f_schedule_shape(schedule);
    for (int32_t rank = 0; rank < shape.num_ranks; rank++) {
        int64_t count;
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &count);
        REQUIRE(count <= MOST_UNITS);
        memcpy(lists[rank].units, units, (size_t)count * sizeof *units);
        lists[rank].count = (int32_t)count;
    }
    uint8_t flags = (uint8_t)take_bits(&in, 1);
    for (int32_t rank = 0; flags & 1 && rank < shape.num_ranks; rank++)
        split_all(&lists[rank]);
    for (int i = 0; i < MOST_EDITS && in.left > 0; i++)
        edit(&in, &lists[take_below(&in, shape.num_ranks)]);
    if (flags & 8)
        edited = create_trees(&in, &shape);
    else
        REQUIRE(s1f_schedule_create_like(schedule, &edited) == S1F_OK);
    for (int32_t rank = 0; rank < shape.num_ranks; rank++)
        for (int32_t i = 0; i < lists[rank].count; i++)
            REQUIRE(s1f_schedule_append(edited, lists[rank].units[i]) == S1F_OK);
    if (require_order_is_sound(edited, flags >> 1 & 3))
        require_text_reads_back(edited);
    s1f_schedule_free(edited);
    s1f_schedule_free(schedule);
    return 0;
}
