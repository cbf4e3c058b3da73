/* families.c - the table of the families, the checks of a request, and what families share. */
#include "families.h"

#include "../core/table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Every name, in the order in which they are listed, and tried by auto. */
static const s1f_named_family families[] = {
    {&s1f_family_seq1f1b, &s1f_family_seq1f1b.segments},
    {&s1f_family_1f1b, &s1f_family_1f1b.whole},
    {&s1f_family_gpipe, &s1f_family_gpipe.whole},
    {&s1f_family_terapipe, &s1f_family_terapipe.segments},
    {&s1f_family_kfkb, &s1f_family_kfkb.whole},
    {&s1f_family_breadth_first, &s1f_family_breadth_first.whole},
    {&s1f_family_interleaved, &s1f_family_interleaved.whole},
    {&s1f_family_interleaved, &s1f_family_interleaved.segments},
    {&s1f_family_slimpipe, &s1f_family_slimpipe.segments},
    {&s1f_family_hanayo, &s1f_family_hanayo.whole},
    {&s1f_family_zb_h1, &s1f_family_zb_h1.whole},
    {&s1f_family_zb_h2, &s1f_family_zb_h2.whole},
    {&s1f_family_zbv, &s1f_family_zbv.whole},
    {&s1f_family_v_half, &s1f_family_v_half.whole},
    {&s1f_family_v_min, &s1f_family_v_min.whole},
    {&s1f_family_dualpipev, &s1f_family_dualpipev.whole},
    {&s1f_family_zb_h1, &s1f_family_zb_h1.segments},
    {&s1f_family_zb_h2, &s1f_family_zb_h2.segments},
    {&s1f_family_zbv, &s1f_family_zbv.segments},
    {&s1f_family_v_half, &s1f_family_v_half.segments},
    {&s1f_family_v_min, &s1f_family_v_min.segments},
    {&s1f_family_auto, &s1f_family_auto.segments},
};
static const double MOST_SECONDS = 1e300; /* of all units and messages: their sums are finite then */
enum { NUM_FAMILIES = sizeof families / sizeof families[0], OPTIONS_TEXT_BYTES = 128, RULE_TEXT_BYTES = 64 };

const s1f_named_family *s1f_schedule_family(int32_t i)
{
    return i < NUM_FAMILIES ? &families[i] : NULL;
}

static s1f_status refuse_option(const s1f_request *request, const char *option)
{
    char known[OPTIONS_TEXT_BYTES] = "none";
    size_t used = 0;
    for (int i = 0; i < S1F_NUM_OPTIONS; i++)
        if (request->family->options >> i & 1)
            used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used == 0 ? "" : ", ",
                                     s1f_option_table[i].name);
    return s1f_fail(S1F_ERR_ARG, "%s takes no option '%.64s'; it takes %s", request->name->name, option, known);
}

static s1f_status require_at_least(const char *name, int64_t value, int64_t least)
{
    if (value < least)
        return s1f_fail(S1F_ERR_ARG, "%s is %lld, must be at least %lld", name, (long long)value, (long long)least);
    return S1F_OK;
}

/* All are given, or none, and their sum is finite: ends of units can be compared. */
static s1f_status check_costs(const s1f_request *request)
{
    const s1f_options *options = &request->options;
    const double *const *costs = options->costs;
    int64_t count = (int64_t)request->num_ranks * request->stages_per_rank * request->num_columns;
    double sum = 3 * (double)count * options->transfer;
    int is_given = costs[0] != NULL || costs[1] != NULL || costs[2] != NULL;
    for (int pass = 0; is_given && pass < S1F_SPLIT_PASSES; pass++) {
        if (costs[pass] == NULL)
            return s1f_fail(S1F_ERR_ARG, "costs must be given for all of F, I and W");
        S1F_TRY(s1f_require_seconds("costs hold", costs[pass], count));
        for (int64_t i = 0; i < count; i++)
            sum += costs[pass][i];
    }
    sum *= options->segments_of == NULL ? request->num_microbatches : 1; /* else a column is one cell */
    if (sum > MOST_SECONDS)
        return s1f_fail(S1F_ERR_ARG, "costs and transfers of all units sum to %g seconds, must be at most %g", sum,
                        MOST_SECONDS);
    return S1F_OK;
}

/* The bytes of all units together fit in int64_t. */
static s1f_status check_bytes(const s1f_request *request)
{
    const s1f_options *options = &request->options;
    if ((options->unit_bytes == NULL) != (options->cap_bytes == NULL))
        return s1f_fail(S1F_ERR_ARG, "unit_bytes and cap_bytes go together: give both");
    if (options->unit_bytes == NULL)
        return S1F_OK;
    if (options->cap != 0)
        return s1f_fail(S1F_ERR_ARG, "cap, in units, and cap_bytes are two forms of one cap: give one");
    int64_t count = (int64_t)request->num_ranks * request->stages_per_rank * request->num_columns;
    int64_t most = INT64_MAX / (count * request->num_microbatches);
    S1F_TRY(s1f_require_bytes("unit_bytes", options->unit_bytes, count, most));
    return s1f_require_bytes("cap_bytes", options->cap_bytes, request->num_ranks, INT64_MAX);
}

static s1f_status check_option(const s1f_options *options, const s1f_option *option)
{
    const void *field = (const char *)options + option->offset;
    const int32_t *word = field;
    const double *seconds = field;
    switch (option->kind) {
    case S1F_KIND_INT32: return require_at_least(option->name, *(const int32_t *)field, 0);
    case S1F_KIND_INT64: return require_at_least(option->name, *(const int64_t *)field, 0);
    case S1F_KIND_SECONDS:
        return *seconds >= 0 && isfinite(*seconds)
                   ? S1F_OK
                   : s1f_fail(S1F_ERR_ARG, "%s is %g, must be finite and at least 0", option->name, *seconds);
    case S1F_KIND_WORD:
        return *word >= 0 && *word <= 2 ? S1F_OK
                                        : s1f_fail(S1F_ERR_ARG, "%s is %d, must be 1, '%s', or 2, '%s'", option->name,
                                                   (int)*word, option->words[0], option->words[1]);
    default: return S1F_OK; /* tables: below, together */
    }
}

static int option_is_given(const s1f_options *options, int option)
{
    static const char nothing[sizeof options->costs];
    const s1f_option *row = &s1f_option_table[option];
    return memcmp((const char *)options + row->offset, nothing, row->bytes) != 0;
}

static s1f_status check_options(const s1f_request *request)
{
    const s1f_options *options = &request->options;
    for (int i = 0; i < S1F_NUM_OPTIONS; i++)
        if (!(request->family->options >> i & 1) && option_is_given(options, i))
            return refuse_option(request, s1f_option_table[i].name);
    for (int i = 0; i < S1F_NUM_OPTIONS; i++)
        S1F_TRY(check_option(options, &s1f_option_table[i]));
    S1F_TRY(check_bytes(request));
    return check_costs(request);
}

/* Counts the cells of micro-batches that differ in their segments: there, a column is a cell. */
static s1f_status count_cells(s1f_request *request)
{
    request->num_cells = 0;
    for (int32_t m = 0; m < request->num_microbatches; m++) {
        int32_t count = request->options.segments_of[m];
        if (count < 1)
            return s1f_fail(S1F_ERR_ARG, "num_segments[%d] is %d, must be at least 1", (int)m, (int)count);
        request->num_cells += count;
        request->has_unequal_rows |= count != request->num_segments;
    }
    request->num_columns = request->num_cells;
    return S1F_OK;
}

/* Checks everything but the family's rules. */
static s1f_status make_request(const char *name, int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                               int32_t stages_per_rank, const s1f_options *options, s1f_request *request)
{
    *request = (s1f_request){.num_ranks = num_ranks,
                             .num_microbatches = num_microbatches,
                             .num_segments = num_segments,
                             .stages_per_rank = stages_per_rank};
    if (options != NULL)
        request->options = *options;
    S1F_TRY(require_at_least("num_ranks", num_ranks, 1));
    S1F_TRY(require_at_least("num_microbatches", num_microbatches, 1));
    S1F_TRY(require_at_least("num_segments", num_segments, 1));
    S1F_TRY(require_at_least("stages_per_rank", stages_per_rank, 1));
    int32_t i = 0;
    while (i < NUM_FAMILIES && strcmp(families[i].name->name, name) != 0)
        i++;
    if (i == NUM_FAMILIES)
        return s1f_fail(S1F_ERR_ARG, "there is no schedule named '%.64s'", name);
    request->family = families[i].family;
    request->name = families[i].name;
    S1F_TRY(s1f_check_num_units((int64_t)num_ranks * stages_per_rank, num_microbatches, num_segments));
    request->num_columns = request->num_segments;
    request->num_cells = (int64_t)request->num_microbatches * request->num_segments;
    if (request->options.segments_of != NULL)
        S1F_TRY(count_cells(request));
    return check_options(request);
}

/* The first rule that is broken, NULL: none. */
static const char *broken_rule(const s1f_request *request)
{
    static _Thread_local char text[RULE_TEXT_BYTES];
    const s1f_family *family = request->family;
    int has_both = family->whole.name != NULL && family->segments.name != NULL;
    if (has_both && request->name == &family->whole && request->num_segments != 1) {
        snprintf(text, sizeof text, "k = 1 (%s takes segments)", family->segments.name);
        return text;
    }
    if (family->takes_equal_rows && request->has_unequal_rows)
        return "the same k for all micro-batches";
    if (!family->takes_more_stages && request->stages_per_rank != family->stages_per_rank)
        return family->stages_per_rank == 1 ? "v = 1" : "v = 2";
    const char *rule = family->broken_rule != NULL ? family->broken_rule(request) : NULL;
    if (rule != NULL)
        return rule;
    if (family->least_units != NULL && request->num_cells < family->least_units(request))
        return s1f_rule_of_units(request);
    int has_low_cap =
        family->most_live != NULL && request->options.cap != 0 && request->options.cap < family->most_live(request);
    return has_low_cap ? family->cap_rule : NULL;
}

s1f_status s1f_schedule_broken_rule(const char *family, int32_t num_ranks, int32_t num_microbatches,
                                    int32_t num_segments, int32_t stages_per_rank, const s1f_options *options,
                                    const char **rule)
{
    s1f_request request;
    S1F_TRY(make_request(family, num_ranks, num_microbatches, num_segments, stages_per_rank, options, &request));
    *rule = broken_rule(&request);
    return S1F_OK;
}

static s1f_status build_by_rank(const s1f_request *request, s1f_schedule **out)
{
    const s1f_family *family = request->family;
    s1f_schedule *schedule = NULL;
    s1f_status status = s1f_schedule_place(request, family->placement, &schedule);
    int is_nested = status == S1F_OK && family->options & S1F_OPTION_TREES &&
                    request->options.trees != S1F_TREES_BY_NUMBER && s1f_schedule_shape(schedule).trees != NULL;
    for (int32_t rank = 0; rank < request->num_ranks && status == S1F_OK; rank++)
        status = (is_nested ? s1f_order_nested : family->order_of_rank)(request, schedule, rank);
    if (family->most_live == NULL || status != S1F_OK)
        return s1f_schedule_finish(schedule, status, out);
    status = s1f_schedule_split(request, schedule, out);
    s1f_schedule_free(schedule);
    return status;
}

s1f_status s1f_schedule_build(const char *family, int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                              int32_t stages_per_rank, const s1f_options *options, s1f_schedule **out)
{
    s1f_request request;
    S1F_TRY(make_request(family, num_ranks, num_microbatches, num_segments, stages_per_rank, options, &request));
    const char *rule = broken_rule(&request);
    if (rule != NULL)
        return s1f_fail(S1F_ERR_SCHEDULE,
                        "%s needs %s: here P = %d ranks, M = %d micro-batches, k = %d segments, v = %d stages per rank",
                        request.name->name, rule, num_ranks, num_microbatches, num_segments, stages_per_rank);
    return request.family->build != NULL ? request.family->build(&request, out) : build_by_rank(&request, out);
}

/* -- what families share ------------------------------------------------------------------------------------------- */

int32_t s1f_rank_of_stage(int32_t placement, int32_t num_ranks, int32_t stage)
{
    int32_t place = stage % num_ranks, goes_back = placement == S1F_PLACEMENT_V && stage / num_ranks % 2 == 1;
    return goes_back ? num_ranks - 1 - place : place;
}

s1f_status s1f_schedule_place(const s1f_request *request, int32_t placement, s1f_schedule **out)
{
    const int32_t *segments_of = request->options.segments_of;
    s1f_pool pool = {0};
    s1f_shape shape = {.num_ranks = request->num_ranks,
                       .num_stages = request->num_ranks * request->stages_per_rank,
                       .num_microbatches = request->num_microbatches,
                       .num_segments = request->num_segments};
    int32_t *rank_of_stage = s1f_pool_take(&pool, (size_t)shape.num_stages, sizeof *rank_of_stage);
    int64_t *first_cell = s1f_pool_take(&pool, (size_t)shape.num_microbatches + 1, sizeof *first_cell);
    for (int32_t stage = 0; !pool.is_short && stage < shape.num_stages; stage++)
        rank_of_stage[stage] = s1f_rank_of_stage(placement, shape.num_ranks, stage);
    for (int32_t m = 0; !pool.is_short && segments_of != NULL && m < shape.num_microbatches; m++)
        first_cell[m + 1] = first_cell[m] + segments_of[m];
    shape.rank_of_stage = rank_of_stage;
    shape.first_cell = segments_of == NULL ? NULL : first_cell;
    s1f_status status = s1f_pool_status(&pool, "the placement of stages");
    if (status == S1F_OK)
        status = s1f_schedule_create(&shape, request->options.parents, out);
    s1f_pool_free(&pool);
    return status;
}

s1f_status s1f_schedule_append_nth(s1f_schedule *schedule, s1f_pass pass, int32_t stage, int64_t i)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    return s1f_schedule_append(schedule, pass == S1F_PASS_FORWARD ? s1f_unit_of_cell(&shape, pass, stage, i)
                                                                  : s1f_unit_going_back(&shape, pass, stage, i));
}

int64_t s1f_extra_warmup(const s1f_request *request, int32_t rank)
{
    int64_t more = (int64_t)(request->num_ranks - rank - 1) * request->options.extra_warmup;
    return more < request->num_cells ? more : request->num_cells;
}

const char *s1f_rule_of_units(const s1f_request *request)
{
    static _Thread_local char text[RULE_TEXT_BYTES];
    const s1f_family *family = request->family;
    const char *validity = request->num_segments == 1 ? family->whole.validity : family->segments.validity;
    snprintf(text, sizeof text, "%.*s", (int)strcspn(validity, ","), validity);
    return text;
}
