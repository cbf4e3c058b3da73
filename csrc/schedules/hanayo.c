/* hanayo.c - waves: a micro-batch runs down and up the ranks w = v / 2 times. [Hanayo, arXiv:2308.15762]
 *
 * The placement is the paper's, the order a greedy one of ours for M = P: a free rank takes the oldest micro-batch's B,
 * else the F of its deepest stage that is ready. F = 1, B = 2 per rank and micro-batch: makespan 3 P + 2 (P - 1) for
 * w = 1, at most 3 P + 2 (P - 1) / w + 1 / w for w = 2 and 3 (seen for P up to 8); peak v P. */
#include "families.h"
#include "in_time.h"

typedef struct {
    const s1f_request *request;
    s1f_board board;
    int32_t *next[2]; /* F, B: [stage] micro-batch */
} builder;

static int is_ready(const builder *b, s1f_unit unit, double now)
{
    return unit.microbatch < b->request->num_microbatches && s1f_board_ready(&b->board, unit) <= now;
}

/* What a free rank does: the oldest micro-batch's B, else an F; 0: it waits. */
static int choose(void *context, int32_t rank, double now, s1f_unit *unit, double *seconds)
{
    builder *b = context;
    int32_t P = b->request->num_ranks, v = b->request->stages_per_rank;
    s1f_unit backward = {S1F_PASS_BACKWARD, 0, -1, 0}, forward = {S1F_PASS_FORWARD, 0, -1, 0};
    for (int32_t turn = v - 1; turn >= 0; turn--) { /* deeper stages first */
        int32_t stage = turn * P + (turn % 2 == 0 ? rank : P - 1 - rank);
        s1f_unit back = {S1F_PASS_BACKWARD, stage, b->next[1][stage], 0};
        s1f_unit ahead = {S1F_PASS_FORWARD, stage, b->next[0][stage], 0};
        if (is_ready(b, back, now) && (backward.microbatch < 0 || back.microbatch < backward.microbatch))
            backward = back;
        if (is_ready(b, ahead, now) && forward.microbatch < 0)
            forward = ahead;
    }
    *unit = backward.microbatch >= 0 ? backward : forward;
    *seconds = unit->pass == S1F_PASS_FORWARD ? 1 : 2;
    b->next[unit->pass == S1F_PASS_BACKWARD][unit->stage] += unit->microbatch >= 0;
    return unit->microbatch >= 0;
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    builder b = {.request = request};
    s1f_pool pool = {0};
    s1f_schedule *schedule = NULL;
    S1F_TRY(s1f_schedule_place(request, S1F_PLACEMENT_V, &schedule));
    s1f_shape shape = s1f_schedule_shape(schedule);
    shape.products = s1f_products_of_passes(1u << S1F_PASS_FORWARD | 1u << S1F_PASS_BACKWARD);
    for (int pass = 0; pass < 2; pass++)
        b.next[pass] = s1f_pool_take(&pool, (size_t)shape.num_stages, sizeof *b.next[pass]);
    s1f_status status = s1f_board_create(&shape, &pool, &b.board);
    if (status == S1F_OK)
        status =
            s1f_run_in_time(&b.board, 2 * (int64_t)shape.num_stages * shape.num_microbatches, 0, choose, &b, schedule);
    s1f_pool_free(&pool);
    return s1f_schedule_finish(schedule, status, out);
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->stages_per_rank % 2 != 0)
        return "v = 2 w";
    if (request->num_microbatches != request->num_ranks)
        return "M = P";
    return request->num_segments == 1 ? NULL : "k = 1";
}

const s1f_family s1f_family_hanayo = {
    .whole = {"hanayo", "waves: down and up the ranks v / 2 times, backward first",
              "Hanayo, arXiv:2308.15762, for the placement", "M = P, v = 2 w, k = 1"},
    .stages_per_rank = 2,
    .takes_more_stages = 1,
    .takes_equal_rows = 1,
    .placement = S1F_PLACEMENT_V,
    .broken_rule = broken_rule,
    .build = build,
};
