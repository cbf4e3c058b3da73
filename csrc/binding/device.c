/* device.c - conversions for GPUs and the edges between them: devices, watchdogs, NCCL and the ends.
 *
 * A handle keeps the arguments that it was made from, and with them what it borrows: a watchdog its group and device,
 * an end its control edge and watchdog. */
#include "binding.h"

#include "../device/copy_end.h"
#include "../device/edge_proof.h"
#include "../device/nccl_end.h"
#include "../run/executor.h"

#include <stdlib.h>
#include <string.h>

static int64_t make_room(void *function)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *left = PyObject_CallNoArgs(function);
    int64_t bytes = left == NULL ? -1 : PyLong_AsLongLong(left);
    if (PyErr_Occurred())
        PyErr_WriteUnraisable(function);
    Py_XDECREF(left);
    PyGILState_Release(state);
    return bytes;
}

static PyObject *device_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *path;
    int ordinal;
    PyObject *function = Py_None;
    if (!PyArg_ParseTuple(arguments, "zi|O", &path, &ordinal, &function))
        return NULL;
    s1f_device *device = NULL;
    s1f_status status = s1f_device_create(path, ordinal, &device);
    if (status == S1F_OK && function != Py_None) {
        device->make_room = make_room;
        device->room_context = function;
    }
    return s1f_new_device(status, device, arguments);
}

static PyObject *device_begin_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_device *device;
    s1f_cu_stream stream;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_device, &device, s1f_to_address, &stream))
        return NULL;
    return s1f_none(s1f_device_begin_step(device, stream));
}

S1F_METHOD_RETURNS(device_restart_unit, device, device, s1f_none(s1f_device_restart_unit(device)))
S1F_METHOD_RETURNS(device_end_unit, device, device, s1f_none(s1f_device_end_unit(device)))

static PyObject *watchdog_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    s1f_device *device;
    double proof_s;
    if (!PyArg_ParseTuple(arguments, "O&O&d", s1f_to_group, &group, s1f_to_device, &device, &proof_s))
        return NULL;
    s1f_watchdog *watchdog = NULL;
    s1f_status status = s1f_watchdog_create(group, device, (int64_t)(proof_s * 1e9), &watchdog);
    return s1f_new_watchdog(status, watchdog, arguments);
}

static PyObject *nccl_find(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *path;
    if (!PyArg_ParseTuple(arguments, "z", &path))
        return NULL;
    const s1f_nccl *nccl;
    s1f_status status = s1f_nccl_load(path, &nccl);
    return status == S1F_OK ? Py_BuildValue("(is)", (int)nccl->version, nccl->path) : s1f_raise(status);
}

static PyObject *nccl_unique_id(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *path;
    if (!PyArg_ParseTuple(arguments, "z", &path))
        return NULL;
    const s1f_nccl *nccl;
    s1f_nccl_id id;
    s1f_status status = s1f_nccl_load(path, &nccl);
    if (status == S1F_OK)
        status = s1f_nccl_status(nccl, nccl->get_unique_id(&id), NULL, "ncclGetUniqueId");
    return status == S1F_OK ? PyBytes_FromStringAndSize(id.bytes, sizeof id.bytes) : s1f_raise(status);
}

static PyObject *nccl_end(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *path, *bytes;
    Py_ssize_t num_bytes;
    s1f_edge_end *control, *end = NULL;
    s1f_watchdog *watchdog;
    if (!PyArg_ParseTuple(arguments, "zy#O&O&", &path, &bytes, &num_bytes, s1f_to_edge_end, &control, s1f_to_watchdog,
                          &watchdog))
        return NULL;
    if (num_bytes != S1F_NCCL_UNIQUE_ID_BYTES)
        return PyErr_Format(PyExc_ValueError, "an id of NCCL has %d bytes, got %zd", (int)S1F_NCCL_UNIQUE_ID_BYTES,
                            num_bytes);
    s1f_nccl_id id;
    memcpy(id.bytes, bytes, sizeof id.bytes);
    const s1f_nccl *nccl;
    s1f_status status = s1f_nccl_load(path, &nccl);
    if (status == S1F_OK) {
        S1F_WITHOUT_GIL(status = s1f_nccl_end_create(nccl, &id, control, watchdog, &end));
    }
    return s1f_new_edge_end(status, end, arguments);
}

S1F_METHOD_OF(device_end_connect, edge_end, end)
{
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_device_end_settle((s1f_device_end *)end, "connecting", -1));
    return s1f_none_of(status, end->group);
}

S1F_METHOD_OF(device_end_close, edge_end, end)
{
    int closed;
    S1F_WITHOUT_GIL(closed = s1f_device_end_close(end));
    return PyBool_FromLong(closed);
}

static PyObject *make_end(PyObject *arguments, const s1f_mover *mover)
{
    s1f_edge_end *control;
    s1f_watchdog *watchdog;
    s1f_device_end *end = NULL;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_edge_end, &control, s1f_to_watchdog, &watchdog))
        return NULL;
    s1f_status status = s1f_device_end_create(sizeof *end, mover, control, watchdog, &end);
    return s1f_new_edge_end(status, end, arguments);
}

static PyObject *copy_end(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return make_end(arguments, &s1f_copy_mover);
}

static PyObject *host_end(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return make_end(arguments, &s1f_host_mover);
}

static PyObject *edge_end_text(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    return s1f_to_edge_end(handle, &end) ? PyUnicode_FromString(end->text) : NULL;
}

/* -- proofs -------------------------------------------------------------------------------------------------------- */

S1F_METHOD_OF_NUMBER(edge_proof_post, edge_end, end, bytes)
{
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_edge_proof_post(end, bytes));
    return s1f_none_of(status, end->group);
}

static PyObject *edge_proof_send(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    const void *data;
    int64_t bytes, ns;
    s1f_status status;
    if (!PyArg_ParseTuple(arguments, "O&O&O&", s1f_to_edge_end, &end, s1f_to_address, &data, s1f_to_int64, &bytes))
        return NULL;
    S1F_WITHOUT_GIL(status = s1f_edge_proof_send(end, data, bytes, &ns));
    return status == S1F_OK ? PyFloat_FromDouble((double)ns * 1e-9) : s1f_raise_for_group(status, end->group);
}

S1F_METHOD_OF_NUMBER(edge_proof_receive, edge_end, end, bytes)
{
    const void *data;
    int64_t ns;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_edge_proof_receive(end, bytes, &data, &ns));
    return status == S1F_OK ? Py_BuildValue("Nd", PyLong_FromVoidPtr((void *)(uintptr_t)data), (double)ns * 1e-9)
                            : s1f_raise_for_group(status, end->group);
}

S1F_METHOD_OF(edge_proof_give_up, edge_end, end)
{
    int idle;
    S1F_WITHOUT_GIL(idle = s1f_edge_proof_give_up(end));
    return PyBool_FromLong(idle);
}

S1F_METHOD_OF(edge_proof_end, edge_end, end)
{
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_edge_proof_end(end));
    return s1f_none(status);
}

PyMethodDef s1f_device_methods[] = {
    S1F_METHOD(
        device_create, VARARGS,
        "A GPU by the CUDA driver's library; None: the system's. make_room: gives back memory of it, where that is "
        "short, and returns how many bytes of others' stay free."),
    S1F_METHOD(device_begin_step, VARARGS, "The CUstream on which the next step's units compute."),
    S1F_METHOD(device_restart_unit, O, "The unit that runs begins only now."),
    S1F_METHOD(device_end_unit, O, "All work of the unit has been started."),
    S1F_METHOD(watchdog_create, VARARGS,
               "A thread that looks after the rank's transfers, of which each end proves itself first."),
    S1F_METHOD(nccl_find, VARARGS,
               "(version, path) of NCCL; None: the copy that the process has loaded, or the loader's."),
    S1F_METHOD(nccl_unique_id, VARARGS, "128 bytes for one communicator."),
    S1F_METHOD(nccl_end, VARARGS, "An end that moves messages by a communicator of its own."),
    S1F_METHOD(copy_end, VARARGS, "An end whose sender's copy engine writes into the receiver's memory."),
    S1F_METHOD(host_end, VARARGS, "An end whose messages go through pageable host memory, over its control edge."),
    S1F_METHOD(device_end_connect, O, "Waits for the peer's end."),
    S1F_METHOD(edge_end_text, O, "Names the edge in errors."),
    S1F_METHOD(edge_proof_post, VARARGS, "At the receiver."),
    S1F_METHOD(edge_proof_send, VARARGS, "Sends bytes of the GPU; seconds."),
    S1F_METHOD(edge_proof_receive, VARARGS, "(address of the bytes that have come, seconds)."),
    S1F_METHOD(edge_proof_give_up, O, "Aborts what is under way; whether that has ended."),
    S1F_METHOD(edge_proof_end, O, "What fails from here on ends the step; gives back memory, the sender's end first."),
    S1F_METHOD(device_end_close, O,
               "Tensors that lie in its memory stay valid. False: its transfers do not end, so it keeps all memory."),
    {NULL, NULL, 0, NULL}};
