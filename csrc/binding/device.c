/* device.c - conversions for GPUs and the edges between them: devices, watchdogs, NCCL and the ends.
 *
 * A handle keeps the arguments that it was made from, and with them what it borrows: a watchdog its group and device,
 * an end its control edge and watchdog. */
#include "binding.h"

#include "../device/copy_end.h"
#include "../device/edge_proof.h"
#include "../device/host_end.h"
#include "../device/nccl_end.h"
#include "../device/staging_end.h"
#include "../run/executor.h"

#include <string.h>

static PyObject *device_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *path;
    int ordinal;
    if (!PyArg_ParseTuple(arguments, "zi", &path, &ordinal))
        return NULL;
    s1f_device *device = NULL;
    s1f_status status = s1f_device_create(path, ordinal, &device);
    return s1f_new_device(status, device, NULL);
}

static PyObject *device_begin_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_device *device;
    s1f_cu_stream stream;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_device, &device, s1f_to_address, &stream))
        return NULL;
    s1f_status status = s1f_device_begin_step(device, stream);
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

static PyObject *device_restart_unit(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_device *device;
    if (!s1f_to_device(handle, &device))
        return NULL;
    s1f_status status = s1f_device_restart_unit(device);
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

static PyObject *device_end_unit(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_device *device;
    if (!s1f_to_device(handle, &device))
        return NULL;
    s1f_status status = s1f_device_end_unit(device);
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

static PyObject *device_free_bytes(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_device *device;
    int64_t bytes;
    if (!s1f_to_device(handle, &device))
        return NULL;
    s1f_status status = s1f_device_free_bytes(device, &bytes);
    return status == S1F_OK ? PyLong_FromLongLong(bytes) : s1f_raise(status);
}

static PyObject *watchdog_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    s1f_device *device;
    double timeout_s;
    if (!PyArg_ParseTuple(arguments, "O&O&d", s1f_to_group, &group, s1f_to_device, &device, &timeout_s))
        return NULL;
    s1f_watchdog *watchdog = NULL;
    s1f_status status = s1f_watchdog_create(group, device, (int64_t)(timeout_s * 1e9), &watchdog);
    return s1f_new_watchdog(status, watchdog, arguments);
}

static PyObject *watchdog_set_timeout(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_watchdog *watchdog;
    double timeout_s;
    if (!PyArg_ParseTuple(arguments, "O&d", s1f_to_watchdog, &watchdog, &timeout_s))
        return NULL;
    s1f_watchdog_set_timeout(watchdog, (int64_t)(timeout_s * 1e9));
    Py_RETURN_NONE;
}

static PyObject *watchdog_prove(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_watchdog *watchdog;
    double limit_s;
    if (!PyArg_ParseTuple(arguments, "O&d", s1f_to_watchdog, &watchdog, &limit_s))
        return NULL;
    s1f_watchdog_prove(watchdog, (int64_t)(limit_s * 1e9));
    Py_RETURN_NONE;
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
        Py_BEGIN_ALLOW_THREADS
        status = s1f_nccl_end_create(nccl, &id, control, watchdog, &end);
        Py_END_ALLOW_THREADS
    }
    return s1f_new_edge_end(status, end, arguments);
}

static PyObject *nccl_connect(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    s1f_status status;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_nccl_end_connect(end);
    Py_END_ALLOW_THREADS
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise_for_group(status, end->group);
}

static PyObject *nccl_leave(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    s1f_nccl_end_leave(end);
    Py_RETURN_NONE;
}

static PyObject *device_end_close(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s1f_device_end_close(end);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *copy_end(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *control, *end = NULL;
    s1f_watchdog *watchdog;
    int in_process;
    if (!PyArg_ParseTuple(arguments, "O&O&p", s1f_to_edge_end, &control, s1f_to_watchdog, &watchdog, &in_process))
        return NULL;
    s1f_status status = s1f_copy_end_create(control, watchdog, in_process, &end);
    return s1f_new_edge_end(status, end, arguments);
}

static PyObject *host_end(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *control, *end = NULL;
    s1f_watchdog *watchdog;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_edge_end, &control, s1f_to_watchdog, &watchdog))
        return NULL;
    s1f_status status = s1f_host_end_create(control, watchdog, &end);
    return s1f_new_edge_end(status, end, arguments);
}

static PyObject *staging_end(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *control, *ring, *end = NULL;
    s1f_watchdog *watchdog;
    if (!PyArg_ParseTuple(arguments, "O&O&O&", s1f_to_edge_end, &control, s1f_to_edge_end, &ring, s1f_to_watchdog,
                          &watchdog))
        return NULL;
    s1f_status status = s1f_staging_end_create(control, ring, watchdog, &end);
    return s1f_new_edge_end(status, end, arguments);
}

static PyObject *device_end_forget(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    s1f_status status;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_device_end_forget((s1f_device_end *)end);
    Py_END_ALLOW_THREADS
    return s1f_none(status);
}

static PyObject *edge_end_text(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    return s1f_to_edge_end(handle, &end) ? PyUnicode_FromString(end->text) : NULL;
}

/* -- proofs -------------------------------------------------------------------------------------------------------- */

static PyObject *edge_proof_begin(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    return s1f_none(s1f_edge_proof_begin(end));
}

static PyObject *edge_proof_post(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    int64_t sequence, bytes;
    s1f_status status;
    if (!PyArg_ParseTuple(arguments, "O&O&O&", s1f_to_edge_end, &end, s1f_to_int64, &sequence, s1f_to_int64, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_edge_proof_post(end, sequence, bytes);
    Py_END_ALLOW_THREADS
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise_for_group(status, end->group);
}

static PyObject *edge_proof_move(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    int64_t sequence, bytes, ns = 0;
    s1f_status status;
    if (!PyArg_ParseTuple(arguments, "O&O&O&", s1f_to_edge_end, &end, s1f_to_int64, &sequence, s1f_to_int64, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = end->is_receiver ? s1f_edge_proof_receive(end, sequence, bytes, &ns)
                              : s1f_edge_proof_send(end, sequence, bytes, &ns);
    Py_END_ALLOW_THREADS
    return status == S1F_OK ? PyFloat_FromDouble((double)ns * 1e-9) : s1f_raise_for_group(status, end->group);
}

static PyObject *edge_proof_give_up(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    int idle;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    idle = s1f_edge_proof_give_up(end);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(idle);
}

static PyObject *edge_proof_end(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_edge_end *end;
    if (!s1f_to_edge_end(handle, &end))
        return NULL;
    s1f_edge_proof_end(end);
    Py_RETURN_NONE;
}

PyMethodDef s1f_device_methods[] = {
    {"device_create", device_create, METH_VARARGS,
     "device_create(driver_path, ordinal): a GPU by the CUDA driver's library; None: the system's."},
    {"device_begin_step", device_begin_step, METH_VARARGS,
     "device_begin_step(device, stream): the CUstream on which the next step's units compute."},
    {"device_restart_unit", device_restart_unit, METH_O,
     "device_restart_unit(device): the unit that runs begins only now."},
    {"device_end_unit", device_end_unit, METH_O, "device_end_unit(device): all work of the unit has been started."},
    {"device_free_bytes", device_free_bytes, METH_O, "device_free_bytes(device): free memory of the GPU."},
    {"watchdog_create", watchdog_create, METH_VARARGS,
     "watchdog_create(group, device, timeout_s): a thread that looks after the rank's transfers."},
    {"watchdog_set_timeout", watchdog_set_timeout, METH_VARARGS, "watchdog_set_timeout(watchdog, timeout_s)"},
    {"watchdog_prove", watchdog_prove, METH_VARARGS,
     "watchdog_prove(watchdog, limit_s): ends that are made now prove themselves, each call in so long; 0: no more."},
    {"nccl_find", nccl_find, METH_VARARGS,
     "nccl_find(path): (version, path) of NCCL; None: the copy that the process has loaded, or the loader's."},
    {"nccl_unique_id", nccl_unique_id, METH_VARARGS, "nccl_unique_id(path): 128 bytes for one communicator."},
    {"nccl_end", nccl_end, METH_VARARGS,
     "nccl_end(path, id, control, watchdog): an end of an edge between GPUs; then nccl_connect."},
    {"nccl_connect", nccl_connect, METH_O, "nccl_connect(end): waits for its communicator, and so for the peer."},
    {"nccl_leave", nccl_leave, METH_O, "nccl_leave(end): starts to end its communicator; before any end is dropped."},
    {"copy_end", copy_end, METH_VARARGS,
     "copy_end(control, watchdog, in_process): an end whose sender's copy engine writes into the receiver's memory."},
    {"host_end", host_end, METH_VARARGS,
     "host_end(control, watchdog): an end whose messages go through pageable host memory, over its control edge."},
    {"staging_end", staging_end, METH_VARARGS,
     "staging_end(control, ring, watchdog): an end whose messages go through pinned memory, the ring's."},
    {"device_end_forget", device_end_forget, METH_O,
     "device_end_forget(end): gives back the memory of its places; the sender's end goes first."},
    {"edge_end_text", edge_end_text, METH_O, "edge_end_text(end): names the edge in errors."},
    {"edge_proof_begin", edge_proof_begin, METH_O, "edge_proof_begin(end): an end that proves itself enters the step."},
    {"edge_proof_post", edge_proof_post, METH_VARARGS, "edge_proof_post(end, sequence, bytes): at the receiver."},
    {"edge_proof_move", edge_proof_move, METH_VARARGS,
     "edge_proof_move(end, sequence, bytes): sends known bytes, or receives and compares them; seconds."},
    {"edge_proof_give_up", edge_proof_give_up, METH_O,
     "edge_proof_give_up(end): aborts what is under way; whether that has ended."},
    {"edge_proof_end", edge_proof_end, METH_O, "edge_proof_end(end): what fails from here on ends the step."},
    {"device_end_close", device_end_close, METH_O,
     "device_end_close(end): ends its transfers; tensors that lie in its memory stay valid."},
    {NULL, NULL, 0, NULL},
};
