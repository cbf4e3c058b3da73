/* check.c - holds an order to the rules of check.h. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>

enum { UNIT_TEXT_BYTES = 64, LINK_TEXT_BYTES = 2 * UNIT_TEXT_BYTES + 96, CYCLE_TEXT_BYTES = 1024 };

typedef struct {
    const s1f_schedule *schedule;
    int32_t num_ranks, num_stages, num_microbatches, num_segments;
    int has_backward, shows_stages;
    int64_t num_cells;                  /* (stage, micro-batch, segment) */
    int64_t *number_of[S1F_NUM_PASSES]; /* [cell]: 1 + position in the order of its rank; 0: absent */
} table;

static int64_t cell(const table *t, s1f_unit unit)
{
    return ((int64_t)unit.stage * t->num_microbatches + unit.microbatch) * t->num_segments + unit.segment;
}

static int64_t number(const table *t, s1f_unit unit)
{
    return t->number_of[unit.pass][cell(t, unit)];
}

static int32_t rank_of(const table *t, s1f_unit unit)
{
    return s1f_schedule_rank_of_stage(t->schedule, unit.stage);
}

static s1f_unit with_pass(s1f_unit unit, s1f_pass pass)
{
    unit.pass = (int32_t)pass;
    return unit;
}

static s1f_unit of_segment(s1f_unit unit, int32_t segment)
{
    unit.segment = segment;
    return unit;
}

static s1f_unit of_stage(s1f_unit unit, int32_t stage)
{
    unit.stage = stage;
    return unit;
}

/* The unit that hands on the input's gradient: B, or I where the backward is split. */
static s1f_unit input_gradient(const table *t, s1f_unit unit)
{
    int whole = t->number_of[S1F_PASS_BACKWARD][cell(t, unit)] != 0;
    return with_pass(unit, whole ? S1F_PASS_BACKWARD : S1F_PASS_BACKWARD_INPUT);
}

static void describe(const table *t, s1f_unit unit, char text[UNIT_TEXT_BYTES])
{
    s1f_unit_text(unit, t->shows_stages, text, UNIT_TEXT_BYTES);
}

/* Rule 1. */
static s1f_status fill_once(table *t)
{
    char text[UNIT_TEXT_BYTES];
    for (int32_t rank = 0; rank < t->num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(t->schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units; i++) {
            int64_t *slot = &t->number_of[units[i].pass][cell(t, units[i])];
            if (*slot != 0) {
                describe(t, units[i], text);
                return s1f_fail(
                    S1F_ERR_SCHEDULE,
                    "each unit runs once: %s stands twice in the order of rank %d, at positions %lld and %lld", text,
                    rank, (long long)(*slot - 1), (long long)i);
            }
            *slot = i + 1;
        }
    }
    return S1F_OK;
}

static s1f_status fail_missing(const table *t, s1f_unit unit)
{
    char text[UNIT_TEXT_BYTES];
    describe(t, unit, text);
    return s1f_fail(S1F_ERR_SCHEDULE, "each unit runs once: %s is missing in the order of rank %d", text,
                    rank_of(t, unit));
}

static s1f_unit forward_of_cell(const table *t, int64_t i)
{
    return (s1f_unit){S1F_PASS_FORWARD, (int32_t)(i / t->num_segments / t->num_microbatches),
                      (int32_t)(i / t->num_segments % t->num_microbatches), (int32_t)(i % t->num_segments)};
}

/* Fewer units than cells: a forward is missing, and one of the first num_units + 1. Memory stays linear in the units of the
 * order, however large an index a text names. */
static s1f_status fail_too_few(const table *t, int64_t total)
{
    unsigned char *present = calloc((size_t)total + 1, 1);
    if (present == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to check %lld units", (long long)total);
    for (int32_t rank = 0; rank < t->num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(t->schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units; i++)
            if (units[i].pass == S1F_PASS_FORWARD && cell(t, units[i]) <= total)
                present[cell(t, units[i])] = 1;
    }
    int64_t missing = 0;
    while (present[missing])
        missing++;
    free(present);
    return fail_missing(t, forward_of_cell(t, missing));
}

static s1f_status check_complete(const table *t)
{
    for (int64_t i = 0; i < t->num_cells; i++) {
        s1f_unit unit = forward_of_cell(t, i);
        if (t->number_of[S1F_PASS_FORWARD][i] == 0)
            return fail_missing(t, unit);
        if (!t->has_backward)
            continue;
        int whole = t->number_of[S1F_PASS_BACKWARD][i] != 0;
        int input = t->number_of[S1F_PASS_BACKWARD_INPUT][i] != 0;
        int weight = t->number_of[S1F_PASS_BACKWARD_WEIGHT][i] != 0;
        if (whole && (input || weight)) {
            char first[UNIT_TEXT_BYTES], second[UNIT_TEXT_BYTES];
            describe(t, with_pass(unit, S1F_PASS_BACKWARD), first);
            describe(t, with_pass(unit, input ? S1F_PASS_BACKWARD_INPUT : S1F_PASS_BACKWARD_WEIGHT), second);
            return s1f_fail(S1F_ERR_SCHEDULE,
                            "each unit runs once: rank %d runs both %s, the whole backward, and %s, a part of it",
                            rank_of(t, unit), first, second);
        }
        if (!whole && !input)
            return fail_missing(t, with_pass(unit, weight ? S1F_PASS_BACKWARD_INPUT : S1F_PASS_BACKWARD));
        if (input && !weight)
            return fail_missing(t, with_pass(unit, S1F_PASS_BACKWARD_WEIGHT));
    }
    return S1F_OK;
}

/* `unit` must come after `earlier` in the order of their rank; between ranks the search for a cycle decides. */
static s1f_status require_after(const table *t, s1f_unit unit, s1f_unit earlier, const char *rule)
{
    int32_t rank = rank_of(t, unit);
    if (rank_of(t, earlier) != rank || number(t, earlier) < number(t, unit))
        return S1F_OK;
    char text[UNIT_TEXT_BYTES], earlier_text[UNIT_TEXT_BYTES];
    describe(t, unit, text);
    describe(t, earlier, earlier_text);
    return s1f_fail(S1F_ERR_SCHEDULE, "%s: on rank %d %s comes before %s", rule, rank, text, earlier_text);
}

static s1f_status check_forward(const table *t, s1f_unit unit)
{
    s1f_status status = S1F_OK;
    if (unit.segment > 0)
        status = require_after(t, unit, of_segment(unit, unit.segment - 1),
                               "a segment goes forward after the one before it");
    if (status == S1F_OK && unit.stage > 0)
        status =
            require_after(t, unit, of_stage(unit, unit.stage - 1), "a stage goes forward after the stage before it");
    return status;
}

static s1f_status check_backward(const table *t, s1f_unit unit)
{
    s1f_unit forward = with_pass(unit, S1F_PASS_FORWARD);
    int is_last = unit.segment == t->num_segments - 1;
    s1f_status status = S1F_OK;
    if (t->num_segments > 1 && is_last)
        for (int32_t segment = 0; segment < t->num_segments && status == S1F_OK; segment++)
            status = require_after(t, unit, of_segment(forward, segment),
                                   "the last segment goes back after every forward of its micro-batch");
    else
        status = require_after(t, unit, forward, "a segment goes back after its own forward");
    if (status == S1F_OK && !is_last)
        status = require_after(t, unit, input_gradient(t, of_segment(unit, unit.segment + 1)),
                               "a segment goes back after the one behind it");
    if (status == S1F_OK && unit.stage + 1 < t->num_stages)
        status = require_after(t, unit, input_gradient(t, of_stage(unit, unit.stage + 1)),
                               "a stage goes back after the stage behind it");
    return status;
}

static s1f_status check_pair(const table *t, s1f_unit forward, s1f_unit backward)
{
    if (forward.microbatch != backward.microbatch)
        return S1F_OK;
    char text[UNIT_TEXT_BYTES], backward_text[UNIT_TEXT_BYTES];
    describe(t, forward, text);
    describe(t, backward, backward_text);
    return s1f_fail(S1F_ERR_SCHEDULE, "a pair is of two micro-batches: on rank %d %s and %s cannot start together",
                    rank_of(t, forward), text, backward_text);
}

/* Rules 2 to 9, as far as one rank's order decides them. */
static s1f_status check_program_order(const table *t)
{
    s1f_status status = S1F_OK;
    for (int32_t rank = 0; rank < t->num_ranks; rank++) {
        int64_t num_units;
        const s1f_unit *units = s1f_schedule_units(t->schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units && status == S1F_OK; i++) {
            if (units[i].pass == S1F_PASS_FORWARD)
                status = check_forward(t, units[i]);
            else if (units[i].pass == S1F_PASS_BACKWARD_WEIGHT)
                status = require_after(t, units[i], with_pass(units[i], S1F_PASS_BACKWARD_INPUT),
                                       "a weight gradient comes after its input gradient");
            else
                status = check_backward(t, units[i]);
            if (status == S1F_OK && s1f_schedule_is_pair(t->schedule, rank, i))
                status = check_pair(t, units[i], units[i + 1]);
        }
    }
    return status;
}

/* The unit of a neighbouring stage whose message `unit` consumes; 0 if none. */
static int message_source(const table *t, s1f_unit unit, s1f_unit *source)
{
    if (unit.pass == S1F_PASS_FORWARD && unit.stage > 0)
        *source = of_stage(unit, unit.stage - 1);
    else if ((unit.pass == S1F_PASS_BACKWARD || unit.pass == S1F_PASS_BACKWARD_INPUT) && unit.stage + 1 < t->num_stages)
        *source = input_gradient(t, of_stage(unit, unit.stage + 1));
    else
        return 0;
    return 1;
}

/* Whether a rank cannot go on: the unit before which it stands, the next or the other one of a pair, and the unit of
 * another rank for which it waits. */
static int is_stuck(const table *t, const int64_t *done, int32_t rank, s1f_unit *unit, s1f_unit *awaited)
{
    int64_t num_units, next = done[rank];
    const s1f_unit *units = s1f_schedule_units(t->schedule, rank, &num_units);
    for (int64_t i = next; i <= next + s1f_schedule_is_pair(t->schedule, rank, next); i++) {
        *unit = units[i];
        if (message_source(t, *unit, awaited) && rank_of(t, *awaited) != rank &&
            number(t, *awaited) > done[rank_of(t, *awaited)])
            return 1;
    }
    return 0;
}

/* Whoever follows who waits for whom, from any rank that got stuck, ends in a cycle: names it. */
static s1f_status fail_cycle(const table *t, const int64_t *done, int32_t rank)
{
    s1f_unit unit = {0}, awaited = {0};
    for (int32_t step = 0; step < t->num_ranks; step++) {
        is_stuck(t, done, rank, &unit, &awaited);
        rank = rank_of(t, awaited);
    }
    char cycle[CYCLE_TEXT_BYTES];
    size_t used = 0;
    int32_t first = rank;
    do {
        char text[UNIT_TEXT_BYTES], awaited_text[UNIT_TEXT_BYTES];
        is_stuck(t, done, rank, &unit, &awaited);
        describe(t, unit, text);
        describe(t, awaited, awaited_text);
        used += (size_t)snprintf(cycle + used, sizeof cycle - used,
                                 "%srank %d stands before %s and waits for %s of rank %d", used == 0 ? "" : "; ", rank,
                                 text, awaited_text, rank_of(t, awaited));
        if (used + LINK_TEXT_BYTES > sizeof cycle) {
            snprintf(cycle + used, sizeof cycle - used, "; and so on round to rank %d", first);
            break;
        }
        rank = rank_of(t, awaited);
    } while (rank != first);
    return s1f_fail(S1F_ERR_SCHEDULE, "program order and transfers have no cycle: %s", cycle);
}

/* Rule 10: runs all ranks against each other, each as far as it gets; what is left over is a cycle. */
static s1f_status check_no_cycle(const table *t)
{
    size_t num_ranks = (size_t)t->num_ranks;
    s1f_status status = S1F_OK;
    int64_t *done = calloc(num_ranks, sizeof *done);     /* units run so far */
    int32_t *waiter = calloc(num_ranks, sizeof *waiter); /* first rank that waits for this one, -1: none */
    int32_t *next_waiter = calloc(num_ranks, sizeof *next_waiter);
    int32_t *runnable = calloc(num_ranks, sizeof *runnable); /* stack; a rank is on it, waits, or is finished */
    int32_t num_runnable = 0;
    if (done == NULL || waiter == NULL || next_waiter == NULL || runnable == NULL) {
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to check the order of %d ranks", t->num_ranks);
        goto finish;
    }
    for (int32_t rank = t->num_ranks - 1; rank >= 0; rank--) {
        waiter[rank] = -1;
        runnable[num_runnable++] = rank;
    }
    while (num_runnable > 0) {
        int32_t rank = runnable[--num_runnable];
        int64_t num_units, before = done[rank];
        s1f_schedule_units(t->schedule, rank, &num_units);
        while (done[rank] < num_units) {
            s1f_unit unit, awaited;
            if (is_stuck(t, done, rank, &unit, &awaited)) {
                next_waiter[rank] = waiter[rank_of(t, awaited)];
                waiter[rank_of(t, awaited)] = rank;
                break;
            }
            done[rank] += 1 + s1f_schedule_is_pair(t->schedule, rank, done[rank]);
        }
        if (done[rank] > before) { /* look again at those who wait for this rank */
            int32_t waiting = waiter[rank];
            waiter[rank] = -1;
            for (; waiting >= 0; waiting = next_waiter[waiting])
                runnable[num_runnable++] = waiting;
        }
    }
    for (int32_t rank = 0; rank < t->num_ranks && status == S1F_OK; rank++) {
        int64_t num_units;
        s1f_schedule_units(t->schedule, rank, &num_units);
        if (done[rank] < num_units)
            status = fail_cycle(t, done, rank);
    }

finish:
    free(runnable);
    free(next_waiter);
    free(waiter);
    free(done);
    return status;
}

/* Rule 11. */
static s1f_status check_live_units(const table *t, int64_t max_live_units)
{
    for (int32_t rank = 0; rank < t->num_ranks; rank++) {
        int64_t num_units, live = 0, oldest = 0;
        const s1f_unit *units = s1f_schedule_units(t->schedule, rank, &num_units);
        for (int64_t i = 0; i < num_units; i++) {
            if (units[i].pass == S1F_PASS_FORWARD && ++live > max_live_units) {
                for (oldest = 0; oldest < i; oldest++) { /* the first forward whose backward has not come yet */
                    int whole = t->number_of[S1F_PASS_BACKWARD][cell(t, units[oldest])] != 0;
                    s1f_unit last = with_pass(units[oldest], whole ? S1F_PASS_BACKWARD : S1F_PASS_BACKWARD_WEIGHT);
                    if (units[oldest].pass == S1F_PASS_FORWARD && (!t->has_backward || number(t, last) > i))
                        break;
                }
                char text[UNIT_TEXT_BYTES], oldest_text[UNIT_TEXT_BYTES];
                describe(t, units[i], text);
                describe(t, units[oldest], oldest_text);
                return s1f_fail(S1F_ERR_SCHEDULE,
                                "a rank holds at most %lld live units: rank %d holds %lld from %s to %s",
                                (long long)max_live_units, rank, (long long)live, oldest_text, text);
            }
            if (!t->has_backward || units[i].pass == S1F_PASS_BACKWARD || units[i].pass == S1F_PASS_BACKWARD_WEIGHT)
                live--;
        }
    }
    return S1F_OK;
}

s1f_status s1f_schedule_check(const s1f_schedule *schedule, int64_t max_live_units)
{
    if (max_live_units < 0)
        return s1f_fail(S1F_ERR_ARG, "max_live_units is %lld, must be at least 1, or 0 for no cap",
                        (long long)max_live_units);
    table t = {.schedule = schedule,
               .num_ranks = s1f_schedule_num_ranks(schedule),
               .num_stages = s1f_schedule_num_stages(schedule),
               .num_microbatches = s1f_schedule_num_microbatches(schedule),
               .num_segments = s1f_schedule_num_segments(schedule),
               .has_backward = s1f_schedule_has_backward(schedule),
               .shows_stages = s1f_schedule_shows_stages(schedule)};
    t.num_cells = (int64_t)t.num_stages * t.num_microbatches * t.num_segments;
    int64_t num_units, total = 0;
    for (int32_t rank = 0; rank < t.num_ranks; rank++) {
        s1f_schedule_units(schedule, rank, &num_units);
        total += num_units;
    }
    if (total < t.num_cells)
        return fail_too_few(&t, total);
    int64_t *numbers = calloc((size_t)t.num_cells * S1F_NUM_PASSES, sizeof *numbers);
    if (numbers == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to check %lld units", (long long)t.num_cells * S1F_NUM_PASSES);
    for (int pass = 0; pass < S1F_NUM_PASSES; pass++)
        t.number_of[pass] = numbers + pass * t.num_cells;

    s1f_status status = fill_once(&t);
    if (status == S1F_OK)
        status = check_complete(&t);
    if (status == S1F_OK)
        status = check_program_order(&t);
    if (status == S1F_OK)
        status = check_no_cycle(&t);
    if (status == S1F_OK && max_live_units > 0)
        status = check_live_units(&t, max_live_units);
    free(numbers);
    return status;
}
