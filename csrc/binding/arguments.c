/* arguments.c - from Python's arguments to the core's types, and from the core's results to Python's. */
#include "binding.h"

#include "../core/program.h"
#include "../device/copy_end.h"
#include "../run/arena.h"
#include "../run/kv_cache.h"
#include "../run/tier.h"

#include <string.h>

/* -- handles ------------------------------------------------------------------------------------------------------- */

void *s1f_from_capsule(PyObject *capsule, const char *name)
{
    if (!PyCapsule_IsValid(capsule, name)) {
        PyErr_Format(PyExc_TypeError, "expected a %s handle", name);
        return NULL;
    }
    return PyCapsule_GetPointer(capsule, name);
}

/* A capsule that keeps `borrowed`. On an error the pointer is still the caller's. */
static PyObject *wrap(void *core, const char *name, PyCapsule_Destructor destroy, PyObject *borrowed)
{
    PyObject *capsule = PyCapsule_New(core, name, destroy);
    if (capsule != NULL && borrowed != NULL)
        PyCapsule_SetContext(capsule, Py_NewRef(borrowed));
    return capsule;
}

/* Freeing may wait: a watchdog joins its thread, an end between GPUs waits for transfers that are under way. */
#define S1F_DEFINE_HANDLE(name, NAME)                                                                                  \
    static void destroy_##name(PyObject *capsule)                                                                      \
    {                                                                                                                  \
        s1f_##name *core = PyCapsule_GetPointer(capsule, S1F_CAPSULE_##NAME);                                          \
        PyObject *borrowed = PyCapsule_GetContext(capsule);                                                            \
        Py_BEGIN_ALLOW_THREADS                                                                                         \
        s1f_##name##_free(core);                                                                                       \
        Py_END_ALLOW_THREADS                                                                                           \
        Py_XDECREF(borrowed);                                                                                          \
    }                                                                                                                  \
    int s1f_to_##name(PyObject *handle, void *out)                                                                     \
    {                                                                                                                  \
        s1f_##name *core = s1f_from_capsule(handle, S1F_CAPSULE_##NAME);                                               \
        *(s1f_##name **)out = core;                                                                                    \
        return core != NULL;                                                                                           \
    }                                                                                                                  \
    PyObject *s1f_new_##name(s1f_status status, void *core, PyObject *borrowed)                                        \
    {                                                                                                                  \
        if (status != S1F_OK)                                                                                          \
            return s1f_raise(status);                                                                                  \
        PyObject *handle = wrap(core, S1F_CAPSULE_##NAME, destroy_##name, borrowed);                                   \
        if (handle == NULL)                                                                                            \
            s1f_##name##_free(core);                                                                                   \
        return handle;                                                                                                 \
    }
S1F_HANDLES(S1F_DEFINE_HANDLE)

/* -- numbers ------------------------------------------------------------------------------------------------------- */

int s1f_to_int64(PyObject *number, void *out)
{
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow)
        PyErr_Format(PyExc_ValueError, "%S does not fit in 64 bits", number);
    if (overflow || (value == -1 && PyErr_Occurred()))
        return 0;
    *(int64_t *)out = value;
    return 1;
}

int s1f_to_address(PyObject *number, void *out)
{
    void *address = PyLong_AsVoidPtr(number);
    memcpy(out, &address, sizeof address);
    return address != NULL || !PyErr_Occurred();
}

/* PyArg_ParseTuple calls a converter once more, with NULL, where a later argument is refused. */
static int to_array(PyObject *given, s1f_array *array, Py_ssize_t value_bytes)
{
    if (given == NULL)
        PyBuffer_Release(&array->view);
    if (given == NULL || given == Py_None)
        return Py_CLEANUP_SUPPORTED;
    if (PyObject_GetBuffer(given, &array->view, PyBUF_SIMPLE) != 0)
        return 0;
    if (array->view.itemsize != value_bytes) {
        PyErr_Format(PyExc_TypeError, "%s must be an array of values of %zd bytes", array->name, value_bytes);
        PyBuffer_Release(&array->view);
        return 0;
    }
    array->count = array->view.len / value_bytes;
    array->values = array->view.buf;
    return Py_CLEANUP_SUPPORTED;
}

int s1f_to_array(PyObject *given, void *out)
{
    return to_array(given, out, sizeof(int64_t));
}

int s1f_to_int32_array(PyObject *given, void *out)
{
    return to_array(given, out, sizeof(int32_t));
}

int s1f_read_arrays(PyObject *tuple, s1f_array *arrays, int count)
{
    int is_read = PyTuple_Check(tuple) && s1f_require_count("the tuple of arrays", PyTuple_Size(tuple), count);
    for (int i = 0; i < count && is_read; i++)
        is_read = s1f_to_array(PyTuple_GetItem(tuple, i), &arrays[i]) &&
                  (arrays[i].values == NULL || s1f_require_count(arrays[i].name, arrays[i].count, arrays[i].wanted));
    return is_read;
}

void s1f_release_arrays(s1f_array *arrays, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&arrays[i].view);
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
