/* fuzz_builders.c - do a family's arguments give an order that keeps the rules and the caps, or an error? */
#include "order.h"

#include "core/check.h"
#include "model/memory.h"
#include "schedules/families.h"

enum { MOST_CELLS = 48, MOST_UNITS = 64, MOST_RANKS = 8 };

typedef struct {
    double costs[3][MOST_CELLS];
    int64_t unit_bytes[MOST_CELLS], cap_bytes[MOST_RANKS];
    int32_t segments_of[MOST_UNITS], parents[MOST_CELLS];
} option_arrays;

/* Arrays are as long as the counts ask for, so they are given only where these fit. */
static s1f_options take_options(fuzz_input *in, int fits, option_arrays *arrays)
{
    s1f_options options = {0};
    uint16_t given = (uint16_t)take_bits(in, 2);
    if (given & 1)
        options.group = take_int32(in);
    if (given & 2)
        options.round = take_int32(in);
    if (given & 4)
        options.extra_warmup = take_int32(in);
    if (given & 8)
        options.cap = take_int64(in);
    if (given & 16)
        options.transfer = take_double(in);
    if (given & 32)
        options.placement = take_int32(in) & 3;
    if (given & 64)
        options.backward = take_int32(in) & 3;
    if (given & 2048)
        options.trees = take_int32(in) & 3;
    if (given & 128 && fits) {
        for (int pass = 0; pass < 3; pass++)
            for (int i = 0; i < MOST_CELLS; i++)
                arrays->costs[pass][i] = i < 4 ? take_double(in) : arrays->costs[pass][i % 4];
        options.costs[0] = arrays->costs[0];
        options.costs[1] = arrays->costs[1];
        options.costs[2] = given & 256 ? NULL : arrays->costs[2];
    }
    if (given & 512 && fits) {
        for (int i = 0; i < MOST_CELLS; i++)
            arrays->unit_bytes[i] = i < 4 ? take_int64(in) : arrays->unit_bytes[i % 4];
        options.unit_bytes = arrays->unit_bytes;
    }
    if (given & 1024 && fits) {
        for (int i = 0; i < MOST_RANKS; i++)
            arrays->cap_bytes[i] = i < 2 ? take_int64(in) : arrays->cap_bytes[i % 2];
        options.cap_bytes = arrays->cap_bytes;
    }
    return options;
}

/* Segments of every micro-batch, the last thing that an input says. */
static const int32_t *take_rows(fuzz_input *in, const int32_t counts[4], option_arrays *arrays)
{
    int64_t sum = 0;
    int32_t most = counts[2] < MOST_CELLS ? counts[2] : MOST_CELLS, is_largest = take_below(in, 8);
    for (int32_t m = 0; m < counts[1]; m++) {
        arrays->segments_of[m] = m == 0 && is_largest != 7 ? counts[2] : take_below(in, most + 1) + (is_largest < 6);
        sum += arrays->segments_of[m];
    }
    return sum * counts[0] * counts[3] <= MOST_CELLS ? arrays->segments_of : NULL;
}

/* Segments that follow any one before them, behind the rows. */
static const int32_t *take_parents(fuzz_input *in, int32_t num_microbatches, option_arrays *arrays)
{
    int32_t *next = arrays->parents;
    for (int32_t m = 0; m < num_microbatches; m++)
        for (int32_t s = 0; s < arrays->segments_of[m]; s++)
            *next++ = s == 0 ? -1 : take_below(in, s);
    return arrays->parents;
}

/* What the caller asked for holds of the order that came out. */
static void require_caps(const s1f_schedule *schedule, const s1f_options *options)
{
    REQUIRE(s1f_schedule_check(schedule, options->cap) == S1F_OK);
    if (options->cap_bytes == NULL)
        return;
    s1f_program *program = NULL;
    s1f_memory_peak peaks[MOST_RANKS];
    REQUIRE(s1f_schedule_lower(schedule, (s1f_places){.by_time = 1}, S1F_NO_RANK, &program) == S1F_OK);
    if (s1f_program_memory(program, &(s1f_memory_bytes){.of = {[S1F_HOLDS_FOR_WEIGHT] = options->unit_bytes}}, peaks) ==
        S1F_OK)
        for (int32_t rank = 0; rank < s1f_schedule_shape(schedule).num_ranks; rank++)
            REQUIRE(peaks[rank].of[S1F_HOLDS_SAVED] <= options->cap_bytes[rank]);
    s1f_program_free(program);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static option_arrays arrays;
    fuzz_input in = {data, size};
    int32_t num_families = 0;
    while (s1f_schedule_family(num_families) != NULL)
        num_families++;
    const char *family = s1f_schedule_family(take_below(&in, num_families))->name->name;
    int32_t counts[4]; /* P, M, k, v */
    uint8_t is_wild = (uint8_t)take_bits(&in, 1);
    for (int i = 0; i < 4; i++)
        counts[i] = is_wild >= 224 ? take_int32(&in) : 1 + take_below(&in, i == 1 ? 12 : 5);
    int is_auto = strcmp(family, "auto") == 0;
    double cells = (double)counts[0] * counts[2] * counts[3];
    int fits = cells <= MOST_CELLS && counts[0] <= MOST_RANKS && counts[1] <= MOST_UNITS && cells > 0;
    s1f_options options = take_options(&in, fits, &arrays);
    if (fits && take_below(&in, 4) == 1)
        options.segments_of = take_rows(&in, counts, &arrays);
    if (options.segments_of != NULL && take_below(&in, 2) == 1)
        options.parents = take_parents(&in, counts[1], &arrays);
    const char *rule = "untouched";
    s1f_status status = s1f_schedule_broken_rule(family, counts[0], counts[1], counts[2], counts[3], &options, &rule);
    if (status != S1F_OK) {
        REQUIRE(status == S1F_ERR_ARG && s1f_last_error()[0] != '\0' && strcmp(rule, "untouched") == 0);
    } else if (rule == NULL) {
        /* many units take long by right, and auto searches */
        int64_t most_units = is_auto ? 2 : MOST_UNITS;
        if (!fits || (int64_t)cells * counts[1] > most_units)
            return 0;
    }
    s1f_schedule *schedule = NULL;
    s1f_status built = s1f_schedule_build(family, counts[0], counts[1], counts[2], counts[3], &options, &schedule);
    if (built != S1F_OK) {
        REQUIRE_REFUSED(built);
        REQUIRE(schedule == NULL);
        REQUIRE(status == S1F_OK ? built == S1F_ERR_SCHEDULE : built == status);
        REQUIRE(rule != NULL || is_auto);
        return 0;
    }
    REQUIRE(status == S1F_OK && rule == NULL);
    require_caps(schedule, &options);
    require_text_reads_back(schedule);
    REQUIRE(require_order_is_sound(schedule, 1));
    s1f_schedule_free(schedule);
    return 0;
}
