/* tier.c - conversions for the tier: a load is a list of addresses and one of sizes. */
#include "binding.h"

#include "../device/host_tier.h"
#include "../run/file_tier.h"

S1F_METHOD(PyObject *, file_tier, PyObject *, directory)
{
    PyObject *path;
    if (!PyUnicode_FSConverter(directory, &path))
        return NULL;
    s1f_tier *tier = NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_file_tier_create(PyBytes_AsString(path), &tier));
    Py_DECREF(path);
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

S1F_METHOD(PyObject *, host_tier, s1f_device *, device, PyObject *, check)
{
    s1f_tier *tier = NULL;
    s1f_status status = s1f_host_tier_create(device, check_host, check, &tier);
    return s1f_new_tier(status, tier, arguments);
}

S1F_CORE(s1f_status, tier_begin_step, s1f_tier *, tier, int64_t, most_loads)

S1F_METHOD(s1f_status, tier_move, s1f_tier *, tier, bool, out, int64_t, load, s1f_int64s, parts)
{
    const s1f_tier_part *given = (const void *)parts.values;
    int64_t count = parts.count / 2;
    if (!s1f_require_index("parts", count, INT32_MAX))
        return S1F_ERR_PYTHON;
    return out ? s1f_tier_out(tier, load, given, (int32_t)count) : s1f_tier_in(tier, load, given, (int32_t)count);
}

S1F_CORE_WAITS(s1f_status, tier_wait, s1f_tier *, tier, s1f_group *, group, int64_t, load)

S1F_METHOD(s1f_status, tier_reset, s1f_tier *, tier)
{
    S1F_WITHOUT_GIL(s1f_tier_reset(tier));
    return S1F_OK;
}

S1F_METHOD(PyObject *, tier_facts, s1f_tier *, tier)
{
    s1f_tier_facts facts;
    s1f_tier_get_facts(tier, &facts);
    return Py_BuildValue("(sNLLLLL)", facts.medium, PyBool_FromLong(facts.is_memory), (long long)facts.room_bytes,
                         (long long)facts.bytes_out, (long long)facts.bytes_in, (long long)facts.ns_out,
                         (long long)facts.ns_in);
}

PyMethodDef s1f_tier_methods[] = {
    S1F_ROW(file_tier, "A tier whose file lies in the directory, without a name."),
    S1F_ROW(host_tier, "A tier of pinned memory for a GPU. check(bytes): raises where the host has no room for them."),
    S1F_ROW(tier_begin_step, "Before the units; so many loads are out at once in the step."),
    S1F_ROW(tier_move, "Begins to move memory out, address and bytes of each part, which must stay until tier_wait or "
                       "tier_reset, or to bring it back in the same parts."),
    S1F_ROW(tier_wait, "Waits for what was asked last of the load: the host, or the stream that computes."),
    S1F_ROW(tier_reset, "Forgets all loads and a failure; afterwards the tier touches no memory."),
    S1F_ROW(tier_facts,
            "-> tuple[str, bool, int, int, int, int, int]: its medium, whether that is memory, bytes of its room, and "
            "bytes out, bytes in, ns out and ns in of the last step."),
    {NULL, NULL, 0, NULL}};
