/* device.c - conversions for GPUs and the edges between them: devices, watchdogs, NCCL and the ends.
 *
 * A handle keeps the arguments that it was made from, and with them what it borrows: a watchdog its group and device,
 * an end its control edge and watchdog. */
#include "binding.h"

#include "../device/device_end.h"
#include "../run/executor.h"

#include <string.h>

static void make_room(void *function)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *none = PyObject_CallNoArgs(function);
    if (none == NULL)
        PyErr_WriteUnraisable(function);
    Py_XDECREF(none);
    PyGILState_Release(state);
}

S1F_METHOD(PyObject *, device_create, s1f_path, driver, int32_t, ordinal, PyObject *, make_room_of)
{
    s1f_device *device = NULL;
    s1f_status status = s1f_device_create(driver.text, ordinal, &device);
    if (status == S1F_OK && make_room_of != Py_None) {
        device->make_room = make_room;
        device->room_context = make_room_of;
    }
    return s1f_new_device(status, device, arguments);
}

S1F_CORE(s1f_status, device_begin_step, s1f_device *, device, void *, stream)
S1F_CORE(s1f_status, device_restart_unit, s1f_device *, device)
S1F_CORE(s1f_status, device_end_unit, s1f_device *, device)

S1F_METHOD(PyObject *, watchdog_create, s1f_group *, group, s1f_device *, device, double, proof_s)
{
    s1f_watchdog *watchdog = NULL;
    s1f_status status = s1f_watchdog_create(group, device, (int64_t)(proof_s * 1e9), &watchdog);
    return s1f_new_watchdog(status, watchdog, arguments);
}

S1F_METHOD(PyObject *, nccl_find, s1f_path, path)
{
    const s1f_nccl *nccl;
    s1f_status status = s1f_nccl_load(path.text, &nccl);
    return status == S1F_OK ? Py_BuildValue("(is)", (int)nccl->version, nccl->path) : s1f_raise(status);
}

S1F_METHOD(PyObject *, nccl_unique_id, s1f_path, path)
{
    const s1f_nccl *nccl;
    s1f_nccl_id id;
    s1f_status status = s1f_nccl_load(path.text, &nccl);
    if (status == S1F_OK)
        status = s1f_nccl_status(nccl, nccl->get_unique_id(&id), NULL, "ncclGetUniqueId");
    return status == S1F_OK ? PyBytes_FromStringAndSize(id.bytes, sizeof id.bytes) : s1f_raise(status);
}

S1F_METHOD(PyObject *, nccl_end, s1f_path, path, s1f_bytes, unique_id, s1f_edge_end *, control, s1f_watchdog *,
           watchdog)
{
    s1f_nccl_id id;
    if (unique_id.count != S1F_NCCL_UNIQUE_ID_BYTES)
        return PyErr_Format(PyExc_ValueError, "an id of NCCL has %d bytes, got %lld", (int)S1F_NCCL_UNIQUE_ID_BYTES,
                            (long long)unique_id.count);
    memcpy(id.bytes, unique_id.values, sizeof id.bytes);
    const s1f_nccl *nccl;
    s1f_edge_end *end = NULL;
    s1f_status status = s1f_nccl_load(path.text, &nccl);
    if (status == S1F_OK) {
        S1F_WITHOUT_GIL(status = s1f_nccl_end_create(nccl, &id, control, watchdog, &end));
    }
    return s1f_new_edge_end(status, end, arguments);
}

S1F_METHOD(s1f_status, device_end_connect, s1f_edge_end *, end)
{
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_device_end_settle((s1f_device_end *)end, "connecting", -1));
    return status;
}

S1F_CORE_WAITS(bool, device_end_close, s1f_edge_end *, end)

S1F_METHOD(PyObject *, copy_end, s1f_edge_end *, control, s1f_watchdog *, watchdog)
{
    s1f_device_end *end = NULL;
    s1f_status status = s1f_device_end_create(sizeof *end, &s1f_copy_mover, control, watchdog, &end);
    return s1f_new_edge_end(status, end, arguments);
}

S1F_METHOD(const char *, edge_end_text, s1f_edge_end *, end)
{
    return end->text;
}

/* -- proofs -------------------------------------------------------------------------------------------------------- */

S1F_CORE_WAITS(s1f_status, edge_proof_post, s1f_edge_end *, end, int64_t, bytes)

S1F_METHOD(PyObject *, edge_proof_send, s1f_edge_end *, end, void *, data, int64_t, bytes)
{
    int64_t ns;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_edge_proof_send(end, data, bytes, &ns));
    return status == S1F_OK ? PyFloat_FromDouble((double)ns * 1e-9) : s1f_raise(status);
}

S1F_METHOD(PyObject *, edge_proof_receive, s1f_edge_end *, end)
{
    const void *data;
    int64_t ns;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_edge_proof_receive(end, &data, &ns));
    return status == S1F_OK ? Py_BuildValue("Nd", PyLong_FromVoidPtr((void *)(uintptr_t)data), (double)ns * 1e-9)
                            : s1f_raise(status);
}

S1F_CORE_WAITS(s1f_status, edge_proof_end, s1f_edge_end *, end)

PyMethodDef s1f_device_methods[] = {
    S1F_ROW(device_create,
            "A GPU by the CUDA driver's library; None: the system's. make_room_of: gives back memory of it, where "
            "that is short."),
    S1F_ROW(device_begin_step, "The CUstream on which the next step's units compute."),
    S1F_ROW(device_restart_unit, "The unit that runs begins only now."),
    S1F_ROW(device_end_unit, "All work of the unit has been started."),
    S1F_ROW(watchdog_create, "A thread that looks after the rank's transfers, of which each end proves itself first."),
    S1F_ROW(nccl_find,
            "-> tuple[int, str]: version and path of NCCL; None: the copy that the process has loaded, or the "
            "loader's."),
    S1F_ROW(nccl_unique_id, "-> bytes: 128 for one communicator."),
    S1F_ROW(nccl_end, "An end that moves messages by a communicator of its own."),
    S1F_ROW(copy_end, "An end whose sender's copy engine writes into the receiver's memory."),
    S1F_ROW(device_end_connect, "Waits for the peer's end."),
    S1F_ROW(edge_end_text, "Names the edge in errors."),
    S1F_ROW(edge_proof_post, "At the receiver."),
    S1F_ROW(edge_proof_send, "-> float: sends bytes of the GPU; seconds."),
    S1F_ROW(edge_proof_receive, "-> tuple[int, float]: address of the bytes that have come, seconds."),
    S1F_ROW(edge_proof_end, "What fails from here on ends the step; gives back memory, the sender's end first."),
    S1F_ROW(device_end_close,
            "Tensors that lie in its memory stay valid. False: its transfers do not end, so it keeps all memory."),
    {NULL, NULL, 0, NULL}};
