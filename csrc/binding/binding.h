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

#include <stdint.h>

/* -- errors -------------------------------------------------------------------------------------------------------- */

/* Raises the Python exception of a status with s1f_last_error() as its text; returns NULL. */
PyObject *s1f_raise(s1f_status status);
/* Runs Python's signal handlers, with or without the GIL; S1F_ERR_PYTHON where one raised. */
s1f_status s1f_check_signals(void);
struct s1f_group;
/* s1f_raise, by which a PipelineError also gets .rank, .unit and .edge of the group's failure, where known. */
PyObject *s1f_raise_for_group(s1f_status status, const struct s1f_group *group);
/* None, or the exception of the status; of s1f_raise_for_group. */
PyObject *s1f_none(s1f_status status);
PyObject *s1f_none_of(s1f_status status, const struct s1f_group *group);
int s1f_add_errors(PyObject *module); /* the exceptions of this package, to the module; -1 with the exception set */

/* -- handles ------------------------------------------------------------------------------------------------------- */

#define S1F_CAPSULE_SCHEDULE "seq1f1b.schedule"
#define S1F_CAPSULE_PROGRAM "seq1f1b.program"
#define S1F_CAPSULE_KV_CACHE "seq1f1b.kv_cache"
#define S1F_CAPSULE_DESCRIPTOR "seq1f1b.descriptor"
#define S1F_CAPSULE_MAPPING "seq1f1b.mapping"
#define S1F_CAPSULE_GROUP "seq1f1b.group"
#define S1F_CAPSULE_EDGE_END "seq1f1b.edge_end"
#define S1F_CAPSULE_DEVICE "seq1f1b.device"
#define S1F_CAPSULE_WATCHDOG "seq1f1b.watchdog"
#define S1F_CAPSULE_TIER "seq1f1b.tier"
#define S1F_CAPSULE_EXECUTOR "seq1f1b.executor"

/* The core's pointer in a capsule, NULL with TypeError where it is not one of that name. */
void *s1f_from_capsule(PyObject *capsule, const char *name);

/* X(name, NAME) for each type whose handle is a capsule around the core's pointer:
 *   s1f_to_<name>: "O&" converter from a handle to the pointer; TypeError where it is no handle of this type.
 *   s1f_new_<name>: a handle that takes the pointer over and frees it, without the GIL, when the last reference goes;
 *     it keeps `borrowed` (NULL: nothing), in which lives what the core's object borrows. The exception of the status
 *     where that is not S1F_OK. */
#define S1F_HANDLES(X)                                                                                                 \
    X(schedule, SCHEDULE)                                                                                              \
    X(program, PROGRAM)                                                                                                \
    X(kv_cache, KV_CACHE)                                                                                              \
    X(mapping, MAPPING)                                                                                                \
    X(group, GROUP)                                                                                                    \
    X(edge_end, EDGE_END)                                                                                              \
    X(device, DEVICE)                                                                                                  \
    X(tier, TIER)                                                                                                      \
    X(watchdog, WATCHDOG)
#define S1F_DECLARE_HANDLE(name, NAME)                                                                                 \
    int s1f_to_##name(PyObject *handle, void *out);                                                                    \
    PyObject *s1f_new_##name(s1f_status status, void *core, PyObject *borrowed);
S1F_HANDLES(S1F_DECLARE_HANDLE)

/* -- methods ------------------------------------------------------------------------------------------------------- */

/* A row of a method table. The text says what the signature does not, which the stub, _C.pyi, has. */
#define S1F_METHOD(name, arguments, text)                                                                              \
    {                                                                                                                  \
#name, name, METH_##arguments, text                                                                            \
    }

/* Begins a method (METH_O) of one handle; the body follows, in which `core` names what the handle holds. */
#define S1F_METHOD_OF(method, type, core)                                                                              \
    static PyObject *method##_of(s1f_##type *core);                                                                    \
    static PyObject *method(PyObject *Py_UNUSED(module), PyObject *handle)                                             \
    {                                                                                                                  \
        s1f_##type *core;                                                                                              \
        return s1f_to_##type(handle, &core) ? method##_of(core) : NULL;                                                \
    }                                                                                                                  \
    static PyObject *method##_of(s1f_##type *core)

/* Begins a method (METH_VARARGS) of a handle and a number, an int64_t. */
#define S1F_METHOD_OF_NUMBER(method, type, core, number)                                                               \
    static PyObject *method##_of(s1f_##type *core, int64_t number);                                                    \
    static PyObject *method(PyObject *Py_UNUSED(module), PyObject *arguments)                                          \
    {                                                                                                                  \
        s1f_##type *core;                                                                                              \
        int64_t number;                                                                                                \
        return PyArg_ParseTuple(arguments, "O&O&", s1f_to_##type, &core, s1f_to_int64, &number)                        \
                   ? method##_of(core, number)                                                                         \
                   : NULL;                                                                                             \
    }                                                                                                                  \
    static PyObject *method##_of(s1f_##type *core, int64_t number)

/* A whole method of one handle: it does no more than a statement, or than to return an object. */
#define S1F_METHOD_DOES(method, type, core, statement)                                                                 \
    S1F_METHOD_OF(method, type, core)                                                                                  \
    {                                                                                                                  \
        statement;                                                                                                     \
        Py_RETURN_NONE;                                                                                                \
    }
#define S1F_METHOD_RETURNS(method, type, core, object)                                                                 \
    S1F_METHOD_OF(method, type, core)                                                                                  \
    {                                                                                                                  \
        return object;                                                                                                 \
    }

/* Runs a statement that may take long, or wait. */
#define S1F_WITHOUT_GIL(statement)                                                                                     \
    do {                                                                                                               \
        PyThreadState *thread_state = PyEval_SaveThread();                                                             \
        statement;                                                                                                     \
        PyEval_RestoreThread(thread_state);                                                                            \
    } while (0)

/* -- "O&" converters: 1, or 0 with the exception set --------------------------------------------------------------- */

int s1f_to_int64(PyObject *number, void *out);   /* int64_t; ValueError where it does not fit */
int s1f_to_address(PyObject *number, void *out); /* void *, or another pointer, from an int */

/* Values of a buffer, such as an array.array: doubles or int64_t; int32_t for s1f_to_int32_array. None: values is NULL,
 * count 0. The name is the caller's, for errors. After a successful parse s1f_release_arrays is due. */
typedef struct {
    const char *name;
    int64_t wanted; /* count that s1f_read_arrays requires unless None is given */
    int64_t count;
    const void *values; /* borrowed from the view */
    Py_buffer view;
} s1f_array;
int s1f_to_array(PyObject *given, void *out);
int s1f_to_int32_array(PyObject *given, void *out);
/* From a tuple, by s1f_to_array. s1f_release_arrays is due also on an error. */
int s1f_read_arrays(PyObject *tuple, s1f_array *arrays, int count);
void s1f_release_arrays(s1f_array *arrays, int count);

/* 1, or 0 with ValueError: "<name> holds <count> values, must hold <wanted>"; "<name> is <i>, must be in
 * 0..<end - 1>". */
int s1f_require_count(const char *name, int64_t count, int64_t wanted);
int s1f_require_index(const char *name, int64_t i, int64_t end);

/* -- results ------------------------------------------------------------------------------------------------------- */

/* A list of `count` new objects item(context, i), or a tuple of them; NULL with the exception set. */
typedef PyObject *s1f_item(const void *context, int64_t i);
PyObject *s1f_list_of(int64_t count, s1f_item *item, const void *context);
PyObject *s1f_tuple_of(int64_t count, s1f_item *item, const void *context);
PyObject *s1f_int64_item(const void *values, int64_t i); /* of int64_t values[] */
PyObject *s1f_name_item(const void *names, int64_t i);   /* of const char *names[] */

/* Adds a new object, or takes NULL with the exception set; -1 with the exception set. */
int s1f_add_object(PyObject *module, const char *name, PyObject *object);

/* (pass, stage, microbatch, segment): everywhere a unit crosses to Python. The pass is an index into _C.PASSES. */
PyObject *s1f_unit_tuple(s1f_unit unit);

/* -- tables -------------------------------------------------------------------------------------------------------- */

int s1f_add_constants(PyObject *module); /* constants.c; -1 with the exception set */

extern PyMethodDef s1f_partition_methods[];
extern PyMethodDef s1f_family_methods[];
extern PyMethodDef s1f_schedule_methods[];
extern PyMethodDef s1f_program_methods[];
extern PyMethodDef s1f_unit_methods[];
extern PyMethodDef s1f_simulate_methods[];
extern PyMethodDef s1f_attention_methods[];
extern PyMethodDef s1f_group_methods[];
extern PyMethodDef s1f_thread_methods[];
extern PyMethodDef s1f_edge_methods[];
extern PyMethodDef s1f_device_methods[];
extern PyMethodDef s1f_executor_methods[];
extern PyMethodDef s1f_tier_methods[];

#endif
