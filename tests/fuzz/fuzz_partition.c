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
    REQUIRE(s1f_partition_check(c->sizes, c->num_segments, c->seq_len) == S1F_OK);
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

static double costliest(const cut *c, const s1f_model_shape *model)
{
    int64_t begin = 0;
    double most = 0;
    for (int32_t i = 0; i < c->num_segments; i++) {
        double flops = NAN;
        REQUIRE(s1f_model_flops(model, begin, begin + c->sizes[i], &flops) == S1F_OK);
        REQUIRE(isfinite(flops) && flops >= 0);
        most = fmax(most, flops);
        begin += c->sizes[i];
    }
    return most;
}

static s1f_model_shape take_model(fuzz_input *in)
{
    s1f_model_shape model = {.hidden = take_int64(in), .layers = take_int64(in)};
    model.heads = take_int64(in);
    model.kv_heads = take_int64(in);
    model.ffn = take_int64(in);
    model.vocab = take_int64(in);
    model.head_dim = take_int64(in);
    return model;
}

static void cut_by_model(fuzz_input *in)
{
    s1f_model_shape model = take_model(in);
    cut c = take_cut(in), even = c;
    s1f_status status = s1f_partition_flops(c.seq_len, c.num_segments, &model, NULL, 0, c.mix, c.multiple_of, c.sizes);
    if (!is_cut(&c, status))
        return;
    REQUIRE(s1f_partition_even(even.seq_len, even.num_segments, even.multiple_of, even.sizes) == S1F_OK);
    if (c.mix == 1) /* up to rounding */
        REQUIRE(costliest(&c, &model) <= costliest(&even, &model) * (1 + 1e-9));
}

static void cut_by_documents(fuzz_input *in)
{
    s1f_model_shape model = take_model(in);
    cut c = take_cut(in);
    int64_t documents[MOST_VALUES], count = take_below(in, MOST_VALUES + 1), left = c.seq_len;
    for (int64_t i = 0; i < count; i++) {
        documents[i] = take_int64(in);
        if (documents[i] >= left || documents[i] == 0) /* fills the row */
            documents[i] = left;
        left = documents[i] >= left ? c.seq_len : left - (documents[i] > 0 ? documents[i] : 0);
    }
    is_cut(&c, s1f_partition_flops(c.seq_len, c.num_segments, &model, documents, count, c.mix, c.multiple_of, c.sizes));
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
    if (is_cut(&c, s1f_partition_profiled(c.seq_len, c.num_segments, costs, count, c.mix, c.multiple_of, c.sizes)))
        REQUIRE(are_costs && isfinite(sum) && sum > 0);
}

static void cut_evenly(fuzz_input *in)
{
    cut c = take_cut(in);
    if (!is_cut(&c, s1f_partition_even(c.seq_len, c.num_segments, c.multiple_of, c.sizes)))
        return;
    int64_t least = c.sizes[0], most = c.sizes[0];
    for (int32_t i = 1; i < c.num_segments; i++) {
        least = c.sizes[i] < least ? c.sizes[i] : least;
        most = c.sizes[i] > most ? c.sizes[i] : most;
    }
    REQUIRE(most - least <= c.multiple_of || c.seq_len % c.multiple_of != 0);
}

/* The checker itself, with sizes that nobody made. */
static void check_any(fuzz_input *in)
{
    int64_t sizes[MOST_VALUES], seq_len = take_int64(in);
    int32_t count = take_below(in, MOST_VALUES + 1);
    __int128 sum = 0;
    int are_sizes = count >= 1;
    for (int32_t i = 0; i < count; i++) {
        sizes[i] = take_int64(in);
        are_sizes &= sizes[i] >= 1;
        sum += sizes[i];
    }
    s1f_status status = s1f_partition_check(sizes, count, seq_len);
    REQUIRE((status == S1F_OK) == (are_sizes && sum == seq_len));
    if (status != S1F_OK)
        REQUIRE_REFUSED(status);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const calls[])(fuzz_input *) = {cut_by_model, cut_by_documents, cut_by_costs, cut_evenly, check_any};
    fuzz_input in = {data, size};
    calls[take_below(&in, sizeof calls / sizeof *calls)](&in);
    return 0;
}
