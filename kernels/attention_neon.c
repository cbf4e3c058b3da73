/* attention_neon.c - blocked attention on aarch64: 32 registers of 4 floats, micro-tiles of 6 x 16. */
#include <arm_neon.h>
#include <stdint.h>

typedef float32x4_t vec;
#define VEC_LANES 4
#define TILE_VECS 4
#define VEC_ALL(s) vdupq_n_f32(s)
#define VEC_MAX(a, b) greater(a, b)
#define VEC_FMA(a, b, c) vfmaq_f32(c, a, b)
#define VEC_FIRST(x, n, other) vbslq_f32(first_lanes(n), x, other)
#define VEC_HIGHEST(x) vmaxnmvq_f32(x)
/* Clamped to [-127, 127]: the exponent that 2^-127 would need is that of 0. max and min hand on a NaN in x. */
#define VEC_EXP2_SPLIT(x, whole, part)                                                                                 \
    do {                                                                                                               \
        vec clamped_ = vminq_f32(vdupq_n_f32(127), vmaxq_f32(vdupq_n_f32(-127), x));                                   \
        (whole) = vrndnq_f32(clamped_);                                                                                \
        (part) = vsubq_f32(clamped_, whole);                                                                           \
    } while (0)
#define VEC_EXP2_JOIN(p, whole)                                                                                        \
    vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23)))

static inline uint32x4_t first_lanes(int64_t n)
{
    static const int32_t lanes[VEC_LANES] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(lanes), vdupq_n_s32((int32_t)n));
}

/* vmaxq_f32 would hand on a NaN in a. */
static inline vec greater(vec a, vec b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

#define KERNELS s1f_attention_neon
#define KERNELS_NAME "neon"
#include "attention_blocked.inc.h"
