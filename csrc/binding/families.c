/* families.c - conversions of named families: what is known of them, and building one. */
#include "../schedules/families.h"
#include "binding.h"

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
    const s1f_family *family = s1f_schedule_family((int32_t)i)->family;
    const s1f_family_name *name = s1f_schedule_family((int32_t)i)->name;
    return Py_BuildValue("(ssssiNNN)", name->name, name->description, name->source, name->validity,
                         family->stages_per_rank, option_names(family->options),
                         PyBool_FromLong(family->splits || family->most_live != NULL),
                         PyBool_FromLong(name == &family->segments));
}

S1F_METHOD(PyObject *, schedule_families)
{
    int32_t count = 0;
    while (s1f_schedule_family(count) != NULL)
        count++;
    return s1f_list_of(count, family_item, NULL);
}

/* -- building ------------------------------------------------------------------------------------------------------ */

/* From a tuple in the order of the table: numbers, or arrays that Python makes as long as the core reads. The tuple
 * keeps the arrays. */
static int read_options(PyObject *tuple, s1f_options *options)
{
    int is_read = PyTuple_Check(tuple) && s1f_require_count("options", PyTuple_Size(tuple), S1F_NUM_OPTIONS);
    for (int i = 0; i < S1F_NUM_OPTIONS && is_read; i++) {
        const s1f_option *option = &s1f_option_table[i];
        s1f_int64s array = {0}; /* of doubles too */
        void *field = (char *)options + option->offset;
        s1f_reader *const readers[S1F_NUM_OPTION_KINDS] = {s1f_to_int32, s1f_to_int64, s1f_to_double, s1f_to_int32};
        s1f_reader *read = readers[option->kind];
        is_read = (read == NULL ? s1f_to_int64s : read)(PyTuple_GetItem(tuple, i), option->name,
                                                        read == NULL ? &array : field);
        int64_t count = array.count / S1F_SPLIT_PASSES;
        for (int pass = 0; option->kind == S1F_KIND_COSTS_OF_UNITS && pass < S1F_SPLIT_PASSES && count > 0; pass++)
            options->costs[pass] = (const double *)(const void *)(array.values + pass * count);
        if (option->kind == S1F_KIND_BYTES_OF_UNITS || option->kind == S1F_KIND_BYTES_OF_RANKS)
            *(const int64_t **)field = array.values;
        PyBuffer_Release(&array.view);
    }
    return is_read;
}

S1F_METHOD(PyObject *, schedule_build, const char *, family, int32_t, num_ranks, int32_t, num_microbatches, int32_t,
           num_segments, int32_t, stages_per_rank, PyObject *, given, s1f_int32s, segments_of, s1f_int32s, parents)
{
    s1f_options options = {.segments_of = segments_of.values, .parents = parents.values};
    s1f_schedule *schedule = NULL;
    s1f_status status = S1F_ERR_PYTHON;
    if (read_options(given, &options))
        S1F_WITHOUT_GIL(status = s1f_schedule_build(family, num_ranks, num_microbatches, num_segments, stages_per_rank,
                                                    &options, &schedule));
    return s1f_new_schedule(status, schedule, NULL);
}

S1F_METHOD(PyObject *, schedule_broken_rule, const char *, family, int32_t, num_ranks, int32_t, num_microbatches,
           int32_t, num_segments, int32_t, stages_per_rank, PyObject *, given, s1f_int32s, segments_of, s1f_int32s,
           parents)
{
    s1f_options options = {.segments_of = segments_of.values, .parents = parents.values};
    const char *rule = NULL;
    s1f_status status = S1F_ERR_PYTHON;
    if (read_options(given, &options))
        status = s1f_schedule_broken_rule(family, num_ranks, num_microbatches, num_segments, stages_per_rank, &options,
                                          &rule);
    return status != S1F_OK ? s1f_raise(status) : Py_BuildValue("z", rule);
}

PyMethodDef s1f_family_methods[] = {
    S1F_ROW(schedule_families,
            "-> list[tuple[str, str, str, str, int, tuple[str, ...], bool, bool]]: name, description, source, "
            "validity, least stages_per_rank, names of options, whether the backward is split, whether its source "
            "cuts micro-batches into segments, of every family."),
    S1F_ROW(schedule_build,
            "A schedule handle. given: values in the order of FAMILY_OPTIONS: numbers, 0 for none, of a word its "
            "place from 1 on; arrays, None for none, costs of F, I and W one after the other. segments_of: of every "
            "micro-batch, None: num_segments, which is the most of them. parents: of all segments."),
    S1F_ROW(schedule_broken_rule, "-> str | None: the first rule of the family that they break."),
    {NULL, NULL, 0, NULL}};
