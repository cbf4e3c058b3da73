/* test_prefix_trees.c - trees of random rows against the number of their prefixes, in rooms that just suffice. */
#include "check.h"
#include "core/prefix_trees.h"

#include <stdlib.h>

enum { MOST_ROWS = 9, MOST_LENGTH = 7, LEAST = 3 };

static uint32_t state = 1;

static int64_t below(uint32_t end)
{
    state = state * 1664525u + 1013904223u;
    return (int64_t)((state >> 16) % end);
}

static void *room(int64_t count, size_t bytes)
{
    return calloc(count > 0 ? (size_t)count : 1, bytes);
}

static int are_equal(const s1f_token_rows *rows, int64_t a, int64_t b, int64_t tokens)
{
    const int64_t *one = rows->tokens + rows->begin[a], *other = rows->tokens + rows->begin[b];
    return rows->label[a] == rows->label[b] && memcmp(one, other, (size_t)tokens * sizeof *one) == 0;
}

/* Prefixes of 2 tokens or more that no row before has. */
static int64_t count_prefixes(const s1f_token_rows *rows)
{
    int64_t count = 0;
    for (int64_t row = 0; row < rows->num_rows; row++)
        for (int64_t tokens = 2; tokens <= rows->begin[row + 1] - rows->begin[row]; tokens++) {
            int is_new = 1;
            for (int64_t other = 0; other < row; other++)
                is_new &= rows->begin[other + 1] - rows->begin[other] < tokens || !are_equal(rows, row, other, tokens);
            count += is_new;
        }
    return count;
}

static void check_results(const s1f_token_rows *rows, int64_t least, const s1f_prefix_results *found)
{
    int64_t total = 0, tokens = rows->begin[rows->num_rows];
    double weights = 0, wanted = 0;
    for (int64_t i = 0; i < *found->num_nodes; i++) {
        CHECK(found->nodes[i].size >= 1 && found->nodes[i].parent < i);
        total += found->nodes[i].size;
    }
    for (int64_t t = 0; t < total; t++)
        weights += found->weight[t];
    for (int64_t row = 0; row < rows->num_rows; row++)
        for (int64_t t = rows->begin[row]; t < rows->begin[row + 1]; t++) {
            CHECK((found->place[t] < 0) == (t == rows->begin[row]) && found->place[t] < total);
            wanted += t > rows->begin[row] ? (rows->weight == NULL ? 1 : rows->weight[t]) : 0;
        }
    CHECK(weights == wanted && total <= tokens);
    if (least == 1 && rows->num_columns == 0)
        CHECK(total == count_prefixes(rows));
}

static void test_random_rows(void)
{
    for (int round = 0; round < 3000; round++) {
        int64_t num_rows = below(MOST_ROWS), num_nodes;
        int64_t *begin = room(num_rows + 1, sizeof *begin), *label = room(num_rows, sizeof *label);
        for (int64_t row = 0; row < num_rows; row++) {
            begin[row + 1] = begin[row] + 1 + below(MOST_LENGTH);
            label[row] = below(2);
        }
        int64_t count = begin[num_rows], *tokens = room(count, sizeof *tokens);
        double *weight = room(count, sizeof *weight);
        char *values = room(count, sizeof *values);
        for (int64_t t = 0; t < count; t++) {
            tokens[t] = below(2);
            weight[t] = (double)below(3);
            values[t] = below(4) == 0;
        }
        s1f_token_column column = {values, 1};
        s1f_token_rows rows = {num_rows, begin, label, tokens, below(2) ? weight : NULL, &column, (int32_t)below(2)};
        s1f_values_apart apart;
        s1f_prefix_results found = {room(2 * num_rows, sizeof *found.nodes),
                                    &num_nodes,
                                    room(count, sizeof(int64_t)),
                                    room(count, sizeof(int64_t)),
                                    room(count, sizeof(double)),
                                    &apart};
        int64_t least = 1 + below(LEAST);
        CHECK_STATUS(s1f_prefix_trees(&rows, least, &found), S1F_OK, "");
        check_results(&rows, least, &found);
        CHECK(rows.num_columns > 0 || apart.count == 0);
        CHECK(apart.count == 0 || (apart.rows[0] != apart.rows[1] && apart.column == 0 && apart.token > 0));
        free(begin);
        free(label);
        free(tokens);
        free(weight);
        free(values);
        free(found.nodes);
        free(found.place);
        free(found.target);
        free(found.weight);
    }
}

static void test_errors(void)
{
    const int64_t begin[3] = {0, 2, 4}, label[2] = {0, 0}, tokens[4] = {1, 2, 1, 3};
    s1f_token_rows rows = {.num_rows = 2, .begin = begin, .label = label, .tokens = tokens};
    s1f_prefix_node nodes[4];
    s1f_values_apart apart;
    int64_t num_nodes = 0, place[4], target[4];
    double weight[4];
    s1f_prefix_results found = {nodes, &num_nodes, place, target, weight, &apart};
    CHECK_STATUS(s1f_prefix_trees(&rows, 0, &found), S1F_ERR_ARG, "min_shared is 0, must be at least 1");
    for (int i = 0; i < 7; i++) {
        fail_allocation(i);
        CHECK_STATUS(s1f_prefix_trees(&rows, 1, &found), S1F_ERR_MEMORY, "no memory for trees of 2 rows");
    }
    fail_allocation(-1);
    CHECK_STATUS(s1f_prefix_trees(&rows, 1, &found), S1F_OK, "");
    CHECK(num_nodes == 2 && place[1] == 0 && place[3] == 1);
}

int main(void)
{
    test_random_rows();
    test_errors();
    return check_failures();
}
