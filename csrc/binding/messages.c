/* messages.c - what units hand to each other, between Python's tensors and the headers of messages. */
#include "messages.h"

#include <string.h>

struct s1f_place_views {
    int32_t num_tensors;
    s1f_tensor_header tensors[S1F_MAX_TENSORS];
    const void *payload; /* memory on a GPU may have grown */
    PyObject *views;     /* (message,): the argument of a unit of one message */
};

void s1f_messages_free(s1f_messages *messages)
{
    for (int32_t edge = 0; messages->views != NULL && edge < messages->num_edges; edge++)
        for (int32_t place = 0; messages->views[edge] != NULL && place < messages->edges[edge].num_places; place++)
            Py_XDECREF(messages->views[edge][place].views);
    s1f_pool_free(&messages->pool);
}

int s1f_messages_create(s1f_messages *messages)
{
    s1f_pool *pool = &messages->pool;
    messages->views = s1f_pool_take(pool, (size_t)messages->num_edges, sizeof *messages->views);
    for (int32_t edge = 0; !pool->is_short && edge < messages->num_edges; edge++)
        messages->views[edge] = s1f_pool_take(pool, (size_t)messages->edges[edge].num_places, sizeof **messages->views);
    if (pool->is_short)
        PyErr_NoMemory();
    return !pool->is_short;
}

/* -- received ------------------------------------------------------------------------------------------------------ */

/* (dtype code, flags, sizes, offset in the payload) */
static PyObject *tensor_item(const void *tensors, int64_t i)
{
    const s1f_tensor_header *tensor = (const s1f_tensor_header *)tensors + i;
    return Py_BuildValue("(iiNL)", (int)tensor->dtype, (int)tensor->flags,
                         s1f_tuple_of(tensor->ndim, s1f_int64_item, tensor->sizes), (long long)tensor->offset);
}

/* Borrowed from the place. */
static PyObject *views_of(s1f_messages *messages, const s1f_input *input)
{
    const s1f_message *message = input->message;
    s1f_place_views *cached = &messages->views[input->edge][input->place];
    size_t bytes = (size_t)message->num_tensors * sizeof *message->tensors;
    if (cached->views != NULL && cached->payload == input->payload && cached->num_tensors == message->num_tensors &&
        memcmp(cached->tensors, message->tensors, bytes) == 0)
        return cached->views;
    PyObject *end = PyList_GetItem(messages->ends, input->edge);
    PyObject *made =
        PyObject_CallFunction(messages->make_views, "ONN", end, PyLong_FromVoidPtr((void *)(uintptr_t)input->payload),
                              s1f_tuple_of(message->num_tensors, tensor_item, message->tensors));
    PyObject *views = made == NULL ? NULL : Py_BuildValue("(N)", made);
    if (views == NULL)
        return NULL;
    Py_XDECREF(cached->views);
    cached->views = views;
    cached->payload = input->payload;
    cached->num_tensors = message->num_tensors;
    memcpy(cached->tensors, message->tensors, bytes);
    return views;
}

PyObject *s1f_messages_received(s1f_messages *messages, const s1f_input *inputs, int32_t num_inputs)
{
    if (num_inputs == 0)
        return Py_NewRef(Py_None);
    if (num_inputs == 1) /* the tuple is there already */
        return Py_XNewRef(views_of(messages, inputs));
    PyObject *all = PyTuple_New(num_inputs);
    for (int32_t i = 0; all != NULL && i < num_inputs; i++) {
        PyObject *views = views_of(messages, &inputs[i]);
        if (views == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SetItem(all, i, Py_NewRef(PyTuple_GetItem(views, 0)));
    }
    return all;
}

s1f_status s1f_messages_leave(s1f_messages *messages, int32_t edge, int32_t place)
{
    s1f_place_views *cached = &messages->views[edge][place];
    if (cached->views == NULL)
        return S1F_OK;
    PyObject *tensors = PyTuple_GetItem(PyTuple_GetItem(cached->views, 0), 0);
    PyObject *moved = PyObject_CallFunctionObjArgs(messages->leave, tensors, NULL);
    if (moved == NULL)
        return S1F_ERR_PYTHON;
    if (moved == Py_True)
        Py_CLEAR(cached->views);
    Py_DECREF(moved);
    return S1F_OK;
}

s1f_status s1f_messages_leave_all(s1f_messages *messages)
{
    for (int32_t edge = 0; edge < messages->num_edges; edge++)
        for (int32_t place = 0; place < messages->edges[edge].num_places; place++)
            S1F_TRY(s1f_messages_leave(messages, edge, place));
    return S1F_OK;
}

int s1f_messages_has_views(const s1f_messages *messages, int32_t edge, int32_t place)
{
    return messages->views[edge][place].views != NULL;
}

/* -- handed over --------------------------------------------------------------------------------------------------- */

static s1f_status describe_tensor(const s1f_messages *messages, PyObject *tensor, s1f_tensor_header *header,
                                  const void **data)
{
    if (tensor == Py_None) {
        header->flags = S1F_TENSOR_NONE;
        return S1F_OK;
    }
    s1f_status status = S1F_ERR_PYTHON;
    PyObject *dtype = NULL, *shape = NULL, *address = NULL, *requires_grad = NULL;
    if ((dtype = PyObject_GetAttrString(tensor, "dtype")) == NULL ||
        (shape = PyObject_GetAttrString(tensor, "shape")) == NULL ||
        (requires_grad = PyObject_GetAttrString(tensor, "requires_grad")) == NULL ||
        (address = PyObject_CallMethod(tensor, "data_ptr", NULL)) == NULL)
        goto done;
    PyObject *code = PyDict_GetItemWithError(messages->dtype_codes, dtype); /* borrowed */
    if (code == NULL) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "a stage cannot hand over a tensor of dtype %S", dtype);
        goto done;
    }
    Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim < 0 || ndim > S1F_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "a stage cannot hand over a tensor of %zd dimensions, at most %d", ndim,
                     (int)S1F_MAX_DIMS);
        goto done;
    }
    header->dtype = (int32_t)PyLong_AsLong(code);
    header->flags = requires_grad == Py_True ? S1F_TENSOR_REQUIRES_GRAD : 0;
    header->ndim = (int32_t)ndim;
    header->bytes = s1f_dtype_bytes(header->dtype);
    for (Py_ssize_t d = 0; d < ndim; d++) {
        header->sizes[d] = PyLong_AsLongLong(PyTuple_GetItem(shape, d));
        header->bytes *= header->sizes[d];
    }
    *data = PyLong_AsVoidPtr(address);
    if (*data == NULL && header->bytes > 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a stage cannot hand over a tensor without memory of its own");
    status = PyErr_Occurred() ? S1F_ERR_PYTHON : S1F_OK;
done:
    Py_XDECREF(address);
    Py_XDECREF(requires_grad);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return status;
}

s1f_status s1f_messages_describe(const s1f_messages *messages, PyObject *tensors, s1f_result *result)
{
    Py_ssize_t count = PyTuple_Size(tensors);
    if (count > S1F_MAX_TENSORS)
        PyErr_Format(PyExc_ValueError, "a stage hands over at most %d tensors, got %zd", (int)S1F_MAX_TENSORS, count);
    if (count < 0 || count > S1F_MAX_TENSORS)
        return S1F_ERR_PYTHON;
    result->num_tensors = (int32_t)count;
    for (Py_ssize_t i = 0; i < count; i++)
        S1F_TRY(describe_tensor(messages, PyTuple_GetItem(tensors, i), &result->tensors[i], &result->data[i]));
    result->keep = tensors;
    return S1F_OK;
}
