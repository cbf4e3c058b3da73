/* tier.c - conversions for the tier: a load is a list of addresses and one of sizes. */
#include "binding.h"
#include "records.h"

#include "../run/tier.h"

static PyObject *tier_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *directory;
    if (!PyArg_ParseTuple(arguments, "O&", PyUnicode_FSConverter, &directory))
        return NULL;
    s1f_tier *tier = NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = s1f_tier_create(PyBytes_AsString(directory), &tier);
    Py_END_ALLOW_THREADS
    Py_DECREF(directory);
    return s1f_new_tier(status, tier, NULL);
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

static PyObject *tier_facts(PyObject *Py_UNUSED(module), PyObject *handle)
{
    s1f_tier *tier;
    if (!s1f_to_tier(handle, &tier))
        return NULL;
    s1f_tier_facts facts;
    s1f_tier_get_facts(tier, &facts);
    return s1f_new_record(S1F_TIER_FACTS, "(sNNLLLLL)", facts.file_system, PyBool_FromLong(facts.is_direct),
                          PyBool_FromLong(facts.is_memory), (long long)facts.file_bytes, (long long)facts.bytes_out,
                          (long long)facts.bytes_in, (long long)facts.ns_out, (long long)facts.ns_in);
}

PyMethodDef s1f_tier_methods[] = {
    {"tier_create", tier_create, METH_VARARGS, "tier_create(directory): a tier whose file lies there, without a name."},
    {"tier_out", tier_out, METH_VARARGS,
     "tier_out(tier, load, addresses, sizes): begins to write this memory, which must stay until tier_wait or "
     "tier_reset."},
    {"tier_in", tier_in, METH_VARARGS,
     "tier_in(tier, load, addresses, sizes): begins to read it back, in the same parts."},
    {"tier_wait", tier_wait, METH_VARARGS,
     "tier_wait(tier, group, load): waits for what was asked last of the load; OSError where the file system fails."},
    {"tier_reset", tier_reset, METH_O, "Forgets all loads and a failure; afterwards the tier touches no memory."},
    {"tier_facts", tier_facts, METH_O, "tier_facts(tier) -> TierFacts"},
    {NULL, NULL, 0, NULL}};
