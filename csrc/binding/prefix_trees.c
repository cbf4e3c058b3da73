/* prefix_trees.c - conversions for the trees of rows. */
#include "../core/prefix_trees.h"
#include "binding.h"

static PyObject *prefix_trees(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_token_rows rows = {0};
    int64_t min_shared, num_nodes;
    s1f_values_apart apart;
    s1f_prefix_results results = {.num_nodes = &num_nodes, .apart = &apart};
    s1f_int64s columns = {.name = "columns"}, bytes = {.name = "column_bytes"};
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&O&O&O&O&O&O&O&", s1f_to_int64, &rows.num_rows, s1f_to_address, &rows.begin,
                          s1f_to_address, &rows.label, s1f_to_address, &rows.tokens, s1f_to_address, &rows.weight,
                          s1f_to_int64s, &columns, s1f_to_int64s, &bytes, s1f_to_int64, &min_shared, s1f_to_address,
                          &results.nodes, s1f_to_address, &results.place, s1f_to_address, &results.target,
                          s1f_to_address, &results.weight))
        return NULL;
    s1f_token_column *both = PyMem_Malloc(((size_t)columns.count + 1) * sizeof *both);
    s1f_status status = S1F_OK;
    if (!s1f_require_count(bytes.name, bytes.count, columns.count))
        status = S1F_ERR_PYTHON;
    else if (both == NULL)
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for %lld columns", (long long)columns.count);
    for (int64_t i = 0; status == S1F_OK && i < columns.count; i++)
        both[i] = (s1f_token_column){(const void *)(intptr_t)columns.values[i], bytes.values[i]};
    rows.columns = both;
    rows.num_columns = (int32_t)columns.count;
    if (status == S1F_OK) {
        S1F_WITHOUT_GIL(status = s1f_prefix_trees(&rows, min_shared, &results));
    }
    PyMem_Free(both);
    PyMem_Free(columns.values);
    PyMem_Free(bytes.values);
    if (status != S1F_OK)
        return s1f_raise(status);
    return Py_BuildValue("L(LLLLi)", (long long)num_nodes, (long long)apart.count, (long long)apart.rows[0],
                         (long long)apart.rows[1], (long long)apart.token, apart.column);
}

PyMethodDef s1f_prefix_trees_methods[] = {
    S1F_METHOD(prefix_trees, VARARGS,
               "Writes nodes and places of rows as trees; their number, and branches by values."),
    {NULL, NULL, 0, NULL}};
