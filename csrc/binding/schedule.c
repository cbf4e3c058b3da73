/* schedule.c - conversions of orders: their counts and units, their transforms and their text. */
#include "binding.h"

#include "../core/check.h"
#include "../core/key_ranges.h"
#include "../core/schedule.h"
#include "../core/table.h"
#include "../core/transform.h"
#include "../schedules/vocabulary.h"

#include <stdlib.h>

static PyObject *row_item(const void *shape, int64_t m)
{
    return PyLong_FromLong(s1f_segments_of(shape, (int32_t)m));
}

static PyObject *int32_item(const void *values, int64_t i)
{
    return PyLong_FromLong(((const int32_t *)values)[i]);
}

static PyObject *count_item(const void *schedule, int64_t rank)
{
    int64_t num_units;
    s1f_schedule_units(schedule, (int32_t)rank, &num_units);
    return PyLong_FromLongLong(num_units);
}

S1F_METHOD_OF(schedule_facts, schedule, schedule)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int has_rows = shape.first_cell != NULL, has_trees = shape.trees != NULL;
    return Py_BuildValue(
        "(iiii)NNNNI", shape.num_ranks, shape.num_stages, shape.num_microbatches, shape.num_segments,
        s1f_tuple_of(shape.num_stages, int32_item, shape.rank_of_stage),
        s1f_tuple_of(has_rows ? shape.num_microbatches : 0, row_item, &shape),
        s1f_tuple_of(has_trees ? s1f_num_columns(&shape) : 0, int32_item, has_trees ? shape.trees->parent : NULL),
        s1f_tuple_of(shape.num_ranks, count_item, schedule), s1f_schedule_passes(schedule));
}

S1F_METHOD_OF_NUMBER(schedule_units, schedule, schedule, rank)
{
    int64_t num_units;
    if (!s1f_require_index("rank", rank, s1f_schedule_shape(schedule).num_ranks))
        return NULL;
    const s1f_unit *units = s1f_schedule_units(schedule, (int32_t)rank, &num_units);
    return PyBytes_FromStringAndSize((const char *)units, (Py_ssize_t)num_units * (Py_ssize_t)sizeof *units);
}

static PyObject *schedule_equal(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *a, *b;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_schedule, &a, s1f_to_schedule, &b))
        return NULL;
    return PyBool_FromLong(s1f_schedule_equal(a, b));
}

S1F_METHOD_RETURNS(schedule_digest, schedule, schedule, PyLong_FromUnsignedLongLong(s1f_schedule_digest(schedule)))

/* A byte for each cell of all stages, as program_fit gives them and change_cells takes them. */
S1F_METHOD_OF(schedule_cell_kinds, schedule, schedule)
{
    s1f_shape shape;
    s1f_status status = s1f_schedule_full_shape(schedule, &shape);
    if (status != S1F_OK)
        return s1f_raise(status);
    int64_t of_stage = s1f_num_cells(&shape), count = shape.num_stages * of_stage;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count);
    char *kinds = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    for (int64_t i = 0; kinds != NULL && i < count; i++) {
        int32_t stage = (int32_t)(i / of_stage);
        kinds[i] = (char)s1f_kind_of_cell(&shape, s1f_unit_of_cell(&shape, S1F_PASS_FORWARD, stage, i % of_stage));
    }
    return bytes;
}

S1F_METHOD_OF_NUMBER(schedule_check, schedule, schedule, max_live_units)
{
    return s1f_none(s1f_schedule_check(schedule, max_live_units));
}

S1F_METHOD_OF(schedule_forward_only, schedule, schedule)
{
    s1f_schedule *forward = NULL;
    s1f_status status = s1f_schedule_forward_only(schedule, &forward);
    return s1f_new_schedule(status, forward, NULL);
}

S1F_METHOD_OF_NUMBER(schedule_defer_weights, schedule, schedule, max_live_units)
{
    s1f_schedule *deferred = NULL;
    s1f_status status = s1f_schedule_defer_weights(schedule, max_live_units, &deferred);
    return s1f_new_schedule(status, deferred, NULL);
}

static PyObject *schedule_change_cells(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    int kind;
    const char *chosen;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(arguments, "O&iz#", s1f_to_schedule, &schedule, &kind, &chosen, &count))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t cells = shape.num_stages * s1f_num_cells(&shape);
    if (chosen != NULL && !s1f_require_count("chosen", count, cells))
        return NULL;
    const unsigned char *bytes = (const unsigned char *)chosen;
    s1f_schedule *other = NULL;
    s1f_status status = kind == S1F_CELL_RECOMPUTED ? s1f_schedule_recompute(schedule, bytes, &other)
                                                    : s1f_schedule_offload(schedule, bytes, &other);
    return s1f_new_schedule(status, other, NULL);
}

static PyObject *schedule_spread_vocabulary(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    int64_t ahead;
    int what;
    s1f_array given = {.name = "seconds"};
    if (!PyArg_ParseTuple(arguments, "O&iO&O&", s1f_to_schedule, &schedule, &what, s1f_to_int64, &ahead, s1f_to_array,
                          &given))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t cells = s1f_table_count(&shape, S1F_PER_CELL);
    const double *seconds[S1F_MAX_PASSES];
    for (int pass = 0; pass < s1f_num_passes; pass++)
        seconds[pass] = (const double *)given.values + pass * cells;
    s1f_schedule *spread = NULL;
    s1f_status status = s1f_require_count(given.name, given.count, s1f_num_passes * cells)
                            ? s1f_schedule_spread_vocabulary(schedule, what, ahead, seconds, &spread)
                            : S1F_ERR_PYTHON;
    s1f_release_arrays(&given, 1);
    return s1f_new_schedule(status, spread, NULL);
}

static PyObject *schedule_assign_rows(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    s1f_array sizes = {.name = "sizes"};
    int rank;
    if (!PyArg_ParseTuple(arguments, "O&iO&", s1f_to_schedule, &schedule, &rank, s1f_to_array, &sizes))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t num_units, most = 0, cells = shape.num_stages * s1f_num_cells(&shape);
    int64_t *rows = PyMem_Calloc((size_t)cells, sizeof *rows);
    s1f_status status = rows == NULL
                            ? s1f_fail(S1F_ERR_MEMORY, "no memory for the rows of %lld segments", (long long)cells)
                            : s1f_schedule_check(schedule, 0);
    if (status == S1F_OK && s1f_require_index("rank", rank, shape.num_ranks) &&
        s1f_require_count(sizes.name, sizes.count, s1f_num_columns(&shape))) {
        const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
        status = s1f_assign_rows(&shape, units, num_units, sizes.values, rows, &most);
    } else if (status == S1F_OK) {
        status = S1F_ERR_PYTHON;
    }
    s1f_release_arrays(&sizes, 1);
    PyObject *result = status == S1F_OK
                           ? Py_BuildValue("(NL)", s1f_list_of(cells, s1f_int64_item, rows), (long long)most)
                           : s1f_raise(status);
    PyMem_Free(rows);
    return result;
}

/* -- text ---------------------------------------------------------------------------------------------------------- */

S1F_METHOD_OF(schedule_to_text, schedule, schedule)
{
    char *text = NULL;
    s1f_status status = s1f_schedule_to_text(schedule, &text);
    PyObject *result = status == S1F_OK ? PyUnicode_FromString(text) : s1f_raise(status);
    free(text);
    return result;
}

static PyObject *schedule_from_text(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *text; /* "s" refuses text with a zero byte */
    int num_segments = 0;
    if (!PyArg_ParseTuple(arguments, "s|i", &text, &num_segments))
        return NULL;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_from_text(text, num_segments, &schedule);
    return s1f_new_schedule(status, schedule, NULL);
}

PyMethodDef s1f_schedule_methods[] = {
    S1F_METHOD(
        schedule_facts, O,
        "(num_ranks, num_stages, num_microbatches, num_segments), the rank of every stage, the segments of every "
        "micro-batch (empty where all have num_segments), the parents of all segments (empty: chains), the units of "
        "every rank, bits of the passes that occur."),
    S1F_METHOD(schedule_units, VARARGS, "int32 [unit][pass, stage, microbatch, segment] in run order."),
    S1F_METHOD(schedule_equal, VARARGS, "Whether both have the same units in the same order on every rank."),
    S1F_METHOD(schedule_digest, O, "64 bits of the units and their order: equal in equal schedules."),
    S1F_METHOD(schedule_cell_kinds, O,
               "A byte for each cell of all stages: 0 what F saves is kept, 1 recomputed, 2 moved away."),
    S1F_METHOD(schedule_check, VARARGS, "Raises ScheduleError; 0 is no cap."),
    S1F_METHOD(schedule_defer_weights, VARARGS, "The same order with W as late as may be; 0: as the order holds."),
    S1F_METHOD(schedule_spread_vocabulary, VARARGS,
               "The same order with S and T (what & 1), E and G (what & 2) of every cell, placed by the seconds of "
               "each pass, and with Fs so many places ahead of all else."),
    S1F_METHOD(
        schedule_change_cells, VARARGS,
        "(schedule, kind, chosen): the same order with R before the backward (kind 1), or O, A and L (2), of the "
        "cells whose byte in [stage][cell] is not 0, cells by micro-batch and segment; None: of all."),
    S1F_METHOD(schedule_assign_rows, VARARGS,
               "(schedule, rank, sizes): the first row of the keys of each cell of all stages, by the order of this "
               "rank, 0 at stages of others, and the most rows that a slot needs. sizes: tokens, [column]."),
    S1F_METHOD(schedule_forward_only, O, "The same order with forward units only."),
    S1F_METHOD(schedule_to_text, O, "One line of units per rank."),
    S1F_METHOD(schedule_from_text, VARARGS,
               "A schedule handle. num_segments: of every micro-batch; 0: those that the units name."),
    {NULL, NULL, 0, NULL}};
