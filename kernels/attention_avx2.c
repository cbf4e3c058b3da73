/* attention_avx2.c - blocked attention on AVX2 and FMA: 16 registers of 8 floats, micro-tiles of 6 x 16. */
#include <immintrin.h>
#include <stdint.h>

typedef __m256 vec;
#define VEC_LANES 8
#define TILE_VECS 2
#define VEC_ALL(s) _mm256_set1_ps(s)
#define VEC_MAX(a, b) _mm256_max_ps(a, b)
#define VEC_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define VEC_FIRST(x, n, other) _mm256_blendv_ps(other, x, first_lanes(n))
#define VEC_HIGHEST(x) highest_lane(x)
/* Clamped to [-127, 127]: the exponent that 2^-127 would need is that of 0. max and min hand on a NaN in x. */
#define VEC_EXP2_SPLIT(x, whole, part)                                                                                 \
    do {                                                                                                               \
        vec clamped_ = _mm256_min_ps(_mm256_set1_ps(127), _mm256_max_ps(_mm256_set1_ps(-127), x));                     \
        (whole) = _mm256_round_ps(clamped_, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);                            \
        (part) = _mm256_sub_ps(clamped_, whole);                                                                       \
    } while (0)
#define VEC_EXP2_JOIN(p, whole)                                                                                        \
    _mm256_mul_ps(p, _mm256_castsi256_ps(                                                                              \
                         _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23)))

static inline __m256 first_lanes(int64_t n)
{
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes));
}

static inline float highest_lane(__m256 x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#define KERNELS s1f_attention_avx2
#define KERNELS_NAME "avx2"
#include "attention_blocked.inc.h"
