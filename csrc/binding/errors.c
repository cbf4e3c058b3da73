/* errors.c - from the core's statuses to Python's exceptions. */
#include "../run/group.h"
#include "binding.h"

#include <string.h>

static PyObject *schedule_error; /* seq1f1b.ScheduleError(ValueError) */
static PyObject *pipeline_error; /* seq1f1b.PipelineError(RuntimeError) */

enum { RANK, UNIT, EDGE, NUM_ATTRIBUTES };
static const char *const attributes[] = {"rank", "unit", "edge"}; /* of a PipelineError; None where unknown */

PyObject *s1f_decode(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyObject *s1f_raise(s1f_status status)
{
    PyObject *const types[] = {
        [S1F_ERR_ARG] = PyExc_ValueError,     [S1F_ERR_SCHEDULE] = schedule_error, [S1F_ERR_MEMORY] = PyExc_MemoryError,
        [S1F_ERR_STATE] = PyExc_RuntimeError, [S1F_ERR_SYSTEM] = PyExc_OSError,    [S1F_ERR_PEER] = pipeline_error,
        [S1F_ERR_TIMEOUT] = pipeline_error};
    if (status == S1F_ERR_PYTHON) /* already set */
        return NULL;
    PyObject *decoded = s1f_decode(s1f_last_error());
    if (decoded != NULL)
        PyErr_SetObject(types[status], decoded);
    Py_XDECREF(decoded);
    return NULL;
}

void s1f_tell_failure(const s1f_group *group)
{
    if (group == NULL || !PyErr_ExceptionMatches(pipeline_error))
        return;
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    if (failure.rank < 0)
        return;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    const char *const texts[] = {failure.unit, failure.edge};
    PyObject *const values[] = {PyLong_FromLong(failure.rank), s1f_decode(texts[0]), s1f_decode(texts[1])};
    for (int i = 0; i < NUM_ATTRIBUTES; i++) {
        if ((i == RANK || texts[i - 1][0] != '\0') &&
            (values[i] == NULL || PyObject_SetAttrString(error, attributes[i], values[i]) < 0))
            PyErr_Clear(); /* the error itself matters more than its attributes */
        Py_XDECREF(values[i]);
    }
    PyErr_Restore(type, error, traceback);
}

PyObject *s1f_raise_for_group(s1f_status status, const s1f_group *group)
{
    s1f_raise(status);
    s1f_tell_failure(group);
    return NULL;
}

/* Runs Python's signal handlers, with or without the GIL; S1F_ERR_PYTHON where one raised. */
static s1f_status check_signals(void)
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
    for (int i = 0; i < NUM_ATTRIBUTES; i++)
        if (PyObject_SetAttrString(pipeline_error, attributes[i], Py_None) < 0)
            return -1;
    s1f_interrupted = check_signals;
    return 0;
}
