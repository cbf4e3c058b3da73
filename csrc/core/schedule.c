/* schedule.c - the order of every rank as plain arrays of units. */
#include "schedule.h"

#include "trees.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    s1f_unit *units;
    int64_t count, capacity;
} order;

struct s1f_schedule {
    s1f_shape shape;         /* without products and marks */
    s1f_pool pool;           /* of what the shape points to but trees, and of orders */
    s1f_trees trees;         /* of the shape */
    order *orders;           /* [num_ranks] */
    int64_t num_units;       /* of all ranks */
    uint32_t passes;         /* bits of the passes that occur */
    _Atomic(int) is_checked; /* the order has passed its rules as it stands */
};

s1f_status s1f_check_num_units(int64_t num_stages, int32_t num_microbatches, int32_t num_segments)
{
    if (num_stages <= INT32_MAX && (int64_t)num_microbatches * num_segments <= INT32_MAX / num_stages)
        return S1F_OK;
    return s1f_fail(S1F_ERR_ARG, "%lld stages x %d micro-batches x %d segments are more than %d units",
                    (long long)num_stages, (int)num_microbatches, (int)num_segments, (int)INT32_MAX);
}

static s1f_status check_longest(const s1f_shape *shape)
{
    int32_t most = 0;
    for (int32_t m = 0; m < shape->num_microbatches; m++)
        most = s1f_segments_of(shape, m) > most ? s1f_segments_of(shape, m) : most;
    return most == shape->num_segments
               ? S1F_OK
               : s1f_fail(S1F_ERR_ARG, "the most segments of a micro-batch are %d, num_segments is %d", (int)most,
                          (int)shape->num_segments);
}

static s1f_status set_parents(s1f_schedule *schedule, const int32_t *parents)
{
    s1f_shape *shape = &schedule->shape;
    S1F_TRY(s1f_trees_create(shape, parents, &schedule->pool, &schedule->trees));
    for (int64_t cell = 0; cell < s1f_num_cells(shape); cell++)
        if (parents[cell] != s1f_unit_of_cell(shape, S1F_PASS_FORWARD, 0, cell).segment - 1)
            shape->trees = &schedule->trees; /* chains alone are the order that they are without parents */
    return S1F_OK;
}

s1f_status s1f_schedule_create(const s1f_shape *shape, const int32_t *parents, s1f_schedule **out)
{
    S1F_TRY(s1f_check_num_units(shape->num_stages, shape->num_microbatches, shape->num_segments));
    S1F_TRY(check_longest(shape));
    s1f_schedule *schedule = calloc(1, sizeof *schedule);
    if (schedule == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a schedule of %d ranks", shape->num_ranks);
    size_t S = (size_t)shape->num_stages, num_bounds = (size_t)shape->num_microbatches + 1;
    int32_t *rank_of_stage = s1f_pool_take(&schedule->pool, S, sizeof *rank_of_stage);
    int64_t *first_cell = s1f_pool_take(&schedule->pool, num_bounds, sizeof *first_cell);
    schedule->orders = s1f_pool_take(&schedule->pool, (size_t)shape->num_ranks, sizeof *schedule->orders);
    schedule->shape = (s1f_shape){.num_ranks = shape->num_ranks,
                                  .num_stages = shape->num_stages,
                                  .num_microbatches = shape->num_microbatches,
                                  .num_segments = shape->num_segments,
                                  .rank_of_stage = rank_of_stage,
                                  .first_cell = shape->first_cell == NULL ? NULL : first_cell};
    s1f_status status = s1f_pool_status(&schedule->pool, "a schedule");
    if (status == S1F_OK) {
        memcpy(rank_of_stage, shape->rank_of_stage, S * sizeof *rank_of_stage);
        if (shape->first_cell != NULL)
            memcpy(first_cell, shape->first_cell, num_bounds * sizeof *first_cell);
        status = parents == NULL ? S1F_OK : set_parents(schedule, parents);
    }
    return s1f_schedule_finish(schedule, status, out);
}

s1f_status s1f_schedule_finish(s1f_schedule *schedule, s1f_status status, s1f_schedule **out)
{
    if (status == S1F_OK)
        *out = schedule;
    else
        s1f_schedule_free(schedule);
    return status;
}

void s1f_schedule_free(s1f_schedule *schedule)
{
    if (schedule == NULL)
        return;
    for (int32_t rank = 0; schedule->orders != NULL && rank < schedule->shape.num_ranks; rank++)
        free(schedule->orders[rank].units);
    s1f_pool_free(&schedule->pool);
    free(schedule);
}

s1f_status s1f_schedule_create_like(const s1f_schedule *schedule, s1f_schedule **out)
{
    const s1f_trees *trees = schedule->shape.trees;
    return s1f_schedule_create(&schedule->shape, trees == NULL ? NULL : trees->parent, out);
}

s1f_status s1f_schedule_append(s1f_schedule *schedule, s1f_unit unit)
{
    order *own = &schedule->orders[schedule->shape.rank_of_stage[unit.stage]];
    if (own->count == own->capacity)
        S1F_TRY(s1f_array_grow(&own->units, &own->capacity, own->capacity == 0 ? 64 : 2 * own->capacity,
                               sizeof *own->units, "units of one rank"));
    own->units[own->count++] = unit;
    schedule->num_units++;
    schedule->passes |= 1u << unit.pass;
    atomic_store_explicit(&schedule->is_checked, 0, memory_order_relaxed);
    return S1F_OK;
}

const s1f_unit *s1f_schedule_units(const s1f_schedule *schedule, int32_t rank, int64_t *num_units)
{
    *num_units = schedule->orders[rank].count;
    return schedule->orders[rank].units;
}

int64_t s1f_schedule_num_units(const s1f_schedule *schedule)
{
    return schedule->num_units;
}

int s1f_next_unit(const s1f_schedule *schedule, s1f_position *at)
{
    for (; at->rank < schedule->shape.num_ranks; at->rank++, at->number = 0)
        if (at->number < schedule->orders[at->rank].count) {
            at->unit = schedule->orders[at->rank].units[at->number++];
            return 1;
        }
    return 0;
}

uint32_t s1f_schedule_passes(const s1f_schedule *schedule)
{
    return schedule->passes;
}

/* A step of a hash: every bit of both changes about half of the result's [MurmurHash3, finalizer]. */
static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) + 0x9e3779b97f4a7c15u; /* otherwise zeros would stay zeros */
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdu;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
    return hash ^ hash >> 33;
}

uint64_t s1f_schedule_digest(const s1f_schedule *schedule)
{
    uint64_t hash = mix(0, (uint64_t)schedule->shape.num_ranks);
    for (int32_t rank = 0; rank < schedule->shape.num_ranks; rank++) {
        const order *own = &schedule->orders[rank];
        hash = mix(hash, (uint64_t)own->count);
        for (const s1f_unit *unit = own->units; unit != own->units + own->count; unit++) {
            hash = mix(hash, (uint64_t)unit->pass << 32 | (uint32_t)unit->stage);
            hash = mix(hash, (uint64_t)unit->microbatch << 32 | (uint32_t)unit->segment);
        }
    }
    for (int64_t cell = 0; schedule->shape.trees != NULL && cell < s1f_num_cells(&schedule->shape); cell++)
        hash = mix(hash, (uint32_t)schedule->shape.trees->parent[cell]);
    return hash;
}

s1f_shape s1f_schedule_shape(const s1f_schedule *schedule)
{
    s1f_shape shape = schedule->shape;
    shape.products = s1f_products_of_passes(schedule->passes);
    return shape;
}

/* Marks: what units make of the optional products, for each cell of all stages, and how they go through trees. */
s1f_status s1f_schedule_full_shape(const s1f_schedule *schedule, s1f_pool *pool, s1f_shape *out)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    size_t num_cells = (size_t)(shape.num_stages * s1f_num_cells(&shape));
    if (shape.products & s1f_optional_products() || shape.trees != NULL) {
        uint16_t *marks = s1f_pool_take(pool, num_cells, sizeof *marks);
        unsigned char *is_open = s1f_pool_take(pool, shape.trees == NULL ? 0 : num_cells, 1);
        S1F_TRY(s1f_pool_status(pool, "what becomes of the units of an order"));
        for (s1f_position at = {0}; s1f_next_unit(schedule, &at);)
            marks[s1f_cell_of_all(&shape, at.unit)] |=
                (uint16_t)(s1f_pass_products(at.unit.pass) & s1f_optional_products());
        for (int32_t rank = 0; shape.trees != NULL && rank < shape.num_ranks; rank++)
            s1f_trees_mark(&shape, schedule->orders[rank].units, schedule->orders[rank].count, is_open, marks);
        shape.marks = marks;
    }
    *out = shape;
    return S1F_OK;
}

int s1f_schedule_shows_stages(const s1f_schedule *schedule)
{
    for (int32_t stage = 0; stage < schedule->shape.num_stages; stage++)
        if (schedule->shape.rank_of_stage[stage] != stage)
            return 1;
    return 0;
}

int s1f_schedule_is_checked(const s1f_schedule *schedule)
{
    return atomic_load_explicit(&((s1f_schedule *)schedule)->is_checked, memory_order_relaxed);
}

void s1f_schedule_note_checked(const s1f_schedule *schedule)
{
    atomic_store_explicit(&((s1f_schedule *)schedule)->is_checked, 1, memory_order_relaxed);
}

s1f_status s1f_schedule_forward_only(const s1f_schedule *schedule, s1f_schedule **out)
{
    s1f_schedule *forward = NULL;
    s1f_status status = s1f_schedule_create_like(schedule, &forward);
    for (s1f_position at = {0}; status == S1F_OK && s1f_next_unit(schedule, &at);)
        if (s1f_pass_is_forward(at.unit.pass))
            status = s1f_schedule_append(forward, at.unit);
    return s1f_schedule_finish(forward, status, out);
}
