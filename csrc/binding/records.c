/* records.c - the classes of results with named fields. _C.pyi says what each field is. */
#include "records.h"

#include <stdarg.h>

static const struct {
    const char *name, *fields;
} records[S1F_NUM_RECORDS] = {
    [S1F_PROGRAM_EDGE] = {"ProgramEdge", "source_stage destination_stage source_rank destination_rank channel "
                                         "num_places num_messages"},
    [S1F_CURRENT_UNIT] = {"CurrentUnit",
                          "pass_ stage microbatch segment num_segments training offset length sequence_length"},
    [S1F_CACHE_LAYER] = {"CacheLayer", "stage layer batch kv_heads head_dim v_head_dim kv_element_bytes "
                                       "grad_element_bytes with_docs"},
    [S1F_TIER_FACTS] = {"TierFacts", "medium is_memory room_bytes bytes_out bytes_in ns_out ns_in"},
    [S1F_HOLDING] = {"Holding", "name text per counts_with"},
};

static PyObject *classes[S1F_NUM_RECORDS];

int s1f_add_records(PyObject *module)
{
    PyObject *collections = PyImport_ImportModule("collections"), *name = PyModule_GetNameObject(module);
    int failed = collections == NULL || name == NULL;
    for (int i = 0; i < S1F_NUM_RECORDS && !failed; i++) {
        if (classes[i] == NULL)
            classes[i] = PyObject_CallMethod(collections, "namedtuple", "ss", records[i].name, records[i].fields);
        failed = s1f_add_object(module, records[i].name, Py_XNewRef(classes[i])) < 0 ||
                 PyObject_SetAttrString(classes[i], "__module__", name) < 0;
    }
    Py_XDECREF(name);
    Py_XDECREF(collections);
    return failed ? -1 : 0;
}

PyObject *s1f_new_record(s1f_record record, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *tuple = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *made = tuple == NULL ? NULL : PyObject_CallObject(classes[record], tuple);
    Py_XDECREF(tuple);
    return made;
}
