/* unit.h - what a unit is, and the one place that says what it waits for, makes, holds and frees.
 *
 * A unit is one pass over one segment of one micro-batch at one stage; the last three name a *cell*. A pass makes
 * *products*; each product of a cell is made by exactly one unit. Whatever asks for dependencies or lifetimes (check,
 * lower, simulate, memory, the searches, the drawings) asks here, so a new pass is an edit of the tables in unit.c.
 *
 * Where an order spreads the vocabulary over the ranks, rank r holds shard r of the output layer's rows, and the cells
 * of stage r, which must lie there, have the passes S and T of that shard; where it spreads the input embedding, E and
 * G.
 *
 * The segments of a micro-batch are a chain, or a tree (trees.h): each follows its parent, and several may follow one.
 * [Seq1F1B, arXiv:2406.03488; split backward: Zero Bubble, arXiv:2401.10241; vocabulary: arXiv:2411.05288] */
#ifndef S1F_UNIT_H
#define S1F_UNIT_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    S1F_PASS_FORWARD = 0,         /* F */
    S1F_PASS_BACKWARD = 1,        /* B: full backward */
    S1F_PASS_BACKWARD_INPUT = 2,  /* I: gradients of the stage's inputs */
    S1F_PASS_BACKWARD_WEIGHT = 3, /* W: gradients of the weights */
    S1F_PASS_RECOMPUTE = 4,       /* R: F once more, for the activations that B or I reads */
    S1F_PASS_STATISTICS = 5,     /* S: logits of a shard of the vocabulary, and their statistics for the other shards */
    S1F_PASS_LOSS = 6,           /* T: the loss from all shards' statistics, and the shard's gradients */
    S1F_PASS_EMBED = 7,          /* E: a shard's rows of the input embedding, for the first stage */
    S1F_PASS_EMBED_GRADIENT = 8, /* G: gradients of these rows */
    S1F_PASS_OUT = 9,            /* O: what F saved begins to go to the tier, a file */
    S1F_PASS_AWAY = 10,          /* A: what F saved has gone to the tier, its memory is free */
    S1F_PASS_LOAD = 11           /* L: there is room again, and what F saved begins to come back */
} s1f_pass;
enum { S1F_MAX_PASSES = 16 };        /* room in tables with a row per pass */
extern const int32_t s1f_num_passes; /* passes are 0 .. s1f_num_passes - 1 */

typedef struct {
    int32_t pass; /* s1f_pass */
    int32_t stage, microbatch, segment;
} s1f_unit;

/* The name of a pass's seconds among costs, and the pass in words: "input", "input gradient". */
const char *s1f_pass_name(int32_t pass);
const char *s1f_pass_text(int32_t pass);
/* The letter of a pass: F, B, I, W, R, S, T, E, G, O, A or L; and back, -1 for another letter. */
char s1f_pass_letter(int32_t pass);
int32_t s1f_pass_from_letter(char letter);
/* "F1.0", or "[2]F1.0" where with_stage. Writes at most `bytes` bytes, always terminated. */
void s1f_unit_text(s1f_unit unit, int with_stage, char *text, size_t bytes);

/* -- products ------------------------------------------------------------------------------------------------------ */

typedef enum {
    S1F_PRODUCT_OUTPUT = 0,          /* the stage's output: F */
    S1F_PRODUCT_INPUT_GRADIENT = 1,  /* B or I; also gradients of keys, values and carried state */
    S1F_PRODUCT_WEIGHT_GRADIENT = 2, /* B or W */
    S1F_PRODUCT_RECOMPUTED = 3,      /* the activations that F saves in other cells: R */
    S1F_PRODUCT_STATISTICS = 4,      /* of a shard's logits: S */
    S1F_PRODUCT_LOSS = 5,            /* the loss, and a shard's part of the gradient of the last stage's output: T */
    S1F_PRODUCT_EMBEDDED = 6,        /* rows of the embedding: E */
    S1F_PRODUCT_EMBED_GRADIENT = 7,  /* gradients of these rows: G */
    S1F_PRODUCT_LEAVING = 8,         /* what F saved is on its way out: O */
    S1F_PRODUCT_AWAY = 9,            /* what F saved is in the tier alone: A */
    S1F_PRODUCT_COMING = 10,         /* what F saved is on its way back: L */
    S1F_MAX_PRODUCTS = 16
} s1f_product;

/* Bits (1 << s1f_product) of a pass's products; 0 for a number that is no pass. */
uint32_t s1f_pass_products(int32_t pass);
static inline int s1f_pass_makes(int32_t pass, s1f_product product)
{
    return s1f_pass_products(pass) >> product & 1;
}
/* The first product that a pass makes: of F, I and W it is their place in tables of these three. */
static inline s1f_product s1f_first_product(int32_t pass)
{
    return (s1f_product)__builtin_ctz(s1f_pass_products(pass));
}
/* Whether an order that does not go back has the pass, too. */
int s1f_pass_is_forward(int32_t pass);
/* The products that an order of these passes (bits 1 << s1f_pass) makes: an order that goes back anywhere goes back
 * everywhere. */
uint32_t s1f_products_of_passes(uint32_t passes);
/* Bits of the products that an order may make for some cells only; all others it makes for every cell. */
static inline uint32_t s1f_optional_products(void)
{
    return 1u << S1F_PRODUCT_RECOMPUTED | 1u << S1F_PRODUCT_LEAVING | 1u << S1F_PRODUCT_AWAY | 1u << S1F_PRODUCT_COMING;
}

/* What each segment follows, and what follows it, by the cells of a stage: numbers of segments, -1 for none. Made by
 * trees.h. */
typedef struct {
    const int32_t *parent, *first_child, *next_sibling;
} s1f_trees;

/* Bits of a cell's mark beside those of its optional products: how an order goes through a tree. */
enum {
    S1F_MARK_LAST_FORWARD = 1 << 13,   /* the cell's F is the last of the micro-batch at the stage */
    S1F_MARK_FIRST_BACKWARD = 1 << 14, /* the cell's B or I is the first of the micro-batch at the stage */
    S1F_MARK_OPENS_PARENT = 1 << 15    /* the cell's B or I is the first below its parent */
};

/* Counts of an order, the ranks of its stages, its products, and the cells with optional products. These make a unit a
 * recomputed one, whose F saves nothing, or a moved one, whose activations are away for a while. */
typedef struct {
    int32_t num_ranks, num_stages, num_microbatches;
    int32_t num_segments; /* of every micro-batch; with first_cell of the longest micro-batch */
    uint32_t products;
    const int32_t *rank_of_stage; /* [num_stages]; borrowed, as are all arrays here */
    /* [num_microbatches + 1], from 0: the cells of micro-batch m within its stage are first_cell[m] up to the one
     * before first_cell[m + 1], one for each of its segments. NULL: every micro-batch has num_segments. */
    const int64_t *first_cell;
    const s1f_trees *trees; /* NULL: each segment follows the segment before. Otherwise first_cell is set, too */
    /* [cell of all stages] bits of optional products, and marks of trees. NULL: all optional ones that the order makes;
     * and in trees the order of numbers, and the reverse. */
    const uint16_t *marks;
} s1f_shape;

static inline int s1f_shape_makes(const s1f_shape *shape, s1f_product product)
{
    return shape->products >> product & 1;
}
static inline int s1f_shape_has_backward(const s1f_shape *shape)
{
    return s1f_shape_makes(shape, S1F_PRODUCT_INPUT_GRADIENT);
}
/* Number of a micro-batch's first cell within its stage; of num_microbatches: the cells of a stage. */
static inline int64_t s1f_first_cell(const s1f_shape *shape, int32_t microbatch)
{
    return shape->first_cell != NULL ? shape->first_cell[microbatch] : (int64_t)microbatch * shape->num_segments;
}
static inline int64_t s1f_num_cells(const s1f_shape *shape)
{
    return s1f_first_cell(shape, shape->num_microbatches);
}
static inline int32_t s1f_segments_of(const s1f_shape *shape, int32_t microbatch)
{
    return shape->first_cell == NULL ? shape->num_segments
                                     : (int32_t)(shape->first_cell[microbatch + 1] - shape->first_cell[microbatch]);
}
/* Number of a unit's cell within its stage, below s1f_num_cells. */
static inline int64_t s1f_cell(const s1f_shape *shape, s1f_unit unit)
{
    return s1f_first_cell(shape, unit.microbatch) + unit.segment;
}
/* Number of a unit's cell among those of all stages. */
static inline int64_t s1f_cell_of_all(const s1f_shape *shape, s1f_unit unit)
{
    return unit.stage * s1f_num_cells(shape) + s1f_cell(shape, unit);
}
/* The unit of a pass and a stage that has this cell. */
s1f_unit s1f_unit_of_cell(const s1f_shape *shape, s1f_pass pass, int32_t stage, int64_t cell);
/* The forward of a cell of all stages. */
static inline s1f_unit s1f_forward_of_cell(const s1f_shape *shape, int64_t cell_of_all)
{
    int64_t of_stage = s1f_num_cells(shape);
    return s1f_unit_of_cell(shape, S1F_PASS_FORWARD, (int32_t)(cell_of_all / of_stage), cell_of_all % of_stage);
}
/* The i-th unit of a pass that goes back: its micro-batch is that of the i-th cell, and its segment counts from the
 * last. */
s1f_unit s1f_unit_going_back(const s1f_shape *shape, s1f_pass pass, int32_t stage, int64_t i);

static inline int s1f_cell_has(const s1f_shape *shape, s1f_unit unit, s1f_product optional)
{
    return s1f_shape_makes(shape, optional) &&
           (shape->marks == NULL || shape->marks[s1f_cell_of_all(shape, unit)] >> optional & 1);
}
/* The parent of the unit's segment; -1: the segment is the first. */
static inline int32_t s1f_parent_of(const s1f_shape *shape, s1f_unit unit)
{
    return shape->trees == NULL ? unit.segment - 1 : shape->trees->parent[s1f_cell(shape, unit)];
}
/* The first child of the unit's segment, and the next child of its parent; -1: none. */
static inline int32_t s1f_first_child(const s1f_shape *shape, s1f_unit unit)
{
    if (shape->trees != NULL)
        return shape->trees->first_child[s1f_cell(shape, unit)];
    return unit.segment + 1 < s1f_segments_of(shape, unit.microbatch) ? unit.segment + 1 : -1;
}
static inline int32_t s1f_next_sibling(const s1f_shape *shape, s1f_unit unit)
{
    return shape->trees != NULL ? shape->trees->next_sibling[s1f_cell(shape, unit)] : -1;
}
/* How many segments follow the unit's own. */
static inline int32_t s1f_num_children(const s1f_shape *shape, s1f_unit unit)
{
    int32_t count = 0;
    for (unit.segment = s1f_first_child(shape, unit); unit.segment >= 0; count++)
        unit.segment = s1f_next_sibling(shape, unit);
    return count;
}
/* Whether the unit's segment, or one below it, is the first below its parent that goes back: in a chain it always is.
 * Needs the marks of trees. */
static inline int s1f_opens_parent(const s1f_shape *shape, s1f_unit unit)
{
    return shape->trees == NULL || (shape->marks[s1f_cell_of_all(shape, unit)] & S1F_MARK_OPENS_PARENT) != 0;
}

/* What becomes of the activations that F of a cell saves. */
typedef enum { S1F_CELL_KEPT, S1F_CELL_RECOMPUTED, S1F_CELL_MOVED, S1F_NUM_CELL_KINDS } s1f_cell_kind;

static inline s1f_cell_kind s1f_kind_of_cell(const s1f_shape *shape, s1f_unit unit)
{
    return s1f_cell_has(shape, unit, S1F_PRODUCT_RECOMPUTED) ? S1F_CELL_RECOMPUTED
           : s1f_cell_has(shape, unit, S1F_PRODUCT_COMING)   ? S1F_CELL_MOVED
                                                             : S1F_CELL_KEPT;
}
/* Row of a unit's stage and pass in tables with S1F_MAX_PASSES rows per stage. */
static inline int64_t s1f_kind(s1f_unit unit)
{
    return (int64_t)unit.stage * S1F_MAX_PASSES + unit.pass;
}

/* -- inputs -------------------------------------------------------------------------------------------------------- */

typedef enum {
    S1F_COMES_SAVED,     /* left behind by another pass of the same cell */
    S1F_COMES_IN_CACHE,  /* keys, values, carried state or their gradients, from another segment at the same stage */
    S1F_COMES_FROM_STAGE /* from another stage: a message between two ranks, handed over within one */
} s1f_way;

/* Kinds of results that go from stage to stage. */
typedef enum {
    S1F_CHANNEL_ACTIVATION = 0,      /* to the next stage */
    S1F_CHANNEL_GRADIENT = 1,        /* to the stage before */
    S1F_CHANNEL_HIDDEN = 2,          /* the last stage's output, to every shard of the vocabulary */
    S1F_CHANNEL_STATISTICS = 3,      /* from shard to shard */
    S1F_CHANNEL_HIDDEN_GRADIENT = 4, /* from every shard to the last stage */
    S1F_CHANNEL_EMBEDDED = 5,        /* from every shard to the first stage */
    S1F_CHANNEL_EMBED_GRADIENT = 6,  /* from the first stage to every shard */
    S1F_MAX_CHANNELS = 8
} s1f_channel;

typedef struct {
    s1f_unit maker;      /* its pass is the first that makes `product`; in an order another pass may make it */
    s1f_product product; /* the product that is waited for */
    s1f_way way;
    s1f_channel channel;  /* of a product from another stage */
    s1f_product kept_for; /* of a product from another stage: the last product made from it; then its place is free */
    const char *rule;     /* the dependency as a sentence */
} s1f_unit_input;

/* Walks over the inputs of a unit: for (s1f_inputs i = s1f_inputs_of(shape, unit); s1f_next_input(&i, &input);) ...
 * Dependencies that follow from others are left out: B waits for F of its own segment, and so for those before it. */
typedef struct {
    const s1f_shape *shape;
    s1f_unit unit;
    int32_t rule, element;
} s1f_inputs;

static inline s1f_inputs s1f_inputs_of(const s1f_shape *shape, s1f_unit unit)
{
    return (s1f_inputs){shape, unit, 0, 0};
}
int s1f_next_input(s1f_inputs *inputs, s1f_unit_input *input); /* 0: no more */

/* Whether the unit reads the activations that its cell's L brings back. */
static inline int s1f_reads_moved(const s1f_shape *shape, s1f_unit unit)
{
    return s1f_pass_makes(unit.pass, S1F_PRODUCT_INPUT_GRADIENT) && s1f_cell_has(shape, unit, S1F_PRODUCT_COMING);
}

/* Most units of a rank on their way out, from O to A, and on their way back, from L to the backward: bounds the bytes
 * in between. Two may come back at once: the unit that is read next, and the unit behind it. */
enum { S1F_MOST_LEAVING = 1, S1F_MOST_COMING = 2 };

/* -- lifetimes ----------------------------------------------------------------------------------------------------- */

/* Memory that a stage holds from the begin of one unit to the end of another. */
typedef enum {
    /* Both but while they are away: from the end of A to L. */
    S1F_HOLDS_SAVED = 0,           /* activations of F, or R, that W does not read: to the end of B or I */
    S1F_HOLDS_FOR_WEIGHT = 1,      /* activations that W reads: to the end of B or W. The unit is live meanwhile */
    S1F_HOLDS_OUTPUT_GRADIENT = 2, /* gradients of outputs that I leaves for W */
    S1F_HOLDS_KV = 3,              /* keys and values of a micro-batch: F of segment 0 to B or I of segment 0 */
    S1F_HOLDS_KV_GRADIENT = 4,     /* their gradients: the first B or I of the micro-batch to that of segment 0 */
    S1F_HOLDS_INPUT = 5,           /* what F of a recomputed unit keeps for R: from F to the end of B or I */
    S1F_HOLDS_SHARD_LOGITS = 6,    /* logits of a shard: from S to the end of T */
    S1F_HOLDS_KV_ROWS = 7,         /* the unit's own keys and values, where pages go back: F to the end of B or I */
    S1F_HOLDS_STAYING = 8,         /* tensors that neither move nor are recomputed: F to the end of B or I */
    /* gradients of the unit's own keys and values, where pages go back: B or I of a segment that none follows, which
     * takes those of its path, to the unit's own */
    S1F_HOLDS_KV_GRADIENT_ROWS = 9,
    S1F_NUM_HOLDINGS = 10
} s1f_holding;

/* A table of seconds or bytes (table.h) has one value for each rank, stage, pair, segment or cell. */
typedef enum {
    S1F_PER_RANK,
    S1F_PER_STAGE,
    S1F_PER_PAIR, /* of neighbouring stages */
    S1F_PER_SEGMENT,
    S1F_PER_CELL /* of all stages, as its column in table.h; seconds of passes are all given so */
} s1f_per;

/* Facts of a holding, for whoever reads or shows bytes. */
typedef struct {
    const char *name; /* the name of its bytes, for callers */
    s1f_per per;
    s1f_holding counts_with; /* peaks add up the holdings that count with this holding, under its name */
    /* Whether the taking unit takes memory for its own segment and all earlier ones, which the units of these segments
     * free one by one; in trees, for the segments of its path that have none yet. */
    int32_t takes_path;
} s1f_holding_facts;

s1f_holding_facts s1f_facts_of_holding(s1f_holding holding);

typedef struct { /* bits (1 << s1f_holding) */
    uint32_t takes, frees;
} s1f_lifetimes;

/* Bits say where a unit's segment stands in its micro-batch; in a chain the last segment is the last forward, the first
 * one back and the leaf. */
enum {
    S1F_STANDS_FIRST = 1, /* the segment has no parent */
    S1F_STANDS_LAST = 2,  /* the last segment forward; of a pass that goes back, the first */
    S1F_STANDS_LEAF = 4,  /* the segment has no child */
    S1F_NUM_STANDS = 8
};

/* Lifetimes of all units of an order, by the pass, by the place of the segment, and by what becomes of the activations
 * that F saves. */
typedef struct {
    s1f_shape shape;
    s1f_lifetimes of[S1F_NUM_CELL_KINDS][S1F_MAX_PASSES][S1F_NUM_STANDS];
} s1f_lifetime_table;

/* If an order has no backward, what F saved ends with F, and keys and values with F of the last segment. What the
 * shape borrows must outlive the table. */
s1f_lifetime_table s1f_lifetimes_of(const s1f_shape *shape);
/* is_end: whether it has the last number, which counts where there are no marks. */
int s1f_stand_in_tree(const s1f_shape *shape, s1f_unit unit, int is_end);
static inline int s1f_stand_of(const s1f_shape *shape, s1f_unit unit)
{
    int is_first = unit.segment == 0, is_end = unit.segment + 1 == s1f_segments_of(shape, unit.microbatch);
    return shape->trees != NULL ? s1f_stand_in_tree(shape, unit, is_end)
                                : S1F_STANDS_FIRST * is_first | (S1F_STANDS_LAST | S1F_STANDS_LEAF) * is_end;
}
/* The lifetimes of a unit whose cell were of this kind. */
static inline s1f_lifetimes s1f_lifetimes_as(const s1f_lifetime_table *table, s1f_unit unit, s1f_cell_kind kind)
{
    return table->of[kind][unit.pass][s1f_stand_of(&table->shape, unit)];
}
static inline s1f_lifetimes s1f_unit_lifetimes(const s1f_lifetime_table *table, s1f_unit unit)
{
    return s1f_lifetimes_as(table, unit, s1f_kind_of_cell(&table->shape, unit));
}

/* Whether the unit of a cell is live from the start of this unit on, or no more from its end. */
static inline int s1f_begins_to_live(s1f_lifetimes lifetimes)
{
    return lifetimes.takes >> S1F_HOLDS_FOR_WEIGHT & 1;
}
static inline int s1f_ends_to_live(s1f_lifetimes lifetimes)
{
    return lifetimes.frees >> S1F_HOLDS_FOR_WEIGHT & 1;
}

#endif
