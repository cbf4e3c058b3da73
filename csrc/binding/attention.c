/* attention.c - conversions for the attention room: torch's table and ops, layer keys, KV cache, current unit. */
#include "binding.h"
#include "records.h"

#include "../../kernels/attention.h"
#include "../../kernels/rate.h"
#include "../run/current_unit.h"
#include "../run/kv_cache.h"
#include "../torch/op_call.h"
#include "../torch/ops.h"
#include "../torch/torch_abi.h"

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

static PyObject *torch_functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#define S1F_NAME(result, name, arguments) #name,
    static const char *const names[] = {S1F_TORCH_FUNCTIONS(S1F_NAME)};
#undef S1F_NAME
    return s1f_tuple_of(sizeof names / sizeof names[0], s1f_name_item, names);
}

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

/* -- current unit ---------------------------------------------------------------------------------------------- */

static PyObject *in_step(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(s1f_current_unit_get() != NULL);
}

static PyObject *token_offset(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    return PyLong_FromLongLong(unit != NULL ? unit->offset : 0);
}

static PyObject *token_position(PyObject *Py_UNUSED(module), PyObject *index)
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    int64_t i;
    if (!s1f_to_int64(index, &i))
        return NULL;
    return PyLong_FromLongLong(unit != NULL ? s1f_position_in_unit(unit, i) : i);
}

static PyObject *range_item(const void *ranges, int64_t i)
{
    const s1f_key_range *range = (const s1f_key_range *)ranges + i;
    return Py_BuildValue("(LLL)", (long long)range->begin, (long long)range->end, (long long)range->row);
}

static PyObject *key_ranges(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit == NULL || s1f_is_plain_unit(unit))
        Py_RETURN_NONE;
    return Py_BuildValue("(NNL)", s1f_tuple_of(unit->num_ranges, range_item, unit->ranges),
                         s1f_tuple_of(unit->num_parts > 1 ? unit->num_parts : 0, s1f_int64_item, unit->parts),
                         (long long)unit->num_documents);
}

static PyObject *current_unit(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit == NULL || unit->is_whole)
        Py_RETURN_NONE;
    return s1f_new_record(S1F_CURRENT_UNIT, "(iiiiiNLLL)", (int)unit->unit.pass, (int)unit->unit.stage,
                          (int)unit->unit.microbatch, (int)unit->unit.segment, (int)unit->num_segments,
                          PyBool_FromLong(unit->training), (long long)unit->offset, (long long)unit->length,
                          (long long)unit->sequence_length);
}

/* -- KV cache -------------------------------------------------------------------------------------------------- */

static PyObject *kv_cache_create(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    s1f_kv_cache *cache = NULL;
    s1f_status status = s1f_kv_cache_create(&cache);
    return s1f_new_kv_cache(status, cache, NULL);
}

S1F_METHOD_OF(kv_cache_bytes, kv_cache, cache)
{
    int64_t kv_bytes = 0, grad_bytes = 0;
    s1f_kv_cache_bytes(cache, &kv_bytes, &grad_bytes);
    return Py_BuildValue("LL", (long long)kv_bytes, (long long)grad_bytes);
}

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

static PyObject *attention_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyUnicode_FromString(s1f_attention_isa());
}

static PyObject *attention_rates(PyObject *Py_UNUSED(module), PyObject *argument)
{
    double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1 && PyErr_Occurred())
        return NULL;
    s1f_rates rates;
    S1F_WITHOUT_GIL(rates = s1f_measure_rates(seconds));
    return Py_BuildValue("dd", rates.fma, rates.bf16);
}

PyMethodDef s1f_attention_methods[] = {
    S1F_METHOD(bind_torch, VARARGS, "Finds libtorch's C ABI in the process and registers the ops."),
    S1F_METHOD(torch_functions, NOARGS, "Names of the libtorch functions that are used."),
    S1F_METHOD(take_op_failure, NOARGS,
               "The exception of the op that failed last on this thread; a second call returns None. Torch has "
               "turned it into a RuntimeError."),
    S1F_METHOD(in_step, NOARGS, "Whether a unit runs now, on this thread or in this process."),
    S1F_METHOD(token_offset, NOARGS, "First token of the current segment, 0 outside a step."),
    S1F_METHOD(token_position, O,
               "Position along its path of a token of the current segment; its number outside a step."),
    S1F_METHOD(key_ranges, NOARGS,
               "((begin, end, row) of keys along the current unit's path, tokens of its parts, documents as "
               "unit_set_documents told); None in a chain, and "
               "outside a step: keys lie in the first rows, and there are no parts."),
    S1F_METHOD(current_unit, NOARGS, "The unit that runs now; None for one that is whole, as outside a step."),
    S1F_METHOD(kv_cache_create, NOARGS, "An empty KV cache."),
    S1F_METHOD(kv_cache_bytes, O, "Bytes held of K/V and of dK/dV slabs."),
    S1F_METHOD(kv_cache_layers, O, "The layers that the last step used."),
    S1F_METHOD(attention_isa, NOARGS, "Instruction set of the attention kernels in use."),
    S1F_METHOD(attention_rates, O,
               "FLOP per second of one core, measured on this thread: fp32 multiply-adds, and vdpbf16ps or 0 where "
               "the machine lacks it."),
    {NULL, NULL, 0, NULL}};
