/* order.c - sentences that hold for any order: see order.h. */
#include "order.h"

#include "core/check.h"
#include "core/receives.h"
#include "core/transform.h"
#include "model/critical.h"
#include "model/memory.h"
#include "model/simulate.h"

void require_text_reads_back(const s1f_schedule *schedule)
{
    char *text = NULL, *again = NULL;
    s1f_schedule *read = NULL;
    REQUIRE(s1f_schedule_to_text(schedule, &text) == S1F_OK);
    REQUIRE(s1f_schedule_from_text(text, 0, &read) == S1F_OK);
    REQUIRE(s1f_schedule_to_text(read, &again) == S1F_OK);
    REQUIRE(strcmp(text, again) == 0);
    s1f_schedule_free(read);
    free(again);
    free(text);
}

/* -- what follows from an order that keeps the rules --------------------------------------------------------------- */

static void require_times(const s1f_program *program)
{
    size_t cells = (size_t)program->shape.num_stages * (size_t)s1f_num_columns(&program->shape);
    double *ones = malloc(cells * sizeof *ones);
    for (size_t i = 0; i < cells; i++)
        ones[i] = 1;
    s1f_costs costs = {0};
    for (int pass = 0; pass < s1f_num_passes; pass++)
        costs.pass_seconds[pass] = ones;
    s1f_simulation *found = NULL;
    REQUIRE(s1f_program_simulate(program, &costs, 1, &found) == S1F_OK);
    for (int32_t rank = 0; rank < found->num_ranks; rank++) {
        REQUIRE(found->busy[rank] == (double)program->ranks[rank].num_units);
        REQUIRE(found->makespan >= found->busy[rank]);
    }
    REQUIRE(s1f_simulation_find_slack(program, &costs, found) == S1F_OK);
    REQUIRE(found->path_length >= 1);
    for (int32_t rank = 0; rank < found->num_ranks; rank++)
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++)
            REQUIRE(found->slack[rank][i] >= 0 && found->slack[rank][i] <= found->makespan);
    s1f_simulation_free(found);
    free(ones);
}

static void require_memory(const s1f_program *program)
{
    size_t num_stages = (size_t)program->shape.num_stages;
    int64_t *kv = malloc(num_stages * sizeof *kv);
    s1f_memory_peak *peaks = malloc((size_t)program->shape.num_ranks * sizeof *peaks);
    for (size_t stage = 0; stage < num_stages; stage++)
        kv[stage] = 1;
    REQUIRE(s1f_program_memory(program, &(s1f_memory_bytes){.of = {[S1F_HOLDS_KV] = kv}}, peaks) == S1F_OK);
    for (int32_t rank = 0; rank < program->shape.num_ranks; rank++) {
        int64_t slots = 0;
        for (int32_t stage = 0; stage < program->shape.num_stages; stage++)
            slots += program->shape.rank_of_stage[stage] == rank ? program->peaks[stage].kv_slots : 0;
        REQUIRE(peaks[rank].units >= 0 && peaks[rank].of[S1F_HOLDS_KV] >= 0 && peaks[rank].of[S1F_HOLDS_KV] <= slots);
    }
    free(peaks);
    free(kv);
}

/* With places by time ranks get through, at once or with a rendezvous. */
static void require_places_by_time(const s1f_schedule *schedule)
{
    s1f_program *program = NULL;
    REQUIRE(s1f_schedule_lower(schedule, (s1f_places){.by_time = 1}, S1F_ALL_RANKS, &program) == S1F_OK);
    require_times(program);
    REQUIRE(s1f_program_add_receives(program) == S1F_OK);
    s1f_program_free(program);
}

static void require_deferral(const s1f_schedule *schedule)
{
    s1f_schedule *deferred = NULL, *forward = NULL;
    REQUIRE(s1f_schedule_defer_weights(schedule, 0, &deferred) == S1F_OK);
    REQUIRE(s1f_schedule_check(deferred, 0) == S1F_OK);
    s1f_schedule_free(deferred);
    REQUIRE(s1f_schedule_forward_only(schedule, &forward) == S1F_OK);
    REQUIRE(s1f_schedule_check(forward, 1) == S1F_OK);
    s1f_schedule_free(forward);
}

/* An order keeps the rules with units that are recomputed, or moved, whatever they were before. */
static void require_changes(const s1f_schedule *schedule)
{
    s1f_schedule *changed = NULL;
    s1f_program *program = NULL;
    REQUIRE(s1f_schedule_recompute(schedule, NULL, &changed) == S1F_OK);
    REQUIRE(s1f_schedule_check(changed, 0) == S1F_OK);
    s1f_schedule_free(changed);
    s1f_status status = s1f_schedule_offload(schedule, NULL, &changed);
    if (status != S1F_OK) {
        REQUIRE(status == S1F_ERR_ARG && strstr(s1f_last_error(), "moves units already") != NULL);
        return;
    }
    REQUIRE(s1f_schedule_lower(changed, (s1f_places){.prefetch = 0}, S1F_ALL_RANKS, &program) == S1F_OK);
    require_times(program);
    s1f_program_free(program);
    s1f_schedule_free(changed);
}

int require_order_is_sound(const s1f_schedule *schedule, int32_t prefetch)
{
    s1f_program *program = NULL;
    s1f_status checked = s1f_schedule_check(schedule, 0), status;
    if (checked != S1F_OK) {
        s1f_schedule *deferred = NULL;
        REQUIRE(checked == S1F_ERR_SCHEDULE && s1f_last_error()[0] != '\0');
        REQUIRE(s1f_schedule_lower(schedule, (s1f_places){.prefetch = prefetch}, S1F_ALL_RANKS, &program) ==
                    S1F_ERR_SCHEDULE &&
                program == NULL);
        REQUIRE(s1f_schedule_defer_weights(schedule, 0, &deferred) == S1F_ERR_SCHEDULE && deferred == NULL);
        return 0;
    }
    status = s1f_schedule_lower(schedule, (s1f_places){.prefetch = prefetch}, S1F_ALL_RANKS, &program);
    if (status != S1F_OK) {
        REQUIRE_REFUSED(status);
        REQUIRE(prefetch < 0 && program == NULL);
        return 1;
    }
    require_times(program);
    require_memory(program);
    REQUIRE(s1f_program_add_receives(program) == S1F_OK);
    s1f_program_free(program);
    require_places_by_time(schedule);
    require_deferral(schedule);
    require_changes(schedule);
    return 1;
}
