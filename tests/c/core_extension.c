/* core_extension.c - what tests and benchmarks ask of the core that the package does not: one transfer, one unit, one
 * instruction set, the instructions of a program. Built and imported by tests/support/core_extension.py.
 *
 * It holds no code of the core, but calls that of seq1f1b._C (csrc/binding/tested.h). */
#include "../../csrc/binding/tested.h"
#include "../../csrc/core/program.h"

static const s1f_tested *core;

/* None, or an error that the group may have told. */
static PyObject *none(s1f_status status, const s1f_edge_end *end)
{
    return status == S1F_OK ? Py_NewRef(Py_None) : core->s1f_raise_for_group(status, end == NULL ? NULL : end->group);
}

/* "O&" converters from a handle of seq1f1b._C to what it holds. */
#define TO(name)                                                                                                       \
    static int to_##name(PyObject *handle, void *out)                                                                  \
    {                                                                                                                  \
        s1f_##name *held = PyCapsule_GetPointer(handle, S1F_CAPSULE(name));                                            \
        *(s1f_##name **)out = held;                                                                                    \
        return held != NULL;                                                                                           \
    }
TO(edge_end)
TO(kv_cache)
TO(program)

/* -- edges: a transfer at a time, as the executor's instructions ask for it ---------------------------------------- */

static PyObject *edge_begin_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    int num_places;
    s1f_status status;
    if (!PyArg_ParseTuple(arguments, "O&i", to_edge_end, &end, &num_places))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = core->s1f_p2p_begin_step(end, num_places);
    Py_END_ALLOW_THREADS
    return none(status, end);
}

static PyObject *edge_post(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    long long sequence;
    int place;
    s1f_status status;
    if (!PyArg_ParseTuple(arguments, "O&Li", to_edge_end, &end, &sequence, &place))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = core->s1f_p2p_post(end, sequence, place);
    Py_END_ALLOW_THREADS
    return none(status, end);
}

/* (dtype code, flags, sizes, address) */
static PyObject *tensor_item(const s1f_tensor_header *tensor, const void *payload)
{
    PyObject *sizes = PyTuple_New(tensor->ndim);
    for (int32_t i = 0; sizes != NULL && i < tensor->ndim; i++)
        PyTuple_SetItem(sizes, i, PyLong_FromLongLong(tensor->sizes[i]));
    return Py_BuildValue("(iiNN)", (int)tensor->dtype, (int)tensor->flags, sizes,
                         PyLong_FromVoidPtr((char *)(uintptr_t)payload + tensor->offset));
}

static PyObject *edge_wait(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    long long sequence;
    int place;
    s1f_status status;
    const s1f_message *message;
    const void *payload;
    if (!PyArg_ParseTuple(arguments, "O&Li", to_edge_end, &end, &sequence, &place))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = core->s1f_p2p_wait(end, sequence, place, &message, &payload);
    Py_END_ALLOW_THREADS
    if (status != S1F_OK)
        return none(status, end);
    PyObject *tensors = PyList_New(message->num_tensors);
    for (int32_t i = 0; tensors != NULL && i < message->num_tensors; i++)
        PyList_SetItem(tensors, i, tensor_item(&message->tensors[i], payload));
    return tensors;
}

static int parse_tensor(PyObject *item, s1f_tensor_header *tensor, const void **data)
{
    PyObject *sizes, *address;
    if (!PyArg_ParseTuple(item, "iiO!O", &tensor->dtype, &tensor->flags, &PyTuple_Type, &sizes, &address))
        return 0;
    *data = PyLong_AsVoidPtr(address);
    tensor->ndim = (int32_t)PyTuple_Size(sizes);
    for (Py_ssize_t i = 0; i < tensor->ndim && i < S1F_MAX_DIMS; i++)
        tensor->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    return !PyErr_Occurred();
}

static PyObject *edge_send(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_edge_end *end;
    PyObject *tensors;
    long long sequence;
    int place;
    s1f_message message = {.training = 1};
    const void *data[S1F_MAX_TENSORS];
    if (!PyArg_ParseTuple(arguments, "O&LiO!", to_edge_end, &end, &sequence, &place, &PyList_Type, &tensors))
        return NULL;
    message.num_tensors = (int32_t)PyList_Size(tensors);
    for (Py_ssize_t i = 0; i < message.num_tensors && i < S1F_MAX_TENSORS; i++)
        if (!parse_tensor(PyList_GetItem(tensors, i), &message.tensors[i], &data[i]))
            return NULL;
    s1f_status status;
    Py_BEGIN_ALLOW_THREADS
    status = core->s1f_p2p_send(end, sequence, place, &message, data);
    Py_END_ALLOW_THREADS
    return none(status, end);
}

/* -- units: what the executor does around each --------------------------------------------------------------------- */

static PyObject *kv_cache_begin_step(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    enum { MOST_STAGES = 8 };
    s1f_kv_cache *cache;
    PyObject *list;
    long long num_rows;
    int num_segments;
    s1f_stage_slots stages[MOST_STAGES];
    if (!PyArg_ParseTuple(arguments, "O&O!Li", to_kv_cache, &cache, &PyList_Type, &list, &num_rows, &num_segments))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    if (count > MOST_STAGES)
        return PyErr_Format(PyExc_ValueError, "%zd stages, at most %d", count, (int)MOST_STAGES);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "iii", &stages[i].stage, &stages[i].kv_slots,
                              &stages[i].grad_slots))
            return NULL;
    return none(core->s1f_kv_cache_begin_step(cache, stages, (int32_t)count, num_rows, num_segments), NULL);
}

enum { MOST_RANGES = 64, MOST_PARTS = 64 };

static _Thread_local struct { /* the current unit; it holds a reference to its cache */
    s1f_current_unit unit;
    s1f_key_range ranges[MOST_RANGES];
    int64_t parts[MOST_PARTS];
    PyObject *cache;
} current;

static int set_place(PyObject *place)
{
    s1f_current_unit *unit = &current.unit;
    PyObject *ranges, *parts;
    unit->ranges = current.ranges;
    unit->parts = current.parts;
    if (!PyArg_ParseTuple(place, "iiO!O!", &unit->parent, &unit->num_children, &PyList_Type, &ranges, &PyList_Type,
                          &parts))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(ranges) && i < MOST_RANGES; i++) {
        long long begin, end, row;
        if (!PyArg_ParseTuple(PyList_GetItem(ranges, i), "LLL", &begin, &end, &row))
            return 0;
        current.ranges[i] = (s1f_key_range){begin, end, row};
        unit->num_ranges = (int32_t)i + 1;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(parts) && i < MOST_PARTS; i++) {
        current.parts[i] = PyLong_AsLongLong(PyList_GetItem(parts, i));
        unit->num_parts = (int32_t)i + 1;
    }
    const s1f_key_range *last = &current.ranges[unit->num_ranges - 1];
    unit->row = last->row + unit->offset - last->begin;
    return !PyErr_Occurred();
}

static PyObject *current_unit_set(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *handle, *place;
    int training;
    long long offset, length, sequence_length;
    s1f_current_unit unit = {0};
    if (!PyArg_ParseTuple(arguments, "OiiiiiiipLLLO!", &handle, &unit.unit.pass, &unit.unit.stage,
                          &unit.unit.microbatch, &unit.unit.segment, &unit.num_segments, &unit.kv_slot, &unit.grad_slot,
                          &training, &offset, &length, &sequence_length, &PyTuple_Type, &place) ||
        !to_kv_cache(handle, &unit.cache))
        return NULL;
    unit.training = training;
    unit.offset = offset;
    unit.length = length;
    unit.sequence_length = sequence_length;
    if (current.cache != NULL)
        return PyErr_Format(PyExc_RuntimeError, "the thread has a current unit already");
    current.unit = unit;
    if (!set_place(place))
        return NULL;
    s1f_status status = core->s1f_kv_cache_begin_unit(unit.cache, &current.unit);
    if (status == S1F_OK) {
        core->s1f_current_unit_set_thread(&current.unit);
        current.cache = Py_NewRef(handle);
    }
    return none(status, NULL);
}

static PyObject *current_unit_clear(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int finished = 1;
    if (!PyArg_ParseTuple(arguments, "|p", &finished))
        return NULL;
    if (finished && current.cache != NULL)
        core->s1f_kv_cache_finish_unit(current.unit.cache, &current.unit);
    core->s1f_current_unit_set_thread(NULL);
    Py_CLEAR(current.cache);
    return Py_NewRef(Py_None);
}

static PyObject *attention_set_isa(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *name;
    return PyArg_ParseTuple(arguments, "z", &name) ? none(core->s1f_attention_set_isa(name), NULL) : NULL;
}

/* -- programs ------------------------------------------------------------------------------------------------------ */

static PyObject *program_instructions(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_program *program;
    int rank;
    if (!PyArg_ParseTuple(arguments, "O&i", to_program, &program, &rank))
        return NULL;
    if (rank < 0 || rank >= program->shape.num_ranks)
        return PyErr_Format(PyExc_ValueError, "rank is %d, must be in 0..%d", rank, program->shape.num_ranks - 1);
    int64_t count;
    const s1f_instruction *instructions = s1f_program_instructions(program, rank, &count);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        const s1f_instruction *it = &instructions[i];
        PyList_SetItem(list, (Py_ssize_t)i,
                       Py_BuildValue("(ii(iiii)iiiL)", (int)it->opcode, (int)it->edge, (int)it->unit.pass,
                                     (int)it->unit.stage, (int)it->unit.microbatch, (int)it->unit.segment,
                                     (int)it->place, (int)it->kv_slot, (int)it->grad_slot, (long long)it->sequence));
    }
    return list;
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"edge_begin_step", edge_begin_step, METH_VARARGS, "edge_begin_step(end, num_places): enters a step."},
    {"edge_post", edge_post, METH_VARARGS, "edge_post(end, sequence, place): the place is free for this message."},
    {"edge_wait", edge_wait, METH_VARARGS,
     "edge_wait(end, sequence, place) -> [(dtype code, flags, sizes, address)] of the message, once it has come."},
    {"edge_send", edge_send, METH_VARARGS,
     "edge_send(end, sequence, place, [(dtype code, flags, sizes, address)]): puts a message into its place."},
    {"kv_cache_begin_step", kv_cache_begin_step, METH_VARARGS,
     "kv_cache_begin_step(cache, [(stage, kv_slots, grad_slots)], num_rows, num_segments)"},
    {"current_unit_set", current_unit_set, METH_VARARGS,
     "current_unit_set(cache, pass, stage, microbatch, segment, num_segments, kv_slot, grad_slot, training, offset, "
     "length, sequence_length, (parent, children, [(begin, end, row)], [tokens of a part])): a unit of this thread."},
    {"current_unit_clear", current_unit_clear, METH_VARARGS,
     "current_unit_clear(finished=True): ends the unit; a failed one is not finished."},
    {"attention_set_isa", attention_set_isa, METH_VARARGS,
     "attention_set_isa(name): forces an instruction set; None: the fastest."},
    {"program_instructions", program_instructions, METH_VARARGS,
     "program_instructions(program, rank) -> [(opcode, edge, unit, place, kv_slot, grad_slot, sequence)]"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *Py_UNUSED(module))
{
    core = PyCapsule_Import(S1F_TESTED_NAME, 0);
    return core == NULL ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                 .m_name = "core_extension",
                                 .m_doc = "Parts of seq1f1b._C that tests and benchmarks use.",
                                 .m_size = 0,
                                 .m_methods = methods,
                                 .m_slots = slots};

__attribute__((visibility("default"))) PyObject *PyInit_core_extension(void);

PyObject *PyInit_core_extension(void)
{
    return PyModuleDef_Init(&definition);
}
