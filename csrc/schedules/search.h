/* search.h - how long an order takes, and a bounded search for a shorter one.
 *
 * Backward is split here; a B counts as I, then W. A unit waits for at most two others: the one before it on its rank
 * and one of a neighbouring stage. All other rules of check.h, and the cap, are a matter of order within a rank. So an
 * order is one list of units per rank, its time one pass over them, and a step of the search moves one unit within a
 * list: a unit of a critical path, as only that can shorten it [van Laarhoven, Aarts, Lenstra 1992], to before or after
 * others of its busy block [Dell'Amico, Trubian 1993]; late acceptance decides whether the step stays [Burke, Bykov
 * 2017]. Random numbers are ours and start alike: the same problem gives the same order everywhere. */
#ifndef S1F_SEARCH_H
#define S1F_SEARCH_H

#include "../core/schedule.h"
#include "../core/table.h"

/* All borrowed. */
typedef struct {
    int32_t num_ranks, num_stages, num_microbatches, num_segments;
    const int32_t *rank_of_stage;
    const int64_t *first_cell;               /* of the shape; NULL: micro-batches are alike */
    const double *seconds[S1F_SPLIT_PASSES]; /* each [stage][column] (s1f_column) */
    double transfer;                         /* seconds between two ranks */
    const int64_t *unit_bytes;               /* [stage][column]: held from the start of F to the end of W */
    const int64_t *cap_bytes;                /* [rank]; INT64_MAX: no cap. The bytes of all units fit in int64_t */
} s1f_problem;

/* Counts and placement of the problem's orders, which split the backward. */
s1f_shape s1f_problem_shape(const s1f_problem *problem);

typedef struct s1f_search s1f_search; /* opaque */

/* Holds 3 units per (stage, micro-batch, segment), which must be at most INT32_MAX. S1F_ERR_MEMORY. *out is owned by
 * the caller and untouched on error. The problem is borrowed until the search is freed. */
s1f_status s1f_search_create(const s1f_problem *problem, s1f_search **out);
void s1f_search_free(s1f_search *search); /* NULL is fine */

/* Units by their numbers: pass by pass (F, I, W), stage by stage, cell by cell. Borrowed from the search. */
typedef struct {
    int32_t num_units, num_cells; /* of all stages and passes; of one stage */
    const int32_t *rank;
    const int32_t *source; /* the unit of a neighbouring stage that it waits for, -1: none */
    const int32_t *target; /* the one that waits for it, -1: none */
    const double *lag;     /* seconds from its source to it */
    const double *seconds;
    const double *tail;   /* s1f_problem_tails */
    const int64_t *bytes; /* that it takes, or frees (W): negative */
    const double *work;   /* [rank] seconds of its units */
} s1f_search_units;
s1f_search_units s1f_search_units_of(const s1f_search *search);
/* Seconds beyond which an order is forgotten: INFINITY until there are enough starts. */
double s1f_search_limit(const s1f_search *search);

/* A start, written unit by unit, each to the end of its rank's list: begin, append, offer. Offer forgets it unless it
 * is complete, keeps the cap and the order of passes, and is one of the shortest. */
void s1f_search_begin(s1f_search *search);
void s1f_search_append(s1f_search *search, s1f_unit unit);
void s1f_search_append_number(s1f_search *search, int32_t number); /* of s1f_search_units */
void s1f_search_offer(s1f_search *search);

/* Improves the starts within a fixed number of steps and units timed; ends early at a lower bound. */
s1f_status s1f_search_run(s1f_search *search);
/* Seconds of the shortest order so far; INFINITY: none. */
double s1f_search_makespan(const s1f_search *search);
/* Appends the shortest order, of which there is one, to an empty schedule with the problem's counts and placement: as I
 * and W, or as a B where I is. */
s1f_status s1f_search_take(const s1f_search *search, int is_split, s1f_schedule *schedule);

#endif
