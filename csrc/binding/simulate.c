/* simulate.c - conversions for simulations: times, memory, what fits.
 * Long rows of doubles go out as bytes, for memoryview(...).cast("d"). */
#include "binding.h"

#include "../model/critical.h"
#include "../model/fit.h"
#include "../model/memory.h"

#include <stdlib.h>

/* -- times --------------------------------------------------------------------------------------------------------- */

static PyObject *bytes_of(const double *values, int64_t count)
{
    return PyBytes_FromStringAndSize((const char *)values, (Py_ssize_t)count * (Py_ssize_t)sizeof *values);
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
    return s1f_tuple_of(simulation->num_ranks, row, &context);
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
    return s1f_tuple_of(simulation->path_length, path_unit, simulation->path);
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
    s1f_doubles passes[S1F_MAX_PASSES];
    s1f_doubles *units; /* [rank]; NULL: by pass */
    s1f_doubles latency, seconds_per_byte, optimizer, tier;
    s1f_int64s message_bytes, statistics_bytes;
    const double **unit_seconds; /* [rank]: values of `units` */
} cost_arrays;

static void free_arrays(cost_arrays *arrays, int32_t num_ranks)
{
    for (int pass = 0; pass < s1f_num_passes; pass++)
        PyMem_Free(arrays->passes[pass].values);
    for (int32_t rank = 0; arrays->units != NULL && rank < num_ranks; rank++)
        PyMem_Free(arrays->units[rank].values);
    free(arrays->units);
    free(arrays->unit_seconds);
    PyMem_Free(arrays->latency.values);
    PyMem_Free(arrays->seconds_per_byte.values);
    PyMem_Free(arrays->optimizer.values);
    PyMem_Free(arrays->tier.values);
    PyMem_Free(arrays->message_bytes.values);
    PyMem_Free(arrays->statistics_bytes.values);
}

/* These read into `arrays`; 0 with the exception set. */
static int read_pass_seconds(const s1f_program *program, PyObject *passes, cost_arrays *arrays, s1f_costs *costs)
{
    int is_read = s1f_to_pass_seconds(passes, &program->shape, arrays->passes);
    for (int pass = 0; pass < s1f_num_passes; pass++)
        costs->pass_seconds[pass] = arrays->passes[pass].values;
    return is_read;
}

static int read_unit_seconds(const s1f_program *program, PyObject *sequence, cost_arrays *arrays, s1f_costs *costs)
{
    int32_t num_ranks = program->shape.num_ranks;
    PyObject *ranks = PySequence_Tuple(sequence);
    if (ranks == NULL)
        return 0;
    int is_read = PyTuple_Size(ranks) == num_ranks;
    if (!is_read) {
        PyErr_Format(PyExc_ValueError, "durations hold %zd ranks, the schedule has %d", PyTuple_Size(ranks),
                     (int)num_ranks);
    } else if ((arrays->units = calloc((size_t)num_ranks, sizeof *arrays->units)) == NULL ||
               (arrays->unit_seconds = calloc((size_t)num_ranks, sizeof *arrays->unit_seconds)) == NULL) {
        PyErr_NoMemory();
        is_read = 0;
    }
    for (int32_t rank = 0; is_read && rank < num_ranks; rank++) {
        s1f_doubles *seconds = &arrays->units[rank];
        seconds->name = "durations of one rank";
        is_read = s1f_to_doubles(PyTuple_GetItem(ranks, rank), seconds) &&
                  s1f_require_count(seconds->name, seconds->count, program->ranks[rank].num_units);
        arrays->unit_seconds[rank] = seconds->values;
    }
    Py_DECREF(ranks);
    costs->unit_seconds = arrays->unit_seconds;
    return is_read;
}

static int read_costs(const s1f_program *program, PyObject *per_pass, PyObject *per_unit, cost_arrays *arrays,
                      s1f_costs *costs)
{
    int64_t num_pairs = (int64_t)program->shape.num_stages - 1, num_columns = s1f_num_columns(&program->shape);
    if (per_unit != Py_None ? !read_unit_seconds(program, per_unit, arrays, costs)
                            : !read_pass_seconds(program, per_pass, arrays, costs))
        return 0;
    costs->latency = arrays->latency.values;
    costs->seconds_per_byte = arrays->seconds_per_byte.values;
    costs->message_bytes = arrays->message_bytes.values;
    costs->statistics_bytes = arrays->statistics_bytes.values;
    costs->optimizer = arrays->optimizer.values;
    costs->tier_seconds = arrays->tier.values;
    return s1f_require_count("transfer", arrays->latency.count, num_pairs) &&
           s1f_require_count("bandwidth", arrays->seconds_per_byte.count, num_pairs) &&
           s1f_require_count("message_bytes", arrays->message_bytes.count, num_columns) &&
           s1f_require_count("statistics_bytes", arrays->statistics_bytes.count, num_columns) &&
           (arrays->tier.values == NULL ||
            s1f_require_count("tier", arrays->tier.count, (num_pairs + 1) * num_columns)) &&
           s1f_require_count("optimizer", arrays->optimizer.count, program->shape.num_ranks);
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

static PyObject *simulate(const s1f_program *program, const s1f_costs *costs, s1f_keep keep)
{
    s1f_simulation *simulation = NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_program_simulate(program, costs, keep, &simulation);
    if (status == S1F_OK && keep >= S1F_KEEP_CAUSES)
        status = s1f_simulation_find_slack(program, costs, simulation);
    Py_END_ALLOW_THREADS
    PyObject *result = status == S1F_OK ? simulation_tuple(simulation) : s1f_raise(status);
    s1f_simulation_free(simulation);
    return result;
}

static PyObject *program_simulate(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *per_pass, *per_unit, *progress, *result = NULL;
    s1f_costs costs = {0};
    cost_arrays arrays = {.latency.name = "transfer",
                          .seconds_per_byte.name = "bandwidth",
                          .message_bytes.name = "message_bytes",
                          .statistics_bytes.name = "statistics_bytes",
                          .optimizer.name = "optimizer",
                          .tier.name = "tier"};
    s1f_number send = {.name = "send"}, jitter = {.name = "jitter"}, transfer_jitter = {.name = "transfer_jitter"};
    unsigned long long seed;
    int keep;
    if (!PyArg_ParseTuple(arguments, "O&OO(O&O&O&O&)(O&O&)(O&O&Kp)(ipO&)iO", s1f_to_program, &program, &per_pass,
                          &per_unit, s1f_to_doubles, &arrays.latency, s1f_to_doubles, &arrays.seconds_per_byte,
                          s1f_to_number, &send, s1f_to_doubles, &arrays.tier, s1f_to_int64s, &arrays.message_bytes,
                          s1f_to_int64s, &arrays.statistics_bytes, s1f_to_number, &jitter, s1f_to_number,
                          &transfer_jitter, &seed, &costs.fills, &costs.num_steps, &costs.optimizer_sync,
                          s1f_to_doubles, &arrays.optimizer, &keep, &progress))
        return NULL;
    costs.send = send.value;
    costs.jitter = jitter.value;
    costs.transfer_jitter = transfer_jitter.value;
    costs.seed = seed;
    costs.progress = progress != Py_None ? report_progress : NULL;
    costs.progress_context = progress;
    if (read_costs(program, per_pass, per_unit, &arrays, &costs))
        result = simulate(program, &costs, (s1f_keep)keep);
    free_arrays(&arrays, program->shape.num_ranks);
    return result;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static PyObject *peak_item(const void *context, int64_t rank)
{
    const s1f_memory_peak *peak = (const s1f_memory_peak *)context + rank;
    return Py_BuildValue("(LLLLLLLLL)", (long long)peak->units, (long long)peak->activations,
                         (long long)peak->output_gradients, (long long)peak->kv, (long long)peak->kv_gradients,
                         (long long)peak->inputs, (long long)peak->logits, (long long)peak->receive,
                         (long long)peak->total);
}

enum { NUM_BYTE_KINDS = 14 };

/* What is held, of a tuple in the order of the names below; nothing of the kinds that are missing at its end. 0 with the
 * exception set; free_bytes is due either way. */
static int read_bytes(PyObject *tuple, const s1f_shape *shape, s1f_int64s *kinds, s1f_memory_bytes *bytes)
{
    static const char *const names[NUM_BYTE_KINDS] = {
        "activations",   "kept_activations", "output_gradients", "kv",
        "kv_gradients",  "inputs",           "kv_rows",          "staying",
        "forward_work",  "backward_work",    "kv_gradient_rows", "shard_logits",
        "message_bytes", "statistics_bytes"};
    int64_t stages = shape->num_stages, columns = s1f_num_columns(shape), cells = stages * columns;
    const int64_t counts[NUM_BYTE_KINDS] = {cells, cells, cells, stages, stages,  cells,   cells,
                                            cells, cells, cells, cells,  columns, columns, columns};
    if (PyTuple_Size(tuple) > NUM_BYTE_KINDS) {
        PyErr_Format(PyExc_TypeError, "%zd kinds of bytes, must be at most %d", PyTuple_Size(tuple),
                     (int)NUM_BYTE_KINDS);
        return 0;
    }
    for (int i = 0; i < PyTuple_Size(tuple); i++) {
        kinds[i].name = names[i];
        if (!s1f_to_int64s(PyTuple_GetItem(tuple, i), &kinds[i]))
            return 0;
    }
    for (int i = 0; i < NUM_BYTE_KINDS; i++)
        if (kinds[i].values != NULL && !s1f_require_count(names[i], kinds[i].count, counts[i]))
            return 0;
    *bytes = (s1f_memory_bytes){.activation = kinds[0].values,
                                .kept = kinds[1].values,
                                .output_gradient = kinds[2].values,
                                .kv = kinds[3].values,
                                .kv_gradient = kinds[4].values,
                                .input = kinds[5].values,
                                .kv_rows = kinds[6].values,
                                .staying = kinds[7].values,
                                .forward_work = kinds[8].values,
                                .backward_work = kinds[9].values,
                                .kv_gradient_rows = kinds[10].values,
                                .logits = kinds[11].values,
                                .message = kinds[12].values,
                                .statistics = kinds[13].values};
    return 1;
}

static void free_bytes(s1f_int64s *kinds)
{
    for (int i = 0; i < NUM_BYTE_KINDS; i++)
        PyMem_Free(kinds[i].values);
}

static PyObject *program_memory(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *tuple, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&O!", s1f_to_program, &program, &PyTuple_Type, &tuple))
        return NULL;
    s1f_int64s kinds[NUM_BYTE_KINDS] = {0};
    s1f_memory_bytes bytes;
    s1f_memory_peak *peaks = malloc((size_t)program->shape.num_ranks * sizeof *peaks);
    if (peaks == NULL) {
        PyErr_NoMemory();
    } else if (read_bytes(tuple, &program->shape, kinds, &bytes)) {
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status = s1f_program_memory(program, &bytes, peaks);
        Py_END_ALLOW_THREADS
        result = status == S1F_OK ? s1f_tuple_of(program->shape.num_ranks, peak_item, peaks) : s1f_raise(status);
    }
    free_bytes(kinds);
    free(peaks);
    return result;
}

static PyObject *fit_program(const s1f_program *program, const s1f_fit *fit)
{
    const s1f_shape *shape = &program->shape;
    int64_t num_cells = shape->num_stages * s1f_num_cells(shape);
    unsigned char *cells = malloc((size_t)num_cells);
    s1f_status status = cells != NULL ? S1F_OK : s1f_fail(S1F_ERR_MEMORY, "no memory to fit a schedule");
    if (status == S1F_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = s1f_program_fit(program, fit, cells);
        Py_END_ALLOW_THREADS
    }
    PyObject *result =
        status == S1F_OK ? PyBytes_FromStringAndSize((const char *)cells, (Py_ssize_t)num_cells) : s1f_raise(status);
    free(cells);
    return result;
}

static PyObject *program_fit(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *tuple, *start, *result = NULL;
    s1f_fit fit = {0};
    s1f_int64s room = {.name = "room"};
    s1f_doubles tier = {.name = "tier"};
    if (!PyArg_ParseTuple(arguments, "O&O!O&ppOO&", s1f_to_program, &program, &PyTuple_Type, &tuple, s1f_to_int64s,
                          &room, &fit.recomputes, &fit.moves, &start, s1f_to_doubles, &tier))
        return NULL;
    const s1f_shape *shape = &program->shape;
    int64_t num_units = shape->num_stages * s1f_num_columns(shape);
    s1f_int64s kinds[NUM_BYTE_KINDS] = {0};
    s1f_memory_bytes bytes;
    cost_arrays arrays = {0};
    s1f_costs costs = {0};
    if (fit.recomputes && fit.moves && (start == Py_None || tier.values == NULL))
        PyErr_SetString(PyExc_TypeError, "the times of units and of the tier are needed where units may do both");
    else if (read_bytes(tuple, shape, kinds, &bytes) && s1f_require_count("room", room.count, shape->num_ranks) &&
             (tier.values == NULL || s1f_require_count("tier", tier.count, num_units)) &&
             (start == Py_None || read_unit_seconds(program, start, &arrays, &costs))) {
        fit.bytes = &bytes;
        fit.room = room.values;
        fit.start = costs.unit_seconds;
        fit.tier_seconds = tier.values;
        result = fit_program(program, &fit);
    }
    free_bytes(kinds);
    free_arrays(&arrays, shape->num_ranks);
    PyMem_Free(room.values);
    PyMem_Free(tier.values);
    return result;
}

PyMethodDef s1f_simulate_methods[] = {
    {"program_simulate", program_simulate, METH_VARARGS,
     "program_simulate(program, pass_seconds, unit_seconds, (latency, seconds_per_byte, send, tier), (message_bytes, "
     "statistics_bytes), "
     "(jitter, transfer_jitter, seed, fill), (steps, optimizer_sync, optimizer), keep, progress): (makespan, period, span, busy, "
     "wait, start, end, slack, path); keep 0: totals, 1: start and end, 2: slack and path; progress(units run) or None."},
    {"program_memory", program_memory, METH_VARARGS,
     "program_memory(program, (activations, kept_activations, output_gradients, kv, kv_gradients, inputs, kv_rows, staying, "
     "forward_work, backward_work, kv_gradient_rows, shard_logits, message_bytes, statistics_bytes)): per rank, the peaks of units, of the bytes of each kind, and of their total."},
    {"program_fit", program_fit, METH_VARARGS,
     "program_fit(program, bytes of program_memory, room per rank, recomputes, moves, start, tier): a byte per cell of all "
     "stages, 0 kept, 1 recomputed, 2 moved, such that no rank holds more than its room."},
    {NULL, NULL, 0, NULL}};
