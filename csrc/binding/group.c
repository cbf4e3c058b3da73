/* group.c - conversions for groups of ranks: mappings, the block that ranks share, errors of a step. */
#include "binding.h"

#include "../run/arena.h"
#include "../run/group.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* -- errors and signals ------------------------------------------------------------------------------------------ */

static PyObject *decode(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static int set_text(PyObject *object, const char *name, const char *text)
{
    if (text[0] == '\0')
        return 0;
    PyObject *value = decode(text);
    int result = value == NULL ? -1 : PyObject_SetAttrString(object, name, value);
    Py_XDECREF(value);
    return result;
}

PyObject *s1f_raise_for_group(s1f_status status, const s1f_group *group)
{
    s1f_raise(status);
    if (status != S1F_ERR_PEER && status != S1F_ERR_TIMEOUT)
        return NULL;
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    if (failure.rank < 0)
        return NULL;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *rank = PyLong_FromLong(failure.rank);
    if (rank == NULL || PyObject_SetAttrString(error, "rank", rank) < 0 || set_text(error, "unit", failure.unit) < 0 ||
        set_text(error, "edge", failure.edge) < 0)
        PyErr_Clear(); /* the error itself matters more than its attributes */
    Py_XDECREF(rank);
    PyErr_Restore(type, error, traceback);
    return NULL;
}

PyObject *s1f_none_of(s1f_status status, const s1f_group *group)
{
    return status == S1F_OK ? Py_NewRef(Py_None) : s1f_raise_for_group(status, group);
}

/* Called while waiting, without the GIL. */
static s1f_status check_signals(void *context)
{
    (void)context;
    return s1f_check_signals();
}

/* -- mappings and groups ------------------------------------------------------------------------------------------- */

static void close_descriptor(PyObject *capsule)
{
    close((int)((intptr_t)PyCapsule_GetPointer(capsule, S1F_CAPSULE_DESCRIPTOR) - 1));
}

/* In C, because a signal handler may raise at any line of a Python destructor. */
static PyObject *descriptor_own(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int fd;
    if (!PyArg_ParseTuple(arguments, "i", &fd))
        return NULL;
    return PyCapsule_New((void *)(intptr_t)(fd + 1), S1F_CAPSULE_DESCRIPTOR, close_descriptor); /* 0 is no pointer */
}

static PyObject *mapping_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int fd;
    int64_t bytes;
    if (!PyArg_ParseTuple(arguments, "iO&", &fd, s1f_to_int64, &bytes))
        return NULL;
    s1f_mapping *mapping = NULL;
    s1f_status status = s1f_mapping_create(fd, bytes, &mapping);
    return s1f_new_mapping(status, mapping, NULL);
}

static PyObject *group_block_bytes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int num_ranks;
    if (!PyArg_ParseTuple(arguments, "i", &num_ranks))
        return NULL;
    return PyLong_FromSize_t(s1f_group_block_bytes(num_ranks));
}

static PyObject *group_create(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_mapping *mapping, *spoiled = NULL;
    int num_ranks, rank;
    if (!PyArg_ParseTuple(arguments, "O&ii|O&", s1f_to_mapping, &mapping, &num_ranks, &rank, s1f_to_mapping, &spoiled))
        return NULL;
    s1f_status status = S1F_OK;
    s1f_group *group = NULL;
    if (num_ranks >= 1 && mapping->bytes < (int64_t)s1f_group_block_bytes(num_ranks))
        status = s1f_fail(S1F_ERR_ARG, "the block of %d ranks needs %lld bytes, the mapping has %lld", num_ranks,
                          (long long)s1f_group_block_bytes(num_ranks), (long long)mapping->bytes);
    else if (spoiled != NULL && spoiled->bytes < (int64_t)sizeof(s1f_spoiled))
        status = s1f_fail(S1F_ERR_ARG, "what ranks of a host share needs %d bytes, the mapping has %lld",
                          (int)sizeof(s1f_spoiled), (long long)spoiled->bytes);
    if (status == S1F_OK)
        status = s1f_group_create(mapping->memory, num_ranks, rank, check_signals, NULL, &group);
    if (status == S1F_OK && spoiled != NULL)
        s1f_group_share_spoiled(group, spoiled->memory);
    return s1f_new_group(status, group, arguments);
}

static PyObject *group_set_limits(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    double timeout_s, spin_us;
    if (!PyArg_ParseTuple(arguments, "O&dd", s1f_to_group, &group, &timeout_s, &spin_us))
        return NULL;
    if (!(timeout_s > 0 && timeout_s < 1e9) || !(spin_us >= 0 && spin_us < 1e12))
        return PyErr_Format(PyExc_ValueError, "timeout must be above 0 s and spin at least 0 us");
    s1f_group_set_limits(group, (int64_t)(timeout_s * 1e9), (int64_t)(spin_us * 1e3));
    Py_RETURN_NONE;
}

S1F_METHOD_OF_NUMBER(group_begin_step, group, group, step)
{
    s1f_group_begin_step(group, step);
    Py_RETURN_NONE;
}

S1F_METHOD_OF_NUMBER(group_enter, group, group, step)
{
    s1f_group_enter(group, step);
    Py_RETURN_NONE;
}

S1F_METHOD_DOES(group_end_step, group, group, s1f_group_end_step(group))

static PyObject *group_finish_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    int last_rank, hangup_fd;
    if (!PyArg_ParseTuple(arguments, "O&ii", s1f_to_group, &group, &last_rank, &hangup_fd))
        return NULL;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_group_finish_step(group, last_rank, hangup_fd));
    return s1f_none_of(status, group);
}

/* -- progress and failures ----------------------------------------------------------------------------------------- */

static PyObject *group_progress(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    const char *what;
    if (!PyArg_ParseTuple(arguments, "O&s", s1f_to_group, &group, &what))
        return NULL;
    s1f_group_progress(group, what);
    Py_RETURN_NONE;
}

static PyObject *group_set_progress(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    int rank, waiting_for;
    const char *what;
    double age_s;
    if (!PyArg_ParseTuple(arguments, "O&isdi", s1f_to_group, &group, &rank, &what, &age_s, &waiting_for))
        return NULL;
    if (!(age_s >= 0 && age_s <= 1e9)) /* another rank wrote it to the store */
        return s1f_raise(s1f_fail(S1F_ERR_ARG, "rank %d did that %g s ago, must be in 0..1e9", rank, age_s));
    s1f_group_set_progress(group, rank, what, (int64_t)(age_s * 1e9), waiting_for);
    Py_RETURN_NONE;
}

S1F_METHOD_OF_NUMBER(group_get_progress, group, group, rank)
{
    char what[S1F_WHAT_BYTES];
    int64_t age_ns;
    int32_t waiting_for;
    s1f_group_get_progress(group, (int32_t)rank, what, &age_ns, &waiting_for);
    return Py_BuildValue("(sdi)", what, age_ns < 0 ? -1.0 : (double)age_ns * 1e-9, (int)waiting_for);
}

/* Texts that are too long are cut; NULL: "". */
static s1f_failure failure_of(int rank, int64_t step, const char *text, const char *unit, const char *edge)
{
    s1f_failure failure = {.rank = rank, .step = step};
    strncpy(failure.text, text, sizeof failure.text - 1);
    strncpy(failure.unit, unit == NULL ? "" : unit, sizeof failure.unit - 1);
    strncpy(failure.edge, edge == NULL ? "" : edge, sizeof failure.edge - 1);
    return failure;
}

static PyObject *group_fail(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    int rank;
    const char *text, *unit = NULL, *edge = NULL;
    int64_t step = 0;
    if (!PyArg_ParseTuple(arguments, "O&is|zzO&", s1f_to_group, &group, &rank, &text, &unit, &edge, s1f_to_int64,
                          &step))
        return NULL;
    if (unit == NULL && edge == NULL && step == 0) {
        s1f_group_fail(group, rank, text);
        Py_RETURN_NONE;
    }
    s1f_failure failure = failure_of(rank, step, text, unit, edge);
    s1f_group_fail_with(group, &failure);
    Py_RETURN_NONE;
}

S1F_METHOD_RETURNS(group_is_spoiled, group, group, PyBool_FromLong(s1f_group_is_spoiled(group)))
S1F_METHOD_RETURNS(group_check, group, group, s1f_none_of(s1f_group_check(group), group))

static PyObject *failure_tuple(const s1f_failure *failure)
{
    return Py_BuildValue("(iNssL)", (int)failure->rank, decode(failure->text), failure->unit, failure->edge,
                         (long long)failure->step);
}

S1F_METHOD_OF(group_failure, group, group)
{
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    return failure.rank < 0 ? Py_NewRef(Py_None) : failure_tuple(&failure);
}

static PyObject *group_leave(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    int64_t step;
    int rank;
    const char *text, *unit = "", *edge = "";
    if (!PyArg_ParseTuple(arguments, "O&O&is|ss", s1f_to_group, &group, s1f_to_int64, &step, &rank, &text, &unit,
                          &edge))
        return NULL;
    s1f_failure failure = failure_of(rank, 0, text, unit, edge);
    s1f_group_leave(group, step, &failure);
    Py_RETURN_NONE;
}

S1F_METHOD_OF_NUMBER(group_passed, group, group, step)
{
    s1f_failure failure;
    return s1f_group_passed(group, step, &failure) ? failure_tuple(&failure) : Py_NewRef(Py_None);
}

S1F_METHOD_DOES(group_clear, group, group, s1f_group_clear(group))

/* -- gather -------------------------------------------------------------------------------------------------------- */

typedef struct {
    char *data;
    int32_t *bytes;
} gathered;

static PyObject *gathered_item(const void *context, int64_t rank)
{
    const gathered *g = context;
    return PyBytes_FromStringAndSize(g->data + rank * S1F_GATHER_BYTES, g->bytes[rank]);
}

static PyObject *group_gather(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_group *group;
    s1f_array fds = {.name = "hangup_fds"};
    unsigned int epoch, round;
    int recovering;
    const char *data;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(arguments, "O&IIpy#O&", s1f_to_group, &group, &epoch, &round, &recovering, &data, &bytes,
                          s1f_to_int32_array, &fds))
        return NULL;
    gathered g = {.data = malloc((size_t)fds.count * S1F_GATHER_BYTES + 1),
                  .bytes = calloc((size_t)fds.count + 1, sizeof *g.bytes)};
    PyObject *result = NULL;
    if (g.data == NULL || g.bytes == NULL) {
        PyErr_NoMemory();
    } else {
        s1f_status status;
        int32_t length = bytes > S1F_GATHER_BYTES ? S1F_GATHER_BYTES + 1 : (int32_t)bytes;
        S1F_WITHOUT_GIL(
            status = s1f_group_gather(group, epoch, round, recovering, data, length, fds.values, g.data, g.bytes));
        result = status == S1F_OK ? s1f_list_of(fds.count, gathered_item, &g) : s1f_raise_for_group(status, group);
    }
    free(g.bytes);
    free(g.data);
    s1f_release_arrays(&fds, 1);
    return result;
}

PyMethodDef s1f_group_methods[] = {
    S1F_METHOD(descriptor_own, VARARGS, "Closes the descriptor as it is freed."),
    S1F_METHOD(mapping_create, VARARGS, "Maps shared memory of a descriptor."),
    S1F_METHOD(group_block_bytes, VARARGS, "Size of the block that the ranks share."),
    S1F_METHOD(group_create, VARARGS, "One rank's view of a block, and of what ranks of its host share beside it."),
    S1F_METHOD(group_set_limits, VARARGS, "Longest silence of a peer; how long to spin before sleeping."),
    S1F_METHOD(group_enter, VARARGS, "Comes to a step, which may not begin."),
    S1F_METHOD(group_begin_step, VARARGS, "Begins a step."),
    S1F_METHOD(group_end_step, O, "Leaves the step, which went well."),
    S1F_METHOD(group_finish_step, VARARGS, "Waits until that rank's units are done as well."),
    S1F_METHOD(group_is_spoiled, O, "Whether what this rank received in its step may be worth nothing."),
    S1F_METHOD(group_progress, VARARGS, "Says what this rank does now."),
    S1F_METHOD(group_set_progress, VARARGS, "Says what a watcher has learnt of another rank."),
    S1F_METHOD(group_get_progress, VARARGS, "(what, age_s or -1, rank it waits for or -1)."),
    S1F_METHOD(group_fail, VARARGS,
               "Ends a step, and those after it, on every rank; 0: the one that this rank is in. The first call wins."),
    S1F_METHOD(group_check, O, "Raises PipelineError once a failure ends the step that this rank is in."),
    S1F_METHOD(group_failure, O,
               "(rank, text, unit, edge, first step that it ends), None if this rank's step goes on."),
    S1F_METHOD(group_leave, VARARGS, "Leaves a step by an error, which others are told."),
    S1F_METHOD(group_passed, VARARGS,
               "As group_failure, of a rank that has left the step or come to a later one; or None."),
    S1F_METHOD(group_clear, O, "Forgets the failure of earlier steps."),
    S1F_METHOD(group_gather, VARARGS, "Bytes of every rank in rank order."),
    {NULL, NULL, 0, NULL}};
