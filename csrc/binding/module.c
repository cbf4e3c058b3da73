/* module.c - the extension module seq1f1b._C: limited API, multi-phase initialisation. */
#include "binding.h"
#include "tested.h"

#define S1F_TESTED_VALUE(function) function,
static const s1f_tested tested = {S1F_TESTED(S1F_TESTED_VALUE)};

#define S1F_TABLE(name) s1f_##name##_methods,

static int module_exec(PyObject *module)
{
    PyMethodDef *const tables[] = {S1F_TABLES(S1F_TABLE)};
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (PyModule_AddFunctions(module, tables[i]) < 0)
            return -1;
    if (s1f_add_errors(module) < 0 || s1f_add_constants(module) < 0)
        return -1;
    return s1f_add_object(module, "_tested", PyCapsule_New((void *)(uintptr_t)&tested, S1F_TESTED_NAME, NULL));
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
