/* records.c - the classes of results with named fields. _C.pyi says what each field is. */
#include "records.h"

#include <stdarg.h>
#include <string.h>

enum { MOST_FIELDS = 9 };

static const struct {
    const char *name, *doc, *fields[MOST_FIELDS + 1];
} records[S1F_NUM_RECORDS] = {
    [S1F_PROGRAM_EDGE] = {"seq1f1b._C.ProgramEdge",
                          "A directed edge between two stages, as a lowered program has it.",
                          {"source_stage", "destination_stage", "source_rank", "destination_rank", "channel",
                           "num_places", "num_messages"}},
    [S1F_CURRENT_UNIT] = {"seq1f1b._C.CurrentUnit",
                          "The unit that runs now.",
                          {"pass_", "stage", "microbatch", "segment", "num_segments", "training", "offset", "length",
                           "sequence_length"}},
    [S1F_CACHE_LAYER] = {"seq1f1b._C.CacheLayer",
                         "What a KV cache holds of one layer.",
                         {"stage", "layer", "batch", "kv_heads", "head_dim", "v_head_dim", "kv_element_bytes",
                          "grad_element_bytes", "with_docs"}},
    [S1F_CUDA_KERNEL] = {"seq1f1b._C.CudaKernel",
                         "A row of the library's table: one operation in one shape.",
                         {"name", "dtype", "head_dim", "products"}},
    [S1F_STEP_TOTALS] = {"seq1f1b._C.StepTotals",
                         "When the last step began and ended, and what its time went to.",
                         {"start_ns", "end_ns", "run_ns", "wait_ns", "send_ns", "tier_ns"}},
    [S1F_TIER_FACTS] = {"seq1f1b._C.TierFacts",
                        "Where a tier lies, and what has moved there and back.",
                        {"medium", "is_memory", "room_bytes", "bytes_out", "bytes_in", "ns_out", "ns_in"}},
    [S1F_HOLDING] = {"seq1f1b._C.Holding",
                     "What a stage holds for a while, as its row in unit.c says.",
                     {"name", "text", "per", "counts_with"}},
};

static PyTypeObject *types[S1F_NUM_RECORDS];

int s1f_add_records(PyObject *module)
{
    for (int i = 0; i < S1F_NUM_RECORDS; i++) {
        PyStructSequence_Field fields[MOST_FIELDS + 1] = {{0}};
        int count = 0;
        for (; records[i].fields[count] != NULL; count++)
            fields[count].name = records[i].fields[count];
        PyStructSequence_Desc description = {records[i].name, records[i].doc, fields, count};
        if (types[i] == NULL && (types[i] = PyStructSequence_NewType(&description)) == NULL)
            return -1;
        if (s1f_add_object(module, strrchr(records[i].name, '.') + 1, Py_NewRef((PyObject *)types[i])) < 0)
            return -1;
    }
    return 0;
}

PyObject *s1f_new_record(s1f_record record, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *tuple = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *made = tuple == NULL ? NULL : PyStructSequence_New(types[record]);
    for (Py_ssize_t i = 0; made != NULL && i < PyTuple_Size(tuple); i++)
        PyStructSequence_SetItem(made, i, Py_NewRef(PyTuple_GetItem(tuple, i))); /* steals */
    Py_XDECREF(tuple);
    return made;
}
