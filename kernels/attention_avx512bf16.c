/* attention_avx512bf16.c - blocked attention of bf16 on AVX-512 with dot products of bf16 pairs. */
#include "attention_avx512.inc.h"

#define OPERAND_PAIRS 1
#define VEC_DOT(a, b, c) dot_pairs(a, b, c)
#define VEC_STORE_BF16(p, x) _mm256_storeu_si256((__m256i *)(void *)(p), (__m256i)_mm512_cvtneps_pbh(x))
#define VEC_JOIN_BF16(a, b) join_pairs(a, b)

/* By hand: GCC 12 moves the sums of the intrinsic to the stack. */
static inline __attribute__((always_inline)) __m512 dot_pairs(__m512 a, __m512 b, __m512 c)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}

static inline __m512 join_pairs(__m512 a, __m512 b)
{
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#define KERNELS s1f_attention_avx512bf16
#define KERNELS_NAME "avx512bf16"
#include "attention_blocked.inc.h"
