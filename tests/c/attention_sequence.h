/* attention_sequence.h - one sequence for the tests of attention: its tensors, what attention of them must be, computed
 * naively in double by code that the kernels share nothing with, and how far results are from that. */
#ifndef S1F_TESTS_ATTENTION_SEQUENCE_H
#define S1F_TESTS_ATTENTION_SEQUENCE_H

#include "../../kernels/attention_internal.h"

extern int64_t num_failed, num_checks;

typedef struct {
    int32_t dtype;
    int64_t batch, heads, kv_heads, first, length, head_dim, v_head_dim; /* v_head_dim 0: head_dim */
    int tokens_outside; /* layout (B, rows, H, D) and not (B, H, rows, D) */
    int64_t window;
    double softcap, alibi, logits; /* alibi: slope of head 0, 0 for none; logits: their rough size, 0 for 1 */
    int64_t num_docs;              /* documents of the sequence, 0 for no ids */
    int shares_prefix;             /* keys before `first` are in everybody's document */
    int64_t ranges;                /* of rows, in which keys lie; 0: one after another */
    int docs_return;               /* there are two ids, by turns */
    int same_keys;                 /* all rows of k are one */
    enum { BY_HEAD_DIM, NEGATIVE, ZERO } scaling;
    enum { NO_SINKS, SINKS, FAR_SINKS } sinks; /* far: -infinity, and next to the ends of fp32 */
    int64_t parts; /* segments, 0 for 3 of about equal length; else `cuts` says where each ends */
    const int64_t *cuts;
} shape;

typedef enum { OF_Q, OF_OUT, OF_K, OF_V } kind; /* q and dq; out and dout; k and dk; v and dv */

typedef struct { /* of the tensors of a kind */
    int64_t heads, rows, dim, elements;
    s1f_strides strides;
} layout;

/* The rows [first, length) are queries. k and v have spare rows as well, behind the others and between ranges: NaN. */
typedef struct {
    shape s;
    layout of[4];
    int64_t *key_rows;     /* row of each key of k and v, then the spare rows; NULL: rows are keys */
    s1f_key_range *ranges; /* of the segment that segment_args was asked for last */
    int32_t num_ranges;
    void *q, *k, *v, *out, *dout, *dq, *dk, *dv, *lse;
    float *slopes;
    int32_t *docs;
    void *sinks, *dsinks; /* (Hq); (rows, Hq): of a segment at its first row, 0 elsewhere */
} sequence;

enum { SPARE_ROWS = 5 };

typedef struct {                               /* (B, heads of the kind, N, dim of the kind); lse (B, Hq, N) */
    double *out, *lse, *dq, *dk, *dv, *dsinks; /* dsinks (Hq) */
    /* For products of bf16, the same sums of the terms' sizes. P and dS are rounded to bf16 before they are
     * multiplied, each by up to 2^-8 of itself, so that a sum is off by up to 2^-8 of this. */
    double *out_terms, *dq_terms, *dk_terms, *dv_terms;
} naive_results;

typedef struct {
    double error, largest; /* largest |got - want| beyond what the rounding of its terms allows, NaN if any is NaN;
                            * largest |want| */
} difference;

typedef s1f_status (*kernel)(const s1f_attention_args *, const s1f_attention_context *);

void check(int ok, const char *what);
void *allocate(int64_t bytes);
uint32_t random_bits(void);
double get(int32_t dtype, const void *x, int64_t i);
void put(int32_t dtype, void *x, int64_t i, double value);
int64_t at(const sequence *x, kind of, int64_t b, int64_t h, int64_t row);
/* The dtype of a result, which for dk and dv is that of sums, and its bytes. */
int32_t result_dtype(const sequence *x, kind of);
int64_t result_bytes(const sequence *x, kind of);
void fill(int32_t dtype, void *x, int64_t elements, double value);
/* Results start as NaN, so whatever is left unwritten shows. */
void clear_results(sequence *x);
sequence sequence_new(shape s);
void sequence_free(sequence *x);
/* Arguments of the segment [begin, end). Its lse stands at B Hq begin, as (B, Hq, end - begin). */
s1f_attention_args segment_args(const sequence *x, int64_t begin, int64_t end, int store);
double *zeros(int64_t count);
int is_half(int32_t dtype);
naive_results naive_new(const sequence *x);
void naive_free(naive_results *r);
const char *describe(const shape *s, const char *what);
void check_difference(const sequence *x, const char *what, difference d, double tolerance);
/* A result in `got`, the rows that it has, against times `want` plus `plus`. terms: as wide, or NULL. */
difference result_difference(const sequence *x, kind of, const void *got, const double *want, const double *terms,
                             double times, double plus);
/* lse of the one segment [first, N). */
difference lse_difference(const sequence *x, const double *want);
/* dsinks, over all segments; no difference without sinks. */
difference sink_difference(const sequence *x, const double *want);
/* Rows without a key were never written. */
int spare_rows_untouched(const sequence *x);
/* Begin of segment i of `parts`, and the end of the one before. */
int64_t cut(const shape *s, int64_t parts, int64_t i);
/* Forward over the segments, backward from the last to the first. The first to run backward stores dk and dv of all
 * rows it sees, the others add, as a stage does. */
void run_segments(sequence *x, int64_t parts, kernel forward, kernel backward, const s1f_attention_context *context);

#endif
