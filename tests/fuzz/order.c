/* order.c - sentences that hold for any order: see order.h. */
#include "order.h"

#include "core/check.h"
#include "core/receives.h"
#include "core/transform.h"
#include "model/critical.h"
#include "model/memory.h"
#include "model/simulate.h"

int same_order(const s1f_schedule *a, const s1f_schedule *b)
{
    s1f_shape shape = s1f_schedule_shape(a), other = s1f_schedule_shape(b);
    if (shape.num_ranks != other.num_ranks || shape.num_stages != other.num_stages ||
        shape.num_microbatches != other.num_microbatches || shape.num_segments != other.num_segments)
        return 0;
    for (int32_t m = 0; m < shape.num_microbatches; m++)
        if (s1f_segments_of(&shape, m) != s1f_segments_of(&other, m))
            return 0;
    for (int32_t stage = 0; stage < shape.num_stages; stage++)
        if (shape.rank_of_stage[stage] != other.rank_of_stage[stage])
            return 0;
    return s1f_schedule_equal(a, b);
}

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

/* -- programs ------------------------------------------------------------------------------------------------------ */

static void require_slots(const s1f_program *program, const s1f_instruction *run)
{
    s1f_stage_peak peak = program->peaks[run->unit.stage];
    REQUIRE(run->kv_slot >= -1 && run->kv_slot < peak.kv_slots);
    REQUIRE(run->grad_slot >= -1 && run->grad_slot < peak.grad_slots);
}

/* One end of an edge, as one rank walks its program. */
typedef struct {
    int64_t posted, sent, waited;
    int64_t *in_place;      /* [place]: message that was posted last and is not used yet, -1 */
    unsigned char *is_used; /* [sequence] */
} edge_walk;

static void require_instruction(const s1f_edge *edge, edge_walk *walk, const s1f_instruction *instruction, int32_t rank)
{
    REQUIRE(instruction->place >= 0 && instruction->place < edge->num_places);
    REQUIRE(instruction->sequence >= 0 && instruction->sequence < edge->num_messages);
    switch (instruction->opcode) {
    case S1F_OP_POST:
        REQUIRE(edge->destination_rank == rank && instruction->sequence == walk->posted++);
        REQUIRE(walk->in_place[instruction->place] == -1);
        walk->in_place[instruction->place] = instruction->sequence;
        break;
    case S1F_OP_WAIT:
        REQUIRE(edge->destination_rank == rank && walk->in_place[instruction->place] == instruction->sequence);
        REQUIRE(!walk->is_used[instruction->sequence]);
        walk->is_used[instruction->sequence] = 1;
        walk->in_place[instruction->place] = -1;
        walk->waited++;
        break;
    case S1F_OP_SEND: REQUIRE(edge->source_rank == rank && instruction->sequence == walk->sent++); break;
    default: REQUIRE(instruction->opcode == S1F_OP_RECEIVE && edge->destination_rank == rank);
    }
}

void require_program_is_sound(const s1f_program *program)
{
    int32_t num_edges;
    const s1f_edge *edges = s1f_program_edges(program, &num_edges);
    edge_walk *walks = calloc((size_t)num_edges + 1, sizeof *walks);
    for (int32_t e = 0; e < num_edges; e++) {
        walks[e].is_used = calloc((size_t)edges[e].num_messages + 1, 1);
        walks[e].in_place = malloc((size_t)edges[e].num_places * sizeof *walks[e].in_place);
        for (int32_t place = 0; place < edges[e].num_places; place++)
            walks[e].in_place[place] = -1;
    }
    for (int32_t rank = 0; rank < program->shape.num_ranks; rank++) {
        int64_t count, num_run = 0;
        const s1f_instruction *instructions = s1f_program_instructions(program, rank, &count);
        for (int64_t i = 0; i < count; i++) {
            const s1f_instruction *instruction = &instructions[i];
            if (instruction->opcode == S1F_OP_RUN) {
                const s1f_unit *unit = &program->ranks[rank].units[num_run++];
                REQUIRE(memcmp(&instruction->unit, unit, sizeof *unit) == 0);
                require_slots(program, instruction);
            } else if (instruction->opcode == S1F_OP_BACK) {
                REQUIRE(s1f_reads_moved(&program->shape, instruction->unit) && instruction->edge == -1);
                REQUIRE(memcmp(&instruction->unit, &program->ranks[rank].units[num_run], sizeof(s1f_unit)) == 0);
            } else if (instruction->opcode != S1F_OP_FREE) {
                REQUIRE(instruction->edge >= 0 && instruction->edge < num_edges);
                require_instruction(&edges[instruction->edge], &walks[instruction->edge], instruction, rank);
            }
        }
        REQUIRE(num_run == program->ranks[rank].num_units);
    }
    for (int32_t e = 0; e < num_edges; e++) {
        REQUIRE(walks[e].posted == edges[e].num_messages && walks[e].sent == edges[e].num_messages &&
                walks[e].waited == edges[e].num_messages);
        free(walks[e].is_used);
        free(walks[e].in_place);
    }
    free(walks);
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
    require_program_is_sound(program);
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
    require_program_is_sound(program);
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
    require_program_is_sound(program);
    require_times(program);
    require_memory(program);
    REQUIRE(s1f_program_add_receives(program) == S1F_OK);
    require_program_is_sound(program);
    s1f_program_free(program);
    require_places_by_time(schedule);
    require_deferral(schedule);
    require_changes(schedule);
    return 1;
}
