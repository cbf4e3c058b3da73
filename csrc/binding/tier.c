/* tier.c - conversions for the tier in pinned memory: a load is an array of address, bytes and offset of each part. */
#include "binding.h"

#include "../device/host_tier.h"

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
    s1f_host_tier *tier = NULL;
    s1f_status status = s1f_host_tier_create(device, check_host, check, &tier);
    return s1f_new_host_tier(status, tier, arguments);
}

S1F_CORE(s1f_status, host_tier_begin_step, s1f_host_tier *, tier, int64_t, most_loads)

S1F_METHOD(s1f_status, host_tier_move, s1f_host_tier *, tier, bool, is_out, int64_t, load, s1f_int64s, parts)
{
    int64_t count = parts.count / 3;
    if (!s1f_require_index("parts", count, INT32_MAX))
        return S1F_ERR_PYTHON;
    return s1f_host_tier_move(tier, is_out, load, (const void *)parts.values, (int32_t)count);
}

S1F_CORE(s1f_status, host_tier_wait, s1f_host_tier *, tier, int64_t, load)

S1F_METHOD(s1f_status, host_tier_reset, s1f_host_tier *, tier)
{
    S1F_WITHOUT_GIL(s1f_host_tier_reset(tier));
    return S1F_OK;
}

S1F_METHOD(PyObject *, host_tier_facts, s1f_host_tier *, tier)
{
    s1f_host_tier_facts facts = s1f_host_tier_get_facts(tier);
    return Py_BuildValue("(LLLLL)", (long long)facts.room_bytes, (long long)facts.bytes_out, (long long)facts.bytes_in,
                         (long long)facts.ns_out, (long long)facts.ns_in);
}

PyMethodDef s1f_tier_methods[] = {
    S1F_ROW(host_tier, "A tier of pinned memory for a GPU. check(bytes): raises where the host has no room for them."),
    S1F_ROW(host_tier_begin_step, "Before the units; so many loads are out at once in the step."),
    S1F_ROW(host_tier_move,
            "Begins to move memory out, or back: address, bytes and offset in the tier of each part. The memory must "
            "stay until host_tier_wait or host_tier_reset."),
    S1F_ROW(host_tier_wait, "Makes the stream that computes wait for what was asked last of the load."),
    S1F_ROW(host_tier_reset, "Waits for copies under way; afterwards the tier touches no memory."),
    S1F_ROW(host_tier_facts,
            "-> tuple[int, int, int, int, int]: bytes of the room, and bytes out, bytes in, ns out and ns in of the "
            "last step."),
    {NULL, NULL, 0, NULL}};
