/* unit.c - what unit.h says of a unit, for drawings and tests: an order is given by its counts and the passes in it.
 * And what belongs to the unit that runs. */
#include "binding.h"

#include "../core/trees.h"
#include "../core/unit.h"
#include "../run/current_unit.h"

static int read_unit(PyObject *tuple, s1f_unit *unit)
{
    if (!PyArg_ParseTuple(tuple, "iiii", &unit->pass, &unit->stage, &unit->microbatch, &unit->segment))
        return 0;
    return s1f_require_index("pass", unit->pass, s1f_num_passes);
}

/* All makers that an order of these passes may have for one input. */
static int append_makers(PyObject *list, s1f_unit_input input, uint32_t passes)
{
    for (int32_t pass = 0; pass < s1f_num_passes; pass++) {
        if (!(passes >> pass & 1) || !s1f_pass_makes(pass, input.product))
            continue;
        input.maker.pass = pass;
        PyObject *maker = s1f_unit_tuple(input.maker);
        int failed = maker == NULL || PyList_Append(list, maker) < 0;
        Py_XDECREF(maker);
        if (failed)
            return 0;
    }
    return 1;
}

/* A tree is in a shape of its micro-batch alone. */
static PyObject *unit_inputs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    s1f_shape shape = {.num_ranks = 1};
    unsigned int passes;
    PyObject *tuple, *list = NULL;
    s1f_unit unit;
    s1f_array parents = {.name = "parents"};
    s1f_trees *trees = NULL;
    if (!PyArg_ParseTuple(arguments, "iiiIO!|iO&", &shape.num_stages, &shape.num_microbatches, &shape.num_segments,
                          &passes, &PyTuple_Type, &tuple, &shape.num_ranks, s1f_to_int32_array, &parents))
        return NULL;
    const int64_t first_cell[2] = {0, parents.count};
    s1f_status status = read_unit(tuple, &unit) ? S1F_OK : S1F_ERR_PYTHON;
    int32_t microbatch = unit.microbatch;
    shape.products = s1f_products_of_passes(passes);
    if (status == S1F_OK && parents.values != NULL) {
        shape.num_microbatches = 1;
        shape.num_segments = (int32_t)parents.count;
        shape.first_cell = first_cell;
        unit.microbatch = 0;
        status = s1f_require_index("segment", unit.segment, parents.count)
                     ? s1f_trees_create(&shape, parents.values, &trees)
                     : S1F_ERR_PYTHON;
        shape.trees = trees;
    }
    list = status == S1F_OK ? PyList_New(0) : s1f_raise(status);
    s1f_unit_input input;
    for (s1f_inputs inputs = s1f_inputs_of(&shape, unit); list != NULL && s1f_next_input(&inputs, &input);) {
        input.maker.microbatch = microbatch;
        if (!append_makers(list, input, passes))
            Py_CLEAR(list);
    }
    s1f_trees_free(trees);
    s1f_release_arrays(&parents, 1);
    return list;
}

static PyObject *unit_state(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(arguments))
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    return Py_NewRef(unit == NULL || unit->state == NULL ? Py_None : (PyObject *)unit->state);
}

static PyObject *unit_set_state(PyObject *Py_UNUSED(module), PyObject *state)
{
    s1f_current_unit_set_state(state);
    Py_RETURN_NONE;
}

static PyObject *unit_set_whole(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(arguments))
{
    s1f_current_unit_set_whole();
    Py_RETURN_NONE;
}

static PyObject *unit_set_documents(PyObject *Py_UNUSED(module), PyObject *count)
{
    long long num_documents = PyLong_AsLongLong(count);
    if (num_documents == -1 && PyErr_Occurred())
        return NULL;
    s1f_current_unit_set_documents(num_documents);
    Py_RETURN_NONE;
}

PyMethodDef s1f_unit_methods[] = {
    S1F_METHOD(
        unit_inputs, VARARGS,
        "The units that a unit waits for, in an order of these passes (bits 1 << pass), num_segments those "
        "of its micro-batch; where two passes may make an input, both are named, and R and L where the unit "
        "may have one. num_ranks: shards of the vocabulary. parents: what each segment of the unit's micro-batch "
        "follows; None: the one before it."),
    S1F_METHOD(unit_state, NOARGS, "What unit_set_state gave the unit that runs on this thread, or None."),
    S1F_METHOD(unit_set_state, O,
               "An object of the unit that runs on this thread; the caller keeps it until the unit ends."),
    S1F_METHOD(unit_set_whole, NOARGS, "Ops of the unit that runs on this thread count as outside a step."),
    S1F_METHOD(unit_set_documents, O,
               "Documents in the row of the unit that runs on this thread; attention of more than one needs doc_ids."),
    {NULL, NULL, 0, NULL}};
