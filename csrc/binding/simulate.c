/* simulate.c - conversions for simulations: times, memory.
 * Long rows of doubles go out as bytes, for memoryview(...).cast("d"). */
#include "binding.h"

#include "../model/critical.h"
#include "../model/memory.h"

#include <stdlib.h>

/* -- times --------------------------------------------------------------------------------------------------------- */

static PyObject *bytes_of(const double *values, int64_t count)
{
    return PyBytes_FromStringAndSize((const char *)values, (Py_ssize_t)count * (Py_ssize_t)sizeof *values);
}

/* A tuple of `count` new objects, item(context, i) each; NULL with the exception set. */
static PyObject *tuple_of(int64_t count, PyObject *(*item)(const void *context, int64_t i), const void *context)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = item(context, i);
        if (value == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SetItem(tuple, (Py_ssize_t)i, value); /* steals */
    }
    return tuple;
}

typedef struct {
    const s1f_simulation *simulation;
    double *const *rows;
} row_context;

static PyObject *row(const void *context, int64_t rank)
{
    const row_context *c = context;
    return bytes_of(c->rows[rank], c->simulation->num_units[rank]);
}

/* One row per rank; None where they were not kept. */
static PyObject *rows(const s1f_simulation *simulation, double *const *values)
{
    row_context context = {simulation, values};
    if (values == NULL)
        Py_RETURN_NONE;
    return tuple_of(simulation->num_ranks, row, &context);
}

static PyObject *path_unit(const void *context, int64_t i)
{
    const s1f_numbered_unit *path = context;
    return Py_BuildValue("(iL)", path[i].rank, (long long)path[i].i);
}

static PyObject *path(const s1f_simulation *simulation)
{
    if (simulation->path == NULL)
        Py_RETURN_NONE;
    return tuple_of(simulation->path_length, path_unit, simulation->path);
}

static PyObject *simulation_tuple(const s1f_simulation *simulation)
{
    int32_t P = simulation->num_ranks;
    return Py_BuildValue("(ddNNNNNNN)", simulation->makespan, simulation->period, bytes_of(simulation->span, P),
                         bytes_of(simulation->busy, P), bytes_of(simulation->wait, P),
                         rows(simulation, simulation->start), rows(simulation, simulation->end),
                         rows(simulation, simulation->slack), path(simulation));
}

/* What costs point into. */
typedef struct {
    double *pass_seconds[S1F_MAX_PASSES];
    double **unit_seconds; /* [rank][i] */
    double *latency, *seconds_per_byte, *optimizer;
    int64_t *message_bytes;
} cost_arrays;

static void free_arrays(cost_arrays *arrays, int32_t num_ranks)
{
    for (int pass = 0; pass < s1f_num_passes; pass++)
        free(arrays->pass_seconds[pass]);
    for (int32_t rank = 0; arrays->unit_seconds != NULL && rank < num_ranks; rank++)
        free(arrays->unit_seconds[rank]);
    free(arrays->unit_seconds);
    free(arrays->latency);
    free(arrays->seconds_per_byte);
    free(arrays->optimizer);
    free(arrays->message_bytes);
}

/* These read into `arrays`; 0 with the exception set. */
static int read_pass_seconds(const s1f_program *program, PyObject *passes, cost_arrays *arrays)
{
    Py_ssize_t count = (Py_ssize_t)program->shape.num_stages * program->shape.num_segments;
    if (!PyTuple_Check(passes) || PyTuple_Size(passes) != s1f_num_passes) {
        PyErr_SetString(PyExc_TypeError, "expected one sequence of seconds per pass");
        return 0;
    }
    for (int pass = 0; pass < s1f_num_passes; pass++)
        if ((arrays->pass_seconds[pass] = s1f_read_doubles(PyTuple_GetItem(passes, pass), count, "costs")) == NULL)
            return 0;
    return 1;
}

static int read_unit_seconds(const s1f_program *program, PyObject *sequence, cost_arrays *arrays)
{
    PyObject *ranks = PySequence_Tuple(sequence);
    int is_read = 0;
    if (ranks == NULL)
        return 0;
    if (PyTuple_Size(ranks) != program->shape.num_ranks) {
        PyErr_Format(PyExc_ValueError, "durations hold %zd ranks, the schedule has %d", PyTuple_Size(ranks),
                     (int)program->shape.num_ranks);
    } else if ((arrays->unit_seconds = calloc((size_t)program->shape.num_ranks, sizeof *arrays->unit_seconds)) ==
               NULL) {
        PyErr_NoMemory();
    } else {
        is_read = 1;
        for (int32_t rank = 0; rank < program->shape.num_ranks && is_read; rank++) {
            arrays->unit_seconds[rank] = s1f_read_doubles(
                PyTuple_GetItem(ranks, rank), (Py_ssize_t)program->ranks[rank].num_units, "durations of one rank");
            is_read = arrays->unit_seconds[rank] != NULL;
        }
    }
    Py_DECREF(ranks);
    return is_read;
}

static int read_links(const s1f_program *program, PyObject *latency, PyObject *seconds_per_byte, cost_arrays *arrays)
{
    return (arrays->latency = s1f_read_doubles(latency, program->shape.num_stages - 1, "transfer")) != NULL &&
           (arrays->seconds_per_byte =
                s1f_read_doubles(seconds_per_byte, program->shape.num_stages - 1, "bandwidth")) != NULL;
}

/* Calls back into Python; signals are seen here too, so that Ctrl-C ends a long simulation. */
static s1f_status report_progress(void *callable, int64_t num_run)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(callable, "L", (long long)num_run);
    s1f_status status = result != NULL && PyErr_CheckSignals() == 0 ? S1F_OK : S1F_ERR_PYTHON;
    Py_XDECREF(result);
    PyGILState_Release(state);
    return status;
}

static PyObject *program_simulate(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule, *per_pass, *per_unit, *latency, *seconds_per_byte, *message_bytes, *optimizer, *progress,
        *result = NULL;
    s1f_costs costs = {0};
    cost_arrays arrays = {.unit_seconds = NULL};
    unsigned long long seed;
    int keep;
    if (!PyArg_ParseTuple(arguments, "OOO(OOd)O(ddK)(ipO)iO", &capsule, &per_pass, &per_unit, &latency,
                          &seconds_per_byte, &costs.send, &message_bytes, &costs.jitter, &costs.transfer_jitter, &seed,
                          &costs.num_steps, &costs.optimizer_sync, &optimizer, &keep, &progress))
        return NULL;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL)
        return NULL;
    int is_read = per_unit != Py_None ? read_unit_seconds(program, per_unit, &arrays)
                                      : read_pass_seconds(program, per_pass, &arrays);
    if (is_read)
        is_read = read_links(program, latency, seconds_per_byte, &arrays);
    if (is_read)
        is_read = (arrays.message_bytes =
                       s1f_read_int64s(message_bytes, program->shape.num_segments, "message_bytes")) != NULL;
    if (is_read)
        is_read = (arrays.optimizer = s1f_read_doubles(optimizer, program->shape.num_ranks, "optimizer")) != NULL;
    if (is_read) {
        for (int pass = 0; pass < s1f_num_passes; pass++)
            costs.pass_seconds[pass] = arrays.pass_seconds[pass];
        costs.unit_seconds = (const double *const *)arrays.unit_seconds;
        costs.latency = arrays.latency;
        costs.seconds_per_byte = arrays.seconds_per_byte;
        costs.message_bytes = arrays.message_bytes;
        costs.optimizer = arrays.optimizer;
        costs.seed = seed;
        costs.progress = progress != Py_None ? report_progress : NULL;
        costs.progress_context = progress;
        s1f_simulation *simulation = NULL;
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status = s1f_program_simulate(program, &costs, (s1f_keep)keep, &simulation);
        if (status == S1F_OK && keep >= S1F_KEEP_CAUSES)
            status = s1f_simulation_find_slack(program, &costs, simulation);
        Py_END_ALLOW_THREADS
        result = status == S1F_OK ? simulation_tuple(simulation) : s1f_raise(status);
        s1f_simulation_free(simulation);
    }
    free_arrays(&arrays, program->shape.num_ranks);
    return result;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static PyObject *peak_tuple(const void *context, int64_t rank)
{
    const s1f_memory_peak *peak = (const s1f_memory_peak *)context + rank;
    return Py_BuildValue("(LLLLLLL)", (long long)peak->units, (long long)peak->activations,
                         (long long)peak->output_gradients, (long long)peak->kv, (long long)peak->kv_gradients,
                         (long long)peak->receive, (long long)peak->total);
}

static PyObject *program_memory(PyObject *self, PyObject *arguments)
{
    (void)self;
    static const char *const names[] = {"activations", "kept_activations", "output_gradients",
                                        "kv",          "kv_gradients",     "message_bytes"};
    enum { NUM_KINDS = sizeof names / sizeof names[0] };
    PyObject *capsule, *given[NUM_KINDS], *result = NULL;
    int64_t *values[NUM_KINDS] = {NULL};
    if (!PyArg_ParseTuple(arguments, "OOOOOOO", &capsule, &given[0], &given[1], &given[2], &given[3], &given[4],
                          &given[5]))
        return NULL;
    const s1f_program *program = s1f_from_capsule(capsule, S1F_CAPSULE_PROGRAM);
    if (program == NULL)
        return NULL;
    Py_ssize_t stages = program->shape.num_stages, segments = program->shape.num_segments, cells = stages * segments;
    const Py_ssize_t counts[NUM_KINDS] = {cells, cells, cells, stages, stages, segments};
    s1f_memory_peak *peaks = malloc((size_t)program->shape.num_ranks * sizeof *peaks);
    int is_read = peaks != NULL;
    if (!is_read)
        PyErr_NoMemory();
    for (int i = 0; i < NUM_KINDS && is_read; i++)
        if (given[i] != Py_None)
            is_read = (values[i] = s1f_read_int64s(given[i], counts[i], names[i])) != NULL;
    if (is_read) {
        s1f_memory_bytes bytes = {values[0], values[1], values[2], values[3], values[4], values[5]};
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status = s1f_program_memory(program, &bytes, peaks);
        Py_END_ALLOW_THREADS
        result = status == S1F_OK ? tuple_of(program->shape.num_ranks, peak_tuple, peaks) : s1f_raise(status);
    }
    for (int i = 0; i < NUM_KINDS; i++)
        free(values[i]);
    free(peaks);
    return result;
}

PyMethodDef s1f_simulate_methods[] = {
    {"program_simulate", program_simulate, METH_VARARGS,
     "program_simulate(program, pass_seconds, unit_seconds, (latency, seconds_per_byte, send), message_bytes, "
     "(jitter, transfer_jitter, seed), (steps, optimizer_sync, optimizer), keep, progress): (makespan, period, span, busy, "
     "wait, start, end, slack, path); keep 0: totals, 1: start and end, 2: slack and path; progress(units run) or None."},
    {"program_memory", program_memory, METH_VARARGS,
     "program_memory(program, activations, kept_activations, output_gradients, kv, kv_gradients, message_bytes): per rank, peak "
     "of units and of the bytes of each kind, and of all together."},
    {NULL, NULL, 0, NULL}};
