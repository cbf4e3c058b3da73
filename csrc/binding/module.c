/* module.c - the extension module seq1f1b._C: limited API, multi-phase initialisation. */
#include "binding.h"
#include "tested.h"

PyObject *s1f_schedule_error;
PyObject *s1f_pipeline_error;

PyObject *s1f_raise(s1f_status status)
{
    PyObject *type = PyExc_RuntimeError;
    switch (status) {
    case S1F_ERR_ARG: type = PyExc_ValueError; break;
    case S1F_ERR_TYPE: type = PyExc_TypeError; break;
    case S1F_ERR_SCHEDULE: type = s1f_schedule_error; break;
    case S1F_ERR_MEMORY: type = PyExc_MemoryError; break;
    case S1F_ERR_SYSTEM: type = PyExc_OSError; break;
    case S1F_ERR_PEER:
    case S1F_ERR_TIMEOUT: type = s1f_pipeline_error; break;
    case S1F_ERR_PYTHON: return NULL; /* already set */
    case S1F_ERR_STATE:
    case S1F_OK: break;
    }
    PyErr_SetString(type, s1f_last_error());
    return NULL;
}

s1f_status s1f_check_signals(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    int failed = PyErr_CheckSignals();
    PyGILState_Release(state);
    return failed ? S1F_ERR_PYTHON : S1F_OK;
}

static int add_exception(PyObject *module, const char *name, const char *full_name, const char *doc, PyObject *base,
                         PyObject **slot)
{
    if (*slot == NULL && (*slot = PyErr_NewExceptionWithDoc(full_name, doc, base, NULL)) == NULL)
        return -1;
    Py_INCREF(*slot);
    if (PyModule_AddObject(module, name, *slot) < 0) {
        Py_DECREF(*slot);
        return -1;
    }
    return 0;
}

#define S1F_TESTED_VALUE(function) function,
static const s1f_tested tested = {S1F_TESTED(S1F_TESTED_VALUE)};

static int module_exec(PyObject *module)
{
    PyMethodDef *const tables[] = {s1f_partition_methods, s1f_unit_methods,  s1f_schedule_methods, s1f_simulate_methods,
                                   s1f_attention_methods, s1f_group_methods, s1f_edge_methods,     s1f_device_methods,
                                   s1f_executor_methods,  s1f_cuda_methods,  s1f_tier_methods};
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (PyModule_AddFunctions(module, tables[i]) < 0)
            return -1;
    if (s1f_add_constants(module) < 0 ||
        s1f_add_object(module, "_tested", PyCapsule_New((void *)(uintptr_t)&tested, S1F_TESTED_NAME, NULL)) < 0)
        return -1;
    if (add_exception(module, "ScheduleError", "seq1f1b.ScheduleError",
                      "An order of units breaks a rule; the message names the rule and the units.", PyExc_ValueError,
                      &s1f_schedule_error) < 0)
        return -1;
    if (add_exception(module, "PipelineError", "seq1f1b.PipelineError",
                      "A peer was lost, made no progress in time, or ended the step: see .rank, .unit and .edge.",
                      PyExc_RuntimeError, &s1f_pipeline_error) < 0)
        return -1;
    s1f_interrupted = s1f_check_signals;
    static const char *const attributes[] = {"rank", "unit", "edge"}; /* None where unknown */
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (PyObject_SetAttrString(s1f_pipeline_error, attributes[i], Py_None) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "seq1f1b._C",
    .m_doc = "C core of seq1f1b. Private: import seq1f1b instead.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
