/* group.c - conversions for groups of ranks: mappings, the block that ranks share, errors of a step. */
#include "binding.h"

#include "../run/arena.h"
#include "../run/group.h"

#include <stdlib.h>
#include <unistd.h>

/* -- mappings and groups ------------------------------------------------------------------------------------------- */

static void close_descriptor(PyObject *capsule)
{
    close((int)((intptr_t)PyCapsule_GetPointer(capsule, S1F_CAPSULE(descriptor)) - 1));
}

/* In C, because a signal handler may raise at any line of a Python destructor. */
S1F_METHOD(PyObject *, descriptor_own, int32_t, fd)
{
    return PyCapsule_New((void *)(intptr_t)(fd + 1), S1F_CAPSULE(descriptor), close_descriptor); /* 0 is no pointer */
}

S1F_CORE_MAKES(mapping, mapping_create, int32_t, fd, int64_t, bytes)
S1F_CORE(int64_t, group_block_bytes, int32_t, num_ranks)

S1F_METHOD(PyObject *, group_create, s1f_mapping *, mapping, int32_t, num_ranks, int32_t, rank, PyObject *, host)
{
    s1f_mapping *spoiled = NULL;
    if (host != Py_None && !s1f_to_mapping(host, "host", &spoiled))
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
        status = s1f_group_create(mapping->memory, num_ranks, rank, &group);
    if (status == S1F_OK && spoiled != NULL)
        s1f_group_share_spoiled(group, spoiled->memory);
    return s1f_new_group(status, group, arguments);
}

S1F_METHOD(s1f_status, group_set_limits, s1f_group *, group, double, timeout_s, double, spin_us)
{
    if (!(timeout_s > 0 && timeout_s < 1e9) || !(spin_us >= 0 && spin_us < 1e12))
        return s1f_fail(S1F_ERR_ARG, "timeout must be above 0 s and spin at least 0 us");
    s1f_group_set_limits(group, (int64_t)(timeout_s * 1e9), (int64_t)(spin_us * 1e3));
    return S1F_OK;
}

S1F_CORE_VOID(void, group_begin_step, s1f_group *, group, int64_t, step)
S1F_CORE_VOID(void, group_enter, s1f_group *, group, int64_t, step)
S1F_CORE_WAITS(s1f_status, group_finish_step, s1f_group *, group, int32_t, last_rank, int32_t, hangup_fd)

/* -- progress and failures ----------------------------------------------------------------------------------------- */

S1F_CORE_VOID(void, group_progress, s1f_group *, group, const char *, what)

S1F_METHOD(s1f_status, group_set_progress, s1f_group *, group, int32_t, rank, const char *, what, double, age_s,
           int32_t, waiting_for)
{
    if (!(age_s >= 0 && age_s <= 1e9)) /* another rank wrote the text to the store */
        return s1f_fail(S1F_ERR_ARG, "rank %d did that %g s ago, must be in 0..1e9", rank, age_s);
    s1f_group_set_progress(group, rank, what, (int64_t)(age_s * 1e9), waiting_for);
    return S1F_OK;
}

S1F_METHOD(PyObject *, group_get_progress, s1f_group *, group, int32_t, rank)
{
    s1f_progress found = s1f_group_get_progress(group, rank);
    double seconds = found.age_ns < 0 ? -1.0 : (double)found.age_ns * 1e-9;
    return Py_BuildValue("(sdi)", found.what, seconds, (int)found.waiting_for);
}

S1F_METHOD(s1f_status, group_fail, s1f_group *, group, int32_t, rank, const char *, text, const char *, unit,
           const char *, edge, int64_t, step)
{
    s1f_failure failure = s1f_failure_of(rank, text, unit, edge, step);
    s1f_group_fail_with(group, &failure);
    return S1F_OK;
}

S1F_CORE(bool, group_is_spoiled, s1f_group *, group)
S1F_CORE(s1f_status, group_check, s1f_group *, group)

static PyObject *failure_tuple(const s1f_failure *failure)
{
    return Py_BuildValue("(iNssL)", (int)failure->rank, s1f_decode(failure->text), failure->unit, failure->edge,
                         (long long)failure->step);
}

S1F_METHOD(PyObject *, group_failure, s1f_group *, group)
{
    s1f_failure failure;
    s1f_group_failure(group, &failure);
    return failure.rank < 0 ? Py_NewRef(Py_None) : failure_tuple(&failure);
}

S1F_METHOD(s1f_status, group_leave, s1f_group *, group, int64_t, step, int32_t, rank, const char *, text, const char *,
           unit, const char *, edge)
{
    s1f_failure failure = s1f_failure_of(rank, text, unit, edge, 0);
    s1f_group_leave(group, step, &failure);
    return S1F_OK;
}

S1F_METHOD(PyObject *, group_passed, s1f_group *, group, int64_t, step)
{
    s1f_failure failure;
    return s1f_group_passed(group, step, &failure) ? failure_tuple(&failure) : Py_NewRef(Py_None);
}

S1F_CORE_VOID(void, group_clear, s1f_group *, group)

/* -- gather -------------------------------------------------------------------------------------------------------- */

S1F_METHOD(PyObject *, group_gather, s1f_group *, group, int64_t, epoch, int64_t, round, bool, recovering, s1f_bytes,
           data, s1f_int32s, hangup_fds)
{
    int64_t count = hangup_fds.count;
    char *theirs = malloc((size_t)count * S1F_GATHER_BYTES + 1);
    int32_t *lengths = calloc((size_t)count + 1, sizeof *lengths);
    int32_t length = data.count > S1F_GATHER_BYTES ? S1F_GATHER_BYTES + 1 : (int32_t)data.count;
    s1f_status status;
    if (theirs == NULL || lengths == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for what %lld ranks give", (long long)count);
    else
        S1F_WITHOUT_GIL(status = s1f_group_gather(group, (uint32_t)epoch, (uint32_t)round, recovering, data.values,
                                                  length, hangup_fds.values, theirs, lengths));
    PyObject *result = status == S1F_OK ? PyList_New((Py_ssize_t)count) : s1f_raise(status);
    for (int64_t rank = 0; result != NULL && rank < count; rank++) {
        PyObject *bytes = PyBytes_FromStringAndSize(theirs + rank * S1F_GATHER_BYTES, lengths[rank]);
        if (bytes == NULL || PyList_SetItem(result, (Py_ssize_t)rank, bytes) < 0)
            Py_CLEAR(result);
    }
    free(lengths);
    free(theirs);
    return result;
}

PyMethodDef s1f_group_methods[] = {
    S1F_ROW(descriptor_own, "Closes the descriptor as it is freed."),
    S1F_ROW(mapping_create, "Maps shared memory of a descriptor."),
    S1F_ROW(group_block_bytes, "Size of the block that the ranks share."),
    S1F_ROW(group_create, "One rank's view of a block, and of what ranks of its host share beside it, or None."),
    S1F_ROW(group_set_limits, "Longest silence of a peer; how long to spin before sleeping."),
    S1F_ROW(group_enter, "Comes to a step, which may not begin, or has left the one before well."),
    S1F_ROW(group_begin_step, "Begins a step."),
    S1F_ROW(group_finish_step, "Waits until that rank's units are done as well."),
    S1F_ROW(group_is_spoiled, "Whether what this rank received in its step may be worth nothing."),
    S1F_ROW(group_progress, "Says what this rank does now."),
    S1F_ROW(group_set_progress, "Says what a watcher has learnt of another rank."),
    S1F_ROW(group_get_progress,
            "-> tuple[str, float, int]: what it does, for so many seconds or -1, the rank it waits for or -1."),
    S1F_ROW(group_fail,
            "Ends a step, and those after it, on every rank; 0: the one that this rank is in. The first call wins."),
    S1F_ROW(group_check, "Raises PipelineError once a failure ends the step that this rank is in."),
    S1F_ROW(group_failure,
            "-> tuple[int, str, str, str, int] | None: rank, text, unit, edge, first step that it ends, unless this "
            "rank's step goes on."),
    S1F_ROW(group_leave, "Leaves a step by an error, which others are told."),
    S1F_ROW(group_passed,
            "-> tuple[int, str, str, str, int] | None: as group_failure, of a rank that has left the step or come to "
            "a later one."),
    S1F_ROW(group_clear, "Forgets the failure of earlier steps."),
    S1F_ROW(group_gather, "-> list[bytes]: of every rank in rank order."),
    {NULL, NULL, 0, NULL}};
