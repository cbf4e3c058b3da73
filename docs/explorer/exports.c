/* exports.c - what the explorer's JavaScript calls of the core, as WebAssembly.
 *
 * Conversions only, as csrc/binding is for Python. A module holds one design at a time: an order, its program and its
 * simulation, each replaced by the next call that makes one. Whatever can fail returns an s1f_status, whose message is
 * last_error(); where no memory is left the module traps. Arrays that JavaScript gives lie in memory from take(), and
 * are borrowed until reset(); those that it reads are the arrays of `told`. */
#include "core/check.h"
#include "core/lower.h"
#include "core/schedule.h"
#include "core/transform.h"
#include "model/critical.h"
#include "model/fit.h"
#include "model/memory.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT(name) __attribute__((export_name(#name), used))

typedef struct block {
    _Alignas(16) struct block *next; /* for whatever lies behind it */
} block;

static struct {
    s1f_options options;
    s1f_schedule *order;
    s1f_program *program;
    s1f_simulation *simulation;
    s1f_costs costs;
    double *pass_seconds[S1F_MAX_PASSES];
    s1f_memory_bytes bytes;
    char *text;
    block *blocks; /* of take() */
} lab;

/* -- arrays for JavaScript ----------------------------------------------------------------------------------------- */

/* Numbers of all kinds, as doubles. Those of units lie one rank after another, each rank's in run order; `first` has
 * the number of each rank's first, and at the end how many there are, as the others of that name have.
 * counts: ranks, stages, micro-batches, segments; columns of a table where micro-batches differ, 0 where not
 * segments_of [micro-batch]; parents [cell of a stage], empty: chains; path: numbers of units, empty without causes
 * inputs: numbers of the units whose results a unit takes; total [rank] bytes: most in all
 * when, by, holding: changes of what a rank holds, in the order of time, by how many bytes, and of which. */
/* clang-format off */
#define ARRAYS(X)                                                                                                      \
    X(counts) X(rank_of_stage) X(segments_of) X(parents) X(first) X(pass) X(stage) X(microbatch) X(segment)            \
    X(makespan) X(span) X(busy) X(start) X(end) X(slack) X(path) X(first_input) X(inputs)                              \
    X(total) X(first_change) X(when) X(by) X(holding)
/* clang-format on */
#define NUMBER_OF(name) TELL_##name,
#define EMPTY(name) {#name, NULL, 0, 0},
enum { ARRAYS(NUMBER_OF) NUM_ARRAYS };

typedef struct {
    const char *name;
    double *values;
    int32_t count, room;
} array;
static array told[NUM_ARRAYS + 1] = {ARRAYS(EMPTY)};

/* All of them; behind the last is one without a name. */
EXPORT(arrays) const array *arrays(void)
{
    return told;
}

static void tell(int number, double value)
{
    array *own = &told[number];
    if (own->count == own->room) {
        own->room = 2 * own->room + 16;
        own->values = realloc(own->values, (size_t)own->room * sizeof value);
        if (own->values == NULL)
            __builtin_trap();
    }
    own->values[own->count++] = value;
}

/* Zeroed bytes that reset() frees. */
EXPORT(take) void *take(int32_t bytes)
{
    block *made = calloc(sizeof *made + (size_t)bytes, 1);
    if (made == NULL)
        __builtin_trap();
    made->next = lab.blocks;
    lab.blocks = made;
    return made + 1;
}

/* Forgets the design, all that was given for it and all that was told of it. */
EXPORT(reset) void reset(void)
{
    s1f_simulation_free(lab.simulation);
    s1f_program_free(lab.program);
    s1f_schedule_free(lab.order);
    free(lab.text);
    for (block *next; lab.blocks != NULL; lab.blocks = next) {
        next = lab.blocks->next;
        free(lab.blocks);
    }
    memset(&lab, 0, sizeof lab);
    for (int number = 0; number < NUM_ARRAYS; number++)
        told[number].count = 0;
}

EXPORT(last_error) const char *last_error(void)
{
    return s1f_last_error();
}

/* -- seconds and bytes --------------------------------------------------------------------------------------------- */

/* Seconds of a pass, [stage][column]. */
EXPORT(set_pass) void set_pass(int32_t pass, double *seconds)
{
    lab.pass_seconds[pass] = seconds;
}

/* The seconds that are not given, of so many units each. */
EXPORT(fill_in) int32_t fill_in(int32_t count)
{
    uint32_t given = 0;
    for (int32_t pass = 0; pass < s1f_num_passes; pass++) {
        given |= (uint32_t)(lab.pass_seconds[pass] != NULL) << pass;
        if (lab.pass_seconds[pass] == NULL)
            lab.pass_seconds[pass] = take(count * (int32_t)sizeof(double));
        lab.costs.pass_seconds[pass] = lab.pass_seconds[pass];
    }
    return s1f_table_fill_in(lab.pass_seconds, given, count);
}

/* [stage] latency between it and the next; [stage][column] seconds of the tier, out or back, 0: nothing. */
EXPORT(set_links) void set_links(const double *latency, const double *tier)
{
    lab.costs.latency = latency;
    lab.costs.tier_seconds = tier;
}

/* Bytes of a holding (unit.h), as its row there says; of S1F_HOLDS_SAVED without what W reads. */
EXPORT(set_bytes) void set_bytes(int32_t holding, const int64_t *bytes)
{
    lab.bytes.of[holding] = bytes;
}

/* -- the order ----------------------------------------------------------------------------------------------------- */

/* A word that option i of options.h may be, 1 or 2; 0: it is a number. */
EXPORT(option_word) const char *option_word(int32_t i, int32_t word)
{
    return s1f_option_table[i].words[word - 1];
}

/* A number, or the number of a word. Costs are the seconds of the passes, filled in. */
EXPORT(set_option) void set_option(int32_t i, double value)
{
    void *field = (char *)&lab.options + s1f_option_table[i].offset;
    switch (s1f_option_table[i].kind) {
    case S1F_KIND_INT32:
    case S1F_KIND_WORD: *(int32_t *)field = (int32_t)value; break;
    case S1F_KIND_INT64: *(int64_t *)field = (int64_t)value; break;
    case S1F_KIND_SECONDS: *(double *)field = value; break;
    case S1F_KIND_COSTS_OF_UNITS:
        lab.options.costs[0] = lab.pass_seconds[S1F_PASS_FORWARD];
        lab.options.costs[1] = lab.pass_seconds[S1F_PASS_BACKWARD_INPUT];
        lab.options.costs[2] = lab.pass_seconds[S1F_PASS_BACKWARD_WEIGHT];
        break;
    default: break;
    }
}

/* Segments of each micro-batch, whose most is k of build(), and what each follows, [cell]. Tables are then
 * [stage][cell]. */
EXPORT(set_rows) void set_rows(const int32_t *segments_of, const int32_t *parents)
{
    lab.options.segments_of = segments_of;
    lab.options.parents = parents;
}

/* Places are counted by the seconds that the order was built for, where it was: a family's costs, and its transfer. */
static s1f_places count_places(const s1f_shape *shape)
{
    s1f_places places = {.by_time = 1};
    if (lab.options.costs[0] == NULL)
        return places;
    int64_t count = s1f_table_count(shape, S1F_PER_CELL), pairs = s1f_table_count(shape, S1F_PER_PAIR);
    double *seconds = take((int32_t)((s1f_num_passes * count + pairs) * (int64_t)sizeof *seconds));
    places.seconds = seconds;
    places.latency = seconds + s1f_num_passes * count;
    for (int32_t pass = S1F_PASS_FORWARD; pass <= S1F_PASS_RECOMPUTE; pass++)
        memcpy(seconds + pass * count, lab.pass_seconds[pass], (size_t)count * sizeof *seconds);
    for (int64_t i = 0; i < count; i++) {
        seconds[S1F_PASS_BACKWARD * count + i] =
            seconds[S1F_PASS_BACKWARD_INPUT * count + i] + seconds[S1F_PASS_BACKWARD_WEIGHT * count + i];
        seconds[S1F_PASS_RECOMPUTE * count + i] = seconds[i];
    }
    for (int64_t s = 0; s < pairs; s++)
        seconds[s1f_num_passes * count + s] = lab.options.transfer;
    return places;
}

/* Checks and lowers an order, if there is one, in place of the one before. */
static s1f_status adopt(s1f_status status, s1f_schedule **order)
{
    S1F_TRY(status);
    s1f_schedule_free(lab.order);
    s1f_program_free(lab.program);
    lab.order = *order;
    lab.program = NULL;
    S1F_TRY(s1f_schedule_check(lab.order, 0));
    s1f_shape shape = s1f_schedule_shape(lab.order);
    return s1f_schedule_lower(lab.order, count_places(&shape), S1F_NO_RANK, &lab.program);
}

EXPORT(build) int32_t build(const char *family, int32_t P, int32_t M, int32_t k, int32_t v)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_build(family, P, M, k, v, &lab.options, &order), &order);
}

EXPORT(read_text) int32_t read_text(const char *text)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_from_text(text, 0, &order), &order);
}

/* Recomputes (S1F_CELL_RECOMPUTED) or moves (S1F_CELL_MOVED) cells of all stages: a byte for each; 0: all of them. */
EXPORT(change) int32_t change(int32_t kind, const unsigned char *chosen)
{
    s1f_schedule *order = NULL;
    if (kind == S1F_CELL_RECOMPUTED)
        return adopt(s1f_schedule_recompute(lab.order, chosen, &order), &order);
    return adopt(s1f_schedule_offload(lab.order, chosen, &order), &order);
}

/* The order as text. */
EXPORT(text) const char *text(void)
{
    free(lab.text);
    lab.text = NULL;
    return s1f_schedule_to_text(lab.order, &lab.text) == S1F_OK ? lab.text : "";
}

EXPORT(tell_shape) void tell_shape(void)
{
    s1f_shape shape = s1f_schedule_shape(lab.order);
    tell(TELL_counts, shape.num_ranks);
    tell(TELL_counts, shape.num_stages);
    tell(TELL_counts, shape.num_microbatches);
    tell(TELL_counts, shape.num_segments);
    tell(TELL_counts, shape.first_cell == NULL ? 0 : (double)s1f_num_cells(&shape));
    for (int32_t stage = 0; stage < shape.num_stages; stage++)
        tell(TELL_rank_of_stage, shape.rank_of_stage[stage]);
    for (int32_t m = 0; m < shape.num_microbatches; m++)
        tell(TELL_segments_of, s1f_segments_of(&shape, m));
    for (int64_t cell = 0; shape.trees != NULL && cell < s1f_num_cells(&shape); cell++)
        tell(TELL_parents, shape.trees->parent[cell]);
}

/* -- what comes of it ---------------------------------------------------------------------------------------------- */

static s1f_status simulate(int with_causes)
{
    s1f_simulation_free(lab.simulation);
    lab.simulation = NULL;
    return s1f_program_simulate(lab.program, &lab.costs, with_causes, &lab.simulation);
}

/* As few units as possible give up what their F saved, so that each rank fits into its room, [rank] bytes. */
EXPORT(fit) int32_t fit(const int64_t *room, int32_t recomputes, int32_t moves)
{
    const s1f_shape *shape = &lab.program->shape;
    int32_t count = (int32_t)(shape->num_stages * s1f_num_cells(shape));
    unsigned char *kinds = take(count), *chosen = take(count);
    if (recomputes && moves)
        S1F_TRY(simulate(0));
    s1f_fit given = {.bytes = &lab.bytes,
                     .room = room,
                     .recomputes = recomputes,
                     .moves = moves,
                     .start = recomputes && moves ? lab.simulation->times : NULL,
                     .tier_seconds = lab.costs.tier_seconds};
    S1F_TRY(s1f_program_fit(lab.program, &given, kinds));
    for (int kind = S1F_CELL_RECOMPUTED; kind <= S1F_CELL_MOVED; kind++) {
        for (int32_t i = 0; i < count; i++)
            chosen[i] = kinds[i] == kind;
        if (memchr(chosen, 1, (size_t)count) != NULL)
            S1F_TRY(change(kind, chosen));
    }
    return S1F_OK;
}

static void tell_times(void)
{
    const s1f_simulation *run = lab.simulation;
    tell(TELL_makespan, run->makespan);
    for (int32_t rank = 0; rank < run->num_ranks; rank++) {
        tell(TELL_first, told[TELL_pass].count);
        tell(TELL_span, run->span[rank]);
        tell(TELL_busy, run->busy[rank]);
        for (int64_t i = 0; i < lab.program->ranks[rank].num_units; i++) {
            s1f_unit unit = lab.program->ranks[rank].units[i];
            tell(TELL_pass, unit.pass);
            tell(TELL_stage, unit.stage);
            tell(TELL_microbatch, unit.microbatch);
            tell(TELL_segment, unit.segment);
            tell(TELL_start, run->start[rank][i]);
            tell(TELL_end, run->end[rank][i]);
            if (run->slack != NULL)
                tell(TELL_slack, run->slack[rank][i]);
        }
    }
    tell(TELL_first, told[TELL_pass].count);
    for (int64_t i = 0; run->path != NULL && i < run->path_length; i++)
        tell(TELL_path, told[TELL_first].values[run->path[i].rank] + (double)run->path[i].i);
}

/* After the times. */
static void tell_inputs(void)
{
    const s1f_shape *shape = &lab.program->shape;
    int64_t cells = shape->num_stages * s1f_num_cells(shape);
    int32_t *maker =
        take((int32_t)(cells * S1F_MAX_PRODUCTS * (int64_t)sizeof *maker)); /* 1 + number; [product][cell] */
    for (int writes = 0, number = 0; writes < 2; writes++, number = 0)
        for (int32_t rank = 0; rank < shape->num_ranks; rank++)
            for (int64_t i = 0; i < lab.program->ranks[rank].num_units; i++, number++) {
                s1f_unit unit = lab.program->ranks[rank].units[i];
                s1f_unit_input input;
                for (int product = 0; !writes && product < S1F_MAX_PRODUCTS; product++)
                    if (s1f_pass_makes(unit.pass, (s1f_product)product))
                        maker[product * cells + s1f_cell_of_all(shape, unit)] = number + 1;
                if (!writes)
                    continue;
                tell(TELL_first_input, told[TELL_inputs].count);
                for (s1f_inputs walk = s1f_inputs_of(shape, unit); s1f_next_input(&walk, &input);) {
                    int32_t other = maker[input.product * cells + s1f_cell_of_all(shape, input.maker)];
                    if (other > 0)
                        tell(TELL_inputs, other - 1);
                }
            }
    tell(TELL_first_input, told[TELL_inputs].count);
}

static void tell_changes(uint32_t holdings, int64_t (*bytes_of)(const s1f_byte_tables *, uint32_t, s1f_unit), int sign,
                         const s1f_byte_tables *tables, s1f_unit unit, double when)
{
    for (uint32_t h = 0; h < S1F_NUM_HOLDINGS; h++) {
        int64_t bytes = bytes_of(tables, holdings & 1u << h & tables->given, unit);
        if (bytes == 0)
            continue;
        tell(TELL_when, when);
        tell(TELL_by, (double)(sign * bytes));
        tell(TELL_holding, s1f_facts_of_holding((s1f_holding)h).counts_with);
    }
}

static s1f_status tell_memory(void)
{
    const s1f_program *program = lab.program;
    int32_t P = program->shape.num_ranks;
    s1f_memory_peak *peaks = take(P * (int32_t)sizeof *peaks);
    S1F_TRY(s1f_program_memory(program, &lab.bytes, peaks));
    s1f_byte_tables tables = s1f_byte_tables_of(&program->shape, &lab.bytes);
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    for (int32_t rank = 0; rank < P; rank++) {
        tell(TELL_total, (double)peaks[rank].total);
        tell(TELL_first_change, told[TELL_when].count);
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
            tell_changes(lifetimes.takes, s1f_taken_bytes, 1, &tables, unit, lab.simulation->start[rank][i]);
            tell_changes(lifetimes.frees, s1f_freed_bytes, -1, &tables, unit, lab.simulation->end[rank][i]);
        }
    }
    tell(TELL_first_change, told[TELL_when].count);
    return S1F_OK;
}

/* Simulates the order and tells what comes of it; slack and the critical path are not known where units move. */
EXPORT(run) int32_t run(void)
{
    int has_causes = !(s1f_schedule_passes(lab.order) & 1u << S1F_PASS_OUT);
    S1F_TRY(simulate(has_causes));
    if (has_causes)
        S1F_TRY(s1f_simulation_find_slack(lab.program, &lab.costs, lab.simulation));
    tell_times();
    tell_inputs();
    return tell_memory();
}
