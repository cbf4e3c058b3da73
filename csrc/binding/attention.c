/* attention.c - conversions for the attention room: torch's table and ops, layer keys, KV cache, current unit. */
#include "binding.h"

#include "../../kernels/attention.h"
#include "../../kernels/rate.h"
#include "../run/current_unit.h"
#include "../run/kv_cache.h"
#include "../torch/ops.h"
#include "../torch/torch_abi.h"

S1F_METHOD(s1f_status, bind_torch, s1f_path, path)
{
    static bool is_done; /* the GIL is its lock */
    is_done = is_done || (s1f_torch_bind(path.text) == S1F_OK && s1f_ops_register() == S1F_OK);
    if (!is_done)
        PyErr_SetString(PyExc_ImportError, s1f_last_error());
    return is_done ? S1F_OK : S1F_ERR_PYTHON;
}

S1F_METHOD(PyObject *, take_op_failure)
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

S1F_METHOD(int64_t, token_position, int64_t, index)
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    return unit != NULL ? s1f_position_in_unit(unit, index) : index;
}

static PyObject *range_item(const void *ranges, int64_t i)
{
    const s1f_key_range *range = (const s1f_key_range *)ranges + i;
    return Py_BuildValue("(LLL)", (long long)range->begin, (long long)range->end, (long long)range->row);
}

S1F_METHOD(PyObject *, key_ranges)
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit == NULL || s1f_is_plain_unit(unit))
        Py_RETURN_NONE;
    return Py_BuildValue("(NNL)", s1f_tuple_of(unit->num_ranges, range_item, unit->ranges),
                         s1f_tuple_of(unit->num_parts > 1 ? unit->num_parts : 0, s1f_int64_item, unit->parts),
                         (long long)unit->num_documents);
}

S1F_METHOD(PyObject *, unit_tokens)
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    if (unit == NULL || unit->is_whole)
        Py_RETURN_NONE;
    return Py_BuildValue("(LLL)", (long long)unit->offset, (long long)unit->length, (long long)unit->sequence_length);
}

/* -- KV cache -------------------------------------------------------------------------------------------------- */

S1F_CORE_MAKES(kv_cache, kv_cache_create)

S1F_METHOD(PyObject *, kv_cache_bytes, s1f_kv_cache *, cache)
{
    int64_t kv_bytes = 0, grad_bytes = 0;
    s1f_kv_cache_bytes(cache, &kv_bytes, &grad_bytes);
    return Py_BuildValue("LL", (long long)kv_bytes, (long long)grad_bytes);
}

S1F_METHOD(PyObject *, kv_cache_layers, s1f_kv_cache *, cache)
{
    PyObject *list = PyList_New(0);
    int32_t stage = 0;
    s1f_layer_shape shape;
    for (int32_t i = 0; list != NULL && s1f_kv_cache_layer(cache, i, &stage, &shape); i++) {
        int64_t numbers = shape.batch * shape.kv_heads * (shape.head_dim + shape.v_head_dim);
        int64_t of_documents = shape.with_docs ? shape.batch * (int64_t)sizeof(int32_t) : 0;
        PyObject *item =
            Py_BuildValue("(iLL)", (int)stage, (long long)(numbers * s1f_dtype_bytes(shape.dtype) + of_documents),
                          (long long)(numbers * s1f_dtype_bytes(s1f_dtype_of_sums(shape.dtype))));
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* -- instruction set ------------------------------------------------------------------------------------------- */

S1F_CORE(const char *, attention_isa)

S1F_METHOD(PyObject *, attention_rates, double, seconds)
{
    s1f_rates rates;
    S1F_WITHOUT_GIL(rates = s1f_measure_rates(seconds));
    return Py_BuildValue("dd", rates.fma, rates.bf16);
}

PyMethodDef s1f_attention_methods[] = {
    S1F_ROW(bind_torch, "Finds libtorch's C ABI in the process and registers the ops."),
    S1F_ROW(take_op_failure,
            "-> Exception | None: of the op that failed last on this thread, once; torch has made a RuntimeError of "
            "it."),
    S1F_ROW(token_position, "Position along its path of a token of the current segment; its number outside a step."),
    S1F_ROW(
        key_ranges,
        "-> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...], int] | None: (begin, end, row) of keys along "
        "the current unit's path, tokens of its parts, documents as current_unit_set_documents told. In a chain and "
        "outside a step None: keys lie in the first rows, and there are no parts."),
    S1F_ROW(unit_tokens,
            "-> tuple[int, int, int] | None: the first token of the unit that runs, their count, and the tokens of "
            "its micro-batch; None for one that is whole, as outside a step."),
    S1F_ROW(kv_cache_create, "An empty KV cache."),
    S1F_ROW(kv_cache_bytes, "-> tuple[int, int]: held of K/V and of dK/dV slabs."),
    S1F_ROW(kv_cache_layers,
            "-> list[tuple[int, int, int]]: the stage of each layer that the last step used, and a token's bytes of "
            "K/V, with the numbers of documents, and of dK/dV."),
    S1F_ROW(attention_isa, "Instruction set of the attention kernels in use."),
    S1F_ROW(attention_rates,
            "-> tuple[float, float]: FLOP per second of one core, measured on this thread: fp32 multiply-adds, and "
            "vdpbf16ps or 0 where the machine lacks it."),
    {NULL, NULL, 0, NULL}};
