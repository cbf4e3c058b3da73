/* binding.h - shared by the files that convert between Python and the core. Python.h appears in this folder only.
 *
 * Each file of the folder converts for one room of the core and offers a method table; module.c puts them together.
 * Handles of the core travel as capsules named after their type, whose destructor frees them. */
#ifndef S1F_BINDING_H
#define S1F_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/status.h"

#include <stdint.h>

#define S1F_CAPSULE_SCHEDULE "seq1f1b.schedule"
#define S1F_CAPSULE_PROGRAM "seq1f1b.program"
#define S1F_CAPSULE_KV_CACHE "seq1f1b.kv_cache"
#define S1F_CAPSULE_MAPPING "seq1f1b.mapping"
#define S1F_CAPSULE_GROUP "seq1f1b.group"
#define S1F_CAPSULE_EDGE_END "seq1f1b.edge_end"
#define S1F_CAPSULE_DEVICE "seq1f1b.device"
#define S1F_CAPSULE_EXECUTOR "seq1f1b.executor"
#define S1F_CAPSULE_CUDA_LIBRARY "seq1f1b.cuda_library"

/* Raises the Python exception of a status with s1f_last_error() as its text; returns NULL. */
PyObject *s1f_raise(s1f_status status);
struct s1f_group;
/* The same; a PipelineError also gets .rank, .unit and .edge of the group's failure, where known. */
PyObject *s1f_raise_for_group(s1f_status status, const struct s1f_group *group);
/* The exception classes, made when the module is imported; borrowed. */
extern PyObject *s1f_schedule_error; /* seq1f1b.ScheduleError(ValueError) */
extern PyObject *s1f_pipeline_error; /* seq1f1b.PipelineError(RuntimeError) */

/* The core's pointer in a capsule, NULL with TypeError where it is not one of that name. */
void *s1f_from_capsule(PyObject *capsule, const char *name);

/* A new array (free) of exactly `count` numbers, at least 1, from a Python sequence; NULL with the exception set. */
int64_t *s1f_read_int64s(PyObject *sequence, Py_ssize_t count, const char *name);
double *s1f_read_doubles(PyObject *sequence, Py_ssize_t count, const char *name);

extern PyMethodDef s1f_partition_methods[];
extern PyMethodDef s1f_schedule_methods[];
extern PyMethodDef s1f_simulate_methods[];
extern PyMethodDef s1f_attention_methods[];
extern PyMethodDef s1f_p2p_methods[];
extern PyMethodDef s1f_device_methods[];
extern PyMethodDef s1f_executor_methods[];
extern PyMethodDef s1f_cuda_methods[];

#endif
