/* test_attention.c - does attention compute what kernels/attention.h says, with every instruction set of this machine?
 *
 * Measure: a naive computation in double that shares no code with the kernels. Finite differences are those of
 * gradcheck, in tests/attention/test_attention.py.
 * Argument: "plain", "sanitize", "valgrind" or "aarch64" for a slice that is quick enough there. */
#include "attention_sequence.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int64_t fail_allocation(int64_t n); /* allocation.c; here it only counts */

static const int32_t dtypes[] = {S1F_FLOAT64, S1F_FLOAT32, S1F_BFLOAT16, S1F_FLOAT16};
static int small, few, medium; /* slices: each is part of the next */

static void *copy_of(const void *x, int64_t bytes)
{
    return memcpy(allocate(bytes), x, (size_t)bytes);
}

/* After run_segments: backward again, where each segment gets its own rows of dk and dv as elements. These are the sums
 * of before, rounded. */
static void test_own_rows(sequence *x, int64_t parts, kernel backward)
{
    const shape *s = &x->s;
    int64_t bytes = s1f_dtype_bytes(s->dtype);
    const layout *k = &x->of[OF_K], *v = &x->of[OF_V];
    void *before[2] = {copy_of(x->dk, result_bytes(x, OF_K)), copy_of(x->dv, result_bytes(x, OF_V))};
    void *own[2] = {allocate(k->elements * bytes), allocate(v->elements * bytes)};
    fill(s->dtype, own[0], k->elements, NAN);
    fill(s->dtype, own[1], v->elements, NAN);
    for (int64_t i = parts - 1; i >= 0; i--) {
        int64_t begin = cut(s, parts, i);
        s1f_attention_args args = segment_args(x, begin, cut(s, parts, i + 1), i == parts - 1);
        args.own_dk = (char *)own[0] + at(x, OF_K, 0, 0, begin) * bytes;
        args.own_dv = (char *)own[1] + at(x, OF_V, 0, 0, begin) * bytes;
        args.own_dk_strides = k->strides;
        args.own_dv_strides = v->strides;
        check(backward(&args, NULL) == S1F_OK, describe(s, "backward refused"));
    }
    int same = 1;
    for (int which = 0; which < 2; which++) {
        kind of = which ? OF_V : OF_K;
        for (int64_t b = 0; b < s->batch; b++)
            for (int64_t h = 0; h < s->kv_heads; h++)
                for (int64_t row = s->first; row < x->of[of].rows; row++)
                    for (int64_t c = 0; c < x->of[of].dim; c++) {
                        int64_t i = at(x, of, b, h, row) + c;
                        double want = get(result_dtype(x, of), before[which], i), got = get(s->dtype, own[which], i);
                        uint64_t place = 0;
                        put(s->dtype, &place, 0, want);
                        same &= row < s->length ? got == get(s->dtype, &place, 0) : isnan(got);
                    }
        free(before[which]);
        free(own[which]);
    }
    check(same, describe(s, "own rows of dk and dv are not the rounded sums"));
}

/* Rounding of a stored result, and of a sum in the accumulators. */
static double result_tolerance(int32_t dtype)
{
    return dtype == S1F_FLOAT64 ? 1e-13 : dtype == S1F_FLOAT32 ? 1e-6 : dtype == S1F_BFLOAT16 ? 0x1p-8 : 0x1p-11;
}

static void test_truth(shape s)
{
    sequence x = sequence_new(s);
    double eps = result_tolerance(s.dtype), sums = s.dtype == S1F_FLOAT64 ? eps : 1e-6;

    run_segments(&x, 1, s1f_attention_ref_forward, s1f_attention_ref_backward, NULL);
    naive_results want = naive_new(&x);
    check_difference(&x, "truth out", result_difference(&x, OF_OUT, x.out, want.out, want.out_terms, 1, 0), eps);
    check_difference(&x, "truth lse", lse_difference(&x, want.lse), sums);
    check_difference(&x, "truth dq", result_difference(&x, OF_Q, x.dq, want.dq, want.dq_terms, 1, 0), eps);
    check_difference(&x, "truth dk", result_difference(&x, OF_K, x.dk, want.dk, want.dk_terms, 1, 0), sums);
    check_difference(&x, "truth dv", result_difference(&x, OF_V, x.dv, want.dv, want.dv_terms, 1, 0), sums);
    check_difference(&x, "truth dsinks", sink_difference(&x, want.dsinks), sums);
    check(spare_rows_untouched(&x), describe(&s, "truth wrote rows from T on"));

    s1f_attention_args again = segment_args(&x, s.first, s.length, 0);
    s1f_attention_ref_backward(&again, NULL);
    check_difference(&x, "truth dk added", result_difference(&x, OF_K, x.dk, want.dk, want.dk_terms, 2, 0), sums);
    run_segments(&x, s1f_min(2, s.length - s.first), s1f_attention_ref_forward, s1f_attention_ref_backward, NULL);
    test_own_rows(&x, s1f_min(2, s.length - s.first), s1f_attention_ref_backward);
    naive_free(&want);
    sequence_free(&x);
}

/* ---- pools that split as a pool may ---- */

static void one_by_one(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context)
{
    (void)grain;
    for (int64_t i = begin; i < end; i++)
        body(i, i + 1, context);
}

static void from_the_end(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context)
{
    (void)grain;
    for (int64_t i = end; i > begin; i--)
        body(i - 1, i, context);
}

static void by_threes(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context)
{
    (void)grain;
    for (int64_t i = begin; i < end; i += 3)
        body(i, s1f_min(i + 3, end), context);
}

typedef struct {
    int64_t begin, end;
    s1f_parallel_body body;
    void *context;
} thread_part;

static void *run_part(void *argument)
{
    const thread_part *part = argument;
    part->body(part->begin, part->end, part->context);
    return NULL;
}

static void four_threads(int64_t begin, int64_t end, int64_t grain, s1f_parallel_body body, void *context)
{
    pthread_t threads[4];
    thread_part parts[4];
    (void)grain;
    for (int i = 0; i < 4; i++) {
        parts[i] = (thread_part){begin + (end - begin) * i / 4, begin + (end - begin) * (i + 1) / 4, body, context};
        if (pthread_create(&threads[i], NULL, run_part, &parts[i]))
            abort();
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

/* ---- the chosen path, on whatever instruction set is set ---- */

typedef struct {
    void *out, *lse, *dq, *dk, *dv, *dsinks;
} results_copy;

static int same_results(const sequence *x, const results_copy *r)
{
    size_t rows = (size_t)(x->s.batch * x->s.heads * x->s.length * s1f_dtype_bytes(s1f_dtype_of_sums(x->s.dtype)));
    size_t sinks = (size_t)(x->s.heads * x->s.length * s1f_dtype_bytes(s1f_dtype_of_sums(x->s.dtype)));
    return memcmp(x->out, r->out, (size_t)result_bytes(x, OF_OUT)) == 0 &&
           memcmp(x->dq, r->dq, (size_t)result_bytes(x, OF_Q)) == 0 && memcmp(x->lse, r->lse, rows) == 0 &&
           memcmp(x->dk, r->dk, (size_t)result_bytes(x, OF_K)) == 0 &&
           memcmp(x->dv, r->dv, (size_t)result_bytes(x, OF_V)) == 0 &&
           (!x->dsinks || memcmp(x->dsinks, r->dsinks, sinks) == 0);
}

/* Reruns, with scratch that holds NaN and on pools of every kind, give the same bits, and allocate nothing. */
static void test_same_bits(sequence *x)
{
    static const s1f_parallel_for pools[] = {NULL, one_by_one, from_the_end, by_threes, four_threads};
    int64_t sum = s1f_dtype_bytes(s1f_dtype_of_sums(x->s.dtype));
    s1f_attention_args args = segment_args(x, x->s.first, x->s.length, 1);
    results_copy first = {copy_of(x->out, result_bytes(x, OF_OUT)),
                          copy_of(x->lse, x->s.batch * x->s.heads * x->s.length * sum),
                          copy_of(x->dq, result_bytes(x, OF_Q)),
                          copy_of(x->dk, result_bytes(x, OF_K)),
                          copy_of(x->dv, result_bytes(x, OF_V)),
                          x->dsinks ? copy_of(x->dsinks, x->s.heads * x->s.length * sum) : NULL};
    for (size_t i = 0; i < sizeof pools / sizeof *pools; i++) {
        s1f_attention_context context = {.parallel_for = pools[i], .num_threads = (int32_t)(1 + i)};
        int64_t bytes = s1f_max(s1f_attention_scratch_bytes(&args, context.num_threads, 0),
                                s1f_attention_scratch_bytes(&args, context.num_threads, 1));
        context.scratch_bytes = (bytes + 63) / 64 * 64;
        context.scratch = aligned_alloc(64, (size_t)context.scratch_bytes);
        memset(context.scratch, 0xff, (size_t)context.scratch_bytes);
        clear_results(x);
        (void)fail_allocation(-1);
        run_segments(x, 1, s1f_attention_forward, s1f_attention_backward, &context);
        int64_t allocated = fail_allocation(-1);
        check(allocated == 0 || pools[i] == four_threads, describe(&x->s, "a kernel with scratch allocated"));
        check(same_results(x, &first), describe(&x->s, "not bit-equal over pools"));
        free(context.scratch);
    }
    free(first.out);
    free(first.lse);
    free(first.dq);
    free(first.dk);
    free(first.dv);
    free(first.dsinks);
}

/* Errors of the fast path against the naive values. */
static void test_chosen(shape s, int bits)
{
    sequence x = sequence_new(s);
    double eps = result_tolerance(s.dtype), sums = s.dtype == S1F_FLOAT64 ? 1e-12 : 1e-5;
    /* A large logit is a sum of D rounded products, off by sqrt(D) 2^-24 of its sum |q k|, which is about sqrt(D) times
     * the logit's own size; exp makes that a relative error of p. */
    double stretch = s.logits > 1 && s.dtype != S1F_FLOAT64 ? s.logits * (double)s.head_dim * 0x1p-24 : 0;
    double rounded = eps + sums + stretch;
    /* lse is as large as the logits and as exact; under a cap it is at most the cap, and off by as much still. */
    double lse_tolerance = s.dtype == S1F_FLOAT64 ? eps : 1e-6 + (s.softcap > 0 ? stretch / s.softcap : 0);
    /* If all keys are one, dq is that key times the sum of ds, which is about 0: the error is that of its terms. */
    double cancelled = s.same_keys && s.logits > 1 ? sqrt(s.logits) : 1;

    run_segments(&x, 1, s1f_attention_forward, s1f_attention_backward, NULL);
    naive_results want = naive_new(&x);
    check_difference(&x, "out", result_difference(&x, OF_OUT, x.out, want.out, want.out_terms, 1, 0), rounded);
    check_difference(&x, "lse", lse_difference(&x, want.lse), lse_tolerance);
    check_difference(&x, "dq", result_difference(&x, OF_Q, x.dq, want.dq, want.dq_terms, 1, 0), cancelled * rounded);
    check_difference(&x, "dk", result_difference(&x, OF_K, x.dk, want.dk, want.dk_terms, 1, 0), sums + stretch);
    check_difference(&x, "dv", result_difference(&x, OF_V, x.dv, want.dv, want.dv_terms, 1, 0), sums + stretch);
    check_difference(&x, "dsinks", sink_difference(&x, want.dsinks), sums + stretch);
    check(spare_rows_untouched(&x), describe(&s, "wrote rows from T on"));
    if (bits)
        test_same_bits(&x);

    /* Adding onto what is there. */
    s1f_attention_args args = segment_args(&x, s.first, s.length, 0);
    fill(s1f_dtype_of_sums(s.dtype), x.dk, x.of[OF_K].elements, 0.5);
    fill(s1f_dtype_of_sums(s.dtype), x.dv, x.of[OF_V].elements, 0.5);
    check(s1f_attention_backward(&args, NULL) == S1F_OK, describe(&s, "backward refused"));
    check_difference(&x, "dk added", result_difference(&x, OF_K, x.dk, want.dk, want.dk_terms, 1, 0.5), sums + stretch);
    check_difference(&x, "dv added", result_difference(&x, OF_V, x.dv, want.dv, want.dv_terms, 1, 0.5), sums + stretch);

    /* Split into segments: the same sums, each row of dk and dv rounded once more per segment. */
    int64_t parts = s.parts > 0 ? s.parts : s1f_min(3, s.length - s.first);
    clear_results(&x);
    run_segments(&x, parts, s1f_attention_forward, s1f_attention_backward, NULL);
    if (is_half(s.dtype)) { /* it depends on the stored out */
        naive_free(&want);
        want = naive_new(&x);
    }
    check_difference(&x, "out of segments", result_difference(&x, OF_OUT, x.out, want.out, want.out_terms, 1, 0),
                     rounded);
    check_difference(&x, "dq of segments", result_difference(&x, OF_Q, x.dq, want.dq, want.dq_terms, 1, 0),
                     cancelled * rounded);
    check_difference(&x, "dk of segments", result_difference(&x, OF_K, x.dk, want.dk, want.dk_terms, 1, 0),
                     sums + stretch);
    check_difference(&x, "dv of segments", result_difference(&x, OF_V, x.dv, want.dv, want.dv_terms, 1, 0),
                     sums + stretch);
    check_difference(&x, "dsinks of segments", sink_difference(&x, want.dsinks), sums + stretch);
    test_own_rows(&x, parts, s1f_attention_backward);
    naive_free(&want);
    sequence_free(&x);
}

/* ---- strides of more than 31 bits, in memory of which only what is touched takes any ---- */

typedef struct {
    void *data;
    int64_t bytes;
} mapping;

static mapping map_far(s1f_strides strides, int64_t heads, int64_t rows, int32_t dtype)
{
    mapping m = {.bytes = (heads * strides.head + rows * strides.row) * s1f_dtype_bytes(dtype)};
    m.data = mmap(NULL, (size_t)m.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m.data == MAP_FAILED)
        abort();
    return m;
}

/* Copies the first `rows` rows of every head of batch 0; or compares them. */
static int same_rows(const sequence *x, int32_t dtype, int64_t heads, int64_t rows, void *to, s1f_strides to_strides,
                     const void *from, s1f_strides from_strides, int copy)
{
    int64_t bytes = s1f_dtype_bytes(dtype), same = 1;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t row = 0; row < rows; row++) {
            char *a = (char *)to + s1f_at(to_strides, 0, h, row) * bytes;
            const char *b = (const char *)from + s1f_at(from_strides, 0, h, row) * bytes;
            if (copy)
                memcpy(a, b, (size_t)(x->s.head_dim * bytes));
            same &= memcmp(a, b, (size_t)(x->s.head_dim * bytes)) == 0;
        }
    return (int)same;
}

static void test_far_strides(int32_t dtype)
{
    /* Heads are 2^31 elements apart, and so are the first and the last of 48 rows. */
    s1f_strides far = {.batch = 0, .head = ((int64_t)1 << 31) + 24, .row = ((int64_t)1 << 26) + 8};
    shape s = {dtype, .batch = 1, .heads = 2, .kv_heads = 2, .length = 48, .head_dim = 24};
    sequence near = sequence_new(s), x = near;
    int32_t sums = s1f_dtype_of_sums(dtype);
    void **const places[] = {&x.q, &x.k, &x.v, &x.out, &x.dout, &x.dq, &x.dk, &x.dv};
    enum { NUM_PLACES = sizeof places / sizeof *places };
    mapping maps[NUM_PLACES];

    run_segments(&near, 2, s1f_attention_forward, s1f_attention_backward, NULL);
    for (kind of = OF_Q; of <= OF_V; of++)
        x.of[of].strides = far;
    for (int i = 0; i < NUM_PLACES; i++) {
        maps[i] = map_far(far, s.heads, s.length, i < 6 ? dtype : sums);
        *places[i] = maps[i].data;
    }
    same_rows(&x, dtype, s.heads, s.length, x.q, far, near.q, near.of[OF_Q].strides, 1);
    same_rows(&x, dtype, s.heads, s.length, x.k, far, near.k, near.of[OF_K].strides, 1);
    same_rows(&x, dtype, s.heads, s.length, x.v, far, near.v, near.of[OF_V].strides, 1);
    same_rows(&x, dtype, s.heads, s.length, x.dout, far, near.dout, near.of[OF_OUT].strides, 1);
    x.lse = allocate(s.heads * s.length * s1f_dtype_bytes(sums));
    run_segments(&x, 2, s1f_attention_forward, s1f_attention_backward, NULL);

    int same = same_rows(&x, dtype, s.heads, s.length, x.out, far, near.out, near.of[OF_OUT].strides, 0) &&
               same_rows(&x, dtype, s.heads, s.length, x.dq, far, near.dq, near.of[OF_Q].strides, 0) &&
               same_rows(&x, sums, s.heads, s.length, x.dk, far, near.dk, near.of[OF_K].strides, 0) &&
               same_rows(&x, sums, s.heads, s.length, x.dv, far, near.dv, near.of[OF_V].strides, 0) &&
               memcmp(x.lse, near.lse, (size_t)(s.heads * s.length * s1f_dtype_bytes(sums))) == 0;
    check(same, describe(&s, "strides above 31 bits"));
    for (int i = 0; i < NUM_PLACES; i++)
        munmap(maps[i].data, (size_t)maps[i].bytes);
    free(x.lse);
    sequence_free(&near);
}

static void test_conversions(void)
{
    for (uint32_t bits = 0; bits < 0x10000; bits += small ? 97 : 1) {
        _Float16 half;
        uint16_t raw = (uint16_t)bits;
        memcpy(&half, &raw, sizeof half);
        float ours = s1f_from_fp16(raw), theirs = (float)half;
        check(ours == theirs || (ours != ours && theirs != theirs), "fp16 to float");
        check(ours != ours || s1f_to_fp16(ours) == raw, "float to fp16 and back");
        float wide = s1f_from_bf16(raw);
        check(wide != wide || s1f_to_bf16(wide) == raw, "bf16 to float and back");
    }
    for (int i = 0; i < (small ? 1000 : 1000000); i++) {
        float value = s1f_float_from_bits(i & 1 ? random_bits() : 0x38000000 - 0x04000000 + random_bits() % 0x14000000);
        _Float16 half = (_Float16)value;
        uint16_t raw;
        memcpy(&raw, &half, sizeof raw);
        check(value != value || s1f_to_fp16(value) == raw, "float to fp16");
        double up = s1f_from_bf16((uint16_t)(s1f_to_bf16(value) + 1)), at = s1f_from_bf16(s1f_to_bf16(value));
        check(value != value || !isfinite(up) || fabs(value - at) <= fabs(value - up), "float to the nearest bf16");
    }
    check(isnan(s1f_from_fp16(s1f_to_fp16(NAN))) && isnan(s1f_from_bf16(s1f_to_bf16(NAN))), "NaN stays NaN");
}

static void test_refusals(void)
{
    sequence x = sequence_new((shape){S1F_FLOAT32, .batch = 1, .heads = 4, .kv_heads = 2, .length = 4, .head_dim = 8});
    s1f_attention_args good = segment_args(&x, 0, 4, 1), args;
#define REFUSED(change)                                                                                                \
    do {                                                                                                               \
        args = good;                                                                                                   \
        change;                                                                                                        \
        check(s1f_attention_forward(&args, NULL) == S1F_ERR_ARG, #change " forward");                                  \
        check(s1f_attention_backward(&args, NULL) == S1F_ERR_ARG, #change " backward");                                \
        check(s1f_attention_ref_forward(&args, NULL) == S1F_ERR_ARG, #change " truth");                                \
        check(s1f_attention_scratch_bytes(&args, 1, 0) == 0, #change " scratch");                                      \
    } while (0)
    REFUSED(args.dtype = S1F_INT32);
    REFUSED(args.batch = 0);
    REFUSED(args.heads = 3);
    REFUSED(args.kv_heads = 0);
    REFUSED(args.segment_len = 0);
    REFUSED(args.head_dim = -8);
    REFUSED(args.v_head_dim = 0);
    REFUSED(args.q_start = -1);
    REFUSED(args.window = -1);
    REFUSED(args.softcap = -1);
    REFUSED(args.softcap = NAN);
    REFUSED(args.kept_kv_grads = -1);
    REFUSED(args.kept_kv_grads = 5);
    REFUSED(args.shared_keys = -1);
    REFUSED((args.q_start = 1, args.segment_len = 3, args.shared_keys = 2));
    REFUSED((args.q_start = 1, args.segment_len = 3, args.shared_keys = 1, args.window = 2));
    float slopes[4] = {0};
    REFUSED((args.q_start = 1, args.segment_len = 3, args.shared_keys = 1, args.slopes = slopes));
    /* None; not from key 0 on; a gap; no key; a negative row; too few keys; keys of the segment in two ranges. */
    static const s1f_key_range wrong[][2] = {{{0, 4, 0}},  {{1, 4, 0}}, {{0, 1, 0}, {2, 4, 2}}, {{0, 1, 0}, {1, 1, 2}},
                                             {{0, 4, -1}}, {{0, 3, 0}}, {{0, 2, 0}, {2, 4, 2}}};
    for (int32_t i = 0; i < 7; i++)
        REFUSED((args.ranges = wrong[i], args.num_ranges = i == 0 ? 0 : wrong[i][1].row > 0 ? 2 : 1));
    char tight[64];
    s1f_attention_context context = {.scratch = tight, .scratch_bytes = 1};
    check(s1f_attention_ref_forward(&good, &context) == S1F_ERR_ARG, "scratch too small: truth forward");
    check(s1f_attention_ref_backward(&good, &context) == S1F_ERR_ARG, "scratch too small: truth backward");
    check(s1f_attention_forward(&good, &context) == S1F_ERR_ARG, "scratch too small: forward");
    check(s1f_attention_backward(&good, &context) == S1F_ERR_ARG, "scratch too small: backward");
    check(s1f_attention_set_isa("6502") == S1F_ERR_ARG, "an instruction set that no machine here has");
    sequence_free(&x);
}

/* A sink at -infinity is none, to the bit. */
static void test_no_sinks(void)
{
    for (int d = 0; d < 4; d++) {
        shape s = {dtypes[d], .batch = 2, .heads = 4, .kv_heads = 2, .first = 9, .length = 70, .head_dim = 24};
        sequence x = sequence_new(s);
        run_segments(&x, 2, s1f_attention_forward, s1f_attention_backward, NULL);
        int64_t sum = s1f_dtype_bytes(s1f_dtype_of_sums(s.dtype));
        results_copy without = {
            copy_of(x.out, result_bytes(&x, OF_OUT)), copy_of(x.lse, s.batch * s.heads * s.length * sum),
            copy_of(x.dq, result_bytes(&x, OF_Q)),    copy_of(x.dk, result_bytes(&x, OF_K)),
            copy_of(x.dv, result_bytes(&x, OF_V)),    zeros(s.heads * s.length)};
        x.sinks = allocate(s.heads * sum);
        x.dsinks = allocate(s.heads * s.length * sum);
        fill(s1f_dtype_of_sums(s.dtype), x.sinks, s.heads, -INFINITY);
        clear_results(&x);
        run_segments(&x, 2, s1f_attention_forward, s1f_attention_backward, NULL);
        for (int64_t i = 0; i < s.heads * s.length; i++) /* no -0 */
            put(s1f_dtype_of_sums(s.dtype), x.dsinks, i, 0 + get(s1f_dtype_of_sums(s.dtype), x.dsinks, i));
        check(same_results(&x, &without), describe(&s, "sinks of -infinity change something"));
        void *all[] = {without.out, without.lse, without.dq, without.dk, without.dv, without.dsinks};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
        sequence_free(&x);
    }
}

/* Heads that are not cut into ranges of keys share the scratch of whoever works on them. */
static void test_scratch_of_backward(void)
{
    s1f_attention_args args = {
        .dtype = S1F_BFLOAT16, .batch = 1, .segment_len = 4096, .head_dim = 128, .v_head_dim = 128};
    int64_t bytes[2], one_head = 4096 * 128 * (int64_t)sizeof(float);
    for (int i = 0; i < 2; i++) {
        args.heads = args.kv_heads = 32 << i;
        bytes[i] = s1f_attention_scratch_bytes(&args, 2, 1);
    }
    check(bytes[0] == bytes[1], "scratch of backward does not grow with the heads");
    check(bytes[0] < 2 * 4 * one_head, "scratch of backward: two threads, q, dout, dq and their blocks of keys");
}

/* ---- what is run ---- */

static const struct {
    int64_t heads, kv_heads;
} head_counts[] = {{1, 1}, {4, 4}, {4, 2}, {4, 1}};

static void test_truths(void)
{
    for (int d = 0; d < 4; d++)
        for (int heads = 0; heads < 4; heads++)
            for (int options = 0; options < 16; options += small ? 5 : 1) {
                shape s = {dtypes[d],
                           .batch = 1 + options % 2,
                           .heads = head_counts[heads].heads,
                           .kv_heads = head_counts[heads].kv_heads,
                           .first = options % 3 * 5,
                           .length = 23,
                           .head_dim = heads == 1 ? 70 : 5,
                           .v_head_dim = heads == 1   ? 3
                                         : heads == 2 ? 66
                                                      : 0,
                           .tokens_outside = heads & 1,
                           .window = options & 1 ? 6 : 0,
                           .softcap = options & 2 ? 1.5 : 0,
                           .alibi = options & 4 ? 0.3 : 0,
                           .num_docs = options & 8 ? 3 : 0,
                           .shares_prefix = options == 8 || options == 10,
                           .ranges = options % 5,
                           .sinks = options % 3 == 1 ? SINKS : NO_SINKS};
                test_truth(s);
            }
}

/* Options over more than two blocks of 192 keys and 48 rows, so that some are skipped, some cut and some whole. */
static void test_options(int isa)
{
    static const shape cases[] = {
        {.window = 1},
        {.window = 100},
        {.window = 192},
        {.window = 250},
        {.window = INT64_MAX},
        {.softcap = 1.5},
        {.softcap = 30, .logits = 1e4},
        {.alibi = 0.3},
        {.alibi = -0.02},
        {.num_docs = 4},
        {.num_docs = 130},
        {.num_docs = 4, .docs_return = 1},
        {.num_docs = 4, .docs_return = 1, .window = 250},
        {.num_docs = 3, .window = 100, .softcap = 1.5, .alibi = 0.3},
        {.scaling = NEGATIVE},
        {.scaling = NEGATIVE, .softcap = 1.5, .window = 250},
        {.scaling = ZERO, .num_docs = 3},
        {.same_keys = 1},
        {.same_keys = 1, .logits = 1e4, .window = 100},
        {.logits = 1e4, .num_docs = 4},
        {.sinks = SINKS},
        {.sinks = SINKS, .num_docs = 3, .window = 100, .softcap = 1.5, .alibi = 0.3},
        {.sinks = SINKS, .logits = 1e4},
        {.sinks = FAR_SINKS, .window = 250},
        {.v_head_dim = 40, .num_docs = 4},
        {.ranges = 2},
        {.ranges = 5, .num_docs = 4, .v_head_dim = 40},
        {.ranges = 4, .window = 100, .softcap = 1.5, .alibi = 0.3, .sinks = SINKS},
        {.ranges = 3, .num_docs = 4, .docs_return = 1, .shares_prefix = 1},
        {.num_docs = 130, .shares_prefix = 1, .softcap = 1.5, .sinks = SINKS},
        {.v_head_dim = 5, .sinks = SINKS, .num_docs = 3, .window = 100, .softcap = 1.5, .alibi = 0.3},
    };
    static const int64_t head_dims[] = {8, 24, 8, 20};
    static const struct {
        int64_t first, length;
    } rows[] = {{0, 420}, {131, 450}, {400, 405}};
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        for (int d = 1; d < 4; d++) {
            if (medium && d != 1 + (i + isa) % 3)
                continue; /* for time; the instruction sets together have all */
            shape s = cases[i];
            int heads = (i + d) % 4, turn = (i + d) % 3;
            s.dtype = dtypes[d];
            s.batch = 1 + i % 2;
            s.heads = s1f_min(2, head_counts[heads].heads);
            s.kv_heads = s1f_min(2, head_counts[heads].kv_heads);
            s.first = rows[turn].first;
            s.length = small ? rows[turn].length % 200 + rows[turn].first : rows[turn].length;
            s.head_dim = head_dims[(i + d) % 4];
            s.tokens_outside = i & 1;
            test_chosen(s, i % 4 == isa % 4);
        }
}

static void test_shapes(int isa)
{
    static const int64_t head_dims[] = {8, 32, 64, 80, 96, 128, 256, 20, 41, 24, 1};
    static const struct {
        int64_t k, v;
    } v_head_dims[] = {{192, 128}, {64, 192}, {24, 1}, {41, 20}, {7, 256}, {16, 300}};
    static const struct {
        int64_t first, length;
    } rows[] = {{0, 1},   {0, 7},    {0, 113},  {0, 129},   {0, 257},   {1, 2},
                {33, 40}, {17, 146}, {64, 128}, {255, 256}, {391, 504}, {131, 388}};
    int num_rows = sizeof rows / sizeof *rows, num_dims = small ? 4 : (int)(sizeof head_dims / sizeof *head_dims);
    for (int d = small ? 1 : 0; d < 4; d++)
        for (int dim = 0; dim < num_dims; dim += medium ? 2 : 1)
            for (int row = 0; row < num_rows; row += small ? 6 : medium ? 3 : 1) {
                int heads = (dim + row + d) % 4;
                int64_t longest = dtypes[d] == S1F_FLOAT64 ? 40 : head_dims[dim] == 64 ? 600 : 260;
                longest = head_dims[dim] > 100 ? s1f_min(longest, 150) : longest;
                if (rows[row].length > longest || (medium && !small && (dim / 2 + row / 3 + d + isa) % 2))
                    continue; /* for time; fp64 is the truth, tested above */
                test_chosen((shape){dtypes[d], .batch = 1 + (dim + row) % 2, .heads = head_counts[heads].heads,
                                    .kv_heads = head_counts[heads].kv_heads, .first = rows[row].first,
                                    .length = rows[row].length, .head_dim = head_dims[dim],
                                    .tokens_outside = (row + d) & 1},
                            dim < 3 || row == 3);
            }
    for (size_t i = 0; i < sizeof v_head_dims / sizeof *v_head_dims; i++)
        for (int d = 1; d < 4; d++)
            if (!medium || d == 1 + ((int)i + isa) % 3)
                test_chosen((shape){dtypes[d], .batch = 1, .heads = 4, .kv_heads = 2, .first = few ? 3 : 61,
                                    .length = few ? 31 : 270, .head_dim = v_head_dims[i].k,
                                    .v_head_dim = v_head_dims[i].v, .tokens_outside = (int)i & 1,
                                    .sinks = i % 3 == 0 ? SINKS : NO_SINKS},
                            i == 0);
    for (int options = 1; options < 16; options += few ? 7 : 1)
        test_chosen((shape){S1F_FLOAT32, .batch = 2, .heads = 4, .kv_heads = 2, .first = small ? 9 : 60,
                            .length = small ? 21 : 150, .head_dim = 32, .window = options & 1 ? 40 : 0,
                            .softcap = options & 2 ? 1.5 : 0, .alibi = options & 4 ? 0.3 : 0,
                            .num_docs = options & 8 ? 3 : 0},
                    1);
    test_chosen((shape){S1F_FLOAT32, .batch = 1, .heads = 1, .kv_heads = 1, .first = 131, .length = 388, .head_dim = 8},
                1);
    for (int d = 1; d < 4; d++)
        test_chosen((shape){dtypes[d], .batch = 1, .heads = 2, .kv_heads = 1, .first = 5, .length = small ? 30 : 200,
                            .head_dim = 64, .logits = 1e4},
                    1);
    if (small)
        return; /* for time; and valgrind has not so much address space */
    /* A few: of one dtype, and the instruction sets together have all. */
    int first = few ? 1 + isa % 3 : 1, step = few ? 3 : 1;
    static const int64_t odd[] = {113, 120, 121, 512};
    for (int d = first; d < 4; d += step)
        test_chosen((shape){dtypes[d], .batch = 1, .heads = 2, .kv_heads = 1, .length = 512, .head_dim = 24, .parts = 4,
                            .cuts = odd, .window = d == 2 ? 250 : 0},
                    0);
    /* One head, of several tasks per pass. */
    test_chosen((shape){S1F_FLOAT32, .batch = 1, .heads = 1, .kv_heads = 1, .length = 1300, .head_dim = 8}, 1);
    test_chosen((shape){S1F_BFLOAT16, .batch = 1, .heads = 1, .kv_heads = 1, .length = 1300, .head_dim = 8,
                        .window = 700, .num_docs = 3},
                1);
    /* Four heads over one kv head, whose rows are too many for one pass over the keys. */
    for (int d = first; d < 4; d += step)
        test_chosen((shape){dtypes[d], .batch = 1, .heads = 4, .kv_heads = 1, .first = 70, .length = 780,
                            .head_dim = 16, .window = d == 2 ? 250 : 0, .num_docs = d == 3 ? 4 : 0},
                    1);
    /* Eight heads: one range of keys each, but two of the last ones, whose tasks are finer. */
    for (int d = first; d < 4; d += step)
        test_chosen((shape){dtypes[d], .batch = 2, .heads = d == 3 ? 8 : 4, .kv_heads = 4, .first = 300, .length = 620,
                            .head_dim = 8, .window = d == 2 ? 250 : 0},
                    1);
    for (int d = 1; d < 4; d++)
        test_far_strides(dtypes[d]);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"portable", "neon", "avx2", "avx512", "avx512bf16"};
    small = argc > 1 && (strcmp(argv[1], "valgrind") == 0 || strcmp(argv[1], "aarch64") == 0);
    few = small || (argc > 1 && strcmp(argv[1], "sanitize") == 0);
    medium = few || (argc > 1 && strcmp(argv[1], "plain") == 0);
    test_conversions();
    test_refusals();
    test_truths();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int64_t before = num_checks;
        if (s1f_attention_set_isa(names[i]) != S1F_OK) {
            printf("%-10s not on this machine\n", names[i]);
            continue;
        }
        test_shapes((int)i);
        test_options((int)i);
        test_no_sinks();
        test_scratch_of_backward();
        printf("%-10s %lld checks\n", names[i], (long long)(num_checks - before));
    }
    printf("%lld checks, %lld failed\n", (long long)num_checks, (long long)num_failed);
    return num_failed != 0;
}
