/* program.c - conversions of lowered programs. */
#include "binding.h"
#include "records.h"

#include "../core/lower.h"
#include "../core/receives.h"

static PyObject *program_lower(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    s1f_count prefetch = {.name = "prefetch"};
    int with_receives = 0, rank = -1;
    if (!PyArg_ParseTuple(arguments, "O&O&|pi", s1f_to_schedule, &schedule, s1f_to_count, &prefetch, &with_receives,
                          &rank))
        return NULL;
    s1f_program *program = NULL;
    int is_whole = with_receives || rank == -1; /* receives are placed by the programs of all ranks */
    s1f_status status = is_whole ? s1f_schedule_lower(schedule, prefetch.value, &program)
                                 : s1f_schedule_lower_rank(schedule, prefetch.value, rank, &program);
    if (status == S1F_OK && with_receives && (status = s1f_program_add_receives(program)) != S1F_OK)
        s1f_program_free(program);
    return s1f_new_program(status, program, NULL);
}

static PyObject *program_lower_edges(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    s1f_count prefetch = {.name = "prefetch"};
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_schedule, &schedule, s1f_to_count, &prefetch))
        return NULL;
    s1f_program *program = NULL;
    s1f_status status = s1f_schedule_lower_edges(schedule, prefetch.value, &program);
    return s1f_new_program(status, program, NULL);
}

static PyObject *edge_item(const void *edges, int64_t i)
{
    const s1f_edge *edge = (const s1f_edge *)edges + i;
    return s1f_new_record(S1F_PROGRAM_EDGE, "(iiiiiiL)", edge->source_stage, edge->destination_stage, edge->source_rank,
                          edge->destination_rank, (int)edge->channel, edge->num_places, (long long)edge->num_messages);
}

static PyObject *program_edges(PyObject *Py_UNUSED(module), PyObject *handle)
{
    const s1f_program *program;
    if (!s1f_to_program(handle, &program))
        return NULL;
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
    {"program_lower", program_lower, METH_VARARGS,
     "program_lower(schedule, prefetch, with_receives=False, rank=-1): checks, lowers; a program handle. rank: "
     "that runs it, so that it has the instructions of no others but its neighbours, unless with receives; -1: "
     "of all."},
    {"program_lower_edges", program_lower_edges, METH_VARARGS,
     "program_lower_edges(schedule, prefetch): the same without instructions, for program_simulate and "
     "program_memory."},
    {"program_edges", program_edges, METH_O, "program_edges(program): a ProgramEdge per edge."},
    {"program_stage_peak", program_stage_peak, METH_VARARGS,
     "program_stage_peak(program, stage): peak (live_units, kv_slots, grad_slots)."},
    {"program_peak_tokens", program_peak_tokens, METH_VARARGS,
     "program_peak_tokens(program, stage, segment_sizes): peak live tokens."},
    {NULL, NULL, 0, NULL}};
