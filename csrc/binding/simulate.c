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

static PyObject *times_of(const s1f_program *program, const s1f_simulation *simulation)
{
    int32_t P = simulation->num_ranks, num_kept = simulation->slack == NULL ? 2 : 3;
    return Py_BuildValue("(ddNNNNN)", simulation->makespan, simulation->period, doubles_of(simulation->span, P),
                         doubles_of(simulation->busy, P), doubles_of(simulation->wait, P),
                         doubles_of(simulation->times, num_kept * s1f_program_num_units(program)),
                         s1f_tuple_of(simulation->path_length, path_unit, simulation->path));
}

/* Whether an array that may be None holds as many values as it must. */
static int may_hold(const char *name, const void *values, int64_t count, int64_t wanted)
{
    return values == NULL || s1f_require_count(name, count, wanted);
}

S1F_METHOD(PyObject *, program_simulate, s1f_program *, program, s1f_doubles, seconds, s1f_int64s, messages,
           s1f_doubles, tier, s1f_doubles, durations, s1f_doubles, jitters, uint64_t, seed, bool, fills, int32_t,
           num_steps, bool, optimizer_sync, bool, critical)
{
    const s1f_shape *shape = &program->shape;
    int64_t cells = s1f_table_count(shape, S1F_PER_CELL), pairs = s1f_table_count(shape, S1F_PER_PAIR);
    int64_t columns = s1f_num_columns(shape), of_passes = s1f_num_passes * cells;
    if (!s1f_require_count("seconds", seconds.count, of_passes + 2 * pairs + shape->num_ranks + 1) ||
        !s1f_require_count("bytes of messages", messages.count, 2 * columns) ||
        !may_hold("tier", tier.values, tier.count, cells) ||
        !may_hold("durations", durations.values, durations.count, s1f_program_num_units(program)) ||
        !s1f_require_count("jitters", jitters.count, 2))
        return NULL;
    const double *of_links = seconds.values + of_passes, *of_ranks = of_links + 2 * pairs;
    s1f_costs costs = {.unit_seconds = durations.values,
                       .latency = of_links,
                       .seconds_per_byte = of_links + pairs,
                       .message_bytes = messages.values,
                       .statistics_bytes = messages.values + columns,
                       .send = of_ranks[shape->num_ranks],
                       .tier_seconds = tier.values,
                       .jitter = jitters.values[0],
                       .transfer_jitter = jitters.values[1],
                       .seed = seed,
                       .fills = fills,
                       .num_steps = num_steps,
                       .optimizer_sync = optimizer_sync,
                       .optimizer = of_ranks};
    for (int pass = 0; pass < s1f_num_passes; pass++)
        costs.pass_seconds[pass] = seconds.values + pass * cells;
    s1f_simulation *simulation = NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_program_simulate(program, &costs, critical, &simulation);
    if (status == S1F_OK && critical)
        status = s1f_simulation_find_slack(program, &costs, simulation);
    Py_END_ALLOW_THREADS
    PyObject *result = status == S1F_OK ? times_of(program, simulation) : s1f_raise(status);
    s1f_simulation_free(simulation);
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

/* The table of `count` values that come next, NULL where all are 0. */
static const int64_t *next_table(const int64_t **next, int64_t count)
{
    const int64_t *table = *next;
    *next += count;
    while (count > 0 && table[count - 1] == 0)
        count--;
    return count > 0 ? table : NULL;
}

/* Tables of each holding, of messages, and of messages of statistics. */
static int read_bytes(s1f_int64s held, const s1f_shape *shape, s1f_memory_bytes *bytes)
{
    int64_t counts[S1F_NUM_HOLDINGS], total = 2 * s1f_num_columns(shape);
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++)
        total += counts[h] = s1f_table_count(shape, s1f_facts_of_holding((s1f_holding)h).per);
    if (!s1f_require_count("held bytes", held.count, total))
        return 0;
    const int64_t *next = held.values;
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++)
        bytes->of[h] = next_table(&next, counts[h]);
    bytes->message = next_table(&next, s1f_num_columns(shape));
    bytes->statistics = next_table(&next, s1f_num_columns(shape));
    return 1;
}

S1F_METHOD(PyObject *, program_memory, s1f_program *, program, s1f_int64s, held)
{
    s1f_memory_bytes bytes;
    if (!read_bytes(held, &program->shape, &bytes))
        return NULL;
    int64_t size = program->shape.num_ranks * (int64_t)sizeof(s1f_memory_peak);
    s1f_memory_peak *peaks = PyMem_Malloc((size_t)size);
    if (peaks == NULL)
        return PyErr_NoMemory();
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_program_memory(program, &bytes, peaks));
    PyObject *result = status == S1F_OK ? s1f_view_of(peaks, size, "q") : s1f_raise(status);
    PyMem_Free(peaks);
    return result;
}

/* Bytes that single units take and free, for curves. */
S1F_METHOD(PyObject *, program_changes, s1f_program *, program, s1f_int64s, held)
{
    s1f_memory_bytes bytes;
    if (!read_bytes(held, &program->shape, &bytes))
        return NULL;
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    s1f_byte_tables places = s1f_byte_tables_of(&program->shape, &bytes);
    int64_t size = s1f_program_num_units(program) * S1F_NUM_HOLDINGS * 2 * (int64_t)sizeof(int64_t);
    int64_t *changes = PyMem_Malloc((size_t)size), *next = changes;
    if (changes == NULL)
        return PyErr_NoMemory();
    for (int32_t rank = 0; rank < program->shape.num_ranks; rank++)
        for (int64_t i = 0; i < program->ranks[rank].num_units * S1F_NUM_HOLDINGS; i++) {
            s1f_unit unit = program->ranks[rank].units[i / S1F_NUM_HOLDINGS];
            s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
            uint32_t holding = 1u << (i % S1F_NUM_HOLDINGS);
            *next++ = s1f_changed_bytes(&places, lifetimes.takes & holding, unit, 1);
            *next++ = s1f_changed_bytes(&places, lifetimes.frees & holding, unit, 0);
        }
    PyObject *result = s1f_view_of(changes, size, "q");
    PyMem_Free(changes);
    return result;
}

S1F_METHOD(PyObject *, program_fit, s1f_program *, program, s1f_int64s, held, s1f_int64s, room, s1f_doubles,
           tier_seconds, s1f_doubles, starts, s1f_int64s, tier_room, bool, recomputes, bool, moves)
{
    const s1f_shape *shape = &program->shape;
    s1f_memory_bytes bytes;
    if (!read_bytes(held, shape, &bytes) || !s1f_require_count("room", room.count, shape->num_ranks) ||
        !s1f_require_count("tier", tier_seconds.count, s1f_table_count(shape, S1F_PER_CELL)) ||
        !may_hold("starts", starts.values, starts.count, s1f_program_num_units(program)) ||
        !may_hold("tier_room", tier_room.values, tier_room.count, shape->num_ranks))
        return NULL;
    s1f_fit fit = {.bytes = &bytes,
                   .room = room.values,
                   .tier_seconds = tier_seconds.values,
                   .start = starts.values,
                   .tier_room = tier_room.values,
                   .recomputes = recomputes,
                   .moves = moves};
    PyObject *cells = PyBytes_FromStringAndSize(NULL, shape->num_stages * s1f_num_cells(shape));
    if (cells == NULL)
        return NULL;
    unsigned char *kinds = (unsigned char *)PyBytes_AsString(cells);
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_program_fit(program, &fit, kinds));
    if (status == S1F_OK)
        return cells;
    Py_DECREF(cells);
    return s1f_raise(status);
}

PyMethodDef s1f_simulate_methods[] = {
    S1F_ROW(program_simulate,
            "-> tuple[float, float, memoryview[float], memoryview[float], memoryview[float], memoryview[float], "
            "tuple[tuple[int, int], ...]]: makespan, period, span, busy and wait of each rank, start of each unit, "
            "then end and slack, path. seconds: [pass][stage][column], latency and seconds per byte between "
            "neighbouring stages, the optimizer's of each rank, of a send. messages: bytes of messages, and of "
            "statistics. durations: seconds of every unit in place of those of its pass. jitters: of units and "
            "messages. critical: finds slack and path."),
    S1F_ROW(fill_in, "In seconds [pass][stage][column] those of the passes that are not given, bits."),
    S1F_ROW(program_memory,
            "-> memoryview[int]: int64 [rank][units, of each holding, of receive places, total] at their peaks. held: "
            "tables of bytes of each holding, of messages and statistics, one after the other."),
    S1F_ROW(program_changes,
            "-> memoryview[int]: int64 [unit of all ranks][holding][2]: bytes that a unit takes at its start, and "
            "frees at its end."),
    S1F_ROW(program_fit,
            "-> bytes: one per cell of all stages, 0 kept, 1 recomputed, 2 moved, such that no rank holds more than "
            "its room, and its tier no more than tier_room. starts: of each unit, where both ways are open."),
    {NULL, NULL, 0, NULL}};
