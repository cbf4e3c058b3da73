/* edges.c - conversions for the ends of edges: making them, moving messages, tensors over places.
 *
 * An end's handle keeps the arguments that it was made from, and with them what it borrows: group, mapping, relay. A
 * tensor over a place keeps the end's handle, so memory goes away with the last tensor that reads it. */
#include "binding.h"

#include "../run/arena.h"
#include "../run/p2p.h"

#include <stdlib.h>
#include <string.h>

/* -- ends ---------------------------------------------------------------------------------------------------------- */

/* A relay in Python: context is an object with a method for each event. */
static s1f_status python_relay(void *context, const char *event, int64_t number, void *place, int64_t bytes)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result =
        PyObject_CallMethod(context, event, "LNL", (long long)number, PyLong_FromVoidPtr(place), (long long)bytes);
    s1f_status status = result == NULL ? S1F_ERR_PYTHON : S1F_OK;
    Py_XDECREF(result);
    PyGILState_Release(state);
    return status;
}

S1F_METHOD(PyObject *, arena_end, s1f_group *, group, s1f_mapping *, mapping, int32_t, hangup_fd, int32_t, peer_rank,
           bool, is_receiver, const char *, text, PyObject *, relay)
{
    s1f_edge_end *end = NULL;
    s1f_status status =
        s1f_arena_end_create(group, mapping->memory, mapping->bytes, hangup_fd, peer_rank, is_receiver, text, &end);
    if (status == S1F_OK && relay != Py_None)
        s1f_arena_use_relay(end, python_relay, relay);
    return s1f_new_edge_end(status, end, arguments);
}

S1F_CORE_VOID(void, relay_done, s1f_edge_end *, end, int64_t, step, int64_t, sequence)
S1F_CORE_WAITS(s1f_status, relay_flush, s1f_edge_end *, end)

S1F_METHOD(PyObject *, message_head, void *, place)
{
    const s1f_message *message = place;
    int64_t bytes = s1f_message_payload_bytes(place);
    return Py_BuildValue("Li", (long long)bytes, bytes >= 0 && message->training != 0);
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

S1F_METHOD(PyObject *, place_tensor_capsule, PyObject *, owner, void *, address, int32_t, dtype, s1f_int64s, sizes,
           int32_t, gpu)
{
    if (dtype < 0 || dtype >= S1F_NUM_DTYPES || sizes.count > S1F_MAX_DIMS)
        return PyErr_Format(PyExc_ValueError, "dtype code %d with %lld dimensions (at most %d)", dtype,
                            (long long)sizes.count, (int)S1F_MAX_DIMS);
    place_tensor *made = calloc(1, sizeof *made);
    if (made == NULL)
        return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(&made->managed, "dltensor", unused_place_tensor);
    if (capsule == NULL) {
        free(made);
        return NULL;
    }
    if (sizes.count > 0)
        memcpy(made->sizes, sizes.values, (size_t)sizes.count * sizeof *made->sizes);
    made->managed.context = Py_NewRef(owner);
    made->managed.deleter = place_tensor_delete;
    made->managed.tensor = (dl_tensor){.data = address,
                                       .device_type = gpu < 0 ? DL_CPU : DL_CUDA,
                                       .device_id = gpu < 0 ? 0 : gpu,
                                       .ndim = (int32_t)sizes.count,
                                       .type_code = dl_types[dtype].code,
                                       .type_bits = dl_types[dtype].bits,
                                       .type_lanes = 1,
                                       .shape = made->sizes};
    return capsule;
}

PyMethodDef s1f_edge_methods[] = {
    S1F_ROW(arena_end, "An end of an edge that both ranks map, or whose messages a Python object moves."),
    S1F_ROW(relay_done, "A message has come, or has gone."),
    S1F_ROW(relay_flush, "Waits until every message has gone."),
    S1F_ROW(message_head,
            "-> tuple[int, int]: bytes after the header, -1 if there is no message; whether of a training step."),
    S1F_ROW(place_tensor_capsule,
            "DLPack capsule of a tensor that keeps owner alive, on the CPU (gpu -1) or on a GPU."),
    {NULL, NULL, 0, NULL}};
