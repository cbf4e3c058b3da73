/* schedule.h - the order in which each rank runs its units.
 * Plain data: built, checked, lowered, simulated and printed before any tensor exists. */
#ifndef S1F_SCHEDULE_H
#define S1F_SCHEDULE_H

#include "status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct s1f_schedule s1f_schedule; /* opaque; its fields live in schedule.c */

typedef enum {
    S1F_PASS_FORWARD = 0,         /* F */
    S1F_PASS_BACKWARD = 1,        /* B: full backward */
    S1F_PASS_BACKWARD_INPUT = 2,  /* I: gradient of the input only */
    S1F_PASS_BACKWARD_WEIGHT = 3, /* W: gradient of the weights only */
    S1F_NUM_PASSES = 4
} s1f_pass;

typedef struct {
    int32_t pass; /* s1f_pass */
    int32_t stage, microbatch, segment;
} s1f_unit;

/* An empty schedule: rank_of_stage[num_stages] says where each stage runs (copied).
 * S1F_ERR_ARG if a count is below 1, a rank is out of range or holds no stage.
 * *out is owned by the caller (s1f_schedule_free) and untouched on error. */
s1f_status s1f_schedule_create(int32_t num_ranks, int32_t num_stages, int32_t num_microbatches, int32_t num_segments,
                               const int32_t *rank_of_stage, s1f_schedule **out);
/* Appends a unit to the order of the rank that holds its stage. S1F_ERR_ARG if an index is out of range. */
s1f_status s1f_schedule_append(s1f_schedule *schedule, s1f_unit unit);
void s1f_schedule_free(s1f_schedule *schedule); /* NULL is fine */

/* Builds a named family: "seq1f1b", "1f1b", "gpipe" (table in schedules/families.h). stages_per_rank above 1 is
 * S1F_ERR_SCHEDULE for families that hold one stage per rank. */
s1f_status s1f_schedule_build(const char *family, int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                              int32_t stages_per_rank, s1f_schedule **out);
/* Name of family i, NULL past the last. Static storage. */
const char *s1f_schedule_family(int32_t i);

int32_t s1f_schedule_num_ranks(const s1f_schedule *schedule);
int32_t s1f_schedule_num_stages(const s1f_schedule *schedule);
int32_t s1f_schedule_num_microbatches(const s1f_schedule *schedule);
int32_t s1f_schedule_num_segments(const s1f_schedule *schedule);
int32_t s1f_schedule_rank_of_stage(const s1f_schedule *schedule, int32_t stage);
/* Units of one rank in run order. Borrowed: valid until the next append or free. */
const s1f_unit *s1f_schedule_units(const s1f_schedule *schedule, int32_t rank, int64_t *num_units);

/* The same order with forward units only: what eval runs. */
s1f_status s1f_schedule_forward_only(const s1f_schedule *schedule, s1f_schedule **out);

/* "F1.0", or "[2]F1.0" where with_stage. Writes at most `bytes` bytes, always terminated. */
void s1f_unit_text(s1f_unit unit, int with_stage, char *text, size_t bytes);

#endif
