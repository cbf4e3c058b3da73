/* schedule.c - conversions for the schedule room: schedules and lowered programs. */
#include "binding.h"

#include "../core/check.h"
#include "../core/lower.h"
#include "../core/receives.h"
#include "../core/schedule.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* -- handles ----------------------------------------------------------------------------------------------------- */

static void free_schedule_capsule(PyObject *capsule)
{
    s1f_schedule_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_SCHEDULE));
}

static void free_program_capsule(PyObject *capsule)
{
    s1f_program_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_PROGRAM));
}

/* Takes the schedule over. */
static PyObject *wrap_schedule(s1f_status status, s1f_schedule *schedule)
{
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *capsule = PyCapsule_New(schedule, S1F_CAPSULE_SCHEDULE, free_schedule_capsule);
    if (capsule == NULL)
        s1f_schedule_free(schedule);
    return capsule;
}

static int require_rank(int32_t rank, int32_t num_ranks)
{
    if (rank >= 0 && rank < num_ranks)
        return 1;
    PyErr_Format(PyExc_ValueError, "rank is %d, must be in 0..%d", (int)rank, (int)num_ranks - 1);
    return 0;
}

static int require_stage(int32_t stage, int32_t num_stages)
{
    if (stage >= 0 && stage < num_stages)
        return 1;
    PyErr_Format(PyExc_ValueError, "stage is %d, must be in 0..%d", (int)stage, (int)num_stages - 1);
    return 0;
}

/* -- sequences --------------------------------------------------------------------------------------------------- */

/* Appends `item` (stolen, NULL = failed) to `list`; -1 with the exception set. */
static int append_new(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

/* A tuple of exactly `count` items from a Python sequence; NULL with the exception set. */
static PyObject *exact_tuple(PyObject *sequence, Py_ssize_t count, const char *name)
{
    PyObject *items = PySequence_Tuple(sequence);
    if (items != NULL && PyTuple_Size(items) != count) {
        PyErr_Format(PyExc_ValueError, "%s holds %zd values, must hold %zd", name, PyTuple_Size(items), count);
        Py_CLEAR(items);
    }
    return items;
}

/* A number that does not fit raises OverflowError, which is no ValueError: the caller's mistake is named as one. */
static void name_overflow(const char *name, PyObject *value)
{
    if (!PyErr_ExceptionMatches(PyExc_OverflowError))
        return;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s: %R is too large", name, value);
}

/* A count that fits, or 0 with the exception set. The core refuses what is below 1. */
static int read_int(PyObject *value, const char *name, int *count)
{
    int64_t number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) {
        name_overflow(name, value);
        return 0;
    }
    if (number < INT_MIN || number > INT_MAX) {
        PyErr_Format(PyExc_ValueError, "%s is %R, must be in 1..%d", name, value, INT_MAX);
        return 0;
    }
    *count = (int)number;
    return 1;
}

int64_t *s1f_read_int64s(PyObject *sequence, Py_ssize_t count, const char *name)
{
    PyObject *items = exact_tuple(sequence, count, name);
    if (items == NULL)
        return NULL;
    int64_t *values = malloc((size_t)count * sizeof *values);
    if (values == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; values != NULL && i < count; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(items, i));
        if (values[i] == -1 && PyErr_Occurred()) {
            name_overflow(name, PyTuple_GetItem(items, i));
            free(values);
            values = NULL;
        }
    }
    Py_DECREF(items);
    return values;
}

double *s1f_read_doubles(PyObject *sequence, Py_ssize_t count, const char *name)
{
    PyObject *items = exact_tuple(sequence, count, name);
    if (items == NULL)
        return NULL;
    double *values = malloc((size_t)count * sizeof *values);
    if (values == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; values != NULL && i < count; i++) {
        values[i] = PyFloat_AsDouble(PyTuple_GetItem(items, i));
        if (values[i] == -1.0 && PyErr_Occurred()) {
            name_overflow(name, PyTuple_GetItem(items, i));
            free(values);
            values = NULL;
        }
    }
    Py_DECREF(items);
    return values;
}

static PyObject *unit_tuple(s1f_unit unit)
{
    return Py_BuildValue("(Ciii)", s1f_pass_letter(unit.pass), unit.stage, unit.microbatch, unit.segment);
}

/* -- schedules --------------------------------------------------------------------------------------------------- */

/* The names of the options whose bits are set. */
static PyObject *option_names(uint32_t options)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && s1f_option_names[i] != NULL; i++)
        if (options >> i & 1 && append_new(names, PyUnicode_FromString(s1f_option_names[i])) < 0)
            Py_CLEAR(names);
    return names;
}

static PyObject *schedule_families(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    PyObject *families = PyList_New(0);
    const s1f_family_facts *facts;
    for (int32_t i = 0; families != NULL && (facts = s1f_schedule_family(i)) != NULL; i++)
        if (append_new(families, Py_BuildValue("(ssssiN)", facts->name, facts->description, facts->source,
                                               facts->validity, facts->stages_per_rank, option_names(facts->options))) <
            0)
            Py_CLEAR(families);
    return families;
}

/* The options of a Python dict; `costs` and the bytes are the arrays that they point into. */
typedef struct {
    s1f_options options;
    Py_ssize_t num_costs, num_ranks; /* values of each cost, of cap_bytes */
    double *costs[3];
    int64_t *unit_bytes, *cap_bytes;
} read_options;

static void free_options(read_options *read)
{
    for (int pass = 0; pass < 3; pass++)
        free(read->costs[pass]);
    free(read->unit_bytes);
    free(read->cap_bytes);
}

/* A whole number of at least `least` that fits; 0 with the exception set. */
static int read_count(PyObject *value, const char *name, int64_t least, int64_t most, int64_t *count)
{
    *count = PyLong_AsLongLong(value);
    if (*count == -1 && PyErr_Occurred()) {
        name_overflow(name, value);
        return 0;
    }
    if (*count >= least && *count <= most)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s is %lld, must be in %lld..%lld", name, (long long)*count, (long long)least,
                 (long long)most);
    return 0;
}

static int read_costs(PyObject *value, read_options *read)
{
    PyObject *passes = exact_tuple(value, 3, "costs");
    for (Py_ssize_t pass = 0; passes != NULL && pass < 3; pass++) {
        free(read->costs[pass]);
        read->costs[pass] = s1f_read_doubles(PyTuple_GetItem(passes, pass), read->num_costs, "costs of a pass");
        if (read->costs[pass] == NULL)
            Py_CLEAR(passes);
    }
    read->options.forward_costs = read->costs[0];
    read->options.input_costs = read->costs[1];
    read->options.weight_costs = read->costs[2];
    Py_XDECREF(passes);
    return passes != NULL;
}

static int read_bytes(PyObject *value, Py_ssize_t count, const char *name, int64_t **bytes, const int64_t **option)
{
    free(*bytes);
    *option = *bytes = s1f_read_int64s(value, count, name);
    return *bytes != NULL;
}

/* One of two words: 1 or 2; 0 with the exception set. */
static int read_word(PyObject *value, const char *name, const char *first, const char *second, int32_t *kind)
{
    PyObject *text = PyUnicode_AsUTF8String(value);
    if (text == NULL)
        return 0;
    const char *word = PyBytes_AsString(text);
    *kind = strcmp(word, first) == 0 ? 1 : strcmp(word, second) == 0 ? 2 : 0;
    Py_DECREF(text);
    if (*kind == 0)
        PyErr_Format(PyExc_ValueError, "%s is %R, must be '%s' or '%s'", name, value, first, second);
    return *kind != 0;
}

static int read_option(const char *name, PyObject *value, read_options *read)
{
    s1f_options *options = &read->options;
    int64_t count = 0;
    int is_read = 0;
    if (strcmp(name, "costs") == 0)
        return read_costs(value, read);
    if (strcmp(name, "placement") == 0)
        return read_word(value, name, "loop", "v", &options->placement);
    if (strcmp(name, "backward") == 0)
        return read_word(value, name, "split", "whole", &options->backward);
    if (strcmp(name, "unit_bytes") == 0)
        return read_bytes(value, read->num_costs, name, &read->unit_bytes, &options->unit_bytes);
    if (strcmp(name, "cap_bytes") == 0)
        return read_bytes(value, read->num_ranks, name, &read->cap_bytes, &options->cap_bytes);
    if (strcmp(name, "transfer") == 0) {
        options->transfer = PyFloat_AsDouble(value);
        return !(options->transfer == -1.0 && PyErr_Occurred());
    }
    if (strcmp(name, "cap") == 0)
        return read_count(value, name, 1, INT64_MAX, &options->cap);
    if (strcmp(name, "extra_warmup") == 0) {
        is_read = read_count(value, name, 0, INT32_MAX, &count);
        options->extra_warmup = (int32_t)count;
    } else if (strcmp(name, "group") == 0) {
        is_read = read_count(value, name, 1, INT32_MAX, &count);
        options->group = (int32_t)count;
    } else if (strcmp(name, "round") == 0) {
        is_read = read_count(value, name, 1, INT32_MAX, &count);
        options->round = (int32_t)count;
    }
    return is_read;
}

/* 0 with the exception set. An option that the family does not take is refused before its value is looked at. */
static int read_option_dict(PyObject *dict, const char *family, read_options *read)
{
    const s1f_family_facts *facts = s1f_schedule_family_named(family);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (facts != NULL && PyDict_Next(dict, &position, &key, &value)) {
        PyObject *bytes = PyUnicode_AsUTF8String(key);
        const char *name = bytes != NULL ? PyBytes_AsString(bytes) : NULL;
        int bit = 0, is_read = 0;
        while (name != NULL && s1f_option_names[bit] != NULL && strcmp(s1f_option_names[bit], name) != 0)
            bit++;
        if (name != NULL && (s1f_option_names[bit] == NULL || !(facts->options >> bit & 1)))
            s1f_raise(s1f_schedule_refuse_option(facts, name));
        else if (name != NULL)
            is_read = read_option(name, value, read);
        Py_XDECREF(bytes);
        if (!is_read)
            return 0;
    }
    return 1;
}

typedef struct {
    const char *family;
    int num_ranks, num_microbatches, num_segments, stages_per_rank;
    read_options read;
} build_arguments;

/* 0 with the exception set. free_options(&arguments->read) is due either way. */
static int read_build_arguments(PyObject *tuple, build_arguments *arguments)
{
    PyObject *counts[4], *dict;
    if (!PyArg_ParseTuple(tuple, "sOOOOO!", &arguments->family, &counts[0], &counts[1], &counts[2], &counts[3],
                          &PyDict_Type, &dict) ||
        !read_int(counts[0], "num_ranks", &arguments->num_ranks) ||
        !read_int(counts[1], "num_microbatches", &arguments->num_microbatches) ||
        !read_int(counts[2], "num_segments", &arguments->num_segments) ||
        !read_int(counts[3], "stages_per_rank", &arguments->stages_per_rank))
        return 0;
    int64_t num_costs = (int64_t)arguments->num_ranks * arguments->stages_per_rank;
    if (arguments->num_segments < 1 || num_costs > S1F_MAX_FORWARD_UNITS / arguments->num_segments)
        num_costs = 0; /* the core refuses these counts */
    arguments->read.num_costs = (Py_ssize_t)num_costs * arguments->num_segments;
    arguments->read.num_ranks = arguments->num_ranks;
    return read_option_dict(dict, arguments->family, &arguments->read);
}

static PyObject *schedule_build(PyObject *self, PyObject *tuple)
{
    (void)self;
    build_arguments a = {0};
    PyObject *handle = NULL;
    if (read_build_arguments(tuple, &a)) {
        s1f_schedule *schedule = NULL;
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status = s1f_schedule_build(a.family, a.num_ranks, a.num_microbatches, a.num_segments, a.stages_per_rank,
                                    &a.read.options, &schedule);
        Py_END_ALLOW_THREADS
        handle = wrap_schedule(status, schedule);
    }
    free_options(&a.read);
    return handle;
}

static PyObject *schedule_broken_rule(PyObject *self, PyObject *tuple)
{
    (void)self;
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

static PyObject *schedule_counts(PyObject *self, PyObject *capsule)
{
    (void)self;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    return Py_BuildValue("(iiii)", s1f_schedule_num_ranks(schedule), s1f_schedule_num_stages(schedule),
                         s1f_schedule_num_microbatches(schedule), s1f_schedule_num_segments(schedule));
}

static PyObject *schedule_placement(PyObject *self, PyObject *capsule)
{
    (void)self;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    PyObject *ranks = PyList_New(0);
    for (int32_t stage = 0; ranks != NULL && stage < s1f_schedule_num_stages(schedule); stage++)
        if (append_new(ranks, PyLong_FromLong(s1f_schedule_rank_of_stage(schedule, stage))) < 0)
            Py_CLEAR(ranks);
    return ranks;
}

static PyObject *schedule_units(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(arguments, "Oi", &capsule, &rank))
        return NULL;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL || !require_rank(rank, s1f_schedule_num_ranks(schedule)))
        return NULL;
    int64_t num_units;
    const s1f_unit *units = s1f_schedule_units(schedule, rank, &num_units);
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < num_units; i++)
        if (append_new(list, unit_tuple(units[i])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *schedule_check(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule;
    long long max_live_units;
    if (!PyArg_ParseTuple(arguments, "OL", &capsule, &max_live_units))
        return NULL;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    s1f_status status = s1f_schedule_check(schedule, max_live_units);
    if (status != S1F_OK)
        return s1f_raise(status);
    Py_RETURN_NONE;
}

static PyObject *schedule_forward_only(PyObject *self, PyObject *capsule)
{
    (void)self;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    s1f_schedule *forward = NULL;
    s1f_status status = s1f_schedule_forward_only(schedule, &forward);
    return wrap_schedule(status, forward);
}

static PyObject *text_of(PyObject *capsule, s1f_status (*write)(const s1f_schedule *schedule, char **text))
{
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    char *text = NULL;
    s1f_status status = write(schedule, &text);
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *result = PyUnicode_FromString(text);
    free(text);
    return result;
}

static PyObject *schedule_to_text(PyObject *self, PyObject *capsule)
{
    (void)self;
    return text_of(capsule, s1f_schedule_to_text);
}

static PyObject *schedule_to_csv(PyObject *self, PyObject *capsule)
{
    (void)self;
    return text_of(capsule, s1f_schedule_to_csv);
}

static PyObject *schedule_from_text(PyObject *self, PyObject *arguments)
{
    (void)self;
    const char *text; /* "s" refuses text with a zero byte */
    if (!PyArg_ParseTuple(arguments, "s", &text))
        return NULL;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_from_text(text, &schedule);
    return wrap_schedule(status, schedule);
}

static PyObject *schedule_from_csv(PyObject *self, PyObject *arguments)
{
    (void)self;
    const char *text;
    PyObject *count;
    int num_segments;
    if (!PyArg_ParseTuple(arguments, "sO", &text, &count) || !read_int(count, "num_segments", &num_segments))
        return NULL;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_from_csv(text, num_segments, &schedule);
    return wrap_schedule(status, schedule);
}

/* -- lowered programs -------------------------------------------------------------------------------------------- */

/* Takes the program over. */
static PyObject *wrap_program(s1f_status status, s1f_program *program)
{
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *handle = PyCapsule_New(program, S1F_CAPSULE_PROGRAM, free_program_capsule);
    if (handle == NULL)
        s1f_program_free(program);
    return handle;
}

static PyObject *program_lower(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule, *count;
    int prefetch, with_receives = 0;
    if (!PyArg_ParseTuple(arguments, "OO|p", &capsule, &count, &with_receives) ||
        !read_int(count, "prefetch", &prefetch))
        return NULL;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    s1f_program *program = NULL;
    s1f_status status = s1f_schedule_lower(schedule, prefetch, &program);
    if (status == S1F_OK && with_receives && (status = s1f_program_add_receives(program)) != S1F_OK)
        s1f_program_free(program);
    return wrap_program(status, program);
}

static PyObject *program_lower_edges(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule, *count;
    int prefetch;
    if (!PyArg_ParseTuple(arguments, "OO", &capsule, &count) || !read_int(count, "prefetch", &prefetch))
        return NULL;
    const s1f_schedule *schedule = s1f_from_capsule(capsule, S1F_CAPSULE_SCHEDULE);
    if (schedule == NULL)
        return NULL;
    s1f_program *program = NULL;
    s1f_status status = s1f_schedule_lower_edges(schedule, prefetch, &program);
    return wrap_program(status, program);
}

static PyObject *instruction_tuple(const s1f_instruction *instruction)
{
    static const char *const names[] = {"POST", "WAIT", "RUN", "SEND", "FREE", "RECEIVE"};
    return Py_BuildValue("(siNiiiL)", names[instruction->opcode], instruction->edge, unit_tuple(instruction->unit),
                         instruction->place, instruction->kv_slot, instruction->grad_slot,
                         (long long)instruction->sequence);
}

static PyObject *program_instructions(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(arguments, "Oi", &capsule, &rank))
        return NULL;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL || !require_rank(rank, s1f_program_num_ranks(program)))
        return NULL;
    int64_t count;
    const s1f_instruction *instructions = s1f_program_instructions(program, rank, &count);
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < count; i++)
        if (append_new(list, instruction_tuple(&instructions[i])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *program_edges(PyObject *self, PyObject *capsule)
{
    (void)self;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL)
        return NULL;
    int32_t count;
    const s1f_edge *edges = s1f_program_edges(program, &count);
    PyObject *list = PyList_New(0);
    for (int32_t e = 0; list != NULL && e < count; e++) {
        PyObject *edge =
            Py_BuildValue("(iiiiNiL)", edges[e].source_stage, edges[e].destination_stage, edges[e].source_rank,
                          edges[e].destination_rank, PyLong_FromLong(edges[e].channel), edges[e].num_places,
                          (long long)edges[e].num_messages);
        if (append_new(list, edge) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *program_stage_peak(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule;
    int stage;
    if (!PyArg_ParseTuple(arguments, "Oi", &capsule, &stage))
        return NULL;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL || !require_stage(stage, s1f_program_num_stages(program)))
        return NULL;
    s1f_stage_peak peak = s1f_program_stage_peak(program, stage);
    return Py_BuildValue("(iii)", peak.live_units, peak.kv_slots, peak.grad_slots);
}

/* Weights whose sums cannot overflow: at least 0, and all micro-batches of them within int64. 0 with the exception set.
 * */
static int check_weights(const s1f_program *program, const int64_t *weights, Py_ssize_t count, const char *name)
{
    int64_t sum = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (weights[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s hold %lld, must be at least 0", name, (long long)weights[i]);
            return 0;
        }
        if (weights[i] > INT64_MAX / s1f_program_num_microbatches(program) - sum) {
            PyErr_Format(PyExc_ValueError, "%s of all micro-batches sum to more than %lld", name, (long long)INT64_MAX);
            return 0;
        }
        sum += weights[i];
    }
    return 1;
}

static PyObject *program_peak_tokens(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule, *sizes;
    int stage;
    if (!PyArg_ParseTuple(arguments, "OiO", &capsule, &stage, &sizes))
        return NULL;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL || !require_stage(stage, s1f_program_num_stages(program)))
        return NULL;
    int64_t *segment_sizes = s1f_read_int64s(sizes, s1f_program_num_segments(program), "segment_sizes");
    if (segment_sizes == NULL)
        return NULL;
    PyObject *tokens = NULL;
    if (check_weights(program, segment_sizes, s1f_program_num_segments(program), "segment_sizes"))
        tokens = PyLong_FromLongLong(s1f_program_peak_tokens(program, stage, segment_sizes));
    free(segment_sizes);
    return tokens;
}

static PyObject *program_rank_peak(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule, *sequence;
    int rank;
    if (!PyArg_ParseTuple(arguments, "OiO", &capsule, &rank, &sequence))
        return NULL;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL || !require_rank(rank, s1f_program_num_ranks(program)))
        return NULL;
    Py_ssize_t count = (Py_ssize_t)s1f_program_num_stages(program) * s1f_program_num_segments(program);
    int64_t *weights = s1f_read_int64s(sequence, count, "weights");
    if (weights == NULL)
        return NULL;
    PyObject *peak = NULL;
    if (check_weights(program, weights, count, "sizes of the units"))
        peak = PyLong_FromLongLong(s1f_program_rank_peak(program, rank, weights));
    free(weights);
    return peak;
}

PyMethodDef s1f_schedule_methods[] = {
    {"schedule_families", schedule_families, METH_NOARGS,
     "(name, description, source, validity, least stages_per_rank, names of options) of every family."},
    {"schedule_build", schedule_build, METH_VARARGS,
     "schedule_build(family, num_ranks, num_microbatches, num_segments, stages_per_rank, options): a schedule handle."},
    {"schedule_broken_rule", schedule_broken_rule, METH_VARARGS,
     "schedule_broken_rule(as schedule_build): the rule of the family that they break, None if they can be built."},
    {"schedule_counts", schedule_counts, METH_O, "(num_ranks, num_stages, num_microbatches, num_segments)."},
    {"schedule_placement", schedule_placement, METH_O, "Rank of every stage."},
    {"schedule_units", schedule_units, METH_VARARGS,
     "schedule_units(schedule, rank): units in run order, as (kind, stage, microbatch, segment)."},
    {"schedule_check", schedule_check, METH_VARARGS,
     "schedule_check(schedule, max_live_units): raises ScheduleError; 0 is no cap."},
    {"schedule_forward_only", schedule_forward_only, METH_O, "The same order with forward units only."},
    {"schedule_to_text", schedule_to_text, METH_O, "One line of units per rank."},
    {"schedule_to_csv", schedule_to_csv, METH_O, "Torch's CSV with flat index microbatch * num_segments + segment."},
    {"schedule_from_text", schedule_from_text, METH_VARARGS, "schedule_from_text(text): a schedule handle."},
    {"schedule_from_csv", schedule_from_csv, METH_VARARGS, "schedule_from_csv(text, num_segments): a schedule handle."},
    {"program_lower", program_lower, METH_VARARGS,
     "program_lower(schedule, prefetch, with_receives=False): checks, lowers; a program handle."},
    {"program_lower_edges", program_lower_edges, METH_VARARGS,
     "program_lower_edges(schedule, prefetch): the same without instructions, for program_simulate and program_memory."},
    {"program_instructions", program_instructions, METH_VARARGS,
     "program_instructions(program, rank): (opcode, edge, unit, place, kv_slot, grad_slot, sequence) in order."},
    {"program_edges", program_edges, METH_O,
     "(source_stage, destination_stage, source_rank, destination_rank, channel, num_places, num_messages) per "
     "edge."},
    {"program_stage_peak", program_stage_peak, METH_VARARGS,
     "program_stage_peak(program, stage): peak (live_units, kv_slots, grad_slots)."},
    {"program_peak_tokens", program_peak_tokens, METH_VARARGS,
     "program_peak_tokens(program, stage, segment_sizes): peak live tokens."},
    {"program_rank_peak", program_rank_peak, METH_VARARGS,
     "program_rank_peak(program, rank, weights): peak of the live units' weights, given as [stage * num_segments + "
     "segment]."},
    {NULL, NULL, 0, NULL}};
