/* prefix_trees.c - conversions for the trees of rows. */
#include "../core/prefix_trees.h"
#include "binding.h"

static PyObject *prefix_trees(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_token_rows rows = {0};
    int64_t min_shared, num_nodes;
    s1f_values_apart apart;
    s1f_prefix_results results = {.num_nodes = &num_nodes, .apart = &apart};
    s1f_array columns = {.name = "columns"};
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&O&O&O&O&O&O&", s1f_to_int64, &rows.num_rows, s1f_to_address, &rows.begin,
                          s1f_to_address, &rows.label, s1f_to_address, &rows.tokens, s1f_to_address, &rows.weight,
                          s1f_to_array, &columns, s1f_to_int64, &min_shared, s1f_to_address, &results.nodes,
                          s1f_to_address, &results.place, s1f_to_address, &results.target, s1f_to_address,
                          &results.weight))
        return NULL;
    rows.columns = columns.values;
    rows.num_columns = (int32_t)(columns.count / 2);
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_prefix_trees(&rows, min_shared, &results));
    s1f_release_arrays(&columns, 1);
    if (status != S1F_OK)
        return s1f_raise(status);
    return Py_BuildValue("L(LLLLi)", (long long)num_nodes, (long long)apart.count, (long long)apart.rows[0],
                         (long long)apart.rows[1], (long long)apart.token, apart.column);
}

PyMethodDef s1f_prefix_trees_methods[] = {
    S1F_METHOD(prefix_trees, VARARGS,
               "Writes nodes and places of rows as trees; their number, and branches by values."),
    {NULL, NULL, 0, NULL}};
