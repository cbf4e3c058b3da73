/* kv_cache.c - slabs found by (stage, layer), rows addressed by unit, order checked by serial numbers. */
#include "kv_cache.h"

#include "layer_keys.h"

#include <stdlib.h>
#include <string.h>

enum {
    /* Tokens of a sequence whose slabs give rows back, and the scratch all of it. Attention costs a row as many keys as
     * there are tokens, touching its memory again some page faults: 2 to 5 % of that here, and up to half of it at 2048
     * tokens. */
    RELEASE_TOKENS = 8192
};

typedef struct {
    int64_t serial; /* of the latest F, 0: none; see "States" in the header */
    int64_t offset, length;
} segment_state;

typedef struct {
    int32_t microbatch;          /* -1: none has taken the slot in this step */
    int32_t live;                /* a backward of `microbatch` is still to come */
    int32_t forwards, backwards; /* units finished */
    int32_t num_segments;        /* of the micro-batch */
    int64_t sequence_length;     /* tokens of it */
    int64_t tag;                 /* serial of the F of segment 0 that took the slot over */
    segment_state *segments;     /* [num_segments] */
} slot_state;

typedef struct {
    int64_t tag; /* of the slot_state whose gradients it takes, 0: free */
    int32_t microbatch;
} grad_slot_state;

typedef struct {
    int32_t stage, kv_slots, grad_slots;
    slot_state *slots;            /* [kv_slots] */
    grad_slot_state *grad_states; /* [grad_slots] */
} stage_state;

typedef struct {
    s1f_slab k, v, docs;
    int64_t *written; /* [num_segments] serial of the F that wrote the segment's rows */
    int32_t num_segments;
} layer_slot;

typedef struct {
    s1f_slab dk, dv;
    int64_t tag;          /* of the slot whose gradients it holds */
    int32_t last_segment; /* that contributed */
} layer_grads;

typedef struct {
    int32_t stage;
    int64_t layer;
    int64_t step; /* in which `shape` was fixed */
    s1f_layer_shape shape;
    layer_slot *slots;  /* [num_slots]; more than a step needs are kept for the next that does */
    layer_grads *grads; /* [num_grads] */
    int32_t num_slots, num_grads;
} layer_entry;

struct s1f_kv_cache {
    int64_t sequence_length;
    int64_t step, serial; /* counters; never reset, so no tag of the past is met again */
    int32_t num_segments;
    int32_t num_stages, num_entries, entry_capacity;
    stage_state *stages;
    layer_entry *entries;
    s1f_slab scratch;
    int64_t kv_bytes, grad_bytes, scratch_bytes;
};

/* -- memory ---------------------------------------------------------------------------------------------------- */

/* *array of `size` elements grows to `wanted`, new ones zero. */
static s1f_status grow_zeroed(void **array, int32_t *size, int32_t wanted, size_t element_bytes)
{
    if (wanted <= *size)
        return S1F_OK;
    char *grown = realloc(*array, (size_t)wanted * element_bytes);
    if (grown == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the states of a KV cache (%d elements)", (int)wanted);
    memset(grown + (size_t)*size * element_bytes, 0, (size_t)(wanted - *size) * element_bytes);
    *array = grown;
    *size = wanted;
    return S1F_OK;
}

static void free_stages(s1f_kv_cache *cache)
{
    for (int32_t i = 0; i < cache->num_stages; i++) {
        for (int32_t j = 0; cache->stages[i].slots != NULL && j < cache->stages[i].kv_slots; j++)
            free(cache->stages[i].slots[j].segments);
        free(cache->stages[i].slots);
        free(cache->stages[i].grad_states);
    }
    free(cache->stages);
    cache->stages = NULL;
    cache->num_stages = 0;
}

s1f_status s1f_kv_cache_create(s1f_kv_cache **out)
{
    s1f_kv_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for a KV cache");
    *out = cache;
    return S1F_OK;
}

void s1f_kv_cache_free(s1f_kv_cache *cache)
{
    if (cache == NULL)
        return;
    for (int32_t i = 0; i < cache->num_entries; i++) {
        layer_entry *entry = &cache->entries[i];
        for (int32_t j = 0; j < entry->num_slots; j++) {
            s1f_slab_free(&entry->slots[j].k);
            s1f_slab_free(&entry->slots[j].v);
            s1f_slab_free(&entry->slots[j].docs);
            free(entry->slots[j].written);
        }
        for (int32_t j = 0; j < entry->num_grads; j++) {
            s1f_slab_free(&entry->grads[j].dk);
            s1f_slab_free(&entry->grads[j].dv);
        }
        free(entry->slots);
        free(entry->grads);
    }
    free(cache->entries);
    s1f_slab_free(&cache->scratch);
    free_stages(cache);
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

int s1f_kv_cache_layer(const s1f_kv_cache *cache, int32_t index, int32_t *stage, int64_t *layer, s1f_layer_shape *shape)
{
    for (int32_t i = 0; i < cache->num_entries; i++) {
        const layer_entry *entry = &cache->entries[i];
        if (entry->step != cache->step || index-- > 0)
            continue;
        *stage = entry->stage;
        *layer = entry->layer;
        *shape = entry->shape;
        return 1;
    }
    return 0;
}

/* -- step and unit --------------------------------------------------------------------------------------------- */

static s1f_status make_stage(stage_state *stage, const s1f_stage_slots *wanted, int32_t num_segments)
{
    stage->kv_slots = wanted->kv_slots;
    stage->slots = calloc((size_t)wanted->kv_slots, sizeof *stage->slots);
    stage->grad_states = calloc((size_t)wanted->grad_slots + 1, sizeof *stage->grad_states);
    if (stage->slots == NULL || stage->grad_states == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d KV cache slots and %d of gradients", (int)wanted->kv_slots,
                        (int)wanted->grad_slots);
    stage->stage = wanted->stage;
    stage->grad_slots = wanted->grad_slots;
    for (int32_t j = 0; j < wanted->kv_slots; j++) {
        stage->slots[j].microbatch = -1;
        stage->slots[j].segments = calloc((size_t)num_segments, sizeof *stage->slots[j].segments);
        if (stage->slots[j].segments == NULL)
            return s1f_fail(S1F_ERR_MEMORY, "no memory for the states of %d segments", (int)num_segments);
    }
    return S1F_OK;
}

s1f_status s1f_kv_cache_begin_step(s1f_kv_cache *cache, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t sequence_length, int32_t num_segments)
{
    if (num_stages < 1 || num_segments < 1 || sequence_length < num_segments)
        return s1f_fail(S1F_ERR_ARG,
                        "a KV cache needs at least 1 stage, 1 segment and 1 token per segment: %d stages, %d segments, "
                        "%lld tokens",
                        (int)num_stages, (int)num_segments, (long long)sequence_length);
    for (int32_t i = 0; i < num_stages; i++) {
        if (stages[i].kv_slots < 1 || stages[i].grad_slots < 0)
            return s1f_fail(S1F_ERR_ARG, "stage %d: kv_slots is %d, must be at least 1; grad_slots is %d, at least 0",
                            (int)stages[i].stage, (int)stages[i].kv_slots, (int)stages[i].grad_slots);
        for (int32_t j = 0; j < i; j++)
            if (stages[j].stage == stages[i].stage)
                return s1f_fail(S1F_ERR_ARG, "stage %d is named twice", (int)stages[i].stage);
    }
    free_stages(cache);
    cache->stages = calloc((size_t)num_stages, sizeof *cache->stages);
    if (cache->stages == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d stages", (int)num_stages);
    cache->num_stages = num_stages;
    for (int32_t i = 0; i < num_stages; i++) {
        s1f_status status = make_stage(&cache->stages[i], &stages[i], num_segments);
        if (status != S1F_OK) {
            free_stages(cache);
            return status;
        }
    }
    cache->sequence_length = sequence_length;
    cache->num_segments = num_segments;
    cache->step++;
    return S1F_OK;
}

typedef struct {
    char text[64];
} unit_name;

static unit_name name_of(const s1f_current_unit *unit)
{
    unit_name name;
    s1f_unit_text(unit->unit, 1, name.text, sizeof name.text);
    return name;
}

static int is_forward(const s1f_current_unit *unit)
{
    return s1f_pass_makes(unit->unit.pass, S1F_PRODUCT_OUTPUT);
}

/* Whether the unit adds to the slab of dK and dV. */
static int goes_back(const s1f_current_unit *unit)
{
    return s1f_pass_makes(unit->unit.pass, S1F_PRODUCT_INPUT_GRADIENT);
}

static stage_state *find_stage(s1f_kv_cache *cache, int32_t stage)
{
    for (int32_t i = 0; i < cache->num_stages; i++)
        if (cache->stages[i].stage == stage)
            return &cache->stages[i];
    return NULL;
}

static int holds(const slot_state *slot, const s1f_current_unit *unit)
{
    return slot->live && slot->microbatch == unit->unit.microbatch;
}

/* The slots a unit names, after checking that the unit fits the step; *grads is NULL in F and R. */
static s1f_status find_slots(s1f_kv_cache *cache, const s1f_current_unit *unit, slot_state **out,
                             grad_slot_state **grads)
{
    const stage_state *stage = find_stage(cache, unit->unit.stage);
    if (stage == NULL)
        return s1f_fail(S1F_ERR_ARG, "%s: the step has no stage %d", name_of(unit).text, (int)unit->unit.stage);
    if (unit->kv_slot < 0 || unit->kv_slot >= stage->kv_slots)
        return s1f_fail(S1F_ERR_ARG, "%s: KV slot is %d, stage %d has %d", name_of(unit).text, (int)unit->kv_slot,
                        (int)stage->stage, (int)stage->kv_slots);
    if (goes_back(unit) && (unit->grad_slot < 0 || unit->grad_slot >= stage->grad_slots))
        return s1f_fail(S1F_ERR_ARG, "%s: gradient slot is %d, stage %d has %d", name_of(unit).text,
                        (int)unit->grad_slot, (int)stage->stage, (int)stage->grad_slots);
    if (unit->num_segments > cache->num_segments || unit->sequence_length > cache->sequence_length)
        return s1f_fail(S1F_ERR_ARG, "%s: %d segments of %lld tokens, the step has %d of %lld", name_of(unit).text,
                        (int)unit->num_segments, (long long)unit->sequence_length, (int)cache->num_segments,
                        (long long)cache->sequence_length);
    if (unit->unit.segment < 0 || unit->unit.segment >= unit->num_segments || unit->unit.microbatch < 0)
        return s1f_fail(S1F_ERR_ARG, "%s: the micro-batch has %d segments", name_of(unit).text,
                        (int)unit->num_segments);
    if (unit->offset < 0 || unit->length < 1 || unit->length > unit->sequence_length - unit->offset)
        return s1f_fail(S1F_ERR_ARG, "%s: tokens [%lld, %lld) do not lie in a sequence of %lld", name_of(unit).text,
                        (long long)unit->offset, (long long)(unit->offset + unit->length),
                        (long long)unit->sequence_length);
    const slot_state *slot = &stage->slots[unit->kv_slot];
    int takes = is_forward(unit) && unit->unit.segment == 0;
    if (!takes && holds(slot, unit) &&
        (unit->num_segments != slot->num_segments || unit->sequence_length != slot->sequence_length))
        return s1f_fail(S1F_ERR_ARG, "%s: %d segments of %lld tokens, segment 0 had %d of %lld", name_of(unit).text,
                        (int)unit->num_segments, (long long)unit->sequence_length, (int)slot->num_segments,
                        (long long)slot->sequence_length);
    *out = &stage->slots[unit->kv_slot];
    *grads = goes_back(unit) ? &stage->grad_states[unit->grad_slot] : NULL;
    return S1F_OK;
}

static s1f_status begin_forward(s1f_kv_cache *cache, const s1f_current_unit *unit, slot_state *slot)
{
    int32_t s = unit->unit.segment;
    if (s == 0) {
        if (slot->live && slot->microbatch != unit->unit.microbatch)
            return s1f_fail(S1F_ERR_STATE, "%s: KV slot %d is still held by micro-batch %d", name_of(unit).text,
                            (int)unit->kv_slot, (int)slot->microbatch);
        segment_state *segments = slot->segments;
        memset(segments, 0, (size_t)cache->num_segments * sizeof *segments);
        *slot = (slot_state){.microbatch = unit->unit.microbatch,
                             .live = 1,
                             .num_segments = unit->num_segments,
                             .sequence_length = unit->sequence_length,
                             .tag = cache->serial + 1,
                             .segments = segments};
    }
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    if (slot->forwards != s)
        return s1f_fail(S1F_ERR_STATE, "%s: forward of segment %d out of order, segment %d is next", name_of(unit).text,
                        (int)s, (int)slot->forwards);
    int64_t expected = s == 0 ? 0 : slot->segments[s - 1].offset + slot->segments[s - 1].length;
    if (unit->offset != expected)
        return s1f_fail(S1F_ERR_ARG, "%s: segment starts at token %lld, the one before it ends at %lld",
                        name_of(unit).text, (long long)unit->offset, (long long)expected);
    slot->segments[s] = (segment_state){++cache->serial, unit->offset, unit->length};
    return S1F_OK;
}

/* A unit after its F is of the same tokens. */
static s1f_status check_tokens(const s1f_current_unit *unit, const segment_state *segment)
{
    if (unit->offset == segment->offset && unit->length == segment->length)
        return S1F_OK;
    return s1f_fail(S1F_ERR_ARG, "%s: tokens [%lld, %lld), its forward had [%lld, %lld)", name_of(unit).text,
                    (long long)unit->offset, (long long)(unit->offset + unit->length), (long long)segment->offset,
                    (long long)(segment->offset + segment->length));
}

/* Between F and B of its segment. */
static int may_recompute(const slot_state *slot, int32_t segment)
{
    return slot->forwards > segment && slot->backwards < slot->num_segments - segment;
}

static s1f_status begin_recomputation(const s1f_current_unit *unit, const slot_state *slot)
{
    int32_t s = unit->unit.segment;
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    if (!may_recompute(slot, s))
        return s1f_fail(S1F_ERR_STATE, "%s: segment %d is recomputed %s", name_of(unit).text, (int)s,
                        slot->forwards > s ? "after its backward" : "before its forward");
    return check_tokens(unit, &slot->segments[s]);
}

static s1f_status begin_backward(const s1f_current_unit *unit, slot_state *slot, grad_slot_state *grads)
{
    int32_t s = unit->unit.segment, next = slot->num_segments - 1 - slot->backwards;
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    if (slot->forwards != slot->num_segments)
        return s1f_fail(S1F_ERR_STATE, "%s: backward before the forward of segment %d", name_of(unit).text,
                        (int)slot->forwards);
    if (s != next)
        return s1f_fail(S1F_ERR_STATE,
                        "%s: backward of segment %d out of order, segment %d is next (gradients return last segment "
                        "first)",
                        name_of(unit).text, (int)s, (int)next);
    S1F_TRY(check_tokens(unit, &slot->segments[s]));
    if (grads->tag != 0 && grads->tag != slot->tag)
        return s1f_fail(S1F_ERR_STATE, "%s: gradient slot %d is still held by micro-batch %d", name_of(unit).text,
                        (int)unit->grad_slot, (int)grads->microbatch);
    if (grads->tag == 0 && slot->backwards > 0)
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold gradient slot %d", name_of(unit).text,
                        (int)slot->microbatch, (int)unit->grad_slot);
    *grads = (grad_slot_state){slot->tag, slot->microbatch};
    return S1F_OK;
}

s1f_status s1f_kv_cache_begin_unit(s1f_kv_cache *cache, const s1f_current_unit *unit)
{
    if (unit->kv_slot < 0) /* the unit uses no cache */
        return S1F_OK;
    slot_state *slot = NULL;
    grad_slot_state *grads = NULL;
    S1F_TRY(find_slots(cache, unit, &slot, &grads));
    return is_forward(unit)  ? begin_forward(cache, unit, slot)
           : goes_back(unit) ? begin_backward(unit, slot, grads)
                             : begin_recomputation(unit, slot);
}

static int gives_back(const s1f_kv_cache *cache)
{
    return cache->sequence_length >= RELEASE_TOKENS;
}

/* After B(m.s) nothing reads K, V, dK and dV of segment s any more. */
static void release_segment(const s1f_kv_cache *cache, const s1f_current_unit *unit)
{
    if (!gives_back(cache))
        return;
    for (int32_t i = 0; i < cache->num_entries; i++) {
        const layer_entry *entry = &cache->entries[i];
        const s1f_layer_shape *shape = &entry->shape;
        if (entry->stage != unit->unit.stage || entry->step != cache->step || shape->memory != NULL)
            continue;
        int64_t strips = shape->batch * shape->kv_heads, end = unit->offset + unit->length;
        int64_t element = s1f_dtype_bytes(shape->dtype), sum = s1f_dtype_bytes(s1f_dtype_of_sums(shape->dtype));
        int64_t row_bytes[] = {shape->head_dim * element, shape->v_head_dim * element, shape->head_dim * sum,
                               shape->v_head_dim * sum};
        const s1f_slab *slabs[] = {NULL, NULL, NULL, NULL};
        if (unit->kv_slot < entry->num_slots) {
            slabs[0] = &entry->slots[unit->kv_slot].k;
            slabs[1] = &entry->slots[unit->kv_slot].v;
        }
        if (unit->grad_slot >= 0 && unit->grad_slot < entry->num_grads) {
            slabs[2] = &entry->grads[unit->grad_slot].dk;
            slabs[3] = &entry->grads[unit->grad_slot].dv;
        }
        for (int32_t j = 0; j < 4; j++)
            if (slabs[j] != NULL)
                s1f_slab_release_rows(slabs[j], strips, cache->sequence_length * row_bytes[j],
                                      unit->offset * row_bytes[j], end * row_bytes[j]);
    }
}

s1f_status s1f_kv_cache_finish_unit(s1f_kv_cache *cache, const s1f_current_unit *unit)
{
    if (unit->kv_slot < 0) /* the unit uses no cache */
        return S1F_OK;
    slot_state *slot = NULL;
    grad_slot_state *grads = NULL;
    S1F_TRY(find_slots(cache, unit, &slot, &grads));
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: finished without having begun", name_of(unit).text);
    if (gives_back(cache))
        s1f_slab_release_rows(&cache->scratch, 1, cache->scratch.bytes, 0, cache->scratch.bytes);
    if (is_forward(unit)) {
        slot->forwards = unit->unit.segment + 1;
        slot->live = unit->training || slot->forwards < slot->num_segments;
    } else if (goes_back(unit)) {
        release_segment(cache, unit);
        slot->backwards = slot->num_segments - unit->unit.segment;
        slot->live = slot->backwards < slot->num_segments;
        if (!slot->live)
            *grads = (grad_slot_state){0, 0};
    }
    return S1F_OK;
}

/* -- layers ---------------------------------------------------------------------------------------------------- */

static layer_entry *find_entry(s1f_kv_cache *cache, int32_t stage, int64_t layer)
{
    for (int32_t i = 0; i < cache->num_entries; i++)
        if (cache->entries[i].layer == layer && cache->entries[i].stage == stage)
            return &cache->entries[i];
    return NULL;
}

static s1f_status find_or_add_entry(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer, layer_entry **out)
{
    *out = find_entry(cache, unit->unit.stage, layer);
    if (*out != NULL)
        return S1F_OK;
    if (!s1f_layer_is_registered(layer))
        return s1f_fail(S1F_ERR_ARG, "%s: layer key %lld is not registered; make it with seq1f1b.layer_handle",
                        name_of(unit).text, (long long)layer);
    if (cache->num_entries == cache->entry_capacity) {
        int32_t wanted = cache->entry_capacity > 0 ? 2 * cache->entry_capacity : 16;
        void *entries = cache->entries;
        S1F_TRY(grow_zeroed(&entries, &cache->entry_capacity, wanted, sizeof *cache->entries));
        cache->entries = entries;
    }
    *out = &cache->entries[cache->num_entries++];
    **out = (layer_entry){.stage = unit->unit.stage, .layer = layer};
    return S1F_OK;
}

/* Elements of k or of v, by their head size. */
static int64_t element_count(const s1f_kv_cache *cache, const s1f_layer_shape *shape, int64_t head_dim)
{
    int64_t count = 0; /* 0 where it does not fit: no slab has room for that */
    if (__builtin_mul_overflow(shape->batch, shape->kv_heads, &count) ||
        __builtin_mul_overflow(count, cache->sequence_length, &count) ||
        __builtin_mul_overflow(count, head_dim, &count) || count > INT64_MAX / 16)
        return 0;
    return count;
}

/* Fixes the layer's shape at its first use in a step, and compares with it afterwards. */
static s1f_status fix_shape(s1f_kv_cache *cache, const s1f_current_unit *unit, layer_entry *entry,
                            const s1f_layer_shape *shape)
{
    if (shape->batch < 1 || shape->kv_heads < 1 || shape->head_dim < 1 || shape->v_head_dim < 1 ||
        element_count(cache, shape, shape->head_dim) == 0 || element_count(cache, shape, shape->v_head_dim) == 0)
        return s1f_fail(S1F_ERR_ARG,
                        "%s: layer %lld has a batch of %lld, %lld kv heads of %lld, values of %lld: not a size of a "
                        "cache",
                        name_of(unit).text, (long long)entry->layer, (long long)shape->batch,
                        (long long)shape->kv_heads, (long long)shape->head_dim, (long long)shape->v_head_dim);
    if (entry->step != cache->step) {
        entry->step = cache->step;
        entry->shape = *shape;
        return S1F_OK;
    }
    const s1f_layer_shape *fixed = &entry->shape;
    if (fixed->batch == shape->batch && fixed->kv_heads == shape->kv_heads && fixed->head_dim == shape->head_dim &&
        fixed->v_head_dim == shape->v_head_dim && fixed->dtype == shape->dtype &&
        fixed->with_docs == shape->with_docs && fixed->memory == shape->memory && fixed->device == shape->device)
        return S1F_OK;
    if (fixed->memory != shape->memory || fixed->device != shape->device)
        return s1f_fail(S1F_ERR_ARG, "%s: layer %lld moved to another device within a step", name_of(unit).text,
                        (long long)entry->layer);
    return s1f_fail(S1F_ERR_ARG,
                    "%s: layer %lld changed within a step: batch %lld, %lld kv heads of %lld, values of %lld, %s, %s "
                    "document ids; its first use had %lld, %lld of %lld, %lld, %s, %s",
                    name_of(unit).text, (long long)entry->layer, (long long)shape->batch, (long long)shape->kv_heads,
                    (long long)shape->head_dim, (long long)shape->v_head_dim, s1f_dtype_name(shape->dtype),
                    shape->with_docs ? "with" : "without", (long long)fixed->batch, (long long)fixed->kv_heads,
                    (long long)fixed->head_dim, (long long)fixed->v_head_dim, s1f_dtype_name(fixed->dtype),
                    fixed->with_docs ? "with" : "without");
}

/* In the memory that the layer's shape names. */
static s1f_status reserve(const layer_entry *entry, s1f_slab *slab, int64_t bytes, int64_t *total)
{
    return s1f_slab_reserve(slab, bytes, entry->shape.memory, entry->shape.device, total);
}

/* k and v, or dk and dv, of such elements. */
static s1f_status reserve_pair(const s1f_kv_cache *cache, const layer_entry *entry, s1f_slab *k, s1f_slab *v,
                               int32_t dtype, int64_t *total)
{
    const s1f_layer_shape *shape = &entry->shape;
    int64_t bytes = s1f_dtype_bytes(dtype);
    S1F_TRY(reserve(entry, k, element_count(cache, shape, shape->head_dim) * bytes, total));
    return reserve(entry, v, element_count(cache, shape, shape->v_head_dim) * bytes, total);
}

static s1f_status reserve_slot(s1f_kv_cache *cache, layer_entry *entry, int32_t index, layer_slot **out)
{
    void *slots = entry->slots;
    S1F_TRY(grow_zeroed(&slots, &entry->num_slots, index + 1, sizeof *entry->slots));
    entry->slots = slots;
    layer_slot *slot = &entry->slots[index];
    void *written = slot->written;
    s1f_status status = grow_zeroed(&written, &slot->num_segments, cache->num_segments, sizeof *slot->written);
    slot->written = written;
    S1F_TRY(status);
    S1F_TRY(reserve_pair(cache, entry, &slot->k, &slot->v, entry->shape.dtype, &cache->kv_bytes));
    *out = slot;
    int64_t doc_bytes = entry->shape.batch * cache->sequence_length * (int64_t)sizeof(int32_t);
    return entry->shape.with_docs ? reserve(entry, &slot->docs, doc_bytes, &cache->kv_bytes) : S1F_OK;
}

static s1f_status reserve_grads(s1f_kv_cache *cache, layer_entry *entry, int32_t index, layer_grads **out)
{
    void *grads = entry->grads;
    S1F_TRY(grow_zeroed(&grads, &entry->num_grads, index + 1, sizeof *entry->grads));
    entry->grads = grads;
    *out = &entry->grads[index];
    return reserve_pair(cache, entry, &(*out)->dk, &(*out)->dv, s1f_dtype_of_sums(entry->shape.dtype),
                        &cache->grad_bytes);
}

/* Every segment before `end` must have been written by the micro-batch that holds the slot. */
static s1f_status check_written(const s1f_current_unit *unit, const layer_entry *entry, const layer_slot *slot,
                                const slot_state *state, int32_t end)
{
    for (int32_t s = 0; s < end; s++)
        if (s >= slot->num_segments || slot->written[s] != state->segments[s].serial)
            return s1f_fail(S1F_ERR_STATE,
                            "%s: layer %lld reads segment %d of micro-batch %d, which was never written (the layer was "
                            "not used in its forward)",
                            name_of(unit).text, (long long)entry->layer, (int)s, (int)state->microbatch);
    return S1F_OK;
}

static s1f_kv_rows rows_of(const s1f_kv_cache *cache, const layer_entry *entry, const layer_slot *slot, int is_written)
{
    return (s1f_kv_rows){slot->k.data, slot->v.data, entry->shape.with_docs ? slot->docs.data : NULL,
                         cache->sequence_length, is_written};
}

/* The state of the slot during the unit; the unit must have begun. */
static s1f_status running_slot(s1f_kv_cache *cache, const s1f_current_unit *unit, slot_state **out)
{
    grad_slot_state *grads = NULL;
    S1F_TRY(find_slots(cache, unit, out, &grads));
    const slot_state *state = *out;
    int32_t s = unit->unit.segment;
    int begun = is_forward(unit) ? state->segments[s].serial != 0 && state->forwards == s
                : goes_back(unit)
                    ? state->forwards == state->num_segments && state->backwards == state->num_segments - 1 - s
                    : may_recompute(state, s);
    if (!holds(state, unit) || !begun)
        return s1f_fail(S1F_ERR_STATE, "%s: attention runs in a unit that has not begun", name_of(unit).text);
    return S1F_OK;
}

s1f_status s1f_kv_cache_write(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer,
                              const s1f_layer_shape *shape, s1f_kv_rows *rows)
{
    slot_state *state = NULL;
    layer_entry *entry = NULL;
    layer_slot *slot = NULL;
    S1F_TRY(running_slot(cache, unit, &state));
    S1F_TRY(find_or_add_entry(cache, unit, layer, &entry));
    S1F_TRY(fix_shape(cache, unit, entry, shape));
    S1F_TRY(reserve_slot(cache, entry, unit->kv_slot, &slot));
    S1F_TRY(check_written(unit, entry, slot, state, unit->unit.segment + (is_forward(unit) ? 0 : 1)));
    int32_t s = unit->unit.segment;
    if (is_forward(unit) && slot->written[s] == state->segments[s].serial)
        return s1f_fail(S1F_ERR_STATE,
                        "%s: layer %lld is used twice in one forward, its second use would overwrite the keys and "
                        "values of micro-batch %d, segment %d; give each use its own layer_handle(index)",
                        name_of(unit).text, (long long)layer, (int)unit->unit.microbatch, (int)s);
    slot->written[s] = state->segments[s].serial;
    *rows = rows_of(cache, entry, slot, !is_forward(unit));
    return S1F_OK;
}

s1f_status s1f_kv_cache_read(s1f_kv_cache *cache, const s1f_current_unit *unit, int64_t layer, s1f_layer_shape *shape,
                             s1f_kv_rows *rows, s1f_kv_grads *grads)
{
    if (!goes_back(unit))
        return s1f_fail(S1F_ERR_STATE, "%s: backward of layer %lld within a forward unit", name_of(unit).text,
                        (long long)layer);
    slot_state *state = NULL;
    S1F_TRY(running_slot(cache, unit, &state));
    layer_entry *entry = find_entry(cache, unit->unit.stage, layer);
    if (entry == NULL || entry->step != cache->step || entry->num_slots <= unit->kv_slot)
        return s1f_fail(S1F_ERR_STATE,
                        "%s: backward of layer %lld, which was not used in the forward of micro-batch %d",
                        name_of(unit).text, (long long)layer, (int)unit->unit.microbatch);
    const layer_slot *slot = &entry->slots[unit->kv_slot];
    layer_grads *contribution = NULL;
    int32_t s = unit->unit.segment;
    S1F_TRY(check_written(unit, entry, slot, state, s + 1));
    S1F_TRY(reserve_grads(cache, entry, unit->grad_slot, &contribution));
    int first = contribution->tag != state->tag;
    if (!first && contribution->last_segment <= s)
        return s1f_fail(
            S1F_ERR_STATE,
            "%s: second backward of layer %lld, micro-batch %d, segment %d: its gradients were added already",
            name_of(unit).text, (long long)layer, (int)unit->unit.microbatch, (int)s);
    contribution->tag = state->tag;
    contribution->last_segment = s;
    *shape = entry->shape;
    *rows = rows_of(cache, entry, slot, 1);
    *grads = (s1f_kv_grads){contribution->dk.data, contribution->dv.data, first};
    return S1F_OK;
}
