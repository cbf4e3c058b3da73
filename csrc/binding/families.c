/* families.c - conversions of named families: what is known of them, and building one. */
#include "binding.h"

#include "../core/schedule.h"

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

/* -- building ------------------------------------------------------------------------------------------------------ */

enum { COSTS, UNIT_BYTES = COSTS + S1F_SPLIT_PASSES, CAP_BYTES, ROWS, PARENTS, NUM_ARRAYS };

typedef struct {
    const char *family;
    int32_t P, M, k, v;
    s1f_options options;
    s1f_array arrays[NUM_ARRAYS]; /* that the options point into; Python makes them as long as the core reads */
} build_arguments;

/* 0 with the exception set; else s1f_release_arrays is due. */
static int read_build_arguments(PyObject *tuple, build_arguments *a)
{
    *a = (build_arguments){0};
    s1f_options *o = &a->options;
    s1f_array *arrays = a->arrays;
    for (int i = 0; i < NUM_ARRAYS; i++)
        arrays[i].name = "an option";
    if (!PyArg_ParseTuple(tuple, "siiii(iiiL(O&O&O&)diO&O&iii)O&O&", &a->family, &a->P, &a->M, &a->k, &a->v, &o->group,
                          &o->round, &o->extra_warmup, &o->cap, s1f_to_array, &arrays[COSTS], s1f_to_array,
                          &arrays[COSTS + 1], s1f_to_array, &arrays[COSTS + 2], &o->transfer, &o->placement,
                          s1f_to_array, &arrays[UNIT_BYTES], s1f_to_array, &arrays[CAP_BYTES], &o->backward, &o->rounds,
                          &o->trees, s1f_to_int32_array, &arrays[ROWS], s1f_to_int32_array, &arrays[PARENTS]))
        return 0;
    for (int pass = 0; pass < S1F_SPLIT_PASSES; pass++)
        o->costs[pass] = arrays[COSTS + pass].values;
    o->unit_bytes = arrays[UNIT_BYTES].values;
    o->cap_bytes = arrays[CAP_BYTES].values;
    o->segments_of = arrays[ROWS].values;
    o->parents = arrays[PARENTS].values;
    return 1;
}

static PyObject *schedule_build(PyObject *Py_UNUSED(module), PyObject *tuple)
{
    build_arguments a;
    if (!read_build_arguments(tuple, &a))
        return NULL;
    s1f_schedule *schedule = NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_schedule_build(a.family, a.P, a.M, a.k, a.v, &a.options, &schedule));
    s1f_release_arrays(a.arrays, NUM_ARRAYS);
    return s1f_new_schedule(status, schedule, NULL);
}

static PyObject *schedule_broken_rule(PyObject *Py_UNUSED(module), PyObject *tuple)
{
    build_arguments a;
    if (!read_build_arguments(tuple, &a))
        return NULL;
    const char *rule = NULL;
    s1f_status status = s1f_schedule_broken_rule(a.family, a.P, a.M, a.k, a.v, &a.options, &rule);
    s1f_release_arrays(a.arrays, NUM_ARRAYS);
    return status != S1F_OK ? s1f_raise(status) : Py_BuildValue("z", rule);
}

PyMethodDef s1f_family_methods[] = {
    S1F_METHOD(schedule_families, NOARGS,
               "(name, description, source, validity, least stages_per_rank, names of options, whether the "
               "backward is split, whether its source cuts micro-batches into segments) of every family."),
    S1F_METHOD(
        schedule_build, VARARGS,
        "A schedule handle. The options are values in the order of FAMILY_OPTIONS: numbers, 0 for none, of a word its "
        "place from 1 on; arrays, None for none, three of costs. Then int32 arrays, or None: the segments of every "
        "micro-batch, of which num_segments is the most, and the parents of all segments."),
    S1F_METHOD(schedule_broken_rule, VARARGS, "The first rule of the family that they break, or None."),
    {NULL, NULL, 0, NULL}};
