/* executor.c - conversions for the executor: compute is Python, the walk is not.
 *
 * The walk holds no GIL; each callback takes it and gives it back. */
#include "messages.h"

#include "../device/device.h"

#include <stdlib.h>
#include <string.h>

typedef struct s1f_walker {
    s1f_executor *executor;
    PyObject *arguments; /* keep objects that the executor and the next fields borrow */
    const s1f_program *program;
    s1f_group *group;
    s1f_device *device;  /* the GPU on which units compute, NULL: none */
    PyObject *tier;      /* where saved state of moved units goes; may be None */
    int64_t device_step; /* the GPU's count of steps when the last step began */
    int32_t is_settled;  /* the last step's times are the GPU's */
    s1f_messages messages;
    /* during a step: */
    PyThreadState *thread;
    PyObject *run, *fill, *segment_sizes; /* borrowed */
} s1f_walker;

void s1f_walker_free(s1f_walker *walker)
{
    PyGILState_STATE state = PyGILState_Ensure();
    s1f_messages_free(&walker->messages);
    s1f_executor_free(walker->executor);
    Py_XDECREF(walker->arguments);
    PyGILState_Release(state);
    free(walker);
}

/* -- callbacks: called without the GIL ----------------------------------------------------------------------------- */

static s1f_status run_with_gil(s1f_walker *walker, const s1f_current_unit *current, const s1f_input *inputs,
                               int32_t num_inputs, int32_t num_sends, s1f_result *result)
{
    s1f_unit unit = current->unit;
    PyObject *messages = s1f_messages_received(&walker->messages, inputs, num_inputs);
    if (messages == NULL)
        return S1F_ERR_PYTHON;
    PyObject *tensors = PyObject_CallFunction(walker->run, "iiLN", (int)unit.pass, (int)unit.stage,
                                              (long long)s1f_cell(&walker->program->shape, unit), messages);
    if (tensors == NULL)
        return S1F_ERR_PYTHON;
    s1f_status status = num_sends == 0 ? S1F_OK : s1f_messages_describe(&walker->messages, tensors, result);
    if (status != S1F_OK || num_sends == 0)
        Py_DECREF(tensors);
    for (int32_t i = 1; status == S1F_OK && i < num_sends; i++)
        Py_INCREF(tensors); /* one per release */
    return status;
}

static s1f_status run_callback(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                               int32_t num_sends, s1f_result *result)
{
    s1f_walker *walker = context;
    if (walker->device != NULL)
        S1F_TRY(s1f_device_begin_unit(walker->device));
    PyEval_RestoreThread(walker->thread);
    s1f_status status = run_with_gil(walker, unit, inputs, num_inputs, num_sends, result);
    walker->thread = PyEval_SaveThread();
    return status == S1F_OK && walker->device != NULL ? s1f_device_end_unit(walker->device) : status;
}

static s1f_status fill_callback(void *context, s1f_unit unit, int32_t *is_left)
{
    s1f_walker *walker = context;
    PyEval_RestoreThread(walker->thread);
    PyObject *answer =
        PyObject_CallFunction(walker->fill, "iL", (int)unit.stage, (long long)s1f_cell(&walker->program->shape, unit));
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    walker->thread = PyEval_SaveThread();
    *is_left = is_true > 0;
    return is_true < 0 ? S1F_ERR_PYTHON : S1F_OK;
}

static s1f_status back_callback(void *context, int64_t cell)
{
    s1f_walker *walker = context;
    PyEval_RestoreThread(walker->thread);
    PyObject *answer = PyObject_CallMethod(walker->tier, "wait", "L", (long long)cell);
    Py_XDECREF(answer);
    walker->thread = PyEval_SaveThread();
    return answer == NULL ? S1F_ERR_PYTHON : S1F_OK;
}

static s1f_status leave_callback(void *context, int32_t edge, int32_t place)
{
    s1f_walker *walker = context;
    if (!s1f_messages_has_views(&walker->messages, edge, place))
        return S1F_OK;
    PyEval_RestoreThread(walker->thread);
    s1f_status status = s1f_messages_leave(&walker->messages, edge, place);
    walker->thread = PyEval_SaveThread();
    return status;
}

static s1f_status times_callback(void *context, int64_t number, int64_t *start_ns, int64_t *end_ns)
{
    s1f_walker *walker = context;
    if (number >= walker->device->num_units)
        return s1f_fail(S1F_ERR_STATE, "the GPU has run %lld units of the step", (long long)walker->device->num_units);
    const s1f_device_unit *unit = &walker->device->units[number];
    s1f_status status = s1f_device_time_of(walker->device, unit->start, start_ns);
    return status == S1F_OK ? s1f_device_time_of(walker->device, unit->end, end_ns) : status;
}

static s1f_status back_time_callback(void *context, int64_t cell, int64_t *ns)
{
    const s1f_walker *walker = context;
    if (walker->tier == Py_None)
        return S1F_OK;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *answer = PyObject_CallMethod(walker->tier, "came_back", "L", (long long)cell);
    void *event = answer == NULL ? NULL : PyLong_AsVoidPtr(answer);
    s1f_status status = PyErr_Occurred() ? S1F_ERR_PYTHON : S1F_OK;
    Py_XDECREF(answer);
    PyGILState_Release(state);
    return event == NULL || status != S1F_OK ? status : s1f_device_time_of(walker->device, event, ns);
}

static void release_callback(void *context, void *keep)
{
    s1f_walker *walker = context;
    PyEval_RestoreThread(walker->thread);
    Py_XDECREF((PyObject *)keep);
    walker->thread = PyEval_SaveThread();
}

static int check_sizes(const s1f_walker *walker, s1f_int64s sizes)
{
    return s1f_require_count("segment sizes", sizes.count, s1f_num_columns(&walker->program->shape));
}

static s1f_status sizes_callback(void *context, int64_t sequence_length, int64_t *sizes)
{
    s1f_walker *walker = context;
    s1f_int64s given = {0};
    PyEval_RestoreThread(walker->thread);
    PyObject *array = PyObject_CallFunction(walker->segment_sizes, "L", (long long)sequence_length);
    int is_read = array != NULL && s1f_to_int64s(array, "segment sizes", &given) && check_sizes(walker, given);
    if (is_read)
        memcpy(sizes, given.values, (size_t)given.count * sizeof *sizes);
    PyBuffer_Release(&given.view);
    Py_XDECREF(array);
    walker->thread = PyEval_SaveThread();
    return is_read ? S1F_OK : S1F_ERR_PYTHON;
}

/* -- the module's functions -------------------------------------------------------------------------------------- */

/* 0 with the exception set. */
static int read_ends(PyObject *ends, s1f_edge_end **pointers)
{
    for (Py_ssize_t i = 0; i < PyList_Size(ends); i++) {
        PyObject *end = PyList_GetItem(ends, i);
        if (end != Py_None && !s1f_to_edge_end(end, "ends", &pointers[i]))
            return 0;
    }
    return 1;
}

S1F_METHOD(PyObject *, executor_create, s1f_program *, program, int32_t, rank, s1f_group *, group, s1f_kv_cache *,
           cache, PyObject *, ends, bool, thread_scope, PyObject *, dtype_codes, bool, fills, PyObject *, leave,
           PyObject *, gpu, PyObject *, tier)
{
    s1f_walker *walker = calloc(1, sizeof *walker);
    if (walker == NULL)
        return PyErr_NoMemory();
    s1f_messages *messages = &walker->messages;
    *walker = (s1f_walker){.arguments = Py_NewRef(arguments),
                           .program = program,
                           .group = group,
                           .tier = tier,
                           .messages = {.ends = ends, .dtype_codes = dtype_codes, .leave = leave}};
    messages->edges = s1f_program_edges(program, &messages->num_edges);
    s1f_edge_end **pointers = s1f_pool_take(&messages->pool, (size_t)messages->num_edges, sizeof *pointers);
    s1f_compute compute = {.context = walker,
                           .run = run_callback,
                           .release = release_callback,
                           .fill = fills ? fill_callback : NULL,
                           .segment_sizes = sizes_callback,
                           .leave_place = leave_callback,
                           .back = back_callback,
                           .unit_times = times_callback,
                           .back_time = back_time_callback};
    s1f_status status = S1F_ERR_PYTHON;
    if ((gpu == Py_None || s1f_to_device(gpu, "gpu", &walker->device)) && s1f_messages_create(messages) &&
        read_ends(ends, pointers))
        status = s1f_executor_create(program, rank, group, cache, pointers, thread_scope, &compute, &walker->executor);
    if (status != S1F_OK)
        s1f_walker_free(walker);
    return s1f_new_walker(status, walker, NULL);
}

S1F_METHOD(s1f_status, executor_step, s1f_walker *, walker, int64_t, step, bool, training, int64_t, sequence_length,
           s1f_int64s, sizes, PyObject *, run, PyObject *, fill, PyObject *, segment_sizes, PyObject *, make_views,
           s1f_int64s, part_sizes, s1f_int64s, first_part)
{
    const s1f_unit_parts parts = {part_sizes.values, first_part.values};
    if (walker->run != NULL)
        return s1f_fail(S1F_ERR_STATE, "the executor is inside a step already");
    if (sequence_length != 0 && !check_sizes(walker, sizes))
        return S1F_ERR_PYTHON;
    walker->device_step = walker->device == NULL ? 0 : walker->device->num_steps;
    walker->is_settled = 0;
    walker->run = run;
    walker->fill = fill;
    walker->segment_sizes = segment_sizes;
    walker->messages.make_views = make_views;
    walker->thread = PyEval_SaveThread();
    s1f_status status =
        s1f_executor_step(walker->executor, step, training, sequence_length, sequence_length == 0 ? NULL : sizes.values,
                          first_part.count > 0 ? &parts : NULL);
    PyEval_RestoreThread(walker->thread);
    walker->run = walker->fill = walker->segment_sizes = walker->messages.make_views = NULL;
    if (status == S1F_OK)
        return s1f_messages_leave_all(&walker->messages);
    s1f_raise_for_group(status, walker->group); /* the step's error is raised, not a later one */
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (s1f_messages_leave_all(&walker->messages) != S1F_OK)
        PyErr_Clear();
    PyErr_Restore(type, error, trace);
    return S1F_ERR_PYTHON;
}

static s1f_status settle(s1f_walker *walker)
{
    s1f_device *device = walker->device;
    if (device == NULL || walker->is_settled)
        return S1F_OK;
    if (device->num_steps != walker->device_step)
        return s1f_fail(S1F_ERR_STATE, "the step's times on the GPU are gone, for another step has begun there since: "
                                       "read a report before the next step, eval or verify");
    S1F_TRY(s1f_device_settle_times(device));
    S1F_TRY(s1f_executor_settle_times(walker->executor, device->first_ns));
    walker->is_settled = 1;
    return S1F_OK;
}

S1F_METHOD(PyObject *, executor_settle, s1f_walker *, walker)
{
    s1f_status status;
    S1F_WITHOUT_GIL(status = settle(walker));
    return status == S1F_OK ? PyBool_FromLong(walker->device != NULL) : s1f_raise(status);
}

S1F_METHOD(PyObject *, executor_last_unit, s1f_walker *, walker)
{
    return s1f_unit_tuple(s1f_executor_last_unit(walker->executor));
}

static PyObject *fill_item(const void *fills, int64_t i)
{
    const s1f_fill *fill = (const s1f_fill *)fills + i;
    return Py_BuildValue("(NLL)", s1f_unit_tuple(fill->unit), (long long)fill->span.start_ns,
                         (long long)fill->span.end_ns);
}

S1F_METHOD(PyObject *, executor_timeline, s1f_walker *, walker, int32_t, rank)
{
    int64_t count; /* a span for each instruction */
    const s1f_span *spans = s1f_executor_spans(walker->executor, &count);
    const s1f_instruction *instructions = s1f_program_instructions(walker->program, rank, &count);
    PyObject *list = PyList_New(count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = Py_BuildValue("(iNLL)", (int)instructions[i].opcode, s1f_unit_tuple(instructions[i].unit),
                                       (long long)spans[i].start_ns, (long long)spans[i].end_ns);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    const s1f_fill *fills = s1f_executor_fills(walker->executor, &count);
    return Py_BuildValue("(NN)", list, s1f_list_of(count, fill_item, fills));
}

S1F_METHOD(PyObject *, executor_stage_measure, s1f_walker *, walker, int32_t, stage)
{
    if (!s1f_require_index("stage", stage, walker->program->shape.num_stages))
        return NULL;
    s1f_stage_measure measure = s1f_executor_stage_measure(walker->executor, stage);
    return Py_BuildValue("(iL)", (int)measure.peak_live_units, (long long)measure.peak_live_tokens);
}

PyMethodDef s1f_executor_methods[] = {
    S1F_ROW(
        executor_create,
        "Fills: whether W runs in waits. gpu: on which units compute. tier: its wait(cell of all stages) waits until "
        "what the unit has saved is back, its came_back(cell) is the CUevent at which it was, or 0."),
    S1F_ROW(executor_step,
            "run(pass, stage, cell, received) -> tensors to send. cell: number of the segment within its stage, "
            "counted over all micro-batches. received: None, or a tuple of what make_views(end, address, (dtype, "
            "flags, sizes, offset) of each tensor) made of each message, in the order of the program's WAITs. "
            "fill(stage, cell) -> whether anything is left: runs a part of this W. segment_sizes(length) -> sizes. "
            "Parts are siblings in one unit: tokens of each, those of one column after another, and the first of each "
            "column, behind the last their count."),
    S1F_ROW(executor_settle,
            "-> bool: whether units ran on a GPU: waits for the end of the last step there, and makes its times those "
            "of the GPU."),
    S1F_ROW(executor_last_unit, "-> _Unit: that the last step ended at."),
    S1F_ROW(executor_timeline,
            "-> tuple[list[tuple[int, _Unit, int, int]], list[tuple[_Unit, int, int]]]: opcode, unit, start and end in "
            "ns of the last step's instructions; unit, start and end of the parts of W that ran in waits."),
    S1F_ROW(executor_stage_measure, "-> tuple[int, int]: peak live units, peak live tokens of the last step."),
    {NULL, NULL, 0, NULL}};
