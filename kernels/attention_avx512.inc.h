/* attention_avx512.inc.h - vectors of AVX-512 (F, BW, DQ, VL): 32 registers of 16 floats, micro-tiles of 6 x 64. */
#include <immintrin.h>

typedef __m512 vec;
#define VEC_LANES 16
#define TILE_VECS 4
#define VEC_ALL(s) _mm512_set1_ps(s)
#define VEC_MAX(a, b) _mm512_max_ps(a, b)
#define VEC_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define VEC_FIRST(x, n, other) _mm512_mask_mov_ps(other, (__mmask16)((1u << (n)) - 1), x)
#define VEC_HIGHEST(x) _mm512_reduce_max_ps(x)
#define VEC_EXP2_SPLIT(x, whole, part)                                                                                 \
    ((whole) = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), (part) = _mm512_sub_ps(x, whole))
#define VEC_EXP2_JOIN(p, whole) _mm512_scalef_ps(p, whole)
