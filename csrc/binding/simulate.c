/* simulate.c - conversions for simulations: times, memory, what fits. Arrays go out as bytes. */
#include "binding.h"

#include "../model/critical.h"
#include "../model/fit.h"
#include "../model/memory.h"

/* -- times --------------------------------------------------------------------------------------------------------- */

static PyObject *doubles_of(const double *values, int64_t count)
{
    return s1f_view_of(values, count * (int64_t)sizeof *values, "d");
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
    return Py_BuildValue("(ddNNNNN)", simulation->makespan, simulation->period, doubles_of(simulation->span, P),
                         doubles_of(simulation->busy, P), doubles_of(simulation->wait, P),
                         doubles_of(simulation->times, num_kept * count_units(program)),
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

enum { SECONDS, LATENCY, PER_BYTE, MESSAGE, STATISTICS_MESSAGE, TIER, OPTIMIZER, UNITS, NUM_COST_ARRAYS };

S1F_METHOD(PyObject *, program_simulate, s1f_program *, program, PyObject *, given, double, send, s1f_doubles, jitters,
           uint64_t, seed, bool, fills, int32_t, num_steps, bool, optimizer_sync, bool, critical, PyObject *, progress)
{
    if (!s1f_require_count("jitters", jitters.count, 2))
        return NULL;
    s1f_costs costs = {.send = send,
                       .jitter = jitters.values[0],
                       .transfer_jitter = jitters.values[1],
                       .seed = seed,
                       .fills = fills,
                       .num_steps = num_steps,
                       .optimizer_sync = optimizer_sync,
                       .progress = report_progress,
                       .progress_context = progress};
    int64_t cells = s1f_table_count(&program->shape, S1F_PER_CELL), columns = s1f_num_columns(&program->shape),
            pairs = s1f_table_count(&program->shape, S1F_PER_PAIR);
    s1f_array arrays[NUM_COST_ARRAYS] = {
        [SECONDS] = {.name = "seconds", .wanted = s1f_num_passes * cells},
        [LATENCY] = {.name = "latency", .wanted = pairs},
        [PER_BYTE] = {.name = "seconds per byte", .wanted = pairs},
        [MESSAGE] = {.name = "message_bytes", .wanted = columns},
        [STATISTICS_MESSAGE] = {.name = "statistics_bytes", .wanted = columns},
        [TIER] = {.name = "tier", .wanted = cells},
        [OPTIMIZER] = {.name = "optimizer", .wanted = program->shape.num_ranks},
        [UNITS] = {.name = "durations", .wanted = count_units(program)},
    };
    int is_read = s1f_read_arrays(given, arrays, NUM_COST_ARRAYS);
    for (int pass = 0; pass < s1f_num_passes && arrays[SECONDS].values != NULL; pass++)
        costs.pass_seconds[pass] = (const double *)arrays[SECONDS].values + pass * cells;
    costs.unit_seconds = arrays[UNITS].values;
    costs.latency = arrays[LATENCY].values;
    costs.seconds_per_byte = arrays[PER_BYTE].values;
    costs.message_bytes = arrays[MESSAGE].values;
    costs.statistics_bytes = arrays[STATISTICS_MESSAGE].values;
    costs.tier_seconds = arrays[TIER].values;
    costs.optimizer = arrays[OPTIMIZER].values;
    PyObject *result = is_read ? simulate(program, &costs, critical) : NULL;
    s1f_release_arrays(arrays, NUM_COST_ARRAYS);
    return result;
}

/* Completes the seconds of all passes in place. */
S1F_METHOD(s1f_status, fill_in, s1f_doubles, seconds, int64_t, given)
{
    double *passes[S1F_MAX_PASSES];
    int64_t count = seconds.count / s1f_num_passes;
    for (int pass = 0; pass < s1f_num_passes; pass++)
        passes[pass] = (double *)(uintptr_t)seconds.values + pass * count;
    return s1f_table_fill_in(passes, (uint32_t)given, count);
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

S1F_METHOD(PyObject *, program_memory, s1f_program *, program, PyObject *, held)
{
    s1f_array arrays[NUM_BYTE_ARRAYS];
    s1f_memory_bytes bytes;
    int64_t size = program->shape.num_ranks * (int64_t)sizeof(s1f_memory_peak);
    s1f_memory_peak *peaks = PyMem_Malloc((size_t)size);
    PyObject *result = NULL;
    s1f_status status = S1F_ERR_PYTHON;
    if (peaks == NULL)
        PyErr_NoMemory();
    if (read_bytes(held, &program->shape, arrays, &bytes) && peaks != NULL) {
        S1F_WITHOUT_GIL(status = s1f_program_memory(program, &bytes, peaks));
        result = status == S1F_OK ? s1f_view_of(peaks, size, "q") : s1f_raise(status);
    }
    s1f_release_arrays(arrays, NUM_BYTE_ARRAYS);
    PyMem_Free(peaks);
    return result;
}

/* Bytes that single units take and free, for curves. */
S1F_METHOD(PyObject *, program_changes, s1f_program *, program, PyObject *, held)
{
    s1f_array arrays[NUM_BYTE_ARRAYS];
    s1f_memory_bytes bytes;
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    int64_t size = count_units(program) * S1F_NUM_HOLDINGS * 2 * (int64_t)sizeof(int64_t);
    int64_t *changes = PyMem_Malloc((size_t)size), *next = changes;
    PyObject *result = NULL;
    if (changes == NULL)
        PyErr_NoMemory();
    if (read_bytes(held, &program->shape, arrays, &bytes) && changes != NULL) {
        s1f_byte_tables places = s1f_byte_tables_of(&program->shape, &bytes);
        for (int32_t rank = 0; rank < program->shape.num_ranks; rank++)
            for (int64_t i = 0; i < program->ranks[rank].num_units * S1F_NUM_HOLDINGS; i++) {
                s1f_unit unit = program->ranks[rank].units[i / S1F_NUM_HOLDINGS];
                s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
                uint32_t holding = 1u << (i % S1F_NUM_HOLDINGS);
                *next++ = s1f_taken_bytes(&places, lifetimes.takes & holding, unit);
                *next++ = s1f_freed_bytes(&places, lifetimes.frees & holding, unit);
            }
        result = s1f_view_of(changes, size, "q");
    }
    s1f_release_arrays(arrays, NUM_BYTE_ARRAYS);
    PyMem_Free(changes);
    return result;
}

S1F_METHOD(PyObject *, program_fit, s1f_program *, program, PyObject *, held, s1f_int64s, room, s1f_doubles,
           tier_seconds, s1f_doubles, starts, s1f_int64s, tier_room, bool, recomputes, bool, moves)
{
    const s1f_shape *shape = &program->shape;
    if (!s1f_require_count("room", room.count, shape->num_ranks) ||
        !s1f_require_count("tier", tier_seconds.count, s1f_table_count(shape, S1F_PER_CELL)) ||
        (starts.values != NULL && !s1f_require_count("starts", starts.count, count_units(program))) ||
        (tier_room.values != NULL && !s1f_require_count("tier_room", tier_room.count, shape->num_ranks)))
        return NULL;
    s1f_array arrays[NUM_BYTE_ARRAYS];
    s1f_memory_bytes bytes;
    s1f_fit fit = {.bytes = &bytes,
                   .room = room.values,
                   .tier_seconds = tier_seconds.values,
                   .start = starts.values,
                   .tier_room = tier_room.values,
                   .recomputes = recomputes,
                   .moves = moves};
    PyObject *cells = PyBytes_FromStringAndSize(NULL, shape->num_stages * s1f_num_cells(shape));
    unsigned char *kinds = cells == NULL ? NULL : (unsigned char *)PyBytes_AsString(cells);
    s1f_status status = S1F_ERR_PYTHON;
    if (read_bytes(held, shape, arrays, &bytes) && kinds != NULL)
        S1F_WITHOUT_GIL(status = s1f_program_fit(program, &fit, kinds));
    s1f_release_arrays(arrays, NUM_BYTE_ARRAYS);
    if (status == S1F_OK)
        return cells;
    Py_XDECREF(cells);
    return s1f_raise(status);
}

PyMethodDef s1f_simulate_methods[] = {
    S1F_ROW(program_simulate,
            "-> tuple[float, float, memoryview[float], memoryview[float], memoryview[float], memoryview[float], "
            "tuple[tuple[int, int], ...]]: makespan, period, span, busy and wait of each rank, start of each unit, "
            "then end and slack, path. Given are seconds [pass][stage][column]; latency and seconds per byte between "
            "neighbouring stages; bytes of messages, and of statistics; the tier's seconds; the optimizer's; and "
            "seconds of every unit in place of those of its pass. jitters: of units and messages. critical: finds "
            "slack and path. progress(units run)."),
    S1F_ROW(fill_in, "In seconds [pass][stage][column] those of the passes that are not given, bits."),
    S1F_ROW(program_memory,
            "-> memoryview[int]: int64 [rank][units, of each holding, of receive places, total] at their peaks. Held "
            "are bytes of each holding, None for none, and of messages and statistics."),
    S1F_ROW(program_changes,
            "-> memoryview[int]: int64 [unit of all ranks][holding][2]: bytes that a unit takes at its start, and "
            "frees at its end."),
    S1F_ROW(program_fit,
            "-> bytes: one per cell of all stages, 0 kept, 1 recomputed, 2 moved, such that no rank holds more than "
            "its room, and its tier no more than tier_room. starts: of each unit, where both ways are open."),
    {NULL, NULL, 0, NULL}};
