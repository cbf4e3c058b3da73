/* kv_slots.h - who holds a KV cache's slots, and which unit may use them: the states that kv_cache.h tells of. No
 * memory of keys or values is known here. */
#ifndef S1F_KV_SLOTS_H
#define S1F_KV_SLOTS_H

#include "../core/pool.h"
#include "current_unit.h"

typedef struct {
    int32_t stage;
    int32_t kv_slots, grad_slots; /* peaks of the program's stage */
} s1f_stage_slots;

typedef struct {
    int64_t serial; /* of the latest F, 0: none; see "States" in kv_cache.h */
    int64_t offset, length;
    int32_t parent, num_children, num_children_back; /* the last: children whose backward is done */
    int32_t is_forward, is_back;                     /* whether F, and the backward, are done */
} s1f_segment_state;

typedef struct {
    int32_t microbatch;          /* -1: none has taken the slot in this step */
    int32_t live;                /* a backward of `microbatch` is still to come */
    int32_t forwards, backwards; /* units finished */
    int32_t is_tree;             /* some segment does not follow the segment before, or lies in other rows */
    s1f_segment_state *segments; /* [num_segments] */
} s1f_slot_state;

typedef struct {
    int64_t tag; /* serial of the F of segment 0 whose micro-batch's gradients the slot takes, 0: free */
    int32_t microbatch;
} s1f_grad_slot_state;

typedef struct {
    int32_t stage;
    s1f_slot_state *slots;            /* [kv_slots] */
    s1f_grad_slot_state *grad_states; /* [grad_slots] */
} s1f_stage_state;

typedef struct {          /* zeros: before the first step */
    s1f_pool pool;        /* of all arrays */
    int64_t num_rows;     /* rows of a slab for each head */
    int64_t serial;       /* a counter; never reset, so no tag of the past is met again */
    int32_t num_segments; /* segments of the longest micro-batch of the step */
    s1f_stage_state *stages;
    s1f_unit running; /* has begun, and is not finished; a pass below 0: none has */
} s1f_kv_slots;

/* As s1f_kv_cache_begin_step, begin_unit and finish_unit say. The last returns is_tree of s1f_slot_state. The program
 * and the step's layout give a unit its slots, segment and rows, which are not looked at. */
s1f_status s1f_kv_slots_begin_step(s1f_kv_slots *slots, const s1f_stage_slots *stages, int32_t num_stages,
                                   int64_t num_rows, int32_t num_segments);
s1f_status s1f_kv_slots_begin_unit(s1f_kv_slots *slots, const s1f_current_unit *unit);
int32_t s1f_kv_slots_finish_unit(s1f_kv_slots *slots, const s1f_current_unit *unit);
void s1f_kv_slots_free(s1f_kv_slots *slots); /* its arrays */
/* The state of the slot during the unit; the unit must have begun. */
s1f_status s1f_kv_slots_running(s1f_kv_slots *slots, const s1f_current_unit *unit, s1f_slot_state **out);

typedef struct {
    char text[64];
} s1f_unit_name;
s1f_unit_name s1f_name_of(const s1f_current_unit *unit); /* for errors */

static inline int s1f_is_forward(const s1f_current_unit *unit)
{
    return s1f_pass_makes(unit->unit.pass, S1F_PRODUCT_OUTPUT);
}

/* Whether the unit adds to the slab of dK and dV. */
static inline int s1f_goes_back(const s1f_current_unit *unit)
{
    return s1f_pass_makes(unit->unit.pass, S1F_PRODUCT_INPUT_GRADIENT);
}

#endif
