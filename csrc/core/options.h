/* options.h - what a family may be told beyond its counts, and the table that says what each option is.
 * A new option is a field, a bit and a row: the binding, the checks and Python read the table. */
#ifndef S1F_OPTIONS_H
#define S1F_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    S1F_PLACEMENT_LOOP = 1, /* stages go round the ranks */
    S1F_PLACEMENT_V = 2     /* to and fro */
} s1f_placement_kind;

typedef enum {
    S1F_BACKWARD_SPLIT = 1, /* I and W */
    S1F_BACKWARD_WHOLE = 2  /* B */
} s1f_backward_kind;

typedef enum {
    S1F_ROUNDS_OF_MICROBATCHES = 1, /* a round holds whole micro-batches */
    S1F_ROUNDS_OF_SEGMENTS = 2      /* P segments of one, or a few more */
} s1f_rounds_kind;

typedef enum {
    S1F_TREES_BY_NUMBER = 1, /* segments go forward by their numbers, and back in reverse */
    S1F_TREES_NESTED = 2 /* a leaf goes back before the leaves behind it go forward, as far as the pipeline lets it */
} s1f_trees_kind;

/* F, I, W; tables by pass have them in this order, that of what they make (s1f_product). */
enum { S1F_SPLIT_PASSES = 3 };

/* 0 or NULL: not given, the family's own choice. All that is pointed to is borrowed. */
typedef struct {
    int32_t group;        /* micro-batches that go forward, and back, together */
    int32_t round;        /* interleaving: a round holds at least so many micro-batches */
    int32_t extra_warmup; /* more forwards before the first backward, for each stage behind the rank's own */
    int64_t cap;          /* most (stage, segment) units of a rank */
    /* Seconds of F, I and W, each [stage][segment]; all three or none. Those of all units, with their transfers, sum to
     * at most 1e300. */
    const double *costs[S1F_SPLIT_PASSES];
    double transfer;           /* seconds of a message between two ranks */
    int32_t placement;         /* s1f_placement_kind */
    int32_t backward;          /* s1f_backward_kind */
    int32_t rounds;            /* s1f_rounds_kind, of interleaving; not with `round` */
    int32_t trees;             /* s1f_trees_kind */
    const int64_t *unit_bytes; /* [stage][segment] held from F to the end of the backward */
    const int64_t *cap_bytes;  /* [rank] most bytes of a rank; both or none, and not with `cap` */
    /* A count rather than an option: the segments of every micro-batch, where they differ or have lengths of their own;
     * num_segments is the most of them. The tables above are then [stage][cell]. */
    const int32_t *segments_of;
    const int32_t *parents; /* and of trees, [cell], with segments_of; NULL: chains */
} s1f_options;

/* Bits of the options, for the set that a family takes; row i of the table is that of bit i. */
enum {
    S1F_OPTION_GROUP = 1,
    S1F_OPTION_ROUND = 2,
    S1F_OPTION_EXTRA_WARMUP = 4,
    S1F_OPTION_CAP = 8,
    S1F_OPTION_COSTS = 16,
    S1F_OPTION_TRANSFER = 32,
    S1F_OPTION_PLACEMENT = 64,
    S1F_OPTION_UNIT_BYTES = 128,
    S1F_OPTION_CAP_BYTES = 256,
    S1F_OPTION_BACKWARD = 512,
    S1F_OPTION_ROUNDS = 1024,
    S1F_OPTION_TREES = 2048
};
enum { S1F_NUM_OPTIONS = 12 };

typedef enum {
    S1F_KIND_INT32 = 0,
    S1F_KIND_INT64 = 1,
    S1F_KIND_SECONDS = 2,        /* double */
    S1F_KIND_WORD = 3,           /* int32_t: 1 for the first word, 2 for the second */
    S1F_KIND_COSTS_OF_UNITS = 4, /* const double *[S1F_SPLIT_PASSES], each [stage][column] */
    S1F_KIND_BYTES_OF_UNITS = 5, /* const int64_t *, [stage][column] */
    S1F_KIND_BYTES_OF_RANKS = 6, /* const int64_t *, [rank] */
    S1F_NUM_OPTION_KINDS
} s1f_option_kind;

typedef struct {
    const char *name;
    s1f_option_kind kind;
    size_t offset, bytes; /* of the field in s1f_options; zeros: it is not given */
    int32_t least;        /* range of a number that is given */
    const char *words[2]; /* of S1F_KIND_WORD */
} s1f_option;
extern const s1f_option s1f_option_table[S1F_NUM_OPTIONS];

#endif
