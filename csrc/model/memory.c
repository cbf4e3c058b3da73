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

/* What a rank holds now. */
typedef struct {
    int64_t live[S1F_NUM_HOLDINGS], units, total;
} ledger;

/* Indices of a unit's bytes: [stage], [column] and, as `cell`, [stage][column]. */
typedef struct {
    int64_t stage, column, cell;
    int32_t segment;
} unit_place;

static inline unit_place place_of(const s1f_shape *shape, s1f_unit unit)
{
    int64_t column = s1f_column(shape, unit);
    return (unit_place){unit.stage, column, unit.stage * s1f_num_columns(shape) + column, unit.segment};
}

/* Bytes of a unit and of the segments before it. */
static int64_t sum_to(const int64_t *values, unit_place of)
{
    int64_t sum = 0;
    for (int64_t i = of.cell - of.segment; values != NULL && i <= of.cell; i++)
        sum += values[i];
    return sum;
}

/* Bytes that a unit takes, or frees, of a holding. */
static inline int64_t bytes_of(const s1f_memory_bytes *bytes, s1f_holding holding, unit_place of, int takes)
{
    int64_t stage = of.stage, column = of.column, cell = of.cell;
    int64_t activation = at(bytes->activation, cell), kept = bytes->kept != NULL ? bytes->kept[cell] : activation;
    switch (holding) {
    case S1F_HOLDS_SAVED: return activation - kept;
    case S1F_HOLDS_FOR_WEIGHT: return kept;
    case S1F_HOLDS_OUTPUT_GRADIENT: return at(bytes->output_gradient, cell);
    case S1F_HOLDS_KV: return at(bytes->kv, stage);
    case S1F_HOLDS_KV_GRADIENT: return at(bytes->kv_gradient, stage);
    case S1F_HOLDS_INPUT: return at(bytes->input, cell);
    case S1F_HOLDS_LOGITS: return at(bytes->logits, column);
    case S1F_HOLDS_KV_ROWS: return at(bytes->kv_rows, cell);
    case S1F_HOLDS_STAYING: return at(bytes->staying, cell);
    case S1F_HOLDS_FORWARD_WORK: return at(bytes->forward_work, cell);
    case S1F_HOLDS_BACKWARD_WORK: return at(bytes->backward_work, cell);
    case S1F_HOLDS_KV_GRADIENT_ROWS:
        return takes ? sum_to(bytes->kv_gradient_rows, of) : at(bytes->kv_gradient_rows, cell);
    case S1F_NUM_HOLDINGS: break;
    }
    return 0;
}

static int64_t sum_of(const s1f_memory_bytes *bytes, uint32_t holdings, unit_place of, int takes)
{
    int64_t sum = 0;
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++)
        if (holdings >> h & 1)
            sum += bytes_of(bytes, (s1f_holding)h, of, takes);
    return sum;
}

int64_t s1f_taken_bytes(const s1f_shape *shape, const s1f_memory_bytes *bytes, uint32_t holdings, s1f_unit unit)
{
    return sum_of(bytes, holdings, place_of(shape, unit), 1);
}

int64_t s1f_freed_bytes(const s1f_shape *shape, const s1f_memory_bytes *bytes, uint32_t holdings, s1f_unit unit)
{
    return sum_of(bytes, holdings, place_of(shape, unit), 0);
}

/* Adds (sign 1) or takes away (-1) what a unit takes or frees, bits of s1f_holding. */
static inline void change(ledger *l, const s1f_memory_bytes *bytes, uint32_t holdings, int64_t sign, unit_place of)
{
    l->units += holdings >> S1F_HOLDS_FOR_WEIGHT & 1 ? sign : 0;
    for (int h = 0; h < S1F_NUM_HOLDINGS; h++)
        if (holdings >> h & 1) {
            int64_t changed = sign * bytes_of(bytes, (s1f_holding)h, of, sign > 0);
            l->live[h] += changed;
            l->total += changed;
        }
}

/* Live bytes only grow when a unit begins. */
static inline void raise_peak(const ledger *l, s1f_memory_peak *peak)
{
    peak->units = greater(peak->units, l->units);
    peak->activations = greater(peak->activations, l->live[S1F_HOLDS_SAVED] + l->live[S1F_HOLDS_FOR_WEIGHT]);
    peak->output_gradients = greater(peak->output_gradients, l->live[S1F_HOLDS_OUTPUT_GRADIENT]);
    peak->kv = greater(peak->kv, l->live[S1F_HOLDS_KV] + l->live[S1F_HOLDS_KV_ROWS]);
    peak->kv_gradients =
        greater(peak->kv_gradients, l->live[S1F_HOLDS_KV_GRADIENT] + l->live[S1F_HOLDS_KV_GRADIENT_ROWS]);
    peak->inputs = greater(peak->inputs, l->live[S1F_HOLDS_INPUT] + l->live[S1F_HOLDS_STAYING]);
    peak->logits = greater(peak->logits, l->live[S1F_HOLDS_LOGITS]);
    peak->total = greater(peak->total, l->total);
}

/* Every sum is at most `most_held` values of thirteen kinds. */
static s1f_status require_bytes(const char *name, const int64_t *values, int64_t count, int64_t most_held)
{
    int64_t most = INT64_MAX / 13 / most_held;
    for (int64_t i = 0; values != NULL && i < count; i++)
        if (values[i] < 0 || values[i] > most)
            return s1f_fail(S1F_ERR_ARG, "%s is %lld, must be in 0..%lld", name, (long long)values[i], (long long)most);
    return S1F_OK;
}

static s1f_status check_bytes(const s1f_program *program, const s1f_memory_bytes *bytes)
{
    const s1f_shape *shape = &program->shape;
    int64_t stages = shape->num_stages, columns = s1f_num_columns(shape), cells = stages * columns;
    int64_t most_held = 1, num_places = 0;
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
        (status = require_bytes("input bytes of a recomputed unit", bytes->input, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a unit's keys and values", bytes->kv_rows, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a unit's dK/dV", bytes->kv_gradient_rows, cells, most_held)) != S1F_OK ||
        (status = require_bytes("staying bytes of a unit", bytes->staying, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes that F allocates", bytes->forward_work, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes that B or I allocates", bytes->backward_work, cells, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a shard's logits", bytes->logits, columns, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a message", bytes->message, columns, most_held)) != S1F_OK ||
        (status = require_bytes("bytes of a shard's statistics", bytes->statistics, columns, most_held)) != S1F_OK)
        return status;
    for (int64_t i = 0; bytes->kept != NULL && i < cells; i++)
        if (bytes->kept[i] > at(bytes->activation, i))
            return s1f_fail(S1F_ERR_ARG, "%lld bytes are kept for W, more than the %lld that the unit saved",
                            (long long)bytes->kept[i], (long long)at(bytes->activation, i));
    return S1F_OK;
}

/* Places of the messages of all edges: a message takes the place that was freed last. */
typedef struct {
    int64_t num_cells;
    int64_t *num_sent, *num_freed; /* [edge] */
    int64_t *sent;                 /* [edge][n]: the cell of message n */
    int32_t *place;                /* [edge][cell] */
    int64_t *largest;              /* [edge][place] bytes, places as many as cells */
} messages;

static void free_messages(messages *m)
{
    free(m->num_sent);
    free(m->num_freed);
    free(m->sent);
    free(m->place);
    free(m->largest);
}

static s1f_status create_messages(const s1f_program *program, messages *m)
{
    size_t num_edges = (size_t)program->edges->num_edges + 1, num_all; /* + 1: calloc(0) may be NULL */
    *m = (messages){.num_cells = s1f_num_cells(&program->shape)};
    num_all = num_edges * (size_t)m->num_cells;
    m->num_sent = calloc(num_edges, sizeof *m->num_sent);
    m->num_freed = calloc(num_edges, sizeof *m->num_freed);
    m->sent = calloc(num_all, sizeof *m->sent);
    m->place = calloc(num_all, sizeof *m->place);
    m->largest = calloc(num_all, sizeof *m->largest);
    if (m->num_sent != NULL && m->num_freed != NULL && m->sent != NULL && m->place != NULL && m->largest != NULL)
        return S1F_OK;
    free_messages(m);
    return s1f_fail(S1F_ERR_MEMORY, "no memory for the messages of %zu edges", num_edges - 1);
}

static void put(messages *m, const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks,
                int32_t e, int64_t n, int32_t place)
{
    const s1f_edge *edge = &program->edges->edges[e];
    const s1f_shape *shape = &program->shape;
    int64_t cell = m->sent[e * m->num_cells + n], *largest = &m->largest[e * m->num_cells + place];
    int64_t column = shape->first_cell == NULL ? cell % shape->num_segments : cell;
    int64_t size = at(edge->channel == S1F_CHANNEL_STATISTICS ? bytes->statistics : bytes->message, column);
    m->place[e * m->num_cells + cell] = place;
    peaks[edge->destination_rank].receive += greater(size - *largest, 0);
    *largest = greater(size, *largest);
}

/* What the places of each rank come to hold. */
static s1f_status fill_places(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks)
{
    const s1f_edges *edges = program->edges;
    messages m;
    s1f_status status;
    if (bytes->message == NULL && bytes->statistics == NULL)
        return S1F_OK;
    if ((status = create_messages(program, &m)) != S1F_OK)
        return status;
    for (int32_t rank = 0; rank < program->shape.num_ranks; rank++)
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_edge_list out = edges->kinds[s1f_kind(unit)].out;
            for (int32_t j = 0; j < out.count; j++)
                m.sent[out.edges[j] * m.num_cells + m.num_sent[out.edges[j]]++] = s1f_cell(&program->shape, unit);
        }
    for (int32_t e = 0; e < edges->num_edges; e++)
        for (int32_t place = 0; place < edges->edges[e].num_places; place++)
            put(&m, program, bytes, peaks, e, place, place);
    for (int32_t rank = 0; rank < program->shape.num_ranks; rank++)
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_edge_list freed = edges->kinds[s1f_kind(unit)].freed;
            for (int32_t j = 0; j < freed.count; j++) {
                int32_t e = freed.edges[j];
                int64_t next = edges->edges[e].num_places + m.num_freed[e]++;
                if (next < edges->edges[e].num_messages)
                    put(&m, program, bytes, peaks, e, next, m.place[e * m.num_cells + s1f_cell(&program->shape, unit)]);
            }
        }
    free_messages(&m);
    return S1F_OK;
}

s1f_status s1f_program_memory(const s1f_program *program, const s1f_memory_bytes *bytes, s1f_memory_peak *peaks)
{
    const s1f_shape *shape = &program->shape;
    s1f_status status = check_bytes(program, bytes);
    if (status != S1F_OK)
        return status;
    s1f_lifetime_table table = s1f_lifetimes_of(shape);
    for (int32_t rank = 0; rank < shape->num_ranks; rank++)
        peaks[rank] = (s1f_memory_peak){0};
    if ((status = fill_places(program, bytes, peaks)) != S1F_OK)
        return status;
    ledger l = {.total = 0};
    for (int32_t rank = 0; rank < shape->num_ranks; rank++) {
        s1f_memory_peak peak = peaks[rank];
        l.total = peak.total = peak.receive; /* all else was given back by the rank before */
        for (int64_t i = 0; i < program->ranks[rank].num_units; i++) {
            s1f_unit unit = program->ranks[rank].units[i];
            s1f_lifetimes lifetimes = s1f_unit_lifetimes(&table, unit);
            unit_place place = place_of(shape, unit);
            if (lifetimes.takes != 0) {
                change(&l, bytes, lifetimes.takes, 1, place);
                raise_peak(&l, &peak);
            }
            if (lifetimes.frees != 0)
                change(&l, bytes, lifetimes.frees, -1, place);
        }
        peaks[rank] = peak;
    }
    return S1F_OK;
}
