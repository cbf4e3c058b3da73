/* exports.c - what the explorer's JavaScript calls of the core, as WebAssembly.
 *
 * Conversions only, as csrc/binding is for Python. An instance computes one design and ends with all of its memory, so
 * nothing is freed. Whatever can fail returns an s1f_status, whose message is last_error(); where no memory is left the
 * module traps. Arrays that JavaScript gives lie in memory from take(). */
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

/* Appends a number to a list of JavaScript's. Lists of units hold one rank after another, each rank's units in run
 * order; `first` has the number of each rank's first unit, and last the number of units, as other lists named so have.
 *   counts    ranks, stages, micro-batches, segments
 *   path      numbers of units; slack, path: empty where units move
 *   inputs    numbers of the units whose results a unit takes
 *   when, by  changes of the bytes of activations that a rank holds, in order of time; total [rank]: most bytes */
__attribute__((import_module("explorer"), import_name("tell"))) void tell(const char *list, double value);

static struct {
    s1f_options options;
    s1f_schedule *order;
    s1f_program *program;
    s1f_simulation *simulation;
    s1f_costs costs;
    const int64_t *bytes;
    int32_t num_inputs, num_changes; /* that have been told */
} lab;

/* Zeroed bytes. */
EXPORT(take) void *take(int32_t bytes)
{
    void *made = calloc((size_t)bytes, 1);
    if (made == NULL)
        __builtin_trap();
    return made;
}

EXPORT(last_error) const char *last_error(void)
{
    return s1f_last_error();
}

/* -- seconds and bytes --------------------------------------------------------------------------------------------- */

/* Seconds of passes, [pass][stage][segment], count of each; those without a bit in `given` are filled in. latency
 * [stage]: seconds between it and the next. tier [stage][segment]: seconds out, or back; NULL: nothing moves. bytes
 * [stage][segment]: what F saves. */
EXPORT(set_tables)
int32_t set_tables(double *seconds, uint32_t given, int32_t count, const double *latency, const double *tier,
                   const int64_t *bytes)
{
    double *passes[S1F_MAX_PASSES];
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        lab.costs.pass_seconds[pass] = passes[pass] = seconds + pass * count;
    lab.costs.latency = latency;
    lab.costs.tier_seconds = tier;
    lab.bytes = bytes;
    return s1f_table_fill_in(passes, given, count);
}

/* -- the order ----------------------------------------------------------------------------------------------------- */

/* Option i of options.h: a number, or the number of a word. Costs are the seconds of the passes. */
EXPORT(set_option) void set_option(int32_t i, double value)
{
    void *field = (char *)&lab.options + s1f_option_table[i].offset;
    switch (s1f_option_table[i].kind) {
    case S1F_KIND_INT32:
    case S1F_KIND_WORD: *(int32_t *)field = (int32_t)value; break;
    case S1F_KIND_INT64: *(int64_t *)field = (int64_t)value; break;
    case S1F_KIND_SECONDS: *(double *)field = value; break;
    case S1F_KIND_COSTS_OF_UNITS:
        lab.options.costs[0] = lab.costs.pass_seconds[S1F_PASS_FORWARD];
        lab.options.costs[1] = lab.costs.pass_seconds[S1F_PASS_BACKWARD_INPUT];
        lab.options.costs[2] = lab.costs.pass_seconds[S1F_PASS_BACKWARD_WEIGHT];
        break;
    default: break;
    }
}

/* Places are counted by the seconds that the order was built for, if there are any: a family's costs and transfer. */
static s1f_places count_places(const s1f_shape *shape)
{
    s1f_places places = {.by_time = 1};
    if (lab.options.costs[0] == NULL)
        return places;
    int64_t count = s1f_table_count(shape, S1F_PER_CELL), pairs = s1f_table_count(shape, S1F_PER_PAIR);
    double *seconds = take((int32_t)((s1f_num_passes * count + pairs) * (int64_t)sizeof *seconds));
    double *latency = seconds + s1f_num_passes * count;
    memcpy(seconds, lab.costs.pass_seconds[0], (size_t)(s1f_num_passes * count) * sizeof *seconds);
    for (int64_t i = 0; i < count; i++)
        seconds[S1F_PASS_BACKWARD * count + i] = lab.options.costs[1][i] + lab.options.costs[2][i];
    for (int64_t s = 0; s < pairs; s++)
        latency[s] = lab.options.transfer;
    places.seconds = seconds;
    places.latency = latency;
    return places;
}

/* Checks and lowers an order, if there is one, in place of the one before. */
static s1f_status adopt(s1f_status status)
{
    S1F_TRY(status);
    S1F_TRY(s1f_schedule_check(lab.order, 0));
    s1f_shape shape = s1f_schedule_shape(lab.order);
    return s1f_schedule_lower(lab.order, count_places(&shape), S1F_NO_RANK, &lab.program);
}

EXPORT(build) int32_t build(const char *family, int32_t P, int32_t M, int32_t k, int32_t v)
{
    return adopt(s1f_schedule_build(family, P, M, k, v, &lab.options, &lab.order));
}

EXPORT(read_text) int32_t read_text(const char *text)
{
    S1F_TRY(s1f_schedule_from_text(text, 0, &lab.order));
    s1f_shape shape = s1f_schedule_shape(lab.order);
    if (shape.first_cell != NULL)
        return s1f_fail(S1F_ERR_ARG, "micro-batches of trees, or of unequal segments, are for seq1f1b draw FILE");
    tell("counts", shape.num_ranks);
    tell("counts", shape.num_stages);
    tell("counts", shape.num_microbatches);
    tell("counts", shape.num_segments);
    return adopt(S1F_OK);
}

/* Recomputes (S1F_CELL_RECOMPUTED) or moves (S1F_CELL_MOVED) cells of all stages: a byte for each; NULL: all cells. */
EXPORT(change) int32_t change(int32_t kind, const unsigned char *chosen)
{
    if (kind == S1F_CELL_RECOMPUTED)
        return adopt(s1f_schedule_recompute(lab.order, chosen, &lab.order));
    return adopt(s1f_schedule_offload(lab.order, chosen, &lab.order));
}

/* The order as text; NULL: too long for the memory. */
EXPORT(text) const char *text(void)
{
    char *made = NULL;
    s1f_schedule_to_text(lab.order, &made);
    return made;
}

/* -- what comes of it ---------------------------------------------------------------------------------------------- */

static s1f_memory_bytes held_bytes(void)
{
    return (s1f_memory_bytes){.of[S1F_HOLDS_FOR_WEIGHT] = lab.bytes};
}

/* As few units as possible give up what their F saved, so that each rank fits into its room, [rank] bytes. */
EXPORT(fit) int32_t fit(const int64_t *room, int32_t recomputes, int32_t moves)
{
    const s1f_shape *shape = &lab.program->shape;
    int32_t count = (int32_t)(shape->num_stages * s1f_num_cells(shape));
    unsigned char *kinds = take(count), *chosen = take(count);
    s1f_memory_bytes bytes = held_bytes();
    s1f_fit given = {.bytes = &bytes,
                     .room = room,
                     .recomputes = recomputes,
                     .moves = moves,
                     .tier_seconds = lab.costs.tier_seconds};
    if (recomputes && moves) {
        S1F_TRY(s1f_program_simulate(lab.program, &lab.costs, 0, &lab.simulation));
        given.start = lab.simulation->times;
    }
    S1F_TRY(s1f_program_fit(lab.program, &given, kinds));
    for (int kind = S1F_CELL_RECOMPUTED; kind <= S1F_CELL_MOVED; kind++) {
        for (int32_t i = 0; i < count; i++)
            chosen[i] = kinds[i] == kind;
        if (memchr(chosen, 1, (size_t)count) != NULL)
            S1F_TRY(change(kind, chosen));
    }
    return S1F_OK;
}

/* Numbers of the units that make the products, and 1 more, [product][cell]; 0: no unit does. */
static int32_t *find_makers(void)
{
    const s1f_shape *shape = &lab.program->shape;
    int64_t cells = shape->num_stages * s1f_num_cells(shape);
    int32_t *maker = take((int32_t)(cells * S1F_MAX_PRODUCTS * (int64_t)sizeof *maker)), number = 0;
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        for (int64_t i = 0; i < lab.program->ranks[rank].num_units; i++) {
            s1f_unit unit = lab.program->ranks[rank].units[i];
            number++;
            for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
                if (s1f_pass_makes(unit.pass, (s1f_product)product))
                    maker[product * cells + s1f_cell_of_all(shape, unit)] = number;
        }
    return maker;
}

static void tell_unit(s1f_unit unit, double start, double end)
{
    tell("pass", unit.pass);
    tell("stage", unit.stage);
    tell("microbatch", unit.microbatch);
    tell("segment", unit.segment);
    tell("start", start);
    tell("end", end);
}

static void tell_inputs(s1f_unit unit, const int32_t *maker)
{
    const s1f_shape *shape = &lab.program->shape;
    int64_t cells = shape->num_stages * s1f_num_cells(shape);
    s1f_inputs walk = s1f_inputs_of(shape, unit);
    tell("first_input", lab.num_inputs);
    for (s1f_unit_input input; s1f_next_input(&walk, &input);) {
        int32_t number = maker[input.product * cells + s1f_cell_of_all(shape, input.maker)];
        if (number > 0) {
            tell("inputs", number - 1);
            lab.num_inputs++;
        }
    }
}

static void tell_change(double when, double by)
{
    tell("when", when);
    tell("by", by);
    lab.num_changes++;
}

/* Simulates the order and tells what comes of it; slack and the critical path are not known where units move. */
EXPORT(run) int32_t run(void)
{
    const s1f_program *program = lab.program;
    int has_causes = !(s1f_schedule_passes(lab.order) & 1u << S1F_PASS_OUT);
    if (has_causes)
        lab.costs.tier_seconds = NULL; /* nothing moves, though units could have */
    S1F_TRY(s1f_program_simulate(program, &lab.costs, has_causes, &lab.simulation));
    const s1f_simulation *found = lab.simulation;
    if (has_causes)
        S1F_TRY(s1f_simulation_find_slack(program, &lab.costs, lab.simulation));
    s1f_memory_bytes bytes = held_bytes();
    s1f_memory_peak *peaks = take(found->num_ranks * (int32_t)sizeof *peaks);
    S1F_TRY(s1f_program_memory(program, &bytes, peaks));
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    const int32_t *maker = find_makers();
    double number = 0, *first = take(found->num_ranks * (int32_t)sizeof *first);
    tell("makespan", found->makespan);
    for (int32_t rank = 0; rank < found->num_ranks; rank++) {
        first[rank] = number;
        tell("first", number);
        tell("span", found->span[rank]);
        tell("busy", found->busy[rank]);
        tell("total", (double)peaks[rank].total);
        tell("first_change", lab.num_changes);
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++, number++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
            double start = found->start[rank][i], end = found->end[rank][i];
            double saved = (double)lab.bytes[s1f_column_of_all(&program->shape, unit)];
            tell_unit(unit, start, end);
            tell_inputs(unit, maker);
            if (has_causes)
                tell("slack", found->slack[rank][i]);
            if (s1f_begins_to_live(lifetimes))
                tell_change(start, saved);
            if (s1f_ends_to_live(lifetimes))
                tell_change(end, -saved);
        }
    }
    tell("first", number);
    tell("first_input", lab.num_inputs);
    tell("first_change", lab.num_changes);
    for (int64_t i = 0; has_causes && i < found->path_length; i++)
        tell("path", first[found->path[i].rank] + (double)found->path[i].i);
    return S1F_OK;
}
