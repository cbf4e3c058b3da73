/* simulate.c - conversions for simulations: times, memory, what fits.
 * Long rows of doubles go out as bytes, for memoryview(...).cast("d"). */
#include "records.h"

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

static PyObject *times_of(const s1f_simulation *simulation)
{
    int32_t P = simulation->num_ranks;
    return s1f_new_record(S1F_TIMES, "(ddNNNNNNN)", simulation->makespan, simulation->period,
                          bytes_of(simulation->span, P), bytes_of(simulation->busy, P), bytes_of(simulation->wait, P),
                          rows(simulation, simulation->start), rows(simulation, simulation->end),
                          rows(simulation, simulation->slack), path(simulation));
}

/* What costs are read into. */
enum { LATENCY, BANDWIDTH, MESSAGE_BYTES, STATISTICS_BYTES, TIER, OPTIMIZER, NUM_TABLES };
typedef struct {
    s1f_table passes[S1F_MAX_PASSES], others[NUM_TABLES];
    s1f_doubles *units;          /* [rank]; NULL: by pass */
    const double **unit_seconds; /* [rank]: values of `units` */
} cost_arrays;

static const s1f_table cost_tables[NUM_TABLES] = {
    [LATENCY] = {"latency", S1F_PER_PAIR},
    [BANDWIDTH] = {"bandwidth", S1F_PER_PAIR},
    [MESSAGE_BYTES] = {"message_bytes", S1F_PER_SEGMENT, 1},
    [STATISTICS_BYTES] = {"statistics_bytes", S1F_PER_SEGMENT, 1},
    [TIER] = {"tier", S1F_PER_CELL},
    [OPTIMIZER] = {"optimizer", S1F_PER_RANK},
};

static void free_arrays(cost_arrays *arrays, int32_t num_ranks)
{
    s1f_free_tables(arrays->passes, S1F_MAX_PASSES);
    s1f_free_tables(arrays->others, NUM_TABLES);
    for (int32_t rank = 0; arrays->units != NULL && rank < num_ranks; rank++)
        PyMem_Free(arrays->units[rank].values);
    free(arrays->units);
    free(arrays->unit_seconds);
}

/* These read into `arrays`; 0 with the exception set. */
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

/* Bandwidths become seconds per byte. */
static int invert_bandwidth(const s1f_table *bandwidth, int64_t count)
{
    double *values = bandwidth->values;
    for (int64_t i = 0; values != NULL && i < count; i++) {
        if (!(values[i] > 0)) {
            PyObject *given = PyFloat_FromDouble(values[i]);
            PyErr_Format(PyExc_ValueError, "bandwidth is %S, must be above 0", given);
            Py_XDECREF(given);
            return 0;
        }
        values[i] = 1.0 / values[i];
    }
    return 1;
}

static int is_nothing(const s1f_table *table, const s1f_shape *shape)
{
    int64_t count = s1f_table_count(shape, table->per);
    for (int64_t i = 0; table->values != NULL && i < count; i++)
        if (table->is_whole ? ((int64_t *)table->values)[i] != 0 : ((double *)table->values)[i] != 0)
            return 0;
    return 1;
}

static int read_links(const s1f_shape *shape, PyObject *links, cost_arrays *arrays, s1f_costs *costs)
{
    s1f_number send = {.name = "send"};
    PyObject *given = PyObject_GetAttrString(links, send.name);
    int is_read = given != NULL && s1f_to_number(given, &send);
    Py_XDECREF(given);
    costs->send = send.value;
    for (int i = LATENCY; i <= STATISTICS_BYTES && is_read; i++)
        is_read = s1f_read_attribute(links, shape, &arrays->others[i]);
    return is_read && invert_bandwidth(&arrays->others[BANDWIDTH], s1f_table_count(shape, S1F_PER_PAIR));
}

/* From a seq1f1b.Costs, and measured seconds of every unit or None. */
static int read_costs(const s1f_program *program, PyObject *given, PyObject *durations, cost_arrays *arrays,
                      s1f_costs *costs)
{
    const s1f_shape *shape = &program->shape;
    PyObject *links = PyObject_GetAttrString(given, "links");
    for (int i = 0; i < NUM_TABLES; i++)
        arrays->others[i] = cost_tables[i];
    int is_read = links != NULL && read_links(shape, links, arrays, costs) &&
                  s1f_read_attribute(given, shape, &arrays->others[TIER]) &&
                  s1f_read_attribute(given, shape, &arrays->others[OPTIMIZER]) &&
                  s1f_read_pass_seconds(given, shape, arrays->passes) &&
                  (durations == Py_None || read_unit_seconds(program, durations, arrays, costs));
    Py_XDECREF(links);
    for (int pass = 0; pass < s1f_num_passes; pass++)
        costs->pass_seconds[pass] = arrays->passes[pass].values;
    costs->latency = arrays->others[LATENCY].values;
    costs->seconds_per_byte = arrays->others[BANDWIDTH].values;
    costs->message_bytes = arrays->others[MESSAGE_BYTES].values;
    costs->statistics_bytes = arrays->others[STATISTICS_BYTES].values;
    costs->optimizer = arrays->others[OPTIMIZER].values;
    if (!is_nothing(&arrays->others[TIER], shape))
        costs->tier_seconds = arrays->others[TIER].values;
    return is_read;
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
    PyObject *result = status == S1F_OK ? times_of(simulation) : s1f_raise(status);
    s1f_simulation_free(simulation);
    return result;
}

static PyObject *program_simulate(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *given, *durations, *progress, *result = NULL;
    s1f_costs costs = {0};
    cost_arrays arrays = {0};
    s1f_number jitter = {.name = "jitter"}, transfer_jitter = {.name = "transfer_jitter"};
    unsigned long long seed;
    int keep;
    if (!PyArg_ParseTuple(arguments, "O&OO(O&O&K)p(ip)iO", s1f_to_program, &program, &given, &durations, s1f_to_number,
                          &jitter, s1f_to_number, &transfer_jitter, &seed, &costs.fills, &costs.num_steps,
                          &costs.optimizer_sync, &keep, &progress))
        return NULL;
    costs.jitter = jitter.value;
    costs.transfer_jitter = transfer_jitter.value;
    costs.seed = seed;
    costs.progress = progress != Py_None ? report_progress : NULL;
    costs.progress_context = progress;
    if (read_costs(program, given, durations, &arrays, &costs))
        result = simulate(program, &costs, (s1f_keep)keep);
    free_arrays(&arrays, program->shape.num_ranks);
    return result;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static PyObject *peak_item(const void *context, int64_t rank)
{
    const s1f_memory_peak *peak = (const s1f_memory_peak *)context + rank;
    return s1f_new_record(S1F_PEAK, "(LNLL)", (long long)peak->units,
                          s1f_tuple_of(S1F_NUM_HOLDINGS, s1f_int64_item, peak->of), (long long)peak->receive,
                          (long long)peak->total);
}

/* A table of each holding, and of the two kinds of messages. */
enum { MESSAGES = S1F_NUM_HOLDINGS, STATISTICS, NUM_BYTE_TABLES };

/* kept_activations are a part of activations in Python; W reads all of them where they are None. */
static int split_activations(s1f_table *tables, int64_t count)
{
    int64_t *whole = tables[S1F_HOLDS_SAVED].values, *kept = tables[S1F_HOLDS_FOR_WEIGHT].values;
    if (kept == NULL) {
        tables[S1F_HOLDS_FOR_WEIGHT].values = whole;
        tables[S1F_HOLDS_SAVED].values = NULL;
        return 1;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t saved = whole != NULL ? whole[i] : 0;
        if (saved >= 0 && kept[i] > saved) {
            PyErr_Format(PyExc_ValueError, "kept_activations hold %lld bytes, more than the %lld of activations",
                         (long long)kept[i], (long long)saved);
            return 0;
        }
        if (whole != NULL && kept[i] >= 0)
            whole[i] -= kept[i];
    }
    return 1;
}

/* From a seq1f1b.schedule.StepMemory, and a seq1f1b.Links or NULL; 0 with the exception set. Tables are due anyway. */
static int read_bytes(PyObject *memory, PyObject *links, const s1f_shape *shape, s1f_table *tables,
                      s1f_memory_bytes *bytes)
{
    tables[MESSAGES] = cost_tables[MESSAGE_BYTES];
    tables[STATISTICS] = cost_tables[STATISTICS_BYTES];
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
        s1f_holding_facts facts = s1f_facts_of_holding((s1f_holding)h);
        tables[h] = (s1f_table){facts.name, facts.per, 1, NULL};
        if (!s1f_read_attribute(memory, shape, &tables[h]))
            return 0;
    }
    if ((links != NULL && (!s1f_read_attribute(links, shape, &tables[MESSAGES]) ||
                           !s1f_read_attribute(links, shape, &tables[STATISTICS]))) ||
        !split_activations(tables, s1f_table_count(shape, S1F_PER_CELL)))
        return 0;
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) /* who holds nothing is not counted */
        bytes->of[h] = is_nothing(&tables[h], shape) ? NULL : tables[h].values;
    bytes->message = tables[MESSAGES].values;
    bytes->statistics = tables[STATISTICS].values;
    return 1;
}

static PyObject *program_memory(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *memory, *links, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&OO", s1f_to_program, &program, &memory, &links))
        return NULL;
    s1f_table tables[NUM_BYTE_TABLES] = {0};
    s1f_memory_bytes bytes;
    s1f_memory_peak *peaks = malloc((size_t)program->shape.num_ranks * sizeof *peaks);
    if (peaks == NULL) {
        PyErr_NoMemory();
    } else if (read_bytes(memory, links, &program->shape, tables, &bytes)) {
        s1f_status status;
        S1F_WITHOUT_GIL(status = s1f_program_memory(program, &bytes, peaks));
        result = status == S1F_OK ? s1f_tuple_of(program->shape.num_ranks, peak_item, peaks) : s1f_raise(status);
    }
    s1f_free_tables(tables, NUM_BYTE_TABLES);
    free(peaks);
    return result;
}

/* Bytes that single units take and free, for curves. */
typedef struct {
    const s1f_byte_tables *bytes;
    const s1f_lifetime_table *table;
    const s1f_rank_program *ranks;
} change_context;

static PyObject *rank_changes(const void *context, int64_t rank)
{
    const change_context *c = context;
    const s1f_rank_program *own = &c->ranks[rank];
    Py_ssize_t count = (Py_ssize_t)own->num_units * S1F_NUM_HOLDINGS;
    int64_t *changes = PyMem_Calloc((size_t)count + 1, 2 * sizeof *changes);
    for (int64_t i = 0; changes != NULL && i < count; i++) {
        s1f_unit unit = own->units[i / S1F_NUM_HOLDINGS];
        s1f_lifetimes lifetimes = s1f_unit_lifetimes(c->table, unit);
        uint32_t holding = 1u << (i % S1F_NUM_HOLDINGS);
        changes[2 * i] = s1f_taken_bytes(c->bytes, lifetimes.takes & holding, unit);
        changes[2 * i + 1] = s1f_freed_bytes(c->bytes, lifetimes.frees & holding, unit);
    }
    Py_ssize_t num_bytes = count * 2 * (Py_ssize_t)sizeof *changes;
    PyObject *bytes = changes == NULL ? PyErr_NoMemory() : PyBytes_FromStringAndSize((const char *)changes, num_bytes);
    PyMem_Free(changes);
    return bytes;
}

static PyObject *program_changes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *memory, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&O", s1f_to_program, &program, &memory))
        return NULL;
    s1f_table tables[NUM_BYTE_TABLES] = {0};
    s1f_memory_bytes bytes;
    s1f_lifetime_table lifetimes = s1f_lifetimes_of(&program->shape);
    if (read_bytes(memory, NULL, &program->shape, tables, &bytes)) {
        s1f_byte_tables places = s1f_byte_tables_of(&program->shape, &bytes);
        change_context context = {&places, &lifetimes, program->ranks};
        result = s1f_tuple_of(program->shape.num_ranks, rank_changes, &context);
    }
    s1f_free_tables(tables, NUM_BYTE_TABLES);
    return result;
}

static PyObject *fit_program(const s1f_program *program, const s1f_fit *fit)
{
    const s1f_shape *shape = &program->shape;
    int64_t num_cells = shape->num_stages * s1f_num_cells(shape);
    unsigned char *cells = malloc((size_t)num_cells);
    s1f_status status = cells != NULL ? S1F_OK : s1f_fail(S1F_ERR_MEMORY, "no memory to fit a schedule");
    if (status == S1F_OK) {
        S1F_WITHOUT_GIL(status = s1f_program_fit(program, fit, cells));
    }
    PyObject *result =
        status == S1F_OK ? PyBytes_FromStringAndSize((const char *)cells, (Py_ssize_t)num_cells) : s1f_raise(status);
    free(cells);
    return result;
}

static PyObject *program_fit(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *memory, *given, *start, *result = NULL;
    s1f_fit fit = {0};
    s1f_int64s room = {.name = "room"};
    if (!PyArg_ParseTuple(arguments, "O&OOO&ppO", s1f_to_program, &program, &memory, &given, s1f_to_int64s, &room,
                          &fit.recomputes, &fit.moves, &start))
        return NULL;
    const s1f_shape *shape = &program->shape;
    s1f_table tables[NUM_BYTE_TABLES] = {0}, tier = cost_tables[TIER];
    s1f_memory_bytes bytes;
    cost_arrays arrays = {0};
    s1f_costs costs = {0};
    PyObject *links = PyObject_GetAttrString(given, "links");
    if (fit.recomputes && fit.moves && start == Py_None)
        PyErr_SetString(PyExc_TypeError, "the times of units are needed where units may do both");
    else if (links != NULL && read_bytes(memory, links, shape, tables, &bytes) &&
             s1f_require_count("room", room.count, shape->num_ranks) && s1f_read_attribute(given, shape, &tier) &&
             (start == Py_None || read_unit_seconds(program, start, &arrays, &costs))) {
        fit.bytes = &bytes;
        fit.room = room.values;
        fit.start = costs.unit_seconds;
        fit.tier_seconds = tier.values;
        result = fit_program(program, &fit);
    }
    Py_XDECREF(links);
    s1f_free_tables(tables, NUM_BYTE_TABLES);
    s1f_free_tables(&tier, 1);
    free_arrays(&arrays, shape->num_ranks);
    PyMem_Free(room.values);
    return result;
}

PyMethodDef s1f_simulate_methods[] = {
    S1F_METHOD(program_simulate, VARARGS,
               "Times. costs: a seq1f1b.Costs; durations: seconds of every unit per rank, or None; keep 0: totals, "
               "1: start and end, 2: slack and path; progress(units run) or None."),
    S1F_METHOD(program_memory, VARARGS,
               "A Peak per rank. memory: a seq1f1b.schedule.StepMemory; links: a seq1f1b.Links."),
    S1F_METHOD(program_changes, VARARGS,
               "Per rank int64 [unit][holding][2]: bytes that a unit takes at its start, and frees at its end."),
    S1F_METHOD(
        program_fit, VARARGS,
        "A byte per cell of all stages, 0 kept, 1 recomputed, 2 moved, such that no rank holds more than its room."),
    {NULL, NULL, 0, NULL}};
