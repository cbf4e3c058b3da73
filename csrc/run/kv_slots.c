/* kv_slots.c - the order of units in a slot, checked by serial numbers. */
#include "kv_slots.h"

#include <stdlib.h>
#include <string.h>

void s1f_kv_slots_free(s1f_kv_slots *slots)
{
    for (int32_t i = 0; i < slots->num_stages; i++) {
        for (int32_t j = 0; slots->stages[i].slots != NULL && j < slots->stages[i].kv_slots; j++)
            free(slots->stages[i].slots[j].segments);
        free(slots->stages[i].slots);
        free(slots->stages[i].grad_states);
    }
    free(slots->stages);
    slots->stages = NULL;
    slots->num_stages = 0;
}

static s1f_status make_stage(s1f_stage_state *stage, const s1f_stage_slots *wanted, int32_t num_segments)
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

s1f_status s1f_kv_slots_begin_step(s1f_kv_slots *slots, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t sequence_length, int64_t num_rows, int32_t num_segments)
{
    if (num_stages < 1 || num_segments < 1 || sequence_length < num_segments || num_rows < 1)
        return s1f_fail(S1F_ERR_ARG,
                        "a KV cache needs at least 1 stage, 1 segment, 1 token per segment and 1 row: %d stages, %d "
                        "segments, %lld tokens, %lld rows",
                        (int)num_stages, (int)num_segments, (long long)sequence_length, (long long)num_rows);
    for (int32_t i = 0; i < num_stages; i++) {
        if (stages[i].kv_slots < 1 || stages[i].grad_slots < 0)
            return s1f_fail(S1F_ERR_ARG, "stage %d: kv_slots is %d, must be at least 1; grad_slots is %d, at least 0",
                            (int)stages[i].stage, (int)stages[i].kv_slots, (int)stages[i].grad_slots);
        for (int32_t j = 0; j < i; j++)
            if (stages[j].stage == stages[i].stage)
                return s1f_fail(S1F_ERR_ARG, "stage %d is named twice", (int)stages[i].stage);
    }
    s1f_kv_slots_free(slots);
    slots->stages = calloc((size_t)num_stages, sizeof *slots->stages);
    if (slots->stages == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory for %d stages", (int)num_stages);
    slots->num_stages = num_stages;
    for (int32_t i = 0; i < num_stages; i++) {
        s1f_status status = make_stage(&slots->stages[i], &stages[i], num_segments);
        if (status != S1F_OK) {
            s1f_kv_slots_free(slots);
            return status;
        }
    }
    slots->sequence_length = sequence_length;
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

static s1f_stage_state *find_stage(s1f_kv_slots *slots, int32_t stage)
{
    for (int32_t i = 0; i < slots->num_stages; i++)
        if (slots->stages[i].stage == stage)
            return &slots->stages[i];
    return NULL;
}

static int holds(const s1f_slot_state *slot, const s1f_current_unit *unit)
{
    return slot->live && slot->microbatch == unit->unit.microbatch;
}

/* A unit follows a segment before it, and its rows lie in the slab. */
static s1f_status check_place(const s1f_kv_slots *slots, const s1f_current_unit *unit)
{
    int32_t s = unit->unit.segment;
    if (unit->parent < -1 || unit->parent >= s || (unit->parent < 0) != (s == 0) || unit->num_children < 0)
        return s1f_fail(S1F_ERR_ARG,
                        "%s: follows segment %d: the first follows none (-1), and each other one a "
                        "segment before it",
                        s1f_name_of(unit).text, (int)unit->parent);
    if (unit->row < 0 || unit->length > slots->num_rows - unit->row)
        return s1f_fail(S1F_ERR_ARG, "%s: rows [%lld, %lld) do not lie in a slab of %lld", s1f_name_of(unit).text,
                        (long long)unit->row, (long long)(unit->row + unit->length), (long long)slots->num_rows);
    return S1F_OK;
}

/* The slots a unit names, after checking that the unit fits the step; *grads is NULL in F and R. */
static s1f_status find_slots(s1f_kv_slots *slots, const s1f_current_unit *unit, s1f_slot_state **out,
                             s1f_grad_slot_state **grads)
{
    const s1f_stage_state *stage = find_stage(slots, unit->unit.stage);
    if (stage == NULL)
        return s1f_fail(S1F_ERR_ARG, "%s: the step has no stage %d", s1f_name_of(unit).text, (int)unit->unit.stage);
    if (unit->kv_slot < 0 || unit->kv_slot >= stage->kv_slots)
        return s1f_fail(S1F_ERR_ARG, "%s: KV slot is %d, stage %d has %d", s1f_name_of(unit).text, (int)unit->kv_slot,
                        (int)stage->stage, (int)stage->kv_slots);
    if (s1f_goes_back(unit) && (unit->grad_slot < 0 || unit->grad_slot >= stage->grad_slots))
        return s1f_fail(S1F_ERR_ARG, "%s: gradient slot is %d, stage %d has %d", s1f_name_of(unit).text,
                        (int)unit->grad_slot, (int)stage->stage, (int)stage->grad_slots);
    if (unit->num_segments > slots->num_segments || unit->sequence_length > slots->sequence_length)
        return s1f_fail(S1F_ERR_ARG, "%s: %d segments of %lld tokens, the step has %d of %lld", s1f_name_of(unit).text,
                        (int)unit->num_segments, (long long)unit->sequence_length, (int)slots->num_segments,
                        (long long)slots->sequence_length);
    if (unit->unit.segment < 0 || unit->unit.segment >= unit->num_segments || unit->unit.microbatch < 0)
        return s1f_fail(S1F_ERR_ARG, "%s: the micro-batch has %d segments", s1f_name_of(unit).text,
                        (int)unit->num_segments);
    if (unit->offset < 0 || unit->length < 1 || unit->length > unit->sequence_length - unit->offset)
        return s1f_fail(S1F_ERR_ARG, "%s: tokens [%lld, %lld) do not lie in a sequence of %lld", s1f_name_of(unit).text,
                        (long long)unit->offset, (long long)(unit->offset + unit->length),
                        (long long)unit->sequence_length);
    S1F_TRY(check_place(slots, unit));
    const s1f_slot_state *slot = &stage->slots[unit->kv_slot];
    int takes = s1f_is_forward(unit) && unit->unit.segment == 0;
    if (!takes && holds(slot, unit) &&
        (unit->num_segments != slot->num_segments || unit->sequence_length != slot->sequence_length))
        return s1f_fail(S1F_ERR_ARG, "%s: %d segments of %lld tokens, segment 0 had %d of %lld", s1f_name_of(unit).text,
                        (int)unit->num_segments, (long long)unit->sequence_length, (int)slot->num_segments,
                        (long long)slot->sequence_length);
    *out = &stage->slots[unit->kv_slot];
    *grads = s1f_goes_back(unit) ? &stage->grad_states[unit->grad_slot] : NULL;
    return S1F_OK;
}

/* The parent of a unit has run forward, and ends where the unit begins. */
static s1f_status check_parent(const s1f_current_unit *unit, const s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment, parent = unit->parent;
    int is_next = parent < 0 || slot->segments[parent].is_forward;
    if (!slot->is_tree && (!is_next || slot->segments[s].is_forward))
        return s1f_fail(S1F_ERR_STATE, "%s: forward of segment %d out of order, segment %d is next",
                        s1f_name_of(unit).text, (int)s, (int)slot->forwards);
    if (slot->segments[s].is_forward)
        return s1f_fail(S1F_ERR_STATE, "%s: second forward of segment %d", s1f_name_of(unit).text, (int)s);
    if (!is_next)
        return s1f_fail(S1F_ERR_STATE, "%s: forward of segment %d before that of segment %d, which it follows",
                        s1f_name_of(unit).text, (int)s, (int)parent);
    if (parent >= 0 && slot->segments[parent].is_back)
        return s1f_fail(S1F_ERR_STATE, "%s: forward of segment %d after the backward of segment %d, which it follows",
                        s1f_name_of(unit).text, (int)s, (int)parent);
    int64_t expected = parent < 0 ? 0 : slot->segments[parent].offset + slot->segments[parent].length;
    if (unit->offset != expected)
        return s1f_fail(S1F_ERR_ARG, "%s: segment starts at token %lld, the one before it ends at %lld",
                        s1f_name_of(unit).text, (long long)unit->offset, (long long)expected);
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
        *slot = (s1f_slot_state){.microbatch = unit->unit.microbatch,
                                 .live = 1,
                                 .num_segments = unit->num_segments,
                                 .sequence_length = unit->sequence_length,
                                 .tag = slots->serial + 1,
                                 .segments = segments};
    }
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", s1f_name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    slot->is_tree |=
        unit->parent != s - 1 || unit->num_children != (s + 1 < slot->num_segments) || unit->row != unit->offset;
    S1F_TRY(check_parent(unit, slot));
    slot->segments[s] = (s1f_segment_state){.serial = ++slots->serial,
                                            .offset = unit->offset,
                                            .length = unit->length,
                                            .row = unit->row,
                                            .parent = unit->parent,
                                            .num_children = unit->num_children};
    return S1F_OK;
}

/* A unit after its F is of the same tokens. */
static s1f_status check_tokens(const s1f_current_unit *unit, const s1f_segment_state *segment)
{
    if (unit->offset == segment->offset && unit->length == segment->length && unit->row == segment->row &&
        unit->parent == segment->parent)
        return S1F_OK;
    if (unit->row != segment->row || unit->parent != segment->parent)
        return s1f_fail(S1F_ERR_ARG, "%s: follows segment %d and lies in row %lld, in its forward %d and %lld",
                        s1f_name_of(unit).text, (int)unit->parent, (long long)unit->row, (int)segment->parent,
                        (long long)segment->row);
    return s1f_fail(S1F_ERR_ARG, "%s: tokens [%lld, %lld), its forward had [%lld, %lld)", s1f_name_of(unit).text,
                    (long long)unit->offset, (long long)(unit->offset + unit->length), (long long)segment->offset,
                    (long long)(segment->offset + segment->length));
}

/* Between F and B of its segment. */
static int may_recompute(const s1f_slot_state *slot, int32_t segment)
{
    return slot->segments[segment].is_forward && !slot->segments[segment].is_back;
}

static s1f_status begin_recomputation(const s1f_current_unit *unit, const s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment;
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", s1f_name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    if (!may_recompute(slot, s))
        return s1f_fail(S1F_ERR_STATE, "%s: segment %d is recomputed %s", s1f_name_of(unit).text, (int)s,
                        slot->segments[s].is_forward ? "after its backward" : "before its forward");
    return check_tokens(unit, &slot->segments[s]);
}

/* Its F is done, and so are the backwards of its children. */
static int may_go_back(const s1f_slot_state *slot, int32_t segment)
{
    const s1f_segment_state *state = &slot->segments[segment];
    return state->is_forward && !state->is_back && state->num_children_back == state->num_children;
}

/* Says why a segment may not go back. */
static s1f_status refuse_backward(const s1f_current_unit *unit, const s1f_slot_state *slot)
{
    int32_t s = unit->unit.segment;
    if (!slot->is_tree && slot->forwards != slot->num_segments)
        return s1f_fail(S1F_ERR_STATE, "%s: backward before the forward of segment %d", s1f_name_of(unit).text,
                        (int)slot->forwards);
    if (!slot->is_tree)
        return s1f_fail(S1F_ERR_STATE,
                        "%s: backward of segment %d out of order, segment %d is next (gradients return last segment "
                        "first)",
                        s1f_name_of(unit).text, (int)s, (int)(slot->num_segments - 1 - slot->backwards));
    if (!slot->segments[s].is_forward)
        return s1f_fail(S1F_ERR_STATE, "%s: backward before the forward of segment %d", s1f_name_of(unit).text, (int)s);
    if (slot->segments[s].is_back)
        return s1f_fail(S1F_ERR_STATE, "%s: second backward of segment %d", s1f_name_of(unit).text, (int)s);
    return s1f_fail(S1F_ERR_STATE,
                    "%s: backward of segment %d, which %d segments follow, after the backward of %d of them (a segment "
                    "goes back after those that follow it)",
                    s1f_name_of(unit).text, (int)s, (int)slot->segments[s].num_children,
                    (int)slot->segments[s].num_children_back);
}

static s1f_status begin_backward(const s1f_current_unit *unit, s1f_slot_state *slot, s1f_grad_slot_state *grads)
{
    int32_t s = unit->unit.segment;
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold KV slot %d", s1f_name_of(unit).text,
                        (int)unit->unit.microbatch, (int)unit->kv_slot);
    if (!may_go_back(slot, s))
        return refuse_backward(unit, slot);
    S1F_TRY(check_tokens(unit, &slot->segments[s]));
    if (grads->tag != 0 && grads->tag != slot->tag)
        return s1f_fail(S1F_ERR_STATE, "%s: gradient slot %d is still held by micro-batch %d", s1f_name_of(unit).text,
                        (int)unit->grad_slot, (int)grads->microbatch);
    if (grads->tag == 0 && slot->backwards > 0)
        return s1f_fail(S1F_ERR_STATE, "%s: micro-batch %d does not hold gradient slot %d", s1f_name_of(unit).text,
                        (int)slot->microbatch, (int)unit->grad_slot);
    *grads = (s1f_grad_slot_state){slot->tag, slot->microbatch};
    return S1F_OK;
}

s1f_status s1f_kv_slots_begin_unit(s1f_kv_slots *slots, const s1f_current_unit *unit)
{
    s1f_slot_state *slot = NULL;
    s1f_grad_slot_state *grads = NULL;
    S1F_TRY(find_slots(slots, unit, &slot, &grads));
    return s1f_is_forward(unit)  ? begin_forward(slots, unit, slot)
           : s1f_goes_back(unit) ? begin_backward(unit, slot, grads)
                                 : begin_recomputation(unit, slot);
}

s1f_status s1f_kv_slots_finish_unit(s1f_kv_slots *slots, const s1f_current_unit *unit, int32_t *is_tree)
{
    s1f_slot_state *slot = NULL;
    s1f_grad_slot_state *grads = NULL;
    S1F_TRY(find_slots(slots, unit, &slot, &grads));
    if (!holds(slot, unit))
        return s1f_fail(S1F_ERR_STATE, "%s: finished without having begun", s1f_name_of(unit).text);
    *is_tree = slot->is_tree;
    s1f_segment_state *segment = &slot->segments[unit->unit.segment];
    if (s1f_is_forward(unit)) {
        segment->is_forward = 1;
        slot->forwards++;
        slot->live = unit->training || slot->forwards < slot->num_segments;
    } else if (s1f_goes_back(unit)) {
        segment->is_back = 1;
        if (segment->parent >= 0)
            slot->segments[segment->parent].num_children_back++;
        slot->backwards++;
        slot->live = slot->backwards < slot->num_segments;
        if (!slot->live)
            *grads = (s1f_grad_slot_state){0, 0};
    }
    return S1F_OK;
}

s1f_status s1f_kv_slots_running(s1f_kv_slots *slots, const s1f_current_unit *unit, s1f_slot_state **out)
{
    s1f_grad_slot_state *grads = NULL;
    S1F_TRY(find_slots(slots, unit, out, &grads));
    const s1f_slot_state *state = *out;
    int32_t s = unit->unit.segment;
    int begun = s1f_is_forward(unit)  ? state->segments[s].serial != 0 && !state->segments[s].is_forward
                : s1f_goes_back(unit) ? may_go_back(state, s)
                                      : may_recompute(state, s);
    if (!holds(state, unit) || !begun)
        return s1f_fail(S1F_ERR_STATE, "%s: attention runs in a unit that has not begun", s1f_name_of(unit).text);
    return S1F_OK;
}
