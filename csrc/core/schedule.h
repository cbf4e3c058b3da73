/* schedule.h - the order in which each rank runs its units.
 * Plain data: built, checked, lowered, simulated and printed before any tensor exists. */
#ifndef S1F_SCHEDULE_H
#define S1F_SCHEDULE_H

#include "options.h"
#include "pool.h"
#include "unit.h"

typedef struct s1f_schedule s1f_schedule; /* opaque; its fields live in schedule.c */

/* S1F_ERR_ARG if a schedule of these counts, each at least 1, has more than INT32_MAX forward units: every product of
 * counts is within int64. */
s1f_status s1f_check_num_units(int64_t num_stages, int32_t num_microbatches, int32_t num_segments);

/* An empty schedule of the counts and the placement of a shape, and of its first_cell where micro-batches have segments
 * of their own, of which num_segments is the most (all copied; its other fields are not read). Counts are at least 1,
 * and every rank holds a stage. parents: NULL, or what makes the segments trees (trees.h), [cell of a stage], with
 * first_cell; chains alone change nothing. S1F_ERR_ARG if there are too many units, num_segments is not the most, or a
 * segment has no parent before it. *out is owned by the caller (s1f_schedule_free) and untouched on error. */
s1f_status s1f_schedule_create(const s1f_shape *shape, const int32_t *parents, s1f_schedule **out);
/* An empty schedule with the counts and the placement of another. */
s1f_status s1f_schedule_create_like(const s1f_schedule *schedule, s1f_schedule **out);
/* Appends a unit, whose indices are in range, to the order of the rank that holds its stage. S1F_ERR_MEMORY. */
s1f_status s1f_schedule_append(s1f_schedule *schedule, s1f_unit unit);
/* Hands a schedule that was made to *out where the status is S1F_OK, and frees it otherwise. Returns the status. */
s1f_status s1f_schedule_finish(s1f_schedule *schedule, s1f_status status, s1f_schedule **out);
void s1f_schedule_free(s1f_schedule *schedule); /* NULL is fine */

/* The first rule of the family that counts and options break, as text; NULL: it can be built. *rule is
 * borrowed: valid until the next call on this thread. options NULL: none given. S1F_ERR_ARG for an unknown name, a
 * count or an option out of range, an option that the family does not take. */
s1f_status s1f_schedule_broken_rule(const char *family, int32_t num_ranks, int32_t num_microbatches,
                                    int32_t num_segments, int32_t stages_per_rank, const s1f_options *options,
                                    const char **rule);
/* Builds a named family (table in schedules/families.c). The same errors; S1F_ERR_SCHEDULE where a rule is broken.
 * *out is owned by the caller and untouched on error. */
s1f_status s1f_schedule_build(const char *family, int32_t num_ranks, int32_t num_microbatches, int32_t num_segments,
                              int32_t stages_per_rank, const s1f_options *options, s1f_schedule **out);

/* Units of one rank in run order. Borrowed: valid until the next append or free. */
const s1f_unit *s1f_schedule_units(const s1f_schedule *schedule, int32_t rank, int64_t *num_units);
int64_t s1f_schedule_num_units(const s1f_schedule *schedule); /* of all ranks */

/* Walks over the units of all ranks, rank after rank: for (s1f_position at = {0}; s1f_next_unit(schedule, &at);) ... */
typedef struct {
    int32_t rank;
    int64_t number; /* of the unit in the order of its rank, from 1 */
    s1f_unit unit;
} s1f_position;
int s1f_next_unit(const s1f_schedule *schedule, s1f_position *at); /* 0: no more */

/* Bits (1 << s1f_pass) of the passes that occur. */
uint32_t s1f_schedule_passes(const s1f_schedule *schedule);
/* 64 bits of the units and their order: alike in equal schedules on every machine, and by chance alone in others. */
uint64_t s1f_schedule_digest(const s1f_schedule *schedule);
/* Counts, placement and products of the order as it stands; what it points to is borrowed. `marks` is NULL: for whoever
 * need not know which cells are recomputed, or moved, or how an order goes through trees. */
s1f_shape s1f_schedule_shape(const s1f_schedule *schedule);
/* s1f_schedule_shape with `marks`, which are the pool's. S1F_ERR_MEMORY. */
s1f_status s1f_schedule_full_shape(const s1f_schedule *schedule, s1f_pool *pool, s1f_shape *shape);
/* 1 where text must name stages: unless every rank r holds stage r and no other. */
int s1f_schedule_shows_stages(const s1f_schedule *schedule);

/* Whether the order has passed its rules (check.h) since it last changed: it need not be checked again. */
int s1f_schedule_is_checked(const s1f_schedule *schedule);
void s1f_schedule_note_checked(const s1f_schedule *schedule);

/* Makes the order without what goes back, or is for it: what eval runs. *out is owned by the caller. */
s1f_status s1f_schedule_forward_only(const s1f_schedule *schedule, s1f_schedule **out);

/* -- text (schedule_text.c) ----------------------------------------------------------------------------------------
 * One line per rank, units separated by blanks, "F1.0" = forward, micro-batch 1, segment 0; "[2]F1.0" names the stage,
 * on every unit or on none (then rank r holds stage r and no other). "#" starts a comment; lines without a unit do not
 * count. Where segments are trees, the first line has their parents, a word for each micro-batch, "-" for a chain:
 * "parents -1,0,0 -". With chains alone it makes an order of rows. The readers find the counts and the placement in the
 * text; a micro-batch has the segments that it names. They do not check the order: s1f_schedule_check does. */

/* *text: terminated, owned by the caller (free). */
s1f_status s1f_schedule_to_text(const s1f_schedule *schedule, char **text);
/* num_segments: of every micro-batch; 0: those that it names. S1F_ERR_ARG naming line and token. *out is owned by the
 * caller and untouched on error. */
s1f_status s1f_schedule_from_text(const char *text, int32_t num_segments, s1f_schedule **out);

#endif
