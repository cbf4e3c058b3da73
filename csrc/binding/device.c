/* device.c - conversions for edges between GPUs: devices, watchdogs, NCCL and the ends.
 *
 * A capsule keeps what its handle borrows: a watchdog its group and device, an end its control edge and watchdog. */
#include "binding.h"

#include "../device/copy_end.h"
#include "../device/nccl_end.h"
#include "../run/executor.h"

#include <string.h>

#define CAPSULE_WATCHDOG "seq1f1b.watchdog"

static void drop_context(PyObject *capsule)
{
    PyObject *kept = PyCapsule_GetContext(capsule);
    Py_XDECREF(kept);
}

static void device_destructor(PyObject *capsule)
{
    s1f_device_free(PyCapsule_GetPointer(capsule, S1F_CAPSULE_DEVICE));
}

static void watchdog_destructor(PyObject *capsule)
{
    s1f_watchdog *watchdog = PyCapsule_GetPointer(capsule, CAPSULE_WATCHDOG);
    Py_BEGIN_ALLOW_THREADS /* it joins a thread */
    s1f_watchdog_free(watchdog);
    Py_END_ALLOW_THREADS
    drop_context(capsule);
}

static void end_destructor(PyObject *capsule)
{
    s1f_edge_end *end = PyCapsule_GetPointer(capsule, S1F_CAPSULE_EDGE_END);
    Py_BEGIN_ALLOW_THREADS /* it waits a while for transfers that are under way */
    s1f_edge_end_free(end);
    Py_END_ALLOW_THREADS
    drop_context(capsule);
}

/* A capsule that keeps two others. On an error the handle is the caller's. */
static PyObject *wrap(void *handle, const char *name, PyCapsule_Destructor destroy, PyObject *first, PyObject *second)
{
    PyObject *kept = PyTuple_Pack(2, first, second);
    PyObject *capsule = kept == NULL ? NULL : PyCapsule_New(handle, name, destroy);
    if (capsule == NULL) {
        Py_XDECREF(kept);
        return NULL;
    }
    PyCapsule_SetContext(capsule, kept);
    return capsule;
}

static PyObject *device_create(PyObject *module, PyObject *arguments)
{
    (void)module;
    const char *path;
    int ordinal;
    if (!PyArg_ParseTuple(arguments, "zi", &path, &ordinal))
        return NULL;
    s1f_device *device;
    s1f_status status = s1f_device_create(path, ordinal, &device);
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *capsule = PyCapsule_New(device, S1F_CAPSULE_DEVICE, device_destructor);
    if (capsule == NULL)
        s1f_device_free(device);
    return capsule;
}

static PyObject *device_begin_step(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    unsigned long long stream;
    if (!PyArg_ParseTuple(arguments, "OK", &capsule, &stream))
        return NULL;
    s1f_device *device = s1f_from_capsule(capsule, S1F_CAPSULE_DEVICE);
    if (device == NULL)
        return NULL;
    s1f_device_begin_step(device, (s1f_cu_stream)(uintptr_t)stream);
    Py_RETURN_NONE;
}

static PyObject *device_free_bytes(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_device *device = s1f_from_capsule(capsule, S1F_CAPSULE_DEVICE);
    int64_t bytes;
    if (device == NULL)
        return NULL;
    s1f_status status = s1f_device_free_bytes(device, &bytes);
    return status == S1F_OK ? PyLong_FromLongLong(bytes) : s1f_raise(status);
}

static PyObject *watchdog_create(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *group_capsule, *device_capsule;
    double timeout_s;
    if (!PyArg_ParseTuple(arguments, "OOd", &group_capsule, &device_capsule, &timeout_s))
        return NULL;
    s1f_group *group = s1f_from_capsule(group_capsule, S1F_CAPSULE_GROUP);
    s1f_device *device = group == NULL ? NULL : s1f_from_capsule(device_capsule, S1F_CAPSULE_DEVICE);
    if (device == NULL)
        return NULL;
    s1f_watchdog *watchdog;
    s1f_status status = s1f_watchdog_create(group, device, (int64_t)(timeout_s * 1e9), &watchdog);
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *capsule = wrap(watchdog, CAPSULE_WATCHDOG, watchdog_destructor, group_capsule, device_capsule);
    if (capsule == NULL)
        s1f_watchdog_free(watchdog);
    return capsule;
}

static PyObject *watchdog_set_timeout(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    double timeout_s;
    if (!PyArg_ParseTuple(arguments, "Od", &capsule, &timeout_s))
        return NULL;
    s1f_watchdog *watchdog = s1f_from_capsule(capsule, CAPSULE_WATCHDOG);
    if (watchdog == NULL)
        return NULL;
    s1f_watchdog_set_timeout(watchdog, (int64_t)(timeout_s * 1e9));
    Py_RETURN_NONE;
}

static PyObject *nccl_find(PyObject *module, PyObject *arguments)
{
    (void)module;
    const char *path;
    if (!PyArg_ParseTuple(arguments, "z", &path))
        return NULL;
    const s1f_nccl *nccl;
    s1f_status status = s1f_nccl_load(path, &nccl);
    return status == S1F_OK ? Py_BuildValue("(is)", (int)nccl->version, nccl->path) : s1f_raise(status);
}

static PyObject *nccl_unique_id(PyObject *module, PyObject *arguments)
{
    (void)module;
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

static PyObject *wrap_end(s1f_status status, s1f_edge_end *end, PyObject *control, PyObject *watchdog)
{
    if (status != S1F_OK)
        return s1f_raise(status);
    PyObject *capsule = wrap(end, S1F_CAPSULE_EDGE_END, end_destructor, control, watchdog);
    if (capsule == NULL)
        s1f_edge_end_free(end);
    return capsule;
}

static PyObject *nccl_end(PyObject *module, PyObject *arguments)
{
    (void)module;
    const char *path, *bytes;
    Py_ssize_t num_bytes;
    PyObject *control_capsule, *watchdog_capsule;
    if (!PyArg_ParseTuple(arguments, "zy#OO", &path, &bytes, &num_bytes, &control_capsule, &watchdog_capsule))
        return NULL;
    if (num_bytes != S1F_NCCL_UNIQUE_ID_BYTES)
        return PyErr_Format(PyExc_ValueError, "an id of NCCL has %d bytes, got %zd", (int)S1F_NCCL_UNIQUE_ID_BYTES,
                            num_bytes);
    s1f_edge_end *control = s1f_from_capsule(control_capsule, S1F_CAPSULE_EDGE_END);
    s1f_watchdog *watchdog = control == NULL ? NULL : s1f_from_capsule(watchdog_capsule, CAPSULE_WATCHDOG);
    if (watchdog == NULL)
        return NULL;
    s1f_nccl_id id;
    memcpy(id.bytes, bytes, sizeof id.bytes);
    const s1f_nccl *nccl;
    s1f_edge_end *end = NULL;
    s1f_status status = s1f_nccl_load(path, &nccl);
    if (status == S1F_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = s1f_nccl_end_create(nccl, &id, control, watchdog, &end);
        Py_END_ALLOW_THREADS
    }
    return wrap_end(status, end, control_capsule, watchdog_capsule);
}

static PyObject *nccl_connect(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_edge_end *end = s1f_from_capsule(capsule, S1F_CAPSULE_EDGE_END);
    if (end == NULL)
        return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_nccl_end_connect(end);
    Py_END_ALLOW_THREADS
    if (status != S1F_OK)
        return s1f_raise_for_group(status, end->group);
    Py_RETURN_NONE;
}

static PyObject *nccl_leave(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_edge_end *end = s1f_from_capsule(capsule, S1F_CAPSULE_EDGE_END);
    if (end == NULL)
        return NULL;
    s1f_nccl_end_leave(end);
    Py_RETURN_NONE;
}

static PyObject *device_end_close(PyObject *module, PyObject *capsule)
{
    (void)module;
    s1f_edge_end *end = s1f_from_capsule(capsule, S1F_CAPSULE_EDGE_END);
    if (end == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s1f_device_end_close(end);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *copy_end(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *control_capsule, *watchdog_capsule;
    int in_process;
    if (!PyArg_ParseTuple(arguments, "OOp", &control_capsule, &watchdog_capsule, &in_process))
        return NULL;
    s1f_edge_end *control = s1f_from_capsule(control_capsule, S1F_CAPSULE_EDGE_END);
    s1f_watchdog *watchdog = control == NULL ? NULL : s1f_from_capsule(watchdog_capsule, CAPSULE_WATCHDOG);
    if (watchdog == NULL)
        return NULL;
    s1f_edge_end *end = NULL;
    s1f_status status = s1f_copy_end_create(control, watchdog, in_process, &end);
    return wrap_end(status, end, control_capsule, watchdog_capsule);
}

PyMethodDef s1f_device_methods[] = {
    {"device_create", device_create, METH_VARARGS,
     "device_create(driver_path, ordinal): a GPU by the CUDA driver's library; None: the system's."},
    {"device_begin_step", device_begin_step, METH_VARARGS,
     "device_begin_step(device, stream): the CUstream on which the next step's units compute."},
    {"device_free_bytes", device_free_bytes, METH_O, "device_free_bytes(device): free memory of the GPU."},
    {"watchdog_create", watchdog_create, METH_VARARGS,
     "watchdog_create(group, device, timeout_s): a thread that looks after the rank's transfers."},
    {"watchdog_set_timeout", watchdog_set_timeout, METH_VARARGS, "watchdog_set_timeout(watchdog, timeout_s)"},
    {"nccl_find", nccl_find, METH_VARARGS,
     "nccl_find(path): (version, path) of NCCL; None: the copy that the process has loaded, or the loader's."},
    {"nccl_unique_id", nccl_unique_id, METH_VARARGS, "nccl_unique_id(path): 128 bytes for one communicator."},
    {"nccl_end", nccl_end, METH_VARARGS,
     "nccl_end(path, id, control, watchdog): an end of an edge between GPUs; then nccl_connect."},
    {"nccl_connect", nccl_connect, METH_O, "nccl_connect(end): waits for its communicator, and so for the peer."},
    {"nccl_leave", nccl_leave, METH_O, "nccl_leave(end): starts to end its communicator; before any end is dropped."},
    {"copy_end", copy_end, METH_VARARGS,
     "copy_end(control, watchdog, in_process): an end whose sender's copy engine writes into the receiver's memory."},
    {"device_end_close", device_end_close, METH_O,
     "device_end_close(end): ends its transfers; tensors that lie in its memory stay valid."},
    {NULL, NULL, 0, NULL},
};
