/* unit.c - what unit.h says of a unit, for drawings and tests: an order is given by its counts and the passes in it.
 * And what belongs to the unit that runs. */
#include "binding.h"

#include "../core/trees.h"
#include "../core/unit.h"
#include "../run/current_unit.h"

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

/* The unit's micro-batch is alone in its shape. */
S1F_METHOD(PyObject *, unit_inputs, int32_t, num_stages, int32_t, num_ranks, int64_t, passes, s1f_int32s, unit_numbers,
           s1f_int32s, parents)
{
    const int32_t *numbers = unit_numbers.values;
    if (!s1f_require_count("unit", unit_numbers.count, 4) || !s1f_require_index("pass", numbers[0], s1f_num_passes) ||
        !s1f_require_index("segment", numbers[3], parents.count))
        return NULL;
    const int64_t first_cell[2] = {0, parents.count};
    s1f_shape shape = {.num_ranks = num_ranks,
                       .num_stages = num_stages,
                       .num_microbatches = 1,
                       .num_segments = (int32_t)parents.count,
                       .products = s1f_products_of_passes((uint32_t)passes),
                       .first_cell = first_cell};
    s1f_pool pool = {0};
    s1f_trees trees;
    s1f_status status = s1f_trees_create(&shape, parents.values, &pool, &trees);
    shape.trees = &trees;
    PyObject *list = status == S1F_OK ? PyList_New(0) : s1f_raise(status);
    s1f_unit_input input;
    s1f_inputs inputs = s1f_inputs_of(&shape, (s1f_unit){numbers[0], numbers[1], 0, numbers[3]});
    while (list != NULL && s1f_next_input(&inputs, &input)) {
        input.maker.microbatch = numbers[2];
        if (!append_makers(list, input, (uint32_t)passes))
            Py_CLEAR(list);
    }
    s1f_pool_free(&pool);
    return list;
}

S1F_METHOD(PyObject *, unit_state)
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    return Py_NewRef(unit == NULL || unit->state == NULL ? Py_None : (PyObject *)unit->state);
}

S1F_CORE_VOID(void, current_unit_set_state, PyObject *, state, bool, is_whole)
S1F_CORE_VOID(void, current_unit_set_documents, int64_t, count)

PyMethodDef s1f_unit_methods[] = {
    S1F_ROW(unit_inputs,
            "-> list[_Unit]: the units that a unit waits for, in an order of these passes (bits 1 << pass); where two "
            "passes may make an input, both are named, and R and L where the unit may have one. num_ranks: shards of "
            "the vocabulary. parents: what each segment of the unit's micro-batch follows."),
    S1F_ROW(unit_state, "What current_unit_set_state gave the unit that runs on this thread, or None."),
    S1F_ROW(current_unit_set_state,
            "An object of the unit that runs on this thread; the caller keeps it until the unit ends. is_whole: from "
            "here on ops of the unit count as outside a step."),
    S1F_ROW(current_unit_set_documents,
            "Documents in the row of the unit that runs on this thread; attention of more than one needs doc_ids."),
    {NULL, NULL, 0, NULL}};
