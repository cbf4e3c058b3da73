/* program.c - conversions of lowered programs. */
#include "records.h"

#include "../core/lower.h"
#include "../core/receives.h"

/* -- places -------------------------------------------------------------------------------------------------------- */

/* From an int, or None: by time, with an array of seconds [pass][stage][column] and after them the latency between
 * neighbouring stages, or None. */
static int read_places(const s1f_schedule *schedule, PyObject *prefetch, const s1f_array *times, s1f_places *places)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t num_seconds = s1f_num_passes * s1f_table_count(&shape, S1F_PER_CELL);
    *places = (s1f_places){.by_time = prefetch == Py_None};
    if (!places->by_time) {
        places->prefetch = (int32_t)PyLong_AsLong(prefetch);
        return !PyErr_Occurred();
    }
    if (times->values == NULL)
        return 1;
    places->seconds = times->values;
    places->latency = places->seconds + num_seconds;
    return s1f_require_count(times->name, times->count, num_seconds + s1f_table_count(&shape, S1F_PER_PAIR));
}

static PyObject *program_lower(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    PyObject *handle, *prefetch;
    s1f_array times = {.name = "seconds"};
    s1f_places places;
    int with_receives = 0, rank = S1F_ALL_RANKS;
    if (!PyArg_ParseTuple(arguments, "OO|piO&", &handle, &prefetch, &with_receives, &rank, s1f_to_array, &times))
        return NULL;
    s1f_program *program = NULL;
    s1f_status status = s1f_to_schedule(handle, &schedule) && read_places(schedule, prefetch, &times, &places)
                            ? S1F_OK
                            : S1F_ERR_PYTHON;
    if (status == S1F_OK) /* receives are placed by the programs of all ranks */
        status = s1f_schedule_lower(schedule, places, with_receives ? S1F_ALL_RANKS : rank, &program);
    if (status == S1F_OK && with_receives && (status = s1f_program_add_receives(program)) != S1F_OK)
        s1f_program_free(program);
    s1f_release_arrays(&times, 1);
    return s1f_new_program(status, program, handle);
}

/* -- what a program tells ------------------------------------------------------------------------------------------ */

static PyObject *edge_item(const void *edges, int64_t i)
{
    const s1f_edge *edge = (const s1f_edge *)edges + i;
    return s1f_new_record(S1F_PROGRAM_EDGE, "(iiiiiiL)", edge->source_stage, edge->destination_stage, edge->source_rank,
                          edge->destination_rank, (int)edge->channel, edge->num_places, (long long)edge->num_messages);
}

S1F_METHOD_OF(program_edges, program, program)
{
    int32_t count;
    const s1f_edge *edges = s1f_program_edges(program, &count);
    return s1f_list_of(count, edge_item, edges);
}

S1F_METHOD_OF_NUMBER(program_stage_peak, program, program, stage)
{
    if (!s1f_require_index("stage", stage, program->shape.num_stages))
        return NULL;
    s1f_stage_peak peak = program->peaks[stage];
    return Py_BuildValue("(iii)", peak.live_units, peak.kv_slots, peak.grad_slots);
}

PyMethodDef s1f_program_methods[] = {
    S1F_METHOD(program_lower, VARARGS,
               "Checks, lowers; a program handle. prefetch: places beyond those that are needed; None: by time, of "
               "these seconds [pass][stage][column] and latencies, or of unit times. rank: that runs it, so that it "
               "has the instructions of no others, unless with receives; ALL_RANKS; or NO_RANK, for program_simulate "
               "and program_memory."),
    S1F_METHOD(program_edges, O, "A ProgramEdge per edge."),
    S1F_METHOD(program_stage_peak, VARARGS, "Peak (live_units, kv_slots, grad_slots)."),
    {NULL, NULL, 0, NULL}};
