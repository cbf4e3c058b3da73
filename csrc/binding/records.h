/* records.h - results with named fields: classes of the module, each of them a named tuple. */
#ifndef S1F_RECORDS_H
#define S1F_RECORDS_H

#include "binding.h"

typedef enum {
    S1F_PROGRAM_EDGE,
    S1F_CURRENT_UNIT,
    S1F_CACHE_LAYER,
    S1F_TIER_FACTS,
    S1F_HOLDING,
    S1F_NUM_RECORDS
} s1f_record;

int s1f_add_records(PyObject *module); /* the classes; -1 with the exception set */
/* A new record of the values of a tuple, given as to Py_BuildValue: "(iiL)". NULL with the exception set. */
PyObject *s1f_new_record(s1f_record record, const char *format, ...);

#endif
