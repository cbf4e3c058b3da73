/* families.h - the schedules that have a name. A new one is one file here and one line in families.c. */
#ifndef S1F_FAMILIES_H
#define S1F_FAMILIES_H

#include "../schedule.h"

/* Builds the order of every rank. The counts are at least 1. *out is owned by the caller and untouched on error. */
typedef s1f_status s1f_family_build(int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                                    int32_t stages_per_rank, s1f_schedule **out);

typedef struct {
    const char *name;
    s1f_family_build *build;
} s1f_family;

extern const s1f_family s1f_families[]; /* ends with a NULL name */

s1f_family_build s1f_schedule_seq1f1b, s1f_schedule_1f1b, s1f_schedule_gpipe;

/* For families that hold one stage per rank: writes the order of one rank, whose stage has the rank's number. */
typedef s1f_status s1f_order_of_rank(s1f_schedule *schedule, int32_t rank);

/* An empty schedule with stage r on rank r, filled rank by rank. S1F_ERR_SCHEDULE if stages_per_rank is not 1. */
s1f_status s1f_schedule_one_stage_per_rank(const char *family, s1f_order_of_rank *order_of_rank, int32_t num_ranks,
                                           int32_t num_microbatches, int32_t num_segments, int32_t stages_per_rank,
                                           s1f_schedule **out);

/* Appends the i-th forward unit of a stage in plain order (micro-batches ascending, segments ascending), and the i-th
 * backward unit (micro-batches ascending, segments descending). */
s1f_status s1f_schedule_append_forward(s1f_schedule *schedule, int32_t stage, int64_t i);
s1f_status s1f_schedule_append_backward(s1f_schedule *schedule, int32_t stage, int64_t i);

#endif
