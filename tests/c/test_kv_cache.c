/* test_kv_cache.c - the KV cache without torch: scratch, pages, and every allocation failing in turn. Values of rows,
 * units out of order and bytes: tests/attention/test_kv_cache.py. */
#include "check.h"
#include "run/kv_cache.h"

#include <pthread.h>
#include <stdlib.h>

enum { SEGMENTS = 3, TOKENS = 6, LAYERS = 40 };

static const int64_t sizes[SEGMENTS] = {3, 2, 1};
static const s1f_layer_shape shape = {.batch = 2, .kv_heads = 2, .head_dim = 5, .v_head_dim = 3, .dtype = S1F_FLOAT32};

static s1f_current_unit unit_at(s1f_kv_cache *cache, int32_t pass, int32_t microbatch, int32_t segment, int32_t slot)
{
    s1f_current_unit unit = {
        .unit = {pass, 0, microbatch, segment},
        .num_segments = SEGMENTS,
        .kv_slot = slot,
        .grad_slot = pass == S1F_PASS_FORWARD ? -1 : 0,
        .training = 1,
        .sequence_length = TOKENS,
        .length = sizes[segment],
        .cache = cache,
    };
    for (int32_t s = 0; s < segment; s++)
        unit.offset += sizes[s];
    unit.row = unit.offset;
    unit.parent = segment - 1;
    unit.num_children = segment + 1 < SEGMENTS;
    return unit;
}

static s1f_status begin_step(s1f_kv_cache *cache, int32_t kv_slots)
{
    s1f_stage_slots slots = {.stage = 0, .kv_slots = kv_slots, .grad_slots = 1};
    return s1f_kv_cache_begin_step(cache, &slots, 1, TOKENS, SEGMENTS);
}

/* Bytes of k and v of a layer's slot, which are those of dk and dv. */
static int64_t slot_bytes(void)
{
    int64_t elements = shape.batch * shape.kv_heads * TOKENS * (shape.head_dim + shape.v_head_dim);
    return elements * (int64_t)sizeof(float);
}

static s1f_status forward(s1f_kv_cache *cache, int32_t microbatch, int32_t segment, int32_t slot, int32_t layers)
{
    s1f_current_unit unit = unit_at(cache, S1F_PASS_FORWARD, microbatch, segment, slot);
    s1f_status status = s1f_kv_cache_begin_unit(cache, &unit);
    for (int64_t layer = 0; layer < layers && status == S1F_OK; layer++) {
        s1f_kv_rows rows;
        status = s1f_kv_cache_write(cache, &unit, layer, &shape, &rows);
    }
    if (status == S1F_OK)
        s1f_kv_cache_finish_unit(cache, &unit);
    return status;
}

static s1f_status backward(s1f_kv_cache *cache, int32_t microbatch, int32_t segment, int32_t slot, int32_t layers)
{
    s1f_current_unit unit = unit_at(cache, S1F_PASS_BACKWARD, microbatch, segment, slot);
    s1f_status status = s1f_kv_cache_begin_unit(cache, &unit);
    for (int64_t layer = layers - 1; layer >= 0 && status == S1F_OK; layer--) {
        s1f_layer_shape kept;
        s1f_kv_rows rows;
        s1f_kv_grads grads;
        status = s1f_kv_cache_read(cache, &unit, layer, &kept, &rows, &grads);
        if (status != S1F_OK)
            break;
        CHECK(grads.kept == (segment == SEGMENTS - 1 ? 0 : unit.offset + unit.length));
        CHECK(kept.batch == shape.batch && kept.v_head_dim == shape.v_head_dim && rows.docs == NULL);
    }
    if (status == S1F_OK)
        s1f_kv_cache_finish_unit(cache, &unit);
    return status;
}

/* Two micro-batches in flight, twice. */
static s1f_status run_steps(s1f_kv_cache *cache, int32_t layers)
{
    s1f_status status = S1F_OK;
    for (int step = 0; step < 2 && status == S1F_OK; step++) {
        status = begin_step(cache, 2);
        for (int32_t s = 0; s < SEGMENTS && status == S1F_OK; s++)
            for (int32_t m = 0; m < 2 && status == S1F_OK; m++)
                status = forward(cache, m, s, m, layers);
        for (int32_t m = 0; m < 2; m++)
            for (int32_t s = SEGMENTS - 1; s >= 0 && status == S1F_OK; s--)
                status = backward(cache, m, s, m, layers);
    }
    return status;
}

static void test_scratch(void)
{
    s1f_kv_cache *cache = NULL;
    void *small = NULL, *big = NULL, *again = NULL;
    CHECK_STATUS(s1f_kv_cache_create(&cache), S1F_OK, "");
    CHECK_STATUS(s1f_kv_cache_scratch(cache, 100, &small), S1F_OK, "");
    memset(small, 1, 100);
    CHECK_STATUS(s1f_kv_cache_scratch(cache, 100000, &big), S1F_OK, "");
    memset(big, 1, 100000);
    CHECK((uintptr_t)big % 64 == 0);
    (void)fail_allocation(0);
    CHECK_STATUS(s1f_kv_cache_scratch(cache, 99999, &again), S1F_OK, "");
    CHECK(again == big);
    CHECK_STATUS(s1f_kv_cache_scratch(cache, 100001, &again), S1F_ERR_MEMORY, "of 100001 bytes");
    (void)fail_allocation(-1);
    CHECK_STATUS(s1f_kv_cache_scratch(cache, 100, &again), S1F_OK, ""); /* the old one was given up before */
    memset(again, 1, 100);
    s1f_kv_cache_free(cache);
}

/* After a unit of a long sequence its scratch is the kernel's again, and zero when it is next touched. */
static void test_scratch_of_a_long_sequence(void)
{
    enum { BYTES = 65536, MIDDLE = BYTES / 2 };
    static const int64_t tokens[] = {8191, 8192};
    for (int i = 0; i < 2; i++) {
        s1f_kv_cache *cache = NULL;
        s1f_stage_slots slots = {.stage = 0, .kv_slots = 1, .grad_slots = 1};
        s1f_current_unit unit = unit_at(NULL, S1F_PASS_FORWARD, 0, 0, 0);
        unit.num_segments = 1;
        unit.num_children = 0;
        unit.length = unit.sequence_length = tokens[i];
        void *scratch = NULL;
        CHECK_STATUS(s1f_kv_cache_create(&cache), S1F_OK, "");
        CHECK_STATUS(s1f_kv_cache_begin_step(cache, &slots, 1, tokens[i], 1), S1F_OK, "");
        CHECK_STATUS(s1f_kv_cache_begin_unit(cache, &unit), S1F_OK, "");
        CHECK_STATUS(s1f_kv_cache_scratch(cache, BYTES, &scratch), S1F_OK, "");
        memset(scratch, 1, BYTES);
        s1f_kv_cache_finish_unit(cache, &unit);
        CHECK_STATUS(s1f_kv_cache_scratch(cache, BYTES, &scratch), S1F_OK, "");
        CHECK(((char *)scratch)[MIDDLE] == (tokens[i] < 8192));
        s1f_kv_cache_free(cache);
    }
}

/* Units of the second step find every slab. A step itself allocates its states. */
static void test_units_allocate_nothing_once_warm(void)
{
    s1f_kv_cache *cache = NULL;
    CHECK_STATUS(s1f_kv_cache_create(&cache), S1F_OK, "");
    CHECK_STATUS(run_steps(cache, LAYERS), S1F_OK, "");
    CHECK_STATUS(begin_step(cache, 1), S1F_OK, "");
    (void)fail_allocation(-1);
    for (int32_t s = 0; s < SEGMENTS; s++)
        CHECK_STATUS(forward(cache, 0, s, 0, LAYERS), S1F_OK, "");
    for (int32_t s = SEGMENTS - 1; s >= 0; s--)
        CHECK_STATUS(backward(cache, 0, s, 0, LAYERS), S1F_OK, "");
    CHECK(fail_allocation(-1) == 0);
    s1f_kv_cache_free(cache);
}

static void test_every_allocation_fails_in_turn(void)
{
    int64_t failures = 0;
    for (int64_t n = 0;; n++) {
        s1f_kv_cache *cache = NULL;
        fail_allocation(n);
        s1f_status status = s1f_kv_cache_create(&cache);
        if (status == S1F_OK)
            status = run_steps(cache, 20);
        int64_t asked = fail_allocation(-1);
        if (asked <= n) {
            CHECK(status == S1F_OK);
            s1f_kv_cache_free(cache);
            break;
        }
        failures++;
        CHECK_STATUS(status, S1F_ERR_MEMORY, "no memory for");
        if (cache != NULL) /* and the next step is as if nothing had happened */
            CHECK_STATUS(run_steps(cache, 20), S1F_OK, "");
        s1f_kv_cache_free(cache);
    }
    CHECK(failures > 100);
}

static void test_refusals(void)
{
    s1f_kv_cache *cache = NULL;
    CHECK_STATUS(s1f_kv_cache_create(&cache), S1F_OK, "");
    CHECK_STATUS(begin_step(cache, 1), S1F_OK, "");
    s1f_current_unit unit = unit_at(cache, S1F_PASS_FORWARD, 0, 0, 0);
    s1f_kv_rows rows;
    CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 0, &shape, &rows), S1F_ERR_STATE, "a unit that has not begun");
    CHECK_STATUS(s1f_kv_cache_begin_unit(cache, &unit), S1F_OK, "");
    s1f_layer_shape bad[3] = {shape, shape, shape};
    bad[0].batch = INT64_MAX / 4;
    bad[1].v_head_dim = INT64_MAX / 4;
    bad[2].v_head_dim = 0;
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 1, &bad[i], &rows), S1F_ERR_ARG, "not a size of a cache");
    CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 0, &shape, &rows), S1F_OK, "");
    s1f_layer_shape other[2] = {shape, shape};
    other[0].kv_heads = 1;
    other[1].v_head_dim = 5;
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 0, &other[i], &rows), S1F_ERR_ARG, "changed within a step");
    s1f_kv_cache_free(cache);
}

static int32_t device_slabs, device_has_room = 1;
static int64_t last_device;

static s1f_status device_allocate(int64_t device, int64_t bytes, void **data, void **owner)
{
    if (!device_has_room || (*owner = malloc((size_t)bytes)) == NULL)
        return S1F_ERR_MEMORY;
    *data = *owner;
    last_device = device;
    device_slabs++;
    return S1F_OK;
}

static void device_free(void *owner)
{
    free(owner);
    device_slabs--;
}

/* Slabs follow a layer from malloc's memory to a device and back, each freed where it came from. */
static void test_memory_of_a_device(void)
{
    static const s1f_slab_memory device = {device_allocate, device_free};
    s1f_layer_shape there = shape, moved;
    there.memory = &device;
    there.device = 7;
    moved = there;
    moved.device = 8;
    const s1f_layer_shape *const shapes[] = {&shape, &there, &there, &moved, &shape, &there};
    static const int32_t slabs[] = {0, 2, 2, 2, 0, 2};
    int64_t kv_bytes, other;
    s1f_current_unit unit = unit_at(NULL, S1F_PASS_FORWARD, 0, 0, 0);
    s1f_kv_cache *cache = NULL;
    s1f_kv_rows rows;
    CHECK_STATUS(s1f_kv_cache_create(&cache), S1F_OK, "");
    for (int i = 0; i < 6; i++) {
        CHECK_STATUS(begin_step(cache, 1), S1F_OK, "");
        CHECK_STATUS(s1f_kv_cache_begin_unit(cache, &unit), S1F_OK, "");
        CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 0, shapes[i], &rows), S1F_OK, "");
        memset(rows.k, 1, sizeof(float));
        s1f_kv_cache_bytes(cache, &kv_bytes, &other);
        CHECK(device_slabs == slabs[i] && kv_bytes == slot_bytes());
        CHECK(slabs[i] == 0 || last_device == shapes[i]->device);
    }
    CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 0, &moved, &rows), S1F_ERR_ARG, "moved to another device");
    device_has_room = 0;
    CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 1, &there, &rows), S1F_ERR_MEMORY, "no memory for a KV cache slab");
    device_has_room = 1;
    CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 1, &there, &rows), S1F_OK, "");
    s1f_kv_cache_free(cache);
    CHECK(device_slabs == 0);
}

/* A leaf between two live segments of a long slab: its pages go back, and theirs stay, where they share one too. */
static void test_rows_of_a_leaf_are_released(void)
{
    enum { LONG_ROWS = 8192, LEAF = 1000, BEGIN = 2001 };
    s1f_kv_cache *cache = NULL;
    s1f_stage_slots slots = {.stage = 0, .kv_slots = 1, .grad_slots = 1};
    static const int64_t rows_of[] = {0, BEGIN, BEGIN + LEAF}, sizes_of[] = {BEGIN, LEAF, LEAF};
    s1f_kv_rows rows;
    s1f_layer_shape one = {.batch = 1, .kv_heads = 1, .head_dim = 5, .v_head_dim = 3, .dtype = S1F_FLOAT32};
    CHECK_STATUS(s1f_kv_cache_create(&cache), S1F_OK, "");
    CHECK_STATUS(s1f_kv_cache_begin_step(cache, &slots, 1, LONG_ROWS, 3), S1F_OK, "");
    for (int32_t i = 0; i < 4; i++) { /* F0 F1 F2 B1 */
        int32_t s = i == 3 ? 1 : i;
        s1f_current_unit unit = {.unit = {i == 3 ? S1F_PASS_BACKWARD : S1F_PASS_FORWARD, 0, 0, s},
                                 .num_segments = 3,
                                 .parent = s == 0 ? -1 : 0,
                                 .num_children = s == 0 ? 2 : 0,
                                 .training = 1,
                                 .offset = s == 0 ? 0 : BEGIN,
                                 .length = sizes_of[s],
                                 .sequence_length = BEGIN + 2 * LEAF,
                                 .row = rows_of[s]};
        CHECK_STATUS(s1f_kv_cache_begin_unit(cache, &unit), S1F_OK, "");
        if (i < 3) {
            CHECK_STATUS(s1f_kv_cache_write(cache, &unit, 0, &one, &rows), S1F_OK, "");
            for (int64_t t = 5 * rows_of[s]; t < 5 * (rows_of[s] + sizes_of[s]); t++)
                ((float *)rows.k)[t] = 1;
        }
        s1f_kv_cache_finish_unit(cache, &unit);
    }
    const float *k = rows.k;
    CHECK(k[5 * BEGIN - 1] == 1 && k[5 * (BEGIN + LEAF / 2)] == 0);
    for (int64_t t = 5 * (BEGIN + LEAF); t < 5 * (BEGIN + 2 * LEAF); t++)
        if (k[t] != 1) {
            CHECK(!"rows behind the leaf stay");
            break;
        }
    s1f_kv_cache_free(cache);
}

static void *see_units(void *expected)
{
    const s1f_current_unit *unit = s1f_current_unit_get();
    CHECK(unit == expected);
    return NULL;
}

static void test_current_unit(void)
{
    s1f_current_unit mine = unit_at(NULL, S1F_PASS_FORWARD, 0, 0, 0), process = unit_at(NULL, 1, 1, 1, 0);
    CHECK(s1f_current_unit_get() == NULL);
    CHECK_STATUS(s1f_current_unit_set_process(&process), S1F_OK, "");
    CHECK_STATUS(s1f_current_unit_set_process(&process), S1F_OK, "");
    CHECK_STATUS(s1f_current_unit_set_process(&mine), S1F_ERR_STATE, "[0]F0.0 cannot start while [0]B1.1 runs");
    s1f_current_unit_set_thread(&mine);
    CHECK(s1f_current_unit_get() == &mine);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, see_units, &process) == 0); /* as autograd's threads do */
    CHECK(pthread_join(thread, NULL) == 0);
    s1f_current_unit_set_thread(NULL);
    CHECK(s1f_current_unit_get() == &process);
    CHECK_STATUS(s1f_current_unit_set_process(NULL), S1F_OK, "");
    CHECK(s1f_current_unit_get() == NULL);
}

int main(void)
{
    test_scratch();
    test_scratch_of_a_long_sequence();
    test_units_allocate_nothing_once_warm();
    test_every_allocation_fails_in_turn();
    test_refusals();
    test_memory_of_a_device();
    test_rows_of_a_leaf_are_released();
    test_current_unit();
    return check_failures();
}
