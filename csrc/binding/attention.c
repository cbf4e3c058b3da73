/* attention.c - conversions for the attention room: torch's table and ops, layer keys, KV cache, current unit. */
#include "binding.h"
#include "records.h"

#include "../../kernels/attention.h"
#include "../../kernels/rate.h"
#include "../run/current_unit.h"
#include "../run/kv_cache.h"
#include "../run/layer_keys.h"
#include "../torch/op_call.h"
#include "../torch/ops.h"
#include "../torch/torch_abi.h"

PyDoc_STRVAR(bind_torch_doc,
             "bind_torch(path) -> None\n\nFinds libtorch's C ABI in the process and registers the ops.");

static PyObject *bind_torch(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path = NULL;
    if (!PyArg_ParseTuple(args, "|z:bind_torch", &path))
        return NULL;
    s1f_status status = s1f_torch_bind(path);
    if (status == S1F_OK)
        status = s1f_ops_register();
    if (status != S1F_OK) {
        PyErr_SetString(PyExc_ImportError, s1f_last_error());
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(torch_functions_doc,
             "torch_functions() -> tuple of str\n\nNames of the libtorch functions that are used.");

static PyObject *torch_functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#define S1F_NAME(result, name, arguments) #name,
    static const char *const names[] = {S1F_TORCH_FUNCTIONS(S1F_NAME)};
#undef S1F_NAME
    return s1f_tuple_of(sizeof names / sizeof names[0], s1f_name_item, names);
}

PyDoc_STRVAR(
    take_op_failure_doc,
    "take_op_failure() -> Exception | None\n\nThe exception of the op that failed last on this thread; a second "
    "call returns None. Torch has turned it into a RuntimeError.");

static PyObject *take_op_failure(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const char *text = NULL;
    s1f_status status = s1f_op_failure_take(&text);
    if (status == S1F_OK)
        Py_RETURN_NONE;
    s1f_fail(status, "%s", text);
    s1f_raise(status);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

PyDoc_STRVAR(layer_register_doc, "layer_register(layer) -> None\n\nMakes an int a key of KV caches.");

static PyObject *layer_register(PyObject *Py_UNUSED(module), PyObject *argument)
{
    int64_t layer;
    return s1f_to_int64(argument, &layer) ? s1f_none(s1f_layer_register(layer)) : NULL;
}

/* -- current unit ---------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(in_step_doc, "in_step() -> bool\n\nWhether a unit runs now, on this thread or in this process.");

static PyObject *in_step(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(s1f_current_unit_get() != NULL);
}

PyDoc_STRVAR(token_offset_doc, "token_offset() -> int\n\nFirst token of the current segment, 0 outside a step.");

static PyObject *token_offset(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    return PyLong_FromLongLong(unit != NULL ? unit->offset : 0);
}

PyDoc_STRVAR(current_unit_doc, "current_unit() -> CurrentUnit | None\n\nThe unit that runs now.");

static PyObject *current_unit(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit == NULL)
        Py_RETURN_NONE;
    return s1f_new_record(S1F_CURRENT_UNIT, "(iiiiiNLLL)", (int)unit->unit.pass, (int)unit->unit.stage,
                          (int)unit->unit.microbatch, (int)unit->unit.segment, (int)unit->num_segments,
                          PyBool_FromLong(unit->training), (long long)unit->offset, (long long)unit->length,
                          (long long)unit->sequence_length);
}

/* -- KV cache -------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(kv_cache_create_doc, "kv_cache_create() -> capsule\n\nAn empty KV cache.");

static PyObject *kv_cache_create(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    s1f_kv_cache *cache = NULL;
    s1f_status status = s1f_kv_cache_create(&cache);
    return s1f_new_kv_cache(status, cache, NULL);
}

PyDoc_STRVAR(kv_cache_bytes_doc, "kv_cache_bytes(cache) -> (int, int)\n\nBytes held of K/V and of dK/dV slabs.");

static PyObject *kv_cache_bytes(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_kv_cache *cache;
    if (!s1f_to_kv_cache(handle, &cache))
        return NULL;
    int64_t kv_bytes = 0, grad_bytes = 0;
    s1f_kv_cache_bytes(cache, &kv_bytes, &grad_bytes);
    return Py_BuildValue("LL", (long long)kv_bytes, (long long)grad_bytes);
}

PyDoc_STRVAR(kv_cache_layers_doc, "kv_cache_layers(cache) -> [CacheLayer]\n\nThe layers that the last step used.");

static PyObject *kv_cache_layers(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_kv_cache *cache;
    PyObject *list = s1f_to_kv_cache(handle, &cache) ? PyList_New(0) : NULL;
    int32_t stage = 0;
    int64_t layer = 0;
    s1f_layer_shape shape;
    for (int32_t i = 0; list != NULL && s1f_kv_cache_layer(cache, i, &stage, &layer, &shape); i++) {
        PyObject *item =
            s1f_new_record(S1F_CACHE_LAYER, "(iLLLLLiiN)", (int)stage, (long long)layer, (long long)shape.batch,
                           (long long)shape.kv_heads, (long long)shape.head_dim, (long long)shape.v_head_dim,
                           (int)s1f_dtype_bytes(shape.dtype), (int)s1f_dtype_bytes(s1f_dtype_of_sums(shape.dtype)),
                           PyBool_FromLong(shape.with_docs));
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* -- instruction set ------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(attention_isa_doc, "attention_isa() -> str\n\nInstruction set of the attention kernels in use.");

static PyObject *attention_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyUnicode_FromString(s1f_attention_isa());
}

PyDoc_STRVAR(attention_rates_doc,
             "attention_rates(seconds) -> (float, float)\n\nFLOP per second of one core, measured on this thread: fp32 "
             "multiply-adds, and vdpbf16ps or 0 where the machine lacks it.");

static PyObject *attention_rates(PyObject *Py_UNUSED(module), PyObject *argument)
{
    double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1 && PyErr_Occurred())
        return NULL;
    s1f_rates rates;
    Py_BEGIN_ALLOW_THREADS
    rates = s1f_measure_rates(seconds);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("dd", rates.fma, rates.bf16);
}

PyMethodDef s1f_attention_methods[] = {
    {"bind_torch", bind_torch, METH_VARARGS, bind_torch_doc},
    {"torch_functions", torch_functions, METH_NOARGS, torch_functions_doc},
    {"take_op_failure", take_op_failure, METH_NOARGS, take_op_failure_doc},
    {"layer_register", layer_register, METH_O, layer_register_doc},
    {"in_step", in_step, METH_NOARGS, in_step_doc},
    {"token_offset", token_offset, METH_NOARGS, token_offset_doc},
    {"current_unit", current_unit, METH_NOARGS, current_unit_doc},
    {"kv_cache_create", kv_cache_create, METH_NOARGS, kv_cache_create_doc},
    {"kv_cache_bytes", kv_cache_bytes, METH_O, kv_cache_bytes_doc},
    {"kv_cache_layers", kv_cache_layers, METH_O, kv_cache_layers_doc},
    {"attention_isa", attention_isa, METH_NOARGS, attention_isa_doc},
    {"attention_rates", attention_rates, METH_O, attention_rates_doc},
    {NULL, NULL, 0, NULL},
};
