/* prefix_trees.h - rows of tokens as trees: what several rows begin with alike stands in a tree once.
 *
 * A row of n tokens has n - 1 targets: token t is the target of the token before it, and the last token is no input,
 * since nothing follows it. A node is a run of inputs of one path, each with its target. Rows share an input where all
 * tokens up to its target are the same. So a node ends before the last token that its rows share, and that token opens
 * every branch: every token of a tree has exactly one target, which is the next token of its own path.
 *
 * Values. A target may have a weight and values beside it, such as an advantage. One whose weight is 0 in a row is not
 * supervised there, and its values do not matter. Supervised targets that share an input have the same values, byte by
 * byte; where values differ, sharing ends before the input. A row that does not supervise it goes on with one of them.
 *
 * Rows that end on the path of others need no node. A node of fewer than min_shared tokens that others follow is left
 * out: each of them gets its tokens, and follows its parent, or is a tree.
 *
 * Order. Nodes are in preorder, a parent before its children, and one tree after another. Trees, and children of a
 * node, are in the order of their first rows.
 *
 * Each token of a row is looked at once, beside the sorting at branches. Pure: nothing is kept. */
#ifndef S1F_PREFIX_TREES_H
#define S1F_PREFIX_TREES_H

#include "status.h"

#include <stdint.h>

typedef struct {
    const void *values; /* of all tokens, row after row */
    int64_t bytes;      /* of one token */
} s1f_token_column;

typedef struct {
    int64_t num_rows;
    const int64_t *begin;  /* [num_rows + 1] the first token of each row, ascending; the last one is their number */
    const int64_t *label;  /* [num_rows] rows share with those of the same label only */
    const int64_t *tokens; /* of all rows, row after row */
    const double *weight;  /* of each token as a target; NULL: all are supervised */
    const s1f_token_column *columns;
    int32_t num_columns;
} s1f_token_rows;

typedef struct {
    int64_t parent; /* node that it follows; -1: it is a root */
    int64_t row;    /* that it is taken from: */
    int64_t begin;  /* its first token, which is its place on the path */
    int64_t size;   /* tokens */
} s1f_prefix_node;

typedef struct {
    int64_t count;   /* branches that differ in values alone */
    int64_t rows[2]; /* two rows that one of them parts, */
    int64_t token;   /* at this target, */
    int32_t column;  /* by these values */
} s1f_values_apart;

typedef struct {            /* the caller's room */
    s1f_prefix_node *nodes; /* 2 num_rows of them */
    int64_t *num_nodes;
    int64_t *place;  /* [token of the rows] the token, of all trees, node after node, whose target it is; -1: it is the
                       first one of its row */
    int64_t *target; /* [token of the trees] its target, a token of a row that supervises it; where none does, -1 less
                        such a token. Room for as many as the rows have, as for: */
    double *weight;  /* [token of the trees] the sum of its rows' weights */
    s1f_values_apart *apart;
} s1f_prefix_results;

/* S1F_ERR_ARG if min_shared is below 1; S1F_ERR_MEMORY (about 150 bytes per row). */
s1f_status s1f_prefix_trees(const s1f_token_rows *rows, int64_t min_shared, const s1f_prefix_results *results);

#endif
