/* cuda.c - conversions for the CUDA kernels: what their library holds, and launches from tensors' addresses. */
#include "binding.h"
#include "records.h"

#include "../../kernels/cuda/attention_arguments.h"
#include "../../kernels/cuda/attention_parts_arguments.h"
#include "../device/kernel_library.h"

#include <string.h>

static PyObject *cuda_library_open(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path = NULL;
    if (!PyArg_ParseTuple(args, "s:cuda_library_open", &path))
        return NULL;
    s1f_cuda_library *library = NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_cuda_library_open(path, &library));
    return s1f_new_cuda_library(status, library, NULL);
}

static const s1f_cuda_operation *find_operation(const s1f_cuda_library *library, const char *name)
{
    const s1f_cuda_operation *operation = NULL;
    s1f_status status = s1f_cuda_library_find(library, name, &operation);
    if (status != S1F_OK)
        s1f_raise(status);
    return operation;
}

static PyObject *kernel_item(const void *kernels, int64_t i)
{
    const s1f_cuda_kernel *kernel = (const s1f_cuda_kernel *)kernels + i;
    return s1f_new_record(S1F_CUDA_KERNEL, "(ssii)", kernel->name, s1f_dtype_name(kernel->dtype), (int)kernel->head_dim,
                          (int)kernel->products);
}

static PyObject *cuda_operation(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_cuda_library *library;
    const char *name;
    if (!PyArg_ParseTuple(args, "O&s:cuda_operation", s1f_to_cuda_library, &library, &name))
        return NULL;
    const s1f_cuda_operation *operation = find_operation(library, name);
    return operation == NULL ? NULL
                             : Py_BuildValue("(sssN)", operation->source, operation->compiler, operation->architectures,
                                             s1f_tuple_of(operation->num_kernels, kernel_item, operation->kernels));
}

/* -- attention ------------------------------------------------------------------------------------------------- */

typedef struct { /* a tensor (batch, heads, rows, head_dim) and its strides */
    void *address;
    long long batch, head, row;
} tensor_rows;

/* "O&" converter of (address, stride, stride, stride); None: NULL. */
static int to_rows(PyObject *object, void *out)
{
    tensor_rows *rows = out;
    *rows = (tensor_rows){0};
    if (object == Py_None)
        return 1;
    return PyArg_ParseTuple(object, "O&LLL;a tensor is (address, stride, stride, stride)", s1f_to_address,
                            &rows->address, &rows->batch, &rows->head, &rows->row);
}

static s1f_strides strides_of(tensor_rows rows)
{
    return (s1f_strides){rows.batch, rows.head, rows.row};
}

static int same_strides(tensor_rows a, tensor_rows b)
{
    return a.batch == b.batch && a.head == b.head && a.row == b.row;
}

static int to_dtype(PyObject *object, void *out)
{
    for (int32_t dtype = 0; dtype < S1F_NUM_DTYPES; dtype++)
        if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, s1f_dtype_name(dtype)) == 0) {
            *(int32_t *)out = dtype;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "no dtype %R", object);
    return 0;
}

/* Reads what both calls below take; returns the operation, NULL with an exception set. */
static const s1f_cuda_operation *read_attention(PyObject *args, const char *format, s1f_cuda_attention_args *out,
                                                int *kernel, void **stream)
{
    s1f_cuda_library *library;
    const char *name = NULL;
    s1f_cuda_attention *a = &out->attention;
    long long batch = 0, heads = 0, kv_heads = 0, segment_len = 0, head_dim = 0, q_start = 0, window = 0;
    long long docs_batch_stride = 0, scratch_bytes = 0;
    tensor_rows q, k, v, result, dout, dq, dk, dv, own_dk, own_dv;
    int store_kv_grads = 0, deterministic = 0, num_parts = 0;
    memset(out, 0, sizeof *out);
    if (!PyArg_ParseTuple(args, format, s1f_to_cuda_library, &library, &name, kernel, to_dtype, &a->dtype, &batch,
                          &heads, &kv_heads, &segment_len, &head_dim, &q_start, &a->scale, &window, &a->softcap,
                          s1f_to_address, &a->docs, &docs_batch_stride, to_rows, &q, to_rows, &k, to_rows, &v, to_rows,
                          &result, s1f_to_address, &a->lse, to_rows, &dout, to_rows, &dq, to_rows, &dk, to_rows, &dv,
                          to_rows, &own_dk, to_rows, &own_dv, &store_kv_grads, &deterministic, &num_parts,
                          s1f_to_address, &out->scratch, &scratch_bytes, s1f_to_address, stream))
        return NULL;
    a->batch = batch, a->heads = heads, a->kv_heads = kv_heads, a->segment_len = segment_len, a->head_dim = head_dim;
    a->q_start = q_start, a->window = window;
    a->docs_batch_stride = docs_batch_stride;
    a->q = q.address, a->q_strides = strides_of(q);
    a->k = k.address, a->v = v.address, a->kv_strides = strides_of(k);
    a->out = result.address, a->out_strides = strides_of(result);
    a->dout = dout.address, a->dout_strides = strides_of(dout);
    a->dq = dq.address, a->dq_strides = strides_of(dq);
    a->dk = dk.address, a->dv = dv.address, a->dkv_strides = strides_of(dk);
    a->own_dk = own_dk.address, a->own_dv = own_dv.address, a->own_dkv_strides = strides_of(own_dk);
    a->store_kv_grads = store_kv_grads;
    out->deterministic = deterministic, out->num_parts = num_parts;
    out->scratch_bytes = scratch_bytes;
    if (!same_strides(k, v) || !same_strides(dk, dv) || !same_strides(own_dk, own_dv)) {
        PyErr_SetString(PyExc_ValueError, "k and v, dk and dv, own_dk and own_dv must have the same strides");
        return NULL;
    }
    return find_operation(library, name);
}

#define S1F_ATTENTION_FORMAT "O&si(O&LLLLLLdLdO&LO&O&O&O&O&O&O&O&O&O&O&ppi)"

static PyObject *cuda_attention_scratch(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_cuda_attention_args arguments;
    int kernel = -1;
    const s1f_cuda_operation *operation =
        read_attention(args, S1F_ATTENTION_FORMAT ":cuda_attention_scratch", &arguments, &kernel, NULL);
    if (operation == NULL)
        return NULL;
    int64_t bytes = 0;
    s1f_status status = s1f_cuda_scratch(operation, &arguments, kernel, &bytes);
    return status == S1F_OK ? PyLong_FromLongLong(bytes) : s1f_raise(status);
}

static PyObject *cuda_attention(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_cuda_attention_args arguments;
    int kernel = -1;
    void *stream = NULL;
    const s1f_cuda_operation *operation =
        read_attention(args, S1F_ATTENTION_FORMAT "O&LO&:cuda_attention", &arguments, &kernel, &stream);
    if (operation == NULL)
        return NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_cuda_launch(operation, &arguments, kernel, stream));
    return s1f_none(status);
}

/* -- the work around attention over ranges of keys ---------------------------------------------------------------- */

/* Converts a tuple of at most `most` tensors (address, stride, stride, stride, stride); returns how many, or -1 with an
 * exception set. The last stride must be 1: else the memory is NULL, which the launcher does not take. */
static int read_rows(PyObject *tensors, const char *name, int most, s1f_parts_rows *out)
{
    Py_ssize_t count = PyTuple_Check(tensors) ? PyTuple_Size(tensors) : most + 1;
    if (count > most) {
        PyErr_Format(PyExc_ValueError, "%s must be a tuple of at most %d tensors", name, most);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long batch, head, row, column;
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        if (!PyTuple_Check(tensor)) {
            PyErr_Format(PyExc_TypeError, "%s: a tensor is (address, stride, stride, stride, stride)", name);
            return -1;
        }
        if (!PyArg_ParseTuple(tensor, "O&LLLL;a tensor is (address, stride, stride, stride, stride)", s1f_to_address,
                              &out[i].memory, &batch, &head, &row, &column))
            return -1;
        out[i].strides = (s1f_strides){batch, head, row};
        if (column != 1)
            out[i].memory = NULL;
    }
    return (int)count;
}

static int to_parts_operation(PyObject *name, void *out)
{
    static const char *const names[S1F_NUM_PARTS_OPERATIONS] = {"merge", "add", "finish", "total"};
    for (int32_t what = 0; what < S1F_NUM_PARTS_OPERATIONS; what++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[what]) == 0) {
            *(int32_t *)out = what;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "no operation %R, must be merge, add, finish or total", name);
    return 0;
}

static PyObject *cuda_attention_parts(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_cuda_library *library;
    s1f_attention_parts arguments = {0};
    long long batch, heads, rows, head_dim, v_head_dim;
    PyObject *parts, *slabs, *outs;
    void *stream = NULL;
    if (!PyArg_ParseTuple(args, "O&O&O&pLLLLLOOO(O&O&O&)O&:cuda_attention_parts", s1f_to_cuda_library, &library,
                          to_parts_operation, &arguments.what, to_dtype, &arguments.dtype, &arguments.store, &batch,
                          &heads, &rows, &head_dim, &v_head_dim, &parts, &slabs, &outs, s1f_to_address,
                          &arguments.lse[0], s1f_to_address, &arguments.lse[1], s1f_to_address, &arguments.lse[2],
                          s1f_to_address, &stream))
        return NULL;
    arguments.batch = batch, arguments.heads = heads, arguments.rows = rows;
    arguments.head_dim[0] = head_dim, arguments.head_dim[1] = v_head_dim;
    arguments.num_parts = read_rows(parts, "parts", S1F_MOST_PARTS, arguments.parts);
    if (arguments.num_parts < 0 || read_rows(slabs, "slabs", 2, arguments.slabs) < 0 ||
        read_rows(outs, "outs", 2, arguments.outs) < 0)
        return NULL;
    const s1f_cuda_operation *operation = find_operation(library, "attention_parts");
    if (operation == NULL)
        return NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_cuda_launch(operation, &arguments, -1, stream));
    return status == S1F_OK || status == S1F_ERR_ARG ? PyBool_FromLong(status == S1F_OK) : s1f_raise(status);
}

PyMethodDef s1f_cuda_methods[] = {
    S1F_METHOD(cuda_attention_scratch, VARARGS,
               "Bytes of the device that a launch needs. Arguments: (dtype, batch, heads, kv_heads, segment_len, "
               "head_dim, q_start, scale, window, softcap, docs, docs_batch_stride, q, k, v, out, lse, dout, dq, "
               "dk, dv, own_dk, own_dv, store_kv_grads, deterministic, num_parts); tensors: (address, stride of "
               "batch, head, row) or None; docs and lse: addresses."),
    S1F_METHOD(cuda_attention, VARARGS, "Launches; kernel -1: the launcher chooses."),
    S1F_METHOD(cuda_attention_parts, VARARGS,
               "Launches \"merge\", \"add\", \"finish\" or \"total\"; False: no kernel is for such "
               "tensors.\nparts, slabs, outs: tuples of (address, four strides); lse: three addresses."),
    S1F_METHOD(cuda_library_open, VARARGS, "Opens the library of CUDA kernels."),
    S1F_METHOD(cuda_operation, VARARGS, "(source, compiler, architectures, tuple of CudaKernel)."),
    {NULL, NULL, 0, NULL}};
