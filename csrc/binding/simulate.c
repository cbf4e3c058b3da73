/* simulate.c - conversions for simulations: times, memory, what fits. Arrays go out as bytes. */
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

static PyObject *path_unit(const void *context, int64_t i)
{
    const s1f_numbered_unit *path = context;
    return Py_BuildValue("(iL)", path[i].rank, (long long)path[i].i);
}

static int64_t count_units(const s1f_program *program)
{
    int64_t count = 0;
    for (int32_t rank = 0; rank < program->shape.num_ranks; rank++)
        count += program->ranks[rank].num_units;
    return count;
}

static PyObject *times_of(const s1f_program *program, const s1f_simulation *simulation)
{
    int32_t P = simulation->num_ranks, num_kept = simulation->slack == NULL ? 2 : 3;
    return Py_BuildValue("(ddNNNNN)", simulation->makespan, simulation->period, bytes_of(simulation->span, P),
                         bytes_of(simulation->busy, P), bytes_of(simulation->wait, P),
                         bytes_of(simulation->times, num_kept * count_units(program)),
                         s1f_tuple_of(simulation->path_length, path_unit, simulation->path));
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

static PyObject *simulate(const s1f_program *program, const s1f_costs *costs, int with_causes)
{
    s1f_simulation *simulation = NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_program_simulate(program, costs, with_causes, &simulation);
    if (status == S1F_OK && with_causes)
        status = s1f_simulation_find_slack(program, costs, simulation);
    Py_END_ALLOW_THREADS
    PyObject *result = status == S1F_OK ? times_of(program, simulation) : s1f_raise(status);
    s1f_simulation_free(simulation);
    return result;
}

static PyObject *program_simulate(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    enum { SECONDS, LATENCY, PER_BYTE, MESSAGES, STATISTICS, TIER, OPTIMIZER, UNITS, NUM_ARRAYS };
    const s1f_program *program;
    PyObject *given, *progress;
    s1f_costs costs = {0};
    int with_causes;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "O&Od(ddK)p(ip)pO", s1f_to_program, &program, &given, &costs.send, &costs.jitter,
                          &costs.transfer_jitter, &seed, &costs.fills, &costs.num_steps, &costs.optimizer_sync,
                          &with_causes, &progress))
        return NULL;
    int64_t cells = s1f_table_count(&program->shape, S1F_PER_CELL), columns = s1f_num_columns(&program->shape),
            pairs = s1f_table_count(&program->shape, S1F_PER_PAIR);
    s1f_array arrays[NUM_ARRAYS] = {
        [SECONDS] = {.name = "seconds", .wanted = s1f_num_passes * cells},
        [LATENCY] = {.name = "latency", .wanted = pairs},
        [PER_BYTE] = {.name = "seconds per byte", .wanted = pairs},
        [MESSAGES] = {.name = "message_bytes", .wanted = columns},
        [STATISTICS] = {.name = "statistics_bytes", .wanted = columns},
        [TIER] = {.name = "tier", .wanted = cells},
        [OPTIMIZER] = {.name = "optimizer", .wanted = program->shape.num_ranks},
        [UNITS] = {.name = "durations", .wanted = count_units(program)},
    };
    int is_read = s1f_read_arrays(given, arrays, NUM_ARRAYS);
    for (int pass = 0; pass < s1f_num_passes && arrays[SECONDS].values != NULL; pass++)
        costs.pass_seconds[pass] = (const double *)arrays[SECONDS].values + pass * cells;
    costs.unit_seconds = arrays[UNITS].values;
    costs.latency = arrays[LATENCY].values;
    costs.seconds_per_byte = arrays[PER_BYTE].values;
    costs.message_bytes = arrays[MESSAGES].values;
    costs.statistics_bytes = arrays[STATISTICS].values;
    costs.tier_seconds = arrays[TIER].values;
    costs.optimizer = arrays[OPTIMIZER].values;
    costs.seed = seed;
    costs.progress = report_progress;
    costs.progress_context = progress;
    PyObject *result = is_read ? simulate(program, &costs, with_causes) : NULL;
    s1f_release_arrays(arrays, NUM_ARRAYS);
    return result;
}

/* Completes the seconds of all passes in place. */
static PyObject *fill_in(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer view;
    unsigned int given;
    double *passes[S1F_MAX_PASSES];
    if (!PyArg_ParseTuple(arguments, "w*I", &view, &given))
        return NULL;
    int64_t count = view.len / s1f_num_passes / (int64_t)sizeof(double);
    for (int pass = 0; pass < s1f_num_passes; pass++)
        passes[pass] = (double *)view.buf + pass * count;
    s1f_status status = s1f_table_fill_in(passes, given, count);
    PyBuffer_Release(&view);
    return s1f_none(status);
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/* A table of each holding, and of the two kinds of messages. */
enum { MESSAGES = S1F_NUM_HOLDINGS, STATISTICS, NUM_BYTE_ARRAYS };

/* s1f_release_arrays is due either way. */
static int read_bytes(PyObject *given, const s1f_shape *shape, s1f_array *arrays, s1f_memory_bytes *bytes)
{
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
        s1f_holding_facts facts = s1f_facts_of_holding((s1f_holding)h);
        arrays[h] = (s1f_array){.name = facts.name, .wanted = s1f_table_count(shape, facts.per)};
    }
    for (int i = MESSAGES; i < NUM_BYTE_ARRAYS; i++)
        arrays[i] = (s1f_array){.name = "bytes of messages", .wanted = s1f_num_columns(shape)};
    int is_read = s1f_read_arrays(given, arrays, NUM_BYTE_ARRAYS);
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++)
        bytes->of[h] = arrays[h].values;
    bytes->message = arrays[MESSAGES].values;
    bytes->statistics = arrays[STATISTICS].values;
    return is_read;
}

static PyObject *program_memory(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *given, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&O", s1f_to_program, &program, &given))
        return NULL;
    s1f_array arrays[NUM_BYTE_ARRAYS];
    s1f_memory_bytes bytes;
    size_t size = (size_t)program->shape.num_ranks * sizeof(s1f_memory_peak);
    s1f_memory_peak *peaks = malloc(size);
    if (peaks == NULL)
        PyErr_NoMemory();
    if (read_bytes(given, &program->shape, arrays, &bytes) && peaks != NULL) {
        s1f_status status;
        S1F_WITHOUT_GIL(status = s1f_program_memory(program, &bytes, peaks));
        result =
            status == S1F_OK ? PyBytes_FromStringAndSize((const char *)peaks, (Py_ssize_t)size) : s1f_raise(status);
    }
    s1f_release_arrays(arrays, NUM_BYTE_ARRAYS);
    free(peaks);
    return result;
}

/* Bytes that single units take and free, for curves. */
static PyObject *program_changes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    PyObject *given, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&O", s1f_to_program, &program, &given))
        return NULL;
    s1f_array arrays[NUM_BYTE_ARRAYS];
    s1f_memory_bytes bytes;
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    int64_t size = count_units(program) * S1F_NUM_HOLDINGS * 2 * (int64_t)sizeof(int64_t);
    if (read_bytes(given, &program->shape, arrays, &bytes) &&
        (result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size)) != NULL) {
        s1f_byte_tables places = s1f_byte_tables_of(&program->shape, &bytes);
        int64_t *next =
            (int64_t *)(void *)PyBytes_AsString(result); /* malloc's alignment, behind a header of pointers */
        for (int32_t rank = 0; rank < program->shape.num_ranks; rank++)
            for (int64_t i = 0; i < program->ranks[rank].num_units * S1F_NUM_HOLDINGS; i++) {
                s1f_unit unit = program->ranks[rank].units[i / S1F_NUM_HOLDINGS];
                s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
                uint32_t holding = 1u << (i % S1F_NUM_HOLDINGS);
                *next++ = s1f_taken_bytes(&places, lifetimes.takes & holding, unit);
                *next++ = s1f_freed_bytes(&places, lifetimes.frees & holding, unit);
            }
    }
    s1f_release_arrays(arrays, NUM_BYTE_ARRAYS);
    return result;
}

static PyObject *fit_program(const s1f_program *program, const s1f_fit *fit)
{
    int64_t num_cells = program->shape.num_stages * s1f_num_cells(&program->shape);
    PyObject *cells = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)num_cells);
    s1f_status status = cells == NULL ? S1F_ERR_PYTHON : S1F_OK;
    if (status == S1F_OK) {
        unsigned char *kinds = (unsigned char *)PyBytes_AsString(cells);
        S1F_WITHOUT_GIL(status = s1f_program_fit(program, fit, kinds));
    }
    if (status != S1F_OK) {
        Py_CLEAR(cells);
        s1f_raise(status);
    }
    return cells;
}

static PyObject *program_fit(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    enum { ROOM, TIER, START, NUM_ARRAYS };
    const s1f_program *program;
    PyObject *memory, *given, *result = NULL;
    s1f_fit fit = {0};
    if (!PyArg_ParseTuple(arguments, "O&OOpp", s1f_to_program, &program, &memory, &given, &fit.recomputes, &fit.moves))
        return NULL;
    s1f_array held[NUM_BYTE_ARRAYS],
        arrays[NUM_ARRAYS] = {
            [ROOM] = {.name = "room", .wanted = program->shape.num_ranks},
            [TIER] = {.name = "tier", .wanted = s1f_table_count(&program->shape, S1F_PER_CELL)},
            [START] = {.name = "starts", .wanted = count_units(program)},
        };
    s1f_memory_bytes bytes;
    if (read_bytes(memory, &program->shape, held, &bytes) && s1f_read_arrays(given, arrays, NUM_ARRAYS)) {
        fit.bytes = &bytes;
        fit.room = arrays[ROOM].values;
        fit.tier_seconds = arrays[TIER].values;
        fit.start = arrays[START].values;
        result = fit_program(program, &fit);
    }
    s1f_release_arrays(held, NUM_BYTE_ARRAYS);
    s1f_release_arrays(arrays, NUM_ARRAYS);
    return result;
}

PyMethodDef s1f_simulate_methods[] = {
    S1F_METHOD(
        program_simulate, VARARGS,
        "Makespan, period, span, busy and wait of each rank, start of each unit, then end and slack, path. Arrays "
        "are seconds [pass][stage][column]; latency and seconds per byte between neighbouring stages; bytes of "
        "messages, and of statistics; the tier's seconds; the optimizer's; and seconds of every unit in place "
        "of those of its pass. Whether to find slack and path. progress(units run)."),
    S1F_METHOD(fill_in, VARARGS,
               "(seconds, given): in seconds [pass][stage][column] those of the passes that are not given, bits."),
    S1F_METHOD(program_memory, VARARGS,
               "int64 [rank][units, of each holding, of receive places, total] at their peaks. The arrays are bytes of "
               "each holding, None for none, and of messages and statistics."),
    S1F_METHOD(program_changes, VARARGS,
               "int64 [unit of all ranks][holding][2]: bytes that a unit takes at its start, and frees at its end."),
    S1F_METHOD(program_fit, VARARGS,
               "A byte per cell of all stages, 0 kept, 1 recomputed, 2 moved, such that no rank holds more than its "
               "room. The second arrays are the room of ranks, the tier's seconds, and when each unit starts."),
    {NULL, NULL, 0, NULL}};
