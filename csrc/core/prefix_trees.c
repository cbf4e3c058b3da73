/* prefix_trees.c - follows the rows of a group while they agree, makes a node of that, and goes on with branches. */
#include "prefix_trees.h"

#include "pool.h"

#include <stdlib.h>
#include <string.h>

typedef struct { /* rows order[first .. first + count) agree on targets 0 .. known - 1 */
    int64_t first, count;
    int64_t begin; /* input that their next node begins with */
    int64_t known;
    int64_t parent;
} group;

typedef struct {
    const s1f_token_rows *rows;
    int64_t row;
    int64_t token; /* where its next target is, or its first token, in all tokens */
    int is_supervised;
} branch;

typedef struct {
    int64_t first, count; /* of the sorted branches */
    int64_t least;        /* of its rows */
} run;

typedef struct {
    const s1f_token_rows *rows;
    int64_t min_shared;
    int64_t *order; /* rows; those of a group lie side by side */
    int64_t *spare; /* as long */
    branch *branches;
    run *runs;
    group *stack;
    int64_t depth;   /* groups on the stack */
    int64_t *seen;   /* for each target of a path, a row that is supervised there; -1: none */
    int64_t *offset; /* of each node's first token in all tokens of the trees */
    int64_t total;   /* tokens of the nodes so far */
    s1f_prefix_node *nodes;
    int64_t num_nodes;
    const s1f_prefix_results *results;
} builder;

static int64_t num_targets(const s1f_token_rows *rows, int64_t row)
{
    return rows->begin[row + 1] - rows->begin[row] - 1;
}

static int is_supervised(const s1f_token_rows *rows, int64_t token)
{
    return rows->weight == NULL || rows->weight[token] != 0;
}

/* As memcmp of all values of two tokens; *column: where they differ. */
static int compare_values(const s1f_token_rows *rows, int64_t a, int64_t b, int32_t *column)
{
    for (int32_t i = 0; i < rows->num_columns; i++) {
        const char *values = rows->columns[i].values;
        size_t bytes = (size_t)rows->columns[i].bytes;
        int order = memcmp(values + (size_t)a * bytes, values + (size_t)b * bytes, bytes);
        *column = i;
        if (order != 0)
            return order;
    }
    return 0;
}

/* The first target, of `begin` to `end` - 1, at which the row's values differ from those of rows before; `end`. */
static int64_t first_apart(builder *b, int64_t row, int64_t begin, int64_t end)
{
    const s1f_token_rows *rows = b->rows;
    int32_t column;
    for (int64_t p = begin; p < end; p++) {
        int64_t token = rows->begin[row] + 1 + p;
        if (!is_supervised(rows, token))
            continue;
        if (b->seen[p] < 0)
            b->seen[p] = row;
        else if (compare_values(rows, token, rows->begin[b->seen[p]] + 1 + p, &column) != 0)
            return p;
    }
    return end;
}

static int64_t longest_row(const builder *b, const group *g)
{
    const int64_t *order = b->order + g->first;
    int64_t longest = order[0];
    for (int64_t i = 1; i < g->count; i++)
        if (num_targets(b->rows, order[i]) > num_targets(b->rows, longest))
            longest = order[i];
    return longest;
}

/* How many targets all rows of the group agree on, as far as each goes. */
static int64_t agreed(builder *b, const group *g, int64_t longest)
{
    const s1f_token_rows *rows = b->rows;
    const int64_t *order = b->order + g->first;
    int64_t end = num_targets(rows, longest);
    if (g->count == 1)
        return end;
    for (int64_t p = g->known; rows->num_columns > 0 && p < end; p++)
        b->seen[p] = -1;
    const int64_t *path = rows->tokens + rows->begin[longest] + 1;
    for (int64_t i = 0; i < g->count; i++) {
        const int64_t *own = rows->tokens + rows->begin[order[i]] + 1;
        int64_t most = num_targets(rows, order[i]) < end ? num_targets(rows, order[i]) : end, p = g->known;
        while (p < most && own[p] == path[p])
            p++;
        if (p < most)
            end = p;
        if (rows->num_columns > 0) {
            int64_t apart = first_apart(b, order[i], g->known, p);
            end = apart < p ? apart : end;
        }
    }
    return end;
}

/* By label and token, what is not supervised first, then by values and row. */
static int compare_branches(const void *left, const void *right)
{
    const branch *a = left, *b = right;
    const s1f_token_rows *rows = a->rows;
    int64_t pairs[4][2] = {{rows->label[a->row], rows->label[b->row]},
                           {rows->tokens[a->token], rows->tokens[b->token]},
                           {a->is_supervised, b->is_supervised},
                           {a->row, b->row}};
    int32_t column;
    for (int i = 0; i < 4; i++) {
        if (i == 3 && a->is_supervised && b->is_supervised) {
            int order = compare_values(rows, a->token, b->token, &column);
            if (order != 0)
                return order;
        }
        if (pairs[i][0] != pairs[i][1])
            return pairs[i][0] < pairs[i][1] ? -1 : 1;
    }
    return 0;
}

static int compare_runs(const void *left, const void *right)
{
    const run *a = left, *b = right;
    return a->least < b->least ? -1 : a->least > b->least;
}

/* Whether a branch parts from the one before it in their order. */
static int parts(builder *b, const branch *before, const branch *own)
{
    const s1f_token_rows *rows = b->rows;
    int32_t column = 0;
    if (rows->label[before->row] != rows->label[own->row] || rows->tokens[before->token] != rows->tokens[own->token])
        return 1;
    if (!before->is_supervised || compare_values(rows, before->token, own->token, &column) == 0)
        return 0;
    s1f_values_apart *apart = b->results->apart;
    if (apart->count++ == 0)
        *apart = (s1f_values_apart){1, {before->row, own->row}, own->token - rows->begin[own->row], column};
    return 1;
}

/* Pushes a group for each branch of rows order[first + ended .. first + count), which part at target `end`; -1: at
 * their first token. The rows that have ended go with the first of them. */
static void push_branches(builder *b, const group *g, int64_t ended, int64_t end, int64_t begin, int64_t parent)
{
    const s1f_token_rows *rows = b->rows;
    int64_t *order = b->order + g->first, count = g->count - ended, num_runs = 0, written = ended;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = order[ended + i], token = rows->begin[row] + 1 + end;
        b->branches[i] = (branch){rows, row, token, end >= 0 && is_supervised(rows, token)};
    }
    qsort(b->branches, (size_t)count, sizeof *b->branches, compare_branches);
    for (int64_t i = 0; i < count; i++) {
        if (i == 0 || parts(b, &b->branches[i - 1], &b->branches[i]))
            b->runs[num_runs++] = (run){i, 0, b->branches[i].row};
        run *last = &b->runs[num_runs - 1];
        last->count++;
        last->least = b->branches[i].row < last->least ? b->branches[i].row : last->least;
    }
    qsort(b->runs, (size_t)num_runs, sizeof *b->runs, compare_runs);
    for (int64_t i = 0; i < num_runs; i++)
        for (int64_t j = 0; j < b->runs[i].count; j++)
            order[written++] = b->branches[b->runs[i].first + j].row;
    int64_t last = g->first + g->count;
    for (int64_t i = num_runs - 1; i >= 0; i--) { /* the first one ends on top */
        int64_t size = b->runs[i].count + (i == 0 ? ended : 0);
        last -= size;
        b->stack[b->depth++] = (group){last, size, begin, end < 0 ? 0 : end, parent};
    }
}

/* Writes the results of a row that ends in the node. */
static void finish_row(builder *b, int64_t row, int64_t node)
{
    const s1f_prefix_results *to = b->results;
    int64_t first = b->rows->begin[row] + 1, end = num_targets(b->rows, row);
    for (; node >= 0; node = b->nodes[node].parent) {
        int64_t begin = b->nodes[node].begin, place = b->offset[node];
        for (int64_t token = first + begin; token < first + end; token++, place++) {
            to->place[token] = place;
            if (is_supervised(b->rows, token))
                to->target[place] = token;
            else if (to->target[place] < 0)
                to->target[place] = -1 - token;
            to->weight[place] += b->rows->weight == NULL ? 1 : b->rows->weight[token];
        }
        end = begin < end ? begin : end;
    }
}

/* Moves the rows of the group that have no target from `end` on to its front; their number. */
static int64_t ended_first(builder *b, const group *g, int64_t end)
{
    int64_t *order = b->order + g->first, ended = 0, others = 0;
    for (int64_t i = 0; i < g->count; i++) {
        if (num_targets(b->rows, order[i]) <= end)
            order[ended++] = order[i];
        else
            b->spare[others++] = order[i];
    }
    memcpy(order + ended, b->spare, (size_t)others * sizeof *order);
    return ended;
}

static void grow(builder *b)
{
    while (b->depth > 0) {
        group g = b->stack[--b->depth];
        int64_t longest = longest_row(b, &g), end = agreed(b, &g, longest), ended = ended_first(b, &g, end);
        if (ended < g.count && end - g.begin < b->min_shared) {
            push_branches(b, &g, ended, end, g.begin, g.parent);
            continue;
        }
        int64_t node = b->num_nodes++;
        b->nodes[node] = (s1f_prefix_node){g.parent, longest, g.begin, end - g.begin};
        b->offset[node] = b->total;
        for (; b->total < b->offset[node] + end - g.begin; b->total++) {
            b->results->target[b->total] = -1;
            b->results->weight[b->total] = 0;
        }
        for (int64_t i = 0; i < ended; i++)
            finish_row(b, b->order[g.first + i], node);
        g.first += ended;
        g.count -= ended;
        if (g.count > 0)
            push_branches(b, &g, 0, end, end, node);
    }
}

s1f_status s1f_prefix_trees(const s1f_token_rows *rows, int64_t min_shared, const s1f_prefix_results *results)
{
    if (min_shared < 1)
        return s1f_fail(S1F_ERR_ARG, "min_shared is %lld, must be at least 1: a node shares so many tokens or more",
                        (long long)min_shared);
    size_t n = (size_t)rows->num_rows + 1;
    int64_t longest = 1;
    for (int64_t row = 0; row < rows->num_rows; row++)
        longest = num_targets(rows, row) > longest ? num_targets(rows, row) : longest;
    builder b = {.rows = rows, .min_shared = min_shared, .nodes = results->nodes, .results = results};
    s1f_pool pool = {0};
    b.order = s1f_pool_take(&pool, n, sizeof *b.order);
    b.spare = s1f_pool_take(&pool, n, sizeof *b.spare);
    b.branches = s1f_pool_take(&pool, n, sizeof *b.branches);
    b.runs = s1f_pool_take(&pool, n, sizeof *b.runs);
    b.stack = s1f_pool_take(&pool, n, sizeof *b.stack);
    b.offset = s1f_pool_take(&pool, 2 * n, sizeof *b.offset);
    b.seen = s1f_pool_take(&pool, (size_t)longest, sizeof *b.seen);
    s1f_status status = S1F_OK;
    *results->apart = (s1f_values_apart){0};
    if (pool.is_short) {
        status = s1f_fail(S1F_ERR_MEMORY, "no memory for trees of %lld rows", (long long)rows->num_rows);
    } else {
        group all = {0};
        for (int64_t row = 0; row < rows->num_rows; row++) {
            if (rows->begin[row] < rows->begin[row + 1])
                results->place[rows->begin[row]] = -1;
            if (num_targets(rows, row) > 0)
                b.order[all.count++] = row;
        }
        push_branches(&b, &all, 0, -1, 0, -1);
        grow(&b);
    }
    *results->num_nodes = b.num_nodes;
    s1f_pool_free(&pool);
    return status;
}
