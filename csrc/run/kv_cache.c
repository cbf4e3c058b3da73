/* kv_cache.c - slabs found by (stage, layer), rows addressed by unit. */
#include "kv_cache.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    /* Tokens of a sequence whose slabs give rows back, and the scratch all of it. Attention costs a row as many keys as
     * there are tokens, touching its memory again some page faults: 2 to 5 % of that here, and up to half of it at 2048
     * tokens. */
    RELEASE_TOKENS = 8192
};

typedef struct {                  /* serials of Fs */
    int64_t written, contributed; /* of the segment that the rows hold; whose own gradients were added, in dK and dV */
} segment_rows;

typedef struct { /* K and V, or dK and dV */
    s1f_slab k, v, docs;
    segment_rows *segments; /* [num_segments] */
    int64_t num_segments;
} layer_slot;

typedef struct {       /* more than a step needs are kept for the next that does */
    layer_slot *slots; /* [count] */
    int64_t count;
} slot_table;

typedef struct {
    int32_t stage;
    int64_t layer;
    int64_t step; /* in which `shape` was fixed */
    s1f_layer_shape shape;
    slot_table kv, grads;
} layer_entry;

struct s1f_kv_cache {
    s1f_kv_slots slots;
    int64_t step; /* a counter; never reset */
    int64_t num_entries;
    layer_entry *entries;
    s1f_slab scratch;
    int64_t kv_bytes, grad_bytes, scratch_bytes;
};

/* -- memory ---------------------------------------------------------------------------------------------------- */

s1f_status s1f_kv_cache_create(s1f_kv_cache **out)
{
    s1f_kv_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a KV cache");
    *out = cache;
    return S1F_OK;
}

static void free_table(slot_table *table)
{
    for (int64_t i = 0; i < table->count; i++) {
        s1f_slab_free(&table->slots[i].k);
        s1f_slab_free(&table->slots[i].v);
        s1f_slab_free(&table->slots[i].docs);
        free(table->slots[i].segments);
    }
    free(table->slots);
}

void s1f_kv_cache_free(s1f_kv_cache *cache)
{
    if (cache == NULL)
        return;
    for (int64_t i = 0; i < cache->num_entries; i++) {
        free_table(&cache->entries[i].kv);
        free_table(&cache->entries[i].grads);
    }
    free(cache->entries);
    s1f_slab_free(&cache->scratch);
    s1f_kv_slots_free(&cache->slots);
    free(cache);
}

s1f_status s1f_kv_cache_scratch(s1f_kv_cache *cache, int64_t bytes, void **out)
{
    s1f_status status = s1f_slab_reserve(&cache->scratch, bytes, NULL, 0, &cache->scratch_bytes);
    if (status == S1F_OK)
        *out = cache->scratch.data;
    return status;
}

void s1f_kv_cache_bytes(const s1f_kv_cache *cache, int64_t *kv_bytes, int64_t *grad_bytes)
{
    *kv_bytes = cache->kv_bytes;
    *grad_bytes = cache->grad_bytes;
}

int s1f_kv_cache_layer(const s1f_kv_cache *cache, int32_t index, int32_t *stage, s1f_layer_shape *shape)
{
    for (int64_t i = 0; i < cache->num_entries; i++) {
        const layer_entry *entry = &cache->entries[i];
        if (entry->step != cache->step || index-- > 0)
            continue;
        *stage = entry->stage;
        *shape = entry->shape;
        return 1;
    }
    return 0;
}

/* -- step and unit --------------------------------------------------------------------------------------------- */

static void release_rows(const s1f_kv_cache *cache, const s1f_layer_shape *shape, const slot_table *table,
                         const s1f_current_unit *unit, int32_t index, int64_t element_bytes, int is_tree)
{
    if (index < 0 || index >= table->count)
        return;
    const s1f_slab *slabs[] = {&table->slots[index].k, &table->slots[index].v};
    int64_t strips = shape->batch * shape->kv_heads;
    int64_t row_bytes[] = {shape->head_dim * element_bytes, shape->v_head_dim * element_bytes};
    for (int32_t i = 0; i < 2; i++)
        if (slabs[i]->bytes >= strips * cache->slots.num_rows * row_bytes[i]) /* else the layer has skipped the unit */
            s1f_slab_release_rows(slabs[i], strips, cache->slots.num_rows * row_bytes[i], unit->row * row_bytes[i],
                                  (unit->row + unit->length) * row_bytes[i], is_tree);
}

/* After B(m.s) nothing reads K, V, dK and dV of segment s any more. Nothing reads the rows behind it, either, but in a
 * tree, where other segments may lie there. */
static void release_segment(const s1f_kv_cache *cache, const s1f_current_unit *unit, int is_tree)
{
    for (int64_t i = 0; i < cache->num_entries; i++) {
        const layer_entry *entry = &cache->entries[i];
        const s1f_layer_shape *shape = &entry->shape;
        if (entry->stage != unit->unit.stage || entry->step != cache->step || shape->memory != NULL)
            continue;
        release_rows(cache, shape, &entry->kv, unit, unit->kv_slot, s1f_dtype_bytes(shape->dtype), is_tree);
        release_rows(cache, shape, &entry->grads, unit, unit->grad_slot,
                     s1f_dtype_bytes(s1f_dtype_of_sums(shape->dtype)), is_tree);
    }
}

s1f_status s1f_kv_cache_begin_step(s1f_kv_cache *cache, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t num_rows, int32_t num_segments)
{
    S1F_TRY(s1f_kv_slots_begin_step(&cache->slots, stages, num_stages, num_rows, num_segments));
    cache->step++;
    return S1F_OK;
}

s1f_status s1f_kv_cache_begin_unit(s1f_kv_cache *cache, const s1f_current_unit *unit)
{
    return unit->kv_slot < 0 ? S1F_OK : s1f_kv_slots_begin_unit(&cache->slots, unit); /* below 0: it uses no cache */
}

void s1f_kv_cache_finish_unit(s1f_kv_cache *cache, const s1f_current_unit *unit)
{
    if (unit->kv_slot < 0)
        return;
    int32_t is_tree = s1f_kv_slots_finish_unit(&cache->slots, unit);
    if (cache->slots.num_rows < RELEASE_TOKENS)
        return;
    s1f_slab_release_rows(&cache->scratch, 1, cache->scratch.bytes, 0, cache->scratch.bytes, 0);
    if (s1f_goes_back(unit))
        release_segment(cache, unit, is_tree);
}

/* -- layers ---------------------------------------------------------------------------------------------------- */

static layer_entry *find_entry(s1f_kv_cache *cache, int32_t stage, int64_t layer)
{
    for (int64_t i = 0; i < cache->num_entries; i++)
        if (cache->entries[i].layer == layer && cache->entries[i].stage == stage)
            return &cache->entries[i];
    return NULL;
}

static s1f_status find_or_add_entry(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer, layer_entry **out)
{
    *out = find_entry(cache, unit->unit.stage, layer);
    if (*out != NULL)
        return S1F_OK;
    S1F_TRY(s1f_array_grow(&cache->entries, &cache->num_entries, cache->num_entries + 1, sizeof *cache->entries,
                           "layers of a KV cache"));
    *out = &cache->entries[cache->num_entries - 1];
    (*out)->stage = unit->unit.stage;
    (*out)->layer = layer;
    return S1F_OK;
}

/* Elements of k or of v, by their head size. */
static int64_t element_count(const s1f_kv_cache *cache, const s1f_layer_shape *shape, int64_t head_dim)
{
    int64_t count = 0; /* 0 where it does not fit: no slab has room for that */
    if (__builtin_mul_overflow(shape->batch, shape->kv_heads, &count) ||
        __builtin_mul_overflow(count, cache->slots.num_rows, &count) ||
        __builtin_mul_overflow(count, head_dim, &count) || count > INT64_MAX / 16)
        return 0;
    return count;
}

typedef struct {
    char text[200];
} shape_name;

static shape_name name_of(const s1f_layer_shape *shape)
{
    shape_name name;
    snprintf(name.text, sizeof name.text, "a batch of %lld, %lld kv heads of %lld, values of %lld, %s, %s document ids",
             (long long)shape->batch, (long long)shape->kv_heads, (long long)shape->head_dim,
             (long long)shape->v_head_dim, s1f_dtype_name(shape->dtype), shape->with_docs ? "with" : "without");
    return name;
}

/* Fixes the layer's shape at its first use in a step, and compares with it afterwards. */
static s1f_status fix_shape(s1f_kv_cache *cache, const s1f_current_unit *unit, layer_entry *entry,
                            const s1f_layer_shape *shape)
{
    if (shape->batch < 1 || shape->kv_heads < 1 || shape->head_dim < 1 || shape->v_head_dim < 1 ||
        element_count(cache, shape, shape->head_dim) == 0 || element_count(cache, shape, shape->v_head_dim) == 0)
        return s1f_fail(S1F_ERR_ARG, "%s: layer %lld has %s: not a size of a cache", s1f_name_of(unit).text,
                        (long long)entry->layer, name_of(shape).text);
    if (entry->step != cache->step) {
        entry->step = cache->step;
        entry->shape = *shape;
        return S1F_OK;
    }
    const s1f_layer_shape *fixed = &entry->shape;
    if (fixed->memory != shape->memory || fixed->device != shape->device)
        return s1f_fail(S1F_ERR_ARG, "%s: layer %lld moved to another device within a step", s1f_name_of(unit).text,
                        (long long)entry->layer);
    if (fixed->batch == shape->batch && fixed->kv_heads == shape->kv_heads && fixed->head_dim == shape->head_dim &&
        fixed->v_head_dim == shape->v_head_dim && fixed->dtype == shape->dtype && fixed->with_docs == shape->with_docs)
        return S1F_OK;
    return s1f_fail(S1F_ERR_ARG, "%s: layer %lld changed within a step: it has %s; its first use had %s",
                    s1f_name_of(unit).text, (long long)entry->layer, name_of(shape).text, name_of(fixed).text);
}

/* In the memory that the layer's shape names. */
static s1f_status reserve(const layer_entry *entry, s1f_slab *slab, int64_t bytes, int64_t *total)
{
    return s1f_slab_reserve(slab, bytes, entry->shape.memory, entry->shape.device, total);
}

/* A slot of a layer's table, for elements of this type. */
static s1f_status reserve_slot(s1f_kv_cache *cache, const layer_entry *entry, slot_table *table, int32_t index,
                               int32_t dtype, int64_t *total, layer_slot **out)
{
    S1F_TRY(s1f_array_grow(&table->slots, &table->count, index + 1, sizeof *table->slots, "slots of a KV cache"));
    layer_slot *slot = *out = &table->slots[index];
    S1F_TRY(s1f_array_grow(&slot->segments, &slot->num_segments, cache->slots.num_segments, sizeof *slot->segments,
                           "segments of a KV cache"));
    const s1f_layer_shape *shape = &entry->shape;
    int64_t bytes = s1f_dtype_bytes(dtype);
    S1F_TRY(reserve(entry, &slot->k, element_count(cache, shape, shape->head_dim) * bytes, total));
    return reserve(entry, &slot->v, element_count(cache, shape, shape->v_head_dim) * bytes, total);
}

/* The segments of a path, from `last` (-1: none) back to the first, must have been written by the micro-batch that
 * holds the slot. */
static s1f_status check_written(const s1f_current_unit *unit, const layer_entry *entry, const layer_slot *slot,
                                const s1f_slot_state *state, int32_t last)
{
    int32_t missing = -1;
    for (int32_t s = last; s >= 0; s = state->segments[s].parent)
        if (s >= slot->num_segments || slot->segments[s].written != state->segments[s].serial)
            missing = s;
    if (missing < 0)
        return S1F_OK;
    return s1f_fail(S1F_ERR_STATE,
                    "%s: layer %lld reads segment %d of micro-batch %d, which was never written (the layer was "
                    "not used in its forward)",
                    s1f_name_of(unit).text, (long long)entry->layer, (int)missing, (int)state->microbatch);
}

/* The unit's contribution to the rows of its path: how many keys of it hold gradients already. Behind it all do. */
static int64_t contribute(layer_slot *grads, const s1f_slot_state *state, int32_t segment)
{
    int64_t kept = 0;
    grads->segments[segment].contributed = state->segments[segment].serial;
    for (int32_t s = segment; s >= 0; s = state->segments[s].parent) {
        const s1f_segment_state *of_path = &state->segments[s];
        if (grads->segments[s].written == of_path->serial) { /* then those before it are stored, too */
            kept = of_path->offset + of_path->length;
            break;
        }
        grads->segments[s].written = of_path->serial;
    }
    return kept;
}

static s1f_kv_rows rows_of(const s1f_kv_cache *cache, const layer_entry *entry, const layer_slot *slot, int is_written)
{
    return (s1f_kv_rows){slot->k.data, slot->v.data, entry->shape.with_docs ? slot->docs.data : NULL,
                         cache->slots.num_rows, is_written};
}

s1f_status s1f_kv_cache_write(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer,
                              const s1f_layer_shape *shape, s1f_kv_rows *rows)
{
    s1f_slot_state *state = NULL;
    layer_entry *entry = NULL;
    layer_slot *slot = NULL;
    S1F_TRY(s1f_kv_slots_running(&cache->slots, unit, &state));
    S1F_TRY(find_or_add_entry(cache, unit, layer, &entry));
    S1F_TRY(fix_shape(cache, unit, entry, shape));
    S1F_TRY(reserve_slot(cache, entry, &entry->kv, unit->kv_slot, shape->dtype, &cache->kv_bytes, &slot));
    if (shape->with_docs)
        S1F_TRY(reserve(entry, &slot->docs, shape->batch * cache->slots.num_rows * (int64_t)sizeof(int32_t),
                        &cache->kv_bytes));
    S1F_TRY(check_written(unit, entry, slot, state, s1f_is_forward(unit) ? unit->parent : unit->unit.segment));
    int32_t s = unit->unit.segment;
    if (s1f_is_forward(unit) && slot->segments[s].written == state->segments[s].serial)
        return s1f_fail(S1F_ERR_STATE,
                        "%s: layer %lld is used twice in one forward, its second use would overwrite the keys and "
                        "values of micro-batch %d, segment %d; give each use its own layer_handle(index)",
                        s1f_name_of(unit).text, (long long)layer, (int)unit->unit.microbatch, (int)s);
    slot->segments[s].written = state->segments[s].serial;
    *rows = rows_of(cache, entry, slot, !s1f_is_forward(unit));
    return S1F_OK;
}

s1f_status s1f_kv_cache_read(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer, s1f_layer_shape *shape,
                             s1f_kv_rows *rows, s1f_kv_grads *grads)
{
    if (!s1f_goes_back(unit))
        return s1f_fail(S1F_ERR_STATE, "%s: backward of layer %lld within a forward unit", s1f_name_of(unit).text,
                        (long long)layer);
    s1f_slot_state *state = NULL;
    S1F_TRY(s1f_kv_slots_running(&cache->slots, unit, &state));
    layer_entry *entry = find_entry(cache, unit->unit.stage, layer);
    if (entry == NULL || entry->step != cache->step || entry->kv.count <= unit->kv_slot)
        return s1f_fail(S1F_ERR_STATE,
                        "%s: backward of layer %lld, which was not used in the forward of micro-batch %d",
                        s1f_name_of(unit).text, (long long)layer, (int)unit->unit.microbatch);
    const layer_slot *slot = &entry->kv.slots[unit->kv_slot];
    layer_slot *sums = NULL;
    int32_t s = unit->unit.segment;
    S1F_TRY(check_written(unit, entry, slot, state, s));
    S1F_TRY(reserve_slot(cache, entry, &entry->grads, unit->grad_slot, s1f_dtype_of_sums(entry->shape.dtype),
                         &cache->grad_bytes, &sums));
    if (sums->segments[s].contributed == state->segments[s].serial)
        return s1f_fail(
            S1F_ERR_STATE,
            "%s: second backward of layer %lld, micro-batch %d, segment %d: its gradients were added already",
            s1f_name_of(unit).text, (long long)layer, (int)unit->unit.microbatch, (int)s);
    *shape = entry->shape;
    *rows = rows_of(cache, entry, slot, 1);
    *grads = (s1f_kv_grads){sums->k.data, sums->v.data, contribute(sums, state, s)};
    return S1F_OK;
}
