/* partition.c - conversions for the partition room. */
#include "../core/partition.h"
#include "binding.h"

/* "O&" converter: an integer that fits in 64 bits, else ValueError (TypeError where it is no integer). */
static int to_int64(PyObject *object, void *out)
{
    PyObject *index = PyNumber_Index(object);
    if (index == NULL)
        return 0;
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow)
        PyErr_Format(PyExc_ValueError, "%S does not fit in 64 bits", index);
    Py_DECREF(index);
    if (overflow || (value == -1 && PyErr_Occurred()))
        return 0;
    *(int64_t *)out = value;
    return 1;
}

/* As to_int64, for counts: what does not fit in 32 bits becomes the nearest that does, which the core refuses. */
static int to_count(PyObject *object, void *out)
{
    int64_t value;
    if (!to_int64(object, &value))
        return 0;
    *(int32_t *)out = value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : (int32_t)value;
    return 1;
}

static PyObject *list_of(const int64_t *values, int32_t count)
{
    PyObject *list = PyList_New(count);
    for (int32_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyLong_FromLongLong(values[i]);
        if (item == NULL || PyList_SetItem(list, i, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Room for the sizes; a count that the core will refuse gets room for one. */
static int64_t *sizes_alloc(int64_t seq_len, int32_t num_segments)
{
    int64_t count = num_segments < 1 || num_segments > seq_len ? 1 : num_segments;
    int64_t *sizes = PyMem_Malloc((size_t)count * sizeof *sizes);
    if (sizes == NULL)
        PyErr_NoMemory();
    return sizes;
}

static PyObject *finish_sizes(s1f_status status, int64_t *sizes, int32_t num_segments)
{
    PyObject *result = status == S1F_OK ? list_of(sizes, num_segments) : s1f_raise(status);
    PyMem_Free(sizes);
    return result;
}

PyDoc_STRVAR(partition_even_doc, "partition_even(seq_len, num_segments, multiple_of, /)\n--\n\n"
                                 "Sizes of equal length.");

static PyObject *partition_even(PyObject *module, PyObject *args)
{
    (void)module;
    int64_t seq_len, multiple_of;
    int32_t num_segments;
    if (!PyArg_ParseTuple(args, "O&O&O&", to_int64, &seq_len, to_count, &num_segments, to_int64, &multiple_of))
        return NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes == NULL)
        return NULL;
    return finish_sizes(s1f_partition_even(seq_len, num_segments, multiple_of, sizes), sizes, num_segments);
}

#define MODEL_FORMAT "(O&O&O&O&O&O&O&)"
#define MODEL_ARGUMENTS(model)                                                                                         \
    to_int64, &(model).hidden, to_int64, &(model).layers, to_int64, &(model).heads, to_int64, &(model).kv_heads,       \
        to_int64, &(model).ffn, to_int64, &(model).vocab, to_int64, &(model).head_dim

PyDoc_STRVAR(partition_flops_doc,
             "partition_flops(seq_len, num_segments, model, mix, multiple_of, /)\n--\n\n"
             "Sizes of equal FLOPs; model: hidden, layers, heads, kv_heads, ffn, vocab, head_dim.");

static PyObject *partition_flops(PyObject *module, PyObject *args)
{
    (void)module;
    int64_t seq_len, multiple_of;
    int32_t num_segments;
    s1f_model_shape model;
    double mix;
    if (!PyArg_ParseTuple(args, "O&O&" MODEL_FORMAT "dO&", to_int64, &seq_len, to_count, &num_segments,
                          MODEL_ARGUMENTS(model), &mix, to_int64, &multiple_of))
        return NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes == NULL)
        return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_partition_flops(seq_len, num_segments, &model, mix, multiple_of, sizes);
    Py_END_ALLOW_THREADS
    return finish_sizes(status, sizes, num_segments);
}

/* "O&" converter: a number. */
static int to_double(PyObject *object, void *out)
{
    double value = PyFloat_AsDouble(object);
    *(double *)out = value;
    return value != -1 || !PyErr_Occurred();
}

/* Copies a sequence of numbers, of `bytes` each, as the converter makes them. Returns NULL, with the exception set, or
 * what is the caller's (PyMem_Free). */
static void *copy_numbers(PyObject *numbers, size_t bytes, int (*convert)(PyObject *, void *), int64_t *count)
{
    PyObject *list = PySequence_List(numbers);
    if (list == NULL)
        return NULL;
    Py_ssize_t n = PyList_Size(list);
    char *values = PyMem_Malloc((size_t)(n > 0 ? n : 1) * bytes);
    if (values == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; values != NULL && i < n; i++) {
        if (!convert(PyList_GetItem(list, i), values + (size_t)i * bytes)) {
            PyMem_Free(values);
            values = NULL;
        }
    }
    Py_DECREF(list);
    *count = n;
    return values;
}

PyDoc_STRVAR(partition_documents_doc,
             "partition_documents(seq_len, num_segments, model, documents, mix, multiple_of, /)\n--\n\n"
             "As partition_flops for rows of packed documents, given by their lengths.");

static PyObject *partition_documents(PyObject *module, PyObject *args)
{
    (void)module;
    int64_t seq_len, multiple_of, num_documents;
    int32_t num_segments;
    s1f_model_shape model;
    PyObject *lengths;
    double mix;
    if (!PyArg_ParseTuple(args, "O&O&" MODEL_FORMAT "OdO&", to_int64, &seq_len, to_count, &num_segments,
                          MODEL_ARGUMENTS(model), &lengths, &mix, to_int64, &multiple_of))
        return NULL;
    int64_t *documents = copy_numbers(lengths, sizeof *documents, to_int64, &num_documents);
    if (documents == NULL)
        return NULL;
    PyObject *result = NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes != NULL) {
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status =
            s1f_partition_documents(seq_len, num_segments, &model, documents, num_documents, mix, multiple_of, sizes);
        Py_END_ALLOW_THREADS
        result = finish_sizes(status, sizes, num_segments);
    }
    PyMem_Free(documents);
    return result;
}

PyDoc_STRVAR(partition_profiled_doc, "partition_profiled(seq_len, num_segments, costs, mix, multiple_of, /)\n--\n\n"
                                     "Sizes of equal measured cost; costs[i] is that of piece i of len(costs).");

static PyObject *partition_profiled(PyObject *module, PyObject *args)
{
    (void)module;
    int64_t seq_len, multiple_of, num_costs;
    int32_t num_segments;
    PyObject *costs;
    double mix;
    if (!PyArg_ParseTuple(args, "O&O&OdO&", to_int64, &seq_len, to_count, &num_segments, &costs, &mix, to_int64,
                          &multiple_of))
        return NULL;
    double *values = copy_numbers(costs, sizeof *values, to_double, &num_costs);
    if (values == NULL)
        return NULL;
    PyObject *result = NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes != NULL) {
        s1f_status status;
        Py_BEGIN_ALLOW_THREADS
        status = s1f_partition_profiled(seq_len, num_segments, values, num_costs, mix, multiple_of, sizes);
        Py_END_ALLOW_THREADS
        result = finish_sizes(status, sizes, num_segments);
    }
    PyMem_Free(values);
    return result;
}

PyDoc_STRVAR(partition_check_doc, "partition_check(sizes, seq_len, /)\n--\n\n"
                                  "ValueError unless the sizes are a partition of seq_len tokens.");

static PyObject *partition_check(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *numbers;
    int64_t seq_len, count;
    if (!PyArg_ParseTuple(args, "OO&", &numbers, to_int64, &seq_len))
        return NULL;
    int64_t *sizes = copy_numbers(numbers, sizeof *sizes, to_int64, &count);
    if (sizes == NULL)
        return NULL;
    s1f_status status = s1f_partition_check(sizes, count > INT32_MAX ? INT32_MAX : (int32_t)count, seq_len);
    PyMem_Free(sizes);
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

PyDoc_STRVAR(model_flops_doc, "model_flops(model, begin, end, /)\n--\n\n"
                              "Forward FLOPs of tokens [begin, end) attending to [0, end).");

static PyObject *model_flops(PyObject *module, PyObject *args)
{
    (void)module;
    s1f_model_shape model;
    int64_t begin, end;
    if (!PyArg_ParseTuple(args, MODEL_FORMAT "O&O&", MODEL_ARGUMENTS(model), to_int64, &begin, to_int64, &end))
        return NULL;
    double flops;
    s1f_status status = s1f_model_flops(&model, begin, end, &flops);
    return status == S1F_OK ? PyFloat_FromDouble(flops) : s1f_raise(status);
}

PyMethodDef s1f_partition_methods[] = {
    {"partition_even", partition_even, METH_VARARGS, partition_even_doc},
    {"partition_flops", partition_flops, METH_VARARGS, partition_flops_doc},
    {"partition_documents", partition_documents, METH_VARARGS, partition_documents_doc},
    {"partition_profiled", partition_profiled, METH_VARARGS, partition_profiled_doc},
    {"partition_check", partition_check, METH_VARARGS, partition_check_doc},
    {"model_flops", model_flops, METH_VARARGS, model_flops_doc},
    {NULL, NULL, 0, NULL},
};
