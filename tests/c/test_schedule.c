/* test_schedule.c - schedules, their text, lowered programs and simulations from C, with every allocation failing. */
#include "check.h"

#include "../../csrc/core/check.h"
#include "../../csrc/core/key_ranges.h"
#include "../../csrc/core/lower.h"
#include "../../csrc/core/schedule.h"
#include "../../csrc/core/transform.h"
#include "../../csrc/model/critical.h"
#include "../../csrc/model/memory.h"
#include "../../csrc/model/simulate.h"
#include "../../csrc/schedules/families.h"
#include "../../csrc/schedules/vocabulary.h"

#include <stdlib.h>

/* -- calls that allocate, as one shape ---------------------------------------------------------------------------- */

static const char *given_text;       /* from which each call gets a new order; NULL: it takes none */
static s1f_schedule *given_schedule; /* what the calls below work on */
static s1f_program *given_program;

typedef struct {
    const char *family;
    int32_t P, M, k, v;
    s1f_options options;
    int64_t cap; /* of units, 0: none */
} request;
static const request *given_request;

static s1f_status build(void)
{
    const request *r = given_request;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_build(r->family, r->P, r->M, r->k, r->v, &r->options, &schedule);
    CHECK((status == S1F_OK) == (schedule != NULL));
    if (status == S1F_OK) {
        status = s1f_schedule_check(schedule, r->cap);
        CHECK(status == S1F_OK || status == S1F_ERR_MEMORY);
    }
    s1f_schedule_free(schedule);
    return status;
}

typedef s1f_status make_other(const s1f_schedule *schedule, s1f_schedule **out);
static make_other *given_maker;

static s1f_status recompute(const s1f_schedule *schedule, s1f_schedule **out)
{
    return s1f_schedule_recompute(schedule, NULL, out);
}

static s1f_status offload(const s1f_schedule *schedule, s1f_schedule **out)
{
    return s1f_schedule_offload(schedule, NULL, out);
}

static s1f_status defer_weights(const s1f_schedule *schedule, s1f_schedule **out)
{
    return s1f_schedule_defer_weights(schedule, 0, out);
}

static s1f_status spread_vocabulary(const s1f_schedule *schedule, s1f_schedule **out)
{
    static double seconds[64];
    const double *passes[S1F_MAX_PASSES];
    for (int pass = 0; pass < S1F_MAX_PASSES; pass++)
        passes[pass] = seconds;
    return s1f_schedule_spread_vocabulary(schedule, S1F_SPREAD_OUTPUT | S1F_SPREAD_INPUT, 1, passes, out);
}

static s1f_status change(void)
{
    s1f_schedule *schedule = NULL;
    s1f_status status = given_maker(given_schedule, &schedule);
    CHECK((status == S1F_OK) == (schedule != NULL));
    s1f_schedule_free(schedule);
    return status;
}

static s1f_status text_and_back(void)
{
    char *text = NULL;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_to_text(given_schedule, &text);
    CHECK((status == S1F_OK) == (text != NULL));
    if (status == S1F_OK) {
        status = s1f_schedule_from_text(text, 0, &schedule);
        CHECK((status == S1F_OK) == (schedule != NULL));
    }
    s1f_schedule_free(schedule);
    free(text);
    return status;
}

static s1f_status check(void)
{
    return s1f_schedule_check(given_schedule, 0);
}

static s1f_status assign_rows(void)
{
    static const int64_t sizes[4] = {9, 8, 7, 6};
    int64_t num_units, most = 0, rows[64] = {0};
    s1f_shape shape = s1f_schedule_shape(given_schedule);
    const s1f_unit *units = s1f_schedule_units(given_schedule, 0, &num_units);
    CHECK(shape.num_stages * s1f_num_cells(&shape) <= 64 && s1f_num_columns(&shape) <= 4);
    s1f_status status = s1f_assign_rows(&shape, units, num_units, sizes, rows, &most);
    CHECK((status == S1F_OK) == (most > 0));
    return status;
}

static s1f_places given_places;
static int32_t given_rank;

static s1f_status lower(void)
{
    s1f_program *program = NULL;
    s1f_status status = s1f_schedule_lower(given_schedule, given_places, given_rank, &program);
    CHECK((status == S1F_OK) == (program != NULL));
    s1f_program_free(program);
    return status;
}

static s1f_status simulate(void)
{
    static const double seconds[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const int64_t bytes[4] = {8, 8, 8, 8};
    static const double latency[3] = {0.5, 0.25, 0.5}, seconds_per_byte[3] = {0.25, 0.5, 0.125};
    s1f_costs costs = {
        .latency = latency, .seconds_per_byte = seconds_per_byte, .message_bytes = bytes, .send = 0.125, .fills = 1};
    for (int pass = 0; pass < s1f_num_passes; pass++)
        costs.pass_seconds[pass] = seconds;
    s1f_simulation *simulation = NULL;
    s1f_status status = s1f_program_simulate(given_program, &costs, 0, &simulation);
    CHECK((status == S1F_OK) == (simulation != NULL));
    if (simulation != NULL) {
        CHECK(simulation->makespan > 0);
        CHECK_STATUS(s1f_simulation_find_slack(given_program, &costs, simulation), S1F_ERR_STATE, "keeps its causes");
    }
    s1f_simulation_free(simulation);
    return status;
}

static s1f_status find_slack_and_memory(void)
{
    static const double seconds[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const int64_t bytes[16] = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
    s1f_costs costs = {.num_steps = 3, .jitter = 0.5, .transfer_jitter = 0.5};
    s1f_memory_bytes memory = {.of = {[S1F_HOLDS_FOR_WEIGHT] = bytes, [S1F_HOLDS_KV] = bytes}, .message = bytes};
    s1f_memory_peak peaks[4];
    for (int pass = 0; pass < s1f_num_passes; pass++)
        costs.pass_seconds[pass] = seconds;
    s1f_simulation *simulation = NULL;
    s1f_status status = s1f_program_simulate(given_program, &costs, 1, &simulation);
    if (status == S1F_OK)
        status = s1f_simulation_find_slack(given_program, &costs, simulation);
    if (status == S1F_OK) {
        CHECK(simulation->path_length > 0 && simulation->period > 0);
        status = s1f_program_memory(given_program, &memory, peaks);
    }
    if (status == S1F_OK)
        CHECK(peaks[0].total >= peaks[0].of[S1F_HOLDS_SAVED] && peaks[0].of[S1F_HOLDS_SAVED] >= 8);
    s1f_simulation_free(simulation);
    return status;
}

/* A failed allocation is S1F_ERR_MEMORY, leaves *out alone, nothing behind; a shrinking realloc may fail unnoticed. */
static void fail_each_allocation(s1f_status (*call)(void), int64_t at_least)
{
    int64_t n = 0, failed = 0;
    for (;; n++) {
        if (given_text != NULL) { /* an order keeps what a call has found out about it */
            s1f_schedule_free(given_schedule);
            CHECK_STATUS(s1f_schedule_from_text(given_text, 0, &given_schedule), S1F_OK, "");
        }
        fail_allocation(n);
        s1f_status status = call();
        int64_t asked = fail_allocation(-1);
        if (asked <= n) {
            CHECK(status == S1F_OK);
            break;
        }
        CHECK(status == S1F_OK || status == S1F_ERR_MEMORY);
        if (status == S1F_ERR_MEMORY) {
            CHECK(strstr(s1f_last_error(), "no memory") != NULL);
            failed++;
        }
    }
    CHECK(failed >= at_least && failed >= n - 1);
}

/* One order of every family but auto, whose search is kept short below; one of many units, whose arrays grow; rows, in
 * a V and by search; trees, nested and by search; a split backward with costs: three walks, of which one stays; bytes,
 * transfers and both placements, with caps so wide that a start meets the lower bound and the search takes no steps. */
static void test_failing_builds(void)
{
    static const int32_t rows[] = {2, 1, 3, 1, 1}, of_trees[] = {4, 2, 3}, parents[] = {-1, 0, 0, 1, -1, 0, -1, 0, 0};
    static const double forward[12] = {10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13};
    static const double input[12] = {21, 23, 25, 27, 21, 23, 25, 27, 21, 23, 25, 27};
    static const double weight[12] = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
    static const int64_t unit_bytes[4] = {5, 3, 5, 3}, cap_bytes[2] = {200, 180};
    const request requests[] = {
        {"seq1f1b", 3, 40, 2, 1, {.group = 0}, 0},
        {"seq-v-half", 2, 5, 3, 2, {.segments_of = rows}, 0},
        {"auto", 2, 1, 1, 1, {.segments_of = rows + 3}, 0},
        {"seq1f1b", 2, 3, 4, 1, {.segments_of = of_trees, .parents = parents, .trees = S1F_TREES_NESTED}, 4},
        {"auto", 1, 1, 3, 1, {.segments_of = of_trees + 2, .parents = parents + 6}, 0},
        {"seq-zbv", 3, 6, 2, 2, {.cap = 20, .costs = {forward, input, weight}}, 20},
        {"auto", 2, 1, 1, 2, {.transfer = 0.5, .unit_bytes = unit_bytes, .cap_bytes = cap_bytes}, 0},
    };
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        given_request = &requests[i];
        fail_each_allocation(build, 10);
    }
    const s1f_named_family *named;
    for (int32_t i = 0; (named = s1f_schedule_family(i)) != NULL; i++) {
        static const int32_t counts[][2] = {{6, 1}, {6, 3}, {3, 1}}; /* M, k */
        const char *rule = "none tried yet";
        request found = {.family = named->name->name, .P = 3, .v = named->family->stages_per_rank};
        for (int n = 0; rule != NULL; n++) {
            found.M = counts[n][0];
            found.k = counts[n][1];
            CHECK_STATUS(s1f_schedule_broken_rule(found.family, 3, found.M, found.k, found.v, NULL, &rule), S1F_OK, "");
        }
        given_request = &found;
        if (named->family != &s1f_family_auto)
            fail_each_allocation(build, 5);
    }
}

static void test_failing_allocations(void)
{
    static make_other *const makers[] = {s1f_schedule_forward_only, defer_weights, recompute, offload,
                                         spread_vocabulary};
    static const char *const orders[] = {
        "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0\nF0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0",
        "[0]F0.0 [3]F0.0 [3]I0.0 [3]W0.0 [0]I0.0 [0]W0.0\n[1]F0.0 [2]F0.0 [2]I0.0 [1]I0.0 [2]W0.0 [1]W0.0",
        "F0.0 F0.1 R0.1 I0.1 R0.0 I0.0 W0.1 W0.0\nF0.0 R0.0 F0.1 I0.1 I0.0 W0.1 W0.0",
        "[0]F0.0 [0]F1.0 [0]F2.0 [2]F0.0 [2]F1.0 [2]F2.0\n[1]F0.0 [1]F1.0 [1]F2.0 [3]F0.0 [3]F1.0 [3]F2.0",
        "F0.0 O0.0 F0.1 A0.0 F0.2 I0.2 W0.2 L0.0 I0.1 W0.1 I0.0 W0.0",
        "E0.0 F0.0 S0.0 T0.0 B0.0 G0.0\nE0.0 F0.0 S0.0 T0.0 B0.0 G0.0",
        "F0.0 F0.1 F1.0 R0.1 B0.1 B0.0 B1.0\nF0.0 F0.1 B0.1 F1.0 B0.0 B1.0", /* rows of 2 and 1 segments */
        "parents -1,0,0\nF0.0 F0.1 F0.2 B0.1 B0.2 B0.0\nF0.0 F0.2 R0.2 B0.2 F0.1 B0.1 B0.0",
        "parents - -1,0,0\nF0.0 F1.0 F1.2 F1.1\nF0.0 F1.0 F1.1 F1.2",
        "F0.0 B0.0",
    };
    s1f_schedule *lowered = NULL; /* the others are made anew for each failure */
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        given_text = orders[i];
        CHECK_STATUS(s1f_schedule_from_text(given_text, 0, &lowered), S1F_OK, "");
        CHECK_STATUS(s1f_schedule_lower(lowered, (s1f_places){.prefetch = 0}, S1F_ALL_RANKS, &given_program), S1F_OK,
                     "");
        for (size_t m = 0; m < sizeof makers / sizeof *makers; m++) {
            given_maker = makers[m];
            int holds_it = (makers[m] == spread_vocabulary && strchr(orders[i], 'S') != NULL) ||
                           (makers[m] == offload && strchr(orders[i], 'O') != NULL);
            if (!holds_it)
                fail_each_allocation(change, 4);
        }
        fail_each_allocation(text_and_back, 6);
        fail_each_allocation(check, 5);
        fail_each_allocation(assign_rows, 3);
        given_places = (s1f_places){.prefetch = 1};
        given_rank = S1F_ALL_RANKS;
        fail_each_allocation(lower, 20);
        given_places = (s1f_places){.by_time = 1};
        given_rank = 0;
        fail_each_allocation(lower, 20);
        fail_each_allocation(simulate, 10);
        fail_each_allocation(find_slack_and_memory, 26);
        s1f_program_free(given_program);
        s1f_schedule_free(lowered);
    }
    s1f_schedule_free(given_schedule);
    given_schedule = NULL;
    given_text = NULL;
}

/* -- what Python cannot reach ------------------------------------------------------------------------------------- */

/* A text may name one huge index: memory stays linear in the units that are there. */
static void test_huge_index(void)
{
    s1f_schedule *schedule = NULL;
    CHECK_STATUS(s1f_schedule_from_text("F2000000000.0", 1, &schedule), S1F_ERR_ARG, "larger than the number of units");
    CHECK_STATUS(s1f_schedule_from_text("F0.1 F0.0", INT32_MAX, &schedule), S1F_OK, "");
    CHECK_STATUS(s1f_schedule_check(schedule, 0), S1F_ERR_SCHEDULE, "each unit runs once: F0.2 is missing");
    s1f_schedule_free(schedule);
}

/* An order that has passed is not checked again, until it changes. */
static void test_checked_once(void)
{
    s1f_schedule *schedule = NULL;
    CHECK_STATUS(s1f_schedule_from_text("F0.0 B0.0", 0, &schedule), S1F_OK, "");
    CHECK(!s1f_schedule_is_checked(schedule));
    CHECK_STATUS(s1f_schedule_check(schedule, 0), S1F_OK, "");
    CHECK(s1f_schedule_is_checked(schedule));
    CHECK_STATUS(s1f_schedule_append(schedule, (s1f_unit){S1F_PASS_BACKWARD, 0, 0, 0}), S1F_OK, "");
    CHECK(!s1f_schedule_is_checked(schedule));
    CHECK_STATUS(s1f_schedule_check(schedule, 0), S1F_ERR_SCHEDULE, "each unit runs once");
    CHECK(!s1f_schedule_is_checked(schedule));
    s1f_schedule_free(schedule);
}

/* More ranks in a cycle than a message has room for. */
static void test_long_cycle(void)
{
    enum { RANKS = 64 };
    int32_t rank_of_stage[2 * RANKS];
    for (int32_t stage = 0; stage < 2 * RANKS; stage++)
        rank_of_stage[stage] = stage % RANKS;
    const s1f_shape shape = {.num_ranks = RANKS,
                             .num_stages = 2 * RANKS,
                             .num_microbatches = 1,
                             .num_segments = 1,
                             .rank_of_stage = rank_of_stage};
    s1f_schedule *schedule = NULL;
    CHECK_STATUS(s1f_schedule_create(&shape, NULL, &schedule), S1F_OK, "");
    for (int32_t stage = 2 * RANKS - 1; stage >= 0; stage--) { /* every rank: its later stage first */
        s1f_unit unit = {S1F_PASS_FORWARD, stage, 0, 0};
        CHECK_STATUS(s1f_schedule_append(schedule, unit), S1F_OK, "");
    }
    CHECK_STATUS(s1f_schedule_check(schedule, 0), S1F_ERR_SCHEDULE, "and so on round to rank ");
    s1f_schedule_free(schedule);
}

static void test_options(void)
{
    static const double costs[2] = {1, 1};
    static const s1f_options partial = {.costs = {NULL, costs}};
    s1f_schedule *schedule = NULL;
    CHECK_STATUS(s1f_schedule_build("zb-h1", 2, 6, 1, 1, &partial, &schedule), S1F_ERR_ARG, "for all of F, I and W");
    CHECK_STATUS(s1f_schedule_build("kfkb", 2, 4, 1, 1, &partial, &schedule), S1F_ERR_ARG, "takes no option 'costs'");
    CHECK(schedule == NULL);
    s1f_schedule_free(NULL);
    s1f_program_free(NULL);
    s1f_simulation_free(NULL);
}

int main(void)
{
    test_options();
    test_huge_index();
    test_checked_once();
    test_long_cycle();
    test_failing_builds();
    test_failing_allocations();
    return check_failures();
}
