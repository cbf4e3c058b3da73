/* test_partition.c - the partition against every composition of a short sequence, its errors and its one allocation. */
#include "check.h"
#include "core/partition.h"

#include <math.h>

enum { MAX_TOKENS = 12 };

/* Cheapest costliest segment over all ways to cut tokens [begin, seq_len) into `left` segments on the grid. */
static double brute_force(const double *costs, int64_t seq_len, int64_t begin, int32_t left, int64_t multiple_of,
                          int short_left)
{
    if (left == 0)
        return begin == seq_len && !short_left ? 0 : INFINITY;
    double best = INFINITY, cost = 0;
    for (int64_t end = begin + 1; end <= seq_len; end++) {
        cost += costs[end - 1];
        int64_t over = (end - begin) % multiple_of;
        int is_short = over != 0;
        if (is_short && (!short_left || over != seq_len % multiple_of))
            continue;
        double rest = brute_force(costs, seq_len, end, left - 1, multiple_of, short_left && !is_short);
        best = fmin(best, fmax(cost, rest));
    }
    return best;
}

static double costliest(const double *costs, const int64_t *sizes, int32_t num_segments)
{
    double most = 0;
    int64_t t = 0;
    for (int32_t i = 0; i < num_segments; i++) {
        double cost = 0;
        for (int64_t end = t + sizes[i]; t < end; t++)
            cost += costs[t];
        most = fmax(most, cost);
    }
    return most;
}

static void test_profiled_is_optimal(void)
{
    uint32_t state = 1;
    for (int round = 0; round < 400; round++) {
        double costs[MAX_TOKENS];
        int64_t seq_len = 1 + round % MAX_TOKENS;
        for (int64_t t = 0; t < seq_len; t++) {
            state = state * 1664525u + 1013904223u;
            costs[t] = (double)(state >> 29); /* 0..7: sums are exact */
        }
        costs[0] += 1;
        for (int64_t multiple_of = 1; multiple_of <= 5; multiple_of++) {
            int64_t units = (seq_len + multiple_of - 1) / multiple_of;
            for (int32_t k = 1; k <= units; k++) {
                int64_t sizes[MAX_TOKENS];
                CHECK_STATUS(s1f_partition_profiled(seq_len, k, costs, seq_len, 1.0, multiple_of, sizes), S1F_OK, "");
                CHECK_STATUS(s1f_partition_check(sizes, k, seq_len), S1F_OK, "");
                double best = brute_force(costs, seq_len, 0, k, multiple_of, seq_len % multiple_of != 0);
                CHECK(costliest(costs, sizes, k) == best);
            }
        }
    }
}

static void test_documents_are_optimal(void)
{
    s1f_model_shape model = {1, 1, 1, 1, 0, 0, 0}; /* 8 + 4 (t + 1) FLOP of token t: sums are exact */
    uint32_t state = 1;
    for (int round = 0; round < 200; round++) {
        int64_t seq_len = 1 + round % MAX_TOKENS, documents[4 * MAX_TOKENS], num_documents = 0;
        double costs[MAX_TOKENS] = {0};
        for (int row = 0; row < 1 << round % 3; row++) { /* 1, 2 or 4 rows */
            int64_t begin = 0;
            for (int64_t t = 0; t < seq_len; t++) {
                state = state * 1664525u + 1013904223u;
                costs[t] += 8 + 4 * (double)(t - begin + 1);
                if (state >> 30 == 0 || t == seq_len - 1) { /* a document ends at every fourth token */
                    documents[num_documents++] = t + 1 - begin;
                    begin = t + 1;
                }
            }
        }
        for (int64_t multiple_of = 1; multiple_of <= 3; multiple_of++) {
            int64_t units = (seq_len + multiple_of - 1) / multiple_of;
            for (int32_t k = 1; k <= units; k++) {
                int64_t sizes[MAX_TOKENS];
                CHECK_STATUS(s1f_partition_flops(seq_len, k, &model, documents, num_documents, 1.0, multiple_of, sizes),
                             S1F_OK, "");
                CHECK_STATUS(s1f_partition_check(sizes, k, seq_len), S1F_OK, "");
                double best = brute_force(costs, seq_len, 0, k, multiple_of, seq_len % multiple_of != 0);
                CHECK(costliest(costs, sizes, k) == best);
            }
        }
    }
}

static void test_longest_sequence(void)
{
    s1f_model_shape model = {1 << 16, 1000, 512, 8, 1 << 18, 1 << 20, 0};
    int64_t sizes[64];
    CHECK_STATUS(s1f_partition_flops(S1F_MAX_SEQUENCE_LENGTH, 64, &model, NULL, 0, 1.0, 128, sizes), S1F_OK, "");
    CHECK_STATUS(s1f_partition_check(sizes, 64, S1F_MAX_SEQUENCE_LENGTH), S1F_OK, "");
    double least = INFINITY, most = 0;
    int64_t begin = 0;
    for (int i = 0; i < 64; i++) {
        double flops;
        CHECK_STATUS(s1f_model_flops(&model, begin, begin + sizes[i], &flops), S1F_OK, "");
        least = fmin(least, flops);
        most = fmax(most, flops);
        begin += sizes[i];
    }
    CHECK(most / least < 1.0001);
    CHECK_STATUS(s1f_partition_even(S1F_MAX_SEQUENCE_LENGTH - 1, 64, 1 << 20, sizes), S1F_OK, "");
    CHECK_STATUS(s1f_partition_check(sizes, 64, S1F_MAX_SEQUENCE_LENGTH - 1), S1F_OK, "");
}

static void test_errors_leave_sizes_alone(void)
{
    s1f_model_shape model = {64, 2, 4, 2, 128, 100, 0}, odd_heads = {64, 2, 6, 2, 128, 100, 0};
    double costs[2] = {1, NAN}, zeros[2] = {0, 0};
    int64_t sizes[2] = {-7, -7};
    CHECK_STATUS(s1f_partition_even(0, 1, 1, sizes), S1F_ERR_ARG, "seq_len is 0");
    CHECK_STATUS(s1f_partition_even(S1F_MAX_SEQUENCE_LENGTH + 1, 1, 1, sizes), S1F_ERR_ARG, "must be in 1..");
    CHECK_STATUS(s1f_partition_even(1, 2, 1, sizes), S1F_ERR_ARG, "more than the 1 tokens");
    CHECK_STATUS(s1f_partition_even(8, 2, INT64_MAX, sizes), S1F_ERR_ARG, "hold only 1 segments");
    CHECK_STATUS(s1f_partition_flops(8, 2, &odd_heads, NULL, 0, 1, 1, sizes), S1F_ERR_ARG, "must divide hidden 64");
    CHECK_STATUS(s1f_partition_flops(8, 2, &model, NULL, 0, NAN, 1, sizes), S1F_ERR_ARG, "mix");
    const int64_t none[2] = {8, 0}, over[2] = {4, 5}, under[2] = {4, 3};
    CHECK_STATUS(s1f_partition_flops(8, 2, &odd_heads, none, 1, 1, 1, sizes), S1F_ERR_ARG, "must divide hidden 64");
    CHECK_STATUS(s1f_partition_flops(8, 2, &model, none, 0, 1, 1, sizes), S1F_ERR_ARG, "0 documents");
    CHECK_STATUS(s1f_partition_flops(8, 2, &model, none, 2, 1, 1, sizes), S1F_ERR_ARG, "documents[1] is 0");
    CHECK_STATUS(s1f_partition_flops(8, 2, &model, over, 2, 1, 1, sizes), S1F_ERR_ARG, "its row has 4 left");
    CHECK_STATUS(s1f_partition_flops(8, 2, &model, under, 2, 1, 1, sizes), S1F_ERR_ARG, "holds 7 tokens");
    CHECK_STATUS(s1f_partition_profiled(8, 2, costs, 2, 1, 1, sizes), S1F_ERR_ARG, "costs[1]");
    CHECK_STATUS(s1f_partition_profiled(8, 2, zeros, 2, 1, 1, sizes), S1F_ERR_ARG, "sum to 0");
    CHECK_STATUS(s1f_partition_profiled(8, 2, zeros, 0, 1, 1, sizes), S1F_ERR_ARG, "0 costs");
    CHECK(sizes[0] == -7 && sizes[1] == -7);

    const int64_t huge[3] = {INT64_MAX, INT64_MAX, 2}, zero[2] = {4, 0}, few[2] = {4, 3};
    CHECK_STATUS(s1f_partition_check(huge, 3, 8), S1F_ERR_ARG, "more than the 8 tokens");
    CHECK_STATUS(s1f_partition_check(zero, 2, 4), S1F_ERR_ARG, "segment 1 has 0 tokens");
    CHECK_STATUS(s1f_partition_check(few, 2, 8), S1F_ERR_ARG, "sum to 7");
    CHECK_STATUS(s1f_partition_check(few, 0, 8), S1F_ERR_ARG, "0 segment sizes");
}

static void test_failing_allocation(void)
{
    const double costs[3] = {1, 2, 3};
    int64_t sizes[2] = {-7, -7};
    fail_allocation(0);
    CHECK_STATUS(s1f_partition_profiled(9, 2, costs, 3, 1, 1, sizes), S1F_ERR_MEMORY, "running sums of 3 costs");
    CHECK(fail_allocation(-1) == 1);
    CHECK(sizes[0] == -7 && sizes[1] == -7);
    CHECK_STATUS(s1f_partition_profiled(9, 2, costs, 3, 1, 1, sizes), S1F_OK, "");
    CHECK(fail_allocation(-1) == 1);

    s1f_model_shape model = {64, 2, 4, 2, 128, 100, 0};
    const int64_t documents[3] = {4, 3, 2};
    sizes[0] = sizes[1] = -7;
    for (int i = 0; i < 2; i++) {
        fail_allocation(i);
        CHECK_STATUS(s1f_partition_flops(9, 2, &model, documents, 3, 1, 1, sizes), S1F_ERR_MEMORY, "3 documents");
        CHECK(sizes[0] == -7 && sizes[1] == -7);
    }
    fail_allocation(-1);
    CHECK_STATUS(s1f_partition_flops(9, 2, &model, documents, 3, 1, 1, sizes), S1F_OK, "");
}

int main(void)
{
    test_profiled_is_optimal();
    test_documents_are_optimal();
    test_longest_sequence();
    test_errors_leave_sizes_alone();
    test_failing_allocation();
    return check_failures();
}
