/* current_unit.h - which unit runs now: the one ambient thing.
 *
 * The executor sets it around every RUN; ops read it when they run, and whoever computes the unit hangs on it what its
 * modules may ask for. So a compiled graph never depends on the offset,
 * and nothing about the unit is an argument of an op. On CUDA, backward and recomputation run on autograd's device
 * threads, so a thread-local alone is wrong there: the thread's unit comes first (ranks that are threads of one
 * process, the loopback), else the process's (the one engine that is inside a step). */
#ifndef S1F_CURRENT_UNIT_H
#define S1F_CURRENT_UNIT_H

#include "../core/key_ranges.h"
#include "../core/schedule.h"

struct s1f_kv_cache;

typedef struct {
    s1f_unit unit;
    int32_t num_segments; /* of its micro-batch */
    int32_t parent;       /* segment that it follows, -1: none. In a chain the one before it */
    int32_t num_children; /* segments that follow it */
    int32_t kv_slot, grad_slot;
    int32_t training;        /* a backward will follow */
    int64_t offset, length;  /* tokens: position of the segment's first token along its path, tokens in the segment */
    int64_t sequence_length; /* tokens of all segments of the micro-batch */
    int64_t row;             /* row of the first token in the slabs of the slot; in a chain the offset */
    int64_t num_documents;   /* documents in the row, if the step's plan says so; else 0 */
    const s1f_key_range *ranges; /* rows of the path's keys [0, offset + length), in order; its own are in the last */
    const int64_t *parts; /* tokens of each part: siblings that lie one after another in the segment. NULL: one */
    int32_t num_ranges, num_parts;
    struct s1f_kv_cache *cache; /* borrowed from the engine that is inside the step, as are ranges and parts */
    int32_t is_whole;           /* ops count as outside a step: whoever computes the unit sets it */
    void *state;                /* state of whoever computes the unit, borrowed; NULL at first */
} s1f_current_unit;

/* Whether keys lie in the rows that their positions name, and each query sees all of them up to its own, as in a
 * chain. */
static inline int s1f_is_plain_unit(const s1f_current_unit *unit)
{
    return unit->num_ranges == 1 && unit->ranges[0].row == 0 && unit->num_parts <= 1;
}
/* Position along its path of the i-th token of the segment: a part begins where the parent's path ends. */
int64_t s1f_position_in_unit(const s1f_current_unit *unit, int64_t i);

/* The unit that runs on this thread, NULL outside a step. Borrowed. */
const s1f_current_unit *s1f_current_unit_get(void);

/* Makes `unit` (borrowed until replaced; NULL = none) the unit of the calling thread, or of the whole process.
 * Setting the process's while another one is set is S1F_ERR_STATE: two engines inside a step in one process. */
void s1f_current_unit_set_thread(const s1f_current_unit *unit);
s1f_status s1f_current_unit_set_process(const s1f_current_unit *unit);

/* These set the state, or the number of documents, of the unit that runs on this thread; nothing happens outside a
 * step. is_whole: 1 makes the unit whole. */
void s1f_current_unit_set_state(void *state, int32_t is_whole);
void s1f_current_unit_set_documents(int64_t num_documents);

#endif
