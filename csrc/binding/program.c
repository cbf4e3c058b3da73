/* program.c - conversions of lowered programs. */
#include "binding.h"
#include "records.h"

#include "../core/lower.h"
#include "../core/receives.h"

#include <string.h>

/* -- places -------------------------------------------------------------------------------------------------------- */

/* Seconds of every pass, and after them the latency between neighbouring stages (s1f_places). */
static int64_t count_times(const s1f_shape *shape)
{
    return s1f_num_passes * s1f_table_count(shape, S1F_PER_CELL) + s1f_table_count(shape, S1F_PER_PAIR);
}

/* The longest message of each pair takes its time on the link, and the latency. */
static int read_latencies(PyObject *links, const s1f_shape *shape, double *latencies)
{
    enum { LATENCY, BANDWIDTH, BYTES, NUM_TABLES };
    s1f_table tables[NUM_TABLES] = {{"latency", S1F_PER_PAIR, 0, NULL},
                                    {"bandwidth", S1F_PER_PAIR, 0, NULL},
                                    {"message_bytes", S1F_PER_SEGMENT, 1, NULL}};
    int is_read = 1;
    for (int i = 0; i < NUM_TABLES && is_read; i++)
        is_read = s1f_read_attribute(links, shape, &tables[i]);
    const double *latency = tables[LATENCY].values, *bandwidth = tables[BANDWIDTH].values;
    const int64_t *bytes = tables[BYTES].values;
    int64_t most = 0, num_pairs = s1f_table_count(shape, S1F_PER_PAIR);
    for (int64_t s = 0; is_read && bandwidth != NULL && s < num_pairs; s++)
        if (!(bandwidth[s] > 0)) {
            PyObject *given = PyFloat_FromDouble(bandwidth[s]);
            PyErr_Format(PyExc_ValueError, "bandwidth is %S, must be above 0", given);
            Py_XDECREF(given);
            is_read = 0;
        }
    for (int64_t i = 0; is_read && bytes != NULL && i < s1f_table_count(shape, S1F_PER_SEGMENT); i++)
        most = bytes[i] > most ? bytes[i] : most;
    for (int64_t s = 0; is_read && s < num_pairs; s++)
        latencies[s] = (latency != NULL ? latency[s] : 0) + (bandwidth != NULL ? (double)most / bandwidth[s] : 0);
    s1f_free_tables(tables, NUM_TABLES);
    return is_read;
}

static PyObject *schedule_times(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    PyObject *costs, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&O", s1f_to_schedule, &schedule, &costs))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    int64_t count = count_times(&shape), of_pass = s1f_table_count(&shape, S1F_PER_CELL);
    s1f_table passes[S1F_MAX_PASSES] = {0};
    double *times = PyMem_Calloc((size_t)count, sizeof *times);
    PyObject *links = PyObject_GetAttrString(costs, "links");
    if (times == NULL)
        PyErr_NoMemory();
    else if (links != NULL && s1f_read_pass_seconds(costs, &shape, passes) &&
             read_latencies(links, &shape, times + s1f_num_passes * of_pass)) {
        for (int pass = 0; pass < s1f_num_passes; pass++)
            memcpy(times + pass * of_pass, passes[pass].values, (size_t)of_pass * sizeof *times);
        result = PyBytes_FromStringAndSize((const char *)times, (Py_ssize_t)count * (Py_ssize_t)sizeof *times);
    }
    Py_XDECREF(links);
    s1f_free_tables(passes, s1f_num_passes);
    PyMem_Free(times);
    return result;
}

/* From an int, or None: by time, with what schedule_times has made or None. The bytes are borrowed. */
static int read_places(const s1f_schedule *schedule, PyObject *prefetch, PyObject *times, s1f_places *places)
{
    s1f_count count = {.name = "prefetch"};
    s1f_shape shape = s1f_schedule_shape(schedule);
    char *bytes;
    Py_ssize_t num_bytes;
    *places = (s1f_places){.by_time = prefetch == Py_None};
    if (!places->by_time) {
        int is_read = s1f_to_count(prefetch, &count);
        places->prefetch = count.value;
        return is_read;
    }
    if (times == Py_None)
        return 1;
    if (PyBytes_AsStringAndSize(times, &bytes, &num_bytes) != 0 ||
        !s1f_require_count("the bytes of times", num_bytes, count_times(&shape) * (int64_t)sizeof(double)))
        return 0;
    places->seconds = (const double *)(const void *)bytes; /* malloc's alignment, behind a header of pointers */
    places->latency = places->seconds + s1f_num_passes * s1f_table_count(&shape, S1F_PER_CELL);
    return 1;
}

static PyObject *program_lower(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    PyObject *prefetch, *times = Py_None;
    s1f_places places;
    int with_receives = 0, rank = -1;
    if (!PyArg_ParseTuple(arguments, "O&O|piO", s1f_to_schedule, &schedule, &prefetch, &with_receives, &rank, &times) ||
        !read_places(schedule, prefetch, times, &places))
        return NULL;
    s1f_program *program = NULL;
    int is_whole = with_receives || rank == -1; /* receives are placed by the programs of all ranks */
    s1f_status status = is_whole ? s1f_schedule_lower(schedule, places, &program)
                                 : s1f_schedule_lower_rank(schedule, places, rank, &program);
    if (status == S1F_OK && with_receives && (status = s1f_program_add_receives(program)) != S1F_OK)
        s1f_program_free(program);
    return s1f_new_program(status, program, NULL);
}

static PyObject *program_lower_edges(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    PyObject *prefetch, *times = Py_None;
    s1f_places places;
    if (!PyArg_ParseTuple(arguments, "O&O|O", s1f_to_schedule, &schedule, &prefetch, &times) ||
        !read_places(schedule, prefetch, times, &places))
        return NULL;
    s1f_program *program = NULL;
    s1f_status status = s1f_schedule_lower_edges(schedule, places, &program);
    return s1f_new_program(status, program, NULL);
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

static PyObject *program_stage_peak(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    int stage;
    if (!PyArg_ParseTuple(arguments, "O&i", s1f_to_program, &program, &stage) ||
        !s1f_require_index("stage", stage, s1f_program_num_stages(program)))
        return NULL;
    s1f_stage_peak peak = s1f_program_stage_peak(program, stage);
    return Py_BuildValue("(iii)", peak.live_units, peak.kv_slots, peak.grad_slots);
}

/* Sizes whose sums cannot overflow: at least 0, and all micro-batches of them within int64. 0 with the exception
 * set. */
static int check_sizes(const s1f_program *program, const s1f_int64s *sizes)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < sizes->count; i++) {
        if (sizes->values[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s hold %lld, must be at least 0", sizes->name,
                         (long long)sizes->values[i]);
            return 0;
        }
        if (sizes->values[i] >
            INT64_MAX / s1f_program_num_microbatches(program) - sum) { /* more than enough for rows */
            PyErr_Format(PyExc_ValueError, "%s of all micro-batches sum to more than %lld", sizes->name,
                         (long long)INT64_MAX);
            return 0;
        }
        sum += sizes->values[i];
    }
    return 1;
}

static PyObject *program_peak_tokens(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    s1f_int64s sizes = {.name = "segment_sizes"};
    int stage;
    if (!PyArg_ParseTuple(arguments, "O&iO&", s1f_to_program, &program, &stage, s1f_to_int64s, &sizes))
        return NULL;
    PyObject *tokens = NULL;
    if (s1f_require_index("stage", stage, s1f_program_num_stages(program)) &&
        s1f_require_count(sizes.name, sizes.count, s1f_program_num_columns(program)) && check_sizes(program, &sizes))
        tokens = PyLong_FromLongLong(s1f_program_peak_tokens(program, stage, sizes.values));
    PyMem_Free(sizes.values);
    return tokens;
}

PyMethodDef s1f_program_methods[] = {
    S1F_METHOD(schedule_times, VARARGS, "Bytes of the seconds of a seq1f1b.Costs, by which places are counted."),
    S1F_METHOD(program_lower, VARARGS,
               "Checks, lowers; a program handle. prefetch: places beyond those that are needed; None: by time, of "
               "schedule_times or of unit times. rank: that runs it, so that it has the instructions of no others "
               "but its neighbours, unless with receives; -1: of all."),
    S1F_METHOD(program_lower_edges, VARARGS, "The same without instructions, for program_simulate and program_memory."),
    S1F_METHOD(program_edges, O, "A ProgramEdge per edge."),
    S1F_METHOD(program_stage_peak, VARARGS, "Peak (live_units, kv_slots, grad_slots)."),
    S1F_METHOD(program_peak_tokens, VARARGS, "Peak live tokens."),
    {NULL, NULL, 0, NULL}};
