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
    int32_t num_ranks, num_stages, num_microbatches, num_segments;
    int32_t *rank_of_stage;    /* [num_stages] */
    int64_t *first_cell;       /* of the shape */
    s1f_trees *trees;          /* the same */
    order *orders;             /* [num_ranks] */
    uint32_t passes;           /* bits of those that occur */
    _Atomic(uint16_t *) marks; /* of the shape, once somebody has asked; readers may be several */
    _Atomic(int) is_checked;   /* it has passed its rules as it stands */
};

static s1f_status require_at_least_one(const char *name, int32_t value)
{
    if (value < 1)
        return s1f_fail(S1F_ERR_ARG, "%s is %d, must be at least 1", name, value);
    return S1F_OK;
}

static s1f_status check_placement(int32_t num_ranks, int32_t num_stages, const int32_t *rank_of_stage)
{
    if (num_stages < num_ranks)
        return s1f_fail(S1F_ERR_ARG, "num_stages is %d, must be at least num_ranks, %d: every rank holds a stage",
                        num_stages, num_ranks);
    unsigned char *holds_stage = calloc((size_t)num_ranks, 1);
    if (holds_stage == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the placement of %d stages", num_stages);
    s1f_status status = S1F_OK;
    for (int32_t stage = 0; stage < num_stages && status == S1F_OK; stage++) {
        int32_t rank = rank_of_stage[stage];
        if (rank < 0 || rank >= num_ranks)
            status =
                s1f_fail(S1F_ERR_ARG, "stage %d is placed on rank %d, must be in 0..%d", stage, rank, num_ranks - 1);
        else
            holds_stage[rank] = 1;
    }
    for (int32_t rank = 0; rank < num_ranks && status == S1F_OK; rank++)
        if (!holds_stage[rank])
            status = s1f_fail(S1F_ERR_ARG, "rank %d holds no stage", rank);
    free(holds_stage);
    return status;
}

s1f_status s1f_schedule_create(int32_t num_ranks, int32_t num_stages, int32_t num_microbatches, int32_t num_segments,
                               const int32_t *rank_of_stage, s1f_schedule **out)
{
    s1f_status status;
    if ((status = require_at_least_one("num_ranks", num_ranks)) != S1F_OK ||
        (status = require_at_least_one("num_stages", num_stages)) != S1F_OK ||
        (status = require_at_least_one("num_microbatches", num_microbatches)) != S1F_OK ||
        (status = require_at_least_one("num_segments", num_segments)) != S1F_OK)
        return status;
    if ((int64_t)num_microbatches * num_segments > S1F_MAX_FORWARD_UNITS / num_stages)
        return s1f_fail(S1F_ERR_ARG, "%d stages x %d micro-batches x %d segments are more than %d units", num_stages,
                        num_microbatches, num_segments, (int)S1F_MAX_FORWARD_UNITS);
    if ((status = check_placement(num_ranks, num_stages, rank_of_stage)) != S1F_OK)
        return status;

    s1f_schedule *schedule = calloc(1, sizeof *schedule);
    if (schedule == NULL)
        goto no_memory;
    schedule->rank_of_stage = malloc((size_t)num_stages * sizeof *schedule->rank_of_stage);
    schedule->orders = calloc((size_t)num_ranks, sizeof *schedule->orders);
    if (schedule->rank_of_stage == NULL || schedule->orders == NULL)
        goto no_memory;
    schedule->num_ranks = num_ranks;
    schedule->num_stages = num_stages;
    schedule->num_microbatches = num_microbatches;
    schedule->num_segments = num_segments;
    memcpy(schedule->rank_of_stage, rank_of_stage, (size_t)num_stages * sizeof *rank_of_stage);
    *out = schedule;
    return S1F_OK;

no_memory:
    s1f_schedule_free(schedule);
    return s1f_fail(S1F_ERR_MEMORY, "no memory for a schedule of %d ranks and %d stages", num_ranks, num_stages);
}

void s1f_schedule_free(s1f_schedule *schedule)
{
    if (schedule == NULL)
        return;
    if (schedule->orders != NULL)
        for (int32_t rank = 0; rank < schedule->num_ranks; rank++)
            free(schedule->orders[rank].units);
    free(schedule->orders);
    free(schedule->marks);
    s1f_trees_free(schedule->trees);
    free(schedule->first_cell);
    free(schedule->rank_of_stage);
    free(schedule);
}

s1f_status s1f_schedule_set_rows(s1f_schedule *schedule, const int32_t *segments_of)
{
    int32_t most = 0;
    for (int32_t m = 0; m < schedule->num_microbatches; m++) {
        if (segments_of[m] < 1)
            return s1f_fail(S1F_ERR_ARG, "num_segments of micro-batch %d is %d, must be at least 1", (int)m,
                            (int)segments_of[m]);
        most = segments_of[m] > most ? segments_of[m] : most;
    }
    if (most != schedule->num_segments)
        return s1f_fail(S1F_ERR_ARG, "the most segments of a micro-batch are %d, num_segments is %d", (int)most,
                        (int)schedule->num_segments);
    if (schedule->passes != 0 || schedule->first_cell != NULL)
        return s1f_fail(S1F_ERR_STATE, "micro-batches get their segments before any unit does");
    int64_t *first_cell = malloc(((size_t)schedule->num_microbatches + 1) * sizeof *first_cell);
    if (first_cell == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d micro-batches", (int)schedule->num_microbatches);
    first_cell[0] = 0;
    for (int32_t m = 0; m < schedule->num_microbatches; m++)
        first_cell[m + 1] = first_cell[m] + segments_of[m];
    schedule->first_cell = first_cell;
    return S1F_OK;
}

s1f_status s1f_schedule_set_parents(s1f_schedule *schedule, const int32_t *parents)
{
    if (schedule->passes != 0 || schedule->first_cell == NULL || schedule->trees != NULL)
        return s1f_fail(S1F_ERR_STATE, "segments get their parents once, after their numbers and before any unit");
    s1f_shape shape = s1f_schedule_shape(schedule);
    s1f_trees *trees = NULL;
    S1F_TRY(s1f_trees_create(&shape, parents, &trees));
    int is_tree = 0; /* chains alone are the order that they are without parents */
    for (int64_t cell = 0; cell < s1f_num_cells(&shape); cell++)
        is_tree |= parents[cell] != s1f_unit_of_cell(&shape, S1F_PASS_FORWARD, 0, cell).segment - 1;
    if (is_tree)
        schedule->trees = trees;
    else
        s1f_trees_free(trees);
    return S1F_OK;
}

s1f_status s1f_schedule_create_like(const s1f_schedule *schedule, s1f_schedule **out)
{
    s1f_schedule *like = NULL;
    s1f_status status = s1f_schedule_create(schedule->num_ranks, schedule->num_stages, schedule->num_microbatches,
                                            schedule->num_segments, schedule->rank_of_stage, &like);
    size_t bytes = ((size_t)schedule->num_microbatches + 1) * sizeof *schedule->first_cell;
    if (status == S1F_OK && schedule->first_cell != NULL) {
        if ((like->first_cell = malloc(bytes)) != NULL)
            memcpy(like->first_cell, schedule->first_cell, bytes);
        else
            status = s1f_fail(S1F_ERR_MEMORY, "no memory for %d micro-batches", (int)schedule->num_microbatches);
    }
    if (status == S1F_OK && schedule->trees != NULL)
        status = s1f_schedule_set_parents(like, schedule->trees->parent);
    if (status != S1F_OK) {
        s1f_schedule_free(like);
        return status;
    }
    *out = like;
    return S1F_OK;
}

static s1f_status require_index(s1f_unit unit, const char *name, int32_t index, int32_t count)
{
    if (index >= 0 && index < count)
        return S1F_OK;
    char text[64];
    s1f_unit_text(unit, 1, text, sizeof text);
    return s1f_fail(S1F_ERR_ARG, "%s: %s %d must be in 0..%d", text, name, index, count - 1);
}

static int32_t segments_of(const s1f_schedule *schedule, int32_t microbatch)
{
    const int64_t *first = schedule->first_cell;
    return first == NULL ? schedule->num_segments : (int32_t)(first[microbatch + 1] - first[microbatch]);
}

s1f_status s1f_schedule_append(s1f_schedule *schedule, s1f_unit unit)
{
    if (unit.pass < 0 || unit.pass >= s1f_num_passes)
        return s1f_fail(S1F_ERR_ARG, "pass is %d, must be in 0..%d", unit.pass, s1f_num_passes - 1);
    S1F_TRY(require_index(unit, "stage", unit.stage, schedule->num_stages));
    S1F_TRY(require_index(unit, "micro-batch", unit.microbatch, schedule->num_microbatches));
    S1F_TRY(require_index(unit, "segment", unit.segment, segments_of(schedule, unit.microbatch)));

    order *own = &schedule->orders[schedule->rank_of_stage[unit.stage]];
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
    s1f_shape one = s1f_schedule_shape(a), other = s1f_schedule_shape(b);
    if (one.trees == NULL || other.trees == NULL)
        return one.trees == other.trees;
    size_t cells = (size_t)s1f_num_cells(&one), bytes = ((size_t)one.num_microbatches + 1) * sizeof *one.first_cell;
    return one.num_microbatches == other.num_microbatches && memcmp(one.first_cell, other.first_cell, bytes) == 0 &&
           memcmp(one.trees->parent, other.trees->parent, cells * sizeof *one.trees->parent) == 0;
}

int s1f_schedule_equal(const s1f_schedule *a, const s1f_schedule *b)
{
    int are_equal = a->num_ranks == b->num_ranks && have_equal_trees(a, b);
    for (int32_t rank = 0; are_equal && rank < a->num_ranks; rank++) {
        const order *own = &a->orders[rank], *other = &b->orders[rank];
        are_equal = own->count == other->count &&
                    (own->count == 0 || memcmp(own->units, other->units, (size_t)own->count * sizeof *own->units) == 0);
    }
    return are_equal;
}

/* A step of a hash: every bit of both changes about half of the result's [MurmurHash3, finalizer]. */
static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) + 0x9e3779b97f4a7c15u; /* else zeros would stay zeros */
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdu;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
    return hash ^ hash >> 33;
}

uint64_t s1f_schedule_digest(const s1f_schedule *schedule)
{
    uint64_t hash = mix(0, (uint64_t)schedule->num_ranks);
    for (int32_t rank = 0; rank < schedule->num_ranks; rank++) {
        const order *own = &schedule->orders[rank];
        hash = mix(hash, (uint64_t)own->count);
        for (const s1f_unit *unit = own->units; unit != own->units + own->count; unit++) {
            hash = mix(hash, (uint64_t)unit->pass << 32 | (uint32_t)unit->stage);
            hash = mix(hash, (uint64_t)unit->microbatch << 32 | (uint32_t)unit->segment);
        }
    }
    for (int64_t cell = 0; schedule->trees != NULL && cell < schedule->first_cell[schedule->num_microbatches]; cell++)
        hash = mix(hash, (uint32_t)schedule->trees->parent[cell]);
    return hash;
}

s1f_shape s1f_schedule_shape(const s1f_schedule *schedule)
{
    return (s1f_shape){
        .num_ranks = schedule->num_ranks,
        .num_stages = schedule->num_stages,
        .num_microbatches = schedule->num_microbatches,
        .num_segments = schedule->num_segments,
        .products = s1f_products_of_passes(schedule->passes),
        .rank_of_stage = schedule->rank_of_stage,
        .first_cell = schedule->first_cell,
        .trees = schedule->trees,
    };
}

/* What units of a checked or unchecked order make of the optional products, for each cell of all stages, and how they
 * go through trees. */
static s1f_status find_marks(const s1f_schedule *schedule, const s1f_shape *shape, uint16_t **out)
{
    int64_t num_cells = shape->num_stages * s1f_num_cells(shape);
    uint16_t *found = calloc((size_t)num_cells, sizeof *found);
    if (found == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for what becomes of %lld units", (long long)num_cells);
    for (int32_t rank = 0; rank < schedule->num_ranks; rank++)
        for (int64_t i = 0; i < schedule->orders[rank].count; i++) {
            s1f_unit unit = schedule->orders[rank].units[i];
            found[s1f_cell_of_all(shape, unit)] |= (uint16_t)(s1f_pass_products(unit.pass) & s1f_optional_products());
        }
    s1f_status status = S1F_OK;
    for (int32_t rank = 0; rank < schedule->num_ranks && shape->trees != NULL && status == S1F_OK; rank++)
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
    for (int32_t stage = 0; stage < schedule->num_stages; stage++)
        if (schedule->rank_of_stage[stage] != stage)
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
    for (int32_t rank = 0; rank < schedule->num_ranks && status == S1F_OK; rank++)
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
