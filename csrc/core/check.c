/* check.c - holds an order to the rules of check.h. */
#include "check.h"

#include "walk.h"

#include <stdio.h>

enum { UNIT_TEXT_BYTES = 64, LINK_TEXT_BYTES = 2 * UNIT_TEXT_BYTES + 96, CYCLE_TEXT_BYTES = 1024 };

typedef struct {
    const s1f_schedule *schedule;
    s1f_shape shape;
    int shows_stages;
    s1f_lifetime_table lifetimes;
    s1f_pool pool;                        /* of all arrays */
    s1f_walk walk;                        /* of all ranks, in search of a cycle */
    int64_t num_cells;                    /* of all stages */
    int64_t *number_of[S1F_MAX_PRODUCTS]; /* [cell of all stages]: 1 + position, in the order of its rank, of the unit
                                             that makes the product; 0: absent */
} table;

static int64_t cell(const table *t, s1f_unit unit)
{
    return s1f_cell_of_all(&t->shape, unit);
}

static int32_t rank_of(const table *t, s1f_unit unit)
{
    return t->shape.rank_of_stage[unit.stage];
}

/* The unit that makes a product of the cell of `unit`, which some unit does. */
static s1f_unit maker_of(const table *t, s1f_product product, s1f_unit unit)
{
    int64_t num_units;
    return s1f_schedule_units(t->schedule, rank_of(t, unit), &num_units)[t->number_of[product][cell(t, unit)] - 1];
}

typedef struct {
    char text[UNIT_TEXT_BYTES];
} unit_name;

static unit_name name_of(const table *t, s1f_unit unit)
{
    unit_name name;
    s1f_unit_text(unit, t->shows_stages, name.text, sizeof name.text);
    return name;
}

/* -- each unit once ------------------------------------------------------------------------------------------------ */

static s1f_status fail_twice(const table *t, s1f_position at, s1f_product product)
{
    s1f_unit unit = at.unit, earlier = maker_of(t, product, unit);
    if (earlier.pass == unit.pass)
        return s1f_fail(S1F_ERR_SCHEDULE,
                        "each unit runs once: %s stands twice in the order of rank %d, at positions %lld and %lld",
                        name_of(t, unit).text, at.rank, (long long)(t->number_of[product][cell(t, unit)] - 1),
                        (long long)(at.number - 1));
    int is_whole = (s1f_pass_products(unit.pass) & ~s1f_pass_products(earlier.pass)) != 0;
    return s1f_fail(S1F_ERR_SCHEDULE,
                    "each unit runs once: rank %d runs both %s, the whole backward, and %s, a part of it", at.rank,
                    name_of(t, is_whole ? unit : earlier).text, name_of(t, is_whole ? earlier : unit).text);
}

static s1f_status fill_once(table *t)
{
    for (s1f_position at = {0}; s1f_next_unit(t->schedule, &at);)
        for (int product = 0; product < S1F_MAX_PRODUCTS; product++) {
            if (!s1f_pass_makes(at.unit.pass, (s1f_product)product))
                continue;
            int64_t *number = &t->number_of[product][cell(t, at.unit)];
            if (*number != 0)
                return fail_twice(t, at, (s1f_product)product);
            *number = at.number;
        }
    return S1F_OK;
}

/* Names the unit that is to make a product: one that makes nothing of its cell that is there already. */
static s1f_status fail_missing(const table *t, s1f_unit unit, s1f_product product)
{
    uint32_t present = 0;
    for (int other = 0; t->number_of[0] != NULL && other < S1F_MAX_PRODUCTS; other++)
        if (s1f_shape_makes(&t->shape, (s1f_product)other) && t->number_of[other][cell(t, unit)] != 0)
            present |= 1u << other;
    unit.pass = 0;
    while (!s1f_pass_makes(unit.pass, product) || (s1f_pass_products(unit.pass) & present) != 0)
        unit.pass++;
    return s1f_fail(S1F_ERR_SCHEDULE, "each unit runs once: %s is missing in the order of rank %d",
                    name_of(t, unit).text, rank_of(t, unit));
}

/* Fewer units than cells: a forward is missing, and one of the first num_units + 1. Memory stays linear in the units of
 * the order, however large an index a text names. */
static s1f_status fail_too_few(table *t, int64_t total)
{
    unsigned char *present = s1f_pool_take(&t->pool, (size_t)total + 1, 1);
    S1F_TRY(s1f_pool_status(&t->pool, "the rules of an order"));
    for (s1f_position at = {0}; s1f_next_unit(t->schedule, &at);)
        if (s1f_pass_makes(at.unit.pass, S1F_PRODUCT_OUTPUT) && cell(t, at.unit) <= total)
            present[cell(t, at.unit)] = 1;
    int64_t missing = 0;
    while (present[missing])
        missing++;
    return fail_missing(t, s1f_forward_of_cell(&t->shape, missing), S1F_PRODUCT_OUTPUT);
}

/* Activations that leave are away and come back; R never makes these again. */
static s1f_status check_optional(const table *t, int64_t i)
{
    const uint32_t moved = 1u << S1F_PRODUCT_LEAVING | 1u << S1F_PRODUCT_AWAY | 1u << S1F_PRODUCT_COMING;
    if (!(t->shape.marks[i] & moved))
        return S1F_OK;
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        if (moved >> product & 1 && !(t->shape.marks[i] >> product & 1))
            return fail_missing(t, s1f_forward_of_cell(&t->shape, i), (s1f_product)product);
    if (!(t->shape.marks[i] >> S1F_PRODUCT_RECOMPUTED & 1))
        return S1F_OK;
    s1f_unit unit = s1f_forward_of_cell(&t->shape, i);
    return s1f_fail(S1F_ERR_SCHEDULE, "a unit is recomputed or moved away: rank %d runs both %s and %s",
                    rank_of(t, unit), name_of(t, maker_of(t, S1F_PRODUCT_RECOMPUTED, unit)).text,
                    name_of(t, maker_of(t, S1F_PRODUCT_LEAVING, unit)).text);
}

/* Products of a shard of the vocabulary: cells of the first num_ranks stages alone have them. */
static const uint32_t of_shard = 1u << S1F_PRODUCT_STATISTICS | 1u << S1F_PRODUCT_LOSS | 1u << S1F_PRODUCT_EMBEDDED |
                                 1u << S1F_PRODUCT_EMBED_GRADIENT;

static s1f_status check_complete(const table *t)
{
    uint32_t needed = t->shape.products & ~s1f_optional_products();
    for (int64_t i = 0; i < t->num_cells; i++)
        for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
            if (needed >> product & 1 && t->number_of[product][i] == 0 &&
                (!(of_shard >> product & 1) || s1f_forward_of_cell(&t->shape, i).stage < t->shape.num_ranks))
                return fail_missing(t, s1f_forward_of_cell(&t->shape, i), (s1f_product)product);
    for (int64_t i = 0; t->shape.marks != NULL && i < t->num_cells; i++)
        S1F_TRY(check_optional(t, i));
    return S1F_OK;
}

/* -- the vocabulary ------------------------------------------------------------------------------------------------ */

s1f_status s1f_shape_check_shards(const s1f_shape *shape)
{
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        if (shape->rank_of_stage[rank] != rank)
            return s1f_fail(
                S1F_ERR_SCHEDULE,
                "a vocabulary is spread over stages that lie on the ranks of their numbers: stage %d lies on "
                "rank %d",
                (int)rank, (int)shape->rank_of_stage[rank]);
    return S1F_OK;
}

static s1f_status check_shards(const table *t)
{
    if (!s1f_shape_makes(&t->shape, S1F_PRODUCT_STATISTICS) && !s1f_shape_makes(&t->shape, S1F_PRODUCT_EMBEDDED))
        return S1F_OK;
    S1F_TRY(s1f_shape_check_shards(&t->shape));
    for (s1f_position at = {0}; s1f_next_unit(t->schedule, &at);)
        if (s1f_pass_products(at.unit.pass) & of_shard && at.unit.stage >= t->shape.num_ranks)
            return s1f_fail(
                S1F_ERR_SCHEDULE,
                "a rank holds one shard of the vocabulary, that of the stage of its number: rank %d runs %s",
                (int)at.rank, name_of(t, at.unit).text);
    return S1F_OK;
}

/* -- dependencies -------------------------------------------------------------------------------------------------- */

/* What a unit waits for comes before it in the order of their rank; between ranks the search for a cycle decides. */
static s1f_status check_program_order(const table *t)
{
    s1f_unit_input input;
    for (s1f_position at = {0}; s1f_next_unit(t->schedule, &at);)
        for (s1f_inputs inputs = s1f_inputs_of(&t->shape, at.unit); s1f_next_input(&inputs, &input);)
            if (rank_of(t, input.maker) == at.rank && t->number_of[input.product][cell(t, input.maker)] >= at.number)
                return s1f_fail(S1F_ERR_SCHEDULE, "%s: on rank %d %s comes before %s", input.rule, at.rank,
                                name_of(t, at.unit).text, name_of(t, maker_of(t, input.product, input.maker)).text);
    return S1F_OK;
}

/* -- cycles -------------------------------------------------------------------------------------------------------- */

/* The cell at the source of an edge whose result a unit waits for. */
static s1f_unit awaited_cell(const table *t, s1f_unit unit, int32_t edge)
{
    unit.stage = t->walk.edges->edges[edge].source_stage;
    return unit;
}

static int has_run(void *context, const s1f_stand *at, int32_t edge)
{
    const table *t = context;
    const s1f_edge *e = &t->walk.edges->edges[edge];
    int64_t num_units, number = t->number_of[e->product][cell(t, awaited_cell(t, *at->unit, edge))];
    const s1f_unit *units = s1f_schedule_units(t->schedule, e->source_rank, &num_units);
    return number <= t->walk.ranks[e->source_rank].next - units;
}

static const s1f_walk_rules order_rules = {.has_come = has_run};

/* Whoever follows who waits for whom, from any rank that got stuck, ends in a cycle: names it. */
static s1f_status fail_cycle(const table *t, int32_t rank)
{
    for (int32_t step = 0; step < t->walk.shape.num_ranks; step++)
        rank = s1f_walk_peer(&t->walk, rank);
    char cycle[CYCLE_TEXT_BYTES];
    size_t used = 0;
    int32_t first = rank;
    do {
        int32_t edge = t->walk.ranks[rank].waits_for, peer = s1f_walk_peer(&t->walk, rank);
        s1f_product product = (s1f_product)t->walk.edges->edges[edge].product;
        s1f_unit unit = *t->walk.ranks[rank].next;
        s1f_unit awaited = maker_of(t, product, awaited_cell(t, unit, edge));
        used += (size_t)snprintf(cycle + used, sizeof cycle - used,
                                 "%srank %d stands before %s and waits for %s of rank %d", used == 0 ? "" : "; ", rank,
                                 name_of(t, unit).text, name_of(t, awaited).text, peer);
        if (used + LINK_TEXT_BYTES > sizeof cycle) {
            snprintf(cycle + used, sizeof cycle - used, "; and so on round to rank %d", first);
            break;
        }
        rank = peer;
    } while (rank != first);
    return s1f_fail(S1F_ERR_SCHEDULE, "program order and transfers have no cycle: %s", cycle);
}

/* Runs all ranks against each other; what is left over is a cycle. */
static s1f_status check_no_cycle(table *t)
{
    s1f_edges *edges = NULL;
    S1F_TRY(s1f_edges_create(&t->shape, &t->pool, &edges));
    S1F_TRY(s1f_walk_create(t->schedule, &t->shape, edges, &t->pool, &t->walk));
    while (t->walk.num_ready > 0)
        s1f_walk_go(&t->walk, t->walk.ready[--t->walk.num_ready], order_rules, t);
    for (int32_t rank = 0; rank < t->shape.num_ranks; rank++)
        if (!s1f_walk_has_ended(&t->walk, rank))
            return fail_cycle(t, rank);
    return S1F_OK;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/* The first unit of a rank that takes what is still held where `now` begins. */
static s1f_unit oldest_live(const table *t, s1f_position now)
{
    s1f_position at = {.rank = now.rank};
    while (s1f_next_unit(t->schedule, &at) && at.number < now.number) {
        int is_away =
            s1f_pass_makes(at.unit.pass, S1F_PRODUCT_OUTPUT) && s1f_cell_has(&t->shape, at.unit, S1F_PRODUCT_COMING);
        s1f_product last = is_away                             ? S1F_PRODUCT_AWAY
                           : s1f_shape_has_backward(&t->shape) ? S1F_PRODUCT_WEIGHT_GRADIENT
                                                               : S1F_PRODUCT_OUTPUT;
        if (s1f_begins_to_live(s1f_unit_lifetimes(&t->lifetimes, at.unit)) &&
            (last == S1F_PRODUCT_OUTPUT || t->number_of[last][cell(t, at.unit)] >= now.number))
            break;
    }
    return at.unit;
}

static s1f_status fail_on_way(const table *t, s1f_position at, int most, const char *way)
{
    return s1f_fail(S1F_ERR_SCHEDULE, "at most %d of a rank's units are on their way %s: rank %d has %d at %s", most,
                    way, at.rank, most + 1, name_of(t, at.unit).text);
}

/* What is neither here nor in the tier is bounded. At the end of a rank all has come back. */
static s1f_status check_ways(const table *t)
{
    int leaving = 0, coming = 0;
    for (s1f_position at = {0}; s1f_next_unit(t->schedule, &at);) {
        leaving += s1f_pass_makes(at.unit.pass, S1F_PRODUCT_LEAVING);
        leaving -= s1f_pass_makes(at.unit.pass, S1F_PRODUCT_AWAY);
        coming += s1f_pass_makes(at.unit.pass, S1F_PRODUCT_COMING);
        coming -= s1f_reads_moved(&t->shape, at.unit);
        if (leaving > S1F_MOST_LEAVING)
            return fail_on_way(t, at, S1F_MOST_LEAVING, "out");
        if (coming > S1F_MOST_COMING)
            return fail_on_way(t, at, S1F_MOST_COMING, "back");
    }
    return S1F_OK;
}

/* At the end of a rank no unit is live. */
static s1f_status check_live_units(const table *t, int64_t max_live_units)
{
    int64_t live = 0;
    for (s1f_position at = {0}; s1f_next_unit(t->schedule, &at);) {
        s1f_lifetimes lifetimes = s1f_unit_lifetimes(&t->lifetimes, at.unit);
        if (s1f_begins_to_live(lifetimes) && ++live > max_live_units)
            return s1f_fail(S1F_ERR_SCHEDULE, "a rank holds at most %lld live units: rank %d holds %lld from %s to %s",
                            (long long)max_live_units, at.rank, (long long)live, name_of(t, oldest_live(t, at)).text,
                            name_of(t, at.unit).text);
        live -= s1f_ends_to_live(lifetimes);
    }
    return S1F_OK;
}

static s1f_status check_rules(table *t, int64_t max_live_units)
{
    for (int product = 0; product < S1F_MAX_PRODUCTS; product++)
        if (s1f_shape_makes(&t->shape, (s1f_product)product))
            t->number_of[product] = s1f_pool_take(&t->pool, (size_t)t->num_cells, sizeof(int64_t));
    S1F_TRY(s1f_pool_status(&t->pool, "the rules of an order"));
    S1F_TRY(s1f_schedule_full_shape(t->schedule, &t->pool, &t->shape));
    t->lifetimes = s1f_lifetimes_of(&t->shape);
    S1F_TRY(fill_once(t));
    S1F_TRY(check_shards(t));
    S1F_TRY(check_complete(t));
    S1F_TRY(check_program_order(t));
    S1F_TRY(check_ways(t));
    S1F_TRY(check_no_cycle(t));
    return max_live_units > 0 ? check_live_units(t, max_live_units) : S1F_OK;
}

s1f_status s1f_schedule_check(const s1f_schedule *schedule, int64_t max_live_units)
{
    if (max_live_units == 0 && s1f_schedule_is_checked(schedule))
        return S1F_OK;
    table t = {.schedule = schedule,
               .shape = s1f_schedule_shape(schedule),
               .shows_stages = s1f_schedule_shows_stages(schedule)};
    t.num_cells = t.shape.num_stages * s1f_num_cells(&t.shape);
    int64_t total = s1f_schedule_num_units(schedule);
    s1f_status status = total < t.num_cells ? fail_too_few(&t, total) : check_rules(&t, max_live_units);
    s1f_pool_free(&t.pool);
    if (status == S1F_OK)
        s1f_schedule_note_checked(schedule);
    return status;
}
