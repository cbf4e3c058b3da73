/* errors.c - from the core's statuses to Python's exceptions. */
#include "binding.h"

#include <string.h>

static PyObject *schedule_error; /* seq1f1b.ScheduleError(ValueError) */
static PyObject *pipeline_error; /* seq1f1b.PipelineError(RuntimeError) */

PyObject *s1f_raise(s1f_status status)
{
    PyObject *type = PyExc_RuntimeError;
    switch (status) {
    case S1F_ERR_ARG: type = PyExc_ValueError; break;
    case S1F_ERR_TYPE: type = PyExc_TypeError; break;
    case S1F_ERR_SCHEDULE: type = schedule_error; break;
    case S1F_ERR_MEMORY: type = PyExc_MemoryError; break;
    case S1F_ERR_SYSTEM: type = PyExc_OSError; break;
    case S1F_ERR_PEER:
    case S1F_ERR_TIMEOUT: type = pipeline_error; break;
    case S1F_ERR_PYTHON: return NULL; /* already set */
    case S1F_ERR_STATE:
    case S1F_OK: break;
    }
    const char *text = s1f_last_error(); /* what it quotes may be cut within a character */
    PyObject *decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (decoded != NULL)
        PyErr_SetObject(type, decoded);
    Py_XDECREF(decoded);
    return NULL;
}

PyObject *s1f_none(s1f_status status)
{
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

s1f_status s1f_check_signals(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    int failed = PyErr_CheckSignals();
    PyGILState_Release(state);
    return failed ? S1F_ERR_PYTHON : S1F_OK;
}

static int add_exception(PyObject *module, const char *full_name, const char *doc, PyObject *base, PyObject **slot)
{
    if (*slot == NULL && (*slot = PyErr_NewExceptionWithDoc(full_name, doc, base, NULL)) == NULL)
        return -1;
    return s1f_add_object(module, strrchr(full_name, '.') + 1, Py_NewRef(*slot));
}

int s1f_add_errors(PyObject *module)
{
    if (add_exception(module, "seq1f1b.ScheduleError",
                      "An order of units breaks a rule; the message names the rule and the units.", PyExc_ValueError,
                      &schedule_error) < 0 ||
        add_exception(module, "seq1f1b.PipelineError",
                      "A peer was lost, made no progress in time, or ended the step: see .rank, .unit and .edge.",
                      PyExc_RuntimeError, &pipeline_error) < 0)
        return -1;
    static const char *const attributes[] = {"rank", "unit", "edge"}; /* None where unknown */
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (PyObject_SetAttrString(pipeline_error, attributes[i], Py_None) < 0)
            return -1;
    s1f_interrupted = s1f_check_signals;
    return 0;
}
