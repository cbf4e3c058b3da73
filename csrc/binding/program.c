/* program.c - conversions of lowered programs. */
#include "binding.h"

#include "../core/lower.h"
#include "../core/receives.h"

/* -- places -------------------------------------------------------------------------------------------------------- */

/* From an int, or None: by time, with an array of seconds [pass][stage][column] and after them the latency between
 * neighbouring stages, or None. */
static int read_places(const s1f_schedule *schedule, PyObject *prefetch, s1f_doubles seconds, s1f_places *places)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t num_seconds = s1f_num_passes * s1f_table_count(&shape, S1F_PER_CELL);
    *places = (s1f_places){.by_time = prefetch == Py_None};
    if (!places->by_time)
        return s1f_to_int32(prefetch, "prefetch", &places->prefetch);
    if (seconds.values == NULL)
        return 1;
    places->seconds = seconds.values;
    places->latency = places->seconds + num_seconds;
    return s1f_require_count("seconds", seconds.count, num_seconds + s1f_table_count(&shape, S1F_PER_PAIR));
}

S1F_METHOD(PyObject *, program_lower, s1f_schedule *, schedule, PyObject *, prefetch, bool, with_receives, PyObject *,
           rank, s1f_doubles, seconds)
{
    s1f_places places;
    int32_t number = S1F_ALL_RANKS;
    if (!read_places(schedule, prefetch, seconds, &places) || (rank != Py_None && !s1f_to_int32(rank, "rank", &number)))
        return NULL;
    s1f_program *program = NULL; /* receives are placed by the programs of all ranks */
    s1f_status status = s1f_schedule_lower(schedule, places, with_receives ? S1F_ALL_RANKS : number, &program);
    if (status == S1F_OK && with_receives && (status = s1f_program_add_receives(program)) != S1F_OK)
        s1f_program_free(program);
    return s1f_new_program(status, program, PyTuple_GetItem(arguments, 0));
}

/* -- what a program tells ------------------------------------------------------------------------------------------ */

static PyObject *edge_item(const void *edges, int64_t i)
{
    const s1f_edge *edge = (const s1f_edge *)edges + i;
    return Py_BuildValue("(iiiiiiL)", edge->source_stage, edge->destination_stage, edge->source_rank,
                         edge->destination_rank, (int)edge->channel, edge->num_places, (long long)edge->num_messages);
}

S1F_METHOD(PyObject *, program_edges, s1f_program *, program)
{
    int32_t count;
    const s1f_edge *edges = s1f_program_edges(program, &count);
    return s1f_list_of(count, edge_item, edges);
}

S1F_METHOD(PyObject *, program_stage_peak, s1f_program *, program, int32_t, stage)
{
    if (!s1f_require_index("stage", stage, program->shape.num_stages))
        return NULL;
    s1f_stage_peak peak = program->peaks[stage];
    return Py_BuildValue("(iii)", peak.live_units, peak.kv_slots, peak.grad_slots);
}

PyMethodDef s1f_program_methods[] = {
    S1F_ROW(program_lower,
            "Checks, lowers; a program handle. prefetch: places beyond those that are needed; None: by time, of these "
            "seconds [pass][stage][column] and latencies, or of unit times. rank: that runs it, so that it has the "
            "instructions of no others, unless with receives; None: of all; NO_RANK: for "
            "program_simulate and program_memory."),
    S1F_ROW(program_edges,
            "-> list[tuple[int, int, int, int, int, int, int]]: stages and ranks of source and destination, channel, "
            "places, messages of each edge."),
    S1F_ROW(program_stage_peak, "-> tuple[int, int, int]: live units, KV slots and gradient slots at their peaks."),
    {NULL, NULL, 0, NULL}};
