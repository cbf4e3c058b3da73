/* exports.c - what the explorer's JavaScript calls of the core, as WebAssembly.
 *
 * Conversions only, as csrc/binding is for Python. A module holds one design at a time: an order, its program and its
 * simulation, each replaced by the next call that makes one. Whatever can fail returns an s1f_status, whose message is
 * last_error(). Arrays that JavaScript gives lie in memory from take(), and are borrowed until reset(). */
#include "core/check.h"
#include "core/defer.h"
#include "core/lower.h"
#include "core/offload.h"
#include "core/partition.h"
#include "core/recompute.h"
#include "core/schedule.h"
#include "model/critical.h"
#include "model/fit.h"
#include "model/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT(name) __attribute__((export_name(#name), used))
#define READ(type, name, value)                                                                                        \
    EXPORT(name) type name(void)                                                                                       \
    {                                                                                                                  \
        return value;                                                                                                  \
    }

enum { MOST_BLOCKS = 256, PIECES = 1024 };

static struct {
    s1f_options options;
    s1f_schedule *order;
    s1f_program *program;
    s1f_simulation *simulation;
    s1f_memory_peak *peaks;
    s1f_costs costs;
    double *pass_seconds[S1F_MAX_PASSES];
    s1f_memory_bytes bytes;
    void *blocks[MOST_BLOCKS]; /* all that is freed by reset() */
    int32_t num_blocks;
} lab;

static s1f_status no_memory(void)
{
    return s1f_fail(S1F_ERR_MEMORY, "no memory left for this design");
}

/* -- memory of the caller ------------------------------------------------------------------------------------------ */

/* Zeroed bytes that reset() frees; 0: there are none left. */
EXPORT(take) void *take(int32_t bytes)
{
    if (lab.num_blocks == MOST_BLOCKS)
        return NULL;
    void *block = calloc((size_t)(bytes > 0 ? bytes : 1), 1);
    if (block != NULL)
        lab.blocks[lab.num_blocks++] = block;
    return block;
}

/* Forgets the design and all that was given for it. */
EXPORT(reset) void reset(void)
{
    s1f_simulation_free(lab.simulation);
    s1f_program_free(lab.program);
    s1f_schedule_free(lab.order);
    while (lab.num_blocks > 0)
        free(lab.blocks[--lab.num_blocks]);
    memset(&lab, 0, sizeof lab);
}

READ(const char *, last_error, s1f_last_error())

/* -- the order ----------------------------------------------------------------------------------------------------- */

/* Option i of options.h, a number or the number of a word. */
EXPORT(set_option) void set_option(int32_t i, double value)
{
    void *field = (char *)&lab.options + s1f_option_table[i].offset;
    switch (s1f_option_table[i].kind) {
    case S1F_KIND_INT32:
    case S1F_KIND_WORD: *(int32_t *)field = (int32_t)value; break;
    case S1F_KIND_INT64: *(int64_t *)field = (int64_t)value; break;
    case S1F_KIND_SECONDS: *(double *)field = value; break;
    default: break;
    }
}

/* A word that option i may be, 1 or 2; 0: it is a number. */
EXPORT(option_word) const char *option_word(int32_t i, int32_t word)
{
    return s1f_option_table[i].words[word - 1];
}

/* Seconds of F, I and W, each [stage][segment], for families that make their order from them. */
EXPORT(set_option_costs) void set_option_costs(const double *forward, const double *input, const double *weight)
{
    lab.options.costs[0] = forward;
    lab.options.costs[1] = input;
    lab.options.costs[2] = weight;
}

/* Segments of each micro-batch, whose most is k of build(), and what each follows, [cell]; 0 parents: chains. Tables are
 * then [stage][cell]. */
EXPORT(set_rows) void set_rows(const int32_t *segments_of, const int32_t *parents)
{
    lab.options.segments_of = segments_of;
    lab.options.parents = parents;
}

/* The first rule of the family that the counts and options break, as text; 0: none, or another error. */
EXPORT(broken_rule) const char *broken_rule(const char *family, int32_t P, int32_t M, int32_t k, int32_t v)
{
    const char *rule = NULL;
    return s1f_schedule_broken_rule(family, P, M, k, v, &lab.options, &rule) == S1F_OK ? rule : NULL;
}

static s1f_status adopt(s1f_status status, s1f_schedule *order)
{
    if (status == S1F_OK) {
        s1f_schedule_free(lab.order);
        lab.order = order;
    }
    return status;
}

EXPORT(build) int32_t build(const char *family, int32_t P, int32_t M, int32_t k, int32_t v)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_build(family, P, M, k, v, &lab.options, &order), order);
}

EXPORT(read_text) int32_t read_text(const char *text)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_from_text(text, &order), order);
}

READ(int32_t, check, s1f_schedule_check(lab.order, 0))

/* chosen[cell of all stages]; 0: all of them. */
EXPORT(recompute) int32_t recompute(const unsigned char *chosen)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_recompute(lab.order, chosen, &order), order);
}

EXPORT(offload) int32_t offload(const unsigned char *chosen)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_offload(lab.order, chosen, &order), order);
}

EXPORT(defer_weights) int32_t defer_weights(void)
{
    s1f_schedule *order = NULL;
    return adopt(s1f_schedule_defer_weights(lab.order, 0, &order), order);
}

/* The order as text, "" if there is no memory for it. */
EXPORT(text) const char *text(void)
{
    char *made = NULL;
    if (s1f_schedule_to_text(lab.order, &made) != S1F_OK)
        return "";
    if (lab.num_blocks < MOST_BLOCKS)
        lab.blocks[lab.num_blocks++] = made;
    return made;
}

/* Ranks, stages, micro-batches, segments, columns of a table [stage][column], passes as bits, whether text names
 * stages. */
EXPORT(counts) const int32_t *counts(void)
{
    static int32_t found[7];
    s1f_shape shape = s1f_schedule_shape(lab.order);
    found[0] = shape.num_ranks;
    found[1] = shape.num_stages;
    found[2] = shape.num_microbatches;
    found[3] = shape.num_segments;
    found[4] = (int32_t)s1f_num_columns(&shape);
    found[5] = (int32_t)s1f_schedule_passes(lab.order);
    found[6] = s1f_schedule_shows_stages(lab.order);
    return found;
}

READ(const int32_t *, rank_of_stage, s1f_schedule_shape(lab.order).rank_of_stage)

/* Segments of a micro-batch. */
EXPORT(segments_of) int32_t segments_of(int32_t microbatch)
{
    s1f_shape shape = s1f_schedule_shape(lab.order);
    return s1f_segments_of(&shape, microbatch);
}

/* Whether micro-batches differ in their segments: then a column is a cell of the stage. */
READ(int32_t, has_rows, s1f_schedule_shape(lab.order).first_cell != NULL)

/* What each segment follows, [column]; 0: all micro-batches are chains. */
EXPORT(parents) const int32_t *parents(void)
{
    s1f_shape shape = s1f_schedule_shape(lab.order);
    return shape.trees == NULL ? NULL : shape.trees->parent;
}

EXPORT(num_units) int32_t num_units(int32_t rank)
{
    int64_t count;
    s1f_schedule_units(lab.order, rank, &count);
    return (int32_t)count;
}

EXPORT(units) const s1f_unit *units(int32_t rank)
{
    int64_t count;
    return s1f_schedule_units(lab.order, rank, &count);
}

/* -- the split of the sequence ------------------------------------------------------------------------------------- */

/* Seconds of tokens [0, t) of T as a share of those of all: `share` of them is causal attention at t = T. */
static double seconds_to(double t, double T, double share)
{
    return (1 - share) * (t / T) + share * (t / T) * (t / T);
}

/* Tokens of each segment, [k]: equal lengths, or equal seconds. */
EXPORT(split) int32_t split(double tokens, int32_t k, double share, int32_t equal_seconds, int64_t *sizes)
{
    if (!(share >= 0 && share <= 1))
        return s1f_fail(S1F_ERR_ARG, "the share of attention is %g, must be in 0..1", share);
    if (!equal_seconds)
        return s1f_partition_even((int64_t)tokens, k, 1, sizes);
    double pieces[PIECES];
    int32_t count = tokens < PIECES ? (int32_t)tokens : PIECES;
    for (int32_t i = 0; i < count; i++)
        pieces[i] = seconds_to(i + 1, count, share) - seconds_to(i, count, share);
    return s1f_partition_profiled((int64_t)tokens, k, pieces, count, 1.0, 1, sizes);
}

/* Whether these are tokens of k segments, and the share of the seconds that each takes. */
EXPORT(shares) int32_t shares(double tokens, int32_t k, double share, const int64_t *sizes, double *of_segment)
{
    double end = 0;
    S1F_TRY(s1f_partition_check(sizes, k, (int64_t)tokens));
    for (int32_t s = 0; s < k; s++) {
        of_segment[s] = seconds_to(end + (double)sizes[s], tokens, share) - seconds_to(end, tokens, share);
        end += (double)sizes[s];
    }
    return S1F_OK;
}

/* -- times --------------------------------------------------------------------------------------------------------- */

/* Seconds of a pass, [stage][column]. */
EXPORT(set_pass) void set_pass(int32_t pass, double *seconds)
{
    lab.pass_seconds[pass] = seconds;
}

/* [stage] between it and the next: latency, and seconds of a byte; bytes of a message, [column]. 0: nothing. */
EXPORT(set_links) void set_links(const double *latency, const double *seconds_per_byte, const int64_t *message_bytes)
{
    lab.costs.latency = latency;
    lab.costs.seconds_per_byte = seconds_per_byte;
    lab.costs.message_bytes = message_bytes;
    lab.bytes.message = message_bytes;
}

/* [stage][column] seconds of the tier, out or back; whether W fills waits. */
EXPORT(set_tier) void set_tier(const double *seconds)
{
    lab.costs.tier_seconds = seconds;
}

EXPORT(set_fills) void set_fills(int32_t fills)
{
    lab.costs.fills = fills;
}

static s1f_status fill_in(int64_t count)
{
    uint32_t given = 0;
    for (int32_t pass = 0; pass < s1f_num_passes; pass++) {
        given |= (uint32_t)(lab.pass_seconds[pass] != NULL) << pass;
        if (lab.pass_seconds[pass] == NULL)
            lab.pass_seconds[pass] = take((int32_t)(count * (int64_t)sizeof(double)));
        if (lab.pass_seconds[pass] == NULL)
            return no_memory();
    }
    return s1f_table_fill_in(lab.pass_seconds, given, count);
}

/* I as the rest of B, and the other seconds that are not given, before an order is built from them. */
EXPORT(fill_in_passes) int32_t fill_in_passes(int32_t count)
{
    return fill_in(count);
}

EXPORT(pass_seconds) const double *pass_seconds(int32_t pass)
{
    return lab.pass_seconds[pass];
}

/* Places are counted by the seconds that the order was built for, where it was: a family's costs, and its transfer. */
static s1f_status count_places(const s1f_shape *shape, s1f_places *places)
{
    *places = (s1f_places){.by_time = 1};
    const s1f_options *options = &lab.options;
    if (options->costs[0] == NULL && !(options->transfer > 0))
        return S1F_OK;
    int64_t of_pass = s1f_table_count(shape, S1F_PER_CELL), pairs = s1f_table_count(shape, S1F_PER_PAIR);
    double *seconds = take((int32_t)((s1f_num_passes * of_pass + pairs) * (int64_t)sizeof *seconds));
    if (seconds == NULL)
        return no_memory();
    double *forward = seconds + S1F_PASS_FORWARD * of_pass, *backward = seconds + S1F_PASS_BACKWARD * of_pass;
    double *input = seconds + S1F_PASS_BACKWARD_INPUT * of_pass, *weight = seconds + S1F_PASS_BACKWARD_WEIGHT * of_pass;
    for (int64_t i = 0; i < of_pass; i++) {
        forward[i] = options->costs[0] != NULL ? options->costs[0][i] : 1.0;
        input[i] = options->costs[1] != NULL ? options->costs[1][i] : 1.0;
        weight[i] = options->costs[2] != NULL ? options->costs[2][i] : 1.0;
        backward[i] = input[i] + weight[i];
        seconds[S1F_PASS_RECOMPUTE * of_pass + i] = forward[i];
    }
    for (int64_t s = 0; s < pairs; s++)
        seconds[s1f_num_passes * of_pass + s] = options->transfer;
    places->seconds = seconds;
    places->latency = seconds + s1f_num_passes * of_pass;
    return S1F_OK;
}

EXPORT(lower) int32_t lower(void)
{
    s1f_shape shape = s1f_schedule_shape(lab.order);
    s1f_places places;
    s1f_program *program = NULL;
    S1F_TRY(count_places(&shape, &places));
    S1F_TRY(s1f_schedule_lower_edges(lab.order, places, &program));
    s1f_program_free(lab.program);
    lab.program = program;
    return S1F_OK;
}

/* with_causes: and slack and the critical path. */
EXPORT(simulate) int32_t simulate(int32_t with_causes)
{
    s1f_shape shape = s1f_schedule_shape(lab.order);
    s1f_simulation *simulation = NULL;
    S1F_TRY(fill_in(s1f_table_count(&shape, S1F_PER_CELL)));
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        lab.costs.pass_seconds[pass] = lab.pass_seconds[pass];
    s1f_status status =
        s1f_program_simulate(lab.program, &lab.costs, with_causes ? S1F_KEEP_CAUSES : S1F_KEEP_TIMELINE, &simulation);
    if (status == S1F_OK && with_causes)
        status = s1f_simulation_find_slack(lab.program, &lab.costs, simulation);
    if (status != S1F_OK) {
        s1f_simulation_free(simulation);
        return status;
    }
    s1f_simulation_free(lab.simulation);
    lab.simulation = simulation;
    return S1F_OK;
}

READ(double, makespan, lab.simulation->makespan)

/* [rank] */
READ(const double *, span, lab.simulation->span)
READ(const double *, busy, lab.simulation->busy)
READ(const double *, waiting, lab.simulation->wait)

/* [i] of a rank; slack only with causes */
EXPORT(start) const double *start(int32_t rank)
{
    return lab.simulation->start[rank];
}

EXPORT(end) const double *end(int32_t rank)
{
    return lab.simulation->end[rank];
}

EXPORT(slack) const double *slack(int32_t rank)
{
    return lab.simulation->slack == NULL ? NULL : lab.simulation->slack[rank];
}

/* The number of the first unit of a rank, if those of all are counted on. */
static int64_t first_unit(int32_t rank)
{
    int64_t number = 0;
    for (int32_t r = 0; r < rank; r++)
        number += lab.program->ranks[r].num_units;
    return number;
}

READ(int32_t, path_length, lab.simulation->path == NULL ? 0 : (int32_t)lab.simulation->path_length)

/* Numbers of the units of the critical path. */
EXPORT(path) const int32_t *path(void)
{
    int32_t length = path_length(), *numbers = take(length * (int32_t)sizeof *numbers);
    for (int32_t i = 0; numbers != NULL && i < length; i++)
        numbers[i] = (int32_t)(first_unit(lab.simulation->path[i].rank) + lab.simulation->path[i].i);
    return numbers;
}

/* What the step's time is made of: the rank that works most, its work, its time before its first unit and after its
 * last, its gaps between; the work on the critical path and the rest of that path, its messages; bubble of all ranks
 * as a share of their time. */
EXPORT(limits) const double *limits(void)
{
    static double found[8];
    const s1f_simulation *run = lab.simulation;
    int32_t most = 0;
    double bubble = 0, work = 0;
    for (int32_t rank = 0; rank < run->num_ranks; rank++) { /* of equal ones, the one without gaps */
        double more = run->busy[rank] - run->busy[most];
        double gaps = run->span[rank] - run->busy[rank], least = run->span[most] - run->busy[most];
        if (more > 1e-9 * run->makespan || (more > -1e-9 * run->makespan && gaps < least))
            most = rank;
        bubble += run->makespan - run->busy[rank];
    }
    double first = run->start[most][0];
    for (int32_t i = 0; i < path_length(); i++)
        work += run->end[run->path[i].rank][run->path[i].i] - run->start[run->path[i].rank][run->path[i].i];
    found[0] = most;
    found[1] = run->busy[most];
    found[2] = first;
    found[3] = run->makespan - first - run->span[most];
    found[4] = run->span[most] - run->busy[most];
    found[5] = work;
    found[6] = run->path == NULL ? 0 : run->makespan - work;
    found[7] = run->makespan > 0 ? bubble / (run->makespan * run->num_ranks) : 0;
    return found;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/* Bytes of a holding (unit.h), as its row there says; of S1F_HOLDS_SAVED without what W reads. */
EXPORT(set_bytes) void set_bytes(int32_t holding, const int64_t *bytes)
{
    lab.bytes.of[holding] = bytes;
}

/* Peaks of the ranks; 15 numbers each: live units, bytes by holding, of receive places, and in all. */
EXPORT(find_peaks) int32_t find_peaks(void)
{
    lab.peaks = take(lab.program->shape.num_ranks * (int32_t)sizeof *lab.peaks);
    return lab.peaks == NULL ? no_memory() : s1f_program_memory(lab.program, &lab.bytes, lab.peaks);
}

READ(const s1f_memory_peak *, peaks, lab.peaks)

/* Changes of what ranks hold, in the order of time within each rank: when, by how many bytes, and of which holding. */
static struct {
    double *when, *by;
    unsigned char *holding;
    int32_t *first; /* [rank + 1] */
} changes;

/* Writes the changes of one unit from number n on, or counts them alone. */
static int32_t note_changes(const s1f_byte_tables *tables, const s1f_lifetime_table *table, int32_t rank, int64_t i,
                            int32_t n, int writes)
{
    s1f_unit unit = lab.program->ranks[rank].units[i];
    s1f_lifetimes lifetimes = s1f_unit_lifetimes(table, unit);
    for (int at_end = 0; at_end < 2; at_end++)
        for (uint32_t h = 0; h < S1F_NUM_HOLDINGS; h++) {
            uint32_t bits = (at_end ? lifetimes.frees : lifetimes.takes) & 1u << h & tables->given;
            int64_t bytes = bits == 0 ? 0
                            : at_end  ? -s1f_freed_bytes(tables, bits, unit)
                                      : s1f_taken_bytes(tables, bits, unit);
            if (bytes == 0)
                continue;
            if (writes) {
                changes.when[n] = at_end ? lab.simulation->end[rank][i] : lab.simulation->start[rank][i];
                changes.by[n] = (double)bytes;
                changes.holding[n] = (unsigned char)s1f_facts_of_holding((s1f_holding)h).counts_with;
            }
            n++;
        }
    return n;
}

EXPORT(find_changes) int32_t find_changes(void)
{
    const s1f_program *program = lab.program;
    int32_t P = program->shape.num_ranks;
    s1f_byte_tables tables = s1f_byte_tables_of(&program->shape, &lab.bytes);
    s1f_lifetime_table table = s1f_lifetimes_of(&program->shape);
    if ((changes.first = take((P + 1) * (int32_t)sizeof *changes.first)) == NULL)
        return no_memory();
    for (int writes = 0; writes < 2; writes++) {
        int32_t n = 0;
        for (int32_t rank = 0; rank < P; rank++) {
            changes.first[rank] = n;
            for (int64_t i = 0; i < program->ranks[rank].num_units; i++)
                n = note_changes(&tables, &table, rank, i, n, writes);
        }
        changes.first[P] = n;
        if (!writes &&
            ((changes.when = take(n * (int32_t)sizeof(double))) == NULL ||
             (changes.by = take(n * (int32_t)sizeof(double))) == NULL || (changes.holding = take(n)) == NULL))
            return no_memory();
    }
    return S1F_OK;
}

READ(const int32_t *, changes_first, changes.first)
READ(const double *, changes_when, changes.when)
READ(const double *, changes_by, changes.by)
READ(const unsigned char *, changes_holding, changes.holding)

/* As few units as possible give up what their F saved, so that each rank fits into its room, [rank] bytes. The order
 * is lowered, and simulated where units may do both. A byte for each cell of all stages: 1 recomputed, 2 moved. */
EXPORT(fit) int32_t fit(const int64_t *room, int32_t recomputes, int32_t moves, unsigned char *kinds)
{
    s1f_fit given = {.bytes = &lab.bytes,
                     .room = room,
                     .recomputes = recomputes,
                     .moves = moves,
                     .start = recomputes && moves ? (const double *const *)lab.simulation->start : NULL,
                     .tier_seconds = lab.costs.tier_seconds};
    return s1f_program_fit(lab.program, &given, kinds);
}

/* -- what a unit comes after --------------------------------------------------------------------------------------- */

static struct {
    int32_t *first, *inputs; /* [unit of all ranks + 1]; numbers of units */
} after;

EXPORT(find_inputs) int32_t find_inputs(void)
{
    const s1f_program *program = lab.program;
    const s1f_shape *shape = &program->shape;
    int32_t P = shape->num_ranks, total = (int32_t)first_unit(P), number = 0, n = 0;
    int64_t cells = shape->num_stages * s1f_num_cells(shape);
    after.inputs = NULL;
    int32_t *maker = calloc((size_t)(cells * S1F_MAX_PRODUCTS), sizeof *maker); /* 1 + number; [product][cell] */
    if (maker == NULL || (after.first = take((total + 1) * (int32_t)sizeof(int32_t))) == NULL) {
        free(maker);
        return no_memory();
    }
    for (int32_t rank = 0; rank < P; rank++)
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++, number++)
            for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
                if (s1f_pass_makes(program->ranks[rank].units[i].pass, (s1f_product)product))
                    maker[product * cells + s1f_cell_of_all(shape, program->ranks[rank].units[i])] = number + 1;
    for (int writes = 0; writes < 2; writes++) {
        number = n = 0;
        for (int32_t rank = 0; rank < P; rank++)
            for (int64_t i = 0; i < program->ranks[rank].num_units; i++, number++) {
                int has_earlier = i == 0; /* the unit before it on its rank, once */
                s1f_unit_input input;
                after.first[number] = n;
                for (s1f_inputs walk = s1f_inputs_of(shape, program->ranks[rank].units[i]);
                     s1f_next_input(&walk, &input);) {
                    int32_t other = maker[input.product * cells + s1f_cell_of_all(shape, input.maker)] - 1;
                    if (other < 0)
                        continue;
                    has_earlier |= other == number - 1;
                    if (writes)
                        after.inputs[n] = other;
                    n++;
                }
                if (!has_earlier && writes)
                    after.inputs[n] = number - 1;
                n += !has_earlier;
            }
        after.first[total] = n;
        if (!writes && (after.inputs = take(n * (int32_t)sizeof(int32_t))) == NULL)
            break;
    }
    free(maker);
    return after.inputs == NULL ? no_memory() : S1F_OK;
}

READ(const int32_t *, inputs_first, after.first)
READ(const int32_t *, inputs, after.inputs)
