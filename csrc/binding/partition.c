/* partition.c - conversions for the partition. */
#include "../core/partition.h"
#include "binding.h"

static PyObject *partition(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int64_t seq_len, num_segments, multiple_of;
    double mix;
    s1f_token_costs costs = {0};
    s1f_array documents = {.name = "documents"}, pieces = {.name = "costs"};
    if (!PyArg_ParseTuple(arguments, "O&O&(dd)O&O&dO&", s1f_to_int64, &seq_len, s1f_to_int64, &num_segments,
                          &costs.linear, &costs.quadratic, s1f_to_array, &documents, s1f_to_array, &pieces, &mix,
                          s1f_to_int64, &multiple_of))
        return NULL;
    costs.documents = documents.values;
    costs.num_documents = documents.count;
    costs.costs = pieces.values;
    costs.num_costs = pieces.count;
    int64_t room = num_segments < 1 || num_segments > seq_len ? 1 : num_segments; /* the core refuses others */
    int64_t *sizes = PyMem_Calloc((size_t)room, sizeof *sizes);
    s1f_status status = S1F_ERR_PYTHON;
    if (sizes == NULL)
        PyErr_NoMemory();
    else
        S1F_WITHOUT_GIL(status = s1f_partition(seq_len, num_segments, &costs, mix, multiple_of, sizes));
    PyObject *result = status == S1F_OK ? s1f_list_of(num_segments, s1f_int64_item, sizes) : s1f_raise(status);
    PyMem_Free(sizes);
    s1f_release_arrays(&documents, 1);
    s1f_release_arrays(&pieces, 1);
    return result;
}

PyMethodDef s1f_partition_methods[] = {
    S1F_METHOD(partition, VARARGS, "Sizes of segments; the documents and costs of pieces are arrays, or None."),
    {NULL, NULL, 0, NULL}};
