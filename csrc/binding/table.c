/* table.c - costs and bytes as a caller gives them: a number, or nested sequences of the form in core/table.h. */
#include "binding.h"

#include <string.h>

enum { MOST_LEVELS = 3 }; /* [stage][micro-batch][segment] */

/* -- reading ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const s1f_shape *shape;
    s1f_table *table;
    int64_t count;               /* values read */
    int depth;                   /* of sequences */
    int64_t path[MOST_LEVELS];   /* where it stands: an index for each level */
    int64_t wanted[MOST_LEVELS]; /* length of a sequence at each level; -1: the segments of the micro-batch above */
} reader;

static void choose_levels(reader *r)
{
    const s1f_shape *shape = r->shape;
    int has_rows = shape->first_cell != NULL;
    r->depth = 0;
    if (r->table->per != S1F_PER_CELL && r->table->per != S1F_PER_SEGMENT) {
        r->wanted[r->depth++] = s1f_table_count(shape, r->table->per);
        return;
    }
    if (r->table->per == S1F_PER_CELL)
        r->wanted[r->depth++] = shape->num_stages;
    if (has_rows)
        r->wanted[r->depth++] = shape->num_microbatches;
    r->wanted[r->depth++] = has_rows ? -1 : shape->num_segments;
}

/* 0, with ValueError: what is wanted, and what `found` says of the sequence at this level. */
static int refuse(const reader *r, int level, const char *found)
{
    char form[160], place[96] = "it";
    size_t used = 0;
    s1f_table_form(r->shape, r->table->per, form, sizeof form);
    for (int i = 0; i < level && used < sizeof place; i++)
        used += (size_t)PyOS_snprintf(place + used, sizeof place - used, "[%lld]", (long long)r->path[i]);
    PyErr_Format(PyExc_ValueError, "%s must be %s: %s %s", r->table->name, form, place, found);
    return 0;
}

/* Number i of the table; 0 with an exception that names the table. */
static int read_value(const s1f_table *table, PyObject *number, int64_t i)
{
    if (table->is_whole) {
        int overflow = 0;
        ((int64_t *)table->values)[i] = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (overflow)
            PyErr_Format(PyExc_ValueError, "%s holds a number that is too large: %S", table->name, number);
    } else {
        ((double *)table->values)[i] = PyFloat_AsDouble(number);
    }
    if (!PyErr_Occurred())
        return 1;
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s holds %R, must be %s", table->name, number,
                     table->is_whole ? "whole numbers of bytes" : "numbers");
    } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s holds a number that is too large", table->name);
    }
    return 0;
}

static int read_level(reader *r, PyObject *given, int level)
{
    if (level == r->depth || level == MOST_LEVELS)
        return read_value(r->table, given, r->count++);
    if (!PySequence_Check(given))
        return refuse(r, level, "is a number");
    PyObject *items = PySequence_Tuple(given);
    if (items == NULL)
        return 0;
    int64_t count = PyTuple_Size(items), wanted = r->wanted[level];
    if (wanted < 0 && level > 0)
        wanted = s1f_segments_of(r->shape, (int32_t)r->path[level - 1]);
    int is_read = count == wanted;
    if (!is_read) {
        char found[48];
        PyOS_snprintf(found, sizeof found, "holds %lld", (long long)count);
        refuse(r, level, found);
    }
    for (int64_t i = 0; is_read && i < count; i++) {
        r->path[level] = i;
        is_read = read_level(r, PyTuple_GetItem(items, (Py_ssize_t)i), level + 1);
    }
    Py_DECREF(items);
    return is_read;
}

int s1f_read_table(PyObject *given, const s1f_shape *shape, s1f_table *table)
{
    int64_t count = s1f_table_count(shape, table->per);
    table->values = NULL;
    if (given == Py_None)
        return 1;
    if ((table->values = PyMem_Calloc((size_t)(count > 0 ? count : 1), sizeof(double))) == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    reader r = {.shape = shape, .table = table};
    if (PySequence_Check(given)) {
        choose_levels(&r);
        return read_level(&r, given, 0);
    }
    if (!read_value(table, given, 0))
        return 0;
    for (int64_t i = 1; i < count; i++)
        memcpy((char *)table->values + (size_t)i * sizeof(double), table->values, sizeof(double));
    return 1;
}

int s1f_read_attribute(PyObject *owner, const s1f_shape *shape, s1f_table *table)
{
    PyObject *given = PyObject_GetAttrString(owner, table->name);
    int is_read = given != NULL && s1f_read_table(given, shape, table);
    Py_XDECREF(given);
    return is_read;
}

void s1f_free_tables(s1f_table *tables, int count)
{
    for (int i = 0; i < count; i++)
        PyMem_Free(tables[i].values);
}

/* -- seconds of the passes ----------------------------------------------------------------------------------------- */

/* Room for what stands in for seconds that are None, and that; 0 with the exception set. */
static int fill_in(s1f_table *passes, int64_t count)
{
    double *seconds[S1F_MAX_PASSES];
    uint32_t given = 0;
    for (int pass = 0; pass < s1f_num_passes; pass++) {
        given |= (uint32_t)(passes[pass].values != NULL) << pass;
        if (passes[pass].values == NULL &&
            (passes[pass].values = PyMem_Calloc((size_t)count, sizeof(double))) == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        seconds[pass] = passes[pass].values;
    }
    s1f_status status = s1f_table_fill_in(seconds, given, count);
    return status == S1F_OK || s1f_raise(status) != NULL;
}

int s1f_read_pass_seconds(PyObject *costs, const s1f_shape *shape, s1f_table passes[S1F_MAX_PASSES])
{
    for (int pass = 0; pass < s1f_num_passes; pass++) {
        passes[pass] = (s1f_table){.name = s1f_pass_name(pass), .per = S1F_PER_CELL};
        if (!s1f_read_attribute(costs, shape, &passes[pass])) {
            if (!PyErr_ExceptionMatches(PyExc_AttributeError))
                return 0;
            PyErr_Clear(); /* a pass that costs nothing */
        }
    }
    return fill_in(passes, s1f_table_count(shape, S1F_PER_CELL));
}

/* -- for Python ---------------------------------------------------------------------------------------------------- */

static PyObject *table_values(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const s1f_schedule *schedule;
    s1f_table table = {.is_whole = 1};
    int per;
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "O&siO", s1f_to_schedule, &schedule, &table.name, &per, &given) ||
        !s1f_require_index("per", per, S1F_PER_CELL + 1))
        return NULL;
    s1f_shape shape = s1f_schedule_shape(schedule);
    table.per = (s1f_per)per;
    PyObject *list = NULL;
    if (s1f_read_table(given, &shape, &table))
        list = s1f_list_of(table.values == NULL ? 0 : s1f_table_count(&shape, table.per), s1f_int64_item, table.values);
    s1f_free_tables(&table, 1);
    return list;
}

PyMethodDef s1f_table_methods[] = {
    S1F_METHOD(table_values, VARARGS, "The whole numbers of a table as a flat list. per: PER_RANK, PER_STAGE."),
    {NULL, NULL, 0, NULL}};
