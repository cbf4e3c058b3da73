/* binding.h - shared by the files that convert between Python and the core. Python.h appears in this folder only.
 *
 * Each file of the folder converts for one room of the core and offers a method table; module.c puts them together.
 * All of them use errors.c, and arguments.c: the "O&" converters and the makers of results. */
#ifndef S1F_BINDING_H
#define S1F_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/schedule.h"
#include "../core/status.h"
#include "../core/table.h"

#include <stdbool.h>
#include <stdint.h>

/* -- errors -------------------------------------------------------------------------------------------------------- */

/* Raises the Python exception of a status with s1f_last_error() as its text; returns NULL. */
PyObject *s1f_raise(s1f_status status);
struct s1f_group;
/* s1f_raise, by which a PipelineError also gets .rank, .unit and .edge of the group's failure, where known. */
PyObject *s1f_raise_for_group(s1f_status status, const struct s1f_group *group);
PyObject *s1f_decode(const char *text); /* quotes in the text may be cut within a character */
/* Gives these attributes to the exception that is set, if it is a PipelineError. */
void s1f_tell_failure(const struct s1f_group *group);
int s1f_add_errors(PyObject *module); /* the exceptions of this package, to the module; -1 with the exception set */

/* -- handles ------------------------------------------------------------------------------------------------------- */

/* X(name) for each type s1f_<name> of the core whose handle is a capsule around the core's pointer:
 *   s1f_to_<name>: reads a handle; TypeError where it is no handle of this type.
 *   s1f_new_<name>: a handle that takes the pointer over and frees it, without the GIL, when the last reference goes;
 *     the handle keeps `borrowed` (NULL: nothing) alive, from which the core's object borrows. Raises the exception
 *     of a status other than S1F_OK. */
#define S1F_HANDLES(X)                                                                                                 \
    X(schedule)                                                                                                        \
    X(program)                                                                                                         \
    X(kv_cache)                                                                                                        \
    X(mapping)                                                                                                         \
    X(group)                                                                                                           \
    X(edge_end)                                                                                                        \
    X(device)                                                                                                          \
    X(watchdog)                                                                                                        \
    X(walker)
#define S1F_CAPSULE(name) "seq1f1b." #name
#define S1F_DECLARE_HANDLE(name)                                                                                       \
    typedef struct s1f_##name s1f_##name;                                                                              \
    void s1f_##name##_free(s1f_##name *core);                                                                          \
    int s1f_to_##name(PyObject *given, const char *parameter, void *out);                                              \
    PyObject *s1f_new_##name(s1f_status status, void *core, PyObject *borrowed);
S1F_HANDLES(S1F_DECLARE_HANDLE)

/* -- arguments ----------------------------------------------------------------------------------------------------- */

/* Values of a buffer, such as an array.array, a numpy array or a memoryview. None: values is NULL, count 0. */
#define S1F_ARRAYS(X)                                                                                                  \
    X(bytes, unsigned char)                                                                                            \
    X(int32s, int32_t)                                                                                                 \
    X(int64s, int64_t)                                                                                                 \
    X(doubles, double)
#define S1F_DECLARE_ARRAY(name, type)                                                                                  \
    typedef struct {                                                                                                   \
        const type *values; /* borrowed from the view */                                                               \
        int64_t count;                                                                                                 \
        Py_buffer view;                                                                                                \
    } s1f_##name;                                                                                                      \
    int s1f_to_##name(PyObject *given, const char *parameter, void *out);
S1F_ARRAYS(S1F_DECLARE_ARRAY)

typedef struct { /* None: NULL */
    const char *text;
} s1f_path;

/* Each reads what is given for a parameter into a variable of its type: 1, or 0 with the exception set. */
typedef int s1f_reader(PyObject *given, const char *parameter, void *out);
s1f_reader s1f_to_int32, s1f_to_int64, s1f_to_uint64, s1f_to_double, s1f_to_bool, s1f_to_text, s1f_to_path,
    s1f_to_address, s1f_to_object;

#define S1F_READER_OF(name, ...) , s1f_##name * : s1f_to_##name
#define S1F_READER_OF_ARRAY(name, type) , s1f_##name : s1f_to_##name
#define S1F_READER(variable)                                                                                           \
    _Generic((variable), int32_t                                                                                       \
             : s1f_to_int32, int64_t                                                                                  \
             : s1f_to_int64, uint64_t                                                                                  \
             : s1f_to_uint64, double                                                                                   \
             : s1f_to_double, bool                                                                                     \
             : s1f_to_bool, const char *                                                                               \
             : s1f_to_text, s1f_path                                                                                   \
             : s1f_to_path, void *                                                                                     \
             : s1f_to_address, PyObject *                                                                              \
             : s1f_to_object S1F_HANDLES(S1F_READER_OF) S1F_ARRAYS(S1F_READER_OF_ARRAY))

typedef struct {
    s1f_reader *read;
    const char *name;
    void *out;
} s1f_parameter;
/* Reads each argument, None where it is left out at the end. Either way the arguments are released after the call. */
int s1f_read_arguments(const char *method, PyObject *arguments, const s1f_parameter *parameters);
/* A PipelineError of a failed call gets the failure of the group that is, or belongs to, one of the arguments. */
void s1f_release_arguments(const s1f_parameter *parameters, int has_failed);

/* 1, or 0 with ValueError: "<name> holds <count> values, must hold <wanted>"; "<name> is <i>, must be in
 * 0..<end - 1>". */
int s1f_require_count(const char *name, int64_t count, int64_t wanted);
int s1f_require_index(const char *name, int64_t i, int64_t end);

/* -- methods ------------------------------------------------------------------------------------------------------- */

/* X(type, name) for each pair of a list. */
#define S1F_EACH_0(X, ...)
#define S1F_EACH_1(X, type, name) X(type, name)
#define S1F_EACH_2(X, type, name, ...) X(type, name) S1F_EACH_1(X, __VA_ARGS__)
#define S1F_EACH_3(X, type, name, ...) X(type, name) S1F_EACH_2(X, __VA_ARGS__)
#define S1F_EACH_4(X, type, name, ...) X(type, name) S1F_EACH_3(X, __VA_ARGS__)
#define S1F_EACH_5(X, type, name, ...) X(type, name) S1F_EACH_4(X, __VA_ARGS__)
#define S1F_EACH_6(X, type, name, ...) X(type, name) S1F_EACH_5(X, __VA_ARGS__)
#define S1F_EACH_7(X, type, name, ...) X(type, name) S1F_EACH_6(X, __VA_ARGS__)
#define S1F_EACH_8(X, type, name, ...) X(type, name) S1F_EACH_7(X, __VA_ARGS__)
#define S1F_EACH_9(X, type, name, ...) X(type, name) S1F_EACH_8(X, __VA_ARGS__)
#define S1F_EACH_10(X, type, name, ...) X(type, name) S1F_EACH_9(X, __VA_ARGS__)
#define S1F_EACH_11(X, type, name, ...) X(type, name) S1F_EACH_10(X, __VA_ARGS__)
#define S1F_EACH_12(X, type, name, ...) X(type, name) S1F_EACH_11(X, __VA_ARGS__)
#define S1F_EACH_BY(a, A, b, B, c, C, d, D, e, E, f, F, g, G, h, H, i, I, j, J, k, K, l, L, each, ...) each
#define S1F_EACH(X, ...)                                                                                               \
    S1F_EACH_BY(__VA_ARGS__, S1F_EACH_12, , S1F_EACH_11, , S1F_EACH_10, , S1F_EACH_9, , S1F_EACH_8, , S1F_EACH_7, ,    \
                S1F_EACH_6, , S1F_EACH_5, , S1F_EACH_4, , S1F_EACH_3, , S1F_EACH_2, , S1F_EACH_1, S1F_EACH_0)          \
    (X, __VA_ARGS__)

#define S1F_AND_PARAMETER(type, name) , type name
#define S1F_AND_NAME(type, name) , name
#define S1F_VARIABLE(type, name) type name = {0};
#define S1F_READ_PARAMETER(type, name) {S1F_READER(name), #name, &name},

/* Begins a method, a function of the module: the type of its result, its name, then type and name of each parameter.
 * Arguments are read, and the result is made Python's, by these types: an s1f_status is None, or raised. The body
 * follows. In it `arguments` is the tuple of them, for a handle that keeps what it borrows.
 * .ci/stub.py makes seq1f1b/_C.pyi of these lines. */
#define S1F_METHOD(type, method, ...)                                                                                  \
    static type method##_of(PyObject *arguments S1F_EACH(S1F_AND_PARAMETER, __VA_ARGS__));                             \
    static PyObject *method(PyObject *Py_UNUSED(module), PyObject *arguments)                                          \
    {                                                                                                                  \
        S1F_EACH(S1F_VARIABLE, __VA_ARGS__)                                                                            \
        const s1f_parameter parameters[] = {S1F_EACH(S1F_READ_PARAMETER, __VA_ARGS__){0}};                             \
        PyObject *result = NULL;                                                                                       \
        if (s1f_read_arguments(#method, arguments, parameters))                                                        \
            result = S1F_RESULT(method##_of(arguments S1F_EACH(S1F_AND_NAME, __VA_ARGS__)));                           \
        s1f_release_arguments(parameters, result == NULL);                                                             \
        return result;                                                                                                 \
    }                                                                                                                  \
    static type method##_of(PyObject *arguments __attribute__((unused)) S1F_EACH(S1F_AND_PARAMETER, __VA_ARGS__))

/* A whole method: the core's function s1f_<method>, which takes the same. _WAITS: without the GIL. _VOID: which returns
 * nothing. _MAKES: which makes an s1f_<type>, by its last parameter; the result is a handle. */
#define S1F_CALL(method, ...) S1F_CALL_OF(method S1F_EACH(S1F_AND_NAME, __VA_ARGS__))
#define S1F_CALL_OF(...) S1F_CALL_BY_NAME(__VA_ARGS__)
#define S1F_CALL_BY_NAME(method, ...) s1f_##method(__VA_ARGS__)
#define S1F_CORE_MAKES(type, method, ...)                                                                              \
    S1F_METHOD(PyObject *, method, __VA_ARGS__)                                                                        \
    {                                                                                                                  \
        s1f_##type *made = NULL;                                                                                       \
        s1f_status status = S1F_CALL_OF(method S1F_EACH(S1F_AND_NAME, __VA_ARGS__), &made);                            \
        return s1f_new_##type(status, made, NULL);                                                                     \
    }
#define S1F_CORE(type, method, ...)                                                                                    \
    S1F_METHOD(type, method, __VA_ARGS__)                                                                              \
    {                                                                                                                  \
        return S1F_CALL(method, __VA_ARGS__);                                                                          \
    }
#define S1F_CORE_WAITS(type, method, ...)                                                                              \
    S1F_METHOD(type, method, __VA_ARGS__)                                                                              \
    {                                                                                                                  \
        type waited;                                                                                                   \
        S1F_WITHOUT_GIL(waited = S1F_CALL(method, __VA_ARGS__));                                                       \
        return waited;                                                                                                 \
    }
#define S1F_CORE_VOID(type, method, ...)                                                                               \
    S1F_METHOD(s1f_status, method, __VA_ARGS__)                                                                        \
    {                                                                                                                  \
        S1F_CALL(method, __VA_ARGS__);                                                                                 \
        return S1F_OK;                                                                                                 \
    }

/* Runs a statement that may take long, or wait. */
#define S1F_WITHOUT_GIL(statement)                                                                                     \
    do {                                                                                                               \
        PyThreadState *thread_state = PyEval_SaveThread();                                                             \
        statement;                                                                                                     \
        PyEval_RestoreThread(thread_state);                                                                            \
    } while (0)

/* A row of a method table. The text says what the signature does not; where the result is a PyObject *, it begins with
 * "-> " and Python's type. */
#define S1F_ROW(method, text)                                                                                          \
    {                                                                                                                  \
#method, method, METH_VARARGS, text                                                                            \
    }

/* -- results ------------------------------------------------------------------------------------------------------- */

/* A list of `count` new objects item(context, i), or a tuple of them; NULL with the exception set. */
typedef PyObject *s1f_item(const void *context, int64_t i);
PyObject *s1f_list_of(int64_t count, s1f_item *item, const void *context);
PyObject *s1f_tuple_of(int64_t count, s1f_item *item, const void *context);
PyObject *s1f_int64_item(const void *values, int64_t i); /* of int64_t values[] */
PyObject *s1f_name_item(const void *names, int64_t i);   /* of const char *names[] */

/* A memoryview of a copy: "i" int32_t, "q" int64_t, "d" double. */
PyObject *s1f_view_of(const void *values, int64_t bytes, const char *format);
/* Python's object of a method's result. */
PyObject *s1f_from_status(s1f_status status);
PyObject *s1f_from_object(PyObject *object);
#define S1F_RESULT(value)                                                                                              \
    _Generic((value), s1f_status                                                                                       \
             : s1f_from_status, bool                                                                                   \
             : PyBool_FromLong, int64_t                                                                                \
             : PyLong_FromLongLong, uint64_t                                                                           \
             : PyLong_FromUnsignedLongLong, double                                                                     \
             : PyFloat_FromDouble, const char *                                                                        \
             : PyUnicode_FromString, PyObject *                                                                        \
             : s1f_from_object)(value)

/* Adds a new object, or takes NULL with the exception set; -1 with the exception set. */
int s1f_add_object(PyObject *module, const char *name, PyObject *object);

/* (pass, stage, microbatch, segment): everywhere a unit crosses to Python. The pass is an index into _C.PASSES. */
PyObject *s1f_unit_tuple(s1f_unit unit);

/* -- tables -------------------------------------------------------------------------------------------------------- */

int s1f_add_constants(PyObject *module); /* constants.c; -1 with the exception set */

#define S1F_TABLES(X)                                                                                                  \
    X(partition)                                                                                                       \
    X(family)                                                                                                          \
    X(schedule) X(program) X(unit) X(simulate) X(attention) X(group) X(thread) X(edge) X(device) X(executor)
#define S1F_DECLARE_TABLE(name) extern PyMethodDef s1f_##name##_methods[];
S1F_TABLES(S1F_DECLARE_TABLE)

#endif
