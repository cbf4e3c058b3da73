/* attention_micro.inc.h - the inner loops of blocked attention, in terms of one instruction set's vectors.
 *
 * Included by attention_blocked.inc.h. Before it, the file of the instruction set defines
 *   vec, VEC_LANES, TILE_VECS          a vector of floats; its length; vectors of a micro-tile's row
 *   VEC_ALL(s)                         s in all lanes
 *   VEC_MAX(a, b)                      b where either is NaN
 *   VEC_FMA(a, b, c)                   a b + c
 *   VEC_FIRST(x, n, other)             x in the first n lanes, 0 <= n <= VEC_LANES, and other in the rest
 *   VEC_HIGHEST(x)                     the largest lane
 *   VEC_EXP2_SPLIT(x, whole, part), VEC_EXP2_JOIN(p, whole)   x = whole + part, |part| <= 1/2; p 2^whole, 0 if tiny
 * and, where products are of bf16 and not of fp32,
 *   OPERAND_PAIRS                      1
 *   VEC_DOT(a, b, c)                   a b + c, the products of a pair of bf16 summed
 *   VEC_STORE_BF16(p, x)               VEC_LANES bf16, rounded to nearest even
 *   VEC_JOIN_BF16(a, b)                pairs (a, b), rounded to nearest even
 *
 * An operand is 32 bits: one float, or a pair of bf16 that lie next to each other along the depth of a product. With
 * that, both kinds of product are one loop. A micro-tile is TILE_ROWS x TILE_VECS vectors of sums, as many as registers
 * hold. */

#if defined(__SSE__)
#include <immintrin.h>
#endif

/* The compiler's own operations, of vectors of any length; and memory that need not be aligned. */
typedef vec vec_in_memory __attribute__((aligned(4), may_alias));
#define VEC_LOAD(p) ((vec)(*(const vec_in_memory *)(const void *)(p)))
#define VEC_STORE(p, x) (*(vec_in_memory *)(void *)(p) = (x))
#define VEC_ADD(a, b) ((a) + (b))
#define VEC_SUB(a, b) ((a) - (b))
#define VEC_MUL(a, b) ((a) * (b))
#define VEC_DIV(a, b) ((a) / (b))

#ifndef OPERAND_PAIRS
#define OPERAND_PAIRS 0
#define VEC_DOT(a, b, c) VEC_FMA(a, b, c)
#endif

enum {
    TILE_ROWS = 6,
    PANEL = TILE_VECS * VEC_LANES, /* columns of a micro-tile */
    PER_OPERAND = 1 + OPERAND_PAIRS,
};

typedef float operand __attribute__((may_alias));

_Static_assert(TILE_ROWS % PER_OPERAND == 0, "a pair of rows lies in one micro-tile");

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static inline int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

/* C[r][..] (+)= sum_k a[r a_row + k a_k] b[k b_k + ..]: TILE_ROWS rows, `vecs` vectors wide. */
ALWAYS_INLINE void multiply_tile(float *c, int64_t c_row, const operand *a, int64_t a_row, int64_t a_k,
                                 const operand *b, int64_t b_k, int64_t depth, int add, const int vecs)
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
                sums[r][v] = VEC_DOT(x, row[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            VEC_STORE(c + r * c_row + v * VEC_LANES, sums[r][v]);
}

/* TILE_VECS is 2 or 4. */
#define BY_WIDTH(vecs, call)                                                                                           \
    if (vecs == 1)                                                                                                     \
        call(1);                                                                                                       \
    else if (TILE_VECS == 4 && vecs == 2)                                                                              \
        call(2);                                                                                                       \
    else if (TILE_VECS == 4 && vecs == 3)                                                                              \
        call(3);                                                                                                       \
    else                                                                                                               \
        call(TILE_VECS);

/* C = A B over the first `columns` of a packed panel: at most all, rounded up to whole vectors, none if below 1. */
static void multiply_panel(float *c, int64_t c_row, const operand *a, int64_t a_row, const operand *b, int64_t depth,
                           int64_t columns)
{
    int64_t vecs = (columns + VEC_LANES - 1) / VEC_LANES;
    if (columns > 0) {
#define CALL(width) multiply_tile(c, c_row, a, a_row, 1, b, PANEL, depth, 0, width)
        BY_WIDTH(vecs, CALL)
#undef CALL
    }
}

/* C += A B over `dim` columns, a multiple of VEC_LANES; B has rows of `dim`, and A[r][k] = a[r a_row + k a_k]. The
 * columns are dealt out evenly, so that no tile is left too narrow to hide the latency of its sums. */
ALWAYS_INLINE void multiply_add(float *c, const operand *a, int64_t a_row, int64_t a_k, const operand *b, int64_t depth,
                                int64_t dim)
{
    int64_t left = dim / VEC_LANES;
    for (int64_t tiles = (left + TILE_VECS - 1) / TILE_VECS; tiles > 0; tiles--) {
        int64_t vecs = (left + tiles - 1) / tiles;
#define CALL(width) multiply_tile(c, dim, a, a_row, a_k, b, dim, depth, 1, width)
        BY_WIDTH(vecs, CALL)
#undef CALL
        c += vecs * VEC_LANES;
        b += vecs * VEC_LANES;
        left -= vecs;
    }
}

/* (2^x - 1) / x on [-1/2, 1/2]: degree 4, minimax for 2^x. */
ALWAYS_INLINE vec exp2_slope(vec x)
{
    vec p = VEC_FMA(VEC_ALL(0.001326472731307149f), x, VEC_ALL(0.009671512991189957f));
    p = VEC_FMA(p, x, VEC_ALL(0.05550733581185341f));
    p = VEC_FMA(p, x, VEC_ALL(0.24022242426872253f));
    return VEC_FMA(p, x, VEC_ALL(0.6931470036506653f));
}

/* 2^x within 2e-7 relative, 0 below 2^-126 or so; exact at 0. */
ALWAYS_INLINE vec exp2_vec(vec x)
{
    vec whole, part;
    VEC_EXP2_SPLIT(x, whole, part);
    return VEC_EXP2_JOIN(VEC_FMA(exp2_slope(part), part, VEC_ALL(1.0f)), whole);
}

ALWAYS_INLINE float sum_of_lanes(vec x)
{
    float lanes[VEC_LANES], sum = 0;
    VEC_STORE(lanes, x);
    for (int i = 0; i < VEC_LANES; i++)
        sum += lanes[i];
    return sum;
}

/* tanh within 3e-7 relative: (e - 1) / (e + 1) with e = 2^x, x = 2 log2(e) y, where e - 1 is formed without the 1 of
 * exp2's polynomial, so that small y lose nothing. From |x| = 40 on it is 1. */
ALWAYS_INLINE vec tanh_vec(vec y)
{
    vec x = VEC_MUL(y, VEC_ALL(2.885390081777927f)), whole, part, p;
    x = VEC_MAX(VEC_SUB(VEC_ALL(0), VEC_MAX(VEC_SUB(VEC_ALL(0), x), VEC_ALL(-40))), VEC_ALL(-40));
    VEC_EXP2_SPLIT(x, whole, part);
    p = exp2_slope(part);
    p = VEC_MUL(p, part); /* 2^part - 1 */
    vec scaled = VEC_EXP2_JOIN(p, whole), power = VEC_EXP2_JOIN(VEC_ALL(1), whole);
    return VEC_DIV(VEC_ADD(scaled, VEC_SUB(power, VEC_ALL(1))), VEC_ADD(scaled, VEC_ADD(power, VEC_ALL(1))));
}
