/* unit.c - the tables of passes, inputs and lifetimes. A new pass is a row in each that concerns it. */
#include "unit.h"

#include <stdio.h>

#define BIT(x) (1u << (x))

#define F BIT(S1F_PASS_FORWARD)
#define B BIT(S1F_PASS_BACKWARD)
#define I BIT(S1F_PASS_BACKWARD_INPUT)
#define W BIT(S1F_PASS_BACKWARD_WEIGHT)
#define R BIT(S1F_PASS_RECOMPUTE)
#define S BIT(S1F_PASS_STATISTICS)
#define T BIT(S1F_PASS_LOSS)
#define E BIT(S1F_PASS_EMBED)
#define G BIT(S1F_PASS_EMBED_GRADIENT)
#define O BIT(S1F_PASS_OUT)
#define A BIT(S1F_PASS_AWAY)
#define L BIT(S1F_PASS_LOAD)

#define OUTPUT S1F_PRODUCT_OUTPUT
#define INPUT_GRADIENT S1F_PRODUCT_INPUT_GRADIENT
#define WEIGHT_GRADIENT S1F_PRODUCT_WEIGHT_GRADIENT
#define RECOMPUTED S1F_PRODUCT_RECOMPUTED
#define STATISTICS S1F_PRODUCT_STATISTICS
#define LOSS S1F_PRODUCT_LOSS
#define EMBEDDED S1F_PRODUCT_EMBEDDED
#define EMBED_GRADIENT S1F_PRODUCT_EMBED_GRADIENT
#define LEAVING S1F_PRODUCT_LEAVING
#define AWAY S1F_PRODUCT_AWAY
#define COMING S1F_PRODUCT_COMING
#define GRADIENTS (BIT(INPUT_GRADIENT) | BIT(WEIGHT_GRADIENT))
#define OPTIONAL (BIT(RECOMPUTED) | BIT(LEAVING) | BIT(AWAY) | BIT(COMING))

/* -- passes -------------------------------------------------------------------------------------------------------- */

static const struct {
    char letter;
    const char *name, *text;
    uint32_t products;
} passes[] = {
    [S1F_PASS_FORWARD] = {'F', "forward", "forward", BIT(OUTPUT)},
    [S1F_PASS_BACKWARD] = {'B', "backward", "backward", GRADIENTS},
    [S1F_PASS_BACKWARD_INPUT] = {'I', "input", "input gradient", BIT(INPUT_GRADIENT)},
    [S1F_PASS_BACKWARD_WEIGHT] = {'W', "weight", "weight gradient", BIT(WEIGHT_GRADIENT)},
    [S1F_PASS_RECOMPUTE] = {'R', "recompute", "recomputation", BIT(RECOMPUTED)},
    [S1F_PASS_STATISTICS] = {'S', "statistics", "logits of a shard", BIT(STATISTICS)},
    [S1F_PASS_LOSS] = {'T', "loss", "loss and gradients of a shard", BIT(LOSS)},
    [S1F_PASS_EMBED] = {'E', "embed", "rows of the embedding", BIT(EMBEDDED)},
    [S1F_PASS_EMBED_GRADIENT] = {'G', "embed_gradient", "gradients of the embedding", BIT(EMBED_GRADIENT)},
    [S1F_PASS_OUT] = {'O', "move_out", "move out", BIT(LEAVING)},
    [S1F_PASS_AWAY] = {'A', "away", "wait until away", BIT(AWAY)},
    [S1F_PASS_LOAD] = {'L', "move_in", "load", BIT(COMING)},
};
const int32_t s1f_num_passes = (int32_t)(sizeof passes / sizeof *passes);
_Static_assert(sizeof passes / sizeof *passes <= S1F_MAX_PASSES, "tables have no room for so many passes");

const char *s1f_pass_name(int32_t pass)
{
    return passes[pass].name;
}

const char *s1f_pass_text(int32_t pass)
{
    return passes[pass].text;
}

char s1f_pass_letter(int32_t pass)
{
    return pass >= 0 && pass < s1f_num_passes ? passes[pass].letter : '?';
}

int32_t s1f_pass_from_letter(char letter)
{
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        if (passes[pass].letter == letter)
            return pass;
    return -1;
}

void s1f_unit_text(s1f_unit unit, int with_stage, char *text, size_t bytes)
{
    char letter = s1f_pass_letter(unit.pass);
    if (with_stage)
        snprintf(text, bytes, "[%d]%c%d.%d", unit.stage, letter, unit.microbatch, unit.segment);
    else
        snprintf(text, bytes, "%c%d.%d", letter, unit.microbatch, unit.segment);
}

uint32_t s1f_pass_products(int32_t pass)
{
    return pass >= 0 && pass < s1f_num_passes ? passes[pass].products : 0;
}

uint32_t s1f_products_of_passes(uint32_t those)
{
    uint32_t products = BIT(OUTPUT); /* nothing goes back without it */
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        products |= those & BIT(pass) ? passes[pass].products : 0;
    if (products & (BIT(STATISTICS) | BIT(LOSS))) /* one is not there without the other */
        products |= BIT(STATISTICS) | BIT(LOSS);
    if (products & BIT(EMBED_GRADIENT))
        products |= BIT(EMBEDDED);
    if (products & (GRADIENTS | OPTIONAL | BIT(EMBED_GRADIENT))) /* R, L and G are for a backward */
        products |= GRADIENTS | (products & BIT(EMBEDDED) ? BIT(EMBED_GRADIENT) : 0);
    return products;
}

int s1f_pass_is_forward(int32_t pass)
{
    return (s1f_pass_products(pass) & (GRADIENTS | OPTIONAL | BIT(EMBED_GRADIENT))) == 0;
}

s1f_unit s1f_unit_of_cell(const s1f_shape *shape, s1f_pass pass, int32_t stage, int64_t cell)
{
    int32_t low = 0, behind = shape->num_microbatches; /* the micro-batch is among low .. behind - 1 */
    if (shape->first_cell == NULL)
        low = (int32_t)(cell / shape->num_segments);
    while (shape->first_cell != NULL && behind - low > 1) {
        int32_t middle = low + (behind - low) / 2;
        *(shape->first_cell[middle] <= cell ? &low : &behind) = middle;
    }
    return (s1f_unit){(int32_t)pass, stage, low, (int32_t)(cell - s1f_first_cell(shape, low))};
}

s1f_unit s1f_unit_going_back(const s1f_shape *shape, s1f_pass pass, int32_t stage, int64_t i)
{
    s1f_unit unit = s1f_unit_of_cell(shape, pass, stage, i);
    unit.segment = s1f_segments_of(shape, unit.microbatch) - 1 - unit.segment;
    return unit;
}

static int32_t first_maker(s1f_product product)
{
    int32_t pass = 0;
    while (!(passes[pass].products & BIT(product)))
        pass++;
    return pass;
}

/* -- inputs -------------------------------------------------------------------------------------------------------- */

/* Place of an input's maker, seen from the unit that waits. */
typedef enum {
    SAME_CELL, /* if the cell makes the product, where the product is optional */
    SEGMENT_BEFORE,
    EVERY_SEGMENT_BEHIND,
    STAGE_BEFORE,
    STAGE_BEHIND,
    LAST_STAGE,                  /* seen from a shard of the vocabulary */
    EVERY_SHARD,                 /* the same */
    EVERY_SHARD_FROM_LAST_STAGE, /* seen from the last stage */
    FIRST_STAGE,                 /* seen from a shard */
    EVERY_SHARD_FROM_FIRST_STAGE /* seen from the first stage */
} place;

static const struct {
    uint32_t passes; /* that wait */
    s1f_product product;
    place place;
    s1f_way way;
    s1f_channel channel;
    s1f_product kept_for;
    const char *rule;
} rules[] = {
    {F, OUTPUT, SEGMENT_BEFORE, S1F_COMES_IN_CACHE, 0, 0, "a segment goes forward after the one before it"},
    {F, OUTPUT, STAGE_BEFORE, S1F_COMES_FROM_STAGE, S1F_CHANNEL_ACTIVATION, WEIGHT_GRADIENT,
     "a stage goes forward after the stage before it"},
    {B | I, OUTPUT, SAME_CELL, S1F_COMES_SAVED, 0, 0, "a segment goes back after its own forward"},
    {R, OUTPUT, SAME_CELL, S1F_COMES_SAVED, 0, 0, "a unit is recomputed after its own forward"},
    {B | I, RECOMPUTED, SAME_CELL, S1F_COMES_SAVED, 0, 0, "a unit goes back after its recomputation"},
    {O, OUTPUT, SAME_CELL, S1F_COMES_SAVED, 0, 0, "what a unit saves leaves after its forward"},
    {A, LEAVING, SAME_CELL, S1F_COMES_SAVED, 0, 0, "what a unit saved is gone after it left"},
    {L, AWAY, SAME_CELL, S1F_COMES_SAVED, 0, 0, "what a unit saved comes back after it is gone"},
    {B | I, COMING, SAME_CELL, S1F_COMES_SAVED, 0, 0, "what was moved away comes back before it is read"},
    {B | I, INPUT_GRADIENT, EVERY_SEGMENT_BEHIND, S1F_COMES_IN_CACHE, 0, 0,
     "a segment goes back after the one behind it"},
    {B | I, INPUT_GRADIENT, STAGE_BEHIND, S1F_COMES_FROM_STAGE, S1F_CHANNEL_GRADIENT, WEIGHT_GRADIENT,
     "a stage goes back after the stage behind it"},
    {S, OUTPUT, LAST_STAGE, S1F_COMES_FROM_STAGE, S1F_CHANNEL_HIDDEN, LOSS,
     "a shard of the vocabulary comes after the last stage"},
    {T, STATISTICS, EVERY_SHARD, S1F_COMES_FROM_STAGE, S1F_CHANNEL_STATISTICS, LOSS,
     "the loss comes after every shard of the vocabulary"},
    {B | I, LOSS, EVERY_SHARD_FROM_LAST_STAGE, S1F_COMES_FROM_STAGE, S1F_CHANNEL_HIDDEN_GRADIENT, INPUT_GRADIENT,
     "the last stage goes back after the loss"},
    {F, EMBEDDED, EVERY_SHARD_FROM_FIRST_STAGE, S1F_COMES_FROM_STAGE, S1F_CHANNEL_EMBEDDED, OUTPUT,
     "the first stage goes forward after every shard of the embedding"},
    {G, INPUT_GRADIENT, FIRST_STAGE, S1F_COMES_FROM_STAGE, S1F_CHANNEL_EMBED_GRADIENT, EMBED_GRADIENT,
     "gradients of the embedding come after the first stage has gone back"},
    {W, INPUT_GRADIENT, SAME_CELL, S1F_COMES_SAVED, 0, 0, "a weight gradient comes after its input gradient"},
};
enum { NUM_RULES = sizeof rules / sizeof *rules };

static int move_to_stage(s1f_unit *unit, int32_t stage)
{
    unit->stage = stage;
    return 1;
}

static int move_to_segment(s1f_unit *unit, int32_t segment)
{
    unit->segment = segment;
    return segment >= 0;
}

/* Moves to the child behind the one of which *next tells, 0 at first, and makes *next tell of that. */
static int move_to_child(const s1f_shape *shape, int32_t *next, s1f_unit *unit)
{
    s1f_unit before = {unit->pass, unit->stage, unit->microbatch, *next};
    int32_t child = *next == 0 ? s1f_first_child(shape, *unit) : s1f_next_sibling(shape, before);
    *next = child - 1; /* whoever asks counts one up; no child is segment 0 */
    return move_to_segment(unit, child);
}

/* Moves `unit` to the cell of its i-th maker, where i counts from 0 or tells of the maker before; 0: there is none. */
static int move_to(const s1f_shape *shape, place where, int32_t *element, s1f_unit *unit)
{
    int is_shard = unit->stage < shape->num_ranks;
    int32_t i = *element;
    switch (where) {
    case SAME_CELL: return i == 0;
    case SEGMENT_BEFORE: return i == 0 && move_to_segment(unit, s1f_parent_of(shape, *unit));
    case EVERY_SEGMENT_BEHIND: return move_to_child(shape, element, unit);
    case STAGE_BEFORE: return i == 0 && unit->stage-- > 0;
    case STAGE_BEHIND: return i == 0 && ++unit->stage < shape->num_stages;
    case LAST_STAGE: return i == 0 && is_shard && move_to_stage(unit, shape->num_stages - 1);
    case EVERY_SHARD: return i < shape->num_ranks && is_shard && move_to_stage(unit, i);
    case FIRST_STAGE: return i == 0 && is_shard && move_to_stage(unit, 0);
    case EVERY_SHARD_FROM_FIRST_STAGE: return i < shape->num_ranks && unit->stage == 0 && move_to_stage(unit, i);
    case EVERY_SHARD_FROM_LAST_STAGE:
        return i < shape->num_ranks && unit->stage == shape->num_stages - 1 && move_to_stage(unit, i);
    }
    return 0;
}

int s1f_next_input(s1f_inputs *inputs, s1f_unit_input *input)
{
    if (passes[inputs->unit.pass].products & ~inputs->shape->products) /* no unit of such an order */
        return 0;
    for (; inputs->rule < NUM_RULES; inputs->rule++, inputs->element = 0) {
        int32_t r = inputs->rule;
        s1f_unit maker = inputs->unit;
        if (!(rules[r].passes & BIT(maker.pass)) || !s1f_shape_makes(inputs->shape, rules[r].product) ||
            (BIT(rules[r].product) & OPTIONAL && !s1f_cell_has(inputs->shape, maker, rules[r].product)) ||
            !move_to(inputs->shape, rules[r].place, &inputs->element, &maker))
            continue;
        inputs->element++;
        maker.pass = first_maker(rules[r].product);
        *input =
            (s1f_unit_input){maker, rules[r].product, rules[r].way, rules[r].channel, rules[r].kept_for, rules[r].rule};
        return 1;
    }
    return 0;
}

/* -- lifetimes ----------------------------------------------------------------------------------------------------- */

typedef enum { EACH, FIRST, LAST, LEAF } moment; /* segment of the micro-batch: s1f_stand_of */
typedef enum {
    ALWAYS,
    BETWEEN_TWO_PASSES, /* none if one pass makes both products */
    IF_RECOMPUTED,
    AS_SAVED /* of a recomputed unit it is taken by R; of a moved one it is freed by A, and taken again by L */
} when;

static const struct {
    const char *name;
    s1f_per per;
    s1f_holding counts_with;
    s1f_product taken_by, freed_by;
    moment taken_at, freed_at;
    when when;
} lifetimes[S1F_NUM_HOLDINGS] = {
    [S1F_HOLDS_SAVED] = {"activations", S1F_PER_CELL, S1F_HOLDS_SAVED, OUTPUT, INPUT_GRADIENT, EACH, EACH, AS_SAVED},
    [S1F_HOLDS_FOR_WEIGHT] = {"kept_activations", S1F_PER_CELL, S1F_HOLDS_SAVED, OUTPUT, WEIGHT_GRADIENT, EACH, EACH,
                              AS_SAVED},
    [S1F_HOLDS_OUTPUT_GRADIENT] = {"output_gradients", S1F_PER_CELL, S1F_HOLDS_OUTPUT_GRADIENT, INPUT_GRADIENT,
                                   WEIGHT_GRADIENT, EACH, EACH, BETWEEN_TWO_PASSES},
    [S1F_HOLDS_KV] = {"kv", S1F_PER_STAGE, S1F_HOLDS_KV, OUTPUT, INPUT_GRADIENT, FIRST, FIRST, ALWAYS},
    [S1F_HOLDS_KV_GRADIENT] = {"kv_gradients", S1F_PER_STAGE, S1F_HOLDS_KV_GRADIENT, INPUT_GRADIENT, INPUT_GRADIENT,
                               LAST, FIRST, ALWAYS},
    [S1F_HOLDS_INPUT] = {"inputs", S1F_PER_CELL, S1F_HOLDS_INPUT, OUTPUT, INPUT_GRADIENT, EACH, EACH, IF_RECOMPUTED},
    [S1F_HOLDS_SHARD_LOGITS] = {"shard_logits", S1F_PER_SEGMENT, S1F_HOLDS_SHARD_LOGITS, STATISTICS, LOSS, EACH, EACH,
                                ALWAYS},
    [S1F_HOLDS_KV_ROWS] = {"kv_rows", S1F_PER_CELL, S1F_HOLDS_KV, OUTPUT, INPUT_GRADIENT, EACH, EACH, ALWAYS},
    [S1F_HOLDS_STAYING] = {"staying", S1F_PER_CELL, S1F_HOLDS_INPUT, OUTPUT, INPUT_GRADIENT, EACH, EACH, ALWAYS},
    [S1F_HOLDS_KV_GRADIENT_ROWS] = {"kv_gradient_rows", S1F_PER_CELL, S1F_HOLDS_KV_GRADIENT, INPUT_GRADIENT,
                                    INPUT_GRADIENT, LEAF, EACH, ALWAYS},
};

s1f_holding_facts s1f_facts_of_holding(s1f_holding holding)
{
    int takes_path = lifetimes[holding].taken_at != EACH && lifetimes[holding].freed_at == EACH;
    return (s1f_holding_facts){lifetimes[holding].name, lifetimes[holding].per, lifetimes[holding].counts_with,
                               takes_path};
}

int s1f_stand_in_tree(const s1f_shape *shape, s1f_unit unit, int is_end)
{
    uint16_t mark = s1f_pass_is_forward(unit.pass) ? S1F_MARK_LAST_FORWARD : S1F_MARK_FIRST_BACKWARD;
    if (shape->marks != NULL)
        is_end = (shape->marks[s1f_cell_of_all(shape, unit)] & mark) != 0;
    return (unit.segment == 0 ? S1F_STANDS_FIRST : 0) | (is_end ? S1F_STANDS_LAST : 0) |
           (s1f_first_child(shape, unit) < 0 ? S1F_STANDS_LEAF : 0);
}

static s1f_lifetimes lifetimes_at(const s1f_shape *shape, s1f_cell_kind kind, int32_t pass, int stands)
{
    const int is_at[] = {[EACH] = 1,
                         [FIRST] = stands & S1F_STANDS_FIRST,
                         [LAST] = stands & S1F_STANDS_LAST,
                         [LEAF] = stands & S1F_STANDS_LEAF};
    s1f_lifetimes found = {0, 0};
    uint32_t made = passes[pass].products;
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++) {
        s1f_product taken_by = lifetimes[h].taken_by, freed_by = lifetimes[h].freed_by;
        moment freed_at = lifetimes[h].freed_at;
        if (!s1f_shape_makes(shape, freed_by)) { /* nothing comes after the forward */
            freed_by = taken_by;
            freed_at = freed_at == FIRST ? LAST : freed_at;
        }
        uint32_t takers = BIT(taken_by), freers = BIT(freed_by);
        if (lifetimes[h].when == AS_SAVED && kind == S1F_CELL_RECOMPUTED)
            takers = BIT(RECOMPUTED);
        if (lifetimes[h].when == AS_SAVED && kind == S1F_CELL_MOVED) {
            takers |= BIT(COMING);
            freers |= BIT(AWAY);
        }
        if ((lifetimes[h].when == IF_RECOMPUTED && kind != S1F_CELL_RECOMPUTED) ||
            (lifetimes[h].when == BETWEEN_TWO_PASSES && (made & BIT(taken_by)) && (made & BIT(freed_by))))
            continue;
        found.takes |= made & takers && is_at[lifetimes[h].taken_at] ? BIT(h) : 0;
        found.frees |= made & freers && is_at[freed_at] ? BIT(h) : 0;
    }
    return found;
}

s1f_lifetime_table s1f_lifetimes_of(const s1f_shape *shape)
{
    s1f_lifetime_table table = {.shape = *shape};
    for (int32_t pass = 0; pass < s1f_num_passes; pass++)
        for (int i = 0; i < S1F_NUM_STANDS * S1F_NUM_CELL_KINDS; i++)
            table.of[i / S1F_NUM_STANDS][pass][i % S1F_NUM_STANDS] =
                lifetimes_at(shape, (s1f_cell_kind)(i / S1F_NUM_STANDS), pass, i % S1F_NUM_STANDS);
    return table;
}
