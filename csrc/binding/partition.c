/* partition.c - conversions for the partition. */
#include "../core/partition.h"
#include "binding.h"

S1F_METHOD(PyObject *, partition, int64_t, seq_len, int64_t, num_segments, double, linear, double, quadratic,
           s1f_int64s, documents, s1f_doubles, costs, double, mix, int64_t, multiple_of)
{
    s1f_token_costs of_tokens = {.linear = linear,
                                 .quadratic = quadratic,
                                 .documents = documents.values,
                                 .num_documents = documents.count,
                                 .costs = costs.values,
                                 .num_costs = costs.count};
    int64_t room = num_segments < 1 || num_segments > seq_len ? 1 : num_segments; /* the core refuses other values */
    int64_t *sizes = PyMem_Calloc((size_t)room, sizeof *sizes);
    if (sizes == NULL)
        return PyErr_NoMemory();
    s1f_status status;
    S1F_WITHOUT_GIL(status = s1f_partition(seq_len, num_segments, &of_tokens, mix, multiple_of, sizes));
    PyObject *result = status == S1F_OK ? s1f_list_of(num_segments, s1f_int64_item, sizes) : s1f_raise(status);
    PyMem_Free(sizes);
    return result;
}

PyMethodDef s1f_partition_methods[] = {
    S1F_ROW(partition,
            "-> list[int]: sizes of segments. t tokens cost linear t + quadratic t (t + 1); in place of these the "
            "costs of equal pieces."),
    {NULL, NULL, 0, NULL}};
