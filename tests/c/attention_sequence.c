/* attention_sequence.c - see attention_sequence.h. */
#include "attention_sequence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int64_t num_failed, num_checks;

void check(int ok, const char *what)
{
    num_checks++;
    if (!ok && num_failed++ < 40)
        printf("FAILED: %s\n", what);
}

void *allocate(int64_t bytes)
{
    void *memory = malloc((size_t)(bytes ? bytes : 1));
    if (!memory)
        abort();
    return memory;
}

/* ---- random numbers and elements ---- */

static uint64_t random_state = 1;

uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static double random_normal(void) /* roughly: variance 1 */
{
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += random_bits() * 0x1p-32;
    return sum - 6;
}

double get(int32_t dtype, const void *x, int64_t i)
{
    switch (dtype) {
    case S1F_FLOAT64: return ((const double *)x)[i];
    case S1F_FLOAT32: return ((const float *)x)[i];
    case S1F_BFLOAT16: return s1f_from_bf16(((const uint16_t *)x)[i]);
    default: return s1f_from_fp16(((const uint16_t *)x)[i]);
    }
}

void put(int32_t dtype, void *x, int64_t i, double value)
{
    switch (dtype) {
    case S1F_FLOAT64: ((double *)x)[i] = value; break;
    case S1F_FLOAT32: ((float *)x)[i] = (float)value; break;
    case S1F_BFLOAT16: ((uint16_t *)x)[i] = s1f_to_bf16((float)value); break;
    default: ((uint16_t *)x)[i] = s1f_to_fp16((float)value); break;
    }
}

/* ---- one sequence, of which the rows [first, length) are queries ---- */

int64_t at(const sequence *x, kind of, int64_t b, int64_t h, int64_t row)
{
    int is_key = x->key_rows && (of == OF_K || of == OF_V);
    return s1f_at(x->of[of].strides, b, h, is_key ? x->key_rows[row] : row);
}

int32_t result_dtype(const sequence *x, kind of)
{
    return of == OF_K || of == OF_V ? s1f_dtype_of_sums(x->s.dtype) : x->s.dtype;
}

int64_t result_bytes(const sequence *x, kind of)
{
    return x->of[of].elements * s1f_dtype_bytes(result_dtype(x, of));
}

static layout layout_of(const shape *s, int64_t heads, int64_t rows, int64_t dim)
{
    layout l = {.heads = heads, .rows = rows, .dim = dim};
    if (s->tokens_outside) /* three spare columns per head, so that no two strides agree by accident */
        l.strides = (s1f_strides){rows * heads * (dim + 3), dim + 3, heads * (dim + 3)};
    else
        l.strides = (s1f_strides){heads * rows * dim, rows * dim, dim};
    l.elements = s->batch * l.strides.batch;
    return l;
}

void fill(int32_t dtype, void *x, int64_t elements, double value)
{
    for (int64_t i = 0; i < elements; i++)
        put(dtype, x, i, value);
}

void clear_results(sequence *x)
{
    fill(x->s.dtype, x->out, x->of[OF_OUT].elements, NAN);
    fill(x->s.dtype, x->dq, x->of[OF_Q].elements, NAN);
    fill(s1f_dtype_of_sums(x->s.dtype), x->dk, x->of[OF_K].elements, NAN);
    fill(s1f_dtype_of_sums(x->s.dtype), x->dv, x->of[OF_V].elements, NAN);
    fill(s1f_dtype_of_sums(x->s.dtype), x->lse, x->s.batch * x->s.heads * x->s.length, NAN);
    if (x->dsinks)
        fill(s1f_dtype_of_sums(x->s.dtype), x->dsinks, x->s.heads * x->s.length, 0);
}

static double sink(const shape *s, int64_t head)
{
    static const double far[] = {3e38, -INFINITY, -3e38, 50};
    return s->sinks == FAR_SINKS ? far[head % 4] : 0.7 * (double)head - 0.4;
}

static int32_t document(const shape *s, int64_t batch, int64_t row)
{
    int64_t index = (row + 3 * batch) * s->num_docs / s->length;
    return s->docs_return ? (index & 1 ? INT32_MAX : INT32_MIN) : (int32_t)(index - batch);
}

/* Ranges of keys before `first`, and one of the rest, the last one in the first rows; after each a spare row, while
 * there is one. */
static void scatter_keys(sequence *x)
{
    const shape *s = &x->s;
    int64_t rows = s->length + SPARE_ROWS, row = 0, spare = s->length;
    x->key_rows = allocate(rows * (int64_t)sizeof *x->key_rows);
    x->ranges = allocate(s->ranges * (int64_t)sizeof *x->ranges);
    for (int64_t i = 0, end = 0; i < s->ranges; i++) {
        int64_t begin = end;
        end = i + 1 < s->ranges ? s->first * (i + 1) / (s->ranges - 1) : s->length;
        if (begin < end)
            x->ranges[x->num_ranges++] = (s1f_key_range){begin, end, 0};
    }
    for (int32_t i = x->num_ranges - 1; i >= 0; i--) {
        x->ranges[i].row = row;
        for (int64_t key = x->ranges[i].begin; key < x->ranges[i].end; key++)
            x->key_rows[key] = row++;
        if (spare < rows)
            x->key_rows[spare++] = row++;
    }
    while (spare < rows)
        x->key_rows[spare++] = row++;
}

sequence sequence_new(shape s)
{
    s.v_head_dim = s.v_head_dim > 0 ? s.v_head_dim : s.head_dim;
    int64_t bytes = s1f_dtype_bytes(s.dtype), sum_bytes = s1f_dtype_bytes(s1f_dtype_of_sums(s.dtype));
    int64_t kv_rows = s.length + SPARE_ROWS;
    double size = s.logits > 0 ? sqrt(s.logits) : 1;
    sequence x = {.s = s,
                  .of = {[OF_Q] = layout_of(&s, s.heads, s.length, s.head_dim),
                         [OF_OUT] = layout_of(&s, s.heads, s.length, s.v_head_dim),
                         [OF_K] = layout_of(&s, s.kv_heads, kv_rows, s.head_dim),
                         [OF_V] = layout_of(&s, s.kv_heads, kv_rows, s.v_head_dim)}};

    if (s.ranges > 0)
        scatter_keys(&x);
    x.q = allocate(x.of[OF_Q].elements * bytes);
    x.dq = allocate(result_bytes(&x, OF_Q));
    x.out = allocate(result_bytes(&x, OF_OUT));
    x.dout = allocate(x.of[OF_OUT].elements * bytes);
    x.k = allocate(x.of[OF_K].elements * bytes);
    x.dk = allocate(result_bytes(&x, OF_K));
    x.v = allocate(x.of[OF_V].elements * bytes);
    x.dv = allocate(result_bytes(&x, OF_V));
    x.lse = allocate(s.batch * s.heads * s.length * sum_bytes);
    fill(s.dtype, x.k, x.of[OF_K].elements, NAN);
    fill(s.dtype, x.v, x.of[OF_V].elements, NAN);
    for (int64_t i = 0; i < x.of[OF_Q].elements; i++)
        put(s.dtype, x.q, i, size * random_normal());
    for (int64_t i = 0; i < x.of[OF_OUT].elements; i++)
        put(s.dtype, x.dout, i, random_normal());
    for (int64_t b = 0; b < s.batch; b++)
        for (int64_t h = 0; h < s.kv_heads; h++)
            for (int64_t row = 0; row < s.length; row++) {
                for (int64_t c = 0; c < s.head_dim; c++) {
                    int64_t first = at(&x, OF_K, b, h, 0) + c;
                    double key = s.same_keys && row > 0 ? get(s.dtype, x.k, first) : size * random_normal();
                    put(s.dtype, x.k, at(&x, OF_K, b, h, row) + c, key);
                }
                for (int64_t c = 0; c < s.v_head_dim; c++)
                    put(s.dtype, x.v, at(&x, OF_V, b, h, row) + c, random_normal());
            }
    if (s.alibi != 0) {
        x.slopes = allocate(s.batch * s.heads * (int64_t)sizeof(float));
        for (int64_t i = 0; i < s.batch * s.heads; i++)
            x.slopes[i] = (float)(s.alibi / (double)(1 + i));
    }
    if (s.num_docs > 0) {
        x.docs = allocate(s.batch * s.length * (int64_t)sizeof(int32_t));
        for (int64_t b = 0; b < s.batch; b++)
            for (int64_t row = 0; row < s.length; row++)
                x.docs[b * s.length + row] = document(&s, b, row);
    }
    if (s.sinks != NO_SINKS) {
        x.sinks = allocate(s.heads * sum_bytes);
        x.dsinks = allocate(s.heads * s.length * sum_bytes);
        for (int64_t h = 0; h < s.heads; h++)
            put(s1f_dtype_of_sums(s.dtype), x.sinks, h, sink(&s, h));
    }
    clear_results(&x);
    return x;
}

void sequence_free(sequence *x)
{
    void *all[] = {x->q,   x->k,      x->v,    x->out,   x->dout,   x->dq,       x->dk,    x->dv,
                   x->lse, x->slopes, x->docs, x->sinks, x->dsinks, x->key_rows, x->ranges};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static double scale_of(const shape *s)
{
    return (s->scaling == ZERO ? 0 : s->scaling == NEGATIVE ? -1 : 1) / sqrt((double)s->head_dim);
}

s1f_attention_args segment_args(const sequence *x, int64_t begin, int64_t end, int store)
{
    const shape *s = &x->s;
    int64_t bytes = s1f_dtype_bytes(s->dtype), sum_bytes = s1f_dtype_bytes(s1f_dtype_of_sums(s->dtype));
    int64_t q_from = begin * x->of[OF_Q].strides.row * bytes, out_from = begin * x->of[OF_OUT].strides.row * bytes;
    if (x->ranges)
        x->ranges[x->num_ranges - 1].end = end;
    return (s1f_attention_args){
        .dtype = s->dtype,
        .batch = s->batch,
        .heads = s->heads,
        .kv_heads = s->kv_heads,
        .segment_len = end - begin,
        .head_dim = s->head_dim,
        .v_head_dim = s->v_head_dim,
        .q_start = begin,
        .q = (const char *)x->q + q_from,
        .k = x->k,
        .v = x->v,
        .out = (char *)x->out + out_from,
        .q_strides = x->of[OF_Q].strides,
        .k_strides = x->of[OF_K].strides,
        .v_strides = x->of[OF_V].strides,
        .out_strides = x->of[OF_OUT].strides,
        .ranges = x->ranges,
        .num_ranges = x->num_ranges,
        .lse = (char *)x->lse + s->batch * s->heads * begin * sum_bytes,
        .scale = scale_of(s),
        .window = s->window,
        .softcap = s->softcap,
        .slopes = x->slopes,
        .slopes_batch_stride = x->slopes ? s->heads : 0,
        .docs = x->docs,
        .docs_batch_stride = s->length,
        .shared_keys = s->shares_prefix ? s->first : 0,
        .sinks = x->sinks,
        .dout = (const char *)x->dout + out_from,
        .dout_strides = x->of[OF_OUT].strides,
        .dq = (char *)x->dq + q_from,
        .dq_strides = x->of[OF_Q].strides,
        .dk = x->dk,
        .dv = x->dv,
        .dk_strides = x->of[OF_K].strides,
        .dv_strides = x->of[OF_V].strides,
        .kept_kv_grads = store ? 0 : end,
        .dsinks = x->dsinks ? (char *)x->dsinks + begin * s->heads * sum_bytes : NULL,
    };
}

/* ---- the naive computation, in double ----
 *
 * For a 16-bit dtype, dout . out is taken from the out that is stored in the sequence, as attention.h defines it: its
 * rounding is part of the result. Otherwise from the sum of p dp, which is the same where nothing is rounded. */

static int rounds_products(const shape *s)
{
    return s->dtype == S1F_BFLOAT16 && strcmp(s1f_attention_isa(), "avx512bf16") == 0;
}

double *zeros(int64_t count)
{
    double *x = calloc((size_t)count, sizeof *x);
    if (!x)
        abort();
    return x;
}

int is_half(int32_t dtype)
{
    return dtype == S1F_BFLOAT16 || dtype == S1F_FLOAT16;
}

/* One head of a tensor as (rows, its dim) doubles. */
static double *head_of(const sequence *x, kind of, const void *tensor, int64_t b, int64_t h)
{
    int64_t dim = x->of[of].dim;
    double *rows = zeros(x->s.length * dim);
    for (int64_t i = 0; i < x->s.length * dim; i++)
        rows[i] = get(x->s.dtype, tensor, at(x, of, b, h, i / dim) + i % dim);
    return rows;
}

static double product(const double *a, const double *b, int64_t n)
{
    double even = 0, odd = 0;
    for (int64_t c = 0; c < n; c++)
        *(c & 1 ? &odd : &even) += a[c] * b[c];
    return even + odd;
}

/* sums[c] += |factor row[c]| */
static void add_sizes(double *sums, double factor, const double *row, int64_t n)
{
    for (int64_t c = 0; c < n; c++)
        sums[c] += fabs(factor * row[c]);
}

static void naive_head(const sequence *x, int64_t b, int64_t h, naive_results *r)
{
    const shape *s = &x->s;
    int64_t N = s->length, D = s->head_dim, Dv = s->v_head_dim, kv = h / (s->heads / s->kv_heads);
    double *q = head_of(x, OF_Q, x->q, b, h), *k = head_of(x, OF_K, x->k, b, kv);
    double *v = head_of(x, OF_V, x->v, b, kv), *dout = head_of(x, OF_OUT, x->dout, b, h);
    double *stored_out = head_of(x, OF_OUT, x->out, b, h), *p = zeros(N), *dp = zeros(N), *chain = zeros(N);
    int64_t row = (b * s->heads + h) * N, kv_row = (b * s->kv_heads + kv) * N; /* the head's first in r */
    double *out = r->out + row * Dv, *dq = r->dq + row * D, *dk = r->dk + kv_row * D, *dv = r->dv + kv_row * Dv;

    for (int64_t i = s->first; i < N; i++) {
        double extra = x->sinks ? get(s1f_dtype_of_sums(s->dtype), x->sinks, h) : -INFINITY;
        double total = 0, highest = extra, mean = 0;
        for (int64_t j = 0; j <= i; j++) {
            p[j] = scale_of(s) * product(q + i * D, k + j * D, D);
            chain[j] = 1;
            if (s->softcap > 0) {
                p[j] = s->softcap * tanh(p[j] / s->softcap);
                chain[j] = 1 - pow(p[j] / s->softcap, 2);
            }
            if (x->slopes)
                p[j] -= (double)x->slopes[b * s->heads + h] * (double)(i - j);
            int is_other = x->docs && x->docs[b * N + j] != x->docs[b * N + i];
            if ((s->window && j <= i - s->window) || (is_other && !(s->shares_prefix && j < s->first)))
                p[j] = -INFINITY;
            highest = fmax(highest, p[j]);
        }
        for (int64_t j = 0; j <= i; j++)
            total += exp(p[j] - highest);
        total += exp(extra - highest);
        r->lse[(b * s->heads + h) * N + i] = highest + log(total);
        for (int64_t j = 0; j <= i; j++) {
            p[j] = exp(p[j] - highest) / total;
            dp[j] = product(dout + i * Dv, v + j * Dv, Dv);
            mean += p[j] * dp[j];
            for (int64_t c = 0; c < Dv; c++) {
                out[i * Dv + c] += p[j] * v[j * Dv + c];
                dv[j * Dv + c] += p[j] * dout[i * Dv + c];
            }
            if (r->out_terms) {
                add_sizes(r->out_terms + (row + i) * Dv, p[j], v + j * Dv, Dv);
                add_sizes(r->dv_terms + (kv_row + j) * Dv, p[j], dout + i * Dv, Dv);
            }
        }
        if (is_half(s->dtype))
            mean = product(dout + i * Dv, stored_out + i * Dv, Dv);
        r->dsinks[h] -= exp(extra - highest) / total * mean;
        for (int64_t j = 0; j <= i; j++) {
            double ds = p[j] * (dp[j] - mean) * chain[j] * scale_of(s);
            for (int64_t c = 0; c < D; c++) {
                dq[i * D + c] += ds * k[j * D + c];
                dk[j * D + c] += ds * q[i * D + c];
            }
            if (r->out_terms) {
                add_sizes(r->dq_terms + (row + i) * D, ds, k + j * D, D);
                add_sizes(r->dk_terms + (kv_row + j) * D, ds, q + i * D, D);
            }
        }
    }
    double *all[] = {q, k, v, dout, stored_out, p, dp, chain};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

naive_results naive_new(const sequence *x)
{
    const shape *s = &x->s;
    int64_t rows = s->batch * s->heads * s->length, kv_rows = s->batch * s->kv_heads * s->length;
    naive_results r = {.out = zeros(rows * s->v_head_dim),
                       .lse = zeros(rows),
                       .dq = zeros(rows * s->head_dim),
                       .dk = zeros(kv_rows * s->head_dim),
                       .dv = zeros(kv_rows * s->v_head_dim),
                       .dsinks = zeros(s->heads)};
    if (rounds_products(s)) {
        r.out_terms = zeros(rows * s->v_head_dim);
        r.dq_terms = zeros(rows * s->head_dim);
        r.dk_terms = zeros(kv_rows * s->head_dim);
        r.dv_terms = zeros(kv_rows * s->v_head_dim);
    }
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->heads; h++)
            naive_head(x, b, h, &r);
    return r;
}

void naive_free(naive_results *r)
{
    double *all[] = {r->out,       r->lse,      r->dq,       r->dk,       r->dv,
                     r->out_terms, r->dq_terms, r->dk_terms, r->dv_terms, r->dsinks};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* ---- comparing ---- */

const char *describe(const shape *s, const char *what)
{
    static char text[400];
    snprintf(
        text, sizeof text,
        "%s: %s, B %lld, heads %lld/%lld, rows [%lld, %lld), D %lld, v of %lld, layout %d, window %lld, softcap %g, "
        "alibi %g, logits %g, docs %lld, docs return %d, shares prefix %d, ranges %lld, same keys %d, scaling %d, "
        "sinks %d, isa %s",
        what, s1f_dtype_name(s->dtype), (long long)s->batch, (long long)s->heads, (long long)s->kv_heads,
        (long long)s->first, (long long)s->length, (long long)s->head_dim, (long long)s->v_head_dim, s->tokens_outside,
        (long long)s->window, s->softcap, s->alibi, s->logits, (long long)s->num_docs, s->docs_return, s->shares_prefix,
        (long long)s->ranges, s->same_keys, (int)s->scaling, (int)s->sinks, s1f_attention_isa());
    return text;
}

/* terms: size of the terms that were rounded to bf16, see naive_results. */
static void compare(difference *d, double got, double want, double terms)
{
    double error = fabs(got - want) - 0x1p-8 * terms;
    if (error > d->error || error != error)
        d->error = error;
    d->largest = fmax(d->largest, fabs(want));
}

void check_difference(const sequence *x, const char *what, difference d, double tolerance)
{
    char text[500];
    snprintf(text, sizeof text, "%s: error %.3g of %.3g, allowed %.3g", describe(&x->s, what), d.error, d.largest,
             tolerance * fmax(d.largest, 1));
    check(d.error <= tolerance * fmax(d.largest, 1), text); /* false on NaN */
}

difference result_difference(const sequence *x, kind of, const void *got, const double *want, const double *terms,
                             double times, double plus)
{
    const shape *s = &x->s;
    const layout *l = &x->of[of];
    difference d = {0, 0};
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < l->heads; h++)
            for (int64_t row = of == OF_K || of == OF_V ? 0 : s->first; row < s->length; row++)
                for (int64_t c = 0; c < l->dim; c++) {
                    int64_t i = ((b * l->heads + h) * s->length + row) * l->dim + c;
                    compare(&d, get(result_dtype(x, of), got, at(x, of, b, h, row) + c), times * want[i] + plus,
                            terms ? times * terms[i] : 0);
                }
    return d;
}

difference lse_difference(const sequence *x, const double *want)
{
    const shape *s = &x->s;
    difference d = {0, 0};
    int64_t rows = s->length - s->first;
    for (int64_t bh = 0; bh < s->batch * s->heads; bh++)
        for (int64_t row = 0; row < rows; row++)
            compare(&d, get(s1f_dtype_of_sums(s->dtype), x->lse, s->batch * s->heads * s->first + bh * rows + row),
                    want[bh * s->length + s->first + row], 0);
    return d;
}

difference sink_difference(const sequence *x, const double *want)
{
    difference d = {0, 0};
    for (int64_t h = 0; h < x->s.heads && x->dsinks; h++) {
        double got = 0;
        for (int64_t row = 0; row < x->s.length; row++)
            got += get(s1f_dtype_of_sums(x->s.dtype), x->dsinks, row * x->s.heads + h);
        compare(&d, got, want[h], 0);
    }
    return d;
}

int spare_rows_untouched(const sequence *x)
{
    for (kind of = OF_K; of <= OF_V; of++)
        for (int64_t b = 0; b < x->s.batch; b++)
            for (int64_t h = 0; h < x->s.kv_heads; h++)
                for (int64_t row = x->s.length; row < x->of[of].rows; row++)
                    for (int64_t c = 0; c < x->of[of].dim; c++)
                        if (!isnan(get(result_dtype(x, of), of == OF_K ? x->dk : x->dv, at(x, of, b, h, row) + c)))
                            return 0;
    return 1;
}

/* ---- running ---- */

int64_t cut(const shape *s, int64_t parts, int64_t i)
{
    if (parts == s->parts && i > 0)
        return s->cuts[i - 1];
    return s->first + (s->length - s->first) * i / parts;
}

void run_segments(sequence *x, int64_t parts, kernel forward, kernel backward, const s1f_attention_context *context)
{
    for (int64_t i = 0; i < parts; i++) {
        s1f_attention_args args = segment_args(x, cut(&x->s, parts, i), cut(&x->s, parts, i + 1), 0);
        check(forward(&args, context) == S1F_OK, describe(&x->s, "forward refused"));
    }
    for (int64_t i = parts - 1; i >= 0; i--) {
        s1f_attention_args args = segment_args(x, cut(&x->s, parts, i), cut(&x->s, parts, i + 1), i == parts - 1);
        check(backward(&args, context) == S1F_OK, describe(&x->s, "backward refused"));
    }
}
