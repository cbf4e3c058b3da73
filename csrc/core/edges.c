/* edges.c - asks every kind of unit for its inputs, and sorts the edges that they need by who uses them. */
#include "edges.h"

enum { IN, OUT, FREED, NUM_ROLES };
enum { MOST_USES = 3 * S1F_MAX_PASSES }; /* of one edge */

typedef struct { /* a kind of unit uses an edge */
    int64_t kind;
    int32_t role, edge;
} use;

typedef struct {
    const s1f_shape *shape;
    s1f_edges *edges;
    use *uses;
    int64_t num_uses;
} builder;

static void add_use(builder *b, int32_t stage, int32_t pass, int32_t role, int32_t edge)
{
    b->uses[b->num_uses++] = (use){(int64_t)stage * S1F_MAX_PASSES + pass, role, edge};
}

/* The edge of an input, new if no other pass of the stage has asked for it; `first`: of the stage's edges. */
static int32_t edge_of(builder *b, const s1f_unit_input *input, int32_t stage, int32_t first)
{
    const s1f_shape *shape = b->shape;
    s1f_edges *edges = b->edges;
    for (int32_t e = first; e < edges->num_edges; e++)
        if (edges->edges[e].source_stage == input->maker.stage)
            return e;
    int32_t edge = edges->num_edges++;
    edges->edges[edge] = (s1f_edge){
        .channel = (int32_t)input->channel,
        .product = (int32_t)input->product,
        .source_stage = input->maker.stage,
        .destination_stage = stage,
        .source_rank = shape->rank_of_stage[input->maker.stage],
        .destination_rank = shape->rank_of_stage[stage],
        .num_messages = s1f_num_cells(shape),
    };
    for (int32_t pass = 0; pass < s1f_num_passes; pass++) {
        if (s1f_pass_makes(pass, input->product))
            add_use(b, input->maker.stage, pass, OUT, edge);
        if (s1f_shape_makes(shape, input->kept_for) && s1f_pass_makes(pass, input->kept_for))
            add_use(b, stage, pass, FREED, edge);
    }
    return edge;
}

static void add_edges(builder *b, s1f_channel channel, int32_t stage)
{
    int32_t first = b->edges->num_edges;
    for (int32_t pass = 0; pass < s1f_num_passes; pass++) {
        s1f_unit_input input;
        s1f_inputs inputs = s1f_inputs_of(b->shape, (s1f_unit){pass, stage, 0, 0});
        while (s1f_next_input(&inputs, &input)) {
            if (input.way != S1F_COMES_FROM_STAGE || input.channel != channel ||
                b->shape->rank_of_stage[input.maker.stage] == b->shape->rank_of_stage[stage])
                continue;
            int32_t edge = edge_of(b, &input, stage, first);
            add_use(b, stage, pass, IN, edge);
            if (!s1f_shape_makes(b->shape, input.kept_for)) /* nothing comes after the unit itself */
                add_use(b, stage, pass, FREED, edge);
        }
    }
}

/* Sorts the uses by kind and role; edges ascend, as they were found. begin: [kind][role], and one more, zeros. */
static void fill_lists(builder *b, int64_t num_kinds, int32_t *lists, int64_t *begin)
{
    for (int64_t i = 0; i < b->num_uses; i++)
        begin[b->uses[i].kind * NUM_ROLES + b->uses[i].role + 1]++;
    for (int64_t list = 0; list < num_kinds * NUM_ROLES; list++)
        begin[list + 1] += begin[list];
    for (int64_t kind = 0; kind < num_kinds; kind++) {
        s1f_edge_list of_roles[NUM_ROLES];
        for (int role = 0; role < NUM_ROLES; role++) {
            int64_t list = kind * NUM_ROLES + role;
            of_roles[role] = (s1f_edge_list){lists + begin[list], (int32_t)(begin[list + 1] - begin[list])};
        }
        b->edges->kinds[kind] = (s1f_kind_edges){of_roles[IN], of_roles[OUT], of_roles[FREED]};
    }
    for (int64_t i = 0; i < b->num_uses; i++)
        lists[begin[b->uses[i].kind * NUM_ROLES + b->uses[i].role]++] = b->uses[i].edge;
}

/* Two edges into each stage; and where a vocabulary is spread, from and to each shard. */
static size_t most_edges(const s1f_shape *shape)
{
    size_t S = (size_t)shape->num_stages, P = (size_t)shape->num_ranks;
    int is_spread = s1f_shape_makes(shape, S1F_PRODUCT_STATISTICS) || s1f_shape_makes(shape, S1F_PRODUCT_EMBEDDED);
    return 2 * S + (is_spread ? P * (P + 4) : 0);
}

s1f_status s1f_edges_create(const s1f_shape *shape, s1f_pool *pool, s1f_edges **out)
{
    s1f_pool scratch = {0};
    size_t num_kinds = (size_t)shape->num_stages * S1F_MAX_PASSES, most = most_edges(shape);
    builder b = {.shape = shape, .edges = s1f_pool_take(pool, 1, sizeof *b.edges)};
    b.uses = s1f_pool_take(&scratch, most * MOST_USES, sizeof *b.uses);
    int64_t *begin = s1f_pool_take(&scratch, num_kinds * NUM_ROLES + 1, sizeof *begin);
    if (b.edges != NULL) {
        b.edges->edges = s1f_pool_take(pool, most, sizeof *b.edges->edges);
        b.edges->kinds = s1f_pool_take(pool, num_kinds, sizeof *b.edges->kinds);
    }
    s1f_status status = s1f_pool_status(scratch.is_short ? &scratch : pool, "the edges of stages");
    for (int channel = 0; channel < S1F_MAX_CHANNELS && status == S1F_OK; channel++)
        for (int32_t stage = 0; stage < shape->num_stages; stage++)
            add_edges(&b, (s1f_channel)channel, stage);
    if (status == S1F_OK) {
        int32_t *lists = s1f_pool_take(pool, (size_t)b.num_uses, sizeof *lists);
        status = s1f_pool_status(pool, "the edges of stages");
        if (status == S1F_OK)
            fill_lists(&b, (int64_t)num_kinds, lists, begin);
    }
    s1f_pool_free(&scratch);
    if (status == S1F_OK)
        *out = b.edges;
    return status;
}
