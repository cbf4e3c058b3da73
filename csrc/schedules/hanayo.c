/* hanayo.c - waves: a micro-batch runs down and up the ranks w = v / 2 times. [Hanayo, arXiv:2308.15762]
 *
 * The placement is the paper's, the order a greedy one of ours for M = P: a free rank takes the oldest micro-batch's B,
 * else the F of its deepest stage that is ready. F = 1, B = 2 per rank and micro-batch: makespan 3 P + 2 (P - 1) for
 * w = 1, at most 3 P + 2 (P - 1) / w + 1 / w for w = 2 and 3 (seen for P up to 8); peak v P. */
#include "families.h"

#include <stdlib.h>

enum { FORWARD = 1, BACKWARD = 2 }; /* seconds of F and B */

typedef struct {
    const s1f_request *request;
    int64_t now;                           /* seconds */
    int64_t *forward_end, *backward_end;   /* [stage * M + micro-batch], INT64_MAX: not started */
    int32_t *next_forward, *next_backward; /* [stage] micro-batch */
    int64_t *free;                         /* [rank] when its unit ends */
    s1f_schedule *out;
} walk;

static int64_t *end_of(const walk *w, int64_t *ends, int32_t stage, int32_t microbatch)
{
    return &ends[(int64_t)stage * w->request->num_microbatches + microbatch];
}

static int32_t num_stages(const walk *w)
{
    return w->request->num_ranks * w->request->stages_per_rank;
}

static int is_ready(const walk *w, s1f_unit unit)
{
    int32_t stage = unit.stage, m = unit.microbatch;
    if (m == w->request->num_microbatches)
        return 0;
    if (unit.pass == S1F_PASS_FORWARD)
        return stage == 0 || *end_of(w, w->forward_end, stage - 1, m) <= w->now;
    return *end_of(w, w->forward_end, stage, m) <= w->now &&
           (stage == num_stages(w) - 1 || *end_of(w, w->backward_end, stage + 1, m) <= w->now);
}

/* What a free rank does: the oldest micro-batch's B, else an F; 0: it waits. */
static int choose(const walk *w, int32_t rank, s1f_unit *unit)
{
    int32_t P = w->request->num_ranks, v = w->request->stages_per_rank;
    s1f_unit backward = {S1F_PASS_BACKWARD, 0, -1, 0}, forward = {S1F_PASS_FORWARD, 0, -1, 0};
    for (int32_t turn = v - 1; turn >= 0; turn--) { /* deeper stages first */
        int32_t stage = turn * P + (turn % 2 == 0 ? rank : P - 1 - rank);
        s1f_unit b = {S1F_PASS_BACKWARD, stage, w->next_backward[stage], 0};
        s1f_unit f = {S1F_PASS_FORWARD, stage, w->next_forward[stage], 0};
        if (is_ready(w, b) && (backward.microbatch < 0 || b.microbatch < backward.microbatch))
            backward = b;
        if (is_ready(w, f) && forward.microbatch < 0)
            forward = f;
    }
    *unit = backward.microbatch >= 0 ? backward : forward;
    return unit->microbatch >= 0;
}

static s1f_status start(walk *w, int32_t rank, s1f_unit unit)
{
    int is_forward = unit.pass == S1F_PASS_FORWARD;
    w->free[rank] = w->now + (is_forward ? FORWARD : BACKWARD);
    *end_of(w, is_forward ? w->forward_end : w->backward_end, unit.stage, unit.microbatch) = w->free[rank];
    ++*(is_forward ? &w->next_forward[unit.stage] : &w->next_backward[unit.stage]);
    return s1f_schedule_append(w->out, unit);
}

/* Whoever is free goes on, so the walk never stops short. */
static s1f_status run(walk *w)
{
    int64_t left = 2 * (int64_t)num_stages(w) * w->request->num_microbatches;
    s1f_status status = S1F_OK;
    for (w->now = 0; left > 0 && status == S1F_OK; w->now++)
        for (int32_t rank = 0; rank < w->request->num_ranks && status == S1F_OK; rank++) {
            s1f_unit unit;
            if (w->free[rank] > w->now || !choose(w, rank, &unit))
                continue;
            status = start(w, rank, unit);
            left--;
        }
    return status;
}

static s1f_status build(const s1f_request *request, s1f_schedule **out)
{
    walk w = {.request = request};
    size_t stages = (size_t)num_stages(&w), cells = stages * (size_t)request->num_microbatches;
    s1f_status status = s1f_schedule_place(request, s1f_placement_wave, &w.out);
    if (status != S1F_OK)
        return status;
    w.forward_end = malloc(cells * sizeof *w.forward_end);
    w.backward_end = malloc(cells * sizeof *w.backward_end);
    w.next_forward = calloc(stages, sizeof *w.next_forward);
    w.next_backward = calloc(stages, sizeof *w.next_backward);
    w.free = calloc((size_t)request->num_ranks, sizeof *w.free);
    if (!w.forward_end || !w.backward_end || !w.next_forward || !w.next_backward || !w.free) {
        status = s1f_fail(S1F_ERR_MEMORY, "no memory to order %zu stages", stages);
        goto done;
    }
    for (size_t i = 0; i < cells; i++)
        w.forward_end[i] = w.backward_end[i] = INT64_MAX;
    if ((status = run(&w)) == S1F_OK) {
        *out = w.out;
        w.out = NULL;
    }

done:
    free(w.free);
    free(w.next_backward);
    free(w.next_forward);
    free(w.backward_end);
    free(w.forward_end);
    s1f_schedule_free(w.out);
    return status;
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
    .facts = {.name = "hanayo",
              .description = "waves: down and up the ranks v / 2 times, backward first",
              .source = "Hanayo, arXiv:2308.15762, for the placement",
              .validity = "M = P, v = 2 w, k = 1",
              .stages_per_rank = 2},
    .broken_rule = broken_rule,
    .build = build,
};
