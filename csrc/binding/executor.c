/* executor.c - conversions for the executor: compute is Python, the walk is not.
 *
 * The walk holds no GIL; each callback takes it and gives it back. */
#include "messages.h"
#include "records.h"

#include "../device/device.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    s1f_executor *executor;
    PyObject *arguments, *device_handle, *tier; /* keep what the executor and the next six borrow */
    const s1f_program *program;
    s1f_group *group;
    s1f_device *device;  /* the GPU on which units compute, NULL: none */
    int64_t device_step; /* its count when the last step began */
    s1f_messages messages;
    /* during a step: */
    PyThreadState *thread;
    PyObject *run, *fill, *segment_sizes; /* borrowed */
} executor_handle;

static void handle_free(executor_handle *handle)
{
    s1f_messages_free(&handle->messages);
    s1f_executor_free(handle->executor);
    Py_XDECREF(handle->arguments);
    Py_XDECREF(handle->device_handle);
    Py_XDECREF(handle->tier);
    free(handle);
}

static void capsule_free(PyObject *capsule)
{
    handle_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_EXECUTOR));
}

static int to_executor(PyObject *capsule, void *out)
{
    executor_handle *handle = s1f_from_capsule(capsule, S1F_CAPSULE_EXECUTOR);
    *(executor_handle **)out = handle;
    return handle != NULL;
}

/* -- callbacks: called without the GIL ----------------------------------------------------------------------------- */

static s1f_status run_with_gil(executor_handle *handle, const s1f_current_unit *current, const s1f_input *inputs,
                               int32_t num_inputs, int32_t num_sends, s1f_result *result)
{
    s1f_unit unit = current->unit;
    PyObject *messages = s1f_messages_received(&handle->messages, inputs, num_inputs);
    if (messages == NULL)
        return S1F_ERR_PYTHON;
    PyObject *tensors = PyObject_CallFunction(handle->run, "iiLN", (int)unit.pass, (int)unit.stage,
                                              (long long)s1f_cell(&handle->program->shape, unit), messages);
    if (tensors == NULL)
        return S1F_ERR_PYTHON;
    s1f_status status = num_sends == 0 ? S1F_OK : s1f_messages_describe(&handle->messages, tensors, result);
    if (status != S1F_OK || num_sends == 0)
        Py_DECREF(tensors);
    for (int32_t i = 1; status == S1F_OK && i < num_sends; i++)
        Py_INCREF(tensors); /* one per release */
    return status;
}

static s1f_status run_callback(void *context, const s1f_current_unit *unit, const s1f_input *inputs, int32_t num_inputs,
                               int32_t num_sends, s1f_result *result)
{
    executor_handle *handle = context;
    PyEval_RestoreThread(handle->thread);
    s1f_status status = run_with_gil(handle, unit, inputs, num_inputs, num_sends, result);
    handle->thread = PyEval_SaveThread();
    return status;
}

static s1f_status fill_callback(void *context, s1f_unit unit, int32_t *is_left)
{
    executor_handle *handle = context;
    PyEval_RestoreThread(handle->thread);
    PyObject *answer =
        PyObject_CallFunction(handle->fill, "iL", (int)unit.stage, (long long)s1f_cell(&handle->program->shape, unit));
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    handle->thread = PyEval_SaveThread();
    *is_left = is_true > 0;
    return is_true < 0 ? S1F_ERR_PYTHON : S1F_OK;
}

static s1f_status leave_callback(void *context, int32_t edge, int32_t place)
{
    executor_handle *handle = context;
    if (!s1f_messages_has_views(&handle->messages, edge, place))
        return S1F_OK;
    PyEval_RestoreThread(handle->thread);
    s1f_status status = s1f_messages_leave(&handle->messages, edge, place);
    handle->thread = PyEval_SaveThread();
    return status;
}

static s1f_status begin_callback(void *context)
{
    executor_handle *handle = context;
    return handle->device == NULL ? S1F_OK : s1f_device_begin_unit(handle->device);
}

static s1f_status end_callback(void *context)
{
    executor_handle *handle = context;
    return handle->device == NULL ? S1F_OK : s1f_device_end_unit(handle->device);
}

static s1f_status settle_callback(void *context, int64_t *start_ns)
{
    const executor_handle *handle = context;
    s1f_device *device = handle->device;
    if (device->num_steps != handle->device_step)
        return s1f_fail(S1F_ERR_STATE, "the step's times on the GPU are gone, for another step has begun there since: "
                                       "read a report before the next step, eval or verify");
    s1f_status status = s1f_device_settle_times(device);
    *start_ns = device->first_ns;
    return status;
}

static s1f_status times_callback(void *context, int64_t number, int64_t *start_ns, int64_t *end_ns)
{
    executor_handle *handle = context;
    if (number >= handle->device->num_units)
        return s1f_fail(S1F_ERR_STATE, "the GPU has run %lld units of the step", (long long)handle->device->num_units);
    const s1f_device_unit *unit = &handle->device->units[number];
    s1f_status status = s1f_device_time_of(handle->device, unit->start, start_ns);
    return status == S1F_OK ? s1f_device_time_of(handle->device, unit->end, end_ns) : status;
}

static void release_callback(void *context, void *keep)
{
    executor_handle *handle = context;
    PyEval_RestoreThread(handle->thread);
    Py_XDECREF((PyObject *)keep);
    handle->thread = PyEval_SaveThread();
}

/* 0 with the exception set, unless there is a size for each column. */
static int check_sizes(const executor_handle *handle, const s1f_array *sizes)
{
    int64_t num_columns = s1f_num_columns(&handle->program->shape);
    if (sizes->count != num_columns)
        PyErr_Format(PyExc_ValueError, "%lld segment sizes for %lld segments", (long long)sizes->count,
                     (long long)num_columns);
    return sizes->count == num_columns;
}

/* 0 with the exception set, unless the parts of each column follow those of the one before it. None at all is fine. */
static int check_parts(const executor_handle *handle, const s1f_array *tokens, const s1f_array *first)
{
    if (first->count == 0 && tokens->count == 0)
        return 1;
    const int64_t *begin = first->values;
    int fits = first->count == s1f_num_columns(&handle->program->shape) + 1 && begin[0] == 0;
    for (int64_t i = 1; fits && i < first->count; i++)
        fits = begin[i] >= begin[i - 1] && begin[i] - begin[i - 1] <= INT32_MAX;
    if (!fits || begin[first->count - 1] != tokens->count)
        PyErr_SetString(PyExc_ValueError, "first parts must be one for each segment and their count, ascending from 0");
    return !PyErr_Occurred();
}

static s1f_status sizes_callback(void *context, int64_t sequence_length, int64_t *sizes)
{
    executor_handle *handle = context;
    s1f_array given = {.name = "segment sizes"};
    PyEval_RestoreThread(handle->thread);
    PyObject *array = PyObject_CallFunction(handle->segment_sizes, "L", (long long)sequence_length);
    int is_read = array != NULL && s1f_to_array(array, &given) && check_sizes(handle, &given);
    if (is_read)
        memcpy(sizes, given.values, (size_t)given.count * sizeof *sizes);
    s1f_release_arrays(&given, 1);
    Py_XDECREF(array);
    handle->thread = PyEval_SaveThread();
    return is_read ? S1F_OK : S1F_ERR_PYTHON;
}

/* -- the module's functions -------------------------------------------------------------------------------------- */

static PyObject *executor_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    s1f_group *group;
    s1f_kv_cache *cache;
    PyObject *ends, *dtype_codes, *leave;
    int rank, thread_scope, fills;
    if (!PyArg_ParseTuple(arguments, "O&iO&O&O!pO!pO", s1f_to_program, &program, &rank, s1f_to_group, &group,
                          s1f_to_kv_cache, &cache, &PyList_Type, &ends, &thread_scope, &PyDict_Type, &dtype_codes,
                          &fills, &leave))
        return NULL;
    int32_t num_edges;
    const s1f_edge *edges = s1f_program_edges(program, &num_edges);
    if (PyList_Size(ends) != num_edges) {
        PyErr_Format(PyExc_ValueError, "%zd edge ends for %d edges", PyList_Size(ends), (int)num_edges);
        return NULL;
    }

    executor_handle *handle = calloc(1, sizeof *handle);
    s1f_edge_end **pointers = calloc((size_t)num_edges + 1, sizeof *pointers);
    PyObject *capsule = NULL;
    if (handle == NULL || pointers == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    *handle = (executor_handle){
        .arguments = Py_NewRef(arguments),
        .program = program,
        .group = group,
        .messages = {.ends = ends, .dtype_codes = dtype_codes, .leave = leave, .num_edges = num_edges}};
    for (int32_t i = 0; i < num_edges; i++) {
        PyObject *end = PyList_GetItem(ends, i);
        if (end != Py_None && !s1f_to_edge_end(end, &pointers[i]))
            goto failed;
    }
    if (!s1f_messages_create(&handle->messages, edges))
        goto failed;
    s1f_compute compute = {.context = handle,
                           .run = run_callback,
                           .release = release_callback,
                           .fill = fills ? fill_callback : NULL,
                           .segment_sizes = sizes_callback,
                           .leave_place = leave_callback,
                           .begin_unit = begin_callback,
                           .end_unit = end_callback,
                           .settle_times = settle_callback,
                           .unit_times = times_callback};
    s1f_status status =
        s1f_executor_create(program, rank, group, cache, pointers, thread_scope, &compute, &handle->executor);
    if (status != S1F_OK) {
        s1f_raise(status);
        goto failed;
    }
    capsule = PyCapsule_New(handle, S1F_CAPSULE_EXECUTOR, capsule_free);
failed:
    free(pointers);
    if (capsule == NULL && handle != NULL)
        handle_free(handle);
    return capsule;
}

static PyObject *executor_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    executor_handle *handle;
    PyObject *run, *fill, *segment_sizes, *make_views;
    int64_t step, sequence_length;
    enum { SIZES, TOKENS, FIRST, NUM_ARRAYS };
    s1f_array arrays[NUM_ARRAYS] = {{.name = "segment sizes"}, {.name = "sizes of parts"}, {.name = "first parts"}};
    int training;
    if (!PyArg_ParseTuple(arguments, "O&O&pO&O&OOOO|O&O&", to_executor, &handle, s1f_to_int64, &step, &training,
                          s1f_to_int64, &sequence_length, s1f_to_array, &arrays[SIZES], &run, &fill, &segment_sizes,
                          &make_views, s1f_to_array, &arrays[TOKENS], s1f_to_array, &arrays[FIRST]))
        return NULL;
    const s1f_unit_parts parts = {arrays[TOKENS].values, arrays[FIRST].values};
    int is_inside = handle->run != NULL;
    if (is_inside)
        PyErr_SetString(PyExc_RuntimeError, "the executor is inside a step already");
    if (is_inside || (sequence_length != 0 && !check_sizes(handle, &arrays[SIZES])) ||
        !check_parts(handle, &arrays[TOKENS], &arrays[FIRST])) {
        s1f_release_arrays(arrays, NUM_ARRAYS);
        return NULL;
    }
    handle->device_step = handle->device == NULL ? 0 : handle->device->num_steps;
    handle->run = run;
    handle->fill = fill;
    handle->segment_sizes = segment_sizes;
    handle->messages.make_views = make_views;
    handle->thread = PyEval_SaveThread();
    s1f_status status =
        s1f_executor_step(handle->executor, step, training, sequence_length,
                          sequence_length == 0 ? NULL : arrays[SIZES].values, arrays[FIRST].count > 0 ? &parts : NULL);
    PyEval_RestoreThread(handle->thread);
    handle->run = handle->fill = handle->segment_sizes = handle->messages.make_views = NULL;
    s1f_release_arrays(arrays, NUM_ARRAYS);
    if (status == S1F_OK) {
        status = s1f_messages_leave_all(&handle->messages);
    } else { /* the step's error is told, not one of this */
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        if (s1f_messages_leave_all(&handle->messages) != S1F_OK)
            PyErr_Clear();
        PyErr_Restore(type, error, trace);
    }
    if (status != S1F_OK)
        return s1f_raise_for_group(status, handle->group);
    Py_RETURN_NONE;
}

static PyObject *executor_settle(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    executor_handle *handle;
    s1f_status status = S1F_OK;
    if (!to_executor(capsule, &handle))
        return NULL;
    if (handle->device != NULL) {
        S1F_WITHOUT_GIL(status = s1f_executor_settle_times(handle->executor));
    }
    return status == S1F_OK ? PyBool_FromLong(handle->device != NULL) : s1f_raise(status);
}

static PyObject *executor_last_unit(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    executor_handle *handle;
    return to_executor(capsule, &handle) ? s1f_unit_tuple(s1f_executor_last_unit(handle->executor)) : NULL;
}

/* What the last step measured, of the executor and the rank in a call's arguments. */
typedef struct {
    const s1f_span *spans;
    const s1f_instruction *instructions;
    int64_t count;
} measured_step;

static int parse_measured(PyObject *arguments, measured_step *out)
{
    executor_handle *handle;
    int rank;
    if (!PyArg_ParseTuple(arguments, "O&i", to_executor, &handle, &rank))
        return -1;
    int64_t num_instructions;
    out->spans = s1f_executor_spans(handle->executor, &out->count);
    out->instructions = s1f_program_instructions(handle->program, rank, &num_instructions);
    if (num_instructions != out->count) {
        PyErr_Format(PyExc_ValueError, "rank %d is not the executor's", rank);
        return -1;
    }
    return 0;
}

static PyObject *executor_timeline(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    measured_step step;
    if (parse_measured(arguments, &step) < 0)
        return NULL;
    PyObject *list = PyList_New(step.count);
    for (int64_t i = 0; list != NULL && i < step.count; i++) {
        PyObject *item =
            Py_BuildValue("(iNLL)", (int)step.instructions[i].opcode, s1f_unit_tuple(step.instructions[i].unit),
                          (long long)step.spans[i].start_ns, (long long)step.spans[i].end_ns);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *fill_item(const void *fills, int64_t i)
{
    const s1f_fill *fill = (const s1f_fill *)fills + i;
    return Py_BuildValue("(NLL)", s1f_unit_tuple(fill->unit), (long long)fill->span.start_ns,
                         (long long)fill->span.end_ns);
}

static PyObject *executor_fills(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    executor_handle *handle;
    if (!to_executor(capsule, &handle))
        return NULL;
    int64_t count;
    const s1f_fill *fills = s1f_executor_fills(handle->executor, &count);
    return s1f_list_of(count, fill_item, fills);
}

static PyObject *executor_stage_measure(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    executor_handle *handle;
    int stage;
    if (!PyArg_ParseTuple(arguments, "O&i", to_executor, &handle, &stage))
        return NULL;
    if (stage < 0 || stage >= handle->program->shape.num_stages) {
        PyErr_Format(PyExc_ValueError, "no stage %d", stage);
        return NULL;
    }
    s1f_stage_measure measure = s1f_executor_stage_measure(handle->executor, stage);
    return Py_BuildValue("(iL)", (int)measure.peak_live_units, (long long)measure.peak_live_tokens);
}

static PyObject *executor_set_device(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    executor_handle *handle;
    PyObject *device_handle;
    s1f_device *device;
    if (!PyArg_ParseTuple(arguments, "O&O", to_executor, &handle, &device_handle) ||
        !s1f_to_device(device_handle, &device))
        return NULL;
    handle->device = device;
    Py_XDECREF(handle->device_handle);
    handle->device_handle = Py_NewRef(device_handle);
    Py_RETURN_NONE;
}

static PyObject *executor_set_tier(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    executor_handle *handle;
    PyObject *tier_handle;
    s1f_tier *tier;
    if (!PyArg_ParseTuple(arguments, "O&O", to_executor, &handle, &tier_handle) || !s1f_to_tier(tier_handle, &tier))
        return NULL;
    s1f_executor_set_tier(handle->executor, tier);
    Py_XDECREF(handle->tier);
    handle->tier = Py_NewRef(tier_handle);
    Py_RETURN_NONE;
}

PyMethodDef s1f_executor_methods[] = {
    S1F_METHOD(executor_create, VARARGS, "Fills: whether W runs in waits."),
    S1F_METHOD(executor_set_device, VARARGS, "The GPU on which units compute."),
    S1F_METHOD(executor_set_tier, VARARGS, "Where moved units are; a load's number is the cell of all stages."),
    S1F_METHOD(executor_step, VARARGS,
               "run(pass, stage, cell, received) -> tensors to send. cell: number of the segment within its stage, "
               "counted over all micro-batches. received: None, or a tuple of what make_views made of each "
               "message, in the order of the program's WAITs. fill(stage, cell) -> whether anything is left: runs "
               "a part of this W."),
    S1F_METHOD(
        executor_settle, O,
        "Whether units ran on a GPU: waits for the end of the last step there, and makes its times those of the GPU."),
    S1F_METHOD(executor_fills, O, "[(unit, start_ns, end_ns)]: the parts of W that ran in waits of the last step."),
    S1F_METHOD(executor_last_unit, O, "(pass, stage, microbatch, segment) the last step ended at."),
    S1F_METHOD(executor_timeline, VARARGS, "[(opcode, unit, start_ns, end_ns)] of the last step."),
    S1F_METHOD(executor_stage_measure, VARARGS, "(peak live units, peak live tokens) of the last step."),
    {NULL, NULL, 0, NULL}};
