/* p2p.c - conversions for the p2p room: mappings, groups, edge ends, and tensors over places.
 *
 * A handle's capsule keeps what it borrows alive: an edge end its group and mapping, a group its mapping. A tensor over a
 * place keeps the edge end's capsule, so memory goes away with the last tensor that reads it. */
#include "binding.h"

#include "../run/arena.h"
#include "../run/p2p.h"

#include <stdlib.h>
#include <string.h>

/* -- errors and signals ------------------------------------------------------------------------------------------ */

static int set_text(PyObject *object, const char *name, const char *text)
{
    if (text[0] == '\0')
        return 0;
    PyObject *value = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    int result = value == NULL ? -1 : PyObject_SetAttrString(object, name, value);
    Py_XDECREF(value);
    return result;
}

PyObject *s1f_raise_for_group(s1f_status status, const s1f_group *group)
{
    s1f_raise(status);
    if (status != S1F_ERR_PEER && status != S1F_ERR_TIMEOUT)
        return NULL;
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    if (failure.rank < 0)
        return NULL;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *rank = PyLong_FromLong(failure.rank);
    if (rank == NULL || PyObject_SetAttrString(error, "rank", rank) < 0 || set_text(error, "unit", failure.unit) < 0 ||
        set_text(error, "edge", failure.edge) < 0)
        PyErr_Clear(); /* the error itself matters more than its attributes */
    Py_XDECREF(rank);
    PyErr_Restore(type, error, traceback);
    return NULL;
}

/* Called while waiting, without the GIL: runs Python's signal handlers. */
static s1f_status check_signals(void *context)
{
    (void)context;
    PyGILState_STATE state = PyGILState_Ensure();
    int failed = PyErr_CheckSignals();
    PyGILState_Release(state);
    return failed ? S1F_ERR_PYTHON : S1F_OK;
}

/* -- capsules ---------------------------------------------------------------------------------------------------- */

static void mapping_destructor(PyObject *capsule)
{
    s1f_mapping_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_MAPPING));
}

static void group_destructor(PyObject *capsule)
{
    PyObject *mapping = PyCapsule_GetContext(capsule);
    s1f_group_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_GROUP));
    Py_XDECREF(mapping);
}

static void edge_end_destructor(PyObject *capsule)
{
    PyObject *group_and_mapping = PyCapsule_GetContext(capsule);
    s1f_edge_end_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_EDGE_END));
    Py_XDECREF(group_and_mapping);
}

static s1f_group *group_of(PyObject *capsule)
{
    return s1f_from_capsule(capsule, S1F_CAPSULE_GROUP);
}

static s1f_edge_end *edge_end_of(PyObject *capsule)
{
    return s1f_from_capsule(capsule, S1F_CAPSULE_EDGE_END);
}

/* -- mappings ---------------------------------------------------------------------------------------------------- */

static PyObject *mapping_create(PyObject *module, PyObject *arguments)
{
    (void)module;
    int fd;
    long long bytes;
    if (!PyArg_ParseTuple(arguments, "iL", &fd, &bytes))
        return NULL;
    s1f_mapping *mapping;
    s1f_status status = s1f_mapping_create(fd, bytes, &mapping);
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *capsule = PyCapsule_New(mapping, S1F_CAPSULE_MAPPING, mapping_destructor);
    if (capsule == NULL)
        s1f_mapping_free(mapping);
    return capsule;
}

/* -- groups ------------------------------------------------------------------------------------------------------ */

static PyObject *group_block_bytes(PyObject *module, PyObject *arguments)
{
    (void)module;
    int num_ranks;
    if (!PyArg_ParseTuple(arguments, "i", &num_ranks))
        return NULL;
    return PyLong_FromSize_t(s1f_group_block_bytes(num_ranks));
}

static PyObject *group_create(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *mapping_capsule;
    int num_ranks, rank;
    if (!PyArg_ParseTuple(arguments, "Oii", &mapping_capsule, &num_ranks, &rank))
        return NULL;
    s1f_mapping *mapping = s1f_from_capsule(mapping_capsule, S1F_CAPSULE_MAPPING);
    if (mapping == NULL)
        return NULL;
    s1f_status status = S1F_OK;
    s1f_group *group;
    if (num_ranks >= 1 && mapping->bytes < (int64_t)s1f_group_block_bytes(num_ranks))
        status = s1f_fail(S1F_ERR_ARG, "the block of %d ranks needs %lld bytes, the mapping has %lld", num_ranks,
                          (long long)s1f_group_block_bytes(num_ranks), (long long)mapping->bytes);
    if (status == S1F_OK)
        status = s1f_group_create(mapping->memory, num_ranks, rank, check_signals, NULL, &group);
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *capsule = PyCapsule_New(group, S1F_CAPSULE_GROUP, group_destructor);
    if (capsule == NULL) {
        s1f_group_free(group);
        return NULL;
    }
    Py_INCREF(mapping_capsule);
    PyCapsule_SetContext(capsule, mapping_capsule);
    return capsule;
}

static PyObject *group_set_limits(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    double timeout_s, spin_us;
    if (!PyArg_ParseTuple(arguments, "Odd", &capsule, &timeout_s, &spin_us))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    if (!(timeout_s > 0 && timeout_s < 1e9) || !(spin_us >= 0 && spin_us < 1e12))
        return PyErr_Format(PyExc_ValueError, "timeout must be above 0 s and spin at least 0 us");
    s1f_group_set_limits(group, (int64_t)(timeout_s * 1e9), (int64_t)(spin_us * 1e3));
    Py_RETURN_NONE;
}

static PyObject *group_set_poison(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    int poison;
    if (!PyArg_ParseTuple(arguments, "Op", &capsule, &poison))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_group_set_poison(group, poison);
    Py_RETURN_NONE;
}

static PyObject *group_begin_step(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    long long step;
    if (!PyArg_ParseTuple(arguments, "OL", &capsule, &step))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_group_begin_step(group, step);
    Py_RETURN_NONE;
}

static PyObject *group_progress(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    const char *what;
    if (!PyArg_ParseTuple(arguments, "Os", &capsule, &what))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_group_progress(group, what);
    Py_RETURN_NONE;
}

static PyObject *group_set_progress(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    int rank, waiting_for;
    const char *what;
    double age_s;
    if (!PyArg_ParseTuple(arguments, "Oisdi", &capsule, &rank, &what, &age_s, &waiting_for))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_group_set_progress(group, rank, what, (int64_t)(age_s * 1e9), waiting_for);
    Py_RETURN_NONE;
}

static PyObject *group_get_progress(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(arguments, "Oi", &capsule, &rank))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    char what[S1F_WHAT_BYTES];
    int64_t age_ns;
    int32_t waiting_for;
    s1f_group_get_progress(group, rank, what, &age_ns, &waiting_for);
    return Py_BuildValue("(sdi)", what, age_ns < 0 ? -1.0 : (double)age_ns * 1e-9, (int)waiting_for);
}

static PyObject *group_fail(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    int rank;
    const char *text, *unit = NULL, *edge = NULL;
    if (!PyArg_ParseTuple(arguments, "Ois|zz", &capsule, &rank, &text, &unit, &edge))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    if (unit == NULL && edge == NULL) {
        s1f_group_fail(group, rank, text);
        Py_RETURN_NONE;
    }
    s1f_failure failure = {.rank = rank};
    strncpy(failure.text, text, sizeof failure.text - 1);
    strncpy(failure.unit, unit == NULL ? "" : unit, sizeof failure.unit - 1);
    strncpy(failure.edge, edge == NULL ? "" : edge, sizeof failure.edge - 1);
    s1f_group_fail_with(group, &failure);
    Py_RETURN_NONE;
}

static PyObject *group_check(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_status status = s1f_group_check(group);
    if (status != S1F_OK)
        return s1f_raise_for_group(status, group);
    Py_RETURN_NONE;
}

static PyObject *group_failure(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    if (failure.rank < 0)
        Py_RETURN_NONE;
    PyObject *text = PyUnicode_DecodeUTF8(failure.text, (Py_ssize_t)strlen(failure.text), "replace");
    return text == NULL ? NULL : Py_BuildValue("(iNss)", (int)failure.rank, text, failure.unit, failure.edge);
}

static PyObject *group_clear(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    s1f_group_clear(group);
    Py_RETURN_NONE;
}

static int parse_fds(PyObject *list, int *fds, Py_ssize_t count)
{
    if (PySequence_Size(list) != count) {
        PyErr_Format(PyExc_ValueError, "one descriptor per rank is needed");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        fds[i] = item == NULL ? -1 : (int)PyLong_AsLong(item);
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *gathered_list(const char *data, const int32_t *bytes, int num_ranks)
{
    PyObject *list = PyList_New(num_ranks);
    for (int rank = 0; list != NULL && rank < num_ranks; rank++) {
        PyObject *item = PyBytes_FromStringAndSize(data + (size_t)rank * S1F_GATHER_BYTES, bytes[rank]);
        if (item == NULL || PyList_SetItem(list, rank, item) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *group_gather(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule, *fd_list, *result = NULL;
    unsigned int epoch, round;
    int recovering;
    const char *data;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(arguments, "OIIpy#O", &capsule, &epoch, &round, &recovering, &data, &bytes, &fd_list))
        return NULL;
    s1f_group *group = group_of(capsule);
    if (group == NULL)
        return NULL;
    Py_ssize_t num_ranks = PySequence_Size(fd_list);
    if (num_ranks < 0)
        return NULL;
    char *out = malloc((size_t)num_ranks * S1F_GATHER_BYTES + 1);
    int32_t *out_bytes = calloc((size_t)num_ranks + 1, sizeof *out_bytes);
    int *fds = calloc((size_t)num_ranks + 1, sizeof *fds);
    if (out == NULL || out_bytes == NULL || fds == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (parse_fds(fd_list, fds, num_ranks) < 0)
        goto done;
    s1f_status status;
    int32_t length = bytes > S1F_GATHER_BYTES ? S1F_GATHER_BYTES + 1 : (int32_t)bytes;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_group_gather(group, epoch, round, recovering, data, length, fds, out, out_bytes);
    Py_END_ALLOW_THREADS
    result = status == S1F_OK ? gathered_list(out, out_bytes, (int)num_ranks) : s1f_raise_for_group(status, group);
done:
    free(fds);
    free(out_bytes);
    free(out);
    return result;
}

/* -- edge ends --------------------------------------------------------------------------------------------------- */

static PyObject *wrap_edge_end(s1f_edge_end *end, PyObject *group, PyObject *mapping)
{
    PyObject *kept = PyTuple_Pack(2, group, mapping);
    PyObject *capsule = kept == NULL ? NULL : PyCapsule_New(end, S1F_CAPSULE_EDGE_END, edge_end_destructor);
    if (capsule == NULL) {
        Py_XDECREF(kept);
        s1f_edge_end_free(end);
        return NULL;
    }
    PyCapsule_SetContext(capsule, kept);
    return capsule;
}

static PyObject *arena_end(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *group_capsule, *mapping_capsule;
    int hangup_fd, peer_rank, is_receiver;
    const char *text;
    if (!PyArg_ParseTuple(arguments, "OOiips", &group_capsule, &mapping_capsule, &hangup_fd, &peer_rank, &is_receiver,
                          &text))
        return NULL;
    s1f_group *group = group_of(group_capsule);
    s1f_mapping *mapping = group == NULL ? NULL : s1f_from_capsule(mapping_capsule, S1F_CAPSULE_MAPPING);
    if (mapping == NULL)
        return NULL;
    s1f_edge_end *end;
    s1f_status status =
        s1f_arena_end_create(group, mapping->memory, mapping->bytes, hangup_fd, peer_rank, is_receiver, text, &end);
    return status == S1F_OK ? wrap_edge_end(end, group_capsule, mapping_capsule) : s1f_raise(status);
}

/* A relay in Python: context is an object with methods begin_step, post and send. */
static s1f_status relay_result(PyObject *result, PyGILState_STATE state)
{
    s1f_status status = result == NULL ? S1F_ERR_PYTHON : S1F_OK;
    Py_XDECREF(result);
    PyGILState_Release(state);
    return status;
}

static s1f_status relay_begin_step(void *context, int64_t step, int32_t num_places)
{
    PyGILState_STATE state = PyGILState_Ensure();
    return relay_result(PyObject_CallMethod(context, "begin_step", "Li", (long long)step, (int)num_places), state);
}

static s1f_status relay_post(void *context, int64_t sequence, void *place)
{
    PyGILState_STATE state = PyGILState_Ensure();
    return relay_result(PyObject_CallMethod(context, "post", "LN", (long long)sequence, PyLong_FromVoidPtr(place)),
                        state);
}

static s1f_status relay_send(void *context, int64_t sequence, const void *place, int64_t payload_bytes)
{
    PyGILState_STATE state = PyGILState_Ensure();
    return relay_result(PyObject_CallMethod(context, "send", "LNL", (long long)sequence,
                                            PyLong_FromVoidPtr((void *)(uintptr_t)place), (long long)payload_bytes),
                        state);
}

static void relay_free(void *context)
{
    if (!Py_IsInitialized())
        return;
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF((PyObject *)context);
    PyGILState_Release(state);
}

static const s1f_relay python_relay = {
    .name = "c10d",
    .begin_step = relay_begin_step,
    .post = relay_post,
    .send = relay_send,
    .free = relay_free,
};

static PyObject *relay_end(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *group_capsule, *mapping_capsule, *relay;
    int peer_rank, is_receiver;
    const char *text;
    if (!PyArg_ParseTuple(arguments, "OOOips", &group_capsule, &mapping_capsule, &relay, &peer_rank, &is_receiver,
                          &text))
        return NULL;
    s1f_group *group = group_of(group_capsule);
    s1f_mapping *mapping = group == NULL ? NULL : s1f_from_capsule(mapping_capsule, S1F_CAPSULE_MAPPING);
    if (mapping == NULL)
        return NULL;
    s1f_edge_end *end;
    s1f_status status = s1f_relay_end_create(group, mapping->memory, mapping->bytes, &python_relay, relay, peer_rank,
                                             is_receiver, text, &end);
    if (status != S1F_OK)
        return s1f_raise(status);
    Py_INCREF(relay);
    return wrap_edge_end(end, group_capsule, mapping_capsule);
}

static PyObject *relay_done(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    long long step, sequence;
    if (!PyArg_ParseTuple(arguments, "OLL", &capsule, &step, &sequence))
        return NULL;
    s1f_edge_end *end = edge_end_of(capsule);
    if (end == NULL)
        return NULL;
    s1f_relay_done(end, step, sequence);
    Py_RETURN_NONE;
}

static PyObject *message_payload_bytes(PyObject *module, PyObject *address)
{
    (void)module;
    const void *place = PyLong_AsVoidPtr(address);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(s1f_message_payload_bytes(place));
}

static PyObject *finish(s1f_status status, const s1f_edge_end *end)
{
    if (status != S1F_OK)
        return s1f_raise_for_group(status, end->group);
    Py_RETURN_NONE;
}

static PyObject *relay_flush(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_edge_end *end = edge_end_of(capsule);
    if (end == NULL)
        return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_relay_flush(end);
    Py_END_ALLOW_THREADS
    return finish(status, end);
}

static PyObject *edge_begin_step(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    int num_places;
    if (!PyArg_ParseTuple(arguments, "Oi", &capsule, &num_places))
        return NULL;
    s1f_edge_end *end = edge_end_of(capsule);
    if (end == NULL)
        return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_p2p_begin_step(end, num_places);
    Py_END_ALLOW_THREADS
    return finish(status, end);
}

static PyObject *edge_post(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    long long sequence;
    int place;
    if (!PyArg_ParseTuple(arguments, "OLi", &capsule, &sequence, &place))
        return NULL;
    s1f_edge_end *end = edge_end_of(capsule);
    if (end == NULL)
        return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_p2p_post(end, sequence, place);
    Py_END_ALLOW_THREADS
    return finish(status, end);
}

static PyObject *sizes_tuple(const int64_t *sizes, int32_t ndim)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int32_t i = 0; tuple != NULL && i < ndim; i++) {
        PyObject *size = PyLong_FromLongLong(sizes[i]);
        if (size == NULL || PyTuple_SetItem(tuple, i, size) < 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

/* [(dtype, flags, sizes, address)] */
static PyObject *tensors_list(const s1f_message *message, const void *payload)
{
    PyObject *list = PyList_New(message->num_tensors);
    for (int32_t i = 0; list != NULL && i < message->num_tensors; i++) {
        const s1f_tensor_header *tensor = &message->tensors[i];
        PyObject *sizes = sizes_tuple(tensor->sizes, tensor->ndim);
        PyObject *item = sizes == NULL ? NULL
                                       : Py_BuildValue("(iiNN)", (int)tensor->dtype, (int)tensor->flags, sizes,
                                                       PyLong_FromVoidPtr((char *)(uintptr_t)payload + tensor->offset));
        if (item == NULL || PyList_SetItem(list, i, item) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

#define MESSAGE_FIELDS "Liiiiii(LLL)"

static PyObject *edge_wait(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    long long sequence;
    int place;
    if (!PyArg_ParseTuple(arguments, "OLi", &capsule, &sequence, &place))
        return NULL;
    s1f_edge_end *end = edge_end_of(capsule);
    if (end == NULL)
        return NULL;
    s1f_status status;
    const s1f_message *message;
    const void *payload;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_p2p_wait(end, sequence, place, &message, &payload);
    Py_END_ALLOW_THREADS
    if (status != S1F_OK)
        return s1f_raise_for_group(status, end->group);
    PyObject *tensors = tensors_list(message, payload);
    return tensors == NULL
               ? NULL
               : Py_BuildValue("((" MESSAGE_FIELDS ")N)", (long long)message->step, (int)message->source_stage,
                               (int)message->destination_stage, (int)message->pass, (int)message->microbatch,
                               (int)message->segment, (int)message->training, (long long)message->sequence_length,
                               (long long)message->offset, (long long)message->length, tensors);
}

static int parse_tensor(PyObject *item, s1f_tensor_header *tensor, const void **data)
{
    int dtype, flags;
    PyObject *sizes;
    unsigned long long address;
    if (!PyArg_ParseTuple(item, "iiO!K", &dtype, &flags, &PyTuple_Type, &sizes, &address))
        return -1;
    Py_ssize_t ndim = PyTuple_Size(sizes);
    tensor->dtype = dtype;
    tensor->flags = flags;
    tensor->ndim = (int32_t)(ndim > S1F_MAX_DIMS ? S1F_MAX_DIMS + 1 : ndim);
    for (Py_ssize_t i = 0; i < ndim && i < S1F_MAX_DIMS; i++)
        tensor->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    *data = (const void *)(uintptr_t)address;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *edge_send(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule, *tensors;
    long long sequence, step, sequence_length, offset, length;
    int place;
    s1f_message message = {0};
    if (!PyArg_ParseTuple(arguments, "OLi(" MESSAGE_FIELDS ")O!", &capsule, &sequence, &place, &step,
                          &message.source_stage, &message.destination_stage, &message.pass, &message.microbatch,
                          &message.segment, &message.training, &sequence_length, &offset, &length, &PyList_Type,
                          &tensors))
        return NULL;
    s1f_edge_end *end = edge_end_of(capsule);
    if (end == NULL)
        return NULL;
    message.step = step;
    message.sequence_length = sequence_length;
    message.offset = offset;
    message.length = length;
    Py_ssize_t count = PyList_Size(tensors);
    const void *data[S1F_MAX_TENSORS];
    message.num_tensors = (int32_t)(count > S1F_MAX_TENSORS ? S1F_MAX_TENSORS + 1 : count);
    for (Py_ssize_t i = 0; i < count && i < S1F_MAX_TENSORS; i++)
        if (parse_tensor(PyList_GetItem(tensors, i), &message.tensors[i], &data[i]) < 0)
            return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_p2p_send(end, sequence, place, &message, data);
    Py_END_ALLOW_THREADS
    return finish(status, end);
}

/* -- tensors over places: DLPack -------------------------------------------------------------------------------- */

typedef struct { /* the stable ABI of DLPack 0.8 and before, which every torch takes */
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed_tensor {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed_tensor *self);
} dl_managed_tensor;

typedef struct {
    dl_managed_tensor managed;
    int64_t sizes[S1F_MAX_DIMS];
} place_tensor;

enum { DL_CPU = 1, DL_CUDA = 2 };

static const struct {
    uint8_t code, bits;
} dl_types[S1F_NUM_DTYPES] = {
    [S1F_FLOAT32] = {2, 32}, [S1F_FLOAT64] = {2, 64}, [S1F_BFLOAT16] = {4, 16},  [S1F_FLOAT16] = {2, 16},
    [S1F_INT64] = {0, 64},   [S1F_INT32] = {0, 32},   [S1F_INT16] = {0, 16},     [S1F_INT8] = {0, 8},
    [S1F_UINT8] = {1, 8},    [S1F_BOOL] = {6, 8},     [S1F_COMPLEX64] = {5, 64}, [S1F_COMPLEX128] = {5, 128},
};

static void place_tensor_delete(dl_managed_tensor *managed)
{
    if (Py_IsInitialized()) { /* a tensor that outlives Python leaves its owner to the process's end */
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)managed->context);
        PyGILState_Release(state);
    }
    free(managed);
}

static void unused_place_tensor(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor"))
        place_tensor_delete(PyCapsule_GetPointer(capsule, "dltensor"));
}

static PyObject *place_tensor_capsule(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *owner, *sizes;
    unsigned long long address;
    int dtype, gpu = -1;
    if (!PyArg_ParseTuple(arguments, "OKiO!|i", &owner, &address, &dtype, &PyTuple_Type, &sizes, &gpu))
        return NULL;
    Py_ssize_t ndim = PyTuple_Size(sizes);
    if (dtype < 0 || dtype >= S1F_NUM_DTYPES || ndim > S1F_MAX_DIMS)
        return PyErr_Format(PyExc_ValueError, "dtype code %d with %zd dimensions (at most %d)", dtype, ndim,
                            (int)S1F_MAX_DIMS);
    place_tensor *made = calloc(1, sizeof *made);
    if (made == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < ndim; i++)
        made->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(&made->managed, "dltensor", unused_place_tensor);
    if (capsule == NULL) {
        free(made);
        return NULL;
    }
    Py_INCREF(owner);
    made->managed.context = owner;
    made->managed.deleter = place_tensor_delete;
    made->managed.tensor = (dl_tensor){.data = (void *)(uintptr_t)address,
                                       .device_type = gpu < 0 ? DL_CPU : DL_CUDA,
                                       .device_id = gpu < 0 ? 0 : gpu,
                                       .ndim = (int32_t)ndim,
                                       .type_code = dl_types[dtype].code,
                                       .type_bits = dl_types[dtype].bits,
                                       .type_lanes = 1,
                                       .shape = made->sizes};
    return capsule;
}

PyMethodDef s1f_p2p_methods[] = {
    {"mapping_create", mapping_create, METH_VARARGS, "mapping_create(fd, bytes): maps shared memory of a descriptor."},
    {"group_block_bytes", group_block_bytes, METH_VARARGS, "group_block_bytes(num_ranks): of the block ranks share."},
    {"group_create", group_create, METH_VARARGS, "group_create(mapping, num_ranks, rank): one rank's view of a block."},
    {"group_set_limits", group_set_limits, METH_VARARGS,
     "group_set_limits(group, timeout_s, spin_us): longest silence of a peer; how long to spin before sleeping."},
    {"group_set_poison", group_set_poison, METH_VARARGS,
     "group_set_poison(group, on): fill places with 0xFF when they are posted again."},
    {"group_begin_step", group_begin_step, METH_VARARGS, "group_begin_step(group, step): enters a step."},
    {"group_progress", group_progress, METH_VARARGS, "group_progress(group, what): what this rank does now."},
    {"group_set_progress", group_set_progress, METH_VARARGS,
     "group_set_progress(group, rank, what, age_s, waiting_for): what another rank does, as a watcher learnt."},
    {"group_get_progress", group_get_progress, METH_VARARGS,
     "group_get_progress(group, rank): (what, age_s or -1, rank it waits for or -1)."},
    {"group_fail", group_fail, METH_VARARGS,
     "group_fail(group, rank, text, unit=None, edge=None): ends the step on every rank; the first call wins."},
    {"group_check", group_check, METH_O, "group_check(group): raises PipelineError once somebody failed."},
    {"group_failure", group_failure, METH_O, "group_failure(group): (rank, text, unit, edge), None if nobody failed."},
    {"group_clear", group_clear, METH_O, "group_clear(group): forgets the failure."},
    {"group_gather", group_gather, METH_VARARGS,
     "group_gather(group, epoch, round, recovering, data, hangup_fds): everyone's bytes, by rank."},
    {"arena_end", arena_end, METH_VARARGS,
     "arena_end(group, mapping, hangup_fd, peer_rank, is_receiver, text): an end of an edge both ranks map."},
    {"relay_end", relay_end, METH_VARARGS,
     "relay_end(group, mapping, relay, peer_rank, is_receiver, text): an end whose messages a Python object moves."},
    {"relay_done", relay_done, METH_VARARGS, "relay_done(end, step, sequence): a message has come, or has gone."},
    {"relay_flush", relay_flush, METH_O, "relay_flush(end): waits until every message has gone."},
    {"message_payload_bytes", message_payload_bytes, METH_O,
     "message_payload_bytes(place): of the message at this address, -1 where there is none."},
    {"edge_begin_step", edge_begin_step, METH_VARARGS, "edge_begin_step(end, num_places): enters a step."},
    {"edge_post", edge_post, METH_VARARGS, "edge_post(end, sequence, place): the place is free for this message."},
    {"edge_wait", edge_wait, METH_VARARGS,
     "edge_wait(end, sequence, place): (fields, [(dtype, flags, sizes, address)]) of the message, once it has come."},
    {"edge_send", edge_send, METH_VARARGS,
     "edge_send(end, sequence, place, fields, [(dtype, flags, sizes, address)]): puts a message into its place."},
    {"place_tensor_capsule", place_tensor_capsule, METH_VARARGS,
     "place_tensor_capsule(owner, address, dtype, sizes, gpu=-1): DLPack capsule of a tensor that keeps owner alive, "
     "on the CPU or on a GPU."},
    {NULL, NULL, 0, NULL},
};
