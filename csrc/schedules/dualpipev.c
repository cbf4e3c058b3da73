/* dualpipev.c - the micro-batches of a rank's first stage meet those on their way back in its second, so that F and B
 * take turns in the steady state: two stages per rank in a V. [DualPipe, DeepSeek-V3, arXiv:2412.19437; its V form is
 * DeepSeek's published DualPipeV]
 *
 * Warm-up and cool-down split some backwards and put their W off. F = I = W of one stage: bubble (P - 1) F,
 * peak 2 P + 1. There an F and the next B share the device at the same time; here they run one after the other.
 * M >= 2 P. */
#include "families.h"

#include <stdlib.h>

enum { DOWN, UP }; /* the rank's stage on the way from rank 0 to P - 1, and on the way back */

typedef struct {
    s1f_schedule *schedule;
    int32_t rank, stage[2];
    int32_t forwards[2], backwards[2]; /* [DOWN, UP] done so far */
    s1f_unit *put_off;                 /* W, oldest first */
    int64_t num_put_off, num_weights;
    s1f_status status; /* of the first append that failed; the rest do nothing */
} writer;

static void append(writer *w, s1f_unit unit)
{
    if (w->status == S1F_OK)
        w->status = s1f_schedule_append(w->schedule, unit);
}

static void forward(writer *w, int way)
{
    append(w, (s1f_unit){S1F_PASS_FORWARD, w->stage[way], w->forwards[way]++, 0});
}

static void backward(writer *w, int way)
{
    append(w, (s1f_unit){S1F_PASS_BACKWARD, w->stage[way], w->backwards[way]++, 0});
}

static void backward_input(writer *w, int way)
{
    s1f_unit unit = {S1F_PASS_BACKWARD_INPUT, w->stage[way], w->backwards[way]++, 0};
    append(w, unit);
    unit.pass = S1F_PASS_BACKWARD_WEIGHT;
    w->put_off[w->num_put_off++] = unit;
}

static void oldest_weight(writer *w)
{
    if (w->num_weights < w->num_put_off)
        append(w, w->put_off[w->num_weights++]);
}

static void forward_backward(writer *w, int forward_way)
{
    forward(w, forward_way);
    backward(w, forward_way == DOWN ? UP : DOWN);
}

static void warm_up(writer *w, int32_t P)
{
    int32_t behind = P - 1 - w->rank;
    for (int32_t i = 0; i < 2 * behind; i++)
        forward(w, DOWN);
    for (int32_t i = 0; i <= w->rank; i++) {
        forward(w, DOWN);
        forward(w, UP);
    }
    for (int32_t i = 0; i < behind; i++) {
        backward_input(w, UP);
        oldest_weight(w);
        forward(w, UP);
    }
}

static void steady(writer *w, int32_t P, int32_t M)
{
    for (int32_t i = 0; i < M - 2 * P + w->rank + 1; i++) {
        forward_backward(w, DOWN);
        forward_backward(w, UP);
    }
}

static void cool_down(writer *w, int32_t P)
{
    int32_t behind = P - 1 - w->rank;
    for (int32_t i = 0; i < behind; i++) {
        backward(w, UP);
        forward_backward(w, UP);
    }
    for (int32_t i = 0; i <= w->rank; i++) { /* the later half puts its W off */
        int is_late = 2 * i >= w->rank + 1;
        is_late ? backward_input(w, UP) : backward(w, UP);
        is_late = 2 * i >= w->rank;
        is_late ? backward_input(w, DOWN) : backward(w, DOWN);
    }
    for (int32_t i = 0; i < behind; i++) {
        oldest_weight(w);
        backward_input(w, DOWN);
    }
    while (w->num_weights < w->num_put_off)
        oldest_weight(w);
}

static s1f_status order_of_rank(const s1f_request *request, s1f_schedule *schedule, int32_t rank)
{
    int32_t P = request->num_ranks, M = request->num_microbatches;
    writer w = {.schedule = schedule, .rank = rank, .stage = {rank, 2 * P - 1 - rank}};
    w.put_off = malloc(2 * (size_t)M * sizeof *w.put_off);
    if (w.put_off == NULL)
        return s1f_fail(S1F_ERR_MEMORY, "no memory to put off %d units", 2 * M);
    warm_up(&w, P);
    steady(&w, P, M);
    cool_down(&w, P);
    free(w.put_off);
    return w.status;
}

static const char *broken_rule(const s1f_request *request)
{
    if (request->stages_per_rank != 2)
        return "v = 2";
    if (request->num_microbatches < 2 * (int64_t)request->num_ranks)
        return "M >= 2 P";
    return request->num_segments == 1 ? NULL : "k = 1";
}

const s1f_family s1f_family_dualpipev = {
    .whole = {"dualpipev", "F of one micro-batch, then B of another: two stages per rank in a V",
              "DualPipe, arXiv:2412.19437, in its V form", "M >= 2 P, k = 1, v = 2"},
    .stages_per_rank = 2,
    .splits = 1,
    .placement = S1F_PLACEMENT_V,
    .broken_rule = broken_rule,
    .order_of_rank = order_of_rank,
};
