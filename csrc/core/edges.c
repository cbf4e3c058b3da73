/* edges.c - asks every kind of unit for its inputs, and sorts the edges that they need by who uses them. */
#include "edges.h"

#include <stdlib.h>
#include <string.h>

enum { IN, OUT, FREED, NUM_ROLES };

typedef struct { /* a kind of unit uses an edge */
    int64_t kind;
    int32_t role, edge;
} use;

typedef struct {
    const s1f_shape *shape;
    s1f_edges *edges;
    use *uses;
    int64_t num_uses, room_for_uses, room_for_edges;
    int failed; /* no memory */
} builder;

static void *grown(builder *b, void *array, int64_t count, int64_t *room, size_t bytes)
{
    if (count < *room)
        return array;
    int64_t wanted = *room == 0 ? 64 : 2 * *room;
    void *larger = realloc(array, (size_t)wanted * bytes);
    if (larger == NULL) {
        b->failed = 1;
        return array;
    }
    *room = wanted;
    return larger;
}

static void add_use(builder *b, int32_t stage, int32_t pass, int32_t role, int32_t edge)
{
    b->uses = grown(b, b->uses, b->num_uses, &b->room_for_uses, sizeof *b->uses);
    if (!b->failed)
        b->uses[b->num_uses++] = (use){(int64_t)stage * S1F_MAX_PASSES + pass, role, edge};
}

/* The edge of an input, new if no other pass of the stage has asked for it; `first`: of the stage's edges. -1: no
 * memory. */
static int32_t edge_of(builder *b, const s1f_unit_input *input, int32_t stage, int32_t first)
{
    const s1f_shape *shape = b->shape;
    s1f_edges *edges = b->edges;
    for (int32_t e = first; e < edges->num_edges; e++)
        if (edges->edges[e].source_stage == input->maker.stage)
            return e;
    edges->edges = grown(b, edges->edges, edges->num_edges, &b->room_for_edges, sizeof *edges->edges);
    if (b->failed)
        return -1;
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
    for (int32_t pass = 0; pass < s1f_num_passes && !b->failed; pass++) {
        s1f_unit_input input;
        s1f_inputs inputs = s1f_inputs_of(b->shape, (s1f_unit){pass, stage, 0, 0});
        while (!b->failed && s1f_next_input(&inputs, &input)) {
            if (input.way != S1F_COMES_FROM_STAGE || input.channel != channel ||
                b->shape->rank_of_stage[input.maker.stage] == b->shape->rank_of_stage[stage])
                continue;
            int32_t edge = edge_of(b, &input, stage, first);
            if (edge < 0)
                return;
            add_use(b, stage, pass, IN, edge);
            if (!s1f_shape_makes(b->shape, input.kept_for)) /* nothing comes after the unit itself */
                add_use(b, stage, pass, FREED, edge);
        }
    }
}

/* Sorts the uses by kind and role; edges ascend, as they were found. */
static s1f_status fill_lists(builder *b)
{
    s1f_edges *edges = b->edges;
    int64_t num_kinds = (int64_t)b->shape->num_stages * S1F_MAX_PASSES, num_lists = num_kinds * NUM_ROLES;
    int64_t *begin = calloc((size_t)num_lists + 1, sizeof *begin);
    edges->kinds = calloc((size_t)num_kinds, sizeof *edges->kinds);
    edges->lists = malloc((size_t)(b->num_uses + 1) * sizeof *edges->lists); /* + 1: malloc(0) may be NULL */
    if (begin == NULL || edges->kinds == NULL || edges->lists == NULL) {
        free(begin);
        return s1f_fail(S1F_ERR_MEMORY, "no memory for the edges of %d stages", (int)b->shape->num_stages);
    }
    for (int64_t i = 0; i < b->num_uses; i++)
        begin[b->uses[i].kind * NUM_ROLES + b->uses[i].role + 1]++;
    for (int64_t list = 0; list < num_lists; list++)
        begin[list + 1] += begin[list];
    for (int64_t kind = 0; kind < num_kinds; kind++) {
        s1f_edge_list lists[NUM_ROLES];
        for (int role = 0; role < NUM_ROLES; role++) {
            int64_t list = kind * NUM_ROLES + role;
            lists[role] = (s1f_edge_list){edges->lists + begin[list], (int32_t)(begin[list + 1] - begin[list])};
        }
        edges->kinds[kind] = (s1f_kind_edges){lists[IN], lists[OUT], lists[FREED]};
    }
    for (int64_t i = 0; i < b->num_uses; i++)
        edges->lists[begin[b->uses[i].kind * NUM_ROLES + b->uses[i].role]++] = b->uses[i].edge;
    free(begin);
    return S1F_OK;
}

s1f_status s1f_edges_create(const s1f_shape *shape, s1f_edges **out)
{
    builder b = {.shape = shape, .edges = calloc(1, sizeof *b.edges)};
    b.failed = b.edges == NULL;
    for (int channel = 0; channel < S1F_MAX_CHANNELS && !b.failed; channel++)
        for (int32_t stage = 0; stage < shape->num_stages && !b.failed; stage++)
            add_edges(&b, (s1f_channel)channel, stage);
    s1f_status status = b.failed
                            ? s1f_fail(S1F_ERR_MEMORY, "no memory for the edges of %d stages", (int)shape->num_stages)
                            : fill_lists(&b);
    free(b.uses);
    if (status != S1F_OK) {
        s1f_edges_free(b.edges);
        return status;
    }
    *out = b.edges;
    return S1F_OK;
}

void s1f_edges_free(s1f_edges *edges)
{
    if (edges == NULL)
        return;
    free(edges->lists);
    free(edges->kinds);
    free(edges->edges);
    free(edges);
}
