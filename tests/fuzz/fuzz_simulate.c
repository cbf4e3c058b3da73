/* fuzz_simulate.c - are an order's times and bytes plain numbers that fit each other, or refused? Costs are any. */
#include "order.h"

#include "model/critical.h"
#include "model/memory.h"
#include "model/simulate.h"

enum { MOST_RANKS = 4, MOST_CELLS = 32, MOST_UNITS = 128 };

static s1f_program *take_program(fuzz_input *in, s1f_schedule **schedule)
{
    static const char *const families[] = {"seq1f1b",   "gpipe",   "terapipe",
                                           "seq-zb-h1", "seq-zbv", "seq1f1b-interleaved"};
    const char *family = families[take_below(in, sizeof families / sizeof *families)];
    int32_t P = 1 + take_below(in, MOST_RANKS - 1), M = 1 + take_below(in, 3), k = 1 + take_below(in, 3);
    s1f_program *program = NULL;
    int32_t v = 1 + take_below(in, 2), prefetch = take_below(in, 3), segments_of[3] = {k, 1 + M % k, 1};
    s1f_options options = {.segments_of = take_below(in, 4) == 3 && k * M * P * v <= MOST_CELLS ? segments_of : NULL};
    if (s1f_schedule_build(family, P, M, k, v, &options, schedule) == S1F_OK)
        REQUIRE(s1f_schedule_lower(*schedule, (s1f_places){.prefetch = prefetch}, S1F_NO_RANK, &program) == S1F_OK);
    return program;
}

/* -- times --------------------------------------------------------------------------------------------------------- */

typedef struct {
    double passes[S1F_MAX_PASSES][MOST_CELLS], units[MOST_RANKS * MOST_UNITS], latency[MOST_CELLS],
        per_byte[MOST_CELLS];
    double optimizer[MOST_RANKS];
    int64_t message_bytes[MOST_CELLS];
    int are_costs; /* all are finite and not negative */
} cost_arrays;

/* The first few are read, the others repeat them. */
static const double *take_doubles(fuzz_input *in, double *values, int count, cost_arrays *arrays)
{
    for (int i = 0; i < count; i++) {
        values[i] = i < 3 ? take_double(in) : values[i % 3];
        arrays->are_costs &= isfinite(values[i]) && values[i] >= 0;
    }
    return values;
}

static s1f_costs take_costs(fuzz_input *in, const s1f_program *program, cost_arrays *arrays)
{
    const s1f_shape *shape = &program->shape;
    int columns = (int)s1f_num_columns(shape), cells = shape->num_stages * columns;
    uint8_t given = (uint8_t)take_bits(in, 1);
    s1f_costs costs = {0};
    arrays->are_costs = 1;
    if (given & 1) {
        double *next = arrays->units;
        for (int32_t rank = 0; rank < shape->num_ranks; next += program->ranks[rank++].num_units)
            take_doubles(in, next, (int)program->ranks[rank].num_units, arrays);
        costs.unit_seconds = arrays->units;
    } else {
        for (int pass = 0; pass < s1f_num_passes; pass++)
            costs.pass_seconds[pass] = take_doubles(in, arrays->passes[pass], cells, arrays);
    }
    if (given & 2)
        costs.latency = take_doubles(in, arrays->latency, shape->num_stages - 1, arrays);
    if (given & 4)
        costs.seconds_per_byte = take_doubles(in, arrays->per_byte, shape->num_stages - 1, arrays);
    if (given & 8) {
        for (int32_t s = 0; s < columns; s++)
            arrays->message_bytes[s] = take_int64(in);
        costs.message_bytes = arrays->message_bytes;
    }
    if (given & 16)
        costs.optimizer = take_doubles(in, arrays->optimizer, shape->num_ranks, arrays);
    if (given & 32) {
        costs.send = take_double(in);
        costs.jitter = take_double(in);
        costs.transfer_jitter = take_double(in);
        costs.seed = take_bits(in, 8);
    }
    if (given & 64) {
        costs.num_steps = take_int32(in);
        costs.num_steps = costs.num_steps > 8 ? 8 : costs.num_steps; /* more take long by right */
        costs.optimizer_sync = take_below(in, 2);
    }
    costs.fills = given >> 7;
    return costs;
}

static void require_timeline(const s1f_program *program, const s1f_simulation *found, int32_t rank)
{
    double before = 0;
    for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
        REQUIRE(found->start[rank][i] >= before && found->end[rank][i] >= found->start[rank][i]);
        before = found->end[rank][i];
    }
    REQUIRE(before <= found->makespan);
}

static void require_slack(const s1f_program *program, const s1f_costs *costs, s1f_simulation *found)
{
    double rounding = 1e-9 * found->makespan;
    REQUIRE(s1f_simulation_find_slack(program, costs, found) == S1F_OK);
    REQUIRE(found->path_length >= 1);
    for (int32_t rank = 0; rank < found->num_ranks; rank++)
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++)
            REQUIRE(found->slack[rank][i] >= -rounding && found->slack[rank][i] <= found->makespan + rounding);
    s1f_numbered_unit last = found->path[found->path_length - 1], first = found->path[0];
    REQUIRE(found->end[last.rank][last.i] == found->makespan);
    REQUIRE(found->start[first.rank][first.i] == 0);
}

static void require_simulation(const s1f_program *program, const s1f_costs *costs, int with_causes,
                               s1f_simulation *found)
{
    int32_t num_ranks = program->shape.num_ranks;
    REQUIRE(isfinite(found->makespan) && isfinite(found->period) && found->makespan >= 0 && found->period >= 0);
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        double rounding = 1e-9 * found->makespan;
        REQUIRE(found->busy[rank] >= 0 && found->busy[rank] <= found->makespan + rounding);
        REQUIRE(found->wait[rank] >= 0 && isfinite(found->wait[rank]));
        REQUIRE(found->span[rank] >= 0 && found->span[rank] <= found->makespan + rounding);
        require_timeline(program, found, rank);
    }
    if (with_causes)
        require_slack(program, costs, found);
}

static void simulate(fuzz_input *in, const s1f_program *program)
{
    static cost_arrays arrays;
    s1f_costs costs = take_costs(in, program, &arrays);
    int with_causes = take_below(in, 3) == 2;
    s1f_simulation *found = NULL;
    s1f_status status = s1f_program_simulate(program, &costs, with_causes, &found);
    if (status != S1F_OK) {
        REQUIRE(status == S1F_ERR_ARG && s1f_last_error()[0] != '\0' && found == NULL);
        return;
    }
    require_simulation(program, &costs, with_causes, found);
    s1f_simulation_free(found);
    /* not one that the order has no unit of may be anything */
    REQUIRE(arrays.are_costs || costs.unit_seconds == NULL);
}

/* -- bytes --------------------------------------------------------------------------------------------------------- */

static const int64_t *take_bytes(fuzz_input *in, int64_t *values, int count, int is_given)
{
    for (int i = 0; i < count; i++)
        values[i] = i < 3 ? take_int64(in) : values[i % 3];
    return is_given ? values : NULL;
}

static void remember(fuzz_input *in, const s1f_program *program)
{
    static int64_t arrays[S1F_NUM_HOLDINGS + 1][MOST_CELLS];
    const s1f_shape *shape = &program->shape;
    uint16_t given = (uint16_t)take_bits(in, 2);
    s1f_memory_bytes bytes = {{NULL}, NULL, NULL};
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
        int count = (int)s1f_table_count(shape, s1f_facts_of_holding((s1f_holding)h).per);
        bytes.of[h] = take_bytes(in, arrays[h], count, given >> h & 1);
    }
    bytes.message =
        take_bytes(in, arrays[S1F_NUM_HOLDINGS], (int)s1f_num_columns(shape), given >> S1F_NUM_HOLDINGS & 1);
    s1f_memory_peak peaks[MOST_RANKS], untouched;
    memset(peaks, 0x5a, sizeof peaks);
    memset(&untouched, 0x5a, sizeof untouched);
    s1f_status status = s1f_program_memory(program, &bytes, peaks);
    if (status != S1F_OK) {
        REQUIRE(status == S1F_ERR_ARG && s1f_last_error()[0] != '\0');
        REQUIRE(memcmp(peaks, &untouched, sizeof untouched) == 0);
        return;
    }
    for (int32_t rank = 0; rank < shape->num_ranks; rank++) {
        const s1f_memory_peak *p = &peaks[rank];
        __int128 sum = p->receive;
        REQUIRE(p->receive >= 0 && p->receive <= p->total);
        for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
            REQUIRE(p->of[h] >= 0 && p->of[h] <= p->total);
            sum += p->of[h];
        }
        REQUIRE(p->total <= sum && p->units >= 1 && p->units <= program->ranks[rank].num_units);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    s1f_schedule *schedule = NULL;
    s1f_program *program = take_program(&in, &schedule);
    if (program == NULL)
        return 0;
    if (take_below(&in, 4) == 0)
        remember(&in, program);
    else
        simulate(&in, program);
    s1f_program_free(program);
    s1f_schedule_free(schedule);
    return 0;
}
