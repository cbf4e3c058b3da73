/* families.c - conversions of named families: what is known of them, their options, and building one. */
#include "binding.h"

#include "../core/schedule.h"

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
    int32_t *segments_of, *parents;
    int64_t *first_cell;
} read_options;

static void free_options(read_options *read)
{
    for (int i = 0; i < S1F_NUM_OPTIONS * S1F_SPLIT_PASSES; i++)
        PyMem_Free(read->arrays[i / S1F_SPLIT_PASSES][i % S1F_SPLIT_PASSES]);
    PyMem_Free(read->segments_of);
    PyMem_Free(read->parents);
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

/* -- building ------------------------------------------------------------------------------------------------------ */

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

/* parents: those of all segments, by micro-batch. 0 with the exception set. */
static int read_parents(PyObject *given, int64_t num_columns, read_options *read)
{
    s1f_int64s all = {.name = "parents"};
    if (given == Py_None)
        return 1;
    if (!s1f_to_int64s(given, &all))
        return 0;
    int is_read = s1f_require_count("parents", all.count, num_columns);
    read->parents = is_read ? PyMem_Malloc((size_t)all.count * sizeof *read->parents + 1) : NULL;
    for (int64_t i = 0; read->parents != NULL && i < all.count; i++) /* what no int32 holds is refused later */
        read->parents[i] = all.values[i] < INT32_MIN || all.values[i] > INT32_MAX ? INT32_MAX : (int32_t)all.values[i];
    if (is_read && read->parents == NULL)
        PyErr_NoMemory();
    PyMem_Free(all.values);
    read->options.parents = read->parents;
    return read->parents != NULL;
}

/* 0 with the exception set. free_options(&arguments->read) is due either way. */
static int read_build_arguments(PyObject *tuple, build_arguments *arguments)
{
    s1f_count P = {.name = "num_ranks"}, M = {.name = "num_microbatches"}, v = {.name = "stages_per_rank"};
    PyObject *dict, *k, *parents = Py_None;
    int64_t num_columns = 0;
    if (!PyArg_ParseTuple(tuple, "sO&O&OO&O!|O", &arguments->family, s1f_to_count, &P, s1f_to_count, &M, &k,
                          s1f_to_count, &v, &PyDict_Type, &dict, &parents) ||
        !read_segments(k, M.value, arguments, &num_columns) || !read_parents(parents, num_columns, &arguments->read))
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
        S1F_WITHOUT_GIL(status = s1f_schedule_build(a.family, a.num_ranks, a.num_microbatches, a.num_segments,
                                                    a.stages_per_rank, &a.read.options, &schedule));
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

PyMethodDef s1f_family_methods[] = {
    S1F_METHOD(schedule_families, NOARGS,
               "(name, description, source, validity, least stages_per_rank, names of options, whether the "
               "backward is split, whether its source cuts micro-batches into segments) of every family."),
    S1F_METHOD(schedule_build, VARARGS, "A schedule handle. num_segments: a number, or one for each micro-batch."),
    S1F_METHOD(schedule_broken_rule, VARARGS, "The first rule of the family that they break, or None."),
    {NULL, NULL, 0, NULL}};
