/* attention_micro.inc.h - the inner loops of blocked attention, in terms of one instruction set's vectors.
 *
 * Included by attention_blocked.inc.h. Before it, the file of the instruction set defines
 *   vec, VEC_LANES, TILE_VECS          a vector of floats; its length; vectors of a micro-tile's row
 *   VEC_LOAD(p) VEC_STORE(p, x)        unaligned
 *   VEC_ALL(s) VEC_ADD VEC_SUB VEC_MUL VEC_MAX(a, b)   b where either is NaN
 *   VEC_FMA(a, b, c)                   a b + c
 *   VEC_FIRST(x, n, other)             x in the first n lanes, 0 <= n <= VEC_LANES, and other in the rest
 *   VEC_HIGHEST(x)                     the largest lane
 *   VEC_EXP2_SPLIT(x, whole, part), VEC_EXP2_JOIN(p, whole)   x = whole + part, |part| <= 1/2; p 2^whole, 0 if tiny
 *
 * A micro-tile is TILE_ROWS x TILE_VECS vectors of sums, as many as registers hold. All operands are fp32. */

#if defined(__SSE__)
#include <immintrin.h>
#endif

enum {
    TILE_ROWS = 6,
    PANEL = TILE_VECS * VEC_LANES, /* columns of a micro-tile */
};

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static inline int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

/* C[r][..] (+)= sum_k a[r a_row + k a_k] b[k b_k + ..]: TILE_ROWS rows, `vecs` vectors wide. */
ALWAYS_INLINE void multiply_tile(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_k, const float *b,
                                 int64_t b_k, int64_t depth, int add, const int vecs)
{
    vec sums[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            sums[r][v] = add ? VEC_LOAD(c + r * c_row + v * VEC_LANES) : VEC_ALL(0);
    for (int64_t k = 0; k < depth; k++, a += a_k, b += b_k) {
        vec row[TILE_VECS];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            row[v] = VEC_LOAD(b + v * VEC_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; r++) {
            vec x = VEC_ALL(a[r * a_row]);
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++)
                sums[r][v] = VEC_FMA(x, row[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            VEC_STORE(c + r * c_row + v * VEC_LANES, sums[r][v]);
}

#if TILE_VECS == 4
#define BY_WIDTH(vecs, call)                                                                                           \
    switch (vecs) {                                                                                                    \
    case 1: call(1); break;                                                                                            \
    case 2: call(2); break;                                                                                            \
    case 3: call(3); break;                                                                                            \
    default: call(4); break;                                                                                           \
    }
#elif TILE_VECS == 2
#define BY_WIDTH(vecs, call)                                                                                           \
    switch (vecs) {                                                                                                    \
    case 1: call(1); break;                                                                                            \
    default: call(2); break;                                                                                           \
    }
#endif

/* C = A B over the first `columns` of a packed panel: at most all, rounded up to whole vectors, none if below 1. */
static void multiply_panel(float *c, int64_t c_row, const float *a, int64_t a_row, const float *b, int64_t depth,
                           int64_t columns)
{
    int64_t vecs = (columns + VEC_LANES - 1) / VEC_LANES;
    if (columns > 0) {
#define CALL(width) multiply_tile(c, c_row, a, a_row, 1, b, PANEL, depth, 0, width)
        BY_WIDTH(vecs, CALL)
#undef CALL
    }
}

/* C += A B over `dim` columns, a multiple of VEC_LANES; B has rows of `dim`. The columns are dealt out evenly, so that
 * no tile is left too narrow to hide the latency of its sums. */
static void multiply_add(float *c, const float *a, int64_t a_row, const float *b, int64_t depth, int64_t dim)
{
    int64_t left = dim / VEC_LANES;
    for (int64_t tiles = (left + TILE_VECS - 1) / TILE_VECS; tiles > 0; tiles--) {
        int64_t vecs = (left + tiles - 1) / tiles;
#define CALL(width) multiply_tile(c, dim, a, a_row, 1, b, dim, depth, 1, width)
        BY_WIDTH(vecs, CALL)
#undef CALL
        c += vecs * VEC_LANES;
        b += vecs * VEC_LANES;
        left -= vecs;
    }
}

/* The same with A transposed: A[r][k] = a[k a_k + r]. */
static void multiply_add_transposed(float *c, const float *a, int64_t a_k, const float *b, int64_t depth, int64_t dim)
{
    int64_t left = dim / VEC_LANES;
    for (int64_t tiles = (left + TILE_VECS - 1) / TILE_VECS; tiles > 0; tiles--) {
        int64_t vecs = (left + tiles - 1) / tiles;
#define CALL(width) multiply_tile(c, dim, a, 1, a_k, b, dim, depth, 1, width)
        BY_WIDTH(vecs, CALL)
#undef CALL
        c += vecs * VEC_LANES;
        b += vecs * VEC_LANES;
        left -= vecs;
    }
}

/* 2^x within 2e-7 relative, 0 below 2^-126 or so; exact at 0. Degree 5, minimax on [-1/2, 1/2] with p(0) = 1. */
ALWAYS_INLINE vec exp2_vec(vec x)
{
    vec whole, part, p;
    VEC_EXP2_SPLIT(x, whole, part);
    p = VEC_FMA(VEC_ALL(0.001326472731307149f), part, VEC_ALL(0.009671512991189957f));
    p = VEC_FMA(p, part, VEC_ALL(0.05550733581185341f));
    p = VEC_FMA(p, part, VEC_ALL(0.24022242426872253f));
    p = VEC_FMA(p, part, VEC_ALL(0.6931470036506653f));
    p = VEC_FMA(p, part, VEC_ALL(1.0f));
    return VEC_EXP2_JOIN(p, whole);
}

ALWAYS_INLINE float sum_of_lanes(vec x)
{
    float lanes[VEC_LANES], sum = 0;
    VEC_STORE(lanes, x);
    for (int i = 0; i < VEC_LANES; i++)
        sum += lanes[i];
    return sum;
}

/* ---- packing: rows of any dtype become fp32 rows of `dim` >= n, zero from n on ---- */

static void widen_row(int32_t dtype, const void *x, int64_t ix, int64_t n, float factor, float *row, int64_t dim)
{
    if (dtype == S1F_FLOAT32) {
        const float *from = (const float *)x + ix;
        int64_t c = 0;
        for (; c + VEC_LANES <= n; c += VEC_LANES)
            VEC_STORE(row + c, VEC_MUL(VEC_ALL(factor), VEC_LOAD(from + c)));
        for (; c < n; c++)
            row[c] = factor * from[c];
    } else if (dtype == S1F_BFLOAT16) {
        const uint16_t *from = (const uint16_t *)x + ix;
        for (int64_t c = 0; c < n; c++)
            row[c] = factor * s1f_from_bf16(from[c]);
    } else {
        const uint16_t *from = (const uint16_t *)x + ix;
        for (int64_t c = 0; c < n; c++)
            row[c] = factor * s1f_from_fp16(from[c]);
    }
    for (int64_t c = n; c < dim; c++)
        row[c] = 0;
}

static void narrow_row(int32_t dtype, void *x, int64_t ix, int64_t n, float factor, const float *row)
{
    if (dtype == S1F_FLOAT32)
        for (int64_t c = 0; c < n; c++)
            ((float *)x)[ix + c] = factor * row[c];
    else if (dtype == S1F_BFLOAT16)
        for (int64_t c = 0; c < n; c++)
            ((uint16_t *)x)[ix + c] = s1f_to_bf16(factor * row[c]);
    else
        for (int64_t c = 0; c < n; c++)
            ((uint16_t *)x)[ix + c] = s1f_to_fp16(factor * row[c]);
}

/* to[c to_row + r] = from[r from_row + c], 4 x 4 */
static inline void transpose_4x4(const float *from, int64_t from_row, float *to, int64_t to_row)
{
#if defined(__SSE__)
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_row), c = _mm_loadu_ps(from + 2 * from_row),
           d = _mm_loadu_ps(from + 3 * from_row);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_row, b);
    _mm_storeu_ps(to + 2 * to_row, c);
    _mm_storeu_ps(to + 3 * to_row, d);
#else
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++)
            to[c * to_row + r] = from[r * from_row + c];
#endif
}

/* `rows` (a multiple of 4) of (rows, dim) become panels of PANEL columns, each (dim, PANEL): the transpose, as
 * multiply_panel reads it. */
static void transpose_to_panels(const float *from, int64_t rows, int64_t dim, float *panels)
{
    for (int64_t row = 0; row < rows; row += 4) {
        float *to = panels + row / PANEL * PANEL * dim + row % PANEL;
        for (int64_t c = 0; c < dim; c += 4)
            transpose_4x4(from + row * dim + c, dim, to + c * PANEL, PANEL);
    }
}
