/* options.c - the table of the options. */
#include "options.h"

#define FIELD(name, kind) #name, kind, offsetof(s1f_options, name), sizeof((s1f_options *)NULL)->name

const s1f_option s1f_option_table[S1F_NUM_OPTIONS] = {
    {FIELD(group, S1F_KIND_INT32), 1, {NULL, NULL}},
    {FIELD(round, S1F_KIND_INT32), 1, {NULL, NULL}},
    {FIELD(extra_warmup, S1F_KIND_INT32), 0, {NULL, NULL}},
    {FIELD(cap, S1F_KIND_INT64), 1, {NULL, NULL}},
    {FIELD(costs, S1F_KIND_COSTS_OF_UNITS), 0, {NULL, NULL}},
    {FIELD(transfer, S1F_KIND_SECONDS), 0, {NULL, NULL}},
    {FIELD(placement, S1F_KIND_WORD), 0, {"loop", "v"}},
    {FIELD(unit_bytes, S1F_KIND_BYTES_OF_UNITS), 0, {NULL, NULL}},
    {FIELD(cap_bytes, S1F_KIND_BYTES_OF_RANKS), 0, {NULL, NULL}},
    {FIELD(backward, S1F_KIND_WORD), 0, {"split", "whole"}},
    {FIELD(rounds, S1F_KIND_WORD), 0, {"microbatches", "segments"}},
    {FIELD(trees, S1F_KIND_WORD), 0, {"numbers", "nested"}},
};
_Static_assert(1 << (S1F_NUM_OPTIONS - 1) == S1F_OPTION_TREES, "every bit has its row");
