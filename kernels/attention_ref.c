/* attention_ref.c - what attention must compute, the slow and obvious way.
 *
 * Every sum is in double, and each result is rounded once, when it is stored; so its error is that of the dtype it is
 * stored in. Backward takes the probabilities from lse and rowsum(dout * out) from out, as they were stored:
 *   p = exp(logit - lse)    dv[j] = sum_i p dout[i]    ds = p (dout[i].v[j] - dout[i].out[i]) d logit / d(scale q.k)
 *   dq[i] = scale sum_j ds k[j]     dk[j] = scale sum_i ds q[i]
 *   dsink = -sum_i exp(sink - lse) dout[i].out[i]
 * It goes over the pairs twice, by rows for dq and by columns for dk and dv, so every sum has one owner and one order.
 * A row that sees nothing does not exist: a token always sees itself. Rows of k and v that hold none of the T keys are
 * never read. */
#include "attention_internal.h"

#include <math.h>
#include <stdlib.h>

enum { CHUNK = 64 }; /* columns of a result, or heads, summed at a time, on the stack */

typedef void row_body(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row, double *room);

typedef struct {
    const s1f_attention_args *args;
    double *scratch;
    row_body *of_row;
} ref_job;

/* ---- elements ---- */

/* x[i..i + n) in double: where they are, or in `room`. */
static const double *widened(int32_t dtype, const void *x, int64_t i, int64_t n, double *room)
{
    if (dtype == S1F_FLOAT64)
        return (const double *)x + i;
    for (int64_t c = 0; c < n && dtype == S1F_FLOAT32; c++)
        room[c] = ((const float *)x)[i + c];
    for (int64_t c = 0; c < n && dtype == S1F_BFLOAT16; c++)
        room[c] = s1f_from_bf16(((const uint16_t *)x)[i + c]);
    for (int64_t c = 0; c < n && dtype == S1F_FLOAT16; c++)
        room[c] = s1f_from_fp16(((const uint16_t *)x)[i + c]);
    return room;
}

/* x[ix..] . y[iy..] over n elements. */
static double dot(int32_t dtype, const void *x, int64_t ix, const void *y, int64_t iy, int64_t n)
{
    double sums[8] = {0}, rooms[2][CHUNK];
    for (int64_t from = 0; from < n; from += CHUNK) {
        int64_t count = s1f_min(CHUNK, n - from), c = 0;
        const double *a = widened(dtype, x, ix + from, count, rooms[0]);
        const double *b = widened(dtype, y, iy + from, count, rooms[1]);
        for (; c + 8 <= count; c += 8)
            for (int lane = 0; lane < 8; lane++)
                sums[lane] += a[c + lane] * b[c + lane];
        for (; c < count; c++)
            sums[0] += a[c] * b[c];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* sums[0..n) += weight x[ix..], n <= CHUNK */
static void add_scaled(double *sums, double weight, int32_t dtype, const void *x, int64_t ix, int64_t n)
{
    double room[CHUNK];
    const double *values = widened(dtype, x, ix, n, room);
    for (int64_t c = 0; c < n; c++)
        sums[c] += weight * values[c];
}

/* x[ix..ix + n) becomes factor values, or with `adds`, of float or double, so much more. */
static void store(int32_t dtype, int adds, void *x, int64_t ix, const double *values, double factor, int64_t n)
{
    for (int64_t c = 0; c < n; c++) {
        double value = values[c] * factor;
        if (dtype == S1F_FLOAT64) {
            double *place = (double *)x + ix + c;
            *place = adds ? *place + value : value;
        } else if (dtype == S1F_FLOAT32) {
            float *place = (float *)x + ix + c;
            *place = (float)(adds ? (double)*place + value : value);
        } else if (dtype == S1F_BFLOAT16) {
            ((uint16_t *)x)[ix + c] = s1f_to_bf16((float)value);
        } else {
            ((uint16_t *)x)[ix + c] = s1f_to_fp16((float)value);
        }
    }
}

static double lse_of(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row)
{
    double room;
    int64_t i = (batch * args->heads + head) * args->segment_len + row;
    return *widened(s1f_dtype_of_sums(args->dtype), args->lse, i, 1, &room);
}

/* ---- one pair of query and key ---- */

static int64_t kv_head_of(const s1f_attention_args *args, int64_t head)
{
    return head / (args->heads / args->kv_heads);
}

/* First element of a key in k, v, dk or dv. */
static int64_t key_at(const s1f_attention_args *args, s1f_strides strides, int64_t batch, int64_t kv_head, int64_t key)
{
    int64_t run;
    return s1f_at(strides, batch, kv_head, s1f_key_row(args, key, &run));
}

static int visible(const s1f_attention_args *args, int64_t batch, int64_t row, int64_t key)
{
    int64_t token = args->q_start + row;
    const int32_t *docs = args->docs ? args->docs + batch * args->docs_batch_stride : NULL;
    return key <= token && (args->window == 0 || token - key < args->window) &&
           (!docs || key < args->shared_keys || docs[key] == docs[token]);
}

/* The logit; *slope_of_cap: its derivative by scale q.k. */
static double logit(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row, int64_t key,
                    double *slope_of_cap)
{
    double x = args->scale * dot(args->dtype, args->q, s1f_at(args->q_strides, batch, head, row), args->k,
                                 key_at(args, args->k_strides, batch, kv_head_of(args, head), key), args->head_dim);
    *slope_of_cap = 1;
    if (args->softcap > 0) {
        double squashed = tanh(x / args->softcap);
        x = args->softcap * squashed;
        *slope_of_cap = 1 - squashed * squashed;
    }
    if (args->slopes)
        x -= (double)args->slopes[batch * args->slopes_batch_stride + head] * (double)(args->q_start + row - key);
    return x;
}

/* p, and ds = d loss / d(scale q.k), of one visible pair; delta = dout . out of the row. */
static void pair_gradient(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row, int64_t key,
                          double delta, double *p, double *ds)
{
    double slope_of_cap;
    double x = logit(args, batch, head, row, key, &slope_of_cap);
    double dp = dot(args->dtype, args->dout, s1f_at(args->dout_strides, batch, head, row), args->v,
                    key_at(args, args->v_strides, batch, kv_head_of(args, head), key), args->v_head_dim);
    *p = exp(x - lse_of(args, batch, head, row));
    *ds = *p * (dp - delta) * slope_of_cap;
}

static double row_delta(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row)
{
    return dot(args->dtype, args->dout, s1f_at(args->dout_strides, batch, head, row), args->out,
               s1f_at(args->out_strides, batch, head, row), args->v_head_dim);
}

/* ---- forward ---- */

static void forward_row(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row, double *weights)
{
    int64_t num_keys = args->q_start + row + 1;
    double highest = -INFINITY, sum = 0, unused;

    for (int64_t key = 0; key < num_keys; key++) {
        weights[key] = visible(args, batch, row, key) ? logit(args, batch, head, row, key, &unused) : -INFINITY;
        highest = weights[key] > highest ? weights[key] : highest;
    }
    if (args->sinks) {
        double sink = s1f_sink(args, head);
        highest = fmax(highest, sink);
        sum = exp(sink - highest);
    }
    for (int64_t key = 0; key < num_keys; key++) {
        weights[key] = visible(args, batch, row, key) ? exp(weights[key] - highest) : 0;
        sum += weights[key];
    }
    for (int64_t from = 0; from < args->v_head_dim; from += CHUNK) {
        double out[CHUNK] = {0};
        int64_t n = s1f_min(CHUNK, args->v_head_dim - from);
        for (int64_t key = 0; key < num_keys; key++)
            if (visible(args, batch, row, key))
                add_scaled(out, weights[key], args->dtype, args->v,
                           key_at(args, args->v_strides, batch, kv_head_of(args, head), key) + from, n);
        store(args->dtype, 0, args->out, s1f_at(args->out_strides, batch, head, row) + from, out, 1 / sum, n);
    }

    double lse = highest + log(sum);
    int64_t i = (batch * args->heads + head) * args->segment_len + row;
    store(s1f_dtype_of_sums(args->dtype), 0, args->lse, i, &lse, 1, 1);
}

/* ---- backward ---- */

static void query_gradient(const s1f_attention_args *args, int64_t batch, int64_t head, int64_t row, double *ds)
{
    double delta = row_delta(args, batch, head, row), unused;
    int64_t num_keys = args->q_start + row + 1;

    for (int64_t key = 0; key < num_keys; key++)
        if (visible(args, batch, row, key))
            pair_gradient(args, batch, head, row, key, delta, &unused, &ds[key]);
    for (int64_t from = 0; from < args->head_dim; from += CHUNK) {
        double dq[CHUNK] = {0};
        int64_t n = s1f_min(CHUNK, args->head_dim - from);
        for (int64_t key = 0; key < num_keys; key++)
            if (visible(args, batch, row, key))
                add_scaled(dq, ds[key], args->dtype, args->k,
                           key_at(args, args->k_strides, batch, kv_head_of(args, head), key) + from, n);
        store(args->dtype, 0, args->dq, s1f_at(args->dq_strides, batch, head, row) + from, dq, args->scale, n);
    }
}

typedef struct { /* dk or dv: its sums, and where they become elements or NULL */
    void *sums, *own;
    s1f_strides strides, own_strides;
} gradient_rows;

/* factor times the sum of weights (group, S) times the rows of x, which are `dim` wide, for one key. */
static void key_gradient_sums(const s1f_attention_args *args, int64_t batch, int64_t kv_head, int64_t key,
                              const double *weights, const void *x, s1f_strides x_strides, double factor, int64_t dim,
                              gradient_rows to)
{
    int64_t group = args->heads / args->kv_heads, first_row = s1f_max(0, key - args->q_start);
    int32_t of_sums = s1f_dtype_of_sums(args->dtype);
    for (int64_t from = 0; from < dim; from += CHUNK) {
        double sums[CHUNK] = {0}, room[CHUNK];
        int64_t n = s1f_min(CHUNK, dim - from), at = key_at(args, to.strides, batch, kv_head, key) + from;
        for (int64_t g = 0; g < group; g++)
            for (int64_t row = first_row; row < args->segment_len; row++)
                if (visible(args, batch, row, key))
                    add_scaled(sums, weights[g * args->segment_len + row], args->dtype, x,
                               s1f_at(x_strides, batch, kv_head * group + g, row) + from, n);
        store(of_sums, key < args->kept_kv_grads, to.sums, at, sums, factor, n);
        if (to.own && key >= args->q_start)
            store(args->dtype, 0, to.own, s1f_at(to.own_strides, batch, kv_head, key - args->q_start) + from,
                  widened(of_sums, to.sums, at, n, room), 1, n);
    }
}

/* p, ds and delta: (group, S), over the query heads that read this kv head. */
static void key_gradient(const s1f_attention_args *args, int64_t batch, int64_t kv_head, int64_t key, double *p,
                         double *ds, const double *delta)
{
    int64_t group = args->heads / args->kv_heads, first_row = s1f_max(0, key - args->q_start);

    for (int64_t g = 0; g < group; g++)
        for (int64_t row = first_row; row < args->segment_len; row++)
            if (visible(args, batch, row, key)) {
                int64_t i = g * args->segment_len + row;
                pair_gradient(args, batch, kv_head * group + g, row, key, delta[i], &p[i], &ds[i]);
            }
    key_gradient_sums(args, batch, kv_head, key, ds, args->q, args->q_strides, args->scale, args->head_dim,
                      (gradient_rows){args->dk, args->own_dk, args->dk_strides, args->own_dk_strides});
    key_gradient_sums(args, batch, kv_head, key, p, args->dout, args->dout_strides, 1, args->v_head_dim,
                      (gradient_rows){args->dv, args->own_dv, args->dv_strides, args->own_dv_strides});
}

static void key_gradients(int64_t begin, int64_t end, void *context)
{
    const ref_job *job = context;
    const s1f_attention_args *args = job->args;
    int64_t group = args->heads / args->kv_heads, pairs = group * args->segment_len;
    for (int64_t bh = begin; bh < end; bh++) {
        int64_t batch = bh / args->kv_heads, kv_head = bh % args->kv_heads;
        double *p = job->scratch + bh * 3 * pairs, *ds = p + pairs, *delta = ds + pairs;
        for (int64_t i = 0; i < pairs; i++)
            delta[i] = row_delta(args, batch, kv_head * group + i / args->segment_len, i % args->segment_len);
        for (int64_t key = 0; key < args->q_start + args->segment_len; key++)
            key_gradient(args, batch, kv_head, key, p, ds, delta);
    }
}

static void sink_gradients(int64_t begin, int64_t end, void *context)
{
    const ref_job *job = context;
    const s1f_attention_args *args = job->args;
    for (int64_t head = begin; head < end; head++) {
        double sum = 0;
        for (int64_t batch = 0; batch < args->batch; batch++)
            for (int64_t row = 0; row < args->segment_len; row++)
                sum -= exp(s1f_sink(args, head) - lse_of(args, batch, head, row)) * row_delta(args, batch, head, row);
        store(s1f_dtype_of_sums(args->dtype), 0, args->dsinks, head, &sum, 1, 1);
    }
}

/* ---- entry points ---- */

static void by_rows(int64_t begin, int64_t end, void *context)
{
    const ref_job *job = context;
    const s1f_attention_args *args = job->args;
    for (int64_t bh = begin; bh < end; bh++)
        for (int64_t row = 0; row < args->segment_len; row++)
            job->of_row(args, bh / args->heads, bh % args->heads, row,
                        job->scratch + bh * (args->q_start + args->segment_len));
}

static int64_t ref_scratch_bytes(const s1f_attention_args *args, int32_t num_threads, int backward)
{
    (void)num_threads;
    int64_t row = args->q_start + args->segment_len, by_rows = args->batch * args->heads * row;
    int64_t by_columns = backward ? 3 * args->batch * args->heads * args->segment_len : 0;
    return (int64_t)sizeof(double) * s1f_max(by_rows, by_columns);
}

static s1f_status run(const s1f_attention_args *args, const s1f_attention_context *context, int backward)
{
    void *scratch, *owned;
    S1F_TRY(s1f_attention_check(args));
    S1F_TRY(s1f_attention_scratch(context, ref_scratch_bytes(args, 1, backward), &scratch, &owned));
    ref_job job = {args, scratch, backward ? query_gradient : forward_row};
    s1f_run(context, args->batch * args->heads, by_rows, &job);
    if (backward)
        s1f_run(context, args->batch * args->kv_heads, key_gradients, &job);
    if (backward && args->sinks && args->dsinks)
        s1f_run(context, args->heads, sink_gradients, &job);
    free(owned);
    return S1F_OK;
}

s1f_status s1f_attention_ref_forward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    return run(args, context, 0);
}

s1f_status s1f_attention_ref_backward(const s1f_attention_args *args, const s1f_attention_context *context)
{
    return run(args, context, 1);
}

const s1f_attention_kernels s1f_attention_reference = {
    "reference", NULL, s1f_attention_ref_forward, s1f_attention_ref_backward, ref_scratch_bytes,
};
