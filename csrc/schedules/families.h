/* families.h - the schedules that have a name. A new one is one file here and one line in families.c. */
#ifndef S1F_FAMILIES_H
#define S1F_FAMILIES_H

#include "../core/schedule.h"

/* What a builder is asked for. The counts are at least 1, the options are ones that the family takes. */
typedef struct {
    int32_t num_ranks, num_microbatches, num_segments, stages_per_rank; /* P, M, k, v */
    s1f_options options;
} s1f_request;

typedef struct {
    s1f_family_facts facts;
    /* As text, static or valid until the next call of this thread; NULL: none; a NULL function: any counts. */
    const char *(*broken_rule)(const s1f_request *request);
    /* Builds the order of every rank; no rule is broken. *out is owned by the caller and untouched on error. */
    s1f_status (*build)(const s1f_request *request, s1f_schedule **out);
} s1f_family;

extern const s1f_family s1f_family_seq1f1b, s1f_family_1f1b, s1f_family_gpipe, s1f_family_terapipe, s1f_family_kfkb,
    s1f_family_breadth_first, s1f_family_interleaved_1f1b, s1f_family_seq1f1b_interleaved, s1f_family_slimpipe,
    s1f_family_hanayo, s1f_family_zb_h1, s1f_family_zb_h2, s1f_family_zbv, s1f_family_v_half, s1f_family_v_min,
    s1f_family_dualpipev, s1f_family_seq_zb_h1, s1f_family_seq_zb_h2, s1f_family_seq_zbv, s1f_family_seq_v_half,
    s1f_family_seq_v_min, s1f_family_auto;

/* -- what families share ------------------------------------------------------------------------------------------- */

/* The rank of a stage: stages go round the ranks, 0 .. P-1, 0 .. P-1; or to and fro in a V (in waves where v > 2),
 * 0 .. P-1, P-1 .. 0, so that a turn needs no transfer. */
typedef int32_t s1f_placement(int32_t num_ranks, int32_t stage);
s1f_placement s1f_placement_loop, s1f_placement_wave;

/* An empty schedule with the request's counts. */
s1f_status s1f_schedule_place(const s1f_request *request, s1f_placement *placement, s1f_schedule **out);
/* A schedule with loop placement whose order is written rank by rank. */
typedef s1f_status s1f_order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank);
s1f_status s1f_schedule_by_rank(const s1f_request *request, s1f_order_of_rank *order_of_rank, s1f_schedule **out);

/* Appends the i-th forward unit of a stage in plain order (micro-batches ascending, segments ascending), and the i-th
 * backward unit (micro-batches ascending, segments descending). */
s1f_status s1f_schedule_append_forward(s1f_schedule *schedule, int32_t stage, int64_t i);
s1f_status s1f_schedule_append_backward(s1f_schedule *schedule, int32_t stage, int64_t i);

/* One forward, one backward over groups of micro-batches, each of which goes forward, and back, as a whole. `extra`:
 * more groups before the first backward for each stage behind this one. `group` divides M. */
s1f_status s1f_schedule_append_groups(s1f_schedule *schedule, int32_t rank, int32_t group, int32_t extra);

/* Interleaving in rounds: a rank takes num_rounds rounds of micro-batches through all its stages, one stage after the
 * other; sizes as even as possible, larger ones first. Appends the i-th forward (backward) unit of that walk. */
s1f_status s1f_schedule_append_round_forward(s1f_schedule *schedule, int32_t rank, int32_t num_rounds, int64_t i);
s1f_status s1f_schedule_append_round_backward(s1f_schedule *schedule, int32_t rank, int32_t num_rounds, int64_t i);

/* `v = 1`, broken where a rank is to hold several stages. */
const char *s1f_rule_one_stage_per_rank(const s1f_request *request);

#endif
