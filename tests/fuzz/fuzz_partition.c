/* fuzz_partition.c - is a partition whole, on its grid and no worse than an even one, or refused and unwritten? */
#include "fuzz.h"

#include "core/partition.h"

enum { MOST_SEGMENTS = 12, MOST_VALUES = 24 };

static const int64_t UNWRITTEN = -77;

typedef struct {
    int64_t seq_len, multiple_of;
    int32_t num_segments;
    double mix;
    int64_t sizes[MOST_SEGMENTS];
} cut;

static cut take_cut(fuzz_input *in)
{
    cut c = {.seq_len = take_int64(in), .multiple_of = take_int64(in), .num_segments = take_int32(in)};
    c.mix = take_bits(in, 1) % 4 == 0 ? take_double(in) : (double)take_below(in, 5) / 4;
    if (c.num_segments > MOST_SEGMENTS && c.num_segments <= c.seq_len)
        c.num_segments = MOST_SEGMENTS; /* more may be right, and need room */
    for (int i = 0; i < MOST_SEGMENTS; i++)
        c.sizes[i] = UNWRITTEN;
    return c;
}

static int is_cut(cut *c, s1f_status status)
{
    if (status != S1F_OK) {
        REQUIRE(status == S1F_ERR_ARG && s1f_last_error()[0] != '\0');
        for (int i = 0; i < MOST_SEGMENTS; i++)
            REQUIRE(c->sizes[i] == UNWRITTEN);
        return 0;
    }
    int64_t sum = 0, off_grid = 0;
    REQUIRE(c->num_segments >= 1 && c->num_segments <= MOST_SEGMENTS);
    for (int32_t i = 0; i < c->num_segments; i++) {
        REQUIRE(c->sizes[i] >= 1);
        sum += c->sizes[i];
        off_grid += c->sizes[i] % c->multiple_of != 0;
    }
    REQUIRE(sum == c->seq_len);
    REQUIRE(off_grid == (c->seq_len % c->multiple_of != 0));
    REQUIRE(c->num_segments == MOST_SEGMENTS || c->sizes[c->num_segments] == UNWRITTEN);
    return 1;
}

static double costliest(const cut *c, const s1f_token_costs *costs)
{
    double begin = 0, most = 0;
    for (int32_t i = 0; i < c->num_segments; i++) {
        double end = begin + (double)c->sizes[i];
        most = fmax(most, costs->linear * (end - begin) + costs->quadratic * (end * (end + 1) - begin * (begin + 1)));
        begin = end;
    }
    return most;
}

static s1f_token_costs take_formula(fuzz_input *in)
{
    double hidden = (double)(take_int64(in) & UINT16_MAX), layers = (double)(take_int64(in) & UINT16_MAX);
    return (s1f_token_costs){.linear = 1 + layers * hidden * hidden, .quadratic = layers * hidden};
}

static void cut_by_model(fuzz_input *in)
{
    s1f_token_costs costs = take_formula(in);
    cut c = take_cut(in), even = c;
    s1f_status status = s1f_partition(c.seq_len, c.num_segments, &costs, c.mix, c.multiple_of, c.sizes);
    if (!is_cut(&c, status))
        return;
    REQUIRE(s1f_partition(even.seq_len, even.num_segments, &costs, 0, even.multiple_of, even.sizes) == S1F_OK);
    if (c.mix == 1) /* up to rounding */
        REQUIRE(costliest(&c, &costs) <= costliest(&even, &costs) * (1 + 1e-9));
}

static void cut_by_documents(fuzz_input *in)
{
    s1f_token_costs costs = take_formula(in);
    cut c = take_cut(in);
    int64_t documents[MOST_VALUES], count = take_below(in, MOST_VALUES + 1), left = c.seq_len;
    for (int64_t i = 0; i < count; i++) {
        documents[i] = take_int64(in);
        if (documents[i] >= left || documents[i] == 0) /* fills the row */
            documents[i] = left;
        left = documents[i] >= left ? c.seq_len : left - (documents[i] > 0 ? documents[i] : 0);
    }
    costs.documents = documents;
    costs.num_documents = count;
    is_cut(&c, s1f_partition(c.seq_len, c.num_segments, &costs, c.mix, c.multiple_of, c.sizes));
}

static void cut_by_costs(fuzz_input *in)
{
    cut c = take_cut(in);
    double costs[MOST_VALUES], sum = 0;
    int64_t count = take_below(in, MOST_VALUES + 1);
    int are_costs = count >= 1;
    for (int64_t i = 0; i < count; i++) {
        costs[i] = take_double(in);
        are_costs &= isfinite(costs[i]) && costs[i] >= 0;
        sum += costs[i];
    }
    const s1f_token_costs pieces = {.costs = costs, .num_costs = count};
    if (is_cut(&c, s1f_partition(c.seq_len, c.num_segments, &pieces, c.mix, c.multiple_of, c.sizes)))
        REQUIRE(are_costs && isfinite(sum) && sum > 0);
}

static void cut_evenly(fuzz_input *in)
{
    cut c = take_cut(in);
    const s1f_token_costs alike = {.linear = 1};
    if (!is_cut(&c, s1f_partition(c.seq_len, c.num_segments, &alike, 0, c.multiple_of, c.sizes)))
        return;
    int64_t least = c.sizes[0], most = c.sizes[0];
    for (int32_t i = 1; i < c.num_segments; i++) {
        least = c.sizes[i] < least ? c.sizes[i] : least;
        most = c.sizes[i] > most ? c.sizes[i] : most;
    }
    REQUIRE(most - least <= c.multiple_of || c.seq_len % c.multiple_of != 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const calls[])(fuzz_input *) = {cut_by_model, cut_by_documents, cut_by_costs, cut_evenly};
    fuzz_input in = {data, size};
    calls[take_below(&in, sizeof calls / sizeof *calls)](&in);
    return 0;
}
