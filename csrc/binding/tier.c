/* tier.c - conversions for the tier: a load is a list of addresses and one of sizes. */
#include "binding.h"
#include "records.h"

#include "../device/host_tier.h"
#include "../run/file_tier.h"

static PyObject *file_tier(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *directory;
    if (!PyArg_ParseTuple(arguments, "O&", PyUnicode_FSConverter, &directory))
        return NULL;
    s1f_tier *tier = NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_file_tier_create(PyBytes_AsString(directory), &tier));
    Py_DECREF(directory);
    return s1f_new_tier(status, tier, NULL);
}

static s1f_status check_host(void *function, int64_t bytes)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(function, "L", (long long)bytes);
    Py_XDECREF(result);
    PyGILState_Release(state);
    return result == NULL ? S1F_ERR_PYTHON : S1F_OK;
}

static PyObject *host_tier(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_device *device;
    PyObject *function;
    if (!PyArg_ParseTuple(arguments, "O&O", s1f_to_device, &device, &function))
        return NULL;
    s1f_tier *tier = NULL;
    s1f_status status = s1f_host_tier_create(device, check_host, function, &tier);
    return s1f_new_tier(status, tier, arguments);
}

S1F_METHOD_OF_NUMBER(tier_begin_step, tier, tier, most_loads)
{
    return s1f_none(s1f_tier_begin_step(tier, most_loads));
}

typedef s1f_status asked(s1f_tier *tier, int64_t load, const s1f_tier_part *parts, int32_t num_parts);

static PyObject *start(PyObject *arguments, asked *ask)
{
    s1f_tier *tier;
    int64_t load;
    s1f_array parts = {.name = "parts"};
    if (!PyArg_ParseTuple(arguments, "O&O&O&", s1f_to_tier, &tier, s1f_to_int64, &load, s1f_to_array, &parts))
        return NULL;
    int fits = s1f_require_index("parts", parts.count / 2, INT32_MAX);
    PyObject *result = fits ? s1f_none(ask(tier, load, parts.values, (int32_t)(parts.count / 2))) : NULL;
    s1f_release_arrays(&parts, 1);
    return result;
}

static PyObject *tier_out(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return start(arguments, s1f_tier_out);
}

static PyObject *tier_in(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return start(arguments, s1f_tier_in);
}

static PyObject *tier_wait(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_tier *tier;
    s1f_group *group;
    int64_t load;
    if (!PyArg_ParseTuple(arguments, "O&O&O&", s1f_to_tier, &tier, s1f_to_group, &group, s1f_to_int64, &load))
        return NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_tier_wait(tier, group, load));
    return s1f_none_of(status, group);
}

S1F_METHOD_DOES(tier_reset, tier, tier, S1F_WITHOUT_GIL(s1f_tier_reset(tier)))

static PyObject *tier_facts(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_tier *tier;
    if (!s1f_to_tier(handle, &tier))
        return NULL;
    s1f_tier_facts facts;
    s1f_tier_get_facts(tier, &facts);
    return s1f_new_record(S1F_TIER_FACTS, "(sNLLLLL)", facts.medium, PyBool_FromLong(facts.is_memory),
                          (long long)facts.room_bytes, (long long)facts.bytes_out, (long long)facts.bytes_in,
                          (long long)facts.ns_out, (long long)facts.ns_in);
}

PyMethodDef s1f_tier_methods[] = {
    S1F_METHOD(file_tier, VARARGS, "A tier whose file lies there, without a name."),
    S1F_METHOD(host_tier, VARARGS, "A tier of pinned memory for a GPU. root: where /proc and /sys lie, \"\"."),
    S1F_METHOD(tier_begin_step, VARARGS, "Before the units; so many loads are out at once in the step."),
    S1F_METHOD(tier_out, VARARGS, "Begins to move out this memory, which must stay until tier_wait or tier_reset."),
    S1F_METHOD(tier_in, VARARGS, "Begins to bring it back, in the same parts."),
    S1F_METHOD(tier_wait, VARARGS, "Waits for what was asked last of the load: the host, or the stream that computes."),
    S1F_METHOD(tier_reset, O, "Forgets all loads and a failure; afterwards the tier touches no memory."),
    S1F_METHOD(tier_facts, O, "Where it lies, and what has moved in the last step."),
    {NULL, NULL, 0, NULL}};
