/* schedule.c - conversions for the schedule room: schedules and lowered programs. */
#include "binding.h"
#include "records.h"

#include "../core/check.h"
#include "../core/defer.h"
#include "../core/lower.h"
#include "../core/offload.h"
#include "../core/receives.h"
#include "../core/recompute.h"
#include "../core/schedule.h"
#include "../schedules/vocabulary.h"

#include <stdlib.h>
#include <string.h>

/* -- families and their options ------------------------------------------------------------------------------------ */

/* The names of the options whose bits are set. */
static PyObject *option_names(uint32_t options)
{
    const char *names[S1F_NUM_OPTIONS];
    int64_t count = 0;
    for (int i = 0; i < S1F_NUM_OPTIONS; i++)
        if (options >> i & 1)
            names[count++] = s1f_option_table[i].name;
    return s1f_tuple_of(count, s1f_name_item, names);
}

static PyObject *family_item(const void *unused, int64_t i)
{
    (void)unused;
    s1f_family_facts facts = {0};
    s1f_schedule_family((int32_t)i, &facts);
    return Py_BuildValue("(ssssiNNN)", facts.name, facts.description, facts.source, facts.validity,
                         facts.stages_per_rank, option_names(facts.options), PyBool_FromLong(facts.splits),
                         PyBool_FromLong(facts.has_segments));
}

static PyObject *schedule_families(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    int32_t count = 0;
    s1f_family_facts facts;
    while (s1f_schedule_family(count, &facts))
        count++;
    return s1f_list_of(count, family_item, NULL);
}

/* The options of a Python dict, and the arrays that they point into. */
typedef struct {
    s1f_options options;
    s1f_shape shape; /* as far as tables need it */
    void *arrays[S1F_NUM_OPTIONS][S1F_SPLIT_PASSES];
    int32_t *segments_of;
    int64_t *first_cell;
} read_options;

static void free_options(read_options *read)
{
    for (int i = 0; i < S1F_NUM_OPTIONS * S1F_SPLIT_PASSES; i++)
        PyMem_Free(read->arrays[i / S1F_SPLIT_PASSES][i % S1F_SPLIT_PASSES]);
    PyMem_Free(read->segments_of);
    PyMem_Free(read->first_cell);
}

/* These read one option; 0 with the exception set. */
static int read_number(PyObject *value, const char *name, int64_t least, int64_t most, int64_t *number)
{
    int overflow = 0;
    *number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow)
        PyErr_Format(PyExc_ValueError, "%s: %R is too large", name, value);
    else if (!PyErr_Occurred() && (*number < least || *number > most))
        PyErr_Format(PyExc_ValueError, "%s is %lld, must be in %lld..%lld", name, (long long)*number, (long long)least,
                     (long long)most);
    return !PyErr_Occurred();
}

static int read_double(PyObject *value, const char *name, double *option)
{
    s1f_number number = {.name = name};
    int is_read = s1f_to_number(value, &number);
    *option = number.value;
    return is_read;
}

static int read_table(PyObject *value, const s1f_shape *shape, s1f_table table, void **array, void *field)
{
    int is_read = s1f_read_table(value, shape, &table);
    *(void **)field = *array = table.values;
    return is_read;
}

static int read_costs(PyObject *value, const s1f_shape *shape, void **arrays, const double **tables)
{
    static const char *const names[S1F_SPLIT_PASSES] = {"costs of F", "costs of I", "costs of W"};
    PyObject *passes = PySequence_Check(value) ? PySequence_Tuple(value) : NULL;
    int is_read = passes != NULL && PyTuple_Size(passes) == S1F_SPLIT_PASSES;
    if (!is_read && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "costs must hold the costs of F, I and W");
    for (Py_ssize_t pass = 0; is_read && pass < S1F_SPLIT_PASSES; pass++)
        is_read = read_table(PyTuple_GetItem(passes, pass), shape, (s1f_table){names[pass], S1F_PER_CELL, 0, NULL},
                             &arrays[pass], &tables[pass]);
    Py_XDECREF(passes);
    return is_read;
}

/* One of two words: 1 or 2. */
static int read_word(PyObject *value, const char *name, const char *const words[2], int32_t *kind)
{
    int is_text = PyUnicode_Check(value);
    *kind = is_text && PyUnicode_CompareWithASCIIString(value, words[0]) == 0   ? 1
            : is_text && PyUnicode_CompareWithASCIIString(value, words[1]) == 0 ? 2
                                                                                : 0;
    if (*kind == 0)
        PyErr_Format(is_text ? PyExc_ValueError : PyExc_TypeError, "%s is %R, must be '%s' or '%s'", name, value,
                     words[0], words[1]);
    return *kind != 0;
}

static int read_option(int i, PyObject *value, read_options *read)
{
    const s1f_option *option = &s1f_option_table[i];
    void **arrays = read->arrays[i];
    void *field = (char *)&read->options + option->offset;
    int64_t number = 0;
    switch (option->kind) {
    case S1F_KIND_INT32:
        if (!read_number(value, option->name, option->least, INT32_MAX, &number))
            return 0;
        *(int32_t *)field = (int32_t)number;
        return 1;
    case S1F_KIND_INT64: return read_number(value, option->name, option->least, INT64_MAX, field);
    case S1F_KIND_SECONDS: return read_double(value, option->name, field);
    case S1F_KIND_WORD: return read_word(value, option->name, option->words, field);
    case S1F_KIND_COSTS_OF_UNITS: return read_costs(value, &read->shape, arrays, field);
    case S1F_KIND_BYTES_OF_UNITS:
        return read_table(value, &read->shape, (s1f_table){option->name, S1F_PER_CELL, 1, NULL}, arrays, field);
    case S1F_KIND_BYTES_OF_RANKS:
        return read_table(value, &read->shape, (s1f_table){option->name, S1F_PER_RANK, 1, NULL}, arrays, field);
    default: PyErr_Format(PyExc_SystemError, "option %s is not converted", option->name); return 0;
    }
}

/* 0 with the exception set. An option that the family does not take is refused before its value is looked at. */
static int read_option_dict(PyObject *dict, const char *family, read_options *read)
{
    s1f_family_facts facts;
    int is_known = s1f_schedule_family_named(family, &facts);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (is_known && PyDict_Next(dict, &position, &key, &value)) {
        PyObject *bytes = PyUnicode_AsUTF8String(key);
        if (bytes == NULL)
            return 0;
        int i = 0, is_read = 0;
        while (i < S1F_NUM_OPTIONS && strcmp(s1f_option_table[i].name, PyBytes_AsString(bytes)) != 0)
            i++;
        if (i == S1F_NUM_OPTIONS || !(facts.options >> i & 1))
            s1f_raise(s1f_schedule_refuse_option(&facts, PyBytes_AsString(bytes)));
        else
            is_read = read_option(i, value, read);
        Py_DECREF(bytes);
        if (!is_read)
            return 0;
    }
    return 1;
}

/* -- schedules ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *family;
    int32_t num_ranks, num_microbatches, num_segments, stages_per_rank;
    read_options read;
} build_arguments;

/* k: a number, or one for each of M micro-batches. *num_columns: s1f_num_columns. 0 with the exception set. */
static int read_segments(PyObject *given, int32_t num_microbatches, build_arguments *arguments, int64_t *num_columns)
{
    s1f_count k = {.name = "num_segments"};
    if (!PySequence_Check(given)) {
        int is_read = s1f_to_count(given, &k);
        arguments->num_segments = k.value;
        *num_columns = k.value;
        return is_read;
    }
    s1f_int64s counts = {.name = "num_segments"};
    int is_read = s1f_to_int64s(given, &counts);
    if (is_read && counts.count != num_microbatches) {
        PyErr_Format(PyExc_ValueError,
                     "num_segments holds %lld values, must be one number or one for each of %d micro-batches",
                     (long long)counts.count, (int)num_microbatches);
        is_read = 0;
    }
    if (is_read) {
        arguments->read.segments_of = PyMem_Malloc((size_t)counts.count * sizeof(int32_t) + 1);
        arguments->read.first_cell = PyMem_Calloc((size_t)counts.count + 1, sizeof(int64_t));
        is_read = arguments->read.segments_of != NULL && arguments->read.first_cell != NULL;
        if (!is_read)
            PyErr_NoMemory();
    }
    *num_columns = 0;
    for (int64_t m = 0; is_read && m < counts.count; m++) {
        int64_t count = counts.values[m];
        if (count < 1 || count > S1F_MAX_FORWARD_UNITS) {
            PyErr_Format(PyExc_ValueError, "num_segments[%lld] is %lld, must be in 1..%d", (long long)m,
                         (long long)count, (int)S1F_MAX_FORWARD_UNITS);
            is_read = 0;
        }
        arguments->read.segments_of[m] = (int32_t)count;
        arguments->num_segments = count > arguments->num_segments ? (int32_t)count : arguments->num_segments;
        *num_columns += count;
        arguments->read.first_cell[m + 1] = *num_columns;
    }
    arguments->read.options.segments_of = arguments->read.segments_of;
    PyMem_Free(counts.values);
    return is_read;
}

/* 0 with the exception set. free_options(&arguments->read) is due either way. */
static int read_build_arguments(PyObject *tuple, build_arguments *arguments)
{
    s1f_count P = {.name = "num_ranks"}, M = {.name = "num_microbatches"}, v = {.name = "stages_per_rank"};
    PyObject *dict, *k;
    int64_t num_columns = 0;
    if (!PyArg_ParseTuple(tuple, "sO&O&OO&O!", &arguments->family, s1f_to_count, &P, s1f_to_count, &M, &k, s1f_to_count,
                          &v, &PyDict_Type, &dict) ||
        !read_segments(k, M.value, arguments, &num_columns))
        return 0;
    arguments->num_ranks = P.value;
    arguments->num_microbatches = M.value;
    arguments->stages_per_rank = v.value;
    int64_t num_stages = (int64_t)arguments->num_ranks * arguments->stages_per_rank;
    if (P.value < 1 || v.value < 1 || num_columns < 1 || num_stages > S1F_MAX_FORWARD_UNITS / num_columns)
        return 1; /* the core refuses these counts, whatever the options are */
    arguments->read.shape = (s1f_shape){.num_ranks = P.value,
                                        .num_stages = (int32_t)num_stages,
                                        .num_microbatches = M.value,
                                        .num_segments = arguments->num_segments,
                                        .first_cell = arguments->read.first_cell};
    return read_option_dict(dict, arguments->family, &arguments->read);
}

static PyObject *schedule_build(PyObject *Py_UNUSED(module), PyObject *tuple)
{
    build_arguments a = {0};
    PyObject *handle = NULL;
    if (read_build_arguments(tuple, &a)) {
        s1f_schedule *schedule = NULL;
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status = s1f_schedule_build(a.family, a.num_ranks, a.num_microbatches, a.num_segments, a.stages_per_rank,
                                    &a.read.options, &schedule);
        Py_END_ALLOW_THREADS
        handle = s1f_new_schedule(status, schedule, NULL);
    }
    free_options(&a.read);
    return handle;
}

static PyObject *schedule_broken_rule(PyObject *Py_UNUSED(module), PyObject *tuple)
{
    build_arguments a = {0};
    PyObject *result = NULL;
    if (read_build_arguments(tuple, &a)) {
        const char *rule = NULL;
        s1f_status status = s1f_schedule_broken_rule(a.family, a.num_ranks, a.num_microbatches, a.num_segments,
                                                     a.stages_per_rank, &a.read.options, &rule);
        result = status != S1F_OK ? s1f_raise(status) : Py_BuildValue("z", rule);
    }
    free_options(&a.read);
    return result;
}

static PyObject *schedule_counts(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    return Py_BuildValue("(iiii)", shape.num_ranks, shape.num_stages, shape.num_microbatches, shape.num_segments);
}

static PyObject *row_item(const void *shape, int64_t m)
{
    return PyLong_FromLong(s1f_segments_of(shape, (int32_t)m));
}

static PyObject *schedule_rows(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    if (shape.first_cell == NULL)
        Py_RETURN_NONE;
    return s1f_list_of(shape.num_microbatches, row_item, &shape);
}

static PyObject *rank_item(const void *rank_of_stage, int64_t stage)
{
    return PyLong_FromLong(((const int32_t *)rank_of_stage)[stage]);
}

static PyObject *schedule_placement(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    return s1f_list_of(shape.num_stages, rank_item, shape.rank_of_stage);
}

static PyObject *unit_item(const void *units, int64_t i)
{
    return s1f_unit_tuple(((const s1f_unit *)units)[i]);
}

static PyObject *schedule_units(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    int rank;
    if (!PyArg_ParseTuple(arguments, "O&i", s1f_to_schedule, &schedule, &rank) ||
        !s1f_require_index("rank", rank, s1f_schedule_shape(schedule).num_ranks))
        return NULL;
    int64_t num_units;
    const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
    return s1f_list_of(num_units, unit_item, units);
}

/* Letters of the passes that occur. */
static PyObject *schedule_kinds(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    char letters[S1F_MAX_PASSES];
    Py_ssize_t count = 0;
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        if (s1f_schedule_passes(schedule) >> pass & 1)
            letters[count++] = s1f_pass_letter(pass);
    return PyUnicode_FromStringAndSize(letters, count);
}

static PyObject *schedule_equal(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *a, *b;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_schedule, &a, s1f_to_schedule, &b))
        return NULL;
    return PyBool_FromLong(s1f_schedule_equal(a, b));
}

static PyObject *schedule_digest(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    return PyLong_FromUnsignedLongLong(s1f_schedule_digest(schedule));
}

/* A byte for each cell of all stages, as program_fit gives them and change_cells takes them. */
static PyObject *schedule_cell_kinds(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
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

static PyObject *schedule_check(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    int64_t max_live_units;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_schedule, &schedule, s1f_to_int64, &max_live_units))
        return NULL;
    return s1f_none(s1f_schedule_check(schedule, max_live_units));
}

static PyObject *schedule_forward_only(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    s1f_schedule *forward = NULL;
    s1f_status status = s1f_schedule_forward_only(schedule, &forward);
    return s1f_new_schedule(status, forward, NULL);
}

static PyObject *schedule_defer_weights(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    int64_t max_live_units;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_schedule, &schedule, s1f_to_int64, &max_live_units))
        return NULL;
    s1f_schedule *deferred = NULL;
    s1f_status status = s1f_schedule_defer_weights(schedule, max_live_units, &deferred);
    return s1f_new_schedule(status, deferred, NULL);
}

typedef s1f_status change_cells(const s1f_schedule *schedule, const unsigned char *chosen, s1f_schedule **out);

/* A schedule changed for the cells of (schedule, chosen). */
static PyObject *changed(PyObject *arguments, change_cells *change)
{
    const s1f_schedule *schedule;
    const char *chosen;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(arguments, "O&z#", s1f_to_schedule, &schedule, &chosen, &count))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t cells = shape.num_stages * s1f_num_cells(&shape);
    if (chosen != NULL && !s1f_require_count("chosen", count, cells))
        return NULL;
    s1f_schedule *other = NULL;
    s1f_status status = change(schedule, (const unsigned char *)chosen, &other);
    return s1f_new_schedule(status, other, NULL);
}

static PyObject *schedule_recompute(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return changed(arguments, s1f_schedule_recompute);
}

static PyObject *schedule_offload(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return changed(arguments, s1f_schedule_offload);
}

static PyObject *schedule_spread_vocabulary(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    int64_t ahead;
    int what;
    PyObject *costs, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&iO&O", s1f_to_schedule, &schedule, &what, s1f_to_int64, &ahead, &costs))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    s1f_table passes[S1F_MAX_PASSES] = {0};
    if (s1f_read_pass_seconds(costs, &shape, passes)) {
        const double *seconds[S1F_MAX_PASSES];
        for (int pass = 0; pass < S1F_MAX_PASSES; pass++)
            seconds[pass] = passes[pass].values;
        s1f_schedule *spread = NULL;
        s1f_status status = s1f_schedule_spread_vocabulary(schedule, what, ahead, seconds, &spread);
        result = s1f_new_schedule(status, spread, NULL);
    }
    s1f_free_tables(passes, S1F_MAX_PASSES);
    return result;
}

/* -- text ---------------------------------------------------------------------------------------------------------- */

static PyObject *schedule_to_text(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_schedule *schedule;
    if (!s1f_to_schedule(handle, &schedule))
        return NULL;
    char *text = NULL;
    s1f_status status = s1f_schedule_to_text(schedule, &text);
    PyObject *result = status == S1F_OK ? PyUnicode_FromString(text) : s1f_raise(status);
    free(text);
    return result;
}

static PyObject *schedule_from_text(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *text; /* "s" refuses text with a zero byte */
    if (!PyArg_ParseTuple(arguments, "s", &text))
        return NULL;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_from_text(text, &schedule);
    return s1f_new_schedule(status, schedule, NULL);
}

/* One (letter, stage, microbatch, segment); what the core refuses is -1. 0 with the exception set. */
static int read_named_unit(PyObject *tuple, s1f_unit *unit)
{
    int letter;
    int64_t index[3];
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "%R is no unit", tuple);
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "CO&O&O&", &letter, s1f_to_int64, &index[0], s1f_to_int64, &index[1], s1f_to_int64,
                          &index[2]))
        return 0;
    for (int i = 0; i < 3; i++)
        index[i] = index[i] > INT32_MAX || index[i] < 0 ? -1 : index[i];
    int32_t pass = letter < 128 ? s1f_pass_from_letter((char)letter) : -1;
    *unit = (s1f_unit){pass, (int32_t)index[0], (int32_t)index[1], (int32_t)index[2]};
    return 1;
}

static PyObject *schedule_from_units(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *ranks;
    s1f_count num_segments = {.name = "num_segments"};
    if (!PyArg_ParseTuple(arguments, "O!O&", &PyTuple_Type, &ranks, s1f_to_count, &num_segments))
        return NULL;
    int32_t num_ranks = (int32_t)PyTuple_Size(ranks);
    int64_t total = 0, next = 0;
    int64_t *num_units = PyMem_Calloc((size_t)num_ranks + 1, sizeof *num_units);
    int is_read = num_units != NULL;
    for (int32_t rank = 0; is_read && rank < num_ranks; rank++) {
        num_units[rank] = PyTuple_Size(PyTuple_GetItem(ranks, rank));
        is_read = num_units[rank] >= 0;
        total += num_units[rank];
    }
    s1f_unit *units = is_read ? PyMem_Calloc((size_t)total + 1, sizeof *units) : NULL;
    for (int32_t rank = 0; units != NULL && is_read && rank < num_ranks; rank++)
        for (int64_t i = 0; is_read && i < num_units[rank]; i++)
            is_read = read_named_unit(PyTuple_GetItem(PyTuple_GetItem(ranks, rank), i), &units[next++]);
    PyObject *handle = NULL;
    if (is_read && units != NULL) {
        s1f_schedule *schedule = NULL;
        s1f_status status = s1f_schedule_from_units(units, num_units, num_ranks, num_segments.value, &schedule);
        handle = s1f_new_schedule(status, schedule, NULL);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    PyMem_Free(units);
    PyMem_Free(num_units);
    return handle;
}

/* -- lowered programs ---------------------------------------------------------------------------------------------- */

static PyObject *program_lower(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    s1f_count prefetch = {.name = "prefetch"};
    int with_receives = 0, rank = -1;
    if (!PyArg_ParseTuple(arguments, "O&O&|pi", s1f_to_schedule, &schedule, s1f_to_count, &prefetch, &with_receives,
                          &rank))
        return NULL;
    s1f_program *program = NULL;
    int is_whole = with_receives || rank == -1; /* receives are placed by the programs of all ranks */
    s1f_status status = is_whole ? s1f_schedule_lower(schedule, prefetch.value, &program)
                                 : s1f_schedule_lower_rank(schedule, prefetch.value, rank, &program);
    if (status == S1F_OK && with_receives && (status = s1f_program_add_receives(program)) != S1F_OK)
        s1f_program_free(program);
    return s1f_new_program(status, program, NULL);
}

static PyObject *program_lower_edges(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    s1f_count prefetch = {.name = "prefetch"};
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_schedule, &schedule, s1f_to_count, &prefetch))
        return NULL;
    s1f_program *program = NULL;
    s1f_status status = s1f_schedule_lower_edges(schedule, prefetch.value, &program);
    return s1f_new_program(status, program, NULL);
}

static PyObject *edge_item(const void *edges, int64_t i)
{
    const s1f_edge *edge = (const s1f_edge *)edges + i;
    return s1f_new_record(S1F_PROGRAM_EDGE, "(iiiiiiL)", edge->source_stage, edge->destination_stage, edge->source_rank,
                          edge->destination_rank, (int)edge->channel, edge->num_places, (long long)edge->num_messages);
}

static PyObject *program_edges(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_program *program;
    if (!s1f_to_program(handle, &program))
        return NULL;
    int32_t count;
    const s1f_edge *edges = s1f_program_edges(program, &count);
    return s1f_list_of(count, edge_item, edges);
}

static PyObject *program_stage_peak(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    int stage;
    if (!PyArg_ParseTuple(arguments, "O&i", s1f_to_program, &program, &stage) ||
        !s1f_require_index("stage", stage, s1f_program_num_stages(program)))
        return NULL;
    s1f_stage_peak peak = s1f_program_stage_peak(program, stage);
    return Py_BuildValue("(iii)", peak.live_units, peak.kv_slots, peak.grad_slots);
}

/* Sizes whose sums cannot overflow: at least 0, and all micro-batches of them within int64. 0 with the exception
 * set. */
static int check_sizes(const s1f_program *program, const s1f_int64s *sizes)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < sizes->count; i++) {
        if (sizes->values[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s hold %lld, must be at least 0", sizes->name,
                         (long long)sizes->values[i]);
            return 0;
        }
        if (sizes->values[i] >
            INT64_MAX / s1f_program_num_microbatches(program) - sum) { /* more than enough for rows */
            PyErr_Format(PyExc_ValueError, "%s of all micro-batches sum to more than %lld", sizes->name,
                         (long long)INT64_MAX);
            return 0;
        }
        sum += sizes->values[i];
    }
    return 1;
}

static PyObject *program_peak_tokens(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    s1f_int64s sizes = {.name = "segment_sizes"};
    int stage;
    if (!PyArg_ParseTuple(arguments, "O&iO&", s1f_to_program, &program, &stage, s1f_to_int64s, &sizes))
        return NULL;
    PyObject *tokens = NULL;
    if (s1f_require_index("stage", stage, s1f_program_num_stages(program)) &&
        s1f_require_count(sizes.name, sizes.count, s1f_program_num_columns(program)) && check_sizes(program, &sizes))
        tokens = PyLong_FromLongLong(s1f_program_peak_tokens(program, stage, sizes.values));
    PyMem_Free(sizes.values);
    return tokens;
}

PyMethodDef s1f_schedule_methods[] = {
    {"schedule_families", schedule_families, METH_NOARGS,
     "(name, description, source, validity, least stages_per_rank, names of options, whether the backward is split, "
     "whether its source cuts micro-batches into segments) of every family."},
    {"schedule_build", schedule_build, METH_VARARGS,
     "schedule_build(family, num_ranks, num_microbatches, num_segments, stages_per_rank, options): a schedule handle. "
     "num_segments: a number, or one for each micro-batch."},
    {"schedule_broken_rule", schedule_broken_rule, METH_VARARGS,
     "schedule_broken_rule(arguments of schedule_build): the first rule of the family that they break, or None."},
    {"schedule_counts", schedule_counts, METH_O, "(num_ranks, num_stages, num_microbatches, num_segments)."},
    {"schedule_rows", schedule_rows, METH_O, "Segments of every micro-batch; None where all have num_segments."},
    {"schedule_placement", schedule_placement, METH_O, "The rank of every stage."},
    {"schedule_units", schedule_units, METH_VARARGS,
     "schedule_units(schedule, rank): units in run order, as (pass, stage, microbatch, segment)."},
    {"schedule_kinds", schedule_kinds, METH_O, "The letters of the passes that the order has."},
    {"schedule_equal", schedule_equal, METH_VARARGS,
     "schedule_equal(a, b): whether both have the same units in the same order on every rank."},
    {"schedule_digest", schedule_digest, METH_O, "64 bits of the units and their order: equal in equal schedules."},
    {"schedule_cell_kinds", schedule_cell_kinds, METH_O,
     "A byte for each cell of all stages: 0 what F saves is kept, 1 recomputed, 2 moved away."},
    {"schedule_check", schedule_check, METH_VARARGS,
     "schedule_check(schedule, max_live_units): raises ScheduleError; 0 is no cap."},
    {"schedule_defer_weights", schedule_defer_weights, METH_VARARGS,
     "schedule_defer_weights(schedule, max_live_units): the same order with W as late as may be; 0: as the order "
     "holds."},
    {"schedule_spread_vocabulary", schedule_spread_vocabulary, METH_VARARGS,
     "schedule_spread_vocabulary(schedule, what, ahead, costs): the same order with S and T (what & 1), E and G "
     "(what & 2) of every cell, placed by the seconds of each pass, and with Fs so many places ahead of all else."},
    {"schedule_recompute", schedule_recompute, METH_VARARGS,
     "schedule_recompute(schedule, chosen): the same order with R before the backward of the cells whose byte in "
     "[stage][cell] is not 0, cells by micro-batch and segment; None: of all."},
    {"schedule_offload", schedule_offload, METH_VARARGS,
     "schedule_offload(schedule, chosen): the same order with O, A and L of these cells, given in the same way."},
    {"schedule_forward_only", schedule_forward_only, METH_O, "The same order with forward units only."},
    {"schedule_to_text", schedule_to_text, METH_O, "One line of units per rank."},
    {"schedule_from_units", schedule_from_units, METH_VARARGS,
     "schedule_from_units(ranks, num_segments): a schedule handle, from a tuple of (letter, stage, microbatch, "
     "segment) for each rank. num_segments: of every micro-batch; 0: those that the units name."},
    {"schedule_from_text", schedule_from_text, METH_VARARGS, "schedule_from_text(text): a schedule handle."},
    {"program_lower", program_lower, METH_VARARGS,
     "program_lower(schedule, prefetch, with_receives=False, rank=-1): checks, lowers; a program handle. rank: "
     "that runs it, so that it has the instructions of no others but its neighbours, unless with receives; -1: "
     "of all."},
    {"program_lower_edges", program_lower_edges, METH_VARARGS,
     "program_lower_edges(schedule, prefetch): the same without instructions, for program_simulate and "
     "program_memory."},
    {"program_edges", program_edges, METH_O, "program_edges(program): a ProgramEdge per edge."},
    {"program_stage_peak", program_stage_peak, METH_VARARGS,
     "program_stage_peak(program, stage): peak (live_units, kv_slots, grad_slots)."},
    {"program_peak_tokens", program_peak_tokens, METH_VARARGS,
     "program_peak_tokens(program, stage, segment_sizes): peak live tokens."},
    {NULL, NULL, 0, NULL}};
