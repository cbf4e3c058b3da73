/* in_time.h - for builders that order units by running them: when the inputs of a unit are there, and a clock under
 * which every free rank chooses what it does. */
#ifndef S1F_IN_TIME_H
#define S1F_IN_TIME_H

#include "../core/schedule.h"
#include "../core/table.h"

/* When each product of each cell is made, as far as is known; messages take no time. */
typedef struct {
    s1f_shape shape;
    double *end[S1F_MAX_PRODUCTS]; /* [stage][cell] seconds; INFINITY: not started; NULL: not made at all */
} s1f_board;                       /* arrays of a pool */

/* Nothing has started. The placement of the shape is borrowed. S1F_ERR_MEMORY. */
s1f_status s1f_board_create(const s1f_shape *shape, s1f_pool *pool, s1f_board *board);
void s1f_board_clear(s1f_board *board);
/* When all inputs of a unit are there, 0 if it has none; INFINITY: one of them has not started. */
double s1f_board_ready(const s1f_board *board, s1f_unit unit);
/* The unit has started and will end then. */
void s1f_board_start(s1f_board *board, s1f_unit unit, double end);

/* What a free rank does now, and for how many seconds: the unit starts. 0: the rank waits. Asked whenever a unit of any
 * rank has ended. */
typedef int s1f_choose(void *context, int32_t rank, double now, s1f_unit *unit, double *seconds);

/* Runs num_units units of all ranks, from time 0, and appends each to `out`, which is empty. Times that differ by at
 * most `tolerance` are one. S1F_ERR_SCHEDULE: all ranks wait. */
s1f_status s1f_run_in_time(s1f_board *board, int64_t num_units, double tolerance, s1f_choose *choose, void *context,
                           s1f_schedule *out);

#endif
