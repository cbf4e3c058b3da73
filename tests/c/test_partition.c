/* test_partition.c - what a refused partition leaves alone, and its allocations; tests/core has the sizes. */
#include "check.h"
#include "core/partition.h"

static void test_failing_allocation(void)
{
    const double pieces[3] = {1, 2, 3};
    const int64_t documents[3] = {4, 3, 2};
    const s1f_token_costs measured = {.costs = pieces, .num_costs = 3};
    const s1f_token_costs formula = {.linear = 8, .quadratic = 2, .documents = documents, .num_documents = 3};
    int64_t sizes[2] = {-7, -7};
    CHECK_STATUS(s1f_partition(9, 10, &measured, 1, 1, sizes), S1F_ERR_ARG, "more than the 9 tokens");
    CHECK_STATUS(s1f_partition(8, 2, &formula, 1, 1, sizes), S1F_ERR_ARG, "its row has 1 left");
    for (int i = 0; i < 3; i++) {
        fail_allocation(i % 2);
        CHECK_STATUS(s1f_partition(9, 2, i == 2 ? &measured : &formula, 1, 1, sizes), S1F_ERR_MEMORY,
                     i == 2 ? "no memory for the running sums" : "no memory for the ends of documents");
    }
    fail_allocation(-1);
    CHECK(sizes[0] == -7 && sizes[1] == -7);
    CHECK_STATUS(s1f_partition(9, 2, &measured, 1, 1, sizes), S1F_OK, "");
    CHECK(sizes[0] == 6 && sizes[1] == 3);
    CHECK_STATUS(s1f_partition(9, 2, &formula, 1, 1, sizes), S1F_OK, "");
    CHECK(sizes[0] + sizes[1] == 9);
}

int main(void)
{
    test_failing_allocation();
    return check_failures();
}
