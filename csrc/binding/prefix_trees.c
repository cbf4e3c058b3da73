/* prefix_trees.c - conversions for the trees of rows. */
#include "../core/prefix_trees.h"
#include "binding.h"

/* Columns from a list of (address, bytes of a token); NULL with the exception set. */
static s1f_token_column *read_columns(PyObject *given, int32_t *count)
{
    Py_ssize_t n = PySequence_Size(given);
    s1f_token_column *columns = n < 0 ? NULL : PyMem_Malloc(((size_t)n + 1) * sizeof *columns);
    if (columns == NULL)
        return n < 0 ? NULL : (s1f_token_column *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *pair = PySequence_GetItem(given, i);
        int is_read = pair != NULL && PyArg_ParseTuple(pair, "O&O&", s1f_to_address, &columns[i].values, s1f_to_int64,
                                                       &columns[i].bytes);
        Py_XDECREF(pair);
        if (!is_read) {
            PyMem_Free(columns);
            return NULL;
        }
    }
    *count = (int32_t)n;
    return columns;
}

static PyObject *prefix_trees(PyObject *Py_UNUSED(module), PyObject *args)
{
    s1f_token_rows rows = {0};
    int64_t min_shared, num_nodes;
    s1f_values_apart apart;
    s1f_prefix_results results = {.num_nodes = &num_nodes, .apart = &apart};
    PyObject *given;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&OO&O&O&O&O&", s1f_to_int64, &rows.num_rows, s1f_to_address, &rows.begin,
                          s1f_to_address, &rows.label, s1f_to_address, &rows.tokens, s1f_to_address, &rows.weight,
                          &given, s1f_to_int64, &min_shared, s1f_to_address, &results.nodes, s1f_to_address,
                          &results.place, s1f_to_address, &results.target, s1f_to_address, &results.weight))
        return NULL;
    s1f_token_column *columns = read_columns(given, &rows.num_columns);
    if (columns == NULL)
        return NULL;
    rows.columns = columns;
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_prefix_trees(&rows, min_shared, &results));
    PyMem_Free(columns);
    if (status != S1F_OK)
        return s1f_raise(status);
    return Py_BuildValue("L(LLLLi)", (long long)num_nodes, (long long)apart.count, (long long)apart.rows[0],
                         (long long)apart.rows[1], (long long)apart.token, apart.column);
}

PyMethodDef s1f_prefix_trees_methods[] = {
    S1F_METHOD(prefix_trees, VARARGS,
               "Writes nodes and places of rows as trees; their number, and branches by values."),
    {NULL, NULL, 0, NULL}};
