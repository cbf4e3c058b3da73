/* families.h - the schedules that have a name. A new one is one file here and one line in families.c. */
#ifndef S1F_FAMILIES_H
#define S1F_FAMILIES_H

#include "../core/schedule.h"

typedef struct s1f_family s1f_family;

/* A name of a family. A family may have two: one over whole micro-batches, and one over segments. */
typedef struct {
    const char *name, *description, *source;
    const char *validity; /* the rule of its counts in P, M, k, v (ranks, micro-batches, segments, stages per rank) */
} s1f_family_name;

typedef struct {
    const s1f_family *family;
    const s1f_family_name *name;
} s1f_named_family;

/* Name i of the list; NULL past the last. */
const s1f_named_family *s1f_schedule_family(int32_t i);

/* What a builder is asked for. The counts are at least 1, the options are ones that the family takes. */
typedef struct {
    const s1f_family *family;
    const s1f_family_name *name;                                        /* the family's name in the request */
    int32_t num_ranks, num_microbatches, num_segments, stages_per_rank; /* P, M, k, v */
    s1f_options options;
    int64_t num_cells, num_columns; /* of a stage, as in unit.h */
    int32_t has_unequal_rows;       /* micro-batches differ in their segments */
} s1f_request;

/* Appends the order of one rank to an empty schedule with loop placement. */
typedef s1f_status s1f_order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank);

struct s1f_family {
    s1f_family_name whole, segments; /* names over whole micro-batches, and over segments: one or both */
    int32_t stages_per_rank;         /* least v that the source builds */
    int32_t takes_more_stages;       /* 1: the least v; 0: the only v */
    int32_t takes_equal_rows;        /* 1: all micro-batches have the same k */
    uint32_t options;                /* bits */
    int32_t splits;                  /* 1: the orders have I and W, unless option backward says otherwise */
    int32_t placement;               /* S1F_PLACEMENT_V; 0: a loop, or as an option says */
    /* The first of the family's other rules that the request breaks, as text (static, or valid until the next call of
     * this thread); NULL where it breaks none. A NULL function: there are none. */
    const char *(*broken_rule)(const s1f_request *request);
    /* Builds the order of every rank of a request that breaks no rule. *out is owned by the caller and untouched on
     * error. NULL: order_of_rank writes each rank. */
    s1f_status (*build)(const s1f_request *request, s1f_schedule **out);
    s1f_order_of_rank *order_of_rank;
    /* Units that a rank holds at most, where order_of_rank writes F and I alone, and W go where these leave room
     * (split.c); NULL: it writes all. */
    int64_t (*most_live)(const s1f_request *request);
    int64_t (*least_units)(const s1f_request *request); /* that M k must be at least; NULL: no rule */
    const char *cap_rule;                               /* that option cap is at least most_live */
};

extern const s1f_family s1f_family_seq1f1b, s1f_family_1f1b, s1f_family_gpipe, s1f_family_terapipe, s1f_family_kfkb,
    s1f_family_breadth_first, s1f_family_interleaved, s1f_family_slimpipe, s1f_family_hanayo, s1f_family_zb_h1,
    s1f_family_zb_h2, s1f_family_zbv, s1f_family_v_half, s1f_family_v_min, s1f_family_dualpipev, s1f_family_auto;

/* -- what families share ------------------------------------------------------------------------------------------- */

/* The rank of a stage: stages go round the ranks, 0 .. P-1, 0 .. P-1; or to and fro in a V (in waves where v > 2),
 * 0 .. P-1, P-1 .. 0, so that a turn needs no transfer. placement: S1F_PLACEMENT_V, or else a loop. */
int32_t s1f_rank_of_stage(int32_t placement, int32_t num_ranks, int32_t stage);

/* An empty schedule with the request's counts. */
s1f_status s1f_schedule_place(const s1f_request *request, int32_t placement, s1f_schedule **out);

/* Appends the i-th unit of a pass and a stage in plain order: micro-batches ascend, their segments ascend in F and
 * descend in B and I. */
s1f_status s1f_schedule_append_nth(s1f_schedule *schedule, s1f_pass pass, int32_t stage, int64_t i);

/* The order of a rank with trees: parents first and one branch after another, back branch after branch (nested.c). */
s1f_order_of_rank s1f_order_nested;
/* Forwards that option extra_warmup adds to a rank's warm-up: so many for each stage behind its own, at most all. */
int64_t s1f_extra_warmup(const s1f_request *request, int32_t rank);

/* The rule of M, or of M k where there are segments, of a family with both names: its validity begins with it. */
const char *s1f_rule_of_units(const s1f_request *request);

/* -- patterns of a rank with one stage, or two in a V (v_pattern.c) ------------------------------------------------ */

typedef struct {
    s1f_schedule *schedule;
    int32_t rank, stages[2];            /* the one on the way from rank 0 to P - 1, and the one on the way back */
    int64_t forwards[2], backwards[2];  /* done so far */
    int64_t num_cells, place_of_weight; /* behind the I whose W was appended last, in the order of the rank */
} s1f_v_rank;

s1f_v_rank s1f_v_rank_of(const s1f_request *request, s1f_schedule *schedule, int32_t rank);
/* Appends a pattern, `times` over. Its letters are the passes f, b and i of the rank's first stage, F, B and I of its
 * second, each in plain order, and w, the W of its oldest I that has none yet. A letter with nothing left is left
 * out. */
s1f_status s1f_repeat(s1f_v_rank *rank, int64_t times, const char *pattern);
/* The order of a rank with one stage: `warmup` groups forward, then one forward and one back in turn, then those back
 * that are left. A group is `size` micro-batches in plain order; `size` divides M. */
s1f_status s1f_alternate_groups(const s1f_request *request, s1f_schedule *schedule, int32_t rank, int64_t warmup,
                                int64_t size);

/* -- where the W of a split backward go (split.c) ------------------------------------------------------------------ */

/* The order of a plan, walked in time: a rank takes the next unit of its plan once its inputs are there and, if it is
 * an F, fewer units live (F to the end of W) than the family's most_live says, or option cap; else a W; else it waits.
 * Two liberties, which segments need. A rank that would wait may take an F ahead of its plan, k - 1 times, where it has
 * room until that F's turn: backward enters k - 1 segments later than in whole micro-batches. And once no F is left,
 * the rank's deeper stage goes first. Where costs are given the walk is done three times, with equal costs, and with
 * the given ones with W that may and that may not delay the plan; the shortest stays. No F of the plan may need more
 * units between F and I than that. *out is owned by the caller and untouched on error. */
s1f_status s1f_schedule_split(const s1f_request *request, const s1f_schedule *plan, s1f_schedule **out);

#endif
