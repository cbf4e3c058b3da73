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
    Py_BEGIN_ALLOW_THREADS
    status = s1f_file_tier_create(PyBytes_AsString(directory), &tier);
    Py_END_ALLOW_THREADS
    Py_DECREF(directory);
    return s1f_new_tier(status, tier, NULL);
}

static PyObject *host_tier(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_device *device;
    int host_ranks;
    const char *root;
    if (!PyArg_ParseTuple(arguments, "O&is", s1f_to_device, &device, &host_ranks, &root))
        return NULL;
    s1f_tier *tier = NULL;
    s1f_status status = s1f_host_tier_create(device, host_ranks, root, &tier);
    return s1f_new_tier(status, tier, arguments);
}

static PyObject *tier_begin_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_tier *tier;
    int64_t most_loads;
    if (!PyArg_ParseTuple(arguments, "O&O&", s1f_to_tier, &tier, s1f_to_int64, &most_loads))
        return NULL;
    s1f_status status = s1f_tier_begin_step(tier, most_loads);
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

typedef s1f_status asked(s1f_tier *tier, int64_t load, const s1f_tier_part *parts, int32_t num_parts);

static PyObject *start(PyObject *arguments, asked *ask)
{
    s1f_tier *tier;
    int64_t load;
    s1f_int64s addresses = {.name = "addresses"}, sizes = {.name = "sizes"};
    if (!PyArg_ParseTuple(arguments, "O&O&O&O&", s1f_to_tier, &tier, s1f_to_int64, &load, s1f_to_int64s, &addresses,
                          s1f_to_int64s, &sizes))
        return NULL;
    PyObject *result = NULL;
    s1f_tier_part *parts = NULL;
    if (s1f_require_count(sizes.name, sizes.count, addresses.count) &&
        s1f_require_index("parts", sizes.count, INT32_MAX)) {
        parts = PyMem_Malloc((size_t)(sizes.count + 1) * sizeof *parts);
        for (int64_t i = 0; parts != NULL && i < sizes.count; i++)
            parts[i] = (s1f_tier_part){(void *)(intptr_t)addresses.values[i], sizes.values[i]};
        result = parts == NULL ? PyErr_NoMemory() : s1f_none(ask(tier, load, parts, (int32_t)sizes.count));
    }
    PyMem_Free(parts);
    PyMem_Free(addresses.values);
    PyMem_Free(sizes.values);
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
    Py_BEGIN_ALLOW_THREADS
    status = s1f_tier_wait(tier, group, load);
    Py_END_ALLOW_THREADS
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise_for_group(status, group);
}

static PyObject *tier_reset(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_tier *tier;
    if (!s1f_to_tier(handle, &tier))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s1f_tier_reset(tier);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *facts_of(PyObject *handle, void (*get)(s1f_tier *tier, s1f_tier_facts *out))
{
    s1f_tier *tier;
    if (!s1f_to_tier(handle, &tier))
        return NULL;
    s1f_tier_facts facts;
    get(tier, &facts);
    return s1f_new_record(S1F_TIER_FACTS, "(sNNLLLLLL)", facts.medium, PyBool_FromLong(facts.is_direct),
                          PyBool_FromLong(facts.is_memory), (long long)facts.room_bytes, (long long)facts.num_growths,
                          (long long)facts.bytes_out, (long long)facts.bytes_in, (long long)facts.ns_out,
                          (long long)facts.ns_in);
}

static PyObject *tier_facts(PyObject *Py_UNUSED(module), PyObject *handle)
{
    return facts_of(handle, s1f_tier_get_facts);
}

static PyObject *tier_step(PyObject *Py_UNUSED(module), PyObject *handle)
{
    return facts_of(handle, s1f_tier_get_step);
}

PyMethodDef s1f_tier_methods[] = {
    {"file_tier", file_tier, METH_VARARGS, "file_tier(directory): a tier whose file lies there, without a name."},
    {"host_tier", host_tier, METH_VARARGS,
     "host_tier(device, host_ranks, root): a tier of pinned memory for a GPU. root: where /proc and /sys lie, \"\"."},
    {"tier_begin_step", tier_begin_step, METH_VARARGS,
     "tier_begin_step(tier, most_loads): before the units; so many loads are out at once in the step."},
    {"tier_out", tier_out, METH_VARARGS,
     "tier_out(tier, load, addresses, sizes): begins to move out this memory, which must stay until tier_wait or "
     "tier_reset."},
    {"tier_in", tier_in, METH_VARARGS,
     "tier_in(tier, load, addresses, sizes): begins to bring it back, in the same parts."},
    {"tier_wait", tier_wait, METH_VARARGS,
     "tier_wait(tier, group, load): waits for what was asked last of the load: the host, or the stream that computes."},
    {"tier_reset", tier_reset, METH_O, "Forgets all loads and a failure; afterwards the tier touches no memory."},
    {"tier_facts", tier_facts, METH_O, "tier_facts(tier) -> TierFacts"},
    {"tier_step", tier_step, METH_O, "tier_step(tier) -> TierFacts, whose bytes and ns are those of the last step"},
    {NULL, NULL, 0, NULL}};
