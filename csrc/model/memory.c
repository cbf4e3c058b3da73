/* memory.c - walks the order of each rank and adds up what lives. */
#include "memory.h"

#include <stdlib.h>

static int64_t at(const int64_t *values, int64_t i)
{
    return values != NULL ? values[i] : 0;
}

static int64_t greater(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Bytes that a unit of each stage and segment takes of each kind, and what a rank holds of them now. */
typedef struct {
    int64_t *bytes[S1F_NUM_HOLDINGS]; /* [stage][segment] */
    int64_t live[S1F_NUM_HOLDINGS], units, total;
} ledger;

static int create_ledger(const s1f_shape *shape, const s1f_memory_bytes *given, ledger *l)
{
    int64_t k = shape->num_segments, cells = shape->num_stages * k;
    int64_t *bytes = malloc((size_t)(cells * S1F_NUM_HOLDINGS) * sizeof *bytes);
    if (bytes == NULL)
        return 0;
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++)
        l->bytes[h] = bytes + h * cells;
    for (int64_t i = 0; i < cells; i++) {
        int64_t activation = at(given->activation, i), kept = given->kept != NULL ? given->kept[i] : activation;
        l->bytes[S1F_HOLDS_SAVED][i] = activation - kept;
        l->bytes[S1F_HOLDS_FOR_WEIGHT][i] = kept;
        l->bytes[S1F_HOLDS_OUTPUT_GRADIENT][i] = at(given->output_gradient, i);
        l->bytes[S1F_HOLDS_KV][i] = at(given->kv, i / k);
        l->bytes[S1F_HOLDS_KV_GRADIENT][i] = at(given->kv_gradient, i / k);
    }
    return 1;
}

/* Adds (sign 1) or takes away (-1) what a unit takes or frees, bits of s1f_holding. */
static inline void change(ledger *l, uint32_t holdings, int64_t sign, int64_t cell)
{
    l->units += holdings >> S1F_HOLDS_FOR_WEIGHT & 1 ? sign : 0;
    for (; holdings != 0; holdings &= holdings - 1) {
        int h = __builtin_ctz(holdings);
        int64_t bytes = sign * l->bytes[h][cell];
        l->live[h] += bytes;
        l->total += bytes;
    }
}

/* Live bytes only grow when a unit begins. */
static inline void raise_peak(const ledger *l, s1f_memory_peak *peak)
{
    peak->units = greater(peak->units, l->units);
    peak->activations = greater(peak->activations, l->live[S1F_HOLDS_SAVED] + l->live[S1F_HOLDS_FOR_WEIGHT]);
    peak->output_gradients = greater(peak->output_gradients, l->live[S1F_HOLDS_OUTPUT_GRADIENT]);
    peak->kv = greater(peak->kv, l->live[S1F_HOLDS_KV]);
    peak->kv_gradients = greater(peak->kv_gradients, l->live[S1F_HOLDS_KV_GRADIENT]);
    peak->total = greater(peak->total, l->total);
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

static s1f_status check_bytes(const s1f_program *program, const s1f_memory_bytes *bytes)
{
    const s1f_shape *shape = &program->shape;
    int64_t stages = shape->num_stages, cells = stages * shape->num_segments, most_held = 1, num_places = 0;
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        most_held = greater(most_held, program->ranks[rank].num_units);
    for (int32_t e = 0; e < program->edges->num_edges; e++)
        num_places += program->edges->edges[e].num_places;
    most_held = greater(most_held, num_places);
    s1f_status status;
    if ((status = require_bytes("activation bytes of a unit", bytes->activation, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes kept for W", bytes->kept, cells, most_held)) != S1F_OK ||
        (status = require_bytes("output gradient bytes of a unit", bytes->output_gradient, cells, most_held)) !=
            S1F_OK ||
        (status = require_bytes("bytes of a KV slot", bytes->kv, stages, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a dK/dV slab", bytes->kv_gradient, stages, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a message", bytes->message, shape->num_segments, most_held)) != S1F_OK)
        return status;
    for (int64_t i = 0; bytes->kept != NULL && i < cells; i++)
        if (bytes->kept[i] > at(bytes->activation, i))
            return s1f_fail(S1F_ERR_ARG, "%lld bytes are kept for W, more than the %lld that the unit saved",
                            (long long)bytes->kept[i], (long long)at(bytes->activation, i));
    return S1F_OK;
}

s1f_status s1f_program_memory(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks)
{
    const s1f_shape *shape = &program->shape;
    s1f_status status = check_bytes(program, bytes);
    if (status != S1F_OK)
        return status;
    s1f_lifetime_table table = s1f_lifetimes_of(shape);
    int64_t largest_message = 0;
    for (int32_t segment = 0; segment < shape->num_segments; segment++)
        largest_message = greater(largest_message, at(bytes->message, segment));
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        peaks[rank] = (s1f_memory_peak){0};
    for (int32_t e = 0; e < program->edges->num_edges; e++) {
        const s1f_edge *edge = &program->edges->edges[e];
        peaks[edge->destination_rank].receive += edge->num_places * largest_message;
    }
    ledger l = {.total = 0};
    if (!create_ledger(shape, bytes, &l))
        return s1f_fail(S1F_ERR_MEMORY, "no memory to count the bytes of %d stages", shape->num_stages);
    for (int32_t rank = 0; rank < shape->num_ranks; rank++) {
        l.total = peaks[rank].total = peaks[rank].receive; /* all else was given back by the rank before */
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
            int64_t cell = (int64_t)unit.stage * shape->num_segments + unit.segment;
            change(&l, lifetimes.takes, 1, cell);
            if (lifetimes.takes != 0)
                raise_peak(&l, &peaks[rank]);
            change(&l, lifetimes.frees, -1, cell);
        }
    }
    free(l.bytes[0]);
    return S1F_OK;
}
