/* attention_portable.c - blocked attention in the compiler's own vectors of 4 floats, for any machine: micro-tiles of
 * 6 x 8 fit the 16 registers that SSE2 and NEON have at least. */
#include <stdint.h>

typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_bits __attribute__((vector_size(16)));
typedef uint32_t vec_unsigned __attribute__((vector_size(16)));
#define VEC_LANES 4
#define TILE_VECS 2
#define VEC_ALL(s) ((vec){s, s, s, s})
#define VEC_MAX(a, b) choose((a) > (b), a, b)
#define VEC_FMA(a, b, c) ((a) * (b) + (c))
#define VEC_FIRST(x, n, other) choose((vec_bits){0, 1, 2, 3} < (int32_t)(n), x, other)
#define VEC_HIGHEST(x) highest_lane(x)
/* Clamped to [-127, 127]: the exponent that 2^-127 would need is that of 0. Adding 1.5 2^23 rounds to a whole number,
 * which then stands in the low bits. */
#define VEC_EXP2_SPLIT(x, whole, part)                                                                                 \
    do {                                                                                                               \
        vec clamped_ = VEC_MAX(VEC_ALL(-127.0f), x);                                                                   \
        clamped_ = choose(clamped_ > VEC_ALL(127.0f), VEC_ALL(127.0f), clamped_);                                      \
        (whole) = clamped_ + VEC_ALL(0x1.8p23f);                                                                       \
        (part) = clamped_ - VEC_SUB(whole, VEC_ALL(0x1.8p23f));                                                        \
    } while (0)
#define VEC_EXP2_JOIN(p, whole) ((p) * (vec)(((vec_unsigned)(whole) + 127) << 23))

static inline vec choose(vec_bits which, vec yes, vec no)
{
    return (vec)((which & (vec_bits)yes) | (~which & (vec_bits)no));
}

static inline float highest_lane(vec x)
{
    float two = x[0] > x[1] ? x[0] : x[1], other = x[2] > x[3] ? x[2] : x[3];
    return two > other ? two : other;
}

#define KERNELS s1f_attention_portable
#define KERNELS_NAME "portable"
#include "attention_blocked.inc.h"
