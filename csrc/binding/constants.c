/* constants.c - the core's enumerations and limits as attributes of the module, so that nothing retypes them. */
#include "binding.h"

#include "../core/dtype.h"
#include "../core/lower.h"
#include "../model/simulate.h"
#include "../run/arena.h"

static const struct {
    const char *name;
    long value;
} numbers[] = {
    {"PER_RANK", S1F_PER_RANK},         {"PER_STAGE", S1F_PER_STAGE},
    {"PER_PAIR", S1F_PER_PAIR},         {"PER_SEGMENT", S1F_PER_SEGMENT},
    {"PER_CELL", S1F_PER_CELL},         {"NO_RANK", S1F_NO_RANK},
    {"ARENA_BYTES", S1F_ARENA_BYTES},   {"GATHER_BYTES", S1F_GATHER_BYTES},
    {"HEADER_BYTES", S1F_HEADER_BYTES}, {"TENSOR_REQUIRES_GRAD", S1F_TENSOR_REQUIRES_GRAD},
    {"TENSOR_NONE", S1F_TENSOR_NONE},
};

/* Position = number in C. */
static PyObject *pass_letter(const void *unused, int64_t pass)
{
    (void)unused;
    char letter = s1f_pass_letter((int32_t)pass);
    return PyUnicode_FromStringAndSize(&letter, 1);
}

typedef struct {
    const char *(*of)(int32_t number);
} names;

static PyObject *text(const void *context, int64_t number)
{
    return PyUnicode_FromString(((const names *)context)->of((int32_t)number));
}

/* The name of its field in StepMemory, S1F_PER_, and the number of the holding to whose peak it counts. */
static PyObject *holding(const void *unused, int64_t h)
{
    (void)unused;
    s1f_holding_facts facts = s1f_facts_of_holding((s1f_holding)h);
    return Py_BuildValue("(sii)", facts.name, (int)facts.per, (int)facts.counts_with);
}

/* What Python has to know of each kind of option: what it holds one value for. */
static const char *const option_kinds[] = {
    [S1F_KIND_INT32] = "int32",          [S1F_KIND_INT64] = "int64",
    [S1F_KIND_SECONDS] = "seconds",      [S1F_KIND_WORD] = "word",
    [S1F_KIND_COSTS_OF_UNITS] = "costs", [S1F_KIND_BYTES_OF_UNITS] = "units",
    [S1F_KIND_BYTES_OF_RANKS] = "ranks",
};
_Static_assert(sizeof option_kinds / sizeof option_kinds[0] == S1F_NUM_OPTION_KINDS, "every kind has its name");

static PyObject *family_option(const void *unused, int64_t i)
{
    (void)unused;
    const s1f_option *option = &s1f_option_table[i];
    return Py_BuildValue("(ssi(zz))", option->name, option_kinds[option->kind], (int)option->least, option->words[0],
                         option->words[1]);
}

int s1f_add_constants(PyObject *module)
{
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) < 0)
            return -1;
    const struct {
        const char *name;
        int64_t count;
        s1f_item *item;
        const void *context;
    } tables[] = {
        {"PASSES", s1f_num_passes, pass_letter, NULL},
        {"PASS_NAMES", s1f_num_passes, text, &(names){s1f_pass_name}},
        {"PASS_TEXTS", s1f_num_passes, text, &(names){s1f_pass_text}},
        {"HOLDINGS", S1F_NUM_HOLDINGS, holding, NULL},
        {"OPCODES", S1F_NUM_OPS, s1f_name_item, s1f_opcode_names},
        {"FAMILY_OPTIONS", S1F_NUM_OPTIONS, family_option, NULL},
        {"DTYPES", S1F_NUM_DTYPES, text, &(names){s1f_dtype_name}},
    };
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        PyObject *table = s1f_tuple_of(tables[i].count, tables[i].item, tables[i].context);
        if (s1f_add_object(module, tables[i].name, table) < 0)
            return -1;
    }
    return 0;
}
