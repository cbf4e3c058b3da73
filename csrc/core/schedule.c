/* schedule.c - the order of every rank as plain arrays of units. */
#include "schedule.h"

#include "pool.h"
#include "trees.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    s1f_unit *units;
    int64_t count, capacity;
} order;

struct s1f_schedule {
    s1f_shape shape;           /* without products and marks; what it points to is the schedule's */
    s1f_pool pool;             /* of that, but for trees, and of orders */
    s1f_trees *trees;          /* of the shape */
    order *orders;             /* [num_ranks] */
    uint32_t passes;           /* bits of the passes that occur */
    _Atomic(uint16_t *) marks; /* of the shape, once somebody has asked; readers may be several */
    _Atomic(int) is_checked;   /* the order has passed its rules as it stands */
};

static s1f_status check_counts(const s1f_shape *shape)
{
    const struct {
        const char *name;
        int32_t value;
    } counts[] = {{"num_ranks", shape->num_ranks},
                  {"num_stages", shape->num_stages},
                  {"num_microbatches", shape->num_microbatches},
                  {"num_segments", shape->num_segments}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value < 1)
            return s1f_fail(S1F_ERR_ARG, "%s is %d, must be at least 1", counts[i].name, counts[i].value);
    if ((int64_t)shape->num_microbatches * shape->num_segments > S1F_MAX_FORWARD_UNITS / shape->num_stages)
        return s1f_fail(S1F_ERR_ARG, "%d stages x %d micro-batches x %d segments are more than %d units",
                        shape->num_stages, shape->num_microbatches, shape->num_segments, (int)S1F_MAX_FORWARD_UNITS);
    if (shape->num_stages < shape->num_ranks)
        return s1f_fail(S1F_ERR_ARG, "num_stages is %d, must be at least num_ranks, %d: every rank holds a stage",
                        shape->num_stages, shape->num_ranks);
    int32_t most = 0;
    for (int32_t m = 0; shape->first_cell != NULL && m < shape->num_microbatches; m++) {
        int32_t own = s1f_segments_of(shape, m);
        if (own < 1)
            return s1f_fail(S1F_ERR_ARG, "num_segments of micro-batch %d is %d, must be at least 1", (int)m, (int)own);
        most = own > most ? own : most;
    }
    if (shape->first_cell != NULL && most != shape->num_segments)
        return s1f_fail(S1F_ERR_ARG, "the most segments of a micro-batch are %d, num_segments is %d", (int)most,
                        (int)shape->num_segments);
    return S1F_OK;
}

/* Copies the placement. */
static s1f_status place(const s1f_shape *shape, int32_t *rank_of_stage, unsigned char *holds_stage)
{
    for (int32_t stage = 0; stage < shape->num_stages; stage++) {
        int32_t rank = rank_of_stage[stage] = shape->rank_of_stage[stage];
        if (rank < 0 || rank >= shape->num_ranks)
            return s1f_fail(S1F_ERR_ARG, "stage %d is placed on rank %d, must be in 0..%d", stage, rank,
                            shape->num_ranks - 1);
        holds_stage[rank] = 1;
    }
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        if (!holds_stage[rank])
            return s1f_fail(S1F_ERR_ARG, "rank %d holds no stage", rank);
    return S1F_OK;
}

static s1f_status set_parents(s1f_schedule *schedule, const int32_t *parents)
{
    s1f_shape *shape = &schedule->shape;
    S1F_TRY(s1f_trees_create(shape, parents, &schedule->trees));
    for (int64_t cell = 0; cell < s1f_num_cells(shape); cell++)
        if (parents[cell] != s1f_unit_of_cell(shape, S1F_PASS_FORWARD, 0, cell).segment - 1) {
            shape->trees = schedule->trees; /* chains alone are the order that they are without parents */
            break;
        }
    return S1F_OK;
}

s1f_status s1f_schedule_create(const s1f_shape *shape, const int32_t *parents, s1f_schedule **out)
{
    S1F_TRY(check_counts(shape));
    if (parents != NULL && shape->first_cell == NULL)
        return s1f_fail(S1F_ERR_ARG, "parents need num_segments of each micro-batch");
    s1f_schedule *schedule = calloc(1, sizeof *schedule);
    if (schedule == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a schedule of %d ranks", shape->num_ranks);
    size_t P = (size_t)shape->num_ranks, S = (size_t)shape->num_stages;
    int32_t *rank_of_stage = s1f_pool_take(&schedule->pool, S, sizeof *rank_of_stage);
    size_t num_first = shape->first_cell == NULL ? 0 : (size_t)shape->num_microbatches + 1;
    int64_t *first_cell = s1f_pool_take(&schedule->pool, num_first, sizeof *first_cell);
    unsigned char *holds_stage = s1f_pool_take(&schedule->pool, P, 1);
    schedule->orders = s1f_pool_take(&schedule->pool, P, sizeof *schedule->orders);
    schedule->shape = (s1f_shape){.num_ranks = shape->num_ranks,
                                  .num_stages = shape->num_stages,
                                  .num_microbatches = shape->num_microbatches,
                                  .num_segments = shape->num_segments,
                                  .rank_of_stage = rank_of_stage,
                                  .first_cell = shape->first_cell == NULL ? NULL : first_cell};
    s1f_status status = schedule->pool.is_short ? s1f_fail(S1F_ERR_MEMORY, "no memory for a schedule of %zu stages", S)
                                                : place(shape, rank_of_stage, holds_stage);
    if (status == S1F_OK && num_first > 0)
        memcpy(first_cell, shape->first_cell, num_first * sizeof *first_cell);
    if (status == S1F_OK && parents != NULL)
        status = set_parents(schedule, parents);
    if (status != S1F_OK)
        s1f_schedule_free(schedule);
    else
        *out = schedule;
    return status;
}

void s1f_schedule_free(s1f_schedule *schedule)
{
    if (schedule == NULL)
        return;
    for (int32_t rank = 0; schedule->orders != NULL && rank < schedule->shape.num_ranks; rank++)
        free(schedule->orders[rank].units);
    free(schedule->marks);
    s1f_trees_free(schedule->trees);
    s1f_pool_free(&schedule->pool);
    free(schedule);
}

s1f_status s1f_schedule_create_like(const s1f_schedule *schedule, s1f_schedule **out)
{
    const s1f_trees *trees = schedule->shape.trees;
    return s1f_schedule_create(&schedule->shape, trees == NULL ? NULL : trees->parent, out);
}

static s1f_status require_index(s1f_unit unit, const char *name, int32_t index, int32_t count)
{
    if (index >= 0 && index < count)
        return S1F_OK;
    char text[64];
    s1f_unit_text(unit, 1, text, sizeof text);
    return s1f_fail(S1F_ERR_ARG, "%s: %s %d must be in 0..%d", text, name, index, count - 1);
}

s1f_status s1f_schedule_append(s1f_schedule *schedule, s1f_unit unit)
{
    if (unit.pass < 0 || unit.pass >= s1f_num_passes)
        return s1f_fail(S1F_ERR_ARG, "pass is %d, must be in 0..%d", unit.pass, s1f_num_passes - 1);
    S1F_TRY(require_index(unit, "stage", unit.stage, schedule->shape.num_stages));
    S1F_TRY(require_index(unit, "micro-batch", unit.microbatch, schedule->shape.num_microbatches));
    S1F_TRY(require_index(unit, "segment", unit.segment, s1f_segments_of(&schedule->shape, unit.microbatch)));

    order *own = &schedule->orders[schedule->shape.rank_of_stage[unit.stage]];
    if (own->count == own->capacity) {
        int64_t capacity = own->capacity == 0 ? 64 : 2 * own->capacity;
        s1f_unit *units = realloc(own->units, (size_t)capacity * sizeof *units);
        if (units == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no memory for %lld units of one rank", (long long)capacity);
        own->units = units;
        own->capacity = capacity;
    }
    own->units[own->count++] = unit;
    schedule->passes |= 1u << unit.pass;
    if (atomic_load_explicit(&schedule->marks, memory_order_relaxed) != NULL)
        free(atomic_exchange(&schedule->marks, NULL));
    atomic_store_explicit(&schedule->is_checked, 0, memory_order_relaxed);
    return S1F_OK;
}

const s1f_unit *s1f_schedule_units(const s1f_schedule *schedule, int32_t rank, int64_t *num_units)
{
    *num_units = schedule->orders[rank].count;
    return schedule->orders[rank].units;
}

uint32_t s1f_schedule_passes(const s1f_schedule *schedule)
{
    return schedule->passes;
}

static int have_equal_trees(const s1f_schedule *a, const s1f_schedule *b)
{
    s1f_shape one = a->shape, other = b->shape;
    if (one.trees == NULL || other.trees == NULL)
        return one.trees == other.trees;
    size_t cells = (size_t)s1f_num_cells(&one), bytes = ((size_t)one.num_microbatches + 1) * sizeof *one.first_cell;
    return one.num_microbatches == other.num_microbatches && memcmp(one.first_cell, other.first_cell, bytes) == 0 &&
           memcmp(one.trees->parent, other.trees->parent, cells * sizeof *one.trees->parent) == 0;
}

int s1f_schedule_equal(const s1f_schedule *a, const s1f_schedule *b)
{
    int are_equal = a->shape.num_ranks == b->shape.num_ranks && have_equal_trees(a, b);
    for (int32_t rank = 0; are_equal && rank < a->shape.num_ranks; rank++) {
        const order *own = &a->orders[rank], *other = &b->orders[rank];
        are_equal = own->count == other->count &&
                    (own->count == 0 || memcmp(own->units, other->units, (size_t)own->count * sizeof *own->units) == 0);
    }
    return are_equal;
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

/* What units of a checked or unchecked order make of the optional products, for each cell of all stages, and how they
 * go through trees. */
static s1f_status find_marks(const s1f_schedule *schedule, const s1f_shape *shape, uint16_t **out)
{
    int64_t num_cells = shape->num_stages * s1f_num_cells(shape);
    uint16_t *found = calloc((size_t)num_cells, sizeof *found);
    if (found == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for what becomes of %lld units", (long long)num_cells);
    for (int32_t rank = 0; rank < schedule->shape.num_ranks; rank++)
        for (int64_t i = 0; i < schedule->orders[rank].count; i++) {
            s1f_unit unit = schedule->orders[rank].units[i];
            found[s1f_cell_of_all(shape, unit)] |= (uint16_t)(s1f_pass_products(unit.pass) & s1f_optional_products());
        }
    s1f_status status = S1F_OK;
    for (int32_t rank = 0; rank < schedule->shape.num_ranks && shape->trees != NULL && status == S1F_OK; rank++)
        status = s1f_trees_mark(shape, schedule->orders[rank].units, schedule->orders[rank].count, found);
    if (status == S1F_OK)
        *out = found;
    else
        free(found);
    return status;
}

s1f_status s1f_schedule_full_shape(const s1f_schedule *schedule, s1f_shape *out)
{
    s1f_shape shape = s1f_schedule_shape(schedule);
    if (shape.products & s1f_optional_products() || shape.trees != NULL) {
        _Atomic(uint16_t *) *kept =
            &((s1f_schedule *)schedule)->marks; /* kept in an order that is otherwise as it was */
        uint16_t *own = NULL, *found = atomic_load(kept);
        S1F_TRY(found == NULL ? find_marks(schedule, &shape, &own) : S1F_OK);
        if (own != NULL && !atomic_compare_exchange_strong(kept, &found, own))
            free(own); /* another thread was first */
        else if (own != NULL)
            found = own;
        shape.marks = found;
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
    for (int32_t rank = 0; rank < schedule->shape.num_ranks && status == S1F_OK; rank++)
        for (int64_t i = 0; i < schedule->orders[rank].count && status == S1F_OK; i++)
            if (s1f_pass_is_forward(schedule->orders[rank].units[i].pass))
                status = s1f_schedule_append(forward, schedule->orders[rank].units[i]);
    if (status != S1F_OK) {
        s1f_schedule_free(forward);
        return status;
    }
    *out = forward;
    return S1F_OK;
}
