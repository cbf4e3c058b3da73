/* attention_avx512bf16.c - blocked attention of bf16 on AVX-512 with dot products of bf16 pairs. */
#include "attention_avx512.inc.h"

#define OPERAND_PAIRS 1
#define VEC_DOT(a, b, c) dot_pairs(a, b, c)
#define VEC_STORE_BF16(p, x) _mm256_storeu_si256((__m256i *)(void *)(p), (__m256i)_mm512_cvtneps_pbh(x))
#define VEC_JOIN_BF16(a, b) join_pairs(a, b)

/* Written by hand, for GCC 12 moves the sums of the intrinsic to the stack. */
static inline __attribute__((always_inline)) __m512 dot_pairs(__m512 a, __m512 b, __m512 c)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}

/* One instruction rounds both, a second one interleaves them. */
static inline __attribute__((always_inline)) __m512 join_pairs(__m512 a, __m512 b)
{
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
}

#define KERNELS s1f_attention_avx512bf16
#define KERNELS_NAME "avx512bf16"
#include "attention_blocked.inc.h"
