/* memory.c - walks the order of each rank and adds up what lives. */
#include "memory.h"

#include <stdlib.h>

typedef struct {
    const s1f_tape *tape;
    const s1f_memory_bytes *bytes;
    s1f_memory_peak live, peak; /* of the rank that is walked */
} counter;

static int64_t at(const int64_t *values, int64_t i)
{
    return values != NULL ? values[i] : 0;
}

static int64_t greater(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Live bytes only grow when a unit begins. */
static void raise_peak(counter *c)
{
    s1f_memory_peak *live = &c->live, *peak = &c->peak;
    live->total = live->activations + live->output_gradients + live->kv + live->kv_gradients + live->receive;
    peak->units = greater(peak->units, live->units);
    peak->activations = greater(peak->activations, live->activations);
    peak->output_gradients = greater(peak->output_gradients, live->output_gradients);
    peak->kv = greater(peak->kv, live->kv);
    peak->kv_gradients = greater(peak->kv_gradients, live->kv_gradients);
    peak->total = greater(peak->total, live->total);
}

static void count_unit(counter *c, const s1f_tape_unit *unit)
{
    const s1f_memory_bytes *bytes = c->bytes;
    int32_t stage = unit->kind / S1F_NUM_PASSES, last_segment = c->tape->num_segments - 1;
    s1f_pass pass = (s1f_pass)(unit->kind % S1F_NUM_PASSES);
    int64_t cell = (int64_t)stage * c->tape->num_segments + unit->segment;
    int64_t activation = at(bytes->activation, cell);
    int64_t kept = bytes->kept != NULL ? bytes->kept[cell] : activation;
    int goes_back = pass == S1F_PASS_BACKWARD || pass == S1F_PASS_BACKWARD_INPUT;

    if (pass == S1F_PASS_FORWARD) {
        c->live.units++;
        c->live.activations += activation;
        if (unit->segment == 0)
            c->live.kv += at(bytes->kv, stage);
    } else if (goes_back && unit->segment == last_segment) {
        c->live.kv_gradients += at(bytes->kv_gradient, stage);
    }
    if (pass == S1F_PASS_BACKWARD_INPUT)
        c->live.output_gradients += at(bytes->output_gradient, cell);
    raise_peak(c);

    if (goes_back && unit->segment == 0) {
        c->live.kv -= at(bytes->kv, stage);
        c->live.kv_gradients -= at(bytes->kv_gradient, stage);
    } else if (!c->tape->has_backward && unit->segment == last_segment) {
        c->live.kv -= at(bytes->kv, stage);
    }
    if (pass == S1F_PASS_BACKWARD_INPUT)
        c->live.activations -= activation - kept;
    if (!c->tape->kinds[unit->kind].last_reads)
        return;
    c->live.units--;
    if (pass == S1F_PASS_BACKWARD_WEIGHT) {
        c->live.activations -= kept;
        c->live.output_gradients -= at(bytes->output_gradient, cell);
    } else {
        c->live.activations -= activation;
    }
}

/* Every sum is at most `most_held` values of five kinds. */
static s1f_status require_bytes(const char *name, const int64_t *values, int64_t count, int64_t most_held)
{
    int64_t most = INT64_MAX / 5 / most_held;
    for (int64_t i = 0; values != NULL && i < count; i++)
        if (values[i] < 0 || values[i] > most)
            return s1f_fail(S1F_ERR_ARG, "%s is %lld, must be in 0..%lld", name, (long long)values[i], (long long)most);
    return S1F_OK;
}

static s1f_status check_bytes(const s1f_tape *tape, const s1f_memory_bytes *bytes)
{
    int64_t stages = tape->num_stages, cells = stages * tape->num_segments, most_held = 1;
    for (int32_t rank = 0; rank < tape->num_ranks; rank++)
        most_held = greater(most_held, tape->num_units[rank]);
    int64_t num_places = 0;
    for (int32_t e = 0; e < tape->num_edges; e++)
        num_places += tape->edges[e].num_places;
    most_held = greater(most_held, num_places);
    s1f_status status;
    if ((status = require_bytes("activation bytes of a unit", bytes->activation, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes kept for W", bytes->kept, cells, most_held)) != S1F_OK ||
        (status = require_bytes("output gradient bytes of a unit", bytes->output_gradient, cells, most_held)) !=
            S1F_OK ||
        (status = require_bytes("bytes of a KV slot", bytes->kv, stages, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a dK/dV slab", bytes->kv_gradient, stages, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a message", bytes->message, tape->num_segments, most_held)) != S1F_OK)
        return status;
    for (int64_t i = 0; bytes->kept != NULL && i < cells; i++)
        if (bytes->kept[i] > at(bytes->activation, i))
            return s1f_fail(S1F_ERR_ARG, "%lld bytes are kept for W, more than the %lld that the unit saved",
                            (long long)bytes->kept[i], (long long)at(bytes->activation, i));
    return S1F_OK;
}

s1f_status s1f_tape_memory(const s1f_tape *tape, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks)
{
    s1f_status status = check_bytes(tape, bytes);
    if (status != S1F_OK)
        return status;
    int64_t largest_message = 0;
    for (int32_t segment = 0; segment < tape->num_segments; segment++)
        largest_message = greater(largest_message, at(bytes->message, segment));
    for (int32_t rank = 0; rank < tape->num_ranks; rank++)
        peaks[rank] = (s1f_memory_peak){0};
    for (int32_t e = 0; e < tape->num_edges; e++)
        peaks[tape->edges[e].destination_rank].receive += tape->edges[e].num_places * largest_message;
    for (int32_t rank = 0; rank < tape->num_ranks; rank++) {
        counter c = {.tape = tape, .bytes = bytes, .live = peaks[rank], .peak = peaks[rank]};
        s1f_tape_reader reader;
        s1f_tape_rewind(tape, rank, &reader);
        while (reader.next < reader.end || s1f_tape_refill(tape, rank, &reader))
            count_unit(&c, reader.next++);
        peaks[rank] = c.peak;
    }
    return S1F_OK;
}
