/* kv_slots.c - the order of units in a slot, checked by serial numbers. */
#include "kv_slots.h"

#include <string.h>

enum { NO_PASS = -1 };

void s1f_kv_slots_free(s1f_kv_slots *slots)
{
    s1f_pool_free(&slots->pool);
    slots->pool = (s1f_pool){0};
    slots->stages = NULL;
}

static void make_stage(s1f_pool *pool, const s1f_stage_slots *wanted, int32_t num_segments, s1f_stage_state *stage)
{
    stage->stage = wanted->stage;
    stage->slots = s1f_pool_take(pool, (size_t)wanted->kv_slots, sizeof *stage->slots);
    stage->grad_states = s1f_pool_take(pool, (size_t)wanted->grad_slots, sizeof *stage->grad_states);
    for (int32_t j = 0; !pool->is_short && j < wanted->kv_slots; j++) {
        stage->slots[j].microbatch = -1;
        stage->slots[j].segments = s1f_pool_take(pool, (size_t)num_segments, sizeof *stage->slots[j].segments);
    }
}

s1f_status s1f_kv_slots_begin_step(s1f_kv_slots *slots, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t num_rows, int32_t num_segments)
{
    s1f_kv_slots_free(slots);
    slots->stages = s1f_pool_take(&slots->pool, (size_t)num_stages, sizeof *slots->stages);
    for (int32_t i = 0; !slots->pool.is_short && i < num_stages; i++)
        make_stage(&slots->pool, &stages[i], num_segments, &slots->stages[i]);
    if (slots->pool.is_short) {
        s1f_kv_slots_free(slots);
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the KV cache slots of %d stages", (int)num_stages);
    }
    slots->running.pass = NO_PASS;
    slots->num_rows = num_rows;
    slots->num_segments = num_segments;
    return S1F_OK;
}

s1f_unit_name s1f_name_of(const s1f_current_unit *unit)
{
    s1f_unit_name name;
    s1f_unit_text(unit->unit, 1, name.text, sizeof name.text);
    return name;
}

static int holds(const s1f_slot_state *slot, const s1f_current_unit *unit)
{
    return slot->live && slot->microbatch == unit->unit.microbatch;
}

static s1f_stage_state *stage_of(const s1f_kv_slots *slots, const s1f_current_unit *unit)
{
    s1f_stage_state *stage = slots->stages;
    while (stage->stage != unit->unit.stage)
        stage++;
    return stage;
}

/* The parent of a unit has run forward, and not back. */
static s1f_status check_parent(const s1f_current_unit *unit, const s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment, parent = unit->parent;
    if (slot->segments[s].is_forward)
        return s1f_fail(S1F_ERR_STATE, "%s: second forward of segment %d", s1f_name_of(unit).text, (int)s);
    if (parent >= 0 && !slot->segments[parent].is_forward)
        return s1f_fail(S1F_ERR_STATE, "%s: forward of segment %d before that of segment %d, which it follows",
                        s1f_name_of(unit).text, (int)s, (int)parent);
    if (parent >= 0 && slot->segments[parent].is_back)
        return s1f_fail(S1F_ERR_STATE, "%s: forward of segment %d after the backward of segment %d, which it follows",
                        s1f_name_of(unit).text, (int)s, (int)parent);
    return S1F_OK;
}

static s1f_status begin_forward(s1f_kv_slots *slots, const s1f_current_unit *unit, s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment;
    if (s == 0) {
        if (slot->live && slot->microbatch != unit->unit.microbatch)
            return s1f_fail(S1F_ERR_STATE, "%s: KV slot %d is still held by micro-batch %d", s1f_name_of(unit).text,
                            (int)unit->kv_slot, (int)slot->microbatch);
        s1f_segment_state *segments = slot->segments;
        memset(segments, 0, (size_t)slots->num_segments * sizeof *segments);
        *slot = (s1f_slot_state){.microbatch = unit->unit.microbatch, .live = 1, .segments = segments};
    }
    slot->is_tree |=
        unit->parent != s - 1 || unit->num_children != (s + 1 < unit->num_segments) || unit->row != unit->offset;
    S1F_TRY(check_parent(unit, slot));
    slot->segments[s] = (s1f_segment_state){.serial = ++slots->serial,
                                            .offset = unit->offset,
                                            .length = unit->length,
                                            .parent = unit->parent,
                                            .num_children = unit->num_children};
    return S1F_OK;
}

/* Between F and B of its segment. */
static s1f_status begin_recomputation(const s1f_current_unit *unit, const s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment;
    if (slot->segments[s].is_forward && !slot->segments[s].is_back)
        return S1F_OK;
    return s1f_fail(S1F_ERR_STATE, "%s: segment %d is recomputed %s", s1f_name_of(unit).text, (int)s,
                    slot->segments[s].is_forward ? "after its backward" : "before its forward");
}

/* The segment's F is done, and so are the backwards of its children. */
static s1f_status check_children(const s1f_current_unit *unit, const s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment;
    const s1f_segment_state *state = &slot->segments[s];
    if (!state->is_forward)
        return s1f_fail(S1F_ERR_STATE, "%s: backward before the forward of segment %d", s1f_name_of(unit).text, (int)s);
    if (state->is_back)
        return s1f_fail(S1F_ERR_STATE, "%s: second backward of segment %d", s1f_name_of(unit).text, (int)s);
    if (state->num_children_back == state->num_children)
        return S1F_OK;
    return s1f_fail(S1F_ERR_STATE,
                    "%s: backward of segment %d, which %d segments follow, after the backward of %d of them (a segment "
                    "goes back after those that follow it)",
                    s1f_name_of(unit).text, (int)s, (int)state->num_children, (int)state->num_children_back);
}

static s1f_status begin_backward(const s1f_current_unit *unit, s1f_slot_state *slot, s1f_grad_slot_state *grads)
{
    S1F_TRY(check_children(unit, slot));
    if (grads->tag != 0 && grads->tag != slot->segments[0].serial)
        return s1f_fail(S1F_ERR_STATE, "%s: gradient slot %d is still held by micro-batch %d", s1f_name_of(unit).text,
                        (int)unit->grad_slot, (int)grads->microbatch);
    if (grads->tag == 0 && slot->backwards > 0)
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold gradient slot %d", s1f_name_of(unit).text,
                        (int)slot->microbatch, (int)unit->grad_slot);
    *grads = (s1f_grad_slot_state){slot->segments[0].serial, slot->microbatch};
    return S1F_OK;
}

s1f_status s1f_kv_slots_begin_unit(s1f_kv_slots *slots, const s1f_current_unit *unit)
{
    s1f_stage_state *stage = stage_of(slots, unit);
    s1f_slot_state *slot = &stage->slots[unit->kv_slot];
    if (!(s1f_is_forward(unit) && unit->unit.segment == 0) && !holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", s1f_name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    S1F_TRY(s1f_is_forward(unit)  ? begin_forward(slots, unit, slot)
            : s1f_goes_back(unit) ? begin_backward(unit, slot, &stage->grad_states[unit->grad_slot])
                                  : begin_recomputation(unit, slot));
    slots->running = unit->unit;
    return S1F_OK;
}

int32_t s1f_kv_slots_finish_unit(s1f_kv_slots *slots, const s1f_current_unit *unit)
{
    s1f_stage_state *stage = stage_of(slots, unit);
    s1f_slot_state *slot = &stage->slots[unit->kv_slot];
    s1f_segment_state *segment = &slot->segments[unit->unit.segment];
    slots->running.pass = NO_PASS;
    if (s1f_is_forward(unit)) {
        segment->is_forward = 1;
        slot->forwards++;
        slot->live = unit->training || slot->forwards < unit->num_segments;
    } else if (s1f_goes_back(unit)) {
        segment->is_back = 1;
        if (segment->parent >= 0)
            slot->segments[segment->parent].num_children_back++;
        slot->backwards++;
        slot->live = slot->backwards < unit->num_segments;
        if (!slot->live)
            stage->grad_states[unit->grad_slot] = (s1f_grad_slot_state){0, 0};
    }
    return slot->is_tree;
}

s1f_status s1f_kv_slots_running(s1f_kv_slots *slots, const s1f_current_unit *unit, s1f_slot_state **out)
{
    if (unit->kv_slot < 0)
        return s1f_fail(S1F_ERR_STATE, "%s: attention runs in a unit that has no keys and values",
                        s1f_name_of(unit).text);
    if (memcmp(&slots->running, &unit->unit, sizeof slots->running) != 0)
        return s1f_fail(S1F_ERR_STATE, "%s: attention runs in a unit that has not begun", s1f_name_of(unit).text);
    *out = &stage_of(slots, unit)->slots[unit->kv_slot];
    return S1F_OK;
}
