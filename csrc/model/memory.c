/* memory.c - walks the order of each rank and adds up what lives. */
#include "memory.h"

#include <stdlib.h>

static int64_t greater(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

s1f_byte_tables s1f_byte_tables_of(const s1f_shape *shape, const s1f_memory_bytes *bytes)
{
    s1f_byte_tables tables = {.shape = shape};
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
        s1f_holding_facts facts = s1f_facts_of_holding((s1f_holding)h);
        tables.given |= bytes->of[h] != NULL ? 1u << h : 0;
        tables.of[h].values = bytes->of[h];
        tables.of[h].stage = facts.per == S1F_PER_CELL ? s1f_num_columns(shape) : facts.per == S1F_PER_STAGE;
        tables.of[h].column = facts.per == S1F_PER_CELL || facts.per == S1F_PER_SEGMENT;
        tables.of[h].facts = facts;
    }
    return tables;
}

/* Bytes of the segments before the unit's own that nothing has taken yet; *own is the value of that one. In a tree
 * these are the parents below which it is the first to go back. */
static int64_t bytes_of_path(const s1f_shape *shape, const int64_t *own, s1f_unit unit)
{
    int64_t sum = 0;
    for (int32_t parent = s1f_parent_of(shape, unit); parent >= 0 && s1f_opens_parent(shape, unit);) {
        own -= unit.segment - parent;
        sum += *own;
        unit.segment = parent;
        parent = s1f_parent_of(shape, unit);
    }
    return sum;
}

/* Bytes of a holding that a unit takes, or frees. */
static inline int64_t bytes_of(const s1f_byte_tables *tables, int h, s1f_unit unit, int64_t column, int takes)
{
    const int64_t *value = &tables->of[h].values[unit.stage * tables->of[h].stage + column * tables->of[h].column];
    int64_t sum = *value;
    if (takes && tables->of[h].facts.takes_path)
        sum += bytes_of_path(tables->shape, value, unit);
    return sum;
}

int64_t s1f_changed_bytes(const s1f_byte_tables *tables, uint32_t holdings, s1f_unit unit, int takes)
{
    int64_t sum = 0, column = s1f_column(tables->shape, unit);
    for (uint32_t left = holdings & tables->given; left != 0; left &= left - 1)
        sum += bytes_of(tables, __builtin_ctz(left), unit, column, takes);
    return sum;
}

/* What a rank holds now. */
typedef struct {
    int64_t live[S1F_NUM_HOLDINGS]; /* by what it counts with */
    int64_t units, total;
} ledger;

/* Adds what a unit takes, bits of s1f_holding, and raises the peaks: live bytes grow only here. */
static inline void take(ledger *l, const s1f_byte_tables *tables, uint32_t holdings, s1f_unit unit, int64_t column,
                        s1f_memory_peak *peak)
{
    l->units += holdings >> S1F_HOLDS_FOR_WEIGHT & 1;
    peak->units = greater(peak->units, l->units);
    for (uint32_t left = holdings & tables->given; left != 0; left &= left - 1) {
        int h = __builtin_ctz(left), with = (int)tables->of[h].facts.counts_with;
        int64_t taken = bytes_of(tables, h, unit, column, 1);
        l->total += taken;
        l->live[with] += taken;
        peak->of[with] = greater(peak->of[with], l->live[with]);
    }
    peak->total = greater(peak->total, l->total);
}

static inline void give_back(ledger *l, const s1f_byte_tables *tables, uint32_t holdings, s1f_unit unit, int64_t column)
{
    l->units -= holdings >> S1F_HOLDS_FOR_WEIGHT & 1;
    for (uint32_t left = holdings & tables->given; left != 0; left &= left - 1) {
        int h = __builtin_ctz(left);
        int64_t freed = bytes_of(tables, h, unit, column, 0);
        l->total -= freed;
        l->live[tables->of[h].facts.counts_with] -= freed;
    }
}

/* Every sum is at most `most_held` values of each holding, and of receive places. */
static s1f_status check_bytes(const s1f_program *program, const s1f_memory_bytes *bytes)
{
    const s1f_shape *shape = &program->shape;
    int64_t most_held = 1, num_places = 0, columns = s1f_num_columns(shape);
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        most_held = greater(most_held, program->ranks[rank].num_units);
    for (int32_t e = 0; e < program->edges->num_edges; e++)
        num_places += program->edges->edges[e].num_places;
    int64_t most = INT64_MAX / (S1F_NUM_HOLDINGS + 1) / greater(most_held, num_places);
    S1F_TRY(s1f_require_bytes("message_bytes", bytes->message, columns, most));
    S1F_TRY(s1f_require_bytes("statistics_bytes", bytes->statistics, columns, most));
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
        s1f_holding_facts facts = s1f_facts_of_holding((s1f_holding)h);
        if (h == S1F_HOLDS_FOR_WEIGHT && bytes->of[S1F_HOLDS_SAVED] == NULL) /* all that F saves is for W */
            facts.name = s1f_facts_of_holding(S1F_HOLDS_SAVED).name;
        S1F_TRY(s1f_require_bytes(facts.name, bytes->of[h], s1f_table_count(shape, facts.per), most));
    }
    return S1F_OK;
}

/* Each receive place holds, for the whole step, the largest message that comes into it. */
static s1f_status add_places(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks)
{
    const s1f_shape *shape = &program->shape;
    int64_t num_cells = s1f_num_cells(shape), num_columns = s1f_num_columns(shape);
    for (int32_t e = 0; e < program->edges->num_edges; e++) {
        const s1f_edge *edge = &program->edges->edges[e];
        const int64_t *size = edge->channel == S1F_CHANNEL_STATISTICS ? bytes->statistics : bytes->message;
        if (size == NULL)
            continue;
        int64_t *largest = calloc((size_t)edge->num_places, sizeof *largest);
        if (largest == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no memory for the %d places of an edge", (int)edge->num_places);
        for (int64_t cell = 0; cell < num_cells; cell++) {
            int32_t place = edge->place[edge->number[cell]];
            largest[place] = greater(largest[place], size[cell % num_columns]); /* a column is a segment, or a cell */
        }
        for (int32_t place = 0; place < edge->num_places; place++)
            peaks[edge->destination_rank].receive += largest[place];
        free(largest);
    }
    return S1F_OK;
}

s1f_status s1f_program_memory(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks)
{
    const s1f_shape *shape = &program->shape;
    S1F_TRY(check_bytes(program, bytes));
    s1f_lifetime_table table = s1f_lifetimes_of(shape);
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        peaks[rank] = (s1f_memory_peak){0};
    S1F_TRY(add_places(program, bytes, peaks));
    s1f_byte_tables tables = s1f_byte_tables_of(shape, bytes);
    ledger l = {.total = 0};
    for (int32_t rank = 0; rank < shape->num_ranks; rank++) {
        s1f_memory_peak peak = peaks[rank];
        l.total = peak.total = peak.receive; /* all else was given back by the rank before */
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
            int64_t column = s1f_column(shape, unit);
            if (lifetimes.takes != 0)
                take(&l, &tables, lifetimes.takes, unit, column, &peak);
            if (lifetimes.frees != 0)
                give_back(&l, &tables, lifetimes.frees, unit, column);
        }
        peaks[rank] = peak;
    }
    return S1F_OK;
}
