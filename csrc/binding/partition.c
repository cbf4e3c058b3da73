/* partition.c - conversions for the partition room. */
#include "../core/partition.h"
#include "binding.h"

/* "O&" converter for counts: what does not fit in 32 bits becomes the nearest that does, which the core refuses. */
static int to_count(PyObject *object, void *out)
{
    int64_t value;
    if (!s1f_to_int64(object, &value))
        return 0;
    *(int32_t *)out = value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : (int32_t)value;
    return 1;
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
    PyObject *result = status == S1F_OK ? s1f_list_of(num_segments, s1f_int64_item, sizes) : s1f_raise(status);
    PyMem_Free(sizes);
    return result;
}

static PyObject *partition_even(PyObject *Py_UNUSED(module), PyObject *args)
{
    int64_t seq_len, multiple_of;
    int32_t num_segments;
    if (!PyArg_ParseTuple(args, "O&O&O&", s1f_to_int64, &seq_len, to_count, &num_segments, s1f_to_int64, &multiple_of))
        return NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes == NULL)
        return NULL;
    return finish_sizes(s1f_partition_even(seq_len, num_segments, multiple_of, sizes), sizes, num_segments);
}

#define MODEL_FORMAT "(O&O&O&O&O&O&O&)"
#define MODEL_ARGUMENTS(model)                                                                                         \
    s1f_to_int64, &(model).hidden, s1f_to_int64, &(model).layers, s1f_to_int64, &(model).heads, s1f_to_int64,          \
        &(model).kv_heads, s1f_to_int64, &(model).ffn, s1f_to_int64, &(model).vocab, s1f_to_int64, &(model).head_dim

static PyObject *partition_flops(PyObject *Py_UNUSED(module), PyObject *args)
{
    int64_t seq_len, multiple_of;
    int32_t num_segments;
    s1f_model_shape model;
    s1f_array documents = {.name = "documents"};
    double mix;
    if (!PyArg_ParseTuple(args, "O&O&" MODEL_FORMAT "O&dO&", s1f_to_int64, &seq_len, to_count, &num_segments,
                          MODEL_ARGUMENTS(model), s1f_to_array, &documents, &mix, s1f_to_int64, &multiple_of))
        return NULL;
    PyObject *result = NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes != NULL) {
        s1f_status status;
        S1F_WITHOUT_GIL(status = s1f_partition_flops(seq_len, num_segments, &model, documents.values, documents.count,
                                                     mix, multiple_of, sizes));
        result = finish_sizes(status, sizes, num_segments);
    }
    s1f_release_arrays(&documents, 1);
    return result;
}

static PyObject *partition_profiled(PyObject *Py_UNUSED(module), PyObject *args)
{
    int64_t seq_len, multiple_of;
    int32_t num_segments;
    s1f_array costs = {.name = "costs"};
    double mix;
    if (!PyArg_ParseTuple(args, "O&O&O&dO&", s1f_to_int64, &seq_len, to_count, &num_segments, s1f_to_array, &costs,
                          &mix, s1f_to_int64, &multiple_of))
        return NULL;
    PyObject *result = NULL;
    int64_t *sizes = sizes_alloc(seq_len, num_segments);
    if (sizes != NULL) {
        s1f_status status;
        S1F_WITHOUT_GIL(
            status = s1f_partition_profiled(seq_len, num_segments, costs.values, costs.count, mix, multiple_of, sizes));
        result = finish_sizes(status, sizes, num_segments);
    }
    s1f_release_arrays(&costs, 1);
    return result;
}

static PyObject *partition_check(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_array sizes = {.name = "sizes"};
    int64_t seq_len;
    if (!PyArg_ParseTuple(args, "O&O&", s1f_to_array, &sizes, s1f_to_int64, &seq_len))
        return NULL;
    s1f_status status =
        s1f_partition_check(sizes.values, sizes.count > INT32_MAX ? INT32_MAX : (int32_t)sizes.count, seq_len);
    s1f_release_arrays(&sizes, 1);
    return s1f_none(status);
}

static PyObject *model_flops(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_model_shape model;
    int64_t begin, end;
    if (!PyArg_ParseTuple(args, MODEL_FORMAT "O&O&", MODEL_ARGUMENTS(model), s1f_to_int64, &begin, s1f_to_int64, &end))
        return NULL;
    double flops;
    s1f_status status = s1f_model_flops(&model, begin, end, &flops);
    return status == S1F_OK ? PyFloat_FromDouble(flops) : s1f_raise(status);
}

PyMethodDef s1f_partition_methods[] = {
    S1F_METHOD(partition_even, VARARGS, "Sizes of equal length."),
    S1F_METHOD(partition_flops, VARARGS,
               "Sizes of equal FLOPs; model: hidden, layers, heads, kv_heads, ffn, vocab, head_dim."),
    S1F_METHOD(partition_profiled, VARARGS,
               "Sizes of equal measured cost; costs[i] is the cost of the i-th of len(costs) equal pieces."),
    S1F_METHOD(partition_check, VARARGS, "ValueError unless the sizes are a partition of seq_len tokens."),
    S1F_METHOD(model_flops, VARARGS, "Forward FLOPs of tokens [begin, end) attending to [0, end)."),
    {NULL, NULL, 0, NULL}};
