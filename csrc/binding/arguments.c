/* arguments.c - from Python's arguments to the core's types, and from the core's results to Python's. */
#include "binding.h"

#include "../run/p2p.h"

#include <string.h>

/* -- handles ------------------------------------------------------------------------------------------------------- */

/* Freeing may wait: a watchdog joins its thread, an end between GPUs waits for transfers that are under way. */
#define S1F_DEFINE_HANDLE(name)                                                                                        \
    static void destroy_##name(PyObject *capsule)                                                                      \
    {                                                                                                                  \
        s1f_##name *core = PyCapsule_GetPointer(capsule, S1F_CAPSULE(name));                                           \
        PyObject *borrowed = PyCapsule_GetContext(capsule);                                                            \
        S1F_WITHOUT_GIL(s1f_##name##_free(core));                                                                      \
        Py_XDECREF(borrowed);                                                                                          \
    }                                                                                                                  \
    int s1f_to_##name(PyObject *given, const char *parameter, void *out)                                               \
    {                                                                                                                  \
        if (!PyCapsule_IsValid(given, S1F_CAPSULE(name))) {                                                            \
            PyErr_Format(PyExc_TypeError, "expected a %s handle as %s", S1F_CAPSULE(name), parameter);                 \
            return 0;                                                                                                  \
        }                                                                                                              \
        *(s1f_##name **)out = PyCapsule_GetPointer(given, S1F_CAPSULE(name));                                          \
        return 1;                                                                                                      \
    }                                                                                                                  \
    PyObject *s1f_new_##name(s1f_status status, void *core, PyObject *borrowed)                                        \
    {                                                                                                                  \
        if (status != S1F_OK)                                                                                          \
            return s1f_raise(status);                                                                                  \
        PyObject *handle = PyCapsule_New(core, S1F_CAPSULE(name), destroy_##name);                                     \
        if (handle == NULL)                                                                                            \
            s1f_##name##_free(core);                                                                                   \
        else if (borrowed != NULL)                                                                                     \
            PyCapsule_SetContext(handle, Py_NewRef(borrowed));                                                         \
        return handle;                                                                                                 \
    }
S1F_HANDLES(S1F_DEFINE_HANDLE)

/* -- values -------------------------------------------------------------------------------------------------------- */

int s1f_to_int64(PyObject *given, const char *parameter, void *out)
{
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow)
        PyErr_Format(PyExc_ValueError, "%s: %S does not fit in 64 bits", parameter, given);
    if (overflow || (value == -1 && PyErr_Occurred()))
        return 0;
    *(int64_t *)out = value;
    return 1;
}

int s1f_to_uint64(PyObject *given, const char *parameter, void *out)
{
    (void)parameter;
    *(uint64_t *)out = PyLong_AsUnsignedLongLong(given);
    return !PyErr_Occurred();
}

int s1f_to_int32(PyObject *given, const char *parameter, void *out)
{
    int64_t value;
    if (!s1f_to_int64(given, parameter, &value))
        return 0;
    if (value != (int32_t)value)
        PyErr_Format(PyExc_ValueError, "%s: %S does not fit in 32 bits", parameter, given);
    *(int32_t *)out = (int32_t)value;
    return value == (int32_t)value;
}

int s1f_to_double(PyObject *given, const char *parameter, void *out)
{
    (void)parameter;
    *(double *)out = PyFloat_AsDouble(given);
    return !PyErr_Occurred();
}

int s1f_to_bool(PyObject *given, const char *parameter, void *out)
{
    (void)parameter;
    int is_true = PyObject_IsTrue(given);
    *(bool *)out = is_true > 0;
    return is_true >= 0;
}

int s1f_to_text(PyObject *given, const char *parameter, void *out)
{
    Py_ssize_t bytes;
    const char *text = PyUnicode_AsUTF8AndSize(given, &bytes);
    if (text != NULL && strlen(text) != (size_t)bytes) {
        PyErr_Format(PyExc_ValueError, "%s: embedded null character", parameter);
        return 0;
    }
    *(const char **)out = text;
    return text != NULL;
}

int s1f_to_path(PyObject *given, const char *parameter, void *out)
{
    return given == Py_None || s1f_to_text(given, parameter, &((s1f_path *)out)->text);
}

int s1f_to_address(PyObject *given, const char *parameter, void *out)
{
    (void)parameter;
    *(void **)out = PyLong_AsVoidPtr(given);
    return !PyErr_Occurred();
}

int s1f_to_object(PyObject *given, const char *parameter, void *out)
{
    (void)parameter;
    *(PyObject **)out = given;
    return 1;
}

static int view_array(PyObject *given, const char *parameter, size_t value_bytes, Py_buffer *view)
{
    if (given == Py_None)
        return 1;
    if (PyObject_GetBuffer(given, view, PyBUF_SIMPLE) != 0)
        return 0;
    if (view->itemsize == (Py_ssize_t)value_bytes)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s must be an array of values of %zu bytes", parameter, value_bytes);
    PyBuffer_Release(view);
    return 0;
}

#define S1F_DEFINE_ARRAY(name, type)                                                                                   \
    int s1f_to_##name(PyObject *given, const char *parameter, void *out)                                               \
    {                                                                                                                  \
        s1f_##name *array = out;                                                                                       \
        if (!view_array(given, parameter, sizeof(type), &array->view))                                                 \
            return 0;                                                                                                  \
        array->values = array->view.buf;                                                                               \
        array->count = array->view.len / (Py_ssize_t)sizeof(type);                                                     \
        return 1;                                                                                                      \
    }
S1F_ARRAYS(S1F_DEFINE_ARRAY)

/* -- all of a method ----------------------------------------------------------------------------------------------- */

int s1f_read_arguments(const char *method, PyObject *arguments, const s1f_parameter *parameters)
{
    Py_ssize_t count = PyTuple_Size(arguments), i = 0;
    for (; parameters[i].read != NULL; i++)
        if (!parameters[i].read(i < count ? PyTuple_GetItem(arguments, i) : Py_None, parameters[i].name,
                                parameters[i].out))
            return 0;
    if (count > i)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", method, i, count);
    return count <= i;
}

#define S1F_RELEASE_ARRAY(name, type)                                                                                  \
    if (parameters->read == s1f_to_##name)                                                                             \
        PyBuffer_Release(&((s1f_##name *)parameters->out)->view);

void s1f_release_arguments(const s1f_parameter *parameters, int has_failed)
{
    for (; parameters->read != NULL; parameters++) {
        S1F_ARRAYS(S1F_RELEASE_ARRAY)
        if (has_failed && parameters->read == s1f_to_group)
            s1f_tell_failure(*(s1f_group **)parameters->out);
        if (has_failed && parameters->read == s1f_to_edge_end && *(s1f_edge_end **)parameters->out != NULL)
            s1f_tell_failure((*(s1f_edge_end **)parameters->out)->group);
    }
}

int s1f_require_count(const char *name, int64_t count, int64_t wanted)
{
    if (count == wanted)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s holds %lld values, must hold %lld", name, (long long)count, (long long)wanted);
    return 0;
}

int s1f_require_index(const char *name, int64_t i, int64_t end)
{
    if (i >= 0 && i < end)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s is %lld, must be in 0..%lld", name, (long long)i, (long long)end - 1);
    return 0;
}

/* -- results ------------------------------------------------------------------------------------------------------- */

PyObject *s1f_list_of(int64_t count, s1f_item *item, const void *context)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *value = item(context, i);
        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, value); /* steals */
    }
    return list;
}

PyObject *s1f_tuple_of(int64_t count, s1f_item *item, const void *context)
{
    PyObject *list = s1f_list_of(count, item, context);
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

PyObject *s1f_int64_item(const void *values, int64_t i)
{
    return PyLong_FromLongLong(((const int64_t *)values)[i]);
}

PyObject *s1f_name_item(const void *names, int64_t i)
{
    return PyUnicode_FromString(((const char *const *)names)[i]);
}

PyObject *s1f_view_of(const void *values, int64_t bytes, const char *format)
{
    PyObject *copy = PyBytes_FromStringAndSize(values, (Py_ssize_t)bytes);
    PyObject *view = copy == NULL ? NULL : PyMemoryView_FromObject(copy);
    PyObject *typed = view;
    if (view != NULL && bytes > 0) { /* Python casts no empty view */
        typed = PyObject_CallMethod(view, "cast", "s", format);
        Py_DECREF(view);
    }
    Py_XDECREF(copy);
    return typed;
}

PyObject *s1f_from_status(s1f_status status)
{
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise(status);
}

PyObject *s1f_from_object(PyObject *object)
{
    return object;
}

PyObject *s1f_unit_tuple(s1f_unit unit)
{
    return Py_BuildValue("(iiii)", (int)unit.pass, (int)unit.stage, (int)unit.microbatch, (int)unit.segment);
}

int s1f_add_object(PyObject *module, const char *name, PyObject *object)
{
    if (object == NULL || PyModule_AddObject(module, name, object) == 0) /* steals */
        return object == NULL ? -1 : 0;
    Py_DECREF(object);
    return -1;
}
