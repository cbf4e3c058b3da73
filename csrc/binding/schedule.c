/* schedule.c - conversions of orders: their counts and units, their transforms and their text. */
#include "binding.h"

#include "../core/check.h"
#include "../core/key_ranges.h"
#include "../core/schedule.h"
#include "../core/table.h"
#include "../core/transform.h"
#include "../schedules/vocabulary.h"

#include <stdlib.h>
#include <string.h>

static PyObject *count_item(const void *schedule, int64_t rank)
{
    int64_t num_units;
    s1f_schedule_units(schedule, (int32_t)rank, &num_units);
    return PyLong_FromLongLong(num_units);
}

static PyObject *int32s_of(const int32_t *values, int64_t count)
{
    return s1f_view_of(values, count * (int64_t)sizeof *values, "i");
}

S1F_METHOD(PyObject *, schedule_facts, s1f_schedule *, schedule)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t num_bounds = shape.first_cell == NULL ? 0 : shape.num_microbatches + 1;
    return Py_BuildValue("(iiii)NNNNI", shape.num_ranks, shape.num_stages, shape.num_microbatches, shape.num_segments,
                         int32s_of(shape.rank_of_stage, shape.num_stages),
                         s1f_view_of(shape.first_cell, num_bounds * (int64_t)sizeof *shape.first_cell, "q"),
                         shape.trees == NULL ? int32s_of(NULL, 0)
                                             : int32s_of(shape.trees->parent, s1f_num_columns(&shape)),
                         s1f_tuple_of(shape.num_ranks, count_item, schedule), s1f_schedule_passes(schedule));
}

S1F_METHOD(PyObject *, schedule_units, s1f_schedule *, schedule, int32_t, rank)
{
    int64_t num_units;
    if (!s1f_require_index("rank", rank, s1f_schedule_shape(schedule).num_ranks))
        return NULL;
    const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
    return s1f_view_of(units, num_units * (int64_t)sizeof *units, "i");
}

S1F_CORE(uint64_t, schedule_digest, s1f_schedule *, schedule)

/* A byte for each cell of all stages, as program_fit gives them and change_cells takes them. */
S1F_METHOD(PyObject *, schedule_cell_kinds, s1f_schedule *, schedule)
{
    s1f_shape shape;
    s1f_pool pool = {0};
    s1f_status status = s1f_schedule_full_shape(schedule, &pool, &shape);
    int64_t count = status == S1F_OK ? shape.num_stages * s1f_num_cells(&shape) : 0;
    PyObject *bytes = status == S1F_OK ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count) : s1f_raise(status);
    char *kinds = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    for (int64_t i = 0; kinds != NULL && i < count; i++)
        kinds[i] = (char)s1f_kind_of_cell(&shape, s1f_forward_of_cell(&shape, i));
    s1f_pool_free(&pool);
    return bytes;
}

S1F_CORE(s1f_status, schedule_check, s1f_schedule *, schedule, int64_t, max_live_units)

S1F_CORE_MAKES(schedule, schedule_forward_only, s1f_schedule *, schedule)
S1F_CORE_MAKES(schedule, schedule_defer_weights, s1f_schedule *, schedule, int64_t, max_live_units)

S1F_METHOD(PyObject *, schedule_change_cells, s1f_schedule *, schedule, s1f_bytes, kinds)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t cells = shape.num_stages * s1f_num_cells(&shape);
    if (!s1f_require_count("kinds", kinds.count, cells))
        return NULL;
    s1f_pool pool = {0};
    unsigned char *chosen = s1f_pool_take(&pool, (size_t)cells, sizeof *chosen);
    s1f_schedule *recomputed = NULL, *moved = NULL;
    s1f_status status = s1f_pool_status(&pool, "the chosen units");
    for (int64_t i = 0; status == S1F_OK && i < cells; i++)
        chosen[i] = kinds.values[i] == S1F_CELL_RECOMPUTED;
    if (status == S1F_OK)
        status = s1f_schedule_recompute(schedule, chosen, &recomputed);
    if (status == S1F_OK && memchr(kinds.values, S1F_CELL_MOVED, (size_t)cells) != NULL) {
        for (int64_t i = 0; i < cells; i++)
            chosen[i] = kinds.values[i] == S1F_CELL_MOVED;
        status = s1f_schedule_offload(recomputed, chosen, &moved);
        s1f_schedule_free(recomputed);
        recomputed = moved;
    }
    s1f_pool_free(&pool);
    return s1f_new_schedule(status, recomputed, NULL);
}

S1F_METHOD(PyObject *, schedule_spread_vocabulary, s1f_schedule *, schedule, int32_t, what, int64_t, ahead, s1f_doubles,
           seconds)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t cells = s1f_table_count(&shape, S1F_PER_CELL);
    if (!s1f_require_count("seconds", seconds.count, s1f_num_passes * cells))
        return NULL;
    const double *of_pass[S1F_MAX_PASSES];
    for (int pass = 0; pass < s1f_num_passes; pass++)
        of_pass[pass] = seconds.values + pass * cells;
    s1f_schedule *spread = NULL;
    s1f_status status = s1f_schedule_spread_vocabulary(schedule, what, ahead, of_pass, &spread);
    return s1f_new_schedule(status, spread, NULL);
}

S1F_METHOD(PyObject *, schedule_assign_rows, s1f_schedule *, schedule, int32_t, rank, s1f_int64s, sizes)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t num_units, most = 0, cells = shape.num_stages * s1f_num_cells(&shape);
    s1f_status status = s1f_schedule_check(schedule, 0);
    if (status != S1F_OK)
        return s1f_raise(status);
    if (!s1f_require_index("rank", rank, shape.num_ranks) ||
        !s1f_require_count("sizes", sizes.count, s1f_num_columns(&shape)))
        return NULL;
    int64_t *rows = PyMem_Calloc((size_t)cells, sizeof *rows);
    if (rows == NULL)
        return PyErr_NoMemory();
    const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
    status = s1f_assign_rows(&shape, units, num_units, sizes.values, rows, &most);
    PyObject *result = status == S1F_OK
                           ? Py_BuildValue("(NL)", s1f_list_of(cells, s1f_int64_item, rows), (long long)most)
                           : s1f_raise(status);
    PyMem_Free(rows);
    return result;
}

/* -- text ---------------------------------------------------------------------------------------------------------- */

S1F_METHOD(PyObject *, schedule_to_text, s1f_schedule *, schedule)
{
    char *text = NULL;
    s1f_status status = s1f_schedule_to_text(schedule, &text);
    PyObject *result = status == S1F_OK ? PyUnicode_FromString(text) : s1f_raise(status);
    free(text);
    return result;
}

S1F_CORE_MAKES(schedule, schedule_from_text, const char *, text, int32_t, num_segments)

PyMethodDef s1f_schedule_methods[] = {
    S1F_ROW(schedule_facts,
            "-> tuple[tuple[int, int, int, int], memoryview[int], memoryview[int], memoryview[int], tuple[int, ...], "
            "int]: (ranks, stages, micro-batches, segments), the rank of every stage, the first cell of every "
            "micro-batch and the count of all (empty where all have as many segments), the parents of all segments "
            "(empty: chains), the units of every rank, bits of the passes that occur."),
    S1F_ROW(schedule_units, "-> memoryview[int]: int32 [unit][pass, stage, microbatch, segment] in run order."),
    S1F_ROW(schedule_digest, "64 bits of the units and their order: equal in equal schedules."),
    S1F_ROW(schedule_cell_kinds,
            "-> bytes: one for each cell of all stages: 0 what F saves is kept, 1 recomputed, 2 moved away."),
    S1F_ROW(schedule_check, "Raises ScheduleError; 0 is no cap."),
    S1F_ROW(schedule_defer_weights, "The same order with W as late as may be; 0: as the order holds."),
    S1F_ROW(schedule_spread_vocabulary,
            "The same order with S and T (what & 1), E and G (what & 2) of every cell, placed by the seconds of each "
            "pass, and with Fs so many places ahead of all else."),
    S1F_ROW(schedule_change_cells,
            "The same order with R before the backward (1), or O, A and L (2), of the cells with this byte in "
            "[stage][cell], cells by micro-batch and segment."),
    S1F_ROW(schedule_assign_rows,
            "-> tuple[list[int], int]: the first row of the keys of each cell of all stages, by the order of this "
            "rank, 0 at stages of others, and the most rows that a slot needs. sizes: tokens, [column]."),
    S1F_ROW(schedule_forward_only, "The same order with forward units only."),
    S1F_ROW(schedule_to_text, "-> str: one line of units per rank."),
    S1F_ROW(schedule_from_text, "A schedule handle. num_segments: of every micro-batch; 0: those that the units name."),
    {NULL, NULL, 0, NULL}};
