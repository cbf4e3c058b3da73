/* partition.c - cuts a sequence into segments whose costliest one is as cheap as the grid allows. */
#include "partition.h"

#include "pool.h"

#include <math.h>
#include <stdlib.h>

/* ---- cost: a function C(t) of the first t tokens, never decreasing, also in floating point ---- */

static const double MOST_COST = 1e300; /* of a sequence: no mixed sum of costs is infinite then */

/* A stretch of the rows in which no document begins but at its first token. */
typedef struct {
    unsigned __int128 pairs; /* of tokens and those that they attend to, in all rows before `begin` */
    int64_t begin;           /* token */
    int64_t open;            /* tokens before `begin` of the documents that go on, in all rows */
} stretch;

typedef struct {
    const s1f_token_costs *given;
    int64_t seq_len;
    double mix;
    double even_per_token; /* (1 - mix) * C(seq_len) / seq_len */
    stretch *stretches;    /* ascending; of documents */
    int64_t num_stretches, num_rows;
    double *sums; /* sums[i]: cost of pieces 0..i-1 */
} cost_function;

/* Pairs from the stretch's begin to `end`, all rows: token i of it attends to what is open and to i + 1 of its own. */
static unsigned __int128 pairs_until(const stretch *from, int64_t num_rows, int64_t end)
{
    unsigned __int128 n = (unsigned __int128)(end - from->begin);
    return from->pairs + n * (unsigned __int128)from->open + n * (n + 1) / 2 * (unsigned __int128)num_rows;
}

static double documents_of_first(const cost_function *cost, int64_t t)
{
    int64_t low = 0, high = cost->num_stretches; /* the last stretch that begins at or before t is in [low, high) */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        *(cost->stretches[middle].begin <= t ? &low : &high) = middle;
    }
    double pairs = (double)(2 * pairs_until(&cost->stretches[low], cost->num_rows, t)) / (double)cost->num_rows;
    return cost->given->linear * (double)t + cost->given->quadratic * pairs;
}

static double pieces_of_first(const cost_function *cost, int64_t t)
{
    const s1f_token_costs *given = cost->given;
    unsigned __int128 scaled = (unsigned __int128)t * (unsigned __int128)given->num_costs;
    int64_t piece = (int64_t)(scaled / (unsigned __int128)cost->seq_len);
    double within = (double)(scaled % (unsigned __int128)cost->seq_len) / (double)cost->seq_len;
    return piece == given->num_costs ? cost->sums[piece] : cost->sums[piece] + within * given->costs[piece];
}

static double unmixed_of_first(const cost_function *cost, int64_t t)
{
    return cost->sums != NULL ? pieces_of_first(cost, t) : documents_of_first(cost, t);
}

static double cost_of_first(const cost_function *cost, int64_t t)
{
    return cost->mix * unmixed_of_first(cost, t) + cost->even_per_token * (double)t;
}

/* ---- grid: the sequence as num_units units, all of `unit` tokens but one, which may be short ---- */

typedef struct {
    const cost_function *cost;
    int64_t unit;       /* multiple_of */
    int64_t short_unit; /* tokens of the short unit; 0: none, multiple_of divides the sequence */
    int64_t num_units;  /* the short unit included */
    int64_t short_at;   /* units before the short one, once it has its place */
} grid;

static grid make_grid(const cost_function *cost, int64_t seq_len, int64_t multiple_of)
{
    int64_t short_unit = seq_len % multiple_of;
    return (grid){cost, multiple_of, short_unit, seq_len / multiple_of + (short_unit > 0), 0};
}

/* First token after u units, the short one among them or not yet. */
static int64_t tokens_of(const grid *g, int64_t u, int short_is_past)
{
    return short_is_past ? (u - 1) * g->unit + g->short_unit : u * g->unit;
}

/* Most units in [least, most] that end a segment beginning at token `begin` within `bound`; least - 1 if none does. */
static int64_t furthest(const grid *g, int64_t begin, int64_t least, int64_t most, int short_is_past, double bound)
{
    int64_t good = least - 1, bad = most + 1;
    double begin_cost = cost_of_first(g->cost, begin);
    while (bad - good > 1) {
        int64_t middle = good + (bad - good) / 2;
        int fits = cost_of_first(g->cost, tokens_of(g, middle, short_is_past)) - begin_cost <= bound;
        *(fits ? &good : &bad) = middle;
    }
    return good;
}

/* Whether num_segments segments, empty ones allowed, cover the sequence with no one above `bound`.
 *
 * Greedy: every segment reaches as far as it may, kept apart for prefixes without the short unit and with it. Reaching
 * further never hurts, because the cost of a segment falls as its begin moves right; and a partition with empty
 * segments becomes one without by splitting others, which lowers their cost. So the answer is exact.
 * The short unit gets its place in the partition found. */
static int covers(grid *g, int64_t num_segments, double bound)
{
    int64_t full = 0; /* units reached, all full */
    int64_t past = 0; /* units reached, the short one among them; 0: not reachable */
    int64_t short_at = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        int64_t next_past = 0;
        if (past > 0)
            next_past = furthest(g, tokens_of(g, past, 1), past + 1, g->num_units, 1, bound);
        if (g->short_unit > 0) {
            int64_t here = furthest(g, tokens_of(g, full, 0), full + 1, g->num_units, 1, bound);
            if (here > full && here >= next_past) { /* of two equal places the later one */
                next_past = here;
                short_at = full;
            }
        }
        int64_t most_full = g->num_units - (g->short_unit > 0);
        full = furthest(g, tokens_of(g, full, 0), full + 1, most_full, 0, bound);
        past = next_past;
        if ((g->short_unit > 0 ? past : full) == g->num_units) {
            g->short_at = short_at;
            return 1;
        }
    }
    return 0;
}

/* The least bound that covers(), to the last bit, for which the short unit has its place. */
static double least_bound(grid *g, int64_t num_segments)
{
    double total = cost_of_first(g->cost, g->cost->seq_len);
    double low = total / (2.0 * (double)num_segments); /* below the mean cost, rounding included: never enough */
    double high = total;                               /* one segment holds all */
    covers(g, num_segments, high);
    for (;;) {
        double middle = low + (high - low) / 2;
        if (middle <= low || middle >= high)
            return high;
        *(covers(g, num_segments, middle) ? &high : &low) = middle;
    }
}

/* Once the short unit has its place, unit boundaries are fixed. */
static int64_t boundary_token(const grid *g, int64_t u)
{
    return tokens_of(g, u, g->short_unit > 0 && u > g->short_at);
}

static double boundary_cost(const grid *g, int64_t u)
{
    return cost_of_first(g->cost, boundary_token(g, u));
}

/* Least u in [low, high] whose C is at least `wanted`; high if none. */
static int64_t first_at_least(const grid *g, int64_t low, int64_t high, double wanted)
{
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (boundary_cost(g, middle) >= wanted)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Least begin in [0, end - 1] of a segment that ends at `end` within `bound`. One unit alone always is. */
static int64_t earliest_begin(const grid *g, int64_t end, double bound)
{
    double end_cost = boundary_cost(g, end);
    int64_t low = 0, high = end - 1;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (end_cost - boundary_cost(g, middle) <= bound)
            high = middle;
        else
            low = middle + 1;
    }
    return high;
}

/* Picks boundaries within the bound, each as near as it may be to an equal share of what is left. */
static void place_boundaries(const grid *g, int64_t num_segments, double bound, int64_t *sizes)
{
    double total = boundary_cost(g, g->num_units);

    /* sizes[i], for now: the least end of segment i from which the later segments still fit within the bound. */
    int64_t end = g->num_units;
    for (int64_t i = num_segments - 1; i >= 0; i--) {
        sizes[i] = end;
        end = end > 0 ? earliest_begin(g, end, bound) : 0;
    }
    int64_t begin = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        int64_t later = num_segments - 1 - i; /* segments after this segment, each at least one unit */
        int64_t low = sizes[i] > begin + 1 ? sizes[i] : begin + 1, high = g->num_units - later;
        double begin_cost = boundary_cost(g, begin);
        double wanted = begin_cost + (total - begin_cost) / (double)(later + 1);
        int64_t chosen = later == 0 ? g->num_units : first_at_least(g, low, high, wanted);
        if (chosen > low && later > 0) {
            double above = boundary_cost(g, chosen), below = boundary_cost(g, chosen - 1);
            if (wanted - below < above - wanted || above - begin_cost > bound)
                chosen--;
        }
        sizes[i] = boundary_token(g, chosen) - boundary_token(g, begin);
        begin = chosen;
    }
}

/* ---- rows of packed documents ---- */

typedef struct {
    int64_t end, length; /* tokens; the end from the begin of its row */
} document;

static int by_end(const void *a, const void *b)
{
    int64_t left = ((const document *)a)->end, right = ((const document *)b)->end;
    return (left > right) - (left < right);
}

/* Sets the end of each document in its row; *num_rows: how many rows they fill. */
static s1f_status place_documents(int64_t seq_len, const int64_t *lengths, int64_t num_documents, document *documents,
                                  int64_t *num_rows)
{
    int64_t used = 0; /* tokens of the row that is being filled */
    *num_rows = 0;
    for (int64_t i = 0; i < num_documents; i++) {
        if (lengths[i] < 1)
            return s1f_fail(S1F_ERR_ARG, "documents[%lld] is %lld, must be at least 1 token", (long long)i,
                            (long long)lengths[i]);
        if (lengths[i] > seq_len - used)
            return s1f_fail(S1F_ERR_ARG,
                            "documents[%lld] has %lld tokens, its row has %lld left: documents fill rows of %lld "
                            "tokens, one after another",
                            (long long)i, (long long)lengths[i], (long long)(seq_len - used), (long long)seq_len);
        used += lengths[i];
        documents[i] = (document){used, lengths[i]};
        if (used == seq_len) {
            used = 0;
            ++*num_rows;
        }
    }
    if (used != 0)
        return s1f_fail(S1F_ERR_ARG,
                        "the last row of documents holds %lld tokens, must hold %lld: padding is a document",
                        (long long)used, (long long)seq_len);
    return S1F_OK;
}

/* Sweeps over the ends of documents, from all rows at once. Returns how many stretches there are. */
static int64_t make_stretches(int64_t seq_len, document *documents, int64_t num_documents, int64_t num_rows,
                              stretch *stretches)
{
    qsort(documents, (size_t)num_documents, sizeof *documents, by_end);
    stretches[0] = (stretch){0};
    int64_t count = 1;
    for (int64_t i = 0; i < num_documents && documents[i].end < seq_len;) {
        int64_t end = documents[i].end, closed = 0;
        for (; i < num_documents && documents[i].end == end; i++)
            closed += documents[i].length;
        const stretch *last = &stretches[count - 1];
        int64_t open = last->open + num_rows * (end - last->begin) - closed;
        stretches[count++] = (stretch){pairs_until(last, num_rows, end), end, open};
    }
    return count;
}

/* ---- the call ---- */

static s1f_status check_arguments(int64_t seq_len, int64_t num_segments, double mix, int64_t multiple_of)
{
    if (seq_len < 1 || seq_len > S1F_MAX_SEQUENCE_LENGTH)
        return s1f_fail(S1F_ERR_ARG, "seq_len is %lld, must be in 1..%lld", (long long)seq_len,
                        (long long)S1F_MAX_SEQUENCE_LENGTH);
    if (num_segments < 1)
        return s1f_fail(S1F_ERR_ARG, "num_segments is %lld, must be at least 1", (long long)num_segments);
    if (num_segments > seq_len)
        return s1f_fail(S1F_ERR_ARG, "num_segments is %lld, more than the %lld tokens of the sequence",
                        (long long)num_segments, (long long)seq_len);
    if (multiple_of < 1)
        return s1f_fail(S1F_ERR_ARG, "multiple_of is %lld, must be at least 1", (long long)multiple_of);
    int64_t num_units = make_grid(NULL, seq_len, multiple_of).num_units;
    if (num_segments > num_units)
        return s1f_fail(S1F_ERR_ARG,
                        "num_segments is %lld, but %lld tokens hold only %lld segments of multiples of %lld tokens",
                        (long long)num_segments, (long long)seq_len, (long long)num_units, (long long)multiple_of);
    if (!(mix >= 0 && mix <= 1))
        return s1f_fail(S1F_ERR_ARG, "mix is %g, must be in [0, 1]", mix);
    return S1F_OK;
}

static s1f_status make_document_cost(cost_function *cost, s1f_pool *pool)
{
    const s1f_token_costs *given = cost->given;
    int64_t whole = given->documents == NULL; /* one document of all tokens */
    const int64_t *lengths = whole ? &cost->seq_len : given->documents;
    int64_t count = whole ? 1 : given->num_documents;
    if (count < 1 || count > S1F_MAX_SEQUENCE_LENGTH)
        return s1f_fail(S1F_ERR_ARG, "there are %lld documents, must be in 1..%lld", (long long)count,
                        (long long)S1F_MAX_SEQUENCE_LENGTH);
    document *placed = s1f_pool_take(pool, (size_t)count, sizeof *placed);
    cost->stretches = s1f_pool_take(pool, (size_t)count, sizeof *cost->stretches);
    S1F_TRY(s1f_pool_status(pool, "the ends of documents"));
    S1F_TRY(place_documents(cost->seq_len, lengths, count, placed, &cost->num_rows));
    cost->num_stretches = make_stretches(cost->seq_len, placed, count, cost->num_rows, cost->stretches);
    return S1F_OK;
}

static s1f_status make_piece_cost(cost_function *cost, s1f_pool *pool)
{
    const double *costs = cost->given->costs;
    int64_t count = cost->given->num_costs;
    if (count < 1 || count > S1F_MAX_SEQUENCE_LENGTH)
        return s1f_fail(S1F_ERR_ARG, "there are %lld costs, must be in 1..%lld", (long long)count,
                        (long long)S1F_MAX_SEQUENCE_LENGTH);
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(costs[i]) || costs[i] < 0)
            return s1f_fail(S1F_ERR_ARG, "costs[%lld] is %g, must be finite and not negative", (long long)i, costs[i]);
    cost->sums = s1f_pool_take(pool, (size_t)(count + 1), sizeof *cost->sums);
    S1F_TRY(s1f_pool_status(pool, "the running sums of costs"));
    for (int64_t i = 0; i < count; i++)
        cost->sums[i + 1] = cost->sums[i] + costs[i];
    double total = cost->sums[count];
    if (!(total > 0 && total <= MOST_COST))
        return s1f_fail(S1F_ERR_ARG, "costs sum to %g, must be above 0 and at most %g", total, MOST_COST);
    return S1F_OK;
}

/* Segments differ by at most one unit, the longer segments first. */
static void cut_evenly(const grid *g, int64_t num_segments, int64_t *sizes)
{
    int64_t units = g->num_units / num_segments, longer = g->num_units % num_segments;
    for (int64_t i = 0; i < num_segments; i++)
        sizes[i] = (units + (i < longer)) * g->unit;
    if (g->short_unit > 0) /* in the last of the longest: where there is one longest, it becomes shorter */
        sizes[longer > 0 ? longer - 1 : num_segments - 1] -= g->unit - g->short_unit;
}

s1f_status s1f_partition(int64_t seq_len, int64_t num_segments, const s1f_token_costs *costs, double mix,
                         int64_t multiple_of, int64_t *sizes)
{
    S1F_TRY(check_arguments(seq_len, num_segments, mix, multiple_of));
    cost_function cost = {.given = costs, .seq_len = seq_len, .mix = mix};
    grid g = make_grid(&cost, seq_len, multiple_of);
    s1f_pool pool = {0};
    s1f_status status = costs->costs != NULL ? make_piece_cost(&cost, &pool) : make_document_cost(&cost, &pool);
    if (status == S1F_OK && mix == 0) {
        cut_evenly(&g, num_segments, sizes);
    } else if (status == S1F_OK) {
        cost.even_per_token = (1 - mix) * unmixed_of_first(&cost, seq_len) / (double)seq_len;
        double bound = least_bound(&g, num_segments);
        place_boundaries(&g, num_segments, bound, sizes);
    }
    s1f_pool_free(&pool);
    return status;
}
